"""PyTorch's convolutions on a GPU, run by miofind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.functional import conv2d

import miofind.torch
from miofind import Handle
from miofind.compiler import BinaryCache, Compiler
from miofind.torch import Override

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Handle]:
    with Handle(0, database=tmp_path_factory.mktemp("torch") / "finddb.db") as made:
        yield made


@pytest.fixture
def override(handle: Handle) -> Iterator[Override]:
    """Nothing is measured: where no FindDB has an answer, estimates choose."""
    with miofind.torch.use("estimate", background=False, handle=handle) as made:
        yield made


class _Case(NamedTuple):
    """A convolution that PyTorch is asked for."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    stride: int = 1
    padding: int = 1
    transposed: bool = False
    groups: int = 1

    @property
    def geometry(self) -> tuple[Any, ...]:
        """The arguments of `aten::convolution` behind the bias."""
        rank = len(self.x) - 2
        output_padding = [self.stride - 1 if self.transposed else 0] * rank
        return (
            [self.stride] * rank,
            [self.padding] * rank,
            [1] * rank,
            self.transposed,
            output_padding,
            self.groups,
        )


_CASES = {
    "1x1": _Case((2, 64, 8, 8), (32, 64, 1, 1), padding=0),
    "3x3": _Case((2, 16, 9, 9), (32, 16, 3, 3)),
    "strided": _Case((2, 16, 9, 9), (32, 16, 3, 3), stride=2),
    "grouped": _Case((2, 32, 8, 8), (32, 8, 3, 3), groups=4),
    "depthwise": _Case((2, 32, 8, 8), (32, 1, 3, 3), groups=32),
    "transposed": _Case((2, 16, 5, 5), (16, 32, 3, 3), stride=2, transposed=True),
    "1-D": _Case((2, 16, 33), (32, 16, 3)),
    "3-D": _Case((1, 16, 4, 6, 6), (32, 16, 3, 3, 3)),
}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _integers(shape: tuple[int, ...], dtype: Any, channels_last: bool) -> Any:
    """-1, 0 and 1, whose sums of products are exact in every element type."""
    made = torch.randint(-1, 2, shape, device="cuda").to(dtype)
    if not channels_last or len(shape) == 3:
        return made
    return made.to(memory_format=torch.channels_last if len(shape) == 4 else torch.channels_last_3d)


def _results(x: Any, w: Any, bias: Any, grad: Any, geometry: tuple[Any, ...]) -> tuple[Any, ...]:
    y = torch.ops.aten.convolution(x, w, bias, *geometry)
    grad = torch.empty_like(y) if grad is None else grad
    mask = [True, True, True]
    return y, *torch.ops.aten.convolution_backward(grad, x, w, list(bias.shape), *geometry, mask)


@pytest.mark.parametrize("channels_last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("case", _CASES)
def test_results_are_exact_and_have_the_strides_of_fake_tensors(
    override: Override, case: str, dtype: Any, channels_last: bool
) -> None:
    drawn = _CASES[case]
    x, w = (_integers(shape, dtype, channels_last) for shape in (drawn.x, drawn.w))
    bias = _integers((drawn.w[1] * drawn.groups if drawn.transposed else drawn.w[0],), dtype, False)
    exact = torch.ops.aten.convolution(x.double().cpu(), w.double().cpu(), bias.double().cpu(), *drawn.geometry)
    grad = _integers(tuple(exact.shape), dtype, channels_last)
    ours = _results(x, w, bias, grad, drawn.geometry)
    assert override.report().own_calls == 3, str(override.report())
    references = _results(*(tensor.double().cpu() for tensor in (x, w, bias, grad)), drawn.geometry)
    with FakeTensorMode(allow_non_fake_inputs=True):
        predicted = _results(x, w, bias, None, drawn.geometry)
    for got, wanted, fake in zip(ours, references, predicted, strict=True):
        assert torch.equal(got.cpu(), wanted.to(dtype))
        assert got.stride() == fake.stride()


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_float32_has_the_precision_that_pytorch_was_asked_for(override: Override, precision: str) -> None:
    x, w = torch.randn(2, 64, 16, 16, device="cuda"), torch.randn(64, 64, 3, 3, device="cuda")
    before = torch.backends.cudnn.conv.fp32_precision
    try:
        torch.backends.cudnn.conv.fp32_precision = precision
        y = conv2d(x, w)
    finally:
        torch.backends.cudnn.conv.fp32_precision = before
    (part,) = override.plans[-1].parts
    assert (str(part.problem.math), part.launch is not None) == (precision, True)
    error = (y.double() - conv2d(x.double(), w.double())).abs().max()
    assert error < (1.0 if precision == "tf32" else 1e-3)


def _one_by_one(batch: int = 4) -> tuple[Any, Any]:
    return _integers((batch, 64, 8, 8), torch.float16, True), _integers((64, 64, 1, 1), torch.float16, True)


def test_a_captured_graph_replays_what_was_prepared(override: Override) -> None:
    x, w = _one_by_one()
    wanted = conv2d(x, w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = conv2d(x, w)
    for _ in range(3):
        y.zero_()
        graph.replay()
        assert torch.equal(y, wanted)
    assert override.report().own_calls == 2


def test_what_is_missing_under_capture_is_pytorchs(handle: Handle) -> None:
    x, w = _one_by_one(5)
    torch.backends.cudnn.conv.fp32_precision  # noqa: B018, cuDNN is loaded before the capture
    wanted = conv2d(x, w)
    with miofind.torch.use("find", handle=handle) as override:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = conv2d(x, w)
        report = override.report()
        assert (report.own_calls, report.calls, [*report.missing.values()]) == (0, 1, [1])
        graph.replay()
        assert torch.equal(y, wanted)
        assert torch.equal(conv2d(x, w), wanted)
        assert override.report().own_calls == 1


def test_launches_go_to_the_current_stream(override: Override) -> None:
    x, w = _one_by_one(64)
    wanted = conv2d(x, w)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        x2 = x * 2
        y = conv2d(x2, w)
    side.synchronize()
    assert torch.equal(y, wanted * 2)
    assert override.report().own_calls == 2


def test_misaligned_tensors_take_another_solution_or_pytorchs(override: Override) -> None:
    x, w = _one_by_one()
    memory = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:]
    shifted = memory.as_strided(x.shape, x.stride()).copy_(x)
    assert shifted.data_ptr() % 16
    wanted = conv2d(x, w)
    assert torch.equal(conv2d(shifted, w), wanted)
    assert torch.equal(conv2d(x, w), wanted)


def test_a_training_step_is_found_in_autograds_thread(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(16, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 8, 1)).cuda()
    x = torch.randn(2, 16, 9, 9, device="cuda", requires_grad=True)
    with Handle(0, database=tmp_path / "finddb.db") as handle:
        finding = miofind.torch.use("find", handle=handle, only="ConvDirectNaive")
        with finding as override, torch.autocast("cuda", torch.bfloat16):
            model(x).float().square().sum().backward()
    report = override.report()
    assert report.own_calls == report.calls == 6, str(report)


def test_a_find_does_beside_a_full_cache(tmp_path: Path) -> None:
    x, w = _one_by_one(6)
    free, _ = torch.cuda.mem_get_info()
    cached = torch.empty(free - (256 << 20), dtype=torch.uint8, device="cuda")
    del cached  # PyTorch keeps it
    with Handle(0, database=tmp_path / "finddb.db") as handle:
        with miofind.torch.use("find", handle=handle, only="ConvDirectNaive") as override:
            conv2d(x, w)
        assert override.report().own_calls == 1, str(override.report())


@pytest.mark.filterwarnings("default")  # PyTorch's compiler warns of its own doings, such as forks beside threads
def test_compiled_models_reach_miofind(override: Override) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(16, 32, 3), torch.nn.BatchNorm2d(32), torch.nn.ReLU()).cuda()
    x = torch.randn(2, 16, 10, 10, device="cuda")
    native = model(x)
    before = override.report().own_calls
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    assert torch.allclose(compiled(x), native, atol=1e-2)
    compiled(x).sum().backward()
    assert override.report().own_calls >= before + 3
    assert override.report().own_calls == override.report().calls


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_current(tmp_path: Path) -> None:
    x, w = (tensor.to("cuda:1") for tensor in _one_by_one())
    assert torch.cuda.current_device() == 0
    with (
        Handle(1, database=tmp_path / "finddb.db") as handle,
        miofind.torch.use("estimate", background=False, handle=handle) as override,
    ):
        y = conv2d(x, w)
        conv2d(x.to("cuda:0"), w.to("cuda:0"))
    assert torch.equal(y.cpu().double(), conv2d(x.cpu().double(), w.cpu().double()))
    assert (override.report().own_calls, torch.cuda.current_device()) == (1, 0)


def test_pytorch_runs_while_kernels_are_compiled(tmp_path: Path) -> None:
    x, w = torch.randn(4, 32, 20, 20, device="cuda"), torch.randn(32, 32, 3, 3, device="cuda")
    expected = conv2d(x.double(), w.double()).float()
    compiler = Compiler(BinaryCache(tmp_path / "cache"))
    with (
        Handle(0, database=tmp_path / "finddb.db", compiler=compiler) as handle,
        miofind.torch.use("estimate", handle=handle, only="plain") as made,
    ):
        torch.testing.assert_close(conv2d(x, w), expected, rtol=1e-2, atol=0.1)
        assert made.report().own_calls == 0
        assert miofind.torch.wait_until_compiled(300.0)
        torch.testing.assert_close(conv2d(x, w), expected, rtol=1e-2, atol=0.1)
        assert made.report().own_calls == 1
        y = miofind.torch.convolution(x, w, activation="relu")
        torch.testing.assert_close(y, expected.relu(), rtol=1e-2, atol=0.1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = miofind.torch.convolution(x, w, activation="relu")
        graph.replay()
        torch.testing.assert_close(y, expected.relu(), rtol=1e-2, atol=0.1)
        assert miofind.torch.wait_until_compiled(300.0)
        y = miofind.torch.convolution(x, w, activation="relu")
        torch.testing.assert_close(y, expected.relu(), rtol=1e-2, atol=0.1)


def test_depthwise_convolutions_run_while_their_kernels_are_compiled(tmp_path: Path) -> None:
    x = torch.randn(2, 40, 20, 20, device="cuda").to(memory_format=torch.channels_last).requires_grad_()
    w = torch.randn(40, 1, 3, 3, device="cuda").requires_grad_()

    def computed(x: Any, w: Any) -> tuple[Any, ...]:
        y = conv2d(x, w, padding=1, groups=40)
        return y, *torch.autograd.grad(y.square().sum(), (x, w))

    with miofind.torch.use("fallback", directions=[]):
        expected = computed(x.double(), w.double())
    compiler = Compiler(BinaryCache(tmp_path / "cache"))
    with (
        Handle(0, database=tmp_path / "finddb.db", compiler=compiler) as handle,
        miofind.torch.use("estimate", handle=handle) as made,
    ):
        for _ in range(2):
            for result, exact in zip(computed(x, w), expected, strict=True):
                torch.testing.assert_close(result.double(), exact, rtol=1e-4, atol=1e-2)
            assert miofind.torch.wait_until_compiled(300.0)
        assert made.report().own_calls == 6
        chosen = [part.solution.solver_id for plan in made.plans for part in plan.parts if part.solution is not None]
        assert len(chosen) == 6, "three stood in for three"
        assert chosen.count("ConvDirectNaive") == 3
