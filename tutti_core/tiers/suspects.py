"""Pages whose read failed, of which nobody knows yet whether they or their device are bad.

A read that fails for a reason that may lie with the device costs its page only if another read of
the device went well at the same time: one bad place, and not a device on its way out. Without such
a witness the page is hidden and keeps its record. It is offered again

    - once a read of the device has gone well, if only that of a probe; if it fails then, it was
      the page;
    - once the device, found unwell meanwhile, answers again.

So a page fails twice at most, and a device that dies takes no page with it. What is hidden takes up
its slot until then: at most as many pages as fail before the device counts as unwell.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from tutti_core.tiers.health import NOT_THE_DEVICE

SUSPECTS_MAX = 4096
"""Of each kind; pages beyond it are taken for bad at once."""

Mask = npt.NDArray[np.bool_]


class Suspects:
    """The suspects of one store, by generation. Threads: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hidden: dict[int, list[int]] = {}  # device -> generations
        self._warned: dict[int, None] = {}  # those that get no other chance, the latest last

    def sort(
        self,
        device: npt.NDArray[np.uint32],
        status: npt.NDArray[np.int32],
        generation: npt.NDArray[np.uint64],
    ) -> Mask:
        """Which pages of a read failed and are suspects from now on, to be hidden."""
        failed = (status != 0) & ~np.isin(status, NOT_THE_DEVICE)
        result = np.zeros(len(status), dtype=np.bool_)
        if not failed.any():
            return result
        failed &= ~np.isin(device, device[status == 0])
        with self._lock:
            room = SUSPECTS_MAX - sum(map(len, self._hidden.values()))
            for i in np.flatnonzero(failed).tolist():
                if room > 0 and int(generation[i]) not in self._warned:
                    self._hidden.setdefault(int(device[i]), []).append(int(generation[i]))
                    result[i] = True
                    room -= 1
        return result

    def witness(self, device: npt.NDArray[np.uint32], status: npt.NDArray[np.int32]) -> list[int]:
        """A read has ended: the pages that get another chance because of what went well in it."""
        if not self._hidden:
            return []
        well = set(device[status == 0].tolist())
        return [page for number in well for page in self.release(number, its_fault=False)]

    def release(self, device: int, *, its_fault: bool) -> list[int]:
        """A device answers: the pages that get another chance, and one only if it was well."""
        with self._lock:
            offered = self._hidden.pop(device, [])
            if not its_fault:
                self._warned.update(dict.fromkeys(offered))
                while len(self._warned) > SUSPECTS_MAX:
                    del self._warned[next(iter(self._warned))]
        return offered
