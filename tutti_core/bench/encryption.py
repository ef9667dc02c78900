"""What checksums and encryption cost: three stores that differ in nothing else, by turns."""

from __future__ import annotations

import os
import secrets
import shutil
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tutti_core.bench.measure import MIB, Arena, BenchError, order_of_turn, timed
from tutti_core.store import NamespaceStore, PrefixStore
from tutti_core.tiers.encryption import KEY_VARIABLE

PAGE_BYTES = 2 * MIB
KINDS = ("none", "checksum", "encrypted")
"""Nothing is checked on load; checksums are; the pages are encrypted besides. A save always makes
checksums, so that of "none" is the same as that of "checksum"."""

_TIMEOUT_S = 600.0


@dataclass(slots=True)
class _Contestant:
    store: PrefixStore
    pages: NamespaceStore
    save_gb_s: list[float]
    load_gb_s: list[float]


def measure(directory: Path, *, rounds: int, size_bytes: int) -> dict[str, float]:
    """Save and load `size_bytes` in each of three stores, by turns; returns medians and costs.

    Parameters
        directory: where the stores are made and removed.
        rounds: at least 1; each saves new pages and loads them once, after a warm-up round.
        size_bytes: rounded down to pages of 2 MiB, at least 4.
    Returns
        `checksum_cost_percent`, `encryption_cost_percent` of the bandwidth of loads, against the
        store with less; `encryption_save_cost_percent` of that of saves; the bandwidths. A cost is
        the median over the rounds of what two neighbours differ by, and may come out below 0.
    Raises
        BenchError: a page did not come back.
        UnsupportedError: the package `cryptography` is missing.
    """
    count = max(size_bytes // PAGE_BYTES, 4)
    source, target = Arena(count * PAGE_BYTES), Arena(count * PAGE_BYTES)
    generator = np.random.default_rng(7)
    with ExitStack() as stack, _no_key_in_environment():
        stores = {kind: _open(stack, directory, kind, count, (source, target)) for kind in KINDS}
        for turn in range(rounds + 1):
            source.fill_random(generator, 0, len(source.bytes))
            for kind in order_of_turn(KINDS, turn):
                _run(stores[kind], count, turn, source, target)
    for contestant in stores.values():  # the first round fills caches and windows
        del contestant.save_gb_s[0], contestant.load_gb_s[0]
    none, checked, encrypted = (stores[kind] for kind in KINDS)
    return {
        "checksum_cost_percent": _cost(none.load_gb_s, checked.load_gb_s),
        "encryption_cost_percent": _cost(checked.load_gb_s, encrypted.load_gb_s),
        "encryption_save_cost_percent": _cost(checked.save_gb_s, encrypted.save_gb_s),
        **{f"load_gb_s_{kind}": statistics.median(stores[kind].load_gb_s) for kind in KINDS},
        **{f"save_gb_s_{kind}": statistics.median(stores[kind].save_gb_s) for kind in KINDS},
    }


def _open(
    stack: ExitStack, directory: Path, kind: str, count: int, arenas: tuple[Arena, ...]
) -> _Contestant:
    path = directory / f"encryption-{kind}"
    stack.callback(shutil.rmtree, path, ignore_errors=True)
    key = None
    if kind == "encrypted":
        key = directory / "encryption.key"
        stack.callback(key.unlink, missing_ok=True)
        key.unlink(missing_ok=True)
        descriptor = os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as stream:
            stream.write(secrets.token_hex(32))
    store = PrefixStore.open(
        path,
        capacity=2 * count * (PAGE_BYTES + MIB) + 256 * MIB,
        verify=kind != "none",
        encryption_key_file=key,
        trust_path=True,
    )
    stack.callback(store.close)
    for arena in arenas:
        store.register(arena.bytes)
    pages = store.namespace(model="encryption", page_tokens=1, page_bytes=PAGE_BYTES)
    return _Contestant(store, pages, [], [])


def _run(contestant: _Contestant, count: int, turn: int, source: Arena, target: Arena) -> None:
    """One round: save, load, compare, clear."""
    pages = contestant.pages
    keys = pages.keys(np.arange(count, dtype=np.uint32), salt=str(turn))
    results = []
    save = timed(lambda: results.append(pages.save(keys, source.bytes).wait(_TIMEOUT_S)))
    target.bytes[::4096] = 0
    load = timed(lambda: results.append(pages.load(keys, target.bytes).wait(_TIMEOUT_S)))
    if not all(result.all() for result in results) or (target.bytes != source.bytes).any():
        raise BenchError("a page was not stored, or did not come back")
    pages.clear(_TIMEOUT_S)
    contestant.save_gb_s.append(count * PAGE_BYTES / save.seconds / 1e9)
    contestant.load_gb_s.append(count * PAGE_BYTES / load.seconds / 1e9)


def _cost(reference: list[float], other: list[float]) -> float:
    """How much less `other` is, in percent: the median over the rounds."""
    return statistics.median(100.0 * (1.0 - b / a) for a, b in zip(reference, other, strict=True))


@contextmanager
def _no_key_in_environment() -> Iterator[None]:
    """Two of the stores are not encrypted, whatever the environment says."""
    key = os.environ.pop(KEY_VARIABLE, None)
    try:
        yield
    finally:
        if key is not None:
            os.environ[KEY_VARIABLE] = key
