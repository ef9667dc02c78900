"""The plugin's hooks where an attach is out of the ordinary: decode context, drafts, the linker."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang_cpu import matrix
from sglang_cpu.backends import Backend

from tutti_sglang import plugin

LATENT = matrix.Case("mla", "kernel", "page_first")


@pytest.fixture(autouse=True)
def only_ours(backend_name: str) -> None:
    if backend_name != "tutti":
        pytest.skip("tutti's own hooks")


@pytest.fixture
def stack(store_folder: Path) -> Iterator[matrix.Stack]:
    backend = Backend("tutti", store_folder, matrix.MATRIX_OPTIONS)
    with matrix.Stack(LATENT, backend) as stack:
        yield stack


def attach(stack: matrix.Stack, name: str = "tutti") -> Any:
    """Attach anew with the real controller; returns it."""
    controller = stack._cache.cache_controller
    if controller.enable_storage:
        done, message = stack._cache.detach_storage_backend()
        assert done, message
    options = stack.backend.extra_config()
    threshold = options.pop("prefetch_threshold")
    controller.attach_storage_backend(
        storage_backend=name,
        prefetch_threshold=threshold,
        model_name=controller.storage_config.model_name,
        storage_backend_extra_config=options,
        host_pools=controller.mem_pool_host.entries,
    )
    return controller


def test_decode_context_parallelism(stack: matrix.Stack) -> None:
    """SGLang attaches two names only then; ours passes, moves pages without a copy, and is ours."""
    from sglang.srt.runtime_context import get_parallel

    from tutti_sglang.backend import TuttiStorage

    two = {"tp_size": 2, "attn_tp_size": 2, "moe_tp_size": 2, "attn_dcp_size": 2}
    second = {"tp_rank": 1, "attn_tp_rank": 1, "moe_tp_rank": 1, "attn_dcp_rank": 1}
    with get_parallel().override(**two, **second):
        controller = attach(stack)
        assert type(controller.storage_backend) is TuttiStorage
        assert controller.storage_backend_type == "tutti"
        assert controller.page_get_func == controller._page_get_zero_copy
        assert controller.page_set_func == controller._page_set_zero_copy
        assert controller.storage_config.dcp_size == 2
        with pytest.raises(NotImplementedError, match="file or Mooncake"):
            attach(stack, "nixl")


def test_sglangs_injector_stays_around_it(
    stack: matrix.Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageFailureInjector

    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.001")
    controller = attach(stack)
    assert isinstance(controller.storage_backend, HiCacheStorageFailureInjector)
    assert controller.storage_backend_type == "tutti"
    controller.storage_backend._backend.close()  # SGLang's injector passes no close on


def test_a_stranger_of_that_name_is_built_as_itself() -> None:
    """The name that stands in for ours is another backend's, which must go on working."""

    def original(factory: Any, name: str, config: Any, *_: Any) -> str:
        return name

    ours = SimpleNamespace(extra_config={"backend_name": "tutti"})
    for config in (SimpleNamespace(extra_config=None), SimpleNamespace(extra_config={"a": 1})):
        assert plugin._create(original, None, "mooncake", config) == "mooncake"
    assert plugin._create(original, None, "mooncake", ours) == "dynamic"
    assert plugin._create(original, None, "file", ours) == "file"


@pytest.mark.parametrize(
    ("attached", "pool", "said_before", "stored"),
    [
        ("tutti", "MHATokenToKVPoolHost", False, True),
        ("tutti", "MLATokenToKVPoolHost", False, False),
        ("tutti", None, False, False),
        ("tutti", "MLATokenToKVPoolHost", True, True),
        ("file", "MHATokenToKVPoolHost", False, False),
    ],
)
def test_each_rank_stores_a_draft_that_is_split_by_heads(
    attached: str, pool: str | None, said_before: bool, stored: bool
) -> None:
    entries = {}
    if pool is not None:
        entries["draft"] = SimpleNamespace(host_pool=type(pool, (), {})())
    controller = SimpleNamespace(
        storage_backend_type=attached, mem_pool_host=SimpleNamespace(entry_map=entries)
    )
    asked = []

    def original(self: Any, transfer: Any) -> bool:
        asked.append(transfer.name)
        return said_before

    transfer = SimpleNamespace(name="draft")
    assert plugin._backs_up(original, controller, transfer) is stored
    assert asked == ["draft"]


def test_other_linkers_do_without_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tutti_sglang.linker", None)
    for hook in (plugin._linker_lookup, plugin._linker_offload):
        assert hook(lambda *args, **kwargs: (args, kwargs), 1, 2, three=3) == ((1, 2), {"three": 3})


def test_weights_that_change_switch_off_all_that_is_attached(
    model: Path, store_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stored is not that of the new weights, and the next attach must name them."""
    import threading
    import weakref

    from linker_kit import Rig, keys_of, make_pools, published

    from tutti_core import ConfigError
    from tutti_sglang import identity

    monkeypatch.setattr(identity, "_attached", weakref.WeakSet())
    monkeypatch.setattr(identity, "_weights_changed", threading.Event())
    pools = make_pools("mha")
    pools.fill()
    keys, pages = keys_of("weights", 4), [3, 4, 5, 6]
    with published(model) as args:
        with Rig(args, pools, store_folder) as rig:
            assert rig.offload(keys, pages)
            assert rig.lookup(keys)[-1] == 4
            plugin._weights_change(object(), object())
            assert rig.lookup(keys) == []
        with pytest.raises(ConfigError, match="weights"):
            Rig(args, pools, store_folder)
        with Rig(args, pools, store_folder, weights="step 2") as rig:
            assert rig.lookup(keys) == []


def test_a_route_of_which_something_moved_cannot_be_attached(
    stack: matrix.Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A running server: the request is refused with the name of what moved."""
    from tutti_sglang import internals
    from tutti_sglang.shapes import Takes

    def moved(route: Any) -> tuple[internals.Moved, ...]:
        listed = internals.Internal("sglang.x.y", Takes(""), (route,), "moving pages")
        return (internals.Moved(listed, "it is red"),)

    cache = stack._cache
    model = cache.cache_controller.storage_config.model_name
    options = json.dumps(stack.backend.extra_config())
    cache.detach_storage_backend()
    monkeypatch.setattr(internals, "moved", lambda: moved(internals.HICACHE))
    done, message = cache.attach_storage_backend("tutti", options, model)
    assert not done and "sglang.x.y: it is red" in message
    monkeypatch.setattr(internals, "moved", lambda: moved(internals.LINKER))
    assert cache.attach_storage_backend("tutti", options, model)[0]
