"""Native parts of tutti: hashing, copies, the io_uring engine. Built from csrc/; may be absent."""

from typing import Any

import numpy as np
import numpy.typing as npt

QUEUE_DEPTH_MAX: int
TRANSFER_BYTES_MAX: int

def chain_keys(seed: bytes, tokens: npt.NDArray[np.uint32], page_tokens: int) -> bytes:
    """Hash a chain of token pages: h[0] = H(seed, page 0), h[i] = H(h[i-1], page i).

    H is XXH3-128 in canonical form, 16 bytes; tokens count as little-endian uint32. A last page
    that is not full is left out. Returns the len(tokens) // page_tokens keys side by side. GIL
    released.
    """

def record_keys(prefix: bytes, keys: bytes, width: int) -> bytes:
    """Hash each key of `width` bytes behind a prefix: XXH3-128(prefix, key), 16 bytes each."""

def checksum_items(
    fragment_start: npt.NDArray[np.uint32],
    address: npt.NDArray[np.uint64],
    length_bytes: npt.NDArray[np.uint64],
) -> npt.NDArray[np.uint64]:
    """XXH3-64 of the bytes of each item, laid out as in a `Batch`. GIL released."""

def copy_pieces(
    target: npt.NDArray[np.uint64],
    source: npt.NDArray[np.uint64],
    length_bytes: npt.NDArray[np.uint64],
) -> None:
    """Copy length_bytes[i] bytes from address source[i] to target[i]. GIL released."""

class UringEngine:
    """Several devices, each with a ring and a thread. Statuses are returned, not raised."""

    def __init__(
        self,
        paths: list[str],
        capacities: list[int],
        *,
        queue_depth: int,
        transfer_bytes_max: int,
        bounce_bytes: int,
        first_attempt_bytes: int = 0,
    ) -> None:
        """Open existing devices for direct I/O.

        `first_attempt_bytes` is for tests: above 0, every longer transfer completes short at first.

        Raises
            OSError: `errno` says why, `filename` where, `strerror` names the step: "open", "direct"
                (O_DIRECT is refused), "io_uring_setup", "bounce memory", "eventfd", "thread".
            ValueError: an option is out of bounds.
        """

    def submit(
        self,
        op: int,
        device: npt.NDArray[np.uint32],
        offset_bytes: npt.NDArray[np.uint64],
        fragment_start: npt.NDArray[np.uint32],
        address: npt.NDArray[np.uint64],
        length_bytes: npt.NDArray[np.uint64],
        checksum: bool,
    ) -> int:
        """Return a ticket, > 0; -EINVAL, -EBUSY, -ESHUTDOWN (closed), -ECHILD (forked child)."""

    def wait(
        self, ticket: int, timeout_s: float
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint64]] | int | None:
        """Return (status, checksum) by item, None at the deadline, -ENOENT or -ECHILD."""

    def flush(self, device: int) -> int:
        """Return 0 or a negative errno. `device` must be in range."""

    def replace_file(self, device: int, fd: int) -> int:
        """Use the file behind `fd` from now on; 0 or a negative errno. `fd` stays the caller's."""

    def register_memory(self, address: int, length_bytes: int) -> int:
        """Return a region id, > 0; -EINVAL, -ESHUTDOWN or -ECHILD."""

    def unregister_memory(self, region: int) -> int:
        """Return 0, -ENOENT or -ECHILD."""

    def stats(self) -> dict[str, Any]:
        """Counters, named as in `TransportStats`, and transfers, fixed_transfers, enters."""

    def grants(self) -> dict[str, object]:
        """What the kernel granted; see EngineGrants in csrc/include/tutti/uring_engine.h."""

    def close(self) -> None:
        """Finish what is in flight and let go of threads, rings and files. Idempotent."""
