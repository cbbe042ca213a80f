"""Generated code of fused networks: what holds submodules is looked up once, and is what the network has."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from miofind.torch import FusedConvolution, fuse


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(2)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: Any) -> Any:
        return self.pool(self.norm(self.conv(x)).relu()) * self.scale


def network() -> nn.Module:
    return nn.Sequential(Scaled(), nn.Sequential(Scaled()), nn.Flatten(), nn.Linear(16, 3)).eval()


def copied_by_pickle(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


COPIES = [lambda module: module, copy.copy, copy.deepcopy, copied_by_pickle]


@pytest.mark.parametrize("copied", COPIES)
def test_a_submodule_or_parameter_that_takes_the_place_of_another_is_used(copied: Any) -> None:
    model, x = network(), torch.randn(2, 4, 8, 8)
    fused = copied(fuse(model))
    wanted = model(x).detach()
    torch.testing.assert_close(fused(x), wanted, rtol=1e-4, atol=1e-4)
    for each in (model, fused):
        holder = each.get_submodule("1.0")
        holder.pool, holder.scale = nn.AvgPool2d(2), nn.Parameter(torch.full((4, 1, 1), 2.0))
    assert not torch.allclose(model(x), wanted, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-4)


def test_a_holder_may_be_wrapped() -> None:
    """torch.compile of a part hands on what it is asked for."""
    model, x = network(), torch.randn(2, 4, 8, 8)
    fused = fuse(model)
    fused.add_module("1", torch.compile(fused.get_submodule("1"), backend="eager"))
    torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("copied", COPIES[:3])
def test_a_holder_is_looked_up_once(copied: Any) -> None:
    lines = [line.strip() for line in copied(fuse(network())).code.splitlines()]
    assert sum(line.endswith('= getattr(self, "0")') for line in lines) == 1
    assert any(line.startswith("_0_pool = holder_") for line in lines)


def test_steps_that_a_graph_gets_later_run() -> None:
    model, x = network(), torch.randn(2, 4, 8, 8)
    fused = fuse(model)
    last = next(node for node in fused.graph.nodes if node.op == "output")
    fused.get_submodule("1.0").add_module("bounded", nn.Tanh())
    with fused.graph.inserting_before(last):
        again = fused.graph.call_module("1.0.bounded", (last.args[0],))
    last.args = (again,)
    fused.recompile()
    assert isinstance(fused.get_submodule("0.conv"), FusedConvolution)
    torch.testing.assert_close(fused(x), model(x).tanh(), rtol=1e-4, atol=1e-4)


def test_variables_have_names_of_their_own() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Scaled()
            self.holder_1 = nn.ReLU()

        def forward(self, x: Any) -> Any:
            first = self.holder_1(x)
            return self.part(first) + self.holder_1(x).mean()

    model, x = Named().eval(), torch.randn(2, 4, 8, 8)
    fused = fuse(model)
    assert "holder_1_ = self.part" in fused.code
    torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-4)
