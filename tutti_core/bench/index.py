"""`tutti bench index`: key chains, matching, SGLang's exists, policy, memory, and reopening."""

from __future__ import annotations

import importlib
import json
import os
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tutti_core import hashing
from tutti_core.bench.agents import BRANCH_SHARE, agent_turns
from tutti_core.bench.child import CONFIG_FILE, NAMESPACE_FILE, PROBE_FILE
from tutti_core.bench.engines import storage_config
from tutti_core.bench.machine import file_system, machine_facts
from tutti_core.bench.measure import (
    MIB,
    BenchError,
    Progress,
    drop_cached,
    need_space,
    removed_afterwards,
    sync_filesystem,
    target,
)
from tutti_core.bench.policy import METHOD as POLICY_METHOD
from tutti_core.bench.policy import measure_policy
from tutti_core.config import StoreConfig
from tutti_core.errors import ConfigError
from tutti_core.format import ROOT_PARENT, SegmentEntry
from tutti_core.index.catalog import RECORD_KEY_BYTES, Catalog, NewPages
from tutti_core.keys import Namespace, PageKeys
from tutti_core.store import PrefixStore
from tutti_core.tiers.pools import Layout, catalog_folder, open_layout

PAGE_TOKENS = 64
PAGE_BYTES = 4096
SGLANG_KEY_BYTES = 32
CALLS_PER_ROUND = 30
FEW_BRANCHES_SHARE = 0.1
_PUBLISH_PAGES = 131_072
_SPIN_S = 0.3
_CHILD_TIMEOUT_S = 900.0

METHOD = (
    "chain_match: NamespaceStore.match of a uint32 token array (hashes the chain, then matches); "
    "match: the same with the keys at hand. All pages are stored. Medians of rounds, each the "
    f"median of {CALLS_PER_ROUND} calls; the measured calls take turns in each round.",
    "index_bytes_per_page: growth of a fresh process's resident memory while an index of 32-byte "
    "keys (SGLang's) and the slot map are filled with agent-like sessions, turn by turn, the way "
    "saves do. _16: with the standalone store's 16-byte keys. _few_branches: 160 pages a node; "
    "real agent traces have 450, the main figure about 36.",
    "reopen_first_answer: in a fresh process, from open() to the answer for one chain, with the "
    "catalog dropped from the page cache; reopen_warm_s is with it cached. Each answer is checked.",
    "gil_held_share: GIL time of one batch_exists over its elapsed time when alone; the least of "
    "the rounds, as everything that disturbs the method (see gil_held_s) adds to it.",
)


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """What to measure."""

    folder: Path
    chain_pages: int = 4096
    index_pages: int = 1_000_000
    rounds: int = 5

    def check(self) -> None:
        """Raise ConfigError where the plan cannot work; writes nothing."""
        for name in ("chain_pages", "index_pages", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least 1")
        if not self.folder.is_dir():
            raise ConfigError(f"dir = {str(self.folder)!r} is not a directory")
        need_space(self.folder, 700 * self.index_pages + 512 * MIB)


def run_index(plan: IndexPlan, progress: Progress = lambda line: None) -> dict[str, Any]:
    """Measure and return the report.

    Raises
        ConfigError: too little room or an impossible plan; nothing was written.
        BenchError: an answer was wrong, or a child process failed.
    """
    plan.check()
    report: dict[str, Any] = {
        "benchmark": "index",
        "machine": machine_facts(),
        "file_system": file_system(plan.folder),
        "chain_pages": plan.chain_pages,
        "index_pages": plan.index_pages,
        "rounds": plan.rounds,
        "method": [*METHOD, *POLICY_METHOD],
    }
    with removed_afterwards(plan.folder) as work:
        progress("saving the pages of one chain")
        report.update(_measure_calls(plan, work, progress))
        progress("replaying sessions through the policy")
        report.update(measure_policy())
        progress(f"weighing an index of {plan.index_pages} pages")
        report.update(_weigh(plan))
        report.update(_measure_reopen(plan, work, progress))
    report["targets"] = [
        target("chain_match_ms", report["chain_match_ms"], 1.0, False),
        target("match_us", report["match_us"], 100.0, False),
        target("batch_exists_ms", report["batch_exists_ms"], 1.5, False),
        target("batch_exists gil_held_share", report["gil_held_share"], 0.5, False),
        target("touch_us_per_page", report["touch_us_per_page"], 2.0, False),
        target("admit_us_per_page", report["admit_us_per_page"], 2.0, False),
        target("index_bytes_per_page", report["index_bytes_per_page"], 100.0, False),
        target("reopen_first_answer_s", report["reopen_first_answer_s"], 1.0, False),
    ]
    report["load_average_after"] = list(os.getloadavg())
    return report


def _weigh(plan: IndexPlan) -> dict[str, float]:
    result = {}
    for suffix, width, share in (
        ("", 32, BRANCH_SHARE),
        ("_16", 16, BRANCH_SHARE),
        ("_few_branches", 32, FEW_BRANCHES_SHARE),
    ):
        weighed = _child("memory", width, plan.index_pages, share)
        result[f"index_bytes_per_page{suffix}"] = round(weighed["bytes_per_page"], 1)
        result[f"index_pages_per_node{suffix}"] = round(weighed["pages_per_node"], 1)
    return result


# ---- calls ----
def _measure_calls(plan: IndexPlan, work: Path, progress: Progress) -> dict[str, Any]:
    count = plan.chain_pages
    random = np.random.Generator(np.random.SFC64(secrets.randbits(128)))
    tokens = random.integers(0, 150_000, count * PAGE_TOKENS).astype(np.uint32)
    config = StoreConfig.parse(
        {"path": work / "calls", "capacity": count * PAGE_BYTES + 64 * MIB, "segment": 4 * MIB}
    )
    with PrefixStore.open(config) as store:
        pages = store.namespace(model="bench", page_bytes=PAGE_BYTES, page_tokens=PAGE_TOKENS)
        memory = random.bytes(count * PAGE_BYTES)
        if not pages.save(tokens, memory).wait(60).all():
            raise BenchError("the pages of the chain could not be saved")
        keys, words = pages.keys(tokens), tokens.tolist()
        exists, close, via = _exists_call(plan, work, random, pages.match)
        calls: dict[str, Callable[[], int]] = {
            "chain_match": lambda: pages.match(tokens).pages,
            "chain_match_list": lambda: pages.match(words).pages,
            "match": lambda: pages.match(keys).pages,
            "batch_exists": exists,
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        held: dict[str, list[float]] = {name: [] for name in calls}
        try:
            for turn in range(plan.rounds):
                progress(f"round {turn + 1} of {plan.rounds}: timing calls")
                for name, call in calls.items():
                    times[name].append(_seconds_per_call(call, count))
                    held[name].append(gil_held_s(call))
        finally:
            close()
    median = {name: statistics.median(values) for name, values in times.items()}
    share = {n: min(1.0, min(held[n]) / median[n]) for n in calls}
    return {
        "chain_match_ms": round(median["chain_match"] * 1e3, 4),
        "chain_match_list_ms": round(median["chain_match_list"] * 1e3, 4),
        "match_us": round(median["match"] * 1e6, 2),
        "batch_exists_ms": round(median["batch_exists"] * 1e3, 4),
        "batch_exists_via": via,
        "gil_held_share": round(share["batch_exists"], 3),
        "gil_note": "batch_exists unpacks hex keys and compares memory; it never blocks, so all of "
        f"its {median['batch_exists'] * 1e3:.2f} ms hold the GIL, less than one switch interval "
        f"({sys.getswitchinterval() * 1e3:.0f} ms)",
        "gil_held_ms": {n: round(min(held[n]) * 1e3, 4) for n in calls},
        "gil_held_shares": {n: round(value, 3) for n, value in share.items()},
        "calls_raw_s": times,
    }


def _seconds_per_call(call: Callable[[], int], expected: int) -> float:
    seconds = []
    for _ in range(CALLS_PER_ROUND):
        start_s = time.perf_counter()
        answer = call()
        seconds.append(time.perf_counter() - start_s)
        if answer != expected:
            raise BenchError(f"a call answered {answer} pages instead of {expected}")
    return statistics.median(seconds)


def gil_held_s(call: Callable[[], object]) -> float:
    """Seconds for which one `call` keeps other Python threads from running.

    A second thread counts in a Python loop, which it can only do while it has the GIL. Its speed
    alone is known from a span in which this thread sleeps; what it falls short of that while this
    thread makes calls is the time that the calls held the GIL. Needs two idle CPUs: time lost to
    other processes looks like GIL time, so on a busy machine this is an upper bound.
    """
    count, stop = [0], threading.Event()

    def spin() -> None:
        while not stop.is_set():
            for _ in range(100):
                count[0] += 1

    thread = threading.Thread(target=spin, name="bench-spin", daemon=True)
    thread.start()
    try:
        began, start_s = count[0], time.perf_counter()
        time.sleep(_SPIN_S)
        rate = (count[0] - began) / (time.perf_counter() - start_s)
        calls, began, start_s = 0, count[0], time.perf_counter()
        while (elapsed_s := time.perf_counter() - start_s) < _SPIN_S:
            call()
            calls += 1
        return max(0.0, elapsed_s - (count[0] - began) / rate) / calls
    finally:
        stop.set()
        thread.join()


def _exists_call(
    plan: IndexPlan, work: Path, random: np.random.Generator, match: Callable[..., Any]
) -> tuple[Callable[[], int], Callable[[], None], str]:
    """The call to time, how to end, and what it is: SGLang's backend, or what it would call."""
    count = plan.chain_pages
    keys = [random.bytes(SGLANG_KEY_BYTES).hex() for _ in range(count)]
    try:
        backend = _backend(work / "backend", count)
    except ImportError as error:
        why = f"NamespaceStore.match(PageKeys.from_hex(keys)); no SGLang backend: {error}"
        config = StoreConfig.parse(
            {"path": work / "hex", "capacity": count * PAGE_BYTES + 64 * MIB, "segment": 4 * MIB}
        )
        store = PrefixStore.open(config)
        pages = store.namespace(
            model="bench", page_bytes=PAGE_BYTES, page_tokens=PAGE_TOKENS, key_bytes=32
        )
        pages.save(PageKeys.from_hex(keys), random.bytes(count * PAGE_BYTES)).wait(60)
        return lambda: pages.match(PageKeys.from_hex(keys)).pages, store.close, why
    torch: Any = importlib.import_module("torch")
    slots = torch.arange(count * PAGE_TOKENS)
    if not all(backend.batch_set_v1(keys, slots)):
        raise BenchError("the SGLang backend did not save all pages")
    return lambda: int(backend.batch_exists(keys)), backend.close, "TuttiStorage.batch_exists"


def _backend(folder: Path, page_count: int) -> Any:
    """SGLang's storage backend of Tutti with a small host pool. ImportError without SGLang."""
    torch: Any = importlib.import_module("torch")
    backend: Any = importlib.import_module("tutti_sglang.backend")
    config = storage_config(
        {
            "path": str(folder),
            "capacity": page_count * PAGE_BYTES + 64 * MIB,
            "segment": 4 * MIB,
            "interface_v1": 1,
            "tutti_prefix_keys": True,
        },
        is_mla_model=True,
    )
    made = backend.TuttiStorage(config, {})
    made.register_mem_pool_host(_HostPool(torch, page_count))
    made.on_host_pools_registered()
    return made


class _HostPool:
    """The part of SGLang's MLA host pool that a storage backend looks at, page-first."""

    layout = "page_first"
    page_size = PAGE_TOKENS
    start_layer, end_layer, layer_num = 0, 1, 1

    def __init__(self, torch: Any, page_count: int) -> None:
        self.page_num = page_count
        self.dtype = torch.uint8
        self.kv_buffer = torch.randint(0, 256, (page_count * PAGE_BYTES,), dtype=torch.uint8)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """Pointer and size of each page that `indices` names token by token."""
        pages = [int(i) // PAGE_TOKENS for i in indices[::PAGE_TOKENS]]
        base = self.kv_buffer.data_ptr()
        return [base + page * PAGE_BYTES for page in pages], [PAGE_BYTES] * len(pages)


# ---- reopening ----
def _measure_reopen(plan: IndexPlan, work: Path, progress: Progress) -> dict[str, Any]:
    folder = work / "reopen"
    folder.mkdir()
    progress(f"writing a catalog of {plan.index_pages} pages")
    start_s = time.perf_counter()
    fill_store(folder, plan.index_pages)
    sync_filesystem(folder)
    filled_s = time.perf_counter() - start_s
    data = catalog_folder(folder / "store") / "data.mdb"
    rounds: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    kept = 0.0
    for turn in range(plan.rounds):
        progress(f"round {turn + 1} of {plan.rounds}: reopening")
        kept = max(kept, drop_cached([data]))
        for name in ("cold", "warm"):
            rounds[name].append(reopened(folder))
    progress("reopening and restoring the index")
    restored = reopened(folder, "restore")
    median = {
        name: statistics.median(r["first_answer_s"] for r in part) for name, part in rounds.items()
    }
    return {
        "reopen_first_answer_s": round(median["cold"], 4),
        "reopen_warm_s": round(median["warm"], 4),
        "reopen_open_s": round(statistics.median(r["open_s"] for r in rounds["cold"]), 4),
        "reopen_probe_pages": restored["expected"],
        "reopen_cached_share_max": kept,
        "restored_s": round(restored["restored_s"], 3),
        "restored_bytes_per_page": round(restored["bytes_per_page"], 1),
        "restored_peak_bytes": restored["peak_bytes"],
        "catalog_bytes_per_page": round(data.stat().st_blocks * 512 / plan.index_pages, 1),
        "catalog_fill_s": round(filled_s, 2),
        "reopen_raw": rounds,
    }


def reopened(folder: Path, *options: str) -> dict[str, Any]:
    """Open the store of `fill_store` in a fresh process; with "restore", wait for its index.

    Raises
        BenchError: the process failed, or answered wrongly.
    """
    result = _child("reopen", folder, *options)
    for name in ("pages", "pages_restored"):
        if result.get(name, result["expected"]) != result["expected"]:
            raise BenchError(f"reopened: {result[name]} pages instead of {result['expected']}")
    return result


def fill_store(folder: Path, page_count: int) -> None:
    """Make a store in `folder`/store whose catalog has `page_count` records and no payload.

    Beside it go the files that the `reopen` child reads: settings, namespace, and one chain.
    """
    segment = 64 * MIB
    catalog_bytes = -(-(page_count * 640 + 64 * MIB) // MIB) * MIB
    segments = -(-page_count * PAGE_BYTES // segment) + 2
    settings = {
        "path": str(folder / "store"),
        "capacity": catalog_bytes + segments * segment + 2 * MIB,
        "segment": segment,
        "catalog": catalog_bytes,
        "durability": "none",
    }
    fields = {
        "model": "bench",
        "page_bytes": PAGE_BYTES,
        "page_tokens": PAGE_TOKENS,
        "key_bytes": SGLANG_KEY_BYTES,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(settings))
    (folder / NAMESPACE_FILE).write_text(json.dumps(fields))
    layout, catalog = open_layout(StoreConfig.parse(settings))
    try:
        namespace = Namespace(**fields)  # type: ignore[arg-type]
        catalog.register_namespace(namespace.digest(), namespace.canonical())
        probe = _publish_all(layout, catalog, namespace.digest(), page_count)
    finally:
        catalog.close()
    (folder / PROBE_FILE).write_bytes(probe)


def _publish_all(layout: Layout, catalog: Catalog, digest: bytes, page_count: int) -> bytes:
    """Publish agent-like chains; returns the longest one."""
    width, in_segment = SGLANG_KEY_BYTES, layout.segment_bytes // PAGE_BYTES
    for segment in range(-(-page_count // in_segment)):
        catalog.claim_segment([segment], SegmentEntry(0, 1), layout.segment_count)
    generator = np.random.Generator(np.random.SFC64(2))
    done, longest = 0, b""
    waiting: list[tuple[bytes, bytes, bytes]] = []
    for turn in agent_turns(generator, width, page_count):
        low = max(turn.first - 1, 0)
        records = hashing.record_keys(digest, turn.keys[low * width :], width)
        above = ROOT_PARENT if turn.first == 0 else b""
        parents = (above + records)[:-RECORD_KEY_BYTES]
        own = records[(turn.first - low) * RECORD_KEY_BYTES :]
        waiting.append((own, turn.keys[turn.first * width :], parents))
        longest = max(longest, turn.keys, key=len)
        count = sum(len(part) for part, _, _ in waiting) // RECORD_KEY_BYTES
        if count >= _PUBLISH_PAGES or done + count == page_count:
            index = np.arange(done, done + count, dtype=np.uint64)
            per = np.uint64(in_segment)
            catalog.publish(
                [
                    NewPages(
                        namespace=digest,
                        length_bytes=PAGE_BYTES,
                        key_width=width,
                        record_keys=b"".join(a for a, _, _ in waiting),
                        page_keys=b"".join(b for _, b, _ in waiting),
                        parents=b"".join(c for _, _, c in waiting),
                        slot=index // per << np.uint64(32) | index % per,
                        checksum=index,
                    )
                ]
            )
            done += count
            waiting = []
    return longest


def _child(*arguments: object) -> dict[str, Any]:
    """Run a part of this benchmark in a fresh interpreter."""
    command = [sys.executable, "-m", "tutti_core.bench.child", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise BenchError(f"{' '.join(map(str, arguments[:1]))} child failed: {last[0]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
