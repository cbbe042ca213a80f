"""How miofind compares with PyTorch's own kernels, problem by problem, as tunings of this process measured it.

PyTorch picks among cuDNN's kernels and its own by rules of its own, so only a measurement beside it tells.
"""

from __future__ import annotations

import threading

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device

_gains: dict[tuple[str, str], float] = {}
_lock = threading.Lock()


def note(problem: ProblemDescription, device: Device, gain: float) -> None:
    """Remember how many times as fast miofind is on a kind of device.

    Where PyTorch is faster at a problem with an epilogue it is so without, too: the find of the former had tried a
    solution of the latter and a pass behind it.
    """
    with _lock:
        _gains[device.identity, problem.network_config] = gain
        if gain < 1:
            _gains.setdefault((device.identity, problem.bare.network_config), gain)


def gain(problem: ProblemDescription, device: Device) -> float | None:
    """How many times as fast as PyTorch miofind was measured to be; None where it was not."""
    return _gains.get((device.identity, problem.network_config))


def forget() -> None:
    """Know of no comparison any more."""
    with _lock:
        _gains.clear()
