"""The target objective: global contrastive loss with moving averages in place of large batches (method section 3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holdfast.objective.estimators import MovingAverage
from holdfast.runtime import sum_over_ranks, world_size


@dataclass(frozen=True)
class Contrast:
    """The surrogate to differentiate, and the objective's present estimate to log."""

    surrogate: Tensor  # its gradient is G_1
    objective: Tensor  # mean over the batch of tau log u_1i + tau log u_2i, no gradient


class GlobalContrastive(nn.Module):
    """F(w) = 1/n sum_i tau log g_1i + tau log g_2i over the pairs of a set.

    With s_ij = E1(x_i)·E2(t_j), N_i the size of pair i's contrast set (which holds the pair itself)::

        g_1i = 1/N_i sum_j exp((s_ij - s_ii)/tau)          image to text
        g_2i = 1/N_i sum_j exp((s_ji - s_ii)/tau)          text to image
        ĝ    = 1/N_i + (1 - 1/N_i) mean over the batch's negatives of exp(…)
        u   <- (1-gamma_1) u + gamma_1 ĝ
        G_1  = tau/|B| sum_i ( grad ĝ_1i / u_1i + grad ĝ_2i / u_2i )
    """

    def __init__(self, pairs: int, temperature: float, gamma: float) -> None:
        super().__init__()
        self.temperature = temperature
        self.log_u_image = MovingAverage(pairs, gamma, log=True)
        self.log_u_text = MovingAverage(pairs, gamma, log=True)

    def forward(
        self,
        images: Tensor,  # [B, D] E1 of this rank's pairs
        texts: Tensor,  # [B, D] E2 of this rank's pairs
        contrast_images: Tensor,  # [N, D] E1 of the negatives, of all ranks
        contrast_texts: Tensor,  # [N, D]
        index: Tensor,  # [B] which pairs these are
        total: int,  # B over all ranks
        set_size: float | Tensor,  # N_i; infinite: the pair itself does not count
        allowed: Tensor | None = None,  # [B, N] who is a negative of whom; default: all
        weight: Tensor | None = None,  # [B] weights that add up to 1 over all ranks; default: 1/total
    ) -> Contrast:
        """Surrogate and value for a batch of pairs against a batch of negatives."""
        own = (images * texts).sum(dim=1, keepdim=True)  # s_ii
        log_g_image = self._log_estimate(images @ contrast_texts.T - own, set_size, allowed)
        log_g_text = self._log_estimate(texts @ contrast_images.T - own, set_size, allowed)
        log_u_image = self.log_u_image.propose(index, log_g_image, total)
        log_u_text = self.log_u_text.propose(index, log_g_text, total)
        if weight is None:
            weight = torch.full_like(log_g_image, 1 / total)
        # grad ĝ / u = (ĝ / u) grad log ĝ, and ĝ / u <= 1 / gamma_1 because u was updated first.
        surrogate = (log_g_image - log_u_image).detach().exp() * log_g_image
        surrogate = surrogate + (log_g_text - log_u_text).detach().exp() * log_g_text
        value = sum_over_ranks((weight * (log_u_image + log_u_text)).sum())
        # DDP averages gradients over ranks: each rank's share of the sum is scaled by their number.
        return Contrast(world_size() * self.temperature * (weight * surrogate).sum(), self.temperature * value)

    def _log_estimate(self, difference: Tensor, set_size: float | Tensor, allowed: Tensor | None) -> Tensor:
        """log ĝ from s_ij - s_ii of the batch's negatives: [B, N] -> [B]."""
        exponent = difference / self.temperature
        if allowed is None:
            count = torch.full_like(exponent[:, 0], exponent.shape[1])
        else:
            count = allowed.sum(dim=1).to(exponent.dtype)
            exponent = exponent.masked_fill(~allowed, -torch.inf)
        # A fill, not a copy from the host: a copy would make the host wait for the step.
        size = set_size.to(exponent) if isinstance(set_size, Tensor) else exponent.new_full((), set_size)
        mean = torch.logsumexp(exponent, dim=1) - count.log()
        return torch.logaddexp(-size.log().expand_as(mean), torch.log1p(-1 / size) + mean)
