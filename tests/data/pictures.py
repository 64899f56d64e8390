"""Small pictures and folders of them for the tests of the data room."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
NO_SHARED = f"the real pictures are not at {SHARED}"


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """A smooth random picture: unlike any other seed's, and stable under re-encoding."""
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def encode(image: Image.Image, kind: str = "JPEG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def write_folder(root: Path, counts: dict[str, int], *, start: int = 0) -> Path:
    """``counts`` maps "class" or "split/class" to a number of pictures, all different."""
    number = start
    for name, count in counts.items():
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        for position in range(count):
            (folder / f"{position:04d}.jpg").write_bytes(encode(picture(number)))
            number += 1
    return root
