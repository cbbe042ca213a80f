"""Registers that an epilogue takes of a kernel's threads, which keep terms of channels and elements of the residual."""

from __future__ import annotations

from miofind.core.epilogue import EPILOGUE_TENSORS
from miofind.core.problem import ProblemDescription
from miofind.solvers.common.correlation import ceil_div

_ADDRESS = 4  # of the residual, as it is computed


def epilogue_registers(problem: ProblemDescription, channels: int, residuals: int) -> int:
    """Registers of a thread beside those of the bare kernel, at most; 0 for a bare problem.

    Args:
        channels: whose terms a thread keeps.
        residuals: elements of the residual, and of what is saved for a derivative, that a thread has on their way at
            once, of each.
    """
    epilogue = problem.epilogue
    if not epilogue:
        return 0
    terms = channels * (epilogue.scale + epilogue.bias + epilogue.channel_bias)
    tensors = sum(name in epilogue.operands for name in EPILOGUE_TENSORS)
    return terms + tensors * (ceil_div(residuals * problem.output.dtype.itemsize, 4) + _ADDRESS)
