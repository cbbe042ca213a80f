"""In the registry of measuring processes of test_isolation_gpu: a solver of 1x1 convolutions, broken on demand.

Its sources are in the package that FAULT_PACKAGE names. Every configuration is a fault, "none" among them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from miofind.core.problem import DataType, Layout, ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.solver.solver import APPLICABLE, Algorithm, Applicability, KernelKey, Solver
from miofind.solver.steps import (
    Config,
    ConfigValue,
    ConvSolution,
    KernelStep,
    Pointer,
    Region,
    Scalar,
    WorkspacePlan,
)

FAULTY = "vendor/Faulty"

SOURCE = """\
// y = x * w[0], until the fault comes: after `after` launches of this kernel.
// Define: FAULT (0 none, 1 out of bounds, 2 without end, 3 NaN, 4 wrong).
#ifndef FAULT
#error "define FAULT"
#endif

__device__ unsigned launches;

extern "C" __global__ void faulty(const float* x, const float* w, float* y, long long size, long long after) {
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  const bool due = *static_cast<volatile unsigned*>(&launches) >= after;
  if (i < size) y[i] = x[i] * w[0];
  if (due && i < size) {
#if FAULT == 1
    if (i == 0) *static_cast<volatile float*>(y + (1ll << 44)) = 1.0f;
#elif FAULT == 2
    const volatile float* never = x;
    while (never[0] < 1e30f) {
    }
#elif FAULT == 3
    y[i] = __int_as_float(0x7fc00000);
#elif FAULT == 4
    y[i] += 1.0f;
#endif
  }
  if (i == 0) atomicAdd(&launches, 1u);
}
"""

_KERNELS = {"out of bounds": 1, "without end": 2, "nan": 3, "wrong": 4}
_THREADS = 256
_BLOCK_BYTES = 1 << 30
_kept: list[Any] = []


def _hoard() -> None:
    """Take all the device's memory, and keep it."""
    import cupy

    size = _BLOCK_BYTES
    while size >= 1 << 20:
        try:
            _kept.append(cupy.cuda.Memory(size))
        except cupy.cuda.runtime.CUDARuntimeError:
            size //= 2
    raise MemoryError("the hoard is complete")


class Faulty(Solver):
    """Scales x by the only weight."""

    id = FAULTY
    algorithm = Algorithm.DIRECT
    keys = (
        KernelKey(
            place=Place.CUDA,
            library=Library.PLAIN,
            dtypes=frozenset({DataType.FLOAT32}),
            layouts=frozenset(Layout),
            min_sm=75,
        ),
    )
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {
        "fault": ("none", *_KERNELS, "workspace", "hoard", "exit"),
        "after": (0, 20, 400),
    }
    sources = ("faults.cu",)
    source_package = os.environ.get("FAULT_PACKAGE", "")

    def examples(self) -> tuple[ProblemDescription, ...]:
        return (ProblemDescription.convolution(x=(1, 1, 64, 64), w=(1, 1, 1, 1)),)

    def is_applicable(self, problem: ProblemDescription, device: Device) -> Applicability:
        return APPLICABLE

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return (Config.of(fault="none", after=0),)

    def estimate_ms(self, problem: ProblemDescription, device: Device, config: Config) -> float:
        return 1.0

    def is_exact(self, config: Config) -> bool:
        if config["fault"] == "exit":
            os._exit(0)
        if config["fault"] == "hoard":
            _hoard()
        return True

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        step = KernelStep(
            source="faults.cu",
            entry="faulty",
            package=self.source_package,
            grid=(-(-problem.y.size // _THREADS), 1, 1),
            block=(_THREADS, 1, 1),
            defines=(("FAULT", _KERNELS.get(config["fault"], 0)),),
            args=(
                *(Pointer(buffer=name) for name in ("x", "w", "y")),
                Scalar(ctype="int64", value=problem.y.size),
                Scalar(ctype="int64", value=config["after"]),
            ),
        )
        regions = (Region(name="far too much", bytes=1 << 46),) if config["fault"] == "workspace" else ()
        return ConvSolution(steps=(step,), workspace=WorkspacePlan(regions))
