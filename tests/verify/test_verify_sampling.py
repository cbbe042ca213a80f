"""Which output elements are checked: no coordinate is left out, single elements have the chance that is promised."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers.problems.problem_strategies import problems
from hypothesis import given, settings
from hypothesis import strategies as st

from miofind.core.problem import Direction, ProblemDescription
from miofind.device.device import Device
from miofind.reference.convolution import reference_on_host
from miofind.verify.sampling import (
    SampleBudget,
    covering,
    distinct,
    edge_coordinates,
    flattened_edges,
    sample_indices,
    stratified,
)
from miofind.verify.strip_reference import strip_sums
from miofind.verify.strips import Matrix, StripBudget, of_images, sample_images, sample_strips, strip_indices

# (channels, size) of ResNet-50's layers of 3x3 taps, with the stride that some have.
RESNET_3X3 = [(64, 56, 1), (128, 56, 2), (128, 28, 1), (256, 28, 2), (256, 14, 1), (512, 14, 2), (512, 7, 1)]
DEEP = {
    "depthwise": ProblemDescription.convolution(x=(32, 144, 56, 56), w=(144, 1, 3, 3), padding=1, groups=144),
    "grouped": ProblemDescription.convolution(x=(32, 128, 56, 56), w=(128, 4, 3, 3), padding=1, groups=32),
    "first": ProblemDescription.convolution(x=(32, 3, 224, 224), w=(64, 3, 7, 7), padding=3, stride=2),
    "1x1": ProblemDescription.convolution(x=(32, 256, 56, 56), w=(64, 256, 1, 1), layout="NHWC"),
    "long": ProblemDescription.convolution(x=(2, 8, 300_000), w=(16, 8, 31), padding=15),
    "deep": ProblemDescription.convolution(x=(4, 32, 40, 41, 42), w=(48, 32, 3, 3, 3), padding=1),
    "wide": ProblemDescription.convolution(x=(32, 4096, 7, 7), w=(1000, 4096, 7, 7)),
}
RESNET = {
    f"{channels}x{size}s{stride}": ProblemDescription.convolution(
        x=(32, channels, size, size), w=(channels, channels, 3, 3), padding=1, stride=stride
    )
    for channels, size, stride in RESNET_3X3
}


def turned(problem: ProblemDescription, direction: Direction) -> ProblemDescription:
    """The same convolution in another direction."""
    conv = problem.conv
    return ProblemDescription.convolution(
        x=problem.x.shape,
        w=problem.w.shape,
        padding=conv.pad_before,
        stride=conv.stride,
        groups=problem.groups,
        direction=direction,
        layout=problem.x.layout,
    )


def coordinates(problem: ProblemDescription, indices: np.ndarray) -> list[set[int]]:
    """The coordinates of each axis that occur."""
    return [set(axis.tolist()) for axis in np.unravel_index(indices, problem.output.shape)]


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_distinct_points_are_those_of_numpy(count: int) -> None:
    points = np.random.default_rng(count).integers(0, max(1, count // 2), count)
    np.testing.assert_array_equal(distinct(points), np.unique(points))


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", [*RESNET, *DEEP])
def test_no_image_channel_row_or_column_is_left_out_on_a_gpu(name: str, direction: Direction) -> None:
    problem = turned((RESNET | DEEP)[name], direction)
    budget = SampleBudget(products=1 << 24, least=1 << 12)
    for seed in range(2):
        chosen = sample_indices(problem, np.random.default_rng(seed), budget)
        assert np.all(np.diff(chosen) > 0)
        assert chosen[0] >= 0
        assert chosen[-1] == problem.output.size - 1
        assert chosen.size <= budget.most
        for size, seen in zip(problem.output.shape, coordinates(problem, chosen), strict=True):
            assert seen >= set(range(size) if size <= budget.least * 3 // 8 else edge_coordinates(size).tolist())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", [*RESNET, *DEEP])
def test_no_image_channel_row_or_column_is_left_out_on_the_cpu_place(name: str, direction: Direction) -> None:
    problem = turned((RESNET | DEEP)[name], direction)
    strips = sample_strips(problem, np.random.default_rng(len(name)))
    chosen = strip_indices(problem, strips)
    assert np.unique(chosen).size == chosen.size
    axis = Matrix.of(problem).axis
    for i, (size, seen) in enumerate(zip(problem.output.shape, coordinates(problem, chosen), strict=True)):
        assert i != axis or seen == set(range(size))
        if name != "long":
            assert seen == set(range(size)), f"axis {i}"


@pytest.mark.parametrize("name", [*RESNET, *DEEP])
def test_edges_of_flattened_rows_are_looked_at_in_both_rigs(name: str) -> None:
    """First, middle and last tile of the rows of the matrix product, and where the batch is split."""
    problem = (RESNET | DEEP)[name]
    n, _, *out = problem.output.shape
    rows = n * math.prod(out)
    edges = set(edge_coordinates(rows).tolist())
    chosen = sample_indices(problem, np.random.default_rng(5), SampleBudget(products=1 << 24))
    image, _, *at = np.unravel_index(chosen, problem.output.shape)
    seen = set(np.ravel_multi_index((image, *at), (n, *out)).tolist())
    assert edges <= seen
    strips = sample_strips(problem, np.random.default_rng(5))
    likeliest = edge_coordinates(rows)[: max(strip.rows.size for strip in strips) // 16]
    assert set(likeliest.tolist()) <= {row for strip in strips for row in strip.rows.tolist()}


def test_positions_differ_from_seed_to_seed_and_repeat_with_it() -> None:
    problem = RESNET["64x56s1"]
    first, other, again = (
        strip_indices(problem, sample_strips(problem, np.random.default_rng(seed))) for seed in (0, 1, 0)
    )
    np.testing.assert_array_equal(first, again)
    assert np.intersect1d(first, other).size < first.size / 4
    first, other, again = (
        sample_indices(problem, np.random.default_rng(seed), SampleBudget(products=1)) for seed in (0, 1, 0)
    )
    np.testing.assert_array_equal(first, again)
    assert np.intersect1d(first, other).size < first.size / 4


def test_every_place_has_its_chance() -> None:
    """Over many seeds each element of an output is seen, no quarter of them much rarer than the others."""
    problem = ProblemDescription.convolution(x=(8, 16, 12, 12), w=(16, 16, 3, 3), padding=1)
    budget, rounds = SampleBudget(products=1, least=1024), 400
    for sample in (
        lambda random: sample_indices(problem, random, budget),
        lambda random: strip_indices(
            problem, sample_strips(problem, random, StripBudget(products=1 << 17, gathered=1 << 15, elements=1 << 10))
        ),
    ):
        hits = np.zeros(problem.output.size, np.int64)
        share = 0.0
        for seed in range(rounds):
            chosen = sample(np.random.default_rng(seed))
            hits[chosen] += 1
            share += chosen.size / problem.output.size / rounds
        assert share < 0.2
        assert hits.min() > 0
        assert np.quantile(hits, 0.05) >= rounds * share / 2 - 4 * math.sqrt(rounds * share)


def test_no_longer_run_of_elements_goes_unseen() -> None:
    problem = RESNET["64x56s1"]
    budget = SampleBudget(products=1)
    chosen = sample_indices(problem, np.random.default_rng(0), budget)
    assert np.diff(chosen).max() <= 2 * 8 * problem.output.size / (3 * budget.least)


def test_a_device_says_what_is_cheap() -> None:
    """ResNet-50's layers of batch 32 are checked whole on a GPU with fast float64; memory is bounded everywhere."""
    hopper, ada = SampleBudget.of(Device.virtual("90a")), SampleBudget.of(Device.virtual("89"))
    assert all(hopper.covers(problem, 24) for problem in RESNET.values())
    assert ada.products < hopper.products
    large = ProblemDescription.convolution(x=(2048, 64, 56, 56), w=(64, 64, 1, 1))
    assert not hopper.covers(large, 24)
    assert hopper.bytes == 1 << 30
    assert not hopper.within(1 << 20).covers(RESNET["64x56s1"], 24)


def test_small_outputs_are_checked_whole_whatever_they_cost() -> None:
    problem = ProblemDescription.convolution(x=(1, 4, 8, 8), w=(8, 4, 3, 3))
    chosen = sample_indices(problem, np.random.default_rng(0), SampleBudget(products=1))
    np.testing.assert_array_equal(chosen, np.arange(problem.output.size))


def test_edges_of_tiles_and_of_splits_are_among_the_coordinates() -> None:
    edges = set(edge_coordinates(1000).tolist())
    assert {0, 1, 998, 999} <= edges
    assert {7, 8, 9, 63, 64, 65, 127, 128, 129, 255, 256, 257} <= edges, "the first tile"
    assert {447, 448, 511, 512, 383, 384} <= edges, "the tile in the middle"
    assert {959, 960, 961, 895, 896, 991, 992} <= edges, "the last tile"
    assert {499, 500, 501, 249, 250, 750, 124, 125, 126, 875} <= edges, "halves, quarters and eighths"
    assert {11, 12, 13, 491, 492, 503, 504, 995, 996} <= set(edge_coordinates(1000, (12,)).tolist()), "groups"
    assert edge_coordinates(1).tolist() == [0]
    assert edge_coordinates(1000)[:3].tolist() == [0, 999, 500], "the likeliest first"


@given(size=st.integers(1, 5000), count=st.integers(1, 600), seed=st.integers(0, 10))
def test_coordinates_cover_an_axis_as_far_as_they_go(size: int, count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    chosen = covering(size, count, random)
    assert chosen.size == count
    assert chosen.min() >= 0
    assert chosen.max() < size
    if size <= count:
        assert set(chosen.tolist()) == set(range(size))
    spread = stratified(size, count, random)
    assert spread.size == count
    assert np.all(np.diff(spread) >= 0)
    assert spread[0] >= 0
    assert spread[-1] < size


def test_flattened_edges_are_edges_of_the_axes_in_the_order_given() -> None:
    shape = (6, 10, 7, 9)
    chosen = flattened_edges(shape, (2, 3, 1), np.random.default_rng(0))
    _, channel, row, column = np.unravel_index(chosen, shape)
    assert set(((row * 9 + column) * 10 + channel).tolist()) == set(edge_coordinates(630).tolist())


@given(problem=problems(), seed=st.integers(0, 100), products=st.sampled_from([10, 10_000, 10**9]))
def test_samples_lie_in_the_output(problem: ProblemDescription, seed: int, products: int) -> None:
    chosen = sample_indices(problem, np.random.default_rng(seed), SampleBudget(products=products, least=64, most=256))
    assert 0 <= chosen[0] <= chosen[-1] < problem.output.size
    strips = sample_strips(
        problem, np.random.default_rng(seed), StripBudget(products=products, gathered=products // 8 + 1, elements=256)
    )
    chosen = strip_indices(problem, strips)
    assert 0 <= chosen.min() <= chosen.max() < problem.output.size
    assert np.unique(chosen).size == chosen.size


@given(problem=problems(), seed=st.integers(0, 100))
@settings(max_examples=60)
def test_sums_of_strips_are_those_of_the_whole(problem: ProblemDescription, seed: int) -> None:
    if problem.flops > 1e8 or problem.bytes > 1e8:
        return
    random = np.random.default_rng(seed)
    tensors = {}
    for name in problem.direction.inputs:
        descriptor = problem.tensor(name)
        values = random.integers(-3, 4, descriptor.size).astype(np.float32)
        tensors[name] = np.ndarray(descriptor.shape, np.float32, values, strides=[4 * s for s in descriptor.strides])
    strips = sample_strips(
        problem, random, StripBudget(products=problem.flops // 20 + 1, gathered=problem.x.size // 10 + 1)
    )
    indices = strip_indices(problem, strips)
    sums, magnitudes = strip_sums(problem, tensors, strips, (lambda t: t, np.abs))
    given_ = {name: tensors.get(name) for name in "xwy"}
    np.testing.assert_array_equal(sums, reference_on_host(problem, **given_, indices=indices))
    absolute = {name: None if t is None else np.abs(t) for name, t in given_.items()}
    np.testing.assert_array_equal(magnitudes, reference_on_host(problem, **absolute, indices=indices))


def test_images_are_checked_whole_where_few_channels_share_long_sums() -> None:
    problem = turned(DEEP["first"], Direction.BACKWARD_DATA)
    images = sample_images(problem, np.random.default_rng(0))
    assert images.size >= 1
    assert of_images(problem, images.size).output.shape == (images.size, *problem.output.shape[1:])
    assert of_images(problem, problem.n) == problem
    for other in (DEEP["depthwise"], RESNET["64x56s1"], turned(DEEP["first"], Direction.BACKWARD_WEIGHTS)):
        assert sample_images(other, np.random.default_rng(0)).size == 0


def test_coordinates_that_are_given_twice_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        edge_coordinates(100)[0] = 7
    assert edge_coordinates(100)[0] == 0
