"""How long a find takes that measures: in a new process with compiled kernels at hand, and again in the same one.

    python benchmarks/find_cost.py --json benchmarks/results/find_cost_h200.json

To compare two checkouts, run it in each by turns on one GPU: the first run of a machine compiles, too.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import script
from commit import commit

import miofind
from miofind.device.environment import versions

_FINDS = 7
_PROBLEM = miofind.ProblemDescription.convolution
PROBLEMS = (
    _PROBLEM(x=(32, 64, 56, 56), w=(64, 64, 3, 3), padding=1, dtype="float16", layout="NHWC"),
    _PROBLEM(x=(32, 256, 14, 14), w=(1024, 256, 1, 1), dtype="float16", direction="backward_weights"),
    _PROBLEM(x=(32, 64, 56, 56), w=(64, 64, 3, 3), padding=1),
    _PROBLEM(
        x=(32, 128, 28, 28), w=(128, 128, 3, 3), padding=1, dtype="bfloat16", layout="NHWC", direction="backward_data"
    ),
    _PROBLEM(x=(32, 3, 224, 224), w=(64, 3, 7, 7), padding=3, stride=2, dtype="float16", layout="NHWC"),
    _PROBLEM(x=(32, 384, 14, 14), w=(384, 1, 7, 7), padding=3, groups=384, dtype="float16"),
    _PROBLEM(x=(1, 512, 7, 7), w=(512, 512, 3, 3), padding=1, math="tf32", layout="NHWC"),
    _PROBLEM(x=(64, 256, 56, 56), w=(256, 256, 3, 3), padding=1, dtype="float16", layout="NHWC"),
)


def seconds(problem: miofind.ProblemDescription, handle: miofind.Handle) -> list[float]:
    """Of finds of a problem that all measure."""
    options = miofind.FindOptions(find_mode="normal", time_budget_s=120)
    taken = []
    for _ in range(_FINDS):
        began = time.perf_counter()
        miofind.find_solutions(problem, options=options, handle=handle)
        taken.append(round(time.perf_counter() - began, 4))
    return taken


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--json", type=script.output, help="write the figures to this file")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"commit": commit(), "command": shlex.join(["python", *sys.argv]), "finds": {}}
    with tempfile.TemporaryDirectory() as folder, miofind.Handle("cuda", database=Path(folder, "find.db")) as handle:
        report |= {"gpu": handle.device.name, "versions": versions(handle.device)}
        for problem in PROBLEMS:
            first, *others = seconds(problem, handle)
            report["finds"][problem.network_config] = {"first_s": first, "others_s": others}
            print(f"{first:8.3f} s, then {sorted(others)[len(others) // 2]:.3f} s  {problem}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    script.run(main)
