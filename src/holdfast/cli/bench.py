"""``holdfast bench``: what a step costs on this machine, and where the time goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.errors import UserError

if TYPE_CHECKING:
    from holdfast.train.bench import Figures


def bench(
    round_file: Annotated[
        Path | None, typer.Argument(metavar="ROUND.toml", help="The round whose steps are timed; nothing is written.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="A made-up round: bdd100k, places365 (ViT-B/16), bdd100k-large (ViT-L/14), bdd100k-huge (ViT-H/14), "
            "bdd100k-siglip, small (parts), tiny."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to time, after a warm-up.")] = 50,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")] = None,
    paired: Annotated[bool, typer.Option("--paired", help="With --shape: random views through both models.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time the training loop: step, images a second, share of the device's matrix rate, memory, parts of a step.

    Runs the loop of `holdfast develop` as it is, on the round's own data and settings, and throws the result away.
    """
    import json

    from rich.console import Console
    from rich.table import Table

    from holdfast.runtime import speaks

    if round_file is not None and shape is not None:
        raise UserError("two things to time", expected="either a ROUND.toml or --shape")
    if round_file is not None and paired:
        raise UserError("--paired goes with --shape", do="say views = 'paired' under [method.research] of the round")
    if round_file is None and shape is None:
        raise UserError(
            "what is to be timed?",
            expected="a ROUND.toml or --shape",
            do="write a round with `holdfast init`, or try `holdfast bench --shape tiny`",
        )

    def timed(steps: int, **changes: str) -> Figures:
        if shape is not None:
            return _of_shape(shape, steps, device, paired, **changes)
        assert round_file is not None
        return _of_round(round_file, steps, device, **changes)

    figures = timed(steps)
    # A recorded step is one piece: what its parts take is seen in steps that are launched one by one.
    apart = timed(min(steps, 20), speed="compiled").parts if "step" in figures.parts else {}
    if not speaks():
        return
    if as_json:
        print(json.dumps({**figures.to_json(), "parts_launched_one_by_one": apart}))
        return
    table = Table(title=str(round_file or shape), show_header=False)
    table.add_row("step", f"{figures.milliseconds:.1f} ms ({figures.fastest:.1f} to {figures.slowest:.1f})")
    table.add_row("images", f"{figures.images_per_second:,.0f} a second")
    table.add_row(
        "arithmetic",
        f"{_flop(figures.teraflop)} a step, {100 * figures.share:.0f} % of this device's "
        f"{_flop(figures.matrix_rate)}/s on one large product",
    )
    where = f"on the GPU, {figures.allocated_gib:.1f} in tensors" if figures.allocated_gib else "by the whole process"
    table.add_row("memory", f"{figures.memory_gib:.1f} GiB at most {where}")
    for part, value in figures.parts.items():
        name = "recorded" if part == "step" else part
        table.add_row(name, f"{value:.1f} ms  {100 * value / sum(figures.parts.values()):.0f} %")
    if apart:
        table.add_row("", "recorded: forward, backward and optimizer in one. Launched one by one they take")
        for part in ("forward", "backward", "optimizer"):
            table.add_row(part, f"{apart[part]:.1f} ms  {100 * apart[part] / sum(apart.values()):.0f} %")
    table.add_row("warm-up", f"{figures.first_step_seconds:.0f} s to the first logged step")
    Console().print(table)


def _flop(tera: float) -> str:
    return f"{tera:.3g} TFLOP" if tera >= 1 else f"{1000 * tera:.3g} GFLOP"


def _of_shape(name: str, steps: int, device: str | None, paired: bool, **changes: str) -> Figures:
    import tempfile

    from holdfast.errors import nearest
    from holdfast.runtime import started
    from holdfast.train.bench import measure
    from holdfast.train.shapes import SHAPES, made_up_round, made_up_run, train_config, write_pictures

    if name not in SHAPES:
        raise UserError(f"unknown shape {name!r}", do=nearest(name, SHAPES))
    shape = SHAPES[name]
    with started(device or "auto") as runtime, tempfile.TemporaryDirectory() as folder:
        data = made_up_round(shape, write_pictures(Path(folder) / "pixels.bin", shape.images, shape.size))
        method, plan = made_up_run(shape, data, train_config(shape, **changes), runtime, paired=paired)
        return measure(method, data, plan, runtime, steps=steps)


def _of_round(path: Path, steps: int, device: str | None, **changes: str) -> Figures:
    from holdfast.config import RoundConfig, parse, read_toml
    from holdfast.rounds.prepare import inherit, prepare_round, view_settings
    from holdfast.runtime import started
    from holdfast.train.bench import measure
    from holdfast.train.loop import TrainSpec

    config = inherit(parse(RoundConfig, read_toml(path), str(path), path.parent), path.parent)
    with started(device or config.train.device) as runtime:
        ready = prepare_round(config, path.parent, runtime)
        views = view_settings(config.train, config.method)
        plan = TrainSpec(
            config.trained.model_copy(update=changes), views, config.seed, ready.fingerprint, config.train.steps
        )
        return measure(ready.method, ready.assembled.data, plan, runtime, steps=steps)
