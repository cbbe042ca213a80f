"""Tensors transposed on a GPU, bit by bit, and chains of kernels with PDL: plainly, captured, over old results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.runs.device_buffers import POISON, Buffer
from helpers.runs.step_launcher import make_step_launcher

from miofind.compiler import Compiler
from miofind.core.problem import DataType, ProblemDescription
from miofind.device.device import Device
from miofind.launch.invoker import Invoker, make_invoker
from miofind.launch.pdl import supports_pdl
from miofind.solver.registry import Registry
from miofind.solver.steps import ConvSolution, Region, WorkspacePlan, dependent_launches
from miofind.solvers.implicit_gemm.transpose import Transposition, transpose_step

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

CHANNELS_LAST = Registry.default()["ConvChannelsLast"]
LENGTHS = (1, 3, 7, 8, 9, 25, 49, 64, 65, 196, 784)
BITS = {DataType.FLOAT16: np.uint16, DataType.FLOAT32: np.uint32}
COPIES = ProblemDescription.convolution(x=(8, 64, 56, 56), w=(64, 64, 1, 1), dtype="float16")
"""Chains below copy its x to its y, which are as large."""


@pytest.fixture(scope="module", autouse=True)
def hopper_or_newer(device: Device) -> None:
    """Whose kernels may be launched with PDL."""
    if device.sm < 90:
        pytest.skip(f"needs compute capability 9.0, {device.name} has {device.sm / 10:.1f}")


def transposition(name: str, rows: int, columns: int, dtype: DataType, batch: int = 3) -> Transposition:
    return Transposition(source=name, target=f"{name}_last", dtype=dtype, batch=batch, rows=rows, columns=columns)


def check(transpositions: tuple[Transposition, ...], device: Device, compiler: Compiler) -> None:
    """One launch transposes them, every bit, and writes nothing else."""
    generator, buffers, expected = np.random.default_rng(4), {}, {}
    for one in transpositions:
        bits = BITS[one.dtype]
        shape = (one.batch, one.rows, one.columns)
        values = generator.integers(0, np.iinfo(bits).max, shape, bits, endpoint=True)
        buffers[one.source], buffers[one.target] = Buffer(one.bytes), Buffer(one.bytes)
        buffers[one.source].write(values)
        expected[one.target] = values.transpose(0, 2, 1).ravel()
    step = transpose_step(transpositions)
    launch = make_step_launcher(step, compiler.load(step, device))
    launch({name: buffer.address for name, buffer in buffers.items()}, cupy.cuda.get_current_stream().ptr)
    for one in transpositions:
        np.testing.assert_array_equal(buffers[one.target].read(np.dtype(BITS[one.dtype])), expected[one.target])


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("rows", LENGTHS, ids="{} rows".format)
def test_every_bit_is_transposed(rows: int, dtype: DataType, device: Device, compiler: Compiler) -> None:
    for columns in LENGTHS:
        check((transposition("x", rows, columns, dtype),), device, compiler)


@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_two_tensors_are_transposed_at_once(dtype: DataType, device: Device, compiler: Compiler) -> None:
    for x, w in (((64, 49), (40, 9)), ((512, 784), (512, 9)), ((9, 24), (65, 65)), ((3, 7), (784, 64))):
        check((transposition("x", *x, dtype), transposition("w", *w, dtype, batch=5)), device, compiler)


@pytest.fixture
def chain(device: Device, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> Invoker:
    """x to y by way of two buffers, each written twice: all launches but the first use PDL."""
    there = Transposition.to_channels_last(COPIES, "x")

    def step(source: str, target: str, *, is_back: bool = False) -> Any:
        args = {"source": source, "target": target, "dtype": there.dtype, "batch": there.batch}
        rows, columns = (there.columns, there.rows) if is_back else (there.rows, there.columns)
        return transpose_step((Transposition(**args, rows=rows, columns=columns),))

    steps = (
        step("x", "a"),
        step("a", "b", is_back=True),
        step("b", "a"),
        step("a", "b", is_back=True),
        step("b", "a"),
        step("a", "y", is_back=True),
    )
    assert dependent_launches(steps) == (False, *[True] * 5)
    assert supports_pdl(device)
    plan = WorkspacePlan(tuple(Region(name=name, bytes=there.bytes) for name in "ab"))
    config = CHANNELS_LAST.default_configs(COPIES, device)[0]
    monkeypatch.setattr(type(CHANNELS_LAST), "solution", lambda *_: ConvSolution(steps=steps, workspace=plan))
    return make_invoker(COPIES, device, CHANNELS_LAST, config, compiler)


class Copies:
    """Two inputs, an output and a workspace of a chain."""

    def __init__(self, chain: Invoker) -> None:
        generator, size = np.random.default_rng(8), COPIES.x.bytes
        self.values = [generator.integers(0, 1 << 16, size // 2, np.uint16) for _ in range(2)]
        self.x, self.y, self.workspace = [Buffer(size), Buffer(size)], Buffer(size), Buffer(chain.workspace_bytes)
        for buffer, values in zip(self.x, self.values, strict=True):
            buffer.write(values)
        cupy.cuda.Device().synchronize()

    def bases(self, which: int) -> tuple[int, ...]:
        return (self.x[which].address, 0, self.y.address, self.workspace.address)

    def check(self, which: int) -> None:
        self.workspace.read(np.dtype(np.uint8))
        np.testing.assert_array_equal(self.y.read(np.dtype(np.uint16)), self.values[which])


def new_stream() -> Any:
    return cupy.cuda.Stream(non_blocking=True)


@pytest.mark.parametrize("stream", [lambda: cupy.cuda.Stream.null, lambda: cupy.cuda.Stream.ptds, new_stream])
def test_a_chain_keeps_its_order(stream: Callable[[], Any], chain: Invoker) -> None:
    """Runs follow each other at once, each over what the last left in the workspace and the output."""
    copies, used = Copies(chain), stream()
    for count in (1, 2, 20, 41):
        for i in range(count):
            chain.run(copies.bases(i % 2), used.ptr)
        used.synchronize()
        copies.check((count - 1) % 2)
        for buffer in (copies.y, copies.workspace):
            buffer.memory.fill(POISON)
        cupy.cuda.Device().synchronize()


def test_a_captured_chain_keeps_its_order(chain: Invoker) -> None:
    copies, stream = Copies(chain), new_stream()
    with stream:
        stream.begin_capture()
        for i in range(7):
            chain.run(copies.bases(i % 2), stream.ptr)
        graph = stream.end_capture()
    for _ in range(5):
        copies.y.memory.fill(POISON)
        copies.workspace.memory.fill(POISON)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        graph.launch(stream)
        stream.synchronize()
        copies.check(0)
