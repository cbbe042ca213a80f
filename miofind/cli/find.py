"""`miofind find`: the solutions of a problem, fastest first."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click

from miofind.api.solutions import find_solutions
from miofind.cli.failed_candidates import failed_json, left_out_lines, show_all_command
from miofind.cli.options import (
    DRIVER_LINE,
    OutputFile,
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
from miofind.cli.solution_table import explained_notes, notes_of, solution_json, solution_sheet
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.driver.line import driver_line
from miofind.errors import DatabaseError, NoPlaceError, NoSolutionError
from miofind.find.lookup.failures import failed_outcomes
from miofind.find.plan import wider_bounds
from miofind.options import FindOptions, Order
from miofind.runtime.handle import Handle
from miofind.runtime.solution import Gaps, Solution
from miofind.solver.candidate import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The solutions of a problem, and the facts that are printed below them.

    Attributes:
        measured: number of candidates that the FindDB has times of.
        database: where that FindDB is, None in memory.
        wider_bounds: by solver, the number of default configurations that only `max_error` lets in.
        failed: candidates that failed here.
    """

    problem: ProblemDescription
    solutions: list[Solution] = field(default_factory=list)
    measured: int = 0
    database: str | None = None
    wider_bounds: dict[str, int] = field(default_factory=dict)
    failed: tuple[Outcome, ...] = ()


@click.command(
    context_settings=DRIVER_LINE,
    epilog=example(
        "miofind find conv -n 32 -c 64 -H 56 -W 56 -k 64 -y 3 -x 3 -p 1 -q 1 -F 1",
        "miofind find --x 32,64,56,56 --w 64,64,3,3 --padding 1 --dtype float16 --layout NHWC --only direct,cublas",
    ),
)
@problem_argument
@find_options
@device_option
@db_option()
@click.option("--top", type=click.IntRange(min=1), metavar="N", help="Number of solutions to show.  [default: all]")
@click.option(
    "--save",
    type=OutputFile(),
    metavar="FILE",
    help="File for the first solution and its kernels; `miofind run --solution` and Solution.load read it.",
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

    PROBLEM is a MIOpenDriver line, shapes, or a network_config, miofind's or MIOpen's.

    \b
    A MIOpenDriver line, its flags with their defaults:
      conv, convfp16, convbfp16  float32, float16, bfloat16; --dtype float64
      -n 100 -c 3 -k 32          batch, input channels, output channels
      -H 32 -W 32                height and width of the input
      -y 3 -x 3                  height and width of the filter
      -p 0 -q 0                  padding; behind: --pad_after_h, --pad_after_w
      -u 1 -v 1 -l 1 -j 1        strides, dilations: height, width
      -g 1 -m conv               groups; trans is a transposed convolution
      -F 0                       1 forward, 2 backward data, 4 backward
                                 weights, or their sum; 0 is all three
      --layout NCHW --math ieee  memory order (NHWC); tf32 for float32
      --spatial_dim 2            1 leaves height out; 3 has --in_d, --fil_d,
                                 --pad_d, --conv_stride_d, --dilation_d

    \b
    Shapes, with their defaults but for the first two:
      --x 32,64,56,56            n,c,h,w in every layout; n,c,w; n,c,d,h,w
      --w 64,64,3,3              k,c/groups,y,x
      --padding 0 --stride 1 --dilation 1
                                 one number, or one a dimension as in 1,2;
                                 padding before:after a dimension as in 0:1,0:1,
                                 or same, or valid
      --groups 1 --dtype float32 --layout NCHW --math ieee
      --direction forward        backward_data, backward_weights, all

    \b
    An epilogue, of a forward problem in either form:
      --epilogue bias.residual.relu
                                 what is done to the sums, in this order
      --scale --bias             a factor, a summand of each output channel
      --channel-bias             a summand of each image's output channel
      --residual before          a tensor of the output's shape is added;
                                 after: behind the activation
      --activation relu          clamp (relu6), leaky_relu, silu, gelu,
                                 gelu_tanh, hardswish, sigmoid, tanh, elu, mish
      --parameter-dtype float32  of scale and bias; else the output's
      --epilogue bias.relu.statistics
                                 and each channel's sum, and that of squares
      --epilogue residual.drelu  of backward data: a gradient is added, and the
                                 sum multiplied by a derivative
      --epilogue bias_gradient   of backward weights: dy's sum of each channel

    \b
    MIOpenDriver's CBAInfer, CBAInferfp16 and CBAInferbfp16 have other flags:
      -F 4 -m 3                  4 convolution, bias, activation; 5 without
                                 bias, 6 without activation; -m 3 is relu
      -F 0 -M 1                  with a batch norm of each channel; 1 without
                                 bias, 3 without bias and activation
    """
    problems = problems_of(line)
    options = find_options_of(**find_values)
    if save is not None and len(problems) > 1:
        raise click.UsageError("--save takes one direction: add -F 1, -F 2 or -F 4")
    found: list[_Found] = []
    unsolved: list[NoSolutionError] = []
    with Handle(device, database=database) as handle:
        for problem in problems:
            try:
                found.append(_find(problem, options, handle))
            except NoSolutionError as error:
                unsolved.append(error)
                found.append(_Found(problem=problem, failed=failed_outcomes(problem, options, handle)))
        if as_json:  # the FindDB, which tells ties, is still open
            print_json({"device": device.identity, "problems": [_json(each, top) for each in found]})
        else:
            print_text(f"{device.name}, {device.place.value}")
            for each in found:
                _show(each, top, options, handle)
        if save is not None and found[0].solutions:  # at the end: what was found is shown, whatever becomes of this
            found[0].solutions[0].save(save)
            print_note(f"saved {found[0].solutions[0].id} to {save}")
    if unsolved:
        is_elsewhere = all(isinstance(error, NoPlaceError) for error in unsolved)
        raise (NoPlaceError if is_elsewhere else NoSolutionError)("\n".join(map(str, unsolved)))


def _find(problem: ProblemDescription, options: FindOptions, handle: Handle) -> _Found:
    recorded = problem.flattened
    with stderr().status(f"finding: {driver_line(problem)}"):
        solutions = find_solutions(problem, options=options, handle=handle)
        wider = wider_bounds(recorded, options, handle)
        failed = failed_outcomes(recorded, options, handle)
        found = _Found(problem=problem, solutions=solutions, wider_bounds=wider, failed=failed)
    for store in handle.database.layers:
        with contextlib.suppress(DatabaseError):  # a find goes on without a database, and so does what is told of it
            history = store.history(handle.device.identity, recorded.network_config) if store.exists else None
            rows = [] if history is None else [row for row in history.rows if not row.is_rival]
            if rows:
                measured = {row.candidate for row in rows if row.time_ms is not None}
                return replace(found, measured=len(measured), database=None if store.in_memory else store.location)
    return found


def _gaps_text(gaps: Gaps, budget_s: float) -> list[str]:
    """A line on each gap of an answer, with what closes it."""
    again = f"--find-mode normal --time-budget {max(60, math.ceil(6 * budget_s))}" if budget_s < math.inf else ""
    lines = []
    if gaps.unmeasured:
        left = f"{gaps.unmeasured} of {gaps.candidates} candidates not measured"
        lines.append(f"stopped after {budget_s:g} s: {left}; give {again}")
    if gaps.ended_early:
        lines.append(f"a budget ended an earlier find: {again or '--find-mode normal'} measures the rest")
    if gaps.likely_alone:
        lines.append("the likeliest candidates alone were measured: --find-mode normal measures all")
    if gaps.solvers:
        them = "it" if len(gaps.solvers) == 1 else "them"
        lines.append(f"not measured yet: {', '.join(gaps.solvers)}; --find-mode normal measures {them}")
    return lines


def _show(found: _Found, top: int | None, options: FindOptions, handle: Handle) -> None:
    problem, solutions = found.problem, found.solutions
    work = f"{problem.flops / 1e9:.3g} GFLOP, {bytes_text(problem.bytes)}"
    title = f"\n{problem.direction.value}  {driver_line(problem)}  ({work})"
    if not solutions:
        print_text(*title.split("\n"), "  no solution")
        return
    solution_sheet(title, solutions[:top]).print()
    if top is not None and len(solutions) > top:
        print_text(f"{len(solutions) - top} more: leave --top out to see them")
    print_text(*explained_notes(solutions[:top]))
    untied = [solution.time_ms for solution in solutions[:top] if "tie" not in notes_of(solution)]
    if options.order is not Order.WORKSPACE and untied != sorted(untied):
        print_text("a slower one above a faster one is its tie: of ties the smaller workspace, then error, comes first")
    print_text(*left_out_lines(found.failed, handle))
    print_text(*_gaps_text(solutions[0].solution_list.gaps, options.budget_s))
    if found.wider_bounds:
        left_out = ", ".join(f"{count} of {name}" for name, count in found.wider_bounds.items())
        print_text(f"configurations left out for wider error bounds, unless --max-error lets them in: {left_out}")
    if found.measured > len(solutions) and found.database is not None:
        command = show_all_command(problem.flattened.network_config, found.database)
        print_text(f"the FindDB has times of {found.measured} in all: `{command}` lists them")


def _json(found: _Found, top: int | None) -> dict[str, object]:
    shown = [solution_json(each) | {"notes": list(notes_of(each))} for each in found.solutions[:top]]
    gaps = found.solutions[0].solution_list.gaps if found.solutions else Gaps()
    return problem_json(found.problem) | {
        "candidates": gaps.candidates,
        "unmeasured_candidates": gaps.unmeasured,
        "unmeasured_solvers": list(gaps.solvers),
        "earlier_find_ended_early": gaps.ended_early,
        "likely_alone": gaps.likely_alone,
        "measured": found.measured,
        "wider_bounds": found.wider_bounds,
        "failed": failed_json(found.failed),
        "solutions": shown,
    }
