"""The storage backends that demo and tests run SGLang with: `tutti`, and SGLang's own `file`.

Everything that depends on the backend's name is here: which settings give it a folder, and how to
see from outside what it holds. `file` is the control: it shows that the harness itself works.
`tutti` has two routes: HiCache, by way of host memory, and the linker, straight from the device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PAGE_TOKENS = 16

# Extra config that every backend gets. SGLang takes these out itself: prefetch from 16 tokens on
# (its default is 256), so that short conversations use the storage at all.
COMMON_OPTIONS: Mapping[str, Any] = {"prefetch_threshold": PAGE_TOKENS}
# Tutti's own options, besides `path`.
TUTTI_OPTIONS: Mapping[str, Any] = {"capacity": "2GiB"}


@dataclass(frozen=True)
class Usage:
    """What a store holds: pages (of all ranks and namespaces), and bytes its files occupy."""

    pages: int
    disk_bytes: int


@dataclass(frozen=True)
class Backend:
    """One backend keeping its pages in `folder`.

    Exported settings reach SGLang in two ways, since `file` reads its folder from the environment.

    route: "hicache", or "linker" (of `tutti` only).
    """

    name: str
    folder: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    route: str = "hicache"

    @property
    def verifies_pages(self) -> bool:
        """Whether a damaged or foreign page is a miss. SGLang's `file` has no checksum."""
        return self.name == "tutti"

    def extra_config(self) -> dict[str, Any]:
        """The JSON of the route's configuration flag."""
        own = {"path": str(self.folder), **TUTTI_OPTIONS} if self.name == "tutti" else {}
        common = COMMON_OPTIONS if self.route == "hicache" else {}
        return {**common, **own, **self.options}

    def environment(self) -> dict[str, str]:
        if self.name == "file":
            return {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(self.folder)}
        return {}

    def server_flags(self) -> list[str]:
        if self.route == "linker":
            return [
                f"--unified-cache-external-linker-backend={self.name}",
                f"--unified-cache-external-linker-config={json.dumps(self.extra_config())}",
            ]
        return [
            "--enable-hierarchical-cache",
            f"--hicache-storage-backend={self.name}",
            f"--hicache-storage-backend-extra-config={json.dumps(self.extra_config())}",
            "--hicache-storage-prefetch-policy=wait_complete",
        ]

    def engine_arguments(self) -> dict[str, Any]:
        """The same for `sglang.Engine`."""
        if self.route == "linker":
            return {
                "unified_cache_external_linker_backend": self.name,
                "unified_cache_external_linker_config": self.extra_config(),
            }
        return {
            "enable_hierarchical_cache": True,
            "hicache_storage_backend": self.name,
            "hicache_storage_backend_extra_config": json.dumps(self.extra_config()),
            "hicache_storage_prefetch_policy": "wait_complete",
        }

    def usage(self) -> Usage:
        """What the store holds now; safe while a server is using it.

        Raises RuntimeError for a backend whose pages can't be counted from outside.
        """
        if self.name == "file":
            pages = sum(1 for path in self.folder.glob("*.bin") if path.is_file())
        elif self.name == "tutti":
            pages = _tutti_pages(self.folder)
        else:
            raise RuntimeError(f"no way to count the pages of backend {self.name!r}")
        return Usage(pages=pages, disk_bytes=occupied_bytes(self.folder))


def _tutti_pages(folder: Path) -> int:
    """What `tutti info` says: it reads the catalog beside a running server and locks nothing."""
    command = [str(Path(sys.executable).with_name("tutti")), "info", str(folder), "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return int(json.loads(done.stdout)["store"]["pages"])


def occupied_bytes(folder: Path) -> int:
    """Bytes allocated on disk below `folder`; a sparse file counts what it really occupies."""
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_blocks * 512
            except FileNotFoundError:  # the server removed it meanwhile
                continue
    return total
