from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from holdfast.cli.retrieve import protected_pictures
from holdfast.data.retrieve.clean import clean
from holdfast.data.retrieve.download import FetchLimits
from holdfast.data.retrieve.img2dataset import adopt
from holdfast.data.retrieve.judge import judge_none
from holdfast.data.retrieve.search import SearchQuery, search
from holdfast.data.retrieve.words import Words
from holdfast.data.sources import catalogue, guess_source
from holdfast.errors import UserError


def photo(seed: int, side: int = 120) -> Image.Image:
    """Smooth and rich enough to be compared, and unlike any other seed's."""
    coarse = np.random.default_rng(seed).integers(0, 256, (9, 9, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, form: str = "PNG", **given: object) -> bytes:
    sink = io.BytesIO()
    image.save(sink, form, **given)
    return sink.getvalue()


@pytest.fixture
def fetched(write_captions, tmp_path: Path):
    """A folder whose fetch step holds these pictures: names with "fog" are targets, others negatives."""

    def make(pictures: dict[str, bytes], name: str = "out") -> Path:
        rows = [(f"http://pictures.test/{title}", f"a caption, {title}") for title in pictures]
        out = tmp_path / name
        search(str(write_captions(rows, f"{name}.parquet")), SearchQuery(Words("fog")), out, threads=1)
        judge_none(out)
        theirs = tmp_path / f"{name}-pictures" / "00000"
        theirs.mkdir(parents=True)
        for number, (title, content) in enumerate(pictures.items()):
            (theirs / f"{number:09d}.json").write_text(json.dumps({"url": f"http://pictures.test/{title}"}))
            (theirs / f"{number:09d}.jpg").write_bytes(content)
        adopt(theirs.parent, out, FetchLimits())
        return out

    return make


def titles(path: Path) -> list[str]:
    with path.open(newline="") as file:
        return [row["title"].removeprefix("a caption, ") for row in csv.DictReader(file)]


def test_near_copies_of_protected_pictures_and_of_each_other_go(fetched, tmp_path: Path) -> None:
    protected = tmp_path / "protected" / "clear"
    protected.mkdir(parents=True)
    photo(1, 300).save(protected / "one.png")
    photo(2, 300).save(protected / "two.jpg", quality=85)
    out = fetched(
        {
            "fog 1": encoded(photo(1, 100), "JPEG", quality=60),  # smaller and encoded again
            "fog 2": encoded(photo(2).transpose(Image.Transpose.FLIP_LEFT_RIGHT)),
            "fog 3": encoded(photo(3)),
            "fog 4": encoded(photo(4)),
            "fog 5": encoded(photo(3, 200), "JPEG"),  # fog 3 again
            "sun 4": encoded(photo(4)),  # the same picture as a target, under another caption
            "sun 6": encoded(photo(6)),
        }
    )
    section = clean(out, [protected_pictures(str(protected.parent))])
    counts = section["counts"]
    assert titles(out / "clean" / "target.csv") == ["fog 3", "fog 4"]
    assert titles(out / "clean" / "negatives.csv") == ["sun 6"]
    assert counts["removed_because"] == {"near another fetched": 2, "near protected": 2}
    assert (counts["target"], counts["negatives"], counts["removed"], counts["compared_with"]) == (2, 1, 4, 2)
    with (out / "clean" / "removed.csv").open(newline="") as file:
        removed = {row["url"].rsplit("/", 1)[1]: row["match"] for row in csv.DictReader(file)}
    assert removed.keys() == {"fog 1", "fog 2", "fog 5", "sun 4"}
    assert removed["fog 1"].endswith("one.png")


def test_what_is_left_can_be_read_as_a_source(fetched) -> None:
    out = fetched({"fog 1": encoded(photo(1)), "fog, 2": encoded(photo(2)), "sun 3": encoded(photo(3))})
    clean(out, [])
    pairs = catalogue([guess_source(str(out / "clean" / "target.csv"))], Path())
    assert pairs.column("caption") == ["a caption, fog 1", "a caption, fog, 2"]
    assert not pairs.problems
    assert (out / "clean" / "target-00000.tar").exists()
    assert (out / "clean" / "negatives-00000.tar").exists()


def test_negatives_follow_the_targets_that_are_left(fetched, tmp_path: Path) -> None:
    pictures = {f"fog {i}": encoded(photo(i)) for i in range(2)} | {f"sun {i}": encoded(photo(i)) for i in range(2, 22)}
    out = fetched(pictures)
    protected = tmp_path / "mine" / "a"
    protected.mkdir(parents=True)
    photo(0, 200).save(protected / "x.png")
    counts = clean(out, [protected_pictures(str(protected.parent))])["counts"]
    assert (counts["target"], counts["negatives"]) == (1, 10)
    assert counts["removed_because"]["more negatives than needed"] == 10


def test_the_same_inputs_give_the_same_manifest_and_files(fetched) -> None:
    pictures = {f"fog {i}": encoded(photo(i)) for i in range(3)} | {f"sun {i}": encoded(photo(i)) for i in range(3, 9)}
    a, b = fetched(pictures, "a"), fetched(pictures, "b")
    first = clean(a, [])
    clean(b, [])
    assert json.loads((a / "manifest.json").read_text())["steps"].keys() == {"search", "judge", "fetch", "clean"}
    shards = [(item / "clean" / "target-00000.tar").read_bytes() for item in (a, b)]
    assert shards[0] == shards[1]
    before = (a / "manifest.json").read_bytes()
    assert clean(a, []) == first
    assert (a / "manifest.json").read_bytes() == before


def test_pictures_too_small_to_compare_are_compared_byte_for_byte(fetched, tmp_path: Path) -> None:
    icon = encoded(photo(1, 20))
    protected = tmp_path / "mine" / "a"
    protected.mkdir(parents=True)
    (protected / "icon.png").write_bytes(icon)
    out = fetched({"fog 1": icon, "fog 2": encoded(photo(2))})
    assert clean(out, [protected_pictures(str(protected.parent))])["counts"]["target"] == 1


def test_a_later_step_falls_when_an_earlier_one_changes(fetched, tmp_path: Path) -> None:
    out = fetched({"fog 1": encoded(photo(1)), "sun 2": encoded(photo(2))})
    clean(out, [])
    search(str(tmp_path / "out.parquet"), SearchQuery(Words("sun")), out, threads=1)
    assert json.loads((out / "manifest.json").read_text())["steps"].keys() == {"search"}
    with pytest.raises(UserError, match="no finished fetch step"):
        clean(out, [])
