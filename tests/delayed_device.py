"""A stand-in for `torch.cuda` whose copies run late, in any order that streams and events allow.

Device memory is host memory here. What is queued on a stream runs in the order of that stream, and
not before the events that the stream was told to wait for; between streams any order may happen,
drawn from a seed. Nothing runs by itself: each query of an event runs a few operations, so a copy
is as late as its waiters allow. Views are made at once, as on a real device.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_QUEUED = {
    torch.ops.aten.copy_.default,
    torch.ops.aten.index_copy_.default,
    torch.ops.aten.index_select.out,
}
_AT_ONCE = {
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.as_strided.default,
    torch.ops.aten.view.dtype,
    torch.ops.aten.detach.default,
    torch.ops.aten.view.default,
}


class DelayedDevice:
    """Stream(device), Event() and stream(stream), as `tutti_sglang.staging` uses them.

    Parameters
        steps: operations that run, at most, while an event is asked for.
        fail_at: the index of the queued operation at which the device refuses, counted from 0.
    """

    def __init__(self, rng: random.Random, *, steps: int = 3, fail_at: int | None = None) -> None:
        self.rng = rng
        self.steps = steps
        self.fail_at = fail_at
        self.held = False
        self.queued = 0
        self.streams: list[_Stream] = []
        self.lock = threading.RLock()

    def Stream(self, device: object = None) -> _Stream:
        """Make a stream."""
        stream = _Stream(self)
        self.streams.append(stream)
        return stream

    def Event(self) -> _Event:
        """Make an event; it has happened until it is recorded, as CUDA's."""
        return _Event(self)

    @contextlib.contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        """Queue what is called inside on `stream`."""
        with _Recorder(stream):
            yield

    def run(self, steps: int | None = None) -> int:
        """Run up to `steps` operations, default all that can; returns how many ran."""
        done = 0
        with self.lock:
            while steps is None or done < steps:
                ready = [stream for stream in self.streams if stream.ready()]
                if not ready:
                    break
                self.rng.choice(ready).step()
                done += 1
        return done

    def idle(self) -> bool:
        """Whether nothing is queued."""
        return not any(stream.queue for stream in self.streams)


class _Stream:
    def __init__(self, device: DelayedDevice) -> None:
        self.device = device
        self.queue: deque[tuple[str, Any]] = deque()

    def launch(self, call: Callable[[], object]) -> None:
        """Queue a call: what an engine computes."""
        with self.device.lock:
            if self.device.fail_at == self.device.queued:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            self.device.queued += 1
            self.queue.append(("call", call))

    def wait_event(self, event: Any) -> None:
        """What is queued later waits for it. An event of another kind has happened already."""
        if isinstance(event, _Event):
            with self.device.lock:
                self.queue.append(("wait", (event, event.recorded)))

    def ready(self) -> bool:
        if not self.queue:
            return False
        kind, what = self.queue[0]
        return kind != "wait" or what[0].happened >= what[1]

    def step(self) -> None:
        kind, what = self.queue.popleft()
        if kind == "call":
            what()
        elif kind == "record":
            event, number = what
            event.happened = max(event.happened, number)


class _Event:
    def __init__(self, device: DelayedDevice) -> None:
        self.device = device
        self.recorded = 0
        self.happened = 0

    def record(self, stream: _Stream) -> None:
        with self.device.lock:
            self.recorded += 1
            stream.queue.append(("record", (self, self.recorded)))

    def query(self) -> bool:
        with self.device.lock:
            if not self.device.held:
                self.device.run(self.device.rng.randint(0, self.device.steps))
            return self.happened >= self.recorded


class _Recorder(TorchDispatchMode):
    """Queues what writes to tensors, and lets views be made at once."""

    def __init__(self, stream: _Stream) -> None:
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _AT_ONCE:
            return func(*args, **kwargs)
        assert func in _QUEUED, f"{func} is not expected on a stream"
        if func is torch.ops.aten.copy_.default:
            assert args[2], "a copy that blocks the caller"
        self.stream.launch(lambda: func(*args, **kwargs))
        return kwargs.get("out", args[0])
