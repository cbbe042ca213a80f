"""Find, remember and run the fastest correct convolution on the GPU at hand.

What is named here is imported when it is first asked for: processes that compile or measure need little of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miofind.process import interrupts as _interrupts
from miofind.process.late_names import LateNames as _LateNames

if _interrupts.is_program():
    _interrupts.end_at_once()  # what follows takes a while

if TYPE_CHECKING:
    from miofind import errors as errors
    from miofind import torch as torch
    from miofind.api import (
        BoundGradients,
        Convolution,
        Gradients,
        convolution,
        convolution_backward_data,
        convolution_backward_weights,
        convolution_gradients,
        convolution_transpose,
        convolution_transpose_gradients,
        find_solutions,
        run_solution,
    )
    from miofind.api.many import find_many
    from miofind.arrays.batch_norm import batch_norm_as_scale_and_bias, fold_batch_norm
    from miofind.core.epilogue import Activation, Epilogue, ResidualPosition
    from miofind.core.problem import (
        ConvolutionDescriptor,
        DataType,
        Direction,
        Layout,
        MathMode,
        ProblemDescription,
        TensorDescriptor,
    )
    from miofind.device.device import Device
    from miofind.errors import MiofindError
    from miofind.options import FindEnforce, FindMode, FindOptions, OnMiss, Order
    from miofind.runtime.handle import Handle, default_handle
    from miofind.runtime.packed import PackedSolution
    from miofind.runtime.runner import OutputStatistics, ParameterGradients
    from miofind.runtime.solution import Solution

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "BoundGradients",
    "Convolution",
    "ConvolutionDescriptor",
    "DataType",
    "Device",
    "Direction",
    "Epilogue",
    "FindEnforce",
    "FindMode",
    "FindOptions",
    "Gradients",
    "Handle",
    "Layout",
    "MathMode",
    "MiofindError",
    "OnMiss",
    "Order",
    "OutputStatistics",
    "PackedSolution",
    "ParameterGradients",
    "ProblemDescription",
    "ResidualPosition",
    "Solution",
    "TensorDescriptor",
    "batch_norm_as_scale_and_bias",
    "convolution",
    "convolution_backward_data",
    "convolution_backward_weights",
    "convolution_gradients",
    "convolution_transpose",
    "convolution_transpose_gradients",
    "default_handle",
    "find_many",
    "find_solutions",
    "fold_batch_norm",
    "run_solution",
]

_HOMES = {
    "miofind.api": (
        "BoundGradients",
        "Convolution",
        "Gradients",
        "convolution",
        "convolution_backward_data",
        "convolution_backward_weights",
        "convolution_gradients",
        "convolution_transpose",
        "convolution_transpose_gradients",
        "find_solutions",
        "run_solution",
    ),
    "miofind.api.many": ("find_many",),
    "miofind.arrays.batch_norm": (
        "batch_norm_as_scale_and_bias",
        "fold_batch_norm",
    ),
    "miofind.core.epilogue": (
        "Activation",
        "Epilogue",
        "ResidualPosition",
    ),
    "miofind.core.problem": (
        "ConvolutionDescriptor",
        "DataType",
        "Direction",
        "Layout",
        "MathMode",
        "ProblemDescription",
        "TensorDescriptor",
    ),
    "miofind.device.device": ("Device",),
    "miofind.errors": ("MiofindError",),
    "miofind.options": (
        "FindEnforce",
        "FindMode",
        "FindOptions",
        "OnMiss",
        "Order",
    ),
    "miofind.runtime.handle": (
        "Handle",
        "default_handle",
    ),
    "miofind.runtime.packed": ("PackedSolution",),
    "miofind.runtime.runner": (
        "OutputStatistics",
        "ParameterGradients",
    ),
    "miofind.runtime.solution": ("Solution",),
}

_late = _LateNames(__name__, _HOMES)

__dir__ = _late.listed
if not TYPE_CHECKING:  # type checkers know what there is, and tell of anything else
    __getattr__ = _late
