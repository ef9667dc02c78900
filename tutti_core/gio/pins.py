"""Host memory that the GPU may reach, counted: rings on one controller share most of theirs.

A GPU reaches it at the address that the CPU uses. Registers of a device are mapped as I/O memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from tutti_core.errors import UnsupportedError

PORTABLE, MAPPED, IO_MEMORY = 1, 2, 4  # cudaHostRegister…

Range = tuple[int, int, str]
"""Address, bytes, and "memory" or "registers"."""


class Pins:
    """What this process has registered with CUDA, by address and length. Threads: any.

    Registering may wait for what GPUs do: callers have nothing in flight that waits for them.
    """

    def __init__(self) -> None:
        self._users: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()

    def take(self, runtime: Any, ranges: Iterable[Range]) -> list[Range]:
        """Register ranges, all or none; returns them.

        Raises
            UnsupportedError: CUDA refuses one, or sees it elsewhere.
        """
        taken: list[Range] = []
        try:
            for one in ranges:
                self._take(runtime, one)
                taken.append(one)
        except BaseException:
            self.give(runtime, taken)
            raise
        return taken

    def _take(self, runtime: Any, one: Range) -> None:
        address, length_bytes, kind = one
        key = (address, length_bytes)
        with self._lock:
            if not self._users.get(key, 0):
                _register(runtime, address, length_bytes, kind)
                seen = int(runtime.pointerGetAttributes(address).devicePointer)
                if seen != address:
                    runtime.hostUnregister(address)
                    raise UnsupportedError(
                        f"the GPU sees memory of {address:#x} at {seen:#x}", op="open"
                    )
            self._users[key] = self._users.get(key, 0) + 1

    def give(self, runtime: Any, ranges: Iterable[Range]) -> list[str]:
        """Take ranges back; what CUDA said of those that it would not let go."""
        wrong = []
        for address, length_bytes, _ in ranges:
            key = (address, length_bytes)
            with self._lock:
                self._users[key] -= 1
                if self._users[key]:
                    continue
                del self._users[key]
                try:
                    runtime.hostUnregister(address)
                except RuntimeError as error:
                    wrong.append(str(error))
        return wrong

    def __len__(self) -> int:
        with self._lock:
            return len(self._users)


def _register(runtime: Any, address: int, length_bytes: int, kind: str) -> None:
    """Registers first as what they are; those of a software controller are memory."""
    ways = [PORTABLE | MAPPED]
    if kind == "registers":
        ways.insert(0, PORTABLE | MAPPED | IO_MEMORY)
    said = []
    for flags in ways:
        try:
            runtime.hostRegister(address, length_bytes, flags)
            return
        except RuntimeError as error:
            said.append(f"{error} (flags {flags})")
    raise UnsupportedError(
        f"CUDA does not register {length_bytes} bytes of {kind} at {address:#x}: {'; '.join(said)}",
        op="open",
    )


PINS = Pins()
"""Of this process."""
