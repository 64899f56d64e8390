from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import open_clip
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from holdfast.errors import UserError
from holdfast.model.openclip import build_towers, load_towers
from holdfast.model.openclip_towers import OpenClipTowers, causal_backbone
from holdfast.model.towers import TwoTowers

TEXTS = [
    "fog",
    "the weather is foggy",
    "a long sentence about a tunnel that goes on under a mountain for quite a while",
]


def test_features_are_open_clips_own(towers: OpenClipTowers, images: Tensor) -> None:
    model = open_clip.model.CLIP(**towers.config)
    model.load_state_dict(towers.open_clip_state())
    model.eval()
    tokens = towers.tokenize(TEXTS)
    assert torch.equal(towers.image_features(images), model.encode_image(images))
    projected = towers.text_backbone(tokens) @ towers.projection
    torch.testing.assert_close(projected, model.encode_text(tokens), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("pool", "end"), [("argmax", 2), ("eos", 49407)])
@pytest.mark.parametrize("custom", [False, True])
def test_cutting_tokens_is_exact(variant: Callable[..., OpenClipTowers], pool: str, end: int, custom: bool) -> None:
    towers = variant(text={"pool_type": pool, "eos_id": end}, custom_text=custom).double()
    tokens = towers.tokenize(TEXTS)
    seen: list[int] = []
    towers._text.ln_final.register_forward_hook(lambda _m, _i, output: seen.append(output.shape[1]))
    cut = towers.text_backbone(tokens)
    whole = causal_backbone(towers._text, tokens)
    assert seen == [24, 32]
    torch.testing.assert_close(cut, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pool", ["last", "argmax"])
def test_text_that_sees_its_padding_is_not_cut(variant: Callable[..., OpenClipTowers], pool: str) -> None:
    towers = variant(text={"no_causal_mask": True, "pool_type": pool}, custom_text=True).double()
    tokens = towers.tokenize(TEXTS[:2])
    reference = open_clip.model.CustomTextCLIP(
        **{k: v for k, v in towers.config.items() if k != "custom_text"}
    ).double()
    reference.load_state_dict(towers.open_clip_state())
    expected = reference.eval().encode_text(tokens)
    torch.testing.assert_close(towers.text_backbone(tokens) @ towers.projection, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("text", "trainable"),
    [({}, True), ({"proj_bias": True}, True), ({"proj_type": "none", "width": 64}, False)],
    ids=["parameter", "linear", "none"],
)
def test_each_kind_of_projection(
    variant: Callable[..., OpenClipTowers], text: dict[str, object], trainable: bool
) -> None:
    towers = variant(text=text, custom_text=True).double()
    if towers.bias is not None:
        with torch.no_grad():
            towers.bias.normal_()
    assert isinstance(towers.projection, nn.Parameter) == trainable
    tokens = towers.tokenize(TEXTS)
    reference = open_clip.model.CustomTextCLIP(
        **{k: v for k, v in towers.config.items() if k != "custom_text"}
    ).double()
    reference.load_state_dict(towers.open_clip_state())
    features = towers.text_backbone(tokens) @ towers.projection
    if towers.projection_bias is not None:
        features = features + towers.projection_bias
    torch.testing.assert_close(features, reference.eval().encode_text(tokens), rtol=0, atol=1e-12)


@pytest.mark.parametrize("count", [1, 3, 7])
def test_the_forward_pass_does_not_depend_on_what_is_trained(towers: OpenClipTowers, count: int) -> None:
    images, tokens = torch.randn(count, 3, 32, 32), towers.tokenize((TEXTS * 3)[:count])
    expected = towers.image_features(images), towers.text_backbone(tokens)
    with torch.no_grad():
        without = towers.image_features(images), towers.text_backbone(tokens)
    towers.freeze(image=True, text=True)
    frozen = towers.image_features(images), towers.text_backbone(tokens)
    for other in (without, frozen):
        assert torch.equal(other[0], expected[0])
        assert torch.equal(other[1], expected[1])


def test_batch_norm_never_moves(variant: Callable[..., OpenClipTowers]) -> None:
    towers = variant(vision={"layers": [1, 1, 1, 1], "width": 8, "head_width": 8})
    norms = [module for module in towers.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms
    before = [norm.running_mean.clone() for norm in norms]
    towers.train()
    towers.image_features(torch.randn(4, 3, 32, 32)).sum().backward()
    assert all(torch.equal(norm.running_mean, mean) for norm, mean in zip(norms, before, strict=True))


def test_freezing_a_tower(towers: OpenClipTowers) -> None:
    towers.freeze(text=True)
    assert not towers.projection.requires_grad
    assert all(not parameter.requires_grad for parameter in towers.text_parameters())
    assert all(parameter.requires_grad for parameter in towers.image_parameters())
    towers.freeze(image=True)
    assert not any(parameter.requires_grad for parameter in towers.parameters())


def test_every_trainable_parameter_is_used(towers: OpenClipTowers, images: Tensor) -> None:
    features = (
        towers.image_features(images).sum() + (towers.text_backbone(towers.tokenize(TEXTS)) @ towers.projection).sum()
    )
    features.backward()
    unused = [name for name, value in towers.named_parameters() if value.requires_grad and value.grad is None]
    assert unused == []


def test_rebuilding_from_spec(towers: OpenClipTowers, images: Tensor) -> None:
    again = build_towers(towers.spec())
    again.load_state_dict(towers.state_dict())
    assert again.preprocess == towers.preprocess
    assert torch.equal(again.image_features(images), towers.image_features(images))


def test_seed_decides_random_weights_and_leaves_the_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second, third = (load_towers("tiny", seed=seed).projection for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


@pytest.mark.parametrize("kind", ["weights.safetensors", "weights.pt", "nested.pt"])
def test_weights_from_a_file(towers: OpenClipTowers, tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    state = {name: value.clone() for name, value in towers.open_clip_state().items()}
    if kind.endswith("safetensors"):
        save_file(state, path)
    else:
        torch.save({"state_dict": state, "epoch": 3} if kind == "nested.pt" else state, path)
    loaded = load_towers("tiny", path, seed=99)
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), towers.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("kind", ["weights.safetensors", "weights.pt"])
@pytest.mark.parametrize("keep", [0, 100, 50_000])
def test_a_truncated_file(towers: OpenClipTowers, tmp_path: Path, kind: str, keep: int) -> None:
    path = tmp_path / kind
    (save_file if kind.endswith("safetensors") else torch.save)(towers.open_clip_state(), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match="cannot be read as weights"):
        load_towers("tiny", path)


def test_a_file_that_runs_code_is_refused(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return print, ("trapped",)

    path = tmp_path / "weights.pt"
    torch.save({"state_dict": Trap()}, path)
    with pytest.raises(UserError, match="cannot be read as weights"):
        load_towers("tiny", path)


def test_a_checkpoint_of_another_architecture(variant: Callable[..., OpenClipTowers], tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(variant(text={"layers": 1}).open_clip_state(), path)
    with pytest.raises(UserError, match="another architecture"):
        load_towers("tiny", path)
    save_file({"something": torch.zeros(2)}, path)
    with pytest.raises(UserError, match="another architecture"):
        load_towers("tiny", path)


@pytest.mark.parametrize("shape", [(20, 32), (77, 32), (1, 32), (0, 32), (32, 16), (32,), (1, 32, 32), ()], ids=str)
def test_positions_of_another_text_tower_are_neither_stretched_nor_a_shape_error(
    shape: tuple[int, ...], towers: OpenClipTowers, tmp_path: Path, tried: Callable[..., None]
) -> None:
    tried("bad inputs")
    path = tmp_path / "weights.safetensors"
    save_file({**towers.open_clip_state(), "positional_embedding": torch.zeros(shape)}, path)
    with pytest.raises(UserError, match="positions of another text tower") as caught:
        load_towers("tiny", path)
    assert "32 x 32" in caught.value.expected


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(UserError, match="ViT-B-16"):
        load_towers("ViT-B16")
    with pytest.raises(UserError, match="openai"):
        load_towers("ViT-B-16", "opnai")
    with pytest.raises(UserError, match="openclip"):
        build_towers({"kind": "openclp"})


def test_protocol_is_all_that_is_asked(towers: TwoTowers) -> None:
    tokens = towers.tokenize(TEXTS)
    assert tokens.dtype == torch.int64
    assert tokens.shape == (3, 32)
    assert towers.projection.shape == (towers.text_width, towers.embed_dim)
    assert towers.assets() == {}


def test_a_copy_shares_the_tokenizer_and_nothing_else() -> None:
    towers = load_towers("tiny")
    assert towers.tokenize(["a dog"]).shape == (1, 32)
    other = copy.deepcopy(towers)
    assert other.__dict__["_tokenizer"] is towers.__dict__["_tokenizer"]
    assert other.spec() == towers.spec()
    assert other.state_dict().keys() == towers.state_dict().keys()
    ours = {parameter.data_ptr() for parameter in towers.parameters()}
    for name, parameter in other.named_parameters():
        assert parameter.data_ptr() not in ours, name
        assert torch.equal(parameter, towers.get_parameter(name))
    assert torch.equal(other.tokenize(["a dog"]), towers.tokenize(["a dog"]))
