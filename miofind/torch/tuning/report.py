"""What a tuning of a network gained: its convolutions with PyTorch's time and miofind's, as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from miofind.core.problem import ProblemDescription
from miofind.suites.short_text import short_direction
from miofind.text.printable import printable_name
from miofind.text.sheet import Sheet
from miofind.torch.recording.recording import RecordedCall
from miofind.torch.tuning.tables import as_text, described, milliseconds, shortened


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedProblem:
    """One problem of a network, and who is how fast.

    Attributes:
        layers: paths of the modules that pose it, in order.
        count: calls in the recorded step.
        solver_id: miofind's fastest, "" where it has none.
        source: "tuned" now, "known" before, or "failed".
        own_ms: time of miofind's fastest for one call, None where it has none.
        torch_ms: PyTorch's, measured beside it; None where it was not.
        message: what failed.
    """

    layers: tuple[str, ...]
    problem: ProblemDescription
    count: int
    solver_id: str = ""
    source: str = ""
    own_ms: float | None = None
    torch_ms: float | None = None
    message: str = ""

    @property
    def gain(self) -> float | None:
        """PyTorch's time over miofind's: above 1, miofind is faster."""
        return self.torch_ms / self.own_ms if self.torch_ms and self.own_ms else None

    @property
    def least_ms(self) -> float | None:
        """The time of one call when the faster of the two runs it."""
        return min((time_ms for time_ms in (self.own_ms, self.torch_ms) if time_ms is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningReport:
    """How a network was tuned; printed, it is a table.

    Attributes:
        network: its name.
        device: what it was tuned for.
        rows: its distinct problems, in the order of their first calls.
        left_out: calls that pose no problem of miofind's; PyTorch runs them.
        seconds: time the tuning took.
        is_complete: whether it came to its end.
    """

    network: str
    device: str
    rows: tuple[TunedProblem, ...]
    left_out: tuple[RecordedCall, ...]
    seconds: float
    is_complete: bool = True

    @property
    def torch_ms(self) -> float | None:
        """PyTorch's time for all convolutions of a step; None where one was not measured."""
        return _sum_ms((row.torch_ms, row.count) for row in self.rows)

    @property
    def own_ms(self) -> float | None:
        """Their time in a step with miofind, which leaves to PyTorch what that is faster at; None as for `torch_ms`."""
        return _sum_ms((row.least_ms, row.count) for row in self.rows)

    @property
    def gain(self) -> float | None:
        """How many times as fast the convolutions of a step become."""
        return self.torch_ms / self.own_ms if self.torch_ms and self.own_ms else None

    def to_json(self) -> dict[str, object]:
        """The whole report, fit for `json.dumps`."""
        return {
            "network": self.network,
            "device": self.device,
            "complete": self.is_complete,
            "seconds": self.seconds,
            "torch_ms": self.torch_ms,
            "own_ms": self.own_ms,
            "gain": self.gain,
            "problems": [_row_json(row) for row in self.rows],
            "left_out": [
                {"layer": call.layer, "computed": call.computed, "count": call.count, "reason": call.reason}
                for call in self.left_out
            ],
        }

    def __str__(self) -> str:
        return as_text(self.__rich__(), self._lines())

    def __rich__(self) -> Sheet:
        is_compared = any(row.torch_ms is not None for row in self.rows)
        numbers = ("count", "PyTorch ms", "miofind ms", "gain") if is_compared else ("count", "miofind ms")
        columns = ("layer", "problem", "dir", "solver", *numbers)
        made = Sheet(f"{self.network} on {self.device}", columns, right=numbers, fold=("problem", "layer"))
        for row in self.rows:
            gain = "-" if row.gain is None else f"{row.gain:.2f}x"
            cells = {"count": str(row.count), "PyTorch ms": milliseconds(row.torch_ms), "gain": gain}
            cells["miofind ms"] = milliseconds(row.own_ms)
            made.add(*_described(row), *(cells[name] for name in numbers))
        return made

    def _lines(self) -> list[str]:
        """What stands below the table."""
        lines = [f"failed: {row.layers[0]}: {_first_line(row.message)}" for row in self.rows if row.message]
        lines += [f"left to PyTorch: {call.layer} ({call.computed}): {call.reason}" for call in self.left_out]
        lines = shortened(lines)
        if self.gain is not None:
            times = f"PyTorch {milliseconds(self.torch_ms)} ms, with miofind {milliseconds(self.own_ms)} ms"
            lines.append(f"convolutions of a step: {times}, {self.gain:.2f} times as fast")
        end = "" if self.is_complete else ", interrupted"
        noun = "problem" if len(self.rows) == 1 else "problems"
        return [*lines, f"{len(self.rows)} {noun} in {self.seconds:.0f} s{end}"]


def _described(row: TunedProblem) -> list[str]:
    more = f" (+{len(row.layers) - 1})" if len(row.layers) > 1 else ""
    layer = printable_name(row.layers[0]) + more
    return [layer, described(row.problem), short_direction(row.problem), row.solver_id or "-"]


def _row_json(row: TunedProblem) -> dict[str, object]:
    return {
        "layers": list(row.layers),
        "problem": row.problem.network_config,
        "direction": row.problem.direction.value,
        "count": row.count,
        "solver_id": row.solver_id or None,
        "source": row.source,
        "own_ms": row.own_ms,
        "torch_ms": row.torch_ms,
        "gain": row.gain,
        "message": row.message,
    }


def _sum_ms(times: Iterable[tuple[float | None, int]]) -> float | None:
    known = [(time_ms, count) for time_ms, count in times]
    if any(time_ms is None for time_ms, _ in known):
        return None
    return math.fsum(time_ms * count for time_ms, count in known if time_ms is not None)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
