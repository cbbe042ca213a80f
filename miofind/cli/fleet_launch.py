"""`miofind fleet launch`: agents on the hosts of a Dask cluster."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
from rich.live import Live

from miofind.cli.fleet_board import shown_status
from miofind.cli.fleet_session import fleet_command, opened, told_or_json
from miofind.cli.output import print_note, stdout
from miofind.errors import DatabaseError, InvalidOptionError
from miofind.fleet.database import FleetDatabase
from miofind.fleet.status import FleetStatus, status
from miofind.fleet.values import JobState
from miofind.process.interrupts import INTERRUPTED, terminable

if TYPE_CHECKING:
    from miofind.fleet.dask_agents import Agent, Agents

_LOOK_S = 2.0
_OPEN = (JobState.NEW, JobState.LEASED)


@fleet_command(
    "launch",
    "miofind fleet launch --scheduler tls://host:8786 --tls-ca ca.pem --tls-cert me.pem --tls-key key.pem",
    "miofind fleet launch --scheduler tcp://127.0.0.1:8786 --keep",
)
@click.option("--scheduler", required=True, metavar="ADDRESS", help="Dask's scheduler: tls://host:8786.")
@click.option("--tls-ca", metavar="FILE", help="Certificate authority's certificate, PEM.")
@click.option("--tls-cert", metavar="FILE", help="Own certificate, PEM.")
@click.option("--tls-key", metavar="FILE", help="Its key, PEM.")
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
    """Have the workers of a Dask cluster run agents, until no campaign has anything left to do.

    Workers that have room for one run one each: `dask worker tls://host:8786 --resources miofind=1`. Those that come
    later do, too. The end, or Ctrl-C, drains them; what Dask loses, the queue does not. Agents open the server by the
    same URL and the password in their own ~/.pgpass.
    """
    from miofind.fleet.dask_agents import TlsFiles, connected

    if sum((gpus is not None, device is not None)) > 1 or (keep and stop):
        raise click.UsageError("--gpus and --device exclude each other, and so do --keep and --stop")
    files = (tls_ca, tls_cert, tls_key)
    if any(files) and not all(files):
        raise click.UsageError("--tls-ca, --tls-cert and --tls-key go together")
    tls = TlsFiles(ca=tls_ca or "", cert=tls_cert or "", key=tls_key or "") if all(files) else None
    with terminable(), opened(url) as database, connected(scheduler, tls) as agents:
        if stop:
            agents.stop()
            told_or_json({"stopped": True}, "the agents have drained", as_json=as_json)
            return
        hosts = _hosts(agents, scheduler)
        agents.start(_agent(url, gpus, device))
        told = f"{len(hosts)} of Dask's workers run an agent for {database.where}"
        if keep:
            told_or_json({"hosts": list(hosts)}, f"{told}; `miofind fleet launch --stop` drains them", as_json=as_json)
            return
        print_note(told)
        with _drained(agents):
            found = _watched(database, show=not as_json)
    jobs = {state.value: sum(each.jobs.get(state, 0) for each in found.campaigns) for state in JobState}
    told_or_json(
        {"hosts": list(hosts), "jobs": jobs}, f"nothing is left to do: {jobs['done']} jobs done", as_json=as_json
    )


def _hosts(agents: Agents, scheduler: str) -> tuple[str, ...]:
    """Dask's workers with room for an agent.

    Raises:
        InvalidOptionError: there are none.
    """
    hosts = agents.hosts()
    if not hosts:
        start = f"dask worker {scheduler} --resources miofind=1"
        raise InvalidOptionError(f"no worker of {scheduler} has room for an agent: start some, `{start}`")
    return hosts


def _agent(url: str, gpus: str | None, device: str | None) -> Agent:
    from miofind.fleet.dask_agents import Agent

    where = ("--device", device) if device is not None else ("--gpus", gpus or "all")
    return Agent(("-m", "miofind", "fleet", "worker", *where), {"MIOFIND_DB": url})


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


def _watched(database: FleetDatabase, *, show: bool) -> FleetStatus:
    """The state of the fleet once nothing is left to do; shown meanwhile."""
    board = Live(console=stdout(), refresh_per_second=1) if show else None
    with board or contextlib.nullcontext():
        while True:
            with contextlib.suppress(DatabaseError):  # agents go on while the server is away
                found = status(database)
                if board is not None:
                    board.update(shown_status(found))
                waited = (each.jobs[state] for each in found.campaigns if not each.paused for state in _OPEN)
                if not any(waited):
                    return found
            time.sleep(_LOOK_S)
