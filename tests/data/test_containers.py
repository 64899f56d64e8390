"""Parquet tables and tar shards."""

from __future__ import annotations

import io
import json
import tarfile
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pictures import encode, picture

from holdfast.config import SourceConfig
from holdfast.data.catalogue import count_problems
from holdfast.data.sources import catalogue, guess_source, list_source
from holdfast.errors import UserError


def hugging_face(path: Path, count: int, *, start: int = 0, names: bool = True) -> None:
    images = [{"bytes": encode(picture(start + n)), "path": f"{n}.jpg"} for n in range(count)]
    table = pa.table({"image": images, "label": pa.array([n % 2 for n in range(count)], pa.int64())})
    if names:
        features = {"image": {"_type": "Image"}, "label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=4)


def test_hugging_face_layout(tmp_path: Path) -> None:
    hugging_face(tmp_path / "data" / "train-00000-of-00002.parquet", 10)
    hugging_face(tmp_path / "data" / "train-00001-of-00002.parquet", 6, start=10)
    hugging_face(tmp_path / "data" / "test-00000-of-00001.parquet", 4, start=20)
    source = guess_source(str(tmp_path))
    assert source.kind == "parquet"
    found = catalogue([source], Path())
    assert Counter(zip(found.column("split"), found.column("class"), strict=True)) == {
        ("train", "cat"): 8,
        ("train", "dog"): 8,
        ("test", "cat"): 2,
        ("test", "dog"): 2,
    }
    for row in (0, 13, 5, 19):  # in any order, across row groups and files
        reader, index = found.readers[0], found.table["index"].to_pylist()[row]
        number = row - 4 + 0 if row >= 4 else 20 + row  # test-… sorts before train-…
        assert reader.content(index) == encode(picture(number))


def test_plain_bytes_captions_and_globs(tmp_path: Path) -> None:
    for part in range(2):
        pictures = [encode(picture(part)), encode(picture(10 + part))]
        table = pa.table(
            {"jpg": pictures, "caption": [["one", "two"], [" "]], "label": ["a", None], "split": ["val", None]}
        )
        pq.write_table(table, tmp_path / f"part{part}.parquet")
    found = list_source(SourceConfig(kind="parquet", path=tmp_path / "part*.parquet"), Path())
    first = found.entries[:3]
    assert [(item.caption, item.label, item.split) for item in first] == [
        ("one", "a", "val"),
        ("two", "a", "val"),
        (None, None, None),
    ]
    assert len(found.entries) == 6
    assert found.reader.content(1) == encode(picture(0))


def test_bad_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.table({"url": ["x"], "caption": ["y"]}), tmp_path / "links.parquet")
    with pytest.raises(UserError, match="holds no pictures"):
        list_source(SourceConfig(kind="parquet", path=tmp_path / "links.parquet"), Path())
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and nothing more")
    with pytest.raises(UserError, match="not a Parquet file"):
        list_source(SourceConfig(kind="parquet", path=tmp_path / "broken.parquet"), Path())
    hugging_face(tmp_path / "train.parquet", 4)
    table = pq.read_table(tmp_path / "train.parquet").set_column(1, "label", pa.array([0, 1, 7, 0], pa.int64()))
    pq.write_table(table, tmp_path / "train.parquet")
    with pytest.raises(UserError, match="label 7 has no name"):
        list_source(SourceConfig(kind="parquet", path=tmp_path / "train.parquet"), Path())
    empty = pa.table({"image": pa.array([None, encode(picture(0))], pa.binary()), "label": ["a", "b"]})
    pq.write_table(empty, tmp_path / "holes.parquet")
    found = catalogue([SourceConfig(kind="parquet", path=tmp_path / "holes.parquet")], Path())
    assert len(found) == 1
    assert count_problems(found.problems) == {"unreadable": 1}


def write_shard(path: Path, members: list[tuple[str, bytes]], *, links: tuple[str, ...] = ()) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        for name in links:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(info)
    return path


def sample(key: str, number: int) -> list[tuple[str, bytes]]:
    return [
        (f"{key}.jpg", encode(picture(number))),
        (f"{key}.txt", f"caption {number}".encode()),
        (f"{key}.cls", str(number % 2).encode()),
    ]


def test_shards(tmp_path: Path) -> None:
    (tmp_path / "classnames.txt").write_text("cat\ndog\n")
    for shard in range(3):
        members = [member for n in range(4) for member in sample(f"{shard}{n}", 10 * shard + n)]
        write_shard(tmp_path / f"train-{shard:03d}.tar", members)
    document = json.dumps({"caption": "from json", "label": "owl", "split": "test"}).encode()
    write_shard(tmp_path / "other.tar", [("x.y.png", encode(picture(99), "PNG")), ("x.json", document)])
    found = catalogue([SourceConfig(kind="webdataset", path=tmp_path / "train-{000..002}.tar")], Path())
    assert Counter(zip(found.column("split"), found.column("class"), strict=True)) == {
        ("train", "cat"): 6,
        ("train", "dog"): 6,
    }
    assert found.column("caption")[5] == "caption 11"
    assert found.readers[0].content(5) == encode(picture(11))
    assert not found.problems
    other = list_source(SourceConfig(kind="webdataset", path=tmp_path / "other.tar"), Path()).entries[0]
    assert (other.caption, other.label, other.split) == ("from json", "owl", "test")
    assert guess_source(str(tmp_path)).kind == "webdataset"


def test_shards_with_faults(tmp_path: Path) -> None:
    members = [
        *sample("good", 0),
        ("../../outside.jpg", encode(picture(1))),
        ("/absolute.jpg", encode(picture(2))),
        ("textonly.txt", b"nothing to see"),
        ("bare.jpg", encode(picture(3))),
        ("good.jpg", encode(picture(4))),
        ("latin.jpg", encode(picture(5))),
        ("latin.txt", "caf\u00e9".encode("latin-1")),
        ("readme.md", b"ignored"),
    ]
    write_shard(tmp_path / "a.tar", members, links=("passwd.jpg",))
    listing = list_source(SourceConfig(kind="webdataset", path=tmp_path / "a.tar"), Path())
    assert [entry.locator.rpartition("#")[2] for entry in listing.entries] == ["good", "bare", "latin"]
    assert count_problems(listing.problems) == {
        "unsafe name": 2,
        "link in a shard": 1,
        "example without a picture": 1,
        "example without text or label": 2,
        "name used twice": 1,
        "unreadable text": 1,
    }
    assert listing.reader.content(0) == encode(picture(0))


def test_shard_that_is_cut_short(tmp_path: Path) -> None:
    whole = write_shard(tmp_path / "a.tar", [member for n in range(4) for member in sample(str(n), n)])
    content = whole.read_bytes()
    fourth = content.index(b"3.jpg")
    (tmp_path / "b.tar").write_bytes(content[: fourth + 512 + 300])
    listing = list_source(SourceConfig(kind="webdataset", path=tmp_path / "b.tar"), Path())
    assert len(listing.entries) == 3
    assert "broken shard" in count_problems(listing.problems)
    (tmp_path / "c.tar").write_bytes(b"no archive at all" * 100)
    with pytest.raises(UserError, match="holds no pictures"):
        list_source(SourceConfig(kind="webdataset", path=tmp_path / "c.tar"), Path())


def test_compressed_shard(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(__file__, "x.txt")
    with pytest.raises(UserError, match="compressed"):
        list_source(SourceConfig(kind="webdataset", path=tmp_path / "a.tar.gz"), Path())
