"""RetentionPenalty in a plain PyTorch loop: teach a classifier one digit without losing the others."""

from __future__ import annotations

import argparse
import copy

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from holdfast import RetentionPenalty

TARGET = 8


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> list[float]:
    """By class."""
    right = model(images).argmax(dim=1) == labels
    return [round(float(right[labels == digit].float().mean()), 2) for digit in range(10)]


def main(steps: int) -> None:
    """An old model that never saw the target; a new one that learns it, without the penalty and with it."""
    torch.manual_seed(0)
    values, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(values / 16, dtype=torch.float32), torch.tensor(digits)
    held_out = torch.arange(len(labels)) % 2 == 1
    known = torch.nonzero(~held_out & (labels != TARGET)).flatten()
    wanted = torch.nonzero(~held_out & (labels == TARGET)).flatten()
    old = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(old.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(old(images[known]), labels[known]).backward()
        optimizer.step()
    print("old:            ", accuracy(old, images[held_out], labels[held_out]))
    for beta in (0.0, 200.0):
        new, penalty = copy.deepcopy(old), RetentionPenalty(num_tasks=10, beta=beta)
        optimizer = torch.optim.Adam(new.parameters(), 1e-3)
        for _ in range(steps):
            batch = known[torch.randperm(len(known))[:64]]
            new_losses = cross_entropy(new(images[batch]), labels[batch], reduction="none")
            with torch.no_grad():
                old_losses = cross_entropy(old(images[batch]), labels[batch], reduction="none")
            retention = penalty(new_losses, old_losses, tasks=labels[batch])
            optimizer.zero_grad()
            (cross_entropy(new(images[wanted]), labels[wanted]) + retention.penalty).backward()
            optimizer.step()
        print(f"new, beta = {beta:3g}:", accuracy(new, images[held_out], labels[held_out]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
