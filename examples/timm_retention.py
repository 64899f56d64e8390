"""A timm recipe: mixup for the target, clean views for protected rows, BatchNorm frozen, an average of the weights."""

from __future__ import annotations

import copy

import timm
import torch
from sklearn.datasets import load_digits
from timm.data import Mixup
from timm.utils import ModelEmaV3
from torch.nn.functional import cross_entropy, interpolate

from holdfast import RetentionPenalty
from holdfast.integrations import evaluation_mode, frozen_copy


def main() -> None:
    """An old model that never saw an eight; a new one that learns it, without the penalty and with it."""
    torch.manual_seed(0)
    values, digits = load_digits(return_X_y=True)
    images = interpolate(torch.tensor(values / 16).float().view(-1, 1, 8, 8), size=16)
    labels, held_out = torch.tensor(digits), torch.arange(len(digits)) % 2 == 1
    known, wanted = (torch.nonzero(~held_out & part).flatten() for part in (labels != 8, labels == 8))

    def show(name: str, model: torch.nn.Module) -> None:
        with torch.no_grad(), evaluation_mode(model):
            right = (model(images[held_out]).argmax(dim=1) == labels[held_out]).float()
        print(name, [round(float(right[labels[held_out] == digit].mean()), 2) for digit in range(10)])

    old = timm.create_model("test_resnet.r160_in1k", num_classes=10, in_chans=1)
    optimizer = torch.optim.AdamW(old.parameters(), 1e-2)
    for _ in range(200):
        batch = known[torch.randperm(len(known))[:64]]
        optimizer.zero_grad()
        cross_entropy(old(images[batch]), labels[batch]).backward()
        optimizer.step()
    show("old:            ", old := frozen_copy(old))
    for beta in (0.0, 50.0):
        new = copy.deepcopy(old).requires_grad_(True).train()
        for part in new.modules():  # batches of the target alone would move the statistics away from every other class
            part.train(not isinstance(part, torch.nn.BatchNorm2d))
        averaged, optimizer = ModelEmaV3(new, decay=0.9), torch.optim.AdamW(new.parameters(), 1e-3)
        penalty = RetentionPenalty(num_tasks=10, beta=beta)
        for _ in range(100):
            batch = known[torch.randperm(len(known))[:64]]  # clean views: the same for both models
            with evaluation_mode(new):  # no dropout, no dropped paths
                new_losses = cross_entropy(new(images[batch]), labels[batch], reduction="none")
            old_losses = cross_entropy(old(images[batch]), labels[batch], reduction="none")
            inputs, targets = Mixup(mixup_alpha=0.2, num_classes=10)(images[wanted[:64]], labels[wanted[:64]])
            optimizer.zero_grad()
            (cross_entropy(new(inputs), targets) + penalty(new_losses, old_losses, labels[batch]).penalty).backward()
            optimizer.step()
            averaged.update(new)
        show(f"new, beta = {beta:3g}:", averaged.module)


if __name__ == "__main__":
    main()
