"""``holdfast plan ROUND.toml``: the forecast of a round, from its file and the names and hashes of its images.

Nothing is decoded, no sealed picture is opened, and torch is not imported. A group counts as one image: its test needs
up to 1.3 times as many groups where its images all fall together, and fewer where they do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from holdfast.certify.forecast import (
    GOAL,
    LARGEST_SHARE,
    LEAST_TRAINED,
    ExpectedFlips,
    Forecast,
    Stock,
    forecast_claim,
)
from holdfast.certify.sealed_claim import ClaimedSettings, SealedClaim, check_unspent, claim_of, ledger_of
from holdfast.config import DataConfig, RolesConfig, parse, read_toml, upgraded
from holdfast.config.known import check_keys
from holdfast.data.sources.files import split_role
from holdfast.data.survey import Survey, survey


def plan_round(
    path: Path,
    *,
    margin: float | None = None,
    single: Mapping[str, float] | None = None,
    confidence: float | None = None,
    expected: ExpectedFlips | None = None,
    goal: float = GOAL,
) -> Forecast:
    """The forecast of the round in a TOML file; a margin or confidence given here goes before the file's."""
    values, _ = upgraded(read_toml(path))
    check_keys(values, str(path))  # of sections that are not read here too: a misspelt one would be planned without
    claimed = ClaimedSettings.of(values, str(path))
    data = parse(DataConfig, values.get("data") or {}, f"{path} [data]")
    surveyed = survey(data, claimed.task, root=path.parent)
    claim = claim_of(claimed, surveyed.sealed_units, margin=margin, single=single, confidence=confidence)
    if surveyed.sealed and not surveyed.grouped:
        claim = check_unspent(claim, ledger_of(claimed.certify, path.parent), to_query=False)
    return forecast_claim(claim, expected=expected, stock=stock_of(surveyed), goal=goal)


def forecast_survey(claimed: ClaimedSettings, surveyed: Survey, unspent: SealedClaim | None = None) -> Forecast:
    """The forecast of a round whose sources were surveyed; ``unspent`` is what the ledger leaves of its claim."""
    if unspent is None or surveyed.grouped:
        unspent = claim_of(claimed, surveyed.sealed_units)
    return forecast_claim(unspent, stock=stock_of(surveyed))


def stock_of(surveyed: Survey) -> Stock | None:
    """What a larger share could seal; None where the source's own splits say what is sealed, or nothing is left."""
    if surveyed.grouped or any(split_role(split) is not None for split in surveyed.main.column("split")):
        return None
    share = largest_share(surveyed.config.roles)
    if share <= 0.0:
        return None
    images, sealed = Counter(surveyed.assigned.classes), Counter(label for _, label, *_ in surveyed.sealed)
    own = {name: sealed[name] for name, shares in surveyed.config.roles.by_class.items() if shares.sealed is not None}
    now = surveyed.config.roles.sealed
    # A class with a share of its own does not follow the general one.
    return Stock({**images, **own}, share, now if isinstance(now, float) else 0.0)


def largest_share(roles: RolesConfig) -> float:
    """The largest share to seal beside the other roles, with some images left to train on."""
    taken = sum(share for share in (roles.base, roles.dev, roles.test) if isinstance(share, float))
    return round(min(LARGEST_SHARE, 1.0 - taken - LEAST_TRAINED), 2)
