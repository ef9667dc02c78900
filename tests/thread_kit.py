"""Threads of tests: one that fails ends what waits for it, and fails the test."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

WAIT_S = 120.0


def tutti_threads() -> set[threading.Thread]:
    """The threads of stores and transports that run in this process."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("tutti")}


def threads_left(before: set[threading.Thread], bound_s: float = WAIT_S) -> list[str]:
    """Names of threads that were started since `before` and do not end; waits up to `bound_s`."""
    deadline_s = time.monotonic() + bound_s
    started = tutti_threads() - before
    for thread in started:
        thread.join(max(deadline_s - time.monotonic(), 0.0))
    return sorted(thread.name for thread in started if thread.is_alive())


class Beside:
    """One thread that runs `work` beside the test.

    `running` is False once it has ended, in whatever way; asked for longer than `bound_s`, it
    raises, so that a loop over it ends too.
    """

    def __init__(self, work: Callable[[], object], bound_s: float) -> None:
        self.error: BaseException | None = None
        self._work = work
        self._ended = threading.Event()
        self._deadline_s = time.monotonic() + bound_s
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error
        finally:
            self._ended.set()

    @property
    def running(self) -> bool:
        """Whether the work is not over; raises AssertionError past the bound."""
        if self._ended.is_set():
            return False
        assert time.monotonic() < self._deadline_s, "the thread beside the test does not end"
        return True

    def join(self) -> None:
        """Wait for its end, and raise what it raised."""
        self._ended.wait(max(self._deadline_s - time.monotonic(), 0.0))
        assert self._ended.is_set(), "the thread beside the test does not end"
        if self.error is not None:
            raise self.error


@contextlib.contextmanager
def beside(
    *works: Callable[[], object],
    stop: Callable[[], object] = lambda: None,
    bound_s: float = WAIT_S,
) -> Iterator[list[Beside]]:
    """Run each work in a thread of its own while the block runs.

    At the end of the block, also one that raises, `stop` is called and every thread is waited for;
    what a thread raised is raised here, unless the block raised itself.
    """
    threads = [Beside(work, bound_s) for work in works]
    try:
        yield threads
    except BaseException:
        stop()
        for thread in threads:
            with contextlib.suppress(BaseException):
                thread.join()
        raise
    stop()
    for thread in threads:
        thread.join()


def together(*works: Callable[[], object], bound_s: float = WAIT_S) -> None:
    """Run all at once and raise the first error; a thread that hangs is one."""
    start = threading.Barrier(len(works))

    def after_start(work: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            start.wait(30)
            work()

        return run

    with beside(*(after_start(work) for work in works), bound_s=bound_s):
        pass
