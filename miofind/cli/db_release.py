"""`miofind db release`: the FindDB that ships for a kind of device."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from miofind.cli.options import FindDBFile, example, json_option
from miofind.cli.output import bytes_text, count_text, print_json, print_note, print_text
from miofind.cli.session import verbose_option
from miofind.device.device import device_text
from miofind.errors import InvalidOptionError
from miofind.find.row_check import Shipping
from miofind.finddb import Release, Store
from miofind.finddb.location import server_url
from miofind.finddb.release import ReleaseRules, write_release
from miofind.fleet.database import FleetDatabase
from miofind.fleet.health import doubted
from miofind.solver.registry import Registry

_MOST_FINDINGS = 10


@click.command("release", epilog=example("miofind db release tuned1.db tuned2.db finddb/prebuilt/nvidia_h200.db"))
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...", type=FindDBFile(must_exist=True))
@click.argument("out", metavar="OUT", type=FindDBFile(must_exist=False))
@click.option("--device", "name", metavar="NAME", default="", help="Part of the name of the kind of device.")
@click.option("--training", is_flag=True, help="Keep slower rows, too: a source for `miofind train`, not to ship.")
@json_option
@verbose_option
def release(sources: tuple[str, ...], out: str, name: str, training: bool, as_json: bool) -> None:
    """Make a FindDB to ship from others, for one kind of device.

    OUT holds the best solutions of each problem, measured with the solvers of this release and with the device to
    themselves. Equal sources make equal releases: a hash of the content is part of the file, and `miofind db check`
    compares it. A SOURCE may be of an older schema, or an earlier release. OUT may replace a release, but no other
    FindDB. OUT is packed and read-only: `miofind db merge` brings its entries into a FindDB that is written to.
    """
    keep = Shipping(Registry.default(), _doubted(sources))
    with contextlib.ExitStack() as stack:
        stores = [stack.enter_context(Store(source, read_only=True)) for source in sources]
        for store in stores:
            stack.enter_context(store.one_instant())
        device = one_device(stores, name)
        rules = ReleaseRules(
            keep=lambda key, row: key.device == device and keep(key, row),
            void=lambda key, row: key.device == device and keep.is_lost(key, row),
            widen=keep.with_refusals,
            kind=keep.kind_of,
            keeps_losers=training,
        )
        made = write_release(stores, out, rules)
    path = Path(out).expanduser()
    if as_json:
        print_json({"database": str(path), "bytes": path.stat().st_size} | asdict(made) | {"left_out": _left_out(keep)})
        return
    for finding in keep.findings[:_MOST_FINDINGS]:
        print_note(f"left out: {finding}")
    _print(path, made, keep, "failures" if training else "failures, and what better ones replace")


def _doubted(sources: Sequence[str]) -> set[str]:
    """Ids of the rows that the fleets of servers among the sources do not believe."""
    found: set[str] = set()
    for source in sources:
        if server_url(source) is not None:
            with contextlib.closing(FleetDatabase(source)) as fleet:
                found |= doubted(fleet)
    return found


def one_device(stores: Sequence[Store], name: str, option: str = "--device") -> str:
    """The kind of device with `name` in its name, in any case of letters; "" where the sources know none.

    Args:
        name: "" for the only kind that the sources know.
        option: what the user gives the name by.

    Raises:
        InvalidOptionError: the sources know several, or none, with that in its name.
    """
    known = {key.device: device_text(key.device) for store in stores for key in store.problems()}
    named = {device: text for device, text in known.items() if name.casefold() in text.casefold()}
    if len(named) > 1:
        several = "; ".join(sorted(named.values()))
        if name:
            raise InvalidOptionError(f"{option} {name!r} is in several devices' names, give more of one: {several}")
        raise InvalidOptionError(
            f"a file to ship is of one kind of device, the sources know {several}: choose by {option}"
        )
    if name and not named:
        several = "; ".join(sorted(known.values())) or "no device"
        raise InvalidOptionError(f"{option} {name!r} is in no device's name: the sources know {several}")
    return next(iter(named), "")


def _print(out: Path, made: Release, keep: Shipping, besides: str) -> None:
    print_text(f"{out}: {bytes_text(out.stat().st_size)}, content {made.content_hash[:16]}")
    print_text(f"  after {made.parent[:16]}" if made.parent else "  the first of its line")
    for device, count in made.problems.items():
        print_text(f"  {device_text(device)}: {count_text(count, 'problem')}, {count_text(made.rows[device], 'row')}")
    left_out = [f"{count} {why}" for why, count in _left_out(keep).items() if count]
    print_text(f"  rows left out: {', '.join([*left_out, besides])}")


def _left_out(keep: Shipping) -> dict[str, int]:
    return {
        "contended": keep.contended,
        "doubted": keep.doubted,
        "of other releases": keep.void,
        "unsound": len(keep.findings),
    }
