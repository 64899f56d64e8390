"""Copies that hold a model's memory: what a deep copy says, and nothing that is written to them reaches the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.model.copies import light_copy


class Tied(nn.Module):
    """One layer under two names, a buffer, and an attribute that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.last = nn.Linear(3, 2)
        self.again = self.last
        self.register_parameter("none", None)
        self.names = ["a", "b"]

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(seen)) + self.again(self.body(seen))


def all_but_the_last(module: Tied) -> dict[int, torch.Tensor]:
    tensors = (*module.parameters(), *module.buffers())
    return {id(tensor): tensor for tensor in tensors if tensor is not module.last.weight}


def made() -> tuple[Tied, Tied]:
    torch.manual_seed(0)
    module = Tied().eval()
    copied = light_copy(module, all_but_the_last(module))
    assert copied is not None
    return module, copied


def test_a_copy_says_the_same_and_shares_all_memory_but_its_own() -> None:
    module, copied = made()
    seen = torch.randn(4, 3)
    assert torch.equal(copied(seen), module(seen))
    places = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    apart = {name for name, tensor in copied.state_dict().items() if tensor.data_ptr() != places[name]}
    assert apart == {"last.weight", "again.weight"}
    assert copied.last is copied.again
    assert copied.last.weight is copied.again.weight
    assert copied.none is None
    assert not any(parameter.requires_grad for parameter in copied.parameters())
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_what_is_done_to_a_copy_leaves_the_model_alone() -> None:
    module, copied = made()
    before, seen = {name: tensor.clone() for name, tensor in module.state_dict().items()}, torch.randn(4, 3)
    said = module(seen)
    copied.last.weight.add_(1.0)
    assert not torch.equal(copied(seen), said)
    copied.to(torch.float64)
    copied.body.add_module("more", nn.Identity())
    copied.body[1].num_batches_tracked = torch.tensor(7)
    assert [name for name, _ in module.body.named_children()] == ["0", "1"]
    for name, tensor in module.state_dict().items():
        assert tensor.dtype == before[name].dtype
        assert torch.equal(tensor, before[name])
    assert torch.equal(module(seen), said)


def test_a_module_whose_forward_is_an_attribute_is_not_copied_like_that() -> None:
    """It would compute with the weights of the module that it was made for."""
    module = Tied()
    module.body[0].forward = module.body[0].forward  # as libraries that hook into modules do
    assert light_copy(module, all_but_the_last(module)) is None


@pytest.mark.filterwarnings("ignore:.*torch.jit:Warning")
def test_nor_is_one_that_was_compiled_to_a_script() -> None:
    module = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 2)))
    assert light_copy(module, {}) is None
