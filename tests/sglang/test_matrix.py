"""HiCache in one process: each pool kind, io backend and host layout; damage; holes."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang_cpu import matrix
from sglang_cpu.backends import Backend
from sglang_cpu.matrix import CASES, DEFAULT_CASE, PAGE_COUNT, Case


@pytest.fixture
def backend(backend_name: str, store_folder: Path) -> Backend:
    return Backend(backend_name, store_folder, matrix.MATRIX_OPTIONS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_round_trip_is_byte_exact(case: Case, backend: Backend) -> None:
    outcome = matrix.round_trip(case, backend)
    assert outcome.exact, outcome


@pytest.mark.parametrize("case", CASES, ids=str)
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
