"""Blocks of towers that keep their own modules: compiled or fused, the same function, and nothing left behind."""

from __future__ import annotations

import copy
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend

from holdfast.kernels import fast, fused, own_blocks
from holdfast.model.compute import ComputeMode, computing
from holdfast.model.openclip import ARCHITECTURES, TINY
from holdfast.model.openclip_towers import OpenClipTowers
from holdfast.model.towers import Preprocess
from holdfast.runtime import Runtime
from holdfast.train import compute_mode
from holdfast.train.loop import train
from holdfast.train.shapes import Shape, made_up_round, made_up_run, train_config, write_pictures

COMPILED = ComputeMode(torch.float64, compiled=True)
SIGLIP: dict[str, Any] = {
    "embed_dim": 192,
    "init_logit_bias": -10,
    "custom_text": True,
    "vision_cfg": {
        "image_size": 224,
        "timm_model_name": "vit_tiny_patch16_224",
        "timm_model_pretrained": False,
        "timm_pool": "map",
        "timm_proj": "none",
    },
    "text_cfg": {
        "context_length": 16,
        "vocab_size": 100,
        "hf_tokenizer_name": "timm/ViT-B-16-SigLIP",
        "width": 64,
        "heads": 2,
        "layers": 3,
        "no_causal_mask": True,
        "proj_bias": True,
        "pool_type": "last",
        "norm_kwargs": {"eps": 1e-6},
    },
}
PARTS = ["image", "text"]


def built(config: dict[str, Any], size: int = 32) -> OpenClipTowers:
    """Towers in float64, with biases and gains that are not 0 and 1."""
    torch.manual_seed(3)
    made = OpenClipTowers("made up", config, Preprocess(size, (0.5,) * 3, (0.25,) * 3)).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return made


@pytest.fixture(scope="module")
def _siglip() -> OpenClipTowers:
    made = built(SIGLIP, 64)
    trunk: Any = made.model.visual.trunk
    trunk.set_input_size(64)
    trunk.blocks = trunk.blocks[:3]
    return made.double()


@pytest.fixture
def siglip(_siglip: OpenClipTowers) -> OpenClipTowers:
    return copy.deepcopy(_siglip)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[Any]:
    """Compilation from the beginning; the graphs that were compiled. Its parameter is the backend."""
    torch._dynamo.reset()
    monkeypatch.setattr(fast, "_cache", {})
    inner: Callable[..., Any] = lookup_backend(getattr(request, "param", "aot_eager"))
    graphs: list[Any] = []

    def counted(graph: Any, inputs: Any, **options: Any) -> Any:
        graphs.append(graph)
        return inner(graph, inputs, **options)

    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: plain(function, backend=counted, **options))
    return graphs


def run(model: OpenClipTowers, how: ComputeMode | None, what: str, count: int = 3) -> dict[str, Tensor]:
    """Features and all gradients."""
    model.zero_grad()
    made = torch.Generator().manual_seed(1)
    size = model.preprocess.size
    pictures = torch.randn(count, 3, size, size, dtype=torch.float64, generator=made)
    text = model.config["text_cfg"]
    tokens = torch.randint(1, text["vocab_size"] - 1, (count, text["context_length"]), generator=made)
    tokens[:, -1] = text["vocab_size"] - 1
    with computing(how):
        found = model.image_features(pictures) if what == "image" else model.text_backbone(tokens)
    weight = torch.linspace(-1, 2, found.numel(), dtype=found.dtype).view_as(found)
    (weight * found + found.square()).sum().backward()
    gradients = {name: item.grad for name, item in model.named_parameters() if item.grad is not None}
    return {"value": found.detach(), **gradients}


def check(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert len(expected) > 20
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("compiled", ["inductor" if shutil.which("c++") else "aot_eager"], indirect=True)
@pytest.mark.parametrize("what", PARTS)
def test_compiled_blocks_are_those_of_the_modules_and_compiled_once(
    siglip: OpenClipTowers, compiled: list[Any], what: str
) -> None:
    before = {name: value.clone() for name, value in siglip.state_dict().items()}
    names = {name: type(module) for name, module in siglip.named_modules()}
    entries = {name: set(vars(module)) for name, module in siglip.named_modules()}
    assert not siglip.has_fast_path
    expected = run(siglip, None, what)
    assert not compiled
    check(run(siglip, COMPILED, what), expected)
    assert len(compiled) == 1  # three blocks
    check(run(copy.deepcopy(siglip), COMPILED, what), expected)  # another model of the same shape
    assert len(compiled) == 1
    assert {name: type(module) for name, module in siglip.named_modules()} == names
    assert {name: set(vars(module)) for name, module in siglip.named_modules()} == entries
    assert siglip.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in siglip.state_dict().items())
    pickle.dumps(siglip)
    check(run(siglip, None, what), expected)
    assert len(compiled) == 1


@pytest.mark.parametrize("what", PARTS)
def test_plain_blocks_are_fused_where_the_kernels_take_them(
    siglip: OpenClipTowers, compiled: list[Any], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    expected = run(siglip, None, what)
    asked: list[tuple[int, int]] = []

    def can(device: torch.device, dtype: torch.dtype, length: int, head: int, **_: Any) -> bool:
        asked.append((length, head))
        return True

    monkeypatch.setattr(fused, "can", can)
    check(run(siglip, ComputeMode(torch.float64, compiled=True, fused=True), what), expected)
    assert asked == [(17, 64) if what == "image" else (16, 32)]
    assert not compiled
    siglip.checkpoint_activations()  # not what fused blocks do
    check(run(siglip, ComputeMode(torch.float64, fused=True), what), expected)
    assert len(asked) == 1


@pytest.mark.parametrize("what", PARTS)
def test_recomputed_activations_change_nothing(siglip: OpenClipTowers, compiled: list[Any], what: str) -> None:
    expected = run(siglip, None, what)
    siglip.checkpoint_activations()
    check(run(siglip, COMPILED, what), expected)
    assert len(compiled) <= 2
    owner: Any = siglip.model.visual.trunk if what == "image" else siglip.model.text.transformer
    assert owner.grad_checkpointing


@pytest.mark.parametrize("what", PARTS)
@pytest.mark.parametrize(
    "changes",
    [
        {"vision_cfg": {"pool_type": "avg"}, "text_cfg": {"pool_type": "last"}},
        {"vision_cfg": {"ls_init_value": 0.1}, "text_cfg": {"ls_init_value": 0.1}},
    ],
    ids=["other pooling", "layer scale"],
)
def test_open_clips_own_towers_that_are_not_plain(changes: dict[str, Any], compiled: list[Any], what: str) -> None:
    config = copy.deepcopy(TINY)
    for part, values in changes.items():
        config[part] |= {"layers": 3, **values}
    config["text_cfg"] |= {"vocab_size": 100}
    model = built(config)
    expected = run(model, None, what)
    check(run(model, COMPILED, what), expected)
    assert len(compiled) == 1
    check(run(model, ComputeMode(torch.float64, compiled=True, fused=True), what), expected)


def test_towers_of_other_kinds_and_modes_without_compilation_are_left(siglip: OpenClipTowers) -> None:
    pictures = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    plain = siglip.image_features(pictures)
    with computing(ComputeMode(torch.float64)):
        assert torch.equal(siglip.image_features(pictures), plain)

    class Sharded(own_blocks.Block):
        """As one whose weights exist in its own call alone."""

    siglip.model.visual.trunk.blocks[1].__class__ = Sharded
    assert own_blocks._stack(siglip.model.visual) is None
    with computing(COMPILED):
        assert torch.equal(siglip.image_features(pictures), plain)


def test_an_error_inside_leaves_no_trace(siglip: OpenClipTowers) -> None:
    with pytest.raises(AssertionError, match="doesn't match"), computing(COMPILED):
        siglip.image_features(torch.zeros(1, 3, 16, 16, dtype=torch.float64))  # not the tower's size
    assert all("forward" not in vars(module) for module in siglip.modules())


def test_values_between_blocks_are_in_the_working_precision(siglip: OpenClipTowers, compiled: list[Any]) -> None:
    siglip.float()
    pictures = torch.randn(4, 3, 64, 64)
    seen: list[torch.dtype] = []
    handles = [
        block.register_forward_hook(lambda module, given, made: seen.append(made.dtype))
        for block in siglip.model.visual.trunk.blocks
    ]
    with torch.no_grad():
        exact = siglip.image_features(pictures)
    seen.clear()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), computing(ComputeMode(torch.bfloat16, compiled=True)):
        rough = siglip.image_features(pictures).float()
    for handle in handles:
        handle.remove()
    assert seen == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert 0 < (rough - exact).norm() / exact.norm() < 0.02


def test_steps_are_recorded_over_towers_that_were_looked_at(siglip: OpenClipTowers) -> None:
    assert siglip.records_steps
    assert built(TINY).records_steps
    causal = copy.deepcopy(SIGLIP)
    causal["text_cfg"]["no_causal_mask"] = False
    assert not built(causal).records_steps
    convolutions = copy.deepcopy(SIGLIP)
    convolutions["vision_cfg"] |= {"timm_model_name": "resnet10t", "timm_pool": "avg", "timm_proj": "linear"}
    assert not built(convolutions).records_steps


def test_a_run_over_compiled_blocks_ends_where_the_plain_one_ends(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A made-up round with a made-up tokenizer; shares of the gradient are measured, so blocks are gone back twice."""
    monkeypatch.setitem(ARCHITECTURES, "siglip-tiny", SIGLIP)
    shape = Shape("siglip-tiny", 2, 4, None, 1, "a photo of a {}", 0.05, 16, 8, 4, 224)
    config = train_config(shape, steps=2, log_every=1, device="cpu", precision="float64", optimizer="plain")
    data = made_up_round(shape, write_pictures(tmp_path / "pixels.bin", shape.images, shape.size), form="published")

    def trained() -> dict[str, Tensor]:
        runtime = Runtime(torch.device("cpu"))
        method, plan = made_up_run(shape, data, config, runtime, paired=False, form="published")
        train(method, data, plan, runtime)
        return method.state_dict()

    plain = trained()
    assert not compiled
    monkeypatch.setattr(compute_mode, "speed_of", lambda config, device: "compiled")
    for name, value in trained().items():
        torch.testing.assert_close(value, plain[name], rtol=1e-9, atol=1e-9, msg=name)
    assert 2 <= len(compiled) <= 6  # blocks of two towers, with and without a gradient; not one for each layer
