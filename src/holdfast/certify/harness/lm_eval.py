"""Logs of ``lm_eval --log_samples`` (lm-evaluation-harness 0.4.3 and later): ``samples_TASK_DATE.jsonl``.

A line is a document under a filter: ``doc_id, doc, target, arguments, resps, filtered_resps, doc_hash, prompt_hash,
target_hash``, since 0.4.8 ``filter`` and ``metrics`` too, and the value of every metric under its own name. A document
is known by its ``doc_hash`` and ``target_hash``; ``prompt_hash`` is what the model was shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.certify.harness.samples import Asked, Log, Sample, chosen_metric, json_lines, number_of
from holdfast.errors import UserError

EXPECTED = "samples_TASK_DATE.jsonl as `lm_eval --log_samples --output_path FOLDER` writes it"
# Fields of a line that are no metric.
FIELDS = frozenset(
    {
        *("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics", "scores_per_repeat"),
        *("doc_hash", "prompt_hash", "target_hash"),
    }
)
PREFERRED = ("exact_match", "acc", "pass@1", "mc1", "f1")
_NAME = re.compile(r"samples_(?P<task>.+?)(?:_\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d[\d.]*)?\.jsonl")


def read_lm_eval(path: Path, asked: Asked) -> Log:
    """A file of samples, or a folder with one for each task."""
    log = Log()
    for task, file in sorted(_files(path).items()):
        _read_task(log, task, file, asked)
    return log


def _files(path: Path) -> dict[str, Path]:
    files = [path] if path.is_file() else sorted(path.rglob("samples_*.jsonl"))
    if not files:
        raise UserError(
            f"{path} holds no samples of lm-eval", expected=EXPECTED, do="run lm_eval again with --log_samples"
        )
    found: dict[str, Path] = {}
    for file in files:
        match = _NAME.fullmatch(file.name)
        task = match["task"] if match else file.stem
        if task in found:
            raise UserError(
                f"{path} holds two runs of {task}",
                expected="one file for each task",
                found=f"{found[task].relative_to(path)} and {file.relative_to(path)}",
                do="name the file itself, or a folder with one run of one model",
            )
        found[task] = file
    return found


def _read_task(log: Log, benchmark: str, file: Path, asked: Asked) -> None:
    """One line a document and filter; of a document that the benchmark holds twice the first is kept."""
    lines = list(json_lines(file, EXPECTED))
    if not lines:
        raise UserError(f"{file} holds no samples", expected=EXPECTED)
    metric, of_filter = _metric(benchmark, [line for _, line in lines], asked.metric(benchmark), file)
    repeated = 0
    for number, line in lines:
        if of_filter is not None and line.get("filter", of_filter) != of_filter:
            continue
        where = f"{file}, line {number}"
        task = asked.task(benchmark, line.get("doc"), where)
        sample = Sample(
            task,
            f"{_hash(line, 'doc_hash', where)}-{_hash(line, 'target_hash', where)}",
            number_of(line.get(metric), f"the metric {metric}", where),
            group=asked.group(line.get("doc"), where),
            prompt=str(line.get("prompt_hash", "")),
        )
        repeated += not log.add(sample)
        log.metrics[task] = metric if of_filter in (None, "none") else f"{metric},{of_filter}"
    if repeated:
        log.warnings.append(f"{repeated} documents of {benchmark} repeat earlier ones, and count once")


def _hash(line: Mapping[str, Any], name: str, where: str) -> str:
    value = line.get(name)
    if not isinstance(value, str) or not value:
        raise UserError(
            f"{where} has no {name}", expected=EXPECTED, do="log the samples with lm-evaluation-harness 0.4.3 or later"
        )
    return value[:16]


def _metric(task: str, lines: list[dict[str, Any]], wanted: str | None, file: Path) -> tuple[str, str | None]:
    """The metric and, where the lines name filters, the filter: ``exact_match,strict-match`` as lm-eval writes it."""
    first = lines[0]
    listed = first.get("metrics")
    known = [str(name) for name in listed] if isinstance(listed, list) else [key for key in first if key not in FIELDS]
    filters = sorted({str(line["filter"]) for line in lines if "filter" in line})
    name, _, of_filter = (wanted or "").partition(",")
    if of_filter and of_filter not in filters:
        raise UserError(f"{task} has no filter {of_filter!r} ({file})", found=f"filters: {', '.join(filters)}")
    if not of_filter and len(filters) > 1:
        metric = chosen_metric(name or None, known, PREFERRED, task, file)
        raise UserError(
            f"which filter of {task}?",
            expected="one that was fixed before the models were compared",
            found=", ".join(filters),
            do=f"name it: --metric {task}={metric},{filters[0]}",
        )
    metric = chosen_metric(name or None, known, PREFERRED, task, file)
    return metric, of_filter or (filters[0] if filters else None)
