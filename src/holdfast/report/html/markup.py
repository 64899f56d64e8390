"""HTML and SVG put together from elements. Text is escaped where it enters, so nothing can forget to."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable

VOID = frozenset({"br", "hr", "img", "input", "meta", "link"})


class Markup(str):
    """Text that is HTML already; every other string is escaped when it becomes part of an element."""

    __slots__ = ()


Child = "Markup | str | int | float | None | Iterable[Child]"


def visible(text: str) -> str:
    """Names as a person can see them: control characters and marks that turn the direction of writing become signs."""
    return "".join(f"‹{ord(item):04X}›" if unicodedata.category(item) in ("Cc", "Cf", "Cs") else item for item in text)


def text(value: object) -> Markup:
    """Any value as escaped text."""
    return Markup(html.escape(visible(str(value)), quote=True))


def join(children: Iterable[object]) -> Markup:
    """Children one after another; those that are no markup are escaped."""
    parts: list[str] = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Markup):
            parts.append(child)
        elif isinstance(child, list | tuple):
            parts.append(join(child))  # pyright: ignore[reportUnknownArgumentType]
        else:
            parts.append(text(child))
    return Markup("".join(parts))


def lines(texts: Iterable[str]) -> Markup:
    """Lines one below the other, for text that keeps its line breaks; a break inside one of them becomes a sign."""
    return Markup("\n".join(text(item) for item in texts))


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """One element. ``class_`` is class, ``data_task`` is data-task; None and False leave an attribute out."""
    written = "".join(
        f" {_attribute(key)}" if value is True else f' {_attribute(key)}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def _attribute(name: str) -> str:
    return _SPELLED.get(name) or name.rstrip("_").replace("_", "-")


# SVG attributes with a capital letter in their middle.
_SPELLED = {"view_box": "viewBox", "preserve_aspect_ratio": "preserveAspectRatio", "text_length": "textLength"}


def points(value: float, digits: int = 1) -> str:
    """A signed change in points, with a real minus sign: −1.3."""
    rounded = round(value * 100, digits)
    if rounded == 0:
        return f"{0:.{digits}f}"
    return f"{rounded:+.{digits}f}".replace("-", "−")


def percent(value: float | None, digits: int = 1) -> str:
    """An accuracy: 94.7 %."""
    return "–" if value is None else f"{value * 100:.{digits}f} %"


def p_text(value: float | None, level: float | None = None) -> str:
    """A p-value; one that is above ``level`` never reads as if it were not."""
    if value is None:
        return "–"
    if level is not None and round(value, 3) <= level < value:
        return f">{level:.3g}"
    return "<0.0001" if value < 1e-4 else f"{value:.4f}" if value < 0.01 else f"{value:.3f}"


def change_mark(value: float | None, digits: int = 1) -> Markup:
    """A change of accuracy; a drop is unmistakable, by colour, by weight and by a sign."""
    if value is None:
        return tag("span", "–", class_="same")
    kind = "drop" if value < 0 else "gain" if value > 0 else "same"
    sign = "▼ " if value < 0 else ""
    return tag("span", f"{sign}{points(value, digits)}", class_=f"change {kind}")


def count(number: int, part: str, many: str | None = None) -> str:
    """``1 image``, ``1,797 images``."""
    return f"{number:,} {part if number == 1 else many or part + 's'}"
