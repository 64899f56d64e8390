"""Diagnose a run: are its constraints independent, is its model near a KKT point, who stands in the target's way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from holdfast.artifacts import RunFolder
from holdfast.config import RoundConfig
from holdfast.config.round import default_method
from holdfast.data.round import LabelledSet, PairSet, RoundData
from holdfast.errors import UserError
from holdfast.evaluate.diagnostics import Diagnosis, LossParts, class_loss, diagnose, parameter_groups
from holdfast.files import read_json
from holdfast.methods.base import clean_logits, cross_entropy
from holdfast.model.classifier import Classifier
from holdfast.model.folder import load_model
from holdfast.objective.contrastive import GlobalContrastive
from holdfast.rounds.checkpoints import checkpoint_name
from holdfast.rounds.develop import resume_config
from holdfast.rounds.prepare import PreparedRound, prepare_round
from holdfast.runtime import generator, started

At = Literal["start", "end"]


def diagnose_run(
    run: Path, *, at: At = "end", images: int = 1000, beta: float | None = None, memory_bytes: int = 2 << 30
) -> Diagnosis:
    """The diagnosis of a run's model, or (``at="start"``) of what it began with, new heads included.

    At most ``images`` constraint images of a task, target pairs and negatives are looked at; h_k, F and their gradients
    are exact on those.
    """
    config, root = resume_config(run)
    with started(config.train.device) as runtime:
        ready = prepare_round(config, root, runtime)
        data = ready.assembled.data
        model = ready.method.model if at == "start" else _result(run, ready)
        model = model.to(runtime.device)
        constraint = _first_of_each_task(data.constraint, data.tasks.num_protected, images)
        labels = torch.from_numpy(constraint.labels).to(runtime.device)
        old = cross_entropy(clean_logits(ready.old, constraint), labels)
        tasks = range(data.tasks.num_protected)
        shared, heads = parameter_groups(model)
        return diagnose(
            target_parts(model, data, _contrast(config), images),
            [class_loss(model, constraint, k) for k in tasks],
            [float(old[labels == k].mean()) for k in tasks],
            target=data.tasks.target,
            tasks=data.tasks.protected,
            shared=shared,
            heads=heads,
            beta=beta if beta is not None else _beta(config, model.class_temperature),
            memory_bytes=memory_bytes,
        )


def _beta(config: RoundConfig, class_temperature: float) -> float:
    """The penalty of the method as its gradient has it, or that of the default method for those that have none."""
    own = config.method.kkt_penalty()
    return (
        _known(default_method().kkt_penalty())
        if own is None
        else own * config.method.retention_scale(class_temperature)
    )


def _contrast(config: RoundConfig) -> float:
    """The contrastive temperature of the method, or that of the default method for those that have none."""
    own = config.method.contrastive_temperature()
    return _known(default_method().contrastive_temperature()) if own is None else own


def _known(value: float | None) -> float:
    assert value is not None
    return value


def _result(run: Path, ready: PreparedRound) -> Classifier:
    """The run's model, with what the method trained marked as trainable."""
    loaded = load_model(_model_folder(RunFolder(run)))
    trained = ready.method.model
    if loaded.state_dict().keys() != trained.state_dict().keys():
        return loaded  # the old model was handed back: it has no heads of this round
    trained.load_state_dict(loaded.state_dict())
    return trained


def _model_folder(folder: RunFolder) -> Path:
    """What a round handed back, or the checkpoint that a job of a study stands for."""
    job = folder.root / "job.json"
    if job.exists():
        step = read_json(job)["step"]
        if step is not None and (folder.candidates / checkpoint_name(step)).exists():
            return folder.candidates / checkpoint_name(step)
    if not folder.model.exists():
        raise UserError(f"{folder.root} has no model yet", do="let the run finish, or diagnose its start: --at start")
    return folder.model


def _first_of_each_task(examples: LabelledSet, tasks: int, images: int) -> LabelledSet:
    chosen = np.concatenate([examples.of_class(k)[:images] for k in range(tasks)])
    return LabelledSet(
        examples.pixels, examples.rows[chosen], examples.labels[chosen], tuple(examples.ids[p] for p in chosen)
    )


# -- the target objective over whole sets -----------------------------------------------------------------------------


def target_parts(model: Classifier, data: RoundData, temperature: float, pairs: int, batch: int = 64) -> LossParts:
    """F(w) over (at most ``pairs``) target pairs and as many negatives, in parts that fit into memory.

    F contrasts everything with everything, so its gradient cannot be added up from batches of F. It is taken in two
    passes: dF/dfeatures from features without a graph, then, batch by batch, the features' own gradient against that.
    A method without text (a linear head) improves the target by cross-entropy instead, as it was trained.
    """
    chosen = _some(len(data.target), pairs)
    if model.linear is not None:
        return _target_cross_entropy(model, data, chosen, batch)
    negatives, head = _some(len(data.negatives), pairs), data.tasks.target_index

    def features() -> Iterator[Tensor]:
        for which, positions, own in ((data.target, chosen, head), (data.negatives, negatives, None)):
            for start in range(0, len(positions), batch):
                yield _features(model, which, positions[start : start + batch], own)

    def parts() -> Iterator[Tensor]:
        with torch.no_grad():
            known = torch.cat(list(features()))
        known.requires_grad_(True)
        loss = _global_contrast(known, len(chosen), temperature)
        (slope,) = torch.autograd.grad(loss, known)
        place, value = 0, loss.detach() / (len(chosen) + len(negatives))
        for feature in features():
            here = slope[place : place + len(feature)]
            product = (feature * here).sum()
            place += len(feature)
            yield product - product.detach() + value * len(feature)  # its gradient is F's, its value F's share

    return parts


def _some(size: int, wanted: int) -> np.ndarray:
    """Positions to look at: all, or a fixed draw."""
    return np.sort(generator("diagnose", size).permutation(size)[:wanted])


def _features(model: Classifier, pairs: PairSet, positions: np.ndarray, head: int | None) -> Tensor:
    """Image and text features of pairs beside each other: [n, 2, D]."""
    weight = model.towers.projection
    ((_, pictures),) = model.preprocess.batches(pairs, weight, positions=positions, batch=len(positions))
    tokens = model.towers.tokenize([pairs.texts[p] for p in positions]).to(weight.device)
    return torch.stack([model.image_features(pictures), model.text_features(tokens, head)], dim=1)


def _global_contrast(features: Tensor, targets: int, temperature: float) -> Tensor:
    """F of method section 3 with ĝ over the whole set: u = ĝ, so the surrogate's gradient is F's own."""
    contrast = GlobalContrastive(targets, temperature, gamma=1.0).to(features)
    own, others = features[:targets], features[targets:]
    index = torch.arange(targets, device=features.device)
    found = contrast(own[:, 0], own[:, 1], others[:, 0], others[:, 1], index, targets, set_size=len(others) + 1)
    return found.surrogate - found.surrogate.detach() + found.objective


def _target_cross_entropy(model: Classifier, data: RoundData, chosen: np.ndarray, batch: int) -> LossParts:
    weight = model.towers.projection

    def parts() -> Iterator[Tensor]:
        for _, pictures in model.preprocess.batches(data.target, weight, positions=chosen, batch=batch):
            labels = torch.full((len(pictures),), data.tasks.target_index, device=weight.device)
            yield functional.cross_entropy(model.logits(pictures), labels, reduction="sum") / len(chosen)

    return parts
