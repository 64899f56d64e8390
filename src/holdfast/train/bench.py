"""How long a step takes on this machine, and where the time goes: measured in the training loop itself."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from holdfast.config import TrainConfig
from holdfast.data.loader import RoundSampler, ViewSettings
from holdfast.data.round import Draw, RoundData
from holdfast.methods.base import Method
from holdfast.runtime import Runtime
from holdfast.train.compute_mode import working_dtype
from holdfast.train.feature_cache import can_cache
from holdfast.train.loop import TrainSpec, batch_sizes, train

PARTS = ("loader", "forward", "backward", "optimizer", "step", "logging")


@dataclass(frozen=True)
class Figures:
    """What a run of the loop took. Times are of whole steps, logging and gradient shares included."""

    milliseconds: float  # mean over the timed steps
    fastest: float  # of the stretches between two logged steps
    slowest: float
    images_per_second: float
    # Most that was held at once on the GPU, recordings and free room between included; on a CPU by the whole process.
    memory_gib: float
    allocated_gib: float  # most that tensors took at once; what a recorded step takes is counted when it is recorded
    teraflop: float  # the model's own arithmetic a step: towers, forward and backward, texts cut to their length
    matrix_rate: float  # TFLOP/s that this device reaches on one large matrix product
    share: float  # of that rate, on all ranks
    parts: dict[str, float]  # mean milliseconds of each part of a step
    steps: int
    first_step_seconds: float  # compilation and warm-up

    def to_json(self) -> dict[str, Any]:
        """As it stands in a results file."""
        return asdict(self)


class _Watch:
    """Notes when parts of steps end: events on a GPU, so that nothing waits, the clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[tuple[str, Any]] = []
        self.counting = False

    def lap(self, part: str) -> None:
        if not self.counting:
            return
        mark: Any = time.perf_counter()
        if self.cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self.marks.append((part, mark))

    def means(self, steps: int) -> dict[str, float]:
        """Mean milliseconds of each part."""
        total: dict[str, float] = {part: 0.0 for part in PARTS}  # noqa: C420
        for (_, before), (part, mark) in zip(self.marks, self.marks[1:], strict=False):
            total[part] += before.elapsed_time(mark) if self.cuda else 1000 * (mark - before)
        return {part: value / steps for part, value in total.items() if value}


class _Clock:
    """Told of every logged step, whose values have just been read from the device: nothing is under way then."""

    def __init__(self, watch: _Watch, warm_up: int) -> None:
        self.watch, self.warm_up = watch, warm_up
        self.times: list[tuple[int, float]] = []
        self.began = time.perf_counter()
        self.first = 0.0

    def step(self, done: int, values: Mapping[str, float]) -> None:
        """Note the time."""
        now = time.perf_counter()
        self.first = self.first or now - self.began
        if done < self.warm_up:
            return
        self.times.append((done, now))
        self.watch.counting = True

    def evaluated(self, done: int, record: Mapping[str, Any]) -> None:
        """Nothing is evaluated."""


def measure(
    method: Method, data: RoundData, plan: TrainSpec, runtime: Runtime, *, steps: int = 50, warm_up: int = 20
) -> Figures:
    """Run ``warm_up`` and then ``steps`` steps of the loop and time the latter. Every rank returns the same figures.

    Time is read where the loop logs; a round that logs more seldom than ``steps`` is made to log that often.
    """
    every = min(plan.config.log_every, max(1, steps))
    warm_up = -(-warm_up // every) * every
    steps = max(every, steps // every * every)
    config = plan.config.model_copy(update={"steps": warm_up + steps, "warmup_steps": 0, "log_every": every})
    watch = _Watch(runtime.device)
    clock = _Clock(watch, warm_up)
    if watch.cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    train(method, data, replace(plan, config=config), runtime, progress=clock, stopwatch=watch)
    return _from_the_first(
        _figures(method, data, replace(plan, config=config), runtime, watch, clock, steps) if runtime.is_main else None
    )


def _from_the_first(figures: Figures | None) -> Figures:
    """The first rank's figures, on every rank."""
    box = [figures]
    if dist.is_initialized():
        dist.broadcast_object_list(box)
    assert box[0] is not None
    return box[0]


def _figures(
    method: Method, data: RoundData, plan: TrainSpec, runtime: Runtime, watch: _Watch, clock: _Clock, steps: int
) -> Figures:
    held = torch.cuda.max_memory_reserved() if watch.cuda else _process_memory()  # before anything else is computed
    taken = torch.cuda.max_memory_allocated() if watch.cuda else 0
    config = plan.config
    stretches = [
        1000 * (later - earlier) / (done - before)
        for (before, earlier), (done, later) in zip(clock.times, clock.times[1:], strict=False)
    ]
    milliseconds = statistics.fmean(stretches)
    draw = RoundSampler(data, batch_sizes(config), plan.seed).draw(0)
    images = len(draw.target) + len(draw.negatives) * method.uses_negatives + len(draw.protected)
    work = step_flop(method, data, draw, plan.views)
    rate = matrix_rate(config, runtime.device)
    return Figures(
        milliseconds=milliseconds,
        fastest=min(stretches),
        slowest=max(stretches),
        images_per_second=1000 * images / milliseconds,
        memory_gib=held / 2**30,
        allocated_gib=taken / 2**30,
        teraflop=work / 1e12,
        matrix_rate=rate,
        share=work / 1e9 / milliseconds / rate / runtime.world,
        parts=watch.means(steps),
        steps=steps,
        first_step_seconds=clock.first,
    )


def _process_memory() -> int:
    """Bytes of main memory that this process has held at most."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def step_flop(method: Method, data: RoundData, draw: Draw, views: ViewSettings) -> float:
    """Floating-point operations of the towers in one step, as their own modules would do them.

    A backward pass counts twice its forward pass, and once: further ones (GEM's tasks, gradient shares) are not
    counted. What the fast path leaves out is, so that shares can be compared between ways of computing one step.
    Towers whose features are cached (:mod:`holdfast.train.feature_cache`) and sets that a method does not read count
    nothing.
    """
    model = method.model
    towers = model.towers
    weight = towers.projection
    size = towers.preprocess.size
    an_image = _forward_flop(
        towers.image_features, torch.zeros(1, 3, size, size, dtype=weight.dtype, device=weight.device)
    )
    texts = [data.target.texts[i] for i in draw.target] + [data.negatives.texts[i] for i in draw.negatives]
    tokens = towers.shorten(towers.tokenize(texts))
    length = max(tokens.shape[1], model.prompt_tokens.shape[1])
    tokens = torch.nn.functional.pad(tokens, (0, length - tokens.shape[1]))[:1].to(weight.device)
    a_text = _forward_flop(towers.text_backbone, tokens)
    cache_images, cache_texts = can_cache(method, data, views)
    # A last layer alone is too little to count.
    image_passes = 3 if any(item.requires_grad for item in towers.image_backbone_parameters()) else 1 - cache_images
    text_passes = 3 if any(item.requires_grad for item in towers.text_backbone_parameters()) else 1 - cache_texts
    if method.linear:  # its head stands in for the text tower
        text_passes = 0
    captions = len(texts) if method.uses_negatives else 0
    images = len(draw.target) + len(draw.negatives) * method.uses_negatives + len(draw.protected)
    old = len(draw.protected) if views.protected == "paired" else 0
    return an_image * (image_passes * images + old) + a_text * text_passes * (captions + len(model.prompt_tokens))


def _forward_flop(function: Callable[[Tensor], Tensor], values: Tensor) -> int:
    """Floating-point operations of a forward pass.

    With gradients, although none is asked for: without them, under the counter, a view of a weight (the query of
    SigLIP's pooling) says that it has a gradient but not from where, and the counter's hooks on modules fail over it.
    """
    with torch.enable_grad(), FlopCounterMode(display=False) as counter:
        function(values)
    return counter.get_total_flops()


def matrix_rate(config: TrainConfig, device: torch.device) -> float:
    """TFLOP/s of one large matrix product in the working precision: the best of a few."""
    dtype = working_dtype(config, device)
    n = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(n, n, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(3):
            torch.mm(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - began) / 3)
    return 2 * n**3 / best / 1e12
