"""The slots of one process against a plain model: nothing is handed out twice or too early."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tutti_core.tiers.space import Space

SEGMENT = 32768
SIZES = (4096, 8192, 12288)
POOLS = 3
U64 = np.uint64


class SpaceModel(RuleBasedStateMachine):
    """Every slot is free, reserved, taken (generation) or waiting for the loads begun before."""

    def __init__(self) -> None:
        super().__init__()
        self.space = Space(SEGMENT)
        self.sizes: dict[int, int] = {}  # segment -> slot size
        self.reserved: set[int] = set()
        self.taken: dict[int, int] = {}
        self.waiting: dict[int, set[int]] = {}  # slot -> loads that may be reading it
        self.loads: set[int] = set()
        self.generation = 0
        self.next_segment = 0

    def slots_of(self, segment: int) -> list[int]:
        return [segment << 32 | i for i in range(SEGMENT // self.sizes[segment])]

    def free(self, size: int) -> set[int]:
        free: set[int] = set()
        for segment, segment_size in self.sizes.items():
            if segment_size == size:
                free |= set(self.slots_of(segment))
        blocked = {slot for slot, loads in self.waiting.items() if loads}
        return free - self.reserved - set(self.taken) - blocked

    @rule(size=st.sampled_from(SIZES), used=st.integers(0, 255))
    def add(self, size: int, used: int) -> None:
        if len(self.sizes) >= 9:
            return
        segment = self.next_segment
        self.next_segment += 1
        taken = {}
        for i in range(SEGMENT // size):
            if used >> i & 1:
                self.generation += 1
                taken[i] = self.generation
                self.taken[segment << 32 | i] = self.generation
        self.space.add(segment, segment % POOLS, size, taken)
        self.sizes[segment] = size

    @rule(size=st.sampled_from(SIZES), count=st.integers(0, 12))
    def allocate(self, size: int, count: int) -> None:
        free = self.free(size)
        slots = self.space.allocate(count, size).tolist()
        assert len(slots) == len(set(slots)) == min(count, len(free)), "space was left unused"
        assert set(slots) <= free, "a slot in use was handed out"
        per_pool = {p: sum((s >> 32) % POOLS == p for s in free) for p in range(POOLS)}
        open_pools = [p for p, n in per_pool.items() if n]
        if slots and all(per_pool[p] >= count for p in open_pools):
            counts = [sum((s >> 32) % POOLS == p for s in slots) for p in open_pools]
            assert max(counts) - min(counts) <= 1, "not striped"
            if len(open_pools) > 1:
                neighbours = itertools.pairwise(slots)
                assert all((a >> 32) % POOLS != (b >> 32) % POOLS for a, b in neighbours)
        for slot in slots:
            self.waiting.pop(slot, None)
        self.reserved |= set(slots)

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        slots = self.choose(data, self.reserved)
        generations = []
        for slot in slots:
            self.generation += 1
            self.taken[slot] = self.generation
            generations.append(self.generation)
        self.space.commit(np.array(slots, U64), np.array(generations, U64))
        self.reserved -= set(slots)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        slots = self.choose(data, self.reserved)
        self.space.cancel(np.array(slots, U64))
        self.reserved -= set(slots)

    @rule(data=st.data(), foreign=st.booleans())
    def give_up(self, data: st.DataObject, foreign: bool) -> None:
        slots = self.choose(data, set(self.taken))
        array = np.array([*slots, *([999 << 32] if foreign else [])], U64)
        self.space.retire(array)
        assert not self.space.holds(array[: len(slots)], self.generations(slots)).any()
        self.space.give_up(array)
        for slot in slots:
            del self.taken[slot]
            self.waiting[slot] = set(self.loads)

    @rule()
    def begin_load(self) -> None:
        self.loads.add(self.space.begin_load())

    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        if self.loads:
            load = data.draw(st.sampled_from(sorted(self.loads)))
            self.space.end_load(load)
            self.loads.discard(load)
            for loads in self.waiting.values():
                loads.discard(load)

    @rule(size=st.sampled_from(SIZES))
    def recut(self, size: int) -> None:
        self.space.collect()
        empty = self.space.empty_segments(other_than=size)
        used = {s >> 32 for s in (*self.reserved, *self.taken)}
        used |= {s >> 32 for s, loads in self.waiting.items() if loads}
        assert set(empty) == {s for s, z in self.sizes.items() if s not in used and z != size}
        if empty:
            self.space.remove(empty[0])
            self.space.add(empty[0], empty[0] % POOLS, size)
            self.sizes[empty[0]] = size
            self.waiting = {s: w for s, w in self.waiting.items() if s >> 32 != empty[0]}

    def choose(self, data: st.DataObject, slots: set[int]) -> list[int]:
        if not slots:
            return []
        return data.draw(st.lists(st.sampled_from(sorted(slots)), unique=True, max_size=8))

    def generations(self, slots: list[int]) -> np.ndarray:
        return np.array([self.taken[s] for s in slots], U64)

    @invariant()
    def sound(self) -> None:
        self.space.check()
        taken = sorted(self.taken)
        array = np.array(taken, U64)
        assert self.space.holds(array, self.generations(taken)).all()
        assert not self.space.holds(array, self.generations(taken) + U64(1)).any()
        assert all(self.space.holds_page(s, g) for s, g in self.taken.items())
        busy = self.reserved | set(self.taken) | {s for s, w in self.waiting.items() if w}
        assert self.space.used_bytes == sum(self.sizes[s >> 32] for s in busy)
        for size in SIZES:
            assert self.space.free_count(size) == len(self.free(size))


TestSpaceModel = SpaceModel.TestCase
TestSpaceModel.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
