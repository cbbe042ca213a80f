"""Filters that are packed as a solution's kernels take them, so that calls do not transform them: `Solver.packing`.

They are a form of a weight: `kept_weights` keeps them, and writes them anew where the weight was written to.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch

from miofind.core.problem import ProblemDescription
from miofind.errors import described, raise_if_interrupted
from miofind.launch.invoker import Invoker, bases_of, make_invoker, stay
from miofind.runtime.handle import Handle
from miofind.runtime.solution import Solution
from miofind.solver.steps import Config
from miofind.torch.override.calls import Unserved
from miofind.torch.override.dtypes import torch_dtype
from miofind.torch.override.flags import Flags
from miofind.torch.override.formats import dense
from miofind.torch.override.memory import host_array, stream_reader
from miofind.torch.override.plans import Planner

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackedFilters:
    """How a solution's filters are packed, and what runs it with them. Equal ones write equal bytes.

    Attributes:
        name: tells it from others, in other processes, too.
        solution: its problem and id, of which `of_solution` makes it.
        bytes: of packed filters.
        run: the rest of the solution, which reads them in place of w.
    """

    name: str
    solution: str = field(compare=False)
    bytes: int = field(compare=False)
    run: Invoker = field(compare=False)
    _pack: Invoker = field(compare=False)

    def is_of(self, weight: Any) -> bool:
        """Whether a weight is so itself."""
        return False

    def made(self, weight: Any) -> Any:
        """The packed filters of a weight: (bytes,) of torch.uint8."""
        packed = torch.empty(self.bytes, dtype=torch.uint8, device=weight.device)
        self.write(packed, weight)
        return packed

    def write(self, copy: Any, weight: Any) -> None:
        """Pack the filters of a weight, (k, c/groups, *filter), of any dtype and memory order.

        Raises:
            LaunchError: it failed to start.
        """
        invoker, w = self._pack, self._pack.problem.w
        read = dense(weight.detach().to(torch_dtype(w.dtype)), w.layout)
        read = read.clone() if read.data_ptr() % invoker.alignment_bytes else read
        workspace = torch.empty(invoker.workspace_bytes, dtype=torch.uint8, device=weight.device)
        place = torch.Tensor.data_ptr if weight.is_cuda else host_array
        stream = stream_reader()(weight.get_device()) if weight.is_cuda else 0
        invoker.run(bases_of(invoker.problem, {"w": place(read), "y": place(copy)}, place(workspace)), stream)


_known: WeakKeyDictionary[Handle, dict[str, PackedFilters | None]] = WeakKeyDictionary()
"""By handle and solution."""
_compiling: set[str] = set()
"""Solutions whose kernels for packed filters are being compiled."""


def packed_filters(solution: Solution, device: Any, flags: Flags, planner: Planner) -> PackedFilters | None:
    """How a solution's filters are packed on a PyTorch device; None where no step depends on them alone.

    Raises:
        Unserved: the kernels for that are being compiled.
    """
    handle, waits = planner.handle_of(device), planner.settings.waits(flags)
    return of_solution(f"{solution.problem.flattened.network_config} {solution.id}", handle, waits=waits)


def of_solution(solution: str, handle: Handle, *, waits: bool = True) -> PackedFilters | None:
    """The same of a solution that is named by its problem and id.

    Args:
        waits: for kernels to be compiled.
    """
    known = _known.setdefault(handle, {})
    if solution in _compiling and not waits:
        raise Unserved("the kernels of packed filters are being compiled")
    if solution not in known:
        try:
            known[solution] = _made(solution, handle, waits=waits)
        except Unserved:
            raise
        except BaseException as error:  # a solver's own code may raise anything; the whole solution does without
            raise_if_interrupted(error)
            logger.warning("filters are not packed for %s: %s", solution, described(error))
            known[solution] = None
    return known[solution]


def _made(solution: str, handle: Handle, *, waits: bool) -> PackedFilters | None:
    network_config, _, name = solution.partition(" ")
    solver_id, _, json = name.partition(":")
    problem, config = ProblemDescription.from_network_config(network_config), Config.from_json(json)
    solver = handle.registry.named(solver_id)
    packing = solver.packing(problem, handle.device, config)
    if packing is None:
        return None
    pending = None if waits else handle.background.begin((*packing.pack.kernels, *packing.run.kernels))
    if pending is not None:
        _compiling.add(solution)
        pending.when_done(lambda: _compiling.discard(solution))
        raise Unserved("the kernels of packed filters are being compiled")
    pack, run = (
        stay(make_invoker(problem, handle.device, solver, config, handle.compiler, part))
        for part in (packing.pack, packing.run)
    )
    return PackedFilters(f"{problem.w.dtype} {packing.form or solution}", solution, packing.bytes, run, pack)
