"""What products of matrices by the library are thought to take."""

from __future__ import annotations

import pytest

from miofind.core.problem import DataType, MathMode, ProblemDescription
from miofind.device.device import Device
from miofind.libraries.gemm import BatchedGemm, GemmOperand, product_ms
from miofind.libraries.matmul_choice import WORKSPACE_BYTES
from miofind.solver.registry import Registry
from miofind.solver.steps import Config

DEVICE = Device.virtual("90a")
ROWS, COLUMNS, DEPTH = 64, 128, 100_000  # one tile, whose sums are far deeper than a split is


def product(batch: int, dtype: DataType) -> BatchedGemm:
    def operand(width: int) -> GemmOperand:
        return GemmOperand(buffer="x", dtype=dtype, ld=width, image_stride=DEPTH * width)

    return BatchedGemm(
        rows=ROWS,
        columns=COLUMNS,
        depth=DEPTH,
        left=operand(DEPTH),
        right=operand(COLUMNS),
        out=operand(COLUMNS),
        images=batch,
        math=MathMode.IEEE,
    )


def ms_of_tiles(tiles: int, dtype: DataType) -> float:
    """The least that so many tiles of a product take, each on one multiprocessor."""
    peak = DEVICE.peak_flops_per_s(dtype, tensor_cores=dtype.itemsize == 2) / DEVICE.sm_count
    return 1e3 * 2 * ROWS * COLUMNS * DEPTH * -(-tiles // DEVICE.sm_count) / peak


@pytest.mark.parametrize(
    ("batch", "dtype", "is_split"),
    [
        (1, DataType.FLOAT32, True),
        (2, DataType.FLOAT32, False),
        (32, DataType.FLOAT32, False),
        (1, DataType.FLOAT16, True),
        (4, DataType.FLOAT16, True),
        (5, DataType.FLOAT16, False),
    ],
)
def test_products_of_a_batch_are_not_thought_to_be_split(batch: int, dtype: DataType, is_split: bool) -> None:
    """The few tiles of a batch were estimated as if splits of their depth kept all multiprocessors busy."""
    gemm = product(batch, dtype)
    split_ms, whole_ms = (product_ms(gemm, DEVICE, splits=splits) for splits in (True, False))
    assert whole_ms >= ms_of_tiles(batch, dtype)
    assert (split_ms < whole_ms) == is_split
    assert is_split or split_ms == whole_ms


def test_an_image_a_product_takes_what_its_tile_takes() -> None:
    """Backward weights of large channels-first images: two images were thought to fill a GPU with one tile each."""
    problem = ProblemDescription.convolution(x=(8, 24, 512, 224), w=(128, 24, 1, 1), direction="backward_weights")
    config = Config.of(slots=2, algorithm={}, workspace_bytes=WORKSPACE_BYTES)
    peak = DEVICE.peak_flops_per_s(DataType.FLOAT32, tensor_cores=False) * config["slots"] / DEVICE.sm_count
    estimate_ms = Registry.default()["ConvGemm1x1"].estimate_ms(problem, DEVICE, config)
    assert estimate_ms >= 1e3 * problem.flops / (2 * peak)  # tiles of 64 x 64: two an image
