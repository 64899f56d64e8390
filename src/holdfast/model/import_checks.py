"""What every importer does: read weights without running anything, and compare outputs with the source's own."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from holdfast.errors import UserError

MAX_FILE = 1 << 28  # bytes of a file that is kept beside the weights
_TOLERANCE = 1e-5  # relative to the largest output, or absolute where that is below 1
_WRAPPERS = ("state_dict", "model_state_dict", "model")  # keys that training loops put the weights under
_PREFIXES = ("module.", "_orig_mod.", "model.")  # of DistributedDataParallel, torch.compile, Lightning


def read_state(path: Path) -> dict[str, Tensor]:
    """Tensors by name out of a safetensors or torch file: nothing in it is run."""
    failures = (SafetensorError, pickle.UnpicklingError, EOFError, zipfile.BadZipFile, OSError, RuntimeError)
    try:
        if path.suffix == ".safetensors":
            found: Any = load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except (*failures, ValueError, KeyError, AttributeError, TypeError) as error:
        raise unreadable(path, error) from error
    for key in _WRAPPERS:
        if isinstance(found, dict) and isinstance(found.get(key), dict):  # pyright: ignore[reportUnknownMemberType]
            found = found[key]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(found, dict) or not found or not all(isinstance(value, Tensor) for value in found.values()):  # pyright: ignore[reportUnknownVariableType]
        raise UserError(f"{path} cannot be read as weights", expected="tensors by name, as model.state_dict() has them")
    state = cast("dict[str, Tensor]", found)
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def unreadable(path: Path, error: Exception) -> UserError:
    """The error for a file or folder whose weights a library could not read."""
    return UserError(
        f"{path} cannot be read as weights",
        expected="a whole safetensors file, or a torch file of tensors (model.state_dict())",
        found=(str(error).splitlines() or [type(error).__name__])[0][:200],
    )


def random_pixels(size: int) -> Tensor:
    """Two random pictures, always the same."""
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def compare(imported: Callable[[], Tensor], source: Callable[[], Tensor], what: str) -> None:
    """Refuse an imported model whose outputs are not the source's."""
    expected, found = source(), imported()
    allowed = _TOLERANCE * max(1.0, float(expected.abs().max()))
    difference = float((expected - found).abs().max()) if expected.shape == found.shape else float("inf")
    if not difference <= allowed:
        raise UserError(
            f"the imported model's {what} are not the source's: nothing was written",
            expected=f"a difference of at most {allowed:.0e}",
            found=f"{difference:.1e}",
            do="the model ends in something else than holdfast takes it for: please report its architecture",
        )


def without_dtype(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a model in float32, whatever its weights were stored in."""
    plain = {name: value for name, value in config.items() if name not in ("dtype", "torch_dtype")}
    for part in ("text_config", "vision_config"):
        if isinstance(plain.get(part), dict):
            plain[part] = without_dtype(plain[part])
    return plain
