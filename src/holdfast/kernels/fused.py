"""A block of a tower as one function with a backward pass of its own: as few passes over memory as it takes.

Exact, like :mod:`holdfast.kernels.fast`, and in another order of work again. With x the residual stream [T, W]::

    x̂   = (x - mean) / sd
    q,k,v = W₁ (g x̂ + s) + b₁ = (W₁ diag g) x̂ + (b₁ + W₁ s)         the norm's gain and bias move into the product
    x    <- x + W₂ attention(q, k, v) + b₂                            and the MLP likewise, with its activation between

- The product adds to the residual stream where it lies. Its bias is not added: a sum of biases, one vector, is carried
  beside the stream (``carried``: what is meant by x is values + carried) and added where the stream is read.
- x̂ is what a norm's backward pass needs and what the product's needs, so it is kept and x is not.
- Gradients of gains come from those of the weights, which are a thousandth of the activations' size:
  dgain_j = Σ_i dW'_ij W_ij with W' = W diag g. Gradients of biases are sums that other passes make on their way.

On a GPU in bf16 the passes are those of :mod:`holdfast.kernels.triton_ops`, and on Hopper the MLP's products and
attention of pictures are those of :mod:`holdfast.kernels.cuda.products` and :mod:`holdfast.kernels.cuda.attention`;
elsewhere
plain PyTorch does the same, which is how the tests compare it with autograd in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional

if TYPE_CHECKING:
    from types import ModuleType

Weights = tuple[Tensor, ...]  # of one block, in the order of holdfast.kernels.fast


@dataclass(frozen=True)
class Shape:
    """What a block is told besides its weights."""

    images: int
    length: int
    heads: int
    quick: bool  # x · sigmoid(1.702 x) in place of GELU
    eps_1: float
    eps_2: float
    owners: Tensor | None = None  # [images, length] int32: a place sees what stands before it and has its owner
    learns: bool = True  # whether there will be a backward pass

    @property
    def tokens(self) -> int:
        """Rows that are tokens; what stands behind them fills up."""
        return self.images * self.length


@lru_cache(maxsize=1)
def _kernels() -> ModuleType | None:
    """The GPU's passes, where there are any."""
    try:
        from holdfast.kernels import triton_ops as kernels
    except ImportError:
        return None
    return kernels


@lru_cache(maxsize=64)
def _products(device: torch.device, inner: int, outer: int) -> ModuleType | None:
    """Products with the activation at their end, where there are any for an MLP of this size."""
    from holdfast.kernels.cuda import products

    return products if products.takes(device, outer, inner) else None


@lru_cache(maxsize=64)
def _attention(device: torch.device, length: int, size: int) -> ModuleType | None:
    """Attention without owners, where there is more than Triton's for rows of this length, or Triton's takes none."""
    from holdfast.kernels import long_attention
    from holdfast.kernels.cuda import attention

    if attention.takes(device, length, size):
        return attention
    short = cast(Any, _kernels()).attends(length, size)
    return long_attention if not short and long_attention.takes(device, length, size) else None


def can(device: torch.device, dtype: torch.dtype, length: int, head: int, *, owned: bool = False) -> bool:
    """Whether rows of so many tokens, with heads of this size, are what the kernels are written for.

    ``owned``: texts share rows.
    """
    if device.type != "cuda" or dtype != torch.bfloat16 or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    kernels = _kernels()
    if kernels is None:
        return False
    return kernels.attends(length, head) or (not owned and _attention(device, length, head) is not None)


def blocks(values: Tensor, weights: list[Weights], shape: Shape) -> tuple[Tensor, Tensor]:
    """Blocks one after another over values [n, L, W]: the stream without its biases [n, L, W], and their sum [W]."""
    width = values.shape[-1]
    shape = replace(shape, learns=torch.is_grad_enabled())
    # The weights' gradients are products over all tokens: with a multiple of eight of them they reach the matrix
    # units' fast path. This copy is also what the blocks may write on.
    stream = functional.pad(values.reshape(shape.tokens, width), (0, 0, 0, -shape.tokens % 8))
    with torch.no_grad():
        biases = [bias for weight in weights for bias in (weight[5], weight[11])]
        carried = torch.stack([torch.zeros_like(biases[0]), *biases]).cumsum(dim=0)
    for number, item in enumerate(weights):
        stream = cast(Tensor, _Block.apply(stream, carried[2 * number], carried[2 * number + 1], shape, *item))
    return stream[: shape.tokens].view(shape.images, shape.length, width), carried[-1]


class _Block(torch.autograd.Function):
    """One block: adds to the stream in place."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx, stream: Tensor, carried: Tensor, carried_on: Tensor, shape: Shape, *weights: Tensor
    ) -> Tensor:
        gain_1, shift_1, in_weight, in_bias, out_weight, _ = weights[:6]
        gain_2, shift_2, up_weight, up_bias, down_weight, _ = weights[6:]
        dtype = stream.dtype
        in_folded, in_folded_bias = _fold(in_weight, in_bias, gain_1, shift_1, dtype)
        up_folded, up_folded_bias = _fold(up_weight, up_bias, gain_2, shift_2, dtype)
        out_weight, down_weight = out_weight.to(dtype), down_weight.to(dtype)
        normed_1, scale_1 = _normed(stream, carried, shape.eps_1)
        packed = torch.addmm(in_folded_bias, normed_1, in_folded.T)
        mixed, levels = _attend(packed, shape)
        stream.addmm_(mixed, out_weight.T)
        normed_2, scale_2 = _normed(stream, carried_on, shape.eps_2)
        inner, active = _up(normed_2, up_folded, up_folded_bias, shape.quick, shape.learns)
        stream.addmm_(active, down_weight.T)
        del active
        ctx.mark_dirty(stream)
        if inner is None:
            return stream
        kept = (normed_1, scale_1, packed, mixed, levels, normed_2, scale_2, inner)
        ctx.save_for_backward(*kept, in_folded, up_folded, out_weight, down_weight, *weights)
        cast(Any, ctx).shape = shape
        return stream

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx, gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        shape: Shape = cast(Any, ctx).shape
        saved: tuple[Tensor, ...] = cast(Any, ctx).saved_tensors
        normed_1, scale_1, packed, mixed, levels, normed_2, scale_2, inner = saved[:8]
        in_folded, up_folded, out_weight, down_weight = saved[8:12]
        gain_1, shift_1, in_weight = saved[12:15]
        gain_2, shift_2, up_weight = saved[18:21]
        gradient = gradient.contiguous()
        # x <- x + W₄ a(z) + b₄,  z = W₃ x̂ + b₃
        of_inner, active, of_up_bias = _down_backward(gradient, down_weight, inner, shape.quick)
        of_down = _weight_gradient(gradient, active)
        del active
        of_up = _weight_gradient(of_inner, normed_2)
        middle, of_down_bias, of_out_bias = _normed_backward(of_inner @ up_folded, normed_2, scale_2, gradient, True)
        del of_inner
        of_up, of_gain_2, of_shift_2 = _unfold(of_up, of_up_bias, up_weight, gain_2, shift_2)
        # x <- x + W₂ attention(W₁ x̂ + b₁) + b₂
        of_out = _weight_gradient(middle, mixed)
        of_packed, of_in_bias = _attend_backward(packed, mixed, middle @ out_weight, levels, shape)
        of_in = _weight_gradient(of_packed, normed_1)
        before, _, _ = _normed_backward(of_packed @ in_folded, normed_1, scale_1, middle, False)
        of_in, of_gain_1, of_shift_1 = _unfold(of_in, of_in_bias, in_weight, gain_1, shift_1)
        return (
            *(before, None, None, None),
            *(of_gain_1, of_shift_1, of_in, of_in_bias, of_out, of_out_bias),
            *(of_gain_2, of_shift_2, of_up, of_up_bias, of_down, of_down_bias),
        )


# -- the passes: a kernel on a GPU, the same in plain words elsewhere -------------------------------------------------


def _full(values: Tensor) -> Tensor:
    return values.float() if values.dtype == torch.bfloat16 else values


def _weight_gradient(gradient: Tensor, values: Tensor) -> Tensor:
    """dyᵀ x, summed and written in full precision."""
    if gradient.is_cuda and gradient.dtype == torch.bfloat16:
        return torch.mm(gradient.T, values, out_dtype=torch.float32)
    return _full(gradient).T @ _full(values)


def _fold(weight: Tensor, bias: Tensor, gain: Tensor, shift: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """W diag(gain) and b + W shift."""
    if weight.is_cuda:
        return cast(Any, _kernels()).fold(weight, bias, gain, shift, dtype)
    return (weight * gain).to(dtype), (bias + weight @ shift).to(dtype)


def _unfold(
    gradient: Tensor, of_bias: Tensor, weight: Tensor, gain: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """From gradients of the folded weight and bias to those of weight, gain and shift."""
    if weight.is_cuda:
        return cast(Any, _kernels()).unfold(gradient, of_bias, weight, gain, shift)
    return gradient * gain + of_bias[:, None] * shift, (gradient * weight).sum(dim=0), of_bias @ weight


def _normed(values: Tensor, carried: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x̂ of x = values + carried, and 1 / sd."""
    if values.is_cuda:
        return cast(Any, _kernels()).normed(values, carried, eps)
    full = _full(values) + carried
    centred = full - full.mean(dim=1, keepdim=True)
    scale = (centred.square().mean(dim=1) + eps).rsqrt()
    return (centred * scale[:, None]).to(values.dtype), scale


def _normed_backward(
    gradient: Tensor, normed: Tensor, scale: Tensor, residual: Tensor, sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx = (dx̂ - mean dx̂ - x̂ mean(dx̂ x̂)) / sd + residual, and the columns' sums of residual and dx."""
    if gradient.is_cuda:
        return cast(Any, _kernels()).normed_backward(gradient, normed, scale, residual, sums=sums)
    g, x, e = _full(gradient), _full(normed), _full(residual)
    d = (g - g.mean(dim=1, keepdim=True) - x * (g * x).mean(dim=1, keepdim=True)) * scale[:, None] + e
    return d.to(gradient.dtype), e.sum(dim=0), d.sum(dim=0)


def _up(values: Tensor, weight: Tensor, bias: Tensor, quick: bool, keep: bool = True) -> tuple[Tensor | None, Tensor]:
    """What goes into the activation, values weightᵀ + bias, for a backward pass alone, and what comes out."""
    products = _products(values.device, *weight.shape) if values.is_cuda else None
    if products is not None:
        return products.up(values, weight, bias, quick=quick, keep=keep)
    inner = torch.addmm(bias, values, weight.T)
    if values.is_cuda:
        return inner, cast(Any, _kernels()).activated(inner, quick=quick)
    full = _full(inner)
    return inner, (full * torch.sigmoid(1.702 * full) if quick else functional.gelu(full)).to(values.dtype)


def _down_backward(gradient: Tensor, weight: Tensor, inner: Tensor, quick: bool) -> tuple[Tensor, Tensor, Tensor]:
    """gradient weight through the activation, the activation once more, and the sums of the first's columns."""
    if gradient.is_cuda:
        products = _products(gradient.device, *weight.T.shape)
        if products is not None:
            return products.down_backward(gradient, weight, inner, quick=quick)
        return cast(Any, _kernels()).activated_backward(gradient @ weight, inner, quick=quick)
    full = _full(inner)
    if quick:
        gate = torch.sigmoid(1.702 * full)
        slope = gate + 1.702 * full * gate * (1 - gate)
    else:
        gate = (1 + torch.erf(full * 0.5**0.5)) / 2
        slope = gate + full * torch.exp(-full.square() / 2) * 0.3989422804014327
    d = _full(gradient @ weight) * slope
    return d.to(gradient.dtype), (full * gate).to(inner.dtype), d.sum(dim=0)


def _attend(packed: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Attention's output [T, W], 0 behind the last token, and what its backward pass needs of the scores."""
    width = packed.shape[1] // 3
    if packed.is_cuda:
        mixed = packed.new_empty(packed.shape[0], width)
        mixed[shape.tokens :].zero_()
        given = (packed, mixed, shape.images, shape.length, shape.heads)
        attention = _attention(packed.device, shape.length, width // shape.heads) if shape.owners is None else None
        if attention is not None:
            return mixed, attention.attend(*given)
        return mixed, cast(Any, _kernels()).attend(*given, shape.owners)
    query, key, value = _heads(packed, shape)
    score = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    if shape.owners is not None:
        seen = (shape.owners[:, :, None] == shape.owners[:, None, :]).tril()
        score = score.masked_fill(~seen[:, None], -torch.inf)
    share = score.softmax(dim=-1)
    mixed = (share @ value).transpose(1, 2).reshape(shape.tokens, width)
    return functional.pad(mixed, (0, 0, 0, len(packed) - shape.tokens)).to(packed.dtype), share


def _attend_backward(
    packed: Tensor, mixed: Tensor, gradient: Tensor, levels: Tensor, shape: Shape
) -> tuple[Tensor, Tensor]:
    """The gradient of packed q, k, v, 0 behind the last token, and the sums of its columns."""
    if packed.is_cuda:
        result = torch.empty_like(packed)
        result[shape.tokens :].zero_()
        given = (packed, mixed, gradient, levels, result, shape.images, shape.length, shape.heads)
        size = packed.shape[1] // 3 // shape.heads
        attention = _attention(packed.device, shape.length, size) if shape.owners is None else None
        if attention is not None:
            return result, attention.backward(*given)
        return result, cast(Any, _kernels()).attend_backward(*given, shape.owners)
    query, key, value = _heads(packed, shape)
    size = query.shape[-1]
    g = _full(gradient)[: shape.tokens].view(shape.images, shape.length, shape.heads, size).transpose(1, 2)
    of_share = g @ value.transpose(-1, -2)
    of_score = levels * (of_share - (levels * of_share).sum(dim=-1, keepdim=True)) * size**-0.5
    each = torch.stack((of_score @ key, of_score.transpose(-1, -2) @ query, levels.transpose(-1, -2) @ g))
    result = each.permute(1, 3, 0, 2, 4).reshape(shape.tokens, packed.shape[1])
    result = functional.pad(result, (0, 0, 0, len(packed) - shape.tokens))
    return result.to(packed.dtype), result.sum(dim=0)


def _heads(packed: Tensor, shape: Shape) -> tuple[Tensor, ...]:
    """q, k, v, [n, heads, L, D] each, in full precision."""
    size = packed.shape[1] // 3 // shape.heads
    each = _full(packed)[: shape.tokens].view(shape.images, shape.length, 3, shape.heads, size)
    return each.permute(2, 0, 3, 1, 4).unbind(0)
