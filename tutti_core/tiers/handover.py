"""Where pages of an exclusive tier change places: so that a look-up can wait until none does.

A page that moves is offered where it goes before it leaves where it was. A look-up asks one tier
after the other, so what moves up and down again meanwhile is in neither when it is asked for. Who
found something missing looks at `moves`, and where that has changed looks again while `still`.

Taken before the lock of the manager, and that before the lock of a memory tier. Held for memory
work; by a look-up that looks again, for one look-up in the catalog too.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Handover:
    """Counts moves, and holds them up. Threads: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moves = 0

    @contextlib.contextmanager
    def move(self) -> Iterator[None]:
        """Within this a page is offered in another tier, or leaves one because another has it."""
        with self._lock:
            try:
                yield
            finally:
                self._moves += 1

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Within this nothing moves."""
        with self._lock:
            yield

    @property
    def moves(self) -> int:
        """How often something has moved; waits for a move that is under way."""
        with self._lock:
            return self._moves
