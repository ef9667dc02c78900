"""An agent's conversation survives kill -9 of the server: its prefix comes back from the storage.

    python integration/sglang_cpu/demo.py [--dir D] [--json F] [--backend tutti|file]

1. Start a real SGLang server with `--enable-hierarchical-cache --hicache-storage-backend tutti`.
2. Play a conversation of several turns that share a long prefix (system prompt and tools).
3. When the storage holds all its pages, end the server and all its children with SIGKILL.
4. Start the server again, play the same conversation and one turn more.

Exit status 0 only if, after the restart, every whole page of every prompt came out of a cache, the
first prompt's all from the storage, and every output is what was computed from scratch.
The model is a toy on a CPU: which tier tokens come from is exact, times only hint at the effect.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich import box
from rich.console import Console
from rich.table import Table

from sglang_cpu.backends import PAGE_TOKENS, Backend, Usage
from sglang_cpu.conversation import NEXT_TURN, PREFIX, TURNS
from sglang_cpu.make_model import ModelShape, encode, ensure_model
from sglang_cpu.server import Generation, SGLangServer, stored_pages, wait_until

REPLY_TOKENS = 24
BACKUP_TIMEOUT_S = 60.0
# Larger than the tests' model, so that computing a prompt costs more than asking for it.
SHAPE = ModelShape(hidden_size=256, intermediate_size=1024, num_hidden_layers=12)
COLD, WARM, NEW = "cold", "after SIGKILL", "next turn"


@dataclass(frozen=True)
class Request:
    """One row of the table.

    known_tokens: how many tokens at the start of the prompt an earlier request has computed.
    cold_ttft_s: the same prompt's time before the kill or, for a new one, from scratch.
    identical: whether the output is the one of that other run; None for the cold run itself.
    """

    turn: int
    phase: str
    reply: Generation
    known_tokens: int
    cold_ttft_s: float
    identical: bool | None

    @property
    def fully_cached(self) -> bool:
        """Whether every whole page known came from a cache. The last token is always computed."""
        known = min(self.known_tokens, self.reply.prompt_tokens - 1)
        return self.reply.cached.total == known // PAGE_TOKENS * PAGE_TOKENS


@dataclass(frozen=True)
class Result:
    requests: list[Request]
    usage: Usage

    @property
    def passed(self) -> bool:
        warm = [request for request in self.requests if request.phase != COLD]
        first = warm[0].reply.cached
        return (
            all(request.fully_cached and request.identical for request in warm)
            and first.storage == first.total > 0
        )


def play(
    server: SGLangServer, model: Path, turns: tuple[str, ...]
) -> Iterator[tuple[list[int], Generation]]:
    """(prompt, reply) of each turn; a prompt is everything said so far."""
    said = encode(model, PREFIX)
    for message in turns:
        said += encode(model, message)
        prompt = list(said)
        reply = server.generate(prompt, max_new_tokens=REPLY_TOKENS)
        said += reply.output_ids
        yield prompt, reply


def warm_up(server: SGLangServer) -> int:
    """One short request, so that no time below includes costs of first use (torch, page hash,
    backend). In a namespace of its own: it shares no page with the conversation.

    Returns how many pages it leaves in an empty storage.
    """
    prompt = list(range(3, 3 + 3 * PAGE_TOKENS))
    reply = server.generate(prompt, max_new_tokens=4, namespace="warm-up")
    return stored_pages([[*prompt, *reply.output_ids]], PAGE_TOKENS)


def run(backend: Backend, work: Path, console: Console) -> Result:
    model = ensure_model(work / "model", shape=SHAPE)
    server_args: dict[str, Any] = {
        "flags": backend.server_flags(),
        "env": backend.environment(),
        "log_path": work / "server.log",
    }
    requests: list[Request] = []
    with console.status("starting SGLang"), SGLangServer(model, **server_args) as server:
        console.print(f"SGLang is up after {server.start_seconds:.0f} s, log {server.log_path}")
        warm_up_pages = warm_up(server)
        cold = list(play(server, model, TURNS))
        requests += [
            Request(turn, COLD, reply, 0, reply.ttft_s, None)
            for turn, (_, reply) in enumerate(cold, start=1)
        ]
        await_backup(backend, warm_up_pages, cold, console)
        count = len(server.processes())
        server.kill()
        console.print(f"killed its {count} processes with SIGKILL")

    with console.status("starting SGLang again"), SGLangServer(model, **server_args) as server:
        console.print(f"SGLang is up again after {server.start_seconds:.0f} s")
        warm_up(server)
        # The same prompts, not replayed replies: a wrong reply must not change what is asked next.
        for turn, (prompt, once) in enumerate(cold, start=1):
            reply = server.generate(prompt, max_new_tokens=REPLY_TOKENS)
            same = reply.same_output(once)
            requests.append(Request(turn, WARM, reply, len(prompt), once.ttft_s, same))
        prompt, once = cold[-1]
        known_tokens = len(prompt) + len(once.output_ids) - 1  # the last one was never fed back
        prompt = [*prompt, *once.output_ids, *encode(model, NEXT_TURN)]
        reply = server.generate(prompt, max_new_tokens=REPLY_TOKENS)
        usage = backend.usage()
        # Computed without any cache, for comparison.
        scratch = server.generate(prompt, max_new_tokens=REPLY_TOKENS, namespace="from scratch")
        same = reply.same_output(scratch) and scratch.cached.total == 0
        requests.append(Request(len(cold) + 1, NEW, reply, known_tokens, scratch.ttft_s, same))
    return Result(requests, usage)


def await_backup(
    backend: Backend, other_pages: int, played: list[tuple[list[int], Generation]], console: Console
) -> None:
    """The backup runs behind the replies; wait until the storage shows every page it must hold."""
    sequences = [[*prompt, *reply.output_ids] for prompt, reply in played]
    wanted = other_pages + stored_pages(sequences, PAGE_TOKENS)
    if not wait_until(lambda: backend.usage().pages >= wanted, BACKUP_TIMEOUT_S):
        found = backend.usage().pages
        console.print(f"[red]only {found} of {wanted} pages stored after {BACKUP_TIMEOUT_S:.0f} s")


def report(result: Result, backend: Backend) -> Table:
    table = Table(
        title=f"SGLang with --hicache-storage-backend {backend.name}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    table.add_column("turn")
    table.add_column("phase", no_wrap=True)
    for heading in ("prompt", "device", "host", "storage", "cold ms", "warm ms"):
        table.add_column(heading, justify="right")
    table.add_column("identical")
    for request in result.requests:
        cached = request.reply.cached
        table.add_row(
            str(request.turn),
            request.phase,
            *(str(count) for count in (request.reply.prompt_tokens, cached.device, cached.host)),
            f"[bold]{cached.storage}[/]" if cached.storage else "0",
            f"{request.cold_ttft_s * 1e3:.0f}",
            "" if request.phase == COLD else f"{request.reply.ttft_s * 1e3:.0f}",
            {None: "", True: "yes", False: "[red]NO"}[request.identical],
            end_section=request.turn == len(TURNS),
        )
    return table


def as_json(result: Result, backend: Backend) -> dict[str, Any]:
    return {
        "backend": backend.name,
        "passed": result.passed,
        "pages": result.usage.pages,
        "disk_bytes": result.usage.disk_bytes,
        "requests": [
            {
                "turn": request.turn,
                "phase": request.phase,
                "prompt_tokens": request.reply.prompt_tokens,
                **{f"{tier}_tokens": n for tier, n in asdict(request.reply.cached).items()},
                "ttft_cold_s": request.cold_ttft_s,
                "ttft_warm_s": None if request.phase == COLD else request.reply.ttft_s,
                "identical": request.identical,
            }
            for request in result.requests
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, help="where to work; kept. Default: temporary")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    parser.add_argument(
        "--backend", default="tutti", help="tutti (default), or file for comparison"
    )
    args = parser.parse_args()
    console = Console()
    with tempfile.TemporaryDirectory(prefix="tutti-demo-") as temporary:
        work = (args.dir or Path(temporary)).resolve()
        backend = Backend(args.backend, work / "store")
        backend.folder.mkdir(parents=True, exist_ok=True)
        if any(backend.folder.iterdir()):
            parser.error(f"{backend.folder} isn't empty, and the demo starts cold; remove it first")
        result = run(backend, work, console)
        console.print(report(result, backend))
        console.print(
            "Tokens of the prompt, and of these the ones from device, host and storage; time to "
            "first token.\nStored: "
            f"{result.usage.pages} pages, {result.usage.disk_bytes / 2**20:.1f} MiB on disk."
        )
        if args.json:
            args.json.write_text(json.dumps(as_json(result, backend), indent=2) + "\n")
    console.print("[green]PASS" if result.passed else "[red]FAIL")
    return 0 if result.passed else 1


if __name__ == "__main__":
    sys.exit(main())
