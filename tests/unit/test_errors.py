"""errors.py: what an error says, and that it survives being caught, printed and pickled."""

import errno
import pickle

import pytest

from tutti_core import errors
from tutti_core.errors import ConfigError, DeviceError, TuttiError, device_error, nearest

ALL = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, TuttiError)
]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_keeps_its_fields_and_its_text(kind: type[TuttiError]) -> None:
    error = kind("what", op="read", device="/d", offset_bytes=1, length_bytes=2, errno=5, hint="do")
    assert str(error) == "what; do"
    assert (error.op, error.device, error.offset_bytes, error.length_bytes) == ("read", "/d", 1, 2)
    assert (error.errno, error.hint, error.retryable, error.scope) == (5, "do", False, "range")


def test_errors_are_also_what_callers_of_other_libraries_expect() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(DeviceError, OSError)


@pytest.mark.parametrize("kind", ALL)
def test_every_error_can_be_sent_to_another_process(kind: type[TuttiError]) -> None:
    error = pickle.loads(pickle.dumps(kind("what", op="open", hint="do")))
    assert type(error) is kind
    assert str(error) == "what; do" and error.op == "open"


@pytest.mark.parametrize(
    ("code", "retryable"), [(errno.EIO, True), (errno.ENOSPC, True), (errno.EROFS, False)]
)
def test_device_error_names_the_call_the_device_and_the_reason(code: int, retryable: bool) -> None:
    error = device_error("write", code, device="/mnt/pool")
    assert "write" in str(error) and "/mnt/pool" in str(error) and f"errno {code}" in str(error)
    assert (error.errno, error.retryable) == (code, retryable)


def test_nearest_names_the_nearest_or_all() -> None:
    assert nearest("capacty", ["capacity", "path"]) == "did you mean 'capacity'?"
    assert nearest("zzz", ["capacity", "path"]) == "valid names: capacity, path"
