"""Files on disk: writes in one step, reads that trust nothing, JSON, and fingerprints of what files hold.

Nothing here imports torch: every command reads and writes files, on any machine.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from holdfast.errors import UserError


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


_UMASK = _umask()  # read once: the only way to read it changes it for a moment, for all threads


def write_atomic(path: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, flush it to disk, and move it into place in one step.

    A kill at any moment leaves either the old file or the new one, never half of one.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        os.close(handle)
    except OSError as error:
        raise not_writable(path, error) from error
    temporary = Path(name)
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_UMASK)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise not_writable(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def where_instead(path: Path, otherwise: str = "check the path") -> str:
    """What to do about a path that does not exist: the one that was meant, where there is one.

    Rounds of a project lie in ``rounds/0001-NAME``, and go by their names and numbers elsewhere.
    """
    there = next((folder for folder in path.parents if os.path.isdir(folder)), None)
    if there is None or os.path.exists(path):
        return otherwise
    name, *rest = path.parts[len(there.parts) :]
    beside = [there, *([there / "rounds"] if os.path.isdir(there / "rounds") else [])]
    known = [item for folder in beside for item in _listed(folder)]
    meant = [item for item in known if name in round_names(item.name)]
    close = set(difflib.get_close_matches(name, [item.name for item in known], n=1))
    found = [item.joinpath(*rest) for item in meant or known if meant or item.name in close]
    found = [item for item in found if os.path.exists(item)]
    return f"did you mean {' or '.join(map(str, found[:3]))}?" if found else otherwise


def round_names(folder: str) -> tuple[str, ...]:
    """What a round of a project in this folder (``0001-NAME``) is called: all of it, its number, its name."""
    number, dash, name = folder[:4], folder[4:5], folder[5:]
    return (folder, number, number.lstrip("0"), name) if number.isdigit() and dash == "-" and name else (folder,)


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(item for item in folder.iterdir() if not item.name.startswith("."))
    except OSError:
        return []


def not_writable(path: Path, error: OSError) -> UserError:
    """The error of a write that failed: a full disk, a folder that is read-only."""
    return UserError(
        f"cannot write {path}",
        found=error.strerror or str(error),
        do="free some space or choose a folder that can be written; what was there before is untouched",
    )


def check_writable(path: Path) -> None:
    """Refuse a file that could not be written, before the work whose result it is to hold; nothing is left behind."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        nearest_folder = next(folder for folder in path.absolute().parents if folder.exists())
        with tempfile.TemporaryFile(dir=nearest_folder):
            pass
    except OSError as error:
        raise not_writable(path, error) from error


def is_temporary(path: Path) -> bool:
    """Whether a name is one that :func:`write_atomic` and its kin use while they write (``.NAME.XXXX.tmp``)."""
    return path.name.startswith(".") and path.name.endswith(".tmp")


def clear_temporaries(folder: Path) -> None:
    """Remove what writes that were killed left in a folder. Only the one writer of that folder may do so."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if is_temporary(path):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write text atomically."""

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")

    write_atomic(path, write)


def read_regular(path: Path, limit: int) -> bytes:
    """The bytes of a regular file of at most ``limit`` bytes; of anything else an OSError whose text says what it is.

    A named pipe would wait for ever and a device would never end: neither is read, also not behind a link.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, f"{_kind_of_file(status.st_mode)}, not a regular file", str(path))
        content = b"" if status.st_size > limit else _read_to_end(handle, status.st_size, limit + 1)
        if status.st_size > limit or len(content) > limit:
            raise OSError(errno.EFBIG, f"larger than {limit:,} bytes", str(path))
        return content
    finally:
        os.close(handle)


def _read_to_end(handle: int, expected: int, most: int) -> bytes:
    """What a file holds, up to ``most`` bytes. Memory is asked for what is ``expected``, not for what is allowed."""
    content = os.read(handle, min(expected + 1, most))
    if len(content) == expected:  # it was asked for one byte more: this is the end
        return content
    pieces = [content]
    while content and (left := most - sum(map(len, pieces))) > 0:  # it grows while it is read, or had no size
        content = os.read(handle, min(left, 1 << 20))
        pieces.append(content)
    return b"".join(pieces)


def read_or_empty(path: Path, limit: int, *, what: str = "", expected: str = "", do: str) -> bytes:
    """:func:`read_regular`, or nothing where there is no such file yet; what cannot be read is the user's to mend."""
    try:
        return read_regular(path, limit)
    except FileNotFoundError:
        return b""
    except OSError as error:
        found = error.strerror or str(error)
        raise UserError(f"{what or path} cannot be read", expected=expected, found=found, do=do) from error


def _kind_of_file(mode: int) -> str:
    kinds = (
        (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
        (stat.S_ISSOCK, "a socket"),
    )
    return next((name for test, name in kinds if test(mode)), "a special file")


def canonical_json(value: Any) -> str:
    """The one spelling of a JSON value that fingerprints are made of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, readable by people."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


_MAX_JSON = 1 << 30  # bytes of a JSON file; ours are a few kilobytes, official label files some hundred megabytes


def read_json(path: Path) -> Any:
    """Read JSON; a missing or broken file is a :class:`UserError`."""
    try:
        return json.loads(read_regular(path, _MAX_JSON).decode("utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist", do=where_instead(path)) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read", found=error.strerror or str(error)) from error
    except RecursionError as error:
        raise UserError(f"{path} is not readable as JSON", found="it is nested too deeply") from error
    except ValueError as error:  # no JSON, no UTF-8, a number of thousands of digits
        raise UserError(f"{path} is not readable as JSON", found=str(error)) from error


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a JSON-lines file; a last line cut short by a crash is passed over."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                return
            yield json.loads(line)


def fingerprint_bytes(*chunks: bytes) -> str:
    """``sha256:<hex>`` of the chunks one after another."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"


def fingerprint_json(value: Any) -> str:
    """Fingerprint of a JSON value, whatever the order of its keys."""
    return fingerprint_bytes(canonical_json(value).encode())


def fingerprint_file(path: Path) -> str:
    """Fingerprint of a file's bytes, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"


def fingerprint_ids(ids: Iterable[str]) -> str:
    """Fingerprint of a set of examples: their content hashes, in any order."""
    return fingerprint_bytes(*(f"{item}\n".encode() for item in sorted(ids)))


_KEY_DIGITS = 16  # 64 bits: enough to tell a thousand million images apart


def image_key(name: str) -> str:
    """The short key of an id or a hash, for lists of images that only ever ask whether an image is among them."""
    return hashlib.sha256(name.encode()).hexdigest()[:_KEY_DIGITS]
