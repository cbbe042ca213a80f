"""Fused layers that PyTorch computes: they go to its operations at once, and to a solution where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from miofind import Handle
from miofind.torch import FusedConvolution, fuse, record, use
from miofind.torch.direct import times_forgotten
from miofind.torch.fused import module, plans
from miofind.torch.fused.nonlinearity import Nonlinearity
from miofind.torch.fused.window import Window


class Block(nn.Module):
    """Convolutions with a residual, with numbers of channels, and with neither."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))

    def forward(self, x: Any) -> Any:
        y = self.first(x).relu()
        y = (self.second(y) + x).relu()
        return nn.functional.silu(self.third(y) + x.mean((2, 3), keepdim=True))


@pytest.fixture
def block() -> Any:
    plans.forget()
    model = Block().eval()
    yield model, fuse(model), torch.randn(2, 4, 6, 5)
    plans.forget()


class Operators:
    """Counts calls of the operators by modules."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        for name in ("_convolution", "_short_convolution"):
            monkeypatch.setattr(module, name, self._counting(getattr(module, name)))

    def _counting(self, operator: Any) -> Any:
        def counted(*arguments: Any) -> Any:
            self.calls += 1
            return operator(*arguments)

        return counted

    def of(self, call: Any) -> int:
        """Those of a call."""
        before = self.calls
        call()
        return self.calls - before


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> Operators:
    return Operators(monkeypatch)


@torch.no_grad()
def test_layers_that_no_solution_runs_do_without_the_operator(
    block: Any, operators: Operators, cpu_handle: Handle
) -> None:
    model, fused, x = block
    with use("fallback", handle=cpu_handle, devices="cpu") as override:
        for _ in range(2):
            fused(x)
        assert operators.of(lambda: fused(x)) == 0
        for factor in (1, 3):
            torch.testing.assert_close(fused(factor * x), model(factor * x))
        torch.testing.assert_close(fused(x.double().float()), model(x))
        calls = [plan.calls for plan in plans.plans() if plan.unfused is not None]
        assert calls == [6, 6, 6]
        assert override.report().calls >= 18


@torch.no_grad()
def test_they_are_solutions_calls_while_there_is_one(block: Any, operators: Operators, cpu_handle: Handle) -> None:
    model, fused, x = block
    wanted = model(x)
    for _ in range(3):
        fused(x)
    assert operators.of(lambda: fused(x)) == 0
    for _ in range(2):
        before = times_forgotten()
        with use("estimate", handle=cpu_handle, devices="cpu"):
            for _ in range(3):
                assert operators.of(lambda: torch.testing.assert_close(fused(x), wanted)) == 3
        assert times_forgotten() > before
        assert operators.of(lambda: fused(x)) == 3, "asked for once more"
        assert operators.of(lambda: torch.testing.assert_close(fused(x), wanted)) == 0


@torch.no_grad()
def test_pytorch_s_switches_ask_anew(block: Any, operators: Operators, monkeypatch: pytest.MonkeyPatch) -> None:
    _, fused, x = block
    for _ in range(3):
        fused(x)
    assert operators.of(lambda: fused(x)) == 0
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", not torch.backends.cudnn.deterministic)
    assert operators.of(lambda: fused(x)) == 3


@torch.no_grad()
def test_what_looks_for_the_operator_finds_it(block: Any, operators: Operators) -> None:
    _, fused, x = block
    for _ in range(3):
        fused(x)
    with record() as recording:
        assert operators.of(lambda: fused(x)) == 3
    assert len(recording.calls) == 3


@torch.no_grad()
def test_other_residuals_are_asked_for() -> None:
    plans.forget()
    window = Window.of((3, 3), stride=1, padding=1, dilation=1, groups=1)
    fused = FusedConvolution(torch.randn(4, 4, 3, 3), None, window, Nonlinearity())
    x = torch.randn(2, 4, 6, 5)
    plain = torch.nn.functional.conv2d(x, fused.weight, padding=1)
    for residual in (None, None, None, x, x, None, x[:, :, ::1], torch.randn(2, 4, 1, 1), None):
        wanted = plain if residual is None else plain + residual
        torch.testing.assert_close(fused(x, residual), wanted)
