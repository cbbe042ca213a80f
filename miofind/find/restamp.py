"""Carries rows over a change of sources that changes no machine code: what was measured then is what runs today.

Each release says of its rows what they launch (`codes`), and the next one compares that with what it launches itself
(`restamped`): instructions, constants and resources of each kernel, grids, blocks and arguments, library calls, the
workspace, and the packed form. Names are left out. Proved row by row; a row of which anything differs stays behind.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace

from miofind.compiler import Compiler, identity, kernel_hash, machine_code
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device, Place
from miofind.errors import CompileError, InvalidOptionError, MiofindError
from miofind.find.lookup.validity import solver_hash
from miofind.find.row_check import device_of
from miofind.finddb import History, ProblemKey, Row, Store, without_solvers
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solver.steps import Argument, Config, ConvSolution, CudnnStep, HostStep, KernelStep
from miofind.solver.structs import Struct

_BATCH = 256
# What older releases' steps have not; left out where a step has nothing there, so that it is told as they tell it.
_OF_FUSED_STEPS = ("fused", "epilogue")


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """What a row of a FindDB launches in one release.

    Attributes:
        device, network_config, solver_id, config: which row.
        solver_version, source_hash, kernel_hash: of the release.
        code: hash of all that is launched; 64 hexadecimal digits.
    """

    device: str
    network_config: str
    solver_id: str
    config: str
    solver_version: int
    source_hash: str
    kernel_hash: str
    code: str

    @property
    def name(self) -> tuple[str, str, str, str]:
        """Which row it is of."""
        return self.device, self.network_config, self.solver_id, self.config


@dataclass(slots=True)
class Restamped:
    """What became of the rows of a FindDB.

    Attributes:
        rows: carried over.
        unknown: of which the other release said nothing, or which it would not have run.
        different: whose code is another today, or which their solvers refuse.
    """

    rows: int = 0
    unknown: int = 0
    different: int = 0


@dataclass(frozen=True, slots=True)
class _ConfiguredSolver:
    """A configuration with the parts of what this release makes of it: the solution, and its packed form's."""

    key: ProblemKey
    solver: Solver
    config: str
    device: Device
    parts: tuple[ConvSolution, ...]
    fused: bool


def codes(store: Store, compiler: Compiler) -> Iterator[Code]:
    """What this release launches for each usable row of a GPU that it can make something of, a configuration once.

    Raises:
        MissingLibraryError: nothing can be compiled here.
    """
    rows = ((key, row) for key, row in store.rows() if row.usable)
    named = dict.fromkeys((key, row.solver_id, row.config) for key, row in rows)
    asked = (made for name in named if (made := _asked(*name)) is not None)
    while batch := list(itertools.islice(asked, _BATCH)):
        yield from _codes(batch, compiler)


def _asked(key: ProblemKey, solver_id: str, config: str) -> _ConfiguredSolver | None:
    device, solver = device_of(key.device), Registry.default().get(solver_id)
    if device is None or device.place is Place.CPU or solver is None:
        return None
    try:
        problem, values = ProblemDescription.from_network_config(key.network_config), Config.from_json(config)
        if not solver.applicability(problem, device):
            return None
        solver.check_config(problem, device, values)
        packing = solver.packing(problem, device, values)
        parts = (solver.solution(problem, device, values), *((packing.pack, packing.run) if packing else ()))
    except MiofindError:
        return None
    return _ConfiguredSolver(key, solver, config, device, parts, bool(problem.epilogue))


def _codes(batch: list[_ConfiguredSolver], compiler: Compiler) -> Iterator[Code]:
    kernels: dict[tuple[str, object, str], str] = {}
    for arch in {asked.device.arch for asked in batch}:
        steps = [s for a in batch if a.device.arch == arch for part in a.parts for s in part.kernels]
        once = {(identity(step), step.entry): step for step in steps}
        for step, binary in compiler.build_all(once.values(), arch):
            if not isinstance(binary, CompileError):
                kernels[arch, identity(step), step.entry] = machine_code(binary.cubin, step.entry)
    for asked in batch:
        try:
            content = [_content(part, asked.device.arch, kernels) for part in asked.parts]
        except KeyError:  # a kernel of it does not compile
            continue
        yield Code(
            device=asked.key.device,
            network_config=asked.key.network_config,
            solver_id=asked.solver.id,
            config=asked.config,
            solver_version=asked.solver.version,
            source_hash=solver_hash(asked.solver, fused=asked.fused),
            kernel_hash=kernel_hash(asked.parts[0]),
            code=hashlib.sha256(repr(content).encode()).hexdigest(),
        )


def _content(part: ConvSolution, arch: str, kernels: Mapping[tuple[str, object, str], str]) -> list[object]:
    """All that a solution launches, without names: a region of the workspace goes by its position."""
    regions = {region.name: f"region {number}" for number, region in enumerate(part.workspace.regions)}
    steps: list[object] = []
    for step in part.steps:
        if isinstance(step, KernelStep):
            code = kernels[arch, identity(step), step.entry]
            arguments = [list(told) for argument in step.on_buffers(regions).args for told in _told(argument)]
            steps.append([code, step.grid, step.block, step.shared_bytes, step.pdl, arguments])
        else:
            placed = step if isinstance(step, CudnnStep | HostStep) else step.on_buffers(regions)
            named = zip(fields(placed), astuple(placed), strict=True)
            told = [value for each, value in named if value or each.name not in _OF_FUSED_STEPS]
            values = [regions.get(value, value) if isinstance(value, str) else value for value in told]
            steps.append([type(step).__name__, *values])
    return [steps, [region.bytes for region in part.workspace.regions], part.deterministic]


def _told(argument: Argument) -> Iterator[Sequence[object]]:
    """An argument; of a structure its numbers, since those may have travelled one by one before."""
    if isinstance(argument, Struct):
        yield from (("Scalar", kind, value) for kind, value in argument.numbers)
    else:
        yield [type(argument).__name__, *astuple(argument)]


def write_codes(found: Iterable[Code]) -> Iterator[str]:
    """A line of JSON for each, as `read_codes` takes them."""
    return (json.dumps(asdict(code), separators=(",", ":")) for code in found)


def read_codes(lines: Iterable[str], name: str) -> dict[tuple[str, str, str, str], Code]:
    """What another release wrote, by the names of its rows.

    Args:
        name: of the file, for messages.

    Raises:
        InvalidOptionError: a line is none that `write_codes` wrote.
    """
    found: dict[tuple[str, str, str, str], Code] = {}
    for number, line in enumerate(lines, start=1):
        try:
            written = json.loads(line)
            of_line = [Code(**each) for each in (written if isinstance(written, list) else [written])]
            found |= {code.name: code for code in of_line}
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidOptionError(f"{name}, line {number} is none of `miofind db code`: {error}") from error
    return found


def restamped(
    store: Store, other: Mapping[tuple[str, str, str, str], Code], compiler: Compiler, told: Restamped
) -> Iterator[History]:
    """The histories of a FindDB with the rows of which today's code is the other release's, under today's hashes.

    Args:
        store: rows as the other release wrote them; failures stay behind, and those of the CPU place.
        other: what that release says of them.
        told: is filled in.
    """
    today = {code.name: code for code in codes(store, compiler)}
    for history in store.histories():
        key = ProblemKey(device=history.device, network_config=history.network_config)
        rows = tuple(row for each in history.rows if (row := _row(key, each, other, today, told)) is not None)
        if rows:
            kept = {row.candidate for row in rows}
            lost = {row.solver_id for row in history.rows if row.candidate not in kept}
            scopes = tuple(without_solvers(history.scopes, lost))
            verdicts = tuple(v for v in history.verdicts if {v.winner, *v.ties} <= kept)
            yield replace(history, rows=rows, scopes=scopes, verdicts=verdicts)


def _row(
    key: ProblemKey,
    row: Row,
    other: Mapping[tuple[str, str, str, str], Code],
    today: Mapping[tuple[str, str, str, str], Code],
    told: Restamped,
) -> Row | None:
    """A row under today's hashes; None where it stays behind."""
    name = (key.device, key.network_config, row.solver_id, row.config)
    then, now = other.get(name), today.get(name)
    if then is None or (then.solver_version, then.source_hash, then.kernel_hash) != (
        row.solver_version,
        row.source_hash,
        row.kernel_hash,
    ):
        told.unknown += 1
        return None
    if now is None or (now.solver_version, now.code) != (then.solver_version, then.code):
        told.different += 1
        return None
    told.rows += 1
    return replace(row, source_hash=now.source_hash, kernel_hash=now.kernel_hash, id="")
