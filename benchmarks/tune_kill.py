"""Kills a tuning with SIGKILL again and again, resumes it, and compares its FindDB with an uninterrupted one's.

    python benchmarks/tune_kill.py --json benchmarks/results/tune_kill_cpu.json
    python benchmarks/tune_kill.py --kills 10 -- --suite resnet50 --batch 32 --dtype float16 --layout NHWC

The words behind -- say what is tuned; without them it is a small list on the CPU place. Both FindDBs must hold the same
candidates, each as often, and all that a run told of before it was killed. Ends with 1 where they do not.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import script

from miofind.finddb import Store

ON_CPU = ("--suite", "resnet50", "--direction", "all", "--limit", "12", "--exclude", "ConvCpuDirect", "--device", "cpu")
Candidate = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A tuning that was killed and resumed beside one that was not.

    Attributes:
        kills: runs that were killed before they ended.
        whole_seconds: time of the uninterrupted run, without its start.
        problems, rows: what the uninterrupted run stored.
        missing, surplus: candidates of the one FindDB that the other lacks.
        doubled: rows of a candidate beyond those of the uninterrupted run.
        lost: problems told of as measured that the FindDB lacked after a kill.
        left_to_last: problems that the last run, which nobody killed, measured.
        findings: what a check of the killed FindDB found.
    """

    kills: int
    whole_seconds: float
    problems: int
    rows: int
    missing: int
    surplus: int
    doubled: int
    lost: int
    left_to_last: int
    findings: list[str]

    @property
    def is_equal(self) -> bool:
        """Whether the kills left no trace."""
        return not (self.missing or self.surplus or self.doubled or self.lost or self.findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A run that was left alone: its summary, and the seconds from its start until it told of its first problem."""

    summary: dict[str, Any]
    first_s: float


class Runs:
    """Runs of one command over one FindDB, with a binary cache for all."""

    def __init__(self, folder: Path, database: str, asked: list[str]) -> None:
        self.path = folder / database
        self._command = [sys.executable, "-m", "miofind", "tune", *asked]
        self._environment = os.environ | {
            "MIOFIND_DB": str(self.path),
            "MIOFIND_SYSTEM_DB": "",
            "MIOFIND_CACHE_DIR": str(folder / "cache"),
        }

    def whole(self) -> Whole:
        """A run that is left alone."""
        began = time.monotonic()
        process = self._started("--json")
        assert process.stderr is not None
        first = process.stderr.readline()
        first_s = time.monotonic() - began
        stdout, stderr = process.communicate()
        if process.returncode != 0:
            raise SystemExit(f"{shlex.join(self._command)} ended with {process.returncode}:\n{first}{stderr}")
        return Whole(summary=json.loads(stdout), first_s=first_s)

    def killed(self, after: int, pause_s: float) -> int | None:
        """Problems that a run told of until it was killed, that long after the first so many; None if it ended."""
        process = self._started()
        assert process.stderr is not None
        told = [line for _, line in zip(range(after), process.stderr, strict=False)]
        try:
            _, more = process.communicate(timeout=pause_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            _, more = process.communicate()
        if process.returncode != -signal.SIGKILL:
            return None
        return sum("] tuned" in line for line in [*told, *more.splitlines()])

    def candidates(self) -> Counter[Candidate]:
        """How many rows each problem, solver and configuration has."""
        with Store(self.path, read_only=True) as store:
            return Counter((key.network_config, row.solver_id, row.config) for key, row in store.rows())

    def finished(self) -> int:
        """Problems whose find came to its end."""
        with Store(self.path, read_only=True) as store:
            return sum(bool(history.scopes) for history in store.histories())

    def findings(self) -> list[str]:
        """What a check of the FindDB finds."""
        with Store(self.path) as store:
            return list(store.check())

    def _started(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._command, *words],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def compare(folder: Path, asked: list[str], kills: int, seed: int) -> Comparison:
    """Tune once in peace, once with kills at random moments, and compare."""
    whole, resumed = Runs(folder, "whole.db", asked), Runs(folder, "resumed.db", asked)
    undisturbed = whole.whole()
    seconds = undisturbed.summary["seconds"]
    chance = random.Random(seed)
    done = told = lost = 0
    while done < kills:
        # The first falls before a problem is told of, the others mostly into a measurement.
        after = min(done, 1 + chance.randrange(2))
        pause_s = chance.uniform(0, seconds / kills) if after else undisturbed.first_s * chance.uniform(0.1, 0.9)
        measured = resumed.killed(after, pause_s)
        if measured is None:
            break
        done, told = done + 1, told + measured
        lost = max(lost, told - resumed.finished()) if told else 0
    last = resumed.whole().summary
    expected, found = whole.candidates(), resumed.candidates()
    return Comparison(
        kills=done,
        whole_seconds=seconds,
        problems=last["total"],
        rows=expected.total(),
        missing=len(expected.keys() - found.keys()),
        surplus=len(found.keys() - expected.keys()),
        doubled=sum(max(0, count - expected[key]) for key, count in found.items() if key in expected),
        lost=lost,
        left_to_last=last["counts"]["tuned"],
        findings=resumed.findings(),
    )


def main() -> None:
    """Compare, print the figures, and write them where asked."""
    parser = script.parser(__doc__)
    parser.add_argument("--kills", type=script.at_least(0), default=8, help="runs that are killed")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--json", type=script.output, help="write the figures to this file")
    parser.add_argument("asked", nargs="*", help="words of `miofind tune`, behind --")
    arguments = parser.parse_args()
    asked = arguments.asked or list(ON_CPU)
    with tempfile.TemporaryDirectory() as folder:
        comparison = compare(Path(folder), asked, arguments.kills, arguments.seed)
    figures = {"command": shlex.join(["miofind", "tune", *asked]), "seed": arguments.seed} | asdict(comparison)
    for name, value in figures.items():
        print(f"{name:16} {value:.1f}" if isinstance(value, float) else f"{name:16} {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    if not comparison.is_equal:
        raise SystemExit("the kills left a trace")


if __name__ == "__main__":
    script.run(main)
