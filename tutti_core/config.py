"""Settings of a store: what people write, checked before anything on disk is touched."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, ValidationError

from tutti_core.errors import ConfigError, nearest

BLOCK_BYTES = 4096
ENVIRONMENT_PREFIX = "TUTTI_STORE_"

_MiB = 1 << 20
_GiB = 1 << 30
_SEGMENT_MIN_BYTES = _MiB
_SEGMENT_MAX_BYTES = _GiB
_CATALOG_MIN_BYTES = 8 * _MiB
_CATALOG_MAX_BYTES = 8 * _GiB
_TIER_MIN_BYTES = 8 * BLOCK_BYTES
_DRIVE_NAMES = ("nvme:", "pci:")
"""How drives without a driver of the kernel are named; lists that colons part break them there."""


def _not_a_drive(place: Any) -> Any:
    """Refuse the name of a raw drive, which would become a directory of that name."""
    if isinstance(place, str | Path) and f"{place}:".startswith(_DRIVE_NAMES):
        raise ValueError(
            "a store cannot use a raw NVMe namespace; name a directory or a block device, a "
            "directory that really has such a name by its whole path"
        )
    return place


_Place = Annotated[Path, BeforeValidator(_not_a_drive)]


class StoreConfig(BaseModel):
    """Where a store lives, how large it may grow, and how it moves bytes.

    Sizes are integers in bytes or text with a unit ("2TiB", "64 MiB", "500GB"). Unknown fields are
    refused with the nearest valid name.

    path            directory of the catalog and the leases, and of the pool file unless `pools`
                    names other places. Created with mode 0700.
    capacity        everything the store may occupy, catalog included.
    pools           directories, or block devices prepared by `tutti init`, that hold the pages;
                    whole pages are striped over them. Default: `path` itself. A device is named by
                    its link in /dev/disk/by-id, or has its number in `serials`.
    serials         serial numbers of the devices in `pools`, one for each place in their order; ""
                    for a directory. A device with another number is refused.
    trust_path      trust whoever owns or may write the directories and files of the store, and the
                    directories above them. Otherwise what is not this user's or root's, or may be
                    written by others, is refused (docs/security.md).
    encryption_key_file   a file of mode 0600 with the key that pages are encrypted with on the
                    drives: 32 bytes in hexadecimal or base64 (docs/security.md). The environment
                    may have it in TUTTI_ENCRYPTION_KEY. A store is created encrypted or not, and
                    stays so.
    transport       "auto" takes io_uring with O_DIRECT where the machine allows it, else posix;
                    "gds" is GPU Direct Storage, for engines that load straight into GPU memory;
                    "gpu" issues NVMe commands itself (docs/paths.md).
    gpu_controller  of "gpu": "software" serves files by controllers in software, for tests; "vfio",
                    drives that are bound to vfio-pci, is refused: a store needs files.
    gpu_executor    of "gpu": who issues the commands, GPU threads ("cuda") or CPU threads ("cpu");
                    "auto" takes a GPU if there is one.
    segment         unit of space that belongs to one writer and one page size; fixed when the store
                    is created. Default: 1/64 of the capacity as a power of two, 1 MiB to 1 GiB.
    catalog         share of `capacity` kept for the catalog. Default: 1/32, 8 MiB to 8 GiB (beyond
                    2 TiB: 1/256).
    preallocate     "segment": a segment's blocks are allocated before its first use; "full": all at
                    creation.
    keep_free       free space that the pools' file systems must have left, what others use counted
                    in; at the mark a store does not grow but evicts. Default: a hundredth of the
                    file system, at most 1 GiB. What is set aside already stays.
    durability      "flush": pages survive power loss once a save reports them; "none": they survive
                    the end of the process, and a power loss costs recent pages (never wrong bytes:
                    this needs `verify`).
    verify          check each page's checksum when it is loaded.
    writers_max     processes that save into this directory at the same time; each may own at most
                    its share of the segments.
    queue_depth     transfers in flight on one device.
    transfer_max    larger pages move in several transfers.
    bounce          memory per device for fragments that are not aligned for O_DIRECT.
    backlog         bytes of pages that may wait to be saved; beyond it `save` answers "not stored".
    huge_pages      put memory that is registered into huge pages where the kernel will.
    dram            size of a tier of pages in host memory above the drives; 0: none. It holds pages
                    of at most an eighth of it.
    hbm             size of a tier of pages in the memory of a GPU above that; needs CuPy. 0: none.
    write_policy    "write_through": pages are written to the drives, and copied into `dram`;
                    "write_back": a save ends when its pages are in `dram`, they are written when
                    they have to leave it, by `flush` and by `close`; "write_selective": like
                    write_back, and pages that nobody uses again are never written. With the last
                    two a crash costs the pages that were not written yet.
    dram_mode       "inclusive": pages that are copied into `dram` stay on the drives; "exclusive":
                    they leave the drives, so both sizes add up, and a crash costs them.
    policy          which pages go first: "reuse" learns from the stream what is used again; "lru",
                    "lru2", "slru", "s3fifo", "sieve", "tinylfu", "gdsf", "arc".
    admission       which new pages are written to the drives: "always"; "second_touch": those that
                    were saved before, of late; "frequency": those that were saved often.
    write_budget    bytes that may be written to the drives in any 24 hours; none: no limit. A page
                    must not be larger than a 24th of it.
    io_timeout_s    how long a call waits for its transfers before it reports them as failed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: _Place
    capacity: ByteSize
    pools: tuple[_Place, ...] = ()
    serials: tuple[str, ...] = ()
    trust_path: bool = False
    encryption_key_file: Path | None = None
    transport: Literal["auto", "gpu", "gds", "uring", "posix"] = "auto"
    gpu_controller: Literal["vfio", "software"] = "vfio"
    gpu_executor: Literal["auto", "cuda", "cpu"] = "auto"
    segment: ByteSize | None = None
    catalog: ByteSize | None = None
    preallocate: Literal["segment", "full"] = "segment"
    keep_free: Annotated[ByteSize, Field(ge=0)] | None = None
    durability: Literal["flush", "none"] = "flush"
    verify: bool = True
    writers_max: Annotated[int, Field(ge=1, le=1024)] = 1
    queue_depth: Annotated[int, Field(ge=1, le=1024)] = 64
    transfer_max: ByteSize = ByteSize(_MiB)
    bounce: ByteSize = ByteSize(16 * _MiB)
    backlog: ByteSize = ByteSize(4 * _GiB)
    huge_pages: bool = True
    dram: ByteSize = ByteSize(0)
    hbm: ByteSize = ByteSize(0)
    write_policy: Literal["write_through", "write_back", "write_selective"] = "write_through"
    dram_mode: Literal["inclusive", "exclusive"] = "inclusive"
    policy: Literal["reuse", "lru", "lru2", "slru", "s3fifo", "sieve", "tinylfu", "gdsf", "arc"] = (
        "reuse"
    )
    admission: Literal["always", "second_touch", "frequency"] = "always"
    write_budget: Annotated[ByteSize, Field(gt=0)] | None = None
    io_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 30.0

    @classmethod
    def parse(cls, settings: Mapping[str, Any], *, other_names: Collection[str] = ()) -> Self:
        """Check `settings` and return them as a StoreConfig.

        Parameters
            other_names: names that the caller takes besides, to suggest for a mistyped one.
        Raises
            ConfigError: names the field, the value and what is accepted.
        """
        if not isinstance(settings, Mapping):
            raise ConfigError(f"settings are a table, not {type(settings).__name__}")
        for name, value in settings.items():
            if name not in cls.model_fields:
                valid = [*cls.model_fields, *other_names]
                raise ConfigError(f"unknown setting {name!r}", hint=nearest(str(name), valid))
            _check_kind(name, value, cls.model_fields[name].annotation is bool)
        try:
            config = cls.model_validate(dict(settings))
        except ValidationError as error:
            raise ConfigError(_words(error)) from None
        config.check()
        return config

    @classmethod
    def load(cls, file: str | os.PathLike[str], **overrides: Any) -> Self:
        """Read a .json or .toml file; `overrides` win over what it says.

        Raises
            ConfigError: unreadable file, unknown format or bad setting.
        """
        path = Path(file)
        try:
            text = path.read_text()
            if path.suffix == ".json":
                settings = json.loads(text)
            elif path.suffix == ".toml":
                settings = tomllib.loads(text)
            else:
                raise ConfigError(f"config file {path}: unknown format", hint="use .json or .toml")
        except OSError as error:
            raise ConfigError(f"config file {path}: {error.strerror}") from None
        except RecursionError:
            raise ConfigError(f"config file {path}: nested too deeply") from None
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"config file {path}: {error}") from None
        if not isinstance(settings, dict):
            raise ConfigError(f"config file {path}: expected a table of settings")
        return cls.parse({**settings, **overrides})

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None, **overrides: Any
    ) -> Self:
        """Read TUTTI_STORE_PATH, TUTTI_STORE_CAPACITY, …; POOLS and SERIALS are split at `:`."""
        source = os.environ if environment is None else environment
        settings: dict[str, Any] = {
            name.removeprefix(ENVIRONMENT_PREFIX).lower(): value
            for name, value in source.items()
            if name.startswith(ENVIRONMENT_PREFIX)
        }
        if "pools" in settings:
            settings["pools"] = [part for part in settings["pools"].split(":") if part]
        if settings.get("serials"):
            settings["serials"] = settings["serials"].split(":")
        return cls.parse({**settings, **overrides})

    # ---- derived sizes ----
    @property
    def pool_paths(self) -> tuple[Path, ...]:
        """The places that hold pages: `pools`, or `path` itself."""
        return self.pools or (self.path,)

    @property
    def catalog_bytes(self) -> int:
        """Upper bound of the catalog's file, a multiple of 4 KiB."""
        if self.catalog is not None:
            size = int(self.catalog)
        else:
            largest = max(_CATALOG_MAX_BYTES, self.capacity // 256)
            size = min(max(self.capacity // 32, _CATALOG_MIN_BYTES), largest)
        return size // BLOCK_BYTES * BLOCK_BYTES

    @property
    def segment_bytes(self) -> int:
        """Size of one segment."""
        if self.segment is not None:
            return int(self.segment)
        size = _SEGMENT_MAX_BYTES
        while size > _SEGMENT_MIN_BYTES and size * 64 > self.capacity:
            size //= 2
        return size

    def segments_per_pool(self, header_bytes: int, segment_bytes: int | None = None) -> int:
        """How many segments (by default of this configuration's size) fit into each pool."""
        share = (self.capacity - self.catalog_bytes) // len(self.pool_paths)
        return max(0, (share - header_bytes) // (segment_bytes or self.segment_bytes))

    def capacity_for(self, pool_bytes: int) -> int:
        """The smallest capacity that leaves `pool_bytes`; the catalog grows with it."""
        need = 0
        while True:
            catalog = self.model_copy(update={"capacity": ByteSize(need)}).catalog_bytes
            if need >= pool_bytes + catalog:
                return need
            need = pool_bytes + catalog

    def check(self) -> None:
        """Raise ConfigError where settings do not go together; what is opened was checked so."""
        for place in (self.path, *self.pools, self.encryption_key_file):
            if place is not None:
                _check_path(place)
        if self.transport == "gpu" and self.gpu_controller != "software":
            raise ConfigError(
                "transport = 'gpu' drives NVMe devices that no file system is on, and a store "
                "needs files or block devices",
                hint="auto, uring or gds; gpu_controller = software serves files, for tests",
            )
        self._check_sizes()
        self._check_tiers()

    def _check_sizes(self) -> None:
        for name in ("segment_bytes", "transfer_max", "bounce"):
            value = int(getattr(self, name))
            field = name.removesuffix("_bytes")
            if value <= 0 or value % BLOCK_BYTES:
                raise ConfigError(f"{field} = {value} must be a positive multiple of {BLOCK_BYTES}")
        if self.bounce < 2 * self.transfer_max:
            raise ConfigError(
                f"bounce = {int(self.bounce)} must be at least twice transfer_max = "
                f"{int(self.transfer_max)}"
            )
        if self.catalog_bytes < 2 * _MiB:
            raise ConfigError(f"catalog = {self.catalog_bytes} bytes is too small", hint="use 2MiB")
        if not self.verify and self.durability == "none":
            raise ConfigError(
                'verify = False needs durability = "flush": after a power loss only the checksum '
                "tells pages that were written from pages that were not",
                hint="keep one of the two at its default",
            )
        # The first MiB of a pool is its header's, as in format.py.
        if self.segments_per_pool(_MiB) < 1:
            need = self.capacity_for(len(self.pool_paths) * (self.segment_bytes + _MiB))
            raise ConfigError(
                f"capacity = {int(self.capacity)} bytes is smaller than one segment in each pool",
                hint=f"use at least {need} bytes, or a smaller segment",
            )

    def _check_tiers(self) -> None:
        for name, value in (("dram", int(self.dram)), ("hbm", int(self.hbm))):
            if value < 0 or 0 < value < _TIER_MIN_BYTES:
                raise ConfigError(
                    f"{name} = {value} must be 0, for none, or at least {_TIER_MIN_BYTES} bytes"
                )
        if self.dram == 0 and self.write_policy != "write_through":
            raise ConfigError(
                f'write_policy = "{self.write_policy}" needs a dram tier',
                hint="set dram to its size",
            )
        if self.dram == 0 and self.dram_mode != "inclusive":
            raise ConfigError(
                f'dram_mode = "{self.dram_mode}" needs a dram tier', hint="set dram to its size"
            )


def _check_kind(name: str, value: object, switch: bool) -> None:
    """Refuse what would pass for another value: True for 1, and "" for the working directory."""
    if isinstance(value, bool | np.bool_) and not switch:
        raise ConfigError(f"{name} = {value!r} is not a value of this setting")
    places = value if isinstance(value, list | tuple) else [value]
    named = name in ("path", "pools", "encryption_key_file")
    if named and any(place in ("", b"") for place in places):
        raise ConfigError(f"{name} = {value!r} names no place")


def _check_path(place: Path) -> None:
    try:
        usable = b"\0" not in os.fsencode(place)
    except UnicodeEncodeError:
        usable = False
    if not usable:
        raise ConfigError(f"path {str(place)!r} cannot be the name of a file")


def _words(error: ValidationError) -> str:
    """One line per wrong field: name, value, what is accepted."""
    lines = []
    for item in error.errors():
        field = ".".join(str(part) for part in item["loc"])
        if item["type"] == "missing":
            lines.append(f"setting {field!r} is required")
        else:
            lines.append(f"{field} = {item['input']!r:.100}: {item['msg']}")
    return "; ".join(lines)
