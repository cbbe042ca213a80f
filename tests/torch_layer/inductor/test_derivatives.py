"""Gradients of inputs times the derivatives of activations: one operator where what was saved is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from helpers.runs.fused_answers import answers_of
from torch import nn
from torch_layer.inductor.compiled_graphs import Compiled

from miofind import Handle
from miofind.torch.inductor import writing

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture(autouse=True)
def served(cpu_handle: Handle, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Estimates answer, and passes behind products, which the CPU place has alone of these, count as kernels."""
    monkeypatch.setattr(writing, "is_composed", lambda solver_id: False)
    with answers_of(cpu_handle):
        yield


class Net(nn.Module):
    """Two convolutions and what is between them."""

    def __init__(self, between: Callable[[Any], Any], *, dtype: Any = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 4, 3, dtype=dtype), nn.Conv2d(4, 5, 3, dtype=dtype)
        self.norm, self.between = nn.BatchNorm2d(4, dtype=dtype), between

    def forward(self, x: Any) -> Any:
        return self.second(self.between(self.first(x)))


def derivatives(network: Any, x: Any, rtol: float, **options: Any) -> list[str]:
    """Those that were put in; gradients are eager's, as exact as asked for."""
    compiled = Compiled(network, **options)
    found = []
    for run in (compiled, network):
        network.zero_grad()
        run(x).square().sum().backward()
        found.append(torch.cat([each.grad.flatten() for each in network.parameters() if each.grad is not None]))
    given, wanted = (each.double() for each in found)
    assert (given - wanted).norm() <= rtol * wanted.norm()
    return [text for text in compiled.texts if text.startswith("d") or ".d" in text]


ACTIVATIONS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "leaky_relu": (lambda v: functional.leaky_relu(v, 0.2), "dleaky_relu"),
    "relu6": (functional.relu6, "dclamp"),
    "hardtanh": (lambda v: functional.hardtanh(v, -0.3, 0.4), "dclamp"),
    "silu": (functional.silu, "dsilu"),
    "gelu": (functional.gelu, "dgelu"),
    "gelu_tanh": (lambda v: functional.gelu(v, approximate="tanh"), "dgelu_tanh"),
    "hardswish": (functional.hardswish, "dhardswish"),
    "relu": (functional.relu, "drelu"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("activation", "text"), ACTIVATIONS.values(), ids=ACTIVATIONS)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str)
def test_derivatives_are_taken_with_the_gradient(
    activation: Callable[[Any], Any], text: str, dtype: Any, rtol: float
) -> None:
    assert derivatives(Net(activation, dtype=dtype), torch.randn(2, 3, 9, 8).to(dtype), rtol) == [text]


def test_the_sum_at_a_branch_comes_before() -> None:
    """Of two readers of an activation's result."""
    network = Net(functional.silu)
    third = nn.Conv2d(4, 5, 3)
    network.add_module("third", third)

    def both(x: Any) -> Any:
        y = functional.silu(network.first(x))
        return network.second(y) + third(y)

    compiled = Compiled(both)
    x = torch.randn(2, 3, 9, 8)
    found = []
    for run in (compiled, both):
        network.zero_grad()
        run(x).square().sum().backward()
        found.append([each.grad.clone() for each in network.parameters() if each.grad is not None])
    assert [text for text in compiled.texts if "dsilu" in text] == ["residual.dsilu"]
    for given, wanted in zip(*found, strict=True):
        torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("activation", "is_left"), [(functional.silu, True), (functional.relu, False)])
def test_a_pass_behind_a_product_is_no_kernel(
    activation: Callable[[Any], Any], is_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor's own does as much, and the next step; relu's mask takes no arithmetic."""
    monkeypatch.setattr(writing, "is_composed", lambda solver_id: solver_id.endswith("+Pointwise"))
    put_in = derivatives(Net(activation), torch.randn(2, 3, 9, 8), 2e-6)
    assert put_in == ([] if is_left else ["drelu"])


def cubed(v: Any) -> Any:
    return v * functional.silu(v)


@pytest.mark.parametrize(
    "between", [functional.elu, functional.mish, torch.sin, cubed], ids=["elu", "mish", "sin", "own"]
)
def test_others_stay(between: Callable[[Any], Any]) -> None:
    assert derivatives(Net(between), torch.randn(2, 3, 9, 8), 2e-6) == []


def test_what_is_computed_once_more_for_it_stays() -> None:
    """A batch norm's result is not kept; an operator would have it written, for the norm's own gradient to be read."""
    network = Net(lambda v: v)
    network.between = lambda v: functional.silu(network.norm(v))
    assert derivatives(network, torch.randn(2, 3, 9, 8), 1e-4, recomputes=True) == []


def test_a_gradient_that_others_use_stays() -> None:
    """A hook's, which is given the gradient of the activation's result."""

    def noted(v: Any) -> Any:
        y = functional.silu(v)
        y.register_hook(lambda gradient: gradient.cos() * gradient)
        return y

    assert derivatives(Net(noted), torch.randn(2, 3, 9, 8), 1e-5) == []


@pytest.mark.parametrize("activation", [functional.silu, functional.relu])
def test_a_gradient_that_is_a_result_as_well_stays(activation: Callable[[Any], Any]) -> None:
    """Of what is added to an activation's result."""
    torch.manual_seed(0)
    conv, given = nn.Conv2d(4, 4, 3), [torch.randn(2, 4, 6, 5).requires_grad_() for _ in range(2)]

    def run(x: Any, other: Any) -> Any:
        return conv(activation(x) + other)

    compiled = Compiled(run, recomputes=True)
    found, expected = (torch.autograd.grad(each(*given).square().sum(), given) for each in (compiled, run))
    for mine, pytorchs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, pytorchs, rtol=1e-4, atol=1e-4)
    assert not any(text.startswith("d") for text in compiled.texts)
