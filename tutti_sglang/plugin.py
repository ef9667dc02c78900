"""Entry point of the group `sglang.srt.plugins`: makes the name `tutti` valid on both routes.

    --hicache-storage-backend tutti                    by way of SGLang's host pool
    --unified-cache-external-linker-backend tutti      straight from the device pools

SGLang calls `activate` before it parses the command line, in the offline engine, and in every
process that it spawns. No file of SGLang is edited. What is touched instead is in `internals`, with
a check each; a route of which something moved is refused by name. The hooks:

1. the choices of the two options get one more name;
2. the storage backend's name becomes SGLang's own `dynamic` backend with our class and the
   zero-copy interface, also under decode context parallelism; a refused attach leaves nothing;
3. the engine passes the keys of each page's ancestors, all of them, and every rank stores what
   only it has of a draft model's pool;
4. the linker's name becomes SGLang's own `dynamic` linker with our class;
5. everything attached is told when the weights change under it.

Source: SGLang 0.5.23, plugins/__init__.py, managers/cache_controller.py,
mem_cache/unified_cache/{storage_attachment,linker_factory,unified_cache_linker}.py,
arg_groups/resolution_hooks.py, managers/scheduler_components/weight_updater.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from tutti_sglang import internals
from tutti_sglang.internals import HICACHE, LINKER
from tutti_sglang.options import PREFIX_KEYS, RANK_DRAFTS, parse_options

NAME = "tutti"
DYNAMIC_BACKEND = {
    "backend_name": NAME,
    "module_path": "tutti_sglang.backend",
    "class_name": "TuttiStorage",
    "interface_v1": 1,
    PREFIX_KEYS: True,
    RANK_DRAFTS: True,
}
DYNAMIC_LINKER = {"linker": "TuttiLinker", "linker_module_path": "tutti_sglang.linker"}
CHOICES = ("hicache_storage_backend", "unified_cache_external_linker_backend")

DCP_NAME = "mooncake"
"""A name that SGLang attaches under decode context parallelism; never built, see `_create`."""

Original = Callable[..., Any]


def activate() -> None:
    """Register the name and the hooks. Idempotent as far as SGLang's plugin loader is.

    What moved is said in the log. The name is offered all the same, so that whoever uses it is told
    the reason instead of "invalid choice".
    """
    absent = {one.internal.path for one in internals.moved() if one.absent}
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, hook in (
        (internals.ATTACH, _attach),
        (internals.ATTACH_ALL, _attach_all),
        (internals.CREATE, _create),
        (internals.BACKUP, _backs_up),
        (internals.APPLY, _pass_prefix_keys),
        (internals.ANCESTORS, _ancestors),
        (internals.LOOKUP, _linker_lookup),
        (internals.OFFLOAD, _linker_offload),
    ):
        if target not in absent:
            HookRegistry.register(target, hook, HookType.AROUND)
    for target in internals.WEIGHTS:
        if target not in absent:
            HookRegistry.register(target, _weights_change, HookType.BEFORE)
    _add_resolution_step()
    _add_choices()


def _add_choices() -> None:
    from sglang.srt.server_args import ServerArgs

    for option in CHOICES:
        choices = internals.choices(ServerArgs, option)
        if choices is not None and NAME not in choices:
            choices.append(NAME)


# ---- settings --------------------------------------------------------------------------------


def _add_resolution_step() -> None:
    """Take part in resolving the settings, in the first step that has to do with KV caches."""
    try:
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

        register_resolution_hook(internals.RESOLUTION_STEP)(_resolve)
    except (ImportError, ValueError):
        return  # said by the version guard; it costs the linker's short form


def _resolve(server_args: Any, previous: Callable[[Any], None]) -> None:
    """The linker's short form as the settings that SGLang knows, before anything reads them.

    What SGLang refuses together with a linker it goes on refusing: its checks come later.

    Raises
        ConfigError: an option is wrong; the process ends before anything is started.
        UnsupportedError: the route asked for cannot work with this SGLang.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    asked = resolving_view(server_args)
    if asked.hicache_storage_backend == NAME:
        internals.require(HICACHE)
    if asked.unified_cache_external_linker_backend == NAME:
        internals.require(LINKER)
        config = asked.unified_cache_external_linker_config
        if config is None or isinstance(config, dict):  # SGLang says what is wrong with others
            parse_options(config, writers=1)
            config = {**DYNAMIC_LINKER, "linker_extra_config": dict(config or {})}
        declare_resolution(
            server_args,
            NAME,
            enable_unified_cache_external_linker=True,
            unified_cache_external_linker_backend="dynamic",
            unified_cache_external_linker_config=config,
        )
    previous(server_args)


# ---- the storage backend ---------------------------------------------------------------------


def _attach(original: Original, self: Any, storage_backend: str, *args: Any, **kwargs: Any) -> Any:
    if storage_backend != NAME:
        return original(self, storage_backend, *args, **kwargs)
    internals.require(HICACHE)
    from sglang.srt.runtime_context import get_parallel

    config = kwargs.get("storage_backend_extra_config") or {}
    kwargs["storage_backend_extra_config"] = {**config, **DYNAMIC_BACKEND}
    known_as = DCP_NAME if get_parallel().attn_dcp_size > 1 else "dynamic"
    result = original(self, known_as, *args, **kwargs)
    # A later attach at run time compares its own name with this one.
    self.storage_backend_type = NAME
    return result


def _create(
    original: Original, factory: Any, name: str, config: Any, *args: Any, **kwargs: Any
) -> Any:
    """What is attached as DCP_NAME is built as what it is. Inside of SGLang's failure injector."""
    if name == DCP_NAME and (config.extra_config or {}).get("backend_name") == NAME:
        name = "dynamic"
    return original(factory, name, config, *args, **kwargs)


def _attach_all(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """The attach with all host pools. SGLang takes back its first half only when that fails: a
    backend that refuses a pool of the second would stay attached, and no other could be."""
    was_attached = getattr(self, "enable_storage", False)
    try:
        return original(self, *args, **kwargs)
    except Exception:
        if not was_attached and _is_ours(self) and self.enable_storage:
            self.detach_storage_backend()
        raise


def _pass_prefix_keys(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("storage_backend") == NAME and kwargs.get("enable_storage"):
        kwargs["hicache_storage_pass_prefix_keys"] = True
    return original(self, *args, **kwargs)


def _ancestors(original: Original, self: Any, node_id: Any) -> Any:
    """The keys before a prefetch. It begins after the pages of `node_id`, whose own keys SGLang
    leaves out: its tree answers with the keys above a node."""
    keys = original(self, node_id)
    if not _is_ours(self.cache_controller):
        return keys
    return [*keys, *self.tree_core.get_hash_values(node_id)]


def _backs_up(original: Original, self: Any, transfer: Any) -> Any:
    """Whether this rank stores its part of a pool. SGLang knows by the backend's name that draft
    pools with heads of their own differ from rank to rank, though the KV before them does not."""
    backs_up = original(self, transfer)
    if backs_up or not _is_ours(self):
        return backs_up
    from tutti_sglang.shards import splits_heads

    entry = self.mem_pool_host.entry_map.get(transfer.name)
    return entry is not None and splits_heads(entry.host_pool)


def _is_ours(controller: Any) -> bool:
    return getattr(controller, "storage_backend_type", None) == NAME


# ---- the linker ------------------------------------------------------------------------------


def _linker_lookup(original: Original, *args: Any, **kwargs: Any) -> Any:
    ours = sys.modules.get(DYNAMIC_LINKER["linker_module_path"])  # unless another linker is used
    return ours.around_match(original, *args, **kwargs) if ours else original(*args, **kwargs)


def _linker_offload(original: Original, *args: Any, **kwargs: Any) -> Any:
    ours = sys.modules.get(DYNAMIC_LINKER["linker_module_path"])
    return (
        ours.around_offload_node(original, *args, **kwargs) if ours else original(*args, **kwargs)
    )


# ---- weights ---------------------------------------------------------------------------------


def _weights_change(*args: Any, **kwargs: Any) -> None:
    from tutti_sglang.identity import note_weights_change

    note_weights_change()
