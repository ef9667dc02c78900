"""What the boots share: the packages, the guest's program, and drives with plans for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from boots import Disks, UnavailableError, base_files, prepare


@pytest.fixture(scope="session")
def files() -> dict[str, bytes]:
    """The files of every guest. Skips, which is a failure under TUTTI_STRICT, where apt can't get
    QEMU and a kernel."""
    try:
        return base_files(prepare())
    except UnavailableError as error:
        pytest.skip(f"THE QEMU BOOTS DID NOT RUN: {error}")


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    return Disks(tmp_path)
