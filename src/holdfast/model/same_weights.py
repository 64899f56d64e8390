"""Whether weights are still what they were, without reading them, or have the same values.

Every operation that writes to a tensor in place counts its version up, and one that is put in its place lies elsewhere.
Copies of a model that share memory (:meth:`holdfast.model.classifier.Classifier.copy_sharing`) share versions, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeldWeights:
    """Weights as they were: held, so that nothing else comes to lie there."""

    tensors: tuple[Tensor, ...]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> HeldWeights | None:
        """None where some of them count no versions."""
        if any(tensor.is_inference() for tensor in tensors):
            return None
        held = tuple(tensor.detach() for tensor in tensors)  # the same memory and the same version counter
        return cls(held, tuple(tensor._version for tensor in held))

    @property
    def unchanged(self) -> bool:
        """Whether nobody has written to them."""
        return all(held._version == version for held, version in zip(self.tensors, self.versions, strict=True))

    def equal(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these have the same values. Those that lie elsewhere are read, and a device is waited for once."""
        pairs = list(zip(tensors, self.tensors, strict=False))
        if len(tensors) != len(self.tensors) or not all(_alike(tensor, held) for tensor, held in pairs):
            return False
        apart = [(tensor == held).all() for tensor, held in pairs if not _same_place(tensor, held)]
        return not apart or bool(torch.stack(apart).all())

    def same(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are the same tensors, unchanged."""
        return len(tensors) == len(self.tensors) and all(
            tensor.data_ptr() == held.data_ptr()
            and tensor.dtype == held.dtype
            and tensor.shape == held.shape
            and not tensor.is_inference()
            and tensor._version == version
            for tensor, held, version in zip(tensors, self.tensors, self.versions, strict=True)
        )


def _same_place(tensor: Tensor, held: Tensor) -> bool:
    return tensor.data_ptr() == held.data_ptr() and tensor.stride() == held.stride()


def _alike(tensor: Tensor, held: Tensor) -> bool:
    return tensor.dtype == held.dtype and tensor.shape == held.shape and tensor.device == held.device
