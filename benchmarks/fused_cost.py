"""What an epilogue costs in a kernel: a fused layer's answer beside the same kernel without the epilogue.

    python benchmarks/fused_cost.py --json benchmarks/results/fused_cost_h200.json
    python benchmarks/fused_cost.py --networks resnet50,vgg16 --dtypes float16 --batches 1

Takes the layers of the suites `*_fused` that a kernel of miofind's own answers, as the FindDBs know them, and times
that kernel in the same configuration on the bare problem, in turn with the fused one and as finds do (cold caches).
`cost` is the fused time, less what the residual's bytes take at the bandwidth of a large copy, over the bare one: 1 is
an epilogue for nothing. The last lines are geometric means by network and by activation.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import script
from commit import commit
from fused_networks import DTYPES, ENDING, NETWORKS

import miofind
from miofind.bench.ceilings import measure_ceilings
from miofind.cli.bench import bench_versions
from miofind.core.problem import Layout, ProblemDescription
from miofind.device.device import Device, Library
from miofind.errors import MiofindError
from miofind.finddb import MEMORY
from miofind.launch.invoker import make_invoker
from miofind.measure.timer import Timer
from miofind.options import FindOptions, OnMiss
from miofind.runtime.solution import Solution
from miofind.solver.steps import KernelStep
from miofind.suites import load_suite

ROUNDS, SAMPLES = 12, 2
"""Turns of either side, and the samples of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One layer's times in milliseconds.

    Attributes:
        networks: which have it.
        residual_ms: what the residual's bytes take.
    """

    network_config: str
    networks: tuple[str, ...]
    activation: str
    solution: str
    bare_ms: float
    fused_ms: float
    residual_ms: float

    @property
    def cost(self) -> float:
        """The fused time, less the residual's, over the bare one."""
        return (self.fused_ms - self.residual_ms) / self.bare_ms


def layers_of(arguments: argparse.Namespace) -> dict[ProblemDescription, tuple[str, ...]]:
    """Each fused layer once, with the networks that have it."""
    found: dict[ProblemDescription, tuple[str, ...]] = {}
    for network, dtype, batch in itertools.product(arguments.networks, arguments.dtypes, arguments.batches):
        suite = load_suite(network + ENDING)
        for entry in suite.problems(batch=int(batch), dtype=dtype, layout=Layout.NHWC):
            if entry.problem.epilogue:
                found[entry.problem] = tuple(dict.fromkeys((*found.get(entry.problem, ()), network)))
    return found


def own_answer(problem: ProblemDescription, handle: miofind.Handle) -> Solution | None:
    """The fastest answer where a single kernel of our own fuses it, without measuring anything."""
    options = FindOptions(on_miss=OnMiss.ESTIMATE)
    best = miofind.find_solutions(problem, options=options, handle=handle)[0]
    solver = handle.registry.named(best.solver_id)
    bare = problem.bare
    is_own = solver.library is Library.PLAIN and best.source == "finddb" and "+" not in best.solver_id
    if not is_own or not solver.applicability(bare, handle.device):
        return None
    solver.check_config(bare, handle.device, best.config)
    return best


def cost_of(
    problem: ProblemDescription, networks: tuple[str, ...], best: Solution, handle: miofind.Handle, copy_rate: float
) -> Cost:
    """A layer's times, both sides in turn."""
    device, compiler = handle.device, handle.compiler
    solver = handle.registry.named(best.solver_id)
    sides = []
    with Timer(problem.bare, device, compiler) as bare, Timer(problem, device, compiler) as fused:
        for timer in (bare, fused):
            invoker = make_invoker(timer.problem, device, solver, best.config, compiler)
            sides.append((timer, timer.prepare(invoker), invoker))
        times: list[list[float]] = [[], []]
        for number in range(ROUNDS):
            for side in (0, 1) if number % 2 else (1, 0):
                timer, timed, invoker = sides[side]
                times[side] += timer.samples(timed, invoker, SAMPLES)
    residual = [operand.tensor.bytes for operand in problem.operands if operand.name == "residual"]
    return Cost(
        network_config=problem.network_config,
        networks=networks,
        activation=problem.epilogue.activation.value,
        solution=best.id,
        bare_ms=statistics.median(times[0]),
        fused_ms=statistics.median(times[1]),
        residual_ms=1e3 * sum(residual) / copy_rate,
    )


def compile_ahead(chosen: Iterable[tuple[ProblemDescription, Solution]], handle: miofind.Handle) -> None:
    """Both sides' kernels, in parallel."""
    steps: list[KernelStep] = []
    for problem, best in chosen:
        solver = handle.registry.named(best.solver_id)
        for each in (problem, problem.bare):
            steps += solver.solution(each, handle.device, best.config).kernels
    for _ in handle.compiler.build_all(steps, handle.device.arch):
        pass


def means(costs: Sequence[Cost]) -> dict[str, dict[str, float]]:
    """Geometric means by network and by activation."""
    groups: dict[str, list[float]] = {}
    for each in costs:
        for name in (*each.networks, f"activation {each.activation}", "all"):
            groups.setdefault(name, []).append(each.cost)
    return {
        name: {"layers": len(some), "cost": round(statistics.geometric_mean(some), 4)}
        for name, some in sorted(groups.items())
    }


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--networks", type=script.several(NETWORKS), default=NETWORKS, help=",".join(NETWORKS))
    parser.add_argument("--dtypes", type=script.several(DTYPES), default=DTYPES[:1], help=",".join(DTYPES))
    parser.add_argument("--batches", type=lambda text: text.split(","), default=["32"], help="numbers")
    parser.add_argument("--stop-after", type=script.seconds, default=600.0, help="begin no layer after so long")
    parser.add_argument("--commit", default=commit(), help="of the code; by default git's")
    parser.add_argument("--json", type=script.output, metavar="FILE", help="where to write the figures as well")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.stop_after
    layers = layers_of(arguments)
    with miofind.Handle(Device.cuda(), database=MEMORY) as handle:
        copy_rate = measure_ceilings(handle.device).copy_bytes_per_s
        answers = {problem: own_answer(problem, handle) for problem in layers}
        chosen = {problem: best for problem, best in answers.items() if best is not None}
        compile_ahead(chosen.items(), handle)
        costs: list[Cost] = []
        for problem, best in chosen.items():
            if time.monotonic() > deadline:
                break
            try:
                costs.append(cost_of(problem, layers[problem], best, handle, copy_rate))
            except MiofindError as error:
                print(f"{problem}: {error}")
        told = {
            "gpu": handle.device.name,
            "commit": arguments.commit,
            "command": f"python benchmarks/fused_cost.py --networks {','.join(arguments.networks)} "
            f"--dtypes {','.join(arguments.dtypes)} --batches {','.join(arguments.batches)}",
            "versions": bench_versions(handle.device),
            "copy_bytes_per_s": copy_rate,
            "layers": len(layers),
            "of_own_kernels": len(chosen),
            "means": means(costs),
            "rows": [row(each) for each in costs],
        }
    for name, figures in told["means"].items():
        print(f"{name:24}{figures['layers']:>5}{figures['cost']:>8.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def row(cost: Cost) -> dict[str, Any]:
    """A layer's row of the file."""
    return {**asdict(cost), "cost": round(cost.cost, 4)}


if __name__ == "__main__":
    script.run(main)
