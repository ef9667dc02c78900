"""The randomised tests again and again with new seeds, for as long as `make soak` says.

An ordinary test run makes one short round, so that this file cannot rot.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS = float(os.environ.get("TUTTI_SOAK_SECONDS", "0"))
SEED = int(os.environ.get("TUTTI_SOAK_SEED", "0"))
TESTS = ["tests/property", "tests/fault", "tests/unit/test_concurrency.py"]
ROUND_TIMEOUT_S = 900


def test_rounds_with_new_seeds() -> None:
    end_s = time.monotonic() + SECONDS
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
