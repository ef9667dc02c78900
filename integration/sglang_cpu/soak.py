"""A real SGLang server under load with a store that is late and fails: never stuck, never wrong.

    python integration/sglang_cpu/soak.py --route hicache|linker [--seconds N] [--seed S] [--dir D]
                                          [--json F]

Several clients ask at once for prompts with common beginnings, and some hang up in the middle. Now
and then all pause, the cache is flushed, and what the scheduler's process holds is looked at.
Faults come from SGLang's own injector (hicache), or from `faulty_linker` below Tutti (linker).

Every output is compared with that of the same prompt computed from scratch. A request that the
engine refuses because its load failed (linker) is asked again, as a client would. At the end the
server is killed and started again without faults, every prompt must be right once more, and the
store is checked byte by byte.

Exit status 0 only if no output was wrong, nothing hung, and nothing leaked.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sglang_cpu.backends import PAGE_TOKENS, Backend
from sglang_cpu.make_model import VOCABULARY_MIN, ensure_model
from sglang_cpu.server import Generation, ServerError, SGLangServer

CLIENTS = 6
FLUSH_EVERY_S = 3.0
TRIES_MAX = 20
HANG_UP_SHARE = 0.05
HANG_UP_S = 1.0
FINE_LOGPROB = 1e-3
"""Rounding differs with the batch; a wrong page changes a logprob by 0.1 and up."""
DEVICE_TOKENS = 3072
# Less than the prompts need, so that pages are evicted and stored again.
OPTIONS = {"capacity": "24MiB", "segment": "1MiB"}
DELAY_S, FAILURE = 0.05, 0.15

SLACK = {"threads": 0, "descriptors": 0, "anonymous_kib": 64 << 10}
"""What the scheduler's process may hold more at the end than at first, see `Look`."""


def make_prompts(rng: random.Random) -> list[list[int]]:
    """Prompts in families with a common beginning; some are the beginning of others."""

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY_MIN) for _ in range(count)]

    prompts = []
    for _ in range(8):
        stem = tokens(rng.randrange(5, 15) * PAGE_TOKENS + rng.randrange(PAGE_TOKENS))
        prompts.append(stem)
        for _ in range(5):
            branch = [*stem, *tokens(rng.randrange(1, 120))]
            prompts += [branch, [*branch, *tokens(rng.randrange(1, 80))]]
    return prompts


def differs(reply: Generation, reference: Generation) -> bool:
    """Whether an output cannot be explained by rounding.

    Where two tokens are as likely as each other, rounding may choose the other one, and from there
    on the outputs have nothing in common. So they are compared up to the first other token, whose
    logprob must be the same too.
    """
    pairs = zip(
        reply.output_ids,
        reference.output_ids,
        reply.logprobs,
        reference.logprobs,
        strict=True,
    )
    for mine, theirs, my_logprob, their_logprob in pairs:
        if abs(my_logprob - their_logprob) > FINE_LOGPROB:
            return True
        if mine != theirs:
            return False
    return False


@dataclass(frozen=True)
class Look:
    """What the scheduler's process holds while nothing runs."""

    at_s: float
    threads: int
    descriptors: int
    anonymous_kib: int


@dataclass
class Report:
    """What happened. `counts`: see `Soak`; `looks`: see `leaks`."""

    route: str
    seconds: float
    seed: int
    counts: dict[str, int] = field(default_factory=dict)
    looks: list[Look] = field(default_factory=list)
    injected: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def leaks(self) -> list[str]:
        """What was always more in the last third of the run than ever in the first."""
        third = max(len(self.looks) // 3, 1)
        first, last = self.looks[:third], self.looks[-third:]
        return [
            f"{what}: up to {before} at first, {after} and more at last"
            for what, slack in SLACK.items()
            for before in [max(getattr(one, what) for one in first)]
            for after in [min(getattr(one, what) for one in last)]
            if after > before + slack
        ]


class Gate:
    """Lets many requests through at once, or one who wants nothing else to run."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    @contextmanager
    def through(self) -> Iterator[None]:
        """One of many."""
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait for those inside; nobody else comes in meanwhile."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._inside == 0)
        try:
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()


class Soak:
    """One run.

    Counts: requests, refused (asked again), hung up, flushes; tokens by where they came from.
    """

    def __init__(self, route: str, seconds: float, seed: int, work: Path) -> None:
        self.report = Report(route, seconds, seed)
        self.model = ensure_model(work / "model")
        self.folder = work / f"store-{route}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log_path = work / f"server-{route}.log"
        self.prompts = make_prompts(random.Random(f"prompts {seed}"))
        self.references: list[Generation] = []
        self._gate = Gate()
        self._end_s = 0.0
        self._lock = threading.Lock()

    def run(self) -> Report:
        """Everything that the top of the file says."""
        with self._server(faults=True) as server:
            self.references = [
                self._ask(server, prompt, namespace=f"from scratch {i}")
                for i, prompt in enumerate(self.prompts)
            ]
            self._load(server)
            self._note_injected(server.log())
            server.kill()
        with self._server(faults=False) as server:
            for i in range(len(self.prompts)):
                self._compare(server, i)
                self._flush(server)
        self._check_store()
        if not self.report.counts["from the store"]:
            self._problem("nothing came from the store")
        self.report.problems += self.report.leaks()
        return self.report

    # ---- the server ----
    def _server(self, *, faults: bool) -> SGLangServer:
        backend = Backend("tutti", self.folder, OPTIONS, route=self.report.route)
        flags, env = backend.server_flags(), {}
        if faults and self.report.route == "hicache":
            env = {
                "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": str(DELAY_S),
                "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": str(FAILURE),
            }
        elif faults:
            from sglang_cpu.faulty_linker import Faults, flags_of

            bad = Faults(DELAY_S, failed=FAILURE / 2, flipped=FAILURE / 2, seed=self.report.seed)
            flags = flags_of(backend.extra_config(), bad)
            env = {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        flags = [*flags, f"--max-total-tokens={DEVICE_TOKENS}"]
        return SGLangServer(self.model, flags, env=env, log_path=self.log_path)

    def _note_injected(self, log: str) -> None:
        if self.report.route == "hicache":
            if "HiCache storage test injector enabled" not in log:
                self.report.problems.append("SGLang's injector was not at work")
            return
        found = re.findall(r"injected so far: (\{.*\})", log)
        self.report.injected = json.loads(found[-1]) if found else {}
        for kind in ("failed reads", "flipped reads", "failed writes"):
            if not self.report.injected.get(kind):
                self.report.problems.append(f"no {kind} were injected")

    # ---- load ----
    def _load(self, server: SGLangServer) -> None:
        self._end_s = time.monotonic() + self.report.seconds
        clients = [
            threading.Thread(target=self._client, args=(server, i), name=f"client {i}")
            for i in range(CLIENTS)
        ]
        started_s = time.monotonic()
        for client in clients:
            client.start()
        while time.monotonic() < self._end_s and not self.report.problems:
            time.sleep(min(FLUSH_EVERY_S, max(self._end_s - time.monotonic(), 0.1)))
            with self._gate.alone():
                self._flush(server)
                self.report.looks.append(look(server, time.monotonic() - started_s))
        for client in clients:
            client.join()

    def _client(self, server: SGLangServer, number: int) -> None:
        rng = random.Random(f"client {self.report.seed} {number}")
        try:
            while time.monotonic() < self._end_s and not self.report.problems:
                with self._gate.through():
                    if rng.random() < HANG_UP_SHARE:
                        server.hang_up(rng.choice(self.prompts), rng.uniform(0, HANG_UP_S))
                        self._count("hung up")
                    else:
                        self._compare(server, int(len(self.prompts) * rng.random() ** 2))
        except Exception as error:
            self._problem(f"client {number}: {type(error).__name__}: {error}")

    def _compare(self, server: SGLangServer, number: int) -> None:
        reply = self._ask(server, self.prompts[number])
        self._count("requests")
        self._count("prompt tokens", reply.prompt_tokens)
        self._count("from the device", reply.cached.device)
        if self.report.route == "hicache":
            self._count("from the host", reply.cached.host)
            self._count("from the store", reply.cached.storage)
        else:  # as SGLang counts what comes through a linker
            self._count("from the store", reply.cached.host)
        if differs(reply, self.references[number]):
            self._problem(f"prompt {number}: {reply} is not {self.references[number]}")

    def _ask(
        self, server: SGLangServer, prompt: Sequence[int], namespace: str | None = None
    ) -> Generation:
        """Generate; again when the engine says that a load failed."""
        for _ in range(TRIES_MAX):
            try:
                return server.generate(prompt, namespace=namespace)
            except ServerError as error:
                if "External KV cache load failed" not in str(error):
                    raise
                self._count("refused")
        raise ServerError(f"refused {TRIES_MAX} times in a row")

    def _flush(self, server: SGLangServer) -> None:
        server.flush()
        self._count("flushes")

    # ---- the store ----
    def _check_store(self) -> None:
        from tutti_core.verify import verify_store

        checked = verify_store(self.folder)
        self.report.counts["pages checked"] = checked.payloads
        if not checked.clean:
            self._problem(f"the store is damaged: {checked.damage}")

    def _count(self, what: str, number: int = 1) -> None:
        with self._lock:
            self.report.counts[what] = self.report.counts.get(what, 0) + number

    def _problem(self, what: str) -> None:
        with self._lock:
            self.report.problems.append(what)


def look(server: SGLangServer, at_s: float) -> Look:
    """Look at the process of the server that has the scheduler."""
    (folder,) = [
        process
        for process in (Path(f"/proc/{pid}") for pid in server.processes())
        if b"scheduler" in (process / "cmdline").read_bytes()
    ]
    status = (folder / "status").read_text()
    numbers = {
        name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+)", status, re.MULTILINE)
    }
    return Look(at_s, numbers["Threads"], len(os.listdir(folder / "fd")), numbers["RssAnon"])


def print_report(report: Report) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"{report.seconds:.0f} s on the {report.route} route, seed {report.seed}",
        title_justify="left",
        box=box.SIMPLE,
    )
    table.add_column("what")
    table.add_column("number", justify="right")
    for name, number in (*report.counts.items(), *report.injected.items()):
        table.add_row(name, f"{number:,}")
    for name in ("threads", "descriptors", "anonymous_kib"):
        seen = [getattr(one, name) for one in report.looks]
        table.add_row(name, f"{seen[0]:,} .. {max(seen):,}, at last {seen[-1]:,}" if seen else "-")
    console = Console()
    console.print(table)
    for problem in report.problems:
        console.print(f"PROBLEM  {problem}", markup=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--route", choices=("hicache", "linker"), required=True)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dir", type=Path, help="for the model and the store; temporary by default"
    )
    parser.add_argument("--json", type=Path, help="write the report here too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        work = args.dir or Path(temporary)
        report = Soak(args.route, args.seconds, args.seed, work).run()
        print_report(report)
        if report.problems:
            print((work / f"server-{args.route}.log").read_text(errors="replace")[-6000:])
    if args.json:
        args.json.write_text(json.dumps(asdict(report), indent=2))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
