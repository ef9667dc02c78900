"""The policies by name, and the one that is used where none is named."""

from __future__ import annotations

from tutti_core.errors import ConfigError, nearest
from tutti_core.policies.base import Policy
from tutti_core.policies.lru import Lru
from tutti_core.policies.lru_k import Lru2

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (Lru, Lru2)}

DEFAULT = Lru.name


def make_policy(name: str, capacity_pages: int, seed: int = 0) -> Policy:
    """Return a new policy for one tree.

    Raises
        ConfigError: there is none of that name.
    """
    policy = POLICIES.get(name)
    if policy is None:
        raise ConfigError(f"no policy is called {name!r}", hint=nearest(name, POLICIES))
    return policy(capacity_pages, seed)
