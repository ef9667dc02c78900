"""One pool of the engine and where its pages are in the store: its namespaces.

A pool has one namespace; a KV pool whose pages are stored as groups of attention heads has one for
each group, and then a page is stored if all of its groups are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tutti_core import (
    ConfigError,
    Namespace,
    NamespaceStore,
    PageKeys,
    PrefixStore,
    UnsupportedError,
)
from tutti_sglang.identity import ModelIdentity
from tutti_sglang.moves import Move
from tutti_sglang.pools import HostPoolPages, describe_pool
from tutti_sglang.shards import HeadGroup, Ranks, shard_text

KEY_BYTES = 32  # SGLang's page keys are SHA-256

_GEOMETRY = (
    "layer_num", "head_dim", "v_head_dim", "kv_cache_dim",
    "num_mamba_layers", "temporal_state_shape", "temporal_dtype", "conv_state_shapes", "conv_dtype",
    "item_bytes", "ring_size", "indexer_dtype", "row_bytes",
)  # fmt: skip
"""What SGLang's host pools say of the shape of their pages; those that are missing are None."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Who is served: the model, and the draft model of speculative decoding if there is one."""

    identity: ModelIdentity
    draft: str = ""


@dataclass(frozen=True, slots=True)
class PoolPages:
    """A pool that was measured and can be stored; nothing is open yet.

    name        as SGLang's PoolName has it.
    replicated  its pages are the same on all tensor-parallel ranks.
    groups      where its pages lie, a group of heads each; one of them where heads are not split.
    heads       which groups of the model's heads these are; empty where heads are not split.
    """

    name: str
    pool: Any
    replicated: bool
    pages: HostPoolPages
    groups: tuple[HostPoolPages, ...]
    heads: tuple[HeadGroup, ...] = ()

    @classmethod
    def measure(
        cls, name: str, pool: Any, *, replicated: bool, heads: Sequence[HeadGroup] = ()
    ) -> PoolPages:
        """Measure a host pool.

        Raises
            UnsupportedError: names the pool and what about it cannot be stored.
        """
        if len(heads) < 2:
            pages = describe_pool(pool, name)
            return cls(name, pool, replicated, pages, (pages,), tuple(heads))
        if int(pool.head_num) % len(heads):
            raise UnsupportedError(
                f"pool {name!r}: {pool.head_num} heads of a rank do not split into {len(heads)}",
                hint="choose a tp_lcm_size that the number of KV heads is a multiple of",
            )
        pages = describe_pool(pool, name, head_groups=len(heads))
        groups = tuple(pages.groups(len(heads)))
        return cls(name, pool, replicated, pages, groups, tuple(heads))

    def open(self, store: PrefixStore, model: ServedModel, ranks: Ranks) -> StoredPool:
        """Open the pool's namespaces and announce its memory.

        Raises
            ConfigError: names the pool whose pages are larger than the store can take.
        """
        fields = [self._namespace(group, number, model, ranks) for number, group in self._numbered]
        try:
            namespaces = [store.namespace(namespace) for namespace in fields]
        except ConfigError as error:
            raise ConfigError(f"pool {self.name!r}: {error}") from error
        for region in self.pages.regions:
            store.register(region)
        return StoredPool(self, namespaces)

    def flat_namespace(self, model: ServedModel, ranks: Ranks) -> Namespace:
        """The namespace of pages that move as flat tensors, in another byte order."""
        layout = f"{self.pages.layout}, flat"
        return self._namespace(self.pages, None, model, ranks, layout=layout)

    @property
    def _holds_draft(self) -> bool:
        """Whether there is KV of a draft model in the pages: all of it, or layers at their end."""
        packed = getattr(self.pool, "mtp_draft_buffer_infos", ())
        layers = getattr(self.pool, "layer_num", None)
        return (
            self.name.startswith("draft")
            or bool(packed)
            or getattr(self.pool, "target_layer_num", layers) != layers
        )

    @property
    def _numbered(self) -> list[tuple[int | None, HostPoolPages]]:
        return [(i if self.heads else None, group) for i, group in enumerate(self.groups)]

    def _namespace(
        self,
        pages: HostPoolPages,
        group: int | None,
        model: ServedModel,
        ranks: Ranks,
        layout: str = "",
    ) -> Namespace:
        pool = self.pool
        first, end = getattr(pool, "start_layer", None), getattr(pool, "end_layer", None)
        head_num = getattr(pool, "head_num", None)
        if group is not None and head_num is not None:
            head_num //= len(self.heads)
        lengths, counts = np.unique(pages.length_bytes, return_counts=True)
        extra = {name: str(getattr(pool, name, None)) for name in _GEOMETRY}
        extra["head_num"] = str(head_num)
        extra["storage_format_tag"] = str(getattr(pool, "storage_format_tag", None))
        if self._holds_draft:
            extra["draft"] = model.draft
        pieces = zip(counts, lengths, strict=True)
        extra["pieces"] = ", ".join(f"{count} of {length}" for count, length in pieces)
        return Namespace(
            model=model.identity.name,
            weights=model.identity.weights,
            extra={**model.identity.extra, **extra},
            dtype=str(pool.dtype),
            page_tokens=pages.page_tokens,
            page_bytes=pages.page_bytes,
            layout=layout or pages.layout,
            shard=shard_text(
                ranks,
                replicated=self.replicated,
                layers=None if first is None or end is None else (first, end),
                heads=None if group is None else self.heads[group],
            ),
            pool=f"{self.name} {type(pool).__name__}",
            key_bytes=KEY_BYTES,
        )


class StoredPool:
    """The stored pages of one pool. Threads: any."""

    def __init__(self, measured: PoolPages, namespaces: Sequence[NamespaceStore]) -> None:
        self.measured = measured
        self._namespaces = tuple(namespaces)

    @property
    def pages(self) -> HostPoolPages:
        """Where the pool's pages lie."""
        return self.measured.pages

    def match(self, chain: PageKeys, first: int) -> int:
        """How many pages from `first` on are stored without a gap; a use of them."""
        return min(namespace.match(chain, first).pages for namespace in self._namespaces)

    def contains(self, chain: PageKeys, first: int) -> npt.NDArray[np.bool_]:
        """One bool a page from `first` on: whether it is stored."""
        found = [namespace.contains(chain, first) for namespace in self._namespaces]
        return np.asarray(np.logical_and.reduce(found))

    def moves(self, chain: PageKeys, first: int, host_indices: torch.Tensor) -> list[Move]:
        """What moves the pages from `first` on between these slots and the store.

        Raises
            ValueError: the slots are not as many whole pages of the pool.
        """
        wanted = (len(chain) - first) * self.pages.page_tokens
        if host_indices.numel() != wanted:
            raise ValueError(
                f"{host_indices.numel()} slots of pool {self.measured.name!r} for "
                f"{len(chain) - first} pages of {self.pages.page_tokens}"
            )
        groups = zip(self._namespaces, self.measured.groups, strict=True)
        return [Move(ns, chain, first, group.fragments(host_indices)) for ns, group in groups]

    def clear(self) -> int:
        """Remove all pages of the pool; returns how many there were."""
        return max(namespace.clear() for namespace in self._namespaces)
