"""Trials: attempts to break a store, each returning a count of what was tried and what broke.

The tests run them small, `make soak` long, and `tutti bench safety` counts them. Each module is one
kind of attack with one function, `run`; `tally.py` is what they count in.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from tutti_core.trials.tally import Tally

TRIALS = (
    "crash_points",
    "device_faults",
    "power_loss",
    "kills",
    "processes",
    "corruption",
    "io_errors",
    "concurrency",
    "unsafe_paths",
    "bad_input",
)
"""Every trial by name; each is the module of that name."""


def run_trial(name: str, directory: Path, *, seed: int, seconds: float = 0.0) -> Tally:
    """Run one of TRIALS in an empty directory, which it may leave full.

    Parameters
        seed: repeats a run where the operating system allows it.
        seconds: 0 for the fixed quick part; otherwise further seeds until the time is over.
    """
    if name not in TRIALS:
        raise ValueError(f"trial {name!r}; there are {', '.join(TRIALS)}")
    module = importlib.import_module(f"tutti_core.trials.{name}")
    tally: Tally = module.run(directory, seed=seed, seconds=seconds)
    return tally


__all__ = ["TRIALS", "Tally", "run_trial"]
