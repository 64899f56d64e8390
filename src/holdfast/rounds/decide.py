"""The end of a round: a fixed-sequence test on the sealed images, under the ledger, or a choice on dev images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch.distributed as dist

from holdfast.artifacts import RunFolder
from holdfast.candidates.chance import SealedTest
from holdfast.candidates.select import (
    Candidate,
    WithoutTraining,
    best_candidate,
    choose_on_dev,
    rank_for_testing,
    weigh_training,
    with_chances,
)
from holdfast.certify.forecast import Forecast
from holdfast.certify.ledger import Ledger
from holdfast.certify.round_plan import forecast_survey
from holdfast.certify.sealed import Candidates, ExtraBaseline, SealedOutcome, certify_candidates, write_run_certificate
from holdfast.certify.sealed_claim import (
    ClaimedSettings,
    SealedClaim,
    check_possible,
    check_readable,
    check_unspent,
    claim_of,
    ledger_of,
    read_sealed_claim,
)
from holdfast.config import CertifyConfig, RoundConfig
from holdfast.data.round import LabelledSet, RoundData
from holdfast.data.survey import Survey
from holdfast.errors import HoldfastError, UndecidedError, UserError
from holdfast.files import read_json
from holdfast.runtime import Runtime

OLD, FIRST = "old", "first"  # what is asked for by these names instead of a candidate's


@dataclass(frozen=True)
class Decision:
    """Which candidate is handed back (None: the old model), and on what grounds."""

    shipped: Candidate | None
    verdict: str | None  # certified or undecided; None where no images are sealed, or the test was left for later
    reason: str
    order: tuple[str, ...] = ()  # of the fixed sequence
    reported: dict[str, Any] | None = None  # what the certificate may tell
    evidence: tuple[SealedClaim, SealedOutcome, Ledger] | None = field(default=None, repr=False)

    @property
    def certified(self) -> bool:
        """Whether the sealed images proved the claim."""
        return self.verdict == "certified"

    def to_json(self) -> dict[str, Any]:
        """As it stands in ``result.json``."""
        return {
            "kept_old": self.shipped is None,
            "chosen": self.shipped.name if self.shipped else None,
            "verdict": self.verdict,
            "reason": self.reason,
            "order": list(self.order),
            "certificate": self.reported,
        }


def check_budget(
    config: RoundConfig, root: Path, sealed: Sequence[tuple[str, str, str]], run: str, resumed: bool
) -> SealedClaim | None:
    """Ask the ledger before anything is trained which sealed examples (id, class, picture) may be queried.

    None where no image is sealed, or none is tested.
    """
    if not sealed or not config.certify.test_sealed:
        return None
    plan = claim_of(ClaimedSettings(config.certify, config.candidates, config.task), sealed)
    return check_unspent(plan, ledger_of(config.certify, root), run=run, resumed=resumed)


@dataclass(frozen=True)
class PlanCheck:
    """What is done with the forecast of a round before it is trained: shown, and refused below a chance."""

    require_chance: float = 0.0
    show: Callable[[Forecast], None] | None = None
    show_refit: Callable[[WithoutTraining], None] | None = None  # the best candidate that needs no training

    def __call__(self, config: RoundConfig, surveyed: Survey, unspent: SealedClaim | None) -> None:
        """Make the forecast of a round that will end with a test on sealed images."""
        asked = self.require_chance > 0.0 or self.show is not None
        if not asked or not surveyed.sealed or not config.certify.test_sealed:
            return
        claimed = ClaimedSettings(config.certify, config.candidates, config.task)
        found = forecast_survey(claimed, surveyed, unspent)
        if self.show is not None:
            self.show(found)
        if found.chance < self.require_chance:
            raise _too_unlikely(found, self.require_chance)


NO_PLAN = PlanCheck()  # what a round in Python is begun with


def _too_unlikely(found: Forecast, required: float) -> UserError:
    weakest = found.weakest
    claim = "a gain" if weakest.is_target else f"a margin of {100 * weakest.margin:g} points"
    best = found.advice[0] if found.advice else None
    advice = "" if best is None else f"{best.text} (a chance of {100 * best.chance:.0f} %); "
    return UserError(
        f"this round would probably prove nothing: it passes with a chance of {100 * found.chance:.0f} %",
        expected=f"a chance of at least {100 * required:.0f} %",
        found=f"{weakest.images} sealed images of {weakest.task}, the least likely to pass: they show {claim} with a "
        f"chance of {100 * weakest.chance:.0f} %",
        do=f"{advice}`holdfast plan ROUND.toml` shows every class and what else would help; `holdfast develop "
        "--anyway` goes on all the same. Nothing was trained, and no query was spent",
    )


def tests_sealed(config: CertifyConfig, folder: RunFolder) -> bool:
    """Whether the round ends with a test on sealed images."""
    return config.test_sealed and read_json(folder.state)["counts"]["sealed"] > 0


def gain_level(config: CertifyConfig, folder: RunFolder) -> float | None:
    """The level at which dev images must show the target's gain; None where there are sealed images to show it."""
    return None if read_json(folder.state)["counts"]["sealed"] > 0 else 1.0 - config.confidence


def scored(config: RoundConfig, folder: RunFolder, candidates: Sequence[Candidate], ledger: Ledger) -> list[Candidate]:
    """The candidates with the chance of each: to pass on the sealed images or, without these, to keep every class."""
    return with_chances(candidates, sealed_test(config, folder, candidates, ledger))


def sealed_test(config: RoundConfig, folder: RunFolder, candidates: Sequence[Candidate], ledger: Ledger) -> SealedTest:
    """What the round's candidates are to pass, on those sealed images that the ledger leaves."""
    if tests_sealed(config.certify, folder):
        run = str(read_json(folder.state)["fingerprint"])
        return test_of(check_unspent(read_sealed_claim(folder), ledger, run=run, resumed=True))
    return SealedTest({}, claimed_margins(config, folder, candidates), 1.0 - config.certify.confidence)


def claimed_margins(config: RoundConfig, folder: RunFolder, candidates: Sequence[Candidate]) -> dict[str, float]:
    """The margin of every protected class."""
    if tests_sealed(config.certify, folder):
        return dict(read_sealed_claim(folder).settings.margins)
    dev = candidates[0].dev
    return config.certify.margins_of(name for name in dev.tasks if name != dev.target)


def best_of(config: RoundConfig, folder: RunFolder, candidates: Sequence[Candidate]) -> Candidate:
    """The candidate that the rule would take of these; they are :func:`scored`."""
    margins = claimed_margins(config, folder, candidates)
    return best_candidate(candidates, margins, must_gain=config.certify.target_gain)


def without_training(config: RoundConfig, folder: RunFolder, candidates: Sequence[Candidate]) -> WithoutTraining:
    """The best of the candidates that need no training, and whether it is enough; they are :func:`scored`."""
    return weigh_training(
        best_of(config, folder, candidates),
        claimed_margins(config, folder, candidates),
        least_chance=config.candidates.least_chance,
        gain_level=gain_level(config.certify, folder),
    )


def test_of(claim: SealedClaim) -> SealedTest:
    """The test that a claim about sealed images makes of a candidate."""
    target, units = claim.settings.target, claim.units
    return SealedTest(units, claim.settings.margins, claim.budget.level, None if target is None else units[target])


def to_test(config: RoundConfig, folder: RunFolder, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that are tested, in the order of the sequence; without sealed images the one that ships, if any.

    From dev data alone, and fixed before the sealed images are opened. ``candidates`` are :func:`scored`.
    """
    margins = claimed_margins(config, folder, candidates)
    if tests_sealed(config.certify, folder):
        chosen = config.candidates
        return rank_for_testing(
            candidates,
            margins,
            least_chance=chosen.least_chance,
            test_more_candidates=chosen.test_more_candidates,
            must_gain=config.certify.target_gain,
        )
    best = choose_on_dev(candidates, margins, gain_level(config.certify, folder))
    return [] if best is None else [best]


def not_queried(config: RoundConfig, folder: RunFolder, candidates: Sequence[Candidate]) -> Decision:
    """The end of a round with no candidate that is worth a query of its sealed set."""
    best = best_of(config, folder, candidates)
    if config.certify.target_gain and best.dev.target_gain <= 0:
        grounds = "no candidate gained on the target"
    else:
        grounds = (
            f"the best candidate would pass with a chance of {100 * (best.chance or 0.0):.0f} %, below "
            f"candidates.least_chance = {config.candidates.least_chance:g}"
        )
    return Decision(None, "undecided", f"{grounds}; the sealed set was not queried and stays unspent")


def decide(
    config: CertifyConfig,
    folder: RunFolder,
    tested: Sequence[Candidate],
    models: Mapping[str, str],
    predict: Callable[[Candidate | str], pa.Table],
    runtime: Runtime,
    ledger: Ledger,
    first: list[str] | None,
) -> Decision:
    """Ship the last of the ``tested`` candidates that passes, else the old model.

    ``models`` holds their fingerprints. ``predict`` makes predictions of a candidate (or of ``old``, or ``first``) on
    the sealed images; it is called after the query is on record, and no further than the sequence goes. ``first`` are
    the classes of a first model that candidates must hold up against as well.
    """
    if not tests_sealed(config, folder):
        alone = gain_level(config, folder) is not None
        grounds = "no images are sealed" if alone else "the test on the sealed images was left for later"
        if not tested:
            gained = "gained more on the target than chance explains" if alone else "gained on the target"
            return Decision(None, None, f"{grounds}; on dev images no candidate {gained} and kept every margin")
        return Decision(tested[0], None, f"{grounds}; on dev images every class kept its margin")
    plan = read_sealed_claim(folder)
    names = tuple(candidate.name for candidate in tested)
    by_name = {candidate.name: candidate for candidate in tested}
    run = str(read_json(folder.state)["fingerprint"])
    try:
        check_possible(plan)
        outcome = _query(plan, ledger, Candidates(models, run), predict, by_name, runtime, first)
    except UndecidedError as error:
        return Decision(None, "undecided", error.text(), names)
    if outcome.shipped is None:
        reason = "the sealed images did not prove it"
        return Decision(None, "undecided", reason, names, outcome.reported, (plan, outcome, ledger))
    return Decision(
        by_name[outcome.shipped],
        "certified",
        "proven on the sealed images",
        names,
        outcome.reported,
        (plan, outcome, ledger),
    )


def _query(
    plan: SealedClaim,
    ledger: Ledger,
    candidates: Candidates,
    predict: Callable[[Candidate | str], pa.Table],
    by_name: dict[str, Candidate],
    runtime: Runtime,
    first: list[str] | None,
) -> SealedOutcome:
    """One query, made by the first rank; the others predict their share as long as it asks them to."""

    def asked(name: str) -> pa.Table:
        _tell(name, runtime)
        return predict(by_name.get(name, name))

    further = None if first is None else ExtraBaseline(tuple(first), lambda: asked(FIRST))
    if runtime.world == 1:
        return certify_candidates(plan, ledger, candidates, lambda: asked(OLD), asked, further)
    result: list[Any] = [None]
    if runtime.is_main:
        try:
            result[0] = certify_candidates(plan, ledger, candidates, lambda: asked(OLD), asked, further)
        except HoldfastError as error:  # the other ranks must hear of it, or they would wait for ever
            result[0] = error
        _tell(None, runtime)
    else:
        while (name := _tell("", runtime)) is not None:
            predict(by_name.get(name, name))
    dist.broadcast_object_list(result)
    if isinstance(result[0], HoldfastError):
        raise result[0]
    return result[0]


def _tell(name: str | None, runtime: Runtime) -> str | None:
    """What the first rank says, on every rank."""
    if runtime.world == 1:
        return name
    words: list[Any] = [name]
    dist.broadcast_object_list(words)
    return words[0]


def known_to(model: Path | None) -> list[str] | None:
    """Classes of the model folder that is to be certified against as well; None where there is none."""
    return None if model is None else [str(name) for name in read_json(model / "model.json")["classes"]]


def write_certificate_of(folder: RunFolder, decision: Decision) -> None:
    """The certificate of a round that was proven, beside its model; of any retired set, predictions of its images."""
    if decision.evidence is not None:
        plan, outcome, ledger = decision.evidence
        write_run_certificate(folder, plan, outcome, ledger)


def open_sealed(data: RoundData, claim: SealedClaim) -> LabelledSet:
    """The sealed images, read and decoded; one that cannot be is an error that costs no query."""
    examples = data.open_sealed()
    check_readable(claim, examples.ids)
    for start in range(0, len(examples), 1024):
        examples.images(slice(start, start + 1024))
    return examples
