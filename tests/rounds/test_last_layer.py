"""Fits of the last layer as candidates of a round: without training, the same beside it, and only where they belong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast import Round
from holdfast.artifacts import read_predictions
from holdfast.candidates.last_layer import fit_last_layer
from holdfast.candidates.refit import see_pictures
from holdfast.candidates.select import Candidate
from holdfast.candidates.solver import minimise, minimise_linear
from holdfast.config import RoundConfig, parse
from holdfast.model.feature_store import MemoryStore
from holdfast.model.folder import load_model, model_fingerprint
from holdfast.model.openclip_towers import OpenClipTowers
from holdfast.rounds.develop import develop
from holdfast.rounds.outcome import read_outcome
from tests.rounds.test_quick import config

ENDS = [f"last-layer-constrained@1{bias}" for bias in ("", "-bias1")]
ONE_WEIGHT = [f"{end}@1{bias}" for end in ("last-layer", "last-layer-refit") for bias in ("", "-bias1")]
REFITS = ["refit", "refit-bias1"]


def test_a_round_without_training_is_what_a_trained_one_has_beside_it(tmp_path: Path) -> None:
    method = {"name": "last_layer"}
    alone = develop(config(tmp_path, method=method), tmp_path / "alone", tmp_path, quiet=True)
    assert [candidate.name for candidate in alone.candidates] == [*REFITS, *ENDS]
    assert not any(candidate.is_trained for candidate in alone.candidates)
    assert read_outcome(alone.folder).training == ""
    whole = develop(config(tmp_path, certify={"test_sealed": False}), tmp_path / "whole", tmp_path, quiet=True)
    untrained = {item.name: item.dev for item in whole.candidates if not item.is_trained}
    assert untrained == {item.name: item.dev for item in alone.candidates}
    assert read_outcome(whole.folder).training != ""


def test_a_candidate_is_the_same_model_whenever_it_is_asked_for(tmp_path: Path) -> None:
    round_ = Round(config(tmp_path, method={"name": "last_layer"}), tmp_path, tmp_path / "run")
    round_.train()
    made = {candidate.name: candidate for candidate in round_.candidates()}
    fingerprints = {name: model_fingerprint(round_.model(made[name])) for name in ENDS}
    assert len(set(fingerprints.values())) == 2
    again = Round(config(tmp_path, method={"name": "last_layer"}), tmp_path, round_.folder, begun=True)
    for name in reversed(ENDS):
        assert model_fingerprint(again.model(made[name])) == fingerprints[name]
        table = read_predictions(round_.folder.predictions(name, "dev"))
        assert table["example_id"].to_pylist() == list(round_.data.dev.ids)


def test_the_model_that_ships_is_the_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def last(candidates: list[Candidate], *given: object, **more: object) -> list[Candidate]:
        return [next(item for item in candidates if item.name == ENDS[1])]

    monkeypatch.setattr("holdfast.rounds.decide.rank_for_testing", last)
    settings = config(tmp_path, method={"name": "last_layer"}, certify={"margin": 0.9, "target_gain": False})
    result = develop(settings, tmp_path / "run", tmp_path, quiet=True)
    assert result.chosen == ENDS[1]
    shipped = load_model(tmp_path / "run" / "model")
    round_ = Round(settings, tmp_path, tmp_path / "again")
    round_.train()
    candidate = next(item for item in round_.candidates() if item.name == ENDS[1])
    assert model_fingerprint(shipped) == model_fingerprint(round_.model(candidate))


@pytest.mark.parametrize(
    ("sections", "ends"),
    [
        ({"candidates": {"last_layer": False}}, []),
        ({"candidates": {"last_layer_constraints": False}}, ONE_WEIGHT),
        ({"candidates": {"folds": 0}}, ONE_WEIGHT),
        ({"candidates": {"refit_target": False}}, []),
        ({"method": {"name": "rm"}}, []),
        ({"method": {"name": "refit"}}, []),
        ({"model": {"freeze": "towers"}}, []),
        ({"model": {"freeze": "backbones"}}, ENDS),
    ],
)
def test_they_are_made_where_they_belong(
    tmp_path: Path, sections: dict[str, dict[str, object]], ends: list[str]
) -> None:
    round_ = Round(config(tmp_path, **sections), tmp_path, tmp_path / "run")
    round_.train()
    names = [candidate.name for candidate in round_.candidates()]
    assert [name for name in names if name.startswith("last-layer")] == ends
    moved = sections.get("model", {}).get("freeze") != "backbones"  # else the fit that starts from the old model has it
    checkpoints = {name.split("-last")[0] for name in names if name.startswith("step") and "-last-layer@" in name}
    assert bool(checkpoints) == (bool(ends) and moved)
    assert checkpoints <= {name.split("@")[0] for name in names}
    assert len(names) <= round_.config.candidates.largest_number


@pytest.mark.parametrize("folds", [0, 3])
def test_a_fit_on_top_of_a_checkpoint_is_the_fit_that_starts_there(tmp_path: Path, folds: int) -> None:
    """The same model, whenever it is asked for; where there are folds, dev images are counted out of fold."""
    settings = config(tmp_path, candidates={"folds": folds, "checkpoints": ["last"]})
    round_ = Round(settings, tmp_path, tmp_path / "run")
    round_.train()
    made = {candidate.name: candidate for candidate in round_.candidates()}
    step = round_.checkpoints()[-1]
    found = round_.model(made[f"{step}-last-layer@1"])
    again = Round(settings, tmp_path, round_.folder, begun=True)
    assert model_fingerprint(again.model(made[f"{step}-last-layer@1"])) == model_fingerprint(found)

    start, data, target = round_.checkpoint(step), round_.data, round_.data.tasks.target
    pictures = see_pictures(
        start, data, in_tower=True, crop_scale=settings.train.crop_scale, flip=False, dev=folds > 0, most_views=2
    )
    expected = fit_last_layer(start, target, pictures).applied(start)
    pixels = start.preprocess.normalise(data.dev.images())
    torch.testing.assert_close(found.logits(pixels), expected.logits(pixels), rtol=1e-4, atol=1e-3)
    assert not torch.allclose(found.logits(pixels), start.logits(pixels), atol=1e-2)
    said = read_predictions(round_.folder.predictions(f"{step}-last-layer@1", "dev"))
    alone = round_.predict(found, data.dev)
    assert said.equals(alone) == (folds == 0)  # a fit on other images says the same classes, with other losses

    if folds:
        dealt = round_.maker.on_checkpoint(step).fits.folds
        assert dealt is not None
        assert set(dealt.of) == set(data.dev.ids)  # the checkpoint has seen its training images in every fold


def test_candidates_of_one_checkpoint_are_scored_from_one_pass_of_its_tower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its refit, the checkpoint as it was trained and the fits on top differ in the last layer and the classes."""
    settings = config(tmp_path, candidates={"folds": 3, "checkpoints": ["last"], "interpolation": [1.0]})
    round_ = Round(settings, tmp_path, tmp_path / "run")
    round_.train()
    again = Round(settings, tmp_path, round_.folder, begun=True)  # that has made no candidate yet
    step, seen = round_.checkpoints()[-1], 0
    hidden = OpenClipTowers.image_hidden

    def counted(towers: OpenClipTowers, pixels: torch.Tensor) -> torch.Tensor:
        nonlocal seen
        seen += len(pixels)
        return hidden(towers, pixels)

    monkeypatch.setattr(OpenClipTowers, "image_hidden", counted)
    models = round_.maker.towards(step)
    with round_.keeping(moved=MemoryStore()):
        models.predictions(1.0, round_.data.dev, 16)
    refitted, seen = seen, 0
    made = again.maker.from_checkpoint(step)
    assert {candidate.variant for candidate in made} == {"", "as-trained", "last-layer"}
    assert seen == refitted > 0


def test_published_forms_have_none(tmp_path: Path) -> None:
    for form in ("published", "authors"):
        values = {"name": "holdfast", "form": form}
        given = config(tmp_path).model_dump(mode="json", exclude={"candidates", "method", "train"}, exclude_unset=True)
        assert not parse(RoundConfig, {**given, "method": values}, "ROUND").fits_last_layer


def test_both_solvers_find_the_same() -> None:
    generator = torch.Generator().manual_seed(3)
    columns = torch.randn(40, 7, generator=generator, dtype=torch.float64)
    labels = torch.arange(40) % 3
    ridge = torch.rand(7, 3, generator=generator, dtype=torch.float64)
    plain, fast = (torch.zeros(7, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def loss(reached: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(reached, labels)

    minimise(plain, lambda: loss(columns @ plain) + (ridge * plain.square()).sum())
    minimise_linear(fast, columns, ridge, loss)
    torch.testing.assert_close(fast.detach(), plain.detach(), rtol=0, atol=1e-6)
    assert plain.detach().abs().max() > 0.01
