"""Products with the MLP's activation at their end, on Hopper: :mod:`holdfast.kernels.triton_ops` without its passes
for it.

``products.cu`` says how. Where the card is another one, or nothing can be compiled, :func:`takes` says no, and the
product and the pass over its values are two.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from holdfast.kernels.cuda.compile import Kernel, makes, source, tensor_map
from holdfast.kernels.triton_ops import column_sums

_ROWS, _COLUMNS, _DEPTH, _CLUSTER, _THREADS = 128, 256, 64, 2, 512  # as in products.cu
_MOST_COLUMNS = 4096  # the bias has to fit beside the tiles
_SHARED = 3 * (_ROWS + _COLUMNS) * _DEPTH * 2 + _ROWS * _COLUMNS * 2 + _MOST_COLUMNS // 256 * 4 * 68 * 4 + 1024


def takes(device: torch.device, outer: int, inner: int) -> bool:
    """Whether an MLP of ``outer`` values a token and ``inner`` within is one that these products are written for."""
    if outer % _DEPTH or inner % _COLUMNS or inner > _MOST_COLUMNS:
        return False
    return makes(device, lambda number: _kernel(False, False, number))


def up(values: Tensor, weight: Tensor, bias: Tensor, *, quick: bool, keep: bool = True) -> tuple[Tensor | None, Tensor]:
    """values weightᵀ + bias, where it is to be kept, and the activation of it.

    [M, N] both, from [M, K], [N, K] and [N].
    """
    active = torch.empty(len(values), len(weight), dtype=values.dtype, device=values.device)
    before = torch.empty_like(active) if keep else None
    pieces = tensor_map(weight, weight.shape, (_COLUMNS // _CLUSTER, _DEPTH))
    _launch(False, quick, values, pieces, before, active, bias, bias)
    return before, active


def down_backward(gradient: Tensor, weight: Tensor, before: Tensor, *, quick: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient weight) · act'(before), act(before), and the first one's sums of columns: [M, N], [M, N] and [N], from
    [M, K], [K, N] and [M, N]."""
    rows, columns = before.shape
    result, active = torch.empty_like(before), torch.empty_like(before)
    sums = torch.empty(_high(rows) * _CLUSTER, columns, dtype=torch.float32, device=before.device)
    _launch(True, quick, gradient, tensor_map(weight, weight.shape, (_DEPTH, 64)), result, active, before, sums)
    return result, active, column_sums(sums)


def _high(rows: int) -> int:
    """Clusters' tiles below each other."""
    return -(-rows // (_CLUSTER * _ROWS))


def _launch(
    backward: bool, quick: bool, values: Tensor, pieces: object, first: Tensor | None, second: Tensor, side: Tensor,
    sums: Tensor,
) -> None:  # fmt: skip
    rows, depth = values.shape
    columns = second.shape[1]
    kernel, clusters = _kernel(backward, quick, values.device.index or 0)
    programs = _CLUSTER * min(clusters, _high(rows) * (columns // _COLUMNS))
    sizes = (ctypes.c_int(size) for size in (rows, columns, depth))
    taken = tensor_map(values, values.shape, (_ROWS, _DEPTH))
    single = ctypes.c_void_p(None) if first is None else first
    kernel.launch(programs, (taken, pieces, single, second, side, sums, *sizes), values.device)


@lru_cache(maxsize=64)
def _kernel(backward: bool, quick: bool, device: int) -> tuple[Kernel, int]:
    """The kernel, and how many clusters of processors the card runs at a time."""
    options = [f"-DBACKWARD={int(backward)}", f"-DQUICK={int(quick)}"]
    kernel = Kernel(source("products.cu"), "activation_product", options, device, _THREADS, _SHARED)
    return kernel, kernel.clusters(_CLUSTER)
