"""The names and signatures of SGLang that Tutti relies on, compared with the installed version.

A new SGLang that moves one of them fails here, with its name, before it fails in a server.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any, get_args, get_type_hints

import pytest

from tutti_sglang.plugin import WEIGHTS

MEM_CACHE = "sglang.srt.mem_cache"
STORAGE = f"{MEM_CACHE}.hicache_storage.HiCacheStorage"
CONTROLLER = "sglang.srt.managers.cache_controller.HiCacheController"
ATTACHMENT = f"{MEM_CACHE}.unified_cache.storage_attachment.StorageAttachment"

# Dotted path -> parameter names in order, `self` left out. Calls are by position or by these names.
SIGNATURES = {
    # what TuttiStorage overrides
    f"{STORAGE}.register_mem_pool_host": "mem_pool_host",
    f"{STORAGE}.register_mem_host_pool_v2": "host_pool host_pool_name",
    f"{STORAGE}.on_host_pools_registered": "",
    f"{STORAGE}.batch_exists": "keys extra_info",
    f"{STORAGE}.batch_get_v1": "keys host_indices extra_info",
    f"{STORAGE}.batch_set_v1": "keys host_indices extra_info",
    f"{STORAGE}.batch_exists_v2": "keys pool_transfers extra_info",
    f"{STORAGE}.batch_get_v2": "transfers extra_info",
    f"{STORAGE}.batch_set_v2": "transfers extra_info",
    f"{STORAGE}.batch_get": "keys target_locations target_sizes",
    f"{STORAGE}.batch_set": "keys values target_locations target_sizes",
    f"{STORAGE}.get": "key target_location target_sizes",
    f"{STORAGE}.set": "key value target_location target_sizes",
    f"{STORAGE}.exists": "key",
    f"{STORAGE}.clear": "",
    f"{STORAGE}.get_stats": "",
    # what the plugin hooks, and how it registers
    f"{CONTROLLER}.attach_storage_backend": (
        "storage_backend prefetch_threshold model_name storage_backend_extra_config"
    ),
    f"{ATTACHMENT}.apply_runtime_config": (
        "storage_backend prefetch_threshold prefetch_timeout_base prefetch_timeout_per_ki_token "
        "hicache_storage_pass_prefix_keys enable_storage enable_storage_metrics "
        "extra_metric_labels"
    ),
    **dict.fromkeys(WEIGHTS, "recv_req"),
    "sglang.srt.plugins.hook_registry.HookRegistry.register": "target hook hook_type source",
    "sglang.srt.plugins.load_plugins": "",
    # what host pools tell about their pages
    f"{MEM_CACHE}.pool_host.mha.MHATokenToKVPoolHost.get_page_buffer_meta": "indices",
    f"{MEM_CACHE}.pool_host.mla.MLATokenToKVPoolHost.get_page_buffer_meta": "indices",
    # who calls us, with which arguments
    f"{CONTROLLER}._page_get_zero_copy": "operation hash_values host_indices extra_info",
    f"{CONTROLLER}._page_set_zero_copy": "hash_values host_indices extra_info",
    f"{CONTROLLER}.detach_storage_backend": "",
}

# Dataclass -> fields that are read. It may have more.
FIELDS = {
    f"{MEM_CACHE}.hicache_storage.HiCacheStorageConfig": (
        "tp_rank tp_size pp_rank pp_size attn_cp_rank attn_cp_size dcp_size is_mla_model "
        "enable_storage_metrics model_name extra_config"
    ),
    f"{MEM_CACHE}.hicache_storage.HiCacheStorageExtraInfo": "prefix_keys extra_info",
    f"{MEM_CACHE}.hicache_storage.PoolTransfer": "name host_indices keys hit_policy",
    f"{MEM_CACHE}.hicache_storage.PoolTransferResult": (
        "kv_hit_pages extra_pool_hit_pages restorable_prefix_pages"
    ),
    "sglang.srt.observability.metrics_collector.StorageMetrics": (
        "prefetch_pgs backup_pgs prefetch_bandwidth backup_bandwidth"
    ),
}

CALLED_BY_NAME = {
    # The plugin's hook reads these of attach_storage_backend's keyword arguments.
    f"{MEM_CACHE}.hybrid_cache.hybrid_cache_controller.HybridCacheController"
    ".attach_storage_backend": "storage_backend_extra_config=storage_backend_extra_config",
    # The zero-copy interface is selected for `dynamic` backends by this setting.
    f"{CONTROLLER}.attach_storage_backend": '.extra_config.get("interface_v1", 0)',
    # The class is made with two positional arguments.
    f"{MEM_CACHE}.storage.backend_factory.StorageBackendFactory._create_dynamic_backend": (
        "backend_class(storage_config, kwargs)"
    ),
}


def resolve(dotted: str) -> Any:
    """The object at a dotted path: the longest importable prefix, then attributes."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(dotted)


def parameters(function: Any) -> list[str]:
    """Parameter names without `self` and `cls`; a hooked function shows the original's."""
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


@pytest.mark.parametrize("dotted", SIGNATURES, ids=lambda dotted: ".".join(dotted.split(".")[-2:]))
def test_signature(dotted: str) -> None:
    assert parameters(resolve(dotted)) == SIGNATURES[dotted].split()


@pytest.mark.parametrize("dotted", FIELDS, ids=lambda dotted: dotted.split(".")[-1])
def test_dataclass_fields(dotted: str) -> None:
    present = {field.name for field in dataclasses.fields(resolve(dotted))}
    assert set(FIELDS[dotted].split()) <= present


@pytest.mark.parametrize("dotted", CALLED_BY_NAME, ids=lambda name: ".".join(name.split(".")[-2:]))
def test_call_text(dotted: str) -> None:
    source = inspect.getsource(inspect.unwrap(resolve(dotted)))
    assert CALLED_BY_NAME[dotted] in source


def test_storage_methods_are_all_known() -> None:
    """A method that SGLang adds to the contract needs a decision, not silence."""
    known = {name.rsplit(".", 1)[1] for name in SIGNATURES if name.startswith(STORAGE)}
    present = {name for name, _ in inspect.getmembers(resolve(STORAGE), inspect.isfunction)}
    assert {name for name in present if not name.startswith("_")} == known


def test_option_choices_are_one_mutable_list() -> None:
    from sglang.srt.arg_groups.arg_utils import Arg
    from sglang.srt.server_args import ServerArgs

    def choices() -> list[str]:
        hint = get_type_hints(ServerArgs, include_extras=True)["hicache_storage_backend"]
        (found,) = [part.choices for part in get_args(hint)[1:] if isinstance(part, Arg)]
        return found

    assert isinstance(choices(), list)
    assert choices() is choices()
    assert {"file", "dynamic"} <= set(choices())


def test_hook_kinds() -> None:
    from sglang.srt.plugins.hook_registry import HookType

    assert {"BEFORE", "AFTER", "AROUND", "REPLACE"} <= set(HookType.__members__)


def test_page_keys_are_a_sha256_chain() -> None:
    """64 hexadecimal characters; each covers the page and everything before it."""
    import hashlib
    import struct

    from sglang.srt.mem_cache.utils import get_storage_hash_str

    tokens = list(range(100, 148))
    keys = get_storage_hash_str(tokens, None, page_size=16)
    previous = b""
    for page, key in enumerate(keys):
        chunk = struct.pack("<16I", *tokens[page * 16 : page * 16 + 16])
        previous = hashlib.sha256(previous + chunk).digest()
        assert key == previous.hex()
    assert len(keys) == 3


def test_backend_class_fits_the_contract(backend_name: str) -> None:
    """Every override takes the base method's parameters in its order; more need defaults."""
    if backend_name != "tutti":
        pytest.skip("checks tutti's own class")
    base = resolve(STORAGE)
    ours = resolve("tutti_sglang.backend.TuttiStorage")
    assert issubclass(ours, base)
    assert not ours.__abstractmethods__
    assert callable(ours.close)
    for name in (name.rsplit(".", 1)[1] for name in SIGNATURES if name.startswith(STORAGE)):
        theirs, mine = parameters(getattr(base, name)), inspect.signature(getattr(ours, name))
        assert parameters(getattr(ours, name))[: len(theirs)] == theirs, name
        extra = [p for p in mine.parameters.values() if p.name not in (*theirs, "self")]
        assert all(p.default is not p.empty for p in extra), name


def test_plugin_adds_the_name(backend_name: str) -> None:
    if backend_name != "tutti":
        pytest.skip("checks tutti's own plugin")
    from sglang.srt.arg_groups.arg_utils import Arg
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    hint = get_type_hints(ServerArgs, include_extras=True)["hicache_storage_backend"]
    (choices,) = [part.choices for part in get_args(hint)[1:] if isinstance(part, Arg)]
    assert choices.count("tutti") == 1
