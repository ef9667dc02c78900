"""The policies by name, and the one that is used where none is named."""

from __future__ import annotations

from tutti_core.errors import ConfigError, nearest
from tutti_core.policies.arc import Arc
from tutti_core.policies.base import Policy
from tutti_core.policies.gdsf import Gdsf
from tutti_core.policies.lru import Lru
from tutti_core.policies.lru_k import Lru2
from tutti_core.policies.reuse import Reuse
from tutti_core.policies.s3_fifo import S3Fifo
from tutti_core.policies.sieve import Sieve
from tutti_core.policies.slru import Slru
from tutti_core.policies.tiny_lfu import TinyLfu

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Reuse, Lru, Lru2, Slru, S3Fifo, Sieve, TinyLfu, Gdsf, Arc)
}

DEFAULT = Reuse.name
"""docs/policies.md has the reasons."""


def make_policy(name: str, capacity_pages: int, seed: int = 0) -> Policy:
    """Return a new policy for one tree.

    Raises
        ConfigError: there is none of that name.
    """
    policy = POLICIES.get(name)
    if policy is None:
        raise ConfigError(f"no policy is called {name!r}", hint=nearest(name, POLICIES))
    return policy(capacity_pages, seed)
