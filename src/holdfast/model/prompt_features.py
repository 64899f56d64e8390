"""What a text tower says of class prompts, computed once for as long as its weights stay what they are.

A round asks for the features of the same few sentences over and over: for each candidate, bias and prediction. They are
kept beside the towers, on a CPU and where no gradient is wanted, and go with the first change of a weight. Towers that
share these weights (:meth:`holdfast.model.classifier.Classifier.copy_sharing`) share the features.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from holdfast.model.compute import active_mode
from holdfast.model.same_weights import HeldWeights
from holdfast.model.towers import TwoTowers

_MOST = 64  # sets of prompts of a tower


@dataclass
class _Kept:
    """Features by prompts, and the weights that they are of."""

    weights: HeldWeights
    features: dict[tuple[object, ...], Tensor] = field(default_factory=dict[tuple[object, ...], Tensor])


_kept: WeakKeyDictionary[TwoTowers, _Kept] = WeakKeyDictionary()
_one_at_a_time = Lock()  # fits ask from several threads: the first computes, the others find it


def prompt_backbone(towers: TwoTowers, tokens: Tensor) -> Tensor:
    """:meth:`TwoTowers.text_backbone` of prompts, which are asked for again and again."""
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled() or tokens.device.type != "cpu":
        return towers.text_backbone(tokens)
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    key = (tuple(tokens.shape), tokens.numpy().tobytes(), autocast, repr(active_mode()), torch.get_num_threads())
    with _one_at_a_time:
        kept = _kept_of(towers)
        if kept is None:
            return towers.text_backbone(tokens)
        if key not in kept.features:
            kept.features[key] = towers.text_backbone(tokens)
        return kept.features[key]


def _kept_of(towers: TwoTowers) -> _Kept | None:
    """What is kept of these weights, by these towers or by others that share them; None where they are not counted."""
    weights: list[Tensor] = [*towers.text_backbone_parameters(), *towers.buffers()]  # W comes after
    kept = _kept.get(towers)
    if kept is None or not kept.weights.same(weights):
        others = [other for item, other in list(_kept.items()) if type(item) is type(towers)]
        kept = next((other for other in others if other.weights.same(weights)), None)
    if kept is None or len(kept.features) >= _MOST:
        held = HeldWeights.of(weights)
        kept = None if held is None else _Kept(held)
    if kept is not None:
        _kept[towers] = kept
    return kept
