"""tiers/pools.py: what is refused, with a reason and without a trace, and what is created."""

import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash
from store_kit import MIB, SEGMENT, client, open_small, run, small_config, snapshot

from tutti_core import (
    ConfigError,
    CorruptionError,
    DeviceError,
    PrefixStore,
    TuttiError,
    UnsupportedError,
)
from tutti_core.format import DATA_OFFSET_BYTES, Superblock
from tutti_core.tiers import pools
from tutti_core.tiers.pools import discard_store


@pytest.fixture
def tmp_path(fast_path: Path) -> Path:
    """These tests create many stores; the disk is not what they test."""
    return fast_path


@pytest.fixture
def made(store_dir: Path) -> Path:
    """A store with 8 pages in it."""
    with open_small(store_dir) as store:
        assert all(client(store).save(run("made", 8)))
    return store_dir


def refused(kind: type[TuttiError], where: Path, said: str, **settings: Any) -> None:
    """Opening fails with `kind` and `said`, and changes nothing below `where`."""
    before = snapshot(where)
    with pytest.raises(kind, match=said):
        open_small(**settings)
    after = snapshot(where)
    for name in (n for n in list(after) if n.endswith("lock.mdb")):
        before.pop(name), after.pop(name)  # LMDB's table of readers; holds no data
    assert after == before


def patch(file: Path, offset: int, data: bytes) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        stream.write(data)


def reseal(file: Path, change: Callable[[bytearray], None]) -> None:
    """Change a superblock and make its check agree."""
    block = bytearray(file.read_bytes()[:4096])
    change(block)
    block[4088:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(block[:4088])))
    patch(file, 0, bytes(block))


def test_creation_makes_what_the_design_says(store_dir: Path) -> None:
    open_small(store_dir, segments=3).close()
    assert sorted(os.listdir(store_dir)) == ["catalog", "leases", "lock", "pool.tutti"]
    assert store_dir.stat().st_mode & 0o777 == 0o700
    pool = store_dir / "pool.tutti"
    assert pool.stat().st_size == DATA_OFFSET_BYTES + 3 * SEGMENT
    assert pool.stat().st_mode & 0o777 == 0o600
    block = Superblock.decode(pool.read_bytes()[:4096], "pool")
    assert (block.segment_count, block.segment_bytes, block.pool_count) == (3, SEGMENT, 1)
    assert block.store_id != block.secret != bytes(16)


def test_full_preallocation_takes_its_space_at_once(store_dir: Path) -> None:
    open_small(store_dir, segments=3, preallocate="full").close()
    size = (store_dir / "pool.tutti").stat()
    assert size.st_blocks * 512 >= size.st_size


def test_a_foreign_pool_file_is_refused(store_dir: Path) -> None:
    store_dir.mkdir()
    (store_dir / "pool.tutti").write_bytes(b"my precious data" * 1000)
    refused(
        ConfigError, store_dir, r"pool\.tutti is not a Tutti pool.*another path", path=store_dir
    )


@pytest.mark.parametrize("length", [0, 7, 8, 4095])
def test_a_pool_that_is_too_short_is_refused(made: Path, length: int) -> None:
    os.truncate(made / "pool.tutti", length)
    refused(ConfigError, made, r"pool\.tutti is not a Tutti pool", path=made)


def test_a_newer_format_is_refused(made: Path) -> None:
    reseal(made / "pool.tutti", lambda block: struct.pack_into("<I", block, 8, 99))
    refused(UnsupportedError, made, "format version 99.*reads versions 1, 2", path=made)


def test_unknown_flags_are_refused(made: Path) -> None:
    reseal(made / "pool.tutti", lambda block: struct.pack_into("<I", block, 12, 4))
    refused(UnsupportedError, made, "flags 4", path=made)


@pytest.mark.parametrize("offset", [16, 40, 56, 64, 2000, 4090])
def test_a_damaged_superblock_is_refused(made: Path, offset: int) -> None:
    data = (made / "pool.tutti").read_bytes()[offset]
    patch(made / "pool.tutti", offset, bytes([data ^ 1]))
    refused(CorruptionError, made, r"superblock of .*pool\.tutti is damaged.*discard", path=made)


def test_a_pool_that_is_gone_is_refused(made: Path) -> None:
    (made / "pool.tutti").unlink()
    refused(ConfigError, made, "pools of the store .* are gone.*discard", path=made)


def test_a_catalog_that_is_gone_is_refused(made: Path) -> None:
    for name in ("data.mdb", "lock.mdb"):
        (made / "catalog" / name).unlink()
    refused(ConfigError, made, "no catalog.*discard", path=made)


def test_a_pool_that_is_a_directory_or_a_link_is_refused(store_dir: Path) -> None:
    (store_dir / "pool.tutti").mkdir(parents=True)
    refused(ConfigError, store_dir, r"pool\.tutti", path=store_dir)
    (store_dir / "pool.tutti").rmdir()
    (store_dir.parent / "other").write_bytes(b"x" * 8192)
    (store_dir / "pool.tutti").symlink_to(store_dir.parent / "other")
    refused(ConfigError, store_dir.parent, r"symbolic link", path=store_dir)


@pytest.mark.parametrize("below", ["", "deep", "deep/deeper"])
def test_a_path_below_a_file_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("x")
    refused(ConfigError, tmp_path, "path = .*file", path=tmp_path / "file" / below)


def test_a_path_that_is_not_writable_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    refused(ConfigError, tmp_path, "not writable.*owner or mode", path=tmp_path / "store")


def test_a_pool_place_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    places = [tmp_path / "good", tmp_path / "file" / "p"]
    refused(ConfigError, tmp_path, "file", path=tmp_path / "s", pools=places)


def test_one_pool_named_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path)
    for places in ([tmp_path / "a"] * 2, [tmp_path / "a", tmp_path / "b" / "a"]):
        refused(ConfigError, tmp_path, "twice", path=tmp_path / "s", pools=places)


class TestSeveralPools:
    @pytest.fixture
    def places(self, tmp_path: Path) -> list[Path]:
        places = [tmp_path / name for name in "abc"]
        with open_small(tmp_path / "s", pools=places) as store:
            assert all(client(store).save(run("made", 8)))
        return places

    def test_they_can_be_opened_again(self, tmp_path: Path, places: list[Path]) -> None:
        with open_small(tmp_path / "s", pools=places) as store:
            assert client(store).match(run("made", 8)) == 8

    def test_another_order_is_refused(self, tmp_path: Path, places: list[Path]) -> None:
        refused(
            ConfigError,
            tmp_path,
            "another place in `pools`.*order",
            path=tmp_path / "s",
            pools=places[::-1],
        )

    def test_a_missing_one_is_refused_by_name(self, tmp_path: Path, places: list[Path]) -> None:
        (places[1] / "pool.tutti").unlink()
        refused(
            ConfigError, tmp_path, r"b/pool\.tutti.* missing", path=tmp_path / "s", pools=places
        )

    def test_fewer_or_more_are_refused(self, tmp_path: Path, places: list[Path]) -> None:
        fewer = {"path": tmp_path / "s", "pools": places[:2], "capacity": 64 * MIB}
        refused(ConfigError, tmp_path, "names 2 places; the store has 3", **fewer)
        more = {"path": tmp_path / "s", "pools": [*places, tmp_path / "d"]}
        refused(ConfigError, tmp_path, r"d/pool\.tutti.* missing", **more)

    def test_a_pool_of_another_store_is_refused(self, tmp_path: Path, places: list[Path]) -> None:
        others = [tmp_path / name for name in "xyz"]
        open_small(tmp_path / "t", pools=others).close()
        mixed = [places[0], others[1], places[2]]
        refused(ConfigError, tmp_path, "another store", path=tmp_path / "s", pools=mixed)
        refused(ConfigError, tmp_path, "another store", path=tmp_path / "t", pools=places)

    def test_pools_of_a_store_elsewhere_are_refused(self, tmp_path: Path, places) -> None:
        refused(ConfigError, tmp_path, "no catalog", path=tmp_path / "new", pools=places)


class TestAgreement:
    def test_another_segment_size_is_refused(self, made: Path) -> None:
        refused(
            ConfigError,
            made,
            f"segment = {2 * SEGMENT} .*created with {SEGMENT}.*leave",
            path=made,
            segment=2 * SEGMENT,
        )

    def test_a_catalog_smaller_than_the_one_on_disk_is_refused(self, made: Path) -> None:
        """Both would count as within the capacity, and together they would exceed it."""
        size = (made / "catalog" / "data.mdb").stat().st_size
        data = made / "catalog" / "data.mdb"
        os.truncate(data, 4 * MIB)  # what a fuller catalog looks like from outside
        with pytest.raises(ConfigError, match="catalog = 2097152 bytes is smaller"):
            open_small(made)
        os.truncate(data, size)
        open_small(made).close()

    def test_a_smaller_capacity_is_refused_with_one_that_works(self, made: Path) -> None:
        config = small_config(made)
        capacity = config.capacity - SEGMENT
        refused(ConfigError, made, f"capacity = {capacity}", path=made, capacity=capacity)
        with pytest.raises(ConfigError) as caught:
            open_small(made, capacity=capacity)
        need = int(caught.value.hint.split("at least ")[1].split(" ")[0])
        assert need == config.capacity
        open_small(made, capacity=need).close()

    def test_the_capacity_that_the_hint_names_works_with_default_sizes(self, store_dir) -> None:
        PrefixStore.open(store_dir, capacity="1GiB", transport="posix").close()
        with pytest.raises(ConfigError) as caught:
            PrefixStore.open(store_dir, capacity="512MiB", transport="posix")
        need = int(caught.value.hint.split("at least ")[1].split(" ")[0])
        PrefixStore.open(store_dir, capacity=need, transport="posix").close()

    def test_a_larger_capacity_grows_the_store_and_keeps_its_pages(self, made: Path) -> None:
        with open_small(made, segments=5) as store:
            pages = client(store)
            assert pages.match(run("made", 8)) == 8
            assert all(pages.save(run("more", 32)))
            assert pages.match(run("made", 8)) == 8
        block = Superblock.decode((made / "pool.tutti").read_bytes()[:4096], "pool")
        assert block.segment_count == 5

    def test_growth_that_a_crash_cut_short_is_finished(self, tmp_path: Path) -> None:
        places = [tmp_path / "a", tmp_path / "b"]
        open_small(tmp_path / "s", pools=places).close()
        block = Superblock.decode((places[0] / "pool.tutti").read_bytes()[:4096], "pool")
        patch(places[0] / "pool.tutti", 0, replace(block, segment_count=4).encode())
        with open_small(tmp_path / "s", pools=places, segments=4) as store:
            assert all(client(store).save(run("all", 64)))


class TestCreationFails:
    def test_no_pool_is_left_when_one_cannot_be_made(self, tmp_path: Path, monkeypatch) -> None:
        made: list[Path] = []
        original = pools._write_pool

        def fail_second(file: Path, *rest: Any) -> None:
            made.append(file)
            original(file, *rest)
            if len(made) == 2:
                raise OSError(28, "No space left on device")

        monkeypatch.setattr(pools, "_write_pool", fail_second)
        places = [tmp_path / "a", tmp_path / "b"]
        with pytest.raises(DeviceError, match="No space left"):
            open_small(tmp_path / "s", pools=places)
        assert [os.listdir(place) for place in places] == [[], []]
        monkeypatch.undo()
        open_small(tmp_path / "s", pools=places).close()

    def test_a_half_made_pool_does_not_stand_in_the_way(self, store_dir: Path) -> None:
        store_dir.mkdir()
        (store_dir / "pool.tutti.new").write_bytes(b"")  # killed while it was being written
        with open_small(store_dir) as store:
            assert all(client(store).save(run("made", 8)))
        assert not (store_dir / "pool.tutti.new").exists()

    def test_a_store_that_was_killed_before_its_catalog_was_claimed_works(
        self, store_dir: Path
    ) -> None:
        from tutti_core.index.catalog import Catalog

        open_small(store_dir).close()
        catalog = Catalog(store_dir / "catalog", 2 * MIB, False)
        with catalog._begin(write=True) as (txn, db):
            txn.delete(b"superblock", db=db.meta)
            for table in (db.records, db.slots):  # with pages it is damaged
                txn.drop(table, delete=False)
        catalog.close()
        open_small(store_dir).close()


class TestDiscard:
    def test_it_forgets_the_pages(self, made: Path) -> None:
        discard_store(small_config(made))
        with open_small(made) as store:
            assert client(store).match(run("made", 8)) == 0

    def test_a_pool_of_another_store_is_left_alone(self, made: Path, tmp_path: Path) -> None:
        others = tmp_path / "others"
        open_small(tmp_path / "s", pools=[others]).close()
        before = snapshot(tmp_path)
        with pytest.raises(ConfigError, match=r"another store.*left alone"):
            discard_store(small_config(made, pools=[others]))
        after = snapshot(tmp_path)
        for name in [n for n in after if n.endswith("lock.mdb")]:
            before.pop(name), after.pop(name)
        assert after == before

    def test_a_damaged_store_is_discarded(self, made: Path) -> None:
        patch(made / "pool.tutti", 100, b"x")
        patch(made / "catalog" / "data.mdb", 0, bytes(8192))
        discard_store(small_config(made))
        open_small(made).close()

    def test_an_open_store_is_not_discarded(self, made: Path) -> None:
        with open_small(made) as store:
            with pytest.raises(ConfigError, match="open in 1 process"):
                discard_store(small_config(made))
            assert client(store).match(run("made", 8)) == 8

    def test_a_file_that_is_not_ours_is_left_alone(self, made: Path) -> None:
        patch(made / "pool.tutti", 0, b"PRECIOUS")
        before = snapshot(made)
        with pytest.raises(ConfigError, match="left alone"):
            discard_store(small_config(made))
        assert snapshot(made) == before
