"""The whole product against PyTorch in float16: what a find of all solvers answers, from the shipped FindDB.

    python benchmarks/whole_product.py --gpus 4 --stop-after 130 && python benchmarks/document.py

Times the suite `yardstick` in both layouts and all directions: NHWC against PyTorch in channels_last, NCHW against its
default. Each GPU has a process of its own (CUDA_VISIBLE_DEVICES) for its share of the problems. The files of --folder
keep what was timed: the same command goes on with what is left, and begins anew where they are of another commit.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import figures
import script
from commit import commit

import miofind
from miofind.bench.ceilings import measure_ceilings
from miofind.bench.comparison import BenchRow, bench_row, class_means
from miofind.bench.rivals import Rival
from miofind.cli.bench import bench_versions, means_json, row_json
from miofind.compiler import BinaryCache, Compiler
from miofind.core.problem import Direction, Layout, ProblemDescription
from miofind.device.device import Device, cuda_device_count
from miofind.errors import MiofindError, NoDeviceError
from miofind.finddb import MEMORY
from miofind.options import FindOptions
from miofind.solver.steps import KernelStep
from miofind.suites import SuiteProblem, load_suite

SUITE, DTYPE = "yardstick", "float16"
LAYOUTS = (Layout.NHWC, Layout.NCHW)
CHUNK = 96
"""Problems whose kernels are compiled before they are timed: no compiler works beside what is timed."""

GRACE_S = 20.0
"""What a share may take beyond --stop-after: PyTorch tries every algorithm of a problem before it answers."""


def entries() -> list[SuiteProblem]:
    """All problems, in the order of the files that keep them."""
    suite = load_suite(SUITE)
    return [
        entry
        for layout in LAYOUTS
        for direction in Direction
        for entry in suite.problems(dtype=DTYPE, layout=layout, directions=[direction])
    ]


def file_of(problem: ProblemDescription, gpu: str) -> str:
    """The name of the file that keeps a problem's row."""
    layout, device = problem.x.layout.value.lower(), gpu.removeprefix("NVIDIA ").lower().replace(" ", "_")
    return f"{figures.WHOLE}_{DTYPE}_{layout}_{problem.direction.value}_{device}.json"


def kept_rows(folder: Path, of: str) -> dict[str, dict[str, Any]]:
    """The rows of a folder's files that are of a commit, by network_config; a row that failed is tried again."""
    found = {}
    for path in sorted(folder.glob(f"{figures.WHOLE}_*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["commit"] == of:
            found |= {row["network_config"]: row for row in content["rows"] if row["ratio"] is not None}
    return found


def time_share(arguments: argparse.Namespace) -> None:
    """Time a share of the problems on this process's GPU; a line of JSON for each, and one of what took part."""
    deadline = time.monotonic() + arguments.stop_after
    first, every = arguments.share
    known = kept_rows(arguments.folder, arguments.commit)
    left = [entry for entry in entries() if entry.problem.network_config not in known][first::every]
    with (
        miofind.Handle(Device.cuda(), database=MEMORY, compiler=Compiler(BinaryCache())) as handle,
        arguments.rows.open("w", encoding="utf-8") as file,
    ):
        for row in timed(left, handle, deadline):
            told = {"gpu": handle.device.name, "versions": bench_versions(handle.device), "row": row_json(row)}
            print(json.dumps(told, allow_nan=False), file=file, flush=True)


def timed(left: Sequence[SuiteProblem], handle: miofind.Handle, deadline: float) -> Iterator[BenchRow]:
    """Rows of problems until it is late; a chunk's kernels are compiled before its first problem is timed."""
    options, ceilings = FindOptions(), measure_ceilings(handle.device)
    for start in range(0, len(left), CHUNK):
        chunk = left[start : start + CHUNK]
        steps = [step for entry in chunk if time.monotonic() < deadline for step in best_steps(entry, handle)]
        for _ in handle.compiler.build_all(steps, handle.device.arch):
            pass
        for entry in chunk:
            if time.monotonic() >= deadline:
                return
            yield bench_row(entry, handle, options, ceilings, against=[Rival.TORCH])


def best_steps(entry: SuiteProblem, handle: miofind.Handle) -> tuple[KernelStep, ...]:
    """The kernels of what a find answers, () where it fails, as timing will say."""
    try:
        best = miofind.find_solutions(entry.problem, handle=handle)[0]
        solver = handle.registry.named(best.solver_id)
        return solver.solution(entry.problem, handle.device, best.config).kernels
    except MiofindError:
        return ()


def time_on_gpus(arguments: argparse.Namespace) -> None:
    """Have each GPU time its share, and add the rows to the folder's files."""
    told, ends = run_shares(arguments, share_command, GRACE_S)
    left = merge(told, arguments.folder, arguments.commit)
    print(f"{len(told)} problems timed, {left} left in {arguments.folder}")
    if any(ends):
        sys.exit(f"error: processes ended with {', '.join(map(str, ends))}")


def run_shares(
    arguments: argparse.Namespace, command: Callable[[argparse.Namespace, int, Path], list[str]], grace_s: float
) -> tuple[list[dict[str, Any]], list[int]]:
    """What the processes wrote, one on each of --gpus, and how they ended.

    Args:
        command: that of a process, by its number and the file that it writes.
        grace_s: what a process may take beyond --stop-after.
    """
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    gpus = visible or list(map(str, range(cuda_device_count())))
    if len(gpus) < arguments.gpus:
        raise NoDeviceError(f"--gpus {arguments.gpus}: this machine has {len(gpus)}")
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.jsonl" for number in range(arguments.gpus)]
        children = [
            subprocess.Popen(command(arguments, number, file), env=os.environ | {"CUDA_VISIBLE_DEVICES": gpus[number]})
            for number, file in enumerate(files)
        ]
        ends = awaited(children, time.monotonic() + arguments.stop_after + grace_s)
        return [line for file in files for line in whole_lines(file)], ends


def share_command(arguments: argparse.Namespace, number: int, file: Path) -> list[str]:
    """The command of one GPU's process."""
    words = ["--share", f"{number + 1}/{arguments.gpus}", "--rows", str(file), "--folder", str(arguments.folder)]
    words += ["--stop-after", str(arguments.stop_after), "--commit", arguments.commit]
    return [sys.executable, str(Path(__file__)), *words]


def awaited(children: Sequence[subprocess.Popen[bytes]], deadline: float) -> list[int]:
    """How the processes ended; 0 of one that was stopped because it was late: what it timed is kept."""
    ends = []
    for child in children:
        try:
            ends.append(child.wait(max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            ends.append(0)
    return ends


def whole_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, without a last line that was cut off."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def merge(told: Iterable[Mapping[str, Any]], folder: Path, of: str) -> int:
    """Add rows to those of the folder that are of the same commit, and write its files; returns how many are left."""
    told = list(told)
    rows = kept_rows(folder, of) | {line["row"]["network_config"]: line["row"] for line in told}
    if told:
        files: dict[str, list[dict[str, Any]]] = {}
        for entry in entries():
            if (row := rows.get(entry.problem.network_config)) is not None:
                files.setdefault(file_of(entry.problem, told[0]["gpu"]), []).append(row)
        for name, some in files.items():
            text = json.dumps(content_of(some, told[0], of), indent=1, allow_nan=False)
            (folder / name).write_text(text + "\n", encoding="utf-8")
    return sum(entry.problem.network_config not in rows for entry in entries())


def content_of(rows: Sequence[dict[str, Any]], told: Mapping[str, Any], of: str) -> dict[str, Any]:
    """What a file says: provenance, means by class, rows."""
    return {
        "gpu": told["gpu"],
        "commit": of,
        "command": shlex.join(["python", *sys.argv]),
        "versions": told["versions"],
        "means": means_json(class_means(map(bench_row_of, rows))),
        "rows": rows,
    }


def bench_row_of(row: Mapping[str, Any]) -> BenchRow:
    """The row of a benchmark that a file keeps, without its solution."""
    problem = ProblemDescription.from_network_config(row["network_config"])
    return BenchRow(
        entry=SuiteProblem(problem=problem, suite=row["suite"], layer=row["layer"], count=1),
        time_ms=row["time_ms"],
        rival_ms=row["torch_ms"],
        floor_ms=row["floor_ms"],
        message=row["message"],
    )


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--gpus", type=script.count, default=1, help="GPUs of this host, a process each")
    parser.add_argument("--stop-after", type=script.seconds, default=130.0, help="begin no problem after so long")
    parser.add_argument("--folder", type=Path, default=figures.RESULTS, help="where the files of figures are")
    parser.add_argument("--commit", default=commit(), help="of the code; by default git's")
    parser.add_argument("--share", type=script.share, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=script.output, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.folder.is_dir():
        parser.error(f"--folder: {str(arguments.folder)!r} is no folder")
    if not arguments.commit:
        parser.error("--commit: this checkout has no git to ask: name the commit of the code")
    if arguments.share:
        time_share(arguments)
    else:
        time_on_gpus(arguments)


if __name__ == "__main__":
    script.run(main)
