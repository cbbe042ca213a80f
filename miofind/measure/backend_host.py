"""Timing on the CPU place: wall clock, two rotating buffer sets."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from miofind.core.problem import ProblemDescription
from miofind.core.values import Values
from miofind.launch.invoker import Bases, bases_of
from miofind.measure.backend import Repeatability, Runnable, TimedCandidate, TimingBackend
from miofind.verify.harness_host import GuardedArray, random_values

_SETS = 2
_SAMPLE_MS = 1.0
_MOST_RUNS = 32


class HostTimingBackend(TimingBackend):
    """Buffers of one problem on the CPU place; one workspace serves all candidates."""

    protocol = "cpu-1"

    def __init__(self, problem: ProblemDescription) -> None:
        self._problem = problem
        self._outputs: list[tuple[GuardedArray, ...]] = []
        self.sets = [self._buffers(seed) for seed in range(_SETS)]
        self._workspace = np.empty(0, np.uint8)

    def prepare(self, invoker: Runnable) -> TimedCandidate:
        """See `TimingBackend.prepare`."""
        return _HostTimedCandidate(self, invoker)

    def workspace(self, size: int) -> NDArray[np.uint8] | None:
        """`size` bytes at a multiple of 256, None for none."""
        if size == 0:
            return None
        if self._workspace.size < size:
            self._workspace = GuardedArray(size).bytes
        return self._workspace[:size]

    def output_checksum(self, number: int) -> int:
        """Of the outputs of one set."""
        return hash(tuple(buffer.checksum for buffer in self._outputs[number]))

    def close(self) -> None:
        """Forget all buffers."""
        self.sets.clear()
        self._outputs.clear()

    def _buffers(self, seed: int) -> Bases:
        """The bases of a run but for the workspace: operands between guard bands, and an epilogue's default numbers."""
        operands, tensors, written = self._problem.operands, {}, []
        for i, operand in enumerate(operands):
            buffer = GuardedArray(operand.tensor.bytes)
            tensor = buffer.tensor(operand.tensor)
            tensor[...] = random_values(operand.tensor, Values.NORMAL, len(operands) * seed + i)
            tensors[operand.name] = tensor.reshape(operand.shape)
            if not operand.is_input:
                written.append(buffer)
        self._outputs.append(tuple(written))
        return bases_of(self._problem, tensors, None)[:-1]


class _HostTimedCandidate(TimedCandidate):
    def __init__(self, backend: HostTimingBackend, invoker: Runnable) -> None:
        self._backend = backend
        self._invoker = invoker
        self._repeatability = Repeatability(invoker)
        self._row(1)
        self.rough_ms = self._row(1)
        self._runs = int(min(_MOST_RUNS, max(1.0, _SAMPLE_MS / self.rough_ms)))

    def samples(self, count: int) -> list[float]:
        """See `TimedCandidate.samples`."""
        return [self._row(self._runs) for _ in range(count)]

    def _row(self, runs: int) -> float:
        """Mean milliseconds of `runs` runs one after another."""
        workspace = self._backend.workspace(self._invoker.workspace_bytes)
        sets = [(*tensors, workspace) for tensors in self._backend.sets]
        start = time.perf_counter_ns()
        for i in range(runs):
            self._invoker.run(sets[i % len(sets)], 0)
        elapsed_ms = max(1, time.perf_counter_ns() - start) / 1e6
        if self._repeatability.is_claimed:
            for number in range(min(runs, len(sets))):
                self._repeatability.see(number, self._backend.output_checksum(number))
        return elapsed_ms / runs
