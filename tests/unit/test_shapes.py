"""What the version guard asks of functions and classes, on small stand-ins."""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from typing import Any

import pytest

from tutti_sglang.shapes import (
    Accepts,
    Calls,
    Has,
    Holds,
    Methods,
    Says,
    Sets,
    Shape,
    Takes,
    parameters,
    resolve,
)


class Store(ABC):
    """A contract."""

    kind = "store"

    def __init__(self, size: int, *, colour: str = "red") -> None:
        self.size = size
        self.shade, self.tone = colour, 0

    @abstractmethod
    def get(self, key: str) -> bytes: ...

    def clear(self) -> None:
        self.size = 0

    def use(self, backend: Any) -> None:
        """Calls what it is given."""
        backend.put(1, 2, late=True)
        if self.size not in (1, 2):
            backend.put(3, 4, late=False)


class Derived(Store):
    def get(self, key: str, default: bytes = b"") -> bytes:
        self.seen = key
        return default


@dataclasses.dataclass
class Row:
    name: str
    length: int = 0


def hooked(*args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        (Takes("key"), Store.get),
        (Takes("key default"), Derived.get),
        (Takes("size colour"), Store),
        (Takes("key"), functools.wraps(Store.get)(hooked)),
        (Accepts(1), Derived.get),
        (Accepts(0, "key"), Derived.get),
        (Accepts(1, "colour"), Store),
        (Has("kind get"), Store),
        (Has("name length"), Row),
        (Methods("clear use", abstract="get"), Store),
        (Methods("clear get use"), Derived),
        (Sets("size shade tone kind"), Store),
        (Sets("size seen"), Derived),
        (Calls("put", 2, "late"), Store.use),
        (Says("self.size not in (1,2)"), Store.use),
        (Holds("a"), {"a", "b"}),
    ],
)
def test_what_holds_is_no_problem(shape: Shape, found: Any) -> None:
    assert shape.problem(found) is None


@pytest.mark.parametrize(
    ("shape", "found", "said"),
    [
        (Takes("keys"), Store.get, "(key)"),
        (Accepts(2), Store.get, "too many positional"),
        (Accepts(0, "name"), Store.get, "fails"),
        (Accepts(0), Store, "size"),
        (Has("kind size"), Store, "no size"),
        (Has("name width"), Row, "no width"),
        (Methods("clear use put", abstract="get"), Store, "no put"),
        (Methods("clear", abstract="get"), Store, "use is new"),
        (Methods("clear get use"), Store, "get has become abstract"),
        (Methods("clear use", abstract="get"), Derived, "get is no longer abstract"),
        (Sets("seen"), Store, "no seen"),
        (Calls("put", 1, "late"), Store.use, "put(1, 2, late=True)"),
        (Calls("put", 2, "soon"), Store.use, "put(1, 2, late=True)"),
        (Calls("take"), Store.use, "no longer calls take"),
        (Says("self.size not in (1, 3)"), Store.use, "no longer has"),
        (Holds("c"), {"a", "b"}, "c is not in it"),
    ],
)
def test_what_does_not_hold_is_said(shape: Shape, found: Any, said: str) -> None:
    assert said in str(shape.problem(found))


def test_without_source_nothing_is_claimed() -> None:
    assert "no longer calls" in str(Calls("put").problem(len))
    assert Sets("x").problem(type("Bare", (), {"x": 1})) is None


def test_paths() -> None:
    assert resolve("collections.abc.Mapping.get").__name__ == "get"
    assert resolve("json").__name__ == "json"
    assert parameters(resolve("json.dumps"))[0] == "obj"
    with pytest.raises(AttributeError):
        resolve("json.no_such_thing")
    with pytest.raises(ModuleNotFoundError):
        resolve("no_such_package.thing")


def test_only_reading_sources_is_kept_from_the_start() -> None:
    cheap = {kind for kind in (Takes, Accepts, Has, Methods, Holds) if kind.at_start}
    assert len(cheap) == 5
    assert not any(kind.at_start for kind in (Sets, Calls, Says))
