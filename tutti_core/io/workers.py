"""The worker threads of a transport: a few, started with the first work, ended by `shutdown`.

Not a ThreadPoolExecutor: that one stops before the stores that are still open at the interpreter's
exit are closed, so that what they have in memory only could not be written any more; and where no
thread can be started, it raises although it has queued the work, which would be done much later, to
memory that is not the caller's any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

_Job = tuple[Callable[..., object], tuple[Any, ...]] | None


class Workers:
    """Up to `count` daemon threads that do queued work in order.

    What they do must not raise. It refers to this object no longer than it runs, so a transport
    that is dropped without being closed can have `dismiss` called when it is collected.
    Threads    any.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count = count
        self._name = name
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, work: Callable[..., object], *arguments: Any) -> None:
        """Have some work done.

        Raises
            RuntimeError: there is no thread and none can be started, or after `shutdown`; nothing
                was queued.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError("the workers have been shut down")
            if len(self._threads) < self._count:
                self._start_one()
            self._jobs.put((work, arguments))

    def _start_one(self) -> None:
        thread = threading.Thread(
            target=_serve,
            args=(self._jobs,),
            name=f"{self._name}-{len(self._threads)}",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError:  # a limit on threads, or the interpreter is exiting
            if not self._threads:
                raise
        else:
            self._threads.append(thread)

    def dismiss(self) -> None:
        """Let the threads end once what is queued is done; does not wait. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._jobs.put(None)

    def shutdown(self) -> None:
        """Do what is queued, then end the threads.

        Waits without a bound: each thread ends once its calls of the kernel have returned. A store
        gives up waiting when its own time is over (`PrefixStore.close`).
        """
        self.dismiss()
        for thread in self._threads:
            thread.join()


def _serve(jobs: SimpleQueue[_Job]) -> None:
    """One thread: knows the queue only, so that it keeps no transport alive."""
    while (job := jobs.get()) is not None:
        work, arguments = job
        work(*arguments)
        del job, work, arguments
