"""Old models as they were used: where a round adds a class, a model is judged over the classes it had before.

The constraint h_k is taken over the round's label space in both models. What people lost or kept is another question:
they used the old model over its own K classes, so its predictions are made over those. Its loss stays the one over the
round's label space, since a loss over other classes could not be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from holdfast.data.round import LabelledSet
from holdfast.data.task import TaskSpec
from holdfast.errors import UserError
from holdfast.evaluate.predict import predict_on_ranks
from holdfast.model.classifier import Classifier
from holdfast.model.folder import load_model, model_folder
from holdfast.runtime import Runtime


@dataclass(frozen=True)
class ReferenceModel:
    """A frozen model that others are compared with."""

    on_round_classes: Classifier  # over the round's label space
    as_deployed: Classifier | None = None  # over the classes it had, where those are fewer

    def with_deployed(self, table: pa.Table, predictions: pa.Table) -> pa.Table:
        """``table`` (of ``bound``) with the predictions and scores of ``said`` (of ``used``)."""
        for name in ("prediction", "score"):
            place = table.schema.get_field_index(name)
            table = table.set_column(place, table.schema.field(name), predictions[name])
        return table


def as_deployed_in(start: Classifier | None, spec: TaskSpec, temperature: float | None) -> Classifier | None:
    """``start`` over those of the round's classes that it knew; None where it knew them all (or was bare towers)."""
    if start is None:
        return None
    known = [place for place, name in enumerate(spec.classes) if name in start.classes]
    if len(known) == len(spec.classes):
        return None
    if not known:
        raise UserError(
            "the old model knows none of the round's classes",
            expected=f"some of {', '.join(spec.classes)}",
            found=", ".join(start.classes),
        )
    names, prompts = [spec.classes[place] for place in known], [spec.prompts[place] for place in known]
    return start.with_classes(names, prompts, temperature).frozen_copy()


def load_reference(path: Path, spec: TaskSpec) -> ReferenceModel:
    """A model folder (a project's first model), over the round's classes and as it was used."""
    start = load_model(model_folder(path))
    on_round_classes = start.with_classes(spec.classes, spec.prompts).frozen_copy()
    return ReferenceModel(on_round_classes, as_deployed_in(start, spec, None))


def relabelled(examples: LabelledSet, classes: Sequence[str], known: Sequence[str]) -> LabelledSet:
    """The same examples over fewer classes. Those of a class that is not known get the first label: whatever is
    predicted for them is wrong, and only the prediction is read."""
    index = {name: number for number, name in enumerate(known)}
    labels = np.array([index.get(classes[int(label)], 0) for label in examples.labels], dtype=np.int64)
    return replace(examples, labels=labels)


def predict_reference(served: ReferenceModel, examples: LabelledSet, batch: int, runtime: Runtime) -> pa.Table:
    """What a frozen model says, over the classes that it was used with; the loss is over the round's."""
    classes = served.on_round_classes.classes
    table = predict_on_ranks(served.on_round_classes, examples, classes, batch, runtime)
    if served.as_deployed is None:
        return table
    fewer = relabelled(examples, classes, served.as_deployed.classes)
    return served.with_deployed(
        table, predict_on_ranks(served.as_deployed, fewer, served.as_deployed.classes, batch, runtime)
    )
