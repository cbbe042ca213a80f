"""The benchmark of losses: distances of runs, and a network on the CPU."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.*. is deprecated:DeprecationWarning")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    for name in ("losses", "torch_losses", "torch_forms", "torch_networks", "script", "commit"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("losses")


def test_a_distance_is_from_the_median_of_pytorchs_other_runs(script: ModuleType) -> None:
    means = {
        "torch eager": [4.0, 1.0],
        "torch channels last": [4.1, 1.1],
        "torch compile": [4.2, 1.0],
        "miofind eager": [4.1, 2.0],
    }
    found = script.judged(means)
    assert found["distances"] == pytest.approx(
        {"torch eager": 0.15, "torch channels last": 0.1, "torch compile": 0.15, "miofind eager": 1.0}
    )
    assert (found["band"], found["is_within"]) == (pytest.approx(0.15), False)
    assert script.judged({**means, "miofind eager": [4.1, 1.1]})["is_within"]
    assert script.stretches([1.0] * 20 + [2.0, 4.0]) == [1.0, 3.0]


@pytest.mark.usefixtures("pytorchs_switches")
def test_a_network_learns_on_the_cpu(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--device", "cpu", "--networks", "tiny", "--steps", "25", "--batch", "8", "--no-compile"]
    monkeypatch.setattr(sys, "argv", ["losses.py", *words, "--commit", "abc", "--json", str(tmp_path / "losses.json")])
    script.main()
    report = json.loads((tmp_path / "losses.json").read_text())
    (row,) = report["rows"]
    assert set(row["means"]) == {"torch eager", "torch eager again", "torch channels last", "miofind eager"}
    assert row["means"]["torch eager"] == row["means"]["torch eager again"]
    assert all(len(means) == 2 and means[1] < means[0] for means in row["means"].values())
    assert max(row["distances"].values()) < 0.01
    assert max(row["output_errors"].values()) < 0.02
