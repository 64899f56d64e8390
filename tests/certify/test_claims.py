"""Claims, corrections, verdicts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.stats.multitest import multipletests

from holdfast.certify.claims import Claim, Counts, Verdict, delta_of, evaluate
from holdfast.certify.corrections import bonferroni, holm, hommel, lemma_one_allowance
from holdfast.certify.exact.score_test import p_value
from holdfast.certify.report import report

probability = st.floats(0.0, 1.0)


@given(st.lists(probability, min_size=1, max_size=12))
@settings(max_examples=150, deadline=None)
def test_corrections_are_those_of_statsmodels(p: list[float]) -> None:
    for ours, name in ((bonferroni, "bonferroni"), (hommel, "hommel")):
        assert ours(p) == pytest.approx(multipletests(p, method=name)[1], abs=1e-12)


@given(st.lists(probability, min_size=1, max_size=12))
@settings(max_examples=15, deadline=None)  # statsmodels takes 70 ms for each
def test_holm_is_that_of_statsmodels(p: list[float]) -> None:
    assert holm(p) == pytest.approx(multipletests(p, method="holm")[1], abs=1e-12)


def test_lemma_one_is_vacuous_and_says_so() -> None:
    assert lemma_one_allowance(1000, 5, 0.05) == pytest.approx(2 * np.sqrt(np.log(200) / 2000))
    assert lemma_one_allowance(1000, 5, 0.05, complexity=1.0) > lemma_one_allowance(1000, 5, 0.05)
    assert lemma_one_allowance(1000, 5, 0.05) > 0.1


GOOD = Counts("good", 1000, 12, 8)
SMALL = Counts("small", 20, 0, 1)
BAD = Counts("bad", 1000, 5, 80)
NEAR = Counts("near", 1000, 10, 17)
MARGINS = {"good": 0.02, "small": 0.02, "bad": 0.02, "near": 0.02, "better": 0.02}


def test_three_verdicts() -> None:
    assert evaluate([GOOD], MARGINS, 0.05).verdict is Verdict.CERTIFIED
    assert evaluate([GOOD, SMALL], MARGINS, 0.05).verdict is Verdict.UNDECIDED
    result = evaluate([GOOD, SMALL, BAD], MARGINS, 0.05)
    assert result.verdict is Verdict.REGRESSED
    assert [item.verdict for item in result.tasks] == ["certified", "undecided", "regressed"]


def test_intersection_union_takes_no_correction_and_a_list_does() -> None:
    tasks = [Counts(f"t{k}", 1000, 10, 19) for k in range(6)]
    margins = {item.task: 0.02 for item in tasks}
    together = evaluate(tasks, margins, 0.05)
    assert 0.01 < together.tasks[0].p_value <= 0.05
    assert together.verdict is Verdict.CERTIFIED
    # With one task in the way, the same p-values as a list of retained tasks need their correction.
    apart = evaluate([*tasks, SMALL], {**margins, "small": 0.02}, 0.05)
    assert apart.verdict is Verdict.UNDECIDED
    assert {item.verdict for item in apart.tasks} == {Verdict.UNDECIDED}
    each = evaluate([*tasks, SMALL], {**margins, "small": 0.02}, 0.05, claim=Claim.EACH)
    assert {item.verdict for item in each.tasks} == {Verdict.UNDECIDED}


def test_each_claim_names_itself() -> None:
    words = {claim: evaluate([GOOD, NEAR], MARGINS, 0.05, claim=claim).wording() for claim in Claim}
    assert "every one of the 2 protected tasks" in words[Claim.ALL]
    assert "intersection-union" in words[Claim.ALL]
    assert "Holm" in words[Claim.EACH]
    assert "Hommel" in evaluate([GOOD, NEAR], MARGINS, 0.05, claim=Claim.EACH, disjoint=True).wording()
    assert "Bonferroni" in words[Claim.BOUNDS]
    assert "worst change" in words[Claim.DEVSAFETY]
    assert all("at most 0.05" in text for text in words.values())
    assert "target better rose" in evaluate([GOOD], MARGINS, 0.05, target=Counts("better", 100, 30, 2)).wording()


def test_side_by_side_bounds_are_bonferroni() -> None:
    tasks = [GOOD, NEAR, SMALL, BAD]
    alone = evaluate(tasks, MARGINS, 0.05)
    bounds = evaluate(tasks, MARGINS, 0.05, claim=Claim.BOUNDS)
    quarter = evaluate(tasks, MARGINS, 0.05 / 4)
    for a, b, q in zip(alone.tasks, bounds.tasks, quarter.tasks, strict=True):
        assert b.lower_bound == a.simultaneous_lower_bound == q.lower_bound <= a.lower_bound
    assert alone.devsafety["lower_bound"] == min(item.lower_bound for item in alone.tasks)
    assert alone.devsafety["observed"] == BAD.difference


def test_target_is_one_more_hypothesis() -> None:
    gain, none = Counts("better", 200, 30, 2), Counts("better", 200, 3, 3)
    assert evaluate([GOOD], MARGINS, 0.05, target=gain).verdict is Verdict.CERTIFIED
    missed = evaluate([GOOD], MARGINS, 0.05, target=none)
    assert missed.verdict is Verdict.UNDECIDED
    assert missed.target is not None
    assert missed.target.margin == 0.0
    assert "better" not in [item.counts.task for item in missed.tasks]


def test_pooled_group() -> None:
    rare = [Counts(f"r{k}", 60, 1, 0) for k in range(5)]
    pooled = [GOOD, Counts("rare", 300, 5, 0, tuple(item.task for item in rare))]
    result = evaluate(pooled, {"good": 0.02, "rare": 0.02}, 0.05)
    assert result.verdict is Verdict.CERTIFIED
    assert "rare pools r0 + r1" in result.wording()
    assert (
        evaluate([GOOD, *rare], {"good": 0.02, **{item.task: 0.02 for item in rare}}, 0.05).verdict is Verdict.UNDECIDED
    )


counts = st.integers(1, 400).flatmap(
    lambda n: st.tuples(st.just(n), st.integers(0, min(n, 20)), st.integers(0, 20)).map(
        lambda item: Counts("t", item[0], item[1], min(item[2], item[0] - item[1]))
    )
)


@given(
    st.lists(counts, min_size=1, max_size=4),
    st.sampled_from([0.0, 0.01, 0.02, 0.05]),
    st.sampled_from(list(Claim)),
    st.booleans(),
    st.sampled_from([0.8, 0.95, 0.99]),
)
@settings(max_examples=40, deadline=None)
def test_a_verdict_never_contradicts_the_p_values_beside_it(found, margin, claim, disjoint, confidence) -> None:
    tasks = [Counts(f"t{k}", item.n, item.gained, item.lost) for k, item in enumerate(found)]
    delta = delta_of(confidence)
    result = evaluate(tasks, {item.task: margin for item in tasks}, delta, claim=claim, disjoint=disjoint)
    reported = report(result, confidence=confidence, advise=False)
    for item in reported["tasks"]:
        assert item["p_value"] <= item["p_adjusted"] + 1e-12
        if item["verdict"] == "certified":
            assert item["p_adjusted"] <= delta
            assert item["p_value"] <= delta
        if item["verdict"] == "regressed":
            assert item["p_regressed"] <= delta
            assert item["difference"] < -item["margin"]
        if item["verdict"] == "undecided" and claim in (Claim.ALL, Claim.EACH):
            assert item["p_adjusted"] > delta
            assert item["p_regressed"] > delta
        assert item["simultaneous_lower_bound"] <= item["lower_bound"] <= item["difference"] + 1e-12
    if claim is Claim.ALL:
        assert (reported["verdict"] == "certified") == all(item["p_value"] <= delta for item in reported["tasks"])
    if reported["verdict"] == "certified" and claim in (Claim.BOUNDS, Claim.DEVSAFETY):
        assert reported["devsafety"]["lower_bound"] >= -margin


def test_needed_images() -> None:
    reported = report(
        evaluate([GOOD, SMALL, Counts("close", 1000, 5, 18)], {**MARGINS, "close": 0.02}, 0.05), confidence=0.95
    )
    good, small, close = reported["tasks"]
    assert good["needed"] is None
    assert small["needed"] > 200
    assert close["needed"] > 1000
    # A loss beyond the margin is not cured by images: no number is promised.
    beyond = report(evaluate([Counts("bad", 1000, 2, 24)], MARGINS, 0.05), confidence=0.95)["tasks"][0]
    assert (beyond["verdict"], beyond["needed"]) == ("undecided", None)


def test_many_tasks_over_processes_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.certify.claims.WORTH_A_PROCESS", 0)
    tasks = [Counts(f"t{k}", 100 + k, k, 2) for k in range(6)]
    margins = {item.task: 0.01 for item in tasks}
    assert evaluate(tasks, margins, 0.05, workers=2) == evaluate(tasks, margins, 0.05)


def test_the_claim_names_margins_in_points() -> None:
    result = evaluate([GOOD], {GOOD.task: 0.025}, 0.05)
    assert "loses less accuracy than 2.5 points" in result.wording()
    assert "loses less accuracy than 0.025" in result.wording(in_points=False)


def test_each_distinct_outcome_is_tested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 tasks with 19 outcomes: 19 p-values, and every task has that of its outcome."""
    outcomes = [(300, gained, lost) for gained in range(5) for lost in range(4)][:19]
    everything = [Counts(f"t{k}", *outcomes[k % 19]) for k in range(10_000)]
    calls: list[tuple[int, ...]] = []

    def counted(gained: int, lost: int, n: int, margin: float) -> float:
        calls.append((n, gained, lost))
        return p_value(gained, lost, n, margin)

    monkeypatch.setattr("holdfast.certify.claims.p_value", counted)
    result = evaluate(everything, {item.task: 0.02 for item in everything}, 0.05, disjoint=True)
    assert sorted(calls) == sorted(outcomes)
    for task in result.tasks[:40]:
        counts = task.counts
        assert task.p_value == p_value(counts.gained, counts.lost, counts.n, 0.02)
    # Another margin is another hypothesis.
    calls.clear()
    evaluate([Counts("a", 50, 1, 0), Counts("b", 50, 1, 0)], {"a": 0.1, "b": 0.2}, 0.05)
    assert len(calls) == 2
