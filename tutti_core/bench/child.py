"""Parts of `tutti bench index` that need a process of their own; prints one JSON object.

python -m tutti_core.bench.child memory WIDTH PAGES BRANCH_SHARE   resident memory of an index
python -m tutti_core.bench.child reopen FOLDER [restore]           first answer of a large store
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tutti_core.bench.agents import agent_turns
from tutti_core.config import StoreConfig
from tutti_core.index.pages import NamespacePages
from tutti_core.index.radix import Locations
from tutti_core.keys import PageKeys
from tutti_core.policies.choice import DEFAULT, make_policy
from tutti_core.store import PrefixStore
from tutti_core.tiers.space import Space

CONFIG_FILE = "store.json"
NAMESPACE_FILE = "namespace.json"
PROBE_FILE = "probe.keys"
_SEGMENT_BYTES = 64 << 20
_SLOT_BYTES = 4096


def memory(width: int, page_count: int, branch_share: float) -> dict[str, Any]:
    """Build the index and the slot map of `page_count` pages, as saves build them, and weigh them.

    Growth of the process's resident memory, so allocator slack and all Python objects count. Each
    page has one slot; slots of any size cost the same.
    """
    generator = np.random.Generator(np.random.SFC64(1))
    # Code paths and caches are warm before the first weighing.
    warm = NamespacePages(width, make_policy(DEFAULT, page_count))
    _fill(warm, Space(_SEGMENT_BYTES), generator, 1000, branch_share)
    before = _resident_bytes()
    pages = NamespacePages(width, make_policy(DEFAULT, page_count))
    space = Space(_SEGMENT_BYTES)
    _fill(pages, space, generator, page_count, branch_share)
    after = _resident_bytes()
    nodes = sum(1 for _ in pages.tree.nodes())
    assert pages.page_count == page_count
    return {
        "bytes_per_page": (after - before) / page_count,
        "nodes": nodes,
        "pages_per_node": page_count / nodes,
    }


def _fill(
    pages: NamespacePages,
    space: Space,
    generator: np.random.Generator,
    page_count: int,
    branch_share: float,
) -> None:
    now = 0
    for turn in agent_turns(generator, pages.tree.width, page_count, branch_share):
        count = len(turn.keys) // pages.tree.width - turn.first
        while space.free_count(_SLOT_BYTES) < count:
            space.add(len(space.segments), 0, _SLOT_BYTES)
        generation = np.arange(now + 1, now + 1 + count, dtype=np.uint64)
        slots = space.allocate(count, _SLOT_BYTES)
        space.commit(slots, generation)
        where = Locations(slots, generation, generation)
        pages.insert(turn.keys, turn.first, True, where, now + count)
        now += count


def _resident_bytes() -> int:
    """Resident memory of our own; mapped files, such as the catalog, belong to the page cache."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def reopen(folder: Path, restore: bool) -> dict[str, Any]:
    """Open a store and match a chain that it holds; time from `open` to the answer."""
    keys = (folder / PROBE_FILE).read_bytes()
    fields = json.loads((folder / NAMESPACE_FILE).read_text())
    chain = PageKeys(keys, fields["key_bytes"])
    before = _resident_bytes() if restore else 0
    start_s = time.perf_counter()
    store = PrefixStore.open(StoreConfig.load(folder / CONFIG_FILE))
    opened_s = time.perf_counter() - start_s
    pages = store.namespace(**fields)
    hit = pages.match(chain).pages
    answer_s = time.perf_counter() - start_s
    result: dict[str, Any] = {
        "pages": hit,
        "expected": len(chain),
        "open_s": opened_s,
        "first_answer_s": answer_s,
    }
    if restore:
        store.wait_restored(600)
        result["restored_s"] = time.perf_counter() - start_s
        count = store.stats().pages
        result["bytes_per_page"] = (_resident_bytes() - before) / count
        result["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        start_s = time.perf_counter()
        result["pages_restored"] = pages.match(chain).pages
        result["match_us"] = (time.perf_counter() - start_s) * 1e6
    store.close()
    return result


def main(arguments: list[str]) -> None:
    """Run one part."""
    if arguments[0] == "memory":
        result = memory(int(arguments[1]), int(arguments[2]), float(arguments[3]))
    else:
        result = reopen(Path(arguments[1]), arguments[2:] == ["restore"])
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
