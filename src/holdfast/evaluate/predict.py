"""A model and a set of examples -> a table of predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.artifacts import PREDICTIONS
from holdfast.data.round import LabelledSet
from holdfast.errors import TrainingError, UserError
from holdfast.model.classifier import Classifier, class_matrices, full_precision
from holdfast.model.feature_store import encode_set
from holdfast.model.towers import Preprocess
from holdfast.runtime import Runtime

Logits = Callable[[Tensor], Tensor]  # normalised pixels [n, 3, S, S] -> [n, K]


def predict(
    model: Classifier | Logits,
    examples: LabelledSet,
    classes: Sequence[str],
    *,
    batch_size: int = 256,
    device: torch.device | str | None = None,
    preprocess: Preprocess | None = None,
) -> pa.Table:
    """What a model says about each example, in their order (schema :data:`holdfast.artifacts.PREDICTIONS`).

    ``examples.labels`` index into ``classes``, and so do the columns of the logits; the task of an example is its
    class. The loss is the cross-entropy over ``classes``, the score the probability of the predicted class.
    """
    if isinstance(model, Classifier):
        if tuple(classes) != model.classes:
            raise UserError(
                "the model has another label space than the examples",
                expected=", ".join(classes),
                found=", ".join(model.classes),
                do="bind it with `Classifier.with_classes`",
            )
        preprocess = preprocess or model.preprocess
        dtype = model.towers.projection.dtype
        device = device if device is not None else model.towers.projection.device
    else:
        dtype = torch.float32
    if preprocess is None:
        raise TypeError("a plain function of images needs the preprocessing that it expects")
    if examples.pixels.size != preprocess.size:
        raise UserError(
            "the pictures were decoded at another size than the model takes",
            expected=f"{preprocess.size} pixels",
            found=f"{examples.pixels.size} pixels",
        )
    device = torch.device(device) if device is not None else torch.device("cpu")
    with torch.no_grad():
        like = torch.empty(0, device=device, dtype=dtype)
        if isinstance(model, Classifier):
            scored = _scored_models([model], examples, batch_size, like, preprocess)
        else:
            batches = preprocess.batches(examples, like, batch=batch_size)
            scored = _score(((here, (model(images),)) for here, images in batches), examples, 1)
    return _table(scored[0], examples, classes)


def predict_each(
    models: Sequence[Classifier], examples: LabelledSet, *, batch_size: int, device: torch.device
) -> list[pa.Table]:
    """:func:`predict` of models that differ in the image tower's last layer and in their classes' features alone.

    The towers are run once.
    """
    like = torch.empty(0, device=device, dtype=models[0].towers.projection.dtype)
    with torch.no_grad():
        scored = _scored_models(models, examples, batch_size, like)
    return [_table(item, examples, models[0].classes) for item in scored]


def _table(scored: _Scores, examples: LabelledSet, classes: Sequence[str]) -> pa.Table:
    names = np.asarray(classes, dtype=object)
    labels = names[examples.labels]
    columns = [list(examples.ids), labels, labels, names[scored.predicted], scored.losses, scored.scores]
    return pa.table(columns, schema=PREDICTIONS)


@dataclass(frozen=True)
class _Scores:
    """Predicted class, cross-entropy and the prediction's probability of each example."""

    predicted: np.ndarray
    losses: np.ndarray
    scores: np.ndarray

    @classmethod
    def empty(cls, count: int) -> _Scores:
        return cls(np.empty(count, dtype=np.int64), np.empty(count), np.empty(count))

    def fill(self, here: slice, logits: Tensor, labels: np.ndarray) -> None:
        # argmax and softmax see the same float64 numbers, so that score and prediction never disagree.
        log_probabilities = logits.to(torch.float64).log_softmax(dim=1)
        if not bool(log_probabilities.isfinite().all()):
            last = here.start + len(logits) - 1
            raise TrainingError("the model's logits are not finite", found=f"in examples {here.start} to {last}")
        best = log_probabilities.max(dim=1)
        self.predicted[here] = best.indices.numpy()
        self.scores[here] = best.values.exp().numpy()
        right = torch.from_numpy(np.asarray(labels, dtype=np.int64)).unsqueeze(1)
        self.losses[here] = -log_probabilities.gather(1, right).squeeze(1).numpy()


def _scored_models(
    models: Sequence[Classifier],
    examples: LabelledSet,
    batch_size: int,
    like: Tensor,
    preprocess: Preprocess | None = None,
) -> list[_Scores]:
    """What models say that share all of the image tower but its last layer: one pass of it."""
    matrices = class_matrices(models)
    towers = list({id(model.towers): model for model in models}.values())
    what = "features" if len(towers) == 1 else "hidden"

    def logits() -> Iterator[tuple[slice, Sequence[Tensor]]]:
        first = models[0].towers
        for here, raw in encode_set(first, examples, like, what=what, batch=batch_size, preprocess=preprocess):
            seen = full_precision(raw) if what == "hidden" else raw
            features = {
                id(model.towers): model.finished(model.towers.project(seen) if what == "hidden" else seen)
                for model in towers
            }
            yield (
                here,
                [
                    model.logits_of(features[id(model.towers)], matrix)
                    for model, matrix in zip(models, matrices, strict=True)
                ],
            )

    return _score(logits(), examples, len(models))


def _score(batches: Iterable[tuple[slice, Sequence[Tensor]]], examples: LabelledSet, models: int) -> list[_Scores]:
    """Scores of each model from batches of logits: where they belong, and one tensor a model."""
    scored = [_Scores.empty(len(examples)) for _ in range(models)]
    for here, logits in batches:
        on_host = torch.stack(tuple(logits)).cpu()  # a GPU is waited for once, and not once a model
        for item, scores in zip(scored, on_host, strict=True):
            item.fill(here, scores, examples.labels[here])
    return scored


# -- over ranks ------------------------------------------------------------------------------------------------------


def predict_on_ranks(
    model: Classifier, examples: LabelledSet, classes: tuple[str, ...], batch: int, runtime: Runtime
) -> pa.Table:
    """:func:`predict`, with the examples shared out over the ranks and the tables put together again."""
    share = _share(examples, runtime)
    return _together(predict(model, share, classes, batch_size=batch, device=runtime.device), examples, runtime)


def predict_each_on_ranks(
    models: Sequence[Classifier], examples: LabelledSet, batch: int, runtime: Runtime
) -> list[pa.Table]:
    """The same for :func:`predict_each`."""
    tables = predict_each(models, _share(examples, runtime), batch_size=batch, device=runtime.device)
    return [_together(table, examples, runtime) for table in tables]


def _share(examples: LabelledSet, runtime: Runtime) -> LabelledSet:
    """What this rank predicts."""
    if runtime.world == 1:
        return examples
    return examples.at(np.arange(runtime.rank, len(examples), runtime.world))


def _together(table: pa.Table, examples: LabelledSet, runtime: Runtime) -> pa.Table:
    """The ranks' tables as one, in the order of the examples."""
    if runtime.world == 1:
        return table
    tables: list[Any] = [None] * runtime.world
    dist.all_gather_object(tables, table)
    together = pa.concat_tables(tables)
    place = {identity: row for row, identity in enumerate(together["example_id"].to_pylist())}
    return together.take([place[identity] for identity in examples.ids])
