"""Images that flipped: lost ones first, with both predictions and scores. Only dev images and those of retired sets."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from holdfast.report.content import Paired, RunContent
from holdfast.report.html.markup import Markup, count, percent, tag
from holdfast.report.pictures import Pictures, Place

MOST = 90  # pictures of each kind that are put on the page; the tables count all of them
NAMES = {"sealed": "sealed, retired", "dev": "dev"}


def gallery(content: RunContent) -> Markup:
    """Lost and gained images."""
    if not content.pairs:
        return Markup("")
    pictures = Pictures(content.folder.roles, content.folder.origin)
    parts: list[Markup] = []
    for kind, title, empty in (
        ("lost", "Lost: right before, wrong now", "No image was lost."),
        ("gained", "Gained: wrong before, right now", "No image was gained."),
    ):
        chosen, total = _choose(content.pairs, kind, [row.task for row in content.evidence.rows])
        parts.append(tag("h3", title, " ", tag("small", count(total, "image"))))
        if not chosen:
            parts.append(tag("p", empty, class_="note"))
            continue
        if total > len(chosen):
            parts.append(
                tag(
                    "p",
                    f"{len(chosen)} of them are shown: of the worst classes first, from each in turn.",
                    class_="note",
                )
            )
        parts.append(_cards(chosen, kind, pictures))
    find = tag(
        "p",
        tag("input", type="search", placeholder="Find a class or file", aria_label="Find a class or file",
            data_filter="gallery", autocomplete="off"),
        tag("output", "", data_count="gallery"),
        class_="find js-only",
    )  # fmt: skip
    shown = {pair.role for pair in content.pairs}
    note = "Dev images, and sealed ones only because their set is retired." if "sealed" in shown else "Dev images."
    return tag("div", tag("p", note, class_="note"), find, *parts, id="gallery")


def _choose(pairs: list[Paired], kind: str, order: list[str]) -> tuple[list[tuple[Paired, int]], int]:
    """At most MOST images, of the worst classes first and from each in turn, so that none hides another."""
    by_class: dict[str, list[tuple[float, Paired, int]]] = defaultdict(list)
    total = 0
    for pair in pairs:
        rows: np.ndarray = getattr(pair, kind)
        total += len(rows)
        for row in rows:
            by_class[str(pair.label[row])].append((float(pair.new_score[row]), pair, int(row)))
    place = {task: number for number, task in enumerate(order)}
    ranked = sorted(by_class, key=lambda name: (place.get(name, len(place)), name))
    queues = [sorted(by_class[name], key=lambda item: -item[0]) for name in ranked]
    chosen: list[tuple[Paired, int]] = []
    for turn in range(max((len(queue) for queue in queues), default=0)):
        chosen += [queue[turn][1:] for queue in queues if turn < len(queue)]
    chosen = chosen[:MOST]
    rank = {name: number for number, name in enumerate(ranked)}
    return sorted(
        chosen, key=lambda item: (rank[str(item[0].label[item[1]])], -float(item[0].new_score[item[1]]))
    ), total


def _cards(chosen: list[tuple[Paired, int]], kind: str, pictures: Pictures) -> Markup:
    places = pictures.places(str(pair.ids[row]) for pair, row in chosen)
    cards = [_card(pair, row, kind, pictures, places.get(str(pair.ids[row]))) for pair, row in chosen]
    return tag("ul", *cards, class_="gallery")


def _card(pair: Paired, row: int, kind: str, pictures: Pictures, place: Place | None) -> Markup:
    identity, label = str(pair.ids[row]), str(pair.label[row])
    found = pictures.thumbnail(identity, place) if place is not None else None
    name = place.locator if place is not None else identity[:12]
    if found is None:
        picture = tag("div", "the source of this picture is gone, or the file changed", class_="gone")
    else:
        tiny = "tiny" if found.tiny else None
        picture = tag("img", src=found.address, alt=f"{label}: {name}", class_=tiny, loading="lazy", decoding="async")
    file = name.replace("\\", "/").rpartition("/")[2]
    file = file if len(file) <= 28 else f"{file[:13]}…{file[-13:]}"
    return tag(
        "li",
        picture,
        tag("b", label),
        _prediction("old", str(pair.old[row]), float(pair.old_score[row]), kind == "lost"),
        _prediction("new", str(pair.new[row]), float(pair.new_score[row]), kind == "gained"),
        tag("small", f"{file} · {NAMES[pair.role]}", title=name),
        data_find=f"{label} {pair.old[row]} {pair.new[row]} {name}",
        class_=kind,
    )


def _prediction(which: str, prediction: str, score: float, right: bool) -> Markup:
    mark = "✓" if right else "✗"
    return tag(
        "span",
        tag("i", which),
        tag("em", f"{mark} {prediction}", class_="right" if right else "wrong"),
        tag("small", percent(score, 0)),
        class_="prediction",
    )
