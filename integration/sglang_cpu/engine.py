"""SGLang's offline engine on a CPU with a storage backend; prints what it generated as JSON.

    python integration/sglang_cpu/engine.py MODEL ARGUMENTS PROMPT FOLDER PAGES

ARGUMENTS are those of `sglang.Engine` that choose the storage, see `Backend.engine_arguments`;
they and the PROMPT are JSON. The engine ends once the tutti store in FOLDER holds PAGES: SGLang
saves behind the reply, and its shutdown kills the process that does.

One run is one process: what a second run gets from storage, it can only have from the disk.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sglang_cpu.backends import Backend
from sglang_cpu.server import BASE_ENVIRONMENT, wait_until

NEW_TOKENS = 8
BACKUP_TIMEOUT_S = 120.0


def main(model: str, arguments: str, prompt: str, folder: str, pages: str) -> None:
    os.environ.update(BASE_ENVIRONMENT)
    import sglang

    engine = sglang.Engine(
        model_path=model,
        device="cpu",
        attention_backend="torch_native",
        disable_overlap_schedule=True,
        page_size=16,
        max_total_tokens=4096,
        dtype="float32",
        enable_cache_report=True,
        skip_server_warmup=True,
        **json.loads(arguments),
    )
    try:
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        reply = engine.generate(input_ids=json.loads(prompt), sampling_params=sampling)
        backend = Backend("tutti", Path(folder))
        if not wait_until(lambda: backend.usage().pages >= int(pages), BACKUP_TIMEOUT_S):
            raise TimeoutError(f"{backend.usage().pages} pages were saved, not {pages}")
    finally:
        engine.shutdown()
    details = reply["meta_info"].get("cached_tokens_details") or {}
    stored = details.get("storage", 0) + details.get("host", 0)  # the linker's count as host
    print(json.dumps({"output_ids": reply["output_ids"], "storage": stored}))


if __name__ == "__main__":  # the engine's processes import this file again
    main(*sys.argv[1:])
