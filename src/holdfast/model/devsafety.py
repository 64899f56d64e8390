"""Checkpoints of the method's authors (github.com/GangLii/DevSafety), with their task-dependent heads.

The file is the state of a module that holds an OpenAI CLIP as ``model``. Beside CLIP's own names there are

    projection_fn_A [rows, text_width, r],     projection_fn_B [rows, r, D]
    E2 of a sentence under head c  =  Ē2 (text_projection + A_c B_c)

so that V_c = A_c and U_c = B_cᵀ. Rows are classes in the order of the authors' list. There may be more rows than
classes: the last one is that of negative pairs, those between are not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from holdfast.errors import UserError
from holdfast.model.heads import HeadRound

_A, _B = "projection_fn_A", "projection_fn_B"
_MARK = "projection_fn_"  # of every tensor that belongs to a head


def has_heads(state: Mapping[str, Tensor]) -> bool:
    """Whether a checkpoint is one of the authors', by the names of its tensors; prefixes may still be there."""
    return any(name.rpartition(".")[2].startswith(_MARK) for name in state)


def split_heads(state: Mapping[str, Tensor], path: str) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor] | None]:
    """CLIP's own tensors, and A and B; None where the heads are all zero, as those of models without heads are."""
    clip = {name: value for name, value in state.items() if not name.startswith(_MARK)}
    found = {name: value.float() for name, value in state.items() if name.startswith(_MARK)}
    if set(found) != {_A, _B}:
        raise UserError(
            f"{path} holds task heads that holdfast does not know",
            expected=f"{_A} and {_B}",
            found=", ".join(sorted(found)),
        )
    a, b = found[_A], found[_B]
    width, dim = _shape(clip.get("text_projection"))
    if a.dim() != 3 or a.shape[1] != width or b.shape != (a.shape[0], a.shape[2], dim) or not min(a.shape):
        raise UserError(
            f"{path} holds task heads of another model",
            expected=f"{_A} [rows, {width}, r] and {_B} [rows, r, {dim}]",
            found=f"{list(a.shape)} and {list(b.shape)}",
        )
    return clip, (a, b) if bool(b.any()) and bool(a.any()) else None


def _shape(projection: Tensor | None) -> tuple[int, ...]:
    return tuple(projection.shape) if projection is not None and projection.dim() == 2 else (0, 0)


@torch.no_grad()
def head_round(factors: tuple[Tensor, Tensor], classes: Sequence[str], path: str) -> tuple[HeadRound, tuple[str, ...]]:
    """The heads of the named classes as one round of ours, and what should be said about the others."""
    a, b = factors
    rows, width, rank = a.shape
    if not classes:
        raise UserError(
            f"{path} holds task heads, and does not name their classes",
            expected=f"--classes FILE with at most {rows} names, in the order in which the model was trained",
        )
    if len(classes) > rows:
        raise UserError(
            f"{path} holds fewer task heads than there are classes",
            expected=f"at most {rows} names",
            found=str(len(classes)),
        )
    heads = HeadRound(classes, b.shape[2], width, rank).requires_grad_(False)
    heads.V.copy_(a[: len(classes)])
    heads.U.copy_(b[: len(classes)].transpose(1, 2))
    rest = rows - len(classes)
    note = f"{rest} of its {rows} heads belong to no class and are left out (the last is that of negative pairs)"
    return heads, (note,) if rest else ()
