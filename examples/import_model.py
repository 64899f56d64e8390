"""A timm classifier in use learns one class, and goes back to timm: python examples/import_model.py OUT."""

from __future__ import annotations

import sys
from pathlib import Path

import timm
import torch
from PIL import Image
from sklearn.datasets import load_digits
from timm.models import save_for_hf

from holdfast import develop
from holdfast.config import RoundConfig, parse
from holdfast.model.export import export_model
from holdfast.model.folder import load_model

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def main(out: Path) -> None:
    """The classifier has seen 600 digits without an eight; the others are the photographs of the round."""
    values, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(values).reshape(-1, 1, 8, 8).mul(15.9).byte().repeat(1, 3, 1, 1)
    pixels = pixels.repeat_interleave(4, 2).repeat_interleave(4, 3)  # 32 x 32
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=10, img_size=32)
    known = torch.tensor([n for n in range(600) if labels[n] != 8])
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(300):
        batch = known[torch.randint(len(known), (64,))]
        optimizer.zero_grad()
        logits = model(pixels[batch] / 127.5 - 1)
        torch.nn.functional.cross_entropy(logits, torch.tensor(labels)[batch]).backward()
        optimizer.step()
    save_for_hf(model, str(out / "served"), model_config={"label_names": NAMES}, model_args={"img_size": 32})
    for n in range(600, len(labels)):
        place = out / "photos" / NAMES[labels[n]]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[n].permute(1, 2, 0).numpy()).save(place / f"{n}.png")
    round_ = {
        "task": {"target": "eight"},
        "data": {"source": {"path": "photos"}, "roles": {"dev": 0.2, "sealed": 0.5}, "leaks": "allow"},
        "model": {"start": "served"},  # a folder of timm: `holdfast import` makes a model folder of it
        "method": {"name": "refit"},
        "certify": {"margin": 0.1, "ledger": "ledger"},
    }
    result = develop(parse(RoundConfig, round_, "the round"), out / "round", out, quiet=True)
    eight = result.dev.tasks["eight"]
    print(f"{result.decision.reason}; eight: {eight.old_accuracy:.0%} -> {eight.new_accuracy:.0%} of the dev images")
    if not result.kept_old:
        export_model(load_model(result.folder.model), out / "deploy")
        print(f"timm reads it: {timm.create_model(f'local-dir:{out}/deploy', pretrained=True).num_classes} classes")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
