"""What ``init`` chooses can be proven by the images that come out, or the file says what cannot."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest

from holdfast.certify.choose_shares import choose_shares
from holdfast.certify.forecast import forecast
from holdfast.config import SourceConfig
from holdfast.data.init_round import ChosenPlan, Findings, round_text

UNEVEN = {"a": 232, "b": 1160, "c": 500, "d": 700, "e": 300, "t": 400}


def even(count: int) -> dict[str, int]:
    return dict.fromkeys(("a", "b", "c", "d", "t"), count)


def written(images: dict[str, int], plan: ChosenPlan) -> str:
    source = SourceConfig(kind="folder", path=Path("photos"))
    return round_text(Findings(source, images, {"": sum(images.values())}, 0, images), target="t", plan=plan)


@pytest.mark.parametrize(
    "images", [even(60), even(100), even(300), even(1000), UNEVEN], ids=["60", "100", "300", "1000", "uneven"]
)
@pytest.mark.parametrize("margin", [0.02, 0.05])
def test_what_is_written_can_be_proven_or_the_file_says_what_cannot(images: dict[str, int], margin: float) -> None:
    plan = choose_shares(images, "t", proposed="t", margin=margin, confidence=0.95)
    text = written(images, plan)
    values = tomllib.loads(text)
    roles, margins = values["data"]["roles"], values["certify"]["margin"]
    names = [name for name in images if name != "t"]
    own = margins if isinstance(margins, dict) else dict.fromkeys(names, margins)
    assert set(own) == set(names)
    assert min(own.values()) >= margin
    assert roles["dev"] + roles["sealed"] + roles["test"] <= 0.75
    # The draw of a typical folder: a share of every class, by content.
    sealed = {name: round(count * roles["sealed"]) for name, count in images.items()}
    found = forecast(sealed, own, 0.05, target="t")
    assert found.chance >= 0.9 or "CANNOT BE PROVEN RELIABLY" in text
    for task in found.tasks:
        assert task.is_target or task.chance >= 0.9, task


def test_the_chance_holds_for_the_images_that_a_draw_really_gives() -> None:
    plan = choose_shares(UNEVEN, "t", proposed="t", margin=0.05, confidence=0.95)
    own = plan.margin if isinstance(plan.margin, dict) else {name: plan.margin for name in UNEVEN if name != "t"}
    generator = np.random.default_rng(0)
    draws = [{name: int(generator.binomial(n, plan.sealed)) for name, n in UNEVEN.items()} for _ in range(20)]
    chances = [forecast(draw, own, 0.05, target="t").chance for draw in draws]
    assert sum(chance >= 0.9 for chance in chances) >= 18


def test_plenty_of_images_seal_no_more_than_needed_and_keep_the_wish() -> None:
    plan = choose_shares(even(3000), "t", proposed="t", margin=0.05, confidence=0.95)
    assert (plan.sealed, plan.margin) == (0.2, 0.05)
    assert plan.chance is not None
    assert plan.chance >= 0.9


def test_without_a_target_there_is_one_margin_that_suits_every_class() -> None:
    plan = choose_shares(even(100), None, proposed="a", margin=0.02, confidence=0.95)
    assert isinstance(plan.margin, float)
    assert plan.margin > 0.02
