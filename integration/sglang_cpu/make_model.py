"""A tiny LLaMA with random weights and a tokenizer trained on the spot; nothing is downloaded.

    python integration/sglang_cpu/make_model.py DIR [--seed N]

Another seed gives other weights behind the same shapes and tokenizer: a model whose KV pages have
the same keys and sizes as the first one's, and must never be mixed up with them.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VOCABULARY_MAX = 1024
VOCABULARY_MIN = 256 + 3  # bytes and special tokens; merges come on top. Ids below are always valid
CONTEXT_TOKENS = 4096
SPECIAL_TOKENS = ["<unk>", "<s>", "</s>"]
CORPUS = [
    "The agent reads the file, runs the tests and reports what failed and why. ",
    "Call a tool with a JSON object: name, arguments, path, query, command, limit. ",
    "You are a careful engineer. Answer in short sentences and cite the line you mean. ",
    "A page of the key value cache is stored once and read back bit for bit, or it is a miss. ",
    "error: expected 3 results but found 2 in module storage.index at line 214 of 380. ",
]


@dataclass(frozen=True)
class ModelShape:
    """Four layers of 2 KV heads x 32: 4 KiB a page of 16 float16 tokens, per layer, K and V."""

    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    # Far above the usual 0.02: greedy output must depend on the whole prompt, so that a wrong KV
    # page shows in the text.
    initializer_range: float = 0.25


@dataclass(frozen=True)
class WindowShape(ModelShape):
    """The same with a sliding window in every other layer, which SGLang keeps in a pool apart."""

    sliding_window: int = 96


def ensure_model(folder: Path, *, seed: int = 0, shape: ModelShape | None = None) -> Path:
    """Return `folder` with the model of this seed and shape in it, made if it isn't there yet.

    The recipe is written last, so a half-made folder is made again.
    """
    shape = shape or ModelShape()
    recipe_file = folder / "recipe.json"
    recipe = json.dumps({"seed": seed, "vocabulary": VOCABULARY_MAX, **asdict(shape)})
    if recipe_file.exists() and recipe_file.read_text() == recipe:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(folder, _write_tokenizer(folder), seed, shape)
    recipe_file.write_text(recipe)
    return folder


def _write_tokenizer(folder: Path) -> int:
    """Train a byte-level BPE, so that any text can be encoded. Returns the vocabulary size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_MAX,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "unk_token": "<unk>",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "model_max_length": CONTEXT_TOKENS,
            }
        )
    )
    return int(tokenizer.get_vocab_size())


def _write_weights(folder: Path, vocabulary: int, seed: int, shape: ModelShape) -> None:
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    settings = {
        "vocab_size": (vocabulary + 63) // 64 * 64,
        "max_position_embeddings": CONTEXT_TOKENS,
        "bos_token_id": SPECIAL_TOKENS.index("<s>"),
        "eos_token_id": SPECIAL_TOKENS.index("</s>"),
        **asdict(shape),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model(settings, shape).to(torch.float32)
    model.save_pretrained(folder)


def _model(settings: dict[str, Any], shape: ModelShape) -> Any:
    """A LLaMA, or a Mellum without experts where there are windows."""
    if not isinstance(shape, WindowShape):
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(**settings))  # type: ignore[no-untyped-call]
    from transformers import MellumConfig, MellumForCausalLM

    layers = shape.num_hidden_layers
    kinds = ["sliding_attention", "full_attention"] * layers
    config = MellumConfig(
        layer_types=kinds[:layers], mlp_layer_types=["dense"] * layers, **settings
    )
    return MellumForCausalLM(config)


def encode(folder: Path, text: str) -> list[int]:
    """Token ids of `text` under the model's tokenizer."""
    from tokenizers import Tokenizer

    return list(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    print(f"model in {ensure_model(args.folder, seed=args.seed)}")


if __name__ == "__main__":
    main()
