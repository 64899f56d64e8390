"""In which precision, and through which kernels, a step is computed: one answer for the loop and for cached losses."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from holdfast.config import TrainConfig
from holdfast.model.fast import Working, working


def working_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """The type that matrices are multiplied in; weights, similarities and losses are never below float32."""
    if config.precision == "float64":
        return torch.float64
    if config.precision == "bf16":
        return torch.bfloat16
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return torch.bfloat16 if config.precision == "auto" and has_bf16 else torch.float32


def fast_towers(config: TrainConfig, device: torch.device) -> bool:
    """Whether towers are computed by :mod:`holdfast.model.fast`."""
    return config.towers == "fast" or (config.towers == "auto" and device.type == "cuda")


@contextmanager
def arithmetic(config: TrainConfig, device: torch.device, *, compiled: bool = True) -> Generator[None]:
    """Compute a step, or what it is compared with, the way the config says.

    The old losses that a round caches are computed inside this too (``compiled=False``: once is too short to compile
    for): a constraint compares two models, never two roundings of one.
    """
    dtype = working_dtype(config, device)
    compiled = compiled and config.compile and device.type == "cuda"
    # Sharded weights are there while their block is called, on the stream that called it.
    sharded = config.shard == "full"
    fused = config.compile and device.type == "cuda" and not sharded
    how = Working(dtype, compiled, fused, beside=not sharded) if fast_towers(config, device) else None
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16), working(how):
        yield
