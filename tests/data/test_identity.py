"""A picture is a picture: whatever file it is saved in, it is one example with one role."""

import io
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from pictures import encode, picture, write_folder
from PIL import Image

from holdfast.config import DataConfig, RolesConfig, SourceConfig, TaskConfig
from holdfast.data.assemble import assemble
from holdfast.data.catalogue import count_problems
from holdfast.data.identity import PictureCache, default_cache
from holdfast.data.images import open_image, picture_id, to_rgb
from holdfast.data.inspection import copies
from holdfast.data.pack import pack
from holdfast.data.roles import assign
from holdfast.data.sources import catalogue
from holdfast.data.survey import survey
from holdfast.data.task import Role


def identity(content: bytes) -> str:
    return picture_id(to_rgb(open_image(content)))


def test_a_picture_saved_again_without_loss_is_the_same_picture() -> None:
    image = picture(1)
    first = encode(image, "PNG")
    same = [
        encode(image, "PNG", compress_level=1),
        encode(image, "BMP"),
        encode(image, "TIFF"),
        encode(image, "WEBP", lossless=True),
        encode(image.convert("RGBA"), "PNG"),  # nothing of it is transparent
    ]
    sideways = image.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter, as a camera that was held upright says
    same.append(encode(sideways, "PNG", exif=exif))
    assert {identity(content) for content in same} == {identity(first)}


def test_other_pixels_or_another_shape_are_another_picture() -> None:
    image = picture(1)
    changed = image.copy()
    changed.putpixel((3, 3), (1, 2, 3))
    wide, tall = (Image.new("RGB", size, "red") for size in ((8, 2), (2, 8)))
    others = [changed, image.crop((0, 0, 39, 30)), picture(2), wide, tall]
    found = {identity(encode(item, "PNG")) for item in (image, *others)}
    assert len(found) == 6
    assert identity(encode(image, "JPEG")) not in found  # a near copy, which the leak check finds


def saved_again(folder: Path, numbers: range, times: int) -> None:
    """``times`` files of each picture, all of different bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        for time in range(times):
            buffer = io.BytesIO()
            exif = Image.Exif()
            exif[0x010E] = f"saved for the {time}th time"
            picture(number).save(buffer, "PNG", exif=exif)
            (folder / f"{number}-{time}.png").write_bytes(buffer.getvalue())


def test_five_pictures_saved_twenty_times_are_five(tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat": 200, "owl": 200}, start=1000)
    saved_again(tmp_path / "cat", range(5), 20)
    main = catalogue([SourceConfig(path=tmp_path)], Path())
    assert len(main) == 500
    found = assign(main, ["cat", "owl"], RolesConfig(dev=0.3, sealed=0.3, test=0.0))
    assert len(found.ids) == 405
    assert len(set(found.pictures)) == 405
    assert count_problems(found.problems) == {"duplicate": 95}
    assert count_problems(copies(main)) == {"duplicate": 95}
    # Each is in one role, and in whatever order the files are read in the same one.
    names = {f"cat/{number}-{time}.png" for number in range(5) for time in range(20)}
    planted = found.table(main).to_pylist()
    planted = [row for row in planted if any(row["locator"].endswith(name) for name in names)]
    assert len(planted) == 5
    backwards = main.table.take(np.arange(len(main))[::-1])
    again = assign(type(main)(backwards, main.readers), ["cat", "owl"], RolesConfig(dev=0.3, sealed=0.3, test=0.0))
    assert dict(zip(again.ids, again.roles, strict=True)) == dict(zip(found.ids, found.roles, strict=True))


def test_roles_of_files_without_copies_are_those_of_earlier_versions(tmp_path: Path) -> None:
    """Shared out by the hash of the file, as ever: rounds that were begun keep their roles."""
    write_folder(tmp_path, {"cat": 40, "owl": 40})
    main = catalogue([SourceConfig(path=tmp_path)], Path())
    before = assign(main, ["cat", "owl"], RolesConfig())
    saved_again(tmp_path / "cat", range(500, 503), 4)
    after = assign(catalogue([SourceConfig(path=tmp_path)], Path()), ["cat", "owl"], RolesConfig())
    later = dict(zip(after.ids, after.roles, strict=True))
    assert all(later[identity] == role for identity, role in zip(before.ids, before.roles, strict=True))


def test_copies_in_two_splits_and_two_classes(tmp_path: Path) -> None:
    write_folder(tmp_path, {"train/cat": 10, "train/owl": 10, "test/cat": 3, "test/owl": 3})
    with Image.open(tmp_path / "test/cat/0000.jpg") as image:
        image.convert("RGB").save(tmp_path / "train/cat/copy.png")
    with Image.open(tmp_path / "train/cat/0001.jpg") as image:
        image.convert("RGB").save(tmp_path / "train/owl/copy.png")
    main = catalogue([SourceConfig(path=tmp_path)], Path())
    found = assign(main, ["cat", "owl"], RolesConfig())
    assert count_problems(found.problems) == {"copy in another split": 1, "contradicting labels": 1}
    assert sum(role is Role.TEST for role in found.roles) == 6


def test_a_pair_that_shows_a_held_out_picture_is_not_trained_on(tmp_path: Path) -> None:
    write_folder(tmp_path / "in", {"cat": 60, "owl": 60})
    config = DataConfig.model_validate({"source": {"path": tmp_path / "in"}})
    task = TaskConfig(target="owl")
    sealed = survey(config, task, root=Path())
    rows = [sealed.assigned.rows[p] for p in sealed.assigned.where(Role.SEALED, label="owl")][:4]
    (tmp_path / "pairs").mkdir()
    for number, row in enumerate(rows):
        with Image.open(sealed.main.column("locator")[row] or "") as image:
            image.convert("RGB").save(tmp_path / "pairs" / f"{number}.png")
    with_pairs = DataConfig.model_validate({**config.model_dump(), "pairs": [{"path": tmp_path / "pairs"}]})
    made = assemble(with_pairs, task, size=16, interpolation="bicubic", seed=0, root=Path())
    assert count_problems(made.problems)["leak"] == 4


def test_a_store_knows_its_pictures(tmp_path: Path) -> None:
    write_folder(tmp_path / "in", {"cat": 4})
    saved_again(tmp_path / "in" / "cat", range(70, 72), 3)
    pack(SourceConfig(path=tmp_path / "in"), tmp_path / "store", size=16)
    plain = catalogue([SourceConfig(path=tmp_path / "in")], Path())
    stored = catalogue([SourceConfig(kind="pack", path=tmp_path / "store")], Path())
    assert Counter(stored.pictures()) == Counter(plain.pictures())
    assert len(set(stored.pictures())) == 6


def test_the_cache_spares_decoding_and_is_no_more_than_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PictureCache(tmp_path / "pictures.sqlite3")
    assert cache.picture("file", lambda: picture(1)) == picture_id(picture(1))
    cache.close()

    def never() -> Image.Image:
        raise AssertionError("it was decoded again")

    again = PictureCache(tmp_path / "pictures.sqlite3")
    assert again.picture("file", never) == picture_id(picture(1))
    again.close()
    (tmp_path / "pictures.sqlite3").write_bytes(b"no database" * 1000)
    broken = PictureCache(tmp_path / "pictures.sqlite3")
    assert broken.picture("file", lambda: picture(1)) == picture_id(picture(1))
    broken.close()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "file"))
    assert default_cache().parent == tmp_path / "file"
    nowhere = PictureCache()
    assert nowhere.picture("file", lambda: picture(1)) == picture_id(picture(1))
    nowhere.close()


@pytest.mark.parametrize("expected", [0, 1, 1000])
def test_pictures_are_found_one_by_one_and_all_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: int
) -> None:
    monkeypatch.setattr("holdfast.data.identity._FLUSH", 2)
    for begin in (0, 2):  # the second time two are known, two are new and written while it is open
        cache = PictureCache(tmp_path / "pictures.sqlite3", expected=expected)
        decoded: list[int] = []

        def decode(number: int, decoded: list[int] = decoded) -> Image.Image:
            decoded.append(number)
            return picture(number)

        for number in (*range(begin, begin + 4), *range(begin, begin + 4)):
            assert cache.picture(f"file {number}", partial(decode, number)) == picture_id(picture(number))
        cache.close()
        assert decoded == list(range(4) if begin == 0 else range(4, 6))


def test_near_copies_of_sealed_pictures_are_counted_once(tmp_path: Path) -> None:
    """Encoded again: a near copy of a dev picture, or of another sealed one, leaves the sealed set, with a note."""
    write_folder(tmp_path, {"cat": 100, "owl": 100})
    config = DataConfig.model_validate({"source": {"path": tmp_path}})
    task = TaskConfig(target="owl")
    before = assemble(config, task, size=16, interpolation="bicubic", seed=0, root=Path())
    rows = {role: [row for row in before.roles.to_pylist() if row["role"] == role] for role in ("dev", "sealed")}
    for role, found in rows.items():
        for row in found[:15]:
            with Image.open(row["locator"]) as image:
                name = f"again-{role}-{Path(row['locator']).stem}.jpg"
                image.save(tmp_path / row["class"] / name, quality=50)
    surveyed = survey(config, task, root=Path())
    assert len(surveyed.sealed) > len(rows["sealed"])  # copies that were drawn as sealed
    drop = config.model_copy(update={"leaks": "drop"})
    after = assemble(drop, task, size=16, interpolation="bicubic", seed=0, root=Path())
    counted = count_problems(after.problems)
    assert counted["sealed near copy of a dev picture"] > 0
    assert counted["sealed near copy of a sealed picture"] > 0
    assert not any("again-dev" in row["locator"] for row in after.roles.to_pylist() if row["role"] == "sealed")
    assert len(after.data.sealed_ids) == len(surveyed.sealed) - sum(
        count for name, count in counted.items() if name.startswith("sealed near copy")
    )
    shown = [row["locator"] for row in after.roles.to_pylist() if row["role"] == "sealed"]
    originals = [Path(name).stem.removeprefix("again-sealed-") + Path(name).parent.name for name in shown]
    assert len(originals) == len(set(originals))
    allowed = config.model_copy(update={"leaks": "allow"})
    assert len(assemble(allowed, task, size=16, interpolation="bicubic", seed=0, root=Path()).data.sealed_ids) == len(
        surveyed.sealed
    )
