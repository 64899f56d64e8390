"""Directions in which the image tower's last layer moves the logit of one class, and of no other.

With E1(x) = h(x) A and d such that d · E2_c = 1 and d · E2_k = 0 for every other class k,

    A <- A + p dᵀ        adds h(x) · p to E1(x) · E2_c, and nothing to E1(x) · E2_k

The length of E1 changes too, by which all logits of a picture are divided alike: no order changes but that of class c.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holdfast.model.classifier import Classifier

_FREE = 0.05  # share of E2_c's length that the other classes must leave to a class alone


@torch.no_grad()
def target_direction(model: Classifier, name: str) -> Tensor | None:
    """d of a class: None where the other classes leave it none, or the last layer is out of reach."""
    if model.towers.image_projection is None:
        return None
    return own_direction(model.class_matrix(), model.class_index(name))


def own_direction(matrix: Tensor, row: int) -> Tensor | None:
    """d with d · E2_row = 1 and d · E2_k = 0 for every other row k of [K, D]; None where there is next to none."""
    own, others = matrix[row].double().cpu(), torch.cat([matrix[:row], matrix[row + 1 :]]).double().cpu()
    basis, sizes, _ = torch.linalg.svd(others.T, full_matrices=False)
    basis = basis[:, sizes > 1e-9 * sizes.max()]
    rest = own
    for _ in range(2):  # twice is enough: what rounding leaves of the first time goes with the second
        rest = rest - basis @ (basis.T @ rest)
    if rest.norm() < _FREE * own.norm():
        return None
    return (rest / (rest @ own)).to(matrix.device)


@torch.no_grad()
def class_directions(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """d of every row of [K, D], [K, D], and which of them the other rows leave enough room for, [K]."""
    rows = matrix.double().cpu()
    directions = torch.linalg.pinv(rows, rtol=1e-9).T
    own = (rows * directions).sum(dim=1)  # below 1 where a row depends on others
    room = 1 / directions.norm(dim=1).clamp(min=1e-12)
    free = (room >= _FREE * rows.norm(dim=1)) & ((own - 1).abs() < 1e-6)
    return directions.to(matrix.device), free.to(matrix.device)
