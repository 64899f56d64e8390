"""Near hashes without an all-pairs loop: locality-sensitive hashing over 64-bit codes.

Each of L tables looks at k of the 64 bits, chosen at random once and for all; codes that agree on them meet in a bucket
and their whole distance is counted. k grows with the logarithm of the number of codes, so that a bucket holds few codes
whatever the size; a pair at distance d meets in one table with probability about (1 - d/64)^k.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

MAX_BUCKET = 512  # codes of one bucket that are compared; more are alike by the thousand, and counted as passed over


@dataclass(frozen=True)
class Pairs:
    """Near codes: row of the query, row of the index, distance, and the version of the query that was that near.

    ``passed_over`` counts comparisons that were not made because a bucket was too full.
    """

    query: np.ndarray  # [p] int64
    index: np.ndarray  # [p] int64
    distance: np.ndarray  # [p] uint8
    version: np.ndarray  # [p] int64
    passed_over: int = 0


class HammingIndex:
    """Codes [n] uint64, ready to be asked for those within a distance."""

    def __init__(self, codes: np.ndarray, *, tables: int = 24) -> None:
        self.codes = np.ascontiguousarray(codes, dtype=np.uint64)
        # A bucket holds 1/64 code on average: real hashes are far from uniform, and the fullest buckets rule the cost.
        self._bits = int(np.clip(np.ceil(np.log2(max(len(codes), 2))) + 6, 12, 28))
        generator = np.random.default_rng(20240229)
        self._choices = [np.sort(generator.permutation(63)[: self._bits]) for _ in range(tables)]

    def near(self, queries: np.ndarray, distance: int) -> Pairs:
        """Pairs within ``distance``. ``queries`` is [m, v]: v versions of each of m codes; the nearest one counts."""
        count, versions = queries.shape
        found: list[tuple[np.ndarray, ...]] = []
        passed_over = 0
        for choice in self._choices:
            table = _Table(self.codes, choice)
            step = max(1, 4_000_000 // versions)
            for first in range(0, count, step):
                part = queries[first : first + step].reshape(-1)
                for rows, members in table.meet(part):
                    apart = np.bitwise_count(part[rows] ^ self.codes[members])
                    near = apart <= distance
                    row, version = np.divmod(rows[near], versions)
                    found.append((first + row, members[near], apart[near], version))
            passed_over += table.passed_over
        return _nearest_of_each(found, passed_over)


class _Table:
    """Codes sorted by some of their bits."""

    def __init__(self, codes: np.ndarray, choice: np.ndarray) -> None:
        self._lookup = _lookup(choice)
        keys = _keys(codes, self._lookup)
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]
        # Nearly all queries meet nobody; one look at this array settles them.
        self._occupied = np.zeros(1 << len(choice), dtype=bool)
        self._occupied[keys] = True
        self.passed_over = 0

    def meet(self, codes: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Rows of ``codes`` with the members of their buckets, a bounded number at a time."""
        keys = _keys(codes, self._lookup)
        rows = np.flatnonzero(self._occupied[keys])
        keys = keys[rows]
        low, high = np.searchsorted(self._keys, keys, "left"), np.searchsorted(self._keys, keys, "right")
        sizes = np.minimum(high - low, MAX_BUCKET)
        self.passed_over += int((high - low - sizes).sum())
        ends = np.cumsum(sizes)
        first = 0
        while first < len(rows):
            begun = int(ends[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(ends, begun + 4_000_000, "right")))
            lengths = sizes[first:last]
            offsets = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            members = self._order[np.repeat(low[first:last], lengths) + offsets]
            yield np.repeat(rows[first:last], lengths), members
            first = last


def _lookup(choice: np.ndarray) -> np.ndarray:
    """[8, 256] uint32: for every byte of a code, what its value adds to the key of the chosen bits."""
    values = np.arange(256, dtype=np.uint32)
    table = np.zeros((8, 256), dtype=np.uint32)
    for place, bit in enumerate(choice):
        table[bit // 8] |= ((values >> np.uint32(bit % 8)) & np.uint32(1)) << np.uint32(place)
    return table


def _keys(codes: np.ndarray, table: np.ndarray) -> np.ndarray:
    """[n] uint32: the chosen bits of every code, side by side."""
    parts = np.ascontiguousarray(codes).astype("<u8").view(np.uint8).reshape(len(codes), 8)
    keys = table[0][parts[:, 0]]
    for place in range(1, 8):
        keys |= table[place][parts[:, place]]
    return keys


def _nearest_of_each(found: list[tuple[np.ndarray, ...]], passed_over: int) -> Pairs:
    """Each pair once, with its least distance."""
    empty = np.zeros(0, np.int64)
    columns = [np.concatenate([empty, *(part[place] for part in found)]) for place in range(4)]
    query, index, distance, version = columns
    order = np.lexsort((version, distance, index, query))
    query, index, distance, version = query[order], index[order], distance[order], version[order]
    first = np.ones(len(query), dtype=bool)
    first[1:] = (query[1:] != query[:-1]) | (index[1:] != index[:-1])
    return Pairs(query[first], index[first], distance[first].astype(np.uint8), version[first], passed_over)
