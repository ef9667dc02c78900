"""Drives a real TuttiLinker over SGLang's own device pools, where SGLang is installed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

TOKENS, SLOTS, LAYERS = 16, 2048, 4
WAIT_S = 60.0


def check_linker(bench: Any) -> None:
    """Offload pages, load them into other slots, layer by layer as a forward pass waits."""
    try:
        import sglang  # noqa: F401
    except ImportError as error:
        bench.report.check("linker", None, f"SGLang is not installed ({error})")
        return
    on_host = bench.device.type == "cpu"
    for path in ("host", "staging") if on_host else ("auto", "gds"):
        name = f"linker, {path}"
        try:
            with _published(bench) as server_args, _forced(path if on_host else ""):
                detail = _round_trips(bench, server_args, "gds" if path == "gds" else "auto")
        except Exception as error:
            missing = path == "gds" and "kvikio" in str(error)
            bench.report.check(name, None if missing else False, f"{error!r}")
        else:
            bench.report.check(name, True, detail)


def _round_trips(bench: Any, server_args: Any, transport: str) -> str:
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    from tutti_sglang.linker import TuttiLinker

    pool = MHATokenToKVPool(
        size=SLOTS, page_size=TOKENS, dtype=torch.bfloat16, head_num=8, head_dim=128,
        layer_num=LAYERS, device=str(bench.device), enable_memory_saver=False,
    )  # fmt: skip
    params = SimpleNamespace(
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool),
        req_to_token_pool=SimpleNamespace(), page_size=TOKENS, pp_rank=0, pp_size=1,
        attn_cp_rank=0, attn_cp_size=1, tp_cache_group=None, attn_tp_cache_group=None,
        mtp_draft_device_pools=(), sidecar_draft_device_pools=(),
    )  # fmt: skip
    folder, rng = bench.new_folder(), random.Random(5)
    config = {"path": str(folder), "capacity": "1GiB", "transport": transport}
    forward = bench.api.Stream(bench.device) if bench.device.type == "cuda" else None
    linker = TuttiLinker(
        server_args, params, components={ComponentType.FULL}, extra_config=config,
        forward_stream=forward,
    )  # fmt: skip
    tensors = [t for pair in zip(pool.k_buffer, pool.v_buffer, strict=True) for t in pair]

    def transfer(keys: list[str], pages: list[int] | None) -> list[Any]:
        slots = None
        if pages is not None:
            slots = torch.cat([torch.arange(p * TOKENS, (p + 1) * TOKENS) for p in pages])
            slots = slots.to(bench.device)
        return [PoolTransfer(name=PoolName.KV, keys=keys, device_indices=slots)]

    try:
        for turn in range(4):
            pages = rng.sample(range(1, SLOTS // TOKENS), 60)
            source, target = pages[:30], pages[30:]
            for tensor in tensors:
                tensor.copy_(torch.randn(tensor.shape, device=bench.device).to(tensor.dtype))
            expected = [_pages(tensor, source).clone() for tensor in tensors]
            keys = _keys(f"{turn}", 30)
            assert linker.offload(transfer(keys, source)), "the offload was refused"
            _until(lambda: linker.num_completed_offloads() > 0, "an offload")
            assert linker.pop_completed_offload(), "the pages were not stored"
            assert linker.lookup("r", transfer(keys, None)) == list(range(1, 31)), "lengths"
            for tensor in tensors:
                tensor.zero_()
            assert linker.load("r", transfer(keys, target)), "the load was refused"
            index = linker.start_layer_wise_loading()
            linker.layer_done_counter.set_consumer(index)
            for layer in range(LAYERS):
                linker.layer_done_counter.wait_until(layer)
                for at in (2 * layer, 2 * layer + 1):
                    same = torch.equal(_pages(tensors[at], target), expected[at])
                    assert same, f"wrong bytes in layer {layer} at the moment it was reported"
            assert linker.finish_layer_wise_loading(index), "the load failed"
        return f"memory path {linker._path.name}: {linker._path.reason}"
    finally:
        linker.close()
        bench.drop(folder)


def _pages(tensor: torch.Tensor, pages: list[int]) -> torch.Tensor:
    return tensor[: tensor.shape[0] // TOKENS * TOKENS].view(-1, TOKENS, *tensor.shape[1:])[pages]


def _keys(name: str, count: int) -> list[str]:
    return [hashlib.sha256(f"{name} {page}".encode()).hexdigest() for page in range(count)]


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what} did not end in {WAIT_S} s"
        time.sleep(0.002)


@contextmanager
def _forced(path: str) -> Iterator[None]:
    """On the CPU: take a path although the pool is host memory. Empty: as the linker chooses."""
    if not path:
        yield
        return
    with mock.patch(
        "tutti_sglang.linker_setup.memory_path", lambda *_, **__: (path, "forced by this check")
    ):
        yield


@contextmanager
def _published(bench: Any) -> Iterator[Any]:
    """SGLang's configuration as a scheduler process has it, for a model that is never loaded."""
    if bench.device.type == "cpu":
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.runtime_context import SpawnRanks, publish, reset_context
    from sglang.srt.server_args import ServerArgs

    server_args = ServerArgs(
        model_path=str(_model(bench.folder / "model")),
        device=bench.device.type,
        page_size=TOKENS,
        attention_backend="torch_native",
        disable_overlap_schedule=True,
    )
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    try:
        yield server_args
    finally:
        reset_context()


def _model(folder: Path) -> Path:
    """A model's configuration and a file that stands for its weights."""
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024,
        "num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": LAYERS,
        "intermediate_size": 64, "vocab_size": 128, "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}" + bytes(64))
    return folder
