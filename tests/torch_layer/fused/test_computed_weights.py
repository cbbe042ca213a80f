"""Convolutions that are called as functions: of constant weights they are fused, of others they stay."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional

from miofind.torch import FusedConvolution, fuse


class Standardized(nn.Conv2d):
    """A convolution whose weight is standardized in each call, as in networks without norms."""

    def __init__(self, *sizes: int, **keywords: Any) -> None:
        super().__init__(*sizes, **keywords)
        self.gain = nn.Parameter(torch.rand(self.out_channels, 1, 1, 1))

    def forward(self, x: Any) -> Any:
        rows, gain = self.weight.reshape(1, self.out_channels, -1), (self.gain * 0.5).view(-1)
        weight = functional.batch_norm(rows, None, None, weight=gain, training=True, momentum=0.0, eps=1e-5)
        numbers = self.stride, self.padding, self.dilation, self.groups
        return functional.conv2d(x, weight.reshape_as(self.weight), self.bias, *numbers)


class Functions(nn.Module):
    """A convolution by a module, one by a function, and what follows it."""

    def __init__(self, convolution: Callable[[Any, Any], Any], *, rank: int = 2, groups: int = 1) -> None:
        super().__init__()
        self.first = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1](4, 4, 1)
        self.convolution = convolution
        self.weight = nn.Parameter(torch.randn(4, 4 // groups, *(3,) * rank))
        self.register_buffer("bias", torch.randn(4))

    def forward(self, x: Any) -> Any:
        return self.convolution(self, self.first(x)).relu()


@fx.wrap
def unknown(weight: Any) -> Any:
    return weight * 2


def same(fused: Any, model: Any, x: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(fused(x.clone()), model(x.clone()))


def test_standardized_weights() -> None:
    layers = Standardized(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(True), Standardized(4, 4, 1, groups=2)
    model, x = nn.Sequential(*layers).eval(), torch.randn(2, 3, 6, 5)
    nn.init.normal_(model[1].running_mean)
    fused = fuse(model)
    assert str(fused.fusion_report) == "0: convolution + batch_norm + relu\n3: convolution + bias"
    assert [type(module) for name, module in fused.named_modules() if name in "03" and name] == [FusedConvolution] * 2
    assert sum(each.numel() for each in fused.parameters()) == 4 * 3 * 9 + 4 + 4 * 2 + 4, "the weights are held once"
    same(fused, model, x)
    same(copy.deepcopy(fused), model, x)
    same(pickle.loads(pickle.dumps(fused)), model, x)


CONSTANT: dict[str, Functions] = {
    "a parameter": Functions(lambda m, x: functional.conv2d(x, m.weight, padding=1)),
    "by keywords": Functions(lambda m, x: functional.conv2d(input=x, weight=m.weight, bias=m.bias, stride=[2])),
    "its words": Functions(lambda m, x: torch.conv2d(x, m.weight.abs(), m.bias * 2, padding="same", dilation=2)),
    "in groups": Functions(lambda m, x: functional.conv2d(x, m.weight / m.weight.norm(), groups=2), groups=2),
    "signals": Functions(lambda m, x: functional.conv1d(x, m.weight.flip(2), m.bias, 2, 1), rank=1),
    "volumes": Functions(lambda m, x: functional.conv3d(x, functional.normalize(m.weight), stride=(1, 2, 1)), rank=3),
}


@pytest.mark.parametrize("case", CONSTANT)
def test_constant_weights(case: str) -> None:
    model = CONSTANT[case].eval()
    fused = fuse(model)
    first, layer = fused.fusion_report.fused
    assert (first.name, layer.name, layer.parts[-1]) == ("first", "convolution_1", "relu")
    same(fused, model, torch.randn(2, 4, *(8,) * (model.weight.dim() - 2)))


OTHERS: dict[str, Functions] = {
    "of the input": Functions(lambda m, x: functional.conv2d(x, m.weight * x.mean())),
    "a bias of the input": Functions(lambda m, x: functional.conv2d(x, m.weight, x.mean((0, 2, 3)))),
    "a size of the input": Functions(lambda m, x: functional.conv2d(x, m.weight, padding=x.shape[2] // 8)),
    "written to": Functions(lambda m, x: functional.conv2d(x, m.weight.detach().mul_(0.5))),
    "a bias written to": Functions(lambda m, x: functional.conv2d(x, m.weight, m.bias.add_(1))),
    "by an unknown function": Functions(lambda m, x: functional.conv2d(x, unknown(m.weight))),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_weights(case: str) -> None:
    model, x = OTHERS[case].eval(), torch.randn(2, 4, 8, 8)
    fused = fuse(model)
    assert {layer.name for layer in fused.fusion_report.fused} <= {"first"}
    for _ in range(2):
        same(fused, model, x)


def test_random_weights_stay_random() -> None:
    model = Functions(lambda m, x: functional.conv2d(x, functional.dropout(m.weight, 0.5, True))).eval()
    fused, x = fuse(model), torch.randn(2, 4, 8, 8)
    assert [layer.name for layer in fused.fusion_report.fused] == ["first"]
    assert not torch.equal(fused(x), fused(x))


def test_what_pytorch_refuses_is_left_to_it() -> None:
    fused = fuse(Functions(lambda m, x: functional.conv2d(x, m.weight.flatten(1))).eval())
    with pytest.raises(RuntimeError, match="weight"):
        fused(torch.randn(2, 4, 8, 8))


class Scaled(nn.Module):
    """A convolution of a class of its own that has no module of PyTorch's in it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 3, 3))

    def forward(self, x: Any) -> Any:
        return self.scaled(x)

    def scaled(self, x: Any) -> Any:
        return functional.conv2d(x, self.weight * 0.1)


def test_a_network_without_modules_of_convolutions() -> None:
    model, x = nn.Sequential(Scaled(), nn.ReLU(), Scaled(), nn.SiLU()).eval(), torch.randn(2, 4, 8, 8)
    fused = fuse(model)
    assert str(fused.fusion_report) == "0: convolution + relu\n2: convolution + silu"
    same(fused, model, x)


class Twice(nn.Module):
    """One module that is called twice, and whose parameter is read elsewhere, too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = Standardized(4, 4, 3, padding=1)

    def forward(self, x: Any) -> Any:
        return self.conv(self.conv(x).relu()) * self.conv.gain.mean()


def test_a_module_that_is_called_twice() -> None:
    model = Twice().eval()
    fused = fuse(model)
    assert [layer.name for layer in fused.fusion_report.fused] == ["conv_1", "conv_1"]
    same(fused, model, torch.randn(2, 4, 8, 8))


class Deep(nn.Module):
    """Calls one module again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = Standardized(4, 4, 3, padding=1)

    def forward(self, x: Any) -> Any:
        for _ in range(6):
            x = self.conv(x).relu()
        return x


def test_weights_of_a_module_that_is_called_again_are_held_once() -> None:
    model = Deep().eval()
    fused = fuse(model)
    assert sum(each.numel() for each in fused.parameters()) == 4 * 4 * 9 + 4
    same(fused, model, torch.randn(2, 4, 8, 8))


class Both(nn.Module):
    """Two convolutions by a function, and a tensor that is read elsewhere, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(4, 4, 3, 3)) for _ in range(2))

    def forward(self, x: Any) -> Any:
        y = torch.maximum(functional.conv2d(x, self.first * 2, padding=1), self.second.mean())
        return functional.conv2d(y, self.second * 2, padding=1).relu()


@pytest.mark.parametrize("kind", [Both, lambda: nn.Sequential(Both())])
def test_what_weights_were_computed_of_is_held_no_longer(kind: Callable[[], Any]) -> None:
    model = kind().eval()
    fused = fuse(model)
    assert sum(each.numel() for each in fused.parameters()) == 3 * 4 * 4 * 9
    same(fused, model, torch.randn(2, 4, 8, 8))
    same(pickle.loads(pickle.dumps(fused)), model, torch.randn(2, 4, 8, 8))


class Shifted(nn.Module):
    """A convolution by a function, and more."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 3, 3))

    def forward(self, x: Any) -> Any:
        return functional.conv2d(x, self.weight * 0.3, padding=1) + 1


class Gated(nn.Module):
    """Holds one, and cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Shifted()

    def forward(self, x: Any) -> Any:
        return self.part(x) if x.sum() > -1e9 else x


class Apart(nn.Module):
    """Calls a module, and a part of it by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gated = Gated()

    def forward(self, x: Any) -> Any:
        return self.gated.part(self.gated(x)).relu()


class Holding(nn.Module):
    """A convolution by a function, and a module with one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 3, 3))
        self.inner = Shifted()

    def forward(self, x: Any) -> Any:
        return self.inner(functional.conv2d(x, self.weight * 2, padding=1).relu()).relu()


@pytest.mark.parametrize("kind", [Apart, lambda: nn.Sequential(Holding(), nn.ReLU())])
def test_parts_of_modules_that_are_called_stay_theirs(kind: Callable[[], Any]) -> None:
    model = kind().eval()
    same(fuse(model), model, torch.randn(2, 4, 8, 8))


class Decaying(nn.Module):
    """Writes to its weight in each call, by code that cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 3, 3))

    def forward(self, x: Any) -> Any:
        if x.sum() > -1e9:
            self.weight.data.mul_(0.5)
        return x


class Embedded(nn.Module):
    """Gives its input back, and has an embedding limit its rows' norms."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 36, max_norm=0.5)

    @property
    def weight(self) -> Any:
        return self.table.weight.view(4, 4, 3, 3)[:, :4]

    def forward(self, x: Any) -> Any:
        return x + self.table(x.flatten()[:2].long().clamp(0, 3)).mean() * 0


class Observing(nn.Module):
    """Counts the range of its weight in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.given = nn.Parameter(torch.randn(4, 4, 3, 3))
        self.register_buffer("ranges", torch.zeros(3))
        self.register_buffer("whole", torch.ones(2, dtype=torch.int32))

    @property
    def weight(self) -> Any:
        whole, ranges = self.whole[:1], (self.ranges[:1], self.ranges[1:2], self.ranges[2:])
        return torch.fused_moving_avg_obs_fake_quant(self.given, whole, whole, *ranges, self.whole[1:], 0.1, -8, 7, 0)

    def forward(self, x: Any) -> Any:
        return x


class Reading(nn.Module):
    """Convolves with the weight of another module."""

    def __init__(self, other: Any) -> None:
        super().__init__()
        self.other = other

    def forward(self, x: Any) -> Any:
        return functional.conv2d(self.other(x), self.other.weight * 2)


@pytest.mark.parametrize("kind", [Decaying, Embedded, Observing])
def test_weights_that_modules_write_to_are_no_constants(kind: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model, x = Reading(kind()).eval(), torch.randn(2, 4, 8, 8)
    fused = fuse(model)
    for _ in range(3):
        same(fused, model, x)


def test_expanded_weights_can_be_written_to() -> None:
    function = functional.conv2d
    model = Functions(lambda m, x: function(x, m.weight[:, :1].mean((2, 3), keepdim=True).expand(4, 1, 3, 3), groups=4))
    fused = fuse(model.eval())
    fused.load_state_dict({name: tensor.clone() for name, tensor in fused.state_dict().items()})
    same(fused, model, torch.randn(2, 4, 8, 8))


KEPT_DTYPES: dict[str, Callable[[Any, Any], Any]] = {
    "a parameter": lambda m, x: functional.conv2d(x.float(), m.weight.float()).to(x.dtype),
    "a plain tensor": lambda m, x: functional.conv2d(x.to(torch.float32), m.plain).type_as(x),
}


@pytest.mark.parametrize("case", KEPT_DTYPES)
def test_code_that_names_a_dtype_has_it_after_conversions(case: str) -> None:
    model = Functions(KEPT_DTYPES[case]).eval()
    model.plain = torch.randn(4, 4, 3, 3)
    fused, x = fuse(model), torch.randn(2, 4, 8, 8)
    same(fused, model, x)
    same(fused.double(), model.double(), x.double())


def test_weights_are_computed_in_their_own_dtype_under_autocast() -> None:
    model = Functions(lambda m, x: functional.conv2d(x, (m.weight.flatten(1) @ m.weight.flatten(1).T).view(4, 4, 1, 1)))
    with torch.autocast("cpu", torch.bfloat16):
        fused = fuse(model.eval())
    assert {each.dtype for each in fused.parameters()} == {torch.float32}
    same(fused, model, torch.randn(2, 4, 8, 8))
