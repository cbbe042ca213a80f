"""Steps as plain data, with the places of addresses in them: what launches without Python needs no more.

Kernels are functions, grids and parameters; products of cuBLASLt and convolutions of cuDNN what their libraries are
called with. Steps of other libraries and of the host have no such form.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miofind.core.epilogue import DEFAULT_PARAMETERS, EpilogueParameters
from miofind.core.problem import ProblemDescription
from miofind.errors import LaunchError
from miofind.launch import tensor_maps
from miofind.launch.bound_steps import BasedAddress
from miofind.solver.steps import (
    Argument,
    CudnnStep,
    EpilogueArgument,
    KernelStep,
    MatmulStep,
    Pointer,
    Scalar,
    TensorMap,
)
from miofind.solver.structs import number_in_memory

if TYPE_CHECKING:
    from miofind.libraries.cublaslt import MatmulCall
    from miofind.libraries.cudnn import ConvCall

MOST_PARAMETERS = 64
"""Of a kernel that has a flat form."""

_ANYWHERE = 1 << 20
"""An address that a tensor map is encoded for before it gets the tensor's."""

Place = Callable[[Pointer], BasedAddress]


@dataclass(frozen=True, slots=True)
class Fixup:
    """Where in a parameter an address goes.

    Attributes:
        at: byte.
        where: which of the bases, and how far behind it.
    """

    at: int
    where: BasedAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatParameter:
    """A kernel's parameter but for its addresses.

    Attributes:
        content: its bytes.
        fixups: addresses that go into them; of a tensor map the one that it is of.
        is_map: whether it is a tensor map.
    """

    content: bytes
    fixups: tuple[Fixup, ...] = ()
    is_map: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatKernel:
    """A launch but for addresses and stream.

    Attributes:
        function: the driver's handle of the kernel.
        grid, block: blocks, and threads of a block, along three dimensions.
        shared_bytes: dynamic shared memory of a block.
        pdl: whether it begins while the kernel before it runs.
    """

    function: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    pdl: bool
    parameters: tuple[FlatParameter, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatProduct:
    """A product of cuBLASLt but for addresses and stream: D = alpha A B + beta C, and a bias.

    Attributes:
        call: what the library is called with.
        a, b, c, d: where the matrices are.
        bias, workspace: where they are; None where there is none.
    """

    call: MatmulCall
    a: BasedAddress
    b: BasedAddress
    c: BasedAddress
    d: BasedAddress
    bias: BasedAddress | None = None
    workspace: BasedAddress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatConvolution:
    """A convolution of cuDNN but for addresses and stream, for the thread that made it.

    Attributes:
        call: what the library is called with.
        operands: where they are, in the order of the call's.
        workspace: where it is; None where there is none.
    """

    call: ConvCall
    operands: tuple[BasedAddress, ...]
    workspace: BasedAddress | None = None


FlatStep = FlatKernel | FlatProduct | FlatConvolution


def flat_product(step: MatmulStep, call: MatmulCall, place: Place) -> FlatProduct:
    """A product as a flat launch; the call has its epilogue's numbers."""
    epilogue = step.epilogue
    bias, residual = (None, None) if epilogue is None else (epilogue.bias, epilogue.residual)
    return FlatProduct(
        call=call,
        a=place(step.a),
        b=place(step.b),
        c=place(step.c if residual is None else residual),
        d=place(step.c),
        bias=None if bias is None else place(bias),
        workspace=None if step.workspace is None else place(Pointer(buffer=step.workspace)),
    )


def flat_convolution(step: CudnnStep, call: ConvCall, problem: ProblemDescription, place: Place) -> FlatConvolution:
    """A convolution as a flat launch; the call has its epilogue's numbers."""
    operands = (problem if step.fused else problem.bare).operands
    return FlatConvolution(
        call=call,
        operands=tuple(place(Pointer(buffer=operand.name)) for operand in operands),
        workspace=None if step.workspace is None else place(Pointer(buffer=step.workspace)),
    )


def flat_kernel(
    step: KernelStep, function: int, place: Place, *, pdl: bool, parameters: EpilogueParameters = DEFAULT_PARAMETERS
) -> FlatKernel:
    """A step as a flat launch, with the numbers of an epilogue in it.

    Raises:
        LaunchError: it has too many parameters, or the driver refuses a tensor map.
    """
    if len(step.args) > MOST_PARAMETERS:
        raise LaunchError(f"{step.entry} has {len(step.args)} parameters")
    given = tuple(_parameter(argument, place, parameters) for argument in step.args)
    return FlatKernel(
        function=function,
        grid=step.grid,
        block=step.block,
        shared_bytes=step.shared_bytes,
        pdl=pdl,
        parameters=given,
    )


def _parameter(argument: Argument, place: Place, parameters: EpilogueParameters) -> FlatParameter:
    if isinstance(argument, Pointer):
        return FlatParameter(content=bytes(8), fixups=(Fixup(0, place(argument)),))
    if isinstance(argument, TensorMap):
        content = tensor_maps.encoded(argument, _ANYWHERE)
        return FlatParameter(content=content, fixups=(Fixup(0, place(argument.pointer)),), is_map=True)
    if isinstance(argument, EpilogueArgument):
        layout = "=5Q4d" if argument.number == "float64" else "=5Q4f"
        content = struct.pack(layout, *(0,) * 5, *parameters.numbers(argument.activation))
        operands = enumerate(argument.pointers)
        return FlatParameter(
            content=content, fixups=tuple(Fixup(8 * i, place(p)) for i, p in operands if p is not None)
        )
    if isinstance(argument, Scalar):
        return FlatParameter(content=number_in_memory(argument.ctype, argument.value))
    return FlatParameter(content=argument.in_memory())
