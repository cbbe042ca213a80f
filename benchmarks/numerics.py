"""The measured error of every algorithm in every type: what docs/numerics.md shows.

    python benchmarks/numerics.py --json benchmarks/results/numerics_h200.json   # on a GPU and on the CPU place
    python benchmarks/numerics.py --place cuda --shapes "depthwise 7x7" --types float32,TF32
    python benchmarks/numerics.py --table benchmarks/results/numerics_h200.json  # the figures as Markdown

Each solver's default configurations compute normal inputs; errors are against float64. Without a GPU only the CPU
place's solvers are measured. Kernels are compiled before, in parallel.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import script
from commit import commit

from miofind.compiler import BinaryCache, Compiler
from miofind.core.problem import Direction, Layout, ProblemDescription
from miofind.device.device import Device, Place
from miofind.device.environment import versions
from miofind.errors import MiofindError, MissingLibraryError, NoDeviceError
from miofind.launch.invoker import make_invoker
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.verify.claims import claims_of
from miofind.verify.verifier import Verifier

SHAPES: dict[str, dict[str, Any]] = {
    "3x3, 256 channels": {"x": (2, 256, 14, 14), "w": (64, 256, 3, 3), "padding": 1},
    "depthwise 7x7": {"x": (2, 64, 14, 14), "w": (64, 1, 7, 7), "padding": 3, "groups": 64},
    "13x13, 16 channels": {"x": (2, 16, 28, 28), "w": (16, 16, 13, 13), "padding": 6},
    "256 taps, 8 channels": {"x": (1, 8, 1500), "w": (8, 8, 256), "padding": 128},
    "depthwise 256 taps": {"x": (2, 16, 1500), "w": (16, 1, 256), "padding": 128, "groups": 16},
}
TYPES: dict[str, dict[str, Any]] = {
    "float64": {"dtype": "float64"},
    "float32": {"dtype": "float32"},
    "TF32": {"dtype": "float32", "math": "tf32"},
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
}
_SEED = 2026


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """The largest errors of a solver's configurations of one error growth, over directions and layouts.

    Attributes:
        shape, type: keys of SHAPES and TYPES.
        place, solver, algorithm: which.
        growth: how much wider its bound is than direct summation's.
        max_error: largest |error| / (|x| * |w|).
        bound_ratio: largest share of the arithmetic's bound that an error took.
        runs: of configurations.
    """

    shape: str
    type: str
    place: str
    solver: str
    algorithm: str
    growth: float
    max_error: float
    bound_ratio: float
    runs: int


def devices(places: list[Place]) -> Iterator[Device]:
    """The current GPU, if there is one, and the CPU place."""
    if Place.CUDA in places:
        try:
            yield Device.cuda()
        except (NoDeviceError, MissingLibraryError) as error:
            print(f"without a GPU: {error}", file=sys.stderr)
    if Place.CPU in places:
        yield Device.cpu()


def problems(shape: str, kind: str) -> Iterator[ProblemDescription]:
    """A shape's problems of one type, in all directions and layouts."""
    for direction in Direction:
        for channels_last in (False, True):
            layout = Layout.of(len(SHAPES[shape]["x"]) - 2, channels_last=channels_last)
            yield ProblemDescription.convolution(**SHAPES[shape], **TYPES[kind], layout=layout, direction=direction)


def build_ahead(device: Device, compiler: Compiler, every: list[ProblemDescription]) -> None:
    """Compile all kernels in parallel, so that the GPU does not wait for them."""
    steps = {}
    for problem in every:
        for solver in Registry.default().values():
            if solver.applicability(problem, device):
                for config in solver.default_configs(problem, device):
                    for step in solver.solution(problem, device, config).kernels:
                        steps[step.source, step.entry, step.defines] = step
    for _ in compiler.build_all(steps.values(), device.arch):
        pass


def errors(
    problem: ProblemDescription, solver: Solver, device: Device, compiler: Compiler, verifier: Verifier
) -> Iterator[tuple[float, float, float]]:
    """Growth, largest error and share of the bound of each default configuration that can run."""
    if not solver.applicability(problem, device):
        return
    for config in solver.default_configs(problem, device):
        growth = solver.error_growth(problem, config)
        try:
            invoker = make_invoker(problem, device, solver, config, compiler)
            verdict = verifier.verify(invoker, claims_of(solver, problem, device, config, compiler))
        except (MiofindError, MemoryError) as error:
            print(f"{problem.network_config} {solver.id} {config.json}: {error}", file=sys.stderr)
            continue
        if not verdict.ok:
            sys.exit(f"{problem.network_config} {solver.id} {config.json}: {verdict.message}")
        if verdict.max_error is not None and verdict.bound_ratio is not None:
            yield growth, verdict.max_error, verdict.bound_ratio


def measured(device: Device, compiler: Compiler, shape: str, kind: str) -> list[Figure]:
    """A figure for each solver and growth."""
    found: dict[tuple[Solver, str], list[tuple[float, float, float]]] = {}
    for problem in problems(shape, kind):
        with Verifier(problem, device, compiler, seed=_SEED) as verifier:
            for solver in Registry.default().values():
                for growth, error, ratio in errors(problem, solver, device, compiler, verifier):
                    found.setdefault((solver, f"{growth:.1f}"), []).append((growth, error, ratio))
    return [
        Figure(
            shape=shape,
            type=kind,
            place=device.place.value,
            solver=solver.id,
            algorithm=solver.algorithm.value,
            growth=max(growth for growth, _, _ in runs),
            max_error=max(error for _, error, _ in runs),
            bound_ratio=max(ratio for _, _, ratio in runs),
            runs=len(runs),
        )
        for (solver, _), runs in found.items()
    ]


def print_tables(report: dict[str, Any]) -> None:
    """The figures as Markdown, a table a shape: a line a solver, a column a type."""
    figures = [Figure(**figure) for figure in report["figures"]]
    for shape in SHAPES:
        print(f"\n### {shape}\n")
        print("| solver | place | " + " | ".join(TYPES) + " |\n|---|---|" + "---|" * len(TYPES))
        lines: dict[tuple[str, str], dict[str, list[Figure]]] = {}
        for figure in figures:
            if figure.shape == shape:
                kinds = lines.setdefault((figure.place, figure.solver), {})
                kinds.setdefault(figure.type, []).append(figure)
        for (place, solver), kinds in sorted(lines.items(), reverse=True):
            cells = ["<br>".join(map(_cell, sorted(kinds.get(kind, []), key=lambda f: f.growth))) for kind in TYPES]
            print(f"| {solver} | {place} | " + " | ".join(cells) + " |")


def _cell(figure: Figure) -> str:
    growth = "" if figure.growth <= 1 else f" (bound x {figure.growth:.3g})"
    return f"{figure.max_error:.1e}, {figure.bound_ratio:.0%}{growth}"


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--json", type=script.output, help="write the figures to this file")
    parser.add_argument("--place", type=script.several(Place), default=[*Place], help="cuda, cpu or both")
    parser.add_argument("--shapes", type=script.several(SHAPES, ";"), default=[*SHAPES], help="separated by ;")
    parser.add_argument("--types", type=script.several(TYPES), default=[*TYPES])
    parser.add_argument("--table", type=Path, help="only print the tables of this file")
    arguments = parser.parse_args()
    if arguments.table:
        print_tables(json.loads(arguments.table.read_text()))
        return
    compiler = Compiler(BinaryCache())
    report: dict[str, Any] = {"commit": commit(), "command": shlex.join(["python", *sys.argv]), "figures": []}
    started = time.monotonic()
    for device in devices(arguments.place):
        report.setdefault("gpu", device.name if device.place is Place.CUDA else "none: the CPU place")
        report.setdefault("versions", versions(device))
        if device.place is Place.CUDA:
            every = [one for shape in arguments.shapes for kind in arguments.types for one in problems(shape, kind)]
            build_ahead(device, compiler, every)
            print(f"compiled in {time.monotonic() - started:.0f} s", file=sys.stderr)
        for shape in arguments.shapes:
            for kind in arguments.types:
                for figure in measured(device, compiler, shape, kind):
                    report["figures"].append({name: getattr(figure, name) for name in Figure.__slots__})
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    print_tables(report)
    print(f"took {time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    script.run(main)
