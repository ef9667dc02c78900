"""HiCache's generic calls: pages as flat tensors, where the zero-copy interface is not selected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from tutti_core import NamespaceStore, PageFragments, PageKeys
from tutti_sglang.moves import Move, Mover

Result = TypeVar("Result")


class FlatCalls:
    """The generic calls of HiCacheStorage, for a class that has the members below.

    Their pages have the byte order of SGLang's flat tensors, so they have a namespace apart. SGLang
    passes no ancestors here; the chains are not known.
    """

    _flat: NamespaceStore | None
    _mover: Mover
    _logical: bool  # the KV pool holds no bytes: every page of it is there
    _answer: Callable[[str, Any, Callable[[], Any]], Any]
    batch_exists: Callable[[Sequence[str]], int]

    def exists(self, key: str) -> bool:
        """Whether one page is stored."""
        return self.batch_exists([key]) == 1

    def get(
        self, key: str, target_location: Any | None = None, target_sizes: Any | None = None
    ) -> torch.Tensor | None:
        """Load one flat page into `target_location`; None if it is missing."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self,
        keys: Sequence[str],
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> list[torch.Tensor | None]:
        """Load flat pages into the tensors given; None for each page that is missing."""
        targets = [] if target_locations is None else list(target_locations)
        loaded = self._answer("get", [False] * len(keys), lambda: self._get_flat(keys, targets))
        return [targets[i] if ok else None for i, ok in enumerate(loaded)]

    def set(
        self,
        key: str,
        value: Any | None = None,
        target_location: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Save one flat page."""
        return self.batch_set([key], [value])

    def batch_set(
        self,
        keys: Sequence[str],
        values: Any | None = None,
        target_locations: Any | None = None,
        target_sizes: Any | None = None,
    ) -> bool:
        """Save flat pages; True when all of them are stored."""
        tensors = [] if values is None else list(values)
        return all(self._answer("set", [False] * len(keys), lambda: self._set_flat(keys, tensors)))

    def _get_flat(self, keys: Sequence[str], targets: list[torch.Tensor]) -> list[bool]:
        if self._logical:
            return [True] * len(keys)
        loaded: list[bool] = self._mover.load([self._flat_move(keys, targets)])[0].tolist()
        return loaded

    def _set_flat(self, keys: Sequence[str], tensors: list[torch.Tensor]) -> list[bool]:
        if self._logical:
            return [True] * len(keys)
        move = self._flat_move(keys, [tensor.contiguous() for tensor in tensors])
        stored: list[bool] = self._mover.save([move])[0].tolist()
        return stored

    def _flat_move(self, keys: Sequence[str], tensors: list[torch.Tensor]) -> Move:
        assert self._flat is not None
        size = self._flat.namespace.page_bytes
        if len(tensors) != len(keys) or any(
            t.numel() * t.element_size() != size or not t.is_contiguous() for t in tensors
        ):
            raise ValueError(f"expected {len(keys)} contiguous pages of {size} bytes")
        address = np.array([[t.data_ptr()] for t in tensors], dtype=np.uint64)
        memory = PageFragments(address, np.array([size], dtype=np.uint64), tensors)
        return Move(self._flat, PageKeys.from_hex(keys, False), 0, memory)
