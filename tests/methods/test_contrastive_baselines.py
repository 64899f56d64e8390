"""FLYP, WCCL and RM against versions written pair by pair."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
import torch

from holdfast.data.round import RoundData
from holdfast.methods.base import encode
from holdfast.methods.flyp import Flyp, FlypConfig
from holdfast.methods.pairs import all_pairs, group_sizes, stands_for
from holdfast.methods.rm import Rm, RmConfig
from holdfast.methods.wccl import Wccl, WcclConfig
from holdfast.model.classifier import Classifier
from tests.methods.small import (
    batch_of,
    gradient,
    naive_contrastive,
    pairs_of,
    prepared,
    small_data,
    small_model,
    whole_batch,
)

TAU = 0.2


def naive_flyp(model: Classifier, data: RoundData) -> torch.Tensor:
    everything = pairs_of(model, data)
    return torch.stack([naive_contrastive(item, everything, TAU) for item in everything]).mean()


def naive_wccl(model: Classifier, data: RoundData, alpha: float, same_task: dict[str, str]) -> torch.Tensor:
    everything = pairs_of(model, data)
    task = {item.identity: same_task.get(item.identity, item.kind) for item in everything}

    def of(kind: str) -> torch.Tensor:
        losses = []
        for item in everything:
            if item.kind == kind:
                outside = [other for other in everything if task[other.identity] != kind]
                losses.append(naive_contrastive(item, [item, *outside], TAU))
        return torch.stack(losses).mean()

    m = data.tasks.num_protected
    return alpha * torch.stack([of(str(k)) for k in range(m)]).mean() + (1 - alpha) * of("target")


def check(method: Flyp | Wccl | Rm, data: RoundData, naive: torch.Tensor) -> None:
    output = method(whole_batch(data, method))
    torch.testing.assert_close(output.values["objective"], naive.detach(), rtol=1e-10, atol=0)
    expected = gradient(naive, method.model)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(gradient(output.surrogate, method.model), expected, rtol=1e-9, atol=1e-12)


def test_flyp_is_the_global_contrast_of_everything() -> None:
    data = small_data()
    method = Flyp(small_model(data), FlypConfig(temperature=TAU, gamma_pairs=1.0), 10)
    prepared(method, data)
    check(method, data, naive_flyp(method.model, data))


@pytest.mark.parametrize("alpha", [0.5, 0.99])
def test_wccl_contrasts_with_all_that_lies_outside_the_own_task(alpha: float) -> None:
    data = small_data()
    method = Wccl(small_model(data), WcclConfig(temperature=TAU, gamma_pairs=1.0, alpha=alpha), 10)
    prepared(method, data)
    check(method, data, naive_wccl(method.model, data, alpha, {}))


def test_wccl_knows_negatives_that_are_members_of_a_task() -> None:
    data = small_data(shared_negatives=4)  # constraint images 0-2 (task 0) and 3 (task 1)
    method = Wccl(small_model(data), WcclConfig(temperature=TAU, gamma_pairs=1.0, alpha=0.7), 10)
    prepared(method, data)
    same = {"negativec00": "0", "negativec11": "0", "negativec22": "0", "negativec33": "1"}
    check(method, data, naive_wccl(method.model, data, 0.7, same))


def test_moving_averages_of_every_pair_are_kept() -> None:
    data = small_data()
    flyp = Flyp(small_model(data), FlypConfig(), 10)
    wccl = Wccl(small_model(data), WcclConfig(), 10)
    for method in (flyp, wccl):
        prepared(method, data)
        method(batch_of(data, [1, 2], [0, 3], [0, 1, 3, 5], method.model.towers.tokenize))
        method.commit(torch.tensor(True))
        assert method.target.log_u_image.visited.tolist() == [False, True, True, False]
        assert np.flatnonzero(method.protected.log_u_text.visited.numpy()).tolist() == [0, 1, 3, 5]
    assert np.flatnonzero(flyp.negatives.log_u_image.visited.numpy()).tolist() == [0, 3]
    assert {name for name, _ in flyp.state_dict().items() if "log_u" in name} == {
        f"{part}.log_u_{side}.{what}"
        for part, side, what in product(("target", "negatives", "protected"), ("image", "text"), ("value", "visited"))
    }


def test_a_batch_of_any_mixture_estimates_the_whole_set_without_bias() -> None:
    """Averaged over every draw that holds the anchor, what the columns stand for adds up to each member once."""
    data = small_data((3, 2), target=3, negatives=4)
    model = small_model(data)
    anchor = 1  # position in the target set
    counts: dict[tuple[int, int], float] = {}
    draws = 0
    for target in combinations(range(3), 2):
        if anchor not in target:
            continue
        for negatives in combinations(range(4), 2):
            for first, second in product(combinations(range(3), 2), combinations(range(3, 5), 1)):
                batch = batch_of(data, target, negatives, (*first, *second), model.towers.tokenize)
                pairs = all_pairs(encode(model, batch), batch, 2)
                number = stands_for(pairs, pairs.target, group_sizes(data))
                number = number.masked_fill(pairs.is_self(pairs.target), 0)[target.index(anchor)]
                for group, index, weight in zip(
                    pairs.group.tolist(), pairs.index.tolist(), number.tolist(), strict=True
                ):
                    counts[group, index] = counts.get((group, index), 0.0) + weight
                draws += 1
    members = {(0, 0), (0, 1), (0, 2), (1, 3), (1, 4), (2, 0), (2, 2), (3, 0), (3, 1), (3, 2), (3, 3)}
    assert {item for item, weight in counts.items() if weight} == members
    for member in members:
        assert counts[member] / draws == pytest.approx(1.0)


def test_sampled_tasks_stand_for_those_that_were_not() -> None:
    data = small_data((2, 2, 2, 2), target=2, negatives=2)
    model = small_model(data)
    batch = batch_of(data, [0, 1], [0, 1], [0, 1, 4, 5], model.towers.tokenize)  # tasks 0 and 2 of four
    pairs = all_pairs(encode(model, batch), batch, 4)
    of_target = stands_for(pairs, pairs.target, group_sizes(data))[0]
    assert of_target[pairs.group < 4].tolist() == [2.0] * 4
    of_task = stands_for(pairs, pairs.protected, group_sizes(data))[0]
    assert of_task[pairs.group == 2].tolist() == [3.0] * 2  # two tasks and itself: the other one stands for three
    assert of_task[pairs.group == 0].tolist() == [1.0] * 2


def test_rm_adds_the_mean_loss_of_the_tasks_at_a_fixed_weight() -> None:
    data = small_data()
    model = small_model(data)
    model.begin_round(2, seed=3)
    for parameter in model.heads.parameters():
        torch.nn.init.normal_(parameter)
    method = prepared(Rm(model, RmConfig(temperature=TAU, gamma_pairs=1.0, alpha=10.0), 10), data)
    output = method(whole_batch(data, method))

    everything = pairs_of(model, data)
    negatives = [item for item in everything if item.kind == "negative"]
    target = len(model.classes) - 1
    captions = [model.text_features(model.towers.tokenize([text]), target)[0] for text in data.target.texts]
    pairs = [
        type(item)(item.image, caption, item.kind, item.identity)
        for item, caption in zip((item for item in everything if item.kind == "target"), captions, strict=True)
    ]
    contrast = torch.stack([naive_contrastive(pair, [pair, *negatives], TAU) for pair in pairs]).mean()
    classes = model.class_features()
    means = []
    for k in range(3):
        losses = []
        for item in everything:
            if item.kind == str(k):
                scores = torch.exp(classes @ item.image / model.class_temperature)
                losses.append(-torch.log(scores[k] / scores.sum()))
        means.append(torch.stack(losses).mean())
    naive = contrast + 10.0 * torch.stack(means).mean()

    torch.testing.assert_close(output.values["objective"], contrast.detach(), rtol=1e-10, atol=0)
    torch.testing.assert_close(output.per_task["loss"], torch.stack(means).detach(), rtol=1e-10, atol=0)
    torch.testing.assert_close(gradient(output.surrogate, model), gradient(naive, model), rtol=1e-9, atol=1e-12)
