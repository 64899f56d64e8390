"""One logit fitted anew: it is the best of its kind, and no other class notices."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import logsumexp
from torch import Tensor, nn

from holdfast.candidates.directions import own_direction, target_direction
from holdfast.candidates.refit import TargetRefit, refit_from_features, refit_target
from holdfast.candidates.solver import logistic, minimise, minimise_linear
from holdfast.data.round import LabelledSet, PairSet, RoundData
from holdfast.data.task import TaskSpec
from holdfast.model.classifier import Classifier
from holdfast.model.folder import load_model, save_model
from holdfast.model.interpolate import interpolate
from holdfast.model.towers import TwoTowers
from tests.model.conftest import CLASSES, PROMPTS

Disturb = Callable[[nn.Module, float], None]
Variant = Callable[..., TwoTowers]


def test_the_direction_is_seen_by_one_class_alone() -> None:
    matrix = nn.functional.normalize(torch.randn(5, 12, dtype=torch.float64), dim=1)
    d = own_direction(matrix, 2)
    assert d is not None
    torch.testing.assert_close(matrix @ d, torch.eye(5, dtype=torch.float64)[2], rtol=0, atol=1e-12)
    twin = torch.cat([matrix, matrix[2:3] + 1e-3 * torch.randn(1, 12, dtype=torch.float64)])
    assert own_direction(twin, 2) is None  # another class that looks the same leaves nothing
    assert own_direction(torch.randn(13, 12, dtype=torch.float64), 0) is None  # nor do more classes than dimensions
    double = torch.cat([matrix, matrix[:1]])  # two classes with one prompt: no more than one direction is taken
    again = own_direction(double, 2)
    assert again is not None
    torch.testing.assert_close(again, d)


@pytest.mark.parametrize("vision", [{}, {"pool_type": "avg"}, {"final_ln_after_pool": True, "pool_type": "avg"}])
def test_the_last_layer_is_what_comes_after_hidden(variant: Variant, images: Tensor, vision: dict[str, object]) -> None:
    towers = variant(vision=vision)
    assert towers.image_projection is not None
    torch.testing.assert_close(towers.project(towers.image_hidden(images)), towers.image_features(images))
    assert towers.model.visual.proj is towers.image_projection  # type: ignore[attr-defined]


def test_towers_that_end_otherwise_say_so(variant: Variant) -> None:
    resnet = {"layers": [1, 1, 1, 1], "width": 32, "image_size": 32, "patch_size": None}
    assert variant(vision=resnet).image_projection is None


def seen(model: Classifier, n: int = 60) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures of noise with labels that their hidden features tell apart in part."""
    pictures = torch.randn(
        n, 3, 32, 32, generator=torch.Generator().manual_seed(4), dtype=model.towers.projection.dtype
    )
    with torch.no_grad():
        hidden = model.towers.image_hidden(pictures)
        features = model.towers.project(hidden)
    score = hidden[:, 0] - hidden[:, 1] + 0.3 * torch.randn(n, generator=torch.Generator().manual_seed(5))
    labels = torch.where(score > score.median(), 2, torch.arange(n) % 2)
    return hidden, features, labels


def loss_of(p: np.ndarray, model: Classifier, hidden: Tensor, features: Tensor, labels: Tensor) -> float:
    """What is minimised over p, written down plainly, but for the ridge."""
    matrix = model.class_matrix().detach().double().numpy()
    f, h, y = features.double().numpy(), hidden.double().numpy(), labels.numpy()
    length = np.linalg.norm(f, axis=1)
    logits = f @ matrix.T / length[:, None] / 0.05
    logits[:, 2] += h @ p / length / 0.05 + 3.0 * (y != 2)
    losses = logsumexp(logits, axis=1) - logits[np.arange(len(y)), y]
    return 0.1 * losses[y == 2].mean() + 0.45 * losses[y == 0].mean() + 0.45 * losses[y == 1].mean()


@pytest.mark.parametrize("newton", [False, True])  # L-BFGS, and what a GPU uses
def test_it_finds_the_optimum(classifier: Classifier, monkeypatch: pytest.MonkeyPatch, newton: bool) -> None:
    """Against scipy on the plain loss; the ridge is written down in the unknowns that it is on."""
    monkeypatch.setattr("holdfast.candidates.refit._waits", lambda tensor: newton)
    monkeypatch.setattr("holdfast.candidates.refit._WON", -10.0)  # the optimum itself, however little it wins
    model = classifier.double().frozen_copy()
    hidden, features, labels = seen(model)
    direction = target_direction(model, CLASSES[2])
    found = refit_from_features(model, CLASSES[2], direction, hidden, features, labels)
    entries = (hidden / features.norm(dim=1, keepdim=True)).numpy()
    moments = entries.T @ entries / len(entries)
    steady = np.linalg.solve(moments + 0.01 * moments.diagonal().mean() * np.eye(len(moments)), entries.mean(axis=0))
    first, centre = entries @ steady, entries.mean(axis=0)
    spread = (entries - first[:, None] * centre).std(axis=0, ddof=1)
    scale = 1 / np.sqrt(spread**2 + (spread**2).mean())
    scale /= np.sqrt(((spread * scale) ** 2).mean())

    def p_of(unknown: np.ndarray) -> np.ndarray:
        u, b = unknown[:-1], unknown[-1]
        return 0.05 * (u * scale + (b - (u * centre * scale).sum()) * steady)

    def whole(unknown: np.ndarray) -> float:
        return loss_of(p_of(unknown), model, hidden, features, labels) + 0.01 * (unknown[:-1] ** 2).sum()

    best = minimize(
        whole, np.zeros(entries.shape[1] + 1), method="L-BFGS-B", options={"maxiter": 5000, "maxfun": 10**6}
    )
    wanted = entries @ p_of(best.x) / 0.05
    np.testing.assert_allclose(entries @ found.weights.numpy() / 0.05, wanted, atol=0.02)
    assert loss_of(found.weights.numpy(), model, hidden, features, labels) < loss_of(
        np.zeros(entries.shape[1]), model, hidden, features, labels
    )


def test_a_target_that_the_fit_would_give_up_is_named_more_readily(classifier: Classifier) -> None:
    """Labels that no feature tells apart: without it the target would be named for nothing."""
    model = classifier.double().frozen_copy()
    hidden, features, _ = seen(model)
    labels = torch.arange(len(hidden)) % 3
    own = labels == 2
    before = (model.class_matrix() @ features[own].T).argmax(dim=0) == 2
    changed = refit_from_features(
        model, CLASSES[2], target_direction(model, CLASSES[2]), hidden, features, labels
    ).applied(model)
    after = (changed.class_matrix() @ changed.towers.project(hidden)[own].T).argmax(dim=0) == 2
    missed = 1 - before.double().mean()
    assert after.double().mean() >= before.double().mean() + 0.5 * missed - 1e-9
    assert after.double().mean() < before.double().mean() + 0.5 * missed + 0.1


@pytest.mark.parametrize("rounds", [0, 1])
def test_no_other_class_notices(classifier: Classifier, disturb: Disturb, rounds: int) -> None:
    """For pictures that the fit never saw: products with other classes are what they were, the target's are not."""
    for seed in range(rounds):
        classifier.begin_round(rank=3, seed=seed)
        disturb(classifier, 0.1)
    model = classifier.double().frozen_copy()
    fit = refit_from_features(model, CLASSES[2], target_direction(model, CLASSES[2]), *seen(model))
    assert fit.direction is not None
    changed = fit.applied(model)
    pictures = torch.randn(200, 3, 32, 32, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    with torch.no_grad():
        before = model.towers.image_features(pictures) @ model.class_matrix().T
        after = changed.towers.image_features(pictures) @ changed.class_matrix().T
        added = model.towers.image_hidden(pictures) @ fit.weights
    torch.testing.assert_close(after[:, :2], before[:, :2], rtol=0, atol=1e-9)
    torch.testing.assert_close(after[:, 2], before[:, 2] + added, rtol=0, atol=1e-9)
    old, new = model.logits(pictures).argmax(dim=1), changed.logits(pictures).argmax(dim=1)
    first = before[:, :2].argmax(dim=1)
    assert ((new == 2) | (new == first)).all()
    assert (old != new).any()


def test_the_head_moves_where_the_tower_may_not(classifier: Classifier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.candidates.refit._WON", -10.0)
    prompts = (PROMPTS[0], PROMPTS[1], ("snow", "a street in snow"))
    model = classifier.with_classes(CLASSES, prompts).double().frozen_copy()
    generator = torch.Generator().manual_seed(6)
    labels = torch.arange(90) % 3
    features = torch.randn(90, model.towers.embed_dim, generator=generator, dtype=torch.float64)
    features = features + model.class_matrix().detach()[labels] + 2.0 * (labels == 2)[:, None]
    fit = refit_from_features(model, CLASSES[2], None, features, features, labels)
    changed = fit.applied(model)
    assert changed.towers is model.towers
    assert torch.equal(changed.class_matrix()[:2], model.class_matrix()[:2])
    unit = nn.functional.normalize(features, dim=1)

    def loss(matrix: Tensor) -> float:
        logits = unit @ matrix.T / 0.05
        each = nn.functional.cross_entropy(logits, labels, reduction="none")
        return float(sum(each[labels == k].mean() for k in range(3)) / 3)

    best = loss(changed.class_matrix())
    assert best < loss(model.class_matrix()) - 0.05
    step = 1e-3 * torch.randn(20, model.towers.embed_dim, generator=torch.Generator().manual_seed(1)).double()
    near = [loss(TargetRefit(CLASSES[2], fit.weights + item, None).applied(model).class_matrix()) for item in step]
    assert min(near) > best - 1e-3  # no step from it gains more than the ridge gives away


def test_a_linear_head_is_one_too(classifier: Classifier) -> None:
    classifier.use_linear()
    model = classifier.double().frozen_copy()
    fit = refit_from_features(model, CLASSES[2], target_direction(model, CLASSES[2]), *seen(model))
    changed = fit.applied(model)
    pictures = torch.randn(20, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        before = model.towers.image_features(pictures) @ model.class_matrix().T
        after = changed.towers.image_features(pictures) @ changed.class_matrix().T
    torch.testing.assert_close(after[:, :2], before[:, :2], rtol=0, atol=1e-9)


class Pixels:
    """Pictures in memory, and which of them were read."""

    size = 32

    def __init__(self, pictures: Tensor) -> None:
        self.pictures, self.read_rows = pictures, 0

    def __len__(self) -> int:
        return len(self.pictures)

    def read(self, rows: np.ndarray) -> Tensor:
        self.read_rows += len(rows)
        return self.pictures[torch.from_numpy(rows)]


def bright_round(n: int = 40) -> RoundData:
    """Classes told apart by their colour; the target is blue."""
    colour = torch.arange(3).repeat_interleave(n)
    noise = torch.randint(0, 120, (3 * n, 3, 32, 32), generator=torch.Generator().manual_seed(2))
    pictures = (noise + 130 * nn.functional.one_hot(colour, 3)[:, :, None, None]).to(torch.uint8)
    pixels, rows = Pixels(pictures), np.arange(3 * n)
    names = tuple(str(row) for row in rows)
    protected = LabelledSet(pixels, rows[: 2 * n], colour[: 2 * n].numpy(), names[: 2 * n])
    own = PairSet(pixels, rows[2 * n :], ("snow",) * n, names[2 * n :])
    whole = LabelledSet(pixels, rows, colour.numpy(), names)
    spec = TaskSpec(CLASSES[2], CLASSES[:2], PROMPTS)
    return RoundData(spec, own, own, protected, whole, lambda: whole, lambda: whole)


@pytest.mark.parametrize("in_tower", [True, False])
def test_a_round_of_its_own_pictures(classifier: Classifier, tmp_path: Path, in_tower: bool) -> None:
    """On pictures that can be told apart the target is learnt, stored and developed further."""
    data = bright_round()
    model = classifier.frozen_copy()
    fit = refit_target(model, data, in_tower=in_tower)
    assert (fit.direction is not None) == in_tower
    changed = fit.applied(model)
    pictures = model.preprocess.normalise(data.dev.images())
    labels = torch.from_numpy(data.dev.labels)
    before, after = (item.logits(pictures).argmax(dim=1) for item in (model, changed))
    assert ((before == 2) != (labels == 2)).any()
    assert (after == labels)[labels == 2].all()
    assert not (after == 2)[labels != 2].any()
    save_model(changed, tmp_path / "fitted")
    again = load_model(tmp_path / "fitted")
    assert torch.equal(again.logits(pictures), changed.logits(pictures))
    again.begin_round(rank=2, seed=3)
    assert torch.equal(interpolate(changed, again, 0.0).logits(pictures), changed.logits(pictures))


def test_few_pictures_are_seen_in_several_views_and_many_in_one(
    classifier: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bright_round()
    refit_target(classifier, data)
    pixels = data.constraint.pixels
    assert isinstance(pixels, Pixels)
    assert pixels.read_rows == 4 * 120
    monkeypatch.setattr("holdfast.candidates.refit.MOST", 130)
    pixels.read_rows = 0
    refit_target(classifier, data)
    assert pixels.read_rows == 65 + 40  # half of what may be seen goes to each set, in the evaluation view alone


SOLVED = """
import sys
import torch
from holdfast.candidates.solver import minimise
unknown = torch.zeros(3, dtype=torch.float64, requires_grad=True)
minimise(unknown, lambda: (unknown - torch.tensor([1.0, 2.0, 3.0])).square().sum())
print([round(value, 6) for value in unknown.tolist()], "torch._dynamo" in sys.modules)
"""


def test_the_solver_imports_no_compiler() -> None:
    found = subprocess.run([sys.executable, "-c", SOLVED], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[1.0, 2.0, 3.0] False"


def test_the_solver_ends_in_the_bits_of_the_optimizer() -> None:
    random = torch.Generator().manual_seed(0)
    entries = torch.randn(200, 12, dtype=torch.float64, generator=random)
    labels = (torch.rand(200, generator=random) < 0.3).double()

    def loss_of(unknown: Tensor) -> Tensor:
        raised = torch.nn.functional.binary_cross_entropy_with_logits(entries @ unknown, labels)
        return raised + 0.01 * unknown.square().sum()

    found, expected = (torch.zeros(12, dtype=torch.float64, requires_grad=True) for _ in range(2))
    minimise(found, lambda: loss_of(found))
    optimizer = torch.optim.LBFGS(
        [expected], max_iter=200, history_size=20, tolerance_grad=1e-7, line_search_fn="strong_wolfe"
    )

    def closure() -> float:
        optimizer.zero_grad()
        value = loss_of(expected)
        value.backward()
        return value  # pyright: ignore[reportReturnType] — its stubs ask for a float

    optimizer.step(closure)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("scale", [0.1, 30.0])  # a start so far off that whole steps overshoot
@pytest.mark.parametrize("apart", [False, True])  # classes that a plane separates: the ridge alone holds it back
def test_newtons_method_ends_where_the_gradient_vanishes(scale: float, apart: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    design = torch.randn(80, 7, generator=generator, dtype=torch.float64)
    design[:, 3] = 0  # an entry that no picture tells anything about, and that has no ridge
    sign = torch.where(
        design[:, 0] + (0 if apart else 1) * torch.randn(80, generator=generator) > 0, 1.0, -1.0
    ).double()
    offset = torch.randn(80, generator=generator, dtype=torch.float64)
    weight = torch.rand(80, generator=generator, dtype=torch.float64) / 80
    ridge = torch.full((7,), 0.01, dtype=torch.float64)
    ridge[3] = 0
    start = scale * torch.randn(7, generator=generator, dtype=torch.float64)
    start[3] = 0
    found = logistic(design, offset, sign, weight, ridge, start).requires_grad_()
    margin = sign * (offset + design @ found)
    loss = (weight * torch.log1p(torch.exp(-margin))).sum() + (ridge * found.square()).sum()
    (gradient,) = torch.autograd.grad(loss, found)
    assert gradient.abs().max() < 1e-7


@pytest.mark.parametrize(("rows", "threads"), [(8, 1), (1 << 21, 2)])
def test_small_products_have_one_thread_and_others_keep_theirs(rows: int, threads: int) -> None:
    """Several threads would wait for one another after each of thousands of products, longer where others compute."""
    usual = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seen: list[int] = []

        def loss(reached: Tensor) -> Tensor:
            seen.append(torch.get_num_threads())
            return (reached - 1).square().mean()

        unknown = torch.zeros(3, dtype=torch.float64, requires_grad=True)
        minimise_linear(
            unknown, torch.ones(rows, 3, dtype=torch.float64), torch.full((3,), 1e-6).double(), loss, steps=3
        )
        assert set(seen) == {threads}
        assert torch.get_num_threads() == 2

        def fails(_: Tensor) -> Tensor:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            minimise_linear(unknown, torch.ones(rows, 3, dtype=torch.float64), torch.ones(3).double(), fails)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(usual)
