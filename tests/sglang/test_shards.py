"""Which ranks share pages, who saves, and pages shared across tensor-parallel sizes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang_cpu.host_pools import fill, make, page_bytes, slots
from sglang_cpu.matrix import default_model
from v2_kit import attach, chain, prefix, storage_config, transfer

from tutti_core import UnsupportedError
from tutti_sglang import identity
from tutti_sglang.backend import TuttiStorage
from tutti_sglang.options import RANK_DRAFTS
from tutti_sglang.shards import (
    HeadGroup,
    Ranks,
    is_replicated,
    shard_text,
    splits_heads,
    writer_count,
)

PAGES = [0, 1, 2]
MLA = {"is_mla_model": True}
DCP = {"is_mla_model": True, "tp_size": 4, "dcp_size": 2, "logical_page_size": 32}


def rank(tp_rank: int = 0, tp_size: int = 1, **others: Any) -> dict[str, Any]:
    return {"tp_rank": tp_rank, "tp_size": tp_size, **others}


# (kind of the main pool, configuration of the rank that saves, of the one that looks, shared)
RANKS = {
    "mha, the same rank": ("mha", rank(1, 2), rank(1, 2), True),
    "mha, another tp rank": ("mha", rank(0, 2), rank(1, 2), False),
    "mha, another tp size": ("mha", rank(0, 1), rank(0, 2), False),
    "mha, another pp rank": ("mha", rank(pp_size=2), rank(pp_size=2, pp_rank=1), False),
    "mha, another cp rank": (
        "mha",
        rank(attn_cp_size=2),
        rank(attn_cp_size=2, attn_cp_rank=1),
        False,
    ),
    "mha, another dp rank": ("mha", rank(0, 2), rank(0, 2, dp_rank=1), True),
    "mla, another tp rank": ("mla", rank(0, 2, **MLA), rank(1, 2, **MLA), True),
    "mla, another tp size": ("mla", rank(0, 1, **MLA), rank(3, 8, **MLA), True),
    "mla, another pp rank": (
        "mla",
        rank(**MLA, pp_size=2),
        rank(**MLA, pp_size=2, pp_rank=1),
        False,
    ),
    "mla, another cp rank": (
        "mla",
        rank(**MLA, attn_cp_size=2),
        rank(**MLA, attn_cp_size=2, attn_cp_rank=1),
        False,
    ),
    "mla, another dp rank": ("mla", rank(0, 2, **MLA), rank(1, 2, **MLA, dp_rank=3), True),
    "dcp, the rank of another group": (
        "mla_dcp",
        rank(0, **DCP | {"tp_size": 4}),
        rank(2, **DCP | {"tp_size": 4}),
        True,
    ),
    "dcp, another rank": ("mla_dcp", rank(0, **DCP), rank(1, **DCP, dcp_rank=1), False),
    "dcp, another size": (
        "mla_dcp",
        rank(0, **DCP),
        rank(0, **DCP | {"dcp_size": 4}),
        False,
    ),
    "dcp, another page": (
        "mla_dcp",
        rank(0, **DCP),
        rank(0, **DCP | {"logical_page_size": 64}),
        False,
    ),
    "dcp, another tp size": ("mla_dcp", rank(0, **DCP), rank(0, **DCP | {"tp_size": 2}), False),
}


@pytest.mark.parametrize("case", RANKS, ids=str)
def test_ranks_share_pages_exactly_where_they_are_the_same(case: str, store_folder: Path) -> None:
    kind, saves, looks, shared = RANKS[case]
    pool, keys = make(kind, "page_first"), chain(3)
    writer = attach(store_folder, {"kv": pool}, **saves)
    fill(pool, 1)
    before = [page_bytes(pool, p) for p in PAGES]
    assert writer.batch_set_v1(keys, slots(pool, PAGES), prefix([])) == [True] * 3
    other = make(kind, "page_first")
    reader = attach(store_folder, {"kv": other}, **looks)
    assert reader.batch_exists(keys) == (3 if shared else 0)
    assert reader.batch_get_v1(keys, slots(other, [5, 4, 8]), prefix([])) == [shared] * 3
    if shared:
        assert [page_bytes(other, p) for p in (5, 4, 8)] == before
    writer.close()
    reader.close()


@pytest.mark.parametrize(
    ("name", "kind", "shared"),
    [
        ("mamba", "mamba", False),
        ("draft", "mha", False),
        ("draft_swa", "mha", False),
        ("draft", "mla", True),
        ("indexer", "dsa_indexer", True),
        ("swa", "v4_paged", True),
        ("deepseek_v4_c4_state", "v4_state", True),
    ],
)
def test_pools_beside_a_latent_one(name: str, kind: str, shared: bool, store_folder: Path) -> None:
    """Latent pools are alike on all ranks; recurrent state and heads of a draft are not."""
    keys = chain(3)
    ranks = []
    for tp_rank in range(2):
        pools = {"kv": make("mla", "page_first"), name: make(kind, "page_first")}
        ranks.append((attach(store_folder, pools, **rank(tp_rank, 2, **MLA)), pools))
    (first, pools), (second, others) = ranks
    kv = slots(pools["kv"], PAGES)
    assert all(first.batch_set_v1(keys, kv, prefix([])))
    assert second.batch_exists(keys) == 3
    asked = transfer(name, pools[name], keys, PAGES)
    assert all(first.batch_set_v2([asked], prefix([]))[name])
    there = transfer(name, others[name], keys, PAGES)
    assert second.batch_exists_v2(keys, [there]).kv_hit_pages == (3 if shared else 0)
    assert second.batch_set_v2([there], prefix([]))[name] == [True] * 3, "and cheap if shared"
    assert second.batch_exists_v2(keys, [there]).kv_hit_pages == 3
    known = second.store.stats().counters["known_pages"]
    assert known == (3 if shared else 0)
    first.close()
    second.close()


def test_draft_heads_that_one_rank_would_save_are_refused(store_folder: Path) -> None:
    """Without the plugin SGLang saves the draft of rank 0 only, so no prefix would be found."""
    pools = {"kv": make("mla", "page_first"), "draft": make("mha", "page_first")}
    for tp_rank in range(2):  # by every rank, so that the attach fails everywhere
        with pytest.raises(UnsupportedError, match=r"'draft'.*heads of its own"):
            attach(store_folder, pools, **rank(tp_rank, 2, **MLA), extra={RANK_DRAFTS: False})
    alone = attach(store_folder, pools, **rank(0, 1, **MLA), extra={RANK_DRAFTS: False})
    alone.close()
    mha = {"kv": make("mha", "page_first"), "draft": make("mha", "page_first")}
    attach(store_folder, mha, **rank(1, 2), extra={RANK_DRAFTS: False}).close()


# ---- who saves ---------------------------------------------------------------------------------


def _savers(config: dict[str, Any], world: list[dict[str, Any]]) -> int:
    """Ranks of a server that SGLang lets save, by its own rule."""
    return sum(storage_config(Path("/x"), **config, **r).is_storage_writer for r in world)


@pytest.mark.parametrize(
    ("config", "world"),
    [
        ({}, [rank(i, 4) for i in range(4)]),
        ({}, [rank(i % 2, 2, pp_rank=i // 2, pp_size=2) for i in range(4)]),
        ({}, [rank(0, 1, attn_cp_rank=i, attn_cp_size=4) for i in range(4)]),
        ({}, [rank(i % 2, 2, dp_rank=i // 2) for i in range(8)]),
        (MLA, [rank(i, 4) for i in range(4)]),
        (MLA, [rank(i % 2, 2, dp_rank=i // 2) for i in range(8)]),
        (MLA, [rank(i % 2, 2, pp_rank=i // 2, pp_size=2) for i in range(4)]),
        (MLA, [rank(0, 1, attn_cp_rank=i, attn_cp_size=4) for i in range(4)]),
        (
            MLA,
            [rank(i, 4, dcp_size=2, dcp_rank=i % 2, logical_page_size=32) for i in range(4)],
        ),
    ],
)
def test_the_count_of_writers_is_that_of_sglang(
    config: dict[str, Any], world: list[dict[str, Any]]
) -> None:
    ranks = Ranks.of_config(storage_config(Path("/x"), **config, **world[0]))
    replicated = bool(config)
    found = writer_count(ranks, replicated=replicated, process_count=len(world))
    assert found == _savers(config, world)


@pytest.mark.parametrize(
    ("kinds", "config", "speculative", "writers"),
    [
        ({"kv": "mha"}, rank(0, 8), False, 8),
        ({"kv": "mla"}, rank(3, 8, **MLA), False, 1),
        ({"kv": "mla", "mamba": "mamba"}, rank(3, 8, **MLA), False, 8),
        ({"kv": "mla", "draft": "mha"}, rank(3, 8, **MLA), False, 8),
        ({"kv": "mla", "draft": "mla"}, rank(3, 8, **MLA), False, 1),
        ({"kv": "mla"}, rank(3, 8, **MLA), True, 8),  # a draft pool may be registered later
        ({"kv": "mla_dcp"}, rank(0, **DCP), False, 2),
    ],
)
def test_the_share_of_each_writer_follows(
    kinds: dict[str, str],
    config: dict[str, Any],
    speculative: bool,
    writers: int,
    store_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if speculative:
        monkeypatch.setattr("tutti_sglang.backend.expects_draft", lambda: True)
    pools = {name: make(kind, "page_first") for name, kind in kinds.items()}
    storage = attach(store_folder, pools, **config)
    assert storage.options.store.writers_max == writers
    storage.close()
    own = attach(store_folder, pools, **config, extra={"writers_max": 3})
    assert own.options.store.writers_max == 3
    own.close()


def test_outside_a_server_all_ranks_are_on_this_node() -> None:
    assert identity.processes_on_node(Ranks(tp_size=4, pp_size=2, cp_size=3)) == 24


@pytest.mark.parametrize(
    ("settings", "processes"),
    [
        ({}, 1),
        ({"tp_size": 4, "pp_size": 2}, 8),
        ({"tp_size": 8, "nnodes": 2, "node_rank": 0, "dist_init_addr": "127.0.0.1:1"}, 4),
        ({"tp_size": 2, "dp_size": 2}, 4),  # replicas have the same pages
        ({"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}, 4),
    ],
)
def test_processes_of_a_server_on_this_node(settings: dict[str, Any], processes: int) -> None:
    from sglang.srt.runtime_context import SpawnRanks, publish, reset_context
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(model_path=str(default_model()), device="cpu", **settings)
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    try:
        assert identity.processes_on_node(Ranks(tp_size=99)) == processes
    finally:
        reset_context()


# ---- pages as groups of heads ------------------------------------------------------------------


HEADS = 4


def heads_config(tp_rank: int, tp_size: int, groups: int) -> dict[str, Any]:
    """As SGLang makes it of `tp_lcm_size` (managers/cache_controller.py)."""
    return rank(tp_rank, tp_size, tp_lcm_size=groups, should_split_heads=groups > tp_size)


class Server:
    """The ranks of one server, each with its heads of the same model."""

    def __init__(self, folder: Path, tp_size: int, groups: int = 4, **changes: Any) -> None:
        heads = HEADS // tp_size
        self.pools = [make("mha", "page_head", head_num=heads) for _ in range(tp_size)]
        self.ranks = [
            attach(folder, {"kv": pool}, **heads_config(i, tp_size, groups), **changes)
            for i, pool in enumerate(self.pools)
        ]

    def whole(self) -> torch.Tensor:
        """K and V of all heads: (2, pages, heads, page, layers, dim)."""
        return torch.cat([pool.kv_buffer for pool in self.pools], dim=2)

    def put(self, whole: torch.Tensor) -> None:
        for pool, part in zip(self.pools, whole.chunk(len(self.pools), dim=2), strict=True):
            pool.kv_buffer.copy_(part)

    def save(self, keys: list[str], pages: list[int]) -> list[list[bool]]:
        return [
            r.batch_set_v1(keys, slots(p, pages), prefix([]))
            for r, p in zip(self.ranks, self.pools, strict=True)
        ]

    def load(self, keys: list[str], pages: list[int]) -> list[list[bool]]:
        return [
            r.batch_get_v1(keys, slots(p, pages), prefix([]))
            for r, p in zip(self.ranks, self.pools, strict=True)
        ]

    def exists(self, keys: list[str]) -> list[int]:
        return [r.batch_exists(keys) for r in self.ranks]

    def close(self) -> None:
        for r in self.ranks:
            r.close()


@pytest.fixture
def pages() -> torch.Tensor:
    template = make("mha", "page_head", head_num=HEADS)
    fill(template, 5)
    return template.kv_buffer.clone()


@pytest.mark.parametrize("reader_size", [1, 2, 4])
@pytest.mark.parametrize("writer_size", [1, 2, 4])
def test_servers_of_other_sizes_share_pages(
    writer_size: int, reader_size: int, pages: torch.Tensor, store_folder: Path
) -> None:
    keys, where = chain(3), [7, 2, 10]
    writer = Server(store_folder, writer_size)
    writer.put(pages)
    assert writer.save(keys, PAGES) == [[True] * 3] * writer_size
    reader = Server(store_folder, reader_size)
    assert reader.exists(keys) == [3] * reader_size
    assert reader.load(keys, where) == [[True] * 3] * reader_size
    got = reader.whole()
    raw = torch.uint8
    assert torch.equal(got[:, where].view(raw), pages[:, PAGES].view(raw))
    others = [p for p in range(got.shape[1]) if p not in where]
    assert not got[:, others].view(raw).any(), "nothing beside the pages was touched"
    writer.close()
    reader.close()


def test_a_page_is_there_when_all_of_its_groups_are(
    pages: torch.Tensor, store_folder: Path
) -> None:
    keys = chain(3)
    pair = Server(store_folder, 2)
    pair.put(pages)
    first, second = pair.ranks
    assert all(first.batch_set_v1(keys, slots(pair.pools[0], PAGES), prefix([])))
    one = Server(store_folder, 1)
    assert one.exists(keys) == [0] and one.load(keys, PAGES) == [[False] * 3]
    assert all(second.batch_set_v1(keys[:2], slots(pair.pools[1], [0, 1]), prefix([])))
    assert one.exists(keys) == [2] and one.load(keys, [3, 4, 5]) == [[True, True, False]]
    one.close()
    four = Server(store_folder, 4)
    assert four.exists(keys) == [3, 3, 2, 2]
    pair.close()
    four.close()


@pytest.mark.parametrize("groups", [None, 2, 8])
def test_another_division_finds_nothing(
    groups: int | None, pages: torch.Tensor, store_folder: Path
) -> None:
    """Groups of another size, or pages that are not divided, are other pages."""
    writer = Server(store_folder, 1)
    writer.put(pages)
    writer.save(chain(3), PAGES)
    writer.close()
    if groups == 8:  # more groups than heads: refused
        with pytest.raises(UnsupportedError, match="4 heads of a rank do not split into 8"):
            Server(store_folder, 1, groups)
        return
    if groups is None:
        pool = make("mha", "page_head", head_num=HEADS)
        reader: Any = attach(store_folder, {"kv": pool})
        assert reader.batch_exists(chain(3)) == 0
    else:
        reader = Server(store_folder, 1, groups)
        assert reader.exists(chain(3)) == [0]
    reader.close()


def test_other_layouts_are_not_divided(store_folder: Path) -> None:
    """`tp_lcm_size` has an effect with the layout page_head only, as in SGLang."""
    pool, keys = make("mha", "page_first"), chain(3)
    config = heads_config(0, 1, 4) | {"should_split_heads": False}
    storage = attach(store_folder, {"kv": pool}, **config)
    assert all(storage.batch_set_v1(keys, slots(pool, PAGES), prefix([])))
    storage.close()
    plain = attach(store_folder, {"kv": pool})
    assert plain.batch_exists(keys) == 3
    plain.close()


def test_sglang_divides_where_we_do() -> None:
    """The fields of SGLang's configuration that the division hangs on."""
    fields = HiCacheStorageConfig.__dataclass_fields__
    assert {"tp_lcm_size", "should_split_heads", "dp_rank", "dcp_rank"} <= set(fields)


# ---- the text itself ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "options", "text"),
    [
        (Ranks(1, 2), {"replicated": False}, "pp 0/1, tp 1/2, cp 0/1"),
        (Ranks(1, 2), {"replicated": True}, "pp 0/1, cp 0/1"),
        (
            Ranks(1, 2, 1, 4, 2, 3),
            {"replicated": False, "layers": (8, 16)},
            "layers 8-16, pp 1/4, tp 1/2, cp 2/3",
        ),
        (
            Ranks(1, 2),
            {"replicated": False, "heads": HeadGroup(3, 8)},
            "pp 0/1, heads 3/8, cp 0/1",
        ),
        (
            Ranks(1, 4, dcp_rank=1, dcp_size=2, dcp_page_tokens=128),
            {"replicated": True},
            "pp 0/1, cp 0/1, dcp 1/2 of tp 4, pages of 128 tokens",
        ),
    ],
)
def test_text_of_a_shard(ranks: Ranks, options: dict[str, Any], text: str) -> None:
    assert shard_text(ranks, **options) == text


@pytest.fixture(scope="module")
def classes() -> Iterator[dict[str, Any]]:
    yield {kind: make(kind, "page_first") for kind in ("mha", "asymmetric", "mla", "index_k")}


def test_pools_with_heads_are_known_by_class(classes: dict[str, Any]) -> None:
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.mem_cache.pool_host import mha

    assert {kind for kind, pool in classes.items() if splits_heads(pool)} == {
        "mha",
        "asymmetric",
        "index_k",
    }
    for module, names in (
        (memory_pool, ("MHATokenToKVPool", "MHATokenToKOnlyPool")),
        (mha, ("MHATokenToKVPoolHost", "MHATokenToKOnlyPoolHost")),
    ):
        assert all(hasattr(module, name) for name in names), "the names are SGLang's"
    mla = classes["mla"]
    assert is_replicated("kv", mla, True) and not is_replicated("kv", mla, False)
    assert not is_replicated("mamba", mla, True)


def test_a_second_main_pool_is_refused(store_folder: Path) -> None:
    storage = TuttiStorage(storage_config(store_folder), {})
    storage.register_mem_pool_host(make("mha", "page_first"))
    with pytest.raises(UnsupportedError, match="'kv'"):
        storage.register_mem_host_pool_v2(make("mha", "page_first"), "kv")
    assert storage.batch_exists(chain(1)) == 0
