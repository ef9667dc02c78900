"""HiCache in one process: each pool kind, io backend and host layout; damage; holes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from sglang_cpu import matrix
from sglang_cpu.backends import Backend
from sglang_cpu.matrix import CASES, DCP_CASES, DEFAULT_CASE, HYBRID_CASES, PAGE_COUNT, Case

EVERY_CASE = (*CASES, *HYBRID_CASES, *DCP_CASES)


@pytest.fixture
def backend(backend_name: str, store_folder: Path) -> Backend:
    return Backend(backend_name, store_folder, matrix.MATRIX_OPTIONS)


@pytest.mark.parametrize("case", EVERY_CASE, ids=str)
def test_round_trip_is_byte_exact(case: Case, backend: Backend) -> None:
    outcome = matrix.round_trip(case, backend)
    assert outcome.exact, outcome


@pytest.mark.parametrize("case", EVERY_CASE, ids=str)
def test_pages_outlive_the_engine(case: Case, backend: Backend) -> None:
    outcome = matrix.reopened(case, backend)
    assert outcome.exact, outcome


@pytest.mark.parametrize("page", [0, 3, PAGE_COUNT - 1])
@pytest.mark.parametrize("pool", ["mha", "mla"])
def test_flipped_bit_is_a_miss(pool: str, page: int, backend: Backend) -> None:
    outcome = matrix.flipped_bit(Case(pool, "kernel", "page_first"), backend, page=page)
    if backend.verifies_pages:
        assert (outcome.recalled_pages, outcome.wrong_pages) == (page, ()), outcome
    else:  # the comparison does notice: this is what a wrong page looks like
        assert (outcome.recalled_pages, outcome.wrong_pages) == (PAGE_COUNT, (page,)), outcome


@pytest.mark.parametrize("found_anyway", [False, True], ids=["lookup_says_so", "read_finds_out"])
@pytest.mark.parametrize("page", [0, 4, PAGE_COUNT - 1])
def test_missing_page_ends_the_prefix(page: int, found_anyway: bool, backend: Backend) -> None:
    outcome = matrix.missing_page(DEFAULT_CASE, backend, page=page, found_anyway=found_anyway)
    assert (outcome.recalled_pages, outcome.wrong_pages) == (page, ()), outcome


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Case("mha", "kernel", "page_first"), Case("mha", "direct", "page_first_direct")),
        (Case("mha", "direct", "page_first_direct"), Case("mha", "kernel", "page_head")),
        (Case("mha", "kernel", "layer_first"), Case("mha", "kernel", "page_first")),
        (Case("mla", "kernel", "page_first"), Case("mla", "direct", "layer_first")),
        (Case("mha", "kernel", "page_first"), Case("mla", "kernel", "page_first")),
    ],
    ids=lambda case: str(case),
)
def test_another_layout_finds_nothing_wrong(first: Case, second: Case, backend: Backend) -> None:
    """Same tokens, so same page keys; the bytes of some layouts even have the same length."""
    if not backend.verifies_pages:
        pytest.skip(f"backend {backend.name!r} doesn't name the layout in its keys")
    outcome = matrix.reopened(first, backend, then=second)
    assert outcome.wrong_pages == (), outcome
    assert outcome.recalled_pages == 0, outcome


@pytest.mark.parametrize("case", [CASES[0], CASES[4], CASES[8]], ids=str)
def test_generic_interface(case: Case, backend_name: str, store_folder: Path) -> None:
    """Tutti named as SGLang's `dynamic` backend, without its plugin: pages as flat tensors."""
    if backend_name != "tutti":
        pytest.skip("checks tutti's own class")
    options = {
        "backend_name": "anything",
        "module_path": "tutti_sglang.backend",
        "class_name": "TuttiStorage",
        "path": str(store_folder),
    }
    flat = Backend("dynamic", store_folder, {**options, **matrix.MATRIX_OPTIONS})
    outcome = matrix.reopened(case, flat)
    assert outcome.exact, outcome
    # The same pages in another byte order: the zero-copy interface must not take them for its own.
    other = matrix.reopened(
        case, flat, then_backend=Backend("tutti", store_folder, matrix.MATRIX_OPTIONS)
    )
    assert (other.recalled_pages, other.wrong_pages) == (0, ()), other


# ---- models with more pools than one -----------------------------------------------------------


def hybrid(family: str) -> Case:
    return Case(family, "kernel", "page_first")


def test_every_hybrid_has_what_it_is_tested_for(backend: Backend) -> None:
    """So that no comparison below is one of nothing."""
    pools = {
        "swa": {"kv", "swa"},
        "mamba": {"kv", "mamba"},
        "dsa": {"kv", "indexer"},
        "draft": {"kv", "draft"},
        "v4": {
            "kv",
            "swa",
            "deepseek_v4_c4",
            "deepseek_v4_c4_indexer",
            "deepseek_v4_c4_state",
            "deepseek_v4_c4_indexer_state",
            "deepseek_v4_c128",
        },
    }
    for family, expected in pools.items():
        folder = backend.folder / family
        folder.mkdir()
        with matrix.Stack(hybrid(family), Backend(backend.name, folder, backend.options)) as stack:
            stored = stack.fill(1)
            assert {str(name) for name in stack.storage.registered_pools} == expected
            held = [*stored.pages[-1], *(stored.window[-1:] or [[]])[0], *stored.state]
            assert all(part.any() for part in held) and len(held) >= 4
            assert bool(stored.window) == (family in ("swa", "v4"))
            assert bool(stored.state) == (family == "mamba")


# What is left of ten pages when one of a pool is missing. A window is three pages, of V4 one.
MISSING = [
    ("swa", "kv", 0, 0),
    ("swa", "kv", 4, 4),
    ("swa", "kv", 9, 9),
    ("swa", "swa", 2, 10),
    ("swa", "swa", 6, 10),
    ("swa", "swa", 7, 7),
    ("swa", "swa", 9, 9),
    ("mamba", "kv", 9, 0),  # the only state is that after the last page
    ("mamba", "mamba", 9, 0),
    ("dsa", "kv", 4, 4),
    ("dsa", "indexer", 0, 0),
    ("dsa", "indexer", 4, 4),
    ("dsa", "indexer", 9, 9),
    ("draft", "kv", 4, 4),
    ("draft", "draft", 4, 4),
    ("draft", "draft", 9, 9),
    ("v4", "deepseek_v4_c4", 4, 4),
    ("v4", "deepseek_v4_c128", 9, 9),
    ("v4", "deepseek_v4_c4_indexer", 0, 0),
    ("v4", "swa", 3, 10),
    ("v4", "swa", 9, 9),
    ("v4", "deepseek_v4_c4_state", 9, 9),
    ("v4", "deepseek_v4_c4_indexer_state", 9, 9),
]


@pytest.mark.parametrize(("family", "pool", "page", "left"), MISSING)
def test_missing_page_of_a_pool_cuts_the_prefix_exactly(
    family: str, pool: str, page: int, left: int, backend: Backend
) -> None:
    case = hybrid(family)
    if pool == "kv":
        outcome = matrix.missing_page(case, backend, page=page)
    else:
        outcome = matrix.missing_beside(case, backend, pool=pool, page=page)
    assert (outcome.recalled_pages, outcome.wrong_pages) == (left, ()), outcome
    assert outcome.end_right, outcome


@pytest.mark.parametrize("buffer", [0, -1], ids=["first_pool", "last_pool"])
@pytest.mark.parametrize("page", [0, 5])
@pytest.mark.parametrize("family", ["swa", "mamba", "dsa", "draft", "v4"])
def test_flipped_bit_in_a_hybrid_is_a_miss(
    family: str, page: int, buffer: int, backend: Backend
) -> None:
    """SGLang takes no window and no state once the other pages did not all arrive: then none is."""
    outcome = matrix.flipped_bit(hybrid(family), backend, page=page, buffer=buffer)
    if backend.verifies_pages:
        left = 0 if family in ("swa", "mamba", "v4") else page
        assert (outcome.recalled_pages, outcome.wrong_pages) == (left, ()), outcome
        assert outcome.end_right, outcome
    else:
        assert outcome.wrong_pages == (page,), outcome


@pytest.mark.parametrize("family", ["swa", "mamba", "v4"])
def test_flipped_bit_in_the_end_of_a_prefix_is_a_miss(family: str, backend: Backend) -> None:
    outcome = matrix.flipped_end(hybrid(family), backend, page=PAGE_COUNT - 1)
    if backend.verifies_pages:
        assert outcome.recalled_pages < PAGE_COUNT, outcome
        assert outcome.wrong_pages == () and outcome.end_right, outcome
    else:
        assert outcome.recalled_pages == PAGE_COUNT and not outcome.end_right, outcome


@pytest.mark.parametrize("family", ["swa", "mamba", "dsa", "draft"])
def test_another_layout_of_a_hybrid_finds_nothing(family: str, backend: Backend) -> None:
    if not backend.verifies_pages:
        pytest.skip(f"backend {backend.name!r} doesn't name the layout in its keys")
    other = Case(family, "direct", "page_first_direct")
    outcome = matrix.reopened(hybrid(family), backend, then=other)
    assert (outcome.recalled_pages, outcome.wrong_pages) == (0, ()), outcome


@pytest.mark.parametrize("case", DCP_CASES[:2], ids=str)
def test_ranks_of_decode_context_parallelism_have_pages_of_their_own(
    case: Case, backend: Backend
) -> None:
    other = replace(case, rank=1)
    outcome = matrix.reopened(case, backend, then=other)
    assert (outcome.recalled_pages, outcome.wrong_pages) == (0, ()), outcome
