"""FaultyDevices: every row of its table of faults, power loss, and stopping at each operation."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from errno import EFAULT, EIO, ENOSPC
from functools import partial
from typing import get_args

import numpy as np
import pytest
import xxhash
from thread_kit import beside, together

from tutti_core.errors import BusyError, StoreClosedError
from tutti_core.io.transport import BLOCK_BYTES, BatchResult, Op, Transport
from tutti_core.testing import (
    FOREVER,
    Arena,
    Fault,
    FaultPlan,
    FaultyDevices,
    Item,
    Media,
    Oracle,
    make_batch,
    page_bytes,
)
from tutti_core.testing.faults import LATER_OPERATIONS_MAX, SCRIBBLE, FaultKind, FaultOp
from tutti_core.testing.media import SECTOR_BYTES, VERSIONS_MAX

WAIT_S = 60.0
BLOCKS = 16


class Bench:
    """Writes and reads whole blocks of one faulty device."""

    def __init__(self, devices: FaultyDevices, seed: int = 1) -> None:
        self.devices = devices
        self.arena = Arena(1 << 20, random.Random(seed))

    def submit(self, op: Op, block: int, data: bytes, device: int = 0) -> tuple[int, Item]:
        item = Item(device, block * BLOCK_BYTES, self.arena.carve([len(data)]))
        self.arena.put(item.fragments, data)
        return self.devices.submit(make_batch(op, self.arena, [item])), item

    def finish(self, ticket: int) -> BatchResult:
        result = self.devices.wait(ticket, WAIT_S)
        assert result is not None
        return result

    def write(self, block: int, data: bytes, device: int = 0) -> int:
        result = self.finish(self.submit(Op.WRITE, block, data, device)[0])
        if result.status[0] == 0:
            assert int(result.checksum[0]) == xxhash.xxh3_64_intdigest(data)
        return int(result.status[0])

    def read(self, block: int, size: int = BLOCK_BYTES, device: int = 0) -> tuple[int, bytes]:
        ticket, item = self.submit(Op.READ, block, bytes(size), device)
        result = self.finish(ticket)
        data = self.arena.get(item.fragments)
        if result.status[0] == 0:
            assert int(result.checksum[0]) == xxhash.xxh3_64_intdigest(data)
        return int(result.status[0]), data


def fill(byte: int, size: int = BLOCK_BYTES) -> bytes:
    return bytes([byte]) * size


def bench(*faults: Fault, seed: int = 0, reorder: bool = False) -> Bench:
    plan = FaultPlan(faults, reorder=reorder)
    return Bench(FaultyDevices([BLOCKS * BLOCK_BYTES] * 2, seed=seed, plan=plan))


# -- the table, row by row -------------------------------------------------------------------------


def test_error_of_a_write_lands_nothing() -> None:
    it = bench(Fault("error", "write", index=1, errno=ENOSPC))
    assert it.write(0, fill(1)) == 0
    assert it.write(0, fill(2)) == -ENOSPC
    assert it.write(1, fill(3)) == 0
    assert it.read(0) == (0, fill(1))
    assert it.devices.injected == {("error", "write"): 1}


def test_error_of_a_read_scribbles() -> None:
    it = bench(Fault("error", "read", index=1))
    assert it.read(0) == (0, fill(0))
    assert it.read(0) == (-EIO, fill(SCRIBBLE))
    assert it.read(0) == (0, fill(0))


def test_error_of_a_flush_makes_nothing_durable() -> None:
    it = bench(Fault("error", "flush", index=1))
    it.write(0, fill(1))
    assert it.devices.flush(0) == 0
    it.write(0, fill(2))
    assert it.devices.flush(0) == -EIO
    assert it.devices.media.unflushed_blocks(0) == [0]
    assert it.devices.flush(0) == 0
    assert it.devices.media.unflushed_blocks(0) == []


@pytest.mark.parametrize("number", [EIO, 0])
def test_torn_write(number: int) -> None:
    it = bench(Fault("torn", "write", index=1, errno=number, keep_bytes=1_000))
    it.write(2, fill(1))
    assert it.write(2, fill(2)) == -number
    assert it.read(2) == (0, fill(2, 1_000) + fill(1, BLOCK_BYTES - 1_000))


def test_torn_write_is_a_prefix_by_default() -> None:
    cuts = set()
    for seed in range(20):
        it = bench(Fault("torn", "write"), seed=seed)
        it.write(0, fill(1, 3 * BLOCK_BYTES))
        data = it.read(0, 3 * BLOCK_BYTES)[1]
        cuts.add(data.count(1))
        assert data == fill(1, data.count(1)) + fill(0, data.count(0))
    assert len(cuts) > 10


def test_lost_write_and_lost_flush() -> None:
    it = bench(Fault("lost", "write", index=1), Fault("lost", "flush"))
    it.write(0, fill(1))
    assert it.write(0, fill(2)) == 0
    assert it.read(0) == (0, fill(1))
    assert it.devices.flush(0) == 0
    assert it.devices.media.unflushed_blocks(0) == [0]


def test_misdirected_write() -> None:
    it = bench(Fault("misdirected", "write", target_bytes=5 * BLOCK_BYTES))
    assert it.write(0, fill(1)) == 0
    assert it.read(0) == (0, fill(0))
    assert it.read(5) == (0, fill(1))


@pytest.mark.parametrize("seed", range(10))
def test_misdirected_by_seed_goes_elsewhere(seed: int) -> None:
    it = bench(Fault("misdirected", "write"), seed=seed)
    assert it.write(3, fill(1)) == 0
    found = [block for block in range(BLOCKS) if it.read(block)[1] == fill(1)]
    assert len(found) == 1
    assert found != [3]


def test_misdirected_where_there_is_no_other_place() -> None:
    it = bench(Fault("misdirected", "write"))
    assert it.write(0, fill(1, BLOCKS * BLOCK_BYTES)) == 0
    assert it.read(0) == (0, fill(0))


def test_misdirected_read() -> None:
    it = bench(Fault("misdirected", "read", target_bytes=BLOCK_BYTES))
    it.write(1, fill(1))
    assert it.read(0) == (0, fill(1))
    assert it.read(0) == (0, fill(0))


def test_stale_read() -> None:
    it = bench(Fault("stale", "read", index=1))
    for byte in (1, 2, 3):
        it.write(0, fill(byte))
    assert [it.read(0)[1][0] for _ in range(3)] == [3, 2, 3]


def test_short_write() -> None:
    it = bench(Fault("short", "write", index=1, keep_bytes=1_000))
    it.write(2, fill(1))
    assert it.write(2, fill(2)) == 0
    assert it.read(2) == (0, fill(2, 1_000) + fill(1, BLOCK_BYTES - 1_000))


def test_short_read_leaves_the_rest_of_memory_as_it_was() -> None:
    it = bench(Fault("short", "read", keep_bytes=1_000))
    it.write(2, fill(1))
    ticket, item = it.submit(Op.READ, 2, fill(9))
    assert it.finish(ticket).status.tolist() == [0]
    assert it.arena.get(item.fragments) == fill(1, 1_000) + fill(9, BLOCK_BYTES - 1_000)
    assert it.read(2) == (0, fill(1))


@pytest.mark.parametrize("kind", ["short", "torn"])
def test_a_part_of_a_transfer_is_never_all_of_it(kind: FaultKind) -> None:
    for seed in range(50):
        it = bench(Fault(kind, "write"), seed=seed)
        it.write(0, fill(1))
        assert it.read(0)[1] != fill(1)


def test_a_duplicated_write_lands_at_once_and_again_later() -> None:
    last = set()
    for seed in range(20):
        it = bench(Fault("duplicated", "write"), seed=seed)
        assert it.write(0, fill(1)) == 0
        assert it.read(0) == (0, fill(1))
        it.write(0, fill(2))
        found = [it.read(0)[1][0] for _ in range(LATER_OPERATIONS_MAX)]
        assert found == sorted(found, reverse=True)
        last.add(found[-1])
    assert last == {1, 2}  # over the later write, and before it


@pytest.mark.parametrize("seed", range(5))
def test_a_reordered_write_lands_after_later_operations(seed: int) -> None:
    it = bench(Fault("reordered", "write", index=1), seed=seed)
    it.write(0, fill(1))
    assert it.write(0, fill(2)) == 0
    found = [it.read(0)[1][0] for _ in range(LATER_OPERATIONS_MAX + 1)]
    assert found == sorted(found)
    assert found[-1] == 2


def test_writes_that_were_put_off_land_in_close_and_by_chance_in_a_crash() -> None:
    left = set()
    for seed in range(20):
        it = bench(Fault("reordered", "write"), seed=seed)
        it.write(0, fill(1))
        if seed % 2:
            it.devices.close()
        else:
            it.devices.kill()
        left.add((seed % 2, Bench(it.devices.reopen()).read(0)[1][0]))
    assert left == {(1, 1), (0, 0), (0, 1)}


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_memory_at_address_0_fails_alone_and_is_no_operation(op: Op) -> None:
    it = bench()
    items = [Item(0, block * BLOCK_BYTES, it.arena.carve([BLOCK_BYTES])) for block in range(2)]
    batch = make_batch(op, it.arena, items)
    batch.address[0] = 0
    assert it.finish(it.devices.submit(batch)).status.tolist() == [-EFAULT, 0]
    assert it.devices.operations == 1


def test_flip_of_a_write_stays() -> None:
    it = bench(Fault("flip", "write"))
    assert it.write(0, fill(0xFF)) == 0
    first, second = it.read(0)[1], it.read(0)[1]
    assert first == second
    assert sum(byte.bit_count() for byte in first) == 8 * BLOCK_BYTES - 1
    it.devices.flush(0)
    it.devices.crash()
    assert Bench(it.devices.reopen()).read(0)[1] == first


def test_flip_of_a_read_passes() -> None:
    it = bench(Fault("flip", "read"))
    assert sum(byte.bit_count() for byte in it.read(0)[1]) == 1
    assert it.read(0) == (0, fill(0))


def test_flip_bit_by_hand() -> None:
    it = bench()
    it.write(0, fill(0))
    it.devices.flip_bit(0, 17, 3)
    assert it.read(0)[1][17] == 8
    it.devices.flip_bit(0, 17, 3)
    assert it.read(0) == (0, fill(0))


def test_slow_for_some_polls() -> None:
    it = bench(Fault("slow", "batch", polls=3))
    ticket, _ = it.submit(Op.WRITE, 0, fill(1))
    assert [it.devices.wait(ticket, WAIT_S) for _ in range(3)] == [None] * 3
    assert it.finish(ticket).status.tolist() == [0]


def test_slow_until_release() -> None:
    it = bench(Fault("slow", "batch", index=1))
    first, _ = it.submit(Op.WRITE, 0, fill(1))
    second, _ = it.submit(Op.WRITE, 1, fill(1))
    third, _ = it.submit(Op.WRITE, 2, fill(1))
    for ticket in (third, first):
        it.finish(ticket)
    assert it.devices.wait(second, 0.0) is None
    it.devices.release(second)
    it.finish(second)


def test_release_wakes_a_waiting_thread() -> None:
    it = bench()
    it.devices.hold()
    ticket, _ = it.submit(Op.WRITE, 0, fill(1))
    results: list[BatchResult | None] = []
    with beside(lambda: results.append(it.devices.wait(ticket, WAIT_S))):
        it.devices.release()
    assert results[0] is not None
    assert results[0].status.tolist() == [0]


def test_close_ends_what_is_held() -> None:
    it = bench()
    it.devices.hold()
    ticket, _ = it.submit(Op.WRITE, 0, fill(1))
    it.devices.close()
    assert it.finish(ticket).status.tolist() == [0]
    with pytest.raises(StoreClosedError):
        it.devices.register(4096, 1)


def test_busy() -> None:
    it = bench(Fault("busy", "batch", index=1))
    it.write(0, fill(1))
    with pytest.raises(BusyError):
        it.write(0, fill(2))
    assert it.write(0, fill(3)) == 0


def test_reorder_runs_other_batches_first() -> None:
    """Two overlapping writes in flight: the seed decides which one is last."""
    last = set()
    for seed in range(20):
        it = bench(reorder=True, seed=seed)
        tickets = [it.submit(Op.WRITE, 0, fill(byte))[0] for byte in (1, 2)]
        for ticket in tickets:
            it.finish(ticket)
        last.add(it.read(0)[1][0])
    assert last == {1, 2}


def test_every_kind_of_fault_is_accepted_somewhere() -> None:
    accepted = set()
    for kind, op in itertools.product(get_args(FaultKind), get_args(FaultOp)):
        try:
            accepted.add(Fault(kind, op).kind)
        except ValueError:
            continue
    assert accepted == set(get_args(FaultKind))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fault("torn", "read"),
        lambda: Fault("error", "write", errno=0),
        lambda: Fault("misdirected", "write", target_bytes=5),
        lambda: FaultPlan(rates={("slow", "flush"): 0.5}),
    ],
)
def test_impossible_faults_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"table|errno|target_bytes"):
        make()


# -- which operation it hits -----------------------------------------------------------------------


def test_count_and_device() -> None:
    it = bench(Fault("error", "write", index=1, count=2), Fault("error", "read", device=1, count=9))
    assert [it.write(0, fill(1)) for _ in range(4)] == [0, -EIO, -EIO, 0]
    assert [it.read(0, device=device)[0] for device in (0, 1, 0, 1)] == [0, -EIO, 0, -EIO]


def test_arm_counts_from_now() -> None:
    it = bench()
    for _ in range(3):
        it.write(0, fill(1))
    it.devices.arm(Fault("error", "write", index=1))
    assert [it.write(0, fill(1)) for _ in range(3)] == [0, -EIO, 0]


def test_rates_are_seeded() -> None:
    def outcomes(seed: int) -> list[int]:
        plan = FaultPlan(rates={("error", "write"): 0.3, ("lost", "write"): 0.3})
        it = Bench(FaultyDevices([BLOCKS * BLOCK_BYTES], seed=seed, plan=plan))
        statuses = [it.write(0, fill(1)) for _ in range(100)]
        assert set(it.devices.injected) == {("error", "write"), ("lost", "write")}
        return statuses

    assert outcomes(1) == outcomes(1)
    assert outcomes(1) != outcomes(2)


def test_operations_count_what_reaches_a_device() -> None:
    it = bench()
    it.write(0, fill(1))
    it.read(0)
    it.write(BLOCKS, fill(1))  # -ERANGE
    it.devices.flush(0)
    assert it.devices.operations == 3


def test_a_batch_runs_no_earlier_than_its_wait() -> None:
    """So a caller that flushes before waiting loses its bytes, as the protocol allows."""
    it = bench()
    ticket, item = it.submit(Op.WRITE, 0, fill(1))
    it.devices.flush(0)
    assert it.devices.operations == 1
    it.arena.put(item.fragments, fill(9))  # a caller that reuses the memory too early
    it.finish(ticket)
    assert it.read(0) == (0, fill(9))
    assert it.devices.media.unflushed_blocks(0) == [0]


# -- stopping, killing, power loss -----------------------------------------------------------------


def test_stop_at() -> None:
    it = bench()
    it.devices.stop_at(2)
    assert [it.write(block, fill(1)) for block in range(4)] == [0, 0, -EIO, -EIO]
    assert it.read(0)[0] == -EIO
    assert it.devices.flush(0) == -EIO
    assert it.devices.operations == 2
    assert it.devices.stopped


def test_stopped_writes_in_flight_may_land_later_ones_do_not() -> None:
    landed = set()
    for seed in range(20):
        it = bench(seed=seed)
        it.devices.stop_at(1)
        tickets = [it.submit(Op.WRITE, block, fill(1))[0] for block in range(2)]
        assert [int(it.finish(ticket).status[0]) for ticket in tickets] == [0, -EIO]
        assert it.write(2, fill(1)) == -EIO
        after = Bench(it.devices.reopen())
        assert after.read(0) == (0, fill(1))
        assert after.read(2) == (0, fill(0))
        landed.add(after.read(1)[1][0])
    assert landed == {0, 1}


def test_kill_ends_everything() -> None:
    it = bench()
    it.write(0, fill(1))
    it.devices.hold()
    ticket, _ = it.submit(Op.WRITE, 1, fill(1))
    it.devices.kill()
    assert it.finish(ticket).status.tolist() == [-EIO]
    assert it.write(2, fill(1)) == -EIO
    assert it.devices.flush(0) == -EIO
    after = Bench(it.devices.reopen())
    assert after.read(0) == (0, fill(1))  # process death loses nothing that finished
    assert after.read(2) == (0, fill(0))
    it.devices.close()


def test_reopen_kills_what_was_not_closed() -> None:
    it = bench()
    it.write(0, fill(1))
    after = Bench(it.devices.reopen())
    assert it.write(0, fill(2)) == -EIO
    assert after.read(0) == (0, fill(1))


def test_two_transports_share_media() -> None:
    it = bench()
    other = Bench(FaultyDevices(it.devices.media))
    it.write(0, fill(1))
    assert other.read(0) == (0, fill(1))


@pytest.mark.parametrize("seed", range(30))
def test_power_loss_keeps_what_was_flushed(seed: int) -> None:
    it = bench()
    it.write(0, fill(1))
    it.write(1, fill(1))
    it.devices.flush(0)
    it.write(1, fill(2))
    it.devices.crash(seed)
    after = Bench(it.devices.reopen())
    assert after.read(0) == (0, fill(1))
    data = after.read(1)[1]
    new = data.count(2)
    assert data == fill(2, new) + fill(1, BLOCK_BYTES - new)
    assert new % SECTOR_BYTES == 0


def test_power_loss_has_every_outcome() -> None:
    """From one snapshot: old, each of two newer versions, and mixes of any two in order."""
    it = bench()
    for byte in (1, 2, 3):
        it.write(0, fill(byte))
        if byte == 1:
            it.devices.flush(0)
    before = it.devices.snapshot()
    outcomes = set()
    for seed in range(200):
        devices = FaultyDevices(before.snapshot())
        devices.crash(seed)
        data = Bench(devices.reopen()).read(0)[1]
        outcomes.add((data[0], data[-1]))
        assert devices.media.unflushed_blocks(0) == []
    assert outcomes == {(1, 1), (2, 2), (3, 3), (2, 1), (3, 1), (3, 2)}


def test_power_loss_is_decided_block_by_block() -> None:
    it = bench()
    it.write(0, fill(1, BLOCKS * BLOCK_BYTES))
    it.devices.crash(seed=3)
    data = Bench(it.devices.reopen()).read(0, BLOCKS * BLOCK_BYTES)[1]
    firsts = {data[block * BLOCK_BYTES] for block in range(BLOCKS)}
    assert firsts == {0, 1}


def test_versions_are_bounded() -> None:
    it = bench()
    for byte in range(1, 4 * VERSIONS_MAX):
        it.write(0, fill(byte))
    assert len(it.devices.media._unflushed[0][0]) == VERSIONS_MAX


def test_snapshot_and_restore() -> None:
    it = bench()
    it.write(0, fill(1))
    taken = it.devices.snapshot()
    it.write(0, fill(2))
    it.devices.flush(0)
    it.devices.restore(taken)
    assert it.read(0) == (0, fill(1))
    assert it.devices.media.unflushed_blocks(0) == [0]
    it.write(0, fill(3))
    it.devices.restore(taken)  # a snapshot can be used again
    assert it.read(0) == (0, fill(1))
    with pytest.raises(ValueError, match="other devices"):
        it.devices.restore(Media([BLOCK_BYTES]))


def test_threads_agree_with_the_count() -> None:
    it = bench(reorder=True)
    errors: list[str] = []

    def work(block: int) -> None:
        mine = Bench(it.devices, seed=block)
        for turn in range(50):
            data = fill(turn + 1)
            if mine.write(block, data) or mine.read(block) != (0, data):
                errors.append(f"block {block} turn {turn}")
            it.devices.flush(turn % 2)

    together(*(partial(work, block) for block in range(4)))
    assert errors == []
    assert it.devices.operations == 4 * 50 * 3


# -- a store in small, stopped at every operation --------------------------------------------------


class TinyStore:
    """Pages in slots and a catalog that survives; `flush_first` is the rule that makes it right."""

    def __init__(self, transport: Transport, catalog: dict[bytes, int], flush_first: bool) -> None:
        self.transport = transport
        self.catalog = catalog
        self.flush_first = flush_first
        self.arena = Arena(1 << 18, random.Random(0))

    def save(self, key: bytes, page: bytes, slot: int) -> None:
        item = Item(0, slot * 2 * BLOCK_BYTES, self.arena.carve([len(page)]))
        self.arena.put(item.fragments, page)
        for owner in [owner for owner, taken in self.catalog.items() if taken == slot]:
            del self.catalog[owner]
        ticket = self.transport.submit(make_batch(Op.WRITE, self.arena, [item]))
        result = self.transport.wait(ticket, WAIT_S)
        assert result is not None
        if np.any(result.status):
            return
        if not self.flush_first or self.transport.flush(0) == 0:
            self.catalog[key] = slot

    def load(self, key: bytes, size: int) -> bytes | None:
        if key not in self.catalog:
            return None
        item = Item(0, self.catalog[key] * 2 * BLOCK_BYTES, self.arena.carve([size]))
        ticket = self.transport.submit(make_batch(Op.READ, self.arena, [item]))
        result = self.transport.wait(ticket, WAIT_S)
        assert result is not None
        return None if np.any(result.status) else self.arena.get(item.fragments)


def crash_everywhere(flush_first: bool) -> Oracle:
    """Save pages, stop at each operation in turn, lose power, reopen and load everything."""
    size = 2 * BLOCK_BYTES - 7
    oracle = Oracle()
    for stop in itertools.count():
        devices = FaultyDevices([BLOCKS * BLOCK_BYTES], seed=stop)
        devices.stop_at(stop)
        catalog: dict[bytes, int] = {}
        store = TinyStore(devices, catalog, flush_first)
        for turn in range(12):
            key = bytes([turn])
            page = page_bytes(0, key, size)
            oracle.save(b"n", key, page)
            store.save(key, page, slot=turn % 5)
            if devices.stopped:
                break
        whole = not devices.stopped
        devices.crash()
        after = TinyStore(devices.reopen(), catalog, flush_first)
        for key in oracle.keys(b"n"):
            oracle.check_load(b"n", key, after.load(key, size))
        if whole:
            return oracle
    raise AssertionError("unreachable")


def test_a_right_store_survives_stopping_everywhere() -> None:
    oracle = crash_everywhere(flush_first=True)
    assert oracle.hits > 50
    assert oracle.misses > 50


def test_a_wrong_store_does_not() -> None:
    """The negative control: records that are visible before a flush are found out."""
    with pytest.raises(AssertionError, match="never saved there"):
        crash_everywhere(flush_first=False)


def test_forever_is_longer_than_a_test() -> None:
    it = bench(Fault("error", "write", count=FOREVER))
    assert {it.write(0, fill(1)) for _ in range(20)} == {-EIO}
