"""GEM: gradient episodic memory, a step that raises no protected task's loss to first order (method section 7)."""

from __future__ import annotations

import numpy as np
import torch
from scipy.optimize import lsq_linear, nnls
from torch import Tensor

from holdfast.config.base import NonNegativeFloat
from holdfast.config.method import MethodConfig
from holdfast.data.round import Batch
from holdfast.methods.base import StepOutput, Total, as_it_is
from holdfast.methods.labelled import LinearMethod, mean_over_ranks, task_means
from holdfast.methods.registry import register
from holdfast.model.classifier import Classifier


class GemConfig(MethodConfig):
    """method.name = "gem": the target's gradient, turned so that no protected task's loss rises to first order."""

    gamma: NonNegativeFloat = 0.5
    """Least weight of a protected task's gradient once any of them is violated. The paper tries 0.5 and 1."""


@register("gem", settings=GemConfig)
class Gem(LinearMethod):
    """The target's cross-entropy, its gradient g turned against the tasks' gradients G (rows) where they disagree.

    ::

        G g >= 0:   keep g
        otherwise:  v = argmin over v >= gamma of v'GG'v/2 + (Gg)'v,    use g + G'v
    """

    needs_task_gradients = True

    def __init__(self, model: Classifier, config: GemConfig, steps: int) -> None:
        super().__init__(model)
        self.config = config

    def forward(self, batch: Batch) -> StepOutput:
        """Cross-entropy of the target to differentiate, and of every task for its gradient."""
        target, protected = self.images(batch)
        loss, value = mean_over_ranks(self.losses(target, self.target_labels(batch)), batch.target_total)
        means = task_means(self.losses(protected, batch.protected_task), batch.protected_task, self.num_protected)
        return StepOutput({"target": loss}, {"objective": value}, {"loss": means.mean}, task_losses=means.share)

    def adjust_gradients(self, gradient: Tensor, task_gradients: Tensor, total: Total = as_it_is) -> Tensor:
        """g, or g + G'v where some task's loss would rise: [p], [m, p] -> [p]."""
        gram = gram_matrix(gradient, task_gradients, total)
        if (gram[:-1, -1] >= 0).all():
            return gradient
        # A task that was not sampled has no gradient. In the Gram matrix's root its column is rounding error, which the
        # solver would weigh by 1e15 to fit what the others leave over.
        sampled = np.append(np.diag(gram)[:-1] > 0, True)
        weight = np.zeros(len(task_gradients))
        weight[sampled[:-1]] = task_weights(gram[np.ix_(sampled, sampled)], self.config.gamma)
        return gradient + torch.from_numpy(weight).to(gradient) @ task_gradients


def gram_matrix(
    gradient: Tensor, task_gradients: Tensor, total: Total = as_it_is, *, chunk: int = 1 << 18
) -> np.ndarray:
    """Inner products of the rows of G and, last, g: [m+1, m+1] in float64, whatever the gradients are in.

    Nearly dependent gradients differ in their last digits, so the sums are made in float64, a piece of the parameters
    at a time: no second copy of G.
    """
    size = len(task_gradients) + 1
    products = torch.zeros(size, size, dtype=torch.float64, device=gradient.device)
    for start in range(0, gradient.numel(), chunk):
        piece = slice(start, start + chunk)
        rows = torch.cat([task_gradients[:, piece], gradient[None, piece]]).double()
        products += rows @ rows.T
    return total(products).cpu().numpy()


def task_weights(gram: np.ndarray, gamma: float) -> np.ndarray:
    """argmin over v >= gamma of v'GG'v/2 + (Gg)'v, from the Gram matrix of (G, g): [m].

    With v = gamma + z and any R with R'R equal to the Gram matrix, columns A for G and b for g, this is
    min over z >= 0 of ||A z + (b + A gamma)||^2 / 2: non-negative least squares with m + 1 equations, however many
    parameters there are. It is exact for singular GG' too; v may then not be unique, but G'v is.
    """
    values, vectors = np.linalg.eigh(gram)
    root = np.sqrt(np.clip(values, 0, None))[:, None] * vectors.T
    scale = np.sqrt(np.trace(gram)) or 1.0  # the solver's tolerances are absolute
    A, b = root[:, :-1] / scale, root[:, -1] / scale
    rest = -(b + A @ np.full(A.shape[1], gamma))
    try:
        z = nnls(A, rest, maxiter=30 * A.shape[1])[0]
    except RuntimeError:  # its active set went round in circles, as it may with dependent columns
        z = np.clip(lsq_linear(A, rest, bounds=(0, np.inf), method="bvls").x, 0, None)
    return gamma + z
