"""Many processes on one directory: the trial, that it can fail, and each rule that it rests on."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from store_kit import (
    MIB,
    PAGE,
    check_space,
    client,
    memory_devices,
    open_small,
    poll,
    run,
    settle,
    small_config,
)

from tutti_core import (
    ConfigError,
    DeviceError,
    PrefixStore,
    StoreConfig,
    StoreFullError,
    UnsupportedError,
)
from tutti_core.errors import device_error
from tutti_core.index import catalog as catalog_module
from tutti_core.index.catalog import CATALOG_BYTES_PER_PAGE, Catalog, NewPages
from tutti_core.io.marks import is_marked_path, set_mark
from tutti_core.testing import Fault, FaultyDevices
from tutti_core.tiers import claim, clears
from tutti_core.tiers import pools as pools_module
from tutti_core.tiers.heat import UNIT_NS, Heat
from tutti_core.trials import processes
from tutti_core.trials.process_life import read_reports

TWO = {"segments": 4, "writers_max": 2}


# ---- the trial -------------------------------------------------------------------------------


def test_processes_that_are_killed_and_restarted_are_never_wrong(fast_path: Path) -> None:
    tally = processes.run(fast_path, seed=5)
    tally.check()
    assert tally.kills >= 10 and tally.pages_compared > 300 and tally.misses > 100
    said = list(read_reports(sorted(fast_path.glob("*/report-*"))))
    did = [what[0] for kind, *what in said if kind == "did"]
    assert any(deeds["evicted_pages"] for deeds in did)
    assert any(deeds["clears_noticed"] for deeds in did)
    assert any(kind == "cleared" for kind, *_ in said)
    assert len({what[0] for kind, *what in said if kind == "open"}) >= 4  # leases


@pytest.mark.parametrize(
    ("broken", "kind"),
    [("leases", "tight"), ("validation", "blind"), ("robbery", "tight")],
)
def test_the_trial_notices_what_is_broken_on_purpose(
    fast_path: Path, broken: str, kind: str
) -> None:
    tally = processes.run(fast_path, seed=5, kinds=(kind,), kills=3, broken=broken)
    assert tally.complaint_count
    if broken == "validation":
        assert tally.wrong_bytes


def test_the_trial_notices_segments_that_nobody_adopts(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tutti_core.tiers.segments.Segments.adopt", lambda self: False)
    monkeypatch.setattr(processes, "FILL_TIMEOUT_S", 0.5)
    tally = processes.run(fast_path, seed=5, kinds=("tight",), kills=1)
    assert any("nobody can get" in text for text in tally.complaints)


# ---- the catalog that they share -------------------------------------------------------------


FAR = 1 << 44
"""Slots from here on lie in segments that no store here has."""


def new_pages(start: int, count: int) -> NewPages:
    """Pages with numbers as keys, in slots of the same numbers."""
    numbers = range(start, start + count)
    return NewPages(
        namespace=b"n" * 16,
        length_bytes=PAGE,
        key_width=16,
        record_keys=b"".join(i.to_bytes(16, "little") for i in numbers),
        page_keys=b"".join(i.to_bytes(16, "little") for i in numbers),
        parents=bytes(16 * count),
        slot=np.arange(start, start + count, dtype=np.uint64) + np.uint64(FAR),
        checksum=np.zeros(count, dtype=np.uint64),
    )


@contextmanager
def other_process(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Another interpreter that runs `code`; killed at the end."""
    child = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def line_of(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


GROW = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[3], str(Path(sys.argv[3]).parent)]
from test_many_processes import new_pages
from tutti_core.index.catalog import Catalog
catalog = Catalog(Path(sys.argv[1]), int(sys.argv[2]), False)
for start in range(0, 6_000, 500):
    catalog.publish([new_pages(start, 500)])
print("grown", flush=True)
sys.stdin.read()
"""


class TestAGrownCatalog:
    """Another process has more room, and uses it: LMDB refuses this one's transactions then."""

    @pytest.fixture
    def small(self, store_dir: Path) -> Iterator[Catalog]:
        store_dir.mkdir()
        catalog = Catalog(store_dir, MIB, False)
        catalog.publish([new_pages(1_000_000, 1)])
        yield catalog
        catalog.close()

    @pytest.fixture
    def grown(self, small: Catalog, store_dir: Path) -> Iterator[None]:
        with other_process(GROW, store_dir, 16 * MIB, Path(__file__).parent) as child:
            assert line_of(child) == "grown"
            yield

    @pytest.mark.parametrize("first", ["read", "write"])
    def test_it_is_followed(self, small: Catalog, grown: None, first: str) -> None:
        if first == "write":
            small.publish([new_pages(2_000_000, 1)])
        assert small.record_count() == 6_001 + (first == "write")
        assert small.records_max == 16 * MIB // CATALOG_BYTES_PER_PAGE
        small.publish([new_pages(3_000_000, 500)])
        assert small.lookup((5_999).to_bytes(16, "little"))[0].all()

    def test_threads_that_notice_it_together_all_go_on(self, small: Catalog, grown: None) -> None:
        found: list[bool] = []

        def look() -> None:
            for i in range(200):
                found.append(bool(small.lookup(i.to_bytes(16, "little"))[0].all()))

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert found == [True] * 800

    def test_a_transaction_that_does_not_end_bounds_the_wait(
        self, small: Catalog, store_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(catalog_module, "RESIZE_WAIT_S", 0.05)
        with small._begin():
            with other_process(GROW, store_dir, 16 * MIB, Path(__file__).parent) as child:
                assert line_of(child) == "grown"
            with pytest.raises(DeviceError, match="has grown"):
                small.record_count()
        assert small.record_count() == 6_001

    def test_without_following_it_nothing_can_be_read(
        self, small: Catalog, grown: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(catalog_module, "_BEGIN_ATTEMPTS_MAX", 1)
        with pytest.raises(DeviceError, match="MDB_MAP_RESIZED"):
            small.record_count()

    def test_a_store_of_this_process_with_more_room_makes_room_for_all(
        self, small: Catalog, store_dir: Path
    ) -> None:
        larger = Catalog(store_dir, 16 * MIB, False)
        for start in range(0, 6_000, 500):
            larger.publish([new_pages(start, 500)])
        assert small.record_count() == 6_001
        assert small.records_max == larger.records_max == 16 * MIB // CATALOG_BYTES_PER_PAGE
        larger.close()

    def test_a_store_goes_on_while_another_process_grows_it(self, store_dir: Path) -> None:
        """The smaller one must not evict its pages because the larger one has many records."""
        config = small_config(store_dir, catalog=2 * MIB, **TWO)
        with PrefixStore.open(config) as store:
            pages = client(store)
            assert all(pages.save(run("a", 8)))
            folder = store_dir / "catalog"
            with other_process(GROW, folder, 16 * MIB, Path(__file__).parent) as child:
                assert line_of(child) == "grown"
            assert all(pages.save(run("b", 8)))
            assert pages.match(run("a", 8)) == 8 and all(pages.load(run("a", 8)))
            assert "evicted_pages" not in store.stats().counters


READERS = """
import lmdb, sys
env = lmdb.open(sys.argv[1], map_size=4 << 20, max_dbs=8, max_readers=512)
held = [env.begin() for _ in range(int(sys.argv[2]))]
for transaction in held:
    transaction.get(b"x")
print("reading", flush=True)
sys.stdin.read()
"""


class TestReadersThatWereKilled:
    @pytest.fixture
    def catalog(self, store_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Catalog]:
        monkeypatch.setattr(catalog_module, "_READERS_MAX", 8)
        store_dir.mkdir()
        catalog = Catalog(store_dir, 4 * MIB, False)
        yield catalog
        catalog.close()

    def test_their_places_are_given_to_others(self, catalog: Catalog, store_dir: Path) -> None:
        with catalog._begin(), other_process(READERS, store_dir, 7) as child:
            assert line_of(child) == "reading"  # each of them in a transaction
            with pytest.raises(DeviceError, match="MDB_READERS_FULL"):
                catalog.record_count()  # they live: an error with its reason, and no wait
            child.kill()
            child.wait()
            assert catalog.record_count() == 0

    def test_they_are_cleared_when_the_catalog_is_opened(
        self, catalog: Catalog, store_dir: Path
    ) -> None:
        with other_process(READERS, store_dir, 3) as child:
            assert line_of(child) == "reading"
            assert str(child.pid) in catalog._shared.env.readers()
        catalog.close()
        again = Catalog(store_dir, 4 * MIB, False)
        assert str(child.pid) not in again._shared.env.readers()
        again.close()

    def test_one_that_lives_keeps_a_full_file_full(self, catalog: Catalog, store_dir: Path) -> None:
        """The other half of `test_a_reader_that_was_killed_does_not_fill_the_file`."""
        with other_process(READERS, store_dir, 1) as child:
            assert line_of(child) == "reading"
            with pytest.raises(StoreFullError) as caught:
                for start in range(0, 100_000, 500):
                    catalog.publish([new_pages(start, 500)])
                    catalog.remove(
                        [
                            (i.to_bytes(16, "little"), FAR + i, i + 1)
                            for i in range(start, start + 500)
                        ]
                    )
            assert not caught.value.retryable
        catalog.publish([new_pages(0, 500)])  # it is dead: its pages are free again


# ---- clear -----------------------------------------------------------------------------------


class TestClear:
    @pytest.fixture(autouse=True)
    def soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(clears, "LOOK_NS", 0)

    def test_the_pages_of_another_process_are_misses_for_itself(self, store_dir: Path) -> None:
        """Its tree had them, and its own slots are not looked up again after a load."""
        with open_small(store_dir, **TWO) as one, open_small(store_dir, **TWO) as two:
            a, b = client(one), client(two)
            assert all(b.save(run("b", 12))) and all(b.load(run("b", 12)))
            assert a.pages.clear() == 12
            assert b.match(run("b", 12)) == 0 and not any(b.load(run("b", 12)))
            assert not any(b.contains(run("b", 12)))
            # Their slots are free again, and saved once more they are there for both.
            assert all(b.save(run("b", 12))) and all(a.load(run("b", 12)))
            assert two.stats().used_bytes == 12 * PAGE
            check_space(two)
            assert all(b.save(run("c", 16))) and b.match(run("c", 16)) == 16
            check_space(two)

    def test_without_a_look_they_are_served_on(
        self, store_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(clears, "LOOK_NS", 1 << 62)
        with open_small(store_dir, **TWO) as one, open_small(store_dir, **TWO) as two:
            b = client(two)
            assert all(b.save(run("b", 12))) and b.match(run("b", 12)) == 12
            client(one).pages.clear()
            assert b.match(run("b", 12)) == 12 and all(b.load(run("b", 12)))  # right bytes

    def test_what_was_saved_afterwards_stays(self, store_dir: Path, monkeypatch) -> None:
        """Also what a process saved before it noticed, beside pages that must go."""
        with open_small(store_dir, **TWO) as one, open_small(store_dir, **TWO) as two:
            a, b = client(one), client(two)
            assert all(b.save(run("b", 4)))
            monkeypatch.setattr(clears, "LOOK_NS", 1 << 62)
            assert b.match(run("b", 4)) == 4
            assert a.pages.clear() == 4
            assert all(b.save(run("later", 6)))  # not noticed yet
            two._manager._clears.due_ns = 0
            assert b.match(run("b", 4)) == 0
            assert b.match(run("later", 6)) == 6 and all(b.load(run("later", 6)))
            assert all(b.save(run("b", 4)))
            assert b.match(run("later", 6)) == 6
            check_space(two)
            assert two.stats().pages == 10

    def test_it_leaves_other_namespaces(self, store_dir: Path) -> None:
        with open_small(store_dir, **TWO) as one, open_small(store_dir, **TWO) as two:
            a, b, other = client(one), client(two), client(two, model="other")
            assert all(b.save(run("b", 4))) and all(other.save(run("b", 4)))
            assert a.pages.clear() == 4
            assert b.match(run("b", 4)) == 0 and other.match(run("b", 4)) == 4
            assert two.stats().counters["clears_noticed"] == 1

    def test_it_empties_the_memory_of_another_process(self, store_dir: Path) -> None:
        settings = {**TWO, "dram": 64 * PAGE}
        with open_small(store_dir, **settings) as one, open_small(store_dir, **settings) as two:
            a, b = client(one), client(two)
            assert all(b.save(run("b", 12))) and all(b.load(run("b", 12)))
            a.pages.clear()
            assert b.match(run("b", 12)) == 0 and not any(b.load(run("b", 12)))
            assert all(b.save(run("b", 12))) and all(b.load(run("b", 12)))
            check_space(two)

    def test_one_before_opening_costs_nothing_now(self, store_dir: Path) -> None:
        with open_small(store_dir, **TWO) as one:
            a = client(one)
            a.save(run("a", 4))
            a.pages.clear()
            assert all(a.save(run("b", 8)))
        with open_small(store_dir, **TWO) as one:
            a = client(one)
            assert one.wait_restored(20)
            assert all(a.load(run("b", 8))) and a.match(run("b", 8)) == 8
            assert "clears_noticed" not in one.stats().counters
            check_space(one)

    def test_what_a_clear_left_when_its_process_was_killed_goes(
        self, store_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The note is there, the records are as well."""
        with open_small(store_dir, **TWO) as one:
            a = client(one)
            assert all(a.save(run("a", 8)))
            one._catalog.note_clear(a.pages.namespace.digest())
        with open_small(store_dir, **TWO) as one:
            a = client(one)
            assert a.match(run("a", 8)) == 0 and not any(a.load(run("a", 8)))
            assert all(a.save(run("b", 1)))
            check_space(one)
            assert one.stats().pages == 1 and one.stats().used_bytes == PAGE

    def test_a_catalog_without_room_for_the_note_is_cleared(
        self, store_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(self: Catalog, namespace: bytes) -> int:
            raise StoreFullError("full")

        monkeypatch.setattr(Catalog, "note_clear", full)
        with open_small(store_dir, **TWO) as one:
            a = client(one)
            assert all(a.save(run("a", 8)))
            assert a.pages.clear() == 8
            assert a.match(run("a", 8)) == 0 and one.stats().pages == 0
            check_space(one)


# ---- the pages of a dead process when the catalog cannot be read at first ----------------------


@pytest.mark.parametrize("failures", [1, 3])
def test_pages_that_were_not_restored_are_not_lost_space(
    store_dir: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """They are in no tree then, from where they could be evicted."""
    with open_small(store_dir) as store:
        assert all(client(store).save(run("old", 16)))
    scan, calls = Catalog.scan_records, []

    def fail_first(self: Catalog, chunk: int) -> Iterator[object]:
        calls.append(chunk)
        if len(calls) <= failures:
            raise device_error("map", errno.EBUSY)
        return scan(self, chunk)

    monkeypatch.setattr(Catalog, "scan_records", fail_first)
    with open_small(store_dir) as store:
        assert store.wait_restored(20)
        pages = client(store)
        for _ in range(failures):
            stored = pages.save(run("new", 16))
        assert all(stored) and all(pages.load(run("new", 16)))
        check_space(store)


# ---- pages that another process evicted --------------------------------------------------------


def test_an_evicted_page_of_another_process_is_announced_until_one_load(store_dir: Path) -> None:
    """Once, for each page; then it is a miss, and can be saved again by whoever has it."""
    with open_small(store_dir, **TWO) as one, open_small(store_dir, **TWO) as two:
        a, b = client(one), client(two)
        assert all(a.save(run("old", 8))) and all(b.load(run("old", 8)))
        for i in range(4):
            a.save(run(i, 8))
        assert b.match(run("old", 8)) == 8  # its tree does not know yet
        assert not any(b.load(run("old", 8)))
        assert b.match(run("old", 8)) == 0
        assert all(b.save(run("old", 8))) and all(b.load(run("old", 8)))


# ---- pages that other processes read -----------------------------------------------------------


class TestHeat:
    @pytest.mark.parametrize("policy", ["reuse", "lru", "arc"])
    def test_what_another_process_reads_stays_longer(self, store_dir: Path, policy: str) -> None:
        settings = {**TWO, "policy": policy}
        with open_small(store_dir, **settings) as one, open_small(store_dir, **settings) as two:
            owner, reader = client(one), client(two)
            for name in ("read elsewhere", "not read", "later"):
                assert all(owner.save(run(name, 5)))
            self.wait_a_unit()
            assert all(reader.load(run("read elsewhere", 5)))
            self.wait_a_unit()
            assert all(owner.save(run("new", 5)))
            assert owner.match(run("read elsewhere", 5)) == 5
            assert owner.match(run("not read", 5)) == 1  # 16 slots for four times five
            assert one.stats().counters["leaves_spared"] == 1
            check_space(one)

    def test_without_the_table_it_goes_first(self, store_dir: Path) -> None:
        settings = {**TWO, "policy": "lru"}
        with open_small(store_dir, **settings) as one, open_small(store_dir, **settings) as two:
            one._manager.heat = None
            owner, reader = client(one), client(two)
            for name in ("read elsewhere", "not read", "later"):
                assert all(owner.save(run(name, 5)))
            assert all(reader.load(run("read elsewhere", 5)))
            assert all(owner.save(run("new", 5)))
            assert owner.match(run("read elsewhere", 5)) == 1

    def test_pages_that_are_all_read_are_evicted_all_the_same(
        self, store_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However hot the others say that they are: here they say so at each look."""
        with open_small(store_dir, **TWO) as one:
            owner = client(one)
            assert all(owner.save(run("a", 8))) and all(owner.save(run("b", 8)))
            monkeypatch.setattr(Heat, "last_read", lambda self, slots, now_ns: now_ns + 1)
            assert all(owner.save(run("c", 8))) and all(owner.load(run("c", 8)))
            check_space(one)

    def test_a_table_that_cannot_be_had_is_done_without(self, store_dir: Path) -> None:
        open_small(store_dir, **TWO).close()
        table = store_dir / "leases" / "heat"
        table.unlink()
        table.mkdir()
        with open_small(store_dir, **TWO) as one, open_small(store_dir, **TWO) as two:
            assert all(client(one).save(run("a", 16))) and all(client(two).load(run("a", 16)))
            assert all(client(one).save(run("b", 16)))

    @pytest.mark.parametrize("content", [b"", b"x" * 100, b"\xff" * (1 << 14), b"y" * (5 << 20)])
    def test_whatever_is_in_the_table_only_the_order_depends_on_it(
        self, store_dir: Path, content: bytes
    ) -> None:
        open_small(store_dir, **TWO).close()
        (store_dir / "leases" / "heat").write_bytes(content)
        with open_small(store_dir, **TWO) as one, open_small(store_dir, **TWO) as two:
            owner = client(one)
            for name in range(4):
                assert all(owner.save(run(name, 8))) and all(client(two).load(run(name, 8)))
            check_space(one)

    def test_times_that_lie_ahead_are_not_believed(self, tmp_path: Path) -> None:
        heat = Heat(tmp_path / "heat", 1 << 30)
        slots = np.arange(5, dtype=np.uint64)
        assert heat.last_read(slots, 1 << 50) == 0
        heat.note(slots[3:4], 1 << 40)
        assert heat.last_read(slots, 1 << 50) == 1 << 40
        assert heat.last_read(slots[:3], 1 << 50) == 0
        assert heat.last_read(slots, 1 << 39) == 0  # after a restart of the machine
        again = Heat(tmp_path / "heat", 1 << 40)  # of whatever size the first one made it
        assert again.last_read(slots, 1 << 50) == 1 << 40
        heat.close()
        heat.close()
        heat.note(slots, 1 << 41)
        assert again.last_read(slots, 1 << 50) == 1 << 40
        again.close()

    @staticmethod
    def wait_a_unit() -> None:
        """Until the table can tell later from earlier."""
        time.sleep(2 * UNIT_NS / 1e9)


# ---- a process that is gone, but its writes are not ----------------------------------------------


def slots_of(store: PrefixStore) -> list[int]:
    """Slots of a store in the catalog, of all segments."""
    catalog = store._catalog
    return [s << 32 | i for s in sorted(catalog.segments()) for i in sorted(catalog.slots_of(s))]


@pytest.mark.parametrize("verify", [True, False])
def test_a_write_that_lands_late_is_found_out_by_the_checksum(
    store_dir: Path, verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dead process's write reaches a slot that its successor has filled meanwhile.

    Without checksums it is not: there the lease has to wait, see below.
    """
    config = small_config(store_dir, verify=verify)
    devices = memory_devices(config)
    mine = FaultyDevices(devices.media)
    dead = PrefixStore.open(config, transport_object=devices)
    devices.arm(Fault("slow", "batch"))
    ticket = client(dead).pages.save(run("dead", 4), page_of(b"dead", 4))
    poll(lambda: bool(devices._flights), "the write is on its way")
    dead._lease.release()  # as its death does
    with PrefixStore.open(config, transport_object=mine) as store:
        assert store._lease.number == 0
        pages = client(store)
        assert all(pages.save(run("new", 4)))
        devices.close()  # the write lands
        memory = bytearray(4 * PAGE)
        loaded = pages.pages.load(run("new", 4), memory).wait(20)
        assert loaded.any() != verify
        if verify:
            assert store.stats().counters["checksum_errors"] == 4
            settle(store)
            assert all(pages.save(run("new", 4))) and all(pages.load(run("new", 4)))
            check_space(store)
    assert not ticket.wait(20).any()
    dead.close(1)


def page_of(name: bytes, count: int) -> bytes:
    """Pages that no client of the kit would save."""
    return name * (PAGE // len(name)) * count


class TestMarks:
    """What says that a process still writes under a lease that it does not hold any more."""

    @pytest.fixture(params=["posix", "uring"])
    def transport(self, request: pytest.FixtureRequest, disk_dir: Path) -> str:
        try:
            open_small(disk_dir.parent / "probe", transport=request.param).close()
        except UnsupportedError as error:
            pytest.skip(f"{request.param} does not work here: {error}")
        return str(request.param)

    def test_the_files_of_the_transport_carry_the_number_of_the_lease(
        self, disk_dir: Path, transport: str
    ) -> None:
        pool = disk_dir / "pool.tutti"
        with open_small(disk_dir, transport=transport, **TWO) as one:
            assert is_marked_path(pool, 0) and not is_marked_path(pool, 1)
            with open_small(disk_dir, transport=transport, **TWO):
                assert is_marked_path(pool, 1)
            assert all(client(one).save(run("a", 8))) and all(client(one).load(run("a", 8)))
            one._transport.reopen_device(0, lambda block: True)
            assert is_marked_path(pool, 0)
            assert all(client(one).load(run("a", 8)))
        assert not is_marked_path(pool, 0) and not is_marked_path(pool, 1)

    def test_a_process_that_is_killed_leaves_no_mark(self, disk_dir: Path, transport: str) -> None:
        code = (
            "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[3])\n"
            "from store_kit import open_small\n"
            "store = open_small(Path(sys.argv[1]), transport=sys.argv[2])\n"
            "print(store._lease.number, flush=True); sys.stdin.read()"
        )
        tests = Path(__file__).parents[1]
        with other_process(code, disk_dir, transport, tests) as child:
            assert line_of(child) == "0"
            assert is_marked_path(disk_dir / "pool.tutti", 0)
        poll(lambda: not is_marked_path(disk_dir / "pool.tutti", 0), "its transfers have ended")

    def test_a_lease_is_not_given_away_while_its_last_holder_still_writes(
        self, store_dir: Path
    ) -> None:
        with open_small(store_dir) as dead:
            assert all(client(dead).save(run("a", 16)))
        flying = os.open(store_dir / "pool.tutti", os.O_RDWR)  # as a transfer in flight keeps it
        try:
            assert set_mark(flying, 0)
            with open_small(store_dir) as store:
                pages = client(store)
                assert store._lease.number == 1
                assert all(pages.load(run("a", 16)))  # reading is harmless
                assert not any(pages.save(run("b", 4)))  # all space is the dead process's still
                os.close(flying)
                flying = -1
                poll(lambda: all(pages.save(run("b", 4))), "the segments are adopted")
                check_space(store)
        finally:
            if flying >= 0:
                os.close(flying)


# ---- what only one may use -------------------------------------------------------------------


class TestExclusive:
    def test_a_pool_of_two_directories_is_refused_to_the_second(self, store_dir: Path) -> None:
        """A copy of the store directory: catalog and pool fit, and both would hand out slots."""
        pools = [store_dir.parent / "pool"]
        with open_small(store_dir, pools=pools) as store:
            assert all(client(store).save(run("a", 8)))
        twin = store_dir.parent / "twin"
        shutil.copytree(store_dir, twin)
        with open_small(store_dir, pools=pools) as store:
            with pytest.raises(ConfigError, match=r"another directory.*pools of its own"):
                open_small(twin, pools=pools)
            with open_small(store_dir, pools=pools):  # another user of the same one
                pass
            with pytest.raises(ConfigError, match="another directory"):
                open_small(twin, pools=pools)
            assert all(client(store).load(run("a", 8)))
            check_space(store)

    def test_without_the_claim_both_would_be_let_in(
        self, store_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pools = [store_dir.parent / "pool"]
        open_small(store_dir, pools=pools).close()
        shutil.copytree(store_dir, store_dir.parent / "twin")
        monkeypatch.setattr(claim, "is_marked", lambda *_: False)
        with open_small(store_dir, pools=pools), open_small(store_dir.parent / "twin", pools=pools):
            pass

    def test_a_block_device_as_well(self, tmp_path: Path) -> None:
        """The rule is that of files; a file stands for the device, whose guard is elsewhere."""
        pool = tmp_path / "device"
        pool.write_bytes(bytes(8192))
        for name in ("one", "two"):
            (tmp_path / name).write_bytes(b"")
        held = claim.claim_pools(tmp_path / "one", [pool])
        with pytest.raises(ConfigError, match="another directory"):
            claim.claim_pools(tmp_path / "two", [pool])
        held.release()
        claim.claim_pools(tmp_path / "two", [pool]).release()

    def test_other_geometry_is_refused_while_the_store_is_in_use(self, store_dir: Path) -> None:
        with open_small(store_dir, segments=4) as store:
            for settings, said in (
                ({"segment": 65536}, "created with 32768.*leave"),
                ({"segments": 2}, "capacity = .*at least"),
                ({"segments": 4, "pools": [store_dir / "x", store_dir / "y"]}, "put them back"),
            ):
                with pytest.raises(ConfigError, match=said):
                    open_small(store_dir, **settings)
            assert all(client(store).save(run("a", 8))) and all(client(store).load(run("a", 8)))

    def test_two_stores_that_are_made_on_one_pool_at_once_do_not_both_get_it(
        self, store_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The other one is made between this one's look and its own creation."""
        pools = [store_dir.parent / "pool"]
        inspect, calls = pools_module.inspect_pools, []

        def slow(config: StoreConfig) -> object:
            calls.append(config.path)
            if len(calls) == 2:  # under this store's lock, which is not the other's
                monkeypatch.setattr(pools_module, "inspect_pools", inspect)
                open_small(store_dir.parent / "other", pools=pools).close()
            return inspect(config)

        monkeypatch.setattr(pools_module, "inspect_pools", slow)
        with pytest.raises(ConfigError, match="another store"):
            open_small(store_dir, pools=pools)
        with open_small(store_dir.parent / "other", pools=pools) as store:
            assert all(client(store).save(run("a", 8)))
