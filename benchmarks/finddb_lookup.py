"""Time of a FindDB look-up in a file of a million problems, of opening the file, and the memory both take.

    python benchmarks/finddb_lookup.py --json benchmarks/results/finddb_lookup.json

Needs no GPU, some 7 GB of disk (--folder) and a few minutes. A look-up is the query and the decoding of the answer's
rows; none is asked twice. Each file is used by a process of its own, as a user's database and as a shipped one. Prints
median and p99 of each figure beside the bound it is held to.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import script
from finddb_figures import DEVICE, SOLVERS, VERSIONS, network_config, percentile, print_table, provenance, rows

from miofind.finddb import MEMORY, RankedRows, Scope, Store, environment_id, write_release
from miofind.finddb.packing import HistoryCodec

BOUNDS = {"median_us": 100.0, "opening_ms": 50.0}
CREATED_AT = "2026-01-01T00:00:00.000000Z"

_RECORDED = 20
"""Problems that a store records, enough for a release to have a dictionary."""


def fill(path: Path, problems: int, rows_an_answer: int, kind: str) -> None:
    """A file of many problems. All have the rows of one, which a store ranked and encoded: look-ups see no difference.

    SQLite copies them by itself: a store would take hours to check and rank as many.
    """
    with Store(MEMORY) as store:
        for number in range(_RECORDED):
            measured = [
                replace(row, created_at=CREATED_AT, environment=environment_id(VERSIONS))
                for row in rows(random.Random(number), rows_an_answer)
            ]
            scope = Scope(solvers=SOLVERS, created_at=CREATED_AT)
            store.record(DEVICE, network_config(number), measured, scope=scope, environment=VERSIONS)
        if kind == "shipped":
            write_release([store], path)
        else:
            with Store(path) as target:
                target.merge(store)
    key = network_config(0).split("-c0-")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for pragma in ("journal_mode=OFF", "synchronous=OFF", "cache_size=-500000", "temp_store=MEMORY"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute("BEGIN")
        connection.execute(
            "INSERT INTO problem (id, device_id, network_config) WITH RECURSIVE numbers(n) AS "
            "(SELECT ? UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < ?) "
            "SELECT n + 1, 1, ? || '-c' || n || '-' || ? FROM numbers",
            (_RECORDED, problems, *key),
        )
        if kind == "shipped":
            _pack_answers(connection)
        for table in () if kind == "shipped" else ("measurement", "scope", "answer"):
            columns = [name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")]
            taken = ["p.id" if name == "problem_id" else f"t.{name}" for name in columns]
            connection.execute(
                f"INSERT INTO {table} ({', '.join(columns)}) SELECT {', '.join(taken)} "
                f"FROM problem p CROSS JOIN {table} t WHERE p.id > {_RECORDED} AND t.problem_id = 1"
            )
        connection.execute("COMMIT")
        connection.execute("PRAGMA journal_mode=DELETE")


def _pack_answers(connection: sqlite3.Connection) -> None:
    """Give each problem the first one's answer, under a checksum of its own."""
    (dictionary,) = connection.execute("SELECT value FROM meta WHERE key = 'dictionary'").fetchone()
    (payload,) = connection.execute("SELECT payload FROM answer WHERE problem_id = 1").fetchone()
    (first,) = connection.execute("SELECT network_config FROM problem WHERE id = 1").fetchone()
    packing = HistoryCodec(dictionary)
    text = packing.unpack(DEVICE, first, payload)
    connection.create_function("packed", 1, lambda key: packing.pack(DEVICE, key, text), deterministic=True)
    connection.execute(
        "INSERT INTO answer (problem_id, payload) SELECT id, packed(network_config) FROM problem WHERE id > ?",
        (_RECORDED,),
    )


def measure(path: Path, problems: int, lookups: int, kind: str) -> dict[str, float]:
    """Figures of one file; to be called in a process that did nothing else."""
    before_mib = resident_mib()
    start = time.perf_counter()
    store = Store(path, read_only=kind == "shipped").open()
    opening_ms = (time.perf_counter() - start) * 1e3
    order = random.Random(1).sample(range(problems), min(2 * lookups, problems))
    found = store.answer(DEVICE, network_config(order[0]))
    if found is None:
        raise SystemExit("a problem is missing")
    whole = [_us(lambda number=number: tuple(_rows(store, number))) for number in order[: len(order) // 2]]
    best = [_us(lambda number=number: _rows(store, number)[0]) for number in order[len(order) // 2 :]]
    missing = [_us(lambda number=number: store.answer(DEVICE, network_config(problems + number))) for number in order]
    return {
        "opening_ms": opening_ms,
        "median_us": statistics.median(whole),
        "p99_us": percentile(whole, 99),
        "best_row_median_us": statistics.median(best),
        "best_row_p99_us": percentile(best, 99),
        "miss_median_us": statistics.median(missing),
        "rows_an_answer": len(found.rows),
        "memory_grown_mib": resident_mib() - before_mib,
    }


def _rows(store: Store, number: int) -> RankedRows:
    answer = store.answer(DEVICE, network_config(number))
    assert answer is not None
    return answer.rows


def _us(function: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    function()
    return (time.perf_counter_ns() - start) / 1e3


def resident_mib() -> float:
    """Memory that the process holds now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def measured_apart(path: Path, problems: int, arguments: argparse.Namespace, kind: str) -> dict[str, float]:
    """`measure` in a fresh process."""
    command = [sys.executable, __file__, "--child", kind, "--problems", str(problems), "--folder", str(path)]
    told = subprocess.run([*command, "--lookups", str(arguments.lookups)], capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(told.stdout)
    return figures


def compare(folder: Path, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Figures of a small file and of a big one, each as a user's and as a shipped one."""
    figures = {}
    for problems in (arguments.small, arguments.problems):
        for kind in ("shipped", "user"):
            path = folder / "lookup.db"
            path.unlink(missing_ok=True)
            start = time.perf_counter()
            fill(path, problems, arguments.rows, kind)
            size_gib, took_s = path.stat().st_size / 2**30, time.perf_counter() - start
            if kind == "user":
                Store(path).open().close()  # gives it the log that a user's file has
            figures[f"{kind}, {problems} problems"] = found = measured_apart(path, problems, arguments, kind)
            print(f"\n{kind}, {problems} problems, {size_gib:.2f} GiB in {took_s:.0f} s")
            print_table(found, BOUNDS)
    return figures


def main() -> None:
    """Run, print the figures, and write them where asked."""
    parser = script.parser(__doc__)
    parser.add_argument("--problems", type=script.at_least(2), default=1_000_000)
    parser.add_argument(
        "--small", type=script.at_least(2), default=10_000, help="problems of the file that memory is compared with"
    )
    parser.add_argument("--rows", type=script.count, default=8, help="rows an answer")
    parser.add_argument("--lookups", type=script.count, default=5_000)
    parser.add_argument("--folder", type=Path, help="where the files are made  [default: the temporary folder]")
    parser.add_argument("--json", type=script.output, help="file the figures are written to")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.folder, arguments.problems, arguments.lookups, arguments.child)))
        return
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        figures = compare(folder, arguments)
    finally:
        shutil.rmtree(folder)
    if arguments.json:
        load = {"load_average": os.getloadavg()[0]}
        report = provenance() | load | {"lookup": figures, "bounds": BOUNDS}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    script.run(main)
