"""The small net as a LightningModule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from holdfast.integrations import RetentionCallback, RetentionModule, RetentionSettings
from tests.integrations.helpers import SETTINGS, Net, net_loss, protected_rows, target_rows


class LitNet(RetentionModule, lightning.LightningModule):
    def __init__(self, dropout: float = 0.0, *, norm: bool = False) -> None:
        super().__init__()
        self.net = Net(dropout, norm=norm)

    def forward(self, *inputs: Any, **named: Any) -> dict[str, Tensor]:
        return self.net(*inputs, **named)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.retention_loss() + self(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def callback(retention: RetentionSettings = SETTINGS, **options: Any) -> RetentionCallback:
    return RetentionCallback(protected_rows(), net_loss, retention, **options)


def fit(
    folder: Path,
    module: lightning.LightningModule,
    keep: RetentionCallback,
    *,
    callbacks: list[lightning.Callback] | None = None,
    rows: int = 8,
    micro: int = 4,
    ckpt_path: str | None = None,
    **options: Any,
) -> lightning.Trainer:
    default: dict[str, Any] = {
        "max_steps": 6,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(folder),
    }
    trainer = lightning.Trainer(callbacks=[keep, *(callbacks or [])], **{**default, **options})
    trainer.fit(module, DataLoader(target_rows(rows), batch_size=micro), ckpt_path=ckpt_path)  # pyright: ignore
    return trainer
