"""What inputs are filled with, on either place."""

from __future__ import annotations

from enum import IntEnum

FLOAT16_GRID = 2.0**-12
"""NORMAL values of float16 are multiples of it, so that they stay exact when they are multiplied by it."""


class Values(IntEnum):
    """Distribution of an input's elements; the numbers are those of harness/random_inputs.cu.

    NORMAL has mean 0 and standard deviation 1. TERNARY is -1, 0 or 1, equally likely: its products and their sums are
    exact in any order, so that a result can be compared bit for bit. For an epilogue's operands beside it: DYADIC is
    one of 1/64 ... 128/64 or its negative, POSITIVE one of 1/64 ... 128/64, all equally likely. EDGES is one of -4,
    -3.75 ... 4, both zeros among them: what a derivative is taken at meets the places where it jumps.
    """

    NORMAL = 0
    TERNARY = 1
    DYADIC = 2
    POSITIVE = 3
    EDGES = 4
