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


TORCHS = {"torch eager": [4.0, 1.0], "torch channels last": [4.1, 1.1], "torch compile": [4.2, 1.0]}


def test_a_distance_is_from_the_median_of_pytorchs_other_runs(script: ModuleType) -> None:
    found = script.judged({**TORCHS, "miofind eager": [4.1, 2.0]})
    assert found["distances"] == pytest.approx(
        {"torch eager": 0.15, "torch channels last": 0.1, "torch compile": 0.15, "miofind eager": 1.0}
    )
    assert found["offsets"] == pytest.approx(
        {"torch eager": -0.1, "torch channels last": 0.05, "torch compile": 0.05, "miofind eager": 0.5}
    )
    assert (found["band"], found["is_within"]) == (pytest.approx(0.1), False)
    assert script.stretches([1.0] * 20 + [2.0, 4.0]) == [1.0, 3.0]


def test_the_mean_of_miofinds_runs_is_judged(script: ModuleType) -> None:
    """One run may be off by chance, not all of them."""
    ours = {"miofind eager": [4.1, 1.0], "miofind compile": [4.0, 1.0], "miofind in order 0": [4.0, 1.4]}
    found = script.judged({**TORCHS, **ours})
    assert found["offsets"]["miofind in order 0"] == pytest.approx(0.15)
    assert found["offset_of_miofind"] == pytest.approx(0.0333, abs=1e-4)
    assert found["is_within"]
    shifted = {name: [mean + 0.12 for mean in means] for name, means in ours.items()}
    assert not script.judged({**TORCHS, **shifted})["is_within"]


def test_another_order_has_the_same_images(script: ModuleType) -> None:
    images = importlib.import_module("torch_losses").Images((8, 3, 8, 8), 4, "cpu")
    x, named = images.batch(3)
    for seed in (0, 1):
        other, others_named = images.batch(3, seed)
        places = [int((x == each).flatten(1).all(1).nonzero()) for each in other]
        assert sorted(places) == list(range(8)) != places
        assert others_named.equal(named[places])
        assert other.equal(images.batch(3, seed)[0])


@pytest.mark.usefixtures("pytorchs_switches")
def test_a_network_learns_on_the_cpu(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--device", "cpu", "--networks", "tiny", "--steps", "25", "--batch", "8", "--no-compile"]
    monkeypatch.setattr(sys, "argv", ["losses.py", *words, "--commit", "abc", "--json", str(tmp_path / "losses.json")])
    script.main()
    report = json.loads((tmp_path / "losses.json").read_text())
    (row,) = report["rows"]
    eager = {f"{side} {each}" for side in ("torch", "miofind") for each in ("eager", "in order 0", "in order 1")}
    assert set(row["means"]) == {*eager, "torch channels last"}
    assert all(len(means) == 2 and means[1] < means[0] for means in row["means"].values())
    assert max(row["distances"].values()) < 0.01
    assert max(row["output_errors"].values()) < 0.02
