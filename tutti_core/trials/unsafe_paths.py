"""Paths and files that another user could redirect, replace or change: each must be refused.

A store with pages is made unsafe in one way at a time: owners, modes, links, and things that are no
files. Opening it must be refused in time, leave everything as it was, and no file open; after the
fault is taken back all pages must be there. What an ordinary deployment has must be taken.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tutti_core.errors import ConfigError
from tutti_core.store import PrefixStore
from tutti_core.trials.kit import client, small_config
from tutti_core.trials.kit import run as run_of
from tutti_core.trials.tally import Tally

PAGES = 4
OTHER_USER = 54321
OPEN_TIMEOUT_S = 20.0
"""How long an open may take before it counts as hanging, on a FIFO for example."""

_DIRECTORIES = ("", "catalog", "leases")
_FILES = ("pool.tutti", "lock", "catalog/data.mdb", "catalog/lock.mdb", "leases/0.lock")


@dataclass(frozen=True, slots=True)
class Fault:
    """One way in which a store can be unsafe.

    kind    what it is counted as.
    what    which file or directory, in words.
    block   makes it so for the length of a with statement; yields the path to open.
    """

    kind: str
    what: str
    block: Callable[[], object]


def run(directory: Path, *, seed: int, seconds: float = 0.0) -> Tally:
    """Try every fault once, and go on with pairs of them until `seconds` are over.

    Parameters
        directory: empty, on a file system with owners and modes. Foreign owners need root.
    """
    tally = Tally()
    rng = random.Random(seed)
    deadline_s = time.monotonic() + seconds
    place = directory / "place"
    place.mkdir(mode=0o700)
    place.chmod(0o700)
    store = place / "store"
    with PrefixStore.open(small_config(store)) as opened:
        assert all(client(opened).save(run_of("kept", PAGES)))
    faults = [*_owner_faults(store), *_mode_faults(store), *_link_faults(store), *_kinds(store)]
    _check_pages(store, tally, "before any fault")
    for fault in faults:
        _try(fault, store, tally)
    _try_ordinary(store, tally)
    while time.monotonic() < deadline_s:
        _try_two(rng.sample(faults, 2), store, tally)
        _check_pages(store, tally, "after two faults at once")
    return tally


def _try(fault: Fault, store: Path, tally: Tally) -> None:
    with fault.block() as path:  # type: ignore[attr-defined]
        _expect_refusal(path, store, tally, fault)
    _check_pages(store, tally, f"after {fault.kind}, {fault.what}")


def _try_two(pair: list[Fault], store: Path, tally: Tally) -> None:
    """Two faults of different things at once; those of one thing could not be taken back."""
    one, two = pair
    if one.what == two.what or "directory" in one.what + two.what:  # one may be in the other
        return
    with one.block(), two.block() as path:  # type: ignore[attr-defined]
        _expect_refusal(
            path, store, tally, Fault("two at once", f"{one.what}, {two.what}", two.block)
        )


def _expect_refusal(path: Path, store: Path, tally: Tally, fault: Fault) -> None:
    before, files = _snapshot(store.parent), _open_files()
    tally.bad_inputs[f"path: {fault.kind}"] += 1
    answer: list[BaseException | None] = []

    def attempt() -> None:
        try:
            PrefixStore.open(small_config(path)).close()
            answer.append(None)
        except BaseException as error:
            answer.append(error)

    thread = threading.Thread(target=attempt, name="tutti-unsafe-path", daemon=True)
    thread.start()
    thread.join(OPEN_TIMEOUT_S)
    what = f"{fault.kind}, {fault.what}"
    if not answer:
        tally.complain(f"{what}: the open hangs")
        return
    (error,) = answer
    if error is None:
        tally.complain(f"{what}: it was opened")
    elif not isinstance(error, ConfigError) or not error.hint:
        tally.complain(f"{what}: {type(error).__name__} instead of a reason and a remedy: {error}")
    if _snapshot(store.parent) != before:
        tally.complain(f"{what}: something was changed")
    if _open_files() != files:
        tally.complain(f"{what}: files were left open")


def _check_pages(store: Path, tally: Tally, when: str) -> None:
    """A safe store opens, and all pages are in it, bit for bit."""
    try:
        with PrefixStore.open(small_config(store)) as opened:
            loaded = client(opened, tally=tally).load(run_of("kept", PAGES))
    except Exception as error:
        tally.complain(f"{when}: {type(error).__name__}: {error}")
        return
    if not all(loaded):
        tally.lose(when, loaded.count(False))


# ---- what must be refused ----
def _owner_faults(store: Path) -> Iterator[Fault]:
    if os.geteuid() != 0:
        return  # only root can give files away

    def given_away(path: Path) -> Callable[[], object]:
        @contextmanager
        def block() -> Iterator[Path]:
            os.chown(path, OTHER_USER, OTHER_USER, follow_symlinks=False)
            try:
                yield store
            finally:
                os.chown(path, 0, 0, follow_symlinks=False)

        return block

    for name in _DIRECTORIES:
        yield Fault("foreign owner", f"directory {name}", given_away(store / name))
    for name in _FILES:
        yield Fault("foreign owner", name, given_away(store / name))
    yield Fault("foreign owner", "directory above", given_away(store.parent))


def _mode_faults(store: Path) -> Iterator[Fault]:
    def loosened(path: Path, bits: int) -> Callable[[], object]:
        @contextmanager
        def block() -> Iterator[Path]:
            mode = path.stat().st_mode & 0o7777
            path.chmod(mode | bits)
            try:
                yield store
            finally:
                path.chmod(mode)

        return block

    # The group of an ordinary user may be nobody else's, so only the others' bit is sure to count.
    for bits in (0o002, 0o022) if os.geteuid() else (0o020, 0o002, 0o022):
        for name in _DIRECTORIES:
            yield Fault("writable by others", f"directory {name}", loosened(store / name, bits))
        for name in _FILES:
            yield Fault("writable by others", name, loosened(store / name, bits))
        yield Fault("writable by others", "directory above", loosened(store.parent, bits))
    yield Fault("writable by others", "directory , sticky", loosened(store, 0o1022))


def _link_faults(store: Path) -> Iterator[Fault]:
    def replaced_by_link(path: Path) -> Callable[[], object]:
        aside = store.parent / f"{path.name}.aside"

        @contextmanager
        def block() -> Iterator[Path]:
            path.rename(aside)
            path.symlink_to(aside)
            try:
                yield store
            finally:
                path.unlink()
                aside.rename(path)

        return block

    def named_twice(path: Path) -> Callable[[], object]:
        aside = store.parent / f"{path.name}.aside"

        @contextmanager
        def block() -> Iterator[Path]:
            os.link(path, aside)
            try:
                yield store
            finally:
                aside.unlink()

        return block

    @contextmanager
    def link_where_others_write() -> Iterator[Path]:
        shared = store.parent / "shared"
        shared.mkdir()
        shared.chmod(0o1777)
        (shared / "link").symlink_to(store.parent)
        try:
            yield shared / "link" / "store"
        finally:
            shutil.rmtree(shared)

    for name in _DIRECTORIES:
        yield Fault("symbolic link", f"directory {name}", replaced_by_link(store / name))
    for name in _FILES:
        yield Fault("symbolic link", name, replaced_by_link(store / name))
        yield Fault("hard link", name, named_twice(store / name))
    yield Fault("symbolic link", "directory that others may write", link_where_others_write)


def _kinds(store: Path) -> Iterator[Fault]:
    def replaced(path: Path, make: Callable[[Path], None]) -> Callable[[], object]:
        aside = store.parent / f"{path.name}.aside"

        @contextmanager
        def block() -> Iterator[Path]:
            path.rename(aside)
            make(path)
            try:
                yield store
            finally:
                path.rmdir() if path.is_dir() else path.unlink()
                aside.rename(path)

        return block

    for name in _FILES:
        yield Fault("FIFO", name, replaced(store / name, _make_fifo))
        yield Fault("socket", name, replaced(store / name, _make_socket))
        yield Fault("directory for a file", name, replaced(store / name, Path.mkdir))
    for name in _DIRECTORIES:
        yield Fault("file for a directory", f"directory {name}", replaced(store / name, Path.touch))


def _make_fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def _make_socket(path: Path) -> None:
    """Its address may be too long, so it is made under a short name and moved."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


# ---- what must be taken ----
def _try_ordinary(store: Path, tally: Tally) -> None:
    """A link of ours or root's in a safe directory, and a shared directory with the sticky bit."""
    link = store.parent / "mounted"
    link.symlink_to(store.parent)
    _check_pages(link / "store", tally, "by a link on the way")
    link.unlink()
    shared = store.parent / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    store.rename(shared / "store")
    _check_pages(shared / "store", tally, "in a directory like /tmp")
    (shared / "store").rename(store)
    shared.rmdir()


# ---- what was touched ----
def _snapshot(folder: Path) -> dict[str, tuple[object, ...]]:
    """Owner, mode, size, time of change and content of everything below a directory.

    LMDB's table of readers holds no data and may change.
    """
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        data: object = None
        if path.is_symlink():
            data = os.readlink(path)
        elif path.is_file():
            data = hash(path.read_bytes()) if path.name != "lock.mdb" else None
        changed = status.st_mtime_ns if path.name != "lock.mdb" else 0
        owner = (status.st_mode, status.st_uid, status.st_gid)
        found[str(path)] = (*owner, changed, data)
    return found


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))
