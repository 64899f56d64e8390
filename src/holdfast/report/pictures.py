"""Thumbnails of examples, found again in the data source by their locator and known by their content hash.

A file that is gone, or whose bytes are no longer those of the example, gives no picture, and the page says so.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import math
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from holdfast.data.containers import RowGroups, is_outside, member_key, tar_members
from holdfast.data.images import MAX_BYTES, SUFFIXES, BadImage, open_image, read_picture, to_rgb
from holdfast.errors import HoldfastError
from holdfast.files import read_json

SIDE = 112  # pixels of a thumbnail's longer side
TINY = 48  # smaller pictures keep their pixels and are enlarged by the browser

# What reading a source raises that was moved, changed or broken since the run.
_NO_PICTURE = (
    *(HoldfastError, BadImage, OSError, ValueError, LookupError, TypeError),
    ModuleNotFoundError,  # the embedded digits come with scikit-learn
    *(tarfile.TarError, pa.ArrowException),
)


@dataclass(frozen=True)
class Place:
    """Where an example came from."""

    source: str
    locator: str


@dataclass(frozen=True)
class Thumbnail:
    """A picture as a data address, re-encoded: nothing of the original file but its pixels is in it."""

    address: str
    tiny: bool


class Pictures:
    """Finds the pictures of a run's examples."""

    def __init__(self, roles: Path, root: Path) -> None:
        self._roles, self._root = roles, root
        self._tables: dict[Path, RowGroups] = {}
        self._shards: dict[Path, dict[str, tuple[int, int]]] = {}
        self._stores: dict[Path, _Store] = {}

    def places(self, ids: Iterable[str]) -> dict[str, Place]:
        """Where the given examples lie."""
        if not self._roles.exists():
            return {}
        table = pq.read_table(self._roles, columns=["example_id", "source", "locator"])
        wanted = set(ids)
        rows = [row for row, item in enumerate(table["example_id"].to_pylist()) if item in wanted]
        return {row["example_id"]: Place(row["source"], row["locator"]) for row in table.take(rows).to_pylist()}

    def thumbnail(self, identity: str, place: Place) -> Thumbnail | None:
        """The example's picture, or None where it cannot be found unchanged."""
        try:
            image = self._image(identity, place)
        except _NO_PICTURE:
            return None
        return None if image is None else _encoded(image)

    def _image(self, identity: str, place: Place) -> Image.Image | None:
        if place.source == "digits":
            array = self._digits[int(place.locator.rpartition("/")[2])]
            same = hashlib.sha256(array.tobytes()).hexdigest() == identity
            return Image.fromarray(array).convert("RGB") if same else None
        folder = self._find(place.source)
        if folder is not None and (folder / "store.json").is_file():
            if folder not in self._stores:
                self._stores[folder] = _Store.open(folder)
            return self._stores[folder].image(identity)
        content = self._content(place.locator)
        if content is None or hashlib.sha256(content).hexdigest() != identity:
            return None
        return to_rgb(open_image(content))

    @cached_property
    def _digits(self) -> np.ndarray:
        from sklearn.datasets import load_digits

        values, _ = load_digits(return_X_y=True)
        grey = np.asarray(values, dtype=np.float64).reshape(-1, 8, 8) * (255 / 16)
        return np.round(grey).astype(np.uint8)

    def _find(self, name: str) -> Path | None:
        """A path as a locator has it: as it stands, or from the round's folder or one above it.

        Locators of a round that was started with a relative path are relative to the folder it was started in.
        """
        path = Path(name)
        places = [path] if path.is_absolute() else [base / path for base in (self._root, *self._root.parents)]
        return next((place for place in places if place.exists()), None)

    def _content(self, locator: str) -> bytes | None:
        file = self._find(locator)
        if file is not None:
            return read_picture(file)
        name, mark, inside = locator.rpartition("#")
        archive = self._find(name) if mark else None
        if archive is None or not archive.is_file():
            return None
        return self._row(archive, int(inside)) if archive.suffix == ".parquet" else self._member(archive, inside)

    def _row(self, file: Path, row: int) -> bytes:
        if file not in self._tables:
            self._tables[file] = RowGroups([file])
        return self._tables[file].picture(0, row)

    def _member(self, shard: Path, key: str) -> bytes | None:
        if shard not in self._shards:
            self._shards[shard] = _pictures_of(shard)
        if key not in self._shards[shard]:
            return None
        offset, size = self._shards[shard][key]
        with shard.open("rb") as file:
            file.seek(offset)
            return file.read(size)


def _pictures_of(shard: Path) -> dict[str, tuple[int, int]]:
    """Offset and size of the pictures in a tar file, by their example's key; of a name used twice, the first."""
    found: dict[str, tuple[int, int]] = {}
    seen: set[str] = set()
    with contextlib.suppress(tarfile.TarError, OSError):  # what comes before is used
        for member in tar_members(shard):
            path = PurePosixPath(member.name)
            is_picture = member.isreg() and not member.issparse() and path.suffix.lower() in SUFFIXES
            if is_picture and not is_outside(path) and member.size <= MAX_BYTES and member.name not in seen:
                seen.add(member.name)
                found[member_key(member.name)] = (member.offset_data, member.size)
    return found


@dataclass(frozen=True)
class _Store:
    """The evaluation views of a packed store, by content hash."""

    array: np.ndarray  # [n, 3, size, size], on disk
    rows: Mapping[str, int]

    @classmethod
    def open(cls, folder: Path) -> _Store:
        header = read_json(folder / "store.json")
        shape = (int(header["rows"]), 3, int(header["size"]), int(header["size"]))
        if not (folder / "index.arrow").is_file() or (folder / "pixels.bin").stat().st_size != math.prod(shape):
            raise FileNotFoundError(f"{folder} is not a whole store")
        with pa.memory_map(str(folder / "index.arrow")) as file:
            index = pa.ipc.open_file(file).read_all()
        array = np.memmap(folder / "pixels.bin", np.uint8, "r", shape=shape)
        return cls(array, dict(zip(index["example_id"].to_pylist(), index["row"].to_pylist(), strict=True)))

    def image(self, identity: str) -> Image.Image | None:
        row = self.rows.get(identity)
        return None if row is None else Image.fromarray(np.array(self.array[row]).transpose(1, 2, 0))


def _encoded(image: Image.Image) -> Thumbnail:
    tiny = max(image.size) <= TINY
    kind = "PNG" if tiny else "WEBP"
    if not tiny:
        image = image.copy()
        image.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    image.save(file, kind, **({} if tiny else {"quality": 62, "method": 2}))
    return Thumbnail(f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}", tiny)
