"""How a step is computed: precision, compiled or not, streams. Set around a step, read by the towers.

The fast way is :mod:`holdfast.kernels`, which is optional: without it the towers call their own modules.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from types import ModuleType
from typing import TypeVar

import torch
from torch import Tensor

from holdfast.runtime import stream_for


@dataclass(frozen=True)
class ComputeMode:
    """How fast towers compute a step: the type of the residual stream, and whether blocks are compiled."""

    dtype: torch.dtype
    compiled: bool = False
    fused: bool = False  # blocks by holdfast.kernels.fused, where they are what it is written for
    side_stream: bool = True  # on a GPU, texts and pictures each on a stream of their own


_active: list[ComputeMode] = []


@lru_cache(maxsize=1)
def fast_kernels() -> ModuleType | None:
    """:mod:`holdfast.kernels.fast`; None where the package was left out."""
    try:
        from holdfast.kernels import fast
    except ImportError:
        return None
    return fast


@lru_cache(maxsize=1)
def own_block_kernels() -> ModuleType | None:
    """:mod:`holdfast.kernels.own_blocks`; None where the package was left out."""
    try:
        from holdfast.kernels import own_blocks
    except ImportError:
        return None
    return own_blocks


def has_fast_kernels() -> bool:
    """Whether :func:`fast_kernels` would find them. Asking imports no OpenCLIP: that takes seconds."""
    needed = ("open_clip", "holdfast.kernels", "holdfast.kernels.fast")  # a package before its modules
    return all(find_spec(name) is not None for name in needed)


@contextmanager
def computing(mode: ComputeMode | None) -> Generator[None]:
    """Compute towers this way inside the block; ``None`` leaves everything as it is."""
    if mode is None:
        yield
        return
    _active.append(mode)
    try:
        yield
    finally:
        _active.pop()


def active_mode() -> ComputeMode | None:
    """What :func:`computing` asked for, if anything."""
    return _active[-1] if _active else None


Returned = TypeVar("Returned", bound=tuple[Tensor, ...])


def on_side_stream(device: torch.device, function: Callable[[], Returned], *, wanted: bool) -> Callable[[], Returned]:
    """Begin on a second stream of the GPU while the first goes on; a call of what comes back waits for it.

    Autograd runs the backward pass of an operation on its stream, so that those overlap, too.
    """
    mode = active_mode()
    if device.type != "cuda" or mode is None or not mode.side_stream or not wanted:
        value = function()
        return lambda: value
    side = stream_for(device, "texts")
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        value = function()

    def join() -> Returned:
        stream = torch.cuda.current_stream(device)
        stream.wait_stream(side)
        for tensor in value:
            tensor.record_stream(stream)
        return value

    return join
