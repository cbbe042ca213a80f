"""Weights in Inductor's graphs: those for inference copy and cast none, and see what is written to them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from helpers.runs.fused_answers import answers_of
from torch import nn

import miofind.torch
from miofind import Handle
from miofind.device.device import Device
from miofind.finddb import MEMORY
from miofind.torch.fused import plans as fused_plans
from miofind.torch.fused.packed_filters import PackedFilters

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.usefixtures("served"),
]


@pytest.fixture(scope="module")
def served(cpu_handle: Handle) -> Iterator[None]:
    with answers_of(cpu_handle):
        yield


def normed(c: int, k: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(c, k, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(k), nn.ReLU())


class Residual(nn.Module):
    """ResNet's: a stem, a pooling, a bottleneck."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = normed(3, 8, 7, 2), nn.Sequential(normed(8, 4, 1), normed(4, 4, 3), normed(4, 8, 1))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Any) -> Any:
        x = functional.max_pool2d(self.stem(x), 3, 2, 1)
        return self.head(torch.flatten(functional.adaptive_avg_pool2d(torch.relu(self.body(x) + x), 1), 1))


class LastNormed(nn.Module):
    """ConvNeXt's: patches, a depthwise block around a layer norm and linear layers, a downsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.depthwise = nn.Conv2d(3, 8, 4, 4), nn.Conv2d(8, 8, 7, padding=3, groups=8)
        self.norm, self.widen, self.narrow = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.down = nn.Conv2d(8, 12, 2, 2)

    def forward(self, x: Any) -> Any:
        x = self.patches(x)
        y = self.narrow(functional.gelu(self.widen(self.norm(self.depthwise(x).permute(0, 2, 3, 1)))))
        return self.down(x + y.permute(0, 3, 1, 2)).mean((2, 3))


class Inverted(nn.Module):
    """MobileNet's: a stem, a depthwise block with squeeze-and-excite."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.widen = normed(3, 8, 3, 2), normed(8, 16, 1)
        self.depthwise, self.narrow = normed(16, 16, 3, groups=16), normed(16, 8, 1)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        y = self.depthwise(self.widen(x))
        gate = self.excite(torch.relu(self.squeeze(functional.adaptive_avg_pool2d(y, 1))))
        return (self.narrow(y * functional.hardsigmoid(gate)) + x).mean((2, 3))


def compiled(model: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, options={**miofind.torch.inductor_options(), "fx_graph_cache": False})


def code_of(run: Callable[..., Any], *inputs: Any) -> str:
    from torch._inductor.utils import run_and_get_code

    _, (code,) = run_and_get_code(run, *inputs)
    return _call_of(code)


def written(run: Callable[..., Any], *inputs: Any) -> str:
    """The code of a graph that is not run, and so not compiled by g++."""
    from torch._inductor.utils import get_code

    return _call_of(get_code(run, *inputs)[0])


def _call_of(code: str) -> str:
    return str(code).partition("def call(")[2]


def copied(code: str, model: Any) -> int:
    """How many of a model's weights a compiled graph makes room for, to copy or to cast them into."""
    made = re.findall(r"empty_strided_cpu\(\((\d+, \d+, \d+, \d+)\)", code)
    shapes = {", ".join(map(str, each.shape)) for each in model.parameters() if each.dim() == 4}
    return sum(each in shapes for each in made)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(("kind", "turned"), [(Residual, 2), (LastNormed, 2), (Inverted, 1)])
def test_a_graph_copies_no_weights(kind: Any, turned: int, order: Any) -> None:
    """Neither those of 1x1 and depthwise filters, which lie alike in both orders, nor others."""
    torch.manual_seed(0)
    model = kind().eval().to(memory_format=order)
    fused, x = miofind.torch.fuse(model), torch.randn(2, 3, 32, 32).contiguous(memory_format=order)
    run = compiled(fused)
    with torch.inference_mode():
        code = code_of(run, x)
        for _ in range(2):
            torch.testing.assert_close(run(x), model(x))
    kept = re.findall(r"kept_weights.default\(\[(.*)\]", code)
    assert [len(each.split(",")) for each in kept] == ([turned] if order is torch.contiguous_format else [])
    assert copied(code, fused) == 0
    copies_of_x = len(re.findall(r"empty_strided_cpu\(\(2, 3, 32, 32\)", code))
    assert copies_of_x == (order is torch.contiguous_format)


@pytest.mark.parametrize("is_trained", [False, True], ids=["constant", "trained"])
def test_a_network_that_nobody_fused_keeps_weights_that_nobody_trains(is_trained: bool) -> None:
    """A fused optimizer writes to weights, and PyTorch counts no version: what runs between its steps reads them."""
    model, x = Residual().eval().requires_grad_(is_trained), torch.randn(2, 3, 32, 32)
    run = compiled(model)
    with torch.no_grad():
        assert copied(code_of(run, x), model) == (2 if is_trained else 0)
        model.load_state_dict({name: tensor + 0.1 for name, tensor in model.state_dict().items()})
        torch.testing.assert_close(run(x), model(x))
    if is_trained:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        torch.optim.Adam(model.parameters(), fused=True).step()
        with torch.no_grad():
            torch.testing.assert_close(run(x), model(x))


@pytest.mark.parametrize("rank", [4, 5])
def test_an_input_that_is_channels_last_turns_no_weights(rank: int) -> None:
    convolution, order = {4: (nn.Conv2d, torch.channels_last), 5: (nn.Conv3d, torch.channels_last_3d)}[rank]
    model = miofind.torch.fuse(nn.Sequential(convolution(3, 4, 3), nn.ReLU(), convolution(4, 5, 3), nn.ReLU()).eval())
    x = torch.randn(2, 3, *(8, 9, 7)[: rank - 2]).contiguous(memory_format=order)
    run = compiled(model)
    with torch.no_grad():
        kept = re.findall(r"kept_weights.default\(\[(.*)\]", code_of(run, x))
        torch.testing.assert_close(run(x), model(x))
    assert [len(each.split(",")) for each in kept] == [2]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
def test_autocast_casts_weights_once(order: Any) -> None:
    fused = miofind.torch.fuse(Residual().eval()).to(memory_format=order)
    x = torch.randn(2, 3, 32, 32).contiguous(memory_format=order)
    run = compiled(fused)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        code = code_of(run, x)
        getattr(fused.stem, "0").weight.mul_(0.5)
        torch.testing.assert_close(run(x), fused(x), rtol=0.02, atol=0.02)
    kept = re.findall(r"kept_weights.default\(\[(.*)\]", code)
    assert [len(each.split(",")) for each in kept] == [4]
    assert copied(code, fused) == 0


WRITES: dict[str, Callable[[Any, Any], None]] = {
    "in place": lambda network, weight: weight.mul_(0.5),
    "through a view": lambda network, weight: weight[0].mul_(0.5),
    "a state dict": lambda network, weight: network.load_state_dict(
        {name: tensor * 0.5 for name, tensor in network.state_dict().items()}
    ),
    "other memory": lambda network, weight: setattr(weight, "data", weight.data * 0.5),
    "another parameter": lambda network, weight: setattr(
        getattr(network.stem, "0"), "weight", nn.Parameter(weight * 0.5, requires_grad=False)
    ),
    "an optimizer": lambda network, weight: optimizer_step(weight),
}


def optimizer_step(weight: Any) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], lr=0.1).step()
    weight.grad = None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", WRITES)
def test_what_is_written_to_weights_is_seen_by_the_next_call(case: str) -> None:
    torch.manual_seed(0)
    network = miofind.torch.fuse(Residual().eval())
    x = torch.randn(2, 3, 32, 32)
    run = compiled(network)
    with torch.no_grad():
        before = run(x)
        for _ in range(2):
            WRITES[case](network, getattr(network.stem, "0").weight)
            after = run(x)
            torch.testing.assert_close(after, network(x))
            assert not torch.allclose(before, after, rtol=1e-3, atol=1e-6)
            before = after


def test_frozen_graphs_copy_no_weights() -> None:
    fused, x = miofind.torch.fuse(Residual().eval()), torch.randn(2, 3, 32, 32)
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):
        run = compiled(fused)
        code = code_of(run, x)
        torch.testing.assert_close(run(x), fused(x))
    kept = re.findall(r"kept_weights.default\(\[(.*)\]", code)
    assert [len(each.split(",")) for each in kept] == [2]
    assert copied(code, fused) == 0


def test_kept_weights_are_not_overwritten_within_a_call() -> None:
    """All tensors here have the size of the weights, whose memory Inductor would give to them once they were read."""
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(3)]
    model = nn.Sequential(layers[0], nn.LayerNorm((4, 3, 3)), layers[1], nn.LayerNorm((4, 3, 3)), layers[2]).eval()
    run, x = compiled(miofind.torch.fuse(model)), torch.randn(4, 4, 3, 3)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(run(x), model(x))


def test_graphs_of_training_read_the_weights_themselves() -> None:
    model, x = Residual(), torch.randn(2, 3, 32, 32)
    for module in model.modules():
        module.train(not isinstance(module, nn.BatchNorm2d))
    code = written(compiled(model), x)
    assert "empty_strided_cpu" in code
    assert "kept_weights" not in code


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
def test_inductors_cuda_graphs_copy_weights_unless_these_lie_channels_last(order: Any) -> None:
    """Their replays ask nobody whether weights were written to."""
    fused = miofind.torch.fuse(Residual().eval()).to(memory_format=order)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad(), torch._inductor.config.patch({"triton.cudagraphs": True}):
        code = written(compiled(fused), x)
    assert "kept_weights" not in code
    assert copied(code, fused) == (2 if order is torch.contiguous_format else 0)


@pytest.fixture
def winograd(cpu_handle: Handle) -> Iterator[None]:
    """All that can be is run by a solution that transforms filters."""
    with miofind.torch.use("estimate", handle=cpu_handle, devices="cpu", only="ConvCpuWinograd"):
        yield


class Alike(nn.Module):
    """Two convolutions of one weight, one of another, and one that no such solution runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 1))

    def forward(self, x: Any) -> Any:
        x = self.stem(x)
        for layer in (self.first, self.second, self.first):
            x = torch.relu(layer(x))
        return x.mean((2, 3))


PACKED = re.compile(r"packed_filters\.default\(\[(.*?)\]")


@pytest.mark.parametrize("last", ["nothing", "the input", "all"])
@pytest.mark.usefixtures("winograd")
def test_a_graph_packs_no_filters(last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it turn the weights, which nobody reads."""
    torch.manual_seed(0)
    model, x = Alike().eval(), torch.randn(2, 3, 9, 8)
    if last == "all":
        model = model.to(memory_format=torch.channels_last)
    if last != "nothing":
        x = x.contiguous(memory_format=torch.channels_last)
    fused = miofind.torch.fuse(model)
    run, packs = compiled(fused), []
    write = PackedFilters.write
    monkeypatch.setattr(PackedFilters, "write", lambda self, *given: packs.append(self) or write(self, *given))
    with torch.inference_mode():
        code = code_of(run, x)
        for _ in range(2):
            torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
    assert [len(each.split(",")) for each in PACKED.findall(code)] == [2]
    assert copied(code, fused) == 0
    assert len(packs) == 2
    assert any(plan.answer is not None and plan.answer.takes_packed and plan.calls for plan in fused_plans.plans())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", ["in place", "a state dict", "other memory", "an optimizer"])
@pytest.mark.usefixtures("winograd")
def test_filters_are_packed_anew_where_weights_change(case: str) -> None:
    torch.manual_seed(0)
    network = miofind.torch.fuse(nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()).eval())
    x, weight = torch.randn(2, 16, 9, 8), network.get_parameter("0.weight")
    run = compiled(network)
    with torch.no_grad():
        assert PACKED.search(code_of(run, x))
        for _ in range(2):
            WRITES[case](network, weight)
            expected = functional.relu(functional.conv2d(x, weight, network.get_parameter("0.bias"), padding=1))
            torch.testing.assert_close(run(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("winograd")
def test_another_answer_than_a_graph_was_compiled_with_reads_the_weights(cpu_handle: Handle) -> None:
    torch.manual_seed(0)
    network, x = miofind.torch.fuse(Alike().eval()), torch.randn(2, 3, 9, 8)
    run = compiled(network)
    with torch.no_grad():
        expected = run(x)
        with miofind.torch.use("estimate", handle=cpu_handle, devices="cpu", only="ConvCpuDirect"):
            torch.testing.assert_close(run(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("winograd")
def test_calls_that_no_solution_runs_any_more_are_counted_once() -> None:
    torch.manual_seed(0)
    network, x = miofind.torch.fuse(Alike().eval()), torch.randn(2, 3, 9, 8)
    run = compiled(network)
    with torch.no_grad(), Handle("cpu", database=MEMORY) as empty:
        expected = run(x)
        fused_plans.forget()
        before = sum(plan.calls for plan in fused_plans.plans())
        with miofind.torch.use("fallback", handle=empty, devices="cpu"):
            torch.testing.assert_close(run(x), expected, rtol=1e-4, atol=1e-4)
            assert sum(plan.calls for plan in fused_plans.plans()) - before == 4


@pytest.mark.usefixtures("winograd")
def test_a_handle_for_another_device_than_a_graph_was_compiled_with_leaves_it_right() -> None:
    torch.manual_seed(0)
    network, x = miofind.torch.fuse(Alike().eval()), torch.randn(2, 3, 9, 8)
    run = compiled(network)
    with torch.no_grad():
        expected = run(x)
        with Handle(Device.virtual("90a"), database=MEMORY) as other, miofind.torch.use(handle=other, devices="cpu"):
            torch.testing.assert_close(run(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("winograd")
def test_graphs_that_may_not_keep_filters_pack_none() -> None:
    x = torch.randn(2, 3, 9, 8)
    with torch.no_grad():
        with torch._inductor.config.patch({"triton.cudagraphs": True}):
            assert not PACKED.search(written(compiled(miofind.torch.fuse(Alike().eval())), x))
        assert not PACKED.search(written(compiled(Alike().eval()), x)), "weights that are trained"
        assert PACKED.search(written(compiled(Alike().eval().requires_grad_(False)), x))
