"""Every trial and the randomised tests, with new seeds, for as long as `make soak` says.

An ordinary test run makes one short round, so that this file cannot rot; the quick parts of all
trials have tests of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tutti_core.trials import TRIALS, run_trial

ROOT = Path(__file__).resolve().parents[2]
SECONDS = float(os.environ.get("TUTTI_SOAK_SECONDS", "0"))
SEED = int(os.environ.get("TUTTI_SOAK_SEED", "0"))
SHARE_S = SECONDS / (len(TRIALS) + 1)
TESTS = ["tests/property", "tests/fault", "tests/unit/test_concurrency.py"]
ROUND_TIMEOUT_S = 1800


@pytest.mark.parametrize("name", TRIALS if SECONDS else ["unsafe_paths"])
def test_trial(name: str, tmp_path: Path) -> None:
    tally = run_trial(name, tmp_path, seed=SEED, seconds=SHARE_S)
    print(f"{name}, seed {SEED}: {tally}", flush=True)
    tally.check()


def test_rounds_with_new_seeds() -> None:
    end_s = time.monotonic() + SHARE_S
    rounds = 0
    while rounds == 0 or time.monotonic() < end_s:
        seed = SEED + rounds
        rounds += 1
        if SECONDS:
            print(f"round {rounds}, TUTTI_TEST_SEED={seed}", flush=True)
        chosen = TESTS if SECONDS else ["tests/property/test_space_model.py"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen],
            cwd=ROOT,
            env={**os.environ, "TUTTI_TEST_SEED": str(seed)},
            capture_output=True,
            text=True,
            timeout=ROUND_TIMEOUT_S,
        )
        assert done.returncode == 0, f"TUTTI_TEST_SEED={seed}\n{done.stdout[-5000:]}"
