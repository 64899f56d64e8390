"""The reference pages that follow from the code: settings, commands, former names of settings.

``python tools/reference.py`` writes docs/reference/{configuration,command-line,renamed}.md from the config classes, the
command line and the table of renamed settings. ``--check`` fails where a page is not what it would be written as.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any

import typer.main

from holdfast.cli import app
from holdfast.config import Config, RoundConfig, TuneConfig
from holdfast.config.renamed import (
    _MOVED,  # pyright: ignore[reportPrivateUsage]
    _MOVED_OF_HOLDFAST,  # pyright: ignore[reportPrivateUsage]
    REMOVED_OPTIONS,
    current,
)
from holdfast.methods.registry import BUILT_IN, find

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "docs" / "reference"
WRITTEN = "<!-- Written by `python tools/reference.py`. Do not edit by hand. -->"
# What pydantic writes for limits of a number, in the order in which they are shown.
LIMITS = {"exclusiveMinimum": "above", "minimum": "from", "exclusiveMaximum": "below", "maximum": "to"}
NO_LIMIT = 1e15  # a bound as large as this only keeps numbers representable


def cell(text: str) -> str:
    """Text for one cell of a table: on one line, with bars that do not end the cell."""
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")


def prose(text: str) -> str:
    """A docstring as Markdown: double backticks become single ones, former names today's."""
    text = text.replace("``", "`")
    return re.sub(r"\b(?:method|certify|train)\.[a-z_]+", lambda found: current(found[0]), text)


# -- settings ------------------------------------------------------------------------------------------------------


def resolve(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """A schema with its reference, if it is one, looked up."""
    if "$ref" in schema:
        return definitions[schema["$ref"].rpartition("/")[2]]
    return schema


def values(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """What a setting may be, in words: ``whole number from 0``, ``"a"``, ``"b"``, a list of them."""
    found = resolve(schema, definitions)
    choices = found.get("anyOf") or found.get("oneOf")
    if choices:
        return " or ".join(dict.fromkeys(filter(None, (values(item, definitions) for item in choices))))
    named = [found["const"]] if "const" in found else found.get("enum")
    if named:
        return ", ".join(f"`{json.dumps(item)}`" for item in named)
    if found["type"] == "array":
        return f"list of {values(found.get('items') or found['prefixItems'][0], definitions)}"
    return table(found, definitions) if found["type"] == "object" else scalar(found)


def table(found: dict[str, Any], definitions: dict[str, Any]) -> str:
    """A section, or names with a value each."""
    if "properties" in found:
        return f"table ({found['title'].removesuffix('Config').lower()})"
    return f"table: name = {values(found['additionalProperties'], definitions)}"


def scalar(found: dict[str, Any]) -> str:
    """A single value with its limits."""
    names = {"integer": "whole number", "number": "number", "boolean": "`true`, `false`", "null": ""}
    names["string"] = "path" if found.get("format") == "path" else "string"
    limits = [f"{word} {found[key]:g}" for key, word in LIMITS.items() if abs(found.get(key, NO_LIMIT)) < NO_LIMIT]
    return " ".join([names[found["type"]], *limits]).strip()


def default(schema: dict[str, Any], required: bool) -> str:
    """The default as TOML would have it."""
    if required:
        return "required"
    value = schema.get("default")
    if value is None:
        return "not set" if "default" in schema else ""
    return f"`{value:.4g}`" if isinstance(value, float) else f"`{json.dumps(value)}`"


def section(model: type[Config], title: str, level: int = 2, skip: tuple[str, ...] = ()) -> list[str]:
    """A table of the settings of one section."""
    schema = model.model_json_schema()
    definitions = schema.get("$defs", {})
    intro = prose(inspect.cleandoc(model.__doc__ or "")).partition(": ")[2] or prose(model.__doc__ or "")
    lines = [f"{'#' * level} {title}", "", intro[:1].upper() + intro[1:], ""]
    lines += ["| setting | values | default | meaning |", "| --- | --- | --- | --- |"]
    for name, found in schema["properties"].items():
        if name in skip:
            continue
        meaning = cell(prose(model.meaning(name)))
        allowed = cell(values(found, definitions))
        lines.append(f"| `{name}` | {allowed} | {default(found, name in schema.get('required', ()))} | {meaning} |")
    return [*lines, ""]


def sections(model: type[Config]) -> dict[str, type[Config]]:
    """The sections of a file that are one config class each, by their name in TOML."""
    found = {name: field.annotation for name, field in model.model_fields.items()}
    return {name: kind for name, kind in found.items() if isinstance(kind, type) and issubclass(kind, Config)}


def configuration() -> str:
    """The page about every setting."""
    from holdfast.config import RolesConfig, SourceConfig
    from holdfast.methods.holdfast import ResearchConfig

    own = sections(RoundConfig)
    lines = ["# Configuration", "", WRITTEN, ""]
    lines += [
        "Every setting of `ROUND.toml` and `TUNE.toml`, with its default. A file holds only what differs from the",
        "defaults. An unknown key is an error that names the nearest known one. Paths are relative to the file.",
        "Settings of earlier versions: [Renamed settings](renamed.md).",
        "",
    ]
    lines += section(RoundConfig, "`ROUND.toml`: top level", skip=(*own, "method"))
    for name, kind in own.items():
        lines += section(kind, f"`[{name}]`", skip=("roles",))
        if name == "data":
            lines += section(RolesConfig, "`[data.roles]`", 3)
            lines += section(SourceConfig, "A source", 3)
    lines += ["## `[method]`", "", "`name` chooses the method. Each has settings of its own.", ""]
    for name, kind in ((name, find(name).settings) for name in BUILT_IN):
        lines += section(kind, f'`name = "{name}"`', 3, skip=("name", "research"))
        if name == "holdfast":
            lines += section(ResearchConfig, "`[method.research]`", 3)
    lines += section(TuneConfig, "`TUNE.toml`: top level", skip=tuple(sections(TuneConfig)))
    lines += ["`[data]`, `[model]`, `[train]` and `[evaluate]` are those of a round.", ""]
    return "\n".join(lines).rstrip() + "\n"


# -- commands ------------------------------------------------------------------------------------------------------


def shown_default(parameter: Any) -> str:
    """The default of an option, where it says something."""
    value = parameter.default
    if value is None or isinstance(value, bool) or value in ((), []) or callable(value):
        return ""
    return f"`{value}`"


def command(path: list[str], found: Any) -> list[str]:
    """One command: what it does, its arguments and its options."""
    lines = [f"## `{' '.join(path)}`", "", prose(inspect.cleandoc(found.help or "")), ""]
    rows: list[str] = []
    for parameter in found.params:
        help_text = cell(prose(getattr(parameter, "help", None) or ""))
        if parameter.param_type_name == "argument":
            rows.append(f"| `{(parameter.metavar or parameter.name).strip('[]')}` | | {help_text} |")
        elif "--help" not in parameter.opts and not parameter.hidden:
            names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
            rows.append(f"| {names} | {shown_default(parameter)} | {help_text} |")
    if rows:
        lines += ["| argument, option | default | meaning |", "| --- | --- | --- |", *rows, ""]
    return lines


def command_line() -> str:
    """The page about every command."""
    lines = ["# Command line", "", WRITTEN, ""]
    lines += [
        "`holdfast COMMAND --help` prints the same. Every command ends with one of these exit codes:",
        "",
        "| exit code | meaning |",
        "| --- | --- |",
        "| 0 | done; where a verdict was asked for: certified |",
        "| 1 | a failure of holdfast, or of a job of a study |",
        "| 2 | a mistake in the input; one sentence says what was expected |",
        "| 3 | a fault was found: regressed, a leak, a changed fingerprint |",
        "| 4 | undecided, or the old model was kept; of `verify`: nothing contradicts it, and not all was at hand |",
        "| 130, 143 | interrupted (SIGINT, SIGTERM) |",
        "",
    ]
    group: Any = typer.main.get_command(app)
    for name, found in group.commands.items():
        nested = getattr(found, "commands", None)
        if nested is None:
            lines += command(["holdfast", name], found)
        else:
            for inner, item in nested.items():
                lines += command(["holdfast", name, inner], item)
    return "\n".join(lines).rstrip() + "\n"


# -- former names --------------------------------------------------------------------------------------------------


def renamed() -> str:
    """The page for files that were written for an earlier version."""
    lines = ["# Renamed settings", "", WRITTEN, ""]
    lines += [
        "Files of earlier versions are still read for one release, with a hint. Change them as this table says.",
        "",
        "| former | now |",
        "| --- | --- |",
    ]
    lines += [f"| `{old}` | `{new}` |" for old, new in _MOVED.items()]
    lines += [f"| `{old}` (method `holdfast`) | `{new}` |" for old, new in _MOVED_OF_HOLDFAST.items()]
    lines += ["| `train.towers`, `train.compile`, `train.graphs` | `train.speed` |"]
    lines += ["", "Options that are gone are refused with a sentence:", "", "| option | today |", "| --- | --- |"]
    lines += [f"| `holdfast {command} {option}` | {today} |" for (command, option), today in REMOVED_OPTIONS.items()]
    return "\n".join(lines) + "\n"


PAGES = {"configuration.md": configuration, "command-line.md": command_line, "renamed.md": renamed}


def main() -> int:
    """Write the pages, or with ``--check`` compare them."""
    stale: list[str] = []
    for name, make in PAGES.items():
        path, text = OUT / name, make()
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(f"docs/reference/{name}")
    if stale:
        print(f"{', '.join(stale)}: not up to date; run python tools/reference.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
