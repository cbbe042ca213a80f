"""Depthwise convolution by Toeplitz matrices on a GPU: the host's reference, within guard bands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.problems.drawn_configs import spread
from helpers.runs.device_buffers import Buffer, download, integers, upload
from helpers.runs.gates import check_gates

from miofind.compiler import Compiler
from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.launch.invoker import make_invoker
from miofind.reference.convolution import numpy_dtype, reference_on_host
from miofind.solver.registry import Registry

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

SOLVER = Registry.default()["ConvDepthwiseBands"]
DIRECTIONS = (Direction.FORWARD, Direction.BACKWARD_DATA)
SHAPES: dict[str, dict[str, Any]] = {
    "7x7": {"x": (33, 40, 7, 7), "w": (40, 1, 5, 5), "padding": 2, "groups": 40},
    "7x7 wide filter": {"x": (5, 24, 7, 7), "w": (24, 1, 7, 7), "padding": 3, "groups": 24},
    "14x14": {"x": (17, 36, 14, 14), "w": (36, 1, 7, 7), "padding": 3, "groups": 36},
    "28x28": {"x": (9, 12, 28, 28), "w": (12, 1, 5, 5), "padding": 2, "groups": 12},
    "56x56": {"x": (8, 6, 56, 56), "w": (6, 1, 7, 7), "padding": 3, "groups": 6},
    "odd and even": {"x": (3, 4, 15, 17), "w": (4, 1, 4, 6), "padding": (1, 2), "groups": 4},
    "uneven padding": {"x": (3, 6, 33, 44), "w": (6, 1, 3, 5), "padding": ((2, 4), (9, 0)), "groups": 6},
    "1d": {"x": (6, 6, 200), "w": (6, 1, 7), "padding": 3, "groups": 6},
}


def make(shape: str, **fields: Any) -> ProblemDescription:
    layout = Layout.of(len(SHAPES[shape]["x"]) - 2, channels_last=False)
    return ProblemDescription.convolution(**SHAPES[shape], layout=layout, **fields)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", [DataType.FLOAT16, DataType.BFLOAT16])
@pytest.mark.parametrize("shape", SHAPES)
def test_small_integers_are_exact(
    shape: str, dtype: DataType, direction: Direction, device: Device, compiler: Compiler
) -> None:
    problem = make(shape, dtype=dtype, direction=direction)
    assert SOLVER.applicability(problem, device)
    inputs = integers(problem, seed=3)
    expected = reference_on_host(problem, **inputs).astype(numpy_dtype(problem.output.dtype)).astype(np.float64)
    for config in spread(SOLVER, problem, device, 6, defaults=3):
        invoker = make_invoker(problem, device, SOLVER, config, compiler)
        buffers, workspace = upload(problem, inputs), Buffer(invoker.workspace_bytes)
        tensors = [buffer.address for buffer in buffers.values()]
        invoker.run((*tensors, workspace.address), cupy.cuda.get_current_stream().ptr)
        np.testing.assert_array_equal(download(problem, buffers), expected, err_msg=config.json)
        workspace.read(np.dtype(np.uint8))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("shape", ["7x7", "28x28"])
def test_sums_of_normal_numbers_keep_their_bound(
    shape: str, direction: Direction, device: Device, compiler: Compiler
) -> None:
    problem = make(shape, dtype=DataType.FLOAT16, direction=direction)
    check_gates(SOLVER, problem, device, compiler, spread(SOLVER, problem, device, 2, defaults=3), seed=7)
