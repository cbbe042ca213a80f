"""Numbers and constants of channels that convolutions' results are multiplied by, or that are added, are folded."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from miofind.torch import fuse


class Frozen(nn.Module):
    """A batch norm whose statistics are buffers, as detectors have them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "mean"):
            self.register_buffer(name, torch.randn(channels))
        self.register_buffer("variance", torch.rand(channels) + 0.5)

    def forward(self, x: Any) -> Any:
        weight, bias, mean, variance = (
            each.reshape(1, -1, 1, 1) for each in (self.weight, self.bias, self.mean, self.variance)
        )
        scale = weight * (variance + 1e-5).rsqrt()
        return x * scale + (bias - mean * scale)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 8, 3, padding=1, bias=False), Frozen(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 4, 1), Frozen(4)

    def forward(self, x: Any) -> Any:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu_()))
        return (y + x).relu_()


def same(fused: Any, model: Any, x: Any, **tolerance: float) -> None:
    with torch.no_grad():
        torch.testing.assert_close(fused(x.clone()), model(x.clone()), **tolerance)


def parts(fused: Any) -> str:
    return str(fused.fusion_report).partition("convolution")[2]


def test_frozen_batch_norms() -> None:
    model, x = Block().eval(), torch.randn(2, 4, 6, 5)
    fused = fuse(model)
    assert str(fused.fusion_report) == (
        "conv1: convolution + mul + add + relu\nconv2: convolution + mul + add + residual + relu"
    )
    assert {type(each).__name__ for each in fused.children()} == {"FusedConvolution"}
    assert [name for name, _ in fused.named_buffers()] == ["conv1.folded", "conv2.folded"]
    same(fused, model, x)
    same(copy.deepcopy(fused), model, x)
    same(pickle.loads(pickle.dumps(fused)), model, x)
    with pytest.raises(ValueError, match="unbatched"):
        fused(x[0])


def test_the_state_of_a_network_before_it_was_fused_is_refused_where_anything_is_folded() -> None:
    """Numbers of the code were lost without a word, and so were batch norms with strict=False."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.plain = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Any) -> Any:
            return functional.relu(self.plain(self.conv(x) * 0.5 + 1))

    def normed() -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    x = torch.randn(2, 4, 6, 5)
    for made in (Halves, normed):
        model, other = made().eval(), made().eval()
        fused = fuse(model)
        for strict in (True, False):
            with pytest.raises(RuntimeError, match="weight is of a network before `fuse`: load it into that one"):
                fused.load_state_dict(other.state_dict(), strict=strict)
        fused.load_state_dict(fuse(other).state_dict())
        same(fused, other, x)
        fused.half().float().load_state_dict(fuse(model).state_dict(), assign=True)
        same(fused, model, x)


def test_their_results_keep_the_dtype_of_the_network_under_autocast() -> None:
    """Products with constants of float32 have that dtype, though the convolution computes in another."""
    model, x = nn.Sequential(nn.Conv2d(4, 4, 3), Frozen(4), nn.ReLU()).eval(), torch.randn(2, 4, 6, 5)
    fused = fuse(model)
    assert parts(fused) == " + mul + add + relu"
    with torch.autocast("cpu", torch.bfloat16):
        same(fused, model, x, rtol=0.05, atol=0.05)
    assert fused(x).dtype == torch.float32


class Scaled(nn.Module):
    """A convolution, a step with a constant of channels, and what follows that."""

    def __init__(self, step: Callable[[Any, Any, Any], Any], dtype: Any = torch.float32) -> None:
        super().__init__()
        self.conv, self.step = nn.Conv2d(4, 4, 1, dtype=dtype), step
        self.scale = nn.Parameter(torch.rand(4, 1, 1, dtype=dtype) + 0.5)

    def forward(self, x: Any) -> Any:
        return self.step(self.conv(x), self.scale, x)


PROMOTED: dict[str, tuple[Callable[[Any, Any, Any], Any], str]] = {
    "a product in place keeps the dtype of autocast": (lambda y, scale, x: y.mul_(scale).relu(), " + mul + relu"),
    "a sum with a wider tensor": (lambda y, scale, x: y * scale + x.double(), " + mul + residual"),
    "a sum with a complex tensor": (lambda y, scale, x: y * scale + x.float() * 1j, " + mul + residual"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", PROMOTED)
def test_their_results_have_the_dtype_that_pytorch_gives(case: str, dtype: Any) -> None:
    step, expected = PROMOTED[case]
    model, x = Scaled(step, dtype).eval(), torch.randn(2, 4, 6, 5).to(dtype)
    fused = fuse(model)
    assert parts(fused) == expected
    same(fused, model, x, rtol=0.01, atol=0.01)
    with torch.autocast("cpu", torch.bfloat16):
        same(fused, model, x, rtol=0.05, atol=0.05)


def test_products_of_float16_under_autocast_to_another_type_are_float32() -> None:
    model, x = Scaled(lambda y, scale, x: y * scale, torch.float16).eval(), torch.randn(2, 4, 6, 5).half()
    fused = fuse(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert fused(x).dtype == model(x).dtype == torch.float32


class Step(nn.Module):
    """A convolution and a step."""

    def __init__(self, step: Callable[[Any, Any], Any], dtype: Any = torch.float32) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 5, 3, dtype=dtype)
        self.step = step
        self.register_buffer("scale", torch.rand(5, dtype=dtype) + 0.5)
        self.register_buffer("wide", torch.rand(5, 1, 1, dtype=torch.float64))
        self.register_buffer("number", torch.tensor(0.25, dtype=dtype))

    def forward(self, x: Any) -> Any:
        return self.step(self, self.conv(x)).relu()


def _written(model: Any, y: Any) -> Any:
    y = y * model.number
    model.number.add_(1)
    return y


TAKEN: dict[str, Callable[[Any, Any], Any]] = {
    "mul": lambda m, y: y * 0.5,
    "add": lambda m, y: 1 + y,
    "sub": lambda m, y: y.sub(0.25),
    "div": lambda m, y: torch.div(y, 3),
    "mul + add": lambda m, y: (y * m.scale[:, None, None]).add(m.scale.reshape(-1, 1, 1) - 1),
    "add + mul": lambda m, y: m.scale.view(1, 5, 1, 1) * (y + m.number),
    "mul + sub": lambda m, y: operator.isub(y.mul_(2), m.number.reshape(1, 1, 1, 1)),
    "div + div": lambda m, y: y.div_(m.scale.view(5, 1, 1)) / 2,
}


@pytest.mark.parametrize("expected", TAKEN)
def test_what_is_folded(expected: str) -> None:
    model, x = Step(TAKEN[expected]).eval(), torch.randn(2, 4, 7, 7)
    fused = fuse(model)
    assert parts(fused) == f" + {expected} + relu"
    same(fused, model, x)


LEFT: dict[str, Callable[[Any, Any], Any]] = {
    "what is subtracted from": lambda m, y: 1 - y,
    "what is divided": lambda m, y: 1 / y,
    "numbers of columns": lambda m, y: y * m.scale,
    "a wider dtype": lambda m, y: y * m.wide,
    "of the result": lambda m, y: y * y.mean(),
    "written to": _written,
    "rounded": lambda m, y: torch.div(y, 0.5, rounding_mode="floor"),
    "a boolean": lambda m, y: y * True,
    "too large": lambda m, y: y * 1e42,
    "infinite in float32": lambda m, y: y * 1e39,
    "infinite in float32, inverted": lambda m, y: y / 1e-39,
    "no number": lambda m, y: y / m.number.sub(0.25),
    "one more dimension": lambda m, y: y * m.scale.view(1, 1, 5, 1, 1),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_left(case: str) -> None:
    model, x = Step(LEFT[case]).eval(), torch.randn(2, 4, 7, 7)
    fused = fuse(model)
    assert parts(fused).split(" + ")[1:2] in ([], ["bias"]), fused.fusion_report
    same(fused, copy.deepcopy(model), x, equal_nan=True)


@pytest.mark.parametrize("number", [2**64, 10**400])
def test_integers_that_pytorch_refuses_stay(number: int) -> None:
    fused = fuse(Step(lambda m, y: y * number).eval())
    assert "mul" not in parts(fused)
    with pytest.raises((RuntimeError, OverflowError)):
        fused(torch.randn(2, 4, 7, 7))


def test_a_number_of_numpy() -> None:
    model, x = Step(lambda m, y: y * np.sqrt(0.5)).eval(), torch.randn(2, 4, 7, 7)
    fused = fuse(model)
    assert parts(fused) == " + mul + relu"
    same(fused, model, x)
    model = Step(lambda m, y: y.relu() * np.sqrt(0.5)).eval()
    same(fuse(model), model, x)


def test_unbatched_images_of_numbers() -> None:
    model, x = Step(lambda m, y: y * m.scale[:, None, None] + 1).eval(), torch.randn(4, 7, 7)
    same(fuse(model), model, x)


@pytest.mark.parametrize(("factor", "expected"), [(1e-6, "bias"), (2**-6, "mul")])
def test_weights_that_would_be_rounded_away_stay(factor: float, expected: str) -> None:
    model = Step(lambda m, y: y * factor, torch.float16).eval()
    assert expected in parts(fuse(model))


def test_a_convolution_that_is_called_with_several_numbers() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: Any) -> Any:
            return self.conv(self.conv(self.conv(x) * 2) * 3) * 2

    model, x = Several().eval(), torch.randn(2, 4, 6, 5)
    fused = fuse(model)
    assert len({id(each) for each in fused.modules() if type(each).__name__ == "FusedConvolution"}) == 2
    same(fused, model, x)


def test_names_of_further_modules_are_new() -> None:
    class Taken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.conv_fused0, self.conv_fused1 = (nn.Conv2d(4, 4, 1) for _ in range(3))

        def forward(self, x: Any) -> Any:
            y = (self.conv(x) * 2).relu() + (self.conv(x) * 3).tanh()
            return self.conv_fused1(self.conv_fused0(y)).sin()

    model, x = Taken().eval(), torch.randn(2, 4, 6, 5)
    fused = fuse(model)
    assert len(fused.fusion_report.fused) == 4
    same(fused, model, x)
