"""Entry point of the group `sglang.srt.plugins`: makes `--hicache-storage-backend tutti` valid.

SGLang calls `activate` before it parses the command line, in the offline engine, and in every
process that it spawns. No file of SGLang is edited. Four of its internals are touched; each is
checked by `tests/sglang/test_contract.py` against the pinned version:

1. the choices of the option, a list shared by all users of the field;
2. `HiCacheController.attach_storage_backend`: the name becomes SGLang's own `dynamic` backend with
   our class and the zero-copy interface;
3. `StorageAttachment.apply_runtime_config`: the engine passes the keys of each page's ancestors;
4. `SchedulerWeightUpdaterManager`: the backend is told when the weights change under it.

Source: SGLang 0.5.23, plugins/__init__.py, managers/cache_controller.py,
mem_cache/unified_cache/storage_attachment.py, managers/scheduler_components/weight_updater.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args, get_type_hints

from tutti_sglang.options import PREFIX_KEYS

NAME = "tutti"
DYNAMIC_BACKEND = {
    "backend_name": NAME,
    "module_path": "tutti_sglang.backend",
    "class_name": "TuttiStorage",
    "interface_v1": 1,
    PREFIX_KEYS: True,
}

ATTACH = "sglang.srt.managers.cache_controller.HiCacheController.attach_storage_backend"
APPLY = (
    "sglang.srt.mem_cache.unified_cache.storage_attachment.StorageAttachment.apply_runtime_config"
)

WEIGHTS = tuple(
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager." + name
    for name in (
        "begin_weight_update",
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_ipc",
        "update_weights_from_tensor",
    )
)


def activate() -> None:
    """Register the name and the hooks. Idempotent as far as SGLang's plugin loader is."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    _add_choice()
    HookRegistry.register(ATTACH, _attach, HookType.AROUND)
    HookRegistry.register(APPLY, _pass_prefix_keys, HookType.AROUND)
    for target in WEIGHTS:
        HookRegistry.register(target, _weights_change, HookType.BEFORE)


def _add_choice() -> None:
    from sglang.srt.arg_groups.arg_utils import Arg
    from sglang.srt.server_args import ServerArgs

    hint = get_type_hints(ServerArgs, include_extras=True)["hicache_storage_backend"]
    for part in get_args(hint)[1:]:
        if isinstance(part, Arg) and part.choices is not None and NAME not in part.choices:
            part.choices.append(NAME)  # the Arg is frozen, its list is not


def _attach(
    original: Callable[..., Any], self: Any, storage_backend: str, *args: Any, **kwargs: Any
) -> Any:
    if storage_backend != NAME:
        return original(self, storage_backend, *args, **kwargs)
    config = kwargs.get("storage_backend_extra_config") or {}
    kwargs["storage_backend_extra_config"] = {**config, **DYNAMIC_BACKEND}
    result = original(self, "dynamic", *args, **kwargs)
    # A later attach at run time compares its own name with this one.
    self.storage_backend_type = NAME
    return result


def _pass_prefix_keys(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("storage_backend") == NAME and kwargs.get("enable_storage"):
        kwargs["hicache_storage_pass_prefix_keys"] = True
    return original(self, *args, **kwargs)


def _weights_change(*args: Any, **kwargs: Any) -> None:
    from tutti_sglang.identity import note_weights_change

    note_weights_change()
