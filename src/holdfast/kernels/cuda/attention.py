"""Attention on Hopper, for pictures: what :mod:`holdfast.kernels.triton_ops` has for rows of any kind, in less time.

``attention.cu`` says how. Texts, which see only what stands before them, and other cards keep the other kernels.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from holdfast.kernels.cuda.compile import Kernel, makes, source, tensor_map
from holdfast.kernels.triton_ops import column_sums

_HEAD = 64
_MOST = 115_712  # bytes of shared memory of which a processor has two


def takes(device: torch.device, length: int, size: int) -> bool:
    """Whether rows of this length, with heads of this size, are what these kernels are written for."""
    if size != _HEAD or length < 48 or _shared(3, length) > _MOST:
        return False
    return makes(device, lambda number: _kernels(length, number))


def attend(packed: Tensor, out: Tensor, images: int, length: int, heads: int) -> Tensor:
    """softmax(q kᵀ / sqrt(D)) v for every picture and head, from packed q, k, v [T, 3·heads·D] into ``out`` [T, W].

    Returns the levels that the backward pass needs, as :func:`holdfast.kernels.triton_ops.attend` does.
    """
    width, span = heads * _HEAD, -(-length // 64) * 64
    rows, everything = _rows(length), sum(_columns(length))
    levels = torch.empty(images * heads, span, dtype=torch.float32, device=packed.device)
    maps = (
        tensor_map(packed, (images, length, 3 * width), (1, rows, _HEAD)),
        tensor_map(packed, (images, length, 3 * width), (1, everything, _HEAD)),
        tensor_map(out, (images, length, width), (1, 64, _HEAD)),
    )
    forward, _ = _kernels(length, packed.device.index or 0)
    sizes = (ctypes.c_int(size) for size in (span, heads))
    forward.launch(images * heads, (*maps, levels, *sizes), packed.device)
    return levels


def backward(
    packed: Tensor, out: Tensor, gradient: Tensor, levels: Tensor, result: Tensor, images: int, length: int, heads: int
) -> Tensor:
    """Gradient of packed q, k, v into ``result`` [T, 3·heads·D]; returns the sums of its columns [3·heads·D]."""
    width = heads * _HEAD
    rows, everything = _rows(length), sum(_columns(length))
    sums = torch.empty(images, 3 * width, dtype=torch.float32, device=packed.device)
    maps = (
        tensor_map(packed, (images, length, 3 * width), (1, rows, _HEAD)),
        tensor_map(gradient, (images, length, width), (1, everything, _HEAD)),
        tensor_map(result, (images, length, 3 * width), (1, 64, _HEAD)),
    )
    _, kernel = _kernels(length, packed.device.index or 0)
    sizes = (ctypes.c_int(size) for size in (levels.shape[1], heads))
    kernel.launch(images * heads, (*maps, out, levels, sums, *sizes), packed.device)
    return column_sums(sums)


def _columns(length: int) -> tuple[int, int, int]:
    """A row's columns in three turns, multiples of 16, the first the largest: 197 -> (80, 64, 64)."""
    parts = -(-length // 16)
    first = -(-parts // 3)
    second = -(-(parts - first) // 2)
    return 16 * first, 16 * second, 16 * (parts - first - second)


def _rows(length: int) -> int:
    """Of a tile in shared memory."""
    return -(-length // 8) * 8


def _shared(tiles: int, length: int) -> int:
    """Bytes: so many tiles, one with rows for all columns, 64 rows on their way out, levels and a barrier."""
    return (tiles * _rows(length) + sum(_columns(length)) + 64) * _HEAD * 2 + 256 * 8 + 16


@lru_cache(maxsize=64)
def _kernels(length: int, device: int) -> tuple[Kernel, Kernel]:
    """Forward and backward."""
    text, options = written_out(length)
    forward = Kernel(text, "attend", options, device, 128, _shared(2, length))
    return forward, Kernel(text, "attend_backward", options, device, 128, _shared(3, length))


def written_out(length: int) -> tuple[str, list[str]]:
    """The source for rows of this length, and what the compiler is told."""
    columns = _columns(length)
    options = [f"-DLENGTH={length}", *(f"-DCOLUMNS_{turn}={size}" for turn, size in enumerate(columns))]
    return source("attention.cu").replace("\nMULTIPLY\n", _products(columns)), options


def _products(columns: tuple[int, ...]) -> str:
    """The matrix units' instructions, which name every register: written out for the sizes that are used."""
    head = "__device__ __forceinline__ void"
    parts: list[str] = []
    for name, add, mode in (("first_", 0, "="), ("", 1, "+")):
        parts.append(f"template <int N, int SIZE> {head} {name}scores(float (&sum)[SIZE], u64 a, u64 b);")
        for n, size in {**dict.fromkeys(columns, columns[0] // 2), sum(columns): sum(columns) // 2}.items():
            count = n // 2
            parts.append(
                f"template <> {head} {name}scores<{n}, {size}>(float (&sum)[{size}], u64 a, u64 b) {{\n"
                f'    asm volatile("{{.reg .pred add; setp.ne.b32 add, {add}, 0; "\n'
                f'        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{_names(count)}}}, "\n'
                f'        "%{count}, %{count + 1}, add, 1, 1, 0, 0;}}"\n'
                f'        : {_sums(mode, count)} : "l"(a), "l"(b));\n}}'
            )
        parts.append(
            f"{head} {name}gather(float (&sum)[32], u32 a, u32 b, u32 c, u32 d, u64 rows) {{\n"
            f'    asm volatile("{{.reg .pred add; setp.ne.b32 add, {add}, 0; "\n'
            f'        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{_names(32)}}}, "\n'
            f'        "{{%32, %33, %34, %35}}, %36, add, 1, 1, 1;}}"\n'
            f'        : {_sums(mode, 32)} : "r"(a), "r"(b), "r"(c), "r"(d), "l"(rows));\n}}'
        )
    return "\n" + "\n".join(parts) + "\n"


def _names(count: int) -> str:
    return ", ".join(f"%{number}" for number in range(count))


def _sums(mode: str, count: int) -> str:
    return ", ".join(f'"{mode}f"(sum[{number}])' for number in range(count))
