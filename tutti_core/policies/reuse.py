"""Least expected reuse first: the default policy, which learns from the stream what comes back.

Each request puts the runs it uses into a class: how often the run was used, how much the engine
generated for the request, and how little of the request was new. For each class `rates` learns, age
by age, how soon its runs are used again, and values a run by the best rate of hits that holding it
can earn. The leaf of least value goes first. New pages are weighed the same way, so what is worth
less than all that would have to go for it is not stored at all.

The last page of a request is a class of its own: the next turn often diverges there.

Shadows of evicted runs, four times the capacity (bookkeeping only), tell what would have been used
had it stayed; without them only what was kept could be learnt about.

Guard. When a run is used it is known whether leaf-first LRU would have had it: LRU holds what was
used since as many different pages were used as there is room for. While the policy has had fewer
hits than that, by more than half a percent of what was asked for, it evicts as LRU does.

Nothing is set to fit a trace; docs/policies.md has where each constant comes from, and what failed.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from tutti_core.policies.base import Policy
from tutti_core.policies.rates import BUCKETS, BUCKETS_PER_OCTAVE, F64, ReuseRates, buckets_of
from tutti_core.policies.shadows import Shadow

if TYPE_CHECKING:
    from tutti_core.index.radix import Node

_NS_PER_MS = 1e6

USES = 4
"""0 for the last page of a request, then used once, twice, more often."""
OUTPUTS = 8
"""0 where the engine does not say; then quarters: below 3 tokens, 15, 63, 255, …."""
NEWNESS = 5
"""Pages of the request over its new pages: below 2, 4, 8, 16, more."""

REFRESH_REQUESTS = 16
"""Values are computed anew after so many requests; from 4 to 16 it makes no difference."""

LEAVES_SCANNED_MAX = 512
"""Of more leaves, so many are drawn by lot and the least valuable of them goes."""

ROWS_LEARNT_MAX = 8192
"""Of more rows, so many are looked at in turn each time that is learnt: about a millisecond."""

RENEWAL_MS = 1000.0
"""A run that is loaded or saved below is as young as if it was used, but tells nothing; what comes
within this time of its use belongs to the same request."""

GUARD_SHARE = 0.005
GUARD_WINDOW = 8.0
"""Memory of the guard, in pages asked for over the capacity."""
LRU_STEPS = 64
"""What LRU would hold is computed anew so many times while as many pages are asked for."""


class Reuse(Policy):
    """The leaf goes first that is expected to earn the fewest hits for the room it takes."""

    name: ClassVar[str] = "reuse"
    shadow_share: ClassVar[float] = 4.0

    def __init__(self, capacity_pages: int = 1 << 20, seed: int = 0) -> None:
        super().__init__(capacity_pages, seed)
        assert self.shadows is not None
        self.shadows.dropped = self._dropped
        self._rates = ReuseRates((USES, OUTPUTS, NEWNESS))
        self._lots = np.random.Generator(np.random.PCG64(seed))
        # A run, resident or shadow, has a row; `run.queue` is its number. Row 0 is nobody's.
        self._used_ms = np.zeros(64)
        self._pages = np.zeros(64)
        self._weight = np.zeros(64)
        self._class = np.zeros(64, dtype=np.int32)
        self._seen = np.zeros(64, dtype=np.int64)  # buckets that are in the evidence already
        self._tip = np.zeros(64, dtype=np.bool_)  # ends with the last page of its request
        self._free: list[int] = []
        self._made = 1  # rows from here on were never used
        self._leaves: list[Node] = []
        self._rows = np.zeros(64, dtype=np.int64)  # of the leaves, in the same order
        self._places: dict[int, int] = {}  # serial -> place among the leaves
        self._requests = 0
        self._refresh_at = REFRESH_REQUESTS
        self._learn_at = 0  # the row that is looked at next
        self._lru_since_ms = -math.inf  # what was used since then, leaf-first LRU would hold
        self._lru_part_pages = 0  # and of what was used at that time, so much
        self._lru_due_pages = 0.0
        self._ahead = self._asked = 0.0
        self._value = 0.0

    # ---- what happens to runs ----
    def asked(self, pages: int, now: int) -> None:
        """See Policy."""
        fade = math.exp(-pages / (GUARD_WINDOW * max(self.capacity_pages, 1)))
        self._ahead *= fade
        self._asked = self._asked * fade + pages
        self._requests += 1
        if self._requests >= self._refresh_at:
            self._refresh_at = self._requests + REFRESH_REQUESTS
            self._learn(now / _NS_PER_MS)
        self._lru_due_pages -= pages
        if self._lru_due_pages < 0:
            room = self._room_pages()
            self._lru_due_pages = room / LRU_STEPS
            self._lru_since_ms, self._lru_part_pages = self._lru_since(room)

    def admitted(self, run: Node, pages: int, now: int) -> None:
        """See Policy."""
        if run.uses > 1:
            self._count_use(run, now, resident=False)
        elif run.queue == 0:
            run.queue = self._new_row()
            self._weight[run.queue] = 0.0  # until a request claims it
            self._class[run.queue] = _class_of(1, 0, 0)
        self._start(run, now)

    def used(self, run: Node, now: int) -> None:
        """See Policy."""
        self._count_use(run, now, resident=True)
        self._start(run, now)

    def renewed(self, run: Node, now: int) -> None:
        """See Policy."""
        now_ms = now / _NS_PER_MS
        if now_ms > self._used_ms[run.queue] + RENEWAL_MS:
            self._expose(run.queue, now_ms)
            self._used_ms[run.queue], self._seen[run.queue] = now_ms, 0

    def split(self, upper: Node, lower: Node) -> None:
        """See Policy."""
        old, row = lower.queue, self._new_row()
        upper.queue = row
        share = len(upper) / (len(upper) + len(lower))
        for column in (self._used_ms, self._class, self._seen):
            column[row] = column[old]
        self._weight[row] = self._weight[old] * share
        self._weight[old] *= 1.0 - share
        self._tip[row] = False
        self._pages[row], self._pages[old] = len(upper), len(lower)

    def settled(
        self, runs: Sequence[Node], request_pages: int, output_tokens: int | None, now: int
    ) -> None:
        """See Policy."""
        known = sum(len(run) for run in runs if run.uses > 1)
        newness = _newness(request_pages, request_pages - known)
        output = _output(output_tokens)
        pages = [0] * USES
        for run in runs:
            pages[_uses(run.uses)] += len(run)
        for run in runs:
            row, uses = run.queue, _uses(run.uses)
            self._class[row] = _class_of(uses, output, newness)
            self._weight[row] = len(run) / pages[uses]
            self._pages[row] = len(run)
            self._used_ms[row], self._seen[row] = now / _NS_PER_MS, 0
            self._tip[row] = run is runs[-1] and run.uses == 1

    def alike(self, upper: Node, lower: Node) -> bool:
        """See Policy."""
        one, other = upper.queue, lower.queue
        return bool(
            self._class[one] == self._class[other] and self._used_ms[one] == self._used_ms[other]
        )

    def merged(self, upper: Node, lower: Node) -> None:
        """See Policy."""
        self._weight[upper.queue] += self._weight[lower.queue]
        self._pages[upper.queue] += self._pages[lower.queue]
        self._tip[upper.queue] = self._tip[lower.queue]
        self.removed(lower)

    def evicted(self, leaf: Node, pages: int, now: int) -> None:
        """See Policy."""
        row = leaf.queue
        self._expose(row, now / _NS_PER_MS)
        rest = len(leaf) - pages
        if rest <= 0:
            self._shadow_row = row  # the run goes as it is
            leaf.queue = 0
            return
        self._shadow_row = shadow = self._new_row()
        for column in (self._used_ms, self._class, self._seen):
            column[shadow] = column[row]
        share = pages / len(leaf)
        self._weight[shadow] = self._weight[row] * share
        self._weight[row] *= 1.0 - share
        self._tip[shadow], self._tip[row] = self._tip[row], False
        self._pages[shadow], self._pages[row] = pages, rest

    def shadow_queue(self, leaf: Node) -> int:
        """See Policy."""
        return self._shadow_row

    def removed(self, run: Node) -> None:
        """See Policy."""
        if run.queue:
            self._free_row(run.queue)
            run.queue = 0

    def _dropped(self, shadow: Shadow, now: int) -> None:
        self._expose(shadow.queue, now / _NS_PER_MS)
        self._free_row(shadow.queue)

    def _start(self, run: Node, now: int) -> None:
        row = run.queue
        self._used_ms[row] = now / _NS_PER_MS
        self._seen[row] = 0
        self._pages[row] = len(run)
        self._tip[row] = False

    def _count_use(self, run: Node, now: int, resident: bool) -> None:
        row = run.queue
        age_ms = max(now / _NS_PER_MS - float(self._used_ms[row]), 0.0)
        bucket = _bucket(age_ms)
        for run_class, weight in self._evidence(row):
            if self._seen[row] < bucket:
                self._rates.expose_one(run_class, weight, int(self._seen[row]), bucket)
            self._rates.use(run_class, weight, bucket, exposed=self._seen[row] > bucket)
        self._ahead += (len(run) if resident else 0) - self._held_by_lru(run)

    def _held_by_lru(self, run: Node) -> int:
        """How many pages of a run leaf-first LRU would hold, had it been in charge.

        Of the request that it holds in part, those nearest to the root.
        """
        used_ms = self._used_ms[run.queue]
        if used_ms != self._lru_since_ms:
            return len(run) if used_ms > self._lru_since_ms else 0
        return min(max(self._lru_part_pages - run.depth, 0), len(run))

    def _expose(self, row: int, now_ms: float) -> None:
        bucket = int(_lived(np.array([now_ms - self._used_ms[row]]))[0])
        if bucket > self._seen[row]:
            for run_class, weight in self._evidence(row):
                self._rates.expose_one(run_class, weight, int(self._seen[row]), bucket)
            self._seen[row] = bucket

    def _evidence(self, row: int) -> list[tuple[int, float]]:
        """The classes that a run speaks for, and how much: its own, and that of its last page."""
        weight, run_class = float(self._weight[row]), int(self._class[row])
        if weight == 0.0 or not self._tip[row]:
            return [(run_class, weight)] if weight else []
        tip = (run_class % _TIP_CLASSES, 1.0)
        return [(run_class, weight), tip] if self._pages[row] > 1 else [tip]

    # ---- learning ----
    def _learn(self, now_ms: float) -> None:
        """Put the ages that runs have reached into the evidence, and compute the values."""
        size = len(self._used_ms)
        start = self._learn_at if self._learn_at < size else 0
        self._learn_at = start + ROWS_LEARNT_MAX
        rows = start + np.flatnonzero(self._weight[start : self._learn_at] > 0.0)
        bucket = _lived(now_ms - self._used_ms[rows])
        aged = bucket > self._seen[rows]
        rows, bucket = rows[aged], bucket[aged]
        whole = (self._pages[rows] > 1) | ~self._tip[rows]
        for part, tip in ((whole, False), (self._tip[rows], True)):
            chosen = rows[part]
            classes = self._class[chosen] % _TIP_CLASSES if tip else self._class[chosen]
            weights = np.ones(len(chosen)) if tip else self._weight[chosen]
            self._rates.expose(classes, weights, self._seen[chosen], bucket[part])
        self._seen[rows] = bucket
        self._rates.refresh()

    def _room_pages(self) -> int:
        """What LRU would have room for: as much as is held here; other trees may have the rest."""
        assert self.shadows is not None
        return min(self.capacity_pages, int(self._pages.sum()) - self.shadows.page_count)

    def _lru_since(self, room: int) -> tuple[float, int]:
        """The time since which `room` pages were used; leaf-first LRU evicted what is older.

        And how many pages it holds of what was used at that very time.
        Of many rows some are drawn by lot, to stand for all.
        """
        used_ms, pages, size = self._used_ms, self._pages, len(self._used_ms)
        if size > ROWS_LEARNT_MAX:
            drawn = self._lots.integers(0, size, ROWS_LEARNT_MAX)
            used_ms, pages = used_ms[drawn], pages[drawn] * (size / ROWS_LEARNT_MAX)
        order = np.argsort(-used_ms)
        over = np.flatnonzero(np.cumsum(pages[order]) > room)
        if not len(over):
            return -math.inf, 0
        since_ms = used_ms[order[over[0]]]
        newer = pages[used_ms > since_ms].sum()
        return float(since_ms), max(int(room - newer), 0)

    @property
    def guarded(self) -> bool:
        """Whether leaf-first LRU would have had more hits of late, so that its order rules."""
        return self._ahead < -GUARD_SHARE * self._asked

    # ---- order ----
    def enlist(self, leaf: Node) -> None:
        """See Policy."""
        place = len(self._leaves)
        if place == len(self._rows):
            self._rows = np.concatenate([self._rows, np.zeros_like(self._rows)])
        self._leaves.append(leaf)
        self._rows[place] = leaf.queue
        self._places[leaf.serial] = place

    def delist(self, leaf: Node) -> None:
        """See Policy."""
        place = self._places.pop(leaf.serial)
        last = self._leaves.pop()
        if last is not leaf:
            self._leaves[place] = last
            self._rows[place] = self._rows[len(self._leaves)]
            self._places[last.serial] = place

    def victim(self, now: int) -> Node | None:
        """See Policy."""
        count = len(self._leaves)
        if count == 0:
            return None
        places: npt.NDArray[np.int64] | None = None
        rows = self._rows[:count]
        if count > LEAVES_SCANNED_MAX:
            places = self._lots.integers(0, count, LEAVES_SCANNED_MAX)
            rows = rows[places]
        used_ms = self._used_ms[rows]
        if self.guarded:
            oldest = int(used_ms.argmin())
            places = np.array([oldest if places is None else places[oldest]])
            rows, used_ms = rows[[oldest]], used_ms[[oldest]]
        classes = self._class[rows]
        classes = np.where(self._tip[rows], classes % _TIP_CLASSES, classes)
        values = self._rates.value(classes, now / _NS_PER_MS - used_ms)
        least = np.flatnonzero(values == values.min())
        at = int(least[used_ms[least].argmin()])
        self._value = float(values[at])
        return self._leaves[at if places is None else int(places[at])]

    def span(self, leaf: Node) -> int:
        """See Policy."""
        return 1 if self._tip[leaf.queue] and not self.guarded else len(leaf)

    def value(self, leaf: Node, now: int) -> float:
        """See Policy."""
        return self._value

    def loose_value(self, last_use: int, now: int) -> float:
        """See Policy. That of a run used once, of which no more is known."""
        age_ms = np.array([(now - last_use) / _NS_PER_MS])
        return float(self._rates.value(np.array([_class_of(1, 0, 0)], dtype=np.int32), age_ms)[0])

    def worth(
        self,
        parts: Sequence[tuple[int, Shadow | None]],
        request_pages: int,
        output_tokens: int | None,
    ) -> list[float]:
        """See Policy."""
        if self.guarded:
            return [math.inf] * len(parts)
        new = sum(pages for pages, shadow in parts if shadow is None)
        newness, output = _newness(request_pages, new), _output(output_tokens)
        uses = [_uses(shadow.uses + 1) if shadow is not None else 1 for _, shadow in parts]
        classes = np.array([_class_of(u, output, newness) for u in uses], dtype=np.int32)
        return [float(v) for v in self._rates.value(classes, np.zeros(len(parts)))]

    def listed(self) -> Collection[Node]:
        """See Policy."""
        return list(self._leaves)

    def check_runs(self, runs: Collection[Node]) -> None:
        """See Policy. Each row but 0 belongs to one run, to one shadow, or is free."""
        assert self.shadows is not None
        owned = [run.queue for run in runs] + [shadow.queue for shadow in self.shadows]
        size = len(self._used_ms)
        assert sorted(owned + self._free) == list(range(1, self._made)) and self._made <= size
        assert all(len(column) == size for column in (self._pages, self._weight, self._class))
        free = np.array([0, *self._free])
        assert not self._weight[free].any() and not self._pages[free].any()
        assert not self._tip[free].any()
        for run in runs:
            # Pages that were lost without a word are counted until the next use.
            assert self._pages[run.queue] >= len(run)
        rows = np.array(owned, dtype=np.int64)
        assert (self._pages[rows] >= 1).all()
        assert (self._weight[rows] >= 0).all() and (self._weight[rows] <= 1 + 1e-6).all()
        assert (self._class[rows] >= _TIP_CLASSES).all()
        assert (self._class[rows] < USES * _TIP_CLASSES).all()
        assert (self._seen[rows] >= 0).all() and (self._seen[rows] <= BUCKETS).all()
        assert (self._class[rows[self._tip[rows]]] < 2 * _TIP_CLASSES).all()
        for place, leaf in enumerate(self._leaves):
            assert self._places[leaf.serial] == place and self._rows[place] == leaf.queue
        assert len(self._places) == len(self._leaves)
        self.shadows.check()
        self._rates.check()

    # ---- rows ----
    def _new_row(self) -> int:
        if self._free:
            return self._free.pop()
        if self._made == len(self._used_ms):
            for name in ("_used_ms", "_pages", "_weight", "_class", "_seen", "_tip"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self._made += 1
        return self._made - 1

    def _free_row(self, row: int) -> None:
        self._weight[row] = self._pages[row] = 0.0
        self._tip[row] = False
        self._free.append(row)


_TIP_CLASSES = OUTPUTS * NEWNESS  # the classes of uses = 0 are the first ones


def _class_of(uses: int, output: int, newness: int) -> int:
    return (uses * OUTPUTS + output) * NEWNESS + newness


def _uses(count: int) -> int:
    return min(count, USES - 1)


def _output(tokens: int | None) -> int:
    if tokens is None:
        return 0
    return min(1 + ((tokens + 1).bit_length() - 1) // 2, OUTPUTS - 1)


def _newness(request_pages: int, new_pages: int) -> int:
    share = max(request_pages, 1) // max(new_pages, 1)
    return min(max(share, 1).bit_length() - 1, NEWNESS - 1)


def _lived(age_ms: F64) -> npt.NDArray[np.int64]:
    """How many buckets runs of these ages have lived through; the last one by reaching it."""
    bucket = buckets_of(age_ms)
    return np.where(bucket == BUCKETS - 1, BUCKETS, bucket)


def _bucket(age_ms: float) -> int:
    return min(int(math.log2(max(age_ms, 1.0)) * BUCKETS_PER_OCTAVE), BUCKETS - 1)
