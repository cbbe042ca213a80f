"""Networks whose code computes with sizes, as layers that pad like TensorFlow's do."""

from __future__ import annotations

import builtins
import copy
import math
import pickle
import threading
from collections.abc import Callable
from math import ceil
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from miofind.torch import FusedConvolution, fuse


def padding_of(size: int, filter_size: int, stride: int, dilation: int) -> Any:
    return max((math.ceil(size / stride) - 1) * stride + (filter_size - 1) * dilation + 1 - size, 0)


class Same(nn.Conv2d):
    """A convolution that pads its input so that strides alone decide the size of its result."""

    def forward(self, x: Any) -> Any:
        height, width = x.size()[-2:]
        filter_size = self.weight.shape[-2:]
        below = padding_of(height, filter_size[0], self.stride[0], self.dilation[0])
        right = padding_of(width, filter_size[1], self.stride[1], self.dilation[1])
        x = functional.pad(x, (right // 2, right - right // 2, below // 2, below - below // 2))
        return functional.conv2d(x, self.weight, self.bias, self.stride, (0, 0), self.dilation, self.groups)


def network() -> Any:
    torch.manual_seed(0)
    made = nn.Sequential(
        *(Same(3, 8, (3, 5), stride=2, bias=False), nn.BatchNorm2d(8), nn.SiLU(inplace=True)),
        *(Same(8, 8, 3, stride=(3, 1), dilation=(1, 2), groups=8), nn.BatchNorm2d(8), nn.ReLU()),
    )
    for module in made:
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_var, 0.5, 2)
            for each in (module.running_mean, module.weight, module.bias):
                nn.init.normal_(each)
    return made.double().eval()


def image(height: int, width: int) -> Any:
    return torch.randn(2, 3, height, width, dtype=torch.float64)


def assert_same(fused: Any, model: Any, x: Any) -> None:
    given = x.clone()
    with torch.no_grad():
        expected, found = model(x.clone()), fused(given)
    assert torch.equal(given, x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_layers_that_pad_by_the_size_of_their_input_are_fused() -> None:
    model = network()
    fused = fuse(model)
    assert fused.fusion_report.untraced == fused.fusion_report.kept == {}
    assert [(each.name, each.parts) for each in fused.fusion_report.fused] == [
        ("0", ("convolution", "batch_norm", "silu")),
        ("3", ("convolution", "batch_norm", "relu")),
    ]
    copies = fused, copy.deepcopy(fused), pickle.loads(pickle.dumps(fused)), fuse(fused)
    for size in ((9, 9), (8, 8), (13, 6), (6, 13), (1, 1), (2, 33)):
        for each in copies:
            assert_same(each, model, image(*size))


def test_a_weight_is_not_held_for_its_size() -> None:
    """Padding reads the size of the filter, which the fused layer's weight has beside the convolution's."""
    fused = fuse(network())
    assert set(fused.state_dict()) == {f"{layer}.{name}" for layer in (0, 3) for name in ("weight", "bias", "folded")}
    assert all(isinstance(each, FusedConvolution) for each in fused.children())


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_graphs_of_other_tools_pad_by_the_size_of_each_input(is_dynamic: bool) -> None:
    torch._dynamo.reset()
    model = network()
    compiled = torch.compile(fuse(model), backend="eager", dynamic=is_dynamic, fullgraph=True)
    for size in ((9, 9), (8, 8), (13, 6), (7, 10)):
        assert_same(compiled, model, image(*size))


class Sized(nn.Module):
    """A convolution and an activation, with padding that is computed of a height and a width between them."""

    def __init__(self, padding: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.made = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.padding = padding

    def forward(self, x: Any, size: Any = 2) -> Any:
        height, width = x.shape[2], x.shape[3]
        return functional.pad(self.made(x), (self.padding(height, width, size), 0))


def of_list(height: Any, width: Any, size: Any) -> Any:
    return max([height, width, 7])


def of_tuple(height: Any, width: Any, size: Any) -> Any:
    return min((height, 7, width, 9))


def is_asserted(height: Any, width: Any, size: Any) -> Any:
    assert isinstance(max(height, width), int)
    assert isinstance(height / 2, float)
    return max(height, width)


def in_place(height: Any, width: Any, size: Any) -> Any:
    padding = height * 2
    padding += 1
    padding //= 2
    return max(padding, 0)


TRACED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "max": lambda height, width, size: max(height, width),
    "min": lambda height, width, size: min(height, width),
    "several": lambda height, width, size: max(4, 5, height, width // 2, 6),
    "a list": of_list,
    "a tuple": of_tuple,
    "floats": lambda height, width, size: math.ceil(max(height / 2, 4.0)) + math.floor(min(width / 3, height / 2)),
    "an imported function": lambda height, width, size: ceil(height / 2),
    "floats with integers": lambda height, width, size: math.ceil(height * 0.5) + math.floor(20 - height / 2),
    "a float or an integer": lambda height, width, size: int(max(1.5, 2)) + math.ceil(max(height * 0.5, 4.0)),
    "in place": in_place,
    "its kind": is_asserted,
    "numbers alone": lambda height, width, size: max(2, 3) + max([1, 2], key=abs) + min([], default=1),
}
SIZES = (9, 9), (8, 8), (13, 6), (6, 13), (5, 3)


@pytest.mark.parametrize("case", TRACED)
def test_what_code_computes_of_sizes(case: str) -> None:
    model = Sized(TRACED[case]).double().eval()
    fused = fuse(model)
    assert fused.fusion_report.untraced == {}
    del fused.padding  # which cannot be pickled
    for each in (fused, pickle.loads(pickle.dumps(fused))):
        for size in SIZES:
            assert_same(each, model, image(*size))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python:torch.jit.TracerWarning")
@pytest.mark.parametrize("case", TRACED)
def test_torchscript_of_one_size_computes_with_that_of_each_input(case: str) -> None:
    """While torch.jit.trace runs sizes are tensors, of which Python's functions would make constants."""
    model = Sized(TRACED[case]).double().eval()
    traced = torch.jit.trace(fuse(model), image(8, 8))
    for size in SIZES:
        assert_same(traced, model, image(*size))


REFUSED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "a key": lambda height, width, size: max(height, width, key=lambda each: -each),
    "a key of Python's": lambda height, width, size: max(height, width, key=str),
    "a key of a list": lambda height, width, size: max([height, width], key=repr),
    "a key that looks up": lambda height, width, size: max(height, width, key=hash),
    "texts": lambda height, width, size: len(max(map(str, (height, width)))),
    "a power": lambda height, width, size: 1 if isinstance(height**-1, int) else 2,
    "a default": lambda height, width, size: max([height, width], default=0),
    "an argument of which nothing is known": lambda height, width, size: max(height, size),
    "a branch": lambda height, width, size: 1 if max(height, width) > 8 else 0,
    "a generator": lambda height, width, size: max(each for each in (height, width)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_known_to_be_a_number_is_not_traced(case: str) -> None:
    model = Sized(REFUSED[case]).double().eval()
    fused = fuse(model)
    assert set(fused.fusion_report.untraced) == {""}
    assert len(fused.fusion_report.fused) == 1
    for size in SIZES:
        assert_same(fused, model, image(*size))


class OfTensorness(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())

    def forward(self, x: Any) -> Any:
        return self.made(x) * (2 if max(map(torch.is_tensor, (x, x))) else 3)


def test_functions_that_max_calls_are_asked_as_if_it_had_no_code() -> None:
    model = OfTensorness().double().eval()
    assert_same(fuse(model), model, image(5, 5))


class OfTensors(nn.Module):
    """Gives one of two tensors, which may share memory with what is written to later."""

    def __init__(self) -> None:
        super().__init__()
        self.made = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())

    def forward(self, x: Any) -> Any:
        total = self.made(x).sum()
        return max(total, total.neg()) + max(total, 0)


def test_the_larger_one_of_tensors_is_not_traced() -> None:
    model = OfTensors().double().eval()
    fused = fuse(model)
    assert "OfTensors.forward decides by what it computes" in fused.fusion_report.untraced[""]
    assert_same(fused, model, image(5, 5))


class Limited(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())

    def forward(self, x: Any) -> Any:
        if max(x.shape[2], x.shape[3]) > 8:
            raise ValueError("the image is too large")
        return self.made(x)


def test_the_larger_size_is_checked() -> None:
    model = Limited().double().eval()
    fused = fuse(model)
    assert fused.fusion_report.untraced == {}
    assert_same(fused, model, image(8, 5))
    for size in ((5, 9), (9, 5)):
        with pytest.raises(ValueError, match="the image is too large"):
            fused(image(*size))


def test_functions_of_python_are_its_own_while_a_network_is_traced_and_afterwards() -> None:
    before, found = (builtins.max, builtins.min, math.ceil, math.floor), []

    def elsewhere() -> None:
        with pytest.raises(TypeError, match="max expected at least 1 argument"):
            max()  # type: ignore[call-overload]
        assert pickle.loads(pickle.dumps(max)) is max
        found.append((max(3, 4), min([4, 3]), max("ab", "c", key=len), min((), default=5), max({1: 2, 3: 4})))

    class Pausing(Sized):
        def forward(self, x: Any, size: Any = 2) -> Any:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            return super().forward(x)

    for case in (TRACED["max"], REFUSED["a branch"]):
        fuse(Pausing(case).eval())
        assert (builtins.max, builtins.min, math.ceil, math.floor) == before
    assert set(found) == {(4, 3, "ab", 5, 3)}


class Padded(nn.Module):
    """Pads by the size of its filter, and convolves by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.made = nn.Conv2d(3, 4, (3, 5))

    def forward(self, x: Any) -> Any:
        height, width = self.made.weight.shape[-2:]
        x = functional.pad(x, (width - 1, width // 2, height - 1, self.made.weight.size(2)))
        return functional.relu(functional.conv2d(x, self.made.weight, self.made.bias))


def test_the_size_of_a_weight_that_is_fused_is_a_constant() -> None:
    model = Padded().double().eval()
    fused = fuse(model)
    assert set(fused.state_dict()) == {"convolution_1.weight", "convolution_1.bias"}
    assert isinstance(fused.convolution_1, FusedConvolution)
    assert_same(fused, model, image(5, 4))


FACTORS = {"of a size": 1}


@torch.fx.wrap
def scaled(size: int) -> int:
    return size * FACTORS["of a size"]


class Scaled(Padded):
    """Pads by what a function, of which nothing is known, makes of the size of a filter."""

    def forward(self, x: Any) -> Any:
        return super().forward(functional.pad(x, (scaled(self.made.weight.shape[2]), self.made.weight.numel() // 20)))


def test_what_unknown_code_makes_of_a_size_is_computed_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Scaled().double().eval()
    fused = fuse(model)
    assert_same(fused, model, image(5, 4))
    monkeypatch.setitem(FACTORS, "of a size", 2)
    assert_same(fused, model, image(5, 4))


class Resized(nn.Module):
    """Reads the size of a tensor that is no convolution's weight, and may be another one later."""

    def __init__(self) -> None:
        super().__init__()
        self.made = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        self.table = nn.Parameter(torch.zeros(3))

    def forward(self, x: Any) -> Any:
        return functional.pad(self.made(x), (self.table.shape[0], 0))


def test_sizes_of_other_tensors_are_read_in_each_call() -> None:
    model = Resized().double().eval()
    fused = fuse(model)
    for each in (model, fused):
        each.table = nn.Parameter(torch.zeros(5))
    assert fused.fusion_report.untraced == {}
    assert_same(fused, model, image(5, 5))


class Grown(nn.Module):
    """Pads by the size of a weight that its own code makes larger."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 3, 3), requires_grad=False)
        self.made = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())

    def forward(self, x: Any) -> Any:
        self.weight.data.unsqueeze_(0).squeeze_(0)
        return self.made(functional.conv2d(functional.pad(x, (self.weight.shape[-1],) * 4), self.weight))


def test_the_size_of_a_weight_that_is_written_to_is_read_in_each_call() -> None:
    model = Grown().double().eval()
    fused = fuse(model)
    assert "weight" in fused.state_dict()
    assert_same(fused, model, image(5, 5))
