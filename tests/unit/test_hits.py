"""Which lengths of a chain are restorable: the vectorised rule against a plain reading of it."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti_sglang.hits import PoolHits, leading, restorable_lengths

POLICIES = st.sampled_from(["all_pages", "trailing_pages", "block_groups"])
PRESENT = st.lists(st.booleans(), max_size=14)
POOLS = st.lists(st.tuples(POLICIES, PRESENT, st.integers(0, 5)), max_size=4)


def holds(policy: str, present: list[bool], trailing: int, length: int) -> bool:
    """The rule as SGLang words it, one page at a time."""

    def stored(page: int) -> bool:
        return page < len(present) and present[page]

    if policy == "all_pages":
        return all(stored(page) for page in range(length))
    if policy == "trailing_pages":
        window = max(1, trailing)
        return all(stored(page) for page in range(max(0, length - window), length))
    return True


@settings(max_examples=1000, deadline=None)
@given(kv_hit=st.integers(0, 14), pools=POOLS)
def test_agrees_with_a_reading_page_by_page(
    kv_hit: int, pools: list[tuple[str, list[bool], int]]
) -> None:
    hits = [
        PoolHits(str(i), policy, np.array(present, dtype=np.bool_), trailing)  # type: ignore[arg-type]
        for i, (policy, present, trailing) in enumerate(pools)
    ]
    expected = [
        length
        for length in range(1, kv_hit + 1)
        if all(holds(policy, present, trailing, length) for policy, present, trailing in pools)
    ]
    assert restorable_lengths(kv_hit, hits) == expected


def test_examples() -> None:
    present = np.array([False, False, True, True, False, True])
    assert restorable_lengths(6, []) == [1, 2, 3, 4, 5, 6]
    assert restorable_lengths(6, [PoolHits("mamba", "trailing_pages", present)]) == [3, 4, 6]
    assert restorable_lengths(6, [PoolHits("swa", "trailing_pages", present, trailing=2)]) == [4]
    assert restorable_lengths(6, [PoolHits("indexer", "all_pages", ~present)]) == [1, 2]
    assert restorable_lengths(6, [PoolHits("c4", "block_groups", present)]) == [1, 2, 3, 4, 5, 6]
    assert restorable_lengths(0, [PoolHits("mamba", "trailing_pages", present)]) == []
    assert restorable_lengths(-1, []) == []


def test_the_answer_is_plain_integers() -> None:
    assert all(type(n) is int for n in restorable_lengths(3, []))


def test_an_unknown_policy_is_refused() -> None:
    pool = PoolHits("x", "some_pages", np.ones(2, dtype=np.bool_))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="some_pages"):
        restorable_lengths(2, [pool])


@given(st.lists(st.booleans(), max_size=20))
def test_leading(flags: list[bool]) -> None:
    expected = flags.index(False) if False in flags else len(flags)
    assert leading(np.array(flags, dtype=np.bool_)) == expected


def test_needs_neither_torch_nor_sglang() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['sglang'] = None; import tutti_sglang.hits"
    )
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
