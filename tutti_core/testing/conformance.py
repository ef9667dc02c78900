"""One checker for every transport: each invariant of `tutti_core.io.transport`, as a function.

    @pytest.mark.parametrize("name", CHECKS)
    def test_mine(name): CHECKS[name](Subject(make))

A check opens its own transports through `Subject.make`, raises ConformanceError where a promise is
broken, and CheckSkipped where it needs a hook that the subject does not have. Data is seeded. Waits
are bounded by WAIT_S, which is a limit for hanging transports and not a measure.

Stricter than the protocol's words in three places, each of which they imply: a batch counts as in
flight until its result was returned; statistics include a batch once its result was returned; and
`close` finishes reads, so that their bytes are in memory afterwards.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from errno import ERANGE

import numpy as np
import xxhash

from tutti_core.errors import BusyError, StoreClosedError
from tutti_core.io.transport import (
    BATCH_ITEMS_MAX,
    BATCHES_IN_FLIGHT_MAX,
    BLOCK_BYTES,
    Batch,
    BatchResult,
    Op,
    Transport,
)
from tutti_core.testing.batches import (
    POISON,
    Arena,
    Fragment,
    Item,
    extent_bytes,
    make_batch,
    split,
)

WAIT_S = 60.0

Make = Callable[[Sequence[int]], Transport]
"""Opens a fresh transport on zeroed devices of the given capacities in bytes."""


class ConformanceError(AssertionError):
    """A transport broke a promise of the protocol."""


class CheckSkipped(Exception):
    """A check needs a hook that the subject does not have; the text names it."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What to check, and hooks for what cannot be provoked through the protocol.

    make        opens a fresh transport.
    stall       a context in which no batch of this transport finishes.
    fail_reads  makes every later read of this device of this transport fail.
    """

    make: Make
    stall: Callable[[Transport], AbstractContextManager[None]] | None = None
    fail_reads: Callable[[Transport, int], None] | None = None

    @contextmanager
    def open(self, *capacities_bytes: int) -> Iterator[Transport]:
        """Open a transport for the length of a with statement."""
        transport = self.make(capacities_bytes)
        try:
            yield transport
        finally:
            transport.close()


Check = Callable[[Subject], None]
CHECKS: dict[str, Check] = {}
"""Every check by its name, in the order to run them."""


def check_transport(
    make: Make,
    *,
    stall: Callable[[Transport], AbstractContextManager[None]] | None = None,
    fail_reads: Callable[[Transport, int], None] | None = None,
) -> dict[str, str]:
    """Run every check; return those that were skipped, with the reason.

    Raises
        ConformanceError: the first broken promise, preceded by the name of the check.
    """
    skipped: dict[str, str] = {}
    for name, check in CHECKS.items():
        try:
            check(Subject(make, stall, fail_reads))
        except CheckSkipped as reason:
            skipped[name] = str(reason)
        except ConformanceError as error:
            raise ConformanceError(f"{name}: {error}") from error
    return skipped


def _check(function: Check) -> Check:
    """List a check. What it did not foresee that a transport raises is a broken promise too."""

    @functools.wraps(function)
    def guarded(subject: Subject) -> None:
        try:
            function(subject)
        except (ConformanceError, CheckSkipped):
            raise
        except Exception as error:
            raise ConformanceError(f"unexpected {error!r}") from error

    CHECKS[function.__name__.removeprefix("_")] = guarded
    return guarded


# -- tools ---------------------------------------------------------------------------------------


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise ConformanceError(message)


@contextmanager
def _raises(expected: type[Exception] | tuple[type[Exception], ...], what: str) -> Iterator[None]:
    """The body has to raise `expected`."""
    try:
        yield
    except expected:
        return
    except Exception as error:
        raise ConformanceError(f"{what}: raised {error!r}, not {expected}") from error
    raise ConformanceError(f"{what}: raised nothing, not {expected}")


def _finish(transport: Transport, ticket: int) -> BatchResult:
    result = transport.wait(ticket, WAIT_S)
    if result is None:
        raise ConformanceError(f"a batch was not finished after {WAIT_S} s")
    return result


def _run(transport: Transport, batch: Batch) -> BatchResult:
    """Run one batch and check the form of its result."""
    result = _finish(transport, transport.submit(batch))
    count = batch.item_count
    _expect(
        result.status.dtype == np.int32 and result.status.shape == (count,),
        f"status is {result.status.dtype} {result.status.shape}, not int32 ({count},)",
    )
    _expect(
        result.checksum.dtype == np.uint64 and result.checksum.shape == (count,),
        f"checksum is {result.checksum.dtype} {result.checksum.shape}, not uint64 ({count},)",
    )
    _expect(bool(np.all(result.status <= 0)), "a status is positive; it is 0 or a negative errno")
    return result


def _expect_ok(result: BatchResult, what: str) -> None:
    bad = np.flatnonzero(result.status)
    if len(bad):
        raise ConformanceError(
            f"{what}: item {int(bad[0])} ended with status {int(result.status[bad[0]])}"
        )


class _Bench:
    """A transport, memory to move to and from it, and what its devices should hold."""

    def __init__(self, transport: Transport, arena_bytes: int, seed: int = 1) -> None:
        self.transport = transport
        self.rng = random.Random(seed)
        self.arena = Arena(arena_bytes, self.rng)

    def item(self, device: int, offset: int, lengths: Sequence[int]) -> Item:
        return Item(device, offset, self.arena.carve(lengths))

    def write(
        self, items: Sequence[Item], contents: Sequence[bytes], *, checksum: bool = True
    ) -> BatchResult:
        """Write `contents`; every item has to succeed, with the right checksum."""
        for item, content in zip(items, contents, strict=True):
            self.arena.put(item.fragments, content)
        result = _run(self.transport, make_batch(Op.WRITE, self.arena, items, checksum=checksum))
        _expect_ok(result, "write")
        for item, content in zip(items, contents, strict=True):
            _expect(
                self.arena.get(item.fragments) == content, "a write changed its source in memory"
            )
        if checksum:
            self.expect_checksums(result, contents, "write")
        self.guards()
        return result

    def read(
        self, items: Sequence[Item], contents: Sequence[bytes], *, checksum: bool = True
    ) -> BatchResult:
        """Read; every item has to succeed and to bring `contents`, with the right checksum."""
        result = _run(self.transport, make_batch(Op.READ, self.arena, items, checksum=checksum))
        _expect_ok(result, "read")
        self.expect_memory(items, contents)
        if checksum:
            self.expect_checksums(result, contents, "read")
        self.guards()
        return result

    def expect_memory(self, items: Sequence[Item], contents: Sequence[bytes]) -> None:
        for index, (item, content) in enumerate(zip(items, contents, strict=True)):
            got = self.arena.get(item.fragments)
            if got != content:
                place = next(i for i, (a, b) in enumerate(zip(got, content, strict=True)) if a != b)
                raise ConformanceError(
                    f"item {index} at {item.offset_bytes} of device {item.device}: byte {place} "
                    f"of {len(content)} is {got[place]:#04x}, not {content[place]:#04x}"
                )

    def expect_checksums(self, result: BatchResult, contents: Sequence[bytes], what: str) -> None:
        for index, content in enumerate(contents):
            _expect(
                int(result.checksum[index]) == xxhash.xxh3_64_intdigest(content),
                f"{what}: the checksum of item {index} is not XXH3-64 of its bytes",
            )

    def guards(self) -> None:
        try:
            self.arena.check_guards()
        except AssertionError as error:
            raise ConformanceError(str(error)) from error

    def fragments_of(self, items: Sequence[Item]) -> list[Fragment]:
        return [fragment for item in items for fragment in item.fragments]

    def round_trip(
        self, places: Sequence[tuple[int, int]], shapes: Sequence[Sequence[int]]
    ) -> None:
        """Write items of these shapes to these (device, offset), read them into other shapes."""
        contents = [self.rng.randbytes(sum(shape)) for shape in shapes]
        sources = [self.item(*place, shape) for place, shape in zip(places, shapes, strict=True)]
        self.write(sources, contents)
        targets = []
        for place, shape in zip(places, shapes, strict=True):
            total = sum(shape)
            parts = self.rng.randint(1, min(total, len(shape) + 1))
            targets.append(self.item(*place, split(self.rng, total, parts)))
        self.read(targets, contents)


# -- bytes -----------------------------------------------------------------------------------------


@_check
def _one_block(subject: Subject) -> None:
    with subject.open(16 * BLOCK_BYTES) as transport:
        _Bench(transport, 4 * BLOCK_BYTES).round_trip([(0, BLOCK_BYTES)], [[BLOCK_BYTES]])


@_check
def _one_byte(subject: Subject) -> None:
    with subject.open(16 * BLOCK_BYTES) as transport:
        _Bench(transport, 4 * BLOCK_BYTES).round_trip([(0, 0), (0, BLOCK_BYTES)], [[1], [1]])


@_check
def _odd_fragments(subject: Subject) -> None:
    """Random lengths at odd addresses, in an order that is not that of memory."""
    with subject.open(256 * BLOCK_BYTES) as transport:
        for seed in range(4):
            bench = _Bench(transport, 1 << 20, seed)
            shapes, places, block = [], [], 0
            for _ in range(12):
                total = bench.rng.randint(1, 5 * BLOCK_BYTES)
                shapes.append(split(bench.rng, total, bench.rng.randint(1, min(total, 20))))
                places.append((0, block * BLOCK_BYTES))
                block += extent_bytes(total) // BLOCK_BYTES + bench.rng.randrange(3)
            bench.round_trip(places, shapes)


@_check
def _block_sized_fragments(subject: Subject) -> None:
    """Lengths on and next to block boundaries, where alignment shortcuts go wrong."""
    near = (BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 512, 511, 513)
    with subject.open(256 * BLOCK_BYTES) as transport:
        bench = _Bench(transport, 1 << 20)
        shapes = [[size, other] for size in near for other in near]
        bench.round_trip([(0, 4 * index * BLOCK_BYTES) for index in range(len(shapes))], shapes)


@_check
def _aligned_memory(subject: Subject) -> None:
    """Fragments that begin on a block boundary in memory: the in-place path."""
    with subject.open(16 * BLOCK_BYTES) as transport:
        bench = _Bench(transport, 12 * BLOCK_BYTES)
        shift = -bench.arena.address % BLOCK_BYTES
        sides = []
        for first in (1, 6):
            places = [shift + index * BLOCK_BYTES for index in (first + 2, first, first + 1)]
            sides.append([Item(0, 0, [(place, BLOCK_BYTES) for place in places])])
        content = bench.rng.randbytes(3 * BLOCK_BYTES)
        for side, call in zip(sides, (bench.write, bench.read), strict=True):
            for fragment in bench.fragments_of(side):
                bench.arena.claim(fragment)
            call(side, [content])


@_check
def _many_fragments(subject: Subject) -> None:
    """More fragments in one item than one system call takes."""
    with subject.open(64 * BLOCK_BYTES) as transport:
        bench = _Bench(transport, 1 << 19)
        shape = [bench.rng.randint(1, 9) for _ in range(3_000)]
        bench.round_trip([(0, 3 * BLOCK_BYTES)], [shape])


@_check
def _large_items(subject: Subject) -> None:
    """Items above transfer_bytes_max, with fragments across and exactly on the cuts."""
    with subject.open(64 << 20) as transport:
        size = transport.capabilities().transfer_bytes_max
        if size > 4 << 20:
            raise CheckSkipped("a transport with transfer_bytes_max of at most 4 MiB")
        bench = _Bench(transport, 12 * size + (1 << 20))
        shapes = [
            [2 * size + 12_345],
            [size, size],
            [size - 1, 2, size + 777],
        ]
        spacing = 4 * size + 4 * BLOCK_BYTES
        bench.round_trip([(0, index * spacing) for index in range(3)], shapes)


@_check
def _many_items(subject: Subject) -> None:
    """More items than the queue is deep, in no order."""
    with subject.open(2_048 * BLOCK_BYTES) as transport:
        bench = _Bench(transport, 2 << 20)
        places = [(0, block * BLOCK_BYTES) for block in bench.rng.sample(range(2_048), 1_500)]
        bench.round_trip(places, [[bench.rng.randint(1, 300)] for _ in places])


@_check
def _several_devices(subject: Subject) -> None:
    """The same offsets of three devices are three places."""
    with subject.open(8 * BLOCK_BYTES, 16 * BLOCK_BYTES, 8 * BLOCK_BYTES) as transport:
        bench = _Bench(transport, 1 << 20)
        places = [(device, block * BLOCK_BYTES) for block in (0, 3) for device in (2, 0, 1)]
        bench.round_trip(places, [[BLOCK_BYTES, 5]] * len(places))


@_check
def _same_extent_many_times(subject: Subject) -> None:
    """One extent may be read into many places at once."""
    with subject.open(4 * BLOCK_BYTES) as transport:
        bench = _Bench(transport, 1 << 20)
        content = bench.rng.randbytes(5_000)
        bench.write([bench.item(0, 0, [5_000])], [content])
        bench.read([bench.item(0, 0, [2_000, 3_000]) for _ in range(40)], [content] * 40)


@_check
def _last_write_wins(subject: Subject) -> None:
    with subject.open(8 * BLOCK_BYTES) as transport:
        bench = _Bench(transport, 1 << 20)
        for _ in range(5):
            bench.round_trip([(0, BLOCK_BYTES)], [[700, 5_000]])


@_check
def _padding_is_zeros(subject: Subject) -> None:
    """A write fills its last block with zeros and leaves the next one alone."""
    for length in (1, 100, BLOCK_BYTES + 1, 3 * BLOCK_BYTES - 1):
        with subject.open(8 * BLOCK_BYTES) as transport:
            bench = _Bench(transport, 1 << 20)
            old = bytes([0xEE]) * (6 * BLOCK_BYTES)
            bench.write([bench.item(0, 0, [len(old)])], [old])
            new = bench.rng.randbytes(length)
            bench.write([bench.item(0, BLOCK_BYTES, [length])], [new])
            written = new + bytes(-length % BLOCK_BYTES)
            rest = old[BLOCK_BYTES + len(written) :]
            bench.read([bench.item(0, 0, [len(old)])], [old[:BLOCK_BYTES] + written + rest])


@_check
def _padding_is_not_read(subject: Subject) -> None:
    """A read that ends inside a block touches no memory beyond its length."""
    with subject.open(8 * BLOCK_BYTES) as transport:
        bench = _Bench(transport, 1 << 20)
        content = bench.rng.randbytes(2 * BLOCK_BYTES)
        bench.write([bench.item(0, 0, [len(content)])], [content])
        for length in (1, 511, BLOCK_BYTES - 1, BLOCK_BYTES + 1):
            bench.read([bench.item(0, 0, [length])], [content[:length]])


@_check
def _without_checksum(subject: Subject) -> None:
    with subject.open(8 * BLOCK_BYTES) as transport:
        bench = _Bench(transport, 1 << 20)
        content = bench.rng.randbytes(6_000)
        bench.write([bench.item(0, 0, [6_000])], [content], checksum=False)
        bench.read([bench.item(0, 0, [1_000, 5_000])], [content], checksum=False)


@_check
def _registered_memory(subject: Subject) -> None:
    """Memory works registered, unregistered, and half inside a registered region."""
    with subject.open(64 * BLOCK_BYTES) as transport:
        bench = _Bench(transport, 1 << 20)
        half = len(bench.arena.memory) // 2
        first = transport.register(bench.arena.address, half)
        second = transport.register(bench.arena.address + half + 1, 10_001)
        _expect(first != second, "two live regions have the same id")
        places = [(0, 8 * index * BLOCK_BYTES) for index in range(8)]
        shapes = [split(bench.rng, 30_000, 6)] * len(places)
        bench.round_trip(places, shapes)  # most of the arena: across both borders
        transport.unregister(first)
        bench.arena = Arena(1 << 20, bench.rng)
        bench.round_trip(places[:3], shapes[:3])
        transport.unregister(second)
        third = transport.register(bench.arena.address, len(bench.arena.memory))
        bench.round_trip(places[3:6], shapes[3:6])
        transport.unregister(third)


# -- failures --------------------------------------------------------------------------------------


def _beyond(bench: _Bench, capacity: int) -> list[Item]:
    """Items that end beyond a device whose capacity is half a block more than some blocks."""
    whole = capacity // BLOCK_BYTES * BLOCK_BYTES
    return [
        bench.item(0, whole, [1]),  # its bytes would fit, its extent does not
        bench.item(0, whole - BLOCK_BYTES, [BLOCK_BYTES, 1]),
        bench.item(0, whole + BLOCK_BYTES, [BLOCK_BYTES]),
        bench.item(0, 1 << 40, [10]),
        bench.item(0, (1 << 63) - BLOCK_BYTES, [BLOCK_BYTES]),
        bench.item(0, (1 << 64) - BLOCK_BYTES, [2 * BLOCK_BYTES]),  # would wrap to 4096
    ]


@_check
def _writes_beyond_the_end(subject: Subject) -> None:
    """They end with -ERANGE and change nothing; their neighbours in the batch are written."""
    capacity = 10 * BLOCK_BYTES + BLOCK_BYTES // 2
    with subject.open(capacity, 2 * capacity) as transport:
        bench = _Bench(transport, 1 << 20)
        whole = 10 * BLOCK_BYTES
        before = bench.rng.randbytes(whole)
        bench.write([bench.item(0, 0, [whole])], [before])
        bad = _beyond(bench, capacity)
        for fragment in bench.fragments_of(bad):
            bench.arena.put([fragment], bench.rng.randbytes(fragment[1]))
        good = [bench.item(0, 3 * BLOCK_BYTES, [99]), bench.item(1, whole, [BLOCK_BYTES, 1])]
        contents = [bench.rng.randbytes(item.length_bytes) for item in good]
        for item, content in zip(good, contents, strict=True):
            bench.arena.put(item.fragments, content)
        order = [bad[0], good[0], *bad[1:4], good[1], *bad[4:]]
        result = _run(transport, make_batch(Op.WRITE, bench.arena, order))
        _expect_range_errors(result, order, bad)
        _expect(
            int(result.checksum[1]) == xxhash.xxh3_64_intdigest(contents[0]),
            "the checksum beside a failed item is wrong",
        )
        after = bytearray(before)
        after[3 * BLOCK_BYTES : 4 * BLOCK_BYTES] = contents[0].ljust(BLOCK_BYTES, b"\0")
        bench.read(
            [bench.item(0, 0, [whole]), bench.item(1, whole, [BLOCK_BYTES + 1])],
            [bytes(after), contents[1]],
        )


@_check
def _reads_beyond_the_end(subject: Subject) -> None:
    """They end with -ERANGE and leave memory alone; their neighbours in the batch are read."""
    capacity = 10 * BLOCK_BYTES + BLOCK_BYTES // 2
    with subject.open(capacity, 2 * capacity) as transport:
        bench = _Bench(transport, 1 << 20)
        content = bench.rng.randbytes(10 * BLOCK_BYTES)
        bench.write([bench.item(0, 0, [len(content)])], [content])
        bad = _beyond(bench, capacity)
        good = bench.item(0, 8 * BLOCK_BYTES, [4_000, 4_192])  # up to the last whole block
        order = [*bad[:3], good, *bad[3:]]
        result = _run(transport, make_batch(Op.READ, bench.arena, order))
        _expect_range_errors(result, order, bad)
        bench.expect_memory([good], [content[8 * BLOCK_BYTES :]])
        for item in bad:
            _expect(
                set(bench.arena.get(item.fragments)) == {POISON},
                "a read that ended with -ERANGE wrote to memory",
            )
        bench.guards()


def _expect_range_errors(result: BatchResult, order: list[Item], bad: list[Item]) -> None:
    for index, item in enumerate(order):
        wanted = -ERANGE if item in bad else 0
        status = int(result.status[index])
        _expect(
            status == wanted,
            f"item {index} of {item.length_bytes} bytes at {item.offset_bytes} ended with "
            f"{status}, not {wanted}",
        )


@_check
def _lengths_that_overflow(subject: Subject) -> None:
    """Lengths whose sum does not fit in 64 bits are beyond the end, not 0 bytes."""
    with subject.open(8 * BLOCK_BYTES) as transport:
        bench = _Bench(transport, 1 << 20)
        place = bench.arena.carve([BLOCK_BYTES])[0][0]
        for lengths in ([1 << 63, 1 << 63], [(1 << 64) - 1], [(1 << 64) - BLOCK_BYTES + 1]):
            bad = Item(0, 0, [(place, length) for length in lengths])
            for op in Op:
                result = _run(transport, make_batch(op, bench.arena, [bad]))
                _expect_range_errors(result, [bad], [bad])


@_check
def _failed_reads(subject: Subject) -> None:
    """A device that fails fails its own items only."""
    if subject.fail_reads is None:
        raise CheckSkipped("fail_reads: a way to make reads of one device fail")
    with subject.open(8 * BLOCK_BYTES, 8 * BLOCK_BYTES) as transport:
        bench = _Bench(transport, 1 << 20)
        content = bench.rng.randbytes(5_000)
        bench.write([bench.item(device, 0, [5_000]) for device in (0, 1)], [content] * 2)
        failed = transport.stats().failed_items
        subject.fail_reads(transport, 0)
        items = [bench.item(device, 0, [5_000]) for device in (0, 1, 0, 1)]
        result = _run(transport, make_batch(Op.READ, bench.arena, items))
        for index, item in enumerate(items):
            status = int(result.status[index])
            _expect(
                (status < 0) == (item.device == 0),
                f"item {index} of device {item.device} ended with {status}; device 0 fails",
            )
        bench.expect_memory([items[1], items[3]], [content] * 2)
        bench.guards()
        _expect(transport.stats().failed_items == failed + 2, "failed items were not counted")


@_check
def _malformed_batches(subject: Subject) -> None:
    """Arrays that do not fit together are refused and start nothing."""
    with subject.open(16 * BLOCK_BYTES) as transport:
        bench = _Bench(transport, 1 << 20)
        before = bench.rng.randbytes(16 * BLOCK_BYTES)
        bench.write([bench.item(0, 0, [len(before)])], [before])
        items = [bench.item(0, block * BLOCK_BYTES, [100, 200]) for block in (0, 1, 2)]
        good = make_batch(Op.WRITE, bench.arena, items)
        count = transport.stats().write_items
        for what, batch in _malformed(good):
            with _raises(ValueError, what):
                transport.submit(batch)
        _expect(transport.stats().write_items == count, "a refused batch wrote something")
        bench.read([bench.item(0, 0, [len(before)])], [before])


def _malformed(good: Batch) -> Iterator[tuple[str, Batch]]:
    """Batches of three items and six fragments, each with one thing wrong."""

    def u32(*values: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        return np.array(values, np.uint32)

    def u64(*values: int) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        return np.array(values, np.uint64)

    none = Batch(good.op, u32(), u64(), u32(0), u64(), u64())
    yield "no items", none
    many = BATCH_ITEMS_MAX + 1
    yield (
        "too many items",
        Batch(
            good.op,
            np.zeros(many, np.uint32),
            np.zeros(many, np.uint64),
            np.arange(many + 1, dtype=np.uint32),
            np.full(many, good.address[0], np.uint64),
            np.ones(many, np.uint64),
        ),
    )
    yield "fragment_start does not begin at 0", replace(good, fragment_start=u32(1, 2, 4, 6))
    yield "fragment_start leaves fragments over", replace(good, fragment_start=u32(0, 2, 4, 5))
    yield "fragment_start goes too far", replace(good, fragment_start=u32(0, 2, 4, 7))
    yield "fragment_start falls", replace(good, fragment_start=u32(0, 4, 2, 6))
    yield "an item without fragments", replace(good, fragment_start=u32(0, 2, 2, 6))
    yield "fragment_start too short", replace(good, fragment_start=u32(0, 2, 6))
    yield "offset_bytes too short", replace(good, offset_bytes=good.offset_bytes[:2].copy())
    yield "length_bytes too short", replace(good, length_bytes=good.length_bytes[:5].copy())
    yield "an unknown device", replace(good, device=u32(0, 1, 0))
    yield "an unaligned offset", replace(good, offset_bytes=u64(0, 512, 8_192))
    yield "an empty fragment", replace(good, length_bytes=u64(100, 200, 100, 0, 100, 200))


# -- tickets, threads, life ------------------------------------------------------------------------


@_check
def _tickets_are_spent(subject: Subject) -> None:
    with subject.open(8 * BLOCK_BYTES) as transport:
        bench = _Bench(transport, 1 << 20)
        bench.write([bench.item(0, 0, [10])], [bytes(10)])
        batch = make_batch(Op.READ, bench.arena, [bench.item(0, 0, [10])])
        with _raises(KeyError, "wait for a ticket that was never given out"):
            transport.wait(1 << 40, 0.0)
        with _raises(KeyError, "wait for ticket -1"):
            transport.wait(-1, 0.0)
        ticket = transport.submit(batch)
        _finish(transport, ticket)
        for timeout_s in (0.0, WAIT_S):
            with _raises(KeyError, "wait for a spent ticket"):
                transport.wait(ticket, timeout_s)


@_check
def _polling(subject: Subject) -> None:
    """A timeout of 0 gives the result or None, and None does not spend the ticket."""
    with subject.open(8 * BLOCK_BYTES) as transport:
        bench = _Bench(transport, 1 << 20)
        content = bench.rng.randbytes(9_000)
        bench.write([bench.item(0, 0, [9_000])], [content])
        target = [bench.item(0, 0, [9_000])]
        ticket = transport.submit(make_batch(Op.READ, bench.arena, target))
        result = transport.wait(ticket, 0.0)
        if result is None:
            result = _finish(transport, ticket)
        _expect_ok(result, "read")
        bench.expect_memory(target, [content])


@_check
def _tickets_in_any_order(subject: Subject) -> None:
    """Tickets in flight differ, and each brings its own result, whatever the order of waiting."""
    with subject.open(64 * BLOCK_BYTES) as transport:
        bench = _Bench(transport, 1 << 20)
        items = [bench.item(0, index * BLOCK_BYTES, [index + 1]) for index in range(40)]
        contents = [bench.rng.randbytes(item.length_bytes) for item in items]
        for item, content in zip(items, contents, strict=True):
            bench.arena.put(item.fragments, content)
        tickets = [transport.submit(make_batch(Op.WRITE, bench.arena, [item])) for item in items]
        _expect(len(set(tickets)) == len(tickets), "two batches in flight have the same ticket")
        order = list(range(len(items)))
        bench.rng.shuffle(order)
        for index in order:
            result = _finish(transport, tickets[index])
            _expect_ok(result, "write")
            bench.expect_checksums(result, [contents[index]], "write")
        bench.read(
            [bench.item(0, index * BLOCK_BYTES, [index + 1]) for index in range(40)], contents
        )


@_check
def _results_are_kept_apart(subject: Subject) -> None:
    """A result that was returned does not change when later batches run."""
    with subject.open(8 * BLOCK_BYTES) as transport:
        bench = _Bench(transport, 1 << 20)
        contents = [bench.rng.randbytes(50), bench.rng.randbytes(60)]
        first = bench.write([bench.item(0, 0, [50])], contents[:1])
        bench.write([bench.item(0, 0, [60])], contents[1:])
        _run(transport, make_batch(Op.READ, bench.arena, [bench.item(0, 1 << 30, [60])]))
        bench.expect_checksums(first, contents[:1], "an earlier write")
        _expect_ok(first, "an earlier write")


@_check
def _arrays_are_copied(subject: Subject) -> None:
    """The caller may reuse the arrays of a batch as soon as `submit` returned."""
    with subject.open(64 * BLOCK_BYTES) as transport:
        bench = _Bench(transport, 1 << 20)
        items = [bench.item(0, block * BLOCK_BYTES, [300, 300]) for block in range(50)]
        contents = [bench.rng.randbytes(600) for _ in items]
        for item, content in zip(items, contents, strict=True):
            bench.arena.put(item.fragments, content)
        batch = make_batch(Op.WRITE, bench.arena, items)
        ticket = transport.submit(batch)
        batch.device[:] = 77
        batch.offset_bytes[:] = 63 * BLOCK_BYTES
        batch.fragment_start[:] = 0
        batch.address[:] = bench.arena.address
        batch.length_bytes[:] = 1
        _expect_ok(_finish(transport, ticket), "write")
        bench.read([bench.item(0, block * BLOCK_BYTES, [600]) for block in range(50)], contents)


@_check
def _timeouts(subject: Subject) -> None:
    """An unfinished batch gives None, and its result later."""
    if subject.stall is None:
        raise CheckSkipped("stall: a way to keep batches from finishing")
    with subject.open(8 * BLOCK_BYTES) as transport:
        bench = _Bench(transport, 1 << 20)
        source = [bench.item(0, 0, [5_000])]
        content = bench.rng.randbytes(5_000)
        bench.arena.put(source[0].fragments, content)
        with subject.stall(transport):
            ticket = transport.submit(make_batch(Op.WRITE, bench.arena, source))
            for timeout_s in (0.0, 0.001, -1.0):
                _expect(
                    transport.wait(ticket, timeout_s) is None,
                    "wait returned a result of a batch that cannot have finished",
                )
        _expect_ok(_finish(transport, ticket), "write")
        bench.read([bench.item(0, 0, [5_000])], [content])


@_check
def _batches_in_flight_max(subject: Subject) -> None:
    """The stated number of batches may be in flight; one more is refused and harms nothing."""
    with subject.open(8 * BLOCK_BYTES) as transport:
        bench = _Bench(transport, 1 << 20)
        content = bench.rng.randbytes(77)
        bench.write([bench.item(0, 0, [77])], [content])
        items = [bench.item(0, 0, [77]) for _ in range(BATCHES_IN_FLIGHT_MAX)]
        tickets = [transport.submit(make_batch(Op.READ, bench.arena, [item])) for item in items]
        extra = [bench.item(0, 0, [77])]
        with _raises(BusyError, "one batch more than BATCHES_IN_FLIGHT_MAX"):
            transport.submit(make_batch(Op.READ, bench.arena, extra))
        for ticket in tickets:
            _expect_ok(_finish(transport, ticket), "read")
        bench.expect_memory(items, [content] * len(items))
        _expect(set(bench.arena.get(extra[0].fragments)) == {POISON}, "a refused batch was started")
        bench.read(extra, [content])


@_check
def _items_max(subject: Subject) -> None:
    """A batch of BATCH_ITEMS_MAX items."""
    with subject.open(8 * BLOCK_BYTES) as transport:
        bench = _Bench(transport, 1 << 20)
        content = bench.rng.randbytes(BLOCK_BYTES)
        bench.write([bench.item(0, 0, [BLOCK_BYTES])], [content])
        memory = bench.arena.carve([BATCH_ITEMS_MAX])
        batch = Batch(
            op=Op.READ,
            device=np.zeros(BATCH_ITEMS_MAX, np.uint32),
            offset_bytes=np.zeros(BATCH_ITEMS_MAX, np.uint64),
            fragment_start=np.arange(BATCH_ITEMS_MAX + 1, dtype=np.uint32),
            address=np.arange(BATCH_ITEMS_MAX, dtype=np.uint64)
            + np.uint64(bench.arena.address + memory[0][0]),
            length_bytes=np.ones(BATCH_ITEMS_MAX, np.uint64),
        )
        _expect_ok(_run(transport, batch), "read")
        _expect(
            bench.arena.get(memory) == content[:1] * BATCH_ITEMS_MAX, "an item read other bytes"
        )
        bench.guards()


@_check
def _many_threads(subject: Subject) -> None:
    """Threads submit, wait, register and flush at once, each on its own extents."""
    threads, rounds, blocks = 4, 12, 64
    with subject.open(*[threads * blocks * BLOCK_BYTES] * 2) as transport:

        def work(index: int) -> None:
            bench = _Bench(transport, 4 << 20, seed=index)
            region = transport.register(bench.arena.address, 1 << 20)
            for turn in range(rounds):
                block = (index * blocks + turn) * BLOCK_BYTES
                size = bench.rng.randint(10, BLOCK_BYTES)
                shapes = [split(bench.rng, size, 5), split(bench.rng, size, 2)]
                bench.round_trip([(0, block), (1, block)], shapes)
                _expect(transport.flush(turn % 2) == 0, "a flush failed")
            transport.unregister(region)

        _run_threads(work, threads)


@_check
def _one_ticket_many_waiters(subject: Subject) -> None:
    """Of threads that wait for one ticket, exactly one gets the result; the others KeyError."""
    with subject.open(8 * BLOCK_BYTES) as transport:
        bench = _Bench(transport, 1 << 20)
        bench.write([bench.item(0, 0, [10])], [bytes(10)])
        for _ in range(20):
            ticket = transport.submit(make_batch(Op.READ, bench.arena, [bench.item(0, 0, [10])]))
            outcomes: list[str] = []

            def work(_: int, ticket: int = ticket, outcomes: list[str] = outcomes) -> None:
                try:
                    result = transport.wait(ticket, WAIT_S)
                    outcomes.append("none" if result is None else "result")
                except KeyError:
                    outcomes.append("spent")

            _run_threads(work, 3)
            _expect(
                sorted(outcomes) == ["result", "spent", "spent"],
                f"three threads waited for one ticket and got {sorted(outcomes)}",
            )


def _run_threads(work: Callable[[int], None], count: int) -> None:
    """Run `work(0)` .. `work(count - 1)` at once; raise what the first to fail raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(count)

    def body(index: int) -> None:
        try:
            start.wait(WAIT_S)
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    _expect(not any(thread.is_alive() for thread in threads), "a thread does not end")
    if errors:
        raise errors[0]


@_check
def _flushes(subject: Subject) -> None:
    """A flush returns 0 on a healthy device, and is counted; there is no device beyond the last."""
    with subject.open(8 * BLOCK_BYTES, 8 * BLOCK_BYTES) as transport:
        bench = _Bench(transport, 1 << 20)
        before = transport.stats().flushes
        bench.write([bench.item(device, 0, [100]) for device in (0, 1)], [bytes(100)] * 2)
        for device in (0, 1, 1):
            _expect(transport.flush(device) == 0, f"flush of device {device} failed")
        _expect(transport.stats().flushes == before + 3, "flushes were not counted")
        for device in (2, -1):
            try:
                status = transport.flush(device)
            except (ValueError, IndexError):
                continue
            _expect(status != 0, f"flush of device {device}, which does not exist, returned 0")


@_check
def _capabilities(subject: Subject) -> None:
    """What a transport says of itself is complete and does not change."""
    capacities = (8 * BLOCK_BYTES, 16 * BLOCK_BYTES)
    with subject.open(*capacities) as transport:
        _expect(isinstance(transport, Transport), "the object lacks a method of the protocol")
        said = transport.capabilities()
        _expect(bool(said.name), "the name is empty")
        _expect(len(said.direct) == 2, "`direct` does not have one entry per device")
        _expect(said.queue_depth > 0, "queue_depth is not positive")
        _expect(
            said.transfer_bytes_max > 0 and said.transfer_bytes_max % BLOCK_BYTES == 0,
            "transfer_bytes_max is not a positive multiple of BLOCK_BYTES",
        )
        _expect(
            tuple(device.capacity_bytes for device in transport.devices) == capacities,
            "`devices` are not those that were opened",
        )
        _Bench(transport, 1 << 20).round_trip([(1, 0)], [[100]])
        _expect(transport.capabilities() == said, "capabilities changed")


@_check
def _statistics(subject: Subject) -> None:
    """Counters never fall, and count what happened."""
    with subject.open(8 * BLOCK_BYTES) as transport:
        bench = _Bench(transport, 1 << 20)
        seen = _counters(transport)

        def expect_growth(**least: int) -> None:
            nonlocal seen
            now = _counters(transport)
            for name, value in now.items():
                _expect(value >= seen[name], f"{name} fell from {seen[name]} to {value}")
                grown = value - seen[name]
                _expect(grown >= least.get(name, 0), f"{name} grew by {grown}, not {least}")
            seen = now

        contents = [bench.rng.randbytes(5_000)] * 2
        places = (0, 2 * BLOCK_BYTES)
        bench.write([bench.item(0, place, [5_000]) for place in places], contents)
        expect_growth(write_items=2, write_bytes=10_000)
        bench.read([bench.item(0, place, [4_000, 1_000]) for place in places], contents)
        expect_growth(read_items=2, read_bytes=10_000)
        failed = seen["failed_items"]
        _expect(failed == 0, f"failed_items is {failed} before anything failed")
        bad = [bench.item(0, 1 << 30, [10]) for _ in range(3)]
        for op in Op:
            _run(transport, make_batch(op, bench.arena, bad))
            expect_growth(failed_items=3)


def _counters(transport: Transport) -> dict[str, int]:
    stats = transport.stats()
    return {
        "read_items": stats.read_items,
        "read_bytes": stats.read_bytes,
        "write_items": stats.write_items,
        "write_bytes": stats.write_bytes,
        "failed_items": stats.failed_items,
        "bounced_bytes": stats.bounced_bytes,
        "short_transfers": stats.short_transfers,
        "flushes": stats.flushes,
    }


@_check
def _close_finishes(subject: Subject) -> None:
    """`close` waits for what is in flight: afterwards the bytes of a read are in memory."""
    with subject.open(64 * BLOCK_BYTES) as transport:
        bench = _Bench(transport, 4 << 20)
        content = bench.rng.randbytes(20_000)
        bench.write([bench.item(0, 0, [20_000])], [content])
        items = [bench.item(0, 0, [20_000]) for _ in range(30)]
        for item in items:
            transport.submit(make_batch(Op.READ, bench.arena, [item]))
        transport.close()
        bench.expect_memory(items, [content] * len(items))
        bench.guards()


@_check
def _close_is_final(subject: Subject) -> None:
    """`close` may be called again; `submit` then raises StoreClosedError, and nothing hangs."""
    with subject.open(8 * BLOCK_BYTES) as transport:
        bench = _Bench(transport, 1 << 20)
        batch = make_batch(Op.WRITE, bench.arena, [bench.item(0, 0, [10])])
        ticket = transport.submit(batch)
        for _ in range(3):
            try:
                transport.close()
            except Exception as error:
                raise ConformanceError(f"close raised {error!r}") from error
        with _raises(StoreClosedError, "submit after close"):
            transport.submit(batch)
        try:
            status = transport.flush(0)
        except StoreClosedError:
            status = -1
        _expect(status != 0, "flush after close returned 0")
        try:
            _expect(transport.wait(ticket, WAIT_S) is not None, "close left a batch unfinished")
        except (KeyError, StoreClosedError):
            pass
        transport.capabilities()
        transport.stats()


@_check
def _close_from_many_threads(subject: Subject) -> None:
    with subject.open(8 * BLOCK_BYTES) as transport:
        _run_threads(lambda _: transport.close(), 4)
