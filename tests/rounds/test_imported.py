"""Rounds that start from imported models: an image classifier with its linear head, and transformers' two towers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import cli, develop
from holdfast.config import RoundConfig, parse
from holdfast.errors import UserError
from holdfast.files import read_json, read_jsonl
from holdfast.methods.base import clean_logits
from holdfast.model.folder import load_model, model_fingerprint
from holdfast.rounds.prepare import prepare_round
from holdfast.runtime import started
from tests.model.foreign import save_timm, save_torchvision, save_transformers
from tests.rounds.test_round import ROUND

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def command(*words: str) -> int:
    """The exit code of the command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["holdfast", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return int(ended.value.code or 0)


def config(root: Path, method: str = "holdfast", **model: Any) -> RoundConfig:
    certify = {**ROUND["certify"], "ledger": str(root / "ledger")}
    values = {**ROUND, "model": {"start": "model", **model}, "method": {"name": method}, "certify": certify}
    return parse(RoundConfig, values, "ROUND")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A timm classifier of digits, imported as ``model``."""
    save_timm(tmp_path / "source", DIGITS, img_size=32)
    assert command("import", str(tmp_path / "source"), str(tmp_path / "model")) == 0
    return tmp_path


def test_a_classifier_from_import_to_export(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import timm

    monkeypatch.chdir(root)
    result = develop(config(root), root / "run", root, quiet=True)
    assert result.decision.verdict == "certified"
    assert [candidate.name for candidate in result.candidates if candidate.lam == 0] == ["refit", "refit-bias1"]
    model = load_model(root / "run" / "model")
    assert model.heads.rounds == []  # the linear head is all there is to change beside the backbone
    assert model.linear is not None
    assert model.classes == ("zero", "one", "eight")
    trained = [entry for entry in read_jsonl(result.folder.metrics) if entry["step"] > 0]
    assert trained
    assert command("evaluate", "run", "digits") == 0
    assert command("verify", "run") == 0
    assert command("report", "run") == 0
    assert command("diagnose", "run", "--images", "8") == 0
    assert command("export", "run", "out") == 0
    again = timm.create_model("local-dir:out", pretrained=True).eval()
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert read_json(root / "out" / "config.json")["label_names"] == ["zero", "one", "eight"]
    with torch.no_grad():
        torch.testing.assert_close(again(images), model.logits(images), rtol=0, atol=1e-5)
    capsys.readouterr()


def test_a_round_begins_with_the_classifier_as_it_is_and_trains_backbone_and_head(root: Path) -> None:
    with started("cpu") as runtime:
        ready = prepare_round(config(root), root, runtime)
        old, new = (clean_logits(model, ready.assembled.data.constraint) for model in (ready.old, ready.method.model))
    assert torch.equal(old, new)
    trainable = {name for name, value in ready.method.model.named_parameters() if value.requires_grad}
    assert "linear" in trainable
    assert any(name.startswith("towers.model.blocks") for name in trainable)


@pytest.mark.parametrize("method", ["finetune", "cross_entropy", "rm", "gem", "der", "co2l", "refit"])
def test_methods_train_a_classifier(root: Path, method: str) -> None:
    result = develop(config(root, method), root / "run", root, quiet=True)
    assert result.candidates


@pytest.mark.parametrize("method", ["flyp", "wccl"])
def test_methods_that_read_captions_say_so(root: Path, method: str) -> None:
    with pytest.raises(UserError, match="no text tower"):
        develop(config(root, method), root / "run", root, quiet=True)


def test_the_refit_moves_the_targets_row_and_nothing_else(root: Path) -> None:
    from holdfast.candidates.refit import refit_target

    with started("cpu") as runtime:
        ready = prepare_round(config(root), root, runtime)
        data, old = ready.assembled.data, ready.old
        fitted = refit_target(old, data).applied(old)
        before, after = clean_logits(old, data.constraint), clean_logits(fitted, data.constraint)
        assert torch.equal(before[:, :2], after[:, :2])
        assert not torch.equal(before[:, 2], after[:, 2])


def test_the_objective_is_the_targets_cross_entropy(root: Path) -> None:
    """With a learning rate of next to nothing, what a step logs is the old model's loss on the target's images."""
    values = config(root, "finetune").model_dump(mode="json", exclude_unset=True)
    train = {"steps": 1, "batch": 24, "target_share": 0.5, "augment": False, "learning_rate": 1e-12}
    values["train"] = {**values["train"], **train}
    small = parse(RoundConfig, values, "ROUND")
    result = develop(small, root / "run", root, quiet=True)
    (entry,) = (entry for entry in read_jsonl(result.folder.metrics) if "objective" in entry)
    with started("cpu") as runtime:
        ready = prepare_round(small, root, runtime)
        data, old = ready.assembled.data, ready.old
        _, images = next(iter(old.preprocess.batches(data.target, old.towers.projection)))
        with torch.no_grad():
            expected = torch.nn.functional.cross_entropy(old.logits(images), torch.full((len(images),), 2))
    assert len(data.target) == 12  # the step saw all of them
    assert entry["objective"] == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize("freeze", ["towers", "backbones"])
def test_freezing_the_towers_trains_the_head_alone(root: Path, freeze: str) -> None:
    develop(config(root, freeze=freeze), root / "run", root, quiet=True)
    old, new = load_model(root / "model"), load_model(root / "run" / "candidates" / "step-00000004")
    for name, value in old.towers.state_dict().items():
        assert torch.equal(value, new.towers.state_dict()[name])
    assert old.linear is not None
    assert new.linear is not None
    assert not torch.equal(old.linear[[0, 1, 8]], new.linear)


def test_a_class_without_a_row_is_refused(root: Path) -> None:
    values = {**ROUND, "model": {"start": "model"}, "task": {**ROUND["task"], "target": "ten"}}
    values["data"] = {**ROUND["data"], "source": {"kind": "digits", "classes": {"eight": "ten", "nine": "six"}}}
    with pytest.raises(UserError, match="no row for ten"):
        develop(parse(RoundConfig, values, "ROUND"), root / "run", root, quiet=True)


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_a_round_with_the_towers_of_transformers(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_transformers(tmp_path / "source", kind)
    assert command("import", "source", "model") == 0
    assert command("evaluate", "model", "digits", "--template", "the digit {}", "--json") == 0  # zero-shot
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["tasks"].keys() >= {"zero", "one", "eight"}
    result = develop(config(tmp_path, head_rank=2), tmp_path / "run", tmp_path, quiet=True)
    assert result.decision.verdict == "certified"
    assert command("evaluate", "run", "digits", "--json") == 0
    assert command("export", "run", "out") == 0
    assert (tmp_path / "out" / "config.json").is_file()


ROUND_FILE = '[task]\ntarget = "eight"\n[data]\nsource = {{ kind = "digits" }}\n[model]\nstart = "{}"\n'


def test_a_round_takes_a_source_as_it_is(tmp_path: Path) -> None:
    save_timm(tmp_path / "source", DIGITS, img_size=32)
    direct = develop(config(tmp_path, start="source"), tmp_path / "direct", tmp_path, quiet=True)
    assert command("import", str(tmp_path / "source"), str(tmp_path / "model")) == 0
    (tmp_path / "ledger").rename(tmp_path / "first-ledger")
    through = develop(config(tmp_path), tmp_path / "run", tmp_path, quiet=True)
    assert (direct.chosen, direct.test) == (through.chosen, through.test)
    shipped = [load_model(tmp_path / run / "model") for run in ("direct", "run")]
    assert model_fingerprint(shipped[0]) == model_fingerprint(shipped[1])


def test_a_start_that_is_no_model_folder_is_told_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tried: Callable[..., None]
) -> None:
    save_torchvision(tmp_path / "net.pth", 3)
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    for start, words in (
        ("net.pth", f"holdfast import {tmp_path / 'net.pth'} OUT --architecture NAME"),
        ("bert", "a transformers folder of type 'bert', which holdfast does not read"),
        ("broken", "not readable as JSON"),
    ):
        tried("bad inputs")
        (tmp_path / "ROUND.toml").write_text(ROUND_FILE.format(start))
        assert command("develop", str(tmp_path / "ROUND.toml")) == 2
        assert words in " ".join(capsys.readouterr().err.split())


def test_import_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_torchvision(tmp_path / "net.pth", 3)
    (tmp_path / "classes.txt").write_text("zero\none\n\neight\n")
    words = ["import", str(tmp_path / "net.pth"), str(tmp_path / "model")]
    assert command(*words) == 2
    assert "--architecture" in capsys.readouterr().err
    words += ["--architecture", "torchvision:shufflenet_v2_x0_5"]
    assert command(*words, "--classes", str(tmp_path / "missing.txt")) == 2
    assert not (tmp_path / "model").exists()
    assert command(*words, "--classes", str(tmp_path / "classes.txt")) == 0
    shown = capsys.readouterr().out
    assert "3 classes" in shown
    assert json.loads((tmp_path / "model" / "model.json").read_text())["linear"] is True
