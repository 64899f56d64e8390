"""Kernels for what stands between the matrix products of a block, each one pass over its values.

A block's products run at the card's rate; norms, activations and attention around them are passes over memory, and
what counts is how often the values are read and written. Each function here makes one pass do what PyTorch does in two
or three (a derivative, the activation once more, and the sum of a column for the bias), in a fixed order: the same
bits every time. Every one has its plain version in :mod:`holdfast.kernels.fused`, which is what a CPU runs.

Triton comes with PyTorch's CUDA builds; this module is imported where there is a GPU.
"""

# Triton's language is typed for its compiler, not for a type checker.
# pyright: basic, reportMissingTypeStubs=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_LONGEST = 256  # tokens that one program of the attention kernels holds at once
_HEAD = 64
_SHARP = _HEAD**-0.5 * 1.4426950408889634  # scores are powers of two here


def attends(length: int, size: int) -> bool:
    """Whether :func:`attend` is written for rows of this length and heads of this size."""
    return size == _HEAD and length <= _LONGEST


@lru_cache(maxsize=16)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


# -- sums of partial sums ---------------------------------------------------------------------------------------------


@triton.jit
def _column_sums(values, out, rows, columns, steps, R: tl.constexpr, C: tl.constexpr):
    column = tl.program_id(0) * C + tl.arange(0, C)
    total = tl.zeros((R, C), dtype=tl.float32)
    for step in range(steps):
        row = step * R + tl.arange(0, R)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        total += tl.load(values + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
    tl.store(out + column, tl.sum(total, axis=0), mask=column < columns)


def column_sums(values: Tensor) -> Tensor:
    """Sums over the first dimension, for a few hundred rows: [P, ...] to [...]."""
    rows, columns = values.shape[0], values[0].numel()
    out = torch.empty(values.shape[1:], dtype=torch.float32, device=values.device)
    r, c = 128, 16
    _column_sums[(triton.cdiv(columns, c),)](values, out, rows, columns, triton.cdiv(rows, r), R=r, C=c, num_warps=8)
    return out


# -- layer norm -------------------------------------------------------------------------------------------------------


@triton.jit
def _normed(values, carried, out, scale, rows, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    place = row[:, None] * WIDTH + column[None, :]
    x = tl.load(values + place, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(carried + column, mask=column < WIDTH, other=0.0)[None, :]
    mean = tl.sum(x, axis=1) / WIDTH
    x = tl.where((column < WIDTH)[None, :], x - mean[:, None], 0.0)
    over = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)
    tl.store(out + place, (x * over[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(scale + row, over, mask=row < rows)


def normed(values: Tensor, carried: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x̂ = (x - mean) / sd of x = values + carried, row by row [T, W], and 1 / sd [T]."""
    rows, width = values.shape
    out, scale = torch.empty_like(values), torch.empty(rows, dtype=torch.float32, device=values.device)
    r = 4
    _normed[(triton.cdiv(rows, r),)](
        values, carried, out, scale, rows, eps, WIDTH=width, BLOCK=triton.next_power_of_2(width), R=r, num_warps=4
    )
    return out, scale


@triton.jit
def _normed_backward(
    gradient, normed, scale, residual, out, sums, rows, steps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    real = column < WIDTH
    of_residual = tl.zeros((BLOCK,), dtype=tl.float32)
    of_out = tl.zeros((BLOCK,), dtype=tl.float32)
    for step in range(steps):
        row = (step * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * R + tl.arange(0, R)
        inside = (row < rows)[:, None] & real[None, :]
        place = row[:, None] * WIDTH + column[None, :]
        g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(normed + place, mask=inside, other=0.0).to(tl.float32)
        e = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        over = tl.load(scale + row, mask=row < rows, other=0.0)
        mean = tl.sum(g, axis=1) / WIDTH
        along = tl.sum(g * x, axis=1) / WIDTH
        d = tl.where(inside, (g - mean[:, None] - x * along[:, None]) * over[:, None] + e, 0.0)
        tl.store(out + place, d.to(out.dtype.element_ty), mask=inside)
        if SUMS:
            of_residual += tl.sum(e, axis=0)
            of_out += tl.sum(d, axis=0)
    if SUMS:
        mine = sums + tl.program_id(0) * 2 * WIDTH + column
        tl.store(mine, of_residual, mask=real)
        tl.store(mine + WIDTH, of_out, mask=real)


def normed_backward(
    gradient: Tensor, normed: Tensor, scale: Tensor, residual: Tensor, *, sums: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of the values: that of x̂ taken back through the norm, plus what the residual stream brings.

    Written over ``gradient``. With ``sums``, also the columns' sums of ``residual`` and of the result: the gradients
    of the biases that were added behind and before this norm.
    """
    rows, width = gradient.shape
    r = 4
    programs = min(4 * _processors(gradient.device), triton.cdiv(rows, r))
    steps = triton.cdiv(rows, r * programs)
    partial = torch.empty(programs, 2, width, dtype=torch.float32, device=gradient.device)
    _normed_backward[(programs,)](
        gradient, normed, scale, residual, gradient, partial, rows, steps,
        WIDTH=width, BLOCK=triton.next_power_of_2(width), R=r, SUMS=sums, num_warps=4,
    )  # fmt: skip
    both = column_sums(partial) if sums else partial[0]
    return gradient, both[0], both[1]


# -- activation -------------------------------------------------------------------------------------------------------


@triton.jit
def _gate(x, QUICK: tl.constexpr):
    """What x is multiplied by in the activation, and the activation's derivative.

    The normal distribution's tail by Abramowitz and Stegun 7.1.26, 1.5e-7 at most from the true one: a float32's
    rounding, and the exponential is the one that the derivative needs.
    """
    if QUICK:
        gate = 1.0 / (1.0 + tl.exp2(x * -2.4554669595930156))  # 1.702 / ln 2
        slope = gate + 1.702 * x * gate * (1.0 - gate)
    else:
        t = 1.0 / (1.0 + 0.23164188827 * tl.abs(x))
        bell = tl.exp2(x * x * -0.7213475204444817)  # exp(-x²/2)
        poly = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
        tail = poly * bell
        gate = tl.where(x < 0, tail, 1.0 - tail)
        slope = gate + x * bell * 0.3989422804014327
    return gate, slope


@triton.jit
def _activated(values, out, count, QUICK: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values + place, mask=place < count, other=0.0).to(tl.float32)
    gate, _ = _gate(x, QUICK)
    tl.store(out + place, (x * gate).to(out.dtype.element_ty), mask=place < count)


def activated(values: Tensor, *, quick: bool) -> Tensor:
    """GELU, or x · sigmoid(1.702 x)."""
    out = torch.empty_like(values)
    block = 2048
    grid = (triton.cdiv(values.numel(), block),)
    _activated[grid](values, out, values.numel(), QUICK=quick, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _activated_backward(
    gradient, values, active, sums, rows, steps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr,
    QUICK: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = column < WIDTH
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for step in range(steps):
        row = (step * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * R + tl.arange(0, R)
        inside = (row < rows)[:, None] & real[None, :]
        place = row[:, None] * WIDTH + column[None, :]
        x = tl.load(values + place, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32)
        gate, slope = _gate(x, QUICK)
        d = g * slope
        tl.store(active + place, (x * gate).to(active.dtype.element_ty), mask=inside)
        tl.store(gradient + place, d.to(gradient.dtype.element_ty), mask=inside)
        total += tl.sum(d, axis=0)
    tl.store(sums + tl.program_id(1) * WIDTH + column, total, mask=real)


def activated_backward(gradient: Tensor, values: Tensor, *, quick: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient through the activation (written over ``gradient``), the activation once more, and the columns' sums
    of the first: [T, W], [T, W], [W]."""
    rows, width = values.shape
    block, r = min(1024, triton.next_power_of_2(width)), 2
    columns = triton.cdiv(width, block)
    programs = min(triton.cdiv(8 * _processors(values.device), columns), triton.cdiv(rows, r))
    active = torch.empty_like(values)
    partial = torch.empty(programs, width, dtype=torch.float32, device=values.device)
    _activated_backward[(columns, programs)](
        gradient, values, active, partial, rows, triton.cdiv(rows, r * programs),
        WIDTH=width, BLOCK=block, R=r, QUICK=quick, num_warps=4,
    )  # fmt: skip
    return gradient, active, column_sums(partial)


# -- attention --------------------------------------------------------------------------------------------------------


@triton.jit
def _scores(q, k, row, owner, owners, start, length, N: tl.constexpr, ENDS: tl.constexpr, OWNED: tl.constexpr):
    s = tl.dot(q, tl.trans(k))
    column = start + tl.arange(0, N)
    if OWNED:
        of = tl.load(owners + column, mask=column < length, other=-2)
        s = tl.where((of[None, :] == owner[:, None]) & (column[None, :] <= row[:, None]), s, float("-inf"))
    elif ENDS:
        s = tl.where((column < length)[None, :], s, float("-inf"))
    return s


@triton.jit
def _attend(
    packed, queries, out, levels, owners, length, span, heads, sharp,
    OWNED: tl.constexpr, M: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """All keys and values of a picture's head at once, its queries M at a time."""
    image, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    stride = 3 * heads * D
    base = packed + (image.to(tl.int64) * length * stride + head * D)
    to = out + (image.to(tl.int64) * length * heads * D + head * D)
    levels += tl.program_id(0) * span
    owners += image * length
    size = tl.arange(0, D)
    of_keys = base + heads * D + size[None, :]
    of_values = of_keys + heads * D
    n1 = tl.arange(0, N1)[:, None]
    k1 = tl.load(of_keys + n1 * stride, mask=n1 < length, other=0.0)
    v1 = tl.load(of_values + n1 * stride, mask=n1 < length, other=0.0)
    if N2 > 0:
        n2 = N1 + tl.arange(0, N2)[:, None]
        k2 = tl.load(of_keys + n2 * stride, mask=n2 < length, other=0.0)
        v2 = tl.load(of_values + n2 * stride, mask=n2 < length, other=0.0)
    if N3 > 0:
        n3 = N1 + N2 + tl.arange(0, N3)[:, None]
        k3 = tl.load(of_keys + n3 * stride, mask=n3 < length, other=0.0)
        v3 = tl.load(of_values + n3 * stride, mask=n3 < length, other=0.0)
    for start in range(0, length, M):
        row = start + tl.arange(0, M)
        q = queries.load([image, start, head * D]).reshape(M, D)
        owner = row
        if OWNED:
            owner = tl.load(owners + row, mask=row < length, other=-3)
        s1 = _scores(q, k1, row, owner, owners, 0, length, N1, N2 == 0, OWNED)
        top = tl.max(s1, axis=1)
        if N2 > 0:
            s2 = _scores(q, k2, row, owner, owners, N1, length, N2, N3 == 0, OWNED)
            top = tl.maximum(top, tl.max(s2, axis=1))
        if N3 > 0:
            s3 = _scores(q, k3, row, owner, owners, N1 + N2, length, N3, True, OWNED)
            top = tl.maximum(top, tl.max(s3, axis=1))
        top *= sharp
        p1 = tl.exp2(s1 * sharp - top[:, None])
        total = tl.sum(p1, axis=1)
        mixed = tl.dot(p1.to(q.dtype), v1)
        if N2 > 0:
            p2 = tl.exp2(s2 * sharp - top[:, None])
            total += tl.sum(p2, axis=1)
            mixed = tl.dot(p2.to(q.dtype), v2, mixed)
        if N3 > 0:
            p3 = tl.exp2(s3 * sharp - top[:, None])
            total += tl.sum(p3, axis=1)
            mixed = tl.dot(p3.to(q.dtype), v3, mixed)
        mixed *= (1.0 / total)[:, None]
        tl.store(to + row[:, None] * heads * D + size[None, :], mixed.to(q.dtype), mask=(row < length)[:, None])
        tl.store(levels + row, tl.where(row < length, -top - tl.log2(total), float("-inf")))


def _pieces(length: int, most: int) -> tuple[int, ...]:
    """Powers of two, each at least 16, that together hold a row: 197 = 128 + 64 + 5 -> (128, 64, 16)."""
    pieces: list[int] = []
    while length > 0:
        piece = min(most, 1 << (length.bit_length() - 1))
        if piece < 16 or (len(pieces) == 2 and piece < length):
            piece = max(16, triton.next_power_of_2(length))
        pieces.append(piece)
        length -= piece
    return (*pieces, 0, 0)[: max(3, len(pieces))]


def _tiles(values: Tensor, images: int, length: int, rows: int) -> TensorDescriptor:
    """Rows of one head of one picture [T, ...·D], fetched by the card's copy engine; 0 behind the picture's last."""
    width = values.shape[1]
    return TensorDescriptor(values, [images, length, width], [length * width, width, 1], [1, rows, _HEAD])


def attend(packed: Tensor, out: Tensor, images: int, length: int, heads: int, owners: Tensor | None = None) -> Tensor:
    """softmax(q kᵀ / sqrt(D)) v for every picture and head, from packed q, k, v [T, 3·heads·D] into ``out`` [T, W].

    With ``owners`` (int32 [images, length]) a place sees what stands before it and has its owner, itself included.
    Returns what the backward pass needs, the levels [images·heads, length and more]: log2 of the softmax's denominator
    with its sign turned, -inf behind the last token.
    """
    m = 64
    span = triton.cdiv(length, m) * m
    levels = torch.empty(images * heads, span, dtype=torch.float32, device=packed.device)
    n1, n2, n3 = _pieces(length, 128)
    _attend[(images * heads,)](
        packed, _tiles(packed, images, length, m), out, levels, levels if owners is None else owners,
        length, span, heads, _SHARP,
        OWNED=owners is not None, M=m, N1=n1, N2=n2, N3=n3, D=_HEAD, num_warps=4, num_stages=3,
    )  # fmt: skip
    return levels


@triton.jit
def _attend_backward(
    packed, result, queries, gradients, outs, to_keys, levels, owners, sums, length, span, heads, sharp, soft,
    OWNED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """All keys and values of a picture's head at once, its queries N at a time; scores stand on their side [M, N].

    The copy engine brings what the loop reads: a fence in the loop (before a product that reads what threads have
    written) waits for every load of the threads' own. Sums of columns are biases' gradients. Those of the keys are 0, a
    softmax does not see what all keys share; its shares add up to 1, so that those of the values are the gradient's.
    """
    image, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    stride = 3 * heads * D
    between = heads * D
    column = head * D
    at = image.to(tl.int64) * length * stride + column
    levels += tl.program_id(0) * span
    owners += image * length
    key = tl.arange(0, M)
    size = tl.arange(0, D)
    row = tl.arange(0, N)
    inside = key[:, None] < length
    of_keys = packed + at + between + key[:, None] * stride + size[None, :]
    k = tl.load(of_keys, mask=inside, other=0.0)
    v = tl.load(of_keys + between, mask=inside, other=0.0)
    level = tl.load(levels + row)
    if OWNED:
        owner = tl.load(owners + key, mask=key < length, other=-2)
    dk = tl.zeros((M, D), dtype=tl.float32)
    dv = tl.zeros((M, D), dtype=tl.float32)
    sum_q = tl.zeros((D, N), dtype=tl.float32)
    sum_v = tl.zeros((N, D), dtype=tl.float32)
    to = result + at + row[:, None] * stride + size[None, :]
    for start in range(0, length, N):
        q = queries.load([image, start, column]).reshape(N, D)
        g = gradients.load([image, start, column]).reshape(N, D)
        o = outs.load([image, start, column]).reshape(N, D).to(tl.float32)
        sum_v += g.to(tl.float32)
        delta = tl.sum(o * g.to(tl.float32), axis=1)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * sharp + level[None, :])
        if OWNED:
            of = tl.load(owners + start + row, mask=start + row < length, other=-3)
            p = tl.where((owner[:, None] == of[None, :]) & (key[:, None] <= (start + row)[None, :]), p, 0.0)
        else:
            p = tl.where(inside, p, 0.0)
        dp = tl.dot(v, tl.trans(g))
        dv = tl.dot(p.to(g.dtype), g, dv)
        ds = (p * (dp - delta[None, :])).to(g.dtype)
        dk = tl.dot(ds, q, dk)
        dq = tl.dot(tl.trans(k), ds) * soft
        sum_q += dq
        tl.store(to + start * stride, tl.trans(dq).to(g.dtype), mask=(row < length - start)[:, None])
        level = tl.load(levels + tl.minimum(start + N, span - N) + row)
    to_keys.store([image, 0, between + column], (dk * soft).to(k.dtype).reshape(1, M, D))
    to_keys.store([image, 0, 2 * between + column], dv.to(k.dtype).reshape(1, M, D))
    sums += image * stride + column + size
    tl.store(sums, tl.sum(sum_q, axis=1))
    tl.store(sums + between, tl.zeros((D,), dtype=tl.float32))
    tl.store(sums + 2 * between, tl.sum(sum_v, axis=0))


def attend_backward(
    packed: Tensor, out: Tensor, gradient: Tensor, levels: Tensor, result: Tensor, images: int, length: int, heads: int,
    owners: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Gradient of packed q, k, v into ``result`` [T, 3·heads·D]; returns the sums of its columns [3·heads·D]."""
    m, n = max(64, triton.next_power_of_2(length)), 32
    sums = torch.empty(images, packed.shape[1], dtype=torch.float32, device=packed.device)
    queries, gradients, outs = (_tiles(item, images, length, n) for item in (packed, gradient, out))
    _attend_backward[(images * heads,)](
        packed, result, queries, gradients, outs, _tiles(result, images, length, m), levels,
        levels if owners is None else owners, sums, length, levels.shape[1], heads, _SHARP, _HEAD**-0.5,
        OWNED=owners is not None, M=m, N=n, D=_HEAD, num_warps=8, num_stages=3,
    )  # fmt: skip
    return column_sums(sums)


# -- a norm's gain and bias inside the product behind it --------------------------------------------------------------


@triton.jit
def _fold(weight, bias, gain, shift, folded, folded_bias, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    real = column < WIDTH
    w = tl.load(weight + row * WIDTH + column, mask=real, other=0.0)
    scale = tl.load(gain + column, mask=real, other=0.0)
    move = tl.load(shift + column, mask=real, other=0.0)
    tl.store(folded + row * WIDTH + column, (w * scale).to(folded.dtype.element_ty), mask=real)
    tl.store(folded_bias + row, (tl.load(bias + row) + tl.sum(w * move)).to(folded_bias.dtype.element_ty))


def fold(weight: Tensor, bias: Tensor, gain: Tensor, shift: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """W·diag(gain) and b + W·shift: what acts on x̂ as W, b act on gain·x̂ + shift."""
    rows, width = weight.shape
    folded = torch.empty(rows, width, dtype=dtype, device=weight.device)
    folded_bias = torch.empty(rows, dtype=dtype, device=weight.device)
    _fold[(rows,)](
        weight, bias, gain, shift, folded, folded_bias, WIDTH=width, BLOCK=triton.next_power_of_2(width), num_warps=2
    )
    return folded, folded_bias


@triton.jit
def _unfold(
    gradient, of_bias, weight, gain, shift, sums, rows,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = column < WIDTH
    scale = tl.load(gain + column, mask=real, other=0.0)
    move = tl.load(shift + column, mask=real, other=0.0)
    of_gain = tl.zeros((BLOCK,), dtype=tl.float32)
    of_shift = tl.zeros((BLOCK,), dtype=tl.float32)
    for step in range(STEPS):
        row = (tl.program_id(1) * STEPS + step) * R + tl.arange(0, R)
        inside = (row < rows)[:, None] & real[None, :]
        place = row[:, None] * WIDTH + column[None, :]
        d = tl.load(gradient + place, mask=inside, other=0.0)
        w = tl.load(weight + place, mask=inside, other=0.0)
        b = tl.load(of_bias + row, mask=row < rows, other=0.0)[:, None]
        of_gain += tl.sum(d * w, axis=0)
        of_shift += tl.sum(b * w, axis=0)
        tl.store(gradient + place, d * scale[None, :] + b * move[None, :], mask=inside)
    mine = sums + tl.program_id(1) * 2 * WIDTH + column
    tl.store(mine, of_gain, mask=real)
    tl.store(mine + WIDTH, of_shift, mask=real)


def unfold(
    gradient: Tensor, of_bias: Tensor, weight: Tensor, gain: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradients of :func:`fold`'s two results to those of weight (over ``gradient``), gain and shift."""
    rows, width = weight.shape
    block, r, steps = 256, 8, 4
    programs = triton.cdiv(rows, r * steps)
    partial = torch.empty(programs, 2, width, dtype=torch.float32, device=weight.device)
    _unfold[(triton.cdiv(width, block), programs)](
        gradient, of_bias, weight, gain, shift, partial, rows, WIDTH=width, BLOCK=block, R=r, STEPS=steps, num_warps=4
    )
    both = column_sums(partial)
    return gradient, both[0], both[1]
