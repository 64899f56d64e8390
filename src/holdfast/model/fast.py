"""The towers' arithmetic, written out for speed: the same functions as OpenCLIP's modules, in another order of work.

What makes it fast, and why each is exact:

- a tower returns one position of its last layer (the class token, the end of the text), so the last block computes
  queries, output and MLP at that position only: a twelfth of a ViT-B less work, same value;
- the residual stream, the matrix products and attention run in the working precision (bf16), while weights, layer
  norms, the last projection and all similarities stay float32: no copy of the weights outlives the step;
- one function stands for every block of a tower, so that ``torch.compile`` sees it once and not twelve times.

:func:`working` switches it on around a step. Towers that are built otherwise keep their own modules, under autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from open_clip.transformer import QuickGELU, ResidualAttentionBlock, Transformer, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Weights = tuple[Tensor, ...]  # of one block, in the order of _block_weights
_EXACT, _QUICK = "gelu", "quick_gelu"


@dataclass(frozen=True)
class Working:
    """How a step is computed: the type of the residual stream, and whether blocks are compiled."""

    dtype: torch.dtype
    compiled: bool = False

    @cached_property
    def block(self) -> Callable[..., Tensor]:
        """A whole block."""
        return _compiled(_block) if self.compiled else _block

    @cached_property
    def last_block(self) -> Callable[..., Tensor]:
        """A block that is read at one position."""
        return _compiled(_last_block) if self.compiled else _last_block

    @cached_property
    def embed(self) -> Callable[..., Tensor]:
        """Patches to tokens."""
        return _compiled(_embed_images) if self.compiled else _embed_images


_cache: dict[Any, Callable[..., Tensor]] = {}
_active: list[Working] = []


def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function compiled for fixed shapes, once in a process: a second run finds its kernels."""
    if function not in _cache:
        # A handful of shapes: image batches with and without gradients, texts by length. And gradients of single
        # terms are taken before the step's backward pass, so that no buffer may be given away by the first of them.
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)  # pyright: ignore
        torch._functorch.config.donated_buffer = False  # pyright: ignore
        _cache[function] = torch.compile(function, dynamic=False)
    return _cache[function]


@contextmanager
def working(settings: Working | None) -> Generator[None]:
    """Compute towers this way inside the block; ``None`` leaves everything as it is."""
    if settings is None:
        yield
        return
    _active.append(settings)
    try:
        yield
    finally:
        _active.pop()


def active() -> Working | None:
    """What :func:`working` asked for, if anything."""
    return _active[-1] if _active else None


# -- which towers can -------------------------------------------------------------------------------------------------


def fast_image(visual: nn.Module) -> bool:
    """Whether an image tower is a plain ViT that is read at its class token."""
    return (
        type(visual) is VisionTransformer
        and visual.attn_pool is None
        and visual.pool_type == "tok"
        and isinstance(visual.patch_dropout, nn.Identity)
        and not visual.output_tokens
        and _plain_blocks(visual.transformer)
    )


def fast_text(text: Any) -> bool:
    """Whether a text tower (causal, read at the end of the text) is made of plain blocks."""
    return _plain_blocks(getattr(text, "transformer", None))


def _plain_blocks(transformer: Any) -> bool:
    return type(transformer) is Transformer and all(_plain_block(one) for one in transformer.resblocks)


def _plain_block(block: Any) -> bool:
    return (
        type(block) is ResidualAttentionBlock
        and isinstance(block.ls_1, nn.Identity)
        and isinstance(block.ls_2, nn.Identity)
        and not hasattr(block, "ln_1_kv")
        and isinstance(block.ln_1, nn.LayerNorm)
        and isinstance(block.mlp.gelu, nn.GELU | QuickGELU)
        and getattr(block.mlp.gelu, "approximate", "none") == "none"
        and getattr(block.attn, "in_proj_weight", None) is not None
        and isinstance(block.mlp.c_fc, nn.Linear)
        and block.attn.bias_k is None
    )


# -- the towers -------------------------------------------------------------------------------------------------------


def image_features(visual: Any, images: Tensor, how: Working) -> Tensor:
    """E1 before normalisation, as ``VisionTransformer.forward``: [n, 3, S, S] -> [n, D]."""
    with torch.autocast(images.device.type, enabled=False):
        norm = visual.ln_pre if isinstance(visual.ln_pre, nn.LayerNorm) else None
        values = how.embed(
            images,
            visual.conv1.weight,
            visual.class_embedding,
            visual.positional_embedding,
            None if norm is None else norm.weight,
            None if norm is None else norm.bias,
            0.0 if norm is None else norm.eps,
            how.dtype,
        )
        pooled = _blocks(visual.transformer, values, None, how)
        pooled = _norm(pooled, visual.ln_post.weight, visual.ln_post.bias, visual.ln_post.eps, pooled.dtype)
        return pooled if visual.proj is None else pooled @ visual.proj


def text_backbone(text: Any, tokens: Tensor, ends: Tensor, how: Working) -> Tensor:
    """Ē2: [n, L] tokens that end at ``ends`` [n] -> [n, text_width]."""
    with torch.autocast(tokens.device.type, enabled=False):
        length = tokens.shape[1]
        values = (text.token_embedding(tokens) + text.positional_embedding[:length]).to(how.dtype)
        pooled = _blocks(text.transformer, values, ends, how)
        return _norm(pooled, text.ln_final.weight, text.ln_final.bias, text.ln_final.eps, pooled.dtype)


def _blocks(transformer: Any, values: Tensor, ends: Tensor | None, how: Working) -> Tensor:
    """All blocks; the last one at one position, in full precision: [n, L, W] -> [n, W]. ``ends`` None: position 0."""
    *inner, last = transformer.resblocks
    causal = ends is not None
    for block in inner:
        settings = (block.attn.num_heads, causal, _activation(block), block.ln_1.eps, block.ln_2.eps)
        if transformer.grad_checkpointing and torch.is_grad_enabled():
            values = checkpoint(how.block, values, _block_weights(block), *settings, use_reentrant=False)
        else:
            values = how.block(values, _block_weights(block), *settings)
    settings = (last.attn.num_heads, _activation(last), last.ln_1.eps, last.ln_2.eps)
    return how.last_block(values, ends, _block_weights(last), *settings)


def _block_weights(block: Any) -> Weights:
    attention, mlp = block.attn, block.mlp
    return (
        block.ln_1.weight,
        block.ln_1.bias,
        attention.in_proj_weight,
        attention.in_proj_bias,
        attention.out_proj.weight,
        attention.out_proj.bias,
        block.ln_2.weight,
        block.ln_2.bias,
        mlp.c_fc.weight,
        mlp.c_fc.bias,
        mlp.c_proj.weight,
        mlp.c_proj.bias,
    )


def _activation(block: Any) -> str:
    return _QUICK if isinstance(block.mlp.gelu, QuickGELU) else _EXACT


# -- what is compiled -------------------------------------------------------------------------------------------------


def _full(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def _norm(values: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Layer norm in full precision; the result in the given type."""
    return functional.layer_norm(_full(values), (values.shape[-1],), weight, bias, eps).to(dtype)


def _linear(values: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.linear(values, weight.to(values.dtype), bias.to(values.dtype))


def _mlp(values: Tensor, dtype: torch.dtype, weights: Weights, activation: str, eps: float) -> Tensor:
    """Norm and MLP, computed in ``dtype`` whatever the type of the values."""
    norm_weight, norm_bias, in_weight, in_bias, out_weight, out_bias = weights
    inner = _linear(_norm(values, norm_weight, norm_bias, eps, dtype), in_weight, in_bias)
    inner = inner * torch.sigmoid(1.702 * inner) if activation == _QUICK else functional.gelu(inner)
    return _linear(inner, out_weight, out_bias)


def _block(
    values: Tensor,  # [n, L, W]
    weights: Weights,
    heads: int,
    causal: bool,
    activation: str,
    eps_1: float,
    eps_2: float,
) -> Tensor:
    n, length, width = values.shape
    norm_weight, norm_bias, in_weight, in_bias, out_weight, out_bias = weights[:6]
    packed = _linear(_norm(values, norm_weight, norm_bias, eps_1, values.dtype), in_weight, in_bias)
    query, key, value = packed.view(n, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4).unbind(0)
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
    values = values + _linear(mixed.transpose(1, 2).reshape(n, length, width), out_weight, out_bias)
    return values + _mlp(values, values.dtype, weights[6:], activation, eps_2)


def _last_block(
    values: Tensor,  # [n, L, W]
    ends: Tensor | None,  # [n] position that is read; it sees what stands before it. None: 0, which sees everything
    weights: Weights,
    heads: int,
    activation: str,
    eps_1: float,
    eps_2: float,
) -> Tensor:
    n, length, width = values.shape
    norm_weight, norm_bias, in_weight, in_bias, out_weight, out_bias = weights[:6]
    normed = _norm(values, norm_weight, norm_bias, eps_1, values.dtype)
    if ends is None:
        at_end, normed_at_end, hidden = values[:, 0], normed[:, 0], None
    else:
        rows = torch.arange(n, device=values.device)
        at_end, normed_at_end = values[rows, ends], normed[rows, ends]
        hidden = torch.arange(length, device=values.device) > ends[:, None]  # [n, L]
    query = _linear(normed_at_end, in_weight[:width], in_bias[:width]).view(n, heads, 1, width // heads)
    both = _linear(normed, in_weight[width:], in_bias[width:])
    key, value = both.view(n, length, 2, heads, width // heads).permute(2, 0, 3, 1, 4).unbind(0)
    # One query an example: plain products in full precision cost nothing beside the keys and values themselves.
    score = (_full(query) * _full(key)).sum(dim=-1) * (width // heads) ** -0.5  # [n, heads, L]
    if hidden is not None:
        score = score.masked_fill(hidden[:, None], -torch.inf)
    mixed = (score.softmax(dim=-1).unsqueeze(-1) * _full(value)).sum(dim=2).reshape(n, width)
    at_end = _full(at_end) + _full(_linear(mixed.to(values.dtype), out_weight, out_bias))
    return at_end + _full(_mlp(at_end, values.dtype, weights[6:], activation, eps_2))


def _embed_images(
    images: Tensor,  # [n, 3, S, S]
    kernel: Tensor,  # [W, 3, p, p]
    class_embedding: Tensor,
    positions: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Patches as rows of one matrix product (the convolution's stride is its size), class token, positions."""
    n, channels, size, _ = images.shape
    width, patch = kernel.shape[0], kernel.shape[-1]
    grid = size // patch
    patches = images.to(dtype)[:, :, : grid * patch, : grid * patch].reshape(n, channels, grid, patch, grid, patch)
    patches = patches.permute(0, 2, 4, 1, 3, 5).reshape(n, grid * grid, -1)
    tokens = functional.linear(patches, kernel.reshape(width, -1).to(dtype))
    values = torch.cat([class_embedding.to(dtype).expand(n, 1, width), tokens], dim=1) + positions.to(dtype)
    if norm_weight is None or norm_bias is None:
        return values
    return _norm(values, norm_weight, norm_bias, eps, dtype)
