"""SIGKILL at random moments of a real tuning: resumed, it ends with the same candidates, each once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "tune_kill.py"


@pytest.mark.parametrize(
    "where",
    [pytest.param((), id="child"), pytest.param(("--in-process",), id="in process", marks=pytest.mark.full_matrix)],
)
def test_a_killed_tuning_resumes_to_the_same_rows(where: tuple[str, ...], tmp_path: Path) -> None:
    rows = [f"1,{c},14,14,{c},3,3,1,1,2" for c in (32, 48, 64, 80)]
    table, figures = tmp_path / "mine.csv", tmp_path / "figures.json"
    table.write_text("\n".join(["n,c,h,w,k,fy,fx,pad_h,pad_w,count", *rows]) + "\n", encoding="utf-8")
    asked = ["--csv", str(table), "--direction", "all", "--device", "cpu", "--only", "ConvCpuIm2colGemm", *where]
    command = [sys.executable, str(SCRIPT), "--kills", "3", "--json", str(figures), "--", *asked]
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1])}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    found = json.loads(figures.read_text(encoding="utf-8"))
    assert found["kills"] >= 1, "the tuning must have been killed"
    assert (found["problems"], found["rows"]) == (12, 24)
