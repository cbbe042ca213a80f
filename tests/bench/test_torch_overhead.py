"""benchmarks/torch_overhead.py on the CPU: each way is timed, and what is written says what it is of."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
from pathlib import Path

import pytest

from miofind.errors import MissingLibraryError

pytest.importorskip("torch")
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def test_every_way_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def build() -> None:
        raise MissingLibraryError("there is no compiler")

    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("MIOFIND_TORCH_DIRECT", "0")
    script = importlib.import_module("torch_overhead")
    monkeypatch.setattr("miofind.torch.build", build)
    monkeypatch.setattr(script, "ROUNDS", 1)
    calls = script.calls
    monkeypatch.setattr(script, "calls", lambda device: {name: (call, 20) for name, (call, _) in calls(device).items()})
    monkeypatch.setattr(script, "misses", functools.partial(script.misses, count=5))
    path = tmp_path / "figures.json"
    script.run(argparse.Namespace(device="cpu", json=path, commit="abc"))
    assert "no direct path" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert (found["commit"], found["direct_path"], found["miss_us"] > 0) == ("abc", False, True)
    assert all(list(us) == list(script.WAYS) and min(us.values()) > 0 for us in found["us"].values())
