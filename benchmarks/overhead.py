"""Host-side cost of miofind: FindDB hits, repeated finds, launches, and the first result of a new process.

    python benchmarks/overhead.py --json benchmarks/results/overhead_h200.json

Needs a GPU. Prints median and p99 of each figure beside the bound it is held to.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import script
from commit import commit

import miofind
from miofind.device.device import Device
from miofind.device.environment import versions
from miofind.find.lookup import records
from miofind.find.lookup.validity import solver_hash
from miofind.find.plan import make_plan
from miofind.finddb import History, Row, Scope, environment_id
from miofind.solver.registry import Registry

PROBLEM = {"x": (1, 8, 16, 16), "w": (8, 8, 3, 3), "padding": 1, "dtype": "float32"}
CREATED_AT = "2026-01-01T00:00:00.000000Z"
BARE_KERNEL = 'extern "C" __global__ void bare(const float* x, const float* w, float* y) {}'


def percentiles(samples_us: list[float]) -> dict[str, float]:
    ordered = sorted(samples_us)
    return {"median_us": statistics.median(ordered), "p99_us": ordered[int(0.99 * (len(ordered) - 1))]}


def timed(function: Callable[[], Any], count: int) -> list[float]:
    samples = []
    for _ in range(count):
        start = time.perf_counter_ns()
        function()
        samples.append((time.perf_counter_ns() - start) / 1e3)
    return samples


def finddb_hit(problems: int = 400, lookups: int = 10_000) -> dict[str, Any]:
    """A FindDB hit with the process cache bypassed, over random keys, from query to list of solutions.

    The first look-up of a problem asks its solvers whether they still do what the rows say. Later ones read the FindDB,
    and remember what the same text gave.
    """
    with tempfile.TemporaryDirectory() as folder:
        handle = miofind.Handle(database=Path(folder) / "finddb.db", strict=True)
        described = [
            miofind.ProblemDescription.convolution(x=(1 + i // 100, 64, 8 + i % 100, 56), w=(64, 64, 3, 3), padding=1)
            for i in range(problems)
        ]
        scope = Scope(solvers={s.id: s.version for s in Registry.default().values()}, created_at=CREATED_AT)
        environment = versions(handle.device)
        handle.database.user.add(
            History(
                device=handle.device.identity,
                network_config=problem.network_config,
                rows=_rows(problem, handle, environment_id(environment)),
                scopes=(scope,),
                environments={environment_id(environment): environment},
            )
            for problem in described
        )
        order = random.Random(0)
        first = _lookups(order.sample(described, k=problems), handle)
        again = _lookups(order.choices(described, k=lookups), handle)
        found = records.look_up(described[0], miofind.FindOptions(), handle) or ()
        handle.close()
    return percentiles(again) | {"solutions": len(found), "first": percentiles(first)}


def _lookups(problems: Iterable[miofind.ProblemDescription], handle: miofind.Handle) -> list[float]:
    """Microseconds of a look-up of each problem."""
    options = miofind.FindOptions()
    samples = []
    for problem in problems:
        start = time.perf_counter_ns()
        found = records.look_up(problem, options, handle)
        samples.append((time.perf_counter_ns() - start) / 1e3)
        assert found
    return samples


def _rows(problem: miofind.ProblemDescription, handle: miofind.Handle, environment: str) -> tuple[Row, ...]:
    """A row for each default configuration, with made-up times: what a find leaves behind."""
    return tuple(
        Row(
            solver_id=planned.solver.id,
            solver_version=planned.solver.version,
            config=planned.candidate.config.json,
            status="ok",
            algorithm=planned.solver.algorithm.value,
            library=planned.solver.library.value,
            source_hash=solver_hash(planned.solver),
            time_ms=0.01 * (1 + i),
            min_ms=0.01,
            p20_ms=0.01,
            p80_ms=0.01,
            samples=45,
            protocol="cuda-1",
            workspace_bytes=planned.workspace_bytes,
            deterministic=planned.deterministic,
            max_error=1e-7,
            environment=environment,
            created_at=CREATED_AT,
        )
        for i, planned in enumerate(make_plan(problem, miofind.FindOptions(), handle).candidates)
    )


def repeated_find(handle: miofind.Handle, problem: miofind.ProblemDescription) -> dict[str, float]:
    """A find of a problem that this process has found before."""
    miofind.find_solutions(problem, handle=handle)
    return percentiles(timed(lambda: miofind.find_solutions(problem), 20_000))


def launches(handle: miofind.Handle, problem: miofind.ProblemDescription) -> dict[str, Any]:
    """run_solution with out and workspace against a bare RawKernel launch, interleaved on one stream.

    And the calls over it, `miofind.convolution` and a bound `miofind.Convolution`, against run_solution.
    """
    import cupy

    options = miofind.FindOptions(only=("ConvDirectTiled",))
    solution = miofind.find_solutions(problem, options=options, handle=handle)[0].prepare()
    arrays = {name: cupy.zeros(problem.tensor(name).shape, cupy.float32) for name in ("x", "w", "y")}
    bare = cupy.RawKernel(BARE_KERNEL, "bare")
    x, w, y = arrays["x"], arrays["w"], arrays["y"]
    workspace = cupy.empty(max(1, solution.workspace_bytes), cupy.uint8)
    cases: dict[str, Callable[[], Any]] = {
        "bare_rawkernel": lambda: bare((1,), (32,), (x, w, y)),
        "run_solution_cupy": lambda: miofind.run_solution(solution, x, w, out=y, workspace=workspace),
        **_facades("cupy", (x, w, y, workspace), options, handle),
    }
    try:
        import torch

        tx, tw, ty = (torch.zeros(problem.tensor(name).shape, device="cuda") for name in ("x", "w", "y"))
        tworkspace = torch.empty(max(1, solution.workspace_bytes), dtype=torch.uint8, device="cuda")
        cases["run_solution_torch"] = lambda: miofind.run_solution(solution, tx, tw, out=ty, workspace=tworkspace)
        cases |= _facades("torch", (tx, tw, ty, tworkspace), options, handle)
    except ImportError:
        pass
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(60):
        for name, case in cases.items():
            case()
            cupy.cuda.runtime.deviceSynchronize()
            samples[name] += timed(case, 100)
            cupy.cuda.runtime.deviceSynchronize()
    result: dict[str, Any] = {name: percentiles(values) for name, values in samples.items()}
    reference = result["bare_rawkernel"]["median_us"]
    for name in samples:
        result[name]["ratio_to_bare"] = result[name]["median_us"] / reference
    for name in samples:
        library = name.rpartition("_")[2]
        if name.startswith(("convolution", "bound")):
            run = result[f"run_solution_{library}"]["median_us"]
            result[name]["over_run_solution_us"] = result[name]["median_us"] - run
    result["kernels_a_run"] = len(solution.runner.prepare().solution.steps)
    return result


def _facades(
    library: str, arrays: tuple[Any, ...], options: miofind.FindOptions, handle: miofind.Handle
) -> dict[str, Callable[[], Any]]:
    """The calls over run_solution, of the problem of PROBLEM, with out and workspace; the handle is the default one."""
    x, w, y, workspace = arrays
    bound = miofind.Convolution.of(x, w, padding=1, options=options, handle=handle)
    return {
        f"convolution_{library}": lambda: miofind.convolution(
            x, w, padding=1, options=options, handle=handle, out=y, workspace=workspace
        ),
        f"convolution_without_handle_{library}": lambda: miofind.convolution(
            x, w, padding=1, options=options, out=y, workspace=workspace
        ),
        f"bound_{library}": lambda: bound(x, w, out=y, workspace=workspace),
    }


FIRST_RESULT = """
import time
started = time.perf_counter()
import cupy
import_cupy = time.perf_counter()
import miofind
call, options = miofind.convolution, miofind.FindOptions(only=("ConvDirectTiled",))
import_miofind = time.perf_counter()
cupy.zeros(1)
cupy.cuda.runtime.deviceSynchronize()
x, w = cupy.empty((1, 8, 16, 16), "float32"), cupy.empty((8, 8, 3, 3), "float32")
ready = time.perf_counter()
y = call(x, w, padding=1, options=options)
cupy.cuda.runtime.deviceSynchronize()
done = time.perf_counter()
print((done - ready) * 1e3, (import_miofind - import_cupy) * 1e3)
"""


def new_process(script: str, **environment: str) -> list[str]:
    """Words that a script prints in a new process, its modules' bytecode cached as an installation has it."""
    bytecode = {
        "PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir()) / "miofind-bytecode"),
        "PYTHONDONTWRITEBYTECODE": "",
    }
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | bytecode | environment)
    return run.stdout.split()


def first_result(count: int = 7) -> dict[str, float]:
    """First result of an own-kernel solution in a new process, FindDB and binary cache filled, after cupy.zeros(1)."""
    runs = [[float(word) for word in new_process(FIRST_RESULT)] for _ in range(count + 1)]
    results, imports = zip(*runs[1:], strict=True)
    return {
        "median_ms": statistics.median(results),
        "max_ms": max(results),
        "import_miofind_ms": statistics.median(imports),
    }


COLD_FIND = """
import time
import cupy
cupy.zeros(1)
cupy.cuda.runtime.deviceSynchronize()
import miofind
problem = miofind.ProblemDescription.convolution(
    x=(32, 64, 56, 56), w=(64, 64, 3, 3), padding=1, dtype="float16", layout="NHWC"
)
find = miofind.find_solutions
start = time.perf_counter()
solutions = find(problem)
print(time.perf_counter() - start, len(solutions), solutions[0].solver_id)
"""


def cold_find() -> dict[str, Any]:
    """A find of n32 c64 56x56 k64 3x3 float16 NHWC forward in a new process: caches empty, then binaries cached."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("empty_caches", "binaries_cached"):
            seconds, count, winner = new_process(
                COLD_FIND,
                MIOFIND_CACHE_DIR=f"{folder}/cache",
                MIOFIND_DB=f"{folder}/{name}.db",
                MIOFIND_SYSTEM_DB="",
            )
            figures[name] = {"seconds": float(seconds), "solutions": int(count), "winner": winner}
    return figures


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--json", type=script.output, help="write the figures to this file")
    parser.add_argument("--commit", default=commit(), help="of the code; by default git's")
    arguments = parser.parse_args()
    Device.cuda()  # raises where there is no GPU
    handle = miofind.default_handle()
    problem = miofind.ProblemDescription.convolution(**PROBLEM)
    figures = {
        "gpu": handle.device.name,
        "versions": versions(handle.device),
        "commit": arguments.commit,
        "command": "python benchmarks/overhead.py",
        "finddb_hit": finddb_hit() | {"bound_us": 100},
        "repeated_find": repeated_find(handle, problem) | {"bound_us": 5},
        "launch": launches(handle, problem) | {"bound_ratio": 1.6, "bound_over_run_solution_us": 2},
        "first_result": first_result() | {"bound_ms": 100},
        "cold_find": cold_find() | {"bound_s": {"empty_caches": 5, "binaries_cached": 1}},
    }
    print(json.dumps(figures, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    script.run(main)
