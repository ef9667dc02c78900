"""The version guard: nothing has moved in the tested SGLang, and each thing that moves is named.

The negative controls put something else in the place of each listed internal, or nothing, and look
at what the guard says. Nothing of SGLang's files is changed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tutti_core import UnsupportedError
from tutti_sglang import internals, shapes
from tutti_sglang.internals import BOTH, HICACHE, LINKER, Internal, Moved

LIST = internals.internals()
PATHS = sorted({internal.path for internal in LIST})


def name(internal: Internal) -> str:
    shape = type(internal.shape).__name__
    return f"{'.'.join(internal.path.split('.')[-2:])}-{shape}"


@pytest.fixture(autouse=True)
def keep_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many checks in a row: do not read SGLang's sources anew for each."""
    monkeypatch.setattr(internals, "forget_sources", lambda: None)


def look(internal: Internal) -> list[Moved]:
    return internals.check(thorough=not internal.shape.at_start)


def belongs_to(path: str, moved: list[Moved]) -> bool:
    """All that was found is at `path` or below it."""
    return all(f"{one.internal.path}.".startswith(f"{path}.") for one in moved)


def parent_of(path: str) -> tuple[Any, str]:
    above, _, last = path.rpartition(".")
    return shapes.resolve(above), last


def something_else(found: Any) -> Any:
    """Takes the place of `found`: a function that takes other things, a class without anything of
    its own (what lies below it is still reached), an empty collection."""
    if isinstance(found, type):

        class Delegating(type):
            def __getattr__(cls, attribute: str) -> Any:
                if attribute.startswith("__") or attribute in NAMES_OF_CLASSES:
                    raise AttributeError(attribute)
                return getattr(found, attribute)

        class Other(metaclass=Delegating):
            def __init__(self) -> None: ...

        return Other
    if callable(found):

        def other(self: Any, *, unheard_of: Any) -> None: ...

        return other
    return type(found)()


NAMES_OF_CLASSES = {
    word
    for internal in LIST
    if isinstance(internal.shape, shapes.Has)
    for word in internal.shape.names.split()
}


def test_nothing_has_moved() -> None:
    assert [str(one) for one in internals.check(thorough=True)] == []


def test_the_tested_version_is_the_pinned_one() -> None:
    pins = Path(__file__).parents[2] / "integration" / "sglang_cpu" / "requirements.txt"
    assert f"sglang=={internals.TESTED_VERSION}" in pins.read_text().splitlines()
    assert (
        f'"sglang=={internals.TESTED_VERSION}"'
        in (Path(__file__).parents[2] / "pyproject.toml").read_text()
    )


@pytest.mark.parametrize("internal", LIST, ids=name)
def test_what_changes_is_named(internal: Internal, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, last = parent_of(internal.path)
    monkeypatch.setattr(owner, last, something_else(getattr(owner, last)))
    moved = look(internal)
    assert internal in [one.internal for one in moved]
    assert belongs_to(internal.path, moved), [str(one) for one in moved]
    for one in moved:
        assert one.internal.path in str(one) and internals.sglang_version() in str(one)
        assert one.problem in str(one) and one.internal.serves in str(one)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ".".join(path.split(".")[-2:]))
def test_what_is_removed_is_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, last = parent_of(path)
    monkeypatch.delattr(owner, last)
    moved = internals.check(thorough=True)
    here = [one for one in moved if one.internal.path == path]
    if not any(last in vars(base) for base in getattr(owner, "__mro__", ())[1:]):
        assert len(here) == sum(internal.path == path for internal in LIST)
        assert all(one.absent for one in here)
    # A contract that loses a method is itself different.
    contract = path.rpartition(".")[0]
    rest = [one for one in moved if isinstance(one.internal.shape, shapes.Methods)]
    assert belongs_to(path, [one for one in moved if one not in rest])
    assert all(one.internal.path in (path, contract) for one in rest)


def test_a_new_method_of_a_contract_needs_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    for contract in (internals.CONTRACT, internals.LINKER_CONTRACT):
        with monkeypatch.context() as patch:
            patch.setattr(shapes.resolve(contract), "brand_new", lambda self: None, raising=False)
            (moved,) = internals.check()
            assert moved.internal.path == contract and "brand_new is new" in str(moved)


def test_only_the_route_that_depends_on_it_is_refused() -> None:
    def moved(routes: Any) -> list[Moved]:
        return [Moved(Internal("sglang.x.y", shapes.Takes(""), routes, "something"), "it is red")]

    internals.require(HICACHE, moved((LINKER,)))
    internals.require(LINKER, moved((HICACHE,)))
    for routes, route in (((LINKER,), LINKER), (BOTH, HICACHE), (BOTH, LINKER)):
        with pytest.raises(UnsupportedError, match=r"sglang\.x\.y: it is red") as refused:
            internals.require(route, moved(routes))
        assert internals.sglang_version() in str(refused.value)
        assert internals.TESTED_VERSION in str(refused.value)


def test_another_version_is_looked_at_thoroughly(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(self: Any, operation: Any, hash_values: Any, host_indices: Any, info: Any) -> None:
        self.storage_backend.batch_get_v1(hash_values, host_indices, info, "more")

    owner, last = parent_of(f"{internals.CONTROLLER}._page_get_zero_copy")
    monkeypatch.setattr(owner, last, other)
    assert internals.check() == []
    monkeypatch.setattr(internals, "sglang_version", lambda: "0.6.0")
    (moved,) = internals.check()
    assert "SGLang 0.6.0" in str(moved) and "batch_get_v1(hash_values" in str(moved)


MOVED_LINKER = """
import json, sys
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinkerWrapper
from sglang.srt.plugins import load_plugins
del UnifiedCacheLinkerWrapper._offload_node
load_plugins()
from sglang.srt.server_args import prepare_server_args
for flags in json.loads(sys.argv[1]):
    try:
        prepare_server_args(flags).resolve_once()
        print("accepted")
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


def test_a_server_says_what_moved_before_it_starts(model: Path, backend_name: str) -> None:
    """The whole way: an internal of the linker is gone when the plugin is loaded."""
    if backend_name != "tutti":
        pytest.skip("checks tutti's own plugin")
    from sglang_cpu.server import BASE_ENVIRONMENT, BASE_FLAGS

    common = [*BASE_FLAGS, f"--model-path={model}"]
    store = json.dumps({"path": "/nowhere", "capacity": "1GiB"})
    hicache = ["--enable-hierarchical-cache", "--hicache-storage-backend=tutti"]
    linker = ["--unified-cache-external-linker-backend=tutti"]
    asked = [
        [*common, *hicache, f"--hicache-storage-backend-extra-config={store}"],
        [*common, *linker, f"--unified-cache-external-linker-config={store}"],
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MOVED_LINKER, json.dumps(asked)],
        env={**os.environ, **BASE_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = done.stdout.strip().splitlines()[-2:]
    assert first == "accepted", first
    assert second.startswith("UnsupportedError: SGLang") and "_offload_node" in second
    said = [line for line in done.stderr.splitlines() if "tutti: SGLang" in line]
    assert len(said) == 1, said
    assert internals.OFFLOAD in said[0] and "the linker route is refused" in said[0]
