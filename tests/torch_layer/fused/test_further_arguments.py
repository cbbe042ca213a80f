"""Code that takes any further arguments, and code that cuts tensors into parts, is fused as it runs without more."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from miofind.torch import fuse


class Detector(nn.Module):
    """A list of layers, as detectors have it, whose code hands on what it is given."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU(), kind())
        self.saved = {2}

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return self.predict(x, *args, **kwargs)

    def predict(self, x: Any, doubles: bool = False) -> Any:
        kept = []
        for number, layer in enumerate(self.layers):
            x = layer(x)
            kept.append(x if number in self.saved else None)
        return x * 2 if doubles else x


class Parts(nn.Module):
    def __init__(self, cut: Callable[[Any], Any]) -> None:
        super().__init__()
        self.conv, self.cut = nn.Conv2d(4, 4, 1), cut

    def forward(self, x: Any) -> Any:
        parts = list(self.cut(x))
        parts.append(self.conv(parts[-1]).relu())
        return torch.cat(parts, 1) * len(self.cut(x))


CUTS: dict[str, Callable[[Any], Any]] = {
    "a method": lambda x: x.chunk(2, 1),
    "a function": lambda x: torch.chunk(x, chunks=2, dim=1),
    "sizes": lambda x: x.split((4, 4), 1),
    "sizes by name": lambda x: torch.split(x, split_size_or_sections=[4, 4], dim=1),
}


@pytest.mark.parametrize("name", CUTS)
def test_layers_of_detectors(name: str) -> None:
    model, x = Detector(lambda: Parts(CUTS[name])).eval(), torch.randn(2, 4, 6, 5)
    fused = fuse(model)
    assert str(fused.fusion_report) == (
        "layers.0: convolution + batch_norm + silu\nlayers.3.conv: convolution + bias + relu"
    )
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))
        torch.testing.assert_close(pickle.loads(pickle.dumps(fused))(x), model(x))
    with pytest.raises(TypeError, match="doubles"):
        fused(x, doubles=True)


def test_a_tensor_that_is_too_small_is_refused() -> None:
    model = Detector(lambda: Parts(lambda x: x.chunk(2, 3)))
    model.layers[3].conv = nn.Conv2d(8, 8, 1)
    fused = fuse(model.eval())
    assert "layers.3.conv: convolution + bias + relu" in str(fused.fusion_report)
    with torch.no_grad(), pytest.raises(ValueError, match="1 parts, 2 were"):
        fused(torch.randn(2, 4, 6, 1))


class Uneven(nn.Module):
    """A convolution whose channels PyTorch cuts into fewer parts than it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6), nn.SiLU())

    def forward(self, x: Any) -> Any:
        parts = self.layers(x).relu().chunk(4, 1)
        return torch.cat(list(parts)[::-1], 1) * len(parts)


def test_channels_that_are_cut_into_fewer_parts() -> None:
    model, x = Uneven().eval(), torch.randn(2, 4, 6, 5)
    fused = fuse(model)
    assert str(fused.fusion_report) == "layers.0: convolution + batch_norm + silu"
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))


class Takes(nn.Module):
    """Code that does something with its further arguments."""

    def __init__(self, code: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.code = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), code

    def forward(self, x: Any, *others: Any, **named: Any) -> Any:
        return self.code(self.first(x), others, named)


def _summed(x: Any, others: Any, named: Any) -> Any:
    for each in others:
        x = x + each
    return x


NEEDED: dict[str, Callable[..., Any]] = {
    "taken apart": lambda x, others, named: (lambda y, *_: x + y)(*others) if len(others) else x,
    "one after another": _summed,
    "the first": lambda x, others, named: x + others[0] if others else x,
    "by a name": lambda x, others, named: x + named.get("y", 0),
    "if there are names": lambda x, others, named: x + named["y"] if named else x,
    "in a list": lambda x, others, named: sum([*others], x),
}


@pytest.mark.parametrize("case", NEEDED)
def test_arguments_that_code_asks_for_are_taken(case: str) -> None:
    model, x = Takes(NEEDED[case]).eval(), torch.randn(2, 4, 6, 5)
    fused = fuse(model)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))
        torch.testing.assert_close(fused(x, x, y=x), model(x, x, y=x))


class Ignores(nn.Module):
    """Code that takes what it does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Any, **kwargs: Any) -> Any:
        return self.conv(x).relu()


def test_arguments_that_are_not_needed_may_be_given() -> None:
    model, x = Ignores().eval(), torch.randn(2, 4, 6, 5)
    fused = fuse(model)
    assert str(fused.fusion_report) == "conv: convolution + bias + relu"
    with torch.no_grad():
        torch.testing.assert_close(fused(x, size=3), model(x, size=3))


class Decides(nn.Module):
    """Code that is not traced, and gives a part of it further arguments."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Any) -> Any:
        return self.part(x, True) if x.sum() > 0 else self.part(x, doubles=True)


@pytest.mark.parametrize("sign", [-1, 1])
def test_parts_that_are_given_further_arguments_take_them(sign: int) -> None:
    model = Decides(Detector(lambda: nn.Conv2d(8, 8, 1))).eval()
    x = sign * torch.rand(2, 4, 6, 5)
    fused = fuse(model)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x))
