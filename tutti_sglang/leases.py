"""What a look-up has reported and must stay readable until its load: held pages, within bounds.

The engine may drop a request between look-up and load without a word, so a lease ends by itself.
Bounds: LEASES_MAX leases, LEASE_S seconds each (a new look-up of the same request begins anew), and
together `bytes_max` bytes of pages, counted once for each lease; the oldest go first. Only the
latest lease may be larger than that alone. Leases that a load has taken over are not counted here:
they end with the load.

Pure but for the holds. Time is passed in.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tutti_sglang.chain import Chain

LEASES_MAX = 1024
LEASE_S = 60.0
REUSE_S = 2.0
"""How long the answer of a look-up stands for the same request. The engine asks again at each step
while a request waits, and those are not new uses of the pages."""


class Held(Protocol):
    """Pages that stay where they are until they are released."""

    def release(self) -> None:
        """Let them go. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Lease:
    """The pages of one look-up.

    chain         what was asked for.
    lengths       what was answered.
    holds         keep the pages.
    length_bytes  of the held pages.
    made_s        when.
    """

    chain: Chain
    lengths: tuple[int, ...]
    holds: Sequence[Held]
    length_bytes: int
    made_s: float

    def release(self) -> None:
        """Let the pages go. Idempotent."""
        for hold in self.holds:
            hold.release()


class Leases:
    """The leases that no load has taken over yet. Threads: any."""

    def __init__(self, bytes_max: int, count_max: int = LEASES_MAX, age_s: float = LEASE_S) -> None:
        self._bytes_max = bytes_max
        self._count_max = count_max
        self._age_s = age_s
        self._lock = threading.Lock()
        self._leases: OrderedDict[str, tuple[float, Lease]] = OrderedDict()  # oldest first
        self._length_bytes = 0
        self._trusted_from_s = float("-inf")

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def length_bytes(self) -> int:
        """Bytes of the pages held here, those of several leases counted several times."""
        return self._length_bytes

    def put(self, rid: str, lease: Lease) -> None:
        """Keep the lease of a request, in place of its former one."""
        with self._lock:
            ended = self._pop(rid)
            self._leases[rid] = (lease.made_s + self._age_s, lease)
            self._length_bytes += lease.length_bytes
            while len(self._leases) > 1 and (
                len(self._leases) > self._count_max or self._length_bytes > self._bytes_max
            ):
                ended += self._pop(next(iter(self._leases)))
        _release(ended)

    def renew(self, rid: str, first: int, tail: Sequence[str], now_s: float) -> Lease | None:
        """The lease of a request that asks for the same pages again so soon; it begins anew."""
        with self._lock:
            _, lease = self._leases.get(rid, (0.0, None))
            if lease is None or now_s - lease.made_s > REUSE_S:
                return None
            if lease.made_s <= self._trusted_from_s:
                return None
            if lease.chain.first != first or lease.chain.tail != tuple(tail):
                return None
            self._leases[rid] = (now_s + self._age_s, lease)
            self._leases.move_to_end(rid)
            return lease

    def distrust(self, now_s: float) -> None:
        """Pages turned out to be unreadable: answers given until now are not given again."""
        with self._lock:
            self._trusted_from_s = now_s

    def take(self, rid: str) -> Lease | None:
        """Hand the lease of a request over; the caller releases it."""
        with self._lock:
            taken = self._pop(rid)
        return taken[0] if taken else None

    def sweep(self, now_s: float) -> None:
        """End what is too old."""
        ended: list[Lease] = []
        with self._lock:
            while self._leases:
                rid, (expires_s, _) = next(iter(self._leases.items()))
                if expires_s > now_s:
                    break
                ended += self._pop(rid)
        _release(ended)

    def clear(self) -> None:
        """End all of them."""
        with self._lock:
            ended = [lease for _, lease in self._leases.values()]
            self._leases.clear()
            self._length_bytes = 0
        _release(ended)

    def _pop(self, rid: str) -> list[Lease]:
        found = self._leases.pop(rid, None)
        if found is None:
            return []
        self._length_bytes -= found[1].length_bytes
        return [found[1]]


def _release(leases: Sequence[Lease]) -> None:
    for lease in leases:
        lease.release()
