"""`miofind run`: a solution run on random data, timed, and verified with --verify."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from miofind.api.solutions import find_solutions
from miofind.cli.failed_candidates import failed_json, left_out_lines
from miofind.cli.options import (
    DRIVER_LINE,
    InputFile,
    db_option,
    device_option,
    example,
    find_options,
    find_options_of,
    json_option,
)
from miofind.cli.output import bytes_text, error_text, print_json, print_text, tflops_text, time_text
from miofind.cli.problems import optional_problem_argument, problem_json, problems_of
from miofind.cli.session import verbose_option
from miofind.cli.solution_table import solution_json
from miofind.device.device import Device, Place
from miofind.driver.line import driver_line
from miofind.errors import InvalidOptionError, WrongResultError
from miofind.find.lookup.failures import failed_outcomes
from miofind.measure.timer import Timer
from miofind.runtime.handle import Handle
from miofind.runtime.solution import Solution
from miofind.solver.candidate import Outcome, Timing
from miofind.verify.claims import claims_of
from miofind.verify.verifier import Verification, Verifier

_SAMPLES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A solution, its time now, and its verdict; None without verification.

    Attributes:
        failed: candidates of its problem that failed here; none of a saved solution's.
    """

    solution: Solution
    timing: Timing
    verdict: Verification | None
    failed: tuple[Outcome, ...] = ()


@click.command(
    context_settings=DRIVER_LINE,
    epilog=example(
        "miofind run convfp16 -n 32 -c 64 -H 56 -W 56 -k 64 -y 3 -x 3 -p 1 -q 1 -F 1 --verify",
        "miofind run --solution best.json --verify",
    ),
)
@optional_problem_argument
@click.option(
    "--solution",
    "file",
    type=InputFile(),
    metavar="FILE",
    help="File of a saved solution, to run instead of the best one.",
)
@click.option("--verify", is_flag=True, help="Verify the result against the float64 reference.")
@find_options
@device_option
@db_option()
@json_option
@verbose_option
def run(
    line: tuple[str, ...],
    file: Path | None,
    verify: bool,
    device: Device,
    database: str | None,
    as_json: bool,
    **find_values: Any,
) -> None:
    """Run a solution on random data and time it.

    The solution is the best one of PROBLEM, found first where the FindDB has no answer, or a saved one. PROBLEM is
    written as for `miofind find`.
    """
    problems = () if file is not None and not line else problems_of(line)
    options = find_options_of(**find_values)
    runs = []
    with Handle(device, database=database) as handle:
        if file is not None:
            solutions = [Solution.load(file, handle)]
            if problems and solutions[0].problem not in problems:
                raise InvalidOptionError(f"{file} solves {driver_line(solutions[0].problem)}: leave the problem out")
        else:
            solutions = [find_solutions(problem, options=options, handle=handle)[0] for problem in problems]
        for solution in solutions:
            failed = failed_outcomes(solution.problem.flattened, options, handle) if file is None else ()
            runs.append(replace(_run(solution, handle, verify), failed=failed))
            if not as_json:
                _show(runs[-1], handle)
    if as_json:
        print_json({"device": device.identity, "runs": [_json(run) for run in runs]})
    wrong = [run for run in runs if run.verdict is not None and not run.verdict.ok]
    if wrong:
        raise WrongResultError("\n".join(f"{run.solution.id}: {run.verdict.message}" for run in wrong if run.verdict))


def _run(solution: Solution, handle: Handle, verify: bool) -> _Run:
    invoker = solution.runner.prepare()
    problem, device, verdict = solution.problem.flattened, handle.device, None
    if verify:
        solver = handle.registry.named(solution.solver_id)
        claims = claims_of(solver, problem, device, solution.config, handle.compiler)
        with Verifier(problem, device, handle.compiler) as verifier:
            verdict = verifier.verify(invoker, claims)
    with Timer(problem, device, handle.compiler) as timer:
        timed = timer.prepare(invoker)
        timing = timer.timing(timer.samples(timed, invoker, _SAMPLES))
    return _Run(solution=solution, timing=timing, verdict=verdict)


def _show(run: _Run, handle: Handle) -> None:
    solution, timing = run.solution, run.timing
    spread = f"min {time_text(timing.min_ms)}, p20 {time_text(timing.p20_ms)}, p80 {time_text(timing.p80_ms)}"
    print_text(driver_line(solution.problem))
    print_text(f"  solution   {solution.id} ({solution.algorithm.value}, {solution.library.value})")
    caches = ", cold L2 cache" if solution.device.place is Place.CUDA else ""
    print_text(f"  time       {time_text(timing.time_ms)} ms ({spread}; {timing.samples} samples{caches})")
    print_text(f"  rate       {tflops_text(solution.problem.flops, timing.time_ms)} TFLOP/s")
    print_text(f"  workspace  {bytes_text(solution.workspace_bytes)}")
    if run.verdict is not None:
        outcome = f"passed, largest error {error_text(run.verdict.max_error)}" if run.verdict.ok else "FAILED"
        print_text(f"  verify     {outcome}")
    print_text(*left_out_lines(run.failed, handle))


def _json(run: _Run) -> dict[str, object]:
    timing, verdict = run.timing, run.verdict
    measured = {
        "time_ms": timing.time_ms,
        "min_ms": timing.min_ms,
        "p20_ms": timing.p20_ms,
        "p80_ms": timing.p80_ms,
        "samples": timing.samples,
        "protocol": timing.protocol,
    }
    verified = (
        None if verdict is None else {"ok": verdict.ok, "message": verdict.message, "max_error": verdict.max_error}
    )
    return problem_json(run.solution.problem) | {
        "solution": solution_json(run.solution),
        "timing": measured,
        "verification": verified,
        "failed": failed_json(run.failed),
    }
