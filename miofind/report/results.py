"""What a report shows of a source: one result a problem, the searches behind them, and what a reader must know."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from miofind.bench.ceilings import Ceilings
from miofind.core.problem import ProblemDescription

AGAINST_TORCH = "PyTorch / miofind"
AGAINST_ONE_PASS = "one pass / miofind"
AGAINST_CUDNN = "cuDNN / best"
OWN_AGAINST_CUDNN = "cuDNN / own kernels"
GAIN = "first defaults / tuned"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemResult:
    """The best that a source knows of one problem on one device.

    Attributes:
        device: the GPU's name.
        layer: what the source calls the problem, "" without a name.
        solver_id: "" where nothing solved it.
        config: the configuration as people read it.
        library: the value of a `Library`, whatever a source says in its place.
        time_ms: None where nothing solved it.
        floor_ms: least time of direct arithmetic as the source has it, None where it does not say.
        ratios: other times over this one by what is compared: above 1, the second named is faster.
        marks: what a reader must know of it, such as "tie" or "contended".
        message: what failed, "" where nothing did.
    """

    problem: ProblemDescription
    device: str
    layer: str = ""
    solver_id: str = ""
    config: str = ""
    library: str = ""
    time_ms: float | None = None
    floor_ms: float | None = None
    ratios: Mapping[str, float] = field(default_factory=dict)
    marks: tuple[str, ...] = ()
    message: str = ""

    @property
    def intensity(self) -> float:
        """Operations of direct arithmetic for a byte of least traffic."""
        return self.problem.flops / self.problem.bytes

    @property
    def tflops(self) -> float | None:
        """10^12 operations of direct arithmetic a second; None where nothing was timed, or no float is as large."""
        rate = math.inf if self.time_ms is None else self.problem.flops / self.time_ms / 1e9
        return rate if rate < math.inf else None

    def floor_fraction(self, ceilings: Ceilings | None) -> float | None:
        """Floor over time: 1 is as fast as direct arithmetic can be; of a source without floors by the ceilings."""
        floor_ms = self.floor_ms if self.floor_ms is not None or ceilings is None else ceilings.floor_ms(self.problem)
        return ratio_of(floor_ms, self.time_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchCurve:
    """How the best time of a problem fell while configurations were tried.

    Attributes:
        place: of the problem's result in its source.
        trials: distinct configurations tried, ascending.
        best_ms: best time after as many.
    """

    place: int
    trials: tuple[int, ...]
    best_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceContent:
    """What one source holds.

    Attributes:
        name: the file, as it was named.
        kind: such as "FindDB".
        ceilings: those that it measured, by the GPU's name.
        versions: what it was measured with, {} where it does not say.
        notes: what of it could not be shown.
    """

    name: str
    kind: str
    results: tuple[ProblemResult, ...]
    curves: tuple[SearchCurve, ...] = ()
    ceilings: Mapping[str, Ceilings] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def ratio_of(other_ms: float | None, time_ms: float | None) -> float | None:
    """Another time over this one, None without both."""
    if other_ms is None or time_ms is None:
        return None
    ratio = other_ms / time_ms
    return ratio if 0 < ratio < math.inf else None
