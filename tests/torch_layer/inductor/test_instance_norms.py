"""Instance norms of channels-last graphs, computed with images and channels apart."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.runs.fused_answers import answers_of
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch_layer.inductor.compiled_graphs import Compiled

from miofind import Handle
from miofind.torch.inductor.graphs import VIEWS
from miofind.torch.inductor.instance_norms import unfold_images
from miofind.torch.inductor.turned import retrace

aten = torch.ops.aten


def traced(function: Any, *inputs: Any) -> fx.GraphModule:
    """A function's graph, as Inductor decomposes it, traced channels first and given these inputs."""
    from torch._inductor.decomposition import select_decomp_table

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(each.contiguous()) for each in inputs]
        graph = make_fx(function, decomposition_table=select_decomp_table())(*fakes)
        for node in graph.graph.nodes:  # as in Inductor: a view of what lies in another order is a copy
            node.target = aten.reshape.default if node.target is aten.view.default else node.target
        given = [node for node in graph.graph.nodes if node.op == "placeholder"]
        for node, each in zip(given, inputs, strict=True):
            node.meta["val"] = mode.from_tensor(each)
    retrace(graph.graph, {*given})
    graph.recompile()
    return graph


def joined(graph: fx.Graph) -> list[fx.Node]:
    """The steps that are computed of (1, n * c, ...), beside numbers of channels."""
    values = ((node, node.meta.get("val")) for node in graph.nodes if node.op == "call_function")
    return [
        node
        for node, v in values
        if isinstance(v, torch.Tensor) and v.dim() > 3 and len(v) == 1 and v[0, 0].numel() > 1
    ]


def normed(x: Any, weight: Any, bias: Any) -> Any:
    batch, channels = x.shape[:2]
    together = aten.reshape(x, [1, batch * channels, *x.shape[2:]])
    vectors = weight.repeat(batch), bias.repeat(batch)
    y = functional.batch_norm(together, None, None, *vectors, training=True)
    return functional.leaky_relu(aten.reshape(y, x.shape), 0.1)


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_backward(rank: int, dtype: Any) -> None:
    torch.manual_seed(rank)
    order = {2: torch.channels_last, 3: torch.channels_last_3d}[rank]
    x = torch.randn(3, 4, *(5, 6, 3)[:rank]).to(dtype).to(memory_format=order)
    weight, bias, dy = torch.randn(4), torch.randn(4), torch.randn_like(x)

    def both(x: Any, weight: Any, bias: Any, dy: Any) -> Any:
        read = [each.detach().requires_grad_() for each in (x, weight, bias)]
        y = normed(*read)
        return y, *torch.autograd.grad(y, read, dy)

    graph = traced(both, x, weight, bias, dy)
    expected = graph(x, weight, bias, dy)
    assert joined(graph.graph)
    unfold_images(graph.graph)
    graph.graph.lint()
    graph.recompile()
    assert not joined(graph.graph)
    given = graph(x, weight, bias, dy)
    for one, other in zip(given, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other)
    for node in graph.graph.nodes:
        if node.op == "call_function" and isinstance(node.meta["val"], torch.Tensor):
            assert (
                node.meta["val"].dim() != rank + 2
                or 1 in node.meta["val"].shape
                or not node.meta["val"].is_contiguous()
            )


@pytest.mark.parametrize("inplace", [False, True])
def test_networks_that_are_given_channels_last(inplace: bool, cpu_handle: Handle) -> None:
    """PyTorch copies to channels first before norms, and an activation in place writes into a view of a result."""
    torch.manual_seed(4)
    plain = nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.InstanceNorm2d(16, affine=True),
        nn.LeakyReLU(0.1, inplace=inplace),
        nn.Conv2d(16, 8, 3, padding=1, bias=False),
        nn.InstanceNorm2d(8),
        nn.LeakyReLU(0.1, inplace=inplace),
        nn.Conv2d(8, 4, 1),
    ).to(memory_format=torch.channels_last)
    network = copy.deepcopy(plain)
    x = torch.randn(3, 8, 6, 7).to(memory_format=torch.channels_last)

    def gradients(function: Any, parameters: Any) -> list[Any]:
        given = x.clone().requires_grad_()
        y = function(given)
        return [y.detach(), *torch.autograd.grad(y.square().mean(), (given, *parameters))]

    with answers_of(cpu_handle):
        compiled = Compiled(network, recomputes=True)
        found = gradients(compiled, network.parameters())
    assert len(compiled.graphs) == 2
    assert not any(joined(graph.graph) for graph in compiled.graphs)
    for one, other in zip(found, gradients(plain, plain.parameters()), strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_a_copy_that_is_seen_both_ways_stays_a_copy() -> None:
    def run(x: Any) -> Any:
        y = x.sin()
        together = aten.view(y.clone(memory_format=torch.contiguous_format), [1, 12, 5, 6])
        return y, aten.view(together, [3, 4, 5, 6]), together.exp()

    x = torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last)
    graph = make_fx(run, tracing_mode="fake")(x)
    expected = graph(x)
    unfold_images(graph.graph)
    graph.recompile()
    given = graph(x)
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert given[0].data_ptr() != given[1].data_ptr()


def test_copies_to_another_type_are_made() -> None:
    def run(x: Any) -> Any:
        together = aten.reshape(x, [1, 12, 5, 6]).sin()
        copied = aten.copy(torch.empty(1, 12, 5, 6, dtype=torch.bfloat16), together)
        return aten.reshape(copied, [3, 4, 5, 6])

    x = torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last)
    graph = traced(run, x)
    expected = graph(x)
    unfold_images(graph.graph)
    graph.recompile()
    torch.testing.assert_close(graph(x), expected, rtol=0, atol=0)


def test_what_a_graph_is_given_is_no_result() -> None:
    def run(x: Any) -> Any:
        together = aten.reshape(x, [1, 12, 5, 6])
        return aten.reshape(together, [3, 4, 5, 6]), aten.reshape(together.sin(), [3, 4, 5, 6])

    graph = traced(run, torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last))
    unfold_images(graph.graph)
    graph.graph.lint()
    assert all(node.op == "call_function" for node in graph.graph.output_node().all_input_nodes)


def test_what_lies_channels_first_stays() -> None:
    inputs = torch.randn(3, 4, 5, 6), torch.randn(4), torch.randn(4)
    graph = traced(normed, *inputs)
    before = str(graph.graph)
    unfold_images(graph.graph)
    assert str(graph.graph) == before


READ = ("whole", "sum", "norm of all", "sum of all", "one more dimension", "one element of more dimensions")


@pytest.mark.parametrize("read", READ)
def test_what_else_reads_the_view_has_its_shape(read: str) -> None:
    others: dict[str, Callable[[Any], Any]] = {
        "whole": lambda v: v.exp().flatten(),
        "sum": lambda v: v.sum((0, 2, 3), keepdim=True).flatten() * 2,
        "norm of all": lambda v: v.sub(v.mean()),
        "sum of all": lambda v: torch.sum(v, None, keepdim=True),
        "one more dimension": lambda v: v + torch.ones(1, 12, 1, 5, 6),
        "one element of more dimensions": lambda v: (v + torch.ones(1, 1, 1, 1, 1)).sum((0, 2, 3), keepdim=True),
    }

    def run(x: Any, w: Any) -> Any:
        v = aten.reshape(x, [1, 12, 5, 6]).mul(w.view(12, 1, 1)).add(1)
        return others[read](v), aten.reshape(v.sin(), [3, 4, 5, 6])

    x, w = torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last), torch.randn(12)
    graph = traced(run, x, w)
    expected = graph(x, w)
    unfold_images(graph.graph)
    graph.recompile()
    for one, other in zip(graph(x, w), expected, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("step", ["strides are read", "an operator of another package"])
def test_graphs_that_read_strides_stay(step: str) -> None:
    x, vectors = torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last), (torch.randn(4), torch.randn(4))
    graph = traced(normed, x, *vectors)
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    with graph.graph.inserting_before(output):
        target = aten.as_strided.default if step == "strides are read" else torch.cond
        graph.graph.call_function(target, (output.args[0], [2], [3]))  # which nothing reads, and nobody runs
    before = str(graph.graph)
    unfold_images(graph.graph)
    assert str(graph.graph) == before


def test_strides_that_are_read_of_others_change_nothing() -> None:
    def run(x: Any, w: Any, b: Any) -> Any:
        return normed(x, w, b), aten.as_strided(w, [2], [3])

    inputs = torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last), torch.randn(4), torch.randn(4)
    graph = traced(run, *inputs)
    expected = graph(*inputs)
    unfold_images(graph.graph)
    graph.graph.lint()
    graph.recompile()
    assert graph.graph.find_nodes(op="call_function", target=aten.as_strided.default)
    assert not joined(graph.graph)
    for one, other in zip(graph(*inputs), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_norms_of_which_strides_are_read_stay_beside_others() -> None:
    def run(x: Any, w: Any, b: Any, other: Any) -> Any:
        return normed(x, w, b), aten.as_strided(normed(other, w, b), [2, 7], [120, 2])

    images = [torch.randn(3, 4, 5, size).to(memory_format=torch.channels_last) for size in (6, 7)]
    inputs = images[0], torch.randn(4), torch.randn(4), images[1]
    graph = traced(run, *inputs)
    expected = graph(*inputs)
    unfold_images(graph.graph)
    graph.graph.lint()
    graph.recompile()
    assert {node.meta["val"].shape[-1] for node in joined(graph.graph)} == {7}
    for one, other in zip(graph(*inputs), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_steps_of_other_passes_may_say_nothing_of_themselves() -> None:
    x, vectors = torch.randn(3, 4, 5, 6).to(memory_format=torch.channels_last), (torch.randn(4), torch.randn(4))
    graph = traced(normed, x, *vectors)
    expected = graph(x, *vectors)
    for node in graph.graph.nodes:
        if node.target in VIEWS:
            node.meta.clear()
    unfold_images(graph.graph)
    graph.recompile()
    torch.testing.assert_close(graph(x, *vectors), expected)
