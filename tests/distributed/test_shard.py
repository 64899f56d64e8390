"""Sharded weights (FSDP2): two ranks with a half each are one rank, and what they leave behind is whole."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holdfast.artifacts import RunFolder
from holdfast.data.loader import BatchMaker, RoundSampler
from holdfast.errors import UserError
from holdfast.files import read_jsonl
from holdfast.methods import build_method
from holdfast.methods.flyp import FlypConfig
from holdfast.model.classifier import Classifier
from holdfast.model.openclip import load_towers
from holdfast.runtime import Runtime
from holdfast.train import checkpoint as checkpoints
from holdfast.train.loop import batch_sizes, train
from holdfast.train.optim import build_optimizer
from holdfast.train.parallel import place
from holdfast.train.sharded import Sharded, blocks
from tests.distributed.ranks import METHODS, STEPS, meet, method_of, plan_of, round_data, run
from tests.distributed.test_ranks import ALONE, assert_same, compare, together

DEFAULT = ["holdfast fast", "rm"]


def test_two_ranks_with_half_the_weights_each_are_one_after_twenty_steps(tmp_path: Path) -> None:
    compare(tmp_path, DEFAULT, world=2, shard="full")
    counts = [torch.load(tmp_path / f"{rank}-held.pt", weights_only=True) for rank in range(2)]
    for everything, held, left in counts:
        assert held == pytest.approx(everything / 2, rel=0.01)
        assert left == 0  # of the model itself, while its shards are trained
    assert sum(held for _, held, _ in counts) == counts[0][0] + 1  # the logit scale, a number, is on both


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METHODS if name not in DEFAULT])
def test_two_ranks_with_half_the_weights_each_are_one_for_every_method(tmp_path: Path, name: str) -> None:
    compare(tmp_path, [name], world=2, shard="full")


@pytest.mark.slow
def test_a_killed_rank_takes_its_shard_with_it_and_one_rank_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    together(tmp_path, ["holdfast"], folder=folder.root, check=False, die_after=11, shard="full")
    message = (tmp_path / "0.txt").read_text()
    assert "another rank was lost after step 11 of 20; its part of the weights went with it" in message
    assert "the last checkpoint is that of step 8" in message
    assert "--resume RUN" in message
    found = checkpoints.latest(folder.checkpoints, "sha256:test")
    assert found is not None
    assert found.step == 8
    assert not any(isinstance(value, DTensor) for value in found.method.values())
    finished = run("holdfast", ALONE, folder.root)  # alone, and not sharded
    alone = RunFolder.create(tmp_path / "alone")
    assert_same(finished.state_dict(), run("holdfast", ALONE, alone.root).state_dict())
    # What was looked at on the way, by two ranks up to step 8, was the whole model.
    seen, expected = (
        [record["evaluation"]["checksum"] for record in read_jsonl(item.metrics) if "evaluation" in record]
        for item in (folder, alone)
    )
    assert len(seen) == STEPS
    assert seen == pytest.approx(expected, rel=1e-10)


@pytest.mark.slow
def test_a_run_begun_alone_goes_on_with_three_shards_and_ends_alone(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")

    def keep_first(of: int) -> None:
        for path in sorted(folder.checkpoints.glob("step-*.pt"))[of:]:
            path.unlink()

    whole = run("holdfast", ALONE, folder.root, keep_checkpoints=9)
    keep_first(1)
    assert checkpoints.newest(folder.checkpoints) == 8
    for on_rank in together(tmp_path, ["holdfast"], world=3, folder=folder.root, shard="full", keep_checkpoints=9):
        assert_same(on_rank["holdfast"], whole.state_dict())
    keep_first(2)
    assert checkpoints.newest(folder.checkpoints) == 16  # written by three ranks
    assert_same(run("holdfast", ALONE, folder.root).state_dict(), whole.state_dict())


# -- one rank in a process group: nothing is cut, everything else is the same ------------------------------------------


@pytest.fixture
def group(tmp_path: Path) -> Generator[Runtime]:
    yield meet(0, 1, str(tmp_path / "meeting"))
    dist.destroy_process_group()


def test_units_are_the_blocks_of_both_towers() -> None:
    towers = load_towers("tiny")
    found = list(blocks(towers))
    assert [type(item).__name__ for item in found] == ["OpenBlock"] * 4  # two a tower, and no layer inside them
    assert len({id(item) for item in found}) == 4


def test_a_state_comes_back_whole_and_goes_in_again(group: Runtime) -> None:
    data, config = round_data(), plan_of("holdfast", shard="full").config
    method = method_of("holdfast", data)
    before = {name: value.clone() for name, value in method.state_dict().items()}
    model = method.model
    weights = place(method, config, group)
    assert isinstance(weights, Sharded)
    optimizer = build_optimizer(config, weights.named, group.device)
    for parameter in weights.parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = weights.state(optimizer)
    assert state is not None
    assert state[0].keys() == before.keys()
    moved = [name for name, value in before.items() if not torch.equal(state[0][name], value)]
    assert moved == [name for name, _ in weights.named]

    other = method_of("holdfast", data)
    on_rank = place(other, config, group)
    again = build_optimizer(config, on_rank.named, group.device)
    on_rank.load(again, *state)
    back = on_rank.state(again)
    assert back is not None
    assert_same(back[0], state[0])
    for index, values in state[1]["state"].items():
        assert values["exp_avg"].abs().sum() > 0
        assert_same(back[1]["state"][index], values)

    with weights.whole() as filled:
        assert filled.model is model
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
        assert_same(filled.state_dict(), state[0])
    assert method.model is not model
    weights.end()
    assert method.model is model
    assert_same(method.state_dict(), state[0])


def test_gradients_of_terms_are_those_of_the_graph(group: Runtime) -> None:
    """Twice through one graph, each part for itself, and the sum afterwards: nothing is left over from before."""
    data, plan = round_data(), plan_of("rm", shard="full")

    def gradients(shard: str) -> list[Tensor]:
        config = plan.config.model_copy(update={"shard": shard})
        method = method_of("rm", data)
        view = method.model.preprocess
        maker = BatchMaker(data, method.model.towers, view.mean, view.std, plan.views, ALONE, torch.float64)
        batch = maker.make(RoundSampler(data, batch_sizes(config), 0).draw(0))
        weights = place(method, config, group)
        assert weights.sharded is (shard == "full")
        output: Any = weights.module(batch)
        found = [weights.gradient_of(part) for part in output.parts.values()]
        for parameter in weights.parameters:
            parameter.grad = torch.ones_like(parameter)
        found.append(weights.gradient_of(output.parts["target"]))  # what stands in .grad is left alone
        assert bool((weights.gradient() == 1).all())
        for parameter in weights.parameters:
            parameter.grad = None
        output.surrogate.backward()
        found.append(weights.gradient())
        weights.put_gradient(2 * weights.gradient())
        return [*found, weights.gradient(), weights.norm()]

    whole, sharded = gradients("none"), gradients("full")
    assert min(float(item.norm()) for item in whole) > 0
    for expected, found in zip(whole, sharded, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_a_last_layer_that_is_a_unit_of_its_own_is_there_when_it_is_read(group: Runtime) -> None:
    """It is read without being called, where what it sees was computed once."""
    data, plan = round_data(), plan_of("holdfast backbones", shard="full", steps=2)
    old = Classifier(load_towers("parts-64", "random", seed=1), data.tasks.classes, data.tasks.prompts, 0.05)

    def trained(shard: str) -> dict[str, Tensor]:
        new = old.frozen_copy()
        for parameter in new.towers.left_to_train("backbones"):
            parameter.requires_grad_(True)
        method = build_method(new.double(), FlypConfig(), 2)
        method.prepare(old.frozen_copy().double(), data)
        config = plan.config.model_copy(update={"shard": shard})
        train(method.double(), data, replace(plan, config=config), group)
        return method.state_dict()

    sharded, whole = trained("full"), trained("none")
    assert not torch.equal(whole["model.towers.adapter.3.weight"], old.towers.adapter[3].weight.double())  # type: ignore[index]
    for name, value in whole.items():
        torch.testing.assert_close(sharded[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_a_trained_number_cannot_be_shared_out(group: Runtime) -> None:
    method = method_of("rm", round_data())
    for name, item in method.named_parameters():
        if "logit_scale" in name:
            item.requires_grad_(True)
    with pytest.raises(UserError, match=r"cannot share out model\.towers\.model\.logit_scale(.|\n)*single number"):
        place(method, plan_of("rm", shard="full").config, group)


def test_a_weight_beside_the_model_cannot_be_shared_out(group: Runtime) -> None:
    method = method_of("rm", round_data())
    method.register_parameter("mine", nn.Parameter(torch.ones(3)))
    with pytest.raises(UserError, match="cannot share out mine"):
        place(method, plan_of("rm", shard="full").config, group)


def test_without_other_ranks_nothing_is_sharded() -> None:
    method = method_of("rm", round_data())
    assert place(method, plan_of("rm", shard="full").config, ALONE).module is method
