"""Logs of lm-eval, inspect_ai, NeMo Evaluator and COCO detections, written as those tools write them."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.certify.harness import read_logs
from holdfast.certify.harness.coco import Box, matched
from holdfast.certify.predictions import certify
from holdfast.errors import UserError
from tests.certify.test_cli import Shell


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def lm_line(number: int, score: float, *, metric: str = "exact_match", prompt: str = "", **more: Any) -> dict[str, Any]:
    """A line of ``samples_*.jsonl``, with the fields of lm-evaluation-harness 0.4.9."""
    doc = {"question": f"What is {number} + 1?", "answer": str(number + 1), "subject": ("sums", "law")[number % 2]}
    text = f"Question: {doc['question']}\nAnswer:{prompt}"
    return {
        "doc_id": number,
        "doc": doc,
        "target": doc["answer"],
        "arguments": {"gen_args_0": {"arg_0": text, "arg_1": {"until": ["\n"]}}},
        "resps": [["7"]],
        "filtered_resps": ["7"],
        "filter": "none",
        "metrics": [metric],
        "doc_hash": digest(json.dumps(doc)),
        "prompt_hash": digest(text),
        "target_hash": digest(doc["answer"]),
        metric: score,
        **more,
    }


def lm_logs(folder: Path, task: str, lines: Sequence[dict[str, Any]], date: str = "2025-06-01T10-00-00.123456") -> Path:
    path = folder / "org__model" / f"samples_{task}_{date}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def scores(n: int, wrong: Sequence[int]) -> list[float]:
    return [float(k not in wrong) for k in range(n)]


def lm_pair(tmp_path: Path, n: int, old: Sequence[int], new: Sequence[int], task: str = "gsm8k") -> tuple[Path, Path]:
    """Logs of two models that are wrong on these documents; the second lists them in another order."""
    first = [lm_line(k, score) for k, score in enumerate(scores(n, old))]
    second = [lm_line(k, score) for k, score in enumerate(scores(n, new))]
    return lm_logs(tmp_path / "old", task, first), lm_logs(tmp_path / "new", task, second[::-1])


# -- lm-eval ----------------------------------------------------------------------------------------------------------


def test_lm_eval_joins_by_document_and_certifies(shell: Shell, tmp_path: Path) -> None:
    old, new = lm_pair(tmp_path, 400, [1, 2, 3], [3, 4])
    assert shell("certify", "--lm-eval", old, new, "--margin", "0.02", "--json") == 0
    task = shell.json["tasks"][0]
    assert (task["task"], task["n"], task["gained"], task["lost"]) == ("gsm8k", 400, 2, 1)
    assert shell.json["test"] == "exact paired score test"
    assert shell.json["source"] == {"logs": "lm-eval", "metrics": {"gsm8k": "exact_match"}, "warnings": []}
    # By hand, from a table: the same numbers.
    table = {"example_id": list(range(400)), "task": ["gsm8k"] * 400}
    table |= {"old_correct": scores(400, [1, 2, 3]), "new_correct": scores(400, [3, 4])}
    assert certify(table, margin=0.02).report["tasks"][0]["p_value"] == task["p_value"]
    assert shell("certify", "--lm-eval", old, new, "--margin", "0.02") == 0
    assert "read from logs of lm-eval: exact_match (gsm8k)" in shell.out


def test_lm_eval_certificate_can_be_verified(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    old, new = lm_pair(tmp_path, 400, [1], [2])
    assert shell("certify", "--lm-eval", old, new, "--margin", "0.02", "--out", "c.json") == 0
    assert (tmp_path / "c.predictions.csv").exists()
    assert json.loads((tmp_path / "c.json").read_text())["report"]["source"]["logs"] == "lm-eval"
    assert shell("verify", "c.json", "--json") == 0
    assert shell.json["holds"]


def test_lm_eval_under_a_ledger_is_one_query_however_often(shell: Shell, tmp_path: Path) -> None:
    old, new = lm_pair(tmp_path, 100, [1], [2, 3, 4])
    words = (
        "certify",
        "--lm-eval",
        old,
        new,
        "--margin",
        "0.05",
        "--ledger",
        tmp_path / "ledger",
        "--query-budget",
        "3",
    )
    for _ in range(2):  # the same logs give the same bytes: the same query
        assert shell(*words, "--json") == 4
        assert shell.json["sealed"]["queries"] == 1
        assert "devsafety" not in shell.json


def test_lm_eval_a_differing_prompt_is_a_warning_and_a_differing_document_a_refusal(
    shell: Shell, tmp_path: Path, tried: Callable[..., None]
) -> None:
    tried("bad inputs")
    old = lm_logs(tmp_path / "old", "arc", [lm_line(k, 1.0) for k in range(200)])
    new = lm_logs(tmp_path / "new", "arc", [lm_line(k, 1.0, prompt=" " * (k < 7)) for k in range(200)])
    assert shell("certify", "--lm-eval", old, new, "--margin", "0.02", "--json") == 0
    assert shell.json["source"]["warnings"][0].startswith("7 prompts of arc differ between the two logs")
    other = lm_logs(tmp_path / "other", "arc", [lm_line(k, 1.0) for k in range(3, 205)])
    assert shell("certify", "--lm-eval", old, other, "--margin", "0.02") == 2
    assert "are not about the same documents" in shell.err
    assert "arc: 3 only in the first, 5 only in the second" in shell.err


def test_lm_eval_fields_of_a_document_are_tasks_and_groups(tmp_path: Path) -> None:
    old, new = lm_pair(tmp_path, 40, [1], [2])
    joined = read_logs("lm-eval", old, new, task_field="subject")
    assert joined.tasks == ["gsm8k/law", "gsm8k/sums"]
    assert joined.group is None
    grouped = read_logs("lm-eval", old, new, group_field="subject")
    assert grouped.group == "group"
    assert sorted(set(grouped.columns["group"])) == ["law", "sums"]


def test_lm_eval_scores_take_the_score_test(shell: Shell, tmp_path: Path) -> None:
    values = np.random.default_rng(0).random(600).round(3)
    old = lm_logs(tmp_path / "old", "squad", [lm_line(k, float(v), metric="f1") for k, v in enumerate(values)])
    new = lm_logs(tmp_path / "new", "squad", [lm_line(k, float(v), metric="f1") for k, v in enumerate(values)])
    assert shell("certify", "--lm-eval", old, new, "--margin", "0.05", "--json") == 0
    assert shell.json["test"] == "betting test"


def test_lm_eval_metrics_and_filters(tmp_path: Path, tried: Callable[..., None]) -> None:
    tried("bad inputs", 3)
    two = [lm_line(k, 1.0, filter=name) for k in range(30) for name in ("strict-match", "flexible-extract")]
    old, new = lm_logs(tmp_path / "old", "gsm8k", two), lm_logs(tmp_path / "new", "gsm8k", two)
    with pytest.raises(UserError, match=r"which filter of gsm8k\?(.|\n)*--metric gsm8k=exact_match,flexible-extract"):
        read_logs("lm-eval", old, new)
    joined = read_logs("lm-eval", old, new, metrics={"gsm8k": "exact_match,strict-match"})
    assert (len(joined.columns["task"]), joined.metrics) == (30, {"gsm8k": "exact_match,strict-match"})
    with pytest.raises(UserError, match="has no metric 'acc'"):
        read_logs("lm-eval", old, new, metrics={"": "acc,strict-match"})
    perplexity = [lm_line(k, 0.0, word_perplexity=[-3.2, 4], metrics=["word_perplexity"]) for k in range(3)]
    wiki = lm_logs(tmp_path / "wiki", "wikitext", perplexity)
    with pytest.raises(UserError, match="no perplexity, no corpus score"):
        read_logs("lm-eval", wiki, wiki)


def test_lm_eval_before_filters_were_logged(tmp_path: Path) -> None:
    lines = [lm_line(k, 1.0, metric="acc", acc_norm=0.0) for k in range(20)]
    for line in lines:
        del line["filter"], line["metrics"]
    old = lm_logs(tmp_path / "old", "arc_easy", lines)
    assert read_logs("lm-eval", old, old).metrics == {"arc_easy": "acc"}


def test_lm_eval_a_document_that_repeats_counts_once(tmp_path: Path) -> None:
    lines = [lm_line(k, 1.0) for k in (0, 1, 2, 1)]
    joined = read_logs("lm-eval", lm_logs(tmp_path / "a", "t", lines), lm_logs(tmp_path / "b", "t", lines))
    assert len(joined.columns["task"]) == 3
    assert "1 documents of t repeat earlier ones" in joined.warnings[0]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "holds no samples"),
        ('{"doc_id": 0}\n{"doc', "line 2, is not JSON"),
        ("[1]\n", "is no object"),
        (json.dumps({**lm_line(0, 1.0), "doc_hash": None}), "has no doc_hash"),
        (json.dumps({**lm_line(0, 1.0), "exact_match": "yes"}), "is no score"),
        (json.dumps({**lm_line(0, 1.0), "exact_match": float("nan")}), "is no score"),
        (json.dumps({**lm_line(0, 1.0), "exact_match": 7.5}), "leaves the range of scores"),
        ("\udcff", "is not text in UTF-8"),
    ],
)
def test_lm_eval_faults_are_sentences(
    shell: Shell, tmp_path: Path, content: str, expected: str, tried: Callable[..., None]
) -> None:
    tried("bad inputs")
    path = tmp_path / "samples_t_2025-06-01T10-00-00.1.jsonl"
    path.write_text(content, encoding="utf-8", errors="surrogateescape")
    assert shell("certify", "--lm-eval", path, path, "--margin", "0.02", "--out", tmp_path / "c.json") == 2
    assert expected in shell.err
    assert sorted(item.name for item in tmp_path.iterdir()) == [path.name]


def test_lm_eval_two_runs_in_a_folder_and_other_tasks_are_refused(tmp_path: Path, tried: Callable[..., None]) -> None:
    tried("bad inputs", 3)
    lines = [lm_line(k, 1.0) for k in range(5)]
    old, new = lm_logs(tmp_path / "old", "a", lines), lm_logs(tmp_path / "new", "b", lines)
    with pytest.raises(UserError, match="not evaluated on the same tasks"):
        read_logs("lm-eval", old, new)
    lm_logs(tmp_path / "old", "a", lines, date="2025-07-01T10-00-00.5")
    with pytest.raises(UserError, match="holds two runs of a"):
        read_logs("lm-eval", old, new)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="run lm_eval again with --log_samples"):
        read_logs("lm-eval", tmp_path / "empty", new)


# -- inspect_ai -------------------------------------------------------------------------------------------------------


def inspect_log(values: dict[str, list[Any]], *, task: str = "inspect_evals/gsm8k", **more: Any) -> dict[str, Any]:
    """A log of inspect_ai, format 2: values by sample id, one an epoch."""
    samples = [
        {
            "id": identity,
            "epoch": epoch + 1,
            "input": f"What is\n{identity}?",
            "target": "4",
            "metadata": {"level": "easy"},
            "scores": {"match": {"value": value, "answer": "4"}},
        }
        for identity, epochs in values.items()
        for epoch, value in enumerate(epochs)
    ]
    header = {"version": 2, "status": "success", "eval": {"task": task, "model": "m"}, "plan": {}, "results": {}}
    return {**header, "samples": samples, **more}


def write_eval(path: Path, log: dict[str, Any], *, summaries: bool) -> Path:
    """The same as a ``.eval`` file: a zip."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        header = {name: value for name, value in log.items() if name != "samples"}
        archive.writestr("_journal/start.json", json.dumps({"version": 2, "eval": log["eval"], "plan": {}}))
        for sample in log["samples"]:
            archive.writestr(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", json.dumps(sample))
        if summaries:
            thin = [{**sample, "input": " ".join(sample["input"].split())} for sample in log["samples"]]
            archive.writestr("summaries.json", json.dumps(thin))
        archive.writestr("header.json", json.dumps(header))
    return path


def test_inspect_json_and_eval_are_the_same(shell: Shell, tmp_path: Path) -> None:
    values = {f"q{k}": ["C"] for k in range(300)}
    old, new = inspect_log({**values, "q0": ["I"]}), inspect_log({**values, "q1": ["N"], "q2": ["I"]})
    paths = [tmp_path / name for name in ("old.json", "new.eval", "plain.eval")]
    paths[0].write_text(json.dumps(old))
    write_eval(paths[1], new, summaries=True)
    write_eval(paths[2], new, summaries=False)
    for path in paths[1:]:
        assert shell("certify", "--inspect", paths[0], path, "--margin", "0.03", "--json") == 0
        task = shell.json["tasks"][0]
        assert (task["task"], task["n"], task["gained"], task["lost"]) == ("inspect_evals/gsm8k", 300, 1, 2)
        assert shell.json["test"] == "exact paired score test"


def test_inspect_epochs_of_a_sample_are_a_group(shell: Shell, tmp_path: Path) -> None:
    values = {f"q{k}": ["C", "C", "I"] for k in range(400)}
    path = write_eval(tmp_path / "a.eval", inspect_log(values), summaries=True)
    assert shell("certify", "--inspect", path, path, "--margin", "0.05", "--json") == 0
    task = shell.json["tasks"][0]
    assert (task["n"], task["units"], task["unit"], task["largest_unit"]) == (1200, 400, "group", 3.0)
    assert shell("certify", "--inspect", path, path, "--margin", "0.05", "--sequential") == 2
    assert "groups (the sample of a row) and --sequential at once" in shell.err


def test_inspect_partial_answers_are_scores(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(inspect_log({"a": ["C"], "b": ["P"], "c": ["I"], "d": [0.25], "e": [True]})))
    assert read_logs("inspect", path, path).columns["old_score"] == [1.0, 0.5, 0.0, 0.25, 1.0]


def test_inspect_scorers_are_named_where_there_are_several(tmp_path: Path, tried: Callable[..., None]) -> None:
    tried("bad inputs", 2)
    log = inspect_log({"a": ["C"], "b": ["I"]})
    for sample in log["samples"]:
        sample["scores"]["judge"] = {"value": {"fact": 1, "tone": 0}}
    path = tmp_path / "a.json"
    path.write_text(json.dumps(log))
    with pytest.raises(UserError, match="which metric of inspect_evals/gsm8k"):
        read_logs("inspect", path, path)
    with pytest.raises(UserError, match="gives several values"):
        read_logs("inspect", path, path, metrics={"": "judge"})
    assert read_logs("inspect", path, path, metrics={"": "judge.fact"}).columns["old_correct"] == [1, 1]
    assert read_logs("inspect", path, path, metrics={"": "match"}, task_field="level").tasks == [
        "inspect_evals/gsm8k/easy"
    ]


def test_inspect_faults_are_sentences(tmp_path: Path, tried: Callable[..., None]) -> None:
    good = inspect_log({"a": ["C"], "b": ["I"]})
    changed = inspect_log({"a": ["C"], "b": ["I"]})
    changed["samples"][0]["target"] = "5"
    failed = inspect_log({"a": ["C"], "b": ["I"]})
    failed["samples"][1]["scores"] = None
    cases: list[tuple[Any, str]] = [
        (changed, "1 with another question or answer"),
        (failed, "1 of 2 samples"),
        ({**good, "status": "error"}, "found:    status error"),
        ({**good, "samples": None}, "holds no samples"),
        ([1], "is no log of inspect_ai"),
        ({**good, "samples": [good["samples"][0]] * 2}, "stands there twice"),
        ({**good, "samples": [{**good["samples"][0], "scores": {"match": {"value": "maybe"}}}]}, "is no score"),
    ]
    (tmp_path / "good.json").write_text(json.dumps(good))
    for content, expected in cases:
        tried("bad inputs")
        (tmp_path / "bad.json").write_text(json.dumps(content))
        with pytest.raises(UserError) as caught:
            read_logs("inspect", tmp_path / "good.json", tmp_path / "bad.json")
        assert expected in caught.value.text()


def test_inspect_archives_that_are_none(tmp_path: Path, tried: Callable[..., None]) -> None:
    path = tmp_path / "a.eval"
    whole = write_eval(path, inspect_log({"a": ["C"]}), summaries=True).read_bytes()
    for content in (
        b"",
        whole[: len(whole) // 2],
        b"PK\x05\x06" + b"\0" * 30,
        whole.replace(b"header.json", b"footer.json"),
    ):
        tried("hostile archives")
        path.write_bytes(content)
        with pytest.raises(UserError):
            read_logs("inspect", path, path)


# -- NeMo Evaluator ---------------------------------------------------------------------------------------------------


def nemo_results(folder: Path, rewards: Sequence[Sequence[float]], name: str = "mmlu_pro") -> Path:
    """A bundle and its results, as ``nel eval`` writes them: rewards by problem, one a repeat."""
    place = folder / name
    place.mkdir(parents=True)
    bundle = {"run_id": "eval-20260101T000000Z", "benchmark": {"name": name, "samples": len(rewards), "scores": {}}}
    (place / "eval-20260101T000000Z.json").write_text(json.dumps(bundle))
    lines = [
        {
            "problem_idx": index,
            "repeat": repeat,
            "reward": reward,
            "expected_answer": "A",
            "metadata": {"category": "law"},
        }
        for index, repeats in enumerate(rewards)
        for repeat, reward in enumerate(repeats)
    ]
    (place / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_nemo_results(shell: Shell, tmp_path: Path) -> None:
    old = nemo_results(tmp_path / "old", [[1.0]] * 300)
    new = nemo_results(tmp_path / "new", [[1.0]] * 299 + [[0.0]])
    assert shell("certify", "--nemo", old, new, "--margin", "0.03", "--json") == 0
    task = shell.json["tasks"][0]
    assert (task["task"], task["n"], task["lost"]) == ("mmlu_pro", 300, 1)
    joined = read_logs("nemo", old, new, task_field="metadata.category")
    assert joined.tasks == ["mmlu_pro/law"]


def test_nemo_repeats_are_groups_and_totals_are_refused(tmp_path: Path, tried: Callable[..., None]) -> None:
    tried("bad inputs", 3)
    old = nemo_results(tmp_path / "old", [[1.0, 0.5]] * 20)
    joined = read_logs("nemo", old, old)
    assert (joined.group, joined.columns["old_score"][:2]) == ("problem", [1.0, 0.5])
    assert read_logs("nemo", old, old, metrics={"": "pass@1"}).columns["old_correct"][:2] == [1, 1]
    (tmp_path / "totals").mkdir()
    (tmp_path / "totals" / "results.yml").write_text("results: {}\n")
    with pytest.raises(UserError, match=r"results.yml has totals only"):
        read_logs("nemo", tmp_path / "totals", old)
    other = old / "mmlu_pro" / "eval-other.json"
    other.write_text(json.dumps({"benchmark": {"name": "gpqa"}}))
    with pytest.raises(UserError, match="two in one folder"):
        read_logs("nemo", old, old)
    other.unlink()
    (old / "mmlu_pro" / "results.jsonl").unlink()
    with pytest.raises(UserError, match="is not a file"):
        read_logs("nemo", old, old)


# -- detections -------------------------------------------------------------------------------------------------------


def coco_files(tmp_path: Path, images: int = 200) -> tuple[Path, Path, Path]:
    """Two boxes an image. The old model finds all; the new one loses a box of every fiftieth image and sees a ghost."""
    truth: dict[str, Any] = {"images": [], "categories": [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]}
    truth["annotations"] = []
    found: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for image in range(images):
        truth["images"].append({"id": image, "file_name": f"photo_{image}.jpg"})
        for place, category in enumerate((1, 2)):
            box = [100 * place, 10, 50, 40]
            annotation = {
                "id": 2 * image + place,
                "image_id": image,
                "category_id": category,
                "bbox": box,
                "iscrowd": 0,
            }
            truth["annotations"].append(annotation)
            seen = {"image_id": f"photo_{image}", "category_id": category, "bbox": [box[0] + 2, *box[1:]], "score": 0.9}
            found[0].append(seen)
            if not (image % 50 == 0 and category == 2):
                found[1].append(seen)
        found[1].append({"image_id": image, "category_id": 1, "bbox": [300, 300, 9, 9], "score": 0.1 + (image == 7)})
    paths = (tmp_path / "truth.json", tmp_path / "old.json", tmp_path / "new.json")
    for path, content in zip(paths, (truth, *found), strict=True):
        path.write_text(json.dumps(content))
    return paths


def test_detections_by_box_and_by_image(shell: Shell, tmp_path: Path) -> None:
    truth, old, new = coco_files(tmp_path)
    assert shell("certify", "--coco", truth, old, new, "--margin", "0.05", "--json") == 0
    assert shell.json["test"] == "exact paired score test"  # one box of a category in every image
    assert "Holm" in shell.json["claim_tested"]  # and yet the categories share images
    by_task = {task["task"]: task for task in shell.json["tasks"]}
    assert {name: (task["n"], task["gained"], task["lost"]) for name, task in by_task.items()} == {
        "cat": (200, 0, 0),
        "dog": (200, 0, 4),
    }
    joined = read_logs("coco", old, new, metrics={"": "image"}, ground_truth=truth)
    assert joined.tasks == ["images"]
    values = dict(zip(joined.columns["example_id"], joined.columns["new_score"], strict=True))
    assert (values["0"], values["7"], values["8"]) == (pytest.approx(2 / 3), pytest.approx(0.8), 1.0)
    assert shell("certify", "--coco", truth, old, new, "--margin", "0.05", "--task-field", "x") == 2


def test_boxes_of_an_image_are_a_group(shell: Shell, tmp_path: Path) -> None:
    truth, old, new = coco_files(tmp_path)
    content = json.loads(truth.read_text())
    for image in range(0, 200, 2):  # a second cat, found by nobody
        box = {"id": 1000 + image, "image_id": image, "category_id": 1, "bbox": [200, 200, 9, 9]}
        content["annotations"].append(box)
    truth.write_text(json.dumps(content))
    words = ("certify", "--coco", truth, old, new, "--margin", "0.1", "--json")
    assert shell(*words) == 2
    assert "give --largest-unit 2 or more" in shell.err
    assert shell(*words, "--largest-unit", "3") == 0
    cat = shell.json["tasks"][0]
    assert (cat["n"], cat["units"], cat["largest_unit"]) == (300, 200, 3.0)


def test_matching_against_every_assignment() -> None:
    """Greedy by score: each detection, the most certain first, takes the free box that it overlaps most."""
    generator = np.random.default_rng(0)
    for _ in range(200):
        boxes = [Box(1, (x, 0.0, x + 10, 10.0)) for x in generator.integers(0, 30, 4).astype(float)]
        found = [Box(1, (x, 0.0, x + 10, 10.0)) for x in generator.integers(0, 30, 5).astype(float)]
        free, expected = set(range(4)), {}
        for place, detection in enumerate(found):
            overlap = {}
            for index in free:
                common = max(0.0, 10 - abs(detection.corners[0] - boxes[index].corners[0])) * 10
                overlap[index] = common / (200 - common)
            good = [index for index in sorted(free) if overlap[index] >= 0.5]
            if good:
                expected[place] = max(good, key=lambda index: overlap[index])
                free.remove(expected[place])
        assert matched(boxes, found) == expected


def test_a_crowd_is_neither_found_nor_a_false_alarm() -> None:
    boxes = [Box(1, (0, 0, 10, 10), crowd=True), Box(1, (0, 0, 10, 10))]
    found = [Box(1, (0, 0, 10, 10)), Box(1, (0, 0, 10, 10)), Box(1, (0, 0, 10, 10))]
    assert matched(boxes, found) == {0: 1, 1: 0, 2: 0}


def test_detections_with_faults(tmp_path: Path, tried: Callable[..., None]) -> None:
    truth, old, _ = coco_files(tmp_path, 3)
    bad = tmp_path / "bad.json"
    for content, expected in (
        (
            [{"image_id": 99, "category_id": 1, "bbox": [0, 0, 1, 1], "score": 1}],
            "images or categories without annotations",
        ),
        ([{"image_id": 1, "category_id": 1, "bbox": [0, 0, -1, 1], "score": 1}], "holds no detections"),
        ([{"image_id": 1}], "holds no detections"),
        ({"a": 1}, "holds no detections"),
    ):
        tried("bad inputs")
        bad.write_text(json.dumps(content))
        with pytest.raises(UserError, match=expected):
            read_logs("coco", old, bad, ground_truth=truth)
    tried("bad inputs")
    with pytest.raises(UserError, match="holds no annotations"):
        read_logs("coco", old, old, ground_truth=old)


def test_options_that_do_not_go_together(shell: Shell, tmp_path: Path, tried: Callable[..., None]) -> None:
    old, new = lm_pair(tmp_path, 40, [1], [2])
    for words, expected in (
        (("--inspect",), "--lm-eval and --inspect at once"),
        (("--min-score", "0.5"), "--lm-eval and --min-score at once"),
        (("--predictions", "p.csv"), "--lm-eval and --predictions at once"),
        (("--equal-groups", "--group", "answer"), "no groups in the logs"),
        (("--weight", "w"), "--lm-eval and --weight at once"),
        (("--metric", "a="), "--metric a= is not a metric"),
        (("--task-field", "subjct"), "did you mean 'subject'?"),
    ):
        tried("bad inputs")
        assert shell("certify", "--lm-eval", old, new, "--margin", "0.02", *words) == 2
        assert expected in shell.err
