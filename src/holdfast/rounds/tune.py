"""Make a base model on a labelled source, as the paper makes its own: the same loop, no constraints."""

from __future__ import annotations

import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch.distributed as dist

from holdfast._version import __version__
from holdfast.artifacts import RunFolder
from holdfast.config import MethodConfig, TuneConfig
from holdfast.data.assemble import labelled
from holdfast.data.loader import ViewSettings
from holdfast.data.prompts import class_prompts
from holdfast.data.roles import assign
from holdfast.data.round import LabelledSet, PairSet, RoundData
from holdfast.data.seen import Seen, seen_in_tuning
from holdfast.data.sources import catalogue
from holdfast.data.task import Role, TaskSpec
from holdfast.errors import Interrupted, UserError, nearest
from holdfast.evaluate.metrics import per_task_accuracy
from holdfast.evaluate.predict import predict_on_ranks
from holdfast.files import fingerprint_ids, fingerprint_json, read_json, write_json
from holdfast.methods import build_method
from holdfast.methods.base import Method
from holdfast.methods.cross_entropy import CrossEntropyConfig
from holdfast.methods.wccl import WcclConfig
from holdfast.model.classifier import Classifier
from holdfast.model.folder import save_model
from holdfast.rounds.develop import writing
from holdfast.rounds.prepare import DEFAULT_CLASS_TEMPERATURE, Start, load_start
from holdfast.runtime import Runtime, generator, started
from holdfast.train.loop import TrainSpec, train
from holdfast.train.progress import choose_progress


@dataclass(frozen=True)
class TuneResult:
    """The tuned model's folder, and its accuracy on dev images by class."""

    model: Path
    accuracy: dict[str, float]


def tune(
    config: TuneConfig,
    out: Path,
    root: Path,
    *,
    resume: bool = False,
    quiet: bool = False,
    command: str = "",
) -> TuneResult:
    """Tune a model on the base images (the training images where no share is set aside as base).

    Going on with a run that is finished changes nothing. ``command`` is what goes on with this one, for messages.
    """
    if resume and RunFolder.open(out).finished:
        return _result(RunFolder(out))
    with started(config.train.device) as runtime, writing(out, runtime, resume=resume) as folder:
        if folder.result.exists():  # killed between its last file and the line that says so
            return _conclude(folder, runtime)
        try:
            return _tune(config, folder, root, runtime, resume=resume, quiet=quiet, command=command)
        except KeyboardInterrupt as error:
            raise Interrupted("interrupted", signal_number=signal.SIGINT, do=f"go on with: {command}") from error


def _tune(
    config: TuneConfig, folder: RunFolder, root: Path, runtime: Runtime, *, resume: bool, quiet: bool, command: str
) -> TuneResult:
    start = load_start(config.model, root, config.seed)
    data = _labelled_round(config, start.towers.preprocess.size, start.towers.preprocess.interpolation, root)
    model = _model(config, start, data).to(runtime.device)
    method = _method(config, model, data, runtime)
    values = config.model_dump(mode="json")
    if runtime.is_main and not resume:
        write_json(folder.config, values)
        write_json(folder.state, {"status": "training", "version": __version__, "root": folder.towards(root)})
    values["train"].pop("shard")  # changes no number
    ids = fingerprint_ids(data.constraint.ids + data.target.ids)
    fingerprint = fingerprint_json({"config": values, "data": ids})
    train_views = (config.train.crop_scale, config.train.flip, config.train.rotation)
    views = ViewSettings(config.train.augment, _views(config), *train_views)
    plan = TrainSpec(_train_config(config), views, config.seed, fingerprint, config.evaluate.every, resume=command)

    def evaluate(done: int, method: Method) -> dict[str, Any]:
        return {"dev_accuracy": per_task_accuracy(_predict(method.model, data.dev, config, runtime))}

    with choose_progress("tuning", config.train.steps, quiet=quiet or not runtime.is_main) as progress:
        train(method, data, plan, runtime, folder, evaluate, progress)
    accuracy = per_task_accuracy(_predict(method.model, data.dev, config, runtime))
    if runtime.is_main:
        if folder.model.exists():
            shutil.rmtree(folder.model)
        seen = start.seen.and_then(_seen(config, root, data))
        notes = {"template": config.template, "names": config.names}
        save_model(method.model, folder.model, extra=notes, seen=seen)
        write_json(folder.result, {"dev_accuracy": accuracy})
    return _conclude(folder, runtime)


def _model(config: TuneConfig, start: Start, data: RoundData) -> Classifier:
    """The start's towers over the classes of the data; an image classifier keeps its head, which no prompt makes."""
    classes, prompts, temperature = data.tasks.classes, data.tasks.prompts, config.model.class_temperature
    if start.classifier is not None and not start.towers.has_texts:
        return start.classifier.with_classes(classes, prompts, temperature)
    return Classifier(start.towers, classes, prompts, temperature or DEFAULT_CLASS_TEMPERATURE)


def _seen(config: TuneConfig, root: Path, data: RoundData) -> Seen:
    """What this model is made with, by the roles that its [data] gives."""
    main = catalogue(config.data.sources, root, limit=config.data.bad_image_limit)
    assigned = assign(main, data.tasks.classes, config.data.roles)
    return seen_in_tuning(main, assigned, {*data.constraint.ids, *data.target.ids})


def _conclude(folder: RunFolder, runtime: Runtime) -> TuneResult:
    """Every file is in place: the run is done."""
    if runtime.is_main:
        write_json(folder.state, {**read_json(folder.state), "status": "done"})
    if dist.is_initialized():
        dist.barrier()
    return _result(folder)


def _result(folder: RunFolder) -> TuneResult:
    return TuneResult(folder.model, read_json(folder.result)["dev_accuracy"])


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
    for parameter in model.towers.left_to_train(config.model.freeze, linear=model.linear is not None):
        parameter.requires_grad_(True)
    if model.linear is not None:
        model.linear.requires_grad_(True)
    if config.objective == "cross_entropy":
        method_config: MethodConfig = CrossEntropyConfig(heads=False)
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

    training = _at_most(read(Role.BASE if roles.base else Role.TRAIN), classes, config)
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
    return predict_on_ranks(model, examples, model.classes, config.evaluate.batch, runtime)
