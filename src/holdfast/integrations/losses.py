"""Per-example losses of protected rows, without dropout and without a trace in the model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from holdfast.errors import UserError

PerExampleLoss = Callable[[Any, Any], Tensor]  # (model, batch) -> [n]
_IGNORED = -100  # the label of tokens that count for nothing, in transformers
_OWN_LOSS = "give per_example_loss=, a function of (model, batch) that returns one loss for each row"


@contextmanager
def evaluation_mode(model: nn.Module) -> Generator[None]:
    """The model in evaluation mode, every part of it back in its own mode afterwards.

    Dropout in the new model and none in the old one would bias every constraint, and so would BatchNorm's statistics of
    the batch. In evaluation mode both are off, and running statistics stay as they are.
    """
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def transformers_loss(model: Any, batch: Any) -> Tensor:
    """Cross-entropy of each row of a transformers model [n]: of its class, or the mean over its labelled tokens."""
    labels = batch.get("labels")
    if labels is None:
        raise UserError("protected rows have no labels", found=", ".join(batch), do=_OWN_LOSS)
    config = getattr(model, "config", None)
    both_sides = getattr(config, "is_encoder_decoder", False)  # its decoder reads the labels
    inputs = batch if both_sides else {name: value for name, value in batch.items() if name != "labels"}
    logits = at_least_float32(model(**inputs).logits)
    if labels.is_floating_point() or logits.shape[:-1] != labels.shape:
        shapes = f"logits {list(logits.shape)}, labels {list(labels.shape)} of {labels.dtype}"
        raise UserError("no cross-entropy for each row can be made of these labels", found=shapes, do=_OWN_LOSS)
    if labels.dim() == 1:
        return cross_entropy(logits, labels, reduction="none")
    if getattr(_base(model), "loss_type", None) == "ForCausalLM" and not both_sides:
        logits, labels = logits[:, :-1], labels[:, 1:]  # token t is predicted at t-1
    losses = cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=_IGNORED)
    return losses.sum(dim=1) / (labels != _IGNORED).sum(dim=1).clamp(min=1)


def at_least_float32(values: Tensor) -> Tensor:
    """Losses are small differences: bfloat16 would lose them."""
    return values if values.dtype == torch.float64 else values.float()


def _base(model: Any) -> Any:
    """The model under adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def new_losses(
    loss: PerExampleLoss, model: nn.Module, batch: Any, rows: int, rows_per_forward: int | None = None
) -> Tensor:
    """Losses [n] of the model that is trained, in evaluation mode and with gradients.

    With ``rows_per_forward`` the activations of a few rows are in memory at a time; backward computes them again.
    """

    def part(chunk: Any, count: int) -> Tensor:
        # Inside: when backward computes a part anew, the model is in training mode again.
        with evaluation_mode(model):
            return _checked(loss(model, chunk), count)

    if rows_per_forward is None or rows_per_forward >= rows:
        losses = part(batch, rows)
    else:
        parts = split(batch, rows, rows_per_forward)
        losses = torch.cat([checkpoint(part, *chunk, use_reentrant=False) for chunk in parts])
    if not losses.requires_grad:
        raise UserError(
            "the new losses of protected rows carry no gradient",
            do="let per_example_loss compute them from the model that it is given, without no_grad or detach",
        )
    return losses


@torch.no_grad()
def old_losses(
    loss: PerExampleLoss, model: nn.Module, batch: Any, rows: int, rows_per_forward: int | None = None
) -> Tensor:
    """Losses [n] of the old model, in evaluation mode and without gradients."""
    with evaluation_mode(model):
        parts = split(batch, rows, rows_per_forward or rows)
        return torch.cat([_checked(loss(model, chunk), count) for chunk, count in parts])


def _checked(losses: Any, rows: int) -> Tensor:
    if not isinstance(losses, Tensor) or losses.shape != (rows,):
        found = f"a tensor of shape {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise UserError(
            "per_example_loss must return one loss for each protected row",
            expected=f"a tensor of shape [{rows}]",
            found=found + (", as a mean has it" if isinstance(losses, Tensor) and losses.dim() == 0 else ""),
            do="compute the losses with reduction='none'; a collator that packs rows together cannot be used here",
        )
    return losses


def split(batch: Any, rows: int, size: int) -> list[tuple[Any, int]]:
    """A batch in parts of at most ``size`` rows, with their numbers of rows.

    Every tensor with one row for each of the batch is cut, in mappings and sequences too.
    """
    if size >= rows:
        return [(batch, rows)]
    parts = [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
    return [(_rows_of(batch, rows, part), part.stop - part.start) for part in parts]


def _rows_of(value: Any, rows: int, part: slice) -> Any:
    if isinstance(value, Tensor):
        return value[part] if value.dim() and len(value) == rows else value
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, Any]", value)
        return {name: _rows_of(item, rows, part) for name, item in fields.items()}
    if isinstance(value, tuple | list):
        items = [_rows_of(item, rows, part) for item in cast("list[Any]", value)]
        return tuple(items) if isinstance(value, tuple) else items
    return value
