"""The life of one process of the trial `processes`, and the nursery that starts and ends them.

The nursery is a program of its own: one interpreter that has imported everything once and forks for
each life, so that a life costs milliseconds, and nothing of the caller's is inherited. It reads
commands and writes answers, a line of JSON each; when its input ends, it kills what still lives.

What is done in a life is appended to a file, a line at a time, by the system call itself: nothing
that was said is lost with the process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt

from tutti_core.errors import BusyError
from tutti_core.keys import PageKeys
from tutti_core.store import NamespaceStore, PrefixStore
from tutti_core.testing import explain, page_bytes
from tutti_core.tiers.lease import Lease
from tutti_core.tiers.manager import Entry, Manager
from tutti_core.trials import kit

END_TIMEOUT_S = 30.0
"""How long a process may take to close its store and end."""

START_TIMEOUT_S = 60.0
PAUSE_S = 0.001  # between two calls: several lives share a core with others
CHAINS = 24
PAGES_MAX = 8
NAMESPACES: Mapping[str, Mapping[str, Any]] = {
    "small": {"model": "small", "page_bytes": 4096, "page_tokens": 1},
    "large": {"model": "large", "page_bytes": 12288, "page_tokens": 1},
    "cleared": {"model": "cleared", "page_bytes": 4096, "page_tokens": 1},
}


@dataclass(frozen=True, slots=True)
class Life:
    """What one process does until it is killed.

    settings    of its store, as `kit.small_config` takes them.
    seed        of what it does.
    page_seed   of what the pages hold: the same for all lives on one store.
    names       chains that it uses.
    spaces      namespaces that it uses, of NAMESPACES.
    saves       share of its calls that save; 0: a reader.
    report      file to which it appends what it did.
    broken      what is broken in it on purpose, of BREAKS; "": nothing.
    """

    path: str
    settings: dict[str, Any]
    seed: int
    page_seed: int
    names: int
    spaces: tuple[str, ...]
    saves: float
    report: str
    broken: str = ""


def chain_of(name: int) -> PageKeys:
    """The chain with a number; some begin alike."""
    stem = [("stem", name % 3, i) for i in range(name % 4)]
    return kit.chain(*stem, *[(name, i) for i in range(1 + name * 5 % PAGES_MAX)])


def content(page_seed: int, space: str, key: bytes) -> bytes:
    """What a page must hold: whoever saves it saves this."""
    number = list(NAMESPACES).index(space)
    size = int(NAMESPACES[space]["page_bytes"])
    return page_bytes(page_seed * len(NAMESPACES) + number, key, size)


# ---- in the process ----
class _Living:
    def __init__(self, life: Life) -> None:
        self._life = life
        self._rng = random.Random(life.seed)
        self._report = os.open(life.report, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._ending = False

    def run(self) -> None:
        """Use the store until SIGTERM, or SIGKILL."""
        signal.signal(signal.SIGTERM, self._end)
        life = self._life
        config = kit.small_config(Path(life.path), **life.settings)
        with PrefixStore.open(config) as store:
            self.say("open", store._lease.number)
            spaces = {name: store.namespace(**NAMESPACES[name]) for name in life.spaces}
            while not self._ending:
                self._step(store, spaces)
                time.sleep(PAUSE_S)
            counters = store.stats().counters
        self.say("ended", {name: counters.get(name, 0) for name in BAD_COUNTERS})

    def say(self, kind: str, *what: object) -> None:
        """Append a line to the report."""
        os.write(self._report, (json.dumps([kind, *what]) + "\n").encode())

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._ending = True

    def _step(self, store: PrefixStore, spaces: dict[str, NamespaceStore]) -> None:
        space = self._rng.choice(list(spaces))
        pages, name, dice = spaces[space], self._rng.randrange(self._life.names), self._rng.random()
        keys = chain_of(name)
        if dice < self._life.saves:
            self._save(space, pages, name, keys)
        elif dice < 0.9:
            self._load(space, pages, keys)
        elif dice < 0.93 and space == "cleared" and self._life.saves:
            with contextlib.suppress(BusyError):
                pages.clear(20)
                self.say("cleared")
        elif dice < 0.96:
            held = pages.hold(keys)
            self._load(space, pages, keys)
            held.release()
        else:
            pages.match(keys)
            pages.contains(keys)
            self._look(store)

    def _look(self, store: PrefixStore) -> None:
        counters = store.stats().counters
        for name in BAD_COUNTERS:
            if counters.get(name, 0):
                self.say("counter", name)
        self.say("did", {name: counters.get(name, 0) for name in DEEDS})

    def _save(self, space: str, pages: NamespaceStore, name: int, keys: PageKeys) -> None:
        data = b"".join(content(self._life.page_seed, space, key) for key in keys)
        stored = wait_for(pages.save(keys, data))
        if stored.all():
            self.say("saved", space, name)

    def _load(self, space: str, pages: NamespaceStore, keys: PageKeys) -> None:
        hits, wrong = load_and_compare(pages, space, keys, self._life.page_seed)
        self.say("loaded", hits, len(keys) - hits)
        for text, count in wrong:
            self.say("wrong", text, count)


BAD_COUNTERS = ("internal_errors", "checksum_errors", "read_errors", "catalog_errors")
"""Of a store whose devices are well: none of these may move."""


DEEDS = ("evicted_pages", "clears_noticed", "leaves_spared")
"""What shows that the lives got into each other's way."""


def wait_for(ticket: Any) -> npt.NDArray[np.bool_]:
    """The result of a ticket, within the bound of `kit.finish`."""
    return kit.finish(ticket)


def load_and_compare(
    pages: NamespaceStore, space: str, keys: PageKeys, page_seed: int
) -> tuple[int, list[tuple[str, int]]]:
    """Load a chain; returns how many pages came, and a line and a count of bytes for each wrong."""
    size = int(NAMESPACES[space]["page_bytes"])
    memory = bytearray(size * len(keys))
    loaded = wait_for(pages.load(keys, memory))
    wrong = []
    for i in np.flatnonzero(loaded).tolist():
        got = bytes(memory[i * size : (i + 1) * size])
        want = content(page_seed, space, keys[i])
        if got != want:
            differing = sum(a != b for a, b in zip(got, want, strict=True))
            wrong.append((f"{space} page {keys[i].hex()} holds {explain(got)}"[:300], differing))
    return int(np.count_nonzero(loaded)), wrong


# ---- what a trial must notice ----
def _take_leases_that_are_held() -> None:
    """Every process believes that it alone has lease 0."""
    _replace("tutti_core.store", "take_lease", lambda *_: Lease(0, -1))
    _replace("tutti_core.tiers.segments", "try_lease", lambda *_: None)


def _believe_what_was_read() -> None:
    """Pages of other processes are not looked up again after they were read."""

    def still_there(self: Manager, entry: Entry, keys: bytes, index: Any, *_: Any) -> Any:
        return np.ones(len(index), dtype=np.bool_)

    Manager.still_there = still_there  # type: ignore[method-assign, assignment]


def _adopt_from_the_living() -> None:
    """The lease of another process is not looked at before its segments are taken."""
    _replace("tutti_core.tiers.segments", "try_lease", lambda _, number, *more: Lease(number, -1))


def _replace(module: str, name: str, by: Callable[..., object]) -> None:
    setattr(importlib.import_module(module), name, by)


BREAKS: Mapping[str, Callable[[], None]] = {
    "leases": _take_leases_that_are_held,
    "validation": _believe_what_was_read,
    "robbery": _adopt_from_the_living,
}


def live(life: Life) -> None:
    """Be that process. Does not return before SIGTERM."""
    if life.broken:
        BREAKS[life.broken]()
    living = _Living(life)
    try:
        with kit.quiet():
            living.run()
    except BaseException as error:
        living.say("raised", repr(error)[:500])
        raise


# ---- the nursery ----
class Nursery:
    """Starts and ends lives by way of the program below. A context manager."""

    def __init__(self) -> None:
        self._program = subprocess.Popen(
            [sys.executable, "-c", "from tutti_core.trials.process_life import nurse; nurse()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._program.stdin is not None and self._program.stdout is not None
        self._program.stdin.close()
        try:
            self._program.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._program.kill()
            self._program.wait()
        self._program.stdout.close()

    def start(self, life: Life) -> int:
        """Start a life; returns its process id."""
        return self._ask("start", asdict(life))

    def kill(self, pid: int) -> int:
        """SIGKILL; returns how the process ended, as `subprocess` has it: -9 if it was that."""
        return self._ask("kill", pid)

    def end(self, pid: int) -> int:
        """SIGTERM, and SIGKILL after END_TIMEOUT_S; returns how the process ended."""
        return self._ask("end", pid)

    def _ask(self, *command: object) -> int:
        assert self._program.stdin is not None and self._program.stdout is not None
        self._program.stdin.write(json.dumps(command) + "\n")
        self._program.stdin.flush()
        answer = self._program.stdout.readline()
        if not answer:
            raise AssertionError("the nursery has died")
        return int(answer)


def nurse() -> None:
    """The program of a Nursery."""
    children: set[int] = set()
    try:
        for line in sys.stdin:
            word, what = json.loads(line)
            if word == "start":
                pid = _fork(Life(**what))
                children.add(pid)
                answer = pid
            else:
                answer = _finish(int(what), word == "kill")
                children.discard(int(what))
            print(answer, flush=True)
    finally:
        for pid in children:
            _finish(pid, True)


def _fork(life: Life) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        live(life)
        code = 0
    finally:
        os._exit(code)


def _finish(pid: int, at_once: bool) -> int:
    """End a child of this process, and wait for it; SIGKILL comes last, so the wait ends."""
    deadline_s = time.monotonic() + (0.0 if at_once else END_TIMEOUT_S)
    if not at_once:
        os.kill(pid, signal.SIGTERM)
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline_s:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)


def read_reports(files: Sequence[Path]) -> Iterator[list[Any]]:
    """What was said, life after life; a line that was cut off by the end is left out."""
    for file in files:
        if file.exists():
            for line in file.read_bytes().split(b"\n")[:-1]:
                yield json.loads(line)
