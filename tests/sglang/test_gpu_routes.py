"""Both routes into SGLang over the gpu transport, on controllers in software."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from linker_kit import Rig, keys_of, make_pools, published
from sglang_cpu.host_pools import fill, make, page_bytes, slots
from v2_kit import attach, chain, prefix

PAGES = 5
ELSEWHERE = [9, 3, 11, 0, 7]
GPU = {"transport": "gpu", "gpu_controller": "software"}
FILES = {"transport": "auto"}


@pytest.fixture(scope="module")
def server_args(model: Path) -> Iterator[Any]:
    with published(model) as args:
        yield args


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
@pytest.mark.parametrize(("writes", "reads"), [(GPU, GPU), (GPU, FILES), (FILES, GPU)])
def test_host_pools(
    layout: str, writes: dict[str, Any], reads: dict[str, Any], store_folder: Path
) -> None:
    pool, keys = make("mha", layout), chain(PAGES)
    storage = attach(store_folder, {"kv": pool}, extra={"capacity": "32MiB", **writes})
    fill(pool, 1)
    before = [page_bytes(pool, p) for p in range(PAGES)]
    assert all(storage.batch_set_v1(keys, slots(pool, list(range(PAGES))), prefix([])))
    storage.close()
    storage = attach(store_folder, {"kv": pool}, extra={"capacity": "32MiB", **reads})
    fill(pool, 2)
    assert all(storage.batch_get_v1(keys, slots(pool, ELSEWHERE), prefix([])))
    assert [page_bytes(pool, p) for p in ELSEWHERE] == before
    storage.close()


@pytest.mark.parametrize("kind", ["mha", "swa_mamba"])
def test_device_pools(kind: str, server_args: Any, store_folder: Path) -> None:
    pools, keys = make_pools(kind), keys_of("gpu", PAGES)
    pools.fill()
    before = [pools.read("kv", page) for page in range(1, PAGES + 1)]
    for opening, options in enumerate((GPU, FILES, GPU)):
        with Rig(server_args, pools, store_folder, **options) as rig:
            used = rig.linker.store.stats().transport.name
            assert (used == "gpu") == (options is GPU)
            if opening == 0:
                rig.linker.note_ancestors([])
                assert rig.offload(keys, range(1, PAGES + 1), state=3)
            pools.wipe("kv", range(21, 21 + PAGES))
            rig.linker.note_ancestors([])
            assert rig.lookup(keys)[-1] == PAGES
            assert rig.load(keys, range(21, 21 + PAGES), swa=12, state=9)
            assert [pools.read("kv", page) for page in range(21, 21 + PAGES)] == before


def drive_of(store: Any) -> Any:
    """The one controller in software behind a store."""
    (mover,) = store._transport._movers
    return mover.device._opened.soft


@pytest.mark.parametrize("skip", [0, 2])
@pytest.mark.parametrize("kind", ["status", "flip", "gone"])
def test_what_goes_wrong_is_a_failed_load_and_forgotten(
    kind: str, skip: int, server_args: Any, store_folder: Path
) -> None:
    """At the first read, or in the middle of a load; before that the same load is good."""
    pools, keys = make_pools("mha"), keys_of(kind, PAGES)
    pools.fill()
    with Rig(server_args, pools, store_folder, io_timeout_s=20.0, **GPU) as rig:
        assert rig.offload(keys, range(1, PAGES + 1))
        assert rig.lookup(keys)[-1] == PAGES
        assert rig.load(keys, range(11, 11 + PAGES))
        assert rig.lookup(keys)[-1] == PAGES
        drive = drive_of(rig.linker.store)
        drive.inject(kind, opcode=2, skip=skip, status=0x281, count=1 << 20)
        assert not rig.load(keys, range(21, 21 + PAGES))
        assert rig.linker.counters["failed_loads"] == 1
        left = rig.lookup(keys)
        assert left == [] if skip == 0 else PAGES not in left
        drive.clear_faults()


@pytest.mark.parametrize("skip", [0, 2])
@pytest.mark.parametrize("kind", ["status", "flip", "gone"])
def test_what_goes_wrong_is_a_miss_of_hicache(kind: str, skip: int, store_folder: Path) -> None:
    pool, keys = make("mha", "page_first"), chain(PAGES)
    storage = attach(store_folder, {"kv": pool}, extra={"capacity": "32MiB", **GPU})
    fill(pool, 1)
    before = [page_bytes(pool, p) for p in range(PAGES)]
    assert all(storage.batch_set_v1(keys, slots(pool, list(range(PAGES))), prefix([])))
    assert all(storage.batch_get_v1(keys, slots(pool, ELSEWHERE), prefix([])))
    drive = drive_of(storage.store)
    drive.inject(kind, opcode=2, skip=skip, status=0x281, count=1 << 20)
    fill(pool, 2)
    got = storage.batch_get_v1(keys, slots(pool, ELSEWHERE), prefix([]))
    assert not all(got)
    for page, good, content in zip(ELSEWHERE, got, before, strict=True):
        assert not good or page_bytes(pool, page) == content, "wrong bytes were called good"
    drive.clear_faults()
    storage.close()
