"""Attention of rows that the project's own kernels do not hold at once, or with other heads: PyTorch's own kernels.

The same calls as :mod:`holdfast.kernels.cuda.attention`. Which of PyTorch's kernels does it is found out by trying:
cuDNN's is the faster one on Hopper, FlashAttention's is everywhere.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

_LARGEST_HEAD = 128
_CLOSE = 0.05  # of bf16 scores of order 1, in a trial

Kind = Literal["cudnn", "flash"]


def takes(device: torch.device, length: int, size: int) -> bool:
    """Whether one of the kernels computes rows of this length, with heads of this size, and their gradient."""
    return device.type == "cuda" and size % 8 == 0 and size <= _LARGEST_HEAD and _kind(device, length, size) is not None


def attend(packed: Tensor, out: Tensor, images: int, length: int, heads: int) -> Tensor:
    """softmax(q kᵀ / sqrt(D)) v for every picture and head, from packed q, k, v [T, 3·heads·D] into ``out`` [T, W].

    Returns the logarithm of each row's sum, which the backward pass needs.
    """
    query, key, value = _split(packed, images, length, heads)
    mixed, levels = _forward(_chosen(packed, heads, length), query, key, value)
    out[: images * length].view(images, length, heads, -1).copy_(mixed.transpose(1, 2))
    return levels


def backward(
    packed: Tensor, out: Tensor, gradient: Tensor, levels: Tensor, result: Tensor, images: int, length: int, heads: int
) -> Tensor:
    """Gradient of packed q, k, v into ``result`` [T, 3·heads·D]; returns the sums of its columns [3·heads·D]."""
    kind, tokens = _chosen(packed, heads, length), images * length
    given, mixed = (each[:tokens].view(images, length, heads, -1).transpose(1, 2) for each in (gradient, out))
    each = _backward(kind, given, _split(packed, images, length, heads), mixed, levels)
    places = result[:tokens].view(images, length, 3, heads, -1)
    for place, part in enumerate(each):
        places[:, :, place].copy_(part.transpose(1, 2))
    return result[:tokens].sum(dim=0, dtype=torch.float32)


def _split(packed: Tensor, images: int, length: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v, [n, heads, L, D] each: views."""
    each = packed[: images * length].view(images, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
    return each[0], each[1], each[2]


def _chosen(packed: Tensor, heads: int, length: int) -> Kind:
    kind = _kind(packed.device, length, packed.shape[1] // 3 // heads)
    assert kind is not None
    return kind


def _forward(kind: Kind, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    if kind == "cudnn":
        found: Any = torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, None, True)
    else:
        found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)
    return found[0], found[1]


def _backward(
    kind: Kind, gradient: Tensor, inputs: tuple[Tensor, Tensor, Tensor], out: Tensor, levels: Tensor
) -> tuple[Tensor, ...]:
    length, no_seed = out.shape[2], torch.zeros(2, dtype=torch.int64, device=out.device)  # nothing is dropped
    lengths: tuple[Any, ...] = (None, None, length, length, 0.0, False)  # all alike; dropout, causal
    if kind == "cudnn":
        call: Any = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        return call(gradient, *inputs, out, levels, no_seed, no_seed, None, *lengths)
    call = torch.ops.aten._scaled_dot_product_flash_attention_backward
    return call(gradient, *inputs, out, levels, *lengths, no_seed, no_seed)


@lru_cache(maxsize=64)
def _kind(device: torch.device, length: int, size: int) -> Kind | None:
    """The first kernel whose result and gradient are right on random rows."""
    with torch.random.fork_rng(devices=[device]):
        torch.manual_seed(0)
        packed = torch.randn(2 * length, 3 * 2 * size, device=device).bfloat16()
    heads = _split(packed, 2, length, 2)
    full = [each.float().requires_grad_() for each in heads]
    with torch.enable_grad():
        expected = ((full[0] @ full[1].transpose(-1, -2)) * size**-0.5).softmax(dim=-1) @ full[2]
        gradients = torch.autograd.grad(expected.sum(), full)
    kinds: tuple[Kind, ...] = ("cudnn", "flash")
    for kind in kinds:
        try:
            with torch.no_grad():
                mixed, levels = _forward(kind, *heads)
                found = (mixed, *_backward(kind, torch.ones_like(mixed), heads, mixed, levels))
        except (RuntimeError, TypeError, AttributeError):  # another version, another card, a build without it
            continue
        wanted = (expected.detach(), *gradients)
        if all(float((each.float() - other).abs().max()) < _CLOSE for each, other in zip(found, wanted, strict=True)):
            return kind
    return None
