"""Every problem of the wild suites: does ConvDirectNaive solve it, does a second solver, and why not.

    python benchmarks/wild.py --json benchmarks/results/wild_h200.json [--limit N]

Needs a GPU. Each solution is verified by both gates; a problem counts for a solver only where it passed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import miofind
from miofind.candidate import Candidate, Status
from miofind.compiler import BinaryCache, Compiler
from miofind.environment import versions
from miofind.errors import MiofindError
from miofind.invoker import make_invoker
from miofind.problem import ProblemDescription
from miofind.solver import Solver, solvers
from miofind.suites import load_suite
from miofind.verify import Verifier

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


def run_problem(problem: ProblemDescription, handle: miofind.Handle, tally: dict[str, Any]) -> None:
    naive_ok, second = False, ""
    with Verifier(problem, handle.device, handle.compiler) as verifier:
        for solver in solvers().values():
            if handle.device.place not in {key.place for key in solver.keys}:
                continue
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
    parser.add_argument("--limit", type=int, help="only the first N problems of each suite")
    arguments = parser.parse_args()
    handle = miofind.Handle(compiler=Compiler(BinaryCache()))
    report: dict[str, Any] = {"gpu": handle.device.name, "versions": versions(handle.device),
                              "command": "python benchmarks/wild.py", "suites": {}}  # fmt: skip
    for name in ("wild", "wild_3d"):
        tally: dict[str, Any] = {"problems": 0, "naive": 0, "second": 0, "refusals": Counter(), "outcomes": Counter(),
                                 "failures": [], "without_second": []}  # fmt: skip
        start = time.monotonic()
        entries = load_suite(name).problems()[: arguments.limit]
        compile_ahead((entry.problem for entry in entries), handle)
        tally["compile_seconds"] = round(time.monotonic() - start, 1)
        for entry in entries:
            tally["problems"] += 1
            run_problem(entry.problem, handle, tally)
        tally["seconds"] = round(time.monotonic() - start, 1)
        report["suites"][name] = tally
        print(f"\n{name}: {tally['problems']} problems in {tally['seconds']} s; {NAIVE} solves {tally['naive']}, "
              f"a second solver {tally['second']}; {len(tally['failures'])} failures")  # fmt: skip
        for reason, count in tally["refusals"].most_common(40):
            print(f"  {count:5d}  {reason}")
        for failure in tally["failures"][:20]:
            print(f"  FAILED {failure['problem']}: {failure['message'][:200]}")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
