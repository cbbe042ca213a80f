"""Tiles of ConvImplicitGemmHalo: all outputs have an atom, all slices a part, and atoms stay in their block."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.problems.drawn_configs import spread

from miofind.core.problem import Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.solver.occupancy import RESERVED_SHARED_BYTES, SmLimits
from miofind.solver.registry import Registry
from miofind.solver.steps import Config
from miofind.solver.structs import Struct
from miofind.solvers.implicit_gemm.wgmma_halo_tiling import HaloProduct, HaloTiling

DEVICE, SOLVER = Device.virtual("90a"), Registry.default().named("ConvImplicitGemmHalo")
ATOM = 64
SHAPES: dict[str, dict[str, Any]] = {
    "3d": {"x": (2, 32, 128, 128, 128), "w": (32, 32, 3, 3, 3), "padding": 1},
    "3d_odd": {"x": (3, 40, 7, 13, 29), "w": (72, 40, 2, 3, 4), "padding": (1, 1, 2)},
    "2d": {"x": (32, 64, 56, 56), "w": (64, 64, 3, 3), "padding": 1},
    "2d_one_image": {"x": (1, 64, 512, 512), "w": (64, 64, 3, 3), "padding": 1},
    "1d": {"x": (16, 32, 65536), "w": (32, 32, 11), "padding": 25, "dilation": 5},
}


def problem_of(shape: str, direction: Direction) -> ProblemDescription:
    layout = Layout.of(len(SHAPES[shape]["x"]) - 2, channels_last=True)
    return ProblemDescription.convolution(**SHAPES[shape], layout=layout, direction=direction, dtype="float16")


def first_pixel(tiling: HaloTiling, atom: int) -> int:
    """Where an atom begins in a slice, as atom_pixel of the kernel has it."""
    of_row = tiling.tile_w // ATOM
    return atom // of_row * tiling.row_pixels + atom % of_row * ATOM if tiling.tile_w % ATOM == 0 else ATOM * atom


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD_DATA])
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_cover_all_outputs(shape: str, direction: Direction) -> None:
    problem = problem_of(shape, direction)
    product = HaloProduct.of(problem)
    for config in spread(SOLVER, problem, DEVICE, 12):
        tiling = HaloTiling.of(product, config, DEVICE)
        atoms = range(tiling.consumers * tiling.atoms)
        met = {pixel for atom in atoms for pixel in range(first_pixel(tiling, atom), first_pixel(tiling, atom) + ATOM)}
        outputs = {row * tiling.row_pixels + column for row in range(tiling.tile_h) for column in range(tiling.tile_w)}
        assert outputs <= met, config
        rows, columns = tiling.tiles
        assert (rows - 1) * tiling.tile_h < product.height.outputs <= rows * tiling.tile_h, config
        assert (columns - 1) * tiling.tile_w < product.width.outputs <= columns * tiling.tile_w, config
        assert (tiling.parts - 1) * tiling.part_depth < product.depth.outputs <= tiling.parts * tiling.part_depth, (
            config
        )
        assert tiling.slices >= product.depth.taps, config


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD_DATA])
@pytest.mark.parametrize("shape", SHAPES)
def test_atoms_meet_shared_memory_of_their_block(shape: str, direction: Direction) -> None:
    problem = problem_of(shape, direction)
    product = HaloProduct.of(problem)
    height, width = ((axis.taps - 1) * axis.dilation for axis in (product.height, product.width))
    for config in spread(SOLVER, problem, DEVICE, 12):
        tiling = HaloTiling.of(product, config, DEVICE)
        last = first_pixel(tiling, tiling.consumers * tiling.atoms - 1) + ATOM + height * tiling.row_pixels + width
        begins = (tiling.slices - 1) * tiling.slice_bytes  # of the last slice
        assert begins + 2 * product.channels * last <= tiling.shared_bytes - 1024, config
        of_block = tiling.shared_bytes + tiling.static_bytes + RESERVED_SHARED_BYTES
        assert tiling.resident * of_block <= SmLimits.of(DEVICE).shared_bytes, config


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD_DATA])
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_of_a_launch_fit(shape: str, direction: Direction) -> None:
    """Of one image of two dimensions the distance to the next one once did not."""
    problem = problem_of(shape, direction)
    for config in SOLVER.default_configs(problem, DEVICE):
        (step,) = SOLVER.solution(problem, DEVICE, config).steps
        (shape_numbers,) = (each for each in step.args if isinstance(each, Struct))
        shape_numbers.in_memory()  # raises what does not fit


@pytest.mark.parametrize(
    ("fields", "config"),
    [
        (
            {"x": (32, 40, 130), "w": (32, 40, 5), "padding": 2, "layout": "NWC"},
            {"tile_h": 12, "tile_w": 128, "consumers": 2, "slices_ahead": 1, "keeps_filters": 0, "blocks": 1},
        ),
        (
            {"x": (1, 64, 5, 130, 112), "w": (120, 64, 2, 3, 4), "padding": (0, 2, 3), "layout": "NDHWC"},
            {"tile_h": 4, "tile_w": 32, "consumers": 1, "slices_ahead": 0, "keeps_filters": 0, "blocks": 2},
        ),
    ],
    ids=["one block", "two blocks"],
)
def test_mbarriers_count_in_what_a_multiprocessor_holds(fields: dict[str, Any], config: dict[str, int]) -> None:
    """Slices and filters alone take all the shared memory there is: the launch failed, or one block ran for two."""
    problem = ProblemDescription.convolution(**fields, dtype="float16")
    tiling = HaloTiling.of(HaloProduct.of(problem), Config(config), DEVICE)
    of_block = tiling.shared_bytes + RESERVED_SHARED_BYTES
    assert tiling.resident * of_block == SmLimits.of(DEVICE).shared_bytes
    assert not SOLVER.is_valid_config(problem, DEVICE, Config(config))
    assert SOLVER.default_configs(problem, DEVICE)
