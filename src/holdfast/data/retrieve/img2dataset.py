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
from holdfast.data.retrieve.fetch import finish, open_store
from holdfast.data.retrieve.images import NotAnImage, clean_image
from holdfast.data.retrieve.manifest import RetrievalFolder
from holdfast.errors import UserError

_IMAGES = ("jpg", "jpeg", "png", "webp")


def adopt(source: Path, out: Path, limits: FetchLimits, *, restart: bool = False) -> dict[str, Any]:
    """Take the wanted pictures out of an img2dataset folder; those it has not are lost as ``not-in-img2dataset``."""
    if not source.is_dir():
        raise UserError(f"{source} is not a folder", expected="the output folder of img2dataset")
    folder = RetrievalFolder(out)
    store, wanted_by = open_store(folder, limits, restart=restart)
    open_rows = {row.url: row for shard in range(store.count) for row in store.open_rows(shard)}
    seen = 0
    for about, content in read_samples(source):
        seen += 1
        row = open_rows.pop(str(about.get("url")), None)
        if row is None:
            continue
        if content is None:
            store.record(row, Outcome("img2dataset-failed"))
            continue
        digest = hashlib.sha256(content).hexdigest()
        try:
            store.record(row, Outcome("ok", digest, clean_image(content, limits.image)))
        except NotAnImage as problem:
            store.record(row, Outcome(problem.reason, digest))
    if not seen:
        raise UserError(
            f"no img2dataset sample in {source}",
            expected="00000.tar or 00000/000000000.jpg, with a .json beside each picture",
            do="run img2dataset with --output_format webdataset or files",
        )
    for row in open_rows.values():
        store.record(row, Outcome("not-in-img2dataset"))
    for shard in range(store.count):
        store.open_rows(shard)  # closes what became whole
    return finish(folder, store, limits, wanted_by, "img2dataset")


def read_samples(source: Path) -> Iterator[tuple[dict[str, Any], bytes | None]]:
    """What img2dataset wrote down about a sample (its JSON, with ``url``), and its picture where there is one."""
    for tar in sorted(source.glob("*.tar")):
        yield from _from_tar(tar)
    for about in sorted(source.glob("*/*.json")):
        picture = next((one for ending in _IMAGES if (one := about.with_suffix(f".{ending}")).exists()), None)
        yield _parsed(about.read_bytes(), about), picture.read_bytes() if picture is not None else None


def _from_tar(path: Path) -> Iterator[tuple[dict[str, Any], bytes | None]]:
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
                    sample[ending.lower()] = file.read()
        if "json" in sample:
            yield _parsed(sample["json"], path), _picture(sample)
    except tarfile.TarError as error:
        raise UserError(f"{path} is not a readable tar", found=str(error)) from error


def _picture(sample: dict[str, bytes]) -> bytes | None:
    return next((sample[ending] for ending in _IMAGES if ending in sample), None)


def _parsed(content: bytes, path: Path) -> dict[str, Any]:
    try:
        about = json.loads(content)
    except ValueError as error:
        raise UserError(f"{path} holds a .json that cannot be read", found=str(error)) from error
    if not isinstance(about, dict) or "url" not in about:
        raise UserError(f"{path} is no img2dataset output", expected="a .json with a url for each sample")
    return about
