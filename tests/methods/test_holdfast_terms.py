"""What holdfast adds to the paper's form, each term against a version written picture by picture."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from holdfast.config import RoundConfig, parse
from holdfast.data.round import RoundData
from holdfast.methods.base import encode
from holdfast.methods.holdfast import Holdfast, HoldfastConfig, ResearchConfig, _Asked
from tests.methods.small import batch_of, gradient, prepared, small_data, small_model, whole_batch


def built(data: RoundData, **settings: Any) -> Holdfast:
    config = HoldfastConfig(form="published", research=ResearchConfig(views="paired"), beta=0.0, **settings)
    method = Holdfast(small_model(data), config, 10)
    prepared(method, data)
    return method


def logits(method: Holdfast, data: RoundData, old: bool = False) -> list[list[torch.Tensor]]:
    """Logits of target, negative and protected pictures, one by one."""
    model = method.old if old else method.model
    features = encode(model, whole_batch(data, method))
    matrix = model.class_matrix()
    groups = (features.target_images, features.negative_images, features.protected_images)
    return [[matrix @ item / model.class_temperature for item in group] for group in groups]


def log_share(values: torch.Tensor, at: int) -> torch.Tensor:
    return values[at] - torch.logsumexp(values, dim=0)


@pytest.mark.parametrize("label_boost", [0.0, 1.5])
def test_distillation_is_the_mean_divergence_among_protected_classes(label_boost: float) -> None:
    data = small_data()
    method = built(data, distill_weight=2.0, label_boost=label_boost)
    m = data.tasks.num_protected
    total, count = torch.zeros((), dtype=torch.float64), 0
    for kind, (new, old) in enumerate(zip(logits(method, data), logits(method, data, old=True), strict=True)):
        for place, (says, before) in enumerate(zip(new, old, strict=True)):
            old_logits = before[:m].detach().clone()
            if kind == 2:
                old_logits[int(data.constraint.labels[place])] += label_boost
            for k in range(m):
                share = log_share(old_logits, k)
                total = total + share.exp() * (share - log_share(says[:m], k))
            count += 1
    output = method(whole_batch(data, method))
    expected = 2.0 * total / count
    torch.testing.assert_close(output.parts["distillation"], expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(
        gradient(output.parts["distillation"], method.model), gradient(expected, method.model), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("label_boost", [0.0, 1.5])
def test_old_logits_that_are_kept_are_those_that_the_old_model_gives(
    monkeypatch: pytest.MonkeyPatch, label_boost: float
) -> None:
    """Evaluation views are the same in every step: the old model is asked once about each constraint image."""
    data = small_data()
    config = HoldfastConfig(form="published", distill_weight=2.0, label_boost=label_boost)

    def step() -> tuple[Holdfast, torch.Tensor]:
        method = Holdfast(small_model(data).double(), config, 10)
        prepared(method, data)
        return method, gradient(method(whole_batch(data, method)).parts["distillation"], method.model)

    kept, with_kept = step()
    asked: list[int] = []
    encoded = kept.old.image_features_together
    monkeypatch.setattr(kept.old, "image_features_together", lambda *kinds: asked.append(len(kinds)) or encoded(*kinds))
    kept(whole_batch(data, kept))
    assert asked == [2]  # target and negatives
    assert "old_logits" not in kept.state_dict()
    monkeypatch.setattr("holdfast.methods.holdfast._CACHED", 0)
    without, from_passes = step()
    assert len(without.old_logits) == 0
    assert len(kept.old_logits) == len(data.constraint)
    torch.testing.assert_close(with_kept, from_passes, rtol=1e-9, atol=1e-12)


def first(chosen: Sequence[int], of: int) -> list[int]:
    """Positions 0 … of-1 in an order that begins with the chosen."""
    return [*chosen, *(place for place in range(of) if place not in chosen)]


@pytest.mark.parametrize("views", ["clean", "paired"])
def test_asking_about_a_share_of_the_pairs_gives_the_whole_distillation_on_average(
    monkeypatch: pytest.MonkeyPatch, views: str
) -> None:
    """Over every sample of pairs that a draw can begin with: the same mean of the loss and of its gradient."""
    monkeypatch.setattr("holdfast.methods.holdfast._LEAST", 1)
    data = small_data(target=4, negatives=6)
    protected = [0, 3, 5, 6, 8]

    def distillation(share: float, target: list[int], negatives: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        settings: dict[str, Any] = {"distill_weight": 2.0, "label_boost": 1.5, "distill_share": share}
        config = HoldfastConfig(form="published", research=ResearchConfig(views=views), **settings)
        method = Holdfast(small_model(data), config, 10)
        prepared(method, data)
        batch = batch_of(data, target, negatives, protected, method.model.towers.tokenize)
        value = method(batch).parts["distillation"]
        return value.detach(), gradient(value, method.model)

    whole = distillation(1.0, list(range(4)), list(range(6)))
    samples = [
        distillation(0.5, first(target, 4), first(negatives, 6))
        for target in itertools.combinations(range(4), 2)
        for negatives in itertools.combinations(range(6), 3)
    ]
    assert len(samples) == 120
    for number, expected in enumerate(whole):
        each = torch.stack([sample[number] for sample in samples])
        assert each.std(dim=0).max() > 1e-3  # they do differ
        torch.testing.assert_close(each.mean(dim=0), expected, rtol=1e-10, atol=1e-13)


def test_the_old_model_sees_the_sample_alone_and_at_share_1_every_picture_in_one_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("holdfast.methods.holdfast._LEAST", 1)
    data = small_data(target=4, negatives=8)
    seen: list[torch.Tensor] = []

    def step(share: float) -> Holdfast:
        config = HoldfastConfig(form="published", distill_weight=2.0, distill_share=share)
        method = Holdfast(small_model(data), config, 10)
        prepared(method, data)
        encoded = method.old.towers.image_features
        monkeypatch.setattr(method.old.towers, "image_features", lambda images: seen.append(images) or encoded(images))
        method(whole_batch(data, method))
        return method

    batch = whole_batch(data, step(0.25))
    step(1.0)
    target, negatives = batch.target_images.pixels, batch.negative_images.pixels
    assert torch.equal(seen[0], torch.cat([target[:1], negatives[:2]]))
    assert torch.equal(seen[1], torch.cat([target, negatives]))


def test_a_sample_has_a_least_size_and_is_shared_out_by_what_it_stands_for() -> None:
    asked = [_Asked.of(0.25, total) for total in (0, 5, 32, 128)]
    assert [(item.rows, item.weight) for item in asked] == [(0, 0.0), (5, 1.0), (16, 2.0), (32, 4.0)]
    assert _Asked.of(1.0, 128) == _Asked(128, 1.0)


def test_the_default_asks_about_a_quarter_and_the_published_forms_about_nothing() -> None:
    assert HoldfastConfig().distill_share == 0.25
    for form in ("published", "authors"):
        config = HoldfastConfig(form=form)
        assert (config.distill_weight, config.distill_share) == (0.0, 1.0)


def test_distillation_leaves_the_targets_logit_free_and_is_nil_at_the_old_model() -> None:
    data = small_data()
    method = Holdfast(small_model(data), HoldfastConfig(form="published", distill_weight=3.0), 10)
    method.prepare(method.model.frozen_copy(), data)
    method.double()
    output = method(whole_batch(data, method))
    assert abs(float(output.parts["distillation"].detach())) < 1e-14
    target = torch.zeros(1, len(data.tasks.classes), dtype=torch.float64)
    moved = target.clone()
    moved[0, -1] = 5.0
    batch = whole_batch(data, method)
    rows = batch.target_total + batch.negative_total + batch.protected_total
    assert float(method._distillation(moved.expand(rows, -1), target.expand(rows, -1), batch)) == 0.0


@pytest.mark.parametrize(("margin", "share"), [(0.0, 0.0), (2.0, 0.0), (2.0, 0.3), (2.0, 0.25)])
def test_replay_asks_for_a_margin_against_the_target_on_protected_pictures_only(margin: float, share: float) -> None:
    data = small_data()
    method = built(data, replay=0.5, target_logit_margin=margin, target_share=share)
    m = data.tasks.num_protected
    of_target, _, of_protected = logits(method, data)
    losses: dict[int, list[torch.Tensor]] = {k: [] for k in range(m + 1)}
    losses[m] = [-log_share(item, m) for item in of_target]
    for place, item in enumerate(of_protected):
        label = int(data.constraint.labels[place])
        raised = torch.cat([item[:m], item[m:] + margin])
        losses[label].append(-log_share(raised, label))
    means = torch.stack([torch.stack(group).mean() for group in losses.values()])
    share = share or 1 / (m + 1)
    expected = 0.5 * (share * means[m] + (1 - share) * means[:m].mean())
    torch.testing.assert_close(method(whole_batch(data, method)).parts["replay"], expected, rtol=1e-10, atol=0)


def test_contrast_weighs_the_target_objective() -> None:
    data = small_data()
    whole, third = built(data), built(data, contrastive_weight=1 / 3)
    first, other = (method(whole_batch(data, method)) for method in (whole, third))
    torch.testing.assert_close(other.parts["target"], first.parts["target"] / 3, rtol=1e-12, atol=0)
    assert set(first.parts) == {"target", "retention"}  # nothing else in the paper's form


def test_the_published_form_is_the_papers_and_keys_that_are_given_stay() -> None:
    paper = HoldfastConfig.published()
    assert (paper.beta, paper.gamma_tasks, paper.gamma_pairs, paper.research.views) == (200.0, 0.8, 0.8, "clean")
    assert (
        paper.replay,
        paper.distill_weight,
        paper.label_boost,
        paper.target_logit_margin,
        paper.contrastive_weight,
    ) == (0, 0, 0, 0, 1)
    assert HoldfastConfig(form="published", beta=7.0).beta == 7.0
    again = HoldfastConfig.model_validate(paper.model_dump())
    assert again == paper  # a run folder's config.json says the same when it is read again


def test_heads_learn_faster_unless_told_otherwise() -> None:
    base: dict[str, Any] = {
        "task": {"target": "eight"},
        "data": {"source": {"kind": "digits"}},
        "model": {"architecture": "tiny"},
        "train": {"learning_rate": 1e-4},
    }
    rate = parse(RoundConfig, base, "x").trained.head_learning_rate
    assert rate is not None
    assert math.isclose(rate, 30e-4)
    own = {**base, "train": {"learning_rate": 1e-4, "head_learning_rate": 2e-4}}
    assert parse(RoundConfig, own, "x").trained.head_learning_rate == 2e-4
    published = {**base, "method": {"form": "published"}}
    assert parse(RoundConfig, published, "x").trained.head_learning_rate == 1e-4
    assert parse(RoundConfig, {**base, "method": {"name": "rm"}}, "x").trained.head_learning_rate is None


def test_the_old_judgement_counts_less_where_there_is_more_to_learn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    data = small_data()
    a_task = len(data.constraint) / data.tasks.num_protected
    monkeypatch.setattr("holdfast.methods.holdfast._FEW", a_task)
    assert built(data, distill_weight=2.0).distill_weight == 2.0
    monkeypatch.setattr("holdfast.methods.holdfast._FEW", a_task / 4)
    assert built(data, distill_weight=2.0).distill_weight == 2.0 / 16
