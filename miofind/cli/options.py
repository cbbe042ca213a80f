"""Options that commands share, each defined once, and the types of their values.

Driver lines own every short flag and MIOpenDriver's long ones, so options here are long and have other names.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click

from miofind.cli.output import print_note
from miofind.device.device import Device
from miofind.errors import NoDeviceError, UnknownSolverError, file_advice, suggestion
from miofind.find.search import DEFAULT_PATIENCE
from miofind.finddb.location import checked_path, server_url, shown_url, told_address
from miofind.options import FindEnforce, FindMode, FindOptions, Order
from miofind.solver.registry import Registry

Command = TypeVar("Command", bound=Callable[..., Any])

DRIVER_LINE = {"ignore_unknown_options": True}
"""Context settings of commands that take a driver line: its flags pass click by."""


def example(*lines: str) -> str:
    """The epilog of a command's help: its examples."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def _bytes(ctx: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    if value is None:
        return None
    match = re.fullmatch(r"(\d{1,18})\s*(?:([kmg])(?:i?b)?|b)?", value.strip().lower(), re.ASCII)
    if match is None:
        raise click.BadParameter(f"{value!r} is no size: write bytes, or a number with K, M or G")
    count = int(match[1]) << {"k": 10, "m": 20, "g": 30}.get(match[2], 0)
    if count >= 2**63:
        raise click.BadParameter(f"{value!r} is no size: it has 2**63 bytes or more")
    return count


class Number(click.FloatRange):
    """A range of numbers; NaN, which compares with nothing, is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is no number", param, ctx)
        return number


def _device(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Device:
    if value is None:
        return Device.default()
    if re.fullmatch(r"cpu|cuda(:?\d+)?|\d+", value, re.ASCII) is None:
        raise click.BadParameter(f"{value!r} is no device: write cpu, cuda or cuda:1")
    return Device.named(value)


def _archs(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[Device, ...]:
    try:
        return tuple(Device.virtual(arch) for arch in dict.fromkeys(values))
    except NoDeviceError as error:
        raise click.BadParameter(str(error)) from error


def _names(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(name.strip() for value in values for name in value.split(",") if name.strip())
    if values and not names:
        raise click.BadParameter(f"{','.join(values)!r} names nothing")
    try:
        Registry.default().check_names(names)
    except UnknownSolverError as error:
        raise click.BadParameter(str(error)) from error
    return names


def given_path(value: Any, param: click.Parameter | None = None, ctx: click.Context | None = None) -> Path:
    """The path that a text is, with ~ expanded; refused where no file can have it."""
    try:
        path = Path(value).expanduser()
        path.exists()
    except (RuntimeError, OSError, ValueError) as error:  # no such user, too long a name, a NUL
        told = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise click.BadParameter(f"{value} cannot be a path ({told}): correct it", ctx, param) from error
    return path


class InputFile(click.Path):
    """The path of an existing file; - is stdin where the command takes it."""

    name = "file"

    def __init__(self, *, takes_stdin: bool = False) -> None:
        super().__init__(dir_okay=False, path_type=Path, allow_dash=takes_stdin)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = given_path(value, param, ctx)
        if not (self.allow_dash and str(value) == "-") and not path.exists():
            self.fail(f"there is no file {value}: correct the path", param, ctx)
        return super().convert(path, param, ctx)


class OutputFile(click.Path):
    """The path of a file to write in an existing folder: a mistyped path makes no folders.

    That the folder takes files is looked at beforehand: what is written is mostly known after minutes of work.
    """

    name = "file"

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path, allow_dash=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = given_path(value, param, ctx)
        _check_folder(self, path, param, ctx)
        found = super().convert(path, param, ctx)
        if str(value) != "-":
            _check_can_be_made(self, path, param, ctx)
        return found


class FindDBFile(click.ParamType):  # type: ignore[type-arg]
    """The address of a FindDB: an existing file, a new one in an existing folder, or a server's URL."""

    name = "FindDB"

    def __init__(self, *, must_exist: bool) -> None:
        self._must_exist = must_exist

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        url = server_url(value)
        if url is not None:
            shown_url(url)
            return url
        path = checked_path(value)
        if path is None and not self._must_exist:
            return str(value)
        if path is None or (self._must_exist and not path.exists()):
            self.fail(f"there is no FindDB at {value}: correct the path", param, ctx)
        if path.is_dir():
            self.fail(f"{value} is a folder: name a file in it", param, ctx)
        _check_folder(self, path, param, ctx)
        if not path.exists():
            _check_can_be_made(self, path, param, ctx)
        return str(value)


def _check_folder(
    kind: InputFile | OutputFile | FindDBFile, path: Path, param: click.Parameter | None, ctx: click.Context | None
) -> None:
    if not path.parent.is_dir():
        kind.fail(f"there is no folder {path.parent}: correct the path, or make the folder first", param, ctx)


def _check_can_be_made(
    kind: OutputFile | FindDBFile, path: Path, param: click.Parameter | None, ctx: click.Context | None
) -> None:
    """Refuse a file whose folder takes none; a device or a pipe is written to as it is."""
    if path.exists() and not path.is_file():
        return
    try:
        with tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(path))):
            pass
    except OSError as error:
        reason = f"{error.strerror or error} in its folder: {file_advice(error)}"
        kind.fail(f"{path} cannot be written: {reason}", param, ctx)


def _new_database(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """The path as it is; a note tells of a new file, which a typing error would make."""
    path = checked_path(value) if value and server_url(value) is None else None
    if path is not None and not path.exists():
        print_note(f"there is no FindDB at {value} yet: a new one begins there")
    return value


device_option = click.option(
    "--device",
    callback=_device,
    metavar="NAME",
    help="Device: cuda, cuda:N or cpu.  [default: the first GPU, else cpu]",
)


def db_option(*, may_begin: bool = True, about: str = "FindDB to read and write.") -> Callable[[Command], Command]:
    """--db: an existing FindDB, or a new one where `may_begin`."""
    return click.option(
        "--db",
        "database",
        callback=_new_database if may_begin else None,
        type=FindDBFile(must_exist=not may_begin),
        metavar="PATH|URL",
        help=f"{about}  [default: MIOFIND_DB, else the user's]",
    )


def one_of(named: str | None, database: str | None) -> str | None:
    """The FindDB that an argument or --db names.

    Raises:
        UsageError: both name one.
    """
    if named is not None and database is not None:
        raise click.UsageError(f"name the FindDB once: {told_address(named)} or --db {told_address(database)}")
    return database if named is None else named


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
arch_option = click.option(
    "--arch",
    "archs",
    multiple=True,
    callback=_archs,
    metavar="ARCH",
    help="Architecture such as 80 or 90a, which need not be present; repeatable.",
)
only_option = click.option(
    "--only",
    multiple=True,
    callback=_names,
    metavar="NAMES",
    help="Solvers, algorithms or libraries that take part, with commas; repeatable.",
)
exclude_option = click.option(
    "--exclude",
    multiple=True,
    callback=_names,
    metavar="NAMES",
    help="Solvers, algorithms or libraries that are left out, with commas; repeatable.",
)
time_budget_option = click.option(
    "--time-budget",
    "time_budget_s",
    type=Number(min=0),
    metavar="S",
    help="Seconds of measuring a problem, after which the best so far is taken: 10 for a find of default "
    "configurations, no limit for a search and `miofind tune`, unless given.",
)


retry_failed_option = click.option(
    "--retry-failed", is_flag=True, help="Measure candidates that failed on this device before, too."
)


class Choice(click.Choice):  # type: ignore[type-arg]
    """One of some words, case ignored; the error about another word suggests the nearest ones."""

    def __init__(self, words: Iterable[str]) -> None:
        super().__init__(list(words), case_sensitive=False)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            near = suggestion(value, map(str, self.choices)) or "."
            raise click.BadParameter(error.message.removesuffix(".") + near, ctx=ctx, param=param) from None


def isolate_option(*, default: bool) -> Callable[[Command], Command]:
    """--isolate and --in-process: the process that measures candidates."""
    return click.option(
        "--isolate/--in-process",
        default=default,
        help="Process that measures: a child, which a crashing kernel may end, or this one."
        f"  [default: {'isolate' if default else 'in-process'}]",
    )


def choice(kind: Any) -> Choice:
    """The values of an enum."""
    return Choice(member.value for member in kind)


likely_option = click.option(
    "--likely", is_flag=True, help="Measure a few candidates alone: those with the least predicted times."
)
_LIMITS = (
    click.option(
        "--workspace-limit",
        "workspace_limit_bytes",
        callback=_bytes,
        metavar="BYTES",
        help="Largest workspace, such as 0, 512M or 2G.",
    ),
    click.option("--deterministic", is_flag=True, help="Leave out solutions that may give other bits on another run."),
    click.option(
        "--strict-nonfinite",
        is_flag=True,
        help="Leave out solutions that let an infinity or NaN reach results that do not sum it.",
    ),
    click.option(
        "--max-error",
        type=Number(min=0),
        help="Largest |error| / (|x| * |w|) on normal inputs. Lets algorithms with wider error bounds take part: FFT "
        "and most of Winograd.",
    ),
)
_SEARCH = (
    click.option(
        "--trials",
        type=click.IntRange(min=1),
        metavar="N",
        help="Greatest number of configurations of a problem to measure, earlier searches' included.",
    ),
    click.option(
        "--patience",
        type=click.IntRange(min=1),
        metavar="N",
        help=f"Number of rounds without a gain of 1 % after which a search ends.  [default: {DEFAULT_PATIENCE}]",
    ),
    click.option(
        "--seed",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        show_default=True,
        help="Seed of a search: equal seeds and times give equal searches.",
    ),
)
_FIND = (
    click.option(
        "--find-mode",
        type=choice(FindMode),
        help="Source of the answer. normal: measurement. hybrid: the FindDB, else measurement. fast: the FindDB and "
        "predictions of what it lacks. dynamic_hybrid: the FindDB, else solvers that compile nothing for one shape "
        "alone. trust_verify: the FindDB, measured once more.  [default: MIOFIND_FIND_MODE, else hybrid]",
    ),
    click.option(
        "--enforce",
        "find_enforce",
        type=choice(FindEnforce),
        default="none",
        help="Work that is done whatever the mode. db_update: measurement. search: a search on a miss. "
        "search_db_update: a search. db_clean: removal of the problem from the FindDB first.",
    ),
    click.option("--search", "tuning", is_flag=True, help="Search configurations beside the defaults."),
    likely_option,
    *_SEARCH,
    retry_failed_option,
    only_option,
    exclude_option,
    *_LIMITS,
    click.option("--order", type=choice(Order), default="time", help="Order of the solutions.", show_default=True),
    time_budget_option,
    isolate_option(default=False),
)


def _all(options: tuple[Callable[[Command], Command], ...]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def limit_options(command: Command) -> Command:
    """--workspace-limit, --deterministic, --strict-nonfinite, --max-error: fields of FindOptions."""
    return _all(_LIMITS)(command)


def search_options(command: Command) -> Command:
    """--trials, --patience, --seed: fields of FindOptions."""
    return _all(_SEARCH)(command)


def find_options(command: Command) -> Command:
    """Every field of FindOptions that a caller of `find` may set; `find_options_of` takes them."""
    return _all(_FIND)(command)


def find_options_of(**values: Any) -> FindOptions:
    """FindOptions of the values that `find_options` parsed.

    Raises:
        UnknownSolverError: a name in --only or --exclude is no solver, algorithm or library.
    """
    return FindOptions(**values)
