"""Signatures of certificates: SSH signatures, as git makes them, with keys that people have already.

A signature lies beside its file (``certificate.json.sig``) and covers every byte of it. It is made and checked by
OpenSSH's ``ssh-keygen -Y``, so that no dependency comes with it, and anyone can check it without holdfast::

    ssh-keygen -Y verify -f SIGNERS -I NAME -n holdfast-certificate -s certificate.json.sig < certificate.json

Who may sign is a file of allowed signers, one a line: a name and a public key, as ``gpg.ssh.allowedSignersFile`` of git
has it.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from holdfast.errors import FaultError, UserError
from holdfast.files import read_regular, write_atomic

NAMESPACE = "holdfast-certificate"  # a signature for anything else, such as a commit, is none for a certificate
_LARGEST = 1 << 30  # bytes of a file that is signed


def signature_path(path: Path) -> Path:
    """Where the signature of a file lies."""
    return path.with_name(f"{path.name}.sig")


def check_key(key: Path) -> None:
    """Refuse beforehand what cannot sign: a key that is not there or is none, a machine without OpenSSH."""
    _program()
    if not key.is_file():
        raise UserError(
            f"the key {key} does not exist",
            expected="the file of a private SSH key (or of a public one whose private half ssh-agent holds)",
            do="make one with: ssh-keygen -t ed25519",
        )
    tried = _run("sign", "-f", str(key), "-n", NAMESPACE)
    if tried.returncode != 0:
        raise UserError(
            f"{key} cannot sign",
            expected="a private SSH key, or a public one whose private half ssh-agent holds",
            found=_last_line(tried.stderr),
            do="nothing was written",
        )


def sign(path: Path, key: Path) -> Path:
    """Sign a file with an SSH key; the signature's path."""
    check_key(key)
    made = _run("sign", "-f", str(key), "-n", NAMESPACE, content=_content(path))
    if made.returncode != 0 or not made.stdout.startswith(b"-----BEGIN SSH SIGNATURE-----"):
        raise UserError(
            f"{key} did not sign {path}",
            expected="an SSH key that can be used here",
            found=_last_line(made.stderr),
            do=f"the file is as it was; sign it later with: holdfast sign {path} --key KEY",
        )
    out = signature_path(path)
    write_atomic(out, lambda temporary: _write(temporary, made.stdout))
    return out


def check_signature(path: Path, signers: Path) -> str:
    """The name of the allowed signer whose signature lies beside a file; a :class:`FaultError` where there is none."""
    signature = signature_path(path)
    if not signers.is_file():
        raise UserError(
            f"the file of allowed signers {signers} does not exist",
            expected="lines of a name and a public key: me@example.org ssh-ed25519 AAAA…",
        )
    if not signature.is_file():
        raise FaultError(f"{path} is not signed", expected=f"a signature in {signature.name} beside it")
    content = _content(path)
    known = _run("find-principals", "-f", str(signers), "-s", str(signature))
    names = known.stdout.decode("utf-8", "replace").splitlines()
    if known.returncode != 0 or not names:
        raise FaultError(
            f"the signature of {path} is of no allowed signer",
            expected=f"a signature by a key in {signers}",
            found=_last_line(known.stderr),
        )
    arguments = ("-f", str(signers), "-I", names[0], "-n", NAMESPACE, "-s", str(signature))
    checked = _run("verify", *arguments, content=content)
    if checked.returncode != 0:
        raise FaultError(
            f"the signature of {path} does not hold",
            expected=f"a signature by {names[0]} over the file as it is",
            found=_last_line(checked.stderr),
            do="ask for the original file",
        )
    return names[0]


def _content(path: Path) -> bytes:
    try:
        return read_regular(path, _LARGEST)
    except OSError as error:
        raise UserError(f"{path} cannot be read", found=error.strerror or str(error)) from error


def _program() -> str:
    found = shutil.which("ssh-keygen")
    if found is None:
        raise UserError(
            "signatures need ssh-keygen, which is not installed",
            expected="OpenSSH 8.2 or newer",
            do="install it (Debian, Ubuntu: apt-get install openssh-client)",
        )
    return found


def _run(action: str, *arguments: str, content: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """The file goes through standard input: its name is never read as an option."""
    return subprocess.run([_program(), "-Y", action, *arguments], input=content, capture_output=True, check=False)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _last_line(stderr: bytes) -> str:
    lines = [line.strip() for line in stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no reason given"
