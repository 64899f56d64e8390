"""Where a run happens: device, rank and world, seeds, and the few collective operations the rest needs.

One code path serves one rank and many: every helper is the identity on a single rank.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from threading import Thread
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from holdfast.errors import UserError


@dataclass(frozen=True)
class Runtime:
    """The device of this rank and its place in the world."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and talks to the user."""
        return self.rank == 0

    def share(self, positions: np.ndarray) -> np.ndarray:
        """This rank's part of positions that were drawn for all ranks together: every world-th, from its rank on."""
        return positions[self.rank :: self.world]


def choose_device(wanted: str) -> torch.device:
    """``auto``, ``cpu`` or ``cuda[:n]`` -> a device that is really there."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted.startswith("cuda"):
        if not torch.cuda.is_available():
            raise UserError(
                "CUDA was asked for and there is none",
                found=f"torch {torch.__version__} sees no GPU",
                do="set device = 'cpu' (or 'auto'), or install a driver and a torch build for your GPU",
            )
        return torch.device(f"cuda:{local_rank}" if wanted == "cuda" else wanted)
    if wanted == "cpu":
        return torch.device("cpu")
    raise UserError(f"unknown device {wanted!r}", expected="auto, cpu, cuda or cuda:N")


@contextmanager
def started(wanted: str) -> Generator[Runtime]:
    """The runtime of this process; joins the process group that ``torchrun`` describes, and leaves it at the end."""
    device = choose_device(wanted)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
    if world == 1:
        yield Runtime(device)
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Runtime(device, dist.get_rank(), world)
    finally:
        dist.destroy_process_group()


@cache
def wake(device: torch.device) -> Thread | None:
    """Have a thread load a GPU's libraries, once in a process: seconds in which the host can decode pictures."""
    if device.type != "cuda":
        return None
    thread = Thread(target=_first_products, args=(device,), name="wake")  # a process that ends before waits for it
    thread.start()
    return thread


@torch.no_grad()
def _first_products(device: torch.device) -> None:
    # Whatever fails here fails again where it is asked for, and is said there.
    with suppress(RuntimeError):
        pictures, matrix = torch.ones(2, 3, 32, 32, device=device), torch.eye(32, device=device)
        for memory_format in (torch.contiguous_format, torch.channels_last):
            kernel = torch.ones(4, 3, 3, 3, device=device).to(memory_format=memory_format)
            torch.nn.functional.conv2d(pictures.to(memory_format=memory_format), kernel)
        for dtype in (torch.float32, torch.float64):
            torch.linalg.solve(matrix.to(dtype) @ matrix.to(dtype), matrix.to(dtype))
        torch.linalg.cholesky_ex(matrix.double())
        torch.cuda.synchronize(device)


def speaks() -> bool:
    """Whether this process talks to the user: the only one, or the first that ``torchrun`` started."""
    return int(os.environ.get("RANK", "0")) == 0


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from names and numbers: streams with different names never share random numbers."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(*parts: int | str) -> np.random.Generator:
    """A numpy generator of the stream with this name."""
    return np.random.default_rng(derive_seed(*parts))


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Sum of a tensor over all ranks (a new tensor; no gradient)."""
    total = tensor.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


def average_over_ranks(tensors: list[Tensor]) -> None:
    """Replace tensors by their means over all ranks, in place, in one collective operation."""
    if not dist.is_initialized() or not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([tensor.numel() for tensor in tensors])
    shaped = [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
    torch._foreach_copy_(tensors, shaped)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def sums_by(index: Tensor, values: Tensor, size: int) -> Tensor:
    """Sum of the values [n, ...] of each index [n]: [size, ...], in a fixed order.

    On a GPU ``index_add`` adds in the order in which its threads arrive, so that two runs from one seed part in the
    last bit; there the values are sorted first.
    """
    zeros = values.new_zeros(size, *values.shape[1:])
    if values.is_cuda:
        return zeros.index_put((index,), values, accumulate=True)
    return zeros.index_add(0, index, values)


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is up on any rank."""
    if not dist.is_initialized():
        return flag
    raised = torch.tensor(float(flag), device=device)
    dist.all_reduce(raised, op=dist.ReduceOp.MAX)
    return bool(raised.item())


def rank_was_lost(error: RuntimeError) -> bool:
    """Whether an error of a collective operation says that another rank is gone."""
    if not dist.is_initialized():
        return False
    text = str(error)
    words = (
        "Connection closed by peer",
        "Connection reset by peer",
        "Broken pipe",
        "NCCL",
        "gloo",
        "Timed out waiting",
    )
    return isinstance(error, dist.DistError) or any(word in text for word in words)


def world_size() -> int:
    """Number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def in_group() -> bool:
    """Whether ranks meet: in a process group of several, or of one (to measure what meeting costs)."""
    return dist.is_initialized()


def ranks_record() -> bool:
    """Whether the group's collective operations can be part of a CUDA graph: NCCL's can, gloo's happen on the host."""
    return in_group() and dist.get_backend() == "nccl"


class Agreement:
    """Whether all ranks say the same number. They meet in main memory: no rank waits for its GPU.

    All ranks make it, and all ranks ask it, in the same order.
    """

    def __init__(self) -> None:
        self._group = cast("dist.ProcessGroup", dist.new_group(backend="gloo")) if in_group() else None

    def __call__(self, number: int) -> bool:
        """Whether this rank's number is every rank's."""
        if self._group is None:
            return True
        bounds = torch.tensor([number, -number])
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=self._group)
        return bounds.tolist() == [number, -number]


def rows_of_rank(total: int) -> int:
    """How many of ``total`` rows, shared out by :meth:`Runtime.share`, are this rank's; they are its first ones."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return len(range(rank, total, world))


class _Gather(torch.autograd.Function):
    """Rows of all ranks, in rank order; the gradient of a row is the sum of what every rank's loss says of it."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx, rows: Tensor, total: int
    ) -> Tensor:
        rank, world = dist.get_rank(), dist.get_world_size()
        counts = [len(range(item, total, world)) for item in range(world)]
        if len(rows) != counts[rank]:
            raise RuntimeError(f"rank {rank} holds {len(rows)} rows; its share of {total} is {counts[rank]}")
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        gathered = [torch.empty_like(padded) for _ in range(world)]
        dist.all_gather(gathered, padded)
        cast(Any, ctx).place = (sum(counts[:rank]), counts[rank])
        return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx, gradient: Tensor
    ) -> tuple[Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        start, count = cast("tuple[int, int]", cast(Any, ctx).place)
        return gradient[start : start + count], None


def gather(rows: Tensor, total: int) -> Tensor:
    """Rows of all ranks together, with gradients. ``total`` rows were shared out by :meth:`Runtime.share`."""
    if not dist.is_initialized():
        return rows
    return cast(Tensor, _Gather.apply(rows, total))


@lru_cache(maxsize=64)
def stream_for(device: torch.device, work: str) -> torch.cuda.Stream:
    """A stream of a GPU for one kind of work, made once in a process.

    PyTorch deals streams out of a pool of 32, over and over: two that are made some runs apart may be one and the same.
    If the loader's were the one on which a step is being recorded, its copies would end up in the recording.
    """
    del work
    return torch.cuda.Stream(device)
