"""A trace as arrays: when requests came, how long they were, and which blocks they consist of.

A block is `block_tokens` tokens of one request, named by an id. Ids are *chain ids*: an id stands
for the block and for everything before it, so equal ids mean equal prefixes and a request is known
by its last id. `with_chain_ids` makes them where a file names blocks by their own content alone.

Invariants
    - offset[0] == 0, offset rises, offset[n] == len(ids); request i is ids[offset[i]:offset[i+1]].
    - timestamp_ms does not fall.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]

KEY_BYTES = 16
"""Width of the page keys that `Trace.keys` makes of ids."""


@dataclass(frozen=True, eq=False)
class Trace:
    """n requests with m block references between them.

    Parameters
        name: what reports call it; a file's name without its suffixes.
        block_tokens: tokens of a block; the last block of a request may have fewer.
        timestamp_ms, input_length, output_length: shape (n,); lengths in tokens.
        offset: shape (n+1,), where each request's ids start.
        ids: shape (m,), the ids of all requests one after the other.
        labels: optional columns of the file, such as `session_id`: one value a request or None.
    """

    name: str
    block_tokens: int
    timestamp_ms: I64
    input_length: I64
    output_length: I64
    offset: I64
    ids: U64
    labels: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.timestamp_ms)

    @property
    def block_counts(self) -> I64:
        """Blocks of each request, shape (n,)."""
        return np.diff(self.offset)

    @property
    def seconds(self) -> float:
        """Time from the first request to the last."""
        return float(self.timestamp_ms[-1] - self.timestamp_ms[0]) / 1000 if len(self) else 0.0

    @cached_property
    def unique_ids(self) -> U64:
        """Each id once, rising."""
        return np.unique(self.ids)

    @cached_property
    def dense(self) -> I32:
        """Each reference as an index into `unique_ids`, shape (m,)."""
        return np.searchsorted(self.unique_ids, self.ids).astype(np.int32)

    def keys(self, request: int) -> bytes:
        """Page keys of one request, packed: KEY_BYTES a block, the id little-endian and zeros."""
        ids = self.ids[self.offset[request] : self.offset[request + 1]]
        words = np.zeros((len(ids), KEY_BYTES // 8), dtype="<u8")
        words[:, 0] = ids
        return words.tobytes()

    def tokens_of(self, blocks: I64) -> I64:
        """Tokens in the first `blocks` blocks of each request, shape (n,): partial blocks count as
        what they hold."""
        tokens: I64 = np.minimum(blocks * self.block_tokens, self.input_length)
        return tokens

    def head(self, count: int) -> Trace:
        """The first `count` requests."""
        offset = self.offset[: count + 1]
        return replace(
            self,
            timestamp_ms=self.timestamp_ms[:count],
            input_length=self.input_length[:count],
            output_length=self.output_length[:count],
            offset=offset,
            ids=self.ids[: offset[-1]],
            labels={name: column[:count] for name, column in self.labels.items()},
        )

    def select(self, kept: npt.NDArray[np.bool_]) -> Trace:
        """The requests where `kept` (n,) is true."""
        counts = self.block_counts
        return replace(
            self,
            timestamp_ms=self.timestamp_ms[kept],
            input_length=self.input_length[kept],
            output_length=self.output_length[kept],
            offset=offsets_of(counts[kept]),
            ids=self.ids[np.repeat(kept, counts)],
            labels={
                name: [value for value, keep in zip(column, kept, strict=True) if keep]
                for name, column in self.labels.items()
            },
        )

    # ---- chain ids ----
    def has_chain_ids(self) -> bool:
        """Whether every id always follows the same predecessor (or always comes first)."""
        before = np.empty_like(self.dense)
        before[1:] = self.dense[:-1]
        before[self.offset[:-1][self.block_counts > 0]] = -1
        known = np.empty(len(self.unique_ids), dtype=np.int32)
        known[self.dense] = before  # any one predecessor of each; then all must equal it
        return bool(np.array_equal(known[self.dense], before))

    def with_chain_ids(self) -> Trace:
        """The same trace with each id replaced by a hash of the ids up to and including it.

        The hash of a prefix is a sum of mixed (position, id) words, so the whole trace is a few
        array operations. Two prefixes share one with probability 2**-64.
        """
        counts = self.block_counts
        position = np.arange(len(self.ids)) - np.repeat(self.offset[:-1], counts)
        words = _mixed(self.ids + _mixed(position.astype(np.uint64)))
        sums = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(words)])
        ids = _mixed(sums[1:] - np.repeat(sums[self.offset[:-1]], counts))
        return replace(self, ids=ids)


def offsets_of(counts: npt.NDArray[np.integer[Any]]) -> I64:
    """Where runs of these lengths start when they lie one after the other, and where the last ends.

    Shape (n,) becomes (n+1,).
    """
    offset = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offset[1:])
    return offset


def _mixed(words: U64) -> U64:
    """splitmix64's finalizer: a bijection whose output bits each depend on all input bits."""
    mixed = words + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
