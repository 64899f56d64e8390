from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import NO_SHARED, SHARED, encode, picture, write_folder
from PIL import Image

from holdfast.config import DataConfig, SourceConfig, TaskConfig
from holdfast.data.assemble import assemble
from holdfast.data.catalogue import count_problems
from holdfast.data.dedup.hamming import HammingIndex
from holdfast.data.dedup.leaks import Pictures, find_leaks, near_duplicates, pictures_of, refuse_leaks, similar_features
from holdfast.data.dedup.signatures import make_signatures, perceptual_hashes, thumbnail, variant_hashes
from holdfast.data.sources import catalogue
from holdfast.errors import FaultError

MIRROR = Image.Transpose.FLIP_LEFT_RIGHT


def again(image: Image.Image, quality: int = 60) -> Image.Image:
    return Image.open(io.BytesIO(encode(image, quality=quality))).convert("RGB")


def cut(image: Image.Image, left: float, top: float, right: float, bottom: float) -> Image.Image:
    width, height = image.size
    box = (round(width * left), round(height * top), round(width * (1 - right)), round(height * (1 - bottom)))
    return image.crop(box)


CHANGES = {
    "encoded again": lambda image: again(image, 40),
    "mirrored": lambda image: image.transpose(MIRROR),
    "5 % off every side": lambda image: again(cut(image, 0.05, 0.05, 0.05, 0.05), 80),
    "5 % off one side": lambda image: again(cut(image, 0, 0, 0.05, 0), 80),
    "corner": lambda image: again(cut(image, 0.05, 0, 0, 0.05), 80),
    "mirrored and cut": lambda image: again(cut(image, 0.05, 0.02, 0.03, 0.05).transpose(MIRROR), 70),
    "smaller": lambda image: image.resize((image.width * 2 // 3, image.height * 2 // 3)),
    "as PNG": lambda image: image,
}


def signed(images: list[Image.Image]) -> object:
    return make_signatures(np.stack([thumbnail(image) for image in images]))


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 400), st.integers(0, 2**32))
def test_near_codes_are_those_of_comparing_all(count: int, seed: int) -> None:
    """What is reported is right, whatever the codes; and copies with no or few bits changed are all there."""
    generator = np.random.default_rng(seed)
    codes = generator.integers(0, 2**63, count, dtype=np.uint64)
    flips = (np.uint64(1) << generator.integers(0, 63, (count, 2)).astype(np.uint64)).astype(np.uint64)
    queries = np.stack(
        [codes ^ flips[:, 0] ^ flips[:, 1], generator.integers(0, 2**63, count, dtype=np.uint64)], axis=1
    )
    found = HammingIndex(codes).near(queries, 8)
    distances = np.bitwise_count(queries[:, :, None] ^ codes[None, None]).min(axis=1)
    pairs = set(zip(found.query.tolist(), found.index.tolist(), strict=True))
    assert len(pairs) == len(found.query)
    assert all(distances[i, j] == d <= 8 for i, j, d in zip(found.query, found.index, found.distance, strict=True))
    assert {(i, i) for i in range(count)} <= pairs


def test_full_buckets_are_passed_over_and_counted() -> None:
    codes = np.zeros(3000, dtype=np.uint64)
    found = HammingIndex(codes, tables=1).near(codes[:2, None], 8)
    assert found.passed_over == 2 * (3000 - 512)


def test_variants_are_the_hashes_of_cut_and_mirrored_pictures() -> None:
    image = picture(3, 640, 640)
    versions = variant_hashes(thumbnail(image)[None])[0]
    for changed in (image, image.transpose(MIRROR), cut(image, 0.05, 0.05, 0.05, 0.05), cut(image, 0, 0, 0.05, 0)):
        assert np.bitwise_count(versions ^ perceptual_hashes([changed])[0]).min() <= 3
    assert np.bitwise_count(versions ^ perceptual_hashes([picture(4, 640, 640)])[0]).min() > 12


@pytest.mark.parametrize("change", CHANGES)
def test_planted_near_copies_are_found_and_nothing_else(change: str) -> None:
    originals = [picture(number, 160, 120) for number in range(120)]
    others = [picture(number, 160, 120) for number in range(1000, 1100)]
    copies = [CHANGES[change](originals[number]) for number in range(0, 120, 10)]
    planted = {(number * 10, 100 + number) for number in range(len(copies))}
    first, second = signed(originals), signed([*others, *copies])
    assert {(item.a, item.b) for item in near_duplicates(first, second)} == planted  # type: ignore[arg-type]
    backwards = near_duplicates(second, first)  # type: ignore[arg-type]
    assert {(item.b, item.a) for item in backwards} == planted
    mirrored = "mirrored" in change
    assert all(item.mirrored == mirrored for item in backwards)


def test_within_one_set_each_pair_once() -> None:
    images = [picture(number, 160, 120) for number in range(50)]
    images.append(again(images[7]))
    found = near_duplicates(signed(images))  # type: ignore[arg-type]
    assert [(item.a, item.b) for item in found] == [(7, 50)]


def test_same_hash_is_not_enough() -> None:
    """Pictures whose low frequencies agree in sign and not in size have one hash and do not look alike."""
    generator = np.random.default_rng(0)
    place, frequency = np.arange(32)[:, None], np.arange(8)[None]
    waves = np.cos(np.pi * frequency * (place + 0.5) / 32)
    signs = generator.choice([-1.0, 1.0], (8, 8))
    thumbs = []
    for _ in range(2):
        picture_of_waves = waves @ (signs * generator.exponential(1.0, (8, 8))) @ waves.T
        low, high = picture_of_waves.min(), picture_of_waves.max()
        thumbs.append(((picture_of_waves - low) / (high - low) * 255).round().astype(np.uint8))
    signatures = make_signatures(np.stack(thumbs))
    assert np.bitwise_count(signatures.hashes[0] ^ signatures.hashes[1]) <= 4
    assert near_duplicates(signatures) == []
    assert len(near_duplicates(signatures, least_correlation=0.0)) == 1


def test_flat_and_tiny_pictures_are_not_near_copies() -> None:
    flat = [Image.new("RGB", (64, 64), (shade, shade, shade)) for shade in (10, 100, 101)]
    assert near_duplicates(signed(flat)) == []  # type: ignore[arg-type]
    digits = pictures_of(catalogue([SourceConfig(kind="digits")], Path()))
    assert find_leaks(digits) == []


def make(images: list[Image.Image], name: str) -> Pictures:
    contents = [encode(image, "PNG") for image in images]
    ids = tuple(hashlib.sha256(item).hexdigest() for item in contents)
    return Pictures(ids, tuple(f"{name}/{n}" for n in range(len(images))), signed(images))  # type: ignore[arg-type]


def test_develop_is_refused_with_names() -> None:
    training = make([picture(n, 100, 80) for n in range(20)], "train")
    refuse_leaks(training, make([picture(n, 100, 80) for n in range(30, 40)], "sealed"))
    sealed = make([picture(50, 100, 80), picture(3, 100, 80), again(picture(4, 100, 80))], "sealed")
    with pytest.raises(
        FaultError, match=r"2 pairs[\s\S]*train/3 = sealed/1 \(the same picture\)[\s\S]*train/4 = sealed/2"
    ):
        refuse_leaks(training, sealed)


def test_features_find_what_thumbnails_cannot() -> None:
    generator = np.random.default_rng(0)
    values = generator.standard_normal((500, 64)).astype(np.float32)
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    other = values[::50] + 0.01 * generator.standard_normal((10, 64)).astype(np.float32)
    other /= np.linalg.norm(other, axis=1, keepdims=True)
    assert [(item.a, item.b) for item in similar_features(values, other)] == [(50 * n, n) for n in range(10)]


def test_handed_in_features_are_used(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": 4})
    found = catalogue([SourceConfig(path=tmp_path)], Path())
    same = pictures_of(found, features=lambda images: np.ones((len(images), 3)))
    assert {item.kind for item in find_leaks(same)} == {"features"}


def test_roles_of_a_round_with_near_copies(tmp_path: Path) -> None:
    for name, start in (("cat", 0), ("owl", 500)):
        write_folder(tmp_path, {name: 60}, start=start)
    config = DataConfig.model_validate({"source": {"path": tmp_path}})
    task = TaskConfig(target="owl")
    clean = assemble(config, task, size=16, interpolation="bicubic", seed=0, root=Path())
    clean.check_leaks()
    sealed = [row for row in clean.roles.to_pylist() if row["role"] == "sealed" and row["class"] == "cat"][:6]
    for number, row in enumerate(sealed):
        with Image.open(row["locator"]) as image:
            image.convert("RGB").save(tmp_path / "cat" / f"again{number}.jpg", quality=60)
    leaky = assemble(config, task, size=16, interpolation="bicubic", seed=0, root=Path())
    planted = {
        row["example_id"] for row in leaky.roles.to_pylist() if row["role"] == "train" and "again" in row["locator"]
    }
    assert planted
    with pytest.raises(FaultError, match="again"):
        leaky.check_leaks()
    dropping = assemble(
        config.model_copy(update={"leaks": "drop"}), task, size=16, interpolation="bicubic", seed=0, root=Path()
    )
    dropping.check_leaks()
    assert not planted & set(dropping.data.constraint.ids) | planted & set(dropping.data.negatives.ids)
    assert count_problems(dropping.problems)["near copy"] >= len(planted)
    assert set(dropping.data.open_sealed().ids) == set(leaky.data.open_sealed().ids)


@pytest.mark.shared_data
@pytest.mark.skipif(not (SHARED / "intel-scene-64.zip").exists(), reason=NO_SHARED)
def test_planted_copies_among_real_photographs(tmp_path: Path) -> None:
    """Photographs of the published test split, changed and put among the training ones: 95 % at least are found."""
    generator = np.random.default_rng(0)
    with zipfile.ZipFile(SHARED / "intel-scene-64.zip") as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".jpg"))
        train = [name for name in names if name.startswith("train/")][::14]
        test = [name for name in names if name.startswith("test/")][::10]
        images = {name: Image.open(io.BytesIO(archive.read(name))).convert("RGB") for name in (*train, *test)}
    planted = {}
    changed: list[Image.Image] = []
    changes = list(CHANGES.values())
    for number, position in enumerate(generator.choice(len(test), 200, replace=False)):
        planted[number] = int(position)
        changed.append(changes[number % len(changes)](images[test[position]]))
    first = signed([*changed, *(images[name] for name in train)])
    second = signed([images[name] for name in test])
    found = {(item.a, item.b) for item in near_duplicates(first, second)}  # type: ignore[arg-type]
    hits = sum((number, position) in found for number, position in planted.items())
    assert hits >= 0.95 * len(planted)
    assert len(found) - hits <= 10  # the published split has near copies of its own
