"""Views of pictures, made on the training device: the evaluation view, and random crops that two models can share."""

from __future__ import annotations

import math
from functools import lru_cache
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from holdfast.data.round import View


def random_views(
    count: int,
    seed: int,
    *,
    crop_scale: tuple[float, float] = (0.7, 1.0),
    flip: bool = False,
    rotation: float = 0.0,
    stretch: float = 4 / 3,
) -> View:
    """``count`` random crops: area between the two shares of ``crop_scale``, aspect ratio up to ``stretch``.

    With ``rotation`` each is turned by an angle of at most so many degrees, either way.
    """
    random = torch.Generator().manual_seed(seed)
    area = torch.empty(count).uniform_(*crop_scale, generator=random)
    ratio = torch.empty(count).uniform_(-1, 1, generator=random).mul(torch.tensor(stretch).log()).exp()
    width = (area * ratio).sqrt().clamp(max=1)
    height = (area / ratio).sqrt().clamp(max=1)
    left = torch.rand(count, generator=random) * (1 - width)
    top = torch.rand(count, generator=random) * (1 - height)
    mirrored = torch.rand(count, generator=random) < (0.5 if flip else 0.0)
    box = torch.stack([left, top, width, height], dim=1)
    if not rotation:
        return View(box, mirrored)
    return View(box, mirrored, torch.empty(count).uniform_(-1, 1, generator=random) * math.radians(rotation))


def fixed_views(
    images: int,
    each: int,
    seed: int,
    *,
    crop_scale: tuple[float, float] = (0.7, 1.0),
    flip: bool = False,
    rotation: float = 0.0,
) -> View:
    """``each`` views of every image, the whole picture first: view v of image i is row i · each + v."""
    view = random_views(images * each, seed, crop_scale=crop_scale, flip=flip, rotation=rotation)
    view.box[::each] = torch.tensor([0.0, 0.0, 1.0, 1.0])
    view.flip[::each] = False
    if view.angle is not None:
        view.angle[::each] = 0.0
    return view


def normalize_views(
    images: Tensor,  # [n, 3, S, S] uint8, on the device
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
    view: View | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Normalised pixels of the evaluation view (``view=None``), or of a crop resized back to the same size."""
    pixels = images.to(dtype) / 255
    if view is not None:
        pixels = _crop(pixels, view)
    return (pixels - _channels(mean, dtype, images.device)) / _channels(std, dtype, images.device)


def normalize_views_at_once(
    images: Tensor,  # [n, 3, S, S] uint8, on the device
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
    view: View | None,
    dtype: torch.dtype,
    kept_as: torch.dtype,
) -> Tensor:
    """:func:`normalize_views` in ``dtype``, kept in another type: on a GPU in one pass over the pictures."""
    known = images.is_cuda and dtype == torch.float32 and images.numel() and (view is None or view.angle is None)
    kernel = _kernel() if known else None
    if kernel is None:
        return normalize_views(images, mean, std, view, dtype).to(kept_as)
    channels = [_channels(values, dtype, images.device).flatten() for values in (mean, std)]
    box, mirrored = (None, None) if view is None else (_beside(view.box, channels[0]), _beside(view.flip, channels[0]))
    return kernel.normalize_views(images, *channels, box, mirrored, kept_as)


@lru_cache(maxsize=1)
def _kernel() -> ModuleType | None:
    try:
        from holdfast.kernels import views as view_kernel
    except ImportError:
        return None  # a build of PyTorch without Triton
    return view_kernel


@lru_cache(maxsize=32)
def _channels(values: tuple[float, float, float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One number a channel, on the device: made once, since a copy from the host makes the host wait."""
    return torch.tensor(values, dtype=dtype, device=device).view(1, 3, 1, 1)


def _crop(pixels: Tensor, view: View) -> Tensor:
    box = _beside(view.box, pixels)
    mirror = 1 - 2 * _beside(view.flip, pixels)
    left, top, width, height = box.unbind(dim=1)
    zero = torch.zeros_like(left)
    # An affine map from output coordinates in [-1, 1] to input ones: scale by the box, move to its centre.
    if view.angle is not None:
        return _turned_crop(pixels, box, mirror, _beside(view.angle, pixels))
    rows = torch.stack([width * mirror, zero, 2 * left + width - 1, zero, height, 2 * top + height - 1], dim=1)
    grid = F.affine_grid(rows.view(-1, 2, 3), list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _turned_crop(pixels: Tensor, box: Tensor, mirror: Tensor, angle: Tensor) -> Tensor:
    """The crop, then turned about its centre (to the left for a positive angle), then mirrored.

    What a turned crop shows beyond its own edges is black, whatever the picture has there.
    """
    zero, cos, sin = torch.zeros_like(angle), angle.cos(), angle.sin()
    rows = torch.stack([cos * mirror, -sin, zero, sin * mirror, cos, zero], dim=1)
    inside = F.affine_grid(rows.view(-1, 2, 3), list(pixels.shape), align_corners=False)  # in the crop, [-1, 1]
    left, top, width, height = (side[:, None, None] for side in box.unbind(dim=1))
    grid = torch.stack(
        [inside[..., 0] * width + 2 * left + width - 1, inside[..., 1] * height + 2 * top + height - 1], dim=-1
    )
    sampled = F.grid_sample(pixels, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return sampled * (inside.abs() <= 1).all(dim=-1)[:, None]


def _beside(values: Tensor, pixels: Tensor) -> Tensor:
    """The values on the pixels' device and of their type; the host does not wait for the copy."""
    if pixels.is_cuda and not values.is_cuda:
        values = values.pin_memory()
    return values.to(pixels.device, non_blocking=True).to(pixels.dtype)
