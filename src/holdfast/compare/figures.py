"""The paper's figures, drawn from what the jobs of the chosen settings wrote down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from holdfast.compare.choose import Cell
from holdfast.compare.frontier import FrontierCell, Interval
from holdfast.compare.over_rounds import History, classes_of
from holdfast.compare.records import Curve
from holdfast.evaluate.metrics import Comparison
from holdfast.files import write_atomic

# Okabe and Ito's colours, which colour-blind readers can tell apart, and a few more; the shapes say the same once more.
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000"),
    *("#A6761D", "#666633", "#882255", "#332288"),
)
SHAPES = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h")
_LIGHT_TO_DARK = LinearSegmentedColormap.from_list("light to dark", ["#c6dbef", "#08306b"])


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG or SVG, whole or not at all; the same figures give the same bytes."""
    kind = path.suffix.removeprefix(".")
    metadata = {"png": {"Software": None}, "svg": {"Date": None}}.get(kind)

    def write(temporary: Path) -> None:
        figure.savefig(temporary, format=kind, dpi=110, metadata=metadata)

    write_atomic(path, write)
    return path


def _figure(rows: int, columns: int, width: float, height: float) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    for item in axes.flat:
        item.spines[["top", "right"]].set_visible(False)
        item.tick_params(labelsize=8)
    return figure, axes


def _grid(count: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """Panels for ``count`` rows of a study, at most four beside each other."""
    columns = min(4, count)
    figure, axes = _figure(-(-count // columns), columns, width, height)
    flat = list(axes.flat)
    for empty in flat[count:]:
        empty.set_visible(False)
    return figure, flat[:count]


def by_column(
    target: str, rows: Sequence[str], columns: Sequence[str], cells: Mapping[tuple[str, str], Cell], what: str
) -> Figure:
    """Retention ratio and target accuracy by column; the dotted line is the old model's target accuracy."""
    figure, axes = _figure(1, 2, 5, 3.4)
    left, right = axes[0]
    places = np.arange(len(columns))
    shift = np.linspace(-0.3, 0.3, len(rows)) if len(rows) > 1 else np.zeros(1)
    for number, row in enumerate(rows):
        here = [(x, cells[row, column]) for x, column in zip(places, columns, strict=True) if (row, column) in cells]
        if not here:
            continue
        x = np.array([item for item, _ in here]) + shift[number]
        style: dict[str, Any] = {"color": _colour(number), "marker": _shape(number), "ms": 5, "lw": 1, "label": row}
        left.plot(x, [cell.retention_ratio * 100 for _, cell in here], **style)
        accuracy = [cell.target_accuracy for _, cell in here]
        right.errorbar(x, [item.mean for item in accuracy], yerr=[item.std for item in accuracy], capsize=2, **style)
    base = [cell.base_accuracy for cell in cells.values()]
    if base:
        right.axhline(float(np.mean(base)), color="#444444", ls=":", lw=1)
    left.set(ylabel="retention ratio (%)", ylim=(-5, 105))
    right.set(ylabel=f"test accuracy of {target}")
    for axis in (left, right):
        axis.set(xlabel=what)
        axis.set_xticks(places, columns)
    _legend(figure, left)
    return figure


def _legend(figure: Figure, axis: Axes) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(len(labels), 5) or 1, fontsize=8, frameon=False
    )


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _shape(number: int) -> str:
    return SHAPES[number % len(SHAPES)]


MEASURES = (("train_safety", "DevSafety(acc), training"), ("dev_safety", "DevSafety(acc), dev"))
GAINS = (("train_gain", "target gain, training"), ("target_gain", "target gain, dev"))


def curves(rows: Mapping[str, Sequence[Curve]], steps_per_epoch: int | None) -> Figure:
    """DevSafety and target gain against epochs (or steps), on training and dev images: means over seeds."""
    figure, axes = _figure(2, 2, 4.6, 2.8)
    for axis, (name, title) in zip(axes.flat, (*MEASURES, *GAINS), strict=True):
        axis.axhline(0, color="#b00020", lw=0.8)
        for number, (row, seeds) in enumerate(rows.items()):
            steps, mean, spread = _mean(seeds, name)
            x = steps / steps_per_epoch if steps_per_epoch else steps
            axis.plot(x, mean * 100, color=_colour(number), marker=_shape(number), ms=3, lw=1, label=row)
            axis.fill_between(x, (mean - spread) * 100, (mean + spread) * 100, color=_colour(number), alpha=0.12, lw=0)
        axis.set(xlabel="epoch" if steps_per_epoch else "step", ylabel=f"{title} (points)")
        axis.yaxis.label.set_size(8)
    _legend(figure, axes[0, 0])
    return figure


def _mean(seeds: Sequence[Curve], name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps that every seed was evaluated at, mean and standard deviation over the seeds."""
    common = sorted(set.intersection(*({int(step) for step in seed.steps} for seed in seeds)))
    values = np.array([[seed.values[name][list(seed.steps).index(step)] for step in common] for seed in seeds])
    return np.array(common), values.mean(axis=0), values.std(axis=0)


def trajectory(rows: Mapping[str, Sequence[Curve]]) -> Figure:
    """Target gain against DevSafety as the run goes, light to dark: training images above, dev images below."""
    columns = min(4, len(rows))
    blocks = -(-len(rows) // columns)
    figure, axes = _figure(2 * blocks, columns, 2.5, 2.2)
    for axis in axes.flat:
        axis.set_visible(False)
    for number, (row, seeds) in enumerate(rows.items()):
        block, column = divmod(number, columns)
        pair = axes[2 * block : 2 * block + 2, column]
        for axis, (safety, _), (gain, _), where in zip(pair, MEASURES, GAINS, ("training", "dev"), strict=True):
            axis.set_visible(True)
            axis.axvline(0, color="#b00020", lw=0.8)
            axis.axhline(0, color="#999999", lw=0.6)
            for seed in seeds:
                age = _LIGHT_TO_DARK(np.linspace(0, 1, len(seed.steps)))
                axis.scatter(seed.values[safety] * 100, seed.values[gain] * 100, c=age, s=14, edgecolors="none")
            axis.set_title(f"{row}, {where}", fontsize=8)
            axis.set_xlabel("DevSafety(acc)", fontsize=7)
            axis.set_ylabel("target gain", fontsize=7)
    return figure


def per_task(rows: Mapping[str, Sequence[Comparison]]) -> Figure:
    """Change of every task's test accuracy, sorted; the target is a green diamond, the red line is the old model."""
    figure, axes = _grid(len(rows), 3.2, 2.4)
    for axis, (row, compared) in zip(axes, rows.items(), strict=True):
        target = compared[0].target
        names = list(compared[0].tasks)
        change = np.array([np.mean([item.tasks[name].accuracy_change for item in compared]) for name in names]) * 100
        order = np.argsort(change)
        place = np.empty(len(names))
        place[order] = np.arange(len(names))
        is_target = np.array([name == target for name in names])
        small = 4 if len(names) > 100 else 14
        dropped = (change < 0) & ~is_target
        kept = ~dropped & ~is_target
        axis.scatter(place[kept], change[kept], s=small, color="#0072B2")
        axis.scatter(place[dropped], change[dropped], s=small, color="#D55E00", marker="v")
        axis.scatter(place[is_target], change[is_target], s=46, color="#009E73", marker="D", zorder=3)
        axis.axhline(0, color="#b00020", lw=0.8)
        axis.set_title(f"{row}: {int(dropped.sum())} of {len(names) - 1} drop", fontsize=8)
        if len(names) <= 15:
            axis.set_xticks(np.arange(len(names)), [names[item] for item in order], rotation=60, fontsize=7, ha="right")
        else:
            axis.set_xlabel("tasks, from worst to best", fontsize=8)
        axis.set_ylabel("change (points)", fontsize=8)
    return figure


def over_rounds(history: History) -> Figure:
    """Accuracy of every class before the first round and after each; a round's target is a diamond there."""
    figure, axes = _grid(len(history), 4.6, 3.2)
    for axis, ((row, column), stages) in zip(axes, history.items(), strict=True):
        places = np.arange(len(stages))
        names = classes_of(stages)
        many = len(names) > 12
        for number, name in enumerate(names):
            y = [stage.accuracy.get(name, np.nan) for stage in stages]
            label = None if many else name
            axis.plot(places, y, color=_colour(number), marker="o", ms=3, lw=0.5 if many else 1.2, label=label)
            improved = [place for place in places if stages[place].name == name]
            if improved:
                axis.scatter(
                    improved, [y[place] for place in improved], s=46, color=_colour(number), marker="D", zorder=3
                )
        axis.set_xticks(places, [stage.name for stage in stages])
        axis.set(ylabel="test accuracy")
        axis.set_title(f"{row}, {column}", fontsize=9)
        if not many:
            axis.legend(fontsize=7, frameon=False)
    return figure


def frontier(cells: Sequence[FrontierCell]) -> Figure:
    """Gain against the worst class's change, both on test images: one panel a column and kind, one line a row.

    A line leads through the tolerances; up and to the right is better. Bars are the intervals over seeds.
    """
    panels = list(dict.fromkeys((cell.kind, cell.column) for cell in cells))
    rows = list(dict.fromkeys(cell.row for cell in cells))
    figure, axes = _grid(len(panels), 4.6, 3.6)
    for axis, (kind, column) in zip(axes, panels, strict=True):
        here = [cell for cell in cells if (cell.kind, cell.column) == (kind, column)]
        for number, row in enumerate(rows):
            line = sorted((cell for cell in here if cell.row == row), key=lambda cell: cell.tolerance)
            across, up = [cell.worst for cell in line], [cell.gain for cell in line]
            axis.errorbar(
                [100 * item.mean for item in across],
                [100 * item.mean for item in up],
                xerr=_bars(across),
                yerr=_bars(up),
                color=_colour(number),
                marker=SHAPES[number % len(SHAPES)],
                ms=4,
                lw=1,
                elinewidth=0.5,
                label=row,
            )
        axis.axvline(0, color="#b00020", lw=0.8)
        axis.set(xlabel="worst protected class (points)", ylabel="gain of the target (points)")
        axis.set_title(f"{column}, {kind}", fontsize=9)
    if axes:
        axes[0].legend(fontsize=7, frameon=False)
    return figure


def _bars(intervals: Sequence[Interval]) -> list[list[float]]:
    """Distances below and above the means, in points."""
    below = [100 * max(0.0, item.mean - item.low) for item in intervals]
    return [below, [100 * max(0.0, item.high - item.mean) for item in intervals]]


def weights(rows: Mapping[str, Sequence[tuple[int, Mapping[str, float | None]]]], bins: int = 40) -> Figure:
    """Effective weight beta [u_k]_+ of every task over time, averaged over stretches of steps."""
    figure, axes = _grid(len(rows), 5, 3.2)
    for axis, (row, logged) in zip(axes, rows.items(), strict=True):
        steps, names, values = _logged(logged)
        pieces = np.array_split(np.arange(len(steps)), min(bins, len(steps)))
        x = [steps[piece].mean() for piece in pieces]
        many = len(names) > 10
        for number, name in enumerate(names):
            y = [values[piece, number].mean() for piece in pieces]
            axis.plot(x, y, lw=0.5 if many else 1.2, alpha=0.4 if many else 1, color=_colour(number), label=name)
        axis.set(xlabel="step", ylabel="effective weight")
        axis.set_title(row, fontsize=9)
        if not many:
            axis.legend(fontsize=7, frameon=False)
    return figure


def _logged(
    logged: Iterable[tuple[int, Mapping[str, float | None]]],
) -> tuple[np.ndarray, list[str], np.ndarray]:
    """Steps [t], tasks, and their values [t, m]; a task that was not sampled weighs nothing in that step."""
    records = list(logged)
    names = list(records[0][1])
    values = np.array([[record.get(name) or 0.0 for name in names] for _, record in records])
    return np.array([step for step, _ in records]), names, values
