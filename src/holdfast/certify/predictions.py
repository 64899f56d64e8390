"""``holdfast.certify``: a verdict on the predictions of two models, whatever framework made them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.certify.certificate import (
    NEW_PREDICTIONS,
    OLD_PREDICTIONS,
    about_input,
    full_report,
    read_evidence,
    run_test,
    write_certificate,
)
from holdfast.certify.claims import Claim, TaskResult, Verdict, delta_of
from holdfast.certify.columns import read_table
from holdfast.certify.sequential import sequential_report
from holdfast.certify.settings import PLAIN, Layout, Settings, margins_for
from holdfast.certify.tables import Paired, paired_table, paired_tables
from holdfast.errors import UserError, nearest

if TYPE_CHECKING:
    import pyarrow as pa

Predictions = Any  # a path of a CSV or Parquet file, a pandas, polars or arrow table, or a dict of columns


@dataclass(frozen=True)
class CertifyResult:
    """The verdict of :func:`certify`, with the evidence task by task."""

    verdict: Verdict  # "certified", "regressed" or "undecided"
    tasks: dict[str, TaskResult]  # protected tasks, or pooled groups of them, by name
    target: TaskResult | None  # the task that was to improve, where one is named
    settings: Settings  # what was fixed before the test
    files: dict[str, Path]  # the predictions, where they came from files
    report: dict[str, Any]  # everything that is told about it, the promise in words included

    @property
    def certified(self) -> bool:
        """Whether the claim was shown to hold."""
        return self.verdict is Verdict.CERTIFIED

    def to_json(self) -> dict[str, Any]:
        """What ``holdfast certify --json`` prints."""
        return self.report

    def write(self, path: Path | str, named: Mapping[str, Path] | None = None) -> dict[str, Any]:
        """Write a certificate that ``holdfast verify`` checks from the files of predictions.

        ``named`` are further files to name in it by their fingerprint, such as the models' weights.
        """
        if not self.files:
            raise UserError(
                "a certificate names the files that it rests on, and these predictions are in memory",
                do="write them to CSV or Parquet files, and certify those",
            )
        if not (self.report["input"]["example_ids"] or self.settings.distinct_rows):
            raise no_ids("a certificate that is written down")
        return write_certificate(Path(path), self.settings, self.report, {**self.files, **(named or {})})


def certify(
    old: Predictions,
    new: Predictions | None = None,
    *,
    target: str | None = None,
    margin: float | None = 0.02,
    margins: Mapping[str, float] | None = None,
    confidence: float = 0.95,
    claim: str = "all",
    tasks: Sequence[str] = (),
    pools: Mapping[str, Sequence[str]] | None = None,
    labels: Sequence[str] = (),
    lemma_constant: float = 0.0,
    distinct_rows: bool = False,
    group: str | None = None,
    weight: str | None = None,
    score_range: tuple[float, float] | None = None,
    largest_unit: float | None = None,
    equal_groups: bool = False,
    workers: int = 1,
) -> CertifyResult:
    """Test on two models' predictions that no protected task lost more accuracy than its margin.

    ``old`` and ``new`` are tables with columns ``example_id, task, label, prediction``, joined by example id and task;
    ``old`` alone is one table with ``example_id, task, label, old, new``. In place of labels and predictions they may
    say what was right: ``correct``, or ``old_correct, new_correct``. A table is a CSV or Parquet file, a data frame
    (pandas, polars, arrow) or a dict of columns. The test is exact; it needs independent images that neither training
    nor the choice of a model has seen, and margins that were fixed before they were seen.

    ``margin`` holds for every task, ``margins`` for single ones. With ``target`` it is claimed also that this task
    improved. ``claim`` is ``all`` (every task is retained), ``each`` (these tasks are), ``bounds`` or ``devsafety``.
    ``tasks`` are the protected ones (default: all but the target), ``pools`` groups of tasks that are claimed about as
    a whole, each image counted once, and ``labels`` all labels there are: others are refused. One table may lack
    ``example_id``; ``distinct_rows`` then states that each row is another image, which a pool, rows that repeat and a
    written certificate need. ``lemma_constant`` is C of the paper's Lemma 1, shown beside. ``workers`` is for large
    tables: at most so many processes.

    Rows that are not independent (frames of a video) name their ``group`` in a column; the test is then about groups,
    which must be. Groups of different sizes need ``largest_unit``, the largest number of rows that a group may have, or
    ``equal_groups``: every group counts the same. ``weight`` is a column of weights; ``largest_unit`` is then the
    largest weight of a group or row. Scores stand in ``old_score, new_score`` (or ``score`` in two tables), within
    ``score_range``, by default [0, 1]; the margin is a share of it. These are tested by betting, valid in finite
    samples.
    """
    layout = Layout(group, weight, score_range, largest_unit, equal_groups=equal_groups)
    paired, files = evidence(old, new, labels, layout)
    check_rows(paired, distinct_rows)
    present = paired.tasks()
    settings = settings_for(present, target, margin, margins, confidence, claim, tasks, pools, labels, distinct_rows)
    if pools and not (paired.inspection.ids or distinct_rows):
        raise no_ids("a pool, which counts an image once,")
    settings = replace(settings, layout=layout)
    if not (math.isfinite(lemma_constant) and lemma_constant >= 0):
        raise UserError(f"the constant C = {lemma_constant} of Lemma 1 is not usable", expected="a number from 0 on")
    result = run_test(paired, settings, workers=workers)
    return CertifyResult(
        result.verdict,
        {task.counts.task: task for task in result.tasks},
        result.target,
        settings,
        files,
        full_report(paired, settings, result, complexity=lemma_constant),
    )


def certify_sequentially(
    old: Predictions,
    new: Predictions | None = None,
    *,
    target: str | None = None,
    margin: float | None = 0.02,
    margins: Mapping[str, float] | None = None,
    confidence: float = 0.95,
    tasks: Sequence[str] = (),
    labels: Sequence[str] = (),
    distinct_rows: bool = False,
) -> dict[str, Any]:
    """The same claim for rows that keep arriving, in their order: a verdict that is valid whenever you stop."""
    paired, _ = evidence(old, new, labels)
    if paired.measured is not None:
        raise UserError(
            "--sequential and scores at once",
            do="leave --sequential out: scores are tested on a fixed set of rows",
        )
    check_rows(paired, distinct_rows)
    present = paired.tasks()
    settings = settings_for(present, target, margin, margins, confidence, "all", tasks, None, labels, distinct_rows)
    return {**sequential_report(paired, settings.margins, confidence, target), **about_input(paired, settings)}


# -- predictions ------------------------------------------------------------------------------------------------------


def evidence(
    old: Predictions, new: Predictions | None, labels: Sequence[str] = (), layout: Layout = PLAIN
) -> tuple[Paired, dict[str, Path]]:
    """Two models on the same images, and the files that say so (none for tables in memory)."""
    if isinstance(old, str | Path) and (new is None or isinstance(new, str | Path)):
        files = {"predictions": Path(old)} if new is None else {OLD_PREDICTIONS: Path(old), NEW_PREDICTIONS: Path(new)}
        paired = read_evidence(files, labels, layout)
        assert paired is not None
        return paired, files
    if new is None:
        return paired_table(_table(old, "the predictions"), labels, layout=layout), {}
    names = ("the old model's predictions", "the new model's predictions")
    return paired_tables(_table(old, names[0]), _table(new, names[1]), labels, layout=layout), {}


def _table(given: Predictions, what: str) -> pa.Table:
    """A file, a data frame or a dict of columns as an arrow table."""
    if isinstance(given, str | Path):
        return read_table(Path(given))
    import pyarrow as pa

    try:
        if isinstance(given, pa.Table):
            return given
        if isinstance(given, Mapping) or hasattr(given, "__arrow_c_stream__"):
            return pa.table(given)
        if hasattr(given, "columns"):  # a pandas of before 2.2
            return pa.table({str(name): list(given[name]) for name in given.columns})
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise UserError(
            f"{what} cannot be read as a table", found=(str(error).splitlines() or [repr(error)])[0][:300]
        ) from error
    raise UserError(
        f"{what} are no table",
        expected="a CSV or Parquet file, a data frame, or a dict of columns",
        found=type(given).__name__,
    )


# -- what is fixed before the test ------------------------------------------------------------------------------------


def settings_for(
    present: Sequence[str],
    target: str | None,
    margin: float | None,
    margins: Mapping[str, float] | None,
    confidence: float,
    claim: str,
    tasks: Sequence[str],
    pools: Mapping[str, Sequence[str]] | None,
    labels: Sequence[str],
    distinct_rows: bool = False,
) -> Settings:
    """Everything that is fixed before the test, checked against the tasks that are ``present``."""
    delta_of(confidence)
    if claim not in list(Claim):
        raise UserError(f"there is no claim {claim!r}", expected=", ".join(Claim), do=nearest(claim, list(Claim)))
    groups = {name: list(members) for name, members in (pools or {}).items()}
    for name, group in groups.items():
        if name in present or not name or not group:
            found = "a task has that name" if name in present else "no name, or no tasks"
            raise UserError(f"the pool {name!r} is not a group", expected="a new name, and its tasks", found=found)
    members = [member for group in groups.values() for member in group]
    for name in [*tasks, *([target] if target else []), *members]:
        if name not in present:
            raise UserError(f"the task {name!r} has no images here", do=nearest(name, present))
    # A list of tasks may hold the pooled ones too, all of them: it is then the whole claim, and no other task is in it.
    both = set(members) & set(tasks)
    if len(set(members)) != len(members) or both not in (set(), set(members)) or target in {*members, *tasks}:
        raise UserError("a task has two parts in the claim", expected="each task once: protected, pooled or the target")
    protected = sorted({*(tasks or present), *members} - {target})
    single = [name for name in protected if name not in set(members)]
    if not protected:
        raise UserError("no protected task is left", found=f"only the target {target!r} has images")
    by_task = margins_for([*single, *groups], margin, margins or {})
    return Settings(by_task, confidence, Claim(claim), target, groups, list(labels), distinct_rows=distinct_rows)


def check_rows(paired: Paired, distinct_rows: bool) -> None:
    """Refuse rows that repeat where no ids tell them apart, and a statement about rows that have ids."""
    inspection = paired.inspection
    if inspection.ids and distinct_rows:
        raise UserError(
            "--distinct-rows and example ids at once",
            do="leave --distinct-rows out: the ids say which rows are different images",
        )
    if inspection.repeats is not None and not inspection.ids and not distinct_rows:
        raise UserError(
            f"rows repeat: {inspection.repeats}",
            expected="each image once: a copy is no further evidence",
            found="no column example_id that would tell images apart",
            do="add example_id, remove the copies, or state with --distinct-rows that each row is another image",
        )


def no_ids(what: str) -> UserError:
    """The error for what needs ids where there are none."""
    return UserError(
        f"{what} needs example ids",
        expected="a column example_id, each id once a task",
        do="add it, or state with --distinct-rows that each row is another image; the certificate will say so",
    )
