"""The state of a tuning as its events tell it: a line a device, with what is left of its kind's work and how long that
may take.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from miofind.device.device import Device
from miofind.tune.service import (
    Task,
    TuneBegan,
    TuneEvent,
    TuneFinished,
    TuneLost,
    TuneResult,
    TuneStarted,
    TuneStatus,
)


@dataclass(slots=True, kw_only=True)
class DeviceProgress:
    """What one device has done and does.

    Attributes:
        task: under measurement since `since` of time.monotonic(); None between tasks.
        counts: problems it is done with, by what became of them.
        lost: whether it no longer answers.
    """

    device: Device
    task: Task | None = None
    since: float = 0.0
    counts: dict[TuneStatus, int] = field(default_factory=lambda: dict.fromkeys(TuneStatus, 0))
    lost: bool = False


@dataclass(slots=True)
class _Kind:
    """What devices of one kind share."""

    left: int = 0
    left_s: float = 0.0
    measured_s: float = 0.0
    estimated_s: float = 0.0
    log_gains: float = 0.0
    gain_counts: int = 0


class TuneProgress:
    """How far a tuning is, as its events tell it."""

    def __init__(self) -> None:
        self.devices: list[DeviceProgress] = []
        self.total = 0
        self._kinds: dict[str, _Kind] = {}

    def take(self, event: TuneEvent) -> None:
        """Follow one event."""
        match event:
            case TuneBegan():
                self._begin(event.devices, event.tasks)
            case TuneStarted():
                state = self.devices[event.device]
                state.task, state.since = event.task, time.monotonic()
            case TuneLost():
                state = self.devices[event.device]
                state.lost, state.task = True, None
            case TuneFinished():
                state = self.devices[event.device]
                state.task = None
                state.counts[event.result.status] += 1
                self._finish(event.task, event.result)

    def counts(self) -> dict[TuneStatus, int]:
        """Problems by what became of them, on all devices."""
        return {status: sum(state.counts[status] for state in self.devices) for status in TuneStatus}

    def left(self, state: DeviceProgress) -> int:
        """Problems left for a device and the others of its kind."""
        return self._kinds[state.device.identity].left

    def eta_s(self, state: DeviceProgress) -> float | None:
        """Seconds until a device's kind is done with all; None before anything was measured, or where all are lost."""
        identity = state.device.identity
        kind = self._kinds[identity]
        alive = sum(other.device.identity == identity and not other.lost for other in self.devices)
        if not alive or not kind.estimated_s:
            return None
        pace = kind.measured_s / kind.estimated_s
        now = time.monotonic()
        # Tasks are copied first: another thread may draw while this one goes on.
        running = [(other.task, other.since) for other in self.devices if other.device.identity == identity]
        running_s = sum(min(now - since, pace * task.estimate_s) for task, since in running if task is not None)
        return max(0.0, pace * kind.left_s - running_s) / alive

    def gain(self, state: DeviceProgress) -> float | None:
        """Mean gain of a device's kind so far."""
        kind = self._kinds[state.device.identity]
        return math.exp(kind.log_gains / kind.gain_counts) if kind.gain_counts else None

    def _begin(self, devices: Sequence[Device], tasks: Sequence[Task]) -> None:
        self.devices = [DeviceProgress(device=device) for device in devices]
        self._kinds = {device.identity: _Kind() for device in devices}
        self.total = len(tasks)
        for task in tasks:
            kind = self._kinds[task.kind]
            kind.left += 1
            kind.left_s += task.estimate_s

    def _finish(self, task: Task, result: TuneResult) -> None:
        kind = self._kinds[task.kind]
        kind.left -= 1
        kind.left_s -= task.estimate_s
        if result.status is not TuneStatus.TUNED:
            return
        kind.measured_s += result.seconds
        kind.estimated_s += task.estimate_s
        if result.gain is not None:
            kind.log_gains += result.request.count * math.log(result.gain)
            kind.gain_counts += result.request.count
