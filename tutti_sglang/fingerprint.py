"""Tells one set of weights from another under the same name, without reading all of it.

Two fine-tunes of one model have the same configuration and the same tensor names and shapes, so
besides names, sizes and headers a few blocks of each weight file are hashed.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
CONFIG_NAMES = {"config.json", "generation_config.json", "model.safetensors.index.json"}

_HEADER_MAX_BYTES = 64 << 20
_SAMPLES = 32
_SAMPLE_BYTES = 4096


def weights_fingerprint(folder: Path, revision: str | None) -> str:
    """Return 32 hexadecimal digits that change when the model in `folder` does.

    Covers configuration files, the revision, and of each weight file its name, its size, its
    header (safetensors) and 32 evenly spaced blocks of 4 KiB.

    Raises
        OSError: a file cannot be read.
    Cost       about 130 KiB read per weight file.
    """
    state = hashlib.sha256()
    for part in _parts(folder, revision):
        state.update(struct.pack("<Q", len(part)))
        state.update(part)
    return state.hexdigest()[:32]


def _parts(folder: Path, revision: str | None) -> Iterator[bytes]:
    yield (revision or "").encode()
    for path in sorted(folder.iterdir()):
        if path.name in CONFIG_NAMES:
            yield path.name.encode()
            yield path.read_bytes()
        elif path.suffix in WEIGHT_SUFFIXES:
            yield path.name.encode()
            yield from _samples(path)


def _samples(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        yield struct.pack("<Q", size)
        if path.suffix == ".safetensors" and size >= 8:
            (length,) = struct.unpack("<Q", stream.read(8))
            yield hashlib.sha256(stream.read(min(length, _HEADER_MAX_BYTES))).digest()
        for i in range(_SAMPLES):
            stream.seek(max(size - _SAMPLE_BYTES, 0) * i // (_SAMPLES - 1))
            yield stream.read(_SAMPLE_BYTES)
