"""One tuning on one GPU and on all GPUs of the host: the same command, an empty FindDB each, warm binaries.

    python benchmarks/tune_gpus.py --json benchmarks/results/tune_gpus_2xh200.json
    python benchmarks/tune_gpus.py --gpus 0,1 -- --suite resnet50 --batch 32 --dtype float16 --layout NHWC --search

The words behind -- say what is tuned. A first run on all GPUs fills the binary cache and is not timed. The seconds are
those of the tuning, without the start of the process. On GPUs of one kind the work is shared; on others there is none
to share, since each kind measures all.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import script

DEFAULT = ("--suite", "yardstick", "--dtype", "float16", "--layout", "NHWC", "--direction", "all")


def tune(folder: Path, name: str, gpus: str, asked: list[str]) -> dict[str, Any]:
    """The summary of a tuning into a FindDB of its own."""
    command = [sys.executable, "-m", "miofind", "tune", *asked, "--gpus", gpus, "--json"]
    environment = os.environ | {
        "MIOFIND_DB": str(folder / f"{name}.db"),
        "MIOFIND_SYSTEM_DB": "",
        "MIOFIND_CACHE_DIR": str(folder / "cache"),
    }
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if run.returncode not in (0, 1) or not run.stdout:
        raise SystemExit(f"{shlex.join(command)} ended with {run.returncode}")
    summary: dict[str, Any] = json.loads(run.stdout)
    if summary["end"] != "complete":
        raise SystemExit(f"{shlex.join(command)} did not come to its end: {summary['end']}")
    return summary


def figures_of(summary: dict[str, Any]) -> dict[str, Any]:
    """What one run is compared by."""
    winners = {result["network_config"]: result["best"] for result in summary["results"] if result["best"]}
    return {
        "gpus": len(summary["devices"]),
        "seconds": summary["seconds"],
        "problems": summary["total"],
        "counts": summary["counts"],
        "gpu_seconds": sum(result["seconds"] for result in summary["results"]),
        "winners_by_solver": dict(Counter(best["solver"] for best in winners.values())),
    }


def agreement(one: dict[str, Any], all_: dict[str, Any]) -> float:
    """Share of the problems whose best time differs by at most 5 % between two runs."""
    times = {result["network_config"]: result["best"]["time_ms"] for result in one["results"] if result["best"]}
    pairs = [
        (times[result["network_config"]], result["best"]["time_ms"])
        for result in all_["results"]
        if result["best"] and result["network_config"] in times
    ]
    return sum(max(pair) <= 1.05 * min(pair) for pair in pairs) / max(1, len(pairs))


def main() -> None:
    """Tune three times, print both timed runs and the speed-up, and write the figures where asked."""
    parser = script.parser(__doc__)
    parser.add_argument("--gpus", default="all", help="the GPUs of the second run")
    parser.add_argument("--one", default="0", help="the GPU of the first")
    parser.add_argument("--json", type=script.output, help="write the figures to this file")
    parser.add_argument("--keep", type=Path, help="keep the FindDBs and the binary cache in this folder")
    parser.add_argument("asked", nargs="*", help="words of `miofind tune`, behind --")
    arguments = parser.parse_args()
    asked = arguments.asked or list(DEFAULT)
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) if arguments.keep is None else arguments.keep
        kept.mkdir(parents=True, exist_ok=True)
        tune(kept, "warm", arguments.gpus, asked)
        one = tune(kept, "one", arguments.one, asked)
        all_ = tune(kept, "all", arguments.gpus, asked)
    kinds = {device["device"] for device in all_["devices"]}
    figures = {
        "devices": sorted(kinds),
        "command": shlex.join(["miofind", "tune", *asked]),
        "one": figures_of(one),
        "all": figures_of(all_),
        "speed_up": one["seconds"] / all_["seconds"],
        "times_within_5_percent": agreement(one, all_),
    }
    for name in ("one", "all"):
        run = figures[name]
        print(
            f"{run['gpus']} GPU{'s' if run['gpus'] > 1 else ''}: {run['problems']} problems in {run['seconds']:.1f} s"
        )
    print(f"speed-up {figures['speed_up']:.2f}; best times within 5 %: {figures['times_within_5_percent']:.0%}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    script.run(main)
