"""In which precision, and through which kernels, a step is computed: one answer for the loop and for cached losses."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal

import torch

from holdfast.config import TrainConfig
from holdfast.errors import UserError
from holdfast.model.compute import ComputeMode, computing, has_fast_kernels

Speed = Literal["plain", "fast", "compiled", "graphs"]


def working_dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    """The type that matrices are multiplied in; weights, similarities and losses are never below float32."""
    if config.precision == "float64":
        return torch.float64
    if config.precision == "bf16":
        return torch.bfloat16
    has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
    return torch.bfloat16 if config.precision == "auto" and has_bf16 else torch.float32


def speed_of(config: TrainConfig, device: torch.device) -> Speed:
    """What ``train.speed`` comes to on a device: each word includes those before it."""
    on_gpu = device.type == "cuda"
    if config.speed == "plain" or (config.speed == "auto" and not on_gpu):
        return "plain"
    if not has_fast_kernels():
        if config.speed == "auto":
            return "plain"
        raise UserError(
            f"train.speed = {config.speed!r} needs the package holdfast.kernels",
            found="an installation without it",
            do="say plain or auto",
        )
    if not on_gpu:
        return "fast"  # nothing is compiled for a CPU
    return "graphs" if config.speed == "auto" else config.speed


def fast_towers(config: TrainConfig, device: torch.device) -> bool:
    """Whether towers are computed by :mod:`holdfast.kernels`."""
    return speed_of(config, device) != "plain"


@contextmanager
def compute_mode(config: TrainConfig, device: torch.device, *, compiled: bool = True) -> Generator[None]:
    """Compute a step, or what it is compared with, the way the config says.

    The old losses that a round caches are computed inside this too (``compiled=False``: once is too short to compile
    for): a constraint compares two models, never two roundings of one.
    """
    dtype = working_dtype(config, device)
    speed = speed_of(config, device)
    compiles = speed in ("compiled", "graphs")
    # Sharded weights exist while their block is called, on the stream that called it.
    sharded = config.shard == "full"
    mode = ComputeMode(dtype, compiled and compiles, compiles and not sharded, side_stream=not sharded)
    with (
        torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16),
        computing(None if speed == "plain" else mode),
    ):
        yield
