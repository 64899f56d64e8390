"""A training step of open_clip itself on as many pairs as a step of ours has pictures, beside ``benchmarks/step.py``.

    python benchmarks/open_clip_step.py                                  # ViT-B-16 and ViT-L-14, eager and compiled
    python benchmarks/open_clip_step.py --models ViT-B-16 --pairs 306 --steps 20
    python benchmarks/open_clip_step.py --models ViT-H-14 --pairs 178
    python benchmarks/open_clip_step.py --models ViT-B-16-SigLIP --modes eager

Random weights, pixels and tokens already on the device: bf16 autocast, open_clip's own loss (the sigmoid loss where the
model has a bias for it), fused AdamW. It has no protected classes and no old model; it is the rate that people who
fine-tune with open_clip know. ``benchmarks/step.py --open-clip`` runs it beside ours, in one process.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import commit, machine

MODES = ("eager", "compiled")


def device_at_hand() -> torch.device:
    """The GPU; a CPU is there for trying this script."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def made_up_tokens(config: dict[str, Any], pairs: int) -> Tensor:
    """As many texts as there are pictures, of the tower's length.

    Random ones where the tokenizer lies on a model hub: a step takes as long with any.
    """
    import open_clip

    text = config["text_cfg"]
    length = text.get("context_length", 77)
    if text.get("hf_tokenizer_name"):
        return torch.randint(2, text["vocab_size"], (pairs, length), generator=torch.Generator().manual_seed(0))
    tokenizer = open_clip.SimpleTokenizer(context_length=length)
    return tokenizer(["the weather is foggy on a road by the sea"] * pairs)


def loss_of(model: Any) -> Callable[..., Tensor]:
    """open_clip's own loss over what its model returns."""
    from open_clip.loss import ClipLoss, SigLipLoss

    return ClipLoss() if getattr(model, "logit_bias", None) is None else SigLipLoss()


def milliseconds(step: Callable[[], None], device: torch.device) -> float:
    """What one step takes."""
    if device.type != "cuda":
        began = time.perf_counter()
        step()
        return 1000 * (time.perf_counter() - began)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def measured(
    architecture: str,
    pairs: int,
    steps: int,
    *,
    compiled: bool,
    device: torch.device | None = None,
    backend: str = "inductor",
) -> dict[str, Any]:
    """Milliseconds of a step (median over ``steps``) and memory."""
    # Beside our own steps in one process: compiled as anybody's would be, with buffers given away.
    with torch._functorch.config.patch(donated_buffer=True):
        return _measured(architecture, pairs, steps, compiled, device or device_at_hand(), backend)


def _measured(
    architecture: str, pairs: int, steps: int, compiled: bool, device: torch.device, backend: str
) -> dict[str, Any]:
    from holdfast.model.openclip import architecture_config
    from holdfast.model.openclip_towers import create_model

    config = architecture_config(architecture)
    torch.manual_seed(0)
    with device:  # a thousand million random numbers take long on a CPU
        model: Any = create_model(config)
    model = model.to(device).train()
    size = model.visual.image_size
    height, width = size if isinstance(size, tuple | list) else (size, size)
    images = torch.randn(pairs, 3, height, width, device=device)
    tokens = made_up_tokens(config, pairs).to(device)
    loss = loss_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    forward = torch.compile(model, backend=backend) if compiled else model

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            value = loss(*forward(images, tokens))
        value.backward()
        optimizer.step()

    began = time.perf_counter()
    milliseconds(step, device)
    first = time.perf_counter() - began
    for _ in range(4):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = [milliseconds(step, device) for _ in range(steps)]
    return {
        "architecture": architecture,
        "pairs": pairs,
        "compiled": compiled,
        "ms": round(statistics.median(times), 1),
        "gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if device.type == "cuda" else 0.0,
        "first_step_seconds": round(first, 1),
    }


def free_memory() -> None:
    """Between two models: what the one before held, its compiled graphs included."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["ViT-B-16", "ViT-L-14"])
    parser.add_argument("--pairs", type=int, default=306)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "open-clip-step.json")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for architecture in arguments.models:
        for mode in arguments.modes:
            try:
                row = measured(architecture, arguments.pairs, arguments.steps, compiled=mode == "compiled")
            except Exception:  # out of memory, most likely: the others are measured
                traceback.print_exc()
                continue
            finally:
                free_memory()
            rows.append(row)
            print(rows[-1], flush=True)
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            record = {"machine": machine(), "commit": commit(), "rows": rows}
            arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
