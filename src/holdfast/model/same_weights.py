"""Whether weights are still what they were, without reading them.

Every operation that writes to a tensor in place counts its version up, and one that is put in its place lies elsewhere.
Copies of a model that share memory (:meth:`holdfast.model.classifier.Classifier.copy_sharing`) share versions, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
