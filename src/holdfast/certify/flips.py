"""Flip rates in the report on two models' predictions: the field's own figures beside the test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.certify.exact.region import IntArray
from holdfast.certify.tables import Paired
from holdfast.evaluate.flips import FlipRates


def flip_report(paired: Paired, pools: Mapping[str, Sequence[str]]) -> dict[str, Any] | None:
    """``flips`` of a report: over all rows of the table, and by task and pool; None for scores, which do not flip.

    Every row counts once, whatever its weight and group.
    """
    if paired.measured is not None and paired.measured.scored:
        return None
    tasks = {name: paired.rows(name) for name in paired.tasks()}
    tasks |= {name: paired.rows_of_pool(name, members) for name, members in pools.items()}
    everything = _rates(paired, slice(None))
    return {**_described(everything), "tasks": {name: _described(_rates(paired, rows)) for name, rows in tasks.items()}}


def _rates(paired: Paired, rows: IntArray | slice) -> FlipRates:
    old, new = paired.correct_old[rows], paired.correct_new[rows]
    return FlipRates(len(old), int(old.sum()), int((~old & new).sum()), int((old & ~new).sum()))


def _described(rates: FlipRates) -> dict[str, Any]:
    return {"examples": rates.examples, **rates.as_json()}
