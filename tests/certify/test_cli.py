"""`certify`, `plan` and `verify` as a person runs them."""

import json
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.certify.ledger import Ledger
from holdfast.cli import main
from holdfast.files import write_json
from tests.certify.helpers import predictions, rows, write_csv
from tests.certify.test_certificate import FULL, result_of, run_folder

GOOD = {"clear": (500, 5, 3), "snowy": (400, 4, 1), "foggy": (60, 20, 1)}


class Shell:
    """Runs a command in this process; remembers what it printed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys, self.out, self.err = monkeypatch, capsys, "", ""

    def __call__(self, *arguments: object) -> int:
        self.monkeypatch.setattr(sys, "argv", ["holdfast", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        self.out, self.err = self.capsys.readouterr()
        return int(stopped.value.code or 0)

    @property
    def json(self) -> dict:
        return json.loads(self.out)


def test_three_verdicts_and_their_exit_codes(shell: Shell, tmp_path: Path) -> None:
    certified = write_csv(tmp_path / "c.csv", rows({"clear": (500, 5, 3), "snowy": (400, 4, 1)}))
    assert shell("certify", "--predictions", certified, "--margin", "0.02", "--confidence", "0.95", "--json") == 0
    reported = shell.json
    assert (reported["verdict"], reported["confidence"], reported["claim"]) == ("certified", 0.95, "all")
    wanted = {"task", "n", "gained", "lost", "difference", "margin", "p_value", "lower_bound", "verdict", "needed"}
    assert wanted <= set(reported["tasks"][0])
    assert reported["devsafety"]["lower_bound"] >= -0.02
    assert "It is not P(bad | shipped)" in reported["promise"]
    regressed = write_csv(tmp_path / "r.csv", rows({"clear": (500, 5, 60), "snowy": (400, 4, 1)}))
    assert shell("certify", "--predictions", regressed, "--margin", "0.02", "--json") == 3
    assert (shell.json["verdict"], shell.json["regressed"]) == ("regressed", ["clear"])
    undecided = write_csv(tmp_path / "u.csv", rows({"clear": (500, 5, 3), "snowy": (20, 0, 0)}))
    assert shell("certify", "--predictions", undecided, "--margin", "0.02", "--json") == 4
    assert shell.json["undecided"] == ["snowy"]
    assert shell.json["tasks"][1]["needed"] > 100


def test_a_table_a_person_can_read(shell: Shell, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "p.csv", rows({**GOOD, "rainy": (43, 3, 0)}))
    assert shell("certify", "--predictions", path, "--margin", "0.02", "--target", "foggy") == 0
    for words in ("✓ certified", "every one of the 3 protected tasks", "target foggy rose", "intersection-union"):
        assert words in " ".join(shell.out.split())
    assert "It is not P(bad | shipped)" in " ".join(shell.out.split())
    assert shell("certify", "--predictions", path, "--margin", "0.002", "--margin", "clear=0.02") == 4
    assert "would, for an 80 % chance" in " ".join(shell.out.split())


def test_margin_of_one_task_target_and_claims(shell: Shell, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "p.csv", rows(GOOD), "example_id,task,label,old,new")
    arguments = ("certify", "--predictions", path, "--margin", "0.02", "--margin", "snowy=0.05", "--json")
    assert shell(*arguments, "--target", "foggy") == 0
    assert [task["margin"] for task in shell.json["tasks"]] == [0.02, 0.05]
    assert shell.json["target"]["margin"] == 0
    for claim, word in (("each", "Hommel"), ("bounds", "Bonferroni"), ("devsafety", "worst change")):
        assert shell(*arguments, "--claim", claim, "--target", "foggy") in (0, 4)
        assert word in shell.json["claim_tested"]
    assert shell(*arguments, "--pool", "rare=snowy,foggy", "--margin", "rare=0.05") == 2
    assert shell("certify", "--predictions", path, "--margin", "0.02", "--pool", "rare=snowy,foggy", "--json") == 0
    assert shell.json["tasks"][1]["members"] == ["snowy", "foggy"]
    assert shell("certify", "--predictions", path, "--margin", "0.02", "--tasks", "clear", "--json") == 0
    assert [task["task"] for task in shell.json["tasks"]] == ["clear"]


def test_two_files_joined(shell: Shell, tmp_path: Path) -> None:
    columns = "example_id,task,label,prediction"
    table = rows(GOOD)
    old = write_csv(tmp_path / "o.csv", [{**row, "prediction": row["old"]} for row in table], columns)
    new = write_csv(tmp_path / "n.csv", [{**row, "prediction": row["new"]} for row in reversed(table)], columns)
    whole = write_csv(tmp_path / "p.csv", table, "example_id,task,label,old,new")
    assert shell("certify", "--predictions", whole, "--margin", "0.02", "--json") == 0
    expected = shell.json
    assert shell("certify", "--old", old, "--new", new, "--margin", "0.02", "--json") == 0
    assert shell.json == expected
    assert shell("certify", "--predictions", old, "--predictions", new, "--margin", "0.02", "--json") == 0
    assert shell.json == expected


def test_sequential(shell: Shell, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "p.csv", rows({"clear": (900, 5, 1), "snowy": (900, 4, 0)}))
    assert shell("certify", "--predictions", path, "--margin", "0.02", "--sequential", "--json") == 0
    assert shell.json["tasks"][0]["passed_at"] < 900
    assert shell("certify", "--predictions", path, "--margin", "0.02", "--sequential") == 0
    assert "however often and whenever the verdict is read" in " ".join(shell.out.split())
    lost = write_csv(tmp_path / "l.csv", rows({"clear": (400, 0, 60), "snowy": (900, 4, 0)}))
    assert shell("certify", "--predictions", lost, "--margin", "0.02", "--sequential", "--json") == 3


BAD = {
    "no margin": ((), "no margin is given"),
    "margin 1": (("--margin", "1.0"), "in [0, 1)"),
    "margin negative": (("--margin", "-0.1"), "in [0, 1)"),
    "margin nan": (("--margin", "nan"), "in [0, 1)"),
    "margin words": (("--margin", "two"), "is not a margin"),
    "margin of nobody": (("--margin", "0.02", "--margin", "snwoy=0.1"), "did you mean 'snowy'"),
    "confidence 1": (("--margin", "0.02", "--confidence", "1"), "confidence 1 is not usable"),
    "confidence 95": (("--margin", "0.02", "--confidence", "95"), "write 95 % as 0.95"),
    "target of nobody": (("--margin", "0.02", "--target", "fogy"), "did you mean 'foggy'"),
    "task without images": (("--margin", "0.02", "--tasks", "clear,tunnel"), "'tunnel' has no images"),
    "claim": (("--margin", "0.02", "--claim", "some"), "there is no claim 'some'"),
    "pool": (("--margin", "0.02", "--pool", "clear=snowy"), "is not a group"),
    "twice": (("--margin", "0.02", "--pool", "a=snowy", "--pool", "b=snowy"), "two parts in the claim"),
    "labels": (("--margin", "0.02", "--labels", "clear,snowy"), "unknown labels"),
    "no option": (("--margni", "0.02"), "No such option"),
    "confidence too fine": (("--margin", "0.02", "--confidence", "0.9999999999999"), "from 0.5 to 0.99999999"),
    "confidence nine nines": (("--margin", "0.02", "--confidence", "0.999999999"), "no level below 1e-08"),
    "confidence none": (("--margin", "0.02", "--confidence", "1e-300"), "is not usable"),
    "confidence nan": (("--margin", "0.02", "--confidence", "nan"), "is not usable"),
    "confidence inf": (("--margin", "0.02", "--confidence", "inf"), "is not usable"),
    "margin of one nan": (("--margin", "0.02", "--margin", "snowy=nan"), "in [0, 1)"),
    "margin inf": (("--margin", "inf"), "in [0, 1)"),
    "pool named as a member": (("--margin", "0.02", "--pool", "clear=clear,snowy"), "a task has that name"),
    "pool twice": (("--margin", "0.02", "--pool", "a=clear", "--pool", "a=snowy"), "two groups have that name"),
    "pool of nothing": (("--margin", "0.02", "--pool", "a="), "is not a group"),
    "pool without a name": (("--margin", "0.02", "--pool", "=clear"), "is not a group"),
    "pool of nobody": (("--margin", "0.02", "--pool", "a=claer"), "did you mean 'clear'"),
    "constant nan": (("--margin", "0.02", "--lemma-constant", "nan", "--json"), "onstant"),
    "constant inf": (("--margin", "0.02", "--lemma-constant", "inf"), "lemma-constant"),
    "out is a folder": (("--margin", "0.02", "--out", "/"), "cannot write"),
    "out is nowhere": (("--margin", "0.02", "--out", "/proc/none/c.json"), "cannot write"),
    "a name too long": (("--margin", "0.02", "--out", "c.json", "--data", "x" * 5000), "cannot be used"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_a_sentence_and_exit_2(shell: Shell, tmp_path: Path, name: str, tried) -> None:
    tried("bad inputs")
    arguments, message = BAD[name]
    path = write_csv(tmp_path / "p.csv", rows(GOOD), "example_id,task,label,old,new")
    assert shell("certify", "--predictions", path, *arguments) == 2
    assert message in " ".join(shell.err.split())
    assert "Traceback" not in shell.err
    assert shell.out == ""


def test_two_tables_without_an_option(shell: Shell, tmp_path: Path) -> None:
    columns = "example_id,task,label,prediction"
    paths = [
        write_csv(tmp_path / f"{model}.csv", [{**row, "prediction": row[model]} for row in rows(GOOD)], columns)
        for model in ("old", "new")
    ]
    assert shell("certify", "--old", paths[0], "--new", paths[1], "--margin", "0.02", "--json") == 0
    by_name = shell.json
    assert shell("certify", *paths, "--margin", "0.02", "--json") == 0
    assert shell.json == by_name
    both = write_csv(tmp_path / "both.csv", rows(GOOD))
    assert shell("certify", both, "--margin", "0.02", "--json") == 0
    assert [row["lost"] for row in shell.json["tasks"]] == [row["lost"] for row in by_name["tasks"]]


def test_tables_that_are_not_given_well(shell: Shell, tmp_path: Path, tried) -> None:
    both = write_csv(tmp_path / "both.csv", rows(GOOD))
    cases = ((both, both, both), (both, both, "--old", both, "--new", both), (tmp_path / "none.csv",), (both, tmp_path))
    for arguments in cases:
        tried("bad inputs")
        assert shell("certify", *arguments, "--margin", "0.02", "--summary", tmp_path / "s.md") == 2
        assert "Traceback" not in shell.err
        assert not (tmp_path / "s.md").exists()


def test_nothing_to_certify(shell: Shell, tmp_path: Path) -> None:
    assert shell("certify", "--margin", "0.02") == 2
    assert shell("certify", tmp_path / "none", "--margin", "0.02") == 2
    assert shell("certify", tmp_path, "--predictions", "x.csv") == 2


def test_plan(shell: Shell, tmp_path: Path) -> None:
    common = ("plan", "--margin", "0.02", "--discordance", "0.02", "--power", "0.8", "--json")
    assert shell(*common, "--tasks", 5) == 0
    assert shell.json["per_task"] == 675
    assert shell(*common, "--tasks", 5, "--simultaneous") == 0
    assert shell.json["per_task"] > 675
    assert shell("plan", "--discordance", "0.02", "--images", 300, "--json") == 0
    assert shell.json["best_margin"] == pytest.approx(0.0245, abs=0.001)
    dev = write_csv(tmp_path / "dev.csv", rows(GOOD))
    assert shell("plan", "--predictions", dev, "--target", "foggy", "--margin", "0.03", "--json") == 0
    assert shell.json["tasks"] == 2
    assert [item["task"] for item in shell.json["by_task"]] == ["clear", "snowy"]
    assert shell.json["per_task"] == max(item["per_task"] for item in shell.json["by_task"])
    assert shell("plan", "--predictions", dev, "--images", 300, "--margin", "0.03") == 0
    assert "images needed" in " ".join(shell.out.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ("--margin", "0.02"),
        ("--discordance", "0.02"),
        ("--discordance", "2", "--margin", "0.02"),
        ("--discordance", "0.02", "--margin", "0"),
        ("--discordance", "0.02", "--margin", "0.02", "--power", "1"),
        ("--discordance", "0.02", "--margin", "0.02", "--difference", "0.1"),
        ("--discordance", "0.02", "--margin", "snowy=0.02"),
        ("--discordance", "nan", "--margin", "0.02"),
        ("--discordance", "0.02", "--margin", "nan"),
        ("--discordance", "0.02", "--margin", "1e-300"),
        ("--discordance", "0.02", "--margin", "1e-9"),
        ("--discordance", "0.02", "--margin", "0.02", "--difference", "nan"),
        ("--discordance", "0.02", "--margin", "0.02", "--difference", "inf"),
        ("--discordance", "0.02", "--margin", "0.02", "--power", "nan"),
        ("--discordance", "0.02", "--margin", "0.02", "--power", "0.9999999999"),
        ("--discordance", "0.02", "--margin", "0.02", "--confidence", "0.9999999999999"),
        ("--discordance", "0.02", "--margin", "0.02", "--tasks", "99999999999999999999"),
        ("--discordance", "0.02", "--margin", "0.02", "--tasks", "1000000", "--simultaneous", "--confidence", "0.99"),
        ("--discordance", "0.02", "--images", "99999999999999999999"),
        ("--predictions", "/dev/zero", "--margin", "0.02"),
        ("--predictions", "x" * 5000, "--margin", "0.02"),
    ],
)
def test_plans_that_make_no_sense(shell: Shell, arguments: tuple[str, ...], tried) -> None:
    tried("bad inputs")
    assert shell("plan", *arguments) == 2
    assert "Traceback" not in shell.err


def test_certificate_and_verification(shell: Shell, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "p.csv", rows(GOOD), "example_id,task,label,old,new")
    (tmp_path / "w").write_text("weights")
    out = tmp_path / "c.json"
    arguments = ("certify", "--predictions", path, "--margin", "0.02", "--out", out, "--new-model", tmp_path / "w")
    assert shell(*arguments) == 0
    assert shell("verify", out) == 0
    assert "the certificate holds: verdict certified" in shell.out
    assert shell("verify", out, "--json") == 0
    assert shell.json["holds"]
    (tmp_path / "w").write_text("other weights")
    assert shell("verify", out) == 3
    assert "changed" in shell.err
    assert shell("verify", tmp_path / "none.json") == 2


@pytest.fixture
def predicts(monkeypatch: pytest.MonkeyPatch):
    """Stands in for the model: says what the sealed predictions are, and counts how often they were made."""

    def install(spec) -> list[str]:
        from holdfast.rounds import certify_run

        asked: list[str] = []

        class Models:
            def predict(self, name: str):
                asked.append(name)
                return predictions(rows(spec), name)

        @contextmanager
        def prepared(run, config, root, plan):
            yield Models()

        monkeypatch.setattr(certify_run, "_prepared", prepared)
        monkeypatch.setattr(certify_run, "model_fingerprint", lambda folder: "sha256:new")
        return asked

    return install


def test_a_run_that_passes(shell: Shell, tmp_path: Path, predicts) -> None:
    run, calls = run_folder(tmp_path / "run", FULL), predicts(FULL)
    assert shell("certify", run.root, "--ledger", tmp_path / "ledger", "--json") == 0
    assert shell.json["verdict"] == "certified"
    assert shell.json["sealed"]["retired"]
    assert calls == ["old", "new"]
    assert shell("verify", run.root) == 0
    # Asked again it says what it has, and spends nothing.
    assert shell("certify", run.root, "--ledger", tmp_path / "ledger") == 0
    assert calls == ["old", "new"]
    assert "✓ certified" in shell.out


def test_a_run_that_does_not_pass_shows_one_bit(shell: Shell, tmp_path: Path, predicts) -> None:
    lost = {**FULL, "clear": (500, 5, 60)}
    run, calls = run_folder(tmp_path / "run", lost, queries=2), predicts(lost)
    ledger = ("--ledger", tmp_path / "ledger")
    (tmp_path / "file").write_text("")
    for nowhere in (tmp_path, tmp_path / "file" / "summary.md"):  # found out before the query, and not after it
        assert shell("certify", run.root, *ledger, "--summary", nowhere) == 2
        assert calls == []
    summary = tmp_path / "summary.md"
    # Not 3: that would tell more than pass or not.
    assert shell("certify", run.root, *ledger, "--summary", summary) == 4
    assert "query 1 is spent; 1 left" in shell.out
    assert "gained" not in shell.out
    assert "query 1 did not pass; 1 left" in summary.read_text()
    assert "clear" not in summary.read_text()
    assert not run.predictions("new", "sealed").exists()
    assert not run.certificate.exists()
    # The same claim has its answer on record: asked again it costs nothing, and tells nothing more.
    assert shell("certify", run.root, *ledger) == 4
    assert "query 1 is spent; 1 left" in shell.out
    # Another claim is another query.
    assert shell("certify", run.root, *ledger, "--margin", "0.01", "--verbose") == 4
    assert "it is retired" in shell.out
    assert "gained" in shell.out  # spent: it may be shown in full
    assert shell("certify", run.root, *ledger, "--margin", "0.03") == 4
    assert "is spent" in shell.err
    assert calls == ["old", "new"] * 3


@pytest.mark.parametrize(
    ("arguments", "code"), [(("--confidence", "2"), 2), (("--margin", "7"), 2), (("--margin", "nobody=0.1"), 2)]
)
def test_bad_input_spends_no_look(shell: Shell, tmp_path: Path, predicts, arguments, code: int) -> None:
    run, calls = run_folder(tmp_path / "run", FULL), predicts(FULL)
    assert shell("certify", run.root, "--ledger", tmp_path / "ledger", *arguments) == code
    assert not (tmp_path / "ledger").exists()
    assert not calls


def test_runs_without_a_new_model_spend_no_look(shell: Shell, tmp_path: Path, predicts) -> None:
    run, calls = run_folder(tmp_path / "run", FULL), predicts(FULL)
    write_json(run.result, result_of(FULL, kept_old=True, chosen=None, reason="nothing was safe"))
    assert shell("certify", run.root, "--ledger", tmp_path / "ledger") == 4
    assert "nothing to certify" in shell.err
    run.result.unlink()
    assert shell("certify", run.root, "--ledger", tmp_path / "ledger") == 2
    assert not calls
    assert not (tmp_path / "ledger").exists()


def test_too_few_sealed_images_spend_no_look(shell: Shell, tmp_path: Path, predicts) -> None:
    few = {**FULL, "snowy": (3, 0, 0)}
    run, calls = run_folder(tmp_path / "run", few), predicts(few)
    assert shell("certify", run.root, "--ledger", tmp_path / "ledger") == 4
    assert "no query was spent" in shell.err
    assert not calls
    assert Ledger(tmp_path / "ledger").folder.exists() is False
