"""Generated code of fused networks: submodules are found in dictionaries, and are those that the network has."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from miofind.torch import FusedConvolution, fuse


def network() -> nn.Module:
    blocks = [
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2)) for _ in range(2)
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(16, 3)).eval()


def copied_by_pickle(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("copied", [lambda module: module, copy.copy, copy.deepcopy, copied_by_pickle])
def test_a_submodule_that_takes_the_place_of_another_runs(copied: Any) -> None:
    model, x = network(), torch.randn(2, 4, 8, 8)
    fused = copied(fuse(model))
    wanted = model(x).detach()
    torch.testing.assert_close(fused(x), wanted, rtol=1e-4, atol=1e-4)
    fused.get_submodule("1")._modules["3"] = nn.AvgPool2d(2)
    model[1][3] = nn.AvgPool2d(2)
    assert not torch.allclose(model(x), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-4)


def test_no_step_asks_the_network_for_a_submodule(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, asked = fuse(network()), list[str]()
    real = nn.Module.__getattr__

    def noted(self: Any, name: str) -> Any:
        asked.append(name)
        return real(self, name)

    monkeypatch.setattr(nn.Module, "__getattr__", noted)
    with torch.no_grad():
        fused(torch.randn(2, 4, 8, 8))
    assert not {"0", "1", "2", "3"}.intersection(asked)


def test_steps_that_a_graph_gets_later_are_generated_as_by_torch_fx() -> None:
    model, x = network(), torch.randn(2, 4, 8, 8)
    fused = fuse(model)
    last = next(node for node in fused.graph.nodes if node.op == "output")
    with fused.graph.inserting_before(last):
        again = fused.graph.call_module("2", (last.args[0],))
    last.args = (again,)
    fused.recompile()
    assert isinstance(fused.get_submodule("0.0"), FusedConvolution)
    torch.testing.assert_close(fused(x), model(x), rtol=1e-4, atol=1e-4)
