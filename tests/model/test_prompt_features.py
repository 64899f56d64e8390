"""Prompts are encoded once for as long as the text tower stays what it is, and never longer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from holdfast.model.classifier import Classifier
from holdfast.model.openclip import load_towers
from holdfast.model.openclip_towers import OpenClipTowers

CLASSES, PROMPTS = ("cat", "dog", "eel"), (("a cat",), ("a dog", "the dog"), ("an eel",))


@pytest.fixture
def model() -> Classifier:
    return Classifier(load_towers("tiny", None, seed=1), CLASSES, PROMPTS, 0.05)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts each pass of the text tower sees."""
    seen: list[int] = []
    plain = OpenClipTowers.text_backbone

    def counted(towers: OpenClipTowers, tokens: Tensor) -> Tensor:
        seen.append(len(tokens))
        return plain(towers, tokens)

    monkeypatch.setattr(OpenClipTowers, "text_backbone", counted)
    return seen


@torch.no_grad()
def matrix(model: Classifier) -> Tensor:
    return model.class_matrix().clone()


def fresh(model: Classifier) -> Tensor:
    """What towers that never kept anything say."""
    return matrix(model.copy())


def test_the_same_prompts_are_encoded_once(model: Classifier, passes: list[int]) -> None:
    first = matrix(model)
    assert torch.equal(matrix(model), first)
    assert passes == [4]
    again = model.with_classes(CLASSES, PROMPTS)  # another head over the same towers
    assert torch.equal(matrix(again), first)
    assert passes == [4]
    assert torch.equal(fresh(model), first)
    assert passes == [4, 4]


def test_other_prompts_are_other_features(model: Classifier, passes: list[int]) -> None:
    first = matrix(model)
    other = model.with_classes(CLASSES, (("a cat",), ("a dog", "the dog"), ("an old eel",)))
    assert not torch.equal(matrix(other), first)
    assert torch.equal(matrix(other), fresh(other))
    assert torch.equal(matrix(model), first)
    assert passes == [4, 4, 4]


def step(model: Classifier) -> None:
    weight = model.towers.model.token_embedding.weight
    optimizer = torch.optim.SGD([weight], lr=10.0)
    model.class_features().square().matmul(torch.arange(model.towers.embed_dim).float()).sum().backward()
    optimizer.step()


def in_place(model: Classifier) -> None:
    with torch.no_grad():
        model.towers.model.token_embedding.weight.add_(torch.randn(()))


def loaded(model: Classifier) -> None:
    state = {name: value + 0.1 if value.is_floating_point() else value for name, value in model.state_dict().items()}
    model.load_state_dict(state)


def put_in_place(model: Classifier) -> None:
    weight = model.towers.model.token_embedding.weight
    weight.data = weight.data + 0.5


def another_type(model: Classifier) -> None:
    model.double()
    model.float()
    in_place(model)


@pytest.mark.parametrize("change", [step, in_place, loaded, put_in_place, another_type])
def test_other_weights_are_noticed(model: Classifier, change: object) -> None:
    assert callable(change)
    before = matrix(model)
    change(model)
    after = matrix(model)
    assert not torch.equal(after, before)
    assert torch.equal(after, fresh(model))


def test_a_change_of_w_needs_no_new_pass(model: Classifier, passes: list[int]) -> None:
    """W comes after what is kept: the features are the new W's."""
    before = matrix(model)
    with torch.no_grad():
        model.towers.projection.mul_(torch.linspace(0.5, 2.0, model.towers.embed_dim))
    after = matrix(model)
    assert passes == [4]
    assert not torch.equal(after, before)
    assert torch.equal(after, fresh(model))


def test_memory_that_is_used_again_is_no_hit(model: Classifier) -> None:
    """A weight that is exchanged many times, each time freed: none of them may be taken for an earlier one."""
    weight = model.towers.model.token_embedding.weight
    for number in range(20):
        weight.data = torch.full_like(weight, 0.0).normal_(generator=torch.Generator().manual_seed(number))
        assert torch.equal(matrix(model), fresh(model))


def test_gradients_and_inference_mode_go_past_it(model: Classifier, passes: list[int]) -> None:
    matrix(model)
    assert model.class_features().requires_grad
    with torch.inference_mode():
        model.class_matrix()
    assert len(passes) == 3
    matrix(model)
    assert len(passes) == 3
    model.class_features().sum().backward()  # what is kept was made without a graph and takes none


def test_autocast_is_another_key(model: Classifier) -> None:
    full = matrix(model)
    with torch.autocast("cpu", torch.bfloat16):
        half = matrix(model)
    assert not torch.equal(full, half)
    assert torch.equal(matrix(model), full)


def test_copies_that_share_the_weights_need_no_new_pass(model: Classifier, passes: list[int]) -> None:
    first = matrix(model)
    copies = [model.requires_grad_(False).copy_with_own_last_layer() for _ in range(2)]
    assert all(torch.equal(matrix(copied), first) for copied in copies)
    assert passes == [4]
    in_place(model)  # all hold it
    after = matrix(copies[0])
    assert not torch.equal(after, first)
    assert all(torch.equal(matrix(item), after) for item in (*copies, model))
    assert passes == [4, 4]
    copies[1].towers.model.token_embedding.weight.data = torch.zeros_like(model.towers.model.token_embedding.weight)
    assert not torch.equal(matrix(copies[1]), after)
    assert torch.equal(matrix(copies[1]), fresh(copies[1]))
    assert torch.equal(matrix(model), after)
