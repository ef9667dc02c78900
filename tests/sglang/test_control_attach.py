"""Attach, detach, attach again, with SGLang's real controller in one process: nothing is left over.

A hundred rounds are made twice: the first hundred warm everything up (caches of SGLang and torch),
the second is measured. Threads, descriptors, bytes on disk and objects of ours must be the same
afterwards. Memory may have grown by the slack below. Measured for a hundred rounds: 0 to 3 KiB of
malloc, whatever the number of rounds, and up to 200 blocks of Python's; one store that is not
closed is over 1 MiB. What is resident goes up and down by some MiB with the arenas that
the threads of a round happen to use.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sglang_cpu import matrix
from sglang_cpu.backends import Backend, occupied_bytes

ROUNDS = 100
MALLOC_SLACK_BYTES = 64 << 10
BLOCKS_SLACK = 2000
RESIDENT_SLACK_KIB = 32 << 10


class MallocState(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
        )
    )


def malloc_bytes() -> int:
    """What malloc has handed out and not got back."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = MallocState
    state = ask()
    return int(state.uordblks) + int(state.hblkhd)


@dataclass(frozen=True)
class Held:
    """What this process holds."""

    threads: tuple[str, ...]
    descriptors: int
    objects: Counter[str]
    malloc_bytes: int
    blocks: int
    resident_kib: int
    disk_bytes: int

    @classmethod
    def now(cls, folder: Path) -> Held:
        gc.collect()
        status = Path("/proc/self/status").read_text()
        found = re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE)
        assert found
        return cls(
            threads=tuple(sorted(thread.name for thread in threading.enumerate())),
            descriptors=len(os.listdir("/proc/self/fd")),
            objects=Counter(
                type(one).__name__
                for one in gc.get_objects()
                if str(type(one).__module__).startswith("tutti_")
            ),
            malloc_bytes=malloc_bytes(),
            blocks=sys.getallocatedblocks(),
            resident_kib=int(found[1]),
            disk_bytes=occupied_bytes(folder),
        )

    def stores_since(self, before: Held) -> Counter[str]:
        """Stores, what opens them and their threads, by name, beyond those of `before`: a store
        that an earlier test closed on a silent device stays the process's for good."""
        return self._stores() - before._stores()

    def _stores(self) -> Counter[str]:
        kinds = ("PrefixStore", "TuttiLinker", "TuttiStorage")
        threads = (name for name in self.threads if name.startswith("tutti"))
        return Counter({kind: self.objects[kind] for kind in kinds}) + Counter(threads)

    def same_as(self, before: Held) -> bool:
        """Everything but memory."""
        return (
            len(self.threads) == len(before.threads)
            and self.descriptors == before.descriptors
            and self.objects == before.objects
            and self.disk_bytes == before.disk_bytes
        )

    def memory_as(self, before: Held) -> bool:
        """No more memory than before, but for the slack."""
        return (
            self.malloc_bytes - before.malloc_bytes <= MALLOC_SLACK_BYTES
            and self.blocks - before.blocks <= BLOCKS_SLACK
            and self.resident_kib - before.resident_kib <= RESIDENT_SLACK_KIB
        )


@pytest.fixture(autouse=True)
def nothing_is_logged() -> Iterator[None]:
    """pytest keeps log records, and with them the frames of the errors that SGLang logs."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Attachment:
    """A real cache whose storage backend comes and goes. `at_first`: before there was any."""

    def __init__(self, stack: matrix.Stack, backend: Backend, at_first: Held) -> None:
        self.stack = stack
        self.at_first = at_first
        self.cache = stack._cache
        self.controller = self.cache.cache_controller
        self.options = backend.extra_config()
        self.name = backend.name
        self.model = self.controller.storage_config.model_name

    def detach(self) -> None:
        done, message = self.cache.detach_storage_backend()
        assert done, message

    def attach(self, policy: str = "wait_complete", **options: Any) -> tuple[bool, str]:
        config = json.dumps({**self.options, **options})
        done: tuple[bool, str] = self.cache.attach_storage_backend(
            self.name, config, self.model, policy
        )
        return done

    def use(self) -> None:
        """Save a sequence, forget it, and read it back from the storage."""
        import torch
        from sglang.srt.mem_cache.utils import get_storage_hash_str

        stored = self.stack.fill(1)
        self.cache.evict_host(matrix.DEVICE_TOKENS * 4)
        keys = get_storage_hash_str(stored.tokens, None, page_size=matrix.PAGE_TOKENS)
        assert self.stack.storage.batch_exists(keys) == matrix.PAGE_COUNT
        slots = torch.arange(len(stored.tokens))
        assert self.stack.storage.batch_get_v1(keys, slots) == [True] * matrix.PAGE_COUNT


@pytest.fixture
def attachment(backend_name: str, store_folder: Path) -> Iterator[Attachment]:
    if backend_name != "tutti":
        pytest.skip("looks at what tutti leaves behind")
    backend = Backend(backend_name, store_folder, matrix.MATRIX_OPTIONS)
    at_first = Held.now(store_folder)
    with matrix.Stack(matrix.DEFAULT_CASE, backend) as stack:
        yield Attachment(stack, backend, at_first)


def test_a_hundred_attaches_leave_nothing(attachment: Attachment, store_folder: Path) -> None:
    def rounds() -> Held:
        for _ in range(ROUNDS):
            attachment.detach()
            done, message = attachment.attach()
            assert done, message
            attachment.use()
        return Held.now(store_folder)

    before, after = rounds(), rounds()
    assert after.same_as(before), (before, after)
    assert after.memory_as(before), (before, after)
    attachment.detach()
    assert after.stores_since(attachment.at_first)
    detached = Held.now(store_folder)
    assert not detached.stores_since(attachment.at_first)
    assert detached.descriptors < after.descriptors


def test_what_is_not_closed_is_noticed(
    attachment: Attachment, store_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the same look at a backend that does not close its store."""
    from tutti_sglang.backend import TuttiStorage

    before = Held.now(store_folder)
    left = []
    with monkeypatch.context() as patch:
        patch.setattr(TuttiStorage, "close", lambda self: left.append(self))
        attachment.detach()
    assert attachment.attach(writers_max=4)[0]
    after = Held.now(store_folder)
    assert not after.same_as(before)
    assert len(after.threads) > len(before.threads)
    assert after.descriptors > before.descriptors
    assert after.objects["TuttiStorage"] == before.objects["TuttiStorage"] + 1
    assert {"PrefixStore", "TuttiStorage", "tutti-saver"} <= after.stores_since(before).keys()
    assert after.malloc_bytes - before.malloc_bytes > MALLOC_SLACK_BYTES
    left[0].close()


def test_a_refused_attach_leaves_nothing(attachment: Attachment, store_folder: Path) -> None:
    """Refused options, and a pool refused after SGLang's own part of the attach is done."""
    attachment.use()
    attachment.detach()
    before = Held.now(store_folder)
    for wrong in ({"no_such_option": 1}, {"capacity": "a lot"}, {"path": "/proc/nowhere"}):
        done, message = attachment.attach(**wrong)
        assert not done
        assert next(iter(wrong)) in message or "/proc/nowhere" in message, message
    assert Held.now(store_folder).same_as(before)
    assert attachment.attach()[0]
    attachment.use()


def test_a_pool_refused_late_leaves_nothing(
    attachment: Attachment, store_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang undoes its own half of an attach only; without the plugin's hook the controller would
    stay attached, with its threads, and refuse every later attach."""
    from tutti_sglang.backend import TuttiStorage

    attachment.detach()
    before = Held.now(store_folder)

    def refuse(self: Any) -> None:
        raise ValueError("pool 'gold' is not supported")

    with monkeypatch.context() as patch:
        patch.setattr(TuttiStorage, "on_host_pools_registered", refuse)
        done, message = attachment.attach()
    assert not done and "gold" in message
    assert not attachment.controller.enable_storage
    assert attachment.controller.storage_backend is None
    assert Held.now(store_folder).same_as(before)
    assert attachment.attach()[0]
    attachment.use()


def test_a_second_attach_does_not_touch_the_first(attachment: Attachment) -> None:
    storage = attachment.stack.storage
    assert attachment.attach(policy="best_effort")[0]  # the same name: its policy only
    assert attachment.cache.prefetch_stop_policy == "best_effort"
    done, message = attachment.cache.attach_storage_backend("file", "{}", attachment.model)
    assert not done and "tutti" in message
    with pytest.raises(RuntimeError, match="already attached"):
        attachment.controller.attach_storage_backend("tutti", storage_backend_extra_config={})
    assert attachment.stack.storage is storage
    attachment.use()


def test_prefetches_name_all_ancestors(attachment: Attachment) -> None:
    """The keys that SGLang passes with a prefetch end where the prefetch begins."""
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    stored = attachment.stack.fill(1)
    keys = get_storage_hash_str(stored.tokens, None, page_size=matrix.PAGE_TOKENS)
    anchor = attachment.stack._match(stored.tokens).last_host_node
    root = attachment.stack._match(matrix.token_sequence(2)).last_host_node
    assert attachment.cache.get_prefix_hash_values(anchor) == keys
    assert attachment.cache.get_prefix_hash_values(root) == []
    attachment.detach()  # other backends get what SGLang gives
    assert attachment.cache.get_prefix_hash_values(anchor) == []


# ---- the linker ------------------------------------------------------------------------------


def test_a_hundred_linkers_leave_nothing(
    model: Path, backend_name: str, store_folder: Path
) -> None:
    if backend_name != "tutti":
        pytest.skip("looks at what tutti leaves behind")
    from linker_kit import Rig, keys_of, make_pools, published

    pools = make_pools("mha")
    pools.fill()
    keys, pages = keys_of("round", 6), [3, 4, 5, 9, 10, 11]

    def use() -> None:
        with Rig(server_args, pools, store_folder) as rig:
            assert rig.offload(keys, pages)
            assert rig.lookup(keys)[-1] == 6
            assert rig.load(keys, pages)

    def rounds() -> Held:
        for _ in range(ROUNDS):
            use()
        return Held.now(store_folder)

    at_first = Held.now(store_folder)
    with published(model) as server_args:
        before, after = rounds(), rounds()
    assert after.same_as(before), (before, after)
    assert after.memory_as(before), (before, after)
    assert not after.stores_since(at_first)
