"""Copies of a model that hold the memory of other tensors in place of some of their own.

A round looks at hundreds of models that differ in one matrix. A deep copy walks through every attribute of every module
to copy it. Here modules, parameters and buffers are new objects; whatever else a module has is the model's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def light_copy(module: Module, memory: Mapping[int, Tensor]) -> Module | None:
    """A copy for looking at, in evaluation mode. ``memory`` has tensors by the id of the one that they stand in for;
    parameters and buffers that are not in it are copied.

    None where a module computes by more than its class and what is registered in it.
    """
    if any("forward" in vars(item) or isinstance(item, torch.jit.ScriptModule) for item in module.modules()):
        return None
    modules: dict[int, nn.Module] = {}
    tensors: dict[int, Tensor] = {}  # one that is registered twice stays one

    def tensor_of(found: Tensor) -> Tensor:
        if id(found) not in tensors:
            held = memory.get(id(found))
            made = found.detach().clone() if held is None else held.detach()
            tensors[id(found)] = nn.Parameter(made, requires_grad=False) if isinstance(found, nn.Parameter) else made
        return tensors[id(found)]

    def copied(item: nn.Module) -> nn.Module:
        if id(item) in modules:
            return modules[id(item)]
        made = modules[id(item)] = type(item).__new__(type(item))
        state = vars(made)
        state.update(vars(item), training=False)
        for registry, made_of in (("_parameters", tensor_of), ("_buffers", tensor_of), ("_modules", copied)):
            found = vars(item)[registry]
            state[registry] = {name: None if value is None else made_of(value) for name, value in found.items()}
        return made

    return cast(Module, copied(module))
