"""What a device can do at best: measured copy bandwidth and matrix-product rates, and the floor they set for a problem.

For judging times, never for choosing a candidate. CUDA devices only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np

from miofind.core.problem import DataType, MathMode, ProblemDescription
from miofind.device.device import Device
from miofind.device.memory import DeviceMemory
from miofind.errors import MiofindError
from miofind.reference.convolution import numpy_dtype
from miofind.solver.steps import MatmulStep, Pointer

_COPY_BYTES = 1 << 30
_RUNS = 7
# An empty kernel costs 0.6 us at 132 blocks and 1.15 us at 1056 in a CUDA graph (H200).
_LAUNCH_MS = 1e-3
_WORKSPACE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Measured ceilings of one device.

    Attributes:
        copy_bytes_per_s: bytes read plus bytes written by a large copy.
        flops_per_s: of a large cuBLASLt product by arithmetic: "float16", "bfloat16", "tf32", "float32", "float64";
            those that the library offers here.
    """

    copy_bytes_per_s: float
    flops_per_s: Mapping[str, float]

    def floor_ms(self, problem: ProblemDescription) -> float | None:
        """Least time of direct arithmetic: the larger of arithmetic and traffic, plus 1 us to start and drain.

        None where the rate of the problem's arithmetic was not measured.
        """
        rate = self.flops_per_s.get(arithmetic_of(problem))
        if rate is None:
            return None
        return 1e3 * max(problem.flops / rate, problem.bytes / self.copy_bytes_per_s) + _LAUNCH_MS


def known_ceilings(name: str) -> Ceilings | None:
    """The ceilings of a GPU that need not be here, by its name; None where they were not measured yet."""
    return _KNOWN.get(name)


# As `miofind bench` measured them: medians over the runs of benchmarks/results, with cuBLAS 13.1.
_KNOWN = {
    "NVIDIA H200": Ceilings(
        copy_bytes_per_s=4.2e12,
        flops_per_s={"float16": 744e12, "bfloat16": 785e12, "tf32": 407e12, "float32": 49.8e12},
    )
}


def arithmetic_of(problem: ProblemDescription) -> str:
    """Name of the fastest arithmetic a problem allows: its narrowest input's dtype, or "tf32"."""
    if problem.math is MathMode.TF32:
        return MathMode.TF32.value
    inputs = [problem.tensor(name).dtype for name in problem.direction.inputs]
    return min(inputs, key=lambda dtype: (-dtype.itemsize, dtype.value)).value


def measure_ceilings(device: Device) -> Ceilings:
    """The ceilings of a CUDA device; takes about a second and 2 GiB of its memory.

    Raises:
        MemoryError: the device has not 2 GiB to spare.
    """
    memory = DeviceMemory(device.index)
    try:
        with memory:
            source, target = memory.allocate(_COPY_BYTES), memory.allocate(_COPY_BYTES)
            memory.set_bytes(source, 1, _COPY_BYTES)
            copy_ms = _timed(memory, lambda: _copy(memory, source, target))
            rates = {}
            for name, step in _products().items():
                rate = _product_rate(memory, step, device, (source, target))
                if rate is not None:
                    rates[name] = rate
    finally:
        memory.close()
    return Ceilings(copy_bytes_per_s=2e3 * _COPY_BYTES / copy_ms, flops_per_s=rates)


def _products() -> dict[str, MatmulStep]:
    """One large product an arithmetic; small enough in the slow ones to take milliseconds."""
    narrow = {dtype.value: _product(8192, dtype) for dtype in (DataType.FLOAT16, DataType.BFLOAT16)}
    wide = {dtype.value: _product(4096, dtype) for dtype in (DataType.FLOAT32, DataType.FLOAT64)}
    return {**narrow, "tf32": _product(8192, DataType.FLOAT32, MathMode.TF32), **wide}


def _product(size: int, dtype: DataType, math: MathMode = MathMode.IEEE) -> MatmulStep:
    return MatmulStep(
        m=size,
        n=size,
        k=size,
        transpose_a=True,
        transpose_b=False,
        lda=size,
        ldb=size,
        ldc=size,
        a=Pointer(buffer="x"),
        b=Pointer(buffer="w"),
        c=Pointer(buffer="y"),
        dtype_ab=dtype,
        dtype_c=dtype,
        math=math,
        workspace="workspace",
        workspace_bytes=_WORKSPACE_BYTES,
    )


def _product_rate(memory: DeviceMemory, step: MatmulStep, device: Device, buffers: tuple[int, int]) -> float | None:
    """Flops per second of a product, None where the library refuses it. The operands are normal random numbers.

    Zeros would not do: they let the clocks rise.
    """
    from miofind.libraries.cublaslt import matmul_plan

    size = step.m * step.n * step.dtype_ab.itemsize
    a, c = buffers
    b = a + size
    workspace = c + size
    _fill(memory, step, a)
    try:
        plan = matmul_plan(step, device)
        run_ms = _timed(memory, lambda: plan.launch(a, b, c, workspace, memory.stream_address))
    except MiofindError:
        return None
    return 2e3 * step.m * step.n * step.k / run_ms


def _fill(memory: DeviceMemory, step: MatmulStep, address: int) -> None:
    """Random operands from a pattern of 1 MiB that is repeated."""
    values = np.random.default_rng(0).standard_normal(1 << 18).astype(numpy_dtype(step.dtype_ab))
    block = memory.upload(values)
    total = 2 * step.m * step.n * step.dtype_ab.itemsize
    for start in range(0, total, values.nbytes):
        _copy_bytes(memory, block, address + start, min(values.nbytes, total - start))
    memory.stream.synchronize()
    memory.free(block)


def _copy(memory: DeviceMemory, source: int, target: int) -> None:
    _copy_bytes(memory, source, target, _COPY_BYTES)


def _copy_bytes(memory: DeviceMemory, source: int, target: int, size: int) -> None:
    import cupy

    kind = cupy.cuda.runtime.memcpyDeviceToDevice
    cupy.cuda.runtime.memcpyAsync(target, source, size, kind, memory.stream_address)


def _timed(memory: DeviceMemory, launch: Callable[[], None]) -> float:
    """Median milliseconds of a launch, after two that are not counted."""
    import cupy

    times = []
    for _ in range(_RUNS + 2):
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record(memory.stream)
        launch()
        stop.record(memory.stream)
        stop.synchronize()
        times.append(float(cupy.cuda.get_elapsed_time(start, stop)))
    return median(times[2:])
