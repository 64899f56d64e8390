"""Towers from their name or description: any architecture OpenCLIP knows, weights by tag or from a local file.

OpenCLIP itself (and with it torchvision, timm and transformers: twice as long to import as torch) is imported when one
of its towers is built.
"""

from __future__ import annotations

import copy
import logging
import os
import pickle
import zipfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor

from holdfast.data.images import SQUASH
from holdfast.errors import HoldfastError, UserError, nearest
from holdfast.files import read_json
from holdfast.model.conse import ConseTowers
from holdfast.model.devsafety import has_heads
from holdfast.model.image_towers import ImageTowers
from holdfast.model.pair_towers import PairTowers
from holdfast.model.parts import PartTowers
from holdfast.model.sources import OPENCLIP_DESCRIPTION
from holdfast.model.towers import Preprocess, TwoTowers
from holdfast.model.transformers_towers import TransformersTowers

if TYPE_CHECKING:
    from holdfast.model.openclip_towers import OpenClipTowers

# Small enough for two CPU cores, whole in every other respect: OpenCLIP's own classes and its full vocabulary. The
# token table is nearly all of it, and what an optimizer step costs; hence the narrow text tower.
TINY: dict[str, Any] = {
    "embed_dim": 64,
    "vision_cfg": {"image_size": 32, "patch_size": 8, "width": 64, "head_width": 32, "layers": 2},
    "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
}
ARCHITECTURES: dict[str, dict[str, Any]] = {"tiny": TINY}  # besides those that OpenCLIP knows


def architecture_config(architecture: str) -> dict[str, Any]:
    """OpenCLIP's configuration of an architecture, or ours."""
    if architecture in ARCHITECTURES:
        return copy.deepcopy(ARCHITECTURES[architecture])
    import open_clip

    try:
        config = open_clip.get_model_config(architecture.replace("/", "-") if ":" not in architecture else architecture)
    except Exception as error:
        raise UserError(f"the architecture {architecture!r} could not be read", found=str(error)) from error
    if config is None:
        known = [*ARCHITECTURES, "parts", "conse", *open_clip.list_models()]
        raise UserError(f"unknown architecture {architecture!r}", do=nearest(architecture, known))
    return config


def load_towers(architecture: str, weights: str | Path | None = None, *, seed: int = 0) -> TwoTowers:
    """Towers of an architecture with the given weights.

    ``weights`` is a local file (safetensors, or a torch file that holds nothing but tensors), an OpenCLIP tag, or None
    for random weights drawn from ``seed``. The architectures ``"parts"`` and ``"conse"`` are those of
    :mod:`holdfast.model.parts` and :mod:`holdfast.model.conse`.
    """
    if architecture == "parts" or architecture.startswith("parts-"):
        return PartTowers.load(architecture, weights, seed=seed)
    if architecture == "conse" or architecture.startswith("conse-"):
        return ConseTowers.load(architecture, weights, seed=seed)
    from holdfast.model.openclip_towers import OpenClipTowers, create_model

    config = architecture_config(architecture)
    preprocess: dict[str, Any] = {}
    path: Path | None = None
    if weights is not None and os.path.isfile(weights):
        path = Path(weights)
    elif weights is not None:
        path, preprocess = _fetch(architecture, str(weights), config)
    with torch.random.fork_rng(devices=[]), _quiet():
        torch.manual_seed(seed)
        try:
            model = create_model(config)
        except Exception as error:
            raise UserError(f"{architecture} could not be built", found=_line(error)) from error
    if path is not None:
        _load_file(model, path, architecture)
    return OpenClipTowers(architecture, config, _preprocess(model, preprocess), model)


def towers_from_state(architecture: str, state: dict[str, Tensor], path: Path, *, quick_gelu: bool) -> OpenClipTowers:
    """Towers with weights under OpenCLIP's names; the activation belongs to the weights, whatever the name says."""
    from holdfast.model.openclip_towers import OpenClipTowers, create_model

    config = architecture_config(architecture) | {"quick_gelu": quick_gelu}
    with torch.random.fork_rng(devices=[]), _quiet():
        model = create_model(config)
    _check_positions(model, state, path, architecture)
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise _another_architecture(path, architecture, error) from error
    return OpenClipTowers(architecture, config, _preprocess(model, {}), model)


def load_folder(folder: Path) -> OpenClipTowers:
    """The towers of a folder as OpenCLIP writes it (``local-dir:FOLDER``): configuration, weights, no more."""
    from holdfast.model.openclip_towers import OpenClipTowers, create_model

    record = read_json(folder / OPENCLIP_DESCRIPTION)
    if not isinstance(record, dict) or not isinstance(record.get("model_cfg"), dict):
        raise UserError(f"{folder / OPENCLIP_DESCRIPTION} describes no model", expected="a table model_cfg")
    config, view = record["model_cfg"], record.get("preprocess_cfg") or {}
    names = ("open_clip_model.safetensors", "open_clip_pytorch_model.safetensors", "open_clip_pytorch_model.bin")
    weights = next((folder / name for name in names if (folder / name).is_file()), None)
    if weights is None:
        raise UserError(f"{folder} holds no weights", expected=" or ".join(names))
    with torch.random.fork_rng(devices=[]), _quiet():
        try:
            model = create_model(config)
        except Exception as error:
            raise UserError(f"{folder} describes a model that could not be built", found=_line(error)) from error
    name = _name_of(config)
    _load_file(model, weights, name)
    return OpenClipTowers(name, config, _preprocess(model, view), model)


def _name_of(config: dict[str, Any]) -> str:
    """The architecture with this configuration; one that nobody has named must have OpenCLIP's own tokenizer."""
    import open_clip

    known = (name for name in open_clip.list_models() if open_clip.get_model_config(name) == config)
    name = next(known, None)
    text = config.get("text_cfg") or {}
    if name is None and (text.get("hf_tokenizer_name") or text.get("tokenizer_kwargs")):
        raise UserError(
            "the folder's model has a tokenizer of another library, and its configuration is none that OpenCLIP knows",
            do="import its weights with --architecture NAME",
        )
    return name or "custom"


@contextmanager
def _quiet() -> Generator[None]:
    """OpenCLIP logs each step of a build through the root logger; what goes wrong arrives as an exception anyway."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _fetch(architecture: str, tag: str, config: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The file behind an OpenCLIP tag, and the preprocessing it was trained with."""
    import open_clip

    name = architecture.replace("/", "-")
    found = cast("dict[str, Any] | None", open_clip.get_pretrained_cfg(name, tag))
    if not found:
        tags = open_clip.list_pretrained_tags_by_model(name)
        raise UserError(
            f"{tag!r} is neither a file nor a set of weights that OpenCLIP knows for {architecture}",
            do=nearest(tag, tags),
        )
    # The activation belongs to the weights: OpenAI's were trained with QuickGELU, whatever the architecture's name.
    config["quick_gelu"] = bool(found.get("quick_gelu", False))
    try:
        with _quiet():
            return Path(open_clip.download_pretrained(found)), found
    except Exception as error:
        raise UserError(
            f"the weights {tag!r} of {architecture} could not be fetched",
            found=(str(error).splitlines() or [repr(error)])[0],
            do="check the network, or give a local file",
        ) from error


def _load_file(model: Any, path: Path, architecture: str) -> None:
    import open_clip
    from open_clip.factory import load_state_dict

    unreadable = (SafetensorError, pickle.UnpicklingError, EOFError, zipfile.BadZipFile, OSError, UnicodeDecodeError)
    try:
        with _quiet():
            state = cast("dict[str, Any]", load_state_dict(str(path), weights_only=True))
    except (*unreadable, RuntimeError, ValueError, KeyError, StopIteration, AttributeError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read as weights",
            expected="a whole safetensors file, or a torch file of tensors",
            found=(str(error).splitlines() or [type(error).__name__])[0],
            do="the file is truncated, or no checkpoint: fetch it again",
        ) from error
    if has_heads(state):
        raise UserError(
            f"{path} is a checkpoint with task-dependent heads",
            do=f"make a model folder of it: holdfast import {path} OUT --architecture {architecture} --classes FILE",
        )
    _check_positions(model, state, path, architecture)
    del state
    try:
        with _quiet():
            open_clip.load_checkpoint(model, str(path), strict=True, weights_only=True)
    except HoldfastError:
        raise
    except Exception as error:
        raise _another_architecture(path, architecture, error) from error


def _another_architecture(path: Path, architecture: str, error: Exception) -> UserError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return UserError(
        f"{path} holds the weights of another architecture",
        expected=f"those of {architecture}",
        found=(" ".join(lines[1:2]) or repr(error))[:300],
        do="name the architecture that the checkpoint was made with",
    )


def _check_positions(model: Any, state: dict[str, Any], path: Path, architecture: str) -> None:
    """Positions of texts are not stretched to another length, as OpenCLIP would: every feature would be another."""
    own = getattr(getattr(model, "text", model), "positional_embedding", None)
    given = state.get("positional_embedding", state.get("text.positional_embedding"))
    if isinstance(own, Tensor) and isinstance(given, Tensor) and given.shape != own.shape:
        raise UserError(
            f"{path} holds the positions of another text tower",
            expected=f"positions of {' x '.join(map(str, own.shape))}, as {architecture} has them",
            found=" x ".join(map(str, given.shape)) or "a single number",
            do="name the architecture that the checkpoint was made with",
        )


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [repr(error)])[0][:200]


def _preprocess(model: Any, overrides: dict[str, Any]) -> Preprocess:
    import open_clip

    size = model.visual.image_size
    height, width = size if isinstance(size, tuple | list) else (size, size)
    if height != width:
        raise UserError("only square pictures are supported", found=f"{height} x {width}")
    return Preprocess.from_json(
        {
            "size": int(height),
            "mean": overrides.get("mean") or open_clip.OPENAI_DATASET_MEAN,
            "std": overrides.get("std") or open_clip.OPENAI_DATASET_STD,
            "interpolation": (overrides.get("interpolation") or "bicubic")
            + (f":{SQUASH}" if overrides.get("resize_mode") == SQUASH else ""),
        }
    )


def _build_openclip(spec: dict[str, Any], assets: dict[str, bytes]) -> TwoTowers:
    from holdfast.model.openclip_towers import OpenClipTowers

    del assets
    context = spec["config"]["text_cfg"].get("context_length", 77)
    if not isinstance(spec["architecture"], str) or type(context) is not int or context < 1:
        raise ValueError(f"texts of {context!r} tokens for {spec['architecture']!r}")
    with torch.random.fork_rng(devices=[]), _quiet():
        return OpenClipTowers(spec["architecture"], spec["config"], Preprocess.from_json(spec["preprocess"]))


TOWERS: dict[str, Callable[[dict[str, Any], dict[str, bytes]], TwoTowers]] = {
    "openclip": _build_openclip,
    "parts": PartTowers.from_spec,
    "conse": ConseTowers.from_spec,
    "transformers": TransformersTowers.from_spec,
    "pair": PairTowers.from_spec,
    "image": ImageTowers.from_spec,
}


def build_towers(spec: dict[str, Any], assets: dict[str, bytes] | None = None) -> TwoTowers:
    """Rebuild towers from :meth:`TwoTowers.spec`; their weights are loaded afterwards."""
    kind = str(spec.get("kind", ""))
    if kind not in TOWERS:
        raise UserError(f"unknown kind of towers {kind!r}", do=nearest(kind, TOWERS))
    try:
        return TOWERS[kind](spec, assets or {})
    except HoldfastError:
        raise
    except Exception as error:  # whatever a library makes of a description that is not one
        raise UserError(
            f"towers of kind {kind!r} cannot be built from their description",
            found=f"{type(error).__name__}: {_line(error)}",
        ) from error
