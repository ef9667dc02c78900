"""SGLang plugin: HiCache host pools without a GPU.

SGLang looks its copy kernels up as globals of the pool modules at call time, so binding functions
of the same names there is all it takes; and a host pool that isn't pinned allocates plain memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def activate() -> None:
    """Entry point of the group sglang.srt.plugins; runs in each SGLang process.

    Does nothing where CUDA works, and never replaces a copy function that SGLang has itself.
    """
    if torch.cuda.is_available():
        return
    from sglang.srt.mem_cache import memory_pool_host
    from sglang.srt.mem_cache.pool_host import base, dsa, mamba, mha, minimax_m3_nvfp4, mla

    from tutti_sglang_cpu.copies import COPY_FUNCTIONS

    for module in (mha, mla, dsa, mamba, memory_pool_host):
        for name, function in COPY_FUNCTIONS.items():
            if not hasattr(module, name):
                setattr(module, name, function)
    for pool in (
        base.HostKVCache,
        dsa.DSAIndexerPoolHost,
        mamba.MambaPoolHost,
        mha.MHATokenToKOnlyPoolHost,
        minimax_m3_nvfp4.MiniMaxM3Nvfp4IndexKPoolHost,
        memory_pool_host.DeepSeekV4PagedHostPool,
        memory_pool_host.DeepSeekV4StateHostPool,
    ):
        _never_pin(pool)
    _read_windows_where_they_are()


def _read_windows_where_they_are() -> None:
    """Let the plain attention backend read a window's KV at the slots at which it writes it.

    SGLang 0.5.23 writes it to the window's own pool and looks for it at the slots of the other
    pool, so that a model with windows answers otherwise as soon as the two differ.
    """
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend as Backend

    def translated(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def run(
            self: Any,
            query: Any,
            output: Any,
            k: Any,
            v: Any,
            slots: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            if self.use_sliding_window_kv_pool and kwargs.get("sliding_window_size") is not None:
                slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots.long())
            return original(self, query, output, k, v, slots, *args, **kwargs)

        return run

    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(Backend, name, translated(getattr(Backend, name)))


def _never_pin(host_pool_class: Any) -> None:
    """Each of these reads `pin_memory` in its own constructor; the others descend from one."""
    original = host_pool_class.__init__

    @functools.wraps(original)
    def unpinned(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["pin_memory"] = False
        original(self, *args, **kwargs)

    host_pool_class.__init__ = unpinned
