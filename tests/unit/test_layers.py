"""The layer reader against pages that come, fail and stall on command: every batch ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tutti_core import (
    BusyError,
    DeviceError,
    LayerLoadError,
    LayerRead,
    LayerReader,
    StoreClosedError,
    TuttiError,
    group_layers,
)

WAIT_S = 20.0


class Parts:
    """Pages whose parts arrive when the test says so.

    Parameters
        bad: pages that are wrong in a part: {(part, page)}.
        errors: raised by `finish` of a part, or by `start` of ("start", part).
        late: how often `finish` of a part says that it is not there yet.
        refusals: how often `start` finds too many transfers in flight.
    """

    def __init__(
        self,
        part_count: int,
        pages: int = 2,
        *,
        found: Sequence[bool] | None = None,
        bad: set[tuple[int, int]] = frozenset(),  # type: ignore[assignment]
        errors: dict[Any, BaseException] | None = None,
        late: dict[int, int] | None = None,
        refusals: int = 0,
        log: list[Any] | None = None,
        name: str = "",
    ) -> None:
        self.part_count = part_count
        self.found = np.array(found if found is not None else [True] * pages, dtype=np.bool_)
        self.bad, self.errors, self.late = bad, dict(errors or {}), dict(late or {})
        self.refusals = refusals
        self.log = log if log is not None else []
        self.name = name
        self.in_flight: set[tuple[int, int, int]] = set()
        self.in_flight_max = 0
        self.ended = 0
        self.addresses: list[npt.NDArray[np.uint64] | None] = []
        self.released = threading.Event()
        self.released.set()

    def start(
        self,
        part: int,
        low: int = 0,
        high: int | None = None,
        address: npt.NDArray[np.uint64] | None = None,
    ) -> tuple[int, int, int]:
        assert not self.ended, "started after its end"
        if ("start", part) in self.errors:
            raise self.errors[("start", part)]
        if self.refusals:
            self.refusals -= 1
            raise BusyError("many")
        reading = (part, low, len(self.found) if high is None else high)
        assert reading not in self.in_flight
        self.in_flight.add(reading)
        self.in_flight_max = max(self.in_flight_max, len(self.in_flight))
        self.addresses.append(address)
        self.log.append(("start", self.name, part))
        return reading

    def finish(self, reading: tuple[int, int, int], timeout_s: float) -> npt.NDArray[np.bool_]:
        part, low, high = reading
        assert reading in self.in_flight, "finished twice"
        if self.late.get(part, 0) > 0:
            self.late[part] -= 1
            raise BusyError("not yet")
        if not self.released.wait(timeout_s):
            raise BusyError("not yet")
        self.in_flight.discard(reading)
        self.log.append(("finish", self.name, part))
        if part in self.errors:
            raise self.errors[part]
        wrong = {page for at, page in self.bad if at <= part}
        return np.array([page not in wrong for page in range(low, high)], dtype=np.bool_)

    def end(self) -> None:
        assert not self.in_flight, "ended with a part in flight"
        self.ended += 1


class Sink:
    """Notes what it hears, and that it hears nothing after the end."""

    def __init__(self, layer_count: int, log: list[Any] | None = None) -> None:
        self.layer_count = layer_count
        self.layers: list[int] = []
        self.error: BaseException | None = None
        self.threads: set[str] = set()
        self.over = threading.Event()
        self.log = log if log is not None else []
        self.raises: dict[int, BaseException] = {}

    def complete(self, layer: int) -> None:
        assert not self.over.is_set()
        self.threads.add(threading.current_thread().name)
        if layer in self.raises:
            raise self.raises[layer]
        self.layers.append(layer)
        self.log.append(("layer", layer))
        if len(self.layers) == self.layer_count:
            self.over.set()

    def fail(self, error: BaseException) -> None:
        assert not self.over.is_set()
        self.error = error
        self.over.set()

    def wait(self) -> Sink:
        assert self.over.wait(WAIT_S), "the batch does not end"
        return self


def one_each(count: int) -> tuple[tuple[int, ...], ...]:
    return tuple((layer,) for layer in range(count))


Make = Callable[..., LayerReader]


@pytest.fixture
def reader() -> Iterator[Make]:
    made: list[LayerReader] = []

    def make(layer_count: int, **options: Any) -> LayerReader:
        made.append(LayerReader(layer_count, **options))
        return made[-1]

    yield make
    for one in made:
        assert one.close(WAIT_S), "the thread does not end"


def run(reader: LayerReader, reads: Sequence[LayerRead], sink: Sink | None = None) -> Sink:
    """Submit a batch and wait for its end; the loads have ended then."""
    sink = sink or Sink(reader.layer_count)
    reader.submit(lambda: reads, sink)
    sink.wait()
    assert reader.wait_idle(WAIT_S) and not reader.busy
    return sink


# ---- parts of a page ----
@pytest.mark.parametrize(
    ("layer_bytes", "aim", "parts"),
    [
        ([], 8, []),
        ([5], 8, [[0]]),
        ([5] * 3, 1, [[0], [1], [2]]),
        ([5] * 6, 10, [[0], [1, 2], [3, 4], [5]]),
        ([4] * 6, 9, [[0], [1, 2], [3, 4], [5]]),
        ([4] * 8, 10, [[0], [1, 2, 3], [4, 5, 6], [7]]),
        ([1, 1, 100, 1, 1, 1], 2, [[0], [1], [2], [3, 4], [5]]),
        ([100, 1, 1], 1000, [[0], [1, 2]]),
    ],
)
def test_layers_are_grouped_into_parts(
    layer_bytes: list[int], aim: int, parts: list[list[int]]
) -> None:
    assert [list(part) for part in group_layers(layer_bytes, aim)] == parts


@pytest.mark.parametrize(
    ("layers", "layer_bytes", "most"),
    [(32, 32 << 10, 3), (32, 256 << 10, 3), (4, 1 << 10, 3), (32, 4 << 10, 16), (61, 1 << 20, 1)],
)
def test_a_part_is_a_tenth_of_a_page_within_bounds(
    layers: int, layer_bytes: int, most: int
) -> None:
    parts = group_layers([layer_bytes] * layers)
    assert parts[0] == (0,) and max(map(len, parts[1:])) == most
    assert [layer for part in parts for layer in part] == list(range(layers))


# ---- what goes well ----
def test_layers_are_completed_in_order_and_loads_are_ended(reader: Make) -> None:
    parts = Parts(4)
    sink = run(reader(4), [LayerRead(parts, one_each(4))])
    assert (sink.layers, sink.error, parts.ended) == ([0, 1, 2, 3], None, 1)
    assert sink.threads == {"tutti-layers"}


def test_a_part_may_bring_several_layers(reader: Make) -> None:
    log: list[Any] = []
    parts = Parts(3, log=log)
    sink = Sink(6, log)
    run(reader(6, parts_ahead_max=1), [LayerRead(parts, ((0,), (1, 2, 3), (4, 5)))], sink)
    finished = [entry for entry in log if entry[0] != "start"]
    assert finished == [
        ("finish", "", 0), ("layer", 0), ("finish", "", 1), ("layer", 1), ("layer", 2),
        ("layer", 3), ("finish", "", 2), ("layer", 4), ("layer", 5),
    ]  # fmt: skip


def test_the_order_is_that_of_layers_across_all_reads(reader: Make) -> None:
    log: list[Any] = []
    full = Parts(4, log=log, name="full")
    window = Parts(2, log=log, name="window")
    reads = [
        LayerRead(full, ((0,), (2,), (4,), (6,))),
        LayerRead(window, ((1, 3), (5, 7))),
    ]
    sink = Sink(8, log)
    run(reader(8, parts_ahead_max=2), reads, sink)
    starts = [entry[1:] for entry in log if entry[0] == "start"]
    assert starts == [
        ("full", 0), ("window", 0), ("full", 1), ("full", 2), ("window", 1), ("full", 3),
    ]  # fmt: skip
    assert sink.layers == list(range(8))


def test_a_layer_of_several_reads_waits_for_all_of_them(reader: Make) -> None:
    log: list[Any] = []
    one, other = Parts(2, log=log, name="one"), Parts(2, log=log, name="other")
    reads = [LayerRead(one, one_each(2)), LayerRead(other, one_each(2))]
    run(reader(2, parts_ahead_max=1), reads, Sink(2, log))
    done = [entry for entry in log if entry[0] != "start"]
    assert done == [
        ("finish", "one", 0), ("finish", "other", 0), ("layer", 0),
        ("finish", "one", 1), ("finish", "other", 1), ("layer", 1),
    ]  # fmt: skip


def test_layers_that_nothing_brings_are_completed_in_their_turn(reader: Make) -> None:
    log: list[Any] = []
    parts = Parts(2, log=log)
    run(reader(6, parts_ahead_max=1), [LayerRead(parts, ((2,), (4,)))], Sink(6, log))
    done = [entry for entry in log if entry[0] != "start"]
    assert done == [
        ("layer", 0), ("layer", 1), ("finish", "", 0), ("layer", 2), ("layer", 3),
        ("finish", "", 1), ("layer", 4), ("layer", 5),
    ]  # fmt: skip


@pytest.mark.parametrize("reads", [[], [LayerRead(Parts(2, 0), ((0,), (1,)))]])
def test_a_batch_of_no_pages_completes_everything(reader: Make, reads: list[LayerRead]) -> None:
    assert run(reader(3), reads).layers == [0, 1, 2]


def test_a_part_without_a_layer_is_read_before_what_follows_it(reader: Make) -> None:
    parts = Parts(3)
    sink = run(reader(2), [LayerRead(parts, ((), (0,), (1,)))])
    assert sink.layers == [0, 1] and len(parts.addresses) == 3


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_so_many_parts_are_in_flight(reader: Make, ahead: int) -> None:
    parts = Parts(8)
    run(reader(8, parts_ahead_max=ahead), [LayerRead(parts, one_each(8))])
    assert parts.in_flight_max == ahead


@pytest.mark.parametrize("ahead", [1, 2, 8])
@pytest.mark.parametrize(
    ("layers", "first", "needed"),
    [
        ([one_each(8)], 0, 1),
        ([one_each(8)] * 3, 0, 3),
        ([((), *one_each(8))] * 2, 0, 4),  # a part without a layer comes before the first
        ([((0,), (0, 1), *one_each(8)[2:])], 0, 2),  # two parts bring the first
        ([one_each(8)[3:], one_each(8)[5:]], 3, 1),
    ],
)
def test_the_first_layer_has_the_device_nearly_to_itself(
    reader: Make, layers: list[Any], first: int, needed: int, ahead: int
) -> None:
    log: list[Any] = []
    batch = [LayerRead(Parts(len(each), log=log), each) for each in layers]
    run(reader(8, parts_ahead_max=ahead), batch, Sink(8, log))
    starts = [entry[0] == "start" for entry in log]
    before = sum(starts[: log.index(("layer", first))])
    assert needed <= before <= needed + 1
    assert sum(starts) == sum(map(len, layers))


@pytest.mark.parametrize("layers", [((0,), (), ()), ((), (), ())])
def test_parts_after_the_last_layer_are_read_too(reader: Make, layers: Any) -> None:
    parts = Parts(3)
    sink = run(reader(1), [LayerRead(parts, layers)])
    assert sink.layers == [0] and len(parts.addresses) == 3 and parts.ended == 1


def test_batches_run_in_the_order_of_submission(reader: Make) -> None:
    log: list[Any] = []
    hold = threading.Event()
    one = reader(1)
    sinks = [Sink(1, log) for _ in range(3)]

    def make(name: str) -> Callable[[], list[LayerRead]]:
        def wait() -> list[LayerRead]:
            assert hold.wait(WAIT_S)
            return [LayerRead(Parts(1, log=log, name=name), ((0,),))]

        return wait

    for name, sink in zip("abc", sinks, strict=True):
        one.submit(make(name), sink)
    assert one.busy and not one.wait_idle(0.01)
    hold.set()
    assert one.wait_idle(WAIT_S)
    assert [entry[1] for entry in log if entry[0] == "start"] == ["a", "b", "c"]


# ---- what goes wrong ----
def ended(reader: LayerReader, parts: Parts, **read: Any) -> Sink:
    """Run a batch of one read that has to fail, and check what holds after every failure."""
    layers = read.pop("layers", one_each(parts.part_count))
    sink = run(reader, [LayerRead(parts, layers, **read)])
    assert sink.error is not None and parts.ended == 1 and not parts.in_flight
    assert sink.layers == list(range(len(sink.layers)))
    after = run(reader, [LayerRead(Parts(1), (tuple(range(reader.layer_count)),))])
    assert after.error is None, "the reader does not survive a failed batch"
    return sink


def test_a_page_that_is_not_found_fails_before_anything_is_read(reader: Make) -> None:
    parts = Parts(2, found=[True, False, True])
    sink = ended(reader(2), parts)
    assert isinstance(sink.error, LayerLoadError) and "1 of 3 pages" in str(sink.error)
    assert not parts.addresses and sink.layers == []


@pytest.mark.parametrize("part", range(4))
def test_a_wrong_page_fails_its_layer_and_all_later_ones(reader: Make, part: int) -> None:
    sink = ended(reader(4), Parts(4, bad={(part, 1)}))
    assert sink.layers == list(range(part))
    assert isinstance(sink.error, LayerLoadError) and "1 of 2 pages" in str(sink.error)
    assert not sink.error.still_written


@pytest.mark.parametrize("at", [("start", 0), ("start", 3), 0, 2])
def test_an_error_of_a_part_is_passed_on_once_all_is_quiet(reader: Make, at: Any) -> None:
    error = DeviceError("broken")
    sink = ended(reader(4), Parts(4, errors={at: error}))
    assert sink.error is error


def test_the_other_reads_of_a_failed_batch_are_drained_too(reader: Make) -> None:
    good, bad = Parts(4), Parts(4, bad={(1, 0)})
    sink = run(reader(4), [LayerRead(good, one_each(4)), LayerRead(bad, one_each(4))])
    assert sink.layers == [0] and good.ended == bad.ended == 1
    assert not good.in_flight and not bad.in_flight


@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(1), BusyError("later")])
def test_an_error_of_make_fails_the_batch(reader: Make, error: BaseException) -> None:
    one, sink = reader(2), Sink(2)

    def make() -> list[LayerRead]:
        raise error

    one.submit(make, sink)
    assert sink.wait().error is error and sink.layers == []
    assert run(one, []).error is None


@pytest.mark.parametrize(
    ("layers", "said"), [(((0,),), "1 parts"), (((0,), (2,)), "0 .. 1"), (((0,), (-1,)), "0 .. 1")]
)
def test_reads_that_do_not_fit_fail(reader: Make, layers: Any, said: str) -> None:
    sink = ended(reader(2), Parts(2), layers=layers)
    assert isinstance(sink.error, ValueError) and said in str(sink.error)


def test_loads_that_were_made_before_make_failed_are_ended(reader: Make) -> None:
    one, sink, parts = reader(2), Sink(2), Parts(2)

    def make() -> Iterator[LayerRead]:
        yield LayerRead(parts, one_each(2))
        raise KeyError("the second")

    one.submit(make, sink)
    assert isinstance(sink.wait().error, KeyError)
    assert one.wait_idle(WAIT_S) and parts.ended == 1 and not parts.addresses


def test_make_may_return_nonsense(reader: Make) -> None:
    one, sink = reader(2), Sink(2)
    one.submit(lambda: None, sink)  # type: ignore[arg-type,return-value]
    assert isinstance(sink.wait().error, TypeError)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_sink_that_raises_fails_the_batch(reader: Make, layer: int) -> None:
    one, parts, sink = reader(4), Parts(4), Sink(4)
    sink.raises[layer] = RuntimeError("no")
    run(one, [LayerRead(parts, one_each(4))], sink)
    assert sink.layers == list(range(layer)) and sink.error is sink.raises[layer]
    assert parts.ended == 1 and run(one, []).error is None


def test_a_fail_that_raises_does_not_end_the_reader(
    reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    class Rude(Sink):
        def fail(self, error: BaseException) -> None:
            super().fail(error)
            raise RuntimeError("rude")

    one = reader(1)
    run(one, [LayerRead(Parts(1, found=[False]), ((0,),))], Rude(1))
    assert "rude" in caplog.text and run(one, []).error is None


def test_a_load_whose_end_fails_does_not_end_the_reader(
    reader: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def end(self: Parts) -> None:
        raise RuntimeError("endless")

    monkeypatch.setattr(Parts, "end", end)
    one = reader(1)
    assert run(one, [LayerRead(Parts(1), ((0,),))]).layers == [0]
    assert "endless" in caplog.text


# ---- what is busy or late ----
def test_a_transport_that_is_full_is_asked_again(reader: Make) -> None:
    parts = Parts(4, refusals=3)
    assert run(reader(4), [LayerRead(parts, one_each(4))]).error is None


def test_with_parts_in_flight_the_oldest_is_finished_instead(reader: Make) -> None:
    parts = Parts(4)
    start = parts.start

    def refuse_second(*arguments: Any, **named: Any) -> Any:
        if parts.in_flight:
            raise BusyError("one only")
        return start(*arguments, **named)

    parts.start = refuse_second  # type: ignore[method-assign]
    assert run(reader(4), [LayerRead(parts, one_each(4))]).layers == [0, 1, 2, 3]
    assert parts.in_flight_max == 1


def test_a_transport_that_stays_full_fails_the_batch(reader: Make) -> None:
    sink = ended(reader(2, timeout_s=0.02), Parts(2, refusals=1 << 60))
    assert isinstance(sink.error, LayerLoadError) and "no room" in str(sink.error)


def test_a_late_part_is_waited_for(reader: Make) -> None:
    sink = run(reader(3), [LayerRead(Parts(3, late={0: 3, 2: 5}), one_each(3))])
    assert sink.layers == [0, 1, 2]


def test_what_never_comes_fails_the_batch_and_stays_owned(reader: Make) -> None:
    one, parts, sink = reader(3, timeout_s=0.02), Parts(3), Sink(3)
    parts.released.clear()
    one.submit(lambda: [LayerRead(parts, one_each(3))], sink)
    error = sink.wait().error
    assert isinstance(error, LayerLoadError) and error.still_written
    assert "has not arrived" in str(error)
    assert parts.ended == 0 and len(parts.in_flight) == 2, "given up while it is written to"
    assert one.busy and not one.wait_idle(0.05)
    parts.released.set()
    assert one.wait_idle(WAIT_S) and parts.ended == 1 and not parts.in_flight


def test_batches_go_on_while_another_is_owned(reader: Make) -> None:
    one, parts, sink = reader(1, timeout_s=0.02), Parts(1), Sink(1)
    parts.released.clear()
    one.submit(lambda: [LayerRead(parts, ((0,),))], sink)
    sink.wait()
    other = Sink(1)
    one.submit(lambda: [LayerRead(Parts(1), ((0,),))], other)
    assert other.wait().layers == [0] and one.busy and parts.ended == 0
    parts.released.set()


def test_a_part_that_is_late_after_a_failure_stays_owned(reader: Make) -> None:
    late = Parts(2)
    late.released.clear()
    reads = [LayerRead(Parts(1, bad={(0, 0)}), ((0,),)), LayerRead(late, one_each(2))]
    one, sink = reader(2, timeout_s=0.02), Sink(2)
    one.submit(lambda: reads, sink)
    error = sink.wait().error
    assert isinstance(error, LayerLoadError) and error.still_written
    assert isinstance(error.__cause__, LayerLoadError) and not error.__cause__.still_written
    late.released.set()
    assert one.wait_idle(WAIT_S) and late.ended == 1


# ---- closing ----
def test_close_fails_what_waits_and_cuts_short_what_runs() -> None:
    one = LayerReader(8, parts_ahead_max=2)
    running, waiting = Sink(8), Sink(8)
    parts, made = Parts(8), []
    parts.released.clear()
    one.submit(lambda: [LayerRead(parts, one_each(8))], running)
    one.submit(lambda: made.append(1) or [], waiting)  # type: ignore[func-returns-value]
    while len(parts.in_flight) < 2:
        time.sleep(0.001)
    assert not one.close(0.02), "closed while a device writes"
    assert not running.over.is_set()
    parts.released.set()
    assert one.close(WAIT_S)
    for sink in (running, waiting):
        assert isinstance(sink.wait().error, StoreClosedError)
    assert parts.ended == 1 and not parts.in_flight and not made
    assert len(parts.addresses) == 2, "parts were started after close"


def test_close_waits_for_what_failed_before() -> None:
    one, parts, sink = LayerReader(1, timeout_s=0.02), Parts(1), Sink(1)
    parts.released.clear()
    one.submit(lambda: [LayerRead(parts, ((0,),))], sink)
    sink.wait()
    assert not one.close(0.05)
    parts.released.set()
    assert one.close(WAIT_S) and parts.ended == 1 and not one.busy


def test_after_close_a_batch_fails_at_once(reader: Make) -> None:
    one = reader(1)
    assert one.close(WAIT_S) and one.close(WAIT_S)
    sink = Sink(1)
    one.submit(list, sink)
    assert isinstance(sink.error, StoreClosedError)


def test_waiting_batches_are_bounded(reader: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti_core.layers.BATCHES_MAX", 2)
    one, hold = reader(1), threading.Event()
    sinks = [Sink(1) for _ in range(4)]
    begun = threading.Event()

    def wait() -> list[LayerRead]:
        begun.set()
        assert hold.wait(WAIT_S)
        return []

    one.submit(wait, sinks[0])
    assert begun.wait(WAIT_S)
    for sink in sinks[1:]:
        one.submit(list, sink)
    assert isinstance(sinks[3].error, BusyError)
    hold.set()
    assert one.wait_idle(WAIT_S) and [sink.error for sink in sinks[:3]] == [None] * 3


@pytest.mark.parametrize("options", [{"layer_count": 0}, {"layer_count": 1, "parts_ahead_max": 0}])
def test_impossible_readers_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        LayerReader(**options)  # type: ignore[arg-type]


# ---- staging ----
class Room:
    """One space of the stager below."""

    def __init__(self, stager: Rooms, part: int, low: int, high: int) -> None:
        self._stager = stager
        self.name = (part, low, high)
        self.address = np.full((high - low, 1), 7 + part, dtype=np.uint64)
        self.state = "taken"

    def place(self) -> None:
        assert self.state == "taken"
        self.state = "placing"
        if self._stager.place_error:
            raise self._stager.place_error

    def placed(self, timeout_s: float) -> bool:
        assert self.state == "placing"
        if self._stager.stuck:
            return False
        self.state = "placed"
        self._stager.log.append(("placed", *self.name))
        self._stager.open -= 1
        return True

    def drop(self) -> None:
        if self.state not in ("placed", "dropped"):
            self.state = "dropped"
            self._stager.open -= 1


class Rooms:
    """A stager of `rooms` spaces of `pages` pages."""

    def __init__(self, rooms: int = 2, pages: int = 2, log: list[Any] | None = None) -> None:
        self.rooms, self.pages = rooms, pages
        self.open = 0
        self.open_max = 0
        self.stuck = False
        self.place_error: BaseException | None = None
        self.log = log if log is not None else []

    def pages_max(self, target: object, part: int) -> int:
        assert target == "rows"
        return self.pages

    def take(self, target: object, part: int, low: int, high: int) -> Room | None:
        assert target == "rows" and 0 < high - low <= self.pages
        if self.open == self.rooms:
            return None
        self.open += 1
        self.open_max = max(self.open_max, self.open)
        return Room(self, part, low, high)


def test_parts_for_a_target_pass_through_the_stager_in_ranges(reader: Make) -> None:
    log: list[Any] = []
    rooms, parts, sink = Rooms(log=log), Parts(3, 5, log=log), Sink(3, log)
    run(reader(3, stager=rooms), [LayerRead(parts, one_each(3), "rows")], sink)
    assert sink.layers == [0, 1, 2] and rooms.open == 0 and rooms.open_max == 2
    moved = [entry for entry in log if entry[0] in ("placed", "layer")]
    ranges = [(0, 2), (2, 4), (4, 5)]
    assert moved == [
        entry
        for part in range(3)
        for entry in [*[("placed", part, low, high) for low, high in ranges], ("layer", part)]
    ]
    assert all(a is not None and (a >= 7).all() for a in parts.addresses)


def test_reads_without_a_target_pass_by_the_stager(reader: Make) -> None:
    rooms, staged, direct = Rooms(), Parts(1), Parts(1)
    reads = [LayerRead(staged, ((0,),), "rows"), LayerRead(direct, ((0,),))]
    assert run(reader(1, stager=rooms), reads).layers == [0]
    assert direct.addresses == [None] and rooms.open == 0


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda rooms, parts: setattr(rooms, "stuck", True), LayerLoadError),
        (lambda rooms, parts: setattr(rooms, "place_error", DeviceError("copy")), DeviceError),
        (lambda rooms, parts: parts.errors.update({1: DeviceError("read")}), DeviceError),
        (lambda rooms, parts: parts.errors.update({("start", 1): DeviceError("x")}), DeviceError),
        (lambda rooms, parts: setattr(rooms, "rooms", 0), LayerLoadError),
        (lambda rooms, parts: setattr(parts, "bad", {(1, 0)}), LayerLoadError),
    ],
)
def test_a_failed_batch_gives_all_room_back(
    reader: Make, spoil: Callable[[Rooms, Parts], None], error: type[TuttiError]
) -> None:
    rooms, parts = Rooms(rooms=3), Parts(3, 4)
    spoil(rooms, parts)
    sink = run(reader(3, stager=rooms, timeout_s=0.02), [LayerRead(parts, one_each(3), "rows")])
    assert isinstance(sink.error, error) and rooms.open == 0 and parts.ended == 1


def test_room_that_a_device_still_writes_to_is_kept(reader: Make) -> None:
    rooms, parts, sink = Rooms(rooms=3), Parts(3), Sink(3)
    parts.released.clear()
    one = reader(3, stager=rooms, timeout_s=0.02)
    one.submit(lambda: [LayerRead(parts, one_each(3), "rows")], sink)
    assert isinstance(sink.wait().error, LayerLoadError) and rooms.open == 2
    parts.released.set()
    assert one.wait_idle(WAIT_S) and rooms.open == 0


def test_a_target_without_a_stager_fails(reader: Make) -> None:
    sink = ended(reader(1), Parts(1), target="rows")
    assert isinstance(sink.error, ValueError)
