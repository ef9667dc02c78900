"""tiers/lease.py: numbered locks that end with their holder, however it ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tutti_core import BusyError, DeviceError
from tutti_core.tiers import lease
from tutti_core.tiers.lease import held_leases, take_lease, try_lease


def test_leases_are_taken_from_the_lowest_and_given_back(tmp_path: Path) -> None:
    first, second = take_lease(tmp_path), take_lease(tmp_path)
    assert (first.number, second.number, held_leases(tmp_path)) == (0, 1, [0, 1])
    first.release()
    first.release()
    assert held_leases(tmp_path) == [1]
    assert take_lease(tmp_path).number == 0


def test_a_held_lease_is_not_given_twice(tmp_path: Path) -> None:
    held = take_lease(tmp_path)
    assert try_lease(tmp_path, 0) is None
    held.release()
    again = try_lease(tmp_path, 0)
    assert again is not None
    again.release()


def test_too_many_writers_are_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LEASES_MAX", 2)
    held = [take_lease(tmp_path), take_lease(tmp_path)]
    with pytest.raises(BusyError, match="2 processes"):
        take_lease(tmp_path)
    held[1].release()
    assert take_lease(tmp_path).number == 1


def test_a_folder_that_is_missing_is_an_error_of_the_device(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"0\.lock"):
        take_lease(tmp_path / "none")


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("x")
    (tmp_path / "0.lock").symlink_to(target)
    with pytest.raises(DeviceError):
        take_lease(tmp_path)
    assert target.read_text() == "x"


def test_a_lease_ends_with_its_process(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from tutti_core.tiers.lease import take_lease\n"
        "lease = take_lease(pathlib.Path(sys.argv[1])); print(lease.number, flush=True)\n"
        "sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None and child.stdout.readline() == "0\n"
    assert held_leases(tmp_path) == [0]
    child.kill()
    child.communicate()
    assert held_leases(tmp_path) == []


def test_a_forked_child_does_not_keep_a_released_lease(tmp_path: Path) -> None:
    held = take_lease(tmp_path)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)  # until the parent is done
        os._exit(0)
    os.close(reader)
    held.release()
    assert held_leases(tmp_path) == []
    os.close(writer)
    os.waitpid(child, 0)
