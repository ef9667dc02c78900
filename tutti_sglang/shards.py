"""Which part of a model's KV one rank holds: the text for its namespace, and who saves.

Ranks whose pages of a pool are the same bytes have the same text and so share the pages; all
others differ in it. As SGLang 0.5.23 cuts a model up:

    tensor parallel     a pool with attention heads has those of its rank. Latent (MLA) pools are
                        alike on all ranks of a model whose KV pool is latent, and one rank saves.
                        Recurrent (Mamba) state is cut up by rank in every model, and the heads of
                        a draft model are cut up whatever the main model does.
    head groups         a page with the layout `page_head` may be stored as groups of heads, so that
                        servers of different tensor-parallel sizes share pages: `heads i/n`.
    pipeline parallel   the layers of the stage.
    context parallel    each rank has a slice of every page of its own.
    decode context      latent pages are dealt out by token: rank r of n has its part of each page.
    DP attention        the groups hold equal shards, and `tp_rank` counts within the group: nothing
                        of it is in the text, the groups share pages.

Pure: imports neither torch nor sglang.
Source     mem_cache/hicache_storage.py (HiCacheFile), managers/cache_controller.py
           (`_generate_storage_config`), mem_cache/hybrid_cache/hybrid_cache_controller.py
           (`should_backup`), mem_cache/storage/mooncake_store/mooncake_store.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Ranks:
    """Where one process stands among those that serve a model.

    tp_rank, tp_size    within the attention's tensor-parallel group.
    dcp_page_tokens     tokens of a page over all ranks of decode context parallelism; 0 without.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1
    dcp_page_tokens: int = 0

    @classmethod
    def of_config(cls, config: Any) -> Ranks:
        """The ranks in SGLang's HiCacheStorageConfig."""
        return cls(
            config.tp_rank,
            config.tp_size,
            config.pp_rank,
            config.pp_size,
            config.attn_cp_rank,
            config.attn_cp_size,
            config.dcp_rank,
            config.dcp_size,
            config.logical_page_size or 0,
        )


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """Group `index` of `count`, into which all attention heads of the model are divided evenly."""

    index: int
    count: int


def splits_heads(pool: Any) -> bool:
    """Whether a KV pool, of host or device, holds attention heads of its own rank only.

    By its class: SGLang's pools with heads all descend from these, and its latent ones do not.
    """
    names = {base.__name__ for base in type(pool).__mro__}
    return not names.isdisjoint(_POOLS_WITH_HEADS)


_POOLS_WITH_HEADS = {
    "MHATokenToKVPool",
    "MHATokenToKVPoolHost",
    "MHATokenToKOnlyPool",
    "MHATokenToKOnlyPoolHost",
}


def is_replicated(name: str, pool: Any, model_is_replicated: bool) -> bool:
    """Whether the pages of a pool are the same on all tensor-parallel ranks.

    Parameters
        name: of the pool, as SGLang's PoolName has it.
        model_is_replicated: whether the model's main KV pool is latent (`is_mla_model`).
    """
    return model_is_replicated and name != "mamba" and not splits_heads(pool)


def shard_text(
    ranks: Ranks,
    *,
    replicated: bool,
    layers: tuple[int, int] | None = None,
    heads: HeadGroup | None = None,
) -> str:
    """Return what stands in a namespace for the part of the model that its pages hold.

    Parameters
        replicated: see `is_replicated`.
        layers: first layer and the one after the last, where the pool tells them.
        heads: the group of heads, in place of the rank.
    """
    words = []
    if layers is not None:
        words.append(f"layers {layers[0]}-{layers[1]}")
    words.append(f"pp {ranks.pp_rank}/{ranks.pp_size}")
    if heads is not None:
        words.append(f"heads {heads.index}/{heads.count}")
    elif not replicated:
        words.append(f"tp {ranks.tp_rank}/{ranks.tp_size}")
    words.append(f"cp {ranks.cp_rank}/{ranks.cp_size}")
    if ranks.dcp_size > 1:
        words.append(f"dcp {ranks.dcp_rank}/{ranks.dcp_size} of tp {ranks.tp_size}")
        words.append(f"pages of {ranks.dcp_page_tokens} tokens")
    return ", ".join(words)


def writer_count(ranks: Ranks, *, replicated: bool, process_count: int) -> int:
    """Return how many processes of one node save into a store that all of them share.

    Parameters
        replicated: every pool is; then one rank a tensor-parallel group saves, or one for each rank
            of decode context parallelism.
        process_count: processes of the server on this node.
    """
    if not replicated:
        return max(process_count, 1)
    return max(process_count * ranks.dcp_size // ranks.tp_size, 1)
