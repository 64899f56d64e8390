"""`verify`: what was checked and what was not; ledgers that were cut; signatures."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.certify.certificate import write_certificate
from holdfast.certify.settings import Settings
from holdfast.chained import ChainedLog
from holdfast.files import canonical_json, fingerprint_bytes, fingerprint_json
from tests.certify.helpers import write_pair
from tests.certify.test_cli import Shell

GOOD = {"clear": (500, 5, 3), "snowy": (400, 4, 1)}
BAD = {"clear": (500, 5, 60), "snowy": (400, 4, 1)}
needs_ssh = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")


def certificate(shell: Shell, folder: Path, *more: object) -> Path:
    files, out = write_pair(folder, GOOD), folder / "c.json"
    assert shell("certify", *files, "--margin", "0.02", "--out", out, *more) == 0
    return out


def test_without_evidence_nothing_holds(shell: Shell, tmp_path: Path) -> None:
    out = certificate(shell, tmp_path)
    assert shell("verify", out, "--json") == 0
    assert shell.json["holds"] is True
    assert {item["what"] for item in shell.json["not_checked"]} == {
        "signature",
        "what was fixed beforehand",
        "ledger",
    }
    (tmp_path / "new.csv").unlink()
    assert shell("verify", out) == 4
    assert "holds" not in shell.out
    assert "not checked  verdict certified: the predictions are not at hand" in shell.out
    assert "checked      predictions of the old model: unchanged" in shell.out
    assert shell("verify", out, "--json") == 4
    assert shell.json["holds"] is None
    (tmp_path / "old.csv").write_text("changed")
    assert shell("verify", out) == 3  # what is at hand is checked all the same


def test_a_certificate_that_names_no_predictions_holds_nothing(shell: Shell, tmp_path: Path) -> None:
    """Anybody can write "certified" with a fingerprint that fits: today's `verify` called that a pass."""
    settings = Settings({"clear": 0.02})
    reported = {"verdict": "certified", "claim": "all", "promise": "trust me"}
    write_certificate(tmp_path / "c.json", settings, reported, {})
    assert shell("verify", tmp_path / "c.json") == 4
    assert "names no predictions" in shell.out
    assert "holds" not in shell.out


@pytest.mark.parametrize("kept", [0, 1, 2, 3, 4])
def test_a_ledger_cut_below_a_certificate_is_found(
    shell: Shell, tmp_path: Path, kept: int, tried: Callable[..., None]
) -> None:
    """Also where the head was cut with it: the certificate has a copy of its own."""
    tried("faults", 2)
    ledger = ("--ledger", tmp_path / "L", "--query-budget", 2)
    assert shell("certify", *write_pair(tmp_path, BAD, "bad-"), "--margin", "0.02", *ledger) == 4
    out = certificate(shell, tmp_path, *ledger)
    record = next((tmp_path / "L").glob("*.jsonl"))
    lines = record.read_text().splitlines(keepends=True)
    assert len(lines) == 5
    record.write_text("".join(lines[:kept]))
    assert shell("verify", out) == 3
    head = record.with_name(record.name + ".head")
    if kept:
        fingerprint = json.loads(lines[kept - 1])["fingerprint"]
        head.write_text(canonical_json({"entries": kept, "fingerprint": fingerprint}) + "\n")
        assert shell("verify", out) == 3
        assert "not the one that the certificate was issued under" in shell.err
    record.unlink()
    head.unlink()
    assert shell("verify", out) == 4  # gone altogether: not at hand
    assert "not checked  ledger" in shell.out
    assert shell("verify", out, "--ledger", tmp_path / "L") == 3  # and asked for by name: a fault


def test_a_last_entry_written_anew_is_found(shell: Shell, tmp_path: Path) -> None:
    """A failed query made a passed one, with every hash and the head as they would have been."""
    ledger = ("--ledger", tmp_path / "L", "--query-budget", 2)
    out = certificate(shell, tmp_path, *ledger)
    record = next((tmp_path / "L").glob("*.jsonl"))
    *lines, last = record.read_text().splitlines()
    body = {**json.loads(last), "passed": False}
    body.pop("fingerprint")
    fingerprint = fingerprint_bytes(canonical_json(body).encode())
    record.write_text("\n".join([*lines, canonical_json({**body, "fingerprint": fingerprint})]) + "\n")
    assert shell("verify", out) == 3
    record.with_name(record.name + ".head").write_text(canonical_json({"entries": 3, "fingerprint": fingerprint}))
    assert shell("verify", out) == 3
    assert "entry 3 is not the one that was written" in shell.err


def test_a_ledger_of_an_earlier_version_is_read_with_a_note(shell: Shell, tmp_path: Path) -> None:
    out = certificate(shell, tmp_path, "--ledger", tmp_path / "L")
    record = next((tmp_path / "L").glob("*.jsonl"))
    record.with_name(record.name + ".head").unlink()
    entries, before = [], ""
    for line in record.read_text().splitlines():
        entry = {name: value for name, value in json.loads(line).items() if name not in ("place", "fingerprint")}
        entries.append({**entry, "previous": before})
        before = fingerprint_json(entries[-1])
    record.write_text("".join(canonical_json(entry) + "\n" for entry in entries))
    body = json.loads(out.read_text())
    del body["fingerprint"], body["ledger"]["head"]
    out.write_text(json.dumps({**body, "fingerprint": fingerprint_json(body)}))
    assert shell("verify", out) == 0
    assert "without a head, of an earlier version" in shell.out


# -- signatures -------------------------------------------------------------------------------------------------------


def key_pair(folder: Path, name: str) -> Path:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(folder / name)]
    subprocess.run(command, check=True)
    return folder / name


def signers_file(folder: Path, *keys: Path) -> Path:
    lines = [f"{key.name}@example.org {key.with_suffix('.pub').read_text()}" for key in keys]
    (folder / "signers").write_text("".join(lines))
    return folder / "signers"


@needs_ssh
def test_a_signature_is_made_and_checked(shell: Shell, tmp_path: Path) -> None:
    mine, other = key_pair(tmp_path, "mine"), key_pair(tmp_path, "other")
    signers = signers_file(tmp_path, mine)
    out = certificate(shell, tmp_path, "--sign", mine)
    assert shell("verify", out, "--signers", signers) == 0
    assert "checked      signature: by mine@example.org" in shell.out
    assert shell("verify", out) == 0
    assert "not checked  signature: it is signed" in shell.out
    by_hand = ["ssh-keygen", "-Y", "verify", "-f", signers, "-I", "mine@example.org", "-n", "holdfast-certificate"]
    with out.open("rb") as file:  # nobody needs holdfast to check it
        assert subprocess.run([*by_hand, "-s", f"{out}.sig"], stdin=file, check=False).returncode == 0
    assert shell("sign", out, "--key", other) == 0
    assert shell("verify", out, "--signers", signers) == 3
    assert "no allowed signer" in shell.err


@needs_ssh
def test_a_signature_holds_for_its_bytes_and_purpose_alone(
    shell: Shell, tmp_path: Path, tried: Callable[..., None]
) -> None:
    tried("faults", 4)
    mine = key_pair(tmp_path, "mine")
    signers, out = signers_file(tmp_path, mine), certificate(shell, tmp_path, "--sign", mine)
    signature, text = Path(f"{out}.sig"), out.read_text()
    out.write_text(text + "\n")  # the same certificate, and another file
    assert shell("verify", out, "--signers", signers) == 3
    assert "does not hold" in shell.err
    out.write_text(text)
    signature.write_text("no signature")
    assert shell("verify", out, "--signers", signers) == 3
    signature.unlink()
    assert shell("verify", out, "--signers", signers) == 3
    assert "is not signed" in shell.err
    for_git = subprocess.run(
        ["ssh-keygen", "-Y", "sign", "-f", mine, "-n", "git"], input=text.encode(), capture_output=True, check=True
    )
    signature.write_bytes(for_git.stdout)
    assert shell("verify", out, "--signers", signers) == 3
    assert shell("verify", out, "--signers", tmp_path / "nobody") == 2


@needs_ssh
def test_keys_that_cannot_sign_are_one_sentence(shell: Shell, tmp_path: Path, tried: Callable[..., None]) -> None:
    out = certificate(shell, tmp_path)
    (tmp_path / "no-key").write_text("no key")
    for key in (tmp_path / "no-key", tmp_path / "nowhere", tmp_path):
        tried("bad inputs")
        assert shell("sign", out, "--key", key) == 2
        assert "Traceback" not in shell.err
    assert not Path(f"{out}.sig").exists()
    assert shell("sign", tmp_path / "old.csv", "--key", key_pair(tmp_path, "mine")) == 2  # no certificate


def test_a_machine_without_openssh_says_so(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = certificate(shell, tmp_path)
    (tmp_path / "key").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shell("sign", out, "--key", tmp_path / "key") == 2
    assert "ssh-keygen, which is not installed" in shell.err


def test_to_verify_needs_no_permission_to_write(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An auditor reads a copy that is read-only: nothing is locked, and nothing is written."""
    out = certificate(shell, tmp_path, "--ledger", tmp_path / "L")
    before = {path: path.stat() for path in tmp_path.rglob("*")}
    monkeypatch.setattr("os.access", lambda _, mode: not mode & os.W_OK)
    monkeypatch.setattr(ChainedLog, "locked", lambda _: pytest.fail("locked"))
    assert shell("verify", out) == 0
    assert "checked      ledger: 3 entries, none missing or changed" in shell.out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == {
        path: status.st_mtime_ns for path, status in before.items()
    }
