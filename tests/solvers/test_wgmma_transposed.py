"""ConvImplicitGemmWgmmaTurned without a GPU: its launches in NumPy, what it needs, what it refuses."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.in_numpy.wgmma_transposed import Launch
from helpers.problems.struct_fields import named_args

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.reference.convolution import reference_on_host
from miofind.solver.registry import Registry
from miofind.solver.steps import Config, KernelStep, Scalar, TensorMap
from miofind.solvers.common.wgmma_product import WgmmaProduct
from miofind.solvers.implicit_gemm.wgmma_transposed_tiling import TransposedTiling

H200 = replace(Device.virtual("90a"), clock_hz=1.98e9, bandwidth_bytes_per_s=4.8e12)
SMALL = replace(H200, sm_count=3)
SOLVER = Registry.default()["ConvImplicitGemmWgmmaTurned"]


def weights(**fields: Any) -> ProblemDescription:
    given = {"dtype": "float32", "math": "tf32", "layout": "NHWC", "direction": "backward_weights"}
    return ProblemDescription.convolution(**{**given, **fields})


SHAPES: dict[str, ProblemDescription] = {
    "3x3": weights(x=(2, 36, 7, 9), w=(72, 36, 3, 3), padding=1),
    "strides": weights(x=(2, 12, 9, 11), w=(20, 12, 3, 2), padding=((0, 2), (1, 0)), stride=(2, 3)),
    "dilation": weights(x=(3, 8, 8, 7), w=(36, 8, 2, 3), padding=4, dilation=(1, 2)),
    "pointwise": weights(x=(3, 100, 5, 7), w=(132, 100, 1, 1)),
    "one tap, strided": weights(x=(3, 40, 9, 7), w=(16, 40, 1, 1), stride=2),
    "groups": weights(x=(2, 40, 6, 7), w=(24, 20, 3, 1), padding=(1, 0), groups=2),
    "pointwise groups": weights(x=(2, 72, 6, 7), w=(120, 24, 1, 1), groups=3),
    "1d": weights(x=(2, 8, 50), w=(12, 8, 5), padding=2, layout="NWC"),
}
each_shape = pytest.mark.parametrize("problem", SHAPES.values(), ids=SHAPES)


def scalars_of(step: KernelStep) -> list[int | float]:
    return [arg.value for arg in step.args if isinstance(arg, Scalar)]


def drawn(problem: ProblemDescription, device: Device, count: int) -> list[Config]:
    every = list(SOLVER.configs(problem, device))
    chosen = random.Random(problem.network_config).sample(every, min(count, len(every)))
    return list(dict.fromkeys([*SOLVER.default_configs(problem, device)[:2], *chosen]))


def computed(problem: ProblemDescription, config: Config, device: Device, inputs: dict[str, Any]) -> Any:
    memory = {name: np.ascontiguousarray(np.moveaxis(tensor, 1, -1)).ravel() for name, tensor in inputs.items()}
    step, *rest = SOLVER.solution(problem, device, config).kernels
    partials = Launch(step, named_args(step), memory).run().reshape(-1, problem.w.size)
    assert len(rest) == (len(partials) > 1)
    k, c, *taps = problem.w.shape
    return np.moveaxis(partials.sum(axis=0).reshape(k, *taps, c), -1, 1)


@pytest.mark.sampled(2)
@each_shape
def test_launches_compute_the_convolution(problem: ProblemDescription) -> None:
    generator = np.random.default_rng(5)
    inputs = {name: generator.integers(-3, 4, problem.tensor(name).shape).astype(np.float64) for name in "xy"}
    expected = reference_on_host(problem, **inputs)
    for device in (H200, SMALL):
        for config in drawn(problem, device, 4):
            np.testing.assert_array_equal(computed(problem, config, device, inputs), expected, err_msg=config.json)


@each_shape
def test_shared_memory_and_registers_suffice(problem: ProblemDescription) -> None:
    for config in SOLVER.configs(problem, H200):
        [step, *_] = SOLVER.solution(problem, H200, config).kernels
        defines = {name: int(value) for name, value in step.defines if not name.endswith("_FIELDS")}
        blocks, threads = defines["BLOCKS"], step.block[0]
        stage_bytes = 4 * 32 * (64 * defines["CONSUMERS"] * defines["ROWS"] + defines["TILE_N"])
        assert step.shared_bytes >= 1024 + defines["STAGES"] * stage_bytes
        assert blocks * (step.shared_bytes + 32 * defines["STAGES"] + 1024) <= 228 << 10
        assert step.shared_bytes + 32 * defines["STAGES"] <= H200.shared_bytes
        assert threads == 128 * (defines["CONSUMERS"] + 1)
        given = 65536 // (threads * blocks) // 8 * 8
        most = (given * (defines["CONSUMERS"] + 1) - 64) // defines["CONSUMERS"] // 8 * 8
        pitch = 64 * defines["CONSUMERS"] * defines["ROWS"] + 4
        assert defines["CLUSTER_K"] == 1 or 4 * defines["TILE_N"] * pitch <= defines["STAGES"] * stage_bytes
        assert given >= 248 or given < most <= 256
        assert defines["ROWS"] * defines["TILE_N"] // 2 < min(most, 255)


@pytest.mark.parametrize("rows", [1, 2])
def test_lanes_that_write_partials_at_once_meet_all_banks(rows: int) -> None:
    for lanes in np.arange(32).reshape(-1, 32 // (2 * rows)):
        first = 2 * (lanes % 4) * (128 * rows + 4) + 2 * rows * (lanes // 4)
        words = [word + i for word in first for i in range(2 * rows)]
        assert sorted(word % 32 for word in words) == list(range(32))


@each_shape
def test_maps_are_of_32_pixels_and_round_to_tf32(problem: ProblemDescription) -> None:
    step = SOLVER.solution(problem, H200, SOLVER.default_configs(problem, H200)[0]).kernels[0]
    maps = [arg for arg in step.args if isinstance(arg, TensorMap)]
    assert [one.pointer.buffer for one in maps] == ["x", "y"]
    for one in maps:
        assert one.element == "tfloat32"
        assert one.swizzle_bytes == 128
        assert all(stride % 16 == 0 for stride in one.strides_bytes)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"math": "ieee"}, "multiplies float32 as TF32"),
        ({"x": (2, 6, 9, 9), "w": (8, 6, 3, 3)}, "6 channels or 8 filters a group are no multiple of 4"),
        ({"groups": 4, "w": (8, 2, 3, 3)}, "2 channels or 2 filters"),
        ({"padding": 128, "w": (8, 8, 3, 3)}, "beyond the tensor"),
        ({"x": (2, 8, 300, 9), "w": (8, 8, 2, 1), "dilation": (256, 1), "padding": (100, 0)}, "beyond the tensor"),
        ({"stride": 9}, "stride"),
        ({"layout": {"x": "NHWC", "w": "NHWC", "y": "NCHW"}}, "one layout"),
        ({"x": (2, 1 << 20, 32, 32), "w": (4, 1 << 20, 1, 1)}, "counts elements"),
    ],
)
def test_refuses_with_a_reason(fields: dict[str, Any], words: str) -> None:
    problem = weights(**{"x": (2, 8, 9, 9), "w": (8, 8, 3, 3), **fields})
    assert words in SOLVER.is_applicable(problem, H200).reason


def test_default_configurations_fill_the_device() -> None:
    problem = weights(x=(16, 512, 28, 28), w=(512, 512, 3, 3), padding=1)
    product = WgmmaProduct.of(problem)
    for config in SOLVER.default_configs(problem, H200)[:3]:
        tiling = TransposedTiling.of(product, config)
        assert tiling.tile_m * tiling.tile_n >= 128 * 128
        assert tiling.work_tiles / (132 * -(-tiling.work_tiles // 132)) > 0.8


def test_partials_are_kept_within_the_workspace() -> None:
    problem = SHAPES["3x3"]
    for config in SOLVER.configs(problem, H200):
        solution = SOLVER.solution(problem, H200, config)
        splits = config["splits"]
        assert solution.workspace.bytes == (4 * splits * problem.w.size if splits > 1 else 0)
        named = named_args(solution.kernels[0])
        all_splits = splits * config["shares"]
        assert 2 * all_splits <= named["k_tiles"] or all_splits == 1
        if splits > 1:
            lanes = TransposedTiling.of(WgmmaProduct.of(problem), config).lanes(H200)
            assert scalars_of(solution.kernels[1]) == [problem.w.size, splits, lanes]


@pytest.mark.parametrize(
    ("filters", "splits", "lanes"), [(8, 7, 1), (8, 8, 2), (8, 44, 8), (8, 128, 32), (4096, 32, 1)]
)
def test_few_elements_are_added_by_several_threads(filters: int, splits: int, lanes: int) -> None:
    """256 threads a block, of whom as many as `lanes` add partials of the same four elements; none is left out."""
    problem = weights(x=(32, 512, 28, 28), w=(filters, 512, 1, 1))
    config = Config.of(consumers=1, rows=1, tile_n=32, splits=splits, shares=1, blocks=1)
    assert TransposedTiling.of(WgmmaProduct.of(problem), config).lanes(H200) == lanes
    add = SOLVER.solution(problem, H200, config).kernels[1]
    assert add.grid[0] * (256 // lanes) >= problem.w.size / 4 > (add.grid[0] - 1) * (256 // lanes)
