"""Batch norms in compiled training: their statistics summed by the convolutions, the same numbers, and what stays."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.runs.fused_answers import answers_of
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch_layer.inductor.compiled_graphs import Compiled

import miofind.torch
from miofind import Handle
from miofind.torch.fused import plans as fused_plans
from miofind.torch.inductor.batch_statistics import gather_vectors

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

aten = torch.ops.aten
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INPUT = (3, 4, 9, 8, 5)


@pytest.fixture
def served(cpu_handle: Handle) -> Iterator[None]:
    with answers_of(cpu_handle):
        yield


class Blocks(nn.Module):
    """Convolutions with batch norms, and a branch around all but the first."""

    def __init__(self, rank: int = 2, *, bias: bool = False, **norm: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        make = CONVOLUTIONS[rank]
        self.convolutions = nn.ModuleList(make(k, 8, 3, padding=1, bias=bias) for k in (4, 8, 8))
        self.norms = nn.ModuleList(NORMS[rank](8, **norm) for _ in range(3))

    def forward(self, x: Any) -> Any:
        x = first = torch.relu(self.norms[0](self.convolutions[0](x)))
        for convolution, norm in zip([*self.convolutions][1:], [*self.norms][1:], strict=True):
            x = torch.relu(norm(convolution(x)))
        return x + first


def stepped(network: Callable[[Any], Any], x: Any, dtype: Any) -> Any:
    """The result of a step of training under autocast."""
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        y = network(x)
    y.float().square().mean().backward()
    return y


def assert_no_worse(network: Callable[[Any], Any], model: nn.Module, x: Any, steps: int = 1) -> None:
    """Results, gradients and running statistics of a compiled network are near float32's, as those without the pass."""
    plain, wide = copy.deepcopy(model), copy.deepcopy(model)
    for _ in range(steps):
        mine = stepped(network, x, torch.bfloat16)
    others = Compiled(plain, has_pass=False)
    for _ in range(steps):
        theirs, exact = stepped(others, x, torch.bfloat16), stepped(wide, x, torch.float32)
    told = ([*_told(each)] for each in (model, plain, wide))
    for a, b, c in zip([mine, *next(told)], [theirs, *next(told)], [exact, *next(told)], strict=True):
        ours, pytorchs = ((each.double() - c.double()).norm() for each in (a, b))
        assert ours <= 1.5 * pytorchs + 0.03 * c.double().norm() + 1e-3


def _told(model: nn.Module) -> Iterator[Any]:
    yield from (each.grad for each in model.parameters())
    yield from model.buffers()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.usefixtures("served")
def test_a_step_of_training(rank: int, bias: bool) -> None:
    model, x = Blocks(rank, bias=bias), torch.randn(INPUT[: rank + 2])
    compiled = Compiled(model)
    assert_no_worse(compiled, model, x, steps=2)
    expected = "bias.statistics" if bias else "statistics"
    assert compiled.texts[:3] == [expected] * 3
    assert compiled.count(aten.var_mean.correction) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.usefixtures("served")
def test_statistics_are_those_of_what_the_convolution_stored(dtype: Any) -> None:
    """Of a channel far from 0, of one that is constant, and of one that is NaN; the others' are not touched."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=1.0))
    convolution, norm = model[0], model[1]
    torch.manual_seed(0)
    x = torch.randint(-1, 2, (8, 4, 6, 5)).float()  # so that all that is stored is exact
    with torch.no_grad():
        convolution.weight.copy_(torch.randint(-1, 2, convolution.weight.shape))
        convolution.weight[1].zero_()
        convolution.bias.copy_(torch.tensor([10.0, 7.0, 0.0, float("nan")]))
    y = stepped(Compiled(model), x, dtype)
    with torch.autocast("cpu", dtype):
        stored = convolution(x).double()
    count = stored.numel() // 4
    variance = stored.var((0, 2, 3), correction=0)
    torch.testing.assert_close(norm.running_mean.double(), stored.mean((0, 2, 3)), rtol=1e-6, atol=1e-6, equal_nan=True)
    wanted = variance * count / (count - 1)
    torch.testing.assert_close(norm.running_var.double(), wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert norm.running_var[1] >= 0
    assert y[:, 1].abs().max() < 1e-3
    assert y[:, 3].isnan().all()
    assert y[:, :3].isfinite().all()


class Others(nn.Module):
    """Variances that are others than a batch norm's, of a convolution's results in float32."""

    def __init__(self, axes: tuple[int, ...], **named: Any) -> None:
        super().__init__()
        self.convolution, self.axes, self.named = nn.Conv2d(4, 8, 3), axes, named

    def forward(self, x: Any) -> Any:
        y = self.convolution(x.to(self.convolution.weight.dtype)).float()
        variance, mean = torch.var_mean(y, self.axes, **self.named)
        return y + (variance + mean).sum()


OF_CHANNELS = {"correction": 0, "keepdim": True}
STAY: dict[str, Callable[[], nn.Module]] = {
    "float32": Blocks,
    "evaluation": Blocks,
    "no answer": Blocks,
    "images": lambda: Others((2, 3), **OF_CHANNELS),
    "correction": lambda: Others((0, 2, 3), correction=1, keepdim=True),
    "no dimensions": lambda: Others((0, 2, 3), correction=0, keepdim=False),
    "float64": lambda: Others((0, 2, 3), **OF_CHANNELS).double(),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", STAY)
def test_what_stays(case: str, cpu_handle: Handle) -> None:
    compiled = Compiled(STAY[case]().train(case != "evaluation"))
    dtype = torch.float32 if case.startswith("float") else torch.bfloat16
    with answers_of(cpu_handle, "auto" if case == "no answer" else "estimate"):
        stepped(compiled, torch.randn(INPUT[:4]), dtype)
    assert not any("statistics" in text for text in compiled.texts)


@pytest.mark.usefixtures("served")
def test_a_variance_that_a_network_computes_itself() -> None:
    compiled = Compiled(Others((0, 2, 3), **OF_CHANNELS))
    stepped(compiled, torch.randn(INPUT[:4]), torch.bfloat16)
    assert compiled.texts[0] == "bias.statistics"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("norm", [{}, {"affine": False}, {"track_running_stats": False}], ids=str)
@pytest.mark.usefixtures("served")
def test_vectors_of_channels_follow_the_operator_that_sums(norm: dict[str, Any]) -> None:
    """Running statistics, and what is kept for backward, before anything else is computed."""
    model, x = Blocks(**norm), torch.randn(INPUT[:4])
    compiled = Compiled(model)
    assert_no_worse(compiled, model, x, steps=2)
    forward = compiled.graphs[0].graph
    sums = [node for node in forward.nodes if node.target is torch.ops.miofind.convolution_statistics.default]
    (output,) = (node for node in forward.nodes if node.op == "output")
    kept = [node for node in output.all_input_nodes if node.op != "placeholder" and _is_vector(node.meta["val"])]
    assert kept
    order = {node: place for place, node in enumerate(forward.nodes)}
    tensors = [order[n] for n in forward.nodes if n.target is aten.sub.Tensor and n.meta["val"].dim() == 4
               and n.meta["val"].numel() > 8]  # fmt: skip
    for statistics, centred in zip(sums, tensors, strict=True):
        of_these = [node for node in kept if order[statistics] < order[node] < centred]
        assert len(of_these) == len(kept) // 3


def _is_vector(value: Any) -> bool:
    return value.dim() > 0 and value.numel() == 8


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
@pytest.mark.usefixtures("served")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_runs_what_was_put_in_and_copies_nothing() -> None:
    """Weights and input of a contiguous network are converted to channels last at once, and so kept for backward."""
    from torch._inductor.utils import run_and_get_code

    model, x = Blocks(), torch.randn(INPUT[:4])
    options = miofind.torch.inductor_options()
    torch._dynamo.reset()
    compiled = torch.compile(model, options={**options, "fx_graph_cache": False})
    configured = torch._inductor.config.patch(force_layout_optimization=True)
    with configured, torch._functorch.config.patch(enable_autograd_cache=False):
        _, codes = run_and_get_code(assert_no_worse, compiled, model, x)
    replaced = options["post_grad_custom_pre_pass"].replaced
    assert [(p.epilogue.text, str(p.y.layout)) for p in replaced[:3]] == [("statistics", "NHWC")] * 3
    for shape in ("3, 4, 9, 8", "8, 4, 3, 3", "8, 8, 3, 3"):
        made = re.findall(rf"empty_strided_cpu\(\({shape}\), \((.*?)\), torch.bfloat16", codes[0])
        assert len(made) == (2 if shape.startswith("8, 8") else 1)
        assert all(strides.split(", ")[1] == "1" for strides in made)
    assert {plan.answer.is_served for plan in fused_plans.plans() if plan.answer is not None} == {True}
    operators = re.findall(r"= torch\.ops\.miofind\.(\w+)\.default", "".join(codes))
    assert {name.partition("convolution")[0] for name in operators if "convolution" in name} == {"short_"}
    assert "short_convolution_statistics" in operators


class Cast(nn.Module):
    """A convolution of an input that is cast before, and read once more."""

    def __init__(self, reads: Callable[[Any], Any]) -> None:
        super().__init__()
        self.convolution, self.norm, self.reads = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), reads

    def forward(self, x: Any) -> Any:
        x = x.bfloat16()
        return self.norm(self.convolution(x)), self.reads(x)


CASTS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "nothing": (lambda x: None, True),
    "its strides": (lambda x: torch.as_strided(x, (x.numel(),), (1,)) * 2, False),
}


@pytest.mark.parametrize("case", CASTS)
@pytest.mark.usefixtures("served")
def test_a_cast_is_turned_where_operators_alone_read_it(case: str) -> None:
    reads, is_turned = CASTS[case]
    compiled, x = Compiled(Cast(reads)), torch.randn(INPUT[:4])
    configured = torch._inductor.config.patch(force_layout_optimization=True)
    with configured, torch.autocast("cpu", torch.bfloat16):
        y, _ = compiled(x)
    y.float().sum().backward()
    (operator,) = (
        n for n in compiled.graphs[0].graph.nodes if n.target is torch.ops.miofind.convolution_statistics.default
    )
    assert operator.kwargs["channels_last"] is True
    assert operator.args[0].meta["val"].is_contiguous(memory_format=torch.channels_last) is is_turned


class Between(nn.Module):
    """A convolution's statistics with vectors that something else reads as well, before or after it."""

    def __init__(self, case: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.case = case
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm, self.gain = nn.BatchNorm2d(4, momentum=0.9), nn.Parameter(torch.rand(4) + 0.5)
        with torch.no_grad():
            self.first.bias.fill_(5.0)

    def forward(self, x: Any) -> Any:
        gain = self.gain.abs().view(1, -1, 1, 1)
        old = self.norm.running_mean * 3.0
        x = self.first(x * gain if self.case == "read before" else x)
        if self.case in READERS:
            old = READERS[self.case](self.norm.running_mean)
        x = torch.relu(self.norm(x))
        y = self.second(x).float()
        variance, mean = torch.var_mean(y, (0, 2, 3), correction=0, keepdim=True)
        normed = (y - mean) * (torch.rsqrt(variance + 1e-5) * gain)
        return normed if self.case == "read before" else normed + mean * old.view(1, -1, 1, 1)


READERS: dict[str, Callable[[Any], Any]] = {
    "running mean behind": lambda mean: mean * 3.0,
    "its cosine behind": torch.cos,
    "a view behind": lambda mean: mean.view(1, -1).t() * 2.0,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", ["read before", "running mean", *READERS])
@pytest.mark.usefixtures("served")
def test_vectors_that_others_read_are_those_that_they_were(case: str) -> None:
    model, x = Between(case), torch.randn(3, 4, 9, 8)
    assert_no_worse(Compiled(model), model, x, steps=2)


def summed(x: Any, w: Any) -> tuple[Any, Any]:
    y, total, _ = torch.ops.miofind.convolution_statistics(x, w, None, [1, 1], [1, 1], [1, 1], 1)
    return y, total


def of_a_tensor(x: Any, w: Any, v: Any) -> Any:
    y, total = summed(x, w)
    return y + 1, total * aten.amax.default(torch.relu(y), (0, 2, 3))


def of_random_numbers(x: Any, w: Any, v: Any) -> Any:
    y, total = summed(x, w)
    return y + torch.rand(()), total * torch.rand(4)


def added_in_place(x: Any, w: Any, v: Any) -> Any:
    total = summed(x, w)[1]
    return v * 2.0, v.add_(total)


def copied_to_a_clone(x: Any, w: Any, v: Any) -> Any:
    y, total = summed(x, w)
    clone = v.clone()
    return y + 1, clone.copy_(total) * 2.0


def copied_to_what_a_view_reads(x: Any, w: Any, v: Any) -> Any:
    y, total = summed(x, w)
    more, old = y + 1, v.view(1, 4)
    v.copy_(total)
    return more, old


def copied_to_what_a_product_reads(x: Any, w: Any, v: Any) -> Any:
    y, total = summed(x, w)
    more, old = y + 1, v * 3.0
    v.copy_(total)
    return more, old


def _gathered(function: Callable[..., Any]) -> tuple[list[Any], list[Any]]:
    """The targets of a graph's steps before and after."""
    graph = make_fx(function, tracing_mode="fake")(*(torch.randn(s) for s in ((2, 4, 5, 5), (4, 4, 3, 3), (4,)))).graph
    before = [node.target for node in graph.nodes]
    gather_vectors(graph)
    graph.lint()
    return before, [node.target for node in graph.nodes]


STAYING = [of_a_tensor, of_random_numbers, added_in_place, copied_to_a_clone, copied_to_what_a_view_reads]


@pytest.mark.parametrize("function", STAYING)
def test_vectors_that_need_what_cannot_be_moved_stay(function: Callable[..., Any]) -> None:
    before, after = _gathered(function)
    assert after == before


def test_what_a_graph_is_given_is_written_to_behind_the_products_that_read_it() -> None:
    before, after = _gathered(copied_to_what_a_product_reads)
    steps = [aten.add.Tensor, aten.mul.Tensor, aten.copy_.default]
    assert [step for step in before if step in steps] == steps
    assert [step for step in after if step in steps] == [*steps[1:], steps[0]]
