"""What it is worth to find volumes as images where they are such: each measured as it is, and as images.

    python benchmarks/volumes_as_images.py --every 4 --budget 5 --json benchmarks/results/volumes_as_images_h200.json

Of each problem all default candidates are measured twice in one process, as what it is, which solvers of volumes alone
serve, and flattened. PyTorch's own convolution of the volumes, and cuDNN's best of either, are measured beside. The
problems are every n-th of the suite `wild_3d`, and layers of networks of video with factorized filters.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator
from typing import Any

import script
from commit import commit

import miofind
from miofind.bench.ceilings import measure_ceilings
from miofind.bench.comparison import bench_row
from miofind.bench.rivals import Rival
from miofind.device.environment import versions
from miofind.errors import MiofindError
from miofind.find.immediate.answer import predicted
from miofind.find.measuring import measure
from miofind.options import FindMode, FindOptions
from miofind.suites import SuiteProblem, load

FAST = FindOptions(find_mode=FindMode.FAST)
LIBRARY = "ConvCudnn"


def video_layers() -> Iterator[miofind.ProblemDescription]:
    """Of R(2+1)D-18 and X3D-M: spatial, temporal and point-wise filters, both memory orders, all directions."""
    shapes = [
        ((8, 64, 16, 56, 56), (144, 64, 1, 3, 3), (0, 1, 1), 1, 1),
        ((8, 144, 16, 56, 56), (64, 144, 3, 1, 1), (1, 0, 0), 1, 1),
        ((8, 256, 4, 14, 14), (576, 256, 1, 3, 3), (0, 1, 1), 1, 1),
        ((8, 576, 4, 14, 14), (256, 576, 3, 1, 1), (1, 0, 0), 1, 1),
        ((8, 128, 8, 28, 28), (288, 128, 1, 3, 3), (0, 1, 1), (1, 2, 2), 1),
        ((8, 24, 16, 112, 112), (24, 1, 5, 1, 1), (2, 0, 0), 1, 24),
        ((8, 48, 16, 28, 28), (108, 48, 1, 1, 1), 0, 1, 1),
        ((8, 432, 16, 7, 7), (192, 432, 1, 1, 1), 0, 1, 1),
    ]
    for x, w, padding, stride, groups in shapes:
        for layout in ("NDHWC", "NCDHW"):
            for direction in miofind.Direction:
                problem = miofind.ProblemDescription.convolution(
                    x=x, w=w, padding=padding, stride=stride, groups=groups,
                    direction=direction, dtype="float16", layout=layout,
                )  # fmt: skip
                if problem.flattened is not problem:
                    yield problem


def times(solutions: Iterable[miofind.Solution]) -> dict[str, float | None]:
    """Of the fastest, of our own fastest, and of cuDNN's."""
    own = [each.time_ms for each in solutions if each.solver_id != LIBRARY]
    cudnn = [each.time_ms for each in solutions if each.solver_id == LIBRARY]
    return {"all": min((*own, *cudnn)), "own": min(own, default=None), "cudnn": min(cudnn, default=None)}


def measured(problem: miofind.ProblemDescription, options: FindOptions, handle: miofind.Handle) -> dict[str, Any]:
    """Milliseconds of a problem as it is, or of what it is flattened to, and of what is answered without measuring."""
    with miofind.Handle(handle.device, database=":memory:", compiler=handle.compiler) as apart:
        first = predicted(problem, FAST, apart)[0]
    found = measure(problem, options, handle)
    told = times(found)
    of_first = next((each.time_ms for each in found if each.id == first.id), None)
    return {**told, "predicted": of_first, "best": found[0].solver_id, "first": first.solver_id}


def main() -> None:
    arguments = script.parser(__doc__)
    arguments.add_argument("--every", type=script.count, default=3, metavar="N", help="of wild_3d each N-th (3)")
    arguments.add_argument("--share", type=script.share, default=(0, 1), metavar="I/N", help="a part of the problems")
    arguments.add_argument("--budget", type=script.seconds, default=6.0, metavar="S", help="seconds of a find (6)")
    arguments.add_argument("--commit", default=commit(), help="which commit this is")
    arguments.add_argument("--json", type=script.output, metavar="FILE", help="write the figures to FILE")
    given = arguments.parse_args()
    wild = [row.problem for row in load("wild_3d").rows][:: given.every]
    problems = [*wild, *video_layers()]
    at, parts = given.share
    rows = []
    options = FindOptions(time_budget_s=given.budget, find_mode=FindMode.NORMAL)
    with miofind.Handle("cuda", database=":memory:") as handle:
        ceilings = measure_ceilings(handle.device)
        for problem in problems[at::parts]:
            try:
                row: dict[str, Any] = {
                    "problem": problem.network_config,
                    "as_volume": measured(problem, options, handle),
                    "as_images": measured(problem.flattened, options, handle),
                }
                entry = SuiteProblem(problem=problem, suite="", layer="", count=1)
                timed = bench_row(entry, handle, FindOptions(), ceilings, against=[Rival.TORCH])
                row |= {"ms": timed.time_ms, "torch_ms": timed.rival_ms, "message": timed.message}
            except MiofindError as error:
                row = {"problem": problem.network_config, "message": str(error)}
            rows.append(row)
            print(json.dumps(row), flush=True)
        told = {
            "gpu": handle.device.name,
            "versions": dict(versions(handle.device)),
            "commit": given.commit,
            "command": "python benchmarks/volumes_as_images.py",
            "means": means(rows),
            "problems": rows,
        }
    print(json.dumps(told["means"], indent=1))
    if given.json:
        given.json.write_text(json.dumps(told, indent=1) + "\n")


def means(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means over the problems that have both."""

    def mean(ratios: list[float]) -> dict[str, float | int] | None:
        if not ratios:
            return None
        value = math.exp(statistics.fmean(map(math.log, ratios)))
        return {"problems": len(ratios), "mean": round(value, 4), "worst": round(max(ratios), 3)}

    def ratio(first: tuple[str, str], second: tuple[str, str]) -> list[float]:
        pairs = [(row[first[0]][first[1]], row[second[0]][second[1]]) for row in rows if "as_images" in row]
        return [a / b for a, b in pairs if a is not None and b is not None]

    torch = [row["ms"] / row["torch_ms"] for row in rows if row.get("ms") and row.get("torch_ms")]
    return {
        "best as images / as volumes": mean(ratio(("as_images", "all"), ("as_volume", "all"))),
        "own best as images / as volumes": mean(ratio(("as_images", "own"), ("as_volume", "own"))),
        "cudnn's best as images / as volumes": mean(ratio(("as_images", "cudnn"), ("as_volume", "cudnn"))),
        "own best as volumes / cudnn's": mean(ratio(("as_volume", "own"), ("as_volume", "cudnn"))),
        "own best as images / cudnn's of volumes": mean(ratio(("as_images", "own"), ("as_volume", "cudnn"))),
        "predicted / best, as volumes": mean(ratio(("as_volume", "predicted"), ("as_volume", "all"))),
        "predicted / best, as images": mean(ratio(("as_images", "predicted"), ("as_images", "all"))),
        "all solvers / PyTorch's conv3d": mean(torch),
    }


if __name__ == "__main__":
    script.run(main)
