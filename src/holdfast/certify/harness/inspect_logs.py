"""Logs of inspect_ai (log format 2): ``.json``, and ``.eval``, which is a zip of JSON members.

A log has ``status``, ``eval`` (``eval.task`` names the task) and ``samples`` with ``id, epoch, input, target, scores``.
In a ``.eval`` file ``header.json`` holds the first two; ``summaries.json`` lists all samples without their messages,
and older files have them in ``samples/ID_epoch_N.json`` only. Epochs of one sample are a group.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.certify.harness.samples import (
    LARGEST_JSON,
    Asked,
    Log,
    Sample,
    chosen_metric,
    fingerprint,
    number_of,
    read_json_file,
)
from holdfast.errors import UserError

EXPECTED = "a log of inspect_ai: NAME.eval or NAME.json, as `inspect eval` writes it"
VALUES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0, "yes": 1.0, "true": 1.0, "no": 0.0, "false": 0.0}
# Characters of an input that are compared: a summary shortens inputs, and far behind this.
COMPARED = 1000


def read_inspect(path: Path, asked: Asked) -> Log:
    """A log, or a folder with one for each task."""
    log = Log(group="sample" if asked.group_field is None else "group")
    seen: dict[str, Path] = {}
    for file in _files(path):
        header, samples = _read_eval(file) if file.suffix == ".eval" else _read_json(file)
        benchmark = str(header["eval"]["task"])
        if benchmark in seen:
            raise UserError(
                f"{path} holds two logs of {benchmark}",
                expected="one log for each task",
                found=f"{seen[benchmark].name} and {file.name}",
                do="name the log itself, or a folder with one run of one model",
            )
        seen[benchmark] = file
        _read_task(log, benchmark, samples, file, asked)
    return log


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(path.rglob("*.eval"))
    found += [file for file in sorted(path.rglob("*.json")) if _is_log(file)]
    if not found:
        raise UserError(f"{path} holds no logs of inspect_ai", expected=EXPECTED)
    return found


def _is_log(path: Path) -> bool:
    """Folders of logs hold listings and manifests too."""
    value = read_json_file(path, EXPECTED)
    return isinstance(value, dict) and {"eval", "samples"} <= set(value)


def _read_json(path: Path) -> tuple[dict[str, Any], list[Any]]:
    value = read_json_file(path, EXPECTED)
    header = _header(value, path)
    return header, _list(header.get("samples"), path)


def _read_eval(path: Path) -> tuple[dict[str, Any], list[Any]]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
            if "header.json" not in names:
                raise UserError(
                    f"{path} has no header.json: its run did not end",
                    expected=EXPECTED,
                    do="finish it: inspect eval-retry",
                )
            header = _header(_member(archive, "header.json"), path)
            for name in ("summaries.json", "summary.json"):
                if name in names:
                    return header, _list(_member(archive, name), path)
            found = sorted(name for name in names if name.startswith("samples/") and name.endswith(".json"))
            return header, [_member(archive, name) for name in found]
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise UserError(f"{path} cannot be read as a zip", expected=EXPECTED, found=str(error)[:200]) from error
    except NotImplementedError as error:  # a compression that this Python lacks, such as zstd before 3.14
        raise UserError(
            f"{path} cannot be unpacked by this Python", found=str(error)[:200], do="inspect log convert --to json"
        ) from error
    except (ValueError, RecursionError, RuntimeError) as error:  # no JSON, or encrypted
        raise UserError(f"{path} is no log of inspect_ai", expected=EXPECTED, found=str(error)[:200]) from error


def _member(archive: zipfile.ZipFile, name: str) -> Any:
    if archive.getinfo(name).file_size > LARGEST_JSON:
        raise ValueError(f"{name} is larger than {LARGEST_JSON:,} bytes")
    with archive.open(name) as file:
        content = file.read(LARGEST_JSON + 1)
    if len(content) > LARGEST_JSON:
        raise ValueError(f"{name} is larger than it says")
    return json.loads(content)


def _header(value: Any, path: Path) -> dict[str, Any]:
    """The parts of a log before its samples, of a run that ended well."""
    task = (
        value.get("eval", {}).get("task") if isinstance(value, dict) and isinstance(value.get("eval"), dict) else None
    )
    if not isinstance(task, str):
        raise UserError(f"{path} is no log of inspect_ai", expected=EXPECTED, found="no eval.task")
    if value.get("status") != "success":
        raise UserError(
            f"{path} is the log of a run that did not end",
            expected="status success",
            found=f"status {value.get('status')}",
            do="finish it: inspect eval-retry",
        )
    return value


def _list(value: Any, path: Path) -> list[Any]:
    if not isinstance(value, list):
        raise UserError(f"{path} holds no samples", expected=EXPECTED, do="log samples too (--log-samples)")
    return value


def _read_task(log: Log, benchmark: str, samples: list[Any], path: Path, asked: Asked) -> None:
    unscored = [item for item in samples if not isinstance(item, dict) or not _scores(item)]
    if unscored or not samples:
        raise UserError(
            f"{len(unscored)} of {len(samples)} samples of {path} have no score",
            expected="a score for every sample: those that failed are not a random part of them",
            do="score them (`inspect score`), or repeat what failed (`inspect eval-retry`)",
        )
    names = sorted(set.intersection(*(set(_scores(item)) for item in samples)))
    wanted = asked.metric(benchmark)
    scorer = chosen_metric(None if wanted is None else _scorer(wanted, names), names, (), benchmark, path)
    for item in samples:
        where = f"the sample {item.get('id')!r} of {path}"
        document = item.get("metadata") or {}
        task = asked.task(benchmark, document, where)
        identity = f"{benchmark}/{item.get('id')}"
        sample = Sample(
            task,
            f"{identity}#{item.get('epoch', 1)}",
            _value(_scores(item)[scorer], scorer, wanted, where),
            group=identity if asked.group_field is None else asked.group(document, where),
            document=fingerprint(_text(item.get("input"))[:COMPARED], item.get("target")),
        )
        if not log.add(sample):
            raise UserError(f"{where} and epoch {item.get('epoch', 1)} stands there twice", expected=EXPECTED)
        log.metrics[task] = wanted or scorer


def _scores(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Scores by scorer; logs of the first versions have a single one."""
    scores = sample.get("scores") or ({"score": sample["score"]} if sample.get("score") else {})
    return scores if isinstance(scores, dict) else {}


def _scorer(wanted: str, names: list[str]) -> str:
    """``SCORER``, or ``SCORER.KEY`` where a scorer gives several values."""
    return wanted if wanted in names else wanted.rpartition(".")[0] or wanted


def _value(score: Any, scorer: str, wanted: str | None, where: str) -> float:
    value = score.get("value") if isinstance(score, dict) else score
    if isinstance(value, dict):
        key = (wanted or "").removeprefix(f"{scorer}.") if wanted != scorer else ""
        if key not in value:
            raise UserError(
                f"the scorer {scorer} of {where} gives several values",
                found=", ".join(map(str, value)),
                do=f"name one: --metric {scorer}.{next(iter(value), 'KEY')}",
            )
        value = value[key]
    if isinstance(value, str):
        value = VALUES.get(value, VALUES.get(value.lower(), value))
    return number_of(value, f"the score {scorer}", where)


def _text(value: Any) -> str:
    """An input as words: a text, or the text of messages; a summary has neither its line breaks nor its images."""
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, list):
        return " ".join(filter(None, (_text(item) for item in value)))
    if isinstance(value, dict):
        return _text(value.get("content", value.get("text", "")))
    return ""
