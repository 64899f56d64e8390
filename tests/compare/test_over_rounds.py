"""Accuracy of every class over rounds: the table and the figure of a study that starts from another's choice."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.compare.choose import choose, read_records, scores_by_place
from holdfast.compare.output import write_outputs
from holdfast.compare.over_rounds import Stage, continued, rounds_table, with_this_round
from tests.compare.fabricated import comparison, finish, jobs_of, make_study

METHODS = [{"name": "rm", "label": "RM"}, {"name": "holdfast", "label": "Ours"}]


def test_rounds_go_through_the_model_that_was_gone_on_with_and_end_in_a_mean(tmp_path: Path) -> None:
    first = make_study(tmp_path, methods=METHODS, seeds=[0, 1])
    jobs = jobs_of(first, tmp_path / "first")
    for job in jobs:  # the second seed gains more on dev images: it is the one that a next round starts from
        finish(job, 0, 5 + job.seed, test=comparison(-2 - job.seed, 10 + job.seed))
    history = continued(choose(jobs, read_records(jobs)), {})
    base, after = history["Ours", "all"]
    assert (base.name, base.accuracy["task0"], base.accuracy["wanted"]) == ("base", 40 / 50, 10 / 50)
    assert (after.name, after.accuracy["task0"], after.accuracy["wanted"]) == ("wanted", 37 / 50, 21 / 50)

    second = make_study(tmp_path, methods=METHODS[:1], seeds=[0, 1])
    jobs = jobs_of(second, tmp_path / "second")
    for job in jobs:
        finish(job, 0, 5, test=comparison(2 * job.seed, 20))
    records = read_records(jobs)
    choices = choose(jobs, records)
    rounds = with_this_round(history, scores_by_place(choices))
    assert [stage.name for stage in rounds["RM", "all"]] == ["base", "wanted", "wanted"]
    assert rounds["RM", "all"][2].accuracy["task0"] == pytest.approx(41 / 50)
    assert list(rounds) == [("RM", "all")]

    files = write_outputs(second, jobs, records, choices, tmp_path / "second", figures=True, earlier=history)
    assert {"rounds.txt", "rounds.tex", "rounds.png"} <= {path.name for path in files}
    plain = write_outputs(second, jobs, records, choices, tmp_path / "alone", figures=False)
    assert not {path.name for path in plain} & {"rounds.txt", "rounds.png"}


def test_what_a_round_made_worse_is_marked() -> None:
    stages = [Stage("base", {"a": 0.5, "b": 0.2}), Stage("b", {"a": 0.4, "b": 0.9}), Stage("c", {"a": 0.4, "c": 0.1})]
    table = rounds_table("title", {("Ours", "4k"): stages})
    assert table.heading == ("Method", "Column", "Round", "a", "b", "c")
    (group,) = table.groups
    assert [[entry.text for entry in row[2:]] for row in group] == [
        ["base", "0.5000", "0.2000", "-"],
        ["b", "0.4000", "0.9000", "-"],
        ["c", "0.4000", "-", "0.1000"],
    ]
    assert [entry.text for row in group for entry in row if entry.bold] == ["0.4000"]
