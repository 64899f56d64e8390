"""The paper's architecture, with random weights: it builds, takes a step, and comes back from disk."""

from __future__ import annotations

from pathlib import Path

import open_clip
import pytest
import torch
from torch.nn import functional

from holdfast.model.folder import export_openclip, load_model, save_model, start_model


@pytest.mark.slow
def test_a_step_and_a_save(tmp_path: Path) -> None:
    classes = ("clear", "overcast", "foggy")
    model = start_model("ViT-B-16", None, classes, [(f"the weather is {name}",) for name in classes], 0.05, seed=1)
    images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    old = model.frozen_copy()
    model.begin_round(rank=32, seed=1)
    before = model.logits(images)
    assert torch.equal(before, old.logits(images))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-5, weight_decay=0.1)
    loss = functional.cross_entropy(before, torch.tensor([0, 2]))
    loss.backward()
    optimizer.step()
    after = model.logits(images)
    assert functional.cross_entropy(after, torch.tensor([0, 2])) < loss
    assert all(parameter.grad is not None for parameter in trainable)
    save_model(model, tmp_path / "model")
    assert torch.equal(load_model(tmp_path / "model").logits(images), after)
    export_openclip(model, tmp_path / "out")
    plain = open_clip.create_model("ViT-B-16", pretrained=str(tmp_path / "out" / "open_clip_model.safetensors")).eval()
    # OpenCLIP's attention sums in another order than ours.
    torch.testing.assert_close(
        plain.encode_image(images, normalize=True), model.image_features(images), rtol=0, atol=1e-6
    )
