"""SGLang's real radix tree with TuttiLinker in one process: what it asks, and what comes back."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from linker_kit import SLOTS, TOKENS, make_pools, published, wait_for
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from tutti_sglang.linker import TuttiLinker

WINDOW_PAGES = 2
OPTIONS = {"capacity": "64MiB", "segment": "1MiB"}


@pytest.fixture(scope="module")
def server_args(model: Path) -> Iterator[Any]:
    with published(model) as args:
        yield args


class Tree:
    """A tree over one device pool, driven as the scheduler drives it."""

    def __init__(self, server_args: Any, kind: str, folder: Path, core: str) -> None:
        self.pools = make_pools(kind)
        self.window = kind == "swa"
        pool = self.pools.kvcache
        if self.window:
            self.allocator: Any = SWATokenToKVPoolAllocator(
                SLOTS, SLOTS // 2, TOKENS, torch.bfloat16, "cpu", pool, need_sort=False
            )
        else:
            self.allocator = PagedTokenToKVPoolAllocator(
                SLOTS, TOKENS, torch.bfloat16, "cpu", pool, need_sort=False
            )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(
                size=8, max_context_len=1024, device="cpu", enable_memory_saver=False
            ),
            token_to_kv_pool_allocator=self.allocator,
            page_size=TOKENS,
            tree_components=(ComponentType.FULL, *[ComponentType.SWA] * self.window),
            sliding_window_size=WINDOW_PAGES * TOKENS if self.window else None,
            tree_core_backend=core,
        )
        self.cache = UnifiedRadixCache(params)
        self.linker = TuttiLinker(
            server_args,
            params,
            components=set(self.cache.components),
            extra_config={"path": str(folder), **OPTIONS},
        )
        self.cache.init_cache_linker(self.linker)
        self.counter = self.cache.linker.layer_done_counter
        pool.register_layer_transfer_counter(self.counter)
        self.requests = 0

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cache.linker.close()

    def compute(self, tokens: array[int], seed: int) -> None:
        """A forward pass over `tokens` without what is cached on the device, then the insert."""
        known = self.resident(tokens)
        slots = self.allocate(len(tokens) - len(known))
        random = torch.Generator().manual_seed(seed)
        for name, places in self.places(slots).items():
            for buffer in self.pools.buffers[name]:
                fresh = torch.randn(buffer[places].shape, generator=random)
                buffer[places] = fresh.to(buffer.dtype)
        self.insert(tokens, torch.cat([known, slots]))

    def allocate(self, count: int) -> torch.Tensor:
        if not self.window:
            return self.allocator.alloc(count)
        slots: torch.Tensor = self.allocator.full_attn_allocator.alloc(count)
        window = self.allocator.swa_attn_allocator.alloc(count)
        self.allocator.set_full_to_swa_mapping(slots, window)
        return slots

    def places(self, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """Where the tokens in these slots are in each pool."""
        if not self.window:
            return {"kv": slots}
        return {"kv": slots, "swa": self.allocator.full_to_swa_index_mapping[slots]}

    def insert(self, tokens: array[int], slots: torch.Tensor) -> None:
        self.cache.insert(InsertParams(key=RadixKey(tokens), value=slots.clone()))
        self.settle()

    def settle(self) -> None:
        """Poll until every offload has its result."""

        def done() -> bool:
            self.cache.check_hicache_events()
            return not self.cache.linker.pending_offloads

        wait_for(done, "offloads")

    def request(self, tokens: array[int]) -> tuple[Any, Any]:
        """A new request's match: (request, result)."""
        self.requests += 1
        request = SimpleNamespace(
            rid=f"request {self.requests}",
            kv=None,
            swa_host_hit_length=0,
            mamba_host_hit_length=0,
            session=None,
            swa_branching_seqlen=None,
            skip_radix_cache_insert=False,
        )
        found = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens), req=request))
        request.last_node = found.last_device_node
        return request, found

    def load(self, request: Any, found: Any) -> tuple[torch.Tensor, bool]:
        """Admit a request and run its forward pass: (slots of the loaded tail, success)."""
        self.cache.init_load_back(
            InitLoadBackParams(
                best_match_node=found.best_match_node,
                host_hit_length=found.host_hit_length,
                req=request,
            )
        )
        slots = self.cache.linker.private_load_indices[request.rid]
        index = self.cache.ready_to_load_host_cache()
        self.counter.set_consumer(index)
        for layer in range(self.pools.kvcache.layer_num):
            self.pools.kvcache.get_key_buffer(layer)  # waits
        return slots, not self.cache.finish_external_linker_loads([request])

    def forget_device(self) -> None:
        """Evict everything from the device and overwrite it."""
        self.cache.evict(EvictParams(num_tokens=SLOTS))
        for buffers in self.pools.buffers.values():
            for buffer in buffers:
                buffer.zero_()

    def bytes_of(self, slots: torch.Tensor, name: str = "kv") -> list[bytes]:
        places = self.places(slots)[name]
        return [
            b[places].contiguous().view(torch.uint8).numpy().tobytes()
            for b in self.pools.buffers[name]
        ]

    def resident(self, tokens: array[int]) -> torch.Tensor:
        """The slots of what is cached on the device."""
        found = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))
        slots: torch.Tensor = self.cache.path_device_indices(found.last_device_node)
        return slots


def make_tokens(seed: int, pages: int) -> array[int]:
    return array("q", [(i * 37 + seed * 101) % 300 for i in range(pages * TOKENS)])


@pytest.fixture(params=["rust", "python"])
def core(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_evicted_pages_come_back(
    kind: str, core: str, server_args: Any, store_folder: Path
) -> None:
    tokens = make_tokens(1, 8)
    with Tree(server_args, kind, store_folder, core) as tree:
        tree.compute(tokens, seed=1)
        want = tree.bytes_of(tree.resident(tokens))
        tree.forget_device()
        request, found = tree.request(tokens)
        assert (found.device_prefix_len, found.host_hit_length) == (0, 8 * TOKENS)
        slots, landed = tree.load(request, found)
        assert landed
        assert tree.bytes_of(slots) == want
        # As after the forward pass: what was loaded is offered to the store again.
        tree.insert(tokens, slots)
        assert tree.linker.counters["offloads_known"] == 1
        assert tree.linker.store.stats().counters["saved_pages"] == 8
        assert tree.linker.counters["failures"] == 0


def test_a_sliding_window_comes_back(core: str, server_args: Any, store_folder: Path) -> None:
    """All pages of the full layers, and of the others the window that ends the prefix."""
    tokens = make_tokens(8, 8)
    with Tree(server_args, "swa", store_folder, core) as tree:
        tree.compute(tokens, seed=1)
        slots = tree.resident(tokens)
        want = tree.bytes_of(slots)
        window = tree.bytes_of(slots[-WINDOW_PAGES * TOKENS :], "swa")
        tree.forget_device()
        request, found = tree.request(tokens)
        assert (found.device_prefix_len, found.host_hit_length) == (0, 8 * TOKENS)
        slots, landed = tree.load(request, found)
        assert landed
        assert tree.bytes_of(slots) == want
        assert tree.bytes_of(slots[-WINDOW_PAGES * TOKENS :], "swa") == window
        _, shorter = tree.request(tokens[: 7 * TOKENS])
        assert shorter.host_hit_length == 7 * TOKENS, "the node's whole window was stored"


def test_a_tail_behind_what_is_on_the_device(
    core: str, server_args: Any, store_folder: Path
) -> None:
    """Several turns: the tree keeps the first pages, the store has the rest, under one root."""
    turns = [make_tokens(2, 12)[: n * TOKENS] for n in (3, 7, 12)]
    with Tree(server_args, "mha", store_folder, core) as tree:
        for seed, tokens in enumerate(turns):
            tree.compute(tokens, seed)
        want = tree.bytes_of(tree.resident(turns[-1]))
        tree.cache.evict(EvictParams(num_tokens=9 * TOKENS))  # leaves go first
        left = len(tree.resident(turns[-1]))
        assert left == 3 * TOKENS, "the eviction did not leave the first node"
        request, found = tree.request(turns[-1])
        assert (found.device_prefix_len, found.host_hit_length) == (left, 9 * TOKENS)
        slots, landed = tree.load(request, found)
        assert landed
        both = torch.cat([tree.resident(turns[-1]), slots])
        assert tree.bytes_of(both) == want
        pages = tree.linker._linked["kv"].store._entry.pages
        assert not pages.loose, "a chain was saved or asked for without its root"
        assert pages.page_count == 12


def test_branches_share_their_ancestors(core: str, server_args: Any, store_folder: Path) -> None:
    """Two continuations of one prompt: a node is split, and both chains stay whole."""
    first = make_tokens(3, 8)
    second = array("q", [*first[: 5 * TOKENS], *make_tokens(4, 4)])
    with Tree(server_args, "mha", store_folder, core) as tree:
        tree.compute(first, seed=1)
        tree.compute(second, seed=2)
        want = {id(t): tree.bytes_of(tree.resident(t)) for t in (first, second)}
        tree.forget_device()
        for tokens in (second, first):
            request, found = tree.request(tokens)
            assert found.host_hit_length == len(tokens)
            slots, landed = tree.load(request, found)
            assert landed and tree.bytes_of(slots) == want[id(tokens)]
            tree.cache.linker.release_request(request.rid)
            tree.allocator.free(slots)
        pages = tree.linker._linked["kv"].store._entry.pages
        assert pages.page_count == 12 and not pages.loose


def test_a_damaged_page_is_computed_at_the_retry(
    core: str, server_args: Any, store_folder: Path
) -> None:
    tokens = make_tokens(5, 6)
    with Tree(server_args, "mha", store_folder, core) as tree:
        tree.compute(tokens, seed=1)
        slots = tree.resident(tokens)
        needle = tree.pools.buffers["kv"][2][slots[4 * TOKENS : 5 * TOKENS]]
        raw = needle.contiguous().view(torch.uint8).numpy().tobytes()[:256]
        flip(store_folder, raw)
        tree.forget_device()
        request, found = tree.request(tokens)
        assert found.host_hit_length == 6 * TOKENS
        slots, landed = tree.load(request, found)
        assert not landed, "the request must not use these pages"
        tree.allocator.free(slots)
        _, found = tree.request(tokens)
        assert found.host_hit_length == 4 * TOKENS


def test_a_request_that_is_given_up_lets_go(
    core: str, server_args: Any, store_folder: Path
) -> None:
    tokens = make_tokens(6, 4)
    with Tree(server_args, "mha", store_folder, core) as tree:
        tree.compute(tokens, seed=1)
        tree.forget_device()
        request, found = tree.request(tokens)
        tree.cache.init_load_back(
            InitLoadBackParams(
                best_match_node=found.best_match_node,
                host_hit_length=found.host_hit_length,
                req=request,
            )
        )
        tree.cache.linker.release_request(request.rid)
        assert tree.cache.ready_to_load_host_cache() == -1
        assert len(tree.linker._leases) == 0


def test_reset_keeps_the_stored_pages(core: str, server_args: Any, store_folder: Path) -> None:
    tokens = make_tokens(7, 5)
    with Tree(server_args, "mha", store_folder, core) as tree:
        tree.compute(tokens, seed=1)
        want = tree.bytes_of(tree.resident(tokens))
        tree.cache.reset()
        tree.allocator.clear()
        for buffer in tree.pools.buffers["kv"]:
            buffer.zero_()
        request, found = tree.request(tokens)
        assert found.host_hit_length == 5 * TOKENS
        slots, landed = tree.load(request, found)
        assert landed and tree.bytes_of(slots) == want


def flip(folder: Path, needle: bytes) -> None:
    """Flip one bit of the stored bytes `needle`."""
    for path in folder.rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(needle)) >= 0:
            with path.open("r+b") as stream:
                stream.seek(at)
                stream.write(bytes([needle[0] ^ 1]))
            return
    raise AssertionError("the bytes are not in the store")
