"""What fp8 would give a step, and what it would do to features: the table behind "why the products are bf16".

    python benchmarks/fp8.py                        # on an H100 or H200; writes benchmarks/results/fp8.json
    python benchmarks/fp8.py --pictures 2           # where there is no GPU: the errors alone

The products of a ViT-B/16 block over a step's 306 pictures of 197 tokens: forward, and both of the backward pass. Each
is timed in bf16 and in fp8 (values and weights e4m3, gradients e5m2) with a scale a tensor and a scale a row, as a CUDA
graph, the ways in turns. An operand of fp8 has to be written in fp8 first, and once more transposed for the backward
pass, which takes operands along their other dimension: those passes are timed too, with scales of the step before, so
that a value is read once. What cannot be computed on a machine says so in its row.

Errors are those of a chain of twelve blocks with random weights, its linear layers on operands that were rounded to
bf16 or fp8 (products and sums in float32), against the same in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

try:
    import triton
    import triton.language as tl
except ImportError:  # then its rows say so
    triton = None

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kernels import BLOCKS, HEADS, LENGTH, WIDTH, in_turns, recorded
from benchmarks.machine import commit, machine

LAYERS = {"q, k, v": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
Way = Callable[[], Any]


if triton is not None:

    @triton.jit
    def _cast(values, scale, out, turned, rows, columns, LIMIT: tl.constexpr, SIDE: tl.constexpr):
        """values -> fp8, and transposed: a tile is read once and written twice."""
        row, column = tl.program_id(0) * SIDE + tl.arange(0, SIDE), tl.program_id(1) * SIDE + tl.arange(0, SIDE)
        inside = (row[:, None] < rows) & (column[None, :] < columns)
        places = row[:, None] * columns + column[None, :]
        read = tl.load(values + places, mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
        small = tl.minimum(tl.maximum(read, -LIMIT), LIMIT).to(out.dtype.element_ty)
        tl.store(out + places, small, mask=inside)
        turned_inside = (column[:, None] < columns) & (row[None, :] < rows)
        tl.store(turned + column[:, None] * rows + row[None, :], tl.trans(small), mask=turned_inside)


def cast(values: Tensor, dtype: torch.dtype) -> Way:
    """A pass that writes values in fp8, as they are and transposed."""
    rows, columns = values.shape
    out, turned = (torch.empty(size, dtype=dtype, device="cuda") for size in ((rows, columns), (columns, rows)))
    scale, side, limit = torch.ones((), device="cuda"), 64, torch.finfo(dtype).max
    grid = (-(-rows // side), -(-columns // side))
    return lambda: _cast[grid](values, scale, out, turned, rows, columns, LIMIT=limit, SIDE=side)


def scaled(left: Tensor, right: Tensor, *, by_row: bool, fast: bool, out: torch.dtype = torch.bfloat16) -> Way:
    """left [M, K] times right [N, K] transposed, both in fp8 and laid out along K."""
    ones = {"dtype": torch.float32, "device": "cuda"}
    scales = (
        (torch.ones(len(left), 1, **ones), torch.ones(1, len(right), **ones))
        if by_row
        else (torch.ones((), **ones), torch.ones((), **ones))
    )
    kind = torch.bfloat16 if by_row else out
    return lambda: torch._scaled_mm(left, right.T, *scales, out_dtype=kind, use_fast_accum=fast)


def products(tokens: int, inside: int, outside: int) -> dict[str, dict[str, Way]]:
    """Forward, and the backward pass's two, of a linear layer."""
    x = torch.randn(tokens, inside, device="cuda").bfloat16()
    weight = (inside**-0.5 * torch.randn(outside, inside, device="cuda")).bfloat16()
    g = torch.randn(tokens, outside, device="cuda").bfloat16()
    x8, w8, g8 = x.to(VALUES), weight.to(VALUES), g.to(GRADIENTS)
    xt8, wt8, gt8 = (value.float().T.contiguous().to(value.dtype) for value in (x8, w8, g8))
    float32 = torch.float32
    return {
        "forward": {
            "bf16": lambda: x @ weight.T,
            "a scale a tensor": scaled(x8, w8, by_row=False, fast=True),
            "a scale a row": scaled(x8, w8, by_row=True, fast=True),
        },
        "of the input": {
            "bf16": lambda: g @ weight,
            "a scale a tensor": scaled(g8, wt8, by_row=False, fast=False),
            "a scale a row": scaled(g8, wt8, by_row=True, fast=False),
        },
        "of the weight": {
            "bf16": lambda: torch.mm(g.T, x, out_dtype=float32),
            "a scale a tensor": scaled(gt8, xt8, by_row=False, fast=False, out=float32),
            "a scale a row": scaled(gt8, xt8, by_row=True, fast=False),
        },
    }


def casts(tokens: int, inside: int, outside: int) -> dict[str, Way]:
    """The passes that write a layer's operands in fp8."""
    x, weight, g = (
        torch.randn(size, device="cuda").bfloat16() for size in ((tokens, inside), (outside, inside), (tokens, outside))
    )
    return {"values": cast(x, VALUES), "weights": cast(weight, VALUES), "gradients": cast(g, GRADIENTS)}


def timed(ways: dict[str, Way]) -> tuple[dict[str, float], dict[str, str]]:
    """Milliseconds of each way, and why others have none."""
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    errors: dict[str, str] = {}
    for name, way in ways.items():
        try:
            graphs[name] = recorded(way)
        except Exception as error:
            errors[name] = (str(error).strip().splitlines() or [type(error).__name__])[0][:100]
    return in_turns(graphs, 20) if graphs else {}, errors


def times(pictures: int) -> dict[str, Any]:
    """Every product and pass of a block; printed as they come."""
    tokens = -(-pictures * LENGTH // 16) * 16
    rows: list[dict[str, Any]] = []
    for layer, (inside, outside) in LAYERS.items():
        work = 2 * tokens * inside * outside / 1e9
        for name, ways in products(tokens, inside, outside).items():
            milliseconds, errors = timed(ways)
            rows.append({"layer": layer, "product": name, "ms": milliseconds, "errors": errors})
            shown = [f"{way} {took:.3f} ms ({work / took:.0f} TFLOP/s)" for way, took in milliseconds.items()]
            print(f"{layer:8s} {name:14s}", "   ".join(shown + [f"{way}: {why}" for way, why in errors.items()]))
        try:
            ways = casts(tokens, inside, outside)
        except Exception as error:
            rows.append({"layer": layer, "product": "casts", "ms": {}, "errors": {"all": str(error)[:100]}})
            print(f"{layer:8s} casts          {error}")
            continue
        milliseconds, errors = timed(ways)
        rows.append({"layer": layer, "product": "casts", "ms": milliseconds, "errors": errors})
        shown = [f"{what} {took:.3f} ms" for what, took in milliseconds.items()]
        print(f"{layer:8s} casts         ", "   ".join(shown + [f"{way}: {why}" for way, why in errors.items()]))
    return {"rows": rows, "of a step": saving(rows)}


def saving(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Milliseconds of a step's eleven whole blocks that fp8 with a scale a tensor would save, at most and net."""
    layers = [row for row in rows if row["product"] != "casts"]
    both = [row["ms"] for row in layers if {"bf16", "a scale a tensor"} <= set(row["ms"])]
    bf16 = BLOCKS * sum(row["bf16"] for row in both)
    fp8 = BLOCKS * sum(row["a scale a tensor"] for row in both)
    passes = BLOCKS * sum(sum(row["ms"].values()) for row in rows if row["product"] == "casts")
    found = {"bf16": bf16, "fp8": fp8, "casts": passes, "saved at most": bf16 - fp8, "saved": bf16 - fp8 - passes}
    print(f"of a step, {len(both)} of {len(layers)} products:", "   ".join(f"{k} {v:.1f} ms" for k, v in found.items()))
    return found


def rounded(values: Tensor, way: str) -> Tensor:
    """Values as an operand of a product has them, in float32; fp8 is scaled so that the largest just fits."""
    if way == "float32":
        return values
    if way == "bf16":
        return values.bfloat16().float()
    largest = values.abs().amax(dim=-1, keepdim=True) if way == "fp8, a scale a row" else values.abs().max()
    scale = torch.finfo(VALUES).max / largest.clamp(min=1e-12)
    return (values * scale).to(VALUES).float() / scale


def features(x: Tensor, weights: list[dict[str, Tensor]], way: str) -> Tensor:
    """The first token after a chain of blocks, L2-normalised: [n, W]."""

    def linear(values: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(rounded(values, way), rounded(weight, way))

    for weight in weights:
        n, length, width = x.shape
        packed = linear(functional.layer_norm(x, (width,)), weight["q, k, v"])
        query, key, value = packed.view(n, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(n, length, width)
        x = x + linear(mixed, weight["out"])
        inner = linear(functional.layer_norm(x, (width,)), weight["up"])
        x = x + linear(functional.gelu(inner), weight["down"])
    return functional.normalize(functional.layer_norm(x[:, 0], (x.shape[-1],)), dim=-1)


@torch.no_grad()
def errors(pictures: int, device: str) -> dict[str, dict[str, float]]:
    """How far features move, and logits s / tau_0 of 100 random classes at tau_0 = 0.05."""
    generator = torch.Generator(device).manual_seed(0)

    def some(*size: int) -> Tensor:
        return torch.randn(size, device=device, generator=generator)

    weights = [
        {name: inside**-0.5 * some(outside, inside) for name, (inside, outside) in LAYERS.items()} for _ in range(12)
    ]
    x, classes = some(pictures, LENGTH, WIDTH), functional.normalize(some(100, WIDTH), dim=-1)
    true = features(x, weights, "float32")
    found: dict[str, dict[str, float]] = {}
    for way in ("bf16", "fp8, a scale a tensor", "fp8, a scale a row"):
        moved = features(x, weights, way) - true
        logits = (moved @ classes.T).abs() / 0.05
        found[way] = {
            "relative error": float(moved.norm(dim=1).mean()),
            "logit, mean": float(logits.mean()),
            "logit, largest": float(logits.max()),
        }
        print(f"{way:24s}", "   ".join(f"{name} {value:.4f}" for name, value in found[way].items()), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=306)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    torch.backends.cuda.matmul.allow_tf32 = False
    found: dict[str, Any] = {"errors": errors(min(32, arguments.pictures), "cuda" if on_gpu else "cpu")}
    if on_gpu:
        found["times"] = times(arguments.pictures)
    wrote = {"pictures": arguments.pictures, **found, "machine": machine(), "commit": commit()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "fp8.json").write_text(json.dumps(wrote, indent=2) + "\n")


if __name__ == "__main__":
    main()
