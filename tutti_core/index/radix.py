"""A radix tree over page-key chains: which pages of a prefix are stored, and where.

Pure: no clock, files, threads or randomness; the caller passes time in and holds a lock.

An edge is a packed run of page keys with parallel arrays of locations, so matching a long prefix is
a few memory compares and a page costs its key plus 24 bytes. A page whose bytes are not stored can
still stand in the tree, as a *gap* between stored pages (its slot is NO_SLOT): an ancestor that was
dropped, or never saved, does not take its descendants along.

The pages of a node have one history: they came together and were used together. Where a use covers
only part of an edge, the edge is split there; pages that come after a used run get a node of their
own. So what a policy knows is kept once a node, and a use costs one step a node.

Invariants (`check` verifies them)
    - A child hangs at the end of its parent's edge; children of a node differ in their first key.
    - A leaf ends in a stored page; so every gap has a stored page below it.
    - The policy has exactly the leaves that are not parked on its list.
    - No node was used later than its parent.
    - `page_count` is the number of stored pages; `node.gaps` that of gaps in its edge.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tutti_core.policies.base import Policy
from tutti_core.policies.lru import Lru
from tutti_core.policies.shadows import Shadow

U64 = npt.NDArray[np.uint64]

NO_SLOT = (1 << 64) - 1
"""Location of a page that is in the tree but not stored."""

MATCH_LASTS_NS = 30_000_000_000
"""How long after a match the loads and saves of the same request may come."""


class Node:
    """One edge and the children at its end. Arrays run parallel to the keys, one entry a page.

    depth           index of its first page in the chain.
    born            when its pages came.
    last_use, previous_use   when they were used last, and before that; 0 for never.
    uses            how often they were used, their coming included.
    rank, queue     belong to the policy: place among the leaves, and which queue that is in.
    """

    __slots__ = (
        "born",
        "checksums",
        "children",
        "depth",
        "gaps",
        "generations",
        "keys",
        "last_use",
        "listed",
        "parent",
        "parked",
        "previous_use",
        "queue",
        "rank",
        "serial",
        "slots",
        "uses",
    )

    def __init__(self, serial: int, parent: Node | None, depth: int, now: int) -> None:
        self.serial = serial
        self.parent = parent
        self.depth = depth
        self.keys = bytearray()
        self.slots = array("Q")
        self.checksums = array("Q")
        self.generations = array("Q")
        self.children: dict[bytes, Node] | None = None
        self.gaps = 0
        self.born = now
        self.last_use = now
        self.previous_use = 0
        self.uses = 1
        self.rank: float = 0
        self.queue = 0
        self.listed = False
        self.parked = False

    def __len__(self) -> int:
        return len(self.slots)


@dataclass(frozen=True, slots=True)
class Locations:
    """Where n pages are: parallel uint64 arrays; slot is NO_SLOT for a page that is not stored."""

    slot: U64
    checksum: U64
    generation: U64

    def __len__(self) -> int:
        return len(self.slot)

    def part(self, start: int, stop: int) -> Locations:
        """Entries start .. stop-1, as views."""
        return Locations(
            self.slot[start:stop], self.checksum[start:stop], self.generation[start:stop]
        )

    def select(self, index: npt.NDArray[np.intp]) -> Locations:
        """Some of the entries, as copies."""
        return Locations(self.slot[index], self.checksum[index], self.generation[index])

    def put(self, index: npt.NDArray[np.intp], entries: Locations) -> None:
        """Replace some of the entries."""
        self.slot[index] = entries.slot
        self.checksum[index] = entries.checksum
        self.generation[index] = entries.generation

    def joined(self, more: Locations) -> Locations:
        """These, and then `more`."""
        return Locations(
            np.concatenate([self.slot, more.slot]),
            np.concatenate([self.checksum, more.checksum]),
            np.concatenate([self.generation, more.generation]),
        )

    def padded(self, count: int) -> Locations:
        """These, and `count` more pages that are not stored."""
        return self.joined(Locations.absent(count))

    @classmethod
    def absent(cls, count: int) -> Locations:
        """`count` pages that are not stored."""
        return cls(
            np.full(count, NO_SLOT, dtype=np.uint64),
            np.zeros(count, dtype=np.uint64),
            np.zeros(count, dtype=np.uint64),
        )


class RadixTree:
    """Pages of one namespace, keyed by chains of `width`-byte page keys. Not thread-safe."""

    def __init__(self, width: int, policy: Policy | None = None) -> None:
        self.width = width
        self.policy = policy if policy is not None else Lru()
        self.root = Node(0, None, 0, 0)
        self.page_count = 0
        self._parked: dict[int, Node] = {}  # by serial; off the policy's list until unparked
        self._serial = 0

    # ---- reading ----
    def match(self, keys: bytes, now: int, first: int = 0) -> int:
        """Return how many pages from page `first` on are stored without a gap, and count a use.

        The pages found are used; the pages before `first`, and those of no match, are not, but no
        ancestor of a used page is older than it.

        Parameters
            keys: packed chain from the first page of the sequence on.
            now: the time; rising from call to call.
        Cost       one compare and one step of the policy per node on the path.
        """
        count = len(keys) // self.width
        path = self._walk(keys, count)
        hit = self._stored_run(path, first)
        self.policy.asked(count - first, now)
        if hit:
            runs = self._use(path, first, first + hit, now)
            self.policy.settled(runs, count, None, now)
            self._join(runs)
        return hit

    def use(self, leaf: Node, now: int) -> None:
        """The pages from the first down to the end of a node were used, not through this tree."""
        path = [leaf]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        for node in reversed(path[:-1]):  # but the root
            self._count_use(node, now)

    def settle(self, keys: bytes, kept: int, output_tokens: int | None, now: int) -> None:
        """A request was saved, the first `kept` pages of it, as the rest is worth too little.

        What was not kept leaves shadows, so that the policy sees whether it comes back.
        """
        policy, width = self.policy, self.width
        count = len(keys) // width
        path = self._walk(keys, count)
        runs = [node for node, start, _ in path if start < kept]
        refused: list[Node] = []
        # What is there all the same, by another request or behind a gap, was not refused.
        at = max(kept, path[-1][1] + path[-1][2] if path else 0)
        if at < count and policy.shadows is not None:
            for pages, shadow in policy.shadows.recall(keys[at * width :], width):
                run = Node(0, None, at, now)
                run.keys = bytearray(keys[at * width : (at + pages) * width])
                run.slots = array("Q", (NO_SLOT,)) * pages
                self._recall(run, shadow)
                policy.admitted(run, pages, now)
                refused.append(run)
                at += pages
        policy.settled(runs + refused, count, output_tokens, now)
        self._join(runs)
        for run in reversed(refused):
            policy.evicted(run, len(run), now)
            assert policy.shadows is not None
            policy.shadows.remember(run, 0, width, policy.shadow_queue(run), now)

    @staticmethod
    def _recall(run: Node, shadow: Shadow | None) -> None:
        if shadow is not None:
            run.born, run.uses = shadow.born, shadow.uses + 1
            run.previous_use, run.queue = shadow.last_use, shadow.queue

    def locate(self, keys: bytes, now: int, first: int = 0) -> Locations:
        """Return the locations of pages `first` .. end of the chain; their path is as if new.

        Not a use, as what reads or saves pages has matched them before; but a path that nobody
        matched for so long that this cannot be is used now.
        """
        count = len(keys) // self.width
        path = self._walk(keys, count)
        found = Locations.absent(count - first)
        for node, start, length in path:
            low = max(start, first)
            if low >= start + length:
                continue
            inside = slice(low - start, length)
            target = slice(low - first, start + length - first)
            found.slot[target] = np.frombuffer(node.slots, dtype=np.uint64)[inside]
            found.checksum[target] = np.frombuffer(node.checksums, dtype=np.uint64)[inside]
            found.generation[target] = np.frombuffer(node.generations, dtype=np.uint64)[inside]
        for node, _, _ in path:
            if now - node.last_use > MATCH_LASTS_NS:
                self._count_use(node, now)
            else:
                self._renew(node, now)
        return found

    def _stored_run(self, path: list[tuple[Node, int, int]], first: int) -> int:
        end = first
        for node, start, length in path:
            if start + length <= first:
                continue
            if node.gaps:
                low = max(start, first)
                run = np.frombuffer(node.slots, dtype=np.uint64)[low - start : length]
                gaps = np.flatnonzero(run == NO_SLOT)
                if len(gaps):
                    return low + int(gaps[0]) - first
            end = start + length
        return max(end - first, 0)

    def _walk(self, keys: bytes, count: int) -> list[tuple[Node, int, int]]:
        """The nodes along the first `count` keys: (node, index of its first page, pages equal)."""
        width, node, at = self.width, self.root, 0
        path = []
        while at < count and node.children:
            child = node.children.get(keys[at * width : (at + 1) * width])
            if child is None:
                break
            length = len(child.slots)
            if at + length > count or not keys.startswith(child.keys, at * width):
                path.append((child, at, self._equal_pages(child, keys, at, count)))
                break
            path.append((child, at, length))
            at += length
            node = child
        return path

    def _equal_pages(self, node: Node, keys: bytes, at: int, stop: int) -> int:
        """How many pages of `node` equal the keys from `at` to `stop`; at least 1."""
        width, count = self.width, min(len(node.slots), stop - at)
        with memoryview(node.keys) as edge:
            if keys.startswith(edge[: count * width], at * width):
                return count
            low, high = 1, count  # low pages are equal, high are not
            while high - low > 1:
                middle = (low + high) // 2
                if keys.startswith(edge[: middle * width], at * width):
                    low = middle
                else:
                    high = middle
            return low

    def _use(
        self, path: list[tuple[Node, int, int]], first: int, stop: int, now: int
    ) -> list[Node]:
        """Pages first .. stop-1 are used now; a node that ends later is split.

        Returns
            the nodes along the path that end at `stop` or before.
        """
        runs: list[Node] = []
        for node, start, length in path:
            if start >= stop:
                break
            if start + length <= first:
                self._renew(node, now)
                runs.append(node)
                continue
            if start + len(node) > stop:
                node = self._split(node, stop - start)
            self._count_use(node, now)
            runs.append(node)
        return runs

    def _count_use(self, node: Node, now: int) -> None:
        if now > node.last_use:
            node.previous_use = node.last_use
            node.last_use = now
        node.uses += 1
        self.policy.used(node, now)

    def _renew(self, node: Node, now: int) -> None:
        if now > node.last_use:
            node.last_use = now
            self.policy.renewed(node, now)

    # ---- writing ----
    def insert(self, keys: bytes, first: int, pages: Locations, now: int) -> None:
        """Record the locations of pages `first` .. end of the chain.

        Ancestors that the tree does not know become gaps. A page that is known gets the new
        location; NO_SLOT in `pages` leaves a page as it is.
        """
        width = self.width
        count = first + len(pages)
        while count > first and pages.slot[count - first - 1] == NO_SLOT:
            count -= 1
        if count == first:
            return
        path = self._walk(keys, count)
        known = path[-1][1] + path[-1][2] if path else 0
        for node, start, length in path:
            low = max(start, first)
            if low < start + length:
                self._overwrite(node, low - start, pages.part(low - first, start + length - first))
        if known < count:
            fresh = Locations.absent(count - known)
            skip = max(first - known, 0)
            source = pages.part(max(known - first, 0), count - first)
            fresh.slot[skip:] = source.slot
            fresh.checksum[skip:] = source.checksum
            fresh.generation[skip:] = source.generation
            end = path[-1][0] if path else self.root
            if path and path[-1][2] < len(end):
                end = self._split(end, path[-1][2])
            last = self._append(end, keys[known * width : count * width], fresh, now)
        else:
            last = path[-1][0]
        while last.parent is not None:
            self._renew(last, now)
            last = last.parent

    def drop(self, keys: bytes, index: int, generation: int) -> bool:
        """Forget page `index` of the chain if it is stored with this generation."""
        path = self._walk(keys, index + 1)
        if not path or path[-1][1] + path[-1][2] != index + 1:
            return False
        node, start, _ = path[-1]
        at = index - start
        if node.slots[at] == NO_SLOT or node.generations[at] != generation:
            return False
        node.slots[at] = NO_SLOT
        node.gaps += 1
        self.page_count -= 1
        self._trim(node)
        return True

    def drop_generations(self, generations: set[int]) -> None:
        """Forget the pages with these generations, wherever they stand. O(pages)."""
        for node in list(self.nodes()):
            if generations.isdisjoint(node.generations):
                continue
            for at, generation in enumerate(node.generations):
                if generation in generations and node.slots[at] != NO_SLOT:
                    node.slots[at] = NO_SLOT
                    node.gaps += 1
                    self.page_count -= 1
            self._trim(node)

    def _overwrite(self, node: Node, at: int, pages: Locations) -> None:
        for i in range(len(pages)):
            slot = int(pages.slot[i])
            if slot == NO_SLOT:
                continue
            if node.slots[at + i] == NO_SLOT:
                node.gaps -= 1
                self.page_count += 1
            node.slots[at + i] = slot
            node.checksums[at + i] = int(pages.checksum[i])
            node.generations[at + i] = int(pages.generation[i])

    def _append(self, node: Node, keys: bytes, pages: Locations, now: int) -> Node:
        """Hang a run below `node`, as one node for each history that the policy remembers.

        Returns
            the node that ends with the run.
        """
        shadows = self.policy.shadows
        if shadows is None or not len(shadows):
            node = self._extend(node, keys, pages, now, None)
        else:
            at = 0
            for count, shadow in shadows.recall(keys, self.width):
                part = keys[at * self.width : (at + count) * self.width]
                node = self._extend(node, part, pages.part(at, at + count), now, shadow)
                at += count
        self._list_leaf(node)
        return node

    def _extend(
        self, node: Node, keys: bytes, pages: Locations, now: int, shadow: Shadow | None
    ) -> Node:
        """Add a run of one history: a longer edge if `node` is a leaf not used yet, else a child.

        Returns
            the node that ends with the run.
        """
        if node is self.root or node.children or node.uses > 1 or shadow is not None:
            node = self._hang(node, keys[: self.width], now)
            self._recall(node, shadow)
        self._forget_parking(node)  # whatever was pinned is not the last page any more
        gaps = int(np.count_nonzero(pages.slot == NO_SLOT))
        node.keys += keys
        node.slots.frombytes(pages.slot.tobytes())
        node.checksums.frombytes(pages.checksum.tobytes())
        node.generations.frombytes(pages.generation.tobytes())
        node.gaps += gaps
        self.page_count += len(pages) - gaps
        self.policy.admitted(node, len(pages), now)
        return node

    def _hang(self, node: Node, first_key: bytes, now: int) -> Node:
        """A new child of `node`, still empty and not on the policy's list."""
        child = self._new_node(node, node.depth + len(node), now)
        if node.children is None:
            if node is not self.root:
                self._unlist_leaf(node)
            node.children = {}
        node.children[first_key] = child
        return child

    def _split(self, node: Node, at: int) -> Node:
        """Cut the edge of `node` after `at` pages; returns the new upper node.

        The lower node keeps its identity, so its place among the leaves stays valid.
        """
        width, parent = self.width, node.parent
        assert parent is not None and parent.children is not None
        upper = self._new_node(parent, node.depth, node.born)
        upper.last_use = node.last_use
        upper.previous_use = node.previous_use
        upper.uses = node.uses
        upper.keys = node.keys[: at * width]
        upper.slots = node.slots[:at]
        upper.checksums = node.checksums[:at]
        upper.generations = node.generations[:at]
        upper.gaps = upper.slots.count(NO_SLOT) if node.gaps else 0
        parent.children[bytes(upper.keys[:width])] = upper
        node.keys = node.keys[at * width :]
        node.slots = node.slots[at:]
        node.checksums = node.checksums[at:]
        node.generations = node.generations[at:]
        node.gaps -= upper.gaps
        node.parent = upper
        node.depth += at
        upper.children = {bytes(node.keys[:width]): node}
        self.policy.split(upper, node)
        return upper

    def _join(self, path: list[Node]) -> None:
        """Make one node of neighbours on a path that have one history as far as the policy cares.

        Otherwise what was evicted and came back in pieces would stay in pieces.
        """
        policy = self.policy
        upper = path[0] if path else self.root
        for lower in path[1:]:
            only_child = upper.children is not None and len(upper.children) == 1
            if only_child and not (upper.parked or lower.parked) and policy.alike(upper, lower):
                self._merge(upper, lower)
            else:
                upper = lower

    def _merge(self, upper: Node, lower: Node) -> None:
        assert lower.parent is upper
        self._unlist_leaf(lower)
        self.policy.merged(upper, lower)
        upper.keys += lower.keys
        upper.slots += lower.slots
        upper.checksums += lower.checksums
        upper.generations += lower.generations
        upper.gaps += lower.gaps
        upper.uses = min(upper.uses, lower.uses)
        upper.children = lower.children
        for child in (upper.children or {}).values():
            child.parent = upper
        lower.parent = None
        self._list_leaf(upper)

    def _trim(self, node: Node) -> None:
        """Restore the leaf invariant: cut gaps off the end, remove what is empty, go upwards."""
        while node.parent is not None and not node.children:
            length = len(node) if node.gaps < len(node) else 0
            while length and node.slots[length - 1] == NO_SLOT:
                length -= 1
            node.gaps -= len(node) - length
            if length:
                self._shorten(node, length)
                self._forget_parking(node)
                self._list_leaf(node)
                return
            parent = node.parent
            self._unlist_leaf(node)
            self._forget_parking(node)
            assert parent.children is not None
            del parent.children[bytes(node.keys[: self.width])]
            if not parent.children:
                parent.children = None
            node.parent = None
            self.policy.removed(node)
            node = parent

    def _shorten(self, node: Node, length: int) -> None:
        del node.keys[length * self.width :]
        del node.slots[length:]
        del node.checksums[length:]
        del node.generations[length:]

    def _new_node(self, parent: Node, depth: int, now: int) -> Node:
        self._serial += 1
        return Node(self._serial, parent, depth, now)

    def nodes_along(self, keys: bytes) -> list[tuple[Node, int]]:
        """The nodes along a chain, and the index of the first page of each."""
        return [(node, start) for node, start, _ in self._walk(keys, len(keys) // self.width)]

    def pages_along(self, keys: bytes) -> dict[Node, int]:
        """The nodes along a chain, and how many pages of each belong to it."""
        return {node: length for node, _, length in self._walk(keys, len(keys) // self.width)}

    # ---- eviction order ----
    def victim(self, now: int) -> Node | None:
        """The leaf from whose end the policy would evict next; None if there is none to offer."""
        return self.policy.victim(now) if self.page_count else None

    def cut_tail(self, leaf: Node, count: int, now: int) -> None:
        """Forget the last `count` pages of `leaf`, which the policy has chosen."""
        low = len(leaf) - count
        stored = count - (leaf.slots[low:].count(NO_SLOT) if leaf.gaps else 0)
        self.policy.evicted(leaf, stored, now)
        if self.policy.shadows is not None:
            queue = self.policy.shadow_queue(leaf)
            self.policy.shadows.remember(leaf, low, self.width, queue, now)
        self.page_count -= stored
        if low:
            leaf.gaps -= count - stored
            self._shorten(leaf, low)
        else:
            leaf.slots = array("Q", (NO_SLOT,)) * count
            leaf.gaps = count
        self._trim(leaf)

    def park(self, leaf: Node) -> None:
        """Take a leaf out of the eviction order (its last page is pinned or guarded)."""
        self._unlist_leaf(leaf)
        leaf.parked = True
        self._parked[leaf.serial] = leaf

    def unpark(self, node: Node) -> None:
        """Put a node that was parked back into the eviction order."""
        if node.parked:
            self._forget_parking(node)
            self._list_leaf(node)

    def unpark_all(self) -> None:
        """Put all parked leaves back into the eviction order. O(parked leaves)."""
        for node in list(self._parked.values()):
            self.unpark(node)

    def _forget_parking(self, node: Node) -> None:
        node.parked = False
        self._parked.pop(node.serial, None)

    def _list_leaf(self, node: Node) -> None:
        if not node.children and not node.parked and not node.listed:
            node.listed = True
            self.policy.enlist(node)

    def _unlist_leaf(self, node: Node) -> None:
        if node.listed:
            node.listed = False
            self.policy.delist(node)

    # ---- whole tree ----
    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, parents before children."""
        stack = list(self.root.children.values()) if self.root.children else []
        while stack:
            node = stack.pop()
            yield node
            if node.children:
                stack.extend(node.children.values())

    def chains(self) -> Iterator[tuple[bytes, Node]]:
        """Each node with the packed keys of the path above it, parents before children."""
        stack = [(b"", node) for node in (self.root.children or {}).values()]
        while stack:
            above, node = stack.pop()
            yield above, node
            if node.children:
                path = above + bytes(node.keys)
                stack.extend((path, child) for child in node.children.values())

    def grow(self, node: Node, keys: bytes, pages: Locations, now: int) -> Node:
        """Hang a run of stored pages below `node` as a child of its own; for bulk loading.

        No child of `node` may start with the same key.
        """
        child = self._hang(node, keys[: self.width], now)
        # Made at their size: extending would leave an eighth more room for growth.
        child.keys = bytearray(keys)
        child.slots = array("Q", pages.slot.tobytes())
        child.checksums = array("Q", pages.checksum.tobytes())
        child.generations = array("Q", pages.generation.tobytes())
        self.page_count += len(pages)
        above = node
        while above.parent is not None and above.last_use < now:  # none is listed: it has a child
            above.last_use = now
            above = above.parent
        self.policy.admitted(child, len(pages), now)
        self._list_leaf(child)
        return child

    def slots(self) -> U64:
        """Slots of all pages, and NO_SLOT for gaps, in no order. O(pages)."""
        parts = [np.array(node.slots, dtype=np.uint64) for node in self.nodes()]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint64)

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold. O(pages); for tests."""
        pages, leaves, nodes = 0, [], list(self.nodes())
        for node in nodes:
            parent = node.parent
            assert parent is not None and parent.children is not None
            first = bytes(node.keys[: self.width])
            assert parent.children[first] is node
            assert node.depth == parent.depth + len(parent)
            assert len(node) > 0 and len(node.keys) == len(node) * self.width
            assert len(node.checksums) == len(node.generations) == len(node)
            assert node.gaps == node.slots.count(NO_SLOT)
            assert node.children is None or node.children
            if parent is not self.root:
                assert node.last_use <= parent.last_use
            pages += len(node) - node.gaps
            if not node.children:
                assert node.slots[-1] != NO_SLOT
                assert node.parked == (self._parked.get(node.serial) is node)
                assert node.listed == (not node.parked)
                if not node.parked:
                    leaves.append(node)
            else:
                assert not node.listed
                assert not node.parked or self._parked.get(node.serial) is node
        assert pages == self.page_count
        assert self._parked.keys() <= {node.serial for node in nodes}
        self.policy.check(leaves)
        self.policy.check_runs(nodes)
