"""What becomes of a graph, and of a compilation, where a pass of miofind's fails."""

from __future__ import annotations

import copy
import functools
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import miofind.torch
from miofind.errors import NoSolutionError
from miofind.torch.inductor.graphs import copy_of, put_back
from miofind.torch.inductor.own_pass import OwnPass


class Fails(OwnPass):
    """Erases what a graph does, names its last step anew, and fails."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def rewrite(self, graph: fx.Graph) -> None:
        *_, last, output = graph.nodes
        output.args, output.meta = ((None,),), {}
        first = next(iter(graph.nodes))
        with graph.inserting_before(first):
            graph.call_function(torch.relu, (last,))  # of what is computed behind it
            raise self.error


def steps(graph: fx.Graph) -> list[Any]:
    numbers = {node: f"%{number}" for number, node in enumerate(graph.nodes)}
    return [
        (node.op, str(node.target), str(fx.map_arg((node.args, node.kwargs), numbers.get)), node.meta)
        for node in graph.nodes
    ]


def a_graph() -> fx.Graph:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    total = graph.call_function(torch.add, (x, y), {"alpha": 2})
    for number, node in enumerate((x, y, total)):
        node.meta["val"] = number
    graph.output((total, x)).meta["original_output_strides"] = [(1,), None]
    return graph


def test_a_graph_is_as_it_was_where_a_pass_fails() -> None:
    graph = a_graph()
    before = steps(graph)
    with pytest.warns(RuntimeWarning, match=r"Fails failed.*KeyError\('mine'\)"):
        Fails(KeyError("mine"))(graph)
    assert steps(graph) == before
    graph.lint()
    with graph.inserting_before(next(iter(graph.nodes))):
        pass
    graph.call_function(torch.neg, (next(iter(graph.nodes)),))
    assert list(graph.nodes)[-1].target is torch.neg, "steps are added at the end again"


def test_a_copy_has_all_that_is_noted() -> None:
    graph = a_graph()
    copied = copy_of(graph)
    assert steps(copied) == steps(graph)
    put_back(graph, copied)
    assert steps(graph) == steps(copied)


def test_what_a_user_asked_to_be_told_is_raised() -> None:
    with pytest.raises(NoSolutionError, match="none"):
        Fails(NoSolutionError("none"))(a_graph())


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("failing", ["graph_pass.gather_casts", "joint_pass.gather_gradients"])
def test_a_network_is_compiled_where_a_pass_fails(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fails when it has changed the graph."""

    def fails(original: Callable[..., Any]) -> Callable[..., Any]:
        def failing_step(graph: fx.Graph, *more: Any) -> None:
            original(graph, *more)
            list(graph.nodes)[-1].args = ((),)
            raise ValueError("a defect")

        return failing_step

    from miofind.torch.inductor import graph_pass, joint_pass

    module, name = {"graph_pass": graph_pass, "joint_pass": joint_pass}[failing.split(".")[0]], failing.split(".")[1]
    monkeypatch.setattr(module, name, fails(getattr(module, name)))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(4))
    model = model.to(memory_format=torch.channels_last)
    eager, inputs = copy.deepcopy(model), [torch.ones(2, 3, 5, 5).requires_grad_() for _ in range(2)]
    torch._dynamo.reset()
    compiled = torch.compile(model, options={**miofind.torch.inductor_options(), "fx_graph_cache": False})

    def run(network: Any, x: Any) -> Any:
        y = network(x)
        y.square().sum().backward()
        return y

    with torch._functorch.config.patch(enable_autograd_cache=False), pytest.warns(RuntimeWarning, match="a defect"):
        y = run(compiled, inputs[0])
    results = y, run(eager, inputs[1])
    torch.testing.assert_close(*results)
    assert results[0].stride() == results[1].stride()
    close = functools.partial(torch.testing.assert_close, rtol=1e-3, atol=1e-3)  # a batch norm takes sums apart
    close(*(x.grad for x in inputs))
    for mine, pytorchs in zip(model.parameters(), eager.parameters(), strict=True):
        close(mine.grad, pytorchs.grad)
