"""A plot area: scales, ticks, axes and what is drawn in it, as inline SVG without a single style attribute.

Colours come from classes, so that light, dark and print are the style sheet's business. Every mark carries its figures
in ``data-tip`` and in a ``<title>``: the first for the script, the second for browsers without one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.report.html.markup import Markup, tag

WIDTH, HEIGHT = 400, 260
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 12, 40


@dataclass(frozen=True)
class Scale:
    """A straight line from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Where a value lies."""
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``."""
    span = high - low
    step = 10 ** math.floor(math.log10(span / wanted))
    step *= next(factor for factor in (1, 2, 2.5, 5, 10) if span / (step * factor) <= wanted)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def bounds(values: Sequence[float], *, zero: bool = True, pad: float = 0.06) -> tuple[float, float]:
    """Least and greatest value with some air; never an empty interval."""
    known = [item for item in values if math.isfinite(item)] or [0.0]
    low, high = min(known), max(known)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    air = (high - low) * pad
    return low - (air if low != 0 or not zero else 0), high + (air if high != 0 or not zero else 0)


def number(value: float) -> str:
    """A tick's label, with a real minus sign."""
    whole = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return whole.replace("-", "−")


@dataclass(frozen=True)
class Plot:
    """Two scales and a title that says what is seen, for those who do not see it."""

    x: Scale
    y: Scale
    label: str
    x_name: str
    y_name: str
    x_ticks: Sequence[float]
    y_ticks: Sequence[float]
    height: int = HEIGHT

    @classmethod
    def of(
        cls,
        x: tuple[float, float],
        y: tuple[float, float],
        *,
        label: str,
        x_name: str,
        y_name: str,
        height: int = HEIGHT,
    ) -> Plot:
        """A plot over two intervals."""
        return cls(
            Scale(*x, LEFT, WIDTH - RIGHT),
            Scale(*y, height - BOTTOM, TOP),
            label,
            x_name,
            y_name,
            ticks(*x),
            ticks(*y),
            height,
        )

    def draw(self, *marks: object, zero_x: bool = False, zero_y: bool = True) -> Markup:
        """The whole figure."""
        parts: list[Markup] = []
        for value in self.y_ticks:
            at = self.y(value)
            parts.append(tag("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at))
            parts.append(tag("text", number(value), class_="tick", x=LEFT - 6, y=at + 3.5, text_anchor="end"))
        for value in self.x_ticks:
            at = self.x(value)
            parts.append(
                tag("text", number(value), class_="tick", x=at, y=self.height - BOTTOM + 15, text_anchor="middle")
            )
        base = self.height - BOTTOM
        if zero_y and self.y.low < 0 < self.y.high:
            parts.append(tag("line", class_="zero", x1=LEFT, x2=WIDTH - RIGHT, y1=self.y(0), y2=self.y(0)))
        if zero_x and self.x.low < 0 < self.x.high:
            parts.append(tag("line", class_="zero", x1=self.x(0), x2=self.x(0), y1=TOP, y2=base))
        parts.append(tag("line", class_="axis", x1=LEFT, x2=WIDTH - RIGHT, y1=base, y2=base))
        middle = (LEFT + WIDTH - RIGHT) / 2
        parts.append(tag("text", self.x_name, class_="name", x=middle, y=self.height - 7, text_anchor="middle"))
        across = (TOP + base) / 2
        parts.append(
            tag(
                "text",
                self.y_name,
                class_="name",
                x=12,
                y=across,
                text_anchor="middle",
                transform=f"rotate(-90 12 {across})",
            )
        )
        return frame(WIDTH, self.height, self.label, *parts, *marks)


def frame(width: int, height: int, label: str, *marks: object) -> Markup:
    """An SVG element that screen readers announce by ``label`` and the keyboard can reach."""
    return tag("svg", *marks, class_="chart", view_box=f"0 0 {width} {height}", role="img", aria_label=label)


def line(xs: Sequence[float], ys: Sequence[float], plot: Plot, class_: str, tip: str = "") -> Markup:
    """A path through points; a gap where a value is not finite."""
    written: list[str] = []
    pen = "M"
    for x, y in zip(xs, ys, strict=True):
        if not math.isfinite(y):
            pen = "M"
            continue
        written.append(f"{pen}{plot.x(x):g} {plot.y(y):g}")
        pen = "L"
    title = tag("title", tip) if tip else None
    return tag("path", title, class_=class_, d="".join(written), data_tip=tip or None)


def band(xs: Sequence[float], lows: Sequence[float], highs: Sequence[float], plot: Plot, class_: str) -> Markup:
    """The area between two lines."""
    forth = [f"{plot.x(x):g} {plot.y(y):g}" for x, y in zip(xs, highs, strict=True)]
    back = [f"{plot.x(x):g} {plot.y(y):g}" for x, y in zip(reversed(xs), reversed(lows), strict=True)]
    return tag("path", class_=class_, d="M" + "L".join([*forth, *back]) + "Z")


def dot(x: float, y: float, class_: str, tip: str, radius: float = 4.0, opacity: float | None = None) -> Markup:
    """A mark at pixels."""
    return tag("circle", tag("title", tip), class_=class_, cx=x, cy=y, r=radius, fill_opacity=opacity, data_tip=tip)


def diamond(x: float, y: float, class_: str, tip: str, size: float = 5.5) -> Markup:
    """A mark of another shape at pixels."""
    path = f"M{x:g} {y - size:g}L{x + size:g} {y:g}L{x:g} {y + size:g}L{x - size:g} {y:g}Z"
    return tag("path", tag("title", tip), class_=class_, d=path, data_tip=tip)
