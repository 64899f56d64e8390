"""BERT in plain PyTorch: words in, features of words out, weights under the names of published checkpoints.

``transformers`` has it too; importing that takes longer than many a round's first answer (scipy, torch's compiler and
a download client come with it). Values, gradients and the draws of a seed are those of its ``BertModel``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from holdfast.errors import UserError

_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("max_position_embeddings", "type_vocab_size", "vocab_size"),
)
_FIXED = {"hidden_act": "gelu", "pad_token_id": 0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_SPREAD = 0.02  # of random weights


class Bert(nn.Module):
    """Tokens [n, L] and which of them are words -> the last layer's features of each, [n, L, width]."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        _check(settings)
        self.embeddings = _Embeddings(settings)
        self.encoder = _Encoder(settings)
        self.apply(_draw)

    def forward(self, tokens: Tensor, words: Tensor) -> Tensor:
        """``words`` [n, L] is False where a text has ended; nothing attends to what is there."""
        values = self.embeddings(tokens)
        mask = words[:, None, None, :]
        for layer in cast("list[_Layer]", list(self.encoder.layer)):
            values = layer(values, mask)
        return values


class _Embeddings(nn.Module):
    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        width = settings["hidden_size"]
        self.word_embeddings = nn.Embedding(settings["vocab_size"], width, padding_idx=settings["pad_token_id"])
        self.position_embeddings = nn.Embedding(settings["max_position_embeddings"], width)
        self.token_type_embeddings = nn.Embedding(settings["type_vocab_size"], width)
        self.LayerNorm = nn.LayerNorm(width, eps=settings["layer_norm_eps"])

    def forward(self, tokens: Tensor) -> Tensor:
        # All words are of the first type; sums in the order of transformers, for the sake of the bits.
        values = self.word_embeddings(tokens) + self.token_type_embeddings(torch.zeros_like(tokens))
        return self.LayerNorm(values + self.position_embeddings.weight[: tokens.shape[1]])


class _Encoder(nn.Module):
    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.layer = nn.ModuleList(_Layer(settings) for _ in range(settings["num_hidden_layers"]))


class _Layer(nn.Module):
    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        width, inner = settings["hidden_size"], settings["intermediate_size"]
        self.attention = _Attention(settings)
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, inner)})
        self.output = _Output(inner, settings)

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        values = self.attention(values, mask)
        return self.output(functional.gelu(self.intermediate["dense"](values)), values)


class _Attention(nn.Module):
    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        width = settings["hidden_size"]
        self.heads = settings["num_attention_heads"]
        self.self = nn.ModuleDict({name: nn.Linear(width, width) for name in ("query", "key", "value")})
        self.output = _Output(width, settings)

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        count, length, width = values.shape
        query, key, value = (
            self.self[name](values).view(count, length, self.heads, -1).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        read = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.output(read.transpose(1, 2).reshape(count, length, width), values)


class _Output(nn.Module):
    """A product, added to what came in, and its norm."""

    def __init__(self, inside: int, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self.dense = nn.Linear(inside, settings["hidden_size"])
        self.LayerNorm = nn.LayerNorm(settings["hidden_size"], eps=settings["layer_norm_eps"])

    def forward(self, values: Tensor, before: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(values) + before)


@torch.no_grad()
def _draw(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        module.weight.normal_(0.0, _SPREAD)
    if isinstance(module, nn.Linear):
        module.bias.zero_()
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        module.weight[module.padding_idx].zero_()


def _check(settings: Mapping[str, Any]) -> None:
    """Settings come out of model folders: sizes are numbers, and nothing else than this BERT is asked for."""
    known = {*_SIZES, *_FIXED, "layer_norm_eps"}
    wrong = sorted(known ^ set(settings))
    wrong += [name for name in _SIZES if name in settings and not _is_size(settings[name])]
    wrong += [name for name, value in _FIXED.items() if name in settings and settings[name] != value]
    if not wrong and not (isinstance(settings["layer_norm_eps"], float) and settings["layer_norm_eps"] > 0):
        wrong = ["layer_norm_eps"]
    if not wrong and settings["hidden_size"] % settings["num_attention_heads"]:
        wrong = ["num_attention_heads"]
    if wrong:
        raise UserError(
            "the settings of the sentence encoder make no BERT",
            expected=f"{', '.join(_SIZES)} as positive numbers, layer_norm_eps, and {_FIXED}",
            found=", ".join(f"{name} = {settings.get(name)!r}" for name in wrong)[:200],
        )


def _is_size(value: object) -> bool:
    return type(value) is int and value > 0
