"""Fixtures of the unit tests: a clock that jumps."""

from __future__ import annotations

import time

import pytest
from tier_kit import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The monotonic clock of this process, until the test ends."""
    made = Clock()
    monkeypatch.setattr(time, "monotonic_ns", made)
    return made
