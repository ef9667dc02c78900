"""The chain of page keys that one call of the engine is about, ancestors included where known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tutti_core import PageKeys


@dataclass(frozen=True, slots=True)
class Chain:
    """Keys of consecutive pages.

    keys    of the ancestors and of the asked pages, packed.
    first   how many of them are ancestors.
    tail    the keys of the asked pages, as the engine gave them.
    """

    keys: PageKeys
    first: int
    tail: tuple[str, ...]

    @classmethod
    def of(cls, ancestors: Sequence[str] | None, tail: Sequence[str]) -> Chain:
        """The chain that ends with `tail`.

        Parameters
            ancestors: all keys from the root to before `tail`; None: not known.
        Raises
            ValueError: they are not page keys.
        """
        if ancestors is None:
            return cls(PageKeys.from_hex(tail, rooted=False), 0, tuple(tail))
        return cls(PageKeys.from_hex([*ancestors, *tail]), len(ancestors), tuple(tail))

    def __len__(self) -> int:
        return len(self.tail)

    def upto(self, count: int) -> PageKeys:
        """The keys that end with the asked page number `count` - 1."""
        return self.keys.upto(self.first + count)

    def run(self, keys: Sequence[str]) -> tuple[PageKeys, int]:
        """Return (chain, first) of a run of the asked pages.

        Keys that are no such run are a chain of their own, of unknown root.
        """
        if keys and keys[0] in self.tail:
            at = self.tail.index(keys[0])
            if self.tail[at : at + len(keys)] == tuple(keys):
                return self.upto(at + len(keys)), self.first + at
        return PageKeys.from_hex(keys, rooted=False), 0
