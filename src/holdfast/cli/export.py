"""``holdfast export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder, or a run folder with one in it.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that does not exist yet.")],
) -> None:
    """Write a model for use without holdfast: a plain OpenCLIP checkpoint and the folded classifier.

    OUT holds open_clip_model.safetensors and open_clip_config.json (`open_clip.create_model("local-dir:OUT")`),
    classifier.safetensors with the matrix [classes, D] that heads and prompts were folded into, and holdfast.json with
    classes, temperature, preprocessing and the three lines of code that put them together.
    """
    from holdfast.model.folder import export_openclip, load_model, model_folder

    export_openclip(load_model(model_folder(model)), out)
    print(f"wrote {out}; holdfast.json in it says how to use it")
