"""Both models speak the labels' language, or it is said: in CSV and Parquet alike."""

from __future__ import annotations

import csv
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.certify.claims import Counts
from holdfast.certify.predictions import certify
from holdfast.certify.tables import Paired, paired_table, read_joined, read_paired
from holdfast.certify.vocabulary import are_numbers, number
from holdfast.errors import UserError

Table = dict[str, list[Any]]


def written(folder: Path, table: Table) -> list[Path]:
    """The same table as CSV text, as Parquet of text and, where its columns have types, as Parquet of those."""
    text = {name: [str(value) for value in column] for name, column in table.items()}
    with (folder / "t.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(text)
        rows.writerows(zip(*text.values(), strict=True))
    pq.write_table(pa.table(text), folder / "text.parquet")
    pq.write_table(pa.table(table), folder / "typed.parquet")
    return [folder / "t.csv", folder / "text.parquet", folder / "typed.parquet"]


def everywhere(folder: Path, table: Table, **options: Any) -> Paired:
    """Read from every kind of file; all must count alike."""
    found = [read_paired(path, **options) for path in written(folder, table)]
    assert found[0].counts() == found[1].counts() == found[2].counts()
    assert [item.inspection.warnings for item in found] == [found[0].inspection.warnings] * 3
    return found[0]


def ten_classes(wrong_of_new: int = 35) -> Table:
    """100 images of 10 classes: the old model is always right, the new one wrong on some."""
    label = [k % 10 for k in range(100)]
    new = [(value + 1) % 10 if k < wrong_of_new else value for k, value in enumerate(label)]
    return {"task": ["digits"] * 100, "label": label, "old": list(label), "new": new}


@pytest.mark.parametrize("old", [float, lambda k: f"{k}.0", lambda k: f"0{k}", lambda k: f" {k}", lambda k: f"{k}e0"])
def test_a_number_is_a_number_however_it_is_written(tmp_path: Path, old: Callable[[int], Any]) -> None:
    table = ten_classes()
    paired = everywhere(tmp_path, {**table, "old": [old(value) for value in table["old"]]})
    assert paired.counts() == {"digits": Counts("digits", 100, 0, 35)}
    assert paired.inspection.numbers


def test_a_model_that_lost_is_not_certified_for_its_way_to_write(tmp_path: Path) -> None:
    table = ten_classes()
    ids = [str(k) for k in range(100)]
    single = {"example_id": ids, "task": table["task"], "label": table["label"]}
    pd.DataFrame({**single, "prediction": [float(value) for value in table["old"]]}).to_csv(tmp_path / "o.csv")
    pq.write_table(pa.table({**single, "prediction": table["new"]}), tmp_path / "n.parquet")
    result = certify(tmp_path / "o.csv", tmp_path / "n.parquet", margin=0.02)
    assert result.verdict == "regressed"
    assert result.tasks["digits"].counts == Counts("digits", 100, 0, 35)


@given(digits=st.integers(0, 10**12), point=st.integers(0, 15), exponent=st.integers(-30, 30), zeros=st.integers(0, 3))
def test_one_spelling_for_each_value(digits: int, point: int, exponent: int, zeros: int) -> None:
    whole = str(digits).rjust(point + 1, "0")
    text = "0" * zeros + whole[: len(whole) - point] + "." + whole[len(whole) - point :] + "0" * zeros
    for sign in ("", "+", "-"):
        written_so = f"{sign}{text}e{exponent}"
        found = number(written_so)
        assert found is not None
        assert Decimal(found) == Decimal(written_so)
        assert number(found) == found
        shifted = Decimal(written_so) * 10
        assert (number(str(shifted)) == found) == (digits == 0)


@pytest.mark.parametrize(
    "text", ["", "+", "-", ".", "e3", "3e", "1,000", "0x3", "inf", "nan", "3 4", "三", "--3", "3-"]
)
def test_text_that_is_no_number(text: str) -> None:
    assert number(text) is None


def test_codes_are_not_numbers(tmp_path: Path) -> None:
    assert are_numbers(["3", "3.0", "4"])
    assert are_numbers(["03", "04"])
    assert not are_numbers(["03", "3"])
    assert not are_numbers(["03", "cat"])
    codes = {"task": ["t"] * 4, "label": ["03", "3", "03", "3"], "old": ["03", "3", "3", "3"], "new": ["03"] * 4}
    assert everywhere(tmp_path, codes).counts() == {"t": Counts("t", 4, 1, 2)}
    words = {"task": ["t"] * 3, "label": ["03", "cat", "cat"], "old": ["03", "cat", "cat"], "new": ["3", "cat", "cat"]}
    with pytest.raises(UserError, match="the unknown label '3'"):
        read_paired(written(tmp_path, words)[0])


def test_a_model_that_never_says_a_label_is_refused(tmp_path: Path, tried: Callable[..., None]) -> None:
    table = ten_classes()
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    for model in ("old", "new"):
        strange = {**table, model: [names[value] for value in table[model]]}
        for path in written(tmp_path, strange):
            tried("bad inputs")
            with pytest.raises(UserError) as caught:
                read_paired(path)
            message = caught.value.text()
            assert f"no prediction of the {model} model is one of the labels" in message
            assert "'0', '1', '2'" in message
            assert any(repr(name) in message for name in names)


def test_a_model_that_hardly_says_a_label_is_named_with_its_words(tmp_path: Path) -> None:
    table = ten_classes(0)
    old = [value if k < 10 else f"class_{value}" for k, value in enumerate(table["old"])]
    path = written(tmp_path, {**table, "old": [str(value) for value in old]})[0]
    (warning,) = read_paired(path).inspection.warnings
    assert "only 10 % of the old model's predictions are labels" in warning
    assert "'class_0'" in warning
    assert "'0', '1', '2'" in warning
    reported = certify(path, margin=0.02, distinct_rows=True).to_json()
    assert reported["input"]["warnings"] == [warning]


def test_classes_that_are_numbered_otherwise_are_noticed(tmp_path: Path) -> None:
    table = ten_classes(0)
    shifted = {**table, "old": [(value + 1) % 10 for value in table["old"]]}
    (warning,) = everywhere(tmp_path, shifted).inspection.warnings
    assert "the old model is right on 0 % of the rows" in warning
    assert everywhere(tmp_path, ten_classes(50)).inspection.warnings == ()


def test_plus_and_minus(tmp_path: Path) -> None:
    table = {
        "task": ["sign"] * 5,
        "label": ["+", "-", "+", "-", "+"],
        "old": ["+", "-", "-", "-", "+"],
        "new": ["+", "-", "+", "?", "+"],
    }
    assert everywhere(tmp_path, table).counts() == {"sign": Counts("sign", 5, 1, 1)}
    languages = {"task": ["t"] * 3, "label": ["c", "c", "c++"], "old": ["c", "c++", "c++"], "new": ["c#", "c", "c++"]}
    assert everywhere(tmp_path, languages).counts() == {"t": Counts("t", 3, 1, 1)}


@pytest.mark.parametrize("word", ["NA", "N/A", "null"])
def test_a_class_called_na(tmp_path: Path, word: str, tried: Callable[..., None]) -> None:
    table = {
        "task": [word, "EU", "EU", word],
        "label": [word, "EU", "EU", word],
        "old": [word, "EU", word, "EU"],
        "new": [word, "EU", "EU", "EU"],
    }
    paired = everywhere(tmp_path, table)
    assert paired.counts() == {word: Counts(word, 2, 0, 0), "EU": Counts("EU", 2, 1, 0)}
    assert paired.inspection.warnings == ()
    # A prediction that is missing where no class has that name stays a hole.
    holes = {"task": ["EU"] * 3, "label": ["EU"] * 3, "old": ["EU", "EU", "EU"], "new": ["EU", word, "EU"]}
    for path in written(tmp_path, holes):
        tried("bad inputs")
        with pytest.raises(UserError, match=r"1 empty or NaN cell in column new[\s\S]*if .* is a class"):
            read_paired(path)
        assert read_paired(path, ["EU", word]).counts() == {"EU": Counts("EU", 3, 0, 1)}
    # Rows that are all NA may be missing from end to end.
    rows = {name: [*column, word] for name, column in {**holes, "new": ["EU"] * 3}.items()}
    (warning,) = everywhere(tmp_path, rows).inspection.warnings
    assert f"1 rows have the label {word}" in warning


def test_empty_null_and_nan_are_never_a_class(tmp_path: Path, tried: Callable[..., None]) -> None:
    good = ["a", "b", "a"]
    for hole in ("", "nan", "NaN", "<NA>", None, float("nan")):
        tried("bad inputs")
        table = pa.table({"task": good, "label": good, "old": good, "new": pa.array([hole, hole, hole])})
        with pytest.raises(UserError, match="3 empty or NaN cells in column new"):
            paired_table(table)
    frame = pd.DataFrame({"task": good, "label": ["NA", "b", "a"], "old": good, "new": good})
    frame.to_csv(tmp_path / "p.csv", index=False)
    with pytest.raises(UserError, match="column label"):
        certify(pd.read_csv(tmp_path / "p.csv"))  # pandas took the class NA for a hole
    categories = pd.DataFrame({"task": good, "label": good, "old": good, "new": good}).astype("category")
    categories["new"] = categories["new"].cat.add_categories(["", "never"])
    assert set(certify(categories, distinct_rows=True).tasks) == {"a", "b"}


def test_free_text(tmp_path: Path) -> None:
    """Answers that are seldom equal to anything; some labels that nobody says, some capitals that differ."""
    draw = np.random.default_rng(3)
    label = [f"The answer is number {k} of {int(draw.integers(1000))}" for k in range(200)]
    old = [text if k % 3 else f"I think it is {k}" for k, text in enumerate(label)]
    new = [text if k % 4 else text.upper() if k % 8 else f"perhaps {k}" for k, text in enumerate(label)]
    table = {"task": ["questions"] * 200, "label": label, "old": old, "new": new}
    paired = everywhere(tmp_path, table)
    right = [(k % 3 != 0, k % 4 != 0) for k in range(200)]
    expected = (200, sum(b and not a for a, b in right), sum(a and not b for a, b in right))
    assert paired.counts() == {"questions": Counts("questions", *expected)}
    assert any("differ from a label in spelling only" in text for text in paired.inspection.warnings)
    assert any("were predicted by neither model" in text for text in paired.inspection.warnings)
    numbers = {**table, "label": list(range(200)), "old": [f"{k}.00" for k in range(200)], "new": list(range(200))}
    assert everywhere(tmp_path, numbers).counts() == {"questions": Counts("questions", 200, 0, 0)}
    silent = {**table, "new": [f"{k}!" if k else label[0] for k in range(200)]}
    assert any("only 0.5 % of the new model's" in text for text in everywhere(tmp_path, silent).inspection.warnings)


# -- answers that were graded elsewhere -------------------------------------------------------------------------------

GRADES = {
    "truths": [True, False],
    "numbers": [1, 0],
    "floats": [1.0, 0.0],
    "words": ["true", "false"],
    "capitals": ["True", "FALSE"],
}


@pytest.mark.parametrize("kind", GRADES)
def test_graded_answers(tmp_path: Path, kind: str) -> None:
    yes, no = GRADES[kind]
    table = {
        "task": ["a"] * 4 + ["b"] * 3,
        "old_correct": [yes, yes, no, no, yes, yes, no],
        "new_correct": [yes, no, yes, no, yes, yes, yes],
    }
    expected = {"a": Counts("a", 4, 1, 1), "b": Counts("b", 3, 1, 0)}
    paired = everywhere(tmp_path, table)
    assert paired.counts() == expected
    assert paired.inspection.as_json()["answers"] == "graded columns"
    ids = [str(k) for k in range(7)]
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        single = {"example_id": ids, "task": table["task"], "correct": table[f"{name}_correct"]}
        written(tmp_path / name, single)
    for first in ("t.csv", "typed.parquet"):
        for second in ("t.csv", "text.parquet", "typed.parquet"):
            assert read_joined(tmp_path / "old" / first, tmp_path / "new" / second).counts() == expected


def test_grades_that_are_none(tmp_path: Path, tried: Callable[..., None]) -> None:
    table = {"task": ["a", "a"], "old_correct": [1, 0], "new_correct": [1, 0.5]}
    single = {"example_id": ["1", "2"], "task": ["a", "a"], "label": ["x", "x"], "prediction": ["x", "y"]}
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: certify(table), "column new_correct of the predictions holds '0.5'"),
        (lambda: certify({**table, "new_correct": [1, None]}), "1 empty or NaN cell in column new_correct"),
        (lambda: certify({"task": ["a"], "old_correct": [1]}), "lacks column new_correct"),
        (lambda: certify({**table, "new_correct": [1, 1]}, labels=["x"]), "--labels and columns of right and wrong"),
        (lambda: certify({**single, "correct": [1, 0]}, single), "lacks column correct"),
    ]
    for call, message in cases:
        tried("bad inputs")
        with pytest.raises(UserError) as caught:
            call()
        assert message in caught.value.text()


def test_grades_decide_and_say_where_the_answers_differ() -> None:
    table = {
        "task": ["a"] * 3,
        "label": ["x", "y", "z"],
        "old": ["x", "y", "z"],
        "new": ["x", "Y", "w"],
        "old_correct": [1, 1, 1],
        "new_correct": [1, 1, 0],
    }
    paired = paired_table(pa.table(table))
    assert paired.counts() == {"a": Counts("a", 3, 0, 1)}
    assert paired.inspection.warnings == (
        "old_correct and new_correct decide; 1 of them say otherwise than label, old and new do",
    )
