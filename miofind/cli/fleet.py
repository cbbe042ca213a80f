"""`miofind fleet`: tuning over many hosts by a queue on a PostgreSQL server."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from rich.live import Live

from miofind.cli.fleet_board import print_status, shown_status
from miofind.cli.fleet_compiler import compiler
from miofind.cli.fleet_launch import launch
from miofind.cli.fleet_session import fleet_command, opened, told_or_json
from miofind.cli.fleet_up import up
from miofind.cli.group import CommandGroup
from miofind.cli.options import (
    DRIVER_LINE,
    Number,
    db_option,
    device_option,
    example,
    exclude_option,
    likely_option,
    limit_options,
    only_option,
    retry_failed_option,
    search_options,
    time_budget_option,
)
from miofind.cli.output import count_text, print_json, print_note, print_text, seconds_text, stdout
from miofind.cli.problems import request_options, requests_of
from miofind.cli.store import cache_over, store_options
from miofind.cli.tune import gpus_option
from miofind.compiler import Compiler
from miofind.device.device import Device
from miofind.finddb import Store, user_path
from miofind.fleet import health
from miofind.fleet.agent import AgentEnd, FleetAgent
from miofind.fleet.campaigns import MOST_PRIORITY, checked_name, nominal_seconds, retry, set_paused, submit
from miofind.fleet.database import FleetDatabase, UnreachableError
from miofind.fleet.garbage import collect
from miofind.fleet.metrics import LOOPBACK, MetricsServer
from miofind.fleet.status import FleetStatus, status
from miofind.fleet.values import CampaignRequest, GpuState, JobState
from miofind.options import FindOptions
from miofind.process.interrupts import INTERRUPTED, terminable
from miofind.runtime.handle import Handle
from miofind.tune.values import TuneOptions

Command = TypeVar("Command", bound=Callable[..., Any])

_FIND = (
    *("only", "exclude", "workspace_limit_bytes", "deterministic", "strict_nonfinite", "max_error"),
    *("likely", "trials", "patience", "seed", "retry_failed"),
)
_NAME = click.argument("name", metavar="CAMPAIGN")


@click.group(
    cls=CommandGroup,
    epilog=example("miofind fleet submit --suite resnet50 --name nightly", "miofind fleet status --watch"),
)
def fleet() -> None:
    """Tune on many hosts, by a queue on a PostgreSQL server.

    The server has the queue and the FindDB; an agent on each host measures with all of its GPUs.
    """


def _command(name: str, *examples: str, **settings: Any) -> Callable[[Callable[..., None]], click.Command]:
    """A command of the group."""

    def decorate(function: Callable[..., None]) -> click.Command:
        made = fleet_command(name, *examples, **settings)(function)
        fleet.add_command(made)
        return made

    return decorate


@_command("init", "miofind fleet init --database postgresql://admin@host/miofind")
def init(url: str, as_json: bool) -> None:
    """Make or update the tables of a fleet on a server.

    Those of an older release are brought up to this one's; what they hold stays.
    """
    database = FleetDatabase(url)
    try:
        database.create()
        told = f"{database.where} is ready: submit problems, and start an agent on each host"
        told_or_json({"database": database.where}, told, as_json=as_json)
    finally:
        database.close()


@_command(
    "submit",
    "miofind fleet submit --suite yardstick --dtype float16 --direction all --search --name nightly",
    context_settings=DRIVER_LINE,
)
@request_options
@click.option("--name", "campaign", required=True, metavar="NAME", help="Campaign that the problems belong to.")
@click.option(
    "--priority",
    type=click.IntRange(-MOST_PRIORITY, MOST_PRIORITY),
    metavar="N",
    help="Campaigns of a higher number go first.  [default: as it is, at first 0]",
)
@click.option(
    "--for-device",
    "devices",
    multiple=True,
    metavar="IDENTITY",
    help="Kind of device, as `miofind fleet status --json` has it; repeatable.  [default: all that have agents]",
)
@click.option(
    "--for-stack", "stacks", multiple=True, metavar="STACK", help="Software stack; repeatable.  [default: all]"
)
@click.option("--search", is_flag=True, help="Search configurations beside the defaults.")
@likely_option
@search_options
@click.option("--force", is_flag=True, help="Measure problems that a FindDB answers already, too.")
@click.option("--stored", is_flag=True, help="Measure again what the FindDBs hold of the problems, and nothing else.")
@retry_failed_option
@time_budget_option
@only_option
@exclude_option
@limit_options
@click.option("--dry-run", is_flag=True, help="Print what would be submitted; submit nothing.")
def submit_(
    url: str,
    campaign: str,
    priority: int | None,
    devices: tuple[str, ...],
    stacks: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Have problems tuned by the fleet.

    Problems are named as for `miofind tune`. Each kind of device that has agents, now or later, gets a job for each.
    The command returns at once. The same command again resumes: what was done stays done, what is new is added.
    """
    request = CampaignRequest(
        name=checked_name(campaign),
        options=_options(values),
        devices=devices or None,
        stacks=stacks or None,
        priority=priority,
    )
    requests = requests_of(**values)
    seconds = sum(map(nominal_seconds(request), (each.problem for each in requests)))
    if dry_run:
        found: dict[str, object] = {"campaign": campaign, "problems": len(requests), "estimated_gpu_seconds": seconds}
        problems = count_text(len(requests), "problem")
        told = f"{problems}, about {seconds_text(seconds)} of a large GPU's time by their sizes"
    else:
        with opened(url) as database:
            done = submit(database, request, requests)
        found = asdict(done) | {"name": campaign, "estimated_gpu_seconds": seconds}
        problems, jobs = count_text(done.problems, "problem"), count_text(done.jobs, "new job")
        told = f"{campaign}: {problems}, {done.added} of them new, and {jobs}"
    told_or_json(found, told, as_json=as_json)


def _options(values: dict[str, Any]) -> TuneOptions:
    """The options of the campaign, taken out of `values`."""
    budget_s = values.pop("time_budget_s")
    find = FindOptions(
        tuning=values.pop("search"),
        isolate=True,
        time_budget_s=math.inf if budget_s is None else budget_s,
        **{name: values.pop(name) for name in _FIND},
    )
    return TuneOptions(find=find, force=values.pop("force"), stored=values.pop("stored"))


@_command("worker", "miofind fleet worker --gpus all", "miofind fleet worker --device cpu --drain-after 3000")
@device_option
@gpus_option
@db_option(about="FindDB of this host, which the server's is filled from.")
@store_options
@click.option(
    "--drain-after", "for_s", type=Number(min=0), metavar="S", help="Seconds after which it ends, as by SIGTERM."
)
@click.option(
    "--until-idle", "until_idle_s", type=Number(min=0), metavar="S", help="Seconds without work after which it ends."
)
@click.option(
    "--metrics-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Answer GET /metrics there, in Prometheus' text format.",
)
@click.option(
    "--metrics-address",
    default=LOOPBACK,
    metavar="ADDRESS",
    show_default=True,
    help="Address that it is answered at; whoever reaches it can read the figures.",
)
def worker(
    url: str,
    device: Device,
    gpus: tuple[Device, ...],
    database: str | None,
    store: str | None,
    store_secret: str | None,
    for_s: float | None,
    until_idle_s: float | None,
    metrics_port: int | None,
    metrics_address: str,
    as_json: bool,
) -> None:
    """Work for the fleet: the agent of a host.

    A process for each GPU measures what the queue has for its kind, into this host's FindDB as a tuning does, and the
    rows are merged into the server's. While the server is away, the work that was claimed goes on. SIGTERM and Ctrl-C
    drain: within 30 s what was measured is merged and the rest given back.

    With --store kernels come from there where `miofind fleet compiler` or another host has compiled them, and what is
    compiled here goes there.
    """
    shared = Compiler(cache_over(store, store_secret))
    if gpus and click.get_current_context().get_parameter_source("device") is ParameterSource.COMMANDLINE:
        raise click.UsageError("--device and --gpus exclude each other: name devices in one way")
    with contextlib.ExitStack() as stack:
        stack.enter_context(terminable())
        devices = gpus or (device,)
        fleet_database = stack.enter_context(opened(url))
        server = stack.enter_context(Store(url))
        handles = [
            stack.enter_context(Handle(each, database=database or _local_path(), strict=True, compiler=shared))
            for each in devices
        ]
        agent = FleetAgent(handles, fleet_database, server)
        names = ", ".join(each.name for each in devices)
        print_note(f"agent {agent.agent.id} works for {fleet_database.where} on {names}")
        if metrics_port is not None:
            stack.callback(MetricsServer(metrics_address, metrics_port, agent.metrics).close)
        end = agent.run(until_idle_s=until_idle_s, for_s=for_s)
    _tell_end(end, as_json=as_json)
    if end.was_interrupted:
        raise click.exceptions.Exit(INTERRUPTED)
    raise click.exceptions.Exit(int(bool(end.lost)))


def _tell_end(end: AgentEnd, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(end))
        return
    merged = "all is on the server" if end.is_merged else "the next agent here brings the rest to the server"
    print_text(f"{count_text(end.done, 'problem')} measured, {end.failed} failed; {merged}", *end.lost)


def _local_path() -> str:
    """The user's FindDB where MIOFIND_DB names a file, else in the user's data directory."""
    named = os.environ.get("MIOFIND_DB", "")
    return user_path({} if "://" in named else os.environ)


@_command("status", "miofind fleet status", "miofind fleet status --watch")
@click.option("--watch", is_flag=True, help="Go on showing it until Ctrl-C.")
def status_(url: str, watch: bool, as_json: bool) -> None:
    """Show campaigns, devices and the newest failures."""
    if watch and as_json:
        raise click.UsageError("--watch draws for people: leave --json or --watch out")
    with opened(url) as database:
        if watch:
            _watch(database)
            return
        found = status(database)
    if as_json:
        print_json(_json(found))
    else:
        print_status(found)


def _watch(database: FleetDatabase) -> None:
    with Live(console=stdout(), refresh_per_second=1, screen=False) as live:
        while True:
            try:
                live.update(shown_status(status(database)))
            except UnreachableError as error:
                print_note(f"warning: {error}")
            time.sleep(2.0)


def _json(found: FleetStatus) -> dict[str, object]:
    return {
        "campaigns": [asdict(each) for each in found.campaigns],
        "gpus": [asdict(each) for each in found.gpus],
        "failures": [asdict(each) for each in found.failures],
    }


@_command("pause", "miofind fleet pause nightly")
@_NAME
def pause(url: str, name: str, as_json: bool) -> None:
    """Have no further job of a campaign measured.

    What is being measured is finished; what was claimed and waits is given back.
    """
    with opened(url) as database:
        set_paused(database, name, paused=True)
    told = f"{name} is paused: `miofind fleet resume {name}` goes on"
    told_or_json({"campaign": name, "paused": True}, told, as_json=as_json)


@_command("resume", "miofind fleet resume nightly")
@_NAME
def resume(url: str, name: str, as_json: bool) -> None:
    """Go on with a campaign that was paused."""
    with opened(url) as database:
        set_paused(database, name, paused=False)
    told_or_json({"campaign": name, "paused": False}, f"{name} goes on", as_json=as_json)


@_command("retry", "miofind fleet retry nightly", "miofind fleet retry nightly --state parked")
@_NAME
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([JobState.FAILED.value, JobState.PARKED.value]),
    help="Which jobs; repeatable.  [default: both]",
)
def retry_(url: str, name: str, states: tuple[str, ...], as_json: bool) -> None:
    """Measure a campaign's failed or parked jobs again.

    Parked are those over which devices were lost.
    """
    chosen = tuple(map(JobState, states)) or (JobState.FAILED, JobState.PARKED)
    with opened(url) as database:
        count = retry(database, name, chosen)
    told_or_json({"campaign": name, "jobs": count}, f"{name}: {count} jobs are measured again", as_json=as_json)


@_command(
    "quarantine",
    "miofind fleet quarantine GPU-8f2c... --reason 'ECC errors'",
    "miofind fleet quarantine GPU-8f2c... --clear",
)
@click.argument("gpus", nargs=-1, required=True, metavar="UUID...")
@click.option("--reason", default="by hand", metavar="TEXT", help="Why.", show_default=True)
@click.option("--clear", is_flag=True, help="Let them measure again, and believe them.")
def quarantine(url: str, gpus: tuple[str, ...], reason: str, clear: bool, as_json: bool) -> None:
    """Have GPUs measure nothing more, or again.

    Their agents hand back what they hold of the queue for them within a minute.
    """
    state = GpuState.READY if clear else GpuState.QUARANTINED
    with opened(url) as database:
        health.set_state(database, gpus, state, "" if clear else reason)
    told = f"{', '.join(gpus)}: {'may measure again' if clear else 'measures nothing more'}"
    told_or_json({"gpus": list(gpus), "state": state.value}, told, as_json=as_json)


@_command("gc", "miofind fleet gc --days 30 --dry-run")
@click.option("--days", type=click.IntRange(min=1), default=30, show_default=True, metavar="N", help="Age that is old.")
@click.option("--dry-run", is_flag=True, help="Print what would be removed; remove nothing.")
def gc(url: str, days: int, dry_run: bool, as_json: bool) -> None:
    """Remove old campaigns, agents, GPUs and jobs.

    Those are campaigns that ended, agents and GPUs that are gone, jobs that no host can take any more. No measurement
    is removed: `miofind db prune` does that. GPUs that are suspect or quarantined stay.
    """
    with opened(url) as database:
        found = collect(database, days, dry_run=dry_run)
    removed = ", ".join(f"{count} {name}" for name, count in asdict(found).items())
    told = f"{'would be removed' if dry_run else 'removed'}: {removed}"
    told_or_json(asdict(found) | {"dry_run": dry_run}, told, as_json=as_json)


fleet.add_command(launch)
fleet.add_command(up)
fleet.add_command(compiler)
