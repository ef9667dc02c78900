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

GIO_FRAGMENTS_MAX: int
GIO_DEPTH_MAX: int

class SoftController:
    """An NVMe controller in this process: one thread behind registers in memory.

    It goes on until every NvmeController on it is gone, after `close` too.
    """

    def __init__(
        self,
        *,
        namespace_bytes: int,
        namespace_count: int = 1,
        block_bytes: int = 512,
        transfer_shift: int = 7,
        queue_entries_max: int = 1024,
        queue_pairs_max: int = 64,
        sgl: bool = True,
        shadow_doorbells: bool = True,
        serial: str = "TUTTI-SOFT-1",
        files: list[int] = ...,
        null_backend: bool = False,
        cuda_library: str = "",
    ) -> None:
        """Start one. `transfer_shift`: MDTS, 4096 << n bytes a command, 0 for no limit.

        `files`: descriptors that stay the caller's, one for each namespace and at least that long;
        none: memory. `cuda_library`: "libcuda.so.1"; memory of the first GPU may then be registered
        too, and is copied to by the driver; without `files` alone.

        Raises
            ValueError: an option is out of bounds. OSError: no memory, no thread, or no GPU.
        """

    def inject(
        self,
        kind: str,
        *,
        queue: int = 0,
        opcode: int = -1,
        skip: int = 0,
        count: int = 1,
        status: int = 0,
        turns: int = 0,
    ) -> None:
        """Let `count` I/O commands go wrong, after `skip` that fit; see csrc's nvme_soft.h.

        kind: status, drop, lose, delay, hold, repeat, torn, wrong_id, wrong_queue, wrong_head,
        short, flip, fatal, gone. Raises ValueError for another one.
        """

    def clear_faults(self) -> None: ...
    def release(self) -> None:
        """Serve what is held."""

    def plug_in(self) -> None:
        """Bring the device back after "gone"."""

    def stats(self) -> dict[str, int]:
        """commands, faults, bad_pointers, unmapped, doorbells."""

    def media(self, nsid: int) -> npt.NDArray[np.uint8]:
        """The bytes of a namespace that lies in memory."""

    def close(self) -> None: ...

class NvmeController:
    """One open NVMe controller, with the memory it may reach. Any thread; the GIL is released."""

    def __init__(
        self,
        device: SoftController | str,
        *,
        access: str = "soft",
        queue_pairs: int = 1,
        queue_entries: int = 256,
        commands_max: int = 0,
        shadow_doorbells: bool = True,
        admin_timeout_s: float = 10.0,
    ) -> None:
        """Reset a device and make its queues; fewer, or shorter ones, where it has no more.

        device: a SoftController, or with access "vfio" or "sysfs" the address of a PCI function.

        Raises
            OSError: with words for people.
        """

    def facts(self) -> dict[str, Any]:
        """What the controller says of itself, and what it gave."""

    def stats(self) -> dict[str, int]:
        """Of all queues: completions, unknown, bad_head, late; sq_ and cq_ doorbells, elided."""

    def dead(self) -> bool:
        """Registers are all ones, or the controller says that it failed."""

    def reset(self) -> None:
        """Reset the device and make its queues anew. Nothing may be in flight. Raises OSError."""

    def abort(self, queue: int, command_id: int) -> bool:
        """Ask for a command's abortion. Raises OSError."""

    def register_memory(self, address: int, length_bytes: int) -> int:
        """Let the device reach whole pages; an id, or a negative errno."""

    def unregister_memory(self, region: int) -> int:
        """0; -ENOENT; -EBUSY while an IOCB uses it, or one that timed out did, until a reset."""

    def flush(self, nsid: int, timeout_s: float) -> int:
        """Make what was written durable. 0 or an NVMe status."""

    def read(
        self, nsid: int, offset_bytes: int, buffer: npt.NDArray[np.uint8], timeout_s: float
    ) -> int:
        """Read whole blocks, by way of a small buffer. 0 or an NVMe status."""

    def write(
        self, nsid: int, offset_bytes: int, buffer: npt.NDArray[np.uint8], timeout_s: float
    ) -> int:
        """Write whole blocks, by way of a small buffer. 0 or an NVMe status."""

    def shared_ranges(self) -> list[tuple[int, int, str]]:
        """Address, bytes and "memory" or "registers" of all that threads in the queues touch."""

    def close(self) -> None:
        """Shut the device down. What is in flight ends. Idempotent."""

class GioRing:
    """A ring of IOCBs (gio_uring, paper section 3.2) over namespaces of open controllers."""

    def __init__(
        self,
        devices: list[tuple[NvmeController, int]],
        *,
        depth: int,
        threads: int,
        timeout_s: float,
    ) -> None:
        """Make one of `depth` IOCBs; devices are controller and namespace.

        threads: of the CPU executor; 0: launches are the caller's matter, see `launch`; each
            controller then needs two pairs of queues, of which one is the CPU's.
        timeout_s: of each launch.

        Raises
            OSError: with words for people.
        """

    def get_iocb(self, count: int) -> list[int]:
        """Take IOCBs; none where fewer are free."""

    def put_back(self, iocb: int) -> int:
        """Give one back that was not issued. 0 or -EINVAL."""

    def prepare(
        self,
        iocb: int,
        op: int,
        device: npt.NDArray[np.uint32],
        offset_bytes: npt.NDArray[np.uint64],
        address: npt.NDArray[np.uint64],
        length_bytes: npt.NDArray[np.uint64],
    ) -> int:
        """Fill an IOCB with at most GIO_FRAGMENTS_MAX fragments; op 0 reads, 1 writes.

        What cannot be sent has its status already. 0, or -EINVAL for arrays that do not fit.
        """

    def issue_io(self, iocbs: npt.NDArray[np.uint32], sms: int) -> int:
        """Send IOCBs by one launch, on so many threads or SMs at most. 0 or a negative errno.

        -EBUSY: a device of theirs is being reset; -ESHUTDOWN: closed; -EINVAL: not prepared.
        Nothing was sent then.
        """

    def launch(self) -> bytes:
        """The last launch, as the kernel's argument. For the thread that issued it."""

    def refuse(self, iocbs: npt.NDArray[np.uint32]) -> int:
        """The launch of issued IOCBs failed, or its lanes are gone. 0 or -EINVAL."""

    def wait_cqe(self, iocb: int, timeout_s: float) -> npt.NDArray[np.uint32] | None:
        """NVMe statuses of an IOCB's fragments, which frees it; None: not yet.

        Raises
            OSError: it was not issued.
        """

    def reset_device(self, device: int, timeout_s: float) -> None:
        """Wait for the launches that touch a device, then reset its controller.

        Launches for other devices go on meanwhile. Raises OSError.
        """

    def view_address(self) -> int:
        """Address of what a kernel gets to see of the ring."""

    def shared_ranges(self) -> list[tuple[int, int, str]]:
        """As of NvmeController, with the ring's own and its controllers'."""

    def shared_version(self) -> int:
        """Another number whenever `shared_ranges` may say something else than before."""

    def stats(self) -> dict[str, int]: ...
    def close(self) -> None:
        """Take nothing more, and wait for what was issued; launches have a timeout. Idempotent."""
