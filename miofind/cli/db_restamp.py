"""`miofind db code` and `miofind db restamp`: rows kept over a change of sources that changes no machine code."""

from __future__ import annotations

import itertools
import sys
from dataclasses import asdict
from pathlib import Path

import click

from miofind.cli.options import FindDBFile, InputFile, OutputFile, db_option, example, json_option, one_of
from miofind.cli.output import print_json, print_note, print_text
from miofind.cli.session import verbose_option
from miofind.compiler import BinaryCache, Compiler
from miofind.errors import DatabaseError, InvalidOptionError
from miofind.find.restamp import Restamped, codes, read_codes, restamped, write_codes
from miofind.finddb import Store, told_address, user_path
from miofind.solver.registry import Registry, composed
from miofind.suites.text import read_lines


@click.command("code", epilog=example("miofind db code finddb/prebuilt/nvidia_h200.db > before.jsonl"))
@click.argument("source", required=False, metavar="[SOURCE]", type=FindDBFile(must_exist=True))
@db_option(may_begin=False, about="The FindDB SOURCE.")
@click.option(
    "--solver",
    "solvers",
    multiple=True,
    metavar="ID",
    help="Rows of this solver and of its composed form alone; repeatable.",
)
@json_option
@verbose_option
def code(source: str | None, database: str | None, solvers: tuple[str, ...], as_json: bool) -> None:
    """Print the launches of each row as JSON lines.

    A line has the steps that this release launches for a row of the FindDB SOURCE; `miofind db restamp` reads it.
    The kernels of all rows are compiled, without a GPU: some thousand take minutes, so name the solvers whose sources
    will change. Rows of the CPU place and failures are left out. With --json the lines are one array.
    """
    named = [Registry.default().named(name) for name in solvers]
    wanted = {each.id for solver in named for each in (solver, composed(solver))}
    where = one_of(source, database) or user_path()
    with Store(where, read_only=True) as store, store.one_instant():
        found = codes(store, Compiler(BinaryCache()), wanted or None)
        first = list(itertools.islice(found, 1))
        if not first:
            of_solvers = f" of {', '.join(sorted(wanted))}" if wanted else ""
            print_note(f"no kernels: {store.location} has no usable rows of a GPU{of_solvers}")
        if as_json:
            print_json([asdict(each) for each in (*first, *found)])
            return
        for line in write_codes(itertools.chain(first, found)):
            sys.stdout.write(line + "\n")


@click.command("restamp", epilog=example("miofind db restamp before.db after.db --code before.jsonl"))
@click.argument("old", metavar="OLD", type=FindDBFile(must_exist=True))
@click.argument("new", metavar="NEW", type=OutputFile())
@click.option(
    "--code",
    "written",
    required=True,
    metavar="FILE",
    type=InputFile(takes_stdin=True),
    help="Output of `miofind db code OLD` by the release that measured OLD.",
)
@json_option
@verbose_option
def restamp(old: str, new: Path, written: Path, as_json: bool) -> None:
    """Carry rows over to sources of equal machine code.

    NEW gets the rows of OLD whose machine code is today's, under the hashes of today's sources. After sources were
    renamed or cleaned up, rows are void although what they measured still runs. Kernels and launches are compared one
    by one. A row that differs stays behind, and so do failures and rows of the CPU place: the next find asks their
    solvers anew. Usable rows of a GPU whose sources did not change come along. NEW must not exist.
    """
    if new.exists():
        raise InvalidOptionError(f"{new} is there already: name a file that is not")
    counts = Restamped()
    with Store(old, read_only=True) as store, store.one_instant():
        other = read_codes(read_lines(written), str(written))
        carried = list(restamped(store, other, Compiler(BinaryCache()), counts))
    if not carried:
        raise DatabaseError(
            f"no row of {told_address(old)} can be carried over: {counts.unknown} unknown, {counts.different} different"
        )
    with Store(new) as store:
        store.add(carried)
    if as_json:
        print_json({"database": str(new), "problems": len(carried)} | asdict(counts))
        return
    print_text(f"{new}: {counts.rows + counts.valid} rows of {len(carried)} problems")
    if counts.valid:
        print_text(f"  valid as they were: {counts.valid}")
    print_text(f"  left behind: {counts.different} of other code, {counts.unknown} of which {written} says nothing")
