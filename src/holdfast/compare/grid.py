"""A STUDY.toml and the jobs it stands for: methods x columns x settings x seeds."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from holdfast.config import RoundConfig, TuneConfig, parse, read_toml
from holdfast.config.base import Config, Fraction, Many, NonNegative, Positive
from holdfast.config.method import split_file
from holdfast.errors import UserError, nearest
from holdfast.files import fingerprint_json
from holdfast.methods.registry import known_names, short_name

WISE_FT = "wise_ft"
UNTRAINED = ("refit", "last_layer")  # methods that make no steps
LEDGER = "ledger"  # of a job, in its folder
_LAMBDA = "lambda"
_NUMBERS_NOBODY_SEES = ("log_every", "checkpoint_every", "keep_checkpoints", "device")  # of [train]


class MethodEntry(Config):
    """[[methods]]: one row of the tables."""

    name: str
    """A method (holdfast, finetune, flyp, wccl, gem, co2l, der, rm, or a Python file), or wise_ft."""
    label: str = ""
    """How the tables call it. Default: its name, of a file without folder and ending."""
    set: dict[str, Any] = Field(default_factory=dict)
    """Settings of this row; a key without a dot is the method's own ("alpha"), others are paths ("train.batch")."""
    grid: dict[str, Many[Any]] = Field(default_factory=dict)
    """Settings to choose among, on dev images: key -> values. It wins over the study's own grid."""
    of: str | None = None
    """wise_ft only: the label of the row whose results are interpolated with the old model."""
    lambdas: Many[Annotated[float, Field(gt=0, le=1)]] = (0.25, 0.5, 0.75)
    """wise_ft only: places between the old weights (0) and the new ones (1) to choose among."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.name == WISE_FT:
            if self.of is None or self.grid or self.set:
                raise ValueError("wise_ft takes of (a row's label) and lambdas, and no set or grid")
        elif split_file(self.name) is None and self.name not in (known := known_names()):
            raise ValueError(f"unknown method {self.name!r}: {nearest(self.name, [*known, WISE_FT])}")
        elif self.of is not None:
            raise ValueError("only wise_ft interpolates another row's results")
        for key, values in self.grid.items():
            if not values:
                raise ValueError(f"grid.{key} has no values")
        return self

    @property
    def title(self) -> str:
        """The row's label."""
        return self.label or short_name(self.name)


class ColumnConfig(Config):
    """[column]: what the columns of the tables differ in, where it is not the number of constraint images."""

    key: Annotated[str, Field(min_length=1)]
    """Path of the setting, for example "model.head_rank"."""
    values: Annotated[Many[Any], Field(min_length=1)]
    labels: Many[str] | None = None
    """Default: the values themselves."""

    @model_validator(mode="after")
    def _labelled(self) -> Self:
        if self.labels is not None and len(self.labels) != len(self.values):
            raise ValueError(f"{len(self.labels)} labels for {len(self.values)} values")
        return self


class StudyConfig(Config):
    """A STUDY.toml: methods on the same data, budget and rule of choice.

    A file may begin with ``extends = "NAME"``, another study that it gives the differences to;
    ``unset = ["round.train.flip"]`` takes keys of that study away.
    """

    title: str = ""
    seeds: Annotated[Many[NonNegative], Field(min_length=1)] = (0, 1, 2, 3, 4)
    sizes: Many[Positive] = ()
    """Constraint images a protected task: the columns of the tables. Default: one column, all images."""
    column: ColumnConfig | None = None
    """Other columns than sizes."""
    grid: dict[str, Many[Any]] = Field(default_factory=dict)
    """Settings that every method chooses among."""
    round: dict[str, Any]
    """What all jobs share: a ROUND.toml without its method and seed."""
    base: TuneConfig | None = None
    """A base model to make first, as `holdfast tune` does; every job starts from it."""
    after: str | None = None
    """Another study (a file, or a ready study's name) that runs first; jobs start from the model that it chose for the
    row and column of the same label."""
    result: Literal["checkpoint", "shipped"] = "checkpoint"
    """What a job stands for: its best checkpoint by the rule of choice, safe or not; or what `develop` hands back:
    interpolated, refitted, biased and certified, or the old model."""
    tolerances: Many[Fraction] = ()
    """Points of the frontier: how much accuracy a protected class may lose on dev images, such as [0.0, 0.01, 0.02].
    Each job scores on test images what gains most within each of them: its checkpoints as they were trained and, where
    it ships, its candidates. Checkpoints beyond evaluate.keep_candidates have no weights and take no part."""
    keep_models: bool = True
    """Whether each job keeps the model that it hands back. Without, a study of what ships leaves figures alone: no
    other study can start from it, and no run of it be diagnosed."""
    epoch: Positive | None = None
    """Steps that the figures call an epoch. Default: they count steps."""
    methods: Annotated[Many[MethodEntry], Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.sizes and self.column:
            raise ValueError("give either sizes or [column], not both")
        labels = [entry.title for entry in self.methods]
        repeatable = (("seeds", self.seeds), ("sizes", self.sizes), ("tolerances", self.tolerances))
        for what, values in (("methods", labels), *((what, map(str, given)) for what, given in repeatable)):
            named = list(values)
            twice = sorted({item for item in named if named.count(item) > 1})
            if twice:
                raise ValueError(f"{', '.join(twice)}: twice under {what}; rows of one method need labels of their own")
        trained = {entry.title for entry in self.methods if entry.name != WISE_FT}
        for entry in self.methods:
            if entry.of is not None and entry.of not in trained:
                raise ValueError(f"{entry.title}: no row {entry.of!r} to interpolate: {nearest(entry.of, trained)}")
        for key in ("method", "seed"):
            if key in self.round:
                raise ValueError(f"round.{key} belongs to [[methods]] and seeds")
        if self.result == "shipped" and any(entry.name == WISE_FT for entry in self.methods):
            raise ValueError("what ships is interpolated already: wise_ft belongs to studies of checkpoints")
        if self.tolerances and any(entry.name == WISE_FT for entry in self.methods):
            raise ValueError(
                "wise_ft has no checkpoints of its own for a frontier: give the row that it interpolates "
                "`candidates.refit_target = false` and `candidates.target_bias = [0.0]` in a study of what ships"
            )
        if not self.keep_models and self.result != "shipped":
            raise ValueError("keep_models = false: what is chosen among checkpoints is scored later, from its weights")
        if self.after and self.base:
            raise ValueError("a study starts from a base of its own or from another study's choice, not both")
        return self

    @property
    def columns(self) -> tuple[tuple[str, str, Any], ...]:
        """(label, key, value) of each column; one without a key where there is nothing to vary."""
        if self.column is not None:
            labels = self.column.labels or tuple(show(value) for value in self.column.values)
            return tuple(
                (label, self.column.key, value) for label, value in zip(labels, self.column.values, strict=True)
            )
        return tuple((show(size), "data.constraint_images", size) for size in self.sizes) or (("all", "", None),)


@dataclass(frozen=True)
class Job:
    """One run: a row, a column, a setting, a seed."""

    row: str
    column: str
    setting: tuple[tuple[str, Any], ...]
    seed: int
    config: RoundConfig
    folder: Path
    root: Path  # what relative paths of the config start from
    keep_last: bool = False  # another row interpolates the run's last weights
    parent: Path | None = None  # wise_ft: the job whose last weights are interpolated
    position: float = 1.0  # wise_ft: lambda
    result: Literal["checkpoint", "shipped"] = "checkpoint"  # what the job stands for in the tables
    tolerances: tuple[float, ...] = ()  # points of the frontier
    keep_model: bool = True  # that the job hands back

    @property
    def setting_text(self) -> str:
        """``alpha=0.5 learning_rate=1e-05``."""
        return setting_text(self.setting)

    @property
    def name(self) -> str:
        """For people."""
        return " · ".join(part for part in (self.row, self.column, self.setting_text, f"seed {self.seed}") if part)


@dataclass(frozen=True)
class Study:
    """A study as read: its config, its name, and where its relative paths start."""

    name: str
    config: StudyConfig
    root: Path
    file: Path

    @property
    def target(self) -> str:
        """The class to improve."""
        task = self.config.round.get("task")
        return str(task.get("target", "target")) if isinstance(task, Mapping) else "target"


def ready_studies() -> dict[str, Path]:
    """Studies that come with holdfast, by name."""
    folder = Path(__file__).parent / "studies"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def read_study(given: str | Path, root: Path | None = None) -> Study:
    """A study from a file, or a ready one by its name; a ready one's paths start from the current folder."""
    path, ready = Path(given), ready_studies()
    if path.suffix != ".toml" and str(given) in ready:
        file, start = ready[str(given)], Path.cwd()
    elif path.exists():
        file, start = path, path.parent
    else:
        known = nearest(str(given), ready)
        raise UserError(f"there is no study {str(given)!r}", expected="a STUDY.toml or a ready study's name", do=known)
    config = parse(StudyConfig, _read_extended(file, ()), str(file))
    return Study(file.stem, config, (root or start).resolve(), file)


def _read_extended(file: Path, seen: tuple[Path, ...]) -> dict[str, Any]:
    """The file's values over those of the study that it extends, where it does."""
    values = read_toml(file)
    other, unset = values.pop("extends", None), values.pop("unset", [])
    if not isinstance(unset, list) or not all(isinstance(key, str) for key in unset):
        expected = 'a list of keys, such as ["round.train.flip"]'
        raise UserError(f"{file}: unset is no list of keys", expected=expected, found=repr(unset)[:200])
    if other is None:
        if unset:
            raise UserError(f"{file}: unset without extends", do="say which study it takes keys away from")
        return values
    if file in seen:
        raise UserError(f"{file} extends itself", found=" -> ".join(path.name for path in (*seen, file)))
    beside = file.parent / str(other)
    found = beside if beside.is_file() else ready_studies().get(str(other))
    if found is None:
        raise UserError(f"{file}: there is no study {str(other)!r} to extend", do=nearest(str(other), ready_studies()))
    below = _read_extended(found, (*seen, file))
    for key in unset:
        below = _without(below, key, f"{file}: unset: {other} has no key {key!r}")
    return _merged(below, values)


def _without(values: dict[str, Any], key: str, missing: str) -> dict[str, Any]:
    """The table without a key, given by its path; a part of the path may have dots of its own ("train.batch")."""
    if key in values:
        return {name: value for name, value in values.items() if name != key}
    for name, value in values.items():
        if isinstance(value, dict) and key.startswith(f"{name}."):
            return {**values, name: _without(value, key.removeprefix(f"{name}."), missing)}
    raise UserError(missing, do=nearest(key.split(".", maxsplit=1)[0], values))


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Tables are merged key by key, [[methods]] and everything else replaced. Sizes and [column] exclude each other."""
    kept = {key: value for key, value in below.items() if not (key == "sizes" and "column" in above)}
    both = {
        key: _merged(kept[key], value) if isinstance(value, dict) and isinstance(kept.get(key), dict) else value
        for key, value in above.items()
    }
    return {**kept, **both}


def before(study: Study, out: Path) -> tuple[Study, Path] | None:
    """The study that runs first, and its folder, where there is one."""
    if study.config.after is None:
        return None
    beside = study.file.parent / study.config.after
    first = read_study(beside if beside.exists() else study.config.after, study.root)
    if not first.config.keep_models:
        raise UserError(
            f"{study.name} starts from what {first.name} chose, which keeps no models",
            do=f"leave `keep_models = false` out of {first.file.name}",
        )
    return first, out.parent / f"{out.name}-{first.name}"


def plan_all(study: Study, out: Path) -> list[Job]:
    """Every job of the study, and of the one that runs before it. Reads no images."""
    first = before(study, out)
    return [*(plan_all(*first) if first else []), *plan(study, out)]


def plan(study: Study, out: Path, start: Mapping[tuple[str, str], Path] | None = None) -> list[Job]:
    """Every job, in the order of the tables. ``start`` gives the model to start from, by row and column, of `after`."""
    config, jobs = study.config, list[Job]()
    interpolated = {entry.of for entry in config.methods if entry.of is not None}
    trained: dict[str, MethodEntry] = {entry.title: entry for entry in config.methods}
    for entry in config.methods:
        source = trained[entry.of] if entry.of is not None else entry
        for column, setting, values in rounds_of(study, source, out, start):
            for job in _seeds(study, out, source, column, setting, values, source.title in interpolated):
                jobs.extend([job] if entry.name != WISE_FT else _interpolations(entry, job, out))
    return jobs


def rounds_of(
    study: Study, entry: MethodEntry, out: Path, start: Mapping[tuple[str, str], Path] | None = None
) -> Iterator[tuple[str, tuple[tuple[str, Any], ...], dict[str, Any]]]:
    """Column, setting and the values of a round, not yet parsed, for each of a row's settings in each column."""
    for (column, key, value), setting in product(study.config.columns, _settings(study.config, entry)):
        model = start.get((entry.title, column)) if start is not None else None
        yield column, setting, _round_values(study, entry, setting, key, value, model, out)


def _settings(config: StudyConfig, entry: MethodEntry) -> Iterator[tuple[tuple[str, Any], ...]]:
    """The grid's points, as (full key, value) pairs; what a row sets itself is no longer varied."""
    own = {_full(key): values for key, values in entry.grid.items()}
    fixed = {_full(key) for key in entry.set}
    grid = {key: values for key, values in {**config.grid, **own}.items() if key in own or key not in fixed}
    yield from (tuple(zip(grid, point, strict=True)) for point in product(*grid.values()))


def _full(key: str) -> str:
    return key if "." in key or key == "seed" else f"method.{key}"


def _round_values(
    study: Study,
    entry: MethodEntry,
    setting: tuple[tuple[str, Any], ...],
    key: str,
    value: Any,
    model: Path | None,
    out: Path,
) -> dict[str, Any]:
    values: dict[str, Any] = copy.deepcopy(study.config.round)
    values["method"] = {"name": entry.name}
    if study.config.base is not None:
        _put(values, "model.start", str(base_folder(out) / "model"))
    elif study.config.after is not None:
        _put(values, "model.start", str(model) if model is not None else f"what {study.config.after} chose")
    if key:
        _put(values, key, value)
    for name, item in (*((_full(name), item) for name, item in entry.set.items()), *setting):
        _put(values, name, item)
    return values


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UserError(f"{key!r} leads through {part!r}, which is no table")
    values[last] = value


def _seeds(
    study: Study,
    out: Path,
    entry: MethodEntry,
    column: str,
    setting: tuple[tuple[str, Any], ...],
    values: dict[str, Any],
    keep_last: bool,
) -> Iterator[Job]:
    """The setting's jobs, one a seed; the setting is checked once."""
    where = f"{study.file}: {entry.title}, {column}, {setting_text(setting) or 'no grid'}"
    config = parse(RoundConfig, values, where, study.root)
    key = _key(study, config)
    for seed in study.config.seeds:
        own = config.model_copy(update={"seed": seed})
        folder = job_folder(out, entry.title, column, setting, seed, key)
        result = study.config.result
        if (
            result == "shipped"
        ):  # every job queries the sealed images in a ledger of its own: it measures, ships nothing
            own = own.model_copy(update={"certify": own.certify.model_copy(update={"ledger": folder / LEDGER})})
        common = (entry.title, column, setting, seed, own, folder, study.root, keep_last)
        kept = study.config.keep_models
        yield Job(*common, result=result, tolerances=study.config.tolerances, keep_model=kept)


def _key(study: Study, config: RoundConfig) -> str:
    """What makes a job another job: a study that is changed gets new folders, and never mixes old results in.

    It is made of what the study says, not of defaults: a later version's new option leaves finished jobs finished.
    """
    values = config.model_dump(mode="json", exclude_unset=True)
    train = values.get("train", {})
    values["train"] = {name: value for name, value in train.items() if name not in _NUMBERS_NOBODY_SEES}
    if study.config.base is not None:  # the base by what it is made of, not by the folder it lies in
        values["model"]["start"] = fingerprint_json(study.config.base.model_dump(mode="json", exclude_unset=True))
    if study.config.result != "checkpoint":
        values["result"] = study.config.result
    if study.config.tolerances:
        values["tolerances"] = list(study.config.tolerances)
    return fingerprint_json(values).removeprefix("sha256:")[:8]


def job_folder(out: Path, row: str, column: str, setting: tuple[tuple[str, Any], ...], seed: int, key: str) -> Path:
    """Where a job's files are."""
    settings = _slug(setting_text(setting)) or "default"
    return out / "jobs" / _slug(row) / _slug(column) / settings / f"seed-{seed}-{key}"


def _interpolations(entry: MethodEntry, job: Job, out: Path) -> Iterator[Job]:
    for position in entry.lambdas:
        setting = (*job.setting, (_LAMBDA, position))
        key = job.folder.name.rsplit("-", 1)[1]
        folder = job_folder(out, entry.title, job.column, setting, job.seed, key)
        row = replace(job, row=entry.title, setting=setting, folder=folder, keep_last=False)
        yield replace(row, parent=job.folder, position=position)


def base_folder(out: Path) -> Path:
    """Where the study's base model is made."""
    return out / "base"


def setting_text(setting: tuple[tuple[str, Any], ...]) -> str:
    """``alpha=0.5 learning_rate=1e-05``: the last part of each key, the whole of it where two would be alike."""
    short = [key.rsplit(".", 1)[-1] for key, _ in setting]
    names = [item if short.count(item) == 1 else key for item, (key, _) in zip(short, setting, strict=True)]
    return " ".join(f"{name}={show(value)}" for name, (_, value) in zip(names, setting, strict=True))


def show(value: Any) -> str:
    """A value as the tables write it: 1000 is 1k, 0.000001 is 1e-06."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) and value >= 1000 and value % 1000 == 0:
        return f"{value // 1000}k"
    return f"{value:g}"


def _slug(text: str) -> str:
    return re.sub(r"[^\w.=+-]+", "_", text).strip("_")[:120]
