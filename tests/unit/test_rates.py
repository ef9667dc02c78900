"""How soon runs are used again: hazards and values, against a direct computation and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tutti_core.policies.rates import (
    _EDGES_MS,
    _WIDTHS_MS,
    BUCKETS,
    BUCKETS_PER_OCTAVE,
    SHRINKAGE,
    ReuseRates,
    _gittins,
    buckets_of,
)


def bucket_of(age_ms: float) -> int:
    return int(buckets_of(np.array([age_ms]))[0])


def value_of(rates: ReuseRates, run_class: int, age_ms: float) -> float:
    return float(rates.value(np.array([run_class], np.int32), np.array([age_ms]))[0])


def hazards_of(rates: ReuseRates) -> np.ndarray:
    """The hazards behind the values, shape (classes, BUCKETS), in `refresh`'s own words."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tutti_core.policies.rates._gittins", lambda h: seen.append(h) or _gittins(h))
        rates.refresh()
    return seen[-1]


# ---- buckets ----
def test_bucket_edges() -> None:
    ages = [
        -math.inf,
        -5.0,
        0.0,
        0.5,
        1.0,
        1.41,
        1.42,
        1.99,
        2.0,
        2.83,
        4.0,
        1024.0,
        1e12,
        math.inf,
    ]
    expected = [0, 0, 0, 0, 0, 0, 1, 1, 2, 3, 4, 20, BUCKETS - 1, BUCKETS - 1]
    with np.errstate(invalid="ignore"):
        assert [bucket_of(age) for age in ages[:-1]] == expected[:-1]
    assert BUCKETS_PER_OCTAVE == 2 and _EDGES_MS[2 * 10] == 1024.0


def test_every_age_lies_in_its_bucket_and_widths_add_up() -> None:
    for bucket in range(BUCKETS):
        low, high = _EDGES_MS[bucket], _EDGES_MS[bucket + 1]
        assert bucket_of((low + high) / 2) == bucket
        assert bucket_of(high * (1 - 1e-9)) == bucket
        assert _WIDTHS_MS[: bucket + 1].sum() == pytest.approx(high)
    assert 2 * 86_400_000 < _EDGES_MS[BUCKETS - 1] < _EDGES_MS[BUCKETS] < 4 * 86_400_000


# ---- values ----
def brute_force(hazard: np.ndarray, bucket: int) -> float:
    """The best rate of hits over all horizons, by following a run from bucket to bucket."""
    best, alive, hits, time = 0.0, 1.0, 0.0, 0.0
    for later in range(bucket, len(hazard)):
        used = alive * (1.0 - math.exp(-hazard[later]))
        held = (alive - used / 2) * _WIDTHS_MS[later]  # who is used there leaves in the middle
        time += held / 2 if later == bucket else held  # half of its own bucket is behind it
        hits += used
        alive -= used
        best = max(best, hits / time)
    return best


@pytest.mark.parametrize("seed", range(6))
def test_values_are_those_of_a_direct_computation(seed: int) -> None:
    dice = np.random.default_rng(seed)
    hazard = dice.random((3, BUCKETS)) ** (1 + 2 * seed)
    hazard[dice.random(hazard.shape) < 0.1 * seed] = 0.0
    values = _gittins(hazard)
    assert values.shape == (3, BUCKETS + 1)
    for row in range(3):
        expected = [brute_force(hazard[row], bucket) for bucket in range(BUCKETS)]
        assert values[row, :BUCKETS] == pytest.approx(expected, rel=1e-6, abs=1e-18)
    assert (values[:, BUCKETS] == values[:, BUCKETS - 1]).all()


def test_no_hazard_is_worth_nothing_and_a_surer_use_is_worth_more() -> None:
    assert not _gittins(np.zeros((1, BUCKETS))).any()
    hazard = np.zeros((3, BUCKETS))
    hazard[:, 30] = [0.1, 0.5, 1.0]
    values = _gittins(hazard)
    assert (np.diff(values[:, :31], axis=0) > 0).all() and not values[:, 31:].any()


def test_what_comes_sooner_is_worth_more() -> None:
    hazard = np.zeros((BUCKETS, BUCKETS))
    np.fill_diagonal(hazard, 0.5)
    at_birth = _gittins(hazard)[:, 0]
    assert (np.diff(at_birth) < 0).all()


def test_a_class_used_every_ten_seconds_is_worth_most_just_before() -> None:
    rates = ReuseRates((2,))
    bucket = bucket_of(10_000)
    for _ in range(100):
        rates.expose_one(1, 1.0, 0, bucket)
        rates.use(1, 1.0, bucket)
    for _ in range(20):  # and some that are never used again
        rates.expose_one(1, 1.0, 0, BUCKETS)
    rates.refresh()
    rates.check()
    ages = [0.0, 100.0, 1000.0, 5000.0, 8000.0]
    rising = [value_of(rates, 1, age) for age in ages]
    assert rising == sorted(rising) and rising[-1] > 3 * rising[0]
    assert value_of(rates, 1, 8000) > 20 * value_of(rates, 1, 20_000)
    assert value_of(rates, 1, 20_000) >= value_of(rates, 1, 10 * 86_400_000) >= 0
    assert value_of(rates, 0, 8000) > 0  # unknown, so judged like the only one that is known


def test_values_are_interpolated_between_the_edges() -> None:
    rates = ReuseRates((1,))
    rates._values[0] = np.arange(BUCKETS + 1)
    for bucket in (0, 1, 20, BUCKETS - 1):
        low, high = _EDGES_MS[bucket], _EDGES_MS[bucket + 1]
        assert value_of(rates, 0, low + (high - low) / 4) == pytest.approx(bucket + 0.25)
    assert value_of(rates, 0, 0.0) == 0.0 and value_of(rates, 0, -1e9) == 0.0
    assert value_of(rates, 0, 1e15) == BUCKETS
    assert rates.value(np.zeros(0, np.int32), np.zeros(0)).shape == (0,)


# ---- evidence ----
def test_hazards_by_hand() -> None:
    """Two levels of two; ten runs of class 0 reach bucket 5 and four are used in it."""
    rates = ReuseRates((2, 2))
    for i in range(10):
        rates.expose_one(0, 1.0, 0, 5 if i < 4 else 6)
        if i < 4:
            rates.use(0, 1.0, 5)
    rates.expose_one(3, 2.0, 5, 6)  # two of class 3 live through it
    hazard = hazards_of(rates)[:, 5]
    s = SHRINKAGE
    root = 4 / (12 + s)
    first, second = (4 + s * root) / (10 + s), (0 + s * root) / (2 + s)
    assert hazard[0] == pytest.approx((4 + s * first) / (10 + s))
    assert hazard[1] == pytest.approx(first)  # never seen: like its parent, to the digit
    assert hazard[2] == pytest.approx(second)
    assert hazard[3] == pytest.approx((0 + s * second) / (2 + s))
    assert hazards_of(rates)[0, 4] == 0.0 and hazards_of(rates)[0, 6] == 0.0


def test_a_class_never_seen_is_valued_like_its_parent() -> None:
    rates = ReuseRates((2, 3))
    for run_class, bucket in ((0, 10), (4, 40)):
        for _ in range(200):
            rates.expose_one(run_class, 1.0, 0, bucket)
            rates.use(run_class, 1.0, bucket)
    rates.refresh()
    assert (rates._values[1] == rates._values[2]).all() and (
        rates._values[3] == rates._values[5]
    ).all()
    assert value_of(rates, 1, 5.0) > 10 * value_of(rates, 3, 5.0)


def test_much_evidence_outweighs_the_parent() -> None:
    rates = ReuseRates((2,))
    for _ in range(10_000):
        rates.expose_one(0, 1.0, 0, 9)
        rates.use(0, 1.0, 9)
        rates.expose_one(1, 1.0, 0, 10)
    assert hazards_of(rates)[:, 9] == pytest.approx([1.0, 0.0], abs=1e-3)
    assert (hazards_of(rates) <= 1.0).all()


def test_exposures_of_many_are_those_of_each() -> None:
    dice = np.random.default_rng(4)
    many, each = ReuseRates((4, 5)), ReuseRates((4, 5))
    classes = dice.integers(0, 20, 300).astype(np.int32)
    weights = dice.random(300)
    start = dice.integers(0, BUCKETS, 300)
    stop = np.minimum(start + dice.integers(0, 20, 300), BUCKETS)
    many.expose(classes, weights, start, stop)
    for run_class, weight, low, high in zip(classes, weights, start, stop, strict=True):
        each.expose_one(run_class, weight, low, high)
    assert many._reached_steps == pytest.approx(each._reached_steps, abs=1e-12)
    many.check()
    none = np.zeros(0, np.int64)
    many.expose(none.astype(np.int32), np.zeros(0), none, none)
    assert many._reached_steps == pytest.approx(each._reached_steps, abs=1e-12)


def test_reached_counts_every_run_once_an_age() -> None:
    rates = ReuseRates((1,))
    rates.expose_one(0, 0.5, 0, 3)
    rates.expose_one(0, 0.5, 3, 7)  # the same run, later
    rates.use(0, 0.5, 7)
    reached = np.cumsum(rates._reached_steps[0])
    assert reached[:8] == pytest.approx(0.5) and reached[8:] == pytest.approx(0.0)
    rates.expose_one(0, 1.0, 0, BUCKETS)
    rates.use(0, 1.0, BUCKETS - 1, exposed=True)
    assert np.cumsum(rates._reached_steps[0])[-2] == pytest.approx(1.0)
    rates.check()


def test_drift_of_sums_is_no_harm() -> None:
    """A million exposures of odd weights: what should be nothing may be a little below."""
    rates = ReuseRates((2,))
    dice = np.random.default_rng(1)
    count = 1_000_000
    start = dice.integers(0, 20, count)
    rates.expose(dice.integers(0, 2, count).astype(np.int32), dice.random(count), start, start + 9)
    for _ in range(1000):
        rates.use(0, 1 / 3, 50)
    rates.refresh()
    rates.check()
    assert np.isfinite(rates._values).all() and (rates._values >= 0).all()
    assert (hazards_of(rates) <= 1.0).all() and (hazards_of(rates) >= 0.0).all()


def test_nothing_known_is_worth_nothing() -> None:
    rates = ReuseRates((4, 8, 5))
    rates.expose_one(3, 1.0, 0, 9)
    rates.refresh()
    assert not rates._values.any()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: r._uses.__setitem__((0, 4), 3.0),  # used more often than reached
        lambda r: r._reached_steps.__setitem__((0, 2), -5.0),
        lambda r: r._reached_steps.__setitem__((0, 9), 1.0),  # never ends
        lambda r: r._uses.__setitem__((0, 4), -1.0),
        lambda r: r._values.__setitem__((0, 4), math.nan),
    ],
)
def test_the_check_notices_what_cannot_be(spoil) -> None:
    rates = ReuseRates((2,))
    rates.expose_one(0, 1.0, 0, 4)
    rates.use(0, 1.0, 4)
    rates.refresh()
    rates.check()
    spoil(rates)
    with pytest.raises(AssertionError):
        rates.check()
