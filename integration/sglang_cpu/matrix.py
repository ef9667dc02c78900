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
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sglang_cpu.backends import PAGE_TOKENS, Backend
from sglang_cpu.families import DEVICE_PAGES, Family, Pages, build, page_tokens, parallel
from sglang_cpu.host_pools import buffers_of
from sglang_cpu.make_model import ensure_model

PAGE_COUNT = 10
DEVICE_TOKENS = DEVICE_PAGES * PAGE_TOKENS  # of a device pool, in the families with small pages
EVERYTHING = 1 << 20  # more than any pool has
WAIT_S = 30.0
# The store of a case holds 10 pages of at most 16 KiB; a small pool file keeps the search for
# stored bytes quick.
MATRIX_OPTIONS = {"capacity": "64MiB"}


@dataclass(frozen=True)
class Case:
    """One combination; `core` picks SGLang's Rust or Python implementation of the radix tree."""

    pool: str  # a family of families.py
    io: str  # kernel | direct
    layout: str
    core: str = "rust"
    rank: int = 0  # where a family is made of several

    def __str__(self) -> str:
        of = f"-rank{self.rank}" if parallel(self.pool, 0) else ""
        return f"{self.pool}-{self.io}-{self.layout}-{self.core}{of}"


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
# Models with more pools than one. (Recurrent state has no layout layer_first.)
HYBRID_CASES = tuple(
    Case(pool, io, layout, core)
    for pool in ("swa", "mamba", "dsa", "draft", "v4")
    for io, layout, core in (
        ("kernel", "page_first", "rust"),
        ("kernel", "page_first", "python"),
        ("direct", "page_first_direct", "rust"),
        ("kernel", "layer_first", "rust"),
        ("direct", "layer_first", "rust"),
    )
    if not (pool == "mamba" and layout == "layer_first")
)
DCP_CASES = tuple(
    Case("mla_dcp", io, layout, rank=rank)
    for rank in range(2)
    for io, layout in (
        ("kernel", "page_first"),
        ("direct", "page_first_direct"),
        ("kernel", "layer_first"),
    )
)
DEFAULT_CASE = CASES[3]  # what `--enable-hierarchical-cache` alone uses


@dataclass(frozen=True)
class Outcome:
    """What came back of PAGE_COUNT stored pages.

    Invariant: recalled_pages is a prefix length; wrong_pages are indices below it.
    end_right: the window or the state that the end of the recalled prefix needs is what was stored;
        True where a family has none, or nothing came back.
    """

    case: Case
    host_pages: int  # on the host tier after backup and device eviction
    recalled_pages: int  # prefetched from the storage and loaded to the device
    wrong_pages: tuple[int, ...]  # of the recalled ones, those whose bytes differ
    end_right: bool
    seconds: float

    @property
    def exact(self) -> bool:
        """Every page came back and every byte is the one that was stored."""
        whole = self.host_pages == self.recalled_pages == PAGE_COUNT
        return whole and self.end_right and not self.wrong_pages


@dataclass(frozen=True)
class Stored:
    """A sequence that was backed up: its tokens, and what the device held of it.

    window  of each page, where the end of a prefix needs a window.
    state   at the end of the sequence, where one is needed.
    """

    tokens: array[int]
    pages: Pages
    window: Pages
    state: list[Any]
    host_pages: int

    def fingerprint(self, page: int, buffer: int = 0) -> bytes:
        """The first bytes of a page (first layer, token and head): contiguous in every layout."""
        return bytes(self.pages[page][buffer][:64].tolist())

    def end_fingerprint(self, page: int) -> bytes:
        """The same of the window's page, or of the state."""
        held = self.window[page] if self.window else self.state
        return bytes(held[0].reshape(-1)[:64].tolist())


@dataclass(frozen=True)
class Recalled:
    """What came back: pages, those of them that differ, and whether the end is right."""

    pages: int
    wrong: tuple[int, ...]
    end_right: bool


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
            server_args = _publish(self.case, self.backend, self._model)
            undo.enter_context(_ranks(self.case))
            self.family = build(self.case.pool)
            self._cache = _cache(self.case, server_args, self.family)
            undo.callback(self._cache.shutdown)
            self.family.after(self._cache)
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
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        family = self.family
        tokens = token_sequence(seed, family.page_tokens)
        slots = family.take(len(tokens))
        state = family.write(slots, seed)
        pages, window = family.pages(slots), family.window_bytes(slots)
        held = [] if state is None else family.state_bytes(state)
        self._cache.insert(
            InsertParams(key=RadixKey(tokens), value=slots.clone(), mamba_value=state)
        )
        self._wait(self._backed_up, "backup")
        self._cache.evict(
            EvictParams(num_tokens=EVERYTHING, swa_num_tokens=EVERYTHING, mamba_num=EVERYTHING)
        )
        self._cache.check_hicache_events()
        on_host = self._match(tokens)
        return Stored(tokens, pages, window, held, on_host.host_hit_length // family.page_tokens)

    def forget(self, stored: Stored) -> None:
        """Empty device and host tiers and zero their memory; only the storage still has it."""
        for component in self.family.components:
            self._cache.evict_host(EVERYTHING, component)
        left = self._match(stored.tokens)
        if left.device_prefix_len or left.host_hit_length:
            raise RuntimeError(f"{self.case}: eviction left tokens behind")
        self.family.zero()
        for entry in self._cache.host_pool_group.entries:
            for buffer in buffers_of(entry.host_pool):
                buffer.zero_()

    def recall(self, stored: Stored) -> Recalled:
        """Bring the sequence back from the storage."""
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, InitLoadBackParams

        cache, tokens, family = self._cache, stored.tokens, self.family
        request = CacheRequestHandle("recall", 0)
        anchor = self._match(tokens).last_host_node
        last_hash = cache.get_last_hash_value(anchor)
        cache.prefetch_from_storage(
            request, anchor, tokens, last_hash, prefix_keys=[], matched_prefix_tokens=[]
        )
        self._wait(lambda: cache.check_prefetch_progress(request), "prefetch")
        found = self._match(tokens)
        admitted = family.request(request, found)
        _, node = cache.init_load_back(
            InitLoadBackParams(
                best_match_node=found.best_match_node,
                host_hit_length=found.host_hit_length,
                req=admitted,
            )
        )
        cache.ready_to_load_host_cache()
        self._wait(lambda: not cache.cache_controller.ack_load_queue, "load back")
        slots = cache.path_device_indices(node)
        back = family.pages(slots) if family.whole else []
        count = len(slots) // family.page_tokens
        wrong = [
            page
            for page, buffers in enumerate(back)
            if not all(map(torch.equal, buffers, stored.pages[page]))
        ]
        end = self._end(slots, admitted)
        low = max(count - family.window_pages, 0)
        expected = stored.window[low:count] if count and family.window else []
        if count and family.states:
            expected = [stored.state]
        right = len(end) == len(expected) and all(
            all(map(torch.equal, *pair)) for pair in zip(end, expected, strict=True)
        )
        return Recalled(count, tuple(wrong), right)

    def _end(self, slots: Any, admitted: Any) -> Pages:
        """What the device has of the window or the state that ends the prefix."""
        family = self.family
        if len(slots) == 0:
            return []
        if family.states:
            return [family.state_bytes(admitted.kv.mamba_pool_idx.reshape(1))]
        return family.window_bytes(slots[-family.window_pages * family.page_tokens :])

    def _match(self, tokens: array[int]) -> Any:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return self._cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens)))

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
        return finish(stored, stack.recall(stored))


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
            return finish(stored, stack.recall(stored))


def flipped_bit(
    case: Case, backend: Backend, *, page: int, buffer: int = 0, seed: int = 1
) -> Outcome:
    """One bit of one stored page changed on disk while no engine runs.

    buffer: of the family's, whose part of the page is changed; -1: the last pool's.
    """

    def damage(stored: Stored) -> None:
        flip_stored_bit(backend.folder, stored.fingerprint(page, buffer))

    return reopened(case, backend, seed=seed, damage=damage)


def flipped_end(case: Case, backend: Backend, *, page: int, seed: int = 1) -> Outcome:
    """The same in the window's page, or in the state."""

    def damage(stored: Stored) -> None:
        flip_stored_bit(backend.folder, stored.end_fingerprint(page))

    return reopened(case, backend, seed=seed, damage=damage)


def missing_page(
    case: Case, backend: Backend, *, page: int, seed: int = 1, found_anyway: bool = False
) -> Outcome:
    """One page of the chain never stored.

    found_anyway: the lookup claims it is there, as if it had been evicted between lookup and read;
    so the read has to notice.
    """
    with _timed(case) as finish, Stack(case, backend) as stack:
        _drop_on_set(stack.storage, _page_key(stack, seed, page))
        stored = stack.fill(seed)
        stack.forget(stored)
        if found_anyway:
            stack.storage.batch_exists = lambda keys, extra_info=None: len(keys)
        return finish(stored, stack.recall(stored))


def missing_beside(case: Case, backend: Backend, *, pool: str, page: int, seed: int = 1) -> Outcome:
    """One page of a pool beside the main one never stored; state counts as the last page."""
    with _timed(case) as finish, Stack(case, backend) as stack:
        _drop_beside(stack.storage, pool, _page_key(stack, seed, page))
        stored = stack.fill(seed)
        stack.forget(stored)
        return finish(stored, stack.recall(stored))


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


def _page_key(stack: Stack, seed: int, page: int) -> str:
    """SGLang's name of one page of the sequence that `fill` makes of this seed."""
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    tokens = token_sequence(seed, stack.family.page_tokens)
    key: str = get_storage_hash_str(tokens, None, page_size=stack.family.page_tokens)[page]
    return key


def _around(keys: list[str], dropped: str) -> list[slice]:
    """The parts of `keys` before and after one of them; all of it where that is not there."""
    at = keys.index(dropped) if dropped in keys else len(keys)
    return [part for part in (slice(0, at), slice(at + 1, len(keys))) if keys[part]]


def _after(extra_info: Any, keys: list[str]) -> Any:
    """`extra_info` for what comes after these keys."""
    known = extra_info.prefix_keys
    return replace(extra_info, prefix_keys=None if known is None else [*known, *keys])


def _drop_on_set(storage: Any, dropped: str) -> None:
    """Let `storage` accept every page of the main pool, and keep all but the one of this key."""
    zero_copy, generic = storage.batch_set_v1, storage.batch_set

    def batch_set_v1(keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        step = len(host_indices) // len(keys)
        for part in _around(keys, dropped):
            rows = slice(part.start * step, part.stop * step)
            zero_copy(keys[part], host_indices[rows], _after(extra_info, keys[: part.start]))
        return [True] * len(keys)

    def batch_set(keys: list[str], values: Any = None, *_: Any, **__: Any) -> bool:
        return all(generic(keys[part], values[part]) for part in _around(keys, dropped))

    storage.batch_set_v1, storage.batch_set = batch_set_v1, batch_set


def _drop_beside(storage: Any, pool: str, dropped: str) -> None:
    """The same for a pool beside the main one."""
    honest = storage.batch_set_v2

    def batch_set_v2(transfers: Any, extra_info: Any = None) -> Any:
        others = [transfer for transfer in transfers if str(transfer.name) != pool]
        done = honest(others, extra_info) if others else {}
        for transfer in transfers:
            if str(transfer.name) != pool:
                continue
            keys = transfer.keys
            done[transfer.name] = [True] * len(keys)
            step = len(transfer.host_indices) // len(keys)
            for part in _around(keys, dropped):
                slots = transfer.host_indices[part.start * step : part.stop * step]
                kept = replace(transfer, keys=keys[part], host_indices=slots)
                honest([kept], _after(extra_info, keys[: part.start]))
        return done

    storage.batch_set_v2 = batch_set_v2


# ---- building the stack ----------------------------------------------------------------------


def token_sequence(seed: int, tokens_a_page: int = PAGE_TOKENS) -> array[int]:
    """PAGE_COUNT whole pages; other seeds share no page. SGLang wants array('q')."""
    return array("q", ((i * 37 + seed * 101) % 997 for i in range(tokens_a_page * PAGE_COUNT)))


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


def _ranks(case: Case) -> Any:
    """SGLang's parallel context as a rank of the case's family sees it."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().override(**parallel(case.pool, case.rank))


def _publish(case: Case, backend: Backend, model: Path) -> Any:
    """The server's settings, known to all of SGLang from now on."""
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(
        model_path=str(model),
        device="cpu",
        page_size=page_tokens(case.pool),
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
    return server_args


def _cache(case: Case, server_args: Any, family: Family) -> Any:
    """A UnifiedRadixCache with host pools, controller and storage backend, as the scheduler has."""
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    params = CacheInitParams(
        disable=False,
        req_to_token_pool=family.requests,
        token_to_kv_pool_allocator=family.allocator,
        page_size=family.page_tokens,
        tree_components=family.components,
        tree_core_backend=case.core,
        **family.init,
    )
    cache = UnifiedRadixCache(params)
    cache.init_hicache(server_args, params)
    return cache


@contextlib.contextmanager
def _timed(case: Case) -> Iterator[Callable[[Stored, Recalled], Outcome]]:
    started = time.monotonic()

    def finish(stored: Stored, back: Recalled) -> Outcome:
        seconds = time.monotonic() - started
        return Outcome(case, stored.host_pages, back.pages, back.wrong, back.end_right, seconds)

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
        for case in (*CASES, *HYBRID_CASES, *DCP_CASES):
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
