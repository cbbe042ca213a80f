"""Element types and layouts that ConvImplicitGemmWgmma has forms for."""

from __future__ import annotations

from miofind.core.problem import Direction, Layout

KINDS: dict[str, dict[str, str]] = {
    "float16": {"dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16"},
    "tf32": {"dtype": "float32", "math": "tf32"},
}

_LAST: dict[str, Layout] = dict.fromkeys("xwy", Layout.NHWC)
ONE_FIRST = {
    Direction.FORWARD: _LAST | {"y": Layout.NCHW},
    Direction.BACKWARD_DATA: _LAST | {"x": Layout.NCHW},
    Direction.BACKWARD_WEIGHTS: _LAST | {"y": Layout.NCHW},
}
"""One tensor of pixels has its channels first: the result, or y for backward weights."""
