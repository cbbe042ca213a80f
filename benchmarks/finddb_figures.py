"""What the benchmarks of the FindDB share: problems and rows of usual length, percentiles, tables and provenance."""

from __future__ import annotations

import os
import platform
import random
import shlex
import sqlite3
import sys
from collections.abc import Mapping
from pathlib import Path

import sqlalchemy
from commit import commit

import miofind
from miofind.finddb import Row

DEVICE = "NVIDIA H200|132|9.0|"
VERSIONS = {"driver": "13.0", "cudnn": "9.19.0.56", "nvrtc": "13.0.88"}
SOLVERS = {f"ConvSolver{index:02d}": 1 for index in range(10)}


def network_config(number: int) -> str:
    """A key of the usual length."""
    return f"conv2d-forward-n32-c{number}-h56-w56-k64-y3-x3-pad1x1-NHWC-f16"


def rows(rng: random.Random, count: int) -> tuple[Row, ...]:
    """Measurements of `count` configurations, spread over the solvers."""
    solvers = list(SOLVERS)
    return tuple(
        Row(
            solver_id=solvers[place % len(solvers)],
            solver_version=1,
            config=f'{{"block_k":32,"block_m":128,"block_n":64,"place":{place},"stages":3}}',
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
        for place in range(count)
    )


def percentile(samples: list[float], percent: int) -> float:
    """The sample that `percent` of all do not exceed."""
    return sorted(samples)[int(percent / 100 * (len(samples) - 1))]


def print_table(figures: Mapping[str, object], bounds: Mapping[str, float]) -> None:
    """A line a figure, with its bound and whether it keeps it."""
    for name, value in figures.items():
        told = f"{value:.3f}" if isinstance(value, float) else str(value)
        bound = bounds.get(name)
        kept = "" if bound is None else f"  <= {bound:g}: {'yes' if float(str(value)) <= bound else 'NO'}"
        print(f"{name:28} {told:>14}{kept}")


def provenance() -> dict[str, object]:
    """What figures were measured with; no GPU takes part."""
    return {
        "gpu": "none",
        "cpu": {"name": _cpu_name(), "cores": os.cpu_count()},
        "versions": {
            "miofind": miofind.__version__,
            "python": platform.python_version(),
            "sqlite": sqlite3.sqlite_version,
            "sqlalchemy": sqlalchemy.__version__,
        },
        "commit": commit(),
        "command": shlex.join(["python", *sys.argv]),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
