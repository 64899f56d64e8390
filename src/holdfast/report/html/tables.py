"""Tables that are complete as they stand, and that the page's script can sort and search."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.report.html.markup import Markup, count, tag


def data_table(
    name: str,
    heads: Sequence[str],
    kinds: Sequence[str | None],
    rows: Sequence[Sequence[tuple[Markup | str, object]]],
    classes: Sequence[str] | None = None,
    *,
    search: str | None = None,
) -> Markup:
    """A table that the script can sort (by ``kinds``) and search; complete and in order without it."""
    head = tag(
        "tr",
        *(
            tag("th", item, scope="col", data_sort=kind, class_="number" if kind == "number" else None)
            for item, kind in zip(heads, kinds, strict=True)
        ),
    )
    body = [
        tag(
            "tr",
            *(
                tag("th" if place == 0 else "td", shown, scope="row" if place == 0 else None,
                    data_value=value, class_="number" if kinds[place] == "number" else None)
                for place, (shown, value) in enumerate(cells)
            ),
            class_=(classes[number] if classes else "") or None,
        )
        for number, cells in enumerate(rows)
    ]  # fmt: skip
    find = (
        tag(
            "p",
            tag("input", type="search", placeholder=search, aria_label=search, data_filter=name, autocomplete="off"),
            tag("output", count(len(rows), "row"), data_count=name),
            class_="find js-only",
        )
        if search
        else None
    )
    tall = " tall" if len(rows) > 30 else ""
    table = tag("table", tag("thead", head), tag("tbody", *body), id=name, class_="data")
    return tag("div", find, tag("div", table, class_=f"scroll{tall}", tabindex="0", role="region", aria_label=name))
