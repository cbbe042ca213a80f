"""A candidate under measurement and what became of it: inert values that cross between processes and into FindDBs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from miofind.solver.steps import Config


class Status(StrEnum):
    """What became of a candidate. Only OK and CUT_OFF are usable: both passed verification and have a time.

    CRASHED ended its process or destroyed the CUDA context. OUT_OF_MEMORY speaks of the moment: it keeps no candidate
    out of later measurements.
    """

    OK = "ok"
    CUT_OFF = "cut_off"
    COMPILE_FAILED = "compile_failed"
    LAUNCH_FAILED = "launch_failed"
    OUT_OF_MEMORY = "out_of_memory"
    WRONG_RESULT = "wrong_result"
    TIMED_OUT = "timed_out"
    CRASHED = "crashed"

    @property
    def usable(self) -> bool:
        """Whether the candidate computed right results and was timed."""
        return self in (Status.OK, Status.CUT_OFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One solver and configuration for one problem; all that crosses to a child process."""

    network_config: str
    solver_id: str
    config: Config

    @property
    def id(self) -> str:
        """Solver and configuration as one string; the id of the solution it becomes."""
        return f"{self.solver_id}:{self.config.json}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Statistics of one candidate's samples, all in milliseconds a run.

    Attributes:
        time_ms: median.
        min_ms, p20_ms, p80_ms: least sample, 20th and 80th percentile.
        samples: how many.
        protocol: version of the protocol that took them, such as "cuda-1".
    """

    time_ms: float
    min_ms: float
    p20_ms: float
    p80_ms: float
    samples: int
    protocol: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a candidate.

    Attributes:
        message: why it failed, "" otherwise.
        timing: for usable candidates.
        max_error: largest |error| / (|x| * |w|) seen in verification, in units of 1.
        kernel_hash: hash of sources, defines and options of the steps that were measured.
        contended: samples were disturbed, by another process's load or by clocks that stayed throttled.
        dropped_samples: samples that were taken while the device was throttled, and were taken again.
    """

    candidate: Candidate
    status: Status
    message: str = ""
    timing: Timing | None = None
    max_error: float | None = None
    workspace_bytes: int = 0
    deterministic: bool = True
    kernel_hash: str = ""
    contended: bool = False
    dropped_samples: int = 0
