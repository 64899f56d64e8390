"""RetentionModule and RetentionCallback: a Lightning classifier learns the eight without losing the other digits."""

from __future__ import annotations

import copy

import lightning.pytorch as lightning
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from holdfast.integrations import RetentionCallback, RetentionModule, RetentionSettings


class Digits(RetentionModule, lightning.LightningModule):
    """Dropout, as many models have it: protected rows are computed without."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The module's own loss and the penalty; without the callback that is 0."""
        return self.retention_loss() + cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), 2e-3)


def main() -> None:
    """An old model that never saw an eight; a new one that learns it, without the penalty and with it."""
    torch.manual_seed(0)
    values, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(values / 16).float(), torch.tensor(digits)
    held_out = torch.arange(len(labels)) % 2 == 1
    known, wanted = ~held_out & (labels != 8), ~held_out & (labels == 8)

    def fit(name: str, module: Digits, rows: Tensor, *callbacks: lightning.Callback) -> None:
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = lightning.Trainer(max_steps=200, accelerator="cpu", callbacks=list(callbacks), **quiet)
        trainer.fit(module.train(), DataLoader(TensorDataset(images[rows], labels[rows]), 64, shuffle=True))
        right = (module.eval().net(images[held_out]).argmax(dim=1) == labels[held_out]).float()
        print(name, [round(float(right[labels[held_out] == digit].mean()), 2) for digit in range(10)])

    fit("old:            ", old := Digits(), known)
    protected = TensorDataset(images[known], labels[known], labels[known] - (labels[known] > 8).long())
    for beta in (0.0, 200.0):
        settings = RetentionSettings(beta=beta, task_column=2)  # the third of a row: nine tasks, one for each digit
        keep = RetentionCallback(
            protected, lambda module, batch: cross_entropy(module.net(batch[0]), batch[1], reduction="none"), settings
        )
        fit(f"new, beta = {beta:3g}:", copy.deepcopy(old), wanted, keep)


if __name__ == "__main__":
    main()
