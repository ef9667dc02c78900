"""Prefix chains with the shape of agent traffic, for filling an index without a model.

Sessions start from one of a few shared system prompts, grow by 10 to 60 pages a turn, and now and
then branch: a sub-agent, or a turn that is taken back. The radix tree of agent_dev.jsonl (78 real
sessions, 64-token pages) has 450 pages a node; BRANCH_SHARE gives about 36, which is harder on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

SYSTEM_PROMPTS = 8
SYSTEM_PAGES = (64, 200)
TURN_PAGES = (10, 60)
CHAIN_PAGES_MAX = 4096
_LIVE_SESSIONS = 32
_NEW_SESSION_SHARE = 0.01
BRANCH_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Turn:
    """New pages of one request: those from `first` on; `keys` is the packed chain to their end."""

    keys: bytes
    first: int


def agent_turns(
    generator: np.random.Generator,
    width: int,
    page_count: int,
    branch_share: float = BRANCH_SHARE,
) -> Iterator[Turn]:
    """Yield turns until exactly `page_count` pages were new; keys are `width` random bytes.

    `branch_share` of the turns leave their session somewhere in its second half.
    """
    prompts: list[bytearray] = []
    live: list[bytearray] = []
    left = page_count
    while left:
        dice = generator.random()
        if len(prompts) < SYSTEM_PROMPTS:
            chain, grow = bytearray(), int(generator.integers(*SYSTEM_PAGES))
            prompts.append(chain)
        elif not live or dice < _NEW_SESSION_SHARE:
            chain, grow = bytearray(prompts[generator.integers(len(prompts))]), 0
            live.append(chain)
        else:
            chain, grow = live[generator.integers(len(live))], 0
            if dice < _NEW_SESSION_SHARE + branch_share:
                pages = len(chain) // width
                chain = chain[: int(generator.integers(pages // 2, pages)) * width]
                live.append(chain)
        grow = min(grow or int(generator.integers(*TURN_PAGES)), left)
        first = len(chain) // width
        chain += generator.bytes(grow * width)
        left -= grow
        yield Turn(bytes(chain), first)
        live = [s for s in live[-_LIVE_SESSIONS:] if len(s) < CHAIN_PAGES_MAX * width]
