"""Guards block devices that hold pages: that it is the disk that was meant, and nobody else's.

The name of a device node may stand for another disk after the next start. So a device is named by
its link in /dev/disk/by-id, or its serial number is given as well. Before it is written, and each
time it is opened, all signs of another use are looked for; before the first write of all, it has to
be blank besides.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import subprocess
import time
from pathlib import Path

from tutti_core.errors import ConfigError
from tutti_core.format import DATA_OFFSET_BYTES, SUPERBLOCK_BYTES

BY_ID = Path("/dev/disk/by-id")
SYSFS = Path("/sys/dev/block")
SWAPS = Path("/proc/swaps")

_SERIAL_FILES = (
    "device/serial",  # NVMe
    "serial",  # virtio
    "wwid",
    "device/wwid",
    "dm/uuid",
    "md/uuid",
    "loop/backing_file",
)
_VPD_SERIAL = "device/vpd_pg80"  # SCSI: four bytes of header, then the unit's serial number
_SYSTEM_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"
_BLKID_FOUND = (0, 8)  # 8: several that exclude each other
_BLKID_TIMEOUT_S = 20.0
_CLAIM_ATTEMPTS = 5
_CLAIM_PAUSE_S = 0.02


def sysfs_of(device: Path) -> Path:
    """Where the kernel describes a device node."""
    number = os.stat(device).st_rdev
    return SYSFS / f"{os.major(number)}:{os.minor(number)}"


def serials_of(device: Path) -> tuple[str, ...]:
    """What tells this disk from others for good: serial number, world-wide name, or the like.

    Those of a partition are its disk's with `-part` and its number.
    """
    folder = sysfs_of(device)
    part = _text(folder / "partition")
    whole = Path(os.path.realpath(folder)).parent if part else folder
    found = [_text(whole / name) for name in _SERIAL_FILES]
    found.append(_printable(_bytes(whole / _VPD_SERIAL)[4:]))
    suffix = f"-part{part}" if part else ""
    return tuple(dict.fromkeys(name + suffix for name in found if name))


def check_identity(place: Path, device: Path, serial: str) -> None:
    """See that a device is the one that was meant.

    Parameters
        place: as configured. device: its node. serial: as configured, or "".
    Raises
        ConfigError: it is another one, or nothing says which one was meant.
    """
    known = serials_of(device)
    if serial and serial not in known:
        raise ConfigError(
            f"{place} is another disk: its serial number is {_either(known)}, not {serial!r}",
            device=str(place),
            hint="name the disk by its link in /dev/disk/by-id",
        )
    if serial or place.parent == BY_ID:
        return
    hint = f"use its link in {BY_ID}, or give its serial number (`serials`, --serial)"
    if known:
        hint += f"; it is {_either(known)}"
    raise ConfigError(
        f"{place} is a name that another disk may have tomorrow", device=str(place), hint=hint
    )


def why_in_use(device: Path) -> str:
    """Why a block device must not be written, by what the kernel knows; "" when nobody uses it.

    Processes of one store may use it together; none of what is looked for is theirs.
    """
    folder = sysfs_of(device)
    if any((folder / "holders").glob("*")):
        return "another device is built on it"
    if any(child.joinpath("partition").exists() for child in folder.glob("*")):
        return "it has partitions"
    if _text(folder / "ro") == "1":
        return "it is read-only"
    if _is_swap(device):
        return "it is swap space"
    for attempt in range(_CLAIM_ATTEMPTS):
        try:
            descriptor = os.open(device, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.EBUSY or attempt + 1 == _CLAIM_ATTEMPTS:
                return f"it is mounted or in use ({error.strerror})"
            time.sleep(_CLAIM_PAUSE_S)  # another process of the store may be asking the same
        else:
            os.close(descriptor)
            break
    return ""


def why_not_blank(device: Path) -> str:
    """What lies on a device that is to be taken, or "" where nothing is found."""
    with open(device, "rb", buffering=0) as stream:
        size = stream.seek(0, os.SEEK_END)
        edge = min(DATA_OFFSET_BYTES, size)
        for offset in (0, size - edge):
            if any(os.pread(stream.fileno(), edge, offset)):
                found = _signature(device)
                return f"it holds {found}" if found else "its first or last MiB is not empty"
    found = _signature(device)
    return f"it holds {found}" if found else ""


def why_not_ours(descriptor: int) -> str:
    """What else lies where a pool has zeros, of a device that begins with our superblock."""
    length = DATA_OFFSET_BYTES - SUPERBLOCK_BYTES
    if any(os.pread(descriptor, length, SUPERBLOCK_BYTES)):
        return "somebody else has written behind its superblock"
    return ""


def _signature(device: Path) -> str:
    """What blkid finds: a file system, RAID, volume manager or table of partitions; "" if nothing.

    Where there is no blkid, only the ends of the device were looked at, where most of them are.
    """
    program = shutil.which("blkid", path=_SYSTEM_PATH)
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "-p", "-o", "export", str(device)],
            capture_output=True,
            timeout=_BLKID_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "something that blkid cannot read"
    if done.returncode not in _BLKID_FOUND:
        return ""
    found = re.findall(r"^(?:TYPE|PTTYPE)=(\S+)$", done.stdout.decode(errors="replace"), re.M)
    return " and ".join(found) or "several signatures"


def _is_swap(device: Path) -> bool:
    number = os.stat(device).st_rdev
    for line in _bytes(SWAPS).decode(errors="replace").splitlines()[1:]:
        name = line.split(" ")[0].split("\t")[0]
        try:
            status = os.stat(name)
        except OSError:
            continue
        if stat.S_ISBLK(status.st_mode) and status.st_rdev == number:
            return True
    return False


def _either(names: tuple[str, ...]) -> str:
    return " or ".join(map(repr, names)) if names else "not known"


def _text(file: Path) -> str:
    return _printable(_bytes(file))


def _printable(data: bytes) -> str:
    return data.decode(errors="replace").strip(" \t\r\n\0")


def _bytes(file: Path) -> bytes:
    """Content of a small file of the kernel's; empty where there is none."""
    try:
        return file.read_bytes()
    except OSError:
        return b""
