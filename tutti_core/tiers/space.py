"""Slots of the segments that one process owns: which are free, taken, or waiting for readers.

Pure: no files, clock or locks. A slot id is `segment << 32 | slot`, as in the catalog.

Life of a slot: free -> reserved (bytes on their way) -> taken (its record is committed) ->
waiting (the record is gone, a reader may still be at it) -> free. Readers are not counted per slot:
each load notes when it began, and a slot that was given up at time t is free once every load that
began before t has ended.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt
from sortedcontainers import SortedList

U64 = npt.NDArray[np.uint64]

_FREE = 0
_RESERVED = (1 << 64) - 1


class Segment:
    """One owned segment, cut into `slot_count` slots of `slot_bytes`."""

    __slots__ = ("free_count", "generation", "owned_since", "pool", "segment", "slot_bytes")

    def __init__(self, segment: int, pool: int, slot_bytes: int, slot_count: int) -> None:
        self.segment = segment
        self.pool = pool
        self.slot_bytes = slot_bytes
        self.generation: U64 = np.zeros(slot_count, dtype=np.uint64)  # 0 is free
        self.free_count = slot_count
        self.owned_since = 0  # on the clock of the loads


class Space:
    """Allocates slots from owned segments, striping whole pages over the pools.

    Parameters
        segment_bytes: size of a segment; slots never straddle two.
    """

    def __init__(self, segment_bytes: int) -> None:
        self.segment_bytes = segment_bytes
        self.segments: dict[int, Segment] = {}
        self._with_space: dict[tuple[int, int], dict[int, Segment]] = {}  # (slot size, pool)
        self._waiting: deque[tuple[int, U64]] = deque()
        self._loads: SortedList = SortedList()  # start times of loads in flight
        self._held_back: U64 = np.empty(0, dtype=np.uint64)  # given up, but a late load reads them
        self._narrow: dict[int, set[int]] = {}  # of loads that are late: start, and their slots
        self._clock = 0
        self._turn = 0
        self.shut: frozenset[int] = frozenset()
        """Pools of which no slot is handed out now, and whose slots do not count as free."""

    # ---- segments ----
    def add(
        self, segment: int, pool: int, slot_bytes: int, taken: dict[int, int] | None = None
    ) -> None:
        """Own a segment; `taken` maps its used slots to their generations."""
        piece = Segment(segment, pool, slot_bytes, self.segment_bytes // slot_bytes)
        for slot, generation in (taken or {}).items():
            piece.generation[slot] = generation
        piece.free_count -= len(taken or {})
        self._clock += 1
        piece.owned_since = self._clock
        self.segments[segment] = piece
        if piece.free_count:
            self._with_space.setdefault((slot_bytes, pool), {})[segment] = piece

    def remove(self, segment: int) -> None:
        """Give up a segment. All of its slots must be free."""
        piece = self.segments.pop(segment)
        assert piece.free_count == len(piece.generation)
        self._with_space[piece.slot_bytes, piece.pool].pop(segment, None)

    def empty_segments(self, other_than: int) -> list[int]:
        """Owned segments without a single used slot, cut for another slot size."""
        return [
            s.segment
            for s in self.segments.values()
            if s.free_count == len(s.generation)
            and s.slot_bytes != other_than
            and s.pool not in self.shut
        ]

    def slot_count(self, slot_bytes: int | None) -> int:
        """Slots of this size (None: of any) in owned segments."""
        return sum(
            len(s.generation)
            for s in self.segments.values()
            if slot_bytes is None or s.slot_bytes == slot_bytes
        )

    def holds_page(self, slot: int, generation: int) -> bool:
        """Whether a slot lies in an owned segment and holds that generation."""
        piece, index = self.segments.get(slot >> 32), slot & 0xFFFFFFFF
        return (
            piece is not None
            and index < len(piece.generation)
            and int(piece.generation[index]) == generation
        )

    # ---- slots ----
    def allocate(self, count: int, slot_bytes: int) -> U64:
        """Reserve up to `count` slots and return their ids; fewer (or none) when space runs out.

        Pages go round the pools in turn; within a pool, slots come from one segment in rising order
        as far as possible, so that a run of pages lies together.
        """
        self.collect()
        pools = [
            (pool, segments)
            for (size, pool), segments in sorted(self._with_space.items(), key=lambda kv: kv[0][1])
            if size == slot_bytes and segments and pool not in self.shut
        ]
        if not pools or count == 0:
            return np.empty(0, dtype=np.uint64)
        turn, self._turn = self._turn, self._turn + count
        wanted = [len(range((i - turn) % len(pools), count, len(pools))) for i in range(len(pools))]
        runs = [
            self._take(segments, want) for want, (_, segments) in zip(wanted, pools, strict=True)
        ]
        short = count - sum(map(len, runs))
        for i, (_, segments) in enumerate(pools):
            if short and segments:
                more = self._take(segments, short)
                runs[i] = np.concatenate([runs[i], more])
                short -= len(more)
        return _interleave(runs, turn)

    def commit(self, slots: U64, generations: U64) -> None:
        """Reserved slots hold committed pages now."""
        for piece, index, chosen in self._by_segment(slots):
            assert (piece.generation[index] == _RESERVED).all()
            piece.generation[index] = generations[chosen]

    def cancel(self, slots: U64) -> None:
        """Reserved slots were not used after all."""
        self._release(slots)

    def retire(self, slots: U64) -> None:
        """The records of these slots are about to go: they hold nothing from now on."""
        for piece, index, _ in self._by_segment(slots):
            piece.generation[index] = _RESERVED

    def retire_held(self, slots: U64, generations: U64) -> npt.NDArray[np.bool_]:
        """`retire` the slots that are owned and hold these generations; the others stay as is.

        A slot given twice is retired once; the result says True for its first place only.
        """
        result = np.zeros(len(slots), dtype=np.bool_)
        for piece, index, chosen in self._by_segment(slots):
            last = len(piece.generation) - 1
            held = (index <= last) & (
                piece.generation[np.minimum(index, last)] == generations[chosen]
            )
            _, first = np.unique(index[held], return_index=True)
            result[chosen[np.flatnonzero(held)[first]]] = True
            piece.generation[index[held]] = _RESERVED
        return result

    def give_up(self, slots: U64) -> None:
        """The records of these slots are gone; free them when no reader can be at them."""
        if len(slots) == 0:
            return
        self._clock += 1
        self.retire(slots)
        self._waiting.append((self._clock, slots))

    def holds(self, slots: U64, generations: U64) -> npt.NDArray[np.bool_]:
        """Whether each slot still holds that generation; True for slots of other owners."""
        result = np.ones(len(slots), dtype=np.bool_)
        for piece, index, chosen in self._by_segment(slots):
            last = len(piece.generation) - 1  # the segment may have been cut anew since
            held = piece.generation[np.minimum(index, last)] == generations[chosen]
            result[chosen] = held & (index <= last)
        return result

    def protects(self, slots: U64, start: int) -> npt.NDArray[np.bool_]:
        """Whether no slot could be handed out again since the load that began at `start`.

        False where the segment is another owner's, and where it came into this one's hands later:
        what its former owner gave up is free without waiting for this load.
        """
        result = np.zeros(len(slots), dtype=np.bool_)
        for piece, _, chosen in self._by_segment(slots):
            result[chosen] = piece.owned_since < start
        return result

    # ---- loads ----
    def begin_load(self) -> int:
        """Note that a load starts now; returns its start time for `end_load`."""
        self._clock += 1
        self._loads.add(self._clock)
        return self._clock

    def waiting_count(self, slot_bytes: int) -> int:
        """Slots of this size that loads in flight keep from being free."""
        self.collect()
        return sum(
            len(index)
            for _, slots in self._waiting
            for piece, index, _ in self._by_segment(slots)
            if piece.slot_bytes == slot_bytes and piece.pool not in self.shut
        )

    def waiting_bytes(self) -> int:
        """Bytes in slots of all sizes that loads in flight keep from being free."""
        self.collect()
        return sum(
            len(index) * piece.slot_bytes
            for _, slots in self._waiting
            for piece, index, _ in self._by_segment(slots)
            if piece.pool not in self.shut
        )

    def narrow_load(self, start: int, slots: U64) -> None:
        """The load that began at `start` reads these slots and no others, and may do so for long.

        Until it ends they wait, and what others give up does not wait for it.
        """
        if start in self._loads:
            self._loads.remove(start)
            self._narrow[start] = set(slots.tolist())

    def end_load(self, start: int) -> None:
        """The load that began at `start` touches no slot any more."""
        if start in self._narrow:
            kept = np.array(sorted(self._narrow.pop(start)), dtype=np.uint64)
            mine = np.isin(self._held_back, kept)
            back, self._held_back = self._held_back[mine], self._held_back[~mine]
            self._release(self._free_of_late_loads(back))
        else:
            self._loads.remove(start)

    # ---- figures ----
    @property
    def used_bytes(self) -> int:
        """Bytes in slots that are not free."""
        self.collect()
        return sum(
            (len(s.generation) - s.free_count) * s.slot_bytes for s in self.segments.values()
        )

    def free_count(self, slot_bytes: int) -> int:
        """Slots of this size that `allocate` could hand out now."""
        self.collect()
        return sum(
            piece.free_count
            for (size, pool), segments in self._with_space.items()
            if size == slot_bytes and pool not in self.shut
            for piece in segments.values()
        )

    def check(self) -> None:
        """Raise AssertionError if the counts do not add up; for tests."""
        for piece in self.segments.values():
            assert piece.free_count == int(np.count_nonzero(piece.generation == _FREE))
            listed = piece.segment in self._with_space.get((piece.slot_bytes, piece.pool), {})
            assert listed == (piece.free_count > 0)
        for slots in (*(slots for _, slots in self._waiting), self._held_back):
            for piece, index, _ in self._by_segment(slots):
                assert (piece.generation[index] == _RESERVED).all()

    # ---- inside ----
    def pools_with_space(self, slot_bytes: int) -> set[int]:
        """Pools in which a slot of this size is free."""
        return {
            p for (size, p), segments in self._with_space.items() if size == slot_bytes and segments
        }

    def _take(self, segments: dict[int, Segment], count: int) -> U64:
        runs: list[U64] = []
        while count and segments:
            piece = next(iter(segments.values()))
            index = np.flatnonzero(piece.generation == _FREE)[:count]
            piece.generation[index] = _RESERVED
            piece.free_count -= len(index)
            if piece.free_count == 0:
                del segments[piece.segment]
            runs.append(index.astype(np.uint64) | np.uint64(piece.segment << 32))
            count -= len(index)
        return np.concatenate(runs) if runs else np.empty(0, dtype=np.uint64)

    def _release(self, slots: U64) -> None:
        for piece, index, _ in self._by_segment(slots):
            assert (piece.generation[index] == _RESERVED).all()
            piece.generation[index] = _FREE
            piece.free_count += len(index)
            self._with_space.setdefault((piece.slot_bytes, piece.pool), {})[piece.segment] = piece

    def collect(self) -> None:
        """Free what no load in flight can be reading; `allocate` does it first."""
        oldest = self._loads[0] if self._loads else self._clock + 1
        while self._waiting and self._waiting[0][0] < oldest:
            self._release(self._free_of_late_loads(self._waiting.popleft()[1]))

    def _free_of_late_loads(self, slots: U64) -> U64:
        """The slots that no late load reads; the others wait for it."""
        if not self._narrow or len(slots) == 0:
            return slots
        read = np.array(sorted(set().union(*self._narrow.values())), dtype=np.uint64)
        late = np.isin(slots, read)
        self._held_back = np.concatenate([self._held_back, slots[late]])
        return slots[~late]

    def _by_segment(
        self, slots: U64
    ) -> list[tuple[Segment, npt.NDArray[np.intp], npt.NDArray[np.intp]]]:
        """Group slot ids by owned segment: (segment, slot indices, positions in `slots`)."""
        number = (slots >> np.uint64(32)).astype(np.intp)
        index = (slots & np.uint64(0xFFFFFFFF)).astype(np.intp)
        order = np.argsort(number, kind="stable")
        ordered = number[order]
        cuts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
        groups = []
        for chosen in np.split(order, cuts) if len(order) else ():
            piece = self.segments.get(int(number[chosen[0]]))
            if piece is not None:
                groups.append((piece, index[chosen], chosen))
        return groups


def _interleave(runs: list[U64], turn: int) -> U64:
    """Deal the slots of each pool out in turn, beginning with pool `turn`."""
    if len(runs) == 1:
        return runs[0]
    order = [runs[(turn + i) % len(runs)] for i in range(len(runs))]
    longest = max(map(len, order))
    grid = np.full((longest, len(order)), _RESERVED, dtype=np.uint64)
    for column, run in enumerate(order):
        grid[: len(run), column] = run
    flat = grid.reshape(-1)
    return np.asarray(flat[flat != _RESERVED], dtype=np.uint64)
