"""Time of a FindDB look-up, and what many writers and readers of one file lose and wait.

python benchmarks/finddb_concurrency.py
python benchmarks/finddb_concurrency.py --writers 16 --readers 16 --records 500 --pace 0
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing.queues import Queue
from pathlib import Path

from miofind.errors import DatabaseError
from miofind.finddb import Answer, History, Row, Scope, Store, environment_id

DEVICE = "NVIDIA H200|132|9.0|"
VERSIONS = {"driver": "13.0", "miofind": "0.1.0", "nvrtc": "13.0.88"}
SOLVERS = {f"ConvSolver{index:02d}": 1 for index in range(10)}
CONFIGS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Microseconds of look-ups in a file of many problems, of which none is asked twice."""

    problems: int
    rows_an_answer: int
    file_mib: float
    best_median_us: float
    best_p99_us: float
    all_rows_median_us: float
    miss_median_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    """What writers and readers of one file met, in milliseconds a record or look-up."""

    writers: int
    readers: int
    acknowledged: int
    lost: int
    errors: int
    seconds: float
    write_median_ms: float
    write_p99_ms: float
    write_worst_ms: float
    read_median_ms: float
    read_worst_ms: float
    log_peak_mib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What one process does."""

    path: str
    number: int
    records: int
    pace_s: float
    problems: int


@dataclass(slots=True)
class Result:
    """What one process met."""

    acknowledged: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    took_ms: list[float] = field(default_factory=list)


def network_config(number: int) -> str:
    """A key of the usual length."""
    return f"2d-fwd-n32-c{number}-h56x56-k64-y3x3-pad1x1-nhwc-nhwc-nhwc-f16-f16-f16"


def rows(rng: random.Random) -> tuple[Row, ...]:
    """Measurements of some configurations of every solver."""
    return tuple(
        Row(
            solver_id=solver_id,
            solver_version=version,
            config=f'{{"block_k":32,"block_m":128,"block_n":{16 << index},"stages":3}}',
            status="ok",
            algorithm="implicit_gemm",
            library="plain",
            source_hash=f"{rng.getrandbits(64):016x}",
            kernel_hash=f"{rng.getrandbits(64):016x}",
            time_ms=rng.uniform(0.01, 2.0),
            min_ms=0.009,
            p20_ms=0.0095,
            p80_ms=0.0131,
            samples=45,
            protocol="cuda-1",
            workspace_bytes=rng.choice((0, 1 << 20, 1 << 24)),
            max_error=rng.uniform(1e-5, 1e-4),
        )
        for solver_id, version in SOLVERS.items()
        for index in range(CONFIGS)
    )


def histories(numbers: Iterable[int]) -> Iterator[History]:
    """Problems with rows and a scope each."""
    environment = environment_id(VERSIONS)
    created_at = "2026-01-01T00:00:00.000000Z"
    for number in numbers:
        measured = rows(random.Random(number))
        yield History(
            device=DEVICE,
            network_config=network_config(number),
            rows=tuple(replace(row, created_at=created_at, environment=environment) for row in measured),
            scopes=(Scope(solvers=SOLVERS, created_at=created_at),),
            environments={environment: VERSIONS},
        )


def look_up(folder: Path, problems: int, asked: int = 2000) -> Lookup:
    """Look-ups of distinct problems: for the best row alone, for all rows of each answer, and in vain."""
    with Store(folder / "lookup.db") as store:
        for start in range(0, problems, 500):
            store.add(histories(range(start, min(start + 500, problems))))
    with Store(folder / "lookup.db") as store:
        order = random.Random(1).sample(range(problems), min(asked, problems))
        first = _found(store, order[0])
        best = [_us(partial(_best_row, store, number)) for number in order]
        every = [_us(partial(_all_rows, store, number)) for number in order]
        misses = [_us(partial(store.answer, DEVICE, network_config(problems + number))) for number in order]
        return Lookup(
            problems=problems,
            rows_an_answer=len(first.rows),
            file_mib=store.stats().file_bytes / 2**20,
            best_median_us=statistics.median(best),
            best_p99_us=_percentile(best, 99),
            all_rows_median_us=statistics.median(every),
            miss_median_us=statistics.median(misses),
        )


def write(task: Task, results: Queue[Result]) -> None:
    """Record problems one by one; the acknowledged ones are reported."""
    result = Result()
    with Store(task.path) as store:
        for index in range(task.records):
            number = task.number * task.records + index
            start = time.perf_counter()
            try:
                store.record(DEVICE, network_config(number), rows(random.Random(number)), environment=VERSIONS)
                result.acknowledged.append(number)
            except DatabaseError as error:
                result.errors.append(str(error))
            result.took_ms.append((time.perf_counter() - start) * 1e3)
            time.sleep(task.pace_s)
    results.put(result)


def read(task: Task, results: Queue[Result]) -> None:
    """Look up problems at random."""
    result = Result()
    rng = random.Random(task.number)
    with Store(task.path) as store:
        for _ in range(task.records):
            number = rng.randrange(task.problems)
            start = time.perf_counter()
            try:
                store.answer(DEVICE, network_config(number))
            except DatabaseError as error:
                result.errors.append(str(error))
            result.took_ms.append((time.perf_counter() - start) * 1e3)
            time.sleep(task.pace_s)
    results.put(result)


def crowd(folder: Path, writers: int, readers: int, records: int, pace_s: float) -> Concurrency:
    """Processes that write and read one file, which none of them finds made."""
    path = folder / "crowd.db"
    context = multiprocessing.get_context("spawn")
    written, answered = context.Queue(), context.Queue()
    tasks = [
        Task(path=str(path), number=number, records=records, pace_s=pace_s, problems=writers * records)
        for number in range(max(writers, readers))
    ]
    processes = [context.Process(target=write, args=(task, written)) for task in tasks[:writers]]
    processes += [context.Process(target=read, args=(task, answered)) for task in tasks[:readers]]
    start = time.perf_counter()
    for process in processes:
        process.start()
    log_peak = 0
    while any(process.is_alive() for process in processes) and written.qsize() + answered.qsize() < len(processes):
        log = path.with_name(path.name + "-wal")
        log_peak = max(log_peak, log.stat().st_size if log.exists() else 0)
        time.sleep(0.05)
    writes = [written.get() for _ in range(writers)]
    reads = [answered.get() for _ in range(readers)]
    seconds = time.perf_counter() - start
    for process in processes:
        process.join()
    return _summary(path, writes, reads, seconds, log_peak)


def _summary(path: Path, writes: list[Result], reads: list[Result], seconds: float, log_peak: int) -> Concurrency:
    acknowledged = [number for result in writes for number in result.acknowledged]
    with Store(path) as store:
        stored = {key.network_config for key in store.problems()}
        findings = store.check()
    if findings:
        raise SystemExit(f"the file is damaged: {findings[0]}")
    write_ms = [took for result in writes for took in result.took_ms] or [0.0]
    read_ms = [took for result in reads for took in result.took_ms] or [0.0]
    return Concurrency(
        writers=len(writes),
        readers=len(reads),
        acknowledged=len(acknowledged),
        lost=sum(network_config(number) not in stored for number in acknowledged),
        errors=sum(len(result.errors) for result in writes + reads),
        seconds=seconds,
        write_median_ms=statistics.median(write_ms),
        write_p99_ms=_percentile(write_ms, 99),
        write_worst_ms=max(write_ms),
        read_median_ms=statistics.median(read_ms),
        read_worst_ms=max(read_ms),
        log_peak_mib=log_peak / 2**20,
    )


def _found(store: Store, number: int) -> Answer:
    answer = store.answer(DEVICE, network_config(number))
    if answer is None:
        raise SystemExit(f"problem {number} is missing")
    return answer


def _best_row(store: Store, number: int) -> Row:
    return _found(store, number).rows[0]


def _all_rows(store: Store, number: int) -> tuple[Row, ...]:
    return tuple(_found(store, number).rows)


def _us(function: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    function()
    return (time.perf_counter_ns() - start) / 1e3


def _percentile(samples: list[float], percent: int) -> float:
    return sorted(samples)[int(percent / 100 * (len(samples) - 1))]


def main() -> None:
    """Run both, print the figures, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=10_000, help="problems in the file that look-ups are timed on")
    parser.add_argument("--writers", type=int, default=16)
    parser.add_argument("--readers", type=int, default=16)
    parser.add_argument("--records", type=int, default=200, help="records a writer, and look-ups a reader")
    parser.add_argument("--pace", type=float, default=0.01, help="seconds each process rests after each of them")
    parser.add_argument("--json", type=Path, help="file the figures are written to")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lookup = look_up(Path(folder), arguments.problems)
        crowded = crowd(Path(folder), arguments.writers, arguments.readers, arguments.records, arguments.pace)
    figures = {
        "machine": {"python": platform.python_version(), "cpus": os.cpu_count()},
        "lookup": asdict(lookup),
        "concurrency": asdict(crowded),
    }
    for group, values in figures.items():
        for name, value in values.items():
            print(f"{group:12} {name:20} {value:.3f}" if isinstance(value, float) else f"{group:12} {name:20} {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
