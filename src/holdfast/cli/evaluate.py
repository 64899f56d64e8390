"""``holdfast evaluate``."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.errors import UserError

if TYPE_CHECKING:
    from holdfast.evaluate.metrics import TaskScore
    from holdfast.model.classifier import Classifier


class Which(StrEnum):
    """Examples that may be evaluated; sealed ones are opened by a certificate alone."""

    ALL = "all"
    BASE = "base"
    TRAIN = "train"
    DEV = "dev"
    TEST = "test"


def evaluate(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A model folder, a run folder with one in it, or `conse`.")
    ],
    data: Annotated[str, typer.Argument(metavar="DATA", help="A folder of images, a table of them, or `digits`.")],
    role: Annotated[
        Which, typer.Option("--role", "--split", help="Only the examples that the source's own splits give this role.")
    ] = Which.ALL,
    out: Annotated[Path, typer.Option(help="Where the predictions go (Parquet).")] = Path("predictions.parquet"),
    template: Annotated[
        str, typer.Option(help="The sentence for a class, where the model has two towers and no classes of its own.")
    ] = "a photo of a {}",
    batch_size: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 256,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Predict with a model on labelled images; write one row an image and print the accuracy of every class.

    The rows hold example id, task, label, prediction, loss and score. Two such tables of the same images, from an old
    and a new model, are what `holdfast certify` reads. Classes that the model does not know are left out and named, and
    so are images that are sealed in a round of this model: only a certificate opens those. Two towers without classes,
    `conse` among them, are evaluated zero-shot on the classes of the data.
    """
    from rich.console import Console

    from holdfast.artifacts import write_predictions
    from holdfast.files import check_writable
    from holdfast.stages import stage, stages_shown

    if template.count("{}") != 1:
        raise UserError("the template has no place for a class", expected="a sentence with {}", found=repr(template))
    check_writable(out)
    with stages_shown():
        stage("loading PyTorch")
    from holdfast.data.assemble import labelled
    from holdfast.data.catalogue import Problem, count_problems
    from holdfast.data.sources import guess_source
    from holdfast.data.task import Role
    from holdfast.evaluate.metrics import per_task
    from holdfast.evaluate.predict import predict
    from holdfast.model.folder import model_fingerprint, model_folder, read_description, sealed_from
    from holdfast.model.weights import is_conse
    from holdfast.runtime import choose_device

    with stages_shown():
        _check_there(model)
        place = choose_device(device)
        folder = None if is_conse(str(model)) and not model.exists() else model_folder(model)
        stage("loading the model")
        classifier = _load(folder, str(model))
        if not classifier.classes:
            classifier = _zero_shot(classifier, data, template)
        classifier = classifier.to(place)
        view = classifier.preprocess
        problems: list[Problem] = []
        stage("decoding the pictures")
        examples = labelled(
            [guess_source(data)],
            classifier.classes,
            size=view.size,
            interpolation=view.interpolation,
            root=Path(),
            roles=[item for item in Role if item != Role.SEALED] if role == Which.ALL else [Role(role.value)],
            missing_ok=True,
            sealed=set() if folder is None else sealed_from(folder),
            problems=problems,
        )
        stage(f"predicting {len(examples):,} pictures")
        table = predict(classifier, examples, classifier.classes, batch_size=batch_size, device=place)
    write_predictions(out, table)
    scores = per_task(table)
    errors = Console(stderr=True, highlight=False)
    for kind, count in count_problems(problems).items():
        named = ", ".join(sorted({problem.where for problem in problems if problem.kind == kind})[:5])
        errors.print(f"note: {kind}: {count} ({named})", soft_wrap=True, markup=False)
    absent = [name for name in classifier.classes if name not in scores]
    if absent:
        errors.print(f"note: no images of {', '.join(absent)}", soft_wrap=True, markup=False)
    if as_json:
        model_id = model_fingerprint(classifier) if folder is None else read_description(folder)["fingerprint"]
        print(json.dumps({"model": model_id, "out": str(out), **_numbers(scores)}))
    else:
        _print(scores, out)


def _check_there(model: Path) -> None:
    import os
    from difflib import get_close_matches

    from holdfast.files import where_instead
    from holdfast.model.weights import is_conse

    if not os.path.exists(model) and not is_conse(str(model)):
        alike = get_close_matches(str(model), ["conse"])
        raise UserError(
            f"the model {model} does not exist",
            expected="a model folder, a run that holds one, or `conse`",
            do="did you mean `conse`?" if alike else where_instead(model),
        )


def _load(folder: Path | None, architecture: str) -> Classifier:
    from holdfast.model.folder import load_model, start_model
    from holdfast.model.importers import CLASS_TEMPERATURE
    from holdfast.model.weights import check_parts

    if folder is not None:
        return load_model(folder)
    check_parts(architecture)
    return start_model(architecture, None, (), (), CLASS_TEMPERATURE)


def _zero_shot(classifier: Classifier, data: str, template: str) -> Classifier:
    """The model over the classes that the data has, each with one sentence."""
    from holdfast.data.prompts import class_prompts
    from holdfast.data.sources import guess_source, list_source

    listing = list_source(guess_source(data), Path())
    classes = sorted({entry.label for entry in listing.entries if entry.label is not None})
    if len(classes) < 2:
        raise UserError(f"{listing.name} has fewer than two classes", expected="class/picture.jpg, or a column label")
    return classifier.with_classes(classes, class_prompts(classes, [template], {}))


def _numbers(scores: dict[str, TaskScore]) -> dict[str, object]:
    tasks = {
        name: {"examples": score.examples, "accuracy": score.accuracy, "loss": score.loss}
        for name, score in scores.items()
    }
    count = sum(score.examples for score in scores.values())
    return {"examples": count, "accuracy": sum(score.correct for score in scores.values()) / count, "tasks": tasks}


def _print(scores: dict[str, TaskScore], out: Path) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("class")
    for name in ("images", "accuracy", "mean loss"):
        table.add_column(name, justify="right")
    for name, score in scores.items():
        table.add_row(Text(name), str(score.examples), f"{score.accuracy * 100:.1f} %", f"{score.loss:.3f}")
    console = Console()
    console.print(table)
    console.print(Text(f"predictions in {out}"), soft_wrap=True)
