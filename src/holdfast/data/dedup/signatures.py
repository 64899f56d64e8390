"""What a picture looks like from afar: a grey thumbnail, and a 64-bit perceptual hash of it.

The hash holds the signs of the 8 x 8 lowest frequencies of the thumbnail's cosine transform (without the constant one).
The transform is linear, and so is cutting an edge off and stretching the rest; so the hashes of slightly cropped
versions of a picture come from its thumbnail by two small matrix products, and a mirrored version by changing the sign
of every second column.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import numpy as np
from PIL import Image

SIDE = 32  # of a thumbnail
FREQUENCIES = 8  # of the hash, in each direction
FLAT = 2.0  # grey levels; below this standard deviation a thumbnail says nothing
DRAWING = 0.8  # share of a thumbnail in one shade; above it a picture is a drawing on plain ground
DETAIL = (
    8,
    16,
)  # frequencies of the cosine transform, from the first to below the second, that hold a picture's detail
SMALL = 24  # px; pictures whose shorter side is smaller are compared byte for byte only

# Shares cut off at the start and the end of an axis. Whatever is cut off a side, up to 5 %, one of them is near.
CUTS = ((0.0, 0.0), (0.05, 0.0), (0.0, 0.05), (0.05, 0.05))
WAYS = tuple(product(CUTS, CUTS))  # of cutting rows and columns; version 2k is way k, version 2k + 1 its mirror image


@dataclass(frozen=True)
class Signatures:
    """Thumbnails and hashes of n pictures. ``usable`` is False where a picture is too flat or too small to compare."""

    thumbs: np.ndarray  # [n, 32, 32] uint8
    hashes: np.ndarray  # [n] uint64
    usable: np.ndarray  # [n] bool

    def __len__(self) -> int:
        return len(self.hashes)


def thumbnail(image: Image.Image) -> np.ndarray:
    """Grey, stretched to a square: uint8 [32, 32]. The cut of the evaluation view does not enter."""
    return np.asarray(image.convert("L").resize((SIDE, SIDE), Image.Resampling.BILINEAR), dtype=np.uint8)


def thumbnails_of_views(views: np.ndarray) -> np.ndarray:
    """Thumbnails of uint8 evaluation views [n, 3, size, size]."""
    return np.stack([thumbnail(Image.fromarray(np.ascontiguousarray(view.transpose(1, 2, 0)))) for view in views])


def make_signatures(thumbs: np.ndarray, *, small: np.ndarray | None = None) -> Signatures:
    """Signatures of thumbnails [n, 32, 32]; ``small`` marks pictures that had hardly any pixels."""
    deviation = np.empty(len(thumbs), dtype=np.float32)
    hashes = np.empty(len(thumbs), dtype=np.uint64)
    for start in range(0, len(thumbs), 8192):
        part = thumbs[start : start + 8192]
        deviation[start : start + 8192] = part.std(axis=(1, 2), dtype=np.float32)
        hashes[start : start + 8192] = _signs(_frequencies(part, *WAYS[0]))
    usable = deviation >= FLAT
    return Signatures(thumbs, hashes, usable if small is None else usable & ~small)


def perceptual_hashes(images: Iterable[Image.Image]) -> np.ndarray:
    """[n] uint64. Copies of one picture differ in few bits, other pictures in about half of them."""
    thumbs = [thumbnail(image) for image in images]
    return make_signatures(np.stack(thumbs)).hashes if thumbs else np.zeros(0, dtype=np.uint64)


def variant_hashes(thumbs: np.ndarray) -> np.ndarray:
    """Hashes of a picture as it is, with edges cut off, and each of these mirrored: [n, 32] uint64."""
    parts: list[np.ndarray] = []
    for rows, columns in WAYS:
        frequencies = _frequencies(thumbs, rows, columns)
        parts += [_signs(frequencies), _signs(_mirrored(frequencies))]
    return np.stack(parts, axis=1)


def coarse_correlation(whole: np.ndarray, cut: np.ndarray, versions: np.ndarray) -> np.ndarray:
    """Correlation of the lowest frequencies alone, ``whole`` in the given version: cheap, and never far too low."""
    result = np.empty(len(whole), dtype=np.float32)
    for version in np.unique(versions):
        here = np.flatnonzero(versions == version)
        frequencies = _frequencies(whole[here], *WAYS[version // 2])
        first = _unit(_mirrored(frequencies) if version % 2 else frequencies)
        result[here] = np.einsum("nd,nd->n", first, _unit(_frequencies(cut[here], *WAYS[0])))
    return result


def _unit(frequencies: np.ndarray) -> np.ndarray:
    values = frequencies.reshape(len(frequencies), -1)[:, 1:]
    return values / (np.linalg.norm(values, axis=1, keepdims=True) + 1e-6)


def correlation(whole: np.ndarray, cut: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Greatest correlation of thumbnails ``cut`` with ``whole``, the latter cut and mirrored in every way; mirrored?"""
    best = np.empty(len(whole), dtype=np.float32)
    flipped = np.empty(len(whole), dtype=bool)
    ways = np.concatenate([_resampling(*item) for item in (*CUTS, (0.025, 0.025))])  # [5·32, 32]
    for start in range(0, len(whole), 256):
        versions = _versions(whole[start : start + 256].astype(np.float32), ways)  # [n, 25, 32, 32]
        reference = _standardised(cut[start : start + 256].astype(np.float32))
        plain = np.matmul(_flat(versions), _flat(reference)[..., None])[..., 0].max(axis=1)
        mirrored = np.matmul(_flat(versions), _flat(reference[:, :, ::-1])[..., None])[..., 0].max(axis=1)
        best[start : start + 256], flipped[start : start + 256] = np.maximum(plain, mirrored), mirrored > plain
    return best, flipped


def detail_correlation(whole: np.ndarray, cut: np.ndarray) -> np.ndarray:
    """The same without the lowest frequencies, [n].

    A bright sky over dark ground correlates with every other one; their detail does not.
    """
    best = np.empty(len(whole), dtype=np.float32)
    ways = np.concatenate([_resampling(*item) for item in (*CUTS, (0.025, 0.025))])
    for start in range(0, len(whole), 256):
        versions = _versions(whole[start : start + 256].astype(np.float32), ways)
        reference = cut[start : start + 256].astype(np.float32)
        detail = _flat(_detail(versions))
        both = (reference, np.ascontiguousarray(reference[:, :, ::-1]))
        values = [np.matmul(detail, _flat(_detail(item))[..., None])[..., 0].max(axis=1) for item in both]
        best[start : start + 256] = np.maximum(*values)
    return best


def is_drawing(thumbs: np.ndarray) -> np.ndarray:
    """[n]: whether nearly all of a thumbnail is of one shade, as of a sketch on white."""
    middle = np.median(thumbs, axis=(1, 2), keepdims=True)
    return (np.abs(thumbs - middle) < 8).mean(axis=(1, 2)) > DRAWING


def detail_share(thumbs: np.ndarray) -> np.ndarray:
    """[n]: how much of a thumbnail's variance is detail; where it is hardly any, detail is noise."""
    pictures = thumbs.astype(np.float32)
    variance = pictures.var(axis=(1, 2))
    return _filtered(pictures).var(axis=(1, 2)) / (variance + 1e-6)


def _detail(pictures: np.ndarray) -> np.ndarray:
    """Pictures [..., 32, 32] with the frequencies of :data:`DETAIL` alone, standardised."""
    filtered = _filtered(pictures)
    return _standardised(filtered.reshape(-1, SIDE, SIDE)).reshape(filtered.shape)


def _filtered(pictures: np.ndarray) -> np.ndarray:
    frequency, place = np.arange(SIDE)[:, None], np.arange(SIDE)[None]
    cosines = np.cos(np.pi * frequency * (place + 0.5) / SIDE)
    cosines = (cosines / np.linalg.norm(cosines, axis=1, keepdims=True)).astype(np.float32)
    highest = np.maximum(frequency, frequency.T)
    kept = (highest >= DETAIL[0]) & (highest < DETAIL[1])
    return cosines.T @ ((cosines @ pictures @ cosines.T) * kept) @ cosines


def _versions(thumbs: np.ndarray, ways: np.ndarray) -> np.ndarray:
    """Every thumbnail resampled by each pair of ways, standardised: [n, ways², 32, 32]."""
    count, number = len(thumbs), len(ways) // SIDE
    across = (thumbs.reshape(-1, SIDE) @ ways.T).reshape(count, SIDE, number, SIDE).transpose(0, 2, 3, 1)
    both = (np.ascontiguousarray(across).reshape(-1, SIDE) @ ways.T).reshape(count, number, SIDE, number, SIDE)
    versions = np.ascontiguousarray(both.transpose(0, 1, 3, 4, 2))
    return _standardised(versions.reshape(-1, SIDE, SIDE)).reshape(count, number**2, SIDE, SIDE)


def _flat(pictures: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(pictures).reshape(*pictures.shape[:-2], -1)


def _standardised(values: np.ndarray) -> np.ndarray:
    centred = values - values.mean(axis=(1, 2), keepdims=True)
    return centred / (np.sqrt(np.einsum("nij,nij->n", centred, centred))[:, None, None] + 1e-6)


def _resampling(start: float, end: float) -> np.ndarray:
    """[32, 32]: cuts shares off both ends of an axis and stretches the rest, linearly."""
    places = np.clip((start + (np.arange(SIDE) + 0.5) / SIDE * (1 - start - end)) * SIDE - 0.5, 0, SIDE - 1)
    lower = np.minimum(places.astype(np.int64), SIDE - 2)
    matrix = np.zeros((SIDE, SIDE), dtype=np.float32)
    matrix[np.arange(SIDE), lower] = 1 - (places - lower)
    matrix[np.arange(SIDE), lower + 1] += places - lower
    return matrix


def _cosines() -> np.ndarray:
    """[8, 32]: the lowest frequencies of the cosine transform."""
    frequency, place = np.arange(FREQUENCIES)[:, None], np.arange(SIDE)[None]
    return np.cos(np.pi * frequency * (place + 0.5) / SIDE).astype(np.float32)


def _frequencies(thumbs: np.ndarray, rows: tuple[float, float], columns: tuple[float, float]) -> np.ndarray:
    """[n, 8, 8]: the lowest frequencies of the thumbnails after these cuts."""
    left, right = _cosines() @ _resampling(*rows), _cosines() @ _resampling(*columns)
    return left @ thumbs.astype(np.float32) @ right.T


def _mirrored(frequencies: np.ndarray) -> np.ndarray:
    mirrored = frequencies.copy()
    mirrored[:, :, 1::2] *= -1
    return mirrored


def _signs(frequencies: np.ndarray) -> np.ndarray:
    bits = frequencies.reshape(len(frequencies), -1) > 0
    bits[:, 0] = False  # the constant: brightness, the same sign for all
    return np.packbits(bits, axis=1).view(">u8")[:, 0].astype(np.uint64)
