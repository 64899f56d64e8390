"""GEM's, Co2L's and DER's losses against versions written sample by sample."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from holdfast.data.round import Batch, Images
from holdfast.errors import UserError
from holdfast.methods.co2l import Co2l, Co2lConfig
from holdfast.methods.der import Der, DerConfig, second_draw
from holdfast.methods.gem import Gem, GemConfig
from holdfast.methods.labelled import LinearMethod
from tests.methods.small import batch_of, gradient, prepared, small_data, small_model, whole_batch, with_second_views


def naive_loss(method: LinearMethod, image: Tensor, label: int) -> Tensor:
    assert method.model.linear is not None
    scores = torch.exp(method.model.linear @ image / method.model.class_temperature)
    return -torch.log(scores[label] / scores.sum())


def features(method: LinearMethod, images: Images) -> list[Tensor]:
    return [method.model.image_features(image[None])[0] for image in images.pixels]


def close(output: Tensor, naive: Tensor, method: LinearMethod) -> None:
    torch.testing.assert_close(output, naive, rtol=1e-10, atol=1e-12)
    expected = gradient(naive, method.model)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(gradient(output, method.model), expected, rtol=1e-8, atol=1e-12)


def moved(method: LinearMethod) -> LinearMethod:
    """A linear head that is no longer the prompts'."""
    assert method.model.linear is not None
    with torch.no_grad():
        method.model.linear += 0.3 * torch.randn(method.model.linear.shape, generator=torch.Generator().manual_seed(5))
    return method


# -- GEM --------------------------------------------------------------------------------------------------------------


def test_gem_takes_the_targets_loss_and_one_loss_a_task() -> None:
    data = small_data()
    method = moved(prepared(Gem(small_model(data), GemConfig(), 10), data))  # type: ignore[arg-type]
    batch = whole_batch(data, method)
    output = method(batch)
    target = torch.stack([naive_loss(method, feature, 3) for feature in features(method, batch.target_images)]).mean()
    close(output.parts["target"], target, method)
    protected = features(method, batch.protected_images)
    assert output.task_losses is not None
    for k in range(3):
        mine = [naive_loss(method, protected[i], k) for i in np.flatnonzero(data.constraint.labels == k)]
        close(output.task_losses[k], torch.stack(mine).mean(), method)


def test_linear_heads_start_where_the_prompts_are() -> None:
    data = small_data()
    model = small_model(data)
    images = whole_batch(data, Gem(model, GemConfig(), 1)).target_images
    before = model.logits(images)
    method = prepared(Gem(model, GemConfig(), 1), data)
    assert torch.equal(method.model.logits(images), before)


# -- Co2L -------------------------------------------------------------------------------------------------------------


def naive_contrast(z: list[Tensor], targets: int, tau: float) -> Tensor:
    losses = []
    for i in range(targets):
        bottom = torch.stack([torch.exp(z[i] @ z[a] / tau) for a in range(len(z)) if a != i]).sum()
        positives = [p for p in range(targets) if p != i]
        losses.append(-torch.stack([torch.log(torch.exp(z[i] @ z[p] / tau) / bottom) for p in positives]).mean())
    return torch.stack(losses).mean()


def naive_distillation(z: list[Tensor], old: list[Tensor], kappa: float, kappa_old: float) -> Tensor:
    losses = []
    for i in range(len(z)):
        others = [j for j in range(len(z)) if j != i]
        p = torch.stack([torch.exp(old[i] @ old[j] / kappa_old) for j in others])
        q = torch.stack([torch.exp(z[i] @ z[j] / kappa) for j in others])
        losses.append(-(p / p.sum() * torch.log(q / q.sum())).sum())
    return torch.stack(losses).mean()


@pytest.mark.parametrize(("kappa", "kappa_old", "weight"), [(0.2, 0.1, 1.0), (0.1, 0.05, 10.0)])
def test_co2l_contrasts_target_images_and_keeps_relations(kappa: float, kappa_old: float, weight: float) -> None:
    data = small_data()
    config = Co2lConfig(temperature=0.1, kappa=kappa, kappa_old=kappa_old, distillation=weight)
    method = Co2l(small_model(data), config, 10)
    prepared(method, data)
    batch = whole_batch(data, method)
    output = method(batch)
    images = Images(torch.cat([batch.target_images.pixels, batch.protected_images.pixels]))
    z, old = features(method, images), list(method.old.image_features(images))
    close(output.parts["target"], naive_contrast(z, 4, 0.1), method)
    close(output.parts["retention"], weight * naive_distillation(z, old, kappa, kappa_old), method)
    assert torch.isfinite(gradient(output.surrogate, method.model)).all()


def test_co2l_takes_two_views_as_further_samples() -> None:
    data = small_data()
    method = Co2l(small_model(data), Co2lConfig(temperature=0.1, kappa=0.2, kappa_old=0.1), 10)
    prepared(method, data)
    batch = with_second_views(whole_batch(data, method))
    output = method(batch)
    assert batch.target_images_again is not None
    assert batch.protected_images_again is not None
    pixels = (
        *(batch.target_images.pixels, batch.target_images_again.pixels),
        *(batch.protected_images.pixels, batch.protected_images_again.pixels),
    )
    images = Images(torch.cat(pixels))
    z, old = features(method, images), list(method.old.image_features(images))
    close(output.parts["target"], naive_contrast(z, 8, 0.1), method)  # the other view of an image is a positive
    close(output.parts["retention"], naive_distillation(z, old, 0.2, 0.1), method)


def test_protected_images_are_negatives_only() -> None:
    """No protected image is pulled towards an anchor, whatever its class: its similarity can only cost."""
    from holdfast.methods.co2l import supervised_contrast

    similarities = torch.zeros(2, 4, dtype=torch.float64, requires_grad=True)
    is_self = torch.eye(2, 4, dtype=torch.bool)
    is_target = torch.tensor([True, True, False, False])
    supervised_contrast(similarities, is_self, is_target, 0.1).sum().backward()
    assert similarities.grad is not None
    assert (similarities.grad[:, 2:] > 0).all()
    assert similarities.grad[0, 1] < 0
    assert similarities.grad[0, 0] == 0


def test_co2l_trains_a_balanced_classifier_on_frozen_features_second() -> None:
    data = small_data()
    method = Co2l(small_model(data), Co2lConfig(classifier_share=0.25), 10)
    moved(prepared(method, data))  # type: ignore[arg-type]
    first, second = method.phases()
    assert (first.share, second.share) == (0.75, 0.25)
    assert first.parameters == tuple(method.model.towers.image_parameters())
    assert second.parameters == (method.model.linear,)
    method.begin_phase(1)
    batch = whole_batch(data, method)
    output = method(batch)
    images = [*features(method, batch.target_images), *features(method, batch.protected_images)]
    labels = [3] * 4 + data.constraint.labels.tolist()
    means = [
        torch.stack([naive_loss(method, x.detach(), y) for x, y in zip(images, labels, strict=True) if y == k]).mean()
        for k in range(4)
    ]
    close(output.surrogate, torch.stack(means).mean(), method)
    image_gradient = torch.autograd.grad(output.surrogate, method.model.towers.image_parameters(), allow_unused=True)
    assert all(item is None for item in image_gradient)


def test_co2l_over_a_frozen_image_tower_trains_the_classifier_all_along() -> None:
    data = small_data()
    method = Co2l(small_model(data), Co2lConfig(), 10)
    method.model.towers.freeze(image=True)
    prepared(method, data)
    (only,) = method.phases()
    assert (only.share, only.parameters) == (1.0, (method.model.linear,))
    method.begin_phase(0)
    output = method(whole_batch(data, method))
    output.surrogate.backward()
    assert method.model.linear is not None
    assert method.model.linear.grad is not None
    assert output.per_task["loss"].shape == (3,)


def test_co2l_needs_two_target_images() -> None:
    data = small_data(target=1)
    with pytest.raises(UserError, match="contrasts target images"):
        prepared(Co2l(small_model(data), Co2lConfig(), 10), data)
    data = small_data()
    method = prepared(Co2l(small_model(data), Co2lConfig(), 10), data)
    with pytest.raises(UserError, match="two target images in a batch"):
        method(batch_of(data, [0], [0], [0, 3], method.model.towers.tokenize))


# -- DER --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_der_keeps_old_logits_and_der_plus_plus_replays_a_second_draw(beta: float) -> None:
    data = small_data()
    method = Der(small_model(data), DerConfig(alpha=0.5, beta=beta), 10)
    moved(prepared(method, data))  # type: ignore[arg-type]
    batch = whole_batch(data, method)
    output = method(batch)
    target = torch.stack([naive_loss(method, feature, 3) for feature in features(method, batch.target_images)]).mean()
    close(output.parts["target"], target, method)

    second = second_draw(batch) if beta else torch.zeros(9, dtype=torch.bool)
    assert method.model.linear is not None
    squares, replayed = [], []
    for i, image in enumerate(features(method, batch.protected_images)):
        if second[i]:
            replayed.append(naive_loss(method, image, int(data.constraint.labels[i])))
        else:
            new = method.model.linear @ image / method.model.class_temperature
            old = method.old.logits(batch.protected_images.pixels[i : i + 1])[0]
            squares.append(((new - old) ** 2).mean())
    naive = 0.5 * torch.stack(squares).mean()
    if beta:
        naive = naive + beta * torch.stack(replayed).mean()
    close(output.parts["retention"], naive, method)


def halves(batch: Batch) -> dict[int, tuple[int, int]]:
    second = second_draw(batch)
    return {
        int(k): (int((~second[batch.protected_task == k]).sum()), int(second[batch.protected_task == k].sum()))
        for k in batch.tasks
    }


def test_the_second_draw_is_half_of_every_task_and_changes() -> None:
    data = small_data((6, 6, 7))
    tokenize = small_model(data).towers.tokenize
    served: dict[int, set[bool]] = {}
    generator = np.random.default_rng(0)
    for _ in range(40):
        positions = np.concatenate(
            [generator.permutation(6)[:4], 6 + generator.permutation(6)[:4], 12 + generator.permutation(7)[:5]]
        )
        batch = batch_of(data, [0, 1], [0], positions.tolist(), tokenize)
        sizes = halves(batch)
        assert sizes[0] == sizes[1] == (2, 2)
        assert sorted(sizes[2]) == [2, 3]
        for position, chosen in zip(positions.tolist(), second_draw(batch).tolist(), strict=True):
            served.setdefault(position, set()).add(chosen)
    assert all(purposes == {True, False} for purposes in served.values())
