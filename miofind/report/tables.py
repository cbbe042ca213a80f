"""The results of all sources as columns of JSON, which the page draws, sorts and filters; of 26,000 rows a few MB."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from miofind.bench.ceilings import Ceilings, arithmetic_of, known_ceilings
from miofind.core.problem import ProblemDescription
from miofind.device.device import Library
from miofind.report.results import ProblemResult, SourceContent
from miofind.suites import problem_class
from miofind.text.printable import printable, printable_name

OWN_KERNELS = "miofind"
OTHER = "other"
LIBRARIES = {
    Library.PLAIN.value: OWN_KERNELS,
    Library.CUDNN.value: "cuDNN",
    Library.CUBLAS.value: "cuBLAS",
    Library.CUFFT.value: "cuFFT",
}
"""Names of libraries on the page, by the value of a `Library`; any other is OTHER."""

_DIRECTIONS = {"forward": "forward", "backward_data": "data", "backward_weights": "weights"}
_DIGITS = 5
_CLOSE = 1.3  # of two roofs' heights: closer, their labels would stand in one another


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """What bounds points of one arithmetic on one device.

    Attributes:
        device: "" where all sources are of one device, so that labels are short.
        copy_bytes_per_s, flops_per_s: the slope and the height.
    """

    device: str
    arithmetic: str
    copy_bytes_per_s: float
    flops_per_s: float

    @property
    def ridge(self) -> float:
        """Operations a byte from which on arithmetic bounds."""
        return self.flops_per_s / self.copy_bytes_per_s

    @property
    def name(self) -> str:
        """What tells it from others on the page."""
        return f"{self.device} {self.arithmetic}".strip()

    def points(self, low: float, high: float) -> list[dict[str, object]]:
        """The line from one intensity to another, in TFLOP/s."""
        at = sorted({low, self.ridge, high} if low < self.ridge < high else {low, high})
        return [
            {
                "roof": self.name,
                "arithmetic": self.arithmetic,
                "intensity": _rounded(x),
                "tflops": _rounded(min(x * self.copy_bytes_per_s, self.flops_per_s) / 1e12),
            }
            for x in at
        ]


def short_problem(problem: ProblemDescription) -> str:
    """The network_config without direction, types and layouts, which have columns of their own."""
    return problem.network_config.partition(f"-{problem.direction.value}-")[2].partition(f"-{_dtypes(problem)}-")[0]


def columns(sources: Sequence[SourceContent]) -> dict[str, object]:
    """All results, a list a column; a column of few distinct texts as its names and the place of each row's in them."""
    results = [result for source in sources for result in source.results]
    problems = [result.problem for result in results]
    ceilings = ceilings_of(sources)
    texts: dict[str, Iterable[str]] = {
        "source": (printable(source.name) for source in sources for _ in source.results),
        "device": (printable_name(result.device) for result in results),
        "arithmetic": map(arithmetic_of, problems),
        "layout": map(_layouts, problems),
        "direction": (_DIRECTIONS[problem.direction.value] for problem in problems),
        "epilogue": (problem.epilogue.text for problem in problems),
        "class": map(problem_class, problems),
        "library": map(_library, results),
        "solver": (printable_name(result.solver_id) for result in results),
        "config": (printable(result.config) for result in results),
        "layer": (printable_name(result.layer) for result in results),
        "marks": (", ".join(map(printable_name, result.marks)) for result in results),
        "message": (printable(result.message) for result in results),
        "long_direction": (problem.direction.value for problem in problems),
        "prefix": (problem.network_config.partition("-")[0] for problem in problems),
        "suffix": (_suffix(problem) for problem in problems),
    }
    return {
        **{name: _indexed(values) for name, values in texts.items()},
        "problem": [short_problem(problem) for problem in problems],
        "intensity": [_rounded(result.intensity) for result in results],
        "time_ms": [_rounded(result.time_ms) for result in results],
        "tflops": [_rounded(result.tflops) for result in results],
        "floor": [_rounded(result.floor_fraction(ceilings.get(result.device))) for result in results],
        "ratios": _ratios(results),
    }


def points(sources: Sequence[SourceContent]) -> list[dict[str, object]]:
    """What a picture needs of each result that was timed."""
    return [
        {
            "arithmetic": arithmetic_of(result.problem),
            "intensity": _rounded(result.intensity),
            "tflops": _rounded(result.tflops),
            "library": _library(result),
        }
        for result in _timed(sources)
    ]


def libraries(sources: Sequence[SourceContent]) -> list[str]:
    """The libraries of what was timed, each once."""
    return list(dict.fromkeys(map(_library, _timed(sources))))


def curves(sources: Sequence[SourceContent]) -> list[dict[str, object]]:
    """The searches, each with the number of its row."""
    starts = itertools.accumulate((len(source.results) for source in sources), initial=0)
    return [
        {
            "row": start + curve.place,
            "trials": curve.trials,
            "best_ms": [_rounded(time_ms) for time_ms in curve.best_ms],
        }
        for start, source in zip(starts, sources, strict=False)
        for curve in source.curves
    ]


def ceilings_of(sources: Sequence[SourceContent]) -> dict[str, Ceilings]:
    """The ceilings of each device of which some are known: the first source's that measured them, else kept ones."""
    devices = dict.fromkeys(result.device for source in sources for result in source.results)
    found = {device: known for device in devices if (known := known_ceilings(device)) is not None}
    for source in reversed(sources):
        found |= source.ceilings
    return found


def roofs(sources: Sequence[SourceContent]) -> list[Roof]:
    """The roofs of the devices and arithmetics that have points."""
    ceilings = ceilings_of(sources)
    used = dict.fromkeys((result.device, arithmetic_of(result.problem)) for result in _timed(sources))
    devices = {device for device, _ in used}
    return [
        Roof(
            device=printable_name(device) if len(devices) > 1 else "",
            arithmetic=arithmetic,
            copy_bytes_per_s=ceilings[device].copy_bytes_per_s,
            flops_per_s=ceilings[device].flops_per_s[arithmetic],
        )
        for device, arithmetic in sorted(used)
        if device in ceilings and arithmetic in ceilings[device].flops_per_s
    ]


def roof_points(sources: Sequence[SourceContent]) -> list[dict[str, object]]:
    """The lines of all roofs over the intensities that there are; the last point of each has its label.

    Of two roofs of nearly the same height the lower one has its label below.
    """
    intensities = [result.intensity for result in _timed(sources)]
    if not intensities:
        return []
    made = roofs(sources)
    low, high = min(intensities) / 1.5, max([*intensities, *(roof.ridge for roof in made)]) * 1.5
    lines: list[dict[str, object]] = []
    for roof in made:
        *points, end = roof.points(low, high)
        label = f"{roof.name} {roof.flops_per_s / 1e12:.0f} TFLOP/s, {roof.copy_bytes_per_s / 1e12:.1f} TB/s"
        is_close = any(1 < other.flops_per_s / roof.flops_per_s < _CLOSE for other in made)
        lines += [*points, end | {"below" if is_close else "above": label}]
    return lines


def _timed(sources: Sequence[SourceContent]) -> Iterator[ProblemResult]:
    return (result for source in sources for result in source.results if result.time_ms is not None)


def _library(result: ProblemResult) -> str:
    return LIBRARIES.get(result.library, OTHER) if result.solver_id else "none"


def _indexed(values: Iterable[str]) -> dict[str, object]:
    places: dict[Hashable, int] = {}
    at = [places.setdefault(value, len(places)) for value in values]
    return {"names": list(places), "at": at}


def _ratios(results: Sequence[ProblemResult]) -> Mapping[str, list[float | None]]:
    names = dict.fromkeys(name for result in results for name in result.ratios)
    return {name: [_rounded(result.ratios.get(name)) for result in results] for name in names}


def _dtypes(problem: ProblemDescription) -> str:
    return _joined([operand.tensor.dtype.value for operand in problem.bare.operands])


def _layouts(problem: ProblemDescription) -> str:
    return _joined([operand.tensor.layout.value for operand in problem.bare.operands])


def _joined(values: Sequence[str]) -> str:
    return values[0] if len(set(values)) == 1 else ".".join(values)


def _suffix(problem: ProblemDescription) -> str:
    """What `short_problem` left out at the end."""
    return problem.network_config.rpartition(short_problem(problem))[2]


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")
