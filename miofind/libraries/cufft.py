"""Fourier transforms by cuFFT: plans made once, launched with device addresses, a work area and a stream.

A plan takes its work area from the caller at each launch, so that a launch allocates nothing and may be captured in a
CUDA graph. The step's device must be current.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

from miofind.device.captures import captures_undisturbed
from miofind.device.device import INSTALL_CUDA, Device
from miofind.errors import LaunchError, MissingLibraryError
from miofind.libraries.nvmath_bindings import binding
from miofind.solver.steps import FftStep

_PLANS = 256


class CufftPlan:
    """A batch of transforms ready to launch; made by `fft_plan`, shared between threads.

    Attributes:
        workspace_bytes: bytes of the work area that a launch uses.
    """

    __slots__ = (
        "__weakref__",
        "_area",
        "_execute",
        "_library",
        "_lock",
        "_plan",
        "_stream",
        "_what",
        "workspace_bytes",
    )

    def __init__(self, lengths: tuple[int, ...], batch: int, inverse: bool, limit: int) -> None:
        library = _library()
        self._library = library
        self._what = f"{batch} transforms of {' x '.join(map(str, lengths))}{' back' if inverse else ''}"
        self._execute = library.exec_c2r if inverse else library.exec_r2c
        self._lock = threading.Lock()
        self._area = self._stream = -1
        try:
            self._plan = int(library.create())
            weakref.finalize(self, _destroy, library, self._plan)
            library.set_auto_allocation(self._plan, 0)
            self.workspace_bytes = _made(library, self._plan, (lengths, batch, inverse))
        except library.cuFFTError as error:
            raise LaunchError(f"cuFFT refused {self._what}: {error}") from error
        except RuntimeError as error:
            raise MissingLibraryError(f"cuFFT cannot be loaded ({error}): {INSTALL_CUDA}") from error
        if self.workspace_bytes > limit:
            raise LaunchError(f"cuFFT wants {self.workspace_bytes} bytes for {self._what}, given are {limit}")

    def launch(self, data: int, workspace: int, stream: int) -> None:
        """Start the transforms in place, asynchronously.

        Args:
            data, workspace, stream: addresses; the first two on the device.

        Raises:
            LaunchError: the library refuses.
        """
        library = self._library
        try:
            with self._lock:  # a plan's area and stream are its state until its kernels are launched
                if workspace != self._area and self.workspace_bytes:
                    library.set_work_area(self._plan, workspace)
                    self._area = workspace
                if stream != self._stream:
                    library.set_stream(self._plan, stream)
                    self._stream = stream
                self._execute(self._plan, data, data)
        except library.cuFFTError as error:
            self._area = self._stream = -1
            raise LaunchError(f"cuFFT did not start {self._what}: {error}") from error


def _destroy(library: Any, plan: int) -> None:
    with captures_undisturbed():  # its kernels are unloaded with it
        library.destroy(plan)


def fft_plan(step: FftStep, device: Device) -> CufftPlan:
    """The plan of a step, cached by its shape and device.

    Raises:
        MissingLibraryError: nvmath-python or cuFFT is not installed.
        LaunchError: the library refuses the shape, or wants more than `step.workspace_bytes`.
    """
    return _plan(step.lengths, step.batch, step.inverse, step.workspace_bytes, device.index)


@functools.lru_cache(maxsize=_PLANS)
def _plan(lengths: tuple[int, ...], batch: int, inverse: bool, limit: int, device_index: int) -> CufftPlan:
    import cupy

    with cupy.cuda.Device(device_index):
        return CufftPlan(lengths, batch, inverse, limit)


def _made(library: Any, plan: int, shape: tuple[tuple[int, ...], int, bool]) -> int:
    """Bytes of work area of a plan, made for rows of last / 2 + 1 complex numbers or twice as many real ones."""
    lengths, batch, inverse = shape
    *rows, last = lengths
    complex_row = last // 2 + 1
    plane = complex_row
    for row in rows:
        plane *= row
    real = ([*rows, 2 * complex_row], 1, 2 * plane)
    transformed = ([*rows, complex_row], 1, plane)
    source, target = (transformed, real) if inverse else (real, transformed)
    kind = library.Type.C2R if inverse else library.Type.R2C
    return int(library.make_plan_many64(plan, len(lengths), list(lengths), *source, *target, kind, batch))


@functools.cache
def _library() -> Any:
    """nvmath.bindings.cufft.

    Raises:
        MissingLibraryError: it is not installed.
    """
    try:
        return binding("cufft")
    except ImportError as error:
        raise MissingLibraryError(f"nvmath-python is not installed, so cuFFT cannot be used: {INSTALL_CUDA}") from error
