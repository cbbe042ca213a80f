"""The buffers and clocks of one place, and a candidate on them: what GPUs and the CPU place have alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from miofind.core.problem import ProblemDescription
from miofind.errors import WrongResultError

if TYPE_CHECKING:
    from miofind.solver.steps import Config


class Runnable(Protocol):
    """What can be timed: an invoker, or another library's convolution in its form."""

    @property
    def solver_id(self) -> str:
        """Who runs."""

    @property
    def config(self) -> Config:
        """How it runs."""

    @property
    def problem(self) -> ProblemDescription:
        """What it runs."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace that a run needs."""

    @property
    def deterministic(self) -> bool:
        """Whether equal inputs must give equal bits."""

    def run(self, bases: tuple[Any, ...], stream: int) -> None:
        """Run once, as `Invoker.run` does."""


class TimedCandidate(ABC):
    """One candidate on a timer, warmed up.

    Attributes:
        rough_ms: a run as it is first timed: launches from the host included, unless it mostly waited for them.
    """

    rough_ms: float

    @abstractmethod
    def samples(self, count: int) -> list[float]:
        """`count` further samples, each the mean of one run in a back-to-back row of runs, in milliseconds.

        Raises:
            WrongResultError: the last row's outputs are not those of the first row, of a deterministic candidate.
        """


class Repeatability:
    """What a deterministic candidate's outputs were at first, to be held against what they are later.

    Args:
        runs: of whom; nothing is held against a candidate that is not deterministic.
    """

    def __init__(self, runs: Runnable) -> None:
        self._runs = runs
        self._first: dict[int, int] = {}

    @property
    def is_claimed(self) -> bool:
        """Whether there is anything to look at."""
        return self._runs.deterministic

    def knows(self, which: int) -> bool:
        """Whether an output, or several under one number, was seen before."""
        return which in self._first

    def see(self, which: int, checksum: int) -> None:
        """Take the checksum of an output, or of several under one number.

        Raises:
            WrongResultError: it was another one before.
        """
        if self._first.setdefault(which, checksum) == checksum:
            return
        runs = self._runs
        outputs = " or ".join(operand.name for operand in runs.problem.outputs)
        raise WrongResultError(
            f"{outputs} changed between two runs of {runs.solver_id} {runs.config.json} on equal "
            "inputs while it was timed, and the solution says that it is deterministic"
        )


class TimingBackend(ABC):
    """The buffers and clocks of one place."""

    protocol: str

    @abstractmethod
    def prepare(self, invoker: Runnable) -> TimedCandidate:
        """A candidate, run twice: once to warm up, once for its rough time."""

    @abstractmethod
    def close(self) -> None:
        """Give all memory back."""
