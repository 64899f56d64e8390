"""Views of pictures: crops, turned and mirrored, against versions made pixel by pixel."""

from __future__ import annotations

import math

import torch

from holdfast.data.round import View
from holdfast.data.transforms import normalize_views, random_views

NONE, ONE = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


def pictures(count: int = 2, side: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, 256, (count, 3, side, side), generator=generator, dtype=torch.uint8)


def seen(images: torch.Tensor, view: View | None) -> torch.Tensor:
    return normalize_views(images, NONE, ONE, view, torch.float64)


def turned(degrees: float, *, flip: bool = False, box: tuple[float, ...] = (0.0, 0.0, 1.0, 1.0)) -> View:
    angle = torch.full((2,), math.radians(degrees), dtype=torch.float64)
    return View(torch.tensor([box, box], dtype=torch.float64), torch.tensor([flip, flip]), angle)


def test_a_quarter_turn_moves_whole_pixels() -> None:
    images = pictures()
    plain = seen(images, None)
    torch.testing.assert_close(seen(images, turned(90)), plain.rot90(1, (2, 3)))
    torch.testing.assert_close(seen(images, turned(-90)), plain.rot90(-1, (2, 3)))
    torch.testing.assert_close(seen(images, turned(90, flip=True)), plain.rot90(1, (2, 3)).flip(3))  # turned first


def test_no_turn_is_the_crop_itself() -> None:
    images = pictures()
    box = (0.1, 0.2, 0.6, 0.7)
    still = View(turned(0, box=box).box, torch.tensor([True, True]))
    torch.testing.assert_close(seen(images, turned(0, flip=True, box=box)), seen(images, still))


def test_corners_that_a_turn_leaves_empty_are_black_and_show_nothing_beyond_the_crop() -> None:
    images = pictures(side=32)
    view = seen(images, turned(45, box=(0.25, 0.25, 0.5, 0.5)))
    corner = (slice(None), slice(None), slice(0, 4), slice(0, 4))
    assert (view[corner] == 0).all()
    assert (view[:, :, 12:20, 12:20] > 0).all()


def test_turning_changes_neither_crops_nor_mirrors_and_stays_within_its_limit() -> None:
    still = random_views(500, 3, flip=True)
    both = random_views(500, 3, flip=True, rotation=15.0)
    assert still.angle is None
    assert both.angle is not None
    assert torch.equal(still.box, both.box)
    assert torch.equal(still.flip, both.flip)
    degrees = both.angle.rad2deg()
    assert float(degrees.abs().max()) <= 15
    assert float(degrees.min()) < -14
    assert float(degrees.max()) > 14
    part = both[slice(1, None, 2)]
    assert part.angle is not None
    assert torch.equal(part.angle, both.angle[1::2])  # a rank's share
