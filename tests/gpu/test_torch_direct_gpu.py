"""The direct path of PyTorch's override and of miofind's own operators, built on the machine with the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import conv2d, conv_transpose2d

import miofind
import miofind.torch
from miofind.torch import direct
from miofind.torch.direct import DirectPath
from miofind.torch.fused import plans as fused_plans
from miofind.torch.fused import unfused
from miofind.torch.fused.nonlinearity import Nonlinearity
from miofind.torch.fused.window import Window
from miofind.torch.override.dispatcher import Override

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float32: 3e-3}
FORMATS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> DirectPath:
    """The direct path over the driver, built once for all of pytest's workers; a process loads one."""
    if direct._loaded:
        return direct._loaded[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIOFIND_CACHE_DIR", str(tmp_path_factory.getbasetemp().parent / "direct path"))
        patch.setattr(direct, "_path", direct._path.__wrapped__)
        made = DirectPath(direct.build())
    direct._use_cuda(made)
    return made


@pytest.fixture
def enabled(path: DirectPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Override]:
    monkeypatch.delenv(direct.VARIABLE, raising=False)
    monkeypatch.setattr(direct, "_loaded", [path])
    with (
        miofind.Handle("cuda", database=tmp_path / "finddb.db") as handle,
        miofind.torch.use("estimate", background=False, only=("plain",), handle=handle) as made,
    ):
        yield made


@pytest.fixture
def of_own_operators(enabled: Override, path: DirectPath) -> Iterator[None]:
    path.enable_own("CUDA")
    fused_plans.forget()
    yield
    path.disable_own("CUDA")
    fused_plans.forget()


def of_python(enabled: Override) -> int:
    """Calls that came through Python."""
    return sum(plan.python_calls for plan in enabled.plans)


LAYERS = {
    "3x3": ((64, 128, 3, 1), {"padding": 1}),
    "1x1 with bias": ((64, 256, 1, 1), {"bias": True}),
    "strided": ((64, 64, 3, 1), {"padding": 1, "stride": 2}),
    "depthwise": ((32, 32, 3, 32), {"padding": 1}),
    "grouped": ((64, 64, 3, 4), {"padding": 1, "bias": True}),
    "transposed": ((32, 64, 3, 1), {"stride": 2, "transposed": True}),
}


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_results_are_right_without_python(enabled: Override, name: str, dtype: Any, memory_format: str) -> None:
    (c, k, size, groups), options = LAYERS[name]
    options = dict(options)
    call = conv_transpose2d if options.pop("transposed", False) else conv2d
    biased = options.pop("bias", False)
    shape = (c, k // groups, size, size) if call is conv_transpose2d else (k, c // groups, size, size)
    before = 0
    for i in range(4):
        x = torch.randn(4, c, 14, 15, device="cuda", dtype=dtype).to(memory_format=FORMATS[memory_format])
        w = (0.1 * torch.randn(shape, device="cuda", dtype=dtype)).to(memory_format=FORMATS[memory_format])
        bias = [torch.randn(k, device="cuda", dtype=dtype)] if biased else []
        given = [tensor.requires_grad_() for tensor in (x, w, *bias)]
        y = call(*given, groups=groups, **options)
        dy = torch.randn_like(y)
        results = (y, *torch.autograd.grad(y, given, dy))
        exact = [tensor.detach().double().requires_grad_() for tensor in given]
        want = call(*exact, groups=groups, **options)
        for got, right in zip(results, (want, *torch.autograd.grad(want, exact, dy.double())), strict=True):
            assert (got - right).abs().max() <= TOLERANCE[dtype] * right.abs().max()
        if i == 1:
            before = of_python(enabled)
    assert of_python(enabled) - before <= 4, "float64 alone, or a result that a library's solution gives"
    assert enabled.report().own_calls > 0


@pytest.fixture(params=["cudnn", "cublas"])
def of_a_library(
    request: pytest.FixtureRequest, path: DirectPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Override]:
    monkeypatch.delenv(direct.VARIABLE, raising=False)
    monkeypatch.setattr(direct, "_loaded", [path])
    with (
        miofind.Handle("cuda", database=tmp_path / "finddb.db") as handle,
        miofind.torch.use("find", background=False, only=(request.param,), handle=handle) as made,
    ):
        yield made


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_libraries_run_without_python(of_a_library: Override, dtype: Any, memory_format: str, with_bias: bool) -> None:
    before = 0
    for i in range(5):
        x = torch.randn(4, 64, 14, 15, device="cuda", dtype=dtype).to(memory_format=FORMATS[memory_format])
        w = (0.1 * torch.randn(128, 64, 1, 1, device="cuda", dtype=dtype)).to(memory_format=FORMATS[memory_format])
        bias = [torch.randn(128, device="cuda", dtype=dtype)] if with_bias else []
        given = [tensor.requires_grad_() for tensor in (x, w, *bias)]
        y = conv2d(*given)
        dy = torch.randn_like(y)
        results = (y, *torch.autograd.grad(y, given, dy))
        exact = [tensor.detach().double().requires_grad_() for tensor in given]
        want = conv2d(*exact)
        for got, right in zip(results, (want, *torch.autograd.grad(want, exact, dy.double())), strict=True):
            assert (got - right).abs().max() <= TOLERANCE[dtype] * right.abs().max()
        if i == 1:
            before = of_python(of_a_library)
    in_float64 = 2 * 3
    assert of_python(of_a_library) - before <= in_float64
    assert of_a_library.report().own_calls >= 10


def test_libraries_follow_streams_and_threads(of_a_library: Override) -> None:
    half = {"device": "cuda", "dtype": torch.float16}
    x, w = torch.randn(32, 256, 56, 56, **half), 0.1 * torch.randn(256, 256, 1, 1, **half)
    want = [conv2d(x, w) for _ in range(3)][-1]
    side, results = torch.cuda.Stream(), []
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(3):
        with torch.cuda.stream(side):
            results.append(conv2d(x, w))
        results += [conv2d(x, w), conv2d(x, w)]
    with torch.cuda.stream(side):
        graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        results.append(conv2d(x, w))
    results.append(conv2d(x, w))
    graph.replay()
    with ThreadPoolExecutor(4) as pool:
        results += pool.map(lambda _: conv2d(x, w), range(40))
    torch.cuda.synchronize()
    assert all(torch.equal(each, want) for each in results)


def test_another_stream_and_a_graph_give_the_same(enabled: Override) -> None:
    x, w = (torch.randn(8, 8, 12, 12, device="cuda"), torch.randn(8, 8, 3, 3, device="cuda"))
    want = [conv2d(x, w) for _ in range(3)][-1]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside = conv2d(x, w)
        graph = torch.cuda.CUDAGraph()
    stream.synchronize()
    with torch.cuda.graph(graph):
        captured = conv2d(x, w)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(beside, want)
    assert torch.equal(captured, want)


class Step:
    """A layer forward and backward on tensors of its own, and what is right by PyTorch on the CPU in float64."""

    def __init__(self, size: int) -> None:
        shapes = (8, 64, 28, 28), (128, 64, size, size), (8, 128, 28, 28)
        half = {"device": "cuda", "dtype": torch.float16}
        self.x, w, self.dy = (torch.randn(shape, **half).to(memory_format=FORMATS["NHWC"]) for shape in shapes)
        self.padding = size // 2
        self.given = (self.x.requires_grad_(), (0.1 * w).requires_grad_())
        self.right = self.expected()

    def results(self) -> tuple[Any, ...]:
        """y, dx and dw."""
        return self._results(self.given, self.dy)

    def expected(self) -> tuple[Any, ...]:
        exact = [tensor.detach().double().cpu().requires_grad_() for tensor in self.given]
        return tuple(each.cuda() for each in self._results(exact, self.dy.double().cpu()))

    def largest_error(self, calls: int = 1) -> Any:
        """Of calls on the current stream, in units of a result's largest element; the host waits for nothing."""
        found = [self.results() for _ in range(calls)]
        pairs = [pair for results in found for pair in zip(results, self.right, strict=True)]
        return torch.stack([(got - right).abs().max() / right.abs().max() for got, right in pairs]).max()

    def _results(self, given: Any, dy: Any) -> tuple[Any, ...]:
        y = conv2d(*given, padding=self.padding)
        return (y.detach(), *torch.autograd.grad(y, given, dy))


def test_a_stream_of_its_own_is_served_without_python(enabled: Override) -> None:
    step, stream = Step(3), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        error = step.largest_error(calls=6)
    stream.synchronize()  # the error is read on another one
    assert error.item() <= TOLERANCE[torch.float16]
    assert [(plan.python_calls, plan.calls) for plan in enabled.plans] == [(2, 6), (2, 6)]


def largest_errors_of_two_streams(size: int) -> list[float]:
    """Of calls of one plan by two threads at once, then by one that goes from stream to stream."""
    steps, streams = [Step(size), Step(size)], [torch.cuda.Stream(), torch.cuda.Stream()]
    errors = [step.largest_error(calls=3) for step in steps]
    torch.cuda.synchronize()

    def run(place: int, calls: int) -> Any:
        with torch.cuda.stream(streams[place]):
            return steps[place].largest_error(calls)

    with ThreadPoolExecutor(2) as pool:
        errors += pool.map(run, (0, 1), (50, 50))
    errors += [run(place, 1) for place in (0, 1) * 25]
    torch.cuda.synchronize()
    return [error.item() for error in errors]


def test_two_streams_run_a_plan_at_once(enabled: Override) -> None:
    assert max(largest_errors_of_two_streams(3)) <= TOLERANCE[torch.float16]
    without_python = [plan.calls - plan.python_calls for plan in enabled.plans]
    assert min(without_python) >= 6 + 100 + 50 - (2 + 2), "all but two, and one of each thread that has no context yet"


def test_two_streams_run_a_plan_of_a_library_at_once(of_a_library: Override) -> None:
    assert max(largest_errors_of_two_streams(1)) <= TOLERANCE[torch.float16]
    assert of_a_library.report().own_calls > 0


def test_a_graph_captured_after_calls_without_python_follows_its_inputs(enabled: Override) -> None:
    step, stream, graph = Step(3), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(4):
            step.results()
    stream.synchronize()
    assert of_python(enabled) == 2 * 2
    with torch.cuda.graph(graph, stream=stream):
        captured = step.results()
    assert of_python(enabled) == 3 * 2, "Python's calls are captured"
    for _ in range(3):
        for tensor in (*step.given, step.dy):
            tensor.detach().copy_(torch.randn_like(tensor))
        graph.replay()
        torch.cuda.synchronize()
        for got, right in zip(captured, step.expected(), strict=True):
            assert (got - right).abs().max() <= TOLERANCE[torch.float16] * right.abs().max()


def test_tensors_that_begin_elsewhere_are_right(enabled: Override) -> None:
    memory = torch.randn(2 * 16 * 10 * 10 + 8, device="cuda", dtype=torch.float16)
    w = 0.1 * torch.randn(16, 16, 3, 3, device="cuda", dtype=torch.float16)
    for start in (0, 0, 0, 1, 2, 4, 8, 1, 0):
        x = memory[start : start + 3200].view(2, 16, 10, 10)
        want = conv2d(x.double(), w.double())
        assert (conv2d(x, w) - want).abs().max() <= 3e-3 * want.abs().max()


def test_threads_share_it(enabled: Override) -> None:
    x, w = (torch.randn(8, 8, 12, 12, device="cuda"), torch.randn(8, 8, 3, 3, device="cuda"))
    want = [conv2d(x, w) for _ in range(3)][-1]
    with ThreadPoolExecutor(8) as pool:
        assert all(torch.equal(each, want) for each in pool.map(lambda _: conv2d(x, w), range(200)))


EPILOGUES: dict[str, dict[str, Any]] = {
    "bias": {"given": ("bias",), "activation": "relu"},
    "all": {"given": ("bias", "scale", "residual"), "activation": "silu"},
    "numbers": {"given": ("bias", "residual"), "activation": "clamp", "beta": 0.5, "low": -0.5, "high": 0.75},
    "after": {"given": ("residual",), "activation": "leaky_relu", "slope": 0.3, "residual_position": "after"},
}


def expected(x: Any, w: Any, operands: dict[str, Any], window: dict[str, int], numbers: dict[str, Any]) -> Any:
    """The same by PyTorch's own operations in float64 on the CPU."""
    pairs = {name: (window.get(name, default),) * 2 for name, default in (("stride", 1), ("padding", 0))}
    how = Window(**pairs, dilation=(1, 1), groups=window["groups"])
    vectors = [operands.get(name) for name in ("bias", "scale", "residual", "channel_bias")]
    given = [each if each is None else each.double().cpu() for each in (x, w, *vectors)]
    return unfused.convolution(*given[:2], tuple(given[2:]), how, Nonlinearity(**numbers))


def largest_error(y: Any, want: Any, operands: dict[str, Any]) -> float:
    """In units of a channel's scale where that is above 1: the convolution's own errors are multiplied by it."""
    scale = operands.get("scale", torch.ones(y.shape[1])).double().cpu().abs().clamp(min=1.0)
    return float(((y.cpu() - want).abs() / scale[:, None, None]).max())


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("layer", ["3x3", "1x1 with bias", "strided", "depthwise", "grouped"])
@pytest.mark.usefixtures("of_own_operators")
def test_fused_results_are_right_without_python(layer: str, epilogue: str, dtype: Any, memory_format: str) -> None:
    (c, k, size, groups), options = LAYERS[layer]
    window = {name: value for name, value in options.items() if name in ("padding", "stride")} | {"groups": groups}
    numbers = dict(EPILOGUES[epilogue])
    given = numbers.pop("given")
    for _ in range(4):
        x = torch.randn(4, c, 14, 15, device="cuda").to(dtype).to(memory_format=FORMATS[memory_format])
        w = (0.1 * torch.randn(k, c // groups, size, size, device="cuda")).to(dtype)
        w = w.to(memory_format=FORMATS[memory_format])
        like = conv2d(x.double(), w.double(), **window)
        operands = {name: torch.randn(k, device="cuda").to(dtype) for name in given if name != "residual"}
        if "residual" in given:
            operands["residual"] = torch.randn_like(like).to(dtype).to(memory_format=FORMATS[memory_format])
        y = miofind.torch.convolution(x, w, **operands, **window, **numbers)
        want = expected(x, w, operands, window, numbers)
        assert largest_error(y, want, operands) <= TOLERANCE[dtype] * max(1.0, float(like.abs().max()))
    (plan,) = (each for each in fused_plans.plans() if each.parts and each.parts[0].launch is not None)
    assert plan.calls == 4
    assert plan.python_calls == (4 if plan.generation is None else 2)


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_fused_results_of_libraries_are_right(of_a_library: Override, path: DirectPath, epilogue: str) -> None:
    path.enable_own("CUDA")
    fused_plans.forget()
    last, half = {"memory_format": torch.channels_last}, torch.float16
    numbers = dict(EPILOGUES[epilogue])
    given = numbers.pop("given")
    for _ in range(4):
        x = torch.randn(4, 64, 14, 15, device="cuda").to(half).to(**last)
        w = (0.1 * torch.randn(128, 64, 1, 1, device="cuda")).to(half)
        like = conv2d(x.double(), w.double())
        operands = {name: torch.randn(128, device="cuda").to(half) for name in given if name != "residual"}
        if "residual" in given:
            operands["residual"] = torch.randn_like(like).to(half).to(**last)
        y = miofind.torch.convolution(x, w, **operands, groups=1, **numbers)
        want = expected(x, w, operands, {"groups": 1}, numbers)
        assert largest_error(y, want, operands) <= 3e-3 * max(1.0, float(like.abs().max()))
    plans = [each for each in fused_plans.plans() if each.parts and each.parts[0].launch is not None]
    assert all(each.calls == 4 and each.python_calls in (2, 4) for each in plans)
    path.disable_own("CUDA")
    fused_plans.forget()


@pytest.mark.usefixtures("of_own_operators")
def test_fused_gradients_are_right_without_python() -> None:
    dtype, channels_last = torch.float16, {"memory_format": torch.channels_last}
    for _ in range(4):
        x, saved, residual = (torch.randn(4, 64, 14, 15, device="cuda").to(dtype).to(**channels_last) for _ in range(3))
        w = (0.1 * torch.randn(128, 64, 3, 3, device="cuda")).to(dtype).to(**channels_last)
        dy = torch.randn(4, 128, 14, 15, device="cuda").to(dtype).to(**channels_last)
        window = ([1, 1], [1, 1], [1, 1], 1)
        dx = torch.ops.miofind.convolution_backward_data(dy, x, w, residual, saved, "relu", *window)
        dw, db = torch.ops.miofind.convolution_backward_weights(dy, x, w, *window, torch.float32)
        exact = [tensor.double().requires_grad_() for tensor in (x, w)]
        wide = torch.autograd.grad(conv2d(*exact, padding=1), exact, dy.double())
        right = ((wide[0] + residual.double()) * (saved > 0), wide[1], dy.double().sum((0, 2, 3)))
        for got, want in zip((dx, dw, db), right, strict=True):
            assert (got - want).abs().max() <= 3e-3 * want.abs().max()
    counts = [(plan.calls, plan.python_calls, plan.generation) for plan in fused_plans.plans() if plan.parts]
    assert all(calls == 4 and (of_python == 2 or generation is None) for calls, of_python, generation in counts)


@pytest.mark.usefixtures("of_own_operators")
def test_a_fused_call_on_another_stream_and_in_a_graph_gives_the_same() -> None:
    x, w = (torch.randn(8, 8, 12, 12, device="cuda"), torch.randn(8, 8, 3, 3, device="cuda"))

    def call() -> Any:
        return miofind.torch.convolution(x, w, padding=1, activation="relu")

    want = [call() for _ in range(3)][-1]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside = call()
    stream.synchronize()
    with torch.cuda.graph(graph):
        captured = call()
    (plan,) = fused_plans.plans()
    assert (plan.python_calls, plan.calls) == (2 + 1, 5), "those of the graph are Python's"
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(beside, want)
    assert torch.equal(captured, want)
