"""`miofind compile`: the binary cache filled ahead of time, without a GPU."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from miofind.cli.options import DRIVER_LINE, arch_option, example, exclude_option, json_option, only_option
from miofind.cli.output import Sheet, bytes_text, print_error, print_json, print_note, print_text, seconds_text
from miofind.cli.problems import request_options, requests_of
from miofind.cli.progress import counted
from miofind.cli.session import verbose_option
from miofind.cli.store import cache_over, sharing, store_options
from miofind.compiler import Compiler, KernelResources, toolchain
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device, Place
from miofind.errors import (
    CompileError,
    InvalidOptionError,
    MiofindError,
    MissingEnvironmentError,
    NoSolutionError,
    described,
    raise_if_interrupted,
)
from miofind.find.likely import likely_plan
from miofind.find.wanted_kernels import kernels_of, one_a_binary, solvers_with_kernels
from miofind.finddb import MEMORY
from miofind.options import FindOptions
from miofind.runtime.handle import Handle
from miofind.solver.registry import Registry
from miofind.solver.steps import KernelStep

_MOST_SHOWN = 20
_MOST_REASONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Built:
    """One kernel of a solver for an architecture, with its resources or its error."""

    solver_id: str
    arch: str
    step: KernelStep
    resources: KernelResources | None
    error: CompileError | None = None

    @property
    def spills(self) -> bool:
        """Whether it spills registers."""
        return self.resources is not None and self.resources.spill_bytes > 0


@dataclass(slots=True)
class _Report:
    """The kernels built so far, and why there are none of some solvers.

    Attributes:
        left_out: what this machine lacks for them, or that none serves a problem.
        broken: what their own code raised.
    """

    built: list[_Built] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        """Kernels that were not compiled, and solvers that could not say which there are."""
        return sum(built.error is not None for built in self.built) + len(self.broken)

    def blame(self, solver_id: str, problem: ProblemDescription, error: BaseException) -> None:
        """Take what a solver raised.

        Raises:
            KeyboardInterrupt: it was the user's.
        """
        raise_if_interrupted(error)
        told = described(error, str if isinstance(error, MiofindError) else repr)
        kind = self.left_out if isinstance(error, MissingEnvironmentError) else self.broken
        kind[f"{solver_id}: {problem}"] = told


@click.command(
    "compile",
    context_settings=DRIVER_LINE,
    epilog=example(
        "miofind compile --suite resnet50 --batch 32 --dtype float16 --layout NHWC --arch 90a",
        "miofind compile conv -n 32 -c 64 -H 56 -W 56 -k 64 -y 3 -x 3 -F 1 --arch 80 --arch 90a --search",
    ),
)
@request_options
@arch_option
@click.option("--search", is_flag=True, help="Compile every configuration of a search, not the defaults alone.")
@click.option("--likely", is_flag=True, help="Compile those few that are predicted to be the fastest.")
@only_option
@exclude_option
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Number of threads.  [default: one a processor]"
)
@store_options
@json_option
@verbose_option
def compile_(
    archs: tuple[Device, ...],
    search: bool,
    likely: bool,
    only: tuple[str, ...],
    exclude: tuple[str, ...],
    workers: int | None,
    store: str | None,
    store_secret: str | None,
    as_json: bool,
    **values: Any,
) -> None:
    """Compile kernels ahead of time, without a GPU.

    The kernels are those that a find of the problems would try, for architectures that need not be present. With
    --store they are shared: what another host has compiled is taken from there, what is compiled here goes there.
    """
    problems = [request.problem.flattened for request in requests_of(**values)]
    options = FindOptions(only=only, exclude=exclude, tuning=search, likely=likely)
    devices = _known(archs) or (_present_device(),)
    compiler, report, began = Compiler(cache_over(store, store_secret)), _Report(), time.monotonic()
    for device in devices:
        steps = _steps(problems, device, options, report)
        report.built += _build(compiler, steps, device.arch, workers)
    if not report.built and not report.left_out and not report.broken:
        why = _only_reason(problems, devices, options) or "`miofind solvers conv ...` says why"
        raise NoSolutionError(f"no solver with kernels serves these problems there: {why}")
    if as_json:
        print_json(_json(report, compiler))
    else:
        _show(report, compiler, time.monotonic() - began)
    if compiler.cache.stats().directory is None:
        print_note("error: no kernel is kept: set MIOFIND_CACHE_DIR to a folder that can be written")
        raise click.exceptions.Exit(CompileError.exit_code)
    if report.failed:
        raise click.exceptions.Exit(CompileError.exit_code)


def _known(archs: tuple[Device, ...]) -> tuple[Device, ...]:
    """The architectures of --arch.

    Raises:
        InvalidOptionError: NVRTC does not compile for one: each kernel would fail.
    """
    for device in archs:
        if device.sm not in toolchain().sms:
            known = ", ".join(Device.virtual(str(sm)).arch for sm in sorted(toolchain().sms))
            told = f"NVRTC {toolchain().version} compiles for {known}: choose of these, or install a newer NVRTC"
            raise InvalidOptionError(f"--arch {device.sm}: {told}")
    return archs


def _present_device() -> Device:
    device = Device.default()
    if device.place is not Place.CUDA:
        raise InvalidOptionError("--arch is needed where there is no GPU: --arch 90a, repeatable")
    return device


def _steps(
    problems: Sequence[ProblemDescription], device: Device, options: FindOptions, report: _Report
) -> dict[KernelStep, str]:
    """The kernels that finds would launch, each with its solver's id; equal binaries count once, whatever the grid."""
    if options.likely:
        return _likely_steps(problems, device, options, report)
    wanted: dict[KernelStep, str] = {}
    registry = Registry.default()
    with counted("listing kernels", len(problems)) as advance:
        for problem in problems:
            for solver in solvers_with_kernels(problem, options, registry):
                try:
                    for step in kernels_of(solver, problem, device, search=options.searches):
                        wanted.setdefault(step, solver.id)
                except BaseException as error:  # a solver's own code may raise anything
                    report.blame(solver.id, problem, error)
            advance()
    return one_a_binary(wanted)


def _likely_steps(
    problems: Sequence[ProblemDescription], device: Device, options: FindOptions, report: _Report
) -> dict[KernelStep, str]:
    """The kernels of what finds of the likeliest would measure first; what a FindDB answers counts as unknown."""
    wanted: dict[KernelStep, str] = {}
    with Handle(device, database=MEMORY) as handle, counted("listing kernels", len(problems)) as advance:
        for problem in problems:
            plan = likely_plan(problem, options, handle, left_out={})
            report.broken |= {f"{name}: {problem}": plan.refusals[name] for name in sorted(plan.failing)}
            if not plan.candidates and not plan.failing:
                report.left_out[str(problem)] = "no solver with kernels serves it"
            for planned in plan.candidates:
                try:
                    for step in planned.kernels(device):
                        wanted.setdefault(step, planned.solver.id)
                except BaseException as error:  # a solver's own code may raise anything
                    report.blame(planned.solver.id, problem, error)
            advance()
    return one_a_binary(wanted)


def _only_reason(problems: Sequence[ProblemDescription], devices: Sequence[Device], options: FindOptions) -> str:
    """Why the only solver that the options allow has no kernels for problems; "" where they allow several."""
    allowed = [solver for solver in Registry.default().values() if options.allows(solver)]
    if len(allowed) != 1:
        return ""
    (solver,) = allowed
    if not solver.sources:
        return f"{solver.id} has no kernels of its own"
    answers = (solver.applicability(problem, device) for device in devices for problem in problems)
    reasons = dict.fromkeys(answer.reason for answer in answers if not answer)
    return f"{solver.id} {'; '.join(itertools.islice(reasons, _MOST_REASONS))}" if reasons else ""


def _build(compiler: Compiler, steps: dict[KernelStep, str], arch: str, workers: int | None) -> Iterator[_Built]:
    with counted(f"compile sm_{arch}", len(steps)) as advance:
        for step, result in compiler.build_all(steps, arch, workers=workers):
            advance()
            if isinstance(result, CompileError):
                yield _Built(solver_id=steps[step], arch=arch, step=step, resources=None, error=result)
            else:
                yield _Built(solver_id=steps[step], arch=arch, step=step, resources=result.resources.get(step.entry))


def _show(report: _Report, compiler: Compiler, seconds: float) -> None:
    made = Sheet("", ("solver", "arch", "kernels", "failed", "registers", "spilling"), right=("kernels", "failed"))
    for solver_id, arch in dict.fromkeys((built.solver_id, built.arch) for built in report.built):
        of_solver = [b for b in report.built if (b.solver_id, b.arch) == (solver_id, arch)]
        registers = [b.resources.registers for b in of_solver if b.resources is not None]
        spilling = sum(b.spills for b in of_solver)
        failed = sum(b.error is not None for b in of_solver)
        spread = " to ".join(map(str, sorted({min(registers), max(registers)}))) if registers else "-"
        made.add(solver_id, arch, str(len(of_solver)), str(failed), spread, str(spilling))
    if len(made):
        made.print()
    for built in [b for b in report.built if b.spills and b.resources is not None][:_MOST_SHOWN]:
        assert built.resources is not None
        print_text(f"spills {built.resources.spill_bytes} bytes: {_named(built)}")
    for built in report.built:
        if built.error is not None:
            print_error(built.error, f"{_named(built)}\n")
    for kind, reasons in (("left out", report.left_out), ("failed", report.broken)):
        for name, reason in reasons.items():
            print_note(f"{kind}: {name}: {reason}")
    stats = compiler.cache.stats()
    held = (
        "nothing is cached: the disk cannot be used"
        if stats.directory is None
        else f"the cache holds {stats.entries}, {bytes_text(stats.bytes)}, {stats.directory}"
    )
    print_text(
        f"kernels: {len(report.built)} in {seconds_text(seconds)}, {report.failed} failed, {stats.hits} known already, "
        f"some in one binary; {held}"
    )
    if shared := sharing(compiler.cache):
        print_text(f"store: {shared['fetched']} taken, {shared['published']} given")


def _named(built: _Built) -> str:
    defines = " ".join(f"{name}={value}" for name, value in built.step.defines)
    return f"{built.solver_id} sm_{built.arch} {built.step.source} {built.step.entry} {defines}"


def _json(report: _Report, compiler: Compiler) -> dict[str, object]:
    stats = compiler.cache.stats()
    return {
        "kernels": [_built_json(built) for built in report.built],
        "failed": report.failed,
        "left_out": report.left_out | report.broken,
        "cache": {
            "directory": None if stats.directory is None else str(stats.directory),
            "entries": stats.entries,
            "bytes": stats.bytes,
            "hits": stats.hits,
            "misses": stats.misses,
        },
        "store": sharing(compiler.cache),
    }


def _built_json(built: _Built) -> dict[str, object]:
    used = built.resources
    return {
        "solver": built.solver_id,
        "arch": built.arch,
        "source": built.step.source,
        "entry": built.step.entry,
        "defines": dict(built.step.defines),
        "registers": None if used is None else used.registers,
        "spill_bytes": None if used is None else used.spill_bytes,
        "shared_bytes": None if used is None else used.shared_bytes + built.step.shared_bytes,
        "error": None if built.error is None else str(built.error),
    }
