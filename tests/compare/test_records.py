"""Records of jobs: read back as they were written, and refused where they were damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from holdfast.compare.records import JobFolder, JobRecord, Score
from holdfast.files import write_json
from tests.malformed import malformed, refusals

RECORD = JobRecord("done", 40, Score(-0.01, 0.2, 0.3, 0.5, "one"), 12.5, 10.0, "")


def test_a_record_comes_back_and_may_know_more_or_less(tmp_path: Path) -> None:
    job = JobFolder(tmp_path)
    assert job.read() == JobRecord("waiting")
    job.write(RECORD)
    assert job.read() == RECORD
    values = json.loads(job.record_file.read_text())
    write_json(job.record_file, {**values, "later": 1, "dev": {**values["dev"], "later": 1}})  # of a later version
    assert job.read() == RECORD
    write_json(job.record_file, {"status": "failed", "step": None, "dev": None, "seconds": 1.0, "error": "x"})
    assert job.read() == JobRecord("failed", seconds=1.0, error="x")


def test_records_of_odd_shapes_are_one_sentence(tmp_path: Path, tried: Callable[..., None]) -> None:
    job = JobFolder(tmp_path)
    job.write(RECORD)
    good = json.loads(job.record_file.read_text())

    def use(wrong: object) -> None:
        job.record_file.write_text(json.dumps(wrong))
        found = job.read()
        assert found.status in ("waiting", "begun", "done", "failed")

    assert refusals(use, malformed(good, 200), tried) > 100
