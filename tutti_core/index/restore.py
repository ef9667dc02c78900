"""Builds the in-memory index of a namespace from its records, in one pass over arrays.

Pure. A million records take seconds, so this runs in the background; meanwhile look-ups fall
through to the catalog.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tutti_core.format import ROOT_PARENT
from tutti_core.index.catalog import RECORD_KEY_BYTES, Records, page_keys_of, slots_of_records
from tutti_core.index.pages import LoosePage, NamespacePages
from tutti_core.index.radix import NO_SLOT, Locations
from tutti_core.policies.base import Policy

Indices = npt.NDArray[np.int64]

_ROOT = -1
_UNKNOWN = -2


def build_pages(
    width: int, record_keys: bytes, records: Records, policy: Policy | None = None
) -> NamespacePages:
    """Return the index of one namespace.

    Parameters
        record_keys: packed keys of the records, in rising order, as the catalog yields them.
    Pages whose chain does not reach a first page become loose. A page's generation serves as its
    last use, so that older pages are evicted first.
    Cost       O(n log n) array work, and one step of Python per page to follow the runs.
    """
    pages = NamespacePages(width, policy)
    placed = slots_of_records(records) != NO_SLOT
    if not placed.all():  # the last slot of the last segment there can be: no store has it
        chosen = np.frombuffer(record_keys, dtype=f"V{RECORD_KEY_BYTES}")[placed]
        record_keys, records = chosen.tobytes(), records[placed]
    if len(records) == 0:
        return pages
    parent = _parents(record_keys, records)
    children = np.bincount(parent[parent >= 0], minlength=len(records))
    # A page continues its parent's run when it is the only child.
    continues = (parent >= 0) & (children[np.maximum(parent, 0)] == 1)
    following = np.full(len(records), -1, dtype=np.int64)
    following[parent[continues]] = np.flatnonzero(continues)
    heads: dict[int, list[int]] = {}
    for head in np.flatnonzero(~continues).tolist():
        heads.setdefault(int(parent[head]), []).append(head)

    locations = Locations(
        slots_of_records(records),
        records["checksum"].astype(np.uint64),
        records["generation"].astype(np.uint64),
    )
    keys = page_keys_of(records, width)
    reached = np.zeros(len(records), dtype=np.bool_)
    stack = [(pages.tree.root, head) for head in heads.get(_ROOT, [])]
    while stack:
        above, head = stack.pop()
        run = _run(following, head)
        reached[run] = True
        where = Locations(locations.slot[run], locations.checksum[run], locations.generation[run])
        node = pages.tree.grow(above, keys[run].tobytes(), where, int(where.generation.max()))
        stack.extend((node, child) for child in heads.get(int(run[-1]), []))
    _add_loose(pages, keys, locations, np.flatnonzero(~reached))
    return pages


def _parents(record_keys: bytes, records: Records) -> Indices:
    """Index of each record's parent, _ROOT for a first page, _UNKNOWN where there is none."""
    own = np.frombuffer(record_keys, dtype=f"V{RECORD_KEY_BYTES}")
    wanted = np.ascontiguousarray(records["parent"])
    # The upper half of a record key sorts like the whole; equal halves are compared in full below.
    own_half = own.view(">u8")[::2].astype(np.uint64)
    wanted_half = wanted.view(">u8")[::2].astype(np.uint64)
    at = np.minimum(np.searchsorted(own_half, wanted_half), len(own) - 1)
    parent = np.where(own[at] == wanted, at, _UNKNOWN)
    parent[wanted == np.frombuffer(ROOT_PARENT, dtype=wanted.dtype)[0]] = _ROOT
    return parent.astype(np.int64)


def _run(following: Indices, head: int) -> Indices:
    run = []
    while head >= 0:
        run.append(head)
        head = int(following[head])
    return np.array(run, dtype=np.int64)


def _add_loose(
    pages: NamespacePages, keys: npt.NDArray[np.uint8], where: Locations, left: Indices
) -> None:
    for i in left[np.argsort(where.generation[left])]:
        generation = int(where.generation[i])
        pages.loose[keys[i].tobytes()] = LoosePage(
            int(where.slot[i]), int(where.checksum[i]), generation, generation
        )
