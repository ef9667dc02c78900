"""SGLang plugin: HiCache host pools without a GPU.

SGLang looks its copy kernels up as globals of the pool modules at call time, so binding functions
of the same names there is all it takes; and a host pool that isn't pinned allocates plain memory.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def activate() -> None:
    """Entry point of the group sglang.srt.plugins; runs in each SGLang process.

    Does nothing where CUDA works, and never replaces a copy function that SGLang has itself.
    """
    if torch.cuda.is_available():
        return
    from sglang.srt.mem_cache.pool_host import base, mha, mla

    from tutti_sglang_cpu.copies import COPY_FUNCTIONS

    for module in (mha, mla):
        for name, function in COPY_FUNCTIONS.items():
            if not hasattr(module, name):
                setattr(module, name, function)
    _never_pin(base.HostKVCache)


def _never_pin(host_pool_class: Any) -> None:
    """All pools hand `pin_memory` to their common base class and read it back from there."""
    original = host_pool_class.__init__

    @functools.wraps(original)
    def unpinned(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["pin_memory"] = False
        original(self, *args, **kwargs)

    host_pool_class.__init__ = unpinned
