"""How miofind compares with PyTorch's own kernels, problem by problem, as tunings measured it and the FindDB keeps it.

PyTorch picks among cuDNN's kernels and its own by rules of its own, so only a measurement beside it tells. A rival's
row of the FindDB has its time as a multiple of the stored time of the solution that was timed beside it. So it can be
held against all other rows of the problem: another solution may run, or be measured, later.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from miofind.core.network_config import end_of_fused
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.device.environment import versions
from miofind.errors import InvalidProblemError
from miofind.find.lookup import records
from miofind.find.recording import storable
from miofind.finddb import RIVAL, Row, Store
from miofind.options import FindOptions
from miofind.runtime.handle import Handle
from miofind.runtime.solution import Solution
from miofind.solver.steps import Config
from miofind.torch.override.flags import Flags

_SOLVER_ID = "PyTorch"
_PROTOCOL = "beside-1"
"""Raised when times come to mean something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """PyTorch's time at a problem, beside the times of its solutions.

    Attributes:
        time_ms: comparable with the time of each solution.
        measured_at: ISO 8601 in UTC.
    """

    time_ms: float
    measured_at: str

    def gain(self, solution: Solution) -> float:
        """How many times as fast as PyTorch a solution is."""
        return self.time_ms / solution.time_ms

    def told(self, solution: Solution) -> str:
        """That PyTorch is preferred to a solution, for people."""
        times = solution.time_ms / self.time_ms
        day = self.measured_at.partition("T")[0]
        return f"PyTorch's own kernel is {times:.2f} times as fast as {solution.solver_id}, measured {day}"


def note(solution: Solution, handle: Handle, flags: Flags, own_ms: float, torch_ms: float) -> None:
    """Remember how a solution and PyTorch compare, for this process and those that have its FindDB.

    Args:
        flags: PyTorch's switches as they were.
        own_ms, torch_ms: times that were taken in turn, of the solution and of PyTorch.
    """
    problem, gain = solution.problem, torch_ms / own_ms
    row = Row(
        solver_id=_SOLVER_ID,
        solver_version=0,
        config=_config(flags),
        status=RIVAL,
        message=f"{gain:.3g} times the time of {solution.id}",
        time_ms=gain * solution.time_ms if solution.samples else torch_ms,
        protocol=_PROTOCOL,
        deterministic=flags.deterministic,
    )
    for kept in storable(problem, handle, [row]):
        handle.database.record_rival(
            handle.device.identity, problem.network_config, kept, environment=versions(handle.device)
        )


def compared(fastest: Solution, handle: Handle, flags: Flags, options: FindOptions) -> Comparison | None:
    """PyTorch's time at a solution's problem, by its release here and these switches; None where nobody measured it.

    Where PyTorch is faster at a problem with an epilogue it is so without, too, as long as nobody measured that: the
    find of the former had tried a solution of the latter and a pass behind it.

    Args:
        fastest: the problem's fastest solution.
        options: with which a fused problem is answered.
    """
    name = fastest.problem.network_config
    wanted = (_SOLVER_ID, _config(flags), _PROTOCOL)
    newest: dict[str, Row] = {}
    for of, row in handle.database.rivals(handle.device.identity, name, end_of_fused(name)):
        if (row.solver_id, row.config, row.protocol) == wanted and (of not in newest or newest[of].age < row.age):
            newest[of] = row
    own = newest.pop(name, None)
    if own is not None and own.time_ms is not None:
        return Comparison(time_ms=own.time_ms, measured_at=own.created_at)
    behind = [_as_bare(row, of, fastest, handle, options) for of, row in newest.items()]
    return min(filter(None, behind), key=lambda each: each.time_ms, default=None)


def _as_bare(
    row: Row, network_config: str, fastest: Solution, handle: Handle, options: FindOptions
) -> Comparison | None:
    """What PyTorch's time at a fused problem says of the bare one; None where it says nothing."""
    try:
        problem = ProblemDescription.from_network_config(network_config)
    except InvalidProblemError:  # of another release
        return None
    found = records.look_up(problem.flattened, options, handle, queue=False)
    if not found or row.time_ms is None or row.time_ms >= found[0].time_ms:
        return None
    return Comparison(time_ms=row.time_ms / found[0].time_ms * fastest.time_ms, measured_at=row.created_at)


def known(store: Store, device: Device) -> list[tuple[tuple[str, str], float | None]]:
    """Problem, configuration and time of each comparison in force that a FindDB in memory has, in order."""
    rows = ((key.network_config, row) for key, row in store.rows(device.identity) if row.is_rival)
    by_age = sorted(rows, key=lambda each: each[1].age)
    return sorted({(of, row.config): row.time_ms for of, row in by_age}.items(), key=lambda each: each[0])


def _config(flags: Flags) -> str:
    """What decides which kernel PyTorch runs: its release, cuDNN's, and the switches that are not as they come.

    A comparison has cudnn.benchmark on, and the problem tells whether float32 may be TF32.
    """
    told: dict[str, str | int | bool] = {"torch": str(torch.__version__)}
    cudnn = torch.backends.cudnn.version()
    if cudnn is not None:
        told["cudnn"] = cudnn
    if flags.deterministic:
        told["deterministic"] = True
    if not flags.enabled:
        told["cudnn_enabled"] = False
    if flags.depthwise_kernel != "auto":
        told["depthwise_kernel"] = flags.depthwise_kernel
    return Config(told).json
