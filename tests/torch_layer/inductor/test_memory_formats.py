"""What convolutions of a graph are given: packed tensors, which neither they nor their operators copy."""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.runs.fused_answers import answers_of
from torch import fx, nn
from torch._inductor import lowering
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch_layer.inductor.compiled_graphs import Compiled

import miofind.torch
from miofind import Handle
from miofind.torch.fused.ops import OPERATORS
from miofind.torch.inductor import memory_formats
from miofind.torch.override import formats

aten = torch.ops.aten


class Split(nn.Module):
    """Convolutions of halves of channels, whose gradients are parts of one tensor, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second, self.third = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))

    def forward(self, x: Any) -> Any:
        left, right = self.first(x).chunk(2, 1)
        return torch.sin(torch.cat([left, torch.relu(self.second(right)), self.third(right)], 1))


@pytest.fixture
def network() -> Any:
    torch.manual_seed(0)
    return Split()


def gradients(network: Any, run: Any, x: Any) -> list[Any]:
    network.zero_grad()
    run(x).square().sum().backward()
    return [each.grad.clone() for each in network.parameters()]


def test_convolutions_that_stay_are_given_copies_of_parts(network: Any) -> None:
    """With no FindDB. The halves that two read are copied once, and backward what is kept of it."""
    x = torch.randn(2, 3, 6, 5)
    compiled = Compiled(network)
    for given, expected in zip(gradients(network, compiled, x), gradients(network, network, x), strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)
    kept = (aten.convolution.default, aten.convolution_backward.default)
    for graph in compiled.graphs:
        for node in (each for each in graph.graph.nodes if each.target in kept):
            images = node.args[: 1 if node.target is kept[0] else 2]
            assert all(image.meta["val"].is_contiguous() for image in images)
    forward = [node for node in compiled.graphs[0].graph.nodes if node.target is aten.clone.default]
    assert len(forward) == 1
    assert len(forward[0].users) >= 2


def test_an_input_that_nothing_reads_is_not_copied(network: Any) -> None:
    """Of a gradient of images alone, whose weights are frozen."""
    network.second.requires_grad_(False)
    x = torch.randn(2, 3, 6, 5)
    compiled = Compiled(network)
    compiled(x).square().sum().backward()
    frozen = [
        node
        for node in compiled.graphs[1].graph.nodes
        if node.target is aten.convolution_backward.default and not node.args[10][1]
    ]
    assert len(frozen) == 1
    assert frozen[0].args[1].target is not aten.clone.default


def test_a_part_of_a_channels_last_tensor_is_copied_channels_last(network: Any) -> None:
    x = torch.randn(2, 3, 6, 5).to(memory_format=torch.channels_last)
    compiled = Compiled(network.to(memory_format=torch.channels_last))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), network(x), rtol=1e-4, atol=1e-4)
    (copied,) = (node for node in compiled.graphs[0].graph.nodes if node.target is aten.clone.default)
    assert copied.meta["val"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor compiles for the CPU with g++")
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_operators_copy_no_parts(network: Any, order: Any, cpu_handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    network, x = network.eval().to(memory_format=order), torch.randn(2, 3, 6, 5).to(memory_format=order)
    copied = []

    def dense(tensor: Any, layout: Any) -> Any:
        copied.append(tuple(tensor.shape))
        return packed(tensor, layout)

    packed = formats.dense
    monkeypatch.setattr(formats, "dense", dense)
    options = miofind.torch.inductor_options()
    torch._dynamo.reset()
    with answers_of(cpu_handle) as ran, torch.no_grad():
        compiled = torch.compile(miofind.torch.fuse(network), options={**options, "fx_graph_cache": False})
        torch.testing.assert_close(compiled(x), network(x), rtol=1e-4, atol=1e-4)
    assert copied == []
    assert len(ran) == 3


class FirstNorm(nn.Module):
    """A norm of groups of channels that computes channels first, whatever it reads, as PyTorch's once did."""

    def forward(self, x: Any) -> Any:
        n, c, h, w = x.shape
        groups = x.contiguous().reshape(n, 4, -1)
        groups = groups - groups.mean(2, keepdim=True)
        groups = groups * torch.rsqrt(groups.square().mean(2, keepdim=True) + 1e-5)
        return torch.sigmoid(groups.view(n, c, h, w))


class Branches(nn.Module):
    """What a convolution reads, and its gradient, is added to something else, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        self.norm = FirstNorm()

    def forward(self, x: Any) -> Any:
        y = self.norm(self.first(x))
        return self.last(y + self.norm(self.second(y)))


def backward_reads(graph: Any) -> list[Any]:
    """The images that gradients of convolutions read."""
    found = []
    for node in graph.graph.nodes:
        if node.target is aten.convolution_backward.default:
            found += node.args[: 2 if node.args[10][1] else 1]
        elif "convolution_backward" in str(node.target):
            found += node.args[: 2 if "weights" in str(node.target) else 1]
    return found


@pytest.mark.parametrize("is_answered", [False, True])
def test_gradients_read_channels_last_what_was_traced_channels_first(is_answered: bool, cpu_handle: Handle) -> None:
    """What else reads it reads the same step, so that Inductor writes it once."""
    torch.manual_seed(0)
    network = Branches().to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 6, 5).to(memory_format=torch.channels_last)
    expected = gradients(network, network, x)
    with answers_of(cpu_handle) if is_answered else contextlib.nullcontext():
        compiled = Compiled(network)
        for given, wanted in zip(gradients(network, compiled, x), expected, strict=True):
            torch.testing.assert_close(given, wanted, rtol=1e-3, atol=1e-3)
    read = backward_reads(compiled.graphs[1])
    assert len(read) >= 6
    assert all(formats.is_last(image.meta["val"]) for image in read)
    turned = {image for image in read if image.target is aten.clone.default}
    assert turned
    sources = [image.args[0] for image in turned]
    assert len({*sources}) == len(sources)
    computed = [source for source in sources if source.op == "call_function" and "getitem" not in source.name]
    assert computed
    assert all(len(source.users) == 1 for source in computed)


def test_gradients_channels_first_read_channels_first() -> None:
    torch.manual_seed(0)
    network, x = Branches(), torch.randn(2, 8, 6, 5)
    compiled = Compiled(network)
    gradients(network, compiled, x)
    assert all(image.meta["val"].is_contiguous() for image in backward_reads(compiled.graphs[1]))


class Gradient:
    """A graph of one convolution's gradients, channels last, of what is computed of a tensor that is channels first.

    Attributes:
        step: adds one to the graph.
        image: the step, of dy alone, whose result the gradients read.
        made: the gradients.
    """

    def __init__(self, computed: Callable[[Any, fx.Node], fx.Node]) -> None:
        from miofind.torch.inductor.graphs import added_step

        self.graph = fx.Graph()
        self.step = functools.partial(added_step, self.graph)
        with FakeTensorMode() as mode:
            dy, x, w = (mode.from_tensor(torch.empty(shape)) for shape in ((2, 8, 6, 5), (2, 8, 6, 5), (8, 8, 3, 3)))
            x, w = (each.to(memory_format=torch.channels_last) for each in (x, w))
            nodes = [self.graph.placeholder(name) for name in ("dy", "x", "w")]
            for node, value in zip(nodes, (dy, x, w), strict=True):
                node.meta["val"] = value
            self.image = computed(self.step, nodes[0])
            geometry = ([8], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True])
            self.made = self.step(aten.convolution_backward.default, self.image, *nodes[1:], *geometry)

    def packed(self, *results: tuple[Any, ...]) -> list[fx.Node]:
        """Further steps, each of an operator and what it reads, after the graph that returns them was packed."""
        from miofind.torch.inductor.kept import pack_images

        steps = [each if isinstance(each, fx.Node) else self.step(*each) for each in results]
        self.graph.output((*steps, self.made))
        pack_images(self.graph)
        self.graph.lint()
        return steps


def sigmoid(step: Any, dy: fx.Node) -> fx.Node:
    return step(aten.sigmoid.default, dy)


def test_all_that_read_an_image_read_it_as_gradients_do() -> None:
    gradient = Gradient(sigmoid)
    (summed,) = gradient.packed((aten.sum.dim_IntList, gradient.image, [0, 2, 3]))
    turned = gradient.made.args[0]
    assert turned.target is aten.clone.default
    assert formats.is_last(turned.meta["val"])
    assert summed.args[0] is turned
    assert [*gradient.image.users] == [turned]


def test_a_result_of_a_graph_stays_as_it_was() -> None:
    gradient = Gradient(sigmoid)
    gradient.packed(gradient.image)
    (output,) = gradient.graph.find_nodes(op="output")
    assert output.args[0][0] is gradient.image
    assert gradient.made.args[0].target is aten.clone.default


def test_what_is_not_computed_element_by_element_is_copied_for_gradients_alone() -> None:
    gradient = Gradient(lambda step, dy: step(aten.cumsum.default, dy, 2))
    (summed,) = gradient.packed((aten.sum.dim_IntList, gradient.image, [0, 2, 3]))
    assert summed.args[0] is gradient.image
    assert formats.is_last(gradient.made.args[0].meta["val"])


BEHIND = {
    "itself": (),
    "a step": ((aten.sin.default,),),
    "a view": ((aten.select.int, 0, 0), (aten.unsqueeze.default, 0)),
    "a permutation": ((aten.permute.default, [1, 0, 2, 3]), (aten.sin.default,)),
}


@pytest.mark.parametrize("behind", BEHIND)
def test_an_image_whose_order_someone_reads_is_copied_for_gradients_alone(behind: str) -> None:
    """Of a step that reads memory as it lies, itself or what is computed of it."""
    gradient = Gradient(sigmoid)
    read = gradient.image
    for target, *arguments in BEHIND[behind]:
        read = gradient.step(target, read, *arguments)
    first = read if read is gradient.image else next(iter(set(gradient.image.users) - {gradient.made}))
    gradient.packed((aten.as_strided.default, read, [8], [1]))
    assert read is gradient.image or first.args[0] is gradient.image
    copied = gradient.made.args[0]
    assert copied.target is aten.clone.default
    assert copied.args[0] is gradient.image
    assert [*copied.users] == [gradient.made]


class Strided(nn.Module):
    """What a convolution reads is computed once more backward, and its order in memory read behind another step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))

    def _block(self, x: Any) -> Any:
        y = torch.sigmoid(x.contiguous())
        seen = torch.as_strided((y + 1).sin(), (y.numel(),), (1,))
        return self.second(y).flatten() + seen.sin()

    def forward(self, x: Any) -> Any:
        ramp = torch.arange(x.numel()) / x.numel()
        return ramp * checkpoint(self._block, self.first(x), use_reentrant=False)


def test_gradients_of_what_is_read_as_it_lies() -> None:
    torch.manual_seed(0)
    network = Strided().to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 6, 5).to(memory_format=torch.channels_last)
    compiled = Compiled(network, recomputes=True)
    for given, expected in zip(gradients(network, compiled, x), gradients(network, network, x), strict=True):
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)
    assert len([*compiled.graphs[1].graph.find_nodes(op="call_function", target=aten.as_strided.default)]) > 0


def test_gradients_that_read_one_channel_are_given_what_they_would_be() -> None:
    """It lies in both orders: Inductor copies the gradient of the output to one of its own, whatever it is given in."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), FirstNorm()).to(memory_format=torch.channels_last)
    compiled = Compiled(network)
    gradients(network, compiled, torch.randn(2, 1, 6, 5))
    assert [image.meta["val"].is_contiguous() for image in backward_reads(compiled.graphs[1])] == [True, True]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Inductor's own making
@pytest.mark.usefixtures("cpu_handle")
def test_operators_that_inductor_met_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused network that was compiled without the pass, by Inductor as it was before."""
    for overload in OPERATORS.values():
        monkeypatch.delitem(lowering.lowerings, overload, raising=False)
        monkeypatch.delitem(lowering._maybe_layout_constraints, overload, raising=False)
    memory_formats.constrain_layouts.cache_clear()
    model, x = (
        nn.Sequential(nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6), nn.SiLU()).eval(),
        torch.randn(2, 4, 7, 6),
    )
    with torch.no_grad(), fresh_cache():
        for options in ({}, {"backend": "miofind"}):
            torch._dynamo.reset()
            compiled = torch.compile(miofind.torch.fuse(model), dynamic=False, **options)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
