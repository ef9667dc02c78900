"""The power goes at every device and catalog operation of an encrypted store's life."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from encryption_kit import key_file

from tutti_core.trials.crash_points import WRITE_BACK, Shape, every_stop
from tutti_core.trials.tally import Tally


@pytest.mark.parametrize(
    ("name", "steps", "segments", "settings"),
    [("eviction", 7, 2, {}), ("write back", 4, 12, WRITE_BACK)],
)
def test_an_encrypted_store_survives_every_stop(
    tmp_path: Path, name: str, steps: int, segments: int, settings: dict[str, Any]
) -> None:
    settings = {**settings, "segment": 64 << 10, "encryption_key_file": key_file(tmp_path)}
    shape = Shape(f"{name}, encrypted", steps, segments, room=segments > 2, settings=settings)
    folder = tmp_path / "life"
    folder.mkdir(0o700)
    tally = Tally()
    every_stop(folder, shape, 5, tally)
    tally.check()
    assert tally.crash_points > 10 and tally.pages_compared > 200
