"""`holdfast data`, `pack` and `leaks` as a user runs them."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from pictures import NO_SHARED, SHARED, encode, picture, write_folder
from PIL import Image
from typer.testing import CliRunner

from holdfast.cli import app
from holdfast.data.images import evaluation_view
from holdfast.errors import UserError


def run(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words], standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return int(result.return_value or 0), result.output


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A folder with one of everything that people's folders hold."""
    root = write_folder(tmp_path / "odd", {"train/cat": 6, "train/dog": 5, "test/cat": 2})
    cats = root / "train" / "cat"
    (cats / "corrupt.jpg").write_bytes(b"\xff\xd8\xff nothing more")
    (cats / "short.jpg").write_bytes(encode(picture(90, 200, 200))[:-500])
    shutil.copy(root / "test/cat/0000.jpg", cats / "leak.jpg")
    shutil.copy(cats / "0001.jpg", root / "train/dog/same.jpg")
    frames = [picture(100 + n) for n in range(3)]
    (cats / "moving.gif").write_bytes(encode(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    (cats / "deep.png").write_bytes(encode(Image.new("I;16", (30, 30), 40_000), "PNG"))
    (cats / "print.jpg").write_bytes(encode(picture(110).convert("CMYK"), "JPEG"))
    (cats / "palette.png").write_bytes(encode(picture(111).convert("P"), "PNG"))
    exif = Image.Exif()
    exif[0x0112] = 3
    (cats / "turned.jpg").write_bytes(encode(picture(112), "JPEG", exif=exif))
    (cats / "notes.txt").write_text("not a picture")
    (root / "train" / "bird").mkdir()
    return root


def test_data_counts_everything(odd: Path, tmp_path: Path) -> None:
    code, text = run("data", odd, "--sheet", tmp_path / "sheet.png", "--json")
    found = json.loads(text)
    assert code == 0
    assert found["counts"] == {"cat": {"train": 14, "test": 2}, "dog": {"train": 6}}
    problems = {"unreadable": 2, "copy in another split": 1, "contradicting labels": 1, "folder without pictures": 1}
    problems["folder with files that are no pictures"] = 1
    assert found["problems"] == problems
    assert found["treated"] == {
        "animated: the first frame is used": 1,
        "16-bit: the upper byte is used": 1,
        "CMYK: turned into RGB": 1,
        "palette: turned into RGB": 2,
        "rotated by EXIF: set upright": 1,
    }
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.format == "PNG"
        assert sheet.size[1] == 2 * 100 + 4
        assert len(sheet.convert("RGB").getcolors(1 << 20) or []) > 100  # there are pictures on it
    code, text = run("data", odd, "--no-sheet")
    assert " px high, median " in text
    assert "corrupt.jpg" in text
    assert "copy in another split: 1" in text
    assert f"{odd}/train/bird (an empty folder)" in text
    assert f"{odd}/train/cat (notes.txt)" in text


def test_data_says_what_it_found_before_it_draws_a_sheet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures = write_folder(tmp_path / "pictures", {"cat": 3})
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        app(["data", str(pictures), "--sheet", str(tmp_path / "file" / "sheet.png")], standalone_mode=False)
    assert "sizes: all 40 x 30 px" in capsys.readouterr().out


@pytest.mark.shared_data
@pytest.mark.skipif(not (SHARED / "bdd100k-val-attributes.json").exists(), reason=NO_SHARED)
def test_data_counts_a_label_file() -> None:
    _, text = run("data", SHARED / "bdd100k-val-attributes.json", "--attribute", "scene")
    assert "gas stations" in text
    assert "6112" in text


def test_pack_and_its_store(odd: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="2 of 22 pictures cannot be read"):
        run("pack", odd, tmp_path / "store", "--size", 16)
    code, text = run("pack", odd, tmp_path / "store", "--size", 16, "--bad-image-limit", 0.2, "--verify")
    assert code == 0
    assert "18 pictures of 16 px" in text
    assert "fingerprint sha256:" in text
    _, text = run("data", tmp_path / "store", "--no-sheet")
    assert "pack, 20 examples" in text


def test_leaks_between_and_within(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", {"x": 20})
    write_folder(tmp_path / "b", {"x": 20}, start=100)
    assert run("leaks", tmp_path / "a", tmp_path / "b")[0] == 0
    with Image.open(tmp_path / "a/x/0005.jpg") as image:
        image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(tmp_path / "b/x/mirror.png")
    shutil.copy(tmp_path / "a/x/0007.jpg", tmp_path / "b/x/same.jpg")
    code, text = run("leaks", tmp_path / "a", tmp_path / "b", "--out", tmp_path / "pairs.csv", "--json")
    assert code == 3
    pairs = [(Path(item["a"]).name, Path(item["b"]).name, item["kind"]) for item in json.loads(text)["pairs"]]
    assert pairs == [("0005.jpg", "mirror.png", "near"), ("0007.jpg", "same.jpg", "exact")]
    with (tmp_path / "pairs.csv").open() as file:
        assert [Path(row["b"]).name for row in csv.DictReader(file)] == ["mirror.png", "same.jpg"]
    code, text = run("leaks", tmp_path)
    assert code == 3
    assert "mirrored" in text


def test_leaks_across_the_roles_of_a_round(tmp_path: Path) -> None:
    write_folder(tmp_path / "in", {"cat": 60, "owl": 60})
    (tmp_path / "ROUND.toml").write_text('[task]\ntarget = "owl"\n[data]\nsource = { path = "in" }\n')
    assert run("leaks", tmp_path / "ROUND.toml")[0] == 0
    for number in range(12):
        with Image.open(tmp_path / f"in/cat/{number:04d}.jpg") as image:
            image.save(tmp_path / f"in/cat/again{number}.jpg", quality=60)
    code, text = run("leaks", tmp_path / "ROUND.toml")
    assert code == 3
    assert "training, sealed" in text


def test_leaks_with_the_features_of_a_model(tmp_path: Path) -> None:
    from holdfast.cli.data import features_of
    from holdfast.model.classifier import Classifier
    from holdfast.model.folder import save_model
    from holdfast.model.openclip import load_towers

    towers = load_towers("tiny", None, seed=0).eval()
    view = towers.preprocess
    classifier = Classifier(towers, ("cat", "owl"), (("a cat",), ("an owl",)), class_temperature=0.05)
    save_model(classifier, tmp_path / "model")
    images = [picture(n, 50, 40) for n in range(4)]
    pixels = torch.from_numpy(np.stack([evaluation_view(item, view.size, view.interpolation) for item in images]))
    mean, std = (torch.tensor(item)[:, None, None] for item in (view.mean, view.std))
    with torch.inference_mode():
        expected = classifier.image_features((pixels / 255 - mean) / std).numpy()
    assert np.allclose(features_of(tmp_path / "model")(images), expected, atol=1e-5)
    write_folder(tmp_path / "in", {"cat": 4})
    code, text = run("leaks", tmp_path / "in", "--model", tmp_path / "model")
    assert code in (0, 3)  # an untrained model may find everything alike
    assert "4 pictures" in text
