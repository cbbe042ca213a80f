"""Agents on the hosts of a Dask cluster: the options that name it, and the time they work."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import click

from miofind.errors import InvalidOptionError

if TYPE_CHECKING:
    from miofind.fleet.dask_agents import Agents

Command = TypeVar("Command", bound=Callable[..., object])


def scheduler_options(*, required: bool) -> Callable[[Command], Command]:
    """--scheduler and what it is connected to with."""

    def decorate(command: Command) -> Command:
        for flag, about in (
            ("--tls-key", "Its key, PEM."),
            ("--tls-cert", "Own certificate for Dask's scheduler, PEM."),
            ("--tls-ca", "Certificate authority's certificate, PEM."),
        ):
            command = click.option(flag, metavar="FILE", help=about)(command)
        about = "Dask's scheduler, whose workers run agents: tls://host:8786."
        return click.option("--scheduler", required=required, metavar="ADDRESS", help=about)(command)

    return decorate


@contextlib.contextmanager
def agents_of(scheduler: str, files: tuple[str | None, str | None, str | None]) -> Iterator[Agents]:
    """The agents of a scheduler.

    Args:
        files: of --tls-ca, --tls-cert and --tls-key.

    Raises:
        InvalidOptionError, MissingEnvironmentError: see `dask_agents.connected`.
    """
    from miofind.fleet.dask_agents import TlsFiles, connected

    ca, cert, key = files
    if any(files) and not (ca and cert and key):
        raise click.UsageError("--tls-ca, --tls-cert and --tls-key go together")
    tls = TlsFiles(ca=ca, cert=cert, key=key) if ca and cert and key else None
    with connected(scheduler, tls) as agents:
        yield agents


def started(agents: Agents, scheduler: str, url: str, where: tuple[str, ...]) -> tuple[str, ...]:
    """Start agents of a server; Dask's workers that run one.

    Args:
        where: what they measure with, as options of `miofind fleet worker`.

    Raises:
        InvalidOptionError: no worker has room for one.
    """
    from miofind.fleet.dask_agents import Agent

    hosts = agents.hosts()
    if not hosts:
        start = f"dask worker {scheduler} --resources miofind=1"
        raise InvalidOptionError(f"no worker of {scheduler} has room for an agent: start some, `{start}`")
    agents.start(Agent(("-m", "miofind", "fleet", "worker", *where), {"MIOFIND_DB": url}))
    return hosts
