"""The bias gradient in ConvImplicitGemmWgmma: the steps and the workspace, and who refuses it."""

from __future__ import annotations

from typing import Any

from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Device
from miofind.solver.registry import Registry
from miofind.solver.steps import Config, Pointer, int32s

DEVICE = Device.virtual("90a")
WGMMA = Registry.default()["ConvImplicitGemmWgmma"]
NHWC = {"dtype": "float16", "layout": "NHWC"}
BASE = {"blocks": 1, "consumers": 1, "depth_bytes": 128, "rows": 1, "stages": 3, "swapped": 0, "tile_n": 64}


def problem(epilogue: str = "bias_gradient", **fields: Any) -> ProblemDescription:
    given: dict[str, Any] = {"x": (5, 64, 9, 9), "w": (72, 64, 3, 3), "padding": 1, **NHWC, **fields}
    return ProblemDescription.convolution(**given, direction=Direction.BACKWARD_WEIGHTS, epilogue=epilogue)


def test_without_split_k_the_product_writes_the_results() -> None:
    own = problem()
    for cluster in ("1x1x1", "1x2x1", "1x1x2"):
        config = Config({**BASE, "splits": 1, "cluster": cluster})
        WGMMA.check_config(own, DEVICE, config)
        solution = WGMMA.solution(own, DEVICE, config)
        (step,) = solution.kernels
        assert Pointer(buffer="bias_gradient") in step.args
        assert solution.workspace.bytes == 0
        assert ("EPILOGUE_BIAS_GRADIENT", 1) in step.defines
        bare = WGMMA.solution(own.bare, DEVICE, config).kernels[0]
        assert (bare.grid, bare.block, bare.shared_bytes) == (step.grid, step.block, step.shared_bytes)


def test_with_split_k_further_blocks_of_the_reduction_add_the_partials() -> None:
    own, config = problem("float32.bias_gradient"), Config({**BASE, "splits": 2, "cluster": "1x1x1"})
    solution = WGMMA.solution(own, DEVICE, config)
    first, reduction = solution.kernels
    bare, bare_reduction = WGMMA.solution(own.bare, DEVICE, config).kernels
    regions = {region.name: region.bytes for region in solution.workspace.regions}
    assert regions["partial bias gradient"] == 4 * 2 * 72
    assert Pointer(buffer="partial bias gradient") in first.args
    assert Pointer(buffer="bias_gradient") not in first.args
    assert reduction.grid[0] == bare_reduction.grid[0] + 3, "32 filters a block"
    assert reduction.args[-2:] == (Pointer(buffer="bias_gradient"), *int32s(72))
    assert first.grid == bare.grid


def test_sixteen_bits_are_summed_and_tf32_is_left_to_the_composed_form() -> None:
    assert WGMMA.applicability(problem(), DEVICE)
    tf32 = problem(x=(2, 72, 12, 14), w=(64, 72, 1, 1), padding=0, dtype="float32", math="tf32", layout="NCHW")
    assert WGMMA.applicability(tf32.bare, DEVICE)
    assert "sums up 16-bit gradients alone" in WGMMA.applicability(tf32, DEVICE).reason
