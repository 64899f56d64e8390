"""Make a base model on a labelled source, as the paper makes its own: the same loop, no constraints."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast._version import __version__
from holdfast.artifacts import RunFolder, fingerprint_ids, fingerprint_json, write_json
from holdfast.config import TuneConfig
from holdfast.config.methods import CrossEntropyConfig, WcclConfig
from holdfast.data.assemble import labelled
from holdfast.data.loaders import ViewSettings
from holdfast.data.prompts import class_prompts
from holdfast.data.sources import catalogue
from holdfast.data.tasks import LabelledSet, PairSet, Role, RoundData, TaskSpec
from holdfast.errors import UserError, nearest
from holdfast.evaluate.metrics import per_task_accuracy
from holdfast.methods import build_method
from holdfast.methods.base import Method
from holdfast.model.classifier import Classifier
from holdfast.model.folder import save_model
from holdfast.rounds.develop import shared_predictions
from holdfast.rounds.setup import DEFAULT_CLASS_TEMPERATURE, load_start
from holdfast.runtime import Runtime, generator, started
from holdfast.train.loop import Plan, train
from holdfast.train.progress import choose_progress


@dataclass(frozen=True)
class TuneResult:
    """The tuned model's folder, and its accuracy on dev images by class."""

    model: Path
    accuracy: dict[str, float]


def tune(config: TuneConfig, out: Path, root: Path, *, resume: bool = False, quiet: bool = False) -> TuneResult:
    """Tune a model on the base images (the training images where no share is set aside as base)."""
    with started(config.train.device) as runtime:
        folder = RunFolder.open(out) if resume else RunFolder(out)
        if runtime.is_main and not resume:
            RunFolder.create(out)
        start = load_start(config.model, root, config.seed)
        data = _labelled_round(config, start.towers.preprocess.size, start.towers.preprocess.interpolation, root)
        temperature = config.model.class_temperature or DEFAULT_CLASS_TEMPERATURE
        model = Classifier(start.towers, data.tasks.classes, data.tasks.prompts, temperature).to(runtime.device)
        method = _method(config, model, data, runtime)
        values = config.model_dump(mode="json")
        if runtime.is_main:
            write_json(folder.config, values)
            write_json(folder.state, {"status": "training", "version": __version__, "root": str(root.resolve())})
        values["train"].pop("shard")  # changes no number
        ids = fingerprint_ids(data.constraint.ids + data.target.ids)
        fingerprint = fingerprint_json({"config": values, "data": ids})
        views = ViewSettings(config.train.augment, _views(config), config.train.crop_scale, config.train.flip)
        plan = Plan(_train_config(config), views, config.seed, fingerprint, config.evaluate.every)

        def look(done: int, method: Method) -> dict[str, Any]:
            return {"dev_accuracy": per_task_accuracy(_predict(method.model, data.dev, config, runtime))}

        with choose_progress("tuning", config.train.steps, quiet=quiet or not runtime.is_main) as progress:
            train(method, data, plan, runtime, folder, look, progress)
        accuracy = per_task_accuracy(_predict(method.model, data.dev, config, runtime))
        if runtime.is_main:
            if folder.model.exists():
                shutil.rmtree(folder.model)
            save_model(method.model, folder.model, extra={"template": config.template, "names": config.names})
            write_json(folder.result, {"dev_accuracy": accuracy})
            write_json(folder.state, {"status": "done", "version": __version__, "root": str(root.resolve())})
        return TuneResult(folder.model, accuracy)


def _views(config: TuneConfig) -> str:
    return "paired" if config.train.augment else "clean"


def _train_config(config: TuneConfig) -> Any:
    """Cross-entropy contrasts with nothing: a step is ``images_per_task`` images of every class."""
    if config.objective == "contrastive":
        return config.train
    images = config.train.images_per_task
    return config.train.model_copy(update={"batch": images + 1, "target_share": images / (images + 1)})


def _method(config: TuneConfig, model: Classifier, data: RoundData, runtime: Runtime) -> Method:
    model.requires_grad_(False)
    if config.model.freeze not in ("image", "towers"):
        for parameter in model.towers.image_parameters():
            parameter.requires_grad_(True)
    if config.model.freeze not in ("text", "towers"):
        for parameter in model.towers.text_parameters():
            parameter.requires_grad_(True)
    if config.objective == "cross_entropy":
        method_config: Any = CrossEntropyConfig(heads=False)
    else:
        # Every class has the same weight when the protected ones share m/(m+1) of it; a class is not its own negative.
        m = data.tasks.num_protected
        method_config = WcclConfig(alpha=m / (m + 1), temperature=config.temperature, gamma_pairs=config.gamma_pairs)
    method = build_method(model, method_config, config.train.steps)
    method.prepare(model, data)
    return method.to(runtime.device)


def _labelled_round(config: TuneConfig, size: int, interpolation: str, root: Path) -> RoundData:
    """All classes as one round's data: the last stands where a target stands, the others where protected ones do."""
    sources = config.data.sources
    classes = config.classes or tuple(catalogue(sources, root, limit=config.data.bad_image_limit).classes)
    if len(classes) < 2:
        raise UserError("a model is tuned on at least two classes", found=", ".join(classes) or "none")
    roles = config.data.roles

    def read(*wanted: Role) -> LabelledSet:
        return labelled(
            sources,
            classes,
            size=size,
            interpolation=interpolation,
            root=root,
            roles=wanted,
            roles_config=roles,
            limit=config.data.bad_image_limit,
            drop_leaks=config.data.leaks == "drop",
        )

    training = _at_most(read(Role.BASE if roles.base else Role.CONSTRAINT), classes, config)
    templates = (config.template,) if isinstance(config.template, str) else config.template
    prompts = class_prompts(classes, templates, config.names)
    last = len(classes) - 1
    own, others = training.of_class(last), np.flatnonzero(training.labels != last)
    return RoundData(
        tasks=TaskSpec(classes[-1], classes[:-1], prompts),
        target=_prompted(training, own, prompts),
        negatives=_prompted(training, others, prompts),
        constraint=LabelledSet(
            training.pixels, training.rows[others], training.labels[others], tuple(training.ids[p] for p in others)
        ),
        dev=read(Role.DEV),
        open_test=lambda: read(Role.TEST),
        open_sealed=lambda: read(Role.SEALED),
    )


def _at_most(examples: LabelledSet, classes: tuple[str, ...], config: TuneConfig) -> LabelledSet:
    """Some classes cut to a few images, drawn by seed."""
    unknown = [name for name in config.at_most if name not in classes]
    if unknown:
        raise UserError(f"at_most: {unknown[0]!r} is none of the classes", do=nearest(unknown[0], classes))
    kept: list[np.ndarray] = []
    for label, name in enumerate(classes):
        positions = examples.of_class(label)
        limit = config.at_most.get(name, len(positions))
        order = generator(config.seed, "at most", name).permutation(len(positions))
        kept.append(np.sort(positions[order[:limit]]))
    chosen = np.concatenate(kept)
    return LabelledSet(
        examples.pixels, examples.rows[chosen], examples.labels[chosen], tuple(examples.ids[p] for p in chosen)
    )


def _prompted(examples: LabelledSet, positions: np.ndarray, prompts: tuple[tuple[str, ...], ...]) -> PairSet:
    labels = examples.labels[positions]
    texts = tuple(prompts[label][position % len(prompts[label])] for position, label in enumerate(labels))
    return PairSet(examples.pixels, examples.rows[positions], texts, tuple(examples.ids[p] for p in positions))


def _predict(model: Classifier, examples: LabelledSet, config: TuneConfig, runtime: Runtime) -> pa.Table:
    return shared_predictions(model, examples, model.classes, config.evaluate.batch, runtime)
