"""Timing on a CUDA device: events around rows of runs, each on buffers of its own, after the L2 cache was flushed.

Short runs are captured in a CUDA graph, so that their launches from the host do not count. The cache is flushed by
reading: lines dirtied by writing would be written back during the timed runs.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from miofind.core.problem import ProblemDescription
from miofind.core.values import Values
from miofind.device.device import Device
from miofind.device.memory import DeviceMemory
from miofind.errors import WrongResultError, raise_if_interrupted
from miofind.launch.device_kernels import Argument, DeviceKernels, GridStride, check_kernel, int64
from miofind.launch.invoker import Bases, bases_of
from miofind.measure.backend import Repeatability, Runnable, TimedCandidate, TimingBackend
from miofind.measure.effort import SHORT_MS

if TYPE_CHECKING:
    from miofind.compiler import Compiler

logger = logging.getLogger(__name__)

_SAMPLE_MS = 0.1
_MOST_RUNS = 32
# An empty kernel takes about 1 us in a graph (H200): no run is shorter.
_LEAST_RUN_MS = 1e-3
# Above this the launches from the host, some 10 us, hide behind the run before.
_GRAPH_BELOW_MS = 1.0
_LEAST_FLUSH_BYTES = 32 << 20
_MEMORY_LIMIT_BYTES = 2 << 30
_ALIGNMENT = 512


def _aligned(size: int) -> int:
    """Bytes from one buffer to the next."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class FirstRun(NamedTuple):
    """How long a run took by itself, launched from the host.

    On an H200 whose host compiled beside, at least 25 of 3,773 candidates of 166 finds were launched too slowly to be
    timed so: 0.1 to 0.5 ms on the device read 1.0 to 1.3, sample after sample.

    Attributes:
        time_ms: on the device, from one event to the next.
        queued_ms: what the host took to queue both and what is between them.
    """

    time_ms: float
    queued_ms: float

    @property
    def waited(self) -> bool:
        """Whether the device may have waited for the host: its time says little where launches do not hide."""
        return 2 * self.queued_ms > self.time_ms

    @property
    def wants_graph(self) -> bool:
        """Whether it is timed without launches from the host."""
        return self.waited or self.time_ms < _GRAPH_BELOW_MS

    @property
    def misleads(self) -> bool:
        """Whether it could be cut off for the host's sake."""
        return self.waited and self.time_ms >= SHORT_MS


def flushing(words: int) -> tuple[GridStride, tuple[Argument, ...]]:
    """The kernel that reads so many words of 16 bytes, and its arguments."""
    kernel = GridStride(source="harness/measure.cu", entry="flush_l2", items=words, dtype="float32")
    return kernel, ("buffer", int64(words), "sink")


class CudaTimingBackend(TimingBackend):
    """Buffers of one problem on one device; one workspace serves all candidates.

    Attributes:
        memory: allocations and the stream that everything runs on.
        sets: what runs are given but for the workspace, addresses and default numbers; as many sets as the shortest
            imaginable run needs for a sample.
        workspace: address of the workspace, 0 for none.
        flush: evicts everything from the L2 cache, asynchronously.
    """

    protocol = "cuda-1"

    def __init__(
        self, problem: ProblemDescription, device: Device, compiler: Compiler, memory_limit_bytes: int | None
    ) -> None:
        self._problem = problem
        self._device = device
        self._kernels = DeviceKernels(device, compiler)
        self.memory = DeviceMemory(device.index)
        self.workspace = 0
        self._workspace_bytes = 0
        self._checksums: dict[int, Callable[[], None]] = {}
        try:
            with self.memory:
                self.flush = self._make_flush()
                self.sets = self._make_sets(memory_limit_bytes)
                self.memory.stream.synchronize()
        except BaseException:
            self.memory.close()
            raise

    def prepare(self, invoker: Runnable) -> TimedCandidate:
        """See `TimingBackend.prepare`."""
        with self.memory:
            return _CudaTimedCandidate(self, invoker)

    def reserve(self, size: int) -> None:
        """Make the workspace at least `size` bytes; its address may change, which voids captured graphs.

        Raises:
            MemoryError: it does not fit the device; the workspace is as large as before, for those that raced with it.
        """
        if size <= self._workspace_bytes:
            return
        self.memory.stream.synchronize()
        self.memory.free(self.workspace)
        before, self.workspace, self._workspace_bytes = self._workspace_bytes, 0, 0
        try:
            self.workspace, self._workspace_bytes = self.memory.allocate(size), size
        except MemoryError:
            if before:
                self.workspace, self._workspace_bytes = self.memory.allocate(before), before
            raise

    def close(self) -> None:
        """Give all memory back."""
        self.memory.close()

    def _make_flush(self) -> Callable[[], None]:
        words = max(_LEAST_FLUSH_BYTES, 2 * self._device.l2_bytes) // 16
        addresses = {"buffer": self.memory.allocate(16 * words), "sink": self.memory.allocate(4)}
        self.memory.set_bytes(addresses["buffer"], 0, 16 * words)
        return self._kernels.bind(*flushing(words), addresses, self.memory.stream_address)

    def _make_sets(self, limit: int | None) -> list[Bases]:
        """Sets of tensors; their outputs lie one after another, so that one kernel sees them all."""
        operands, output_bytes = self._problem.operands, self._output_bytes
        set_bytes = sum(_aligned(operand.tensor.bytes) for operand in operands)
        if limit is None:
            limit = min(_MEMORY_LIMIT_BYTES, self.memory.free_bytes // 4)
        fastest_ms = max(_LEAST_RUN_MS, 1e3 * self._problem.bytes / self._device.bandwidth_bytes_per_s)
        wanted = min(_MOST_RUNS, 1 + int(_SAMPLE_MS / fastest_ms))
        count = max(1, min(wanted, limit // set_bytes))
        self._outputs = self.memory.allocate(count * output_bytes)
        self._checksum = self.memory.allocate(8)
        self.memory.set_bytes(self._outputs, 0, count * output_bytes)
        sets = []
        for number in range(count):
            read = (operand for operand in operands if operand.is_input)
            addresses = {operand.name: self.memory.allocate(_aligned(operand.tensor.bytes)) for operand in read}
            end = self._outputs + number * output_bytes
            for operand in self._problem.outputs:
                addresses[operand.name], end = end, end + _aligned(operand.tensor.bytes)
            for i, operand in enumerate(operands):
                seed, stream = len(operands) * number + i, self.memory.stream_address
                self._kernels.fill(operand.tensor, addresses[operand.name], Values.NORMAL, seed, stream)
            sets.append(bases_of(self._problem, addresses, 0)[:-1])
        return sets

    @property
    def _output_bytes(self) -> int:
        """Of the outputs of a set."""
        return sum(_aligned(operand.tensor.bytes) for operand in self._problem.outputs)

    def begin_checksum(self, count: int) -> None:
        """Sum the outputs of the first `count` sets up, asynchronously."""
        self.memory.set_bytes(self._checksum, 0, 8)
        if count not in self._checksums:
            words = count * self._output_bytes // 2
            kernel = check_kernel("checksum", words, self._problem.output.dtype)
            addresses = {"words": self._outputs, "sum": self._checksum}
            stream = self.memory.stream_address
            self._checksums[count] = self._kernels.bind(kernel, ("words", int64(words), "sum"), addresses, stream)
        self._checksums[count]()

    def checksum(self) -> int:
        """What `begin_checksum` asked for; waits for the stream."""
        return int(self.memory.download(self._checksum, 1, np.uint64)[0])


class _CudaTimedCandidate(TimedCandidate):
    """A candidate on a device; its graph is captured anew when the workspace has moved."""

    def __init__(self, backend: CudaTimingBackend, invoker: Runnable) -> None:
        self._graph: Any = None  # ends before what it launches: a library may unload its kernels with its plan
        self._backend = backend
        self._invoker = invoker
        self._runs = 1
        self._repeatability = Repeatability(invoker)
        self._graph_workspace = 0
        self._queued_ms = 0.0  # what the host took to queue the last row
        backend.reserve(invoker.workspace_bytes)
        self._run(0)
        first = FirstRun(self._timed(1)[0], self._queued_ms)
        self.rough_ms, self._captures = first.time_ms, first.wants_graph
        if self._captures:
            self._runs = self._row_length(self.rough_ms)
        if first.misleads:
            self._capture()
            self.rough_ms = self._timed(1)[0]

    def samples(self, count: int) -> list[float]:
        """See `TimedCandidate.samples`."""
        with self._backend.memory:
            self._backend.reserve(self._invoker.workspace_bytes)  # gone where a larger one did not fit, nor this again
            if self._captures and (self._graph is None or self._graph_workspace != self._backend.workspace):
                self._capture()
            return self._timed(count)

    def _row_length(self, run_ms: float) -> int:
        """Runs that make a sample long enough, no more than there are buffer sets."""
        return max(1, min(len(self._backend.sets), math.ceil(_SAMPLE_MS / max(run_ms, _LEAST_RUN_MS))))

    def _capture(self) -> None:
        """Capture a row of runs and warm its graph up; longer rows where the rough time proves too long."""
        try:
            self._graph = self._captured()
            runs = self._row_length(self._timed(1)[0])
            if runs > self._runs:
                self._runs = runs
                self._graph = self._captured()
                self._timed(1)
        except WrongResultError:
            raise
        except Exception as error:  # whatever a library raises under capture: time direct launches instead
            raise_if_interrupted(error)
            logger.debug("%s cannot be captured, timed by launches: %s", self._invoker.solver_id, error)
            self._graph, self._captures = None, False
            self._timed(1)

    def _captured(self) -> Any:
        memory = self._backend.memory
        graph = memory.graph_of(self._row)
        graph.upload(memory.stream)
        self._graph_workspace = self._backend.workspace
        return graph

    def _row(self) -> None:
        for i in range(self._runs):
            self._run(i)

    def _run(self, number: int) -> None:
        backend = self._backend
        workspace = backend.workspace if self._invoker.workspace_bytes else 0
        self._invoker.run((*backend.sets[number % len(backend.sets)], workspace), backend.memory.stream_address)

    def _timed(self, count: int) -> list[float]:
        """Milliseconds a run of `count` rows, all queued before the first is waited for."""
        import cupy

        stream = self._backend.memory.stream
        pairs = []
        for _ in range(count):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            self._backend.flush()
            began = time.perf_counter()
            start.record(stream)
            if self._graph is None:
                self._row()
            else:
                self._graph.launch(stream)
            stop.record(stream)
            self._queued_ms = 1e3 * (time.perf_counter() - began)
            pairs.append((start, stop))
        if self._repeatability.is_claimed and (count > 1 or not self._repeatability.knows(self._runs)):
            self._backend.begin_checksum(self._runs)
            self._repeatability.see(self._runs, self._backend.checksum())
        stream.synchronize()
        return [cupy.cuda.get_elapsed_time(start, stop) / self._runs for start, stop in pairs]
