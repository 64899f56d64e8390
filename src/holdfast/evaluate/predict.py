"""A model and a set of examples -> a table of predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from holdfast.artifacts import PREDICTIONS
from holdfast.data.tasks import LabelledSet
from holdfast.data.views import look
from holdfast.errors import TrainingError, UserError
from holdfast.model.classifier import Classifier
from holdfast.model.towers import Preprocess

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
        # The texts are the same for every batch.
        logits = partial(model.logits, class_matrix=model.class_matrix()) if isinstance(model, Classifier) else model
        predicted, losses, scores = _score(logits, examples, preprocess, batch_size, device, dtype)
    names = np.asarray(classes, dtype=object)
    labels = names[examples.labels]
    return pa.table([list(examples.ids), labels, labels, names[predicted], losses, scores], schema=PREDICTIONS)


def _score(
    logits: Logits,
    examples: LabelledSet,
    preprocess: Preprocess,
    batch_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Predicted class, cross-entropy and the prediction's probability of each example."""
    count = len(examples)
    predicted = np.empty(count, dtype=np.int64)
    losses = np.empty(count, dtype=np.float64)
    scores = np.empty(count, dtype=np.float64)
    for start in range(0, count, batch_size):
        here = slice(start, start + batch_size)
        pixels = examples.images(here).to(device, non_blocking=True)
        images = look(pixels, preprocess.mean, preprocess.std, None, dtype)
        # argmax and softmax see the same float64 numbers, so that score and prediction never disagree.
        log_probabilities = logits(images).cpu().to(torch.float64).log_softmax(dim=1)
        if not bool(log_probabilities.isfinite().all()):
            raise TrainingError(
                "the model's logits are not finite", found=f"in examples {start} to {start + len(images) - 1}"
            )
        labels = torch.from_numpy(np.asarray(examples.labels[here], dtype=np.int64))
        best = log_probabilities.max(dim=1)
        predicted[here] = best.indices.numpy()
        scores[here] = best.values.exp().numpy()
        losses[here] = -log_probabilities.gather(1, labels.unsqueeze(1)).squeeze(1).numpy()
    return predicted, losses, scores
