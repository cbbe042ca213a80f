"""Make the FindDB that ships for one kind of device from databases that were tuned on it.

    python scripts/ship_finddb.py tuned.db [more.db ...] finddb/prebuilt/nvidia_h200.db

Keeps the rows that answers need, of this release's solvers only, and no environment of another Python package's
solvers. Prints what the file holds.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from miofind.finddb import ProblemKey, Row, Store, write_shippable
from miofind.problem import ProblemDescription
from miofind.records import solver_hash
from miofind.solver import solvers


def is_current(key: ProblemKey, row: Row) -> bool:
    """Whether a row was measured with a solver as this release has it."""
    del key
    solver = solvers().get(row.solver_id)
    return solver is not None and row.solver_version == solver.version and row.source_hash == solver_hash(solver)


def main(arguments: list[str]) -> None:
    *sources, target = arguments
    stores = [Store(path, read_only=True) for path in sources]
    try:
        stats = write_shippable(stores, Path(target), keep=is_current)
    finally:
        for store in stores:
            store.close()
    counts: Counter[str] = Counter()
    with Store(target, read_only=True) as shipped:
        for key in shipped.problems():
            problem = ProblemDescription.from_network_config(key.network_config)
            counts[f"{key.device}: {problem.x.dtype} {problem.math} {problem.x.layout} {problem.direction}"] += 1
    print(f"{target}: {stats.problems} problems, {stats.rows} rows, {stats.file_bytes / 1e6:.2f} MB")
    for name, count in sorted(counts.items()):
        print(f"  {count:4d}  {name}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1:])
