"""What a network's own steps write to is read by what is fused as it was read before."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from miofind.torch import fuse

LAST = torch.channels_last
SUMMED, ALONE = "conv: convolution + bias + residual + relu", "conv: convolution + bias"


@torch.library.custom_op("miofind_tests::triple", mutates_args={"x"})
def triple(x: torch.Tensor) -> None:
    x.mul_(3)


@torch.library.custom_op("miofind_tests::halved", mutates_args={})
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@fx.wrap
def unknown(x: Any) -> None:
    x.mul_(3)


ATEN, OWN = torch.ops.aten, torch.ops.miofind_tests
STEPS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a method": (lambda x: x.mul_(3), ALONE),
    "a function": (lambda x: torch.relu_(x), ALONE),
    "an argument": (lambda x: torch.mul(x, 3, out=x), ALONE),
    "an operator": (lambda x: ATEN.mul_(x, 3), ALONE),
    "an overload": (lambda x: ATEN.mul_.Scalar(x, 3), ALONE),
    "an operator of one's own": (lambda x: triple(x), ALONE),
    "its name": (lambda x: OWN.triple(x), ALONE),
    "its overload": (lambda x: OWN.triple.default(x), ALONE),
    "a function that torch.fx calls": (lambda x: unknown(x), ALONE),
    "a flag by position": (lambda x: functional.relu(x, True), ALONE),
    "several at once": (lambda x: torch._foreach_mul_([x], 3), ALONE),
    "an operator's output": (lambda x: ATEN.mul(x, x, out=x), ALONE),
    "rows of an embedding": (lambda x: functional.embedding(torch.arange(3), x.view(-1, 6), max_norm=0.1), ALONE),
    "no rows of one": (lambda x: functional.embedding(torch.arange(3), x.view(-1, 6)), SUMMED),
    "tuples that are added": (lambda x: (x.chunk(1) + x.chunk(1))[0].mul_(3), ALONE),
    "a tuple several times": (lambda x: (x.split(6, 2) * 2)[1].mul_(3), ALONE),
    "sizes that are added": (lambda x: x.view(x.shape[:2] + x.shape[2:]).exp().mul_(3), SUMMED),
    "a mean that keeps dimensions": (lambda x: x.mean((2, 3), True).mul_(2), SUMMED),
    "no operator": (lambda x: ATEN.mul(x, 3), SUMMED),
    "no overload": (lambda x: ATEN.mul.Tensor(x, x), SUMMED),
    "no operator of one's own": (lambda x: OWN.halved(x), SUMMED),
}


class Between(nn.Module):
    """Something is done with the input between a convolution and the sum with that."""

    def __init__(self, step: Callable[[Any], Any]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.step = step

    def forward(self, x: Any) -> Any:
        x = x.abs()
        y = self.conv(x)
        self.step(x)
        return torch.relu(y + x)


@pytest.mark.parametrize("name", STEPS)
def test_what_is_written_to_before_it_is_added_is_read_before(name: str) -> None:
    step, report = STEPS[name]
    network = Between(step).eval()
    fused = fuse(network)
    assert str(fused.fusion_report) == report
    x = torch.randn(2, 3, 6, 6)
    assert torch.equal(fused(x.clone()), network(x.clone()))


class Normed(nn.Module):
    """A convolution and a batch norm, to parts of which the network writes."""

    def __init__(self, write: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.write = write

    def forward(self, x: Any) -> Any:
        y = self.conv(x)
        self.write(self, x)
        return torch.relu(self.norm(y))


def statistics(net: Any) -> tuple[Any, Any]:
    return net.norm.running_mean, net.norm.running_var


NORMED = "conv: convolution + batch_norm + relu"
KEPT = "conv: kept, the network's code writes to its weights"
WRITES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "mean": (lambda net, x: net.norm.running_mean.lerp_(x.mean((0, 2, 3)), 0.5), ALONE),
    "variance": (lambda net, x: net.norm.running_var[:2].mul_(1.5), ALONE),
    "scale": (lambda net, x: net.norm.weight.data.mul_(1.1), ALONE),
    "shift": (lambda net, x: net.norm.bias.data.add_(0.1), ALONE),
    "weights": (lambda net, x: net.conv.weight.data.clamp_(-0.05, 0.05), KEPT),
    "bias": (lambda net, x: net.conv.bias.data.add_(0.1), KEPT),
    "a batch norm": (lambda net, x: functional.batch_norm(x, *statistics(net), training=True), ALONE),
    "its flag by position": (lambda net, x: functional.batch_norm(x, *statistics(net), None, None, True), ALONE),
    "torch's": (lambda net, x: torch.batch_norm(x, None, None, *statistics(net), True, 0.1, 1e-5, False), ALONE),
    "aten's": (lambda net, x: ATEN.native_batch_norm(x, None, None, *statistics(net), True, 0.1, 1e-5), ALONE),
    "two outputs": (
        lambda net, x: ATEN.var_mean(x, (0, 2, 3), correction=1, out0=net.norm.running_var, out1=net.norm.running_mean),
        ALONE,
    ),
    "an instance norm": (lambda net, x: functional.instance_norm(x, *statistics(net)), ALONE),
    "an operator in place": (lambda net, x: operator.iadd(net.norm.bias.data, 0.1), ALONE),
    "nothing": (lambda net, x: net.norm.running_mean.mul(2), NORMED),
    "nothing of a batch norm": (lambda net, x: functional.batch_norm(x, *statistics(net)), NORMED),
    "nothing of an instance norm": (lambda net, x: functional.instance_norm(x), NORMED),
    "what they are added to": (lambda net, x: x.add_(net.norm.bias.view(1, 3, 1, 1)), NORMED),
    "what is computed of weights": (lambda net, x: functional.relu(net.conv.weight.mean(1), inplace=True), NORMED),
}


@pytest.mark.parametrize("name", WRITES)
def test_tensors_that_the_network_writes_to_are_folded_into_none(name: str) -> None:
    write, report = WRITES[name]
    network = Normed(write).eval()
    fused = fuse(copy.deepcopy(network))
    assert str(fused.fusion_report) == report
    x = torch.randn(2, 3, 6, 6).to(memory_format=LAST)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fused(x), network(x))


class OfTwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, a: Any, b: Any) -> Any:
        y = self.conv(a)
        b.mul_(2)
        return torch.relu(y + 1 * b)


class OfTwoBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.register_buffer("whole", torch.randn(1, 3, 6, 6))
        self.register_buffer("view", self.whole[:])

    def forward(self, x: Any) -> Any:
        y = self.conv(self.whole)
        self.view.mul_(1.5)
        return torch.relu(y + x)


def test_memory_may_have_several_names() -> None:
    network = OfTwoInputs().eval()
    fused, x = fuse(network), torch.randn(1, 3, 6, 6)
    first, second = x.clone(), x.clone()
    assert torch.equal(fused(first, first[:]), network(second, second[:]))
    network = OfTwoBuffers().eval()
    fused = fuse(network)
    for _ in range(3):
        assert torch.equal(fused(x), network(x))


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(3, eps=-0.1), nn.BatchNorm2d(4)], ids=["epsilon", "channels"])
def test_a_norm_that_cannot_be_folded_is_left_to_pytorch(norm: nn.Module) -> None:
    fused = fuse(nn.Sequential(nn.Conv2d(3, 3, 3), norm).eval())
    assert str(fused.fusion_report) == "0: convolution + bias"


@pytest.mark.parametrize(
    "step",
    [
        lambda y, x: y.clamp(),
        lambda y, x: functional.gelu(y, approximate="foo"),
        lambda y, x: torch.add(y, x, alpha=True),
    ],
    ids=["clamp", "gelu", "alpha"],
)
def test_what_pytorch_refuses_is_left_to_it(step: Callable[[Any, Any], Any]) -> None:
    class Refused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x: Any) -> Any:
            return step(self.conv(x), x)

    fused = fuse(Refused().eval())
    with pytest.raises(RuntimeError):
        fused(torch.randn(1, 3, 4, 4))


def test_a_bias_that_is_computed_stays() -> None:
    class Doubles(nn.Module):
        def forward(self, bias: Any) -> Any:
            return 2 * bias

    network = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU()).eval()
    parametrize.register_parametrization(network[0], "bias", Doubles())
    fused = fuse(network.eval())
    assert "its bias is no parameter" in str(fused.fusion_report)
    x = torch.randn(1, 3, 6, 6)
    assert torch.equal(fused(x), network(x))


def gated(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def scripted(x: Any) -> Any:
    return torch.jit.script(gated)(x)


@pytest.mark.parametrize(
    "step",
    [scripted, torch.as_tensor, torch.tensor, lambda x: torch.utils.dlpack.to_dlpack(x)],
    ids=["TorchScript", "as_tensor", "tensor", "dlpack"],
)
@pytest.mark.filterwarnings("ignore:To copy construct:UserWarning", "ignore:.*torch.jit.script.:DeprecationWarning")
def test_code_of_c_that_reads_memory_is_not_traced(step: Callable[[Any], Any]) -> None:
    """It took a stand-in for a tensor, and the process ended by SIGSEGV."""
    fused = fuse(Between(step).eval())
    assert "gives a tensor to code of C" in fused.fusion_report.untraced[""]


def momentum(net: Any) -> None:
    for each in net.parameters():
        each.data = 0.9 * each.data


def swapped(net: Any) -> None:
    torch.utils.swap_tensors(net.norm.running_mean, net.norm.running_mean + 1)


@pytest.mark.parametrize(
    ("move", "reason"), [(momentum, "other memory"), (swapped, "decides by what it computes")], ids=["data", "swapped"]
)
def test_tensors_that_get_other_memory_in_each_call_are_not_of_a_graph(
    move: Callable[[Any], None], reason: str
) -> None:
    """They got it while the network was traced, and never more."""
    network = Normed(lambda net, x: move(net)).eval()
    fused = fuse(copy.deepcopy(network))
    assert reason in fused.fusion_report.untraced[""]
    x = torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fused(x), network(x))


class Untraced(nn.Module):
    """Something is done with the network's tensors in code that decides by what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU())

    def forward(self, x: Any) -> Any:
        if x.sum() > -1e9:
            self.use()
        return self.block(x)

    def use(self) -> None:
        raise NotImplementedError


class ClipsAll(Untraced):
    def use(self) -> None:
        for each in self.parameters():
            each.data.clamp_(-0.1, 0.1)


class ScalesBuffers(Untraced):
    def use(self) -> None:
        torch._foreach_mul_([each for each in self.block.buffers() if each.is_floating_point()], 1.5)


class Applies(Untraced):
    def use(self) -> None:
        self.apply(shifted)


class AsksForAType(Untraced):
    def use(self) -> None:
        if next(self.parameters()).dtype != next(self.block.parameters()).dtype:
            raise ValueError


def shifted(module: nn.Module) -> None:
    if isinstance(module, nn.BatchNorm2d):
        module.running_mean.add_(0.5)


@pytest.mark.parametrize("kind", [ClipsAll, ScalesBuffers, Applies, AsksForAType])
def test_code_that_has_all_tensors_of_what_is_below_it(kind: type[Untraced]) -> None:
    network = kind().eval()
    fused = fuse(copy.deepcopy(network))
    assert bool(fused.fusion_report.fused) == (kind is AsksForAType)
    x = torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fused(x), network(x))
