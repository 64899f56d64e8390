"""Files that are not what their name says: pipes, devices, bombs, broken tables, archives that mean harm.

Each of them is counted and named, or refused in one sentence; none of them hangs, fills the memory or ends in a
traceback.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pictures import encode, picture, write_folder
from PIL import Image

from holdfast.config import SourceConfig
from holdfast.data.catalogue import Catalogue, count_problems
from holdfast.data.images import MAX_BYTES, BadImage, evaluation_view, formats, open_image, to_rgb
from holdfast.data.inspection import contact_sheet, inspect_pictures
from holdfast.data.pack import pack
from holdfast.data.prompts import read_prompts
from holdfast.data.sources import catalogue, guess_source, list_source
from holdfast.data.sources.bdd100k import count_labels, read_labels
from holdfast.data.sources.places365 import read_categories
from holdfast.data.sources.store import list_store, open_store
from holdfast.errors import HoldfastError, UserError

Tried = Callable[..., None]
PICTURES = [encode(picture(number)) for number in range(4)]
DEEP = b"[" * 100_000


def short(value: object) -> str:
    """The name of a test that is given something long."""
    return repr(value)[:60]


def read(path: Path, kind: str = "folder") -> Catalogue:
    return catalogue([SourceConfig.model_validate({"kind": kind, "path": path})], Path())


@pytest.fixture
def ends() -> Generator[None]:
    """What would go round and round for ever fails after ten minutes instead."""

    def stop(*_: object) -> None:
        raise TimeoutError("it does not end")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(600)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def holdfast(*words: object) -> tuple[int, str, str]:
    """The command line in a process of its own, which has 12 GB of addresses and ten minutes."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))

    command = [sys.executable, "-m", "holdfast", *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, preexec_fn=limit, check=False)
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode, ended.stdout, ended.stderr


def sparse(path: Path, size: int = 6 << 30) -> Path:
    """A file that takes no space and six gigabytes to read."""
    with path.open("ab") as file:
        file.truncate(size)
    return path


def odd_files(folder: Path) -> dict[str, str]:
    """One of each thing that is no picture in a folder, and what is to be said about it."""
    os.mkfifo(folder / "pipe.jpg")
    (folder / "zero.jpg").symlink_to("/dev/zero")
    sparse(folder / "sparse.jpg")
    here = Path.cwd()
    os.chdir(folder)  # the address of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("socket.jpg")
    finally:
        os.chdir(here)
    (folder / "loop.jpg").symlink_to("loop.jpg")
    return {
        "pipe.jpg": "a named pipe, not a regular file",
        "zero.jpg": "a device, not a regular file",
        "sparse.jpg": f"larger than {MAX_BYTES:,} bytes",
        "socket.jpg": "No such device or address",
        "loop.jpg": "Too many levels of symbolic links",
    }


def test_a_folder_of_odd_files(tmp_path: Path, tried: Tried) -> None:
    write_folder(tmp_path / "in", {"cat": 3, "owl": 2})
    reasons = odd_files(tmp_path / "in" / "cat")
    code, text, _ = holdfast("data", tmp_path / "in", "--no-sheet")
    assert code == 0
    assert f"unreadable: {len(reasons)}" in text
    assert "cat/pipe.jpg (a named pipe, not a regular file)" in text
    found = read(tmp_path / "in")
    assert len(found) == 5
    assert {Path(problem.where).name: problem.detail for problem in found.problems} == reasons
    store = pack(SourceConfig(path=tmp_path / "in"), tmp_path / "store", size=8, limit=1.0)
    assert (store.rows, store.header["examples"]) == (10, 5)
    tried("bad inputs", 3 * len(reasons))


def test_a_table_that_names_odd_files(tmp_path: Path, tried: Tried) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "tables").mkdir()
    reasons = odd_files(tmp_path / "in")
    for number in range(3):
        (tmp_path / "in" / f"{number}.jpg").write_bytes(PICTURES[number])
    names = ["../in/0.jpg", tmp_path / "in/1.jpg", *(f"../in/{name}" for name in reasons), "/dev/zero", "../in"]
    (tmp_path / "tables/t.csv").write_text("filepath,label\n" + "".join(f"{name},cat\n" for name in names))
    code, text, _ = holdfast("data", tmp_path / "tables/t.csv", "--no-sheet", "--json")
    assert code == 0
    assert json.loads(text)["counts"] == {"cat": {"": 2}}  # a user's own files may lie anywhere
    assert json.loads(text)["problems"] == {"unreadable": len(reasons) + 2}
    tried("bad inputs", len(reasons) + 2)


@pytest.mark.parametrize("make", ["pipe", "device", "sparse"])
@pytest.mark.parametrize(
    "name", ["t.csv", "t.tsv", "t.parquet", "t.tar", "t.json", "categories_places365.txt", "folder"]
)
def test_a_source_that_is_no_regular_file(tmp_path: Path, name: str, make: str, ends: None, tried: Tried) -> None:
    path = tmp_path / name
    if make == "pipe":
        os.mkfifo(path)
    elif make == "device":
        path.symlink_to("/dev/zero")
    else:
        sparse(path)

    def inspect() -> None:
        if name == "t.json":
            count_labels(path, "weather")
        list_source(guess_source(str(tmp_path if name.startswith("categories") else path)), Path())

    with pytest.raises(UserError) as raised:
        inspect()
    assert str(path) in str(raised.value) or "no source" in str(raised.value)
    tried("bad inputs")


@pytest.mark.parametrize("suffix", ["tar", "parquet"])
def test_pipes_among_shards_are_counted(tmp_path: Path, suffix: str, ends: None, tried: Tried) -> None:
    os.mkfifo(tmp_path / f"a.{suffix}")
    (tmp_path / f"b.{suffix}").symlink_to("/dev/zero")
    (tmp_path / f"folder.{suffix}").mkdir()
    if suffix == "tar":
        write_tar(tmp_path / "folder.tar" / "c.tar", [("x.jpg", PICTURES[0])])
    else:
        pq.write_table(pa.table({"image": PICTURES}), tmp_path / "folder.parquet" / "c.parquet")
    listing = list_source(guess_source(str(tmp_path)), Path())
    assert count_problems(listing.problems) == {"not a regular file": 2}
    tried("bad inputs", 2)


def test_names_and_patterns_that_lead_nowhere(tmp_path: Path, tried: Tried) -> None:
    words = ["a" * 300, "a/" * 4000, "{5..3}", "{0..99999999999}", "{0..9999999}", "{000..002}.tar", "["]
    for word in words:
        with pytest.raises(UserError):
            list_source(guess_source(f"{tmp_path}/{word}"), Path())
        for kind in ("folder", "csv", "parquet", "webdataset", "bdd100k", "places365", "pack"):
            with pytest.raises(UserError):
                read(tmp_path / word, kind)
    tried("bad inputs", 8 * len(words))


def test_folders_within_folders(tmp_path: Path) -> None:
    write_folder(tmp_path / "in", {"cat": 1})
    folder = os.open(tmp_path / "in", os.O_RDONLY)
    for _ in range(1100):  # deeper than functions may call each other
        os.mkdir("f", dir_fd=folder)
        inner = os.open("f", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)
    assert len(read(tmp_path / "in")) == 1
    with pytest.raises(UserError, match="nested too deeply"):
        read(tmp_path / "in", "webdataset")
    subprocess.run(["rm", "-r", str(tmp_path / "in")], check=True)  # deeper than shutil.rmtree can remove it, too


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"filepath,title\n0.jpg,a\x00b\n", "line 2 holds a NUL"),
        (b"file\x00path,title\n0.jpg,x\n", "line 1 holds a NUL"),
        ("filepath,title\n0.jpg,x\n".encode("utf-16-le"), "line 1 holds a NUL"),
        ("filepath,title\n0.jpg,x\n".encode("utf-16"), "not UTF-8"),
        (b"filepath,title\n0.jpg," + b"x" * 200_000 + b"\n", "field larger"),
        (b"filepath,title\n0.jpg," + b"x" * 3_000_000 + b"\n", "line 2 is longer"),
        (b"x" * 3_000_000, "line 1 is longer"),
    ],
    ids=short,
)
def test_tables_that_are_no_text(tmp_path: Path, content: bytes, message: str, tried: Tried) -> None:
    (tmp_path / "0.jpg").write_bytes(PICTURES[0])
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(tmp_path / "t.csv", "csv")
    tried("bad inputs")


def test_a_field_is_too_long_though_another_library_allows_it(tmp_path: Path) -> None:
    """The limit of the csv module is the whole process's."""
    (tmp_path / "0.jpg").write_bytes(PICTURES[0])
    (tmp_path / "t.csv").write_bytes(b"filepath,title\n0.jpg," + b"x" * 200_000 + b"\n")
    before = csv.field_size_limit(10**9)
    try:
        with pytest.raises(UserError, match="field larger"):
            read(tmp_path / "t.csv", "csv")
    finally:
        csv.field_size_limit(before)


# Pictures


def test_a_line_of_pixels_is_no_bomb(tmp_path: Path, tried: Tried) -> None:
    """Resized for a model, each of its pixels becomes 224 x 224."""
    write_folder(tmp_path / "in", {"cat": 4})
    Image.new("1", (1, 2_000_000)).save(tmp_path / "in/cat/line.png")
    found = read(tmp_path / "in")
    assert not inspect_pictures(found).problems
    assert contact_sheet(found, tmp_path / "sheet.png") == 1
    with pytest.raises(BadImage, match="bomb"):
        evaluation_view(found.readers[0].image(4), 224)
    store = pack(SourceConfig(path=tmp_path / "in"), tmp_path / "store", size=16, limit=0.5)
    assert store.header["examples"] == 4
    assert evaluation_view(Image.new("RGB", (30, 900)), 16).shape == (3, 16, 16)
    tried("bad inputs")


@pytest.mark.parametrize("kind", [kind for kind in formats() if kind not in ("DIB", "JPEG2000")])
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_broken_pictures_of_every_format(tmp_path: Path, kind: str, tried: Tried) -> None:
    """Bytes of the header set to all values: a picture comes out, or a reason; nothing else is ever raised."""
    content = encode(picture(5), kind)
    tries = 0
    for position in range(4, min(len(content), 400)):
        for value in (0x00, 0xFF, content[position] ^ 0x01):
            changed = content[:position] + bytes([value]) + content[position + 1 :]
            tries += 1
            with contextlib.suppress(BadImage):
                to_rgb(open_image(changed))
    tried("bad inputs", tries)


def test_a_sheet_that_cannot_be_written(tmp_path: Path) -> None:
    found = read(write_folder(tmp_path / "in", {"cat": 1}))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        contact_sheet(found, tmp_path / "file" / "sheet.png")


# Parquet


def write_table(path: Path, columns: dict[str, Any], metadata: bytes | None = None, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    if metadata is not None:
        table = table.replace_schema_metadata({b"huggingface": metadata})
    pq.write_table(table, path, **options)
    return path


def test_a_path_in_a_table_does_not_leave_the_source(tmp_path: Path, tried: Tried) -> None:
    source = tmp_path / "source"
    (source / "data" / "more").mkdir(parents=True)
    (tmp_path / "secret.jpg").write_bytes(PICTURES[0])
    (source / "top.jpg").write_bytes(PICTURES[3])
    for name, number in (("data/own.jpg", 1), ("data/more/own.jpg", 2)):
        (source / name).write_bytes(PICTURES[number])
    (source / "data/link.jpg").symlink_to(tmp_path / "secret.jpg")
    (source / "data/outside").symlink_to(tmp_path)
    (source / "data/inside.jpg").symlink_to("../top.jpg")
    reasons = odd_files(source / "data")
    good = ["own.jpg", "more/own.jpg", "./own.jpg", "inside.jpg"]
    unsafe = [
        "../../secret.jpg",
        "../top.jpg",
        str(tmp_path / "secret.jpg"),
        "/dev/zero",
        "link.jpg",
        "outside/secret.jpg",
    ]
    unsafe += ["zero.jpg"]  # a link to a device is a link that leads outside
    unreadable = [name for name in reasons if name != "zero.jpg"] + ["a\0b", "gone.jpg", "more", "", "x" * 5000]
    names = [*good, *unsafe, *unreadable]
    images = [{"bytes": None, "path": name} for name in names]
    images.append({"bytes": PICTURES[0], "path": "/home/somebody/0.jpg"})  # where its maker had it: not looked at
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    write_table(source / "data/train.parquet", {"image": pa.array(images, kind), "row": list(range(len(images)))})
    code, text, _ = holdfast("data", source, "--kind", "parquet", "--no-sheet", "--json")
    assert code == 0
    problems = {"unsafe name": len(unsafe), "unreadable": len(unreadable)}
    assert {kind: json.loads(text)["problems"][kind] for kind in problems} == problems
    found = read(source, "parquet")
    contents = [found.readers[0].content(index) for index in found.table["index"].to_pylist()]
    assert contents == [PICTURES[1], PICTURES[2], PICTURES[1], PICTURES[3], PICTURES[0]]
    alone = read(source / "data/train.parquet", "parquet")  # its own folder is all there is of that source
    assert count_problems(alone.problems) == {"unsafe name": len(unsafe) + 1, "unreadable": len(unreadable)}
    tried("bad inputs", len(unsafe) + len(unreadable))


@pytest.mark.parametrize(
    "metadata",
    [
        b"{",
        b"\xff\xfe",
        b"",
        b"[]",
        b"null",
        b'"x"',
        b"3",
        DEEP,
        b'{"info":' * 50_000,
        b'{"info": null}',
        b'{"info": []}',
    ]
    + [b'{"info": {"features": %s}}' % text for text in (b"null", b"[1]", b'"x"', b"1" * 9000)]
    + [
        b'{"info": {"features": {"label": {"names": %s}}}}' % text
        for text in (b"null", b"5", b'{"0": "a"}', b"[1, null]")
    ],
    ids=short,
)
def test_metadata_that_names_nothing(tmp_path: Path, metadata: bytes, tried: Tried) -> None:
    write_table(tmp_path / "a.parquet", {"image": PICTURES, "label": [0, 1, 0, -1]}, metadata)
    found = read(tmp_path / "a.parquet", "parquet")
    assert found.column("class") == ["0", "1", "0", None]
    assert count_problems(found.problems) == {"unreadable metadata": 1}
    tried("bad inputs")


@pytest.mark.parametrize(
    "metadata",
    [
        b"{}",
        b'{"info": {}}',
        b'{"info": {"features": {}}}',
        b'{"info": {"features": {"label": {"dtype": "int64"}}}}',
        b'{"info": {"features": {"label": [{"names": ["a"]}]}}}',
    ],
)
def test_metadata_without_names_is_no_fault(tmp_path: Path, metadata: bytes) -> None:
    write_table(tmp_path / "a.parquet", {"image": PICTURES, "label": [0, 1, 0, -1]}, metadata)
    assert not read(tmp_path / "a.parquet", "parquet").problems


def test_names_with_half_a_character(tmp_path: Path) -> None:
    names = b'{"info": {"features": {"label": {"names": ["\\ud800", "b"]}}}}'
    write_table(tmp_path / "a.parquet", {"image": PICTURES, "label": [0, 1, 0, 1]}, names)
    assert read(tmp_path / "a.parquet", "parquet").classes == (r"\xed\xa0\x80", "b")


_SPLIT = "the column split holds no names"


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("split", [0, 1, 2, 3], _SPLIT),
        ("split", [1.0, None, 2.0, float("nan")], _SPLIT),
        ("split", [True, False, True, None], _SPLIT),
        ("split", [["train"]] * 4, _SPLIT),
        ("label", [[1], [2, 3], [], None], "a label is no text"),
        ("label", [{"name": "cat"}] * 4, "a label is no text"),
        ("label", pa.array([[("a", 1)]] * 4, pa.map_(pa.string(), pa.int64())), "a label is no text"),
        ("label", [b"cat", b"\xff", b"", None], "a label is not UTF-8"),
        ("label", pa.array([b"\xff\xfe"] * 4).view(pa.string()), "cannot be read"),
        ("label", pa.array([2**53] * 4, pa.timestamp("ms")), "cannot be read"),
        ("label", pa.array([2**62] * 4, pa.duration("s")), "cannot be read"),
        ("caption", [{"text": "a cat"}] * 4, "a caption is no text"),
        ("caption", [[{"text": "a cat"}]] * 4, "a caption is no text"),
        ("caption", [[["a cat"]]] * 4, "a caption is no text"),
        ("caption", [b"\xff"] * 4, "a caption is not UTF-8"),
    ],
)
def test_columns_of_odd_types(tmp_path: Path, column: str, values: Any, message: str, tried: Tried) -> None:
    write_table(tmp_path / "a.parquet", {"image": PICTURES, column: values})
    with pytest.raises(UserError, match=message):
        read(tmp_path / "a.parquet", "parquet")
    tried("bad inputs")


def test_columns_of_unusual_types(tmp_path: Path) -> None:
    columns = {
        "label": [b"cat", b"owl", b" ", None],  # before the pictures, and bytes: no picture for all that
        "image": PICTURES,
        "split": pa.array(["train", "test", None, "train"]).dictionary_encode(),
        "caption": [[None, "a cat"], [], [" "], None],
    }
    found = read(write_table(tmp_path / "a.parquet", columns), "parquet")
    assert found.column("class") == ["cat", "owl", None, None]
    assert found.column("split") == ["train", "test", None, "train"]
    assert found.column("caption") == ["a cat", None, None, None]
    numbers = read(
        write_table(tmp_path / "b.parquet", {"image": PICTURES, "label": [1.5, float("nan"), 2.0, None]}), "parquet"
    )
    assert numbers.column("class") == ["1.5", None, "2.0", None]


@pytest.mark.parametrize(
    "values",
    [
        [1, 2, 3, 4],
        ["x"] * 4,
        [[1]] * 4,
        [{"bytes": 10**10}] * 4,
        [{"bytes": "x"}] * 4,
        [{"bytes": [1, 300]}] * 4,
        [None] * 4,
    ],
)
def test_columns_that_hold_no_pictures(tmp_path: Path, values: list[Any], tried: Tried) -> None:
    with pytest.raises(UserError, match="holds no pictures"):
        read(write_table(tmp_path / "a.parquet", {"image": values}), "parquet")
    tried("bad inputs")


def test_a_row_that_is_larger_than_any_picture(tmp_path: Path, tried: Tried) -> None:
    large = bytes(MAX_BYTES + 1)
    write_table(tmp_path / "a.parquet", {"image": [large, PICTURES[0]]}, compression="zstd")
    found = read(tmp_path / "a.parquet", "parquet")
    assert [problem.detail for problem in found.problems] == [f"larger than {MAX_BYTES:,} bytes"]
    assert len(found) == 1
    tried("bad inputs")


def test_a_row_group_that_unpacks_to_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tried: Tried) -> None:
    """A dictionary of one entry, named by every row: a kilobyte on disk, any number of gigabytes in memory."""
    monkeypatch.setattr("holdfast.data.containers._MAX_GROUP", 64 << 20)
    row = pa.DictionaryArray.from_arrays(pa.array([0] * 300, pa.int32()), pa.array([bytes(1 << 20)]))
    write_table(tmp_path / "a.parquet", {"image": row}, compression="zstd", store_schema=False)
    assert (tmp_path / "a.parquet").stat().st_size < 10_000
    before = pa.total_allocated_bytes()
    found = read(tmp_path / "a.parquet", "parquet")
    assert {problem.detail for problem in found.problems} == {f"in a row group of more than {64 << 20:,} bytes"}
    assert pa.total_allocated_bytes() - before < 64 << 20
    tried("bad inputs")


def test_broken_tables(tmp_path: Path, tried: Tried) -> None:
    """Bytes of the footer changed one by one: a listing, counted problems or one sentence."""
    images = [{"bytes": content, "path": "x.jpg"} for content in PICTURES]
    path = write_table(tmp_path / "a.parquet", {"image": images, "label": list("abab"), "caption": [["x", "y"]] * 4})
    content = path.read_bytes()
    length = int.from_bytes(content[-8:-4], "little")
    positions = range(len(content) - 8 - length, len(content), 7)
    for position in positions:
        for value in (0x00, 0xFF):
            path.write_bytes(content[:position] + bytes([value]) + content[position + 1 :])
            with contextlib.suppress(UserError):
                inspect_pictures(read(path, "parquet"))
    tried("bad inputs", 2 * len(positions))


# Tar


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A tar header with any size, negative ones too."""
    info = tarfile.TarInfo(name)
    info.type = kind
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT)[:512])
    block[124:136] = (b"\x80" if size >= 0 else b"\xff") + (size & ((1 << 88) - 1)).to_bytes(11, "big")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def append(shard: Path, *blocks: bytes) -> Path:
    """Add blocks after the members of a shard."""
    content = shard.read_bytes().rstrip(b"\0")
    content += b"\0" * (-len(content) % 512)
    for block in blocks:
        content += block + b"\0" * (-len(block) % 512)
    shard.write_bytes(content)
    return shard


def shard(tmp_path: Path) -> Path:
    return write_tar(tmp_path / "a.tar", [("ok.jpg", PICTURES[0]), ("ok.txt", b"fine")])


def test_sparse_members(tmp_path: Path, tried: Tried) -> None:
    path = append(shard(tmp_path), header("z.jpg", 6 << 30))
    start = path.stat().st_size
    sparse(path, start + (6 << 30))
    with path.open("ab") as file:
        file.write(header("y.txt", 6 << 30))
    sparse(path, start + 512 + (12 << 30))
    code, text, _ = holdfast("data", path, "--no-sheet", "--json")
    assert code == 0
    assert json.loads(text)["problems"] == {"too large": 2, "example without a picture": 2}
    tried("hostile archives", 2)


@pytest.mark.parametrize("kind", [b"L", b"K", b"x", b"g", b"S"])
@pytest.mark.parametrize("size", [6 << 30, 1 << 20, -512, -1024, -2048, -(1 << 60)])
def test_headers_of_impossible_sizes(tmp_path: Path, kind: bytes, size: int, ends: None, tried: Tried) -> None:
    path = append(shard(tmp_path), header("z.jpg", size, kind))
    if size > 0:
        sparse(path, path.stat().st_size + size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = read(path, "webdataset")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # kilobytes: it was not read
    assert found.column("caption") == ["fine"]
    assert set(count_problems(found.problems)) <= {"broken shard", "sparse member", "example without a picture"}
    assert found.problems
    tried("hostile archives")


@pytest.mark.parametrize("size", [-512, -1024, -2048, -5120, -(1 << 60)])
def test_members_that_lead_back(tmp_path: Path, size: int, ends: None, tried: Tried) -> None:
    found = read(append(shard(tmp_path), header("z.jpg", size)), "webdataset")
    assert len(found) == 1
    assert count_problems(found.problems) == {"broken shard": 1}
    record = b"%d size=%d\n" % (8 + len(str(size)) + (len(str(size)) > 1), size)
    extended = append(shard(tmp_path), header("pax", len(record), b"x"), record, header("z.jpg", 0))
    assert "broken shard" in count_problems(read(extended, "webdataset").problems)
    tried("hostile archives", 2)


def test_headers_that_cannot_be_read(tmp_path: Path, ends: None, tried: Tried) -> None:
    def record(key: str, value: str) -> bytes:
        length = len(key) + len(value) + 3
        return b"%d %s=%s\n" % (length + len(str(length + len(str(length)))), key.encode(), value.encode())

    fields = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "z.jpg", "GNU.sparse.realsize": "9"}
    numbers = b"1" * 30_000  # a search in it that starts anew at each digit
    cases = [
        [header("l", 4, b"L"), b"abc\0"] * 3000,
        [header("x", 9, b"x"), b"9 path=a\n"] * 3000,
        [header("pax", len(numbers), b"x"), numbers, header("z.jpg", 0)],
        [header("pax", 9, b"x"), b"0 path=x\n", header("z.jpg", 0)],
        [
            header("pax", 300, b"x"),
            b"".join(record(*item) for item in fields.items()).ljust(300, b"\0"),
            header("z.jpg", 0),
        ],
        [header("pax", 26, b"x"), record("GNU.sparse.map", "0,1,x"), header("z.jpg", 0)],
        [b"no header at all" * 32],
    ]
    for blocks in cases:
        found = read(append(shard(tmp_path), *blocks), "webdataset")
        assert found.column("caption") == ["fine"]
        assert found.problems, blocks[0][:20]
    tried("hostile archives", len(cases))


@pytest.mark.parametrize(
    "member",
    [
        ("x.json", DEEP),
        ("x.json", b'{"a":' * 50_000),
        ("x.json", b'{"label": ' + b"9" * 9000 + b"}"),
        ("x.json", b"[]"),
        ("x.json", b'{"caption": ["a"]}'),
        ("x.json", b'{"label": {"x": 1}}'),
        ("x.json", b"\xff\xfe"),
        ("x.json", b""),
        ("x.txt", b"\xff"),
    ],
    ids=short,
)
def test_texts_in_shards_that_cannot_be_read(tmp_path: Path, member: tuple[str, bytes], tried: Tried) -> None:
    path = write_tar(tmp_path / "a.tar", [("x.jpg", PICTURES[0]), member])
    found = read(path, "webdataset")
    assert count_problems(found.problems) == {"unreadable text": 1}
    assert found.column("class") == [None]
    tried("hostile archives")


def test_texts_in_shards_that_are_too_long(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", [("x.jpg", PICTURES[0]), ("x.txt", b"a" * (2 << 20))])
    assert count_problems(read(path, "webdataset").problems) == {"too large": 1}


def test_names_and_texts_that_are_no_unicode(tmp_path: Path, tried: Tried) -> None:
    members = [
        ("\udcff.jpg", PICTURES[0]),
        ("\udcff.json", b'{"caption": "\\ud800", "label": "\\udc80", "split": "\\udfff"}'),
    ]
    found = read(write_tar(tmp_path / "a.tar", members), "webdataset")
    assert found.column("locator") == [f"{tmp_path}/a.tar#\\xff"]
    assert found.column("class") == ["\\x80"]
    assert found.column("caption") == [r"\xed\xa0\x80"]
    tried("hostile archives")


@pytest.mark.parametrize(("label", "expected"), [("²", "²"), ("٣", "٣"), ("-1", "-1"), ("1", "owl"), ("0001", "owl")])
def test_numbers_of_classes(tmp_path: Path, label: str, expected: str) -> None:
    write_tar(tmp_path / "a.tar", [("x.jpg", PICTURES[0]), ("x.cls", label.encode())])
    (tmp_path / "classnames.txt").write_text("cat\nowl\n")
    assert read(tmp_path / "a.tar", "webdataset").column("class") == [expected]


@pytest.mark.parametrize("label", ["2", "9" * 9000], ids=short)
def test_classes_without_a_name(tmp_path: Path, label: str) -> None:
    write_tar(tmp_path / "a.tar", [("x.jpg", PICTURES[0]), ("x.cls", label.encode())])
    (tmp_path / "classnames.txt").write_text("cat\nowl\n")
    with pytest.raises(UserError, match="has no name"):
        read(tmp_path / "a.tar", "webdataset")


def test_lists_of_names_that_are_no_text(tmp_path: Path, tried: Tried) -> None:
    write_tar(tmp_path / "a.tar", [("x.jpg", PICTURES[0]), ("x.cls", b"0")])
    (tmp_path / "classnames.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match="not UTF-8"):
        read(tmp_path / "a.tar", "webdataset")
    (tmp_path / "classnames.txt").unlink()
    os.mkfifo(tmp_path / "classnames.txt")
    with pytest.raises(UserError, match="named pipe"):
        read(tmp_path / "a.tar", "webdataset")
    (tmp_path / "categories.txt").write_bytes(b"/a/caf\xe9 0")
    with pytest.raises(UserError, match="not UTF-8"):
        read_categories(tmp_path / "categories.txt")
    (tmp_path / "categories.txt").write_bytes(b"/a/airfield " + b"9" * 9000)
    with pytest.raises(UserError, match="category list"):
        read_categories(tmp_path / "categories.txt")
    tried("bad inputs", 4)


# Label files and prompts


@pytest.mark.parametrize(
    "content",
    [
        DEEP,
        b"{}",
        b"[null]",
        b"[3]",
        b'[{"name": "a", "attributes": [1]}]',
        b'[{"name": "a", "attributes": "x"}]',
        b'[{"name": "a", "attributes": {"weather": ["x"]}}]',
        b'[{"name": "a", "attributes": {"weather": {"x": 1}}}]',
        b'[{"name": ["a"], "attributes": {"weather": "clear"}}]',
        b'[{"attributes": {"weather": "clear"}}]',
        b"\xff\xfe",
        b"",
    ],
    ids=short,
)
def test_label_files_of_another_shape(tmp_path: Path, content: bytes, tried: Tried) -> None:
    (tmp_path / "det_val.json").write_bytes(content)
    with pytest.raises(UserError):
        read_labels(tmp_path / "det_val.json", "weather", "val")
    tried("bad inputs")


def test_labels_with_half_a_character(tmp_path: Path) -> None:
    write_folder(tmp_path, {"images/100k/val": 2})
    frames = b'[{"name": "\\ud800.jpg"}, {"name": "0000.jpg", "attributes": {"weather": "\\ud800"}}]'
    (tmp_path / "det_val.json").write_bytes(frames)
    assert read(tmp_path, "bdd100k").classes == (r"\xed\xa0\x80",)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.json", DEEP),
        ("p.json", b'{"cat":' * 50_000),
        ("p.json", b'["a cat"]'),
        ("p.json", b'{"cat": {"a": 1}}'),
        ("p.json", b'{"cat": "\\ud800"}'),
        ("p.toml", b"cat = " + DEEP),
        ("p.toml", b"cat = 3"),
        ("p.toml", b"\xff"),
    ],
    ids=short,
)
def test_prompts_of_another_shape(tmp_path: Path, name: str, content: bytes, tried: Tried) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError):
        read_prompts(tmp_path / name, ["cat"])
    tried("bad inputs")


@pytest.mark.parametrize("name", ["p.json", "p.toml"])
def test_prompts_that_are_no_regular_file(tmp_path: Path, name: str, ends: None, tried: Tried) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError):
        read_prompts(tmp_path / name, ["cat"])
    tried("bad inputs")


# Stores


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("packed")
    return pack(SourceConfig(path=write_folder(root / "in", {"a": 3})), root / "store", size=8).path


def copy(packed: Path, to: Path) -> Path:
    to.mkdir()
    for path in packed.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_headers_of_stores_that_were_changed(packed: Path, tmp_path: Path, tried: Tried) -> None:
    store = copy(packed, tmp_path / "store")
    header = json.loads((store / "store.json").read_text())
    values: list[Any] = [None, -1, "x", {}, 1.5, 10**30, [[1]], [None], [["a", "b", None]]]
    tries = 0
    for key in set(header) - {"source", "listing"}:
        for value in values:
            (store / "store.json").write_text(json.dumps(header | {key: value}))
            if isinstance(header[key], str) and isinstance(value, str) and key not in ("format", "interpolation"):
                continue
            if key == "interpolation" and value == "x":
                continue
            with pytest.raises(HoldfastError):
                list_store(SourceConfig(kind="pack", path=store), store)
            tries += 1
    (store / "store.json").write_bytes(DEEP)
    with pytest.raises(UserError, match="JSON"):
        open_store(store)
    tried("bad inputs", tries)


@pytest.mark.parametrize("name", ["index.arrow", "pixels.bin", "thumbs.bin", "store.json"])
@pytest.mark.parametrize("change", ["pipe", "device", "gone", "empty", "cut", "noise"])
def test_files_of_stores_that_were_changed(
    packed: Path, tmp_path: Path, name: str, change: str, ends: None, tried: Tried
) -> None:
    store = copy(packed, tmp_path / "store")
    content = (store / name).read_bytes()
    (store / name).unlink()
    if change == "pipe":
        os.mkfifo(store / name)
    elif change == "device":
        (store / name).symlink_to("/dev/zero")
    elif change != "gone":
        kept = {"empty": b"", "cut": content[: len(content) // 2], "noise": b"\xa5" * (len(content) + 1)}[change]
        (store / name).write_bytes(kept)
    with pytest.raises(HoldfastError):
        list_store(SourceConfig(kind="pack", path=store), store)
    tried("bad inputs")
