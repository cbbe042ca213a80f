"""What cuDNN is told of a problem; its graphs need the library and a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from miofind.core.problem import ProblemDescription
from miofind.libraries import cudnn_graph
from miofind.libraries.cudnn_graph import ConvGraph, told_channels_last


def fused(**fields: Any) -> ProblemDescription:
    return ProblemDescription.convolution(**{"dtype": "float16", "epilogue": "bias.residual.relu"} | fields)


def test_fused_tensors_of_one_pixel_are_told_channels_last() -> None:
    problem = fused(x=(32, 48, 1, 1), w=(8, 48, 1, 1))
    told = {operand.name: operand.tensor for operand in told_channels_last(problem).operands}
    assert told["x"].strides == told["w"].strides == (48, 1, 48, 48)
    assert told["y"].strides == told["residual"].strides == (8, 1, 8, 8)
    assert list(told) == [operand.name for operand in problem.operands]
    assert [tensor.bytes for tensor in told.values()] == [operand.tensor.bytes for operand in problem.operands]


def test_signals_of_one_element_are_told_so_too() -> None:
    told = told_channels_last(fused(x=(2, 48, 1), w=(8, 48, 1)).lifted(2))
    assert told.y.strides == (8, 1, 8, 8)


@pytest.mark.parametrize(
    "fields",
    [
        {"x": (2, 8, 1, 2), "w": (4, 8, 1, 1)},
        {"x": (2, 8, 3, 3), "w": (4, 8, 3, 3)},
        {"x": (2, 8, 1, 1), "w": (4, 8, 3, 3), "padding": 1},
        {"x": (2, 8, 1, 1), "w": (4, 8, 1, 1), "epilogue": None},
        {"x": (2, 8, 1, 1), "w": (4, 8, 1, 1), "epilogue": None, "direction": "backward_weights"},
    ],
)
def test_others_are_told_as_they_are(fields: dict[str, Any]) -> None:
    problem = fused(**fields)
    assert told_channels_last(problem) is problem


def test_a_graph_is_of_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def operations(problem: ProblemDescription, parameters: Any) -> Any:
        seen.append(problem.y.strides)
        return SimpleNamespace(operations=(), factors={})

    monkeypatch.setattr(cudnn_graph, "_operations", operations)
    monkeypatch.setattr(cudnn_graph, "Descriptor", MagicMock())
    graph = ConvGraph(fused(x=(32, 48, 1, 1), w=(8, 48, 1, 1)), MagicMock())
    assert seen == [(8, 1, 8, 8)]
    assert graph.problem.y.strides == (8, 1, 1, 1)
