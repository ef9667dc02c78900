"""Every class of bytes on disk, damaged: refused clearly, or right or a miss; repaired exactly.

The trial is library code; here it runs its fixed part, must be able to fail, and each row of the
table of damage in docs/format.md has its smallest input.
"""

from __future__ import annotations

import faulthandler
import os
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import pytest

from tutti_core import ConfigError, CorruptionError, PrefixStore, TuttiError, repair, verify
from tutti_core.format import DATA_OFFSET_BYTES, SUPERBLOCK_BYTES
from tutti_core.index import tree_check
from tutti_core.index.catalog import DATABASES
from tutti_core.index.tree_check import Survey, check_tree
from tutti_core.index.tree_file import TreeFile
from tutti_core.repair import repair_store
from tutti_core.tiers import pools
from tutti_core.trials import Tally, corruption
from tutti_core.trials.corruption import NONE, Case, Made, all_cases, make, run_cases
from tutti_core.verify import verify_store

KINDS_MIN = 120


@pytest.fixture
def made(fast_path: Path) -> Made:
    return make(fast_path)


@pytest.fixture
def two(fast_path: Path) -> Made:
    return make(fast_path, pools=2)


def loadable(made: Made) -> int:
    """Open, load every page, all of which must be right; returns how many are there."""
    tally = Tally()
    missed = corruption._use(made, "the store", tally)
    tally.check()
    assert missed is not None, "the store is refused"
    return len(made.pages) - len(missed)


def refused(made: Made, error: type[TuttiError], match: str) -> None:
    """Opening says what is wrong and what helps, and changes nothing that counts."""
    before = made.data.read_bytes() if made.data.is_file() else b""
    with pytest.raises(error, match=match) as caught:
        PrefixStore.open(made.config).close()
    assert caught.value.hint, "no hint"
    assert (made.data.read_bytes() if made.data.is_file() else b"") == before


def page_of(made: Made, kind: int) -> int:
    """A page of LMDB's that is in use: 1 a branch, 2 a leaf."""
    with TreeFile(made.data) as source:
        survey = Survey(source, source.meta())
        survey.check(DATABASES)
        raw = made.data.read_bytes()
        return next(n for n in survey.pages_in_use() if raw[n * 4096 + 10] == kind)


def overwrite(file: Path, at: int, data: bytes) -> None:
    with file.open("r+b") as stream:
        stream.seek(at)
        stream.write(data)


# ---- the trial ----
def test_every_class_of_bytes_once(fast_path: Path) -> None:
    tally = corruption.run(fast_path, seed=1)
    tally.check()
    assert len(tally.bad_inputs) >= KINDS_MIN
    for start in ("superblock.", "catalog.superblock.", "record.", "slots.", "segments.", "meta."):
        assert any(kind.startswith(start) for kind in tally.bad_inputs), start
    for start in ("namespaces.", "lmdb.", "payload.", "part_header.", "file.", "mixed."):
        assert any(kind.startswith(start) for kind in tally.bad_inputs), start
    assert tally.pages_compared > 1000 and tally.misses > 100


def test_a_store_that_is_not_damaged_is_no_complaint(made: Made) -> None:
    run_cases(made, [(Case("nothing", lambda made, rng: NONE, hidden=True), 1)]).check()


# ---- the trial can fail ----
def one_byte(made: Made, rng: random.Random) -> frozenset[int]:
    page = made.pages[0]
    raw = made.pools[0].read_bytes()
    overwrite(made.pools[0], page.offset_bytes + 9, bytes([raw[page.offset_bytes + 9] ^ 4]))
    return frozenset([0])


def test_without_verify_a_flipped_byte_is_counted_as_wrong(fast_path: Path) -> None:
    made = make(fast_path, verify=False)
    tally = run_cases(made, [(Case("payload.byte", one_byte), 1)])
    assert tally.wrong_bytes > 0
    with pytest.raises(AssertionError, match="wrong bytes"):
        tally.check()


def test_a_repair_that_drops_a_good_page_is_noticed(made: Made, monkeypatch) -> None:
    drop = repair._drop

    def drop_too_much(folder: Path, layout: object, bad: verify.Bad, done: object) -> None:
        bad.records.add(made.pages[1].record_key)
        drop(folder, layout, bad, done)  # type: ignore[arg-type]

    monkeypatch.setattr(repair, "_drop", drop_too_much)
    tally = run_cases(made, [(Case("payload.byte", one_byte), 1)])
    assert tally.durable_pages_lost == 1
    assert "a repair dropped good pages" in tally.complaints[0]


def test_a_repair_that_leaves_damage_is_noticed(made: Made, monkeypatch) -> None:
    monkeypatch.setattr(repair, "_drop", lambda *_: None)
    tally = run_cases(made, [(Case("payload.byte", one_byte), 1)])
    assert any("not clean after a repair" in text for text in tally.complaints)


def test_a_verification_that_sees_nothing_is_noticed(made: Made, monkeypatch) -> None:
    monkeypatch.setattr(verify._Check, "_check_slots", lambda self: None)
    tally = run_cases(made, [(Case("payload.byte", one_byte), 1)])
    assert any("verify says that it is clean" in text for text in tally.complaints)


def test_without_the_check_of_its_tree_lmdb_ends_the_process(made: Made, monkeypatch) -> None:
    """Why `check_tree` is there: the same damage kills a child that opens the store anyway."""
    number = page_of(made, 2)

    def zero(made: Made, rng: random.Random) -> frozenset[int]:
        faulthandler.disable()  # this is in the child, and its end is expected
        overwrite(made.data, number * 4096, bytes(4096))
        return made.everything()

    case = Case("lmdb.page", zero)
    run_cases(made, [(case, 1)]).check()
    for module in (pools, __import__("tutti_core.raw_catalog", fromlist=["check_tree"])):
        monkeypatch.setattr(module, "check_tree", lambda *_: None)
    sizes = (0, 4096, 8192, len(made.files[made.data]) // 2)
    jobs = [(case, 1), *((Case("cut", cut_to(size)), 1) for size in sizes)]
    tally = run_cases(made, jobs)
    assert any("the process ended" in text for text in tally.complaints)


def cut_to(size: int) -> Callable[[Made, random.Random], frozenset[int]]:
    def apply(made: Made, rng: random.Random) -> frozenset[int]:
        os.truncate(made.data, size)
        return made.everything()

    return apply


def test_a_case_that_hangs_is_ended_and_counted(made: Made, monkeypatch) -> None:
    monkeypatch.setattr(corruption, "CASE_TIMEOUT_S", 0.5)

    def hang(made: Made, rng: random.Random) -> frozenset[int]:
        signal.pause()
        return NONE

    tally = run_cases(made, [(Case("hang", hang), 1), (Case("hang.again", hang), 1)])
    assert tally.bad_inputs == {"hang": 1, "hang.again": 1} and tally.complaint_count == 2


# ---- the table of docs/format.md ----
def test_the_table_of_damage_names_a_test_for_each_row() -> None:
    text = (Path(__file__).parents[2] / "docs" / "format.md").read_text()
    section = text[text.index("## Damage") :]
    named = set(re.findall(r"`(test_\w+)`", section))
    assert len(named) >= 15
    assert named <= globals().keys(), f"no such test: {named - globals().keys()}"


def test_row_superblock(two: Made) -> None:
    overwrite(two.pools[1], 20, b"\xff\x00\xff")
    refused(two, CorruptionError, "superblock of .* is damaged.*--repair")
    done = repair_store(two.path, two.config.pools)
    assert done.superblocks == 1 and done.pages_lost == 0
    assert verify_store(two.path, two.config.pools).clean and loadable(two) == len(two.pages)


def test_row_superblock_magic(made: Made) -> None:
    overwrite(made.pools[0], 0, b"X")
    refused(made, ConfigError, "not a Tutti pool")
    assert repair_store(made.path).superblocks == 1
    assert loadable(made) == len(made.pages)


def test_row_superblock_of_a_store_that_has_grown(made: Made) -> None:
    """The catalog's copy knows the size at creation only; the file's length says the rest."""
    larger = corruption.small_config(
        made.path, segments=20, segment=corruption.SEGMENT_BYTES, verify=True
    )
    made.config = larger
    PrefixStore.open(larger).close()
    overwrite(made.pools[0], 64, b"\0" * 8)
    refused(made, CorruptionError, "--repair")
    repair_store(made.path)
    with PrefixStore.open(larger) as store:
        assert store._manager.capacity_bytes == 20 * corruption.SEGMENT_BYTES


def test_row_no_copy_of_the_superblock(made: Made) -> None:
    noise = random.Random(1).randbytes(SUPERBLOCK_BYTES)
    overwrite(made.pools[0], 0, noise)
    refused(made, ConfigError, "not a Tutti pool")
    with pytest.raises(ConfigError, match="not a Tutti pool"):
        repair_store(made.path)
    assert made.pools[0].read_bytes()[:SUPERBLOCK_BYTES] == noise, "a foreign file was written to"
    made.pools[0].unlink()
    pools.discard_store(made.config)
    assert loadable(made) == 0


def test_row_catalog_tree(made: Made) -> None:
    number = page_of(made, 2)
    overwrite(made.data, number * 4096 + 10, b"\xff")
    refused(made, CorruptionError, f"page {number}, of .*, is damaged.*--repair")
    done = repair_store(made.path)
    assert done.rebuilt and "tree" in done.report.damage
    assert verify_store(made.path).clean
    assert loadable(made) == len(made.pages) - done.pages_lost


@pytest.mark.parametrize("name", ["slots", "segments", "main", "free"])
def test_row_catalog_pages_that_can_be_done_without(made: Made, name: str) -> None:
    """Only records and descriptions of namespaces are in one place."""
    overwrite(made.data, leaf_of(made, name) * 4096, b"\xff" * 4096)
    refused(made, CorruptionError, "--repair")
    done = repair_store(made.path)
    assert done.rebuilt and done.pages_lost == 0
    assert loadable(made) == len(made.pages)


def leaf_of(made: Made, name: str) -> int:
    with TreeFile(made.data) as source:
        meta = source.meta()
        survey = Survey(source, meta)
        if name in ("main", "free"):
            return int((meta.main if name == "main" else meta.free).root)
        return int(dict(survey._readable_trees(DATABASES))[name.encode()].root)


def test_row_catalog_key_order(made: Made) -> None:
    number = leaf_of(made, "segments")
    raw = made.data.read_bytes()[number * 4096 : (number + 1) * 4096]
    first, second = raw[16:18], raw[18:20]
    overwrite(made.data, number * 4096 + 16, second + first)
    refused(made, CorruptionError, "keys of segments are not in order")
    assert repair_store(made.path).pages_lost == 0
    assert loadable(made) == len(made.pages)


@pytest.mark.parametrize("which", [0, 1])
def test_row_one_meta_page(made: Made, which: int) -> None:
    overwrite(made.data, which * 4096, bytes(4096))
    refused(made, CorruptionError, f"meta page {which}")
    done = repair_store(made.path)
    assert done.rebuilt and verify_store(made.path).clean
    loadable(made)


def test_row_both_meta_pages(made: Made) -> None:
    overwrite(made.data, 0, bytes(8192))
    refused(made, CorruptionError, "--repair")
    assert repair_store(made.path).rebuilt
    assert loadable(made) == 0


@pytest.mark.parametrize("size", [0, 1, 4096, 8191, 8192, 20000])
def test_row_catalog_cut_short(made: Made, size: int) -> None:
    os.truncate(made.data, size)
    refused(made, CorruptionError, "--repair")
    repair_store(made.path)
    assert verify_store(made.path).clean
    loadable(made)


def test_row_catalog_missing(made: Made) -> None:
    made.data.unlink()
    refused(made, ConfigError, "no catalog.*--discard")
    with pytest.raises(ConfigError, match="tutti init"):
        repair_store(made.path)
    pools.discard_store(made.config)
    assert loadable(made) == 0


def test_row_record(made: Made) -> None:
    with corruption.databases(made) as (txn, db):
        key = made.pages[0].record_key
        raw = bytearray(txn.get(key, db=db["records"]))
        raw[70] ^= 1
        txn.put(key, bytes(raw), db=db["records"])
    assert verify_store(made.path).damage.keys() == {"record"}
    done = repair_store(made.path)
    assert done.pages_lost == 1 and done.lost[""].pages == 1
    assert loadable(made) == len(made.pages) - 1


def test_row_slot_entry(made: Made) -> None:
    page = made.pages[0]
    with corruption.databases(made) as (txn, db):
        txn.delete(corruption.slot_key(page.segment, page.slot), db=db["slots"])
    assert verify_store(made.path).damage.keys() == {"slot"}
    done = repair_store(made.path)
    assert done.pages_lost == 1 and loadable(made) == len(made.pages) - 1


def test_row_segment_entry(made: Made) -> None:
    page = made.pages[0]
    with corruption.databases(made) as (txn, db):
        txn.put(corruption.slot_key(page.segment, 0)[:4], b"short", db=db["segments"])
    refused(made, CorruptionError, "segment entry.*--repair")
    done = repair_store(made.path)
    assert done.segments == 1
    assert loadable(made) == len(made.pages) - done.pages_lost


def test_row_namespace(made: Made) -> None:
    """Whoever opens the namespace knows its description; without that its pages are dropped."""
    with corruption.databases(made) as (txn, db):
        digest = corruption._digest(made, txn, db, "small")
        txn.put(digest, b"{}", db=db["namespaces"])
    assert "namespace_entry" in verify_store(made.path).damage
    assert loadable(made) == len(made.pages)
    assert verify_store(made.path).clean


def test_row_sequence(made: Made) -> None:
    with corruption.databases(made) as (txn, db):
        txn.put(b"sequence", b"\xff" * 8, db=db["meta"])
    refused(made, CorruptionError, "sequence.*--repair")
    assert repair_store(made.path).pages_lost == 0
    assert loadable(made) == len(made.pages)


def test_row_catalog_superblock(made: Made) -> None:
    with corruption.databases(made) as (txn, db):
        txn.delete(b"superblock", db=db["meta"])
    refused(made, CorruptionError, "no superblock.*--repair")
    assert repair_store(made.path).superblocks == 1
    assert loadable(made) == len(made.pages)


def test_row_payload(made: Made) -> None:
    one_byte(made, random.Random(0))
    done = repair_store(made.path)
    assert done.report.damage.keys() == {"payload"} and done.pages_lost == 1
    (loss,) = done.lost.values()
    assert (loss.model, loss.pages, loss.payload_bytes) == ("small", 1, 4096)
    assert loadable(made) == len(made.pages) - 1


def test_row_pool_cut_short(made: Made) -> None:
    os.truncate(made.pools[0], DATA_OFFSET_BYTES + 4096)
    done = repair_store(made.path)
    assert done.pools_grown == 1 and 0 < done.pages_lost < len(made.pages)
    assert loadable(made) == len(made.pages) - done.pages_lost


def test_row_pool_missing(two: Made) -> None:
    two.pools[1].unlink()
    refused(two, ConfigError, "missing")
    pools.discard_store(two.config)
    assert loadable(two) == 0


def test_row_old_catalog(made: Made) -> None:
    """Of another time than the pool: what was overwritten since is a miss."""
    older = corruption._aged(made)
    made.put_back()
    made.data.write_bytes(older.files[older.data])
    repair_store(made.path)
    assert verify_store(made.path).clean
    loadable(made)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not read")
@pytest.mark.parametrize("call", [verify_store, repair_store, None])
def test_row_unreadable(made: Made, call: Callable[[Path], object] | None) -> None:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.seteuid(corruption.FOREIGN_USER)
            try:
                call(made.path) if call else PrefixStore.open(made.config).close()
            except TuttiError as error:
                status = 0 if error.hint or str(error) else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert loadable(made) == len(made.pages)


# ---- what a store does about it by itself ----
def edit_records(made: Made, edit: Callable[[bytes], bytes], *pages: int) -> None:
    with corruption.databases(made) as (txn, db):
        for i in pages:
            key = made.pages[i].record_key
            txn.put(key, edit(bytes(txn.get(key, db=db["records"]))), db=db["records"])


def test_an_operator_is_told_of_damaged_records(made: Made, caplog) -> None:
    edit_records(made, lambda raw: raw[:-1], 0, 10)
    with PrefixStore.open(made.config) as store:
        assert store.wait_restored(20)
        assert store.stats().counters["damaged_records"] == 2
    assert "2 records in the catalog are damaged" in caplog.text and "--repair" in caplog.text


def test_a_damaged_description_does_not_cost_the_others_their_order(made: Made, caplog) -> None:
    with corruption.databases(made) as (txn, db):
        txn.put(corruption._digest(made, txn, db, "small"), b"nonsense", db=db["namespaces"])
    with PrefixStore.open(made.config) as store:
        assert store.wait_restored(20)
        assert store.stats().counters["damaged_records"] == corruption.PAGES
        assert len(store._manager._entries) == len(made.namespaces) - 1
    assert "could not be restored" not in caplog.text


def test_pages_of_a_namespace_that_nothing_describes_do_not_stay_for_ever(made: Made) -> None:
    """Nobody would ever ask for them, and nothing could evict them."""
    with corruption.databases(made) as (txn, db):
        txn.delete(corruption._digest(made, txn, db, "small"), db=db["namespaces"])
    with PrefixStore.open(made.config) as store:
        assert store.wait_restored(20)
        pages = store.namespace(model="new", page_bytes=4096, page_tokens=1)
        for n in range(40):  # more than fits beside what is there
            pages.save(corruption.chain(("new", n)), bytes(4096)).wait(20)
        assert store.stats().counters["slots_reclaimed"] == corruption.PAGES


def test_a_segment_that_seems_cut_for_another_size_gives_no_wrong_page(made: Made) -> None:
    page = made.pages[0]
    with corruption.databases(made) as (txn, db):
        key = corruption.slot_key(page.segment, 0)[:4]
        entry = corruption.SegmentEntry.decode(txn.get(key, db=db["segments"]))
        other = corruption.SegmentEntry(entry.lease, entry.slot_blocks + 1)
        txn.put(key, other.encode(), db=db["segments"])
    made.config = made.config.model_copy(update={"verify": False})
    tally = Tally()
    for _ in range(2):
        corruption._use(made, "cut anew", tally)
    tally.check()
    assert tally.pages_compared > 0


def test_a_record_under_another_key_is_not_in_the_tree_twice(made: Made) -> None:
    with corruption.databases(made) as (txn, db):
        raw = txn.get(made.pages[0].record_key, db=db["records"])
        txn.put(b"k" * 16, raw, db=db["records"])
    assert loadable(made) == len(made.pages)
    with PrefixStore.open(made.config) as store:
        assert store.wait_restored(20)
        assert store.stats().counters["damaged_records"] == 1
        assert store.stats().pages == len(made.pages) + 1


# ---- the check of the tree ----
@pytest.fixture
def env(fast_path: Path) -> Iterator[lmdb.Environment]:
    opened = lmdb.open(str(fast_path), map_size=64 << 20, max_dbs=8)
    yield opened
    opened.close()


def test_trees_that_lmdb_made_are_sound(env: lmdb.Environment, fast_path: Path, rng) -> None:
    """Through splits, merges, long values and free lists, whatever LMDB leaves behind."""
    db = {name: env.open_db(name) for name in sorted(DATABASES)}
    kept: dict[bytes, set[bytes]] = {name: set() for name in db}
    for turn in range(60):
        with env.begin(write=True) as txn:
            for name, handle in db.items():
                for _ in range(rng.choice([1, 30, 400])):
                    if kept[name] and rng.random() < (0.35 if turn % 20 < 14 else 0.9):
                        key = rng.choice(sorted(kept[name])[:50])
                        kept[name].discard(key)
                        txn.delete(key, db=handle)
                    else:
                        key = rng.randbytes(rng.choice([4, 8, 16, 16, 40]))
                        kept[name].add(key)
                        txn.put(key, rng.randbytes(rng.choice([8, 16, 96, 96, 5000])), db=handle)
        check_tree(fast_path / "data.mdb", DATABASES)


def test_a_database_of_another_name_is_refused(env: lmdb.Environment, fast_path: Path) -> None:
    env.open_db(b"recordz")
    with pytest.raises(CorruptionError, match="none of ours"):
        check_tree(fast_path / "data.mdb", DATABASES)


def test_a_file_that_a_writer_changes_is_not_judged(made: Made, monkeypatch) -> None:
    """What looks damaged while somebody writes is what he is writing."""
    check, calls = Survey.check, []

    def changed(self: Survey, names: frozenset[bytes]) -> None:
        calls.append(1)
        with corruption.databases(made) as (txn, db):
            txn.put(b"clears", len(calls).to_bytes(8, "big"), db=db["meta"])
        raise tree_check.Flaw("in the middle of a change")

    monkeypatch.setattr(Survey, "check", changed)
    check_tree(made.data, DATABASES)
    assert len(calls) == tree_check._ATTEMPTS
    monkeypatch.setattr(Survey, "check", check)
    check_tree(made.data, DATABASES)


def test_a_store_that_is_open_elsewhere_is_not_checked_again(made: Made, monkeypatch) -> None:
    checks: list[Path] = []
    monkeypatch.setattr(pools, "check_tree", lambda file, names: checks.append(file))
    with PrefixStore.open(made.config) as store:
        PrefixStore.open(made.config).close()
        assert store.stats().pages == len(made.pages)
    assert checks == [made.data]


def test_what_was_cleared_does_not_come_back(made: Made) -> None:
    """A catalog that is made anew has no records from pages of LMDB's that are free."""
    with PrefixStore.open(made.config) as store:
        store.namespace(**made.namespaces[0]).clear()
    overwrite(made.data, leaf_of(made, "slots") * 4096, bytes(4096))
    assert repair_store(made.path).rebuilt
    with PrefixStore.open(made.config) as store:
        assert not store.namespace(**made.namespaces[0]).contains(made.keys[0]).any()
        assert store.namespace(**made.namespaces[1]).contains(made.keys[1]).all()


def test_a_rebuild_that_a_crash_cut_short_is_begun_again(made: Made, monkeypatch) -> None:
    overwrite(made.data, leaf_of(made, "slots") * 4096, bytes(4096))
    damaged = made.data.read_bytes()

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            repair_store(made.path)
    assert made.data.read_bytes() == damaged
    assert repair_store(made.path).pages_lost == 0
    assert {p.name for p in made.data.parent.iterdir()} <= {"data.mdb", "lock.mdb"}
    assert loadable(made) == len(made.pages)


def test_a_disk_that_is_full_leaves_the_damaged_catalog(made: Made, monkeypatch) -> None:
    overwrite(made.data, leaf_of(made, "slots") * 4096, bytes(4096))
    damaged = made.data.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        patch.setattr(os, "replace", full)
        with pytest.raises(TuttiError, match="No space left"):
            repair_store(made.path)
    assert made.data.read_bytes() == damaged


def test_every_kind_of_damage_has_a_name(made: Made, fast_path: Path) -> None:
    other = make(fast_path / "other")
    kinds = [case.kind for case in all_cases(made, other, other)]
    assert all(re.fullmatch(r"[a-z0-9_.]+", kind) for kind in kinds)
