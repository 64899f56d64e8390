from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from holdfast.errors import UserError
from holdfast.model.classifier import Classifier
from holdfast.model.heads import TaskHeads

Disturb = Callable[[nn.Module, float], None]


def test_logits_at_the_start_are_the_old_models_bit_for_bit(
    classifier: Classifier, images: Tensor, disturb: Disturb
) -> None:
    old = classifier.frozen_copy()
    classifier.begin_round(rank=4, seed=1)
    with torch.no_grad():
        expected = old.logits(images)
    assert torch.equal(classifier.logits(images), expected)
    disturb(classifier, 0.05)
    later = classifier.logits(images)
    assert not torch.equal(later, expected)
    classifier.begin_round(rank=2, seed=2)
    assert torch.equal(classifier.logits(images), later)


def test_batched_products_equal_dense_matrices(classifier: Classifier, disturb: Disturb) -> None:
    classifier.double()
    for seed in (1, 2):
        classifier.begin_round(rank=3, seed=seed)
        disturb(classifier, 0.3)
    classifier.heads.rounds[0].scale.fill_(0.25)
    backbone = classifier.towers.text_backbone(classifier.prompt_tokens)
    rows = []
    for k, name in enumerate(classifier.classes):
        dense = classifier.heads.dense(classifier.towers.projection, name)
        rows.append(nn.functional.normalize(backbone[k] @ dense, dim=0))
    torch.testing.assert_close(classifier.class_features(), torch.stack(rows), rtol=0, atol=1e-12)
    for k in range(len(rows)):
        first = classifier.text_features(classifier.prompt_tokens[k : k + 1], head=k)
        torch.testing.assert_close(first[0], rows[k], rtol=0, atol=1e-12)
    plain = nn.functional.normalize(backbone @ classifier.towers.projection, dim=1)
    torch.testing.assert_close(classifier.text_features(classifier.prompt_tokens), plain, rtol=0, atol=1e-12)


def test_one_pass_of_the_text_tower_for_all_texts(classifier: Classifier, disturb: Disturb) -> None:
    classifier.double()
    classifier.begin_round(rank=3, seed=1)
    disturb(classifier, 0.3)
    captions, others = (classifier.towers.tokenize(texts) for texts in (["fog on a hill", "mist"], ["a dog runs"]))
    together = classifier.text_features_together(captions, 1, others)
    apart = classifier.text_features(captions, 1), classifier.text_features(others), classifier.class_features()
    for item, other in zip(together, apart, strict=True):
        torch.testing.assert_close(item, other, rtol=0, atol=1e-12)


def test_a_new_round_never_rewrites_the_old_ones(classifier: Classifier, disturb: Disturb) -> None:
    classifier.begin_round(rank=4, seed=1)
    disturb(classifier, 0.1)
    first = {name: value.clone() for name, value in classifier.heads.rounds[0].state_dict().items()}
    classifier.begin_round(rank=4, seed=2)
    disturb(classifier, 0.1)
    assert all(torch.equal(first[name], value) for name, value in classifier.heads.rounds[0].state_dict().items())
    assert not any(parameter.requires_grad for parameter in classifier.heads.rounds[0].parameters())
    assert bool(classifier.heads.rounds[1].U.any())


def test_first_gradient_reaches_u_and_not_v(classifier: Classifier, images: Tensor) -> None:
    added = classifier.begin_round(rank=4, seed=1)
    nn.functional.cross_entropy(classifier.logits(images), torch.zeros(len(images), dtype=torch.int64)).backward()
    assert added.U.grad is not None
    assert added.V.grad is not None
    assert all(bool(row.any()) for row in added.U.grad)
    assert not bool(added.V.grad.any())


def test_seeds_draw_other_heads_and_no_other_random_numbers() -> None:
    def draw(seed: int) -> Tensor:
        return TaskHeads(8, 6).begin_round(["a", "b"], 3, seed).V

    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert torch.equal(torch.rand(1), expected)


def test_heads_follow_their_class_into_another_label_space(
    classifier: Classifier, images: Tensor, disturb: Disturb
) -> None:
    classifier.begin_round(rank=4, seed=1)
    disturb(classifier, 0.1)
    names = ("snowy", "hail", "clear")
    sentences = (*classifier.prompts[2:3], ("the weather is hail",), *classifier.prompts[0:1])
    other = classifier.with_classes(names, sentences)
    mine, theirs = classifier.class_features(), other.class_features()
    torch.testing.assert_close(theirs[0], mine[2])
    torch.testing.assert_close(theirs[2], mine[0])
    torch.testing.assert_close(theirs[1], other.text_features(other.prompt_tokens[1:2])[0])  # no head yet: plain W
    before = other.logits(images)
    other.begin_round(rank=2, seed=5)
    assert torch.equal(other.logits(images), before)
    assert len(classifier.heads.rounds) == 1


def test_rank_must_be_positive(classifier: Classifier) -> None:
    with pytest.raises(UserError, match="rank"):
        classifier.begin_round(rank=0, seed=0)


@pytest.mark.parametrize("rank", [33, 10**9, 10**15])
def test_a_rank_that_the_matrices_do_not_allow_is_refused_before_room_is_made_for_it(
    rank: int, classifier: Classifier, tried: Callable[..., None]
) -> None:
    tried("bad inputs")
    with pytest.raises(UserError, match="of the task heads") as caught:
        classifier.begin_round(rank, 0)
    assert "at most 32" in caught.value.expected
    assert classifier.heads.rounds == []
    classifier.begin_round(32, 0)


def test_hundreds_of_heads_form_no_dense_matrix() -> None:
    heads = TaskHeads(512, 512)
    heads.begin_round([str(k) for k in range(365)], 4, 0)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.numel())
            return result

    with Watch(), torch.no_grad():
        heads.change(torch.randn(365, 512), heads.rows_of([str(k) for k in range(365)]))
    assert largest <= 365 * 512 * 4  # the factors; dense matrices would be 128 times as many numbers
