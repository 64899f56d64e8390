"""Weights of which each rank holds a part of every matrix (FSDP2).

With ``train.shard = "full"`` every block of the two towers is a unit of its own and the rest (embeddings, projections,
heads) the last one. A unit's weights are gathered when it is called and let go behind it, its gradients are averaged
straight into the ranks' parts, and AdamW sees the parts only: 16 bytes a parameter become 16 / N.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from holdfast.data.round import Batch
from holdfast.errors import UserError
from holdfast.methods.base import Method, StepOutput
from holdfast.model.classifier import Classifier
from holdfast.runtime import Runtime, sum_over_ranks
from holdfast.train.parallel import State, Whole, or_zeros


class Sharded(Whole):
    """Every rank holds a part of the model (FSDP2).

    While steps are taken ``method.model`` is a twin of the model it came with, made of shards. The model itself waits
    with empty parameters; it is filled for an evaluation, and for good at the end.
    """

    sharded: ClassVar[bool] = True

    def __init__(self, method: Method, runtime: Runtime) -> None:
        self.method, self.runtime = method, runtime
        _check(method)
        self._model = method.model
        method.model = self._twin = _twin(self._model)
        self.module = _shard(_Root(method), self._twin, runtime)
        self._find_parameters()
        self._empty()

    def average(self) -> None:
        """The backward pass has averaged gradients into the shards."""

    def gradient_of(self, loss: Tensor) -> Tensor:
        """This rank's part of a term's gradient, flat.

        The leaves of the graph are gathered weights that come and go: only a backward pass, which averages their
        gradients into the shards, knows what became of them.
        """
        kept = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        loss.backward(retain_graph=True)
        flat = self.gradient()
        for parameter, gradient in zip(self.parameters, kept, strict=True):
            parameter.grad = gradient
        return flat

    def gradient(self) -> Tensor:
        """This rank's part of ``.grad``, flat."""
        return torch.cat([_local(or_zeros(parameter.grad, parameter)).flatten() for parameter in self.parameters])

    def put_gradient(self, flat: Tensor) -> None:
        """The inverse of :meth:`gradient`."""
        parts = flat.split([_local(parameter).numel() for parameter in self.parameters])
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = _like(parameter, part.view_as(_local(parameter)))

    def total(self, sums: Tensor) -> Tensor:
        """The ranks' sums, added up."""
        return sum_over_ranks(sums)

    def norm(self) -> Tensor:
        """Length of the whole gradient."""
        norm = super().norm()
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @contextmanager
    def whole(self) -> Generator[Method]:
        """The method with its own model, filled."""
        self._fill()
        self.method.model = self._model
        try:
            yield self.method
        finally:
            self.method.model = self._twin
            self._empty()

    def state(self, optimizer: Optimizer) -> tuple[State, State] | None:
        """Whole tensors on the first rank, in main memory; one is gathered at a time."""
        found = optimizer.state_dict()
        method_state = {name: self._gathered(value) for name, value in self.method.state_dict().items()}
        moments = {
            index: {name: self._gathered(value) for name, value in values.items()}
            for index, values in found["state"].items()
        }
        return (method_state, {**found, "state": moments}) if self.runtime.is_main else None

    def load(self, optimizer: Optimizer, method_state: State, optimizer_state: State) -> None:
        """Each rank cuts its part out of whole tensors."""
        own = self.method.state_dict()
        self.method.load_state_dict({name: _cut(own.get(name), value) for name, value in method_state.items()})
        order = [item for group in optimizer.param_groups for item in cast("list[nn.Parameter]", group["params"])]
        moments = {
            index: {name: _cut(order[index], value) for name, value in values.items()}
            for index, values in optimizer_state["state"].items()
        }
        optimizer.load_state_dict({**optimizer_state, "state": moments})

    def end(self) -> None:
        """The method has its own model back, filled."""
        self._fill()
        self.method.model = self._model

    def _gathered(self, value: Any) -> Any:
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if not self.runtime.is_main:
            return None  # the first rank writes; the others help to gather and keep nothing
        return value.cpu() if isinstance(value, Tensor) else value

    @torch.no_grad()
    def _fill(self) -> None:
        parts = dict(self._twin.named_parameters())
        for name, own in self._model.named_parameters():
            part = parts[name]
            own.data = part.full_tensor() if isinstance(part, DTensor) else part.data

    def _empty(self) -> None:
        for own in self._model.parameters():
            own.data = own.data.new_empty(0)


class _Root(nn.Module):
    """What FSDP sees as the outermost module. The method stays free of its hooks."""

    def __init__(self, method: Method) -> None:
        super().__init__()
        self.method = method

    def forward(self, batch: Batch) -> tuple[StepOutput, tuple[Tensor, ...]]:
        """Losses of one step. The terms stand beside them in a tuple, where hooks are put on them: each may be the
        start of a backward pass, before which the last unit's weights have to be there."""
        output: StepOutput = self.method(batch)
        # Copies, so that a term which is a view of another tensor can carry a hook.
        parts = {name: part.clone() for name, part in output.parts.items()}
        tasks = None if output.task_losses is None else output.task_losses.clone()
        output = replace(output, parts=parts, task_losses=tasks)
        return output, (*parts.values(), *(() if tasks is None else (tasks,)))


class _Step(nn.Module):
    """The root without the tuple."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.root = root

    def forward(self, batch: Batch) -> StepOutput:
        """Losses of one step."""
        return self.root(batch)[0]


def blocks(towers: nn.Module) -> Iterator[nn.Module]:
    """The repeated parts of a model, outermost first: members of lists and sequences that have weights."""
    for child in towers.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from (item for item in child if any(True for _ in item.parameters()))
        else:
            yield from blocks(child)


def _shard(root: _Root, model: Classifier, runtime: Runtime) -> nn.Module:
    mesh = init_device_mesh(runtime.device.type, (runtime.world,))
    # A last layer is read without being called (:meth:`TwoTowers.project`): the root gathers it.
    last = {id(parameter) for parameter in model.towers.image_projection_parameters()}
    with _without_scalars(root):
        for block in blocks(model.towers):
            if not any(id(parameter) in last for parameter in block.parameters()):
                fully_shard(block, mesh=mesh)
        fully_shard(root, mesh=mesh)
    return _Step(root)


@contextmanager
def _without_scalars(root: nn.Module) -> Generator[None]:
    """Numbers (CLIP's logit scale) cannot be cut; no feature depends on them and nothing trains them."""
    taken = [
        (module, name, item)
        for module in root.modules()
        for name, item in module.named_parameters(recurse=False)
        if item.ndim == 0
    ]
    for module, name, _ in taken:
        delattr(module, name)
    try:
        yield
    finally:
        for module, name, item in taken:
            module.register_parameter(name, item)


def _check(method: Method) -> None:
    for name, parameter in method.named_parameters():
        if parameter.requires_grad and (parameter.ndim == 0 or not name.startswith("model.")):
            what = "a single number" if parameter.ndim == 0 else "not part of the model"
            raise UserError(
                f"train.shard = 'full' cannot share out {name}",
                expected="trained weights that are vectors or matrices of the method's model",
                found=f"{name} is {what}",
                do="train with shard = 'none', or freeze it",
            )


def _twin(model: Classifier) -> Classifier:
    """A copy with parameters of its own that share the memory of the model's; buffers are the same."""
    shared: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach(), parameter.requires_grad) for parameter in model.parameters()
    }
    shared |= {id(buffer): buffer for buffer in model.buffers()}
    return copy.deepcopy(model, shared)


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _like(parameter: Tensor, part: Tensor) -> Tensor:
    """This rank's part of a tensor that is cut as the parameter is."""
    if not isinstance(parameter, DTensor):
        return part
    mesh, cut = parameter.device_mesh, parameter.placements
    return DTensor.from_local(part, mesh, cut, shape=parameter.shape, stride=parameter.stride())


def _cut(like: Any, value: Any) -> Any:
    """A whole tensor cut as ``like`` is; whatever has another shape (a step count) stays."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
