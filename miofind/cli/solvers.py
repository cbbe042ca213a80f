"""`miofind solvers`: the registered solvers, and those that serve a problem."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import dataclass, replace

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
from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device, Place
from miofind.driver.line import driver_line
from miofind.errors import described, raise_if_interrupted
from miofind.options import FindOptions
from miofind.runtime.refusals import applicability_of
from miofind.solver.registry import Registry, composed, composed_id
from miofind.solver.solver import Solver
from miofind.solver.steps import Config, config_text
from miofind.suites.short_text import SHORT_DIRECTIONS

_MOST_COUNTED = 10_000
_COLUMNS = ("solver", "runs on", "directions", "layouts", "dims", "algorithm", "library", "dtypes", "about")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Service:
    """A solver's refusal of a problem, or its configurations for it.

    Attributes:
        composes: it serves a fused problem with a pass behind its bare form.
    """

    solver: Solver
    reason: str = ""
    configs: int = 0
    defaults: tuple[Config, ...] = ()
    composes: bool = False


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
    """List the solvers, or those that serve PROBLEM.

    Without PROBLEM, the list says what each solver serves: place, directions, layouts, spatial dimensions and dtypes.
    With PROBLEM, written as for `miofind find`, it has the number of configurations and the defaults of each solver, or
    why the solver refuses the problem.
    """
    chosen = FindOptions(only=only, exclude=exclude)
    listed = [solver for solver in Registry.default().values() if chosen.allows(solver)]
    if not line:
        _list(listed, as_json)
        return
    problems = problems_of(line)
    pairs = [(where, problem) for where in archs or (device,) for problem in problems]
    found = [(where, p, [_service(solver, p.flattened, where) for solver in listed]) for where, p in pairs]
    if as_json:
        print_json({"problems": [_json(*item) for item in found]})
        return
    for item in found:
        _show(*item)


def _service(solver: Solver, problem: ProblemDescription, device: Device) -> _Service:
    composes = bool(problem.epilogue and applicability_of(composed(solver), problem, device))
    return replace(_own_service(solver, problem, device), composes=composes)


def _own_service(solver: Solver, problem: ProblemDescription, device: Device) -> _Service:
    try:
        applicability = solver.applicability(problem, device)
        if not applicability:
            return _Service(solver=solver, reason=applicability.reason)
        defaults = solver.default_configs(problem, device)
        configs = sum(1 for _ in itertools.islice(solver.configs(problem, device), _MOST_COUNTED))
    except BaseException as error:  # a solver's own code may raise anything
        raise_if_interrupted(error)
        return _Service(solver=solver, reason=f"{type(error).__name__}: {described(error, str)}")
    return _Service(solver=solver, configs=max(configs, len(defaults)), defaults=defaults)


def _list(listed: list[Solver], as_json: bool) -> None:
    if as_json:
        print_json({"solvers": [_solver_json(solver) for solver in listed]})
        return
    made = Sheet("", _COLUMNS, fold=("about", "dtypes"), spare=("algorithm", "library"))
    for solver in listed:
        made.add(
            solver.id,
            _runs_on(solver),
            " ".join(SHORT_DIRECTIONS[direction] for direction in _directions(solver)),
            " ".join(dict.fromkeys(map(_plain_layout, _layouts(solver)))),
            _ranks(solver),
            solver.algorithm.value,
            solver.library.value,
            " ".join(_dtypes(solver)),
            _about(solver),
        )
    made.print()
    print_text(f"{len(listed)} solvers; name a problem to see which serve it, --json has all that they declare")


def _about(solver: Solver) -> str:
    """The first sentence of a solver's docstring."""
    paragraph = inspect.cleandoc(type(solver).__doc__ or "").partition("\n\n")[0]
    sentence, stop, _ = f"{' '.join(paragraph.split())} ".partition(". ")
    return (sentence + stop).strip()


def _runs_on(solver: Solver) -> str:
    """The CPU place, or the least compute capability or the exact architectures of a GPU."""
    archs = sorted({arch for key in solver.keys for arch in key.archs})
    least = min(key.min_sm for key in solver.keys)
    places = sorted({key.place.value for key in solver.keys})
    return " ".join(f"sm_{arch}" for arch in archs) or (f"sm_{least}" if least else " ".join(places))


def _directions(solver: Solver) -> list[Direction]:
    """The directions that a solver computes, in their order."""
    return [direction for direction in Direction if direction in solver.directions]


def _layouts(solver: Solver) -> list[Layout]:
    served = {layout for key in solver.keys for layout in key.layouts}
    return [layout for layout in Layout if layout in served]


def _dtypes(solver: Solver) -> list[str]:
    served = {dtype for key in solver.keys for dtype in key.every_dtype}
    return [dtype.value for dtype in DataType if dtype in served]


def _plain_layout(layout: Layout) -> str:
    """The layout's form in two spatial dimensions."""
    return Layout.of(2, channels_last=layout.channels_last).value


def _ranks(solver: Solver) -> str:
    """The numbers of spatial dimensions, such as 1-3."""
    ranks = sorted({layout.spatial_dims for layout in _layouts(solver)})
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _solver_json(solver: Solver) -> dict[str, object]:
    return {
        "id": solver.id,
        "about": _about(solver),
        "version": solver.version,
        "algorithm": solver.algorithm.value,
        "library": solver.library.value,
        "places": sorted({key.place.value for key in solver.keys}),
        "directions": [direction.value for direction in _directions(solver)],
        "dtypes": _dtypes(solver),
        "layouts": [layout.value for layout in _layouts(solver)],
        "archs": sorted({arch for key in solver.keys for arch in key.archs}),
        "min_sm": min(key.min_sm for key in solver.keys),
        "is_dynamic": solver.is_dynamic,
        "is_last_resort": solver.is_last_resort,
        "parameters": {name: list(values) for name, values in solver.parameters.items()},
    }


def _show(device: Device, problem: ProblemDescription, services: list[_Service]) -> None:
    serving = [service for service in services if not service.reason]
    elsewhere = [service for service in services if all(key.place is not device.place for key in service.solver.keys)]
    refusing = [service for service in services if service.reason and service not in elsewhere]
    title = f"\n{driver_line(problem)}  on {device.name}"
    made = Sheet(title, ("solver", "library", "configs", "defaults"), fold=("defaults",))
    for service in serving:
        made.add(
            service.solver.id,
            service.solver.library.value,
            f"{service.configs}{'+' if service.configs >= _MOST_COUNTED else ''}",
            [config_text(config) or "(no parameters)" for config in service.defaults],
        )
    made.print()
    if refusing:
        refusals = Sheet("", ("solver", "library", "no"), fold=("no",))
        for service in refusing:
            refusals.add(service.solver.id, service.solver.library.value, service.reason, style="dim")
        print_text("")
        refusals.print()
    if elsewhere:
        print_text(f"{len(elsewhere)} more {_needs_of_others(device)}")
    print_text(f"{len(serving)} of {len(services)} solvers serve it")
    composing = [service.solver.id for service in services if service.composes]
    if composing:
        print_text(f"{len(composing)} serve it with a pass behind their bare form, such as {composed_id(composing[0])}")


def _needs_of_others(device: Device) -> str:
    """What solvers that run on none of this kind of device need, and which flag asks for it."""
    if device.place is Place.CPU:
        return "need a GPU: --arch 90a asks for one"
    return "need the CPU place: --device cpu asks for it"


def _json(device: Device, problem: ProblemDescription, services: list[_Service]) -> dict[str, object]:
    return problem_json(problem) | {
        "device": device.identity,
        "solvers": [
            {
                "id": service.solver.id,
                "applicable": not service.reason,
                "reason": service.reason,
                "composes": service.composes,
                "configs": service.configs,
                "defaults": [dict(config) for config in service.defaults],
            }
            for service in services
        ],
    }
