"""Steps bound to compiled kernels and library plans: what an invoker runs one after another.

A bound step takes the addresses of its buffers and a stream; it allocates nothing and synchronises nothing. It belongs
to the thread that bound it.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.launch import tensor_maps
from miofind.launch.pdl import pdl_launcher
from miofind.solver.steps import (
    RUN_PARAMETERS,
    CudnnStep,
    EpilogueArgument,
    FftStep,
    KernelStep,
    MatmulStep,
    Pointer,
    Scalar,
    TensorMap,
    WorkspacePlan,
)
from miofind.solver.structs import number_in_memory

if TYPE_CHECKING:
    from miofind.compiler import Kernel
    from miofind.libraries.cublaslt import FusedProduct, MatmulPlan
    from miofind.libraries.cudnn import ConvPlan, FusedConvPlan
    from miofind.libraries.cufft import CufftPlan


class BoundStep(Protocol):
    """One step ready to run on a stream and the bases (see `miofind.launch.invoker.Bases`)."""

    def __call__(self, bases: tuple[Any, ...], stream: int) -> None: ...


@dataclass(frozen=True, slots=True)
class BasedAddress:
    """Where a pointer argument comes from: an index into the bases and a byte offset."""

    base: int
    offset: int


class _BoundMap:
    """A tensor map in memory that a launch reads, of the tensor where it was last.

    Attributes:
        address: of the map.
    """

    __slots__ = ("_at", "_map", "_memory", "_where", "address")

    def __init__(self, tensor_map: TensorMap, where: BasedAddress) -> None:
        self._map = tensor_map
        self._where = where
        self._memory = ctypes.create_string_buffer(tensor_maps.BYTES + tensor_maps.ALIGNMENT)
        self.address = -(-ctypes.addressof(self._memory) // tensor_maps.ALIGNMENT) * tensor_maps.ALIGNMENT
        self._at = 0

    def follow(self, bases: Sequence[int]) -> None:
        """Encode the map anew where the tensor is elsewhere now.

        Raises:
            LaunchError: the driver refuses it.
        """
        at = bases[self._where.base] + self._where.offset
        if at != self._at:
            ctypes.memmove(self.address, tensor_maps.encoded(self._map, at), tensor_maps.BYTES)
            self._at = at


class _BoundEpilogue:
    """An `Epilogue` in memory that a launch reads, of the operands and the numbers of the last run.

    Attributes:
        address: of the structure.
    """

    __slots__ = ("_activation", "_at", "_memory", "_pack", "_parameters", "_places", "_where", "address")

    def __init__(self, argument: EpilogueArgument, place: Callable[[Pointer], BasedAddress]) -> None:
        self._activation = argument.activation
        self._places = [None if pointer is None else place(pointer) for pointer in argument.pointers]
        self._where = place(Pointer(buffer=RUN_PARAMETERS)).base
        self._memory = ctypes.create_string_buffer(argument.bytes)
        self.address = ctypes.addressof(self._memory)
        self._pack = struct.Struct("=5Q4d" if argument.number == "float64" else "=5Q4f").pack_into
        self._at: list[int] = []
        self._parameters: Any = None

    def follow(self, bases: Sequence[Any]) -> None:
        """Write the structure anew where operands or numbers are others now."""
        at = [0 if where is None else bases[where.base] + where.offset for where in self._places]
        parameters = bases[self._where]
        if at != self._at or parameters is not self._parameters:
            self._pack(self._memory, 0, *at, *parameters.numbers(self._activation))
            self._at, self._parameters = at, parameters


class BoundKernel:
    """A kernel and its packed arguments; not shared between threads, since a launch writes the addresses into them."""

    __slots__ = ("_addresses", "_following", "_keep", "_launch", "_offsets", "_pack", "_pick")

    def __init__(
        self, step: KernelStep, kernel: Kernel, place: Callable[[Pointer], BasedAddress], *, pdl: bool = False
    ) -> None:
        pointers = [arg for arg in step.args if isinstance(arg, Pointer)]
        self._addresses = (ctypes.c_uint64 * max(2, len(pointers)))()
        parameters = (ctypes.c_void_p * max(1, len(step.args)))()
        numbers: list[Any] = []
        self._following: list[_BoundMap | _BoundEpilogue] = []
        next_address = ctypes.addressof(self._addresses)
        for i, arg in enumerate(step.args):
            if isinstance(arg, Pointer):
                parameters[i] = next_address
                next_address += ctypes.sizeof(ctypes.c_uint64)
            elif isinstance(arg, TensorMap):
                self._following.append(_BoundMap(arg, place(arg.pointer)))
                parameters[i] = self._following[-1].address
            elif isinstance(arg, EpilogueArgument):
                self._following.append(_BoundEpilogue(arg, place))
                parameters[i] = self._following[-1].address
            else:
                content = number_in_memory(arg.ctype, arg.value) if isinstance(arg, Scalar) else arg.in_memory()
                numbers.append(ctypes.create_string_buffer(content))
                parameters[i] = ctypes.addressof(numbers[-1])
        places = [place(pointer) for pointer in pointers]
        places += [BasedAddress(0, 0)] * (2 - len(places))  # so that `_pick` always gives a tuple
        offsets = tuple(where.offset for where in places)
        self._offsets = offsets if any(offsets) else None
        self._pick = operator.itemgetter(*(where.base for where in places))
        self._pack = struct.Struct(f"={len(places)}Q").pack_into
        self._launch = pdl_launcher(step, kernel) if pdl else _plain_launcher(step, kernel)
        self._keep = (kernel, numbers, parameters, ctypes.addressof(parameters))

    def __call__(self, bases: Sequence[int], stream: int) -> None:
        addresses = self._pick(bases)
        if self._offsets is not None:
            addresses = map(operator.add, addresses, self._offsets)
        self._pack(self._addresses, 0, *addresses)
        for bound in self._following:
            bound.follow(bases)
        self._launch(stream, self._keep[3], 0)


def _plain_launcher(step: KernelStep, kernel: Kernel) -> Callable[[int, int, int], None]:
    """A launch that begins when all before it in the stream has ended: stream, parameters' address and 0."""
    from cupy.cuda import driver

    return functools.partial(driver.launchKernel, kernel.function, *step.grid, *step.block, step.shared_bytes)


def library_plan(
    step: MatmulStep | FftStep | CudnnStep, problem: ProblemDescription, device: Device
) -> MatmulPlan | CufftPlan | ConvPlan | FusedConvPlan:
    """What a library carries a step of a problem out with; any thread may bind it.

    A CUDA graph may hold what it has loaded on the device, which goes with it.

    Raises:
        MissingLibraryError: the library is not installed.
        LaunchError: it refuses the step.
    """
    if isinstance(step, MatmulStep):
        from miofind.libraries.cublaslt import matmul_plan

        return matmul_plan(step, device)
    if isinstance(step, FftStep):
        from miofind.libraries.cufft import fft_plan

        return fft_plan(step, device)
    from miofind.libraries.cudnn import conv_plan

    return conv_plan(problem if step.fused else problem.bare, step, device)


class BoundMatmul:
    """A cuBLASLt product on the bases."""

    __slots__ = ("_launch", "_places")

    def __init__(self, step: MatmulStep, plan: MatmulPlan, place: Callable[[Pointer], BasedAddress]) -> None:
        pointers = [step.a, step.b, step.c]
        if step.workspace is not None:
            pointers.append(Pointer(buffer=step.workspace))
        places = [place(pointer) for pointer in pointers]
        self._places = tuple((where.base, where.offset) for where in places)
        self._launch = plan.launch

    def __call__(self, bases: Sequence[int], stream: int) -> None:
        addresses = [bases[base] + offset for base, offset in self._places]
        workspace = addresses[3] if len(addresses) == 4 else 0
        self._launch(addresses[0], addresses[1], addresses[2], workspace, stream)


class BoundFusedMatmul:
    """A cuBLASLt product with an epilogue on the bases."""

    __slots__ = ("_parameters", "_places", "_product", "_workspace")

    def __init__(self, step: MatmulStep, product: FusedProduct, place: Callable[[Pointer], BasedAddress]) -> None:
        assert step.epilogue is not None
        pointers = (step.a, step.b, step.c, step.epilogue.bias, step.epilogue.residual)
        self._places = tuple(None if pointer is None else place(pointer) for pointer in pointers)
        self._parameters = place(Pointer(buffer=RUN_PARAMETERS)).base
        self._workspace = None if step.workspace is None else place(Pointer(buffer=step.workspace))
        self._product = product

    def __call__(self, bases: Sequence[Any], stream: int) -> None:
        a, b, c, bias, residual = (0 if at is None else bases[at.base] + at.offset for at in self._places)
        given = self._workspace
        workspace = 0 if given is None else bases[given.base] + given.offset
        self._product.launch((a, b, c, bias, residual), bases[self._parameters], workspace, stream)


class BoundCudnn:
    """A cuDNN convolution on the bases; the library's workspace may lie anywhere in that of the solution.

    A step that leaves out the problem's epilogue takes the first of the operands alone.
    """

    __slots__ = ("_count", "_launch", "_offset")

    def __init__(
        self, step: CudnnStep, conv: ConvPlan | FusedConvPlan, plan: WorkspacePlan, problem: ProblemDescription
    ) -> None:
        conv.prepare()
        self._offset = 0 if step.workspace is None else plan.offsets[step.workspace]
        self._count = len(problem.bare.operands) if problem.epilogue and not step.fused else 0
        self._launch = conv.launch

    def __call__(self, bases: tuple[Any, ...], stream: int) -> None:
        if self._count or self._offset:
            operands = bases[: self._count] if self._count else bases[:-1]
            bases = (*operands, bases[-1] + self._offset)
        self._launch(bases, stream)


class BoundFft:
    """A batch of cuFFT's transforms on the bases."""

    __slots__ = ("_data", "_launch", "_workspace")

    def __init__(self, step: FftStep, plan: CufftPlan, place: Callable[[Pointer], BasedAddress]) -> None:
        self._data = place(step.data)
        self._workspace = None if step.workspace is None else place(Pointer(buffer=step.workspace))
        self._launch = plan.launch

    def __call__(self, bases: Sequence[int], stream: int) -> None:
        given = self._workspace
        workspace = 0 if given is None else bases[given.base] + given.offset
        self._launch(bases[self._data.base] + self._data.offset, workspace, stream)
