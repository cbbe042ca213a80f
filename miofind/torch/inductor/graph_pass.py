"""A pass over Inductor's graphs that puts `miofind::convolution...` where a FindDB answers the fused problem.

Forward: convolution, batch norm in inference (as steps of channels), an addition, an activation; or the variance and
mean of each channel, as a batch norm in training takes them. Backward: the gradient of the input with what is added to
it and an activation's derivative, and the bias gradient beside that of the weights. Linear layers in 16 bits alike.
Whatever is not known exactly, has sizes that are not numbers, or no answer stays as it is, and is Inductor's. The other
modules here then have what stays, and what is around the operators, computed faster; `rewrite` has their order.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from miofind.core.problem import ProblemDescription
from miofind.runtime.solution import Solution
from miofind.solver.registry import Registry
from miofind.torch.fused.answers import answer, compile_ahead, fastest, find_missing, planner_of
from miofind.torch.fused.calls import Forward
from miofind.torch.fused.ops import ARGUMENTS, OPERATORS
from miofind.torch.fused.packed_filters import PackedFilters, packed_filters
from miofind.torch.inductor.backward import replace_backward
from miofind.torch.inductor.batch_statistics import gather_vectors
from miofind.torch.inductor.first_images import interleave
from miofind.torch.inductor.forward import replace_forward
from miofind.torch.inductor.gathered import gather_casts, gather_counts
from miofind.torch.inductor.graphs import CONVOLUTIONS, copy_of, has_numbers, trains
from miofind.torch.inductor.group_statistics import split_group_statistics
from miofind.torch.inductor.instance_norms import unfold_images
from miofind.torch.inductor.kept import kept_problems, pack_images
from miofind.torch.inductor.linear_layers import (
    input_gradients,
    linear_layers,
    replace_input_gradient,
    replace_linear,
)
from miofind.torch.inductor.memory_formats import (
    constrain_layouts,
    memory_formats,
    prefers_channels_last,
    state_memory_format,
    turn_last,
    turn_saved,
)
from miofind.torch.inductor.norms import combine_vectors
from miofind.torch.inductor.own_pass import OwnPass
from miofind.torch.inductor.poolings import split_poolings
from miofind.torch.inductor.strides import reads_convolved_by_strides, restore_strides
from miofind.torch.inductor.turned import is_answered, lay_out, put_bare, turn, turnable
from miofind.torch.inductor.weights_in_graphs import keep_weights
from miofind.torch.inductor.writing import Serves, SpatialRanks, Writing, problem_of_values, values_of
from miofind.torch.override import comparisons
from miofind.torch.override.calls import Unserved
from miofind.torch.override.dispatcher import current
from miofind.torch.override.flags import Flags, state
from miofind.torch.override.plans import Planner
from miofind.torch.override.settings import MissPolicy

logger = logging.getLogger(__name__)
aten = torch.ops.aten

_FOUND = "whichever is found"
"""Stands for the solver of an answer that is to be found yet."""


class ConvolutionPass(OwnPass):
    """The pass, over Inductor's graphs after gradients.

    Attributes:
        replaced: the problems that it has put in, in order.
        missing: those that it would have put in, had a FindDB an answer.
    """

    def __init__(self, before: Any = None) -> None:
        super().__init__(before)
        self.replaced: list[ProblemDescription] = []
        self.missing: list[ProblemDescription] = []

    def rewrite(self, graph: fx.Graph) -> None:
        """Put miofind's operators in, and change what is around them."""
        constrain_layouts()
        dynamic = sum(node.target in CONVOLUTIONS and not has_numbers(node) for node in graph.nodes)
        missed = len(self.missing)
        unfold_images(graph)
        ranks = _prepare(graph)
        writing = Writing(graph, self._serves, *ranks)
        _replace(writing)
        self.replaced += writing.put_in
        lay_out(graph, writing.turned)
        by_inductor = writing.last_ranks - writing.turned
        unfold_images(graph, by_inductor)
        pack_images(graph)
        for node in list(graph.nodes):
            if node.target in ARGUMENTS:
                state_memory_format(node)
        split_poolings(graph)
        interleave(graph, writing.last_ranks)
        split_group_statistics(graph, by_inductor)
        combine_vectors(graph)
        if trains(graph):
            turn_saved(graph)
            gather_vectors(graph)
            gather_casts(graph, writing.last_ranks)
            gather_counts(graph)
        else:
            keep_weights(graph, memory_formats(graph), _packing)
        restore_strides(graph)
        graph.lint()
        _tell(dynamic, len({*self.missing[missed:]}))

    def _serves(self, problem: ProblemDescription, device: Any) -> str | None:
        """The solver of the answer that a FindDB has to a problem; notes what lacks an answer."""
        planner, flags = _asked(device)
        found = answer(problem, device, flags, planner)
        if not found.is_served and found.part.is_missing and planner.settings.on_miss is not MissPolicy.RECORD:
            self.missing.append(problem)
        solution = found.part.solution
        return solution.solver_id if found.is_served and solution is not None else None

    def state(self) -> str:
        """The solvers, PyTorch's switches and the FindDBs."""
        solvers = ",".join(f"{name}:{solver.version}" for name, solver in sorted(Registry.default().items()))
        return f"{solvers} {state()} {_database_state()}"


def _tell(dynamic: int, missing: int) -> None:
    """Tell of a graph's convolutions that stay Inductor's although miofind could run them."""
    if dynamic:
        logger.warning(
            "convolutions of a graph that have dynamic shapes stay as torch.compile has them, %d here: compile with "
            "dynamic=False, which makes a graph for each shape, to have miofind fuse them",
            dynamic,
        )
    if missing:
        logger.warning(
            "what no FindDB answers of a graph stays as torch.compile has it, problems: %d. Set "
            'torch.backends.cudnn.benchmark = True, or miofind.torch.enable("find"), to find them while it is compiled',
            missing,
        )


def _database_state() -> str:
    """What changes when the settings or the FindDBs in force do; of one in memory its comparisons with PyTorch."""
    told = []
    for device in ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",):
        planner = planner_of(current(device))
        told.append(repr(replace(planner.settings, handle=None, background=False)))
        try:
            handle = planner.handle_of(torch.device(device))
        except Unserved as reason:
            told.append(str(reason))
            continue
        told += handle.database.revisions()
        told += [repr(comparisons.known(layer, handle.device)) for layer in handle.database.layers if layer.in_memory]
    return " ".join(told)


def _asked(device: Any) -> tuple[Planner, Flags]:
    """What decides about problems on a device, and PyTorch's switches for it.

    A graph waits for its kernels: what is put in stays.
    """
    settings = replace(planner_of(current(device.type)).settings, background=False)
    return Planner(settings), Flags.of(state(), on_gpu=device.type == "cuda")


def _measures(device: Any) -> bool:
    """Whether misses on a device are measured."""
    planner, flags = _asked(device)
    return planner.settings.measures(flags)


def _prepare(graph: fx.Graph) -> tuple[SpatialRanks, SpatialRanks]:
    """Find all that a graph lacks answers to at once, where misses are measured, and compile all that it will launch.

    A copy of the graph tells what, with what an override will run of the convolutions that it keeps.

    Returns:
        The spatial ranks of convolutions that will be channels last, and those that are turned here.
    """
    convolutions = (*CONVOLUTIONS, OPERATORS[Forward])
    asked = [
        *linear_layers(graph),
        *input_gradients(graph),
        *(node for node in graph.nodes if node.target in convolutions),
    ]
    read = (node.args[0].meta.get("val") for node in asked)
    devices = {value.device for value in read if isinstance(value, torch.Tensor)}
    measured = frozenset(filter(_measures, devices))
    is_turned = prefers_channels_last(graph) and not reads_convolved_by_strides(graph)
    by_inductor = frozenset((2,) if is_turned else ())
    ranks = by_inductor, frozenset[int]()
    for turned in dict.fromkeys((turnable(graph) - by_inductor, frozenset[int]())):
        ranks = by_inductor | turned, turned
        if measured:
            _find_lacking(graph, ranks, measured, as_if_found=True)
            # What PyTorch is faster at stays a convolution of its own, and is another problem.
            _find_lacking(graph, ranks, measured, as_if_found=False)
        if turned and is_answered(_ask(graph, _server, ranks), graph):
            break
    on_gpu: dict[Any, list[Solution]] = {device: [] for device in devices if device.type == "cuda"}

    def launched(problem: ProblemDescription, device: Any) -> str | None:
        best = _known(problem, device)
        if best is not None and device in on_gpu:
            on_gpu[device].append(best)
        return None if best is None else best.solver_id

    if on_gpu:
        _ask(graph, launched, ranks)
    for device, solutions in on_gpu.items():
        compile_ahead(solutions, device, _asked(device)[0])
    return ranks


def _find_lacking(
    graph: fx.Graph, ranks: tuple[SpatialRanks, SpatialRanks], devices: frozenset[Any], *, as_if_found: bool
) -> None:
    """Find what a graph lacks on devices, all at once.

    Args:
        as_if_found: operators are put in for what is lacking, too.
    """
    lacking: dict[Any, list[ProblemDescription]] = {device: [] for device in devices}

    def serves(problem: ProblemDescription, device: Any) -> str | None:
        if device not in devices:
            return None
        known = _known(problem, device)
        if known is None:
            lacking[device].append(problem)
            return _FOUND if as_if_found else None
        return known.solver_id

    _ask(graph, serves, ranks)
    for device, problems in lacking.items():
        planner, flags = _asked(device)
        find_missing(problems, device, flags, planner)


def _known(problem: ProblemDescription, device: Any, *, otherwise: MissPolicy = MissPolicy.FALLBACK) -> Solution | None:
    """The first of the answers that FindDBs have to a problem, where miofind runs it; nothing is measured."""
    planner, flags = _asked(device)
    if planner.settings.on_miss is MissPolicy.RECORD:
        return None
    return fastest(problem, device, flags, Planner(replace(planner.settings, on_miss=otherwise)))


def _known_or_estimated(problem: ProblemDescription, device: Any) -> Solution | None:
    """What runs a problem, by what is known or, where that is asked for, estimated; nothing is measured, or noted."""
    is_estimated = _asked(device)[0].settings.on_miss is MissPolicy.ESTIMATE
    return _known(problem, device, otherwise=MissPolicy.ESTIMATE if is_estimated else MissPolicy.FALLBACK)


def _server(problem: ProblemDescription, device: Any) -> str | None:
    """The solver of what is known or estimated; None where PyTorch runs a problem."""
    known = _known_or_estimated(problem, device)
    return None if known is None else known.solver_id


def _packing(call: Forward) -> PackedFilters | None:
    """How what runs a call of nodes has filters packed; None where it reads them as they are."""
    values = values_of(call)
    problem, device = problem_of_values(values), values.x.device
    best = None if problem is None else _known_or_estimated(problem, device)
    planner, flags = _asked(device)
    return None if best is None else packed_filters(best, device, flags, planner)


def _ask(graph: fx.Graph, serves: Serves, ranks: tuple[SpatialRanks, SpatialRanks]) -> Writing:
    """Ask of all problems that a graph will have, which stays as it is; returns what a copy of it became."""
    writing = Writing(copy_of(graph), serves, *ranks)
    _replace(writing)
    for problem, device in kept_problems(writing):
        serves(problem, device)
    return writing


def _replace(writing: Writing) -> None:
    """Put operators in for the convolutions of a graph, where they are served."""
    turn(writing)
    if 2 in writing.last_ranks - writing.turned:
        turn_last(writing)
    for node in list(writing.graph.nodes):
        if node.target is aten.convolution.default and not node.args[6] and has_numbers(node):
            replace_forward(writing, node)
        elif node.target is aten.convolution_backward.default and not node.args[7] and has_numbers(node):
            replace_backward(writing, node)
    for node in list(linear_layers(writing.graph)):
        replace_linear(writing, node)
    for node in list(input_gradients(writing.graph)):
        replace_input_gradient(writing, node)
    put_bare(writing)
