"""What can be asked of a function or class: parameters, fields, methods, how it is called.

Each kind has `problem(found)`: None when `found` is as described, else what is different. Pure:
knows nothing of SGLang, so each kind can be tested on small stand-ins.

`at_start` says whether a kind is cheap enough for every start of a server (microseconds); the
others read the source text of what they look at (milliseconds).
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol


class Shape(Protocol):
    """One thing that must hold of an object."""

    at_start: ClassVar[bool]

    def problem(self, found: Any) -> str | None:
        """What is not as it must be; None if all is."""
        ...


@dataclass(frozen=True, slots=True)
class Takes:
    """Exactly these parameters, in this order; `self` and `cls` left out."""

    at_start: ClassVar[bool] = True
    names: str

    def problem(self, found: Any) -> str | None:
        """See Shape."""
        have = parameters(found)
        return None if have == self.names.split() else f"it takes ({', '.join(have)})"


@dataclass(frozen=True, slots=True)
class Accepts:
    """Can be called with these arguments; what else it takes has a default."""

    at_start: ClassVar[bool] = True
    positional: int = 0
    keywords: str = ""

    def problem(self, found: Any) -> str | None:
        """See Shape."""
        return refusal(found, self.positional, self.keywords.split())


@dataclass(frozen=True, slots=True)
class Has:
    """Has these attributes: of a class, a module, an enum, or fields of a dataclass or struct."""

    at_start: ClassVar[bool] = True
    names: str

    def problem(self, found: Any) -> str | None:
        """See Shape."""
        known = _fields(found)
        missing = [n for n in self.names.split() if n not in known and not hasattr(found, n)]
        return f"it has no {', '.join(missing)}" if missing else None


@dataclass(frozen=True, slots=True)
class Methods:
    """A class whose public functions are exactly these, and whose abstract ones are `abstract`."""

    at_start: ClassVar[bool] = True
    names: str
    abstract: str = ""

    def problem(self, found: Any) -> str | None:
        """See Shape."""
        have = {n for n, _ in inspect.getmembers(found, inspect.isfunction) if n[0] != "_"}
        wanted = set(self.names.split()) | set(self.abstract.split())
        says = [f"it has no {n}" for n in sorted(wanted - have)]
        says += [f"{n} is new" for n in sorted(have - wanted)]
        abstract = set(getattr(found, "__abstractmethods__", ()))
        wanted = set(self.abstract.split())
        says += [f"{n} is no longer abstract" for n in sorted((wanted - abstract) & have)]
        says += [f"{n} has become abstract" for n in sorted((abstract - wanted) & have)]
        return "; ".join(says) or None


@dataclass(frozen=True, slots=True)
class Sets:
    """A class that gives its objects these attributes, itself or in a base class."""

    at_start: ClassVar[bool] = False
    names: str

    def problem(self, found: Any) -> str | None:
        """See Shape."""
        have = set(_fields(found))
        for base in inspect.getmro(found)[:-1]:
            have.update(vars(base), _assigned(base))
        missing = [name for name in self.names.split() if name not in have]
        return f"it sets no {', '.join(missing)}" if missing else None


@dataclass(frozen=True, slots=True)
class Calls:
    """A function in which each call of `callee` has exactly these arguments, and there is one.

    positional, keywords: how many, and which names.
    """

    at_start: ClassVar[bool] = False
    callee: str
    positional: int = 0
    keywords: str = ""

    def problem(self, found: Any) -> str | None:
        """See Shape."""
        calls = list(_calls(found, self.callee))
        for call in calls:
            names = [str(keyword.arg) for keyword in call.keywords]
            if len(call.args) != self.positional or set(names) != set(self.keywords.split()):
                return f"it now has: {ast.unparse(call)}"
        return None if calls else f"it no longer calls {self.callee}"


@dataclass(frozen=True, slots=True)
class Says:
    """A function that contains this expression, however it is laid out."""

    at_start: ClassVar[bool] = False
    expression: str

    def problem(self, found: Any) -> str | None:
        """See Shape."""
        wanted = ast.dump(ast.parse(self.expression, mode="eval").body)
        if any(isinstance(n, ast.expr) and ast.dump(n) == wanted for n in _nodes(found)):
            return None
        return f"it no longer has: {self.expression}"


@dataclass(frozen=True, slots=True)
class Holds:
    """A collection with this in it."""

    at_start: ClassVar[bool] = True
    member: str

    def problem(self, found: Any) -> str | None:
        """See Shape."""
        return None if self.member in found else f"{self.member} is not in it"


def resolve(dotted: str) -> Any:
    """Return the object at a dotted path: the longest importable prefix, then attributes.

    Raises
        ImportError, AttributeError: there is none.
    """
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        module = ".".join(parts[:end])
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # the module is there, something that it needs is not
            continue
        for name in parts[end:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(f"No module named {parts[0]!r}", name=parts[0])


def parameters(function: Any) -> list[str]:
    """Parameter names without `self` and `cls`; a hooked function shows the original's."""
    names = inspect.signature(_plain(function)).parameters
    return [name for name in names if name not in ("self", "cls")]


def refusal(function: Any, positional: int, keywords: list[str]) -> str | None:
    """Why `function` could not be called like that; None if it could. `self` counts as given."""
    signature = inspect.signature(_plain(function))
    own = [name for name in signature.parameters if name in ("self", "cls")]
    try:
        signature.bind(*[None] * (len(own) + positional), **dict.fromkeys(keywords))
    except TypeError as error:
        return f"a call with {positional} positional and ({', '.join(keywords)}) fails: {error}"
    return None


def _plain(function: Any) -> Any:
    """A class stands for its constructor."""
    return function.__init__ if inspect.isclass(function) else function


def _fields(found: Any) -> tuple[str, ...]:
    if dataclasses.is_dataclass(found):
        return tuple(field.name for field in dataclasses.fields(found))
    if isinstance(names := getattr(found, "__struct_fields__", None), tuple):  # msgspec
        return names
    annotations = getattr(found, "__annotations__", {})
    return tuple(annotations) if isinstance(annotations, dict) else ()


@functools.lru_cache(maxsize=256)
def _tree(found: Any) -> ast.AST | None:
    """The syntax tree of a function or class; None where there is no source."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(found))))
    except (OSError, TypeError):
        return None


def forget_sources() -> None:
    """Give back the memory of the syntax trees read so far."""
    _tree.cache_clear()


def _nodes(found: Any) -> Iterator[ast.AST]:
    tree = _tree(found)
    return iter(()) if tree is None else ast.walk(tree)


def _assigned(owner: Any) -> set[str]:
    """Names that are stored as attributes of `self` somewhere in a class."""
    return {
        node.attr
        for node in _nodes(owner)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def _calls(found: Any, callee: str) -> Iterator[ast.Call]:
    for node in _nodes(found):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            if name == callee:
                yield node
