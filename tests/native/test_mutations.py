"""The mutation script stays usable: every mistake has one place. `make mutations` makes them."""

from __future__ import annotations

import pytest
from mutations import FLAGS, MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)
def test_a_mutation_has_one_place_and_changes_it(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text()
    assert text.count(mutation.old) == 1 and mutation.old != mutation.new
    assert mutation.build in FLAGS
    assert (ROOT / "tests" / "native" / f"{mutation.program}.cc").is_file()


def test_names_are_unique() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
