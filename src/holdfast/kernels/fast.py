"""The towers' arithmetic, written out for speed: the same functions as OpenCLIP's modules, in another order of work.

What makes it fast, and why each is exact:

- a tower returns one position of its last layer (the class token, the end of the text), so the last block computes
  query, output and MLP at that position only, and its keys and values not at all: a twelfth of a ViT-B less work;
- texts share rows (:mod:`holdfast.kernels.text_packing`): a text tower's work is that of the tokens there are;
- the residual stream, the matrix products and attention run in the working precision (bf16), while weights, layer
  norms, the last projection and all similarities stay float32: no copy of the weights outlives the step;
- one function stands for every block of a tower, so that ``torch.compile`` sees it once and not twelve times.

:func:`holdfast.model.compute.computing` switches it on around a step. Towers that are built otherwise keep their own
modules, under autocast; their blocks are computed by :mod:`holdfast.kernels.own_blocks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, cast

import torch
from open_clip.transformer import QuickGELU, ResidualAttentionBlock, Transformer, VisionTransformer
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from holdfast.data.round import TextRows
from holdfast.kernels import fused
from holdfast.model.compute import ComputeMode

Weights = tuple[Tensor, ...]  # of one block, in the order of block_weights
_EXACT, QUICK = "gelu", "quick_gelu"


_cache: dict[Any, Callable[..., Tensor]] = {}


def way(mode: ComputeMode, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function as the mode has it: compiled, or as it stands."""
    return _compiled(function) if mode.compiled else function


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
def attention_kernels(values: Tensor, heads: int, *, plain: bool) -> Generator[None]:
    """Attention without a mask on a GPU in bf16 goes to the faster of the two kernels there are for it."""
    if not plain or not values.is_cuda or values.dtype not in (torch.bfloat16, torch.float16):
        yield
        return
    n, length, width = values.shape
    with sdpa_kernel(_faster_attention(n, length, heads, width // heads, values.dtype, values.device)):
        yield


@lru_cache(maxsize=16)
def _faster_attention(
    n: int, length: int, heads: int, size: int, dtype: torch.dtype, device: torch.device
) -> list[SDPBackend]:
    """Measured once in a process, a few milliseconds each: which one wins depends on card, shape and version."""
    times: dict[SDPBackend, float] = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            times[backend] = _time_attention(backend, (n, length, 3, heads, size), dtype, device)
        except RuntimeError:
            continue  # this card, shape or build does not have it
    return [min(times, key=lambda time: times[time])] if times else [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _time_attention(backend: SDPBackend, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> float:
    """Milliseconds of a forward and a backward pass."""
    with torch.enable_grad(), sdpa_kernel(backend), torch.random.fork_rng(devices=[device]):
        packed = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
        query, key, value = packed.permute(2, 0, 3, 1, 4).unbind(0)
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for turn in range(6):
            if turn == 2:
                start.record()
            functional.scaled_dot_product_attention(query, key, value).sum().backward(inputs=[packed])
        stop.record()
        torch.cuda.synchronize(device)
        return start.elapsed_time(stop)


class OpenBlock(ResidualAttentionBlock):
    """A block that computes what it is asked to, inside its own call.

    The fast path reads a block's weights and does not use its forward pass. Called through the module all the same,
    the hooks on it fire: sharded weights (:mod:`holdfast.train.sharded`) are gathered before and let go after.
    """

    @override
    def forward(
        self, q_x: Tensor, *args: Any, by: Callable[[Tensor, Weights], Tensor] | None = None, **options: Any
    ) -> Tensor:
        if by is not None:
            return by(q_x, block_weights(self))
        return super().forward(q_x, *args, **options)

    @classmethod
    def replace_in(cls, model: nn.Module) -> None:
        """Give the plain blocks of a model this call; their weights, names and arithmetic stay."""
        for module in model.modules():
            if type(module) is ResidualAttentionBlock:
                module.__class__ = cls


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
    return type(transformer) is Transformer and all(plain_block(resblock) for resblock in transformer.resblocks)


def plain_block(block: Any) -> bool:
    """Whether a block is norm, attention, norm and MLP, each with biases, and nothing besides."""
    return (
        type(block) is OpenBlock
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


def image_features(visual: Any, images: Tensor, mode: ComputeMode) -> Tensor:
    """E1 before normalisation, as ``VisionTransformer.forward``: [n, 3, S, S] -> [n, D]."""
    count = len(images)
    grid = visual.grid_size[0] * visual.grid_size[1]
    fuses = _fuses(visual.transformer, grid + 1, images.device, mode)
    if torch.is_grad_enabled():
        # The weights' gradients are products over all tokens of the batch: with a number of them that is a multiple of
        # eight they reach the matrix units' fast path. The pictures added here have no gradient. Fused blocks see to
        # their own tokens; what is left is the embedding.
        images = functional.pad(images, (0, 0, 0, 0, 0, 0, 0, -count % (8 // math.gcd(8, grid) if fuses else 8)))
    with torch.autocast(images.device.type, enabled=False):
        norm = visual.ln_pre if isinstance(visual.ln_pre, nn.LayerNorm) else None
        values = way(mode, _embed_images)(
            images,
            visual.conv1.weight,
            visual.class_embedding,
            visual.positional_embedding,
            None if norm is None else norm.weight,
            None if norm is None else norm.bias,
            0.0 if norm is None else norm.eps,
            mode.dtype,
        )
        pooled = _blocks(visual.transformer, values, mode, fuses=fuses)[:count]
        pooled = _norm(pooled, visual.ln_post.weight, visual.ln_post.bias, visual.ln_post.eps, pooled.dtype)
        return pooled if visual.proj is None else pooled @ visual.proj


def text_backbone(text: Any, tokens: Tensor, where: Tensor | TextRows, mode: ComputeMode) -> Tensor:
    """Ē2: [n, L] tokens -> [n, text_width]; ``where`` gives their ends [n], or how they share rows."""
    with torch.autocast(tokens.device.type, enabled=False):
        fuses = _fuses(
            text.transformer,
            where.text.shape[1] if isinstance(where, TextRows) else tokens.shape[1],
            tokens.device,
            mode,
            texts=True,
        )
        if isinstance(where, TextRows):
            tokens = tokens.flatten()[where.source]
            positions = _rows_of(text.positional_embedding, where.position.flatten()).view(*tokens.shape, -1)
            mask = None if fuses else _own_text_before(where.text)
            owners = where.text.int()
            end, width = where.end, tokens.shape[1]
            row = end // width
            own = where.text.flatten()[end]
            hidden = (where.text[row] != own[:, None]) | (
                torch.arange(width, device=end.device) > (end % width)[:, None]
            )
        else:
            n, width = tokens.shape
            positions, mask = text.positional_embedding[:width], None
            owners = torch.zeros_like(tokens, dtype=torch.int32)  # one text a row
            end = torch.arange(n, device=tokens.device) * width + where
            hidden = torch.arange(width, device=tokens.device) > where[:, None]
        values = (text.token_embedding(tokens) + positions).to(mode.dtype)
        settings: dict[str, Any] = {"mask": mask, "causal": mask is None, "at": end, "hidden": hidden}
        pooled = _blocks(text.transformer, values, mode, **settings, fuses=fuses, owners=owners)
        return _norm(pooled, text.ln_final.weight, text.ln_final.bias, text.ln_final.eps, pooled.dtype)


def _own_text_before(text: Tensor) -> Tensor:
    """[R, W] owners -> [R, 1, W, W]: a place sees what stands before it in its own text, itself included."""
    same = text[:, :, None] == text[:, None, :]
    return same.tril().unsqueeze(1)


def _fuses(transformer: Any, length: int, device: torch.device, mode: ComputeMode, *, texts: bool = False) -> bool:
    """Whether the blocks of a tower are computed by :mod:`holdfast.kernels.fused`."""
    attention = transformer.resblocks[0].attn
    size = attention.embed_dim // attention.num_heads
    fused_here = mode.fused and not transformer.grad_checkpointing
    return fused_here and fused.can(device, mode.dtype, length, size, owned=texts)


def _blocks(
    transformer: Any,
    values: Tensor,  # [n, L, W]
    mode: ComputeMode,
    *,
    mask: Tensor | None = None,  # [n, 1, L, L]
    causal: bool = False,
    at: Tensor | None = None,  # [k] places that are read, in the flattened [n * L]; None: position 0 of each
    hidden: Tensor | None = None,  # [k, L] what each of them must not see in its row
    fuses: bool = False,
    owners: Tensor | None = None,  # [n, L] whose text a place belongs to
) -> Tensor:
    """All blocks; the last one at the places that are read, in full precision: -> [k, W]."""
    *inner, last = transformer.resblocks
    carried: Tensor | None = None
    heads = last.attn.num_heads
    if fuses and inner:
        n, length, _ = values.shape
        eps = inner[0].ln_1.eps, inner[0].ln_2.eps
        shape = fused.Shape(n, length, heads, activation_of(last) == QUICK, *eps, owners)
        values, carried = fused.blocks(values, [block_weights(block) for block in inner], shape)
        inner = []
    with attention_kernels(values, heads, plain=mask is None and not causal and bool(inner)):
        for block in inner:
            settings = (mask, block.attn.num_heads, causal, activation_of(block), block.ln_1.eps, block.ln_2.eps)
            again = transformer.grad_checkpointing and torch.is_grad_enabled()
            values = block(values, by=partial(_inner_block, mode, again, settings))
    settings = (heads, activation_of(last), last.ln_1.eps, last.ln_2.eps, carried)
    return last(values, by=lambda values, weights: way(mode, _last_block)(values, at, hidden, weights, *settings))


def _inner_block(mode: ComputeMode, again: bool, settings: tuple[Any, ...], values: Tensor, weights: Weights) -> Tensor:
    """A whole block; ``again``: its activations are computed once more in the backward pass."""
    if again:
        return checkpoint(way(mode, _block), values, weights, *settings, use_reentrant=False)
    return way(mode, _block)(values, weights, *settings)


def block_weights(block: Any) -> Weights:
    """What a plain block multiplies with, in the order that all functions here expect."""
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


def activation_of(block: Any) -> str:
    """Which of the two activations a plain block has."""
    return QUICK if isinstance(block.mlp.gelu, QuickGELU) else _EXACT


# -- what is compiled -------------------------------------------------------------------------------------------------


def _full(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def _norm(values: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Layer norm in full precision; the result in the given type."""
    return functional.layer_norm(_full(values), (values.shape[-1],), weight, bias, eps).to(dtype)


class _Rows(torch.autograd.Function):
    """values[which]: one of the values [n, ...] for each of which [k].

    Several texts stand in one row, and every text has a first position. What comes back for one of the values is added
    by a matrix product: in full precision and in a fixed order, where a scatter adds in the values' own and in the
    order in which its threads arrive.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx, values: Tensor, which: Tensor
    ) -> Tensor:
        ctx.save_for_backward(which)
        cast(Any, ctx).count = len(values)
        return values.index_select(0, which)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx, gradient: Tensor
    ) -> tuple[Tensor, None]:
        (which,) = cast("tuple[Tensor, ...]", cast(Any, ctx).saved_tensors)
        count: int = cast(Any, ctx).count
        flat, more = gradient.flatten(1), -len(which) % 8  # multiples of eight reach the matrix units' fast path
        which, flat = functional.pad(which, (0, more), value=count), functional.pad(flat, (0, 0, 0, more))
        picked = torch.arange(count, device=which.device)[:, None] == which  # [n, k]
        added = picked.to(gradient.dtype) @ flat
        return added.view(count, *gradient.shape[1:]), None


def _rows_of(values: Tensor, which: Tensor) -> Tensor:
    return cast(Tensor, _Rows.apply(values, which))


def _linear(values: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.linear(values, weight.to(values.dtype), bias.to(values.dtype))


def _mlp(values: Tensor, dtype: torch.dtype, weights: Weights, activation: str, eps: float) -> Tensor:
    """Norm and MLP, computed in ``dtype`` whatever the type of the values."""
    norm_weight, norm_bias, in_weight, in_bias, out_weight, out_bias = weights
    inner = _linear(_norm(values, norm_weight, norm_bias, eps, dtype), in_weight, in_bias)
    if torch.compiler.is_compiling() and torch.is_grad_enabled():
        # Only what goes into the activation is kept for the backward pass, which computes what came out of it once
        # more on the way: a quarter of a block's memory for a fourteenth of its traffic. (Nothing else in there is
        # computed twice: the compiler drops what the backward pass does not read.)
        return checkpoint(
            _activated, inner, out_weight, out_bias, activation, use_reentrant=False, preserve_rng_state=False
        )
    return _activated(inner, out_weight, out_bias, activation)


def _activated(inner: Tensor, weight: Tensor, bias: Tensor, activation: str) -> Tensor:
    inner = inner * torch.sigmoid(1.702 * inner) if activation == QUICK else functional.gelu(inner)
    return _linear(inner, weight, bias)


def _block(
    values: Tensor,  # [n, L, W]
    weights: Weights,
    mask: Tensor | None,  # [n, 1, L, L]
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
    if mask is None:
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
    else:  # rows that texts share are short: the scores are nothing beside the products of the block
        score = _full(query @ key.transpose(-1, -2)) * (width // heads) ** -0.5
        mixed = score.masked_fill(~mask, -torch.inf).softmax(dim=-1).to(values.dtype) @ value
    values = values + _linear(mixed.transpose(1, 2).reshape(n, length, width), out_weight, out_bias)
    return values + _mlp(values, values.dtype, weights[6:], activation, eps_2)


def _last_block(
    values: Tensor,  # [n, L, W]
    at: Tensor | None,  # [k] places that are read, in the flattened [n * L]; None: position 0 of each, k = n
    hidden: Tensor | None,  # [k, L]
    weights: Weights,
    heads: int,
    activation: str,
    eps_1: float,
    eps_2: float,
    carried: Tensor | None = None,  # [W] to be added to the values
) -> Tensor:
    """A block that is read at one position a text or picture: [k, W].

    With one query q an example, no key and no value need be formed (head by head, x̂ the normed values)::

        score_j = q·(K x̂_j + b_K) = (Kᵀq)·x̂_j + const          the constant drops out of the softmax
        mixed   = Σ_j p_j (V x̂_j + b_V) = V (Σ_j p_j x̂_j) + b_V
    """
    _, length, width = values.shape
    size = width // heads
    norm_weight, norm_bias, in_weight, in_bias, out_weight, out_bias = weights[:6]
    if carried is not None:
        values = (_full(values) + carried).to(values.dtype)
    normed = _norm(values, norm_weight, norm_bias, eps_1, values.dtype)
    if at is None:
        at_end, normed_at_end = values[:, 0], normed[:, 0]
    else:
        at_end = values.reshape(-1, width).index_select(0, at)
        normed_at_end = normed.reshape(-1, width).index_select(0, at)
        normed = _rows_of(normed, at // length)
    k = len(at_end)
    query = _linear(normed_at_end, in_weight[:width], in_bias[:width]).view(k, heads, size).transpose(0, 1)
    of_keys, of_values = in_weight[width:].to(values.dtype).view(2, heads, size, width).unbind(0)
    # Heads last and in eights: a row of 197 scores would keep the products off the matrix units' fast path.
    query = functional.pad(torch.bmm(query, of_keys).transpose(0, 1), (0, 0, 0, -heads % 8))  # [k, heads, W]
    score = _full(torch.bmm(normed, query.transpose(1, 2))) * size**-0.5  # [k, L, heads]
    if hidden is not None:
        score = score.masked_fill(hidden[:, :, None], -torch.inf)
    share = score.softmax(dim=1).to(values.dtype)
    mean = torch.bmm(share.transpose(1, 2), normed)[:, :heads].transpose(0, 1)  # [heads, k, W]
    mixed = torch.bmm(mean, of_values.transpose(1, 2)).transpose(0, 1).reshape(k, width)
    mixed = mixed + in_bias[2 * width :].to(values.dtype)
    at_end = _full(at_end) + _full(_linear(mixed, out_weight, out_bias))
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
