"""Linear layers with what follows them: one operator where something does, the library's product elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from helpers.runs.fused_answers import answers_of
from torch import nn
from torch_layer.inductor.compiled_graphs import Compiled

import miofind.torch
from miofind import Handle
from miofind.torch.inductor import turned, writing

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

ADDMM = torch.ops.aten.addmm.default


@pytest.fixture
def ran(cpu_handle: Handle, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Estimates answer, and passes behind products count as kernels."""
    monkeypatch.setattr(writing, "is_composed", lambda solver_id: False)
    with answers_of(cpu_handle) as noted:
        yield noted


class Block(nn.Module):
    """One of ConvNeXt."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(c, c, 3, padding=1, groups=c), nn.LayerNorm(c)
        self.wide, self.narrow = nn.Linear(c, 4 * c), nn.Linear(4 * c, c)
        self.factors = nn.Parameter(torch.rand(c, 1, 1) + 0.5)

    def forward(self, x: Any) -> Any:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.narrow(functional.gelu(self.wide(y)))
        return x + self.factors * y.permute(0, 3, 1, 2)


class Follows(nn.Module):
    """A layer and what follows it."""

    def __init__(self, layer: Any, follows: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer, self.follows = layer, follows

    def forward(self, x: Any) -> Any:
        return self.follows(self.layer(x))


def small_layer(follows: Callable[[Any], Any], *, bias: bool = True) -> Follows:
    """A small one, and what follows it."""
    return Follows(nn.Linear(12, 8, bias=bias), follows)


def compared(network: Any, x: Any) -> Compiled:
    """A network compiled and run, which must give what it gives eagerly, about as near to its float64 form."""
    compiled = Compiled(network)
    with torch.no_grad():
        given, eager = compiled(x), network(x)
        exact = network.double()(x.double())
    assert given.dtype == eager.dtype
    assert given.shape == eager.shape
    bound = 2 * (eager.double() - exact).abs().max() + torch.finfo(eager.dtype).eps * exact.abs().max()
    assert (given.double() - exact).abs().max() <= bound
    return compiled


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_block_is_two_operators(ran: list[str], dtype: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8, 5, 6).to(dtype).to(memory_format=torch.channels_last)
    compiled = compared(Block(8).to(dtype), x)
    assert compiled.texts == ["bias.gelu", "float32.scale.bias.residual"]
    assert not compiled.count(ADDMM)
    assert len(ran) == 2
    assert {str(problem.x.layout) for problem in compiled.convolution_pass.replaced} == {"NHWC"}
    assert [problem.x.shape for problem in compiled.convolution_pass.replaced] == [(2, 8, 5, 6), (2, 32, 5, 6)]


@pytest.mark.parametrize(
    ("follows", "text"),
    [
        (functional.gelu, "bias.gelu"),
        (lambda y: functional.gelu(y, approximate="tanh"), "bias.gelu_tanh"),
        (functional.silu, "bias.silu"),
        (functional.relu, "bias.relu"),
        (lambda y: functional.leaky_relu(y, 0.2), "bias.leaky_relu"),
        (functional.hardswish, "bias.hardswish"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.usefixtures("ran")
def test_activations_are_computed_with_the_layer(follows: Callable[[Any], Any], text: str) -> None:
    torch.manual_seed(0)
    compiled = compared(small_layer(follows).bfloat16(), torch.randn(3, 7, 12).bfloat16())
    assert compiled.texts == [text]
    assert not compiled.count(ADDMM)


@pytest.mark.parametrize(
    ("shape", "images"),
    [
        ((5, 12), (5, 12, 1, 1)),
        ((3, 7, 12), (3, 12, 7, 1)),
        ((2, 3, 4, 12), (2, 12, 3, 4)),
        ((2, 3, 2, 4, 12), (2, 12, 24, 1)),
    ],
    ids=str,
)
@pytest.mark.usefixtures("ran")
def test_any_dimensions_are_images(shape: tuple[int, ...], images: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    compiled = compared(small_layer(functional.gelu, bias=False).half(), torch.randn(shape).half())
    assert [problem.x.shape for problem in compiled.convolution_pass.replaced] == [images]
    assert compiled.texts == ["gelu"]


@pytest.mark.parametrize(
    ("follows", "shape"),
    [
        (functional.gelu, (32,)),
        (lambda y: functional.silu(y.view(-1)), (1, 32)),
    ],
    ids=["input", "result"],
)
@pytest.mark.usefixtures("ran")
def test_results_of_one_dimension(follows: Callable[[Any], Any], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(32, 48).half()  # a smaller one of one row Inductor computes on the CPU by itself
    compared(Follows(layer, follows), torch.randn(shape).half())


@pytest.mark.usefixtures("ran")
def test_sizes_that_change_stay_sizes_that_change() -> None:
    """Of a view behind a layer of known sizes: no graph is compiled for each."""
    from torch._dynamo.utils import counters

    layer, x = small_layer(lambda y: y).half(), torch.randn(12, 12).half()
    compiled = Compiled(lambda z: functional.gelu(layer(x).view(z.shape[0], -1, 8)))
    counters.clear()
    with torch.no_grad():
        for count in (3, 2, 4, 6):
            z = torch.zeros(count)
            torch._dynamo.maybe_mark_dynamic(z, 0)
            wanted = functional.gelu(layer(x).view(count, -1, 8))
            torch.testing.assert_close(compiled(z), wanted, rtol=0.01, atol=0.01)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    ("function", "bias"),
    [
        (lambda y: functional.gelu(y.view(4, 2, 4)), 8),
        (functional.gelu, 1),
        (functional.gelu, (4, 8)),
    ],
    ids=["heads", "a number", "a matrix"],
)
@pytest.mark.usefixtures("ran")
def test_other_shapes_of_results_and_biases(function: Callable[[Any], Any], bias: Any) -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(4, 12).half(), torch.randn(8, 12).half(), torch.randn(bias).half()
    compiled = Compiled(lambda x, w, b: function(torch.addmm(b, x, w.t())))
    torch.testing.assert_close(compiled(x, w, b), function(torch.addmm(b, x, w.t())), rtol=0.01, atol=0.01)
    assert not compiled.texts


def tied(y: Any) -> Any:
    return functional.gelu(y) + y


@pytest.mark.parametrize(
    ("network", "x"),
    [
        (small_layer(functional.gelu), torch.ones(4, 12)),
        (small_layer(lambda y: y.softmax(-1)).half(), torch.ones(4, 12).half()),
        (small_layer(tied).half(), torch.ones(4, 12).half()),
        (small_layer(lambda y: functional.gelu(y[..., :4])).half(), torch.ones(4, 12).half()),
        (small_layer(lambda y: functional.gelu(y.reshape(-1))).half(), torch.ones(4, 12).half()),
        (small_layer(lambda y: y.permute(0, 3, 1, 2) * 2.0).half(), torch.ones(2, 3, 4, 12).half()),
        (
            small_layer(lambda y: y.permute(0, 3, 2, 1) * torch.ones(8, 1, 1).half()).half(),
            torch.ones(2, 3, 4, 12).half(),
        ),
    ],
    ids=["float32", "nothing follows", "used twice", "a part", "one dimension", "a number", "another order"],
)
@pytest.mark.usefixtures("ran")
def test_others_stay_the_library_s(network: Any, x: Any) -> None:
    compiled = compared(network, x)
    assert not compiled.texts
    assert compiled.count(ADDMM) == 1


@pytest.mark.usefixtures("ran")
def test_products_of_other_matrices_stay() -> None:
    x, w = torch.randn(4, 6).half(), torch.randn(6, 5).half()  # weights (c, k)
    compiled = Compiled(lambda x, w: functional.gelu(x @ w))
    torch.testing.assert_close(compiled(x, w), functional.gelu(x @ w))
    assert not compiled.texts


@pytest.mark.usefixtures("ran")
def test_a_residual_channels_first_is_added_by_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a graph that stays channels first an operator would have it copied."""
    from miofind.torch.inductor import graph_pass

    monkeypatch.setattr(turned, "_LEAST_SHARE", 2.0)
    monkeypatch.setattr(graph_pass, "prefers_channels_last", lambda graph: False)
    torch.manual_seed(0)
    compiled = compared(Block(8).half(), torch.randn(2, 8, 5, 6).half())
    assert compiled.texts == ["bias.gelu"]
    assert compiled.count(ADDMM) == 1


@pytest.mark.usefixtures("ran")
def test_layers_with_a_pass_behind_a_product_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's own does as much."""
    monkeypatch.setattr(writing, "is_composed", lambda solver_id: True)
    torch.manual_seed(0)
    compiled = compared(Block(8).half(), torch.randn(2, 8, 5, 6).half())
    assert not compiled.texts
    assert not compiled.convolution_pass.missing
    assert compiled.count(ADDMM) == 2


def test_without_answers_the_graph_is_as_it_was(cpu_handle: Handle) -> None:
    torch.manual_seed(0)
    network, x = Block(8).bfloat16(), torch.randn(2, 8, 5, 6).bfloat16()
    plain = Compiled(network, has_pass=False)
    with torch.no_grad():
        plain(x)
    with answers_of(cpu_handle, "fallback"):
        compiled = compared(network, x)
    (ours,), (theirs,) = compiled.graphs, plain.graphs
    assert [node.target for node in ours.graph.nodes] == [node.target for node in theirs.graph.nodes]
    assert [problem.epilogue.text for problem in compiled.convolution_pass.missing][:1] == ["bias.gelu"]


@pytest.mark.parametrize("shape", [(6, 12), (2, 3, 12), (2, 3, 4, 12)], ids=str)
@pytest.mark.usefixtures("ran")
def test_gradients_are_those_of_eager(shape: tuple[int, ...]) -> None:
    """Relu's result alone is kept for the backward pass, of gelu its argument, at which its derivative is taken."""
    torch.manual_seed(0)
    network = nn.Sequential(small_layer(functional.relu), nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 3)).bfloat16()
    x = torch.randn(shape).bfloat16()
    compiled = Compiled(network)
    gradients = []
    for run in (compiled, network):
        network.zero_grad()
        run(x).float().square().sum().backward()
        gradients.append([each.grad.clone() for each in network.parameters()])
    assert compiled.texts == ["bias.relu", "dgelu", "drelu"]
    given, wanted = (torch.cat([each.double().flatten() for each in found]) for found in gradients)
    assert (given - wanted).norm() <= 0.02 * wanted.norm()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor's code for the CPU is compiled by g++")
def test_inductor_copies_nothing_for_it(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the operators are given lies as they read it."""
    from torch._inductor import ir

    torch.manual_seed(0)
    network, x = Block(8).bfloat16(), torch.randn(2, 8, 5, 6).bfloat16().to(memory_format=torch.channels_last)
    copies = []
    copy_input = ir.ExternKernel.copy_input
    monkeypatch.setattr(ir.ExternKernel, "copy_input", lambda value: copies.append(value) or copy_input(value))
    torch._dynamo.reset()
    compiled = torch.compile(network, options=miofind.torch.inductor_options(fx_graph_cache=False))
    with torch.no_grad():
        given, wanted = compiled(x), network(x)
    torch.testing.assert_close(given, wanted, rtol=0.05, atol=0.05)
    assert len(ran) == 2
    assert not copies
