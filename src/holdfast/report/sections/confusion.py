"""Which classes are mistaken for which, by the old model and by the new one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from holdfast.report.content import Paired, RunContent
from holdfast.report.html.markup import Markup, tag
from holdfast.report.html.tables import data_table
from holdfast.report.sections import figures


def confusion_section(content: RunContent) -> Markup:
    """What is mixed up: as matrices where classes are few, and as a list of what changed."""
    if not content.pairs:
        return Markup("")
    pair = content.pairs[0]
    classes = [*content.protected, content.target]
    named = "the retired sealed images" if pair.role == "sealed" else "dev images"
    note = tag("p", f"Old against new, on {named}. Rows: what it is; columns: what it was taken for.", class_="note")
    matrices = None
    if len(classes) <= figures.MATRIX:
        matrices = tag(
            "div",
            *(
                tag("figure", tag("figcaption", f"{which} model"), figures.confusion(pair, which, classes))
                for which in ("old", "new")
            ),
            class_="charts",
        )
    return tag("div", note, matrices, _mixed_up(pair, classes))


def _mixed_up(pair: Paired, classes: Sequence[str], most: int = 10) -> Markup:
    """Pairs of classes whose confusion changed most, the new mistakes first."""
    old = figures.confusion_counts(pair.label, pair.old, classes).astype(np.int64)
    new = figures.confusion_counts(pair.label, pair.new, classes).astype(np.int64)
    difference = new - old
    np.fill_diagonal(difference, 0)
    places = np.argwhere(difference != 0)
    places = sorted(places.tolist(), key=lambda item: (-difference[item[0], item[1]], item))
    worse = [place for place in places if difference[place[0], place[1]] > 0][:most]
    better = [place for place in reversed(places) if difference[place[0], place[1]] < 0][:most]
    rows: list[list[tuple[Markup | str, object]]] = []
    for row, column in (*worse, *better):
        more = int(difference[row, column])
        mark = tag("span", f"{'▼ ' if more > 0 else ''}{more:+d}".replace("-", "−"),
                   class_=f"change {'drop' if more > 0 else 'gain'}")  # fmt: skip
        rows.append(
            [
                (classes[row], classes[row]),
                (classes[column], classes[column]),
                (str(old[row, column]), int(old[row, column])),
                (str(new[row, column]), int(new[row, column])),
                (mark, more),
            ]
        )
    if not rows:
        return tag("p", "No confusion changed.", class_="note")
    heads = ["class", "taken for", "old", "new", "change"]
    return data_table("mixed", heads, ["text", "text", "number", "number", "number"], rows, search="Find a class")
