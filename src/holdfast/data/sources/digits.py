"""The handwritten digits that ship with scikit-learn: 1797 real examples that need no download."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

from holdfast.data.catalogue import Entry, Listing
from holdfast.data.dedup.signatures import thumbnail
from holdfast.data.round import Pixels

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True)
class DigitsReader:
    """8 x 8 grey pictures in memory."""

    arrays: np.ndarray  # [n, 8, 8] uint8

    def content(self, index: int) -> bytes:
        """The bytes of the array."""
        return self.arrays[index].tobytes()

    def image(self, index: int) -> Image.Image:
        """The digit as an RGB picture; the evaluation view enlarges it."""
        return Image.fromarray(self.arrays[index]).convert("RGB")

    def thumb(self, index: int) -> tuple[np.ndarray, bool]:
        """A thumbnail, marked as too small: two digits that look alike are not copies of one."""
        return thumbnail(self.image(index)), True

    def prepared(self, size: int, interpolation: str) -> Pixels | None:
        """None: nothing is prepared."""
        return None


def list_digits(*_: object) -> Listing:
    """All digits, with their class and no split."""
    from sklearn.datasets import load_digits

    values, labels = load_digits(return_X_y=True)
    grey = np.asarray(values, dtype=np.float64).reshape(-1, 8, 8) * (255 / 16)  # scikit-learn's levels go from 0 to 16
    entries = [Entry(f"digits/{position}", NAMES[label]) for position, label in enumerate(np.asarray(labels))]
    return Listing("digits", entries, DigitsReader(np.round(grey).astype(np.uint8)))
