"""`miofind tune`: measures many problems into the FindDB, and says what won."""

from __future__ import annotations

import math
from typing import Any

import click

from miofind.cli.options import (
    DRIVER_LINE,
    db_option,
    device_option,
    example,
    exclude_option,
    json_option,
    limit_options,
    only_option,
    time_budget_option,
)
from miofind.cli.output import print_json
from miofind.cli.problems import request_options, requests_of
from miofind.cli.session import verbose_option
from miofind.cli.tune_progress import progress
from miofind.cli.tune_report import print_report, summary_json
from miofind.device import Device
from miofind.handle import Handle
from miofind.options import FindOptions
from miofind.tune import TuneEnd, TuneOptions, TuneStatus
from miofind.tune import tune as tune_problems

_LIMITS = ("only", "exclude", "workspace_limit_bytes", "deterministic", "max_error")
_EXIT_CODES = {TuneEnd.INTERRUPTED: 130, TuneEnd.DEVICE_LOST: 1}


@click.command(
    context_settings=DRIVER_LINE,
    epilog=example(
        "miofind tune --suite resnet50 --batch 32 --dtype float16 --layout NHWC --direction all",
        "miofind tune conv -n 32 -c 64 -H 56 -W 56 -k 64 -y 3 -x 3 -p 1 -q 1 -F 1 --search",
    ),
)
@request_options
@click.option("--search", is_flag=True, help="Search configurations, not only the defaults.")
@click.option("--force", is_flag=True, help="Measure what the FindDB knows already, too.")
@click.option("--in-process", is_flag=True, help="Measure in this process, not in a child of it.")
@time_budget_option
@click.option(
    "--stop-after",
    "stop_after_s",
    type=click.FloatRange(min=0),
    default=math.inf,
    metavar="S",
    help="Seconds after which no further problem is begun.",
)
@only_option
@exclude_option
@limit_options
@device_option
@db_option
@json_option
@verbose_option
def tune(
    search: bool,
    force: bool,
    in_process: bool,
    time_budget_s: float | None,
    stop_after_s: float,
    device: Device,
    database: str | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Measure problems into the FindDB.

    They come from suites, files and a driver line, and each is recorded when it is done.

    Problems that the FindDB answers already are left out, so a tuning that was stopped goes on where it was. Those
    that failed are tried again.
    """
    limits = {name: values.pop(name) for name in _LIMITS}
    requests = requests_of(**values)
    find = FindOptions(
        tuning=search,
        isolate=not in_process,
        time_budget_s=math.inf if time_budget_s is None else time_budget_s,
        **limits,
    )
    options = TuneOptions(find=find, force=force, stop_after_s=stop_after_s)
    with Handle(device, database=database, strict=True) as handle:
        with progress(len(requests)) as on_event:
            summary = tune_problems(requests, handle, options, on_event)
        if as_json:
            print_json(summary_json(summary, handle))
        else:
            print_report(summary, handle)
    failed = int(summary.count(TuneStatus.FAILED) > 0)
    raise click.exceptions.Exit(_EXIT_CODES.get(summary.end, failed))
