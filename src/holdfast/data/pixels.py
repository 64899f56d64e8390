"""Evaluation views that are decoded once and kept: in memory here, on disk in :mod:`holdfast.data.pack`."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from holdfast.data.catalogue import Catalogue, Problem, Reader, in_order
from holdfast.data.images import BadImage, evaluation_view, interpolation_filter
from holdfast.data.round import Pixels
from holdfast.errors import UserError
from holdfast.shared import once

if TYPE_CHECKING:  # a survey shares out roles without torch; only decoding needs it
    from torch import Tensor


class MemoryPixels:
    """Pictures decoded when they are first read, and kept as uint8 [n, 3, size, size] in memory.

    ``sources`` gives for every row its reader, the index there and the name to report.
    """

    def __init__(
        self,
        sources: Sequence[tuple[Reader, int, str]],
        size: int,
        interpolation: str = "bicubic",
        *,
        workers: int = 2,
    ) -> None:
        import torch

        if size < 1:
            raise UserError("the size of pictures must be positive", found=str(size))
        interpolation_filter(interpolation)  # a wrong name is found before the first picture is opened
        self._sources, self._size, self._interpolation, self._workers = sources, size, interpolation, workers
        _check_memory(len(sources), size)
        self._store = torch.zeros((len(sources), 3, size, size), dtype=torch.uint8)
        self._done = np.zeros(len(sources), dtype=bool)
        self._bad: dict[int, str] = {}
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Side of the square pictures."""
        return self._size

    def __len__(self) -> int:
        return len(self._sources)

    def read(self, rows: np.ndarray) -> Tensor:
        """uint8 [n, 3, size, size]; a picture that cannot be decoded is a :class:`UserError` that names it."""
        import torch

        self._decode(rows)
        for row in rows:
            if int(row) in self._bad:
                raise UserError(f"{self._sources[int(row)][2]} cannot be read", found=self._bad[int(row)])
        return self._store[torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64))]

    def load(self) -> list[tuple[int, Problem]]:
        """Decode everything now; returns the rows that cannot be."""
        self._decode(np.arange(len(self._sources)))
        return [(row, Problem("unreadable", self._sources[row][2], why)) for row, why in sorted(self._bad.items())]

    def _decode(self, rows: np.ndarray) -> None:
        if self._done[rows].all():
            return
        with self._lock:
            store = self._store.numpy()  # a copy of a picture by torch wakes all its threads, and takes a millisecond
            missing = [int(row) for row in np.unique(rows) if not self._done[row]]
            for row, view in zip(missing, in_order(self._view, missing, self._workers), strict=True):
                if isinstance(view, str):
                    self._bad[row] = view
                else:
                    store[row] = view
                self._done[row] = True

    def _view(self, row: int) -> np.ndarray | str:
        reader, index, _ = self._sources[row]
        key = "view", _Same(reader), index, self._size, self._interpolation
        return once(key, lambda: self._decoded(reader, index), size=_bytes)

    def _decoded(self, reader: Reader, index: int) -> np.ndarray | str:
        try:
            return evaluation_view(reader.image(index), self._size, self._interpolation)
        except BadImage as error:
            return str(error)


class _Same:
    """A reader as a part of a key: equal to itself alone, and alive for as long as the key is."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.reader is self.reader

    def __hash__(self) -> int:
        return id(self.reader)


def _bytes(view: np.ndarray | str) -> int:
    return len(view) if isinstance(view, str) else view.nbytes


def _check_memory(count: int, size: int) -> None:
    needed = count * 3 * size * size
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > 0.8 * available:
        raise UserError(
            f"{count} pictures of {size} px do not fit into memory",
            expected=f"at most {0.8 * available / 2**30:.0f} GiB",
            found=f"{needed / 2**30:.0f} GiB",
            do="write them to a packed store with `holdfast pack` and use that as the source",
        )


@dataclass(frozen=True)
class JoinedPixels:
    """Rows of several pixel stores as one."""

    parts: tuple[Pixels, ...]
    part: np.ndarray  # [n] which of the parts
    row: np.ndarray  # [n] row there

    @property
    def size(self) -> int:
        """Side of the square pictures."""
        return self.parts[0].size

    def __len__(self) -> int:
        return len(self.row)

    def read(self, rows: np.ndarray) -> Tensor:
        """uint8 [n, 3, size, size]."""
        import torch

        result = torch.empty((len(rows), 3, self.size, self.size), dtype=torch.uint8)
        for number, pixels in enumerate(self.parts):
            here = np.flatnonzero(self.part[rows] == number)
            if len(here):
                result[torch.from_numpy(here)] = pixels.read(self.row[rows[here]])
        return result


@dataclass(frozen=True)
class Gathered:
    """Pixels of some rows of a catalogue. ``rows[i]`` is where row i of the request lies, -1 where it is unreadable."""

    pixels: Pixels
    rows: np.ndarray  # [n] int64
    problems: list[Problem]


def gather(
    catalogue: Catalogue, rows: np.ndarray, size: int, interpolation: str, *, workers: int | None = None
) -> Gathered:
    """Decode the given rows of a catalogue now, or point into the packed stores that hold them already."""
    if workers is None:
        workers = min(8, os.cpu_count() or 1)
    chosen = catalogue.table.take(rows)
    readers = chosen["reader"].to_numpy().astype(np.int64)
    indices = chosen["index"].to_numpy().astype(np.int64)
    names: list[str] = chosen["locator"].to_pylist()
    prepared = [reader.prepared(size, interpolation) for reader in catalogue.readers]
    direct = [position for position in range(len(rows)) if prepared[readers[position]] is None]
    memory = MemoryPixels(
        [(catalogue.readers[readers[p]], int(indices[p]), names[p]) for p in direct],
        size,
        interpolation,
        workers=workers,
    )
    bad = memory.load()
    parts: list[Pixels] = [memory, *(pixels for pixels in prepared if pixels is not None)]
    part_of_reader = np.cumsum([pixels is not None for pixels in prepared]) if prepared else np.zeros(0, np.int64)
    part, row = part_of_reader[readers], indices.copy()
    part[direct], row[direct] = 0, np.arange(len(direct))
    bad_rows = np.array([direct[item] for item, _ in bad], dtype=np.int64)
    problems = [problem for _, problem in bad]
    used = np.unique(part)
    if len(used) == 1:
        pixels, result = parts[int(used[0])], row
    else:
        pixels, result = JoinedPixels(tuple(parts), part, row), np.arange(len(rows), dtype=np.int64)
    if not len(rows):
        pixels = memory
    result = result.astype(np.int64)
    result[bad_rows] = -1
    return Gathered(pixels, result, problems)
