"""Split-K: where partials lie, who shares a result, and the step that adds them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from miofind.core.problem import ProblemDescription
from miofind.solver.steps import KernelStep, Pointer, Region, int32s
from miofind.solvers.common.split_k import SplitK

FIRST = KernelStep(
    source="grouped/nhwc_weights.cu",
    entry="grouped_nhwc_weights",
    grid=(7, 5, 1),
    block=(96, 1, 1),
    defines=(("LANES", 2),),
    args=(Pointer(buffer="y"),),
)


def test_one_split_writes_the_output_itself() -> None:
    assert SplitK(results=10, splits=1).target == "w"
    assert SplitK(results=10, splits=2).target == SplitK(results=10, splits=2).partials.name != "w"


def test_partials_are_float32_of_every_split() -> None:
    assert SplitK(results=1000, splits=7, region="sums").partials == Region(name="sums", bytes=28000)


@pytest.mark.parametrize("splits", [1, 4, 5, 8, 9, 33, 128, 129, 5000])
def test_lanes_are_a_power_of_two_with_up_to_four_splits_each(splits: int) -> None:
    lanes = SplitK(results=4, splits=splits).lanes
    assert lanes & (lanes - 1) == 0
    assert lanes == 32 or splits <= 4 * lanes
    assert lanes == 1 or splits > 2 * lanes


@pytest.mark.parametrize("results", [4, 1020, 1024, 1028, 36864])
@pytest.mark.parametrize("splits", [2, 9, 200])
def test_vector_reduction_covers_every_result(results: int, splits: int) -> None:
    split_k = SplitK(results=results, splits=splits)
    step = split_k.vector_reduction(FIRST)
    covered = step.grid[0] * step.block[0] // split_k.lanes * 4
    assert covered >= results > covered - step.block[0] // split_k.lanes * 4


def test_solution_reads_in_its_second_step_what_the_first_leaves() -> None:
    split_k = SplitK(results=64, splits=3)
    writer = replace(FIRST, args=(*FIRST.args, Pointer(buffer=split_k.target)))
    solution = split_k.solution(writer, split_k.reduction(FIRST, *int32s(64), blocks=2, threads=32))
    first, second = solution.kernels
    assert first == replace(writer, defines=(*FIRST.defines, ("HAS_DEPENDENT", 1)))
    assert (second.source, second.entry, second.defines) == (FIRST.source, "grouped_nhwc_weights_finish", first.defines)
    assert (second.grid, second.block, second.pdl) == ((2, 1, 1), (32, 1, 1), True)
    assert second.args == (Pointer(buffer=split_k.target), Pointer(buffer="w"), *int32s(64))
    assert solution.workspace.regions == (split_k.partials,)


@pytest.mark.parametrize(("direction", "output", "results"), [("forward", "y", 288), ("backward_weights", "w", 108)])
def test_all_elements_of_the_output_are_split(direction: str, output: str, results: int) -> None:
    problem = ProblemDescription.convolution(x=(2, 3, 6, 5), w=(6, 3, 3, 2), padding=(1, 0), direction=direction)
    split_k = SplitK.of(problem, 4)
    assert (split_k.results, split_k.splits, split_k.output) == (results, 4, output)


@pytest.mark.parametrize(("splits", "region", "kernels"), [(1, False, 1), (1, True, 2), (2, True, 2)])
def test_solution_reduces_unless_the_first_step_writes_the_output(splits: int, region: bool, kernels: int) -> None:
    split_k = SplitK(results=64, splits=splits)
    writer = replace(FIRST, args=(*FIRST.args, Pointer(buffer=split_k.region if region else split_k.target)))
    solution = split_k.solution(writer, split_k.reduction(writer, blocks=1, threads=32))
    assert len(solution.kernels) == kernels
    assert (solution.workspace.regions == ()) is (kernels == 1)
