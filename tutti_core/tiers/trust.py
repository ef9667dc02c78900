"""Whose paths and files these are: refuses what another user could redirect, replace or change.

A path is gone down from the root, one directory at a time, each opened from the one above it and
looked at by its descriptor. A directory that belongs to us, root or the owner of `/`, and that
nobody else may write, cannot have its entries exchanged by others; in one with the sticky bit, such
as /tmp, the same holds for entries that are ours or root's. So what was found once stays found, and
the path can be used by name afterwards. Files are looked at by descriptor, too, once they are open.

`trusting` leaves owners and modes unseen, for volumes that a platform hands over with owners and
modes of its own; what kind of thing a name stands for is checked all the same.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tutti_core.errors import ConfigError

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600

_LINKS_MAX = 40  # as many as the kernel follows
_CREATE_ATTEMPTS_MAX = 8
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MISFITS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a block device",
    stat.S_IFCHR: "a character device",
}
_OPTION = "set trust_path if whoever can is trusted (docs/security.md)"


@dataclass(frozen=True, slots=True)
class Place:
    """How far a path exists.

    path      the real path of what exists of it, without symbolic links.
    missing   whether directories of it are missing.
    """

    path: Path
    missing: bool


# ---- directories ----
def check_directory(path: Path, *, trusting: bool = False) -> Place:
    """See that nobody but us and root decides what lies at `path`. Touches nothing.

    Parameters
        path: a directory, or where one is to be made.
    Returns
        what exists of it; it may be a file, where a directory is needed.
    Raises
        ConfigError: a directory on the way belongs to, or may be written by, somebody else; a
            symbolic link is somebody else's, or lies in such a directory, or is the last part; or
            the path cannot be gone down.
    Cost       a few system calls for each part of the path.
    """
    with _worded(path, "used"):
        return _Walk(path, trusting).go(create=False)


def make_directory(path: Path, *, trusting: bool = False) -> Path:
    """Make a directory, and those above it, with mode 0700 whatever the umask; it may exist.

    Raises
        ConfigError: as `check_directory`, or it cannot be made.
    """
    with _worded(path, "created"):
        return _Walk(path, trusting).go(create=True).path


def real_device(path: Path, *, trusting: bool = False) -> Path:
    """Return the path of the device node that `path` leads to; links are followed as in /dev/disk.

    Raises
        ConfigError: as `check_directory`, but the last part may be a link.
    """
    with _worded(path, "used"):
        return _Walk(path, trusting, last_may_link=True).go(create=False).path


@contextmanager
def _worded(path: Path, what: str) -> Iterator[None]:
    """Make what the system says of a path an error that names it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"path = {str(path)!r} cannot be {what}: {error.strerror}", device=str(path)
        ) from None
    except ValueError as error:  # a zero byte in it
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"path = {str(path)!r} cannot be {what}: {error}") from None


class _Walk:
    """Goes down one path."""

    def __init__(self, path: Path, trusting: bool, last_may_link: bool = False) -> None:
        self._asked = path
        self._trusting = trusting
        self._last_may_link = last_may_link
        self._parts = deque(path.absolute().parts[1:])
        self._links = 0
        self._trusted = {0, os.geteuid()}

    def go(self, create: bool) -> Place:
        """Go as far as the path exists, or to its end if `create`."""
        here, at = _open_directory("/"), Path("/")
        try:
            owner = os.fstat(here).st_uid
            while self._parts:
                self._check_passage(os.fstat(here), at, owner)
                name = self._parts.popleft()
                try:
                    below = _open_entry(name, here)
                except FileNotFoundError:
                    if not create:
                        return Place(at, missing=True)
                    below = _make_entry(name, here)
                try:
                    status = os.fstat(below)
                    if stat.S_ISLNK(status.st_mode):
                        target = os.readlink("", dir_fd=below)
                        self._follow(status, os.fstat(here), at / name, target)
                        if target.startswith("/"):
                            here, at = self._move(here, _open_directory("/")), Path("/")
                        continue
                    if self._is_shared(os.fstat(here)) and status.st_uid not in self._trusted:
                        raise self._foreign(status, at / name)
                    here, below = below, here
                    at = at.parent if name == ".." else at / name
                finally:
                    os.close(below)
                if not stat.S_ISDIR(status.st_mode):
                    if self._parts:
                        self._parts.clear()
                        return Place(at, missing=True)
                    return Place(at, missing=False)
            self._check_end(os.fstat(here), at)
            return Place(at, missing=False)
        finally:
            os.close(here)

    @staticmethod
    def _move(old: int, new: int) -> int:
        os.close(old)
        return new

    def _is_shared(self, status: os.stat_result) -> bool:
        """Whether others may add entries to a directory."""
        return not self._trusting and bool(_others_write(status))

    def _check_passage(self, status: os.stat_result, at: Path, root_owner: int) -> None:
        """A directory on the way: others must not be able to exchange what is in it."""
        if self._trusting:
            return
        # Who owns `/` owns this program as well; in a user namespace that may be an unmapped root.
        if status.st_uid not in self._trusted | {root_owner}:
            raise self._foreign(status, at)
        if _others_write(status) and not status.st_mode & stat.S_ISVTX:
            raise self._error(
                f"{at} may be written by others, who could exchange what is in it",
                f"`chmod {_who(status)}-w {at}`, or `chmod +t {at}`, or {_OPTION}",
            )

    def _check_end(self, status: os.stat_result, at: Path) -> None:
        """The directory itself: nobody else's, and nobody else may write to it."""
        if self._trusting:
            return
        if status.st_uid not in self._trusted:
            raise self._foreign(status, at)
        if _others_write(status):
            if status.st_mode & stat.S_ISVTX:
                hint = f"name a directory of its own, such as {at / 'tutti'}"
            else:
                hint = f"`chmod {_who(status)}-w {at}`, or {_OPTION}"
            raise self._error(f"{at} may be written by others", hint)

    def _follow(
        self, link: os.stat_result, directory: os.stat_result, at: Path, target: str
    ) -> None:
        """Put the target of a link in its place, if it may be followed."""
        if not self._parts and not self._last_may_link:
            raise self._error(
                f"{at} is a symbolic link",
                f"name the directory itself: {os.path.normpath(at.parent / target)}",
            )
        if self._is_shared(directory):
            raise self._error(
                f"{at} is a symbolic link in a directory that others may write",
                f"name what it leads to: {os.path.normpath(at.parent / target)}",
            )
        if not self._trusting and link.st_uid not in self._trusted:
            raise self._foreign(link, at)
        self._links += 1
        if self._links > _LINKS_MAX:
            raise self._error(f"{at}: more than {_LINKS_MAX} symbolic links", "name the directory")
        self._parts.extendleft(reversed([part for part in target.split("/") if part]))

    def _foreign(self, status: os.stat_result, at: Path) -> ConfigError:
        return self._error(
            f"{at} belongs to user {status.st_uid}, and this is user {os.geteuid()}",
            f"`chown {os.geteuid()} {at}`, or run as its owner, or {_OPTION}",
        )

    def _error(self, what: str, hint: str) -> ConfigError:
        return ConfigError(
            f"path = {str(self._asked)!r}: {what}", device=str(self._asked), hint=hint
        )


def _open_directory(name: str, above: int | None = None) -> int:
    flags = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:  # an open that reads makes an automounter mount; a path alone does not
        return os.open(name, os.O_RDONLY | flags, dir_fd=above)
    except PermissionError:
        return os.open(name, os.O_PATH | flags, dir_fd=above)


def _open_entry(name: str, above: int) -> int:
    """Open whatever a directory has under a name, without following or reading it."""
    try:
        return _open_directory(name, above)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise
        return os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)


def _make_entry(name: str, above: int) -> int:
    """Make a directory and open it; one that somebody else makes just now is opened as it is."""
    try:
        os.mkdir(name, DIRECTORY_MODE, dir_fd=above)
    except FileExistsError:
        return _open_entry(name, above)
    _sync_directory(above)
    below = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above)
    try:
        if os.fstat(below).st_mode & 0o777 != DIRECTORY_MODE:  # the umask took some of it
            os.chmod(f"/proc/self/fd/{below}", DIRECTORY_MODE)
        return _open_entry(".", below)
    finally:
        os.close(below)


def _sync_directory(descriptor: int) -> None:
    """Make a new name in a directory durable; one that we may not read is left to the system."""
    try:
        readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=descriptor)
    except PermissionError:
        return
    try:
        os.fsync(readable)
    finally:
        os.close(readable)


# ---- files ----
def open_file(path: Path, flags: int, *, create: bool = False, trusting: bool = False) -> int:
    """Open a file of a store's own, in a directory that was checked.

    Parameters
        create: make it with mode 0600, whatever the umask, where there is none.
    Returns
        its descriptor. Nothing blocks on what is no file, and no link is followed.
    Raises
        ConfigError: it is no file, has a second name, or is somebody else's; see `check_file`.
        OSError: the file system refused.
    """
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    for _ in range(_CREATE_ATTEMPTS_MAX if create else 1):
        if create:
            try:
                descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, FILE_MODE)
            except FileExistsError:
                pass
            else:
                os.fchmod(descriptor, FILE_MODE)
                return descriptor
        check_file(path, trusting=trusting)
        try:
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            if create:
                continue  # removed just now
            raise
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # a link or a socket since the look
                check_status(os.lstat(path), path, trusting=trusting)
            raise
        try:
            check_status(os.fstat(descriptor), path, trusting=trusting)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor
    raise ConfigError(f"{path} comes and goes", hint="see who removes it")


def check_file(path: Path, *, trusting: bool = False) -> bool:
    """Look at a file of a store without opening it for use; returns whether there is one.

    Raises
        ConfigError: something else than a file has its name, it has a second name, belongs to
            somebody else, or may be written by others.
    """
    try:
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        check_status(os.fstat(descriptor), path, trusting=trusting)
    finally:
        os.close(descriptor)
    return True


def check_status(status: os.stat_result, path: Path, *, trusting: bool = False) -> None:
    """Judge a file that is open by its status. Raises ConfigError, see `check_file`."""
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        what = _MISFITS.get(kind, "no file")
        raise ConfigError(
            f"{path} is {what}, where a file of the store belongs",
            device=str(path),
            hint="move it away, or name another path",
        )
    if status.st_nlink > 1:
        raise ConfigError(
            f"{path} has {status.st_nlink} names (hard links): who writes to one changes the other",
            device=str(path),
            hint="remove the other names, or copy the file and put the copy in its place",
        )
    if trusting:
        return
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{path} belongs to user {status.st_uid}, and this is user {os.geteuid()}",
            device=str(path),
            hint=f"`chown {os.geteuid()} {path}`, or run as its owner, or {_OPTION}",
        )
    if _others_write(status):
        raise ConfigError(
            f"{path} may be written by others",
            device=str(path),
            hint=f"`chmod {_who(status)}-w {path}`, or {_OPTION}",
        )


def _others_write(status: os.stat_result) -> int:
    """Which others than the owner may write, as bits of the mode."""
    others = status.st_mode & _OTHERS_WRITE
    if others & stat.S_IWGRP and _is_own_group(status):
        others &= ~stat.S_IWGRP
    return others


def _is_own_group(status: os.stat_result) -> bool:
    """Whether the group of something of ours is the one that only we are in.

    Many systems give each user such a group, by the user's name, and a umask that lets it write.
    """
    if status.st_uid != os.geteuid() or status.st_uid == 0:
        return False
    try:
        user, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    alone = set(group.gr_mem) <= {user.pw_name}
    return alone and group.gr_gid == user.pw_gid and group.gr_name == user.pw_name


def _who(status: os.stat_result) -> str:
    """For chmod: who else may write."""
    others = _others_write(status)
    return ("g" if others & stat.S_IWGRP else "") + ("o" if others & stat.S_IWOTH else "")
