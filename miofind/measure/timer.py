"""Time of one candidate: samples from cold caches, by a protocol that each row names.

A `Timer` holds rotating buffer sets of one problem; a `TimedCandidate` is one candidate on it. Which candidates are
sampled, and how often, is for `race` to say.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device, Place
from miofind.errors import LaunchError, MeasurementError, MiofindError, described, raise_if_interrupted
from miofind.measure.backend import Runnable, TimedCandidate, TimingBackend
from miofind.measure.gpu_monitor import GpuMonitor, Reading, gpu_monitor
from miofind.process.forks import loading
from miofind.solver.candidate import Timing

if TYPE_CHECKING:
    from miofind.compiler import Compiler

# Batches of samples that a timer takes again because the device was throttled, and the pause before each: 10 s in all,
# after which a device that stays throttled is measured as it is.
_RETRIES = 40
_PAUSE_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples of one candidate, taken together.

    Attributes:
        times_ms: milliseconds a run.
        contended: another process loaded the device, or it stayed throttled however often the samples were retaken.
        dropped: samples left out because the device was throttled.
    """

    times_ms: list[float]
    contended: bool = False
    dropped: int = 0


class Timer:
    """Where the candidates of one problem are timed; a context manager.

    Args:
        problem, device: what is computed, and where.
        compiler: builds the kernels that fill buffers and flush the cache; not used on the CPU place.
        memory_limit_bytes: of the rotating buffer sets; by default 2 GiB, or a quarter of the free memory if that is
            less. One set is always made.

    Attributes:
        monitor: says when the device is disturbed; None where nothing can, as on the CPU place, whose load is mostly
            the candidates' own threads.

    Raises:
        MemoryError: not even one set of buffers fits.
    """

    def __init__(
        self,
        problem: ProblemDescription,
        device: Device,
        compiler: Compiler,
        *,
        memory_limit_bytes: int | None = None,
    ) -> None:
        self.problem = problem
        self.device = device
        self.monitor: GpuMonitor | None = gpu_monitor(device)
        self._retries = _RETRIES
        with np.errstate(all="ignore"):  # whatever the caller has NumPy do where an input is rounded to nothing
            self._backend = _backend(problem, device, compiler, memory_limit_bytes)

    @property
    def protocol(self) -> str:
        """Version of the protocol, "cuda-1" or "cpu-1"; raised with every change that moves times."""
        return self._backend.protocol

    def prepare(self, invoker: Runnable) -> TimedCandidate:
        """A candidate made ready: warmed up, with its rough time.

        Raises:
            LaunchError: it failed to start or to finish; the cause is chained.
            MemoryError: its workspace does not fit the device.
        """
        with _launch_errors(invoker):
            return self._backend.prepare(invoker)

    def samples(self, timed: TimedCandidate, invoker: Runnable, count: int) -> list[float]:
        """`count` further samples of a candidate in milliseconds a run; raises as `batch` does."""
        return self.batch(timed, invoker, count).times_ms

    def batch(self, timed: TimedCandidate, invoker: Runnable, count: int) -> Batch:
        """`count` further samples of a candidate, taken again while the device is throttled.

        Raises:
            LaunchError: it failed to start or to finish; the cause is chained.
            WrongResultError: its outputs are no longer those of its first runs, and it is deterministic.
            MeasurementError: the clock gave no positive time.
        """
        contended, dropped = False, 0
        while True:
            before = self._look()
            times = self._sampled(timed, invoker, count)
            after = self._look()
            contended = contended or before.contended or after.contended
            if not (before.throttled or after.throttled):
                return Batch(times_ms=times, contended=contended, dropped=dropped)
            if not self._retries:
                return Batch(times_ms=times, contended=True, dropped=dropped)
            self._retries -= 1
            dropped += count
            time.sleep(_PAUSE_S)

    def _look(self) -> Reading:
        return Reading() if self.monitor is None else self.monitor.look()

    def _sampled(self, timed: TimedCandidate, invoker: Runnable, count: int) -> list[float]:
        with _launch_errors(invoker):
            times = timed.samples(count)
        if not all(time_ms > 0 for time_ms in times):
            raise MeasurementError(f"{invoker.solver_id} on {self.problem}: times {times} ms are not all positive")
        return times

    def timing(self, samples: Sequence[float]) -> Timing:
        """Statistics of samples in milliseconds."""
        low, high = np.percentile(samples, (20, 80))
        return Timing(
            time_ms=statistics.median(samples),
            min_ms=min(samples),
            p20_ms=float(low),
            p80_ms=float(high),
            samples=len(samples),
            protocol=self.protocol,
        )

    def close(self) -> None:
        """Give all memory back."""
        self._backend.close()

    def __enter__(self) -> Timer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _launch_errors:  # noqa: N801, used as a statement's word
    """Turns what a candidate raises into LaunchError; our own errors and MemoryError pass."""

    def __init__(self, invoker: Runnable) -> None:
        self._invoker = invoker

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, (MiofindError, MemoryError)):
            return
        raise_if_interrupted(error)
        invoker = self._invoker
        name = f"{invoker.solver_id} {invoker.config.json}"
        raise LaunchError(f"{name} failed on {invoker.problem} while timed: {described(error, str)}") from error


def load_backend(place: Place) -> type[TimingBackend]:
    """What times on a device of a place."""
    with loading():
        if place is Place.CPU:
            from miofind.measure.backend_host import HostTimingBackend

            return HostTimingBackend
        from miofind.measure.backend_cuda import CudaTimingBackend

        return CudaTimingBackend


def _backend(
    problem: ProblemDescription, device: Device, compiler: Compiler, memory_limit_bytes: int | None
) -> TimingBackend:
    backend: Callable[..., TimingBackend] = load_backend(device.place)
    if device.place is Place.CPU:
        return backend(problem)
    return backend(problem, device, compiler, memory_limit_bytes)
