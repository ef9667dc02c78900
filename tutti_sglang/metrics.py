"""Pages and bandwidth of finished calls, kept until SGLang's collector asks for them."""

from __future__ import annotations

import threading
import time
from typing import Any

_CALLS_MAX = 1024


class CallMetrics:
    """Calls on KV pages since the last `take`; at most 1,024 of each kind. Threads: any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[str, list[tuple[int, float]]] = {"get": [], "set": []}

    def note(self, operation: str, pages: int, page_bytes: int, start_s: float) -> None:
        """A "get" or "set" of `pages` that began at `start_s` (perf_counter) ended now."""
        elapsed_s = max(time.perf_counter() - start_s, 1e-9)
        with self._lock:
            calls = self._calls[operation]
            calls.append((pages, pages * page_bytes / elapsed_s / 1e9))
            del calls[:-_CALLS_MAX]

    def take(self) -> Any:
        """Everything noted since the last call, as StorageMetrics (bandwidth in GB/s)."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            calls, self._calls = self._calls, {"get": [], "set": []}
        gets, sets = calls["get"], calls["set"]
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in gets],
            backup_pgs=[pages for pages, _ in sets],
            prefetch_bandwidth=[rate for _, rate in gets],
            backup_bandwidth=[rate for _, rate in sets],
        )
