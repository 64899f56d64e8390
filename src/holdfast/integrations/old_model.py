"""The old model that protected rows are compared with: a frozen copy, the model without its adapters, or a column."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from holdfast.errors import UserError

Model = TypeVar("Model", bound=nn.Module)


def frozen_copy(model: Model) -> Model:
    """A copy in evaluation mode that needs no gradients and shares nothing with the model."""
    copied = copy.deepcopy(model)
    for part in copied.modules():
        # Libraries replace a module's forward by one that is bound to the module itself (accelerate, TRL): a copy of
        # it would run the model that is trained.
        part.__dict__.pop("forward", None)
    return copied.requires_grad_(False).eval()


class OldModel:
    """A second model in memory."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @contextmanager
    def active(self) -> Generator[nn.Module]:
        """The module that computes old losses."""
        yield self.module

    def to(self, device: torch.device) -> None:
        """Move it to where the new model is."""
        self.module.to(device)

    def fingerprint(self) -> str:
        """Changes where a weight does."""
        return fingerprint(self.module)


class AdaptersOff(OldModel):
    """The model that is trained, with its adapters switched off: no second copy."""

    @contextmanager
    def active(self) -> Generator[nn.Module]:
        """The module, while its adapters are off."""
        adapted: Any = self.module
        with adapted.disable_adapter():
            yield self.module

    def to(self, device: torch.device) -> None:
        """It is where the new model is."""

    def fingerprint(self) -> str:
        """Of the weights that are not trained."""
        return fingerprint(self.module, frozen_only=True)


def choose_old_model(model: nn.Module, given: nn.Module | None, *, column: bool) -> OldModel | None:
    """The old model by what the user gave: a model, a column of losses (None), or the model at its start."""
    if column:
        if given is not None:
            raise UserError("old_model and old_loss_column are both given", do="give one of the two")
        return None
    if given is not None:
        check_old_model(model, given)
        return OldModel(given)
    if hasattr(model, "disable_adapter"):
        _refuse_trained_biases(model)
        return AdaptersOff(model)
    return OldModel(frozen_copy(model))


def check_old_model(model: nn.Module, old: nn.Module) -> None:
    """Refuse an old model that would move along with the new one, or that drops out."""
    if not isinstance(old, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UserError("old_model must be a torch module", found=type(old).__name__)
    storages = {parameter.data_ptr() for parameter in model.parameters() if parameter.numel()}
    shared = next((name for name, item in old.named_parameters() if item.numel() and item.data_ptr() in storages), None)
    if shared is not None:
        raise UserError(
            "the old model shares parameters with the model that is trained, and would move with it",
            found=shared,
            do="give a copy (holdfast.integrations.frozen_copy), or leave old_model out",
        )
    if any(part.training for part in old.modules()):
        raise UserError("the old model is in training mode", do="call old_model.eval() before you hand it over")


def _refuse_trained_biases(model: Any) -> None:
    for config in getattr(model, "peft_config", {}).values():
        if getattr(config, "bias", "none") != "none":
            raise UserError(
                "the adapters train biases of the base model, so that switching them off does not give the old model",
                found=f"bias = {config.bias!r}",
                do="use bias='none', or give old_model=",
            )


def fingerprint(module: nn.Module, *, frozen_only: bool = False) -> str:
    """SHA-256 over names, shapes and some 64 values of each parameter: fast, and training changes it."""
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        if frozen_only and parameter.requires_grad:
            continue
        flat = parameter.detach().flatten()
        step = max(1, len(flat) // 64)
        digest.update(f"{name}{list(parameter.shape)}".encode())
        digest.update(flat[::step][:64].to("cpu", torch.float64).numpy().tobytes())
    return digest.hexdigest()
