"""The kept figures of `miofind bench` and of whole_product.py: ratios by arithmetic, layout, direction and class."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from miofind.bench.ceilings import arithmetic_of
from miofind.core.problem import Direction, ProblemDescription
from miofind.suites import problem_class

RESULTS = Path(__file__).parent / "results"
WHOLE = "whole_product"
"""How the names of the whole product's files begin."""
FUSED = "fused_networks"
"""How the names of the files of fused networks begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One problem's ratio: PyTorch's time over miofind's, above 1 miofind is faster.

    Attributes:
        whole: whether all solvers took part, else miofind's own kernels alone.
        solver_id: which was the fastest.
    """

    problem: ProblemDescription
    ratio: float
    whole: bool
    solver_id: str

    @property
    def case(self) -> tuple[str, str, Direction]:
        """Arithmetic, layout of x, direction."""
        return arithmetic_of(self.problem), self.problem.x.layout.value, self.problem.direction

    @property
    def problem_class(self) -> str:
        """The class that tables group it by."""
        return problem_class(self.problem)


def kept(folder: Path = RESULTS) -> list[Figure]:
    """The figures of every file of a folder that compares with PyTorch, in the order of their names."""
    found = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        whole = path.name.startswith(WHOLE)
        if whole or content["command"].startswith("miofind bench"):
            found += [_figure(row, whole=whole) for row in content["rows"] if row["ratio"] is not None]
    return found


def _figure(row: dict[str, object], *, whole: bool) -> Figure:
    ratio = row["ratio"]
    assert isinstance(ratio, float)
    return Figure(
        problem=ProblemDescription.from_network_config(str(row["network_config"])),
        ratio=ratio,
        whole=whole,
        solver_id=str(row["solution"]).partition(":")[0],
    )


def mean(figures: Iterable[Figure]) -> float:
    """The geometric mean of ratios."""
    return math.exp(statistics.fmean(math.log(figure.ratio) for figure in figures))


def of_classes(figures: Sequence[Figure], *classes: str) -> list[Figure]:
    """The figures of some classes."""
    return [figure for figure in figures if figure.problem_class in classes]
