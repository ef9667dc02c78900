"""A tiny model with latent (MLA) attention and random weights: MiniCPM3.

Of SGLang's models with latent attention it is the one that runs on a CPU with the plain attention
backend; DeepSeek's want kernels for their attention.
"""

from __future__ import annotations

import json
from pathlib import Path

from sglang_cpu.make_model import CONTEXT_TOKENS, SPECIAL_TOKENS, _write_tokenizer


def make_mla_model(folder: Path) -> Path:
    """Write the model into `folder`."""
    import torch
    from transformers import MiniCPM3Config, MiniCPM3ForCausalLM
    from transformers.utils import logging

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = (_write_tokenizer(folder) + 63) // 64 * 64
    logging.disable_progress_bar()
    config = MiniCPM3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=64,
        q_lora_rank=96,
        qk_rope_head_dim=16,
        qk_nope_head_dim=32,
        v_head_dim=32,
        dim_model_base=64,
        max_position_embeddings=CONTEXT_TOKENS,
        initializer_range=0.25,
        bos_token_id=SPECIAL_TOKENS.index("<s>"),
        eos_token_id=SPECIAL_TOKENS.index("</s>"),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MiniCPM3ForCausalLM(config).to(torch.float32)
    model.save_pretrained(folder)
    written = folder / "config.json"
    values = json.loads(written.read_text())
    values.pop("rope_parameters", None)  # SGLang reads the older names
    values |= {"rope_theta": 10000.0, "rope_scaling": None}
    written.write_text(json.dumps(values))
    return folder
