"""Task-dependent heads: a low-rank change of the text projection for each class (method section 5).

    W_k = W + Σ over rounds ρ of  scale_ρ · U_k,ρ V_k,ρᵀ

A round appends one factor for every class of its label space, with U = 0 and V random, so that the first step sees
the old model exactly. Factors of earlier rounds are frozen and never rewritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from holdfast.errors import UserError


class HeadRound(nn.Module):
    """The factors that one round of development added: U [K, D, r] and V [K, text_width, r] for named classes."""

    scale: Tensor

    def __init__(self, classes: Sequence[str], embed_dim: int, text_width: int, rank: int) -> None:
        super().__init__()
        if rank < 1:
            raise UserError("the rank of the task heads must be positive", found=str(rank))
        self.classes = tuple(classes)
        self.U = nn.Parameter(torch.zeros(len(self.classes), embed_dim, rank))
        self.V = nn.Parameter(torch.zeros(len(self.classes), text_width, rank))
        self.register_buffer("scale", torch.ones(()))  # lambda of the interpolation: it scales U Vᵀ, not U and V

    @property
    def rank(self) -> int:
        """r, the rank of each class's change."""
        return self.U.shape[-1]

    def draw(self, generator: torch.Generator) -> None:
        """U = 0; V normal with the spread of CLIP's own projection, text_width^(-1/2)."""
        with torch.no_grad():
            self.U.zero_()
            self.V.copy_(torch.randn(self.V.shape, generator=generator) * self.V.shape[1] ** -0.5)

    def rows_of(self, classes: Sequence[str]) -> list[int]:
        """Row of each class in U and V; -1 for a class that this round did not know."""
        rows = {name: row for row, name in enumerate(self.classes)}
        return [rows.get(name, -1) for name in classes]

    def change(self, backbone: Tensor, rows: Tensor) -> Tensor:
        """scale · U_k V_kᵀ x for each text: backbone [n, text_width], rows [n] -> [n, D], no dense W_k formed."""
        known = rows >= 0
        chosen = rows.clamp_min(0)
        inner = torch.bmm(backbone.unsqueeze(1), self.V.index_select(0, chosen))  # [n, 1, r]
        outer = torch.bmm(inner, self.U.index_select(0, chosen).transpose(1, 2)).squeeze(1)  # [n, D]
        return outer * (self.scale * known.unsqueeze(1))

    def change_of_one(self, backbone: Tensor, row: int) -> Tensor:
        """The same for texts that all use one class's head: two plain products."""
        return (backbone @ self.V[row]) @ self.U[row].T * self.scale


class TaskHeads(nn.Module):
    """The rounds' factors, one after another."""

    def __init__(self, embed_dim: int, text_width: int) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.text_width = text_width
        self._rounds = nn.ModuleList()

    @property
    def rounds(self) -> list[HeadRound]:
        """The rounds' factors, oldest first."""
        return cast("list[HeadRound]", list(self._rounds))

    def begin_round(self, classes: Sequence[str], rank: int, seed: int) -> HeadRound:
        """Freeze what is there and append a factor with U = 0 for every class."""
        most = min(self.embed_dim, self.text_width)
        if rank > most:
            raise UserError(
                f"the rank {rank:,} of the task heads is larger than their matrices allow",
                expected=f"at most {most}: W is {self.text_width} x {self.embed_dim}",
                do=f"set [model] head_rank to {most} or less",
            )
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        added = HeadRound(classes, self.embed_dim, self.text_width, rank)
        added.draw(torch.Generator().manual_seed(seed))
        self.append(added)
        return added

    def append(self, added: HeadRound) -> None:
        """Append a round's factors as they are, on the device and in the type of those that are there."""
        for head in self.rounds[:1]:
            added.to(device=head.U.device, dtype=head.U.dtype)
        self._rounds.append(added)

    def shared(self) -> TaskHeads:
        """Another list of the same factors: a round begun on one is not seen by the other."""
        heads = TaskHeads(self.embed_dim, self.text_width)
        for head in self.rounds:
            heads.append(head)
        return heads

    def rows_of(self, classes: Sequence[str]) -> Tensor:
        """Row of each class in each round, [rounds, K] int64."""
        rows = [head.rows_of(classes) for head in self.rounds]
        return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), len(classes))

    def change(self, backbone: Tensor, rows: Tensor) -> Tensor | None:
        """Σ over rounds of scale · U_k V_kᵀ x, with rows [rounds, n]; None where there are no heads."""
        total: Tensor | None = None
        for head, chosen in zip(self.rounds, rows, strict=True):
            change = head.change(backbone, chosen)
            total = change if total is None else total + change
        return total

    def change_of_one(self, backbone: Tensor, name: str) -> Tensor | None:
        """The same for texts that all use the head of class ``name``."""
        total: Tensor | None = None
        for head in self.rounds:
            (row,) = head.rows_of([name])
            if row >= 0:
                change = head.change_of_one(backbone, row)
                total = change if total is None else total + change
        return total

    def dense(self, projection: Tensor, name: str) -> Tensor:
        """W_k of one class as a matrix, laid out as the towers' projection [text_width, D]: for tests and diagnosis."""
        result = projection
        for head in self.rounds:
            (row,) = head.rows_of([name])
            if row >= 0:
                result = result + head.scale * (head.V[row] @ head.U[row].T)
        return result

    def spec(self) -> list[dict[str, Any]]:
        """JSON that :meth:`from_spec` rebuilds the shapes from."""
        return [{"classes": list(head.classes), "rank": head.rank} for head in self.rounds]

    @classmethod
    def from_spec(cls, embed_dim: int, text_width: int, spec: Sequence[dict[str, Any]]) -> TaskHeads:
        """Empty heads of the given shapes; weights are loaded afterwards. All of them are frozen."""
        heads = cls(embed_dim, text_width)
        for item in spec:
            heads.append(HeadRound(item["classes"], embed_dim, text_width, item["rank"]).requires_grad_(False))
        return heads
