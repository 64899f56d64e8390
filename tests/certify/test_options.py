"""Every pair of options of `certify` and `plan`: both have an effect, or the command is refused with a sentence."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from holdfast.cli import app
from tests.certify.helpers import rows, write_csv
from tests.certify.test_certificate import FULL, run_folder
from tests.certify.test_cli import Shell
from tests.certify.test_harness import lm_line, lm_logs

SPEC = {"clear": (19, 3, 1), "overcast": (18, 2, 2), "snowy": (17, 3, 0), "rainy": (15, 1, 1), "foggy": (14, 5, 0)}
Outcome = tuple[int, str, tuple[str, ...]]  # exit code, what was printed, what was written

CERTIFY: dict[str, tuple[str, ...]] = {
    "--margin": ("--margin", "clear=0.3"),
    "--confidence": ("--confidence", "0.9"),
    "--target": ("--target", "foggy"),
    "--claim": ("--claim", "bounds"),
    "--tasks": ("--tasks", "clear,overcast"),
    "--pool": ("--pool", "rare=snowy,rainy"),
    "--labels": ("--labels", "clear"),
    "--sequential": ("--sequential",),
    "--distinct-rows": ("--distinct-rows",),
    "--group": ("--group", "video", "--largest-unit", "3"),
    "--weight": ("--weight", "w", "--largest-unit", "2"),
    "--score-range": ("--score-range", "0,1"),
    "--largest-unit": ("--largest-unit", "9"),
    "--equal-groups": ("--equal-groups",),
    "--lemma-constant": ("--lemma-constant", "0.5"),
    "--out": ("--out", "c.json"),
    "--summary": ("--summary", "s.md"),
    "--old-model": ("--old-model", "w"),
    "--new-model": ("--new-model", "w"),
    "--data": ("--data", "w"),
    "--junit": ("--junit", "j.xml"),
    "--sarif": ("--sarif", "s.sarif"),
    "--ledger": ("--ledger", "ledger"),
    "--query-budget": ("--query-budget", "1"),
    "--claim-file": ("--claim-file", "claim.toml"),
    "--sign": ("--sign", "w"),
    "--json": ("--json",),
    "--verbose": ("--verbose",),
    "--old": ("--old", "p.csv"),
    "--new": ("--new", "p.csv"),
    "--lm-eval": ("--lm-eval",),
    "--inspect": ("--inspect",),
    "--nemo": ("--nemo",),
    "--coco": ("--coco", "w"),
    "--metric": ("--metric", "acc"),
    "--task-field": ("--task-field", "subject"),
    "--min-score": ("--min-score", "0.5"),
    "--table": ("--table", "t.csv"),
}
# Beside the logs of two models.
LOGS = {name: CERTIFY[name] for name in ("--confidence", "--claim", "--sequential", "--out", "--summary", "--json")}
LOGS |= {
    "--margin": ("--margin", "arc=0.4"),
    "--target": ("--target", "arc"),
    "--tasks": ("--tasks", "gsm8k"),
    "--pool": ("--pool", "both=arc,gsm8k"),
    "--group": ("--group", "subject"),
    "--largest-unit": ("--largest-unit", "60"),
    "--equal-groups": ("--equal-groups",),
    "--score-range": ("--score-range", "0,2"),
    "--metric": ("--metric", "acc_norm"),
    "--task-field": ("--task-field", "subject", "--margin", "0.3"),
    "--table": ("--table", "t.csv"),
    "--labels": ("--labels", "a"),
    "--min-score": ("--min-score", "0.5"),
}
PLAN: dict[str, tuple[str, ...]] = {
    "--tasks": ("--tasks", "7"),
    "--margin": ("--margin", "each=0.3"),
    "--discordance": ("--discordance", "0.05"),
    "--power": ("--power", "0.9"),
    "--confidence": ("--confidence", "0.9"),
    "--difference": ("--difference", "0.01"),
    "--target-gain": ("--target-gain", "0.1"),
    "--images": ("--images", "200"),
    "--simultaneous": ("--simultaneous",),
    "--predictions": ("--predictions", "p.csv"),
    "--target": ("--target", "foggy"),
    "--group-size": ("--group-size", "4"),
    "--icc": ("--icc", "0.5"),
    "--score-deviation": ("--score-deviation", "0.1"),
    "--group": ("--group", "video", "--largest-unit", "3"),
    "--weight": ("--weight", "w", "--largest-unit", "2"),
    "--score-range": ("--score-range", "0,1"),
    "--largest-unit": ("--largest-unit", "9"),
    "--equal-groups": ("--equal-groups",),
    "--json": ("--json",),
}


def with_units(table: list[dict[str, str]]) -> list[dict[str, str]]:
    """The rows with groups of three, weights and scores."""
    return [
        {
            **row,
            "video": f"v{index // 3}",
            "w": str(1 + index % 2),
            "old_score": "0.5",
            "new_score": f"0.{4 + index % 3}",
        }
        for index, row in enumerate(table)
    ]


def checked_pairs(
    options: Mapping[str, tuple[str, ...]], run: Callable[..., Outcome], tried: Callable[..., None]
) -> int:
    """Run every option alone and every pair; returns how many pairs were neither refused nor without effect."""
    nothing = run()
    alone = {name: run(*words) for name, words in options.items()}
    ignored = [name for name, outcome in alone.items() if outcome == nothing]
    assert not ignored
    working = 0
    for first, second in itertools.combinations(options, 2):
        if (first, second) == ("--ledger", "--query-budget"):  # a ledger's budget is 1 unless it is given
            continue
        both = run(*options[first], *options[second])
        if both[0] == 2:
            tried("bad inputs")
            continue
        working += 1
        assert both != alone[first], f"{second} is ignored beside {first}"
        assert both != alone[second], f"{first} is ignored beside {second}"
    return working


@pytest.fixture
def run(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """A command in a folder of its own: a refusal prints one sentence, and writes nothing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w").write_text("weights")
    monkeypatch.setenv("HOLDFAST_LEDGER", str(tmp_path / "ledger"))
    written = [tmp_path / name for name in ("c.json", "s.md", "j.xml", "s.sarif", "ledger", "t.csv")]

    def call(*words: str) -> Outcome:
        code = shell(*words)
        found = tuple(path.read_text() for path in written if path.is_file())
        for path in written:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        assert "Traceback" not in shell.err
        if code == 2:
            assert shell.err.startswith(("error: ", "Usage: "))
            assert (shell.out, found) == ("", ())
        else:
            assert code in (0, 3, 4)
        return code, shell.out + (shell.err if code == 2 else ""), found

    return call


@pytest.mark.slow
@pytest.mark.parametrize("columns", ["task,label,old,new", "example_id,task,label,old,new"])
def test_every_pair_of_options_of_certify(
    run: Callable[..., Outcome], tmp_path: Path, columns: str, tried: Callable[..., None]
) -> None:
    write_csv(tmp_path / "p.csv", with_units(rows(SPEC)), f"{columns},video,w,old_score,new_score")

    def base(*words: str) -> Outcome:
        return run("certify", "--predictions", "p.csv", "--margin", "0.2", *words)

    assert checked_pairs(CERTIFY, base, tried) > 30


@pytest.mark.slow
def test_every_pair_of_options_beside_logs(
    run: Callable[..., Outcome], tmp_path: Path, tried: Callable[..., None]
) -> None:
    for folder, wrong in (("old", (1, 2, 3)), ("new", (3, 4))):
        for place, task in enumerate(("arc", "gsm8k", "mmlu")):
            lines = [lm_line(100 * place + k, float(k not in wrong), metric="acc") for k in range(60)]
            both = [{**line, "metrics": ["acc", "acc_norm"], "acc_norm": float(k > 4)} for k, line in enumerate(lines)]
            lm_logs(tmp_path / folder, task, both)

    def base(*words: str) -> Outcome:
        return run("certify", "--lm-eval", "old", "new", "--margin", "0.2", *words)

    assert checked_pairs(LOGS, base, tried) > 30


@pytest.mark.parametrize("base", [("--discordance", "0.02"), ("--predictions", "p.csv")])
def test_every_pair_of_options_of_plan(
    run: Callable[..., Outcome], tmp_path: Path, base: tuple[str, str], tried: Callable[..., None]
) -> None:
    table = with_units(rows(dict.fromkeys(("clear", "snowy", "foggy"), (300, 3, 3))))
    write_csv(tmp_path / "p.csv", table, "task,label,old,new,video,w,old_score,new_score")
    own = {name: words for name, words in PLAN.items() if name != base[0]}
    if base[0] == "--predictions":
        own["--margin"] = ("--margin", "clear=0.3")
    assert checked_pairs(own, lambda *words: run("plan", *base, "--margin", "0.1", *words), tried) > 12


def test_every_option_is_in_the_tables() -> None:
    """Whoever adds an option adds it here, too."""
    import typer.main

    group = typer.main.get_command(app)
    for command, known in (("certify", CERTIFY), ("plan", PLAN)):
        found = {option for item in group.commands[command].params for option in item.opts if option.startswith("--")}  # type: ignore[attr-defined]
        assert found - {"--predictions", "--help", "--queries"} <= set(known)  # --queries is --query-budget


OF_A_RUN = {"--margin", "--confidence", "--summary", "--junit", "--sarif", "--sign", "--ledger", "--json", "--verbose"}


@pytest.mark.parametrize("name", sorted({*CERTIFY, "--predictions"} - OF_A_RUN))
def test_options_that_a_run_answers_itself(
    run: Callable[..., Outcome], tmp_path: Path, name: str, tried: Callable[..., None]
) -> None:
    run_folder(tmp_path / "run", FULL)
    tried("bad inputs")
    code, message, _ = run("certify", "run", *{**CERTIFY, "--predictions": ("--predictions", "p.csv")}[name])
    assert code == 2
    assert f"a run and {name} at once" in message


def test_a_run_is_told_in_full_or_as_json_and_not_as_another_claim(
    run: Callable[..., Outcome], tmp_path: Path, tried: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_folder(tmp_path / "run", FULL)
    tried("bad inputs", 3)
    assert "--json and --verbose at once" in run("certify", "run", "--json", "--verbose")[1]
    # What is on record is no answer to another question.
    (tmp_path / "run" / "certificate.json").write_text("{}")
    settings = {"margins": {"clear": 0.02, "snowy": 0.03}, "confidence": 0.95}
    held = {"settings": settings, "report": {"verdict": "certified"}}
    monkeypatch.setattr("holdfast.certify.certificate.verify_certificate", lambda _: held)
    for words in (
        ("--margin", "0.02"),
        ("--margin", "clear=0.01"),
        ("--margin", "tunnel=0.02"),
        ("--confidence", "0.9"),
    ):
        assert "has its certificate already" in run("certify", "run", *words, "--json")[1]
    for words in (
        (),
        ("--margin", "clear=0.02"),
        ("--confidence", "0.95"),
        ("--margin", "0.02", "--margin", "snowy=0.03"),
    ):
        assert run("certify", "run", *words, "--json")[0] == 0
    assert "two margins for all tasks" in run("certify", "run", "--margin", "0.02", "--margin", "0.03")[1]
