"""Results of NeMo Evaluator (``nel eval``, 0.3): ``eval-*.json`` bundles with ``results.jsonl`` beside each.

The bundle names the benchmark (``benchmark.name``); a line of ``results.jsonl`` is an attempt: ``problem_idx, repeat,
reward`` and, as the benchmark has them, ``expected_answer``, ``metadata`` and ``scoring_details``. Repeats of a problem
are a group. ``results.yml`` of the evaluation containers has totals only, from which nothing can be paired.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.certify.harness.samples import (
    Asked,
    Log,
    Sample,
    chosen_metric,
    fingerprint,
    json_lines,
    number_of,
    read_json_file,
)
from holdfast.errors import UserError

EXPECTED = "eval-*.json with results.jsonl beside it, as `nel eval` writes them"
METRICS = ("mean_reward", "pass@1")


def read_nemo(path: Path, asked: Asked) -> Log:
    """A bundle, its folder, or a folder with one folder for each benchmark."""
    log = Log(group="problem" if asked.group_field is None else "group")
    for benchmark, bundle in sorted(_bundles(path).items()):
        _read_benchmark(log, benchmark, bundle.parent / "results.jsonl", asked)
    return log


def _bundles(path: Path) -> dict[str, Path]:
    files = [path] if path.is_file() else [*sorted(path.glob("eval-*.json")), *sorted(path.glob("*/eval-*.json"))]
    found: dict[str, Path] = {}
    for file in files:
        value = read_json_file(file, EXPECTED)
        named = value.get("benchmark") if isinstance(value, dict) else None
        if not isinstance(named, dict) or not isinstance(named.get("name"), str):
            raise UserError(f"{file} names no benchmark", expected=EXPECTED)
        # Bundles of one folder would share its results.jsonl, which the last of them wrote.
        other = next(
            (item for name, item in found.items() if name == named["name"] or item.parent == file.parent), None
        )
        if other is not None:
            raise UserError(
                f"{path} holds two results of {named['name']}, or two in one folder",
                expected="one folder for each benchmark",
                found=f"{other} and {file}",
                do="name the folder of one run",
            )
        found[named["name"]] = file
    if not found:
        totals = sorted(path.rglob("results.yml"))
        do = "results.yml has totals only: log samples, and give those (--lm-eval)" if totals else ""
        raise UserError(f"{path} holds no results of NeMo Evaluator", expected=EXPECTED, do=do)
    return found


def _read_benchmark(log: Log, benchmark: str, path: Path, asked: Asked) -> None:
    metric = chosen_metric(asked.metric(benchmark), METRICS, METRICS, benchmark, path)
    for number, line in json_lines(path, EXPECTED):
        where = f"{path}, line {number}"
        if line.get("problem_idx") is None:
            raise UserError(f"{where} has no problem_idx", expected=EXPECTED)
        task, problem = asked.task(benchmark, line, where), f"{benchmark}/{line['problem_idx']}"
        reward = number_of(line.get("reward"), "the reward", where)
        sample = Sample(
            task,
            f"{problem}#{line.get('repeat', 0)}",
            float(reward > 0) if metric == "pass@1" else reward,
            group=problem if asked.group_field is None else asked.group(line, where),
            document=fingerprint(line.get("expected_answer")),
        )
        if not log.add(sample):
            raise UserError(f"{where} repeats problem {line['problem_idx']}, repeat {line.get('repeat', 0)}")
        log.metrics[task] = metric
