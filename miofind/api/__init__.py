"""The public functions: find solutions, run one, or do both at once with the answer cached.

`solutions.py` is the strict part, `many.py` that of many problems; `calls.py`, `gradients.py` and `transposed.py` take
arrays of any form, and `bound.py` has convolutions that are prepared once. Each is imported when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miofind.process.late_names import LateNames as _LateNames

if TYPE_CHECKING:
    from miofind.api.bound import BoundGradients, Convolution
    from miofind.api.calls import convolution, convolution_backward_data, convolution_backward_weights
    from miofind.api.gradients import Gradients, convolution_gradients
    from miofind.api.solutions import find_solutions, run_solution
    from miofind.api.transposed import convolution_transpose, convolution_transpose_gradients

__all__ = [
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
]

_late = _LateNames(
    __name__,
    {
        "miofind.api.bound": ("BoundGradients", "Convolution"),
        "miofind.api.calls": ("convolution", "convolution_backward_data", "convolution_backward_weights"),
        "miofind.api.gradients": ("Gradients", "convolution_gradients"),
        "miofind.api.solutions": ("find_solutions", "run_solution"),
        "miofind.api.transposed": ("convolution_transpose", "convolution_transpose_gradients"),
    },
)

__dir__ = _late.listed
if not TYPE_CHECKING:  # type checkers know what there is, and tell of anything else
    __getattr__ = _late
