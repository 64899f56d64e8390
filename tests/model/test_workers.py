"""Items computed in threads of their own: the same results for any number of threads."""

from __future__ import annotations

from contextlib import suppress
from threading import Barrier, BrokenBarrierError, current_thread

import pytest
import torch
from torch import Tensor

from holdfast.candidates.solver import minimise_linear
from holdfast.model.openclip import load_towers
from holdfast.model.openclip_towers import OpenClipTowers
from holdfast.model.prompt_features import prompt_backbone
from holdfast.model.workers import each_in_a_thread


@pytest.fixture(autouse=True)
def two_threads() -> object:
    usual = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(usual)


def test_results_come_in_order_from_threads_that_compute_alone() -> None:
    met = Barrier(2)

    def seen(item: int) -> tuple[int, int, str, bool]:
        met.wait(60)  # both threads are there at once, or nobody goes on
        return item, torch.get_num_threads(), current_thread().name, torch.is_grad_enabled()

    with torch.no_grad():
        found = each_in_a_thread(seen, range(4))
    assert [item for item, *_ in found] == [0, 1, 2, 3]
    assert {threads for _, threads, *_ in found} == {1}
    assert len({name for *_, name, _ in found}) == 2
    assert not any(enabled for *_, enabled in found)  # as where they were asked for
    assert torch.get_num_threads() == 2


def test_a_fault_is_raised_and_no_threads_are_fewer_than_one() -> None:
    def fails(item: int) -> int:
        raise ZeroDivisionError(item)

    with pytest.raises(ZeroDivisionError):
        each_in_a_thread(fails, [1, 2, 3])
    assert each_in_a_thread(fails, []) == []
    assert torch.get_num_threads() == 2


def test_the_bits_of_a_fit_do_not_depend_on_the_number_of_threads() -> None:
    generator = torch.Generator().manual_seed(0)
    columns = [torch.randn(300, 400, dtype=torch.float64, generator=generator) for _ in range(3)]
    wanted = torch.randn(300, 3, dtype=torch.float64, generator=generator)

    def fit(part: Tensor) -> Tensor:
        unknown = torch.zeros(400, 3, dtype=torch.float64, requires_grad=True)
        minimise_linear(
            unknown, part, torch.full((400, 1), 0.1).double(), lambda reached: (reached - wanted).square().sum()
        )
        return unknown.detach()

    several = each_in_a_thread(fit, columns)
    torch.set_num_threads(1)
    assert all(torch.equal(one, other) for one, other in zip(each_in_a_thread(fit, columns), several, strict=True))
    exact = torch.linalg.solve(columns[0].T @ columns[0] + 0.1 * torch.eye(400), columns[0].T @ wanted)
    assert torch.allclose(several[0], exact, atol=1e-3)


def test_prompts_that_several_threads_ask_for_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    towers = load_towers("tiny", None, seed=0).requires_grad_(False)
    tokens, asked, met = towers.tokenize(["a dog", "a house"]), list[int](), Barrier(2)
    plain = OpenClipTowers.text_backbone

    def counted(towers: OpenClipTowers, tokens: Tensor) -> Tensor:
        asked.append(len(tokens))
        with suppress(BrokenBarrierError):
            met.wait(1)  # gives a second thread the time to come in here, too
        return plain(towers, tokens)

    monkeypatch.setattr(OpenClipTowers, "text_backbone", counted)
    with torch.no_grad():
        found = each_in_a_thread(lambda _: prompt_backbone(towers, tokens), range(2))
        assert asked == [2]
        assert all(torch.equal(one, plain(towers, tokens)) for one in found)
