"""`certify OLD NEW --ledger DIR --query-budget R`: one bit a query, and no query that is not on record."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.certify import charged
from holdfast.certify.claim_file import read_examples
from holdfast.certify.ledger import Ledger
from tests.certify.helpers import Spec, rows, write_csv, write_pair
from tests.certify.test_cli import Shell

GOOD = {"clear": (500, 5, 3), "snowy": (400, 4, 1)}
BAD = {"clear": (500, 5, 60), "snowy": (400, 4, 1)}
EVIDENCE = ("p_value", "gained", "lost", "difference", "lower_bound", "needed", "devsafety")


def query(shell: Shell, folder: Path, spec: Spec, *more: object, name: str = "", budget: int = 3) -> int:
    files = write_pair(folder, spec, name)
    return shell(
        "certify", *files, "--margin", "0.02", "--ledger", folder / "L", "--query-budget", budget, "--json", *more
    )


def worse(times: int) -> Spec:
    """Another bad model on the same images."""
    return {"clear": (500, 5, 60 + times), "snowy": (400, 4, 1)}


def test_until_the_set_is_retired_only_the_bit_leaves(shell: Shell, tmp_path: Path) -> None:
    outputs = {name: tmp_path / name for name in ("s.md", "j.xml", "r.sarif")}
    more = ("--summary", outputs["s.md"], "--junit", outputs["j.xml"], "--sarif", outputs["r.sarif"])
    assert query(shell, tmp_path, BAD, *more) == 4  # not 3: `regressed` would be more than the bit
    assert shell.json["verdict"] == "undecided"
    assert shell.json["level"] == pytest.approx(0.05 / 3)
    assert (shell.json["sealed"]["passed"], shell.json["sealed"]["queries_left"]) == (False, 2)
    (run,) = json.loads(outputs["r.sarif"].read_text())["runs"]
    texts = (shell.out, outputs["s.md"].read_text(), outputs["j.xml"].read_text(), json.dumps(run["results"]))
    for text in texts:
        for name in (*EVIDENCE, "flips", "regressed"):
            assert name not in text
    assert not (tmp_path / "c.json").exists()


def test_the_same_files_are_the_same_query_and_cost_nothing(shell: Shell, tmp_path: Path) -> None:
    assert query(shell, tmp_path, BAD) == 4
    first, ledger = shell.json, Ledger(tmp_path / "L")
    record = next((tmp_path / "L").glob("*.jsonl"))
    before = record.read_bytes()
    assert query(shell, tmp_path, BAD) == 4
    assert shell.json == first
    assert record.read_bytes() == before
    assert query(shell, tmp_path, worse(1)) == 4  # another model
    files = (tmp_path / "old.csv", tmp_path / "new.csv")
    more = ("--ledger", tmp_path / "L", "--query-budget", 3, "--json")
    assert shell("certify", *files, "--margin", "0.03", *more) == 4  # the same model, another margin
    standing = ledger.standing(read_examples(files[0]).fingerprint)
    assert standing is not None
    assert standing.queries == 3


def test_a_pass_retires_the_set_and_its_result_is_repeated(shell: Shell, tmp_path: Path) -> None:
    assert query(shell, tmp_path, BAD) == 4
    out = ("--out", tmp_path / "c.json")
    assert query(shell, tmp_path, GOOD, *out, name="good-") == 0
    assert shell.json["sealed"]["retired"]
    assert shell.json["tasks"][0]["gained"] == 5  # a retired set is shown in full
    first, certificate = shell.json, (tmp_path / "c.json").read_bytes()
    assert query(shell, tmp_path, GOOD, *out, name="good-") == 0
    assert (shell.json, (tmp_path / "c.json").read_bytes()) == (first, certificate)
    assert shell("verify", tmp_path / "c.json") == 0
    assert "the certificate holds" in shell.out


def test_a_spent_budget_is_refused_before_anything_is_computed(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: Callable[..., None]
) -> None:
    tried("bad inputs")
    for times in range(2):
        assert query(shell, tmp_path, worse(times), budget=2) == 4
    assert shell.json["sealed"]["retired"]  # after the last query everything may be seen
    assert shell.json["tasks"][0]["lost"] == 61
    monkeypatch.setattr(charged, "run_test", lambda *_, **__: pytest.fail("something was computed"))
    record = next((tmp_path / "L").glob("*.jsonl"))
    before = record.read_bytes()
    assert query(shell, tmp_path, GOOD, budget=2) == 2
    assert "spent" in shell.err
    assert shell.out == ""
    assert record.read_bytes() == before


def test_the_query_is_on_record_before_the_result_is_computed(tmp_path: Path, tried: Callable[..., None]) -> None:
    """A process that dies while it computes has spent the query, and only the same files may take it up."""
    tried("faults")
    old, new = write_pair(tmp_path, GOOD)
    program = (
        "import os, sys; from holdfast.certify import charged; from holdfast.cli import main\n"
        "charged.run_test = lambda *_, **__: os._exit(9)\nmain()"
    )
    arguments = ["certify", str(old), str(new), "--margin", "0.02", "--ledger", str(tmp_path / "L"), "--queries", "1"]
    died = subprocess.run([sys.executable, "-c", program, *arguments], check=False, env=os.environ)
    assert died.returncode == 9
    record = next((tmp_path / "L").glob("*.jsonl"))
    assert [json.loads(line)["event"] for line in record.read_text().splitlines()] == ["opened", "query"]
    other = write_pair(tmp_path, BAD, "other-")
    command = [sys.executable, "-m", "holdfast"]
    refused = subprocess.run([*command, arguments[0], *map(str, other), *arguments[3:]], check=False)
    assert refused.returncode == 2
    assert subprocess.run([*command, *arguments], check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--sequential", "--ledger", "L"), "--sequential and --ledger at once"),
        (("--sequential", "--query-budget", "3"), "--sequential and --query-budget at once"),
        (("--query-budget", "0"), "query-budget"),
        (("--ledger", "L", "--confidence", "2"), "confidence 2 is not usable"),
        (("--ledger", "L", "--query-budget", "100000000"), "is not usable"),
        (("--ledger", "L", "--junit", "/proc/none/j.xml"), "cannot write"),
        (("--ledger", "L", "--sarif", "/"), "cannot write"),
        (("--ledger", "L", "--sign", "nowhere", "--out", "c.json"), "key nowhere does not exist"),
        (("--ledger", "L", "--sign", "nowhere"), "--sign without a certificate"),
        (("--ledger", "old.csv"), "cannot be written"),
    ],
)
def test_bad_input_spends_no_query(
    shell: Shell,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: tuple[str, ...],
    message: str,
    tried: Callable[..., None],
) -> None:
    tried("bad inputs")
    monkeypatch.chdir(tmp_path)
    write_pair(tmp_path, GOOD)
    assert shell("certify", "old.csv", "new.csv", "--margin", "0.02", *more) == 2
    assert message in " ".join(shell.err.split())
    assert not (tmp_path / "L").exists()


def test_a_ledger_needs_ids_another_budget_is_refused_and_too_few_images_spend_nothing(
    shell: Shell, tmp_path: Path
) -> None:
    paired = write_csv(tmp_path / "p.csv", rows(GOOD))
    arguments = ("--margin", "0.02", "--ledger", tmp_path / "L", "--query-budget")
    assert shell("certify", "--predictions", paired, *arguments, "3") == 2
    assert "lacks column example_id" in shell.err
    few = write_pair(tmp_path, {"clear": (500, 5, 3), "snowy": (4, 4, 0)}, "few-")
    assert shell("certify", *few, *arguments, "3") == 4
    assert "no query was spent" in shell.err
    assert not list((tmp_path / "L").glob("*.jsonl"))
    assert query(shell, tmp_path, BAD) == 4
    assert query(shell, tmp_path, GOOD, budget=30) == 2
    assert "another budget" in shell.err


def test_a_ledger_that_was_cut_certifies_nothing(shell: Shell, tmp_path: Path, tried: Callable[..., None]) -> None:
    assert query(shell, tmp_path, BAD) == 4
    record = next((tmp_path / "L").glob("*.jsonl"))
    lines = record.read_text().splitlines(keepends=True)
    for kept in range(len(lines)):
        tried("faults")
        record.write_text("".join(lines[:kept]))
        assert query(shell, tmp_path, GOOD) == 2
        assert "changed" in shell.err
    record.unlink()
    assert query(shell, tmp_path, GOOD) == 2
    record.write_text("".join(lines))
    assert query(shell, tmp_path, GOOD) == 0
