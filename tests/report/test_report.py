"""The page is complete, says what may be said, and nothing in a name or a file becomes part of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from holdfast.artifacts import RunFolder
from holdfast.certify.exact.score_test import lower_bounds
from holdfast.errors import UserError
from holdfast.evaluate.flips import overall
from holdfast.files import read_json, write_json
from holdfast.report.content import read_run
from holdfast.report.html.markup import change_mark, lines, points, tag
from holdfast.report.page import write_report
from holdfast.report.sections.candidates import candidates_section
from holdfast.report.sections.figures import confusion_counts
from holdfast.report.sections.flips import run_flips
from holdfast.report.sections.record import record_section
from holdfast.report.sections.run import run_sections
from holdfast.report.study import StudyContent, study_banner
from holdfast.report.words import verdict_text
from tests.compare.fabricated import comparison, finish, make_study
from tests.report.fabricated import HOSTILE, made_up_run


class Reader(HTMLParser):
    """Elements, attributes and text of a page, as a browser would find them."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._inside: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._inside:
            del self._inside[len(self._inside) - 1 - self._inside[::-1].index(tag) :]

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self._inside):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def with_class(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for _, attributes in self.elements if name in (attributes.get("class") or "").split()]


def page_of(run: Path, out: Path) -> tuple[str, Reader]:
    write_report(run, out)
    page = out.read_text(encoding="utf-8")
    return page, Reader(page)


def test_a_certified_run_says_so_with_claim_margin_and_confidence(tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", margin=0.3)
    _, page = page_of(run, tmp_path / "out.html")
    assert "each of the 4 protected classes keeps its accuracy to within 30 points" in page.text
    assert "Confidence 95 %" in page.text
    assert "at most 5 times in 100" in page.text
    assert "It is not P(bad | shipped)" in page.text
    card = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert card["verdict"] == "certified"
    assert card["shipped"].startswith("step-")
    assert {task["task"] for task in card["evidence"]["tasks"]} == {"fog", "rain", "sun", "snow"}
    assert "keeps its accuracy" in (tmp_path / "out.md").read_text(encoding="utf-8")


def test_rows_are_worst_first_and_carry_the_certificate_s_own_figures(tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", drop=0.2)
    content = read_run(run)
    changes = [row.difference for row in content.evidence.protected]
    assert changes == sorted(changes)
    reported = {task["task"]: task for task in read_json(RunFolder(run).result)["certificate"]["tasks"]}
    for row in content.evidence.rows:
        assert row.bound == reported[row.task]["simultaneous_lower_bound"]
        assert row.difference == (row.gained - row.lost) / row.n


def test_without_sealed_images_bounds_come_from_dev_and_are_called_no_proof(tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", sealed="none", drop=0.2)
    content = read_run(run)
    row = content.evidence.worst
    assert content.evidence.role == "dev"
    assert row.bound == lower_bounds(row.gained, row.lost, row.n, (0.05 / 5,), extra=(0.3,))[0]
    _, page = page_of(run, tmp_path / "out.html")
    assert "they describe and do not prove" in page.text
    assert "No certificate" in page.text


@pytest.mark.parametrize("leftover", [False, True])
def test_nothing_of_a_sealed_set_is_shown_before_it_is_retired(tmp_path: Path, leftover: bool) -> None:
    run = made_up_run(tmp_path / "run", sealed="open", source=tmp_path / "pictures")
    folder = RunFolder(run)
    if leftover:  # predictions that should not be there open nothing either
        old = pq.read_table(folder.predictions("old", "dev"))
        sealed = pq.read_table(folder.roles).to_pylist()
        ids = [item["example_id"] for item in sealed if item["role"] == "sealed"]
        table = old.set_column(0, "example_id", [ids])
        pq.write_table(table, folder.predictions("old", "sealed"))
        pq.write_table(table, folder.predictions("new", "sealed"))
    sealed_ids = {item["example_id"] for item in pq.read_table(folder.roles).to_pylist() if item["role"] == "sealed"}
    content = read_run(run)
    assert not content.retired
    assert [pair.role for pair in content.pairs] == ["dev"]
    assert not {str(identity) for pair in content.pairs for identity in pair.ids} & sealed_ids
    page, read = page_of(run, tmp_path / "out.html")
    assert not [identity for identity in sealed_ids if identity in page]
    assert "the set is still sealed" in read.text
    assert content.evidence.role == "dev"


def test_a_retired_set_is_shown_in_full(tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", sealed="passed", drop=0.3, source=tmp_path / "pictures")
    content = read_run(run)
    assert [pair.role for pair in content.pairs] == ["sealed", "dev"]
    _, page = page_of(run, tmp_path / "out.html")
    assert "sealed, retired" in page.text


def test_pictures_come_from_the_source_and_only_where_their_bytes_are_unchanged(tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", drop=0.5, sealed="none", source=tmp_path / "pictures")
    _, page = page_of(run, tmp_path / "a.html")
    shown = [item for name, item in page.elements if name == "img"]
    assert len(shown) == len(page.with_class("lost")) + len(page.with_class("gained"))
    assert all(str(item["src"]).startswith("data:image/") for item in shown)
    for file in (tmp_path / "pictures").rglob("*.png"):
        file.write_bytes(file.read_bytes() + b" ")
    _, page = page_of(run, tmp_path / "b.html")
    assert not [item for name, item in page.elements if name == "img"]
    assert "the source of this picture is gone, or the file changed" in page.text


def test_every_lost_image_is_named_with_both_predictions(tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", drop=0.3, sealed="none", source=tmp_path / "pictures")
    pair = read_run(run).pairs[0]
    expected = {f"{pair.label[row]} {pair.old[row]} {pair.new[row]}" for row in pair.lost}
    _, page = page_of(run, tmp_path / "out.html")
    found = {" ".join(str(item["data-find"]).split(" ")[:3]) for item in page.with_class("lost")}
    assert found == expected
    assert len(page.with_class("lost")) == len(pair.lost)


def test_hostile_names_are_text_and_the_policy_allows_nothing_else(tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", HOSTILE, drop=0.3, source=tmp_path / "pictures", sealed="none")
    page, read = page_of(run, tmp_path / "out.html")
    assert [name for name, _ in read.elements].count("script") == 1
    assert not [item for _, item in read.elements if any(key.startswith("on") or key == "style" for key in item)]
    assert "<script>window.hit=1</script>" in read.text
    assert "a‹202E›b&amp;‹0007›" in read.text
    assert "\u202e" not in page
    policy = next(str(item["content"]) for _, item in read.elements if item.get("http-equiv"))
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    markdown = (tmp_path / "out.md").read_text(encoding="utf-8")
    assert "<script" not in markdown
    assert "<img" not in markdown


def test_no_address_outside_the_page(tmp_path: Path) -> None:
    page, read = page_of(made_up_run(tmp_path / "run", source=tmp_path / "pictures"), tmp_path / "out.html")
    links = [item.get("href") or item.get("src") for _, item in read.elements if item.get("href") or item.get("src")]
    assert links
    assert all(str(link).startswith(("#", "data:image/")) for link in links)
    assert "@import" not in page
    assert len(page) < 6_000_000


def test_making_a_page_never_loads_torch(tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run")
    script = (
        "import sys; from pathlib import Path; from holdfast.report.page import write_report; "
        f"write_report(Path({str(run)!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
    assert (run / "report.html").exists()


def test_candidates_tell_no_more_than_the_sequence_does(tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", sealed="failed")
    assert [candidate.outcome for candidate in read_run(run).candidates] == ["did not pass", "not tested", "not tested"]
    folder = RunFolder(run)
    result = read_json(folder.result)
    result |= {"chosen": result["order"][1], "kept_old": False}
    write_json(folder.result, result)
    assert [candidate.outcome for candidate in read_run(run).candidates] == ["passed", "shipped", "did not pass"]


def test_confusion_counts_are_those_of_a_plain_count() -> None:
    random = np.random.default_rng(0)
    classes = ["a", "b", "c"]
    label, predicted = (np.array(classes, dtype=object)[random.integers(0, 3, 200)] for _ in range(2))
    table = confusion_counts(label, predicted, classes)
    for row, name in enumerate(classes):
        for column, other in enumerate(classes):
            assert table[row, column] == sum((label == name) & (predicted == other))


def test_a_drop_is_marked_by_more_than_colour() -> None:
    assert "▼" in change_mark(-0.001)
    assert "▼" not in change_mark(0.001)
    assert points(-0.0123) == "−1.2"
    assert points(-0.00001) == "0.0"


def test_elements_escape_text_and_attributes() -> None:
    assert tag("b", "<i>", title='"x"') == '<b title="&quot;x&quot;">&lt;i&gt;</b>'


def test_a_folder_of_another_kind_and_an_unfinished_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a run"):
        write_report(tmp_path)
    run = made_up_run(tmp_path / "run")
    RunFolder(run).result.unlink()
    with pytest.raises(UserError, match="not finished"):
        write_report(run)


def test_a_round_without_sealed_images_has_no_ledger_to_miss(tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", sealed="none")
    state = read_json(RunFolder(run).state)
    write_json(RunFolder(run).state, {**state, "counts": {**state["counts"], "sealed": 0}})
    pq.write_table(pq.read_table(RunFolder(run).roles).slice(0, 5 * 40), RunFolder(run).roles)
    assert read_run(run).notes == []
    assert "could not be read" not in page_of(run, tmp_path / "page.html")[1].text


def test_a_study_shows_its_tables_and_figures(tmp_path: Path) -> None:
    from holdfast.compare.choose import choose, read_records
    from holdfast.compare.grid import plan
    from holdfast.compare.output import write_outputs

    study = make_study(tmp_path)
    jobs = plan(study, tmp_path)
    for number, job in enumerate(jobs):
        finish(job, -number, 20, test=comparison(-number, 20))
    records = read_records(jobs)
    write_outputs(study, jobs, records, choose(jobs, records), tmp_path, figures=True)
    write_json(tmp_path / "study.json", study.config.model_dump(mode="json"))
    _, page = page_of(tmp_path, tmp_path / "out.html")
    chosen = read_json(tmp_path / "chosen.json")[0]
    assert f"{chosen['row']} keeps every class in 50 % of its seeds" in page.text
    assert "+40.0 points" in page.text
    figures = [item for name, item in page.elements if name == "img"]
    assert len(figures) == len(list((tmp_path / "figures").glob("*.png"))) > 2
    card = read_json(tmp_path / "out.json")
    assert card["results"][0]["retention_ratio"] == 0.5


@pytest.mark.parametrize("sealed", ["open", "passed"])
def test_flip_rates_are_those_of_dev_images_and_of_a_retired_set_alone(sealed: str, tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", sealed=sealed, drop=0.3)
    content = read_run(run)
    sets = run_flips(content)
    assert list(sets) == (["dev"] if sealed == "open" else ["sealed", "dev"])
    for role, tasks in sets.items():
        new = content.dev_name if role == "dev" else "new"
        tables = [pq.read_table(RunFolder(run).predictions(name, role)).to_pylist() for name in ("old", new)]
        for name, rates in tasks.items():
            pairs = [(a, b) for a, b in zip(*tables, strict=True) if a["label"] == name]
            right = [(a["prediction"] == name, b["prediction"] == name) for a, b in pairs]
            lost, gained = right.count((True, False)), right.count((False, True))
            assert (rates.examples, rates.lost, rates.gained) == (len(pairs), lost, gained)
            assert rates.old_correct == sum(before for before, _ in right)
    _, page = page_of(run, tmp_path / "out.html")
    rates = overall(sets["dev"].values())
    assert f"on dev images NFR {rates.negative * 100:.2f} %" in page.text
    assert ("on sealed images NFR" in page.text) == (sealed == "passed")


def test_where_no_method_kept_every_class_the_headline_names_the_smallest_loss(tmp_path: Path) -> None:
    def scored(row: str, gain: float, loss: float) -> dict[str, Any]:
        test = {"retention_ratio": 0.0, "target_gain": [gain, 0.0], "dev_safety": [loss, 0.0]}
        return {"row": row, "column": "all", "setting": "", "test": test}

    chosen = [scored("bold", 0.6, -0.33), scored("careful", 0.44, -0.05)]
    config = {"round": {"task": {"target": "eight"}}}
    page = Reader(str(study_banner(StudyContent(tmp_path, config, chosen, [], {}, {}))))
    assert "careful lost least, −5.0 points on its worst class" in page.text
    assert "It changes eight by +44.0 points" in page.text


def test_the_grounds_count_the_target_s_images_too_and_the_ledger_is_in_words(tmp_path: Path) -> None:
    content = read_run(made_up_run(tmp_path / "run", margin=0.3))
    reported = dict(content.reported or {})
    images = sum(row["n"] for row in reported["tasks"])
    reported["target"] = {**reported["tasks"][0], "task": "night", "n": 7}
    assert f"on {images + 7} sealed images" in verdict_text(replace(content, reported=reported)).grounds
    opened = {"event": "opened", "budget": {"queries": 1, "candidates": 2, "passes": 1, "delta": 0.05}}
    page = Reader(str(record_section(replace(content, ledger=[opened]))))
    assert "opened for 1 query of 2 candidates and 1 pass, δ = 0.05" in page.text


def test_a_margin_that_buys_nothing_is_said_in_a_sentence(tmp_path: Path) -> None:
    run = made_up_run(tmp_path / "run", margin=0.3)
    result = read_json(RunFolder(run).result)
    flat = [{**step, "target_gain": 0.25} for step in result["gain_by_margin"]]
    write_json(RunFolder(run).result, {**result, "gain_by_margin": flat})
    _, page = page_of(run, tmp_path / "out.html")
    assert "a larger margin would buy no more" in page.text
    assert "accepted loss on every protected task" not in page.text


def test_the_settings_of_a_round_stand_on_lines_of_their_own(tmp_path: Path) -> None:
    record = str(record_section(read_run(made_up_run(tmp_path / "run", margin=0.3))))
    shown = record.partition("<pre>")[2].partition("</pre>")[0]
    assert "&quot;target&quot;: &quot;night&quot;" in shown
    assert "‹" not in shown
    assert len(shown.splitlines()) > 10
    assert lines(["a\nb", "<c>"]) == "a‹000A›b\n&lt;c&gt;"


def test_an_expected_gain_that_rounds_to_nothing_is_no_drop(tmp_path: Path) -> None:
    content = read_run(made_up_run(tmp_path / "run", margin=0.3))
    listed = [replace(candidate, expected_gain=-0.0002) for candidate in content.candidates]
    assert "▼ 0.0" not in str(candidates_section(replace(content, candidates=listed)))


def test_a_round_without_training_shows_no_way_through_it(tmp_path: Path) -> None:
    content = read_run(made_up_run(tmp_path / "run", margin=0.3, steps=(0,)))
    page = Reader("".join(f"<h2>{item.title}</h2>{item.body}" for item in run_sections(content))).text
    assert "Nothing was trained." in page
    assert "What candidates gain and lose" in page
    assert not any(word in page for word in ("The way through training", "Trajectory", "Dots:", "step 0:"))
    trained = run_sections(read_run(made_up_run(tmp_path / "trained", margin=0.3)))
    assert "The way through training" in [item.title for item in trained]
