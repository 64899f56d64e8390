"""The sections of a page about a run, from the verdict down to the fingerprints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from holdfast.candidates.select import Candidate as Tested
from holdfast.candidates.select import evidence as largest_p
from holdfast.report import figures
from holdfast.report.content import Paired, RunContent
from holdfast.report.evidence import TaskRow
from holdfast.report.gallery import gallery
from holdfast.report.markup import Markup, change_mark, count, p_text, percent, points, tag
from holdfast.report.words import PROMISE_TEXT, VerdictText, blocked_text, verdict_text

MATRIX = 14  # up to this many classes the confusion is a matrix; above, a list of what is mixed up


@dataclass(frozen=True)
class Section:
    """A heading with its content; ``name`` is where links go, ``short`` what they say."""

    name: str
    short: str
    title: str
    body: Markup


def run_sections(content: RunContent) -> list[Section]:
    """All sections of a run, those without anything to say left out."""
    made = [
        Section("tasks", "Classes", "Every class, worst first", tasks_section(content)),
        Section("images", "Images", "Images that changed", gallery(content)),
        Section("confusion", "Confusion", "What is mixed up", _confusion(content)),
        Section("training", "Training", "The way through training", _training(content)),
        Section("candidates", "Candidates", "Candidates and their test", _candidates(content)),
        Section("advice", "Advice", "What more would buy", _advice(content)),
        Section("record", "Record", "Record", _record(content)),
    ]
    return [item for item in made if item.body]


def banner(text: VerdictText, promise: bool = True) -> Markup:
    """The verdict, above everything else."""
    return tag(
        "section",
        tag("p", tag("span", text.label, class_="badge"), class_="kicker"),
        tag("h1", text.headline),
        tag("p", text.claim, class_="claim"),
        tag("p", text.grounds, class_="grounds"),
        tag("details", tag("summary", "The promise, word for word"), tag("p", PROMISE_TEXT)) if promise else None,
        class_=f"verdict {text.kind}",
    )


def run_banner(content: RunContent) -> Markup:
    """Verdict and the few figures that matter most."""
    evidence = content.evidence
    where = "sealed" if evidence.role == "sealed" else "dev"
    worst = evidence.worst
    target = evidence.target or next(
        TaskRow(
            name,
            True,
            counts.examples,
            counts.gained,
            counts.lost,
            counts.accuracy_change,
            0,
            -1,
            1,
            None,
            None,
            None,
            None,
        )
        for name, counts in content.dev.tasks.items()
        if name == content.target
    )
    target_where = where if evidence.target else "dev"
    figures_ = [
        _figure(change_mark(target.difference), f"{content.target}, the target", f"{target_where} images"),
        *_deciding_figure(content, where),
        _figure(change_mark(worst.difference), f"{worst.task}, the worst protected class", f"{where} images"),
        _figure(
            tag("span", f"{evidence.dropped} of {len(evidence.protected)}", class_="change"),
            "protected classes with fewer right answers",
            f"{where} images",
        ),
        _figure(
            tag("span", f"{sum(row.n for row in evidence.rows):,}", class_="change"), "images judged", f"{where} set"
        ),
    ]
    return tag("div", banner(verdict_text(content)), tag("div", *figures_, class_="figures"))


def _deciding_figure(content: RunContent, where: str) -> list[Markup]:
    """The class that the verdict hung on, where it is another than the worst one and the target."""
    deciding = content.evidence.deciding
    if content.reported is None or deciding.is_target or deciding is content.evidence.worst:
        return []
    name = f"{deciding.task}, the class that decided"
    return [_figure(change_mark(deciding.difference), name, f"{deciding.n:,} {where} images")]


def _figure(value: Markup, name: str, note: str) -> Markup:
    return tag("div", tag("b", value), tag("span", name), tag("small", note), class_="figure")


# -- every class ------------------------------------------------------------------------------------------------------


def tasks_section(content: RunContent) -> Markup:
    """A table whose bars are the figure; with very many tasks an overview above it."""
    evidence = content.evidence
    scale = figures.forest_scale(evidence.rows)
    named = {"sealed": "the sealed images, now retired", "dev": "dev images"}[evidence.role]
    together = f"bounds hold together with confidence {content.confidence * 100:g} %"
    if evidence.role == "dev":
        together += " for a model fixed beforehand; dev images also chose this one, so they describe and do not prove"
    tested = "corrected as the verdicts are" if evidence.role == "sealed" else "of this class alone"
    note = (
        f"On {named}. Dot: change in accuracy, in points. Whisker: down to its lower bound ({together}). Dashed: the "
        f"accepted loss, in points. p: {tested}, against a loss of the margin or more."
    )
    heads = ["class", "change", "", "at least", "margin", "p", "lost", "gained", "old", "new", "images"]
    kinds = ["text", "number", None, *["number"] * 8]
    others = [("dev", content.dev)] if evidence.role == "sealed" else []
    others += [("test", content.test)] if content.test else []
    verdicts = any(row.verdict for row in evidence.rows)
    heads += [name for name, _ in others] + (["verdict"] if verdicts else [])
    kinds += ["number"] * len(others) + (["text"] if verdicts else [])
    rows: list[list[tuple[Markup | str, object]]] = []
    for row in evidence.rows:
        cells: list[tuple[Markup | str, object]] = [
            (_name(row), row.task),
            (change_mark(row.difference), row.difference),
            (figures.forest_cell(row, scale), None),
            (points(row.bound) if row.bound > -1 else "–", row.bound),
            (f"{row.margin * 100:g}", row.margin),
            (p_text(row.p, evidence.level), row.p),
            (str(row.lost), row.lost),
            (str(row.gained), row.gained),
            (percent(row.old), row.old),
            (percent(row.new), row.new),
            (f"{row.n:,}", row.n),
        ]
        for _, compared in others:
            change = compared.tasks[row.task].accuracy_change if row.task in compared.tasks else None
            cells.append((change_mark(change), change))
        if verdicts:
            cells.append((_verdict_mark(row.verdict), row.verdict or ""))
        rows.append(cells)
    classes = ["target" if row.is_target else "beyond" if row.beyond else "" for row in evidence.rows]
    table = data_table("task-table", heads, kinds, rows, classes, search="Find a class")
    over = tag("figure", figures.overview(evidence), class_="wide") if len(evidence.rows) > MATRIX else None
    return tag("div", tag("p", note, class_="note"), over, table, _target_note(content))


def _target_note(content: RunContent) -> Markup | None:
    """The target, where it is no part of the claim that the table is about."""
    if content.evidence.target is not None:
        return None
    reported = [("dev", content.dev), *([("test", content.test)] if content.test else [])]
    parts: list[object] = [f"{content.target}, the target, is no part of this claim: "]
    for place, (name, compared) in enumerate(reported):
        parts += [", " if place else "", change_mark(compared.target_gain), f" on {name} images"]
    return tag("p", *parts, ".", class_="note after")


def _name(row: TaskRow) -> Markup:
    return tag("span", row.task, tag("em", "target", class_="tag") if row.is_target else None, class_="task-name")


def _verdict_mark(verdict: str | None) -> Markup:
    marks = {"certified": "✓ ", "regressed": "▼ ", "undecided": "? "}
    return tag("span", f"{marks.get(verdict or '', '')}{verdict or '–'}", class_=f"word {verdict or 'none'}")


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
            tag("th", item, scope="col", data_sort=kind, class_=None if kind == "text" else "number")
            for item, kind in zip(heads, kinds, strict=True)
        ),
    )
    body = [
        tag(
            "tr",
            *(
                tag("th" if place == 0 else "td", shown, scope="row" if place == 0 else None,
                    data_value=value, class_=None if kinds[place] == "text" else "number")
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


# -- confusion --------------------------------------------------------------------------------------------------------


def _confusion(content: RunContent) -> Markup:
    if not content.pairs:
        return Markup("")
    pair = content.pairs[0]
    classes = [*content.protected, content.target]
    named = "the retired sealed images" if pair.role == "sealed" else "dev images"
    note = tag("p", f"Old against new, on {named}. Rows: what it is; columns: what it was taken for.", class_="note")
    matrices = None
    if len(classes) <= MATRIX:
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
    heads = ["class", "taken for", "old", "new", "more mistakes"]
    return data_table("mixed", heads, ["text", "text", "number", "number", "number"], rows, search="Find a class")


# -- training ---------------------------------------------------------------------------------------------------------


def _training(content: RunContent) -> Markup:
    parts: list[Markup] = []
    blocked = blocked_text(content)
    if blocked:
        parts.append(tag("p", blocked, class_="lead"))
    charts: list[Markup] = []
    if content.looks or content.candidates:
        caption = (
            "Gain of the target against the worst protected class, on dev images. Dots: looks during training, light "
            "to dark. Diamonds: candidates on the way back to the old model (cross); the shipped one is filled. Up and "
            "right is better; left of the line something was lost."
        )
        charts.append(tag("figure", tag("figcaption", "Trajectory"), figures.trajectory(content), tag("p", caption)))
    shown = {
        "h": ("Constraint h", "h", "How far each class's loss has risen above the old model's, in sampled images; "
              "above 0 the constraint is violated."),
        "u": ("Moving average u", "u", "The running estimate of h that the penalty acts on."),
        "weight": ("Effective weight", "β [u]₊", "How strongly each class pulls the update back; 0 while its "
                   "constraint holds."),
    }  # fmt: skip
    telling = figures.telling_tasks(content.series) if content.series else []
    rest = max((len(sery.tasks) for sery in content.series.values()), default=0) - len(telling)
    for name, (title, axis, caption) in shown.items():
        if name in content.series:
            chart = figures.over_time(content.series[name], telling, axis, f"{title} of every protected class")
            charts.append(tag("figure", tag("figcaption", title), chart, tag("p", caption)))
    key = figures.legend(telling, rest) if content.series else None
    return tag("div", *parts, tag("div", *charts, class_="charts"), key) if charts else Markup("")


# -- candidates -------------------------------------------------------------------------------------------------------


def _candidates(content: RunContent) -> Markup:
    margins = content.margins
    target = content.target if content.target_claimed else None
    order = {str(name): place for place, name in enumerate(content.result["order"])}
    rows: list[list[tuple[Markup | str, object]]] = []
    for candidate in sorted(
        content.candidates, key=lambda candidate: (order.get(candidate.name, len(order)), candidate.lam, candidate.bias)
    ):
        p = largest_p(Tested(f"step-{candidate.step:08d}", candidate.lam, candidate.dev), margins, target)
        place = order.get(candidate.name)
        rows.append(
            [
                ("–" if place is None else str(place + 1), -1 if place is None else place),
                (candidate.name, candidate.name),
                (f"{candidate.lam:g}", candidate.lam),
                (f"{candidate.bias:g}", candidate.bias),
                (change_mark(candidate.dev.target_gain), candidate.dev.target_gain),
                (change_mark(candidate.dev.dev_safety), candidate.dev.dev_safety),
                (candidate.dev.worst_task, candidate.dev.worst_task),
                (p_text(p), p),
                (
                    tag("span", candidate.outcome, class_=f"word {candidate.outcome.replace(' ', '-')}"),
                    candidate.outcome,
                ),
            ]
        )
    heads = ["order", "candidate", "λ", "held back", "target, dev", "worst class, dev", "which", "largest p, dev"]
    kinds = ["number", "text", "number", "number", "number", "number", "text", "number", "text"]
    fitted = (
        "In every candidate the target's logit was fitted anew and nothing else, so that at λ = 0 the other classes "
        "are told apart exactly as before. "
        if any(candidate.lam == 0 for candidate in content.candidates)
        else ""
    )
    walk = (
        f"λ walks from the old model (0) to what training found (1). {fitted}A candidate that is held back names the "
        "target less readily: its logit is lowered by so much."
    )
    tested = (
        "No sealed images were looked at."
        if content.reported is None
        else "The order was fixed on dev images; on the sealed images each is tested in turn, every class at the level "
        "of the look, and the first that does not pass ends it."
    )
    table = data_table("candidate-table", [*heads, "sealed test"], kinds, rows)
    return tag("div", tag("p", f"{walk} {tested}", class_="note"), table, _frontier(content))


def _frontier(content: RunContent) -> Markup | None:
    frontier = content.result.get("frontier") or []
    if not frontier:
        return None
    rows: list[list[tuple[Markup | str, object]]] = [
        [
            (str(item["candidate"]), item["candidate"]),
            (change_mark(item["target_gain"]), item["target_gain"]),
            (change_mark(item["dev_safety"]), item["dev_safety"]),
            (str(item["worst_task"]), item["worst_task"]),
        ]
        for item in frontier
    ]
    table = data_table(
        "frontier", ["look", "target", "worst class", "which"], ["text", "number", "number", "text"], rows
    )
    return tag("div", tag("h3", "Frontier: looks that no other beats on both counts (dev)"), table)


# -- advice -----------------------------------------------------------------------------------------------------------


def _advice(content: RunContent) -> Markup:
    parts: list[Markup] = []
    steps = content.result.get("gain_by_margin") or []
    if steps:
        parts.append(
            tag(
                "figure",
                tag("figcaption", "What a margin would buy"),
                figures.bought(steps, content.target),
                tag("p", "The largest gain of the target seen on dev images with no protected class below the margin."),
            )
        )
    evidence = content.evidence
    where = "sealed (retired)" if evidence.role == "sealed" else "dev"
    undecided = [row for row in evidence.rows if (row.p > evidence.level or row.verdict == "undecided")]
    if not undecided:
        parts.append(
            tag("p", f"Every claimed class has evidence enough on {where} images: none asks for more.", class_="note")
        )
        return tag("div", *parts, class_="charts")
    rows: list[list[tuple[Markup | str, object]]] = [
        [
            (_name(row), row.task),
            (f"{row.n:,}", row.n),
            (change_mark(row.difference), row.difference),
            (f"about {row.needed:,}" if row.needed else "–", row.needed or 10**9),
            (_why(row), None),
        ]
        for row in undecided
    ]
    heads, kinds = ["class", "images now", "change", "images needed", ""], ["text", "number", "number", "number", None]
    return tag(
        "div",
        *parts,
        tag(
            "div",
            tag("h3", "More data"),
            tag("p", f"Judged by {where} images; for an 80 % chance that all classes pass.", class_="note"),
            data_table("planner", heads, kinds, rows, search="Find a class" if len(rows) > 12 else None),
        ),
        class_="charts",
    )


def _why(row: TaskRow) -> str:
    if row.needed:
        return "that many, at the rate of flips seen"
    if row.difference <= -row.margin and row.difference < 0:
        return "the loss seen reaches the margin: if it is real, no number helps"
    if row.margin == 0:
        return "proof of a gain is asked for; without one no number is enough"
    return "images enough; it passes alone, or nearly"


# -- record -----------------------------------------------------------------------------------------------------------


def _record(content: RunContent) -> Markup:
    state = content.state
    facts = [
        ("holdfast", state.get("version")),
        ("method", (content.config.get("method") or {}).get("name")),
        ("seed", content.config.get("seed")),
        ("parent model", state.get("parent")),
        ("data", state.get("data")),
        ("run", state.get("fingerprint")),
    ]
    counts = state.get("counts") or {}
    facts += [(f"images: {name.replace('_', ' ')}", f"{number:,}") for name, number in counts.items()]
    parts = [tag("dl", *((tag("dt", name), tag("dd", value)) for name, value in facts if value is not None))]
    if content.ledger:
        parts.append(tag("h3", "Ledger of the sealed set"))
        parts.append(tag("ol", *(tag("li", _entry(dict(item))) for item in content.ledger), class_="ledger"))
    for note in content.notes:
        parts.append(tag("p", f"The ledger could not be read: {note}", class_="note"))
    problems = state.get("problems") or []
    if problems:
        shown = [
            f"{problem.get('kind')}: {problem.get('where')} {problem.get('detail') or ''}" for problem in problems[:200]
        ]
        parts.append(
            tag(
                "details",
                tag("summary", f"{count(len(problems), 'problem')} found in the data and dealt with"),
                tag("ul", *(tag("li", item) for item in shown)),
            )
        )
    config = json.dumps(content.config, indent=1, ensure_ascii=False)
    parts.append(tag("details", tag("summary", "The round as it was run"), tag("pre", config)))
    return tag("div", *parts)


def _entry(entry: dict[str, object]) -> str:
    kind, when = entry.get("event"), f"{entry['time']}: " if "time" in entry else ""
    if kind in ("query", "look"):  # the second in ledgers of earlier versions
        return f"{when}look {entry.get('number')}, {entry.get('candidates')} candidates, level {entry.get('level'):g}"  # type: ignore[str-format]
    if kind == "result":
        which = f", {entry['which']} ships" if entry.get("which") else ""
        return f"{when}look {entry.get('number')} {'passed' if entry.get('passed') else 'did not pass'}{which}"
    return f"{when}opened with {json.dumps(entry.get('budget'))}"
