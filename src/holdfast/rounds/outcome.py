"""How a finished round ended, in the few numbers that people ask for first. From its files alone: no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from holdfast.artifacts import RunFolder
from holdfast.candidates.select import UNTRAINED, described
from holdfast.certify.exact.score_test import p_value
from holdfast.certify.sealed_claim import ClaimedSettings
from holdfast.errors import UndecidedError
from holdfast.files import read_json

_LONGEST = 40  # characters of a class's name in a sentence


@dataclass(frozen=True)
class Deciding:
    """The class that a verdict hung on, on the images that decided."""

    task: str
    role: Literal["sealed", "dev"]
    n: int
    change: float
    margin: float
    p: float | None = None  # of H0: the loss reaches the margin; None where dev images alone decided, without a test
    level: float | None = None  # what p must not exceed
    needed: int | None = None  # images that would decide it, where a number is known
    against_first: bool = False  # against the first model of a project, not against the old one
    must_gain: bool = False  # the target

    @property
    def beyond(self) -> bool:
        """Whether the loss that was seen reaches the margin."""
        return self.change < 0 and self.change <= -self.margin

    def text(self) -> str:
        """``street: -2.4 points on 41 sealed images, margin 5 points``."""
        name = self.task if len(self.task) <= _LONGEST else f"{self.task[: _LONGEST - 1]}…"
        first = " against the first model" if self.against_first else ""
        images = f"{self.n:,} {self.role} image{'' if self.n == 1 else 's'}"
        margin = f"margin {self.margin * 100:g} point{'' if self.margin == 0.01 else 's'}"
        asked = "and it must gain" if self.must_gain else margin
        return f"{name}: {self.change * 100:+.1f} points{first} on {images}, {asked}"

    def test_text(self) -> str:
        """``p = 0.12, at most 0.05 passes``; empty where nothing was tested."""
        if self.p is None or self.level is None:
            return ""
        p = "p < 0.0001" if self.p < 1e-4 else f"p = {self.p:.2g}"
        return f"{p}, at most {self.level:.3g} passes"


@dataclass(frozen=True)
class Outcome:
    """The end of a round: verdict, the candidate it is about, and the class that decided."""

    run: Path
    verdict: str | None  # certified, undecided; None: nothing was tested on sealed images
    kept_old: bool
    candidate: str | None  # handed back, or tested and rejected; None where the old model was all there was
    tested: bool  # whether sealed images were asked about it
    reason: str
    deciding: Deciding | None
    target: str
    target_gain: float
    target_role: Literal["sealed", "dev"]
    sealed: Mapping[str, Any] | None  # the set's standing in the ledger
    sealed_images: int
    test_left: bool  # whether the test on the sealed images was left for later
    training: str = ""  # what it added to candidates that need none, or why it was skipped; empty where there was none

    @property
    def rejected(self) -> bool:
        """Whether a candidate was tested on sealed images and did not pass."""
        return self.tested and self.kept_old


def read_outcome(run: RunFolder, reported: Mapping[str, Any] | None = None) -> Outcome:
    """How a finished run ended; ``reported`` is what a test after the round found, where there was one."""
    settings = ClaimedSettings.of(read_json(run.config), str(run.config))
    sealed_images = int((read_json(run.state).get("counts") or {}).get("sealed", 0))
    ended = outcome_of(run.root, read_json(run.result), settings, reported)
    left = not settings.certify.test_sealed and sealed_images > 0 and not ended.tested and not ended.kept_old
    return replace(ended, sealed_images=sealed_images, test_left=left)


def outcome_of(
    run: Path, result: Mapping[str, Any], settings: ClaimedSettings, reported: Mapping[str, Any] | None = None
) -> Outcome:
    """The same from what ``result.json`` holds."""
    later = reported is not None
    reported = reported if later else result.get("certificate")
    verdict = str(reported["verdict"]) if reported is not None else result["verdict"]
    target = str(result["target"])
    candidates = {str(item["name"]): item.get("dev") for item in result["candidates"]}
    gains = {
        str(item["name"]): float(item["dev"]["target_gain"] if expected is None else expected)
        for item in result["candidates"]
        if item.get("dev")
        for expected in (item.get("expected_gain"),)
    }
    candidate = described(result["chosen"], result.get("order") or (), gains)
    dev = candidates.get(candidate or "") or result["dev"]
    changes = {name: _dev_change(item) for name, item in dev["tasks"].items()}
    full = reported if reported is not None and "devsafety" in reported else None
    on_target = full["target"] if full is not None and isinstance(full.get("target"), Mapping) else None
    if full is not None:
        deciding = _on_sealed(full)
    elif reported is not None:
        deciding = _by_test(changes, settings, target, float(reported["level"]))
    else:
        gain_decides = bool(result["kept_old"]) and result["verdict"] is None
        deciding = _by_change(changes, settings, target, gain_decides=gain_decides)
    return Outcome(
        run=run,
        verdict=verdict,
        kept_old=bool(result["kept_old"]),
        candidate=candidate,
        tested=reported is not None,
        reason=str(result["reason"]),
        deciding=deciding,
        target=target,
        target_gain=float(on_target["difference"] if on_target else changes[target][1]),
        target_role="sealed" if on_target else "dev",
        sealed=reported.get("sealed") if reported is not None else None,
        sealed_images=0,
        test_left=False,
        training=training_skipped(result) or _training(result["candidates"], candidate),
    )


def training_skipped(result: Mapping[str, Any]) -> str:
    """Why a round whose method trains did not; empty where it did, or was not to decide."""
    decided = result.get("training") or {}
    if not decided.get("skipped"):
        return ""
    return f"skipped, as {decided['candidate']} needs none and is enough: {decided['why']}"


def _training(candidates: Sequence[Mapping[str, Any]], shown: str | None) -> str:
    """What the candidate that the round is about has over the best one that needed no training."""
    untrained = [item for item in candidates if not _is_trained(item) and item.get("expected_gain") is not None]
    chosen = next((item for item in candidates if item["name"] == shown), None)
    if not untrained or chosen is None or len(untrained) == len(candidates):
        return ""
    if not _is_trained(chosen):
        return f"added nothing: {chosen['name']}, which needs none, was the best candidate"
    best = max(untrained, key=lambda item: item["expected_gain"])
    more = chosen["dev"]["target_gain"] - best["dev"]["target_gain"]
    return f"{more * 100:+.1f} points on dev images beside {best['name']}, which needs none"


def _is_trained(candidate: Mapping[str, Any]) -> bool:
    return candidate["lambda"] > 0 and candidate.get("step") not in UNTRAINED


def nothing_certified(run: RunFolder) -> UndecidedError:
    """Why a finished run that hands back the old model has nothing to certify or verify, and which candidate failed."""
    ended = read_outcome(run)
    if not ended.rejected or ended.deciding is None:
        return UndecidedError(
            f"the run {run.root} hands back the old model: there is nothing to certify",
            found=ended.reason,
            do="no query was spent now; `holdfast diagnose RUN` says which class stood in the way",
        )
    weakest = ended.deciding
    grounds = f" ({weakest.test_text()})" if weakest.role == "sealed" else "; sealed images are not shown yet"
    return UndecidedError(
        f"the run {run.root} has no certificate: its candidate {ended.candidate} was tested on the sealed images and "
        f"did not pass; the old model is handed back",
        found=f"{weakest.text()}{grounds}",
        do=f"no query was spent now; what happened: holdfast report {run.root}",
    )


def _dev_change(item: Mapping[str, Any]) -> tuple[int, float, int, int]:
    """Images, change of accuracy, gained and lost."""
    change = float(item["new_accuracy"]) - float(item["old_accuracy"])
    return int(item["examples"]), change, int(item["gained"]), int(item["lost"])


def _on_sealed(full: Mapping[str, Any]) -> Deciding:
    """Of a set that may be shown: the class with the largest p-value."""
    rows = [(row, False) for row in full["tasks"]]
    if isinstance(full.get("target"), Mapping):
        rows.append((full["target"], False))
    rows += [(row, True) for row in (full.get("against_first") or {}).get("tasks", [])]
    row, first = max(rows, key=lambda item: (item[0]["p_value"], -item[0]["difference"]))
    return Deciding(
        str(row["task"]),
        "sealed",
        int(row["n"]),
        float(row["difference"]),
        float(row["margin"]),
        float(row["p_value"]),
        float(full["level"]),
        row.get("needed"),
        against_first=first,
        must_gain=row is full.get("target"),
    )


def _hypotheses(
    changes: Mapping[str, tuple[int, float, int, int]], settings: ClaimedSettings, target: str
) -> dict[str, float]:
    """Margin of every class that the claim is about."""
    margins = settings.certify.margins_of(name for name in changes if name != target)
    return {**margins, target: 0.0} if settings.certify.target_gain else margins


def _by_test(
    changes: Mapping[str, tuple[int, float, int, int]], settings: ClaimedSettings, target: str, level: float
) -> Deciding:
    """Of a set that is still sealed nothing is shown: the class that is weakest on dev images."""
    found = [
        Deciding(name, "dev", n, change, margin, p_value(gained, lost, n, margin), level, must_gain=name == target)
        for name, margin in _hypotheses(changes, settings, target).items()
        for n, change, gained, lost in (changes[name],)
    ]
    return max(found, key=lambda item: (item.p, -item.change))


def _by_change(
    changes: Mapping[str, tuple[int, float, int, int]], settings: ClaimedSettings, target: str, *, gain_decides: bool
) -> Deciding | None:
    """Without a test dev images decide: every class must keep its margin there, and the target must gain.

    ``gain_decides``: the old model was kept, which is for want of a gain where every class kept its margin.
    """
    margins = _hypotheses(changes, settings, target)
    n, gain, _, _ = changes[target]
    if gain <= 0:
        return Deciding(target, "dev", n, gain, 0.0, must_gain=True)
    protected = [(change, name) for name, (_, change, _, _) in changes.items() if name != target]
    if not protected:
        return None
    change, name = min(protected)
    if gain_decides and all(loss >= -margins[kept] for loss, kept in protected):
        return Deciding(target, "dev", n, gain, 0.0, must_gain=True)
    return Deciding(name, "dev", changes[name][0], change, margins[name])
