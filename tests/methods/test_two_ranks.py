"""Every baseline on two ranks does what it does on one: the same terms, gradients and moving averages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast.methods import build_method
from holdfast.methods.base import Method
from holdfast.methods.co2l import Co2lConfig
from holdfast.methods.der import DerConfig
from holdfast.methods.flyp import FlypConfig
from holdfast.methods.gem import GemConfig
from holdfast.methods.holdfast import HoldfastConfig
from holdfast.methods.rm import RmConfig
from holdfast.methods.wccl import WcclConfig
from tests.methods.small import batch_of, gradient, prepared, small_data, small_model, with_second_views
from tests.processes import ranks as in_processes

CONFIGS = {
    "flyp": FlypConfig(temperature=0.2),
    "wccl": WcclConfig(temperature=0.2),
    "gem": GemConfig(),
    "co2l": Co2lConfig(),
    "co2l, two views": Co2lConfig(),
    "der": DerConfig(),
    "der++": DerConfig(beta=1.0),
    "rm": RmConfig(),
    "co2l, second phase": Co2lConfig(),
    # One target pair and one negative are asked about in a step: a rank has none of them.
    "holdfast": HoldfastConfig(form="published", distill_weight=2.0, label_boost=1.0, distill_share=0.25),
}
STEPS = [([0, 1, 2], [0, 1, 2, 3], [0, 2, 3, 4, 5]), ([3, 1, 0], [4, 2, 0, 3], [1, 0, 4, 3, 8])]


def run_steps(name: str, rank: int, world: int) -> dict[str, torch.Tensor]:
    """Two steps of a method, or of one rank of it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        return _run_steps(name, rank, world, monkeypatch)


def _run_steps(name: str, rank: int, world: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    data = small_data(shared_negatives=3)
    monkeypatch.setattr("holdfast.methods.holdfast._LEAST", 1)
    config: Any = CONFIGS[name]
    method: Method = prepared(build_method(small_model(data), config, 10), data)
    if "second" in name:
        method.begin_phase(1)
    found: dict[str, torch.Tensor] = {}
    for number, positions in enumerate(STEPS):
        batch = batch_of(data, *positions, method.model.towers.tokenize, rank, world)
        output = method(with_second_views(batch) if "two views" in name else batch)
        total = gradient(output.surrogate, method.model)
        if output.task_losses is not None:
            total = torch.cat([total, gradient(output.task_losses[1], method.model)])
        if world > 1:
            dist.all_reduce(total)  # what DDP does
        found[f"gradient {number}"] = total / world
        found |= {f"{key} {number}": value for key, value in output.values.items()}
        found |= {f"{key} {number}": value for key, value in output.per_task.items()}
        method.commit(torch.tensor(True))
    found |= {key: value for key, value in method.state_dict().items() if "log_u" in key}
    return found


def _rank(rank: int, meeting: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    try:
        torch.save({name: run_steps(name, rank, 2) for name in CONFIGS}, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, torch.Tensor]]]:
    folder = tmp_path_factory.mktemp("ranks")
    assert in_processes(_rank, (str(folder / "meeting"), str(folder)), 2) == [0, 0]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_are_one(name: str, ranks: list[dict[str, dict[str, torch.Tensor]]]) -> None:
    alone = run_steps(name, 0, 1)
    assert alone["gradient 1"].abs().max() > 1e-3
    for on_rank in ranks:
        assert on_rank[name].keys() == alone.keys()
        for key, value in alone.items():
            torch.testing.assert_close(on_rank[name][key], value, rtol=1e-9, atol=1e-12, equal_nan=True, msg=key)
