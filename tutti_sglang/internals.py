"""Every internal of SGLang that Tutti touches, with what must hold of it and what depends on it.

SGLang promises stability for none of these. So they are looked at when the plugin is activated and
again when something is attached, and one that moved is named then, together with the version,
instead of failing in the middle of a request. Only the route that depends on it is refused.

With the version that Tutti was tested with, the checks that are cheap are made (see `shapes`); with
another one, all of them are.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, Literal, get_args, get_type_hints

from tutti_core import UnsupportedError
from tutti_sglang.shapes import (
    Accepts,
    Calls,
    Has,
    Holds,
    Methods,
    Says,
    Sets,
    Shape,
    Takes,
    forget_sources,
    resolve,
)

logger = logging.getLogger("tutti.sglang")

TESTED_VERSION = "0.5.23"

Route = Literal["hicache", "linker"]
HICACHE: Route = "hicache"
LINKER: Route = "linker"
BOTH: tuple[Route, ...] = (HICACHE, LINKER)


@dataclass(frozen=True, slots=True)
class Choice:
    """A field of ServerArgs whose choices are one list, shared by all who ask for it."""

    at_start: ClassVar[bool] = True
    option: str
    known: str

    def problem(self, found: Any) -> str | None:
        """See Shape."""
        first, second = choices(found, self.option), choices(found, self.option)
        if first is None or first is not second:
            return f"the choices of {self.option} are not one list"
        missing = set(self.known.split()) - set(first)
        return f"{self.option} cannot be {', '.join(sorted(missing))}" if missing else None


@dataclass(frozen=True, slots=True)
class Internal:
    """One thing that Tutti relies on.

    path    where it is.
    shape   what must hold of it.
    routes  which routes cannot work without it.
    serves  what depends on it.
    """

    path: str
    shape: Shape
    routes: tuple[Route, ...]
    serves: str


@dataclass(frozen=True, slots=True)
class Moved:
    """An internal that is not as Tutti knows it.

    problem  what is different.
    absent   whether there is nothing at its path at all.
    """

    internal: Internal
    problem: str
    absent: bool = False

    def __str__(self) -> str:
        routes = " and ".join(self.internal.routes)
        return (
            f"SGLang {sglang_version()}: {self.internal.path}: {self.problem}; "
            f"{self.internal.serves} depends on it, so the {routes} route is refused"
        )


def choices(server_args: Any, option: str) -> list[str] | None:
    """The list that an option's value must be in, to be added to; None if there is none."""
    hint = get_type_hints(server_args, include_extras=True).get(option)
    lists = [getattr(part, "choices", None) for part in get_args(hint)[1:]]
    return next((found for found in lists if isinstance(found, list)), None)


# ---- where things are ------------------------------------------------------------------------

SRT = "sglang.srt"
MEM = f"{SRT}.mem_cache"
STORAGE = f"{MEM}.hicache_storage"
CONTRACT = f"{STORAGE}.HiCacheStorage"
CONTROLLER = f"{SRT}.managers.cache_controller.HiCacheController"
HYBRID = f"{MEM}.hybrid_cache.hybrid_cache_controller.HybridCacheController"
ATTACHMENT = f"{MEM}.unified_cache.storage_attachment.StorageAttachment"
TREE = f"{MEM}.unified_cache.unified_tree_core_interface.UnifiedTreeCoreInterface"
CACHE = f"{MEM}.unified_radix_cache.UnifiedRadixCache"
LINKING = f"{MEM}.unified_cache.unified_cache_linker"
LINKER_CONTRACT = f"{LINKING}.UnifiedCacheLinker"
WRAPPER = f"{LINKING}.UnifiedCacheLinkerWrapper"
DEVICE_POOLS = f"{MEM}.hybrid_cache.linker_pool_assembler"
UPDATER = f"{SRT}.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"

# Targets of the plugin's hooks.
ATTACH = f"{CONTROLLER}.attach_storage_backend"
ATTACH_ALL = f"{HYBRID}.attach_storage_backend"
CREATE = f"{MEM}.storage.backend_factory.StorageBackendFactory._do_create_backend"
BACKUP = f"{HYBRID}.should_backup"
APPLY = f"{ATTACHMENT}.apply_runtime_config"
WEIGHTS = tuple(
    f"{UPDATER}.{name}"
    for name in (
        "begin_weight_update",
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_ipc",
        "update_weights_from_tensor",
    )
)
ANCESTORS = f"{CACHE}.get_prefix_hash_values"
LOOKUP = f"{WRAPPER}.match"
OFFLOAD = f"{WRAPPER}._offload_node"
RESOLUTION_STEP = "handle_hicache_ratio_default"


# ---- the list --------------------------------------------------------------------------------

ATTACH_ARGUMENTS = "storage_backend prefetch_threshold model_name storage_backend_extra_config"


def _plugin() -> Iterator[Internal]:
    only_hicache, only_linker = (HICACHE,), (LINKER,)
    backend, short = "attaching the backend", "the linker's short form"
    keys = "knowing each page's ancestors"
    options = f"{SRT}.server_args.ServerArgs"
    hooks = f"{SRT}.plugins.hook_registry"
    steps = f"{SRT}.arg_groups.resolution_hooks"
    settings = f"{SRT}.arg_groups.overrides"
    yield Internal(
        options, Choice("hicache_storage_backend", "file dynamic"), only_hicache, "the name tutti"
    )
    yield Internal(
        options,
        Choice("unified_cache_external_linker_backend", "dynamic"),
        only_linker,
        "the name tutti",
    )
    yield Internal(f"{hooks}.HookRegistry.register", Accepts(3), BOTH, "every hook")
    yield Internal(f"{hooks}.HookType", Has("BEFORE AROUND"), BOTH, "every hook")
    yield Internal(f"{steps}.register_resolution_hook", Takes("name"), only_linker, short)
    yield Internal(f"{steps}._OVERRIDABLE_HOOKS", Holds(RESOLUTION_STEP), only_linker, short)
    yield Internal(f"{settings}.declare_resolution", Accepts(2), only_linker, short)
    yield Internal(f"{settings}.resolving_view", Accepts(1), BOTH, "reading the settings")
    yield Internal(
        options,
        Has(
            "enable_unified_cache_external_linker unified_cache_external_linker_backend "
            "unified_cache_external_linker_config"
        ),
        only_linker,
        short,
    )
    yield Internal(ATTACH, Takes(ATTACH_ARGUMENTS), only_hicache, backend)
    yield Internal(ATTACH, Says('self.storage_backend_type == "dynamic"'), only_hicache, backend)
    yield Internal(
        ATTACH,
        Says('self.storage_config.extra_config.get("interface_v1", 0)'),
        only_hicache,
        "moving pages without a copy",
    )
    yield Internal(ATTACH_ALL, Takes(f"{ATTACH_ARGUMENTS} host_pools"), only_hicache, backend)
    yield Internal(
        ATTACH_ALL,
        Calls("attach_storage_backend", 0, ATTACH_ARGUMENTS),
        only_hicache,
        "giving the backend its class and options",
    )
    yield Internal(
        CREATE,
        Takes("backend_name storage_config mem_pool_host kwargs"),
        only_hicache,
        "attaching the backend under decode context parallelism",
    )
    yield Internal(
        ATTACH,
        Says('storage_backend not in ("file", "mooncake")'),
        only_hicache,
        "attaching the backend under decode context parallelism",
    )
    yield Internal(BACKUP, Takes("transfer"), only_hicache, "storing drafts split by heads")
    yield Internal(
        f"{CONTROLLER}.detach_storage_backend", Takes(""), only_hicache, "undoing a refused attach"
    )
    yield Internal(
        CONTROLLER, Sets("storage_backend_type enable_storage"), only_hicache, "undoing a refusal"
    )
    applied = (
        "storage_backend prefetch_threshold prefetch_timeout_base prefetch_timeout_per_ki_token "
        "hicache_storage_pass_prefix_keys enable_storage enable_storage_metrics extra_metric_labels"
    )
    yield Internal(APPLY, Takes(applied), only_hicache, keys)
    for caller in (f"{ATTACHMENT}.attach", f"{CACHE}.init_hicache"):
        yield Internal(caller, Calls("apply_runtime_config", 0, applied), only_hicache, keys)
    yield Internal(ANCESTORS, Takes("node_id"), only_hicache, keys)
    yield Internal(f"{TREE}.get_prefix_hash_values", Takes("node_id"), BOTH, keys)
    yield Internal(f"{TREE}.get_hash_values", Takes("node_id"), BOTH, keys)
    yield Internal(LOOKUP, Takes("key req result"), only_linker, keys)
    yield Internal(LOOKUP, Calls("lookup", 2), only_linker, keys)
    yield Internal(OFFLOAD, Takes("node_id transfers"), only_linker, keys)
    yield Internal(OFFLOAD, Calls("offload", 1, "session_id"), only_linker, keys)
    yield Internal(WRAPPER, Sets("cache cache_linker"), only_linker, keys)
    yield Internal(
        f"{MEM}.base_prefix_cache.MatchResult",
        Has("device_prefix_len last_device_node"),
        only_linker,
        keys,
    )
    for target in WEIGHTS:
        yield Internal(target, Takes("recv_req"), BOTH, "noticing that the weights change")


def _hicache() -> Iterator[Internal]:
    def of(path: str, shape: Shape, serves: str = "the storage backend") -> Internal:
        return Internal(path, shape, (HICACHE,), serves)

    yield of(
        CONTRACT,
        Methods(
            "register_mem_pool_host register_mem_host_pool_v2 on_host_pools_registered "
            "batch_exists batch_get_v1 batch_set_v1 batch_exists_v2 batch_get_v2 batch_set_v2 "
            "clear get_stats",
            abstract="get batch_get set batch_set exists",
        ),
    )
    for name, arguments in {
        "register_mem_pool_host": "mem_pool_host",
        "register_mem_host_pool_v2": "host_pool host_pool_name",
        "on_host_pools_registered": "",
        "batch_exists": "keys extra_info",
        "batch_get_v1": "keys host_indices extra_info",
        "batch_set_v1": "keys host_indices extra_info",
        "batch_exists_v2": "keys pool_transfers extra_info",
        "batch_get_v2": "transfers extra_info",
        "batch_set_v2": "transfers extra_info",
        "batch_get": "keys target_locations target_sizes",
        "batch_set": "keys values target_locations target_sizes",
        "get": "key target_location target_sizes",
        "set": "key value target_location target_sizes",
        "exists": "key",
        "clear": "",
        "get_stats": "",
    }.items():
        yield of(f"{CONTRACT}.{name}", Takes(arguments))
    factory = f"{MEM}.storage.backend_factory.StorageBackendFactory._create_dynamic_backend"
    yield of(factory, Calls("backend_class", 2), "being constructed")
    for caller, call in (
        (ATTACH, Calls("register_mem_pool_host", 1)),
        (ATTACH_ALL, Calls("register_mem_host_pool_v2", 2)),
        (ATTACH_ALL, Calls("on_host_pools_registered")),
        (f"{HYBRID}._storage_hit_query", Calls("batch_exists", 2)),
        (f"{HYBRID}._storage_hit_query", Calls("batch_exists_v2", 3)),
        (f"{CONTROLLER}._page_get_zero_copy", Calls("batch_get_v1", 3)),
        (f"{CONTROLLER}._page_set_zero_copy", Calls("batch_set_v1", 3)),
        (f"{CONTROLLER}._generic_page_get", Calls("batch_get", 2)),
        (f"{CONTROLLER}._generic_page_set", Calls("batch_set", 2)),
        (f"{HYBRID}._page_transfer_sidecar", Calls("batch_get_v2", 1, "extra_info")),
        (f"{HYBRID}._page_backup_with_stable_layout", Calls("batch_set_v2", 1, "extra_info")),
        (f"{HYBRID}.clear_storage_backend", Calls("clear")),
        (f"{CONTROLLER}.detach_storage_backend", Calls("close")),
        (f"{CACHE}.check_hicache_events", Calls("get_stats")),
    ):
        yield of(caller, call, "answering its calls")
    config = (
        "tp_rank tp_size pp_rank pp_size attn_cp_rank attn_cp_size dcp_rank dcp_size dp_rank "
        "is_mla_model is_storage_writer tp_lcm_size should_split_heads logical_page_size "
        "enable_storage_metrics model_name extra_config"
    )
    yield of(f"{STORAGE}.HiCacheStorageConfig", Has(config), "telling shards apart")
    yield of(f"{STORAGE}.HiCacheStorageExtraInfo", Has("prefix_keys extra_info"))
    yield of(
        f"{STORAGE}.PoolTransferResult",
        Has("kv_hit_pages extra_pool_hit_pages restorable_prefix_pages"),
        "sidecar pools",
    )
    yield of(
        f"{SRT}.observability.metrics_collector.StorageMetrics",
        Has("prefetch_pgs backup_pgs prefetch_bandwidth backup_bandwidth"),
        "metrics",
    )
    host = f"{MEM}.pool_host"
    pages, shards = "finding host pages", "telling shards and drafts apart"
    base = f"{host}.base.HostKVCache"
    yield of(base, Has("storage_format_tag"), "telling page formats apart")
    yield of(base, Sets("layout page_size page_num size size_per_token dtype"), pages)
    yield of(base, Sets("start_layer end_layer"), shards)
    yield of(base, Has("logical_page_size"), shards)
    yield of(f"{base}.get_data_page", Takes("index flat"), "the generic calls")
    for pool in ("mha.MHATokenToKVPoolHost", "mla.MLATokenToKVPoolHost"):
        yield of(f"{host}.{pool}.get_page_buffer_meta", Takes("indices"), pages)
        yield of(f"{host}.{pool}", Sets("kv_buffer"), pages)
        yield of(f"{host}.{pool}", Sets("layer_num target_layer_num"), shards)
    heads = f"{host}.mha.MHATokenToKVPoolHost"
    yield of(
        f"{heads}.get_split_heads_page_buffer_meta",
        Takes("indices split_factor"),
        "sharing pages across tensor-parallel sizes",
    )
    yield of(heads, Sets("head_num head_dim v_head_dim"), shards)
    yield of(f"{host}.mha.MHATokenToKOnlyPoolHost.get_page_buffer_meta", Takes("indices"), pages)
    state = f"{host}.mamba.MambaPoolHost"
    yield of(f"{state}.get_hybrid_pool_buffer", Takes(""), pages)
    yield of(state, Has("mtp_draft_buffer_infos"), shards)
    yield of(state, Sets("num_mamba_layers temporal_state_shape conv_state_shapes"), shards)
    yield of(f"{host}.group.HostPoolGroup", Sets("entry_map entries"), "storing drafts")


def _linker() -> Iterator[Internal]:
    def of(path: str, shape: Shape, serves: str = "the linker") -> Internal:
        return Internal(path, shape, (LINKER,), serves)

    contract = {
        "lookup": "rid transfers",
        "load": "rid transfers",
        "start_layer_wise_loading": "",
        "finish_layer_wise_loading": "counter_index",
        "cancel_queued_load": "rid",
        "offload": "transfers session_id",
        "num_completed_offloads": "",
        "pop_completed_offload": "",
        "reset": "",
        "close": "",
    }
    yield of(LINKER_CONTRACT, Methods("record_offload_ready", abstract=" ".join(contract)))
    yield of(LINKER_CONTRACT, Has("layer_done_counter pools forward_stream"))
    for name, arguments in contract.items():
        yield of(f"{LINKER_CONTRACT}.{name}", Takes(arguments))
    yield of(f"{LINKER_CONTRACT}.record_offload_ready", Takes(""))
    yield of(
        f"{MEM}.unified_cache.linker_factory.create_unified_cache_linker",
        Calls("linker_cls", 2, "components extra_config forward_stream"),
        "being constructed",
    )
    for caller, call in (
        (f"{WRAPPER}.load_back", Calls("load", 2)),
        (f"{WRAPPER}.start_layer_wise_loading", Calls("start_layer_wise_loading")),
        (f"{WRAPPER}.finish_loads", Calls("finish_layer_wise_loading", 1)),
        (f"{WRAPPER}.release_request", Calls("cancel_queued_load", 1)),
        (f"{WRAPPER}.num_completed_offloads", Calls("num_completed_offloads")),
        (f"{WRAPPER}.take_completed_offloads", Calls("pop_completed_offload")),
        (f"{WRAPPER}.reset", Calls("reset")),
        (f"{WRAPPER}.close", Calls("close")),
    ):
        yield of(caller, call, "answering its calls")
    counter = f"{LINKING}.LayerWiseLoadCounter"
    for name, arguments in {
        "update_producer": "",
        "set_consumer": "index",
        "complete": "index layer",
        "fail": "index error",
        "wait_until": "threshold",
        "finish": "index",
        "reset": "",
    }.items():
        yield of(f"{counter}.{name}", Takes(arguments), "reporting layers")
    yield of(counter, Accepts(1), "reporting layers")
    yield of(counter, Sets("futures consumer_index"), "reporting layers")
    entry, group = f"{DEVICE_POOLS}.DevicePoolEntry", f"{DEVICE_POOLS}.DevicePoolGroup"
    parts = "name indices_from_pool device_pool components layer_mapping page_size"
    yield of(entry, Accepts(0, f"{parts} rows_are_pages"), "finding device pages")
    yield of(entry, Sets(f"{parts} _row_span"), "finding device pages")
    yield of(group, Accepts(3, "rank_replicated"), "finding device pages")
    yield of(
        group,
        Sets("entries entry_map num_layers page_size rank_replicated"),
        "finding device pages",
    )
    yield of(
        f"{group}.resolve_transfers",
        Accepts(1, "allow_partial allow_missing_kv"),
        "finding device pages",
    )
    yield of(
        f"{DEVICE_POOLS}.resolve_hybrid_device_pool_group",
        Accepts(0, "kvcache page_size params components"),
        "finding device pages",
    )
    pools, pages = f"{MEM}.memory_pool", "finding device pages"
    for pool, names in {
        f"{pools}.MHATokenToKVPool": (
            "k_buffer v_buffer k_scale_buffer v_scale_buffer kv_cache_layout "
            "start_layer layer_num page_size"
        ),
        f"{pools}.MLATokenToKVPool": "kv_buffer start_layer layer_num page_size",
        f"{pools}.HybridLinearKVPool": "full_kv_pool full_attention_layer_id_mapping start_layer",
        f"{pools}.HybridReqToTokenPool": (
            "mamba_pool mamba_map mamba_ckpt_pool short_conv_pool ngram_pool"
        ),
        f"{pools}.MambaPool": "mamba_cache num_mamba_layers",
        f"{MEM}.swa_memory_pool.SWAKVPool": (
            "full_kv_pool swa_kv_pool layers_mapping start_layer is_mla"
        ),
    }.items():
        yield of(pool, Sets(names), pages)
    yield of(f"{pools}.MHATokenToKOnlyPool", Sets("k_buffer"), "telling shards apart")
    yield of(f"{MEM}.unified_cache.component_type.ComponentType", Has("FULL SWA MAMBA"), pages)
    yield of(f"{SRT}.runtime_context.get_memory", Takes(""), pages)
    yield of(f"{SRT}.server_args.ServerArgs", Has("enable_unified_memory"), pages)
    yield of(
        f"{MEM}.cache_init_params.CacheInitParams",
        Has(
            "token_to_kv_pool_allocator req_to_token_pool page_size pp_rank pp_size attn_cp_rank "
            "attn_cp_size tp_cache_group attn_tp_cache_group mtp_draft_device_pools "
            "sidecar_draft_device_pools"
        ),
        "telling shards apart",
    )
    yield of(f"{MEM}.allocator.base.BaseTokenToKVPoolAllocator.get_kvcache", Takes(""))


def _shared() -> Iterator[Internal]:
    def of(path: str, shape: Shape, serves: str) -> Internal:
        return Internal(path, shape, BOTH, serves)

    yield of(
        f"{STORAGE}.PoolTransfer",
        Has("name host_indices device_indices keys hit_policy block_pages group_pages"),
        "moving pages of several pools",
    )
    yield of(f"{STORAGE}.PoolName", Has("KV MAMBA SWA"), "moving pages of several pools")
    yield of(
        f"{STORAGE}.PoolHitPolicy",
        Has("ALL_PAGES TRAILING_PAGES BLOCK_GROUPS"),
        "moving pages of several pools",
    )
    yield of(f"{SRT}.runtime_context.get_parallel", Takes(""), "telling shards apart")
    yield of(f"{SRT}.runtime_context.get_server_args", Takes(""), "telling models apart")
    yield of(
        f"{SRT}.server_args.ServerArgs",
        Has(
            "model_path revision dtype kv_cache_dtype quantization json_model_override_args "
            "load_format quantization_param_path served_model_name "
            "speculative_algorithm speculative_draft_model_path speculative_draft_model_revision"
        ),
        "telling models apart",
    )
    yield of(
        f"{SRT}.server_args.ServerArgs",
        Has("tp_size pp_size dp_size nnodes enable_dp_attention"),
        "sharing the store's capacity among ranks",
    )
    yield of(
        f"{SRT}.runtime_context.ParallelContext",
        Has("launch_world_size attn_dcp_size"),
        "telling shards apart",
    )


def internals() -> list[Internal]:
    """Return the whole list."""
    return [*_plugin(), *_hicache(), *_linker(), *_shared()]


# ---- checking --------------------------------------------------------------------------------


def sglang_version() -> str:
    """Version of the installed SGLang, or that there is none."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "(not installed)"


def check(*, thorough: bool | None = None) -> list[Moved]:
    """Return what is not as Tutti knows it.

    Parameters
        thorough: also the checks that read source text; by default with an untested version only.
    Cost       imports the modules concerned; about 5 ms when they are imported, 1 s if thorough.
    """
    if thorough is None:
        thorough = sglang_version() != TESTED_VERSION
    found = []
    for internal in internals():
        if thorough or internal.shape.at_start:
            found += _look_at(internal)
    forget_sources()
    return found


def _look_at(internal: Internal) -> list[Moved]:
    try:
        problem = internal.shape.problem(resolve(internal.path))
    except (ImportError, AttributeError):
        return [Moved(internal, "it is not there", absent=True)]
    except Exception as error:  # whatever else a foreign module does when it is imported
        problem = f"it cannot be looked at: {type(error).__name__}: {error}"
    return [Moved(internal, problem)] if problem else []


@functools.cache
def moved() -> tuple[Moved, ...]:
    """Return what `check` found when this process asked first; said once in the log."""
    found = tuple(check())
    for one in found:
        logger.error("tutti: %s", one)
    if not found and sglang_version() != TESTED_VERSION:
        logger.warning(
            "tutti: tested with SGLang %s, this is %s; everything that Tutti relies on was looked "
            "at and is as it was",
            TESTED_VERSION,
            sglang_version(),
        )
    return found


def require(route: Route, among: Sequence[Moved] | None = None) -> None:
    """Refuse a route of which something moved.

    Raises
        UnsupportedError: names everything that moved, and the version.
    """
    reasons = [
        str(one) for one in (moved() if among is None else among) if route in one.internal.routes
    ]
    if reasons:
        raise UnsupportedError(
            "; ".join(reasons), hint=f"use SGLang {TESTED_VERSION}, or a Tutti made for this one"
        )
