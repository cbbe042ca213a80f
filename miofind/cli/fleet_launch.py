"""`miofind fleet launch`: agents on the hosts of a Dask cluster."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import click
from rich.live import Live

from miofind.cli.fleet_board import shown_status
from miofind.cli.fleet_session import fleet_command, opened, told_or_json
from miofind.cli.output import print_note, stdout
from miofind.cli.scheduler import agents_of, scheduler_options, started
from miofind.fleet.database import FleetDatabase, UnreachableError
from miofind.fleet.status import FleetStatus, status
from miofind.fleet.values import JobState
from miofind.process.interrupts import INTERRUPTED, terminable

if TYPE_CHECKING:
    from miofind.fleet.dask_agents import Agents

_LOOK_S = 2.0
_OPEN = (JobState.NEW, JobState.LEASED)


@fleet_command(
    "launch",
    "miofind fleet launch --scheduler tls://host:8786 --tls-ca ca.pem --tls-cert me.pem --tls-key key.pem",
    "miofind fleet launch --scheduler tcp://127.0.0.1:8786 --keep",
)
@scheduler_options(required=True)
@click.option("--gpus", metavar="GPUS", help="What each agent measures with, as of `fleet worker`.  [default: all]")
@click.option("--device", metavar="DEVICE", help="The same for one device, such as cpu.")
@click.option("--keep", is_flag=True, help="Return at once, and leave the agents to work.")
@click.option("--stop", is_flag=True, help="Drain agents that were left to work, and start none.")
def launch(
    url: str,
    scheduler: str,
    tls_ca: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    gpus: str | None,
    device: str | None,
    keep: bool,
    stop: bool,
    as_json: bool,
) -> None:
    """Have the workers of a Dask cluster run agents.

    They do until no campaign has anything left to do.
    Workers that have room for one run one each: `dask worker tls://host:8786 --resources miofind=1`. Those that come
    later do, too. The end, or Ctrl-C, drains them; what Dask loses, the queue does not. Agents open the server by the
    same URL and the password in their own ~/.pgpass.
    """
    if sum((gpus is not None, device is not None)) > 1 or (keep and stop):
        raise click.UsageError("--gpus and --device exclude each other, and so do --keep and --stop")
    where = ("--device", device) if device is not None else ("--gpus", gpus or "all")
    with terminable(), opened(url) as database, agents_of(scheduler, (tls_ca, tls_cert, tls_key)) as agents:
        if stop:
            agents.stop()
            told_or_json({"stopped": True}, "the agents have drained", as_json=as_json)
            return
        hosts = started(agents, scheduler, url, where)
        told = f"{len(hosts)} of Dask's workers run an agent for {database.where}"
        if keep:
            told_or_json({"hosts": list(hosts)}, f"{told}; `miofind fleet launch --stop` drains them", as_json=as_json)
            return
        print_note(told)
        with _drained(agents):
            found = watched(database, agents, show=not as_json)
    jobs = {state.value: sum(each.jobs.get(state, 0) for each in found.campaigns) for state in JobState}
    told_or_json(
        {"hosts": list(hosts), "jobs": jobs}, f"nothing is left to do: {jobs['done']} jobs done", as_json=as_json
    )


@contextlib.contextmanager
def _drained(agents: Agents) -> Iterator[None]:
    """Have the agents drain at the end, Ctrl-C included."""
    try:
        yield
    except KeyboardInterrupt:
        print_note("the agents drain")
        raise click.exceptions.Exit(INTERRUPTED) from None
    finally:
        agents.stop()


def watched(database: FleetDatabase, agents: Agents, *, show: bool, campaign: str | None = None) -> FleetStatus:
    """The state of the fleet, or of one campaign, once nothing is left to do that is not paused; shown meanwhile.

    Raises:
        MissingEnvironmentError: no agent can work. DatabaseError: the server refuses.
    """
    board = Live(console=stdout(), refresh_per_second=1) if show else None
    with board or contextlib.nullcontext():
        while True:
            with contextlib.suppress(UnreachableError):  # agents go on while the server is away
                found = _of_campaign(status(database), campaign)
                if board is not None:
                    board.update(shown_status(found))
                waited = (each.jobs[state] for each in found.campaigns if not each.paused for state in _OPEN)
                if not any(waited):
                    return found
                agents.check()
            time.sleep(_LOOK_S)


def _of_campaign(found: FleetStatus, name: str | None) -> FleetStatus:
    if name is None:
        return found
    return replace(found, campaigns=tuple(each for each in found.campaigns if each.name == name))
