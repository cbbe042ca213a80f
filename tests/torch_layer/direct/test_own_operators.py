"""The direct path before miofind's own operators, over a driver whose kernels are the CPU place's solutions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from helpers.runs.fused_answers import answers_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch_layer.direct.driver import Driver
from torch_layer.direct.profiles import profiled

import miofind.torch
from miofind import Handle
from miofind.torch.fused import plans as fused_plans
from miofind.torch.fused.calls import SHORT, ShortForward
from miofind.torch.fused.ops import ARGUMENTS, SHORT_OPERATORS
from miofind.torch.override.dispatcher import native_kernels

pytestmark = pytest.mark.sampled(2)

OPERATORS = torch.ops.miofind
WINDOW = ([1, 1], [1, 1], [1, 1], 1)
HALF = {"dtype": torch.float16}


@pytest.fixture
def served(driver: Driver, cpu_handle: Handle) -> Iterator[Driver]:
    with answers_of(cpu_handle):
        yield driver


def drawn(*shapes: tuple[int, ...], dtype: Any = torch.float16) -> list[Any]:
    return [(0.3 * torch.randn(shape)).to(dtype) for shape in shapes]


X, W, VECTOR, Y = (2, 4, 7, 6), (6, 4, 3, 3), (6,), (2, 6, 7, 6)


def _forward(dtype: Any, residual_position: str = "before", **named: Any) -> Any:
    x, w, bias, scale, residual, of_channels = drawn(X, W, VECTOR, VECTOR, Y, Y[:2], dtype=dtype)
    activation = named.pop("activation", "relu")
    return OPERATORS.convolution(x, w, bias, scale, residual, activation, *WINDOW, residual_position,
                                 channel_bias=of_channels, **named)  # fmt: skip


def _plain(dtype: Any) -> Any:
    return OPERATORS.convolution(*drawn(X, W, dtype=dtype), None, None, None, "none", *WINDOW)


def _statistics(dtype: Any) -> Any:
    return OPERATORS.convolution_statistics(*drawn(X, W, VECTOR, dtype=dtype), *WINDOW)


def _backward_data(dtype: Any) -> Any:
    dy, x, w, residual, saved = drawn(Y, X, W, X, X, dtype=dtype)
    return OPERATORS.convolution_backward_data(dy, x, w, residual, saved, "relu", *WINDOW, beta=0.5)


def _backward_weights(dtype: Any) -> Any:
    return OPERATORS.convolution_backward_weights(*drawn(Y, X, W, dtype=dtype), *WINDOW, None)[0]


def _with_bias_gradient(dtype: Any) -> Any:
    return OPERATORS.convolution_backward_weights(*drawn(Y, X, W, dtype=dtype), *WINDOW, torch.float32)


CALLS: dict[str, Callable[[Any], Any]] = {
    "plain": _plain,
    "all operands": _forward,
    "numbers": lambda dtype: _forward(dtype, activation="clamp", beta=0.5, low=-0.25, high=0.5),
    "residual after": lambda dtype: _forward(dtype, "after", activation="leaky_relu", slope=0.3),
    "channels last": lambda dtype: _forward(dtype, channels_last=True),
    "statistics": _statistics,
    "backward data": _backward_data,
    "backward weights": _backward_weights,
    "bias gradient": _with_bias_gradient,
}


class InShort(TorchDispatchMode):
    """Calls short operators in place of the others."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = ARGUMENTS.get(func)
        if kind is None:
            return func(*args, **(kwargs or {}))
        call: Any = SHORT[kind](*args, **(kwargs or {}))
        return SHORT_OPERATORS[kind](*call.arguments)


def _same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    for first, second in zip(*((each if isinstance(each, tuple) else (each,)) for each in (one, other)), strict=True):
        assert first.stride() == second.stride()


@pytest.mark.parametrize("way", [contextlib.nullcontext, InShort], ids=["", "in short"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_the_third_call_is_launched_without_python_and_gives_the_same(
    served: Driver, name: str, dtype: Any, way: Any
) -> None:
    results, before = [], []
    for i in range(4):
        torch.manual_seed(7)
        keep = [torch.empty(64 * i)]  # so that addresses differ
        before.append(served.launches)
        with way():
            results.append(CALLS[name](dtype))
        del keep
    (plan,) = fused_plans.plans()
    assert [at - before[0] for at in before] == [0, 0, 0, 1]
    assert served.launches - before[0] == 2
    assert plan.calls == 4
    assert plan.answer is not None
    assert plan.answer.is_served
    for later in results[1:]:
        _same(later, results[0])


def _launched(driver: Driver, call: Callable[[], Any]) -> bool:
    before = driver.launches
    call()
    return driver.launches > before


def test_calls_that_differ_go_on_to_python(served: Driver) -> None:
    x, w, bias, residual = drawn(X, W, VECTOR, Y)

    def call(activation: str = "clamp", window: Any = WINDOW, **named: Any) -> Any:
        given = {"x": x, "w": w, "bias": bias, "scale": None, "residual": residual} | named
        numbers = {name: given.pop(name) for name in [*given] if name not in ("x", "w", "bias", "scale", "residual")}
        return OPERATORS.convolution(*given.values(), activation, *window, **numbers)

    for _ in range(3):
        call()
    assert _launched(served, call)
    others: list[dict[str, Any]] = [
        {"activation": "relu"},
        {"activation": "elu"},
        {"window": ([1, 1], [1, 1], [1, 1], 2), "w": w[:, :2].contiguous()},
        {"high": 5.0},
        {"low": 1e-300},
        {"beta": 2.0},
        {"slope": 0.0},
        {"residual_position": "after"},
        {"bias": None},
        {"bias": bias.float()},
        {"residual": None},
        {"scale": bias},
        {"channel_bias": residual[:, :, 0, 0].contiguous()},
        {"x": x.bfloat16(), "w": w.bfloat16(), "bias": bias.bfloat16(), "residual": residual.bfloat16()},
        {"residual": residual.to(memory_format=torch.channels_last)},
        {"x": x[:1], "residual": residual[:1]},
        {"channels_last": False},
    ]
    for other in others:
        assert not _launched(served, lambda: call(**other)), other  # noqa: B023
    assert len(fused_plans.plans()) == 1 + len(others)
    assert _launched(served, call)


def test_each_operator_comes_to_do_without_python(served: Driver) -> None:
    call = ShortForward(*drawn(X, W), None, None, None, "relu", *WINDOW)
    ways = (lambda: OPERATORS.convolution(*call), lambda: OPERATORS.short_convolution(*call.arguments))
    for way in ways * 3:
        way()
    assert [_launched(served, way) for way in ways] == [True, True]


def test_what_decides_anew_leads_through_python(served: Driver, cpu_handle: Handle) -> None:
    tensors = drawn(X, W)

    def call() -> Any:
        return OPERATORS.convolution(*tensors, None, None, None, "relu", *WINDOW)

    for _ in range(2):
        call()
    assert _launched(served, call)
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        assert not _launched(served, call)
    assert _launched(served, call)
    with miofind.torch.use("fallback", handle=cpu_handle, devices="cpu"):
        assert not any(_launched(served, call) for _ in range(4)), "another override, which has no answer"
    assert [_launched(served, call) for _ in range(2)] == [False, True]
    fused_plans.forget()
    assert [_launched(served, call) for _ in range(3)] == [False, False, True]
    with native_kernels():
        assert [_launched(served, call) for _ in range(2)] == [False, True], "answers are those of enable's defaults"
    assert [_launched(served, call) for _ in range(2)] == [False, True]


def test_what_fails_without_python_is_computed_with_it(served: Driver) -> None:
    tensors = drawn(X, W)

    def call() -> Any:
        return OPERATORS.convolution(*tensors, None, None, None, "relu", *WINDOW)

    want = [call() for _ in range(3)]
    for status, launches in ((201, 2), (700, 1)):  # no context in this thread: the plan stays; another failure ends it
        served.status, before = status, served.launches
        assert torch.equal(call(), want[0])
        served.status = 0
        assert torch.equal(call(), want[0])
        assert served.launches == before + launches


def test_calls_are_launched_into_the_current_stream_and_captured_by_python(served: Driver) -> None:
    tensors = drawn(X, W)

    def call() -> Any:
        return OPERATORS.convolution(*tensors, None, None, None, "relu", *WINDOW)

    served.use(7)
    results = [call() for _ in range(3)]
    served.captured = {7}
    results.append(call())
    served.use(8)
    results.append(call())
    (plan,) = fused_plans.plans()
    assert (served.streams, plan.python_calls, plan.calls) == ([7, 8], 3, 5)
    assert all(torch.equal(each, results[0]) for each in results)


def test_a_misaligned_tensor_goes_through_python(served: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fused_plans.Plan.direct_launches

    def wanting_more(self: fused_plans.Plan) -> Any:
        launches = made(self)
        assert launches is not None
        return [(which, launch._replace(alignment_bytes=32)) for which, launch in launches]

    monkeypatch.setattr(fused_plans.Plan, "direct_launches", wanting_more)
    (w, memory), size = drawn(W, (2 * 4 * 7 * 6 + 64,)), 2 * 4 * 7 * 6
    start = -memory.data_ptr() % 64 // 2
    x, shifted = (memory[at : at + size].view(X) for at in (start, start + 1))

    def call(x: Any) -> Any:
        return OPERATORS.convolution(x, w, None, None, None, "relu", *WINDOW)

    for _ in range(3):
        call(x)
    assert _launched(served, lambda: call(x))
    assert not _launched(served, lambda: call(shifted))
    assert torch.equal(call(shifted), call(shifted.clone()))


def test_views_are_computed_from_what_they_show(served: Driver) -> None:
    wide, w = drawn((2, 4, 7, 12), W, dtype=torch.float64)

    def call(x: Any) -> Any:
        return OPERATORS.convolution(x, w, None, None, None, "none", *WINDOW)

    views = (wide[..., ::2], torch._neg_view(wide[..., ::2]), wide[:, :, :, :6], wide[:1, :, :, ::2].expand(2, 4, 7, 6))
    for x in views:
        results = [call(x) for _ in range(4)]
        for result in results:
            torch.testing.assert_close(result, torch.nn.functional.conv2d(x.clone(), w, padding=1))


def test_a_fused_network_gives_the_same_without_python(served: Driver) -> None:
    torch.manual_seed(3)
    layers = [torch.nn.Conv2d(4, 6, 3, padding=1), torch.nn.BatchNorm2d(6), torch.nn.ReLU(), torch.nn.Conv2d(6, 4, 1)]
    model = torch.nn.Sequential(*layers).eval()
    fused, x = miofind.torch.fuse(model), torch.randn(X)
    with torch.no_grad():
        first = fused(x)
        for _ in range(3):
            again = fused(x)
        assert torch.equal(again, first)
        torch.testing.assert_close(first, model(x), rtol=1e-4, atol=1e-4)
        assert served.launches == 4, "two calls of two layers"
        next(fused.parameters()).mul_(2.0)
        assert not torch.equal(fused(x), first), "weights are read anew"
        assert served.launches == 6
    compiled = torch.compile(fused, backend="aot_eager")
    before = served.launches
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
    assert served.launches > before


def test_packed_filters_are_given_without_python(driver: Driver, cpu_handle: Handle) -> None:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Conv2d(16, 20, 3, padding=1), torch.nn.ReLU()).eval()
    fused, x = miofind.torch.fuse(model), torch.randn(2, 16, 7, 6)
    with miofind.torch.use("estimate", handle=cpu_handle, devices="cpu", only="ConvCpuWinograd"), torch.no_grad():
        for _ in range(3):
            whole = fused(x)  # by w itself, and packs its filters
            fused(x)
            before = driver.launches
            assert torch.equal(fused(x), whole)
            assert driver.launches == before + 1
            fused.get_parameter("0.weight").mul_(2)
        of_whole, of_packed = fused_plans.plans()
        assert [plan.answer.takes_packed for plan in (of_whole, of_packed) if plan.answer] == [False, True]
        assert (of_packed.calls, of_packed.python_calls) == (6, 1)


def test_the_operators_are_pythons_again_once_it_is_disabled(served: Driver, path: Any) -> None:
    tensors = drawn(X, W)
    for _ in range(3):
        want = OPERATORS.convolution(*tensors, None, None, None, "relu", *WINDOW)
    path.disable_own("CPU")
    before = served.launches
    assert torch.equal(OPERATORS.convolution(*tensors, None, None, None, "relu", *WINDOW), want)
    assert served.launches == before
    for _ in range(2):
        path.enable_own("CPU")
    assert torch.equal(OPERATORS.convolution(*tensors, None, None, None, "relu", *WINDOW), want)
    assert served.launches == before + 1, "the plan was kept"


def test_operands_in_other_memory_orders_and_dtypes_are_packed_without_python(served: Driver) -> None:
    """A scale in 16 bits beside a float32 bias, x and a residual in the other order, values of channels with gaps."""
    torch.manual_seed(5)
    x, w, bias, residual, of_channels = drawn(X, W, VECTOR, Y, (2, 12))
    w, wide, residual = w.to(memory_format=torch.channels_last), bias.float(), residual.float()

    def called() -> Any:
        return OPERATORS.convolution(x, w, wide, bias, residual, "relu", *WINDOW, "before",
                                     channel_bias=of_channels[:, ::2])  # fmt: skip

    results = [called() for _ in range(4)]
    assert served.launches == 2
    assert [name for name, _ in profiled(called)].count("aten::copy_") == 4, "all but w and the bias"
    for each in results:
        assert each.stride() == results[0].stride()
        torch.testing.assert_close(each, results[0], rtol=0, atol=0)
    y = functional.conv2d(x.float(), w.float(), padding=1) * wide[:, None, None] + wide[:, None, None]
    y = torch.relu(y + of_channels[:, ::2, None, None].float() + residual)
    torch.testing.assert_close(results[0].float(), y, rtol=0.01, atol=0.01)


def test_signals_are_packed_without_python(served: Driver) -> None:
    x, w, dy = drawn((2, 4, 9), (6, 4, 3), (2, 6, 9))

    def called() -> Any:
        return OPERATORS.convolution_backward_weights(dy, x, w, [1], [1], [1], 1, None, channels_last=True)[0]

    results = [called() for _ in range(4)]
    assert served.launches == 2
    for each in results:
        _same(each, results[0])
    want = torch.nn.grad.conv1d_weight(x.float(), w.shape, dy.float(), padding=1)
    torch.testing.assert_close(results[0].float(), want, rtol=0.01, atol=0.01)
