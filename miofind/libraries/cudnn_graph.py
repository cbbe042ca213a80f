"""One convolution as a cuDNN operation graph: its engines, their numerical notes, and plans.

Turns a `ProblemDescription` into backend descriptors; must not know configurations or solvers. Dimensions are in
logical order (n, c, *spatial) and layouts are strides. One spatial dimension is lifted to two.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from miofind.core.epilogue import DEFAULT_PARAMETERS, EpilogueParameters
from miofind.core.problem import Direction, ProblemDescription
from miofind.core.tensor import Layout
from miofind.errors import LaunchError
from miofind.libraries.cudnn_backend import Attribute, CudnnHandle, Descriptor, Kind, Type
from miofind.libraries.cudnn_epilogue import fused_operations
from miofind.libraries.cudnn_notes import Note, overdeclared_notes, undeclared_notes
from miofind.libraries.cudnn_tensor import tensor_descriptor

_CROSS_CORRELATION = 1
_FLOAT = 0


class Mode(IntEnum):
    """Heuristics in the order they are asked: by a model, by a slower model, every engine that is sure to work."""

    A = 3
    B = 1
    FALLBACK = 2


Knob = IntEnum(
    "Knob",
    "SPLIT_K SWIZZLE TILE_SIZE USE_TEX EDGE KBLOCK LDGA LDGB CHUNK_K SPLIT_H WINO_TILE MULTIPLY SPLIT_K_BUF TILEK "
    "STAGES REDUCTION_MODE CTA_SPLIT_K_MODE SPLIT_K_SLC IDX_MODE SLICED SPLIT_RS SINGLEBUFFER LDGC SPECFILT KERNEL_CFG "
    "WORKSPACE TILE_CGA TILE_CGA_M TILE_CGA_N BLOCK_SIZE OCCUPANCY ARRAY_SIZE_PER_THREAD NUM_C_PER_BLOCK SPLIT_COLS "
    "TILE_ROWS TILE_COLS LOAD_SIZE CTA_COUNT STREAM_K SPLIT_P_SLC TILE_M TILE_N WARP_SPEC_CFG SWAP_AB "
    "INPUT_TMA_ENABLE OUTPUT_TMA_ENABLE",
    start=0,
)
Knob.__doc__ = "What an engine lets its caller choose (cudnnBackendKnobType_t)."

_MAX_KNOBS = len(Knob)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    """What cuDNN calls a convolution in one direction, its parts and its operands by name."""

    kind: Kind
    convolution: Attribute
    alpha: Attribute
    beta: Attribute
    operands: Mapping[str, Attribute]


_OPERATIONS = {
    Direction.FORWARD: _Operation(
        kind=Kind.CONVOLUTION_FORWARD,
        convolution=Attribute.FORWARD_CONVOLUTION,
        alpha=Attribute.FORWARD_ALPHA,
        beta=Attribute.FORWARD_BETA,
        operands={"x": Attribute.FORWARD_X, "w": Attribute.FORWARD_W, "y": Attribute.FORWARD_Y},
    ),
    Direction.BACKWARD_DATA: _Operation(
        kind=Kind.CONVOLUTION_BACKWARD_DATA,
        convolution=Attribute.BACKWARD_DATA_CONVOLUTION,
        alpha=Attribute.BACKWARD_DATA_ALPHA,
        beta=Attribute.BACKWARD_DATA_BETA,
        operands={"x": Attribute.BACKWARD_DATA_DX, "w": Attribute.BACKWARD_DATA_W, "y": Attribute.BACKWARD_DATA_DY},
    ),
    Direction.BACKWARD_WEIGHTS: _Operation(
        kind=Kind.CONVOLUTION_BACKWARD_FILTER,
        convolution=Attribute.BACKWARD_FILTER_CONVOLUTION,
        alpha=Attribute.BACKWARD_FILTER_ALPHA,
        beta=Attribute.BACKWARD_FILTER_BETA,
        operands={
            "x": Attribute.BACKWARD_FILTER_X,
            "w": Attribute.BACKWARD_FILTER_DW,
            "y": Attribute.BACKWARD_FILTER_DY,
        },
    ),
}

# Source: cudnn-frontend, cudnn_frontend_Heuristics.h, which holds a mutex around mode B.
_heuristics_lock = threading.Lock()


class ConvGraph:
    """The operation graph of one problem on a handle's device; for one thread.

    Args:
        parameters: the numbers of the problem's epilogue: those of its activation, and which of its factors are 1, are
            part of the graph.

    Attributes:
        ids: by name and in order, what the graph calls the operands.
        factors: what it calls factors that a launch is given in host memory, and their names in the parameters.

    Raises:
        LaunchError: cuDNN refuses the problem.
    """

    def __init__(
        self, problem: ProblemDescription, handle: CudnnHandle, parameters: EpilogueParameters = DEFAULT_PARAMETERS
    ) -> None:
        self.problem = problem
        self.ids = operand_ids(problem)
        made = _operations(told_channels_last(problem.lifted(max(2, problem.spatial_dims))), parameters)
        self.factors = made.factors
        self._graph = Descriptor(Kind.OPERATION_GRAPH)
        self._graph.link(Attribute.GRAPH_OPERATIONS, *made.operations)
        self._graph.set(Attribute.GRAPH_HANDLE, Type.HANDLE, handle.pointer)
        self._graph.finalize()

    def suggestions(self, mode: Mode) -> tuple[Descriptor, ...]:
        """Engine configurations that the heuristics propose, best first; empty where a mode has none."""
        heuristics = Descriptor(Kind.HEURISTICS)
        heuristics.link(Attribute.HEURISTICS_OPERATION_GRAPH, self._graph)
        heuristics.set(Attribute.HEURISTICS_MODE, Type.HEURISTIC_MODE, mode)
        try:
            with _heuristics_lock:
                heuristics.finalize()
            count = heuristics.count(Attribute.HEURISTICS_RESULTS, Type.DESCRIPTOR)
            return heuristics.children(Attribute.HEURISTICS_RESULTS, Kind.ENGINE_CONFIG, count)
        except LaunchError as error:
            if error.__cause__ is not None:
                raise
            return ()

    def engine(self, index: int) -> Descriptor:
        """The engine with that global index.

        Raises:
            LaunchError: there is none, or it does not serve the problem.
        """
        engine = Descriptor(Kind.ENGINE).link(Attribute.ENGINE_OPERATION_GRAPH, self._graph)
        return engine.set(Attribute.ENGINE_GLOBAL_INDEX, Type.INT64, index).finalize()

    def notes(self, engine: Descriptor) -> frozenset[Note]:
        """The numerical notes of an engine, with those that cuDNN forgets and without those it has no cause for."""
        values = engine.values(Attribute.ENGINE_NUMERICAL_NOTES, Type.NUMERICAL_NOTE, len(Note))
        declared = frozenset(note for note in Note if note in values)
        index = engine_index(engine)
        return declared - overdeclared_notes(self.problem, index) | undeclared_notes(self.problem, index)

    def plan(self, config: Descriptor) -> Descriptor:
        """The execution plan of an engine configuration; takes up to a second where the engine compiles.

        Raises:
            LaunchError: the configuration does not serve the problem.
        """
        plan = Descriptor(Kind.EXECUTION_PLAN).link(Attribute.PLAN_ENGINE_CONFIG, config)
        return plan.keep(self._graph).finalize()


def told_channels_last(problem: ProblemDescription) -> ProblemDescription:
    """A problem with an epilogue whose tensors have one pixel each with all of them channels last; others unchanged.

    Such tensors lie alike in both orders. By the strides of channels first, (c, 1, 1, 1), engines of cuDNN 9.19 that
    fuse a bias store images one element apart.
    """
    x, w, y = problem.x, problem.w, problem.y
    if not problem.epilogue or any(size != 1 for tensor in (x, w, y) for size in tensor.shape[2:]):
        return problem
    last = Layout.of(problem.spatial_dims, channels_last=True)
    return replace(problem, x=replace(x, layout=last), w=replace(w, layout=last), y=replace(y, layout=last))


def operand_ids(problem: ProblemDescription) -> dict[str, int]:
    """By name and in order, what a problem's graph calls its operands."""
    return {operand.name: number for number, operand in enumerate(problem.operands, 1)}


def _convolution(problem: ProblemDescription) -> Descriptor:
    conv, descriptor = problem.conv, Descriptor(Kind.CONVOLUTION)
    descriptor.set(Attribute.CONVOLUTION_SPATIAL_DIMS, Type.INT64, problem.spatial_dims)
    descriptor.set(Attribute.CONVOLUTION_COMPUTE_TYPE, Type.DATA_TYPE, _FLOAT)
    descriptor.set(Attribute.CONVOLUTION_MODE, Type.CONVOLUTION_MODE, _CROSS_CORRELATION)
    descriptor.set(Attribute.CONVOLUTION_PRE_PADDINGS, Type.INT64, *conv.pad_before)
    descriptor.set(Attribute.CONVOLUTION_POST_PADDINGS, Type.INT64, *conv.pad_after)
    descriptor.set(Attribute.CONVOLUTION_DILATIONS, Type.INT64, *conv.dilation)
    return descriptor.set(Attribute.CONVOLUTION_STRIDES, Type.INT64, *conv.stride).finalize()


@dataclass(frozen=True, slots=True)
class _Made:
    """The operations of a graph, and the factors that its launches are given."""

    operations: tuple[Descriptor, ...]
    factors: Mapping[int, str]


def _operations(problem: ProblemDescription, parameters: EpilogueParameters) -> _Made:
    made, ids = _OPERATIONS[problem.direction], operand_ids(problem)
    tensors = {
        operand.name: tensor_descriptor(
            operand.tensor.shape, operand.tensor.strides, ids[operand.name], dtype=operand.tensor.dtype
        )
        for operand in problem.operands
    }
    behind = fused_operations(problem, parameters, ids, tensors) if problem.epilogue else None
    operation = Descriptor(made.kind).link(made.convolution, _convolution(problem))
    for name, attribute in made.operands.items():
        is_output = name == problem.direction.output
        operation.link(attribute, behind.first if behind and is_output else tensors[name])
    operation.set(made.alpha, Type.FLOAT, 1.0).set(made.beta, Type.FLOAT, 0.0).finalize()
    return _Made((operation, *behind.operations), behind.factors) if behind else _Made((operation,), {})


def engine_index(engine: Descriptor) -> int:
    """Global index of an engine, the same on every machine with that version of cuDNN."""
    return engine.values(Attribute.ENGINE_GLOBAL_INDEX, Type.INT64)[0]


def engine_config(engine: Descriptor, knobs: Iterable[tuple[int, int]]) -> Descriptor:
    """An engine with its knobs set.

    Raises:
        LaunchError: the engine has no such knob, or the knob no such choice.
    """
    choices = [
        Descriptor(Kind.KNOB_CHOICE)
        .set(Attribute.KNOB_CHOICE_TYPE, Type.KNOB_TYPE, knob)
        .set(Attribute.KNOB_CHOICE_VALUE, Type.INT64, choice)
        .finalize()
        for knob, choice in knobs
    ]
    config = Descriptor(Kind.ENGINE_CONFIG).link(Attribute.CONFIG_ENGINE, engine)
    if choices:
        config.link(Attribute.CONFIG_KNOB_CHOICES, *choices)
    return config.finalize()


def config_engine(config: Descriptor) -> Descriptor:
    """The engine of a configuration."""
    return config.children(Attribute.CONFIG_ENGINE, Kind.ENGINE, 1)[0]


def config_knobs(config: Descriptor) -> tuple[tuple[int, int], ...]:
    """(knob type, choice) pairs of a configuration, by knob type."""
    choices = config.children(Attribute.CONFIG_KNOB_CHOICES, Kind.KNOB_CHOICE, _MAX_KNOBS)
    pairs = (
        (
            choice.values(Attribute.KNOB_CHOICE_TYPE, Type.KNOB_TYPE)[0],
            choice.values(Attribute.KNOB_CHOICE_VALUE, Type.INT64)[0],
        )
        for choice in choices
    )
    return tuple(sorted(pairs))
