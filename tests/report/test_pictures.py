"""Thumbnails come from wherever a locator leads: within bounds, unchanged, or not at all."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast.config import SourceConfig
from holdfast.data.pack import pack
from holdfast.data.sources import catalogue
from holdfast.report.pictures import Pictures, Place
from tests.data.pictures import encode, picture, write_folder

Tried = Callable[..., None]
CONTENT = encode(picture(1))
IDENTITY = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def pictures(tmp_path: Path) -> Pictures:
    return Pictures(tmp_path / "roles.parquet", tmp_path)


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def test_every_kind_of_source_gives_its_pictures(tmp_path: Path, pictures: Pictures) -> None:
    write_folder(tmp_path / "folder", {"cat": 3})
    rows = [{"bytes": encode(picture(n)), "path": None} for n in range(10, 13)] + [{"bytes": None, "path": "own.jpg"}]
    (tmp_path / "own.jpg").write_bytes(CONTENT)
    pq.write_table(pa.table({"image": rows}), tmp_path / "a.parquet", row_group_size=2)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for number, name in enumerate(("x.jpg", "x.jpg", "y.jpg", "y.png", "\udcff.jpg")):
            add(archive, name, encode(picture(20 + number)))
    sources = [("folder", "folder"), ("parquet", "a.parquet"), ("webdataset", "a.tar")]
    for kind, name in sources:
        found = catalogue([SourceConfig.model_validate({"kind": kind, "path": tmp_path / name})], Path())
        assert len(found) == {"folder": 3, "parquet": 4, "webdataset": 3}[kind]
        for row in found.table.to_pylist():
            place = Place(row["source"], row["locator"])
            assert pictures.thumbnail(row["example_id"], place) is not None, place
            assert pictures.thumbnail(IDENTITY[::-1], place) is None, place  # another picture lies there now
    store = pack(SourceConfig(path=tmp_path / "folder"), tmp_path / "store", size=8)
    for row in store.index.to_pylist():
        assert pictures.thumbnail(row["example_id"], Place(str(store.path), row["locator"])) is not None


def test_places_that_hold_no_picture(tmp_path: Path, pictures: Pictures, tried: Tried) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    os.mkfifo(tmp_path / "pipe.tar")
    os.mkfifo(tmp_path / "pipe.parquet")
    (tmp_path / "zero.jpg").symlink_to("/dev/zero")
    with (tmp_path / "sparse.jpg").open("wb") as file:
        file.truncate(6 << 30)
    (tmp_path / "noise.tar").write_bytes(b"no archive" * 1000)
    (tmp_path / "noise.parquet").write_bytes(b"no table" * 1000)
    (tmp_path / "folder").mkdir()
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        add(archive, "../up.jpg", CONTENT)
        link = tarfile.TarInfo("link.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    (tmp_path / "in").mkdir()
    (tmp_path / "outside.jpg").write_bytes(CONTENT)
    pq.write_table(pa.table({"image": [{"bytes": None, "path": "../outside.jpg"}]}), tmp_path / "in/a.parquet")
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "text.parquet")
    locators = ["pipe.jpg", "zero.jpg", "sparse.jpg", "folder", "gone.jpg", "a\0b.jpg", "x" * 5000, "", "#", "##"]
    locators += ["pipe.tar#x", "noise.tar#x", "a.tar#../up", "a.tar#link", "a.tar#gone", "folder#x"]
    locators += ["pipe.parquet#0", "noise.parquet#0", "in/a.parquet#0", "in/a.parquet#9", "in/a.parquet#-1"]
    locators += ["in/a.parquet#x", "text.parquet#0", "in/a.parquet#" + "9" * 5000]
    for locator in locators:
        assert pictures.thumbnail(IDENTITY, Place("in", locator)) is None, locator
    tried("bad inputs", len(locators))


@pytest.mark.parametrize("name", ["store.json", "index.arrow", "pixels.bin"])
@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b"[" * 100_000, None], ids=["empty", "object", "list", "deep", "pipe"]
)
def test_stores_that_were_broken(
    tmp_path: Path, pictures: Pictures, name: str, content: bytes | None, tried: Tried
) -> None:
    store = pack(SourceConfig(path=write_folder(tmp_path / "in", {"a": 2})), tmp_path / "store", size=8)
    identity = store.index["example_id"].to_pylist()[0]
    (store.path / name).unlink()
    if content is None:
        os.mkfifo(store.path / name)
    else:
        (store.path / name).write_bytes(content)
    assert pictures.thumbnail(identity, Place(str(store.path), "x")) is None
    tried("bad inputs")
