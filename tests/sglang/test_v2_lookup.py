"""Which prefix is usable: TuttiStorage against SGLang's own file backend on the same histories.

Both have the same host pools and see the same calls: pages of the main pool and of four pools
beside it are saved along branching chains, with holes; look-ups and loads must agree in everything.
Eviction is left out: there is room for all.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang_cpu.host_pools import make, page_bytes, page_count, slots
from thread_kit import beside
from v2_kit import attach, chain, prefix, register, storage_config

from tutti_sglang import lookup
from tutti_sglang.lookup import usable_prefix

CHAIN_PAGES = 9
HISTORIES = 80
STEPS = 25

POLICIES = {
    "indexer": PoolHitPolicy.ALL_PAGES,
    "draft": PoolHitPolicy.ALL_PAGES,
    "swa": PoolHitPolicy.TRAILING_PAGES,
    "mamba": PoolHitPolicy.TRAILING_PAGES,
}
WINDOWS = {"swa": (1, 2, 3), "mamba": (1,)}


class Pair:
    """The two backends, and the calls that both of them get."""

    def __init__(self, folder: Path, pools: dict[str, Any], **extra: Any) -> None:
        self.pools = pools
        self.tutti = attach(folder / "tutti", pools, extra=extra)
        self.file = HiCacheFile(storage_config(folder), str(folder / "file"))
        register(self.file, pools)

    def clear(self) -> None:
        self.tutti.clear()
        self.file.clear()

    def save_kv(self, branch: list[str], low: int, high: int) -> None:
        keys, kv = branch[low:high], self.pools["kv"]
        pages = self._write("kv", keys)
        assert all(self.tutti.batch_set_v1(keys, slots(kv, pages), prefix(branch[:low])))
        flat = [kv.get_data_page(page * kv.page_size) for page in pages]
        assert self.file.batch_set(keys, flat)

    def save(self, name: str, branch: list[str], low: int, high: int) -> None:
        pages = self._write(name, branch[low:high])
        calls = [
            backend.batch_set_v2(
                [self._transfer(name, branch[low:high], pages)], prefix(branch[:low])
            )
            for backend in (self.tutti, self.file)
        ]
        assert calls[0] == calls[1] == {name: [True] * (high - low)}

    def load(self, name: str, branch: list[str], low: int, high: int) -> str | None:
        """What differs between the answers, or between the bytes and what was saved."""
        pool, keys = self.pools[name], branch[low:high]
        pages = list(range(page_count(pool) - len(keys), page_count(pool)))
        answers, contents = [], []
        for backend in (self.tutti, self.file):
            for page in pages:
                pool.set_from_flat_data_page(page * pool.page_size, _blank(pool))
            asked = [self._transfer(name, keys, pages)]
            answers.append(backend.batch_get_v2(asked, prefix(branch[:low]))[name])
            contents.append([page_bytes(pool, page) for page in pages])
        if answers[0] != answers[1]:
            return f"load {name} {low}-{high}: {answers}"
        for key, ok, ours, theirs in zip(keys, answers[0], *contents, strict=True):
            if ok and not ours == theirs == _content(pool, name, key):
                return f"load {name} of {key[:8]}: other bytes"
        return None

    def look_up(self, branch: list[str], low: int, transfers: list[PoolTransfer]) -> str | None:
        """What differs between the answers to one look-up of the pages from `low` on."""
        asked = branch[low:]
        found = [
            backend.batch_exists_v2(asked, transfers, prefix(branch[:low] or None))
            for backend in (self.tutti, self.file)
        ]
        return None if found[0] == found[1] else f"exists from {low}: {found[0]} not {found[1]}"

    def _write(self, name: str, keys: list[str]) -> list[int]:
        """Put the pages of these keys into the host pool, the content following from the key."""
        pool, pages = self.pools[name], list(range(len(keys)))
        for page, key in zip(pages, keys, strict=True):
            data = torch.frombuffer(bytearray(_content(pool, name, key)), dtype=torch.uint8)
            pool.set_from_flat_data_page(page * pool.page_size, data.view(_blank(pool).dtype))
        return pages

    def _transfer(self, name: str, keys: list[str], pages: list[int]) -> PoolTransfer:
        return PoolTransfer(
            name=PoolName(name), keys=keys, host_indices=slots(self.pools[name], pages)
        )


def _blank(pool: Any) -> Any:
    return pool.get_dummy_flat_data_page()


def _content(pool: Any, name: str, key: str) -> bytes:
    blank = _blank(pool)
    size = blank.numel() * blank.element_size()
    return random.Random(name + key).randbytes(size)


@pytest.fixture(scope="module")
def pools() -> dict[str, Any]:
    return {
        "kv": make("mha", "page_first"),
        "indexer": make("index_k", "page_first"),
        "draft": make("mla", "page_first"),
        "swa": make("mha", "page_first"),
        "mamba": make("mamba", "page_first"),
    }


@pytest.fixture
def pair(store_folder: Path, pools: dict[str, Any]) -> Iterator[Pair]:
    both = Pair(store_folder, pools)
    yield both
    both.tutti.close()


def branches(seed: int) -> list[list[str]]:
    """Three chains that share their first pages."""
    trunk = chain(CHAIN_PAGES, f"{seed}")
    fork = 2 + seed % 4
    return [trunk, *(trunk[:fork] + chain(CHAIN_PAGES - fork, f"{seed}.{n}") for n in "xy")]


def transfers_of(dice: random.Random, branch: list[str]) -> list[PoolTransfer]:
    """Some of the pools, in any order, windows of any length."""
    names = dice.sample(sorted(POLICIES), dice.randint(0, len(POLICIES)))
    found = []
    for name in names:
        count = dice.choice(WINDOWS[name]) if name in WINDOWS else dice.choice([0, len(branch)])
        keys = branch[-count:] if count else None
        found.append(PoolTransfer(name=PoolName(name), keys=keys, hit_policy=POLICIES[name]))
    return found


def disagreement(pair: Pair, seed: int) -> str | None:
    """Run one random history; what the two backends first differ in, or None."""
    dice = random.Random(seed)
    sequences = branches(seed)
    for step in range(STEPS):
        branch = dice.choice(sequences)
        low = dice.randrange(CHAIN_PAGES)
        high = dice.randint(low + 1, CHAIN_PAGES)
        action = dice.choice(["kv", "kv", "pool", "pool", "pool", "load", "look", "look"])
        said = None
        if step == 0 or action == "kv":
            pair.save_kv(branch, 0 if dice.random() < 0.6 else low, high)
        elif action == "pool":
            name = dice.choice(sorted(POLICIES))
            start = 0 if dice.random() < 0.3 else low
            pair.save(name, branch, start, high)
        elif action == "load":
            said = pair.load(dice.choice(sorted(POLICIES)), branch, low, high)
        elif dice.random() < 0.04:
            pair.clear()
        else:
            start = dice.choice([0, 0, low])
            said = pair.look_up(branch, start, transfers_of(dice, branch[start:]))
        if said is not None:
            return f"history {seed}, step {step}: {said}"
    return None


@pytest.mark.parametrize("first", range(0, HISTORIES, 20))
def test_look_ups_equal_those_of_the_file_backend(first: int, pair: Pair) -> None:
    for seed in range(first, first + 20):
        assert disagreement(pair, seed) is None
    assert pair.tutti._failures == 0


def test_pages_in_a_memory_tier_count_as_well(store_folder: Path, pools: dict[str, Any]) -> None:
    pair = Pair(store_folder, pools, dram="8MiB", write_policy="write_back")
    for seed in range(15):
        assert disagreement(pair, seed) is None
    assert pair.tutti._failures == 0
    assert pair.tutti.store.stats().tiers[0].name == "dram"
    assert pair.tutti.store.stats().tiers[0].hits > 0
    pair.tutti.close()


def _as_if_all_pages(
    rule: Callable[..., list[int]],
) -> Callable[..., list[int]]:
    """Takes a window for the whole prefix."""

    def broken(kv_hit: int, pools: Any) -> list[int]:
        return rule(kv_hit, [type(p)(p.name, "all_pages", p.present) for p in pools])

    return broken


def _shorter_window(rule: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """Asks for a page less of each window."""

    def broken(kv_hit: int, pools: Any) -> list[int]:
        return rule(kv_hit, [type(p)(p.name, p.policy, p.present, p.trailing - 1) for p in pools])

    return broken


def _longest_only(rule: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """Names the longest prefix and leaves out the others."""
    return lambda kv_hit, pools: rule(kv_hit, pools)[-1:]


def _holes_unseen(rule: Callable[..., list[int]]) -> Callable[..., list[int]]:
    """Takes every page before the last stored one as stored."""

    def broken(kv_hit: int, pools: Any) -> list[int]:
        filled = [np.maximum.accumulate(p.present[::-1])[::-1] for p in pools]
        return rule(
            kv_hit,
            [type(p)(p.name, p.policy, f, p.trailing) for p, f in zip(pools, filled, strict=True)],
        )

    return broken


@pytest.mark.parametrize("fault", [_as_if_all_pages, _shorter_window, _longest_only, _holes_unseen])
def test_a_broken_rule_is_caught(
    fault: Callable[..., Any], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "restorable_lengths", fault(lookup.restorable_lengths))
    assert any(disagreement(pair, seed) is not None for seed in range(HISTORIES))


def test_a_lost_page_is_caught(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison sees a page that the store has lost, not only a rule that is wrong."""
    pool = pair.tutti._pools["swa"]
    honest = type(pool).contains

    def forgetful(self: Any, chain: Any, first: int) -> Any:
        found = honest(self, chain, first)
        if self is pool and len(found) > 1:
            found[1] = False
        return found

    monkeypatch.setattr(type(pool), "contains", forgetful)
    assert any(disagreement(pair, seed) is not None for seed in range(HISTORIES))


# ---- what the file backend cannot answer -------------------------------------------------------


def held(*pages: int, count: int = 12) -> Any:
    return np.isin(np.arange(count), pages)


@pytest.mark.parametrize(
    ("stored", "block", "group", "covered"),
    [
        (held(2, 3, 6, 7, 10, 11), 4, 2, 12),
        (held(2, 3, 6, 7, 11), 4, 2, 8),
        (held(3, 6, 7, 10, 11), 4, 2, 0),
        (held(*range(12)), 4, 4, 12),
        (held(*range(12)), 5, 1, 10),  # a block that is not complete is not covered
        (held(3, 7), 4, 1, 8),
        (held(*range(12)), 0, 1, 0),
        (held(*range(12)), 4, 0, 0),
        (held(*range(12)), 16, 1, 0),
    ],
)
def test_block_groups_report_what_they_cover_and_gate_nothing(
    stored: Any, block: int, group: int, covered: int
) -> None:
    blocks = PoolTransfer(
        name=PoolName.DEEPSEEK_V4_C128,
        hit_policy=PoolHitPolicy.BLOCK_GROUPS,
        block_pages=block,
        group_pages=group,
    )
    for kv_pages in (0, 5, 12):
        found = usable_prefix(12, kv_pages, [blocks], lambda name, n: stored[:n])
        reached = {"kv": kv_pages} if kv_pages else {}
        if covered:
            reached["deepseek_v4_c128"] = covered
        expected = PoolTransferResult(kv_pages, reached, list(range(1, kv_pages + 1)))
        assert found == expected


def test_nothing_is_asked_once_nothing_is_usable() -> None:
    asked = []

    def present(name: str, pages: int) -> Any:
        asked.append(name)
        return held(count=pages)

    transfers = [
        PoolTransfer(name=PoolName(name), keys=["k"], hit_policy=POLICIES[name])
        for name in ("swa", "indexer", "mamba")
    ]
    found = usable_prefix(5, 5, transfers, present)
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (0, {"kv": 5})
    assert asked == ["swa"]
    assert usable_prefix(5, 0, transfers, present) == PoolTransferResult(0, {}, [])
    assert asked == ["swa"]


def test_a_look_up_that_fails_is_a_miss(pair: Pair) -> None:
    branch = chain(3)
    pair.save_kv(branch, 0, 3)
    unknown = [PoolTransfer(name=PoolName.DRAFT_SWA, hit_policy=PoolHitPolicy.ALL_PAGES)]
    assert pair.tutti.batch_exists_v2(branch, unknown) == PoolTransferResult.empty()
    assert pair.tutti.batch_exists_v2(["zz"], []) == PoolTransferResult.empty()
    assert pair.tutti.batch_exists_v2([], []) == PoolTransferResult(0, {}, [])
    assert pair.tutti.batch_exists_v2(branch).kv_hit_pages == 3


def test_exists_get_and_set_at_once(pair: Pair) -> None:
    """SGLang's three threads on one object, with pools that are saved while they are read."""
    pools, storage = pair.pools, pair.tutti
    sequences = [chain(6, f"t{i}") for i in range(12)]
    stop, problems = threading.Event(), []

    def save(dice: random.Random) -> None:
        branch = dice.choice(sequences)
        kv, low = pools["kv"], dice.randrange(5)
        pages = pair._write("kv", branch[low:])
        if not all(storage.batch_set_v1(branch[low:], slots(kv, pages), prefix(branch[:low]))):
            problems.append("a page was not saved")
        for name in ("swa", "mamba"):
            pages = pair._write(name, branch[low:])
            moved = [pair._transfer(name, branch[low:], pages)]
            if not all(storage.batch_set_v2(moved, prefix(branch[:low]))[name]):
                problems.append("a page beside it was not saved")

    def look(dice: random.Random) -> None:
        branch = dice.choice(sequences)
        found = storage.batch_exists_v2(branch, transfers_of(dice, branch), prefix(None))
        if not 0 <= found.kv_hit_pages <= len(branch):
            problems.append(str(found))

    def load(dice: random.Random) -> None:
        branch, name = dice.choice(sequences), dice.choice(["swa", "mamba"])
        pool, low = pools[name], dice.randrange(5)
        pages = list(range(12 - len(branch[low:]), 12))  # the other end of the pool
        done = storage.batch_get_v2(
            [pair._transfer(name, branch[low:], pages)], prefix(branch[:low])
        )[name]
        for key, page, ok in zip(branch[low:], pages, done, strict=True):
            if ok and page_bytes(pool, page) != _content(pool, name, key):
                problems.append(f"{name} page {key[:8]} has other bytes")

    def repeat(call: Callable[[random.Random], None], seed: int) -> None:
        dice = random.Random(seed)
        while not stop.is_set() and not problems:
            call(dice)

    works = [partial(repeat, call, seed) for seed, call in enumerate((save, look, load))]
    with beside(*works, stop=stop.set):
        stop.wait(2.0)
    assert problems == [] and storage._failures == 0
    assert storage.store.stats().counters["loaded_pages"] > 0
