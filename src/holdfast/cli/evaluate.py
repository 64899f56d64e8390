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


class Which(StrEnum):
    """Examples that may be evaluated; sealed ones are opened by a certificate alone."""

    ALL = "all"
    BASE = "base"
    TRAIN = "train"
    DEV = "dev"
    TEST = "test"


def evaluate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder, or a run folder with one in it.")],
    data: Annotated[str, typer.Argument(metavar="DATA", help="A folder of images, a table of them, or `digits`.")],
    role: Annotated[
        Which, typer.Option("--role", "--split", help="Only the examples that the source's own splits give this role.")
    ] = Which.ALL,
    out: Annotated[Path, typer.Option(help="Where the predictions go (Parquet).")] = Path("predictions.parquet"),
    batch_size: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 256,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Predict with a model on labelled images; write one row an image and print the accuracy of every class.

    The rows hold example id, task, label, prediction, loss and score. Two such tables of the same images, from an old
    and a new model, are what `holdfast certify` reads. Classes that the model does not know are left out and named, and
    so are images that are sealed in a round of this model: only a certificate opens those.
    """
    from rich.console import Console

    from holdfast.artifacts import write_predictions
    from holdfast.data.assemble import labelled
    from holdfast.data.catalogue import Problem, count_problems
    from holdfast.data.round import Role
    from holdfast.data.sources import guess_source
    from holdfast.evaluate.metrics import per_task
    from holdfast.evaluate.predict import predict
    from holdfast.model.folder import load_model, model_folder, read_description, sealed_from
    from holdfast.runtime import choose_device

    place = choose_device(device)
    folder = model_folder(model)
    classifier = load_model(folder).to(place)
    if not classifier.classes:
        raise UserError(
            f"the model in {folder} has no classes yet",
            do="import it with --classes FILE, or develop it: a round brings its classes",
        )
    view = classifier.preprocess
    problems: list[Problem] = []
    examples = labelled(
        [guess_source(data)],
        classifier.classes,
        size=view.size,
        interpolation=view.interpolation,
        root=Path(),
        roles=[item for item in Role if item != Role.SEALED] if role == Which.ALL else [Role(role.value)],
        missing_ok=True,
        sealed=sealed_from(folder),
        problems=problems,
    )
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
        print(json.dumps({"model": read_description(folder)["fingerprint"], "out": str(out), **_numbers(scores)}))
    else:
        _print(scores, out)


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
