"""The figures of a run: change of every task, confusion, trajectory, constraints over time, what a margin buys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from holdfast.report.content import Paired, RunContent, Series
from holdfast.report.evidence import Evidence, TaskRow
from holdfast.report.html.axes import HEIGHT, WIDTH, Plot, band, bounds, diamond, dot, frame, line
from holdfast.report.html.markup import Markup, count, percent, points, tag

MANY = 10  # more tasks than this, and only the most telling ones have a line of their own
MANY_NAMES = 40  # more grey lines than this, and their names are folded away
MATRIX = 14  # up to this many classes the confusion is a matrix; above, a list of what is mixed up
FOREST_WIDTH, FOREST_HEIGHT = 150, 20


def forest_scale(rows: Sequence[TaskRow]) -> tuple[float, float]:
    """One interval for the bars of all rows. A bound far below everything seen does not squeeze what was seen."""
    low = min(min(row.difference, -row.margin) for row in rows)
    high = max(0.0, *(row.difference for row in rows))
    reach = max(high, -low, 0.01)
    return max(min(row.bound for row in rows), low - 1.2 * reach) - 0.02 * reach, high + 0.12 * reach


def forest_cell(row: TaskRow, scale: tuple[float, float]) -> Markup:
    """The change as a dot, its lower bound as a whisker, the margin as a dashed line, no change as a solid one."""
    low, high = scale

    def at(value: float) -> float:
        return round(4 + (FOREST_WIDTH - 8) * (min(max(value, low), high) - low) / (high - low), 1)

    middle = FOREST_HEIGHT / 2
    kind = "drop" if row.difference < 0 else "gain" if row.difference > 0 else "same"
    tip = f"{row.task}: {points(row.difference)} points, at least {points(row.bound)}; margin {row.margin * 100:g}"
    arrow = row.bound < low
    parts = [
        tag("line", class_="zero", x1=at(0), x2=at(0), y1=1, y2=FOREST_HEIGHT - 1),
        tag("line", class_="margin", x1=at(-row.margin), x2=at(-row.margin), y1=1, y2=FOREST_HEIGHT - 1)
        if row.margin and -row.margin >= low
        else None,
        tag("line", class_=f"whisker {kind}", x1=at(row.bound), x2=at(row.difference), y1=middle, y2=middle),
        tag("path", class_=f"end {kind}", d=f"M7 {middle - 4}L1 {middle}L7 {middle + 4}")
        if arrow
        else tag("line", class_=f"whisker {kind}", x1=at(row.bound), x2=at(row.bound), y1=middle - 4, y2=middle + 4),
        tag("circle", class_=f"mark {kind}", cx=at(row.difference), cy=middle, r=4),
    ]
    return tag(
        "svg",
        tag("title", tip),
        *parts,
        class_="forest",
        view_box=f"0 0 {FOREST_WIDTH} {FOREST_HEIGHT}",
        width=FOREST_WIDTH,
        height=FOREST_HEIGHT,
        role="img",
        aria_label=tip,
    )


def overview(evidence: Evidence) -> Markup:
    """Every task's change, from worst to best: for many tasks one picture instead of many rows."""
    rows = sorted(evidence.rows, key=lambda item: item.difference)
    values = [row.difference * 100 for row in rows]
    lows = [row.bound * 100 for row in rows]
    plot = Plot.of(
        (-0.5, len(rows) - 0.5 if len(rows) > 1 else 1.0),
        bounds([*values, *lows]),
        label=f"change of accuracy of {len(rows)} tasks, from worst to best",
        x_name="tasks, from worst to best",
        y_name="change (points)",
    )
    marks: list[Markup] = [band(range(len(rows)), lows, values, plot, "bound-band")] if len(rows) > 1 else []
    small = 2.2 if len(rows) > 100 else 3.2
    for place, row in enumerate(rows):
        tip = f"{row.task}: {points(row.difference)} points ({row.lost} lost, {row.gained} gained of {row.n})"
        x, y = plot.x(place), plot.y(row.difference * 100)
        if row.is_target:
            marks.append(diamond(x, y, "mark target", f"target {tip}", 6))
        else:
            kind = ("drop" if row.difference < 0 else "keep") + (" fine" if len(rows) > 100 else "")
            marks.append(dot(x, y, f"mark {kind}", tip, small))
    return plot.draw(*marks)


def trajectory(content: RunContent) -> Markup:
    """Target gain against the worst protected change as training goes, light to dark; the old model is the cross."""
    checkpoints = content.checkpoints if content.trained else []
    walk = [
        (candidate.dev.dev_safety * 100, candidate.dev.target_gain * 100, candidate) for candidate in content.candidates
    ]
    xs = [0.0, *(safety * 100 for _, safety, _ in checkpoints), *(x for x, _, _ in walk)]
    ys = [0.0, *(gain * 100 for _, _, gain in checkpoints), *(y for _, y, _ in walk)]
    plot = Plot.of(
        bounds(xs, pad=0.1),
        bounds(ys, pad=0.1),
        label="target gain against the worst change of a protected task, as training goes on",
        x_name="worst protected task (points)",
        y_name=f"gain of {_short(content.target)} (points)",
        height=HEIGHT + 30,
    )
    track = [(0.0, 0.0), *((safety * 100, gain * 100) for _, safety, gain in checkpoints)]
    marks: list[Markup] = [line([x for x, _ in track], [y for _, y in track], plot, "track")]
    old_x, old_y = plot.x(0), plot.y(0)
    cross = f"M{old_x - 5} {old_y}H{old_x + 5}M{old_x} {old_y - 5}V{old_y + 5}"
    marks.append(tag("path", tag("title", "old model"), class_="old", d=cross, data_tip="old model"))
    for number, (step, safety, gain) in enumerate(checkpoints):
        shade = 0.2 + 0.8 * (number + 1) / len(checkpoints)
        tip = f"step {step:,}: worst {points(safety)}, target {points(gain)}"
        marks.append(dot(plot.x(safety * 100), plot.y(gain * 100), "checkpoint", tip, 4.5, round(shade, 2)))
    for x, y, candidate in walk:
        worst, gain = points(candidate.dev.dev_safety), points(candidate.dev.target_gain)
        tip = f"candidate {candidate.name}: worst {worst}, target {gain}"
        shipped = " shipped" if candidate.outcome == "shipped" else ""
        marks.append(diamond(plot.x(x), plot.y(y), f"candidate{shipped}", f"{tip} ({candidate.outcome})"))
    return plot.draw(*marks, zero_x=True)


def telling_tasks(series: Mapping[str, Series], most: int = 8) -> list[str]:
    """Tasks with a line of their own: all where they are few, else those that weighed most (or rose most)."""
    first = series.get("weight") or next(iter(series.values()))
    if len(first.tasks) <= MANY:
        return first.tasks
    largest = np.nanmax(np.where(np.isfinite(first.values), first.values, -np.inf), axis=0)
    return [first.tasks[place] for place in np.argsort(-largest, kind="stable")[:most]]


def over_time(series: Series, telling: Sequence[str], y_name: str, label: str) -> Markup:
    """Lines of the telling tasks; the others as one grey band from least to greatest."""
    place = {task: number for number, task in enumerate(series.tasks)}
    finite = series.values[np.isfinite(series.values)]
    low, high = bounds([float(finite.min()), float(finite.max())] if finite.size else [0.0])
    steps = [float(step) for step in series.steps]
    ends = (0.0, steps[-1]) if steps[-1] > 0 else (0.0, 1.0)
    plot = Plot.of(ends, (low, high), label=label, x_name="step", y_name=y_name, height=210)
    marks: list[Markup] = []
    rest = [place[task] for task in series.tasks if task not in telling]
    if rest and len(steps) > 1:
        others = np.where(np.isfinite(series.values[:, rest]), series.values[:, rest], 0.0)
        lows, highs = [float(item) for item in others.min(axis=1)], [float(item) for item in others.max(axis=1)]
        marks.append(band(steps, lows, highs, plot, "rest-band"))
    for number, task in enumerate(telling):
        values = [float(item) for item in series.values[:, place[task]]]
        tip = f"{task}: {values[-1]:.3g} at step {steps[-1]:,.0f}"
        if len(steps) == 1:
            marks.append(dot(plot.x(steps[0]), plot.y(values[0]), f"series s{number % 10}", tip, 3))
        else:
            marks.append(
                tag("g", line(steps, values, plot, f"series s{number % 10}", tip), class_="trace", data_series=task)
            )
    return plot.draw(*marks)


def confusion(pair: Paired, which: str, classes: Sequence[str]) -> Markup:
    """Label against prediction of one model; the diagonal is right."""
    table = confusion_counts(pair.label, getattr(pair, which), classes)
    size = len(classes)
    cell, left, top = 24, 76, 8
    side = cell * size
    share = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    parts: list[Markup] = []
    for row in range(size):
        for column in range(size):
            number = int(table[row, column])
            if not number and (row != column or not table[row].any()):
                continue
            tip = f"{classes[row]} taken for {classes[column]}: {number}"
            kind = "right" if row == column else "wrong"
            x, y = left + column * cell, top + row * cell
            opacity = round(0.08 + 0.92 * float(share[row, column]), 2) if number else 0
            parts.append(
                tag(
                    "rect",
                    tag("title", tip),
                    class_=f"cell {kind}",
                    x=x + 1,
                    y=y + 1,
                    width=cell - 2,
                    height=cell - 2,
                    rx=2,
                    fill_opacity=opacity,
                    data_tip=tip,
                )
            )
            strong = " strong" if opacity > 0.6 else ""
            parts.append(
                tag("text", number, class_=f"count{strong}", x=x + cell / 2, y=y + cell / 2 + 3.5, text_anchor="middle")
            )
    for place, name in enumerate(classes):
        at = left + place * cell + cell / 2
        short = _short(name, 12)
        parts.append(tag("text", short, class_="tick", x=left - 6, y=top + place * cell + 16, text_anchor="end"))
        under = top + side + 12
        parts.append(
            tag("text", short, class_="tick", x=at, y=under, text_anchor="end", transform=f"rotate(-55 {at} {under})")
        )
    return frame(left + side + 8, top + side + 66, f"confusion of the {which} model", *parts)


def confusion_counts(label: np.ndarray, predicted: np.ndarray, classes: Sequence[str]) -> np.ndarray:
    """[K, K] counts: rows are labels."""
    index = {name: number for number, name in enumerate(classes)}
    size = len(classes)
    rows = np.array([index.get(str(item), size) for item in label])
    columns = np.array([index.get(str(item), size) for item in predicted])
    table = np.bincount(rows * (size + 1) + columns, minlength=(size + 1) ** 2).reshape(size + 1, size + 1)
    return table[:size, :size]


def gain_steps(steps: Sequence[Mapping[str, float]], target: str) -> Markup:
    """The largest target gain seen within each accepted loss."""
    margins = [float(step["margin"]) * 100 for step in steps]
    gains = [float(step["target_gain"]) * 100 for step in steps]
    plot = Plot.of(
        (0.0, max(margins) * 1.04 or 1.0),
        bounds(gains, pad=0.12),
        label="target gain that each accepted loss would buy, on dev images",
        x_name="accepted loss on every protected task (points)",
        y_name=f"gain of {_short(target)} (points)",
        height=220,
    )
    xs, ys = [margins[0]], [gains[0]]
    for margin, gain in zip(margins[1:], gains[1:], strict=True):
        xs += [margin, margin]
        ys += [ys[-1], gain]
    marks = [line(xs, ys, plot, "step")]
    for margin, gain in zip(margins, gains, strict=True):
        tip = f"a loss of {margin:g} points would buy {points(gain / 100)} points of {target}"
        marks.append(dot(plot.x(margin), plot.y(gain), "checkpoint", tip, 3.6))
    return plot.draw(*marks)


def over_rounds(names: Sequence[str], values: Mapping[str, Sequence[float | None]], telling: Sequence[str]) -> Markup:
    """Accuracy of every class over rounds."""
    known = [sery * 100 for series in values.values() for sery in series if sery is not None]
    low, high = bounds(known, zero=False)
    plot = Plot.of(
        (-0.15, max(len(names) - 1, 1) + 0.15),
        (low, min(high, 101.0)),
        label="accuracy of every class over rounds",
        x_name="",
        y_name="accuracy (%)",
        height=HEIGHT + 40,
    )
    plot = Plot(plot.x, plot.y, plot.label, "", plot.y_name, [], plot.y_ticks, plot.height)
    marks: list[Markup] = []
    for place, name in enumerate(names):
        anchor = "start" if place == 0 else "end" if place == len(names) - 1 else "middle"
        marks.append(
            tag("text", _short(name, 14), class_="tick", x=plot.x(place), y=plot.height - 22, text_anchor=anchor)
        )
    ordered = [*(task for task in values if task not in telling), *telling]
    for task in ordered:
        series = [float("nan") if item is None else item * 100 for item in values[task]]
        kind = f"series s{list(telling).index(task) % 10}" if task in telling else "series rest"
        group = [line(list(range(len(series))), series, plot, kind, task)]
        for place, value in enumerate(values[task]):
            if value is not None and task in telling:
                tip = f"{task}, {names[place]}: {percent(value)}"
                group.append(dot(plot.x(place), plot.y(value * 100), kind + " dot", tip, 3))
        marks.append(tag("g", *group, class_="trace", data_series=task))
    return plot.draw(*marks)


def legend(names: Sequence[str], rest: int = 0, others: Sequence[str] = ()) -> Markup:
    """Names beside their colour; the script lets one stand out.

    ``rest`` counts tasks without a line of their own; ``others`` have a grey line each, and their names.
    """
    items = [
        tag("li", tag("i", class_=f"key s{number % 10}"), tag("span", name), data_series=name)
        for number, name in enumerate(names)
    ]
    if rest:
        items.append(tag("li", tag("i", class_="key rest"), tag("span", f"the other {count(rest, 'task')}")))
    grey = [tag("li", tag("i", class_="key rest"), tag("span", name), data_series=name) for name in others]
    if len(grey) > MANY_NAMES:
        summary = tag("summary", f"the other {count(len(grey), 'class', 'classes')}, in grey")
        grey = [tag("li", tag("details", summary, tag("ul", *grey, class_="legend")))]
    return tag("ul", *items, *grey, class_="legend")


def _short(name: str, most: int = 24) -> str:
    return name if len(name) <= most else name[: most - 1] + "…"


__all__ = [
    "WIDTH",
    "confusion",
    "confusion_counts",
    "forest_cell",
    "forest_scale",
    "gain_steps",
    "legend",
    "over_rounds",
    "over_time",
    "overview",
    "telling_tasks",
    "trajectory",
]
