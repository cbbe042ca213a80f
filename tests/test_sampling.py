"""Which output elements are checked."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problem_strategies import problems

from miofind.problem import Direction, ProblemDescription
from miofind.reference import reference_on_host
from miofind.verify.sampling import SampleBudget, edge_coordinates, sample_box, sample_indices

RESNET = ProblemDescription.convolution(x=(32, 64, 56, 56), w=(64, 64, 3, 3), padding=1)


def test_small_outputs_are_checked_whole() -> None:
    problem = ProblemDescription.convolution(x=(1, 4, 8, 8), w=(8, 4, 3, 3))
    chosen = sample_indices(problem, np.random.default_rng(0), SampleBudget())
    np.testing.assert_array_equal(chosen, np.arange(problem.output.size))


@pytest.mark.parametrize("direction", Direction)
def test_large_outputs_are_sampled_at_corners_the_end_and_at_random(direction: Direction) -> None:
    problem = ProblemDescription.convolution(x=(64, 256, 56, 56), w=(512, 256, 3, 3), padding=1, direction=direction)
    budget = SampleBudget()
    chosen = sample_indices(problem, np.random.default_rng(0), budget)
    size = problem.output.size
    assert np.all(np.diff(chosen) > 0)
    assert {0, size - 1, size - 100} <= set(chosen.tolist())
    assert 500 <= chosen.size <= budget.most + 200
    assert chosen.size * problem.reduction_length <= max(budget.products, 1.3 * budget.least * problem.reduction_length)
    other = sample_indices(problem, np.random.default_rng(1), budget)
    assert not np.array_equal(chosen, other)


def test_edges_of_tiles_are_among_the_coordinates() -> None:
    edges = set(edge_coordinates(200).tolist())
    assert {0, 7, 8, 9, 63, 64, 65, 127, 128, 129, 191, 192, 193, 199} <= edges
    assert edge_coordinates(1).tolist() == [0]


@given(problem=problems(), seed=st.integers(0, 100), products=st.sampled_from([10, 10_000, 10**9]))
def test_samples_lie_in_the_output(problem: ProblemDescription, seed: int, products: int) -> None:
    chosen = sample_indices(problem, np.random.default_rng(seed), SampleBudget(products=products, least=64, most=256))
    assert 0 <= chosen[0] <= chosen[-1] < problem.output.size


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("direction", Direction)
def test_a_box_of_the_output_is_the_output_of_its_part(direction: Direction, groups: int) -> None:
    problem = ProblemDescription.convolution(
        x=(5, 16, 7, 6), w=(24, 16 // groups, 3, 3), padding=1, groups=groups, stride=2, direction=direction
    )
    random = np.random.default_rng(0)
    box = sample_box(problem, random, problem.flops // 12)
    assert box.part.flops < problem.flops / 2
    tensors = {name: random.standard_normal(problem.tensor(name).shape) for name in problem.direction.inputs}
    whole = reference_on_host(problem, **tensors)
    part = reference_on_host(box.part, **{name: tensors[name][box.select(name)] for name in tensors})
    np.testing.assert_allclose(part, whole[box.select(problem.direction.output)], atol=1e-12)
    at = tuple(size - 1 for size in part.shape)
    assert whole[box.index(at)] == pytest.approx(part[at])


def test_a_box_is_the_whole_output_where_the_budget_allows() -> None:
    box = sample_box(RESNET, np.random.default_rng(0), RESNET.flops)
    assert box.part == RESNET
