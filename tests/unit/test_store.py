"""store.py: what callers pass in and get back; every bad input is named."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from store_kit import NAMESPACE, PAGE, client, open_faulty, open_small, run, small_config, snapshot

import tutti_core
from tutti_core import (
    BusyError,
    ConfigError,
    DeviceError,
    Namespace,
    PageFragments,
    PageKeys,
    PrefixStore,
    StoreClosedError,
    as_memory,
)
from tutti_core.testing import page_bytes
from tutti_core.tiers.lease import held_leases


@pytest.fixture
def store(store_dir: Path):
    with open_small(store_dir) as store:
        yield store


@pytest.fixture
def pages(store: PrefixStore):
    return store.namespace(model="m", page_bytes=PAGE, page_tokens=4)


class TestOpen:
    def test_by_path_and_settings_or_by_config(self, store_dir: Path) -> None:
        PrefixStore.open(store_dir, capacity="16MiB", transport="posix").close()
        PrefixStore.open(str(store_dir), capacity="16MiB", transport="posix").close()
        with pytest.raises(ConfigError, match="not both"):
            PrefixStore.open(small_config(store_dir), capacity="16MiB")

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"capacity": "16MiB", "transprt": "posix"}, "did you mean 'transport'"),
            ({"transport": "posix"}, "'capacity' is required"),
            ({"capacity": "1MiB"}, "capacity = 1048576"),
            ({"capacity": "16MiB", "transport": "gpu"}, "transport = 'gpu'"),
            ({"capacity": "16MiB", "segment": "64MiB"}, "capacity = 16777216"),
        ],
    )
    def test_bad_settings_leave_nothing_behind(
        self, store_dir: Path, settings: dict[str, Any], said: str
    ) -> None:
        with pytest.raises(ConfigError, match=said):
            PrefixStore.open(store_dir, **settings)
        assert not store_dir.exists()

    def test_a_failed_open_lets_go_of_everything(self, store_dir: Path, monkeypatch) -> None:
        open_small(store_dir).close()
        before = snapshot(store_dir)

        def refuse(*_: object) -> None:
            raise DeviceError("open failed")

        monkeypatch.setattr("tutti_core.store.open_transport", refuse)
        for _ in range(3):
            with pytest.raises(DeviceError):
                open_small(store_dir)
        assert held_leases(store_dir / "leases") == []
        assert {k: v for k, v in snapshot(store_dir).items() if "lock.mdb" not in k} == {
            k: v for k, v in before.items() if "lock.mdb" not in k
        }
        monkeypatch.undo()
        open_small(store_dir).close()

    def test_a_damaged_segment_table_is_reported_and_lets_go(self, store_dir: Path) -> None:
        with open_small(store_dir) as store:
            with store._catalog._begin(write=True) as (txn, db):
                txn.put(bytes(4), b"damaged", db=db.segments)
        with pytest.raises(tutti_core.CorruptionError):
            open_small(store_dir)
        assert held_leases(store_dir / "leases") == []


class TestNamespace:
    def test_by_object_or_by_fields(self, store: PrefixStore) -> None:
        by_fields = store.namespace(**NAMESPACE)
        assert store.namespace(Namespace(**NAMESPACE)).namespace == by_fields.namespace

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"modle": "m"}, "unknown field 'modle'.*did you mean 'model'"),
            ({"model": "m"}, "page_bytes"),
            ({**NAMESPACE, "page_bytes": 0}, "page_bytes = 0"),
            ({**NAMESPACE, "page_bytes": "big"}, "namespace"),
            ({**NAMESPACE, "page_tokens": 0}, "page_tokens = 0"),
            ({**NAMESPACE, "key_bytes": 8}, "key_bytes = 8"),
            ({**NAMESPACE, "page_bytes": 32769}, "page_bytes = 32769 is larger than a segment.*"),
        ],
    )
    def test_bad_fields_are_refused(self, store: PrefixStore, fields, said: str) -> None:
        with pytest.raises(ConfigError, match=said):
            store.namespace(**fields)
        assert store._catalog.namespaces() == {}

    def test_a_page_may_fill_a_segment(self, store: PrefixStore) -> None:
        pages = client(store, page_bytes=32768)
        assert all(pages.save(run("a", 2))) and all(pages.load(run("a", 2)))


class TestTokens:
    def test_keys_come_from_tokens_secret_namespace_and_salt(self, store, pages) -> None:
        tokens = list(range(10))
        keys = pages.keys(tokens)
        assert len(keys) == 2 and keys.width == 16 and keys.rooted
        assert pages.keys(tokens[:4])[0] == keys[0]
        others = [
            pages.keys(tokens, salt="a"),
            pages.keys(tokens, lora="a"),
            pages.keys(tokens, tenant="a"),
            pages.keys(tokens, salt=""),
            store.namespace(model="n", page_bytes=PAGE, page_tokens=4).keys(tokens),
        ]
        assert len({k for other in [keys, *others] for k in other}) == 12

    def test_two_stores_never_agree_on_keys(self, store, pages, fast_path: Path) -> None:
        with open_small(fast_path / "other") as other:
            theirs = other.namespace(model="m", page_bytes=PAGE, page_tokens=4)
            assert theirs.keys([1, 2, 3, 4]) != pages.keys([1, 2, 3, 4])

    def test_saving_and_loading_by_tokens(self, pages) -> None:
        tokens, memory = list(range(11)), bytearray(b"ab" * PAGE)
        assert pages.save(tokens, memory).wait(20).tolist() == [True, True]
        hit = pages.match(tokens)
        assert (hit.pages, hit.tokens) == (2, 8)
        back = bytearray(2 * PAGE)
        assert pages.load(tokens, back).wait(20).all() and back == memory

    def test_no_whole_page_is_no_work(self, pages) -> None:
        assert pages.match([1, 2]).pages == 0 and len(pages.contains([])) == 0
        assert len(pages.save([1, 2], b"").wait(1)) == 0
        assert len(pages.load([], bytearray()).wait(1)) == 0

    @pytest.mark.parametrize("tokens", [[-1] * 4, [0.5] * 4, [[1, 2, 3, 4]], [1 << 32] * 4])
    def test_what_is_no_token_is_refused(self, pages, tokens) -> None:
        for call in (pages.match, pages.contains, pages.keys):
            with pytest.raises(ValueError):
                call(tokens)

    def test_keys_of_another_width_are_refused(self, pages) -> None:
        for call in (pages.match, pages.contains, pages.pin):
            with pytest.raises(ValueError, match="page keys of 32 bytes; this namespace has 16"):
                call(PageKeys(bytes(64), 32))

    def test_an_engine_s_keys_are_not_made_from_tokens(self, store) -> None:
        pages = store.namespace(model="m", page_bytes=PAGE, page_tokens=4, key_bytes=32)
        with pytest.raises(ValueError, match="come from the engine"):
            pages.match([1, 2, 3, 4])

    @pytest.mark.parametrize("first", [-1, 3, 100])
    def test_a_first_page_beyond_the_chain_is_refused(self, pages, first: int) -> None:
        keys = run("a", 2)
        for call in (pages.match, pages.contains):
            with pytest.raises(ValueError, match=f"first = {first} (of 2 pages|is not a count)"):
                call(keys, first)
        with pytest.raises(ValueError, match=f"first = {first}"):
            pages.save(keys, bytes(PAGE), first)
        with pytest.raises(ValueError, match=f"first = {first}"):
            pages.load(keys, bytearray(PAGE), first)

    def test_only_transfers_are_bounded_in_pages(self, pages) -> None:
        """A long context in one-token pages has more than one call may move; a look-up may."""
        keys = PageKeys(bytes(16 * 65537), 16)
        assert pages.match(keys).pages == 0
        assert not pages.contains(keys).any()
        for call in (pages.save, pages.load):
            with pytest.raises(ValueError, match="more than 65536 pages"):
                call(keys, bytearray(PAGE))


class TestMemory:
    @pytest.mark.parametrize("length", [0, PAGE - 1, PAGE, 2 * PAGE - 1])
    def test_memory_that_does_not_hold_the_pages_is_refused(self, pages, length: int) -> None:
        with pytest.raises(ValueError):
            pages.save(run("a", 2), bytes(length))
        with pytest.raises(ValueError):
            pages.load(run("a", 2), bytearray(length))
        assert not pages.contains(run("a", 2)).any()

    def test_more_fragments_than_a_batch_holds_are_refused(self, pages, monkeypatch) -> None:
        monkeypatch.setattr("tutti_core.store.BATCH_FRAGMENTS_MAX", 3)
        fragments = PageFragments(np.ones((2, 2), np.uint64), np.full(2, PAGE // 2, np.uint64))
        for call in (pages.save, pages.load):
            with pytest.raises(ValueError, match="more than 3 fragments"):
                call(run("a", 2), fragments)

    @pytest.mark.parametrize(
        ("rows", "lengths"),
        [(1, [PAGE]), (3, [PAGE]), (2, [PAGE - 1]), (2, [PAGE, PAGE]), (2, [2048])],
    )
    def test_fragments_of_another_shape_are_refused(self, pages, rows, lengths) -> None:
        memory = bytearray(8 * PAGE)
        address = np.full((rows, len(lengths)), as_memory(memory).address, np.uint64)
        fragments = PageFragments(address, np.array(lengths, np.uint64), memory)
        for call in (pages.save, pages.load):
            with pytest.raises(ValueError, match=f"{rows} pages of .* for 2 pages of {PAGE} bytes"):
                call(run("a", 2), fragments)

    @pytest.mark.parametrize(
        "memory",
        [
            bytes(2 * PAGE),
            memoryview(bytes(2 * PAGE)),
            np.frombuffer(bytes(2 * PAGE), np.uint8),
            tutti_core.Memory(1 << 20, 2 * PAGE, False, None),
        ],
        ids=["bytes", "memoryview", "array", "Memory"],
    )
    def test_read_only_memory_is_refused_for_loads(self, pages, memory) -> None:
        with pytest.raises(ValueError, match="read-only"):
            pages.load(run("a", 2), memory)

    def test_memory_with_holes_is_refused(self, pages) -> None:
        for call in (pages.save, pages.load):
            with pytest.raises(ValueError, match="not contiguous"):
                call(run("a", 2), np.zeros((4, PAGE), np.uint8)[:, : PAGE // 2])

    @pytest.mark.parametrize("kind", ["bytearray", "memoryview", "numpy", "pointer", "bfloat16"])
    def test_every_kind_of_memory_is_saved_from_and_loaded_into(self, pages, kind: str) -> None:
        keys = run(kind, 3)
        data = b"".join(page_bytes(1, key, PAGE) for key in keys)

        def make(content: bytes) -> tuple[Any, Any]:
            if kind == "bfloat16":
                torch = pytest.importorskip("torch", reason="torch is not installed")
                tensor = torch.frombuffer(bytearray(content), dtype=torch.bfloat16).clone()
                return tensor, lambda: bytes(tensor.view(torch.uint8).numpy())
            if kind == "numpy":
                array = np.frombuffer(content, np.float16).copy()
                return array, array.tobytes
            raw = bytearray(content)
            if kind == "pointer":
                piece = as_memory(raw)
                return (piece.address, piece.length_bytes), lambda: bytes(raw)
            return (memoryview(raw) if kind == "memoryview" else raw), lambda: bytes(raw)

        source, _ = make(data)
        assert pages.save(keys, source).wait(20).all()
        target, content = make(bytes(3 * PAGE))
        assert pages.load(keys, target).wait(20).all() and content() == data

    @pytest.mark.parametrize("size", [1, 100, 4095, 4097, 9999])
    def test_pages_of_any_length(self, store, size: int) -> None:
        pages = client(store, page_bytes=size)
        assert all(pages.save(run("a", 3))) and all(pages.load(run("a", 3)))

    def test_slots_place_pages_within_one_memory(self, pages) -> None:
        keys = run("a", 2)
        memory = bytearray(4 * PAGE)
        memory[3 * PAGE :] = page_bytes(0, keys[0], PAGE)
        memory[PAGE : 2 * PAGE] = page_bytes(0, keys[1], PAGE)
        assert pages.save(keys, memory, slots=[3, 1]).wait(20).all()
        back = bytearray(b"\x77" * (4 * PAGE))
        assert pages.load(keys, back, slots=[0, 2]).wait(20).all()
        assert back[:PAGE] == page_bytes(0, keys[0], PAGE)
        assert back[2 * PAGE : 3 * PAGE] == page_bytes(0, keys[1], PAGE)
        assert set(back[PAGE : 2 * PAGE]) == {0x77} == set(back[3 * PAGE :])
        with pytest.raises(ValueError, match="3 slots for 2 pages"):
            pages.load(keys, back, slots=[0, 1, 2])

    def test_pages_in_many_fragments(self, pages) -> None:
        keys, parts = run("a", 2), [1, 63, 1000, PAGE - 1064]
        memory = bytearray(3 * PAGE)
        base = as_memory(memory).address
        starts = np.cumsum([0, *parts[:-1]]) + np.arange(4) * 100
        address = np.stack([base + starts, base + starts + 6000]).astype(np.uint64)
        fragments = PageFragments(address, np.array(parts, np.uint64), memory)
        for row, key in enumerate(keys):
            data, done = page_bytes(0, key, PAGE), 0
            for start, part in zip(starts, parts, strict=True):
                at = int(start) + 6000 * row
                memory[at : at + part] = data[done : done + part]
                done += part
        assert pages.save(keys, fragments).wait(20).all()
        whole = bytearray(2 * PAGE)
        assert pages.load(keys, whole).wait(20).all()
        assert whole == b"".join(page_bytes(0, key, PAGE) for key in keys)
        before, memory[:] = bytes(memory), bytes(3 * PAGE)
        assert pages.load(keys, fragments).wait(20).all() and memory == before

    def test_the_memory_of_a_load_is_kept_alive(self, store_dir: Path) -> None:
        with open_faulty(store_dir) as (store, devices):
            pages = client(store)
            pages.save(run("a", 1))
            with devices.held():
                memory = bytearray(PAGE)
                ticket = pages.pages.load(run("a", 1), memory)
                with pytest.raises(BufferError):
                    memory.clear()  # exported: it cannot go away under the transfer
                del memory
                gc.collect()
            assert ticket.wait(20).all()

    def test_registered_memory_is_used_and_forgotten(self, store, pages) -> None:
        memory = bytearray(2 * PAGE)
        region = store.register(memory)
        assert pages.save(run("a", 2), memory).wait(20).all()
        store.unregister(region)
        with pytest.raises(TypeError):
            store.register(None)


class TestLoad:
    def test_count_limits_a_load(self, pages) -> None:
        keys = run("a", 5)
        assert pages.save(keys, bytes(5 * PAGE)).wait(20).all()
        assert len(pages.load(keys, bytearray(2 * PAGE), 1, 2).wait(20)) == 2
        assert len(pages.load(keys, bytearray(0), 1, 0).wait(20)) == 0
        with pytest.raises(ValueError):
            pages.load(keys, bytearray(2 * PAGE), 3, -1)

    def test_done_does_not_block_and_wait_repeats(self, store_dir: Path) -> None:
        with open_faulty(store_dir) as (store, devices):
            pages = client(store)
            pages.save(run("a", 2))
            with devices.held():
                ticket = pages.pages.load(run("a", 2), bytearray(2 * PAGE))
                assert not ticket.done()
                with pytest.raises(BusyError, match=r"after 0\.01 s"):
                    ticket.wait(0.01)
            assert ticket.wait(20).all() and ticket.wait(0).all() and ticket.done()

    def test_a_load_of_nothing_is_done_at_once(self, pages) -> None:
        ticket = pages.load(run("none", 2), bytearray(2 * PAGE))
        assert ticket.done() and not ticket.wait(0).any()

    def test_unwaited_loads_do_not_hold_up_the_store(self, store_dir: Path) -> None:
        with open_faulty(store_dir) as (store, _):
            pages = client(store)
            pages.save(run("a", 8))
            for _ in range(300):  # more than a transport keeps in flight
                pages.pages.load(run("a", 1), bytearray(PAGE))
            for i in range(4):
                assert all(pages.save(run(i, 8)))
            assert store.stats().counters.get("loads_refused_busy", 0) == 0


class TestPins:
    def test_only_stored_pages_are_pinned(self, pages) -> None:
        pages.save(run("a", 3), bytes(3 * PAGE)).wait(20)
        assert pages.pin(run("a", 5)) == 3 and pages.pin(run("b", 2)) == 0
        pages.unpin(run("a", 5), 3)
        pages.unpin(run("a", 5), 3)  # nothing to take back


class TestStats:
    def test_counters_say_what_happened(self, store) -> None:
        pages = client(store)
        pages.save(run("a", 4))
        pages.save(run("a", 5))
        pages.load(run("a", 6))
        stats = store.stats()
        assert (stats.pages, stats.used_bytes, stats.pending_bytes) == (5, 5 * PAGE, 0)
        assert stats.capacity_bytes == store.config.capacity and stats.transport.name == "posix"
        assert stats.counters["saved_pages"] == 5 and stats.counters["known_pages"] == 4
        assert stats.counters["loaded_pages"] == 5 and stats.counters["missed_pages"] == 1


class TestClose:
    def test_a_closed_store_says_so(self, store_dir: Path) -> None:
        store = open_small(store_dir)
        pages = client(store).pages
        store.close()
        store.close()
        calls = [
            lambda: pages.match(run("a", 1)),
            lambda: pages.contains(run("a", 1)),
            lambda: pages.save(run("a", 1), bytes(PAGE)),
            lambda: pages.load(run("a", 1), bytearray(PAGE)),
            lambda: pages.pin(run("a", 1)),
            lambda: pages.unpin(run("a", 1), 1),
            pages.clear,
            store.stats,
            lambda: store.namespace(**NAMESPACE),
            lambda: store.register(bytearray(PAGE)),
        ]
        for call in calls:
            with pytest.raises(StoreClosedError):
                call()
        store.unregister(1)

    def test_leaving_the_block_closes(self, store_dir: Path) -> None:
        with pytest.raises(KeyError), open_small(store_dir) as store:
            raise KeyError
        with pytest.raises(StoreClosedError):
            store.stats()

    def test_loads_in_flight_are_finished(self, store_dir: Path) -> None:
        with open_faulty(store_dir) as (store, _):
            pages = client(store)
            pages.save(run("a", 2))
            memory = bytearray(2 * PAGE)
            ticket = pages.pages.load(run("a", 2), memory)
        assert ticket.done() and ticket.wait(0).all()
        assert memory == b"".join(page_bytes(0, key, PAGE) for key in run("a", 2))


def test_every_public_name_exists_and_says_what_it_is() -> None:
    assert len(set(tutti_core.__all__)) == len(tutti_core.__all__)
    for name in tutti_core.__all__:
        assert getattr(tutti_core, name).__doc__, name
