"""Steps recorded once and played back: a CUDA graph of the whole step, from the towers to the optimizer.

A step is some thousands of kernels, and a host that launches them one by one falls behind the GPU. A step whose shapes
repeat is recorded (forward, backward, norm, optimizer, moving averages) and played back from then on: one launch. What
changes from step to step (pictures, tokens, positions, learning rate, the step's number) stands in tensors that are
written before. The kernels are the same, in the same order.

The first steps of every shape run as usual: kernels are compiled and chosen in them. A step that cannot be recorded
runs as usual too, and so do all after it, after one warning.

Several ranks record together, NCCL's collective operations included. Such an operation is recorded on all ranks or on
none, so ranks agree before each step on what they do: shapes may differ from rank to rank (how texts share rows), and
where they ask for different recordings the step runs as usual.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from holdfast.data.round import Batch
from holdfast.runtime import stream_for

_WARM = 3  # steps of a shape before it is recorded
_MOST = 6  # recordings of a run; shapes beyond that run as usual
_LAUNCH, _RECORD = -1, -2  # what a rank would do with a step; from 0: play back the recording of that number
_log = logging.getLogger(__name__)

Result = TypeVar("Result")
Compute = Callable[[Batch, bool], Result]  # a batch, and whether gradient shares are measured in this step


@dataclass
class _Recording:
    number: int  # the same on all ranks: they record together
    graph: torch.cuda.CUDAGraph
    result: Any  # tensors that every playback fills anew


class Steps:
    """Runs steps on a stream of its own, as they come or from a recording."""

    def __init__(
        self,
        compute: Compute[Any],
        device: torch.device,
        *,
        record: bool,
        agree: Callable[[int], bool] | None = None,  # whether all ranks say the same number; None: there is one rank
    ) -> None:
        self._compute, self._device, self._record = compute, device, record
        self._agree = agree or (lambda number: True)
        self._stream = stream_for(device, "steps") if record else None
        self._pool: Any = None  # memory that all recordings share: only one of them runs at a time
        self._recordings: dict[Any, _Recording] = {}
        self._inputs: dict[Any, Batch] = {}
        self._seen: dict[Any, int] = {}
        self.played = 0  # steps that came from a recording

    @contextmanager
    def stream(self) -> Generator[None]:
        """Everything in here runs where recordings are made: what a step leaves behind belongs to that stream."""
        if self._stream is None:
            yield
            return
        before = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            yield
        before.wait_stream(self._stream)

    def run(self, batch: Batch, measures: bool) -> tuple[Any, bool]:
        """The step's result, and whether it was played back."""
        if not self._record:
            return self._compute(batch, measures), False
        shape = _shape(batch)
        recording = self._recordings.get((shape, measures))
        wanted = _LAUNCH if recording is None else recording.number
        if recording is None:
            seen = self._seen[shape] = self._seen.get(shape, 0) + 1
            wanted = _RECORD if seen > _WARM and len(self._recordings) < _MOST else _LAUNCH
        if not self._agree(wanted):
            recording, wanted = None, _LAUNCH
        if wanted == _RECORD:
            recording = self._make(shape, batch, measures)
        if recording is None:
            result = self._compute(batch, measures), False
            if self._recordings:
                torch.cuda.empty_cache()  # a shape of its own: what it took is not kept beside the recordings' memory
            return result
        _copy(batch, self._inputs[shape])
        recording.graph.replay()
        self.played += 1
        return recording.result, True

    def close(self) -> None:
        """Forget all recordings: a process group that is part of one does not end before it."""
        self._record = False
        if self._recordings and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the last of them may be under way
        self._recordings.clear()

    def _make(self, shape: Any, batch: Batch, measures: bool) -> _Recording | None:
        inputs = self._inputs.setdefault(shape, cast(Batch, _like(batch)))
        _copy(batch, inputs)
        graph = torch.cuda.CUDAGraph()
        result, reason = None, ""
        try:
            # The loader's thread goes on meanwhile, on a stream of its own: hence "thread_local".
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                result = self._compute(inputs, measures)
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if not self._agree(int(not reason)) or reason:
            reason = reason or "another rank could not record it"
            _log.warning("the step could not be recorded as a CUDA graph and runs as usual: %s", reason)
            self.close()
            return None
        self._pool = self._pool or graph.pool()
        made = self._recordings[(shape, measures)] = _Recording(len(self._recordings), graph, result)
        return made


def _shape(values: Any) -> Any:
    """What must be the same for a recording to fit: sizes, types, what is absent, and plain numbers."""
    if isinstance(values, Tensor):
        return tuple(values.shape), values.dtype
    if is_dataclass(values):
        return tuple(_shape(getattr(values, field.name)) for field in fields(values))
    return values


def _like(values: Any) -> Any:
    """The same with tensors of its own."""
    if isinstance(values, Tensor):
        return torch.empty_like(values)
    if is_dataclass(values) and not isinstance(values, type):
        return replace(values, **{field.name: _like(getattr(values, field.name)) for field in fields(values)})
    return values


def _copy(source: Any, target: Any) -> None:
    if isinstance(source, Tensor):
        target.copy_(source)
    elif is_dataclass(source):
        for field in fields(source):
            _copy(getattr(source, field.name), getattr(target, field.name))
