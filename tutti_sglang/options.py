"""Turns SGLang's extra config into settings of a store, and says what is wrong with it.

SGLang hands over whatever is left of `--hicache-storage-backend-extra-config` after it took out its
own settings, and the linker gets all of `--unified-cache-external-linker-config`. Everything here
is checked at attach; a bad value fails the attach with its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tutti_core import ConfigError, StoreConfig

PREFIX_KEYS = "tutti_prefix_keys"
"""Set by the plugin: the engine passes the keys of each page's ancestors."""

RANK_DRAFTS = "tutti_rank_drafts"
"""Set by the plugin: each rank stores its part of a draft pool that is split by heads."""

_PLUMBING = {
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    PREFIX_KEYS,
    RANK_DRAFTS,
}
OWN_OPTIONS = frozenset({"weights", "tenant", "operation_timeout_s"})
"""Options that are not settings of the store."""
_OPERATION_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Options:
    """What the operator asked for.

    store                settings of the store.
    weights              fingerprint of the weights, instead of the computed one.
    tenant               servers with different tenants never share pages.
    operation_timeout_s  how long one call of the engine may wait for the device.
    passes_prefix_keys   whether the engine tells each page's ancestors.
    backs_up_drafts      whether ranks store their parts of draft pools that are split by heads.
    zero_copy            whether the engine moves pages with the v1 calls or with the generic ones.
    """

    store: StoreConfig
    weights: str | None
    tenant: str
    operation_timeout_s: float
    passes_prefix_keys: bool
    backs_up_drafts: bool
    zero_copy: bool


def parse_options(extra_config: Mapping[str, Any] | None, writers: int) -> Options:
    """Check `extra_config` and return it as Options.

    Parameters
        writers: processes that save into this directory; the default of `writers_max`.
    Raises
        ConfigError: names the option, its value and what is accepted.
    """
    if not isinstance(extra_config, Mapping | None):
        raise ConfigError(f"the extra config is {extra_config!r:.100}, not a table of options")
    given = dict(extra_config or {})
    settings = {name: value for name, value in given.items() if name not in _PLUMBING}
    fallback_path = settings.pop("file_storage_path", None)  # SGLang's --file-storage-path
    if fallback_path is not None:
        settings.setdefault("path", fallback_path)
    own = {name: settings.pop(name) for name in OWN_OPTIONS & settings.keys()}
    settings.setdefault("writers_max", writers)
    return Options(
        store=StoreConfig.parse(settings, other_names=OWN_OPTIONS),
        weights=_text(own, "weights"),
        tenant=_text(own, "tenant") or "",
        operation_timeout_s=_seconds(own, "operation_timeout_s", _OPERATION_TIMEOUT_S),
        passes_prefix_keys=_switch(given, PREFIX_KEYS),
        backs_up_drafts=_switch(given, RANK_DRAFTS),
        zero_copy=_switch(given, "interface_v1"),
    )


def _text(own: Mapping[str, Any], name: str) -> str | None:
    value = own.get(name)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{name} = {value!r} must be text")
    try:
        (value or "").encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name} = {value!r} must be text that UTF-8 can encode") from None
    return value


def _switch(given: Mapping[str, Any], name: str) -> bool:
    value = given.get(name)
    if value not in (None, False, True):  # 0 and 1 as well
        raise ConfigError(f"{name} = {value!r} must be true or false")
    return bool(value)


def _seconds(own: Mapping[str, Any], name: str, default: float) -> float:
    value = own.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 3600:
        raise ConfigError(f"{name} = {value!r} must be a number of seconds, 0 to 3600")
    return float(value)
