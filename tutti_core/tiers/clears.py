"""What other processes have cleared: noticed now and then at a look-up, removed by the saver.

Whoever clears a namespace notes in the catalog up to which generation its pages go. The others look
at how many such notes there were, every LOOK_NS at most. Then the pages up to there are hidden at
once, by putting the tree aside; the saver sorts it out, since slots are given up in its thread.
Pages that were saved after the clear come back into the tree.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tutti_core.errors import TuttiError
from tutti_core.index.catalog import Catalog, packed_rows, record_key_at
from tutti_core.index.pages import NamespacePages
from tutti_core.index.radix import NO_SLOT, Locations

if TYPE_CHECKING:
    from tutti_core.tiers.manager import Entry

LOOK_NS = 250_000_000
"""How often the catalog is looked at; a clear is noticed so much later at most."""

Page = tuple[bytes, int, int]
"""Record key, slot, generation."""


@dataclass(frozen=True, slots=True)
class Aside:
    """A tree from which pages were cleared, with others among them; sorted out by the saver."""

    entry: Entry
    pages: NamespacePages

    def cleared(self) -> list[Page]:
        """The pages that are to go."""
        gone: list[Page] = []
        for keys, where in self._runs():
            old = (where.slot != NO_SLOT) & (where.generation <= self.entry.cleared)
            gone += self._named(keys, where, np.flatnonzero(old))
        return gone

    def _named(self, keys: bytes, where: Locations, index: npt.NDArray[np.intp]) -> list[Page]:
        record_keys = self.entry.record_keys(keys)
        return [
            (record_key_at(record_keys, i), int(where.slot[i]), int(where.generation[i]))
            for i in index.tolist()
        ]

    def _runs(self) -> Iterator[tuple[bytes, Locations]]:
        for _, node in self.pages.tree.chains():
            yield bytes(node.keys), _locations(node.slots, node.checksums, node.generations)
        for key, page in self.pages.loose.items():
            yield key, _locations([page.slot], [page.checksum], [page.generation])

    def put_back(self, into: NamespacePages) -> None:
        """Add the pages that stay to another tree. The caller holds the lock."""
        width = into.tree.width
        for above, node in self.pages.tree.chains():
            where = _locations(node.slots, node.checksums, node.generations)
            where.slot[where.generation <= self.entry.cleared] = NO_SLOT
            if (where.slot != NO_SLOT).any():
                first = len(packed_rows(above, width))
                into.insert(above + bytes(node.keys), first, True, where, node.last_use)
        for key, page in self.pages.loose.items():
            if page.generation > self.entry.cleared:
                into.loose.setdefault(key, page)


class Clears:
    """Looks for notes of clears, and keeps what is to be removed because of them.

    Threads    `look` from any; `add` and `take` with the manager's lock held.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._seen = -1
        self.due_ns = 0
        self._aside: list[Aside] = []
        self._leftover: list[tuple[Entry, list[Page]]] = []

    def look(self, namespaces: list[bytes]) -> dict[bytes, int]:
        """Up to which generation each namespace was cleared, if any was since the last look."""
        self.due_ns = time.monotonic_ns() + LOOK_NS
        seen = self._seen
        try:
            count = self._catalog.clears()
            if count == seen:
                return {}
            marks = {digest: self._catalog.cleared(digest) for digest in namespaces}
        except TuttiError:  # what cannot be read now is read at the next look
            return {}
        if self._seen == seen:
            self._seen = count
        return marks

    def look_again(self) -> None:
        """There is a namespace that no earlier look has asked for."""
        self._seen = -1

    def add(self, entry: Entry, pages: NamespacePages) -> None:
        """Put a tree aside."""
        self._aside.append(Aside(entry, pages))

    def add_leftover(self, entry: Entry, pages: list[Page]) -> None:
        """Pages that are cleared, but still have records; no tree has them."""
        if pages:
            self._leftover.append((entry, pages))

    @property
    def waiting(self) -> bool:
        """Whether there is anything for the saver to do."""
        return bool(self._aside or self._leftover)

    def take(self) -> tuple[list[Aside], list[tuple[Entry, list[Page]]]]:
        """What is to be sorted out and removed now."""
        taken = self._aside, self._leftover
        self._aside, self._leftover = [], []
        return taken


def _locations(slots: object, checksums: object, generations: object) -> Locations:
    return Locations(*(np.array(a, dtype=np.uint64) for a in (slots, checksums, generations)))
