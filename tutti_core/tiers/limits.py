"""What placement must keep to: the policy, what may be written, and the limits of namespaces.

Pure. A namespace with a share is guaranteed that much of the capacity, and may have more while the
others leave it: who has more than its share makes room first, and who has not makes room only for
its own pages. A namespace with a TTL loses what nobody used for that long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tutti_core.errors import ConfigError
from tutti_core.index.pages import NamespacePages, Victim
from tutti_core.index.radix import Node
from tutti_core.policies.admission import Admission, Always, make_admission
from tutti_core.policies.base import NS_PER_S
from tutti_core.policies.budget import WriteBudget
from tutti_core.policies.choice import DEFAULT

PIECE_PAGES_MAX = 64
"""Pages that `expired` yields at once."""

_SHARES_MAX = 1.0 + 1e-9
"""Shares that add up to 1 may be a little more in floating point."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How a store places pages; names as in `policies.choice` and `policies.admission`."""

    policy: str = DEFAULT
    admission: str = Always.name
    write_bytes_per_day: int | None = None

    def make_admission(self, capacity_pages: int) -> Admission:
        """The filter of one namespace."""
        return make_admission(self.admission, capacity_pages)

    def make_budget(self) -> WriteBudget:
        """The budget of the store; a new one, so that it holds across restarts."""
        return WriteBudget(self.write_bytes_per_day)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one namespace. They are this process's, and end with it.

    share   part of the capacity that others cannot take from it, 0 to 1.
    ttl_s   pages that were not used for so long count as gone; None: no limit.
    """

    share: float = 0.0
    ttl_s: float | None = None

    def check(self, shares_of_others: float = 0.0) -> None:
        """Raise ConfigError where a limit is impossible, or all shares together are."""
        if not _is_number(self.share) or not 0.0 <= self.share <= 1.0:
            raise ConfigError(f"share = {self.share} is not in 0 .. 1")
        if self.ttl_s is not None and not (
            _is_number(self.ttl_s) and 0.0 < self.ttl_s < float("inf")
        ):
            raise ConfigError(f"ttl_s = {self.ttl_s} is not a positive number of seconds")
        if self.share + shares_of_others > _SHARES_MAX:
            raise ConfigError(
                f"share = {self.share}: other namespaces have {shares_of_others:g} already"
            )

    @property
    def ttl_ns(self) -> int | None:
        """The TTL in nanoseconds."""
        if self.ttl_s is None:
            return None
        return max(int(self.ttl_s) * NS_PER_S + int(self.ttl_s % 1 * NS_PER_S), 1)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def expired(pages: NamespacePages, used_since: int) -> Iterator[Victim]:
    """Yield what nobody used since then, in pieces, the end of a chain before its start.

    Each has to be forgotten before the next is asked for; other changes may come between.
    """
    if used_since <= pages.opened:  # what the index was filled with counts as used then
        return
    while (page := expired_loose(pages, used_since)) is not None:
        yield page
    found = True
    while found:  # those above them come up next
        found = False
        for leaf in [leaf for leaf in pages.tree.policy.listed() if leaf.last_use < used_since]:
            while (tail := _tail(pages, leaf, used_since)) is not None:
                found = True
                yield tail


def expired_loose(pages: NamespacePages, used_since: int) -> Victim | None:
    """One of the pages without a known chain that nobody used since then and nobody pinned."""
    if used_since <= pages.opened:
        return None
    oldest = pages.oldest_loose()
    if oldest is None or oldest.last_use >= used_since:
        return None
    return replace(oldest, value=-math.inf)


def _tail(pages: NamespacePages, leaf: Node, used_since: int) -> Victim | None:
    if not leaf.listed or leaf.last_use >= used_since:  # by now
        return None
    span = min(PIECE_PAGES_MAX, len(leaf) - pages.kept_pages(leaf, PIECE_PAGES_MAX))
    return pages.tail(leaf, span, -math.inf) if span > 0 else None
