"""Whether LMDB can use a catalog's file without harm: a walk over its pages, before LMDB sees them.

LMDB trusts its file. A page that is damaged, or missing because the file was cut short, can end the
process with SIGBUS, SIGSEGV or an assertion, or make it write over pages that are in use. So a file
is read once, as arrays, before it is opened: every page that can be reached from the newest meta
page must be what LMDB takes it for, and no other, and keys must rise. What the entries say is not
looked at here: records and superblocks have checks of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tutti_core.errors import CorruptionError
from tutti_core.format import REPAIR_HINT
from tutti_core.index.tree_file import (
    BRANCH,
    DEPTH_MAX,
    FIRST_PAGE,
    HEADER_BYTES,
    KEY_BYTES_MAX,
    LEAF,
    NO_ROOT,
    OVERFLOW,
    PAGE_NUMBER_MAX,
    VALUE_ELSEWHERE,
    VALUE_IS_TREE,
    Flaw,
    Meta,
    Tree,
    TreeFile,
    entries_of,
    value_pages,
)

Pages = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]
"""(n, 2): the first bytes of keys, big-endian, zeros behind a short one."""

_INTEGER_KEYS = 8
_UNWRITTEN_MAX = 1 << 16
"""Pages that may have been numbered but not written: free ones at the end of the file."""
_STEP_BYTES = 4 << 20
_ATTEMPTS = 3
_COMPARED_BYTES = 16
"""How much of a key counts for the order; of what the catalog has, few are longer."""
_NODE_BYTES = 8 + _COMPARED_BYTES
_MASKS = np.array(  # (length, 2): which bytes of a key count
    [
        [((1 << 64) - 1) ^ ((1 << 64) - 1 >> 8 * min(max(n - at, 0), 8)) for at in (0, 8)]
        for n in range(_COMPARED_BYTES + 1)
    ],
    dtype=np.uint64,
)
_MIX = np.random.default_rng(1).integers(0, 1 << 64, 65537, dtype=np.uint64)


def check_tree(file: Path, names: frozenset[bytes]) -> None:
    """See that LMDB can open and use the file; nothing is changed.

    Parameters
        names: of the databases that may be in it.
    A file that other processes change meanwhile is not judged: they checked it when they opened it.

    Raises
        CorruptionError: it cannot; says why.
        UnsupportedError: another LMDB's format.
        DeviceError: it cannot be read.
    Cost       reads the file once, up to its last page in use; about 0.2 s for a million records.
    """
    with TreeFile(file) as reader:
        for _ in range(_ATTEMPTS):
            before: Meta | None = None
            try:
                before = reader.meta()
                Survey(reader, before).check(names)
                return
            except Flaw as flaw:
                if before is None or reader.still(before):
                    raise CorruptionError(
                        f"the catalog {file} is damaged: {flaw}",
                        op="open",
                        device=str(file),
                        data_lost=True,
                        scope="store",
                        hint=REPAIR_HINT,
                    ) from None


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Nodes of a run of pages, in order; each field has one entry a node.

    page, index     which page of the run, and which node of it.
    at, inside      where it begins in its page, and whether it may; the rest is senseless if not.
    value_bytes     of a leaf's.
    child           of a branch's: the page below.
    flags, key_bytes, keys   of both.
    """

    page: Pages
    index: Pages
    at: Pages
    inside: npt.NDArray[np.bool_]
    value_bytes: Pages
    child: Pages
    flags: Pages
    key_bytes: Pages
    keys: Keys


class Survey:
    """One pass over the file, then the trees by what it found.

    Parameters
        whole: for a file that is known to be damaged: take it as long as it is, whatever it says.
    Raises
        Flaw: the file ends long before its last page.
    """

    def __init__(self, reader: TreeFile, meta: Meta, *, whole: bool = False) -> None:
        self._reader = reader
        self._meta = meta
        size = meta.page_bytes
        in_file = reader.size_bytes() // size
        if meta.last_page + 1 > in_file + _UNWRITTEN_MAX and not whole:
            raise Flaw(f"it has {in_file} pages and should have {meta.last_page + 1}")
        self._end = in_file if whole else meta.last_page + 1
        self._live = np.zeros(self._end, dtype=np.bool_)
        self._used = np.empty(0, dtype=np.int64)
        count = min(self._end, in_file)
        self._flags = np.zeros(count, dtype=np.uint16)  # 0: not a page that can be used
        self._counts = np.zeros(count, dtype=np.int64)  # nodes; of a value, its pages
        self._special = np.zeros(count, dtype=np.bool_)  # leaves with trees for values
        self._rises = np.zeros(count, dtype=np.bool_)  # keys rise within the page
        self._first = np.zeros(
            (count, 2), dtype=np.uint64
        )  # key of the first node, and of the last
        self._last = np.zeros((count, 2), dtype=np.uint64)
        self._children: list[Pages] = []
        self._separators: list[Keys] = []
        self._big: list[Pages] = []  # (3, n): leaf, first page of the value, its length
        step = max(_STEP_BYTES // size, 1)
        buffer = np.zeros(step * size + _NODE_BYTES, dtype=np.uint8)
        for first in range(FIRST_PAGE, count, step):
            self._read(buffer, first, min(step, count - first))
        below = np.where(self._flags == BRANCH, self._counts, 0)
        self._child_end = np.cumsum(below)
        self._child = np.concatenate(self._children or [np.empty(0, dtype=np.int64)])
        self._separator = np.concatenate(self._separators or [np.empty((0, 2), dtype=np.uint64)])
        self._values = np.concatenate(self._big or [np.empty((3, 0), dtype=np.int64)], axis=1)

    # ---- the pass ----
    def _read(self, buffer: npt.NDArray[np.uint8], first: int, count: int) -> None:
        """Judge `count` pages by themselves."""
        size = self._meta.page_bytes
        if not self._reader.fill(first * size, buffer.data[: count * size]):
            raise Flaw("it became shorter just now")
        raw = buffer[: count * size].view("<u2").reshape(count, -1)
        flags, lower, upper = raw[:, 5], raw[:, 6].astype(np.int64), raw[:, 7].astype(np.int64)
        own = np.ascontiguousarray(raw[:, :4]).view("<u8")[:, 0]
        named = own == np.arange(first, first + count, dtype=np.uint64)
        tree = named & ((flags == BRANCH) | (flags == LEAF))
        tree &= (lower > HEADER_BYTES) & (lower % 2 == 0) & (lower <= upper) & (upper <= size)
        counts = np.where(tree, (lower - HEADER_BYTES) // 2, 0)
        nodes = _nodes_of(buffer, raw, counts, upper)
        leaf = flags[nodes.page] == LEAF
        big = leaf & (nodes.flags == VALUE_ELSEWHERE)
        value = np.where(leaf, np.where(big, 8, nodes.value_bytes), 0)
        end = nodes.at + (8 + nodes.key_bytes + value + 1) // 2 * 2
        good = nodes.inside & (end <= size) & (nodes.key_bytes <= KEY_BYTES_MAX)
        good &= ~leaf | ((nodes.flags <= VALUE_IS_TREE) & (nodes.key_bytes > 0))
        self._flags[first : first + count] = np.where(
            tree & self._filled(nodes, end, good, counts, upper),
            flags,
            np.where(named & (flags == OVERFLOW), OVERFLOW, 0),
        )
        self._counts[first : first + count] = np.where(tree, counts, lower | upper << 16)
        self._special[first + nodes.page[leaf & (nodes.flags == VALUE_IS_TREE)]] = True
        self._note_keys(first, nodes, counts)
        sound = self._flags[first + nodes.page] != 0
        down = sound & ~leaf
        self._children.append(nodes.child[down])
        self._separators.append(nodes.keys[down])
        for i in np.flatnonzero(big & sound).tolist():
            begin = int(nodes.page[i] * size + nodes.at[i] + 8 + nodes.key_bytes[i])
            page = int.from_bytes(buffer[begin : begin + 8].tobytes(), "little")
            where = [first + int(nodes.page[i])], [min(page, PAGE_NUMBER_MAX)]
            self._big.append(np.array([*where, [int(nodes.value_bytes[i])]]))

    def _note_keys(self, first: int, nodes: _Nodes, counts: Pages) -> None:
        """Whether each page's keys rise, but for a branch's first, which counts for nothing."""
        keys, page = nodes.keys, nodes.page
        unsorted = ~_less(keys[:-1], keys[1:]) & (page[:-1] == page[1:])
        at = np.flatnonzero(unsorted)
        at = at[(nodes.index[at] > 0) | (self._flags[first + page[at]] == LEAF)]
        longer = nodes.key_bytes[at] > _COMPARED_BYTES
        at = at[(keys[at] != keys[at + 1]).any(axis=1) | ~longer]
        self._rises[first : first + len(counts)] = True
        self._rises[first + page[at]] = False
        some = np.flatnonzero(counts)
        stop = np.cumsum(counts)[some]
        self._first[first + some] = keys[stop - counts[some]]
        self._last[first + some] = keys[stop - 1]

    def _filled(
        self,
        nodes: _Nodes,
        end: Pages,
        good: npt.NDArray[np.bool_],
        counts: Pages,
        upper: Pages,
    ) -> npt.NDArray[np.bool_]:
        """Whether the nodes of each page lie in it end to end, from `upper` to the page's end.

        They do if the places where nodes begin, and the page's end, are those where nodes end, and
        `upper`: since every node ends behind its beginning. The two sets are compared by sums of
        random numbers.
        """
        size = self._meta.page_bytes
        bad = np.bincount(nodes.page[~good], minlength=len(counts)) > 0
        delta = _MIX[np.where(good, nodes.at, 0)] - _MIX[np.where(good, end, 0)]
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(delta, dtype=np.uint64)])
        stop = np.cumsum(counts)
        total = sums[stop] - sums[stop - counts]
        return np.asarray(
            ~bad & (total + _MIX[size] == _MIX[np.clip(upper, 0, size)]), dtype=np.bool_
        )

    # ---- the trees ----
    def check(self, names: frozenset[bytes]) -> None:
        """All trees of the file, and that its free pages are free."""
        meta = self._meta
        if meta.main.flags or meta.free.flags not in (0, _INTEGER_KEYS):
            raise Flaw("its meta page has unknown flags")
        leaves = self._tree("main", meta.main)
        for name, tree in self._databases(leaves, names):
            found = self._tree(name, tree)
            if self._special[found].any():
                raise Flaw(f"an entry of {name} is not a value")
        self._check_free()

    def pages_in_use(self) -> list[int]:
        """Pages of all trees, the free list's included, after `check`."""
        return [int(page) for page in self._used]

    # ---- what can still be read ----
    def entry_count(self, name: bytes, names: frozenset[bytes]) -> int | None:
        """How many entries a database says that it has; None where that cannot be read."""
        return next((t.entries for n, t in self._readable_trees(names) if n == name), None)

    def leaves_in_use(self, names: frozenset[bytes]) -> Pages:
        """Sound leaves that the free list does not name.

        Where it is damaged itself: those that hang below the roots of databases that can be read.
        """
        self._live[:] = False
        try:
            self._check_free()
        except Flaw:
            pass
        else:
            free = self._live[: len(self._flags)]
            return np.flatnonzero((self._flags == LEAF) & ~free)
        found = np.zeros(len(self._flags), dtype=np.bool_)
        for _, tree in self._readable_trees(names):
            level = np.array([min(tree.root, PAGE_NUMBER_MAX)], dtype=np.int64)
            for _ in range(min(tree.depth, DEPTH_MAX)):
                level = np.unique(level[(level >= FIRST_PAGE) & (level < len(self._flags))])
                found[level[self._flags[level] == LEAF]] = True
                level = self._child[self._below(level[self._flags[level] == BRANCH])[0]]
        return np.flatnonzero(found)

    def _readable_trees(self, names: frozenset[bytes]) -> Iterator[tuple[bytes, Tree]]:
        try:
            self._live[:] = False
            for name, tree in self._databases(self._tree("main", self._meta.main), names):
                yield name.encode(), tree
        except Flaw:
            return

    def _databases(self, leaves: Pages, names: frozenset[bytes]) -> Iterator[tuple[str, Tree]]:
        for name, flags, value in self._entries(leaves):
            tree = Tree.decode(value)
            if flags != VALUE_IS_TREE or name not in names or tree is None:
                raise Flaw("it names a database that is none of ours")
            if tree.flags or tree.pad:
                raise Flaw(f"{name.decode()} has unknown flags")
            yield name.decode(), tree

    def _entries(self, leaves: Pages) -> Iterator[tuple[bytes, int, bytes]]:
        """Entries of a few leaves: key, flags, value; values on pages of their own are read."""
        for number in leaves.tolist():
            yield from entries_of(self._reader.page(number), self._reader.value)

    def _tree(self, name: str, tree: Tree, ordered: bool = True) -> Pages:
        """Mark a tree's pages as in use; returns its leaves."""
        if tree.root == NO_ROOT:
            if any((tree.depth, tree.entries, tree.leaves, tree.branches, tree.overflow)):
                raise Flaw(f"{name} has no root and is not empty")
            return np.empty(0, dtype=np.int64)
        if not 1 <= tree.depth <= DEPTH_MAX:
            raise Flaw(f"{name} has a depth of {tree.depth}")
        level = np.array([min(tree.root, PAGE_NUMBER_MAX)], dtype=np.int64)
        before = np.zeros((1, 2), dtype=np.uint64)  # what separates each page from the one before
        branches = 0
        for _ in range(tree.depth - 1):
            self._take(name, level, BRANCH)
            branches += len(level)
            index, heads = self._below(level)
            separators = self._separator[index]
            separators[heads] = before
            level, before = self._child[index], separators
        self._take(name, level, LEAF)
        if ordered:
            falls = _less(before[1:], self._last[level[:-1]])
            falls |= _less(self._first[level[1:]], before[1:])
            if falls.any() or not self._rises[level].all():
                raise Flaw(f"the keys of {name} are not in order")
        entries = int(self._counts[level].sum())
        overflow = self._take_values(name, level)
        found = (branches, len(level), overflow, entries)
        if found != (tree.branches, tree.leaves, tree.overflow, tree.entries):
            raise Flaw(f"{name} has not as many pages or entries as it says")
        return level

    def _below(self, level: Pages) -> tuple[Pages, Pages]:
        """Of the nodes of branches, in order: their indices, and which are the first of a page."""
        counts = self._counts[level]
        begin = np.repeat(self._child_end[level] - counts, counts)
        heads = np.cumsum(counts) - counts
        index = np.arange(len(begin)) - np.repeat(heads, counts)
        return begin + index, heads

    def _take(self, name: str, pages: Pages, flags: int) -> None:
        """See that pages are of a kind and in no other place of a tree."""
        outside = (pages < FIRST_PAGE) | (pages >= len(self._flags))
        if outside.any():
            raise Flaw(f"{name} has page {pages[outside][0]}, which is not in it")
        wrong = self._flags[pages] != flags
        if wrong.any():
            raise Flaw(f"page {pages[wrong][0]}, of {name}, is damaged")
        self._mark(name, pages)

    def _mark(self, name: str, pages: Pages) -> None:
        before = np.count_nonzero(self._live)
        self._live[pages] = True
        if np.count_nonzero(self._live) != before + len(pages):
            raise Flaw(f"a page of {name} is in two places")

    def _take_values(self, name: str, leaves: Pages) -> int:
        """The same for the pages of values that leaves refer to; returns how many."""
        if self._values.shape[1] == 0:
            return 0
        mine = np.zeros(len(self._flags), dtype=np.bool_)
        mine[leaves] = True
        total = 0
        for _, first, length in self._values[:, mine[self._values[0]]].T.tolist():
            count = value_pages(length, self._meta.page_bytes)
            if first < FIRST_PAGE or first + count > len(self._flags):
                raise Flaw(f"{name} has page {first}, which is not in it")
            if self._flags[first] != OVERFLOW or self._counts[first] != count:
                raise Flaw(f"page {first}, of {name}, is damaged")
            self._mark(name, np.arange(first, first + count))
            total += count
        return total

    def _check_free(self) -> None:
        """Pages that are called free must be in no tree, and none of them twice."""
        leaves = self._tree("the free list", self._meta.free, ordered=False)
        self._used = np.flatnonzero(self._live)
        before = 0
        for key, _, value in self._entries(leaves):
            pages = np.frombuffer(value[: len(value) // 8 * 8], dtype="<u8")
            transaction = int.from_bytes(key, "little")
            known = len(key) == 8 and before < transaction <= self._meta.transaction
            if not known or len(pages) == 0 or pages[0] != len(pages) - 1 or len(value) % 8:
                raise Flaw("its free list is damaged")
            before = transaction
            if (pages[1:] < FIRST_PAGE).any() or (pages[1:] >= self._end).any():
                raise Flaw("its free list has pages that are not in it")
            self._mark("the free list", pages[1:].astype(np.int64))


def _nodes_of(
    buffer: npt.NDArray[np.uint8], raw: npt.NDArray[np.uint16], counts: Pages, upper: Pages
) -> _Nodes:
    """The nodes of all pages in a buffer, which is longer than they are by a node.

    Parameters
        raw: the same as (pages, words).
        counts, upper: of each page, how many nodes it has, and where they may begin.
    """
    size = 2 * raw.shape[1]
    page = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(page)) - np.repeat(np.cumsum(counts) - counts, counts)
    at = raw.reshape(-1).take(page * raw.shape[1] + (HEADER_BYTES // 2 + index)).astype(np.int64)
    inside = (at % 2 == 0) & (at >= upper[page]) & (at + 8 <= size)
    windows: npt.NDArray[np.void] = np.ndarray(
        (len(buffer) - _NODE_BYTES) // 2 + 1, f"V{_NODE_BYTES}", buffer.data, strides=(2,)
    )
    found = windows[(page * size + np.where(inside, at, 0)) // 2].view("<u8").reshape(-1, 3)
    head = found[:, 0].astype(np.uint64)
    key_bytes = (head >> np.uint64(48)).astype(np.int64)
    keys = found[:, 1:].byteswap().astype(np.uint64)
    keys &= _MASKS[np.minimum(key_bytes, _COMPARED_BYTES)]
    return _Nodes(
        page=page,
        index=index,
        at=at,
        inside=inside,
        value_bytes=(head & np.uint64(0xFFFFFFFF)).astype(np.int64),
        child=(head & np.uint64(0xFFFFFFFFFFFF)).astype(np.int64),
        flags=(head >> np.uint64(32) & np.uint64(0xFFFF)).astype(np.int64),
        key_bytes=key_bytes,
        keys=keys,
    )


def _less(left: Keys, right: Keys) -> npt.NDArray[np.bool_]:
    """Whether each key comes before another."""
    high, low = left[:, 0], left[:, 1]
    same = high == right[:, 0]
    return np.asarray((high < right[:, 0]) | (same & (low < right[:, 1])), dtype=np.bool_)
