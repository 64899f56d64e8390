"""Two towers from two folders: the image tower of a CLIP or SigLIP model, and a sentence encoder trained to meet it.

Such a text tower reads other languages than the model's own. That one stays in the model, frozen and out of use, so
that the image tower can be exported in the format that it came from.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from holdfast.files import write_json
from holdfast.model.sources import CONFIG
from holdfast.model.text_modules import ENCODERS, POOLINGS
from holdfast.model.towers import ProjectedTowers
from holdfast.model.transformers_towers import TOKENIZER_FILES, TransformersTowers, load_tokenizer, quiet

TEXT_FILES = (*TOKENIZER_FILES, "vocab.txt", "sentencepiece.bpe.model")
_PREFIX = "text_"  # of the text tower's files in a model folder, where the image tower's lie beside them
_LENGTH_STEP = 8  # texts are cut to a multiple of this


@dataclass(frozen=True)
class TextSettings:
    """How texts become features, apart from weights."""

    config: dict[str, Any]  # of the encoder
    pooling: str
    context: int  # tokens of a text
    pad: int  # the token that is not read
    lower_case: bool
    width: int  # of the image features, which W maps to
    bias: bool  # of W
    layout: dict[str, Any]  # folders of encoder and Dense in the source, and its own JSON files by name

    def check(self) -> None:
        """Refuse settings, read from a file, that describe no text tower."""
        numbers = all(type(value) is int for value in (self.context, self.pad, self.width))
        if not numbers or self.context < 1 or self.width < 1 or self.pooling not in POOLINGS:
            raise ValueError("a text tower with other settings than holdfast writes")
        if self.config["model_type"] not in ENCODERS:
            raise ValueError(f"a text encoder of type {self.config['model_type']!r}")


class PairTowers(ProjectedTowers):
    """E1 of one model; Ē2 is the pooled sentence embedding of another, W its Dense module."""

    def __init__(
        self, image: TransformersTowers, settings: TextSettings, files: dict[str, bytes], encoder: Any = None
    ) -> None:
        super().__init__()
        settings.check()
        self.image = image.freeze(text=True)
        self.settings = settings
        self.preprocess, self.embed_dim = image.preprocess, image.embed_dim
        self._files = dict(files)
        self.sentence = create_encoder(settings.config) if encoder is None else encoder
        if hasattr(self.sentence, "pooler"):
            self.sentence.pooler = None  # no feature depends on it
        self.text_width = int(self.sentence.config.hidden_size)
        self.weight = nn.Parameter(torch.zeros(self.text_width, settings.width))
        self.bias = nn.Parameter(torch.zeros(settings.width)) if settings.bias else None
        self.eval()

    @classmethod
    def from_spec(cls, spec: dict[str, Any], assets: dict[str, bytes]) -> PairTowers:
        """Rebuild from :meth:`spec` and the tokenizers' files."""
        own = {name.removeprefix(_PREFIX): content for name, content in assets.items() if name.startswith(_PREFIX)}
        others = {name: content for name, content in assets.items() if not name.startswith(_PREFIX)}
        image = TransformersTowers.from_spec(spec["image"], others)
        with torch.random.fork_rng(devices=[]), quiet():
            return cls(image, TextSettings(**copy.deepcopy(spec["text"])), own)

    @override
    def image_features(self, images: Tensor) -> Tensor:
        return self.image.image_features(images)

    @override
    def image_hidden(self, images: Tensor) -> Tensor:
        return self.image.image_hidden(images)

    @property
    @override
    def image_projection(self) -> Tensor | None:
        return self.image.image_projection

    @override
    def text_backbone(self, tokens: Tensor) -> Tensor:
        tokens = tokens if tokens.is_cuda else self.shorten(tokens)
        mask = tokens != self.settings.pad
        words = self.sentence(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
        return pool(words, mask, self.settings.pooling)

    @override
    def shorten(self, tokens: Tensor) -> Tensor:
        """Padding is masked out of the attention, so cutting it off is exact."""
        longest = int((tokens != self.settings.pad).sum(dim=1).max()) if len(tokens) else 1
        return tokens[:, : max(1, -(-longest // _LENGTH_STEP)) * _LENGTH_STEP]

    @override
    def tokenize(self, texts: Sequence[str]) -> Tensor:
        context = self.settings.context
        if not texts:
            return torch.zeros(0, context, dtype=torch.int64)
        encoded = self._tokenizer(list(texts), padding="max_length", truncation=True, max_length=context)
        return torch.tensor(encoded["input_ids"], dtype=torch.int64)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            write_json(Path(folder) / CONFIG, self.settings.config)  # where nothing else names the tokenizer's class
            for name, content in self._files.items():
                (Path(folder) / name).write_bytes(content)
            return text_tokenizer(Path(folder), lower_case=self.settings.lower_case)

    def __getstate__(self) -> dict[str, Any]:
        """Another process makes its own tokenizer from the files."""
        return {name: value for name, value in self.__dict__.items() if name != "_tokenizer"}

    @override
    def spec(self) -> dict[str, Any]:
        return {"kind": "pair", "image": self.image.spec(), "text": copy.deepcopy(asdict(self.settings))}

    @override
    def assets(self) -> dict[str, bytes]:
        return self.image.assets() | {_PREFIX + name: content for name, content in self._files.items()}

    @override
    def image_parameters(self) -> Iterable[nn.Parameter]:
        return self.image.image_parameters()

    @override
    def text_parameters(self) -> Iterable[nn.Parameter]:
        return [*self.sentence.parameters(), *self.projection_parameters()]

    def text_files(self) -> dict[str, bytes]:
        """The tokenizer's files, under the names that they had."""
        return dict(self._files)

    def dense_state(self) -> dict[str, Tensor]:
        """W and its bias as the Dense module's weights."""
        state = {"linear.weight": self.weight.detach().cpu().T.contiguous()}
        return state if self.bias is None else {**state, "linear.bias": self.bias.detach().cpu().clone()}


def pool(words: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """One feature a text of the features of its tokens, [n, L, d] -> [n, d]; ``mask`` [n, L] is where tokens are."""
    if pooling == "cls":
        return words[:, 0]
    real = mask.unsqueeze(-1)
    if pooling == "max":
        return words.masked_fill(~real, float("-inf")).amax(dim=1)
    weights = real.to(words.dtype)
    return (words * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-9)


def create_encoder(config: dict[str, Any]) -> Any:
    """A sentence encoder with random weights, of the classes that transformers itself has; nothing is fetched."""
    import transformers

    settings = {name: value for name, value in copy.deepcopy(config).items() if name not in ("model_type", "auto_map")}
    return transformers.AutoModel.from_config(transformers.AutoConfig.for_model(config["model_type"], **settings))


def text_tokenizer(folder: Path, *, lower_case: bool) -> Any:
    """The tokenizer of a folder; ``lower_case`` as sentence-transformers adds it to one that keeps capitals."""
    tokenizer = load_tokenizer(folder)
    if lower_case and tokenizer.is_fast:
        from tokenizers import normalizers

        backend = tokenizer.backend_tokenizer
        found = backend.normalizer
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *([] if found is None else [found])])
    return tokenizer
