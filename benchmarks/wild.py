"""Every problem of the wild suites: does ConvDirectNaive solve it, does a second solver, and why not.

    python benchmarks/wild.py --json benchmarks/results/wild_h200.json [--all] [--limit N]
    python benchmarks/wild.py --only ConvImplicitGemmMma --configs 4 --layout NHWC
    python benchmarks/wild.py --epilogues 1 --all

Needs a GPU. Each solution is verified by both gates; a problem counts for a solver only where it passed. Without --all
a problem is done when one solver beside ConvDirectNaive has passed; our own are asked before cuDNN. With --configs each
solver of --only is verified with its first default and so many random configurations of each problem. With --epilogues
each problem has a random epilogue; then a solver is its kernels that fuse and, unless these are verified, the form that
is composed with a pass.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import script

import miofind
from miofind.compiler import BinaryCache, Compiler
from miofind.core.epilogue import DERIVATIVES, Activation, Epilogue, ResidualPosition
from miofind.core.problem import DataType, Direction, Layout, MathMode, ProblemDescription
from miofind.device.device import Device, Library
from miofind.device.environment import versions
from miofind.errors import LaunchError, MiofindError
from miofind.evaluate.health import context_error
from miofind.launch.invoker import make_invoker
from miofind.runtime.refusals import forms
from miofind.solver.candidate import Candidate, Status
from miofind.solver.solver import Solver
from miofind.solver.steps import Config, KernelStep
from miofind.suites import SuiteProblem, load_suite
from miofind.verify.claims import claims_of
from miofind.verify.verifier import Verifier

NAIVE = "ConvDirectNaive"


def verdict_of(
    problem: ProblemDescription, solver: Solver, config: Config, handle: miofind.Handle, verifier: Verifier
) -> tuple[Status, str]:
    """What became of one configuration, and why."""
    candidate = Candidate(network_config=problem.network_config, solver_id=solver.id, config=config)
    try:
        invoker = make_invoker(problem, handle.device, solver, config, handle.compiler)
        verdict = verifier.verify(invoker, claims_of(solver, problem, handle.device, config, handle.compiler))
    except (MiofindError, MemoryError) as error:
        lost = context_error(handle.device)
        if lost:
            sys.exit(f"{candidate.id} ended this process's work on the GPU: {lost}")
        return Status.LAUNCH_FAILED, f"{candidate.id}: {error}"
    return (Status.OK, "") if verdict.ok else (Status.WRONG_RESULT, f"{candidate.id}: {verdict.message}")


def verified(
    problem: ProblemDescription,
    solver: Solver,
    configs: Sequence[Config],
    handle: miofind.Handle,
    verifier: Verifier,
) -> tuple[Status, str]:
    """What became of the first of a solver's configurations that passes, else of the last."""
    status, message = Status.LAUNCH_FAILED, "no configuration"
    for config in configs:
        status, message = verdict_of(problem, solver, config, handle, verifier)
        if status is Status.OK:
            break
    return status, message


def defaults(solver: Solver, problem: ProblemDescription, handle: miofind.Handle) -> tuple[Config, ...]:
    """A solver's default configurations; none where its library lists none for the problem."""
    try:
        return tuple(solver.default_configs(problem, handle.device))
    except LaunchError:
        return ()


def within_bound(solver: Solver, problem: ProblemDescription, handle: miofind.Handle) -> list[Config]:
    """The default configurations that answer a request without max_error."""
    return [config for config in defaults(solver, problem, handle) if solver.keeps_bound(problem, config)]


def run_drawn(
    problem: ProblemDescription, asked: Sequence[Solver], handle: miofind.Handle, tally: dict[str, Any], count: int
) -> None:
    """Count what became of each drawn configuration of each solver."""
    with Verifier(problem, handle.device, handle.compiler) as verifier:
        for solver in asked:
            applicability = solver.applicability(problem, handle.device)
            if not applicability:
                tally["refusals"][f"{solver.id}: {applicability.reason}"] += 1
                continue
            tally["accepted"][solver.id] += 1
            for config in drawn(solver, problem, handle, count):
                status, message = verdict_of(problem, solver, config, handle, verifier)
                tally["outcomes"][f"{solver.id}: {status}"] += 1
                if status is not Status.OK:
                    tally["failures"].append({"problem": problem.network_config, "message": message[:600]})


def drawn(solver: Solver, problem: ProblemDescription, handle: miofind.Handle, count: int) -> list[Config]:
    """The first default configuration and `count` more: random ones, or other defaults where no parameters are."""
    listed = defaults(solver, problem, handle)
    draw = random.Random(problem.network_config)
    if not listed:
        return []
    if not solver.parameters:
        return [listed[0], *draw.sample(listed[1:], min(count, len(listed) - 1))]
    configs = {listed[0]: None}
    for _ in range(200 * count):
        if len(configs) > count:
            break
        config = Config({name: draw.choice(values) for name, values in solver.parameters.items()})
        if solver.is_valid_config(problem, handle.device, config):
            configs[config] = None
    return list(configs)


def compile_ahead(
    problems: Iterable[ProblemDescription],
    asked: Sequence[Solver],
    handle: miofind.Handle,
    count: int,
    most: int | None = None,
) -> None:
    """Build the kernels of what will be verified first in parallel, so that the GPU does not wait for them.

    Args:
        most: how many solvers are asked of each problem, the first that serve it; None for all.
    """
    steps: list[KernelStep] = []
    for problem in problems:
        serving = (
            next((form for form in forms(solver, problem) if form.applicability(problem, handle.device)), None)
            for solver in asked
        )
        for form in itertools.islice(filter(None, serving), most):
            for config in drawn(form, problem, handle, count):
                steps += form.solution(problem, handle.device, config).kernels
    for _ in handle.compiler.build_all(steps, handle.device.arch):
        pass


def in_order(handle: miofind.Handle) -> list[Solver]:
    """The device's solvers: the naive one, then those with kernels of ours, then the libraries."""
    here = [s for s in handle.registry.values() if handle.device.place in {key.place for key in s.keys}]
    return sorted(here, key=lambda s: (s.id != NAIVE, list(Library).index(s.library)))


def with_epilogue(problem: ProblemDescription, seed: int) -> ProblemDescription:
    """A problem with an epilogue that its text and the seed choose."""
    draw = random.Random(f"{seed} {problem.network_config}")
    if problem.direction is Direction.BACKWARD_WEIGHTS:
        return replace(problem, epilogue=Epilogue(bias_gradient=True))
    if problem.direction is Direction.BACKWARD_DATA:
        position = draw.choice([ResidualPosition.NONE, ResidualPosition.BEFORE])
        return replace(problem, epilogue=Epilogue(residual=position, derivative=draw.choice(DERIVATIVES)))
    narrow = problem.y.dtype in (DataType.FLOAT16, DataType.BFLOAT16)
    epilogue = Epilogue(
        scale=draw.random() < 0.4,
        bias=draw.random() < 0.7,
        channel_bias=draw.random() < 0.2,
        residual=draw.choice([*ResidualPosition]),
        activation=draw.choice([*Activation]),
        parameter_dtype=DataType.FLOAT32 if narrow and draw.random() < 0.5 else None,
        statistics=draw.random() < 0.2,
    )
    return replace(problem, epilogue=epilogue)


def run_problem(
    problem: ProblemDescription, handle: miofind.Handle, tally: dict[str, Any], *, every_solver: bool
) -> None:
    naive_ok, second = False, ""
    with Verifier(problem, handle.device, handle.compiler) as verifier:
        for solver in in_order(handle):
            if second and not every_solver:
                break
            for form in forms(solver, problem):
                applicability = form.applicability(problem, handle.device)
                if not applicability:
                    tally["refusals"][f"{form.id}: {applicability.reason}"] += 1
                    continue
                configs = within_bound(form, problem, handle)
                if not configs:
                    tally["refusals"][f"{form.id}: no plan of its library's, or none within the error bound"] += 1
                    continue
                status, message = verified(problem, form, configs, handle, verifier)
                tally["outcomes"][f"{form.id}: {status}"] += 1
                if status is not Status.OK:
                    tally["failures"].append({"problem": problem.network_config, "message": message[:600]})
                    continue
                if solver.id == NAIVE:
                    naive_ok = True
                else:
                    second = second or form.id
                break
    tally["naive"] += naive_ok
    tally["second"] += bool(second)
    if not second:
        tally["without_second"].append(problem.network_config)


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--json", type=script.output, help="write the figures to this file")
    parser.add_argument("--all", action="store_true", help="ask every solver")
    parser.add_argument("--stop-after", type=script.seconds, default=math.inf, help="begin no problem after so long")
    parser.add_argument("--limit", type=script.count, help="only the first N problems of each suite")
    parser.add_argument("--share", type=script.share, default=(0, 1), metavar="I/N", help="only the I-th of N parts")
    parser.add_argument(
        "--only", type=script.solver_ids, metavar="SOLVERS", help="ids of solvers, with commas, for --configs"
    )
    parser.add_argument(
        "--configs", type=script.at_least(0), default=0, help="random configurations of each solver of --only"
    )
    parser.add_argument("--epilogues", type=script.count, metavar="SEED", help="give each a random epilogue")
    parser.add_argument("--layout", choices=[*map(str, Layout)], help="of all tensors, instead of the suites'")
    parser.add_argument("--math", choices=[*map(str, MathMode)], help="of the float32 problems")
    arguments = parser.parse_args()
    if bool(arguments.only) != bool(arguments.configs):
        parser.error("--only and --configs go together")
    handle = miofind.Handle(Device.cuda(), compiler=Compiler(BinaryCache()))
    report: dict[str, Any] = {
        "gpu": handle.device.name,
        "versions": versions(handle.device),
        "command": shlex.join(["python", *sys.argv]),
        "suites": {},
    }
    started = time.monotonic()
    for name in ("wild_3d", "wild"):
        entries = load_suite(name).problems(layout=arguments.layout, math=arguments.math)[: arguments.limit]
        if arguments.epilogues:
            entries = [replace(entry, problem=with_epilogue(entry.problem, arguments.epilogues)) for entry in entries]
        first, every = arguments.share
        deadline = started + arguments.stop_after
        tally = report["suites"][name] = run_suite(entries[first::every], handle, arguments, deadline)
        print_tally(name, tally)
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def run_suite(
    entries: Sequence[SuiteProblem], handle: miofind.Handle, arguments: argparse.Namespace, deadline: float
) -> dict[str, Any]:
    """What became of each problem of a suite, counted."""
    start = time.monotonic()
    asked = [handle.registry.named(name) for name in arguments.only] if arguments.only else in_order(handle)
    most = None if arguments.all or arguments.configs else 2
    compile_ahead((entry.problem for entry in entries), asked, handle, arguments.configs, most)
    tally: dict[str, Any] = {
        "rows": sum(entry.count for entry in entries),
        "distinct": len(entries),
        "problems": 0,
        "compile_seconds": round(time.monotonic() - start, 1),
        "refusals": Counter(),
        "accepted": Counter(),
        "outcomes": Counter(),
        "failures": [],
    }
    if not arguments.configs:
        tally |= {"naive": 0, "second": 0, "without_second": []}
    for entry in entries:
        if time.monotonic() > deadline:
            break
        tally["problems"] += 1
        if arguments.configs:
            run_drawn(entry.problem, asked, handle, tally, arguments.configs)
        else:
            run_problem(entry.problem, handle, tally, every_solver=arguments.all)
    tally["seconds"] = round(time.monotonic() - start, 1)
    return tally


def print_tally(name: str, tally: dict[str, Any]) -> None:
    """Print a suite's counts, its refusals by reason and its failures."""
    solved = f"; {NAIVE} solves {tally['naive']}, a second solver {tally['second']}" if "naive" in tally else ""
    print(
        f"\n{name}: {tally['problems']} of {tally['distinct']} distinct problems ({tally['rows']} rows) in "
        f"{tally['seconds']} s{solved}; {len(tally['failures'])} failures"
    )
    for counts in (tally["accepted"], tally["outcomes"]):
        print("  " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    for reason, count in tally["refusals"].most_common(40):
        print(f"  {count:5d}  {reason}")
    for failure in tally["failures"][:20]:
        print(f"  FAILED {failure['problem']}: {failure['message'][:200]}")


if __name__ == "__main__":
    script.run(main)
