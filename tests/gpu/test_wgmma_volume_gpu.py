"""ConvImplicitGemmWgmmaVolume and ConvChannelsLastVolume on a GPU: both gates over every kind of tiling."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.problems.drawn_configs import WGMMA_TILINGS, drawn, drawn_wgmma, lacking_tilings
from helpers.problems.wgmma_forms import KINDS
from helpers.runs.gates import check_gates

from miofind.compiler import Compiler
from miofind.core.problem import Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver

pytest.importorskip("cupy")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

VOLUME, AROUND = (Registry.default().named(name) for name in ("ConvImplicitGemmWgmmaVolume", "ConvChannelsLastVolume"))
SHAPES: dict[str, dict[str, Any]] = {
    "more_tiles_than_blocks": {"x": (4, 64, 8, 28, 28), "w": (64, 64, 3, 3, 3), "padding": 1},
    "few_pixels": {"x": (1, 256, 2, 7, 7), "w": (256, 256, 3, 3, 3), "padding": 1},
    "odd": {"x": (3, 24, 5, 11, 9), "w": (40, 24, 2, 3, 2), "padding": ((1, 2), (0, 1), (2, 0))},
    "stride": {"x": (2, 40, 9, 17, 16), "w": (32, 40, 3, 3, 3), "padding": 1, "stride": 2},
    "stride_and_dilation": {
        "x": (2, 16, 11, 13, 12),
        "w": (24, 16, 2, 3, 3),
        "stride": (3, 1, 2),
        "dilation": (2, 3, 1),
        "padding": 3,
    },
    "planes": {"x": (2, 72, 6, 19, 18), "w": (96, 72, 1, 3, 3), "padding": (0, 1, 1)},
    "frames": {"x": (2, 72, 16, 10, 9), "w": (96, 72, 5, 1, 1), "padding": (2, 0, 0)},
    "patches": {"x": (2, 16, 8, 16, 16), "w": (64, 16, 2, 4, 4), "stride": (2, 4, 4)},
    "points": {"x": (2, 264, 4, 9, 7), "w": (136, 264, 1, 1, 1)},
    "strided_points": {"x": (2, 72, 5, 9, 7), "w": (136, 72, 1, 1, 1), "stride": 2},
    "padding_beyond_the_filter": {"x": (1, 16, 4, 6, 7), "w": (24, 16, 2, 2, 2), "padding": 5},
    "one_plane": {"x": (2, 64, 1, 14, 14), "w": (64, 64, 3, 3, 3), "padding": 1},
    "groups": {"x": (2, 128, 4, 9, 9), "w": (192, 64, 3, 3, 3), "padding": 1, "groups": 2},
}
STRIDED: dict[str, Any] = {
    "x": (2, 264, 9, 25, 24),
    "w": (520, 264, 3, 2, 3),
    "padding": ((1, 0), (1, 1), (0, 2)),
    "stride": 2,
}
EVERY_TILING: dict[str, Any] = {"x": (2, 264, 5, 13, 12), "w": (136, 264, 2, 2, 3), "padding": ((1, 0), (1, 1), (0, 2))}


@pytest.mark.parametrize(
    ("solver", "problem"),
    [(solver, problem) for solver in (VOLUME, AROUND) for problem in solver.examples()],
    ids=lambda value: value.id if isinstance(value, Solver) else str(value),
)
def test_examples_pass_both_gates(
    solver: Solver, problem: ProblemDescription, device: Device, compiler: Compiler
) -> None:
    answer = solver.applicability(problem, device)
    assert answer, answer.reason
    check_gates(solver, problem, device, compiler, list(solver.default_configs(problem, device)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("shape", SHAPES)
def test_volumes_pass_both_gates(
    shape: str, direction: Direction, kind: str, device: Device, compiler: Compiler
) -> None:
    problem = ProblemDescription.convolution(**SHAPES[shape], **KINDS[kind], layout=Layout.NDHWC, direction=direction)
    answer = VOLUME.applicability(problem, device)
    if not answer:
        pytest.skip(answer.reason)
    others = drawn_wgmma(VOLUME, problem, device, 2, 0)
    check_gates(VOLUME, problem, device, compiler, [*VOLUME.default_configs(problem, device)[:2], *others])


@pytest.mark.parametrize("kind", ["float16", "tf32"])
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("shape", ["odd", "stride", "frames", "groups", "strided_points", "few_pixels"])
def test_channels_first_volumes_pass_both_gates(
    shape: str, direction: Direction, kind: str, device: Device, compiler: Compiler
) -> None:
    problem = ProblemDescription.convolution(**SHAPES[shape], **KINDS[kind], direction=direction)
    answer = AROUND.applicability(problem, device)
    if not answer:
        pytest.skip(answer.reason)
    check_gates(AROUND, problem, device, compiler, list(AROUND.default_configs(problem, device)[:3]))


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("held", WGMMA_TILINGS)
def test_every_kind_of_tiling_passes_both_gates(
    held: str, direction: Direction, device: Device, compiler: Compiler
) -> None:
    problem = ProblemDescription.convolution(**EVERY_TILING, dtype="float16", layout=Layout.NDHWC, direction=direction)
    configs = drawn(VOLUME, problem, device, 2, WGMMA_TILINGS[held])
    if direction is Direction.BACKWARD_WEIGHTS and held == "swapped":
        assert not configs
        return
    check_gates(VOLUME, problem, device, compiler, configs)


def test_every_kind_of_tiling_of_strided_backward_data_passes_both_gates(device: Device, compiler: Compiler) -> None:
    problem = ProblemDescription.convolution(
        **STRIDED, dtype="float16", layout=Layout.NDHWC, direction=Direction.BACKWARD_DATA
    )
    found = {name: drawn(VOLUME, problem, device, 2, held) for name, held in WGMMA_TILINGS.items()}
    assert {name for name, configs in found.items() if not configs} == lacking_tilings(problem)
    check_gates(VOLUME, problem, device, compiler, [config for configs in found.values() for config in configs])
