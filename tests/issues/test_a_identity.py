"""Known bugs, A: keys that mean two things, and keys that mean nothing to anybody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from store_kit import PAGE, client, open_small, run

from tutti_core import Namespace

ROOT = Path(__file__).parents[2]
TOKENS = list(range(64))


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "fp8"},
        {"weights": "revision 2"},
        {"model": "org-m"},
        {"layout": "page_first"},
        {"shard": "tp 1/2"},
        {"pool": "draft"},
        {"page_tokens": 2},
        {"extra": {"rope": "yarn"}},
    ],
    ids=lambda o: next(iter(o)),
)
def test_bugs_01_02_03_another_configuration_sees_nothing(store_dir: Path, other: dict) -> None:
    """Fault: pages of equal size, but of another dtype, model or weights, pass for one's own."""
    with open_small(store_dir) as store:
        mine, theirs = client(store), client(store, **other)
        assert all(mine.save(run("k", 3)))
        assert theirs.match(run("k", 3)) == 0 and not any(theirs.contains(run("k", 3)))
        assert not any(theirs.load(run("k", 3)))
        assert all(theirs.save(run("k", 3), seed=5)) and all(theirs.load(run("k", 3)))
        assert mine.match(run("k", 3)) == 3 and all(mine.load(run("k", 3)))


def test_bug_01_another_dtype_of_the_engine_is_another_page(hicache: Any, store_dir: Path) -> None:
    """Fault: an engine with another cache dtype, whose pages are as long, reads these."""
    import torch

    ours = hicache.make_host_pool("mha", "page_first")
    others = [
        hicache.make_host_pool("mha", "page_first", dtype=torch.float16),
        hicache.make_host_pool("mha", "page_first", dtype=torch.float8_e4m3fn, head_dim=64),
    ]
    keys = hicache.keys_of(2)
    with hicache.Rank(store_dir, ours) as rank:
        rank.fill(1)
        before = rank.read(0)
        assert rank.set(keys, [0, 1]) == [True, True]
        for pool in others:
            with hicache.Rank(store_dir, pool) as other:
                assert len(other.read(0)) == len(before), "as long as ours"
                assert other.exists(keys) == 0 and other.get(keys, [2, 3]) == [False, False]
                assert other.set(keys, [2, 3]) == [True, True]
        rank.fill(2)
        assert rank.exists(keys) == 2 and rank.get(keys, [4, 5]) == [True, True]
        assert rank.read(4) == before


def test_bug_01_both_kinds_of_fp8_are_told_apart(
    hicache: Any, store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: the same for two formats of one length, of which the host pool says "bytes"."""
    import torch

    from tutti_sglang import identity

    def serve(name: str, dtype: Any) -> Any:
        server = SimpleNamespace(model_path="org/m", kv_cache_dtype=name)
        monkeypatch.setattr(identity, "_server_args", lambda: server)
        pool = hicache.make_host_pool("mha", "page_first", dtype=dtype)
        return hicache.Rank(store_dir, pool)

    keys = hicache.keys_of(1)
    formats = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    for name, dtype in formats.items():
        with serve(name, dtype) as rank:
            assert rank.exists(keys) == 0 and rank.set(keys, [0]) == [True]
    for name, dtype in formats.items():
        with serve(name, dtype) as rank:
            assert rank.exists(keys) == 1


def test_bug_01_another_dtype_of_the_device_pools_is_another_page(
    linker: Any, hicache: Any, store_dir: Path
) -> None:
    """Fault: the same on the direct route, where both kinds of fp8 are stored as bytes."""
    import torch

    keys, formats = hicache.keys_of(2), (torch.float8_e4m3fn, torch.float8_e5m2)
    for dtype in formats:
        with linker(hicache.make_device_pools("mha", dtype=dtype), store_dir) as rig:
            assert rig.lookup(keys) == []
            assert rig.offload(keys, [1, 2])
    for dtype in formats:
        with linker(hicache.make_device_pools("mha", dtype=dtype), store_dir) as rig:
            assert rig.lookup(keys) == [1, 2], "and each finds its own"


@pytest.mark.parametrize("change", ["weight file", "revision", "option"])
def test_bug_02_other_weights_under_the_served_name_find_nothing(
    hicache: Any, store_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Fault: a fine-tune is served under the old name and reuses the KV of the old weights."""
    from tutti_sglang import identity

    def served(version: int) -> dict[str, Any]:
        path, revision = tmp_path / "model", "main"
        path.mkdir(exist_ok=True)
        shown = version if change == "weight file" else 0
        (path / "model.safetensors").write_bytes(bytes([shown]) * 100_000)
        if change == "revision":
            path, revision = Path("org/m"), f"r{version}"
        server = SimpleNamespace(model_path=str(path), revision=revision)
        monkeypatch.setattr(identity, "_server_args", lambda: server)
        return {"extra": {"weights": f"step {version}"}} if change == "option" else {}

    keys = hicache.keys_of(1)
    for version in (1, 2):
        with hicache.Rank(store_dir, **served(version)) as rank:
            assert rank.exists(keys) == 0 and rank.get(keys, [1]) == [False]
            assert rank.set(keys, [0]) == [True]
    with hicache.Rank(store_dir, **served(1)) as rank:
        assert rank.exists(keys) == 1, "the old weights still find their own"


def test_bug_02_models_whose_files_are_not_here_stay_apart(monkeypatch) -> None:
    """Fault: name and revision stand side by side, and where one ends nobody can tell."""
    from tutti_sglang import identity

    found = [
        identity._read_fingerprint(name, revision)
        for name, revision in [("/no/a", "b c"), ("/no/a b", "c"), ("/no/a", "b"), ("/no/a b", "")]
    ]
    assert len(set(found)) == 4 and all(name.startswith("unread") for name in found)


def test_bug_03_names_that_look_alike_stay_apart(store_dir: Path) -> None:
    """Fault: names are made fit for a path, and two of them become one."""
    names = ["org/m", "org-m", "org_m", "org--m", "org/m/", "/org/m", "org\\m", "org%2Fm", "Org/m"]
    names += ["org/m ", "org/\u006d\u0301", "org/\u1e3f", ""]
    digests = {Namespace(name, PAGE, 1).digest() for name in names}
    assert len(digests) == len(names)
    with open_small(store_dir) as store:
        assert all(client(store, model=names[0]).save(run("k", 1)))
        found = {name: client(store, model=name).match(run("k", 1)) for name in names}
    assert found == {name: int(name == names[0]) for name in names}


def test_bug_03_fields_do_not_run_into_each_other() -> None:
    """Fault: fields are joined without a border, so that a piece of one counts as of the next."""
    pairs = [("a", "bc"), ("ab", "c"), ("abc", ""), ("", "abc"), ('a","weights":"b', "c")]
    fields = [("model", "weights"), ("weights", "dtype"), ("dtype", "layout"), ("shard", "pool")]
    for names in fields:
        made = [
            Namespace(**{"model": "m", "page_bytes": PAGE, "page_tokens": 1}
                      | dict(zip(names, pair, strict=True)))
            for pair in pairs
        ]  # fmt: skip
        assert len({namespace.digest() for namespace in made}) == len(pairs)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"salt": "A"}, {"salt": "B"}),
        ({"salt": "X"}, {"lora": "X"}),
        ({"salt": "X"}, {"tenant": "X"}),
        ({"lora": "ab", "salt": "c"}, {"lora": "a", "salt": "bc"}),
        ({"salt": ""}, {}),
        ({"salt": "", "lora": ""}, {"salt": ""}),
    ],
)
def test_bugs_04_05_salt_lora_and_tenant_keep_sequences_apart(store_dir, a: dict, b: dict) -> None:
    """Fault: a tenant's salt is lost on the way, or counts as the name of an adapter."""
    with open_small(store_dir) as store:
        pages = store.namespace(model="m", page_bytes=PAGE, page_tokens=16)
        first, second = pages.keys(TOKENS, **a), pages.keys(TOKENS, **b)
        assert not set(first) & set(second), "related keys"
        pages.save(first, bytes(4 * PAGE)).wait(20)
        assert pages.match(first).pages == 4 and pages.match(second).pages == 0


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((None, "A"), (None, "B")),
        (("X", None), (None, "X")),
        (("ab", "c"), ("a", "bc")),
        (("", None), (None, None)),
    ],
)
def test_bugs_04_05_what_the_engine_keeps_apart_stays_apart(
    hicache: Any, store_dir: Path, a: tuple, b: tuple
) -> None:
    """Fault: the plugin drops the salt, so one tenant's prompt is a hit for another's."""
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    def keys_of(namespace: tuple) -> list[str]:
        extra_key, cache_salt = namespace
        key = RadixKey(TOKENS, extra_key, cache_salt=cache_salt)
        return get_storage_hash_str(key, None, page_size=16)

    first, second = keys_of(a), keys_of(b)
    assert not set(first) & set(second)
    with hicache.Rank(store_dir) as rank:
        assert rank.set(first, range(4)) == [True] * 4
        assert rank.exists(second) == 0 and rank.get(second, range(4)) == [False] * 4
        assert rank.exists(first) == 4


def test_bug_04_tenants_of_two_servers_share_nothing(hicache: Any, store_dir: Path) -> None:
    """Fault: servers of two tenants keep their pages in one place and find each other's."""
    keys = hicache.keys_of(1)
    with hicache.Rank(store_dir, extra={"tenant": "a"}) as rank:
        assert rank.set(keys, [0]) == [True]
    for tenant, found in (("b", 0), ("", 0), ("a", 1)):
        with hicache.Rank(store_dir, extra={"tenant": tenant}) as rank:
            assert rank.exists(keys) == found


def test_bug_07_one_key_reaches_every_call(store_dir: Path) -> None:
    """Fault: a tag goes into the key that is stored and not into the one that is looked for."""
    with open_small(store_dir) as store:
        pages = store.namespace(model="m", page_bytes=PAGE, page_tokens=16)
        for tokens in (TOKENS, pages.keys(TOKENS, tenant="t")):
            assert pages.save(tokens, bytes(4 * PAGE)).wait(20).all()
            assert pages.match(tokens).pages == 4 and pages.contains(tokens).all()
            assert pages.load(tokens, bytearray(4 * PAGE)).wait(20).all()
            assert pages.pin(tokens) == 4
            pages.unpin(tokens, 4)


@pytest.mark.parametrize("knows_ancestors", [True, False])
def test_bug_07_a_tag_is_in_the_keys_of_all_calls(
    hicache: Any, store_dir: Path, knows_ancestors: bool
) -> None:
    """Fault: with a tenant, or without prefix keys, pages are written and not found."""
    import torch

    from tutti_sglang.options import PREFIX_KEYS

    options = {"tenant": "t", PREFIX_KEYS: knows_ancestors}
    draft = hicache.make_host_pool("mla", "page_first")
    pools = {"kv": hicache.make_host_pool("mha", "page_first"), "draft": draft}
    keys = hicache.keys_of(3)
    with hicache.Rank(store_dir, pools, extra=options) as rank:
        assert rank.set(keys[:2], [0, 1]) == [True, True]
        assert rank.set(keys[2:], [2], keys[:2]) == [True]
        assert rank.exists(keys) == 3 and rank.exists(keys[2:], keys[:2]) == 1
        assert rank.get(keys, [3, 4, 5]) == [True] * 3
        assert rank.set_pool("draft", keys, [0, 1, 2]) == [True] * 3
        assert rank.get_pool("draft", keys, [3, 4, 5]) == [True] * 3
        assert rank.exists_with(keys, "draft", "all_pages", 3).kv_hit_pages == 3
    with hicache.Rank(store_dir, extra={**options, "interface_v1": 0}) as rank:
        page = torch.ones(len(rank.read(0)), dtype=torch.uint8)
        assert rank.storage.set(keys[0], page) and rank.storage.exists(keys[0])
        assert rank.exists(keys) == 1, "it answers for the pages that it would load"
        assert rank.storage.get(keys[0], torch.empty_like(page)) is not None


def test_bug_08_each_shard_of_a_page_is_saved_and_found(hicache: Any, store_dir: Path) -> None:
    """Fault: ranks hold different slices of a page, one of them saves, the others never hit."""
    keys, size = hicache.keys_of(1), 2
    ranks = [
        hicache.Rank(store_dir, attn_cp_rank=number, attn_cp_size=size) for number in range(size)
    ]
    saved = []
    for number, rank in enumerate(ranks):
        rank.fill(number + 1)
        saved.append(rank.read(0))
        assert rank.exists(keys) == 0, "the slice of another rank is none of this one's"
        assert rank.set(keys, [0]) == [True]
    assert len(set(saved)) == size
    for rank, data in zip(ranks, saved, strict=True):
        rank.fill(9)
        assert rank.exists(keys) == 1 and rank.get(keys, [1]) == [True]
        assert rank.read(1) == data
        rank.storage.close()


def test_bug_08_replicas_of_a_page_are_one(hicache: Any, store_dir: Path) -> None:
    """Fault: the way out: every rank saves, and equal pages lie on the disk once for each rank."""
    keys, latent = hicache.keys_of(1), {"tp_size": 2, "is_mla_model": True}
    pool = hicache.make_host_pool("mla", "page_first")
    with (
        hicache.Rank(store_dir, pool, tp_rank=0, **latent) as writer,
        hicache.Rank(store_dir, pool, tp_rank=1, **latent) as other,
    ):
        assert writer.set(keys, [0]) == [True]
        assert other.exists(keys) == 1 and other.get(keys, [1]) == [True]
        assert other.set(keys, [0]) == [True] and other.store.stats().pages == 1


def test_bug_09_keys_do_not_depend_on_the_process(store_dir: Path) -> None:
    """Fault: keys come from a hash that each process seeds anew; after a restart nothing hits."""
    with open_small(store_dir) as store:
        pages = store.namespace(
            model="m", page_bytes=PAGE, page_tokens=16, extra={"b": "", "a": ""}
        )
        expected = pages.keys(TOKENS, salt="s", lora="l").data.hex()
        assert pages.save(pages.keys(TOKENS), bytes(4 * PAGE)).wait(20).all()
    code = f"""
import sys; sys.path.insert(0, {str(ROOT / "tests")!r})
from pathlib import Path
from store_kit import open_small
with open_small(Path(sys.argv[1])) as store:
    pages = store.namespace(model="m", page_bytes=4096, page_tokens=16, extra={{"a": "", "b": ""}})
    tokens = list(range(64))
    print(pages.keys(tokens, salt="s", lora="l").data.hex(), pages.match(tokens).pages)
"""
    for seed in ("1", "77"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        said = subprocess.run(
            [sys.executable, "-c", code, str(store_dir)],
            env=env,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert said.split() == [expected, "4"]
