"""`miofind db`: contents of FindDBs shown, checked, moved and merged."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO, TypeVar

import click

from miofind.cli.db_diff import diff
from miofind.cli.db_mirror import mirror_command
from miofind.cli.db_release import release
from miofind.cli.db_restamp import code, restamp
from miofind.cli.db_show import HistoryView, list_problems, show_history
from miofind.cli.group import CommandGroup
from miofind.cli.null_test import null_test_command
from miofind.cli.options import (
    DRIVER_LINE,
    FindDBFile,
    OutputFile,
    choice,
    db_option,
    device_option,
    example,
    given_path,
    json_option,
    one_of,
)
from miofind.cli.output import (
    Sheet,
    bytes_text,
    count_text,
    print_json,
    print_note,
    print_path,
    print_text,
    reader_may_leave,
)
from miofind.cli.problems import optional_problem_argument, problems_of
from miofind.cli.session import verbose_option
from miofind.device.device import Device, device_text
from miofind.errors import DamagedDatabaseError, DatabaseError, InvalidOptionError, unwritable
from miofind.files import replacing
from miofind.find.row_check import RowCheck
from miofind.finddb import (
    SCHEMA_VERSION,
    Prune,
    Stats,
    Store,
    is_of_database,
    server_url,
    system_addresses,
    told_address,
    user_path,
)
from miofind.finddb.migration import upgrade
from miofind.solver.registry import Registry

Command = TypeVar("Command", bound=Callable[..., Any])

_MOST_FINDINGS = 50


@click.group(cls=CommandGroup, epilog=example("miofind db stats", "miofind db merge other.db"))
def db() -> None:
    """Show, check, merge and release FindDBs. A command works on the user's FindDB unless --db names another."""


for _command_of_its_own in (code, diff, mirror_command, null_test_command, release, restamp):
    db.add_command(_command_of_its_own)


def _command(
    name: str, *examples: str, may_begin: bool = False, **settings: Any
) -> Callable[[Callable[..., None]], click.Command]:
    """A command of the group with --db, --json and --verbose; `may_begin`: its FindDB need not be there yet."""

    def decorate(function: Callable[..., None]) -> click.Command:
        about = "FindDB to add to." if may_begin else "FindDB to work on."
        function = db_option(may_begin=may_begin, about=about)(json_option(verbose_option(function)))
        return db.command(name, epilog=example(*examples), **settings)(function)

    return decorate


@contextlib.contextmanager
def _reading(database: str | None) -> Iterator[Store]:
    """The FindDB, open to be read.

    Raises:
        DatabaseError: the FindDB does not exist or cannot be read.
    """
    with Store(database or user_path(), read_only=True) as store:
        if store.in_memory or not store.exists:
            where = store.where if store.in_memory else store.location
            raise DatabaseError(
                f"there is no FindDB at {where} yet: fill it with `miofind tune`, or name another with --db"
            )
        with store.open().one_instant():
            yield store


def _writing(database: str | None) -> Store:
    return Store(database or user_path())


def _not_a_folder(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and server_url(value) is None and given_path(value).is_dir():
        raise click.BadParameter(f"{value} is a folder: name a file in it")
    return value


@db.command("path", epilog=example("miofind db path"))
@click.option(
    "--db", "database", metavar="PATH", callback=_not_a_folder, help="FindDB whose path is printed; it need not exist."
)
@json_option
@verbose_option
def path_(database: str | None, as_json: bool) -> None:
    """Print the paths of the user's FindDB and of the shipped ones."""
    user, shipped = told_address(database or user_path()), [told_address(each) for each in system_addresses()]
    if as_json:
        print_json({"user": user, "shipped": shipped})
        return
    print_path(user)
    for path in shipped:
        print_path(path, "  (shipped)")


@_command("stats", "miofind db stats", "miofind db stats --db results.db --json")
def stats(database: str | None, as_json: bool) -> None:
    """Count problems and measurements.

    The counts are of problems by device, and of measurements by solver and by status.
    """
    with _reading(database) as store:
        found = store.stats()
        if as_json:
            print_json({"database": store.location} | asdict(found))
            return
        counts = {
            "problem": found.problems,
            "measurement": found.rows,
            "find": found.scopes,
            "verdict": found.verdicts,
        }
        told = ", ".join(count_text(count, noun) for noun, count in counts.items())
        size = bytes_text(found.file_bytes)
        print_text(f"{store.location}: {told}, {found.rechecks} to measure again, {size}")
    for what, counts in _counts(found).items():
        if counts:
            made = Sheet("", (what, "count"), right=("count",))
            for name, count in counts.items():
                made.add(name, str(count))
            made.print()


def _counts(found: Stats) -> dict[str, dict[str, int]]:
    return {
        "device": {device_text(device): count for device, count in found.by_device.items()},
        "solver": dict(sorted(found.by_solver.items(), key=lambda item: -item[1])),
        "status": dict(found.by_status),
    }


@_command(
    "show",
    "miofind db show",
    "miofind db show conv -n 32 -c 64 -H 56 -W 56 -k 64 -y 3 -x 3 -p 1 -q 1 -F 1 --all",
    context_settings=DRIVER_LINE,
)
@optional_problem_argument
@click.option("--all", "everything", is_flag=True, help="Show failures and replaced measurements, too.")
def show(line: tuple[str, ...], everything: bool, database: str | None, as_json: bool) -> None:
    """List the problems, or the measurements of PROBLEM.

    The list names the best solver of each problem. PROBLEM is shown for every device that it was measured on.
    """
    with _reading(database) as store:
        if not line:
            list_problems(store, as_json)
            return
        problems = problems_of(line)
        wanted = [problem.network_config for problem in dict.fromkeys((*problems, *(p.flattened for p in problems)))]
        keys = [key for key in store.problems() if key.network_config in wanted]
        found = [HistoryView.of(store, key, everything=everything) for key in keys]
        where = store.location
    if as_json:
        print_json({"database": where, "problems": [view.json for view in found]})
        return
    for view in found:
        show_history(view)
    if not found:
        raise InvalidOptionError(f"{where} has nothing of {', '.join(wanted)}: measure it with `miofind tune`")


@_command("export", "miofind db export finddb.jsonl", "miofind db export - | gzip > finddb.jsonl.gz")
@click.argument("file", metavar="FILE", type=OutputFile())
def export(file: Path, database: str | None, as_json: bool) -> None:
    """Write the FindDB to FILE as JSON lines; - is stdout.

    An existing FILE is replaced, unless it is a database.
    """
    if str(file) == "-" and as_json:
        raise click.UsageError("--json and - would both write to stdout: name a file")
    with _reading(database) as store:
        if str(file) == "-":
            with reader_may_leave():
                store.export_jsonl(sys.stdout)
                sys.stdout.flush()
            return
        try:
            if is_of_database(file):
                raise InvalidOptionError(
                    f"{file} is a database, not an export: name another file; --db is what is exported"
                )
            with replacing(file) as target:
                count = store.export_jsonl(target)
        except OSError as error:
            raise unwritable(f"file {file}", error) from error
    if as_json:
        print_json({"file": str(file), "lines": count})
    else:
        print_text(f"{count_text(count, 'line')} written to {file}")


@_command("import", "miofind db import finddb.jsonl", may_begin=True)
@click.argument("file", type=click.File("r", encoding="utf-8"))
def import_(file: TextIO, database: str | None, as_json: bool) -> None:
    """Add the entries of an exported FILE; - is stdin.

    Either all entries are added or none; entries that are there already change nothing.
    """
    with _writing(database) as store:
        added = store.import_jsonl(file)
        _print_added(added, store, as_json)


@_command(
    "merge",
    "miofind db merge machine1.db machine2.db",
    "miofind db merge --db all.db machine1.db machine2.db",
    may_begin=True,
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=FindDBFile(must_exist=True))
def merge(files: tuple[str, ...], database: str | None, as_json: bool) -> None:
    """Add the entries of other FindDBs.

    The order of the files plays no part, and merging twice changes nothing.
    """
    with _writing(database) as store:
        added = 0
        for file in files:
            with Store(file, read_only=True) as other, other.one_instant():
                added += store.merge(other)
        _print_added(added, store, as_json)


def _print_added(added: int, store: Store, as_json: bool) -> None:
    if as_json:
        print_json({"database": store.location, "added": added})
    else:
        print_text(f"{added} measurements, finds and verdicts were new to {store.location}")


@_command("check", "miofind db check", "miofind db check results.db")
@click.argument("file", required=False, metavar="[FILE]", type=FindDBFile(must_exist=True))
def check(file: str | None, database: str | None, as_json: bool) -> None:
    """Check a FindDB against the solvers of this release.

    The whole file is read: its pages, its schema and its entries. A row is sound if its problem parses, its solver is
    registered, its configuration is valid and its workspace is as declared. The content of a release must have the hash
    that the release states.

    The exit code is 1 where anything is wrong with it, and 4 where it cannot be looked at.
    """
    rows = RowCheck(Registry.default())
    address = one_of(file, database) or user_path()
    where, version = told_address(address), None
    findings: tuple[str, ...]
    try:
        with _reading(address) as store:
            findings = store.check(rows)
            where, version = store.location, store.schema_version
    except DamagedDatabaseError as error:  # so spoilt that it cannot even be opened
        findings = (str(error),)
    if as_json:
        report = {"database": where, "schema_version": version, "sound": not findings, "findings": list(findings)}
        print_json(report | {"rows_checked": rows.checked, "rows_void": rows.void})
    else:
        for finding in findings[:_MOST_FINDINGS]:
            print_text(finding)
        if len(findings) > _MOST_FINDINGS:
            print_text(f"and {len(findings) - _MOST_FINDINGS} more: see --json")
        told = count_text(len(findings), "finding") if findings else "sound"
        checked = f"{count_text(rows.checked, 'row')} checked against the solvers, {rows.void} of other releases"
        print_text(f"{where}: {told}; {checked}")
        if version is not None and version < SCHEMA_VERSION:
            print_note(f"it has schema version {version}: `miofind db upgrade` lets this release write to it")
    if findings:
        raise click.exceptions.Exit(1)


@_command("prune", "miofind db prune", "miofind db prune --what failed")
@click.option(
    "--what",
    type=choice(Prune),
    default=Prune.SUPERSEDED.value,
    show_default=True,
    help="Kind of measurements to remove.",
)
@device_option
def prune(what: str, device: Device, database: str | None, as_json: bool) -> None:
    """Remove measurements, and shrink the file.

    Superseded measurements are part of no answer. Candidates whose failures are removed are tried again by later finds.
    other_devices removes the problems of every device but --device.
    """
    with _reading(database):
        pass
    with _writing(database) as store:
        removed = store.prune(what, device=device.identity)
        left = store.stats()
    if as_json:
        print_json({"database": store.location, "removed": removed, "rows": left.rows})
        return
    size = left.file_bytes if store.path is None else store.path.stat().st_size  # a file shrinks when it is closed
    print_text(
        f"{count_text(removed, 'measurement')} removed, {left.rows} left in {store.location} ({bytes_text(size)})"
    )
    if what == Prune.FAILED.value and removed:
        print_note("problems whose failures were removed are measured again by the next `miofind tune --force`")


@_command("upgrade", "miofind db upgrade", "miofind db upgrade --db results.db")
def upgrade_(database: str | None, as_json: bool) -> None:
    """Bring the FindDB to the schema of this release.

    Answers are derived anew from the measurements where this release has other rules for them. A copy of the file is
    kept beside it, and its name is printed. The upgrade is done whole or not at all. Releases of an older schema refuse
    the file from then on. On a server the tables are made, too, where there are none, and no copy is kept: back it up.
    """
    done = upgrade(database or user_path())
    if as_json:
        versions = {"from_version": done.from_version, "to_version": done.to_version}
        backup = None if done.backup is None else str(done.backup)
        print_json({"database": done.database} | versions | {"answers": done.answers, "backup": backup})
        return
    is_new_schema = done.from_version != done.to_version
    if not is_new_schema and not done.answers and done.backup is None:
        print_text(f"{done.database} has schema version {done.to_version} already, and the answers of this release")
        return
    if is_new_schema:
        print_text(f"{done.database}: schema version {done.from_version or 'none'} is now {done.to_version}")
    print_text(f"{done.database}: {count_text(done.answers, 'answer')} derived anew from measurements")
    if done.backup is not None:
        print_text(f"  the file as it was: {done.backup}")
