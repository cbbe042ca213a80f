"""Kernels behind a compiled function's back: torch.compile traces nothing of miofind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import miofind.torch
from miofind.torch import Override
from miofind.torch.override.untraced import untraced

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")


@pytest.fixture
def frames() -> Callable[[], int]:
    """How many functions Dynamo has traced since."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    return lambda: int(counters["frames"]["total"])


def test_convolutions_behind_a_graph_break_are_not_traced(override_on_cpu: Override, frames: Callable[[], int]) -> None:
    net = nn.Conv2d(4, 8, 3)

    def broken(x: Any) -> Any:
        for _ in range(2):
            torch._dynamo.graph_break()
            y = net(x)
        return y

    x = torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        wanted = net(x)
        given = torch.compile(broken, backend="eager")(x)
    torch.testing.assert_close(given, wanted)
    assert frames() == 1
    assert miofind.torch.report().own_calls == 3


def test_gradients_within_a_compiled_step_are_not_traced(override_on_cpu: Override, frames: Callable[[], int]) -> None:
    net = nn.Conv2d(4, 8, 3)
    eager_part = torch.compiler.disable(net)

    @torch.compile(backend="eager")
    def step(x: Any) -> Any:
        loss = eager_part(x).square().mean()
        loss.backward()
        return loss

    x = torch.randn(2, 4, 8, 8)
    step(x)
    before = frames()
    given = net.weight.grad.clone()
    net.zero_grad()
    net(x).square().mean().backward()
    torch.testing.assert_close(given, net.weight.grad)
    assert before < 10, "a frame of the step for each break"


def test_operators_are_not_traced(frames: Callable[[], int]) -> None:
    x, w = torch.randn(2, 4, 8, 8), torch.randn(8, 4, 3, 3)

    @torch.compile(backend="eager")
    def broken(x: Any) -> Any:
        torch._dynamo.graph_break()
        return hidden(x)

    @torch.compiler.disable(recursive=False)
    def hidden(x: Any) -> Any:
        return miofind.torch.convolution(x, w, activation="relu")

    torch.testing.assert_close(broken(x), torch.conv2d(x, w).relu())
    assert frames() < 10


def test_where_pytorch_has_no_such_switch_its_public_one_serves(
    monkeypatch: pytest.MonkeyPatch, frames: Callable[[], int]
) -> None:
    monkeypatch.delattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy")
    traced: list[bool] = []

    def kernel() -> None:
        traced.append(torch.compiler.is_compiling())

    untraced(kernel)()
    assert traced == [False]
