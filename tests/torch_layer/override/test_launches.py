"""What a launch hands to a bound solution, told by one that runs nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch_layer.ready_solutions import FakeInvoker, FakeSolutions

from miofind.core.epilogue import DEFAULT_PARAMETERS
from miofind.core.tensor import MathMode
from miofind.device.device import Library
from miofind.torch.override import launches, plans
from miofind.torch.override.calls import ConvolutionCall
from miofind.torch.override.launches import INPUTS, Arguments, Launches

STREAM = 1234


@pytest.fixture(autouse=True)
def _launches_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launches of GPUs over memory of the host, which is addressed alike."""
    monkeypatch.setattr(launches, "stream_reader", lambda: lambda index: STREAM)
    monkeypatch.setattr(Launches, "_on_gpu", property(lambda self: True))


def _arguments(transposed: bool = False) -> Arguments:
    x, w = torch.randn(2, 4, 6, 6), torch.randn(4, 4, 3, 3)
    grad = torch.randn(2, 4, 8, 8) if transposed else torch.randn(2, 4, 4, 4)
    return Arguments(x, w, grad, None, ([1, 1], [0, 0], [1, 1], transposed, [0, 0], 1))


def _launches(computed: str, arguments: Arguments, *invokers: FakeInvoker) -> Launches:
    call = ConvolutionCall.of(arguments.x, arguments.w, None, *arguments.geometry)
    return Launches(computed, call, arguments, FakeSolutions(*invokers))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("computed", ["y", "dx", "dw"])
def test_addresses_are_in_the_order_of_the_problems_operands(computed: str, transposed: bool) -> None:
    arguments, invoker = _arguments(transposed), FakeInvoker(16, workspace_bytes=256)
    tensors = [getattr(arguments, name) for name in INPUTS[computed]]
    made = _launches(computed, arguments, invoker).first().launch(*tensors)
    call = ConvolutionCall.of(arguments.x, arguments.w, None, *arguments.geometry)
    problem = call.problem(computed, MathMode.IEEE)
    known = dict(zip((*INPUTS[computed], computed), (*tensors, made), strict=True))
    ((*addresses, workspace, stream),) = invoker.runs
    assert addresses == [known[name].data_ptr() for name in call.operands(computed)]
    assert call.operands(computed)["xwy".index(problem.direction.output)] == computed
    assert (bool(workspace), stream) == (True, STREAM)


def test_tensors_in_another_memory_order_are_packed_first() -> None:
    arguments, invoker = _arguments(), FakeInvoker(16)
    last = arguments._replace(x=arguments.x.to(memory_format=torch.channels_last))
    made = _launches("y", last, invoker).first().launch(last.x, last.w)
    assert made.is_contiguous(memory_format=torch.channels_last)
    ((x, w, y, _, _),) = invoker.runs
    assert (x, y) == (last.x.data_ptr(), made.data_ptr())
    assert w != last.w.data_ptr()


def test_a_misaligned_tensor_takes_the_next_solution_that_allows_it() -> None:
    arguments = _arguments()
    first, second, third = FakeInvoker(16), FakeInvoker(16), FakeInvoker(4)
    launch = _launches("y", arguments, first, second, third).first().launch
    shifted = torch.empty(arguments.x.numel() + 1)[1:].view(arguments.x.shape)
    for _ in range(2):
        launch(shifted, arguments.w)
        launch(arguments.x, arguments.w)
    assert [len(each.runs) for each in (first, second, third)] == [2, 0, 2]


def test_where_no_solution_allows_it_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = _arguments()
    first, second = FakeInvoker(16), FakeInvoker(4)
    shifted = torch.empty(arguments.x.numel() + 1)[1:].view(arguments.x.shape)
    assert _launches("y", arguments, first).first().launch(shifted, arguments.w) is None
    launch = _launches("y", arguments, first, second).first().launch
    with monkeypatch.context() as patch:
        patch.setattr(launches, "is_capturing", lambda device: True)
        assert launch(shifted, arguments.w) is None, "nothing is loaded while a graph is captured"
    assert launch(shifted, arguments.w) is not None
    assert (len(first.runs), len(second.runs)) == (0, 1)


def test_a_bias_goes_between_the_tensors_and_the_numbers_of_the_epilogue() -> None:
    arguments, bias = _arguments()._replace(bias=torch.randn(4)), torch.randn(8)[::2]
    call = ConvolutionCall.of(arguments.x, arguments.w, arguments.bias, *arguments.geometry)
    invoker = FakeInvoker(16, problem=call.problem("y", MathMode.IEEE, with_bias=True))
    y = (
        Launches("y", call, arguments, FakeSolutions(invoker), with_bias=True)
        .first()
        .launch(arguments.x, arguments.w, bias)
    )
    problem = call.problem("dw", MathMode.IEEE, with_bias=True)
    backward = FakeInvoker(16, problem=problem)
    dw, db = (
        Launches("dw", call, arguments, FakeSolutions(backward), with_bias=True)
        .first()
        .launch(arguments.x, arguments.grad)
    )
    ((*addresses, added, numbers, workspace, _),) = invoker.runs
    assert addresses == [tensor.data_ptr() for tensor in (arguments.x, arguments.w, y)]
    assert (added != bias.data_ptr(), numbers, workspace) == (True, DEFAULT_PARAMETERS, 0)
    ((*addresses, numbers, workspace, _),) = backward.runs
    assert addresses == [tensor.data_ptr() for tensor in (arguments.x, dw, arguments.grad, db)]
    assert [operand.name for operand in problem.operands] == ["x", "w", "y", "bias_gradient"]
    assert (tuple(db.shape), numbers, workspace) == ((4,), DEFAULT_PARAMETERS, 0)


class _Answer(NamedTuple):
    library: Library
    ties_with_best: bool


def test_an_own_kernel_that_ties_with_a_librarys_goes_first_where_calls_need_no_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    best, tied, behind = _Answer(Library.CUDNN, True), _Answer(Library.PLAIN, True), _Answer(Library.PLAIN, False)
    found: list[Any] = [best, behind, tied]
    assert plans.own_first(found) == found, "there is no direct path"
    monkeypatch.setattr(plans, "loaded", lambda: object())
    assert plans.own_first(found) == [tied, best, behind]
    assert plans.own_first([best, behind]) == [best, behind]
    assert plans.own_first([behind, best, tied]) == [behind, best, tied]
