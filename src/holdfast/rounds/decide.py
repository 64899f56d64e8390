"""The end of a round: a fixed-sequence test on the sealed images, under the ledger, or a choice on dev images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch.distributed as dist

from holdfast.artifacts import RunFolder, read_json
from holdfast.certify.ledger import Ledger, default_ledger
from holdfast.certify.sealed import (
    Further,
    SealedOutcome,
    SealedPlan,
    certify_candidates,
    check_possible,
    read_sealed_plan,
    write_run_certificate,
)
from holdfast.config import CertifyConfig
from holdfast.errors import HoldfastError, UndecidedError
from holdfast.rounds.candidates import Candidate, choose_on_dev, test_order
from holdfast.runtime import Runtime

OLD, FIRST = "old", "first"  # what is asked for by these names instead of a candidate's


@dataclass(frozen=True)
class Decision:
    """Which candidate is handed back (None: the old model), and on what grounds."""

    shipped: Candidate | None
    verdict: str | None  # certified or undecided; None where no images are sealed, or the look was left for later
    reason: str
    order: tuple[str, ...] = ()  # of the fixed sequence
    told: dict[str, Any] | None = None  # what the certificate may tell
    evidence: tuple[SealedPlan, SealedOutcome, Ledger] | None = field(default=None, repr=False)

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
            "certificate": self.told,
        }


def decide(
    config: CertifyConfig,
    folder: RunFolder,
    candidates: Sequence[Candidate],
    predict: Callable[[Candidate | str], pa.Table],
    runtime: Runtime,
) -> Decision:
    """Ship the last candidate of the sequence that passes, else the old model; on dev images where none are sealed.

    ``predict`` makes predictions of a candidate (or of ``old``, or ``first``) on the sealed images; it is called after
    the look is on record, and no further than the sequence goes.
    """
    if read_json(folder.state)["counts"]["sealed"] == 0 or not config.look:
        chosen = choose_on_dev(candidates)
        grounds = "no images are sealed" if config.look else "the look at the sealed images was left for later"
        said = (
            "it lost nothing on dev images" if chosen else "no candidate gained on the target and lost nothing on dev"
        )
        return Decision(chosen, None, f"{grounds}; {said}")
    plan = read_sealed_plan(folder)
    order = test_order(candidates, plan.settings.margins, bolder=config.bolder)
    names = tuple(one.name for one in order)
    by_name = {one.name: one for one in order}
    ledger = Ledger(config.ledger or default_ledger())
    try:
        check_possible(plan)
        outcome = _look(plan, ledger, names, predict, by_name, runtime, known_to(config.first))
    except UndecidedError as error:
        return Decision(None, "undecided", error.text(), names)
    if outcome.shipped is None:
        return Decision(None, "undecided", "the sealed images did not prove it", names, outcome.told)
    return Decision(
        by_name[outcome.shipped],
        "certified",
        "proven on the sealed images",
        names,
        outcome.told,
        (plan, outcome, ledger),
    )


def _look(
    plan: SealedPlan,
    ledger: Ledger,
    names: tuple[str, ...],
    predict: Callable[[Candidate | str], pa.Table],
    by_name: dict[str, Candidate],
    runtime: Runtime,
    first: list[str] | None,
) -> SealedOutcome:
    """One look, made by the first rank; the others predict their share as long as it asks them to."""

    def asked(name: str) -> pa.Table:
        _tell(name, runtime)
        return predict(by_name.get(name, name))

    further = None if first is None else Further(tuple(first), lambda: asked(FIRST))
    if runtime.world == 1:
        return certify_candidates(plan, ledger, names, lambda: asked(OLD), asked, further)
    result: list[Any] = [None]
    if runtime.is_main:
        try:
            result[0] = certify_candidates(plan, ledger, names, lambda: asked(OLD), asked, further)
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
    said: list[Any] = [name]
    dist.broadcast_object_list(said)
    return said[0]


def known_to(model: Path | None) -> list[str] | None:
    """Classes of the model folder that is to be certified against as well; None where there is none."""
    return None if model is None else [str(one) for one in read_json(model / "model.json")["classes"]]


def write_certificate_of(folder: RunFolder, decision: Decision) -> None:
    """The certificate of a round that was proven, beside its model."""
    if decision.evidence is not None:
        plan, outcome, ledger = decision.evidence
        write_run_certificate(folder, plan, outcome, ledger)
