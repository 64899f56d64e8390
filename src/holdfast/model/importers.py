"""Models of other libraries as holdfast's own: `holdfast import`.

Every importer compares what it made with the source's own output on random pixels, and refuses where they differ.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from holdfast.data.images import INTERPOLATIONS, SQUASH
from holdfast.errors import HoldfastError, UserError
from holdfast.files import read_json, read_regular
from holdfast.model.classifier import Classifier
from holdfast.model.devsafety import has_heads, head_round, split_heads
from holdfast.model.image_towers import LIBRARIES, ImageTowers, create_model, find_head, head_rows
from holdfast.model.import_checks import MAX_FILE, compare, random_pixels, read_state, unreadable, without_dtype
from holdfast.model.import_text import projected, with_text_tower
from holdfast.model.openclip import load_folder, load_towers, towers_from_state
from holdfast.model.sources import CONFIG, MODULES, ModelSource, SourceKind, identify, sentence_modules
from holdfast.model.text_modules import SENTENCE_FILES, check_pair
from holdfast.model.towers import Preprocess, TwoTowers
from holdfast.model.transformers_towers import PREPROCESSOR, PROCESSOR, TOKENIZER_FILES, TransformersTowers, quiet

CLASS_TEMPERATURE = 0.05  # tau_0 of two towers, as for OpenCLIP's; the head of an image classifier brings its own scale
_IMAGENET_MEAN, _IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
_PILLOW = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers, as transformers writes them


@dataclass(frozen=True)
class ImportedModel:
    """A model, what it was, and what the user should know about it."""

    classifier: Classifier
    source: ModelSource
    notes: tuple[str, ...] = ()


def import_model(
    path: Path,
    *,
    architecture: str | None = None,
    classes: Sequence[str] | None = None,
    template: str = "a photo of a {}",
    text: Path | None = None,
) -> ImportedModel:
    """A classifier with the weights and outputs of another library's model.

    ``architecture`` is what a checkpoint file is of: an OpenCLIP name, ``timm:NAME`` or ``torchvision:NAME``. Two
    towers need no ``classes``: a round brings its own. Those of an image classifier are in the order of its outputs.
    ``text`` is the sentence-transformers folder of a text tower that takes the place of the model's own.
    """
    if text is not None:
        check_pair(path, text)
    source = identify(path)
    if source is None or not source.can_import:
        raise UserError(
            f"{path} is no model that can be imported",
            expected="a transformers or sentence-transformers folder of a CLIP or SigLIP model, a timm folder, an "
            "OpenCLIP folder, or a checkpoint file",
            found="" if source is None else source.words,
            do=("" if source is None else source.hint) if path.exists() else "check the path",
        )
    library, _, name = (architecture or "").partition(":")
    if source.kind == SourceKind.CHECKPOINT and not architecture:
        raise UserError(
            f"which architecture is {path} a checkpoint of?",
            expected="--architecture with an OpenCLIP name such as ViT-B-16, timm:NAME or torchvision:NAME",
        )
    if source.kind == SourceKind.CHECKPOINT and library in LIBRARIES:
        made, notes = _classifier_file(path, library, name, classes)
        return ImportedModel(made, source, notes)
    if source.kind != SourceKind.CHECKPOINT and architecture:
        raise UserError("--architecture is for checkpoint files", found=source.words, do="leave it out")
    if source.kind == SourceKind.TIMM:
        made, notes = _timm_folder(path, classes)
        return ImportedModel(made, source, notes)
    if source.kind == SourceKind.TRANSFORMERS:
        towers, notes = _transformers_folder(path)
    elif source.kind == SourceKind.SENTENCE_TRANSFORMERS:
        towers, notes = _sentence_transformers_folder(path)
    elif source.kind == SourceKind.CHECKPOINT and has_heads(state := read_state(path)):
        return _with_task_heads(source, str(architecture), state, classes or (), template)
    else:
        towers = load_towers(str(architecture), path) if source.kind == SourceKind.CHECKPOINT else load_folder(path)
        notes = ()
    if text is not None:
        assert isinstance(towers, TransformersTowers)
        towers = with_text_tower(towers, text)
        source = replace(source, words=f"{source.words}, with the text tower of a second one")
    return ImportedModel(_with_prompts(towers, classes or (), template), source, notes)


def _with_task_heads(
    source: ModelSource, architecture: str, state: dict[str, Tensor], classes: Sequence[str], template: str
) -> ImportedModel:
    """A checkpoint of the method's authors: OpenAI's CLIP, hence QuickGELU, with heads."""
    path = str(source.path)
    clip, factors = split_heads(state, path)
    towers = towers_from_state(architecture, clip, source.path, quick_gelu=True).float()
    classifier = _with_prompts(towers, classes, template)
    notes: tuple[str, ...] = ()
    if factors is not None:
        heads, notes = head_round(factors, classes, path)
        classifier.heads.append(heads)
    return ImportedModel(classifier, replace(source, words="a checkpoint with task-dependent heads"), notes)


def _with_prompts(towers: TwoTowers, classes: Sequence[str], template: str) -> Classifier:
    if template.count("{}") != 1:
        raise UserError("the template has no place for a class", expected="a sentence with {}", found=repr(template))
    return Classifier(towers, classes, [(template.replace("{}", name),) for name in classes], CLASS_TEMPERATURE)


# -- transformers -----------------------------------------------------------------------------------------------------


def _sentence_transformers_folder(folder: Path) -> tuple[TransformersTowers, tuple[str, ...]]:
    """The model of its first module; what says how the modules go together is kept for the way back."""
    place = sentence_modules(folder)[0][1]
    towers, notes = _transformers_folder(folder / place)
    files = {MODULES, *SENTENCE_FILES} | {f"{place}/{name}" for name in SENTENCE_FILES if place}
    kept = {name: read_json(folder / name) for name in sorted(files) if (folder / name).is_file()}
    towers.layout = {"path": place, "files": kept}
    return towers, notes


def _transformers_folder(folder: Path) -> tuple[TransformersTowers, tuple[str, ...]]:
    import transformers

    config = without_dtype(read_json(folder / CONFIG))
    kind: Any = transformers.CLIPModel if config["model_type"] == "clip" else transformers.SiglipModel
    try:
        with quiet():
            model, info = kind.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, dtype=torch.float32, output_loading_info=True
            )
    except Exception as error:  # the library raises what it likes for a file that is missing, cut short or another's
        raise unreadable(folder, error) from error
    missing = sorted({str(name) for key in ("missing_keys", "mismatched_keys") for name in info.get(key, ())})
    if missing:
        raise UserError(f"{folder} does not hold all weights of its model", found=", ".join(missing[:5]))
    files = {
        name: read_regular(folder / name, MAX_FILE)
        for name in (*TOKENIZER_FILES, PREPROCESSOR, PROCESSOR)
        if (folder / name).is_file()
    }
    size = int(model.config.vision_config.image_size)
    preprocess, notes = _transformers_view(_image_processor(folder), size)
    model = model.eval()
    source = copy.deepcopy(model)
    towers = TransformersTowers(config, preprocess, files, model)
    pixels = random_pixels(size)
    tokens = towers.tokenize(["a photo of a dog", "a much longer sentence about the weather on a glacier"])
    compare(
        lambda: towers.image_features(pixels), lambda: source.get_image_features(pixels).pooler_output, "image features"
    )
    compare(lambda: projected(towers, tokens), lambda: source.get_text_features(tokens).pooler_output, "text features")
    return towers, notes


def _image_processor(folder: Path) -> dict[str, Any]:
    """How pictures are prepared: a file of its own, or a part of the processor's; empty where neither is there."""
    if (folder / PREPROCESSOR).is_file():
        return read_json(folder / PREPROCESSOR)
    record: Any = read_json(folder / PROCESSOR) if (folder / PROCESSOR).is_file() else {}
    found: Any = record.get("image_processor") if isinstance(record, dict) else None  # pyright: ignore[reportUnknownMemberType]
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _transformers_view(record: dict[str, Any], size: int) -> tuple[Preprocess, tuple[str, ...]]:
    word = _PILLOW.get(record.get("resample", 3), "bicubic")
    edge = record.get("size")
    edge = edge.get("shortest_edge") if isinstance(edge, dict) else edge  # pyright: ignore[reportUnknownVariableType]
    squash = bool(record) and not record.get("do_center_crop", False)
    view = Preprocess.from_json(
        {
            "size": size,
            "mean": record.get("image_mean") or [0.48145466, 0.4578275, 0.40821073],
            "std": record.get("image_std") or [0.26862954, 0.26130258, 0.27577711],
            "interpolation": f"{word}:{SQUASH}" if squash else _framed(word, edge, size),
        }
    )
    if not record:
        return view, (f"there is no {PREPROCESSOR}: pictures are normalised as OpenAI's CLIP expects them",)
    return view, ()


def _framed(word: str, edge: Any, size: int) -> str:
    """An interpolation whose crop is taken out of a picture with this shorter side."""
    return f"{word}:{edge}" if isinstance(edge, int) and edge > size else word


# -- timm and torchvision ---------------------------------------------------------------------------------------------


def _timm_folder(folder: Path, classes: Sequence[str] | None) -> tuple[Classifier, tuple[str, ...]]:
    record = read_json(folder / CONFIG)
    names = ("model.safetensors", "pytorch_model.bin")
    weights = next((folder / name for name in names if (folder / name).is_file()), None)
    if weights is None:
        raise UserError(f"{folder} holds no weights", expected=" or ".join(names))
    return _image_classifier(
        weights,
        "timm",
        record["architecture"],
        record.get("model_args") or {},
        classes or _label_names(record),
        record.get("pretrained_cfg") or {},
    )


def _label_names(record: dict[str, Any]) -> list[str] | None:
    names = record.get("label_names")
    if isinstance(names, dict):
        names = [names[key] for key in sorted(names, key=int)]  # pyright: ignore[reportUnknownVariableType]
    return [str(name) for name in names] if isinstance(names, list) else None  # pyright: ignore[reportUnknownVariableType]


def _classifier_file(
    path: Path, library: str, architecture: str, classes: Sequence[str] | None
) -> tuple[Classifier, tuple[str, ...]]:
    return _image_classifier(path, library, architecture, {}, classes, {})


def _image_classifier(
    weights: Path,
    library: str,
    architecture: str,
    arguments: dict[str, Any],
    classes: Sequence[str] | None,
    view: dict[str, Any],
) -> tuple[Classifier, tuple[str, ...]]:
    state = read_state(weights)
    with torch.device("meta"):  # shapes alone: the name of its last layer tells the number of classes
        head_path, _ = find_head(blank := _build(library, architecture, arguments, 1000), 1000)
    rows = state.get(f"{head_path}.weight")
    if rows is None or rows.dim() != 2:
        raise UserError(
            f"{weights} holds the weights of another architecture",
            expected=f"those of {library}:{architecture}, with a last layer {head_path}",
            found=", ".join(list(state)[-3:]),
        )
    known = {} if library == "timm" else _torchvision_view(architecture)
    names = _class_names(classes, known.get("categories"), len(rows))
    source = _build(library, architecture, arguments, len(rows)).eval()
    try:
        source.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(
            f"{weights} holds the weights of another architecture",
            expected=f"those of {library}:{architecture}",
            found=" ".join(str(error).split())[:200],
        ) from error
    source = source.float()
    record = {**cast("dict[str, Any]", getattr(blank, "pretrained_cfg", None) or {}), **known, **view}
    preprocess, notes = _classifier_view(record, arguments)
    head = source.get_submodule(head_path)
    assert isinstance(head, nn.Linear)
    towers = ImageTowers(library, architecture, arguments, names, preprocess, copy.deepcopy(source))
    classifier = Classifier(towers, names, [(name,) for name in names], 1.0)
    classifier.linear = nn.Parameter(head_rows(head))
    pixels = random_pixels(preprocess.size)
    compare(lambda: classifier.logits(pixels), lambda: source(pixels), "logits")
    return classifier.eval(), notes


def _build(library: str, architecture: str, arguments: dict[str, Any], classes: int) -> nn.Module:
    try:
        return create_model(library, architecture, arguments, classes)
    except ModuleNotFoundError as error:
        raise UserError(f"{library} is not installed", do=f"pip install {library}") from error
    except HoldfastError:
        raise
    except Exception as error:
        line = (str(error).splitlines() or [repr(error)])[0][:200]
        raise UserError(f"{library} has no classifier {architecture!r}", found=line) from error


def _class_names(given: Sequence[str] | None, known: Sequence[str] | None, count: int) -> list[str]:
    names = list(given or ())
    if not names and known is not None and len(known) == count:
        names = list(known)
    if not names:
        raise UserError(
            f"the classifier's {count} classes have no names",
            expected="--classes FILE with one name a line, in the order of the outputs",
        )
    if len(names) != count:
        raise UserError(
            "the number of class names is not that of the classifier's outputs",
            expected=f"{count} names",
            found=f"{len(names)}",
        )
    return names


def _torchvision_view(architecture: str) -> dict[str, Any]:
    """Preprocessing and classes of torchvision's own weights of an architecture, where it has some."""
    from torchvision import models

    try:
        entry = models.get_model_weights(architecture)["DEFAULT"]
        view = entry.transforms()
        size, edge = int(view.crop_size[0]), int(view.resize_size[0])
    except (ValueError, KeyError, AttributeError, IndexError, TypeError):
        return {}
    return {
        "input_size": (3, size, size),
        "mean": view.mean,
        "std": view.std,
        "interpolation": view.interpolation.value,
        "resize_edge": edge,
        "categories": entry.meta.get("categories"),
    }


def _classifier_view(record: dict[str, Any], arguments: dict[str, Any]) -> tuple[Preprocess, tuple[str, ...]]:
    size = arguments.get("img_size") or tuple(record.get("input_size") or (3, 224, 224))[-1]
    size = size[-1] if isinstance(size, list | tuple) else size  # pyright: ignore[reportUnknownVariableType]
    word = str(record.get("interpolation"))
    word = word if word in INTERPOLATIONS else "bilinear"
    share, mode = float(record.get("crop_pct") or 1.0), record.get("crop_mode")
    edge = record.get("resize_edge") or math.floor(size / share)
    view = Preprocess.from_json(
        {
            "size": size,
            "mean": record.get("mean") or _IMAGENET_MEAN,
            "std": record.get("std") or _IMAGENET_STD,
            "interpolation": f"{word}:{SQUASH}" if mode == SQUASH and edge == size else _framed(word, edge, size),
        }
    )
    if mode in (None, "center") or (mode == SQUASH and edge == size):
        return view, ()
    return view, (f"the source frames pictures by {mode!r}, which holdfast does not know: it crops the centre",)
