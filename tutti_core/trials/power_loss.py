"""Loses the power under a store on real files, at many moments of one run, and looks what is left.

The store works on pool files through a transport that remembers, for each block, what was durable
and what was written since. At each operation of the transport and of the catalog an image of the
directory is taken as a power loss would leave it there:

    pools      each block that was not flushed is as it was, as after one of the writes since, or
               torn between two sectors.
    catalog    as of its last synced commit; the one in flight done, not done or in part
               (catalog_power.py).
    names      a file or directory that was made since its directory was last synced may be gone,
               and a renamed one have its old name.

Each image is opened as a store of its own and compared with what was promised at that moment. The
file system is taken to keep nothing that was not synced; most keep more. Creation, growth and
repair are tried in the same way.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tutti_core.config import StoreConfig
from tutti_core.errors import TuttiError
from tutti_core.format import DATA_OFFSET_BYTES
from tutti_core.io.posix import PosixTransport, memory_at
from tutti_core.io.transport import BLOCK_BYTES, Batch, BatchResult, Device, Op
from tutti_core.repair import repair_store
from tutti_core.store import PrefixStore
from tutti_core.testing import Oracle
from tutti_core.testing.media import SECTOR_BYTES
from tutti_core.trials.catalog_power import CatalogPower
from tutti_core.trials.crash_points import (
    WRITE_BACK,
    Life,
    Shape,
    check_files,
    flip_page,
    judge,
    names_of,
)
from tutti_core.trials.kit import quiet, raw_records
from tutti_core.trials.tally import Tally

POOL_FILE = "pool.tutti"

SHARE = 0.2
"""Of the operations of a history, at which the quick part loses the power."""

SHAPES = (
    Shape("files", 10, 12, room=True),
    Shape("two pool files", 8, 6, pools=2, room=True),
    Shape("files, eviction", 14, 2),
    Shape("files, no flush", 8, 12, room=True, settings={"durability": "none"}),
    Shape("files, write back", 10, 12, room=True, settings=WRITE_BACK),
)


class PowerTransport:
    """A PosixTransport that remembers what a power loss would take back.

    Parameters
        watch: told of each operation before it is done, outside all locks.
    Threads    any; the lock is held over a copy of the bytes of a batch.
    """

    def __init__(self, devices: list[Device], watch: Callable[[], None]) -> None:
        self.inner = PosixTransport(devices)
        self.lock = threading.RLock()
        self.watch = watch
        self._files = [os.open(device.path, os.O_RDONLY | os.O_CLOEXEC) for device in devices]
        self._unflushed: list[dict[int, list[bytes]]] = [{} for _ in devices]
        """By device and block: what is durable, then each content written since."""
        self._flying: dict[int, set[tuple[int, int]]] = {}  # by ticket: device and block

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def submit(self, batch: Batch) -> int:
        """Remember what the blocks of a write were and will be, and pass it on."""
        if batch.op is not Op.WRITE:
            return self.inner.submit(batch)
        self.watch()
        with self.lock:
            blocks = self._note_write(batch)
            ticket: int = self.inner.submit(batch)
            self._flying[ticket] = blocks
            return ticket

    def wait(self, ticket: int, timeout_s: float) -> BatchResult | None:
        """As of the transport below; blocks of a batch that has ended can be flushed."""
        result = self.inner.wait(ticket, timeout_s)
        if result is not None:
            with self.lock:
                self._flying.pop(ticket, None)
        return result

    def flush(self, device: int) -> int:
        """Flush; what was written before is durable then, what is in flight is not."""
        self.watch()
        with self.lock:
            flying = {place for places in self._flying.values() for place in places}
            ended = {
                block: len(versions)
                for block, versions in self._unflushed[device].items()
                if (device, block) not in flying
            }
        status = self.inner.flush(device)
        if status == 0:
            with self.lock:
                for block, count in ended.items():
                    versions = self._unflushed[device].get(block, [])
                    del versions[: count - 1]
                    if len(versions) <= 1:
                        self._unflushed[device].pop(block, None)
        return status

    def close(self) -> None:
        """Close the transport below, and let go of the files."""
        self.inner.close()
        while self._files:
            os.close(self._files.pop())

    def lose(self, device: int, file: Path, rng: random.Random) -> None:
        """Put on a copy of a pool file what a power loss may leave of the unflushed blocks."""
        with self.lock, open(file, "r+b") as stream:
            for block, versions in sorted(self._unflushed[device].items()):
                stream.seek(block * BLOCK_BYTES)
                stream.write(_survivor(versions, rng))

    def _note_write(self, batch: Batch) -> set[tuple[int, int]]:
        touched: set[tuple[int, int]] = set()
        for item in range(batch.item_count):
            mine = slice(int(batch.fragment_start[item]), int(batch.fragment_start[item + 1]))
            data = b"".join(
                bytes(memory_at(address, length, writable=False))
                for address, length in zip(
                    batch.address[mine].tolist(), batch.length_bytes[mine].tolist(), strict=True
                )
            )
            data += bytes(-len(data) % BLOCK_BYTES)
            device, first = int(batch.device[item]), int(batch.offset_bytes[item]) // BLOCK_BYTES
            for i in range(len(data) // BLOCK_BYTES):
                block = first + i
                was = os.pread(self._files[device], BLOCK_BYTES, block * BLOCK_BYTES)
                versions = self._unflushed[device].setdefault(
                    block, [was.ljust(BLOCK_BYTES, b"\0")]
                )
                versions.append(data[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES])
                touched.add((device, block))
        return touched


def _survivor(versions: list[bytes], rng: random.Random) -> bytes:
    """What is left of one unflushed block."""
    newer, older = rng.choice(versions), rng.choice(versions)
    cut = rng.choice((0, BLOCK_BYTES, SECTOR_BYTES * rng.randrange(BLOCK_BYTES // SECTOR_BYTES)))
    return newer[:cut] + older[cut:]


class Files:
    """What of names in directories, and of the first block of files, is durable.

    Names that were there when their directory was last synced; the block as it was when its file
    was last synced. Pages, and the catalog's content, are others' to know.
    """

    def __init__(self, watch: Callable[[], None]) -> None:
        self._watch = watch
        self._names: dict[str, dict[str, int]] = {}  # directory -> name -> inode
        self._blocks: dict[int, bytes] = {}  # inode -> first block

    @contextmanager
    def watched(self) -> Iterator[Files]:
        """Note every fsync in the block; `watch` is called before and after each."""
        real = os.fsync

        def fsync(descriptor: Any) -> None:
            self._watch()
            real(descriptor)
            number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
            self._settle_one(os.readlink(f"/proc/self/fd/{number}"))
            self._watch()

        os.fsync = fsync  # type: ignore[assignment]
        try:
            yield self
        finally:
            os.fsync = real

    def settle(self, folder: Path) -> None:
        """Take everything below a directory as durable now."""
        for place, _, names in os.walk(folder):
            self._settle_one(os.path.realpath(place))
            for name in names:
                self._settle_one(os.path.join(os.path.realpath(place), name))

    def _settle_one(self, path: str) -> None:
        if os.path.isdir(path):
            self._names[path] = _inodes(path)
        elif os.path.basename(path).startswith(POOL_FILE):
            self._blocks[os.stat(path).st_ino] = _first_block(path)

    def lose(self, original: Path, copy: Path, rng: random.Random) -> None:
        """Take back from a copy, by chance, what was not durable in the original."""
        here = _inodes(original)
        durable = self._names.get(os.path.realpath(original), {})
        for name, inode in here.items():
            if not (copy / name).exists():
                continue
            if (copy / name).is_dir():
                self.lose(original / name, copy / name, rng)
            elif name.startswith(POOL_FILE):
                self._lose_block(inode, copy / name, rng)
            if durable.get(name) == inode or rng.random() < 0.5:
                continue
            earlier = [old for old, number in durable.items() if number == inode]
            if earlier:
                (copy / name).rename(copy / earlier[0])
            elif (copy / name).is_dir():
                shutil.rmtree(copy / name)
            else:
                (copy / name).unlink()

    def _lose_block(self, inode: int, file: Path, rng: random.Random) -> None:
        now = _first_block(file)
        synced = self._blocks.get(inode, bytes(BLOCK_BYTES))
        if now != synced:
            with open(file, "r+b") as stream:
                stream.write(_survivor([synced, now], rng))


def _inodes(path: str | Path) -> dict[str, int]:
    with os.scandir(path) as entries:
        return {entry.name: entry.inode() for entry in entries}


def _first_block(path: str | Path) -> bytes:
    with open(path, "rb") as stream:
        return stream.read(BLOCK_BYTES).ljust(BLOCK_BYTES, b"\0")


class World:
    """A directory, and images of it as power losses would leave it.

    Parameters
        share: of the operations, at which an image is taken; by chance.
    """

    def __init__(self, folder: Path, rng: random.Random, share: float) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self.folder = folder
        self.live = folder / "live"
        self.live.mkdir(parents=True)
        self.share = share
        self.rng = rng
        self.files = Files(self.at)
        self.files.settle(self.live)
        self.power = CatalogPower()
        self.power.watch = lambda what: self.at()
        self.transport: PowerTransport | None = None
        self.on_image: Callable[[Path], None] = lambda path: None
        """Told of each image, in the thread whose operation it interrupts."""
        self._count = 0

    @contextmanager
    def watched(self) -> Iterator[World]:
        """Take images in the block."""
        with self.power.installed(), self.files.watched():
            yield self

    def at(self) -> None:
        """An operation is under way: take an image, or not."""
        if self.rng.random() < self.share:
            self.image()

    def image(self) -> Path:
        """Take an image of this moment, and hand it to `on_image`."""
        with self.power.lock:
            path = self.folder / f"image{self._count}"
            self._count += 1
            shutil.copytree(self.live, path, ignore=shutil.ignore_patterns("lock.mdb"))
            for data, content in self.power.images(self.rng).items():
                if data.exists():
                    (path / data.relative_to(self.live)).write_bytes(content)
            if self.transport is not None:
                for number, device in enumerate(self.transport.devices):
                    file = path / Path(device.path).relative_to(self.live)
                    self.transport.lose(number, file, self.rng)
            self.files.lose(self.live, path, self.rng)
            self.on_image(path)
            return path


def devices_of(config: StoreConfig) -> list[Device]:
    """The pool files of a store that exists, as a transport wants them."""
    size = DATA_OFFSET_BYTES + config.segments_per_pool(DATA_OFFSET_BYTES) * config.segment_bytes
    return [Device(str(place / POOL_FILE), size) for place in config.pool_paths]


# ---- a store in use ----
def use(folder: Path, shape: Shape, seed: int, share: float, tally: Tally) -> None:
    """Lose the power at operations of one history."""
    world = World(folder, random.Random(seed), 0.0)
    config = shape.config(world.live)
    life = Life(shape, Oracle(), tally)
    images: list[tuple[Path, Life]] = []

    def note(path: Path) -> None:
        images.append((path, life.frozen()))

    world.on_image = note
    with world.watched():
        PrefixStore.open(config).close()
        world.share = share
        transport = world.transport = PowerTransport(devices_of(config), world.at)
        life.play(config, transport, seed, lambda: False)
        world.share = 0.0
        world.image()
    for number, (path, then) in enumerate(images):
        _judge_image(path, then, f"{shape.name}, seed {seed}, image {number}")


def _judge_image(path: Path, then: Life, where: str) -> None:
    judge(then, then.shape.config(path), None, where)
    then.tally.crash_points += 1
    try:
        check_files(path)
    except AssertionError as error:
        then.tally.complain(f"{where}: {error}")
    shutil.rmtree(path)


# ---- creation and growth ----
def create(folder: Path, shape: Shape, seed: int, tally: Tally) -> None:
    """Lose the power at every step of the creation of a store: it must open, and be empty."""
    world = World(folder, random.Random(seed), 1.0)
    images: list[Path] = []
    world.on_image = images.append
    with world.watched():
        PrefixStore.open(shape.config(world.live)).close()
    for number, path in enumerate(images):
        nothing = Life(shape, Oracle(), tally)
        _judge_image(path, nothing, f"creation, {shape.name}, seed {seed}, image {number}")


def grow(folder: Path, shape: Shape, seed: int, tally: Tally) -> None:
    """Lose the power at every step of giving a store more room: its pages must be there."""
    world = World(folder, random.Random(seed), 0.0)
    config = shape.config(world.live)
    life = Life(shape, Oracle(), tally)
    images: list[tuple[Path, Life]] = []
    world.on_image = lambda path: images.append((path, life.frozen()))
    larger = replace(shape, segments=shape.segments + 4)
    life.play(config, PosixTransport(devices_after_opening(config)), seed, lambda: False)
    world.files.settle(world.live)
    with world.watched():
        world.share = 1.0
        PrefixStore.open(larger.config(world.live)).close()
        world.share = 0.0
    for number, (path, then) in enumerate(images):
        then.shape = larger
        _judge_image(path, then, f"growth, {shape.name}, seed {seed}, image {number}")


def devices_after_opening(config: StoreConfig) -> list[Device]:
    """Make a store, and return its pool files."""
    PrefixStore.open(config).close()
    return devices_of(config)


# ---- repair ----
def repair(folder: Path, seed: int, tally: Tally) -> None:
    """Lose the power at every step of a repair: a second one ends it, and nothing good is gone."""
    rng = random.Random(seed)
    world = World(folder, rng, 0.0)
    shape = Shape("repair", 10, 12, room=True)
    config = shape.config(world.live)
    life = Life(shape, Oracle(), tally)
    life.play(config, PosixTransport(devices_after_opening(config)), seed, lambda: False)
    records = raw_records(config.path)
    chosen = sorted(rng.sample(range(len(records)), len(records) // 3))
    for i in chosen:
        flip_page(config, records[i], rng)
        tally.faults["flipped bit on a file"] += 1
    good = names_of(records) - names_of(records[chosen])
    images: list[Path] = []
    world.on_image = images.append
    world.files.settle(world.live)
    with world.watched():
        world.share = 1.0
        repair_store(config.path, config.pools, transport="posix")
        world.share = 0.0
    for number, path in enumerate(images):
        where = f"repair, seed {seed}, image {number}"
        there = shape.config(path)
        try:
            repair_store(there.path, there.pools, transport="posix")
        except TuttiError as error:
            tally.complain(f"{where}: {error}")
        if (left := names_of(raw_records(there.path))) != good:
            tally.complain(f"{where}: {len(left)} pages are left of {len(good)} good ones")
        then = Life(shape, life.oracle, tally)
        then.promised = good & life.promised
        _judge_image(path, then, where)


def run(directory: Path, *, seed: int, seconds: float = 0.0) -> Tally:
    """Lose the power at some operations of a history of each shape; then, until the time is over,
    at more of others.

    Parameters
        directory: an empty one on the file system to be tried; made.
    """
    tally = Tally()
    end_s = time.monotonic() + seconds
    turn = 0
    with quiet():
        while turn == 0 or time.monotonic() < end_s:
            share = SHARE if turn == 0 else 1.0
            for shape in SHAPES:
                use(directory / "use", shape, seed + turn, share, tally)
            for shape in SHAPES[:2]:
                create(directory / "create", shape, seed + turn, tally)
                grow(directory / "grow", shape, seed + turn, tally)
            repair(directory / "repair", seed + turn, tally)
            turn += 1
    for name in ("use", "create", "grow", "repair"):
        shutil.rmtree(directory / name, ignore_errors=True)
    return tally
