"""What a prefix store may answer, for property and crash tests; and pages that know their name.

The rule is the first goal of the design: a page comes back bit-exact or as a miss.

Cells of a page, 64 bytes each, little-endian; the last may be cut short:

    0   magic "TPG"     3
    3   key length      1
    4   cell index      4
    8   seed            8
    16  page length     8
    24  key            32   padded with zeros
    56  check           8   mix of XXH3-64 of bytes 8..55 and 3, and of the cell index
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import xxhash

CELL_BYTES = 64
KEY_BYTES_MAX = 32
_MAGIC = np.frombuffer(b"TPG", np.uint8)
_CELL = np.dtype(
    [
        ("magic", np.uint8, (3,)),
        ("key_length", np.uint8),
        ("index", "<u4"),
        ("seed", "<u8"),
        ("page_bytes", "<u8"),
        ("key", np.uint8, (KEY_BYTES_MAX,)),
        ("check", "<u8"),
    ]
)


def page_bytes(seed: int, key: bytes, length_bytes: int) -> bytes:
    """Return a page in which every 64 bytes name `key`, `seed` and their place in the page.

    `seed` tells two contents of one key, or two namespaces, apart: 0 <= seed < 2**64. A key has at
    most 32 bytes. Equal arguments give equal bytes.
    """
    if len(key) > KEY_BYTES_MAX:
        raise ValueError(f"a key of {len(key)} bytes does not fit; the most is {KEY_BYTES_MAX}")
    cells = np.zeros(-(-length_bytes // CELL_BYTES), _CELL)
    cells["magic"] = _MAGIC
    cells["key_length"] = len(key)
    cells["index"] = np.arange(len(cells), dtype=np.uint32)
    cells["seed"] = seed
    cells["page_bytes"] = length_bytes
    cells["key"][:, : len(key)] = np.frombuffer(key, np.uint8)
    cells["check"] = _mix(_head_digest(cells[0]) if len(cells) else 0, cells["index"])
    return cells.tobytes()[:length_bytes]


def explain(data: bytes | bytearray | memoryview) -> str:
    """Say in words whose bytes these are: which keys, which ranges, and where they are damaged.

    Bytes of a page that stand at another offset than they were made for are reported as moved.
    A last, partial cell is judged by what its page would have there; a page that is shorter than
    one cell cannot be named.
    """
    raw = bytes(data)
    if not raw:
        return "no bytes"
    runs = [*_runs([*_labels(raw), *_tail_label(raw)])]
    lines = []
    for first, last, label in runs:
        lines.append(f"bytes {first * CELL_BYTES}..{min(last * CELL_BYTES, len(raw))}: {label}")
    return "; ".join(lines)


def _head_digest(cell: np.void) -> int:
    """Digest of what all cells of one page have in common."""
    raw = cell.tobytes()
    return int(xxhash.xxh3_64_intdigest(raw[3:4] + raw[8:56]))


def _mix(digest: int, index: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    """The check of each cell: the finaliser of splitmix64 over digest + index, modulo 2**64."""
    z = index.astype(np.uint64) + np.uint64(digest)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _labels(raw: bytes) -> Iterator[str]:
    """Say for each whole cell what it holds."""
    cells = np.frombuffer(raw, _CELL, len(raw) // CELL_BYTES)
    for place, cell in enumerate(cells):
        yield _label(place, cell)


def _label(place: int, cell: np.void) -> str:
    raw = cell.tobytes()
    if raw == raw[:1] * CELL_BYTES:
        return "all zeros" if raw[0] == 0 else f"all {raw[0]:#04x}"
    index = np.array([cell["index"]], np.uint32)
    key_length = int(cell["key_length"])
    if (
        raw[:3] != b"TPG"
        or key_length > KEY_BYTES_MAX
        or int(_mix(_head_digest(cell), index)[0]) != int(cell["check"])
    ):
        return "damaged or foreign"
    shift = place - int(index[0])
    moved = f", moved by {shift * CELL_BYTES} bytes" if shift else ""
    key = cell["key"].tobytes()[:key_length].hex()
    return f"key {key} seed {int(cell['seed'])} of {int(cell['page_bytes'])} bytes{moved}"


def _tail_label(raw: bytes) -> Iterator[str]:
    """Say what the partial cell at the end holds, by the page that the cell before it names."""
    whole, rest = divmod(len(raw), CELL_BYTES)
    if not rest:
        return
    tail = raw[whole * CELL_BYTES :]
    if whole:
        before = np.frombuffer(raw, _CELL, 1, (whole - 1) * CELL_BYTES)[0]
        label = _label(whole - 1, before)
        if label.startswith("key "):
            key = before["key"].tobytes()[: int(before["key_length"])]
            page = page_bytes(int(before["seed"]), key, int(before["page_bytes"]))
            start = (int(before["index"]) + 1) * CELL_BYTES
            if page[start : start + rest] == tail:
                yield label
                return
    if tail == tail[:1] * rest:
        yield "all zeros" if tail[0] == 0 else f"all {tail[0]:#04x}"
    else:
        yield "damaged or foreign"


def _runs(labels: list[str]) -> Iterator[tuple[int, int, str]]:
    """Group equal neighbours: (first, one past the last, label)."""
    first = 0
    for place in range(1, len(labels) + 1):
        if place == len(labels) or labels[place] != labels[first]:
            yield first, place, labels[first]
            first = place


class Oracle:
    """Remembers every payload ever saved, and judges every answer.

    A save counts from the moment it is tried: whether it failed, was dropped or was cut short by a
    crash, later loads may return its payload or miss. `hits` and `misses` let a test see that it
    did not only collect misses. Threads: one.
    """

    def __init__(self) -> None:
        self._payloads: dict[tuple[bytes, bytes], list[bytes]] = {}
        self.hits = 0
        self.misses = 0

    def save(self, namespace: bytes, key: bytes, data: bytes | bytearray | memoryview) -> None:
        """Remember a payload. Call before the store is asked to save it."""
        payload = bytes(data)
        known = self._payloads.setdefault((namespace, key), [])
        if payload not in known:
            known.append(payload)

    def copy(self) -> Oracle:
        """Return an oracle that knows what this one knows now; its counts begin at 0."""
        other = Oracle()
        other._payloads = {name: list(known) for name, known in self._payloads.items()}
        return other

    def forget(self, namespace: bytes) -> None:
        """After a successful clear of a namespace: nothing saved before may come back."""
        for name in [name for name in self._payloads if name[0] == namespace]:
            del self._payloads[name]

    def keys(self, namespace: bytes) -> list[bytes]:
        """Return the keys ever saved in a namespace, in the order of their first save."""
        return [key for space, key in self._payloads if space == namespace]

    def payloads(self, namespace: bytes, key: bytes) -> list[bytes]:
        """Return all that was ever saved under a key and not forgotten, the oldest first."""
        return list(self._payloads.get((namespace, key), []))

    def check_load(
        self, namespace: bytes, key: bytes, data: bytes | bytearray | memoryview | None
    ) -> None:
        """Raise AssertionError unless `data` was saved under this name, or is None, a miss."""
        if data is None:
            self.misses += 1
            return
        payload = bytes(data)
        known = self._payloads.get((namespace, key), [])
        if payload in known:
            self.hits += 1
            return
        raise AssertionError(
            f"load of key {key.hex()} in namespace {namespace.hex()} returned {len(payload)} bytes "
            f"that were never saved there: {_compare(payload, known)}. They are: {explain(payload)}"
        )


def _compare(payload: bytes, known: list[bytes]) -> str:
    """Say how a wrong payload differs from the right one it resembles most."""
    if not known:
        return "nothing was ever saved under this key"
    same_length = [candidate for candidate in known if len(candidate) == len(payload)]
    if not same_length:
        return f"saved lengths are {sorted({len(candidate) for candidate in known})}"
    got = np.frombuffer(payload, np.uint8)
    differing = [np.flatnonzero(got != np.frombuffer(c, np.uint8)) for c in same_length]
    best = min(differing, key=len)
    return f"{len(best)} bytes differ, the first at {int(best[0])}"
