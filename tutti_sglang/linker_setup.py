"""What a linker finds out when it starts: its rank, and how bytes reach its pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tutti_core import PrefixStore, UnsupportedError
from tutti_sglang.device_pools import DevicePoolPages, regions
from tutti_sglang.shards import Ranks
from tutti_sglang.staging import Staging, memory_path
from tutti_sglang.staging_rows import DevicePages, DevicePool, page_rows


class MemoryPath:
    """How bytes get between the store and the pools of one device.

    name      "host" or "gds": the store reads straight into the pools; "staging": by way of it.
    reason    why.
    staging   what carries the bytes of loads, with "staging", and of offloads, but with "host".

    Raises
        UnsupportedError: memory of another kind than the host's or CUDA's.
    """

    def __init__(self, store: PrefixStore, pools: Sequence[DevicePoolPages]) -> None:
        device = pools[0].buffers[0].device
        if device.type not in ("cpu", "cuda"):
            raise UnsupportedError(
                f"device pool {pools[0].name!r} is on {device}: only host memory and CUDA memory "
                "are supported"
            )
        tiers = bool(store.config.dram or store.config.hbm)
        transport = store.stats().transport.name
        self.name, self.reason = memory_path(device.type, transport, memory_tiers=tiers)
        self.staging: Staging | None = None
        self._pools: dict[str, DevicePool] = {}
        if self.name != "staging":
            for region in regions(pools):
                store.register(region)
        if self.name != "host":
            self._pools = {pool.name: _device_pool(pool) for pool in pools}
            self.staging = Staging(
                list(self._pools.values()), register=store.register, unregister=store.unregister
            )

    @property
    def is_staged(self) -> bool:
        """Whether loads go by way of staging; else into the addresses of the pools."""
        return self.name == "staging"

    @property
    def broken(self) -> str:
        """Why nothing moves any more; empty while all is well."""
        return "" if self.staging is None else self.staging.broken

    def target(
        self, pages: DevicePoolPages, rows: npt.NDArray[np.int64], after: tuple[Any, ...]
    ) -> DevicePages:
        """What staging calls the pages that begin at `rows`, once the events `after` happened."""
        return DevicePages(self._pools[pages.name], pages.numbers(rows), after)

    def close(self) -> None:
        """Let go of staging. Its users are closed before."""
        if self.staging is not None:
            self.staging.close()


def _device_pool(pages: DevicePoolPages) -> DevicePool:
    """The pool as staging sees it."""
    tokens = pages.row_span
    return DevicePool(
        [[page_rows(buffer, tokens) for buffer in part] for part in pages.part_buffers]
    )


def ranks_of(params: Any) -> Ranks:
    """Where this process stands, as SGLang's own linkers reckon it.

    Raises
        UnsupportedError: decode context parallelism.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if int(parallel.attn_dcp_size) > 1:
        raise UnsupportedError("the direct route does not support decode context parallelism yet")
    tp_rank, tp_size = 0, int(parallel.tp_size)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        group = params.attn_tp_cache_group or params.tp_cache_group
        tp_rank = torch.distributed.get_rank(group=group)
        tp_size = torch.distributed.get_world_size(group=group)
    return Ranks(
        tp_rank,
        tp_size,
        int(params.pp_rank),
        int(params.pp_size),
        int(params.attn_cp_rank),
        int(params.attn_cp_size),
    )


def process_count(server_args: Any) -> int:
    """Schedulers of this server on this node, each of which has a linker."""
    count = int(server_args.tp_size) * int(server_args.pp_size)
    if not server_args.enable_dp_attention:
        count *= int(server_args.dp_size)
    return max(count // int(server_args.nnodes), 1)


def model_name(server_args: Any) -> str:
    """The name under which the model is served, as on the other route."""
    return str(server_args.served_model_name or server_args.model_path)
