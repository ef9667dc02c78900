"""What a policy is told about the runs of a prefix tree, and what it answers.

A policy orders the leaves of one namespace's tree for eviction. It sees runs (`Node`s of
`index/radix.py`), never pages: the pages of a run have one history, and go from the end of the run,
so a page never outlives what it depends on whatever the policy says. Only leaves can go; a run that
has children is off the list and comes back, with the history it has by then, when they are gone.

Pure: time and seed are passed in; the same calls give the same answers. Calls come under the lock
of the store; one policy serves one tree.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, ClassVar

from tutti_core.policies.shadows import Shadow, Shadows

if TYPE_CHECKING:
    from tutti_core.index.radix import Node

NS_PER_S = 1_000_000_000


class Policy(ABC):
    """Order of eviction among the leaves of one tree.

    Parameters
        capacity_pages: how many pages the tree may hold; the whole store's where namespaces share.
        seed: for policies that draw lots.
    Times are nanoseconds and rise from call to call; the zero is anywhere.
    Cost       every method amortised O(log n) or better a run.
    """

    name: ClassVar[str]
    shadow_share: ClassVar[float] = 0.0
    """How many evicted pages to remember, as a share of the capacity; 0 for none."""

    def __init__(self, capacity_pages: int = 1 << 20, seed: int = 0) -> None:
        self.capacity_pages = capacity_pages
        self.seed = seed
        self.shadows: Shadows | None = None
        if self.shadow_share:
            self.shadows = Shadows(int(capacity_pages * self.shadow_share))
        """A run that comes back has the history it had, one use more, and is `admitted` with
        `uses` > 1 and its former `queue`."""

    def admitted(self, run: Node, pages: int, now: int) -> None:
        """The last `pages` of `run` have come; all of them, or the end of a run not used yet."""

    def used(self, run: Node, now: int) -> None:
        """All pages of `run` were used; its history says so already."""

    def renewed(self, run: Node, now: int) -> None:
        """Something below `run`, or a transfer of it, made it newer; `last_use` says so already."""

    def split(self, upper: Node, lower: Node) -> None:
        """`upper`, new and not a leaf, was cut off the front of `lower`; it has its history."""
        upper.rank = lower.rank
        upper.queue = lower.queue

    def asked(self, pages: int, now: int) -> None:
        """A request asks for so many pages; what it finds is `used` and `settled` next."""

    def settled(
        self, runs: Sequence[Node], request_pages: int, output_tokens: int | None, now: int
    ) -> None:
        """`runs`, from the root on, are what the tree has of a request of `request_pages`.

        Comes after the match of a request, and again when it is saved, as the engine knows more
        about it then. `output_tokens`: what the engine generated for it; None if it did not say.
        """

    def alike(self, upper: Node, lower: Node) -> bool:
        """Whether a run and the one below it may become one, as their histories tell the same."""
        return False

    def merged(self, upper: Node, lower: Node) -> None:
        """`lower`, which is not on the list, becomes the end of `upper`."""

    def evicted(self, leaf: Node, pages: int, now: int) -> None:
        """The last `pages` of `leaf` are about to go, because the policy or a limit said so."""

    def shadow_queue(self, leaf: Node) -> int:
        """What the shadow of pages `evicted` from `leaf` remembers as its `queue`."""
        return leaf.queue

    def removed(self, run: Node) -> None:
        """`run` has lost its last page and has left the tree; it is not on the list."""

    @abstractmethod
    def enlist(self, leaf: Node) -> None:
        """`leaf` may be evicted from now on."""

    @abstractmethod
    def delist(self, leaf: Node) -> None:
        """`leaf` may not be evicted any more, or is gone."""

    @abstractmethod
    def victim(self, now: int) -> Node | None:
        """The leaf to evict from next; None if none is listed."""

    def span(self, leaf: Node) -> int:
        """How many pages of a victim may go before `victim` is asked again; at least 1."""
        return len(leaf)

    def value(self, leaf: Node, now: int) -> float:
        """What keeping a victim is worth, on a scale that all trees with this policy share.

        Among the victims of several namespaces the one of least value goes.
        """
        return leaf.last_use

    def loose_value(self, last_use: int, now: int) -> float:
        """`value` of a page that stands in no tree, of which only its last use is known."""
        return last_use

    def worth(
        self,
        parts: Sequence[tuple[int, Shadow | None]],
        request_pages: int,
        output_tokens: int | None,
    ) -> list[float]:
        """What new pages would be worth, on the scale of `value`, part by part.

        A page is not stored if something of more value would have to go for it.
        """
        return [math.inf] * len(parts)

    def resize(self, capacity_pages: int) -> None:
        """The tree may hold more or fewer pages from now on."""
        self.capacity_pages = capacity_pages
        if self.shadows is not None:
            self.shadows.pages_max = int(capacity_pages * self.shadow_share)

    @abstractmethod
    def listed(self) -> Collection[Node]:
        """All leaves on the list, in no order. O(leaves); for tests."""

    def check(self, leaves: Collection[Node]) -> None:
        """Raise AssertionError unless exactly `leaves` are on the list; for tests."""
        listed = self.listed()
        assert len(listed) == len(leaves)
        assert {id(leaf) for leaf in listed} == {id(leaf) for leaf in leaves}

    def check_runs(self, runs: Collection[Node]) -> None:
        """Raise AssertionError unless what is kept of `runs`, the whole tree, is sound."""
