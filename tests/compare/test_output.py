"""Tables in the paper's layout and in four formats; figures from what jobs wrote down."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from holdfast.compare import figures
from holdfast.compare.choose import cells, choose, read_records, scores_by_place
from holdfast.compare.output import jobs_csv, tables, write_outputs
from holdfast.compare.tables import Table, task_table
from tests.compare.fabricated import comparison, finish, jobs_of, make_study

METHODS = [{"name": "rm", "label": "RM 10 %"}, {"name": "holdfast", "label": "Ours"}]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Table], list[Path]]:
    tmp_path = tmp_path_factory.mktemp("study")
    study = make_study(tmp_path, sizes=[100, 1000], methods=METHODS, seeds=[0, 1])
    jobs = jobs_of(study, tmp_path)
    for job in jobs:
        ours = job.row == "Ours"
        finish(job, 0 if ours else -3, 9, test=comparison(0 if ours else -2 - job.seed, 12))
    records = read_records(jobs)
    choices = choose(jobs, records)
    files = write_outputs(study, jobs, records, choices, tmp_path, figures=True)
    scores = scores_by_place(choices)
    return tmp_path, tables(study, scores, cells(choices, scores)), files


def test_the_main_table_has_the_papers_layout(finished: tuple[Path, dict[str, Table], list[Path]]) -> None:
    table = finished[1]["results"]
    assert table.heading == ("Method", "Measures", "100", "1k")
    rows = [[entry.text for entry in row] for group in table.groups for row in group]
    assert rows[0] == ["Base", "Retention Ratio//DevSafety(acc)", "100%//0.00(0.0000)", "100%//0.00(0.0000)"]
    assert rows[1] == ["", "Target wanted", "0.2000(0.0000)", "0.2000(0.0000)"]
    assert rows[2][:3] == ["RM 10 %", "Retention Ratio//DevSafety(acc)", "0.00%//-0.0500(0.0100)"]
    assert rows[4][2] == "100.00%//0.0000(0.0000)"
    assert rows[5][2] == "0.4400(0.0000)"


def test_flip_rates_of_every_choice_are_in_its_json(finished: tuple[Path, dict[str, Table], list[Path]]) -> None:
    chosen = json.loads((finished[0] / "chosen.json").read_text())
    lossless = next(item["test"] for item in chosen if item["test"]["retention_ratio"] == 1.0)
    assert lossless["negative_flip_rate"] == [0.0, 0.0]
    assert lossless["relative_negative_flip_rate"] == [0.0, 0.0]
    losing = next(item["test"] for item in chosen if item["test"]["retention_ratio"] == 0.0)
    lost = -losing["dev_safety"][0] * 50  # of 50 images a task, four tasks; only the first one loses any
    assert losing["negative_flip_rate"][0] == pytest.approx(lost / 200)


def test_every_format_says_the_same(finished: tuple[Path, dict[str, Table], list[Path]]) -> None:
    folder, made, _ = finished
    for name, table in made.items():
        text = (folder / "tables" / f"{name}.txt").read_text()
        latex = (folder / "tables" / f"{name}.tex").read_text()
        page = (folder / "tables" / f"{name}.html").read_text()
        rows = list(csv.reader(io.StringIO((folder / "tables" / f"{name}.csv").read_text())))
        entries = [entry for group in table.groups for row in group for entry in row if entry.text]
        assert rows[0] == list(table.heading)
        assert [item for row in rows[1:] for item in row if item] == [entry.text for entry in entries]
        assert all(entry.text in text for entry in entries)
        tree = ElementTree.fromstring(page.replace("<!doctype html>", "").replace('<meta charset="utf-8">', ""))
        assert ["".join(cell.itertext()) for cell in tree.iter("td") if "".join(cell.itertext())] == [
            entry.text for entry in entries
        ]
        assert latex.count(r"\\") == len(rows)
        assert latex.count("&") == len(rows) * (len(table.heading) - 1)
        assert "RM 10 \\%" in latex


def test_drops_are_bold_and_only_drops(finished: tuple[Path, dict[str, Table], list[Path]]) -> None:
    folder, made, _ = finished
    table = made["tasks-1k"]
    bold = [entry.text for group in table.groups for row in group for entry in row if entry.bold]
    assert bold == ["-0.0500(0.0100)"]
    assert "*-0.0500(0.0100)*" in table.text()
    assert r"\textbf{-0.0500(0.0100)}" in table.latex()
    assert "<b>-0.0500(0.0100)</b>" in table.html()
    assert table.heading == ("Method", "task0", "task1", "task2", "wanted (target)", "Average")
    average = next(row for group in table.groups for row in group if row[0].text == "Ours")[-1]
    assert average.text == f"{(0 + 1 + 1 + 12) / 50 / 4:+.4f}(0.0000)"
    assert (folder / "tables" / "tasks-100.txt").exists()


def test_hundreds_of_tasks_become_rows() -> None:
    table = task_table("many", {"RM": [comparison(-1, 3, tasks=364)], "Ours": [comparison(0, 3, tasks=364)]})
    assert table.heading == ("Task", "Base", "RM", "Ours")
    assert sum(len(group) for group in table.groups) == 364 + 2  # the target and the average stand apart
    assert [row[0].text for row in table.groups[1]] == ["wanted (target)", "Average"]


def test_the_list_of_jobs_has_one_line_each(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    jobs = jobs_of(study, tmp_path)
    finish(jobs[0], -1, 3)
    rows = list(csv.DictReader(io.StringIO(jobs_csv(jobs, read_records(jobs)))))
    assert [row["status"] for row in rows] == ["done", "waiting", "waiting", "waiting"]
    assert float(rows[0]["dev_safety"]) == -0.02


def test_figures_are_drawn_and_the_same_figures_give_the_same_bytes(
    finished: tuple[Path, dict[str, Table], list[Path]], tmp_path: Path
) -> None:
    _, _, files = finished
    drawn = {path.name: path for path in files if path.suffix == ".png"}
    assert set(drawn) == {"by-column.png", "curves.png", "trajectory.png", "tasks.png", "weights.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000 for path in drawn.values())
    scores = {"RM": [comparison(-1, 3, tasks=364)]}
    first = figures.save(figures.per_task(scores), tmp_path / "a.svg").read_text()
    axis = figures.per_task(scores).axes[0]
    assert axis.get_title() == "RM: 1 of 364 drop"
    assert "<svg" in first


def test_curves_are_averaged_over_the_steps_that_every_seed_has() -> None:
    import numpy as np

    from holdfast.compare.records import Curve

    names = ("dev_safety", "target_gain", "train_safety", "train_gain")
    first = Curve(np.array([0, 10, 20]), {name: np.array([0.0, 0.2, 0.4]) for name in names})
    second = Curve(np.array([0, 20]), {name: np.array([0.0, 0.2]) for name in names})
    axis = figures.curves({"Ours": [first, second]}, 10).axes[0]
    line = axis.get_lines()[1]
    assert line.get_xdata().tolist() == [0, 2]  # type: ignore[union-attr]
    assert line.get_ydata().tolist() == pytest.approx([0, 30])  # type: ignore[union-attr]
    assert axis.get_xlabel() == "epoch"
