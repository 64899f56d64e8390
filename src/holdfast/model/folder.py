"""The model folder: ``model.safetensors`` + ``model.json``, and what a tower needs besides (a tokenizer's file).

The fingerprint covers what the model computes: its description, every tensor and every asset. Parent, notes and the
record of the images that it was made with (``seen.parquet``, :mod:`holdfast.data.seen`) are written beside it and are
not part of it, so the same model made twice has one fingerprint.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from holdfast.data.images import SQUASH
from holdfast.data.seen import Seen, Use, read_seen
from holdfast.data.task import Role
from holdfast.errors import FaultError, UserError
from holdfast.files import (
    fingerprint_bytes,
    fingerprint_json,
    image_key,
    read_json,
    read_regular,
    where_instead,
    write_json,
)
from holdfast.model.classifier import Classifier
from holdfast.model.description import check_description
from holdfast.model.heads import TaskHeads
from holdfast.model.openclip import build_towers, load_towers
from holdfast.model.sources import DESCRIPTION, not_a_model_folder
from holdfast.model.towers import TwoTowers

FORMAT = 1
WEIGHTS = "model.safetensors"


def is_model_folder(path: str | Path) -> bool:
    """Whether a path is a model folder."""
    return os.path.isfile(Path(path) / DESCRIPTION)


def model_folder(path: Path) -> Path:
    """The model folder that a path means: itself, or the one inside a run folder."""
    inside = path / "model"
    return inside if not is_model_folder(path) and is_model_folder(inside) else path


def save_model(
    classifier: Classifier,
    folder: Path,
    parent: str | None = None,
    extra: Mapping[str, Any] | None = None,
    seen: Seen | None = None,
) -> str:
    """Write a model folder in one step and return its fingerprint.

    ``seen`` are the images that it was made with, where they are known.

    A folder that holds this very model already is left as it is; one that holds anything else is refused.
    """
    state = _state(classifier)
    assets = classifier.towers.assets()
    description = _describe(classifier)
    fingerprint = _fingerprint(description, state, assets)
    if _holds_already(folder, fingerprint):
        return fingerprint
    with new_folder(folder) as temporary:
        save_file(state, temporary / WEIGHTS)
        for name, content in assets.items():
            (temporary / name).write_bytes(content)
        record = {
            **description,
            "fingerprint": fingerprint,
            "weights_bytes": (temporary / WEIGHTS).stat().st_size,
            "assets": sorted(assets),
            "parent": parent,
            "extra": dict(extra or {}),
            "seen": None if seen is None else seen.write(temporary),
        }
        write_json(temporary / DESCRIPTION, record)
    return fingerprint


def load_model(folder: Path) -> Classifier:
    """Read a model folder back to identical logits; a truncated or changed file is a clear error."""
    record, state, assets = _read(folder)
    towers = build_towers(record["towers"], assets)
    _check_heads(folder, record["heads"], towers, state)
    heads = TaskHeads.from_spec(towers.embed_dim, towers.text_width, record["heads"])
    classifier = Classifier(towers, record["classes"], record["prompts"], record["class_temperature"], heads)
    if record["linear"]:
        classifier.linear = nn.Parameter(torch.zeros(len(classifier.classes), towers.embed_dim))
    try:
        # assign: a model saved in another float type comes back in it. Parameters keep their own requires_grad.
        classifier.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise UserError(
            f"{folder} does not fit this version's code for its architecture",
            found=" ".join(str(error).split())[:200],
            do="load it with the version that wrote it",
        ) from error
    return classifier.eval()


def read_description(folder: Path) -> dict[str, Any]:
    """``model.json``: classes, prompts, towers, fingerprint, parent, extra. No weights are read."""
    if not is_model_folder(folder):
        message = f"{folder} is not a model folder"
        otherwise = UserError(
            message,
            expected=f"a folder with {DESCRIPTION} and {WEIGHTS}",
            do=where_instead(folder, "make one with `holdfast tune`, `holdfast develop` or `holdfast import`"),
        )
        raise not_a_model_folder(folder, message, otherwise=otherwise)
    record: dict[str, Any] = read_json(folder / DESCRIPTION)
    if not isinstance(record, dict) or record.get("format") != FORMAT:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UserError(f"{folder / DESCRIPTION} has a format that this version does not read", expected=str(FORMAT))
    check_description(record, folder / DESCRIPTION)
    return record


def images_seen(folder: Path) -> Seen:
    """The images that the model in a folder was made with, as far as they are known."""
    return read_seen(folder, read_description(folder))


def sealed_from(folder: Path) -> set[str]:
    """Keys of the images that are sealed in the rounds of a model: by its own record, or by its run's roles."""
    sealed = images_seen(folder).keys(Use.SEALED)
    roles = folder.resolve().parent / "roles.parquet"
    if roles.is_file():  # a run folder, perhaps of a version that wrote no record into the model's
        table = pq.read_table(roles)
        names = [name for name in ("example_id", "picture") if name in table.column_names]
        for row in table.select([*names, "role"]).to_pylist():
            if row["role"] == Role.SEALED:
                sealed.update(image_key(row[name]) for name in names)
    return sealed


def model_fingerprint(model: Path | Classifier) -> str:
    """Fingerprint of a model in memory, or of a folder, whose files are read and checked against it."""
    if isinstance(model, Classifier):
        return _fingerprint(_describe(model), _state(model), model.towers.assets())
    record, _, _ = _read(model)
    return record["fingerprint"]


def start_model(
    architecture: str,
    weights: str | Path | None,
    classes: Sequence[str],
    prompts: Sequence[Sequence[str]],
    class_temperature: float,
    *,
    seed: int = 0,
) -> Classifier:
    """The classifier that development starts from.

    ``weights`` is what :func:`holdfast.model.openclip.load_towers` takes, or a model folder: then its towers and
    heads are used and ``architecture`` is not.
    """
    if weights is not None and is_model_folder(weights):
        return load_model(Path(weights)).with_classes(classes, prompts, class_temperature)
    return Classifier(load_towers(architecture, weights, seed=seed), classes, prompts, class_temperature)


def export_openclip(classifier: Classifier, folder: Path) -> None:
    """Write what reproduces the logits without holdfast.

    - ``open_clip_model.safetensors``: a plain OpenCLIP checkpoint (for the image tower and plain texts);
    - ``open_clip_config.json``: its architecture, for ``open_clip.create_model("local-dir:FOLDER")``;
    - ``classifier.safetensors``: the folded matrix ``classifier`` [K, D], heads and prompts included;
    - ``holdfast.json``: classes, tau_0, preprocessing, and how to put them together.
    """
    from holdfast.model.openclip_towers import OpenClipTowers

    towers = classifier.towers
    if not isinstance(towers, OpenClipTowers):
        raise UserError("only OpenCLIP towers can be exported as an OpenCLIP checkpoint", found=type(towers).__name__)
    with torch.no_grad():
        matrix = classifier.class_matrix().detach().cpu().contiguous()
    view = towers.preprocess
    word, _, framing = view.interpolation.partition(":")
    mode = SQUASH if framing == SQUASH else "shortest"
    preprocess = {**view.to_json(), "interpolation": word, "mode": "RGB", "resize_mode": mode, "fill_color": 0}
    with new_folder(folder) as temporary:
        save_file(_independent(towers.open_clip_state()), temporary / "open_clip_model.safetensors")
        save_file({"classifier": matrix}, temporary / "classifier.safetensors")
        config = {"model_cfg": towers.config, "preprocess_cfg": preprocess}
        write_json(temporary / "open_clip_config.json", config)
        write_json(
            temporary / "holdfast.json",
            {
                "architecture": towers.architecture,
                "quick_gelu": bool(towers.config.get("quick_gelu", False)),
                "classes": list(classifier.classes),
                "prompts": [list(group) for group in classifier.prompts],
                "class_temperature": classifier.class_temperature,
                "preprocess": view.to_json(),
                "fingerprint": model_fingerprint(classifier),
                "how": [
                    "model = open_clip.create_model('local-dir:FOLDER')",
                    "matrix = safetensors.torch.load_file('classifier.safetensors')['classifier']",
                    "logits = model.encode_image(images, normalize=True) @ matrix.T / class_temperature",
                ],
            },
        )


@contextmanager
def new_folder(folder: Path) -> Generator[Path]:
    """A temporary folder beside ``folder`` that takes its name when the block ends well, and vanishes otherwise."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            f"{folder} exists already", expected="a path that is free, or an empty folder", do="choose another"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    except OSError as error:
        raise _not_writable(folder, error) from error
    try:
        yield temporary
        _sync(temporary)
        temporary.chmod(0o755)
        os.replace(temporary, folder)  # an empty folder of that name is replaced, a full one is not
    except OSError as error:
        raise _not_writable(folder, error) from error
    except SafetensorError as error:
        raise UserError(f"cannot write {folder}", found=str(error), do="free some space") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _not_writable(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write {folder}",
        found=error.strerror or str(error),
        do="free some space or choose a folder that can be written; what was there before is untouched",
    )


def _sync(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _holds_already(folder: Path, fingerprint: str) -> bool:
    if not is_model_folder(folder):
        return False
    return model_fingerprint(folder) == fingerprint


def _describe(classifier: Classifier) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "classes": list(classifier.classes),
        "prompts": [list(group) for group in classifier.prompts],
        "class_temperature": classifier.class_temperature,
        "linear": classifier.linear is not None,
        "heads": classifier.heads.spec(),
        "towers": classifier.towers.spec(),
    }


def _check_heads(
    folder: Path, heads: Sequence[Mapping[str, Any]], towers: TwoTowers, state: Mapping[str, Tensor]
) -> None:
    """The heads' weights have the shapes that the description says; known before room is made for them."""
    for place, head in enumerate(heads):
        for name, width in (("U", towers.embed_dim), ("V", towers.text_width)):
            expected, found = [len(head["classes"]), width, head["rank"]], state.get(f"heads._rounds.{place}.{name}")
            if found is None or list(found.shape) != expected:
                raise UserError(
                    f"{folder}: the heads of round {place + 1} are not those of the description",
                    expected=f"{name} of {' x '.join(map(str, expected))}",
                    found="none" if found is None else " x ".join(map(str, found.shape)),
                    do="copy the model folder again from where it was made",
                )


_MAX_ASSET = 1 << 28  # bytes; a tokenizer's file has some hundred thousand
_DESCRIBED = ("format", "classes", "prompts", "class_temperature", "linear", "heads", "towers")


def _state(classifier: Classifier) -> dict[str, Tensor]:
    return _independent(classifier.state_dict())


def _independent(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """CPU tensors that share no memory, as safetensors asks."""
    seen: set[int] = set()
    result: dict[str, Tensor] = {}
    for name, value in state.items():
        plain = value.detach().cpu().contiguous()
        result[name] = plain.clone() if plain.data_ptr() in seen else plain
        seen.add(plain.data_ptr())
    return result


def _fingerprint(description: dict[str, Any], state: Mapping[str, Tensor], assets: Mapping[str, bytes]) -> str:
    tensors = {
        name: [str(value.dtype), list(value.shape), hashlib.sha256(_bytes(value)).hexdigest()]
        for name, value in state.items()
    }
    files = {name: fingerprint_bytes(content) for name, content in assets.items()}
    return fingerprint_json({"description": description, "tensors": tensors, "assets": files})


def _bytes(value: Tensor) -> memoryview:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, bytes]]:
    record = read_description(folder)
    weights = folder / WEIGHTS
    expected, found = record["weights_bytes"], weights.stat().st_size if weights.exists() else 0
    if expected != found:
        raise UserError(
            f"{weights} is {'missing' if not weights.exists() else 'truncated or not whole'}",
            expected=f"{expected} bytes",
            found=f"{found} bytes",
            do="copy the model folder again from where it was made",
        )
    try:
        with safe_open(weights, framework="pt") as file:
            # A tensor mapped from the file may start anywhere, and matrix products depend in their last bits on where
            # memory starts; a copy starts where PyTorch's own tensors do.
            state = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - no mapping
        assets = {name: read_regular(folder / name, _MAX_ASSET) for name in record.get("assets", ())}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{folder} cannot be read", found=str(error), do="copy the model folder again") from error
    described = {name: record.get(name) for name in _DESCRIBED}
    try:
        now = _fingerprint(described, state, assets)
    except (ValueError, RecursionError) as error:  # half a letter, a number that is none, tables without end
        raise UserError(f"{folder / DESCRIPTION} is no description of a model", found=str(error)[:200]) from error
    if now != record["fingerprint"]:
        raise FaultError(
            f"the model in {folder} was changed after it was written",
            expected=record["fingerprint"],
            found=now,
            do="restore the folder; a changed model is another model and needs its own certificate",
        )
    return record, state, assets
