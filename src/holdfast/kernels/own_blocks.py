"""Blocks of towers that keep their own modules: compiled once for a whole tower, or fused where they are plain.

:mod:`holdfast.kernels.fast` writes OpenCLIP's plain towers out. Other towers (SigLIP's image tower of timm and its text
tower that sees both ways, average pooling) are called as they are, and their blocks, nearly all of the work, are
computed by what stands here:

- blocks that are plain and unmasked go through :mod:`holdfast.kernels.fused`, where the GPU has it;
- all others are compiled. One function stands for every block, so that ``torch.compile`` sees it once and not twelve
  times: weights are inputs of what is compiled, and no layer is known by its identity;
- between blocks values are in the working precision, as in the fast path.

The modules are changed for the time of a call only. Weights, names, copies and files know nothing of it.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from open_clip.timm_model import TimmModel
from open_clip.transformer import TextTransformer, Transformer
from timm.layers.mlp import Mlp
from timm.models import vision_transformer
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from holdfast.kernels import fast, fused
from holdfast.model.compute import ComputeMode

_ATTENTION = cast(Any, vision_transformer).Attention  # versions of timm define it in different places
_KNOWN = (Block, fast.OpenBlock)  # and none of their subclasses: a sharded block's weights exist in its own call alone


@contextmanager
def computing_blocks(tower: nn.Module, mode: ComputeMode | None) -> Generator[None]:
    """While in here a call of the tower computes its blocks as the mode says; towers without such blocks are left."""
    found = _stack(tower) if mode is not None and (mode.compiled or mode.fused) else None
    if mode is None or found is None:
        yield
        return
    owner, blocks = found
    again, owner.grad_checkpointing = owner.grad_checkpointing, False  # _Stack sees to it
    stack = _Stack(blocks, mode, again and torch.is_grad_enabled())
    for number, block in enumerate(blocks):
        block.__dict__["forward"] = partial(stack.block, number)
    try:
        yield
    finally:
        for block in blocks:
            block.__dict__.pop("forward", None)
        owner.grad_checkpointing = again


def is_recordable(visual: Any, text: Any) -> bool:
    """Whether a step over these towers waits for nothing on the device: fixed shapes, and no choice by a value.

    True for timm's vision transformers beside OpenCLIP's text transformer with texts of one length, False for all that
    was not looked at.
    """
    trunk = getattr(visual, "trunk", None)
    if type(visual) is not TimmModel or type(trunk) is not VisionTransformer or visual.training:
        return False
    images = not trunk.dynamic_img_size and _stack(visual) is not None
    texts = type(text) is TextTransformer and not text.output_tokens and _stack(text) is not None
    return images and texts and text.attn_mask is None and text.cls_emb is None and not text.use_pad_mask


def _stack(tower: Any) -> tuple[Any, list[Any]] | None:
    """The module that calls a tower's blocks, and the blocks, where they are known and all of one kind."""
    trunk, transformer = getattr(tower, "trunk", None), getattr(tower, "transformer", None)
    owner: Any = None
    blocks: list[Any] = []
    if type(trunk) is VisionTransformer:
        owner, blocks = trunk, list(trunk.blocks)
    elif type(transformer) is Transformer and transformer.batch_first:
        owner, blocks = transformer, list(transformer.resblocks)
    kind = type(blocks[0]) if blocks else None
    known = kind in _KNOWN and all(type(block) is kind and not block.training for block in blocks)
    return (owner, blocks) if known else None


class _Stack:
    """The blocks of a tower in one call of it."""

    def __init__(self, blocks: list[Any], mode: ComputeMode, again: bool) -> None:
        self.blocks, self.mode = blocks, mode
        self.again = again  # activations are computed once more in the backward pass
        self.outside = torch.float32  # type of the values before the first block and after the last
        self.done = False  # the first block has computed all

    def block(self, number: int, values: Tensor, *given: Any, **options: Any) -> Tensor:
        """In place of a block's own forward pass."""
        if number == 0:
            self.outside = values.dtype
            self.done = not self.again and _unmasked(given, options) and self._fuses(values)
            if self.done:
                return self._fused(values)
            if torch.is_autocast_enabled(values.device.type):
                values = values.to(self.mode.dtype)
        elif self.done:
            return values
        block = self.blocks[number]
        run = fast.way(self.mode, _own)
        with fast.attention_kernels(values, block.attn.num_heads, plain=_unmasked(given, options)):
            if self.again:  # nothing in a block is random
                made = checkpoint(run, block, values, *given, use_reentrant=False, preserve_rng_state=False, **options)
            else:
                made = run(block, values, *given, **options)
        return made.to(self.outside) if number == len(self.blocks) - 1 else made

    def _fuses(self, values: Tensor) -> bool:
        heads = self.blocks[0].attn.num_heads
        _, length, width = values.shape
        return (
            self.mode.fused
            and fused.can(values.device, self.mode.dtype, length, width // heads)
            and all(_is_plain(block) for block in self.blocks)
        )

    def _fused(self, values: Tensor) -> Tensor:
        n, length, _ = values.shape
        first: Any = self.blocks[0]
        quick = type(first) is fast.OpenBlock and fast.activation_of(first) == fast.QUICK
        norms: Any = (first.norm1, first.norm2) if type(first) is Block else (first.ln_1, first.ln_2)
        heads: int = cast(Any, first).attn.num_heads
        shape = fused.Shape(n, length, heads, quick, norms[0].eps, norms[1].eps)
        weights = [_timm_weights(block) if type(block) is Block else fast.block_weights(block) for block in self.blocks]
        with torch.autocast(values.device.type, enabled=False):
            made, carried = fused.blocks(values.to(self.mode.dtype), weights, shape)
            return (made.to(carried.dtype) + carried).to(self.outside)


def _own(block: Any, values: Tensor, *given: Any, **options: Any) -> Tensor:
    """A block's own forward pass: what is compiled."""
    return type(block).forward(block, values, *given, **options)


def _unmasked(given: tuple[Any, ...], options: dict[str, Any]) -> bool:
    return not any(item is not None for item in (*given, *options.values()))


def _is_plain(block: Any) -> bool:
    return _plain_timm(block) if type(block) is Block else fast.plain_block(block)


def _plain_timm(block: Any) -> bool:
    """Whether a block of timm is what :func:`holdfast.kernels.fast.plain_block` says of OpenCLIP's."""
    attention: Any = block.attn
    mlp: Any = block.mlp
    if type(attention) is not _ATTENTION or type(mlp) is not Mlp:
        return False
    absent = (block.ls1, block.ls2, attention.q_norm, attention.k_norm, getattr(attention, "norm", None))
    products: tuple[Any, ...] = (attention.qkv, attention.proj, mlp.fc1, mlp.fc2)
    norms: tuple[Any, ...] = (block.norm1, block.norm2)
    return (
        all(item is None or isinstance(item, nn.Identity) for item in (*absent, getattr(mlp, "norm", None)))
        and getattr(attention, "gate", None) is None
        and all(isinstance(item, nn.LayerNorm) for item in norms)
        and all(isinstance(item, nn.Linear) for item in products)
        and all(item.bias is not None for item in (*norms, *products))
        and attention.qkv.out_features == 3 * attention.qkv.in_features
        and isinstance(mlp.act, nn.GELU)
        and mlp.act.approximate == "none"
    )


def _timm_weights(block: Any) -> fast.Weights:
    """In the order of :func:`holdfast.kernels.fast.block_weights`."""
    parts = (block.norm1, block.attn.qkv, block.attn.proj, block.norm2, block.mlp.fc1, block.mlp.fc2)
    return tuple(item for part in parts for item in (part.weight, part.bias))
