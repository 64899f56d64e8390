"""The test bed on a tiny scale: split, pretraining, a study, its frontier."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import bed, clip, frontier
from holdfast.compare.grid import plan, read_study, ready_studies
from holdfast.compare.pool import run_here
from holdfast.compare.records import JobFolder, read_frontier
from holdfast.compare.study import run_study
from holdfast.data.seen import Use
from holdfast.model.folder import images_seen, load_model

COLOURS = dict(
    zip(bed.SCENES, ((200, 60, 60), (60, 200, 60), (60, 60, 220), (210, 210, 60), (60, 210, 210), (210, 60, 210)),
        strict=True)
)  # fmt: skip
SMALL = {
    "scenes": replace(bed.PARTS["scenes"], counts={"base": 4, "dev": 6}),
    "captions": bed.PARTS["captions"],
}
TINY = clip.Options(
    size=32, width=64, layers=2, text_width=64, text_layers=1, batch=64, steps=100, learning_rate=2e-3, mixed=0.0,
    patch_dropout=0.1, rare=0,
)  # fmt: skip


def picture(colour: tuple[int, int, int], number: int) -> bytes:
    random = np.random.default_rng([*colour, number])
    coarse = random.integers(-50, 50, size=(8, 8, 1)).repeat(4, axis=0).repeat(4, axis=1)
    pixels = np.clip(np.array(colour) + coarse, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def archives(folder: Path) -> Path:
    """Eighteen training and six test pictures a kind of scene, six captioned ones; three are copies of others."""
    with zipfile.ZipFile(folder / "intel-scene-64.zip", "w") as archive:
        for name, colour in COLOURS.items():
            for number in range(24):
                where = "train" if number < 18 else "test"
                archive.writestr(f"{where}/{name}/{number}.jpg", picture(colour, number))
        archive.writestr("train/sea/copy.jpg", picture(COLOURS["sea"], 20))  # of a test picture
        archive.writestr("train/street/other.jpg", picture(COLOURS["glacier"], 0))  # under another label
    with zipfile.ZipFile(folder / "flickr8k-96.zip", "w") as archive:
        lines = ["filepath,title"]
        for number in range(6):
            archive.writestr(f"train/{number}.jpg", picture((128, 128, 128), number))
            lines += [f"train/{number}.jpg,a grey thing {number}", f"train/{number}.jpg,another grey thing {number}"]
        archive.writestr("train/leak.jpg", picture(COLOURS["street"], 21))  # a test picture of the other set
        archive.writestr("captions.csv", "\n".join([*lines, "train/leak.jpg,a street"]))
    return folder


@pytest.fixture(scope="module")
def small_bed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bed")
    bed.split([archives(tmp_path_factory.mktemp("data"))], folder, SMALL)
    return folder


@pytest.fixture(scope="module")
def models(small_bed: Path) -> dict[str, object]:
    torch.set_num_threads(1)
    return clip.make(small_bed, small_bed / "models" / "seen", TINY, torch.device("cpu"), SMALL)


# -- split ------------------------------------------------------------------------------------------------------------


def test_every_class_is_shared_out_and_no_picture_has_two_splits(small_bed: Path) -> None:
    rows = bed.read_rows(small_bed / "scenes.csv")
    counts = Counter((row.label, row.split) for row in rows)
    for name in COLOURS:
        fewer = 1 if name == "glacier" else 0  # its picture 0 also lies under street: nobody knows what it shows
        expected = {"base": 4, "dev": 6, "constraint": 8 - fewer, "test": 6}
        assert {split: counts[name, split] for split in expected} == expected
    assert len({row.picture for row in rows}) == len({row.filepath for row in rows}) == len(rows)
    assert "intel-scene-64/train/sea/copy.jpg" not in {row.filepath for row in rows}


def test_no_set_trains_on_a_copy_of_another_sets_test_picture(small_bed: Path) -> None:
    assert [row.filepath.rsplit("/", 1)[1] for row in bed.read_rows(small_bed / "captions.csv")] == [
        f"{number}.jpg" for number in range(6)
    ]


def test_the_split_depends_on_content_alone(tmp_path: Path) -> None:
    rows = [bed.Row(f"f{n}", f"c{n % 2}", "", f"{n * 7919 % 101:03d}", f"p{n}") for n in range(40)]
    part = replace(bed.PARTS["pacs"], counts={"base": 0.1, "dev": 3})
    split = {row.filepath: row.split for row in bed.share_out(rows, part)}
    assert split == {row.filepath: row.split for row in bed.share_out(rows[::-1], part)}
    assert Counter(split.values()) == {"base": 4, "dev": 6, "constraint": 30}


def test_archives_and_folders_are_taken_alike(tmp_path: Path) -> None:
    data = archives(tmp_path)
    with zipfile.ZipFile(data / "intel-scene-64.zip") as archive:
        archive.extractall(tmp_path / "unpacked" / "intel-scene-64")
    only = {"scenes": SMALL["scenes"]}
    for name, source in (("a", data / "intel-scene-64.zip"), ("b", tmp_path / "unpacked")):
        bed.split([source], tmp_path / name, only)
    assert (tmp_path / "a" / "scenes.csv").read_bytes() == (tmp_path / "b" / "scenes.csv").read_bytes()


def test_labels_and_prompts_are_those_of_the_studies() -> None:
    assert bed.PARTS["pacs"].place("art_painting/elephant/1.jpg") == ("painting_of_an_elephant", "")
    for name, part in bed.PARTS.items():
        if name == "captions":
            continue
        for study in (f"bed-{name}", f"bed-{name}-unseen", f"bed-{name}-quick", f"bed-{name}-unseen-quick"):
            task = read_study(study).config.round["task"]
            words = task.get("names", {}).get(part.target, part.target.replace("_", " "))
            assert task["target"] == part.target
            assert task["template"].format(words) == part.phrase(part.target)


# -- pretraining ------------------------------------------------------------------------------------------------------


def test_the_contrast_against_a_naive_computation() -> None:
    torch.manual_seed(0)
    images, texts = torch.randn(5, 4), torch.randn(3, 4)
    labels = [0, 0, 2, 2, 2]  # nobody shows text 1
    targets = torch.nn.functional.one_hot(torch.tensor(labels), 3).float()
    scale = (images @ texts.T / 0.5).tolist()
    rows = [math.log(sum(math.exp(value) for value in row)) - row[label]
            for row, label in zip(scale, labels, strict=True)]  # fmt: skip
    columns: list[float] = []
    for text in (0, 2):
        total = math.log(sum(math.exp(row[text]) for row in scale))
        own = [total - row[text] for row, label in zip(scale, labels, strict=True) if label == text]
        columns.append(sum(own) / len(own))
    expected = (sum(rows) / 5 + sum(columns) / 2) / 2
    assert clip.contrast(images, texts, targets, 0.5, 0.0).item() == pytest.approx(expected, rel=1e-5)


def test_batches_have_one_prompt_a_class_and_their_own_captions() -> None:
    images = torch.arange(10).view(10, 1, 1, 1).expand(10, 3, 2, 2).to(torch.uint8)
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    prompts = torch.arange(3).view(3, 1, 1).expand(3, 2, 4) * 100
    captions = torch.arange(4).view(4, 1, 1).expand(4, 5, 4) + 6
    pool = clip.Pool(images, labels, prompts, captions)
    seen: Counter[int] = Counter()
    batches = pool.batches(5, torch.Generator().manual_seed(0))
    for _ in range(6):
        pictures, tokens, own = next(batches)
        assert tokens.shape == (3 + 2, 4)
        for place, text in zip(pictures[:, 0, 0, 0].tolist(), own.tolist(), strict=True):
            seen[place] += 1
            assert tokens[text, 0] == (100 * labels[place] if place < 6 else place)
    assert set(seen.values()) == {3}  # three passes over everything


def test_mixed_targets_add_up_to_one() -> None:
    random = torch.Generator().manual_seed(0)
    pixels, targets = torch.zeros(16, 3, 8, 8), torch.eye(16)
    pixels += torch.arange(16).view(-1, 1, 1, 1)
    for cut in (False, True):
        mixed, shares = clip.mixed_views(pixels, targets, 0.5, cut, random)
        assert torch.allclose(shares.sum(dim=1), torch.ones(16))
        # What a picture shows, on average over its pixels, is what its target says.
        assert torch.allclose(mixed.mean(dim=(1, 2, 3)), shares @ torch.arange(16.0), atol=1e-4)


def test_unseen_leaves_the_constraint_images_out(small_bed: Path) -> None:
    rows = bed.read_rows(small_bed / "scenes.csv")
    for unseen, splits in ((False, {"base", "constraint"}), (True, {"base"})):
        item = clip.chosen(SMALL["scenes"], rows, unseen=unseen, rare=2)
        assert {row.split for row in item.trained} == splits
        assert sum(row.label == "sea" for row in item.trained) == 2


def test_the_model_has_learnt_all_but_its_target(small_bed: Path, models: dict[str, dict[str, float]]) -> None:
    found = models["scenes"]
    assert found["protected"] > 0.6  # one in six is chance
    assert found["target"] < found["protected"]
    folder = small_bed / "models" / "seen" / "scenes"
    assert load_model(folder).classes == tuple(sorted(COLOURS))
    seen = images_seen(folder)
    rows = bed.read_rows(small_bed / "scenes.csv")
    trained = seen.keys(Use.TRAINED)
    assert seen.complete
    for row in rows:
        if row.split in ("test", "dev"):
            assert row.example_id not in trained
            assert row.picture not in trained
    assert len(seen.uses) == seen.counts()["trained"] + seen.counts()["chosen"]
    assert seen.counts()["trained"] == 5 * 4 + 5 * 8 - 1 + 6


# -- studies ----------------------------------------------------------------------------------------------------------


def test_each_ready_study_has_as_many_trials_for_every_method() -> None:
    for name in ready_studies():
        if name.startswith("bed-"):
            study = read_study(name)
            jobs = Counter(job.row for job in plan(study, Path("out")))
            each = len(study.config.seeds) * len(study.config.columns)
            trials = 1 if "-towers" in name else 2 if name.endswith("quick") or "-cpu" in name else 4
            assert jobs.pop("refit alone") == each
            assert jobs.pop("last layer alone", each) == each
            assert set(jobs.values()) == {each * trials}
            assert jobs["holdfast"]


def test_from_pretraining_to_the_table(
    small_bed: Path, models: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    file = tmp_path / "tiny.toml"
    file.write_text("""
extends = "bed-scenes-quick"
seeds = [0, 1]
sizes = [6]
[round.data.roles]
sealed = 0.0
[round.train]
steps = 10
batch = 8
images_per_task = 2
device = "cpu"
[round.evaluate]
every = 5
[[methods]]
name = "holdfast"
[[methods]]
name = "rm"
label = "RM"
[[methods]]
name = "refit"
label = "refit alone"
""")
    study = read_study(file, small_bed)
    result = run_study(study, tmp_path / "studies" / "tiny", run_here, lambda text: None, figures=False)
    assert result.failed == []
    gained = [
        point.dev.target_gain
        for job in plan(study, result.out)
        for point in read_frontier(JobFolder(job.folder).frontier)
    ]
    assert max(gained) > 0
    kept, drawn = tmp_path / "kept.json", tmp_path / "frontier.png"
    words = ["frontier.py", str(result.out), "--out", str(kept), "--figure", str(drawn)]
    monkeypatch.setattr(sys, "argv", words)
    frontier.main()
    printed = capsys.readouterr().out
    assert "| tiny | shipped | 6 | refit alone |" in printed
    assert drawn.stat().st_size > 0
    monkeypatch.setattr(sys, "argv", ["frontier.py", str(kept)])  # the results file says the same
    frontier.main()
    assert capsys.readouterr().out == printed
    assert json.loads(kept.read_text())["studies"]["tiny"]
    with (result.out / "tables" / "frontier.csv").open() as table:
        assert {line["Method"] for line in csv.DictReader(table)} == {"holdfast", "RM", "refit alone"}
