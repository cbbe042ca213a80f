"""Find, remember and run the fastest correct convolution on the GPU at hand."""

from __future__ import annotations

from miofind.process import interrupts as _interrupts

if _interrupts.is_program():
    _interrupts.end_at_once()  # what follows takes a while

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
    "find_solutions",
    "fold_batch_norm",
    "run_solution",
]
