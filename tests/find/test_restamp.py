"""Rows carried over a change of sources: machine code is compared, names are not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.commands.cli_runner import run
from helpers.finddb.finddb_entries import at, rival, row, scope
from helpers.runs.cuda_package import CudaPackage, make_package

from miofind.compiler import BinaryCache, Compiler, kernel_hash, machine_code
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.errors import InvalidOptionError
from miofind.find import restamp
from miofind.find.lookup.validity import solver_hash
from miofind.find.restamp import Code, Restamped, codes, read_codes, restamped, write_codes
from miofind.finddb import MEMORY, History, Row, Store, Verdict
from miofind.solver.registry import Registry
from miofind.solver.steps import ConvSolution, FftStep, KernelStep, Pointer, Region, WorkspacePlan

pytest.importorskip("cuda.bindings.nvrtc")

DEVICE = "NVIDIA H200|132|9.0|"
PROBLEM = ProblemDescription.convolution(x=(2, 4, 9, 7), w=(6, 4, 3, 3), padding=1)
SOLVER = Registry.default()["ConvDirectNaive"]

KERNEL = """
__device__ float {half}(float value) {{ return 0.5f * value; }}
__constant__ float table[2] = {{1.0f, {second}}};
extern "C" __global__ void {name}(float* {out}, const float* in, int n) {{
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) {out}[i] = {half}(in[i]) + table[i & 1];
}}
"""
NAMES = {"half": "half_of", "name": "scale", "out": "y", "second": "2.0f"}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return Compiler(BinaryCache(tmp_path_factory.mktemp("restamp") / "kernels"))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CudaPackage:
    return make_package(tmp_path, monkeypatch)


def code_of(package: CudaPackage, compiler: Compiler, **names: str) -> str:
    given = NAMES | names
    package.write(a_cu=KERNEL.format(**given))
    return machine_code(compiler.build(package.step("a.cu", given["name"]), "90a").cubin, given["name"])


def test_names_are_no_machine_code(package: CudaPackage, compiler: Compiler) -> None:
    assert code_of(package, compiler, half="h", name="other", out="result") == code_of(package, compiler)


@pytest.mark.parametrize("change", ["3.0f", "2.0f + 1e-6f"])
def test_constants_are_machine_code(package: CudaPackage, compiler: Compiler, change: str) -> None:
    assert code_of(package, compiler, second=change) != code_of(package, compiler)


def test_what_is_no_cubin_has_no_machine_code(package: CudaPackage, compiler: Compiler) -> None:
    binary = compiler.build(package.step(), "90a")
    with pytest.raises(ValueError, match="no kernel other"):
        machine_code(binary.cubin, "other")
    with pytest.raises(ValueError, match="ELF"):
        machine_code(b"", "scale")


def measured(**fields: object) -> Row:
    config = SOLVER.default_configs(PROBLEM, Device.virtual("90a"))[0]
    return row(solver_id=SOLVER.id, solver_version=SOLVER.version, config=config.json, created_at=at(0), **fields)


@pytest.fixture
def old() -> Iterator[Store]:
    """A row under hashes of sources that are no more."""
    with Store(MEMORY) as store:
        rows = (measured(source_hash="a" * 64, kernel_hash="b" * 64, time_ms=3.0),)
        store.add([History(device=DEVICE, network_config=PROBLEM.network_config, rows=rows)])
        yield store


def of_another_release(store: Store, compiler: Compiler, **fields: object) -> dict[tuple[str, str, str, str], Code]:
    (today,) = codes(store, compiler)
    then = replace(today, source_hash="a" * 64, kernel_hash="b" * 64, **fields)  # type: ignore[arg-type]
    return read_codes(write_codes([then]), "before.jsonl")


def test_a_row_of_the_same_machine_code_is_carried_over(old: Store, compiler: Compiler) -> None:
    told = Restamped()
    (history,) = restamped(old, of_another_release(old, compiler), compiler, told)
    (carried,) = history.rows
    device = Device.virtual("90a")
    solution = SOLVER.solution(PROBLEM, device, SOLVER.default_configs(PROBLEM, device)[0])
    assert (carried.source_hash, carried.kernel_hash) == (solver_hash(SOLVER), kernel_hash(solution))
    assert carried.time_ms == 3.0
    assert told == Restamped(rows=1)


@pytest.mark.parametrize("solver_id", ["ConvDirectNaive+Pointwise", "ConvDepthwiseChannelsLast", "ConvCudnn+Pointwise"])
def test_rows_of_fused_problems_are_carried_over(solver_id: str, compiler: Compiler) -> None:
    """Under the hash of the sources with their epilogue."""
    problem = ProblemDescription.convolution(
        x=(2, 8, 9, 7), w=(8, 1, 3, 3), padding=1, groups=8, dtype="float16", layout="NHWC", epilogue="bias.relu"
    )
    solver, device = Registry.default()[solver_id], Device.virtual("90a")
    if not solver.applicability(problem, device):
        pytest.skip(solver.applicability(problem, device).reason)
    config = solver.default_configs(problem, device)[0]
    earlier = measured(source_hash="a" * 64, kernel_hash="b" * 64)
    earlier = replace(earlier, solver_id=solver_id, solver_version=solver.version, config=config.json)
    with Store(MEMORY) as store:
        store.add([History(device=DEVICE, network_config=problem.network_config, rows=(earlier,))])
        (history,) = restamped(store, of_another_release(store, compiler), compiler, Restamped())
    (carried,) = history.rows
    assert carried.source_hash == solver_hash(solver, fused=True)
    assert carried.kernel_hash == kernel_hash(solver.solution(problem, device, config))


@pytest.mark.parametrize("fields", [{"code": "c" * 64}, {"solver_version": SOLVER.version + 1}])
def test_a_row_of_other_machine_code_stays_behind(old: Store, compiler: Compiler, fields: dict[str, object]) -> None:
    told = Restamped()
    assert list(restamped(old, of_another_release(old, compiler, **fields), compiler, told)) == []
    assert told.rows == 0
    assert told.different + told.unknown == 1


def test_a_row_that_the_other_release_would_not_run_stays_behind(old: Store, compiler: Compiler) -> None:
    (today,) = codes(old, compiler)
    for other in ({}, {today.name: today}):  # nothing is said of it; what is said is of other sources than the row's
        told = Restamped()
        assert list(restamped(old, other, compiler, told)) == []
        assert told == Restamped(unknown=1)


def test_a_solver_of_which_a_row_stays_behind_is_asked_anew(compiler: Compiler) -> None:
    fast = measured(source_hash="a" * 64, kernel_hash="b" * 64, time_ms=1.0)
    other = row(solver_id="ConvOther", source_hash="d" * 64, created_at=at(0))
    asked = scope(SOLVER.id, "ConvOther", "ConvRefusing", created_at=at(0))
    with Store(MEMORY) as store:
        store.add([History(device=DEVICE, network_config=PROBLEM.network_config, rows=(fast, other), scopes=(asked,))])
        (history,) = restamped(store, of_another_release(store, compiler), compiler, Restamped())
    assert [each.solver_id for each in history.rows] == [SOLVER.id]
    (kept,) = history.scopes
    assert set(kept.solvers) == {SOLVER.id, "ConvRefusing"}


def test_a_verdict_stays_unless_one_of_its_candidates_is_left_behind(old: Store, compiler: Compiler) -> None:
    """A release's verdicts name candidates, too, that it does not hold."""
    (history,) = old.histories()
    (mine,) = history.rows
    left = replace(mine, solver_id="ConvOther", id="")
    for ties, is_kept in (((mine.candidate, "ConvElsewhere:{}"), True), ((mine.candidate, left.candidate), False)):
        verdict = Verdict(
            winner=mine.candidate,
            ties=ties,
            comparisons=(),
            blocks=3,
            protocol="test",
            environment="",
            created_at=at(1),
        )
        with Store(MEMORY) as store:
            store.add([replace(history, rows=(replace(mine, id=""), left), verdicts=(verdict,))])
            (found,) = restamped(store, of_another_release(store, compiler), compiler, Restamped())
        assert [each.ties for each in found.verdicts] == ([ties] if is_kept else [])


def test_a_row_under_todays_hashes_comes_along_uncompiled(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device.virtual("90a")
    solution = SOLVER.solution(PROBLEM, device, SOLVER.default_configs(PROBLEM, device)[0])
    valid = measured(source_hash=solver_hash(SOLVER), kernel_hash=kernel_hash(solution))
    with Store(MEMORY) as store:
        store.add([History(device=DEVICE, network_config=PROBLEM.network_config, rows=(valid,))])
        monkeypatch.setattr(compiler, "build_all", lambda steps, arch: pytest.fail("compiled") if list(steps) else [])
        told = Restamped()
        (history,) = restamped(store, {}, compiler, told)
        assert [replace(row, id="") for row in history.rows] == [valid]
        assert told == Restamped(valid=1)
        assert list(codes(store, compiler, solvers=["ConvOther"])) == []


def test_another_library_s_time_comes_along(old: Store, compiler: Compiler) -> None:
    (history,) = old.histories()
    with Store(MEMORY) as store:
        store.add([replace(history, rows=(*history.rows, rival(created_at=at(1))))])
        told = Restamped()
        (found,) = restamped(store, {}, compiler, told)
    assert [each.solver_id for each in found.rows] == ["Rival"]
    assert told == Restamped(unknown=1)


def test_lines_of_something_else_are_refused() -> None:
    unhashable = json.dumps({name: [] for name in Code.__dataclass_fields__})
    for line in ("[1]", "{", '{"device": "a"}', "1" * 5000, unhashable):
        with pytest.raises(InvalidOptionError, match=r"before\.jsonl, line 1 is none of"):
            read_codes([line], "before.jsonl")


def test_the_commands_carry_a_row_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIOFIND_CACHE_DIR", str(tmp_path / "cache"))
    before, after, written = (tmp_path / name for name in ("before.db", "after.db", "code.jsonl"))
    with Store(before) as store:
        rows = (measured(source_hash="a" * 64, kernel_hash="b" * 64),)
        store.add([History(device=DEVICE, network_config=PROBLEM.network_config, rows=rows)])
    told = json.loads(run("db", "code", str(before)).stdout)
    written.write_text(json.dumps(told | {"source_hash": "a" * 64, "kernel_hash": "b" * 64}) + "\n")
    assert "1 rows of 1 problems" in run("db", "restamp", str(before), str(after), "--code", str(written)).stdout
    with Store(after, read_only=True) as store:
        (found,) = [row for _, row in store.rows()]
    assert found.source_hash == solver_hash(SOLVER)
    assert "is there already" in run("db", "restamp", str(before), str(after), "--code", str(written), code=2).stderr


def test_a_regions_name_is_no_code() -> None:
    def content(*names: str, offset_bytes: int = 0) -> list[object]:
        partials, scratch = (Pointer(buffer=name, offset_bytes=offset_bytes) for name in names)
        kernel = KernelStep(source="a.cu", entry="a", grid=(1, 1, 1), block=(1, 1, 1), args=(partials, scratch))
        transform = FftStep(lengths=(4,), batch=1, inverse=False, data=scratch, workspace=names[0])
        workspace = WorkspacePlan(tuple(Region(name=name, bytes=256) for name in names))
        solution = ConvSolution(steps=(kernel, transform), workspace=workspace)
        return restamp._content(solution, "90a", {("90a", kernel.binary, "a"): "code"})

    assert content("partials", "scratch") == content("parts", "words")
    assert content("partials", "scratch") != content("partials", "scratch", offset_bytes=16)
