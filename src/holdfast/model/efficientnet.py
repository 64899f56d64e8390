"""EfficientNet-lite0 in plain PyTorch: features only, weights under the names of its published checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

# kernel, stride, expansion, channels in, channels out, repeats
_STAGES = (
    (3, 1, 1, 32, 16, 1),
    (3, 2, 6, 16, 24, 2),
    (5, 2, 6, 24, 40, 2),
    (3, 2, 6, 40, 80, 3),
    (5, 1, 6, 80, 112, 3),
    (5, 2, 6, 112, 192, 4),
    (3, 1, 6, 192, 320, 1),
)
FEATURES = 1280


class SameConv(nn.Conv2d):
    """Convolution padded as in TensorFlow: at stride 2 the odd pixel goes to the right and below."""

    def forward(self, input: Tensor) -> Tensor:
        """[n, C, H, W] -> [n, C', ceil(H / stride), ceil(W / stride)]."""
        return self.applied(input, self.weight, self.bias)

    def applied(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same with other weights in place of its own."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        height, width = (
            max((-(-side // stride) - 1) * stride + kernel - side, 0) for side in (input.shape[-2], input.shape[-1])
        )
        padding = (height // 2, width // 2)
        if height % 2 or width % 2:  # only then a padded copy is needed
            input = functional.pad(input, (width // 2, width - width // 2, height // 2, height - height // 2))
            padding = (0, 0)
        return functional.conv2d(input, weight, bias, self.stride, padding, groups=self.groups)


Folded = dict["SameConv", tuple[Tensor, Tensor]]  # a convolution's weights with its norm in them, and what is added


def _folded(layers: Sequence[tuple[SameConv, nn.BatchNorm2d]]) -> Folded:
    """Every norm in its convolution: towers never leave eval mode, where a norm is linear.

    What is one number a channel is computed for all layers together: layer by layer that would be some hundreds of
    kernels over a few numbers each, forward and backward.
    """
    norms = [norm for _, norm in layers]
    counts = [norm.num_features for norm in norms]
    gain, shift = (torch.cat([getattr(norm, name) for norm in norms]) for name in ("weight", "bias"))
    mean, variance = (torch.cat([getattr(norm, name) for norm in norms]) for name in ("running_mean", "running_var"))
    scale = gain * torch.rsqrt(variance + norms[0].eps)
    bias = shift - mean * scale
    if torch.is_autocast_enabled(bias.device.type):
        bias = bias.to(torch.get_autocast_dtype(bias.device.type))
    each = zip(layers, scale.split(counts), bias.split(counts), strict=True)
    return {conv: (conv.weight * own[:, None, None, None], added) for (conv, _), own, added in each}


def _normed(convolution: SameConv, norm: nn.BatchNorm2d, values: Tensor, folded: Folded | None) -> Tensor:
    """norm(convolution(values)): one after the other where the norm is trained, else in one pass over the values."""
    if folded is None:
        return norm(convolution(values))
    return convolution.applied(values, *folded[convolution])


def _relu6(values: Tensor) -> Tensor:
    """In place where no gradient asks for what was there: a pass over memory less."""
    return functional.relu6(values, inplace=not values.requires_grad)


def _conv(inside: int, outside: int, kernel: int, stride: int = 1, groups: int = 1) -> SameConv:
    return SameConv(inside, outside, kernel, stride, groups=groups, bias=False)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class _Block(nn.Module):
    """Inverted residual: expand, depthwise, project. Lite means ReLU6 and no squeeze-and-excitation."""

    def __init__(self, kernel: int, stride: int, expansion: int, inside: int, outside: int) -> None:
        super().__init__()
        wide = inside * expansion
        self._expand_conv = _conv(inside, wide, 1) if expansion != 1 else None
        self._bn0 = _norm(wide) if expansion != 1 else None
        self._depthwise_conv = _conv(wide, wide, kernel, stride, groups=wide)
        self._bn1 = _norm(wide)
        self._project_conv = _conv(wide, outside, 1)
        self._bn2 = _norm(outside)
        self._skips = stride == 1 and inside == outside

    def layers(self) -> list[tuple[SameConv, nn.BatchNorm2d]]:
        """Convolutions and their norms."""
        expand = [] if self._expand_conv is None or self._bn0 is None else [(self._expand_conv, self._bn0)]
        return [*expand, (self._depthwise_conv, self._bn1), (self._project_conv, self._bn2)]

    def forward(self, values: Tensor, folded: Folded | None) -> Tensor:
        wide = values
        if self._expand_conv is not None and self._bn0 is not None:
            wide = _relu6(_normed(self._expand_conv, self._bn0, wide, folded))
        wide = _relu6(_normed(self._depthwise_conv, self._bn1, wide, folded))
        narrow = _normed(self._project_conv, self._bn2, wide, folded)
        return narrow + values if self._skips else narrow


class EfficientNetLite0(nn.Module):
    """Pictures [n, 3, S, S] -> pooled features [n, 1280]."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = _conv(3, 32, 3, 2)
        self._bn0 = _norm(32)
        blocks: list[_Block] = []
        for kernel, stride, expansion, inside, outside, repeats in _STAGES:
            blocks.append(_Block(kernel, stride, expansion, inside, outside))
            blocks.extend(_Block(kernel, 1, expansion, outside, outside) for _ in range(repeats - 1))
        self._blocks = nn.ModuleList(blocks)
        self._conv_head = _conv(320, FEATURES, 1)
        self._bn1 = _norm(FEATURES)

    def forward(self, images: Tensor) -> Tensor:
        """Mean over the last map, after ReLU6."""
        images = images.contiguous(memory_format=torch.channels_last)  # what convolutions are fastest in
        blocks = cast("list[_Block]", list(self._blocks))
        inner = [layer for block in blocks for layer in block.layers()]
        layers = [(self._conv_stem, self._bn0), *inner, (self._conv_head, self._bn1)]
        folded = None if self.training else _folded(layers)
        values = _relu6(_normed(self._conv_stem, self._bn0, images, folded))
        for block in blocks:
            values = block(values, folded)
        return _relu6(_normed(self._conv_head, self._bn1, values, folded)).mean(dim=(2, 3))
