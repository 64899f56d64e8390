"""Configuration: one small frozen model a stage, read from strict TOML.

An unknown key is an error that names the nearest known one; contradictions are found before anything is trained.
Defaults live here and nowhere else; a ROUND.toml holds only the differences.
"""

from __future__ import annotations

import tomllib
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from holdfast.errors import UserError, nearest

Positive = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Share = Annotated[int, Field(ge=1)] | Fraction  # a whole number from 1 is a count, a number from 0.0 to 1.0 a fraction
MovingAverage = Annotated[float, Field(gt=0, le=1)]


class Config(BaseModel):
    """Frozen, strict base of every section."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, use_attribute_docstrings=True)


class TaskConfig(Config):
    """[task]: what is to improve, and what must not get worse."""

    target: str
    """The weak class."""
    protected: tuple[str, ...] | None = None
    """Classes that must not lose accuracy. Default: every class of the data but the target and the ignored."""
    ignored: tuple[str, ...] = ()
    """Classes left alone: they take no part, neither in the softmax nor in the certificate."""
    template: str | tuple[str, ...] = "a photo of a {}"
    """Sentence(s) that {} is replaced in by the class's words."""
    names: dict[str, str] = Field(default_factory=dict)
    """Class -> the words to use for it in a sentence. Default: the class's name with _ read as a space."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        protected = self.protected or ()
        if self.target in protected:
            raise ValueError(f"the target {self.target!r} is listed as protected: a class is one or the other")
        both = sorted(set(self.ignored) & {self.target, *protected})
        if both:
            raise ValueError(f"{', '.join(both)}: ignored, and at the same time target or protected")
        for field, values in (("protected", protected), ("ignored", self.ignored)):
            twice = sorted({name for name in values if values.count(name) > 1})
            if twice:
                raise ValueError(f"{', '.join(twice)}: listed twice under {field}")
        for template in self.templates:
            if template.count("{}") != 1:
                raise ValueError(f"the template {template!r} must contain the placeholder {{}} exactly once")
        return self

    @property
    def templates(self) -> tuple[str, ...]:
        """The templates as a tuple."""
        return (self.template,) if isinstance(self.template, str) else self.template


class SourceConfig(Config):
    """One source of examples. ``kind`` says how ``path`` is read."""

    kind: Literal["folder", "csv", "digits", "bdd100k", "places365", "parquet", "webdataset", "pack"] = "folder"
    """folder: [split/]class/picture; csv: columns filepath,title[,label][,split] (tabs too); digits: embedded, no path;
    bdd100k, places365: the official layouts; parquet: image bytes as Hugging Face stores them; webdataset: tar shards;
    pack: a store written by `holdfast pack`."""
    path: Path | None = None
    """Folder or file, or a glob of them, relative to the TOML file. Not used by `digits`."""
    classes: dict[str, str] = Field(default_factory=dict)
    """Class of the source -> class of the round; renames and merges."""
    splits: tuple[str, ...] | None = None
    """Splits of the source to take, by the source's own names. Default: all of them."""
    attribute: Literal["weather", "scene", "timeofday"] = "weather"
    """bdd100k only: the attribute that is the class."""
    pooled: tuple[str, ...] = ()
    """bdd100k only: classes whose official train and validation images are pooled and split 40/30/30."""

    @model_validator(mode="after")
    def _has_path(self) -> Self:
        if self.kind != "digits" and self.path is None:
            raise ValueError(f"a source of kind {self.kind!r} needs a path")
        return self


class RolesConfig(Config):
    """[data.roles]: how examples without a split of their own are shared out, by content hash.

    Fractions (0.2) are of each class; the rest is `constraint`. Whole numbers (300) are images a class, picked by the
    rank of their hash: exact, but not stable when images are added, as fractions are. A source's own splits win: `test`
    is test, `val`/`dev` is dev, `base`, `constraint` and `sealed` are themselves, `train` (or none) is shared out, among
    the roles that the source does not fill itself.
    """

    base: Share = 0.0
    dev: Share = 0.2
    sealed: Share = 0.2
    test: Share = 0.2

    @model_validator(mode="after")
    def _leaves_something(self) -> Self:
        shares = (self.base, self.dev, self.sealed, self.test)
        used = sum(share for share in shares if isinstance(share, float))
        if used >= 1:
            raise ValueError(f"base + dev + sealed + test = {used:g} leaves nothing to train on; it must be below 1")
        return self


class DataConfig(Config):
    """[data]: where examples come from and what they serve as."""

    source: SourceConfig | tuple[SourceConfig, ...]
    """The labelled images of all classes."""
    pairs: tuple[SourceConfig, ...] = ()
    """Further image-text pairs of the target (captions; no label needed)."""
    negatives: SourceConfig | tuple[SourceConfig, ...] | None = None
    """Pairs (or plain pictures) to contrast with. Default: the protected classes with their prompts."""
    roles: RolesConfig = RolesConfig()
    constraint_images: Positive | None = None
    """Constraint images a protected task, drawn by seed. Default: all there are."""
    target_images: Positive | None = None
    """Target images of the labelled source, drawn by seed. Default: all there are."""
    prompts: Path | None = None
    """File with the sentences of each class (JSON or TOML: class = "sentence" or ["…", "…"]); they win over [task]'s."""
    bad_image_limit: Fraction = 0.01
    """Share of unreadable pictures that is skipped (counted and named) before it becomes an error."""

    @property
    def sources(self) -> tuple[SourceConfig, ...]:
        """Labelled sources as a tuple."""
        return self.source if isinstance(self.source, tuple) else (self.source,)

    @property
    def negative_sources(self) -> tuple[SourceConfig, ...]:
        """Sources of negatives as a tuple, empty by default."""
        if self.negatives is None:
            return ()
        return self.negatives if isinstance(self.negatives, tuple) else (self.negatives,)


Section = TypeVar("Section", bound=Config)


def read_toml(path: Path) -> dict[str, Any]:
    """Parse TOML; a missing or malformed file is a :class:`UserError`."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist", do="write one with `holdfast init`") from error
    except (IsADirectoryError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a TOML file", found=str(error)) from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML", found=str(error)) from error


def parse(model: type[Section], values: dict[str, Any], where: str) -> Section:
    """Validate ``values`` as ``model``; the first fault becomes a :class:`UserError` that names key and remedy."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _explain(model, error, where) from None


def _explain(model: type[Config], error: ValidationError, where: str) -> UserError:
    faults = error.errors()
    # An unknown key explains other faults (a required key that was misspelt), so it comes first.
    fault = next((one for one in faults if one["type"] == "extra_forbidden"), faults[0])
    location = [str(part) for part in fault["loc"] if not _is_union_tag(part)]
    key = ".".join(location)
    if fault["type"] == "extra_forbidden":
        section = _section_at(model, location[:-1])
        known = section.model_fields if section is not None else {}
        return UserError(f"{where}: unknown key {key!r}", do=nearest(location[-1], known))
    if fault["type"] == "missing":
        return UserError(f"{where}: the key {key!r} is missing", do=_describe(model, location))
    message = fault["msg"].removeprefix("Value error, ")
    found = "" if fault["type"] == "value_error" else repr(fault["input"])
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return UserError(f"{where}: {key + ': ' if key else ''}{message}{more}", found=found)


def _is_union_tag(part: int | str) -> bool:
    return isinstance(part, str) and (part.startswith(("tuple[", "function-")) or part.endswith("Config"))


def _section_at(model: type[Config], location: list[str]) -> type[Config] | None:
    """The section a key path leads into, through optional and tuple types."""
    section: type[Config] | None = model
    for name in location:
        if name.isdigit():
            continue
        if section is None or name not in section.model_fields:
            return None
        section = _config_in(section.model_fields[name].annotation)
    return section


def _config_in(annotation: Any) -> type[Config] | None:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return annotation
    if typing.get_origin(annotation) in (tuple, types.UnionType, typing.Union, Annotated):
        for argument in typing.get_args(annotation):
            found = _config_in(argument)
            if found is not None:
                return found
    return None


def _describe(model: type[Config], location: list[str]) -> str:
    section = _section_at(model, location[:-1])
    if section is None or location[-1] not in section.model_fields:
        return "add it"
    return f"add it: {section.model_fields[location[-1]].description or 'it has no default'}"
