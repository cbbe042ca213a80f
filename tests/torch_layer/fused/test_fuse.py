"""`miofind.torch.fuse`: which chains become one module, that they compute the same, and what stays."""

from __future__ import annotations

import copy
import cProfile
import functools
import math
import operator
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from helpers.runs.fused_answers import answers_of
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations, prune
from torch.utils import _pytree as pytree

from miofind import Handle
from miofind.errors import InvalidOptionError
from miofind.torch import FusedConvolution, fuse


class Bottleneck(nn.Module):
    """ResNet's block."""

    def __init__(self, channels: int, width: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        out = 2 * width
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        is_alike = stride == 1 and channels == out
        self.downsample = (
            nn.Sequential(nn.Conv2d(channels, out, 1, stride), nn.BatchNorm2d(out)) if not is_alike else None
        )

    def forward(self, x: Any) -> Any:
        identity = x
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        if self.downsample is not None:
            identity = self.downsample(x)
        y += identity
        return self.relu(y)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.SiLU())
        self.blocks = nn.Sequential(Bottleneck(16, 8), Bottleneck(16, 16, stride=2, groups=4))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Any) -> Any:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def prepared(model: Any) -> Any:
    """The model for inference, with batch norms that do something."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return model.eval()


def parts(model: Any) -> dict[str, str]:
    return {layer.name: " ".join(layer.parts[1:]) for layer in model.fusion_report.fused}


def check_same(fused: Any, model: Any, *inputs: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(fused(*(x.clone() for x in inputs)), model(*(x.clone() for x in inputs)))


def test_a_residual_network(cpu_handle: Handle) -> None:
    model, x = prepared(Net()), torch.randn(2, 3, 16, 16)
    fused = fuse(model)
    assert parts(fused) == {
        "stem.0": "batch_norm silu",
        "blocks.0.conv1": "batch_norm relu",
        "blocks.0.conv2": "batch_norm relu",
        "blocks.0.conv3": "batch_norm residual relu",
        "blocks.1.conv1": "batch_norm relu",
        "blocks.1.conv2": "batch_norm relu",
        "blocks.1.conv3": "batch_norm residual relu",
        "blocks.1.downsample.0": "batch_norm",
    }
    assert not any(isinstance(m, (nn.BatchNorm2d, nn.ReLU, nn.Conv2d)) for m in fused.modules())
    assert any(isinstance(m, nn.BatchNorm2d) for m in model.modules()), "the model given stays"
    check_same(fused, model, x)
    with answers_of(cpu_handle) as ran:
        check_same(fused, model, x.to(memory_format=torch.channels_last))
    assert len(ran) == 8
    assert sum("residual.relu" in config for config in ran) == 2


def test_copies_pickles_and_state_dicts() -> None:
    model, x = prepared(Net()), torch.randn(2, 3, 16, 16)
    fused = fuse(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        half = fused(x)
        torch.testing.assert_close(half.float(), model(x).float(), rtol=0.05, atol=0.05)
    for made in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        check_same(made, model, x)
    state = {name: torch.zeros_like(tensor) for name, tensor in fused.state_dict().items()}
    assert {"stem.0.weight", "stem.0.bias", "blocks.0.conv3.bias"} <= state.keys()
    fused.load_state_dict(state)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert not fused(x).any(), "weights kept in the dtype of autocast are made again"
    check_same(fuse(model).double(), copy.deepcopy(model).double(), x.double())


def test_the_gradient_of_the_input() -> None:
    model, x = prepared(Net()), torch.randn(2, 3, 16, 16)
    gradients = []
    for each in (model, fuse(model)):
        given = x.clone().requires_grad_()
        each(given).sum().backward()
        gradients.append(given.grad)
    torch.testing.assert_close(*gradients)


class Writing(nn.Module):
    """Writes to what its activation gives, of which PyTorch keeps the argument for the gradient."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.convolution, self.activation = nn.Conv2d(3, 4, 3), activation

    def forward(self, x: Any) -> Any:
        y = self.activation(self.convolution(x))
        y += 1
        return y


@pytest.mark.parametrize("activation", [nn.LeakyReLU(0.1), nn.ReLU6(), nn.Hardtanh(), nn.SiLU()], ids=str)
def test_gradients_where_a_result_is_written_to(activation: nn.Module) -> None:
    model = Writing(activation).eval()
    fused, x = fuse(model), torch.randn(2, 3, 8, 7)
    given, same = x.clone().requires_grad_(), x.clone().requires_grad_()
    fused(given).mul_(2).square().sum().backward()
    model(same).mul_(2).square().sum().backward()
    torch.testing.assert_close(given.grad, same.grad)
    assert len(fused.fusion_report.fused[0].parts) == 3


def test_traced_by_torch_compile_and_export() -> None:
    model, x = prepared(Net()), torch.randn(2, 3, 16, 16)
    fused = fuse(model)
    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        exported = torch.export.export(fused, (x,))
        torch.testing.assert_close(exported.module()(x), model(x))
    assert "miofind.convolution" in exported.graph_module.code


def test_a_compiled_network_is_fused_as_it_was_before() -> None:
    """Names began with `_orig_mod`, and of a sequence nothing was fused, since what held it was not traced."""
    model = prepared(nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), nn.ConvTranspose2d(4, 4, 3)))
    graphs: list[Any] = []
    fused = fuse(torch.compile(model, backend=lambda graph, _: graphs.append(graph) or graph.forward))
    assert fused.fusion_report == fuse(model).fusion_report
    check_same(fused, model, torch.randn(2, 3, 6, 6))
    assert len(graphs) == 1
    assert fused.get_compiler_config() is None, "as of what torch.compile gives"
    (name,) = fuse(nn.Sequential(torch.compile(Sum(True).eval(), backend="eager")).eval()).fusion_report.untraced
    assert name == "0"


class Wraps(nn.Module):
    """Holds a module by the name that torch.compile gives it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner

    def forward(self, x: Any) -> Any:
        return self._orig_mod(x).relu()


def test_what_has_a_module_by_torch_compile_s_name_is_fused_with_it() -> None:
    """It had no `dynamo_ctx`."""
    model = prepared(Wraps(nn.Conv2d(3, 4, 3)))
    fused = fuse(model)
    assert [layer.parts for layer in fused.fusion_report.fused] == [("convolution", "bias", "relu")]
    check_same(fused, model, torch.randn(2, 3, 6, 6))


def test_what_a_batch_norm_takes_for_channels_is_never_the_convolutions() -> None:
    """Of an unbatched input BatchNorm1d takes the places for channels: here there are as many."""
    model = prepared(nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8)))
    fused, x = fuse(model), torch.randn(3, 10)
    with torch.no_grad():
        assert model(x).shape == (8, 8)
        with pytest.raises(ValueError, match="a batch norm was fused"):
            fused(x)
        torch.testing.assert_close(fused(x[None]), model(x[None]), rtol=1e-4, atol=1e-4)


class Sum(nn.Module):
    """A convolution's result added to a tensor, or that to it."""

    def __init__(self, residual_first: bool) -> None:
        super().__init__()
        self.conv, self.residual_first = nn.Conv2d(4, 4, 3, padding=1), residual_first

    def forward(self, x: Any, residual: Any) -> Any:
        y = self.conv(x)
        return (residual + y if self.residual_first else y + residual).relu()


LAST = {"memory_format": torch.channels_last}
RESIDUALS: dict[str, Any] = {
    "channels first": torch.randn(2, 4, 5, 6),
    "channels last": torch.randn(2, 4, 5, 6).to(**LAST),
    "some channels": torch.randn(2, 8, 5, 6).to(**LAST)[:, 4:],
    "some rows": torch.randn(2, 4, 10, 6)[:, :, ::2],
    "turned": torch.randn(2, 4, 6, 5).transpose(2, 3),
    "of one channel": torch.randn(2, 1, 5, 6).expand(2, 4, 5, 6),
}


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("residual_first", [True, False])
@pytest.mark.parametrize("x", ["channels first", "channels last"])
def test_a_sum_lies_in_memory_as_pytorchs(x: str, residual_first: bool, residual: str) -> None:
    model = Sum(residual_first).eval()
    fused, given = fuse(model), (RESIDUALS[x], RESIDUALS[residual])
    with torch.no_grad():
        expected = model(*given)
        for _ in range(2):  # the second run knows the form of the first
            y = fused(*given)
            assert y.stride() == expected.stride()
            torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_autocast_to_another_type_than_the_weights(dtype: torch.dtype) -> None:
    model = Sum(False).to(dtype).eval()
    fused, x = fuse(model), RESIDUALS["channels last"].to(dtype)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            y, expected = fused(x, x), model(x, x)
            assert y.dtype == expected.dtype
            torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)


def test_a_sum_is_viewed_in_a_compiled_graph_as_outside() -> None:
    fused, given = fuse(Sum(True).eval()), (RESIDUALS["channels last"], RESIDUALS["channels first"])
    torch._dynamo.reset()
    compiled = torch.compile(lambda *each: fused(*each).view(2, -1), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given), fused(*given).view(2, -1))


def test_a_compiled_graph_has_the_operator_for_a_residual_of_some_channels() -> None:
    graphs: list[Any] = []
    torch._dynamo.reset()
    compiled = torch.compile(fuse(Sum(True).eval()), backend=lambda graph, _: graphs.append(graph) or graph.forward)
    with torch.no_grad():
        compiled(RESIDUALS["channels last"], RESIDUALS["some channels"])
    (call,) = [node for node in graphs[0].graph.nodes if "miofind" in str(node.target)]
    assert not any("add" in str(node.target) for node in graphs[0].graph.nodes), call


@pytest.mark.parametrize("residual", ["channels last", "some channels"])
def test_a_residual_of_the_results_order_is_added_by_the_kernel(residual: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = fuse(Sum(True).eval())
    monkeypatch.setattr(FusedConvolution, "_with_other", lambda *_: pytest.fail("PyTorch adds it"))
    with torch.no_grad():
        fused(RESIDUALS["channels last"], RESIDUALS[residual])
        monkeypatch.setattr(FusedConvolution, "_general", lambda *_: pytest.fail("it is known by now"))
        fused(RESIDUALS["channels last"], RESIDUALS[residual])


CHANNELS: dict[str, Any] = {
    "of each image": torch.randn(2, 4, 1, 1),
    "of each image, turned": torch.randn(4, 2, 1, 1).transpose(0, 1),
    "of all images": torch.randn(1, 4, 1, 1),
    "of one channel": torch.randn(2, 1, 1, 1),
    "of a dtype": torch.randn(2, 4, 1, 1, dtype=torch.float64),
    "of a gradient": torch.randn(2, 4, 1, 1, requires_grad=True),
}
CHANNEL_SUMS: dict[str, Callable[[Any, Any], Any]] = {
    "last": lambda y, residual: (y + residual).relu(),
    "first": lambda y, residual: (residual + y).relu(),
    "twice": lambda y, residual: torch.add(y, residual, alpha=2).relu(),
    "after": lambda y, residual: y.relu() + residual,
}


class ChannelSum(nn.Module):
    """A convolution and a sum of its result and numbers of channels."""

    def __init__(self, add: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.conv, self.add = nn.Conv2d(4, 4, 3, padding=1), add

    def forward(self, x: Any, residual: Any) -> Any:
        return self.add(self.conv(x), residual)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("add", CHANNEL_SUMS)
def test_numbers_of_channels_are_added_as_by_pytorch(add: str, channels: str) -> None:
    model = ChannelSum(CHANNEL_SUMS[add]).eval()
    fused, residual = fuse(model), CHANNELS[channels]
    for x in (RESIDUALS["channels last"], torch.randn(2, 4, 1, 1)):
        for factor in (1, 1, 3):  # later runs know the form of the first
            given = (x, residual * factor)
            expected, y = model(*given), fused(*given)
            assert y.requires_grad == residual.requires_grad
            torch.testing.assert_close(y, expected.detach() if not y.requires_grad else expected)
            if residual.requires_grad:
                squares = (each.square().sum() for each in (expected, y))
                wanted, got = (torch.autograd.grad(each, residual, retain_graph=True)[0] for each in squares)
                torch.testing.assert_close(got, wanted)
            with torch.no_grad():
                assert fused(*given).stride() == model(*given).stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", ["of each image", "of a gradient"])
@pytest.mark.parametrize("add", CHANNEL_SUMS)
def test_runs_of_numbers_of_channels_give_the_same_bits(
    add: str, channels: str, dtype: torch.dtype, cpu_handle: Handle
) -> None:
    fused = fuse(ChannelSum(CHANNEL_SUMS[add]).to(dtype).eval())
    x, residual = (each.detach().to(dtype) for each in (RESIDUALS["channels last"], CHANNELS[channels]))
    residual.requires_grad_(CHANNELS[channels].requires_grad)
    with answers_of(cpu_handle) as ran, torch.no_grad():
        first, *later = (fused(x, residual) for _ in range(3))
        assert all(torch.equal(each, first) for each in later)
        assert len({*ran}) == 1, "all runs pose one problem"
    if residual.requires_grad:
        with answers_of(cpu_handle):
            gradients = [torch.autograd.grad(fused(x, residual).sum(), residual)[0] for _ in range(3)]
        assert all(torch.equal(each, gradients[0]) for each in gradients)


@pytest.mark.parametrize("add", ["last", "first"])
def test_a_number_for_each_channel_is_added_by_the_kernel(add: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a diffusion model adds its time embedding."""
    fused, given = fuse(ChannelSum(CHANNEL_SUMS[add]).eval()), (RESIDUALS["channels last"], CHANNELS["of each image"])
    with torch.no_grad():
        expected = fused(*given)
        monkeypatch.setattr(FusedConvolution, "_general", lambda *_: pytest.fail("it is known by now"))
        torch.testing.assert_close(fused(*given), expected, rtol=0, atol=0)


class Tail(nn.Module):
    """A convolution and what a function does with its result and x."""

    def __init__(self, tail: Callable[..., Any], **modules: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.tail = tail
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Any) -> Any:
        return self.tail(self, self.conv(x), x)


def _doubled(kept: list[Any]) -> Any:
    y = kept[0]
    y *= 2
    return kept[0].relu()


FUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "bias alone": (lambda m, y, x: y, "bias"),
    "functional": (lambda m, y, x: functional.relu(y, inplace=True), "bias relu"),
    "torch": (lambda m, y, x: torch.relu(y), "bias relu"),
    "method": (lambda m, y, x: y.relu_(), "bias relu"),
    "relu6": (lambda m, y, x: functional.relu6(y), "bias clamp"),
    "hardtanh": (lambda m, y, x: functional.hardtanh(y, -0.1, max_val=0.2), "bias clamp"),
    "clamp": (lambda m, y, x: y.clamp(-0.1, max=0.2), "bias clamp"),
    "one bound": (lambda m, y, x: y.clamp(max=0.2), "bias clamp"),
    "bounds that cross": (lambda m, y, x: y.clamp(0.5, -0.5), "bias"),
    "an infinite slope": (lambda m, y, x: functional.leaky_relu(y, math.inf), "bias"),
    "leaky_relu": (lambda m, y, x: functional.leaky_relu(y, 0.2), "bias leaky_relu"),
    "silu": (lambda m, y, x: functional.silu(y), "bias silu"),
    "gelu": (lambda m, y, x: functional.gelu(y), "bias gelu"),
    "gelu_tanh": (lambda m, y, x: functional.gelu(y, approximate="tanh"), "bias gelu_tanh"),
    "hardswish": (lambda m, y, x: functional.hardswish(y), "bias hardswish"),
    "sigmoid": (lambda m, y, x: y.sigmoid(), "bias sigmoid"),
    "tanh": (lambda m, y, x: torch.tanh(y), "bias tanh"),
    "elu": (lambda m, y, x: functional.elu(y, alpha=0.5), "bias elu"),
    "mish": (lambda m, y, x: functional.mish(y), "bias mish"),
    "add": (lambda m, y, x: x + y, "bias residual"),
    "add with a factor": (lambda m, y, x: torch.add(y, x, alpha=0.5).relu(), "bias residual relu"),
    "add in place": (lambda m, y, x: y.add_(x).relu_(), "bias residual relu"),
    "add after": (lambda m, y, x: y.relu() + x, "bias relu residual"),
    "relu after it": (lambda m, y, x: (y.relu() + x).relu(), "bias relu residual"),
    "dropout between": (lambda m, y, x: functional.dropout(y, 0.5, training=False).relu(), "bias relu"),
    "a smaller residual": (lambda m, y, x: (y + x.mean((2, 3), keepdim=True)).relu(), "bias residual relu"),
    "a wider residual": (lambda m, y, x: (y + x.double()).relu(), "bias residual relu"),
    "a number": (lambda m, y, x: (y + 1.0).relu(), "add relu"),
    "a size": (lambda m, y, x: (y + x.size(0)).relu(), "bias residual relu"),
    "a size in place": (lambda m, y, x: y.add_(x.shape[1]).relu(), "bias residual relu"),
    "an operator in place": (lambda m, y, x: torch.relu(operator.iadd(y, x)), "bias residual relu"),
    "what is kept is written to": (lambda m, y, x: _doubled([y]), "bias"),
    "an infinite factor": (lambda m, y, x: torch.add(y, x, alpha=math.inf), "bias"),
    "itself": (lambda m, y, x: y + y, "bias"),
    "two users": (lambda m, y, x: y.relu() + y.sigmoid(), "bias"),
    "a factor of the convolution": (lambda m, y, x: torch.add(x, y, alpha=2), "bias"),
    "into x": (lambda m, y, x: x.add_(y), "bias"),
    "x written before the sum": (lambda m, y, x: (y, x.mul_(2), y + x)[2], "bias"),
    "x written after the sum": (lambda m, y, x: (y + x, x.mul_(2))[0], "bias residual"),
    "x written through a view": (lambda m, y, x: (x.view(-1).mul_(2), y + x)[1], "bias"),
    "x written before the activation": (lambda m, y, x: (y, x.mul_(2), y.relu())[2], "bias relu"),
}


def test_a_number_for_each_channel_of_each_image(cpu_handle: Handle) -> None:
    """As a diffusion model adds its time embedding."""
    model, x = (
        prepared(Tail(lambda m, y, x: functional.silu(y + x.mean((2, 3), keepdim=True)))),
        torch.randn(2, 4, 6, 5),
    )
    fused = fuse(model)
    with answers_of(cpu_handle) as ran:
        check_same(fused, model, x)
    assert [config.rpartition("-")[2] for config in ran] == ["e.bias.channel_bias.silu"]


@pytest.mark.parametrize("case", FUSED)
def test_what_is_fused(case: str) -> None:
    tail, expected = FUSED[case]
    model, x = prepared(Tail(tail)), torch.randn(2, 4, 6, 5)
    fused = fuse(model)
    assert parts(fused) == {"conv": expected}
    check_same(fused, model, x)


class AssertingNorm(nn.BatchNorm2d):
    """A batch norm with an activation, as timm has them: a class below PyTorch's, which asserts what it is given."""

    def __init__(self, channels: int, inplace: bool) -> None:
        super().__init__(channels)
        self.act = nn.SiLU(inplace=inplace)

    def forward(self, x: Any) -> Any:
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        statistics = self.running_mean, self.running_var, self.weight, self.bias
        return self.act(functional.batch_norm(x, *statistics, self.training, self.momentum or 0.0, self.eps))


@pytest.mark.parametrize("inplace", [False, True], ids=["", "in place"])
def test_a_norm_that_asserts_dimensions(inplace: bool) -> None:
    layers = nn.Conv2d(3, 4, 3), AssertingNorm(4, inplace), nn.Conv2d(4, 4, 1)
    model, x = prepared(nn.Sequential(*layers)), torch.randn(2, 3, 6, 5)
    fused = fuse(model)
    assert parts(fused) == {"0": "batch_norm silu", "2": "bias"}
    check_same(fused, model, x)
    assert not [node for node in fused.graph.nodes if node.target is torch._assert]


def test_an_assertion_of_something_else_stays() -> None:
    def tail(model: Any, y: Any, x: Any) -> Any:
        torch._assert(y.ndim == 5, "never so")
        return y.relu()

    fused = fuse(prepared(Tail(tail)))
    with pytest.raises(AssertionError, match="never so"):
        fused(torch.randn(2, 4, 6, 5))


def stochastic_depth(input: Any, p: float, mode: str, training: bool = True) -> Any:
    """What torchvision has: torch.fx writes it down as one step."""
    return input if not training else input * torch.empty(len(input), 1, 1, 1).bernoulli_(1 - p)


stochastic_depth.__module__ = "torchvision.ops.stochastic_depth"
fx.wrap("stochastic_depth")


@pytest.mark.parametrize("training", [False, True])
def test_branches_that_are_dropped_in_training(training: bool) -> None:
    def tail(model: Any, y: Any, x: Any) -> Any:
        y = stochastic_depth(y, 0.0, "row", training)
        y += x
        return y.relu()

    model, x = prepared(Tail(tail)), torch.randn(2, 4, 6, 5)
    fused = fuse(model)
    assert parts(fused) == {"conv": "bias" if training else "bias residual relu"}
    check_same(fused, model, x)


class Adapts(nn.Module):
    """Code that has a norm take the statistics of each batch, as at test time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, momentum=0.0)

    def forward(self, x: Any) -> Any:
        self.norm.train()
        y = self.norm(self.conv(x)).relu()
        self.norm.eval()
        return y


def test_a_norm_that_code_puts_into_training_mode() -> None:
    model, x = prepared(nn.Sequential(Adapts(), nn.Conv2d(4, 4, 1), nn.ReLU())), torch.randn(2, 4, 6, 5)
    fused = fuse(model)
    assert parts(fused) == {"1": "bias relu"}
    assert "training mode" in str(fused.fusion_report)
    check_same(fused, model, x)


class NormBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, momentum=0.0)

    def forward(self, x: Any) -> Any:
        return self.norm(self.conv(x)).relu()


class AdaptsPart(nn.Module):
    """The same of a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.part = NormBlock()

    def adapted(self, block: Any, x: Any) -> Any:
        block.train()
        y = block(x)
        block.eval()
        return y


class AdaptsItsPart(AdaptsPart):
    def forward(self, x: Any) -> Any:
        return self.adapted(self.part, x)


class AdaptsAll(AdaptsPart):
    def forward(self, x: Any) -> Any:
        for each in self.modules():
            each.train()
        y = self.part(x)
        self.eval()
        return y


class AdaptsNorm(AdaptsPart):
    def forward(self, x: Any) -> Any:
        self.part.norm.train()
        y = self.part(x)
        self.part.norm.eval()
        return y


class AdaptsLater(AdaptsPart):
    def forward(self, x: Any) -> Any:
        y = self.part(x)
        self.part.train()
        return y


@pytest.mark.parametrize("kind", [AdaptsItsPart, AdaptsAll, AdaptsNorm, AdaptsLater])
@pytest.mark.parametrize("is_part", [False, True])
def test_parts_that_code_puts_into_training_mode(kind: Callable[[], nn.Module], is_part: bool) -> None:
    model, x = prepared(kind()), torch.randn(2, 4, 6, 5)
    model = nn.Sequential(model, nn.Conv2d(4, 4, 1), nn.ReLU()).eval() if is_part else model
    fused = fuse(model)
    assert parts(fused) == ({"1": "bias relu"} if is_part else {})
    assert "part.conv: kept, code of what holds it puts modules into training mode" in str(fused.fusion_report)
    check_same(fused, model, x)
    check_same(fused, model, x)


class Summed(nn.Module):
    """A convolution and an argument that has a default."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Any, other: Any = 0.5) -> Any:
        return functional.relu(self.conv(x) + other)


def test_a_residual_that_may_be_a_number() -> None:
    model, x = prepared(Summed()), torch.randn(2, 4, 6, 5)
    fused = fuse(model)
    check_same(fused, model, x)
    check_same(fused, model, x, x)
    check_same(fused, model, x[0])
    compiled = torch.compile(fused, backend="aot_eager")
    check_same(compiled, model, x)


@pytest.mark.parametrize("shape", [(), (5,), (4, 6, 5), (2, 4, 6, 5), (1, 4, 6, 5)], ids=str)
def test_a_residual_of_an_unbatched_input_promotes_as_pytorchs(shape: tuple[int, ...]) -> None:
    """A tensor of no dimensions decides no dtype, and must not be given one."""
    model = prepared(Summed())
    fused, x, other = fuse(model), torch.randn(4, 6, 5), torch.ones(shape, dtype=torch.float64)
    check_same(fused, model, x, other)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_weights_that_are_trained_after_all_get_gradients(layout: Any, cpu_handle: Handle) -> None:
    model, x = prepared(Tail(lambda m, y, x: y.relu())), torch.randn(2, 4, 6, 5).to(memory_format=layout)
    fused = fuse(model)
    with answers_of(cpu_handle):
        check_same(fused, model, x)  # weights are packed
        for each in (fused, model):
            each.requires_grad_(True)
            each(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(fused.get_parameter(name).grad, parameter.grad)


def test_a_sum_in_place_keeps_its_dtype_under_autocast() -> None:
    model, x = prepared(Tail(lambda m, y, x: y.add_(x))), torch.randn(2, 4, 6, 5)
    fused = fuse(model)
    assert parts(fused) == {"conv": "bias residual"}
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        made, expected = fused(x), model(x)
    assert made.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(made, expected, rtol=0.02, atol=0.02)


def test_float64_stays_under_autocast() -> None:
    model, x = prepared(Tail(lambda m, y, x: y.relu())).double(), torch.randn(2, 4, 6, 5, dtype=torch.float64)
    fused = fuse(model)
    with torch.autocast("cpu", torch.bfloat16):
        check_same(fused, model, x)


MODULES = {
    "relu": nn.ReLU(inplace=True),
    "clamp": nn.Hardtanh(-0.5, 0.5),
    "leaky_relu": nn.LeakyReLU(0.3),
    "silu": nn.SiLU(),
    "gelu_tanh": nn.GELU("tanh"),
    "hardswish": nn.Hardswish(),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "elu": nn.ELU(0.7),
    "mish": nn.Mish(),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name: str) -> None:
    model = prepared(nn.Sequential(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), nn.Identity(), MODULES[name], nn.Dropout()))
    fused = fuse(model)
    assert parts(fused) == {"0": f"batch_norm {name}"}
    check_same(fused, model, torch.randn(2, 4, 9))


class NormAct(nn.BatchNorm2d):
    """A batch norm with an activation of its own, as timm has."""

    def forward(self, x: Any) -> Any:
        norm = functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return functional.silu(norm)


def test_batch_norm_as_a_function() -> None:
    model = prepared(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), NormAct(4)))
    fused = fuse(model)
    assert parts(fused) == {"0": "batch_norm silu"}
    check_same(fused, model, torch.randn(2, 3, 5, 5))


class Simple(nn.Conv3d):
    """A convolution with arguments of its own, as torchvision's video networks have."""

    def __init__(self, c: int, k: int) -> None:
        super().__init__(c, k, 3, padding=1, bias=False)

    @staticmethod
    def strides() -> tuple[int, int, int]:
        return 1, 1, 1


def test_a_convolution_of_a_class_that_computes_as_pytorchs_does() -> None:
    model = prepared(nn.Sequential(Simple(3, 4), nn.BatchNorm3d(4), nn.ReLU(inplace=True)))
    fused = fuse(model)
    assert parts(fused) == {"0": "batch_norm relu"}
    check_same(fused, model, torch.randn(2, 3, 5, 4, 6))


class Standardized(nn.Conv2d):
    """A convolution whose weights are standardized in each call, as in BiT."""

    def forward(self, x: Any) -> Any:
        return self._conv_forward(x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias)


class Doubled(nn.Conv2d):
    """A convolution with another kernel."""

    def _conv_forward(self, input: Any, weight: Any, bias: Any) -> Any:
        return 2 * super()._conv_forward(input, weight, bias)


@pytest.mark.parametrize(("kind", "expected"), [(Standardized, "batch_norm relu"), (Doubled, "mul batch_norm relu")])
def test_a_convolution_with_a_computation_of_its_own(kind: type[nn.Conv2d], expected: str) -> None:
    model = prepared(nn.Sequential(kind(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))
    fused = fuse(model)
    assert parts(fused) == {"0": expected}
    check_same(fused, model, torch.randn(2, 3, 6, 5))


def test_a_convolution_whose_computation_was_replaced_stays() -> None:
    """As is done for images that repeat themselves: padding wraps around."""
    model = prepared(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()))
    plain = model[0]._conv_forward
    model[0]._conv_forward = lambda x, weight, bias: plain(2 * x, weight, bias)
    fused = fuse(model)
    assert parts(fused) == {}
    check_same(fused, model, torch.randn(2, 3, 6, 5))


@pytest.mark.parametrize("index", [1, 2, 3], ids=["batch norm", "activation", "dropout"])
def test_what_follows_a_convolution_stays_where_its_forward_was_replaced(index: int) -> None:
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout()
    model = prepared(nn.Sequential(*layers, nn.Conv2d(4, 4, 1), nn.ReLU()))
    model[index].forward = lambda x: x * -3
    fused = fuse(model)
    assert parts(fused) == {"0": ["bias", "batch_norm", "batch_norm relu"][index - 1], "4": "bias relu"}
    check_same(fused, model, torch.randn(2, 3, 6, 5))


def test_a_replaced_forward_may_write_to_what_it_is_given() -> None:
    model = prepared(Tail(lambda m, y, x: (y, m.other(x), y + x)[2], other=nn.Sigmoid()))
    model.other.forward = lambda x: x.mul_(2)
    fused = fuse(model)
    assert parts(fused) == {"conv": "bias"}
    check_same(fused, model, torch.randn(2, 4, 6, 5))


class Shared(nn.Module):
    """A head that runs on two images, the second time with another end."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Any, z: Any) -> Any:
        return self.conv(x).relu().sum() + self.conv(z).relu().sum() + self.conv(z).sigmoid().sum()


def test_a_convolution_that_runs_several_times() -> None:
    model = prepared(Shared())
    fused = fuse(model)
    assert [layer.parts[-1] for layer in fused.fusion_report.fused] == ["relu", "relu", "sigmoid"]
    assert sum(isinstance(m, FusedConvolution) for m in fused.modules()) == 2
    check_same(fused, model, torch.randn(2, 3, 5, 5), torch.randn(1, 3, 7, 7))


class Untraceable(nn.Module):
    """Looks at values, and takes a Sequential apart."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Bottleneck(4, 2)
        self.layers = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU())
        self.names = {"block": "kept"}

    def forward(self, x: Any) -> Any:
        x = self.block(x)
        first = self.layers[0](x)
        return self.layers[1](first) + first if float(x.sum()) > -1e9 else x


class HoldsTensors(nn.Module):
    """Has tensors that no conversion of it reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.factor, self.listed = nn.Conv2d(4, 4, 3), torch.rand(4, 1, 1), [torch.rand(4, 1, 1)]

    def forward(self, x: Any) -> Any:
        return self.conv(x).relu() * self.factor + self.listed[0]


class CallsUntraced(nn.Module):
    """Calls a part, and looks at values."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Any) -> Any:
        y = self.part(x)
        return y if float(x.sum()) > -1e9 else x


@pytest.mark.parametrize("is_part", [False, True])
def test_tensors_that_are_no_buffers_keep_their_dtype(is_part: bool) -> None:
    """They were buffers of the fused network, and its result had the dtype that it was converted to."""
    model, x = HoldsTensors(), torch.randn(2, 4, 6, 6)
    model = prepared(CallsUntraced(model) if is_part else model)
    fused, converted, half = fuse(model), copy.deepcopy(model).bfloat16(), x.bfloat16()
    assert len(fused.fusion_report.fused) == 1
    for made in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), fuse(fused), fused):
        check_same(made, model, x)
        with torch.no_grad():
            y = made.bfloat16()(half)
            torch.testing.assert_close(y, converted(half), rtol=0.05, atol=0.05)
            assert y.dtype == torch.float32
    part = fused.part if is_part else fused
    assert part.to("meta")(x.to("meta", torch.bfloat16)).is_meta, "they move along"


def test_tensors_that_are_no_buffers_come_back_from_the_meta_device() -> None:
    """No file of weights has them, as none of the network's has."""
    model, x = HoldsTensors(), torch.randn(2, 4, 6, 6)
    model.factor.requires_grad_()
    model = prepared(model)
    fused = fuse(model)
    weights = copy.deepcopy(fused.state_dict())
    made = copy.deepcopy(fused.to("meta")).to_empty(device="cpu")
    made.load_state_dict(weights)
    check_same(made, model, x)


class HoldsModules(nn.Module):
    """Has modules that no conversion of it reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.listed = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()), [nn.Conv2d(4, 4, 1), nn.ReLU()]

    def forward(self, x: Any) -> Any:
        return self.listed[1](self.listed[0](self.stem(x).float()))


def test_modules_that_are_only_in_a_list_stay() -> None:
    model, x = prepared(HoldsModules()), torch.randn(2, 4, 6, 6)
    fused = fuse(model)
    assert parts(fused) == {"stem.0": "bias relu"}
    check_same(fused, model, x)
    check_same(fused.double(), copy.deepcopy(model).double(), x.double())


def test_what_cannot_be_traced_as_a_whole() -> None:
    model = prepared(Untraceable())
    fused = fuse(model)
    assert type(fused) is Untraceable
    assert parts(fused) == {
        "block.conv1": "batch_norm relu",
        "block.conv2": "batch_norm relu",
        "block.conv3": "batch_norm residual relu",
    }
    assert list(fused.fusion_report.untraced) == [""]
    assert "the network: not traced, " in str(fused.fusion_report)
    check_same(fused, model, torch.randn(2, 4, 6, 6))


class Scaled(nn.Module):
    """A block with a parameter and a number of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.stride = 1

    def forward(self, x: Any, other: Any = 0.0, size: Any = None) -> Any:
        y = torch.relu(self.norm(self.conv(x))) * self.scale
        return nn.functional.interpolate(y + other, size, 1.0)


class AsksForClasses(nn.Module):
    """Runs its blocks by their classes and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scaled(), nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()), Scaled()])

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x, x) if isinstance(block, Scaled) and block.stride == 1 else block(x)
        return x if float(x.sum()) > -1e9 else -x


def test_submodules_keep_their_classes_where_the_network_is_not_traced() -> None:
    model, x = prepared(AsksForClasses()), torch.randn(2, 4, 6, 6)
    fused = fuse(model)
    assert len(parts(fused)) == 2
    again = fuse(fused)  # of what was fused before
    for made in (fused, copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), pickle.loads(pickle.dumps(again))):
        check_same(made, model, x)
        assert isinstance(made.blocks[0], Scaled)
        assert [*made.blocks[0].state_dict()] == ["scale", "conv.weight", "conv.bias", "conv.folded"]
    torch._dynamo.reset()
    check_same(torch.compile(fused, backend="aot_eager"), model, x)
    check_same(fused.double(), model.double(), x.double())


class Encoder(nn.Module):
    """A part whose own code has an activation behind its convolution, and what that code does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1)
        self.layers = nn.ModuleList([nn.Conv2d(3, 3, 1), nn.ReLU()])
        self.factor = nn.Parameter(torch.full((1,), 2.0))
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("lock", "_compiled_call_impl")}

    def forward(self, x: Any) -> Any:
        x = functional.relu(self.last(self.norm(self.first(x)))) + x
        for layer in self.layers:
            x = layer(x)
        return x


class Holding(nn.Module):
    """What torch.fx cannot trace, and what it does with its encoder."""

    def __init__(self, use: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.use = use

    def forward(self, x: Any) -> Any:
        return x if x.sum() > 1e9 else self.use(self, x)


def _by_its_parts(model: Any, x: Any) -> Any:
    encoder = model.encoder
    return encoder.last(encoder.norm(encoder.first(x)))


HELD: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {
    "called": (lambda model, x: model.encoder(x), True),
    "a convolution": (lambda model, x: model.encoder.last(model.encoder.norm(model.encoder.first(x))), False),
    "by a name": (_by_its_parts, False),
    "by a text": (lambda model, x: getattr(model.encoder, "last")(model.encoder.first(x)), False),  # noqa: B009
    "a parameter": (lambda model, x: model.encoder(x) * model.encoder.factor, False),
    "a list": (lambda model, x: model.encoder(x) * len(list(model.encoder.layers)), False),
    "all": (lambda model, x: nn.Sequential(*list(model.encoder.children())[:3])(x), False),
}


@pytest.mark.parametrize("use", HELD)
def test_parts_of_a_part_are_what_they_were_to_code_that_is_not_traced(use: str) -> None:
    """They had an activation and a batch norm in them then, or were gone."""
    function, is_whole = HELD[use]
    model, x = Holding(function), torch.randn(2, 3, 6, 5)
    model = prepared(model)
    fused = fuse(model)
    torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-5)
    assert ("encoder" not in fused.fusion_report.untraced) is is_whole
    assert fuse(fused)(x).shape == x.shape, "what was fused is in evaluation mode"


def test_a_part_is_copied_as_its_class_tells() -> None:
    """By what that leaves out, and without what torch.compile made of it, which has the weights of the first."""
    model, x = prepared(Holding(HELD["called"][0])), torch.randn(2, 3, 6, 5)
    fused = fuse(model)
    fused.use = None  # which no pickle takes
    before = fused.encoder(x)
    fused.encoder.compile(backend="eager")
    fused.encoder(x)
    copies = [copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))]
    with torch.no_grad():
        fused.encoder.factor.zero_()
        for parameter in fused.parameters():
            parameter.zero_()
    for each in copies:
        torch.testing.assert_close(each.encoder(x), before)
        assert each.encoder.factor.item() == 2


class Whole(nn.Module):
    """What torch.fx cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Any) -> Any:
        return x if x.sum() > 1e9 else self.convolution(x)


class UsesPartAndWhole(nn.Module):
    """Calls a part of a module that is a single operation of the graph, and the module."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, x: Any) -> Any:
        return functional.relu(next(self.whole.children())(x)) + self.whole(x)


@pytest.mark.parametrize("is_hooked", [False, True], ids=["untraceable", "hooked"])
def test_a_convolution_of_a_single_operation_is_fused_beside_it(is_hooked: bool) -> None:
    whole = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh()) if is_hooked else Whole()
    if is_hooked:
        whole.register_forward_hook(lambda module, given, made: 2 * made)
    model, x = UsesPartAndWhole(whole).eval(), torch.randn(2, 3, 6, 5)
    fused = fuse(model)
    torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-5)
    assert len(fused.fusion_report.fused) == 1


class MayAdd(Scaled):
    """Adds what it is given, if it is given anything."""

    def forward(self, x: Any, other: Any = None) -> Any:
        y = torch.relu(self.norm(self.conv(x)))
        return y if other is None else y + other


class Needs(Scaled):
    """Its second argument is left out by nobody."""

    def forward(self, x: Any, other: Any = None) -> Any:
        return torch.relu(self.norm(self.conv(x))) + other.mean()


def test_an_argument_that_may_be_none() -> None:
    for cls, count in ((MayAdd, 0), (Needs, 1)):
        model, x = prepared(cls()), torch.randn(2, 4, 6, 6)
        fused = fuse(model)
        assert len(parts(fused)) == count
        calls = [(x, x), (x,)] if cls is MayAdd else [(x, x)]
        for arguments in calls:
            torch.testing.assert_close(fused(*arguments), model(*arguments), rtol=1e-4, atol=1e-5)
    assert "is None" in fuse(prepared(MayAdd())).fusion_report.untraced[""]


def test_a_forward_that_was_replaced_is_obeyed() -> None:
    for of in (lambda model: model, lambda model: model.blocks[0]):
        model = prepared(AsksForClasses())
        patched = of(model)
        patched.forward = lambda x, *others, old=patched.forward: 2 * torch.nn.functional.silu(old(x, *others))
        fused = fuse(model)
        assert "was replaced" in str(fused.fusion_report)
        check_same(fused, model, torch.randn(2, 4, 6, 6))


class TakesApart(nn.Module):
    """What torch.fx cannot follow: a list of a length that it does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Scaled()

    def forward(self, x: Any) -> Any:
        return torch.cat([*self.first(x).split(2, 1)][::-1], 1)


def test_a_submodule_that_cannot_be_traced_is_one_step_of_the_others() -> None:
    model, x = prepared(nn.Sequential(Bottleneck(4, 2), TakesApart(), Bottleneck(4, 2))), torch.randn(2, 4, 6, 6)
    fused = fuse(model)
    assert isinstance(fused, torch.fx.GraphModule)
    assert [*fused.fusion_report.untraced] == ["1"]
    assert len(fused.fusion_report.fused) == 7, "three and three of the blocks, and one within what is not traced"
    assert "2.conv3" in parts(fused)
    for made in (fused, pickle.loads(pickle.dumps(fused))):
        check_same(made, model, x)


class Named(nn.Module):
    """Has a block by a name, and beside it a tensor or whatever else by another."""

    def __init__(self, name: str, others: Mapping[str, Any]) -> None:
        super().__init__()
        self.block_name = name
        setattr(self, name, nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()))
        for other, value in others.items():
            setattr(self, other, value)

    def forward(self, x: Any) -> Any:
        return getattr(self, self.block_name)(x)


@pytest.mark.parametrize("name", ["graph", "code", "meta", "recompile"])
def test_names_that_torch_fx_has_itself(name: str) -> None:
    x, reason = torch.randn(2, 4, 6, 6), f"it has {name!r}, a name of what torch.fx has itself"
    of_block = Named(name, {}).eval()
    for model, untraced in ((of_block, {"": reason}), (nn.Sequential(of_block).eval(), {})):
        fused = fuse(model)
        assert dict(fused.fusion_report.untraced) == untraced
        assert len(fused.fusion_report.fused) == (not untraced)
        check_same(fused, model, x)
    attribute = Named("block", {name: {"a": 1}}).eval()
    fused = fuse(attribute)
    assert dict(fused.fusion_report.untraced) == ({} if name == "meta" else {"": reason})
    assert getattr(fused, name) == {"a": 1}
    check_same(fused, attribute, x)


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last, self.calls = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), 0

    def made(self, x: Any) -> Any:
        return functional.relu(self.conv(x))


class InPlace(Convolved):
    def forward(self, x: Any) -> Any:
        x = x.clone()
        part = x[:, 1:]
        part -= 0.5
        part /= 0.25
        first, _ = x.chunk(2, 1)
        first *= 2
        y = self.made(x)
        y += x
        return y


class AsksForTensors(Convolved):
    def forward(self, x: Any) -> Any:
        return self.made(x) if isinstance(x, torch.Tensor) else self.conv(x).sigmoid()


class AsksForResults(Convolved):
    def forward(self, x: Any) -> Any:
        y = self.conv(x)
        y = y.relu() if isinstance(y, torch.Tensor) and torch.is_tensor(y[:, 1:] + 1) else y
        first, _ = functional.avg_pool2d(y, 2).chunk(2, 1)
        return first if isinstance(first, torch.Tensor) and not hasattr(first, "mask") else y


class AsksForSizes(Convolved):
    def forward(self, x: Any) -> Any:
        is_known = isinstance(x.shape, tuple) and isinstance(x.size(0) + 1, int) and isinstance(x.shape[1:], tuple)
        return self.made(x + 1 if is_known and isinstance(x.chunk(2), tuple) else x)


class AsksForParameters(Convolved):
    def forward(self, x: Any) -> Any:
        is_known = isinstance(self.conv.bias, nn.Parameter) and not isinstance(x, nn.Parameter)
        return self.made(x * 2 if is_known else x)


class Dense(Convolved):
    """Layers of tensors or of lists of them, as DenseNet's."""

    def joined(self, given: Any) -> Any:
        before = [given] if isinstance(given, torch.Tensor) else given
        return torch.cat(before, 1)

    def forward(self, x: Any) -> Any:
        y = self.made(self.joined(x))
        return self.joined([self.last(self.joined(y)), y])


class Several(Convolved):
    def forward(self, *inputs: Any) -> Any:
        is_known = isinstance(inputs, tuple) and isinstance(inputs[0], torch.Tensor)
        return self.made(inputs[0]) if is_known else self.conv(inputs[0]).sigmoid()


class WithConstants(Convolved):
    """Tensors that its code makes are constants of the graph, in each trace of it anew."""

    def forward(self, x: Any) -> Any:
        return functional.relu(self.conv(x) * torch.arange(5.0)) + torch.ones(1, 1, 5, 5)


class Remembering(Convolved):
    """What it makes of its parameters alone is kept for each device, as attention's biases are by timm."""

    def __init__(self) -> None:
        super().__init__()
        self.biases, self.kept = nn.Parameter(torch.randn(3, 5)), {}
        self.head = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())

    def bias_for(self, device: Any) -> Any:
        key = str(device)
        if key not in self.kept:
            self.kept[key] = self.biases[:, [0, 2, 1, 1, 3]].sum(0)
        return self.kept[key]

    def forward(self, x: Any) -> Any:
        return self.head(self.made(x) + self.bias_for(x.device))


@pytest.mark.parametrize(
    "kind",
    [
        *(InPlace, AsksForTensors, AsksForResults, AsksForSizes, AsksForParameters, Dense, Several, WithConstants),
        Remembering,
    ],
)
def test_code_is_traced_as_it_runs(kind: type[Convolved]) -> None:
    model, x = prepared(kind()), torch.randn(2, 4, 5, 5)
    fused = fuse(model)
    assert fused.fusion_report.untraced == {}
    assert "conv" in parts(fused)
    for made in (fused, pickle.loads(pickle.dumps(fused)), copy.deepcopy(fused)):
        check_same(made, model, x)


class WithoutAutocast(Convolved):
    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return self.made(x.float())


class WithAutocast(Convolved):
    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.made(x)


class WithoutGradients(Convolved):
    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            y = self.made(x)
        return functional.relu(self.last(y)) + x


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        return -3 * dy


class WithItsOwnBackward(Convolved):
    def forward(self, x: Any) -> Any:
        return functional.relu(self.last(_Reversed.apply(self.made(x))))


class Counting(Convolved):
    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.made(x) * self.calls


class MakingModules(Convolved):
    def forward(self, x: Any) -> Any:
        return nn.Softmax(dim=1)(self.made(x))


class Slicing(Convolved):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())

    def forward(self, x: Any) -> Any:
        return self.made(self.body[:2](x))


@pytest.mark.parametrize(
    "kind", [WithoutAutocast, WithAutocast, WithoutGradients, WithItsOwnBackward, Counting, MakingModules, Slicing]
)
def test_code_that_a_graph_does_not_tell_is_not_traced(kind: type[Convolved]) -> None:
    """Blocks were dropped, what a call counted stood still, and modules made in a call were traced without end."""
    model = prepared(kind())
    fused = fuse(model)
    assert "" in fused.fusion_report.untraced
    for _ in range(2):
        inputs = [torch.ones(2, 4, 5, 5, requires_grad=True) for _ in range(2)]
        with torch.autocast("cpu", torch.bfloat16, enabled=kind is WithoutAutocast):
            made = [each(x) for each, x in zip((fused, model), inputs, strict=True)]
        torch.testing.assert_close(*made)
        for y in made:
            y.float().square().sum().backward()
        torch.testing.assert_close(inputs[0].grad, inputs[1].grad)


class OfLists(nn.Module):
    """What torch.fx cannot trace, and what gives no tensor."""

    def forward(self, x: Any) -> Any:
        return [x, x * 2] if x.sum() < 1e9 else [x]


class AsksForLists(Convolved):
    def __init__(self) -> None:
        super().__init__()
        self.part = OfLists()

    def forward(self, x: Any) -> Any:
        parts = self.part(x)
        return self.made(parts[-1] if isinstance(parts, list) else parts[0])


class AsksForNumbers(Convolved):
    def forward(self, x: Any, factor: Any = 3.0) -> Any:
        return self.made(x) * (factor if isinstance(factor, float) else factor + 1)


class AsksForIterables(Convolved):
    def forward(self, x: Any) -> Any:
        return self.made(x) * (3 if isinstance(x.size(1), Iterable) else 2)


class AsksForAttributes(Convolved):
    def forward(self, x: Any) -> Any:
        return self.made(x) * (0 if hasattr(x, "mask") else 1)


class AsksForDefaults(Convolved):
    def forward(self, x: Any) -> Any:
        return self.made(x) * getattr(x, "factor", 3)


class AsksForGradients(Convolved):
    def forward(self, x: Any) -> Any:
        return self.made(x) * (1 if x.grad is None else 2)


class SetsAttributes(Convolved):
    def forward(self, x: Any) -> Any:
        x.seen = True
        return self.made(x) * (2 if hasattr(x, "seen") else 1)


class AsksByTexts(Convolved):
    def forward(self, x: Any) -> Any:
        return self.made(x * 2 if str(x.dtype) == "torch.float32" and f"{x.ndim} dimensions"[0] == "4" else x)


class RemembersInputs(Remembering):
    def forward(self, x: Any) -> Any:
        return self.made(self.kept.setdefault(str(x.device), x))


class AsksByTables(Convolved):
    factors: ClassVar[dict[Any, int]] = {torch.float32: 2}

    def forward(self, x: Any) -> Any:
        return self.made(x * self.factors.get(x.dtype, 1))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (AsksForLists, "asks for the class"),
        (AsksForNumbers, "asks for the class"),
        (AsksForIterables, "asks for the class"),
        (AsksForAttributes, "whether something has mask"),
        (AsksForDefaults, "whether something has factor"),
        (AsksForGradients, "asks for grad"),
        (SetsAttributes, "sets seen"),
        (AsksByTexts, "makes a text"),
        (RemembersInputs, "changes what is in kept"),
        (AsksByTables, "looks up"),
    ],
)
def test_code_that_asks_what_is_not_known_is_not_traced(kind: type[Convolved], reason: str) -> None:
    """Stand-ins gave some answer, and the branch of that was fused."""
    model = prepared(kind())
    fused = fuse(model)
    assert reason in fused.fusion_report.untraced[""]
    check_same(fused, model, torch.randn(2, 4, 5, 5))


class OfItems(Convolved):
    def forward(self, batch: Any) -> Any:
        y = self.made(batch["x"])
        return y if batch["mask"] is None else y * batch["mask"]


class OfSomeItems(Convolved):
    def forward(self, batch: Any) -> Any:
        y, mask = self.made(batch["x"]), batch.get("mask")
        return y if mask is None else y * mask


class OfAttributes(Convolved):
    def forward(self, batch: Any) -> Any:
        y = self.made(batch.x)
        return y if batch.mask is None else y * batch.mask


class OfSomeAttributes(Convolved):
    def forward(self, batch: Any) -> Any:
        y, mask = self.made(batch.x), getattr(batch, "mask", None)
        return y if mask is None else y * mask


class OfMethods(Convolved):
    def forward(self, batch: Any) -> Any:
        y, mask = self.made(batch.x), batch.found_mask()
        return y if mask is None else y * mask


class OfKeywords(Convolved):
    def forward(self, x: Any, **named: Any) -> Any:
        y, mask = self.made(x), named.get("mask")
        return y if mask is None else y * mask


class OfTwo(Convolved):
    def forward(self, x: Any, mask: Any) -> Any:
        y = self.made(x)
        return y if mask is None else y * mask


class OfTwoByTheirNumber(Convolved):
    """What it does without a mask torch.fx cannot trace."""

    def forward(self, x: Any, mask: Any) -> Any:
        y = self.made(x)
        return y if mask is None and len(y) == 2 else y * mask


class OfSeveral(Convolved):
    def forward(self, *inputs: Any) -> Any:
        y = self.made(inputs[0])
        return y if inputs[1] is None else y * inputs[1]


class Batch:
    def __init__(self, x: Any, mask: Any = None) -> None:
        self.x, self.mask = x, mask

    def found_mask(self) -> Any:
        return self.mask


def in_batch(kind: type[Convolved], x: Any, mask: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and keywords."""
    if kind in (OfItems, OfSomeItems):
        given = {"x": x} if kind is OfSomeItems and mask is None else {"x": x, "mask": mask}
        return (given,), {}
    if kind in (OfAttributes, OfSomeAttributes, OfMethods):
        return (Batch(x, mask),), {}
    if kind is OfKeywords:
        return (x,), {} if mask is None else {"mask": mask}
    return (x, mask), {}


@pytest.mark.parametrize(
    "kind",
    [
        *(OfItems, OfSomeItems, OfAttributes, OfSomeAttributes, OfMethods),
        *(OfKeywords, OfTwo, OfTwoByTheirNumber, OfSeveral),
    ],
)
def test_what_may_be_none_or_left_out(kind: type[Convolved]) -> None:
    model, x, mask = prepared(kind()), torch.randn(2, 4, 5, 5), torch.rand(2, 1, 5, 5)
    fused = fuse(model)
    assert "" in fused.fusion_report.untraced
    for each in (mask, None):
        arguments, named = in_batch(kind, x, each)
        torch.testing.assert_close(fused(*arguments, **named), model(*arguments, **named))


class OfNamedInputs(Convolved):
    def forward(self, batch: Any, other: Any, *rest: Any) -> Any:
        return self.made(batch["x"]) + other.x * rest[0]


def test_inputs_in_dictionaries_and_objects() -> None:
    model, x = prepared(OfNamedInputs()), torch.randn(2, 4, 5, 5)
    fused = fuse(model)
    assert fused.fusion_report.untraced == {}
    given = ({"x": x}, Batch(x), x)
    torch.testing.assert_close(fused(*given), model(*given))


class Noisy(Convolved):
    def forward(self, x: Any) -> Any:
        return self.conv(x) + torch.randn(1, 4, 1, 1)


class NoisyByPython(Convolved):
    def forward(self, x: Any) -> Any:
        return self.conv(x) * random.random()


class NoisyByNumPy(Convolved):
    def forward(self, x: Any) -> Any:
        return self.conv(x) * float(np.random.rand())


@pytest.mark.parametrize("kind", [Noisy, NoisyByPython, NoisyByNumPy])
def test_random_numbers_are_drawn_in_each_call(kind: type[Convolved]) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()
    fused, x = fuse(prepared(kind())), torch.ones(1, 4, 5, 5)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before, "and none are drawn by fuse"
    with torch.no_grad():
        assert not fused(x).equal(fused(x))


class CountingInPlace(Convolved):
    """Writes to a buffer, by a view of it or in a list."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.tensors = where, [torch.zeros(1)]
        self.register_buffer("counts", torch.zeros(2))

    def forward(self, x: Any) -> Any:
        if self.where == "a method":
            self.counts.add_(1)
        elif self.where == "an item":
            self.counts[0] += 1
        else:
            self.tensors[0].add_(1)
        return self.made(x) * self.counts[0] + self.tensors[0]


@pytest.mark.parametrize("where", ["a method", "an item", "a list"])
def test_what_code_counts_in_tensors_is_counted_in_each_call(where: str) -> None:
    """It was counted while the code was traced, and never again."""
    model, x = prepared(CountingInPlace(where)), torch.ones(1, 4, 5, 5)
    fused = fuse(model)
    if where == "a list":
        assert "writes to a tensor that it has" in fused.fusion_report.untraced[""]
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fused(x), model(x))


class Scaling(Convolved):
    """Computes with a buffer alone, and asks for its class."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.rand(4))

    def forward(self, x: Any) -> Any:
        scale = self.table.exp() if not isinstance(self.table, nn.Parameter) else self.table
        return self.made(x) * scale.view(1, -1, 1, 1)


def test_buffers_are_read_in_each_call() -> None:
    """They were constants of the graph, whatever was loaded or written later."""
    model, x = prepared(Scaling()), torch.rand(1, 4, 5, 5)
    fused = fuse(model)
    assert not fused.fusion_report.untraced
    with torch.no_grad():
        fused.load_state_dict(fused.state_dict() | {"table": torch.ones(4)})
        model.table.fill_(1)
        torch.testing.assert_close(fused(x), model(x))
        fused.table.add_(1), model.table.add_(1)
        torch.testing.assert_close(fused(x), model(x))


class Recording(Convolved):
    """Writes to what it has, to any depth."""

    seen: ClassVar[list[Any]] = []

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.list, self.dict, self.set, self.nested = where, [0], {"y": 0}, {0}, {"each": ([0],)}
        self.object = Batch(0)

    def forward(self, x: Any) -> Any:
        y = self.made(x)
        if self.where == "list":
            self.list[0] += 1
        elif self.where == "dict":
            self.dict["y"] = y
        elif self.where == "set":
            self.set.add(len(self.set))
        elif self.where == "nested":
            self.nested["each"][0].append(y)
        elif self.where == "object":
            self.object.x = y
        else:
            self.seen.append(y)
        return y

    def held(self) -> list[Any]:
        return [self.list, self.dict, self.set, self.nested, self.object.x, self.seen]


@pytest.mark.parametrize("where", ["list", "dict", "set", "nested", "object", "seen"])
def test_what_code_writes_to_is_written_in_each_call(where: str) -> None:
    """It was written once, with a stand-in, which no pickle takes."""
    model, x = prepared(Recording(where)), torch.ones(1, 4, 5, 5)
    before = repr(model.held())
    fused = fuse(model)
    assert f"changes what is in {where}" in fused.fusion_report.untraced[""]
    assert repr(fused.held()) == repr(model.held()) == before, "and not by fuse"
    pickle.loads(pickle.dumps(fused))
    with torch.no_grad():
        for _ in range(2):
            fused(x), model(x)
    assert repr(fused.held()) == repr(model.held()) != before
    Recording.seen.clear()


def test_a_part_that_records_is_one_step_of_the_others() -> None:
    fused = fuse(prepared(nn.Sequential(Bottleneck(4, 2), Recording("dict"), Bottleneck(4, 2))))
    assert [*fused.fusion_report.untraced] == ["1"]
    assert {"0.conv3", "2.conv3"} <= parts(fused).keys()


class AsksForModes(Convolved):
    def __init__(self, ask: Callable[[], bool]) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: Any) -> Any:
        y = self.made(x)
        return y * 2 if self.ask() else y


@pytest.mark.parametrize(
    ("ask", "mode"),
    [
        (torch.is_grad_enabled, torch.no_grad),
        (torch.is_inference_mode_enabled, torch.inference_mode),
        (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.autocast("cpu", torch.bfloat16)),
        (lambda: torch.get_autocast_dtype("cpu") == torch.float16, lambda: torch.autocast("cpu", torch.float16)),
    ],
    ids=["gradients", "inference", "autocast", "autocast's dtype"],
)
def test_code_that_asks_for_a_mode_is_told_that_of_each_call(ask: Any, mode: Any) -> None:
    model, x = prepared(AsksForModes(ask)), torch.randn(1, 4, 5, 5)
    fused = fuse(model)
    assert "its code asks for torch." in fused.fusion_report.untraced[""]
    torch.testing.assert_close(fused(x), model(x))
    with mode():
        torch.testing.assert_close(fused(x), model(x), rtol=0.02, atol=0.02)


def test_a_profiler_goes_on_afterwards() -> None:
    def profiler(*event: Any) -> None:
        pass

    sys.setprofile(profiler)
    try:
        fuse(prepared(InPlace()))
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    profile = cProfile.Profile()
    profile.enable()
    fuse(prepared(InPlace()))
    prepared(InPlace())
    profile.disable()
    assert any("prepared" in str(entry.code) and entry.callcount == 2 for entry in profile.getstats())


def test_other_threads_go_on_while_a_network_is_traced() -> None:
    """What is refused of the network's code is refused in its thread alone."""
    told: list[BaseException] = []

    def elsewhere() -> None:
        try:
            with torch.autocast("cpu", torch.bfloat16):
                nn.Identity().noted = True
        except BaseException as error:
            told.append(error)

    class Pausing(Convolved):
        def forward(self, x: Any) -> Any:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            return self.made(x)

    fused = fuse(prepared(Pausing()))
    assert told == []
    assert parts(fused) == {"conv": "bias relu"}


def test_an_input_of_another_dtype_is_refused_as_by_pytorch() -> None:
    fused = fuse(nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()).eval())
    for dtype in (torch.float64, torch.bfloat16, torch.int64):
        with torch.no_grad(), pytest.raises(RuntimeError, match=r"weights have torch\.float32: convert one"):
            fused(torch.ones(1, 4, 5, 5).to(dtype))


def test_a_network_that_was_fused_in_inference_mode_has_gradients() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    with torch.inference_mode():
        fused = fuse(model)
    x = torch.ones(1, 4, 5, 5, requires_grad=True)
    fused(x).sum().backward()
    assert x.grad is not None


def test_another_weight_is_seen_even_in_the_memory_of_the_one_before() -> None:
    fused = fuse(nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()).eval())
    layer, x = getattr(fused, "0"), torch.ones(1, 4, 5, 5).to(memory_format=torch.channels_last)
    fused.load_state_dict(fused.state_dict())
    before = fused(x)
    layer.weight = nn.Parameter(layer.weight.data.mul_(-1), requires_grad=False)
    assert not fused(x).equal(before)
    layer.weight.data = layer.weight.data[:3]
    layer.bias.data = layer.bias.data[:3]
    assert fused(x).shape[1] == 3


def test_complex_convolutions_stay() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, dtype=torch.complex64), nn.Tanh()).eval()
    fused = fuse(model)
    assert fused.fusion_report.kept == {"0": "its weights are complex"}
    check_same(fused, model, torch.randn(1, 3, 5, 5, dtype=torch.complex64))


def test_a_fused_module_can_be_pruned() -> None:
    fused, x = fuse(nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()).eval()), torch.ones(1, 4, 5, 5)
    fused(x)
    prune.l1_unstructured(getattr(fused, "0"), "weight", amount=0.9)
    assert fused(x).isfinite().all()


def test_copies_of_a_parametrized_module_name_no_memory_of_it() -> None:
    """PyTorch copies one by its attributes: of two that named the same memory the second to go ended the process."""
    fused, x = fuse(nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()).eval()), torch.ones(1, 4, 5, 5)
    before = fused(x)
    parametrizations.weight_norm(getattr(fused, "0"))
    copied = copy.deepcopy(fused)
    assert getattr(fused, "0")._ready.memory is not None
    assert getattr(copied, "0")._ready.memory is None
    torch.testing.assert_close(copied(x), before)


def test_a_network_that_cannot_be_copied_is_told() -> None:
    conv = nn.Conv2d(4, 4, 3)
    prune.l1_unstructured(conv, "weight", amount=0.5)
    with pytest.raises(InvalidOptionError, match=r"the model cannot be copied.*prune\.remove"):
        fuse(nn.Sequential(conv, nn.ReLU()).eval())


@pytest.mark.parametrize("kind", ["statistics that a first call makes", "what cannot be pickled"])
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_network_of_which_a_part_cannot_be_copied_is_told(kind: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LazyBatchNorm2d() if "first" in kind else nn.ReLU()).eval()
    model.lock = None if "first" in kind else threading.Lock()
    with pytest.raises(InvalidOptionError, match="the model cannot be copied"):
        fuse(model)


def test_padding_of_a_weight_of_another_size_than_its_module_was_made_with() -> None:
    model = prepared(nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.ReLU()))
    model[0].weight = nn.Parameter(torch.randn(4, 3, 5, 5))
    fused = fuse(model)
    assert parts(fused) == {"0": "bias relu"}
    check_same(fused, model, torch.randn(2, 3, 8, 8))


class ByValues(nn.Module):
    """Its code depends on values."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.add_module("0", part)

    def forward(self, x: Any) -> Any:
        return getattr(self, "0")(x) if x.sum() < 1e9 else x


def hooked(register: str) -> Any:
    conv = nn.Conv2d(3, 4, 3)
    getattr(conv, register)(lambda module, *given: None)
    return conv


def pruned() -> Any:
    """A convolution whose weight a hook computes, as it is after a call without gradients: it can be copied."""
    conv = prune.l1_unstructured(nn.Conv2d(3, 4, 3), "weight", amount=0.5)
    with torch.no_grad():
        conv(torch.ones(1, 3, 6, 6))
    return conv


KEPT = {
    **{
        f"{kind} hooks": (functools.partial(hooked, f"register_{kind}_hook"), "hooks")
        for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre")
    },
    "circular padding": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), "circular"),
    "a parametrization": (lambda: torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), "remove_param"),
    "pruned weights": (pruned, "prune.remove"),
    "uneven padding": (lambda: nn.Conv2d(3, 4, 2, padding="same"), "same"),
    "nothing to fuse": (lambda: nn.Conv2d(3, 4, 3, bias=False), "nothing follows"),
}


@pytest.mark.parametrize("case", KEPT)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_what_stays(case: str) -> None:
    make, reason = KEPT[case]
    tail = nn.MaxPool2d(2) if "nothing" in case else nn.ReLU()
    model = prepared(nn.Sequential(make(), tail))
    fused = fuse(model)
    assert parts(fused) == {}
    assert reason in fused.fusion_report.kept["0"]
    check_same(fused, model, torch.randn(2, 3, 6, 6))


def test_pickles_name_the_public_class() -> None:
    """So that networks that were saved are read by releases that have it elsewhere."""
    content = pickle.dumps(fuse(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()), protocol=2)
    assert b"cmiofind.torch\nFusedConvolution\n" in content


@pytest.mark.parametrize("path", ["", "0.0"], ids=["alone", "in a sequence that was not traced"])
def test_a_convolution_of_which_nobody_knows_what_follows_is_told(path: str) -> None:
    model = nn.Conv2d(3, 4, 3) if not path else ByValues(nn.Sequential(nn.Conv2d(3, 4, 3)))
    fused = fuse(prepared(model))
    assert [*fused.fusion_report.kept] == [path]
    assert "what holds it was not traced" in fused.fusion_report.kept[path]
    check_same(fused, model, torch.randn(2, 3, 6, 6))


@pytest.mark.parametrize("beside", ["a convolution", "nothing", "what was not traced"])
def test_transposed_convolutions_are_told_of(beside: str) -> None:
    """They stayed without a word."""
    up = nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    conv = nn.Conv2d(3, 3, 3) if beside == "a convolution" else nn.Identity()
    inner = nn.Sequential(conv, up)
    model = prepared(ByValues(inner) if "traced" in beside else nn.Sequential(inner))
    fused = fuse(model)
    assert fused.fusion_report.kept["0.1.0"] == "it is transposed"
    check_same(fused, model, torch.randn(2, 3, 6, 6))


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_torchscript_is_refused() -> None:
    """It was PyTorch's RuntimeError of a method that such modules lack."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    for scripted in (torch.jit.script(model), torch.jit.trace(model, torch.randn(1, 3, 5, 5))):
        with pytest.raises(InvalidOptionError, match="TorchScript"):
            fuse(scripted)


def test_modules_of_exports_are_refused() -> None:
    """The advice was eval(), which such modules refuse."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    exported = torch.export.export(model, (torch.randn(1, 3, 5, 5),)).module()
    with pytest.raises(InvalidOptionError, match="before it is exported"):
        fuse(exported)


class ReadsItsWeights(nn.Module):
    """Its code reads the parameters of a convolution that it calls with a batch norm behind."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.read = read
        self.inner = nn.Sequential()
        self.inner.conv, self.inner.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Any) -> Any:
        conv = self.inner.conv
        y = functional.relu(self.inner.norm(conv(x)))
        if self.read == "weight":
            return functional.conv_transpose2d(y, conv.weight, padding=1)
        if self.read == "bias":
            return y + conv.bias.view(1, -1, 1, 1)
        return y + functional.conv2d(x, conv.weight, conv.bias, padding=1)


@pytest.mark.parametrize("read", ["weight", "bias", "both"])
def test_parameters_that_code_reads_stay_as_they_are_without_the_norm(read: str) -> None:
    """A tied autoencoder read weights with the batch norm folded in."""
    model = prepared(ReadsItsWeights(read))
    fused = fuse(model)
    check_same(fused, model, torch.randn(2, 4, 6, 7))
    assert any("batch_norm" in layer.parts for layer in fused.fusion_report.fused)


class AddsWhatItIsGiven(nn.Module):
    def __init__(self, add: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.conv, self.add = nn.Conv2d(4, 4, 3, padding=1), add

    def forward(self, x: Any, skip: Any) -> Any:
        return functional.relu(self.add(self.conv(x), skip))


@pytest.mark.parametrize(
    "add",
    [
        lambda y, skip: y + skip,
        lambda y, skip: skip + y,
        lambda y, skip: y.add_(skip),
        lambda y, skip: torch.add(y, skip, alpha=2),
    ],
    ids=["sum", "turned", "in place", "scaled"],
)
def test_a_sum_with_nothing_raises_as_before(add: Callable[[Any, Any], Any]) -> None:
    """The addition was left out without a word."""
    model = AddsWhatItIsGiven(add).eval()
    fused, x = fuse(model), torch.randn(2, 4, 6, 7)
    check_same(fused, model, x, torch.randn(2, 4, 6, 7))
    for network in (model, fused, fused):
        with pytest.raises(TypeError):
            network(x, None)
    with torch.no_grad(), pytest.raises(TypeError):
        torch.compile(fused, backend="eager")(x, None)


def test_a_function_that_is_mapped_over_tensors_alone_is_mapped_over_what_stands_for_them() -> None:
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: Any) -> Any:
            y, count = pytree.tree_map_only(torch.Tensor, lambda each: each * 2, [self.conv(x).relu(), 3])
            return y + count

    model = Doubles().eval()
    fused = fuse(model)
    assert parts(fused) == {"conv": "bias relu"}
    check_same(fused, model, torch.randn(2, 4, 6, 7))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_writes_a_fused_network_down(mode: Any) -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()).eval()
    fused = fuse(model)
    with torch.no_grad():
        graph = make_fx(fused, tracing_mode=mode, _allow_non_fake_inputs=True)(torch.randn(2, 4, 6, 7))
    assert graph.graph.find_nodes(op="call_function", target=torch.ops.miofind.convolution.default)
    check_same(graph, model, torch.randn(2, 4, 6, 7))


def test_tensors_that_code_reads_have_the_names_that_torch_fx_gives_them() -> None:
    """One that has two, a parameter that is a buffer, too, and one of a part that nobody calls."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            self.second.weight = self.first.weight
            self.shift = nn.Parameter(torch.randn(4, 1, 1))
            self.register_buffer("same_shift", self.shift)
            self.register_buffer("factor", torch.randn(4, 1, 1))
            self.idle = nn.Linear(2, 2)

        def forward(self, x: Any) -> Any:
            y = functional.relu(self.first(x)) * self.factor + self.same_shift
            return functional.silu(self.second(y)) * self.second.weight.mean() + self.idle.bias.sum()

    model = Reads().eval()
    fused, plain = fuse(model), torch.fx.symbolic_trace(model)
    assert {node.target for node in plain.graph.find_nodes(op="get_attr")} <= {
        node.target for node in fused.graph.find_nodes(op="get_attr")
    }
    with torch.no_grad():
        for each in (model.shift, model.factor, model.idle.bias):
            each.add_(0.5)
        fused.load_state_dict(model.state_dict(), strict=False)
    check_same(fused, model, torch.randn(2, 4, 6, 7))


def test_a_convolution_that_is_called_with_a_sum_and_without_becomes_two() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: Any) -> Any:
            return functional.relu(self.conv(x) + x) * functional.relu(self.conv(x))

    model = Both().eval()
    fused = fuse(model)
    check_same(fused, model, torch.randn(2, 4, 6, 7))
    layers = [module for module in fused.modules() if isinstance(module, FusedConvolution)]
    assert sorted(layer.has_residual for layer in layers) == [False, True]


def test_a_norm_stays_with_which_weights_would_overflow() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, eps=1e-12), nn.ReLU()).eval()
    model[1].running_var.fill_(1e-7)
    nn.init.constant_(model[1].weight, 1000.0)
    assert [layer.parts for layer in fuse(model).fusion_report.fused] == [("convolution", "batch_norm", "relu")]
    half = model.half()
    fused, x = fuse(half), (1e-3 * torch.randn(2, 4, 8, 8)).half()
    assert [layer.parts for layer in fused.fusion_report.fused] == [("convolution", "bias")]
    torch.testing.assert_close(fused(x), half(x), rtol=1e-2, atol=1e-2, equal_nan=True)
    half[0].weight.data[0, 0, 0, 0] = math.nan  # which no norm brought
    assert [layer.parts for layer in fuse(half).fusion_report.fused] == [("convolution", "batch_norm", "relu")]


@pytest.mark.parametrize(("scale", "parts"), [(1e30, ("convolution", "batch_norm")), (1e300, ("convolution", "bias"))])
def test_a_norm_is_folded_into_weights_whose_sum_alone_overflows(scale: float, parts: tuple[str, ...]) -> None:
    """In float32: 36 of 1e60 are finite in float64, of 1e600 none is."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)).double().eval()
    nn.init.constant_(model[0].weight, scale)
    nn.init.constant_(model[1].weight, scale)
    assert [layer.parts for layer in fuse(model).fusion_report.fused] == [parts]


class Two(NamedTuple):
    """What a network gives."""

    first: Any
    second: Any


class Pair(tuple[Any, ...]):
    """A tuple of another class, which torch.fx would make a plain one of."""


class Gives(nn.Module):
    """A convolution, an activation, and what a function makes of these.

    Args:
        made: the function.
    """

    def __init__(self, made: Callable[[Any], Any]) -> None:
        super().__init__()
        self.conv, self.made = nn.Conv2d(3, 4, 3), made

    def forward(self, x: Any) -> Any:
        return self.made(torch.relu(self.conv(x)))


@pytest.mark.parametrize(
    ("made", "is_traced"), [(lambda y: Two(y, 2 * y), True), (lambda y: Pair((y, y)), False)], ids=["named", "other"]
)
def test_tuples_keep_their_class(made: Callable[[Any], Any], is_traced: bool) -> None:
    model, x = Gives(made).eval(), torch.randn(1, 3, 6, 5)
    fused = fuse(model)
    assert ("" in fused.fusion_report.untraced) is not is_traced
    assert type(fused(x)) is type(model(x))
    torch.testing.assert_close(tuple(fused(x)), tuple(model(x)))


class Doubled(nn.Module):
    """Its class has a call of its own around the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Gives(torch.abs)

    def __call__(self, *given: Any) -> Any:
        return 2 * super().__call__(*given)

    def forward(self, x: Any) -> Any:
        return self.layer(x)


class ByMode:
    """Gives a forward by whether gradients are on."""

    def __get__(self, module: Any, kind: type | None = None) -> Any:
        function = Doubled.forward if torch.is_grad_enabled() else lambda module, x: -module.layer(x)
        return function if module is None else functools.partial(function, module)


class Chosen(nn.Module):
    """Its forward is another one without gradients."""

    forward = ByMode()

    def __init__(self) -> None:
        super().__init__()
        self.layer = Gives(torch.abs)


@pytest.mark.parametrize("make", [Doubled, Chosen])
def test_classes_whose_calls_are_more_than_a_forward_keep_them(make: Callable[[], nn.Module]) -> None:
    model, x = make().eval(), torch.randn(1, 3, 6, 5)
    fused = fuse(model)
    assert type(fused) is make
    assert [layer.parts for layer in fused.fusion_report.fused] == [("convolution", "bias", "relu")]
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_network_is_fused_in_what_hands_all_that_it_is_given_on() -> None:
    """Where no argument has a name, the input is among those that are handed on."""
    net, x = prepared(Net()), torch.randn(1, 3, 20, 20)
    averaged = torch.optim.swa_utils.AveragedModel(net).eval()
    fused = fuse(averaged)
    assert type(fused) is type(averaged)
    assert len(fused.fusion_report.fused) == len(fuse(net).fusion_report.fused)
    torch.testing.assert_close(fused(x), net(x), rtol=1e-4, atol=1e-5)


class ScalesChannels(nn.Module):
    """Multiplies channels."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4, 1, 1))

    def forward(self, x: Any) -> Any:
        return x * self.scale


class Wrapper(nn.Module):
    """Names what is in another module as that does, as PyTorch's wrappers of activations do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)

    def named_parameters(self, *given: Any, **named: Any) -> Iterator[tuple[str, Any]]:
        for name, parameter in super().named_parameters(*given, **named):
            yield name.replace("module.", ""), parameter

    def forward(self, x: Any) -> Any:
        return self.module(x)


def test_what_a_wrapper_names_otherwise_is_fused() -> None:
    model, x = Wrapper(nn.Sequential(nn.Conv2d(3, 4, 3), ScalesChannels(), nn.ReLU())).eval(), torch.randn(1, 3, 6, 5)
    fused = fuse(model)
    assert [layer.parts for layer in fused.fusion_report.fused] == [("convolution", "mul", "relu")]
    torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_model_in_training_is_refused() -> None:
    model = Net().eval()
    model.blocks[1].bn2.train()
    with pytest.raises(InvalidOptionError, match=r"blocks\.1\.bn2 is in training mode"):
        fuse(model)
    with pytest.raises(InvalidOptionError, match=r"torch\.nn\.Module"):
        fuse(torch.relu)
