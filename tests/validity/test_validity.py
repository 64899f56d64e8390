"""The certificate is wrong at most as often as it says: exact for small n, seeded simulation for the rest.

Reduced draws here; in full under `-m slow`, and with all figures by `python benchmarks/validity.py`.
"""

import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks import queries, validity
from holdfast.certify.exact.score_test import p_value
from holdfast.certify.ledger import Budget, Ledger
from holdfast.errors import HoldfastError

DELTA = 0.05


def allowed(draws: int, level: float = DELTA) -> float:
    """level plus four binomial standard deviations."""
    return level + 4 * math.sqrt(level * (1 - level) / draws)


@pytest.mark.parametrize("margin", [0.0, 0.005, 0.02, 0.05])
@pytest.mark.parametrize("n", [1, 5, 20, 43, 100])
def test_worst_false_acceptance_by_enumeration(n: int, margin: float) -> None:
    assert validity.enumerated_false_acceptance(n, margin, points=801) <= DELTA


def test_it_does_certify() -> None:
    # A test that never certifies is no test.
    assert validity.enumerated_false_acceptance(100, 0.02) >= 0.045


def test_false_acceptance_inside_the_null_hypothesis() -> None:
    # The worst case lies on Δ = -ε: nothing further inside is accepted more often.
    n, margin = 43, 0.05
    b, c = (one.ravel() for one in np.meshgrid(np.arange(n + 1), np.arange(n + 1), indexing="ij"))
    b, c = b[b + c <= n], c[b + c <= n]
    chosen = validity.accepted(b, c, n, margin)
    generator = np.random.default_rng(0)
    from scipy.stats import multinomial

    for _ in range(200):
        rates = generator.dirichlet([1, 1, 3])
        if rates[0] - rates[1] > -margin:
            continue
        outcomes = np.stack([b, c, n - b - c], axis=1)[chosen]
        assert multinomial.pmf(outcomes, n, rates).sum() <= DELTA


def test_acceptance_by_threshold_is_acceptance_by_p_value() -> None:
    # `validity.accepted` bisects over T; every single p-value must agree.
    n, margin = 15, 0.05
    for level in (0.05, 0.2):
        outcomes = [(b, c) for b in range(n + 1) for c in range(n + 1 - b)]
        b, c = np.array(outcomes).T
        by_threshold = validity.accepted(b, c, n, margin, level).tolist()
        assert [p_value(*one, n, margin) <= level for one in outcomes] == by_threshold


@pytest.mark.parametrize(
    ("n", "margin", "discordance"), [(500, 0.02, 0.02), (1000, 0.02, 0.05), (1000, 0.0, 0.1), (5000, 0.01, 0.05)]
)
def test_false_acceptance_by_simulation(n: int, margin: float, discordance: float) -> None:
    draws = 20_000
    assert validity.simulated_false_acceptance(n, margin, discordance, draws) <= allowed(draws)


def test_one_bad_task_among_364() -> None:
    draws = 2000
    found = validity.one_bad_task(draws)
    assert found["others all pass"] > 0.9  # otherwise the bad one is not what decides
    assert 0.01 <= found["certified"] <= allowed(draws)


def test_lists_of_retained_tasks_need_their_correction() -> None:
    draws = 150
    found = validity.lists_of_tasks(draws)
    assert found["uncorrected"] == 1.0
    assert found["hommel"] <= allowed(draws)
    assert found["holm"] <= allowed(draws)
    assert found["true entries found"] > 10


def test_twenty_bad_candidates() -> None:
    draws = 4000
    found = validity.bad_candidates(draws)
    assert found["fixed sequence"] <= allowed(draws)
    assert found["any that passes"] > 0.5  # what the sequence protects from


def test_reuse_by_an_attacker() -> None:
    draws = 200
    found = validity.attacker(draws)
    assert found["one bit told, ledger"] <= allowed(draws)
    assert found["scores told, δ/R a round"] > 0.9


def test_an_attacker_cannot_look_more_often_than_the_ledger_allows(tmp_path) -> None:
    ledger, budget = Ledger(tmp_path), Budget(DELTA, queries=5)
    for _ in range(5):
        with ledger.query("sha256:a", budget) as query:
            assert query.level == pytest.approx(DELTA / 5)
            query.close(False)
    with pytest.raises(HoldfastError, match="spent"), ledger.query("sha256:a", budget):
        pass


def test_e_process_watched_after_every_image() -> None:
    draws = 2000
    found = validity.watched_eprocess(draws)
    assert found["at Δ = -ε"] <= allowed(draws)
    assert found["at Δ = 0"] > 0.5


@pytest.mark.slow
def test_in_full() -> None:
    assert max(validity.largest_false_acceptance((1, 5, 20, 43, 100, 200), (0, 0.005, 0.02, 0.05)).values()) <= DELTA
    for n, margin in ((500, 0.02), (1000, 0.02), (5000, 0.01)):
        for discordance in (margin, 0.05, 0.3):
            assert validity.simulated_false_acceptance(n, margin, discordance, 200_000) <= allowed(200_000)
    assert validity.one_bad_task(20_000)["certified"] <= allowed(20_000)
    assert validity.lists_of_tasks(2000)["hommel"] <= allowed(2000)
    assert validity.bad_candidates(20_000)["fixed sequence"] <= allowed(20_000)
    assert validity.attacker(2000)["one bit told, ledger"] <= allowed(2000)
    assert validity.watched_eprocess(20_000)["at Δ = -ε"] <= allowed(20_000)


def test_ten_queries_under_the_ledger_keep_false_certificates_below_delta(tmp_path: Path) -> None:
    draws = 2000
    shares = {policy.name: queries.false_certificates(policy, draws)[-1] for policy in queries.POLICIES}
    free, _, bits, ledger = shares.values()
    assert ledger <= allowed(draws)
    assert min(free, bits) > 3 * queries.DELTA  # what the ledger is there for: without it the attacker wins
    made, different, _ = queries.through_the_command(2, tmp_path)
    assert made >= 2
    assert different == 0
