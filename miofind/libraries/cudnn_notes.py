"""What cuDNN says of an engine's arithmetic, and what follows for correctness. Pure values; loads nothing."""

from __future__ import annotations

import functools
from enum import IntEnum

from miofind.core.problem import DataType, Direction, MathMode, ProblemDescription


class Note(IntEnum):
    """cudnnBackendNumericalNote_t."""

    TENSOR_CORE = 0
    DOWN_CONVERT_INPUTS = 1
    REDUCED_PRECISION_REDUCTION = 2
    FFT = 3
    NONDETERMINISTIC = 4
    WINOGRAD = 5
    WINOGRAD_TILE_4X4 = 6
    WINOGRAD_TILE_6X6 = 7
    WINOGRAD_TILE_13X13 = 8
    STRICT_NAN_PROPAGATION = 9


# How far an engine's error may exceed direct summation's bound, 8 * u * sqrt(K) * sqrt(x^2 * w^2), on an H200 with
# cuDNN 9.19 and normal data. Winograd 3x3: up to 1.3. Winograd 5x5: up to 700 in float32 and 9000 in float16. FFT:
# below the bound, but its error is bounded by the norm of a tile and not by the element's own sum. The powers of two
# above leave room for less even data.
_SMALL_TILE = 8.0
_LARGE_TILE = 16384.0
_GROWTH = {
    Note.FFT: 16.0,
    Note.WINOGRAD_TILE_4X4: 2.0,
    Note.WINOGRAD_TILE_6X6: _SMALL_TILE,
    Note.WINOGRAD_TILE_13X13: _LARGE_TILE,
}
_INEXACT = frozenset({Note.WINOGRAD, *_GROWTH})


def growth(notes: frozenset[Note], problem: ProblemDescription) -> float:
    """How much wider the error bound is than direct summation's."""
    known = max((_GROWTH[note] for note in notes if note in _GROWTH), default=1.0)
    if Note.WINOGRAD not in notes or known > 1:
        return known
    return _SMALL_TILE if max(problem.filter) <= 3 else _LARGE_TILE


def is_exact(notes: frozenset[Note]) -> bool:
    """Whether small integers give exact results."""
    return not notes & _INEXACT


def is_deterministic(notes: frozenset[Note]) -> bool:
    """Whether equal inputs give equal bits on every run."""
    return Note.NONDETERMINISTIC not in notes


_ADDS_IN_16_BITS = frozenset(
    {(Direction.BACKWARD_DATA, 2), (Direction.BACKWARD_WEIGHTS, 47), (Direction.BACKWARD_WEIGHTS, 61)}
)
_ADDS_IN_32_BITS = frozenset({(Direction.FORWARD, 63)})
_LOSES_OVERFLOW = frozenset({(Direction.FORWARD, 47)})
_READS_EARLY = frozenset({(Direction.FORWARD, 4)})
_IGNORES_PADDING_AFTER = frozenset({(Direction.BACKWARD_WEIGHTS, 1), (Direction.BACKWARD_WEIGHTS, 20)})


def undeclared_notes(problem: ProblemDescription, engine: int) -> frozenset[Note]:
    """Notes that cuDNN forgets (9.19, on an H200).

    Engine 17 of backward weights is a Winograd transform: inexact on small integers, and 700 times direct summation's
    bound for 5x5 filters. Engine 2 of backward data and engines 47 and 61 of backward weights add in the type of 16-bit
    tensors: 28 to 190, 210 to 850 (bfloat16) and 22 to 45 times the bound.
    """
    if problem.epilogue:  # engines count by the operations of a graph
        return frozenset()
    if problem.direction is Direction.BACKWARD_WEIGHTS and engine == 17:
        return frozenset({Note.WINOGRAD})
    if problem.output.dtype.itemsize == 2 and (problem.direction, engine) in _ADDS_IN_16_BITS:
        return frozenset({Note.REDUCED_PRECISION_REDUCTION})
    return frozenset()


def overdeclared_notes(problem: ProblemDescription, engine: int) -> frozenset[Note]:
    """Notes that cuDNN gives an engine without cause (9.19, on an H200).

    Engine 63 of float16 forward, made for first layers, is said to add with reduced precision and adds in float32: on
    26 problems its errors were at most 0.21 of direct summation's bound, and products of 4096 that cancel left sums of
    eighths exact.
    """
    if problem.epilogue:
        return frozenset()
    if problem.x.dtype is DataType.FLOAT16 and (problem.direction, engine) in _ADDS_IN_32_BITS:
        return frozenset({Note.REDUCED_PRECISION_REDUCTION})
    return frozenset()


def known_fault(problem: ProblemDescription, engine: int) -> str:
    """What an engine is known to do wrong (cuDNN 9.19, on an H200), "" for nothing.

    Engines 1 and 20 of backward weights ignore the padding after the tensor. Engine 47 of float16 forward writes 0 for
    sums beyond float16, where infinity is right: -192903 came out as 0.

    Engine 4 of forward, in a CUDA graph, reads the tensors of an epilogue before a kernel has ended that makes them and
    lets the next one begin early (programmatic dependent launch): captured networks replayed wrong with it. The gate of
    normal numbers refuses it where there is a residual (docs/attacks.md).
    """
    if problem.epilogue:
        reads_early = problem.epilogue.operands and (problem.direction, engine) in _READS_EARLY
        return "reads the epilogue's operands before they are whole" if reads_early else ""
    asymmetric = problem.conv.pad_before != problem.conv.pad_after
    if asymmetric and (problem.direction, engine) in _IGNORES_PADDING_AFTER:
        return "ignores the padding after the tensor"
    loses = problem.output.dtype is DataType.FLOAT16 and (problem.direction, engine) in _LOSES_OVERFLOW
    return "writes 0 for what exceeds float16" if loses else ""


def refused_notes(problem: ProblemDescription) -> frozenset[Note]:
    """Notes of engines that compute with less precision than the problem allows.

    For float32 TENSOR_CORE means TF32: every such engine had errors of 1e-3 in units of sqrt(x^2 * w^2), every direct
    one without it 2e-5 or less (H200, cuDNN 9.19).
    """
    refused = {Note.DOWN_CONVERT_INPUTS, Note.REDUCED_PRECISION_REDUCTION}
    if problem.x.dtype is DataType.FLOAT32 and problem.math is MathMode.IEEE:
        refused.add(Note.TENSOR_CORE)
    return frozenset(refused)


def notes_text(notes: frozenset[Note]) -> str:
    """Canonical text, such as "fft+nondeterministic"; "" for none."""
    return "+".join(sorted(note.name.lower() for note in notes))


@functools.lru_cache(maxsize=1024)
def parsed_notes(text: str) -> frozenset[Note]:
    """The notes that a canonical text names.

    Raises:
        ValueError: the text is not canonical, or a note is unknown.
    """
    names = [name for name in text.split("+") if name]
    unknown = [name for name in names if name not in _BY_NAME]
    if unknown:
        raise ValueError(f"note {unknown[0]!r} is unknown: known are {', '.join(_BY_NAME)}")
    notes = frozenset(_BY_NAME[name] for name in names)
    if notes_text(notes) != text:
        raise ValueError(f"notes must read {notes_text(notes)!r}")
    return notes


_BY_NAME = {note.name.lower(): note for note in Note}
