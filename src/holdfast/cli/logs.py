"""Options of ``certify`` and ``gate`` that read the logs of other tools, and the table that is made of them."""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.options import refuse_ignored
from holdfast.errors import UserError

if TYPE_CHECKING:
    from holdfast.certify.harness.joined import Joined

LmEval = Annotated[
    bool, typer.Option("--lm-eval", help="OLD and NEW are logs of `lm_eval --log_samples`: files or folders.")
]
Inspect = Annotated[
    bool, typer.Option("--inspect", help="OLD and NEW are logs of inspect_ai: .eval, .json, or folders.")
]
Nemo = Annotated[
    bool, typer.Option("--nemo", help="OLD and NEW are folders of NeMo Evaluator: eval-*.json, results.jsonl.")
]
Coco = Annotated[
    Path | None,
    typer.Option(metavar="ANNOTATIONS", help="OLD and NEW are detections in COCO's format (ultralytics: save_json)."),
]
Metric = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME|TASK=NAME", help="Metric of the logs; of detections: box (default) or image."),
]
TaskField = Annotated[
    str | None,
    typer.Option(metavar="FIELD", help="A task for each value of this field of a document, such as subject."),
]
MinScore = Annotated[
    float | None, typer.Option(min=0.0, max=1.0, help="Detections below it do not count. Default: 0.25.")
]
TableFile = Annotated[
    Path | None, typer.Option("--table", metavar="FILE.csv", help="Keep the table that is made of the logs.")
]


@dataclass(frozen=True)
class LogOptions:
    """Which logs are read, and how."""

    lm_eval: bool = False
    inspect: bool = False
    nemo: bool = False
    coco: Path | None = None
    metric: Sequence[str] = ()
    task_field: str | None = None
    min_score: float | None = None
    table: Path | None = None
    metrics: Mapping[str, str] = field(default_factory=dict[str, str])  # those of a policy

    @property
    def kind(self) -> str | None:
        """The format of the logs; None where tables of predictions are given."""
        given = {"lm-eval": self.lm_eval, "inspect": self.inspect, "nemo": self.nemo, "coco": self.coco is not None}
        names = [name for name, chosen in given.items() if chosen]
        if len(names) > 1:
            raise UserError(f"--{names[0]} and --{names[1]} at once", do="OLD and NEW have one format: leave one out")
        return names[0] if names else None

    def check(self, beside: Mapping[str, Any]) -> None:
        """Refuse options that are for logs where there are none, and those for tables where there are logs."""
        kind = self.kind
        own = {"metric": list(self.metric), "task_field": self.task_field, "table": self.table}
        if kind is None:
            refuse_ignored("no logs", {**own, "min_score": self.min_score}, "say what OLD and NEW are: --lm-eval, …")
            return
        refuse_ignored(f"--{kind}", beside, "give the logs as OLD and NEW")
        if kind != "coco":
            refuse_ignored(f"--{kind}", {"min_score": self.min_score}, "leave it out: it is for detections")

    def read(self, paths: Sequence[Path], layout: Mapping[str, Any], *, tasks_may_differ: bool = False) -> Joined:
        """The logs of both models, joined."""
        assert self.kind is not None
        if len(paths) != 2:
            raise UserError(
                f"--{self.kind} needs the logs of two models", expected="OLD and NEW", found=str(len(paths))
            )
        if layout.get("weight"):
            raise UserError(
                f"--{self.kind} and --weight at once", do="keep the table (--table), add the column, certify it"
            )
        from holdfast.certify.harness import read_logs

        return read_logs(
            self.kind,
            *paths,
            metrics={**self.metrics, **_metrics(self.metric, self.kind)},
            task_field=self.task_field,
            group_field=layout.get("group"),
            ground_truth=self.coco,
            min_score=0.25 if self.min_score is None else self.min_score,
            score_range=layout.get("score_range"),
            tasks_may_differ=tasks_may_differ,
        )

    @contextmanager
    def written(self, joined: Joined, certificate: Path | None) -> Generator[Path]:
        """The table as a file: where it is to be kept, beside the certificate that rests on it, or for a moment."""
        kept = self.table or (certificate and certificate.with_name(f"{certificate.stem}.predictions.csv"))
        if kept is None:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / f"{joined.kind}.csv"
                joined.write(path)
                yield path
            return
        existed = kept.exists()
        joined.write(kept)
        try:
            yield kept
        except UserError:
            if not existed:  # whoever is refused finds nothing changed
                kept.unlink(missing_ok=True)
            raise


def layout_for(joined: Joined, layout: Mapping[str, Any]) -> dict[str, Any]:
    """The layout of the table: rows that belong together are grouped, whether asked for or not."""
    if joined.group is None and (layout.get("equal_groups") or layout.get("largest_unit") is not None):
        raise UserError(
            "options for groups, and no groups in the logs",
            found="each document stands there once",
            do="leave --largest-unit and --equal-groups out",
        )
    return {**layout, "group": joined.group}


def _metrics(given: Sequence[str], kind: str) -> dict[str, str]:
    """Metrics by task; without a task, of all others."""
    found: dict[str, str] = {}
    for item in given:
        task, _, name = item.rpartition("=")
        if not name or task in found:
            raise UserError(f"--metric {item} is not a metric", expected="NAME, or TASK=NAME, each task once")
        if task and kind == "coco":
            raise UserError(f"--metric {item}: detections have one metric", expected="box or image")
        found[task] = name
    return found
