"""SGLang's real HiCache stack in one process, no server: every pool kind, io backend and layout.

    python integration/sglang_cpu/matrix.py [--backend tutti|file] [--dir D]

One round trip: real device pool -> UnifiedRadixCache.insert -> host backup -> storage backup ->
evict both tiers and zero their memory -> prefetch from the storage -> load back to the device ->
compare every byte, page by page. The other checks damage the store, or punch holes into it, between
backup and prefetch. Each returns an `Outcome`; what to expect of it is the caller's business, so
that SGLang's `file`, which verifies nothing, can show that the checks are able to fail.

One `Stack` at a time in a process: SGLang publishes its configuration in a global.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import mmap
import os
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sglang_cpu.backends import PAGE_TOKENS, Backend
from sglang_cpu.make_model import ensure_model

DEVICE_TOKENS = 512
PAGE_COUNT = 10
LAYER_COUNT = 4
WAIT_S = 30.0
# The store of a case holds 10 pages of at most 16 KiB; a small pool file keeps the search for
# stored bytes quick.
MATRIX_OPTIONS = {"capacity": "64MiB"}


@dataclass(frozen=True)
class Case:
    """One combination; `core` picks SGLang's Rust or Python implementation of the radix tree."""

    pool: str  # mha | mla
    io: str  # kernel | direct
    layout: str
    core: str = "rust"

    def __str__(self) -> str:
        return f"{self.pool}-{self.io}-{self.layout}-{self.core}"


CASES = (
    Case("mha", "direct", "layer_first"),
    Case("mha", "direct", "page_first_direct"),
    Case("mha", "kernel", "layer_first"),
    Case("mha", "kernel", "page_first"),
    Case("mha", "kernel", "page_head"),
    Case("mla", "direct", "layer_first"),
    Case("mla", "direct", "page_first_direct"),
    Case("mla", "kernel", "layer_first"),
    Case("mla", "kernel", "page_first"),
    Case("mha", "kernel", "page_first", core="python"),
)
DEFAULT_CASE = CASES[3]  # what `--enable-hierarchical-cache` alone uses


@dataclass(frozen=True)
class Outcome:
    """What came back of PAGE_COUNT stored pages.

    Invariant: recalled_pages is a prefix length; wrong_pages are indices below it.
    """

    case: Case
    host_pages: int  # on the host tier after backup and device eviction
    recalled_pages: int  # prefetched from the storage and loaded to the device
    wrong_pages: tuple[int, ...]  # of the recalled ones, those whose bytes differ
    seconds: float

    @property
    def exact(self) -> bool:
        """Every page came back and every byte is the one that was stored."""
        return self.host_pages == self.recalled_pages == PAGE_COUNT and not self.wrong_pages


@dataclass(frozen=True)
class Stored:
    """A sequence that was backed up: its tokens, and the device bytes of each page and buffer."""

    tokens: array[int]
    pages: list[list[Any]]  # [page][buffer] -> uint8 tensor
    host_pages: int

    def fingerprint(self, page: int) -> bytes:
        """The first bytes of a page (first layer, token and head): contiguous in every layout."""
        return bytes(self.pages[page][0][:64].tolist())


class Stack:
    """Device pool, tree, host pool and controller with a storage backend attached.

    Use as a context manager; leaving it detaches the backend (which closes it) and forgets the
    pools, so that a second Stack on the same folder is a restarted engine.
    """

    def __init__(self, case: Case, backend: Backend, *, model: Path | None = None) -> None:
        self.case = case
        self.backend = backend
        self._model = model or default_model()
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Stack:
        _load_sglang_plugins()
        from sglang.srt.runtime_context import reset_context

        with contextlib.ExitStack() as undo:
            undo.enter_context(_environment(self.backend.environment()))
            undo.callback(reset_context)
            self._pool, self._buffers = _device_pool(self.case.pool)
            self._cache = _cache(self.case, self.backend, self._pool, self._model)
            undo.callback(self._cache.shutdown)
            self._exit = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exit.close()

    @property
    def storage(self) -> Any:
        """The HiCacheStorage object under test."""
        return self._cache.cache_controller.storage_backend

    def fill(self, seed: int) -> Stored:
        """Insert a sequence with random KV and wait until host and storage have it."""
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        tokens = token_sequence(seed)
        slots = self._cache.token_to_kv_pool_allocator.alloc(len(tokens))
        random = torch.Generator().manual_seed(seed)
        for buffer in self._buffers:
            buffer[slots] = torch.randn(buffer[slots].shape, generator=random).to(buffer.dtype)
        pages = self._page_bytes(slots)
        self._cache.insert(InsertParams(key=RadixKey(tokens), value=slots.clone()))
        self._wait(self._backed_up, "backup")
        self._cache.evict(EvictParams(num_tokens=DEVICE_TOKENS))
        self._cache.check_hicache_events()
        on_host = self._match(tokens)
        return Stored(tokens, pages, on_host.host_hit_length // PAGE_TOKENS)

    def forget(self, stored: Stored) -> None:
        """Empty device and host tiers and zero their memory; only the storage still has it."""
        self._cache.evict_host(DEVICE_TOKENS * 4)
        left = self._match(stored.tokens)
        if left.device_prefix_len or left.host_hit_length:
            raise RuntimeError(f"{self.case}: eviction left tokens behind")
        for buffer in (*self._buffers, self._cache.cache_controller.storage_host_pool.kv_buffer):
            buffer.zero_()

    def recall(self, stored: Stored) -> tuple[int, tuple[int, ...]]:
        """Bring the sequence back from the storage: (pages that came, which of them differ)."""
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, InitLoadBackParams

        cache, tokens = self._cache, stored.tokens
        request = CacheRequestHandle("recall", 0)
        anchor = self._match(tokens).last_host_node
        last_hash = cache.get_last_hash_value(anchor)
        cache.prefetch_from_storage(request, anchor, tokens, last_hash, matched_prefix_tokens=[])
        self._wait(lambda: cache.check_prefetch_progress(request), "prefetch")
        found = self._match(tokens)
        # What the scheduler reads of its request when it admits it.
        admitted = SimpleNamespace(
            rid=request.rid,
            cache_request_handle=request,
            last_node=found.last_device_node,
            swa_host_hit_length=0,
            mamba_host_hit_length=0,
            kv=SimpleNamespace(mamba_pool_idx=None),
        )
        _, node = cache.init_load_back(
            InitLoadBackParams(
                best_match_node=found.best_match_node,
                host_hit_length=found.host_hit_length,
                req=admitted,
            )
        )
        cache.ready_to_load_host_cache()
        self._wait(lambda: not cache.cache_controller.ack_load_queue, "load back")
        back = self._page_bytes(cache.path_device_indices(node))
        wrong = [
            page
            for page, buffers in enumerate(back)
            if not all(map(torch.equal, buffers, stored.pages[page]))
        ]
        return len(back), tuple(wrong)

    def _match(self, tokens: array[int]) -> Any:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return self._cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))

    def _page_bytes(self, slots: Any) -> list[list[Any]]:
        """For each page of `slots`, a copy of its bytes in every device buffer."""
        import torch

        if len(slots) == 0:
            return []
        return [
            [buffer[page].reshape(-1).view(torch.uint8).clone() for buffer in self._buffers]
            for page in slots.split(PAGE_TOKENS)
        ]

    def _backed_up(self) -> bool:
        controller = self._cache.cache_controller
        return not (
            self._cache.ongoing_write_through
            or self._cache.ongoing_backup
            or controller.ack_write_queue
            or not controller.backup_queue.empty()
            or not controller.ack_backup_queue.empty()
        )

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        """Play the scheduler: poll the cache's events until `condition` holds."""
        deadline = time.monotonic() + WAIT_S
        while True:
            self._cache.check_hicache_events()
            if condition():
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.case}: {what} not finished after {WAIT_S:.0f} s")
            time.sleep(0.002)


# ---- the checks ------------------------------------------------------------------------------


def round_trip(case: Case, backend: Backend, *, seed: int = 1) -> Outcome:
    """Store, forget and recall in one engine."""
    with _timed(case) as finish, Stack(case, backend) as stack:
        stored = stack.fill(seed)
        stack.forget(stored)
        return finish(stored, *stack.recall(stored))


def reopened(
    case: Case,
    backend: Backend,
    *,
    seed: int = 1,
    then: Case | None = None,
    then_backend: Backend | None = None,
    damage: Callable[[Stored], None] | None = None,
) -> Outcome:
    """Store in one engine and recall in another on the same folder.

    then, then_backend: of the second engine, if they differ. Where that changes the bytes of a
        page (another layout, another interface) it must find nothing.
    damage: called between the two, while no engine has the store open.
    """
    with _timed(then or case) as finish:
        with Stack(case, backend) as stack:
            stored = stack.fill(seed)
        if damage is not None:
            damage(stored)
        with Stack(then or case, then_backend or backend) as stack:
            return finish(stored, *stack.recall(stored))


def flipped_bit(case: Case, backend: Backend, *, page: int, seed: int = 1) -> Outcome:
    """One bit of one stored page changed on disk while no engine runs."""

    def damage(stored: Stored) -> None:
        flip_stored_bit(backend.folder, stored.fingerprint(page))

    return reopened(case, backend, seed=seed, damage=damage)


def missing_page(
    case: Case, backend: Backend, *, page: int, seed: int = 1, found_anyway: bool = False
) -> Outcome:
    """One page of the chain never stored.

    found_anyway: the lookup claims it is there, as if it had been evicted between lookup and read;
    so the read has to notice.
    """
    with _timed(case) as finish, Stack(case, backend) as stack:
        _drop_on_set(stack.storage, page)
        stored = stack.fill(seed)
        stack.forget(stored)
        if found_anyway:
            stack.storage.batch_exists = lambda keys, extra_info=None: len(keys)
        return finish(stored, *stack.recall(stored))


def flip_stored_bit(folder: Path, needle: bytes) -> Path:
    """Flip one bit inside the only place below `folder` that holds `needle`.

    Raises LookupError if no file holds it: then a backend keeps its pages in another form, and the
    check that called this would prove nothing.
    """
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if path.stat().st_size < len(needle):
            continue
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
            at = content.find(needle)
            if at >= 0:
                content[at + len(needle) // 2] ^= 0x10
                content.flush()
                return path
    raise LookupError(f"no file below {folder} holds the page")


def _drop_on_set(storage: Any, page: int) -> None:
    """Let `storage` accept every page of its next writes, and keep all but number `page`."""
    zero_copy, generic = storage.batch_set_v1, storage.batch_set

    def batch_set_v1(keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        for part in (slice(0, page), slice(page + 1, len(keys))):
            if keys[part]:
                rows = slice(part.start * PAGE_TOKENS, part.stop * PAGE_TOKENS)
                zero_copy(keys[part], host_indices[rows], extra_info)
        return [True] * len(keys)

    def batch_set(keys: list[str], values: Any = None, *_: Any, **__: Any) -> bool:
        return all(
            generic(keys[part], values[part])
            for part in (slice(0, page), slice(page + 1, len(keys)))
            if keys[part]
        )

    storage.batch_set_v1, storage.batch_set = batch_set_v1, batch_set


# ---- building the stack ----------------------------------------------------------------------


def token_sequence(seed: int) -> array[int]:
    """PAGE_COUNT whole pages; other seeds share no page. SGLang wants array('q')."""
    return array("q", ((i * 37 + seed * 101) % 997 for i in range(PAGE_TOKENS * PAGE_COUNT)))


def default_model() -> Path:
    """SGLang reads a model's configuration even where no model runs; made once a machine."""
    return ensure_model(Path(tempfile.gettempdir()) / f"tutti-sglang-cpu-{os.getuid()}" / "model")


def _load_sglang_plugins() -> None:
    """Before any ServerArgs: a plugin may add the backend's name."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    logging.getLogger("sglang.srt.arg_groups").setLevel(logging.ERROR)


@contextlib.contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _device_pool(kind: str) -> tuple[Any, list[Any]]:
    """(pool, its buffers): K layers then V layers for mha, the fused layers for mla."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    common: dict[str, Any] = {
        "size": DEVICE_TOKENS,
        "page_size": PAGE_TOKENS,
        "dtype": torch.bfloat16,
        "layer_num": LAYER_COUNT,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    if kind == "mha":
        mha = MHATokenToKVPool(head_num=2, head_dim=32, **common)
        return mha, [*mha.k_buffer, *mha.v_buffer]
    mla = MLATokenToKVPool(kv_lora_rank=64, qk_rope_head_dim=16, **common)
    return mla, list(mla.kv_buffer)


def _cache(case: Case, backend: Backend, pool: Any, model: Path) -> Any:
    """A UnifiedRadixCache with host pool, controller and storage backend, as the scheduler has."""
    import torch
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(
        model_path=str(model),
        device="cpu",
        page_size=PAGE_TOKENS,
        attention_backend="torch_native",
        disable_overlap_schedule=True,
        enable_hierarchical_cache=True,
        hicache_ratio=2.0,
        hicache_io_backend=case.io,
        hicache_mem_layout=case.layout,
        hicache_write_policy="write_through",
        hicache_storage_backend=backend.name,
        hicache_storage_backend_extra_config=json.dumps(backend.extra_config()),
        hicache_storage_prefetch_policy="wait_complete",
    )
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=ReqToTokenPool(
            size=8, max_context_len=1024, device="cpu", enable_memory_saver=False
        ),
        token_to_kv_pool_allocator=PagedTokenToKVPoolAllocator(
            DEVICE_TOKENS, PAGE_TOKENS, torch.bfloat16, "cpu", pool, need_sort=False
        ),
        page_size=PAGE_TOKENS,
        tree_components=(ComponentType.FULL,),
        tree_core_backend=case.core,
    )
    cache = UnifiedRadixCache(params)
    cache.init_hicache(server_args, params)
    return cache


@contextlib.contextmanager
def _timed(case: Case) -> Iterator[Callable[[Stored, int, tuple[int, ...]], Outcome]]:
    started = time.monotonic()

    def finish(stored: Stored, recalled: int, wrong: tuple[int, ...]) -> Outcome:
        return Outcome(case, stored.host_pages, recalled, wrong, time.monotonic() - started)

    yield finish


# ---- command line ----------------------------------------------------------------------------


def main() -> int:
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="tutti")
    parser.add_argument("--dir", type=Path, help="folder for the stores; temporary by default")
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)

    table = Table(
        title=f"HiCache round trips through backend {args.backend!r}", title_justify="left"
    )
    for heading in ("pool", "io", "layout", "tree", "pages back", "wrong", "seconds", "exact"):
        table.add_column(heading)
    outcomes = []
    with tempfile.TemporaryDirectory() as temporary:
        for case in CASES:
            folder = (args.dir or Path(temporary)) / str(case)
            folder.mkdir(parents=True, exist_ok=True)
            outcome = round_trip(case, Backend(args.backend, folder, MATRIX_OPTIONS))
            outcomes.append(outcome)
            table.add_row(
                case.pool,
                case.io,
                case.layout,
                case.core,
                f"{outcome.recalled_pages} of {PAGE_COUNT}",
                str(len(outcome.wrong_pages)),
                f"{outcome.seconds:.2f}",
                "yes" if outcome.exact else "NO",
            )
    Console().print(table)
    return 0 if all(outcome.exact for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
