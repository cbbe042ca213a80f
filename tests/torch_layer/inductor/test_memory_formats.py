"""What convolutions of a graph are given: packed tensors, which neither they nor their operators copy."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from helpers.runs.fused_answers import answers_of
from torch import nn
from torch_layer.inductor.compiled_graphs import Compiled

import miofind.torch
from miofind import Handle
from miofind.torch import formats

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
