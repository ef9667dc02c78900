"""The benchmark's own use of the storage backend, which no server is there to notice."""

from __future__ import annotations

from pathlib import Path

import torch

from tutti_core.bench.index import PAGE_TOKENS, SGLANG_KEY_BYTES, _backend


def test_the_backend_that_is_timed_saves_and_finds_pages(tmp_path: Path) -> None:
    backend = _backend(tmp_path / "store", 4)
    try:
        keys = [bytes([i] * SGLANG_KEY_BYTES).hex() for i in range(4)]
        assert backend.batch_exists(keys) == 0
        assert backend.batch_set_v1(keys, torch.arange(4 * PAGE_TOKENS)) == [True] * 4
        assert backend.batch_exists(keys) == 4
    finally:
        backend.close()
