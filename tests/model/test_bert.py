"""BERT in plain PyTorch against the one of transformers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from holdfast.errors import UserError
from holdfast.model.bert import Bert
from holdfast.model.sentence_towers import MINILM

SMALL: dict[str, Any] = {
    **MINILM,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 50,
}


def test_weights_values_and_gradients_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    ours, drawn = Bert(SMALL), torch.rand(4)
    torch.manual_seed(3)
    config = transformers.BertConfig(**SMALL, attn_implementation="sdpa")
    theirs, drawn_by_theirs = transformers.BertModel(config, add_pooling_layer=False).eval(), torch.rand(4)
    assert torch.equal(drawn, drawn_by_theirs)  # what is drawn after it by the same seed stays the same
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in ours.state_dict().items())

    tokens = torch.randint(1, 50, (5, 9), generator=torch.Generator().manual_seed(0))
    tokens[0, 4:], tokens[3, 1:] = 0, 0
    words = tokens != 0
    found = ours(tokens, words)
    expected = theirs(input_ids=tokens, attention_mask=words[:, None, None, :]).last_hidden_state
    assert torch.equal(found, expected)
    weights = torch.linspace(-1, 1, found.numel()).view_as(found)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for (name, value), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(value.grad, other.grad), name


def test_what_stands_behind_the_end_of_a_text_changes_nothing() -> None:
    torch.manual_seed(0)
    bert = Bert(SMALL)
    tokens = torch.tensor([[7, 8, 9, 0, 0, 0]])
    longer = bert(tokens, tokens != 0)[:, :3]
    torch.testing.assert_close(longer, bert(tokens[:, :3], tokens[:, :3] != 0))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", 25),
        ("num_hidden_layers", -1),
        ("vocab_size", "many"),
        ("hidden_act", "relu"),
        ("layer_norm_eps", 0.0),
        ("is_decoder", True),
    ],
)
def test_settings_that_make_no_bert(tried: Callable[..., None], name: str, value: Any) -> None:
    tried("bad inputs")
    with pytest.raises(UserError, match="make no BERT"):
        Bert({**SMALL, name: value})


def test_missing_settings(tried: Callable[..., None]) -> None:
    tried("bad inputs")
    with pytest.raises(UserError, match="vocab_size = None"):
        Bert({name: value for name, value in SMALL.items() if name != "vocab_size"})


def test_towers_of_parts_import_no_other_library_of_towers() -> None:
    script = """
import sys
from holdfast.model.bert import Bert
from holdfast.model.parts import PartTowers
from holdfast.rounds.round import Round
heavy = ("transformers", "torchvision", "timm", "open_clip", "scipy", "pandas", "torch._dynamo")
print([name for name in heavy if name in sys.modules])
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
