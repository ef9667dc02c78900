"""Tutti's classes and hooks fit the SGLang that is installed: real signatures, real call sites.

What SGLang itself must have is in `tutti_sglang.internals`; here is what we must have in turn.
"""

from __future__ import annotations

import hashlib
import inspect
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tutti_sglang import internals, plugin, shapes

STORAGE = ("tutti_sglang.backend.TuttiStorage", internals.CONTRACT)
LINKER = ("tutti_sglang.linker.TuttiLinker", internals.LINKER_CONTRACT)


@pytest.fixture(autouse=True)
def only_ours(backend_name: str) -> None:
    if backend_name != "tutti":
        pytest.skip("checks tutti's own classes")


def contract_methods(contract: str) -> list[str]:
    (methods,) = [
        internal.shape
        for internal in internals.internals()
        if internal.path == contract and isinstance(internal.shape, shapes.Methods)
    ]
    return [*methods.names.split(), *methods.abstract.split()]


def calls_of(contract: str) -> Iterator[tuple[str, int, list[str]]]:
    """(method, positional arguments, keywords) of each call that SGLang makes."""
    route = internals.HICACHE if contract == internals.CONTRACT else internals.LINKER
    methods = {*contract_methods(contract), "close"}
    for internal in internals.internals():
        call = internal.shape
        if isinstance(call, shapes.Calls) and internal.routes == (route,):
            if call.callee in methods:
                yield call.callee, call.positional, call.keywords.split()


@pytest.mark.parametrize(("ours", "contract"), [STORAGE, LINKER], ids=["backend", "linker"])
def test_class_fits_the_contract(ours: str, contract: str) -> None:
    """Each override takes the base method's parameters in its order; more need defaults."""
    mine, base = shapes.resolve(ours), shapes.resolve(contract)
    assert issubclass(mine, base)
    assert not inspect.isabstract(mine)
    for name in contract_methods(contract):
        theirs = shapes.parameters(getattr(base, name))
        signature = inspect.signature(getattr(mine, name))
        assert shapes.parameters(getattr(mine, name))[: len(theirs)] == theirs, name
        more = [p for p in signature.parameters.values() if p.name not in (*theirs, "self")]
        assert all(p.default is not p.empty for p in more), name
        for parameter in inspect.signature(getattr(base, name)).parameters.values():
            if parameter.default is not parameter.empty:
                assert signature.parameters[parameter.name].default == parameter.default, name


@pytest.mark.parametrize(("ours", "contract"), [STORAGE, LINKER], ids=["backend", "linker"])
def test_class_can_be_called_as_sglang_calls_it(ours: str, contract: str) -> None:
    mine = shapes.resolve(ours)
    calls = list(calls_of(contract))
    never = {"get", "set", "exists"} if contract == internals.CONTRACT else set()
    never |= {"record_offload_ready"}  # ours to call
    assert set(contract_methods(contract)) - never <= {name for name, _, _ in calls}
    for name, positional, keywords in calls:
        assert shapes.refusal(getattr(mine, name), positional, keywords) is None, name


def test_constructors() -> None:
    backend, linker = shapes.resolve(STORAGE[0]), shapes.resolve(LINKER[0])
    assert shapes.refusal(backend, 2, []) is None
    assert shapes.refusal(linker, 2, ["components", "extra_config", "forward_stream"]) is None


def test_plugin_adds_the_name_once_and_hooks_everything() -> None:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    for option in plugin.CHOICES:
        choices = internals.choices(ServerArgs, option)
        assert choices is not None and choices.count(plugin.NAME) == 1
    hooked = [internals.ATTACH, internals.ATTACH_ALL, internals.CREATE, internals.BACKUP]
    hooked += [internals.APPLY, internals.ANCESTORS, internals.LOOKUP, internals.OFFLOAD]
    for target in (*hooked, *internals.WEIGHTS):
        assert hasattr(shapes.resolve(target), "__wrapped__"), target
    # What the hooks rely on holds of the hooked functions too.
    assert [str(one) for one in internals.check(thorough=True)] == []


def test_everything_the_package_imports_of_sglang_is_listed() -> None:
    """A new import from SGLang needs a line in the list."""
    package = Path(inspect.getfile(plugin)).parent
    listed = {internal.path for internal in internals.internals()}
    for path in sorted(package.glob("*.py")):
        for name in imported(path):
            known = any(f"{one}.".startswith(f"{name}.") for one in listed)
            assert known, f"{path.name} imports {name}"


def imported(path: Path) -> Iterator[str]:
    """Dotted names of what a file imports from SGLang, anywhere in it."""
    import ast

    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            assert not any(alias.name.startswith("sglang") for alias in node.names), path


@pytest.mark.parametrize("core", ["rust", "python"])
def test_both_trees_tell_the_keys_above_a_node_and_its_own(core: str, store_folder: Path) -> None:
    """Which keys a node has is its own business; the hooks put the two answers together."""
    from array import array

    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str
    from sglang_cpu import matrix
    from sglang_cpu.backends import Backend

    case = matrix.Case("mha", "kernel", "page_first", core)
    longer = array("q", [*range(64), *range(500, 532)])
    with matrix.Stack(case, Backend("tutti", store_folder, matrix.MATRIX_OPTIONS)) as stack:
        for tokens in (longer[:64], longer):
            slots = stack._cache.token_to_kv_pool_allocator.alloc(len(tokens))
            stack._cache.insert(InsertParams(key=RadixKey(tokens), value=slots))
            stack._wait(stack._backed_up, "backup")
        tree, node = stack._cache.tree_core, stack._match(longer).last_device_node
        root = stack._match(array("q", range(700, 716))).last_device_node
        keys = get_storage_hash_str(longer, None, page_size=16)
        assert tree.get_prefix_hash_values(node) == keys[:4]
        assert tree.get_hash_values(node) == keys[4:]
        assert tree.get_prefix_hash_values(root) == tree.get_hash_values(root) == []


def test_page_keys_are_a_sha256_chain() -> None:
    """64 hexadecimal characters; each covers the page and everything before it."""
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    tokens = list(range(100, 148))
    keys = get_storage_hash_str(tokens, None, page_size=16)
    previous = b""
    for page, key in enumerate(keys):
        chunk = struct.pack("<16I", *tokens[page * 16 : page * 16 + 16])
        previous = hashlib.sha256(previous + chunk).digest()
        assert key == previous.hex()
    assert len(keys) == 3
