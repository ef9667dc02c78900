"""How soon runs of each class are used again: learnt from the stream, and turned into a value.

Pure. For each class of runs, and each bucket of their age (half an octave wide), two sums are kept:
how many runs reached that age unused, and how many were used at it. Their quotient is the class's
hazard. A run's value is the best rate of hits that holding it can earn,

    max over t of  P(used within t | its age) / E[time held until then or t | its age],

Gittins' index of holding it (Gittins 1979; the hit density of LHD, Beckmann et al., NSDI 2018, with
the best horizon in place of a fixed one). What is used at short intervals, or dies young, or comes
back after a think time of minutes is thus valued by what the stream has shown of its like, and no
time constant is set by hand.

Classes form a tree; a class with little evidence is judged like its parent: its hazard is the
parent's until `SHRINKAGE` runs of its own speak for it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BUCKETS = 56
BUCKETS_PER_OCTAVE = 2
"""Ages from 1 ms on; the last bucket begins at three days."""

SHRINKAGE = 10.0
"""Evidence, in requests, that weighs as much as the parent class. From the middle of the range, 3
to 25, in which the mean over traces is the same within its noise; docs/policies.md."""

F64 = npt.NDArray[np.float64]
Classes = npt.NDArray[np.int32]

_EDGES_MS: F64 = np.exp2(np.arange(BUCKETS + 1) / BUCKETS_PER_OCTAVE)
_WIDTHS_MS: F64 = np.diff(_EDGES_MS)
_WIDTHS_MS[0] = _EDGES_MS[1]  # the first one begins at 0


def buckets_of(age_ms: F64) -> npt.NDArray[np.int64]:
    """The bucket of each age."""
    place = np.log2(np.maximum(age_ms, 1.0)) * BUCKETS_PER_OCTAVE
    return np.minimum(place.astype(np.int64), BUCKETS - 1)


class ReuseRates:
    """Hazards and values of a tree of classes.

    Parameters
        shape: how many branches each level has; a class is an index into the flattened array.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        count = int(np.prod(shape))
        self._uses: F64 = np.zeros((count, BUCKETS))
        self._reached_steps: F64 = np.zeros((count, BUCKETS + 1))  # differences along the ages
        self._values: F64 = np.zeros((count, BUCKETS + 1))

    # ---- evidence ----
    def expose(
        self,
        classes: Classes,
        weights: F64,
        start: npt.NDArray[np.int64],
        stop: npt.NDArray[np.int64],
    ) -> None:
        """Runs of these classes have lived through buckets start .. stop-1 without a use."""
        steps, row = self._reached_steps.reshape(-1), BUCKETS + 1
        steps += np.bincount(classes * row + start, weights, len(steps))
        steps -= np.bincount(classes * row + stop, weights, len(steps))

    def expose_one(self, run_class: int, weight: float, start: int, stop: int) -> None:
        """`expose` for one run."""
        self._reached_steps[run_class, start] += weight
        self._reached_steps[run_class, stop] -= weight

    def use(self, run_class: int, weight: float, bucket: int, exposed: bool = False) -> None:
        """A run of this class was used at an age in `bucket`; `exposed` if to that one already."""
        self._uses[run_class, bucket] += weight
        if not exposed:
            self.expose_one(run_class, weight, bucket, bucket + 1)

    def check(self) -> None:
        """Raise AssertionError unless no more was used at any age than reached it; for tests."""
        reached = np.cumsum(self._reached_steps, axis=1)
        slack = 1e-9 * (1.0 + np.abs(self._reached_steps).sum(axis=1, keepdims=True))
        assert (self._uses >= 0.0).all()
        assert (reached[:, :BUCKETS] >= self._uses - slack).all()
        assert (np.abs(reached[:, BUCKETS:]) <= slack).all()
        assert np.isfinite(self._values).all() and (self._values >= 0.0).all()

    # ---- values ----
    def refresh(self) -> None:
        """Compute the values anew from the evidence. O(classes · BUCKETS²) array work."""
        reached = np.cumsum(self._reached_steps[:, :BUCKETS], axis=1)
        used = self._uses
        hazard = np.zeros((1, BUCKETS))
        for depth in range(len(self.shape) + 1):
            groups = int(np.prod(self.shape[:depth]))
            uses_here = used.reshape(groups, -1, BUCKETS).sum(axis=1)
            reached_here = np.maximum(reached.reshape(groups, -1, BUCKETS).sum(axis=1), 0.0)
            above = np.repeat(hazard, groups // len(hazard), axis=0)
            hazard = (uses_here + SHRINKAGE * above) / (reached_here + SHRINKAGE)
        self._values = _gittins(hazard)

    def value(self, classes: Classes, age_ms: F64) -> F64:
        """Expected hits a page and millisecond of runs of these classes at these ages."""
        bucket = buckets_of(age_ms)
        low = self._values[classes, bucket]
        high = self._values[classes, bucket + 1]
        share = (age_ms - _EDGES_MS[bucket]) / (_EDGES_MS[bucket + 1] - _EDGES_MS[bucket])
        return np.asarray(low + (high - low) * np.clip(share, 0.0, 1.0))


def _gittins(hazard: F64) -> F64:
    """The index at each bucket's start, shape (classes, BUCKETS + 1), from hazards per bucket."""
    used = -np.expm1(-hazard)
    alive = np.ones((len(hazard), BUCKETS + 1))
    np.cumprod(1.0 - used, axis=1, out=alive[:, 1:])
    held = np.zeros((len(hazard), BUCKETS + 1))
    time = alive[:, :BUCKETS] * _WIDTHS_MS * (1.0 - used / 2)
    np.cumsum(time, axis=1, out=held[:, 1:])
    values = np.empty((len(hazard), BUCKETS + 1))
    for bucket in range(BUCKETS):  # small arrays, one after the other, stay in the cache
        # From within a bucket half of it is left.
        half = held[:, bucket] + time[:, bucket] / 2
        spent = held[:, bucket + 1 :] - half[:, None]
        hits = alive[:, bucket, None] - alive[:, bucket + 1 :]
        values[:, bucket] = (hits / np.maximum(spent, 1e-12)).max(axis=1)
    values[:, BUCKETS] = values[:, BUCKETS - 1]
    return values
