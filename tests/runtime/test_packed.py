"""Weights packed once: the same results as from plain weights, bit by bit, and clear errors."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import miofind
from miofind.errors import InvalidArrayError, InvalidOptionError, LaunchError, WorkspaceError

SHAPES: dict[str, Any] = {"x": (2, 32, 9, 8), "w": (32, 16, 3, 3), "padding": 1, "groups": 2}
FEW_TILES: dict[str, Any] = {"x": (1, 32, 5, 5), "w": (32, 32, 3, 3), "padding": 0}


def solutions_of(
    path: Path, direction: str, solver: str, layout: str = "NCHW", shapes: dict[str, Any] = SHAPES
) -> list[miofind.Solution]:
    problem = miofind.ProblemDescription.convolution(**shapes, direction=direction, layout=layout)
    handle = miofind.Handle("cpu", database=path / "found.db")
    options = miofind.FindOptions(only=solver, max_error=1.0)
    return miofind.find_solutions(problem, options=options, handle=handle)


def operands(problem: miofind.ProblemDescription) -> dict[str, NDArray[np.float32]]:
    generator = np.random.default_rng(5)
    arrays = {}
    for name in problem.direction.inputs:
        tensor = problem.tensor(name)
        order = (0, *range(2, len(tensor.shape)), 1) if tensor.layout.channels_last else range(len(tensor.shape))
        memory = generator.standard_normal(tuple(tensor.shape[i] for i in order)).astype(np.float32)
        arrays["dy" if name == "y" else name] = memory.transpose(np.argsort(tuple(order)))
    return arrays


@pytest.mark.parametrize("shapes", [SHAPES, FEW_TILES], ids=["groups", "few tiles"])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("direction", ["forward", "backward_data"])
def test_packed_weights_give_the_same_bits(tmp_path: Path, direction: str, layout: str, shapes: dict[str, Any]) -> None:
    for solution in solutions_of(tmp_path, direction, "ConvCpuWinograd", layout, shapes):
        given = operands(solution.problem)
        want = miofind.run_solution(solution, **given)
        packed = solution.pack(given["w"])
        tile = solution.config["tile"]
        assert packed.packed_bytes == 4 * (tile + 2) ** 2 * shapes["w"][0] * shapes["w"][1]
        image = {name: array for name, array in given.items() if name != "w"}
        np.testing.assert_array_equal(packed.run(**image), want)
        out = np.full_like(want, np.nan)
        workspace = np.full(packed.workspace_bytes, 0xFF, np.uint8)
        assert packed.run(**image, out=out, workspace=workspace) is out
        np.testing.assert_array_equal(out, want)


def test_what_packs_nothing_keeps_the_weights(tmp_path: Path) -> None:
    solution = solutions_of(tmp_path, "forward", "ConvCpuIm2colGemm")[0]
    given = operands(solution.problem)
    packed = solution.pack(given["w"])
    assert packed.packed_bytes == 0
    assert packed.workspace_bytes == solution.workspace_bytes
    np.testing.assert_array_equal(packed.run(given["x"]), miofind.run_solution(solution, **given))


@pytest.mark.parametrize("solver", ["ConvCpuWinograd", "ConvCpuIm2colGemm"])
def test_bad_weights_and_operands_are_refused(tmp_path: Path, solver: str) -> None:
    solution = solutions_of(tmp_path, "forward", solver)[0]
    given = operands(solution.problem)
    with pytest.raises(InvalidArrayError, match="w has shape"):
        solution.pack(given["w"][1:])
    with pytest.raises(InvalidArrayError, match="w has dtype"):
        solution.pack(given["w"].astype(np.float64))
    with pytest.raises(InvalidArrayError, match="w is missing"):
        solution.pack(None)
    packed = solution.pack(given["w"])
    with pytest.raises(InvalidArrayError, match="packed forward solution takes x; given: nothing"):
        packed.run()
    with pytest.raises(InvalidArrayError, match="takes x; given: x, dy"):
        packed.run(given["x"], dy=given["x"])
    with pytest.raises(InvalidOptionError, match="is no stream"):
        solution.pack(given["w"], stream="a")
    with pytest.raises(InvalidArrayError, match="x has shape"):
        packed.run(given["x"][:1])
    with pytest.raises(WorkspaceError, match="workspace has 16 bytes"):
        packed.run(given["x"], workspace=np.empty(16, np.uint8))


def test_a_workspace_that_is_not_needed_is_not_looked_at(tmp_path: Path) -> None:
    solution = solutions_of(tmp_path, "forward", "ConvCpuDirect")[0]
    given = operands(solution.problem)
    want = miofind.run_solution(solution, **given)
    unaligned = np.full(17, 0xA5, np.uint8)[1:]
    out = np.full_like(want, np.nan)
    assert miofind.run_solution(solution, **given, out=out, workspace=unaligned) is out
    np.testing.assert_array_equal(out, want)
    packed = solution.pack(given["w"])
    np.testing.assert_array_equal(packed.run(given["x"], workspace=unaligned), want)
    assert solution.workspace_bytes == packed.workspace_bytes == 0
    assert (unaligned == 0xA5).all()


def test_weights_that_are_the_result_are_not_packed(tmp_path: Path) -> None:
    solution = solutions_of(tmp_path, "backward_weights", "ConvCpuIm2colGemm")[0]
    with pytest.raises(InvalidOptionError, match="nothing to pack"):
        solution.pack(np.zeros(SHAPES["w"], np.float32))


def test_copies_share_packed_weights_and_pickles_are_refused(tmp_path: Path) -> None:
    solution = solutions_of(tmp_path, "forward", "ConvCpuWinograd")[0]
    packed = solution.pack(operands(solution.problem)["w"])
    assert copy.deepcopy({"layer": packed})["layer"] is packed
    with pytest.raises(TypeError, match="pack where they arrive"):
        pickle.dumps(packed)


def test_other_kernels_than_were_measured_are_refused(tmp_path: Path) -> None:
    solution = solutions_of(tmp_path, "forward", "ConvCpuWinograd")[0]
    with pytest.raises(LaunchError, match="measured with other kernels"):
        replace(solution, kernel_hash="0" * 32).pack(operands(solution.problem)["w"])


def test_a_workspace_of_another_array_class_is_no_fault_of_the_solution(tmp_path: Path) -> None:
    solution = solutions_of(tmp_path, "forward", "ConvCpuIm2colGemm")[0]
    given = operands(solution.problem)
    with pytest.raises(WorkspaceError, match="masked array"):
        miofind.run_solution(solution, **given, workspace=np.ma.array(np.empty(solution.workspace_bytes, np.uint8)))
    workspace = np.empty(solution.workspace_bytes, np.uint8).view(np.recarray)
    want = miofind.run_solution(solution, **given)
    np.testing.assert_array_equal(miofind.run_solution(solution, **given, workspace=workspace), want)
