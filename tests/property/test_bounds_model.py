"""The bounds against brute force: every content that a cache could choose, on tiny trees."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti_core.replay.bounds import NextUses, clairvoyant, unlimited
from tutti_core.replay.trace import Trace, offsets_of

Path = tuple[int, ...]


def trace_of(paths: list[Path]) -> Trace:
    count = len(paths)
    lengths = np.array([len(path) for path in paths], dtype=np.int64)
    ids = np.array([node for path in paths for node in path], dtype=np.uint64)
    times = np.arange(count, dtype=np.int64)
    return Trace("tree", 1, times, lengths, times, offsets_of(lengths), ids)


@st.composite
def requests(draw: st.DrawFn, nodes_max: int = 6, requests_max: int = 7) -> list[Path]:
    """Paths from the root of a random tree; node i hangs below an earlier one, or is a root."""
    count = draw(st.integers(1, nodes_max))
    parents = [draw(st.integers(-1, i - 1)) for i in range(count)]
    paths: list[Path] = []
    for node in draw(st.lists(st.integers(-1, count - 1), min_size=1, max_size=requests_max)):
        path: list[int] = []
        while node >= 0:
            path.append(node + 1)
            node = parents[node]
        paths.append(tuple(reversed(path)))
    return paths


def leading_run(content: frozenset[int], path: Path) -> int:
    run = 0
    while run < len(path) and path[run] in content:
        run += 1
    return run


def subsets(pages: frozenset[int], capacity: int) -> list[frozenset[int]]:
    return [
        frozenset(chosen)
        for size in range(min(capacity, len(pages)) + 1)
        for chosen in combinations(sorted(pages), size)
    ]


def best_by_request(paths: list[Path], capacity: int) -> int:
    """The most leading-run hits, over all choices of what to keep after each request."""
    reached = {frozenset[int](): 0}
    for path in paths:
        following: dict[frozenset[int], int] = {}
        for content, hits in reached.items():
            total = hits + leading_run(content, path)
            for kept in subsets(content | frozenset(path), capacity):
                following[kept] = max(following.get(kept, 0), total)
        reached = following
    return max(reached.values())


def best_by_reference(paths: list[Path], capacity: int, bypass: bool) -> int:
    """The most hits of single pages, over all choices of what to keep after each reference."""
    reached = {frozenset[int](): 0}
    for page in (page for path in paths for page in path):
        following: dict[frozenset[int], int] = {}
        for content, hits in reached.items():
            total = hits + (page in content)
            for kept in subsets(content | {page}, capacity):
                if bypass or page in kept:
                    following[kept] = max(following.get(kept, 0), total)
        reached = following
    return max(reached.values())


@settings(max_examples=150, deadline=None)
@given(requests(), st.integers(1, 4))
def test_no_choice_beats_the_clairvoyant_cache(paths: list[Path], capacity: int) -> None:
    hits = int(clairvoyant(trace_of(paths), capacity).sum())
    assert hits == best_by_request(paths, capacity)
    assert hits == best_by_reference(paths, capacity, bypass=True)
    assert hits >= best_by_reference(paths, capacity, bypass=False)


@settings(max_examples=200, deadline=None)
@given(requests(nodes_max=12, requests_max=20), st.integers(1, 14))
def test_counts_are_those_of_a_cache_of_pages(paths: list[Path], capacity: int) -> None:
    """The definition, page by page: keep the nearest next uses, the shallowest among equals."""
    content: frozenset[int] = frozenset()
    expected = []
    for i, path in enumerate(paths):
        expected.append(leading_run(content, path))
        depth = {page: d for each in paths for d, page in enumerate(each)}
        next_use = {
            page: next((j for j in range(i + 1, len(paths)) if page in paths[j]), None)
            for page in content | set(path)
        }
        useful = [(use, depth[page], page) for page, use in next_use.items() if use is not None]
        content = frozenset(page for *_, page in sorted(useful)[:capacity])
    assert clairvoyant(trace_of(paths), capacity).tolist() == expected


@settings(max_examples=200, deadline=None)
@given(requests(nodes_max=12, requests_max=20))
def test_unlimited_finds_what_came_before(paths: list[Path]) -> None:
    seen: set[int] = set()
    expected = []
    for path in paths:
        expected.append(leading_run(frozenset(seen), path))
        seen |= set(path)
    assert unlimited(trace_of(paths)).tolist() == expected


@settings(max_examples=100, deadline=None)
@given(requests(nodes_max=12, requests_max=20))
def test_more_room_is_never_worse(paths: list[Path]) -> None:
    trace = trace_of(paths)
    uses = NextUses.of(trace)
    sums = [int(clairvoyant(trace, capacity, uses).sum()) for capacity in range(1, 14)]
    assert sums == sorted(sums)
    assert sums[-1] == int(unlimited(trace, uses).sum())
