"""What cuDNN is told of a problem; its graphs need the library and a GPU."""

from __future__ import annotations

import pytest

from miofind.core.problem import ProblemDescription
from miofind.libraries.cudnn_graph import described


@pytest.mark.parametrize("direction", ["forward", "backward_data", "backward_weights"])
def test_tensors_of_one_pixel_are_told_channels_last(direction: str) -> None:
    problem = ProblemDescription.convolution(x=(32, 48, 1, 1), w=(8, 48, 1, 1), dtype="float16", direction=direction)
    told = described(problem)
    assert told.x.strides == (48, 1, 48, 48)
    assert told.w.strides == (48, 1, 48, 48)
    assert told.y.strides == (8, 1, 8, 8)
    assert [each.name for each in told.operands] == [each.name for each in problem.operands]
    assert [each.tensor.bytes for each in told.operands] == [each.tensor.bytes for each in problem.operands]


def test_what_is_fused_is_told_so_too() -> None:
    problem = ProblemDescription.convolution(
        x=(2, 48, 1), w=(8, 48, 1), dtype="float16", epilogue="bias.residual.relu"
    ).lifted(2)
    told = {operand.name: operand.tensor.strides for operand in described(problem).operands}
    assert told["residual"] == told["y"] == (8, 1, 8, 8)


@pytest.mark.parametrize(
    ("x", "w", "padding"),
    [((2, 8, 1, 2), (4, 8, 1, 1), 0), ((2, 8, 3, 3), (4, 8, 3, 3), 0), ((2, 8, 1, 1), (4, 8, 3, 3), 1)],
)
def test_others_are_told_as_they_are(x: tuple[int, ...], w: tuple[int, ...], padding: int) -> None:
    problem = ProblemDescription.convolution(x=x, w=w, padding=padding, dtype="float16")
    assert described(problem) is problem
