"""Copies of a model that hold its memory, but for a few parameters of their own.

A round looks at hundreds of models that differ in one matrix. A deep copy walks through every attribute of a module,
which takes several times as long as the copy of the matrix. Here modules, parameters and buffers are new objects;
whatever else a module has is the model's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


def with_own_parameters(module: Module, parameters: Iterable[Tensor]) -> Module | None:
    """A copy for looking at, in evaluation mode, with memory of its own for these parameters alone.

    None where a module computes by more than its class and what is registered in it.
    """
    if any("forward" in vars(item) or isinstance(item, torch.jit.ScriptModule) for item in module.modules()):
        return None
    own = {id(parameter) for parameter in parameters}
    modules: dict[int, nn.Module] = {}
    tensors: dict[int, nn.Parameter] = {}  # one that is registered twice stays one

    def parameter_of(found: nn.Parameter) -> nn.Parameter:
        if id(found) not in tensors:
            memory = found.detach()
            memory = memory.clone() if id(found) in own else memory
            tensors[id(found)] = nn.Parameter(memory, requires_grad=False)
        return tensors[id(found)]

    def copied(item: nn.Module) -> nn.Module:
        if id(item) in modules:
            return modules[id(item)]
        made = modules[id(item)] = type(item).__new__(type(item))
        state = vars(made)
        state.update(vars(item), training=False)
        for registry, made_of in (("_parameters", parameter_of), ("_buffers", Tensor.detach), ("_modules", copied)):
            found = vars(item)[registry]
            state[registry] = {name: None if value is None else made_of(value) for name, value in found.items()}
        return made

    return cast(Module, copied(module))
