"""BDD100K and Places365: official files, real label file and category list, small folders of the same layout."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from pictures import NO_SHARED, SHARED, encode, picture, write_folder

from holdfast.config import SourceConfig
from holdfast.data.catalogue import count_problems
from holdfast.data.prompts import article, fill, words_of
from holdfast.data.sources import catalogue, guess_source, list_source
from holdfast.data.sources.bdd100k import count_labels, read_labels, split_labels
from holdfast.data.sources.places365 import read_categories
from holdfast.errors import UserError

# Official training totals (method section 8: train + val there), the rest of the 69,863 images undefined.
TRAIN_WEATHER = {"clear": 37344, "snowy": 5549, "rainy": 5070, "partly cloudy": 4881, "overcast": 8770, "foggy": 130}
VAL_WEATHER = {"clear": 5346, "snowy": 769, "rainy": 738, "partly cloudy": 738, "overcast": 1239, "foggy": 13}
TRAIN_TUNNELS, VAL_TUNNELS = 129, 27


def label_file(path: Path, counts: dict[str, int], total: int, tunnels: int) -> Path:
    values = [name for name, count in counts.items() for _ in range(count)]
    values += ["undefined"] * (total - len(values))
    random.Random(0).shuffle(values)
    frames = [
        {
            "name": f"{path.stem}-{number:05d}.jpg",
            "attributes": {
                "weather": value,
                "scene": "tunnel" if number < tunnels else "highway",
                "timeofday": "night",
            },
        }
        for number, value in enumerate(values)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(frames))
    return path


@pytest.mark.shared_data
@pytest.mark.skipif(not (SHARED / "bdd100k-val-attributes.json").exists(), reason=NO_SHARED)
def test_counts_of_the_real_label_file() -> None:
    path = SHARED / "bdd100k-val-attributes.json"
    assert count_labels(path, "weather") == VAL_WEATHER | {"undefined": 1157}
    assert count_labels(path, "scene") == {
        "city street": 6112,
        "highway": 2499,
        "residential": 1253,
        "undefined": 53,
        "parking lot": 49,
        "tunnel": 27,
        "gas stations": 7,
    }
    assert sum(count_labels(path, "timeofday").values()) == 10_000


def test_official_sizes_and_the_pooled_split(tmp_path: Path) -> None:
    train = label_file(tmp_path / "det_train.json", TRAIN_WEATHER, 69_863, TRAIN_TUNNELS)
    val = label_file(tmp_path / "det_val.json", VAL_WEATHER, 10_000, VAL_TUNNELS)
    labels = read_labels(train, "weather", "train") + read_labels(val, "weather", "val")
    plain = Counter((label.value, split) for label, split in split_labels(labels, ()))
    for name, count in TRAIN_WEATHER.items():
        assert plain[name, "train"] == count
        assert plain[name, "test"] == VAL_WEATHER[name]
    pooled = Counter((label.value, split) for label, split in split_labels(labels, ("foggy",)))
    assert [pooled["foggy", split] for split in ("train", "dev", "test")] == [57, 43, 43]
    assert pooled["clear", "train"] == 37344
    scenes = read_labels(train, "scene", "train") + read_labels(val, "scene", "val")
    tunnels = Counter(split for label, split in split_labels(scenes, ("tunnel",)) if label.value == "tunnel")
    assert [tunnels[split] for split in ("train", "dev", "test")] == [62, 47, 47]
    # The order of the label file does not matter.
    assert dict(split_labels(labels, ("foggy",))) == dict(split_labels(labels[::-1], ("foggy",)))


def bdd_folder(root: Path) -> Path:
    number = 0
    for official, count in (("train", 12), ("val", 6)):
        folder = root / "images" / "100k" / official
        folder.mkdir(parents=True)
        frames: list[dict[str, object]] = []
        for position in range(count):
            name = f"{official}{position:02d}.jpg"
            (folder / name).write_bytes(encode(picture(number)))
            weather = ("clear", "foggy", "undefined")[position % 3]
            frames.append({"name": name, "attributes": {"weather": weather}, "labels": [{"box2d": {}}]})
            number += 1
        frames.append({"name": f"{official}gone.jpg", "attributes": {"weather": "clear"}})
        frames.append({"name": f"{official}00.jpg", "attributes": {"weather": "foggy"}})
        frames.append({"name": f"{official}bare.jpg"})
        (folder / "unlabelled.jpg").write_bytes(encode(picture(1000 + number)))
        labels = root / "labels" / f"bdd100k_labels_images_{official}.json"
        labels.parent.mkdir(exist_ok=True)
        labels.write_text(json.dumps(frames))
    return root


def test_bdd100k_folder(tmp_path: Path) -> None:
    root = bdd_folder(tmp_path)
    assert guess_source(str(root)).kind == "bdd100k"
    listing = list_source(SourceConfig(kind="bdd100k", path=root), Path())
    counts = Counter((entry.label, entry.split) for entry in listing.entries)
    assert counts == {("clear", "train"): 4, ("foggy", "train"): 4, ("clear", "test"): 2, ("foggy", "test"): 2}
    assert count_problems(listing.problems) == {
        "no weather": 6 + 2,
        "label without image": 2,
        "labelled twice": 2,
        "image without label": 2,
    }
    pooled = list_source(SourceConfig(kind="bdd100k", path=root, pooled=("foggy",)), Path())
    splits = Counter(entry.split for entry in pooled.entries if entry.label == "foggy")
    assert splits == {"train": 2, "dev": 2, "test": 2}
    found = catalogue([SourceConfig(kind="bdd100k", path=root)], Path())
    for row in found.table.to_pylist():
        assert found.readers[0].content(row["index"]) == Path(row["locator"]).read_bytes()


def test_bad_bdd100k(tmp_path: Path) -> None:
    root = bdd_folder(tmp_path / "a")
    with pytest.raises(UserError, match="no attribute 'scene'"):
        list_source(SourceConfig(kind="bdd100k", path=root, attribute="scene"), Path())
    with pytest.raises(UserError, match="did you mean 'foggy'"):
        list_source(SourceConfig(kind="bdd100k", path=root, pooled=("fogy",)), Path())
    (tmp_path / "b").mkdir()
    with pytest.raises(UserError, match="no BDD100K label files"):
        list_source(SourceConfig(kind="bdd100k", path=tmp_path / "b"), Path())
    label_file(tmp_path / "c" / "labels" / "det_val.json", {"clear": 3}, 3, 0)
    with pytest.raises(UserError, match="none of the 3 labels has its image"):
        list_source(SourceConfig(kind="bdd100k", path=tmp_path / "c"), Path())
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "det_val.json").write_text('[{"id": 3}]')
    with pytest.raises(UserError, match="not a BDD100K label file"):
        list_source(SourceConfig(kind="bdd100k", path=tmp_path / "d"), Path())


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("airfield", "the scene is an airfield"),
        ("hotel/outdoor", "the scene is an outdoor hotel"),
        ("dressing_room", "the scene is a dressing room"),
        ("utility_room", "the scene is a utility room"),
        ("canal/urban", "the scene is an urban canal"),
        ("office_cubicles", "the scene is office cubicles"),
        ("mountain_snowy", "the scene is a snowy mountain"),
        ("childs_room", "the scene is a child's room"),
        ("stadium/baseball", "the scene is a baseball stadium"),
        ("underwater/ocean_deep", "the scene is a deep ocean"),
    ],
)
def test_readable_prompts(name: str, prompt: str) -> None:
    for template in ("the scene is a(n) {}", "the scene is a {}", "the scene is an {}"):
        assert fill(template, words_of(name)) == prompt


def test_articles_follow_the_sound() -> None:
    with_an = "hour", "honest man", "umbrella", "unimportant thing", "unidentified object", "apple", "urban canal"
    with_a = "university", "unicorn", "one-way street", "European city", "user", "utopia", "house", "yacht"
    assert {article(item) for item in with_an} == {"an "}
    assert {article(item) for item in with_a} == {"a "}
    assert fill("A {} at night", "owl") == "An owl at night"
    assert fill("data {}", "owl") == "data owl"


@pytest.mark.shared_data
@pytest.mark.skipif(not (SHARED / "categories_places365.txt").exists(), reason=NO_SHARED)
def test_official_category_list() -> None:
    names = read_categories(SHARED / "categories_places365.txt")
    assert len(set(names)) == 365
    assert (names[0], names[8]) == ("airfield", "apartment_building/outdoor")
    prompts = [fill("the scene is a(n) {}", words_of(name)) for name in names]
    assert len(set(prompts)) == 365
    assert not any(character in prompt for prompt in prompts for character in "_/()")
    for prompt in prompts:  # no word of this list that begins with a vowel is spoken with a consonant but `utility`
        words = prompt.removeprefix("the scene is ").split()
        if words[0] in ("a", "an"):
            assert (words[0] == "an") == (words[1][0].lower() in "aeiou" and words[1] != "utility"), prompt


def test_places365_layouts(tmp_path: Path) -> None:
    (tmp_path / "categories_places365.txt").write_text("/a/airfield 0\n/h/hotel/outdoor 1\n/z/zen_garden 2\n")
    write_folder(tmp_path, {"train/airfield": 30, "train/hotel-outdoor": 30, "data_256/h/hotel/outdoor": 3, "junk": 1})
    (tmp_path / "val_256").mkdir()
    for number in range(4):
        (tmp_path / "val_256" / f"Places365_val_{number:08d}.jpg").write_bytes(encode(picture(500 + number)))
    lines = "".join(f"Places365_val_{number:08d}.jpg {number % 2}\n" for number in range(4))
    (tmp_path / "places365_val.txt").write_text(lines)
    assert guess_source(str(tmp_path)).kind == "places365"
    found = catalogue([SourceConfig(kind="places365", path=tmp_path)], Path())
    assert Counter(found.column("class")) == {"airfield": 32, "hotel/outdoor": 35}
    assert count_problems(found.problems) == {"picture outside the categories": 1, "category without pictures": 1}
    splits = Counter(found.column("split"))
    assert splits.keys() == {"train", "dev", "test"}
    assert 30 <= splits["train"] <= 50
    (tmp_path / "places365_val.txt").write_text("Places365_val_00000000.jpg 7\n")
    with pytest.raises(UserError, match="has the category 7"):
        list_source(SourceConfig(kind="places365", path=tmp_path), Path())


@pytest.mark.parametrize("text", ["/a/airfield\n", "/a/airfield 0\n/b/bar 0\n", "/a/airfield 1\n", "/a/airfield x\n"])
def test_bad_category_lists(tmp_path: Path, text: str) -> None:
    (tmp_path / "categories_places365.txt").write_text(text)
    with pytest.raises(UserError, match="categor"):
        read_categories(tmp_path / "categories_places365.txt")
