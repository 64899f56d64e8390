"""The claim file: fixed before predictions exist, tested as it stands, and compared by `verify`."""

import hashlib
import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.certify.claim_file import read_claim_file, write_claim_file
from holdfast.errors import UserError
from holdfast.files import fingerprint_json
from tests.certify.helpers import rows, write_csv, write_pair
from tests.certify.test_cli import Shell
from tests.malformed import malformed

GOOD = {"clear": (500, 5, 3), "snowy": (400, 4, 1)}


def claimed(shell: Shell, folder: Path, *more: object) -> Path:
    """A claim about images that nobody has predicted yet."""
    examples = write_csv(folder / "ids.csv", rows(GOOD), "example_id,task")
    assert shell("claim", examples, "--out", folder / "claim.toml", "--margin", "0.02", *more) == 0
    return folder / "claim.toml"


def test_a_certificate_names_the_hash_of_the_claim(shell: Shell, tmp_path: Path) -> None:
    path = claimed(shell, tmp_path, "--query-budget", "2")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert f"sha256 {digest}" in shell.out
    files, out = write_pair(tmp_path, GOOD), tmp_path / "c.json"
    arguments = ("certify", *files, "--claim-file", path, "--ledger", tmp_path / "L", "--out", out)
    assert shell(*arguments, "--json") == 0
    assert shell.json["level"] == pytest.approx(0.025)
    certificate = json.loads(out.read_text())
    assert certificate["files"]["claim"] == {"path": "claim.toml", "fingerprint": f"sha256:{digest}"}
    assert shell("verify", out) == 0
    assert f"settings and examples are those of claim.toml, sha256:{digest}" in shell.out
    path.write_text(path.read_text() + "# later\n")
    assert shell("verify", out) == 3
    assert "the claim changed since the certificate" in shell.err
    path.unlink()
    assert shell("verify", out) == 4
    assert "not checked  what was fixed beforehand: the claim file is not at hand" in shell.out


def test_without_a_budget_no_ledger_is_charged(shell: Shell, tmp_path: Path) -> None:
    path, files, out = claimed(shell, tmp_path), write_pair(tmp_path, GOOD), tmp_path / "c.json"
    assert shell("certify", *files, "--claim-file", path, "--out", out, "--json") == 0
    assert "sealed" not in shell.json
    assert shell("verify", out) == 0
    assert shell("certify", *files, "--claim-file", path, "--ledger", tmp_path / "L") == 2
    assert "without a budget" in shell.err


def test_predictions_of_other_images_are_refused_with_counts(
    shell: Shell, tmp_path: Path, tried: Callable[..., None]
) -> None:
    path = claimed(shell, tmp_path, "--query-budget", "2")
    ledger = ("--ledger", tmp_path / "L")
    others = write_pair(tmp_path, {"clear": (498, 5, 3), "snowy": (401, 4, 1)})
    tried("bad inputs", 3)
    assert shell("certify", *others, "--claim-file", path, *ledger) == 2
    assert "2 missing, 1 that it does not name, 0 in other tasks" in shell.err
    assert "900 examples: 500 of clear, 400 of snowy" in shell.err
    (tmp_path / "ids.csv").unlink()  # only the hash is left
    assert shell("certify", *others, "--claim-file", path, *ledger) == 2
    assert "899 examples: 498 of clear, 401 of snowy" in shell.err
    renamed = [tmp_path / "old.csv", tmp_path / "new.csv"]
    for file in write_pair(tmp_path, GOOD):
        file.write_text(file.read_text().replace("clear-7,", "clear-7000,"))
    assert shell("certify", *renamed, "--claim-file", path, *ledger) == 2
    assert "the same numbers, and other ids" in shell.err
    assert not (tmp_path / "L").exists()


def test_examples_that_changed_their_task_are_found(shell: Shell, tmp_path: Path) -> None:
    path = claimed(shell, tmp_path)
    files = write_pair(tmp_path, GOOD)
    for file in files:
        text = (
            file.read_text().replace("clear-9,clear", "clear-9,snowy", 1).replace("snowy-9,snowy", "snowy-9,clear", 1)
        )
        file.write_text(text)
    assert shell("certify", *files, "--claim-file", path) == 2
    assert "0 missing, 0 that it does not name, 2 in other tasks" in shell.err


@pytest.mark.parametrize(
    "option",
    ["--margin=0.5", "--confidence=0.9", "--target=snowy", "--tasks=clear", "--pool=a=clear", "--labels=clear,snowy"],
)
def test_nothing_is_said_beside_the_claim(
    shell: Shell, tmp_path: Path, option: str, tried: Callable[..., None]
) -> None:
    tried("bad inputs")
    path, files = claimed(shell, tmp_path), write_pair(tmp_path, GOOD)
    assert shell("certify", *files, "--claim-file", path, option) == 2
    assert "--claim-file and " in shell.err


def test_a_claim_is_written_once_and_says_everything(shell: Shell, tmp_path: Path) -> None:
    table = rows({**GOOD, "foggy": (60, 20, 1), "rainy": (80, 3, 1)})
    examples = write_csv(tmp_path / "ids.csv", table, "example_id,task")
    more = ("--margin", "0.03", "--margin", "wet=0.05", "--pool", "wet=rainy,snowy", "--target", "foggy")
    more = (*more, "--claim", "each", "--confidence", "0.9")
    out = tmp_path / "claim.toml"
    assert shell("claim", examples, "--out", out, *more) == 0
    settings = read_claim_file(out).settings
    assert settings.margins == {"clear": 0.03, "wet": 0.05}
    assert (settings.groups, settings.target, settings.confidence) == ({"wet": ["rainy", "snowy"]}, "foggy", 0.9)
    assert (str(settings.claim), settings.level) == ("each", None)
    before = out.read_bytes()
    assert shell("claim", examples, "--out", out, *more) == 2
    assert out.read_bytes() == before


def test_hostile_names_come_back_as_they_were(tmp_path: Path) -> None:
    names = ['a"b', "c\\d", "[x]", "k = 1", "line\nbreak", "tab\t", "\x7f\x01", "ü𝔘", "'''", "#no"]
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows_ = [{"example_id": f"{k}{name}", "task": name} for name in names for k in range(3)]
    pq.write_table(pa.Table.from_pylist(rows_), tmp_path / "ids.parquet")
    written = write_claim_file(tmp_path / "c.toml", tmp_path / "ids.parquet", margin=0.02, margins={})
    assert set(written.settings.margins) == {name.strip() for name in names}


def test_claims_of_odd_shapes_are_one_sentence(shell: Shell, tmp_path: Path, tried: Callable[..., None]) -> None:
    path = claimed(shell, tmp_path, "--query-budget", "2")
    good = tomllib.loads(path.read_text())
    refused = 0
    from holdfast.certify.claim_file import ClaimConfig
    from holdfast.config.base import parse

    for wrong in malformed(good, 200):
        tried("bad inputs")
        try:
            parse(ClaimConfig, wrong, "claim.json")  # type: ignore[arg-type]
        except UserError:
            refused += 1
    assert refused > 100
    for text in ("", "format = 1", "not toml at all", path.read_text().replace("holdfast-claim/1", "holdfast-claim/9")):
        tried("bad inputs")
        path.write_text(text)
        assert shell("certify", *write_pair(tmp_path, GOOD), "--claim-file", path) == 2
        assert "Traceback" not in shell.err


def test_a_certificate_of_another_claim_is_found(shell: Shell, tmp_path: Path) -> None:
    """Even of somebody who puts another claim file's hash into a certificate with a fingerprint that fits."""
    path, files, out = claimed(shell, tmp_path), write_pair(tmp_path, GOOD), tmp_path / "c.json"
    assert shell("certify", *files, "--margin", "0.03", "--out", out) == 0
    body = json.loads(out.read_text())
    body.pop("fingerprint")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    body["files"]["claim"] = {"path": "claim.toml", "fingerprint": f"sha256:{digest}"}
    out.write_text(json.dumps({**body, "fingerprint": fingerprint_json(body)}))
    assert shell("verify", out) == 3
    assert "another claim" in shell.err
    assert "margins is different" in shell.err
