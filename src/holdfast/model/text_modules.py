"""A text tower of sentence-transformers: which modules its folder has, checked without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from holdfast.errors import UserError, nearest
from holdfast.files import read_json
from holdfast.model.sources import CONFIG, MODULES, WITHOUT_EFFECT, SourceKind, identify, sentence_modules

ENCODERS = ("bert", "distilbert", "mpnet", "roberta", "xlm-roberta")  # `model_type` in config.json
POOLINGS = ("mean", "cls", "max")
SENTENCE_FILES = ("config_sentence_transformers.json", "sentence_bert_config.json")
_IMAGE_SIDES = (SourceKind.TRANSFORMERS, SourceKind.SENTENCE_TRANSFORMERS)
_INPUT = "sentence_embedding"  # what a Dense module reads
_ORDER = ("Transformer", "Pooling", "Dense")
_FORMER_KEYS = {  # one switch a pooling, before there was `pooling_mode`
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_EXPECTED = (
    "a sentence-transformers folder with the modules Transformer, Pooling and Dense, such as "
    "clip-ViT-B-32-multilingual-v1"
)


@dataclass(frozen=True)
class TextModules:
    """What a folder's JSON files say of its text tower."""

    encoder: Path  # folder of the Transformer
    dense: Path  # folder of the Dense
    config: dict[str, Any]  # of the encoder
    pooling: str  # one of POOLINGS
    out_width: int
    max_length: int | None  # tokens of a text, where the folder says it
    lower_case: bool
    files: dict[str, Any]  # its own JSON files by their path in the folder, for the way back


def read_text_modules(folder: Path) -> TextModules:
    """The modules of a text tower; whatever holdfast would compute otherwise than the library is refused."""
    if not (folder / MODULES).is_file():
        raise _no_text_tower(folder)
    modules = sentence_modules(folder)
    source = identify(folder)
    if source is not None and source.kind == SourceKind.SENTENCE_TRANSFORMERS:
        raise UserError(
            f"{folder} is no text tower",
            expected=_EXPECTED,
            found=f"{source.words}, which encodes images too",
            do="give it as SOURCE ([model] start), or leave --text ([model] text) out",
        )
    encoder, pooling, dense = (folder / place for place in _places(folder, modules))
    config, settings = _table(encoder / CONFIG), _optional(encoder / SENTENCE_FILES[1])
    _check_encoder(folder, config)
    _check_prompt(folder)
    _check_dense(dense, layer := _table(dense / CONFIG))
    names = [MODULES, *SENTENCE_FILES, f"{pooling.name}/{CONFIG}", f"{dense.name}/{CONFIG}"]
    names += [f"{encoder.name}/{name}" for name in SENTENCE_FILES if encoder != folder]
    limit = settings.get("max_seq_length")
    return TextModules(
        encoder,
        dense,
        config,
        _pooling(pooling, _table(pooling / CONFIG)),
        layer["out_features"],
        limit if type(limit) is int and limit > 0 else None,
        bool(settings.get("do_lower_case", False)),
        {name: read_json(folder / name) for name in names if (folder / name).is_file()},
    )


def check_pair(source: Path, text: Path) -> None:
    """Refuse two folders that are not an image tower and a text tower, before weights are read."""
    found = identify(source)
    if found is None or found.kind not in _IMAGE_SIDES:
        raise UserError(
            f"{source} cannot take the text tower of another folder",
            expected="a transformers or sentence-transformers folder of a CLIP or SigLIP model, for its image tower",
            found="" if found is None else found.words,
        )
    read_text_modules(text)


def _no_text_tower(folder: Path) -> UserError:
    source = identify(folder) if folder.exists() else None
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing at that path"
    else:
        found = "" if source is None else source.words
    return UserError(f"{folder} is no text tower", expected=_EXPECTED, found=found or f"a folder without {MODULES}")


def _places(folder: Path, modules: list[tuple[str, str]]) -> list[str]:
    """Folders of Transformer, Pooling and Dense, which must come in this order; Normalize may follow."""
    names = [name for name, _ in modules]
    missing = [name for name in _ORDER if name not in names]
    if missing:
        raise UserError(
            f"{folder} lacks the module {' and the module '.join(missing)}",
            expected=_EXPECTED,
            found=", ".join(names),
            do="a text tower ends in a Dense module, which maps to the image features" if "Dense" in missing else "",
        )
    further = [name for name in names[len(_ORDER) :] if name not in WITHOUT_EFFECT]
    if tuple(names[: len(_ORDER)]) != _ORDER or further:
        raise UserError(
            f"{folder} has modules that holdfast does not read",
            expected="Transformer, Pooling, Dense and perhaps Normalize, in this order",
            found=", ".join(names),
        )
    return [place for _, place in modules[: len(_ORDER)]]


def _check_encoder(folder: Path, config: dict[str, Any]) -> None:
    family = config.get("model_type")
    if family not in ENCODERS:
        raise UserError(
            f"{folder} has a text encoder that holdfast does not read",
            expected=f"one of {', '.join(ENCODERS)}",
            found=f"{str(family)[:50]!r}",
        )


def _check_prompt(folder: Path) -> None:
    name = _optional(folder / SENTENCE_FILES[0]).get("default_prompt_name")
    if name is not None:
        raise UserError(
            f"{folder} puts the prompt {str(name)[:50]!r} before every text",
            expected="a text tower without a default prompt",
            do="remove default_prompt_name from its config_sentence_transformers.json, and write the prompt into the "
            "template",
        )


def _pooling(folder: Path, config: dict[str, Any]) -> str:
    found: Any = config.get("pooling_mode")
    if found is None:
        found = [mode for key, mode in _FORMER_KEYS.items() if config.get(key)] or "mean"
    modes = cast("list[Any]", found) if isinstance(found, list) else [found]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        words = " and ".join(str(mode)[:50] for mode in modes)
        raise UserError(
            f"{folder} pools tokens in a way that holdfast does not know",
            expected=f"one of {', '.join(POOLINGS)}",
            found=words,
            do=nearest(words, POOLINGS),
        )
    return modes[0]


def _check_dense(folder: Path, config: dict[str, Any]) -> None:
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))  # the library's default
    name = activation.rpartition(".")[2]
    if name != "Identity" or config.get("use_residual") or config.get("module_input_name", _INPUT) != _INPUT:
        raise UserError(
            f"{folder} is more than a linear map",
            expected="a Dense module with the activation Identity, on the sentence embedding",
            found=f"the activation {name[:50]}" if name != "Identity" else "a residual, or another input",
        )
    widths = config.get("in_features"), config.get("out_features")
    if not all(type(width) is int and width > 0 for width in widths):
        raise UserError(f"{folder / CONFIG} describes no Dense module", expected="in_features and out_features")


def _optional(path: Path) -> dict[str, Any]:
    return _table(path) if path.is_file() else {}


def _table(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path} is missing", do="copy the whole folder")
    record: Any = read_json(path)
    if not isinstance(record, dict):
        raise UserError(f"{path} holds no table", do="copy the whole folder")
    return cast("dict[str, Any]", record)
