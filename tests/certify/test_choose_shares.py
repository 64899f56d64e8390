"""What ``init`` chooses can be proven by the images that come out."""

from __future__ import annotations

import pyarrow as pa
import pytest

from holdfast.certify.choose_shares import LEVELS, MORE_DEV, MOST_NAMED, MOST_OF_TARGET, choose_shares
from holdfast.certify.forecast import forecast
from holdfast.data.catalogue import Catalogue, catalogue_schema
from holdfast.data.init_round import ChosenPlan
from holdfast.data.roles import assign, count_roles
from holdfast.errors import UserError

UNEVEN = {"a": 232, "b": 1160, "c": 500, "d": 700, "e": 300, "t": 400}


def even(count: int, classes: str = "abcdt") -> dict[str, int]:
    return dict.fromkeys(classes, count)


def listed(images: dict[str, int], split: str | None = None) -> Catalogue:
    """A catalogue without any files."""
    rows = [
        {"example_id": f"{label} {number}", "class": label, "split": split, "source": "s", "locator": str(number),
         "reader": 0, "index": number}
        for label, count in images.items() for number in range(count)
    ]  # fmt: skip
    return Catalogue(pa.Table.from_pylist(rows, schema=catalogue_schema()), ())


def with_other_names(images: dict[str, int], lot: str) -> Catalogue:
    """The same catalogue, in which other names draw other roles."""
    table, identity = listed(images).table, catalogue_schema().field("example_id")
    return Catalogue(table.set_column(0, identity, [[f"{name} {lot}" for name in table["example_id"].to_pylist()]]), ())


def chosen(images: dict[str, int], target: str | None = "t", margin: float = 0.05) -> ChosenPlan:
    return choose_shares(listed(images), target, proposed="t", margin=margin, confidence=0.95)


def drawn(images: dict[str, int], plan: ChosenPlan) -> dict[str, dict[str, int]]:
    return count_roles(assign(listed(images), list(images), plan.roles))


def margins_of(images: dict[str, int], plan: ChosenPlan) -> dict[str, float]:
    names = [name for name in images if name != "t"]
    return plan.margin if isinstance(plan.margin, dict) else dict.fromkeys(names, plan.margin)


@pytest.mark.parametrize(
    "images",
    [even(30), even(60), even(100), even(300), even(1000), UNEVEN],
    ids=["30", "60", "100", "300", "1000", "uneven"],
)
@pytest.mark.parametrize("margin", [0.02, 0.05])
def test_every_protected_class_can_prove_its_margin(images: dict[str, int], margin: float) -> None:
    plan = chosen(images, margin=margin)
    own = margins_of(images, plan)
    assert set(own) == set(images) - {"t"}
    assert min(own.values()) >= margin
    found = drawn(images, plan)
    for counts in found.values():
        assert min(counts[role] for role in ("dev", "sealed", "train")) >= 2
    sealed = {name: counts["sealed"] for name, counts in found.items()}
    tested = forecast(sealed, own, 0.05, target="t" if plan.target_gain else None)
    for task in tested.tasks:
        assert task.is_target or task.chance >= 0.9, task
    assert tested.chance >= 0.5  # below that `holdfast develop` would not begin


def test_small_classes_seal_more_and_the_others_stay() -> None:
    images = {**even(2000), "a": 150}
    plan = chosen(images)
    assert set(plan.roles.by_class) == {"a"}
    assert plan.roles.by_class["a"].sealed == LEVELS[-1].sealed > 0.5 > plan.roles.sealed
    without = chosen({name: count for name, count in images.items() if name != "a"})
    assert without.roles.sealed == plan.roles.sealed
    assert margins_of(images, plan)["b"] == 0.05


def test_the_target_keeps_images_to_learn_from() -> None:
    plan = chosen(even(100))
    shares = plan.roles.shares_of("t")
    assert plan.target_gain
    assert shares["sealed"] == LEVELS[MOST_OF_TARGET].sealed < plan.roles.sealed


def test_a_gain_that_too_few_images_could_show_is_not_claimed() -> None:
    plan = chosen(even(30))
    assert not plan.target_gain
    assert plan.roles.shares_of("t")["sealed"] < LEVELS[MOST_OF_TARGET].sealed
    assert "not claimed" in plan.reasons["gain"][0]


def test_plenty_of_images_seal_no_more_than_needed_and_keep_the_wish() -> None:
    plan = chosen(even(3000))
    assert (plan.roles.sealed, plan.roles.by_class, plan.margin) == (0.2, {}, 0.05)
    assert plan.roles.test > 0


def test_many_uneven_classes_are_not_named_one_by_one() -> None:
    images = {f"c{number}": 60 + 40 * number for number in range(60)} | {"t": 1000}
    plan = chosen(images)
    assert len(plan.roles.by_class) <= MOST_NAMED + 1  # and the target


def test_of_many_small_classes_none_is_left_without_images_to_choose_by() -> None:
    """Too many to name draw too few dev images at the level that seals most: they choose by more, and few are named."""
    images = {f"c{number}": 25 for number in range(60)} | {"t": 60}
    for lot in range(2):
        one = with_other_names(images, str(lot))
        plan = choose_shares(one, "t", proposed="t", margin=0.05, confidence=0.95)
        counts = count_roles(assign(one, list(images), plan.roles))
        assert min(found.get(role, 0) for found in counts.values() for role in ("dev", "sealed", "train")) >= 1, lot
        assert len(plan.roles.by_class) <= MOST_NAMED + 1
        assert plan.roles.sealed == LEVELS[-1].sealed


def test_without_a_target_there_is_one_margin_that_suits_every_class() -> None:
    plan = chosen({**even(100), "a": 60}, target=None, margin=0.02)
    assert isinstance(plan.margin, float)
    assert plan.margin > 0.02


def test_sealed_images_of_the_source_are_counted_as_they_are() -> None:
    train, sealed = listed(even(50)), listed(even(40), split="sealed")
    renamed = sealed.table.set_column(
        0, catalogue_schema().field("example_id"), [[f"s{n}" for n in range(len(sealed.table))]]
    )
    renamed = renamed.set_column(5, catalogue_schema().field("locator"), [[f"s{n}" for n in range(len(sealed.table))]])
    both = Catalogue(pa.concat_tables([train.table, renamed]), ())
    plan = choose_shares(both, "t", proposed="t", margin=0.05, confidence=0.95)
    assert plan.roles.sealed == LEVELS[0].sealed  # a larger share would seal nothing more
    assert isinstance(plan.margin, float)
    assert forecast(even(40), dict.fromkeys("abcd", plan.margin), 0.05).chance >= 0.9


def test_given_shares_are_kept() -> None:
    first = chosen(even(100))
    plan = choose_shares(listed(even(400)), "t", proposed="t", margin=0.05, confidence=0.95, roles=first.roles)
    assert plan.roles == first.roles
    assert "tuned with" in plan.reasons["roles"][0]


def test_a_class_that_draws_too_few_dev_images_still_seals_most_of_its_images() -> None:
    images = {**even(60), "a": 30}
    found = 0
    for lot in range(40):
        one = with_other_names(images, str(lot))
        plan = choose_shares(one, "t", proposed="t", margin=0.05, confidence=0.95)
        counts = count_roles(assign(one, list(images), plan.roles))["a"]
        assert min(counts.get(role, 0) for role in ("dev", "sealed", "train")) >= 2
        assert counts["sealed"] >= 10, lot
        assert isinstance(plan.margin, dict)
        assert plan.margin["a"] <= 0.4, lot
        found += plan.roles.shares_of("a")["dev"] == MORE_DEV and plan.roles.shares_of("a")["sealed"] > 0.3
    assert found  # some draw fewer than two dev images at a level that seals more


def test_a_class_that_cannot_fill_its_roles_is_named_before_a_round_is_written() -> None:
    with pytest.raises(UserError, match="'a' has too few images to train, to choose and to judge with") as raised:
        chosen({**even(60), "a": 3})
    assert "add images, or move its folder out of the way" in str(raised.value)
