"""Networks of fused convolutions: miofind's best against one pass after cuDNN's, eager PyTorch and cuDNN's own fusion.

    python benchmarks/fused_networks.py --gpus 4 --stop-after 500
    python benchmarks/fused_networks.py --networks resnet50 --dtypes float16 --layouts NHWC --batches 32

Times the suites `*_fused` and the passes of `resnet50_training`, the most telling case first. What the FindDB does not
answer is found first, within --budget seconds of measuring a problem, and recorded in --db; cuDNN's sides are the
fastest of what its heuristics propose, or of a search of --search-cudnn seconds each. Each GPU has a process of its own
(CUDA_VISIBLE_DEVICES) for its share. The files of --folder keep what was timed: the same command goes on with what is
left. Each row names its commit; what is asked for and is of another one is timed anew and takes its row's place. The
last lines are a table of the networks: sums of a forward pass in milliseconds, and the others' time over miofind's by
the sums (in brackets: the geometric mean over the distinct layers).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import figures
import script
from commit import commit
from whole_product import run_shares

import miofind
from miofind.bench.ceilings import measure_ceilings
from miofind.bench.comparison import BenchRow, NetworkTimes, bench, network_times
from miofind.bench.rivals import Rival
from miofind.cli.bench import bench_versions, network_json, row_json
from miofind.compiler import CompilePool
from miofind.compiler.build import processors
from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.finddb import MEMORY
from miofind.options import FindOptions
from miofind.suites import SuiteProblem, load_suite, suite_names

NAME = figures.FUSED
ENDING = "_fused"
NETWORKS = tuple(name.removesuffix(ENDING) for name in suite_names() if name.endswith(ENDING))
TRAINING = {f"resnet50_training_{direction}": direction for direction in Direction}
"""The passes of a training step, by what they are called."""
DTYPES = (DataType.FLOAT16, DataType.BFLOAT16)
LAYOUTS = (Layout.NHWC, Layout.NCHW)
USUAL_BATCH = 32
BATCHES = (str(USUAL_BATCH), "1", "64")
AGAINST = (Rival.ONE_PASS, Rival.TORCH, Rival.CUDNN)

LARGEST_BATCH = {"sd_vae_decoder": 8}
"""Of networks whose activations would not fit otherwise: it stands for the usual batch; larger ones leave them out."""

CHUNK = 12
"""Problems that are found before they are timed: no compiler works beside what is timed."""

GRACE_S = 60.0
"""What a share may take beyond --stop-after: the find, or the row, that it is at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One form of the networks."""

    dtype: DataType
    layout: Layout
    batch: int

    def file_of(self, gpu: str) -> str:
        """The name of the file that keeps its rows."""
        device = gpu.removeprefix("NVIDIA ").lower().replace(" ", "_")
        return f"{NAME}_{self.dtype.value}_{self.layout.value.lower()}_b{self.batch}_{device}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One layer of a network in one case."""

    case: Case
    entry: SuiteProblem

    @property
    def key(self) -> str:
        """What names its row: one problem may be a layer of several networks, as often as each has it."""
        return f"{self.entry.suite} {self.entry.problem.network_config}"


class Late(Exception):
    """There is no time left."""


def asked(arguments: argparse.Namespace) -> list[Asked]:
    """All layers in all cases, case by case."""
    cases = [
        Case(dtype=dtype, layout=layout, batch=int(batch))
        for layout in arguments.layouts
        for dtype in arguments.dtypes
        for batch in arguments.batches
    ]
    return [
        Asked(case=case, entry=entry)
        for case in cases
        for network in arguments.networks
        for entry in layers_of(network, case)
    ]


@functools.cache
def layers_of(network: str, case: Case) -> tuple[SuiteProblem, ...]:
    """A network's layers in a case; those of a training step's pass that have an epilogue, by its name for a suite."""
    largest = LARGEST_BATCH.get(network, case.batch)
    if largest < case.batch and case.batch != USUAL_BATCH:
        return ()
    batch = min(case.batch, largest)
    if network in TRAINING:
        step = load_suite("resnet50_training").problems(batch=batch, dtype=case.dtype, layout=case.layout)
        of_pass = (entry for entry in step if entry.problem.direction is TRAINING[network])
        return tuple(replace(entry, suite=network) for entry in of_pass if entry.problem.epilogue)
    return tuple(load_suite(network + ENDING).problems(batch=batch, dtype=case.dtype, layout=case.layout))


def suite_of(network: str) -> str:
    """What rows call a network."""
    return network if network in TRAINING else network + ENDING


def kept_files(folder: Path, gpu: str) -> list[dict[str, Any]]:
    """What a folder's files of a GPU say."""
    files = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(f"{NAME}_*.json")))
    return [content for content in files if content["gpu"] == gpu]


def kept_rows(files: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The rows of files by key, each with its commit."""
    return {key_of(row): {"commit": content["commit"]} | row for content in files for row in content["rows"]}


def kept_runs(files: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By commit how the rows of files were timed."""
    runs: dict[str, dict[str, Any]] = {}
    for content in files:
        runs |= content.get("earlier", {})
        runs[content["commit"]] = {name: content[name] for name in ("command", "versions")}
    return runs


def timed_keys(rows: Mapping[str, Mapping[str, Any]], of: str) -> set[str]:
    """The keys of the rows that are of a commit; a row without a time of ours is tried again."""
    return {key for key, row in rows.items() if row["commit"] == of and row["time_ms"] is not None}


def key_of(row: Mapping[str, Any]) -> str:
    """The key of a file's row."""
    return f"{row['suite']} {row['network_config']}"


def time_share(arguments: argparse.Namespace) -> None:
    """Time a share of the layers on this process's GPU; a line of JSON for each."""
    deadline = time.monotonic() + arguments.stop_after
    first, every = arguments.share
    with (
        miofind.Handle(Device.cuda(), database=arguments.db or MEMORY) as handle,
        arguments.rows.open("w", encoding="utf-8") as file,
    ):
        known = timed_keys(kept_rows(kept_files(arguments.folder, handle.device.name)), arguments.commit)
        left = [each for each in asked(arguments) if each.key not in known][first::every]

        def take(row: BenchRow) -> None:
            told = {"gpu": handle.device.name, "versions": bench_versions(handle.device), "row": row_json(row)}
            print(json.dumps(told, allow_nan=False), file=file, flush=True)

        timing = Timing(
            handle=handle,
            options=FindOptions(time_budget_s=arguments.budget),
            rival_options=rival_options(arguments.search_cudnn),
            deadline=deadline,
            workers=processors() // every,
        )
        with contextlib.suppress(Late):
            time_all([each.entry for each in left], timing, take)


def rival_options(search_s: float) -> FindOptions:
    """How cuDNN's sides are found: of what its heuristics propose, or by a search of so many seconds."""
    return FindOptions(time_budget_s=search_s, tuning=True) if search_s else FindOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """With what layers are found and timed.

    Attributes:
        options: of a find.
        rival_options: of a find of cuDNN's sides.
        deadline: when no further layer begins, by time.monotonic.
        workers: compiling processes.
    """

    handle: miofind.Handle
    options: FindOptions
    rival_options: FindOptions
    deadline: float
    workers: int


def time_all(entries: Sequence[SuiteProblem], timing: Timing, take: Callable[[BenchRow], None]) -> None:
    """Find and time layers, a chunk after the other.

    Raises:
        Late: there is no time left.
    """
    ceilings = measure_ceilings(timing.handle.device)

    def check() -> None:
        if time.monotonic() >= timing.deadline:
            raise Late

    def take_and_check(row: BenchRow) -> None:
        take(row)
        check()

    for start in range(0, len(entries), CHUNK):
        check()
        with CompilePool(workers=max(1, timing.workers)) as pool:
            bench(
                entries[start : start + CHUNK],
                timing.handle,
                timing.options,
                against=AGAINST,
                rival_options=timing.rival_options,
                ceilings=ceilings,
                pool=pool,
                on_found=check,
                on_row=take_and_check,
            )


def share_command(arguments: argparse.Namespace, number: int, file: Path) -> list[str]:
    """The command of one GPU's process."""
    words = ["--share", f"{number + 1}/{arguments.gpus}", "--rows", str(file), "--folder", str(arguments.folder)]
    words += ["--stop-after", str(arguments.stop_after)]
    words += ["--budget", str(arguments.budget), "--search-cudnn", str(arguments.search_cudnn)]
    words += ["--commit", arguments.commit, *(["--db", str(arguments.db)] if arguments.db else [])]
    for name in ("networks", "dtypes", "layouts", "batches"):
        words += [f"--{name}", ",".join(getattr(arguments, name))]
    return [sys.executable, str(Path(__file__)), *words]


def merge(told: Sequence[Mapping[str, Any]], arguments: argparse.Namespace) -> int:
    """Put rows into the places of earlier ones in the files of their GPU; returns how many are left to be timed.

    A row without a time of ours takes no place of one that has it.
    """
    if not told:
        return len(asked(arguments))
    gpu = told[0]["gpu"]
    files = kept_files(arguments.folder, gpu)
    rows, runs, timed = kept_rows(files), kept_runs(files), set()
    for row in (line["row"] for line in told):
        if row["time_ms"] is not None or rows.get(key_of(row), row)["time_ms"] is None:
            rows[key_of(row)] = row | {"commit": arguments.commit}
            timed.add(key_of(row))
    layers = asked(argparse.Namespace(networks=(*NETWORKS, *TRAINING), dtypes=DTYPES, layouts=LAYOUTS, batches=BATCHES))
    cases: dict[Case, list[dict[str, Any]]] = {}
    for each in layers:
        if each.key in rows:
            cases.setdefault(each.case, []).append(rows[each.key])
    for case, some in cases.items():
        if any(key_of(row) in timed for row in some):
            content = content_of(case, some, told[0], arguments, runs)
            text = json.dumps(content, indent=1, allow_nan=False)
            (arguments.folder / case.file_of(gpu)).write_text(text + "\n", encoding="utf-8")
    of_commit = timed_keys(rows, arguments.commit)
    return sum(each.key not in of_commit for each in asked(arguments))


def content_of(
    case: Case,
    rows: Sequence[dict[str, Any]],
    told: Mapping[str, Any],
    arguments: argparse.Namespace,
    runs: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """What a file says: provenance, that of rows of earlier commits, networks, rows."""
    earlier = {row["commit"] for row in rows} - {arguments.commit}
    return {
        "gpu": told["gpu"],
        "commit": arguments.commit,
        "command": f"python benchmarks/{NAME}.py --budget {arguments.budget:g} "
        f"--search-cudnn {arguments.search_cudnn:g}",
        "versions": told["versions"],
        "earlier": {commit: runs[commit] for commit in sorted(earlier)},
        "networks": [network_json(network) for network in networks_of(case, rows)],
        "rows": list(rows),
    }


def networks_of(case: Case, rows: Iterable[Mapping[str, Any]]) -> list[NetworkTimes]:
    """The networks of a case, whose sums are None where a layer is missing."""
    rows = list(rows)
    known = {key_of(row) for row in rows}
    there = {row["suite"] for row in rows}
    names = [network for network in (*NETWORKS, *TRAINING) if suite_of(network) in there]
    arguments = argparse.Namespace(networks=names, dtypes=[case.dtype], layouts=[case.layout], batches=[case.batch])
    missing = [BenchRow(entry=each.entry) for each in asked(arguments) if each.key not in known]
    return network_times([*map(bench_row_of, rows), *missing], AGAINST)


def bench_row_of(row: Mapping[str, Any]) -> BenchRow:
    """The row of a benchmark that a file keeps, without its solution."""
    problem = ProblemDescription.from_network_config(row["network_config"])
    return BenchRow(
        entry=SuiteProblem(problem=problem, suite=row["suite"], layer=row["layer"], count=row["count"]),
        time_ms=row["time_ms"],
        rival_ms=row["torch_ms"],
        one_pass_ms=row["one_pass_ms"],
        cudnn_ms=row["cudnn_ms"],
        floor_ms=row["floor_ms"],
        message=row["message"],
    )


def table(arguments: argparse.Namespace) -> str:
    """The networks of the folder's files of which all rows are of the commit."""
    lines = [f"{'':36}{'ours':>9}" + "".join(f"{rival:>9}{'ratio':>15}" for rival in AGAINST)]
    for path in sorted(arguments.folder.glob(f"{NAME}_*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        others = {row["suite"] for row in content["rows"] if row.get("commit", content["commit"]) != arguments.commit}
        whole = [network for network in content["networks"] if network["suite"] not in others]
        if not whole:
            continue
        lines.append(path.stem.removeprefix(f"{NAME}_"))
        for network in whole:
            name = network["suite"].removesuffix(ENDING)
            batch = f" (batch {LARGEST_BATCH[name]})" if name in LARGEST_BATCH and "_b32_" in path.stem else ""
            cells = [f"  {name + batch:34}{number(network['sums_ms']['miofind']):>9}"]
            for rival in AGAINST:
                ratio = f"{number(network['sum_ratios'][rival])} ({number(network['mean_ratios'][rival])})"
                cells.append(f"{number(network['sums_ms'][rival]):>9}{ratio:>15}")
            lines.append("".join(cells))
    return "\n".join(lines)


def number(value: float | None) -> str:
    """Three digits behind the point, "-" for none."""
    return "-" if value is None else f"{value:.3f}"


def main() -> None:
    parser = script.parser(__doc__)
    networks = (*NETWORKS, *TRAINING)
    parser.add_argument("--networks", type=script.several(networks), default=networks, help=",".join(networks))
    parser.add_argument("--dtypes", type=script.several(DTYPES), default=DTYPES, help=",".join(DTYPES))
    parser.add_argument("--layouts", type=script.several(LAYOUTS), default=LAYOUTS, help=",".join(LAYOUTS))
    parser.add_argument("--batches", type=script.several(BATCHES), default=BATCHES[:2], help=",".join(BATCHES))
    parser.add_argument("--budget", type=script.seconds, default=10.0, help="seconds of measuring in a problem's find")
    parser.add_argument("--search-cudnn", type=script.seconds, default=0.0, help="seconds of a search of its engines")
    parser.add_argument("--db", type=Path, help="FindDB that what is found is recorded in; by default none")
    parser.add_argument("--gpus", type=script.count, default=1, help="GPUs of this host, a process each")
    parser.add_argument("--stop-after", type=script.seconds, default=500.0, help="begin no problem after so long")
    parser.add_argument("--folder", type=script.folder, default=figures.RESULTS, help="where the files of figures are")
    parser.add_argument("--commit", default=commit(), help="of the code; by default git's")
    parser.add_argument("--table", action="store_true", help="time nothing, print the table of what is kept")
    parser.add_argument("--share", type=script.share, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=script.output, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.folder.is_dir():
        parser.error(f"--folder: {str(arguments.folder)!r} is no folder")
    if not arguments.commit:
        parser.error("--commit: this checkout has no git to ask: name the commit of the code")
    if arguments.share:
        time_share(arguments)
        return
    ends = []
    if not arguments.table:
        told, ends = run_shares(arguments, share_command, GRACE_S)
        print(f"{len(told)} problems timed, {merge(told, arguments)} left in {arguments.folder}")
    print(table(arguments))
    if any(ends):
        sys.exit(f"error: processes ended with {', '.join(map(str, ends))}")


if __name__ == "__main__":
    script.run(main)
