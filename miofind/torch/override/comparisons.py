"""How miofind compares with PyTorch's own kernels, problem by problem, as tunings of this process measured it.

PyTorch picks among cuDNN's kernels and its own by rules of its own, so only a measurement beside it tells. What was
measured is one solution; where a limit on workspaces or a switch of PyTorch's has another one run, their times tell.
"""

from __future__ import annotations

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.process.forks import ForkedLock

_measured: dict[tuple[str, str], tuple[float, float | None]] = {}
"""Of a device and a problem, the gain and the time of the solution that was compared."""

_behind: dict[tuple[str, str], dict[str, float]] = {}
"""Of a device and a bare problem, the gains below 1 of problems with an epilogue, by the names of these."""
_lock = ForkedLock()


def note(problem: ProblemDescription, device: Device, gain: float, time_ms: float | None = None) -> None:
    """Remember how many times as fast miofind is on a kind of device, by a solution of that time.

    Where PyTorch is faster at a problem with an epilogue it is so without, too, as long as nobody measured that: the
    find of the former had tried a solution of the latter and a pass behind it.
    """
    with _lock:
        _measured[device.identity, problem.network_config] = gain, time_ms
        if problem.epilogue:
            fused = _behind.setdefault((device.identity, problem.bare.network_config), {})
            fused.pop(problem.network_config, None)
            if gain < 1:
                fused[problem.network_config] = gain


def gain(problem: ProblemDescription, device: Device, time_ms: float | None = None) -> float | None:
    """How many times as fast as PyTorch miofind is by what was measured; None where nothing was.

    Args:
        time_ms: of the solution that is to run.
    """
    key = (device.identity, problem.network_config)
    with _lock:
        if key not in _measured:
            return min(_behind.get(key, {}).values(), default=None)
        measured, compared_ms = _measured[key]
    if not time_ms or not compared_ms or time_ms == compared_ms:
        return measured
    return measured * compared_ms / time_ms


def known() -> tuple[tuple[str, str, float, float], ...]:
    """Every device, problem, gain and time (0 where unknown) that was measured, in order: what decisions depend on."""
    with _lock:
        return tuple(sorted((*key, gain, time_ms or 0.0) for key, (gain, time_ms) in _measured.items()))


def forget() -> None:
    """Know of no comparison any more."""
    with _lock:
        _measured.clear()
        _behind.clear()
