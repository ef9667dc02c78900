"""A real server: pages survive flush, kill -9 and injected faults; admin endpoints; TP=2.

Starting a server takes 15-50 s, so one is shared by most tests; each uses prompts of its own.
Weights are random and logits close together: a wrong KV page changes the output.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sglang_cpu.backends import PAGE_TOKENS, TUTTI_OPTIONS, Backend
from sglang_cpu.make_model import VOCABULARY_MIN, ensure_model
from sglang_cpu.server import Generation, ServerError, SGLangServer, stored_pages, wait_until

PROMPT_TOKENS = 400
PROMPT_HIT = (PROMPT_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS  # the last token is always computed
BACKUP_TIMEOUT_S = 60.0
ADMIN_KEY = "test-key"
FINE_LOGPROB = 1e-3  # rounding differs with the batch; a wrong page changes a logprob by 0.1 and up


class Deployment:
    """A store and the server that uses it, which can be killed and started again."""

    def __init__(
        self,
        model: Path,
        backend: Backend,
        log_path: Path,
        *,
        flags: Sequence[str] = (),
        env: dict[str, str] | None = None,
        ranks: int = 1,
    ) -> None:
        self.model = model
        self.backend = backend
        self.ranks = ranks  # each keeps pages of its own
        self._make: Callable[..., SGLangServer] = lambda serve=False: SGLangServer(
            self.model,
            [*backend.server_flags(), *flags],
            env={**backend.environment(), **(env or {})},
            log_path=log_path,
            admin_key=ADMIN_KEY,
            serve=serve,
        )
        self.server = self._make()

    def __enter__(self) -> Deployment:
        self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()

    def kill_and_restart(self, *, serve: bool = False) -> None:
        """SIGKILL, then a new server; with `serve`, through SGLang's other command."""
        self.server.kill()
        self.server = self._make(serve=serve)
        self.server.start()

    def generate_and_settle(self, prompt: list[int]) -> Generation:
        """Generate, then wait until the storage holds every page of prompt and output."""
        before = self.backend.usage().pages
        reply = self.server.generate(prompt)
        grown = self.ranks * stored_pages([[*prompt, *reply.output_ids]], PAGE_TOKENS)
        self.await_pages(before + grown)
        return reply

    def await_pages(self, wanted: int) -> None:
        if not wait_until(lambda: self.backend.usage().pages >= wanted, BACKUP_TIMEOUT_S):
            raise TimeoutError(f"{self.backend.usage().pages} of {wanted} pages were backed up")


def make_prompt(name: str, tokens: int = PROMPT_TOKENS) -> list[int]:
    """Token ids that share no page with another name's."""
    return [random.Random(f"{name} {i}").randrange(3, VOCABULARY_MIN) for i in range(tokens)]


def assert_from_storage(reply: Generation, cold: Generation) -> None:
    assert reply.cached.storage == PROMPT_HIT, reply.cached
    assert reply.same_output(cold)
    assert reply.logprob_difference(cold) <= FINE_LOGPROB


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


def test_bad_options_are_refused_and_the_server_lives(shared: Deployment) -> None:
    server, backend = shared.server, shared.backend
    if backend.name != "tutti":
        pytest.skip(f"backend {backend.name!r} doesn't check its options")
    server.detach()
    try:
        for wrong in ({"no_such_option": 1}, {"capacity": "a lot"}):
            status, message = server.attach(backend.name, {**backend.extra_config(), **wrong})
            assert status == 400, message
            assert next(iter(wrong)) in str(message)
    finally:
        assert server.attach(backend.name, backend.extra_config())[0] == 200
    assert server.healthy()


def test_clear_empties_the_storage(shared: Deployment) -> None:
    prompt = make_prompt("clear")
    cold = shared.generate_and_settle(prompt)
    shared.server.clear_storage()
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
