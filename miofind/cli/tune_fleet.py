"""`miofind tune --scheduler`: one command for a campaign, its agents and its end."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

from miofind.cli.fleet_launch import watched
from miofind.cli.fleet_session import opened, told_or_json
from miofind.cli.output import count_text, print_note
from miofind.cli.scheduler import agents_of, started
from miofind.fleet.campaign_options import options_json
from miofind.fleet.campaigns import checked_name, set_paused, submit
from miofind.fleet.database import FleetDatabase
from miofind.fleet.values import CampaignRequest, JobState
from miofind.process.interrupts import INTERRUPTED, terminable
from miofind.suites import SuiteProblem
from miofind.tune.values import TuneOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Where a tuning is to take place.

    Attributes:
        url: of the fleet's server.
        scheduler: Dask's.
        tls: files of --tls-ca, --tls-cert and --tls-key.
        devices: options of `miofind fleet worker`.
    """

    url: str
    scheduler: str
    tls: tuple[str | None, str | None, str | None]
    devices: tuple[str, ...]


def server_of(database: str | None) -> str:
    """The server of --db or MIOFIND_DB.

    Raises:
        UsageError: there is none.
    """
    url = database or os.environ.get("MIOFIND_DB", "")
    if "://" not in url:
        raise click.UsageError("--scheduler needs the fleet's server: --db postgresql://user@host:5432/name")
    return url


def tune_by_fleet(
    cluster: Cluster, requests: Sequence[SuiteProblem], options: TuneOptions, name: str | None, *, as_json: bool
) -> None:
    """Submit a campaign, have agents work until it is done, and tell what came of it.

    Ctrl-C pauses the campaign and drains the agents; the same tuning again goes on.

    Raises:
        MiofindError: the server or the scheduler refuses, or no agent can work.
    """
    request = CampaignRequest(name=checked_name(name or _name(requests, options)), options=options)
    with terminable(), opened(cluster.url) as database, agents_of(cluster.scheduler, cluster.tls) as agents:
        hosts = started(agents, cluster.scheduler, cluster.url, cluster.devices)
        with contextlib.ExitStack() as stack:
            stack.callback(agents.stop)
            told = submit(database, request, requests)
            set_paused(database, request.name, paused=False)
            print_note(
                f"campaign {request.name}: {count_text(told.problems, 'problem')}, "
                f"{len(hosts)} of Dask's workers run an agent"
            )
            stack.enter_context(_paused_by_interrupt(database, request.name))
            found = watched(database, agents, show=not as_json, campaign=request.name)
    jobs = {state.value: sum(each.jobs.get(state, 0) for each in found.campaigns) for state in JobState}
    failed = jobs[JobState.FAILED] + jobs[JobState.PARKED]
    told_or_json(
        {"campaign": request.name, "hosts": list(hosts), "jobs": jobs},
        f"{request.name}: {jobs[JobState.DONE]} jobs done, {failed} failed or parked",
        as_json=as_json,
    )
    raise click.exceptions.Exit(int(failed > 0))


@contextlib.contextmanager
def _paused_by_interrupt(database: FleetDatabase, name: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        set_paused(database, name, paused=True)
        print_note(f"{name} is paused and the agents drain: the same command goes on")
        raise click.exceptions.Exit(INTERRUPTED) from None


def _name(requests: Sequence[SuiteProblem], options: TuneOptions) -> str:
    """The same for the same tuning, so that it goes on where it was."""
    told = [options_json(options), sorted(each.problem.network_config for each in requests)]
    return f"tune-{hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]}"
