"""Senseless calls: every public function of a store with every kind of value in every argument.

A call is used, or refused with one of our errors, ValueError or TypeError; and pages that a load
reports True for have the right bytes, whatever else was asked.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tutti_core.config import StoreConfig
from tutti_core.errors import StoreClosedError, TuttiError
from tutti_core.geometry import PageFragments, as_memory, page_fragments
from tutti_core.keys import Namespace, PageKeys
from tutti_core.layers import group_layers
from tutti_core.store import NamespaceStore, PrefixStore
from tutti_core.trials.kit import PAGE, finish, small_config
from tutti_core.trials.tally import Tally

REFUSALS = (TuttiError, ValueError, TypeError)
NAMESPACE: dict[str, Any] = {"model": "org/m", "page_bytes": PAGE, "page_tokens": 1}
COUNT = 4
TOKENS = list(range(COUNT))
WAIT_S = 20.0

Call = Callable[[Any], object]


def values(foreign_keys: PageKeys) -> list[Any]:
    """One of everything that somebody might pass."""
    nan, inf = float("nan"), float("inf")
    return [
        *(None, True, False, np.True_, -1, 0, 1, 2, 1.5, nan, inf, -inf, 1 + 2j),
        *(2**31, 2**32, 2**63, 2**64, 2**70, -(2**63), -(2**70)),
        *(np.int64(2), np.uint64(2**63), np.float32(1.5), np.array(3), np.int8(-1)),
        *("", "x", "\0", "a\0b", "\ud800", "\udc80", "é" * 300, "d/" * 3000, "nan", "-1", "4 KiB"),
        *(b"", b"x" * 16, b"x" * 17, bytearray(32), memoryview(bytes(32))),
        *([], [1], [[1]], [1, [2]], (1, 2), (1, 2, 3), {}, {1: 2}, {"a": 1}, {"a": "b"}, {1, 2}),
        *([0] * 4, [3, 2, 1, 0], [0, 1, 2, -1], [0, 1, 2, 9], [0.0, 1.0, 2.0, 3.0], [None] * 4),
        *([2**63, 1, 2, 3], [2**70, 1, 2, 3], [True] * 4, ["0"] * 4, [-(2**40), 1, 2, 3]),
        *(range(3), range(0), iter([1, 2]), object(), type, lambda: 1, Exception("x")),
        *(np.array([]), np.array([1.5]), np.array(["a"]), np.array([None]), np.zeros((2, 2), int)),
        *(np.zeros(3, np.int8), np.zeros((1, 1), np.uint64), np.zeros((4, 1), np.uint64)),
        *(bytes(COUNT * PAGE), bytes(COUNT * PAGE - 1), np.zeros((COUNT, 2 * PAGE), "u1")[:, ::2]),
        *(np.zeros(COUNT * PAGE + 1, "u1")[1:], np.zeros(COUNT, "M8[s]"), foreign_keys),
        *(PageKeys(b"y" * 32 * COUNT, 32), PageKeys(b"z" * 16 * COUNT, 16, rooted=False)),
        *(PageKeys(b"", 1), Namespace(model="other", page_bytes=PAGE, page_tokens=1)),
    ]


@dataclass(frozen=True, slots=True)
class Place:
    """Two open stores, and their namespaces.

    whole, parts    of a store with a memory tier: whole pages, and pages in parts.
    drives          of a store without one, in parts.
    foreign         keys of that store.
    """

    store: PrefixStore
    whole: NamespaceStore
    parts: NamespaceStore
    drives: NamespaceStore
    payload: bytes
    foreign: PageKeys

    def check(self, memory: bytearray, good: Any, first: int = 0) -> None:
        """Pages from `first` on, one behind the other in memory, are those that were saved."""
        for i in np.flatnonzero(good):
            got = memory[i * PAGE : (i + 1) * PAGE]
            wanted = self.payload[(i + first) * PAGE : (i + first + 1) * PAGE]
            assert got == wanted, f"page {i + first} was loaded with wrong bytes"


@contextmanager
def opened(directory: Path) -> Iterator[Place]:
    """The place of the trial, with its pages saved."""
    payload = np.random.default_rng(5).bytes(COUNT * PAGE)
    config = small_config(directory / "calls", segments=8, dram=32 * PAGE)
    with (
        PrefixStore.open(config) as store,
        PrefixStore.open(small_config(directory / "another")) as other,
    ):
        whole = store.namespace(**NAMESPACE)
        parts = store.namespace(**NAMESPACE, parts=(96, 4000))
        drives = other.namespace(**NAMESPACE, parts=(96, 4000))
        for pages in (whole, parts, drives):
            pages.save(TOKENS, payload).wait(WAIT_S)
        yield Place(store, whole, parts, drives, payload, drives.keys(TOKENS))


def _load(place: Place, first: Any = 0, count: Any = None, **rest: Any) -> None:
    pages = COUNT
    if isinstance(first, int) and isinstance(count, int | None):
        pages = min(max(COUNT - first, 0), COUNT if count is None else max(count, 0))
    memory = bytearray(PAGE * min(pages, COUNT))
    good = place.whole.load(TOKENS, memory, first, count, **rest).wait(WAIT_S)
    if not rest:
        place.check(memory, good, int(first))


def _load_parts(place: Place, **arguments: Any) -> None:
    given = {"tokens": TOKENS, "memory": bytearray(COUNT * PAGE), **arguments}
    load = place.parts.load_parts(**given)
    load.end()


def _start(place: Place, **arguments: Any) -> None:
    memory = bytearray(COUNT * PAGE)
    load = place.parts.load_parts(TOKENS, memory)
    try:
        load.finish(load.start(**{"part": 0, **arguments}), WAIT_S)
    finally:
        load.end()


def _finish(place: Place, reading: Any = None, timeout_s: Any = WAIT_S) -> None:
    load = place.parts.load_parts(TOKENS, bytearray(COUNT * PAGE))
    mine = load.start(0)
    try:
        load.finish(mine if reading is None else reading, timeout_s)
    finally:
        load.finish(mine, WAIT_S)
        load.end()


def _save(place: Place, tokens: Any = TOKENS, memory: Any = None, *rest: Any, **more: Any) -> None:
    memory = place.payload if memory is None else memory
    place.whole.save(tokens, memory, *rest, **more).wait(WAIT_S)


def api_calls(place: Place, directory: Path) -> dict[str, Call]:
    """Calls by name, each with one argument left open."""
    store, whole = place.store, place.whole
    calls: dict[str, Call] = {
        "namespace": lambda x: store.namespace(x),
        "keys.tokens": whole.keys,
        "match.tokens": whole.match,
        "match.first": lambda x: whole.match(TOKENS, x),
        "contains.tokens": whole.contains,
        "contains.first": lambda x: whole.contains(TOKENS, x),
        "hold.tokens": lambda x: whole.hold(x).release(),
        "hold.first": lambda x: whole.hold(TOKENS, x).release(),
        "hold.count": lambda x: whole.hold(TOKENS, 0, x).release(),
        "pin": lambda x: whole.unpin(x, whole.pin(x)),
        "unpin.tokens": lambda x: whole.unpin(x, 0),
        "unpin.pages": lambda x: whole.unpin(TOKENS, x),
        "save.tokens": lambda x: _save(place, x),
        "save.memory": lambda x: place.whole.save(whole.keys([7, 7]), x).cancel(),
        "save.first": lambda x: _save(place, TOKENS, None, x),
        "save.slots": lambda x: _save(place, TOKENS, None, 0, x),
        "save.output_tokens": lambda x: _save(place, output_tokens=x),
        "save.wait": lambda x: whole.save(TOKENS, place.payload).wait(x),
        "load.tokens": lambda x: whole.load(x, bytearray(COUNT * PAGE)).wait(WAIT_S),
        "load.memory": lambda x: _load_into(place, x),
        "load.first": lambda x: _load(place, first=x),
        "load.count": lambda x: _load(place, count=x),
        "load.slots": lambda x: _load(place, slots=x),
        "load.wait": lambda x: _waited(place, x),
        "load_parts.wrong": lambda x: whole.load_parts(TOKENS, x),
        "start.part": lambda x: _start(place, part=x),
        "start.low": lambda x: _start(place, low=x),
        "start.high": lambda x: _start(place, high=x),
        "start.address": lambda x: _start(place, address=_harmless(x)),
        "finish.reading": lambda x: _finish(place, reading=x),
        "finish.timeout_s": lambda x: _finish(place, timeout_s=x),
        "limit.share": lambda x: whole.limit(share=x),
        "limit.ttl_s": lambda x: whole.limit(ttl_s=x),
        "clear": lambda x: store.namespace(**{**NAMESPACE, "model": "clear"}).clear(x),
        "register": lambda x: store.unregister(store.register(_harmless(x))),
        "unregister": store.unregister,
        "wait_restored": store.wait_restored,
        "flush": store.flush,
        "open.config": lambda x: _refused_at_open(x, directory),
        "config": StoreConfig.parse,
        "config.file": StoreConfig.load,
        "PageKeys.data": lambda x: whole.match(PageKeys(x, 16)),
        "PageKeys.width": lambda x: whole.match(PageKeys(b"x" * 32, x)),
        "PageKeys.rooted": lambda x: whole.match(PageKeys(b"x" * 32, 16, x)),
        "PageKeys.from_hex": PageKeys.from_hex,
        "PageKeys.from_list": PageKeys.from_list,
        "as_memory": as_memory,
        "as_memory.pointer": lambda x: as_memory((x, 1)),
        "as_memory.length": lambda x: as_memory((4096, x)),
        "page_fragments.memory": lambda x: page_fragments(x, PAGE, 1),
        "page_fragments.page_bytes": lambda x: page_fragments(place.payload, x, 1),
        "page_fragments.page_count": lambda x: page_fragments(place.payload, PAGE, x),
        "page_fragments.slots": lambda x: page_fragments(place.payload, PAGE, COUNT, x),
        "PageFragments.address": lambda x: PageFragments(x, np.array([PAGE], np.uint64)),
        "PageFragments.length": lambda x: PageFragments(np.zeros((1, 1), np.uint64), x),
        "group_layers": group_layers,
    }
    for name in ("salt", "lora", "tenant"):
        calls[f"keys.{name}"] = _with(partial(whole.keys, TOKENS), name)
    for name in ("tokens", "memory", "first", "count", "slots"):
        calls[f"load_parts.{name}"] = _with(partial(_load_parts, place), name)
    for name in Namespace.__dataclass_fields__:
        calls[f"namespace.{name}"] = _with(partial(store.namespace, **NAMESPACE), name)
    for name in StoreConfig.model_fields:
        calls[f"config.{name}"] = partial(_parse, directory, name)
    return calls


def _with(call: Callable[..., object], name: str) -> Call:
    """`call` with one keyword left open, in place of one it may have already."""
    return lambda value: call(**{name: value})


def _load_into(place: Place, memory: Any) -> None:
    """Into any memory but raw pointers, which nobody can check."""
    if not isinstance(memory, tuple):
        place.whole.load(TOKENS, memory).wait(WAIT_S)


def _harmless(value: Any) -> Any:
    """Raw addresses are the caller's to get right: no call of this trial passes one."""
    if isinstance(value, np.ndarray) and value.dtype == np.uint64 and value.ndim == 2:
        return value.astype(np.int64)
    return None if isinstance(value, tuple) else value


def _waited(place: Place, timeout_s: Any) -> None:
    ticket = place.whole.load(TOKENS, bytearray(COUNT * PAGE))
    try:
        ticket.wait(timeout_s)
    finally:
        ticket.wait(WAIT_S)


def _parse(directory: Path, name: str, value: Any) -> None:
    StoreConfig.parse({"path": directory / "x", "capacity": 1 << 26, name: value}).check()


def _refused_at_open(path: Any, directory: Path) -> None:
    """Whatever names no place below the trial's directory is only parsed, so nothing is made."""
    if isinstance(path, str) and path:
        path = os.path.join(directory, path)
    elif isinstance(path, str | bytes):
        StoreConfig.parse({"path": path, "capacity": 1 << 26})
        return
    PrefixStore.open(path, capacity=1 << 25, segment=1 << 20).close()


def try_calls(directory: Path, tally: Tally) -> None:
    """Make every call with every value, and those that are senseless as a whole."""
    with opened(directory) as place:
        calls = api_calls(place, directory)
        if place.whole.load(place.foreign, bytearray(COUNT * PAGE)).wait(WAIT_S).any():
            tally.complain("keys of another store found pages")
        for name, call in calls.items():
            for value in values(place.foreign):
                _try(name, call, value, tally)
        _whole_calls(place, tally)
        memory = bytearray(COUNT * PAGE)
        good = place.whole.load(TOKENS, memory).wait(WAIT_S)
        place.check(memory, good)
        if not good.all():
            tally.lose("after senseless calls", int((~good).sum()))
        memory = bytearray(COUNT * PAGE)
        good = finish(place.parts.load_parts(TOKENS, memory))
        place.check(memory, good)
        if not good.all():
            tally.lose("in parts, after senseless calls", int((~good).sum()))
        counters = place.store.stats().counters
        for name in ("checksum_errors", "internal_errors"):
            if counters.get(name, 0):
                tally.complain(f"senseless calls counted {counters[name]} {name}")
    _closed_calls(calls, tally)


def _try(name: str, call: Call, value: Any, tally: Tally) -> None:
    tally.bad_inputs[f"call {name.partition('.')[0]}"] += 1
    try:
        call(value)
    except REFUSALS as error:
        if not str(error).strip():
            tally.complain(f"{name}({value!r:.60}): refused without a reason")
    except Exception as error:
        tally.complain(f"{name}({value!r:.60}): {type(error).__name__}: {error}")


def _whole_calls(place: Place, tally: Tally) -> None:
    """Calls that are senseless by what they come together with."""
    whole, parts, memory = place.whole, place.parts, bytearray(COUNT * PAGE)
    read_only = np.zeros(COUNT * PAGE, np.uint8)
    read_only.flags.writeable = False
    ended = parts.load_parts(TOKENS, memory)
    stale = ended.start(0)
    ended.finish(stale, WAIT_S)
    ended.end()
    early = place.drives.load_parts(TOKENS, memory)
    another = parts.load_parts(TOKENS, bytearray(COUNT * PAGE))
    refused: dict[str, Callable[[], object]] = {
        "load into bytes": lambda: whole.load(TOKENS, bytes(COUNT * PAGE)),
        "load into read-only": lambda: whole.load(TOKENS, read_only),
        "load twice into one place": lambda: whole.load(TOKENS, memory, slots=[0, 0, 1, 2]),
        "load parts as a whole": lambda: parts.load(TOKENS, memory),
        "start after end": lambda: ended.start(1),
        "finish another's": lambda: another.finish(stale, 1),
        "unpin more than there is": lambda: whole.unpin(TOKENS, COUNT + 1),
        "a namespace and fields": lambda: place.store.namespace(whole.namespace, model="x"),
        "an unknown field": lambda: place.store.namespace(**NAMESPACE, modle="x"),
        "config and settings": lambda: PrefixStore.open(place.store.config, capacity=1),
        "unregister twice": lambda: _twice(place.store, memory),
    }
    for name, call in refused.items():
        tally.bad_inputs["call together"] += 1
        try:
            call()
            tally.complain(f"{name}: was not refused")
        except REFUSALS:
            pass
        except Exception as error:
            tally.complain(f"{name}: {type(error).__name__}: {error}")
    tally.bad_inputs["call together"] += 1
    if early.finish(early.start(1), WAIT_S).any():
        tally.complain("a part whose header is not there was reported right")
    early.end()
    another.end()
    if not finish(place.drives.load_parts(TOKENS, memory)).all():
        tally.lose("by finishing a part too early")


def _twice(store: PrefixStore, memory: bytearray) -> None:
    region = store.register(memory)
    store.unregister(region)
    store.unregister(region)


CLOSED = (
    *("match.tokens", "contains.tokens", "hold.tokens", "pin", "save.tokens", "load.tokens"),
    *("load_parts.tokens", "limit.share", "clear", "namespace.model", "register", "flush"),
)
_SENSIBLE = {"limit.share": 0.1, "clear": 1.0, "namespace.model": "x", "register": bytearray(8)}


def _closed_calls(calls: dict[str, Call], tally: Tally) -> None:
    """After `close`, from another thread too: StoreClosedError, and nothing else."""

    def attempt() -> None:
        for name in CLOSED:
            tally.bad_inputs["call closed"] += 1
            try:
                calls[name](_SENSIBLE.get(name, 1.0 if name == "flush" else TOKENS))
                tally.complain(f"{name} after close was not refused")
            except StoreClosedError:
                pass
            except Exception as error:
                tally.complain(f"{name} after close: {type(error).__name__}: {error}")

    attempt()
    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join(WAIT_S)
