"""MIOpen's find-db text files (.fdb.txt): the problem that each key names. Times and solvers of AMD's are not read.

A line is `key=Solver:ms,workspace,algorithm;...`. A key of two dimensions is C-H-W-YxX-K-Ho-Wo-N-pads-strides-
dilations-bias-layout-dtype-direction, with _gG behind it for groups; in three dimensions D, Z and Do join in. The
tensors come in the order the direction reads and writes: x, w, y forward, else dy, w, x.

Source: ROCm/MIOpen, src/conv/problem_description.cpp, ProblemDescription::Serialize.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.errors import InvalidProblemError
from miofind.suites import Suite, SuiteRow
from miofind.suites.text import read_lines

Value = TypeVar("Value")

_SIZES = r"\d{1,10}(?:x\d{1,10}){1,2}"
_KEY = re.compile(
    r"(?P<leading>\d{1,10}(?:-\d{1,10}){2,3})"
    rf"-(?P<filter>{_SIZES})"
    r"-(?P<trailing>\d{1,10}(?:-\d{1,10}){2,3})"
    r"-(?P<n>\d{1,10})"
    rf"-(?P<pad>{_SIZES})-(?P<stride>{_SIZES})-(?P<dilation>{_SIZES})"
    r"-0"
    r"-(?P<layouts>[A-Z]{4,5}(?:-[A-Z]{4,5}){0,2})"
    r"-(?P<dtypes>(?:FP16|FP32|FP64|BF16){1,3})"
    r"-(?P<direction>[FBW])"
    r"(?:_g(?P<groups>\d{1,10}))?",
    re.ASCII,
)
_DTYPES = {
    "FP16": DataType.FLOAT16,
    "FP32": DataType.FLOAT32,
    "FP64": DataType.FLOAT64,
    "BF16": DataType.BFLOAT16,
}
_DIRECTIONS = {"F": Direction.FORWARD, "B": Direction.BACKWARD_DATA, "W": Direction.BACKWARD_WEIGHTS}
_MOST_SHOWN = 3
_MOST_CHARS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class FindDbText:
    """What a file names.

    Attributes:
        suite: a row a key, in the file's order.
        unknown: the keys that name no problem of miofind's: other types or layouts, fused operations, damaged lines.
    """

    suite: Suite
    unknown: tuple[str, ...]

    @property
    def warning(self) -> str:
        """What of the file is left out, in one line; "" where nothing is."""
        if not self.unknown:
            return ""
        shown = ", ".join(repr(key[:_MOST_CHARS]) for key in self.unknown[:_MOST_SHOWN])
        more = len(self.unknown) - _MOST_SHOWN
        rest = f" and {more} more" if more > 0 else ""
        total = len(self.unknown) + len(self.suite.rows)
        return f"{self.suite.name}: {len(self.unknown)} of {total} keys name no problem and are left out: {shown}{rest}"


def load_find_db(path: str | Path) -> FindDbText:
    """The problems that a file's keys name; blank lines are left out.

    Raises:
        InvalidOptionError: the file cannot be read, or is too large.
    """
    file = Path(path)
    name = file.name.removesuffix(".txt").removesuffix(".fdb")
    rows: list[SuiteRow] = []
    unknown: list[str] = []
    for number, line in enumerate(read_lines(file, errors="replace"), start=1):
        key = line.partition("=")[0].strip()
        if not key:
            continue
        try:
            problem = parse_find_db_key(key)
        except InvalidProblemError:
            unknown.append(key)
            continue
        rows.append(_row(problem, name, number))
    return FindDbText(suite=Suite(name=name, rows=tuple(rows)), unknown=tuple(unknown))


def parse_find_db_key(key: str) -> ProblemDescription:
    """The problem that a key names.

    Args:
        key: such as "64-56-56-3x3-128-56-56-32-1x1-1x1-1x1-0-NCHW-FP16-F".

    Raises:
        InvalidProblemError: it is no key, or its problem cannot be expressed: a bias, a cast, INT8, CHWN.
    """
    match = _KEY.fullmatch(key)
    if match is None:
        raise InvalidProblemError(f"{key[:_MOST_CHARS]!r} is no key of a find-db that miofind can express")
    leading, trailing = _integers(match["leading"], "-"), _integers(match["trailing"], "-")
    direction = _DIRECTIONS[match["direction"]]
    forward = direction is Direction.FORWARD
    x, y = (leading, trailing) if forward else (trailing, leading)
    order = "xwy" if forward else "ywx"
    n, groups = int(match["n"]), int(match["groups"] or 1)
    if groups < 1:
        raise InvalidProblemError(f"{key!r}: groups={groups} must be at least 1")
    problem = ProblemDescription.convolution(
        x=(n, *x),
        w=(y[0], max(1, x[0] // groups), *_integers(match["filter"], "x")),
        padding=_integers(match["pad"], "x"),
        stride=_integers(match["stride"], "x"),
        dilation=_integers(match["dilation"], "x"),
        groups=groups,
        direction=direction,
        dtype=dict(zip(order, _dtypes(match["dtypes"]), strict=True)),
        layout=dict(zip(order, _layouts(match["layouts"]), strict=True)),
    )
    if problem.y.shape != (n, *y):
        raise InvalidProblemError(f"{key!r}: its output is {(n, *y)}, its other fields make {problem.y.shape}")
    return problem


def _row(problem: ProblemDescription, name: str, number: int) -> SuiteRow:
    return SuiteRow(problem=problem, suite=name, layer=f"line {number}", count=1, directions=(problem.direction,))


def _integers(text: str, separator: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(separator)))


def _dtypes(text: str) -> list[DataType]:
    """Element types of the tensors, in the key's order; one name stands for all three."""
    return _each([_DTYPES[text[i : i + 4]] for i in range(0, len(text), 4)], text)


def _layouts(text: str) -> list[Layout]:
    """Memory orders of the tensors, in the key's order; one name stands for all three."""
    try:
        return _each([Layout(name) for name in text.split("-")], text)
    except ValueError as error:
        raise InvalidProblemError(f"layout {text!r} is none that miofind knows") from error


def _each(values: list[Value], text: str) -> list[Value]:
    if len(values) not in (1, 3):
        raise InvalidProblemError(f"{text!r} must name one for all tensors or one for each of the three")
    return values if len(values) == 3 else values * 3
