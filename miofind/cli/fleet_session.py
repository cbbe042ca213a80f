"""What all commands of `miofind fleet` have: the server that they ask, and --json."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import click

from miofind.cli.options import example, json_option
from miofind.cli.output import print_json, print_text
from miofind.cli.session import verbose_option
from miofind.fleet.database import FleetDatabase


def _url(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str:
    url = value or os.environ.get("MIOFIND_DB", "")
    if "://" not in url:
        raise click.UsageError(
            "name the fleet's server: --database postgresql://user@host:5432/name, or MIOFIND_DB in the environment"
        )
    return url


database_option = click.option(
    "--database",
    "url",
    callback=_url,
    metavar="URL",
    help="Server: postgresql://user@host:5432/name. A password belongs into ~/.pgpass.  [default: MIOFIND_DB]",
)


def fleet_command(name: str, *examples: str, **settings: Any) -> Callable[[Callable[..., None]], click.Command]:
    """A command with --database, --json and --verbose."""

    def decorate(function: Callable[..., None]) -> click.Command:
        make: Callable[[Callable[..., None]], click.Command]
        make = click.command(name, epilog=example(*examples), **settings)
        return make(database_option(json_option(verbose_option(function))))

    return decorate


@contextlib.contextmanager
def opened(url: str) -> Iterator[FleetDatabase]:
    """The server with a fleet's tables.

    Raises:
        DatabaseError: it does not answer, or has none.
    """
    database = FleetDatabase(url)
    try:
        database.require()
        yield database
    finally:
        database.close()


def told_or_json(found: dict[str, object], told: str, *, as_json: bool) -> None:
    """Print what was found for programs, or what is told of it."""
    if as_json:
        print_json(found)
    else:
        print_text(told)
