"""The offline engine keeps its prefixes in the store, from one process to the next."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sglang_cpu.backends import PAGE_TOKENS, Backend

ENGINE = Path(__file__).resolve().parents[2] / "integration" / "sglang_cpu" / "engine.py"
PROMPT = [3 + (i * 7 + 11) % 300 for i in range(400)]
PROMPT_PAGES = len(PROMPT) // PAGE_TOKENS
PROMPT_HIT = 384  # whole pages of 16, and the last token is always computed


def run_engine(model: Path, backend: Backend) -> dict[str, Any]:
    command = [sys.executable, str(ENGINE), str(model)]
    command += [json.dumps(backend.engine_arguments()), json.dumps(PROMPT)]
    command += [str(backend.folder), str(PROMPT_PAGES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    reply: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return reply


@pytest.mark.parametrize("route", ["hicache", "linker"])
def test_a_second_engine_reads_what_the_first_one_wrote(
    route: str, model: Path, backend_name: str, store_folder: Path
) -> None:
    if backend_name != "tutti":
        pytest.skip("tutti's own routes")
    backend = Backend(backend_name, store_folder, route=route)
    first = run_engine(model, backend)
    second = run_engine(model, backend)
    assert first["storage"] == 0
    assert second["storage"] == PROMPT_HIT
    assert second["output_ids"] == first["output_ids"]
