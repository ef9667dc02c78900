"""A real file system whose calls fail or stall on command: a folder, seen through FUSE.

The kernel is the real one, and so are its page cache, its direct I/O and what it does with an
error; only the disk below is ours. The file system is served by a process of its own: in ours, a
page fault of a memory map would wait for a thread that cannot run. Needs root and /dev/fuse.

Calls pass through to a folder. Rules say what becomes of those of one kind on files of one name:
an errno, or that they are kept waiting. Writes reach the disk when they are called (no write-back
cache), and files bypass the page cache but for the catalog's, which are mapped.

The protocol is that of linux/fuse.h, version 7.31: the structures below are named as there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fnmatch
import json
import os
import select
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

CALLS = frozenset(["read", "write", "fsync", "fallocate", "open", "create", "getattr"])
"""Kinds of calls that a rule can name."""

_START_S = 20.0
_MAX_WRITE_BYTES = 1 << 17
_IN_HEADER = struct.Struct("<IIQQIIII")
_OUT_HEADER = struct.Struct("<IiQ")
_ATTR = struct.Struct("<6Q10I")
_BIG_WRITES, _ASYNC_DIO = 1 << 5, 1 << 15
_DIRECT_IO = 1
_SET_MODE, _SET_SIZE = 1, 8
_MNT_FORCE, _MNT_DETACH = 1, 2
_PR_SET_PDEATHSIG = 1


def why_not() -> str:
    """Why this machine has no FUSE for us; "" if it has."""
    if os.geteuid() != 0:
        return "mounting needs root"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "this machine has no /dev/fuse"
    return ""


class FuseDisk:
    """A mounted disk, for who makes its calls fail.

    Parameters
        mount: where it is seen; an empty folder.
        backing: where its files are in truth.
    """

    def __init__(self, mount: Path, backing: Path, process: subprocess.Popen[str]) -> None:
        self.mount = mount
        self.backing = backing
        self._process = process

    def fail(self, call: str, code: int, name: str = "*", below_bytes: int = 1 << 62) -> None:
        """Let calls of a kind on files of a name end with an errno, until `heal`.

        Parameters
            below_bytes: reads and writes at offsets from here on are not concerned.
        """
        self._tell(rule=call, code=code, name=name, below=below_bytes)

    def stall(self, call: str, name: str = "*") -> None:
        """Keep calls of a kind waiting, until `heal`."""
        self._tell(rule=call, code=0, name=name, below=1 << 62)

    def heal(self) -> None:
        """Forget all rules; what waits goes on."""
        self._tell(heal=True)

    def free(self, free_bytes: int | None) -> None:
        """Report that many free bytes; None: as many as there are."""
        self._tell(free=free_bytes)

    def count(self, call: str) -> int:
        """Calls of a kind that a rule has hit so far."""
        return int(self._tell(count=call))

    def _tell(self, **words: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@contextmanager
def fuse_disk(mount: Path, backing: Path) -> Iterator[FuseDisk]:
    """Mount a disk for the length of a with statement. What stalls fails when it ends.

    Raises
        OSError: the kernel refuses.
    """
    mount.mkdir(parents=True, exist_ok=True)
    backing.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, __file__, str(mount), str(backing)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        ready = select.select([process.stdout], [], [], _START_S)[0]
        answer = json.loads((process.stdout.readline() if ready else "") or "5")
        if answer:
            raise OSError(answer, os.strerror(answer), str(mount))
        yield FuseDisk(mount, backing, process)
    finally:
        process.kill()  # the kernel fails what waits once nobody serves it any more
        process.wait()
        _unmount(mount)
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _mount(mount: Path, descriptor: int) -> None:
    options = f"fd={descriptor},rootmode=40000,user_id=0,group_id=0,allow_other"
    result = _libc().mount(
        b"tutti", os.fsencode(mount), b"fuse", 0, ctypes.c_char_p(options.encode())
    )
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(mount))


def _unmount(mount: Path) -> None:
    if _libc().umount2(os.fsencode(mount), _MNT_FORCE):
        _libc().umount2(os.fsencode(mount), _MNT_DETACH)


def _end_with_the_caller() -> None:
    """Have the kernel end this process when its parent's thread ends.

    A caller that is killed while a call of its own is kept waiting could not end otherwise, nor
    close the pipe by which we would know.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() == 1:
        sys.exit(1)


# ---- the serving process -----------------------------------------------------------------------
@dataclass(slots=True)
class _Request:
    opcode: int
    unique: int
    node: int
    body: bytes


class _Refused(Exception):
    """A rule keeps the call waiting."""


@dataclass(slots=True)
class _Server:
    """Serves one mount; a node is a path below `backing`, as long as the process lives."""

    device: int
    backing: Path
    paths: dict[int, str] = field(default_factory=lambda: {1: ""})
    nodes: dict[str, int] = field(default_factory=lambda: {"": 1})
    files: dict[int, int] = field(default_factory=dict)
    rules: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)
    waiting: list[_Request] = field(default_factory=list)
    free_bytes: int | None = None

    def serve(self, orders: IO[str]) -> None:
        """Answer calls and orders until the mount or the caller is gone."""
        while True:
            watched: list[Any] = [self.device, orders]
            ready = select.select(watched, [], [])[0]
            if orders in ready:
                line = orders.readline()
                if not line:
                    return
                print(json.dumps(self.obey(json.loads(line))), flush=True)
            if self.device in ready:
                try:
                    data = os.read(self.device, _MAX_WRITE_BYTES + 4096)
                except OSError as error:
                    if error.errno == errno.ENODEV:
                        return  # unmounted
                    continue
                _, opcode, unique, node, *_ = _IN_HEADER.unpack_from(data)
                self.answer(_Request(opcode, unique, node, data[_IN_HEADER.size :]))

    def obey(self, order: dict[str, Any]) -> Any:
        """Do what the other process asks; returns the answer."""
        if "rule" in order:
            self.rules[order["rule"], order["name"]] = order["code"], order["below"]
        elif "heal" in order:
            self.rules.clear()
            waiting, self.waiting = self.waiting, []
            for request in waiting:
                self.answer(request)
        elif "free" in order:
            self.free_bytes = order["free"]
        else:
            return self.hits.get(order["count"], 0)
        return None

    def answer(self, request: _Request) -> None:
        """Answer one call, unless a rule keeps it waiting."""
        handler = _HANDLERS.get(request.opcode)
        if request.opcode in _UNANSWERED:
            return
        try:
            reply, status = (b"", -errno.ENOSYS) if handler is None else (handler(self, request), 0)
        except _Refused:
            self.waiting.append(request)
            return
        except OSError as error:
            reply, status = b"", -(error.errno or errno.EIO)
        head = _OUT_HEADER.pack(_OUT_HEADER.size + len(reply), status, request.unique)
        with contextlib.suppress(OSError):  # it was interrupted meanwhile
            os.writev(self.device, [head, reply])

    def check(self, call: str, path: str, offset_bytes: int = 0) -> None:
        """Raise what a rule says of this call."""
        for (kind, name), (code, below_bytes) in self.rules.items():
            if kind != call or offset_bytes >= below_bytes:
                continue
            if fnmatch.fnmatch(os.path.basename(path), name):
                self.hits[call] = self.hits.get(call, 0) + 1
                if code:
                    raise OSError(code, os.strerror(code))
                raise _Refused

    # ---- paths and attributes ----
    def real(self, path: str) -> str:
        return os.path.join(self.backing, path)

    def child(self, request: _Request, name: bytes) -> str:
        return os.path.join(self.paths[request.node], os.fsdecode(name.split(b"\0")[0]))

    def attributes(self, path: str) -> bytes:
        facts = os.lstat(self.real(path))
        times = [int(t) for t in (facts.st_atime, facts.st_mtime, facts.st_ctime)]
        return _ATTR.pack(
            facts.st_ino, facts.st_size, facts.st_blocks, *times, 0, 0, 0,
            facts.st_mode, facts.st_nlink, facts.st_uid, facts.st_gid, 0, 4096, 0,
        )  # fmt: skip

    def entry(self, path: str) -> bytes:
        attributes = self.attributes(path)
        node = self.nodes.get(path)
        if node is None:
            node = self.nodes[path] = len(self.paths) + 1
            self.paths[node] = path
        return struct.pack("<4Q2I", node, 0, 0, 0, 0, 0) + attributes

    def opened(self, path: str, flags: int, mode: int) -> bytes:
        keep = flags & (os.O_ACCMODE | os.O_CREAT | os.O_EXCL | os.O_TRUNC)
        handle = os.open(self.real(path), keep | os.O_CLOEXEC, mode)
        self.files[handle] = handle
        how = 0 if path.endswith(".mdb") else _DIRECT_IO
        return struct.pack("<QII", handle, how, 0)


def _init(server: _Server, request: _Request) -> bytes:
    _, minor, readahead, flags = struct.unpack_from("<4I", request.body)
    wanted = flags & (_BIG_WRITES | _ASYNC_DIO)
    head = struct.pack("<4I2H2I", 7, min(minor, 31), readahead, wanted, 64, 48, _MAX_WRITE_BYTES, 1)
    return head.ljust(64, b"\0")


def _lookup(server: _Server, request: _Request) -> bytes:
    return server.entry(server.child(request, request.body))


def _getattr(server: _Server, request: _Request) -> bytes:
    path = server.paths[request.node]
    server.check("getattr", path)
    return struct.pack("<QII", 0, 0, 0) + server.attributes(path)


def _setattr(server: _Server, request: _Request) -> bytes:
    valid, _, _, size = struct.unpack_from("<2I2Q", request.body)
    mode = struct.unpack_from("<I", request.body, 68)[0]
    path = server.paths[request.node]
    if valid & _SET_SIZE:
        server.check("write", path)
        os.truncate(server.real(path), size)
    if valid & _SET_MODE:
        os.chmod(server.real(path), stat.S_IMODE(mode))
    return struct.pack("<QII", 0, 0, 0) + server.attributes(path)


def _mkdir(server: _Server, request: _Request) -> bytes:
    mode, _ = struct.unpack_from("<2I", request.body)
    path = server.child(request, request.body[8:])
    server.check("create", path)
    os.mkdir(server.real(path), stat.S_IMODE(mode))
    return server.entry(path)


def _unlink(server: _Server, request: _Request) -> bytes:
    path = server.child(request, request.body)
    os.unlink(server.real(path))
    server.nodes.pop(path, None)
    return b""


def _rename(server: _Server, request: _Request, skip: int = 8) -> bytes:
    folder = struct.unpack_from("<Q", request.body)[0]
    old, new = request.body[skip:].split(b"\0")[:2]
    before = server.child(request, old)
    after = os.path.join(server.paths[folder], os.fsdecode(new))
    os.rename(server.real(before), server.real(after))
    node = server.nodes.pop(before, None)
    if node is not None:
        server.nodes[after], server.paths[node] = node, after
    return b""


def _open(server: _Server, request: _Request) -> bytes:
    path = server.paths[request.node]
    server.check("open", path)
    return server.opened(path, struct.unpack_from("<I", request.body)[0], 0)


def _create(server: _Server, request: _Request) -> bytes:
    flags, mode, _, _ = struct.unpack_from("<4I", request.body)
    path = server.child(request, request.body[16:])
    server.check("create", path)
    handle = server.opened(path, flags | os.O_CREAT, stat.S_IMODE(mode))
    return server.entry(path) + handle


def _read(server: _Server, request: _Request) -> bytes:
    handle, offset, size = struct.unpack_from("<QQI", request.body)
    server.check("read", server.paths[request.node], offset)
    return os.pread(handle, size, offset)


def _write(server: _Server, request: _Request) -> bytes:
    handle, offset, size = struct.unpack_from("<QQI", request.body)
    server.check("write", server.paths[request.node], offset)
    return struct.pack("<II", os.pwrite(handle, request.body[40 : 40 + size], offset), 0)


def _fsync(server: _Server, request: _Request) -> bytes:
    server.check("fsync", server.paths[request.node])
    return b""


def _fallocate(server: _Server, request: _Request) -> bytes:
    handle, offset, length, mode = struct.unpack_from("<QQQI", request.body)
    server.check("fallocate", server.paths[request.node])
    if mode:
        raise OSError(errno.EOPNOTSUPP, "only plain allocation")
    os.posix_fallocate(handle, offset, length)
    return b""


def _release(server: _Server, request: _Request) -> bytes:
    handle = struct.unpack_from("<Q", request.body)[0]
    if server.files.pop(handle, None) is not None:
        os.close(handle)
    return b""


def _opendir(server: _Server, request: _Request) -> bytes:
    return struct.pack("<QII", 0, 0, 0)


def _readdir(server: _Server, request: _Request) -> bytes:
    _, offset, size = struct.unpack_from("<QQI", request.body)
    found = b""
    names = sorted(os.listdir(server.real(server.paths[request.node])))
    for i, name in enumerate(names[offset:], offset + 1):
        raw = os.fsencode(name)
        item = struct.pack("<QQII", i, i, len(raw), 0) + raw
        item = item.ljust(-(-len(item) // 8) * 8, b"\0")
        if len(found) + len(item) > size:
            break
        found += item
    return found


def _statfs(server: _Server, request: _Request) -> bytes:
    facts = os.statvfs(server.backing)
    free = facts.f_bavail if server.free_bytes is None else server.free_bytes // facts.f_frsize
    return struct.pack(
        "<5Q4I24x", facts.f_blocks, free, free, facts.f_files, facts.f_ffree,
        facts.f_bsize, facts.f_namemax, facts.f_frsize, 0,
    )  # fmt: skip


def _nothing(server: _Server, request: _Request) -> bytes:
    return b""


_UNANSWERED = frozenset([2, 36, 42])  # FORGET, INTERRUPT, BATCH_FORGET
_HANDLERS: dict[int, Callable[[_Server, _Request], bytes]] = {
    1: _lookup,
    3: _getattr,
    4: _setattr,
    9: _mkdir,
    10: _unlink,
    12: _rename,
    14: _open,
    15: _read,
    16: _write,
    17: _statfs,
    18: _release,
    20: _fsync,
    25: _nothing,  # FLUSH
    26: _init,
    27: _opendir,
    28: _readdir,
    29: _nothing,  # RELEASEDIR
    30: _nothing,  # FSYNCDIR
    35: _create,
    43: _fallocate,
    45: lambda server, request: _rename(server, request, skip=16),
}


def _main() -> None:
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        _mount(Path(sys.argv[1]), device)
    except OSError as error:
        print(error.errno or errno.EIO, flush=True)
        return
    print(0, flush=True)
    try:
        _end_with_the_caller()
        _Server(device, Path(sys.argv[2])).serve(sys.stdin)
    finally:
        os.close(device)  # what waits fails
        _unmount(Path(sys.argv[1]))  # whoever mounted it has died


if __name__ == "__main__":
    _main()
