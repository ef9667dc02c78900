"""Everything that is fuzzed, one after the other, within a time: what `make fuzz` runs.

    python tests/fuzz/run.py --seconds 300 --seed 0

Coverage-guided on every decoder where atheris is installed (`make fuzz-tools`), else said so;
the native code under sanitizers; random input and senseless calls; the machine over the whole API.
What was found lies in build/fuzz. Exits 1 if anything broke.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from options_decoder import OPTIONS

from tutti_core.trials.decoders import all_decoders

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOUND = ROOT / "build" / "fuzz"
START_S = 3
"""About what a guided process takes to start."""


def run(what: str, command: list[str], **environment: str) -> bool:
    """Run one of them; True if nothing broke."""
    print(f"== {what}", flush=True)
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment})
    if done.returncode not in (0, 77):
        print(f"== {what}: BROKEN, exit status {done.returncode}", flush=True)
    return done.returncode in (0, 77)


def guided(seconds: float, seed: int) -> bool:
    """All decoders, coverage-guided, sharing the time evenly."""
    if importlib.util.find_spec("atheris") is None:
        print("== guided: atheris is not installed, inputs are random only; `make fuzz-tools`")
        return True
    with tempfile.TemporaryDirectory() as folder:
        names = [each.name for each in (*all_decoders(Path(folder)), OPTIONS)]
    good, end_s = True, time.monotonic() + seconds
    for turn, name in enumerate(names):
        share_s = int((end_s - time.monotonic()) / (len(names) - turn) - START_S)
        if share_s < 1:
            print(f"== guided: no time for {name} and what follows; give more SECONDS")
            break
        command = [sys.executable, str(HERE / "guided.py"), name, str(share_s), str(seed)]
        good &= run(f"guided {name}, {share_s} s", [*command, str(FOUND / name)])
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    seconds, seed = given.seconds, given.seed
    FOUND.mkdir(parents=True, exist_ok=True)
    good = guided(seconds * 0.5, seed)
    native_s = f"{seconds * 0.1:.0f}"
    good &= run("native", ["sh", str(HERE / "native.sh"), str(seed), native_s, "1000"])
    pytest = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider"]
    for what, file, share in (
        ("random input and senseless calls", "tests/fuzz/test_decoders.py", 0.1),
        ("the whole API", "tests/property/test_api_machine.py", 0.25),
    ):
        long = {"TUTTI_FUZZ_SECONDS": f"{seconds * share:.0f}", "TUTTI_FUZZ_SEED": str(seed)}
        good &= run(what, [*pytest, file], **long)
    print("== nothing broke" if good else "== BROKEN; inputs are in build/fuzz, or above")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
