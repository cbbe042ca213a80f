"""Device memory of one measurement: from a pool of its own, so that closing gives everything back to the driver.

A process that does nothing but measure keeps what it had for the next measurement, see `keep_pools`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from types import TracebackType

logger = logging.getLogger(__name__)


class HostInt:
    """An integer of 32 bits in page-locked memory.

    Attributes:
        address: where kernels find it.
    """

    def __init__(self, memory: Any) -> None:
        self._at = np.frombuffer(memory, np.int32, 1)
        self.address = int(memory.ptr)

    @property
    def value(self) -> int:
        """The integer."""
        return int(self._at[0])

    @value.setter
    def value(self, value: int) -> None:
        self._at[0] = value


_KEPT_SHARE = 8
"""Of the memory that others leave of a device no more than one in so many parts is kept: libraries take some, too."""

_kept_pools: dict[int, Any] | None = None


def keep_pools() -> None:
    """Have all measurements of this process share a pool a device, until `empty_pools`.

    A measurement has some hundred blocks, and the driver takes 50 us for each.
    """
    global _kept_pools
    _kept_pools = {} if _kept_pools is None else _kept_pools


def empty_pools() -> None:
    """Give back to the driver what no measurement holds of the pools that are kept."""
    for pool in (_kept_pools or {}).values():
        pool.free_all_blocks()


def kept_bytes(device_index: int) -> int:
    """Memory of a device that is kept and that no measurement holds."""
    pool = (_kept_pools or {}).get(device_index)
    return 0 if pool is None else int(pool.free_bytes())


class DeviceMemory:
    """Allocations, a stream of their own and copies on it; a context manager that makes the device current.

    An error leaves the block after what the stream was given before it, so that a fault of that is known by then.

    Attributes:
        stream: a non-blocking CuPy stream.
        stream_address: its address.
    """

    def __init__(self, device_index: int) -> None:
        import cupy

        self._device = cupy.cuda.Device(device_index)
        self._pool = cupy.cuda.MemoryPool()
        if _kept_pools is not None:
            self._pool = _kept_pools.setdefault(device_index, self._pool)
        self._blocks: dict[int, Any] = {}
        self._other: Any = None
        with self._device:
            self.stream = cupy.cuda.Stream(non_blocking=True)
        self.stream_address = int(self.stream.ptr)

    @property
    def free_bytes(self) -> int:
        """Device memory that nobody holds, or this process from an earlier measurement alone."""
        import cupy

        with self._device:
            return int(cupy.cuda.runtime.memGetInfo()[0]) + int(self._pool.free_bytes())

    def __enter__(self) -> DeviceMemory:
        self._device.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import cupy

        try:
            if isinstance(error, Exception):  # Ctrl-C waits for nothing
                self._synchronize()
        except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as fault:
            logger.debug("the stream ended with %s", fault)
        finally:
            self._device.__exit__(kind, error, trace)

    @contextmanager
    def beside(self) -> Iterator[int]:
        """Address of a second stream, which begins when what the first was given before has ended.

        What the first is given after the block begins when the second has ended, unless the block raised.
        """
        import cupy

        with self._device:
            other = self._other = self._other or cupy.cuda.Stream(non_blocking=True)
            other.wait_event(self.stream.record())
            yield int(other.ptr)
            self.stream.wait_event(other.record())

    def graph_of(self, work: Callable[[], None]) -> Any:
        """The CUDA graph of what a function gives the stream, none of which runs before the graph is launched."""
        self.stream.begin_capture()
        try:
            work()
        except BaseException:
            try:
                self.stream.end_capture()
            except RuntimeError as error:  # CuPy's errors are: the driver tells once more that it failed
                logger.debug("a capture ended: %s", error)
            raise
        return self.stream.end_capture()

    def host_int(self) -> HostInt:
        """An integer that kernels read while the host writes it."""
        import cupy

        with self._device:
            return HostInt(cupy.cuda.alloc_pinned_memory(np.dtype(np.int32).itemsize))

    def allocate(self, size: int) -> int:
        """Address of `size` bytes at a multiple of 512.

        Raises:
            MemoryError: the device has no such block left.
        """
        import cupy

        # A pool gives a stream's blocks to that stream alone. Whatever is freed here has been waited for: one for all.
        with self._device, cupy.cuda.Stream.null:
            try:
                block = self._pool.malloc(max(1, size))
            except cupy.cuda.memory.OutOfMemoryError:
                self._pool.free_all_blocks()
                cupy.get_default_memory_pool().free_all_blocks()
                block = self._pool.malloc(max(1, size))
        address = int(block.ptr)
        self._blocks[address] = block
        return address

    def free(self, address: int) -> None:
        """Give one allocation back, unless it is 0; work queued on it must have finished."""
        if address == 0:
            return
        del self._blocks[address]
        self._give_back()

    def set_bytes(self, address: int, value: int, size: int) -> None:
        """Set bytes, asynchronously."""
        import cupy

        if size:
            cupy.cuda.runtime.memsetAsync(address, value, size, self.stream_address)

    def upload(self, array: NDArray[Any]) -> int:
        """Address of a copy of a contiguous host array."""
        import cupy

        address = self.allocate(array.nbytes)
        kind = cupy.cuda.runtime.memcpyHostToDevice
        cupy.cuda.runtime.memcpyAsync(address, array.ctypes.data, array.nbytes, kind, self.stream_address)
        self.stream.synchronize()
        return address

    def download(self, address: int, count: int, dtype: Any) -> NDArray[Any]:
        """`count` elements at an address, after everything queued before; waits for the stream."""
        import cupy

        array = np.empty(count, dtype)
        kind = cupy.cuda.runtime.memcpyDeviceToHost
        cupy.cuda.runtime.memcpyAsync(array.ctypes.data, address, array.nbytes, kind, self.stream_address)
        self.stream.synchronize()
        return array

    def close(self) -> None:
        """Give all memory back, once queued work has finished; a lost context is no further error here."""
        import cupy

        try:
            with self._device:
                self._synchronize()
            self._blocks.clear()
            self._give_back()
        except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError):
            self._blocks.clear()

    def _synchronize(self) -> None:
        """Wait for both streams: the first does not wait for the second where the block beside it raised."""
        self.stream.synchronize()
        if self._other is not None:
            self._other.synchronize()

    def _give_back(self) -> None:
        """Give the driver what is not held, unless this process keeps it."""
        with self._device:
            most = 0 if _kept_pools is None else self.free_bytes // _KEPT_SHARE
            if self._pool.total_bytes() > most:
                self._pool.free_all_blocks()
