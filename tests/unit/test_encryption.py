"""Encrypted stores: what comes back, what lies on disk, and that nothing forged is ever loaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encryption_kit import (
    TRAILER,
    Stored,
    encrypted_config,
    key_file,
    load,
    open_encrypted,
    open_unit,
    pages_of,
    random_pages,
    stored_pages,
)
from store_kit import finish, load_in_parts, memory_devices, open_small, poll, run

from tutti_core import CorruptionError, Namespace, PageFragments, PrefixStore, StoreConfig
from tutti_core.describe import describe_store
from tutti_core.repair import repair_store
from tutti_core.testing import FOREVER, Fault
from tutti_core.tiers import cipher as cipher_module
from tutti_core.tiers import encryption, saver
from tutti_core.tiers.cipher import PageCipher
from tutti_core.verify import verify_store

LAYOUTS = {
    "block": (4096,),
    "odd": (5000,),
    "tiny": (16,),
    "parts": (5000, 4096, 100),
    "even parts": (4096, 8192),
    "nearly a block": (4090, 4047),
}
TIERS: dict[str, dict[str, Any]] = {
    "none": {},
    "through": {"dram": "4MiB"},
    "back": {"dram": "4MiB", "write_policy": "write_back"},
    "exclusive": {"dram": "4MiB", "dram_mode": "exclusive"},
    "selective": {"dram": "4MiB", "write_policy": "write_selective"},
}
COUNT = 7


def assert_not_on_disk(path: Path, memory: np.ndarray) -> None:
    """No 16 bytes of any page lie anywhere in the files of a store."""
    files = b"".join(f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file())
    assert len(files) > 1 << 20
    for page in memory:
        for at in range(0, len(page) - 15, max(len(page) // 8, 1)):
            assert page[at : at + 16].tobytes() not in files


# ---- what comes back ----
@pytest.mark.parametrize(
    ("tiers", "sizes"),
    [(t, s) for t in TIERS for s in LAYOUTS if t == "none" or s in ("odd", "parts")],
)
def test_pages_come_back_from_every_tier_and_from_disk(
    tmp_path: Path, tiers: str, sizes: str
) -> None:
    check_round_trips(tmp_path, LAYOUTS[sizes], TIERS[tiers])


def check_round_trips(tmp_path: Path, sizes: tuple[int, ...], tiers: dict[str, Any]) -> None:
    memory, keys = random_pages(COUNT, sum(sizes)), run("a", COUNT)
    before = memory.copy()
    with open_encrypted(tmp_path / "s", **tiers) as store:
        pages = pages_of(store, sizes)
        assert finish(pages.save(keys, memory)).all()
        assert (memory == before).all()
        pages.match(keys)
        pages.match(keys)
        assert store.flush()
        for _ in range(2):
            target = np.zeros_like(memory)
            assert load(pages, keys, target) == [True] * COUNT and (target == memory).all()
    for _ in range(2):  # the second time some are promoted, and leave the drives where exclusive
        with open_encrypted(tmp_path / "s", **tiers) as store:
            pages = pages_of(store, sizes)
            for _ in range(2):
                target = np.zeros_like(memory)
                assert load(pages, keys, target) == [True] * COUNT and (target == memory).all()
                if store._mover is not None:
                    assert store._mover.wait_idle(20.0)
            assert not store._manager.counters["decryption_errors"]
            assert not store._manager.counters["promotion_errors"]
    assert_not_on_disk(tmp_path / "s", memory)
    report = verify_store(tmp_path / "s")
    assert report.clean and report.payloads == COUNT


@pytest.mark.parametrize(
    ("transport", "sizes"),
    [("posix", LAYOUTS["odd"]), *[("uring", sizes) for sizes in LAYOUTS.values()]],
)
def test_pages_in_fragments_of_any_cut(
    tmp_path: Path, sizes: tuple[int, ...], transport: str
) -> None:
    """Fragments of 1 byte and more, in memory that is nowhere aligned; other cuts on load."""
    generator, size = np.random.default_rng(3), sum(sizes)
    memory, keys = random_pages(COUNT, size), run("a", COUNT)

    def cut(space: np.ndarray) -> PageFragments:
        borders = set(np.cumsum(sizes).tolist())
        borders |= set(generator.integers(1, size, 9).tolist())
        ends = np.array(sorted(borders), dtype=np.uint64)
        lengths = np.diff(ends, prepend=np.uint64(0)).astype(np.uint64)
        start = np.uint64(space.ctypes.data) + np.arange(COUNT, dtype=np.uint64)[:, None] * size
        return PageFragments((start + (ends - lengths)).astype(np.uint64), lengths, space)

    def shifted() -> np.ndarray:
        return np.zeros(memory.size + 64, dtype=np.uint8)[13 : 13 + memory.size]

    source = shifted()
    source[:] = memory.reshape(-1)
    with open_encrypted(tmp_path / "s", transport=transport) as store:
        pages = pages_of(store, sizes)
        assert finish(pages.save(keys, cut(source))).all()
        assert (source == memory.reshape(-1)).all()
        for _ in range(3):
            target = shifted()
            assert load(pages, keys, cut(target)) == [True] * COUNT
            assert (target == memory.reshape(-1)).all()
    assert_not_on_disk(tmp_path / "s", memory)


def test_parts_can_be_read_alone_and_into_places_of_their_own(tmp_path: Path) -> None:
    sizes = (4096, 8192, 300)
    memory, keys = random_pages(COUNT, sum(sizes)), run("a", COUNT)
    with open_encrypted(tmp_path / "s") as store:
        pages = pages_of(store, sizes)
        assert finish(pages.save(keys, memory)).all()
        reading = pages.load_parts(keys)
        at = 0
        for part, size in enumerate(sizes):
            for low, high in ((0, 3), (3, COUNT)):
                target = np.zeros((high - low, 2, size // 2), dtype=np.uint8)
                address = target.ctypes.data + np.arange(2 * (high - low)) * (size // 2)
                places = address.reshape(high - low, 2).astype(np.uint64)
                started = reading.start(part, low, high, places)
                assert reading.finish(started, 20.0).all()
                got = target.reshape(high - low, size)
                assert (got == memory[low:high, at : at + size]).all()
            at += size
        reading.end()


def test_another_process_reads_the_pages(tmp_path: Path) -> None:
    memory, keys = random_pages(COUNT, 5000), run("a", COUNT)
    program = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from encryption_kit import *
from store_kit import run
memory, keys = random_pages(7, 5000), run("a", 7)
with open_encrypted(Path(sys.argv[3])) as store:
    target = np.zeros_like(memory)
    assert load(pages_of(store, (5000,)), keys, target) == [True] * 7
    assert (target == memory).all()
"""
    tests = Path(__file__).parents[1]
    with open_encrypted(tmp_path / "s", writers_max=2) as store:
        assert finish(pages_of(store, (5000,)).save(keys, memory)).all()
        arguments = [str(tests), str(tests.parent), str(tmp_path / "s")]
        subprocess.run([sys.executable, "-c", program, *arguments], check=True, timeout=120)


# ---- what lies on disk ----
@pytest.mark.parametrize("sizes", LAYOUTS.values(), ids=LAYOUTS)
def test_stored_bytes_are_what_the_format_says(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """A second implementation decrypts the raw bytes of the pool; every unit has its own nonce."""
    memory, keys = random_pages(COUNT, sum(sizes)), run("a", COUNT)
    with open_encrypted(tmp_path / "s") as store:
        assert finish(pages_of(store, sizes).save(keys, memory)).all()
    parts = sizes if len(sizes) > 1 else ()
    digest = Namespace(model="m", page_tokens=1, page_bytes=sum(sizes), parts=parts).digest()
    seen, salts = set(), set()
    found = {bytes(page.page_key): page for page in stored_pages(tmp_path / "s", parts)}
    assert len(found) == COUNT
    for key, expected in zip(keys, memory, strict=True):
        page = found[key.ljust(32, b"\0")]
        units = page.units()
        plain = [
            open_unit(bytes(page.raw[low:high]), page.store_id, digest, key, i, len(units))
            for i, (low, high) in enumerate(units)
        ]
        assert b"".join(plain) == expected.tobytes()
        seen |= {bytes(page.raw[high - 32 : high - 20]) for _, high in units}
        salts |= {bytes(page.raw[high - 16 : high]) for _, high in units}
        for (_, high), after in zip(units, [*[low for low, _ in units[1:]], None], strict=True):
            assert not any(page.raw[high:after])  # padding
        if parts:
            assert page.raw[:8] == b"TUTTIPRT" and page.raw[16:48] == key.ljust(32, b"\0")
    assert len(seen) == COUNT * len(sizes) and len(salts) == 1


def test_each_opening_and_each_namespace_has_a_key_of_its_own(tmp_path: Path) -> None:
    for opening in range(2):
        with open_encrypted(tmp_path / "s") as store:
            for model in ("m", "n"):
                pages = pages_of(store, (4096,), model=model)
                keys = run(opening, 1)
                assert finish(pages.save(keys, np.zeros((1, 4096), dtype=np.uint8))).all()
    found = stored_pages(tmp_path / "s")
    assert len({bytes(page.raw[-16:]) for page in found}) == len(found) == 4
    assert len({bytes(page.raw[:4096]) for page in found}) == 4  # of the same zeros


def test_a_key_that_has_encrypted_enough_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encryption, "SEALS_PER_KEY_MAX", 5)
    memory, keys = random_pages(8, 4096), run("a", 8)
    with open_encrypted(tmp_path / "s") as store:
        pages = pages_of(store, (4096,))
        for i in range(8):
            assert finish(pages.save(keys.upto(i + 1), memory[i : i + 1], first=i)).all()
        target = np.zeros_like(memory)
        assert load(pages, keys, target) == [True] * 8 and (target == memory).all()
    assert len({bytes(page.raw[-16:]) for page in stored_pages(tmp_path / "s")}) == 2


def test_tools_need_no_key(tmp_path: Path) -> None:
    memory, keys = random_pages(COUNT, 9096), run("a", COUNT)
    for sizes in ((9096,), (5000, 4096)):
        with open_encrypted(tmp_path / "s") as store:
            assert finish(pages_of(store, sizes).save(keys, memory)).all()
    facts, _ = describe_store(tmp_path / "s")
    assert facts.encrypted and facts.pages == 2 * COUNT
    assert verify_store(tmp_path / "s").clean
    page = stored_pages(tmp_path / "s")[3]
    with open(tmp_path / "s" / "pool.tutti", "r+b") as pool:
        pool.seek(page.offset + 100)
        pool.write(bytes(8))
    assert verify_store(tmp_path / "s").damage["payload"].count == 1
    assert repair_store(tmp_path / "s").pages_lost == 1
    assert verify_store(tmp_path / "s").clean


def test_a_damaged_superblock_comes_back_with_the_check_of_the_key(tmp_path: Path) -> None:
    memory, keys = random_pages(COUNT, 5000), run("a", COUNT)
    with open_encrypted(tmp_path / "s") as store:
        assert finish(pages_of(store, (5000,)).save(keys, memory)).all()
    before = (tmp_path / "s" / "pool.tutti").read_bytes()[:4096]
    with open(tmp_path / "s" / "pool.tutti", "r+b") as pool:
        pool.seek(12)
        pool.write(bytes(100))  # flags, ids and the check
    with pytest.raises(CorruptionError):
        open_encrypted(tmp_path / "s")
    repair_store(tmp_path / "s")
    assert (tmp_path / "s" / "pool.tutti").read_bytes()[:4096] == before
    with open_encrypted(tmp_path / "s") as store:
        target = np.zeros_like(memory)
        assert load(pages_of(store, (5000,)), keys, target) == [True] * COUNT
        assert (target == memory).all()


# ---- what is not right is a miss ----
def flip(at: int) -> Callable[[Stored, int], None]:
    """Change one bit of a unit, counted from its start, or from its end where negative."""

    def change(page: Stored, unit: int) -> None:
        low, high = page.units()[unit]
        page.raw[low + at if at >= 0 else high + at] ^= 0x10

    return change


def truncate(page: Stored, unit: int) -> None:
    _, high = page.units()[unit]
    page.raw[high - TRAILER : high] = bytes(TRAILER)


def half_trailer(page: Stored, unit: int) -> None:
    _, high = page.units()[unit]
    page.raw[high - TRAILER // 2 : high] = bytes(TRAILER // 2)


CHANGES = {
    "first byte": flip(0),
    "last byte": flip(-TRAILER - 1),
    "tag": flip(-TRAILER),
    "nonce": flip(-32),
    "zeros": flip(-20),
    "salt": flip(-1),
    "no trailer": truncate,
    "half a trailer": half_trailer,
}


def forge(
    folder: Path, sizes: tuple[int, ...], unit: int, change: Callable[[Stored, int], None]
) -> None:
    """Save pages, change one of them with checksums that agree, and see that it alone is lost."""
    memory, keys = random_pages(COUNT, sum(sizes)), run("a", COUNT)
    with open_encrypted(folder / "s") as store:
        assert finish(pages_of(store, sizes).save(keys, memory)).all()
    page = stored_pages(folder / "s", sizes if len(sizes) > 1 else ())[2]
    change(page, unit)
    page.put()
    assert verify_store(folder / "s").clean, "the checksums do not agree: nothing is tried"
    expect_one_loss(folder / "s", sizes, memory, [2])


def expect_one_loss(
    path: Path, sizes: tuple[int, ...], memory: np.ndarray, lost: list[int]
) -> None:
    keys = run("a", COUNT)
    with open_encrypted(path) as store:
        pages = pages_of(store, sizes)
        target = np.full_like(memory, 0x5A)
        got = load(pages, keys, target)
        for i in range(COUNT):
            if got[i]:
                assert (target[i] == memory[i]).all(), f"page {i}: wrong bytes were loaded"
        assert got == [i not in lost for i in range(COUNT)]
        assert store._manager.counters["decryption_errors"] == len(lost)
        again = load(pages, keys, target)
        assert again == got and store._manager.counters["decryption_errors"] == len(lost)
        assert pages.contains(keys).tolist() == got
        assert finish(pages.save(keys, memory)).all()  # and it can be saved again
        assert load(pages, keys, target) == [True] * COUNT and (target == memory).all()


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("sizes", [(4096,), (5000,)], ids=["block", "odd"])
def test_a_forged_page_is_a_miss(
    tmp_path: Path, sizes: tuple[int, ...], change: Callable[[Stored, int], None]
) -> None:
    forge(tmp_path, sizes, 0, change)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("unit", [0, 1])
def test_a_page_with_a_forged_part_is_a_miss(
    tmp_path: Path, unit: int, change: Callable[[Stored, int], None]
) -> None:
    forge(tmp_path, (5000, 4096), unit, change)


def swap(folder: Path, sizes: tuple[int, ...], moves: list[tuple[int, int, int, int]]) -> None:
    """Put units of saved pages into others' places: (page, unit) gets what (page, unit) had."""
    memory, keys = random_pages(COUNT, sum(sizes)), run("a", COUNT)
    with open_encrypted(folder / "s") as store:
        assert finish(pages_of(store, sizes).save(keys, memory)).all()
    parts = sizes if len(sizes) > 1 else ()
    found, before = stored_pages(folder / "s", parts), stored_pages(folder / "s", parts)
    for to, to_unit, source, source_unit in moves:
        (low, high), (a, b) = found[to].units()[to_unit], before[source].units()[source_unit]
        assert high - low == b - a
        found[to].raw[low:high] = before[source].raw[a:b]
    lost = sorted({move[0] for move in moves})
    for page in lost:
        found[page].put()
    assert verify_store(folder / "s").clean, "the checksums do not agree: nothing is tried"
    expect_one_loss(folder / "s", sizes, memory, lost)


SWAPS = {
    "two pages": ((5000,), [(1, 0, 4, 0), (4, 0, 1, 0)]),
    "a page twice": ((5000,), [(1, 0, 4, 0)]),
    "parts of two pages": ((5000, 4096), [(1, 1, 4, 1), (4, 1, 1, 1)]),
    "first parts of two pages": ((5000, 4096), [(1, 0, 4, 0)]),
    "two parts of a page": ((5000, 5000), [(3, 0, 3, 1), (3, 1, 3, 0)]),
}


@pytest.mark.parametrize(("sizes", "moves"), SWAPS.values(), ids=SWAPS)
def test_a_page_does_not_pass_for_another(
    tmp_path: Path, sizes: tuple[int, ...], moves: list[tuple[int, int, int, int]]
) -> None:
    swap(tmp_path, sizes, moves)


def test_a_page_of_another_namespace_or_store_is_a_miss(tmp_path: Path) -> None:
    memory, keys = random_pages(COUNT, 5000), run("a", COUNT)
    for path, model in (("s", "m"), ("s", "other"), ("t", "m")):
        with open_encrypted(tmp_path / path) as store:
            assert finish(pages_of(store, (5000,), model=model).save(keys, memory)).all()
    digest = Namespace(model="m", page_tokens=1, page_bytes=5000).digest()
    mine = [page for page in stored_pages(tmp_path / "s") if page.digest == digest]
    other = [page for page in stored_pages(tmp_path / "s") if page.digest != digest]
    foreign = stored_pages(tmp_path / "t")
    for at, source in ((1, other), (3, foreign)):
        twin = next(page for page in source if page.page_key == mine[at].page_key)
        mine[at].raw[:] = twin.raw
        mine[at].put()
    expect_one_loss(tmp_path / "s", (5000,), memory, [1, 3])


@pytest.mark.parametrize("sizes", [(5000,), (5000, 4096)], ids=["whole", "parts"])
@pytest.mark.parametrize("mode", ["inclusive", "exclusive"])
def test_a_forged_page_is_not_promoted(tmp_path: Path, sizes: tuple[int, ...], mode: str) -> None:
    """A promotion reads the drive again: what was changed after the load must not come along."""
    memory, keys = random_pages(COUNT, sum(sizes)), run("a", COUNT)
    with open_encrypted(tmp_path / "s") as store:
        assert finish(pages_of(store, sizes).save(keys, memory)).all()
    page = stored_pages(tmp_path / "s", sizes if len(sizes) > 1 else ())[COUNT - 1]
    flip(-TRAILER - 1)(page, len(sizes) - 1)
    page.put()
    with open_encrypted(tmp_path / "s", dram="4MiB", dram_mode=mode) as store:
        pages = pages_of(store, sizes)
        assert store.wait_restored(20.0)
        stack = store._stack
        assert stack is not None and store._mover is not None
        stack.loaded(pages._entry, keys, np.arange(COUNT), None)
        assert store._mover.wait_idle(20.0)
        assert store._manager.counters["promotion_errors"] == 1
        assert store.stats().tiers[0].pages == COUNT - 1
        target = np.zeros_like(memory)
        assert load(pages, keys, target) == [True] * (COUNT - 1) + [False]
        assert (target[:-1] == memory[:-1]).all()


def test_what_was_not_authenticated_is_wiped(tmp_path: Path) -> None:
    """A forged page leaves zeros in the caller's memory: nothing of it, and no old plaintext."""
    memory, keys = random_pages(COUNT, 5000), run("a", COUNT)
    with open_encrypted(tmp_path / "s") as store:
        assert finish(pages_of(store, (5000,)).save(keys, memory)).all()
    page = stored_pages(tmp_path / "s")[2]
    flip(0)(page, 0)
    page.put()
    with open_encrypted(tmp_path / "s") as store:
        target = np.full_like(memory, 0x5A)
        assert load(pages_of(store, (5000,)), keys, target).count(False) == 1
        assert not target[2].any()


def test_with_verify_off_a_damaged_page_is_still_a_miss(tmp_path: Path) -> None:
    memory, keys = random_pages(COUNT, 5000), run("a", COUNT)
    with open_encrypted(tmp_path / "s") as store:
        assert finish(pages_of(store, (5000,)).save(keys, memory)).all()
    page = stored_pages(tmp_path / "s")[2]
    with open(tmp_path / "s" / "pool.tutti", "r+b") as pool:
        pool.seek(page.offset + 100)
        pool.write(bytes(8))
    with open_encrypted(tmp_path / "s", verify=False) as store:
        target = np.zeros_like(memory)
        got = load(pages_of(store, (5000,)), keys, target)
        assert got == [i != 2 for i in range(COUNT)]
        assert (target[got] == memory[got]).all()


# ---- that these tests notice ----
class _NoTag:
    """A decryptor that takes every tag."""

    def __init__(self, *arguments: bytes) -> None:
        self._inner = encryption.new_decryptor(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def finalize(self) -> bytes:
        return b""


@pytest.mark.parametrize("unit", [0, 1])
def test_a_cipher_that_ignores_tags_would_be_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: int
) -> None:
    monkeypatch.setattr(cipher_module, "new_decryptor", _NoTag)
    with pytest.raises(AssertionError, match="wrong bytes were loaded"):
        forge(tmp_path, (5000, 4096), unit, flip(0))


@pytest.mark.parametrize(("sizes", "moves"), SWAPS.values(), ids=SWAPS)
def test_a_cipher_that_ignores_names_would_be_noticed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, ...],
    moves: list[tuple[int, int, int, int]],
) -> None:
    monkeypatch.setattr(PageCipher, "_named", lambda self, name, unit, trailer: trailer)
    with pytest.raises(AssertionError, match="wrong bytes were loaded"):
        swap(tmp_path, sizes, moves)


def test_a_store_that_does_not_encrypt_would_be_noticed(tmp_path: Path) -> None:
    memory, keys = random_pages(COUNT, 5000), run("a", COUNT)
    with open_small(tmp_path / "s", segments=16, segment=128 << 10) as store:
        assert finish(pages_of(store, (5000,)).save(keys, memory)).all()
    with pytest.raises(AssertionError):
        assert_not_on_disk(tmp_path / "s", memory)


# ---- windows ----
@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of two pages, two of them."""
    monkeypatch.setattr(cipher_module, "WINDOW_BYTES", 16384)
    monkeypatch.setattr(cipher_module, "WINDOWS_BYTES", 32768)


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize("sizes", [(5000,), (100, 100)], ids=["whole", "parts"])
def test_a_save_passes_through_few_windows(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    memory, keys = random_pages(40, sum(sizes)), run("a", 40)
    with open_encrypted(tmp_path / "s") as store:
        pages = pages_of(store, sizes)
        tickets = [
            pages.save(keys.upto(i + 8), memory[i : i + 8], first=i) for i in range(0, 40, 8)
        ]
        assert all(finish(ticket).all() for ticket in tickets)
        windows = store._saver._windows
        assert windows._taken == 0 and len(windows._free) <= windows.count_max == 2
        target = np.zeros_like(memory)
        assert load(pages, keys, target) == [True] * 40 and (target == memory).all()


@pytest.mark.usefixtures("small_windows")
def test_windows_grow_to_the_size_of_a_page(tmp_path: Path) -> None:
    with open_encrypted(tmp_path / "s") as store:
        for size in (5000, 60000, 5000):
            memory, keys = random_pages(9, size), run(size, 9)
            pages = pages_of(store, (size,))
            assert finish(pages.save(keys, memory)).all()
            target = np.zeros_like(memory)
            assert load(pages, keys, target) == [True] * 9 and (target == memory).all()
        assert store._saver._windows.count_max == 2


@pytest.mark.usefixtures("small_windows")
def test_a_window_is_not_used_again_before_its_write_has_ended(tmp_path: Path) -> None:
    """Two writes are held back; the pages for which there is no window are refused in time."""
    config = encrypted_config(tmp_path / "s", io_timeout_s=0.5)
    devices = memory_devices(config)
    memory, keys = random_pages(8, 5000), run("a", 8)
    with PrefixStore.open(config, transport_object=devices) as store:
        pages = pages_of(store, (5000,))
        devices.hold()
        ticket = pages.save(keys, memory)
        poll(lambda: store._manager.counters["pages_refused_busy"] == 4, "a refusal")
        devices.release()
        stored = finish(ticket)
        assert stored.tolist() in ([True] * 4 + [False] * 4, [False] * 8)  # late, or given up
        poll(lambda: store._saver._windows._taken <= 2, "windows")
        assert finish(pages.save(keys, memory)).all()
        target = np.zeros_like(memory)
        assert load(pages, keys, target) == [True] * 8 and (target == memory).all()
        assert store._saver._windows._taken == 0


@pytest.mark.parametrize("sizes", [(5000,), (100, 5000)], ids=["whole", "parts"])
def test_writes_that_fail_cost_their_pages_only(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    config = encrypted_config(tmp_path / "s")
    devices = memory_devices(config)
    memory, keys = random_pages(8, sum(sizes)), run("a", 8)
    with PrefixStore.open(config, transport_object=devices) as store:
        pages = pages_of(store, sizes)
        devices.arm(Fault("error", "write", index=3))
        stored = finish(pages.save(keys, memory))
        assert np.count_nonzero(stored) == 7
        target = np.zeros_like(memory)
        got = load(pages, keys, target)
        assert got == stored.tolist() and (target[got] == memory[got]).all()
        devices.arm(Fault("flip", "read", count=FOREVER))
        assert not any(load(pages, keys, target))


def test_a_cancelled_save_publishes_nothing(tmp_path: Path) -> None:
    config = encrypted_config(tmp_path / "s")
    devices = memory_devices(config)
    memory, keys = random_pages(8, 5000), run("a", 8)
    with PrefixStore.open(config, transport_object=devices) as store:
        pages = pages_of(store, (5000,))
        with devices.held():
            ticket = pages.save(keys, memory)
            ticket.cancel()
        assert not finish(ticket).any()
        assert not pages.contains(keys).any()


def test_more_fragments_than_a_batch_holds_are_refused_by_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Headers, padding and trailers count too; the saving thread must not be what finds out."""
    for name in ("tutti_core.store", "tutti_core.io.transport"):
        monkeypatch.setattr(f"{name}.BATCH_FRAGMENTS_MAX", 20)
    keys = run("a", 6)
    with open_small(tmp_path / "plain", segments=16, segment=128 << 10) as store:
        pages = pages_of(store, (100, 100))
        with pytest.raises(ValueError, match="fragments"):
            pages.save(keys, random_pages(6, 200))  # 12, with headers and padding 30
        assert finish(pages.save(keys.upto(4), random_pages(4, 200))).all()
        assert not store._manager.counters["internal_errors"]
    with open_encrypted(tmp_path / "s") as store:
        pages = pages_of(store, (300,))
        memory = random_pages(6, 300)

        def cut(count: int) -> PageFragments:
            start = memory.ctypes.data + np.arange(count)[:, None] * 300 + np.arange(3) * 100
            lengths = np.full(3, 100, dtype=np.uint64)
            return PageFragments(start.astype(np.uint64), lengths, memory)

        assert finish(pages.save(keys, cut(6))).all()
        with pytest.raises(ValueError, match="fragments"):
            pages.load(keys, cut(6))  # 18, with trailers 24
        assert finish(pages.load(keys.upto(5), cut(5))).all()


# ---- options ----
def test_parts_in_memory_and_on_disk_mix_in_one_load(tmp_path: Path) -> None:
    sizes = (5000, 4096)
    memory, keys = random_pages(12, sum(sizes)), run("a", 12)
    with open_encrypted(tmp_path / "s") as store:
        assert finish(pages_of(store, sizes).save(keys, memory)).all()
    with open_encrypted(tmp_path / "s", dram="4MiB") as store:
        pages = pages_of(store, sizes)
        assert load(pages, keys.upto(5), np.zeros((5, sum(sizes)), dtype=np.uint8)) == [True] * 5
        assert store._mover is not None and store._mover.wait_idle(20.0)
        assert store.stats().tiers[0].pages == 5
        target = np.zeros_like(memory)
        assert load_in_parts(pages.load_parts(keys, target)).all() and (target == memory).all()


def test_the_key_file_may_be_named_in_a_settings_file(tmp_path: Path) -> None:
    file = key_file(tmp_path)
    settings = tmp_path / "store.toml"
    settings.write_text(
        f'path = "{tmp_path / "s"}"\ncapacity = "16MiB"\nencryption_key_file = "{file}"\n'
    )
    with PrefixStore.open(StoreConfig.load(settings)) as store:
        assert store._manager.layout.keyring is not None


assert saver.Windows is cipher_module.Windows  # what the fixture shrinks is what is used
