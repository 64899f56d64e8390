"""Fused blocks against autograd in float64; on a GPU every kernel against its plain version, and recorded steps."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from holdfast.data.transforms import normalize_views, normalize_views_at_once, random_views
from holdfast.kernels import fast, fused
from holdfast.kernels.cuda import compile as cuda
from holdfast.runtime import Runtime, sums_by
from holdfast.train import loop
from holdfast.train.shapes import SHAPES, made_up_round, made_up_run, train_config, write_pictures
from tests.kernels.test_fast import towers

gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="no GPU that has the kernels"
)


OWNERS = torch.tensor([[0] * 5 + [1] * 7 + [-1] * 5, [2] * 17, [3] + [4] * 2 + [-1] * 14], dtype=torch.int32)


@pytest.mark.parametrize("owners", [None, OWNERS], ids=["pictures", "texts"])
@pytest.mark.parametrize("quick", [False, True])
def test_blocks_have_the_value_and_gradients_of_plain_ones(quick: bool, owners: Tensor | None) -> None:
    blocks = list(towers(quick_gelu=quick).model.visual.transformer.resblocks)
    weights = [fast.block_weights(block) for block in blocks]
    heads, eps = blocks[0].attn.num_heads, blocks[0].ln_1.eps
    values = torch.randn(3, 17, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    mask = None if owners is None else fast._own_text_before(owners)

    def plain() -> Tensor:
        found = values
        for weight in weights:
            found = fast._block(found, weight, mask, heads, False, "quick_gelu" if quick else "gelu", eps, eps)
        return found

    def quickly() -> Tensor:
        found, carried = fused.blocks(values, weights, fused.Shape(3, 17, heads, quick, eps, eps, owners))
        return found + carried

    def value_and_gradients(found: Tensor) -> list[Tensor]:
        weight = torch.linspace(-1, 2, found.numel(), dtype=found.dtype).view_as(found)
        loss = (weight * found + found.square()).sum()
        return [found, *torch.autograd.grad(loss, [values, *(item for group in weights for item in group)])]

    expected, got = value_and_gradients(plain()), value_and_gradients(quickly())
    assert len(expected) == 2 + 12 * len(blocks)
    for item, other in zip(got, expected, strict=True):
        torch.testing.assert_close(item, other, rtol=1e-10, atol=1e-10)


def distance(tensor: Tensor, other: Tensor) -> float:
    return float((tensor.double().cpu() - other.double().cpu()).norm() / other.double().norm())


@gpu
@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("length", [50, 80, 197, 256])
def test_attention_on_the_gpu_is_that_of_plain_words(length: int, owned: bool) -> None:
    images, heads = 3, 2
    owners = torch.randint(0, 6, (images, length), dtype=torch.int32).sort(dim=1).values if owned else None
    shape = fused.Shape(images, length, heads, False, 1e-5, 1e-5, owners)
    on_device = replace(shape, owners=None if owners is None else owners.cuda())
    rows = -(-shape.tokens // 8) * 8
    packed, gradient = torch.randn(rows, 3 * heads * 64).bfloat16(), torch.randn(rows, heads * 64).bfloat16()
    gradient[shape.tokens :] = 0
    mixed, share = fused._attend(packed, shape)
    expected = fused._attend_backward(packed, mixed, gradient, share, shape)
    on_gpu, levels = fused._attend(packed.cuda(), on_device)
    assert distance(on_gpu, mixed) < 0.005
    got = fused._attend_backward(packed.cuda(), on_gpu, gradient.cuda(), levels, on_device)
    assert distance(got[0], expected[0]) < 0.005
    assert distance(got[1], expected[1]) < 0.005


@gpu
@pytest.mark.parametrize(("length", "size"), [(257, 64), (577, 64), (257, 80), (197, 72)])
def test_long_rows_and_other_heads_are_those_of_plain_words(length: int, size: int) -> None:
    from holdfast.kernels import long_attention

    device = torch.device("cuda:0")
    assert fused._attention(device, length, size) is long_attention
    assert fused.can(device, torch.bfloat16, length, size)
    assert not fused.can(device, torch.bfloat16, length, size, owned=True)
    shape = fused.Shape(3, length, 2, False, 1e-5, 1e-5)
    made = torch.Generator().manual_seed(3)
    rows = -(-3 * length // 8) * 8
    packed = torch.randn(rows, 6 * size, generator=made).bfloat16()
    gradient = torch.randn(rows, 2 * size, generator=made).bfloat16()
    gradient[shape.tokens :] = 0
    mixed, share = fused._attend(packed, shape)
    expected = fused._attend_backward(packed, mixed, gradient, share, shape)
    on_gpu, levels = fused._attend(packed.cuda(), shape)
    assert distance(on_gpu, mixed) < 0.01
    got = fused._attend_backward(packed.cuda(), on_gpu, gradient.cuda(), levels, shape)
    assert all(distance(tensor, other) < 0.02 for tensor, other in zip(got, expected, strict=True))


@gpu
@pytest.mark.parametrize("quick", [False, True])
def test_passes_on_the_gpu_are_those_of_plain_words(quick: bool) -> None:
    from holdfast.kernels import triton_ops as kernels

    def pair(*size: int, full: bool = False) -> tuple[Tensor, Tensor]:
        made = torch.randn(size) if full else torch.randn(size).bfloat16()
        return made, made.cuda()

    def active(values: Tensor) -> Tensor:
        full = values.double()
        return full * torch.sigmoid(1.702 * full) if quick else torch.nn.functional.gelu(full)

    def through(gradient: Tensor, values: Tensor) -> Tensor:
        full = values.double().requires_grad_()
        return torch.autograd.grad(active(full), full, gradient.double())[0]

    (x, x_), (c, c_), (e, e_), (g, g_) = pair(1003, 768), pair(768, full=True), pair(1003, 768), pair(1003, 768)
    (z, z_), (gz, gz_) = pair(1003, 3072), pair(1003, 3072)
    (w, w_), (b, b_), (a, a_), (s, s_) = (pair(*size, full=True) for size in ((2304, 768), (2304,), (768,), (768,)))
    normed, scale = fused._normed(x, c, 1e-5)
    both = [
        (fused._normed(x_, c_, 1e-5), (normed, scale)),
        (
            fused._normed_backward(g_, normed.cuda(), scale.cuda(), e_, True),
            fused._normed_backward(g, normed, scale, e, True),
        ),
        ((kernels.activated(z_, quick=quick),), (active(z).bfloat16(),)),
        (
            kernels.activated_backward(gz_, z_, quick=quick),
            (through(gz, z).bfloat16(), active(z).bfloat16(), through(gz, z).sum(dim=0)),
        ),
        ((kernels.column_sums(c_.expand(300, 768).contiguous()),), (300 * c,)),
        (fused._fold(w_, b_, a_, s_, torch.bfloat16), fused._fold(w, b, a, s, torch.bfloat16)),
        (fused._unfold(w_.clone(), b_, w_, a_, s_), fused._unfold(w.clone(), b, w, a, s)),
    ]
    for got, expected in both:
        for item, other in zip(got, expected, strict=True):
            assert distance(item, other) < 1e-3


@gpu
@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(
    ("rows", "outer", "inner"), [(60288, 768, 3072), (1003, 512, 2048), (64, 1024, 4096), (7, 64, 256)]
)
def test_products_with_an_activation_are_the_product_and_then_the_activation(
    rows: int, outer: int, inner: int, quick: bool
) -> None:
    from holdfast.kernels.cuda import products

    assert products.takes(torch.device("cuda:0"), outer, inner)
    made = torch.Generator("cuda").manual_seed(1)

    def some(*size: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(size, device="cuda", generator=made)).bfloat16()

    x, g, up, down, bias = (
        some(rows, outer),
        some(rows, outer),
        some(inner, outer, scale=outer**-0.5),
        None,
        some(inner),
    )
    down = some(outer, inner, scale=outer**-0.5)
    before, active = products.up(x, up, bias, quick=quick)
    assert before is not None
    nothing, alone = products.up(x, up, bias, quick=quick, keep=False)
    assert nothing is None
    assert torch.equal(alone, active)
    full = before.float().requires_grad_()
    wanted = full * torch.sigmoid(1.702 * full) if quick else torch.nn.functional.gelu(full)
    assert distance(before, x.float() @ up.float().T + bias.float()) < 2e-3
    assert distance(active, wanted.detach()) < 2e-3
    (of_before,) = torch.autograd.grad(wanted, full, g.float() @ down.float())
    got = products.down_backward(g, down, before, quick=quick)
    for item, other in zip(got, (of_before, wanted.detach(), of_before.sum(dim=0)), strict=True):
        assert distance(item, other) < 4e-3
    assert torch.equal(got[1], active)
    again = products.down_backward(g, down, before, quick=quick)
    assert all(torch.equal(item, other) for item, other in zip(got, again, strict=True))


@gpu
@pytest.mark.parametrize("length", [50, 145, 196, 197])
def test_attention_for_pictures_is_that_for_any_rows(length: int) -> None:
    from holdfast.kernels import triton_ops as kernels
    from holdfast.kernels.cuda import attention

    images, heads = 5, 3
    assert attention.takes(torch.device("cuda:0"), length, 64)
    made = torch.Generator("cuda").manual_seed(2)
    # Large scores: some of a row's shares are 1, and what stands behind its end would overflow if it were looked at.
    packed = (4 * torch.randn(images * length, 3 * heads * 64, device="cuda", generator=made)).bfloat16()
    gradient = torch.randn(images * length, heads * 64, device="cuda", generator=made).bfloat16()
    out, wanted_out, result, wanted = (torch.empty_like(item) for item in (gradient, gradient, packed, packed))
    levels = attention.attend(packed, out, images, length, heads)
    wanted_levels = kernels.attend(packed, wanted_out, images, length, heads)
    assert distance(out, wanted_out) < 2e-3
    assert torch.equal(levels.isinf(), wanted_levels.isinf())
    torch.testing.assert_close(levels, wanted_levels, rtol=1e-4, atol=1e-4)
    given = (images, length, heads)
    sums = attention.backward(packed, out, gradient, levels, result, *given)
    wanted_sums = kernels.attend_backward(packed, wanted_out, gradient, wanted_levels, wanted, *given)
    assert distance(result, wanted) < 5e-3
    assert distance(sums, wanted_sums) < 5e-3


def test_the_products_gelu_is_the_true_one_but_for_a_rounding() -> None:
    """The polynomial as it stands in the source, over every bf16 number: 1.5e-5 at most away, 97 of 100 the nearest."""
    text = cuda.source("products.cu")
    first = re.search(r"odds = fmaf\(square, (\S+)f, (\S+)f\);", text)
    more = re.findall(r"odds = fmaf\(square, odds, (\S+)f\);", text)
    assert first is not None
    assert len(more) == 3
    values = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16).float()
    values = values[values.abs() < 1000]
    odds = torch.full_like(values, float(first[1]))
    for coefficient in (first[2], *more):
        odds = odds * values.square() + float(coefficient)
    got = values / (1 + torch.exp2(values * odds))
    true = torch.nn.functional.gelu(values.double())
    assert float((got - true).abs().max()) < 1.6e-5
    between = (values.abs() > 1e-3) & (values.abs() < 6)
    nearest = got.bfloat16() == true.float().bfloat16()
    assert float(nearest[between].double().mean()) > 0.965
    step = (got.bfloat16().float() - true.float().bfloat16().float()).abs() / true.float().abs().clamp(min=1e-30)
    assert float(step[between & (values > -4)].max()) < 2**-6


def test_cuda_sources_compile_and_products_are_not_made_to_wait() -> None:
    """Needs the compiler, not a GPU. A remark that products are serialized is what a change of the source can bring."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    from holdfast.kernels.cuda import attention

    def remarks(text: str, *options: str) -> str:
        program = cuda._checked(nvrtc.nvrtcCreateProgram(text.encode(), b"one.cu", 0, [], []))
        flags = [b"--gpu-architecture=sm_90a", b"--ptxas-options=-v", *(option.encode() for option in options)]
        (outcome,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        log = b" " * cuda._checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        assert int(outcome) == 0, log.decode()
        return log.decode()

    for backward in (0, 1):
        for quick in (0, 1):
            assert "serialized" not in remarks(cuda.source("products.cu"), f"-DBACKWARD={backward}", f"-DQUICK={quick}")
    for length in (50, 197):
        text, options = attention.written_out(length)
        log = remarks(text, *options)
        assert "serialized" not in log
        assert " 0 bytes spill stores" in log


@gpu
def test_sums_on_the_gpu_are_those_of_the_cpu_and_the_same_bits_every_time() -> None:
    index, values = torch.randint(0, 7, (5000,)), torch.randn(5000)
    expected = torch.zeros(7, dtype=torch.float64).index_add(0, index, values.double())
    first, *more = (sums_by(index.cuda(), values.cuda(), 7) for _ in range(20))
    assert distance(first, expected) < 1e-6
    assert all(torch.equal(first, item) for item in more)


@gpu
@pytest.mark.parametrize("crops", [False, True])
def test_views_in_one_pass_are_those_of_several(crops: bool) -> None:
    pixels = torch.randint(0, 256, (8, 3, 40, 40), dtype=torch.uint8, device="cuda")
    view = random_views(8, 1, crop_scale=(0.3, 1.0), flip=True) if crops else None
    mean, std = (0.48, 0.45, 0.4), (0.26, 0.27, 0.28)
    got = normalize_views_at_once(pixels, mean, std, view, torch.float32, torch.float32)
    torch.testing.assert_close(got, normalize_views(pixels, mean, std, view), rtol=0, atol=1e-4 if crops else 1e-6)


def run(folder: Path, **changes: Any) -> tuple[dict[str, Tensor], int]:
    """State after 16 steps of a made-up round, and how many of them were played back."""
    shape = SHAPES["tiny"]
    data = made_up_round(shape, write_pictures(folder / "pixels.bin", shape.images, 32))
    runtime = Runtime(torch.device("cuda:0"))
    # Algorithm 1 to the letter: AdamW would divide gradients that are nothing but rounding by their own size.
    config = train_config(shape, steps=16, optimizer="plain", learning_rate=0.01, **changes)
    method, plan = made_up_run(shape, data, config, runtime, paired=True)
    first = loop._Run(method, data, plan, runtime, None, None, None, loop._NoStopwatch())
    first.go(loop._Interruption())
    return {name: value.cpu() for name, value in method.state_dict().items()}, first.steps.played


@gpu
def test_steps_that_are_played_back_end_where_the_others_end(tmp_path: Path) -> None:
    (plain, none), (recorded, played) = run(tmp_path, speed="compiled"), run(tmp_path)
    assert none == 0
    assert played == 13
    for name, value in plain.items():
        torch.testing.assert_close(recorded[name], value, rtol=1e-3, atol=1e-4, msg=name)
