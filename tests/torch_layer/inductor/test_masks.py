"""Derivatives taken at results that convolutions keep: the same gradients, and nothing kept for them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from helpers.runs.fused_answers import answers_of
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch_layer.inductor.compiled_graphs import Compiled

import miofind.torch
from miofind import Handle
from miofind.torch.inductor import writing

aten = torch.ops.aten
Activation = Callable[[Any], Any]

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture(autouse=True)
def served(cpu_handle: Handle, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Estimates answer, and passes behind products, which the CPU place has alone of these, count as kernels."""
    monkeypatch.setattr(writing, "is_composed", lambda solver_id: False)
    with answers_of(cpu_handle):
        yield


def leaky(slope: float) -> Activation:
    return lambda v: functional.leaky_relu(v, slope)


def normed(v: Any) -> Any:
    return functional.batch_norm(v, None, None, v.new_ones(2), v.new_ones(2), training=True)


def clamped(low: float, high: float) -> Activation:
    return lambda v: functional.hardtanh(v, low, high)


def joint_graph(activation: Activation, dtype: Any = torch.float32) -> fx.GraphModule:
    """A convolution of an activation of another's result: its own, and gradients, of x, v, w and dy."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    def both(x: Any, v: Any, w: Any, dy: Any) -> Any:
        with torch.enable_grad():
            v, w = (each.detach().requires_grad_() for each in (v, w))
            y = functional.conv1d(activation(functional.conv1d(x, v, groups=2)), w)
        return y.detach(), *torch.autograd.grad(y, (v, w), dy)

    with FakeTensorMode():
        shapes = ((1, 2, 16), (2, 1, 1), (3, 2, 1), (1, 3, 16))
        examples = [torch.empty(*shape, dtype=dtype) for shape in shapes]
        return make_fx(both, decomposition_table=select_decomp_table())(*examples)


def masks_at(graph: fx.Graph) -> set[str]:
    """What derivatives are taken at: the argument of an activation, its result, or both."""
    kept = graph.find_nodes(op="call_function", target=aten.convolution_backward.default)[0].args[1]
    compared = (aten.gt.Scalar, aten.le.Scalar, aten.ge.Scalar)
    behind = [node for node in graph.nodes if node > kept and node.target in compared]
    read = (node.args[0] for node in behind)
    sources = {each.args[0] if "convert" in str(each.target) else each for each in read}
    return {"result" if each is kept else "argument" for each in sources}


TAKEN: dict[str, tuple[Activation, Any]] = {
    "leaky": (leaky(0.1), torch.float32),
    "leaky-bfloat16": (leaky(0.1), torch.bfloat16),
    "leaky-float16": (leaky(0.1), torch.float16),
    "none": (leaky(0.0), torch.bfloat16),
    "steep": (leaky(3.0), torch.float16),
    "relu6": (functional.relu6, torch.bfloat16),
    "hardtanh": (clamped(-0.3, 0.4), torch.float64),
    "of sums": (lambda v: leaky(0.1)(v + v + v), torch.float32),
    "hardtanh-float32": (clamped(-0.3, 0.4), torch.float32),
    "hardtanh-bfloat16": (clamped(-0.25, 0.5), torch.bfloat16),
}


@pytest.mark.parametrize(("activation", "dtype"), TAKEN.values(), ids=TAKEN)
def test_masks_at_results_are_those_at_arguments(activation: Activation, dtype: Any) -> None:
    from miofind.torch.inductor.masks import take_at_results

    graph = joint_graph(activation, dtype)
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    special = [0.0, -0.0, tiny, -tiny, 0.25, -0.25, 0.5, 6.0, 6.1, -3.0, torch.inf, -torch.inf, torch.nan]
    x = torch.randn(1, 2, 16).to(dtype)
    x[0, 0, : len(special)] = torch.tensor(special).to(dtype)
    inputs = (x, torch.ones(2, 1, 1, dtype=dtype), *(torch.randn(*each).to(dtype) for each in ((3, 2, 1), (1, 3, 16))))
    expected = graph(*inputs)
    assert masks_at(graph.graph) == {"argument"}
    take_at_results(graph.graph)
    assert masks_at(graph.graph) == {"result"}
    graph.graph.lint()
    graph.recompile()
    for given, wanted in zip(graph(*inputs), expected, strict=True):
        assert torch.equal(given.view(torch.uint8), wanted.view(torch.uint8))


LEFT: dict[str, tuple[Activation, Any]] = {
    "falling": (leaky(-0.1), torch.float32),
    "bound of more digits": (clamped(-0.3, 0.5), torch.bfloat16),
    "not undone": (functional.silu, torch.float32),
    "of a norm": (lambda v: leaky(0.1)(functional.batch_norm(v, None, None, training=True)), torch.float32),
    "of a norm with a factor and a summand": (lambda v: leaky(0.1)(normed(v)), torch.float32),
    "of two norms": (lambda v: leaky(0.1)(normed(v) + normed(v)), torch.float32),
    "twice": (lambda v: functional.leaky_relu(functional.leaky_relu(v, 0.1) + 1, 0.2) - 1, torch.float32),
}


@pytest.mark.parametrize(("activation", "dtype"), LEFT.values(), ids=LEFT)
def test_others_are_left(activation: Activation, dtype: Any) -> None:
    from miofind.torch.inductor.masks import take_at_results

    graph = joint_graph(activation, dtype)
    before = str(graph.graph)
    take_at_results(graph.graph)
    assert str(graph.graph) == before


def test_a_mask_that_the_activation_reads_too_is_left() -> None:
    from torch._functorch.compile_utils import fx_graph_cse

    from miofind.torch.inductor.masks import take_at_results

    graph = fx_graph_cse(joint_graph(leaky(0.1)).graph)
    before = str(graph)
    take_at_results(graph)
    graph.lint()
    assert str(graph) == before


class Stack(nn.Module):
    """Residual pairs of convolutions, as in HiFi-GAN."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Conv1d(4, 4, 3, padding=1) for _ in range(3))
        self.activation = activation

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        y = self.second(self.activation(x))
        return x + self.third(self.activation(y))


@pytest.mark.parametrize(
    ("activation", "name", "recomputes"),
    [(leaky(0.1), "leaky_relu", True), (functional.relu6, "clamp", True), (leaky(0.1), "leaky_relu", False)],
    ids=["leaky", "relu6", "leaky, nothing computed once more"],
)
def test_the_activation_is_written_with_the_convolution_before_it(
    activation: Activation, name: str, recomputes: bool
) -> None:
    network = Stack(activation)
    compiled, x = Compiled(network, recomputes=recomputes), torch.randn(2, 4, 32)
    found = []
    for run in (compiled, network):
        network.zero_grad()
        run(x).square().sum().backward()
        found.append([each.grad.clone() for each in network.parameters()])
    for given, wanted in zip(*found, strict=True):
        torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-4)
    assert compiled.texts.count(f"bias.{name}") == 1
    assert compiled.texts.count(f"d{name}") == 2
    backward = compiled.graphs[-1].graph
    assert all(each.meta["val"].dtype is not torch.bool for each in backward.find_nodes(op="placeholder"))


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (leaky(0.1), "leaky_relu"),
        pytest.param(functional.relu6, "clamp", marks=pytest.mark.full_matrix),
        pytest.param(functional.hardswish, "hardswish", marks=pytest.mark.full_matrix),
    ],
)
def test_inductor_takes_the_pass(activation: Activation, name: str) -> None:
    network = Stack(activation)
    options = miofind.torch.inductor_options()
    torch._dynamo.reset()
    compiled = torch.compile(network, options={**options, "fx_graph_cache": False})
    x, found = torch.randn(2, 4, 32), []
    with torch._functorch.config.patch(enable_autograd_cache=False):  # a graph of an earlier run needs no pass
        for run in (compiled, network):
            network.zero_grad()
            run(x).square().sum().backward()
            found.append([each.grad.clone() for each in network.parameters()])
    torch.testing.assert_close(*found)
    texts = [problem.epilogue.text for problem in options["post_grad_custom_pre_pass"].replaced]
    assert texts.count(f"d{name}") == 2


class Sized(nn.Module):
    """A leaky ReLU of a sum with a size, which may be no number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(4, 4, 3), nn.Conv1d(4, 4, 3)

    def forward(self, x: Any) -> Any:
        return self.second(functional.leaky_relu(self.first(x) + x.shape[2], 0.1))


def test_long_sums_are_looked_through_once() -> None:
    """Each summand twice: as many ways through as two to the number of sums."""
    from miofind.torch.inductor.masks import take_at_results

    def of_sums(v: Any) -> Any:
        for _ in range(60):
            v = v + v
        return functional.leaky_relu(v, 0.1)

    graph = joint_graph(of_sums).graph
    take_at_results(graph)
    assert masks_at(graph) == {"result"}


def test_sizes_that_are_no_numbers_stay() -> None:
    network, x = Sized(), torch.randn(2, 4, 32)
    compiled = Compiled(network, recomputes=True, dynamic=True)
    compiled(x).square().sum().backward()
    given = [each.grad.clone() for each in network.parameters()]
    network.zero_grad()
    network(x).square().sum().backward()
    torch.testing.assert_close(given, [each.grad for each in network.parameters()], rtol=1e-4, atol=1e-4)


PLACES = ("joint_custom_post_pass", "post_grad_custom_pre_pass")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("is_configured", [True, False])
def test_a_pass_of_the_users_runs_first(place: str, is_configured: bool) -> None:
    from torch._inductor.custom_graph_pass import CustomGraphPass

    seen: list[set[str]] = []

    class Own(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            seen.append(masks_at(graph))

        def uuid(self) -> Any:
            return "own"

    def made(given: Any) -> Any:
        if not is_configured:
            return miofind.torch.inductor_options(**{place: given})[place]
        with torch._inductor.config.patch({place: given}):
            return miofind.torch.inductor_options()[place]

    joined, alone = made(Own()), made(None)
    graph = joint_graph(leaky(0.1)).graph
    joined(graph)
    assert seen == [{"argument"}]
    assert masks_at(graph) == {"result"} or place != PLACES[0]
    assert joined.uuid() not in (alone.uuid(), None)
    assert made(seen.append).uuid() is None
    made(joined)(joint_graph(leaky(0.1)).graph)
    assert len(seen) == 1, "miofind's own is there once"


class Narrow(torch.autograd.Function):
    """A leaky ReLU in float32 of one type of 16 bits that gives another, and keeps its argument."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return functional.leaky_relu(x.float(), 0.1).half()

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        (x,) = ctx.saved_tensors
        return aten.leaky_relu_backward(dy.float(), x.float(), 0.1, False).to(x.dtype)


def test_a_result_of_another_type_tells_nothing() -> None:
    """What bfloat16 has above zero may be zero in float16."""
    network = nn.Conv1d(4, 4, 1).half()
    x = (torch.rand(1, 4, 512) * 1e-7).bfloat16()
    found = []
    for has_pass in (True, False):
        given = x.clone().requires_grad_()
        Compiled(lambda v: network(Narrow.apply(v + v.neg().neg())), has_pass=has_pass)(given).float().sum().backward()
        found.append(given.grad)
    assert torch.equal(*found)


ON_GPUS: dict[str, Callable[[Any, Any], Any]] = {
    "relu": lambda dy, saved: aten.threshold_backward(dy, saved, 0),
    "clamp": lambda dy, saved: aten.hardtanh_backward(dy, saved, 0.0, 6.0),
    "leaky_relu": lambda dy, saved: aten.leaky_relu_backward(dy, saved, 0.1, False),
    "hardswish": lambda dy, saved: aten.hardswish_backward(dy, saved),
}


@pytest.mark.parametrize("name", ON_GPUS)
def test_derivatives_of_graphs_for_gpus_are_known(name: str) -> None:
    """Their constants are on the GPU, those of what they are compared with on the CPU."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    from miofind.torch.inductor.decompositions import derivative_of

    with FakeTensorMode():
        examples = [torch.empty(1, 2, 16, device="cuda") for _ in range(2)]
        graph = make_fx(ON_GPUS[name], decomposition_table=select_decomp_table())(*examples).graph
    found = derivative_of(next(iter(graph.nodes)))
    assert found is not None
    assert found.numbers.activation == name
