"""From a config to things that run: the old model, the data, the method over a new model."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from holdfast.config import DataConfig, MethodConfig, ModelConfig, RoundConfig, TaskConfig, TrainConfig
from holdfast.config.base import Config
from holdfast.data.assemble import Assembled, assemble, decode
from holdfast.data.loader import ViewSettings, with_constraint_views
from holdfast.data.seen import DRAWN, PUBLISHED, UNKNOWN, Seen, Use, refuse_seen
from holdfast.data.survey import Survey, survey
from holdfast.files import fingerprint_json
from holdfast.methods import build_method
from holdfast.methods.base import Method
from holdfast.model.classifier import Classifier
from holdfast.model.feature_store import features_kept, user_store
from holdfast.model.folder import images_seen, load_model, model_fingerprint, read_description
from holdfast.model.importers import import_model
from holdfast.model.openclip import load_towers
from holdfast.model.sources import is_direct_source
from holdfast.model.towers import TwoTowers
from holdfast.model.weights import from_packages
from holdfast.rounds.reference import as_deployed_in
from holdfast.runtime import Runtime, derive_seed, wake
from holdfast.shared import once
from holdfast.stages import stage
from holdfast.train.compute_mode import compute_mode

DEFAULT_CLASS_TEMPERATURE = 0.05


@dataclass(frozen=True)
class Start:
    """The model a round starts from: a holdfast model folder, or bare towers."""

    towers: TwoTowers
    classifier: Classifier | None
    seen: Seen = UNKNOWN  # the images that it was made with


@dataclass(frozen=True)
class PreparedRound:
    """A round that can be trained."""

    method: Method  # over the new model; :func:`begin_method` has it look at the data
    old: Classifier
    assembled: Assembled
    parent: str  # fingerprint of w_old as it is used in this round
    fingerprint: str  # of config, data and parent
    as_deployed: Classifier | None = None  # the old model over its own classes, where the round adds one
    start_seen: Seen = UNKNOWN  # the images that the old model was made with
    trained_on: frozenset[str] | None = None  # keys of training images that it knows better than dev images; None: any


def load_start(config: ModelConfig, root: Path, seed: int) -> Start:
    """The old model as the config names it."""
    if config.start is not None:
        path = root / config.start
        direct = is_direct_source(path) or config.text is not None
        text = None if config.text is None else root / config.text
        classifier = import_model(path, text=text).classifier if direct else load_model(path)
        seen = UNKNOWN if direct else images_seen(path)
        return Start(classifier.towers, classifier if classifier.classes else None, seen)
    architecture, weights = str(config.architecture), config.weights
    if weights is not None and (root / weights).exists():
        weights = str(root / weights)
    return Start(load_towers(architecture, weights, seed=seed), None, _seen_by(architecture, weights))


def _seen_by(architecture: str, weights: str | None) -> Seen:
    """The record of weights drawn by seed, asked for by name, or from a file, which may be of anybody."""
    packages = from_packages(architecture)
    if weights is None or (packages and weights == "random"):
        return PUBLISHED if packages and weights is None else DRAWN
    return UNKNOWN if Path(weights).is_file() else PUBLISHED


def inherit(config: RoundConfig, root: Path) -> RoundConfig:
    """The config as it will be run: a round speaks of its classes as its old model does, unless its TOML differs.

    What is inherited is written into the run folder, so that resuming and certifying need nothing but that.
    """
    if config.model.start is None or is_direct_source(root / config.model.start):
        return config
    notes = read_description(root / config.model.start).get("extra", {})
    given = config.task.model_fields_set
    update = {key: notes[key] for key in ("template", "names") if key in notes and key not in given}
    if isinstance(update.get("template"), list):
        update["template"] = tuple(update["template"])
    return config.model_copy(update={"task": config.task.model_copy(update=update)})


def bind(start: Start, assembled: Assembled, config: ModelConfig) -> Classifier:
    """The start over the round's label space."""
    spec, temperature = assembled.data.tasks, config.class_temperature
    if start.classifier is not None:
        return start.classifier.with_classes(spec.classes, spec.prompts, temperature)
    return Classifier(start.towers, spec.classes, spec.prompts, temperature or DEFAULT_CLASS_TEMPERATURE)


def prepare_round(
    config: RoundConfig,
    root: Path,
    runtime: Runtime,
    check: Callable[[Survey], None] | None = None,
    *,
    begin: bool = True,
) -> PreparedRound:
    """Data, old model and method of a round, on the device. ``check`` may refuse it before anything is loaded.

    ``begin`` prepares the method for its first step; without it whoever trains calls :func:`begin_method`.
    """
    stage("reading the sources")
    surveyed = survey(config.data, config.task, root=root)
    if check is not None:
        check(surveyed)
    if config.model.start is not None and not is_direct_source(root / config.model.start):
        _refuse_seen(config, surveyed, root, config.model.start)
    stage("loading the model")
    named = _start_key(config.model, root, config.seed)
    # The jobs of a study share it: it is bound and copied, and never changed.
    start = once(("start", named), lambda: load_start(config.model, root, config.seed))
    view = start.towers.preprocess
    wake(runtime.device)
    stage("decoding the pictures")
    assembled = decode(surveyed, size=view.size, interpolation=view.interpolation, seed=config.seed)
    views = view_settings(config.train, config.method)
    seen = with_constraint_views(assembled.data, views, config.train.constraint_views, config.seed)
    assembled = replace(assembled, data=seen)
    old = bind(start, assembled, config.model).frozen_copy()
    as_deployed = as_deployed_in(start.classifier, assembled.data.tasks, config.model.class_temperature)
    ready = make_prepared(config, config.method, old, assembled, runtime, named)
    if begin:
        begin_method(ready, config, runtime)
    deployed = None if as_deployed is None else as_deployed.to(runtime.device)
    trained_on = frozenset(start.seen.keys(Use.TRAINED, Use.FITTED)) if start.seen.complete else None
    return replace(ready, as_deployed=deployed, start_seen=start.seen, trained_on=trained_on)


def _start_key(config: ModelConfig, root: Path, seed: int) -> tuple[Hashable, ...]:
    drawn = seed if config.start is None else None  # weights of a bare architecture are drawn by seed
    named = (config.start, config.text, config.architecture, config.weights)
    return (*(None if item is None else str(item) for item in named), drawn, root.resolve())


def _refuse_seen(config: RoundConfig, surveyed: Survey, root: Path, start: Path) -> None:
    def passed() -> bool:
        refuse_seen(surveyed, images_seen(root / start), start)
        return True

    sources = tuple(source.model_dump_json() for source in config.data.sources)
    roles = config.data.roles.model_dump_json(), config.data.bad_image_limit, surveyed.spec.classes
    once(("not seen", sources, roles, str(start), root.resolve()), passed)


def read_data(data: DataConfig, task: TaskConfig, towers: TwoTowers, seed: int, root: Path) -> Assembled:
    """The round's data at the size the image tower wants."""
    view = towers.preprocess
    return assemble(data, task, size=view.size, interpolation=view.interpolation, seed=seed, root=root)


def make_prepared(
    config: RoundConfig,
    method_config: MethodConfig,
    old: Classifier,
    assembled: Assembled,
    runtime: Runtime,
    start: Hashable,
) -> PreparedRound:
    """A method over a copy of the old model; ``start`` is what its weights are known by."""
    dtype = torch.float64 if config.train.precision == "float64" else torch.float32
    old = old.to(device=runtime.device, dtype=dtype)
    new = old.copy()
    method = build_method(new, method_config, config.train.steps)
    _choose_trainable(method, config)
    method.to(device=runtime.device, dtype=dtype)
    if config.train.checkpoint_activations:
        new.towers.checkpoint_activations()
    method.check()
    bound = old.classes, old.prompts, old.class_temperature, dtype
    parent = once(("parent", start, bound), lambda: model_fingerprint(old))
    return PreparedRound(method, old, assembled, parent, _fingerprint(config, assembled.fingerprint, parent))


def begin_method(ready: PreparedRound, config: RoundConfig, runtime: Runtime) -> None:
    """Have the method look at the data: old losses, moving averages. Before the first step, and no sooner.

    The old losses of a round are computed by the kernels of its steps, and on a GPU those are compiled first: the refit
    needs neither, and its answer does not wait for them.
    """
    stage(f"preparing the method {config.method.name}")
    method, projection = ready.method, ready.old.towers.projection
    waking = wake(runtime.device)
    if waking is not None:
        waking.join()  # nobody else may ask the GPU for memory while a step is recorded
    with compute_mode(config.train, runtime.device, compiled=False), features_kept(user_store()):
        method.prepare(ready.old, ready.assembled.data)
    method.to(device=projection.device, dtype=projection.dtype)


def _choose_trainable(method: Method, config: RoundConfig) -> None:
    """What the method trains: towers, the round's heads or a linear head; what the config freezes stays frozen."""
    model = method.model
    model.requires_grad_(False)
    linear = method.linear or model.linear is not None
    for parameter in model.towers.left_to_train(config.model.freeze, linear=linear):
        parameter.requires_grad_(True)
    if linear:
        model.use_linear().requires_grad_(True)
    elif method.uses_heads and config.model.head_rank > 0:
        method.begin_heads(config.model.head_rank, derive_seed(config.seed, "heads"))


def _fingerprint(config: Config, data: str, parent: str) -> str:
    """What a checkpoint is tied to. Settings that change no number (logging, saving) are left out."""
    values = config.model_dump(mode="json")
    for name in ("log_every", "checkpoint_every", "keep_checkpoints", "device", "shard"):
        values["train"].pop(name, None)
    if not values["train"].get("only_if_needed"):  # as it was before there was such a setting: begun rounds go on
        values["train"].pop("only_if_needed", None)
    return fingerprint_json({"config": values, "data": data, "parent": parent})


def view_settings(train: TrainConfig, method_config: MethodConfig) -> ViewSettings:
    """Random views of pairs as [train] says, of protected images as the method says."""
    two = train.augment and method_config.two_views()
    protected = "paired" if two else method_config.protected_views()
    return ViewSettings(train.augment, protected, train.crop_scale, train.flip, train.rotation, two)
