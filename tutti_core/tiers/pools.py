"""Pool files and block devices: finding, creating, checking and preallocating them.

A store directory holds `catalog/`, `leases/`, `lock` and, unless other pools are named,
`pool.tutti`. Everything is checked before anything is created, so a refused configuration leaves
nothing behind. Whose paths and files may be used is `trust`'s rule, which disks `block_device`'s.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tutti_core.config import StoreConfig
from tutti_core.errors import (
    BusyError,
    ConfigError,
    CorruptionError,
    TuttiError,
    device_error,
)
from tutti_core.format import (
    DATA_OFFSET_BYTES,
    POOL_MAGIC,
    REPAIR_HINT,
    SUPERBLOCK_BYTES,
    TRAILER_BYTES,
    Superblock,
)
from tutti_core.index.catalog import DATABASES, Catalog
from tutti_core.index.tree_check import check_tree
from tutti_core.io.transport import BLOCK_BYTES, Device
from tutti_core.tiers import block_device, trust
from tutti_core.tiers.encryption import Keyring, MasterKey, find_key, keyring_for
from tutti_core.tiers.free_space import check_free
from tutti_core.tiers.lease import held_leases

POOL_FILE = "pool.tutti"
LOCK_TIMEOUT_S = 60.0
"""How long to wait for another process that creates, opens or grows the store."""

_LOCK_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Layout:
    """Where segments lie: segment s is number s // pools of pool s % pools.

    keyring   of an encrypted store that was opened with its key.
    keep_free_bytes     what a pool's file system must have left; see free_space.py.
    """

    superblocks: tuple[Superblock, ...]
    paths: tuple[Path, ...]
    keyring: Keyring | None = field(default=None, compare=False, repr=False)
    keep_free_bytes: int | None = None

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
    def trailer_bytes(self) -> int:
        """What each page, or each part of one, is stored with: of an encrypted store, a trailer."""
        return TRAILER_BYTES if self.superblocks[0].key_check else 0

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
    """The pool at a configured place: a file in a directory, or the node of the block device.

    Absolute, so that it means the same after a change of the working directory.
    """
    if place.is_block_device():
        return Path(os.path.realpath(place))
    return place.absolute() / POOL_FILE


def catalog_folder(path: Path) -> Path:
    """Where the LMDB environment of a store lies."""
    return path.absolute() / "catalog"


def lease_folder(path: Path) -> Path:
    """Where the lock files of a store's writers lie."""
    return path.absolute() / "leases"


@contextmanager
def store_lock(path: Path, timeout_s: float | None = None) -> Iterator[None]:
    """Hold the directory's lock: only one process creates, opens or grows a store at a time.

    Parameters
        timeout_s: how long to wait for it; default LOCK_TIMEOUT_S.
    Raises
        BusyError: another process held it all the while.
        ConfigError: what has its name is no file of ours.
    """
    wait_s = LOCK_TIMEOUT_S if timeout_s is None else timeout_s
    try:
        descriptor = trust.open_file(path / "lock", os.O_RDWR, create=True, trusting=True)
    except OSError as error:
        raise device_error("open", error.errno or errno.EIO, device=str(path / "lock")) from None
    try:
        deadline_s = time.monotonic() + wait_s
        while not _try_lock(descriptor):
            if time.monotonic() >= deadline_s:
                raise BusyError(
                    f"another process has been creating, opening or repairing the store at {path} "
                    f"for {wait_s:g} s",
                    op="open",
                    device=str(path),
                    retryable=True,
                    hint="wait until it is done, or stop it",
                )
            time.sleep(_LOCK_POLL_S)
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child forked meanwhile has a copy
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def check_directory(path: Path, *, trusting: bool = False) -> None:
    """See that a directory can be used, or made where there is none. Touches nothing.

    Raises
        ConfigError: not a directory, not writable, or not ours alone (see `trust`).
    """
    nearest = trust.check_directory(path, trusting=trusting).path
    if not nearest.is_dir():
        raise ConfigError(
            f"path = {str(path)!r}: {nearest} is not a directory",
            hint="name another path, or move it away",
        )
    if not os.access(nearest, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(
            f"path = {str(path)!r}: {nearest} is not writable", hint="change its owner or mode"
        )


def prepare_directory(path: Path, *, trusting: bool = False) -> None:
    """Make a directory of the store where there is none, with mode 0700 whatever the umask.

    Raises
        ConfigError: it cannot be made or used.
    """
    check_directory(path, trusting=trusting)
    trust.make_directory(path, trusting=trusting)


def check_catalog(path: Path, *, trusting: bool = False) -> None:
    """See that the catalog and the lock files of a store are ours alone, as far as they exist.

    LMDB opens its files by name; what is found here cannot be exchanged by others afterwards.

    Raises
        ConfigError: see `trust`.
    """
    if trust.check_directory(path, trusting=trusting).missing:
        return
    files = [path / "lock"]
    for folder, names in (
        (catalog_folder(path), ("data.mdb", "lock.mdb")),
        (lease_folder(path), None),
    ):
        _check_inner_directory(folder, trusting)
        if folder.is_dir():
            files += [folder / name for name in names] if names else sorted(folder.glob("*.lock"))
    for file in files:
        trust.check_file(file, trusting=trusting)


def _check_inner_directory(folder: Path, trusting: bool) -> None:
    found = trust.check_directory(folder, trusting=trusting)
    if not found.missing and not found.path.is_dir():
        raise ConfigError(
            f"{folder} is no directory",
            device=str(folder),
            hint="move it away, or name another path",
        )


def inspect_pools(config: StoreConfig) -> list[Superblock | None]:
    """Read the superblock of each configured pool; None where there is none yet. Touches nothing.

    Raises
        ConfigError: a pool or its place is not ours alone (see `trust`), or is no pool.
        UnsupportedError, CorruptionError: see `Superblock.decode`.
    """
    found: list[Superblock | None] = []
    seen: set[str] = set()
    for place in config.pool_paths:
        try:
            if place.is_block_device():
                file = trust.real_device(place, trusting=config.trust_path)
            else:
                trust.check_directory(place, trusting=config.trust_path)
                file = pool_file(place)
            if os.path.realpath(file) in seen:
                raise ConfigError(f"pools names {place} twice")
            seen.add(os.path.realpath(file))
            found.append(_read_superblock(file, config.trust_path))
        except OSError as error:
            raise ConfigError(f"{place} cannot be read: {error.strerror}") from None
    return found


def _read_superblock(file: Path, trusting: bool) -> Superblock | None:
    """The superblock of one pool; None where there is no file, or a device has none."""
    is_device = file.is_block_device()
    if is_device:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(file, flags)
    elif not trust.check_file(file, trusting=trusting):
        return None
    else:
        descriptor = trust.open_file(file, os.O_RDONLY, trusting=trusting)
    try:
        data = os.pread(descriptor, SUPERBLOCK_BYTES, 0)
    finally:
        os.close(descriptor)
    if is_device and data[:8] != POOL_MAGIC:
        return None  # `_check_devices` decides whether it may become one
    try:
        return Superblock.decode(data, str(file))
    except CorruptionError:
        draft = _read_draft(file, trusting)
        if draft is None or not _differs_in_size_only(data, draft):
            raise
        return draft  # the power went while the store grew; `_end_cut_off` writes it again


def open_layout(
    config: StoreConfig, *, create: bool = True, format_devices: bool = False
) -> tuple[Layout, Catalog]:
    """Open the store that `config` describes, creating it where there is none.

    A block device is used only if it is the one that was meant and nobody else uses it, and written
    for the first time only with `format_devices` and if it is blank; see `block_device`.

    Raises
        ConfigError: pools and catalog do not belong together, a setting disagrees with the store
            on disk, there is no store and `create` is false, or a path, file or device is not ours
            alone.
        BusyError: another process creates, opens or repairs the store for longer than
            LOCK_TIMEOUT_S.
    """
    trusting = config.trust_path
    check_catalog(config.path, trusting=trusting)
    pools = inspect_pools(config)
    has_catalog = (catalog_folder(config.path) / "data.mdb").exists()
    present = sum(pool is not None for pool in pools)
    _drafts_of_missing(config, pools)
    if present and not has_catalog:
        raise ConfigError(
            f"{config.path} has no catalog, but its pools belong to a store",
            hint="name that store's path, or `tutti init --discard` to forget its pages",
        )
    if has_catalog:
        _check_catalog_size(config)
    if not present and not create:
        raise ConfigError(f"there is no store at {config.path}", hint="`tutti init` makes one")
    key = find_key(config)
    for pool in pools:
        if pool is not None:
            _check_agreement(config, pool)
            keyring_for(key, pool, f"the store at {config.path}")
    _check_devices(config, pools, format_devices)
    for place in (config.path, *config.pool_paths):
        if not place.is_block_device():
            check_directory(place, trusting=trusting)
    prepare_directory(config.path, trusting=trusting)
    with store_lock(config.path):
        # Another process may have created it just now.
        pools = _end_cut_off(config, inspect_pools(config))
        _check_devices(config, pools, format_devices)
        folder = catalog_folder(config.path)
        if any(pools) and not present and not (folder / "data.mdb").exists():
            raise ConfigError(
                f"the pools of {config.path} were made just now by another store",
                hint="give each store pools of its own",
            )
        if not any(pools):
            _drop_unborn_catalog(folder / "data.mdb")
        _make_folders(config.path, trusting)
        _check_tree(config, pools)
        catalog = Catalog(folder, config.catalog_bytes, config.durability == "flush")
        try:
            return _join(config, pools, catalog, key), catalog
        except BaseException:
            catalog.close()
            raise


def _draft_of(file: Path) -> Path:
    """Where a pool, or its next superblock, is until it is complete."""
    return file.with_name(f"{file.name}.new")


def _drafts_of_missing(
    config: StoreConfig, pools: list[Superblock | None]
) -> list[tuple[Path, Path]]:
    """Drafts and names of the pools that are missing; none where all or none are there.

    A creation that is cut off between its renames leaves complete drafts of the others.

    Raises
        ConfigError: a pool is missing, and there is no draft of it that belongs to the others.
    """
    present = [pool for pool in pools if pool is not None]
    if len(present) in (0, len(pools)):
        return []
    drafts, missing = [], []
    for index, (place, pool) in enumerate(zip(config.pool_paths, pools, strict=True)):
        if pool is None:
            file = pool_file(place)
            if _read_draft(file, config.trust_path) == replace(present[0], pool_index=index):
                drafts.append((_draft_of(file), file))
            else:
                missing.append(str(file))
    if missing:
        raise ConfigError(
            f"pool {', '.join(missing)} of the store is missing",
            hint="put it back, or `tutti init --discard` to start anew",
        )
    return drafts


def _read_draft(file: Path, trusting: bool) -> Superblock | None:
    """The superblock in the draft of a pool file; None where there is none that is whole."""
    try:
        if file.is_block_device() or not trust.check_file(_draft_of(file), trusting=trusting):
            return None
        with open(_draft_of(file), "rb") as stream:
            return Superblock.decode(stream.read(SUPERBLOCK_BYTES), str(_draft_of(file)))
    except (TuttiError, OSError):
        return None


def _end_cut_off(config: StoreConfig, pools: list[Superblock | None]) -> list[Superblock | None]:
    """End a creation or a growth that was cut off; returns the pools as they are then.

    Raises
        ConfigError: see `_drafts_of_missing`.
        DeviceError: the file system refused.
    """
    drafts = _drafts_of_missing(config, pools)
    try:
        for draft, file in drafts:
            draft.rename(file)
            _sync_folder(file.parent)
        if drafts:
            pools = inspect_pools(config)
        for place, pool in zip(config.pool_paths, pools, strict=True):
            file = pool_file(place)
            if pool is not None and not file.is_block_device() and _draft_of(file).exists():
                _write_superblock(file, pool)
                _draft_of(file).unlink()
    except OSError as error:
        raise device_error("open", error.errno or errno.EIO, device=str(config.path)) from None
    return pools


def _make_folders(path: Path, trusting: bool) -> None:
    """Make the directories in a store's, and the catalog's files with our mode: LMDB has the umask.

    Raises
        DeviceError: the file system refused.
    """
    try:
        trust.make_directory(lease_folder(path), trusting=trusting)
        folder = trust.make_directory(catalog_folder(path), trusting=trusting)
        for name in ("data.mdb", "lock.mdb"):
            os.close(trust.open_file(folder / name, os.O_RDWR, create=True, trusting=trusting))
    except OSError as error:
        raise device_error("open", error.errno or errno.EIO, device=str(path)) from None


def _check_tree(config: StoreConfig, pools: list[Superblock | None]) -> None:
    """See that LMDB can use the catalog; whoever has the store open now did so before."""
    data = catalog_folder(config.path) / "data.mdb"
    used = data.stat().st_size > 0 or any(pools)  # a file that was just made is empty
    if used and not held_leases(lease_folder(config.path)):
        check_tree(data, DATABASES)


def _drop_unborn_catalog(file: Path) -> None:
    """Remove a catalog that a power loss during its creation left without its first two pages.

    They are synced with the first commit, before there are pools: nothing was stored yet.
    """
    if file.exists():
        with open(file, "rb") as stream:
            first_pages = [stream.read(BLOCK_BYTES) for _ in range(2)]
        if not all(map(any, first_pages)):
            file.unlink()


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


def _join(
    config: StoreConfig,
    pools: list[Superblock | None],
    catalog: Catalog,
    key: MasterKey | None,
) -> Layout:
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
        with _sole_maker(files):
            created = _create(config, files, catalog, key)
        keyring = keyring_for(key, created[0], str(config.path))
        return Layout(created, files, keyring, config.keep_free)
    if known is None and catalog.record_count():
        raise CorruptionError(
            f"the catalog of {config.path} has pages and no superblock",
            op="open",
            device=str(config.path),
            scope="store",
            hint=REPAIR_HINT,
        )
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
    keyrings = [keyring_for(key, pool, f"the store at {config.path}") for pool in found]
    return Layout(_grow(config, found, files), files, keyrings[0], config.keep_free)


@contextmanager
def _sole_maker(files: tuple[Path, ...]) -> Iterator[None]:
    """Let no store in another directory make its pools at the same places meanwhile.

    Raises
        ConfigError: one is at it.
    """
    with ExitStack() as locks:
        for folder in {file.parent for file in files if not file.is_block_device()}:
            if not folder.is_dir():  # it is made for this store
                continue
            try:
                descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError as error:
                raise device_error("open", error.errno or errno.EIO, device=str(folder)) from None
            locks.callback(os.close, descriptor)
            if not _try_lock(descriptor):
                raise ConfigError(
                    f"another store is being made in {folder}",
                    device=str(folder),
                    hint="give each store pools of its own",
                )
        yield


def _create(
    config: StoreConfig, files: tuple[Path, ...], catalog: Catalog, key: MasterKey | None
) -> tuple[Superblock, ...]:
    size, store_id = config.segment_bytes, secrets.token_bytes(16)
    first = Superblock(
        store_id=store_id,
        secret=secrets.token_bytes(16),
        pool_index=0,
        pool_count=len(files),
        segment_bytes=size,
        segment_count=min(
            config.segments_per_pool(DATA_OFFSET_BYTES, size),
            *(_device_segments(file, size) for file in files),
        ),
        key_check=b"" if key is None else Keyring(key, store_id).check,
    )
    superblocks = tuple(replace(first, pool_index=i) for i in range(len(files)))
    # A file gets its name when it is complete: a crash leaves no half-made pool behind.
    written: list[tuple[Path, Path]] = []
    try:
        for file, superblock in zip(files, superblocks, strict=True):
            if file.is_block_device():
                _write_pool(file, superblock, os.O_EXCL, config.preallocate == "full")
                continue
            prepare_directory(file.parent, trusting=config.trust_path)
            if os.path.lexists(file):
                raise FileExistsError(errno.EEXIST, "created by another store just now")
            draft = _draft_of(file)
            draft.unlink(missing_ok=True)  # writing to whatever it is could change something else
            written.append((draft, file))
            _write_pool(draft, superblock, os.O_CREAT | os.O_EXCL, config.preallocate == "full")
        # A power loss may take names back. So that it leaves what can be opened, the catalog's are
        # durable before there is a pool, and all drafts are before one of them is renamed.
        _sync_folder(catalog_folder(config.path))
        for draft, _ in written:
            _sync_folder(draft.parent)
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
        if file.is_block_device():
            _write_pool(file, superblock, 0, config.preallocate == "full")
            continue
        # The draft is what a power loss that tears the superblock is mended with.
        draft = _draft_of(file)
        draft.unlink(missing_ok=True)
        _write_superblock(draft, superblock, os.O_CREAT | os.O_EXCL)
        _sync_folder(draft.parent)
        _write_pool(file, superblock, 0, config.preallocate == "full")
        draft.unlink()
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
    descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, trust.FILE_MODE)
    try:
        if flags & os.O_CREAT:
            os.fchmod(descriptor, trust.FILE_MODE)  # whatever the umask
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


def _differs_in_size_only(data: bytes, superblock: Superblock) -> bool:
    """Whether damaged bytes are a superblock's but for its segment count and its check."""
    whole = superblock.encode()
    return len(data) == len(whole) and data[:64] + data[72:-8] == whole[:64] + whole[72:-8]


def _write_superblock(file: Path, superblock: Superblock, flags: int = 0) -> None:
    """Write a superblock alone; durable when it returns."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags, trust.FILE_MODE)
    try:
        if flags & os.O_CREAT:
            os.fchmod(descriptor, trust.FILE_MODE)  # whatever the umask
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
        OSError: ENOSPC or EDQUOT where the file system is full, or would be too full.
    """
    file = layout.paths[segment % layout.pool_count]
    if file.is_block_device():
        return
    descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        start, length = layout.segment_offset_bytes(segment), layout.segment_bytes
        if not _is_allocated(descriptor):
            check_free(file.parent, length, layout.keep_free_bytes)
        os.posix_fallocate(descriptor, start, length)
    finally:
        os.close(descriptor)


def _is_allocated(descriptor: int) -> bool:
    """Whether a file holds space for all of its length, as with `preallocate` = "full"."""
    facts = os.fstat(descriptor)
    return facts.st_blocks * 512 >= facts.st_size


# ---- block devices ----
def _check_devices(
    config: StoreConfig, pools: list[Superblock | None], format_devices: bool
) -> None:
    """Refuse a block device that must not be written; nothing was touched so far."""
    serials = config.serials or ("",) * len(config.pool_paths)
    if len(serials) != len(config.pool_paths):
        raise ConfigError(
            f"serials: {len(serials)} of them for {len(config.pool_paths)} pools",
            hint='one for each, in order; "" for a directory',
        )
    for place, pool, serial in zip(config.pool_paths, pools, serials, strict=True):
        if place.is_block_device():
            _check_device(config, place, pool, serial, format_devices)
        elif serial:
            raise ConfigError(f"serials names {serial!r} for {place}, which is no block device")


def _check_device(
    config: StoreConfig, place: Path, pool: Superblock | None, serial: str, format_devices: bool
) -> None:
    device = pool_file(place)
    if pool is None and not format_devices:
        raise ConfigError(
            f"{place} is a block device without a Tutti superblock",
            hint="`tutti init --format-device` writes one after checking that it is unused",
        )
    block_device.check_identity(place, device, serial)
    reason = block_device.why_in_use(device)
    if not reason and pool is None:
        reason = block_device.why_not_blank(device)
    elif not reason:
        descriptor = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
        try:
            reason = block_device.why_not_ours(descriptor)
        finally:
            os.close(descriptor)
    if reason:
        raise ConfigError(f"{place} is not taken: {reason}", hint="wipe it if it is yours")
    if _device_segments(device, config.segment_bytes) < 1:
        raise ConfigError(f"{place} is smaller than one segment, {config.segment_bytes} bytes")


def discard_store(config: StoreConfig) -> None:
    """Forget a store: remove its catalog and those of its pools that carry our magic number.

    Raises
        ConfigError: a process has the store open, or a pool is not ours, is another store's, or
            must not be used (see `open_layout`); nothing was touched.
        BusyError: a process is creating or repairing it.
    """
    trusting = config.trust_path
    find_key(config)  # a store that cannot be made anew with it is not forgotten
    check_catalog(config.path, trusting=trusting)
    if not config.path.is_dir():
        _discard(config)
        return
    with store_lock(config.path):
        _discard(config)


def _discard(config: StoreConfig) -> None:
    held = held_leases(lease_folder(config.path))
    if held:
        raise ConfigError(f"the store at {config.path} is open in {len(held)} process(es)")
    files = [pool_file(place) for place in config.pool_paths]
    ours = [file for file in files if os.path.lexists(file)]
    for file in ours:
        if not _has_magic(file, config.trust_path):
            raise ConfigError(f"{file} is not a Tutti pool; it is left alone")
    _check_discarded_devices(config)
    known = _known_store(config)
    for file in ours:
        owner = _store_of(file)
        if known is not None and owner not in (None, known):
            raise ConfigError(
                f"{file} belongs to another store; it is left alone",
                hint="name the pools of this store",
            )
    for file in ours:
        if file.is_block_device():
            with open(file, "r+b") as device:
                device.write(bytes(DATA_OFFSET_BYTES))
        else:
            file.unlink()
    folder = catalog_folder(config.path)
    for name in ("data.mdb", "lock.mdb"):
        (folder / name).unlink(missing_ok=True)


def _check_discarded_devices(config: StoreConfig) -> None:
    """The guard of devices that are to be wiped; a damaged superblock does not save them."""
    serials = config.serials or ("",) * len(config.pool_paths)
    for place, serial in zip(config.pool_paths, serials, strict=False):
        if not place.is_block_device():
            continue
        device = trust.real_device(place, trusting=config.trust_path)
        block_device.check_identity(place, device, serial)
        reason = block_device.why_in_use(device)
        if reason:
            raise ConfigError(f"{place} is left alone: {reason}")


def _known_store(config: StoreConfig) -> bytes | None:
    """Which store the catalog is of; None where it cannot be read, which is why it is discarded."""
    folder = catalog_folder(config.path)
    try:
        check_tree(folder / "data.mdb", DATABASES)
        catalog = Catalog(folder, config.catalog_bytes, False)
        try:
            known = catalog.superblock()
        finally:
            catalog.close()
    except (TuttiError, OSError):
        return None
    return None if known is None else known.store_id


def _store_of(file: Path) -> bytes | None:
    """Which store a pool is of; None where its superblock is damaged."""
    with open(file, "rb", buffering=0) as stream:
        data = os.pread(stream.fileno(), SUPERBLOCK_BYTES, 0)
    try:
        return Superblock.decode(data, str(file)).store_id
    except TuttiError:
        return None


def _has_magic(file: Path, trusting: bool) -> bool:
    if not file.is_block_device():
        trust.check_directory(file.parent, trusting=trusting)
        descriptor = trust.open_file(file, os.O_RDONLY, trusting=trusting)
    else:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(descriptor, len(POOL_MAGIC), 0) == POOL_MAGIC
    finally:
        os.close(descriptor)
