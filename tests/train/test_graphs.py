"""Recording and playing back, with a stand-in for CUDA graphs: what is recorded when, and what happens if it fails."""

from __future__ import annotations

import logging
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from holdfast.data.round import Batch, Images, Kept, Texts
from holdfast.train import cuda_graphs as graphs


def batch(value: float, rows: int = 2) -> Batch:
    images, index = Images(torch.full((rows, 3), value)), torch.arange(rows)
    texts = Texts(index)
    return Batch(images, texts, index, images, texts, index, images, None, index, index, index, rows, rows, rows)


class Stand:
    """A graph that plays back by computing again, from the tensors that it was recorded with."""

    recorded = 0
    fails = False

    def __init__(self) -> None:
        self.again: Any = None

    def replay(self) -> None:
        self.again()

    def pool(self) -> str:
        return "pool"


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> graphs.Steps:
    """Adds up what it is shown, into a tensor that stays."""
    shown = torch.zeros(())
    current: list[Stand] = []

    def compute(shown_batch: Batch, measures: bool) -> torch.Tensor:
        if Stand.fails and current:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")

        def work() -> None:
            images = shown_batch.target_images
            values = images.pixels if images.kept is None else images.kept.features
            shown.add_(values.sum() * (10 if measures else 1))

        if current:
            current[-1].again = work  # recorded, not run
        else:
            work()
        return shown

    @contextmanager
    def record(graph: Stand, **_: Any) -> Any:
        current.append(graph)
        Stand.recorded += 1
        try:
            yield
        finally:
            current.pop()

    Stand.recorded, Stand.fails = 0, False
    for name, value in {
        "Stream": lambda device: device,
        "CUDAGraph": Stand,
        "graph": record,
        "empty_cache": lambda: None,
        "stream": lambda stream: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return graphs.Steps(compute, torch.device("cpu"), record=True)


def test_a_shape_is_recorded_once_and_then_played_back_on_new_values(steps: graphs.Steps) -> None:
    played = [steps.run(batch(float(value)), False)[1] for value in range(6)]
    assert played == [False] * 3 + [True] * 3
    assert Stand.recorded == 1
    assert float(steps.run(batch(1.0), False)[0]) == 6 * sum(range(6)) + 6
    assert float(steps.run(batch(1.0), True)[0]) == 6 * sum(range(6)) + 6 + 60  # measured steps have their own
    assert Stand.recorded == 2
    assert steps.run(batch(1.0, rows=5), False)[1] is False  # another shape runs as usual at first
    assert steps.played == 5


def test_features_in_place_of_pictures_are_copied_into_a_recording(steps: graphs.Steps) -> None:
    def kept(value: float) -> Batch:
        pictures = Images(None, Kept(torch.full((2, 3), value), "image tower"))
        return replace(batch(value), target_images=pictures, negative_images=pictures, protected_images=pictures)

    for value in range(5):
        steps.run(kept(float(value)), False)
    total, played = steps.run(kept(5.0), False)
    assert played
    assert float(total) == 6 * sum(range(6))


def test_what_cannot_be_recorded_runs_as_usual_after_one_warning(
    steps: graphs.Steps, caplog: pytest.LogCaptureFixture
) -> None:
    Stand.fails = True
    with caplog.at_level(logging.WARNING):
        totals = [(float(total), played) for total, played in (steps.run(batch(1.0), False) for _ in range(6))]
    assert totals == [(6.0 * (number + 1), False) for number in range(6)]
    assert Stand.recorded == 1
    assert [record.message for record in caplog.records] == [
        "the step could not be recorded as a CUDA graph and runs as usual: "
        "operation not permitted when stream is capturing"
    ]


def test_ranks_that_do_not_agree_launch_their_step(steps: graphs.Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective operation is recorded on all ranks or on none, and all play back the same recording."""
    others: list[int] = []

    def agree(number: int) -> bool:
        asked.append(number)
        return others.pop(0) == number if others else True

    asked: list[int] = []
    monkeypatch.setattr(steps, "_agree", agree)
    launch, record, made = graphs._LAUNCH, graphs._RECORD, 1
    others[:] = [launch] * 4 + [record, made, 0, launch, record, 0]
    played = [steps.run(batch(1.0), False)[1] for _ in range(9)]
    assert played == [False] * 4 + [True, True, False, False, True]  # the fourth waits for the other rank
    assert asked == [launch] * 3 + [record, record, made, 0, 0, 0, 0]
    assert Stand.recorded == 1
    assert float(steps.run(batch(1.0), False)[0]) == 60.0  # every step ran once


def test_where_another_rank_cannot_record_no_rank_does(
    steps: graphs.Steps, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(steps, "_agree", lambda number: number != 1)  # it agrees to record, and then it fails
    with caplog.at_level(logging.WARNING):
        totals = [(float(total), played) for total, played in (steps.run(batch(1.0), False) for _ in range(6))]
    assert totals == [(6.0 * (number + 1), False) for number in range(6)]
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == ["another rank could not record it"]


def test_recordings_are_let_go_at_the_end(steps: graphs.Steps) -> None:
    """A process group that is part of one does not end before it."""
    for value in range(5):
        steps.run(batch(float(value)), False)
    assert len(steps._recordings) == 1
    steps.close()
    assert not steps._recordings
