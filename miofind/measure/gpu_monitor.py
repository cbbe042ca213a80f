"""Who else uses a GPU and what slows its clocks, as NVML tells it; silent where NVML is missing or refuses.

Asked before and after a batch of samples, never between the launches of one.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from miofind.device.device import Device

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# nvml.h, nvmlClocksEventReasons. The software power cap is left out: under full tensor load it is how an H200 runs, all
# day, so that samples without it would be those that users never see; it meets all candidates of a final alike.
_HW_SLOWDOWN = 0x08
_SW_THERMAL_SLOWDOWN = 0x20
_HW_THERMAL_SLOWDOWN = 0x40
_HW_POWER_BRAKE = 0x80
THROTTLES = _HW_SLOWDOWN | _SW_THERMAL_SLOWDOWN | _HW_THERMAL_SLOWDOWN | _HW_POWER_BRAKE

_SUCCESS = 0

_BUSY_PERCENT = 5
"""Share of the multiprocessors' time from which a process is load; idle contexts are none."""

_PARENT_BUSY_PERCENT = 30
"""The same of the parent: more is not what planning takes, but a caller's own work."""

_PROCESSES_EVERY_S = 0.5
"""NVML samples processes a few times a second, and listing them takes about a millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One look at a GPU.

    Attributes:
        contended: another process computes on it.
        throttled: heat or the power supply hold its clocks down.
    """

    contended: bool = False
    throttled: bool = False


class GpuMonitor:
    """Looks at one GPU, or at one MIG instance of it.

    Args:
        nvml: the module pynvml, initialised.
        handle: NVML's handle of the device or MIG instance.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._clocks_handle = self._ask(lambda: nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)) or handle
        self._seen_us = 0
        self._counts_load = True
        self._contended = False
        self._asked_at = -_PROCESSES_EVERY_S

    def look(self) -> Reading:
        """What is seen now; what NVML refuses to tell counts as undisturbed."""
        reasons = self._ask(lambda: self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._clocks_handle)) or 0
        if time.monotonic() - self._asked_at >= _PROCESSES_EVERY_S:
            self._contended = self._has_company()
            self._asked_at = time.monotonic()
        return Reading(contended=self._contended, throttled=bool(reasons & THROTTLES))

    def _has_company(self) -> bool:
        """Whether other processes load the device: by their use of it, else by their contexts.

        The parent may load it a little: it plans what comes next, which NVML counts as use at times. It slows nothing:
        1002 rows of an H200 beside a parent so counted were 0.9 % slower than on another day, 20,792 others 0.8 %.
        """
        listed = self._ask(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)) or []
        pids = {int(process.pid) for process in listed}
        known = os.getpid() in pids
        busy = self._busy() if self._counts_load else None
        if busy is None:
            # The parent may hold a context; where NVML counts in another PID namespace, nobody can be told apart.
            return known and bool(pids - {os.getpid(), os.getppid()})
        if len(busy) > 1 or not known:
            logger.debug("NVML: this process is %d, contexts have %s, busy were %s", os.getpid(), pids, busy)
        if known:
            return any(pid != os.getpid() and use >= _least_load(pid) for pid, use in busy.items())
        return len(busy) > 1  # in a container this process has another number there: one of the busy is it

    def _busy(self) -> dict[int, int] | None:
        """Most of its time, in percent, that each process computed since the last call, of those that did.

        None where the device does not tell, as under MIG.
        """
        nvml = self._nvml
        try:
            samples = nvml.nvmlDeviceGetProcessUtilization(self._handle, self._seen_us)
        except nvml.NVMLError_NotFound:
            return {}
        except nvml.NVMLError as error:
            if getattr(error, "value", None) == _SUCCESS:  # pynvml raises this where there is no sample
                return {}
            logger.debug("NVML does not tell processes' use of the GPU: %s", error)
            self._counts_load = False
            return None
        first, self._seen_us = self._seen_us == 0, max((s.timeStamp for s in samples), default=self._seen_us)
        if first:  # these reach back to before this process measured
            return {}
        use: dict[int, int] = {}
        for sample in samples:
            if sample.smUtil >= _BUSY_PERCENT:
                use[int(sample.pid)] = max(int(sample.smUtil), use.get(int(sample.pid), 0))
        return use

    def _ask(self, question: Callable[[], _T]) -> _T | None:
        try:
            return question()
        except self._nvml.NVMLError as error:
            logger.debug("NVML: %s", error)
            return None


def _least_load(pid: int) -> int:
    """Percent from which a process's use of the device is load."""
    return _PARENT_BUSY_PERCENT if pid == os.getppid() else _BUSY_PERCENT


@functools.cache
def gpu_monitor(device: Device) -> GpuMonitor | None:
    """The monitor of a CUDA device; None for other devices, and where NVML or its Python package is missing."""
    if not device.uuid:
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return GpuMonitor(pynvml, pynvml.nvmlDeviceGetHandleByUUID(device.uuid))
    except pynvml.NVMLError as error:
        logger.debug("%s is not watched: %s", device.name, error)
        return None
