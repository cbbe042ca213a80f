"""A problem's epilogue as pointwise operations behind a convolution in a cuDNN operation graph.

The convolution writes a virtual float32 tensor, each operation another one, the last the output: one rounding. An
activation's numbers become parts of the graph; factors are given to each launch, and those that are 1 are left out.
Engines that fuse at run time take what this makes in channels last on compute capability 9.0; what no engine takes has
no plan.

Source: cuDNN frontend developer guide, graph API, "generic runtime fusion engines".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

from miofind.core.epilogue import Activation, Epilogue, EpilogueParameters, ResidualPosition
from miofind.core.problem import ProblemDescription, TensorDescriptor
from miofind.libraries.cudnn_backend import Attribute, Descriptor, Kind, Type
from miofind.libraries.cudnn_tensor import tensor_descriptor

_FLOAT = 0
_PROPAGATE_NAN = 1


class _Mode(IntEnum):
    """cudnnPointwiseMode_t."""

    ADD = 0
    MUL = 1
    RELU = 100
    TANH = 101
    SIGMOID = 102
    ELU = 103
    GELU = 104
    SWISH = 106
    GELU_TANH = 107


_MODES = {
    Activation.RELU: _Mode.RELU,
    Activation.CLAMP: _Mode.RELU,
    Activation.LEAKY_RELU: _Mode.RELU,
    Activation.SILU: _Mode.SWISH,
    Activation.GELU: _Mode.GELU,
    Activation.GELU_TANH: _Mode.GELU_TANH,
    Activation.SIGMOID: _Mode.SIGMOID,
    Activation.TANH: _Mode.TANH,
    Activation.ELU: _Mode.ELU,
}


def refused(epilogue: Epilogue) -> str:
    """Why no engine of cuDNN fuses an epilogue, "" where one may."""
    if epilogue.channel_bias:
        return "cuDNN fuses no operand of one number an image and channel"
    if epilogue.activation is not Activation.NONE and epilogue.activation not in _MODES:
        return f"cuDNN has no {epilogue.activation}"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """One pointwise operation: of the values so far alone, or with an operand or a number."""

    mode: _Mode
    activation: Activation = Activation.NONE
    operand: str = ""
    factor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedOperations:
    """The pointwise operations of an epilogue.

    Attributes:
        first: what the convolution writes, instead of the output.
        operations: in order; the last writes the output.
        factors: by the number that the graph knows it by, which of the run's factors a launch reads from host memory.
    """

    first: Descriptor
    operations: tuple[Descriptor, ...]
    factors: Mapping[int, str]


def fused_operations(
    problem: ProblemDescription,
    parameters: EpilogueParameters,
    ids: Mapping[str, int],
    tensors: Mapping[str, Descriptor],
) -> FusedOperations:
    """The operations of a problem's epilogue.

    Args:
        problem: of two or three spatial dimensions, with an epilogue that is not `refused`.
        ids: of the operands, by which the graph knows them; those behind the last are free.
        tensors: descriptors of the operands.
    """
    passes = tuple(_passes(problem.epilogue, parameters))
    free = iter(range(max(ids.values()) + 1, 1 << 16))
    factors: dict[int, str] = {}
    first = value = _virtual(problem.y, next(free))
    operations = []
    for place, step in enumerate(passes):
        is_last = place == len(passes) - 1
        other: Descriptor | None
        if step.operand == "residual" and parameters.beta != 1:
            factors[beta := next(free)] = "beta"
            scaled = _virtual(problem.y, next(free))
            by_beta = _Pass(mode=_Mode.MUL)
            operations.append(_operation(by_beta, parameters, tensors["residual"], scaled, _scalar(problem, beta)))
            other = scaled
        elif step.factor:
            factors[factor := next(free)] = step.factor
            other = _scalar(problem, factor)
        else:
            other = tensors.get(step.operand)
        result = tensors["y"] if is_last else _virtual(problem.y, next(free))
        operations.append(_operation(step, parameters, value, result, other))
        value = result
    return FusedOperations(first=first, operations=tuple(operations), factors=factors)


def _passes(epilogue: Epilogue, parameters: EpilogueParameters) -> Iterator[_Pass]:
    """In the order of `miofind.core.epilogue`; one at least."""
    if parameters.alpha != 1:
        yield _Pass(mode=_Mode.MUL, factor="alpha")
    if epilogue.scale:
        yield _Pass(mode=_Mode.MUL, operand="scale")
    if epilogue.bias:
        yield _Pass(mode=_Mode.ADD, operand="bias")
    if epilogue.residual is ResidualPosition.BEFORE:
        yield _Pass(mode=_Mode.ADD, operand="residual")
    if epilogue.activation is not Activation.NONE:
        yield _Pass(mode=_MODES[epilogue.activation], activation=epilogue.activation)
    if epilogue.residual is ResidualPosition.AFTER:
        yield _Pass(mode=_Mode.ADD, operand="residual")


def _operation(
    step: _Pass, parameters: EpilogueParameters, value: Descriptor, result: Descriptor, other: Descriptor | None
) -> Descriptor:
    operation = Descriptor(Kind.OPERATION_POINTWISE)
    operation.link(Attribute.OPERATION_POINTWISE_POINTWISE, _pointwise(step, parameters))
    operation.link(Attribute.OPERATION_POINTWISE_X, value).link(Attribute.OPERATION_POINTWISE_Y, result)
    if other is not None:
        operation.link(Attribute.OPERATION_POINTWISE_B, other)
    return operation.finalize()


def _pointwise(step: _Pass, parameters: EpilogueParameters) -> Descriptor:
    descriptor = Descriptor(Kind.POINTWISE).set(Attribute.POINTWISE_MODE, Type.POINTWISE_MODE, step.mode)
    descriptor.set(Attribute.POINTWISE_COMPUTE_TYPE, Type.DATA_TYPE, _FLOAT)
    _, _, first, second = parameters.numbers(step.activation)
    if step.mode is _Mode.RELU:
        descriptor.set(Attribute.POINTWISE_NAN_PROPAGATION, Type.NAN_PROPAGATION, _PROPAGATE_NAN)
    if step.activation is Activation.CLAMP:
        descriptor.set(Attribute.POINTWISE_RELU_LOWER_CLIP, Type.DOUBLE, first)
    if step.activation is Activation.CLAMP and second < math.inf:
        descriptor.set(Attribute.POINTWISE_RELU_UPPER_CLIP, Type.DOUBLE, second)
    if step.activation is Activation.LEAKY_RELU:
        descriptor.set(Attribute.POINTWISE_RELU_LOWER_CLIP_SLOPE, Type.DOUBLE, first)
    if step.activation is Activation.ELU:
        descriptor.set(Attribute.POINTWISE_ELU_ALPHA, Type.DOUBLE, first)
    return descriptor.finalize()


def _virtual(like: TensorDescriptor, number: int) -> Descriptor:
    """A float32 tensor that is never in memory."""
    return tensor_descriptor(like.shape, like.strides, number, kind=Attribute.TENSOR_IS_VIRTUAL)


def _scalar(problem: ProblemDescription, number: int) -> Descriptor:
    """A number that a launch reads from host memory."""
    ones = (1,) * len(problem.y.shape)
    return tensor_descriptor(ones, ones, number, kind=Attribute.TENSOR_IS_BY_VALUE)
