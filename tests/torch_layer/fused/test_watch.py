"""Code that asks what something is by its identity, which no stand-in has."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from miofind.torch import fuse
from miofind.torch.fused.watch import asks_what_is

ASK: dict[str, Callable[..., Any]] = {
    "a dtype": lambda x: x.dtype is torch.float16,
    "a dtype by another name": lambda x: x.dtype is not torch.half,
    "a dtype on the right": lambda x: torch.float16 is x.dtype,
    "a dtype that is kept": lambda x, dtype: dtype is torch.float16,
    "two dtypes": lambda x, other: x.dtype is other.dtype,
    "a device": lambda self, x: x.device is self.device,
    "a layout": lambda x: x.layout is torch.strided,
    "a class": lambda x: type(x) is torch.Tensor,
    "equal classes": lambda x: type(x) == torch.Tensor,  # noqa: E721
    "a parameter": lambda x: type(x) is nn.Parameter,
    "a flag": lambda x, flag: 2 * x if flag is True else x,
    "no flag": lambda x, flag: x if flag is not False else -x,
}
DO_NOT: dict[str, Callable[..., Any]] = {
    "None": lambda x, mask: x if mask is None else mask,
    "not None": lambda self, x: x is not None and self.part is None,
    "a class of a norm": lambda self: self.norm is nn.BatchNorm2d,
    "the last block": lambda self, block: block is self.blocks[-1],
    "a flag of a module": lambda self: self.flag is True,
    "equal dtypes": lambda x: x.dtype == torch.float16,
    "sizes": lambda self, x: x.shape[0] == self.size and x.dim() == 4,
    "a text": lambda self: self.kind == "Tensor",
    "isinstance": lambda x: isinstance(x, torch.Tensor),
}


@pytest.mark.parametrize("name", ASK)
def test_code_that_asks_what_something_is_is_told(name: str) -> None:
    assert asks_what_is(ASK[name].__code__)


@pytest.mark.parametrize("name", DO_NOT)
def test_other_code_is_not(name: str) -> None:
    assert not asks_what_is(DO_NOT[name].__code__)


class Asks(nn.Module):
    """Computes something else of what is in float64, or has a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Any, flag: bool = False) -> Any:
        y = self.conv(x.float())
        y = 3 * y if flag is True else y
        return 2 * y if x.dtype is torch.float64 else y


def test_both_answers_are_computed() -> None:
    """The one that stand-ins gave was in the graph."""
    network = Asks().eval()
    fused = fuse(network)
    assert "by `is` or `type`" in fused.fusion_report.untraced[""]
    for dtype in (torch.float32, torch.float64):
        for flag in (False, True):
            x = torch.randn(2, 3, 5, 5, dtype=dtype)
            torch.testing.assert_close(fused(x, flag), network(x, flag))


class Compares(nn.Module):
    """Compares what two variables are."""

    def __init__(self, compare: Callable[..., Any]) -> None:
        super().__init__()
        self.conv, self.drop, self.compare = nn.Conv2d(3, 4, 3), nn.Identity(), compare

    def forward(self, x: Any) -> Any:
        return self.compare(self, torch.relu(self.conv(x)))


def compare_sizes(self: Any, y: Any) -> Any:
    height, width = y.shape[2], y.shape[3]
    return y if height is width else -y


def compare_tensors(self: Any, y: Any) -> Any:
    z = self.drop(y)
    if z is not y:
        z = z * 2
    return z


def compare_modules(self: Any, y: Any) -> Any:
    last = self.drop
    for each in (self.conv, self.drop):
        if each is last:
            y = each(y)
    return y


@pytest.mark.parametrize("compare", [compare_sizes, compare_tensors])
def test_code_that_compares_what_two_stand_ins_are_is_not_traced(compare: Callable[..., Any]) -> None:
    """They are never the same."""
    network, x = Compares(compare).eval(), torch.randn(2, 3, 5, 5)
    fused = fuse(network)
    assert "by `is` or `type`" in fused.fusion_report.untraced[""]
    torch.testing.assert_close(fused(x), network(x))


def test_code_that_compares_modules_is() -> None:
    network, x = Compares(compare_modules).eval(), torch.randn(2, 3, 5, 5)
    fused = fuse(network)
    assert fused.fusion_report.fused
    torch.testing.assert_close(fused(x), network(x))


class Imports(nn.Module):
    """Imports a module when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Any) -> Any:
        return self.conv(x) * importlib.import_module("asks_when_imported").FACTOR


IMPORTED = """
import torch

def is_true(flag):
    return flag is True

class Table(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = 3.0 + torch.rand(())

FACTOR = Table().factor if is_true(True) and torch.is_grad_enabled() else 0
"""


def test_what_is_imported_while_code_is_traced_may_do_what_it_likes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As mpmath does: torch.compile failed in the whole process where PyTorch first imported SymPy in a trace."""
    Path(tmp_path, "asks_when_imported.py").write_text(IMPORTED, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "asks_when_imported", raising=False)
    network, x = Imports().eval(), torch.randn(2, 3, 5, 5)
    fused = fuse(network)
    assert not fused.fusion_report.untraced
    torch.testing.assert_close(fused(x), network(x))
