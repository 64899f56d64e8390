"""A training step of open_clip itself on as many pairs as a step of ours has pictures, beside ``benchmarks/step.py``.

    python benchmarks/open_clip_step.py                                  # ViT-B-16 and ViT-L-14, eager and compiled
    python benchmarks/open_clip_step.py --models ViT-B-16 --pairs 306 --steps 20

Random weights, pixels and tokens already on the device: bf16 autocast, open_clip's own loss, fused AdamW. It has no
protected classes and no old model; it is the rate that people who fine-tune with open_clip know.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import commit, machine


def measured(architecture: str, pairs: int, steps: int, *, compiled: bool) -> dict[str, Any]:
    """Milliseconds of a step (median over ``steps``) and memory."""
    import open_clip

    torch.manual_seed(0)
    device = torch.device("cuda")
    model: Any = open_clip.create_model(architecture, pretrained=None, precision="fp32", device=device)
    size = model.visual.image_size
    height, width = size if isinstance(size, tuple) else (size, size)
    images = torch.randn(pairs, 3, height, width, device=device)
    tokens = open_clip.get_tokenizer(architecture)(["the weather is foggy on a road by the sea"] * pairs).to(device)
    loss = open_clip.ClipLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    forward = torch.compile(model) if compiled else model

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            image, text, scale = forward(images, tokens)
            value = loss(image, text, scale)
        value.backward()
        optimizer.step()

    for _ in range(5):
        step()
    torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    for _ in range(steps):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return {
        "architecture": architecture,
        "pairs": pairs,
        "compiled": compiled,
        "ms": round(statistics.median(times), 1),
        "gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["ViT-B-16", "ViT-L-14"])
    parser.add_argument("--pairs", type=int, default=306)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--modes", nargs="+", default=["eager", "compiled"], choices=["eager", "compiled"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "open-clip-step.json")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for architecture in arguments.models:
        for mode in arguments.modes:
            rows.append(measured(architecture, arguments.pairs, arguments.steps, compiled=mode == "compiled"))
            print(rows[-1], flush=True)
            torch.cuda.empty_cache()
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            record = {"machine": machine(), "commit": commit(), "rows": rows}
            arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
