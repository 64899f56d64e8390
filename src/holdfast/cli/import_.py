"""``holdfast import``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.errors import UserError

_MOST_BYTES = 1 << 24  # of a list of classes


def import_(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="A transformers or sentence-transformers CLIP or SigLIP folder, a timm or OpenCLIP folder, or a "
            "checkpoint.",
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The model folder to write; it must not exist yet.")],
    architecture: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Of a checkpoint: an OpenCLIP name such as ViT-B-16, timm:NAME or torchvision:NAME."
        ),
    ] = None,
    classes: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Class names, one a line; of a classifier or of heads, in their order."),
    ] = None,
    template: Annotated[
        str, typer.Option(help="With --classes, for two towers: the sentence that describes a class.")
    ] = "a photo of a {}",
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="A sentence-transformers folder of a text tower, in place of the one in SOURCE, such as "
            "clip-ViT-B-32-multilingual-v1.",
        ),
    ] = None,
) -> None:
    """Make a model folder of a model of another library, for `[model] start` of a round.

    Its outputs are compared with the source's own before anything is written. Two towers (CLIP, SigLIP) need no
    classes: a round brings its own. A checkpoint of the method's authors needs those of its task-dependent heads. A
    timm or torchvision classifier becomes a backbone and a linear head over its classes. Nothing is fetched, and no
    code that comes with a model is run.
    """
    from holdfast.model.folder import save_model
    from holdfast.model.importers import import_model

    names = None if classes is None else _read_classes(classes)
    found = import_model(source, architecture=architecture, classes=names, template=template, text=text)
    model = found.classifier
    extra = {"imported": found.source.words}
    if names and model.linear is None:
        extra["template"] = template
    fingerprint = save_model(model, out, extra=extra)
    over = f"{len(model.classes)} classes" if model.classes else "two towers; a round brings its classes"
    print(f"{source} is {found.source.words}: {over}")
    for note in found.notes:
        print(f"note: {note}")
    print(f"wrote {out} ({fingerprint}); its outputs are those of the source")
    print(f'use it as [model] start = "{out}"')


def _read_classes(path: Path) -> list[str]:
    from holdfast.files import read_regular

    try:
        lines = read_regular(path, _MOST_BYTES).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} cannot be read as class names", found=str(error), expected="one name a line"
        ) from error
    names = [line.strip() for line in lines if line.strip()]
    if len(names) < 2:
        raise UserError(f"{path} names fewer than two classes", expected="one name a line")
    return names
