"""A real server on the direct route: no host tier, pages between device pool and store.

Starting a server takes 15-50 s, so one is shared by most tests; each uses prompts of its own.
Weights are random and logits close together: a wrong KV page changes the output.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deployment import (
    FINE_LOGPROB,
    PROMPT_HIT,
    Deployment,
    assert_from_storage,
    make_prompt,
)
from mla_model import make_mla_model
from sglang_cpu.backends import PAGE_TOKENS, Backend
from sglang_cpu.make_model import ensure_model
from sglang_cpu.server import Generation, ServerError, SGLangServer, stored_pages, wait_until

pytestmark = pytest.mark.usefixtures("tutti_only")


@pytest.fixture
def tutti_only(backend_name: str) -> None:
    if backend_name != "tutti":
        pytest.skip(f"backend {backend_name!r} has no linker")


def linker_backend(folder: Path, **options: object) -> Backend:
    folder.mkdir(parents=True, exist_ok=True)
    return Backend("tutti", folder, options, route="linker")


def from_store(reply: Generation, cold: Generation) -> None:
    assert_from_storage(reply, cold, route="linker")


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("shared-linker")
    backend = linker_backend(folder / "store", capacity="128MiB")
    with Deployment(model, backend, folder / "server.log") as deployment:
        yield deployment


# ---- one server ------------------------------------------------------------------------------


def test_prefix_comes_back_after_flush(shared: Deployment) -> None:
    prompt = make_prompt("flush")
    cold = shared.generate_and_settle(prompt)
    assert cold.cached.total == 0
    shared.server.flush()
    from_store(shared.server.generate(prompt), cold)
    again = shared.server.generate(prompt)
    assert again.cached.device == PROMPT_HIT
    assert again.same_output(cold)


def test_turns_of_a_conversation(shared: Deployment) -> None:
    """Each turn's prompt is the last one's, its answer, and more; flushed in between or not."""
    prompt = make_prompt("turns", 200)
    for turn in range(4):
        reply = shared.generate_and_settle(prompt) if turn == 0 else shared.server.generate(prompt)
        scratch = shared.server.generate(prompt, namespace=f"turns, scratch {turn}")
        assert reply.same_output(scratch)
        if turn % 2:
            shared.server.flush()
        prompt = [*prompt, *reply.output_ids, *make_prompt(f"turns {turn}", 70)]
    shared.server.flush()
    last = shared.server.generate(prompt)
    assert last.cached.host >= 400, last.cached


def test_namespaces_share_nothing(shared: Deployment) -> None:
    prompt = make_prompt("namespaces")
    cold = shared.generate_and_settle(prompt)
    shared.server.flush()
    reply = shared.server.generate(prompt, namespace="another tenant")
    assert reply.cached.total == 0
    assert reply.same_output(cold)


def test_requests_at_once(shared: Deployment) -> None:
    """Loads, forward passes and offloads of many requests in each other's way."""
    stem = make_prompt("at once", 160)
    prompts = [[*stem, *make_prompt(f"at once {i}", 160)] for i in range(8)]
    cold = [shared.server.generate(prompt) for prompt in prompts]
    before = shared.backend.usage().pages
    wait_until(lambda: shared.backend.usage().pages == before, 1.0)
    shared.server.flush()
    with ThreadPoolExecutor(len(prompts)) as pool:
        warm = list(pool.map(shared.server.generate, prompts))
    assert sum(reply.cached.total for reply in warm) >= len(prompts) * 144
    for reply, once in zip(warm, cold, strict=True):
        assert abs(reply.logprobs[0] - once.logprobs[0]) <= FINE_LOGPROB


def test_loaded_pages_are_not_written_again(shared: Deployment) -> None:
    prompt = make_prompt("again")
    shared.generate_and_settle(prompt)
    for _ in range(3):
        shared.server.flush()
        before = shared.backend.usage().pages
        shared.server.generate(prompt)
        assert shared.backend.usage().pages <= before + 1


def test_prefix_comes_back_after_kill(shared: Deployment) -> None:
    prompts = [make_prompt(f"kill {i}") for i in range(3)]
    cold = [shared.generate_and_settle(prompt) for prompt in prompts]
    shared.server.generate(make_prompt("kill, in flight"))  # its offload may be under way now
    shared.kill_and_restart()
    for prompt, once in zip(prompts, cold, strict=True):
        from_store(shared.server.generate(prompt), once)
    in_flight = make_prompt("kill, in flight")
    reply = shared.server.generate(in_flight)  # whatever part of it is there, it must be right
    assert reply.same_output(shared.server.generate(in_flight, namespace="kill, from scratch"))
    assert shared.server.healthy()


def test_a_damaged_page_fails_one_request_and_is_computed_at_the_retry(shared: Deployment) -> None:
    """SGLang answers 503 to a request whose load failed; the next one has no such hit."""
    prompt = make_prompt("damage")
    folder = shared.backend.folder
    pools = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".mdb"]
    before = {path: path.read_bytes() for path in pools}
    cold = shared.generate_and_settle(prompt)
    for path in pools:
        flip_new_bytes(path, before[path])
    shared.server.flush()
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    status, answer = shared.server.call("POST", "/generate", body)
    assert status == 503 and "load failed" in str(answer)
    reply = shared.server.generate(prompt)
    assert reply.cached.total == 0
    assert reply.same_output(cold)
    assert shared.server.healthy()


def flip_new_bytes(path: Path, before: bytes) -> None:
    """Change a bit in each block that was written since: whatever page is there is damaged."""
    after = path.read_bytes()
    block = 4096
    with path.open("r+b") as stream:
        for at in range(0, len(after), block):
            if after[at : at + block] != before[at : at + block] and any(after[at : at + block]):
                stream.seek(at + 100)
                stream.write(bytes([after[at + 100] ^ 1]))


def test_changed_weights_are_not_answered_from_the_store(
    shared: Deployment, tmp_path: Path
) -> None:
    """The last test of the shared server: after it nothing is stored any more, as it must be."""
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


# ---- servers of their own --------------------------------------------------------------------


def test_long_flags_and_two_ranks(model: Path, tmp_path: Path) -> None:
    """SGLang's own way to name a linker, without the short form; TP=2, one linker a rank."""
    backend = linker_backend(tmp_path / "store")
    config = {
        "linker": "TuttiLinker",
        "linker_module_path": "tutti_sglang.linker",
        "linker_extra_config": backend.extra_config(),
    }
    flags = [
        "--enable-unified-cache-external-linker",
        "--unified-cache-external-linker-backend=dynamic",
        f"--unified-cache-external-linker-config={json.dumps(config)}",
        "--tp-size=2",
    ]
    deployment = Deployment(
        model,
        backend,
        tmp_path / "server.log",
        flags=flags,
        env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},  # one NUMA node: one core a rank
        ranks=2,
    )
    prompts = [make_prompt(f"tp {i}") for i in range(2)]
    with deployment:
        cold = [deployment.generate_and_settle(prompt) for prompt in prompts]
        deployment.server.flush()
        from_store(deployment.server.generate(prompts[0]), cold[0])
        deployment.kill_and_restart()
        from_store(deployment.server.generate(prompts[1]), cold[1])


def test_latent_attention_on_two_ranks(tmp_path: Path) -> None:
    """Pages that are the same on all ranks: one rank saves them, each loads them."""
    deployment = Deployment(
        make_mla_model(tmp_path / "mla"),
        linker_backend(tmp_path / "store"),
        tmp_path / "server.log",
        flags=["--tp-size=2"],
        env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    )
    prompts = [make_prompt(f"mla {i}") for i in range(2)]
    with deployment:
        cold = [deployment.generate_and_settle(prompt) for prompt in prompts]
        whole = [[*p, *once.output_ids] for p, once in zip(prompts, cold, strict=True)]
        stored = deployment.backend.usage().pages
        assert stored == stored_pages(whole, PAGE_TOKENS)
        deployment.server.flush()
        from_store(deployment.server.generate(prompts[0]), cold[0])
        deployment.kill_and_restart()
        from_store(deployment.server.generate(prompts[1]), cold[1])


def test_chunked_prefill_of_a_loaded_prefix(model: Path, tmp_path: Path) -> None:
    """A prompt in several chunks: the load comes with the first, the inserts one by one."""
    backend = linker_backend(tmp_path / "store")
    flags = ["--chunked-prefill-size=128"]
    with Deployment(model, backend, tmp_path / "server.log", flags=flags) as one:
        stem = make_prompt("chunks", 320)
        one.generate_and_settle(stem)
        one.server.flush()
        longer = [*stem, *make_prompt("chunks, more", 400)]
        reply = one.server.generate(longer)
        assert reply.cached.host >= 304, reply.cached
        assert reply.same_output(one.server.generate(longer, namespace="chunks, from scratch"))
        one.server.flush()
        again = one.server.generate(longer)
        assert again.cached.host >= 700 // PAGE_TOKENS * PAGE_TOKENS, again.cached
        assert again.same_output(reply)


def test_overlapped_scheduling_and_aborts(model: Path, tmp_path: Path) -> None:
    """SGLang's default: the scheduler runs ahead of the forward pass. Requests are given up too."""
    backend = linker_backend(tmp_path / "store")
    server = SGLangServer(model, backend.server_flags(), log_path=tmp_path / "server.log")
    server._command.remove("--disable-overlap-schedule")
    prompts = [make_prompt(f"overlap {i}") for i in range(6)]
    with server:
        cold = [server.generate(prompt) for prompt in prompts]
        scratch = [server.generate(prompt, namespace="from scratch") for prompt in prompts]
        for once, reference in zip(cold, scratch, strict=True):
            assert once.same_output(reference)
        for attempt in range(3):
            server.flush()
            with ThreadPoolExecutor(len(prompts)) as pool:
                for i, prompt in enumerate(prompts):
                    body = {
                        "input_ids": prompt,
                        "rid": f"{attempt}-{i}",
                        "sampling_params": {"max_new_tokens": 64, "ignore_eos": True},
                    }
                    pool.submit(server.call, "POST", "/generate", body)
                time.sleep(0.1 * attempt)
                for i in range(0, len(prompts), 2):
                    server.call("POST", "/abort_request", {"rid": f"{attempt}-{i}"})
            assert server.healthy()
        server.flush()
        warm = [server.generate(prompt) for prompt in prompts]
    assert sum(reply.cached.host for reply in warm) >= 4 * PROMPT_HIT
    for reply, once in zip(warm, cold, strict=True):
        assert reply.same_output(once)


def test_wrong_option_at_start_names_it(model: Path, tmp_path: Path) -> None:
    backend = linker_backend(tmp_path / "store", capasity="2GiB")
    server = SGLangServer(model, backend.server_flags(), log_path=tmp_path / "server.log")
    with pytest.raises(ServerError, match="ended while starting"):
        server.start()
    assert "capasity" in server.log()
