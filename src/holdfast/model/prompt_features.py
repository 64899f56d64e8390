"""What a text tower says of class prompts, computed once for as long as its weights stay what they are.

A round asks for the features of the same few sentences over and over: for each candidate, bias and prediction. They are
kept beside the towers, on a CPU and where no gradient is wanted, and go with the first change of a weight: every
operation that writes to a tensor in place counts its version up, and one that is put in its place lies elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from holdfast.model.compute import active_mode
from holdfast.model.towers import TwoTowers

_MOST = 64  # sets of prompts of a tower


@dataclass
class _Kept:
    """Features by prompts, and the weights that they are of: held, so that nothing else comes to lie there."""

    weights: list[Tensor]
    versions: list[int]
    features: dict[tuple[object, ...], Tensor] = field(default_factory=dict[tuple[object, ...], Tensor])

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> _Kept:
        held = [tensor.detach() for tensor in tensors]  # the same memory and the same version counter
        return cls(held, [tensor._version for tensor in held])

    def holds(self, tensors: list[Tensor]) -> bool:
        return len(tensors) == len(self.weights) and all(
            tensor.data_ptr() == kept.data_ptr()
            and tensor.dtype == kept.dtype
            and tensor.shape == kept.shape
            and tensor._version == version
            for tensor, kept, version in zip(tensors, self.weights, self.versions, strict=True)
        )


_kept: WeakKeyDictionary[TwoTowers, _Kept] = WeakKeyDictionary()  # a copy of towers begins without


def prompt_backbone(towers: TwoTowers, tokens: Tensor) -> Tensor:
    """:meth:`TwoTowers.text_backbone` of prompts, which are asked for again and again."""
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled() or tokens.device.type != "cpu":
        return towers.text_backbone(tokens)
    weights: list[Tensor] = [*towers.text_backbone_parameters(), *towers.buffers()]  # W comes after
    if any(tensor.is_inference() for tensor in weights):  # these count no versions
        return towers.text_backbone(tokens)
    kept = _kept.get(towers)
    if kept is None or not kept.holds(weights) or len(kept.features) >= _MOST:
        kept = _kept[towers] = _Kept.of(weights)
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    key = (tuple(tokens.shape), tokens.numpy().tobytes(), autocast, repr(active_mode()), torch.get_num_threads())
    if key not in kept.features:
        kept.features[key] = towers.text_backbone(tokens)
    return kept.features[key]
