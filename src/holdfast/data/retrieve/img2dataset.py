"""img2dataset's output in place of our own downloads: ``webdataset`` (tar) and ``files`` layouts.

Its pictures go through the same cleaning as those that we fetch, and its failures are counted as ours are.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.data.retrieve.download import FetchLimits, Outcome
from holdfast.data.retrieve.fetch import finish, open_rows, open_store
from holdfast.data.retrieve.images import NotAnImage, clean_image
from holdfast.data.retrieve.manifest import Note, RetrievalFolder
from holdfast.errors import UserError
from holdfast.files import read_regular

_IMAGES = ("jpg", "jpeg", "png", "webp")
_LARGEST_JSON = 1 << 20


def adopt(
    source: Path, out: Path, limits: FetchLimits, *, restart: bool = False, note: Note | None = None
) -> dict[str, Any]:
    """Take the wanted pictures out of an img2dataset folder; those it has not are lost as ``not-in-img2dataset``."""
    if not source.is_dir():
        raise UserError(f"{source} is not a folder", expected="the output folder of img2dataset")
    with RetrievalFolder(out).writing("search") as folder:
        store, wanted_by = open_store(folder, limits, restart=restart)
        waiting = {row.url: row for row in open_rows(store, note)}
        seen = 0
        for about, content in read_samples(source, limits.max_bytes):
            seen += 1
            row = waiting.pop(str(about.get("url")), None)
            if row is not None:
                store.record(row, _outcome(content, limits))
        if not seen:
            raise UserError(
                f"no img2dataset sample in {source}",
                expected="00000.tar or 00000/000000000.jpg, with a .json beside each picture",
                do="run img2dataset with --output_format webdataset or files",
            )
        for row in waiting.values():
            store.record(row, Outcome("not-in-img2dataset"))
        open_rows(store)  # closes what became whole
        return finish(folder, store, limits, wanted_by, "img2dataset")


def _outcome(content: bytes | None, limits: FetchLimits) -> Outcome:
    if content is None:
        return Outcome("img2dataset-failed")
    if len(content) > limits.max_bytes:
        return Outcome("too-large")
    digest = hashlib.sha256(content).hexdigest()
    try:
        return Outcome("ok", digest, clean_image(content, limits.image))
    except NotAnImage as problem:
        return Outcome(problem.reason, digest)


def read_samples(source: Path, max_bytes: int) -> Iterator[tuple[dict[str, Any], bytes | None]]:
    """What img2dataset wrote down about a sample (its JSON, with ``url``), and its picture where there is one.

    Of a picture larger than ``max_bytes`` one byte more than that is handed out.
    """
    for tar in sorted(path for path in source.glob("*.tar") if path.is_file()):
        yield from _from_tar(tar, max_bytes)
    for about in sorted(path for path in source.glob("*/*.json") if path.is_file()):
        names = (about.with_suffix(f".{ending}") for ending in _IMAGES)
        picture = next((path for path in names if path.is_file()), None)
        try:
            parsed = _parsed(read_regular(about, _LARGEST_JSON), about)
            content = None
            if picture is not None:
                with picture.open("rb") as file:
                    content = file.read(max_bytes + 1)
        except OSError as error:
            raise UserError(f"{error.filename} cannot be read", found=error.strerror or str(error)) from error
        yield parsed, content


def _from_tar(path: Path, max_bytes: int) -> Iterator[tuple[dict[str, Any], bytes | None]]:
    sample: dict[str, bytes] = {}
    current: str | None = None
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if not member.isfile():
                    continue
                key, _, ending = Path(member.name).name.partition(".")
                if key != current:
                    if "json" in sample:
                        yield _parsed(sample["json"], path), _picture(sample)
                    current, sample = key, {}
                file = tar.extractfile(member)
                if file is not None:
                    # A sparse member takes no room in the tar and may be of any size.
                    sample[ending.lower()] = file.read(_LARGEST_JSON if ending.lower() == "json" else max_bytes + 1)
        if "json" in sample:
            yield _parsed(sample["json"], path), _picture(sample)
    except (tarfile.TarError, OSError, ValueError, EOFError, OverflowError) as error:
        raise UserError(f"{path} is not a readable tar", found=str(error)) from error


def _picture(sample: dict[str, bytes]) -> bytes | None:
    return next((sample[ending] for ending in _IMAGES if ending in sample), None)


def _parsed(content: bytes, path: Path) -> dict[str, Any]:
    try:
        about = json.loads(content)
    except RecursionError as error:
        raise UserError(f"{path} holds a .json that cannot be read", found="it is nested too deeply") from error
    except ValueError as error:
        raise UserError(f"{path} holds a .json that cannot be read", found=str(error)) from error
    if not isinstance(about, dict) or "url" not in about:
        raise UserError(f"{path} is no img2dataset output", expected="a .json with a url for each sample")
    return about
