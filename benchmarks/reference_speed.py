"""How fast a GPU computes the float64 reference of a whole output, and of the elements that are sampled otherwise.

Run: python benchmarks/reference_speed.py [--json FILE]. Times are of the second of two launches, in events of the
device: `exact` for sums alone, `numeric` with what error bounds need besides. `rate` is multiply-adds a second, which
`SampleBudget.of` promises too little of on purpose; `checked` is what verification does with the problem here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import script

from miofind.compiler import Compiler
from miofind.core.problem import Direction, ProblemDescription
from miofind.core.values import Values
from miofind.device.device import Device
from miofind.device.memory import DeviceMemory
from miofind.launch.device_kernels import DeviceKernels
from miofind.reference.convolution import reference_step
from miofind.verify.sampling import SampleBudget, sample_indices

SHAPES: dict[str, dict[str, Any]] = {
    "3x3 64x56x56": {"x": (32, 64, 56, 56), "w": (64, 64, 3, 3), "padding": 1},
    "3x3 512x7x7": {"x": (32, 512, 7, 7), "w": (512, 512, 3, 3), "padding": 1},
    "1x1 256x56x56": {"x": (32, 256, 56, 56), "w": (64, 256, 1, 1)},
    "1x1 64x56x56": {"x": (32, 64, 56, 56), "w": (256, 64, 1, 1)},
    "7x7 first layer": {"x": (32, 3, 224, 224), "w": (64, 3, 7, 7), "padding": 3, "stride": 2},
    "3x3 depthwise": {"x": (32, 144, 56, 56), "w": (144, 1, 3, 3), "padding": 1, "groups": 144},
    "13x13 depthwise": {"x": (16, 128, 56, 56), "w": (128, 1, 13, 13), "padding": 6, "groups": 128},
    "3x3 in 32 groups": {"x": (32, 256, 28, 28), "w": (256, 8, 3, 3), "padding": 1, "groups": 32},
    "3x3 small": {"x": (2, 64, 14, 14), "w": (64, 64, 3, 3), "padding": 1},
    "3x3 batch 256": {"x": (256, 64, 56, 56), "w": (64, 64, 3, 3), "padding": 1},
    "3d": {"x": (4, 64, 16, 56, 56), "w": (64, 64, 3, 3, 3), "padding": 1},
    "matrix": {"x": (4096, 4096, 1, 1), "w": (4096, 4096, 1, 1)},
}
BYTES_A_SUM = 8 + 2 * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Times of one problem; of the whole output None where its references do not fit the memory that is free."""

    shape: str
    direction: str
    dtype: str
    layout: str
    elements: int
    products: int
    whole_exact_ms: float | None
    whole_numeric_ms: float | None
    rate_per_s: float | None
    sampled: int
    sampled_numeric_ms: float
    checked: str


def problems() -> Iterator[tuple[str, ProblemDescription]]:
    """Every shape in each direction, in float16 with channels last and in float32 with channels first."""
    for name, shape in SHAPES.items():
        rank = len(shape["x"]) - 2
        for dtype, layout in (("float16", "NDHWC"), ("float32", "NCDHW")):
            named = layout if rank == 3 else layout.replace("D", "")
            for direction in Direction:
                yield name, ProblemDescription.convolution(**shape, dtype=dtype, layout=named, direction=direction)


class Bench:
    """References of one problem on one device."""

    def __init__(self, problem: ProblemDescription, kernels: DeviceKernels, memory: DeviceMemory) -> None:
        self._problem, self._kernels, self._memory = problem, kernels, memory
        self._addresses = {name: memory.allocate(problem.tensor(name).bytes) for name in problem.direction.inputs}
        for seed, (name, address) in enumerate(self._addresses.items()):
            kernels.fill(problem.tensor(name), address, Values.NORMAL, seed, memory.stream_address)

    def ms(self, indices: np.ndarray | None, *, scales: bool) -> float:
        """Time of one launch for the listed elements, or for all."""
        import cupy

        count = self._problem.output.size if indices is None else indices.size
        own = {
            "indices": 0 if indices is None else self._memory.upload(indices),
            "sums": self._memory.allocate(8 * count),
            "scales": self._memory.allocate(8 * count) if scales else 0,
        }
        step = reference_step(self._problem, None if indices is None else count)
        launch = self._kernels.bind_step(step, self._addresses | own, self._memory.stream_address)
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        launch()
        start.record(self._memory.stream)
        launch()
        end.record(self._memory.stream)
        end.synchronize()
        for address in own.values():
            self._memory.free(address)
        return float(cupy.cuda.get_elapsed_time(start, end))


def figure(name: str, problem: ProblemDescription, kernels: DeviceKernels) -> Figure:
    """One problem's times."""
    memory = DeviceMemory(kernels.device.index)
    try:
        with memory:
            bench = Bench(problem, kernels, memory)
            budget, size = SampleBudget.of(kernels.device), problem.output.size
            fits = size * BYTES_A_SUM < memory.free_bytes // 2
            exact, numeric = (bench.ms(None, scales=scales) if fits else None for scales in (False, True))
            sampled = sample_indices(problem, np.random.default_rng(0), budget)
            products = size * problem.reduction_length
            return Figure(
                shape=name,
                direction=problem.direction.value,
                dtype=problem.x.dtype.value,
                layout=str(problem.x.layout),
                elements=size,
                products=products,
                whole_exact_ms=exact,
                whole_numeric_ms=numeric,
                rate_per_s=1e3 * products / numeric if numeric else None,
                sampled=sampled.size,
                sampled_numeric_ms=bench.ms(sampled, scales=True),
                checked="whole" if budget.covers(problem, BYTES_A_SUM + 8) else "sampled",
            )
    finally:
        memory.close()


def line(figure: Figure) -> str:
    """One problem's times as text."""
    exact, numeric = ("-" if ms is None else f"{ms:.2f}" for ms in (figure.whole_exact_ms, figure.whole_numeric_ms))
    rate = "-" if figure.rate_per_s is None else f"{figure.rate_per_s:.1e}"
    return (
        f"{figure.shape:17}{figure.direction:18}{figure.dtype:9}{figure.layout:7}{figure.elements:>10}"
        f"{figure.products:>10.1e}{exact:>10}{numeric:>10}{rate:>9}{figure.sampled:>8}"
        f"{figure.sampled_numeric_ms:>8.2f}  {figure.checked}"
    )


def main() -> None:
    """Print a line a problem as it is measured."""
    parser = script.parser(__doc__)
    parser.add_argument("--json", type=script.output, metavar="FILE", help="where to write the figures as well")
    arguments: argparse.Namespace = parser.parse_args()
    device = Device.cuda()
    kernels = DeviceKernels(device, Compiler())
    print(f"{device.identity}: {SampleBudget.of(device).products:.2e} products are checked whole")
    print(
        f"{'shape':17}{'direction':18}{'dtype':9}{'layout':7}{'elements':>10}{'products':>10}{'exact ms':>10}"
        f"{'numeric ms':>10}{'rate':>9}{'sampled':>8}{'ms':>8}"
    )
    figures = []
    for name, problem in problems():
        figures.append(figure(name, problem, kernels))
        print(line(figures[-1]), flush=True)
    if arguments.json:
        write(arguments.json, device, figures)


def write(path: Path, device: Device, figures: list[Figure]) -> None:
    """Write the figures as JSON."""
    told = {"device": device.identity, "figures": [asdict(each) for each in figures]}
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    script.run(main)
