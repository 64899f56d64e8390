"""EfficientNet-lite0 against its layers applied one by one: convolution padded by hand, then the norm's own formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from holdfast.model.efficientnet import EfficientNetLite0, SameConv


def made() -> EfficientNetLite0:
    torch.manual_seed(0)
    tower = EfficientNetLite0().double().eval()
    for norm in (module for module in tower.modules() if isinstance(module, nn.BatchNorm2d)):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.normal_(0, 0.3)
        norm.running_var.uniform_(0.5, 2)
        norm.weight.data.uniform_(0.5, 1.5)
        norm.bias.data.normal_(0, 0.2)
    return tower


def plain(convolution: SameConv, norm: nn.BatchNorm2d, values: Tensor) -> Tensor:
    kernel, stride = convolution.kernel_size[0], convolution.stride[0]
    sides: list[int] = []
    for side in (values.shape[3], values.shape[2]):
        total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
        sides += [total // 2, total - total // 2]
    padded = functional.pad(values, sides)
    return norm(functional.conv2d(padded, convolution.weight, None, stride, groups=convolution.groups))


def naive(tower: EfficientNetLite0, images: Tensor) -> Tensor:
    values = functional.relu6(plain(tower._conv_stem, tower._bn0, images))
    for block in tower._blocks:
        wide = values
        if block._expand_conv is not None:
            wide = functional.relu6(plain(block._expand_conv, block._bn0, wide))
        wide = functional.relu6(plain(block._depthwise_conv, block._bn1, wide))
        narrow = plain(block._project_conv, block._bn2, wide)
        values = narrow + values if block._skips else narrow
    return functional.relu6(plain(tower._conv_head, tower._bn1, values)).mean(dim=(2, 3))


@pytest.mark.parametrize("size", [64, 65])
def test_features_and_gradients_are_those_of_the_layers_one_by_one(size: int) -> None:
    tower, images = made(), torch.randn(3, 3, size, size, dtype=torch.float64)
    weights = torch.randn(3, 1280, dtype=torch.float64)
    found, expected = tower(images), naive(tower, images)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    parameters = list(tower.parameters())
    own, other = (torch.autograd.grad((value * weights).sum(), parameters) for value in (found, expected))
    for gradient, reference in zip(own, other, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-8, atol=1e-10)


def test_a_norm_in_training_mode_is_called_as_it_is() -> None:
    tower, images = made(), torch.randn(4, 3, 64, 64, dtype=torch.float64)
    tower.train()
    before = {name: value.clone() for name, value in tower.named_buffers()}
    tower(images)
    assert any(not torch.equal(before[name], value) for name, value in tower.named_buffers())
