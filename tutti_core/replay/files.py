"""Lines of files that may be compressed, and of standard input and output.

What a file is compressed with is told from its first bytes when it is read, and from the end of its
name when it is written.
"""

from __future__ import annotations

import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any, cast

from tutti_core.errors import ConfigError

Progress = Callable[[int, int], None]
"""Called with the bytes of the file read so far, compressed as they are, and its size or 0."""

_PROGRESS_LINES = 64
_BUFFER_BYTES = 1 << 18
_GZIP, _XZ, _ZSTD = b"\x1f\x8b", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"
_DAMAGED = (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile)


class _Counted(io.RawIOBase):
    """A byte stream that knows how much of it was read."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.count_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        self.count_bytes += len(data)
        return len(data)


@contextmanager
def opened_lines(source: Path | str, progress: Progress | None = None) -> Iterator[Iterator[bytes]]:
    """The lines of a file, or of standard input (`-`), decompressed.

    Raises
        ConfigError: it cannot be read, is damaged, or needs a package that is not there; while the
            lines are read, too.
    """
    with ExitStack() as stack:
        try:
            if str(source) == "-":
                file, size_bytes = sys.stdin.buffer, 0
            else:
                file = stack.enter_context(open(source, "rb"))
                size_bytes = Path(source).stat().st_size
            counted = _Counted(file)
            buffered = io.BufferedReader(counted, _BUFFER_BYTES)
            yield _with_progress(_decompressed(buffered), counted, size_bytes, progress)
        except _DAMAGED as error:
            raise ConfigError(f"trace = {str(source)!r} is damaged: {error}") from None
        except OSError as error:
            why = error.strerror or str(error)
            raise ConfigError(f"trace = {str(source)!r} cannot be read: {why}") from None


def _with_progress(
    lines: Iterable[bytes], counted: _Counted, size_bytes: int, progress: Progress | None
) -> Iterator[bytes]:
    for number, line in enumerate(lines):
        if progress and number % _PROGRESS_LINES == 0:
            progress(counted.count_bytes, size_bytes)
        yield line
    if progress:
        progress(counted.count_bytes, size_bytes)


def _decompressed(stream: io.BufferedReader[Any]) -> Iterable[bytes]:
    start = stream.peek(len(_XZ))
    if start.startswith(_GZIP):
        return gzip.GzipFile(fileobj=stream)
    if start.startswith(_XZ):
        return lzma.LZMAFile(stream)
    if start.startswith(_ZSTD):
        reader = _zstandard().ZstdDecompressor().stream_reader(stream, read_across_frames=True)
        return io.BufferedReader(reader, _BUFFER_BYTES)
    return stream


def _zstandard() -> Any:
    try:
        return import_module("zstandard")
    except ImportError:
        raise ConfigError(
            "a trace compressed with zstd needs the package zstandard",
            hint="pip install zstandard, or decompress the file: zstd -d",
        ) from None


def written_lines(target: Path | str, lines: Iterable[bytes]) -> None:
    """Write lines to a file or to standard output (`-`); a name in .gz or .xz is compressed.

    Raises
        ConfigError: the name asks for a compression that is read only.
    """
    if str(target) == "-":
        sys.stdout.buffer.writelines(lines)
        sys.stdout.buffer.flush()
        return
    suffix = Path(target).suffix
    if suffix == ".zst":
        raise ConfigError(f"{str(target)!r}: zstd is read, not written", hint="name it .gz or .xz")
    if suffix == ".gz":
        file = cast(IO[bytes], gzip.open(target, "wb"))
    elif suffix == ".xz":
        file = cast(IO[bytes], lzma.open(target, "wb"))
    else:
        file = open(target, "wb")
    with file:
        file.writelines(lines)
