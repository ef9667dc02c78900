"""Tutti's prefix store: token ids in, KV-cache pages out, over NVMe.

from tutti_core import PrefixStore

with PrefixStore.open("/mnt/nvme/tutti", capacity="2TiB") as store:
    pages = store.namespace(model="my-model", page_tokens=64, page_bytes=2 << 20)
    pages.save(tokens, memory).wait()
    hit = pages.match(tokens)
    pages.load(tokens, memory, count=hit.pages).wait()
"""

from tutti_core.config import StoreConfig
from tutti_core.errors import (
    BusyError,
    ConfigError,
    CorruptionError,
    DeviceError,
    InternalError,
    StoreClosedError,
    StoreFullError,
    TuttiError,
    UnsupportedError,
)
from tutti_core.geometry import Memory, PageFragments, as_memory, page_fragments
from tutti_core.keys import Namespace, PageKeys
from tutti_core.layers import (
    LayerLoadError,
    LayerRead,
    LayerReader,
    LayerSink,
    Stager,
    StagingSpace,
    group_layers,
)
from tutti_core.store import (
    Hold,
    LoadTicket,
    Match,
    NamespaceStore,
    PartsLoad,
    PrefixStore,
    Reading,
    SaveTicket,
    StoreStats,
    TierStats,
)

__all__ = [
    "BusyError",
    "ConfigError",
    "CorruptionError",
    "DeviceError",
    "Hold",
    "InternalError",
    "LayerLoadError",
    "LayerRead",
    "LayerReader",
    "LayerSink",
    "LoadTicket",
    "Match",
    "Memory",
    "Namespace",
    "NamespaceStore",
    "PageFragments",
    "PageKeys",
    "PartsLoad",
    "PrefixStore",
    "Reading",
    "SaveTicket",
    "Stager",
    "StagingSpace",
    "StoreClosedError",
    "StoreConfig",
    "StoreFullError",
    "StoreStats",
    "TierStats",
    "TuttiError",
    "UnsupportedError",
    "as_memory",
    "group_layers",
    "page_fragments",
]
