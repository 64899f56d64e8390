"""What trackers are fed with: the metrics of a run, under the same names everywhere, or a certificate alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.artifacts import RunFolder
from holdfast.certify.certificate import read_certificate
from holdfast.evaluate.flips import FlipRates
from holdfast.evaluate.metrics import Comparison
from holdfast.files import read_json
from holdfast.report.content import RunContent, read_run
from holdfast.report.promotion import Evidence, Promotion, promotion_of_certificate, promotion_of_run
from holdfast.report.shapes import read_metrics

RATES = tuple(FlipRates(1, 0, 0, 0).as_json())  # names of the flip rates


@dataclass(frozen=True)
class Tracked:
    """A run or a certificate, as trackers take it."""

    name: str
    history: list[tuple[int, dict[str, float]]]  # step, name -> value
    outcome: dict[str, float]  # the end in single figures; empty of a run that is not finished
    parameters: dict[str, str]
    tags: dict[str, str]
    files: tuple[Path, ...]  # small files to keep beside
    promotion: Promotion | None = None  # where the model is to be registered


def tracked_run(path: Path, *, register: bool = False, evidence: Evidence | None = None) -> Tracked:
    """A run; one that is not finished has no outcome, and nothing to register."""
    folder = RunFolder.open(path)
    content = read_run(path) if folder.result.exists() or register else None
    promotion = promotion_of_run(content, evidence or Evidence()) if content is not None and register else None
    files = tuple(item for item in (folder.config, folder.result, folder.certificate) if item.exists())
    tags = {"holdfast.verdict": (content.verdict if content else None) or "none"}
    return Tracked(
        path.resolve().name,
        list(scalars(folder)),
        {} if content is None else outcome(content),
        parameters(folder),
        tags if content is None else {**tags, "holdfast.target": content.target},
        files,
        promotion,
    )


def tracked_certificate(path: Path, model: Path | None, *, register: bool, evidence: Evidence | None = None) -> Tracked:
    """A certificate of ``holdfast certify --out``, whatever framework made the predictions."""
    certificate = read_certificate(path)
    promotion = promotion_of_certificate(path, model, evidence or Evidence()) if register else None
    reported = certificate["report"]
    return Tracked(
        path.resolve().stem,
        [],
        certificate_outcome(reported),
        flat(certificate["settings"]),
        {"holdfast.verdict": reported["verdict"]},
        (path,),
        promotion,
    )


def scalars(run: RunFolder) -> Iterator[tuple[int, dict[str, float]]]:
    """(step, name -> value) of every record: ``train/objective``, ``train/h/CLASS``, ``dev/target_gain``, …"""
    for record in read_metrics(run.metrics):
        values: dict[str, float] = {}
        if record.get("evaluation") is not None:
            _flatten("dev", record["evaluation"], values)
        else:
            _flatten("train", {name: value for name, value in record.items() if name != "step"}, values)
        yield int(record["step"]), values


def _flatten(prefix: str, value: Any, into: dict[str, float]) -> None:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _flatten(f"{prefix}/{name}", inner, into)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        into[prefix] = float(value)


def outcome(content: RunContent) -> dict[str, float]:
    """The end of a run in single figures, with flip rates; of dev and test images, never of sealed ones."""
    found = {
        "result/certified": float(content.verdict == "certified"),
        "result/kept_old": float(content.kept_old),
        **_compared("result/", content.dev),
    }
    return found if content.test is None else {**found, **_compared("result/test_", content.test)}


def _compared(prefix: str, compared: Comparison) -> dict[str, float]:
    found = {f"{prefix}dev_safety": compared.dev_safety, f"{prefix}target_gain": compared.target_gain}
    found |= {f"{prefix}{name}": value for name, value in _defined(compared.flips).items()}
    for task, change in compared.tasks.items():
        found |= {f"{prefix}{name}/{task}": value for name, value in _defined(change.flips).items()}
    return found


def _defined(rates: FlipRates) -> dict[str, float]:
    return {name: value for name, value in rates.as_json().items() if value is not None}


def certificate_outcome(reported: Mapping[str, Any]) -> dict[str, float]:
    """A certificate in single figures: the one bit, and of what may be shown the rest."""
    found: dict[str, float] = {"result/certified": float(reported["verdict"] == "certified")}
    shown: dict[str, float] = {}
    _flatten("", {name: reported.get(name) for name in ("devsafety", "target", "flips")}, shown)
    names = {"/devsafety/observed": "dev_safety", "/target/difference": "target_gain"}
    for name in RATES:
        names[f"/flips/{name}"] = name
        tasks = [key.split("/", 3)[3] for key in shown if key.startswith("/flips/tasks/") and key.endswith(f"/{name}")]
        names |= {f"/flips/tasks/{task}": f"{name}/{task.removesuffix(f'/{name}')}" for task in tasks}
    return {**found, **{f"result/{name}": shown[key] for key, name in names.items() if key in shown}}


def parameters(run: RunFolder) -> dict[str, str]:
    """The round's settings as flat text."""
    return flat(read_json(run.config))


def flat(settings: Mapping[str, Any]) -> dict[str, str]:
    """Nested settings as flat text: ``certify.margin`` -> ``0.02``."""
    found: dict[str, str] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for name, inner in value.items():
                walk(f"{prefix}.{name}" if prefix else str(name), inner)
        else:
            found[prefix] = str(value)

    walk("", settings)
    return found
