"""`miofind fleet compiler`: kernels for a fleet, compiled where there is no GPU."""

from __future__ import annotations

from dataclasses import asdict

import click

from miofind.cli.fleet_session import fleet_command, opened, told_or_json
from miofind.cli.options import Number
from miofind.cli.output import print_note
from miofind.cli.store import cache_over, sharing, store_options
from miofind.compiler import Compiler
from miofind.process.interrupts import terminable


@fleet_command(
    "compiler",
    "miofind fleet compiler --store /shared/miofind --store-secret ~/.config/miofind/store-secret",
    "miofind fleet compiler --until-idle 60",
)
@store_options
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Number of threads.  [default: one a processor]"
)
@click.option("--drain-after", "for_s", type=Number(min=0), metavar="S", help="Seconds after which it ends.")
@click.option(
    "--until-idle", "until_idle_s", type=Number(min=0), metavar="S", help="Seconds without work after which it ends."
)
def compiler(
    url: str,
    store: str | None,
    store_secret: str | None,
    workers: int | None,
    for_s: float | None,
    until_idle_s: float | None,
    as_json: bool,
) -> None:
    """Compile what the jobs that wait will want, without a GPU.

    Binaries go into --store, from where `miofind fleet worker --store` has them. Several hosts may do so at once. Its
    role on the server need only read.
    """
    if not store:
        raise click.UsageError("--store says where agents have the binaries from: name a folder, https://... or s3://")
    made = Compiler(cache_over(store, store_secret))
    with terminable(), opened(url) as database:
        from miofind.fleet.compile_farm import CompileFarm

        print_note(f"compiling for {database.where} into {store}")
        end = CompileFarm(database, made, workers=workers).run(until_idle_s=until_idle_s, for_s=for_s)
    shared = sharing(made.cache)
    told = f"{end.kernels} kernels for {end.problems} problems, {end.failed} failed"
    told_or_json(asdict(end) | {"store": shared}, told, as_json=as_json)
