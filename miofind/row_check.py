"""Checks one row of a FindDB against this release: its problem, its solver, its configuration, its workspace.

Rows of another solver version or other sources are void, not wrong: they are counted and left alone.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from miofind.device import Device
from miofind.errors import InvalidConfigError, InvalidProblemError, MiofindError
from miofind.finddb import ProblemKey, Row
from miofind.problem import ProblemDescription
from miofind.records import solver_hash
from miofind.solution import Config
from miofind.solver import Solver, solvers


class RowCheck:
    """A check of rows, for `Store.check`.

    Attributes:
        checked: rows compared with the code.
        void: rows that other versions or sources of a solver wrote.
    """

    def __init__(self) -> None:
        self.checked = 0
        self.void = 0

    def __call__(self, key: ProblemKey, row: Row) -> str | None:
        """What is wrong with a row, None if nothing is."""
        problem, device = _problem(key.network_config), device_of(key.device)
        if isinstance(problem, str):
            return problem
        solver = solvers().get(row.solver_id)
        if solver is None:
            return f"solver {row.solver_id!r} is not registered"
        if row.solver_version != solver.version or row.source_hash != solver_hash(solver):
            self.void += 1
            return None
        self.checked += 1
        return _finding(solver, problem, device, row)


def _finding(solver: Solver, problem: ProblemDescription, device: Device | None, row: Row) -> str | None:
    if (row.algorithm, row.library) != (solver.algorithm.value, solver.library.value):
        return f"it says {row.algorithm}, {row.library}; {solver.id} is {solver.algorithm}, {solver.library}"
    if device is None or not row.usable or device.library_version(solver.library) is None:
        return None
    config = Config.from_json(row.config)
    try:
        applicability = solver.applicability(problem, device)
        if not applicability:
            return f"{solver.id} does not serve the problem: {applicability.reason}"
        solver.check_config(problem, device, config)
        workspace_bytes = solver.workspace_bytes(problem, device, config)
    except InvalidConfigError as error:
        return str(error)
    except MiofindError:  # a library's plans cannot be asked for here
        return None
    if workspace_bytes != row.workspace_bytes:
        return f"it says {row.workspace_bytes} bytes of workspace, {solver.id} needs {workspace_bytes}"
    return None


@functools.lru_cache(maxsize=1024)
def _problem(network_config: str) -> ProblemDescription | str:
    try:
        return ProblemDescription.from_network_config(network_config)
    except InvalidProblemError as error:
        return str(error)


@functools.cache
def device_of(identity: str) -> Device | None:
    """A device with that identity: the one here, else what its name and compute capability tell; None if unreadable."""
    for device in (Device.cpu(), Device.default()):
        if device.identity == identity:
            return device
    name, *numbers = identity.split("|")
    try:
        sm_count, capability, mig_profile = int(numbers[0]), numbers[1], numbers[2]
        sm = round(10 * float(capability))
        if sm == 0:
            return replace(Device.cpu(), name=name, sm_count=sm_count)
        return replace(Device.virtual(str(sm)), name=name, sm_count=sm_count, mig_profile=mig_profile)
    except (IndexError, ValueError, MiofindError):
        return None
