"""`miofind db mirror`: a local file that follows a FindDB on a server."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import click

from miofind.cli.options import FindDBFile, Number, example, json_option
from miofind.cli.output import count_text, print_json, print_note, print_text
from miofind.cli.session import verbose_option
from miofind.errors import DatabaseError
from miofind.finddb import server_url
from miofind.finddb.mirroring import Mirrored, mirror


class _ServerURL(click.ParamType):  # type: ignore[type-arg]
    """The URL of a server as it is: what one cannot be is told without quoting it."""

    name = "URL"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if server_url(value) is None:
            named = "it" if "@" in str(value) else value  # a URL without its scheme may hold a password
            self.fail(f"{named} is a file, and a mirror is of a server: copy it, or use `miofind db merge`", param, ctx)
        return str(value)


@click.command(
    "mirror",
    epilog=example(
        "miofind db mirror postgresql://reader@host/results /var/lib/miofind/mirror.db",
        "miofind db mirror postgresql://reader@host/results mirror.db --every 60",
    ),
)
@click.argument("url", metavar="URL", type=_ServerURL())
@click.argument("file", metavar="FILE", type=FindDBFile(must_exist=False))
@click.option("--every", "every_s", metavar="SECONDS", type=Number(min=1), help="Go on until interrupted.")
@json_option
@verbose_option
def mirror_command(url: str, file: str, every_s: float | None, as_json: bool) -> None:
    """Have FILE hold what the FindDB on a server does.

    Only what is newer than FILE is read. Look-ups in FILE need no server: name it in MIOFIND_SYSTEM_DB on hosts that
    only ask. Nothing else writes to it. With --every a server that is gone for a while is waited for.
    """
    _print(mirror(url, file), as_json)
    while every_s is not None:
        time.sleep(every_s)
        try:
            _print(mirror(url, file), as_json)
        except DatabaseError as error:
            print_note(f"{error}. Tried again in {every_s:g} s")


def _print(done: Mirrored, as_json: bool) -> None:
    if as_json:
        print_json(asdict(done))
        return
    read = "all were read" if done.is_whole else f"{done.changed} of them new or changed, {done.removed} more gone"
    print_text(f"{done.database}: {count_text(done.problems, 'problem')}, {read}")
