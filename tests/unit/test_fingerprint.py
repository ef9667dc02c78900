"""The weights' fingerprint changes with the model and with nothing else."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

from tutti_sglang.fingerprint import weights_fingerprint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    header = json.dumps({"w": {"dtype": "F32", "shape": [65536], "data_offsets": [0, 262144]}})
    body = bytes(range(256)) * 1024
    (tmp_path / "config.json").write_text('{"layers": 2}')
    (tmp_path / "model.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header.encode() + body
    )
    return tmp_path


def test_same_files_same_fingerprint(model: Path) -> None:
    before = weights_fingerprint(model, "main")
    os.utime(model / "model.safetensors", (1, 1))
    (model / "README.md").write_text("of no importance")
    assert weights_fingerprint(model, "main") == before
    assert len(before) == 32


def _overwrite(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as stream:
        stream.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        stream.write(data)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda m: (m / "config.json").write_text('{"layers": 3}'), id="config"),
        pytest.param(lambda m: _overwrite(m / "model.safetensors", 20, b"!"), id="header"),
        pytest.param(lambda m: _overwrite(m / "model.safetensors", -1, b"!"), id="last byte"),
        pytest.param(
            lambda m: _overwrite(m / "model.safetensors", 0, b"x" * 200_000), id="fine-tune"
        ),
        pytest.param(lambda m: os.truncate(m / "model.safetensors", 200_000), id="size"),
        pytest.param(
            lambda m: (m / "model.safetensors").rename(m / "other.safetensors"), id="name"
        ),
        pytest.param(lambda m: (m / "adapter.bin").write_bytes(b"1"), id="one more file"),
    ],
)
def test_any_change_of_the_model_shows(model: Path, change) -> None:
    before = weights_fingerprint(model, None)
    change(model)
    assert weights_fingerprint(model, None) != before


def test_revision_counts(model: Path) -> None:
    assert weights_fingerprint(model, "a") != weights_fingerprint(model, "b")


def test_empty_and_tiny_files_are_fine(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"")
    (tmp_path / "b.safetensors").write_bytes(struct.pack("<Q", 2**63))
    (tmp_path / "c.bin").write_bytes(b"x")
    assert weights_fingerprint(tmp_path, None)


def test_unreadable_folder_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="gone"):
        weights_fingerprint(tmp_path / "gone", None)
