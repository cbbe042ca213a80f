"""Graphs that are channels first to the user, and run channels last."""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from helpers.runs.fused_answers import answers_of
from torch import nn
from torch_layer.inductor.compiled_graphs import Compiled

import miofind.torch
from miofind import Handle
from miofind.core.problem import Direction, ProblemDescription
from miofind.torch.inductor import strides
from miofind.torch.inductor.graphs import CONVOLUTIONS
from miofind.torch.inductor.kept import asked_problems
from miofind.torch.inductor.writing import Writing
from miofind.torch.override import formats

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture
def served(cpu_handle: Handle, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Estimates answer, and Inductor would turn nothing."""
    from miofind.torch.inductor import graph_pass

    monkeypatch.setattr(graph_pass, "prefers_channels_last", lambda graph: False)
    with answers_of(cpu_handle):
        yield


class Net(nn.Module):
    """Norms in training, a branch, and a transposed convolution."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        convolution, norm, transposed = LAYERS[rank]
        self.first, self.norm = convolution(1, 6, 3, padding=1, bias=False), norm(6)
        self.second = convolution(6, 6, 3, padding=1)
        self.up = transposed(6, 4, 2, stride=2)
        self.last = convolution(4, 3, 1)

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.norm(self.first(x)))
        return self.last(torch.sigmoid(self.up(torch.sin(self.second(x)) + x)))


LAYERS = {
    1: (nn.Conv1d, nn.BatchNorm1d, nn.ConvTranspose1d),
    2: (nn.Conv2d, nn.BatchNorm2d, nn.ConvTranspose2d),
    3: (nn.Conv3d, nn.BatchNorm3d, nn.ConvTranspose3d),
}
SHAPES = {1: (2, 1, 11), 2: (2, 1, 6, 5), 3: (2, 1, 3, 6, 5)}
LAST = {1: "NWC", 2: "NHWC", 3: "NDHWC"}


def trained(network: Any, run: Any, x: Any) -> list[Any]:
    """What a network gives under autocast to bfloat16, and the gradients of its weights."""
    network.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        y = run(x)
    y.float().square().mean().backward()
    return [y.detach(), *(each.grad.clone() for each in network.parameters())]


def layouts(compiled: Compiled) -> set[str]:
    """Of the forward problems: graphs that are run as they are keep for backward what was traced."""
    replaced = compiled.convolution_pass.replaced
    return {str(problem.y.layout) for problem in replaced if problem.direction is Direction.FORWARD}


def forced(compiled: Compiled) -> int:
    """The steps that give what is kept of PyTorch's own what it reads channels last."""
    return compiled.count(torch.ops.prims.inductor_force_stride_order.default)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.usefixtures("served")
def test_training(rank: int) -> None:
    torch.manual_seed(0)
    network, x = Net(rank), torch.randn(SHAPES[rank])
    exact = copy.deepcopy(network).double()
    y = exact(x.double())
    y.square().mean().backward()
    compiled = Compiled(network)
    given, expected = (trained(network, run, x) for run in (compiled, network))
    for ours, pytorchs, right in zip(given, expected, (y, *(p.grad for p in exact.parameters())), strict=True):
        error, allowed = ((each.double() - right).norm() for each in (ours, pytorchs))
        assert error <= 2 * allowed + 1e-2 * right.norm()
    assert layouts(compiled) == {LAST[rank]}
    assert [problem.epilogue.text for problem in compiled.convolution_pass.replaced][:3] == ["statistics", "", ""]
    assert forced(compiled) == (rank > 1), "the transposed one"
    steps = [node for graph in compiled.graphs for node in graph.graph.nodes if node.op == "call_function"]
    for node in (
        node for node in steps if all(each.op == "call_function" for each in node.all_input_nodes)
    ):  # casts of weights are turned later
        assert strides._strides(node.meta["val"]) == strides._strides(strides._traced(node)), node


@pytest.mark.usefixtures("served")
def test_what_is_kept_for_backward_lies_channels_last() -> None:
    """By its fake tensors, as Inductor lays it out; PyTorch's own transposed convolution is contiguous on a CPU."""
    network = nn.Sequential(nn.Conv3d(3, 6, 3, bias=False), nn.BatchNorm3d(6), nn.ReLU(), nn.Conv3d(6, 4, 1), nn.Tanh())
    compiled = Compiled(network)
    trained(network, compiled, torch.randn(2, 3, 5, 6, 7))
    (output,) = (node for node in compiled.graphs[0].graph.nodes if node.op == "output")
    values = [node.meta["val"] for node in output.all_input_nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    images = [value for value in values if value.shape[1:] in ((6, 3, 4, 5), (3, 5, 6, 7))]
    assert len(images) >= 3
    assert not any(value.is_contiguous() for value in images)


REASONS = ("float32", "no answer", "strides are read", "a complex view", "several views", "eager's random numbers")


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.usefixtures("served")
def test_what_stays(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from miofind.torch.inductor import graph_pass

    if reason == "no answer":
        known = graph_pass._server

        def first(problem: ProblemDescription, device: Any) -> str | None:
            return None if problem.y.layout.channels_last else known(problem, device)

        monkeypatch.setattr(graph_pass, "_server", first)
    dtype = torch.float32 if reason == "float32" else torch.bfloat16
    network, x = nn.Sequential(nn.Conv3d(3, 4, 3, padding=1), nn.ReLU()).to(dtype), torch.randn(2, 3, 4, 5, 6).to(dtype)
    last: dict[str, Callable[[Any], Any]] = {
        "strides are read": lambda y: y.as_strided((2, 5), (2, 3)),
        "a complex view": lambda y: torch.view_as_complex(y.float().reshape(2, 4, 4, 5, 3, 2)).abs(),
        "several views": lambda y: (y.view(8, 120), y.view(2, -1)),
        "eager's random numbers": lambda y: (y, torch.rand_like(y))[0],
    }

    def run(x: Any) -> Any:
        return last.get(reason, lambda y: y)(network(x))

    compiled = Compiled(run)
    with torch._inductor.config.patch(fallback_random=reason == "eager's random numbers"):
        torch.testing.assert_close(compiled(x), run(x), rtol=2e-2, atol=2e-2)
    assert layouts(compiled) == {"NCDHW"}


@pytest.mark.usefixtures("served")
def test_a_convolution_of_unknown_sizes_stays_beside_one_that_is_turned() -> None:
    network, x, z = (
        nn.Conv2d(3, 4, 3).bfloat16(),
        torch.randn(2, 3, 6, 5).bfloat16(),
        torch.randn(2, 3, 9, 8).bfloat16(),
    )
    torch._dynamo.mark_dynamic(z, 2)
    compiled = Compiled(lambda x, z: (network(x).relu(), network(z)))
    with torch.no_grad():
        for given, expected in zip(compiled(x, z), (network(x).relu(), network(z)), strict=True):
            torch.testing.assert_close(given, expected, rtol=2e-2, atol=2e-2)
    assert layouts(compiled) == {"NHWC"}
    assert not forced(compiled)


@pytest.mark.parametrize(
    ("fuses", "rank"),
    [
        (True, 1),
        (False, 3),
        pytest.param(True, 3, marks=pytest.mark.full_matrix),
        pytest.param(False, 1, marks=pytest.mark.full_matrix),
    ],
)
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
@pytest.mark.usefixtures("served")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inference_through_code_generation(fuses: bool, rank: int) -> None:
    """Of a network as it is, and of a fused one, whose operators are its own; a user's strides are those of before."""
    torch.manual_seed(0)
    network, x = Net(rank).eval().bfloat16(), torch.randn(SHAPES[rank]).bfloat16()
    options = miofind.torch.inductor_options()
    torch._dynamo.reset()
    compiled = torch.compile(
        miofind.torch.fuse(network) if fuses else network, options={**options, "fx_graph_cache": False}
    )
    with torch.no_grad():
        given, expected = compiled(x), network(x)
    torch.testing.assert_close(given, expected, rtol=2e-2, atol=2e-2)
    assert given.stride() == expected.stride()
    replaced = options["post_grad_custom_pre_pass"].replaced
    assert [str(problem.y.layout) for problem in replaced] == [LAST[rank]] * 3


PARTS: dict[str, Callable[[Any], Any]] = {
    "of a view": lambda y: y.flatten(1)[:, :2],
    "a channel": lambda y: y.unbind(1)[0],
    "a row": lambda y: y[:, :, 0],
    "channels": lambda y: y.chunk(3, 1)[1],
    "turned": lambda y: y.permute(0, 2, 3, 1)[:, 1:],
    "repeated": lambda y: y[:, :1].expand(-1, 5, -1, -1),
}


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
@pytest.mark.usefixtures("served")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_parts_of_tensors_keep_their_strides() -> None:
    """Who reads by address, or views numbers as of another type, may do so of what is compiled, too."""
    torch.manual_seed(0)
    networks = nn.ModuleList(nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.ReLU()) for _ in PARTS).eval().bfloat16()

    def run(x: Any) -> list[Any]:
        return [part(network(x)) for part, network in zip(PARTS.values(), networks, strict=True)]

    options, x = miofind.torch.inductor_options(), torch.randn(2, 6, 4, 4).bfloat16()
    torch._dynamo.reset()
    compiled = torch.compile(run, options={**options, "fx_graph_cache": False})
    with torch.no_grad():
        for name, given, expected in zip(PARTS, compiled(x), run(x), strict=True):
            torch.testing.assert_close(given, expected, rtol=2e-2, atol=2e-2)
            assert given.stride() == expected.stride(), name
    assert {str(problem.y.layout) for problem in options["post_grad_custom_pre_pass"].replaced} == {"NHWC"}


class Pooled(nn.Module):
    """A convolution, and a linear layer behind the mean of its places."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(6, 6, 3, padding=1), nn.Linear(6, 8)

    def forward(self, x: Any) -> tuple[Any, Any]:
        y = self.conv(x).relu()
        return y, self.linear(y.mean((2, 3)))


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
@pytest.mark.usefixtures("served")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_part_that_is_returned_beside_its_tensor_shares_its_memory() -> None:
    network, x = Pooled().eval().bfloat16(), torch.randn(2, 6, 4, 4).bfloat16()

    def run(x: Any) -> tuple[Any, ...]:
        y, h = network(x)
        return y, y[:, 1:3], h, h[:, :2]

    torch._dynamo.reset()
    compiled = torch.compile(run, options={**miofind.torch.inductor_options(), "fx_graph_cache": False})
    with torch.no_grad():
        y, part, h, head = compiled(x)
    assert head.stride() == (8, 1)
    for whole, some in ((y, part), (h, head)):
        whole.zero_()
        assert not some.any()


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
@pytest.mark.usefixtures("served")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_gradients_have_eager_s_strides_where_sizes_are_1_too() -> None:
    """What puts gradients into buckets compares them."""
    torch.manual_seed(0)
    network, x = nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 1)).bfloat16(), torch.randn(2, 4, 9)
    options = miofind.torch.inductor_options()
    torch._dynamo.reset()
    compiled = torch.compile(network, options={**options, "fx_graph_cache": False})
    found = []
    with torch._functorch.config.patch(enable_autograd_cache=False):
        for run in (compiled, network):
            network.zero_grad()
            run(x.bfloat16()).float().square().mean().backward()
            found.append([each.grad for each in network.parameters()])
    assert "NWC" in {str(problem.y.layout) for problem in options["post_grad_custom_pre_pass"].replaced}
    assert [each.stride() for each in found[0]] == [each.stride() for each in found[1]]
    for given, expected in zip(*found, strict=True):
        torch.testing.assert_close(given, expected, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("convolution", [nn.Conv1d, pytest.param(nn.Conv3d, marks=pytest.mark.full_matrix)])
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
@pytest.mark.usefixtures("served")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_branches_and_bodies_of_loops_stay(convolution: Any) -> None:
    """Inductor runs passes on them, too, and compares the strides of what branches give."""
    rank = {nn.Conv1d: 1, nn.Conv3d: 3}[convolution]
    network, x = convolution(6, 6, 3, padding=1).bfloat16(), torch.randn(2, 6, *(5, 4, 3)[:rank]).bfloat16()

    def branches(x: Any) -> Any:
        return torch.cond(x.sum() > 0, lambda x: torch.tanh(network(x)), lambda x: x.sin(), (x,))

    def loop(x: Any) -> Any:
        count = torch.tensor(0)
        return torch.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, torch.tanh(network(x))), (count, x))[1]

    for run in (branches, loop):
        options = miofind.torch.inductor_options()
        torch._dynamo.reset()
        with torch.no_grad():
            given = torch.compile(run, options={**options, "fx_graph_cache": False})(x)
            torch.testing.assert_close(given, run(x), rtol=2e-2, atol=2e-2)
        replaced = options["post_grad_custom_pre_pass"].replaced
        assert not {str(problem.y.layout) for problem in replaced} & {*LAST.values()}


@pytest.mark.usefixtures("served")
def test_graphs_whose_tensors_a_hook_keeps_stay() -> None:
    """It may give them back in another order, which a backward pass would not take; a checkpoint's does not."""
    x = torch.randn(SHAPES[1])
    for context, is_turned in (
        (torch.autograd.graph.save_on_cpu(), False),
        (torch.autograd.graph.saved_tensors_hooks(lambda v: v.contiguous(), lambda v: v), False),
        (contextlib.nullcontext(), True),
    ):
        network = Net(1)
        compiled = Compiled(network)
        with context:
            trained(network, compiled, x)
        assert (layouts(compiled) == {"NWC"}) is is_turned
    network = Net(1)
    compiled = Compiled(network)
    trained(network, lambda x: torch.utils.checkpoint.checkpoint(compiled, x, use_reentrant=False), x)
    assert layouts(compiled) == {"NWC"}


@pytest.mark.usefixtures("served")
def test_convolutions_in_float32_stay_beside_those_that_are_turned() -> None:
    wide, narrow = nn.Conv3d(4, 4, 3, padding=1), nn.Conv3d(4, 4, 3, padding=1).bfloat16()
    wide_up, narrow_up = nn.ConvTranspose3d(4, 2, 2, stride=2), nn.ConvTranspose3d(4, 2, 2, stride=2).bfloat16()

    def run(x: Any) -> Any:
        return wide_up(torch.relu(wide(x.float()))) + narrow_up(torch.relu(narrow(x)))

    x = torch.randn(2, 4, 3, 6, 5).bfloat16()
    compiled = Compiled(run)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), run(x), rtol=0.05, atol=0.05)
    problems = {(str(each.y.dtype), str(each.y.layout)) for each in compiled.convolution_pass.replaced}
    assert problems == {("float32", "NCDHW"), ("bfloat16", "NDHWC")}
    (graph,) = compiled.graphs
    writing = Writing(graph.graph, lambda problem, device: "", frozenset({3}), frozenset({3}))
    kept = [node for node in graph.graph.nodes if node.target in CONVOLUTIONS]
    asked = {str(each.x.dtype): str(each.x.layout) for node in kept for each in asked_problems(writing, node)}
    assert asked["float32"] == "NCDHW"


def test_kept_convolutions_of_one_dimension_are_asked_as_they_run() -> None:
    """PyTorch's own stay channels first, whatever is turned around them."""
    up, x = nn.ConvTranspose1d(4, 2, 2, stride=2).bfloat16(), torch.randn(2, 4, 9).bfloat16()
    compiled = Compiled(up, has_pass=False)
    with torch.no_grad():
        compiled(x)
    (graph,) = compiled.graphs
    writing = Writing(graph.graph, lambda problem, device: "", frozenset({1}), frozenset({1}))
    (kept,) = (node for node in graph.graph.nodes if node.target in CONVOLUTIONS)
    assert [str(problem.x.layout) for problem in asked_problems(writing, kept)] == ["NCW"]


def test_recording_leaves_graphs_as_they_are(cpu_handle: Handle, caplog: pytest.LogCaptureFixture) -> None:
    network, x = nn.Sequential(nn.Conv3d(2, 4, 3), nn.ReLU(), nn.Conv3d(4, 2, 1)).bfloat16(), torch.randn(1, 2, 4, 5, 6)
    with miofind.torch.use("record", handle=cpu_handle, devices="cpu"), torch.no_grad():
        compiled = Compiled(network)
        compiled(x.bfloat16())
    assert not compiled.convolution_pass.replaced
    assert not compiled.convolution_pass.missing
    assert not forced(compiled)
    assert not [record for record in caplog.records if record.name.startswith("miofind")]


@pytest.mark.parametrize("bias", [True, pytest.param(False, marks=pytest.mark.full_matrix)])
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
@pytest.mark.usefixtures("served")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_gradients_of_one_dimension_are_put_in_with_nothing_besides(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bias gradient has no answer here; PyTorch's own of the weights would be channels first."""
    served = Writing.served

    def without_sums(self: Writing, call: Any, **named: Any) -> Any:
        problem = served(self, call, **named)
        return None if problem is None or "bias_gradient" in problem.epilogue.text else problem

    monkeypatch.setattr(Writing, "served", without_sums)
    torch.manual_seed(0)
    layers = nn.Conv1d(6, 6, 3, bias=bias), nn.Sigmoid(), nn.Conv1d(6, 4, 3, bias=bias)
    network, x = nn.Sequential(*layers).bfloat16(), torch.randn(2, 6, 11).bfloat16()
    options = miofind.torch.inductor_options()
    torch._dynamo.reset()
    compiled = torch.compile(network, options={**options, "fx_graph_cache": False})
    with torch._functorch.config.patch(enable_autograd_cache=False):
        given, wanted = (trained(network, run, x) for run in (compiled, network))
    replaced = options["post_grad_custom_pre_pass"].replaced
    put_in = {(each.direction, each.epilogue.text, str(each.x.layout)) for each in replaced}
    assert {(direction, "", "NWC") for direction in (Direction.BACKWARD_DATA, Direction.BACKWARD_WEIGHTS)} <= put_in
    for each, expected in zip(given, wanted, strict=True):
        torch.testing.assert_close(each, expected, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("rank", [1, pytest.param(3, marks=pytest.mark.full_matrix)])
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
@pytest.mark.usefixtures("served")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_turned_operators_copy_nothing(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward: what they read lies channels last, what is kept of a step for the next, too."""
    copied = []
    packed = formats.dense

    def dense(tensor: Any, layout: Any) -> Any:
        made = packed(tensor, layout)
        if made is not tensor and not isinstance(tensor, torch._subclasses.FakeTensor):
            copied.append((tuple(tensor.shape), tensor.stride()))
        return made

    monkeypatch.setattr(formats, "dense", dense)
    torch.manual_seed(0)
    convolution = LAYERS[rank][0]
    layers = (
        convolution(6, 6, 3, padding=1),
        nn.Tanh(),
        convolution(6, 4, 3, padding=1),
        nn.Tanh(),
        convolution(4, 4, 1),
    )
    network, x = nn.Sequential(*layers), torch.randn(2, 6, *SHAPES[rank][2:])
    options = miofind.torch.inductor_options(fx_graph_cache=False)
    torch._dynamo.reset()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        trained(network, torch.compile(network, options=options), x)
    put_in = {str(each.direction) for each in options["post_grad_custom_pre_pass"].replaced}
    assert "forward" in put_in
    assert copied == []
