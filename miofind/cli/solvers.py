"""`miofind solvers`: what there is, and what serves a problem."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import click

from miofind.cli.options import (
    DRIVER_LINE,
    arch_option,
    device_option,
    example,
    exclude_option,
    json_option,
    only_option,
)
from miofind.cli.output import Sheet, print_json, print_text
from miofind.cli.problems import optional_problem_argument, problem_json, problems_of
from miofind.cli.session import verbose_option
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.driver.line import driver_line
from miofind.errors import MiofindError
from miofind.options import FindOptions
from miofind.solver.solver import Solver
from miofind.solver.solver import solvers as registered
from miofind.solver.steps import Config, config_text

_MOST_COUNTED = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Service:
    """What a solver has for a problem: a reason against it, else its configurations."""

    solver: Solver
    reason: str = ""
    configs: int = 0
    defaults: tuple[Config, ...] = ()


@click.command(
    context_settings=DRIVER_LINE,
    epilog=example(
        "miofind solvers", "miofind solvers convfp16 -n 32 -c 64 -H 56 -W 56 -k 64 -y 3 -x 3 -F 1 --arch 90a"
    ),
)
@optional_problem_argument
@only_option
@exclude_option
@device_option
@arch_option
@json_option
@verbose_option
def solvers(
    line: tuple[str, ...],
    only: tuple[str, ...],
    exclude: tuple[str, ...],
    device: Device,
    archs: tuple[Device, ...],
    as_json: bool,
) -> None:
    """List the solvers, or which serve PROBLEM.

    With PROBLEM, it says for each solver how many configurations it has for that, or why it does not serve it.
    """
    chosen = FindOptions(only=only, exclude=exclude)
    listed = [solver for solver in registered().values() if chosen.allows(solver)]
    if not line:
        _list(listed, as_json)
        return
    problems = problems_of(line)
    pairs = [(where, problem) for where in archs or (device,) for problem in problems]
    found = [(where, problem, [_service(solver, problem, where) for solver in listed]) for where, problem in pairs]
    if as_json:
        print_json({"problems": [_json(*item) for item in found]})
        return
    for item in found:
        _show(*item)


def _service(solver: Solver, problem: ProblemDescription, device: Device) -> _Service:
    try:
        applicability = solver.applicability(problem, device)
        if not applicability:
            return _Service(solver=solver, reason=applicability.reason)
        defaults = solver.default_configs(problem, device)
        configs = sum(1 for _ in itertools.islice(solver.configs(problem, device), _MOST_COUNTED))
    except MiofindError as error:
        return _Service(solver=solver, reason=f"{type(error).__name__}: {error}")
    return _Service(solver=solver, configs=max(configs, len(defaults)), defaults=defaults)


def _list(listed: list[Solver], as_json: bool) -> None:
    if as_json:
        print_json({"solvers": [_solver_json(solver) for solver in listed]})
        return
    made = Sheet("", ("solver", "version", "algorithm", "library", "place", "least sm", "dtypes", "notes"))
    for solver in listed:
        values = _solver_json(solver)
        notes = [name for name in ("is_dynamic", "is_last_resort") if values[name]]
        made.add(
            solver.id,
            str(solver.version),
            solver.algorithm.value,
            solver.library.value,
            _words(values["places"]),
            _least_sm(solver),
            _words(values["dtypes"]),
            ", ".join(note.removeprefix("is_").replace("_", " ") for note in notes),
        )
    made.print()
    print_text(f"{len(listed)} solvers; name a problem to see which serve it")


def _least_sm(solver: Solver) -> str:
    archs = sorted({arch for key in solver.keys for arch in key.archs})
    return ", ".join(archs) if archs else str(min(key.min_sm for key in solver.keys) or "-")


def _words(names: object) -> str:
    return ", ".join(map(str, names)) if isinstance(names, list) else ""


def _solver_json(solver: Solver) -> dict[str, object]:
    return {
        "id": solver.id,
        "version": solver.version,
        "algorithm": solver.algorithm.value,
        "library": solver.library.value,
        "places": sorted({key.place.value for key in solver.keys}),
        "dtypes": sorted({dtype.value for key in solver.keys for dtype in key.dtypes}),
        "layouts": sorted({layout.value for key in solver.keys for layout in key.layouts}),
        "min_sm": min(key.min_sm for key in solver.keys),
        "is_dynamic": solver.is_dynamic,
        "is_last_resort": solver.is_last_resort,
        "parameters": {name: list(values) for name, values in solver.parameters.items()},
    }


def _show(device: Device, problem: ProblemDescription, services: list[_Service]) -> None:
    made = Sheet(
        f"\n{driver_line(problem)}  on {device.name}",
        ("solver", "library", "configs", "defaults, or why not"),
        long=("defaults, or why not",),
    )
    for service in sorted(services, key=lambda s: bool(s.reason)):
        solver = service.solver
        count = f"{service.configs}{'+' if service.configs >= _MOST_COUNTED else ''}"
        made.add(
            solver.id,
            solver.library.value,
            "-" if service.reason else count,
            service.reason or [config_text(config) or "(no parameters)" for config in service.defaults],
            style="dim" if service.reason else "",
        )
    made.print()
    print_text(f"{sum(not s.reason for s in services)} of {len(services)} solvers serve it")


def _json(device: Device, problem: ProblemDescription, services: list[_Service]) -> dict[str, object]:
    return problem_json(problem) | {
        "device": device.identity,
        "solvers": [
            {
                "id": service.solver.id,
                "applicable": not service.reason,
                "reason": service.reason,
                "configs": service.configs,
                "defaults": [dict(config) for config in service.defaults],
            }
            for service in services
        ],
    }
