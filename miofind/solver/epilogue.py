"""A problem's epilogue as a kernel takes it: the host side of kernels_src/common/epilogue.cuh."""

from __future__ import annotations

from miofind.core.epilogue import EPILOGUE_TENSORS, ResidualPosition
from miofind.core.problem import ProblemDescription
from miofind.solver.steps import EpilogueArgument, Pointer

_RESIDUAL = {ResidualPosition.NONE: 0, ResidualPosition.BEFORE: 1, ResidualPosition.AFTER: 2}


def epilogue_defines(problem: ProblemDescription) -> tuple[tuple[str, str | int], ...]:
    """The defines of a fused kernel; none for a bare problem, whose source has none of the epilogue's lines."""
    epilogue = problem.epilogue
    if not epilogue:
        return ()
    return (
        ("EPILOGUE", 1),
        ("EPILOGUE_NUMBER", problem.accumulator.value),
        ("EPILOGUE_ELEMENT", problem.output.dtype.value),
        ("EPILOGUE_PARAMETER", (epilogue.parameter_dtype or problem.y.dtype).value),
        ("EPILOGUE_SCALE", int(epilogue.scale)),
        ("EPILOGUE_BIAS", int(epilogue.bias)),
        ("EPILOGUE_CHANNEL_BIAS", int(epilogue.channel_bias)),
        ("EPILOGUE_RESIDUAL", _RESIDUAL[epilogue.residual]),
        ("EPILOGUE_ACTIVATION", epilogue.activation.value),
        ("EPILOGUE_STATISTICS", int(epilogue.statistics)),
        ("EPILOGUE_DERIVATIVE", epilogue.derivative.value),
        ("EPILOGUE_BIAS_GRADIENT", int(epilogue.bias_gradient)),
    )


def epilogue_arguments(problem: ProblemDescription, first: int = 0) -> tuple[EpilogueArgument, ...]:
    """What a fused kernel takes as `Epilogue`, after its other arguments; nothing for a bare problem.

    Args:
        first: element that the kernel's output begins at, as do the tensors that are read with it.
    """
    if not problem.epilogue:
        return ()
    offsets = dict.fromkeys(EPILOGUE_TENSORS, first * problem.output.dtype.itemsize)
    pointers = {name: Pointer(buffer=name, offset_bytes=offsets.get(name, 0)) for name in problem.epilogue.operands}
    return (EpilogueArgument(activation=problem.epilogue.nonlinearity, number=problem.accumulator.value, **pointers),)
