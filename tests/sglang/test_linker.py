"""TuttiLinker over SGLang's real device pools on the CPU: byte-exact, bounded, in step."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from linker_kit import KINDS, TOKENS, Rig, keys_of, make_pools, published, wait_for

from tutti_core import ConfigError
from tutti_core.testing import Fault, FaultyDevices

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from store_kit import memory_devices

from tutti_sglang import identity, linker_setup
from tutti_sglang import linker as linker_module
from tutti_sglang.layer_counter import LoadCounter
from tutti_sglang.shards import Ranks


@pytest.fixture(scope="module")
def server_args(model: Path) -> Iterator[Any]:
    with published(model) as args:
        yield args


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_is_byte_exact(kind: str, server_args: Any, store_folder: Path) -> None:
    """Offload, forget, look up, load elsewhere: every byte of every pool."""
    pools = make_pools(kind)
    pools.fill()
    keys = keys_of(kind, 6)
    source, target = [3, 4, 5, 9, 10, 11], [21, 20, 25, 26, 27, 28]
    before = {"kv": [pools.read("kv", p) for p in source]}
    if "swa" in pools.buffers:
        before["swa"] = [pools.read("swa", p) for p in (10, 11)]
    if "mamba" in pools.buffers:
        before["mamba"] = [pools.read("mamba", 3)]
    with Rig(server_args, pools, store_folder) as rig:
        assert rig.offload(keys, source, state=3)
        lengths = rig.lookup(keys)
        assert lengths[-1] == 6
        assert lengths == ([1, 2, 3, 4, 5, 6] if kind in ("mha", "mla") else [6])
        for tensors in pools.buffers.values():
            for tensor in tensors:
                tensor.zero_()
        assert rig.load(keys, target, swa=12, state=7)
        assert [pools.read("kv", p) for p in target] == before["kv"]
        if "swa" in pools.buffers:
            assert [pools.read("swa", p) for p in (12, 13)] == before["swa"]
        if "mamba" in pools.buffers:
            assert [pools.read("mamba", 7)] == before["mamba"]
        untouched = [p for p in range(1, 32) if p not in target]
        assert not any(any(pools.read("kv", p)) for p in untouched), "bytes went astray"
        assert rig.linker.counters["failures"] == 0


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("kind", ["mha", "swa_mamba"])
def test_round_trip_with_pages_in_memory(
    kind: str, policy: str, server_args: Any, store_folder: Path
) -> None:
    """The store keeps pages in DRAM too: layers come from there part by part as well."""
    pools = make_pools(kind)
    pools.fill()
    keys = keys_of(policy, 5)
    options = {"dram": "8MiB", "write_policy": policy, "catalog": "4MiB"}
    with Rig(server_args, pools, store_folder, **options) as rig:
        rig.linker.note_ancestors([])
        assert rig.offload(keys, range(1, 6), state=3)
        rig.linker.note_ancestors([])
        assert rig.lookup(keys)[-1] == 5
        assert rig.load(keys, range(21, 26), swa=12, state=9)
        for page in range(1, 6):
            assert pools.read("kv", page) == pools.read("kv", 20 + page)
        if kind == "swa_mamba":
            assert pools.read("swa", 5) == pools.read("swa", 13)
            assert pools.read("mamba", 3) == pools.read("mamba", 9)
        tiers = {tier.name: tier for tier in rig.linker.store.stats().tiers}
        assert tiers["dram"].hits >= 5


# ---- what can be restored --------------------------------------------------------------------


def test_a_missing_page_cuts_the_prefix_exactly_there(server_args: Any, store_folder: Path) -> None:
    pools = make_pools("mha")
    keys = keys_of("hole", 6)
    with Rig(server_args, pools, store_folder) as rig:
        rig.linker.note_ancestors([])
        assert rig.offload(keys[:3], [1, 2, 3])
        rig.linker.note_ancestors(keys[:4])
        assert rig.offload(keys[4:], [5, 6])
        rig.linker.note_ancestors([])
        assert rig.lookup(keys) == [1, 2, 3]
        rig.linker.note_ancestors(keys[:3])
        assert rig.offload(keys[3:4], [4])
        rig.linker.note_ancestors([])
        assert rig.lookup(keys, rid="another") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("rooted", [True, False])
def test_a_tail_is_found_behind_its_ancestors(
    rooted: bool, server_args: Any, store_folder: Path
) -> None:
    """The engine asks for what its tree does not have; with the hooks it says what is before."""
    pools = make_pools("mha")
    pools.fill()
    keys = keys_of("tail", 8)
    before = [pools.read("kv", p) for p in range(1, 9)]
    with Rig(server_args, pools, store_folder) as rig:
        for low, high in ((0, 5), (5, 8)):
            rig.linker.note_ancestors(keys[:low] if rooted else None)
            assert rig.offload(keys[low:high], range(1 + low, 1 + high))
        rig.linker.note_ancestors(keys[:2] if rooted else None)
        assert rig.lookup(keys[2:]) == [1, 2, 3, 4, 5, 6]
        assert rig.load(keys[2:6], [11, 12, 13, 14])
        assert [pools.read("kv", p) for p in (11, 12, 13, 14)] == before[2:6]
        linked = rig.linker._linked["kv"]
        assert len(linked.store._entry.pages.loose) == (0 if rooted else 8)


def test_ancestors_serve_one_call(server_args: Any, store_folder: Path) -> None:
    with Rig(server_args, make_pools("mha"), store_folder) as rig:
        keys = keys_of("once", 2)
        rig.linker.note_ancestors([])
        assert rig.offload(keys, [1, 2])
        assert rig.offload(keys_of("other", 2), [3, 4])
        assert len(rig.linker._linked["kv"].store._entry.pages.loose) == 2


@pytest.mark.parametrize("kind", ["swa", "mamba", "mamba_mha", "swa_mamba"])
def test_windows_restore_only_where_they_end(
    kind: str, server_args: Any, store_folder: Path
) -> None:
    """Two nodes of 3 pages: states and windows are there at the ends of the nodes only."""
    pools = make_pools(kind)
    pools.fill()
    keys = keys_of(kind, 7)
    with Rig(server_args, pools, store_folder) as rig:
        rig.linker.note_ancestors([])
        assert rig.offload(keys[:3], [1, 2, 3], state=3)
        rig.linker.note_ancestors(keys[:3])
        assert rig.offload(keys[3:6], [4, 5, 6], state=6)
        rig.linker.note_ancestors([])
        assert rig.lookup(keys) == [3, 6]
        rig.linker.note_ancestors([])
        assert rig.lookup(keys[:5]) == [3]
        rig.linker.note_ancestors(keys[:1])
        # Page 0 is not asked for, so the window of its successor ends at the start.
        assert rig.lookup(keys[1:]) == ([1, 2, 5] if kind == "swa" else [2, 5])
        want = pools.read("mamba", 3) if "mamba" in pools.buffers else b""
        assert rig.load(keys[1:3], [11, 12], swa=11, state=9)
        assert [pools.read("kv", p) for p in (11, 12)] == [pools.read("kv", p) for p in (2, 3)]
        if want:
            assert pools.read("mamba", 9) == want


def test_a_page_of_one_pool_only_restores_nothing(server_args: Any, store_folder: Path) -> None:
    pools = make_pools("mamba")
    keys = keys_of("half", 3)
    with Rig(server_args, pools, store_folder) as rig:
        kv_only = rig.transfers(keys, [1, 2, 3])[:1]
        assert rig.linker.offload(kv_only)
        assert rig.result()
        assert rig.lookup(keys) == []
        assert len(rig.linker._leases) == 0, "nothing was reported, so nothing is held"


def test_pools_refuse_slots_that_are_not_whole_pages(server_args: Any, store_folder: Path) -> None:
    pools = make_pools("mha")
    keys = keys_of("slots", 2)
    with Rig(server_args, pools, store_folder) as rig:
        crooked = rig.transfers(keys, [1, 2])
        crooked[0].device_indices = crooked[0].device_indices + 1
        assert rig.linker.offload(crooked)
        assert not rig.result()
        beyond = rig.transfers(keys, [40, 41])
        assert rig.linker.offload(beyond)
        assert not rig.result()
        assert rig.lookup(keys) == []


# ---- damage ----------------------------------------------------------------------------------


def damage(folder: Path, needle: bytes) -> None:
    """Flip one bit in the only place of the store where `needle` is."""
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".mdb":
            data = path.read_bytes()
            at = data.find(needle)
            if at >= 0:
                with path.open("r+b") as stream:
                    stream.seek(at)
                    stream.write(bytes([needle[0] ^ 1]))
                return
    raise AssertionError("the bytes are not in the store")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", ["first", "last"])
def test_a_flipped_byte_fails_the_load_once(
    kind: str, layer: str, server_args: Any, store_folder: Path
) -> None:
    """The load fails, and the page is not reported again, so that the retry computes it."""
    pools = make_pools(kind)
    pools.fill()
    keys = keys_of("flip", 5)
    with Rig(server_args, pools, store_folder) as rig:
        for end in (3, 5):
            rig.linker.note_ancestors(keys[: 3 if end == 5 else 0])
            low = 3 if end == 5 else 0
            assert rig.offload(keys[low:end], range(1 + low, 1 + end), state=end)
        tensor = pools.buffers["kv"][0 if layer == "first" else -1]
        row = tensor[pools.slots("kv", [5])].contiguous().view(torch.uint8)
        damage(store_folder, row.numpy().tobytes()[:512])
        left = {"mha": [1, 2, 3, 4], "mla": [1, 2, 3, 4], "swa": [3, 4]}.get(kind, [3])
        rig.linker.note_ancestors([])
        assert rig.lookup(keys)[-1] == 5
        assert not rig.load(keys, [11, 12, 13, 14, 15], swa=12, state=9)
        rig.linker.note_ancestors([])
        assert rig.lookup(keys) == left
        assert rig.load(keys[:3], [11, 12, 13], swa=11, state=9)
        assert [pools.read("kv", p) for p in (11, 12, 13)] == [
            pools.read("kv", p) for p in (1, 2, 3)
        ]
        rig.linker.note_ancestors(keys[:3])
        assert rig.offload(keys[3:], [4, 5], state=5), "computed anew, it is stored anew"
        rig.linker.note_ancestors([])
        assert rig.lookup(keys)[-1] == 5
        assert rig.load(keys, [11, 12, 13, 14, 15], swa=12, state=9)
        assert pools.read("kv", 15) == pools.read("kv", 5)


def test_a_damaged_state_fails_the_load_too(server_args: Any, store_folder: Path) -> None:
    pools = make_pools("mamba")
    pools.fill()
    keys = keys_of("state", 3)
    with Rig(server_args, pools, store_folder) as rig:
        assert rig.offload(keys, [1, 2, 3], state=5)
        row = pools.buffers["mamba"][-1][torch.tensor([5])].contiguous().view(torch.uint8)
        damage(store_folder, row.numpy().tobytes()[:256])
        assert rig.lookup(keys) == [3]
        assert not rig.load(keys, [11, 12, 13], state=9)
        assert rig.lookup(keys) == []


# ---- leases ----------------------------------------------------------------------------------

SMALL = {"capacity": "6MiB", "catalog": "2MiB", "segment": "256KiB", "policy": "lru"}


def flood(rig: Rig, rounds: int = 12) -> None:
    """Store more other pages than the store has room for."""
    for i in range(rounds):
        rig.linker.note_ancestors([])
        rig.offload(keys_of(f"flood {i}", 24), range(4, 28))


def test_a_lease_keeps_pages_under_pressure(server_args: Any, store_folder: Path) -> None:
    pools = make_pools("mha")
    pools.fill()
    keys = keys_of("leased", 3)
    with Rig(server_args, pools, store_folder, **SMALL) as rig:
        rig.linker.note_ancestors([])
        assert rig.offload(keys, [1, 2, 3])
        rig.linker.note_ancestors([])
        assert rig.lookup(keys) == [1, 2, 3]
        flood(rig)
        assert rig.linker.store.stats().counters["evicted_pages"] > 0, "there was no pressure"
        assert rig.load(keys, [28, 29, 30])
        assert pools.read("kv", 30) == pools.read("kv", 3)
        flood(rig)
        rig.linker.note_ancestors([])
        assert rig.lookup(keys) == [], "after the load nothing held the pages any more"


def test_a_waiting_request_asks_again_and_again(server_args: Any, store_folder: Path) -> None:
    """The same answer, one lease, and not a new use of the pages each time."""
    keys = keys_of("waiting", 3)
    with Rig(server_args, make_pools("mha"), store_folder) as rig:
        assert rig.offload(keys, [1, 2, 3])
        for _ in range(50):
            assert rig.lookup(keys) == [1, 2, 3]
        assert rig.linker.counters["lookup_hits"] == 1
        assert len(rig.linker._leases) == 1
        assert rig.lookup(keys[:2]) == [1, 2], "other pages, another answer"
        assert rig.lookup(keys) == [1, 2, 3]


@pytest.mark.parametrize("how", ["expired", "cancelled", "reset", "looked up again"])
def test_what_ends_a_lease(
    how: str, server_args: Any, store_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = make_pools("mha")
    keys = keys_of("let go", 3)
    with Rig(server_args, pools, store_folder, **SMALL) as rig:
        rig.linker.note_ancestors([])
        assert rig.offload(keys, [1, 2, 3])
        rig.linker.note_ancestors([])
        assert rig.lookup(keys) == [1, 2, 3]
        assert len(rig.linker._leases) == 1
        if how == "expired":
            now_s = time.monotonic()
            monkeypatch.setattr(time, "monotonic", lambda: now_s + 61.0)
            rig.linker.num_completed_offloads()
            monkeypatch.undo()
        elif how == "cancelled":
            assert rig.linker.load("r", rig.transfers(keys, [4, 5, 6]))
            assert rig.linker.cancel_queued_load("r")
            assert not rig.linker.cancel_queued_load("r")
            assert rig.linker.start_layer_wise_loading() == -1
        elif how == "reset":
            rig.linker.reset()
        else:
            assert rig.lookup(keys_of("not there", 2)) == []
        assert len(rig.linker._leases) == 0
        flood(rig)
        rig.linker.note_ancestors([])
        assert rig.lookup(keys) == [], "the pages were still held"


def test_leases_are_bounded(server_args: Any, store_folder: Path) -> None:
    """However many requests vanish without a word, pages can be stored."""
    pools = make_pools("mha")
    with Rig(server_args, pools, store_folder, **SMALL) as rig:
        for i in range(40):
            keys = keys_of(f"vanishing {i}", 8)
            rig.linker.note_ancestors([])
            assert rig.offload(keys, range(1, 9)), "no room was left"
            rig.linker.note_ancestors([])
            assert rig.lookup(keys, rid=f"r{i}")[-1] == 8
        assert rig.linker._leases.length_bytes <= 6 << 18


# ---- what is offered again -------------------------------------------------------------------


def test_stored_pages_are_answered_in_the_call(server_args: Any, store_folder: Path) -> None:
    pools = make_pools("swa_mamba")
    keys = keys_of("again", 6)
    with Rig(server_args, pools, store_folder) as rig:
        rig.linker.note_ancestors([])
        assert rig.offload(keys, range(1, 7), state=3)
        written = rig.linker.store.stats().counters["saved_pages"]
        rig.linker.note_ancestors([])
        assert rig.linker.offload(rig.transfers(keys, range(1, 7), state=3))
        assert rig.linker.num_completed_offloads() == 1, "not answered at once"
        assert rig.linker.pop_completed_offload()
        assert rig.linker.counters["offloads_known"] == 1
        assert rig.linker.store.stats().counters["saved_pages"] == written


def test_loaded_pages_with_new_ones_write_the_new_ones_only(
    server_args: Any, store_folder: Path
) -> None:
    """As SGLang offers them: pages that were loaded and the one computed after, in one node."""
    pools = make_pools("mha")
    keys = keys_of("grown", 7)
    with Rig(server_args, pools, store_folder) as rig:
        rig.linker.note_ancestors([])
        assert rig.offload(keys[:6], range(1, 7))
        rig.linker.note_ancestors([])
        assert rig.offload(keys, range(1, 8))
        assert rig.linker.store.stats().counters["saved_pages"] == 7
        rig.linker.note_ancestors([])
        assert rig.lookup(keys)[-1] == 7


# ---- faults and bounds -----------------------------------------------------------------------


@contextlib.contextmanager
def faulty_rig(
    server_args: Any, folder: Path, kind: str = "mha", **options: Any
) -> Iterator[tuple[Rig, FaultyDevices]]:
    made: list[FaultyDevices] = []

    def transport(config: Any) -> FaultyDevices:
        made.append(memory_devices(config))
        return made[0]

    options = {"io_timeout_s": 20.0, "catalog": "2MiB", **options}
    with Rig(server_args, make_pools(kind), folder, transport=transport, **options) as rig:
        rig.pools.fill()
        yield rig, made[0]


def test_a_read_error_is_a_failed_load(server_args: Any, store_folder: Path) -> None:
    with faulty_rig(server_args, store_folder) as (rig, devices):
        keys = keys_of("eio", 4)
        assert rig.offload(keys, [1, 2, 3, 4])
        assert rig.lookup(keys) == [1, 2, 3, 4]
        devices.arm(Fault("error", "read", index=0, count=1 << 30))
        assert not rig.load(keys, [11, 12, 13, 14])
        assert rig.linker.counters["failed_loads"] == 1
        assert len(rig.linker._leases) == 0
        assert rig.lookup(keys) == [], "what cannot be read is not reported again"


def test_a_write_error_is_a_result(server_args: Any, store_folder: Path) -> None:
    with faulty_rig(server_args, store_folder) as (rig, devices):
        devices.arm(Fault("error", "write", index=0, count=1 << 30))
        keys = keys_of("eio", 4)
        assert not rig.offload(keys, [1, 2, 3, 4])
        assert rig.lookup(keys) == []


def test_reset_waits_for_loads_and_offloads(server_args: Any, store_folder: Path) -> None:
    with faulty_rig(server_args, store_folder) as (rig, devices):
        keys = keys_of("reset", 4)
        assert rig.offload(keys, [1, 2, 3, 4])
        assert rig.lookup(keys)[-1] == 4
        assert rig.linker.load("r", rig.transfers(keys, [11, 12, 13, 14]))
        assert rig.lookup(keys, rid="queued")[-1] == 4
        devices.hold()
        index = rig.linker.start_layer_wise_loading()
        assert rig.linker.load("queued", rig.transfers(keys, [21, 22, 23, 24]))
        assert rig.linker.offload(rig.transfers(keys_of("other", 4), [5, 6, 7, 8]))
        ended = threading.Event()

        def reset() -> None:
            rig.linker.reset()
            ended.set()

        thread = threading.Thread(target=reset)
        thread.start()
        assert not ended.wait(0.5), "reset did not wait for the transfers"
        devices.release()
        thread.join(20)
        assert ended.is_set()
        assert rig.linker.num_completed_offloads() == 0
        assert rig.linker.start_layer_wise_loading() == -1
        assert rig.linker.finish_layer_wise_loading(index)  # nothing of it is left
        assert rig.pools.read("kv", 21) != rig.pools.read("kv", 1)
        assert rig.lookup(keys)[-1] == 4, "stored pages stay"
        assert rig.load(keys, [21, 22, 23, 24])
        assert rig.pools.read("kv", 24) == rig.pools.read("kv", 4)


def test_a_device_that_does_not_answer_is_waited_for_with_a_bound(
    server_args: Any, store_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linker_module, "LOAD_TIMEOUT_S", 0.5)
    with faulty_rig(server_args, store_folder) as (rig, devices):
        keys = keys_of("stalled", 4)
        assert rig.offload(keys, [1, 2, 3, 4])
        assert rig.lookup(keys)[-1] == 4
        devices.hold()
        started_s = time.monotonic()
        assert not rig.load(keys, [11, 12, 13, 14])
        assert time.monotonic() - started_s < 5.0
        assert rig.lookup(keys) == [], "the memory may still be written to: nothing is loaded now"
        assert not rig.offload(keys_of("later", 1), [5])
        devices.release()


def test_offloads_are_refused_when_too_many_bytes_wait(
    server_args: Any, store_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused ones have their result too, in the order of the calls."""
    monkeypatch.setattr(linker_module, "WAITING_SHARE", 0.02)
    with faulty_rig(server_args, store_folder) as (rig, devices):
        devices.hold()
        assert rig.linker.offload(rig.transfers(keys_of("a", 8), range(1, 9)))
        assert rig.linker.offload(rig.transfers(keys_of("b", 8), range(9, 17)))
        assert rig.linker.counters["offloads_refused"] == 1
        assert rig.linker.num_completed_offloads() == 0, "the older one is not done"
        devices.release()
        assert rig.result()
        assert not rig.result()
        assert rig.lookup(keys_of("b", 8)) == []
        assert rig.offload(keys_of("b", 8), range(9, 17)), "offered again"


def test_a_short_backlog_is_not_overrun(server_args: Any, store_folder: Path) -> None:
    """A node larger than what may wait in the store is handed over in pieces."""
    with Rig(server_args, make_pools("mha"), store_folder, backlog="64KiB") as rig:
        keys = keys_of("pieces", 20)
        rig.linker.note_ancestors([])
        assert rig.offload(keys, range(1, 21))
        rig.linker.note_ancestors([])
        assert rig.lookup(keys)[-1] == 20


def test_results_come_in_the_order_of_the_calls(server_args: Any, store_folder: Path) -> None:
    with faulty_rig(server_args, store_folder) as (rig, devices):
        known = keys_of("known", 2)
        assert rig.offload(known, [1, 2])
        devices.hold()
        assert rig.linker.offload(rig.transfers(keys_of("new", 2), [3, 4]))
        assert rig.linker.offload(rig.transfers(known, [1, 2]))
        assert rig.linker.num_completed_offloads() == 0
        devices.release()
        assert [rig.result(), rig.result()] == [True, True]


def test_offloads_wait_for_loads_but_not_for_ever(
    server_args: Any, store_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with faulty_rig(server_args, store_folder) as (rig, devices):
        keys = keys_of("yield", 2)
        assert rig.offload(keys, [1, 2])
        assert rig.lookup(keys)[-1] == 2
        assert rig.linker.load("r", rig.transfers(keys, [11, 12]))
        devices.hold()
        index = rig.linker.start_layer_wise_loading()
        started_s = time.monotonic()
        assert rig.linker.offload(rig.transfers(keys_of("behind", 2), [3, 4]))
        wait_for(lambda: rig.linker.store._saver.pending_bytes() > 0, "the piece", 5)
        assert 0.15 < time.monotonic() - started_s < 2.0
        devices.release()
        assert rig.linker.finish_layer_wise_loading(index)
        assert rig.result()


# ---- life ------------------------------------------------------------------------------------


def test_switched_off_it_answers_and_stores_nothing(server_args: Any, store_folder: Path) -> None:
    with Rig(server_args, make_pools("mha"), store_folder) as rig:
        keys = keys_of("weights", 3)
        assert rig.offload(keys, [1, 2, 3])
        assert rig.lookup(keys) == [1, 2, 3]
        assert rig.linker in identity._attached
        rig.linker.switch_off("the weights changed")
        assert rig.lookup(keys) == []
        assert not rig.offload(keys_of("new", 3), [4, 5, 6])
        assert not rig.load(keys, [11, 12, 13]), "the same branch as on other ranks, and no bytes"
        rig.linker.reset()


def test_a_restarted_engine_finds_its_pages(server_args: Any, store_folder: Path) -> None:
    keys = keys_of("restart", 4)
    pools = make_pools("mha")
    pools.fill()
    with Rig(server_args, pools, store_folder) as rig:
        rig.linker.note_ancestors([])
        assert rig.offload(keys, [1, 2, 3, 4])
    again = make_pools("mha")
    with Rig(server_args, again, store_folder) as rig:
        rig.linker.note_ancestors([])
        assert rig.lookup(keys) == [1, 2, 3, 4]
        assert rig.load(keys, [7, 8, 9, 10])
        assert [again.read("kv", p) for p in (7, 8, 9, 10)] == [
            pools.read("kv", p) for p in (1, 2, 3, 4)
        ]


@pytest.mark.parametrize(
    "change", [{"tenant": "b"}, {"weights": "b"}, {"head_dim": 64}, {"dtype": torch.float16}]
)
def test_other_namespaces_find_nothing(
    change: dict[str, Any], server_args: Any, store_folder: Path
) -> None:
    keys = keys_of("apart", 3)
    with Rig(server_args, make_pools("mha"), store_folder) as rig:
        assert rig.offload(keys, [1, 2, 3])
    options = {k: v for k, v in change.items() if k in ("tenant", "weights")}
    pool = {k: v for k, v in change.items() if k not in options}
    with Rig(server_args, make_pools("mha", **pool), store_folder, **options) as rig:
        assert rig.lookup(keys) == []


def test_calls_after_close_do_nothing(server_args: Any, store_folder: Path) -> None:
    rig = Rig(server_args, make_pools("mha"), store_folder)
    keys = keys_of("closed", 2)
    assert rig.offload(keys, [1, 2])
    rig.linker.close()
    rig.linker.close()
    assert rig.lookup(keys) == []
    assert rig.linker.offload(rig.transfers(keys, [1, 2]))
    assert not rig.linker.pop_completed_offload()
    assert rig.linker.load("r", rig.transfers(keys, [3, 4]))
    assert not rig.run_batch()
    rig.linker.reset()


@pytest.mark.parametrize("broken", ["LayerReader", "Offloader", "namespace_of", "watch"])
def test_a_failed_start_leaves_nothing_open(
    broken: str, server_args: Any, store_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ConfigError("no")

    threads = threading.active_count()
    with monkeypatch.context() as patch:
        if broken == "watch":
            patch.setattr(linker_module.TuttiLinker, "_log_start", fail)
        else:
            patch.setattr(linker_module, broken, fail)
        with pytest.raises(ConfigError):
            Rig(server_args, make_pools("mha"), store_folder)
    wait_for(lambda: threading.active_count() <= threads, "the threads' end", 5)
    with Rig(server_args, make_pools("mha"), store_folder) as rig:
        assert rig.offload(keys_of("fresh", 1), [1])


@pytest.mark.parametrize("kind", ["mha", "mla", "mamba"])
def test_what_another_rank_finds(
    kind: str, server_args: Any, store_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latent pages are the same on all ranks: rank 0 saves them. All else is each rank's own."""
    keys = keys_of("ranks", 3)
    first = make_pools(kind)
    first.fill()
    for rank, pools in ((0, first), (1, make_pools(kind))):
        monkeypatch.setattr(linker_module, "ranks_of", lambda _, r=rank: Ranks(r, 2))
        with Rig(server_args, pools, store_folder) as rig:
            rig.linker.note_ancestors([])
            if rank == 0:
                assert rig.offload(keys, [1, 2, 3], state=3)
                continue
            assert rig.lookup(keys) == ([1, 2, 3] if kind == "mla" else [])
            rig.linker.note_ancestors([])
            assert rig.offload(keys, [4, 5, 6], state=4)
            written = rig.linker.store.stats().counters.get("saved_pages", 0)
            assert written == {"mha": 3, "mla": 0, "mamba": 1}[kind]
            if kind == "mla":
                assert rig.load(keys, [7, 8, 9])
                assert pools.read("kv", 9) == first.read("kv", 3)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"capasity": "1GiB"}, "capasity"),
        ({"capacity": "1KiB"}, "segment"),
        ({"tenant": 3}, "tenant"),
    ],
)
def test_wrong_options_are_named(
    options: dict[str, Any], word: str, server_args: Any, store_folder: Path
) -> None:
    with pytest.raises(ConfigError, match=word):
        Rig(server_args, make_pools("mha"), store_folder, **options)


def test_starts_and_ends_leave_nothing_behind(server_args: Any, store_folder: Path) -> None:
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for i in range(5):
        with Rig(server_args, make_pools("mla"), store_folder) as rig:
            assert rig.offload(keys_of(f"start {i}", 2), [1, 2])
    wait_for(lambda: threading.active_count() <= threads, "the threads' end", 5)
    assert len(os.listdir("/proc/self/fd")) <= files


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip_by_way_of_staging(
    kind: str, server_args: Any, store_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The route of CUDA pools, with memory of the CPU in the place of a device's."""
    monkeypatch.setattr(linker_setup, "memory_path", lambda *a, **k: ("staging", "for this test"))
    pools = make_pools(kind)
    pools.fill()
    keys = keys_of(kind, 5)
    with Rig(server_args, pools, store_folder) as rig:
        rig.linker.note_ancestors([])
        assert rig.offload(keys, range(1, 6), state=3)
        rig.linker.note_ancestors([])
        assert rig.linker.offload(rig.transfers(keys, range(1, 6), state=3))
        assert rig.result()
        rig.linker.note_ancestors([])
        assert rig.lookup(keys)[-1] == 5
        assert rig.load(keys, range(21, 26), swa=12, state=9)
        assert [pools.read("kv", p) for p in range(21, 26)] == [
            pools.read("kv", p) for p in range(1, 6)
        ]
        if "swa" in pools.buffers:
            assert [pools.read("swa", p) for p in (12, 13)] == [
                pools.read("swa", p) for p in (4, 5)
            ]
        if "mamba" in pools.buffers:
            assert pools.read("mamba", 9) == pools.read("mamba", 3)


def test_the_engines_wait_ends_when_nothing_completes_layers() -> None:
    """Neither a dead thread nor one that hangs keeps the scheduler for ever."""
    for alive, limit_s in ((False, 60.0), (True, 0.1)):
        counter = LoadCounter(2, lambda alive=alive: alive, limit_s)
        index = counter.update_producer()
        counter.set_consumer(index)
        counter.complete(index, 0)
        counter.wait_until(0)
        started_s = time.monotonic()
        counter.wait_until(1)
        assert not counter.finish(index)
        assert time.monotonic() - started_s < 5.0


# ---- hooks -----------------------------------------------------------------------------------


class Wrapper:
    """What the hooks see of SGLang's wrapper."""

    def __init__(self, linker: Any, prefix: list[str], own: list[str]) -> None:
        self.cache_linker = linker
        tree = SimpleNamespace(
            get_prefix_hash_values=lambda node: list(prefix), get_hash_values=lambda node: list(own)
        )
        self.cache = SimpleNamespace(tree_core=tree, page_size=TOKENS)


def seen_by(linker: Any) -> list[Any]:
    """The ancestors that the linker knows at this moment."""
    return [linker._ancestors]


def test_hooks_tell_the_ancestors_for_one_call(server_args: Any, store_folder: Path) -> None:
    prefix, own = keys_of("p", 2), keys_of("o", 3)
    key = range(10 * TOKENS)
    with Rig(server_args, make_pools("mha"), store_folder) as rig:
        linker, seen = rig.linker, []
        wrapper = Wrapper(linker, prefix, own)

        def original(*args: Any) -> str:
            seen.extend(seen_by(linker))
            return "result"

        for tokens, want in ((5 * TOKENS, prefix + own), (0, []), (4 * TOKENS, None)):
            result = SimpleNamespace(device_prefix_len=tokens, last_device_node=1)
            answer = linker_module.around_match(original, wrapper, key, object(), result)
            assert answer == "result" and seen.pop() == want
            assert linker._ancestors is None
        whole = SimpleNamespace(device_prefix_len=len(key), last_device_node=1)
        linker_module.around_match(original, wrapper, key, object(), whole)
        assert seen.pop() is None, "nothing is looked up, so nothing is collected"
        linker_module.around_offload_node(original, wrapper, 1, [])
        assert seen.pop() == prefix and linker._ancestors is None

        def failing(*args: Any) -> None:
            raise RuntimeError

        with pytest.raises(RuntimeError):
            linker_module.around_offload_node(failing, wrapper, 1, [])
        assert linker._ancestors is None, "kept for a call that has nothing to do with it"


def test_hooks_leave_other_linkers_alone() -> None:
    wrapper = Wrapper(object(), [], [])
    del wrapper.cache
    assert linker_module.around_match(lambda *a: a[1:], wrapper, 1, 2, 3) == (1, 2, 3)
    assert linker_module.around_offload_node(lambda *a: a[1:], wrapper, 1, []) == (1, [])
