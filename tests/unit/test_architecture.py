"""The shape of the source: who imports whom, and that every public thing says what it is.

The ladder is that of docs/design.md. A module may import from its own rung and from those below it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tutti_core

ROOT = Path(__file__).parents[2]

RUNGS = {
    "arguments": 0,
    "errors": 0,
    "config": 0,
    "hashing": 1,
    "memcopy": 1,
    "format": 1,
    "keys": 1,
    "geometry": 1,
    "index": 2,
    "policies": 2,
    "tiers.space": 2,
    "nvme": 3,
    "gio": 3,
    "io": 3,
    "tiers": 4,
    "store": 5,
}
TOP = 6
"""replay, cli, metrics, bench, testing and whatever else stands on the store."""

NATIVE = {
    "tutti_core.io.uring",
    "tutti_core.hashing",
    "tutti_core.memcopy",
    "tutti_core.io.gpu_device",
    "tutti_core.gio.cuda_executor",
    "tutti_core.gio.executor",
    "tutti_core.gio.ring",
    "tutti_core.bench.gio",
    "tutti_core.testing.soft_nvme",
}
"""Others do without: a build without the extension has neither uring nor gpu."""
FOREIGN = {"torch", "sglang", "cupy"}
EXEMPT_CALLERS = ("tutti_core.testing", "tutti_core")
"""`testing` works on the transport alone (checked below); the package itself gathers the names."""

Import = tuple[str, str, int, bool]  # importing module, imported name, line, at module level


def module_name(file: Path, root: Path) -> str:
    parts = list(file.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, module: str) -> Iterator[Import]:
    """Every import of a module, those inside functions too, by full name."""
    tree = ast.parse(source)
    inside = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        top = id(node) not in inside
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield module, alias.name, node.lineno, top
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: a relative import"
            for alias in node.names:
                yield module, f"{node.module}.{alias.name}", node.lineno, top


def rung(name: str) -> int:
    """Rung of a full name below tutti_core; the longest entry that fits counts."""
    path = name.removeprefix("tutti_core").lstrip(".")
    fitting = [key for key in RUNGS if path == key or path.startswith(key + ".")]
    return RUNGS[max(fitting, key=len)] if fitting else TOP


def problems(source: str, module: str) -> list[str]:
    """What is wrong with the imports of one module."""
    found = []
    for caller, name, line, top in imports(source, module):
        where = f"{caller}:{line} imports {name}"
        package = name.split(".")[0]
        if package in FOREIGN and top and caller.startswith("tutti_core"):
            found.append(f"{where} at module level")
        if name.startswith("tutti_core._native") and caller not in NATIVE:
            found.append(f"{where}; only {sorted(NATIVE)} may")
        if package == "tutti_sglang" and caller.startswith("tutti_core"):
            found.append(f"{where}, which stands above it")
        if caller.startswith("tutti_sglang") and package == "tutti_core":
            public = name == "tutti_core" or name.removeprefix("tutti_core.") in tutti_core.__all__
            if not public:
                found.append(f"{where}, which is not a public name")
        if not caller.startswith("tutti_core") or package != "tutti_core":
            continue
        if name.startswith("tutti_core._native") or caller == "tutti_core":
            continue
        if caller.startswith("tutti_core.testing"):
            if not name.startswith("tutti_core.testing") and rung(name) > RUNGS["io"]:
                found.append(f"{where}; testing works on the transport alone")
        elif rung(name) > rung(caller):
            found.append(f"{where}, which stands above it")
    return found


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


FILES = [*sources("tutti_core"), *sources("tutti_sglang")]


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_no_module_imports_from_above_itself(file: Path) -> None:
    assert not problems(file.read_text(), module_name(file, ROOT))


@pytest.mark.parametrize(
    ("module", "line", "said"),
    [
        ("tutti_core.keys", "from tutti_core.store import PrefixStore", "above"),
        ("tutti_core.errors", "from tutti_core.keys import Namespace", "above"),
        ("tutti_core.index.radix", "from tutti_core.io.transport import Op", "above"),
        ("tutti_core.index.radix", "import tutti_core.tiers.manager", "above"),
        ("tutti_core.tiers.space", "from tutti_core.tiers.manager import Manager", "above"),
        ("tutti_core.io.posix", "from tutti_core.tiers.pools import Layout", "above"),
        ("tutti_core.tiers.saver", "from tutti_core.store import Match", "above"),
        ("tutti_core.store", "from tutti_core.cli import main", "above"),
        ("tutti_core.keys", "def f():\n    from tutti_core.store import Match", "above"),
        ("tutti_core.testing.faults", "from tutti_core.tiers.space import Space", None),
        ("tutti_core.testing.faults", "from tutti_core.tiers.saver import Saver", "transport"),
        ("tutti_core.store", "import torch", "module level"),
        ("tutti_core.geometry", "from sglang import srt", "module level"),
        ("tutti_core.geometry", "def f():\n    import torch", None),
        ("tutti_core.store", "from tutti_core import _native", "only"),
        ("tutti_core.store", "from tutti_core._native import UringEngine", "only"),
        ("tutti_core.io.uring", "from tutti_core._native import UringEngine", None),
        ("tutti_sglang.backend", "from tutti_core import PrefixStore", None),
        ("tutti_sglang.backend", "from tutti_core import store", "public"),
        ("tutti_sglang.backend", "from tutti_core.store import PrefixStore", "public"),
        ("tutti_sglang.backend", "import tutti_core.store", "public"),
        ("tutti_core.store", "import tutti_sglang", "above"),
        ("tutti_core.io.posix", "from tutti_core.config import StoreConfig", None),
    ],
)
def test_the_checker_finds_what_is_planted(module: str, line: str, said: str | None) -> None:
    found = problems(line, module)
    assert (not found) if said is None else any(said in problem for problem in found), found


def public_parts(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Public classes and functions, and the public methods of public classes."""
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.name.startswith("_"):
            continue
        yield node.name, node
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                named = isinstance(part, ast.FunctionDef) and not part.name.startswith("_")
                if named and not any("overload" in ast.unparse(d) for d in part.decorator_list):
                    yield f"{node.name}.{part.name}", part


def undocumented(source: str) -> list[str]:
    tree = ast.parse(source)
    missing = [name for name, node in public_parts(tree) if not ast.get_docstring(node)]
    text = ast.get_docstring(tree)
    if tree.body and not text:
        missing.append("the file itself")
    elif text and not text.split("\n")[0].rstrip().endswith((".", ":", "?", "!")):
        missing.append("a first line that is a sentence")
    return missing


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_every_public_thing_says_what_it_is(file: Path) -> None:
    assert not undocumented(file.read_text())


def test_the_docstring_checker_finds_what_is_planted() -> None:
    source = (
        '"""Does it.\n\nMore."""\n\nclass A:\n    """A."""\n    def b(self): ...\ndef c(): ...\n'
    )
    assert undocumented(source) == ["A.b", "c"]
    assert undocumented("x = 1\n") == ["the file itself"]
    assert undocumented('"""no sentence"""\n') == ["a first line that is a sentence"]
    assert undocumented("") == []


def test_every_exported_name_is_listed_once_and_in_order() -> None:
    assert tutti_core.__all__ == sorted(set(tutti_core.__all__))
