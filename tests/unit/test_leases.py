"""Leases are bounded in number, age and bytes; chains find the runs of pages that are asked for."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import pytest

from tutti_sglang.chain import Chain
from tutti_sglang.leases import REUSE_S, Lease, Leases


def keys_of(name: str, count: int) -> list[str]:
    return [hashlib.sha256(f"{name} {i}".encode()).hexdigest() for i in range(count)]


@dataclass
class Held:
    released: int = 0

    def release(self) -> None:
        self.released += 1


def lease(length_bytes: int = 1, made_s: float = 0.0, name: str = "x") -> tuple[Lease, Held]:
    held = Held()
    chain = Chain.of([], keys_of(name, 3))
    return Lease(chain, (1, 2, 3), (held,), length_bytes, made_s), held


def test_a_new_lease_of_a_request_ends_the_former() -> None:
    leases = Leases(100)
    (one, first), (two, second) = lease(), lease()
    leases.put("r", one)
    leases.put("r", two)
    assert (first.released, second.released) == (1, 0)
    assert leases.take("r") is two
    assert leases.take("r") is None
    assert (second.released, len(leases), leases.length_bytes) == (0, 0, 0)


def test_old_ones_end() -> None:
    leases = Leases(100, age_s=10.0)
    made = [lease(made_s=float(i)) for i in range(5)]
    for i, (one, _) in enumerate(made):
        leases.put(f"r{i}", one)
    leases.sweep(11.5)
    assert [held.released for _, held in made] == [1, 1, 0, 0, 0]
    leases.sweep(100.0)
    assert len(leases) == leases.length_bytes == 0


def test_they_are_bounded_in_number() -> None:
    leases = Leases(1000, count_max=3)
    made = [lease() for _ in range(5)]
    for i, (one, _) in enumerate(made):
        leases.put(f"r{i}", one)
    assert [held.released for _, held in made] == [1, 1, 0, 0, 0]


def test_they_are_bounded_in_bytes() -> None:
    leases = Leases(100)
    made = [lease(length_bytes=40) for _ in range(4)]
    for i, (one, _) in enumerate(made):
        leases.put(f"r{i}", one)
    assert [held.released for _, held in made] == [1, 1, 0, 0]
    assert leases.length_bytes == 80


def test_one_alone_may_be_larger() -> None:
    leases = Leases(100)
    (small, before), (large, held) = lease(10), lease(1000)
    leases.put("small", small)
    leases.put("large", large)
    assert (before.released, held.released) == (1, 0)
    (small, after) = lease(10)
    leases.put("small", small)
    assert (held.released, after.released, leases.length_bytes) == (1, 0, 10)


def test_the_same_question_soon_after_begins_a_lease_anew() -> None:
    leases = Leases(100, age_s=10.0)
    one, held = lease(made_s=0.0)
    leases.put("r", one)
    assert leases.renew("r", 0, keys_of("x", 3), 1.0) is one
    leases.sweep(10.5)
    assert held.released == 0, "it was renewed at 1 s"
    leases.sweep(11.0)
    assert held.released == 1


@pytest.mark.parametrize(
    ("rid", "first", "tail", "now_s"),
    [
        ("s", 0, keys_of("x", 3), 1.0),
        ("r", 1, keys_of("x", 3), 1.0),
        ("r", 0, keys_of("x", 2), 1.0),
        ("r", 0, keys_of("y", 3), 1.0),
        ("r", 0, keys_of("x", 3), REUSE_S + 0.1),
    ],
)
def test_another_question_gets_no_old_answer(
    rid: str, first: int, tail: list[str], now_s: float
) -> None:
    leases = Leases(100)
    leases.put("r", lease()[0])
    assert leases.renew(rid, first, tail, now_s) is None


def test_after_a_failed_load_no_old_answer_is_given() -> None:
    leases = Leases(100)
    leases.put("r", lease(made_s=1.0)[0])
    leases.distrust(1.5)
    assert leases.renew("r", 0, keys_of("x", 3), 1.6) is None
    newer, _ = lease(made_s=1.7)
    leases.put("r", newer)
    assert leases.renew("r", 0, keys_of("x", 3), 1.8) is newer


def test_clear_ends_all() -> None:
    leases = Leases(100)
    made = [lease() for _ in range(3)]
    for i, (one, _) in enumerate(made):
        leases.put(f"r{i}", one)
    leases.clear()
    assert [held.released for _, held in made] == [1, 1, 1]
    assert len(leases) == leases.length_bytes == 0


# ---- chains ----------------------------------------------------------------------------------


@pytest.mark.parametrize("low", range(4))
@pytest.mark.parametrize("high", range(1, 5))
def test_runs_of_a_chain(low: int, high: int) -> None:
    ancestors, tail = keys_of("a", 2), keys_of("t", 4)
    chain = Chain.of(ancestors, tail)
    assert (len(chain), chain.first) == (4, 2)
    if low < high:
        keys, first = chain.run(tail[low:high])
        assert (keys.rooted, len(keys), first) == (True, 2 + high, 2 + low)
        assert [key.hex() for key in keys] == [*ancestors, *tail][: 2 + high]


def test_keys_that_are_no_run_are_a_chain_of_their_own() -> None:
    tail = keys_of("t", 4)
    chain = Chain.of([], tail)
    for strange in ([tail[0], tail[2]], keys_of("other", 2), [tail[3], *keys_of("other", 1)]):
        keys, first = chain.run(strange)
        assert (keys.rooted, first, [key.hex() for key in keys]) == (False, 0, strange)


def test_without_ancestors_the_root_is_not_known() -> None:
    assert not Chain.of(None, keys_of("t", 2)).keys.rooted
    assert Chain.of([], keys_of("t", 2)).keys.rooted
