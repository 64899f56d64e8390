"""Gradients of the constraints: are they independent, is this a KKT point, and who stands in the target's way?

Everything here is a function of one small matrix, the Gram matrix of the gradients ∇F, ∇h_1 … ∇h_m. It is computed
block by block, so that hundreds of tasks on a large model need the memory of a few gradients, not of hundreds.

The loss functions are given as callables over a list of parameters; nothing here knows a method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls
from torch import Tensor, nn
from torch.nn import functional

from holdfast.data.round import LabelledSet
from holdfast.errors import UserError
from holdfast.model.classifier import Classifier

Matrix = NDArray[np.float64]
LossParts = Callable[[], Iterable[Tensor]]  # scalars that add up to the loss; each is differentiated and let go
_COLUMNS = 1 << 18  # numbers of a gradient that are multiplied at a time, in float64


def class_loss(classifier: Classifier, examples: LabelledSet, label: int, batch_size: int = 64) -> LossParts:
    """L_k: the mean cross-entropy of one class's examples on the evaluation view, batch by batch."""
    positions = examples.of_class(label)
    if not len(positions):
        raise UserError(f"there are no examples of {classifier.classes[label]!r}")
    device = classifier.towers.projection.device

    def parts() -> Iterator[Tensor]:
        for start in range(0, len(positions), batch_size):
            here = positions[start : start + batch_size]
            images = classifier.preprocess.normalise(examples.images(here).to(device))
            labels = torch.full((len(here),), label, device=device)
            yield functional.cross_entropy(classifier.logits(images), labels, reduction="sum") / len(positions)

    return parts


@dataclass(frozen=True)
class Gradients:
    """Inner products of the gradients of some losses, for each group of parameters, and the losses themselves."""

    values: NDArray[np.float64]  # [n] the losses
    grams: Mapping[str, Matrix]  # group -> [n, n]; the Gram matrix of several groups together is their sum

    def gram(self, *groups: str) -> Matrix:
        """Gram matrix over the given groups of parameters; all of them by default."""
        return sum((self.grams[name] for name in groups or self.grams), np.zeros((len(self.values),) * 2))


def gradient_grams(
    losses: Sequence[LossParts], groups: Mapping[str, Sequence[Tensor]], *, memory_bytes: int = 2 << 30
) -> Gradients:
    """⟨∇l_i, ∇l_j⟩ for all pairs of losses and each group of parameters.

    A block of b gradients is held; all later ones pass by one at a time. b is what ``memory_bytes`` has room for, and
    each gradient is computed about n / (2 b) times.
    """
    parameters = [parameter for group in groups.values() for parameter in group]
    if not parameters or not losses:
        raise ValueError("diagnosis needs at least one loss and one parameter")
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    block = max(1, min(len(losses), memory_bytes // size - 1))
    spans = _spans(groups)
    values = np.zeros(len(losses))
    grams = {name: np.zeros((len(losses), len(losses))) for name in groups}
    for start in range(0, len(losses), block):
        held: list[Tensor] = []
        for index in range(start, len(losses)):
            value, gradient = _gradient(losses[index], parameters)
            values[index] = value
            if index < start + block:
                held.append(gradient)
            for name, (begin, end) in spans.items():
                products = _products(held, gradient, begin, end)
                grams[name][start : start + len(held), index] = products
                grams[name][index, start : start + len(held)] = products
    return Gradients(values, grams)


def _spans(groups: Mapping[str, Sequence[Tensor]]) -> dict[str, tuple[int, int]]:
    """Where each group's numbers stand in a flat gradient."""
    spans: dict[str, tuple[int, int]] = {}
    begin = 0
    for name, group in groups.items():
        end = begin + sum(parameter.numel() for parameter in group)
        spans[name] = begin, end
        begin = end
    return spans


def _gradient(loss: LossParts, parameters: Sequence[Tensor]) -> tuple[float, Tensor]:
    """Value and flat gradient of a loss given in parts."""
    value = 0.0
    total = torch.cat([torch.zeros_like(parameter).flatten() for parameter in parameters])
    pieces = total.split([parameter.numel() for parameter in parameters])
    for part in loss():
        found = torch.autograd.grad(part, list(parameters), allow_unused=True, materialize_grads=True)
        value += float(part.detach())
        for piece, gradient in zip(pieces, found, strict=True):
            piece.add_(gradient.detach().flatten())
    return value, total


def _products(held: Sequence[Tensor], gradient: Tensor, begin: int, end: int) -> NDArray[np.float64]:
    """Inner products of some held gradients with one more, over a span, summed in float64."""
    total = torch.zeros(len(held), dtype=torch.float64, device=gradient.device)
    for left in range(begin, end, _COLUMNS):
        right = min(left + _COLUMNS, end)
        column = gradient[left:right].double()
        total += torch.stack([item[left:right].double().dot(column) for item in held])
    return total.cpu().numpy()


def smallest_singular_value(gram: Matrix) -> float:
    """σ_min([∇h_1 … ∇h_m]) = sqrt(λ_min(Gram))."""
    return float(np.sqrt(max(np.linalg.eigvalsh(gram)[0], 0.0)))


@dataclass(frozen=True)
class KKT:
    """How far a point is from a KKT point, with λ_k = β[h_k]_+ / m (method section 6)."""

    multipliers: NDArray[np.float64]  # λ_k
    stationarity: float  # ‖∇F + Σ λ_k ∇h_k‖
    relative_stationarity: float  # the same over ‖∇F‖
    feasibility: float  # max_k [h_k]_+
    complementarity: float  # max_k |λ_k h_k|


def kkt_residuals(gram: Matrix, h: NDArray[np.float64], beta: float) -> KKT:
    """KKT residuals; row and column 0 of ``gram`` are the target's, the rest the tasks'."""
    violation = np.maximum(h, 0.0)
    multipliers = beta * violation / len(h)
    weights = np.concatenate([[1.0], multipliers])
    stationarity = _length(weights, gram)
    return KKT(
        multipliers=multipliers,
        stationarity=stationarity,
        relative_stationarity=stationarity / max(float(np.sqrt(gram[0, 0])), np.finfo(float).tiny),
        feasibility=float(violation.max(initial=0.0)),
        complementarity=float(np.abs(multipliers * h).max(initial=0.0)),
    )


def assumption4_ratio(task_gram: Matrix, h: NDArray[np.float64]) -> float | None:
    """‖∇h [h]_+‖ / ‖[h]_+‖; None where no constraint is violated."""
    violation = np.maximum(h, 0.0)
    size = float(np.linalg.norm(violation))
    return _length(violation, task_gram) / size if size > 0 else None


def _length(weights: NDArray[np.float64], gram: Matrix) -> float:
    """‖Σ weights_i gradient_i‖."""
    return float(np.sqrt(max(float(weights @ gram @ weights), 0.0)))


def cosines(gram: Matrix) -> Matrix:
    """Angles between the gradients; 0 where one vanishes. Negative: a step down for one goes up for the other."""
    lengths = np.sqrt(np.maximum(np.diag(gram), 0.0))
    scale = np.outer(lengths, lengths)
    return np.divide(gram, scale, out=np.zeros_like(gram), where=scale > 0)


@dataclass(frozen=True)
class Obstacle:
    """One task in the target's way."""

    task: str
    cosine: float  # between its gradient and the target's
    taken_back: float  # share of the target's descent that keeping this task costs, at first order


@dataclass(frozen=True)
class Conflict:
    """What is left of the target's descent when no h_k may rise: the projection of −∇F on {d : ⟨∇h_k, d⟩ <= 0}."""

    free_share: float  # ‖projection‖² / ‖∇F‖²: 1 when no task is in the way, 0 when there is no way at all
    obstacles: tuple[Obstacle, ...]  # the tasks that bind, the heaviest first

    def sentence(self, target: str) -> str:
        """Which protected task stands in the target's way, in words."""
        free = f"{self.free_share * 100:.0f} % of the way down for {target!r} is open"
        blocking = [obstacle for obstacle in self.obstacles if obstacle.taken_back > 0]
        if not blocking:
            return f"No protected task stands in the way of {target!r}: at first order it improves without harm to any."
        first = blocking[0]
        text = (
            f"{first.task!r} stands in the way of {target!r}: keeping it takes back {first.taken_back * 100:.0f} % of "
            f"the target's gradient (cosine {first.cosine:+.2f})"
        )
        if len(blocking) > 1:
            others = ", ".join(
                f"{item.task!r} ({item.taken_back * 100:.0f} %, {item.cosine:+.2f})" for item in blocking[1:4]
            )
            more = f" and {len(blocking) - 4} more" if len(blocking) > 4 else ""
            text += f"; then {others}{more}"
        return f"{text}. With every task kept, {free}."


def conflict(gram: Matrix, tasks: Sequence[str]) -> Conflict:
    """Who blocks the target, at first order.

    v* = argmin over v >= 0 of ‖∇F + Σ v_k ∇h_k‖². The rest of ∇F is the open way; task k takes back
    −v_k ⟨∇F, ∇h_k⟩ / ‖∇F‖² of it, and these shares and the open one add up to 1. (A share is negative for a task that
    binds only because others pushed the way towards it.)
    """
    size = float(gram[0, 0])
    if size <= 0:
        return Conflict(0.0, ())
    # With Gram = AᵀA (A from its eigenvectors) the columns of A stand for the gradients: a least-squares problem.
    eigenvalues, vectors = np.linalg.eigh(gram)
    columns = np.sqrt(np.maximum(eigenvalues, 0.0))[:, None] * vectors.T
    lengths = np.linalg.norm(columns[:, 1:], axis=0)
    scale = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    found, rest = nnls(columns[:, 1:] * scale, -columns[:, 0], maxiter=30 * len(gram))
    taken = -found * scale * gram[0, 1:] / size
    angles = cosines(gram)[0, 1:]
    order = [int(k) for k in np.argsort(-taken, kind="stable") if abs(taken[k]) > 1e-9]
    obstacles = tuple(Obstacle(tasks[k], float(angles[k]), float(taken[k])) for k in order)
    return Conflict(min(rest * rest / size, 1.0), obstacles)


@dataclass(frozen=True)
class Diagnosis:
    """All of it for one model."""

    target: str
    tasks: tuple[str, ...]
    h: NDArray[np.float64]  # [m]
    singular_value: float  # σ_min of the tasks' gradients, heads included
    singular_value_without_heads: float
    kkt: KKT
    assumption4: float | None
    gram: Matrix  # [1 + m, 1 + m], the target first
    conflict: Conflict

    def sentence(self) -> str:
        """Who stands in the target's way."""
        return self.conflict.sentence(self.target)

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON values."""
        return {
            "target": self.target,
            "tasks": list(self.tasks),
            "h": self.h.tolist(),
            "smallest_singular_value": self.singular_value,
            "smallest_singular_value_without_heads": self.singular_value_without_heads,
            "kkt": {
                "multipliers": self.kkt.multipliers.tolist(),
                "stationarity": self.kkt.stationarity,
                "relative_stationarity": self.kkt.relative_stationarity,
                "feasibility": self.kkt.feasibility,
                "complementarity": self.kkt.complementarity,
            },
            "assumption4_ratio": self.assumption4,
            "gram": self.gram.tolist(),
            "cosines": cosines(self.gram).tolist(),
            "free_share": self.conflict.free_share,
            "obstacles": [
                {"task": obstacle.task, "cosine": obstacle.cosine, "taken_back": obstacle.taken_back}
                for obstacle in self.conflict.obstacles
            ],
            "in_words": self.sentence(),
        }


def diagnose(
    target_loss: LossParts,
    task_losses: Sequence[LossParts],
    old_losses: Sequence[float],
    *,
    target: str,
    tasks: Sequence[str],
    shared: Sequence[Tensor],
    heads: Sequence[Tensor] = (),
    beta: float,
    memory_bytes: int = 2 << 30,
) -> Diagnosis:
    """Diagnose a model: F and L_1 … L_m as callables, L_k(w_old) as numbers, parameters as two lists."""
    if not len(task_losses) == len(old_losses) == len(tasks):
        raise ValueError("each task has one loss, one old loss and one name")
    groups = {"shared": list(shared), "heads": list(heads)}
    groups = {name: group for name, group in groups.items() if group}
    found = gradient_grams([target_loss, *task_losses], groups, memory_bytes=memory_bytes)
    h = found.values[1:] - np.asarray(old_losses, dtype=np.float64)
    gram, without = found.gram(), found.gram("shared")
    return Diagnosis(
        target=target,
        tasks=tuple(tasks),
        h=h,
        singular_value=smallest_singular_value(gram[1:, 1:]),
        singular_value_without_heads=smallest_singular_value(without[1:, 1:]),
        kkt=kkt_residuals(gram, h, beta),
        assumption4=assumption4_ratio(gram[1:, 1:], h),
        gram=gram,
        conflict=conflict(gram, tasks),
    )


def parameter_groups(classifier: Classifier) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Trainable parameters of the towers (and of a linear head), and those of the task heads."""
    heads = [parameter for parameter in classifier.heads.parameters() if parameter.requires_grad]
    of_heads = {id(parameter) for parameter in heads}
    shared = [item for item in classifier.parameters() if item.requires_grad and id(item) not in of_heads]
    return shared, heads
