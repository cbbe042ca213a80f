"""kernels_src/common/epilogue.cuh in NumPy: what a fused step makes of sums, from its argument and defines alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from helpers.runs.fused_runs import NUMBERS
from numpy.typing import NDArray

from miofind.core.epilogue import EPILOGUE_TENSORS, Activation
from miofind.core.problem import ProblemDescription
from miofind.reference.convolution import reference_on_host
from miofind.reference.epilogue import activated, apply_epilogue, differentiated
from miofind.solver.steps import EpilogueArgument

Array = NDArray[Any]

EPILOGUES = {
    "scale.bias.channel_bias.residual.leaky_relu": "forward",
    "channel_bias.silu.residual": "forward",
    "residual.dsilu": "backward_data",
}
"""Epilogues with each part that one has, and their directions."""


@dataclass(frozen=True)
class Finish:
    """The epilogue of one step, with NUMBERS; of a bare one none."""

    argument: EpilogueArgument | None
    defines: Mapping[str, Any]

    @staticmethod
    def of(argument: object, defines: Mapping[str, Any]) -> Finish:
        """From a step's last argument, if it has one, and its defines."""
        assert argument is None or isinstance(argument, EpilogueArgument)
        assert (argument is None) == ("EPILOGUE" not in defines)
        return Finish(argument, defines)

    @property
    def tensors(self) -> tuple[str, ...]:
        """What it reads of the output's shape, in the order of computation."""
        return tuple(name for name in EPILOGUE_TENSORS if getattr(self.argument, name, None) is not None)

    def __call__(self, sums: Array, place: tuple[Any, Any, Any], channels: int, buffers: Mapping[str, Array]) -> Array:
        """The results of sums.

        Args:
            place: image, channel and element of memory of each; `...` for all that is given of tensors of its shape.
            channels: of the output.
            buffers: operands in the order of their memory.
        """
        if self.argument is None:
            return sums
        image, channel, at = place
        rows = {"scale": channel, "bias": channel, "channel_bias": image * channels + channel}
        read = {name: self._read(name, rows.get(name, at), buffers) for name in (*rows, *EPILOGUE_TENSORS)}
        activation, derivative = (Activation(self.defines[f"EPILOGUE_{name}"]) for name in ("ACTIVATION", "DERIVATIVE"))
        position = self.defines["EPILOGUE_RESIDUAL"]
        v = NUMBERS.alpha * sums
        v = v if read["scale"] is None else v * read["scale"]
        for name in ("bias", "channel_bias"):
            v = v if read[name] is None else v + read[name]
        v = v + NUMBERS.beta * read["residual"] if position == 1 else v
        if derivative is not Activation.NONE:
            return differentiated(v, read["saved"], derivative, NUMBERS)
        v = activated(v, activation, NUMBERS)
        return v + NUMBERS.beta * read["residual"] if position == 2 else v

    def _read(self, name: str, at: Any, buffers: Mapping[str, Array]) -> Array | None:
        """The elements of an operand, None where the defines say that there is none."""
        pointer = getattr(self.argument, name)
        is_there = self.defines["EPILOGUE_DERIVATIVE"] != "none" if name == "saved" else self._has(name)
        assert (pointer is not None) == is_there
        if pointer is None:
            return None
        assert pointer.offset_bytes == 0
        return buffers[pointer.buffer][at]

    def _has(self, name: str) -> bool:
        return self.defines[f"EPILOGUE_{name.upper()}"] != 0


def operands_in_memory(problem: ProblemDescription, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """What an epilogue reads, each in the order of its memory."""
    found = {}
    for name in problem.epilogue.operands:
        last = name in EPILOGUE_TENSORS and problem.output.layout.channels_last
        found[name] = np.ascontiguousarray(np.moveaxis(inputs[name], 1, -1) if last else inputs[name]).ravel()
    return found


def results_of(problem: ProblemDescription, inputs: Mapping[str, Array]) -> Array:
    """The reference's results, with NUMBERS where there is an epilogue."""
    sums = reference_on_host(problem, **{name: inputs[name] for name in problem.direction.inputs})
    return apply_epilogue(problem, sums, inputs, NUMBERS) if problem.epilogue else sums
