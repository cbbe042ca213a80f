"""What many writers and readers of one FindDB lose and wait.

    python benchmarks/finddb_concurrency.py --json benchmarks/results/finddb_concurrency.json

Needs no GPU. Each writer records batches of rows at a steady rate and each reader looks problems up, in processes of
their own that all open the file when none of them has made it. A wait is one call, the look-up or the record, from its
start to its end. Prints each figure beside the bound it is held to.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from multiprocessing.queues import Queue
from pathlib import Path

import script
from finddb_figures import DEVICE, VERSIONS, network_config, percentile, print_table, provenance, rows

from miofind.errors import DatabaseError
from miofind.finddb import ProblemKey, Store

BOUNDS = {"lost": 0, "errors": 0, "write_worst_ms": 1000.0, "read_worst_ms": 1000.0, "log_peak_mib": 64.0}
ROWS_A_PROBLEM = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    """What writers and readers of one file met, in milliseconds a call; `lost` counts acknowledged rows."""

    writers: int
    readers: int
    seconds: float
    rows_asked: int
    rows_acknowledged: int
    lost: int
    errors: int
    write_median_ms: float
    write_p99_ms: float
    write_worst_ms: float
    looked_up: int
    read_median_ms: float
    read_p99_ms: float
    read_worst_ms: float
    log_peak_mib: float
    load_average: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one process does: a call every `pace_s` for `seconds`, `batch` rows a record."""

    path: str
    number: int
    seconds: float
    pace_s: float
    batch: int


@dataclass(slots=True)
class Result:
    """What one process met; `acknowledged` names rows by problem and place."""

    acknowledged: list[tuple[int, int]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    took_ms: list[float] = field(default_factory=list)


def problem_number(writer: int, row: int) -> int:
    """Number of the problem that a writer's n-th row belongs to."""
    return writer * 1_000_000 + row // ROWS_A_PROBLEM


def write(task: Task, start_at: float, results: Queue[Result]) -> None:
    """Record batch after batch; a process that is late makes up for it."""
    result, written = Result(), 0
    with Store(task.path) as store:
        while (due := start_at + written / task.batch * task.pace_s) < start_at + task.seconds:
            time.sleep(max(0.0, due - time.time()))
            number, first = problem_number(task.number, written), written % ROWS_A_PROBLEM
            batch = rows(random.Random(written), ROWS_A_PROBLEM)[first : first + task.batch]
            start = time.perf_counter()
            try:
                store.record(DEVICE, network_config(number), batch, environment=VERSIONS)
                result.acknowledged += [(number, first + place) for place in range(len(batch))]
            except DatabaseError as error:
                result.errors.append(str(error))
            result.took_ms.append((time.perf_counter() - start) * 1e3)
            written += task.batch
    results.put(result)


def read(task: Task, start_at: float, results: Queue[Result]) -> None:
    """Look up problems that some writer is at."""
    result, rng, calls = Result(), random.Random(task.number), 0
    time.sleep(max(0.0, start_at - time.time()))
    with Store(task.path) as store:
        while (due := start_at + calls * task.pace_s) < start_at + task.seconds:
            time.sleep(max(0.0, due - time.time()))
            reached = max(1, int((time.time() - start_at) / task.pace_s) * task.batch)
            number = problem_number(rng.randrange(16), rng.randrange(reached))
            start = time.perf_counter()
            try:
                answer = store.answer(DEVICE, network_config(number))
                if answer is not None:
                    tuple(answer.rows)
            except DatabaseError as error:
                result.errors.append(str(error))
            result.took_ms.append((time.perf_counter() - start) * 1e3)
            calls += 1
    results.put(result)


def crowd(path: Path, arguments: argparse.Namespace) -> Concurrency:
    """Run the processes, watch the log, and see what the file holds in the end."""
    context = multiprocessing.get_context("spawn")
    written, answered = context.Queue(), context.Queue()
    count = max(arguments.writers, arguments.readers)
    pace_s = arguments.batch / arguments.rate
    tasks = [
        Task(path=str(path), number=number, seconds=arguments.seconds, pace_s=pace_s, batch=arguments.batch)
        for number in range(count)
    ]
    start_at = time.time() + arguments.start_s
    processes = [context.Process(target=write, args=(task, start_at, written)) for task in tasks[: arguments.writers]]
    processes += [context.Process(target=read, args=(task, start_at, answered)) for task in tasks[: arguments.readers]]
    for process in processes:
        process.start()
    log, log_peak = path.with_name(path.name + "-wal"), 0
    while written.qsize() + answered.qsize() < len(processes) and any(process.is_alive() for process in processes):
        log_peak = max(log_peak, log.stat().st_size if log.exists() else 0)
        time.sleep(0.01)
    writes = [written.get() for _ in range(arguments.writers)]
    reads = [answered.get() for _ in range(arguments.readers)]
    seconds = time.time() - start_at
    for process in processes:
        process.join()
    return _summary(path, writes, reads, seconds, log_peak, arguments)


def _summary(
    path: Path, writes: list[Result], reads: list[Result], seconds: float, log_peak: int, arguments: argparse.Namespace
) -> Concurrency:
    acknowledged = {name for result in writes for name in result.acknowledged}
    for error in sorted({error for result in writes + reads for error in result.errors}):
        print(f"error: {error}")
    write_ms = [took for result in writes for took in result.took_ms]
    read_ms = [took for result in reads for took in result.took_ms] or [0.0]
    return Concurrency(
        writers=len(writes),
        readers=len(reads),
        seconds=seconds,
        rows_asked=int(arguments.writers * arguments.rate * arguments.seconds),
        rows_acknowledged=len(acknowledged),
        lost=len(acknowledged - stored_rows(path)),
        errors=sum(len(result.errors) for result in writes + reads),
        write_median_ms=statistics.median(write_ms),
        write_p99_ms=percentile(write_ms, 99),
        write_worst_ms=max(write_ms),
        looked_up=len(read_ms),
        read_median_ms=statistics.median(read_ms),
        read_p99_ms=percentile(read_ms, 99),
        read_worst_ms=max(read_ms),
        log_peak_mib=log_peak / 2**20,
        load_average=os.getloadavg()[0],
    )


def stored_rows(path: Path) -> set[tuple[int, int]]:
    """What the file holds, by problem and place; it must be sound."""
    with Store(path) as store:
        findings = store.check()
        if findings:
            raise SystemExit(f"the file is damaged: {findings[0]}")
        return {(_number(key), json.loads(row.config)["place"]) for key, row in store.rows()}


def _number(key: ProblemKey) -> int:
    return int(key.network_config.split("-c")[1].split("-")[0])


def main() -> None:
    """Run, print the figures, and write them where asked."""
    parser = script.parser(__doc__)
    parser.add_argument("--writers", type=script.count, default=16)
    parser.add_argument("--readers", type=script.at_least(0), default=16)
    parser.add_argument("--seconds", type=script.seconds, default=60.0)
    parser.add_argument("--rate", type=script.at_least(0.001), default=100.0, help="rows a second of each writer")
    parser.add_argument(
        "--batch", type=script.count, default=10, help="rows a record; a reader looks up as often as one writes"
    )
    parser.add_argument("--start-s", type=script.seconds, default=15.0, help="seconds the processes have to start")
    parser.add_argument("--json", type=script.output, help="file the figures are written to")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = asdict(crowd(Path(folder) / "crowd.db", arguments))
    print_table(figures, BOUNDS)
    if arguments.json:
        report = provenance() | {"concurrency": figures, "bounds": BOUNDS}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    script.run(main)
