"""Thumbnails of examples, found again in the data source by their locator and known by their content hash.

A file that is gone, or whose bytes are no longer those of the example, gives no picture, and the page says so.
"""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from holdfast.artifacts import read_json
from holdfast.data.images import SUFFIXES, BadImage, open_image, to_rgb

SIDE = 112  # pixels of a thumbnail's longer side
TINY = 48  # smaller pictures keep their pixels and are enlarged by the browser


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
        self._tables: dict[Path, pa.ChunkedArray | None] = {}
        self._shards: dict[Path, dict[str, tuple[int, int]]] = {}
        self._stores: dict[Path, _Store | None] = {}

    def places(self, ids: Iterable[str]) -> dict[str, Place]:
        """Where the given examples lie."""
        if not self._roles.exists():
            return {}
        table = pq.read_table(self._roles, columns=["example_id", "source", "locator"])
        wanted = set(ids)
        rows = [row for row, one in enumerate(table["example_id"].to_pylist()) if one in wanted]
        return {row["example_id"]: Place(row["source"], row["locator"]) for row in table.take(rows).to_pylist()}

    def thumbnail(self, identity: str, place: Place) -> Thumbnail | None:
        """The example's picture, or None where it cannot be found unchanged."""
        try:
            image = self._image(identity, place)
        except (OSError, BadImage, ValueError, KeyError, IndexError, tarfile.TarError, pa.ArrowInvalid):
            return None
        return None if image is None else _encoded(image)

    def _image(self, identity: str, place: Place) -> Image.Image | None:
        if place.source == "digits":
            array = self._digits[int(place.locator.rpartition("/")[2])]
            same = hashlib.sha256(array.tobytes()).hexdigest() == identity
            return Image.fromarray(array).convert("RGB") if same else None
        folder = self._find(place.source)
        if folder is not None and (folder / "store.json").is_file():
            store = self._stores.setdefault(folder, _Store.open(folder))
            return store.image(identity) if store is not None else None
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
        return next((one for one in places if one.exists()), None)

    def _content(self, locator: str) -> bytes | None:
        file = self._find(locator)
        if file is not None:
            return file.read_bytes() if file.is_file() else None
        name, mark, inside = locator.rpartition("#")
        archive = self._find(name) if mark else None
        if archive is None:
            return None
        return self._row(archive, int(inside)) if archive.suffix == ".parquet" else self._member(archive, inside)

    def _row(self, file: Path, row: int) -> bytes | None:
        if file not in self._tables:
            self._tables[file] = _picture_column(file)
        column = self._tables[file]
        value = None if column is None else column[row].as_py()
        return value.get("bytes") if isinstance(value, dict) else value

    def _member(self, shard: Path, key: str) -> bytes | None:
        if shard not in self._shards:
            with tarfile.open(shard, "r:") as archive:
                self._shards[shard] = {
                    _key(member.name): (member.offset_data, member.size)
                    for member in archive
                    if member.isreg() and PurePosixPath(member.name).suffix.lower() in SUFFIXES
                }
        if key not in self._shards[shard]:
            return None
        offset, size = self._shards[shard][key]
        with shard.open("rb") as file:
            file.seek(offset)
            return file.read(size)


def _key(member: str) -> str:
    path = PurePosixPath(member)
    return str(path.parent / path.name.partition(".")[0])


def _picture_column(file: Path) -> pa.ChunkedArray | None:
    schema = pq.read_schema(file)
    for field in sorted(schema, key=lambda one: one.name != "image"):
        is_struct = pa.types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0
        if is_struct or pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type):
            return pq.read_table(file, columns=[field.name])[field.name]
    return None


@dataclass(frozen=True)
class _Store:
    """The evaluation views of a packed store, by content hash."""

    array: np.ndarray  # [n, 3, size, size], on disk
    rows: Mapping[str, int]

    @classmethod
    def open(cls, folder: Path) -> _Store | None:
        header = read_json(folder / "store.json")
        with pa.memory_map(str(folder / "index.arrow")) as file:
            index = pa.ipc.open_file(file).read_all()
        shape = (int(header["rows"]), 3, int(header["size"]), int(header["size"]))
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
