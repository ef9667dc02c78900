"""Real servers with a model that has two pools, and with pages that ranks share.

The model has layers with full attention and layers with a window of 96 tokens. A prefix is usable
when the pages of the first are there and the window before its end is, so the answer after a reload
shows that both came back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployment import FINE_LOGPROB, PROMPT_HIT, Deployment, assert_from_storage, make_prompt
from mla_model import make_mla_model
from sglang_cpu.backends import PAGE_TOKENS, Backend
from sglang_cpu.make_model import VOCABULARY_MIN, WindowShape, ensure_model
from sglang_cpu.server import Generation, stored_pages

SETTLE_S = 1.5
TIMEOUT_S = 60.0
WINDOW_PAGES = 6


@pytest.fixture(scope="module")
def window_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_model(tmp_path_factory.mktemp("window"), shape=WindowShape())


@pytest.fixture
def deployment(window_model: Path, backend: Backend, tmp_path: Path) -> Iterator[Deployment]:
    with Deployment(window_model, backend, tmp_path / "server.log") as running:
        yield running


def ask(deployment: Deployment, prompt: list[int]) -> Generation:
    """Generate, then wait until no more pages are stored: how many windows are is SGLang's."""
    reply = deployment.server.generate(prompt)
    end_s, stable_s, pages = time.monotonic() + TIMEOUT_S, time.monotonic(), -1
    while time.monotonic() - stable_s < SETTLE_S and time.monotonic() < end_s:
        now = deployment.backend.usage().pages
        if now != pages:
            stable_s, pages = time.monotonic(), now
        time.sleep(0.1)
    return reply


def changed(prompt: list[int], at: int) -> list[int]:
    """The prompt with another token in one place."""
    return [*prompt[:at], 3 + (prompt[at] - 2) % (VOCABULARY_MIN - 3), *prompt[at + 1 :]]


def test_full_and_window_pages_come_back(deployment: Deployment) -> None:
    prompt = make_prompt("two pools")
    cold = ask(deployment, prompt)
    assert cold.cached.total == 0
    pages = deployment.backend.usage().pages
    assert pages >= PROMPT_HIT // PAGE_TOKENS + WINDOW_PAGES, "pages of both pools are stored"
    for at in (20, len(prompt) - 20):  # the answer tells whether either pool is right
        other = deployment.server.generate(changed(prompt, at))
        assert not other.same_output(cold) or other.logprob_difference(cold) > 10 * FINE_LOGPROB
    deployment.server.flush()
    assert_from_storage(deployment.server.generate(prompt), cold)
    again = deployment.server.generate(prompt)
    assert again.cached.device == PROMPT_HIT and again.same_output(cold)

    deployment.server.flush()
    longer = [*prompt, *cold.output_ids, *make_prompt("two pools, next turn", 120)]
    reply = ask(deployment, longer)
    assert reply.cached.storage >= PROMPT_HIT, reply.cached
    assert reply.same_output(deployment.server.generate(longer, namespace="from scratch"))

    deployment.kill_and_restart()
    assert_from_storage(deployment.server.generate(prompt), cold)
    assert "failures so far" not in deployment.server.log()


def test_two_ranks_of_a_model_with_a_window(
    window_model: Path, backend: Backend, tmp_path: Path
) -> None:
    prompt = make_prompt("two pools, two ranks")
    running = Deployment(
        window_model,
        backend,
        tmp_path / "server.log",
        flags=["--tp-size=2"],
        env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},  # one NUMA node: one core a rank
        ranks=2,
    )
    with running:
        cold = ask(running, prompt)
        running.server.flush()
        assert_from_storage(running.server.generate(prompt), cold)
        running.kill_and_restart()
        assert_from_storage(running.server.generate(prompt), cold)


def test_latent_pages_are_saved_once_and_shared(backend: Backend, tmp_path: Path) -> None:
    """Two ranks save a page once and both load it; a server with one rank takes over the store."""
    prompts = [make_prompt(f"latent {i}") for i in range(2)]
    model = make_mla_model(tmp_path / "mla")
    two = Deployment(
        model,
        backend,
        tmp_path / "two.log",
        flags=["--tp-size=2"],
        env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    )
    with two:
        cold = [two.generate_and_settle(prompt) for prompt in prompts]
        whole = [[*p, *once.output_ids] for p, once in zip(prompts, cold, strict=True)]
        assert backend.usage().pages == stored_pages(whole, PAGE_TOKENS)
        two.server.flush()
        assert_from_storage(two.server.generate(prompts[0]), cold[0])
    with Deployment(model, backend, tmp_path / "one.log") as one:
        assert_from_storage(one.server.generate(prompts[1]), cold[1])
