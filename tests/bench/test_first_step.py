"""benchmarks/first_step.py on the CPU: each way begins with empty caches in a process of its own."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.usefixtures("pytorchs_switches")
def test_ways_are_timed_and_failures_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    script = importlib.import_module("first_step")
    path = tmp_path / "figures.json"
    asked = ["--device", "cpu", "--networks", "tiny", "--kinds", "training", "--batch", "1"]
    monkeypatch.setattr(sys, "argv", ["first_step.py", *asked, "--ways", "miofind", "--json", str(path)])
    script.main()
    (tiny,) = json.loads(path.read_text())["rows"]
    assert tiny["first_s"] > tiny["tune_s"] > tiny["find_s"] > 0
    assert tiny["solved"] == tiny["problems"] > 0
    assert tiny["step_ms"] > 0
    assert "tiny" in capsys.readouterr().out
    fails = [sys.executable, "-c", "raise SystemExit('no such network')"]
    assert script.by_child(fails, 60.0) == {"failure": "no such network"}
    assert script.by_child([sys.executable, "-c", "import time; time.sleep(60)"], 0.2) == {
        "failure": "stopped after 0 s"
    }
