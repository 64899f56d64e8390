"""Parquet tables with image bytes, as Hugging Face stores data sets."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.config import SourceConfig
from holdfast.data.catalogue import BytesReader, Entry, Listing, Problem, readable_name
from holdfast.data.files import SPLITS, expand
from holdfast.data.images import BadImage
from holdfast.errors import UserError

_CAPTIONS = ("caption", "captions", "text", "title", "TEXT", "sentence")
_LABELS = ("label", "labels", "class", "category")
_CACHED_GROUPS = 4  # row groups whose pictures are kept while their neighbours are asked for


def list_parquet(config: SourceConfig, path: Path) -> Listing:
    """Columns ``image`` (bytes, or a struct with bytes), ``label``, a caption column and ``split``, where present."""
    files = [file for one in expand(path) for file in ([one] if one.is_file() else sorted(one.rglob("*.parquet")))]
    if not files:
        raise UserError(f"no .parquet files under {path}")
    entries: list[Entry] = []
    problems: list[Problem] = []
    rows: list[tuple[int, int]] = []  # (file, row) of every entry; a picture with several captions has several
    groups = _RowGroups(files)
    for number, file in enumerate(files):
        table = groups.describe(number)
        names = _class_names(groups.schema(number))
        labels = [_label(value, names, file) for value in _column(table, _LABELS)]
        captions, splits = _column(table, _CAPTIONS), _column(table, ("split",))
        for row in range(len(table)):
            texts = _texts(captions[row])
            split = splits[row] or _split_of(file)
            for text in texts:
                entries.append(Entry(f"{readable_name(file)}#{row}", labels[row], text, split))
                rows.append((number, row))
    if not entries:
        raise UserError(f"{path} has no rows")
    return Listing(readable_name(path), entries, BytesReader(lambda index: groups.picture(*rows[index])), problems)


def _column(table: pa.Table, names: Sequence[str]) -> list[Any]:
    for name in names:
        if name in table.column_names:
            return table[name].to_pylist()
    return [None] * len(table)


def _texts(value: Any) -> list[str | None]:
    if isinstance(value, list):
        return [str(one).strip() for one in value if str(one).strip()] or [None]
    return [str(value).strip() or None] if value is not None else [None]


def _label(value: Any, names: list[str] | None, file: Path) -> str | None:
    if value is None or value == -1:  # Hugging Face's mark for a hidden label
        return None
    if isinstance(value, int) and names is not None:
        if not 0 <= value < len(names):
            raise UserError(f"{file}: label {value} has no name", expected=f"0 to {len(names) - 1}")
        return names[value]
    return str(value)


def _class_names(schema: pa.Schema) -> list[str] | None:
    """Names of whole-number labels, which Hugging Face keeps in the metadata of the schema."""
    text = (schema.metadata or {}).get(b"huggingface")
    if text is None:
        return None
    features = json.loads(text).get("info", {}).get("features", {})
    for name in _LABELS:
        if "names" in features.get(name, {}):
            return [str(one) for one in features[name]["names"]]
    return None


def _split_of(file: Path) -> str | None:
    """``train-00000-of-00001.parquet`` and ``train/0000.parquet`` say their split."""
    for word in (file.stem.split("-")[0].split("_")[0].lower(), file.parent.name.lower()):
        if word in SPLITS:
            return word
    return None


class _RowGroups:
    """Random access to the pictures of Parquet files; a few row groups are kept."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._open: dict[int, pq.ParquetFile] = {}
        self._starts: dict[int, np.ndarray] = {}
        self._cache: OrderedDict[tuple[int, int], pa.ChunkedArray] = OrderedDict()
        self._lock = threading.Lock()

    def _file(self, number: int) -> pq.ParquetFile:
        if number not in self._open:
            try:
                file = pq.ParquetFile(self._files[number], memory_map=True)
            except (pa.ArrowInvalid, OSError) as error:
                raise UserError(f"{self._files[number]} is not a Parquet file", found=str(error)) from error
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            self._open[number], self._starts[number] = file, np.concatenate([[0], np.cumsum(sizes)])
        return self._open[number]

    def schema(self, number: int) -> pa.Schema:
        """Columns of a file, with their metadata."""
        return self._file(number).schema_arrow

    def describe(self, number: int) -> pa.Table:
        """Everything but the pictures."""
        self._picture_column(number)  # a table without pictures is refused before it is read
        wanted = [name for name in self.schema(number).names if name in (*_LABELS, *_CAPTIONS, "split")]
        table = self._file(number).read(columns=wanted)
        if not wanted:  # a table without columns would have no rows either
            table = pa.table({"row": np.arange(self._file(number).metadata.num_rows)})
        return table

    def _picture_column(self, number: int) -> str:
        schema = self.schema(number)
        for field in [schema.field(name) for name in sorted(schema.names, key=lambda name: name != "image")]:
            is_struct = pa.types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0
            if is_struct or pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type):
                return field.name
        raise UserError(
            f"{self._files[number]} holds no pictures",
            expected="a column of bytes, or of {bytes, path} as Hugging Face writes it",
            found=", ".join(f"{field.name}: {field.type}" for field in schema),
        )

    def picture(self, number: int, row: int) -> bytes:
        """The encoded picture of one row."""
        with self._lock:
            file = self._file(number)
            group = int(np.searchsorted(self._starts[number], row, "right")) - 1
            if (number, group) not in self._cache:
                name = self._picture_column(number)
                self._cache[number, group] = file.read_row_group(group, columns=[name])[name]
                if len(self._cache) > _CACHED_GROUPS:
                    self._cache.popitem(last=False)
            self._cache.move_to_end((number, group))
            value = self._cache[number, group][row - int(self._starts[number][group])].as_py()
        content = value.get("bytes") if isinstance(value, dict) else value
        if content is None and isinstance(value, dict) and value.get("path"):
            return (self._files[number].parent / str(value["path"])).read_bytes()
        if content is None:
            raise BadImage("the row has no picture")
        return bytes(content)
