"""Convolutions as gathered matrix products: the product's indices reach the elements that the convolution joins."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from miofind.core.problem import Direction, Layout, ProblemDescription
from miofind.device.device import Device
from miofind.reference.convolution import reference_on_host
from miofind.solver.registry import Registry
from miofind.solvers.common.product import (
    Index,
    Operand,
    Output,
    Product,
    Strides,
    linear_stride,
    products,
    vector_length,
)

IntArray = NDArray[np.int64]


@st.composite
def problems(draw: st.DrawFn) -> ProblemDescription:
    rank, groups = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    small = st.integers(1, 3)
    taps, dilation, stride = ([draw(small) for _ in range(rank)] for _ in range(3))
    padding = [[draw(st.integers(0, 5)) for _ in range(2)] for _ in range(rank)]
    sizes = [
        draw(st.integers(least := max(1, step * (tap - 1) + 1 - sum(pads)), least + (9 if rank < 3 else 3)))
        for tap, step, pads in zip(taps, dilation, padding, strict=True)
    ]
    c, k = draw(small), draw(small)
    return ProblemDescription.convolution(
        x=(draw(st.integers(1, 2)), groups * c, *sizes),
        w=(groups * k, c, *taps),
        padding=padding,
        stride=stride,
        dilation=dilation,
        groups=groups,
        layout=Layout.of(rank, channels_last=draw(st.booleans())),
        direction=draw(st.sampled_from(list(Direction))),
    )


def digits(index: Index) -> IntArray:
    """(count, digits) of all values of an index."""
    every = list(itertools.product(*(range(size) for size in reversed(index.sizes))))
    return np.array(every, np.int64).reshape(len(every), len(index.sizes))[:, ::-1]


def offsets(outer: Index, inner: Index, tensor: Operand | Output, group: int) -> IntArray:
    by_outer, by_inner = (
        (tensor.mn_strides, tensor.k_strides) if isinstance(tensor, Operand) else (tensor.m_strides, tensor.n_strides)
    )
    along, across = digits(outer) @ np.array(by_outer), digits(inner) @ np.array(by_inner)
    return tensor.offset + group * tensor.group_stride + along[:, None] + across[None, :]


def inside(product: Product) -> NDArray[np.bool_]:
    """Whether elements of the image lie within it, (m or n, k)."""
    window = product.window
    assert window is not None
    mn, ks = digits(product.m if window.of_a else product.n), digits(product.k)
    result = np.ones((len(mn), len(ks)), bool)
    for axis, (first, extent) in enumerate(zip(window.first, window.extent, strict=True)):
        along = mn[:, window.mn_axis + axis] * window.mn_strides[axis]
        across = ks[:, window.k_axis + axis] * window.k_strides[axis]
        at = first + along[:, None] + across[None, :]
        result &= (at >= 0) & (at < extent)
    return result


def flat(problem: ProblemDescription, name: str, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """A tensor in the order of memory."""
    axes = np.argsort([-stride for stride in problem.tensor(name).strides], kind="stable")
    order = sorted(axes, key=lambda axis: (-problem.tensor(name).strides[axis], -problem.tensor(name).shape[axis]))
    return np.ascontiguousarray(values.transpose(order)).ravel()


def gathered(tensor: NDArray[np.float64], at: IntArray, valid: NDArray[np.bool_] | bool) -> NDArray[np.float64]:
    where = np.broadcast_to(valid, at.shape)
    assert ((at >= 0) & (at < tensor.size))[where].all()
    return np.where(where, tensor[np.where(where, at, 0)], 0)


@settings(max_examples=300)
@given(problem=problems(), seed=st.integers(0, 99))
def test_products_are_the_convolution(problem: ProblemDescription, seed: int) -> None:
    generator = np.random.default_rng(seed)
    inputs = {
        name: generator.integers(-3, 4, problem.tensor(name).shape).astype(np.float64)
        for name in problem.direction.inputs
    }
    memory = {name: flat(problem, name, values) for name, values in inputs.items()}
    result = np.full(problem.output.size, np.nan)
    for product in products(problem):
        valid = True if product.window is None else inside(product)
        for group in range(problem.groups):
            at_a = offsets(product.m, product.k, product.a, group)
            at_b = offsets(product.n, product.k, product.b, group)
            a = gathered(memory[product.a.buffer], at_a, valid if product.window and product.window.of_a else True)
            b = gathered(memory[product.b.buffer], at_b, valid if product.window and not product.window.of_a else True)
            at = offsets(product.m, product.n, product.out, group)
            assert np.isnan(result[at]).all()
            result[at] = a @ b.T
    expected = flat(problem, problem.direction.output, reference_on_host(problem, **inputs))
    np.testing.assert_array_equal(result, expected)


@given(problem=problems())
def test_indices_are_as_linear_as_they_can_be(problem: ProblemDescription) -> None:
    for product in products(problem):
        uses: list[tuple[Index, Strides]] = [
            (product.m, product.a.mn_strides),
            (product.k, product.a.k_strides),
            (product.n, product.b.mn_strides),
            (product.k, product.b.k_strides),
            (product.m, product.out.m_strides),
            (product.n, product.out.n_strides),
        ]
        for index, strides in uses:
            stride = linear_stride(index, strides)
            if stride is not None and index.count:
                np.testing.assert_array_equal(digits(index) @ np.array(strides), stride * np.arange(index.count))


@pytest.mark.parametrize(
    ("sizes", "strides", "others", "length"),
    [
        ((64,), (1,), (64, 128), 8),
        ((64,), (2,), (64,), 1),
        ((12, 3), (1, 12), (), 4),
        ((12, 3), (1, 16), (), 4),
        ((8, 3), (1, 12), (), 4),
        ((8, 3), (1, 16), (6,), 2),
        ((3, 3), (1, 3), (), 1),
        ((1,), (1,), (8,), 1),
    ],
)
def test_vectors_start_at_multiples_of_their_length(
    sizes: tuple[int, ...], strides: Strides, others: Strides, length: int
) -> None:
    assert vector_length(8, Index(sizes=sizes), strides, others) == length


@pytest.mark.parametrize("arch", ["80", "90a"])
@pytest.mark.parametrize(
    ("x", "w", "padding"),
    [
        ((1, 512, 7, 7), (512, 512, 3, 3), 1),
        ((32, 64, 56, 56), (64, 64, 3, 3), 1),
        ((32, 256, 56, 56), (64, 256, 1, 1), 0),
        ((32, 3, 224, 224), (64, 3, 7, 7), 3),
        ((256, 1024, 14, 14), (1024, 1024, 1, 1), 0),
    ],
)
@pytest.mark.parametrize("direction", list(Direction))
def test_defaults_occupy_the_device(
    x: tuple[int, ...], w: tuple[int, ...], padding: int, direction: Direction, arch: str
) -> None:
    """Few tiles are split, many are not, and no default takes longer by estimate than another default eightfold."""
    device, solver = Device.virtual(arch), Registry.default()["ConvImplicitGemmMma"]
    problem = ProblemDescription.convolution(
        x=x, w=w, padding=padding, dtype="float16", layout="NHWC", direction=direction
    )
    defaults = solver.default_configs(problem, device)
    times = [solver.estimate_ms(problem, device, config) for config in defaults]
    assert times == sorted(times)
    assert times[-1] <= 8 * times[0]
    (step, *_) = solver.solution(problem, device, defaults[0]).kernels
    enough = problem.flops < 1e9 or math.prod(step.grid) >= device.sm_count // 2
    assert enough
    floor_ms = 1e3 * problem.bytes / device.bandwidth_bytes_per_s
    assert times[0] >= floor_ms
