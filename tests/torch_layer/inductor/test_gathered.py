"""Small steps of training graphs that become one: which do, which stay, and the same numbers."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch_layer.inductor.compiled_graphs import Compiled

import miofind.torch
from miofind.torch.inductor import gathered

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

aten, prims = torch.ops.aten, torch.ops.prims
LAST = {"memory_format": torch.channels_last}
FORMATS = pytest.mark.parametrize(
    "last", [True, pytest.param(False, marks=pytest.mark.full_matrix)], ids=["channels last", "contiguous"]
)


class Blocks(nn.Module):
    """Convolutions with filters of one tap and of nine, one depthwise, with batch norms behind them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolutions = nn.ModuleList(
            [nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 6, 3, padding=1)]
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(k) for k in (8, 8, 6))

    def forward(self, x: Any) -> Any:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = torch.relu(norm(convolution(x)))
        return x


def step(network: Any, x: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        y = network(x)
    y.float().square().mean().backward()


def casts(compiled: Compiled) -> list[int]:
    """How many tensors each step casts, graph by graph."""
    target = torch.ops.miofind.cast.default
    return [len(node.args[0]) for graph in compiled.graphs for node in graph.graph.nodes if node.target is target]


@FORMATS
def test_casts_and_counts_of_a_step_become_one(last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from miofind.torch.inductor import graph_pass

    monkeypatch.setattr(graph_pass, "prefers_channels_last", lambda graph: False)
    model, x = Blocks(), torch.randn(2, 4, 9, 8)
    if last:
        model, x = model.to(**LAST), x.to(**LAST)
    plain, compiled = copy.deepcopy(model), Compiled(model)
    others = Compiled(plain, has_pass=False)
    for _ in range(2):
        step(compiled, x)
        step(others, x)
    forward, backward = casts(compiled)
    assert forward == 3 + 3, "weights and biases"
    assert backward >= 3, "gradients of weights"
    assert compiled.count(aten._foreach_add.Scalar) == 1
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert [norm.num_batches_tracked.item() for norm in model.norms] == [2, 2, 2]


def test_what_turns_a_tensor_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    from miofind.torch.inductor import graph_pass

    monkeypatch.setattr(graph_pass, "prefers_channels_last", lambda graph: True)
    compiled = Compiled(Blocks())
    step(compiled, torch.randn(2, 4, 9, 8))
    forward, backward = casts(compiled)
    assert forward == 2 + 3, "without the filters of nine taps of six channels"
    assert backward >= 2
    left = [
        node for node in compiled.graphs[0].graph.nodes if node.target is torch.ops.prims.convert_element_type.default
    ]
    assert {(6, 8, 3, 3), (2, 4, 9, 8)} <= {tuple(node.meta["val"].shape) for node in left}


def test_what_is_large_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    from miofind.torch.inductor import graph_pass

    monkeypatch.setattr(graph_pass, "prefers_channels_last", lambda graph: False)
    monkeypatch.setattr(gathered, "_LARGEST", 8 * 9)
    compiled = Compiled(Blocks())
    step(compiled, torch.randn(2, 4, 9, 8))
    assert casts(compiled)[0] == 2 + 3, "without the filters of nine taps of six channels"


def test_gradients_are_cast_some_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from miofind.torch.inductor import graph_pass

    monkeypatch.setattr(graph_pass, "prefers_channels_last", lambda graph: False)
    monkeypatch.setattr(gathered, "_MOST", 8 * 9)
    model = Blocks()
    plain, compiled = copy.deepcopy(model), Compiled(model)
    step(compiled, torch.ones(2, 4, 9, 8))
    step(Compiled(plain, has_pass=False), torch.ones(2, 4, 9, 8))
    assert len(casts(compiled)) >= 3
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_copies_stay_copies() -> None:
    """Of the same type, and so no casts, although they are written so."""

    def copied(first: Any, second: Any, image: Any) -> Any:
        weights = [each.to(torch.float32, copy=True) for each in (first, second)]
        y = torch.conv2d(torch.conv2d(image, weights[0]), weights[1])
        first.mul_(2)
        second.mul_(2)
        return y, *weights

    torch.manual_seed(0)
    given = [torch.randn(4, 3, 3, 3), torch.randn(2, 4, 3, 3), torch.randn(2, 3, 8, 8, requires_grad=True)]
    want = copied(*(each.clone() for each in given))
    options = {**miofind.torch.inductor_options(), "fx_graph_cache": False, "layout_optimization": False}
    torch._dynamo.reset()
    got = torch.compile(copied, options=options)(*given)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_what_is_written_before_it_is_cast_stays() -> None:
    graph = torch.fx.Graph()
    shape, window = (4, 4, 1, 1), ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    image, first, second = (graph.placeholder(name) for name in ("image", "primals_1", "primals_2"))
    image.meta["val"] = torch.empty(2, 4, 3, 3, dtype=torch.bfloat16)
    for each in (first, second):
        each.meta["val"] = torch.empty(shape)
    graph.call_function(torch.ops.fsdp.copy_.default, (first, second))
    read = image
    for each in (first, second):
        cast = graph.call_function(torch.ops.prims.convert_element_type.default, (each, torch.bfloat16))
        cast.meta["val"] = torch.empty(shape, dtype=torch.bfloat16)
        read = graph.call_function(aten.convolution.default, (read, cast, None, *window))
        read.meta["val"] = image.meta["val"]
    graph.output((read,))
    gathered.gather_casts(graph, frozenset())
    assert [node.target for node in graph.nodes].count(torch.ops.miofind.cast.default) == 0


def test_counts_that_are_written_before_they_are_counted_up_stay() -> None:
    graph = torch.fx.Graph()
    given = [graph.placeholder(name) for name in ("primals_1", "primals_2", "primals_3")]
    for each in given:
        each.meta["val"] = torch.empty((), dtype=torch.int64)
    first, second, other = given
    for count in (first, second):
        graph.call_function(torch.ops.fsdp.copy_.default, (count, other))
        added = graph.call_function(aten.add.Tensor, (count, 1))
        added.meta["val"] = count.meta["val"]
        graph.call_function(aten.copy_.default, (count, added))
    graph.output(())
    gathered.gather_counts(graph)
    assert [node.target for node in graph.nodes].count(aten._foreach_add.Scalar) == 0


def test_a_count_that_something_else_reads_stays() -> None:
    """Of a batch norm without a momentum, which divides by it."""
    model = Blocks()
    for norm in model.norms:
        norm.momentum = None
    compiled, plain = Compiled(model), copy.deepcopy(model)
    for _ in range(2):
        step(compiled, torch.ones(2, 4, 9, 8))
        step(plain, torch.ones(2, 4, 9, 8))
    assert compiled.count(aten._foreach_add.Scalar) == 0
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def test_casts_stay_where_inductor_cannot_be_told_of_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "_is_lowered", lambda: False)
    compiled = Compiled(Blocks())
    step(compiled, torch.randn(2, 4, 9, 8))
    assert casts(compiled) == []


@FORMATS
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductors_code_computes_the_same(last: bool) -> None:
    model, x = Blocks(), torch.randn(2, 4, 9, 8)
    if last:
        model, x = model.to(**LAST), x.to(**LAST)
    plain = copy.deepcopy(model)
    options = miofind.torch.inductor_options()
    torch._dynamo.reset()
    compiled = torch.compile(model, options={**options, "fx_graph_cache": False})
    configured = torch._inductor.config.patch(force_layout_optimization=not last)
    with configured, torch._functorch.config.patch(enable_autograd_cache=False):
        for _ in range(2):
            step(compiled, x)
            step(plain, x)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert _strides(one.grad) == _strides(other.grad)
        torch.testing.assert_close(one.grad, other.grad, rtol=0.05, atol=0.02)
    assert [norm.num_batches_tracked.item() for norm in model.norms] == [2, 2, 2]


def _strides(tensor: Any) -> list[int]:
    """Of dimensions whose strides mean something."""
    return [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


IMAGES = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
SIGNALS = [1], [0], [1], False, [0], 1
FILTERS, FILTERS_LAST = torch.empty(4, 3, 3, 3), torch.empty(4, 3, 3, 3).to(**LAST)
TAPS, TAPS_LAST = torch.empty(4, 3, 3), torch.empty(4, 3, 3).mT.contiguous().mT
ORDERS = {
    "as it is": (FILTERS, FILTERS, (), True),
    "turned later": (FILTERS, FILTERS, (2,), False),
    "turned later, of another rank": (FILTERS, FILTERS, (3,), True),
    "channels last": (FILTERS_LAST, FILTERS_LAST, (2,), True),
    "turned": (FILTERS, FILTERS_LAST, (), False),
    "turned back": (FILTERS_LAST, FILTERS, (), False),
    "signals": (TAPS, TAPS, (1,), True),
    "signals, turned": (TAPS, TAPS_LAST, (), False),
    "signals, turned back": (TAPS_LAST, TAPS, (), False),
}


def cast(tensor: Any) -> Any:
    return prims.convert_element_type.default(tensor, torch.bfloat16)


def traced(function: Any, *arguments: Any) -> fx.Graph:
    graph: fx.Graph = make_fx(function, tracing_mode="fake")(*arguments).graph
    return graph


def gathered_at(graph: fx.Graph, last_ranks: tuple[int, ...] = ()) -> list[int]:
    """The places of steps that cast several tensors, after these were gathered."""
    gathered.gather_casts(graph, frozenset(last_ranks))
    graph.lint()
    return [place for place, node in enumerate(graph.nodes) if node.target is torch.ops.miofind.cast.default]


@pytest.mark.parametrize("name", ORDERS)
def test_casts_that_keep_the_order_of_memory_are_gathered(name: str) -> None:
    source, value, last_ranks, is_gathered = ORDERS[name]
    geometry = IMAGES if source.dim() == 4 else SIGNALS
    x = torch.empty(2, 3, *[8] * (source.dim() - 2), dtype=torch.bfloat16)

    def function(x: Any, *weights: Any) -> list[Any]:
        return [aten.convolution(x, cast(w), None, *geometry) for w in weights]

    graph = traced(function, x, source, source)
    for node in graph.find_nodes(op="call_function", target=prims.convert_element_type.default):
        node.meta["val"] = value.to("meta", torch.bfloat16)  # as the memory format is noted that a step will have
    assert len(gathered_at(graph, last_ranks)) == is_gathered


@pytest.mark.parametrize("last", [False, True])
def test_a_cast_for_an_operator_that_runs_channels_last_stays(last: bool) -> None:
    operator = torch.ops.miofind.convolution.default

    def function(x: Any, *weights: Any) -> list[Any]:
        return [operator(x, cast(w), None, None, None, "none", [1, 1], [0, 0], [1, 1], 1) for w in weights]

    graph = traced(function, torch.empty(2, 3, 8, 8, dtype=torch.bfloat16), FILTERS, FILTERS)
    for node in graph.find_nodes(op="call_function", target=operator):
        node.kwargs = {"channels_last": last}
    assert len(gathered_at(graph)) == (not last)


def gradients(x: Any, dy: Any, w: Any) -> list[Any]:
    """Four gradients, the last of which are cast first."""
    made = [aten.convolution_backward(dy, x, w, None, *IMAGES, [False, True, False])[1] for _ in range(4)]
    return [prims.convert_element_type.default(dw, torch.float32) for dw in reversed(made)]


@pytest.mark.parametrize(("most", "last_ranks", "behind"), [(None, (), [4]), (2, (), [2, 4]), (None, (2,), [])])
def test_gradients_are_cast_once_some_are_there(
    most: int | None, last_ranks: tuple[int, ...], behind: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order in which they are computed; those that will be turned stay."""
    if most is not None:
        monkeypatch.setattr(gathered, "_MOST", most * FILTERS.numel())
    graph = traced(
        gradients, *(torch.empty(s, dtype=torch.bfloat16) for s in ((2, 3, 8, 8), (2, 4, 6, 6), FILTERS.shape))
    )
    places = gathered_at(graph, last_ranks)
    before = ([*graph.nodes][:place] for place in places)
    backward = aten.convolution_backward.default
    assert [sum(node.target is backward for node in nodes) for nodes in before] == behind
