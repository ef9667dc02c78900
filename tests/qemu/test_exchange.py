"""Pages change hands in one pool: a host's store saves some that a guest reads through a ring, and
loads others that the guest wrote."""

from __future__ import annotations

from pathlib import Path

from boots import Boot, Disks, problems, run
from patterns import Plan, Stretch, pattern, text_of
from store_kit import finish
from store_kit import run as run_of_keys

from tutti_core import PrefixStore, StoreConfig
from tutti_core.format import DATA_OFFSET_BYTES
from tutti_core.keys import PageKeys
from tutti_core.trials.kit import raw_records

MIB = 1 << 20
PAGE = 65_536
PAGES = 24
NAMESPACE = {"model": "org/m", "page_bytes": PAGE, "page_tokens": 1}
HOST, GUEST = run_of_keys("host", PAGES), run_of_keys("guest", PAGES)


def page_seed(keys: PageKeys, at: int) -> int:
    return int.from_bytes(keys[at][:8], "big")


def pages_of(keys: PageKeys) -> bytes:
    return b"".join(pattern(page_seed(keys, at), PAGE) for at in range(PAGES))


def config(path: Path, transport: str) -> StoreConfig:
    return StoreConfig.parse(
        {"path": path, "capacity": 16 * MIB, "segment": MIB, "catalog": 2 * MIB}
        | {"transport": transport}
    )


def places(path: Path, keys: PageKeys) -> list[tuple[int, int]]:
    """Where each page lies in the pool, and the checksum that its record has."""
    records = {record["page_key"].tobytes()[: keys.width]: record for record in raw_records(path)}
    found = [records[key] for key in keys]
    return [
        (
            DATA_OFFSET_BYTES + int(record["segment"]) * MIB + int(record["slot"]) * PAGE,
            int(record["checksum"]),
        )
        for record in found
    ]


def load(path: Path, transport: str, keys: PageKeys) -> tuple[list[bool], bytes]:
    memory = bytearray(PAGES * PAGE)
    with PrefixStore.open(config(path, transport)) as store:
        loaded = finish(store.namespace(**NAMESPACE).load(keys, memory))
    return [bool(good) for good in loaded], bytes(memory)


def test_pages_change_hands(files: dict[str, bytes], disks: Disks, tmp_path: Path) -> None:
    path = tmp_path / "store"
    with PrefixStore.open(config(path, "uring")) as store:
        pages = store.namespace(**NAMESPACE)
        for keys in (HOST, GUEST):
            assert finish(pages.save(keys, pages_of(keys))).all()
    host_pages = [Stretch(offset, PAGE, checksum) for offset, checksum in places(path, HOST)]
    guest_pages: Plan = []
    pool = path / "pool.tutti"
    with pool.open("r+b") as file:
        for at, (offset, _) in enumerate(places(path, GUEST)):
            file.seek(offset)
            assert file.read(PAGE) == pattern(page_seed(GUEST, at), PAGE)
            file.seek(offset)
            file.write(bytes(PAGE))  # the guest writes it again
            guest_pages.append(Stretch(offset, PAGE, page_seed(GUEST, at)))

    disks.add(pool, "TUTTI-FIRST", slot="4.0")
    plans = {"host_pages": host_pages, "guest_pages": guest_pages}
    given = {**files, **{f"plan/{name}": text_of(plan) for name, plan in plans.items()}}
    outcome = run(Boot("exchange", disks.arguments, "0000:00:04.0"), given, tmp_path)
    assert problems(outcome, ["host_pages", "guest_pages"]) == []

    for transport in ("uring", "posix"):
        for keys in (HOST, GUEST):
            loaded, memory = load(path, transport, keys)
            assert all(loaded) and memory == pages_of(keys)
    # What a guest has not written is no page.
    with pool.open("r+b") as file:
        file.seek(guest_pages[5].offset_bytes)
        file.write(bytes(PAGE))
    assert not load(path, "posix", GUEST)[0][5]
