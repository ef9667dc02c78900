"""Greedy-dual with frequency on a prefix tree: cheap and rare runs go first (Cherkasova, HPL 1998).

The value of a run is what it was used times what a page of it costs to compute again, over an
inflation that rises to the value of what was evicted last; so what is not used ages. All pages have
one size, so the size of the original is left out.

A page costs more the deeper it stands: attention reads all tokens before it, the rest of the model
does the same work for each token. The two are equal at N / (2 * layers * width) tokens, N being the
parameters (about 27,000 for Llama 3 8B: 7e9 / (2 * 32 * 4096)), which is 420 pages of 64 tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, ClassVar

from tutti_core.policies.base import Policy
from tutti_core.policies.queue import LeafQueue

if TYPE_CHECKING:
    from tutti_core.index.radix import Node


class Gdsf(Policy):
    """Least of inflation + uses * cost first; `run.rank` is that value, as of the last use."""

    name: ClassVar[str] = "gdsf"
    doubling_pages: ClassVar[int] = 420
    """Depth at which a page costs twice what the first costs. A model's figure, never a trace's."""

    def __init__(self, capacity_pages: int = 1 << 20, seed: int = 0) -> None:
        super().__init__(capacity_pages, seed)
        self._queue = LeafQueue()
        self._inflation = 0.0

    def admitted(self, run: Node, pages: int, now: int) -> None:
        """See Policy."""
        self._value(run)

    def used(self, run: Node, now: int) -> None:
        """See Policy."""
        self._value(run)

    def evicted(self, leaf: Node, pages: int, now: int) -> None:
        """See Policy."""
        self._inflation = max(self._inflation, leaf.rank)

    def enlist(self, leaf: Node) -> None:
        """See Policy."""
        self._queue.put(leaf, leaf.rank)

    def delist(self, leaf: Node) -> None:
        """See Policy."""
        self._queue.remove(leaf)

    def victim(self, now: int) -> Node | None:
        """See Policy."""
        return self._queue.first()

    def listed(self) -> Collection[Node]:
        """See Policy."""
        return list(self._queue)

    def _value(self, run: Node) -> None:
        middle = run.depth + len(run) / 2
        value = self._inflation + run.uses * (1 + middle / self.doubling_pages)
        if run.listed:
            self._queue.put(run, value)
        else:
            run.rank = value
