"""A block's kernels for Hopper against the Triton kernels and plain products in their place, in turns on one GPU.

    python benchmarks/kernels.py                    # on an H100 or H200; writes benchmarks/results/kernels.json
    python benchmarks/kernels.py --pictures 544     # Places365's batch in place of BDD100K's

Each way is recorded as a CUDA graph and played back, one way after the other, three times over; what is printed is the
median. ViT-B/16: 197 tokens of 768, heads of 64, eleven blocks forward and backward.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import commit, machine
from holdfast.kernels import fused

LENGTH, WIDTH, HEADS, BLOCKS = 197, 768, 12, 11
Ways = dict[str, dict[str, Callable[[], Any]]]  # what is done, and how: "now" and "before"


def some(*size: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(size, device="cuda")).bfloat16()


def pieces(pictures: int) -> Ways:
    """Kernels of one layer."""
    from holdfast.kernels import triton_ops
    from holdfast.kernels.cuda import attention, products

    tokens = pictures * LENGTH
    rows = -(-tokens // 8) * 8
    x, g, bias = some(rows, WIDTH), some(rows, WIDTH), some(4 * WIDTH)
    up, down = some(4 * WIDTH, WIDTH, scale=WIDTH**-0.5), some(WIDTH, 4 * WIDTH, scale=WIDTH**-0.5)
    inner = torch.addmm(bias, x, up.T)
    packed, gradient = some(rows, 3 * WIDTH), some(rows, WIDTH)
    out, result = torch.zeros_like(gradient), torch.zeros_like(packed)
    given = (pictures, LENGTH, HEADS)
    levels = triton_ops.attend(packed, out, *given)
    return {
        "up-projection and activation": {
            "now": lambda: products.up(x, up, bias, quick=False),
            "before": lambda: triton_ops.activated(torch.addmm(bias, x, up.T), quick=False),
        },
        "down-projection backward, through the activation": {
            "now": lambda: products.down_backward(g, down, inner, quick=False),
            "before": lambda: triton_ops.activated_backward(g @ down, inner, quick=False),
        },
        "attention": {
            "now": lambda: attention.attend(packed, out, *given),
            "before": lambda: triton_ops.attend(packed, out, *given),
        },
        "attention backward": {
            "now": lambda: attention.backward(packed, out, gradient, levels, result, *given),
            "before": lambda: triton_ops.attend_backward(packed, out, gradient, levels, result, *given),
        },
    }


def tower(pictures: int) -> Callable[[], Any]:
    """Eleven blocks forward and backward."""

    def weight(*size: int) -> Tensor:
        return (0.02 * torch.randn(size, device="cuda")).requires_grad_()

    def gain() -> Tensor:
        return (1 + 0.1 * torch.randn(WIDTH, device="cuda")).requires_grad_()

    def block() -> fused.Weights:
        attends = (
            gain(),
            weight(WIDTH),
            weight(3 * WIDTH, WIDTH),
            weight(3 * WIDTH),
            weight(WIDTH, WIDTH),
            weight(WIDTH),
        )
        inner = 4 * WIDTH
        mlp = (gain(), weight(WIDTH), weight(inner, WIDTH), weight(inner), weight(WIDTH, inner), weight(WIDTH))
        return attends + mlp

    weights = [block() for _ in range(BLOCKS)]
    values = some(pictures, LENGTH, WIDTH).requires_grad_()
    gradient = some(pictures, LENGTH, WIDTH, scale=1e-3)
    shape = fused.Shape(pictures, LENGTH, HEADS, False, 1e-5, 1e-5)

    def once() -> Any:
        found, _ = fused.blocks(values, weights, shape)
        return torch.autograd.grad(found, [values, *(item for group in weights for item in group)], gradient)

    return once


def recorded(function: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    beside = torch.cuda.Stream()
    with torch.cuda.stream(beside):
        for _ in range(2):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def in_turns(ways: dict[str, torch.cuda.CUDAGraph], times: int) -> dict[str, float]:
    """Milliseconds of each, the median of three turns; a turn warms up for as long as a quarter of it takes."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(3):
        for name, graph in ways.items():
            for _ in range(times // 4):
                graph.replay()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(times):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            took[name].append(begin.elapsed_time(end) / times)
    return {name: round(statistics.median(each), 4) for name, each in took.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=306)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise SystemExit("this compares kernels for the H100 and the H200: run it on one of them")
    torch.manual_seed(0)
    found: dict[str, dict[str, float]] = {}
    for name, ways in pieces(arguments.pictures).items():
        found[name] = in_turns({way: recorded(function) for way, function in ways.items()}, 40)
        print(f"{name:50s} now {found[name]['now']:8.3f} ms   before {found[name]['before']:8.3f} ms", flush=True)
    now = fused._products, fused._attention
    blocks: dict[str, torch.cuda.CUDAGraph] = {}
    once = tower(arguments.pictures)
    for name, kept in {
        "before": (False, False),
        "products": (True, False),
        "attention": (False, True),
        "now": (True, True),
    }.items():
        fused._products, fused._attention = (  # pyright: ignore[reportPrivateUsage]
            item if keep else lambda *_: None for item, keep in zip(now, kept, strict=True)
        )
        blocks[name] = recorded(once)
    found["blocks"] = in_turns(blocks, 20)
    print("eleven blocks", "  ".join(f"{name} {value:.2f} ms" for name, value in found["blocks"].items()))
    arguments.out.mkdir(parents=True, exist_ok=True)
    wrote = {"pictures": arguments.pictures, "milliseconds": found, "machine": machine(), "commit": commit()}
    (arguments.out / "kernels.json").write_text(json.dumps(wrote, indent=2) + "\n")


if __name__ == "__main__":
    main()
