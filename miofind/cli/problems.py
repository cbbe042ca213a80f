"""Problems of a command line: driver lines, shapes, network_configs, suites and files, and their short forms."""

from __future__ import annotations

import contextlib
import logging
import re
import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from miofind.cli.options import Choice, choice
from miofind.core.problem import DataType, Direction, Layout, MathMode, ProblemDescription
from miofind.driver.epilogue import FLAG_NAMES
from miofind.driver.flags import FLAGS, is_driver_flag
from miofind.driver.line import OPERATIONS, driver_line, parse_driver_line
from miofind.driver.shapes import NAMES as SHAPE_FLAGS
from miofind.driver.shapes import is_shape_line, parse_shapes
from miofind.errors import InvalidOptionError, InvalidProblemError, MissingLibraryError, suggestion
from miofind.suites import PROBLEM_CLASSES, Suite, SuiteProblem, load, load_csv, load_lines, problem_class
from miofind.suites.find_db_text import load_find_db, parse_find_db_key
from miofind.suites.onnx_file import load_onnx
from miofind.suites.text import refuse_missing

logger = logging.getLogger(__name__)

Command = TypeVar("Command", bound=Callable[..., Any])

_NETWORK_CONFIG = "conv2d-forward-n32-c64-i56x56-k64-f3x3-p1x1-float16-NHWC"

_BITS = {Direction.FORWARD: 1, Direction.BACKWARD_DATA: 2, Direction.BACKWARD_WEIGHTS: 4}

problem_argument = click.argument("line", nargs=-1, type=click.UNPROCESSED, metavar="PROBLEM...")
optional_problem_argument = click.argument("line", nargs=-1, type=click.UNPROCESSED, metavar="[PROBLEM...]")


def problems_of(line: Sequence[str]) -> tuple[ProblemDescription, ...]:
    """The problems that the words of a command line name, one a direction.

    They are a driver line, shapes (--x and --w), or a network_config: miofind's, or MIOpen's as its find-db and its log
    have it.

    Raises:
        InvalidProblemError: the message names the flag and the value.
        UsageError: there are no words, or one is a mistyped option.
    """
    if not line:
        raise click.UsageError(
            f"give a problem: {', '.join(OPERATIONS)} and MIOpenDriver's flags, or --x n,c,h,w and --w k,c/groups,y,x"
        )
    _check_options(line)
    if is_shape_line(line):
        return parse_shapes(line)
    if line[0].startswith("-"):
        context = click.get_current_context(silent=True)
        takers = _takers(line[0].partition("=")[0], context) if context else []
        told = f" ({_told_takers(takers)})" if takers else ""
        raise click.UsageError(
            f"{line[0]} is no option here{told}, and a problem begins with {', '.join(OPERATIONS)}, or with --x or --w"
        )
    text = line[0] if len(line) == 1 else shlex.join(line)
    if re.match(r"conv\dd-", text):
        return (_named_problem(text),)
    if re.match(r"\d+-\d+-", text):
        return (parse_find_db_key(text),)
    return parse_driver_line(text)


def _named_problem(text: str) -> ProblemDescription:
    """The problem of a network_config of miofind's."""
    try:
        return ProblemDescription.from_network_config(text)
    except InvalidProblemError as error:
        raise InvalidProblemError(f"{error}: its form is that of {_NETWORK_CONFIG}") from error


def _check_options(line: Sequence[str]) -> None:
    """Do nothing where each word that looks like a long option is a flag of a problem.

    Raises:
        UsageError: one is none, and is an option of other commands, or near to an option of this one or to a flag.
    """
    shape_flags = [f"--{name}" for name in SHAPE_FLAGS]
    flags = [*(f"--{name}" for name, flag in FLAGS.items() if not flag.ignored), *shape_flags]
    context = click.get_current_context(silent=True)
    parameters = context.command.params if context else ()
    options = [name for parameter in parameters for name in parameter.opts if name.startswith("--")]
    for word in line:
        name = word.partition("=")[0]
        if not name.startswith("--") or name in shape_flags or is_driver_flag(name):
            continue
        if context is not None and (takers := _takers(name, context)):
            raise click.UsageError(f"No such option or flag: {name}. {_told_takers(takers)}")
        if near := suggestion(name, [*options, *flags]):
            raise click.UsageError(f"No such option or flag: {name}{near}")


def _takers(option: str, context: click.Context) -> list[str]:
    """The commands that work on problems and take an option, by their paths behind the program's name."""

    def found(command: click.Command | None, path: tuple[str, ...]) -> Iterator[str]:
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                yield from found(command.get_command(context, name), (*path, name))
        elif command is not None:
            names = {name for parameter in command.params for name in (parameter.name, *parameter.opts)}
            if {"line", option} <= names:
                yield " ".join(path)

    return list(found(context.find_root().command, ()))


def _told_takers(takers: Sequence[str]) -> str:
    names = [f"`miofind {name}`" for name in takers]
    return f"{names[0]} takes it" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} take it"


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteOverrides:
    """Fields that replace those of every row of a suite; None leaves the row's."""

    batch: int | None = None
    dtype: str | None = None
    math: str | None = None
    layout: str | None = None
    directions: tuple[Direction, ...] | None = None

    def of(self, suite: Suite) -> list[SuiteProblem]:
        """The problems of a suite."""
        return suite.problems(
            batch=self.batch, dtype=self.dtype, math=self.math, layout=self.layout, directions=self.directions
        )

    def words(self, line: Sequence[str]) -> list[str]:
        """The fields as flags behind a driver line or shapes.

        Raises:
            UsageError: a batch for shapes, which have one.
        """
        named = {"--dtype": self.dtype, "--math": self.math, "--layout": self.layout}
        words = [word for flag, value in named.items() if value is not None for word in (flag, value)]
        if is_shape_line(line):
            if self.batch is not None:
                raise click.UsageError(
                    f"--batch {self.batch} is for suites and files: the first size of --x is the batch"
                )
            return words + (["--direction", ",".join(self.directions)] if self.directions else [])
        words += [] if self.batch is None else ["-n", str(self.batch)]
        if self.directions is not None:
            words += ["-F", str(sum(_BITS[direction] for direction in set(self.directions)))]
        return words


def _directions(
    ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[Direction, ...] | None:
    if not values:
        return None
    return tuple(direction for direction in Direction if direction.value in values or "all" in values)


def _sizes(ctx: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    pairs = [value.rpartition("=") for value in values]
    for value, (name, _, size) in zip(values, pairs, strict=True):
        if not name or re.fullmatch(r"[0-9]{1,10}", size, re.ASCII) is None:
            raise click.BadParameter(f"{value!r} is no size: write NAME=N, such as batch=32")
    return {name: int(size) for name, _, size in pairs}


_REQUESTS = (
    click.option(
        "--suite",
        "suites",
        multiple=True,
        metavar="NAME",
        help="Name of a shipped suite, or a file: table (.csv), network (.onnx, .pt2), MIOpenDriver lines; repeatable.",
    ),
    click.option(
        "--size",
        "sizes",
        multiple=True,
        metavar="NAME=N",
        callback=_sizes,
        help="Number for a symbolic size of a network's inputs, such as batch=32; repeatable.",
    ),
    click.option(
        "--csv",
        "csvs",
        multiple=True,
        metavar="FILE",
        help="Table with the columns of the suites; - is stdin; repeatable.",
    ),
    click.option(
        "--lines",
        "line_files",
        multiple=True,
        metavar="FILE",
        help="File of MIOpenDriver lines; - is stdin; repeatable.",
    ),
    click.option(
        "--fdb", "fdbs", multiple=True, metavar="FILE", help="Find-db text file of MIOpen's, .fdb.txt; repeatable."
    ),
    click.option("--batch", type=click.IntRange(min=1), metavar="N", help="Batch: the suite's n times N."),
    click.option("--dtype", type=choice(DataType), help="Element type of every tensor."),
    click.option("--math", type=choice(MathMode), help="Arithmetic of float32 problems."),
    click.option("--layout", type=choice(Layout), help="Memory order of every tensor."),
    click.option(
        "--direction",
        "directions",
        multiple=True,
        callback=_directions,
        type=Choice(["all", *(d.value for d in Direction)]),
        help="Direction; repeatable.  [default: as the suite says, else forward]",
    ),
    click.option(
        "--class",
        "classes",
        multiple=True,
        type=Choice(PROBLEM_CLASSES),
        help="Class of problems, 'first layer' in quotes; repeatable.",
    ),
    click.option(
        "--limit", type=click.IntRange(min=1), metavar="N", help="Number of problems to take, from the first on."
    ),
)


def request_options(command: Command) -> Command:
    """Suites, files and the fields of `SuiteOverrides`; `requests_of` takes them, with the words of a problem."""
    for option in reversed(_REQUESTS):
        command = option(command)
    return optional_problem_argument(command)


def requests_of(**named: Any) -> list[SuiteProblem]:
    """Distinct problems of the values that `request_options` parsed, suites first.

    Raises:
        UsageError: nothing was named.
        InvalidOptionError, InvalidProblemError: an unknown suite, an unreadable file, a bad line or flag.
    """
    requests = named_requests(needed=True, **named)
    assert requests is not None
    return requests


def named_requests(
    *,
    needed: bool,
    suites: Sequence[str],
    csvs: Sequence[str],
    line_files: Sequence[str],
    fdbs: Sequence[str],
    line: Sequence[str],
    sizes: Mapping[str, int],
    classes: Sequence[str],
    limit: int | None,
    **variant: Any,
) -> list[SuiteProblem] | None:
    """As `requests_of`; None where nothing was named and nothing is `needed`.

    Args:
        sizes: numbers for symbolic sizes of networks.
        variant: the fields of `SuiteOverrides`.
    """
    if not (suites or csvs or line_files or fdbs or line):
        if not needed:
            return None
        raise click.UsageError(
            "name what to work on: --suite NAME, --csv FILE, --lines FILE, --fdb FILE, a driver line, or --x and --w"
        )
    asked = SuiteOverrides(**variant)
    _check_epilogue_flags(line)
    if line:
        problems = problems_of((*line, *asked.words(line)))
        named = [SuiteProblem(problem=p, suite="", layer=problem_class(p), count=1) for p in problems]
    else:
        named = []
    tables = [*_suites(suites, sizes), *map(load_csv, csvs), *map(load_lines, line_files), *map(_find_db, fdbs)]
    requests = _distinct([*(request for table in tables for request in asked.of(table)), *named])
    if not requests:
        if any(table.rows for table in tables) and asked.directions:
            wanted = ", ".join(asked.directions)
            raise InvalidOptionError(f"--direction {wanted}: all rows have an epilogue that goes with other directions")
        raise InvalidOptionError("the files named hold no problem: add one")
    kept = [request for request in requests if not classes or problem_class(request.problem) in classes]
    if not kept:
        here = ", ".join(dict.fromkeys(problem_class(request.problem) for request in requests))
        raise InvalidOptionError(f"no problem is of --class {', '.join(classes)}; there are: {here}")
    return kept[:limit]


def _check_epilogue_flags(line: Sequence[str]) -> None:
    """Do nothing where the flags of an epilogue stand beside those of a problem.

    Raises:
        UsageError: they stand alone.
    """
    flags = [word.partition("=")[0] for word in line if word.startswith("-")]
    alone = bool(flags) and line[0].startswith("-") and {*flags} <= {f"--{name}" for name in FLAG_NAMES}
    if alone:
        raise click.UsageError(
            f"{flags[0]} is of a driver line or of --x and --w: suites and tables have a column epilogue"
        )


def _suites(names: Sequence[str], sizes: Mapping[str, int]) -> list[Suite]:
    """The suites and files of those names.

    Raises:
        UsageError: sizes that no network takes.
    """
    if sizes and not any(map(_is_network, names)):
        raise click.UsageError(f"--size {next(iter(sizes))}: it is of a network, --suite FILE.onnx or FILE.pt2")
    return [_network(name, sizes) if _is_network(name) else load(name) for name in names]


def _is_network(name: str) -> bool:
    return name.lower().endswith((".onnx", ".pt2"))


def _network(path: str, sizes: Mapping[str, int]) -> Suite:
    """The problems of a network in a file, with one warning about convolutions that are left out."""
    if path.lower().endswith(".pt2"):
        return _exported(path, sizes)
    found = load_onnx(path, sizes=sizes)
    if found.warning:
        logger.warning("%s", found.warning)
    return found.suite


def _exported(path: str, sizes: Mapping[str, int]) -> Suite:
    refuse_missing(Path(path))
    try:
        from miofind.torch.recording.export import exported_problems
    except ImportError as error:
        raise MissingLibraryError(f"PyTorch reads {path}, and is not installed: pip install 'torch>=2.9'") from error
    with _without_log_of_torch():
        found = exported_problems(path, sizes=sizes)
    for call in found.left_out:
        logger.warning("%s: a convolution of %s is left out: %s", path, call.layer, call.reason)
    return found.suite


@contextlib.contextmanager
def _without_log_of_torch() -> Iterator[None]:
    """Have PyTorch log and warn of nothing: what it cannot read is told in one error, where it logs a traceback."""

    def refuse(record: logging.LogRecord) -> bool:
        return False

    loggers = [logging.getLogger(name) for name in [*logging.root.manager.loggerDict] if name.split(".")[0] == "torch"]
    handlers = {handler for logger in loggers for handler in logger.handlers}
    for handler in handlers:
        handler.addFilter(refuse)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for handler in handlers:
            handler.removeFilter(refuse)


def _find_db(path: str) -> Suite:
    """The problems of a find-db text file, with one warning about keys that name none."""
    found = load_find_db(path)
    if found.warning:
        logger.warning("%s", found.warning)
    return found.suite


def _distinct(requests: Iterable[SuiteProblem]) -> list[SuiteProblem]:
    found: dict[ProblemDescription, SuiteProblem] = {}
    for request in requests:
        known = found.get(request.problem)
        count = request.count if known is None else known.count + request.count
        found[request.problem] = replace(known or request, count=count)
    return list(found.values())


def traits(problem: ProblemDescription) -> dict[str, str]:
    """Batch, types, layouts and arithmetic of a problem, which the problems of a suite mostly share."""
    tensors = [problem.x, problem.w, problem.y]
    return {
        "batch": f"batch {problem.n}",
        "dtype": "/".join(dict.fromkeys(t.dtype.value for t in tensors)),
        "layout": "/".join(dict.fromkeys(t.layout.value for t in tensors)),
        "math": "" if problem.math is MathMode.IEEE else problem.math.value,
    }


def problem_json(problem: ProblemDescription) -> dict[str, object]:
    """A problem as an object for JSON."""
    return {
        "network_config": problem.network_config,
        "driver_line": driver_line(problem),
        "direction": problem.direction.value,
        "flops": problem.flops,
        "bytes": problem.bytes,
    }
