"""Every problem of the wild suites: does ConvDirectNaive solve it, does a second solver, and why not.

    python benchmarks/wild.py --json benchmarks/results/wild_h200.json [--all] [--limit N]

Needs a GPU. Each solution is verified by both gates; a problem counts for a solver only where it passed. Without --all
a problem is done when one solver beside ConvDirectNaive has passed; our own are asked before cuDNN.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import miofind
from miofind.candidate import Candidate, Status
from miofind.compiler import BinaryCache, Compiler
from miofind.device import Library
from miofind.environment import versions
from miofind.errors import MiofindError
from miofind.invoker import make_invoker
from miofind.problem import ProblemDescription
from miofind.solver import Solver, solvers
from miofind.suites import SuiteProblem, load_suite
from miofind.verify.verifier import Verifier

NAIVE = "ConvDirectNaive"


def verified(
    problem: ProblemDescription, solver: Solver, handle: miofind.Handle, verifier: Verifier
) -> tuple[Status, str]:
    """What became of a solver's first default configuration that passes, else of its last."""
    status, message = Status.LAUNCH_FAILED, "no configuration"
    for config in solver.default_configs(problem, handle.device):
        candidate = Candidate(network_config=problem.network_config, solver_id=solver.id, config=config)
        if solver.error_growth(problem, config) > 1:
            continue
        try:
            invoker = make_invoker(problem, handle.device, solver, config, handle.compiler)
            verdict = verifier.verify(
                invoker, growth=solver.error_growth(problem, config), exact=solver.is_exact(config)
            )
        except (MiofindError, MemoryError) as error:
            status, message = Status.LAUNCH_FAILED, f"{candidate.id}: {error}"
            continue
        if verdict.ok:
            return Status.OK, ""
        status, message = Status.WRONG_RESULT, f"{candidate.id}: {verdict.message}"
    return status, message


def compile_ahead(problems: Iterable[ProblemDescription], handle: miofind.Handle) -> None:
    """Build the kernels of each solver's first configuration in parallel, so that the GPU does not wait for them."""
    steps = []
    for problem in problems:
        for solver in solvers().values():
            if solver.applicability(problem, handle.device):
                config = next(iter(solver.default_configs(problem, handle.device)))
                steps += solver.solution(problem, handle.device, config).kernels
    for _ in handle.compiler.build_all(steps, handle.device.arch):
        pass


def in_order(handle: miofind.Handle) -> list[Solver]:
    """The device's solvers: the naive one, then those with kernels of ours, then the libraries."""
    here = [s for s in solvers().values() if handle.device.place in {key.place for key in s.keys}]
    return sorted(here, key=lambda s: (s.id != NAIVE, list(Library).index(s.library)))


def run_problem(
    problem: ProblemDescription, handle: miofind.Handle, tally: dict[str, Any], *, every_solver: bool
) -> None:
    naive_ok, second = False, ""
    with Verifier(problem, handle.device, handle.compiler) as verifier:
        for solver in in_order(handle):
            if second and not every_solver:
                break
            applicability = solver.applicability(problem, handle.device)
            if not applicability:
                tally["refusals"][f"{solver.id}: {applicability.reason}"] += 1
                continue
            status, message = verified(problem, solver, handle, verifier)
            tally["outcomes"][f"{solver.id}: {status}"] += 1
            if status is not Status.OK:
                tally["failures"].append({"problem": problem.network_config, "message": message[:600]})
            elif solver.id == NAIVE:
                naive_ok = True
            else:
                second = second or solver.id
    tally["naive"] += naive_ok
    tally["second"] += bool(second)
    if not second:
        tally["without_second"].append(problem.network_config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--all", action="store_true", help="ask every solver")
    parser.add_argument(
        "--stop-after", type=float, default=float("inf"), help="seconds after which no problem is begun"
    )
    parser.add_argument("--limit", type=int, help="only the first N problems of each suite")
    arguments = parser.parse_args()
    handle = miofind.Handle(compiler=Compiler(BinaryCache()))
    report: dict[str, Any] = {
        "gpu": handle.device.name,
        "versions": versions(handle.device),
        "command": shlex.join(["python", *sys.argv]),
        "suites": {},
    }
    started = time.monotonic()
    for name in ("wild_3d", "wild"):
        entries = load_suite(name).problems()[: arguments.limit]
        tally = report["suites"][name] = run_suite(entries, handle, arguments.all, started + arguments.stop_after)
        print_tally(name, tally)
        if arguments.json:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def run_suite(
    entries: Sequence[SuiteProblem], handle: miofind.Handle, every_solver: bool, deadline: float
) -> dict[str, Any]:
    """What became of each problem of a suite, counted."""
    start = time.monotonic()
    compile_ahead((entry.problem for entry in entries), handle)
    tally: dict[str, Any] = {
        "rows": sum(entry.count for entry in entries),
        "distinct": len(entries),
        "problems": 0,
        "naive": 0,
        "second": 0,
        "compile_seconds": round(time.monotonic() - start, 1),
        "refusals": Counter(),
        "outcomes": Counter(),
        "failures": [],
        "without_second": [],
    }
    for entry in entries:
        if time.monotonic() > deadline:
            break
        tally["problems"] += 1
        run_problem(entry.problem, handle, tally, every_solver=every_solver)
    tally["seconds"] = round(time.monotonic() - start, 1)
    return tally


def print_tally(name: str, tally: dict[str, Any]) -> None:
    """Print a suite's counts, its refusals by reason and its failures."""
    print(
        f"\n{name}: {tally['problems']} of {tally['distinct']} distinct problems ({tally['rows']} rows) in "
        f"{tally['seconds']} s; {NAIVE} solves {tally['naive']}, a second solver {tally['second']}; "
        f"{len(tally['failures'])} failures"
    )
    for reason, count in tally["refusals"].most_common(40):
        print(f"  {count:5d}  {reason}")
    for failure in tally["failures"][:20]:
        print(f"  FAILED {failure['problem']}: {failure['message'][:200]}")


if __name__ == "__main__":
    main()
