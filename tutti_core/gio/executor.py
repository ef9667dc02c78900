"""Who runs the lanes of a ring's launches: CPU threads of the ring's own, or a GPU.

Both run the same source (csrc/include/tutti/gio_run.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tutti_core._native import GioRing


class Executor(Protocol):
    """Runs the lanes of launches, for any number of rings.

    name      "cpu" or "cuda".
    threads   of each ring itself; 0: `launch` is called for every issue.
    lanes     of a launch at most, by default: CPU threads, or SMs of a GPU.
    """

    @property
    def name(self) -> str:
        """ "cpu" or "cuda"."""
        ...

    @property
    def threads(self) -> int:
        """CPU threads of each ring; 0 where `launch` has to be called."""
        ...

    @property
    def lanes(self) -> int:
        """At most, of a launch."""
        ...

    def attach(self, ring: GioRing) -> None:
        """Called once for each ring, before its first launch. Raises UnsupportedError."""
        ...

    def launch(self, ring: GioRing, sms: int = 0, after: Sequence[int] = ()) -> None:
        """Start the ring's last launch, on at most `sms` SMs (0: `lanes`), after CUDA events.

        Called by the thread that issued it. Raises RuntimeError where nothing was started.
        """
        ...

    def lost(self, ring: GioRing) -> bool:
        """Whether no lane of the ring runs, or will. An IOCB that has not ended then never does."""
        ...

    def detach(self, ring: GioRing) -> None:
        """Called once for each ring, after its `close`. Waits for launches; they end in time."""
        ...


@dataclass(frozen=True, slots=True)
class CpuExecutor:
    """CPU threads in the place of a GPU's; they belong to the ring, which starts and ends them."""

    threads: int = 1
    lanes: int = 1
    name: str = "cpu"

    def attach(self, ring: GioRing) -> None:
        """Nothing to do."""

    def launch(self, ring: GioRing, sms: int = 0, after: Sequence[int] = ()) -> None:
        """The ring has started it. CUDA events are nothing that CPU threads wait for."""
        if after:
            raise RuntimeError("CPU threads do not wait for CUDA events")

    def lost(self, ring: GioRing) -> bool:
        """Never: every launch of a CPU thread ends."""
        return False

    def detach(self, ring: GioRing) -> None:
        """Nothing to do."""
