"""Disks that are full, fail, stall or vanish: real file systems, and a store that serves on."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from store_kit import MIB, PAGE, SEGMENT, Client, check_space, client, open_small, poll, run

from tutti_core import ConfigError, PrefixStore, TuttiError
from tutti_core.format import DATA_OFFSET_BYTES
from tutti_core.index import commits
from tutti_core.testing.fuse_disk import FuseDisk, fuse_disk, why_not
from tutti_core.tiers import segments
from tutti_core.tiers.device_calls import DeviceCalls
from tutti_core.tiers.health import ERRORS_MAX, PROBE_FIRST_S, PROBE_LAST_S

TRANSPORTS = ["posix", "uring"]
SLOTS = SEGMENT // PAGE


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuseDisk]:
    """A disk whose calls fail on command."""
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("fuse")
    with fuse_disk(folder / "disk", folder / "truth") as mounted:
        yield mounted


@pytest.fixture
def place(disk: FuseDisk, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A new folder on it; nothing fails before and after."""
    folder = disk.mount / f"{abs(hash(request.node.name)):x}"
    yield folder
    disk.heal()
    disk.free(None)


@contextmanager
def opened(path: Path, **settings: Any) -> Iterator[tuple[PrefixStore, Client, Clock]]:
    """A store whose pools are on the disk; time to probe passes when it is told to."""
    clock = Clock()
    settings = {"segments": 12, "io_timeout_s": 20.0, **settings}
    with open_small(path, **settings) as store:
        store._loader.health._clock = clock
        store._catalog.commits._clock = clock
        yield store, client(store), clock
        assert store.stats().counters.get("internal_errors", 0) == 0
        check_space(store)


def recover(store: PrefixStore, clock: Clock) -> None:
    """Let the time to the next probe pass, again and again, until all is well."""

    def looked_after() -> bool:
        clock.now_s += PROBE_LAST_S
        return store.stats().unwell == ()

    poll(looked_after, "the devices are well again")


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[Path]:
    """A file system for the length of a with statement; skips where nothing can be mounted."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting needs root")
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", *options, str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


# ---- no room ----
def test_a_file_system_that_is_smaller_than_the_capacity(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What there is gets used, and evicted; with more room the store grows, without reopening."""
    monkeypatch.setattr(segments, "_DISK_FULL_PAUSE_S", 0.0)
    monkeypatch.setattr(segments, "_CLAIM_PAUSE_S", 0.0)
    size = DATA_OFFSET_BYTES + 4 * SEGMENT + 256 * 1024
    with mounted(
        fast_path / "disk", "-t", "tmpfs", "-o", f"mode=0700,size={size}", "tutti"
    ) as disk:
        with open_small(fast_path / "s", pools=[disk], segments=32, keep_free=0) as store:
            pages = client(store)
            for i in range(20):
                assert all(pages.save(run(i, SLOTS))) and all(pages.load(run(i, SLOTS)))
            counters = store.stats().counters
            assert counters["disk_full"] > 0 and counters["evicted_pages"] > 0
            assert counters.get("write_errors", 0) == 0
            held = store.stats().used_bytes
            assert held < 32 * SEGMENT
            subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
            for i in range(20, 60):
                assert all(pages.save(run(i, SLOTS))) and all(pages.load(run(i, SLOTS)))
            assert store.stats().used_bytes == 32 * SEGMENT > held
            check_space(store)


def test_what_others_need_of_the_disk_stays_free(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a store below its capacity fills a disk on which others write, too."""
    monkeypatch.setattr(segments, "_DISK_FULL_PAUSE_S", 0.0)
    monkeypatch.setattr(segments, "_CLAIM_PAUSE_S", 0.0)
    keep = 4 * MIB
    with mounted(fast_path / "disk", "-t", "tmpfs", "-o", "mode=0700,size=12m", "tutti") as disk:

        def free_bytes() -> int:
            facts = os.statvfs(disk)
            return facts.f_bavail * facts.f_frsize

        with open_small(fast_path / "s", pools=[disk], segments=256, keep_free=keep) as store:
            pages = client(store)
            (disk / "others").write_bytes(bytes(6 * MIB))
            for i in range(60):
                assert all(pages.save(run(i, SLOTS)))
                assert free_bytes() >= keep
            assert all(pages.load(run(59, SLOTS)))
            held = store.stats().used_bytes
            assert store.stats().counters["disk_full"] > 0 and held <= 2 * MIB
            (disk / "others").unlink()
            for i in range(60, 200):
                assert all(pages.save(run(i, SLOTS)))
                assert free_bytes() >= keep
            assert store.stats().used_bytes > held
            (disk / "others").write_bytes(bytes(free_bytes()))  # below the mark: what is set aside
            assert all(pages.save(run("last", SLOTS))) and all(pages.load(run("last", SLOTS)))
            check_space(store)


def test_without_a_mark_it_would_not(fast_path: Path) -> None:
    """The control of the test before."""
    with mounted(fast_path / "disk", "-t", "tmpfs", "-o", "mode=0700,size=12m", "tutti") as disk:
        with open_small(fast_path / "s", pools=[disk], segments=256, keep_free=0) as store:
            pages = client(store)
            (disk / "others").write_bytes(bytes(6 * MIB))
            for i in range(160):
                pages.save(run(i, SLOTS))
            facts = os.statvfs(disk)
            assert facts.f_bavail * facts.f_frsize < 4 * MIB


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_room_that_is_refused_when_it_is_asked_for(
    disk: FuseDisk, place: Path, fast_path: Path, transport: str, code: int
) -> None:
    """Full disk and quota: those before are evicted; nothing is blamed on the device."""
    with opened(fast_path, pools=[place], transport=transport) as (store, pages, _):
        assert all(pages.save(run("a", SLOTS)))
        disk.fail("fallocate", code)
        for i in range(5):
            assert all(pages.save(run(i, SLOTS))) and all(pages.load(run(i, SLOTS)))
        assert store.stats().unwell == () and store.stats().counters["disk_full"] > 0
        assert store.stats().used_bytes == SEGMENT


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_room_that_is_refused_when_it_is_written(
    disk: FuseDisk, place: Path, fast_path: Path, transport: str, code: int
) -> None:
    """Thin provisioning: pages are refused and counted, and those that are stored are served."""
    with opened(fast_path, pools=[place], transport=transport) as (store, pages, _):
        assert all(pages.save(run("a", SLOTS)))
        disk.fail("write", code)
        for i in range(3):
            assert not any(pages.save(run(i, SLOTS)))
        assert store.stats().unwell == () and store.stats().counters["write_errors"] == 3 * SLOTS
        assert all(pages.load(run("a", SLOTS)))
        disk.heal()
        assert all(pages.save(run("b", SLOTS))) and all(pages.load(run("b", SLOTS)))


def test_a_limit_on_the_size_of_files(store_dir: Path, fast_path: Path) -> None:
    """Set before, it is noticed at opening; set later, what lies beyond it is refused."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with opened(store_dir) as (store, pages, _):
            assert all(pages.save(run("a", SLOTS)))
            limit = DATA_OFFSET_BYTES + 3 * SEGMENT
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            stored = [all(pages.save(run(i, SLOTS))) for i in range(4)]
            assert stored == [True, True, False, False]
            assert store.stats().counters["write_errors"] == 2 * SLOTS
            assert store.stats().unwell == () and all(pages.load(run("a", SLOTS)))
            with pytest.raises(TuttiError, match="File too large"):
                open_small(fast_path / "new", segments=12)
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            assert not (fast_path / "new" / "pool.tutti").exists()
            for i in range(2, 6):
                assert all(pages.save(run(i, SLOTS))) and all(pages.load(run(i, SLOTS)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# ---- errors ----
BROKEN = [errno.EIO, errno.ENODEV, errno.EROFS, errno.EACCES]


@pytest.mark.parametrize("code", BROKEN)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_reads_that_fail(
    disk: FuseDisk, place: Path, fast_path: Path, transport: str, code: int
) -> None:
    """Misses; no page is lost, and all are there when the disk is."""
    with opened(fast_path, pools=[place], transport=transport) as (store, pages, clock):
        assert all(pages.save(run("few", 3))) and all(pages.save(run("many", 40)))
        disk.fail("read", code, "pool.tutti")
        assert not any(pages.load(run("few", 3)))
        assert pages.match(run("few", 3)) == 0, "a load that failed is offered again"
        assert not any(pages.load(run("many", 40)))
        assert store.stats().unwell == (f"{place}/pool.tutti: reads",)
        assert store.stats().counters["read_errors"] == 43
        asked = disk.count("read")
        assert not any(pages.load(run("many", 40))) and disk.count("read") == asked
        disk.heal()
        recover(store, clock)
        assert all(pages.load(run("few", 3))) and all(pages.load(run("many", 40)))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_few_reads_that_fail_of_a_disk_that_nobody_reads_otherwise(
    disk: FuseDisk, place: Path, fast_path: Path, transport: str
) -> None:
    """Too few to call the disk bad, and nothing else says whether it is: a probe does."""
    with opened(fast_path, pools=[place], transport=transport) as (store, pages, clock):
        assert all(pages.save(run("a", 3)))
        disk.fail("read", errno.EIO, "pool.tutti")
        assert not any(pages.load(run("a", 3)))
        disk.heal()
        assert not any(pages.contains(run("a", 3)))
        clock.now_s += PROBE_FIRST_S
        poll(lambda: all(pages.contains(run("a", 3))), "the pages are offered again")
        assert all(pages.load(run("a", 3))) and store.stats().pages == 3
        disk.fail("read", errno.EIO, "pool.tutti")  # once more: it may be the pages after all
        assert not any(pages.load(run("a", 3)))
        poll(lambda: store.stats().pages == 0, "their records are gone")


@pytest.mark.parametrize("code", BROKEN)
@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_writes_and_flushes_that_fail(
    disk: FuseDisk, place: Path, fast_path: Path, transport: str, call: str, code: int
) -> None:
    """Nothing is promised; loads go on; saving goes on by itself when the disk is well."""
    with opened(fast_path, pools=[place], transport=transport) as (store, pages, clock):
        assert all(pages.save(run("a", 8)))
        disk.fail(call, code, "pool.tutti")
        while not store.stats().unwell:
            assert not any(pages.save(run("b", ERRORS_MAX)))
        assert store.stats().unwell == (f"{place}/pool.tutti: writes",)
        assert store.stats().counters["write_errors"] == ERRORS_MAX
        asked = disk.count(call)
        assert not any(pages.save(run("c", 8))) and disk.count(call) == asked
        assert store.stats().counters["pages_refused_unwell"] == 8
        assert all(pages.load(run("a", 8)))
        for _ in range(3):  # probes fail as long as it does
            before = disk.count(call)  # before the clock moves: whoever ticks next probes
            clock.now_s += PROBE_LAST_S
            poll(lambda: bool(store.stats()) and disk.count(call) > before, "a probe")  # noqa: B023
            assert store.stats().unwell
        disk.heal()
        recover(store, clock)
        assert all(pages.save(run("b", ERRORS_MAX))) and all(pages.load(run("b", ERRORS_MAX)))
        assert all(pages.load(run("a", 8)))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_flush_that_fails_costs_what_it_did_not_cover_and_no_more(
    disk: FuseDisk, place: Path, fast_path: Path, transport: str
) -> None:
    """Fault: after one error of fdatasync a store saves nothing until it is opened again."""
    with opened(fast_path, pools=[place], transport=transport) as (store, pages, _):
        for i in range(4):
            disk.fail("fsync", errno.EIO, "pool.tutti")
            assert not any(pages.save(run(i, 4)))
            disk.heal()
            assert not any(pages.contains(run(i, 4)))
            assert all(pages.save(run(i, 4))) and all(pages.load(run(i, 4)))
        assert store.stats().unwell == ()


# ---- stalls ----
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_disk_that_stalls_holds_up_no_other(
    disk: FuseDisk, place: Path, fast_path: Path, transport: str
) -> None:
    pools = [place, fast_path / "well"]
    settings = {"pools": pools, "transport": transport, "io_timeout_s": 0.1}
    with opened(fast_path / "s", **settings) as (store, pages, clock):
        assert all(pages.save(run("a", 8)))
        disk.stall("read", "pool.tutti")
        memory = bytearray(8 * PAGE)
        late = pages.pages.load(run("a", 8), memory)
        for _ in range(3):
            with pytest.raises(TuttiError, match="not finished"):
                late.wait()
            clock.now_s += 0.1
        path = f"{place}/pool.tutti"
        assert store.stats().unwell == (f"{path}: reads", f"{path}: writes")
        assert pages.load(run("a", 8)) == [False, True] * 4
        for i in range(40):  # more than fits: what is given up does not wait for the late load
            assert all(pages.save(run(i, 8))) and all(pages.load(run(i, 8)))
        disk.heal()
        assert late.wait(20).all(), "what was under way still ends"
        recover(store, clock)
        assert all(pages.save(run("b", 8))) and all(pages.load(run("b", 8)))


@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_disk_that_takes_no_writes_for_a_while(
    disk: FuseDisk, place: Path, fast_path: Path, transport: str, call: str
) -> None:
    """Saves answer in bounded time, loads go on, and saving begins again by itself."""
    settings = {"pools": [place], "transport": transport, "io_timeout_s": 0.1}
    with opened(fast_path, **settings) as (store, pages, clock):
        assert all(pages.save(run("a", 4)))
        disk.stall(call, "pool.tutti")
        i = 0
        while not any("writes" in text for text in store.stats().unwell):
            assert not any(pages.save(run(("b", i), 4)))
            clock.now_s += 0.1
            i += 1
            assert i < 10
        if call == "fsync":
            assert all(pages.load(run("a", 4)))
        assert not pages.pages.save(run("c", 4), bytes(4 * PAGE)).wait(20).any()
        disk.heal()
        recover(store, clock)
        assert all(pages.save(run("c", 4))) and all(pages.load(run("c", 4)))
        assert all(pages.load(run("a", 4)))


def test_a_disk_that_never_answers_again_does_not_keep_the_store_from_closing(
    fast_path: Path, tmp_path: Path
) -> None:
    if reason := why_not():
        pytest.skip(reason)
    with fuse_disk(tmp_path / "disk", tmp_path / "truth") as gone:
        store = open_small(
            fast_path, pools=[gone.mount], segments=12, transport="posix", io_timeout_s=0.1
        )
        pages = client(store)
        assert all(pages.save(run("a", 4)))
        for call in ("read", "write", "fsync"):
            gone.stall(call, "pool.tutti")
        late = pages.pages.load(run("a", 4), bytearray(4 * PAGE))
        assert not any(pages.save(run("b", 4)))
        store.close(0.5)
        assert not late.done()


# ---- gone and back ----
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_disk_that_was_unplugged_is_used_again_when_it_is_back(
    fast_path: Path, tmp_path: Path, transport: str
) -> None:
    """Its old descriptor is bad for ever; another disk in its place is not taken for it."""
    if reason := why_not():
        pytest.skip(reason)
    mount, truth = tmp_path / "disk", tmp_path / "truth"
    with ExitStack() as plugged, ExitStack() as later:
        plugged.enter_context(fuse_disk(mount, truth))
        settings = {"pools": [mount], "transport": transport}
        store, pages, clock = later.enter_context(opened(fast_path / "s", **settings))
        assert all(pages.save(run("a", 20)))
        plugged.close()
        assert not any(pages.load(run("a", 20))) and not any(pages.save(run("b", 20)))
        assert len(store.stats().unwell) == 2
        with fuse_disk(mount, tmp_path / "other"):
            with open_small(fast_path / "t", pools=[mount], segments=12) as other:
                assert all(client(other).save(run("x", 20)))
            for _ in range(6):
                clock.now_s += PROBE_LAST_S
                store.stats()
                time.sleep(0.02)
            assert len(store.stats().unwell) == 2, "another pool was taken for it"
        with fuse_disk(mount, truth):
            recover(store, clock)
            assert all(pages.load(run("a", 20))), "pages were lost"
            assert all(pages.save(run("b", 20))) and all(pages.load(run("b", 20)))
            assert store.stats().counters["devices_reopened"] >= 1
            later.close()


def test_without_opening_it_anew_it_would_stay_away(
    fast_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test before: the kernel fails the old descriptor for ever."""
    if reason := why_not():
        pytest.skip(reason)
    monkeypatch.setattr(DeviceCalls, "can_reopen", False)
    mount, truth = tmp_path / "disk", tmp_path / "truth"
    with ExitStack() as plugged:
        plugged.enter_context(fuse_disk(mount, truth))
        with opened(fast_path / "s", pools=[mount]) as (store, pages, clock):
            assert all(pages.save(run("a", 20)))
            plugged.close()
            assert not any(pages.load(run("a", 20)))
            with fuse_disk(mount, truth):
                for _ in range(20):
                    clock.now_s += PROBE_LAST_S
                    store.stats()
                    time.sleep(0.005)
                assert store.stats().counters["device_probes"] > 3 and store.stats().unwell


def test_a_file_system_that_aborts_is_used_again_after_it_was_mounted_anew(
    fast_path: Path,
) -> None:
    """ext4 on a loop device, which really turns read-only and stays so for what is open on it."""
    image = fast_path / "image"
    with image.open("wb") as stream:
        stream.truncate(16 * MIB)
    if shutil.which("mkfs.ext4") is None or os.geteuid() != 0:
        pytest.skip("loop devices need root and mkfs.ext4")
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
    loop = subprocess.run(
        ["losetup", "--find", "--show", str(image)], capture_output=True, text=True, check=False
    )
    if loop.returncode:
        pytest.skip(f"this machine has no loop devices: {loop.stderr.strip()}")
    device, place = loop.stdout.strip(), fast_path / "disk"
    try:
        with ExitStack() as later:
            with mounted(place, "-t", "ext4", device):
                settings = {"pools": [place], "keep_free": 0}
                store, pages, clock = later.enter_context(opened(fast_path / "s", **settings))
                assert all(pages.save(run("a", 20)))
                subprocess.run(["mount", "-o", "remount,abort", str(place)], check=True)
                while not store.stats().unwell:
                    assert not any(pages.save(run("b", ERRORS_MAX)))
                assert store.stats().unwell == (f"{place}/pool.tutti: writes",)
                assert all(pages.load(run("a", 20))), "reading is not concerned"
                with pytest.raises(TuttiError, match=r"(?i)read-only"):
                    open_small(place / "new", segments=2)
                clock.now_s += PROBE_LAST_S
                store.stats()
            # What is open keeps the old one alive: the disk comes back as another device.
            second = fast_path / "second"
            shutil.copy(image, second)
            subprocess.run(["e2fsck", "-fy", str(second)], capture_output=True, check=False)
            with mounted(place, "-t", "ext4", "-o", "loop", str(second)):
                recover(store, clock)
                assert all(pages.load(run("a", 20)))
                assert all(pages.save(run("b", 20))) and all(pages.load(run("b", 20)))
                later.close()
    finally:
        subprocess.run(["losetup", "--detach", device], check=False)


# ---- the catalog ----
def catalog_settings(fast_path: Path) -> dict[str, Any]:
    return {"pools": [fast_path / "pool"], "transport": "posix"}


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS])
@pytest.mark.parametrize(
    ("call", "below_bytes"),
    [("write", 1 << 62), ("write", 2 * 4096), ("fsync", 1 << 62)],
    ids=["any page", "the root page", "flush"],
)
def test_a_catalog_that_cannot_be_written(
    disk: FuseDisk, place: Path, fast_path: Path, call: str, below_bytes: int, code: int
) -> None:
    """Fault: one error of the root page, and every look-up fails until the store is opened again.

    What is stored is served, nothing is evicted in vain, and saving goes on by itself.
    """
    with opened(place, segments=2, **catalog_settings(fast_path)) as (store, pages, clock):
        assert all(pages.save(run("a", 2 * SLOTS)))  # full: a save would have to evict
        disk.fail(call, code, "data.mdb", below_bytes=below_bytes)
        for i in range(4):
            assert not any(pages.save(run(("b", i), 4)))
        (text,) = store.stats().unwell
        assert text.startswith(f"{place}: the catalog")
        loaded = sum(pages.load(run("a", 2 * SLOTS)))
        assert loaded >= SLOTS and store.stats().counters["catalog_errors"] > 0
        for i in range(4):
            assert not any(pages.save(run(("c", i), 4)))
        assert sum(pages.load(run("a", 2 * SLOTS))) == loaded, "evicted for nothing"
        assert pages.match(run("unknown", 3)) == 0
        disk.heal()
        clock.now_s += commits.PAUSE_LAST_S
        assert all(pages.save(run("b", 4))) and all(pages.load(run("b", 4)))
        assert store.stats().unwell == ()


def test_a_catalog_that_cannot_grow_holds_fewer_pages_until_it_can(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: after one full disk a store stays small until it is opened again."""
    with mounted(fast_path / "s", "-t", "tmpfs", "-o", "mode=0700,size=256k", "tutti") as path:
        settings = {"segments": 300, **catalog_settings(fast_path)}
        with opened(path, **settings) as (store, pages, clock):
            most = store._catalog.records_max
            stored = 0
            for i in range(60):
                stored += sum(pages.save(run(i, 16)))
            small = store._catalog.records_max
            assert 0 < small < most and store.stats().pages < 60 * 16
            assert store.stats().counters["catalog_errors"] > 0 and stored > store.stats().pages
            assert any(all(pages.load(run(i, 16))) for i in range(60))
            subprocess.run(["mount", "-o", "remount,size=8m", str(path)], check=True)
            clock.now_s += commits.ROOM_PAUSE_S * (commits.ROOM_STEPS + 1)
            assert store._catalog.records_max == most
            for i in range(60, 120):
                assert all(pages.save(run(i, 16)))
            assert store.stats().pages > small


def test_a_catalog_whose_disk_stalls_is_told_of_and_saves_end(
    disk: FuseDisk, place: Path, fast_path: Path
) -> None:
    with opened(place, **catalog_settings(fast_path), io_timeout_s=0.1) as (store, pages, clock):
        assert all(pages.save(run("a", 8)))
        before = disk.count("fsync")
        disk.stall("fsync", "data.mdb")
        try:
            late = pages.pages.save(run("b", 4), bytes(4 * PAGE))
            poll(lambda: disk.count("fsync") > before, "a commit waits")
            clock.now_s += 1
            (text,) = store.stats().unwell
            assert "the catalog, a commit takes" in text
            assert all(pages.load(run("a", 8)))
        finally:
            disk.heal()
        assert late.wait(20).all() and store.stats().unwell == ()


# ---- at opening ----
@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["create", "fallocate", "write", "fsync"])
def test_a_store_that_cannot_be_made_says_why_and_leaves_nothing_that_is_in_the_way(
    disk: FuseDisk, place: Path, call: str, code: int
) -> None:
    disk.fail(call, code)
    with pytest.raises(TuttiError) as caught:
        open_small(place, segments=2)
    assert os.strerror(code) in str(caught.value)
    disk.heal()
    with opened(place, segments=2) as (_, pages, _):
        assert all(pages.save(run("a", 4))) and all(pages.load(run("a", 4)))


def test_a_read_only_disk_is_refused_at_opening(fast_path: Path) -> None:
    with mounted(fast_path / "disk", "-t", "tmpfs", "-o", "mode=0700,size=8m", "tutti") as place:
        with open_small(place / "s", segments=2) as store:
            assert all(client(store).save(run("a", 4)))
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        for path in (place / "s", place / "new"):
            with pytest.raises((ConfigError, TuttiError), match=r"(?i)read-only|not writable"):
                open_small(path, segments=2)
        subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
        with open_small(place / "s", segments=2) as store:
            assert all(client(store).load(run("a", 4)))
