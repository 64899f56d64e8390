"""The text tower of a second folder in place of a model's own: `holdfast import SOURCE OUT --text FOLDER`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.errors import UserError
from holdfast.files import read_regular
from holdfast.model.import_checks import MAX_FILE, compare, read_state, unreadable, without_dtype
from holdfast.model.pair_towers import TEXT_FILES, PairTowers, TextSettings, text_tokenizer
from holdfast.model.text_modules import TextModules, read_text_modules
from holdfast.model.towers import TwoTowers
from holdfast.model.transformers_towers import TransformersTowers, quiet

_DENSE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_TEXTS = ("a photo of a dog", "Ein Foto von einem Hund", "une phrase plus longue " * 200)  # the last is cut


def with_text_tower(image: TransformersTowers, folder: Path) -> PairTowers:
    """The image tower of a model and the text tower of a folder; its features are compared with the source's own."""
    modules = read_text_modules(folder)
    if modules.out_width != image.embed_dim:
        raise UserError(
            "the two towers do not meet: their features differ in width",
            expected=f"{image.embed_dim} numbers, as the image tower has",
            found=f"{modules.out_width} from {folder}",
            do="take the text tower that was trained for this image tower",
        )
    encoder, dense = _load_encoder(modules), _load_dense(modules)
    tokenizer = text_tokenizer(modules.encoder, lower_case=modules.lower_case)
    width = int(encoder.config.hidden_size)
    if dense["linear.weight"].shape != (modules.out_width, width):
        shape = " x ".join(map(str, dense["linear.weight"].shape))
        raise UserError(
            f"{modules.dense} does not fit its text encoder",
            expected=f"a matrix of {modules.out_width} x {width}",
            found=shape,
        )
    settings = TextSettings(
        config=without_dtype(modules.config),
        pooling=modules.pooling,
        context=_context(modules, tokenizer),
        pad=_pad(folder, tokenizer),
        lower_case=modules.lower_case,
        width=modules.out_width,
        bias="linear.bias" in dense,
        layout={
            "encoder": "" if modules.encoder == folder else modules.encoder.name,
            "dense": modules.dense.name,
            "files": modules.files,
        },
    )
    files = {
        name: read_regular(modules.encoder / name, MAX_FILE)
        for name in TEXT_FILES
        if (modules.encoder / name).is_file()
    }
    towers = PairTowers(image, settings, files, encoder)
    towers.weight = nn.Parameter(dense["linear.weight"].T.contiguous())
    if towers.bias is not None:
        towers.bias = nn.Parameter(dense["linear.bias"])
    compare(lambda: projected(towers, towers.tokenize(_TEXTS)), lambda: _expected(towers, tokenizer), "text features")
    return towers


def projected(towers: TwoTowers, tokens: Tensor) -> Tensor:
    """E2 before normalisation: [n, L] tokens -> [n, D]."""
    features, bias = towers.text_backbone(tokens) @ towers.projection, towers.projection_bias
    return features if bias is None else features + bias


def _load_encoder(modules: TextModules) -> Any:
    import transformers

    try:
        with quiet():
            encoder, info = transformers.AutoModel.from_pretrained(
                modules.encoder,
                local_files_only=True,
                trust_remote_code=False,
                dtype=torch.float32,
                output_loading_info=True,
            )
    except Exception as error:  # the library raises what it likes for a file that is missing, cut short or another's
        raise unreadable(modules.encoder, error) from error
    found = {str(name) for key in ("missing_keys", "mismatched_keys") for name in info.get(key, ())}
    missing = sorted(name for name in found if not name.startswith("pooler."))  # no feature depends on the pooler
    if missing:
        raise UserError(f"{modules.encoder} does not hold all weights of its model", found=", ".join(missing[:5]))
    return encoder.eval()


def _load_dense(modules: TextModules) -> dict[str, Tensor]:
    path = next((modules.dense / name for name in _DENSE_WEIGHTS if (modules.dense / name).is_file()), None)
    if path is None:
        raise UserError(f"{modules.dense} holds no weights", expected=" or ".join(_DENSE_WEIGHTS))
    state = {name: value.float() for name, value in read_state(path).items()}
    if "linear.weight" not in state or set(state) - {"linear.weight", "linear.bias"}:
        raise UserError(
            f"{path} holds no weights of a Dense module",
            expected="linear.weight, and perhaps linear.bias",
            found=", ".join(list(state)[:5]),
        )
    return state


def _context(modules: TextModules, tokenizer: Any) -> int:
    """Tokens of a text: what the folder says, as far as there are positions."""
    positions = int(modules.config.get("max_position_embeddings", 512))
    if modules.config["model_type"] in ("roberta", "xlm-roberta", "mpnet"):  # these count from behind the padding's
        positions -= int(modules.config.get("pad_token_id", 1)) + 1
    return min(modules.max_length or int(tokenizer.model_max_length), positions)


def _pad(folder: Path, tokenizer: Any) -> int:
    pad, ends = tokenizer.pad_token_id, (tokenizer.sep_token_id, tokenizer.eos_token_id, tokenizer.cls_token_id)
    if pad is None or pad in ends:
        raise UserError(
            f"the tokenizer of {folder} has no padding of its own",
            expected="a token that stands for padding and nothing else",
            found="none" if pad is None else repr(tokenizer.pad_token),
        )
    return int(pad)


def _expected(towers: PairTowers, tokenizer: Any) -> Tensor:
    """The source's features, text by text: without padding, nothing needs a mask."""
    rows: list[Tensor] = []
    for text in _TEXTS:
        tokens = tokenizer([text], truncation=True, max_length=towers.settings.context, return_tensors="pt")
        words = towers.sentence(input_ids=tokens["input_ids"]).last_hidden_state
        pooled = {"mean": words.mean(dim=1), "cls": words[:, 0], "max": words.amax(dim=1)}[towers.settings.pooling]
        rows.append(nn.functional.linear(pooled, towers.weight.T, towers.bias))
    return torch.cat(rows)
