"""Promotion rests on a certificate that verifies, and on nothing that anybody can write into a file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.artifacts import RunFolder
from holdfast.errors import FaultError, HoldfastError
from holdfast.files import read_json, write_json
from holdfast.report.promotion import Evidence
from holdfast.report.tracked import tracked_certificate, tracked_run
from tests.report.fabricated import certify_made_up_run, made_up_run, tampered_runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certify_made_up_run(made_up_run(tmp_path_factory.mktemp("promotion") / "run"))


def test_a_certificate_that_holds_promotes_the_model_it_names(run: Path) -> None:
    promotion = tracked_run(run, register=True).promotion
    assert promotion is not None
    assert promotion.allowed
    assert promotion.files == read_json(run / "certificate.json")["files"]["new model"]["fingerprint"]
    alone = tracked_certificate(run / "certificate.json", None, register=True).promotion
    assert alone is not None
    assert (alone.allowed, alone.files) == (True, promotion.files)


def test_what_was_changed_promotes_nothing(run: Path, tmp_path: Path, tried: Callable[..., None]) -> None:
    for wrong in tampered_runs(run, tmp_path):
        with pytest.raises(HoldfastError) as refused:
            tracked_run(wrong, register=True)
        assert int(refused.value.exit_code) in (2, 3), wrong
        tried("bad inputs")


def test_evidence_that_is_not_at_hand_promotes_nothing(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")  # and its ledger stays behind
    promotion = tracked_run(tmp_path / "run", register=True).promotion
    assert promotion is not None
    assert promotion.refused.startswith("the certificate is not fully checked: ledger")
    found = tracked_run(tmp_path / "run", register=True, evidence=Evidence(ledger=run.parent / "ledger")).promotion
    assert found is not None
    assert found.allowed
    (tmp_path / "signers").write_text("")
    with pytest.raises(FaultError, match="sign"):  # it is not signed at all
        tracked_run(run, register=True, evidence=Evidence(signers=tmp_path / "signers"))
    RunFolder(tmp_path / "run").predictions("new", "sealed").unlink()
    gone = tracked_run(tmp_path / "run", register=True, evidence=Evidence(ledger=run.parent / "ledger")).promotion
    assert gone is not None
    assert not gone.allowed


def test_a_result_that_says_certified_is_no_certificate(tmp_path: Path) -> None:
    folder = RunFolder(made_up_run(tmp_path / "run", sealed="failed"))
    write_json(folder.model / "model.json", {"fingerprint": "sha256:4"})
    result = read_json(folder.result)
    write_json(folder.result, {**result, "kept_old": False, "certificate": None, "verdict": "certified"})
    with pytest.raises(HoldfastError, match="no certificate to verify"):
        tracked_run(folder.root, register=True)
