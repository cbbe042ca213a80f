"""Registers that an epilogue takes of a kernel's threads, which keep terms of channels and elements of the residual."""

from __future__ import annotations

from miofind.core.problem import ProblemDescription
from miofind.solvers.common.correlation import ceil_div

_ADDRESS = 4  # of the residual, as it is computed


def epilogue_registers(problem: ProblemDescription, channels: int, residuals: int) -> int:
    """Registers of a thread beside those of the bare kernel, at most; 0 for a bare problem.

    Args:
        channels: whose terms a thread keeps.
        residuals: elements of the residual that a thread has on their way at once.
    """
    epilogue = problem.epilogue
    if not epilogue:
        return 0
    terms = channels * (epilogue.scale + epilogue.bias + epilogue.channel_bias)
    return terms + (ceil_div(residuals * problem.y.dtype.itemsize, 4) + _ADDRESS if epilogue.has_residual else 0)
