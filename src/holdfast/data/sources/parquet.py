"""Parquet tables with image bytes, as Hugging Face stores data sets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from holdfast.config import SourceConfig
from holdfast.data.catalogue import BytesReader, Entry, Listing, Problem
from holdfast.data.containers import CAPTIONS, LABELS, RowGroups, parse_json
from holdfast.data.names import printable, readable_name
from holdfast.data.sources.files import container_files, group_cell, split_in_name
from holdfast.errors import UserError


def list_parquet(config: SourceConfig, path: Path) -> Listing:
    """Columns ``image`` (bytes, or a struct with bytes), ``label``, a caption column and ``split``, where present."""
    entries: list[Entry] = []
    problems: list[Problem] = []
    rows: list[tuple[int, int]] = []  # (file, row) of every entry; a picture with several captions has several
    found = container_files(path, ".parquet", problems)
    groups = RowGroups([file for file, _ in found], [root for _, root in found])
    for number, (file, _) in enumerate(found):
        columns, count = groups.describe(number, (config.group,) if config.group else ()), groups.rows(number)
        names = _class_names(groups.schema(number), file, problems)
        labels = [_label(value, names, file) for value in _column(columns, LABELS, count)]
        captions = [_captions(value, file) for value in _column(columns, CAPTIONS, count)]
        splits = [_split(value, file) for value in _column(columns, ("split",), count)]
        members = _column(columns, (config.group or "",), count)
        for row in range(count):
            split = splits[row] or split_in_name(file)
            group = None if config.group is None else group_cell(members[row], config.group, file, row)
            for caption in captions[row]:
                entries.append(Entry(f"{readable_name(file)}#{row}", labels[row], caption, split, group=group))
                rows.append((number, row))
    if not entries:
        raise UserError(f"{path} has no rows")
    return Listing(readable_name(path), entries, BytesReader(lambda index: groups.picture(*rows[index])), problems)


def _column(columns: dict[str, list[Any]], names: Sequence[str], count: int) -> list[Any]:
    return next((columns[name] for name in names if name in columns), [None] * count)


def _text(value: Any, what: str, file: Path) -> str | None:
    """A cell as text; None where it is empty (a missing number is "not a number" in tables that pandas wrote)."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{file}: a {what} is not UTF-8 text", found=str(error)) from error
    if isinstance(value, (list, tuple, dict)):
        raise UserError(
            f"{file}: a {what} is no text",
            expected=f"one {what} a row",
            found=repr(value)[:200],
            do="write the table again with such a column, or without this one",
        )
    return str(value).strip() or None


def _captions(value: Any, file: Path) -> list[str | None]:
    texts = [_text(text, "caption", file) for text in (value if isinstance(value, list) else [value])]
    return [text for text in texts if text is not None] or [None]


def _label(value: Any, names: list[str] | None, file: Path) -> str | None:
    if value is None or value == -1:  # Hugging Face's mark for a hidden label
        return None
    if isinstance(value, int) and names is not None:
        if not 0 <= value < len(names):
            raise UserError(f"{file}: label {value} has no name", expected=f"0 to {len(names) - 1}")
        return names[value]
    return _text(value, "label", file)


def _split(value: Any, file: Path) -> str | None:
    if not isinstance(value, (str, bytes, type(None))):
        raise UserError(
            f"{file}: the column split holds no names",
            expected="train, val, test, … or nothing",
            found=repr(value)[:200],
            do="write the names into it, or leave the column out",
        )
    return _text(value, "split", file)


def _class_names(schema: pa.Schema, file: Path, problems: list[Problem]) -> list[str] | None:
    """Names of whole-number labels, which Hugging Face keeps in the metadata of the schema."""
    text = (schema.metadata or {}).get(b"huggingface")
    if text is None:
        return None
    try:
        features = _inner(_inner(parse_json(text), "info"), "features")
        described = [_inner(features, name) for name in LABELS]
        named = [feature["names"] for feature in described if isinstance(feature, dict) and "names" in feature]
    except (ValueError, TypeError):
        named = [None]
    if not named:
        return None
    if not isinstance(named[0], list) or not all(isinstance(name, str) for name in named[0]):
        problems.append(Problem("unreadable metadata", readable_name(file), "whole-number labels keep their numbers"))
        return None
    return [printable(name) for name in named[0]]


def _inner(values: Any, key: str) -> Any:
    if not isinstance(values, dict):
        raise TypeError(f"no object with {key!r}")
    return values.get(key, {})
