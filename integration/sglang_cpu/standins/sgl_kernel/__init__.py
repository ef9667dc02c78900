"""Import stand-in for the CPU build of sgl_kernel, which isn't published.

SGLang's CPU engine imports several `*_cpu` kernels by name while modules load, and calls one of
them for a dense model: `assign_req_to_token_pool_cpu`. Everything else has a torch fallback, taken
because the probe for AMX kernels finds none. A missing kernel raises when called, not on import.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    *_: Any,
) -> None:
    """Write each request's new KV slots into its row of the request-to-token table, in place.

    req_to_token: (requests, context). The other three describe, per request, the row and the token
    range [start, end); out_cache_loc holds the slots of all ranges, one after the other.
    """
    lengths = (end_offset - start_offset).tolist()
    slots = out_cache_loc.to(req_to_token.dtype).split(lengths)
    for row, start, fresh in zip(
        req_pool_indices.tolist(), start_offset.tolist(), slots, strict=True
    ):
        req_to_token[row, start : start + len(fresh)] = fresh


def __getattr__(name: str) -> Any:
    if not name.endswith("_cpu"):
        raise AttributeError(name)

    def absent(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} needs the unpublished CPU kernel build")

    return absent
