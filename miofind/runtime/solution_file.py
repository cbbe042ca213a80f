"""Solutions on disk: JSON with the kernels' binaries attached and hashed, never pickle.

A loaded solution runs with no look-up, find or compilation; one that a library backs rebuilds its plan. Everything in a
file is checked before use: a configuration against its solver's schema, binaries against their hashes. The hashes find
damage, not malice: a file is code, and its binaries run with the rights of who loads it. They stay with its solution.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from miofind.compiler import Compiler, kernel_hash
from miofind.core.problem import ProblemDescription
from miofind.device.device import Place, device_text
from miofind.errors import (
    InvalidConfigError,
    InvalidProblemError,
    LaunchError,
    SolutionFileError,
    UnknownSolverError,
    described,
    raise_if_interrupted,
)
from miofind.files import read_bounded, replacing
from miofind.finddb import is_of_database
from miofind.runtime.handle import Handle, check_kernels, check_serves, default_handle, no_handle
from miofind.runtime.solution import Solution, SolutionList, Source, alone
from miofind.solver.solver import Solver
from miofind.solver.steps import Config, ConvSolution, KernelStep

FORMAT = "miofind-solution"
VERSION = 1
MAX_FILE_BYTES = 64 << 20
MAX_VALUES = 10_000
"""In a file: it has a dozen, and two a binary. Of text that is all brackets, JSON makes thirty times its size."""

_FIELDS = {
    "network_config": str,
    "solver_id": str,
    "solver_version": int,
    "config": dict,
    "device": str,
    "arch": str,
    "time_ms": float,
    "workspace_bytes": int,
    "deterministic": bool,
    "kernel_hash": str,
    "binaries": list,
}
_LATE_DEFAULTS = {"samples": 0, "cut_off": False, "contended": False}
"""Of fields that the first files do not have."""


def save_solution(solution: Solution, path: Path) -> None:
    """Write a solution and its binaries; the file appears whole or not at all.

    Raises:
        SolutionFileError: the file cannot be written, or the solution is of another release than its solver.
        CompileError: a kernel cannot be built.
    """
    solver = solution.solution_list.handle.registry.named(solution.solver_id)
    try:
        computed = solution.problem.flattened
        check_serves(solver, computed, solution.device)
        solver.check_config(computed, solution.device, solution.config)
        steps = solver.solution(computed, solution.device, solution.config)
        check_kernels(steps, solution.kernel_hash, solution.id)
    except (LaunchError, InvalidConfigError) as error:
        raise SolutionFileError(f"{str(path)!r} is not written: {error}") from error
    compiler, arch = solution.solution_list.handle.compiler, solution.device.arch
    payload = {
        "network_config": solution.problem.network_config,
        "solver_id": solution.solver_id,
        "solver_version": solver.version,
        "config": dict(solution.config),
        "device": solution.device.identity,
        "arch": arch,
        "time_ms": float(solution.time_ms),
        "source": solution.source.value,
        "workspace_bytes": solution.workspace_bytes,
        "deterministic": solution.deterministic,
        "max_error": None if solution.max_error is None else float(solution.max_error),
        "kernel_hash": kernel_hash(steps),
        "samples": solution.samples,
        "cut_off": solution.cut_off,
        "contended": solution.contended,
        "binaries": [_packed(compiler.build(step, arch).cubin) for step in _one_a_kernel(steps.kernels)],
    }
    document = {"format": FORMAT, "version": VERSION, "sha256": _digest(payload), "solution": payload}
    _write(path, json.dumps(document, indent=1))


def load_solution(path: Path, handle: Handle | None = None) -> Solution:
    """A saved solution on a handle's device; load it from sources that you would run a program from.

    Raises:
        SolutionFileError: the file is missing, damaged, of another architecture, version or sources.
    """
    handle = default_handle() if handle is None else handle
    if not isinstance(handle, Handle):
        raise no_handle(handle)
    payload = _read(path)
    device = handle.device
    if payload["arch"] != device.arch:
        wanted = f"sm_{payload['arch']}" if payload["arch"] else "the CPU place"
        here = f"sm_{device.arch}" if device.arch else "the CPU place"
        raise SolutionFileError(
            f"{path} was saved for {wanted} ({device_text(payload['device'])}), this device is {here}: find here"
        )
    solver, problem, config, steps = _planned_here(path, payload, handle)
    if solver.version != payload["solver_version"] or kernel_hash(steps) != payload["kernel_hash"]:
        raise SolutionFileError(f"{path} was saved with other sources of {solver.id} than this release has: find again")
    if device.place is Place.CUDA:
        handle = _own_handle(handle)
        _adopt(path, handle, steps.kernels, payload["binaries"])
    solution = Solution(
        problem=problem,
        device=device,
        solver_id=solver.id,
        algorithm=solver.algorithm,
        library=solver.library,
        config=config,
        time_ms=payload["time_ms"],
        workspace_bytes=steps.workspace.bytes,
        deterministic=steps.deterministic,
        max_error=payload.get("max_error"),
        source=Source(payload.get("source", Source.MEASURED)),  # the first files do not say
        kernel_hash=payload["kernel_hash"],
        **{name: payload.get(name, default) for name, default in _LATE_DEFAULTS.items()},
        solution_list=SolutionList(handle),
    )
    return alone(solution)


class _PlannedHere(NamedTuple):
    """What this release makes of a file's problem, solver and configuration."""

    solver: Solver
    problem: ProblemDescription
    config: Config
    steps: ConvSolution


def _planned_here(path: Path, payload: Mapping[str, Any], handle: Handle) -> _PlannedHere:
    """The steps that this release takes for what a file names, on a handle's device.

    Raises:
        SolutionFileError: it has no such problem, solver or configuration, or the solver does not serve it here.
    """
    device = handle.device
    try:
        problem = ProblemDescription.from_network_config(payload["network_config"])
        solver = handle.registry.named(payload["solver_id"])
        config = Config(payload["config"])
        computed = problem.flattened
        applicability = solver.applicability(computed, device)
        if not applicability:
            images = f", which is computed as {computed}" if computed is not problem else ""
            reason = f"{applicability.reason}. Find again"
            raise SolutionFileError(f"{path}: {solver.id} does not serve its problem here{images}: {reason}")
        solver.check_config(computed, device, config)
        steps = solver.solution(computed, device, config)
    except SolutionFileError:
        raise
    except (InvalidProblemError, InvalidConfigError, UnknownSolverError) as error:
        raise SolutionFileError(f"{path} cannot be used by this release: {error}") from error
    except BaseException as error:  # a solver's own code may raise anything
        raise_if_interrupted(error)
        told = f"{path} cannot be used by this release: its solver fails with {described(error)}"
        raise SolutionFileError(told) from error
    return _PlannedHere(solver, problem, config, steps)


def _own_handle(handle: Handle) -> Handle:
    """A handle for one solution: binaries from elsewhere answer for no other's kernels, and are saved with no other."""
    return Handle(handle.device, compiler=Compiler(handle.compiler.cache), registry=handle.registry)


def _adopt(path: Path, handle: Handle, kernels: tuple[KernelStep, ...], packed: list[Any]) -> None:
    steps = _one_a_kernel(kernels)
    if len(packed) != len(steps):
        steps = list(dict.fromkeys(kernels))  # the first files have a binary for every launch
    if len(packed) != len(steps):
        raise SolutionFileError(f"{path} holds {len(packed)} binaries, its solution has {len(steps)} kernels")
    for step, item in zip(steps, packed, strict=True):
        handle.compiler.adopt(step, handle.device.arch, _unpacked(path, item))


def _one_a_kernel(kernels: tuple[KernelStep, ...]) -> list[KernelStep]:
    """The first launch of each kernel: others differ in grid and arguments alone, and may be a thousand."""
    firsts: dict[object, KernelStep] = {}
    for step in kernels:
        firsts.setdefault((step.binary, step.entry), step)
    return list(firsts.values())


def _packed(cubin: bytes) -> dict[str, str]:
    return {"sha256": hashlib.sha256(cubin).hexdigest(), "cubin": base64.b64encode(cubin).decode()}


def _unpacked(path: Path, item: Any) -> bytes:
    try:
        cubin = base64.b64decode(item["cubin"], validate=True)
        expected = item["sha256"]
    except (TypeError, KeyError, ValueError) as error:
        raise SolutionFileError(f"{path} is damaged: a binary cannot be read ({error})") from error
    if hashlib.sha256(cubin).hexdigest() != expected:
        raise SolutionFileError(f"{path} is damaged: a binary does not match its hash")
    return cubin


def _digest(payload: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(payload, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _write(path: Path, text: str) -> None:
    try:
        if is_of_database(path):
            raise SolutionFileError(f"{str(path)!r} is a database or its log, which would be lost: name another file")
        with replacing(path) as file:
            file.write(text)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SolutionFileError(f"{str(path)!r} cannot be written: {reason}") from error


def _read(path: Path) -> dict[str, Any]:
    """The checked payload of a file."""
    try:
        with path.open("rb") as file:  # what is no regular file has no size, so that the reading is bounded
            content = read_bounded(file, MAX_FILE_BYTES)
        if len(content) > MAX_FILE_BYTES:
            raise SolutionFileError(f"{path} is larger than {MAX_FILE_BYTES} bytes: it is no saved solution")
        if sum(map(content.count, (b",", b"[", b"{"))) > MAX_VALUES:
            raise SolutionFileError(f"{path} has more than {MAX_VALUES} values: it is no saved solution")
        document = json.loads(content.decode("ascii"))  # as json.dumps writes it
    except SolutionFileError:
        raise
    except OSError as error:
        raise SolutionFileError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise SolutionFileError(f"{path} is damaged: it is not JSON ({error})") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise SolutionFileError(f"{path} is no saved solution: its format is not {FORMAT!r}")
    if document.get("version") != VERSION:
        raise SolutionFileError(f"{path} has version {document.get('version')!r}, this release reads {VERSION}")
    payload = document.get("solution")
    if not isinstance(payload, dict):
        raise SolutionFileError(f"{path} is damaged: it holds no solution")
    for name, kind in _FIELDS.items():
        if type(payload.get(name)) is not kind:
            raise SolutionFileError(f"{path} is damaged: {name} is {payload.get(name)!r}, not a {kind.__name__}")
    for name, default in _LATE_DEFAULTS.items():
        if type(payload.get(name, default)) is not type(default):
            raise SolutionFileError(f"{path} is damaged: {name} is {payload[name]!r}, not a {type(default).__name__}")
    if _digest(payload) != document.get("sha256"):
        raise SolutionFileError(f"{path} is damaged: its contents do not match their hash")
    if not (math.isfinite(payload["time_ms"]) and payload["time_ms"] > 0):
        raise SolutionFileError(f"{path} is damaged: time_ms is {payload['time_ms']!r}, not a time")
    if payload.get("source", Source.MEASURED) not in list(Source):
        raise SolutionFileError(f"{path} is damaged: source is {payload['source']!r}, not one of {', '.join(Source)}")
    max_error = payload.get("max_error")
    if max_error is not None and not (isinstance(max_error, float) and math.isfinite(max_error) and max_error >= 0):
        raise SolutionFileError(f"{path} is damaged: max_error is {max_error!r}, not a number of at least 0")
    return payload
