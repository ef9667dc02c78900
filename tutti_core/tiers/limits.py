"""What placement must keep to: the policy, what may be written, and the limits of namespaces.

Pure. A namespace with a share is guaranteed that much of the capacity, and may have more while the
others leave it: who has more than its share makes room first, and who has not makes room only for
its own pages. A namespace with a TTL loses what nobody used for that long.
"""

from __future__ import annotations

from dataclasses import dataclass

from tutti_core.errors import ConfigError
from tutti_core.policies.admission import Admission, Always, make_admission
from tutti_core.policies.base import NS_PER_S
from tutti_core.policies.budget import WriteBudget
from tutti_core.policies.choice import DEFAULT


@dataclass(frozen=True, slots=True)
class Rules:
    """How a store places pages; names as in `policies.choice` and `policies.admission`."""

    policy: str = DEFAULT
    admission: str = Always.name
    write_bytes_per_day: int | None = None

    def make_admission(self, capacity_pages: int) -> Admission:
        """The filter of one namespace."""
        return make_admission(self.admission, capacity_pages)

    def make_budget(self) -> WriteBudget:
        """The budget of the store; a new one, so that it holds across restarts."""
        return WriteBudget(self.write_bytes_per_day)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one namespace. They are this process's, and end with it.

    share   part of the capacity that others cannot take from it, 0 to 1.
    ttl_s   pages that were not used for so long count as gone; None: no limit.
    """

    share: float = 0.0
    ttl_s: float | None = None

    def check(self) -> None:
        """Raise ConfigError where a limit is impossible."""
        if not 0.0 <= self.share <= 1.0:
            raise ConfigError(f"share = {self.share} is not in 0 .. 1")
        if self.ttl_s is not None and not 0.0 < self.ttl_s < float("inf"):
            raise ConfigError(f"ttl_s = {self.ttl_s} is not a positive number of seconds")

    @property
    def ttl_ns(self) -> int | None:
        """The TTL in nanoseconds."""
        return None if self.ttl_s is None else int(self.ttl_s * NS_PER_S)
