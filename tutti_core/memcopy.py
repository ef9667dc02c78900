"""Copies whole batches of memory pieces with the GIL released; native where the extension is there.

One of the few modules that import the native extension. Without it the same is done piece by piece
with memmove, which costs about a microsecond of Python a piece.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

try:
    from tutti_core import _native
except ImportError:  # built without liburing or xxhash headers
    _native = None  # type: ignore[assignment, unused-ignore]

U64 = npt.NDArray[np.uint64]


def copy_pieces(target: U64, source: U64, length_bytes: U64) -> None:
    """Copy length_bytes[i] bytes from address source[i] to address target[i].

    Parameters
        target, source, length_bytes: uint64, C-contiguous, one entry a piece; any alignment.
    The caller keeps all of the memory mapped. Targets overlap neither one another nor a source.

    Raises
        ValueError: the arrays differ in length.
    """
    if not len(target) == len(source) == len(length_bytes):
        raise ValueError("the arrays have different lengths")
    if _native is not None:
        _native.copy_pieces(target, source, length_bytes)
        return
    for to, start, length in zip(
        target.tolist(), source.tolist(), length_bytes.tolist(), strict=True
    ):
        ctypes.memmove(to, start, length)
