"""Pages from files that were damaged: a page, or one sentence that names the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.artifacts import RunFolder
from holdfast.errors import FaultError, HoldfastError, UserError
from holdfast.files import fingerprint_json, write_json
from holdfast.report.content import read_run
from holdfast.report.page import write_report
from holdfast.report.trackers import scalars
from tests.compare.fabricated import comparison, finish, make_study
from tests.malformed import malformed, refusals
from tests.report.fabricated import made_up_run

RAW = (b"", b"{", b"null\n", b"\xff\n", b"[" * 100_000 + b"\n", b"NaN\n", b"{}\n", b"[]\n", b"3\n", b'"x"\n')


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return made_up_run(tmp_path / "run", each=12, steps=(10, 20))


@pytest.mark.parametrize("name", ["result.json", "run.json", "round.json"])
def test_files_of_a_run_of_odd_shapes(name: str, run: Path, tmp_path: Path, tried: Callable[..., None]) -> None:
    path, out = run / name, tmp_path / "page.html"
    good = json.loads(path.read_text())

    def use(wrong: object) -> None:
        path.write_text(json.dumps(wrong))
        write_report(run, out)

    assert refusals(use, malformed(good, 40), tried) > 5


def test_metrics_of_odd_shapes(run: Path, tried: Callable[..., None]) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()

    def use(place: int) -> Callable[[object], None]:
        def written(wrong: object) -> None:
            path.write_text("\n".join([*lines[:place], json.dumps(wrong), *lines[place + 1 :], ""]))
            read_run(run)
            list(scalars(RunFolder(run)))

        return written

    for place in (0, 1):  # a logged step, and an evaluation
        assert refusals(use(place), malformed(json.loads(lines[place]), 60), tried) > 5


@pytest.mark.parametrize(
    "name", ["result.json", "run.json", "round.json", "metrics.jsonl", "roles.parquet", "predictions/old-dev.parquet"]
)
def test_files_of_a_run_that_are_something_else(
    name: str, run: Path, tmp_path: Path, tried: Callable[..., None]
) -> None:
    path, out = run / name, tmp_path / "page.html"
    good = path.read_bytes()
    for content in (*RAW, good[: len(good) // 2], good[:-30]):
        tried("bad inputs")
        path.write_bytes(content)
        try:
            write_report(run, out)
        except HoldfastError as error:
            message = error.text()
        else:
            message = name  # lines of metrics that a crash cut short are passed over
        assert path.name in message
    path.unlink()
    path.mkdir()
    tried("bad inputs")
    with pytest.raises((HoldfastError, OSError)):  # the command line says of either what is wrong
        write_report(run, out)


def test_a_certificate_that_was_changed_is_not_shown(run: Path, tmp_path: Path, tried: Callable[..., None]) -> None:
    tried("bad inputs", 3)
    reported = json.loads((run / "result.json").read_text())["certificate"]
    body = {"format": "holdfast-certificate/1", "settings": {}, "report": reported, "files": {}}
    write_json(run / "certificate.json", {**body, "fingerprint": "sha256:0"})
    with pytest.raises(FaultError, match="was changed"):
        write_report(run, tmp_path / "page.html")
    write_json(run / "certificate.json", {**body, "fingerprint": fingerprint_json(body)})
    with pytest.raises(UserError, match=r"settings\.margins is missing"):
        write_report(run, tmp_path / "page.html")
    settings = {"margins": {"fog": 0.3}, "confidence": 0.95, "claim": "all", "groups": {}, "labels": []}
    body |= {"settings": settings, "report": {**reported, "tasks": [{"task": "fog"}]}}
    write_json(run / "certificate.json", {**body, "fingerprint": fingerprint_json(body)})
    with pytest.raises(UserError, match=r"tasks\.0\.n is missing"):
        write_report(run, tmp_path / "page.html")


def test_files_of_a_study_of_odd_shapes(tmp_path: Path, tried: Callable[..., None]) -> None:
    from holdfast.compare.choose import choose, read_records
    from holdfast.compare.grid import plan
    from holdfast.compare.output import write_outputs

    study = make_study(tmp_path)
    jobs = plan(study, tmp_path)
    for number, job in enumerate(jobs):
        finish(job, -number, 20, test=comparison(-number, 20))
    records = read_records(jobs)
    write_outputs(study, jobs, records, choose(jobs, records), tmp_path, figures=False)
    write_json(tmp_path / "study.json", study.config.model_dump(mode="json"))
    for name in ("study.json", "chosen.json"):
        path = tmp_path / name
        good = json.loads(path.read_text())

        def use(wrong: object, path: Path = path) -> None:
            path.write_text(json.dumps(wrong))
            write_report(tmp_path, tmp_path / "page.html")

        assert refusals(use, malformed(good, 100), tried) > 5
        path.write_text(json.dumps(good))
    for name in ("jobs.csv", "tables/results.csv"):
        path, good = tmp_path / name, (tmp_path / name).read_bytes()
        for content in (b"", b"\xff\xfe", b"a,b\n1\n", b'"', good[:-5]):
            tried("bad inputs")
            path.write_bytes(content)
            try:
                write_report(tmp_path, tmp_path / "page.html")
            except HoldfastError as error:
                message = error.text()
            else:
                message = name
            assert path.name in message
        path.write_bytes(good)
    write_report(tmp_path, tmp_path / "page.html")
