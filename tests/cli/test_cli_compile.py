"""`miofind compile`: fills the binary cache for architectures that are not here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.commands.cli_runner import FORWARD, run, run_json, use_own_folders

from miofind.compiler import Binary, Compiler
from miofind.core.problem import ProblemDescription
from miofind.driver.line import driver_line
from miofind.errors import CompileError
from miofind.solver.steps import KernelStep


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_folders(tmp_path, monkeypatch)


def test_kernels_are_compiled_once(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    asked = ("compile", *FORWARD, "--arch", "80", "--only", "ConvDirectNaive")
    first = run_json(*asked)
    assert first["failed"] == 0
    assert [kernel["source"] for kernel in first["kernels"]] == ["direct/naive.cu"]
    assert first["kernels"][0]["registers"] > 0
    assert first["kernels"][0]["spill_bytes"] == 0
    assert (first["cache"]["misses"], first["cache"]["entries"]) == (1, 1)
    again = run(*asked).stdout
    assert "0 failed, 1 known already" in again
    assert str(tmp_path / "cache") in again


def test_kernels_of_a_fused_problem_are_those_of_both_forms() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    asked = ("compile", *FORWARD, "--arch", "80", "--only", "ConvDirectNaive")
    kernels = run_json(*asked, "--epilogue", "bias.relu")["kernels"]
    sources = [kernel["source"] for kernel in kernels]
    assert sorted(sources) == ["direct/naive.cu", "direct/naive.cu", "pointwise/epilogue_pass.cu"]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[KernelStep]:
    """What was to be compiled, and is not."""
    asked_for: list[KernelStep] = []

    def build_all(
        _: object, steps: Iterator[KernelStep], arch: str, **__: object
    ) -> Iterator[tuple[KernelStep, Binary]]:
        for step in steps:
            asked_for.append(step)
            yield step, Binary(key="", cubin=b"", path=None, resources={}, log="")

    monkeypatch.setattr(Compiler, "build_all", build_all)
    return asked_for


def test_kernels_of_a_volume_are_those_of_its_images(built: list[KernelStep]) -> None:
    volume = ProblemDescription.convolution(x=(2, 4, 3, 6, 5), w=(6, 4, 3, 1, 1), padding=(1, 0, 0))
    asked = ("--arch", "90a", "--only", "ConvDirectNaive")
    run("compile", driver_line(volume), *asked)
    of_volume = built.copy()
    run("compile", driver_line(volume.flattened), *asked)
    assert built == 2 * of_volume != []


def test_search_compiles_more_than_the_defaults_and_likely_less(built: list[KernelStep]) -> None:
    asked = ("compile", *FORWARD, "--arch", "90a", "--only", "plain")
    defaults = len(run_json(*asked)["kernels"])
    searched = len(run_json(*asked, "--search")["kernels"])
    few = len(run_json(*asked, "--likely")["kernels"])
    assert 0 < few < defaults < searched
    assert len(built) == defaults + searched + few
    assert "ask for one of the two" in run(*asked, "--search", "--likely", code=2).stderr


def test_a_kernel_that_fails_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_all(
        _: object, steps: Iterator[KernelStep], arch: str, **__: object
    ) -> Iterator[tuple[KernelStep, CompileError]]:
        for step in steps:
            yield step, CompileError("NVRTC refused it", source=step.source, options=("-DA=1",), log="line 3: error")

    monkeypatch.setattr(Compiler, "build_all", build_all)
    result = run("compile", *FORWARD, "--arch", "90a", "--only", "ConvDirectNaive", code=1)
    assert "1 failed" in result.stdout
    assert "ConvDirectNaive sm_90a direct/naive.cu" in result.stderr
    assert "line 3: error" in result.stderr


@pytest.mark.parametrize("arch", ["901a", "300"])
def test_an_architecture_that_nvrtc_does_not_know_is_refused(arch: str) -> None:
    """Each kernel failed, and the command ended with 1; then an arch was named that had not been given, 300a."""
    told = run("compile", *FORWARD, "--arch", "80", "--arch", arch, code=2).stderr
    assert told.startswith(f"error: --arch {arch.rstrip('a')}: NVRTC ")
    assert "compiles for 75, 80, " in told


def test_without_a_gpu_an_architecture_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miofind.device.device.has_cuda", lambda: False)
    assert "--arch 90a" in run("compile", *FORWARD, code=2).stderr


def test_what_no_solver_serves_is_an_error() -> None:
    result = run("compile", *FORWARD, "--arch", "90a", "--only", "ConvCpuDirect", code=1)
    assert result.stderr.endswith(
        "no solver with kernels serves these problems there: ConvCpuDirect has no kernels of its own\n"
    )
    several = run("compile", *FORWARD, "--arch", "90a", "--only", "ConvCpuDirect,ConvCpuGemm1x1", code=1).stderr
    assert "`miofind solvers conv ...` says why" in several


def test_the_only_solver_that_is_asked_for_says_why_it_refuses() -> None:
    told = run("compile", *FORWARD, "--arch", "90a", "--only", "ConvGemm1x1", code=1).stderr
    assert "no solver with kernels serves these problems there: ConvGemm1x1 " in told
    told = run("compile", *FORWARD, "--arch", "90a", "--only", "ConvDepthwiseMma", code=1).stderr
    listed = run_json("solvers", *FORWARD, "--arch", "90a", "--only", "ConvDepthwiseMma")["problems"][0]["solvers"]
    assert f"there: ConvDepthwiseMma {listed[0]['reason']}" in told


def test_equal_numbers_of_registers_are_one_number() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    lines = run("compile", *FORWARD, "--arch", "80", "--only", "ConvDirectNaive").stdout.splitlines()
    (row,) = [line for line in lines if line.startswith("ConvDirectNaive")]
    assert " to " not in row


def test_a_cache_that_keeps_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("MIOFIND_CACHE_DIR", str(file / "cache"))
    result = run("compile", *FORWARD, "--arch", "90a", "--only", "ConvDirectNaive", code=1)
    assert "no kernel is kept" in result.stderr
    assert "; nothing is cached: the disk cannot be used" in result.stdout


def test_what_one_host_compiled_another_takes_from_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    pytest.importorskip("fsspec")
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    store = ("--store", str(tmp_path / "store"), "--store-secret", str(secret))
    asked = ("compile", *FORWARD, "--arch", "80", "--only", "ConvDirectNaive", *store)
    assert run_json(*asked)["store"] == {"fetched": 0, "published": 1}
    monkeypatch.setenv("MIOFIND_CACHE_DIR", str(tmp_path / "another host's"))
    assert run_json(*asked)["store"] == {"fetched": 1, "published": 0}
    assert "store: 0 taken, 0 given" in run(*asked).stdout


def test_a_store_needs_a_secret(tmp_path: Path) -> None:
    refused = run("compile", *FORWARD, "--arch", "80", "--store", str(tmp_path), code=2)
    assert "--store-secret" in refused.stderr
