"""A claim about sealed images, fixed before they are queried: from a round's sections, its examples and the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from holdfast.artifacts import RunFolder
from holdfast.certify.claims import delta_of
from holdfast.certify.exact.score_test import impossible
from holdfast.certify.families import Admitted, image_keys
from holdfast.certify.ledger import Budget, Ledger, default_ledger
from holdfast.certify.settings import PLAIN, Layout, Settings, margins_for
from holdfast.config import CandidatesConfig, CertifyConfig, TaskConfig, parse, upgraded
from holdfast.errors import UndecidedError, UserError
from holdfast.files import fingerprint_ids, fingerprint_json, read_json


class SealedExample(NamedTuple):
    """A sealed image: the id of its file, its class, the hash of its pixels where that is known, and its group."""

    id: str
    label: str
    picture: str = ""
    group: str = ""


@dataclass(frozen=True)
class SealedClaim:
    """A claim about a sealed set, fixed before it is queried."""

    fingerprint: str
    images: dict[str, int]  # by task, the target's included
    settings: Settings
    budget: Budget
    ids: frozenset[str]
    examples: tuple[SealedExample, ...] = ()
    left_out: Mapping[str, int] = field(default_factory=dict[str, int])  # images asked about and not tested, by reason

    @property
    def keys(self) -> dict[str, tuple[str, ...]] | None:
        """What the ledger knows each image by; None where the images are not known one by one."""
        return {item.id: image_keys(item.id, item.picture) for item in self.examples} or None

    @property
    def groups(self) -> dict[str, str]:
        """The group of each image, or its own id; empty where images are independent."""
        if self.settings.layout.group is None:
            return {}
        return {item.id: item.group or item.id for item in self.examples}

    @property
    def units(self) -> dict[str, int]:
        """What the test counts, by task: images, or groups of them."""
        if not self.groups:
            return self.images
        found = Counter(label for label, _ in {(item.label, self.groups[item.id]) for item in self.examples})
        return {task: found[task] for task in self.images}

    @property
    def tasks(self) -> list[str]:
        """Protected tasks."""
        return sorted(self.settings.margins)

    def identity(self, run: str, models: Mapping[str, str], further: Mapping[str, float] | None) -> str:
        """What a query of the set for this claim is known by: the claim, the models it is about, and their order."""
        settings = {**asdict(self.settings), "claim": str(self.settings.claim)}
        claim = {"set": self.fingerprint, "settings": settings, "budget": asdict(self.budget), "first": further}
        return fingerprint_json({**claim, "run": run, "models": list(models.items())})


Example = tuple[str, str] | tuple[str, str, str] | tuple[str, str, str, str]


def sealed_claim(
    examples: Sequence[Example],
    *,
    target: str,
    margin: float | Mapping[str, float],
    single: Mapping[str, float] | None = None,
    confidence: float = 0.95,
    queries: int = 1,
    passes: int = 1,
    candidates: int = 1,
    target_gain: bool = True,
    labels: Sequence[str] = (),
    largest_groups: Mapping[str, float] | None = None,
    equal_groups: bool = False,
) -> SealedClaim:
    """The plan for sealed ``examples`` (example id, class, picture, group); classes but the target are protected.

    ``single`` margins of tasks go before ``margin``. With groups the test is about them: about those of up to
    ``largest_groups`` images a class (larger ones are left out), or, ``equal_groups``, each counted the same.
    """
    if not examples:
        raise UserError("there are no sealed images", do="give them a share: [data.roles] sealed = 0.2")
    known = tuple(SealedExample(*item) for item in examples)
    images = Counter(item.label for item in known)
    protected = sorted(label for label in images if label != target)
    if not protected:
        raise UserError("no protected task has a sealed image", do="seal images of every protected class")
    if target_gain and target not in images:
        raise UserError(
            f"the target {target!r} has no sealed image", do="seal some, or set [certify] target_gain = false"
        )
    own = {**(margin if isinstance(margin, Mapping) else {}), **(single or {})}
    default = None if isinstance(margin, Mapping) else margin
    budget = Budget(delta_of(confidence), queries, passes, candidates)
    settings = Settings(
        margins_for(protected, default, own),
        confidence,
        target=target if target_gain else None,
        labels=list(labels),
        level=budget.level,
        layout=_layout(known, largest_groups or {}, equal_groups),
    )
    ids = frozenset(item.id for item in known)
    kept = {label: n for label, n in images.items() if label != target or target_gain}
    return SealedClaim(fingerprint_ids(ids), kept, settings, budget, ids, known)


def _layout(examples: Sequence[SealedExample], largest: Mapping[str, float], equal: bool) -> Layout:
    """How sealed images are tested: one by one, or in their groups."""
    if not any(item.group for item in examples):
        return PLAIN
    return Layout("group", largest_units={} if equal else dict(sorted(largest.items())), equal_groups=equal)


def restricted(plan: SealedClaim, admitted: Admitted) -> SealedClaim:
    """The claim about those of its images that may be queried; refused where a task has none of them."""
    if len(admitted.ids) == len(plan.ids):
        return plan
    examples = tuple(item for item in plan.examples if item.id in admitted.ids)
    images = Counter(item.label for item in examples)
    missing = sorted(task for task in tested_margins(plan) if not images[task])
    left_out = admitted.counts()
    if missing:
        raise UndecidedError(
            f"no sealed image of {', '.join(missing[:5])}{', …' if len(missing) > 5 else ''} is left: the others were "
            "queried before",
            expected="images that no earlier query was about, in whatever set they were then",
            found=f"{len(admitted.ids)} of {len(plan.ids)} sealed images are left ({_reasons(left_out)})",
            do="add new images of every class to the source, so that some are sealed; no query was spent",
        )
    kept = {task: images[task] for task in plan.images}
    ids = frozenset(item.id for item in examples)
    return replace(plan, fingerprint=fingerprint_ids(ids), images=kept, ids=ids, examples=examples, left_out=left_out)


def _reasons(left_out: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in left_out.items())


def ledger_of(certify: CertifyConfig, root: Path) -> Ledger:
    """The ledger that a round's queries are in; a relative path is relative to the round's file."""
    return Ledger(root / certify.ledger if certify.ledger is not None else default_ledger())


def check_unspent(
    plan: SealedClaim, ledger: Ledger, *, run: str = "", resumed: bool = False, to_query: bool = True
) -> SealedClaim:
    """Refuse beforehand what the ledger would; the claim about those of its images that are not spent.

    With ``to_query=False`` the ledger is only read, and need not be writable.
    """
    admitted = ledger.check(
        plan.fingerprint, plan.budget, run=run, resumed=resumed, images=plan.keys, to_query=to_query
    )
    if plan.keys is None:
        return plan
    left = restricted(plan, admitted)
    if left.left_out:
        check_possible(left)
    return left


def read_sealed_claim(
    run: RunFolder,
    *,
    margin: float | None = None,
    single: Mapping[str, float] | None = None,
    confidence: float | None = None,
) -> SealedClaim:
    """The plan of a run: its sealed examples, and what [certify] of its round says unless it is given here."""
    import pyarrow.parquet as pq

    claimed = ClaimedSettings.of(read_json(run.config), str(run.config))
    if not run.roles.exists():
        raise UserError(f"{run.roles} does not exist", do="the run has not begun; start it with `holdfast develop`")
    wanted = ["example_id", "class", "role", "picture", "group"]  # the last two are not in files of earlier versions
    names = [name for name in wanted if name in pq.read_schema(run.roles).names]
    roles = pq.read_table(run.roles, columns=names).to_pylist()
    sealed = [
        (row["example_id"], row["class"], row.get("picture") or "", row.get("group") or "")
        for row in roles
        if row["role"] == "sealed"
    ]
    largest = largest_groups((row["class"], row.get("group") or "") for row in roles if row["role"] != "sealed")
    return claim_of(claimed, sealed, margin=margin, single=single, confidence=confidence, largest_groups=largest)


def largest_groups(examples: Iterable[tuple[str, str]]) -> dict[str, float]:
    """Class -> images of the largest group, over examples (class, group) that are not sealed.

    The limit of the claim must not depend on the sealed draw: a sealed group that is larger is left out of the claim.
    """
    sizes = Counter((label, group) for label, group in examples)
    largest: dict[str, float] = {}
    for (label, group), size in sizes.items():
        largest[label] = max(largest.get(label, 1.0), float(size) if group else 1.0)
    return largest


@dataclass(frozen=True)
class ClaimedSettings:
    """The sections of a round that say what is claimed about its sealed examples."""

    certify: CertifyConfig
    candidates: CandidatesConfig
    task: TaskConfig

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str) -> ClaimedSettings:
        """From the config of a run."""
        values, _ = upgraded(values)
        return cls(
            parse(CertifyConfig, values.get("certify") or {}, f"{where} [certify]"),
            parse(CandidatesConfig, values.get("candidates") or {}, f"{where} [candidates]"),
            parse(TaskConfig, values.get("task") or {}, f"{where} [task]"),
        )


def claim_of(
    claimed: ClaimedSettings,
    sealed: Sequence[Example],
    *,
    margin: float | None = None,
    single: Mapping[str, float] | None = None,
    confidence: float | None = None,
    largest_groups: Mapping[str, float] | None = None,
) -> SealedClaim:
    """What [certify] and [task] of a round claim about its sealed examples (example id, class, picture, group)."""
    certify, task = claimed.certify, claimed.task
    wanted = {*task.protected, task.target} if task.protected else None
    return sealed_claim(
        [item for item in sealed if wanted is None or item[1] in wanted],
        target=task.target,
        margin=certify.margin if margin is None else margin,
        single=single,
        confidence=certify.confidence if confidence is None else confidence,
        queries=certify.query_budget,
        candidates=_most_candidates(claimed.candidates),
        target_gain=certify.target_gain,
        largest_groups=largest_groups,
        equal_groups=certify.equal_groups,
    )


def _most_candidates(candidates: CandidatesConfig) -> int:
    """How many candidates a query may test: one, or all of them where others follow the safest."""
    if not candidates.test_more_candidates:
        return 1
    return max(1, candidates.largest_number)


def check_possible(plan: SealedClaim) -> None:
    """Say before a query is spent where no outcome of so few images could pass: ((1-ε)/2)^n > level."""
    hopeless = {task: margin for task, margin in tested_margins(plan).items() if _impossible(plan, task, margin)}
    if not hopeless:
        return
    if plan.groups:
        raise UndecidedError(
            f"too few sealed groups: no outcome could certify {', '.join(sorted(hopeless))}",
            do="seal more groups (`holdfast plan --group-size`); no query was spent",
        )
    task, margin = next(iter(hopeless.items()))
    enough = next(n for n in range(1, 10_000) if not impossible(n, margin, plan.budget.level))
    raise UndecidedError(
        f"too few sealed images: no outcome could certify {', '.join(sorted(hopeless))}",
        expected=f"at least {enough} images of {task} before any outcome can pass at level {plan.budget.level:g}, and "
        f"many more for a fair chance (`holdfast plan`)",
        found=f"{plan.images[task]} images of {task}, margin {margin * 100:g} points",
        do="seal more images; no query was spent",
    )


def _impossible(plan: SealedClaim, task: str, margin: float) -> bool:
    if not plan.groups:
        return impossible(plan.images[task], margin, plan.budget.level)
    from holdfast.certify.scores import Measured

    members = [item for item in plan.examples if item.label == task]
    names = sorted({plan.groups[item.id] for item in members})
    codes = np.array([names.index(plan.groups[item.id]) for item in members], dtype=np.int64)
    gains = Measured(plan.settings.layout, np.ones(len(members)), names, codes, None, scored=False)
    counts = gains.counts(task, np.arange(len(members)))
    return counts.p_value(margin, plan.budget.level) > plan.budget.level


def tested_margins(plan: SealedClaim) -> dict[str, float]:
    """The margin of every task that is tested; the target must gain: 0."""
    target = plan.settings.target
    return {**plan.settings.margins, **({target: 0.0} if target else {})}


def check_readable(plan: SealedClaim, ids: Iterable[str]) -> None:
    """Refuse sealed pictures that cannot be read before a query is spent on the others."""
    missing = plan.ids - set(ids)
    if missing:
        raise UserError(
            f"{len(missing)} of {len(plan.ids)} sealed pictures cannot be read",
            expected="every sealed picture, as it was when the roles were shared out",
            found=", ".join(sorted(missing)[:3]) + (", …" if len(missing) > 3 else ""),
            do="restore the files and go on with --resume; no query was spent",
        )
