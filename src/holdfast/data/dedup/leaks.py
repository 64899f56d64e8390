"""Leaks: the same picture, or nearly the same, where two sets must not share any.

Exact copies are found by the hash of their pixels. Near copies (encoded again, resized, mirrored, up to 5 % cut off any
side) are found by perceptual hash without comparing all pairs (:mod:`holdfast.data.dedup.hamming`), and every candidate
is checked by correlating thumbnails, and the detail in them. Features of a model, where a callable hands them in, find
further ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from PIL import Image

from holdfast.data.catalogue import Catalogue, Problem, in_order
from holdfast.data.dedup.hamming import HammingIndex
from holdfast.data.dedup.signatures import (
    Signatures,
    coarse_correlation,
    correlation,
    detail_correlation,
    detail_share,
    is_drawing,
    make_signatures,
    variant_hashes,
)
from holdfast.data.images import BadImage
from holdfast.errors import FaultError

DISTANCE = 8  # of 63 bits; measured on real photographs in benchmarks/leaks.py, as is the next
CORRELATION = 0.92
DETAIL_CORRELATION = 0.75  # of frequencies that two pictures share only if they are one, or of one moment
DRAWING_CORRELATION = 0.985  # the same for drawings on plain ground: two sketches of a guitar reach 0.98
LEAST_DETAIL = 0.005  # of a thumbnail's variance; with less the correlation of detail says nothing
COARSE_SLACK = 0.02  # the correlation of low frequencies may be this much below that of whole thumbnails
FEATURE_SIMILARITY = 0.97

Features = Callable[[Sequence[Image.Image]], np.ndarray]  # pictures -> [n, d]


@dataclass(frozen=True)
class Match:
    """Two pictures that are one: row ``a`` of the first set, row ``b`` of the second (of the same one within a set)."""

    a: int
    b: int
    kind: Literal["exact", "near", "features"]
    similarity: float = 1.0  # correlation of thumbnails, or cosine of features
    distance: int = 0  # bits that differ
    mirrored: bool = False


@dataclass(frozen=True)
class Pictures:
    """What two sets are compared by: hashes, names to report, signatures, and features where there are any."""

    ids: tuple[str, ...]
    names: tuple[str, ...]
    signatures: Signatures
    features: np.ndarray | None = None
    problems: list[Problem] = field(default_factory=list[Problem])
    pictures: tuple[str, ...] = ()  # hashes of the pixels; without them the ids say which files are the same

    def keys_of(self, row: int) -> set[str]:
        """What exact copies share, one of them at least: the bytes of the file, the pixels."""
        return {self.ids[row], *(self.pictures[row : row + 1])}

    def take(self, rows: Sequence[int]) -> Pictures:
        """Some of them."""
        signatures = Signatures(
            *(part[list(rows)] for part in (self.signatures.thumbs, self.signatures.hashes, self.signatures.usable))
        )
        return Pictures(
            tuple(self.ids[row] for row in rows),
            tuple(self.names[row] for row in rows),
            signatures,
            None if self.features is None else self.features[list(rows)],
            self.problems,
            tuple(self.pictures[row] for row in rows) if self.pictures else (),
        )

    def __len__(self) -> int:
        return len(self.ids)


def pictures_of(
    catalogue: Catalogue, rows: np.ndarray | None = None, *, features: Features | None = None, workers: int = 2
) -> Pictures:
    """Thumbnails (and features) of the rows of a catalogue, each picture once; unreadable pictures are reported."""
    chosen = catalogue.table if rows is None else catalogue.table.take(rows)
    shown = catalogue.pictures()
    pictures = shown if rows is None else [shown[row] for row in rows]
    ids, names = chosen["example_id"].to_pylist(), chosen["locator"].to_pylist()
    readers, indices = chosen["reader"].to_pylist(), chosen["index"].to_pylist()
    once = list({picture: position for position, picture in reversed(list(enumerate(pictures)))}.values())
    once.sort()

    def describe(position: int) -> tuple[np.ndarray, bool] | str:
        try:
            return catalogue.readers[readers[position]].thumb(indices[position])
        except BadImage as error:
            return str(error)

    kept: list[int] = []
    thumbs: list[np.ndarray] = []
    small: list[bool] = []
    problems: list[Problem] = []
    for position, found in zip(once, in_order(describe, once, workers), strict=True):
        if isinstance(found, str):
            problems.append(Problem("unreadable", names[position], found))
            continue
        kept.append(position)
        thumbs.append(found[0])
        small.append(found[1])
    stacked = np.stack(thumbs) if thumbs else np.zeros((0, 32, 32), np.uint8)
    return Pictures(
        tuple(ids[position] for position in kept),
        tuple(names[position] for position in kept),
        make_signatures(stacked, small=np.array(small, dtype=bool)),
        None if features is None else _features(catalogue, kept, readers, indices, features),
        problems,
        tuple(pictures[position] for position in kept),
    )


def _features(
    catalogue: Catalogue, kept: list[int], readers: list[int], indices: list[int], features: Features
) -> np.ndarray:
    parts: list[np.ndarray] = []
    for start in range(0, len(kept), 64):
        images = [catalogue.readers[readers[p]].image(indices[p]) for p in kept[start : start + 64]]
        parts.append(np.asarray(features(images), dtype=np.float32))
    values = np.concatenate(parts) if parts else np.zeros((0, 1), np.float32)
    return values / (np.linalg.norm(values, axis=1, keepdims=True) + 1e-12)


def near_duplicates(
    a: Signatures,
    b: Signatures | None = None,
    *,
    distance: int = DISTANCE,
    least_correlation: float = CORRELATION,
    tables: int = 24,
) -> list[Match]:
    """Pictures of ``a`` that are nearly pictures of ``b``, or of ``a`` itself, each pair once.

    Either of two may be the one that was cut, so both are looked up as they are among the cut versions of the other.
    """
    if b is None:
        found = _cut_from(a, a, distance, least_correlation, tables, same=True)
        pairs = [(min(i, j), max(i, j), *rest) for i, j, *rest in found]
    else:
        pairs = _cut_from(a, b, distance, least_correlation, tables)
        pairs += [(i, j, *rest) for j, i, *rest in _cut_from(b, a, distance, least_correlation, tables)]
    best: dict[tuple[int, int], Match] = {}
    for i, j, similarity, bits, mirrored in pairs:
        match = Match(int(i), int(j), "near", float(similarity), int(bits), bool(mirrored))
        if (match.a, match.b) not in best or best[match.a, match.b].similarity < match.similarity:
            best[match.a, match.b] = match
    return [best[key] for key in sorted(best)]


def _cut_from(
    whole: Signatures, cut: Signatures, distance: int, least: float, tables: int, *, same: bool = False
) -> list[tuple[int, int, float, int, bool]]:
    """(row of whole, row of cut, correlation, distance, mirrored) of verified pairs."""
    rows, columns = np.flatnonzero(whole.usable), np.flatnonzero(cut.usable)
    if not len(rows) or not len(columns):
        return []
    index = HammingIndex(cut.hashes[columns], tables=tables)
    queries = np.concatenate([variant_hashes(whole.thumbs[rows[s : s + 4096]]) for s in range(0, len(rows), 4096)])
    found = index.near(queries, distance)
    i, j, bits, version = rows[found.query], columns[found.index], found.distance, found.version
    if same:
        i, j, bits, version = (item[rows[found.query] != columns[found.index]] for item in (i, j, bits, version))
    # Most candidates fall here, at a small part of the cost of the full correlation.
    likely = _coarse(whole, cut, i, j, version) >= least - COARSE_SLACK
    i, j, bits = i[likely], j[likely], bits[likely]
    result: list[tuple[int, int, float, int, bool]] = []
    for start in range(0, len(i), 65536):
        part = slice(start, start + 65536)
        values, mirrored = correlation(whole.thumbs[i[part]], cut.thumbs[j[part]])
        good = np.flatnonzero(values >= least)
        good = good[_same_detail(whole.thumbs[i[part][good]], cut.thumbs[j[part][good]])]
        columns_of = (i[part][good], j[part][good], values[good], bits[part][good], mirrored[good])
        result.extend(zip(*(column.tolist() for column in columns_of), strict=True))
    return result


def _same_detail(whole: np.ndarray, cut: np.ndarray) -> np.ndarray:
    """[n]: whether pairs of thumbnails share more than their large shapes."""
    if not len(whole):
        return np.zeros(0, dtype=bool)
    least = np.where(is_drawing(whole) | is_drawing(cut), DRAWING_CORRELATION, DETAIL_CORRELATION)
    plain = np.minimum(detail_share(whole), detail_share(cut)) < LEAST_DETAIL
    return plain | (detail_correlation(whole, cut) >= least)


def _coarse(whole: Signatures, cut: Signatures, i: np.ndarray, j: np.ndarray, version: np.ndarray) -> np.ndarray:
    parts = [slice(start, start + 65536) for start in range(0, len(i), 65536)]
    values = [coarse_correlation(whole.thumbs[i[part]], cut.thumbs[j[part]], version[part]) for part in parts]
    return np.concatenate([np.zeros(0, np.float32), *values])


def similar_features(a: np.ndarray, b: np.ndarray | None = None, *, least: float = FEATURE_SIMILARITY) -> list[Match]:
    """Normalised features with at least this cosine, found by the signs of 63 random projections."""
    generator = np.random.default_rng(20240301)
    planes = generator.standard_normal((a.shape[1], 63)).astype(np.float32)
    second = a if b is None else b
    # Two vectors at an angle differ in angle/pi of the signs; three standard deviations more are let through.
    share = float(np.arccos(least)) / np.pi
    distance = int(np.ceil(63 * share + 3 * np.sqrt(63 * share * (1 - share))))
    found = HammingIndex(_sign_codes(second @ planes), tables=48).near(_sign_codes(a @ planes)[:, None], distance)
    cosine = np.einsum("nd,nd->n", a[found.query], second[found.index])
    good = cosine >= least
    if b is None:
        good &= found.query < found.index
    triples = zip(found.query[good], found.index[good], cosine[good], found.distance[good], strict=True)
    return [Match(int(i), int(j), "features", float(value), int(bits)) for i, j, value, bits in triples]


def _sign_codes(values: np.ndarray) -> np.ndarray:
    bits = np.pad(values > 0, ((0, 0), (1, 0)))
    return np.packbits(bits, axis=1).view(">u8")[:, 0].astype(np.uint64)


def find_leaks(
    a: Pictures, b: Pictures | None = None, *, distance: int = DISTANCE, least_correlation: float = CORRELATION
) -> list[Match]:
    """Exact copies, near copies and pictures with near features, each pair once under the first of these names."""
    matches: dict[tuple[int, int], Match] = {}
    if b is not None:
        where: dict[str, list[int]] = defaultdict(list)
        for row in range(len(b)):
            for key in b.keys_of(row):
                where[key].append(row)
        for row in range(len(a)):
            for key in a.keys_of(row):
                for other in where.get(key, ()):
                    matches[row, other] = Match(row, other, "exact")
    second = None if b is None else b.signatures
    for match in near_duplicates(a.signatures, second, distance=distance, least_correlation=least_correlation):
        matches.setdefault((match.a, match.b), match)
    if a.features is not None and (b is None or b.features is not None):
        for match in similar_features(a.features, None if b is None else b.features):
            matches.setdefault((match.a, match.b), match)
    return [matches[key] for key in sorted(matches)]


def describe(match: Match, a: Pictures, b: Pictures | None = None) -> str:
    """One line for a person."""
    how = {
        "exact": "the same picture",
        "near": f"{match.similarity:.0%} alike{', mirrored' if match.mirrored else ''}",
        "features": f"features {match.similarity:.1%} alike",
    }
    return f"{a.names[match.a]} = {(b or a).names[match.b]} ({how[match.kind]})"


@dataclass(frozen=True)
class Repeated:
    """A sealed picture that is nearly another one: ``row`` of the sealed set is not counted, because of ``other``."""

    row: int
    other: str  # name of the picture that it repeats
    among: Literal["dev", "sealed"]


def repeated_sealed(sealed: Pictures, dev: Pictures) -> list[Repeated]:
    """Sealed pictures that tell nothing of their own: near copies of dev pictures, and all but one of near copies.

    Of sealed pictures that are nearly one the smallest id stays, whatever the order of the files; no two that stay are
    near copies. What is nearly the same is not independent: the test would count one picture several times.
    """
    found: dict[int, Repeated] = {}
    for match in find_leaks(sealed, dev):
        found.setdefault(match.a, Repeated(match.a, dev.names[match.b], "dev"))
    near: dict[int, list[int]] = defaultdict(list)
    for match in find_leaks(sealed):
        near[match.a].append(match.b)
        near[match.b].append(match.a)
    kept: set[int] = set()
    for row in sorted(near, key=lambda row: sealed.ids[row]):
        if row in found:
            continue
        earlier = next((other for other in near[row] if other in kept), None)
        if earlier is None:
            kept.add(row)
        else:
            found[row] = Repeated(row, sealed.names[earlier], "sealed")
    return [found[row] for row in sorted(found)]


def refuse_leaks(training: Pictures, sealed: Pictures) -> None:
    """A sealed picture that was trained on proves nothing: such a pair is a :class:`FaultError` that names it."""
    found = find_leaks(training, sealed)
    if not found:
        return
    shown = "\n            ".join(describe(match, training, sealed) for match in found[:10])
    raise FaultError(
        f"{len(found)} pairs of pictures are both trained on and sealed",
        expected="sealed pictures that nothing was trained on",
        found=shown + (f"\n            … and {len(found) - 10} more" if len(found) > 10 else ""),
        do='remove one of each, or set leaks = "drop" in [data] to leave the training copies out',
    )
