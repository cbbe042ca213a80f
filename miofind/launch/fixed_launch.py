"""Launches whose arguments and stream stay: packed once, repeated without any work but the driver's."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from miofind.solver.steps import KernelStep, Pointer, Scalar
from miofind.solver.structs import NUMBERS, Struct, alignment_of, number_in_memory, packing, padded

if TYPE_CHECKING:
    from miofind.compiler import Kernel

_ADDRESS = NUMBERS["uint64"][1]


class FixedLaunch:
    """One launch of a kernel, to be repeated from any thread.

    Args:
        step: takes addresses, numbers and structures of them.
        kernel: of the step.
        addresses: by buffer name, of all that the step names.
        stream: address of the stream.

    Raises:
        LaunchError: a number does not fit its type.
    """

    __slots__ = ("_kept", "_launch")

    def __init__(self, step: KernelStep, kernel: Kernel, addresses: Mapping[str, int], stream: int) -> None:
        import cupy

        layouts, numbers = list[str](), list[int | float]()
        for arg in step.args:
            if isinstance(arg, Pointer):
                layouts.append(_ADDRESS)
                numbers.append(addresses[arg.buffer] + arg.offset_bytes)
            elif isinstance(arg, Scalar):
                layouts.append(NUMBERS[arg.ctype][1])
                numbers.append(arg.value)
            else:
                assert isinstance(arg, Struct)
                layouts.append(arg.type.layout)
                numbers += arg.flat
        packed, offsets = _packing(tuple(layouts))
        memory = ctypes.create_string_buffer(packed.size)
        start = ctypes.addressof(memory)
        try:
            packed.pack_into(memory, 0, *(start + offset for offset in offsets), *numbers)
        except (struct.error, OverflowError):
            _refuse(step)
            raise
        launch = cupy.cuda.driver.launchKernel
        geometry = (*step.grid, *step.block, step.shared_bytes)
        self._launch: Callable[[], None] = functools.partial(launch, kernel.function, *geometry, stream, start, 0)
        self._kept = (kernel, memory)

    def __call__(self) -> None:
        self._launch()


@functools.lru_cache(maxsize=256)
def _packing(layouts: Sequence[str]) -> tuple[struct.Struct, tuple[int, ...]]:
    """The addresses of arguments of these layouts, then the arguments, and where each of these begins."""
    whole, offsets = _ADDRESS * len(layouts), []
    for layout in layouts:
        whole = padded(whole, alignment_of(layout))
        offsets.append(packing(whole).size)
        whole += layout
    return packing(whole), tuple(offsets)


def _refuse(step: KernelStep) -> None:
    """Raise what says which of a step's numbers does not fit its type.

    Raises:
        LaunchError: always, where one does not.
    """
    for arg in step.args:
        if isinstance(arg, Scalar):
            number_in_memory(arg.ctype, arg.value)
        elif isinstance(arg, Struct):
            arg.in_memory()
