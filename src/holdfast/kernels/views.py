"""Views of pictures in one pass on a GPU: uint8 in, the finished view out. The plain version is `data.transforms`."""

# Triton's language is typed for its compiler, not for a type checker.
# pyright: basic, reportMissingTypeStubs=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _value(plane, y, x, SIDE: tl.constexpr, inside):
    return tl.math.div_rn(tl.load(plane + y * SIDE + x, mask=inside, other=0).to(tl.float32), 255.0)


@triton.jit
def _normalize(pixels, boxes, mirrored, mean, std, out, SIDE: tl.constexpr, CROPS: tl.constexpr, BLOCK: tl.constexpr):
    image = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < SIDE * SIDE
    y, x = place // SIDE, place % SIDE
    if CROPS:
        left, top = tl.load(boxes + image * 4), tl.load(boxes + image * 4 + 1)
        width, height = tl.load(boxes + image * 4 + 2), tl.load(boxes + image * 4 + 3)
        mirror = 1.0 - 2.0 * tl.load(mirrored + image)
        # From output to input, both in [-1, 1] from edge to edge; then to pixels, whose centres are at halves.
        across = ((2.0 * x + 1.0) / SIDE - 1.0) * width * mirror + (2.0 * left + width - 1.0)
        down = ((2.0 * y + 1.0) / SIDE - 1.0) * height + (2.0 * top + height - 1.0)
        across = tl.minimum(tl.maximum(((across + 1.0) * SIDE - 1.0) * 0.5, 0.0), SIDE - 1.0)
        down = tl.minimum(tl.maximum(((down + 1.0) * SIDE - 1.0) * 0.5, 0.0), SIDE - 1.0)
        x0, y0 = tl.floor(across).to(tl.int32), tl.floor(down).to(tl.int32)
        x1, y1 = tl.minimum(x0 + 1, SIDE - 1), tl.minimum(y0 + 1, SIDE - 1)
        right, below = across - tl.floor(across), down - tl.floor(down)
    for channel in tl.static_range(3):
        plane = pixels + (image * 3 + channel) * SIDE * SIDE
        if CROPS:
            upper = _value(plane, y0, x0, SIDE, inside) * (1 - right) + _value(plane, y0, x1, SIDE, inside) * right
            lower = _value(plane, y1, x0, SIDE, inside) * (1 - right) + _value(plane, y1, x1, SIDE, inside) * right
            value = upper * (1 - below) + lower * below
        else:
            value = _value(plane, y, x, SIDE, inside)
        value = tl.math.div_rn(value - tl.load(mean + channel), tl.load(std + channel))
        tl.store(out + (image * 3 + channel) * SIDE * SIDE + place, value.to(out.dtype.element_ty), mask=inside)


def normalize_views(
    pixels: Tensor,  # [n, 3, S, S] uint8
    mean: Tensor,  # [3] float32
    std: Tensor,
    box: Tensor | None,  # [n, 4] float32: left, top, width, height; None: the evaluation view
    mirrored: Tensor | None,  # [n] float32
    dtype: torch.dtype,
) -> Tensor:
    """Normalised pixels of the evaluation view, or of a crop resized back to the same size."""
    n, _, side, _ = pixels.shape
    out = torch.empty(pixels.shape, dtype=dtype, device=pixels.device)
    if n:
        _normalize[(triton.cdiv(side * side, 1024), n)](
            pixels, mean if box is None else box, mean if mirrored is None else mirrored, mean, std, out,
            SIDE=side, CROPS=box is not None, BLOCK=1024, num_warps=4,
        )  # fmt: skip
    return out
