"""What fuzzing and senseless calls have found, each with its smallest input.

Inputs of decoders are files in `corpus`; here is what takes more than an input to show.
"""

from __future__ import annotations

import json
from pathlib import Path

import lmdb
import numpy as np
import pytest

from tutti_core import (
    ConfigError,
    Namespace,
    PageKeys,
    PrefixStore,
    StoreConfig,
    as_memory,
)
from tutti_core.testing import Oracle
from tutti_core.tiers.pools import catalog_folder
from tutti_core.trials.kit import PAGE, chain, client, quiesce, small_config

NAMED = {"model": "m", "page_bytes": PAGE, "page_tokens": 1}


@pytest.mark.parametrize(
    "fields",
    [
        {"model": 1},
        {"page_bytes": 1.5},
        {"page_tokens": True},
        {"weights": None},
        {"dtype": b"fp8"},
        {"layout": "\ud800"},
        {"extra": {"a": 1}},
        {"extra": None},
        {"parts": "ab"},
        {"parts": [PAGE / 2, PAGE / 2]},
    ],
    ids=str,
)
def test_what_only_looks_like_a_field_of_a_namespace_is_refused(fields) -> None:
    """Each gave a digest of its own, or a TypeError out of `open`."""
    with pytest.raises(ConfigError, match=next(iter(fields))):
        Namespace(**{**NAMED, **fields})


def test_a_namespace_is_not_changed_from_outside() -> None:
    extra = {"a": "1"}
    namespace = Namespace(**NAMED, extra=extra, parts=[np.int64(96), PAGE - 96])
    before = namespace.digest()
    extra["a"] = "2"
    assert namespace.digest() == before and namespace.parts == (96, PAGE - 96)
    assert json.loads(namespace.canonical())["page_bytes"] == PAGE


def test_a_number_is_not_memory() -> None:
    """NumPy makes an array of a scalar that is gone by the time the pointer is used."""
    with pytest.raises(TypeError, match="number, not memory"):
        as_memory(np.int64(5))


def test_memory_of_an_array_interface_is_kept() -> None:
    class Passing:
        def __init__(self) -> None:
            self.array = np.arange(100, dtype=np.uint8)
            self.__array_interface__ = self.array.__array_interface__

    assert isinstance(as_memory(Passing()).owner, np.ndarray)


def test_counts_below_zero_are_refused(tmp_path: Path) -> None:
    """A count of -1 was a slice: all pages but the last."""
    with PrefixStore.open(small_config(tmp_path / "s")) as store:
        pages = client(store)
        keys = chain(*"abc")
        pages.save(keys)
        for call in (
            lambda: pages.pages.load(keys, bytearray(3 * PAGE), 0, -1),
            lambda: pages.pages.hold(keys, 0, -1),
            lambda: pages.pages.unpin(keys, -1),
        ):
            with pytest.raises(ValueError, match="= -1 is not a count"):
                call()


def test_pages_of_one_load_have_places_of_their_own(tmp_path: Path) -> None:
    """Both were reported right, with the bytes of one of them."""
    with PrefixStore.open(small_config(tmp_path / "s")) as store:
        pages = client(store)
        keys = chain(*"ab")
        pages.save(keys)
        with pytest.raises(ValueError, match="same slot"):
            pages.pages.load(keys, bytearray(2 * PAGE), slots=[1, 1])


def test_a_part_that_is_finished_too_early_costs_no_page(tmp_path: Path) -> None:
    """Its page passed for damaged, and was dropped from the store."""
    with PrefixStore.open(small_config(tmp_path / "s")) as store:
        pages = client(store, parts=(96, 4000))
        keys = chain(*"ab")
        assert pages.save(keys) == [True, True]
        load = pages.pages.load_parts(keys, bytearray(2 * PAGE))
        early = load.start(1)
        assert not load.finish(early, 20).any()
        assert not load.finish(load.start(0), 20).any()
        load.end()
        assert pages.load(keys) == [True, True]
        assert not store.stats().counters.get("checksum_errors", 0)


def test_a_reading_belongs_to_its_load(tmp_path: Path) -> None:
    with PrefixStore.open(small_config(tmp_path / "s")) as store:
        pages = client(store, parts=(96, 4000))
        keys = chain("a")
        pages.save(keys)
        one, two = (pages.pages.load_parts(keys, bytearray(PAGE)) for _ in range(2))
        reading = one.start(0)
        with pytest.raises(ValueError, match="not a reading of this load"):
            two.finish(reading, 1)
        one.finish(reading, 20)
        one.end()
        two.end()


@pytest.mark.parametrize("timeout_s", [float("nan"), "1", None, True])
def test_what_is_no_time_is_refused(tmp_path: Path, timeout_s: object) -> None:
    with PrefixStore.open(small_config(tmp_path / "s")) as store:
        with pytest.raises(ValueError, match="not a number of seconds"):
            store.flush(timeout_s)  # type: ignore[arg-type]


def test_a_wait_without_end_ends(tmp_path: Path) -> None:
    """Infinity and 2**70 raised OverflowError out of the lock below."""
    with PrefixStore.open(small_config(tmp_path / "s", dram=8 * PAGE)) as store:
        pages = client(store)
        for timeout_s in (float("inf"), 2**70):
            assert store.flush(timeout_s) and store.wait_restored(timeout_s)
            pages.save(chain("a"))
            assert pages.pages.load(chain("a"), bytearray(PAGE)).wait(timeout_s).all()
        assert pages.pages.clear(float("inf")) == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"path": ""}, "names no place"),
        ({"path": "a\0b"}, "name of a file"),
        ({"path": "\ud800"}, "name of a file"),
        ({"pools": ["", "b"]}, "names no place"),
        ({"queue_depth": True}, "queue_depth = True"),
        ({"backlog": np.True_}, "backlog"),
    ],
    ids=str,
)
def test_settings_that_pass_for_others_are_refused(settings, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        StoreConfig.parse({"path": "/x", "capacity": 1 << 30, **settings})


def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long"):
        PrefixStore.open(tmp_path / ("a" * 300), capacity=1 << 26)


def test_settings_made_without_parse_are_checked_too(tmp_path: Path) -> None:
    config = StoreConfig(path=tmp_path / "s", capacity=1 << 26, bounce=4096)
    with pytest.raises(ConfigError, match="bounce"):
        PrefixStore.open(config)
    assert not (tmp_path / "s").exists()


def test_one_damaged_description_does_not_cost_the_index_of_others(tmp_path: Path) -> None:
    """The restore of all namespaces ended with the first whose JSON could not be read."""
    config = small_config(tmp_path / "s")
    with PrefixStore.open(config) as store:
        for model in ("a", "b"):
            client(store, model=model).save(chain(*"ab"))
        digests = [Namespace(**{**NAMED, "model": model}).digest() for model in ("a", "b")]
    first = min(digests)
    with lmdb.open(str(catalog_folder(config.path)), max_dbs=8) as env:
        with env.begin(write=True) as txn:
            txn.put(first, b"[" * 5000, db=env.open_db(b"namespaces", txn))
    with PrefixStore.open(config) as store:
        assert store.wait_restored(20)
        known = {
            digest: entry.pages.page_count for digest, entry in store._manager._entries.items()
        }
        assert known == {max(digests): 2}


def test_clearing_counts_each_page_once(tmp_path: Path) -> None:
    """What another writer had saved was counted in memory and in the catalog."""
    config = small_config(
        tmp_path / "s", segments=4, dram=32 * PAGE, write_policy="write_back", huge_pages=False
    )
    oracle = Oracle()
    with PrefixStore.open(config) as store:
        pages = client(store, oracle)
        with PrefixStore.open(config) as other:
            assert all(client(other, oracle).save(chain(*"abcde")))
        assert all(pages.load(chain(*"abcde")))
        quiesce(store)
        assert all(pages.load(PageKeys(chain(*"abcde").part(2, 5), 16, rooted=False)))
        quiesce(store)
        assert pages.pages.clear() == 5
