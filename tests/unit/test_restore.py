"""index/restore.py: the index built from records is the index that the saves built."""

import numpy as np
import pytest

from tutti_core.format import RECORD, ROOT_PARENT, UNKNOWN_PARENT
from tutti_core.index.radix import NO_SLOT
from tutti_core.index.restore import build_pages

WIDTH = 16


def key_of(text: str) -> bytes:
    """Key of the last page of a chain."""
    return text.encode().ljust(WIDTH, b".")


def record_key(text: str) -> bytes:
    return bytes(255 - b for b in key_of(text))  # another order than that of the chains


def build(*pages: tuple[str, bytes | None]):
    """Index of pages (chain, parent or None for the page before)."""
    records = np.zeros(len(pages), RECORD)
    for i, (text, parent) in enumerate(pages):
        if parent is None:
            parent = record_key(text[:-1]) if len(text) > 1 else ROOT_PARENT
        records[i]["page_key"] = np.void(key_of(text).ljust(32, b"\0"))
        records[i]["parent"] = np.void(parent)
        records[i]["slot"] = i
        records[i]["checksum"] = 100 + i
        records[i]["generation"] = i + 1
    order = sorted(range(len(pages)), key=lambda i: record_key(pages[i][0]))
    keys = b"".join(record_key(pages[i][0]) for i in order)
    restored = build_pages(WIDTH, keys, records[order])
    restored.tree.check()
    return restored


def chain(text: str) -> bytes:
    return b"".join(key_of(text[: i + 1]) for i in range(len(text)))


def test_no_records_give_an_empty_index() -> None:
    assert build_pages(WIDTH, b"", np.zeros(0, RECORD)).page_count == 0


def test_a_run_becomes_one_edge() -> None:
    pages = build(("a", None), ("ab", None), ("abc", None))
    assert pages.match(chain("abcd"), 0, 99) == 3
    assert sum(1 for _ in pages.tree.nodes()) == 1 and not pages.loose
    found = pages.locate(chain("abc"), 0, True, 99)
    assert found.slot.tolist() == [0, 1, 2] and found.checksum.tolist() == [100, 101, 102]


def test_branches_and_several_first_pages() -> None:
    pages = build(("a", None), ("ab", None), ("ac", None), ("acd", None), ("x", None))
    for text in ("ab", "acd", "x"):
        assert pages.match(chain(text), 0, 99) == len(text)
    assert pages.page_count == 5 and not pages.loose


@pytest.mark.parametrize("missing", ["unknown", "gone"])
def test_pages_without_their_ancestors_are_loose(missing: str) -> None:
    parent = UNKNOWN_PARENT if missing == "unknown" else None
    pages = build(("bc", parent), ("bcd", None), ("a", None))
    assert pages.page_count == 3 and set(pages.loose) == {key_of("bc"), key_of("bcd")}
    assert pages.locate(chain("bcd"), 0, False, 99).slot.tolist() == [NO_SLOT, 0, 1]


def test_a_ring_of_parents_is_loose_and_does_not_hang() -> None:
    pages = build(("ab", record_key("ac")), ("ac", record_key("ab")), ("z", record_key("z")))
    assert len(pages.loose) == 3 and pages.tree.page_count == 0


def test_older_pages_are_evicted_first() -> None:
    pages = build(("x", None), ("a", None), ("ab", None), ("y", UNKNOWN_PARENT))
    slots = []
    while (victim := pages.victim(1, 10**6)) is not None:
        pages.forget(victim, 10**6)
        slots += victim.slot.tolist()
    assert slots == [0, 2, 1, 3]
