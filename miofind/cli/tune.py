"""`miofind tune`: many problems measured into the FindDB, with a report of the winners."""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import click
from click.core import ParameterSource

from miofind.cli.options import (
    DRIVER_LINE,
    Number,
    arch_option,
    db_option,
    device_option,
    example,
    exclude_option,
    isolate_option,
    json_option,
    likely_option,
    limit_options,
    only_option,
    retry_failed_option,
    search_options,
    time_budget_option,
)
from miofind.cli.output import print_json, print_note, stderr
from miofind.cli.problems import named_requests, request_options, requests_of
from miofind.cli.scheduler import scheduler_options
from miofind.cli.session import verbose_option
from miofind.cli.tune_display import display
from miofind.cli.tune_forecast import print_forecasts
from miofind.cli.tune_report import print_report, summary_json
from miofind.compiler import BinaryCache, CompilePool, Compiler
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device, Place, cuda_device_count
from miofind.errors import InvalidProblemError, MissingLibraryError, NoDeviceError
from miofind.finddb import MEMORY, Store, user_path
from miofind.options import FindOptions
from miofind.process.interrupts import terminable
from miofind.runtime.handle import Handle
from miofind.suites import SuiteProblem, problem_class
from miofind.tune.forecast import Forecast, forecast
from miofind.tune.service import TuneEnd, TuneOptions, TuneStatus, TuneSummary, tasks_of
from miofind.tune.service import tune as tune_problems

logger = logging.getLogger(__name__)

_FIND = (
    *("only", "exclude", "workspace_limit_bytes", "deterministic", "strict_nonfinite", "max_error"),
    *("likely", "trials", "patience", "seed", "retry_failed"),
)
_EXIT_CODES = {TuneEnd.INTERRUPTED: 130, TuneEnd.DEVICE_LOST: 1}


def _gpus(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[Device, ...]:
    if value is None:
        return ()
    if value.lower() == "all":
        count = cuda_device_count()
        if count == 0:
            raise NoDeviceError("--gpus all: this machine has no GPU that CUDA sees: check `nvidia-smi`")
        return tuple(map(Device.cuda, range(count)))
    if re.fullmatch(r"\d{1,4}(,\d{1,4})*", value, re.ASCII) is None:
        raise click.BadParameter(f"{value!r} names no GPUs: write all, or ordinals such as 0,1")
    return tuple(map(Device.cuda, dict.fromkeys(map(int, value.split(",")))))


gpus_option = click.option(
    "--gpus", callback=_gpus, metavar="NAMES", help="GPUs of this host: all, or some such as 0,1."
)


@click.command(
    context_settings=DRIVER_LINE,
    epilog=example(
        "miofind tune --suite resnet50 --batch 32 --dtype float16 --layout NHWC --direction all --gpus all",
        "miofind tune conv -n 32 -c 64 -H 56 -W 56 -k 64 -y 3 -x 3 -p 1 -q 1 -F 1 --search",
    ),
)
@request_options
@click.option("--search", is_flag=True, help="Search configurations beside the defaults.")
@likely_option
@click.option(
    "--draw",
    "drawn",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="With --likely: number of other candidates to measure, drawn at random by --seed: rows to train a model with.",
)
@search_options
@click.option("--force", is_flag=True, help="Measure problems that the FindDB answers already, too.")
@click.option("--recheck", is_flag=True, help="Measure the problems alone that the FindDB has queued for it.")
@click.option(
    "--stored",
    is_flag=True,
    help="Measure again what the FindDB holds of the problems, or of all it knows, with the present code and drivers.",
)
@retry_failed_option
@click.option("--dry-run", is_flag=True, help="Print a forecast of the tuning and its time; measure nothing.")
@isolate_option(default=True)
@time_budget_option
@click.option(
    "--stop-after",
    "stop_after_s",
    type=Number(min=0),
    default=math.inf,
    metavar="S",
    help="Seconds after which no further problem begins.",
)
@only_option
@exclude_option
@limit_options
@device_option
@gpus_option
@arch_option
@db_option()
@scheduler_options(required=False)
@click.option("--campaign", metavar="NAME", help="With --scheduler: its name.  [default: by problems and options]")
@json_option
@verbose_option
def tune(
    recheck: bool,
    stored: bool,
    dry_run: bool,
    device: Device,
    gpus: tuple[Device, ...],
    archs: tuple[Device, ...],
    database: str | None,
    scheduler: str | None,
    tls_ca: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    campaign: str | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Measure problems into the FindDB.

    Problems come from suites, files and PROBLEM, written as for `miofind find`. Long and frequent ones are measured
    first, and each is recorded when it is done.

    Problems that the FindDB answers already are left out, so that a tuning that was stopped or killed goes on where it
    was. Candidates that failed here before are left out, too, without --retry-failed. After an upgrade, --stored brings
    a FindDB up to date without a search. Ctrl-C stops the tuning within seconds and prints its report.

    With --scheduler the hosts of a Dask cluster measure, by a queue on the server of --db.
    """
    tls = (tls_ca, tls_cert, tls_key)
    if scheduler is not None:
        from miofind.cli.tune_fleet import Cluster, server_of, tune_by_fleet

        where = _agents_devices(device, gpus, archs, values)
        if recheck or dry_run:
            raise click.UsageError("--scheduler measures a campaign: --recheck and --dry-run are of one host")
        cluster = Cluster(url=server_of(database), scheduler=scheduler, tls=tls, devices=where)
        options = _options(values, recheck=False, stored=stored)
        tune_by_fleet(cluster, requests_of(**values), options, campaign, as_json=as_json)
    if campaign is not None or any(tls):
        raise click.UsageError("--campaign and --tls-... go with --scheduler")
    devices = _devices(device, gpus, archs, dry_run=dry_run, in_process=not values["isolate"])
    options = _options(values, recheck=recheck, stored=stored)
    compiler = Compiler(BinaryCache())
    with contextlib.ExitStack() as stack:
        stack.enter_context(terminable())
        if dry_run:
            database = _forecast_database(database)
        handles = [
            stack.enter_context(Handle(each, database=database, strict=True, compiler=compiler)) for each in devices
        ]
        requests = _requests(values, handles, options)
        if dry_run:
            print_forecasts(_forecasts(requests, handles, options), as_json=as_json)
            return
        if not gpus:
            _note_missing_gpu(device)
        summary = _tuned(requests, handles, options)
        if as_json:
            print_json(summary_json(summary, handles))
        else:
            print_report(summary, handles)
    failed = int(summary.count(TuneStatus.FAILED) > 0)
    raise click.exceptions.Exit(_EXIT_CODES.get(summary.end, failed))


def _devices(
    device: Device, gpus: tuple[Device, ...], archs: tuple[Device, ...], *, dry_run: bool, in_process: bool
) -> tuple[Device, ...]:
    """The devices of --device, --gpus or --arch."""
    named = click.get_current_context().get_parameter_source("device") is ParameterSource.COMMANDLINE
    if named + bool(gpus) + bool(archs) > 1:
        raise click.UsageError("--device, --gpus and --arch exclude each other: name devices in one way")
    if archs and not dry_run:
        raise click.UsageError("--arch describes GPUs that need not be here, so nothing can be measured: add --dry-run")
    if in_process and len(gpus) > 1:
        raise click.UsageError("--in-process measures on one GPU: leave it out, and each GPU gets a process")
    return gpus or archs or (device,)


def _note_missing_gpu(device: Device) -> None:
    """Say why the CPU place is tuned where nobody asked for it: it takes hours that are wasted if a GPU was meant."""
    named = click.get_current_context().get_parameter_source("device") is ParameterSource.COMMANDLINE
    if named or device.place is not Place.CPU:
        return
    try:
        reason = f"this machine has {cuda_device_count()}"
    except (MissingLibraryError, NoDeviceError) as error:
        reason = str(error)
    print_note(f"tune: no GPU is used: {reason}")


def _agents_devices(
    device: Device, gpus: tuple[Device, ...], archs: tuple[Device, ...], values: dict[str, Any]
) -> tuple[str, ...]:
    """What the agents of a cluster measure with, as options of `miofind fleet worker`."""
    if gpus or archs or not values["isolate"] or values["stop_after_s"] < math.inf:
        raise click.UsageError(
            "--gpus, --arch, --in-process and --stop-after are of this host: with --scheduler agents use all GPUs of "
            "theirs, or --device cpu"
        )
    if click.get_current_context().get_parameter_source("device") is not ParameterSource.COMMANDLINE:
        return ("--gpus", "all")
    if device.place is not Place.CPU:
        raise click.UsageError("--device names a GPU of this host: with --scheduler agents use all GPUs of theirs")
    return ("--device", "cpu")


def _forecast_database(database: str | None) -> str:
    """The FindDB to read: one in memory where there is none yet, since a forecast makes none."""
    named = user_path() if database is None else database
    with Store(named) as store:
        return named if store.exists else MEMORY


def _options(values: dict[str, Any], *, recheck: bool, stored: bool) -> TuneOptions:
    """The options of the tuning, taken out of `values`."""
    budget_s = values.pop("time_budget_s")
    find = FindOptions(
        tuning=values.pop("search"),
        isolate=values.pop("isolate"),
        time_budget_s=math.inf if budget_s is None else budget_s,
        **{name: values.pop(name) for name in _FIND},
    )
    return TuneOptions(
        find=find,
        force=values.pop("force"),
        recheck=recheck,
        stored=stored,
        drawn=values.pop("drawn"),
        stop_after_s=values.pop("stop_after_s"),
    )


def _requests(values: dict[str, Any], handles: Sequence[Handle], options: TuneOptions) -> list[SuiteProblem]:
    """The problems that were named; without names, for a re-check all that the FindDB has queued, and for what is
    stored all that the FindDBs know."""
    requests = named_requests(needed=not (options.recheck or options.stored), **values)
    if requests is not None:
        return requests
    for name in ("batch", "dtype", "math", "layout", "directions", "classes"):
        if values[name]:
            flag = "--class" if name == "classes" else f"--{name.removesuffix('s')}"
            raise click.UsageError(f"{flag} says what is asked of suites and files: name one, or leave {flag} out")
    database, kinds = handles[0].database, dict.fromkeys(handle.device.identity for handle in handles)
    if options.recheck:
        suite, listed = (
            "recheck",
            dict.fromkeys(note.network_config for kind in kinds for note in database.rechecks(kind)),
        )
    else:
        keys = (key for kind in kinds for store in database.layers for key in store.problems(kind))
        suite, listed = "stored", dict.fromkeys(key.network_config for key in keys)
    return [
        SuiteProblem(problem=problem, suite=suite, layer=problem_class(problem), count=1)
        for problem in _readable(listed)
    ][: values["limit"]]


def _readable(network_configs: Iterable[str]) -> Iterator[ProblemDescription]:
    """The problems of a FindDB's texts that finds ask it for; each other text is left out with a warning.

    That is one that this release cannot read, or a volume that it finds as images.
    """
    for text in network_configs:
        try:
            problem = ProblemDescription.from_network_config(text)
        except InvalidProblemError as error:
            logger.warning("what the FindDB has of an unknown problem is left out: %s", error)
            continue
        if problem.flattened is problem:
            yield problem
        else:
            logger.warning("what the FindDB has of %s is left out: it is found as %s", text, problem.flattened)


def _forecasts(requests: Sequence[SuiteProblem], handles: Sequence[Handle], options: TuneOptions) -> list[Forecast]:
    """One forecast a kind of device."""
    tasks = tasks_of(requests, handles, options)
    found = []
    with stderr().status("planning"):
        for kind in dict.fromkeys(handle.device.identity for handle in handles):
            of_kind = [handle for handle in handles if handle.device.identity == kind]
            found.append(forecast([task.request for task in tasks if task.kind == kind], of_kind, options))
    return found


def _tuned(requests: Sequence[SuiteProblem], handles: Sequence[Handle], options: TuneOptions) -> TuneSummary:
    on_cuda = any(handle.device.place is Place.CUDA for handle in handles)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(CompilePool()) if on_cuda else None
        on_event = stack.enter_context(display())
        return tune_problems(requests, handles, options, on_event, pool=pool)
