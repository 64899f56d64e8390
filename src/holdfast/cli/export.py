"""``holdfast export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A model folder, or a run folder with one in it.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that does not exist yet.")],
) -> None:
    """Write a model for use without holdfast, in the format that it came from.

    - OpenCLIP: `open_clip_model.safetensors` and `open_clip_config.json` (`open_clip.create_model("local-dir:OUT")`).
    - transformers CLIP or SigLIP: a folder that `from_pretrained` reads, tokenizer included; likewise for
      sentence-transformers.
    - timm: a folder for `timm.create_model("local-dir:OUT", pretrained=True)`. torchvision: `model.pth`, a state dict.
    - `conse` and `parts`: `image_tower.pt2`, a PyTorch program (`torch.export.load`).

    Two towers come with `classifier.safetensors`, the matrix [classes, D] that heads and prompts were folded into.
    `holdfast.json` holds classes, temperature, preprocessing and the lines of code that put them together.
    """
    from holdfast.model.export import export_model
    from holdfast.model.folder import load_model, model_folder

    export_model(load_model(model_folder(model)), out)
    print(f"wrote {out}; holdfast.json in it says how to use it")
    if _kept_old(model):
        print(f"it is the old model, which the round handed back: holdfast report {model}")


def _kept_old(run: Path) -> bool:
    """Whether this is a round that hands back the old model."""
    from holdfast.artifacts import RunFolder
    from holdfast.files import read_json

    folder = RunFolder(run)
    return folder.state.is_file() and folder.result.is_file() and bool(read_json(folder.result).get("kept_old"))
