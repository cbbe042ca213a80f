"""Carries rows over a change of sources that changes no machine code: what was measured then is what runs today.

Each release says of its rows what they launch (`codes`), and the next one compares that with what it launches itself
(`restamped`): instructions, constants and resources of each kernel, grids, blocks and arguments, library calls, the
workspace, and the packed form. Names are left out. Proved row by row; a row of which anything differs stays behind.
Usable rows of a GPU under today's hashes hold as they are: nothing is compiled for them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace

from miofind.compiler import Compiler, kernel_hash, machine_code
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
_Name = tuple[str, str, str, str]
_Hashes = tuple[int, str, str]
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
    def name(self) -> _Name:
        """Which row it is of."""
        return self.device, self.network_config, self.solver_id, self.config

    @property
    def hashes(self) -> _Hashes:
        """What says of which release a row is."""
        return self.solver_version, self.source_hash, self.kernel_hash


@dataclass(slots=True)
class Restamped:
    """What became of the rows of a FindDB.

    Attributes:
        rows: carried over.
        valid: under today's hashes already.
        unknown: of which the other release said nothing, or which it would not have run.
        different: whose code is another today, or which their solvers refuse.
    """

    rows: int = 0
    valid: int = 0
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

    @property
    def name(self) -> _Name:
        """Which row it is of."""
        return self.key.device, self.key.network_config, self.solver.id, self.config

    @property
    def hashes(self) -> _Hashes:
        """What says of a row that it is of this release."""
        return self.solver.version, solver_hash(self.solver, fused=self.fused), kernel_hash(self.parts[0])


def codes(store: Store, compiler: Compiler, solvers: Collection[str] | None = None) -> Iterator[Code]:
    """What this release launches for each usable row of a GPU that it can make something of, a configuration once.

    Args:
        solvers: ids of those whose rows are wanted; None for all.

    Raises:
        MissingLibraryError: nothing can be compiled here.
    """
    return _codes_of(_configured(store, solvers), compiler)


def _configured(store: Store, solvers: Collection[str] | None = None) -> Iterator[_ConfiguredSolver]:
    """What this release makes of the usable rows, a configuration once."""
    rows = ((key, row) for key, row in store.rows() if row.usable and (solvers is None or row.solver_id in solvers))
    named = dict.fromkeys((key, row.solver_id, row.config) for key, row in rows)
    return (made for name in named if (made := _asked(*name)) is not None)


def _codes_of(asked: Iterator[_ConfiguredSolver], compiler: Compiler) -> Iterator[Code]:
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
        once = {(step.binary, step.entry): step for step in steps}
        for step, binary in compiler.build_all(once.values(), arch):
            if not isinstance(binary, CompileError):
                kernels[arch, step.binary, step.entry] = machine_code(binary.cubin, step.entry)
    for asked in batch:
        version, sources, kernels_hash = asked.hashes
        try:
            content = [_content(part, asked.device.arch, kernels) for part in asked.parts]
        except KeyError:  # a kernel of it does not compile
            continue
        yield Code(
            device=asked.key.device,
            network_config=asked.key.network_config,
            solver_id=asked.solver.id,
            config=asked.config,
            solver_version=version,
            source_hash=sources,
            kernel_hash=kernels_hash,
            code=hashlib.sha256(repr(content).encode()).hexdigest(),
        )


def _content(part: ConvSolution, arch: str, kernels: Mapping[tuple[str, object, str], str]) -> list[object]:
    """All that a solution launches, without names: a region of the workspace goes by its position."""
    regions = {region.name: f"region {number}" for number, region in enumerate(part.workspace.regions)}
    steps: list[object] = []
    for step in part.steps:
        if isinstance(step, KernelStep):
            code = kernels[arch, step.binary, step.entry]
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


def read_codes(lines: Iterable[str], name: str) -> dict[_Name, Code]:
    """What another release wrote, by the names of its rows.

    Args:
        name: of the file, for messages.

    Raises:
        InvalidOptionError: a line is none that `write_codes` wrote.
    """
    found: dict[_Name, Code] = {}
    for number, line in enumerate(lines, start=1):
        try:
            written = json.loads(line)
            of_line = [Code(**each) for each in (written if isinstance(written, list) else [written])]
            found |= {code.name: code for code in of_line}
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidOptionError(f"{name}, line {number} is none of `miofind db code`: {error}") from error
    return found


def restamped(store: Store, other: Mapping[_Name, Code], compiler: Compiler, told: Restamped) -> Iterator[History]:
    """The histories of a FindDB with the rows of which today's code is the other release's, under today's hashes.

    Args:
        store: rows as the other release wrote them, or this one; failures stay behind, and those of the CPU place, and
            times of other libraries come along.
        other: what that release says of them.
        told: is filled in.
    """
    hashes = {made.name: made.hashes for made in _configured(store)}
    moved = (made for made in _configured(store) if made.name in other and other[made.name].hashes != made.hashes)
    today = {code.name: code for code in _codes_of(moved, compiler)}
    for history in store.histories():
        key = (history.device, history.network_config)
        found = (_row((*key, each.solver_id, each.config), each, other, hashes, today, told) for each in history.rows)
        rows = tuple(row for row in found if row is not None)
        if rows:
            kept = {row.candidate for row in rows}
            lost = {row.solver_id for row in history.rows if row.candidate not in kept}
            scopes = tuple(without_solvers(history.scopes, lost))
            behind = {row.candidate for row in history.rows} - kept
            verdicts = tuple(v for v in history.verdicts if v.winner in kept and not behind.intersection(v.ties))
            yield replace(history, rows=rows, scopes=scopes, verdicts=verdicts)


def _row(
    name: _Name,
    row: Row,
    other: Mapping[_Name, Code],
    hashes: Mapping[_Name, _Hashes],
    today: Mapping[_Name, Code],
    told: Restamped,
) -> Row | None:
    """A row under today's hashes, or a rival's as it is; None where it stays behind."""
    if row.is_rival:
        return row
    written = (row.solver_version, row.source_hash, row.kernel_hash)
    if hashes.get(name) == written:
        told.valid += 1
        return row
    then, now = other.get(name), today.get(name)
    if then is None or then.hashes != written:
        told.unknown += 1
        return None
    if now is None or (now.solver_version, now.code) != (then.solver_version, then.code):
        told.different += 1
        return None
    told.rows += 1
    return replace(row, source_hash=now.source_hash, kernel_hash=now.kernel_hash, id="")
