"""A real SGLang server on a CPU, for tests and the demo: start, ask, flush, kill.

    with SGLangServer(model, flags=backend.server_flags(), env=backend.environment()) as server:
        reply = server.generate(token_ids)

Invariants
- The server and all its children run in a process group of their own; only its members are ever
  signalled, and `kill` and `stop` return once every one of them is gone.
- Every wait has a bound.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

START_TIMEOUT_S = 300.0  # 30-50 s on two idle cores, up to 150 s on busy ones
REQUEST_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.2
STORAGE_PATH = "/hicache/storage-backend"
_NOT_IDLE = "scheduler is not idle"  # SGLang's words, managers/scheduler.py

# The flags under which the unmodified wheel serves a tiny model on a CPU. Later flags win, so a
# caller can override any of them.
BASE_FLAGS = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--disable-overlap-schedule",
    "--page-size=16",
    "--max-total-tokens=4096",
    "--random-seed=1",
    # "auto" means float16, in which a prompt computed in other chunks rounds to other tokens.
    "--dtype=float32",
    "--host=127.0.0.1",
    "--enable-cache-report",
    "--skip-server-warmup",  # its request would leave pages of its own in the storage
)
BASE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class ServerError(RuntimeError):
    """The server did not start, did not stop, or answered a request with an error."""


@dataclass(frozen=True)
class CachedTokens:
    """Prompt tokens that were not computed, by the tier they came from."""

    device: int = 0
    host: int = 0
    storage: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.storage


@dataclass(frozen=True)
class Generation:
    """One greedy continuation. `ttft_s` is the time from sending to the first streamed token."""

    prompt_tokens: int
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached: CachedTokens
    ttft_s: float
    total_s: float

    def same_output(self, other: Generation) -> bool:
        return self.output_ids == other.output_ids

    def logprob_difference(self, other: Generation) -> float:
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return max((abs(mine - theirs) for mine, theirs in pairs), default=0.0)


class SGLangServer:
    """One server process tree. Not thread-safe; `generate` may be called from several threads."""

    def __init__(
        self,
        model: Path,
        flags: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        port: int | None = None,
        log_path: Path | None = None,
        admin_key: str | None = None,
        serve: bool = False,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """
        Parameters
            model: folder made by make_model.
            flags: for sglang.launch_server, after BASE_FLAGS.
            env: on top of this process's environment.
            port: a free one by default.
            log_path: the server's output; appended to. A new temporary file by default, kept.
            serve: start it with `sglang serve` instead of `python -m sglang.launch_server`.
            admin_key: needed for the storage endpoints `attach`, `detach`, `storage_status`.
        """
        self.port = port or _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log_path or _temporary_log()
        self.start_seconds: float | None = None
        self._admin_key = admin_key
        self._start_timeout_s = start_timeout_s
        self._env = {**os.environ, **BASE_ENVIRONMENT, **(env or {})}
        launch = [sys.executable, "-m", "sglang.launch_server"]
        command = [str(Path(sys.executable).with_name("sglang")), "serve"] if serve else launch
        self._command = [*command, *BASE_FLAGS]
        self._command += [f"--model-path={model}", f"--port={self.port}", *flags]
        if admin_key:
            self._command.append(f"--admin-api-key={admin_key}")
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start_bytes = 0

    # ---- life ----

    def __enter__(self) -> SGLangServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Return once the server accepts requests.

        Raises
            ServerError: it ended or isn't ready in time; nothing of it is left running, and the
                message holds the end of its log.
        """
        if self._process is not None:
            raise ServerError("already started")
        started = time.monotonic()
        with self.log_path.open("ab") as log:
            self._log_start_bytes = log.tell()
            self._process = subprocess.Popen(
                self._command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._await_ready(started + self._start_timeout_s)
        except BaseException:
            self.kill()
            raise
        self.start_seconds = time.monotonic() - started

    def _await_ready(self, deadline: float) -> None:
        """Ask until it says so. Not by the log line "ready to roll": without a warm-up request that
        comes before the port is open, and so SGLang's own /freeze_gc fails then; done here."""
        while not self._ready():
            if not self.alive():
                raise ServerError(f"server ended while starting, {self._log_excerpt()}")
            if time.monotonic() > deadline:
                raise ServerError(f"server not ready in time, {self._log_excerpt()}")
            time.sleep(POLL_S)
        self.call("POST", "/freeze_gc", expect=200)

    def _ready(self) -> bool:
        try:
            with self._open("GET", "/ready", None) as response:
                return bool(response.status == 200)
        except OSError:  # not listening yet, or 503
            return False

    def alive(self) -> bool:
        """Whether the main process runs. Doesn't reap it: see `_end`."""
        if self._process is None:
            return False
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, options) is None

    def kill(self) -> None:
        """SIGKILL the server and every child at once; return when all are gone."""
        self._end(signal.SIGKILL, STOP_TIMEOUT_S)

    def stop(self) -> None:
        """Ask the main process to end (SIGTERM); kill what is left after STOP_TIMEOUT_S."""
        self._end(signal.SIGTERM, STOP_TIMEOUT_S)

    def _end(self, how: signal.Signals, timeout_s: float) -> None:
        if self._process is None:
            return
        group = self._process.pid  # it leads the group, see start_new_session
        if how == signal.SIGTERM and self.alive():
            self._process.terminate()
            wait_until(lambda: not self.alive(), timeout_s)
        # Also after a clean end: a child may have outlived the main process, which isn't reaped yet
        # and so keeps the group's id from being reused.
        os.killpg(group, signal.SIGKILL)
        if not wait_until(lambda: not _running(group), timeout_s, every_s=0.02):
            raise ServerError(f"processes {_running(group)} survived SIGKILL")
        self._process.wait()
        self._process = None

    def processes(self) -> list[int]:
        """Ids of the server's processes; SGLang starts no sessions, so the group has them all."""
        return _running(self._process.pid) if self._process is not None else []

    # ---- log ----

    def log(self) -> str:
        """Everything this start of the server has written so far."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start_bytes)
            return log.read().decode(errors="replace")

    def _log_excerpt(self) -> str:
        return f"log {self.log_path}:\n{self.log()[-4000:]}"

    # ---- requests ----

    def generate(
        self, input_ids: Sequence[int], *, max_new_tokens: int = 16, namespace: str | None = None
    ) -> Generation:
        """Greedy continuation of `input_ids`, streamed, always `max_new_tokens` long.

        namespace: SGLang's `extra_key`. Prompts of different namespaces share no cache at all, so a
        fresh one gives an answer computed from scratch, to compare with.
        """
        body = _generation_request(input_ids, max_new_tokens, namespace)
        started = time.monotonic()
        events = self._stream("/generate", body)
        last = next(events, None)
        first_s = time.monotonic() - started
        if last is None:
            raise ServerError(f"/generate: empty reply, {self._log_excerpt()}")
        for event in events:
            last = event
        refusal = last.get("error") or _refusal(last)
        if refusal:
            raise ServerError(f"/generate: {refusal}")
        return _generation(last, first_s, time.monotonic() - started)

    def hang_up(self, input_ids: Sequence[int], after_s: float) -> None:
        """Ask for a continuation, and close the connection without having read anything of it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_TIMEOUT_S)
        body = json.dumps(_generation_request(input_ids, 64, None))
        connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        time.sleep(after_s)
        connection.close()

    def flush(self) -> None:
        """Empty the device and host tiers; the storage keeps its pages. Waits for idleness."""
        self.call("POST", f"/flush_cache?timeout={STOP_TIMEOUT_S:.0f}", expect=200)

    def healthy(self) -> bool:
        """Whether the server generates a token."""
        return self.alive() and self.call("GET", "/health")[0] == 200

    def storage_status(self) -> dict[str, Any]:
        """Name, extra config and policies of the attached backend, as the front end knows them."""
        status: dict[str, Any] = self.call("GET", STORAGE_PATH, expect=200)[1]
        return status

    def clear_storage(self) -> None:
        self.call("POST", f"{STORAGE_PATH}/clear", {}, expect=200)

    def detach(self) -> None:
        """Take the storage off, once the server is idle."""
        status, answer = self._call_when_idle("DELETE")
        if status != 200:
            raise ServerError(f"detach: {status} {answer}")

    def attach(
        self, name: str, extra_config: Mapping[str, Any], *, policy: str = "wait_complete"
    ) -> tuple[int, Any]:
        """(HTTP status, message) of an attach once the server is idle; a refusal is no exception.

        With the name of what is attached it changes the policy only.
        """
        body = {
            "hicache_storage_backend": name,
            "hicache_storage_backend_extra_config_json": json.dumps(extra_config),
            "hicache_storage_prefetch_policy": policy,
        }
        return self._call_when_idle("PUT", body)

    def _call_when_idle(self, method: str, body: Any = None) -> tuple[int, Any]:
        """Change the storage. SGLang refuses that while requests or their backups are under way.

        A backup is under way until the scheduler has seen its end, which is some steps after its
        last page can be found in the storage: an operator tries again, and so does this.
        """
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while True:
            status, answer = self.call(method, STORAGE_PATH, body)
            if _NOT_IDLE not in str(answer) or time.monotonic() > deadline:
                return status, answer
            time.sleep(POLL_S)

    def metrics(self) -> dict[str, float]:
        """Value by name of all metrics (needs --enable-metrics); summed over their labels."""
        totals: dict[str, float] = {}
        for line in str(self.call("GET", "/metrics", expect=200)[1]).splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.partition(" ") if "{" not in line else _labelled(line)
                totals[name] = totals.get(name, 0.0) + float(value)
        return totals

    def call(
        self, method: str, path: str, body: Any = None, *, expect: int | None = None
    ) -> tuple[int, Any]:
        """(status, body) of one HTTP request, the body decoded if it is JSON.

        Raises
            ServerError: no answer, or another status than `expect`.
        """
        try:
            with self._open(method, path, body) as response:
                status, text = response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        except OSError as error:
            raise ServerError(f"{method} {path}: {error}, {self._log_excerpt()}") from error
        if expect is not None and status != expect:
            raise ServerError(f"{method} {path}: {status} {text}")
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def _stream(self, path: str, body: Any) -> Iterator[dict[str, Any]]:
        """The server-sent events of one request; each repeats all output so far."""
        try:
            with self._open("POST", path, body) as response:
                for line in response:
                    payload = line.decode().strip().removeprefix("data: ")
                    if payload == "[DONE]":
                        return
                    if payload:
                        yield json.loads(payload)
        except urllib.error.HTTPError as error:
            raise ServerError(f"POST {path}: {error.code} {error.read().decode()}") from error
        except OSError as error:
            raise ServerError(f"POST {path}: {error}, {self._log_excerpt()}") from error

    def _open(self, method: str, path: str, body: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._admin_key:
            headers["Authorization"] = f"Bearer {self._admin_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        return urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S)


def wait_until(condition: Callable[[], bool], timeout_s: float, *, every_s: float = POLL_S) -> bool:
    """Poll `condition`; False if it didn't hold within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


def stored_pages(sequences: Sequence[Sequence[int]], page_tokens: int) -> int:
    """How many pages a server backs up after computing `sequences` (prompt and output each).

    Whole pages, each counted once however many sequences share it. The last token of a sequence was
    sampled and never fed back, so it has no KV.
    """
    pages: set[tuple[int, ...]] = set()
    for tokens in sequences:
        known = len(tokens) - 1
        pages.update(tuple(tokens[:end]) for end in range(page_tokens, known + 1, page_tokens))
    return len(pages)


def _refusal(event: Mapping[str, Any]) -> str | None:
    """Why a streamed reply ended early; its status was sent before that was known."""
    reason = event["meta_info"].get("finish_reason") or {}
    return f"{reason.get('status_code')} {reason['message']}" if "message" in reason else None


def _generation_request(
    input_ids: Sequence[int], max_new_tokens: int, namespace: str | None
) -> dict[str, Any]:
    """The body of a greedy, streamed request."""
    return {
        "input_ids": list(input_ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True},
        "return_logprob": True,
        "stream": True,
        **({"extra_key": namespace} if namespace else {}),
    }


def _generation(event: Mapping[str, Any], ttft_s: float, total_s: float) -> Generation:
    meta = event["meta_info"]
    details = meta.get("cached_tokens_details") or {}  # absent when nothing was cached
    return Generation(
        prompt_tokens=int(meta["prompt_tokens"]),
        output_ids=tuple(event["output_ids"]),
        logprobs=tuple(float(entry[0]) for entry in meta["output_token_logprobs"]),
        cached=CachedTokens(*(int(details.get(tier, 0)) for tier in ("device", "host", "storage"))),
        ttft_s=ttft_s,
        total_s=total_s,
    )


def _labelled(line: str) -> tuple[str, str, str]:
    """(name, labels, value) of a metric with labels."""
    name, _, rest = line.partition("{")
    labels, _, value = rest.rpartition("} ")
    return name, labels, value


def _running(group: int) -> list[int]:
    """Ids of the processes in a process group. A zombie doesn't count: its files are closed."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it ended meanwhile
            # pid (name) state ppid pgrp ...; the name may hold anything, so start after it
            state, _, process_group = (
                (entry / "stat").read_text().rpartition(")")[2].split(maxsplit=3)[:3]
            )
            if int(process_group) == group and state != "Z":
                found.append(int(entry.name))
    return sorted(found)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _temporary_log() -> Path:
    handle, name = tempfile.mkstemp(prefix="tutti-sglang-server-", suffix=".log")
    os.close(handle)
    return Path(name)
