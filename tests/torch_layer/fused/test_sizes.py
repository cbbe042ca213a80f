"""Networks whose code computes with sizes, as layers that pad like TensorFlow's do."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from miofind.torch import FusedConvolution, fuse


def image(height: int, width: int) -> Any:
    return torch.randn(2, 3, height, width, dtype=torch.float64)


def assert_same(fused: Any, model: Any, x: Any) -> None:
    given = x.clone()
    with torch.no_grad():
        expected, found = model(x.clone()), fused(given)
    assert torch.equal(given, x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


class Padded(nn.Module):
    """Pads by the size of its filter, and convolves by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.made = nn.Conv2d(3, 4, (3, 5))

    def forward(self, x: Any) -> Any:
        height, width = self.made.weight.shape[-2:]
        x = functional.pad(x, (width - 1, width // 2, height - 1, self.made.weight.size(2)))
        return functional.relu(functional.conv2d(x, self.made.weight, self.made.bias))


def test_the_size_of_a_weight_that_is_fused_is_a_constant() -> None:
    model = Padded().double().eval()
    fused = fuse(model)
    assert set(fused.state_dict()) == {"convolution_1.weight", "convolution_1.bias"}
    assert isinstance(fused.convolution_1, FusedConvolution)
    assert_same(fused, model, image(5, 4))


class Resized(nn.Module):
    """Reads the size of a tensor that is no convolution's weight, and may be another one later."""

    def __init__(self) -> None:
        super().__init__()
        self.made = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        self.table = nn.Parameter(torch.zeros(3))

    def forward(self, x: Any) -> Any:
        return functional.pad(self.made(x), (self.table.shape[0], 0))


def test_sizes_of_other_tensors_are_read_in_each_call() -> None:
    model = Resized().double().eval()
    fused = fuse(model)
    for each in (model, fused):
        each.table = nn.Parameter(torch.zeros(5))
    assert fused.fusion_report.untraced == {}
    assert_same(fused, model, image(5, 5))


class Grown(nn.Module):
    """Pads by the size of a weight that its own code makes larger."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 3, 3), requires_grad=False)
        self.made = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())

    def forward(self, x: Any) -> Any:
        self.weight.data.unsqueeze_(0).squeeze_(0)
        return self.made(functional.conv2d(functional.pad(x, (self.weight.shape[-1],) * 4), self.weight))


def test_the_size_of_a_weight_that_is_written_to_is_read_in_each_call() -> None:
    model = Grown().double().eval()
    fused = fuse(model)
    assert "weight" in fused.state_dict()
    assert_same(fused, model, image(5, 5))
