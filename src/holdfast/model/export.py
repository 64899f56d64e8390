"""A model in the format that it came from, so that whatever serves it stays as it is."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from holdfast.data.images import SQUASH
from holdfast.errors import UserError
from holdfast.files import write_json
from holdfast.model.classifier import Classifier
from holdfast.model.folder import export_openclip, model_fingerprint, new_folder
from holdfast.model.image_towers import ImageTowers
from holdfast.model.pair_towers import PairTowers
from holdfast.model.sentence_towers import SentenceTowers
from holdfast.model.transformers_towers import TransformersTowers, quiet


def export_model(classifier: Classifier, folder: Path) -> None:
    """Write what reproduces the logits without holdfast: a transformers, timm, torchvision or OpenCLIP model.

    Towers of our own (``parts``, ``conse``) came from no library: their image tower becomes a PyTorch program.
    """
    towers = classifier.towers
    if isinstance(towers, ImageTowers):
        _export_image(classifier, towers, folder)
    elif not classifier.classes:
        raise UserError("the model has no classes to export", do="develop it first, or import it with --classes FILE")
    elif isinstance(towers, TransformersTowers):
        _export_transformers(classifier, towers, folder)
    elif isinstance(towers, PairTowers):
        _export_pair(classifier, towers, folder)
    elif isinstance(towers, SentenceTowers):
        _export_program(classifier, towers, folder)
    else:
        export_openclip(classifier, folder)


def _export_transformers(classifier: Classifier, towers: TransformersTowers, folder: Path) -> None:
    """``from_pretrained(FOLDER)`` finds model, tokenizer and preprocessing; the folded classifier lies beside them."""
    with new_folder(folder) as temporary:
        _write_transformers(towers, temporary)
        _write_classifier(classifier, _how(towers, "FOLDER"), temporary)


def _export_pair(classifier: Classifier, towers: PairTowers, folder: Path) -> None:
    """Two folders, ``image`` and ``text``, as they came; the folded classifier lies beside them."""
    with new_folder(folder) as temporary:
        _write_transformers(towers.image, temporary / "image")
        _write_text(towers, temporary / "text")
        _write_classifier(classifier, _how(towers.image, "FOLDER/image"), temporary)


def _write_transformers(towers: TransformersTowers, folder: Path) -> None:
    layout = towers.layout
    inside = folder / Path(layout["path"]).name if layout else folder
    inside.mkdir(parents=True, exist_ok=True)
    with quiet():
        towers.source_model().save_pretrained(inside)
    for name, content in towers.assets().items():
        (inside / name).write_bytes(content)
    for name, content in (layout["files"] if layout else {}).items():
        write_json((inside if "/" in name else folder) / Path(name).name, content)


def _write_text(towers: PairTowers, folder: Path) -> None:
    layout = towers.settings.layout
    # Names come from a file that somebody may have changed: none of them leads out of the folder.
    encoder, dense = folder / Path(layout["encoder"]).name, folder / Path(layout["dense"]).name
    for place in (encoder, dense):
        place.mkdir(parents=True, exist_ok=True)
    with quiet():
        copy.deepcopy(towers.sentence).cpu().save_pretrained(encoder)
    for name, content in towers.text_files().items():
        (encoder / Path(name).name).write_bytes(content)
    for name, content in layout["files"].items():
        place = folder / Path(name).parent.name
        place.mkdir(exist_ok=True)
        write_json(place / Path(name).name, content)
    save_file(towers.dense_state(), dense / "model.safetensors")


def _write_classifier(classifier: Classifier, how: list[str], folder: Path) -> None:
    with torch.no_grad():
        matrix = classifier.class_matrix().detach().cpu().contiguous()
    save_file({"classifier": matrix}, folder / "classifier.safetensors")
    write_json(folder / "holdfast.json", _record(classifier, list(classifier.classes), how))


def _how(towers: TransformersTowers, folder: str) -> list[str]:
    matrix = "matrix = safetensors.torch.load_file('classifier.safetensors')['classifier']"
    if towers.layout is not None:
        features = "features = model.encode(pictures, convert_to_tensor=True, normalize_embeddings=True)"
        model = f"model = sentence_transformers.SentenceTransformer('{folder}')"
    else:
        features = "features = torch.nn.functional.normalize(model.get_image_features(images).pooler_output, dim=-1)"
        model = f"model = transformers.AutoModel.from_pretrained('{folder}')"
    return [model, matrix, features, "logits = features @ matrix.T / class_temperature"]


class _ImageTower(nn.Module):
    """The image tower alone, as a module that can be traced."""

    def __init__(self, towers: SentenceTowers) -> None:
        super().__init__()
        self.towers = towers

    def forward(self, images: Tensor) -> Tensor:
        return self.towers.image_features(images)


def _export_program(classifier: Classifier, towers: SentenceTowers, folder: Path) -> None:
    """``image_tower.pt2`` takes any number of pictures; the folded classifier lies beside it."""
    size = towers.preprocess.size
    tower = _ImageTower(copy.deepcopy(towers).cpu().requires_grad_(False))
    with torch.no_grad():
        pictures = torch.zeros(2, 3, size, size, dtype=towers.projection.dtype)
        batch = torch.export.Dim("batch", min=1)
        program = torch.export.export(tower, (pictures,), dynamic_shapes={"images": {0: batch}})
    with new_folder(folder) as temporary:
        torch.export.save(program, temporary / "image_tower.pt2")
        how = [
            "tower = torch.export.load('image_tower.pt2').module()",
            "matrix = safetensors.torch.load_file('classifier.safetensors')['classifier']",
            "features = torch.nn.functional.normalize(tower(images), dim=-1)",
            "logits = features @ matrix.T / class_temperature",
        ]
        _write_classifier(classifier, how, temporary)


def _export_image(classifier: Classifier, towers: ImageTowers, folder: Path) -> None:
    """Weights under the library's own names, classes in the source's order."""
    assert classifier.linear is not None
    classes = [name for name in towers.source_classes if name in classifier.classes]
    rows = classifier.linear[[classifier.class_index(name) for name in classes]] / classifier.class_temperature
    state = {name: value.detach().cpu().contiguous() for name, value in towers.model.state_dict().items()}
    state |= towers.head_state(rows)
    settings = "".join(f", {name}={value!r}" for name, value in towers.arguments.items())
    with new_folder(folder) as temporary:
        if towers.library == "timm":
            save_file(state, temporary / "model.safetensors")
            write_json(temporary / "config.json", _timm_config(towers, classes))
            how = ["model = timm.create_model('local-dir:FOLDER', pretrained=True).eval()", "logits = model(images)"]
        else:
            torch.save(state, temporary / "model.pth")
            how = [
                f"model = torchvision.models.get_model({towers.architecture!r}, num_classes={len(classes)}{settings})",
                "model.load_state_dict(torch.load('model.pth', weights_only=True)); model.eval()",
                "logits = model(images)",
            ]
        write_json(temporary / "holdfast.json", _record(classifier, classes, how))


def _timm_config(towers: ImageTowers, classes: list[str]) -> dict[str, Any]:
    view = towers.preprocess
    word, _, framing = view.interpolation.partition(":")
    return {
        "architecture": towers.architecture,
        "num_classes": len(classes),
        "label_names": classes,
        **({"model_args": towers.arguments} if towers.arguments else {}),
        "pretrained_cfg": {
            "input_size": [3, view.size, view.size],
            "mean": list(view.mean),
            "std": list(view.std),
            "interpolation": word,
            "crop_pct": view.size / int(framing) if framing.isdigit() else 1.0,
            "crop_mode": SQUASH if framing == SQUASH else "center",
            "num_classes": len(classes),
        },
    }


def _record(classifier: Classifier, classes: list[str], how: list[str]) -> dict[str, Any]:
    record = {
        "classes": classes,
        "preprocess": classifier.preprocess.to_json(),
        "fingerprint": model_fingerprint(classifier),
        "how": how,
    }
    if classifier.linear is not None:
        return record
    return {
        **record,
        "prompts": [list(group) for group in classifier.prompts],
        "class_temperature": classifier.class_temperature,
    }
