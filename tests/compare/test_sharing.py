"""Jobs of one process share what they read and compute; none of their figures may change by it."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.compare import study as studies
from holdfast.compare.grid import Job, Study, StudyConfig, plan, read_study
from holdfast.compare.pool import run_here
from holdfast.compare.records import JobFolder
from holdfast.compare.run import attempt
from holdfast.compare.study import run_jobs, run_study
from holdfast.config import parse
from holdfast.data import assemble, survey
from holdfast.data.pixels import MemoryPixels
from holdfast.errors import Interrupted, UserError
from holdfast.files import read_json
from holdfast.rounds import prepare
from holdfast.rounds.round import Round
from holdfast.shared import once, sharing

VALUES: dict[str, Any] = {
    "seeds": [0],
    "sizes": [6, 9],
    "result": "shipped",
    "tolerances": [0.0, 0.1],
    "keep_models": False,
    "round": {
        "task": {"target": "eight", "protected": ["zero", "one"], "ignored": ["two", "three", "four", "five", "six"]},
        "data": {
            "source": {"kind": "digits", "classes": {"seven": "six", "nine": "six"}},
            "roles": {"dev": 0.1, "sealed": 0.3, "test": 0.1},
            "target_images": 12,
        },
        "model": {"architecture": "tiny", "head_rank": 2},
        "train": {"steps": 4, "batch": 8, "images_per_task": 2, "learning_rate": 1e-3, "device": "cpu"},
        "evaluate": {"every": 2},
        "candidates": {"least_chance": 0.0, "interpolation": [0.0, 0.5, 1.0]},
        "certify": {"margin": 0.3, "target_gain": False},
    },
    "methods": [{"name": "rm", "label": "RM"}, {"name": "refit", "label": "refit alone"}],
}


def make(root: Path, **values: Any) -> Study:
    return Study("small", parse(StudyConfig, {**VALUES, **values}, "STUDY.toml"), root, root / "STUDY.toml")


def silent(text: str) -> None:
    del text


def figures(job: Job) -> dict[str, Any]:
    """All that a job found, without the time it took and the folder it lies in."""
    folder = JobFolder(job.folder)
    record = {key: value for key, value in read_json(folder.record_file).items() if "seconds" not in key}
    result = read_json(folder.run.result)
    parts = [read_json(path) for path in (folder.dev, folder.test, folder.frontier)]
    certificate = {**(result.pop("certificate") or {})}
    return {
        "record": record,
        "parts": parts,
        "result": result,
        "certificate": {key: certificate.get(key) for key in ("verdict", "tasks", "target")},
        "tested": read_json(folder.run.settled)["tested"],
        "evaluations": list(folder.evaluations()),
    }


def test_jobs_in_one_process_in_either_order_give_what_each_gives_alone(tmp_path: Path) -> None:
    found = make(tmp_path)
    alone = plan(found, tmp_path / "alone")
    for job in alone:
        assert attempt(job, "run").record.status == "done"  # nothing is shared here
    expected = [figures(job) for job in alone]
    assert len(expected) == 4
    assert expected[0]["parts"] != expected[1]["parts"]

    together = plan(found, tmp_path / "together")
    assert run_jobs(together, run_here, silent) == []
    assert [figures(job) for job in together] == expected

    backwards = plan(found, tmp_path / "backwards")
    assert [outcome.record.status for outcome in run_here([(job, "run") for job in reversed(backwards)])] == [
        "done"
    ] * 4
    assert [figures(job) for job in backwards] == expected


def test_models_in_memory_decide_what_models_on_disk_decide(tmp_path: Path) -> None:
    """What `develop` does, model folder by model folder, against a job."""
    job = plan(make(tmp_path), tmp_path / "out")[0]
    assert attempt(job, "run").record.status == "done"
    certify = job.config.certify.model_copy(update={"ledger": tmp_path / "ledger"})
    config = job.config.model_copy(update={"certify": certify})
    round_ = Round(config, job.root, tmp_path / "run", training_figures=True)
    round_.train()
    round_.write_result(round_.decide())
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    ours, theirs = read_json(JobFolder(job.folder).run.result), read_json(tmp_path / "run" / "result.json")
    for values in (ours, theirs):
        values.pop("certificate")
    assert ours == theirs
    tested = read_json(JobFolder(job.folder).run.settled)["tested"]
    assert tested == read_json(tmp_path / "run" / "candidates.json")["tested"]
    assert tested  # fingerprints of weights


def test_sources_pictures_and_the_old_model_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"catalogue": 0, "start": 0, "pictures": 0, "test": 0}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            counts[name] += 1
            return function(*given, **named)

        return call

    monkeypatch.setattr(survey, "catalogue", counted("catalogue", survey.catalogue))
    monkeypatch.setattr(prepare, "load_start", counted("start", prepare.load_start))
    monkeypatch.setattr(MemoryPixels, "_decoded", counted("pictures", MemoryPixels._decoded))  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(assemble, "_open", counted("test", assemble._open))  # pyright: ignore[reportPrivateUsage]
    jobs = plan(make(tmp_path), tmp_path / "out")
    assert run_jobs(jobs[:1], run_here, silent) == []
    first = dict(counts)
    assert first["catalogue"] == 2  # labelled images; pairs and negatives are none alike
    assert first["test"] == 2  # test and sealed images, each opened once in a job
    roles = JobFolder(jobs[0].folder).run.roles
    import pyarrow.parquet as pq

    assert first["pictures"] < len(pq.read_table(roles))  # and not all that there are
    counts.update(dict.fromkeys(counts, 0))
    assert run_jobs(jobs[2:], run_here, silent) == []
    assert (counts["catalogue"], counts["start"]) == (2, 1)
    assert counts["pictures"] <= first["pictures"] + 2 * 3  # three more constraint images of two classes


def test_nothing_is_shared_outside_and_sized_values_give_way(tmp_path: Path) -> None:
    made: list[int] = []

    def value() -> int:
        made.append(len(made))
        return made[-1]

    assert (once("a", value), once("a", value)) == (0, 1)
    with sharing(limit=10):
        assert (once("a", value, size=lambda _: 6), once("a", value, size=lambda _: 6)) == (2, 2)
        with sharing():
            assert once("a", value) == 2
        once("plain", value)
        once("b", value, size=lambda _: 6)  # "a" goes
        assert once("b", value, size=lambda _: 6) == 4
        assert once("a", value, size=lambda _: 6) == 5
        assert once("plain", value) == 3
        assert once("large", value, size=lambda _: 11) != once("large", value, size=lambda _: 11)
    assert once("a", value) == 8


def test_a_study_without_models_writes_no_weights(tmp_path: Path, tried: Callable[..., None]) -> None:
    result = run_study(make(tmp_path, sizes=[6]), tmp_path / "out", run_here, silent, figures=False)
    assert result.failed == []
    assert not list((tmp_path / "out").rglob("*.safetensors"))
    assert not list((tmp_path / "out").rglob("*.pt"))
    assert not (tmp_path / "out" / "chosen").exists()
    kept = run_study(make(tmp_path, sizes=[6], keep_models=True), tmp_path / "kept", run_here, silent, figures=False)
    weights = list((tmp_path / "kept" / "jobs").rglob("*.safetensors"))
    assert {path.parent.name for path in weights} == {"model"}
    assert len(weights) == kept.jobs
    assert (tmp_path / "kept" / "chosen" / "RM-6" / "model.safetensors").exists()

    tried("bad inputs")
    with pytest.raises(UserError, match="scored later, from its weights"):
        make(tmp_path, result="checkpoint")
    tried("bad inputs")
    (tmp_path / "first.toml").write_text("result = 'shipped'\nkeep_models = false\n[round]\n[[methods]]\nname = 'rm'\n")
    (tmp_path / "second.toml").write_text("after = 'first.toml'\n[round]\n[[methods]]\nname = 'rm'\n")
    with pytest.raises(UserError, match="keeps no models"):
        run_study(read_study(tmp_path / "second.toml"), tmp_path / "second", run_here, silent)


def test_a_job_that_left_no_checkpoint_begins_anew(tmp_path: Path, tried: Callable[..., None]) -> None:
    """Killed after its sealed images were queried: the ledger of the attempt goes with it."""
    found = make(tmp_path, sizes=[6])
    whole, cut = (plan(found, tmp_path / name)[0] for name in ("whole", "cut"))
    assert attempt(whole, "run").record.status == "done"
    assert attempt(cut, "run").record.status == "done"
    folder = JobFolder(cut.folder)
    for path in (folder.run.result, folder.dev, folder.test, folder.frontier):
        path.unlink()
    entries = [path.read_text() for path in sorted((cut.folder / "ledger").glob("*.jsonl"))]
    assert entries
    folder.write(JobFolder(cut.folder).read().__class__("begun"))
    tried("faults")
    assert attempt(cut, "run").record.status == "done"
    assert figures(cut) == figures(whole)
    again = [path.read_text() for path in sorted((cut.folder / "ledger").glob("*.jsonl"))]
    assert [len(text.splitlines()) for text in again] == [len(text.splitlines()) for text in entries]


# -- a study that is stopped half way ---------------------------------------------------------------------------------


def statuses(out: Path) -> list[str]:
    with (out / "jobs.csv").open(newline="", encoding="utf-8") as file:
        return [line["status"] for line in csv.DictReader(file)]


def test_the_list_of_jobs_and_tables_grow_as_jobs_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "_TABLES_EVERY", 0.0)
    monkeypatch.setattr(studies, "_SHARE", float("inf"))
    out, seen = tmp_path / "out", list[tuple[int, str]]()

    def look(text: str) -> None:
        if text.startswith("["):
            table = (out / "tables" / "frontier.txt").read_text()
            seen.append((statuses(out).count("done"), table.splitlines()[0]))

    run_study(make(tmp_path), out, run_here, look, figures=False)
    assert [done for done, _ in seen] == [1, 2, 3, 4]
    assert ["of 4 jobs" in title for _, title in seen] == [True, True, True, False]
    assert "(2 of 4 jobs)" in seen[1][1]


def test_an_interrupted_study_leaves_tables_of_what_is_done(
    tmp_path: Path, tried: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import frontier

    out = tmp_path / "out"

    def interrupt(text: str) -> None:
        if text.startswith("[2/"):
            os.kill(os.getpid(), signal.SIGTERM)

    tried("signals")
    with pytest.raises(Interrupted) as raised:
        run_study(make(tmp_path), out, run_here, interrupt, figures=False)
    assert int(raised.value.exit_code) == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert statuses(out).count("done") == 2
    assert "(2 of 4 jobs)" in (out / "tables" / "results.txt").read_text()
    cells = frontier.read([out])
    assert {cell.row for cell in cells["out"]} == {"RM"}
    assert "out: 2 of 4 jobs are done" in capsys.readouterr().err

    result = run_study(make(tmp_path), out, run_here, silent, figures=False)
    assert result.failed == []
    frontier.read([out])
    assert "jobs are done" not in capsys.readouterr().err


@pytest.mark.slow
def test_terminated_workers_leave_without_a_traceback(tmp_path: Path, tried: Callable[..., None]) -> None:
    """The command with two workers: SIGTERM to it alone, as a scheduler sends it, and a parent that dies."""
    values = {**VALUES, "seeds": list(range(40))}
    (tmp_path / "study.json").write_text(json.dumps(values))
    script = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from holdfast.cli import main\n"
        "from holdfast.compare import grid\n"
        "grid.read_toml = lambda path: json.loads(Path(path).read_text())\n"
        "if __name__ == '__main__':\n"
        "    main()\n"
    )
    (tmp_path / "command.py").write_text(script)
    (tmp_path / "small.toml").write_text((tmp_path / "study.json").read_text())
    for number, code in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        out = tmp_path / f"out-{number}"
        command = [sys.executable, "command.py", "compare", "small.toml", "--out", str(out), "--jobs", "2"]
        with (tmp_path / f"said-{number}").open("w") as said:
            process = subprocess.Popen([*command, "--no-figures"], cwd=tmp_path, stdout=said, stderr=said)
            while not (out / "jobs.csv").exists() or "done" not in statuses(out):
                assert process.poll() is None
                time.sleep(0.05)
            workers = children(process.pid)
            tried("signals")
            process.send_signal(number)
            assert process.wait() == code
            while any(Path(f"/proc/{worker}").exists() for worker in workers):  # they end their job, and leave
                time.sleep(0.05)
        text = (tmp_path / f"said-{number}").read_text()
        assert "Traceback" not in text, text
        assert 0 < statuses(out).count("done") < 80
        assert "failed" not in statuses(out)
        if number == signal.SIGTERM:
            assert "of 160 jobs)" in (out / "tables" / "frontier.txt").read_text()


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
