"""How problems are cut: results of the parts, each at its offsets, are those of the whole."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from miofind.core.epilogue import Epilogue
from miofind.core.problem import Direction, ProblemDescription, TensorDescriptor
from miofind.reference.convolution import reference_on_host
from miofind.solvers.common.limits import MAX_ELEMENTS
from miofind.solvers.large.parts import MAX_PARTS, Part, parts

LARGE = ProblemDescription.convolution(x=(4, 64, 1 << 13, 1 << 13), w=(64, 64, 3, 3), padding=1, layout="NHWC")


def drawn(seed: int) -> ProblemDescription:
    """A small problem, with rows of any number."""
    draw = random.Random(seed)
    rank, groups = draw.choice((1, 2, 2, 3)), draw.choice((1, 2))
    taps, dilation, stride = ([draw.randint(1, most) for _ in range(rank)] for most in (4, 3, 4))
    padding = [(draw.randint(0, 5), draw.randint(0, 5)) for _ in range(rank)]
    sizes = [draw.randint(1, 40), *(draw.randint(1, 6) for _ in range(rank - 1))]
    least = [d * (f - 1) + 1 - sum(p) for f, d, p in zip(taps, dilation, padding, strict=True)]
    return ProblemDescription.convolution(
        x=(draw.randint(1, 7), 4 * groups, *map(max, sizes, least)),
        w=(4 * groups, 4, *taps),
        padding=padding,
        stride=stride,
        dilation=dilation,
        groups=groups,
        direction=draw.choice(list(Direction)),
        layout={1: "NWC", 2: "NHWC", 3: "NDHWC"}[rank] if draw.random() < 0.8 else None,
    )


def seen(memory: NDArray[np.float32], tensor: TensorDescriptor, offset_bytes: int = 0) -> NDArray[np.float32]:
    """A tensor of logical shape that begins somewhere in memory."""
    strides = [stride * memory.itemsize for stride in tensor.strides]
    return np.ndarray(tensor.shape, memory.dtype, memory, offset_bytes, strides)


def compute(part: Part, memory: dict[str, NDArray[np.float32]]) -> None:
    """Write a part's results to where they belong, where nothing was before; gradients of weights are summed."""
    problem, output = part.problem, part.problem.direction.output
    arrays = {name: seen(memory[name], problem.tensor(name), part.offsets_bytes.get(name, 0)) for name in "xwy"}
    result = arrays.pop(output)
    if output == "w":
        np.nan_to_num(result, copy=False)[...] += reference_on_host(problem, **arrays)
        return
    assert np.isnan(result).all()
    result[...] = reference_on_host(problem, **arrays)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(400))
def test_parts_compute_what_the_whole_does(seed: int) -> None:
    problem, draw = drawn(seed), np.random.default_rng(seed)
    memory = {name: draw.integers(-2, 3, problem.tensor(name).size).astype(np.float32) for name in "xwy"}
    output = problem.direction.output
    memory[output].fill(np.nan)
    largest = max(problem.x.size, problem.y.size)
    for most in range(1, largest, max(1, largest // 7)):
        for part in (cut := parts(problem, most)):
            assert max(part.problem.x.size, part.problem.y.size) <= most
            compute(part, memory)
        if not cut:
            continue
        read = {name: seen(memory[name], problem.tensor(name)) for name in problem.direction.inputs}
        np.testing.assert_array_equal(seen(memory[output], problem.output), reference_on_host(problem, **read))
        memory[output].fill(np.nan)


def test_most_small_problems_are_cut() -> None:
    """Channels last; the others have single images, tensors of few bytes, or filters wider than a part."""
    last = [problem for problem in map(drawn, range(400)) if problem.x.layout.channels_last]
    whole = [max(problem.x.size, problem.y.size) for problem in last]
    assert sum(bool(parts(each, most // 2)) for each, most in zip(last, whole, strict=True)) > 0.6 * len(last)


@pytest.mark.parametrize("direction", ["forward", "backward_data"])
def test_images_are_spread_evenly(direction: str) -> None:
    problem = ProblemDescription.convolution(x=(50, 8, 9, 8), w=(8, 8, 3, 3), padding=1, direction=direction)
    image = problem.x.size // 50
    assert [part.problem.n for part in parts(problem, 24 * image)] == [17, 17, 16]
    assert [part.offsets_bytes["x"] for part in parts(problem, 24 * image)] == [0, 17 * 4 * image, 34 * 4 * image]


def test_images_begin_where_vectors_may() -> None:
    """An image of 45 halves: each eighth begins at a multiple of 16 bytes."""
    problem = ProblemDescription.convolution(x=(40, 5, 3, 3), w=(8, 5, 3, 3), padding=1, dtype="float16")
    assert [part.problem.n for part in parts(problem, 20 * 72)] == [16, 16, 8]
    assert parts(problem, 7 * 72) == ()


def test_one_image_is_cut_along_its_rows_channels_last() -> None:
    problem = replace(
        LARGE, x=replace(LARGE.x, shape=(1, 64, 1 << 13, 1 << 13)), y=replace(LARGE.y, shape=(1, 64, 1 << 13, 1 << 13))
    )
    first, second, last = parts(problem, MAX_ELEMENTS)
    assert first.problem.x.shape == (1, 64, 2732, 1 << 13)
    assert (first.problem.conv.pad_before, first.problem.conv.pad_after) == ((1, 1), (0, 1))
    assert (second.problem.conv.pad_before, last.problem.conv.pad_after) == ((0, 1), (1, 1))
    assert second.offsets_bytes == {"x": 4 * 2730 * 64 << 13, "y": 4 * 2731 * 64 << 13}


def test_channels_first_an_image_is_not_cut() -> None:
    assert parts(ProblemDescription.convolution(x=(1, 64, 1 << 13, 1 << 13), w=(64, 64, 3, 3)), MAX_ELEMENTS) == ()


def test_what_epilogues_read_is_cut_too() -> None:
    forward = replace(LARGE, epilogue=Epilogue.of("scale.bias.channel_bias.residual.relu"))
    part = parts(forward, MAX_ELEMENTS)[5]
    assert part.problem.epilogue == forward.epilogue
    assert part.offsets_bytes["residual"] == part.offsets_bytes["y"] > 0
    assert part.offsets_bytes["channel_bias"] == 4 * 64
    assert not {"scale", "bias", "w"} & part.offsets_bytes.keys()
    data = replace(LARGE, direction=Direction.BACKWARD_DATA, epilogue=Epilogue.of("residual.drelu"))
    part = parts(data, MAX_ELEMENTS)[5]
    assert part.offsets_bytes["residual"] == part.offsets_bytes["saved"] == part.offsets_bytes["x"] > 0


def test_there_are_not_too_many() -> None:
    image = ProblemDescription.convolution(x=(2 * MAX_PARTS, 8, 4, 4), w=(8, 8, 1, 1))
    assert len(parts(image, 2 * 8 * 16)) == MAX_PARTS
    assert parts(image, 8 * 16) == ()


@pytest.mark.parametrize(
    ("x", "dilation"),
    [((1 << 14, 64, 1 << 16, 1 << 10), 1), ((1, 4, (1 << 31) - 1, 4), (1 << 27) - 1)],
    ids=["images", "rows"],
)
@pytest.mark.parametrize("direction", list(Direction))
def test_far_too_many_are_not_made(
    x: tuple[int, ...], dilation: int, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took 12 s, or as good as for ever, to refuse a tensor of 2^47 bytes: all parts were made to be counted."""
    problem = ProblemDescription.convolution(
        x=x, w=(1, x[1], 2, 1), dilation=(dilation, 1), dtype="float16", layout="NHWC", direction=direction
    )
    made, replaced = Counter[str](), replace

    def counted(value: TensorDescriptor, **changes: object) -> TensorDescriptor:
        made["tensors"] += 1
        assert made["tensors"] < 16 * MAX_PARTS
        return replaced(value, **changes)  # type: ignore[arg-type]

    monkeypatch.setattr("miofind.solvers.large.parts.replace", counted)
    assert parts(problem, MAX_ELEMENTS) == ()
