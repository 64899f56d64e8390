"""``holdfast data``, ``pack`` and ``leaks``."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from holdfast.errors import Exit, UserError

if TYPE_CHECKING:
    from collections.abc import Generator

    from holdfast.config import SourceConfig
    from holdfast.data.catalogue import Problem
    from holdfast.data.dedup.leaks import Features, Pictures
    from holdfast.data.inspection import Inspected

Kind = Annotated[str | None, typer.Option(help="How to read it. Default: by what lies there.", show_default=False)]
Attribute = Annotated[str, typer.Option(help="BDD100K: the attribute that is the class (weather, scene, timeofday).")]
Pooled = Annotated[list[str] | None, typer.Option(help="BDD100K: pool this class and split it 40/30/30. Repeatable.")]


def _source(text: str, kind: str | None, attribute: str, pooled: Sequence[str] | None) -> SourceConfig:
    from holdfast.config import SourceConfig, parse
    from holdfast.data.sources import guess_source

    if kind is None:
        guessed = guess_source(text)
        if guessed.kind != "bdd100k":
            return guessed
        kind = "bdd100k"
    values = {"kind": kind, "path": text, "attribute": attribute, "pooled": tuple(pooled or ())}
    return parse(SourceConfig, values, "the source")


@contextmanager
def _progress(title: str, console: Console) -> Generator[Callable[[int, int], None]]:
    """A bar on a terminal; nothing where there is none."""
    if not console.is_terminal:
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def data(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A folder, table, shards, store, label file, `digits`.")
    ],
    kind: Kind = None,
    attribute: Attribute = "weather",
    pooled: Pooled = None,
    check: Annotated[int, typer.Option(min=0, help="Pictures to open and decode; 0 for all.")] = 2000,
    sheet: Annotated[Path | None, typer.Option(help="Where the sheet of example pictures goes (PNG).")] = Path(
        "contact-sheet.png"
    ),
    no_sheet: Annotated[bool, typer.Option("--no-sheet", help="Draw no sheet.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Show what is understood of a source: classes, splits, sizes, example pictures, problems.

    The first thing to run on data of your own. Nothing is changed.
    """
    from holdfast.cli.process import leave_out_pandas
    from holdfast.data.catalogue import build
    from holdfast.data.inspection import contact_sheet, copies, inspect_pictures, table_of
    from holdfast.data.sources import list_source
    from holdfast.data.sources.bdd100k import count_labels

    leave_out_pandas()
    console = Console(highlight=False, soft_wrap=True)
    if source.endswith(".json"):
        _print_counts(console, {name: {"": n} for name, n in count_labels(Path(source), attribute).items()}, attribute)
        return
    config = _source(source, kind, attribute, pooled)
    catalogue = build(list_source(config, Path()))
    with _progress("looking", Console(stderr=True)) as progress:
        inspected = inspect_pictures(catalogue, at_most=check, progress=progress)
    problems = [*catalogue.problems, *copies(catalogue), *inspected.problems]
    counts = table_of(catalogue)
    drawn = None if no_sheet or sheet is None or not len(catalogue) else sheet
    if as_json:
        print(json.dumps(_as_json(config, counts, inspected, problems), ensure_ascii=False))
        if drawn is not None:
            contact_sheet(catalogue, drawn)
        return
    console.print(f"[bold]{escape(source)}[/bold]: {config.kind}, {len(catalogue)} examples")
    _print_counts(console, counts, "class")
    _print_inspected(
        console, inspected, len(catalogue), captions=sum(c is not None for c in catalogue.column("caption"))
    )
    _print_problems(console, problems)
    if drawn is not None:  # last: where it cannot be written, the rest has been said
        contact_sheet(catalogue, drawn)
        console.print(f"example pictures: {escape(str(drawn))}")


def _print_counts(console: Console, counts: dict[str, dict[str, int]], title: str) -> None:
    splits = sorted({split for row in counts.values() for split in row})
    table = Table(title, *(split or "no split" for split in splits) if splits != [""] else ("images",))
    for column in table.columns[1:]:
        column.justify = "right"
    for label, row in counts.items():
        table.add_row(escape(label or "(no class)"), *(str(row.get(split, 0)) for split in splits))
    if len(counts) > 1:
        table.add_section()
        table.add_row("all", *(str(sum(row.get(split, 0) for row in counts.values())) for split in splits))
    console.print(table)


def _print_inspected(console: Console, inspected: Inspected, total: int, *, captions: int) -> None:
    if inspected.sizes:
        console.print(f"sizes: {_sizes(inspected.sizes)}")
    formats = ", ".join(f"{name} {count}" for name, count in inspected.formats.most_common())
    console.print(f"opened {inspected.pictures} of {total}: {formats or 'none'}; with a caption: {captions}")
    for what, count in inspected.treated.most_common():
        console.print(f"note: {count} {what}")


def _sizes(sizes: Sequence[tuple[int, int]]) -> str:
    """``all 128 x 128 px``, or the range and the median by area."""
    widths, heights = zip(*sizes, strict=True)
    median = sorted(sizes, key=lambda size: size[0] * size[1])[len(sizes) // 2]
    if len(set(sizes)) == 1:
        return f"all {median[0]} x {median[1]} px"
    ranges = f"{min(widths)} to {max(widths)} px wide, {min(heights)} to {max(heights)} px high"
    return f"{ranges}, median {median[0]} x {median[1]}"


def _print_problems(console: Console, problems: Sequence[Problem]) -> None:
    from holdfast.data.catalogue import count_problems

    if not problems:
        console.print("no problems found")
        return
    for kind, count in sorted(count_problems(problems).items()):
        console.print(f"[yellow]{escape(kind)}[/yellow]: {count}")
        for problem in [item for item in problems if item.kind == kind][:5]:
            console.print(f"    {escape(problem.where)}" + (f" ({escape(problem.detail)})" if problem.detail else ""))
        if count > 5:
            console.print("    …")


def _as_json(
    config: SourceConfig, counts: dict[str, dict[str, int]], inspected: Inspected, problems: Sequence[Problem]
) -> dict[str, Any]:
    from holdfast.data.catalogue import count_problems

    return {
        "kind": config.kind,
        "counts": counts,
        "opened": inspected.pictures,
        "formats": dict(inspected.formats),
        "treated": dict(inspected.treated),
        "sizes": {"smallest": min(inspected.sizes, default=None), "largest": max(inspected.sizes, default=None)},
        "problems": count_problems(problems),
    }


def pack(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A folder, table, shards, or `digits`.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The store's folder: new, or one that was begun.")],
    size: Annotated[int, typer.Option(min=1, help="Side of the pictures: the input size of your model.")] = 224,
    interpolation: Annotated[
        str,
        typer.Option(
            help="bicubic or bilinear, as your model asks for; bilinear:256 crops a larger picture, "
            "bicubic:squash crops none."
        ),
    ] = "bicubic",
    kind: Kind = None,
    attribute: Attribute = "weather",
    pooled: Pooled = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Threads. Default: one a core, at most 8.")] = None,
    bad_image_limit: Annotated[float, typer.Option(min=0, max=1, help="Share of unreadable pictures to skip.")] = 0.01,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read the finished store back and check every byte.")
    ] = False,
) -> None:
    """Decode a source once, into a store that training reads at full speed.

    Stop it whenever you like, also with a kill: the same command goes on where it stopped. Use the store as
    `source = { kind = "pack", path = "OUT" }`.
    """
    from holdfast.data.pack import pack as write

    console = Console(highlight=False, soft_wrap=True)
    config = _source(source, kind, attribute, pooled)
    with _progress("packing", Console(stderr=True)) as progress:
        store = write(
            config,
            out,
            size=size,
            interpolation=interpolation,
            workers=workers,
            limit=bad_image_limit,
            progress=progress,
        )
    if verify:
        store.verify()
    megabytes = store.rows * 3 * store.size**2 / 1e6
    console.print(f"{escape(str(out))}: {store.header['examples']} pictures of {size} px, {megabytes:,.0f} MB")
    console.print(f"fingerprint {store.header['fingerprint']}")
    from holdfast.data.catalogue import Problem

    _print_problems(console, [Problem(*item) for item in store.header["problems"]])


def leaks(
    first: Annotated[str, typer.Argument(metavar="A", help="A source, or a ROUND.toml to compare across its roles.")],
    second: Annotated[
        str | None, typer.Argument(metavar="[B]", help="Another source. Left out: copies within A.")
    ] = None,
    kind: Kind = None,
    model: Annotated[Path | None, typer.Option(help="A model folder: compare its image features too.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write all pairs here (CSV).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> int:
    """Find pictures that two sets share: exact copies, and near ones (encoded again, mirrored, cut by up to 5 %).

    Ends with exit code 3 where a pair is found.
    """
    from holdfast.data.dedup.leaks import describe, find_leaks

    console = Console(highlight=False, soft_wrap=True)
    features = None if model is None else features_of(model)
    found: list[tuple[str, str, str, float]] = []
    compared: list[str] = []
    lines: list[str] = []
    for title, a, b in _sets(first, second, kind, features):
        compared.append(f"{title}: {len(a)}" + ("" if b is None else f" against {len(b)}") + " pictures")
        for match in find_leaks(a, b):
            found.append((a.names[match.a], (b or a).names[match.b], match.kind, match.similarity))
            lines.append(describe(match, a, b))
    if out is not None:
        _write_pairs(out, found)
    if as_json:
        pairs = [dict(zip(("a", "b", "kind", "similarity"), item, strict=True)) for item in found]
        print(json.dumps({"compared": compared, "pairs": pairs}, ensure_ascii=False))
    else:
        for line in compared:
            console.print(escape(line))
        for line in lines[:50]:
            console.print(escape(line))
        if len(lines) > 50:
            console.print(f"… and {len(lines) - 50} more" + (f", all in {escape(str(out))}" if out else "; see --out"))
        console.print(f"{len(found)} pairs" if found else "no pairs found")
    return int(Exit.FAULT if found else Exit.DONE)


def _sets(
    first: str, second: str | None, kind: str | None, features: Features | None
) -> Iterable[tuple[str, Pictures, Pictures | None]]:
    """What is compared with what, named."""
    from holdfast.data.catalogue import build, join
    from holdfast.data.dedup.leaks import pictures_of
    from holdfast.data.sources import list_source

    if first.endswith(".toml"):
        if second is not None:
            raise UserError("a round is compared across its own roles", do="leave out the second source")
        yield from _roles_of(Path(first), features)
        return

    def pictures(text: str) -> Pictures:
        return pictures_of(join([build(list_source(_source(text, kind, "weather", None), Path()))]), features=features)

    a = pictures(first)
    yield (first, a, None) if second is None else (f"{first}, {second}", a, pictures(second))


def _roles_of(round_file: Path, features: Features | None) -> Iterable[tuple[str, Pictures, Pictures | None]]:
    """Training images of a round against its dev, sealed and test images; sealed ones against dev and each other."""
    from holdfast.config import DataConfig, TaskConfig, parse, read_toml
    from holdfast.data.dedup.leaks import pictures_of
    from holdfast.data.roles import assign
    from holdfast.data.sources import catalogue
    from holdfast.data.survey import task_spec
    from holdfast.data.task import Role

    values = read_toml(round_file)
    config = parse(DataConfig, values.get("data", {}), f"{round_file} [data]")
    task = parse(TaskConfig, values.get("task", {}), f"{round_file} [task]")
    found = catalogue(config.sources, round_file.parent)
    assigned = assign(found, task_spec(task, found.classes).classes, config.roles)
    training = pictures_of(found, assigned.rows[assigned.where(Role.BASE, Role.TRAIN)], features=features)
    held_out = {
        role: pictures_of(found, assigned.rows[assigned.where(role)], features=features)
        for role in (Role.DEV, Role.SEALED, Role.TEST)
    }
    for role, pictures in held_out.items():
        yield f"training, {role.value}", training, pictures
    yield "sealed, dev", held_out[Role.SEALED], held_out[Role.DEV]
    yield "sealed", held_out[Role.SEALED], None


def features_of(folder: Path) -> Features:
    """Image features of a model folder."""
    import numpy as np
    import torch
    from PIL import Image

    from holdfast.data.images import evaluation_view
    from holdfast.data.transforms import normalize_views
    from holdfast.model.folder import load_model, model_folder

    classifier = load_model(model_folder(folder)).eval()
    view = classifier.preprocess

    @torch.inference_mode()
    def features(images: Sequence[Image.Image]) -> np.ndarray:
        views = np.stack([evaluation_view(image, view.size, view.interpolation) for image in images])
        return classifier.image_features(normalize_views(torch.from_numpy(views), view.mean, view.std)).float().numpy()

    return features


def _write_pairs(path: Path, found: list[tuple[str, str, str, float]]) -> None:
    from holdfast.files import write_atomic

    def write(temporary: Path) -> None:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(("a", "b", "kind", "similarity"))
            writer.writerows((a, b, kind, f"{similarity:.4f}") for a, b, kind, similarity in found)

    write_atomic(path, write)
