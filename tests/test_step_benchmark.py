"""benchmarks/step.py with open_clip's own step beside ours, as far as a CPU takes it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import open_clip_step, step
from holdfast.data.loader import RoundSampler
from holdfast.model.openclip import ARCHITECTURES, TINY
from holdfast.runtime import Runtime
from holdfast.train.bench import step_flop
from holdfast.train.loop import batch_sizes
from holdfast.train.shapes import (
    SHAPES,
    Shape,
    made_up_round,
    made_up_run,
    made_up_tokenizer,
    train_config,
    write_pictures,
)
from tests.kernels.test_own_blocks import SIGLIP

CPU = torch.device("cpu")


@pytest.mark.parametrize(("compiled", "config"), [(False, TINY), (True, TINY), (False, SIGLIP)])
def test_open_clips_own_step(compiled: bool, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARCHITECTURES, "made-up", config)
    row = open_clip_step.measured("made-up", 2, 1, compiled=compiled, device=CPU, backend="aot_eager")
    assert row["ms"] > 0
    assert {"architecture": "made-up", "pairs": 2, "compiled": compiled}.items() <= row.items()


def test_its_loss_is_that_of_the_model() -> None:
    from holdfast.model.openclip_towers import create_model

    names = [type(open_clip_step.loss_of(create_model(config))).__name__ for config in (TINY, SIGLIP)]
    assert names == ["ClipLoss", "SigLipLoss"]


def test_texts_have_the_towers_length_and_vocabulary() -> None:
    plain, made_up = open_clip_step.made_up_tokens(TINY, 3), open_clip_step.made_up_tokens(SIGLIP, 3)
    assert plain.shape == (3, 32)
    assert made_up.shape == (3, 16)
    assert int(made_up.max()) < 100
    tokenize = made_up_tokenizer(8, 100)
    tokens = tokenize(["a car in the fog", "a", "one two three four five six seven eight nine"])
    assert tokens.shape == (3, 8)
    assert 1 <= int(tokens.min()) <= int(tokens.max()) < 100
    assert tokens[0, 0] == tokens[1, 0]
    assert tokens[:, -1].tolist() == [1, 1, 1]


def test_pictures_of_a_step() -> None:
    counts = {name: SHAPES[name].pictures for name in ("bdd100k", "places365", "bdd100k-huge", "bdd100k-siglip")}
    assert counts == {"bdd100k": 306, "places365": 544, "bdd100k-huge": 178, "bdd100k-siglip": 306}


@torch.no_grad()
def test_arithmetic_of_siglips_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its pooling calls a module on a view of a weight."""
    monkeypatch.setitem(ARCHITECTURES, "siglip-tiny", SIGLIP)
    shape = Shape("siglip-tiny", 2, 4, None, 1, "a photo of a {}", 0.05, 16, 8, 4, 224)
    config = train_config(shape, steps=2, log_every=1, device="cpu")
    data = made_up_round(shape, write_pictures(tmp_path / "pixels.bin", shape.images, shape.size), form="published")
    method, plan = made_up_run(shape, data, config, Runtime(CPU), paired=False, form="published")
    draw = RoundSampler(data, batch_sizes(config), plan.seed).draw(0)
    images = len(draw.target) + len(draw.negatives) + len(draw.protected)
    texts = len(draw.target) + len(draw.negatives) + len(method.model.prompt_tokens)
    # One multiplication and one addition for each weight of a product and each row, and attention's two products.
    blocks = 12 * 197 * (12 * 192**2 + 2 * 197 * 192)
    pooled = 2 * 192**2 + 196 * 2 * 192**2 + 2 * 196 * 192 + 8 * 192**2  # from one query, over patches alone
    an_image = 2 * (196 * 16 * 16 * 3 * 192 + blocks + pooled)
    a_text = 2 * 3 * 16 * (12 * 64**2 + 2 * 16 * 64)
    assert step_flop(method, data, draw, plan.views) == 3 * (images * an_image + texts * a_text)


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *given: str) -> dict[str, Any]:
    settings = ["--steps", "2", "--warm-up", "2", "--views", "clean", "--forms", "published", "--shapes", "tiny"]
    monkeypatch.setattr(sys, "argv", ["step.py", *settings, "--out", str(out), *given])
    step.main()
    return json.loads((out / "step.json").read_text())


def test_both_stand_in_one_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "open_clip" not in run(monkeypatch, tmp_path)["tiny"]
    found = run(monkeypatch, tmp_path, "--open-clip", "eager")["tiny"]
    assert found["open_clip"].keys() == {"pairs", "eager_ms", "eager_gib"}
    ratio = found["open_clip"]["eager_ms"] / found["published"]["ms"]
    assert f"{ratio:.2f} times ours" in capsys.readouterr().out


def test_what_fails_does_not_stop_the_rest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measured(*given: Any, compiled: bool, **_: Any) -> dict[str, Any]:
        if not compiled:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"ms": 5.0, "gib": 1.0}

    monkeypatch.setattr(open_clip_step, "measured", measured)
    theirs = run(monkeypatch, tmp_path, "--open-clip")["tiny"]["open_clip"]
    assert theirs == {"pairs": 100, "compiled_ms": 5.0, "compiled_gib": 1.0}

    def fails(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(step, "measure_shape", fails)
    assert run(monkeypatch, tmp_path, "--open-clip", "compiled")["tiny"].keys() == {"open_clip"}
