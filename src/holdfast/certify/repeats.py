"""Rows that are there more than once, and columns that say that rows belong together.

Without example ids nothing tells whether two equal rows are two images. Images of one class with equal answers give
equal rows, so equality alone is no sign. What is one, with d different rows (over all columns of the file, also those
that the test does not read) and k the greatest common divisor of how often each occurs:

1. *Block*: the file is a block of rows repeated, one copy after another, and d >= 2.
2. *Multiple*: k >= 2 and d >= 6. By chance, the counts of d kinds of rows have a common divisor with probability
   1 - 1/ζ(d): 1.7 % at d = 6.
3. *Partial*: there are columns that the test does not read (a path, a score), at least half of all rows differ, and
   some do not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.certify.exact.region import IntArray

LEAST_KINDS = 6
# Names of columns, without a plural's s: parts such as the id of patient_id are taken off.
_GROUPS = frozenset(
    {"account", "article", "camera", "client", "clip", "cluster", "conversation", "customer", "dialog", "dialogue"}
    | {"doc", "document", "drive", "driver", "episode", "family", "group", "hospital", "location", "movie", "page"}
    | {"paper", "participant", "passage", "patient", "person", "place", "plot", "prompt", "recording", "region", "scan"}
    | {"scanner", "scene", "sequence", "serie", "session", "shot", "site", "slide", "speaker", "station", "story"}
    | {"study", "subject", "template", "thread", "track", "trajectory", "trip", "user", "vehicle", "video", "visit"}
)
_WEIGHTS = frozenset({"weight", "weighting", "importance", "frequency", "multiplicity", "propensity"})
# Numbers of rows, which writers add: they make copies of a row look different.
_ROW_NUMBER = re.compile(
    r"(unnamed: ?[0-9]+|__index_level_[0-9]+__|index|row|row[_ ]?(id|number|num|nr)|#|)", re.IGNORECASE
)
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


def common_divisor(codes: IntArray) -> tuple[int, int]:
    """How many kinds of rows there are, and the greatest common divisor of how often each occurs."""
    times = np.bincount(codes)
    times = times[times > 0]
    return len(times), int(np.gcd.reduce(times))


def combined(columns: Sequence[IntArray]) -> IntArray:
    """One number a row, equal for rows that are equal in all columns."""
    codes = np.unique(columns[0], return_inverse=True)[1].reshape(-1)
    for column in columns[1:]:
        both = codes * (int(column.max()) + 2) + column + 1
        codes = np.unique(both, return_inverse=True)[1].reshape(-1)
    return codes.astype(np.int64)


def repeated(codes: IntArray, other_columns: bool) -> str | None:
    """In words how rows repeat, or None; see the module's head for the rule."""
    n = len(codes)
    kinds, divisor = common_divisor(codes)
    if kinds >= 2 and divisor >= 2:
        for copies in range(divisor, 1, -1):
            period = n // copies
            if divisor % copies == 0 and bool((codes[period:] == codes[:-period]).all()):
                return f"the same {period:,} rows, {copies:,} times one after another"
        if kinds >= LEAST_KINDS:
            return f"each of the {kinds:,} different rows occurs a multiple of {divisor:,} times"
    if other_columns and n / 2 <= kinds < n:
        return f"{n - kinds:,} of {n:,} rows equal an earlier row in every column"
    return None


def is_row_number(name: str) -> bool:
    """Whether a column of this name only numbers the rows."""
    return _ROW_NUMBER.fullmatch(name) is not None


@dataclass(frozen=True)
class Unused:
    """A column that the test does not read, with what its cells show."""

    name: str
    codes: IntArray | None  # equal cells have equal numbers

    def meaning(self) -> str | None:
        """``group`` or ``weight`` where name and cells look so: a group has several rows, weights differ."""
        words = [word.lower().removesuffix("s") for word in _PARTS.findall(self.name)]
        kinds = None if self.codes is None else len(np.unique(self.codes))
        if set(words) & _WEIGHTS and kinds != 1:
            return "weight"
        alone = self.codes is not None and kinds == len(self.codes)
        if set(words) & _GROUPS and not alone:
            return "group"
        return None


def unused_warning(unused: Sequence[Unused]) -> list[str]:
    """Name the columns that look like a group or a weight."""
    found = {name: [column.name for column in unused if column.meaning() == name] for name in ("group", "weight")}
    warnings: list[str] = []
    if found["group"]:
        warnings.append(
            f"not used: {', '.join(found['group'])}. Rows of one group are not independent images; the promise needs "
            "independent ones, or --group"
        )
    if found["weight"]:
        warnings.append(f"not used: {', '.join(found['weight'])}. Every row counts alike here; --weight uses it")
    return warnings
