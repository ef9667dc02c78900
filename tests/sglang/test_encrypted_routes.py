"""Both routes into SGLang over an encrypted store: bytes come back, and none lie in the open."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from linker_kit import Rig, keys_of, make_pools, published
from sglang_cpu.host_pools import fill, make, page_bytes, slots
from v2_kit import attach, chain, prefix

from tutti_core import ConfigError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from encryption_kit import key_file

PAGES = 5
ELSEWHERE = [9, 3, 11, 0, 7]


@pytest.fixture(scope="module")
def server_args(model: Path) -> Iterator[Any]:
    with published(model) as args:
        yield args


def assert_not_on_disk(folder: Path, pages: list[bytes]) -> None:
    files = b"".join(f.read_bytes() for f in folder.rglob("*") if f.is_file())
    for page in pages:
        for at in range(0, len(page) - 31, 1 + len(page) // 16):
            assert page[at : at + 32] not in files


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_host_pools(layout: str, store_folder: Path, tmp_path: Path) -> None:
    pool, keys = make("mha", layout), chain(PAGES)
    options = {"encryption_key_file": str(key_file(tmp_path)), "capacity": "32MiB"}
    storage = attach(store_folder, {"kv": pool}, extra=options)
    fill(pool, 1)
    before = [page_bytes(pool, p) for p in range(PAGES)]
    assert all(storage.batch_set_v1(keys, slots(pool, list(range(PAGES))), prefix([])))
    assert [page_bytes(pool, p) for p in range(PAGES)] == before
    storage.close()
    assert_not_on_disk(store_folder, before)
    storage = attach(store_folder, {"kv": pool}, extra=options)  # a restarted engine
    fill(pool, 2)
    assert all(storage.batch_get_v1(keys, slots(pool, ELSEWHERE), prefix([])))
    assert [page_bytes(pool, p) for p in ELSEWHERE] == before
    storage.close()


@pytest.mark.parametrize("kind", ["mha", "swa_mamba"])
@pytest.mark.parametrize("dram", [0, "8MiB"])
def test_device_pools(
    kind: str, dram: Any, server_args: Any, store_folder: Path, tmp_path: Path
) -> None:
    pools, keys = make_pools(kind), keys_of("encrypted", PAGES)
    pools.fill()
    before = [pools.read("kv", page) for page in range(1, PAGES + 1)]
    options = {"encryption_key_file": str(key_file(tmp_path)), "dram": dram, "catalog": "4MiB"}
    for opening in range(2):
        with Rig(server_args, pools, store_folder, **options) as rig:
            if opening == 0:
                rig.linker.note_ancestors([])
                assert rig.offload(keys, range(1, PAGES + 1), state=3)
            pools.wipe("kv", range(21, 21 + PAGES))
            rig.linker.note_ancestors([])
            assert rig.lookup(keys)[-1] == PAGES
            assert rig.load(keys, range(21, 21 + PAGES), swa=12, state=9)
            assert [pools.read("kv", page) for page in range(21, 21 + PAGES)] == before
    assert_not_on_disk(store_folder, before)


def test_a_wrong_key_fails_the_attach_of_both_routes(
    server_args: Any, store_folder: Path, tmp_path: Path
) -> None:
    options = {"encryption_key_file": str(key_file(tmp_path)), "capacity": "64MiB"}
    with Rig(server_args, make_pools("mha"), store_folder, **options):
        pass
    options["encryption_key_file"] = str(key_file(tmp_path, bytes(range(32)), "other"))
    with pytest.raises(ConfigError, match="another key"):
        Rig(server_args, make_pools("mha"), store_folder, **options)
    pool = make("mha", "page_first")
    with pytest.raises(ConfigError, match="another key"):
        attach(store_folder, {"kv": pool}, extra={**options, "segment": "1MiB"})
    with pytest.raises(ConfigError, match="no key is given"):
        attach(store_folder, {"kv": pool}, extra={"segment": "1MiB"})
    missing = {"encryption_key_file": str(tmp_path / "nothing")}
    with pytest.raises(ConfigError, match="openssl"):
        attach(store_folder, {"kv": pool}, extra=missing)
