"""Commands that ask every solver: one that raises is told of, and the others are asked all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_runner import FORWARD, run_json, use_own_folders

from miofind.solver.registry import Registry


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_folders(tmp_path, monkeypatch)


def fails(*_: Any) -> Any:
    raise ValueError("told by the solver")


def add_broken(monkeypatch: pytest.MonkeyPatch, like: str, method: str) -> None:
    """Have one more solver, like another but for a method that raises."""
    default = Registry.default()
    solver = type("Broken", (type(default[like]),), {"id": "vendor/Broken", method: fails})
    monkeypatch.setattr(Registry, "_default", Registry([solver, *default.values()]))


@pytest.mark.parametrize("method", ["is_applicable", "default_configs", "configs"])
def test_solvers_lists_the_others(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    add_broken(monkeypatch, "ConvCpuDirect", method)
    listed = run_json("solvers", *FORWARD, "--device", "cpu")["problems"][0]["solvers"]
    answers = {solver["id"]: solver for solver in listed}
    assert answers["vendor/Broken"]["reason"] == "ValueError: told by the solver"
    assert answers["ConvCpuDirect"]["applicable"]


@pytest.mark.parametrize("method", ["is_applicable", "default_configs", "solution"])
def test_compile_leaves_it_out(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    add_broken(monkeypatch, "ConvDirectNaive", method)
    only = ("--only", "vendor/Broken", "--only", "ConvDirectNaive")
    made = run_json("compile", *FORWARD, "--arch", "90a", *only)
    (reason,) = made["left_out"].values()
    assert reason == "ValueError('told by the solver')"
    assert {kernel["solver"] for kernel in made["kernels"]} == {"ConvDirectNaive"}
