"""A packed store on disk: evaluation views decoded once, in one file that can be memory-mapped.

store.json    what it is: version, size, interpolation, counts, fingerprints. Written last: a store without it is
              unfinished.
pixels.bin    uint8 [n, 3, size, size], row after row
thumbs.bin    uint8 [n, 32, 32], for the search for near copies
index.arrow   one line an example: its content hash, class, caption, split, where it came from, its row
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from PIL import Image

from holdfast.config import SourceConfig
from holdfast.data.catalogue import Entry, Listing, Problem
from holdfast.data.dedup.signatures import SIDE
from holdfast.data.names import readable_name
from holdfast.data.round import Pixels
from holdfast.errors import FaultError, UserError
from holdfast.files import fingerprint_bytes, fingerprint_file, read_json

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "holdfast packed store"
VERSION = 1
BLOCK = 256  # pictures that are written, made durable and noted down together
PLAN, JOURNAL = "plan.json", "journal.jsonl"  # what an unfinished store has beside its data

INDEX = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("example_id", pa.string(), nullable=False),
        pa.field("class", pa.string()),
        pa.field("caption", pa.string()),
        pa.field("split", pa.string()),
        pa.field("locator", pa.string(), nullable=False),
        pa.field("small", pa.bool_(), nullable=False),  # too small to be compared by its thumbnail
        pa.field("picture", pa.string()),  # hash of the decoded pixels of the whole picture
    ]
)


class PackedPixels:
    """The pictures of a store, read from disk (or the page cache) into buffers that are used again and again.

    Fresh memory for every batch would cost more than the copy itself, so a buffer goes back to the pool when the last
    tensor that looks into it is gone. Nothing is mapped into the process: its memory does not grow with the store.
    """

    def __init__(self, path: Path, count: int, size: int) -> None:
        self._count, self._size = count, size
        self._bytes = 3 * size * size
        self._handle = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._handle)
        self._free: list[np.ndarray] = []

    @property
    def size(self) -> int:
        """Side of the square pictures."""
        return self._size

    def __len__(self) -> int:
        return self._count

    def read(self, rows: np.ndarray) -> Tensor:
        """uint8 [n, 3, size, size]. Rows that follow each other on disk are read in one go."""
        import torch

        rows = np.ascontiguousarray(rows, dtype=np.int64)
        if len(rows) and (rows.min() < 0 or rows.max() >= self._count):
            raise IndexError(f"the store has rows 0 to {self._count - 1}")
        if not len(rows):
            return torch.empty((0, 3, self._size, self._size), dtype=torch.uint8)
        buffer = self._lease(len(rows))
        starts = np.flatnonzero(np.diff(rows, prepend=-2) != 1)
        for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
            self._fill(buffer[start:end].reshape(-1), int(rows[start]) * self._bytes)
        return torch.from_numpy(buffer).view(len(rows), 3, self._size, self._size)

    def _fill(self, target: np.ndarray, offset: int) -> None:
        done = 0
        while done < len(target):
            read = os.preadv(self._handle, [target[done:].data], offset + done)
            if not read:
                raise FaultError("the packed store is shorter than its index says", do="write it again")
            done += read

    def _lease(self, count: int) -> np.ndarray:
        for position, buffer in enumerate(self._free):
            if count <= len(buffer) <= 2 * count:
                del self._free[position]
                break
        else:
            buffer = np.empty((count, self._bytes), dtype=np.uint8)
        view = buffer[:count]
        weakref.finalize(view, _give_back, weakref.ref(self), buffer)
        return view

    def take_back(self, buffer: np.ndarray) -> None:
        """Keep a buffer for the next reads; a few are enough."""
        self._free.append(buffer)
        del self._free[:-4]


def _give_back(pixels: weakref.ref[PackedPixels], buffer: np.ndarray) -> None:
    alive = pixels()
    if alive is not None:
        alive.take_back(buffer)


@dataclass(frozen=True)
class Store:
    """An open packed store."""

    path: Path
    header: dict[str, Any]

    @property
    def size(self) -> int:
        """Side of the pictures."""
        return int(self.header["size"])

    @property
    def rows(self) -> int:
        """Rows of the pixel file; rows of pictures that could not be read are empty and not in the index."""
        return int(self.header["rows"])

    @cached_property
    def index(self) -> pa.Table:
        """One line an example (a picture with several captions has several lines)."""
        path = self.path / "index.arrow"
        try:
            if not path.is_file():
                raise OSError("it is not a regular file")
            with pa.memory_map(str(path)) as file:
                index = pa.ipc.open_file(file).read_all()
            index.validate(full=True)  # text that is no UTF-8 among it
            if "picture" not in index.column_names:  # written by an earlier version
                index = index.append_column(INDEX.field("picture"), pa.nulls(len(index), pa.string()))
            if not index.schema.equals(INDEX):
                raise ValueError("other columns than those of a store")
            rows = index["row"].to_numpy()
            if len(rows) and not 0 <= rows.min() <= rows.max() < self.rows:
                raise ValueError(f"rows that the store does not have: it has {self.rows}")
        except (pa.ArrowException, OSError, ValueError, LookupError) as error:
            raise FaultError(
                f"{path} is no index of a packed store",
                found=str(error),
                do="write the store again with `holdfast pack`",
            ) from error
        return index

    @cached_property
    def pixels(self) -> PackedPixels:
        """The pictures, by row."""
        return PackedPixels(self.path / "pixels.bin", self.rows, self.size)

    @property
    def array(self) -> np.ndarray:
        """The pictures as one memory-mapped array [n, 3, size, size]."""
        return np.memmap(self.path / "pixels.bin", np.uint8, "r", shape=(self.rows, 3, self.size, self.size))

    @cached_property
    def thumbs(self) -> np.ndarray:
        """Thumbnails, memory-mapped: [n, 32, 32]."""
        return np.memmap(self.path / "thumbs.bin", np.uint8, "r", shape=(self.rows, SIDE, SIDE))

    def verify(self) -> None:
        """Read everything once; a block whose bytes changed since it was written is a :class:`FaultError`."""
        for number, digest in enumerate(self.header["blocks"]):
            rows = np.arange(number * BLOCK, min((number + 1) * BLOCK, self.rows))
            if fingerprint_bytes(self.pixels.read(rows).numpy().tobytes()) != digest:
                raise FaultError(
                    f"{self.path}: the pictures of rows {rows[0]} to {rows[-1]} changed since they were packed",
                    do="write the store again with `holdfast pack`",
                )
        if fingerprint_file(self.path / "index.arrow") != self.header["index"]:
            raise FaultError(f"{self.path}: the index changed since the store was packed", do="write the store again")


def open_store(path: Path) -> Store:
    """Open a store; one that is unfinished, cut short or of another version is refused."""
    if not os.path.exists(path / "store.json"):
        unfinished = os.path.exists(path / PLAN)
        raise UserError(
            f"{path} is {'an unfinished' if unfinished else 'no'} packed store",
            do="run the same `holdfast pack` again: it goes on where it stopped"
            if unfinished
            else "write one with `holdfast pack SOURCE OUT`",
        )
    header = read_json(path / "store.json")
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise UserError(f"{path}/store.json does not describe a packed store")
    if header.get("version") != VERSION:
        raise UserError(
            f"{path} was written by another version",
            expected=f"version {VERSION} of the format",
            found=f"version {header.get('version')}",
            do="pack the source again with this version of holdfast",
        )
    if not _is_header(header):
        raise FaultError(f"{path}/store.json is not as `holdfast pack` wrote it", do="write the store again")
    store = Store(path, header)
    for name, length in (("pixels.bin", 3 * store.size**2), ("thumbs.bin", SIDE**2)):
        found = (path / name).stat().st_size if (path / name).is_file() else 0
        if found != store.rows * length:
            raise FaultError(
                f"{path}/{name} is not whole", expected=f"{store.rows * length:,} bytes", found=f"{found:,} bytes"
            )
    return store


def _is_header(header: dict[str, Any]) -> bool:
    """Whether the values are of the types that ``pack`` writes, so that nothing trips over them later."""
    numbers = [header.get(key) for key in ("size", "rows", "examples")]
    texts = [header.get(key) for key in ("interpolation", "index", "fingerprint")]
    blocks, problems = header.get("blocks"), header.get("problems")
    return (
        all(isinstance(number, int) and 0 <= number < 1 << 40 for number in numbers)
        and isinstance(blocks, list)
        and len(blocks) == -(-header["rows"] // BLOCK)
        and all(isinstance(text, str) for text in (*texts, *blocks))
        and isinstance(problems, list)
        and all(isinstance(problem, list) and len(problem) in (2, 3) for problem in problems)
        and all(isinstance(text, str) for problem in problems for text in problem)
    )


@dataclass(frozen=True)
class StoreReader:
    """Reads the examples of a store; line i of the index is index i."""

    store: Store
    rows: np.ndarray  # [n] row of each line
    small: np.ndarray  # [n]

    def content(self, index: int) -> bytes:
        """The bytes of the evaluation view (the file itself is not in the store)."""
        return self.store.pixels.read(self.rows[index : index + 1]).numpy().tobytes()

    def image(self, index: int) -> Image.Image:
        """The evaluation view as a picture."""
        view = self.store.pixels.read(self.rows[index : index + 1])[0].permute(1, 2, 0)
        return Image.fromarray(view.contiguous().numpy().copy())

    def thumb(self, index: int) -> tuple[np.ndarray, bool]:
        """The thumbnail that was made of the whole picture when it was packed."""
        return np.asarray(self.store.thumbs[self.rows[index]]), bool(self.small[index])

    def prepared(self, size: int, interpolation: str) -> Pixels | None:
        """The store's pictures by line; another size than the store's is refused, for its pixels would be others."""
        if (size, interpolation) != (self.store.size, self.store.header["interpolation"]):
            raise UserError(
                f"{self.store.path} holds pictures of another size",
                expected=f"{size} px, {interpolation}, which the model asks for",
                found=f"{self.store.size} px, {self.store.header['interpolation']}",
                do=f"pack the source again with --size {size} --interpolation {interpolation}",
            )
        return _Lines(self.store.pixels, self.rows)


@dataclass(frozen=True)
class _Lines:
    """Pixels by line of the index instead of row."""

    pixels: PackedPixels
    rows: np.ndarray

    @property
    def size(self) -> int:
        return self.pixels.size

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, rows: np.ndarray) -> Tensor:
        return self.pixels.read(self.rows[rows])


def list_store(config: SourceConfig, path: Path) -> Listing:
    """A packed store as a source: everything is in its index, no picture is read."""
    store = open_store(path)
    index = store.index
    columns = (index[name].to_pylist() for name in ("locator", "class", "caption", "split", "example_id", "picture"))
    entries = [Entry(*values) for values in zip(*columns, strict=True)]
    reader = StoreReader(store, index["row"].to_numpy(), index["small"].to_numpy())
    problems = [Problem(*item) for item in store.header["problems"]]
    return Listing(readable_name(path), entries, reader, problems)
