"""Checkpoints of the method's authors, by a naive forward pass over their tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from holdfast.errors import UserError
from holdfast.model.folder import load_model, save_model
from holdfast.model.importers import import_model
from holdfast.model.openclip import TINY, load_towers
from holdfast.model.openclip_towers import create_model
from tests.model.foreign import disturb

CLASSES = ["clear", "overcast", "foggy"]
TEMPLATE = "the weather is {}."


def checkpoint(path: Path, *, rows: int = 5, prefix: str = "model.", **more: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = create_model(TINY | {"quick_gelu": True})
    disturb(model)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    width, dim = state["text_projection"].shape
    state["projection_fn_A"] = torch.randn(rows, width, 4) * width**-0.5
    state["projection_fn_B"] = 0.3 * torch.randn(rows, 4, dim)
    state |= more
    torch.save({prefix + name: value for name, value in state.items()}, path)
    return state


def block(x: Tensor, state: dict[str, Tensor], name: str, heads: int, *, causal: bool) -> Tensor:
    """A residual attention block, spelled out."""
    norm = functional.layer_norm(x, x.shape[-1:], state[f"{name}.ln_1.weight"], state[f"{name}.ln_1.bias"])
    joint = norm @ state[f"{name}.attn.in_proj_weight"].T + state[f"{name}.attn.in_proj_bias"]
    query, key, value = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in joint.chunk(3, dim=-1))
    score = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    if causal:
        score = score + torch.full(score.shape[-2:], -torch.inf).triu(1)
    mixed = (score.softmax(-1) @ value).transpose(1, 2).flatten(2)
    x = x + mixed @ state[f"{name}.attn.out_proj.weight"].T + state[f"{name}.attn.out_proj.bias"]
    norm = functional.layer_norm(x, x.shape[-1:], state[f"{name}.ln_2.weight"], state[f"{name}.ln_2.bias"])
    wide = norm @ state[f"{name}.mlp.c_fc.weight"].T + state[f"{name}.mlp.c_fc.bias"]
    wide = wide * torch.sigmoid(1.702 * wide)
    return x + wide @ state[f"{name}.mlp.c_proj.weight"].T + state[f"{name}.mlp.c_proj.bias"]


def text_features(state: dict[str, Tensor], tokens: Tensor, head: int) -> Tensor:
    x = state["token_embedding.weight"][tokens] + state["positional_embedding"]
    for layer in range(2):
        x = block(x, state, f"transformer.resblocks.{layer}", TINY["text_cfg"]["heads"], causal=True)
    x = functional.layer_norm(x, x.shape[-1:], state["ln_final.weight"], state["ln_final.bias"])
    raw = x[torch.arange(len(x)), tokens.argmax(dim=-1)]
    return raw @ (state["text_projection"] + state["projection_fn_A"][head] @ state["projection_fn_B"][head])


def image_features(state: dict[str, Tensor], images: Tensor) -> Tensor:
    patches = functional.conv2d(images, state["visual.conv1.weight"], stride=8).flatten(2).transpose(1, 2)
    first = state["visual.class_embedding"].expand(len(images), 1, -1)
    x = torch.cat([first, patches], dim=1) + state["visual.positional_embedding"]
    x = functional.layer_norm(x, x.shape[-1:], state["visual.ln_pre.weight"], state["visual.ln_pre.bias"])
    for layer in range(2):
        x = block(x, state, f"visual.transformer.resblocks.{layer}", 2, causal=False)
    x = functional.layer_norm(x[:, 0], x.shape[-1:], state["visual.ln_post.weight"], state["visual.ln_post.bias"])
    return x @ state["visual.proj"]


@pytest.mark.parametrize("prefix", ["model.", "module.model.", ""])
@torch.no_grad()
def test_class_features_are_those_of_the_authors_forward_pass(tmp_path: Path, prefix: str) -> None:
    state = checkpoint(tmp_path / "authors.pt", prefix=prefix)
    found = import_model(tmp_path / "authors.pt", architecture="tiny", classes=CLASSES, template=TEMPLATE)
    assert "task-dependent heads" in found.source.words
    assert "2 of its 5 heads belong to no class" in found.notes[0]
    save_model(found.classifier, tmp_path / "model")
    model = load_model(tmp_path / "model")
    tokens = load_towers("tiny").tokenize([TEMPLATE.format(name) for name in CLASSES])
    expected = torch.cat([text_features(state, tokens[k : k + 1], k) for k in range(3)])
    torch.testing.assert_close(model.class_features(), functional.normalize(expected, dim=-1), rtol=0, atol=1e-5)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model.towers.image_features(images), image_features(state, images), rtol=0, atol=1e-5)
    plain = text_features(state | {"projection_fn_B": torch.zeros_like(state["projection_fn_B"])}, tokens, 0)
    assert (functional.normalize(plain, dim=-1) - model.class_features()).abs().max() > 0.01


def test_heads_that_are_zero_are_none(tmp_path: Path) -> None:
    checkpoint(tmp_path / "authors.pt", projection_fn_B=torch.zeros(5, 4, 64))
    found = import_model(tmp_path / "authors.pt", architecture="tiny")
    assert found.classifier.heads.spec() == []
    assert found.classifier.classes == ()


def test_what_does_not_fit_is_refused(tmp_path: Path, tried: Callable[..., None]) -> None:
    tried("bad inputs", 6)
    path = tmp_path / "authors.pt"
    checkpoint(path)
    with pytest.raises(UserError, match="does not name their classes"):
        import_model(path, architecture="tiny")
    with pytest.raises(UserError, match="fewer task heads"):
        import_model(path, architecture="tiny", classes=[f"class {k}" for k in range(6)])
    with pytest.raises(UserError, match=r"another architecture|another text tower"):
        import_model(path, architecture="RN50", classes=CLASSES)
    with pytest.raises(UserError) as refused:
        load_towers("tiny", path)
    assert "holdfast import" in refused.value.text()
    checkpoint(path, projection_fn_C=torch.zeros(1))
    with pytest.raises(UserError) as refused:
        import_model(path, architecture="tiny", classes=CLASSES)
    assert "projection_fn_C" in refused.value.text()
    checkpoint(path, projection_fn_B=torch.zeros(5, 3, 64))
    with pytest.raises(UserError, match="heads of another model"):
        import_model(path, architecture="tiny", classes=CLASSES)
