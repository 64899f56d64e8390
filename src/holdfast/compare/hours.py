"""How many GPU hours a study takes, from step times that were measured. No torch, no image is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.compare.grid import UNTRAINED, WISE_FT, MethodEntry, Study, before, rounds_of
from holdfast.config import TrainConfig

MACHINE = "NVIDIA H200"


@dataclass(frozen=True)
class Measured:
    """A step of the published form as `benchmarks/step.py` measured it (benchmarks/results/step.json)."""

    architecture: str
    images: int  # pictures of a step: pairs, negatives and constraint images
    milliseconds: float


MEASURED = {
    "bdd100k": Measured("ViT-B-16", 306, 64.93),
    "places365": Measured("ViT-B-16", 544, 103.65),
}


@dataclass(frozen=True)
class Estimate:
    """Jobs and steps of a study, with those that run before it, and what they take."""

    jobs: int
    steps: int
    hours: float | None  # None: no step of its model was measured

    def __add__(self, other: Estimate) -> Estimate:
        hours = None if self.hours is None or other.hours is None else self.hours + other.hours
        return Estimate(self.jobs + other.jobs, self.steps + other.steps, hours)

    @property
    def text(self) -> str:
        """For people."""
        return "not measured" if self.hours is None else f"{self.hours:,.0f} GPU hours"


def estimate(study: Study, step_milliseconds: float | None = None) -> Estimate:
    """Training alone, every method at the rate of ours in the paper's form: evaluations and decoding are not counted.

    A step's time is that of the measured shape whose number of pictures comes closest, in proportion to the pictures.
    ``step_milliseconds`` stands in for what was measured, for every step alike (`holdfast bench ROUND.toml`).
    """
    first, found = before(study, Path("out")), Estimate(0, 0, 0.0)
    if first is not None:
        found = estimate(first[0], step_milliseconds)
    architecture = architecture_of(study)
    if study.config.base is not None:
        train = study.config.base.train
        found += _steps(train.steps, train.batch, architecture, step_milliseconds, jobs=0)
    rows = {entry.title: entry for entry in study.config.methods}
    for entry in study.config.methods:
        settings = list(rounds_of(study, rows[entry.of] if entry.of else entry, Path("out")))
        if not trains(entry):
            places = len(entry.lambdas) if entry.name == WISE_FT else 1
            found += Estimate(len(settings) * len(study.config.seeds) * places, 0, 0.0)
            continue
        for _, _, values in settings:
            job = _steps(_train(values, "steps"), _pictures(values), architecture, step_milliseconds)
            for _ in study.config.seeds:
                found += job
    return found


def trains(entry: MethodEntry) -> bool:
    """Whether a row's jobs take steps: wise_ft averages weights, a refit solves for the target's logit."""
    return entry.name not in (WISE_FT, *UNTRAINED)


def architecture_of(study: Study) -> str | None:
    """The model that a study trains, where its file says which."""
    if study.config.base is not None:
        return study.config.base.model.architecture
    first = before(study, Path("out"))
    if first is not None:
        return architecture_of(first[0])
    model = study.config.round.get("model", {})
    return model.get("architecture") if isinstance(model, Mapping) else None


def _steps(
    steps: int, pictures: int | None, architecture: str | None, milliseconds: float | None, *, jobs: int = 1
) -> Estimate:
    if milliseconds is None and pictures is not None and architecture is not None:
        known = [item for item in MEASURED.values() if architecture.startswith(item.architecture)]
        if known:
            nearest = min(known, key=lambda item: abs(item.images - pictures))
            milliseconds = nearest.milliseconds * pictures / nearest.images
    return Estimate(jobs, steps, None if milliseconds is None else steps * milliseconds / 3.6e6)


def _train(values: Mapping[str, Any], key: str) -> Any:
    given = values.get("train", {})
    return given.get(key, TrainConfig.model_fields[key].default)


def _pictures(values: Mapping[str, Any]) -> int | None:
    """Pictures of a step; None where the number of protected tasks is only known from the images."""
    tasks = _train(values, "tasks_per_step") or len(values.get("task", {}).get("protected", ()))
    return _train(values, "batch") + tasks * _train(values, "images_per_task") if tasks else None
