"""The embedded judge: similarity of a caption to the target's prompts, with a threshold.

The encoder is handed in as a callable; this module knows no model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.errors import UserError

Embed = Callable[[Sequence[str]], np.ndarray]  # n texts -> [n, d]; lengths do not matter
Progress = Callable[[int, int], None]

# Sentences that say what the picture shows. A caption is compared with each, and the nearest counts.
PROMPTS = (
    "a photo of a {}",
    "people at the {}",
    "a {} outdoors, landscape",
    "walking in the {}",
    "a view of the {}",
)
# Sentences that use the word and show something else: how captions miss. The nearest is subtracted.
CONTRASTS = (
    "{} product for sale",
    "{} shirt, dress, shoes, clothing",
    "{} print, poster, painting, artwork",
    "book, movie or song titled {}",
    "house for sale, real estate, address {}",
    "company, hotel or person named {}",
    "vector illustration, clip art, 3d model of {}",
    "toy or costume",
)
_BATCH = 256


@dataclass(frozen=True)
class SimilarityConfig:
    """Prompts and threshold of the embedded judge.

    With weight 1 and threshold 0 a caption is kept when it is nearer to a prompt than to any contrast: a rule that
    means the same for every encoder.
    """

    prompts: tuple[str, ...]
    contrasts: tuple[str, ...] = ()
    contrast_weight: float = 1.0
    threshold: float = 0.0

    @classmethod
    def of(
        cls,
        target: str,
        *,
        threshold: float = 0.0,
        prompts: Sequence[str] = (),
        contrast_weight: float = 1.0,
    ) -> SimilarityConfig:
        """The default sentences about a target, with the user's own in place of ours where given."""
        if not -2 <= threshold <= 2:
            raise UserError(f"--threshold got {threshold}", expected="a number between -2 and 2")
        return cls(
            tuple(prompts) or tuple(item.format(target) for item in PROMPTS),
            tuple(item.format(target) for item in CONTRASTS) if contrast_weight else (),
            contrast_weight,
            threshold,
        )


def score_captions(
    captions: Sequence[str], config: SimilarityConfig, embed: Embed, progress: Progress | None = None
) -> np.ndarray:
    """Cosine to the nearest prompt, less the weighted cosine to the nearest contrast: one number a caption, [n]."""
    prompts = _unit(embed(config.prompts))
    contrasts = _unit(embed(config.contrasts)) if config.contrasts else None
    scores = np.empty(len(captions), dtype=np.float64)
    for start in range(0, len(captions), _BATCH):
        features = _unit(embed(captions[start : start + _BATCH]))
        score = (features @ prompts.T).max(axis=1)
        if contrasts is not None:
            score = score - config.contrast_weight * (features @ contrasts.T).max(axis=1)
        scores[start : start + _BATCH] = score
        if progress is not None:
            progress(min(start + _BATCH, len(captions)), len(captions))
    # Rounded, so that the order of sums in another batch size does not change a verdict or the manifest.
    return np.round(scores, 5)


def _unit(features: np.ndarray) -> np.ndarray:
    features = np.asarray(features, dtype=np.float64)
    return features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)


def examples_around(captions: Sequence[str], scores: np.ndarray, threshold: float, each: int = 10) -> dict[str, Any]:
    """What a person looks at to move the threshold: captions just below and just above it, and both ends."""
    order = np.argsort(scores, kind="stable")
    cut = int(np.searchsorted(scores[order], threshold, side="left"))

    def shown(rows: np.ndarray) -> list[dict[str, Any]]:
        return [{"score": float(scores[row]), "text": captions[row]} for row in rows]

    return {
        "threshold": threshold,
        "just_below": shown(order[max(0, cut - each) : cut]),
        "just_above": shown(order[cut : cut + each]),
        "lowest": shown(order[:each]),
        "highest": shown(order[::-1][:each]),
        "quantiles": [float(item) for item in np.quantile(scores, [0, 0.1, 0.25, 0.5, 0.75, 0.9, 1])]
        if len(scores)
        else [],
    }
