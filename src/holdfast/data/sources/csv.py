"""Tables of pictures: CSV or TSV with ``filepath,title[,label][,split]``."""

from __future__ import annotations

import csv
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from holdfast.config import SourceConfig
from holdfast.data.catalogue import Entry, Listing, Problem
from holdfast.data.names import readable_name
from holdfast.data.sources.files import expand, group_cell, pictures_in
from holdfast.errors import UserError

_MAX_LINE = 1 << 20  # characters of a line of a table
_MAX_FIELD = 131_072  # what the csv module allows, unless some other library has raised its limit


def list_csv(config: SourceConfig, path: Path) -> Listing:
    """Tables with ``filepath,title[,label][,split]``; paths are relative to the table's folder."""
    files: list[Path] = []
    entries: list[Entry] = []
    problems: list[Problem] = []
    for table in expand(path):
        for number, row in _table_rows(table):
            if len(files) == config.first:
                break
            name = (row["filepath"] or "").strip()
            if not name:
                problems.append(Problem("row without a path", f"{table.name} line {number}"))
                continue
            files.append(table.parent / name)
            described = (_cell(row, name) for name in ("label", "title", "split"))
            group = None if config.group is None else group_cell(row.get(config.group), config.group, table, number)
            entries.append(Entry(readable_name(files[-1]), *described, group=group))
    if not files:
        raise UserError(f"{path} has no rows", expected="a line for every picture below the header")
    return Listing(readable_name(path), entries, pictures_in(files), problems)


def _cell(row: dict[str, str | None], column: str) -> str | None:
    return (row.get(column) or "").strip() or None


def _table_rows(path: Path) -> Iterator[tuple[int, dict[str, str | None]]]:
    columns = "filepath,title[,label][,split]"
    if not path.is_file():
        raise UserError(f"{path} is not a regular file", expected=f"a table with the columns {columns}")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline(_MAX_LINE)
            file.seek(0)
            separator = _separator(path, header)
            rows = csv.DictReader(_lines(file, path), delimiter=separator, skipinitialspace=True)
            found = [name.strip() for name in rows.fieldnames or ()]
            rows.fieldnames = found
            if "filepath" not in found or not {"title", "label"} & set(found):
                missing = "filepath" if "filepath" not in found else "title or label"
                raise UserError(
                    f"{path} has no column {missing}",
                    expected=columns,
                    found=", ".join(found)[:1000] or "an empty file",
                    do=_how_to_mend(missing, found),
                )
            for row in rows:
                if None in row:
                    raise UserError(
                        f"{path} line {rows.line_num} has more fields than the header",
                        do='put a title that contains the separator in double quotes ("…")',
                    )
                if max(len(value or "") for value in row.values()) > _MAX_FIELD:
                    raise csv.Error(f"field larger than field limit ({_MAX_FIELD})")
                yield rows.line_num, row
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text", found=str(error), do="save the table as UTF-8") from error
    except (csv.Error, OSError) as error:
        raise UserError(f"{path} cannot be read as a table", found=str(error)) from error


def _separator(path: Path, header: str) -> str:
    """A comma, a tab, or the semicolon that spreadsheets write where the comma is in numbers."""
    if path.suffix.lower() == ".tsv" or ("\t" in header and "," not in header):
        return "\t"
    return ";" if ";" in header and "," not in header else ","


def _how_to_mend(missing: str, found: list[str]) -> str:
    alike = difflib.get_close_matches(missing, found, n=1)
    if alike:
        return f"rename {alike[0]!r} to {missing!r}"
    return f"name the columns in the first line, {missing} among them" if found else ""


def _lines(file: IO[str], path: Path) -> Iterator[str]:
    """The lines of a table. One that holds a NUL, or never ends, is of no table and is not read on."""
    number = 0
    while line := file.readline(_MAX_LINE):
        number += 1
        if "\0" in line:
            raise UserError(
                f"{path} line {number} holds a NUL character", do="save the table as UTF-8 text, one line a picture"
            )
        if len(line) == _MAX_LINE:
            raise UserError(f"{path} line {number} is longer than {_MAX_LINE:,} characters")
        yield line
