"""The two towers of a CLIP or SigLIP model of ``transformers``, with its text projection taken out.

A saved model holds the configuration in its description and the tokenizer's files as assets, so that it can be loaded
without its source and exported to the same format.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from holdfast.errors import UserError
from holdfast.model.towers import Preprocess, ProjectedTowers

FAMILIES = ("clip", "siglip")  # `model_type` in config.json
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "tokenizer.model",
)
PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"  # newer folders have the preprocessing in it
_LENGTH_STEP = 8  # texts are cut to a multiple of this
_UNUSED = ("logit_scale", "logit_bias")  # no feature depends on them


class TransformersTowers(ProjectedTowers):
    """A ``CLIPModel`` or ``SiglipModel``: E1 is its image feature, W its text projection."""

    def __init__(
        self, config: dict[str, Any], preprocess: Preprocess, files: dict[str, bytes], model: Any = None
    ) -> None:
        super().__init__()
        self.config = copy.deepcopy(config)
        self.family = str(config["model_type"])
        self.preprocess = preprocess
        self._files = dict(files)
        # Of a sentence-transformers folder: where in it this model lies, and its own JSON files by name.
        self.layout: dict[str, Any] | None = None
        self.model = create_model(config) if model is None else model
        self._context = int(self.model.config.text_config.max_position_embeddings)
        self._take_projection()
        for name in _UNUSED:
            if hasattr(self.model, name):
                getattr(self.model, name).requires_grad_(False)
        self.eval()

    @classmethod
    def from_spec(cls, spec: dict[str, Any], assets: dict[str, bytes]) -> TransformersTowers:
        """Rebuild from :meth:`spec` and the tokenizer's files."""
        with torch.random.fork_rng(devices=[]), quiet():
            towers = cls(spec["config"], Preprocess.from_json(spec["preprocess"]), assets)
        towers.layout = copy.deepcopy(spec.get("layout"))
        return towers

    def _take_projection(self) -> None:
        """Move W (and its bias) out of the model; what is left returns the backbone's features."""
        holder, name = self._projection_place(self.model)
        linear = getattr(holder, name)
        self.weight = nn.Parameter(linear.weight.detach().T.clone())
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone())
        setattr(holder, name, nn.Identity())
        self.text_width, self.embed_dim = self.weight.shape

    def _projection_place(self, model: Any) -> tuple[Any, str]:
        return (model, "text_projection") if self.family == "clip" else (model.text_model, "head")

    @override
    def image_features(self, images: Tensor) -> Tensor:
        hidden = self.image_hidden(images)
        return self.model.visual_projection(hidden) if self.family == "clip" else hidden

    @override
    def image_hidden(self, images: Tensor) -> Tensor:
        return self.model.vision_model(pixel_values=images).pooler_output

    @property
    @override
    def image_projection(self) -> Tensor | None:
        """CLIP's image tower ends in one; SigLIP's ends in a pooling layer."""
        return self.model.visual_projection.weight.T if self.family == "clip" else None

    @override
    def text_backbone(self, tokens: Tensor) -> Tensor:
        # No mask: what stands behind the end of a text cannot reach CLIP's pooled feature, and SigLIP reads padding.
        tokens = tokens if tokens.is_cuda else self.shorten(tokens)
        return self.model.text_model(input_ids=tokens).pooler_output

    @override
    def shorten(self, tokens: Tensor) -> Tensor:
        """CLIP's mask is causal, so columns behind the longest text change nothing; SigLIP reads the last column."""
        if self.family != "clip" or len(tokens) == 0:
            return tokens
        longest = int(self._ends(tokens).max()) + 1
        return tokens[:, : -(-longest // _LENGTH_STEP) * _LENGTH_STEP]

    def _ends(self, tokens: Tensor) -> Tensor:
        """Position that CLIP pools. Configurations that name the end token 2 are older than that key's repair."""
        end = self.model.config.text_config.eos_token_id
        return tokens.argmax(dim=1) if end == 2 else (tokens == end).int().argmax(dim=1)

    @override
    def tokenize(self, texts: Sequence[str]) -> Tensor:
        if not texts:
            return torch.zeros(0, self._context, dtype=torch.int64)
        encoded = self._tokenizer(list(texts), padding="max_length", truncation=True, max_length=self._context)
        return torch.tensor(encoded["input_ids"], dtype=torch.int64)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            for name, content in self._files.items():
                (Path(folder) / name).write_bytes(content)
            return load_tokenizer(Path(folder))

    def __getstate__(self) -> dict[str, Any]:
        """Another process makes its own tokenizer from the files."""
        return {name: value for name, value in self.__dict__.items() if name != "_tokenizer"}

    @override
    def spec(self) -> dict[str, Any]:
        spec = {"kind": "transformers", "config": copy.deepcopy(self.config), "preprocess": self.preprocess.to_json()}
        return spec if self.layout is None else {**spec, "layout": copy.deepcopy(self.layout)}

    @override
    def assets(self) -> dict[str, bytes]:
        return dict(self._files)

    @override
    def image_parameters(self) -> Iterable[nn.Parameter]:
        last = self.model.visual_projection.parameters() if self.family == "clip" else ()
        return [*self.model.vision_model.parameters(), *last]

    @override
    def text_parameters(self) -> Iterable[nn.Parameter]:
        return [*self.model.text_model.parameters(), *self.projection_parameters()]

    @torch.no_grad()
    def source_model(self) -> Any:
        """A model of ``transformers`` with these weights, its projection put back."""
        model = copy.deepcopy(self.model).cpu()
        holder, name = self._projection_place(model)
        linear = nn.Linear(self.text_width, self.embed_dim, bias=self.bias is not None)
        linear.weight = nn.Parameter(self.weight.detach().cpu().T.contiguous())
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().cpu().clone())
        setattr(holder, name, linear)
        return model


@contextmanager
def quiet() -> Generator[None]:
    """No bars and no warnings of the library: what goes wrong arrives as an exception."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def create_model(config: dict[str, Any]) -> Any:
    """A model with random weights, of the classes that the library itself has; nothing is fetched."""
    import transformers

    if config["model_type"] == "clip":
        return transformers.CLIPModel(transformers.CLIPConfig.from_dict(copy.deepcopy(config)))
    return transformers.SiglipModel(transformers.SiglipConfig.from_dict(copy.deepcopy(config)))


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder; code that comes with it is never run."""
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a missing file, or a package that this kind of tokenizer needs
        raise UserError(
            "the model's tokenizer could not be loaded",
            expected=f"its files beside the weights: {', '.join(TOKENIZER_FILES[:2])}, or those of a slow tokenizer",
            found=(str(error).splitlines() or [repr(error)])[0][:200],
        ) from error
