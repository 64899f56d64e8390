"""What recorded steps of several ranks need besides CUDA: gradients averaged without DDP, and ranks that agree."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from holdfast.data.loader import BatchMaker, RoundSampler
from holdfast.data.round import Batch
from holdfast.runtime import Agreement, Runtime, ranks_record
from holdfast.train.loop import batch_sizes, train
from holdfast.train.parallel import Whole
from tests.distributed.ranks import meet, method_of, plan_of, round_data
from tests.processes import ranks as in_processes


def batch_of(runtime: Runtime) -> Batch:
    data, plan, model = round_data(), plan_of("holdfast"), method_of("holdfast", round_data()).model
    view = model.preprocess
    maker = BatchMaker(data, model.towers, view.mean, view.std, plan.views, runtime, torch.float64)
    return maker.make(RoundSampler(data, batch_sizes(plan.config), 0).draw(0))


def gradients(runtime: Runtime, *, recorded: bool) -> torch.Tensor:
    weights = Whole(method_of("holdfast", round_data()), runtime, recorded=recorded)
    weights.module(batch_of(runtime)).surrogate.backward()
    weights.average()
    return weights.gradient()


def _rank(rank: int, meeting: str, folder: str) -> None:
    runtime = meet(rank, 2, meeting)
    try:
        agree = Agreement()
        answers = [agree(3), agree(rank), agree(-2), agree(-rank)]
        by_ddp, by_itself = (gradients(runtime, recorded=recorded) for recorded in (False, True))
        found = (answers, by_ddp, by_itself, ranks_record(), batch_of(runtime).target_texts.tokens.shape[1])
        torch.save(found, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_ranks_average_their_gradients_as_ddp_does_and_agree(tmp_path: Path) -> None:
    assert in_processes(_rank, (str(tmp_path / "meeting"), str(tmp_path)), 2) == [0, 0]
    alone = gradients(Runtime(torch.device("cpu")), recorded=True)
    width = batch_of(Runtime(torch.device("cpu"))).target_texts.tokens.shape[1]
    for rank in range(2):
        answers, by_ddp, by_itself, records, columns = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert answers == [True, False, True, False]
        torch.testing.assert_close(by_itself, by_ddp, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(by_itself, alone, rtol=1e-9, atol=1e-12)
        assert not records  # gloo: nothing is recorded
        assert columns == width  # texts are cut for all ranks together


def test_a_group_of_one_rank_ends_where_no_group_ends(tmp_path: Path) -> None:
    data, runtime = round_data(), Runtime(torch.device("cpu"))
    plan = plan_of("holdfast", steps=4)
    alone = method_of("holdfast", data)
    train(alone, data, plan, runtime)
    meet(0, 1, str(tmp_path / "meeting"))
    try:
        method = method_of("holdfast", data)
        train(method, data, plan, runtime)
    finally:
        dist.destroy_process_group()
    for name, value in alone.state_dict().items():
        assert torch.equal(method.state_dict()[name], value), name
