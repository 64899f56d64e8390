"""Several texts in one row: captions are a dozen tokens long, rows of a text tower are as long as the longest.

A text that attends only to itself has the same features wherever it stands, so short texts share rows. The plan is
made on the CPU, where the lengths are known; the tower needs nothing but its four tensors.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from holdfast.data.round import TextRows


def row_width(context: int) -> int:
    """Places in a row: the longest text, rounded up to what attention kernels like."""
    return -(-context // 16) * 16


def rows_for(tokens: int, width: int) -> int:
    """Rows to set aside for about so many tokens: a tenth more, in eights, so that steps share one shape."""
    return max(1, math.ceil(1.1 * tokens / width / 8)) * 8


def plan_rows(lengths: np.ndarray, columns: int, width: int, at_least: int) -> TextRows:
    """Fill rows with texts, longest first, each into the first row with room (first-fit decreasing).

    ``lengths`` [n] counts a text's tokens, its end included; ``columns`` is L of the tokens. ``at_least`` rows are
    made, in eights if more are needed.
    """
    n = len(lengths)
    row, start = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    free = np.full(max(n, 1), width, dtype=np.int64)
    for text in np.argsort(-lengths, kind="stable"):
        here = int(np.argmax(free >= lengths[text]))
        row[text], start[text] = here, width - free[here]
        free[here] -= lengths[text]
    used = int(row.max()) + 1 if n else 0
    count = at_least if used <= at_least else -(-used // 8) * 8
    # All tokens of all texts at once: which text, and which position in it.
    text = np.repeat(np.arange(n), lengths)
    position = np.arange(len(text)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    place = row[text] * width + start[text] + position
    plan = {name: np.zeros(count * width, dtype=np.int64) for name in ("source", "position")}
    owner = np.full(count * width, -1, dtype=np.int64)
    plan["source"][place], plan["position"][place], owner[place] = text * columns + position, position, text
    shape = (count, width)
    return TextRows(
        torch.from_numpy(plan["source"].reshape(shape)),
        torch.from_numpy(owner.reshape(shape)),
        torch.from_numpy(plan["position"].reshape(shape)),
        torch.from_numpy(row * width + start + lengths - 1),
    )
