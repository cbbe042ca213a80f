"""Fourier and Winograd transforms against PyTorch, on problems that suit them.

    python benchmarks/transforms.py --problems winograd --share 1/2 --seconds 80 --json winograd.json
    python benchmarks/transforms.py --problems dense,lines --layouts NCHW --seconds 60 --json fft.json
    python benchmarks/transforms.py --list

Needs a GPU and PyTorch (cudnn.benchmark=True, every algorithm tried). The default configurations of each solver, and
--configs more drawn at random, are timed by the protocol of `miofind bench`; each solver's fastest that passes
verification is compared and written, whatever errors its bound allows, and so is the fastest within the default bound.
A ratio above 1 says how many times faster than PyTorch it is. Winograd's problems are the 3x3 layers of stride 1 of the
yardstick suite with 64 channels or more on either side. Problems of every list, layout and direction take turns, so
that the first ones stand for all: --share 1/2 is every other problem, and --seconds begins no problem after so long,
compilation included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import random
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import script
from commit import commit

from miofind.bench.torch_rival import TorchRival
from miofind.compiler import Compiler
from miofind.core.problem import DataType, Direction, Layout, MathMode, ProblemDescription
from miofind.device.device import Device
from miofind.device.environment import versions
from miofind.errors import MiofindError
from miofind.launch.invoker import Invoker, make_invoker
from miofind.measure.backend import Runnable
from miofind.measure.timer import Timer
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solver.steps import Config
from miofind.suites import load_suite
from miofind.verify.claims import claims_of
from miofind.verify.verifier import Verifier

Candidate = tuple[Solver, Config]

SAMPLES = 9
DEFAULT_BOUND = "within the default bound of errors"
FFT = ("ConvFft", "ConvFftTiles", "ConvFftDepthwise")
SOLVERS = {"dense": FFT, "lines": FFT, "winograd": ("ConvWinogradFused", "ConvWinogradMma", "ConvWinograd")}
LEAST_CHANNELS = 64
LAYOUTS = ["NCHW", "NHWC"]

# n, c, sizes, k, taps along each axis, groups; padded by half the taps.
DENSE = (
    (32, 64, (56, 56), 64, 11, 1),
    (16, 64, (112, 112), 64, 11, 1),
    (32, 128, (28, 28), 128, 11, 1),
    (32, 256, (14, 14), 256, 11, 1),
    (32, 256, (28, 28), 256, 11, 1),
    (1, 64, (256, 256), 64, 11, 1),
    (32, 128, (28, 28), 128, 13, 1),
    (16, 96, (56, 56), 96, 15, 1),
    (8, 16, (224, 224), 16, 17, 1),
    (16, 32, (128, 128), 32, 21, 1),
    (1, 32, (512, 512), 32, 25, 1),
    (8, 64, (64, 64), 64, 31, 1),
    (8, 3, (256, 256), 64, 15, 1),
)
LINES = (
    (32, 64, (4096,), 64, 256, 1),
    (8, 256, (4096,), 256, 256, 1),
    (16, 128, (8192,), 128, 512, 1),
    (8, 64, (16384,), 64, 1024, 1),
    (4, 32, (65536,), 32, 2048, 1),
    (4, 16, (131072,), 16, 4096, 1),
    (8, 1024, (4096,), 1024, 256, 1024),
    (16, 256, (8192,), 256, 512, 256),
    (8, 512, (16384,), 512, 1024, 512),
    (4, 64, (65536,), 64, 4096, 64),
)
LISTS = {"dense": DENSE, "lines": LINES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One problem and the list it comes from."""

    kind: str
    problem: ProblemDescription


def jobs(asked: argparse.Namespace) -> Iterator[Job]:
    """The problems asked for, layout by layout and direction by direction of each."""
    for kind in asked.problems:
        for base in bases(kind):
            for channels_last in asked.channels_last:
                for direction in asked.directions:
                    problem = ProblemDescription.convolution(
                        x=base.x.shape,
                        w=base.w.shape,
                        padding=base.conv.pad_before,
                        groups=base.groups,
                        dtype=asked.dtype,
                        layout=Layout.of(base.spatial_dims, channels_last=channels_last),
                        direction=direction,
                        math=asked.math,
                    )
                    yield Job(kind=kind, problem=problem)


def bases(kind: str) -> Iterator[ProblemDescription]:
    """The forward problems of a list."""
    if kind == "winograd":
        yield from filter(suits_winograd, (entry.problem for entry in load_suite("yardstick").problems()))
        return
    for n, c, sizes, k, taps, groups in LISTS[kind]:
        filters = (k, c // groups, *(taps for _ in sizes))
        yield ProblemDescription.convolution(x=(n, c, *sizes), w=filters, padding=taps // 2, groups=groups)


def suits_winograd(problem: ProblemDescription) -> bool:
    """Whether a layer is one that the figure asked for is about."""
    if problem.filter != (3, 3) or max(*problem.conv.stride, *problem.conv.dilation, problem.groups) > 1:
        return False
    return min(problem.c, problem.k) >= LEAST_CHANNELS


def in_turns(every: Sequence[Job]) -> list[Job]:
    """One of each list, layout and direction after another, each of these shuffled; alike every time."""
    groups: dict[tuple[str, bool, Direction], list[Job]] = {}
    for job in every:
        groups.setdefault((job.kind, job.problem.x.layout.channels_last, job.problem.direction), []).append(job)
    for (kind, *_), group in groups.items():  # alike, so that shares have the same layers in each
        random.Random(kind).shuffle(group)
    rounds = itertools.zip_longest(*groups.values())
    return [job for one in rounds for job in one if job is not None]


def share(every: Sequence[Job], part: tuple[int, int]) -> list[Job]:
    """One of the parts of the problems, with every list, layout and direction in it."""
    number, count = part
    seen: Counter[tuple[str, bool, Direction]] = Counter()
    chosen = []
    for job in every:
        key = (job.kind, job.problem.x.layout.channels_last, job.problem.direction)
        if seen[key] % count == number:
            chosen.append(job)
        seen[key] += 1
    return chosen


def configurations(solver: Solver, problem: ProblemDescription, device: Device, count: int) -> list[Config]:
    """The defaults and `count` more at random."""
    defaults = list(solver.default_configs(problem, device))
    if count == 0:
        return defaults
    every = list(solver.configs(problem, device))
    drawn = random.Random(problem.network_config).sample(every, min(count, len(every)))
    return list(dict.fromkeys([*defaults, *drawn]))


def candidates(job: Job, asked: argparse.Namespace, device: Device) -> list[Candidate]:
    """What is timed for a problem."""
    found, problem = [], job.problem
    for name in asked.solvers or SOLVERS[job.kind]:
        solver = Registry.default().named(name)
        if solver.applicability(problem, device):
            found += [(solver, config) for config in configurations(solver, problem, device, asked.configs)]
    return found


def median_ms(timer: Timer, runs: Runnable, count: int = SAMPLES) -> float:
    """Of `count` samples."""
    return statistics.median(timer.samples(timer.prepare(runs), runs, count))


def refused(verifier: Verifier, invoker: Invoker, solver: Solver, compiler: Compiler) -> str:
    """Why a configuration does not pass, "" if it does."""
    try:
        claims = claims_of(solver, verifier.problem, invoker.device, invoker.config, compiler)
        verdict = verifier.verify(invoker, claims)
    except (MiofindError, MemoryError) as error:
        return str(error) or type(error).__name__
    return "" if verdict.ok else verdict.message or "wrong"


def measured(job: Job, asked: argparse.Namespace, device: Device, compiler: Compiler) -> Iterator[dict[str, Any]]:
    """One problem's times in milliseconds, ours best first, and what failed, by configuration; then PyTorch's time."""
    problem, times, failures = job.problem, [], []
    found = candidates(job, asked, device)
    with Verifier(problem, device, compiler) as verifier, Timer(problem, device, compiler) as timer:
        for solver, config in found:
            try:
                invoker = make_invoker(problem, device, solver, config, compiler)
                times.append((median_ms(timer, invoker), solver, config, invoker))
            except (MiofindError, MemoryError) as error:
                failures.append(f"{solver.id} {config.json}: {str(error)[:300]}")
        times.sort(key=lambda one: one[0])
        rows, verified = [], set()
        for ms, solver, config, invoker in times:
            keeps_bound = solver.keeps_bound(problem, config)
            if (solver.id, keeps_bound) in verified:
                continue  # a faster one stands for it
            if message := refused(verifier, invoker, solver, compiler):
                failures.append(f"{solver.id} {config.json}: {message[:300]}")
                continue
            verified.add((solver.id, keeps_bound))
            errors = {"growth": solver.error_growth(problem, config), "keeps_bound": keeps_bound}
            estimate_ms = solver.estimate_ms(problem, device, config)
            rows.append({"ms": ms, "solver": solver.id, "config": config.json, "estimate_ms": estimate_ms, **errors})
        yield {"rows": rows, "failures": failures}
        if asked.torch:
            try:
                yield {"torch_ms": median_ms(timer, TorchRival(problem, device.index), 5)}
            except (MiofindError, MemoryError) as error:
                yield {"failures": [f"torch: {error}"]}


def work(pipe: Connection, asked: argparse.Namespace) -> None:
    """Measure the jobs that come through a pipe: a process of its own, since PyTorch may take hours for one problem."""
    device, compiler = Device.cuda(), Compiler()
    while True:
        for part in measured(pipe.recv(), asked, device, compiler):
            pipe.send(part)


class Worker:
    """The process that measures, replaced where PyTorch does not come to an end."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._asked = asked
        self._start()

    def _restart(self) -> None:
        self._pipe.close()
        self._process.kill()
        self._process.join()
        self._start()

    def _start(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=work, args=(theirs, self._asked))
        self._process.daemon = True
        self._process.start()
        theirs.close()

    def row(self, job: Job) -> dict[str, Any]:
        """What is written of a problem; a process that ends over it fails that problem alone."""
        ours: dict[str, Any] = {"rows": [], "failures": ["the process that measures ended"]}
        rival: dict[str, Any] = {}
        try:
            self._pipe.send(job)
            ours = self._pipe.recv()
            if self._asked.torch and self._pipe.poll(self._asked.torch_seconds):
                rival = self._pipe.recv()
            elif self._asked.torch:
                rival = {"failures": [f"torch: given up after {self._asked.torch_seconds:g} s"]}
                self._restart()
        except (EOFError, OSError):
            rival = {"failures": ["torch: its process ended"]} if ours["rows"] else {}
            self._restart()
        rival_ms = rival.get("torch_ms")
        return {
            "kind": job.kind,
            "network_config": job.problem.network_config,
            "direction": job.problem.direction.value,
            "channels_last": job.problem.x.layout.channels_last,
            "torch_ms": rival_ms,
            "ratio": rival_ms / ours["rows"][0]["ms"] if ours["rows"] and rival_ms else None,
            "rows": ours["rows"],
            "failures": ours["failures"] + rival.get("failures", []),
        }


def line(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    if not row["rows"]:
        return f"{row['network_config']}: nothing passed"
    best = row["rows"][0]
    rival = "" if row["ratio"] is None else f"  torch {row['torch_ms']:.3f} ms, ratio {row['ratio']:.2f}"
    estimate = f"(estimate {best['estimate_ms']:.3f})"
    return f"{row['network_config']}: {best['ms']:.3f} ms {estimate} {best['solver']} {best['config']}{rival}"


def means(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Geometric means of the ratio by list, layout and direction, of each solver alone, within the default bound."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        if row["torch_ms"] is None or not row["rows"]:
            continue
        order = "channels last" if row["channels_last"] else "channels first"
        groups.setdefault(f"{row['kind']}, {order}, {row['direction']}", []).append(math.log(row["ratio"]))
        best = {f"{one['solver']} alone": one["ms"] for one in reversed(row["rows"])}
        if usual := [one["ms"] for one in row["rows"] if one["keeps_bound"]]:
            best[DEFAULT_BOUND] = min(usual)
        for name, ms in best.items():
            key = f"{row['kind']}, {order}, {row['direction']}, {name}"
            groups.setdefault(key, []).append(math.log(row["torch_ms"] / ms))
    return {f"{key} ({len(logs)})": math.exp(statistics.fmean(logs)) for key, logs in sorted(groups.items())}


def build_ahead(found: Mapping[Job, Sequence[Candidate]], device: Device, compiler: Compiler) -> None:
    """Compile all kernels in parallel, so that the GPU does not wait for them."""
    steps = {}
    for job, pairs in found.items():
        for solver, config in pairs:
            for step in solver.solution(job.problem, device, config).kernels:
                steps[step.source, step.entry, step.defines] = step
    for _ in compiler.build_all(steps.values(), device.arch):
        pass


def parsed() -> argparse.Namespace:
    parser = script.parser(__doc__)
    parser.add_argument("--json", type=script.output, help="write the rows to this file, after each problem")
    parser.add_argument("--problems", type=script.several(SOLVERS), default=[*SOLVERS], metavar="LISTS")
    parser.add_argument("--solvers", type=script.solver_ids, help="others than each list's own")
    parser.add_argument("--directions", type=script.several(Direction), default=[*Direction])
    parser.add_argument("--dtype", choices=[*map(str, DataType)], default="float32")
    parser.add_argument("--math", choices=[*map(str, MathMode)], default="ieee")
    parser.add_argument("--layouts", type=script.several(LAYOUTS), default=LAYOUTS, help="channels first, last or both")
    parser.add_argument("--configs", type=script.at_least(0), default=0, help="configurations besides the defaults")
    parser.add_argument("--seconds", type=script.seconds, default=math.inf, help="begin no problem after so long")
    parser.add_argument(
        "--share", type=script.share, default=(0, 1), metavar="I/N", help="measure only the I-th of N parts"
    )
    parser.add_argument("--no-torch", dest="torch", action="store_false")
    parser.add_argument(
        "--torch-seconds", type=script.seconds, default=40, help="give PyTorch up on a problem after so long"
    )
    parser.add_argument("--list", action="store_true", help="only print the problems and how many configurations")
    asked = parser.parse_args()
    asked.channels_last = [name == "NHWC" for name in asked.layouts]
    return asked


def main() -> None:
    asked = parsed()
    every = in_turns(list(jobs(asked)))
    chosen = share(every, asked.share)
    if asked.list:
        device = Device.virtual("90a")
        for job in chosen:
            print(job.problem.network_config, len(candidates(job, asked, device)))
        return
    device, compiler, started, rows = Device.cuda(), Compiler(), time.monotonic(), []
    build_ahead({job: candidates(job, asked, device) for job in chosen}, device, compiler)
    built = time.monotonic()
    worker = Worker(asked)
    for job in chosen:
        if time.monotonic() - started > asked.seconds:
            break
        rows.append(worker.row(job))
        print(line(rows[-1]), flush=True)
        for failure in rows[-1]["failures"]:
            print(f"  FAILED {failure}", flush=True)
        if asked.json:
            report = {
                "gpu": device.name,
                "versions": versions(device),
                "commit": commit(),
                "command": shlex.join(["python", *sys.argv]),
                "means": means(rows),
                "rows": rows,
            }
            asked.json.write_text(json.dumps(report, indent=1) + "\n")
    for key, mean in means(rows).items():
        print(f"{key}: PyTorch's time over ours, geometric mean {mean:.2f}")
    seconds = time.monotonic() - built
    whole = seconds * len(every) / max(1, len(rows))
    took = f"{len(rows)} of {len(every)} problems in {seconds:.0f} s, after {built - started:.0f} s of compilation"
    print(f"{took}: all take about {whole:.0f} s")


if __name__ == "__main__":
    script.run(main)
