"""`miofind db null-test`: a test of the timing protocol on a device."""

from __future__ import annotations

import click

from miofind.bench.null_test import (
    DEFAULT_PROBLEM,
    LEAST_FOUND,
    MOST_DIFFERENT,
    NullTestOptions,
    NullTestReport,
    PairSeries,
    null_test,
)
from miofind.cli.options import DRIVER_LINE, Number, device_option, example, json_option, only_option
from miofind.cli.output import Sheet, print_json, print_text
from miofind.cli.problems import optional_problem_argument, problem_json, problems_of
from miofind.cli.progress import counted
from miofind.cli.session import verbose_option
from miofind.compiler import BinaryCache, Compiler
from miofind.device.device import Device
from miofind.driver.line import driver_line
from miofind.options import FindOptions


@click.command(
    "null-test",
    context_settings=DRIVER_LINE,
    epilog=example(
        "miofind db null-test",
        "miofind db null-test --pairs 100 --slowdown 5 convfp16 -n 32 -c 64 -H 56 -W 56 -k 64 -y 3 -x 3 -F 1",
    ),
)
@optional_problem_argument
@click.option(
    "--pairs", type=click.IntRange(min=1), default=400, show_default=True, help="Number of races of each kind."
)
@click.option(
    "--slowdown",
    "percent",
    type=Number(0.5, 100),
    default=3.0,
    show_default=True,
    metavar="PERCENT",
    help="Slowdown of one kernel of a slowed pair.",
)
@only_option
@device_option
@json_option
@verbose_option
def null_test_command(
    line: tuple[str, ...], pairs: int, percent: float, only: tuple[str, ...], device: Device, as_json: bool
) -> None:
    """Test the timing protocol on this device.

    A kernel races against itself, which must hardly ever be called a difference, and against itself made slower, which
    must nearly always be found. PROBLEM, one direction of it, is what the kernel computes; the default is a small one.

    The exit code is 1 where either does not hold. On the CPU place times vary by 5 %, so that a slowdown of 3 % does
    not show: take a larger --slowdown there.
    """
    problems = problems_of(line) if line else (DEFAULT_PROBLEM,)
    if len(problems) > 1:
        raise click.UsageError("null-test takes one direction: add -F 1, -F 2 or -F 4")
    options = NullTestOptions(pairs=pairs, slowdown=percent / 100, find=FindOptions(only=only))
    with counted("null-test", 2 * pairs) as advance:
        report = null_test(problems[0].flattened, device, Compiler(BinaryCache()), options, advance)
    if as_json:
        print_json(_json(report, device))
    else:
        _show(report, device)
    if not report.ok:
        raise click.exceptions.Exit(1)


_COLUMNS = ("pairs", "count", "called different", "share", "bound", "noise", "rounds", "contended")


def _show(report: NullTestReport, device: Device) -> None:
    print_text(f"{device.name}, protocol {report.protocol}, {report.solver_id}: {driver_line(report.problem)}")
    percent = f"{100 * report.slowdown:g} % slower"
    made = Sheet("", _COLUMNS, right=_COLUMNS[1:])
    for name, series, is_ok, bound in _judged(report, percent):
        cells = (f"{series.called}", f"{100 * series.share:.1f} %", bound, f"{100 * series.noise:.2f} %")
        style = "" if is_ok else "red"
        made.add(name, f"{series.pairs}", *cells, f"{series.rounds}", f"{series.contended}", style=style)
    made.print()
    print_text("the protocol keeps its promises here" if report.ok else "the protocol does not keep its promises here")


def _judged(report: NullTestReport, percent: str) -> list[tuple[str, PairSeries, bool, str]]:
    least = f">= {100 * LEAST_FOUND:g} %"
    return [
        ("equal", report.equal, report.equal.share <= MOST_DIFFERENT, f"<= {100 * MOST_DIFFERENT:g} %"),
        (f"{percent}, by one more launch", report.slowed, report.slowed.share >= LEAST_FOUND, least),
        (f"{percent}, by scaled samples", report.scaled, report.scaled.share >= LEAST_FOUND, least),
    ]


def _json(report: NullTestReport, device: Device) -> dict[str, object]:
    return problem_json(report.problem) | {
        "device": device.identity,
        "solver": report.solver_id,
        "config": report.config,
        "protocol": report.protocol,
        "slowdown": report.slowdown,
        "equal": _series_json(report.equal) | {"most": MOST_DIFFERENT},
        "slowed": _series_json(report.slowed) | {"least": LEAST_FOUND},
        "scaled": _series_json(report.scaled) | {"least": LEAST_FOUND},
        "ok": report.ok,
    }


def _series_json(series: PairSeries) -> dict[str, object]:
    return {
        "pairs": series.pairs,
        "called_different": series.called,
        "share": series.share,
        "noise": series.noise,
        "blocks": series.rounds,
        "contended": series.contended,
    }
