"""A store and the server that uses it, for the tests that need a real server."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from sglang_cpu.backends import PAGE_TOKENS, Backend
from sglang_cpu.make_model import VOCABULARY_MIN
from sglang_cpu.server import Generation, SGLangServer, stored_pages, wait_until

PROMPT_TOKENS = 400
PROMPT_HIT = (PROMPT_TOKENS - 1) // PAGE_TOKENS * PAGE_TOKENS  # the last token is always computed
BACKUP_TIMEOUT_S = 60.0
ADMIN_KEY = "test-key"
FINE_LOGPROB = 1e-3  # rounding differs with the batch; a wrong page changes a logprob by 0.1 and up


_started: list[SGLangServer] = []
"""An idle server of SGLang's takes a whole core, so whoever starts one stops the last one."""


class Deployment:
    """A store and the server that uses it, which can be killed and started again.

    Starting one stops the one that was started before: tests that share a server come first in
    their module.
    """

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
        self._start()
        return self

    def _start(self) -> None:
        while _started:
            _started.pop().stop()
        _started.append(self.server)
        self.server.start()

    def __exit__(self, *_: object) -> None:
        self.server.stop()

    def kill_and_restart(self, *, serve: bool = False) -> None:
        """SIGKILL, then a new server; with `serve`, through SGLang's other command."""
        self.server.kill()
        self.server = self._make(serve=serve)
        self._start()

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


def assert_from_storage(reply: Generation, cold: Generation, *, route: str = "hicache") -> None:
    """The whole prompt came from the store, and with it the output that it had without."""
    tier = reply.cached.storage if route == "hicache" else reply.cached.host  # as SGLang counts
    assert tier == PROMPT_HIT, reply.cached
    assert reply.same_output(cold)
    assert reply.logprob_difference(cold) <= FINE_LOGPROB
