"""tiers/copier.py: order, bounds, who does the work, and the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from store_kit import poll

from tutti_core.tiers.copier import COPIES_MAX, Copier, Copy


@pytest.fixture
def copier() -> Iterator[Copier]:
    made = Copier(backlog_bytes=1000)
    yield made
    assert made.stop(20)


class Held:
    """A job that runs until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.copy = Copy(self._work)

    def _work(self) -> None:
        self.begun.set()
        assert self.go.wait(20)


def occupy(copier: Copier) -> Held:
    held = Held()
    assert copier.enqueue(held.copy, 0) and held.begun.wait(20)
    return held


def test_jobs_run_in_order(copier: Copier) -> None:
    done: list[int] = []
    held = occupy(copier)
    jobs = [Copy(lambda i=i: done.append(i)) for i in range(10)]  # type: ignore[misc]
    assert all(copier.enqueue(job, 10) for job in jobs)
    assert copier.pending_bytes() == 100 and not jobs[0].done()
    held.go.set()
    poll(lambda: jobs[-1].done(), "all ran")
    assert done == list(range(10))
    assert copier.drain(20) and copier.pending_bytes() == 0


def test_a_waiter_does_what_nobody_has_begun(copier: Copier) -> None:
    held = occupy(copier)
    by: list[str] = []
    job = Copy(lambda: by.append(threading.current_thread().name))
    assert copier.enqueue(job, 1) and not job.wait(0.0)
    assert job.wait(20) and by == [threading.current_thread().name]
    held.go.set()
    assert held.copy.wait(20) and copier.drain(20) and len(by) == 1


def test_the_queue_is_bounded_in_jobs_and_bytes(copier: Copier) -> None:
    held = occupy(copier)
    assert copier.enqueue(Copy(lambda: None), 600)
    assert not copier.enqueue(Copy(lambda: None), 600)
    added = 0
    while copier.enqueue(Copy(lambda: None), 0):
        added += 1
    assert added == COPIES_MAX - 2
    assert not copier.drain(0.01)
    held.go.set()
    assert copier.drain(20)
    assert copier.enqueue(Copy(lambda: None), 5000)  # one job may be larger than the bound


def test_a_job_that_fails_says_so_and_harms_nothing(copier: Copier, caplog) -> None:
    def broken() -> None:
        raise OSError("no")

    job = Copy(broken)
    assert copier.enqueue(job, 1) and job.wait(20) and job.failed
    assert "a copy of pages in memory failed" in caplog.text
    after = Copy(lambda: None)
    assert copier.enqueue(after, 1) and after.wait(20) and not after.failed


def test_stopping_does_what_is_queued_and_takes_no_more() -> None:
    copier = Copier(1000)
    held = occupy(copier)
    job = Copy(lambda: None)
    assert copier.enqueue(job, 1)
    assert not copier.stop(0.01)
    assert not copier.enqueue(Copy(lambda: None), 1)
    held.go.set()
    assert copier.stop(20) and job.done() and copier.drain(1)
