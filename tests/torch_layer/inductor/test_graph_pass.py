"""The pass over Inductor's graphs: what it puts in, that it computes the same, and what it leaves."""

from __future__ import annotations

import copy
import math
import re
import shutil
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from helpers.runs.fused_answers import answers_of
from torch import nn
from torch_layer.inductor.compiled_graphs import Compiled, convolution_pass

import miofind.torch
from miofind import FindOptions, Handle
from miofind.api.many import find_many
from miofind.core.problem import ProblemDescription
from miofind.finddb import MEMORY
from miofind.torch.inductor import backend, group_statistics, norms
from miofind.torch.override import comparisons, plans
from miofind.torch.override.comparisons import Comparison
from miofind.torch.override.flags import Flags, state

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture(scope="module")
def served(cpu_handle: Handle) -> Iterator[None]:
    with answers_of(cpu_handle):
        yield


@pytest.fixture
def own_handle(tmp_path: Path) -> Iterator[Handle]:
    """The CPU place, with a FindDB that a test writes to."""
    with Handle("cpu", database=tmp_path / "finddb.db") as handle:
        yield handle


def prepared(model: Any, dtype: Any = torch.float32) -> Any:
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return model.eval().to(dtype)


class Block(nn.Module):
    """A residual block of one convolution."""

    def __init__(self, tail: Callable[[Any, Any], Any], *, norm: bool, bias: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=bias)
        self.norm = nn.BatchNorm2d(4) if norm else nn.Identity()
        self.tail = tail

    def forward(self, x: Any) -> Any:
        return self.tail(self.norm(self.conv(x)), x)


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "relu": torch.relu,
    "clamp": lambda v: functional.hardtanh(v, -0.5, 0.7),
    "leaky_relu": lambda v: functional.leaky_relu(v, 0.3),
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda v: functional.gelu(v, approximate="tanh"),
    "hardswish": functional.hardswish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "elu": lambda v: functional.elu(v, 0.6),
    "mish": functional.mish,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.usefixtures("served")
def test_activations(name: str, dtype: Any) -> None:
    activation = ACTIVATIONS[name]
    model = prepared(Block(lambda y, x: activation(y), norm=False, bias=True), dtype)
    x = torch.randn(2, 4, 6, 5).to(dtype)
    compiled = Compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x), rtol=0.02, atol=0.02)
    assert compiled.texts == [f"bias.{name}"]
    assert compiled.count(torch.ops.aten.convolution.default) == 0


TAILS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "add": (lambda y, x: torch.relu(y + x), "scale.bias.residual.relu"),
    "add after": (lambda y, x: x + functional.silu(y), "scale.bias.silu.residual"),
    "norm alone": (lambda y, x: y, "scale.bias"),
    "a residual of channels": (
        lambda y, x: torch.relu(y + x.mean((2, 3), keepdim=True) + x),
        "scale.bias.channel_bias.residual.relu",
    ),
    "a smaller residual": (lambda y, x: torch.relu(y + x.mean(1, keepdim=True)), "scale.bias"),
    "two users": (lambda y, x: (torch.relu(y), torch.sigmoid(y)), "scale.bias"),
    "itself": (lambda y, x: torch.relu(y + y), "scale.bias"),
    "taken off a vector": (lambda y, x: torch.relu(torch.arange(4.0).view(4, 1, 1) - y), "scale.bias"),
    "an infinite factor": (lambda y, x: torch.add(y, x, alpha=math.inf), "scale.bias"),
    "another function": (lambda y, x: torch.exp(y), "scale.bias"),
}


@pytest.mark.parametrize("case", TAILS)
@pytest.mark.usefixtures("served")
def test_batch_norms_and_residuals(case: str) -> None:
    tail, expected = TAILS[case]
    model, x = prepared(Block(tail, norm=True)), torch.randn(2, 4, 6, 5)
    compiled = Compiled(model)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    assert compiled.texts == [expected]


CONVERSIONS: dict[str, Callable[[Any, Any], Any]] = {
    "a residual as whole numbers": lambda y, r: y + (5 * r).int(),
    "a residual as truth": lambda y, r: torch.relu(y + r.bool()),
    "a residual after, as bytes": lambda y, r: torch.relu(y) + (9 * r.abs()).to(torch.uint8),
    "a residual in half": lambda y, r: y + r.half(),
    "the convolution in half": lambda y, r: torch.relu(y.half().to(y.dtype) + r),
    "the convolution in single": lambda y, r: torch.relu(y.float().to(y.dtype) + r),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CONVERSIONS)
@pytest.mark.usefixtures("served")
def test_conversions_that_lose_something_are_done(case: str, dtype: Any) -> None:
    tail = CONVERSIONS[case]
    w, x, r = (torch.randn(*shape).to(dtype) for shape in ((4, 3, 3, 3), (2, 3, 6, 5), (2, 4, 6, 5)))

    def run(x: Any, r: Any) -> Any:
        return tail(functional.conv2d(x, w, padding=1), r)

    given, expected = Compiled(run)(x, r), run(x, r)
    torch.testing.assert_close(given, expected, rtol=1e-3 if "in half" in case else 1e-5, atol=1e-5)
    if dtype is torch.float64 and "in single" in case:
        torch.testing.assert_close(given, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("served")
def test_autocast_and_channels_last() -> None:
    model = prepared(Block(lambda y, x: torch.relu(y + x.to(y.dtype)), norm=True))
    model, x = (each.to(memory_format=torch.channels_last) for each in (model, torch.randn(2, 4, 6, 5)))
    compiled = Compiled(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = compiled(x)
        torch.testing.assert_close(y, model(x), rtol=0.03, atol=0.03)
    assert compiled.texts == ["float32.scale.bias.residual.relu"]
    assert [str(problem.y.layout) for problem in compiled.convolution_pass.replaced] == ["NHWC"]


@pytest.mark.parametrize("reason", ["dynamic", "no answer", "transposed", "bare"])
def test_what_stays(reason: str, cpu_handle: Handle, caplog: pytest.LogCaptureFixture) -> None:
    model = prepared(Block(lambda y, x: torch.relu(y), norm=False, bias=True))
    x = torch.randn(2, 4, 6, 5)
    if reason == "transposed":
        model = prepared(nn.Sequential(nn.ConvTranspose2d(4, 4, 3), nn.ReLU()))
    if reason == "bare":
        model = prepared(Block(lambda y, x: y.amax((2, 3)), norm=False))
    compiled = Compiled(model, dynamic=reason == "dynamic")
    with answers_of(cpu_handle, "auto" if reason == "no answer" else "estimate"), torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    assert compiled.texts == []
    missing = [problem.epilogue.text for problem in compiled.convolution_pass.missing]
    assert missing == (["bias.relu"] if reason == "no answer" else [])
    told = {"dynamic": "dynamic shapes stay as torch.compile has them, 1 here", "no answer": "problems: 1."}
    warnings = [record.message for record in caplog.records if record.name == "miofind.torch.inductor.graph_pass"]
    assert [told[reason] in message for message in warnings if reason in told] == [True] * len(warnings)
    assert len(warnings) == (reason in told)
    assert compiled.count(torch.ops.aten.convolution.default) == 1


class Two(nn.Module):
    """Two convolutions without batch norms and a branch around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 4, 1)

    def forward(self, x: Any) -> Any:
        x = torch.relu(x * 2)
        return torch.relu(self.second(torch.relu(self.first(x))) + x)


class Scaled(torch.autograd.Function):
    """A function whose gradient is said to be another: its argument is added twice."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return torch.add(dy, ctx.saved_tensors[0], alpha=2)


class Shifted(torch.autograd.Function):
    """A sum with each channel's exponential."""

    @staticmethod
    def forward(ctx: Any, y: Any, bias: Any) -> Any:
        ctx.save_for_backward(bias)
        return y + bias.exp().view(-1, 1, 1)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return dy, dy.sum((0, 2, 3)) * ctx.saved_tensors[0].exp()


BEFORE: dict[str, tuple[Callable[[Any, Any], Any], list[str]]] = {
    "twice": (lambda conv, x: conv(x + x), ["bias_gradient"]),
    "with a factor": (lambda conv, x: conv(Scaled.apply(x)), ["bias_gradient"]),
    "bias after": (lambda conv, x: Shifted.apply(functional.conv2d(x.sin(), conv.weight), conv.bias), ["bias"]),
}


@pytest.mark.parametrize("case", BEFORE)
@pytest.mark.usefixtures("served")
def test_gradients_of_other_sums(case: str) -> None:
    """Of one summand twice, of one times a number, and over channels, read before what the operator would follow."""
    function, expected = BEFORE[case]
    torch.manual_seed(0)
    conv, x = nn.Conv2d(4, 4, 3), torch.randn(2, 4, 6, 5)
    compiled = Compiled(lambda x: function(conv, x))
    gradients = []
    for run in (compiled, lambda x: function(conv, x)):
        given = x.clone().requires_grad_()
        gradients.append(torch.autograd.grad(run(given).square().sum(), (given, conv.weight, conv.bias)))
    for mine, pytorchs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, pytorchs)
    assert compiled.texts == expected


@pytest.mark.usefixtures("served")
def test_training() -> None:
    model, x = Two(), torch.randn(2, 4, 6, 5)
    eager = copy.deepcopy(model)
    compiled = Compiled(model)
    given = [x.clone().requires_grad_() for _ in range(2)]
    losses = [compiled(given[0]).square().sum(), eager(given[1]).square().sum()]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(given[0].grad, given[1].grad)
    for mine, pytorchs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, pytorchs.grad)
    backward = ["drelu", "bias_gradient", "residual.drelu", "bias_gradient"]
    assert compiled.texts == ["bias.relu", "bias.residual.relu", *backward]
    assert compiled.count(torch.ops.aten.convolution_backward.default) == 0


def test_pytorch_finds_the_backend_by_name() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[3] / "pyproject.toml").read_text())["project"]
    assert EntryPoint("miofind", project["entry-points"]["torch_dynamo_backends"]["miofind"], "").load() is backend


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_backend_takes_options_beside_a_mode_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx", lambda *_, config_patches: given.update(config_patches)
    )
    backend(None, None, mode="reduce-overhead", options={"triton.cudagraphs": False, "max_autotune": True})
    assert given["triton.cudagraphs"] is False
    assert given["max_autotune"] is True
    assert "post_grad_custom_pre_pass" in given


def test_an_answer_that_fails_is_pytorchs(cpu_handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise ValueError("a solver's own error")

    model, x = prepared(Block(lambda y, x: torch.relu(y), norm=False, bias=True)), torch.randn(2, 4, 6, 5)
    compiled = Compiled(model)
    with answers_of(cpu_handle), torch.no_grad():
        monkeypatch.setattr("miofind.torch.fused.answers.ReadySolutions.next", broken)
        torch.testing.assert_close(compiled(x), model(x))
    assert compiled.texts == []


@pytest.mark.parametrize("database", ["finddb.db", MEMORY])
def test_the_identity_of_a_pass_follows_what_it_depends_on(database: str, tmp_path: Path) -> None:
    address = database if database == MEMORY else tmp_path / database
    problem = ProblemDescription.convolution(x=(1, 2, 3, 3), w=(2, 2, 1, 1))
    with Handle("cpu", database=address) as handle, miofind.torch.use(handle=handle, devices="cpu"):
        unmade = convolution_pass().uuid()
        (found,) = miofind.find_solutions(problem, options=FindOptions(only="ConvCpuDirect"), handle=handle)
        first = convolution_pass().uuid()
        assert (unmade == first) is (database == MEMORY), "what is in a file was found by others, too"
        assert first == convolution_pass().uuid()
        with torch.backends.cudnn.flags(deterministic=True):
            assert convolution_pass().uuid() != first
        for gain in (0.5, 1.5):
            comparisons.note(found, handle, Flags.of(state(), on_gpu=False), 1.0, gain)
            before, first = first, convolution_pass().uuid()
            assert first not in (before, unmade)
    if database == MEMORY:
        return
    for _ in range(2):  # the log was folded into the file, and is there once more while it is read
        with Handle("cpu", database=address) as handle, miofind.torch.use(handle=handle, devices="cpu"):
            assert convolution_pass().uuid() == first
            assert handle.database.answer(handle.device.identity, problem.network_config) is not None
            assert convolution_pass().uuid() == first


class Normed(nn.Module):
    """A group norm before a convolution, which a GPU's traced one gives channels first, whatever it is given."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        convolution = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[rank]
        self.norm, self.conv = nn.GroupNorm(2, 4), convolution(4, 4, 3, padding=1)

    def forward(self, x: Any) -> Any:
        return self.conv(functional.silu(self.norm(x.contiguous())))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rank", [3, 4, 5])
@pytest.mark.usefixtures("served")
def test_operators_of_the_network_name_their_memory_format(rank: int) -> None:
    order = {4: torch.channels_last, 5: torch.channels_last_3d}.get(rank, torch.contiguous_format)
    model, x = prepared(Normed(rank)), torch.randn(2, 4, *(6, 5, 7)[: rank - 2])
    network = miofind.torch.fuse(model)
    told = []
    for memory_format in (torch.contiguous_format, order):
        for parameter in network.parameters():
            if parameter.dim() == rank:
                parameter.data = parameter.data.contiguous(memory_format=memory_format)
        compiled = Compiled(network)
        with torch.no_grad(), torch._inductor.config.patch(layout_optimization=False):
            y = compiled(x.contiguous(memory_format=memory_format))
            torch.testing.assert_close(y, model(x))
        (graph,) = compiled.graphs
        (node,) = (each for each in graph.graph.nodes if each.target is torch.ops.miofind.convolution.default)
        told.append(node.kwargs.get("channels_last"))
    assert told == ([None, None] if rank == 3 else [False, True])


@torch.library.custom_op("miofind_tests::strides_read", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,))
def strides_read(x: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor as it lies."""
    return torch.as_strided(x, (x.numel(),), (1,)) * 1


@strides_read.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.numel())


LAST_STEPS: dict[str, Callable[[Any], Any]] = {
    "none": lambda y: y,
    "as_strided": lambda y: torch.as_strided(y, (2, 30), (120, 1)) + 1,
    "fixed strides": strides_read,
    "split": lambda y: torch.split(y, 2, 1),
    "view": lambda y: y.view(2, -1) * 2,
    "permute": lambda y: y.permute(0, 2, 3, 1),
}


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
@pytest.mark.parametrize("last_step", LAST_STEPS)
@pytest.mark.parametrize("is_fused", [True, False], ids=["operators", "convolutions"])
@pytest.mark.usefixtures("served")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_contiguous_network_is_turned_to_channels_last(is_fused: bool, last_step: str) -> None:
    """As Inductor turns convolutions: who reads strides has those that were traced, and outputs keep theirs.

    An operator in a convolution's place gives channels last, so that such a graph is not turned.
    """
    network = miofind.torch.fuse(prepared(Two())) if is_fused else Two()

    def run(x: Any) -> Any:
        return LAST_STEPS[last_step](network(x))

    options, x = miofind.torch.inductor_options(), torch.randn(2, 4, 6, 5)
    torch._dynamo.reset()
    compiled = torch.compile(run, options={**options, "fx_graph_cache": False})
    with torch.no_grad(), torch._inductor.config.patch(force_layout_optimization=True):
        given, expected = compiled(x), run(x)
    torch.testing.assert_close(given, expected)
    if not isinstance(given, tuple):  # of several parts of a tensor Inductor keeps the order of strides alone
        assert given.stride() == expected.stride()
    order = "NHWC" if is_fused or last_step not in ("as_strided", "fixed strides") else "NCHW"
    assert [str(each.y.layout) for each in options["post_grad_custom_pre_pass"].replaced] == [order, order]


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
@pytest.mark.usefixtures("served")
def test_steps_after_operators_say_how_what_they_give_lies(norm: Any) -> None:
    """Inductor writes what is kept for backward as its step says."""
    first = nn.Conv2d(4, 8, 3), *([] if norm is nn.BatchNorm2d else [nn.ReLU()])
    network = nn.Sequential(*first, norm(8), nn.Tanh(), nn.Conv2d(8, 4, 3))
    compiled, x = Compiled(network), torch.randn(2, 4, 8, 8)
    configured = torch._inductor.config.patch(force_layout_optimization=True)
    with configured, torch.autocast("cpu", torch.bfloat16):
        compiled(x)
    (tanh,) = (node for node in compiled.graphs[0].graph.nodes if node.target is torch.ops.aten.tanh.default)
    assert tanh.meta["val"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
@pytest.mark.usefixtures("served")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_steps_of_unknown_sizes_after_operators_stay() -> None:
    """Traced again they would give numbers of elements that have no name in the graph."""
    network, x = nn.Conv2d(4, 8, 3), torch.randn(2, 4, 8, 8)

    def positive(x: Any) -> Any:
        y = network(x).relu()
        return y[y > 0]

    torch._dynamo.reset()
    compiled = torch.compile(positive, options={**miofind.torch.inductor_options(), "fx_graph_cache": False})
    configured = torch._inductor.config.patch(force_layout_optimization=True)
    with configured, torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        torch.testing.assert_close(compiled(x), positive(x))


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
@pytest.mark.usefixtures("served")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_parts_of_norms_keep_their_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a group norm as it is traced for GPUs, channels first."""
    monkeypatch.setattr(norms, "_LEAST_SIZE", 1)
    w, b = torch.rand(16) + 1, torch.rand(16)

    def parts(x: Any) -> Any:
        grouped = x.contiguous().float().reshape(2, 4, 4, -1)
        variance, mean = torch.var_mean(grouped, (2, 3), correction=0, keepdim=True)
        normed = ((grouped - mean) * torch.rsqrt(variance + 1e-5)).reshape(x.shape)
        return (normed * w.reshape(1, -1, 1, 1) + b.reshape(1, -1, 1, 1)).relu().split(8, 1)

    x = torch.randn(2, 16, 8, 9).bfloat16().to(memory_format=torch.channels_last)
    torch._dynamo.reset()
    compiled = torch.compile(parts, options={**miofind.torch.inductor_options(), "fx_graph_cache": False})
    for found, wanted in zip(compiled(x), parts(x), strict=True):
        torch.testing.assert_close(found, wanted)
        assert found.stride() == wanted.stride()


@pytest.mark.usefixtures("served")
def test_nothing_is_turned_unless_all_is_answered_so(monkeypatch: pytest.MonkeyPatch) -> None:
    convolutions = type(convolution_pass())
    serves, channels = convolutions._serves, 6  # of what the first convolution gives
    monkeypatch.setattr(convolutions, "_serves", lambda *each: serves(*each) if each[1].k != channels else None)
    compiled = Compiled(miofind.torch.fuse(prepared(Two())))
    with torch.no_grad(), torch._inductor.config.patch(force_layout_optimization=True):
        compiled(torch.randn(2, 4, 6, 5))
    assert compiled.convolution_pass.replaced == []


class Grouped(nn.Module):
    """A group norm of what convolutions give, or is computed of it."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16 if between == "joined" else 8)
        self.between = between

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        if self.between == "offset":
            y = torch.tanh(y) + y.mean((2, 3), keepdim=True)
        elif self.between == "joined":
            y = torch.cat([y, self.second(y)], 1)
        elif self.between == "apart":
            y = y.reshape(2, 8, 5, 6).transpose(2, 3)
        return functional.silu(self.norm(y))


@pytest.mark.parametrize("is_turned", [True, False])
@pytest.mark.parametrize(("between", "is_last"), [("", True), ("offset", True), ("joined", True), ("apart", False)])
@pytest.mark.usefixtures("served")
def test_norms_of_what_is_turned_to_channels_last_know_it(
    between: str, is_last: bool, is_turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though all was traced channels first."""
    monkeypatch.setattr(group_statistics, "_LEAST_SIZE", 1)
    network, x = miofind.torch.fuse(prepared(Grouped(between))), torch.randn(2, 4, 6, 5)
    compiled = Compiled(network)
    configured = torch._inductor.config.patch(layout_optimization=is_turned, force_layout_optimization=is_turned)
    with torch.no_grad(), configured:
        torch.testing.assert_close(compiled(x), network(x))
    (norm,) = (node for node in compiled.graphs[0].graph.nodes if node.target is torch.ops.aten.var_mean.correction)
    assert norm.args[1] == ([3] if is_last and is_turned else [2, 3])


@pytest.mark.parametrize("is_turned", [True, False])
@pytest.mark.parametrize("norm", [nn.GroupNorm(4, 8), nn.InstanceNorm2d(8, affine=True)], ids=["group", "instance"])
def test_norms_know_it_of_convolutions_that_stay_too(
    norm: Any, is_turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no FindDB: Inductor turns them."""
    monkeypatch.setattr(group_statistics, "_LEAST_SIZE", 1)
    network, x = prepared(nn.Sequential(nn.Conv2d(4, 8, 3), norm)), torch.randn(2, 4, 6, 5)
    compiled = Compiled(network)
    configured = torch._inductor.config.patch(layout_optimization=is_turned, force_layout_optimization=is_turned)
    with torch.no_grad(), configured:
        torch.testing.assert_close(compiled(x), network(x))
    assert compiled.count(torch.ops.aten.convolution.default) == 1
    (statistics,) = (each for each in compiled.graphs[0].graph.nodes if "var_mean" in str(each.target))
    by_turn = {nn.GroupNorm: ([2, 3], [3]), nn.InstanceNorm2d: ([0, 2, 3], [2, 3])}
    assert [*statistics.args[1]] == by_turn[type(norm)][is_turned]


def test_norms_are_a_factor_and_a_shift(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "_LEAST_SIZE", 1)
    monkeypatch.setattr(norms, "_LEAST_PLACES", 1)
    network, x = nn.BatchNorm2d(8), torch.randn(2, 8, 6, 5).bfloat16()
    compiled = Compiled(network)
    torch.testing.assert_close(compiled(x), network(x))
    written = [node for node in compiled.graphs[0].graph.nodes if "force_stride_order" in str(node.target)]
    assert [tuple(node.meta["val"].shape) for node in written] == [(1, 8, 1, 1)] * 2


@pytest.mark.parametrize("is_turned", [True, False])
@pytest.mark.usefixtures("served")
def test_norms_of_instances_know_it_too(is_turned: bool) -> None:
    network = miofind.torch.fuse(prepared(nn.Sequential(nn.Conv2d(4, 8, 3), nn.InstanceNorm2d(8, affine=True))))
    compiled, x = Compiled(network), torch.randn(2, 4, 6, 5)
    configured = torch._inductor.config.patch(layout_optimization=is_turned, force_layout_optimization=is_turned)
    with torch.no_grad(), configured:
        torch.testing.assert_close(compiled(x), network(x))
    (norm,) = (node for node in compiled.graphs[0].graph.nodes if node.target is torch.ops.aten.var_mean.correction)
    assert [*norm.args[1]] == ([2, 3] if is_turned else [0, 2, 3])


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
@pytest.mark.usefixtures("served")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_runs_what_the_pass_put_in() -> None:
    """Through Inductor's code generation, in training, with layouts of its choice."""
    model = Two().to(memory_format=torch.channels_last)
    eager, inputs = copy.deepcopy(model), [torch.ones(2, 4, 6, 5).requires_grad_() for _ in range(2)]
    torch._dynamo.reset()
    options = miofind.torch.inductor_options()
    compiled = torch.compile(model, options={**options, "fx_graph_cache": False})
    with torch._functorch.config.patch(enable_autograd_cache=False):  # a graph of an earlier run needs no pass
        for run, x in zip((compiled, eager), inputs, strict=True):
            run(x).sum().backward()
    replaced = [problem.epilogue.text for problem in options["post_grad_custom_pre_pass"].replaced]
    assert {"bias.relu", "bias.residual.relu", "residual.drelu"} <= set(replaced)
    torch.testing.assert_close(*(x.grad for x in inputs))
    for mine, pytorchs in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, pytorchs.grad)


class Skip(nn.Module):
    """A convolution of an activation that is used once more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 4, 1), nn.InstanceNorm2d(4, affine=True)
        self.second = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Any) -> Any:
        y = functional.leaky_relu(self.norm(self.first(x)), 0.01)
        return torch.cat([self.second(y), y], 1)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_an_operator_reads_is_computed_once() -> None:
    from torch._inductor.utils import run_and_get_code

    model = prepared(Skip(), torch.float16).to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 6, 5).half().to(memory_format=torch.channels_last)
    torch._dynamo.reset()
    options = {**miofind.torch.inductor_options(), "fx_graph_cache": False}
    with torch.inference_mode():
        y, (code,) = run_and_get_code(torch.compile(miofind.torch.fuse(model), options=options), x)
        torch.testing.assert_close(y, model(x), rtol=0.01, atol=0.01)
    made = re.findall(r"empty_strided_cpu\(\(2, 4, 6, 5\).*\)", code)
    assert [each.count("float32") for each in made] == [0]


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
@pytest.mark.usefixtures("served")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_backend() -> None:
    model = prepared(Block(lambda y, x: torch.relu(y + x), norm=True))
    x = torch.randn(2, 4, 6, 5)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))


def test_what_a_graph_lacks_is_found_at_once(own_handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operator that goes in first, and nothing that would go in were that one not served."""
    asked: list[Any] = []

    def noted(problems: Any, *, options: Any, handle: Any) -> Any:
        asked.append((problems, options.likely, handle))
        return find_many(problems, options=options, handle=handle)

    monkeypatch.setattr(miofind, "find_many", noted)
    monkeypatch.setattr(plans, "find_solutions", lambda *_, **__: pytest.fail("a problem is found by itself"))
    model = prepared(Block(lambda y, x: torch.relu(y + x), norm=True))
    x = torch.randn(2, 4, 7, 3)
    with answers_of(own_handle, on_miss="find"), torch.no_grad():
        for _ in range(2):
            compiled = Compiled(model)
            torch.testing.assert_close(compiled(x), model(x))
            assert compiled.texts == ["scale.bias.residual.relu"]
            assert compiled.convolution_pass.missing == []
    assert [(problem.epilogue.text, likely, handle) for (problem,), likely, handle in asked] == [
        ("scale.bias.residual.relu", True, own_handle)
    ], "the second graph lacks nothing"


@pytest.mark.parametrize("prefers_last", [False, True])
def test_what_stays_pytorchs_own_is_found_at_once_too_in_the_format_that_it_runs_in(
    own_handle: Handle, monkeypatch: pytest.MonkeyPatch, prefers_last: bool
) -> None:
    from miofind.torch.inductor import graph_pass

    asked: list[Any] = []

    def noted(problems: Any, *, options: Any, handle: Any) -> Any:
        asked.extend(problems)
        return find_many(problems, options=options, handle=handle)

    monkeypatch.setattr(miofind, "find_many", noted)
    monkeypatch.setattr(graph_pass, "prefers_channels_last", lambda graph: prefers_last)
    if not prefers_last:  # else Inductor would turn them, which is not asked here
        monkeypatch.setattr(plans, "find_solutions", lambda *_, **__: pytest.fail("a problem is found by itself"))
    torch.manual_seed(3)
    first, second = torch.nn.Conv2d(3, 5, 3), torch.nn.ConvTranspose2d(5, 4, 2, groups=1)
    x = torch.randn(2, 3, 9, 8, requires_grad=True)
    with miofind.torch.use("find", handle=own_handle, devices="cpu"):
        compiled = Compiled(lambda x: second(torch.sin(first(x))))
        y = compiled(x)
        got = torch.autograd.grad(y.square().sum(), (x, *first.parameters(), *second.parameters()))
    want = second(torch.sin(first(x)))
    right = torch.autograd.grad(want.square().sum(), (x, *first.parameters(), *second.parameters()))
    for one, other in zip(got, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    kept = [problem for problem in asked if problem.bare == problem]
    assert {str(problem.x.layout) for problem in kept} == {"NHWC" if prefers_last else "NCHW"}
    assert Counter(problem.direction.value for problem in kept) == {
        "forward": 1, "backward_data": 2, "backward_weights": 1,
    }  # fmt: skip


def test_what_pytorch_is_faster_at_fused_is_found_at_once_as_the_convolution_that_it_stays(
    own_handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    from miofind.torch.inductor import graph_pass

    asked: list[Any] = []

    def noted(problems: Any, *, options: Any, handle: Any) -> Any:
        asked.append([problem.epilogue.text for problem in problems])
        return find_many(problems, options=options, handle=handle)

    monkeypatch.setattr(miofind, "find_many", noted)
    monkeypatch.setattr(graph_pass, "prefers_channels_last", lambda graph: False)
    monkeypatch.setattr(plans, "find_solutions", lambda *_, **__: pytest.fail("a problem is found by itself"))

    def compared(fastest: Any, *_: Any) -> Comparison | None:
        is_slow = fastest.problem.epilogue.text.endswith("relu")
        return Comparison(time_ms=fastest.time_ms / 2, measured_at="") if is_slow else None

    monkeypatch.setattr(comparisons, "compared", compared)
    convolution, x = nn.Conv2d(5, 3, 3), torch.randn(2, 5, 9, 8)
    with miofind.torch.use("find", handle=own_handle, devices="cpu"), torch.no_grad():
        compiled = Compiled(lambda x: torch.relu(convolution(x)))
        torch.testing.assert_close(compiled(x), torch.relu(convolution(x)), rtol=1e-4, atol=1e-4)
    assert asked[0] == ["bias.relu"]
    assert compiled.texts == []


def test_a_forward_bias_that_inductor_adds_itself_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from miofind.torch.inductor import kept
    from miofind.torch.inductor.writing import Writing

    monkeypatch.setattr(kept, "current", lambda device: object())
    graph = torch.fx.Graph()
    with FakeTensorMode():
        for name, shape in (("x", (2, 3, 9, 8)), ("w", (5, 3, 3, 3)), ("bias", (5,))):
            graph.placeholder(name).meta["val"] = torch.empty(shape, device="cuda")
        window = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        node = graph.call_function(torch.ops.aten.convolution.default, (*graph.nodes, *window))
        node.meta["val"] = torch.empty(2, 5, 7, 6, device="cuda")
    found = kept.kept_problems(Writing(graph, lambda problem, device: "", frozenset(), frozenset()))
    assert [problem.epilogue.text for problem, _ in found] == [""]


def test_what_stays_of_one_dimension_is_asked_for_as_it_runs(
    own_handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch computes it contiguous, whatever order its input is in."""
    asked: list[Any] = []

    def noted(problems: Any, *, options: Any, handle: Any) -> Any:
        asked.extend(problems)
        return find_many(problems, options=options, handle=handle)

    monkeypatch.setattr(miofind, "find_many", noted)
    monkeypatch.setattr(plans, "find_solutions", lambda *_, **__: pytest.fail("a problem is found by itself"))
    convolution, x = nn.Conv1d(3, 5, 3, bias=False), torch.randn(2, 19, 3)
    with miofind.torch.use("find", handle=own_handle, devices="cpu"), torch.no_grad():
        compiled = Compiled(lambda x: convolution(x.transpose(1, 2)))
        torch.testing.assert_close(compiled(x), convolution(x.transpose(1, 2)), rtol=1e-4, atol=1e-4)
    assert {str(problem.x.layout) for problem in asked} == {"NCW"}


def test_convolutions_of_integers_stay(cpu_handle: Handle) -> None:
    x, w = torch.arange(2 * 3 * 5 * 5).reshape(2, 3, 5, 5), torch.arange(36).reshape(4, 3, 1, 3)
    with answers_of(cpu_handle), torch.no_grad():
        compiled = Compiled(lambda x: torch.relu(torch.conv2d(x, w)))
        assert torch.equal(compiled(x), torch.relu(torch.conv2d(x, w)))
        assert compiled.texts == []


def test_nothing_of_what_stays_is_found_without_an_override(
    cpu_handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    from miofind.torch.inductor import graph_pass

    asked: list[Any] = []
    monkeypatch.setattr(graph_pass, "find_missing", lambda problems, *_: asked.extend(problems))
    convolution, x = torch.nn.Conv2d(3, 5, 3, bias=False), torch.randn(2, 3, 9, 8)
    with answers_of(cpu_handle, on_miss="find"), torch.no_grad():
        torch.testing.assert_close(Compiled(convolution)(x), convolution(x), rtol=1e-4, atol=1e-4)
    assert asked == []


def test_nothing_is_found_at_once_where_misses_are_not_measured_or_finding_fails(
    cpu_handle: Handle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError("a solver's own error")

    monkeypatch.setattr(miofind, "find_many", fails)
    model = prepared(Block(lambda y, x: torch.relu(y), norm=False, bias=True))
    x = torch.randn(2, 4, 3, 7)
    with torch.no_grad():
        with answers_of(cpu_handle, on_miss="fallback"):
            compiled = Compiled(model)
            torch.testing.assert_close(compiled(x), model(x))
        assert [problem.epilogue.text for problem in compiled.convolution_pass.missing] == ["bias.relu"]
        assert "at once" not in caplog.text
        with answers_of(cpu_handle, on_miss="find"):
            compiled = Compiled(model)
            torch.testing.assert_close(compiled(x), model(x))
    assert compiled.texts == ["bias.relu"]
    assert "not found at once: ValueError" in caplog.text
