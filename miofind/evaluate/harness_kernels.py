"""The kernels that measuring a problem launches besides those of candidates, for who compiles them ahead.

They fill, check and sum buffers, compute references and flush the cache. Without a binary cache the process that
measures compiles each where it needs it first, one after another: three seconds of a first find.
"""

from __future__ import annotations

from miofind.core.epilogue import EpilogueParameters
from miofind.core.problem import DataType, Direction, ProblemDescription
from miofind.core.values import Values
from miofind.device.device import Device, Place
from miofind.launch.device_kernels import DEVICE_THREADS, GridStride, check_kernel, filling, int64
from miofind.measure.backend_cuda import flushing
from miofind.reference.convolution import reference_step
from miofind.solver.steps import KernelStep, Pointer
from miofind.verify.channel_sums import CHANNEL_SUMS, SUMMED, channel_sums_terms
from miofind.verify.epilogue_bounds import EpilogueStandard
from miofind.verify.epilogue_cuda import EpilogueTrial, epilogue_kernel
from miofind.verify.ranges import UNSCALED

_REPORT = Pointer(buffer="report")
_USUAL = (((32, 64, 56, 56), (64, 64, 3, 3)), ((32, 512, 7, 7), (512, 512, 3, 3)))  # shapes of x and w


def usual_harness_steps(dtype: DataType, device: Device, *, trains: bool) -> tuple[KernelStep, ...]:
    """What most problems of a network will need, of short sums and of long ones, before its problems are known.

    Args:
        dtype: of its tensors.
        trains: whether problems of all directions are to come; else fused ones are.
    """
    epilogue = None if trains else "bias.relu"
    forward = [ProblemDescription.convolution(x=x, w=w, dtype=dtype, epilogue=epilogue) for x, w in _USUAL]
    directions = Direction if trains else (Direction.FORWARD,)
    usual = (problem.in_direction(direction) for problem in forward for direction in directions)
    return tuple({step.binary: step for problem in usual for step in harness_steps(problem, device)}.values())


def harness_steps(problem: ProblemDescription, device: Device) -> tuple[KernelStep, ...]:
    """A launch from each binary that verifying and timing a problem's candidates needs; () on the CPU place."""
    if device.place is Place.CPU:
        return ()
    output = problem.output
    launches = [flushing(1), (check_kernel("written", 1, output.dtype), ("out", int64(1), _REPORT))]
    filled = {operand.tensor.dtype: operand.tensor for operand in problem.operands if operand.is_input}
    launches += [filling(tensor, Values.NORMAL, 0) for tensor in filled.values()]
    if problem.epilogue.changes_results:
        standard = EpilogueStandard.of(problem, None, rounds_twice=False)
        parameters = EpilogueParameters()
        trial = EpilogueTrial(count=1, powers=UNSCALED, parameters=parameters, standard=standard)
        launches.append(epilogue_kernel(problem, trial))
    for operand in problem.second_outputs:
        kernel = GridStride(
            source="harness/channel_sums.cu",
            entry="verify_channel_sums",
            items=DEVICE_THREADS * problem.k,
            dtype=problem.tensor(SUMMED).dtype,
            defines=(("RESULT", operand.tensor.dtype.value), CHANNEL_SUMS.define),
        )
        terms = channel_sums_terms(problem, operand)
        launches.append((kernel, ("from", "results", "details", terms, _REPORT)))
    steps = [kernel.step(arguments, device) for kernel, arguments in launches]
    steps += [reference_step(problem.bare), reference_step(problem.bare, 1)]  # of the whole output, and of a sample
    return tuple({step.binary: step for step in steps}.values())
