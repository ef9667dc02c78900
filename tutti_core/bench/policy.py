"""What placement costs the caller: index and default policy, on matched and on new pages."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from tutti_core.index.pages import NamespacePages
from tutti_core.policies.choice import DEFAULT
from tutti_core.replay.generate import generate, preset
from tutti_core.replay.simulate import Tier

CAPACITY_SHARE = 0.1
SESSIONS = 40
SEED = 1
_NS_PER_MS = 1_000_000

METHOD = (
    "touch_us_per_page, admit_us_per_page: a synthetic agent trace (`tutti trace generate --preset "
    "agent`) replayed through the index with the default policy and room for a tenth of its "
    "blocks. touch is the time of `match` over the pages found; admit is that of choosing victims, "
    "inserting and settling over the new pages. Both contain all of the index's own work.",
)


def measure_policy() -> dict[str, Any]:
    """Microseconds a page; nothing is read or written."""
    trace = generate(preset("agent"), SESSIONS, SEED)
    capacity = int(len(np.unique(trace.ids)) * CAPACITY_SHARE)
    tier = Tier(DEFAULT, capacity, SEED)
    pages: NamespacePages = tier.pages
    touch_s = admit_s = 0.0
    touched = admitted = now = 0
    requests = zip(trace.timestamp_ms.tolist(), trace.output_length.tolist(), strict=True)
    for i, (timestamp_ms, output_tokens) in enumerate(requests):
        now = max(now + 2, timestamp_ms * _NS_PER_MS)
        keys = trace.keys(i)
        start_s = time.perf_counter()
        hit = pages.match(keys, 0, now)
        middle_s = time.perf_counter()
        admitted += tier.save(keys, hit, output_tokens, now + 1)
        admit_s += time.perf_counter() - middle_s
        touch_s += middle_s - start_s
        touched += hit
    return {
        "touch_us_per_page": round(touch_s / max(touched, 1) * 1e6, 4),
        "admit_us_per_page": round(admit_s / max(admitted, 1) * 1e6, 4),
        "policy": DEFAULT,
        "policy_pages": {"capacity": capacity, "touched": touched, "admitted": admitted},
    }
