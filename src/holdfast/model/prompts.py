"""Class prompts: sentences in, one feature a class out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from holdfast.errors import UserError
from holdfast.runtime import sums_by


@dataclass(frozen=True)
class PromptTokens:
    """All prompts of all classes, tokenised once."""

    tokens: Tensor  # [P, L]
    class_of: Tensor  # [P] class index of each prompt, ascending
    single: bool  # each class has exactly one prompt


def tokenize_prompts(
    tokenize: Callable[[Sequence[str]], Tensor], classes: Sequence[str], prompts: Sequence[Sequence[str]]
) -> PromptTokens:
    """Tokenise the prompts of a label space; every class needs at least one, and classes have distinct names.

    No classes at all are towers that have not been given a label space yet.
    """
    if len(set(classes)) != len(classes):
        twice = sorted({name for name in classes if list(classes).count(name) > 1})
        raise UserError("a class is named twice in the label space", found=", ".join(twice))
    if len(classes) == 1:
        raise UserError("a classifier needs at least two classes", found=classes[0])
    if len(prompts) != len(classes):
        raise UserError("each class needs its prompts", expected=f"{len(classes)} lists", found=f"{len(prompts)}")
    empty = [name for name, sentences in zip(classes, prompts, strict=True) if not sentences]
    if empty:
        raise UserError("a class has no prompt", found=", ".join(empty), do="give each class at least one sentence")
    sentences = [sentence for group in prompts for sentence in group]
    class_of = [index for index, group in enumerate(prompts) for _ in group]
    return PromptTokens(tokenize(sentences), torch.tensor(class_of), single=len(sentences) == len(classes))


def class_means(features: Tensor, class_of: Tensor, num_classes: int) -> Tensor:
    """Mean of each class's unit features, normalised again: [P, D], [P] -> [K, D]."""
    # The mean and the sum point the same way, so the division by the count is left to the normalisation.
    return functional.normalize(sums_by(class_of, features, num_classes), dim=-1)
