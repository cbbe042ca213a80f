"""Writes operators and other steps into Inductor's graphs, each with the fake tensor that it gives."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from miofind.core.problem import ProblemDescription
from miofind.solver.registry import is_composed
from miofind.torch.fused.calls import Call, Forward, of_one_dtype, problem_of
from miofind.torch.fused.ops import ARGUMENTS, OPERATORS
from miofind.torch.inductor.graphs import HALVES, added_step
from miofind.torch.override.calls import Unserved
from miofind.torch.override.flags import Flags, state
from miofind.torch.override.formats import is_last

Serves = Callable[[ProblemDescription, Any], str | None]
"""The id of the solver that an operator for a problem runs on a device of PyTorch's; None where none may be put in."""

SpatialRanks = frozenset[int]
"""Spatial ranks of convolutions: 1 to 3."""


class Writing:
    """Writes steps into a graph, each with the fake tensor that it gives.

    Args:
        graph: of Inductor, after gradients.
        serves: says which problems operators are put in for, and what runs them.
        last_ranks: those of convolutions that will be channels last, whatever they were traced as.
        turned: those of them that Inductor would leave channels first: of these convolutions those in 16 bits.

    Attributes:
        put_in: the problems of the operators that were put in, in order.
    """

    def __init__(self, graph: fx.Graph, serves: Serves, last_ranks: SpatialRanks, turned: SpatialRanks) -> None:
        self.graph = graph
        self.serves = serves
        self.last_ranks = last_ranks
        self.turned = turned
        self.put_in: list[ProblemDescription] = []
        self._written: list[fx.Node] = []

    def step(self, target: Any, *arguments: Any, **named: Any) -> fx.Node:
        """A new step at the place where the graph inserts."""
        node = added_step(self.graph, target, *arguments, **named)
        self._written.append(node)
        return node

    def will_run_last(self, value: Any) -> bool:
        """Whether a convolution of such a tensor will be channels last, whatever it was traced as."""
        spatial_rank = value.dim() - 2
        return spatial_rank in self.last_ranks and (spatial_rank not in self.turned or value.dtype in HALVES)

    def is_last(self, *values: Any) -> bool:
        """Whether an operator is to be channels last: one of its tensors is, or its convolution will be."""
        return any(map(is_last, values)) or self.will_run_last(values[0])

    def served(self, call: Call, *, fuses: bool = False) -> ProblemDescription | None:
        """The problem of an operator; None where no FindDB answers it.

        Args:
            call: of nodes.
            fuses: whether a kernel must do all of it. Inductor's own kernel behind a library's product costs no more
                than a pass of miofind's behind one, and may do the next step, too.
        """
        values = values_of(call)
        problem = problem_of_values(values)
        solver_id = None if problem is None else self.serves(problem, values.x.device)
        return None if solver_id is None or (fuses and is_composed(solver_id)) else problem

    def put(self, call: Call, *, fuses: bool = False) -> fx.Node | None:
        """A step that is this operator; None where no FindDB answers its problem.

        Args:
            call, fuses: as of `served`.
        """
        problem = self.served(call, fuses=fuses)
        if problem is None:
            return None
        self.put_in.append(problem)
        arguments, named = spelt(call)
        return self.step(OPERATORS[type(call)], *arguments, **named)

    def tidy(self) -> None:
        """Take back steps that nothing came to use."""
        for node in reversed(self._written):
            if not node.users and node.target not in OPERATORS.values():
                self.graph.erase_node(node)
        self._written.clear()


def is_put_in(node: fx.Node) -> bool:
    """Whether a step is an operator, or a result of one that has several."""
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, fx.Node) and source.target in ARGUMENTS


def values_of(call: Call) -> Call:
    """A call of nodes, of the fake tensors that they give."""
    return type(call)(*fx.map_arg(tuple(call), lambda each: each.meta["val"]))


def problem_of_values(values: Call) -> ProblemDescription | None:
    """The problem of a call of fake tensors; None for one that miofind does not have."""
    flags = Flags.of(state(), on_gpu=values.x.is_cuda)
    with values.x.fake_mode:
        known = of_one_dtype(values)
        layout = known.layout()
    try:
        return problem_of(known, layout, flags.math)
    except Unserved:
        return None


def spelt(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments as an operator takes them, the memory format and what follows it by name."""
    named: dict[str, Any] = {"channels_last": call.channels_last}
    if isinstance(call, Forward) and call.channel_bias is not None:
        named["channel_bias"] = call.channel_bias
    return call[: call._fields.index("channels_last")], named
