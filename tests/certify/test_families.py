"""Images are charged, not sets: whatever is added, dropped or renamed between two queries."""

import multiprocessing
from pathlib import Path

import pytest

from holdfast.certify.families import image_keys
from holdfast.certify.ledger import Budget, Ledger
from holdfast.certify.sealed import Candidates, certify_candidates
from holdfast.certify.sealed_claim import SealedClaim, check_unspent, restricted, sealed_claim
from holdfast.errors import UndecidedError, UserError
from holdfast.files import fingerprint_ids


def images(*names: str) -> dict[str, tuple[str, ...]]:
    """Pictures ``p`` in files ``file-of-p``; ``p!`` is the same picture in another file."""
    return {f"file of {name}": image_keys(f"file of {name}", f"picture {name.rstrip('!')}") for name in names}


def ask(ledger: Ledger, budget: Budget, *names: str, passed: bool = False) -> dict[str, int]:
    """One query about what may be queried of these images; how many were left out, by reason."""
    asked = images(*names)
    fingerprint = fingerprint_ids(asked)
    admitted = ledger.admit(fingerprint, asked)
    with ledger.query(fingerprint, budget, images=asked, admitted=admitted) as query:
        query.close(passed, "new" if passed else None)
    return admitted.counts()


def test_a_set_with_one_more_one_less_or_renamed_images_is_no_new_set(tmp_path: Path) -> None:
    ledger, budget = Ledger(tmp_path), Budget(queries=2)
    assert ask(ledger, budget, "a", "b", "c") == {}
    assert ask(ledger, budget, "b!", "c!", "d") == {}  # the second query of the family, which d joins
    for names in (("a", "b", "c"), ("a",), ("d",), ("a!", "d!")):
        asked = images(*names)
        with (
            pytest.raises(UndecidedError, match="spent"),
            ledger.query(fingerprint_ids(asked), budget, images=asked),
        ):
            pytest.fail("spent images were queried")
        with pytest.raises(UserError, match="spent"):
            ledger.check(fingerprint_ids(asked), budget, images=asked)
    assert ask(ledger, budget, "a", "d", "e", "f") == {"spent": 2}
    assert [family.queries for family in ledger.families()] in ([2, 1], [1, 2])


def test_a_pass_retires_images_of_its_family_that_were_not_in_the_query(tmp_path: Path) -> None:
    ledger, budget = Ledger(tmp_path), Budget(queries=10)
    ask(ledger, budget, "a", "b")
    ask(ledger, budget, "b", "c", passed=True)
    assert ask(ledger, budget, "a", "b", "c", "d") == {"spent": 3}


def test_images_of_two_open_families_are_not_pooled(tmp_path: Path) -> None:
    """Whoever may pool what failed chooses images by their answers."""
    ledger, budget = Ledger(tmp_path), Budget(queries=10)
    ask(ledger, budget, "a", "b", "c")
    ask(ledger, budget, "x", "y")
    assert ask(ledger, budget, "a", "b", "c", "x", "y", "new") == {"of another family": 2}
    assert sorted(family.queries for family in ledger.families()) == [1, 2]


def test_a_set_of_which_only_the_fingerprint_is_on_record(tmp_path: Path) -> None:
    """As earlier versions wrote it: the same set is known again, and nothing is known of its images."""
    ledger, asked = Ledger(tmp_path), images("a", "b")
    with ledger.query(fingerprint_ids(asked), Budget()) as query:
        query.close(False)
    with pytest.raises(UserError, match="spent"):
        ledger.check(fingerprint_ids(asked), Budget(), images=asked)


def test_another_budget_for_a_family_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ask(ledger, Budget(queries=3), "a", "b")
    asked = images("b", "c", "d")
    with pytest.raises(UserError, match="another budget"):
        ledger.check(fingerprint_ids(asked), Budget(queries=5), images=asked)
    with pytest.raises(UserError, match="another budget"):
        ask(ledger, Budget(queries=5), "b", "c", "d")
    assert [family.queries for family in ledger.families()] == [1]


def _race(folder: Path, number: int) -> None:
    asked = images("shared", *(f"own {number} {place}" for place in range(3)))
    try:
        with Ledger(folder).query(fingerprint_ids(asked), Budget(), images=asked) as query:
            query.close(False)
    except UndecidedError:
        pass


def test_of_racing_sets_that_share_an_image_one_alone_is_queried(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_race, args=(tmp_path, number)) for number in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [family.queries for family in Ledger(tmp_path).families()] == [1]


def claim(*numbers: int, target_gain: bool = False) -> SealedClaim:
    examples = [(f"id {number}", "cat" if number % 2 else "owl", f"picture {number}") for number in numbers]
    return sealed_claim([*examples, ("t", "target", "t")], target="target", margin=0.4, target_gain=target_gain)


def test_a_claim_is_tested_on_what_is_left_with_the_count(tmp_path: Path) -> None:
    import pyarrow as pa

    def table(plan: SealedClaim) -> pa.Table:
        rows = [item for item in plan.examples if item.label != "target"]
        return pa.table(
            {
                "example_id": [item.id for item in rows] + ["t"],
                "task": [item.label for item in rows] + ["target"],
                "label": [item.label for item in rows] + ["target"],
                "prediction": [item.label for item in rows] + ["target"],
                "loss": [0.0] * (len(rows) + 1),
                "score": [1.0] * (len(rows) + 1),
            }
        )

    ledger = Ledger(tmp_path)
    first, second = claim(*range(40)), claim(*range(20, 120))
    outcome = certify_candidates(first, ledger, Candidates({"m": "1"}), lambda: table(first), lambda _: table(first))
    assert outcome.passed
    again = certify_candidates(second, ledger, Candidates({"m": "2"}), lambda: table(second), lambda _: table(second))
    assert again.passed
    assert again.reported["sealed"]["left_out"] == {"spent": 21}  # 20 to 39, and the target's
    assert {item["task"]: item["n"] for item in again.reported["tasks"]} == {"cat": 40, "owl": 40}
    assert again.old is not None
    assert len(again.old) == 80
    with pytest.raises(UserError, match="spent"):
        check_unspent(claim(*range(120)), ledger)
    with pytest.raises(UndecidedError, match="no sealed image of owl is left: the others") as refused:
        restricted(claim(*range(120), 121), ledger.admit("", claim(*range(120), 121).keys or {}))
    assert refused.value.do.startswith("add new images of every class to the source")
    with pytest.raises(UndecidedError, match="too few sealed images"):
        check_unspent(claim(*range(120), 120, 121), ledger)


def test_a_query_that_was_killed_is_made_again_with_the_same_images(tmp_path: Path) -> None:
    ledger, asked = Ledger(tmp_path), images("a", "b", "c")
    ask(ledger, Budget(), "c", passed=True)
    fingerprint = fingerprint_ids(asked)
    admitted = ledger.admit(fingerprint, asked)
    with ledger.query(fingerprint, Budget(), images=asked, admitted=admitted, claim="x", run="mine"):
        pass  # no result
    assert ledger.admit(fingerprint, asked, claim="x").ids == admitted.ids == {"file of a", "file of b"}
    assert ledger.check(fingerprint, Budget(), run="mine", images=asked).ids == admitted.ids
    with ledger.query(fingerprint, Budget(), images=asked, admitted=admitted, claim="x", run="mine") as query:
        assert (query.number, query.recorded) == (1, None)
        query.close(True, "new")
    standing = ledger.standing(fingerprint)  # what was asked about is found under its own fingerprint too
    assert standing is not None
    assert (standing.queries, standing.passes) == (1, 1)
