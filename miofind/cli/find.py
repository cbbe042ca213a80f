"""`miofind find`: the solutions of a problem, fastest first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from miofind.api import find_solutions
from miofind.cli.options import (
    DRIVER_LINE,
    db_option,
    device_option,
    example,
    find_options,
    find_options_of,
    json_option,
)
from miofind.cli.output import bytes_text, print_json, print_note, print_text, stderr
from miofind.cli.problems import problem_argument, problem_json, problems_of
from miofind.cli.session import verbose_option
from miofind.cli.solution_table import solution_json, solution_sheet
from miofind.device import Device
from miofind.driver.line import driver_line
from miofind.errors import NoSolutionError
from miofind.found import Solution
from miofind.handle import Handle
from miofind.options import FindOptions
from miofind.problem import ProblemDescription


@click.command(
    context_settings=DRIVER_LINE,
    epilog=example(
        "miofind find conv -n 32 -c 64 -H 56 -W 56 -k 64 -y 3 -x 3 -p 1 -q 1 -F 1",
        "miofind find convfp16 -n 32 -c 64 -H 56 -W 56 -k 64 -y 3 -x 3 -p 1 -q 1 --layout NHWC --only direct,cublas",
    ),
)
@problem_argument
@find_options
@device_option
@db_option
@click.option("--top", type=click.IntRange(min=1), metavar="N", help="Show the first N solutions only.")
@click.option(
    "--save",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the first solution and its kernels to a file that `miofind run --solution` and Solution.load read.",
)
@json_option
@verbose_option
def find(
    line: tuple[str, ...],
    device: Device,
    database: str | None,
    top: int | None,
    save: Path | None,
    as_json: bool,
    **find_values: Any,
) -> None:
    """Find the solutions of PROBLEM, fastest first.

    PROBLEM is a MIOpenDriver line (conv, convfp16 or convbfp16 and its flags; -F 0 asks for all three directions, and
    --layout, --dtype, --math and --pad_after_h say what the driver cannot) or a network_config.
    """
    problems = problems_of(line)
    options = find_options_of(**find_values)
    if save is not None and len(problems) > 1:
        raise click.UsageError("--save takes one direction: add -F 1, -F 2 or -F 4")
    found: list[tuple[ProblemDescription, list[Solution]]] = []
    unsolved: list[NoSolutionError] = []
    with Handle(device, database=database) as handle:
        for problem in problems:
            try:
                found.append((problem, _found(problem, options, handle)))
            except NoSolutionError as error:
                unsolved.append(error)
                found.append((problem, []))
        if save is not None and found[0][1]:
            found[0][1][0].save(save)
            print_note(f"saved {found[0][1][0].id} to {save}")
    if as_json:
        print_json({"device": device.identity, "problems": [_json(problem, s[:top]) for problem, s in found]})
    else:
        print_text(f"{device.name}, {device.place.value}")
        for problem, solutions in found:
            _show(problem, solutions, top)
    if unsolved:
        raise NoSolutionError("\n".join(map(str, unsolved)))


def _found(problem: ProblemDescription, options: FindOptions, handle: Handle) -> list[Solution]:
    with stderr().status(f"finding: {driver_line(problem)}"):
        return find_solutions(problem, options=options, handle=handle)


def _show(problem: ProblemDescription, solutions: list[Solution], top: int | None) -> None:
    work = f"{problem.flops / 1e9:.3g} GFLOP, {bytes_text(problem.bytes)}"
    title = f"\n{problem.direction.value}  {driver_line(problem)}  ({work})"
    if not solutions:
        print_text(f"{title}\n  no solution")
        return
    solution_sheet(title, solutions[:top]).print()
    if top is not None and len(solutions) > top:
        print_text(f"{len(solutions) - top} more: leave --top out to see them")


def _json(problem: ProblemDescription, solutions: list[Solution]) -> dict[str, object]:
    return problem_json(problem) | {"solutions": [solution_json(solution) for solution in solutions]}
