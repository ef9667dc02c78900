"""Who the served model is: its name, its weights, and what else changes what its KV pages hold.

Every route (HiCache, linker) puts this into the namespace of each of its pools, so that pages of
another model, or of the same one with other weights or settings, are never taken for its own.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tutti_core import ConfigError
from tutti_sglang.fingerprint import weights_fingerprint
from tutti_sglang.options import Options
from tutti_sglang.shards import Ranks

logger = logging.getLogger("tutti.sglang")


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The fields of a namespace that every pool of a served model has in common."""

    name: str
    weights: str
    extra: Mapping[str, str]


class Switchable(Protocol):
    """Something attached to the served model that must stop when its weights change."""

    def switch_off(self, reason: str) -> None:
        """Answer "not stored" to everything from now on."""
        ...


_attached: weakref.WeakSet[Any] = weakref.WeakSet()
_weights_changed = threading.Event()


def watch_weights(attached: Switchable) -> None:
    """Switch `attached` off when the weights change; it is not kept alive by this."""
    _attached.add(attached)


def note_weights_change() -> None:
    """The weights of this process's model are about to change: what is stored is not theirs.

    Everything attached answers "not stored" from now on, and a later attach must name the new
    weights in the option `weights`: the files that the server was started with do not tell them.
    """
    _weights_changed.set()
    for attached in list(_attached):
        attached.switch_off("the weights changed while the server runs")


def model_identity(name: str | None, options: Options) -> ModelIdentity:
    """Return the identity of the model that this process serves.

    Raises
        ConfigError: the weights changed while the server runs and `weights` does not name them.
    Cost       reads a sample of each weight file; see `fingerprint`.
    """
    server = _server_args()
    # Host pools hold both formats of 8 bits as bytes: only the setting tells them apart.
    settings = (
        "dtype",
        "kv_cache_dtype",
        "quantization",
        "json_model_override_args",
        "load_format",
    )
    extra = {f"model_{key}": str(getattr(server, key, None)) for key in settings}
    if scales := getattr(server, "quantization_param_path", None):
        extra["model_kv_scales"] = _file_digest(str(scales))
    if options.tenant:
        extra["tenant"] = options.tenant
    return ModelIdentity(name or "", options.weights or _fingerprint(server), extra)


def draft_identity(options: Options) -> str:
    """Return who the draft model of speculative decoding is; empty without one.

    Part of what tells pages apart that hold KV of the draft model.
    """
    server = _server_args()
    path = str(getattr(server, "speculative_draft_model_path", None) or "")
    if not path:
        return ""
    revision = getattr(server, "speculative_draft_model_revision", None)
    return json.dumps([options.weights or "", _read_fingerprint(path, revision)])


def expects_draft() -> bool:
    """Whether the server decodes speculatively: pools of a draft model may be registered late."""
    return getattr(_server_args(), "speculative_algorithm", None) is not None


def processes_on_node(ranks: Ranks) -> int:
    """Return how many processes of this server run on this node and so share its store.

    Ranks are taken to be spread evenly over the nodes. Outside a server, all of them are here.
    """
    try:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()  # `dp_size` counts replicas; DP attention is within the world
        everywhere = int(parallel.launch_world_size) * int(parallel.dp_size)
        return max(everywhere // int(parallel.nnodes), 1)
    except Exception:
        return ranks.tp_size * ranks.pp_size * ranks.cp_size


def _file_digest(path: str) -> str:
    """What tells the content of a small file apart; its name, where it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32]
    except OSError as error:
        logger.warning("tutti: %s cannot be read (%s); only its name is compared", path, error)
        return f"unread: {path}"


def _server_args() -> Any:
    """The arguments the server was started with, or None outside a server."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except Exception:
        return None


def _fingerprint(server: Any) -> str:
    """Fingerprint of the served weights; where they cannot be found, their name and revision."""
    if _weights_changed.is_set():
        raise ConfigError(
            "weights: they were changed while this server runs, so its files do not tell them",
            hint="set the option `weights` to something that changes with them",
        )
    return _read_fingerprint(
        str(getattr(server, "model_path", "") or ""), getattr(server, "revision", None)
    )


def _read_fingerprint(model_path: str, revision: str | None) -> str:
    named = f"unread: {json.dumps([model_path, revision or ''])}"
    try:
        folder = _model_folder(model_path, revision)
        return named if folder is None else weights_fingerprint(folder, revision)
    except OSError as error:
        logger.warning(
            "tutti: the weights of %s cannot be read (%s); set the option `weights` to something "
            "that changes with them",
            model_path,
            error,
        )
        return named


def _model_folder(model_path: str, revision: str | None) -> Path | None:
    """Where the model's files are on this machine, if they are."""
    if not model_path:
        return None
    folder = Path(model_path)
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model_path, revision=revision, local_files_only=True))
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
