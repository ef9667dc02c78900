"""Pool files and block devices: finding, creating, checking and preallocating them.

A store directory holds `catalog/`, `leases/`, `lock` and, unless other pools are named,
`pool.tutti`. Everything is checked before anything is created, so a refused configuration leaves
nothing behind.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tutti_core.config import StoreConfig
from tutti_core.errors import ConfigError, device_error
from tutti_core.format import DATA_OFFSET_BYTES, POOL_MAGIC, SUPERBLOCK_BYTES, Superblock
from tutti_core.index.catalog import Catalog
from tutti_core.io.transport import Device
from tutti_core.tiers.lease import held_leases

POOL_FILE = "pool.tutti"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where segments lie: segment s is number s // pools of pool s % pools."""

    superblocks: tuple[Superblock, ...]
    paths: tuple[Path, ...]

    @property
    def store_id(self) -> bytes:
        """Identity of the store, common to its pools and its catalog."""
        return self.superblocks[0].store_id

    @property
    def secret(self) -> bytes:
        """Seed of the store's own key chains."""
        return self.superblocks[0].secret

    @property
    def version(self) -> int:
        """Format version of the store."""
        return self.superblocks[0].version

    @property
    def segment_bytes(self) -> int:
        """Size of a segment."""
        return self.superblocks[0].segment_bytes

    @property
    def pool_count(self) -> int:
        """Number of pools."""
        return len(self.paths)

    @property
    def segment_count(self) -> int:
        """Segments over all pools."""
        return self.superblocks[0].segment_count * self.pool_count

    def devices(self) -> tuple[Device, ...]:
        """The pools as a transport wants them."""
        return tuple(
            Device(str(path), DATA_OFFSET_BYTES + s.segment_count * s.segment_bytes)
            for path, s in zip(self.paths, self.superblocks, strict=True)
        )

    def segment_offset_bytes(self, segment: int) -> int:
        """Offset of a segment in its pool."""
        return DATA_OFFSET_BYTES + segment // self.pool_count * self.segment_bytes


def pool_file(place: Path) -> Path:
    """The pool at a configured place: a file in a directory, or the block device itself."""
    return place if place.is_block_device() else place / POOL_FILE


def catalog_folder(path: Path) -> Path:
    """Where the LMDB environment of a store lies."""
    return path / "catalog"


def lease_folder(path: Path) -> Path:
    """Where the lock files of a store's writers lie."""
    return path / "leases"


@contextmanager
def store_lock(path: Path) -> Iterator[None]:
    """Hold the directory's lock: only one process creates, opens or grows a store at a time."""
    descriptor = os.open(
        path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
    )
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child forked meanwhile has a copy
        os.close(descriptor)


def check_directory(path: Path) -> None:
    """See that a directory can be used, or made where there is none. Touches nothing.

    Raises
        ConfigError: not a directory, or not writable.
    """
    nearest = path
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    if not nearest.is_dir():
        raise ConfigError(f"path = {str(path)!r}: {nearest} is not a directory")
    if not os.access(nearest, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(
            f"path = {str(path)!r}: {nearest} is not writable", hint="change its owner or mode"
        )


def prepare_directory(path: Path) -> None:
    """Make a directory of the store where there is none.

    Raises
        ConfigError: it cannot be made or used.
    """
    check_directory(path)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"path = {str(path)!r} cannot be created: {error.strerror}") from None


def inspect_pools(config: StoreConfig) -> list[Superblock | None]:
    """Read the superblock of each configured pool; None where there is none yet. Touches nothing.

    Raises
        ConfigError, UnsupportedError, CorruptionError: see `Superblock.decode`.
    """
    found: list[Superblock | None] = []
    seen: set[str] = set()
    for place in config.pool_paths:
        try:
            file = pool_file(place)
            if os.path.realpath(file) in seen:
                raise ConfigError(f"pools names {place} twice")
            seen.add(os.path.realpath(file))
            if not file.exists():
                found.append(None)
                continue
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                mode = os.fstat(descriptor).st_mode
                if not stat.S_ISREG(mode) and not stat.S_ISBLK(mode):
                    raise ConfigError(f"{file} is neither a file nor a block device")
                data = os.pread(descriptor, SUPERBLOCK_BYTES, 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise ConfigError(f"{place} cannot be read: {error.strerror}") from None
        if place.is_block_device() and data[:8] != POOL_MAGIC:
            found.append(None)  # `_check_devices` decides whether it may become one
        else:
            found.append(Superblock.decode(data, str(file)))
    return found


def open_layout(
    config: StoreConfig, *, create: bool = True, format_devices: bool = False
) -> tuple[Layout, Catalog]:
    """Open the store that `config` describes, creating it where there is none.

    A block device is written for the first time only with `format_devices`, and only if it is not
    mounted or held, has no partitions, and its first and last MiB are zero.

    Raises
        ConfigError: pools and catalog do not belong together, a setting disagrees with the store
            on disk, or there is no store and `create` is false.
    """
    pools = inspect_pools(config)
    has_catalog = (catalog_folder(config.path) / "data.mdb").exists()
    present = sum(pool is not None for pool in pools)
    if present not in (0, len(pools)):
        missing = [
            str(pool_file(p)) for p, s in zip(config.pool_paths, pools, strict=True) if not s
        ]
        raise ConfigError(f"pool {', '.join(missing)} of the store is missing")
    if present and not has_catalog:
        raise ConfigError(
            f"{config.path} has no catalog, but its pools belong to a store",
            hint="name that store's path, or `tutti init --discard` to forget its pages",
        )
    if has_catalog:
        _check_catalog_size(config)
    if not present and not create:
        raise ConfigError(f"there is no store at {config.path}", hint="`tutti init` makes one")
    for pool in pools:
        if pool is not None:
            _check_agreement(config, pool)
    _check_devices(config, pools, format_devices)
    for place in (config.path, *config.pool_paths):
        if not place.is_block_device():
            check_directory(place)
    prepare_directory(config.path)
    with store_lock(config.path):
        # Another process may have created it just now.
        pools = inspect_pools(config)
        folder = catalog_folder(config.path)
        folder.mkdir(mode=0o700, exist_ok=True)
        lease_folder(config.path).mkdir(mode=0o700, exist_ok=True)
        catalog = Catalog(folder, config.catalog_bytes, config.durability == "flush")
        try:
            return _join(config, pools, catalog), catalog
        except BaseException:
            catalog.close()
            raise


def _check_catalog_size(config: StoreConfig) -> None:
    size = (catalog_folder(config.path) / "data.mdb").stat().st_size
    if size > config.catalog_bytes:
        raise ConfigError(
            f"catalog = {config.catalog_bytes} bytes is smaller than the catalog on disk, {size}",
            hint="use a larger `catalog` or `capacity`",
        )


def _check_agreement(config: StoreConfig, pool: Superblock) -> None:
    if pool.pool_count != len(config.pool_paths):
        raise ConfigError(
            f"pools names {len(config.pool_paths)} places; the store has {pool.pool_count}"
        )
    if config.segment is not None and int(config.segment) != pool.segment_bytes:
        raise ConfigError(
            f"segment = {int(config.segment)} bytes; the store was created with "
            f"{pool.segment_bytes}",
            hint="leave the setting out",
        )
    if config.segments_per_pool(DATA_OFFSET_BYTES, pool.segment_bytes) < pool.segment_count:
        need = _capacity_needed(config, pool)
        raise ConfigError(
            f"capacity = {int(config.capacity)} bytes is smaller than the store on disk",
            hint=f"use at least {need} bytes, or `tutti init --discard` to make it anew",
        )


def _capacity_needed(config: StoreConfig, pool: Superblock) -> int:
    return config.capacity_for(
        pool.pool_count * (DATA_OFFSET_BYTES + pool.segment_count * pool.segment_bytes)
    )


def _join(config: StoreConfig, pools: list[Superblock | None], catalog: Catalog) -> Layout:
    """Create or match pools and catalog. The caller holds the store lock."""
    files = tuple(pool_file(place) for place in config.pool_paths)
    known = catalog.superblock()
    found = [pool for pool in pools if pool is not None]
    if not found:
        if known is not None:
            raise ConfigError(
                f"the pools of the store at {config.path} are gone",
                hint="put them back, or `tutti init --discard` to start anew",
            )
        return Layout(_create(config, files, catalog), files)
    if known is None:
        # Created and killed before the catalog was claimed: nothing can be stored in it.
        catalog.set_superblock(found[0])
        known = found[0]
    for index, pool in enumerate(found):
        if (pool.store_id, pool.pool_index) != (known.store_id, index):
            raise ConfigError(
                f"{files[index]} belongs to another store or another place in `pools`",
                hint="name the pools in the order in which the store was created",
            )
    return Layout(_grow(config, found, files), files)


def _create(
    config: StoreConfig, files: tuple[Path, ...], catalog: Catalog
) -> tuple[Superblock, ...]:
    size = config.segment_bytes
    first = Superblock(
        store_id=secrets.token_bytes(16),
        secret=secrets.token_bytes(16),
        pool_index=0,
        pool_count=len(files),
        segment_bytes=size,
        segment_count=min(
            config.segments_per_pool(DATA_OFFSET_BYTES, size),
            *(_device_segments(file, size) for file in files),
        ),
    )
    superblocks = tuple(replace(first, pool_index=i) for i in range(len(files)))
    # A file gets its name when it is complete: a crash leaves no half-made pool behind.
    written: list[tuple[Path, Path]] = []
    try:
        for file, superblock in zip(files, superblocks, strict=True):
            if file.is_block_device():
                _write_pool(file, superblock, os.O_EXCL, config.preallocate == "full")
                continue
            prepare_directory(file.parent)
            if file.exists():
                raise FileExistsError(errno.EEXIST, "created by another store just now")
            draft = file.with_name(f"{file.name}.new")
            written.append((draft, file))
            _write_pool(draft, superblock, os.O_CREAT | os.O_TRUNC, config.preallocate == "full")
        for draft, file in written:
            draft.rename(file)
            _sync_folder(file.parent)
    except OSError as error:
        for draft, _ in written:
            draft.unlink(missing_ok=True)
        raise device_error("create", error.errno or errno.EIO, device=str(file)) from None
    catalog.set_superblock(first)
    return superblocks


def _grow(
    config: StoreConfig, found: list[Superblock], files: tuple[Path, ...]
) -> tuple[Superblock, ...]:
    """Make room for more segments where the capacity was raised."""
    allowed = min(
        config.segments_per_pool(DATA_OFFSET_BYTES, found[0].segment_bytes),
        *(_device_segments(file, found[0].segment_bytes) for file in files),
    )
    if allowed <= min(pool.segment_count for pool in found):  # they differ after a crash in here
        return tuple(found)
    grown = tuple(replace(pool, segment_count=allowed) for pool in found)
    for file, superblock in zip(files, grown, strict=True):
        _write_pool(file, superblock, 0, config.preallocate == "full")
    return grown


def _device_segments(file: Path, segment_bytes: int) -> int:
    """Segments that fit on a block device; a file has no bound of its own."""
    if not file.is_block_device():
        return 1 << 31
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return max(0, (os.lseek(descriptor, 0, os.SEEK_END) - DATA_OFFSET_BYTES) // segment_bytes)
    finally:
        os.close(descriptor)


def _write_pool(file: Path, superblock: Superblock, flags: int, full: bool) -> None:
    """Write a superblock and give the file its size; durable when it returns."""
    size = DATA_OFFSET_BYTES + superblock.segment_count * superblock.segment_bytes
    descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    try:
        if not file.is_block_device():
            if full:
                os.posix_fallocate(descriptor, 0, size)
            else:
                os.truncate(descriptor, size)
                os.posix_fallocate(descriptor, 0, DATA_OFFSET_BYTES)
        os.pwrite(descriptor, superblock.encode(), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def preallocate_segment(layout: Layout, segment: int) -> None:
    """Allocate the blocks of a segment so that writing it cannot run out of space.

    Raises
        OSError: ENOSPC or EDQUOT where the file system is full.
    """
    file = layout.paths[segment % layout.pool_count]
    if file.is_block_device():
        return
    descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.posix_fallocate(descriptor, layout.segment_offset_bytes(segment), layout.segment_bytes)
    finally:
        os.close(descriptor)


# ---- block devices ----
def _check_devices(
    config: StoreConfig, pools: list[Superblock | None], format_devices: bool
) -> None:
    """Refuse a block device that must not be written; nothing was touched so far."""
    for place, pool in zip(config.pool_paths, pools, strict=True):
        if pool is not None or not place.is_block_device():
            continue
        if not format_devices:
            raise ConfigError(
                f"{place} is a block device without a Tutti superblock",
                hint="`tutti init --format-device` writes one after checking that it is unused",
            )
        reason = _why_in_use(place)
        if reason:
            raise ConfigError(f"{place} is not taken: {reason}", hint="wipe it if it is yours")
        if _device_segments(place, config.segment_bytes) < 1:
            raise ConfigError(f"{place} is smaller than one segment, {config.segment_bytes} bytes")


def _why_in_use(place: Path) -> str:
    """Why a block device must not be written, or "" when it looks unused."""
    device = os.stat(place).st_rdev
    sysfs = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    if any((sysfs / "holders").glob("*")):
        return "another device is built on it"
    if any(child.joinpath("partition").exists() for child in sysfs.glob("*")):
        return "it has partitions"
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_EXCL | os.O_CLOEXEC)
    except OSError as error:
        return f"it is mounted or in use ({error.strerror})"
    try:
        size = os.lseek(descriptor, 0, os.SEEK_END)
        edge = min(DATA_OFFSET_BYTES, size)
        if any(os.pread(descriptor, edge, 0)) or any(os.pread(descriptor, edge, size - edge)):
            return "its first or last MiB is not empty"
    finally:
        os.close(descriptor)
    return ""


def discard_store(config: StoreConfig) -> None:
    """Forget a store: remove its catalog and those of its pools that carry our magic number.

    Raises
        ConfigError: a process has the store open, or a pool is not ours; nothing was touched.
    """
    held = held_leases(lease_folder(config.path))
    if held:
        raise ConfigError(f"the store at {config.path} is open in {len(held)} process(es)")
    files = [pool_file(place) for place in config.pool_paths]
    ours = [file for file in files if file.exists()]
    for file in ours:
        if not _has_magic(file):
            raise ConfigError(f"{file} is not a Tutti pool; it is left alone")
    for file in ours:
        if file.is_block_device():
            with open(file, "r+b") as device:
                device.write(bytes(DATA_OFFSET_BYTES))
        else:
            file.unlink()
    folder = catalog_folder(config.path)
    for name in ("data.mdb", "lock.mdb"):
        (folder / name).unlink(missing_ok=True)


def _has_magic(file: Path) -> bool:
    with open(file, "rb") as stream:
        return stream.read(len(POOL_MAGIC)) == POOL_MAGIC
