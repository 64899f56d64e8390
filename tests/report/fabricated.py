"""Run folders with results that nobody had to train for: any number of tasks, hostile names, real pictures."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from holdfast.artifacts import PREDICTIONS, RunFolder, write_predictions
from holdfast.candidates.select import Candidate, blocking_task, described, frontier, gain_by_margin
from holdfast.certify.certificate import run_test
from holdfast.certify.ledger import Budget, Ledger
from holdfast.certify.report import report
from holdfast.certify.sealed import Candidates, certify_candidates, write_run_certificate
from holdfast.certify.sealed_claim import read_sealed_claim, sealed_claim
from holdfast.certify.settings import Settings
from holdfast.certify.tables import paired_tables
from holdfast.evaluate.metrics import Comparison, compare
from holdfast.files import fingerprint_json, write_json
from holdfast.rounds.result import comparison_json

HOSTILE = (
    "<script>window.hit=1</script>",
    '"><img src=x onerror="window.hit=2">',
    "'; alert(1); //",
    "a\u202eb&amp;\x07",
    "{{script}}</style><svg onload=window.hit=3>",
)


def pictures(folder: Path, classes: Sequence[str], each: int, seed: int = 0) -> dict[str, list[tuple[str, Path]]]:
    """``each`` noisy pictures a class: content hash and file."""
    random = np.random.default_rng(seed)
    found: dict[str, list[tuple[str, Path]]] = {}
    for number, label in enumerate(classes):
        found[label] = []
        for row in range(each):
            pixels = random.integers(0, 255, (40, 60, 3)).astype(np.uint8)
            pixels[:, :, number % 3] = 200
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "PNG")
            path = folder / f"class{number}" / f"picture {row} <b>&.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.getvalue())
            found[label].append((hashlib.sha256(file.getvalue()).hexdigest(), path))
    return found


def made_up_run(
    root: Path,
    classes: Sequence[str] = ("fog", "rain", "sun", "snow", "night"),
    *,
    each: int = 40,
    drop: float = 0.03,
    gain: float = 0.05,
    steps: Sequence[int] = (10, 20, 30, 40),
    margin: float = 0.3,
    sealed: str = "passed",  # passed, failed, open (not retired), none
    seed: int = 0,
    roles: pa.Table | None = None,
    source: Path | None = None,
) -> Path:
    """Write a finished run; the last class is the target. Returns its folder."""
    random = np.random.default_rng(seed)
    folder = RunFolder.create(root)
    *protected, target = classes
    files = pictures(source, classes, 2 * each) if source is not None else None
    names = _examples(classes, 2 * each, files, random)
    dev, hidden = [rows[:each] for rows in names], [rows[each:] for rows in names]
    old_dev = _predictions(dev, classes, None, 0.1, 0.1, random)
    write_predictions(folder.predictions("old", "dev"), old_dev)
    checkpoints: list[tuple[str, Comparison]] = []
    lines: list[dict[str, Any]] = []
    for number, step in enumerate(steps):
        lines.append(_step(step, protected, random))
        table = _predictions(dev, classes, old_dev, drop * (number + 1) / len(steps), gain, random)
        name = f"step-{step:08d}"
        write_predictions(folder.predictions(name, "dev"), table)
        compared = compare(old_dev, table, target, protected)
        checkpoints.append((name, compared))
        lines.append(
            {
                "step": step,
                "evaluation": {"dev_safety": compared.dev_safety, "target_gain": compared.target_gain},
            }
        )
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    candidates: list[Candidate] = []
    for lam in (0.25, 0.5, 1.0):
        table = _predictions(dev, classes, old_dev, drop * lam, gain * lam, random)
        candidates.append(Candidate(checkpoints[-1][0], lam, compare(old_dev, table, target, protected)))
        write_predictions(folder.predictions(candidates[-1].name, "dev"), table)
    points = [*checkpoints, *((candidate.name, candidate.dev) for candidate in candidates)]
    reported, kept = None, sealed in ("failed", "none")
    chosen = None if kept else candidates[-1]
    if sealed != "none":
        old = _predictions(hidden, classes, None, 0.1, 0.1, random)
        new = _predictions(hidden, classes, old, drop, gain, random)
        reported = _reported(old, new, hidden, target, margin, sealed)
        if sealed != "open":
            write_predictions(folder.predictions("old", "sealed"), old)
            write_predictions(folder.predictions("new", "sealed"), new)
    write_json(folder.config, {"seed": seed, "task": {"target": target, "protected": list(protected)},
                               "method": {"name": "holdfast"},
                               "certify": {"margin": margin, "confidence": 0.95, "target_gain": False,
                                           "ledger": str(root.parent / "ledger")}})  # fmt: skip
    write_json(folder.state, {"status": "done", "version": "0.1.0", "root": str(root.parent), "parent": "sha256:0",
                              "data": "sha256:1", "fingerprint": "sha256:2", "problems": [],
                              "counts": {"dev": each * len(classes), "sealed": each * len(classes)}})  # fmt: skip
    order = [candidate.name for candidate in candidates] if sealed != "none" else []
    gains = {candidate.name: candidate.dev.target_gain for candidate in candidates}
    shown = described(chosen.name if chosen else None, order, gains)
    best = next(candidate for candidate in candidates if candidate.name == shown)
    write_json(
        folder.result,
        {
            "kept_old": kept,
            "chosen": chosen.name if chosen else None,
            "verdict": {"passed": "certified", "open": "certified", "failed": "undecided", "none": None}[sealed],
            "reason": "proven on the sealed images" if not kept else "the sealed images did not prove it",
            "order": order,
            "certificate": reported,
            "target": target,
            "protected": list(protected),
            "candidates": [
                {
                    "name": candidate.name,
                    "step": candidate.step,
                    "lambda": candidate.lam,
                    "dev": comparison_json(candidate.dev),
                }
                for candidate in candidates
            ],
            "dev": comparison_json(best.dev),
            "test": None,
            "frontier": frontier(points),
            "gain_by_margin": gain_by_margin(points),
            "blocked_by": blocking_task(points),
        },
    )
    table = roles if roles is not None else _roles(dev, hidden, classes, files)
    pq.write_table(table, folder.roles)
    return root


def _examples(
    classes: Sequence[str], each: int, files: dict[str, list[tuple[str, Path]]] | None, random: np.random.Generator
) -> list[list[str]]:
    if files is not None:
        return [[identity for identity, _ in files[label]] for label in classes]
    return [[random.bytes(32).hex() for _ in range(each)] for _ in classes]


def _roles(
    dev: list[list[str]],
    hidden: list[list[str]],
    classes: Sequence[str],
    files: dict[str, list[tuple[str, Path]]] | None,
) -> pa.Table:
    places = {identity: str(path) for rows in (files or {}).values() for identity, path in rows}
    rows = [
        {
            "example_id": item,
            "class": label,
            "role": role,
            "source": "made up",
            "locator": places.get(item, f"gone/{item}"),
        }
        for role, groups in (("dev", dev), ("sealed", hidden))
        for label, group in zip(classes, groups, strict=True)
        for item in group
    ]
    return pa.Table.from_pylist(rows)


def _predictions(
    ids: list[list[str]],
    classes: Sequence[str],
    old: pa.Table | None,
    drop: float,
    gain: float,
    random: np.random.Generator,
) -> pa.Table:
    """Without an old table a tenth is wrong; with one, a share of its right answers is lost and of its wrong gained."""
    labels = np.repeat(np.arange(len(classes)), [len(identity) for identity in ids])
    before = labels.copy()
    wrong = random.random(len(labels)) < 0.1
    before[wrong] = random.integers(0, len(classes), int(wrong.sum()))
    if old is not None:
        index = {name: number for number, name in enumerate(classes)}
        before = np.array([index[item] for item in old["prediction"].to_pylist()])
        lost = (before == labels) & (random.random(len(labels)) < drop)
        won = (before != labels) & (random.random(len(labels)) < gain * (labels == len(classes) - 1) * 8 + 0.05)
        before = np.where(lost, (labels + 1 + random.integers(0, len(classes) - 1, len(labels))) % len(classes), before)
        before = np.where(won, labels, before)
    names = np.array(classes, dtype=object)
    flat = [item for group in ids for item in group]
    return pa.table(
        [flat, names[labels], names[labels], names[before], random.random(len(labels)), random.random(len(labels))],
        schema=PREDICTIONS,
    )


def _step(step: int, protected: Sequence[str], random: np.random.Generator) -> dict[str, Any]:
    rise = random.normal(0, 0.1, len(protected))
    named = {
        "h": dict(zip(protected, rise.tolist(), strict=True)),
        "u": dict(zip(protected, (rise / 2).tolist(), strict=True)),
        "weight": dict(zip(protected, np.maximum(rise * 100, 0).tolist(), strict=True)),
    }
    return {"step": step, "objective": -0.1, **named}


def _reported(
    old: pa.Table, new: pa.Table, hidden: list[list[str]], target: str, margin: float, sealed: str
) -> dict[str, Any]:
    examples = list(zip(old["example_id"].to_pylist(), old["label"].to_pylist(), strict=True))
    plan = sealed_claim(examples, target=target, margin=margin, target_gain=False)
    assert isinstance(plan.settings, Settings)
    assert isinstance(plan.budget, Budget)
    passed = sealed in ("passed", "open")
    bit = {"set": plan.fingerprint, "passed": passed, "queries": 1, "queries_left": 0, "passes": int(passed),
           "retired": sealed != "open"}  # fmt: skip
    verdict = "certified" if passed else "undecided"
    if sealed == "open":
        tasks = [{"task": task, "n": plan.images[task], "margin": margin} for task in plan.tasks]
        return {"verdict": verdict, "confidence": 0.95, "claim": "all", "promise": "P", "level": 0.05, "tasks": tasks,
                "target": None, "sealed": bit}  # fmt: skip
    full = report(run_test(paired_tables(old, new, []), plan.settings), confidence=0.95, advise=False)
    return {**full, "verdict": verdict, "sealed": bit}


def certify_made_up_run(root: Path) -> Path:
    """A run whose sealed images are queried for real, under its own ledger: with a model, and a certificate of it."""
    folder = RunFolder(root)
    write_json(folder.model / "model.json", {"fingerprint": "sha256:3", "classes": ["fog"]})
    (folder.model / "weights.bin").write_bytes(root.name.encode())
    claim = read_sealed_claim(folder)
    tables = {name: pq.read_table(folder.predictions(name, "sealed")) for name in ("old", "new")}
    ledger = Ledger(root.parent / "ledger")
    candidates = Candidates({"new": "sha256:3"}, f"sha256:{root.name}")
    outcome = certify_candidates(claim, ledger, candidates, lambda: tables["old"], lambda name: tables[name])
    write_run_certificate(folder, claim, outcome, ledger)
    result = json.loads(folder.result.read_text())
    verdict = "certified" if outcome.passed else "undecided"
    write_json(folder.result, {**result, "verdict": verdict, "certificate": outcome.reported})
    return root


def tampered_runs(run: Path, place: Path) -> Iterator[Path]:
    """Runs that say certified, and of which something was changed."""

    def copy(name: str) -> RunFolder:
        root = place / name / "run"
        shutil.copytree(run.parent / "ledger", root.parent / "ledger")
        return RunFolder(Path(shutil.copytree(run, root)))

    def rewritten(folder: RunFolder, **parts: Any) -> None:
        body = {**json.loads(folder.certificate.read_text()), **parts}
        body.pop("fingerprint")
        write_json(folder.certificate, {**body, "fingerprint": fingerprint_json(body)})

    edited = copy("edited")
    edited.certificate.write_text(edited.certificate.read_text().replace('"confidence": 0.95', '"confidence": 0.99'))
    yield edited.root
    forged = copy("forged")  # with a fingerprint that fits, and numbers that do not come out again
    settings = json.loads(forged.certificate.read_text())["settings"]
    rewritten(forged, settings={**settings, "margins": {**settings["margins"], "fog": 0.01}})
    yield forged.root
    swapped = copy("swapped")
    (swapped.model / "weights.bin").write_bytes(b"others")
    yield swapped.root
    repointed = copy("repointed")  # the certificate names a file that is there, and it is not the model
    (repointed.model / "weights.bin").write_bytes(b"others")
    (repointed.root / "certified").mkdir()
    for path in RunFolder(run).model.iterdir():
        shutil.copy(path, repointed.root / "certified")
    files = json.loads(repointed.certificate.read_text())["files"]
    rewritten(repointed, files={**files, "new model": {**files["new model"], "path": "certified"}})
    yield repointed.root
    claimed = copy("claimed")  # the word alone
    claimed.certificate.unlink()
    yield claimed.root
