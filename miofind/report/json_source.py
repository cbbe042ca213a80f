"""What `miofind bench --json` and `miofind tune --json` write, as sources of a report; files come from anywhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from miofind.bench.ceilings import Ceilings
from miofind.core.problem import ProblemDescription
from miofind.device.device import IDENTITY
from miofind.errors import InvalidConfigError, InvalidOptionError, InvalidProblemError, UnknownSolverError
from miofind.files import read_bounded
from miofind.report.results import AGAINST_ONE_PASS, AGAINST_TORCH, GAIN, ProblemResult, SourceContent, ratio_of
from miofind.solver.registry import Registry
from miofind.solver.steps import Config, config_text

MAX_BYTES = 256 << 20

_LEAST, _MOST = 1e-30, 1e30
"""Bounds of a figure, wide of all that is measured, so that no quotient of two overflows."""


def read_json(path: Path, name: str) -> SourceContent:
    """The results of a benchmark or a tuning.

    Raises:
        InvalidOptionError: the file cannot be read, or is neither; the message says where it is wrong.
    """
    content = _object(path, name)
    kind, read = _BENCH if isinstance(content.get("rows"), list) else _TUNING
    entries = content.get("rows" if kind == _BENCH[0] else "results")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _refused(name, "it is no FindDB and no JSON of `miofind bench` or `miofind tune`")
    ceilings = _ceilings(content.get("ceilings"), name)
    gpu, results = _text(content.get("gpu")), []
    for number, entry in enumerate(entries, 1):
        fields = _Fields(entry, f"{name}: entry {number}")
        results.append(read(fields, gpu))
    versions = content.get("versions")
    return SourceContent(
        name=name,
        kind=kind,
        results=tuple(results),
        ceilings={} if ceilings is None else {gpu: ceilings},
        versions={str(key): _text(value) for key, value in versions.items()} if isinstance(versions, dict) else {},
    )


class _Fields:
    """The fields of one entry, checked as they are taken."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def check_has(self, name: str) -> None:
        """Do nothing where there is a field of that name, whatever its value."""
        if name not in self.values:
            raise _refused(self.where, f"it has no {name}, so it is of neither `miofind bench` nor `miofind tune`")

    def text(self, name: str) -> str:
        """A text, "" where there is none."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise _refused(self.where, f"{name}={str(value)[:60]!r} is no text")
        return value or ""

    def number(self, name: str) -> float | None:
        """A positive number within bounds, None where there is none."""
        value = self.values.get(name)
        if value is None:
            return None
        if type(value) not in (int, float) or not _LEAST <= value <= _MOST:
            told = f"no positive number from {_LEAST:g} to {_MOST:g}"
            raise _refused(self.where, f"{name}={str(value)[:60]!r} is {told}")
        return float(value)

    def part(self, name: str) -> _Fields | None:
        """An object within, None where there is none."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise _refused(self.where, f"{name}={str(value)[:60]!r} is no object")
        return _Fields(value, f"{self.where}, {name}")

    def problem(self) -> ProblemDescription:
        """The problem that its network_config names."""
        self.check_has("network_config")
        try:
            return ProblemDescription.from_network_config(self.text("network_config"))
        except InvalidProblemError as error:
            raise _refused(self.where, str(error)) from error


def _of_bench(fields: _Fields, gpu: str) -> ProblemResult:
    fields.check_has("time_ms")
    solver_id, _, config = fields.text("solution").partition(":")
    time_ms, message = fields.number("time_ms"), fields.text("message")
    ratios = {AGAINST_TORCH: fields.number("ratio"), AGAINST_ONE_PASS: ratio_of(fields.number("one_pass_ms"), time_ms)}
    return ProblemResult(
        problem=fields.problem(),
        device=gpu,
        layer=" ".join(filter(None, (fields.text("suite"), fields.text("layer")))),
        solver_id=solver_id,
        config=_config_text(config),
        library=_library(solver_id),
        time_ms=time_ms,
        floor_ms=fields.number("floor_ms"),
        ratios={name: ratio for name, ratio in ratios.items() if ratio is not None},
        marks=("failed",) if message else (),
        message=message,
    )


def _of_tuning(fields: _Fields, gpu: str) -> ProblemResult:
    fields.check_has("best")
    best, gain = fields.part("best"), fields.number("gain")
    identity = fields.text("device")
    told = IDENTITY.fullmatch(identity)
    device = gpu or (told["name"] if told is not None else identity)
    config = best.values.get("config") if best is not None else None
    status = fields.text("status")
    return ProblemResult(
        problem=fields.problem(),
        device=device,
        layer=" ".join(filter(None, (fields.text("suite"), fields.text("layer")))),
        solver_id=best.text("solver") if best is not None else "",
        config=config_text(config) if isinstance(config, dict) else "",
        library=best.text("library") if best is not None else "",
        time_ms=best.number("time_ms") if best is not None else None,
        ratios={} if gain is None else {GAIN: gain},
        marks=(status,) if status not in ("", "tuned") else (),
        message=fields.text("message"),
    )


_Read = Callable[[_Fields, str], ProblemResult]
_BENCH: tuple[str, _Read] = ("benchmark", _of_bench)
_TUNING: tuple[str, _Read] = ("tuning", _of_tuning)


def _object(path: Path, name: str) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = read_bounded(file, MAX_BYTES)
    except (OSError, ValueError) as error:
        told = error.strerror if isinstance(error, OSError) else str(error)
        raise _refused(name, f"it cannot be read: {told}") from error
    if len(content) > MAX_BYTES:
        raise _refused(name, f"it has more than {MAX_BYTES >> 20} MiB")
    try:
        value = json.loads(content.decode(), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise _refused(name, f"it is no FindDB, and no JSON: {error}") from error
    if not isinstance(value, dict):
        raise _refused(name, "it is no FindDB and no JSON of `miofind bench` or `miofind tune`")
    return value


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _ceilings(value: object, name: str) -> Ceilings | None:
    """The ceilings that a benchmark measured, None where it tells none."""
    if not isinstance(value, dict):
        return None
    rates = value.get("flops_per_s")
    copy = _Fields(value, f"{name}: ceilings").number("copy_bytes_per_s")
    if copy is None or not isinstance(rates, dict):
        raise _refused(name, "its ceilings have no copy_bytes_per_s or no flops_per_s")
    fields = _Fields(rates, f"{name}: ceilings")
    found = {arithmetic: fields.number(arithmetic) for arithmetic in rates}
    return Ceilings(copy_bytes_per_s=copy, flops_per_s={key: rate for key, rate in found.items() if rate is not None})


def _library(solver_id: str) -> str:
    try:
        return Registry.default().named(solver_id).library.value if solver_id else ""
    except UnknownSolverError:
        return ""


def _config_text(config: str) -> str:
    try:
        return config_text(Config.from_json(config)) if config else ""
    except (InvalidConfigError, RecursionError):
        return config


def _text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _refused(where: str, why: str) -> InvalidOptionError:
    return InvalidOptionError(f"{where}: {why}")
