"""One kernel outside any solution, launched as a solution's are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from miofind.launch.bound_steps import BasedAddress, BoundKernel
from miofind.solver.steps import RUN_PARAMETERS, Argument, EpilogueArgument, KernelStep, Pointer, TensorMap


def make_step_launcher(step: KernelStep, kernel: Any) -> Callable[[Mapping[str, Any], int], None]:
    """A launcher of a step, called with addresses by buffer name and a stream.

    A fused kernel's numbers are among the addresses, as `EpilogueParameters` under the name RUN_PARAMETERS.
    """
    names = tuple(dict.fromkeys(pointer.buffer for arg in step.args for pointer in _pointers(arg)))
    bound = BoundKernel(step, kernel, lambda pointer: BasedAddress(names.index(pointer.buffer), pointer.offset_bytes))

    def launch(addresses: Mapping[str, Any], stream: int) -> None:
        bound([addresses[name] for name in names] or [0], stream)

    return launch


def _pointers(argument: Argument) -> Sequence[Pointer]:
    """The addresses in an argument, the numbers of a run among them."""
    if isinstance(argument, TensorMap):
        return (argument.pointer,)
    if isinstance(argument, EpilogueArgument):
        return (*(p for p in argument.pointers if p is not None), Pointer(buffer=RUN_PARAMETERS))
    return (argument,) if isinstance(argument, Pointer) else ()
