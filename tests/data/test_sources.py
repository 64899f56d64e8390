from __future__ import annotations

import os
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from pictures import encode, picture, write_folder
from PIL import Image

import holdfast.data.catalogue
from holdfast.config import SourceConfig
from holdfast.data import images
from holdfast.data.catalogue import COLUMNS, catalogue_schema, count_problems, in_order, join
from holdfast.data.sources import catalogue, guess_source, list_source
from holdfast.errors import UserError


def folder(path: Path, **options: object) -> SourceConfig:
    return SourceConfig.model_validate({"kind": "folder", "path": path, **options})


def counts(listing_of: SourceConfig, root: Path = Path()) -> dict[tuple[str | None, str | None], int]:
    return Counter((entry.split, entry.label) for entry in list_source(listing_of, root).entries)


def test_folder_with_and_without_splits(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", {"train/cat": 3, "train/dog": 2, "test/cat": 1})
    assert counts(folder(tmp_path / "a")) == {("train", "cat"): 3, ("train", "dog"): 2, ("test", "cat"): 1}
    write_folder(tmp_path / "b", {"cat": 2, "train": 1})  # a class may be called train
    assert counts(folder(tmp_path / "b")) == {(None, "cat"): 2, (None, "train"): 1}
    write_folder(tmp_path / "c", {"cat/persian": 2, "dog": 1})
    assert counts(folder(tmp_path / "c")) == {(None, "cat"): 2, (None, "dog"): 1}
    write_folder(tmp_path / "d", {".": 2})
    assert counts(folder(tmp_path / "d")) == {(None, None): 2}
    write_folder(tmp_path / "e", {"train": 2, "test": 1})
    assert counts(folder(tmp_path / "e")) == {("train", None): 2, ("test", None): 1}


def test_folders_without_pictures_are_named(tmp_path: Path) -> None:
    plain, split = tmp_path / "plain", tmp_path / "split"
    write_folder(plain, {"a": 2, "b/deeper": 1})
    for name in ("c", "d/deeper", ".hidden"):
        (plain / name).mkdir(parents=True)
    (plain / "c" / "c.txt").touch()
    write_folder(split, {"train/a": 2, "train/b": 2, "val/a": 1})
    (split / "val" / "b").mkdir()
    (split / "test").mkdir()
    expected = {
        plain: [("c", "c.txt"), ("d", "deeper")],
        split: [("test", "an empty folder"), ("val/b", "an empty folder")],
    }
    for path, problems in expected.items():
        found = list_source(folder(path), Path()).problems
        assert [(item.kind, item.where, item.detail) for item in found] == [
            ("folder without pictures", str(path / name), detail) for name, detail in problems
        ]
    assert list_source(folder(Path("plain")), tmp_path).problems[0].where == "plain/c"
    (plain / "again").symlink_to(plain / "b")  # read once, under either name
    (plain / "loop").symlink_to(plain)
    assert [item.detail for item in list_source(folder(plain), Path()).problems] == ["c.txt", "deeper"]
    write_folder(tmp_path / "pool", {"": 2})  # pictures without a class: no folder is expected to hold one
    (tmp_path / "pool" / "more").mkdir()
    assert list_source(folder(tmp_path / "pool"), Path()).problems == []


def test_files_that_are_not_read_are_named(tmp_path: Path) -> None:
    """They were passed over without a word, photographs of a telephone among them."""
    root = write_folder(tmp_path / "photos", {"cat": 2, "dog": 2})
    for name in ("cat/1.HEIC", "dog/2.heif", "notes.txt", "cat/a.txt", "cat/b.json", "dog/.hidden", "dog/Thumbs.db"):
        (root / name).write_text("nothing that is read")
    listing = list_source(folder(root), Path())
    assert len(listing.entries) == 4
    assert {(item.kind, item.where.removeprefix(f"{root}"), item.detail) for item in listing.problems} == {
        ("picture in a format that is not read", "/cat/1.HEIC", "convert it to JPEG or PNG"),
        ("picture in a format that is not read", "/dog/2.heif", "convert it to JPEG or PNG"),
        ("folder with files that are no pictures", "", "notes.txt"),
        ("folder with files that are no pictures", "/cat", "a.txt, b.json"),
    }
    (tmp_path / "phone").mkdir()
    (tmp_path / "phone" / "1.heic").write_text("")
    with pytest.raises(UserError, match="no pictures under") as raised:
        list_source(folder(tmp_path / "phone"), Path())
    assert raised.value.do == f"convert {tmp_path}/phone/1.heic to JPEG or PNG"


def test_every_kind_of_picture_that_is_read_is_listed(tmp_path: Path) -> None:
    """What Pillow reads of our formats by its usual names is listed, or named as a picture that is not."""
    Image.init()
    for name, kind in Image.EXTENSION.items():
        if kind in images.formats():
            assert name in images.SUFFIXES | images.OTHER_SUFFIXES
    assert not images.SUFFIXES & images.OTHER_SUFFIXES
    heic = tmp_path / "renamed.jpg"
    heic.write_bytes(b"\0\0\0\x18ftypheic" + bytes(64))
    with pytest.raises(images.BadImage, match="HEIC is not read: convert it"):
        images.open_image(heic.read_bytes())
    for kind in {"WEBP", "AVIF"} & set(images.formats()):  # a build of Pillow may lack one
        assert images.open_image(encode(picture(1), kind)).size == (40, 30)


def test_paths_are_relative_to_the_root_and_may_be_globs(tmp_path: Path) -> None:
    write_folder(tmp_path / "part1", {"cat": 1})
    write_folder(tmp_path / "part2", {"cat": 2}, start=5)
    assert counts(folder(Path("part*")), tmp_path) == {(None, "cat"): 3}
    with pytest.raises(UserError, match="nothing matches"):
        counts(folder(Path("zzz*")), tmp_path)
    with pytest.raises(UserError, match="did you mean 'part"):
        counts(folder(Path("part")), tmp_path)


def test_classes_are_renamed_and_merged_and_splits_chosen(tmp_path: Path) -> None:
    write_folder(tmp_path, {"train/cat": 1, "train/kitten": 2, "test/cat": 1})
    assert counts(folder(tmp_path, classes={"kitten": "cat"}, splits=("train",))) == {("train", "cat"): 3}
    with pytest.raises(UserError, match="did you mean 'kitten'"):
        counts(folder(tmp_path, classes={"kiten": "cat"}))
    with pytest.raises(UserError, match="no split 'tset'"):
        counts(folder(tmp_path, splits=("tset",)))


def test_chosen_splits_still_find_their_own_pictures(tmp_path: Path) -> None:
    write_folder(tmp_path, {"test/cat": 3, "train/cat": 2})
    whole = catalogue([folder(tmp_path)], Path())
    part = catalogue([folder(tmp_path, splits=("train",))], Path())
    assert part.column("example_id") == whole.column("example_id")[3:]
    reader, index = part.readers[0], part.table["index"].to_pylist()
    for position, locator in enumerate(part.column("locator")):
        assert reader.content(index[position]) == Path(str(locator)).read_bytes()


def test_symlink_loop_ends(tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat": 2})
    (tmp_path / "cat" / "again").symlink_to(tmp_path)
    (tmp_path / "self").symlink_to(tmp_path / "self")
    assert counts(folder(tmp_path)) == {(None, "cat"): 2}


def test_name_that_is_no_utf8(tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat": 1})
    os.rename(os.fsencode(tmp_path / "cat" / "0000.jpg"), os.fsencode(tmp_path / "cat") + b"/\xff\xfe.jpg")
    found = catalogue([folder(tmp_path)], Path())
    assert found.column("locator")[0] == f"{tmp_path}/cat/\\xff\\xfe.jpg"
    assert found.readers[0].image(0).size == (40, 30)


def write_table(path: Path, text: str) -> SourceConfig:
    path.write_text(text, encoding="utf-8")
    return SourceConfig(kind="csv", path=path)


def test_tables(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.jpg").write_bytes(encode(picture(number)))
    with_commas = write_table(
        tmp_path / "a.csv", 'filepath,title,label,split\n0.jpg,"a cat, asleep",cat,train\n1.jpg,,dog,\n'
    )
    entries = list_source(with_commas, Path()).entries
    assert [(entry.label, entry.caption, entry.split) for entry in entries] == [
        ("cat", "a cat, asleep", "train"),
        ("dog", None, None),
    ]
    with_tabs = write_table(tmp_path / "b.tsv", "filepath\ttitle\n2.jpg\ta dog, awake\n")
    assert list_source(with_tabs, Path()).entries[0].caption == "a dog, awake"
    of_a_spreadsheet = write_table(tmp_path / "c.txt", "filepath;title;label\n2.jpg;a dog, awake;dog\n")
    assert [(entry.label, entry.caption) for entry in list_source(of_a_spreadsheet, Path()).entries] == [
        ("dog", "a dog, awake")
    ]
    for header, advice in {
        "filpath,label": "rename 'filpath' to 'filepath'",
        "image,class": "name the columns",
    }.items():
        with pytest.raises(UserError, match=advice):
            list_source(write_table(tmp_path / "d.txt", f"{header}\n2.jpg,dog\n"), Path())
    assert with_commas.path is not None
    first = with_commas.model_copy(update={"first": 1})
    assert [entry.label for entry in list_source(first, Path()).entries] == ["cat"]
    many = with_commas.model_copy(update={"first": 2, "path": with_commas.path.parent / "*.?sv"})
    assert [entry.label for entry in list_source(many, Path()).entries] == ["cat", "dog"]  # of all tables together
    both = catalogue([with_commas, with_tabs], Path())
    assert len(both) == 3
    assert both.readers[both.table["reader"].to_pylist()[2]].image(0).size == (40, 30)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("title,label\nx,y\n", "no column filepath"),
        ("filepath\n0.jpg\n", "no column title or label"),
        ("", "no column filepath"),
        ("filepath,title\n", "no rows"),
        ("filepath,title\n0.jpg,one,two\n", "more fields"),
    ],
)
def test_bad_tables(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        list_source(write_table(tmp_path / "a.csv", text), Path())


def test_table_that_is_no_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes("filepath,title\nä.jpg,ö\n".encode("latin-1"))
    with pytest.raises(UserError, match="UTF-8"):
        list_source(SourceConfig(kind="csv", path=tmp_path / "a.csv"), Path())


def test_missing_paths_are_counted_and_limited(tmp_path: Path) -> None:
    (tmp_path / "0.jpg").write_bytes(encode(picture(0)))
    (tmp_path / "empty.jpg").write_bytes(b"")
    source = write_table(tmp_path / "a.csv", "filepath,title\n0.jpg,x\ngone.jpg,y\nempty.jpg,z\n,w\n")
    found = catalogue([source], Path())
    assert len(found) == 1
    assert count_problems(found.problems) == {"unreadable": 2, "row without a path": 1}
    with pytest.raises(UserError, match=r"2 of 3 pictures cannot be read[\s\S]*gone.jpg"):
        catalogue([source], Path(), limit=0.5)


def test_empty_folder_and_guesses(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for found in ("an empty folder", "list.txt"):
        with pytest.raises(UserError, match="no pictures") as raised:
            list_source(folder(tmp_path / "empty"), Path())
        assert raised.value.found == found
        (tmp_path / "empty" / "list.txt").write_text("no picture")
    assert guess_source("digits").kind == "digits"
    assert guess_source(str(tmp_path)).kind == "folder"
    (tmp_path / "a.csv").write_text("filepath,title\n")
    assert guess_source(str(tmp_path / "a.csv")).kind == "csv"
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UserError, match="no source"):
        guess_source(str(tmp_path / "notes.txt"))


def test_digits_are_embedded() -> None:
    found = catalogue([SourceConfig(kind="digits")], Path())
    assert len(found) == 1797
    assert found.classes == ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    image = found.readers[0].image(0)
    assert image.mode == "RGB"
    assert image.getextrema() == ((0, 239), (0, 239), (0, 239))


def test_a_catalogue_says_the_same_in_lists_and_in_a_table(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", {"train/cat": 2, "test/dog": 1})
    lists, table = (catalogue([folder(tmp_path / "a")], Path()) for _ in range(2))
    assert table.table.schema == catalogue_schema()
    assert table.table.column_names == list(COLUMNS)
    for name in COLUMNS:
        assert lists.column(name) == table.table[name].to_pylist() == table.column(name)
    assert len(lists) == len(table) == table.table.num_rows == 3
    assert lists.pictures() == table.pictures()
    nothing = catalogue([], Path())
    assert (len(nothing), nothing.classes, nothing.readers) == (0, (), ())
    both = join([nothing, lists, table])
    assert both.table.schema == catalogue_schema()
    assert both.column("reader") == [0, 0, 0, 1, 1, 1]
    assert both.column("example_id") == lists.column("example_id") * 2


@pytest.mark.parametrize("alone", [0.0, 0.01, 60.0])
def test_work_is_done_in_order_and_by_threads_where_there_is_much(
    monkeypatch: pytest.MonkeyPatch, alone: float
) -> None:
    monkeypatch.setattr(holdfast.data.catalogue, "ALONE", alone)
    workers: set[int] = set()

    def work(item: int) -> int:
        workers.add(threading.get_ident())
        time.sleep(0.002 if item % 3 else 0.0)
        return item * item

    assert list(in_order(work, iter(range(100)), 3)) == [item * item for item in range(100)]
    assert (workers == {threading.get_ident()}) == (alone == 60.0)
    assert list(in_order(work, [], 3)) == []
