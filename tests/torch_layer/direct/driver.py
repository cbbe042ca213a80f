"""A driver whose kernels are the CPU place's solutions, for the direct path without a GPU."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import numpy as np

from miofind.arrays.arrays import NUMPY_DTYPES
from miofind.core.epilogue import DEFAULT_PARAMETERS, EpilogueParameters
from miofind.launch.bound_steps import BasedAddress
from miofind.launch.flat import Fixup, FlatKernel, FlatParameter
from miofind.launch.invoker import Invoker


class Driver:
    """Runs an invoker of the CPU place where a kernel is launched; its first parameter says which.

    Attributes:
        launches: how many there were.
        status: what further ones end with.
    """

    def __init__(self) -> None:
        self.launches = 0
        self.status = 0
        self.runs: list[tuple[Invoker, EpilogueParameters]] = []
        launch = ctypes.CFUNCTYPE(
            ctypes.c_int, *[ctypes.c_void_p] * 2, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
        )
        replace = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self.launch, self.replace_address = launch(self._launch), replace(self._replace_address)

    def flat(self, invoker: Invoker, parameters: EpilogueParameters = DEFAULT_PARAMETERS) -> tuple[FlatKernel, ...]:
        """A launch of it: its number, each base by a pointer, the first one by a tensor map once more."""
        self.runs.append((invoker, parameters))
        count = len(invoker.problem.operands)
        places = [*range(count), count + bool(invoker.problem.epilogue)]
        given = [FlatParameter(content=struct.pack("=q", len(self.runs) - 1))]
        given += [FlatParameter(content=bytes(8), fixups=(Fixup(0, BasedAddress(base, 0)),)) for base in places]
        of_first = (Fixup(0, BasedAddress(0, 16)),)
        given.append(FlatParameter(content=b"map" + bytes(125), fixups=of_first, is_map=True))
        one = (1, 1, 1)
        made = FlatKernel(function=7, grid=one, block=one, shared_bytes=0, pdl=False, parameters=tuple(given))
        return (made,)

    def _replace_address(self, at: int, address: int) -> int:
        assert at % 64 == 0
        assert ctypes.string_at(at, 3) == b"map"
        ctypes.memmove(at + 64, struct.pack("=Q", address), 8)
        return 0

    def _launch(self, config: int, function: int, parameters: Any, extra: int) -> int:
        self.launches += 1
        if self.status:
            return self.status
        assert (function, extra) == (7, None)
        assert struct.unpack("=6I", ctypes.string_at(config, 24)) == (1,) * 6
        invoker, numbers = self.runs[struct.unpack("=q", ctypes.string_at(parameters[0], 8))[0]]
        operands = invoker.problem.operands
        addresses = [struct.unpack("=Q", ctypes.string_at(parameters[1 + i], 8))[0] for i in range(len(operands) + 1)]
        mapped = ctypes.string_at(parameters[len(operands) + 2] + 64, 8)
        assert struct.unpack("=Q", mapped) == (addresses[0] + 16,)
        bases: list[Any] = [_array(address, each.array) for address, each in zip(addresses, operands, strict=False)]
        bases += [numbers] if invoker.problem.epilogue else []
        size = invoker.workspace_bytes
        scratch = np.frombuffer((ctypes.c_char * size).from_address(addresses[-1]), np.uint8) if size else None
        invoker.run((*bases, scratch), 0)
        return 0


def _array(address: int, tensor: Any) -> Any:
    """The memory of a tensor as an array of its shape and strides."""
    dtype = NUMPY_DTYPES[tensor.dtype]
    flat = np.frombuffer((ctypes.c_char * tensor.bytes).from_address(address), dtype)
    return np.lib.stride_tricks.as_strided(flat, tensor.shape, [step * dtype.itemsize for step in tensor.strides])
