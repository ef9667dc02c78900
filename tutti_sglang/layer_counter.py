"""Where the engine waits for the layers of a load, with an end to every wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError

from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter

from tutti_core import DeviceError

WAIT_POLL_S = 1.0


class LoadCounter(LayerWiseLoadCounter):  # type: ignore[misc]
    """SGLang's counter, whose waits end even where nothing completes the layers any more.

    Parameters
        alive: whether layers can still be completed.
        limit_s: bound of the wait for one layer; longer than whoever completes them ever takes.
        gave_up: called when a wait has ended although its layer was not completed.
    """

    def __init__(
        self,
        layer_count: int,
        alive: Callable[[], bool],
        limit_s: float,
        gave_up: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(layer_count)
        self._alive = alive
        self._limit_s = limit_s
        self._gave_up = gave_up

    def wait_until(self, threshold: int) -> None:
        """Block until the layer of the current batch is there, or has failed."""
        futures = self.futures.get(self.consumer_index)
        if futures is not None:
            self._await(futures, futures[threshold])
        super().wait_until(threshold)

    def finish(self, index: int) -> bool:
        """Wait for every layer of a batch; True if all of them are there."""
        for future in self.futures.get(index, ()):
            self._await(self.futures[index], future)
        return bool(super().finish(index))

    def _await(self, futures: Sequence[Future[None]], future: Future[None]) -> None:
        deadline_s = time.monotonic() + self._limit_s
        while True:
            try:
                future.exception(WAIT_POLL_S)
                return
            except TimeoutError:
                if self._alive() and time.monotonic() < deadline_s:
                    continue
                fail_layers(futures, DeviceError("layers are not completed any more", op="load"))
                self._gave_up()


def fail_layers(futures: Sequence[Future[None]], error: BaseException) -> None:
    """Fail the layers that are not completed yet."""
    for future in futures:
        try:
            future.set_exception(error)
        except InvalidStateError:
            continue


class CounterSink:
    """Completes the layers of one batch for the engine.

    Parameters
        futures: of the layers.
        end: called once everything is there, or the batch has failed.
        failed: told why it failed.
    """

    def __init__(
        self,
        futures: Sequence[Future[None]],
        end: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._futures = futures
        self._left = len(futures)
        self._end = end
        self._failed = failed

    def complete(self, layer: int) -> None:
        """A layer is in place."""
        self._left -= 1
        if self._left == 0:
            self._end()
        try:
            self._futures[layer].set_result(None)
        except InvalidStateError:  # the engine has given it up
            return

    def fail(self, error: BaseException) -> None:
        """The layers that are not complete will not be."""
        try:
            self._end()
            self._failed(error)
        finally:
            fail_layers(self._futures, error)
