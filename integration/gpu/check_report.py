"""What a check found: printed as it comes, and kept for the JSON.

    python integration/gpu/check_report.py OUT NAME=FILE ...

Puts the reports of several steps into one file. Exit status 1: one of them is missing, or failed.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Report:
    """What was found; printed as it comes."""

    checks: list[dict[str, Any]] = field(default_factory=list)
    speed: list[dict[str, Any]] = field(default_factory=list)

    def check(self, name: str, ok: bool | None, detail: str = "") -> None:
        """Note a check; None: it could not run, and `detail` says why."""
        self.checks.append({"check": name, "ok": ok, "detail": detail})
        word = {True: "ok", False: "FAILED", None: "not run"}[ok]
        print(f"{word:8} {name}{': ' if detail else ''}{detail}", flush=True)

    @property
    def failed(self) -> bool:
        """Whether something was wrong."""
        return any(entry["ok"] is False for entry in self.checks)


def merge(steps: dict[str, Path]) -> dict[str, Any]:
    """One report of several. A step without one failed: it was killed, or ended early."""
    whole: dict[str, Any] = {"environment": {}, "seeds": {}, "checks": [], "speed": []}
    for name, path in steps.items():
        if not path.is_file():
            detail = "the step left no report"
            whole["checks"].append({"check": name, "ok": False, "detail": detail})
            continue
        part = json.loads(path.read_text())
        whole["environment"] |= part.get("environment", {})
        whole["seeds"][name] = part.get("seed")
        whole["checks"] += [{"step": name, **entry} for entry in part["checks"]]
        whole["speed"] += part.get("speed", [])
    return whole


def main(arguments: list[str]) -> int:
    """Merge, write, print the short table."""
    target, steps = Path(arguments[0]), dict(one.split("=", 1) for one in arguments[1:])
    whole = merge({name: Path(path) for name, path in steps.items()})
    target.write_text(json.dumps(whole, indent=1) + "\n")
    count = {word: sum(entry["ok"] is word for entry in whole["checks"]) for word in (True, False)}
    print(f"\n{'step':12} right  wrong  not run")
    for name in steps:
        mine = [one["ok"] for one in whole["checks"] if name in (one.get("step"), one["check"])]
        print(f"{name:12} {mine.count(True):5}  {mine.count(False):5}  {mine.count(None):7}")
    for entry in whole["checks"]:
        if entry["ok"] is not True:
            word = "FAILED " if entry["ok"] is False else "not run"
            print(f"{word} {entry.get('step', '')} {entry['check']}: {entry['detail']}")
    return 1 if count[False] or not count[True] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
