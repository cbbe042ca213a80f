"""Tunes a network before its first step: all its problems are found at once, compiled ahead and remembered."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from miofind.bench.ceilings import Ceilings
from miofind.bench.comparison import bench_row
from miofind.bench.rivals import Rival
from miofind.compiler import CompilePool
from miofind.core.problem import ProblemDescription
from miofind.core.tensor import data_type
from miofind.device.device import Place, has_cupy
from miofind.errors import InvalidOptionError, InvalidProblemError, MissingLibraryError, brief
from miofind.evaluate.harness_kernels import usual_harness_steps
from miofind.options import FindOptions
from miofind.process.garbage import without_what_is_loaded
from miofind.runtime.handle import Handle, default_handle
from miofind.solver.steps import KernelStep
from miofind.suites import SuiteProblem
from miofind.text.printable import printable_name
from miofind.torch.direct import VARIABLE, direct_path
from miofind.torch.fused import plans as fused_plans
from miofind.torch.fused.answers import planner_of
from miofind.torch.override import comparisons
from miofind.torch.override.dispatcher import current, forget_plans, native_kernels
from miofind.torch.override.flags import Flags, state
from miofind.torch.override.plans import kernels_of
from miofind.torch.recording.network import dtype_of, problems, refuse_inputs
from miofind.torch.recording.recording import Recording
from miofind.torch.tuning.report import TunedProblem, TuningReport
from miofind.tune.service import (
    OnEvent,
    TuneEnd,
    TuneEvent,
    TuneFinished,
    TuneOptions,
    TuneResult,
    TuneStarted,
    TuneSummary,
)
from miofind.tune.service import tune as tune_problems

logger = logging.getLogger(__name__)

_NO_FLOOR = Ceilings(copy_bytes_per_s=math.inf, flops_per_s={})


def tune(
    model: Any,
    *inputs: Any,
    training: bool = False,
    amp: Any = None,
    memory_format: Any = None,
    keywords: Mapping[str, Any] | None = None,
    options: FindOptions | None = None,
    compare: bool = True,
    handle: Handle | None = None,
    on_event: OnEvent | None = None,
) -> TuningReport:
    """How fast a network's convolutions become: the fastest solutions of all of them are found and remembered.

    Call it before the first step. The network is not run; see `miofind.torch.problems`. Kernels are compiled in
    processes of their own, ahead of what is measured, and on a GPU a child process measures. What the FindDB knows is
    not measured again. On a GPU `miofind.torch.build` is called beside it, whose work this process uses where it is
    done by the end. Ctrl-C ends it with a report, and the same call goes on.

    Args:
        model: a module, or a `Recording` of `record` or `exported_problems`, which takes no inputs.
        inputs, training, amp, memory_format, keywords: as of `miofind.torch.problems`.
        options: of each find; the likeliest candidates alone, for as long as they take, if left out.
            `FindOptions(isolate=True)` measures all default configurations, some 40 instead of 3 a problem, and of
            those that together take least, a seventh of the network's time, instead of 2.
        compare: on a GPU, time what the override in force (or `enable` as it is) runs of each problem beside PyTorch,
            whose own kernel then runs what it is faster at, in this process and in later ones that have its FindDB:
            about as long again as the finds. Of the likeliest, problems that PyTorch was faster at are found once more
            among all default candidates, cuDNN's too.
        handle: a device and its FindDB; the current GPU's default one if left out, else the CPU place's.
        on_event: called with what happens; a bar on a terminal's stderr if left out.

    Raises:
        InvalidOptionError: an argument is none of these, or the model cannot run on fake tensors.
        DatabaseError: the FindDB cannot be written.
        MissingEnvironmentError: what measuring needs is missing.
    """
    if options is not None and not isinstance(options, FindOptions):
        raise InvalidOptionError(f"options={brief(options)} must be a FindOptions")
    asked: dict[str, Any] = {"training": training, "amp": amp, "memory_format": memory_format}
    if isinstance(model, Recording):
        refuse_inputs(inputs, keywords, **asked)
    with without_what_is_loaded() as leave_out, _compiling(handle) as pool, contextlib.ExitStack() as stack:
        handle = default_handle() if handle is None else handle
        on_gpu = handle.device.place is Place.CUDA
        options = FindOptions(isolate=on_gpu, time_budget_s=math.inf, likely=True) if options is None else options
        stack.enter_context(_measuring(handle, options))
        if pool is not None and isinstance(model, torch.nn.Module):
            pool.submit(_usual_steps(model, amp, handle, trains=bool(training)), handle.device.arch)
        recording = (
            model
            if isinstance(model, Recording)
            else problems(model, *inputs, device="cuda" if on_gpu else "cpu", keywords=keywords, **asked)
        )
        if on_gpu:
            torch.cuda.empty_cache()  # what measures asks the driver for memory
        leave_out()  # of PyTorch, what following a network imports
        summary = _found(recording.problems, handle, options, on_event, pool)
        rows, is_complete, seconds = _rows(recording, summary), summary.end is TuneEnd.COMPLETE, summary.seconds
        if compare and on_gpu and is_complete:
            runnable = _as_it_runs(options, handle.device.place)
            try:
                with native_kernels(), _switches_kept():
                    rows = _compared(rows, summary, handle, runnable)
                    again = _found_again(rows, recording, handle, options, on_event, pool)
                    if again is not None:
                        rows = _replaced(rows, recording, again, handle, runnable)
                        is_complete, seconds = again.end is TuneEnd.COMPLETE, seconds + again.seconds
            except KeyboardInterrupt:  # what was found is told
                is_complete = False
    if on_gpu:
        direct_path()
    forget_plans()
    fused_plans.forget()
    return TuningReport(
        network=recording.name,
        device=handle.device.name,
        rows=tuple(rows),
        left_out=recording.left_out,
        seconds=seconds,
        is_complete=is_complete,
    )


def _as_it_runs(options: FindOptions, place: Place) -> FindOptions:
    """What is found, of that what the override in force may run; PyTorch is compared with that.

    To be asked before `native_kernels` lays the override aside.
    """
    settings = planner_of(current("cuda" if place is Place.CUDA else "cpu")).settings
    runs = settings.options(deterministic=Flags.of(state(), on_gpu=place is Place.CUDA).deterministic)
    limits = [limit for limit in (runs.workspace_limit_bytes, options.workspace_limit_bytes) if limit is not None]
    return replace(
        options,
        workspace_limit_bytes=min(limits, default=None),
        deterministic=options.deterministic or runs.deterministic,
        only=runs.only or options.only,
        exclude=tuple(dict.fromkeys((*options.exclude, *runs.exclude))),
    )


@contextlib.contextmanager
def _compiling(handle: Handle | None) -> Iterator[CompilePool | None]:
    """On a GPU processes that compile, which take a second to start: beside all else, the handle that is made, too."""
    is_on_gpu = torch.cuda.is_available() and has_cupy() if handle is None else handle.device.place is Place.CUDA
    if not is_on_gpu:
        yield None
        return
    with CompilePool() as pool:
        pool.start(_EARLY_COMPILERS)
        yield pool


@contextlib.contextmanager
def _measuring(handle: Handle, options: FindOptions) -> Iterator[None]:
    """On a GPU what measures, started beside the steps over fake tensors.

    It ends with the tuning: the network's step is to have its memory.
    """
    if handle.device.place is not Place.CUDA:
        yield
        return
    executor = handle.executor(isolate=options.isolate)
    try:
        executor.prepare()
        _begin_to_build()
        yield
    finally:
        executor.close()


def _usual_steps(model: torch.nn.Module, amp: Any, handle: Handle, *, trains: bool) -> tuple[KernelStep, ...]:
    """What will check whatever convolutions a network has: compiled while they are found out, the first find has it."""
    with contextlib.suppress(InvalidProblemError):
        dtype = data_type(amp or dtype_of(model), "amp")
        return usual_harness_steps(dtype, handle.device, trains=trains)
    return ()


_LIGHT_SHARE = 0.3
"""Of a network's time: half of its problems take so much together, and lose 0.3 % of that for a tenth of its kernels to
compile."""

_EARLY_COMPILERS = 16
"""Processes that compile and are started before there is a step: each takes 40 MB, and more start with the steps.

On the 16 cores of an H200's host, with 15 of them, ResNet-50's first result took 5.0 to 5.8 s, with 8 6.0 to 6.4.
"""

_building: list[subprocess.Popen[bytes]] = []
"""Processes that build the direct path, which nobody waits for."""


def _begin_to_build() -> None:
    """Begin to build what launches calls without Python, in a process that goes on where this one ends before it."""
    if direct_path() is not None or os.environ.get(VARIABLE) == "0":
        return
    command = [sys.executable, "-c", "import miofind.torch; miofind.torch.build()"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "CUDA_VISIBLE_DEVICES": ""}
    nowhere = subprocess.DEVNULL
    try:
        begun = subprocess.Popen(
            command, env=environment, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True
        )
    except OSError as error:
        logger.info("PyTorch's convolutions will go through Python: %s", error)
    else:
        _building.append(begun)


def _found(
    requests: Sequence[SuiteProblem],
    handle: Handle,
    options: FindOptions,
    on_event: OnEvent | None,
    pool: CompilePool | None,
) -> TuneSummary:
    """Finds of problems; with a pool what runs those that were known is compiled, too, since a step follows."""
    with _progress(on_event) as tell:

        def tell_and_compile(event: TuneEvent) -> None:
            if pool is not None and isinstance(event, TuneFinished):
                pool.submit(_kernels(event.result, handle), handle.device.arch)
            tell(event)

        tuning = TuneOptions(find=options)
        summary = tune_problems(requests, [handle], tuning, tell_and_compile, pool=pool, light_share=_LIGHT_SHARE)
        if pool is not None and summary.end is TuneEnd.COMPLETE:
            steps = itertools.chain.from_iterable(_kernels(result, handle) for result in summary.results)
            try:
                pool.errors(steps, handle.device.arch)
            except MissingLibraryError as error:  # who launches them says so, and PyTorch's own kernels run
                logger.debug("nothing is compiled: %s", error)
            except KeyboardInterrupt:  # what was found is told
                summary = replace(summary, end=TuneEnd.INTERRUPTED)
    return summary


def _kernels(result: TuneResult, handle: Handle) -> tuple[KernelStep, ...]:
    """What the fastest solution of a problem launches of our own kernels."""
    return kernels_of(result.solutions[0], handle) if result.solutions else ()


@contextlib.contextmanager
def _progress(on_event: OnEvent | None) -> Iterator[OnEvent]:
    """What is called with events: what was given, else a bar of problems."""
    if on_event is not None:
        yield on_event
        return
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("tuning", total=None)

        def tell(event: TuneEvent) -> None:
            if isinstance(event, (TuneStarted, TuneFinished)):
                layer = printable_name(event.task.request.layer)
                done = event.number - isinstance(event, TuneStarted)
                bar.update(task, total=event.total, completed=done, description=escape(layer))

        yield tell


def _rows(recording: Recording, summary: TuneSummary) -> list[TunedProblem]:
    layers: dict[ProblemDescription, dict[str, None]] = {}
    for call in recording.calls:
        if call.problem is not None:
            layers.setdefault(call.problem, {})[call.layer] = None
    return [_row(result, tuple(layers[result.request.problem])) for result in summary.results]


def _row(result: TuneResult, layers: tuple[str, ...]) -> TunedProblem:
    best = result.solutions[0] if result.solutions else None
    return TunedProblem(
        layers=layers,
        problem=result.request.problem,
        count=result.request.count,
        solver_id="" if best is None else best.solver_id,
        source=result.status.value,
        own_ms=None if best is None else best.time_ms,
        message=result.message,
    )


def _compared(
    rows: Sequence[TunedProblem], summary: TuneSummary, handle: Handle, options: FindOptions
) -> list[TunedProblem]:
    """The rows with both sides' times, taken in turn on the same buffers and remembered."""
    compared, flags = [], Flags.of(state(), on_gpu=handle.device.place is Place.CUDA)
    for row, result in zip(rows, summary.results, strict=True):
        if result.solutions:
            timed = bench_row(result.request, handle, options, _NO_FLOOR, against=(Rival.TORCH,))
            own_ms = row.own_ms if timed.time_ms is None else timed.time_ms
            row = replace(row, own_ms=own_ms, torch_ms=timed.rival_ms, message=timed.message)
            ran = timed.solution
            if ran is not None:
                row = replace(row, solver_id=ran.solver_id)
                if timed.time_ms and timed.rival_ms:
                    comparisons.note(ran, handle, flags, timed.time_ms, timed.rival_ms)
        compared.append(row)
    return compared


def _found_again(
    rows: Sequence[TunedProblem],
    recording: Recording,
    handle: Handle,
    options: FindOptions,
    on_event: OnEvent | None,
    pool: CompilePool | None,
) -> TuneSummary | None:
    """Finds among all default candidates, cuDNN's too, of what PyTorch was faster at; None where there is none."""
    behind = {row.problem for row in rows if row.gain is not None and row.gain < 1}
    if not options.likely or not behind:
        return None
    requests = [request for request in recording.problems if request.problem in behind]
    torch.cuda.empty_cache()
    return _found(requests, handle, replace(options, likely=False), on_event, pool)


def _replaced(
    rows: Sequence[TunedProblem], recording: Recording, again: TuneSummary, handle: Handle, options: FindOptions
) -> list[TunedProblem]:
    """The rows, those that were found again compared again; what that failed for stays as it was."""
    results = tuple(result for result in again.results if result.solutions)
    solved = replace(again, results=results)
    whole = replace(options, likely=False)
    found = {row.problem: row for row in _compared(_rows(recording, solved), solved, handle, whole)}
    return [found.get(row.problem, row) for row in rows]


@contextlib.contextmanager
def _switches_kept() -> Iterator[None]:
    """PyTorch's switches, which the comparison turns, as they were afterwards.

    TF32 has an old and a new interface; the old one raises where the new one was used by itself.
    """
    backends = torch.backends
    benchmark, limit = backends.cudnn.benchmark, backends.cudnn.benchmark_limit
    old = {}
    for name, switch in (("cudnn", backends.cudnn), ("matmul", backends.cuda.matmul)):
        with contextlib.suppress(RuntimeError):
            old[name] = (switch, switch.allow_tf32)
    new = [(place, place.fp32_precision) for place in (backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul)]
    try:
        yield
    finally:
        backends.cudnn.benchmark, backends.cudnn.benchmark_limit = benchmark, limit
        for switch, allowed in old.values():
            switch.allow_tf32 = allowed
        for place, precision in new:
            if place.fp32_precision != precision:
                place.fp32_precision = precision
