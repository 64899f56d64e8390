"""Two processes under DDP are one, in the Trainer and in Lightning."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from tests.integrations.helpers import Net, assert_equal, naive, trainer, weights


def _join(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)


def _trainer_rank(rank: int, folder: str) -> None:
    _join(rank, folder)
    built = trainer(Path(folder), Net(), per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert built.accelerator.num_processes == 2
    built.train()
    torch.save(weights(built.model), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _lightning_rank(rank: int, folder: str) -> None:
    from lightning.pytorch.strategies import DDPStrategy

    from tests.integrations.modules import LitNet, callback, fit
    from tests.integrations.test_lightning import keep_double

    _join(rank, folder)
    keep, module = callback(seed=3), LitNet()
    keep_double(keep)
    strategy = DDPStrategy(process_group_backend="gloo")
    fit(Path(folder), module, keep, micro=2, accumulate_grad_batches=2, strategy=strategy, devices=2)
    torch.save(weights(module.net), f"{folder}/{rank}.pt")


def together(worker: Any, folder: Path) -> list[dict[str, Tensor]]:
    context = multiprocessing.spawn(worker, (str(folder),), nprocs=2, join=False)  # pyright: ignore
    assert context is not None
    for process in context.processes:
        process.join()
    assert [process.exitcode for process in context.processes] == [0, 0]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.slow
def test_trainer(tmp_path: Path) -> None:
    for found in together(_trainer_rank, tmp_path):
        assert_equal(found, naive(6), 1e-12)


@pytest.mark.slow
def test_lightning(tmp_path: Path) -> None:
    for found in together(_lightning_rank, tmp_path):
        assert_equal(found, naive(6, seed=3, decay=False), 1e-12)
