"""Measures against naive versions written with dictionaries and loops."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.artifacts import PREDICTIONS
from holdfast.candidates.select import choose_checkpoint, choose_setting
from holdfast.errors import UserError
from holdfast.evaluate.metrics import (
    changes,
    compare,
    dev_safety_accuracy,
    dev_safety_loss,
    join,
    per_task,
    per_task_accuracy,
    per_task_loss,
    retention_ratio,
    target_gain,
)

Row = tuple[str, str, str, float]  # example id, label, prediction, loss


def table(rows: Sequence[Row]) -> pa.Table:
    columns = [
        [row[0] for row in rows],
        [row[1] for row in rows],
        [row[1] for row in rows],
        [row[2] for row in rows],
        [row[3] for row in rows],
        [0.5] * len(rows),
    ]
    return pa.table(columns, schema=PREDICTIONS)


TASKS = ("clear", "foggy", "partly cloudy", "snowy")


@st.composite
def two_models(draw: st.DrawFn) -> tuple[list[Row], list[Row]]:
    """Predictions of two models on the same examples, at least one of each task, the second in another order."""
    count = draw(st.integers(len(TASKS), 40))
    labels = [*TASKS, *draw(st.lists(st.sampled_from(TASKS), min_size=count - len(TASKS), max_size=count - len(TASKS)))]
    losses = st.floats(0, 20, allow_nan=False)
    models = []
    for _ in range(2):
        rows = [(f"id{i}", label, draw(st.sampled_from(TASKS)), draw(losses)) for i, label in enumerate(labels)]
        models.append(rows)
    random.Random(draw(st.integers(0, 1000))).shuffle(models[1])
    return models[0], models[1]


@settings(max_examples=60, deadline=None)
@given(two_models())
def test_measures_against_naive_versions(models: tuple[list[Row], list[Row]]) -> None:
    old, new = models
    later = {row[0]: row for row in new}
    accuracy: dict[str, float] = {}
    loss: dict[str, float] = {}
    accuracy_change: dict[str, float] = {}
    loss_change: dict[str, float] = {}
    gained: dict[str, int] = {}
    lost: dict[str, int] = {}
    for task in TASKS:
        rows = [row for row in old if row[1] == task]
        accuracy[task] = sum(row[2] == task for row in rows) / len(rows)
        loss[task] = math.fsum(row[3] for row in rows) / len(rows)
        accuracy_change[task] = sum(later[row[0]][2] == task for row in rows) / len(rows) - accuracy[task]
        loss_change[task] = math.fsum(later[row[0]][3] for row in rows) / len(rows) - loss[task]
        gained[task] = sum(row[2] != task and later[row[0]][2] == task for row in rows)
        lost[task] = sum(row[2] == task and later[row[0]][2] != task for row in rows)
    before, after = table(old), table(new)
    assert per_task_accuracy(before) == pytest.approx(accuracy)
    assert per_task_loss(before) == pytest.approx(loss)
    found = changes(before, after)
    assert {task: item.accuracy_change for task, item in found.items()} == pytest.approx(accuracy_change, abs=1e-12)
    assert {task: item.loss_change for task, item in found.items()} == pytest.approx(loss_change, abs=1e-9)
    assert {task: (item.gained, item.lost) for task, item in found.items()} == {
        task: (gained[task], lost[task]) for task in TASKS
    }
    compared = compare(before, after, "foggy")
    protected = [task for task in TASKS if task != "foggy"]
    worst = min(accuracy_change[task] for task in protected)
    assert compared.dev_safety == dev_safety_accuracy(before, after, protected) == pytest.approx(worst, abs=1e-12)
    assert compared.dev_safety_loss == dev_safety_loss(before, after, protected)
    assert compared.dev_safety_loss == pytest.approx(min(-loss_change[task] for task in protected), abs=1e-9)
    assert compared.target_gain == target_gain(before, after, "foggy")
    assert compared.target_gain == pytest.approx(accuracy_change["foggy"], abs=1e-12)
    assert accuracy_change[compared.worst_task] == pytest.approx(worst, abs=1e-12)
    assert compared.safe == (worst > -1e-12)
    assert list(compared.tasks) == [*protected, "foggy"]


def test_as_many_gained_as_lost_is_exactly_safe() -> None:
    """Seven of 49 right before and after: a difference of two rounded quotients could be off by 1e-17."""
    old = [(f"a{i}", "a", "a" if i < 7 else "b", 1.0) for i in range(49)] + [("t", "t", "a", 1.0)]
    new = [(f"a{i}", "a", "a" if i >= 42 else "b", 1.0) for i in range(49)] + [("t", "t", "t", 1.0)]
    compared = compare(table(old), table(new), "t")
    assert compared.dev_safety == 0.0
    assert compared.safe
    assert compared.tasks["a"].lost == 7
    assert compared.target_gain == 1.0


def test_one_table_by_itself() -> None:
    scores = per_task(table([("1", "a", "a", 0.5), ("2", "a", "b", 1.5), ("3", "b", "b", 2.0)]))
    assert (scores["a"].examples, scores["a"].correct, scores["a"].loss) == (2, 1, 1.0)
    assert scores["b"].accuracy == 1.0


def test_tables_of_other_examples_are_refused() -> None:
    old = [("1", "a", "a", 0.1), ("2", "b", "b", 0.1)]
    with pytest.raises(UserError, match="different examples"):
        join(table(old), table(old[:1]))
    with pytest.raises(UserError, match="different examples"):
        join(table(old), table([("1", "a", "a", 0.1), ("3", "b", "b", 0.1)]))
    with pytest.raises(UserError, match="another label"):
        join(table(old), table([("1", "a", "a", 0.1), ("2", "a", "b", 0.1)]))
    with pytest.raises(UserError, match="twice"):
        join(table([*old, old[0]]), table(old))


def test_comparisons_that_make_no_sense() -> None:
    rows = table([("1", "foggy", "foggy", 0.1), ("2", "clear", "clear", 0.1)])
    with pytest.raises(UserError, match="did you mean 'foggy'"):
        compare(rows, rows, "fogy")
    with pytest.raises(UserError, match="no examples of 'snowy'"):
        compare(rows, rows, "foggy", ["clear", "snowy"])
    with pytest.raises(UserError, match="listed as protected"):
        compare(rows, rows, "foggy", ["clear", "foggy"])
    with pytest.raises(UserError, match="no protected task"):
        compare(rows.slice(0, 1), rows.slice(0, 1), "foggy")


safeties = st.sampled_from([-0.2, -0.01, 0.0, 0.01])


@settings(deadline=None)
@given(st.lists(st.tuples(safeties, st.sampled_from([-0.1, 0.0, 0.2, 0.5])), min_size=1, max_size=8))
def test_the_choice_of_a_checkpoint(candidates: list[tuple[float, float]]) -> None:
    chosen = choose_checkpoint([candidate[0] for candidate in candidates], [candidate[1] for candidate in candidates])
    safe = [candidate for candidate in candidates if candidate[0] >= 0]
    if safe:
        assert candidates[chosen][0] >= 0
        assert candidates[chosen][1] == max(item[1] for item in safe)
    else:
        assert candidates[chosen][0] == max(candidate[0] for candidate in candidates)
    assert candidates.index(candidates[chosen]) == chosen


def test_the_choice_of_a_setting() -> None:
    assert retention_ratio([0.0, 0.1, -0.001, 0.2, -0.5]) == 0.6
    kept, greedy, kept_more = [0.0, 0.1, -0.1], [-0.1, -0.1, 0.3], [0.0, 0.0, 0.0]
    assert choose_setting([kept, greedy], [[0.1] * 3, [0.9] * 3]) == 0
    assert choose_setting([kept, kept], [[0.1] * 3, [0.2] * 3]) == 1
    assert choose_setting([kept, kept_more], [[0.9] * 3, [0.0] * 3]) == 1
    assert choose_setting([kept, kept], [[0.1] * 3, [0.1] * 3]) == 0
    with pytest.raises(ValueError, match="at least one"):
        choose_setting([], [])
    with pytest.raises(ValueError, match="at least one"):
        retention_ratio([])
