"""Launches of the kernels that verification and measurement need besides the candidates': fills, checks, flushes.

Everything is asynchronous on the stream it is given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from miofind.core.tensor import TensorDescriptor
from miofind.core.values import Values
from miofind.device.device import Device
from miofind.launch.fixed_launch import FixedLaunch
from miofind.solver.steps import KernelStep, Pointer, Scalar
from miofind.solver.structs import Struct, StructType

if TYPE_CHECKING:
    from miofind.compiler import Compiler, Kernel

DEVICE_THREADS = 256
"""Threads of a block of these kernels."""
_BLOCKS_PER_SM = 16

Argument = str | Pointer | Scalar | Struct

GUARDED_BUFFERS = 4
"""Buffers whose guard bands harness/verify.cu fills or checks in one launch."""
GUARD_BANDS = StructType("GuardBands", bytes=("int64", GUARDED_BUFFERS), band_bytes="int64", poison="int32")
COMPARISON = StructType(
    "Comparison",
    count="int64",
    **dict.fromkeys(("first_even", "first_odd", "second_even", "second_odd"), "float64"),
    second_size="int64",
    overflow="float64",
    factor="float64",
    mantissa_bits="int32",
    least_exponent="int32",
    **dict.fromkeys(("channels", "plane", "image_stride", "channel_stride", "place_stride"), "int64"),
)


@dataclass(frozen=True, slots=True)
class DeviceKernels:
    """Grid-stride kernels of kernels_src on one device, compiled at their first launch."""

    device: Device
    compiler: Compiler
    _loaded: dict[Hashable, Kernel] = field(default_factory=dict)

    def bind(
        self, kernel: GridStride, arguments: tuple[Argument, ...], addresses: Mapping[str, int], stream: int
    ) -> Callable[[], None]:
        """A launch of a kernel with its arguments fixed, to be repeated.

        Args:
            kernel: which, and over how many items.
            arguments: in the kernel's order; a string is the pointer of that name.
            addresses: by the names in `arguments`.
            stream: address of the stream.
        """
        return self.bind_step(kernel.step(arguments, self.device), addresses, stream)

    def bind_step(self, step: KernelStep, addresses: Mapping[str, int], stream: int) -> Callable[[], None]:
        """The same for a step whose pointers are named in `addresses`; steps that differ in scalars share a kernel."""
        key = (step.binary, step.entry, step.shared_bytes)
        kernel = self._loaded.get(key)
        if kernel is None:
            kernel = self._loaded[key] = self.compiler.load(step, self.device)
        return FixedLaunch(step, kernel, addresses, stream)

    def fill(self, tensor: TensorDescriptor, address: int, values: Values, seed: int, stream: int) -> None:
        """Fill a packed tensor; equal seeds give equal values."""
        self.bind(*filling(tensor, values, seed), {"out": address}, stream)()


@dataclass(frozen=True, slots=True, kw_only=True)
class GridStride:
    """A kernel by its source and entry, the items it walks over, and the dtype it is compiled for.

    Attributes:
        defines: what its source asks for besides "T", that dtype.
    """

    source: str
    entry: str
    items: int
    dtype: str
    defines: tuple[tuple[str, str], ...] = ()

    def step(self, arguments: tuple[Argument, ...], device: Device) -> KernelStep:
        """Its launch with arguments in the kernel's order; a string is the pointer of that name."""
        return KernelStep(
            source=self.source,
            entry=self.entry,
            grid=(max(1, min(-(-self.items // DEVICE_THREADS), _BLOCKS_PER_SM * device.sm_count)), 1, 1),
            block=(DEVICE_THREADS, 1, 1),
            args=tuple(_named(item) if isinstance(item, str) else item for item in arguments),
            defines=(("T", self.dtype), *self.defines),
        )


def check_kernel(name: str, items: int, dtype: str) -> GridStride:
    """A kernel of harness/verify.cu, "verify_" and its name, for outputs of a dtype."""
    defines = (GUARD_BANDS.define, COMPARISON.define)
    return GridStride(source="harness/verify.cu", entry=f"verify_{name}", items=items, dtype=dtype, defines=defines)


@functools.lru_cache(maxsize=256)
def _named(buffer: str) -> Pointer:
    """The address of a buffer."""
    return Pointer(buffer=buffer)


@functools.lru_cache(maxsize=256)  # the launches of a problem have few numbers, each in many of them
def int32(value: int) -> Scalar:
    """A 32-bit integer argument."""
    return Scalar(ctype="int32", value=int(value))


@functools.lru_cache(maxsize=1024)
def int64(value: int) -> Scalar:
    """A 64-bit integer argument."""
    return Scalar(ctype="int64", value=int(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Powers of two that a tensor is multiplied by along a dimension.

    Attributes:
        even, odd: at its even coordinates and at its odd ones.
        stride: elements between neighbours of the dimension.
        size: coordinates count anew after so many.
    """

    even: int = 0
    odd: int = 0
    stride: int = 1
    size: int = 1


def filling(
    tensor: TensorDescriptor, values: Values, seed: int, scaling: Scaling | None = None
) -> tuple[GridStride, tuple[Argument, ...]]:
    """The kernel that fills a packed tensor, "out", and its arguments."""
    scaling = scaling or Scaling()
    kernel = GridStride(source="harness/random_inputs.cu", entry="random_inputs", items=tensor.size, dtype=tensor.dtype)
    arguments: tuple[Argument, ...] = (
        "out",
        int64(tensor.size),
        Scalar(ctype="uint64", value=seed),
        int32(values),
        int32(scaling.even),
        int32(scaling.odd),
        int64(scaling.stride),
        int64(scaling.size),
    )
    return kernel, arguments
