"""What an image tower says of pictures, kept on a GPU for as long as somebody holds it.

A round asks the same towers about the same pictures again and again: the old model for what it predicts, for a refit
of the target, for a fit of all logits, and for the candidates of both, each fold by itself. On a GPU a file would be
slower than a pass, and so would be the hash of pixels by which files are known. Here a picture is known by its row and
its view, and a tower by weights that are equal.

Passes are all of one size, so that what is said of a picture does not depend on which others were asked for with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor

from holdfast.data.round import LabelledSet, PairSet, Pixels, View
from holdfast.data.transforms import normalize_views
from holdfast.model.same_weights import HeldWeights
from holdfast.model.towers import Preprocess

LIMIT = 1 << 30  # bytes of features
_TOGETHER = 16  # passes' worth of pictures that are looked up at once


@dataclass(eq=False)  # a table is itself
class _Table:
    """Features of one tower over one store of pixels, a row each."""

    what: str  # all that they depend on beside weights and pictures
    weights: HeldWeights
    pixels: ReferenceType[Pixels]
    places: dict[bytes, int] = field(default_factory=dict[bytes, int])
    values: Tensor | None = None  # with room for more rows

    @property
    def size(self) -> int:
        return 0 if self.values is None else self.values.nbytes

    def take(self, keys: Sequence[bytes], device: torch.device) -> Tensor:
        assert self.values is not None
        return self.values[torch.tensor([self.places[key] for key in keys], device=device)]

    def add(self, keys: Sequence[bytes], found: Tensor) -> None:
        known = len(self.places)
        if self.values is None or known + len(keys) > len(self.values):
            room = found.new_empty(max(2 * known, known + len(keys)), *found.shape[1:])
            if self.values is not None:
                room[:known] = self.values[:known]
            self.values = room
        self.values[known : known + len(keys)] = found
        self.places.update(zip(keys, range(known, known + len(keys)), strict=True))


class DeviceFeatures:
    """Tables of features; those that were used longest ago go where there are too many."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._tables: list[_Table] = []  # used last comes last

    def encoded(
        self,
        run: Callable[[Tensor], Tensor],
        what: str,
        weights: Sequence[Tensor],
        preprocess: Preprocess,
        examples: LabelledSet | PairSet,
        like: Tensor,
        *,
        positions: np.ndarray | None,
        batch: int,
        view: View | None,
    ) -> Iterator[tuple[slice, Tensor]]:
        """``run`` of every picture's view, batch by batch, in passes of ``batch`` pictures; ``what`` names its kind."""
        table = self._table(f"{what} {batch}", weights, examples.pixels)
        rows = examples.rows if positions is None else examples.rows[positions]
        keys = _keys(rows, view)

        def compute(places: Sequence[int]) -> Tensor:
            """Of the pictures at these places, the last repeated until the pass is full."""
            full = np.array([*places, *[places[-1]] * (batch - len(places))])
            pixels = examples.pixels.read(rows[full[: len(places)]]).to(like.device, non_blocking=True)
            pixels = torch.cat([pixels, pixels[-1:].expand(batch - len(pixels), *pixels.shape[1:])])
            seen = None if view is None else view[torch.from_numpy(full)]
            return run(normalize_views(pixels, preprocess.mean, preprocess.std, seen, like.dtype))[: len(places)]

        for start in range(0, len(keys), batch * _TOGETHER):
            here = keys[start : start + batch * _TOGETHER]
            new = {key: start + place for place, key in enumerate(here) if key not in table.places}  # each once
            missing = list(new.items())
            for first in range(0, len(missing), batch):
                part = missing[first : first + batch]
                table.add([key for key, _ in part], compute([place for _, place in part]))
            found = table.take(here, like.device)
            self._make_room(table)
            for first in range(0, len(here), batch):
                until = min(first + batch, len(here))
                yield slice(start + first, start + until), found[first:until]

    def _table(self, what: str, weights: Sequence[Tensor], pixels: Pixels) -> _Table:
        self._tables = [table for table in self._tables if table.pixels() is not None and table.weights.unchanged]
        held = HeldWeights.of(weights)
        found = None
        for table in self._tables:
            if table.what == what and table.pixels() is pixels and table.weights.equal(weights):
                found = table
        if found is None:
            if held is None:  # nobody would see these weights change: kept until the caller has what it asked for
                return _Table(what, HeldWeights((), ()), ref(pixels))
            found = _Table(what, held, ref(pixels))
        self._tables = [*(table for table in self._tables if table is not found), found]
        return found

    def _make_room(self, used: _Table) -> None:
        total = sum(table.size for table in self._tables)
        while total > self._limit and self._tables:
            gone = self._tables.pop(0)
            total -= gone.size
        if used not in self._tables:  # it alone is too large: its rows are computed anew when they are asked for
            used.places.clear()
            used.values = None


def _keys(rows: np.ndarray, view: View | None) -> list[bytes]:
    """What a picture and its view are known by."""
    parts = [np.ascontiguousarray(rows, dtype=np.int64).view(np.uint8).reshape(len(rows), -1)]
    if view is not None:
        for part in (view.box, view.flip, view.angle):
            if part is not None:
                parts.append(part.detach().cpu().contiguous().numpy().view(np.uint8).reshape(len(rows), -1))
    return [row.tobytes() for row in np.concatenate(parts, axis=1)]
