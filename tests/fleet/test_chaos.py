"""Everything of a fleet of real agents is killed: no job is left, no row is missing or doubled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from helpers.processes.waiting import LIMIT_S

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "fleet_chaos.py"


def test_chaos_leaves_no_trace(tmp_path: Path) -> None:
    """Each kind of blow comes at least once. benchmarks/fleet_chaos.py goes on for as long as it is told."""
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(SCRIPT), "--seconds", "5", "--json", str(figures)]
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2 * LIMIT_S, check=False)
    print(run.stdout)  # with the seed
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(figures.read_text(encoding="utf-8"))["chaos"]
    assert min(found["blows"].values()) >= 1
    assert len(found["blows"]) == 7
    assert found["jobs"].keys() == {"done"}
    assert found["rows"] > 0
