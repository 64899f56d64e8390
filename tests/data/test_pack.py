from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import encode, picture, write_folder

from holdfast.config import DataConfig, SourceConfig, TaskConfig
from holdfast.data.assemble import assemble
from holdfast.data.dedup.leaks import find_leaks, pictures_of
from holdfast.data.pack import pack
from holdfast.data.pixels import gather
from holdfast.data.sources import catalogue, guess_source
from holdfast.data.sources import store as store_module
from holdfast.data.sources.store import BLOCK, PackedPixels, open_store
from holdfast.errors import FaultError, UserError
from tests.data.retrieve.web import wait_until
from tests.processes import Forked


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_folder(
        tmp_path_factory.mktemp("scenes"), {"train/cat": 150, "train/owl": 150, "test/cat": 20, "test/owl": 20}
    )
    (root / "train" / "cat" / "wide.png").write_bytes(encode(picture(7777, 301, 77), "PNG"))
    return root


def source(path: Path, **options: object) -> SourceConfig:
    return SourceConfig.model_validate({"path": path, **options})


def test_same_pixels_byte_for_byte(scenes: Path, tmp_path: Path) -> None:
    for size, interpolation in ((24, "bicubic"), (17, "bilinear")):
        store = pack(source(scenes), tmp_path / f"s{size}", size=size, interpolation=interpolation)
        direct, packed = (catalogue([item], Path()) for item in (source(scenes), guess_source(str(store.path))))
        for name in ("example_id", "class", "caption", "split", "locator"):
            assert direct.column(name) == packed.column(name)
        rows = np.arange(len(direct))
        first, second = (gather(item, rows, size, interpolation) for item in (direct, packed))
        assert isinstance(store.pixels, PackedPixels)
        assert np.array_equal(first.pixels.read(first.rows).numpy(), second.pixels.read(second.rows).numpy())
        assert np.array_equal(store.array[second.rows], first.pixels.read(first.rows).numpy())
        store.verify()


def test_a_round_reads_the_store_and_nothing_else(scenes: Path, tmp_path: Path) -> None:
    shutil.copytree(scenes, tmp_path / "copy")
    pack(source(tmp_path / "copy"), tmp_path / "store", size=16)
    task = TaskConfig(target="owl")

    def run(source_config: SourceConfig) -> object:
        return assemble(DataConfig(source=source_config), task, size=16, interpolation="bicubic", seed=3, root=Path())

    direct = run(source(tmp_path / "copy"))
    shutil.rmtree(tmp_path / "copy")
    packed = run(source(tmp_path / "store", kind="pack"))
    assert direct.fingerprint == packed.fingerprint  # type: ignore[attr-defined]
    for name in ("constraint", "dev", "target"):
        first, second = (getattr(item.data, name) for item in (direct, packed))  # type: ignore[attr-defined]
        assert first.ids == second.ids
        assert np.array_equal(first.images().numpy(), second.images().numpy())
    packed.check_leaks()  # type: ignore[attr-defined]
    config = DataConfig(source=source(tmp_path / "store", kind="pack"))
    with pytest.raises(UserError, match="--size 32"):
        assemble(config, task, size=32, interpolation="bicubic", seed=0, root=Path())


def test_sources_are_joined_packed_and_not(scenes: Path, tmp_path: Path) -> None:
    pack(source(scenes, splits=("test",)), tmp_path / "store", size=16)
    both = catalogue([source(tmp_path / "store", kind="pack"), source(scenes, splits=("train",))], Path())
    rows = np.random.default_rng(0).permutation(len(both))[:50]
    mixed = gather(both, rows, 16, "bicubic")
    direct = catalogue([source(scenes)], Path())
    where = {identity: row for row, identity in enumerate(direct.column("example_id"))}
    expected = gather(direct, np.array([where[both.column("example_id")[row]] for row in rows]), 16, "bicubic")
    assert np.array_equal(mixed.pixels.read(mixed.rows).numpy(), expected.pixels.read(expected.rows).numpy())


def test_captions_share_a_row_and_broken_pictures_have_none(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number}.jpg").write_bytes(encode(picture(number)))
    (tmp_path / "3.jpg").write_bytes(b"broken")
    rows = [f"{number}.jpg,{text} {number}" for number in range(30) for text in ("one", "two")]
    (tmp_path / "t.csv").write_text("filepath,title\n" + "\n".join(rows))
    table = SourceConfig(kind="csv", path=tmp_path / "t.csv")
    with pytest.raises(UserError, match="1 of 30 pictures cannot be read"):
        pack(table, tmp_path / "store", size=8)
    store = pack(table, tmp_path / "store", size=8, limit=0.1)  # goes on with what is there
    assert (store.rows, len(store.index), store.header["examples"]) == (30, 58, 29)
    found = catalogue([guess_source(str(tmp_path / "store"))], Path())
    assert [str(problem) for problem in found.problems] == [
        f"unreadable: {tmp_path}/3.jpg (no picture in a known format)"
    ]


def test_broken_pictures_are_read_again_when_they_were_mended(tmp_path: Path) -> None:
    write_folder(tmp_path / "in", {"a": BLOCK + 10})
    good = (tmp_path / "in/a/0003.jpg").read_bytes()
    (tmp_path / "in/a/0003.jpg").write_bytes(b"broken")
    with pytest.raises(UserError, match="cannot be read"):
        pack(source(tmp_path / "in"), tmp_path / "store", size=8, limit=0.0)
    (tmp_path / "in/a/0003.jpg").write_bytes(good)
    store = pack(source(tmp_path / "in"), tmp_path / "store", size=8, limit=0.0)
    assert store.header["examples"] == BLOCK + 10
    store.verify()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 19), max_size=60))
def test_rows_in_any_order(tmp_path_factory: pytest.TempPathFactory, rows: list[int]) -> None:
    path = tmp_path_factory.getbasetemp() / "random.bin"
    expected = np.random.default_rng(0).integers(0, 256, (20, 3, 5, 5), dtype=np.uint8)
    path.write_bytes(expected.tobytes())
    pixels = PackedPixels(path, 20, 5)
    assert np.array_equal(pixels.read(np.array(rows, dtype=np.int64)).numpy(), expected[rows])
    with pytest.raises(IndexError):
        pixels.read(np.array([20]))


def test_buffers_are_used_again_and_never_while_they_are_held(tmp_path: Path) -> None:
    expected = np.random.default_rng(0).integers(0, 256, (64, 3, 8, 8), dtype=np.uint8)
    (tmp_path / "p.bin").write_bytes(expected.tobytes())
    pixels = PackedPixels(tmp_path / "p.bin", 64, 8)
    held = [pixels.read(np.arange(n, n + 8)) for n in range(0, 40, 8)]
    part = pixels.read(np.arange(40, 48))[2]  # a view of a batch holds the whole batch
    addresses = {item.data_ptr() for item in held}
    assert len(addresses) == 5
    for n, item in enumerate(held):
        assert np.array_equal(item.numpy(), expected[8 * n : 8 * n + 8])
    held.clear()
    gc.collect()
    again = pixels.read(np.arange(8))
    assert again.data_ptr() in addresses
    assert np.array_equal(part.numpy(), expected[42])


def test_killed_at_any_moment_and_gone_on(tmp_path: Path) -> None:
    """A real SIGKILL, several times, ends in the very bytes of a run that was never stopped."""
    write_folder(tmp_path / "in", {"a": 3 * BLOCK, "b": 100})
    whole = pack(source(tmp_path / "in"), tmp_path / "whole", size=48)
    code = (
        "import signal, sys; from pathlib import Path; from holdfast.config import SourceConfig;"
        "from holdfast.data.pack import pack;"
        f"pack(SourceConfig(path=Path({str(tmp_path / 'in')!r})), Path({str(tmp_path / 'out')!r}), size=48, workers=1,"
        "progress=lambda done, total: (print(done, flush=True), done < int(sys.argv[1]) or signal.pause()))"
    )
    for kills in range(2):
        # It stops before its last block until the signal comes, at some moment after its first.
        process = Forked("-c", code, (2 + kills) * BLOCK)
        wait_until(lambda: process.printed()[0] != "", process)  # noqa: B023
        time.sleep(0.05 + 0.03 * kills)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        with pytest.raises(UserError, match="unfinished"):
            open_store(tmp_path / "out")
    assert Forked("-c", code, sys.maxsize).wait() == 0
    for name in ("pixels.bin", "thumbs.bin", "index.arrow"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert open_store(tmp_path / "out").header["fingerprint"] == whole.header["fingerprint"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        ["index.arrow", "pixels.bin", "store.json", "thumbs.bin"]
    )


def test_half_a_journal_line_is_passed_over(tmp_path: Path) -> None:
    write_folder(tmp_path / "in", {"a": BLOCK + 5})
    pack(source(tmp_path / "in"), tmp_path / "whole", size=8)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack(source(tmp_path / "in"), tmp_path / "out", size=8, progress=stop)
    with (tmp_path / "out" / "journal.jsonl").open("a") as file:
        file.write('{"block": 1, "ids": ["x')
    pack(source(tmp_path / "in"), tmp_path / "out", size=8)
    assert (tmp_path / "out/pixels.bin").read_bytes() == (tmp_path / "whole/pixels.bin").read_bytes()


def test_stores_that_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "in", {"a": 5})
    store = pack(source(tmp_path / "in"), tmp_path / "out", size=8)
    assert pack(source(tmp_path / "in"), tmp_path / "out", size=8).header == store.header  # done: nothing to do
    with pytest.raises(UserError, match="something else"):
        pack(source(tmp_path / "in"), tmp_path / "out", size=9)
    write_folder(tmp_path / "in", {"b": 1}, start=50)
    with pytest.raises(UserError, match="something else"):
        pack(source(tmp_path / "in"), tmp_path / "out", size=8)
    with pytest.raises(UserError, match="not empty"):
        pack(source(tmp_path / "in"), tmp_path / "in", size=8)
    with pytest.raises(UserError, match="no packed store"):
        open_store(tmp_path / "in")
    with pytest.raises(UserError, match="not packed again"):
        pack(source(tmp_path / "out", kind="pack"), tmp_path / "again", size=8)
    header = json.loads((tmp_path / "out/store.json").read_text())
    (tmp_path / "out/store.json").write_text(json.dumps(header | {"version": 99}))
    with pytest.raises(UserError, match="another version"):
        open_store(tmp_path / "out")
    (tmp_path / "out/store.json").write_text(json.dumps(header))
    with (tmp_path / "out/pixels.bin").open("r+b") as file:
        file.seek(100)
        file.write(b"\x01\x02\x03")
    with pytest.raises(FaultError, match="rows 0 to 4 changed"):
        open_store(tmp_path / "out").verify()
    with (tmp_path / "out/pixels.bin").open("r+b") as file:
        file.truncate(100)
    with pytest.raises(FaultError, match="not whole"):
        open_store(tmp_path / "out")


def test_leaks_between_a_store_and_files(scenes: Path, tmp_path: Path) -> None:
    from PIL import Image

    pack(source(scenes, splits=("test",)), tmp_path / "store", size=16)
    (tmp_path / "new").mkdir()
    with Image.open(scenes / "test/cat/0004.jpg") as image:
        image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(tmp_path / "new/copy.png")
    shutil.copy(scenes / "test/owl/0002.jpg", tmp_path / "new/same.jpg")
    first = pictures_of(catalogue([source(tmp_path / "new")], Path()))
    second = pictures_of(catalogue([source(tmp_path / "store", kind="pack")], Path()))
    found = {(first.names[leak.a][-8:], second.names[leak.b][-12:], leak.kind) for leak in find_leaks(first, second)}
    assert found == {("copy.png", "cat/0004.jpg", "near"), ("same.jpg", "owl/0002.jpg", "exact")}


def test_full_disk_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "in", {"a": 5})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(UserError, match=r"No space left[\s\S]*goes on"):
            pack(source(tmp_path / "in"), tmp_path / "out", size=8)
    assert pack(source(tmp_path / "in"), tmp_path / "out", size=8).rows == 5
    assert store_module.VERSION == 1
