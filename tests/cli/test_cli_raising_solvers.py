"""Commands that ask every solver: one that raises is told of, and the others are asked all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.commands.cli_runner import FORWARD, run, run_json, use_own_folders

from miofind.errors import MissingLibraryError
from miofind.solver.registry import Registry


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_folders(tmp_path, monkeypatch)


def fails(*_: Any) -> Any:
    raise ValueError("told by the solver")


def add_broken(monkeypatch: pytest.MonkeyPatch, like: str, method: str, does: Callable[..., Any] = fails) -> None:
    """Have one more solver, like another but for a method that raises."""
    default = Registry.default()
    solver = type("Broken", (type(default[like]),), {"id": "vendor/Broken", method: does})
    monkeypatch.setattr(Registry, "_default", Registry([solver, *default.values()]))


@pytest.mark.parametrize("method", ["is_applicable", "default_configs", "configs"])
def test_solvers_lists_the_others(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    add_broken(monkeypatch, "ConvCpuDirect", method)
    listed = run_json("solvers", *FORWARD, "--device", "cpu")["problems"][0]["solvers"]
    answers = {solver["id"]: solver for solver in listed}
    assert answers["vendor/Broken"]["reason"] == "ValueError: told by the solver"
    assert answers["ConvCpuDirect"]["applicable"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("flags", [(), ("--likely",)], ids=["defaults", "likely"])
@pytest.mark.parametrize("method", ["is_applicable", "default_configs", "solution"])
def test_compile_leaves_it_out_and_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, method: str, flags: tuple[str, ...]
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    add_broken(monkeypatch, "ConvDirectTiled", method)
    asked = ("compile", *FORWARD, "--arch", "90a", "--only", "vendor/Broken", "--only", "ConvDirectTiled", *flags)
    made = run_json(*asked, code=1)
    ((name, reason),) = made["left_out"].items()
    assert name.startswith("vendor/Broken: conv2d-")
    assert reason in ("ValueError('told by the solver')", "ValueError: told by the solver")
    assert made["failed"] == 1
    assert {kernel["solver"] for kernel in made["kernels"]} == {"ConvDirectTiled"}
    told = run(*asked, code=1)
    assert "1 failed, " in told.stdout
    assert f"failed: {name}: {reason}" in told.stderr


def test_what_a_machine_lacks_is_no_failure_of_the_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")

    def lacks(*_: Any) -> Any:
        raise MissingLibraryError("a library is not installed")

    add_broken(monkeypatch, "ConvDirectNaive", "default_configs", lacks)
    made = run_json("compile", *FORWARD, "--arch", "90a", "--only", "vendor/Broken,ConvDirectNaive")
    assert list(made["left_out"].values()) == ["a library is not installed"]
    assert made["failed"] == 0
