"""The passes that sum channels up: what they cost, how the tensor is cut, and their forms compiled."""

from __future__ import annotations

import math

import pytest

from miofind.compiler import BinaryCache, Compiler
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.solver.steps import KernelStep, Scalar
from miofind.solvers.pointwise.channel_sums import channel_sums_ms, channel_sums_regions, channel_sums_steps
from miofind.verify.channel_sums import SumStandard

pytestmark = pytest.mark.sampled(3)

DEVICE = Device.virtual("90a")
SIZES = (
    (2, 64, 4, 5),
    (3, 63, 7, 1),
    (5, 1, 3, 3),
    (1, 4104, 3, 1),
    (70, 40, 28, 29),
    (32, 2048, 7, 7),
    (64, 64, 56, 56),
    (800, 256, 26, 26),
    (128, 2048, 56, 56),
)


def summing(
    size: tuple[int, ...], layout: str = "NHWC", dtype: str = "float16", epilogue: str = "statistics"
) -> ProblemDescription:
    n, k, *spatial = size
    shapes = {"x": (n, 1, *spatial), "w": (k, 1, 1, 1)}
    direction = "backward_weights" if "gradient" in epilogue else "forward"
    return ProblemDescription.convolution(**shapes, dtype=dtype, layout=layout, epilogue=epilogue, direction=direction)


def steps_of(problem: ProblemDescription) -> tuple[KernelStep, KernelStep]:
    first, second = channel_sums_steps(problem, DEVICE)
    assert isinstance(first, KernelStep)
    assert isinstance(second, KernelStep)
    return first, second


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_blocks_cover_the_tensor_once_and_partials_fit(size: tuple[int, ...], layout: str, dtype: str) -> None:
    problem = summing(size, layout, dtype)
    sums, finish = steps_of(problem)
    numbers = [int(arg.value) for arg in sums.args if isinstance(arg, Scalar)]
    n, k, *spatial = size
    vector, plane = 16 // problem.y.dtype.itemsize, math.prod(spatial)
    assert numbers[0] == problem.y.size
    if dict(sums.defines)["CHANNELS_LAST"]:
        _, rows, rows_of_part, columns, lanes, strips, _ = numbers
        parts = sums.grid[0] // strips
        assert columns * vector % k == 0
        assert (rows - 1) * columns * vector < problem.y.size <= rows * columns * vector
        assert (strips - 1) * lanes < columns <= strips * lanes
        assert (parts - 1) * rows_of_part < rows <= parts * rows_of_part
        side = sums.block[0] // lanes
        assert side & (side - 1) == 0, "halves are added to halves"
        partials = parts * columns * vector // k
    else:
        _, size_of_plane, vectors, of_part, of_channel, channels, _ = numbers
        parts = sums.grid[0] // k
        assert (size_of_plane, channels, of_channel) == (plane, k, n * vectors)
        assert vectors * vector >= plane + (vector - 1 if plane % vector else 0), "planes begin anywhere"
        assert (parts - 1) * of_part < of_channel <= parts * of_part
        partials = parts
    assert [int(arg.value) for arg in finish.args if isinstance(arg, Scalar)] == [k, partials]
    assert finish.grid == (-(-k // 32), 2, 1)
    (region,) = channel_sums_regions(problem, DEVICE)
    assert region.bytes == 2 * partials * k * problem.accumulator.itemsize


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_no_thread_adds_long_rows(size: tuple[int, ...], layout: str) -> None:
    """Errors of one sign: half a unit for each number of a row, which the standard of the sums must leave room for."""
    problem = summing(size, layout, "float32")
    sums, finish = steps_of(problem)
    numbers = [int(arg.value) for arg in sums.args if isinstance(arg, Scalar)]
    last = bool(dict(sums.defines)["CHANNELS_LAST"])
    a_part, side = (numbers[2], sums.block[0] // numbers[4]) if last else (numbers[3], 256)
    (_, partials) = (int(arg.value) for arg in finish.args if isinstance(arg, Scalar))
    added = a_part / side + partials / 32
    standard = SumStandard.of(problem, problem.second_outputs[0])
    assert added / 2 <= standard.roundings * 2.0**standard.digits


def test_partials_are_few_beside_the_tensor() -> None:
    for size in ((64, 64, 56, 56), (32, 2048, 7, 7), (32, 512, 14, 14), (64, 256, 56, 56)):
        for layout in ("NCHW", "NHWC"):
            problem = summing(size, layout)
            (region,) = channel_sums_regions(problem, DEVICE)
            assert region.bytes <= problem.y.bytes / 4


def test_what_was_written_last_is_read_first() -> None:
    after_a_convolution, after_a_pass = (steps_of(summing((2, 64, 4, 5), epilogue=each))[0] for each in (
        "statistics", "relu.statistics"
    ))  # fmt: skip
    assert after_a_convolution.args[-1] == Scalar(ctype="int32", value=1)
    assert after_a_pass.args[-1] == Scalar(ctype="int32", value=0)


def test_without_second_outputs_there_is_nothing_to_do() -> None:
    problem = summing((2, 64, 4, 5), epilogue="relu")
    assert channel_sums_steps(problem, DEVICE) == ()
    assert channel_sums_regions(problem, DEVICE) == ()
    assert channel_sums_ms(problem, DEVICE) == 0


@pytest.fixture(scope="module")
def compiler(request: pytest.FixtureRequest) -> Compiler:
    pytest.importorskip("cuda.bindings.nvrtc")
    assert request.config.cache is not None
    return Compiler(BinaryCache(request.config.cache.mkdir("kernels"), max_bytes=1 << 31))


@pytest.mark.parametrize("epilogue", ["statistics", "bias_gradient"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_all_forms_compile_without_spilling(compiler: Compiler, layout: str, dtype: str, epilogue: str) -> None:
    for step in steps_of(summing((64, 64, 56, 56), layout, dtype, epilogue)):
        assert compiler.build(step, "90a").resources[step.entry].spill_bytes == 0
