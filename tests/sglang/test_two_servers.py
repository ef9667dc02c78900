"""Two real servers with one model on one store directory, at the same time: they share pages.

Both are started once, one is killed and started again; everything is shown on the way. Neither is
stopped by the other tests' rule that one server runs at a time, so both end with this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import deployment
import pytest
from deployment import BACKUP_TIMEOUT_S, assert_from_storage, make_prompt
from sglang_cpu.backends import PAGE_TOKENS, Backend
from sglang_cpu.server import Generation, SGLangServer, stored_pages, wait_until


@dataclass
class Pair:
    """Two servers and what they share."""

    model: Path
    backend: Backend
    folder: Path
    servers: list[SGLangServer]

    def start(self, name: str) -> SGLangServer:
        """Start a server; it is stopped with the pair."""
        server = SGLangServer(
            self.model,
            self.backend.server_flags(),
            env=self.backend.environment(),
            log_path=self.folder / f"{name}.log",
        )
        self.servers.append(server)
        server.start()
        return server

    def generate_and_settle(self, server: SGLangServer, prompt: list[int]) -> Generation:
        """Generate, then wait until the store holds every page of prompt and output."""
        before = self.backend.usage().pages
        reply = server.generate(prompt)
        wanted = before + stored_pages([[*prompt, *reply.output_ids]], PAGE_TOKENS)
        assert wait_until(lambda: self.backend.usage().pages >= wanted, BACKUP_TIMEOUT_S)
        return reply


@pytest.fixture
def pair(model: Path, backend_name: str, store_folder: Path, tmp_path: Path) -> Iterator[Pair]:
    while deployment._started:  # an idle one takes a whole core
        deployment._started.pop().stop()
    backend = Backend(backend_name, store_folder, {"writers_max": 2})
    made = Pair(model, backend, tmp_path, [])
    try:
        yield made
    finally:
        for server in made.servers:
            server.stop()
    assert not any(server.alive() for server in made.servers)


def test_they_load_what_the_other_saved_and_outlive_its_death(pair: Pair) -> None:
    one, two = pair.start("one"), pair.start("two")
    of_one, of_two = make_prompt("saved by one"), make_prompt("saved by two")
    cold_one = pair.generate_and_settle(one, of_one)
    cold_two = pair.generate_and_settle(two, of_two)
    assert cold_one.cached.total == cold_two.cached.total == 0
    assert_from_storage(two.generate(of_one), cold_one)
    assert_from_storage(one.generate(of_two), cold_two)

    # What both have is stored once.
    pages = pair.backend.usage().pages
    one.flush()
    assert_from_storage(one.generate(of_one), cold_one)
    assert pair.backend.usage().pages == pages

    # One of them is killed while both serve; the other goes on, and reads what the dead one wrote.
    together = make_prompt("at the time of the death")
    with ThreadPoolExecutor(2) as pool:
        last = pool.submit(one.generate, together)
        lost = pool.submit(two.generate, make_prompt("in flight"))
        two.kill()
        cold_together = last.result()
        assert lost.exception() is not None
    one.flush()
    assert_from_storage(one.generate(of_two), cold_two)
    later = make_prompt("after the death")
    cold_later = pair.generate_and_settle(one, later)
    assert one.healthy()

    # It starts again beside the other, finds its own pages and those saved meanwhile.
    two = pair.start("two")
    for prompt, cold in ((of_two, cold_two), (later, cold_later), (together, cold_together)):
        assert_from_storage(two.generate(prompt), cold)
    new = make_prompt("after the restart")
    assert_from_storage_of(one, new, pair.generate_and_settle(two, new))


def assert_from_storage_of(server: SGLangServer, prompt: list[int], cold: Generation) -> None:
    """The server has the pages from the store, whoever saved them."""
    assert_from_storage(server.generate(prompt), cold)
    assert server.healthy()
