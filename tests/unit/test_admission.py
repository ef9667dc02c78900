"""What decides on writes: the filters, the sketch under them, and the budget in bytes a day."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tutti_core.errors import ConfigError
from tutti_core.policies.admission import ADMISSIONS, Bloom, make_admission
from tutti_core.policies.budget import DAY_NS, WriteBudget
from tutti_core.policies.sketch import Sketch, page_hashes

WIDTH = 16
HOUR_NS = DAY_NS // 24
SLOW = settings(max_examples=100, deadline=None, derandomize=True, database=None)


def chain(stream: int, pages: int, common: int = 0) -> bytes:
    """A chain of page keys of its own, but for the first `common` pages."""
    own = np.random.default_rng(1000 + stream).integers(0, 256, (pages, WIDTH), np.uint8)
    shared = np.random.default_rng(7).integers(0, 256, (common, WIDTH), np.uint8)
    return shared.tobytes() + own[common:].tobytes()


def admitted(name: str, capacity: int = 1000):
    """A filter as a function from a chain to the number of pages that it admits."""
    admission = make_admission(name, capacity, seed=4)

    def ask(keys: bytes, first: int = 0) -> int:
        mask = admission.admit(keys, WIDTH, first, 1)
        assert mask.dtype == np.bool_ and len(mask) == len(keys) // WIDTH - first
        count = int(mask.sum())
        assert mask[:count].all()  # a front part
        return count

    return ask


def test_hashes_are_the_start_of_each_key() -> None:
    keys = chain(1, 5)
    expected = [int.from_bytes(keys[i * WIDTH : i * WIDTH + 8], "little") for i in range(5)]
    assert page_hashes(keys, WIDTH).tolist() == expected
    assert page_hashes(bytearray(keys), WIDTH, 2).tolist() == expected[2:]
    assert page_hashes(keys, WIDTH, 5).tolist() == [] and page_hashes(b"", WIDTH).tolist() == []


# ---- filters ----
@pytest.mark.parametrize("name", sorted(ADMISSIONS))
def test_by_name(name: str) -> None:
    assert ADMISSIONS[name].name == name
    assert admitted(name)(b"") == 0
    assert admitted(name)(chain(1, 3), 3) == 0
    with pytest.raises(ConfigError, match="sometimes"):
        make_admission("sometimes", 10)


def test_always() -> None:
    ask = admitted("always")
    assert ask(chain(1, 50)) == 50 and ask(chain(1, 50), 20) == 30


@pytest.mark.parametrize("name", ["second_touch", "frequency"])
def test_a_page_is_written_when_it_is_seen_again(name: str) -> None:
    ask = admitted(name)
    assert ask(chain(1, 50)) == 0
    assert ask(chain(1, 50)) == 50
    assert ask(chain(1, 50)) == 50  # as often as it is asked: the write may have failed
    assert ask(chain(2, 50, common=20)) == 0
    assert ask(chain(1, 60), 30) == 20  # pages 30 to 49 were seen


@pytest.mark.parametrize("name", ["second_touch", "frequency"])
def test_only_the_front_part_that_is_known(name: str) -> None:
    ask = admitted(name)
    assert ask(chain(1, 50, common=20)) == 0
    assert ask(chain(2, 50, common=20)) == 20
    assert ask(chain(3, 50, common=20), 20) == 0
    # A page behind one that is not admitted is not admitted: it would be worth nothing.
    keys = chain(2, 50, common=20)
    broken = keys[: 5 * WIDTH] + chain(9, 1) + keys[6 * WIDTH :]
    assert ask(broken) == 5


def test_second_touch_remembers_as_long_as_it_says() -> None:
    """At least `capacity` other pages, at most twice as many; whatever the calls are like."""
    for batch in (1, 7, 30, 100, 250):
        for others in (0, 50, 99, 200, 300):
            for before in (0, 13, 99):
                ask = admitted("second_touch", 100)
                ask(chain(1, before))
                ask(chain(2, 1))
                rest = chain(3, others)
                for i in range(0, others, batch):
                    ask(rest[i * WIDTH : (i + batch) * WIDTH])
                found = ask(chain(2, 1))
                if others < 100:
                    assert found == 1
                if others >= 200:
                    assert found == 0


def test_second_touch_pages_that_are_asked_for_again_stay_remembered() -> None:
    ask = admitted("second_touch", 100)
    ask(chain(1, 10))
    for stream in range(20):
        ask(chain(100 + stream, 50))
        assert ask(chain(1, 10)) == 10


def test_frequency_forgets() -> None:
    ask = admitted("frequency", 100)
    ask(chain(1, 20))
    for stream in range(25):
        ask(chain(100 + stream, 80))  # 2000 pages: halved twice
    assert ask(chain(1, 20)) < 20


@pytest.mark.parametrize(("name", "share"), [("second_touch", 1 / 200), ("frequency", 1 / 15)])
def test_few_are_admitted_by_mistake(name: str, share: float) -> None:
    ask = admitted(name, 1000)
    assert sum(ask(chain(stream, 1)) for stream in range(5000)) < 5000 * share


@pytest.mark.parametrize("name", sorted(ADMISSIONS))
def test_the_same_calls_are_answered_alike(name: str) -> None:
    draw = random.Random(3)
    calls = [chain(draw.randrange(5), draw.randrange(1, 40), 10) for _ in range(50)]
    one, other = admitted(name, 60), admitted(name, 60)
    assert [one(keys) for keys in calls] == [other(keys) for keys in calls]


def test_bloom() -> None:
    bloom = Bloom(5000, seed=1)
    keys = page_hashes(chain(1, 5000), WIDTH)
    bloom.add(keys)
    assert bloom.has(keys).all() and bloom.count == 5000
    assert bloom.has(page_hashes(chain(2, 20_000), WIDTH)).mean() < 1 / 250
    bloom.clear()
    assert not bloom.has(keys).any() and bloom.count == 0


# ---- sketch ----
@given(
    keys=st.lists(st.integers(0, 2**64 - 1), max_size=8),
    picks=st.lists(st.integers(0, 7), max_size=300),
)
@SLOW
def test_an_estimate_is_never_too_low(keys: list[int], picks: list[int]) -> None:
    sketch = Sketch(64, seed=2)
    counts = Counter(keys[pick] for pick in picks if pick < len(keys))
    for pick in picks:
        if pick < len(keys):
            sketch.add(keys[pick])
    for key in keys:
        assert sketch.estimate(key) >= min(counts[key], 15)


def test_estimates_are_close() -> None:
    sketch = Sketch(1000, seed=2)
    draw = random.Random(1)
    keys = [draw.getrandbits(64) for _ in range(1000)]
    for key in keys:
        for _ in range(3):
            sketch.add(key)
    assert sum(sketch.estimate(key) == 3 for key in keys) > 950
    assert sum(sketch.estimate(draw.getrandbits(64)) > 0 for _ in range(1000)) < 250


def test_one_by_one_and_all_at_once_agree() -> None:
    single, many = Sketch(500, seed=2), Sketch(500, seed=2)
    for stream in (1, 2, 1, 3, 1, 2):
        hashes = page_hashes(chain(stream, 10), WIDTH)
        many.add_all(hashes)
        for key in hashes.tolist():
            single.add(key)
    hashes = page_hashes(chain(1, 10), WIDTH)
    assert many.estimate_all(hashes).tolist() == [3] * 10
    assert [single.estimate(key) for key in hashes.tolist()] == [3] * 10
    assert [many.estimate(key) for key in hashes.tolist()] == [3] * 10


def test_counters_stop_at_fifteen() -> None:
    sketch = Sketch(10_000)
    one = np.array([5], np.uint64)
    for _ in range(40):
        sketch.add(3)
        sketch.add_all(one)
    assert sketch.estimate(3) == 15 and sketch.estimate_all(one).tolist() == [15]


def test_counts_are_halved_after_ten_times_the_capacity() -> None:
    sketch = Sketch(100)
    for _ in range(8):
        sketch.add(3)
    sketch.add(4, weight=991)
    assert sketch.estimate(3) == 8
    sketch.add(5)
    assert sketch.estimate(3) == 4 and sketch.estimate(4) == 0


def test_raise_to_never_lowers() -> None:
    sketch = Sketch(100)
    sketch.raise_to(3, 6)
    sketch.raise_to(3, 2)
    assert sketch.estimate(3) == 6


@pytest.mark.parametrize("sizes", [(100, 1000), (100, 200, 5000), (1000, 100), (100, 1000, 100)])
def test_another_capacity_keeps_what_was_counted(sizes: tuple[int, ...]) -> None:
    sketch, draw = Sketch(sizes[0], seed=2), random.Random(1)
    keys = [draw.getrandbits(64) for _ in range(60)]
    for i, key in enumerate(keys):
        sketch.raise_to(key, i % 9)
    before = [sketch.estimate(key) for key in keys]
    for size in sizes[1:]:
        sketch.resize(size)
    after = [sketch.estimate(key) for key in keys]
    assert all(b >= a for a, b in zip(before, after, strict=True))
    if sizes[-1] >= sizes[0]:
        assert before == after


# ---- budget ----
@pytest.mark.parametrize("limit", [None, 0])
def test_no_limit(limit: int | None) -> None:
    budget = WriteBudget(limit)
    assert budget.take(10**15, 0) == 10**15 and budget.take(7, 5, unit_bytes=4) == 7


def test_a_budget_starts_empty_and_fills_to_an_hour_of_it() -> None:
    budget = WriteBudget(24_000)
    assert budget.take(10**9, 0) == 0
    assert budget.take(10**9, HOUR_NS) == 958  # 23,000 bytes a day
    assert budget.take(10**9, HOUR_NS) == 0
    assert budget.take(10**9, 100 * HOUR_NS) == 1000


def test_grants_are_whole_units_and_the_rest_stays() -> None:
    budget = WriteBudget(24_000)
    budget.take(0, 0)
    assert budget.take(990, 5 * HOUR_NS, unit_bytes=300) == 900
    assert budget.take(990, 5 * HOUR_NS, unit_bytes=300) == 0
    assert budget.take(990, 5 * HOUR_NS) == 100
    assert budget.take(250, 10 * HOUR_NS, unit_bytes=100) == 200


def test_a_clock_that_steps_back_grants_nothing() -> None:
    budget = WriteBudget(24_000)
    budget.take(0, 10 * HOUR_NS)
    assert budget.take(9**9, 11 * HOUR_NS) == 958
    assert budget.take(9**9, 0) == 0 and budget.take(9**9, 11 * HOUR_NS) == 0


def test_nearly_all_of_it_can_be_written() -> None:
    budget = WriteBudget(10**12)
    budget.take(0, 0)
    total = sum(budget.take(10**12, minute * 60 * 10**9) for minute in range(1, 10 * 1440 + 1))
    assert total / 10 == pytest.approx(10**12 * 23 / 24, rel=1e-6)


def most_in_a_day(grants: list[tuple[int, int]]) -> int:
    """The most that any closed window of 24 hours holds; one that begins with a grant will do."""
    return max(
        (
            sum(granted for at, granted in grants if begin <= at <= begin + DAY_NS)
            for begin, _ in grants
        ),
        default=0,
    )


STEP_NS = st.one_of(
    st.just(0),
    st.integers(0, DAY_NS // 100),
    st.sampled_from([1, HOUR_NS - 1, HOUR_NS, DAY_NS - HOUR_NS, DAY_NS, 3 * DAY_NS]),
)
WANTED = st.one_of(st.integers(0, 5000), st.just(10**12))


@given(
    limit=st.one_of(st.integers(1, 5000), st.integers(1, 10**13)),
    calls=st.lists(st.tuples(STEP_NS, WANTED, st.sampled_from([1, 7, 4096])), max_size=60),
    restarts=st.sets(st.integers(0, 59), max_size=4),
)
@SLOW
def test_no_24_hours_hold_more_than_the_budget(
    limit: int, calls: list[tuple[int, int, int]], restarts: set[int]
) -> None:
    budget, now, grants = WriteBudget(limit), 10**18, []
    for i, (step, wanted, unit) in enumerate(calls):
        if i in restarts:
            budget = WriteBudget(limit)
        now += step
        granted = budget.take(wanted, now, unit)
        assert 0 <= granted <= wanted and granted % unit == 0
        grants.append((now, granted))
    assert most_in_a_day(grants) <= limit


def test_the_oracle_notices_a_plain_token_bucket() -> None:
    """One that fills with the whole budget a day, and may save up an hour of it besides."""
    budget = WriteBudget(24_000)
    grants = []
    for hour in range(60):
        budget._fill(24_000, hour * HOUR_NS)
        grants.append((hour * HOUR_NS, budget.take(10**9, hour * HOUR_NS)))
    assert most_in_a_day(grants) > 24_000
