"""Groups, weights and scores through the public function, the command line, certificates and sealed sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest

import holdfast
from holdfast.artifacts import RunFolder
from holdfast.certify.certificate import read_certificate, verify_certificate
from holdfast.certify.claims import EXACT
from holdfast.certify.grouped import BETTING, UnitCounts, units_of
from holdfast.certify.ledger import Ledger
from holdfast.certify.sealed import Candidates, certify_candidates, write_run_certificate
from holdfast.certify.sealed_claim import check_possible, largest_groups, read_sealed_claim, sealed_claim
from holdfast.certify.settings import Layout
from holdfast.errors import FaultError, UndecidedError, UserError
from holdfast.files import write_json
from tests.certify.test_cli import Shell


def rows(videos: int, frames: int, *, task: str = "clear", lost: int = 0) -> dict[str, list[Any]]:
    """Videos whose frames are all right for both models; in the first ``lost`` of them all frames are lost."""
    names = [f"{task}-v{video}" for video in range(videos) for _ in range(frames)]
    count = videos * frames
    return {
        "example_id": [f"{task}-{index}" for index in range(count)],
        "task": [task] * count,
        "old_correct": [1] * count,
        "new_correct": [0 if index < lost * frames else 1 for index in range(count)],
        "video": names,
    }


def joined(*parts: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def scored(n: int, change: float, deviation: float, seed: int = 0) -> dict[str, list[Any]]:
    generator = np.random.default_rng(seed)
    old = generator.uniform(0.4, 0.6, n)
    new = np.clip(old + change + deviation * generator.standard_normal(n), 0, 1)
    return {
        "example_id": [str(index) for index in range(n)],
        "task": ["qa"] * n,
        "old_score": old.tolist(),
        "new_score": new.tolist(),
    }


def write(path: Path, columns: dict[str, list[Any]]) -> Path:
    pa_csv.write_csv(pa.table(columns), path)
    return path


# -- groups -----------------------------------------------------------------------------------------------------------


def test_frames_of_few_videos_prove_nothing_about_videos() -> None:
    table = rows(40, 25)
    assert holdfast.certify(table).verdict == "certified"  # as if the 1,000 frames were independent
    found = holdfast.certify(table, group="video")
    assert found.verdict == "undecided"
    (task,) = found.report["tasks"]
    assert (task["unit"], task["units"], task["n"], task["largest_unit"]) == ("group", 40, 1000, 25.0)
    assert task["needed"] > 148  # ln 0.05 / ln 0.98
    assert (found.report["unit"], found.report["test"]) == ("group", BETTING)
    assert "independently" in found.report["promise"]
    assert "groups of up to 25" in found.report["claim_tested"]


def test_enough_videos_do() -> None:
    found = holdfast.certify(rows(200, 5), group="video")
    assert found.verdict == "certified"
    expected = units_of(np.zeros(1000), np.repeat(np.arange(200), 5), names=[f"clear-v{v}" for v in range(200)])
    assert found.tasks["clear"].p_value == pytest.approx(expected.p_value(0.02, 0.05))
    assert found.tasks["clear"].lower_bound == pytest.approx(expected.lower_bound(0.05, (0.02,)))


def test_a_loss_in_groups_is_shown() -> None:
    found = holdfast.certify(rows(200, 5, lost=60), group="video")
    assert found.verdict == "regressed"


def test_groups_of_one_image_take_the_exact_test() -> None:
    table = rows(300, 1, lost=1)
    plain, grouped = holdfast.certify(table), holdfast.certify(table, group="video")
    assert grouped.report["test"] == EXACT
    assert grouped.tasks["clear"] == plain.tasks["clear"]


def test_groups_of_different_sizes_need_a_limit_or_equal_weight(tried) -> None:
    tried("bad inputs", 3)
    table = joined(rows(80, 3), {**rows(80, 6), "example_id": [f"b{i}" for i in range(480)]})
    table["video"] = table["video"][:240] + [f"long-{name}" for name in table["video"][240:]]
    with pytest.raises(UserError, match="declared limit"):
        holdfast.certify(table, group="video", margin=0.05)
    with pytest.raises(UserError, match="larger than the declared limit"):
        holdfast.certify(table, group="video", margin=0.05, largest_unit=5)
    with pytest.raises(UserError, match="lacks"):
        holdfast.certify(table, group="patient")
    for options in ({"largest_unit": 6}, {"equal_groups": True}):
        found = holdfast.certify(table, group="video", margin=0.05, **options)
        assert found.verdict == "certified"
    assert "each counted the same" in found.report["claim_tested"]


def test_a_pool_joins_the_images_of_a_group(tmp_path: Path) -> None:
    first, second = rows(150, 2, task="a"), rows(150, 2, task="b")
    first["video"] = second["video"] = [f"v{index // 2}" for index in range(300)]
    found = holdfast.certify(joined(first, second), group="video", pools={"both": ["a", "b"]})
    counts = found.tasks["both"].counts
    assert isinstance(counts, UnitCounts)
    assert (counts.independent, counts.n, counts.sample.limit) == (150, 600, 4.0)
    # One video serves both tasks: a list of tasks takes Holm's correction.
    assert "Holm" in holdfast.certify(joined(first, second), group="video").report["claim_tested"]


def test_a_list_of_tasks_at_the_full_level() -> None:
    good, bad = rows(200, 5, task="good"), rows(40, 5, task="bad")
    found = holdfast.certify(joined(good, bad), group="video")
    assert found.verdict == "undecided"
    assert found.tasks["good"].verdict == "certified"
    assert found.tasks["bad"].verdict == "undecided"


# -- scores and weights -----------------------------------------------------------------------------------------------


def test_scores_are_tested_by_betting() -> None:
    found = holdfast.certify(scored(600, 0.0, 0.1))
    assert found.verdict == "certified"
    (task,) = found.report["tasks"]
    assert (task["unit"], task["units"]) == ("row", 600)
    assert task["lower_bound"] <= task["difference"]
    assert "mean score" in found.report["claim_tested"]
    assert found.report["input"]["answers"] == "scores"
    assert holdfast.certify(scored(600, -0.08, 0.1)).verdict == "regressed"


def test_scores_of_0_and_1_take_the_exact_test() -> None:
    table = rows(400, 1, lost=2)
    graded = holdfast.certify(table)
    as_scores = dict(zip(("example_id", "task", "old_score", "new_score"), list(table.values())[:4], strict=True))
    found = holdfast.certify(as_scores)
    assert found.report["test"] == EXACT
    assert found.tasks["clear"].p_value == graded.tasks["clear"].p_value
    # A metric that is declared to have values in between is tested as one.
    assert holdfast.certify(as_scores, score_range=(0, 1)).report["test"] == BETTING


def test_a_declared_range_scales_scores_and_margin() -> None:
    table = scored(500, 0.0, 0.05, seed=2)
    hundred = {**table, **{name: [100 * value for value in table[name]] for name in ("old_score", "new_score")}}
    first, other = holdfast.certify(table, score_range=(0, 1)), holdfast.certify(hundred, score_range=(0, 100))
    assert first.tasks["qa"].p_value == pytest.approx(other.tasks["qa"].p_value)
    assert first.tasks["qa"].counts.difference == pytest.approx(other.tasks["qa"].counts.difference)


def test_two_tables_of_scores() -> None:
    table = scored(300, 0.01, 0.05)
    old = {"example_id": table["example_id"], "task": table["task"], "score": table["old_score"]}
    new = {"example_id": table["example_id"][::-1], "task": table["task"], "score": table["new_score"][::-1]}
    assert holdfast.certify(old, new).tasks["qa"].p_value == holdfast.certify(table).tasks["qa"].p_value


def test_weights_decide_what_counts() -> None:
    table = {**rows(400, 1, lost=20), "w": [0.01] * 20 + [1.0] * 380}
    assert holdfast.certify(table, margin=0.05).verdict == "undecided"
    found = holdfast.certify(table, margin=0.05, weight="w", largest_unit=1)
    assert found.verdict == "certified"
    assert found.tasks["clear"].counts.difference == pytest.approx(-0.2 / 380.2)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"new_score": [1.5] * 50}, {}, "leaves the range"),
        ({"new_score": ["high"] * 50}, {}, "holds no number"),
        ({"new_score": ["inf"] * 50}, {}, "not finite"),
        ({"w": [-1] * 50}, {"weight": "w"}, "below 0"),
        ({"w": [0] * 50}, {"weight": "w"}, "no row has a weight"),
        ({"w": ["x"] * 50}, {"weight": "w"}, "holds no number"),
        ({"video": [""] * 50}, {"group": "video"}, "empty or NaN"),
        ({}, {"score_range": (1, 0)}, "not usable"),
        ({}, {"score_range": (0, float("nan"))}, "not usable"),
        ({}, {"largest_unit": 3}, "without --group"),
        ({}, {"equal_groups": True}, "without groups"),
        ({}, {"labels": ["a"]}, "--labels"),
    ],
)
def test_columns_that_cannot_be_tested(change: dict, options: dict, message: str, tried) -> None:
    tried("bad inputs")
    with pytest.raises(UserError, match=message):
        holdfast.certify({**scored(50, 0.0, 0.05), **change}, **options)


def test_scores_do_not_arrive_one_by_one() -> None:
    from holdfast.certify.predictions import certify_sequentially

    with pytest.raises(UserError, match="--sequential and scores"):
        certify_sequentially(scored(50, 0.0, 0.1))


# -- command line and certificates ------------------------------------------------------------------------------------


def test_the_command_writes_a_certificate_that_comes_out_again(tmp_path: Path, shell: Shell) -> None:
    table = write(tmp_path / "table.csv", rows(200, 5))
    certificate = tmp_path / "certificate.json"
    options = ["--group", "video", "--margin", "0.02", "--out", str(certificate), "--json"]
    assert shell("certify", table, *options) == 0
    assert json.loads(shell.out)["unit"] == "group"
    held = read_certificate(certificate)
    assert held["settings"]["layout"]["group"] == "video"
    assert verify_certificate(certificate) == held
    table.write_text(table.read_text().replace(',1,1,"clear-v0"', ',1,0,"clear-v0"', 1))
    with pytest.raises(FaultError):
        verify_certificate(certificate)


def test_the_command_prints_groups_and_scores(tmp_path: Path, shell: Shell) -> None:
    few = write(tmp_path / "a.csv", rows(40, 5))
    assert shell("certify", few, "--group", "video", "--margin", "0.02") == 4
    assert "40 groups do not decide it" in shell.out
    scores = write(tmp_path / "b.csv", scored(600, 0.0, 0.1))
    assert shell("certify", scores, "--score-range", "0,1", "--margin", "0.02") == 0


def test_plans_for_groups_and_scores(tmp_path: Path, shell: Shell) -> None:
    assert shell("plan", "--margin", 0.05, "--discordance", 0.1, "--group-size", 10, "--icc", 0.5) == 0
    assert "groups" in shell.out
    planned = holdfast.plan(margin=0.05, discordance=0.1, group_size=10, icc=0.5).report
    assert planned["per_task"] == 10 * planned["units"]
    assert planned["units"] > holdfast.plan(margin=0.05, discordance=0.1, group_size=10).report["units"]
    scores = write(tmp_path / "scores.csv", scored(300, 0.0, 0.1))
    assert shell("plan", "--predictions", scores, "--images", 300) == 0
    from_dev = holdfast.plan(scores, margin=0.02).report
    assert from_dev["unit"] == "row"
    assert from_dev["units"] == pytest.approx(holdfast.plan(margin=0.02, score_deviation=0.1).report["units"], rel=0.15)
    dev = holdfast.plan(rows(100, 4, lost=1), group="video", margin=0.05)
    assert dev.tasks["clear"]["unit"] == "group"


@pytest.mark.parametrize(
    "options",
    [
        {"margin": 0.02, "icc": 0.5, "discordance": 0.1},
        {"margin": 0.02, "group_size": 5},
        {"margin": 0.02, "group_size": 5, "icc": 2.0, "discordance": 0.1},
        {"margin": 0.02, "score_deviation": 0.0},
        {"margin": 0.02, "score_deviation": 0.1, "discordance": 0.1},
        {"margin": 0.02, "group_size": 5, "discordance": 0.1, "difference": -0.05},
        {"group_size": 5, "discordance": 0.1},
        {"margin": 0.0001, "group_size": 50, "discordance": 0.5, "icc": 1.0},
        {"margin": 0.02, "group_size": 5, "discordance": 0.1, "power": 0.999},
    ],
)
def test_plans_that_are_refused(options: dict[str, Any], tried) -> None:
    tried("bad inputs")
    with pytest.raises(UserError):
        holdfast.plan(**options)


@pytest.mark.parametrize("options", [["--score-range", "0-1"], ["--sequential", "--group", "video"]])
def test_options_that_are_refused(tmp_path: Path, options: list[str], shell: Shell, tried) -> None:
    tried("bad inputs")
    table = write(tmp_path / "table.csv", rows(40, 5))
    assert shell("certify", table, "--margin", "0.02", *options) == 2


# -- sealed sets ------------------------------------------------------------------------------------------------------


def sealed_tables(videos: int, frames: int, lost: int) -> tuple[list[tuple[str, str, str, str]], pa.Table, pa.Table]:
    """Sealed examples of one protected class and the target, and the predictions of both models."""
    examples: list[tuple[str, str, str, str]] = []
    predicted: dict[str, list[str]] = {"old": [], "new": []}
    for label in ("clear", "snow"):
        for video in range(videos):
            for frame in range(frames):
                examples.append((f"{label}{video}-{frame}", label, "", f"{label}{video}"))
                gained = label == "snow" and video % 2 == 0
                predicted["old"].append("other" if gained else label)
                predicted["new"].append("other" if label == "clear" and video < lost else label)
    ids, labels = [item[0] for item in examples], [item[1] for item in examples]
    rest = {"loss": [0.1] * len(ids), "score": [0.9] * len(ids)}
    tables = [
        pa.table({"example_id": ids, "task": labels, "label": labels, "prediction": predicted[name], **rest})
        for name in ("old", "new")
    ]
    return examples, tables[0], tables[1]


def queried(tmp_path: Path, examples: list[Any], old: pa.Table, new: pa.Table, **options: Any) -> Any:
    plan = sealed_claim(examples, target="snow", margin=0.05, **options)
    return certify_candidates(plan, Ledger(tmp_path), Candidates({"new": "sha256:0"}), lambda: old, lambda _: new)


def test_a_sealed_set_with_groups_is_tested_by_groups(tmp_path: Path) -> None:
    # 80 unchanged videos show a margin of 5 points; 40 do not, though 800 independent images would.
    examples, old, new = sealed_tables(80, 10, lost=0)
    outcome = queried(tmp_path / "a", examples, old, new, largest_groups={"clear": 10, "snow": 10})
    assert outcome.passed
    assert outcome.reported["unit"] == "group"
    assert outcome.old is not None
    assert "group" in outcome.old.column_names
    few, old, new = sealed_tables(40, 20, lost=0)
    assert queried(tmp_path / "b", [item[:2] for item in few], old, new).passed
    assert not queried(tmp_path / "c", few, old, new, largest_groups={"clear": 20, "snow": 20}).passed


def test_sealed_groups_that_are_larger_than_all_others_are_left_out(tmp_path: Path) -> None:
    examples, old, new = sealed_tables(80, 5, lost=0)
    merged = [(i, label, p, "clear0" if group == "clear1" else group) for i, label, p, group in examples]
    outcome = queried(tmp_path, merged, old, new, largest_groups={"clear": 5, "snow": 5})
    assert outcome.passed
    (task,) = outcome.reported["tasks"]
    assert (task["units"], task["n"]) == (78, 390)


def test_the_limit_of_a_round_comes_from_what_is_not_sealed() -> None:
    found = largest_groups([("a", "v1"), ("a", "v1"), ("a", "v2"), ("b", ""), ("b", "")])
    assert found == {"a": 2.0, "b": 1.0}


def test_a_run_with_groups_from_its_roles_to_its_certificate(tmp_path: Path) -> None:
    examples, old, new = sealed_tables(130, 4, lost=1)
    run = RunFolder.create(tmp_path / "run")
    write_json(run.state, {"status": "done", "fingerprint": "sha256:run"})
    write_json(run.config, {"task": {"target": "snow"}, "certify": {"margin": 0.05}})
    dev = [(f"dev{n}", label, "", f"dev-{label}") for label in ("clear", "snow") for n in range(4)]
    columns = ("example_id", "class", "picture", "group")
    roles = [{**dict(zip(columns, item, strict=True)), "role": "sealed"} for item in examples]
    roles += [{**dict(zip(columns, item, strict=True)), "role": "dev", "example_id": item[0] + item[1]} for item in dev]
    pq.write_table(pa.Table.from_pylist(roles), run.roles)
    claim = read_sealed_claim(run)
    assert claim.settings.layout == Layout("group", largest_units={"clear": 4.0, "snow": 4.0})
    ledger = Ledger(tmp_path / "ledger")
    models = Candidates({"new": "sha256:0"}, "sha256:run")
    outcome = certify_candidates(claim, ledger, models, lambda: old, lambda _: new)
    clear = outcome.reported["tasks"][0]
    assert (outcome.passed, clear["units"], clear["lost"]) == (True, 130, 4)
    assert write_run_certificate(run, claim, outcome, ledger) == run.certificate
    held = verify_certificate(run.certificate)
    assert held["report"]["test"] == BETTING


def test_a_certificate_with_another_layout_is_one_sentence(tried) -> None:
    tried("bad inputs", 2)
    for wrong in ({"cluster": "video"}, {"score_range": [0.0]}):
        with pytest.raises(UserError):
            Layout.from_json(wrong)


def test_too_few_groups_are_refused_before_a_query(tried) -> None:
    tried("bad inputs")
    examples, _, _ = sealed_tables(3, 50, lost=0)
    plan = sealed_claim(examples, target="snow", margin=0.02, largest_groups={"clear": 50, "snow": 50})
    with pytest.raises(UndecidedError, match="too few sealed groups"):
        check_possible(plan)


def test_predictions_with_groups_are_charged_and_tested_by_groups(tmp_path: Path, shell: Shell) -> None:
    table, out = write(tmp_path / "table.csv", rows(200, 5)), tmp_path / "certificate.json"
    options = ["--group", "video", "--margin", "0.02", "--ledger", tmp_path / "ledger", "--query-budget", 1]
    assert shell("certify", "--predictions", table, *options, "--out", out, "--json") == 0
    assert json.loads(shell.out)["unit"] == "group"
    assert read_certificate(out)["settings"]["layout"]["group"] == "video"
    assert shell("verify", out, "--ledger", tmp_path / "ledger") == 0
    few = write(tmp_path / "few.csv", rows(40, 25, task="other"))
    assert shell("certify", "--predictions", few, *options) == 4
