"""`miofind bench`: times of miofind's best solutions beside PyTorch's and beside the roofline."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from miofind.bench.ceilings import Ceilings, measure_ceilings
from miofind.bench.comparison import BenchRow, ClassMeans, NetworkTimes, bench, class_means, network_times
from miofind.bench.rivals import Rival
from miofind.cli.options import (
    DRIVER_LINE,
    OutputFile,
    choice,
    db_option,
    device_option,
    example,
    exclude_option,
    limit_options,
    only_option,
    time_budget_option,
)
from miofind.cli.output import Sheet, print_note, print_text, ratio_text, reader_may_leave, time_text
from miofind.cli.problems import problem_json, request_options, requests_of
from miofind.cli.progress import counted
from miofind.cli.session import verbose_option
from miofind.compiler import CompilePool
from miofind.device.device import Device, Library, Place
from miofind.device.environment import versions
from miofind.errors import InvalidOptionError, NoDeviceError, unwritable
from miofind.files import replacing
from miofind.finddb import is_of_database
from miofind.options import FindOptions
from miofind.runtime.handle import Handle
from miofind.suites.short_text import short_direction, short_problem
from miofind.suites.suite import SuiteProblem
from miofind.text.printable import printable_name

_COLUMNS = ("layer", "problem", "dir", "class", "solver", "ms")
_SIDES = {
    Rival.TORCH: ("torch ms", "ratio"),
    Rival.ONE_PASS: ("one-pass ms", "one-pass ratio"),
    Rival.CUDNN: ("cudnn ms", "cudnn ratio"),
}
_FLOOR = "of floor"
_MEANS = ("class", "problems", "ratio", "least", "of floor")


@click.command(
    name="bench",
    context_settings=DRIVER_LINE,
    epilog=example(
        "miofind bench --suite yardstick --dtype float16 --layout NHWC --direction forward --against torch",
        "miofind bench --suite resnet50 --batch 32 --against torch --only-library plain --json out.json",
        "miofind bench --suite resnet50_fused --dtype float16 --layout NHWC --against torch --against one-pass",
    ),
)
@request_options
@click.option(
    "--against",
    multiple=True,
    type=choice(Rival),
    help="What to time, too, in turn on the same buffers: torch (eager), one-pass (cuDNN's best and one element-wise "
    "kernel behind it), cudnn (its best, fused where the problem is); repeatable.",
)
@click.option(
    "--only-library", type=choice(Library), multiple=True, help="Libraries whose solvers take part; repeatable."
)
@click.option(
    "--exclude-library", type=choice(Library), multiple=True, help="Libraries whose solvers are left out; repeatable."
)
@only_option
@exclude_option
@click.option("--search", is_flag=True, help="Search configurations of problems that the FindDB does not answer.")
@time_budget_option
@limit_options
@device_option
@db_option()
@click.option("--json", "json_file", type=OutputFile(), metavar="FILE", help="File for the figures; - is stdout.")
@verbose_option
def bench_(
    against: tuple[Rival, ...],
    only_library: tuple[str, ...],
    exclude_library: tuple[str, ...],
    only: tuple[str, ...],
    exclude: tuple[str, ...],
    search: bool,
    time_budget_s: float | None,
    workspace_limit_bytes: int | None,
    deterministic: bool,
    strict_nonfinite: bool,
    max_error: float | None,
    device: Device,
    database: str | None,
    json_file: Path | None,
    **values: Any,
) -> None:
    """Time the best solution of each problem.

    Problems that the FindDB does not answer are found first. The ratio is the other side's time over miofind's; all
    are measured in turn in this run. A suite's sums count each layer as often as the network has it. The floor is the
    least time that the arithmetic and memory ceilings, measured at the start, allow, plus 1 us. Ctrl-C ends the
    benchmark and prints the rows measured so far.
    """
    requests = requests_of(**values)
    if device.place is Place.CPU:
        raise NoDeviceError("bench needs a GPU, and this machine has none that can be used: see `miofind doctor`")
    options = FindOptions(
        tuning=search,
        time_budget_s=time_budget_s,
        only=(*only, *only_library),
        exclude=(*exclude, *exclude_library),
        workspace_limit_bytes=workspace_limit_bytes,
        deterministic=deterministic,
        strict_nonfinite=strict_nonfinite,
        max_error=max_error,
    )
    with Handle(device, database=database) as handle:
        ceilings = measure_ceilings(handle.device)
        rivals = [rival for rival in Rival if rival in against]
        rows = _timed(requests, handle, options, ceilings, against=rivals)
    means = class_means(rows)
    if json_file is not None:
        _write_json(json_file, _report(rows, means, device, ceilings, rivals))
    if str(json_file) != "-":
        _print(rows, means, device, rivals)
    if len(rows) < len(requests):
        raise KeyboardInterrupt
    if any(row.time_ms is None for row in rows):
        raise click.exceptions.Exit(1)


def _timed(
    requests: Sequence[SuiteProblem],
    handle: Handle,
    options: FindOptions,
    ceilings: Ceilings,
    *,
    against: Sequence[Rival],
) -> list[BenchRow]:
    """The rows of the problems, those measured so far where Ctrl-C ends it.

    Raises:
        KeyboardInterrupt: there is none yet.
    """
    rows: list[BenchRow] = []
    with CompilePool() as pool, counted("found, then timed", 2 * len(requests)) as advance:

        def take(row: BenchRow) -> None:
            rows.append(row)
            advance()

        try:
            bench(
                requests,
                handle,
                options,
                against=against,
                ceilings=ceilings,
                pool=pool,
                on_found=advance,
                on_row=take,
            )
        except KeyboardInterrupt:
            if not rows:
                raise
    return rows


def _print(rows: list[BenchRow], means: list[ClassMeans], device: Device, against: Sequence[Rival]) -> None:
    shown = [name for rival in against or (Rival.TORCH,) for name in _SIDES[rival]]
    sheet = Sheet(device.name, (*_COLUMNS, *shown, _FLOOR), right=("ms", *shown, _FLOOR), spare=("layer", "class"))
    for row in rows:
        problem = row.entry.problem
        sheet.add(
            row.entry.layer,
            short_problem(problem),
            short_direction(problem),
            row.problem_class,
            row.solution.solver_id if row.solution else "-",
            _number(row.time_ms, time_text),
            *(text for rival in against or (Rival.TORCH,) for text in _compared(row, rival)),
            _number(row.floor_fraction, ratio_text),
        )
    sheet.print()
    for row in rows:
        if row.message:
            name = printable_name(row.entry.layer)
            print_note(f"{name} {row.entry.problem}: {row.message.splitlines()[0]}")
    summary = Sheet("geometric means", _MEANS, right=_MEANS[1:])
    for mean in means:
        summary.add(
            mean.name,
            str(mean.count),
            _number(mean.ratio, ratio_text),
            _number(mean.least_ratio, ratio_text),
            _number(mean.floor_fraction, ratio_text),
        )
    summary.print()
    if set(against) - {Rival.TORCH}:
        _print_networks(network_times(rows, against), against)
    print_text("ratio: the other's time / miofind's, above 1 miofind is faster; of floor: floor / miofind's time")


def _compared(row: BenchRow, rival: Rival) -> tuple[str, str]:
    return _number(row.rivals_ms[rival], time_text), _number(row.ratio_of(rival), ratio_text)


def _print_networks(networks: Sequence[NetworkTimes], against: Sequence[Rival]) -> None:
    """Sums of suites, and what rivals take more: by the sums, and by the geometric mean of the layers' ratios."""
    columns = ["miofind ms", *(name for rival in against for name in (f"{rival} ms", "ratio", "mean"))]
    sheet = Sheet("sums", ("suite", "layers", *columns), right=("layers", *columns))
    for network in networks:
        cells = [_number(network.sums_ms["miofind"], time_text)]
        for rival in against:
            cells += [
                _number(network.sums_ms[rival], time_text),
                _number(network.sum_ratio(rival), ratio_text),
                _number(network.ratios[rival], ratio_text),
            ]
        sheet.add(network.name, str(network.layers), *cells)
    sheet.print()


def _number(value: float | None, text: Any) -> str:
    return "-" if value is None else str(text(value))


def _report(
    rows: list[BenchRow], means: list[ClassMeans], device: Device, ceilings: Ceilings, against: Sequence[Rival]
) -> dict[str, object]:
    return {
        "gpu": device.name,
        "versions": bench_versions(device),
        "command": shlex.join(["miofind", *sys.argv[1:]]),
        "ceilings": asdict(ceilings),
        "means": means_json(means),
        "networks": [network_json(network) for network in network_times(rows, against)],
        "rows": list(map(row_json, rows)),
    }


def means_json(means: Iterable[ClassMeans]) -> list[dict[str, object]]:
    """What every JSON output says of classes of problems."""
    return [
        {
            "class": mean.name,
            "problems": mean.count,
            "ratio": mean.ratio,
            "least_ratio": mean.least_ratio,
            "floor_fraction": mean.floor_fraction,
        }
        for mean in means
    ]


def network_json(network: NetworkTimes) -> dict[str, object]:
    """What every JSON output says of a network."""
    return {
        "suite": network.name,
        "layers": network.layers,
        "sums_ms": dict(network.sums_ms),
        "sum_ratios": {rival: network.sum_ratio(rival) for rival in network.ratios},
        "mean_ratios": dict(network.ratios),
    }


def row_json(row: BenchRow) -> dict[str, object]:
    """What every JSON output says of a problem that was timed."""
    return {
        "suite": row.entry.suite,
        "layer": row.entry.layer,
        **problem_json(row.entry.problem),
        "class": row.problem_class,
        "solution": row.solution.id if row.solution else None,
        "time_ms": row.time_ms,
        "count": row.entry.count,
        "torch_ms": row.rival_ms,
        "one_pass_ms": row.one_pass_ms,
        "cudnn_ms": row.cudnn_ms,
        "ratio": row.ratio,
        "floor_ms": row.floor_ms,
        "floor_fraction": row.floor_fraction,
        "message": row.message,
    }


def bench_versions(device: Device) -> dict[str, str]:
    """Versions of what takes part, of PyTorch where it was imported."""
    found = dict(versions(device))
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(torch.__version__)
    return found


def _write_json(target: Path, report: dict[str, object]) -> None:
    text = json.dumps(report, indent=1, allow_nan=False)
    if str(target) == "-":
        with reader_may_leave():
            click.echo(text)
        return
    if is_of_database(target):
        raise InvalidOptionError(f"--json {target} is a database or its log, which would be lost: name another file")
    try:
        with replacing(target) as file:
            file.write(text + "\n")
    except OSError as error:
        raise unwritable(f"--json {target}", error) from error
