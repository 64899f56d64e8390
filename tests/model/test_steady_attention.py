"""Attention of OpenCLIP's towers against PyTorch's own layer, with every kind of mask that OpenCLIP hands it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from holdfast.model.openclip import TINY
from holdfast.model.openclip_towers import OpenClipTowers, SteadyAttention
from holdfast.model.towers import Preprocess

TEXTS, LENGTH, HEADS, WIDTH = 3, 5, 2, 8


def causal() -> Tensor:
    return torch.full((LENGTH, LENGTH), -torch.inf, dtype=torch.float64).triu(1)


def for_each_text() -> Tensor:
    """[n * heads, L, L]: texts of different lengths, and something of its own for each head."""
    mask = torch.stack([causal() for _ in range(TEXTS)])
    for row, end in zip(mask, (5, 3, 4), strict=True):
        row[:, end:] = -torch.inf
    own = torch.linspace(-1, 1, TEXTS * HEADS, dtype=torch.float64)[:, None, None] * torch.ones(LENGTH).cumsum(0)
    return mask.repeat_interleave(HEADS, 0) + own


def layers() -> tuple[nn.MultiheadAttention, SteadyAttention, Tensor]:
    torch.manual_seed(2)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double()
    ours = copy.deepcopy(theirs)
    SteadyAttention.replace_in(nn.ModuleList([ours]))
    assert isinstance(ours, SteadyAttention)
    return theirs, ours, torch.randn(TEXTS, LENGTH, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize(
    "mask",
    [None, causal(), for_each_text(), causal() < 0],
    ids=["no mask", "causal", "for each text and head", "of booleans"],
)
def test_it_is_pytorchs_layer(mask: Tensor | None) -> None:
    theirs, ours, values = layers()
    expected, _ = theirs(values, values, values, need_weights=False, attn_mask=mask)
    found, _ = ours(values, values, values, need_weights=False, attn_mask=mask)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", [None, causal()], ids=["no mask", "causal"])
def test_one_mask_for_all_keeps_its_bits(mask: Tensor | None) -> None:
    _, ours, values = layers()
    packed = functional.linear(values, ours.in_proj_weight, ours.in_proj_bias)
    query, key, value = packed.view(TEXTS, LENGTH, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
    mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    expected = ours.out_proj(mixed.transpose(1, 2).reshape(TEXTS, LENGTH, WIDTH))
    assert torch.equal(ours(values, values, values, need_weights=False, attn_mask=mask)[0], expected)


@pytest.mark.parametrize("coca", [False, True])
def test_texts_with_a_class_token_of_their_own(coca: bool) -> None:
    config: dict[str, Any] = copy.deepcopy(TINY) | {"custom_text": True}
    config["text_cfg"] |= {"vocab_size": 100, "embed_cls": True}
    if coca:
        config["multimodal_cfg"] = {"context_length": 32, "vocab_size": 100, "width": 32, "heads": 2, "layers": 1}
    torch.manual_seed(3)
    towers = OpenClipTowers("made up", config, Preprocess(32, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)))
    tokens = torch.randint(1, 100, (3, 31 if coca else 32))
    tokens[:, 12:] = 0
    tokens = tokens[:, :20]  # with the class token fewer than there are positions
    own = copy.deepcopy(towers.model)
    for module in own.modules():
        if type(module) is SteadyAttention:
            module.__class__ = nn.MultiheadAttention
    expected = own.text(tokens)
    found = towers.text_backbone(tokens)
    assert found.shape[0] == 3
    torch.testing.assert_close(found, expected[0] if isinstance(expected, tuple) else expected, rtol=1e-4, atol=1e-5)
