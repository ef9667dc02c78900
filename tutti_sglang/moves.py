"""Saves and loads of the engine's host pages: in parts, a few in flight, awaited within a bound.

One call moves pages of one pool or of several, each in its own namespace. Every move is answered
page by page; what ends later than it may is answered False.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti_core import BusyError, LoadTicket, NamespaceStore, PageFragments, PageKeys, SaveTicket

Bools = npt.NDArray[np.bool_]

STALL_LIMIT_S = 600.0
"""How long a load may hold the engine's memory before the store is given up."""

PART_BYTES = 256 << 20
GET_TIME_S = 5.0
"""SGLang gives its storage threads 10 s to end when the cache is flushed, and may flush while a get
runs whose request it has given up (cache_controller.py, `_stop_storage_threads`). A get of many
bytes is therefore made in parts, and parts that would begin later than this are answered False."""

_LOADS_MAX = 2
_SAVES_MAX = 8
"""Parts in flight. A save is written and published in groups with others that wait, so that many
small pools cost one flush together."""


@dataclass(frozen=True, slots=True)
class Move:
    """Pages `first` .. of a chain in one namespace, and the engine's memory for them."""

    pages: NamespaceStore
    chain: PageKeys
    first: int
    memory: PageFragments


@dataclass(frozen=True, slots=True)
class _Part:
    """Pages low .. high-1 of the memory of move number `move`."""

    move: int
    low: int
    high: int


class Mover:
    """Moves pages for one backend. Threads: any.

    Parameters
        timeout_s: how long a save may take, and a load before that is noted.
        note: called with each wait that took longer.
        give_up: called when the device has not answered a load for STALL_LIMIT_S.
    """

    def __init__(
        self,
        timeout_s: float,
        note: Callable[[Exception], None],
        give_up: Callable[[str], None],
    ) -> None:
        self._timeout_s = timeout_s
        self._note = note
        self._give_up = give_up

    def save(self, moves: Sequence[Move]) -> list[Bools]:
        """Save all pages of the moves; one answer a page.

        Raises
            BusyError: not done in time. Nothing of what was not answered will appear.
        """
        done = [np.zeros(move.memory.page_count, dtype=np.bool_) for move in moves]
        flying: deque[tuple[_Part, SaveTicket]] = deque()
        try:
            for part in _parts(moves):
                if len(flying) == _SAVES_MAX:
                    self._end_save(flying, done)
                move = moves[part.move]
                # A save goes to the end of its chain, so the chain ends with the part.
                chain = move.chain.upto(move.first + part.high)
                memory = move.memory.part(part.low, part.high)
                flying.append((part, move.pages.save(chain, memory, move.first + part.low)))
            while flying:
                self._end_save(flying, done)
        finally:
            # The engine may reuse the memory after we answer, so these pages must not appear.
            for _, ticket in flying:
                ticket.cancel()
        return done

    def _end_save(self, flying: deque[tuple[_Part, SaveTicket]], done: list[Bools]) -> None:
        part, ticket = flying[0]
        done[part.move][part.low : part.high] = ticket.wait(self._timeout_s)
        flying.popleft()

    def load(self, moves: Sequence[Move]) -> list[Bools]:
        """Load all pages of the moves; one answer a page. See GET_TIME_S."""
        done = [np.zeros(move.memory.page_count, dtype=np.bool_) for move in moves]
        flying: deque[tuple[_Part, LoadTicket]] = deque()
        deadline_s = time.monotonic() + GET_TIME_S
        try:
            for part in _parts(moves):
                if len(flying) == _LOADS_MAX:
                    self._end_load(flying, done)
                    if time.monotonic() > deadline_s:
                        break
                move = moves[part.move]
                memory = move.memory.part(part.low, part.high)
                first = move.first + part.low
                ticket = move.pages.load(move.chain, memory, first, memory.page_count)
                flying.append((part, ticket))
        finally:
            while flying:
                self._end_load(flying, done)
        return done

    def _end_load(self, flying: deque[tuple[_Part, LoadTicket]], done: list[Bools]) -> None:
        """Wait until no transfer touches the engine's memory any more, however slow the device.

        An answer given earlier would let the engine hand the memory to another request while the
        device still writes to it.
        """
        part, ticket = flying.popleft()
        deadline_s = time.monotonic() + STALL_LIMIT_S
        while True:
            try:
                done[part.move][part.low : part.high] = ticket.wait(self._timeout_s)
                return
            except BusyError as error:
                self._note(error)
                if time.monotonic() > deadline_s:
                    self._give_up("the device does not answer")
                    raise


def _parts(moves: Sequence[Move]) -> Iterator[_Part]:
    for number, move in enumerate(moves):
        step = max(PART_BYTES // move.memory.page_bytes, 1)
        for low in range(0, move.memory.page_count, step):
            yield _Part(number, low, min(low + step, move.memory.page_count))
