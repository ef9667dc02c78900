"""The trial of I/O errors, small; and that it notices when what it tries is broken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from store_kit import PAGE, client, open_faulty, poll, run

from tutti_core.io.transport import Device, Op, TransportStats
from tutti_core.testing import Fault, FaultyDevices
from tutti_core.testing.fuse_disk import why_not
from tutti_core.tiers import loader, saver, suspects
from tutti_core.tiers.device_calls import DeviceCalls
from tutti_core.tiers.health import Health
from tutti_core.tiers.space import Space
from tutti_core.trials import io_errors

KINDS = (
    "read error", "write error", "flush error", "one flush error", "no room to write",
    "torn write", "submission fails", "busy", "late batches", "stalled batches", "catalog error",
    "catalog full", "read and write error", "overlapping flush error", "power loss",
)  # fmt: skip


def test_the_quick_part(fast_path: Path) -> None:
    tally = io_errors.run(fast_path, seed=0)
    tally.check()
    missing = [kind for kind in KINDS if not tally.faults[kind]]
    assert not missing and tally.pages_compared > 1000 and tally.misses > 100
    if not why_not():
        assert sum(n for kind, n in tally.faults.items() if kind.startswith("disk: ")) >= 8


def in_memory(directory: Path, seed: int) -> io_errors.Tally:
    tally = io_errors.Tally()
    with io_errors.quiet():
        io_errors._in_memory(directory, seed, tally)
    return tally


def test_it_notices_pages_that_a_flush_did_not_cover(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes that began before a flush that failed, published after the next one."""
    monkeypatch.setattr(DeviceCalls, "epochs", lambda self: (0,) * len(self._epochs))
    lost = sum(in_memory(fast_path / str(i), i).durable_pages_lost for i in range(4))
    assert lost > 0


def test_it_notices_a_flush_that_fails_for_good(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, latched = io_errors.ForgetfulDevices.flush, dict[object, int]()

    def flush(self: io_errors.ForgetfulDevices, device: int) -> int:
        status = latched.get((id(self), device)) or honest(self, device)
        if status:
            latched[id(self), device] = status
        return status

    monkeypatch.setattr(io_errors, "RECOVER_LOOKS_MAX", 10)
    monkeypatch.setattr(io_errors.ForgetfulDevices, "flush", flush)
    with pytest.raises(AssertionError, match="does not recover"):
        in_memory(fast_path, 1).check()


def test_it_notices_saving_that_ends_with_a_submission(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_errors, "RECOVER_LOOKS_MAX", 10)
    monkeypatch.setattr(io_errors, "check_space", lambda store: None)  # it would wait for the saver
    monkeypatch.setattr(
        saver, "start_batch", lambda transport, batch, count: transport.submit(batch)
    )
    with pytest.raises(AssertionError, match=r"does not recover|stopped saving"):
        in_memory(fast_path, 1).check()


def test_it_notices_loads_that_raise(fast_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        loader, "start_batch", lambda transport, batch, count: transport.submit(batch)
    )
    with pytest.raises(AssertionError, match="raised RuntimeError"):
        in_memory(fast_path, 1).check()


def test_it_notices_devices_that_are_never_probed(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_errors, "RECOVER_LOOKS_MAX", 10)
    monkeypatch.setattr(Health, "tick", lambda self: None)
    with pytest.raises(AssertionError, match="does not recover"):
        in_memory(fast_path, 1).check()


# ---- one mechanism at a time ----
def test_a_group_that_was_written_before_a_flush_that_failed_is_not_published(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The smallest case: two groups overlap, the first one's flush fails, the second's does not."""
    monkeypatch.setattr(saver, "GROUP_JOBS_MAX", 1)
    with open_faulty(fast_path / "s") as (store, devices):
        pages = client(store)
        with devices.held():
            before = pages.pages.save(run("before", 1), bytes(PAGE))
            poll(lambda: not store._saver._jobs, "the first save is being written")
            first, second, third = (pages.pages.save(run(i, 1), bytes(PAGE)) for i in range(3))
            devices.arm(Fault("error", "flush", index=1))
        assert before.wait(20).all() and not first.wait(20).any()
        assert not second.wait(20).any(), "it was written before the flush that failed"
        assert third.wait(20).all() and devices.injected == {("error", "flush"): 1}
        assert store.stats().unwell == ()
        assert all(pages.save(run(1, 1))) and all(pages.save(run(0, 1)))


def test_a_submission_that_raises_costs_its_job_alone(fast_path: Path) -> None:
    with open_faulty(fast_path / "s") as (store, devices):
        pages = client(store)
        assert all(pages.save(run("a", 4)))
        submit, calls = devices.submit, []

        def raise_once(batch: object) -> int:
            calls.append(batch)
            if len(calls) == 1:
                raise OSError(5, "planted")
            return submit(batch)  # type: ignore[arg-type]

        for attempt in (pages.save, pages.load):
            calls.clear()
            devices.submit = raise_once  # type: ignore[method-assign]
            assert not any(attempt(run("a" if attempt == pages.load else "b", 4)))
            assert all(attempt(run("a" if attempt == pages.load else "b", 4)))
        counters = store.stats().counters
        assert counters["submit_errors"] == 2 and counters["pages_refused_busy"] == 4
        assert counters.get("internal_errors", 0) == 0


class TwoDevices:
    """Statistics of two devices, as a test says."""

    devices = (Device("stalled", 1 << 20), Device("well", 1 << 20))

    def __init__(self) -> None:
        self.items, self.pending = [0, 0], [1, 1]

    def stats(self) -> TransportStats:
        return TransportStats(
            read_items=sum(self.items),
            device_items=list(self.items),
            device_pending=list(self.pending),
        )


def stall(devices: TwoDevices) -> Health:
    """The second device moves on, the first does not; both are late."""
    now_s = [0.0]
    health = Health(devices, lambda name, amount: None, 30.0, lambda: now_s[0])  # type: ignore[arg-type]
    for _ in range(8):
        health.note_late([0, 1])
        now_s[0] += 10
        devices.items[1] += 1
    return health


def test_a_stall_is_seen_although_another_device_moves() -> None:
    health = stall(TwoDevices())
    assert health.unwell_reads == health.unwell_writes == {0}


def test_a_device_with_nothing_to_do_does_not_stall() -> None:
    """Its items have long ended; the batch waits for the other."""
    devices = TwoDevices()
    devices.pending[1] = 0
    devices.items[1] = -100  # as `stall` counts on, it does not matter
    health = stall(devices)
    assert health.unwell_reads == {0}
    quiet = TwoDevices()
    quiet.pending = [0, 0]
    now_s = [0.0]
    health = Health(quiet, lambda name, amount: None, 30.0, lambda: now_s[0])  # type: ignore[arg-type]
    for _ in range(8):
        health.note_late([0, 1])
        now_s[0] += 10
    assert health.all_well


def test_what_is_given_up_does_not_wait_for_a_late_load_of_other_pages() -> None:
    space = Space(32768)
    space.add(0, 0, 4096)
    slots = space.allocate(8, 4096)
    space.commit(slots, np.arange(1, 9, dtype=np.uint64))
    late, other = space.begin_load(), space.begin_load()
    space.give_up(slots[:4])
    space.end_load(other)
    assert space.free_count(4096) == 0
    space.narrow_load(late, slots[:2])
    space.narrow_load(late, slots[:2])  # it may be told so again and again
    assert space.free_count(4096) == 2
    space.check()
    space.give_up(slots[4:6])
    assert space.free_count(4096) == 4
    space.end_load(late)
    assert space.free_count(4096) == 6
    space.check()


def test_slots_of_a_pool_that_is_shut_are_not_handed_out() -> None:
    space = Space(32768)
    for number in range(4):
        space.add(number, number % 2, 4096)
    space.shut = frozenset([1])
    slots = space.allocate(100, 4096)
    assert set((slots >> np.uint64(32)).tolist()) == {0, 2} and space.free_count(4096) == 0
    space.shut = frozenset()
    assert len(space.allocate(100, 4096)) == 16


def test_suspects_are_offered_once_more_and_their_number_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(suspects, "SUSPECTS_MAX", 3)
    pages = suspects.Suspects()
    device = np.array([0, 0, 1, 1, 0], dtype=np.uint32)
    status = np.array([-5, -5, -5, 0, -61], dtype=np.int32)  # of 1 another read went well
    generation = np.arange(10, 15, dtype=np.uint64)
    assert pages.sort(device, status, generation).tolist() == [True, True, False, False, False]
    assert pages.release(1, its_fault=False) == []
    zeros = np.zeros(2, dtype=np.uint32)
    assert pages.witness(zeros, np.array([-5, 0], dtype=np.int32)) == [10, 11]
    assert not pages.sort(device[:2], status[:2], generation[:2]).any(), "a second time"
    more = np.full(5, -5, dtype=np.int32)
    many = pages.sort(np.zeros(5, dtype=np.uint32), more, np.arange(20, 25, dtype=np.uint64))
    assert many.tolist() == [True] * 3 + [False] * 2
    assert pages.release(0, its_fault=True) == [20, 21, 22]
    assert pages.sort(zeros, more[:2], np.array([20, 21], dtype=np.uint64)).all(), "its fault"


def test_a_health_that_doubts_asks_the_device(fast_path: Path) -> None:
    """A probe that fails then makes it unwell at once."""
    with open_faulty(fast_path / "s") as (store, devices):
        health: Health = store._loader.health
        now_s = [0.0]
        health._clock = lambda: now_s[0]
        health.doubt(Op.READ, 0)
        assert not health.all_well and store.stats().unwell == ()
        devices.arm(Fault("error", "read"))
        now_s[0] += 2
        assert store.stats().unwell == (f"{devices.devices[0].path}: reads",)
        now_s[0] += 2
        poll(lambda: store.stats().unwell == (), "it is well again")
        assert isinstance(devices, FaultyDevices)
