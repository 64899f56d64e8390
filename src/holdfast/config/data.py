"""Sections about classes and examples."""

from __future__ import annotations

import re
from typing import Literal, Self

from pydantic import Field, model_validator

from holdfast.config.base import Config, FilePath, Fraction, Many, Positive, Share


def check_templates(templates: tuple[str, ...]) -> None:
    """At least one sentence, each with one place for the class's words."""
    if not templates:
        raise ValueError("template is empty: give at least one sentence with the placeholder {}")
    for template in templates:
        if template.count("{}") != 1:
            raise ValueError(f"the template {template!r} must contain the placeholder {{}} exactly once")


class TaskConfig(Config):
    """[task]: what is to improve, and what must not get worse."""

    target: str
    """The weak class."""
    protected: Many[str] | None = None
    """Classes that must not lose accuracy. Default: every class of the data but the target and the ignored."""
    ignored: Many[str] = ()
    """Classes left alone: they take no part, neither in the softmax nor in the certificate."""
    template: str | Many[str] = "a photo of a {}"
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
        check_templates(self.templates)
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
    path: FilePath | None = None
    """Folder or file, or a glob of them, relative to the TOML file. Not used by `digits`."""
    classes: dict[str, str] = Field(default_factory=dict)
    """Class of the source -> class of the round; renames and merges."""
    splits: Many[str] | None = None
    """Splits of the source to take, by the source's own names. Default: all of them."""
    first: Positive | None = None
    """csv only: take no more than the first so many rows. Default: all."""
    attribute: Literal["weather", "scene", "timeofday"] = "weather"
    """bdd100k only: the attribute that is the class."""
    group: str | None = None
    """What makes examples depend on each other, such as a video or a patient: in csv and parquet the column that names
    it, elsewhere a regular expression for the picture's path, whose first parenthesis is the group. A group has one
    role, and the certificate tests groups in place of images."""
    pooled: Many[str] = ()
    """bdd100k only: classes whose official train and validation images are pooled and split 40/30/30."""

    @model_validator(mode="after")
    def _has_path(self) -> Self:
        if self.kind != "digits" and self.path is None:
            raise ValueError(f"a source of kind {self.kind!r} needs a path")
        if self.first is not None and self.kind != "csv":
            raise ValueError(f"first is for a source of kind 'csv', whose rows have an order; this is {self.kind!r}")
        try:
            re.compile("" if self.kind in ("csv", "parquet") else self.group or "")
        except re.error as error:
            raise ValueError(f"group = {self.group!r} is no regular expression: {error}") from error
        return self


class ClassShares(Config):
    """Shares of one class; those left out are the general ones."""

    base: Share | None = None
    dev: Share | None = None
    sealed: Share | None = None
    test: Share | None = None


class RolesConfig(Config):
    """[data.roles]: how examples without a split of their own are shared out, by content hash.

    Fractions (0.2) are of each class; the rest is `constraint`. Whole numbers (300) are images a class, picked by the
    rank of their hash: exact, but not stable when images are added, as fractions are. A source's own splits win: `test`
    is test, `val`/`dev` is dev, `base`, `constraint` and `sealed` are themselves, `train` (or none) is shared out among
    the roles that the class's own splits do not fill.
    """

    base: Share = 0.0
    """Images that make the old model (`holdfast tune`)."""
    dev: Share = 0.2
    """Images that checkpoints and candidates are chosen on."""
    sealed: Share = 0.2
    """Images of the sealed set: only the certificate queries them."""
    test: Share = 0.2
    """Images that are scored once, when the round is over."""
    by_class: dict[str, ClassShares] = Field(default_factory=dict)
    """Class -> shares of its own, such as `horse = { sealed = 0.6, dev = 0.1 }`: a small class has to seal more of its
    images to prove the same margin."""

    @model_validator(mode="after")
    def _leaves_something(self) -> Self:
        for label in (None, *self.by_class):
            used = sum(share for share in self.shares_of(label).values() if isinstance(share, float))
            if used >= 1:
                of = "" if label is None else f"by_class.{label}: "
                raise ValueError(
                    f"{of}base + dev + sealed + test = {used:g} leaves nothing to train on; it must be below 1"
                )
        return self

    def shares_of(self, label: str | None) -> dict[str, int | float]:
        """Role -> share of a class; None for one that is not named."""
        general = {"base": self.base, "dev": self.dev, "sealed": self.sealed, "test": self.test}
        own = self.by_class.get(label) if label is not None else None
        return general if own is None else {**general, **own.model_dump(exclude_none=True)}


class DataConfig(Config):
    """[data]: where examples come from and what they serve as."""

    source: SourceConfig | Many[SourceConfig]
    """The labelled images of all classes."""
    pairs: Many[SourceConfig] = ()
    """Further image-text pairs of the target (captions; no label needed)."""
    negatives: SourceConfig | Many[SourceConfig] | None = None
    """Pairs (or plain pictures) to contrast with. Default: the protected classes with their prompts."""
    roles: RolesConfig = RolesConfig()
    constraint_images: Positive | None = None
    """Constraint images a protected task, drawn by seed. Default: all there are."""
    target_images: Positive | None = None
    """Target images of the labelled source, drawn by seed. Default: all there are."""
    prompts: FilePath | None = None
    """File with the sentences of each class (JSON or TOML: class = "sentence" or ["…", "…"]); it wins over [task]."""
    leaks: Literal["refuse", "drop", "allow"] = "refuse"
    """Near copies of sealed images among the training images: an error that names them, or left out of training (also
    near copies of dev and test images), or not looked for. Sealed near copies of each other are counted once and those
    of dev images not at all, unless they are not looked for. Exact copies are always left out."""
    bad_image_limit: Fraction = 0.01
    """Share of unreadable pictures that is skipped (counted and named) before it becomes an error."""

    @model_validator(mode="after")
    def _has_sources(self) -> Self:
        if self.source == ():
            raise ValueError("source is empty: name at least one source of labelled images")
        if self.negatives == ():
            raise ValueError("negatives is empty: name a source of them, or leave the key out")
        return self

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
