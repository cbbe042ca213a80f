"""Images of few channels that are turned to channels last along one dimension."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.runs.fused_answers import answers_of
from torch import nn
from torch_layer.inductor.compiled_graphs import Compiled

import miofind.torch
from miofind import Handle
from miofind.torch.inductor import first_images

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

INTERLEAVED = torch.ops.miofind.interleaved.default


@pytest.fixture(autouse=True)
def small_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_images, "_LEAST_SIZE", 1 << 10)


@pytest.fixture
def served(cpu_handle: Handle, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Estimates answer, and 2-D convolutions run channels last."""
    from miofind.torch.inductor import graph_pass

    monkeypatch.setattr(graph_pass, "prefers_channels_last", lambda graph: True)
    with answers_of(cpu_handle):
        yield


def network(channels: int = 3) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3))


@pytest.mark.parametrize("channels", [2, 3, 8])
@pytest.mark.usefixtures("served")
def test_images_are_turned_for_the_first_convolution(channels: int) -> None:
    net, x = network(channels).bfloat16(), torch.randn(2, channels, 24, 26).bfloat16()
    compiled = Compiled(net)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), net(x), rtol=0.05, atol=0.05)
    assert compiled.count(INTERLEAVED) == 1


@pytest.mark.parametrize(
    ("channels", "dtype", "size", "is_last"),
    [
        (1, torch.bfloat16, 40, False),
        (9, torch.bfloat16, 24, False),
        (3, torch.float32, 24, False),
        (3, torch.bfloat16, 9, False),
        (3, torch.bfloat16, 24, True),
    ],
    ids=["one channel", "many channels", "float32", "small", "channels last"],
)
@pytest.mark.usefixtures("served")
def test_others_stay(channels: int, dtype: Any, size: int, is_last: bool) -> None:
    net, x = network(channels).to(dtype), torch.randn(2, channels, size, size).to(dtype)
    x = x.to(memory_format=torch.channels_last) if is_last else x
    compiled = Compiled(net)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), net(x), rtol=0.05, atol=0.05)
    assert not compiled.count(INTERLEAVED)


def test_what_stays_channels_first_reads_images_as_they_are(
    cpu_handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    from miofind.torch.inductor import graph_pass

    monkeypatch.setattr(graph_pass, "prefers_channels_last", lambda graph: False)
    net, x = network().bfloat16(), torch.randn(2, 3, 24, 26).bfloat16()
    with answers_of(cpu_handle, "fallback"), torch.no_grad():
        compiled = Compiled(net)
        compiled(x)
    assert not compiled.count(INTERLEAVED)


@pytest.mark.usefixtures("served")
def test_images_that_are_cast_are_kept_turned_for_the_backward_pass() -> None:
    net, x = network(), torch.randn(2, 3, 24, 26)
    compiled = Compiled(net)
    gradients = []
    for run in (compiled, net):
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            run(x).float().square().mean().backward()
        gradients.append([each.grad.clone() for each in net.parameters()])
    forward, _ = compiled.graphs
    (turned,) = (node for node in forward.graph.nodes if node.target is INTERLEAVED)
    (output,) = forward.graph.find_nodes(op="output")
    assert turned in output.args[0]
    assert turned.args[0] not in output.args[0]
    for given, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(given, wanted, rtol=0.05, atol=0.01)


@pytest.mark.usefixtures("served")
def test_long_chains_before_an_image_are_read_once() -> None:
    """Each step that read the last one twice doubled the time."""
    net = network().bfloat16()

    def run(x: Any) -> Any:
        for _ in range(40):
            x = x + 0.1 * torch.sigmoid(x)
        return net(x)

    x = torch.randn(2, 3, 24, 26).bfloat16()
    compiled = Compiled(run)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), run(x), rtol=0.05, atol=0.05)
    assert compiled.count(INTERLEAVED) == 1


@pytest.mark.usefixtures("served")
def test_what_a_user_is_given_stays_as_it_was() -> None:
    net = network().bfloat16()

    def both(x: Any) -> Any:
        halved = x * 0.5
        return net(halved), halved

    x = torch.randn(2, 3, 24, 26).bfloat16()
    compiled = Compiled(both)
    with torch.no_grad():
        (_, given), (_, wanted) = compiled(x), both(x)
    assert torch.equal(given, wanted)
    assert given.stride() == wanted.stride()
    assert compiled.count(INTERLEAVED) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor's code for the CPU is compiled by g++")
@pytest.mark.parametrize("shape", [(2, 3, 24, 26), (2, 3, 5, 14, 12), (2, 3, 200)], ids=str)
def test_inductor_copies_along_one_dimension(shape: tuple[int, ...]) -> None:
    from torch._inductor.utils import run_and_get_code

    assert first_images._is_lowered()
    torch._dynamo.reset()
    x = torch.randn(shape).half()
    turned, (code,) = run_and_get_code(torch.compile(lambda x: torch.ops.miofind.interleaved(x) + 0), x)
    order = (0, *range(2, x.dim()), 1)
    assert torch.equal(turned, x)
    assert turned.permute(order).is_contiguous()
    assert f"static_cast<int64_t>({x.numel()}L)" in code


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor's code for the CPU is compiled by g++")
@pytest.mark.usefixtures("served")
def test_compiled_networks_compute_the_same() -> None:
    net, x = network().bfloat16(), torch.randn(2, 3, 24, 26).bfloat16()
    torch._dynamo.reset()
    compiled = torch.compile(net, options=miofind.torch.inductor_options(fx_graph_cache=False))
    with torch.no_grad():
        given, wanted = compiled(x), net(x)
    torch.testing.assert_close(given, wanted, rtol=0.05, atol=0.05)
    assert given.stride() == wanted.stride()
