"""The paper's text and its authors' code, each against its formula written out picture by picture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from holdfast.config import RoundConfig, parse
from holdfast.data.round import Batch, Images, RoundData
from holdfast.errors import UserError
from holdfast.methods.forms import NEGATIVES, FormMethod
from holdfast.methods.holdfast import Holdfast, HoldfastConfig
from holdfast.methods.rm import Rm, RmConfig
from holdfast.train.optim import learning_rate_factor
from tests.methods.small import batch_of, gradient, small_data, small_model

TAU, TAU_0, GAMMA_1, GAMMA_2, BETA, ALPHA = 0.4, 0.05, 0.8, 0.6, 200.0, 3.0


def method_of(name: str, form: str, data: RoundData) -> FormMethod:
    """A method whose heads are not at zero, beside an old model that differs from the new one."""
    model = small_model(data, class_temperature=TAU_0)
    if name == "rm":
        method: FormMethod = Rm(model, RmConfig(form=form, temperature=TAU, alpha=ALPHA), 10)  # pyright: ignore[reportArgumentType]
    else:
        settings = HoldfastConfig(form=form, temperature=TAU, gamma_tasks=GAMMA_2, beta=BETA)  # pyright: ignore[reportArgumentType]
        method = Holdfast(model, settings, 10)
    method.begin_heads(2, seed=3)
    with torch.no_grad():
        for seed, factor in enumerate(model.heads.rounds[-1].parameters()):  # the classes' own alike in every form
            drawn = torch.randn(20, *factor.shape[1:], generator=torch.Generator().manual_seed(seed))
            factor.copy_(drawn[: len(factor)])
    # The first layer is off by a little: some tasks are violated, some are not.
    old = small_model(data, class_temperature=TAU_0).frozen_copy()
    with torch.no_grad():
        for name_, item in old.named_parameters():
            item.add_(0.05 * torch.randn(item.shape, generator=torch.Generator().manual_seed(len(name_))))
    method.double()
    method.prepare(old, data)
    return method.double()


def steps(data: RoundData, method: FormMethod) -> list[Batch]:
    """Two steps that share some pairs; constraint images are seen through a view that is not the evaluation view."""
    tokenize = method.model.towers.tokenize
    found = [
        batch_of(data, [0, 1, 2], [0, 1, 3, 4], [0, 1, 3, 4, 5, 6], tokenize),
        batch_of(data, [1, 3], [1, 2], [2, 4, 7, 8], tokenize),
    ]
    if not method.form.is_authors:
        return found
    return [replace(batch, protected_images=Images(batch.protected_images.pixels.flip(3))) for batch in found]


def move(method: FormMethod) -> None:
    """Stands in for an optimizer's step."""
    with torch.no_grad():
        for item in method.trainable():
            item.add_(0.02 * torch.randn(item.shape, generator=torch.Generator().manual_seed(item.numel())))


class Naive:
    """G_1 and G_2 as surrogates, from sums over single pictures; moving averages in dictionaries."""

    def __init__(self, method: FormMethod, data: RoundData) -> None:
        self.method, self.data, self.authors = method, data, method.form.is_authors
        self.pairs: dict[tuple[str, int], float] = {}
        self.tasks: dict[int, float] = {}

    def feature(self, text: Tensor, head: str | None) -> Tensor:
        towers = self.method.model.towers
        weight = towers.projection if head is None else self.method.model.heads.dense(towers.projection, head)
        return functional.normalize(towers.text_backbone(text[None])[0] @ weight, dim=0)

    def picture(self, pixels: Tensor) -> Tensor:
        return functional.normalize(self.method.model.towers.image_features(pixels[None])[0], dim=0)

    def contrast(self, batch: Batch) -> Tensor:
        """tau/|B| sum_i grad g_1i / u_1i + grad g_2i / u_2i, where the authors' g leaves the pair itself out."""
        own = self.data.tasks.target
        head = NEGATIVES if self.authors else None
        pairs = [
            (int(i), self.picture(x), self.feature(t, own))
            for i, x, t in zip(batch.target_index, batch.target_images.pixels, batch.target_texts.tokens, strict=True)
        ]
        others = [
            (self.picture(x), self.feature(t, head))
            for x, t in zip(batch.negative_images.pixels, batch.negative_texts.tokens, strict=True)
        ]
        size = len(self.data.negatives) + 1
        total = torch.zeros((), dtype=torch.float64)
        for index, image, text in pairs:
            to_texts = torch.stack([((image @ t - image @ text) / TAU).exp() for _, t in others]).mean()
            to_images = torch.stack([((x @ text - image @ text) / TAU).exp() for x, _ in others]).mean()
            for direction, mean in (("image", to_texts), ("text", to_images)):
                g = mean if self.authors else 1 / size + (1 - 1 / size) * mean
                before = self.pairs.get((direction, index))
                u = g.item() if before is None else (1 - GAMMA_1) * before + GAMMA_1 * g.item()
                self.pairs[direction, index] = u
                total = total + TAU * g / u
        return total / len(pairs)

    def losses(self, batch: Batch) -> dict[int, Tensor]:
        """Mean cross-entropy of each sampled task under the new model, on the step's views."""
        spec, model = self.data.tasks, self.method.model
        prompts = [self.feature(model.prompt_tokens[k], name) for k, name in enumerate(spec.classes)]
        found: dict[int, list[Tensor]] = {}
        for pixels, task in zip(batch.protected_images.pixels, batch.protected_task.tolist(), strict=True):
            logits = torch.stack([self.picture(pixels) @ prompt / TAU_0 for prompt in prompts])
            found.setdefault(task, []).append(torch.logsumexp(logits, dim=0) - logits[task])
        return {task: torch.stack(values).mean() for task, values in found.items()}

    def old_losses(self, batch: Batch) -> dict[int, float]:
        """The same under w_old, on evaluation views."""
        pixels = (self.data.constraint.images(batch.protected_index.numpy()).double() / 255 - 0.5) / 0.25
        every = functional.cross_entropy(self.method.old.logits(pixels), batch.protected_task, reduction="none")
        return {task: float(every[batch.protected_task == task].mean()) for task in batch.protected_task.tolist()}

    def penalty(self, batch: Batch) -> Tensor:
        """1/|B_c| sum_k beta [u_k]_+ grad h_k; times tau_0 in the authors' code."""
        new, old = self.losses(batch), self.old_losses(batch)
        total = torch.zeros((), dtype=torch.float64)
        for task, loss in new.items():
            h = loss.item() - old[task]
            u = (1 - GAMMA_2) * self.tasks[task] + GAMMA_2 * h if task in self.tasks else h
            self.tasks[task] = u
            total = total + BETA * max(u, 0.0) * loss
        return (TAU_0 if self.authors else 1.0) * total / len(new)

    def regulariser(self, batch: Batch) -> Tensor:
        """alpha/|B_c| sum_k L_k; times tau_0 in the authors' code."""
        losses = self.losses(batch)
        return (TAU_0 if self.authors else 1.0) * ALPHA * torch.stack(list(losses.values())).mean()


@pytest.mark.parametrize("form", ["published", "authors"])
@pytest.mark.parametrize("name", ["holdfast", "rm"])
def test_gradients_are_those_of_the_formulas(name: str, form: str) -> None:
    data = small_data()
    method = method_of(name, form, data)
    naive = Naive(method, data)
    for batch in steps(data, method):
        output = method(batch)
        expected = {
            "target": naive.contrast(batch),
            "retention": naive.penalty(batch) if name == "holdfast" else naive.regulariser(batch),
        }
        assert set(output.parts) == set(expected)  # and none of the additions
        for part, surrogate in expected.items():
            own, theirs = (gradient(value, method.model) for value in (output.parts[part], surrogate))
            assert float(theirs.norm()) > 1e-3
            torch.testing.assert_close(own, theirs, rtol=1e-8, atol=1e-10)
        method.commit(torch.tensor(True))
        move(method)
    if (name, form) == ("holdfast", "published"):
        assert {value > 0 for value in naive.tasks.values()} == {True, False}


@pytest.mark.parametrize(("name", "weight"), [("holdfast", "retention"), ("rm", "retention")])
def test_the_authors_code_multiplies_the_protected_term_by_tau_0(name: str, weight: str) -> None:
    """On the same views and from the same weights: 1.0000 for the contrast without its own pair, 0.0500 beside it."""
    data = small_data()
    lengths: dict[str, float] = {}
    for form in ("published", "authors"):
        method = method_of(name, form, data)
        batch = batch_of(data, [0, 1], [0, 1], range(9), method.model.towers.tokenize)
        lengths[form] = float(gradient(method(batch).parts[weight], method.model).norm())
    assert lengths["authors"] / lengths["published"] == pytest.approx(TAU_0, rel=1e-9)


BASE: dict[str, Any] = {
    "task": {"target": "eight"},
    "data": {"source": {"kind": "digits"}},
    "model": {"architecture": "tiny"},
}


def round_of(**sections: Any) -> RoundConfig:
    return parse(RoundConfig, {**BASE, **sections}, "round.toml")


@pytest.mark.parametrize("form", ["published", "authors"])
@pytest.mark.parametrize("name", ["holdfast", "rm"])
def test_a_form_is_complete_in_one_word(name: str, form: str) -> None:
    config = round_of(method={"name": name, "form": form}, train={"steps": 24_000})
    candidates = config.candidates
    assert (config.lambdas, candidates.refit_target, candidates.target_bias) == ((1.0,), False, (0.0,))
    assert candidates.checkpoints == ("best",)
    train = config.trained
    assert train.head_learning_rate in (None, train.learning_rate)
    theirs = (500, True, 15.0, (0.7, 1.0), True)
    given = (train.warmup_steps, train.flip, train.rotation, train.crop_scale, train.augment)
    assert given == (theirs if form == "authors" else (0, False, 0.0, (0.7, 1.0), True))
    assert parse(RoundConfig, config.model_dump(mode="json"), "config.json") == config  # a run folder says the same


def test_what_the_file_gives_is_kept() -> None:
    method = {"form": "authors", "beta": 7.0, "gamma_tasks": 0.3, "gamma_pairs": 0.5, "research": {"views": "paired"}}
    config = round_of(
        method=method,
        train={"steps": 100, "warmup_steps": 9, "flip": False},
        candidates={"least_chance": 0.1, "interpolation": [1.0]},
    )
    assert isinstance(config.method, HoldfastConfig)
    assert (config.method.beta, config.method.gamma_tasks, config.method.gamma_pairs) == (7.0, 0.3, 0.5)
    assert config.method.protected_views() == "paired"
    assert (config.train.warmup_steps, config.train.flip, config.train.rotation) == (9, False, 15.0)
    assert config.candidates.least_chance == 0.1


@pytest.mark.parametrize(
    ("key", "value"), [("refit_target", True), ("target_bias", [0.0, 1.0]), ("interpolation", [0.5, 1.0])]
)
def test_candidates_that_a_form_excludes_are_a_sentence(key: str, value: Any, tried: Any) -> None:
    tried("bad inputs")
    with pytest.raises(UserError, match=rf'method.form = "published" tests the checkpoint.*leave out candidates.{key}'):
        round_of(method={"form": "published"}, candidates={key: value})


def test_a_short_run_warms_up_for_the_same_share() -> None:
    """Linear to the learning rate, then half a cosine to zero, as the authors' schedule."""
    train = round_of(method={"form": "authors"}, train={"steps": 480}).train
    assert train.warmup_steps == 10
    assert [learning_rate_factor(train, step) for step in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]
    assert learning_rate_factor(train, 245) == pytest.approx(0.5)
    assert round_of(method={"form": "authors"}, train={"steps": 1}).train.warmup_steps == 0


def test_negatives_without_heads_use_the_plain_projection() -> None:
    data = small_data()
    method = Holdfast(small_model(data), HoldfastConfig(form="authors"), 10)
    batch = batch_of(data, [0, 1], [0, 1], range(9), method.model.towers.tokenize)
    plain = method.model.text_features(batch.negative_texts)
    torch.testing.assert_close(method.encode(batch).negative_texts, plain)
    method.begin_heads(2, seed=1)
    method.double()
    torch.testing.assert_close(method.encode(batch).negative_texts, plain)  # U = 0: the old model exactly
    with torch.no_grad():
        method.model.heads.rounds[-1].U.fill_(0.5)
    assert not torch.allclose(method.encode(batch).negative_texts, plain)
