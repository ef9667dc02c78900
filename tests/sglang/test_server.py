"""A real server: pages survive flush, kill -9 and injected faults; admin endpoints; TP=2.

Starting a server takes 15-50 s, so one is shared by most tests; each uses prompts of its own.
Weights are random and logits close together: a wrong KV page changes the output.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deployment import (
    FINE_LOGPROB,
    PROMPT_HIT,
    PROMPT_TOKENS,
    Deployment,
    assert_from_storage,
    make_prompt,
)
from sglang_cpu.backends import PAGE_TOKENS, TUTTI_OPTIONS, Backend
from sglang_cpu.make_model import ensure_model
from sglang_cpu.server import STORAGE_PATH, ServerError, SGLangServer, stored_pages, wait_until


@pytest.fixture(scope="module")
def shared(
    model: Path, backend_name: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("shared")
    backend = Backend(backend_name, folder / "store")
    backend.folder.mkdir()
    # Metrics make the scheduler call the backend's get_stats at each step.
    flags = ["--enable-metrics"]
    with Deployment(model, backend, folder / "server.log", flags=flags) as deployment:
        yield deployment


# ---- one server ------------------------------------------------------------------------------


def test_prefix_comes_back_after_flush(shared: Deployment) -> None:
    prompt = make_prompt("flush")
    cold = shared.generate_and_settle(prompt)
    assert cold.cached.total == 0
    shared.server.flush()
    assert_from_storage(shared.server.generate(prompt), cold)
    again = shared.server.generate(prompt)
    assert again.cached.device == PROMPT_HIT
    assert again.same_output(cold)


def test_longer_prompt_reuses_the_stored_prefix(shared: Deployment) -> None:
    prompt = make_prompt("longer", 200)
    cold = shared.generate_and_settle(prompt)
    shared.server.flush()
    longer = [*prompt, *cold.output_ids, *make_prompt("longer, next turn", 150)]
    reply = shared.server.generate(longer)
    known = len(prompt) + len(cold.output_ids) - 1
    assert reply.cached.storage == known // PAGE_TOKENS * PAGE_TOKENS, reply.cached
    assert reply.same_output(shared.server.generate(longer, namespace="longer, from scratch"))


def test_namespaces_share_nothing(shared: Deployment) -> None:
    prompt = make_prompt("namespaces")
    cold = shared.generate_and_settle(prompt)
    shared.server.flush()
    reply = shared.server.generate(prompt, namespace="another tenant")
    assert reply.cached.total == 0
    assert reply.same_output(cold)


def test_requests_at_once(shared: Deployment) -> None:
    """Lookup, read and write run in three threads of the backend while requests are batched."""
    stem = make_prompt("at once", 160)
    prompts = [[*stem, *make_prompt(f"at once {i}", 160)] for i in range(8)]
    cold = [shared.generate_and_settle(prompts[0])]
    before = shared.backend.usage().pages
    cold += [shared.server.generate(prompt) for prompt in prompts[1:]]
    shared.await_pages(before + (len(prompts) - 1) * 160 // PAGE_TOKENS)
    shared.server.flush()
    with ThreadPoolExecutor(len(prompts)) as pool:
        warm = list(pool.map(shared.server.generate, prompts))
    assert sum(reply.cached.storage for reply in warm) >= len(prompts) * 144
    for reply, once in zip(warm, cold, strict=True):
        assert reply.cached.total > 0
        assert abs(reply.logprobs[0] - once.logprobs[0]) <= FINE_LOGPROB


def test_detach_and_attach(shared: Deployment) -> None:
    server, backend = shared.server, shared.backend
    prompt = make_prompt("attach")
    cold = shared.generate_and_settle(prompt)
    server.detach()
    server.flush()
    assert server.storage_status()["hicache_storage_backend"] is None
    without = server.generate(prompt)
    assert without.cached.total == 0
    assert without.same_output(cold)
    status, message = server.attach("no-such-backend", {})
    assert status == 400, message
    status, message = server.attach(backend.name, backend.extra_config())
    assert status == 200, message
    assert server.storage_status()["hicache_storage_backend"] == backend.name
    server.flush()
    assert_from_storage(server.generate(prompt), cold)


def test_wrong_requests_are_refused_and_the_server_lives(shared: Deployment) -> None:
    """Each with a status of 400 and a word that tells what was wrong; nothing changes by them."""
    server, backend = shared.server, shared.backend
    if backend.name != "tutti":
        pytest.skip(f"backend {backend.name!r} doesn't check its options")
    good = backend.extra_config()
    raw = {"hicache_storage_backend": "tutti", "hicache_storage_backend_extra_config_json": "{no"}
    attached = server.storage_status()
    assert server.attach("file", {})[0] == 400  # while ours is there
    assert server.attach("tutti", good, policy="some_day")[0] == 400
    assert server.storage_status() == attached

    server.detach()
    server.detach()  # nothing is there: SGLang says that it is done
    try:
        for name, options, word in (
            ("no-such-backend", {}, "no-such-backend"),
            ("Tutti", good, "Tutti"),
            ("tutti", {}, "path"),
            ("tutti", {**good, "no_such_option": 1}, "no_such_option"),
            ("tutti", {**good, "capacity": "a lot"}, "capacity"),
            ("tutti", {**good, "path": "/proc/nowhere"}, "/proc/nowhere"),
            ("tutti", {**good, "prefetch_threshold": "many"}, "prefetch_threshold"),
        ):
            status, message = server.attach(name, options)
            assert status == 400 and word in str(message), message
        assert server.call("PUT", STORAGE_PATH, raw)[0] == 400
        assert server.storage_status()["hicache_storage_backend"] is None
    finally:
        assert server.attach(backend.name, good)[0] == 200
    assert server.healthy()


def test_policies_of_prefetching(shared: Deployment) -> None:
    """Whatever a request waits for, its output is the same; what waits gets all that is stored."""
    server, backend = shared.server, shared.backend
    prompt = make_prompt("policies")
    cold = shared.generate_and_settle(prompt)
    for policy in ("best_effort", "timeout", "wait_complete"):
        status, message = server.attach(backend.name, backend.extra_config(), policy=policy)
        assert status == 200, message
        assert server.storage_status()["hicache_storage_prefetch_policy"] == policy
        for _ in range(3):
            server.flush()
            reply = server.generate(prompt)
            assert reply.same_output(cold) and reply.logprob_difference(cold) <= FINE_LOGPROB
            assert reply.cached.storage % PAGE_TOKENS == 0
            if policy != "best_effort":
                assert_from_storage(reply, cold)


def test_metrics_of_the_backend_arrive(shared: Deployment) -> None:
    """What `get_stats` tells is in the server's metrics: pages and bandwidth, each call once."""
    if shared.backend.name != "tutti":
        pytest.skip(f"backend {shared.backend.name!r} has no metrics")
    prompt = make_prompt("metrics")
    before = shared.server.metrics()
    cold = shared.generate_and_settle(prompt)
    shared.server.flush()
    assert_from_storage(shared.server.generate(prompt), cold)
    shared.server.generate(make_prompt("metrics, a step more", 20))  # SGLang asks at each step

    def grown(name: str) -> float:
        return shared.server.metrics()[name] - before.get(name, 0.0)

    stored = stored_pages([[*prompt, *cold.output_ids]], PAGE_TOKENS)
    assert wait_until(lambda: grown("sglang:backup_pgs_sum") >= stored, 10)
    assert grown("sglang:prefetch_pgs_sum") == PROMPT_HIT // PAGE_TOKENS
    assert grown("sglang:prefetch_pgs_count") == grown("sglang:prefetch_bandwidth_count") == 1
    assert grown("sglang:prefetch_bandwidth_sum") > 0 < grown("sglang:backup_bandwidth_sum")
    labels = [line for line in str(shared.server.call("GET", "/metrics")[1]).splitlines()]
    assert any("sglang:prefetch_pgs_sum" in line and '"tutti"' in line for line in labels)


def test_clear_empties_the_storage(shared: Deployment) -> None:
    prompt = make_prompt("clear")
    cold = shared.generate_and_settle(prompt)
    shared.server.clear_storage()
    shared.server.clear_storage()  # of nothing
    assert wait_until(lambda: shared.backend.usage().pages == 0, 10)
    shared.server.flush()
    reply = shared.generate_and_settle(prompt)  # stores it again
    assert reply.cached.total == 0
    assert reply.same_output(cold)
    shared.server.flush()
    assert_from_storage(shared.server.generate(prompt), cold)


def test_prefix_comes_back_after_kill(shared: Deployment) -> None:
    prompts = [make_prompt(f"kill {i}") for i in range(3)]
    cold = [shared.generate_and_settle(prompt) for prompt in prompts]
    shared.server.generate(make_prompt("kill, in flight"))  # its backup may be under way now
    shared.kill_and_restart(serve=True)
    for prompt, once in zip(prompts, cold, strict=True):
        assert_from_storage(shared.server.generate(prompt), once)
    in_flight = make_prompt("kill, in flight")
    reply = shared.server.generate(in_flight)  # whatever part of it is there, it must be right
    assert reply.same_output(shared.server.generate(in_flight, namespace="kill, from scratch"))
    assert shared.server.healthy()


def test_changed_weights_are_not_answered_from_the_storage(
    shared: Deployment, backend_name: str, tmp_path: Path
) -> None:
    """The last test of the shared server: after it the storage is off, as it must be."""
    if backend_name != "tutti":
        pytest.skip(f"backend {backend_name!r} serves pages of the old weights")
    prompt = make_prompt("new weights")
    shared.generate_and_settle(prompt)
    other = ensure_model(tmp_path / "other", seed=2)
    body = {"model_path": str(other), "flush_cache": True}
    shared.server.call("POST", "/update_weights_from_disk", body, expect=200)
    reply = shared.server.generate(prompt)
    assert reply.cached.total == 0
    scratch = shared.server.generate(prompt, namespace="new weights, from scratch")
    assert reply.same_output(scratch)
    assert "the weights changed while the server runs" in shared.server.log()
    options = shared.backend.extra_config()
    shared.server.detach()
    status, answer = shared.server.attach(backend_name, options)
    assert status != 200 and "weights" in str(answer)
    assert shared.server.attach(backend_name, {**options, "weights": "step 2"})[0] == 200


# ---- servers of their own --------------------------------------------------------------------


def test_other_weights_find_nothing(shared: Deployment, tmp_path: Path, model: Path) -> None:
    """Same folder name, model name, shapes and keys, other weights: a miss, not other KV."""
    if not shared.backend.verifies_pages:
        pytest.skip(f"backend {shared.backend.name!r} doesn't tell models of one name apart")
    prompt = make_prompt("weights")
    shared.generate_and_settle(prompt)
    retrained = ensure_model(tmp_path / model.name, seed=1)
    flags = [f"--served-model-name={model}"]
    deployment = Deployment(retrained, shared.backend, tmp_path / "server.log", flags=flags)
    with deployment:
        reply = deployment.server.generate(prompt)
        assert reply.cached.storage == 0
        assert reply.same_output(deployment.server.generate(prompt, namespace="from scratch"))


def test_two_tensor_parallel_ranks(model: Path, backend: Backend, tmp_path: Path) -> None:
    prompts = [make_prompt(f"tp {i}") for i in range(2)]
    deployment = Deployment(
        model,
        backend,
        tmp_path / "server.log",
        flags=["--tp-size=2"],
        env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},  # one NUMA node: one core a rank
        ranks=2,
    )
    with deployment:
        cold = [deployment.generate_and_settle(prompt) for prompt in prompts]
        deployment.server.flush()
        assert_from_storage(deployment.server.generate(prompts[0]), cold[0])
        deployment.kill_and_restart()
        assert_from_storage(deployment.server.generate(prompts[1]), cold[1])


def test_one_token_pages_in_many_batches(model: Path, backend: Backend, tmp_path: Path) -> None:
    """SGLang's default page size: a prompt is several calls of 128 pages, and a page is 2 KiB, not
    even one block. Each call must find its place behind the pages of the calls before."""
    deployment = Deployment(model, backend, tmp_path / "server.log", flags=["--page-size=1"])
    prompt = make_prompt("one-token pages")
    with deployment:
        cold = deployment.server.generate(prompt)
        deployment.await_pages(stored_pages([[*prompt, *cold.output_ids]], 1))
        deployment.kill_and_restart()
        warm = deployment.server.generate(prompt)
        assert warm.cached.storage == PROMPT_TOKENS - 1, warm.cached
        assert warm.same_output(cold)
        assert warm.logprob_difference(cold) <= FINE_LOGPROB
        longer = deployment.server.generate([*prompt, *make_prompt("and more", 100)])
        assert longer.cached.device >= PROMPT_TOKENS - 1
    if backend.name == "tutti":
        tree_roots = _first_pages(backend.folder)
        assert tree_roots <= 2, "pages of later calls were stored as if they began a sequence"


def _first_pages(folder: Path) -> int:
    """Records of a store that say that they are the first page of a sequence."""
    from tutti_core import StoreConfig
    from tutti_core.format import ROOT_PARENT
    from tutti_core.tiers.pools import open_layout

    config = StoreConfig.parse({"path": folder, **TUTTI_OPTIONS})
    _, catalog = open_layout(config, create=False)
    try:
        return sum(
            sum(parent.tobytes() == ROOT_PARENT for parent in records["parent"])
            for _, records, _ in catalog.scan_records(1024)
        )
    finally:
        catalog.close()


def test_injected_delays_and_failures_change_no_output(
    model: Path, backend: Backend, tmp_path: Path
) -> None:
    """SGLang's own injector before each storage call: late or failed, never wrong, never stuck."""
    deployment = Deployment(
        model,
        backend,
        tmp_path / "server.log",
        env={
            "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",
            "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3",
        },
    )
    prompts = [make_prompt(f"injector {i}", 300) for i in range(3)]
    hits: list[int] = []
    with deployment:
        server = deployment.server
        scratch = [server.generate(prompt, namespace="from scratch") for prompt in prompts]
        for _ in range(6):
            for prompt, reference in zip(prompts, scratch, strict=True):
                reply = server.generate(prompt)
                hits.append(reply.cached.storage)
                assert reply.same_output(reference)
            server.flush()
        assert server.healthy()
        log = server.log()
    assert "HiCache storage test injector enabled" in log
    assert any(hits) and not all(hits), f"storage tokens {hits}: injector or storage was idle"


def test_wrong_option_at_start_names_it(model: Path, backend: Backend, tmp_path: Path) -> None:
    """A typo in the configuration must end the start with the option's name in the log."""
    if backend.name != "tutti":
        pytest.skip(f"backend {backend.name!r} doesn't check its options")
    wrong = {"capasity": "2GiB"}
    server = SGLangServer(
        model,
        Backend(backend.name, backend.folder, wrong).server_flags(),
        log_path=tmp_path / "server.log",
    )
    with pytest.raises(ServerError, match="ended while starting"):
        server.start()
    assert "capasity" in server.log()
