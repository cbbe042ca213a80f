"""Suites: shipped tables, CSV files and files of MIOpenDriver lines, and the problems they stand for."""

from __future__ import annotations

import importlib.resources
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TextIO

from miofind.core.problem import (
    DataType,
    Direction,
    Epilogue,
    Layout,
    MathMode,
    ProblemDescription,
    enum_value,
)
from miofind.driver.line import driver_line, read_driver_line
from miofind.errors import InvalidOptionError, InvalidProblemError, suggestion, unwritable
from miofind.files import replacing
from miofind.suites.table import SuiteRow, read_table, write_table
from miofind.suites.text import read_lines
from miofind.text.printable import printable

_MOST_SAMPLE_IMAGES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteProblem:
    """One distinct problem of a suite.

    Attributes:
        suite, layer: the first row that has it.
        count: calls of it in one forward pass, over all rows that have it.
    """

    problem: ProblemDescription
    suite: str
    layer: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A named list of rows."""

    name: str
    rows: tuple[SuiteRow, ...]

    @property
    def is_scalable(self) -> bool:
        """Whether its rows describe one sample (one image, or a pair), so that a batch can be asked for."""
        batches = {row.problem.n for row in self.rows}
        return len(batches) == 1 and max(batches) <= _MOST_SAMPLE_IMAGES

    def problems(
        self,
        *,
        batch: int | None = None,
        dtype: DataType | str | None = None,
        math: MathMode | str | None = None,
        layout: Layout | str | None = None,
        directions: Sequence[Direction | str] | None = None,
    ) -> list[SuiteProblem]:
        """Its distinct problems in the table's order; what is None is as the table says.

        Args:
            batch: samples; multiplies n.
            dtype: element type of every tensor.
            math: arithmetic of the float32 problems.
            layout: memory order of every tensor, of any rank: NHWC stands for NDHWC in three dimensions.
            directions: one problem a row and direction; a row with an epilogue has those alone that it goes
                with.

        Raises:
            InvalidOptionError: a batch below 1, or for a suite whose rows have batches of their own.
            InvalidProblemError: an unknown name, or math="tf32" with a dtype other than float32.
        """
        self._check_batch(batch)
        wanted = None if directions is None else tuple(enum_value(Direction, d, "direction") for d in directions)
        variant = _Variant(
            batch=batch or 1,
            dtype=None if dtype is None else enum_value(DataType, dtype, "dtype"),
            math=None if math is None else enum_value(MathMode, math, "math"),
            channels_last=None if layout is None else enum_value(Layout, layout, "layout").channels_last,
        )
        found: dict[ProblemDescription, SuiteProblem] = {}
        for row in self.rows:
            for direction in row.directions if wanted is None else wanted:
                if direction not in row.problem.epilogue.directions:
                    continue
                problem = variant.of(row.problem, direction)
                known = found.get(problem)
                found[problem] = (
                    SuiteProblem(problem=problem, suite=row.suite, layer=row.layer, count=row.count)
                    if known is None
                    else replace(known, count=known.count + row.count)
                )
        return list(found.values())

    def _check_batch(self, batch: int | None) -> None:
        if batch is None:
            return
        if batch < 1:
            raise InvalidOptionError(f"a batch of {batch} must be at least 1")
        if not self.is_scalable:
            raise InvalidOptionError(
                f"a batch of {batch}: the rows of suite {self.name!r} have their batch set; leave it out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    """What is asked of every row; None leaves a field as it is."""

    batch: int
    dtype: DataType | None
    math: MathMode | None
    channels_last: bool | None

    def of(self, base: ProblemDescription, direction: Direction) -> ProblemDescription:
        if self == _AS_WRITTEN:
            return base.in_direction(direction)
        tensors = {name: base.tensor(name) for name in ("x", "w", "y")}
        dtypes = {name: t.dtype if self.dtype is None else self.dtype for name, t in tensors.items()}
        layouts = {
            name: t.layout
            if self.channels_last is None
            else Layout.of(base.spatial_dims, channels_last=self.channels_last)
            for name, t in tensors.items()
        }
        conv = base.conv
        return ProblemDescription.convolution(
            x=(base.n * self.batch, *base.x.shape[1:]),
            w=base.w.shape,
            padding=tuple(zip(conv.pad_before, conv.pad_after, strict=True)),
            stride=conv.stride,
            dilation=conv.dilation,
            groups=conv.groups,
            direction=direction,
            dtype=dtypes,
            layout=layouts,
            math=self._math(base, set(dtypes.values())),
            epilogue=self._epilogue(base, dtypes["y"]),
        )

    def _epilogue(self, base: ProblemDescription, dtype: DataType) -> Epilogue:
        """The row's epilogue; a dtype that was asked for is its scale's and bias's, too, unless they are float32."""
        epilogue = base.epilogue
        stays_float32 = epilogue.parameter_dtype is DataType.FLOAT32 and dtype is not DataType.FLOAT64
        return epilogue if self.dtype is None or stays_float32 else replace(epilogue, parameter_dtype=None)

    def _math(self, base: ProblemDescription, dtypes: set[DataType]) -> MathMode:
        """Rows of another type in a mixed table keep plain arithmetic; a dtype that was asked for must fit."""
        if self.dtype is None and dtypes != {DataType.FLOAT32}:
            return MathMode.IEEE
        if self.math is not None:
            return self.math
        return base.math if dtypes == {DataType.FLOAT32} else MathMode.IEEE


_AS_WRITTEN = _Variant(batch=1, dtype=None, math=None, channels_last=None)


def suite_names() -> tuple[str, ...]:
    """Names of the shipped suites, sorted."""
    return tuple(sorted(file.name.removesuffix(".csv") for file in _tables().iterdir() if file.name.endswith(".csv")))


def load_suite(name: str) -> Suite:
    """A shipped suite by name, case ignored.

    Raises:
        InvalidOptionError: there is none of that name; the message lists those there are.
    """
    if name.lower() not in suite_names():
        near = suggestion(name, suite_names())
        raise InvalidOptionError(f"suite {name!r} is unknown: known are {', '.join(suite_names())}{near}")
    file = _tables() / f"{name.lower()}.csv"
    lines = file.read_text(encoding="utf-8").splitlines()
    return Suite(name=name.lower(), rows=tuple(read_table(lines, source=file.name, suite=name.lower())))


def load_csv(path: str | Path) -> Suite:
    """A table of the user's own, with the columns of the shipped ones.

    Raises:
        InvalidOptionError: the file cannot be read.
        InvalidProblemError: the message names the file, the line, the column and the value.
    """
    lines = read_lines(Path(path))
    return Suite(name=Path(path).stem, rows=tuple(read_table(lines, source=str(path), suite=Path(path).stem)))


def save_csv(suite: Suite, path: str | Path) -> None:
    """Write a suite as a table that `load_csv` reads, whole or not at all.

    Raises:
        InvalidOptionError: the file cannot be written.
    """
    _write(Path(path), lambda target: write_table(suite.rows, target))


def save_lines(suite: Suite, path: str | Path) -> None:
    """Write a suite as MIOpenDriver lines, which `load_lines` reads, whole or not at all; counts become comments.

    Raises:
        InvalidOptionError: the file cannot be written.
    """

    def write(target: TextIO) -> None:
        for row in suite.rows:
            target.write(f"# {printable(row.layer)}: {row.count}\n")
            target.writelines(f"{driver_line(row.problem.in_direction(d))}\n" for d in row.directions)

    _write(Path(path), write)


def _write(path: Path, write: Callable[[TextIO], None]) -> None:
    try:
        with replacing(path) as target:
            write(target)
    except (OSError, ValueError) as error:
        raise unwritable(f"file {path}", error) from error


def load_lines(path: str | Path) -> Suite:
    """A file of MIOpenDriver lines; blank lines and comments from # on a line's begin are left out.

    Raises:
        InvalidOptionError: the file cannot be read.
        InvalidProblemError: the message names the file, the line number, the flag and the value.
    """
    rows, name = [], Path(path).stem
    for number, line in enumerate(read_lines(Path(path)), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            found = read_driver_line(text)
        except InvalidProblemError as error:
            raise InvalidProblemError(f"{path}, line {number}: {error}") from error
        rows.append(
            SuiteRow(
                problem=found.problem,
                suite=name,
                layer=f"line {number}",
                count=1,
                directions=found.directions,
            )
        )
    return Suite(name=name, rows=tuple(rows))


def load(name_or_path: str) -> Suite:
    """A shipped suite by its name, else the file of that path: a .csv table or MIOpenDriver lines.

    Raises:
        InvalidOptionError: neither.
        InvalidProblemError: the file has a bad line.
    """
    path = Path(name_or_path)
    if name_or_path.lower() in suite_names():
        return load_suite(name_or_path)
    try:
        is_folder, is_there = path.is_dir(), path.is_file()
    except OSError as error:  # no file can have that name
        raise InvalidOptionError(f"suite {printable(name_or_path):.60} cannot be a path ({error.strerror})") from error
    if is_folder:
        raise InvalidOptionError(f"suite {name_or_path!r} is a folder: name a file in it")
    if not is_there:
        raise InvalidOptionError(
            f"suite {name_or_path!r} is neither a file nor a shipped suite: known are {', '.join(suite_names())}"
            f"{suggestion(name_or_path, suite_names())}"
        )
    return load_csv(path) if path.suffix.lower() == ".csv" else load_lines(path)


def _tables() -> Traversable:
    return importlib.resources.files("miofind.suites")
