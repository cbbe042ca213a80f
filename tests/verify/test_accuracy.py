"""Error bounds: derived from dtype and reduction length, with a margin over simulated sums."""

from __future__ import annotations

import numpy as np
import pytest

from miofind.core.problem import DataType, ProblemDescription
from miofind.verify.accuracy import direct_error, error_bounds, half_ulp


def pointwise(channels: int, dtype: str = "float32", math: str = "ieee") -> ProblemDescription:
    return ProblemDescription.convolution(x=(1, channels, 1, 1), w=(1, channels, 1, 1), dtype=dtype, math=math)


@pytest.mark.parametrize("dtype", [DataType.FLOAT16, DataType.FLOAT32, DataType.FLOAT64])
def test_half_ulp_is_half_the_spacing(dtype: DataType) -> None:
    values = np.array([0.0, 1.0, 1.5, 2.0, 1000.0, 6e-8, 1e-6])
    spacing = np.spacing(values.astype(dtype.value)).astype(np.float64)
    np.testing.assert_array_equal(half_ulp(values, dtype), spacing / 2)


def test_half_ulp_of_bfloat16() -> None:
    np.testing.assert_array_equal(
        half_ulp(np.array([1.0, 1.99, 2.0]), DataType.BFLOAT16), 2.0 ** np.array([-8, -8, -7])
    )


def test_bound_covers_rounding_beyond_the_next_power_of_two() -> None:
    sums, squares = np.array([2.0 - 1e-9]), np.array([1.0])
    bound = error_bounds(sums, squares, 1e-6, DataType.FLOAT16).total[0]
    assert bound >= 1e-6 + 2.0**-10


def test_bounds_order_by_arithmetic() -> None:
    doubles, singles = direct_error(pointwise(64, "float64")), direct_error(pointwise(64))
    halves, tf32 = direct_error(pointwise(64, "float16")), direct_error(pointwise(64, math="tf32"))
    assert doubles < singles < halves < tf32


@pytest.mark.parametrize("length", [1, 4, 64, 576, pytest.param(2304, marks=pytest.mark.full_matrix)])
def test_sequential_float32_sums_stay_within_half_the_bound(length: int) -> None:
    random = np.random.default_rng(length)
    a, b = (random.standard_normal((length, 20_000)).astype(np.float32).astype(np.float64) for _ in range(2))
    products, total = a * b, np.zeros(a.shape[1], np.float32)
    for product in products:
        total = (total + product).astype(np.float32)
    squares = np.einsum("ij,ij->j", products, products)
    errors = np.abs(total - products.sum(0)) / np.sqrt(squares)
    assert errors.max() < direct_error(pointwise(length)) / 2


@pytest.mark.parametrize("length", [16, 576, pytest.param(4608, marks=pytest.mark.full_matrix)])
def test_truncating_tensor_core_sums_stay_within_the_bound(length: int) -> None:
    random = np.random.default_rng(length)
    a, b = (random.standard_normal((length, 10_000)).astype(np.float16).astype(np.float64) for _ in range(2))
    products = a * b
    wanted, norms = products.sum(0), np.sqrt((products**2).sum(0))
    for step in (4, 16):
        total = np.zeros(a.shape[1])
        for start in range(0, length, step):
            total = truncated(total + products[start : start + step].sum(0))
        errors = np.abs(total - wanted) / norms
        assert errors.max() < 0.7 * direct_error(pointwise(length, "float16")), step


@pytest.mark.sampled(3)
@pytest.mark.parametrize("length", [1, 64, 1152])
def test_truncated_tf32_inputs_stay_within_the_bound(length: int) -> None:
    random = np.random.default_rng(length)
    a, b = (random.standard_normal((length, 20_000)) for _ in range(2))
    wanted = (a * b).sum(0)
    errors = np.abs((truncated(a, 11) * truncated(b, 11)).sum(0) - wanted) / np.sqrt(((a * b) ** 2).sum(0))
    assert errors.max() < 0.7 * direct_error(pointwise(length, math="tf32"))


def truncated(values: np.ndarray, bits: int = 24) -> np.ndarray:
    """Doubles, of whose significands so many bits are kept."""
    return (values.view(np.int64) & -(1 << (53 - bits))).view(np.float64)


def test_truncated_drops_the_bits_beyond() -> None:
    values = np.array([1 + 2.0**-10, 1 + 2.0**-11, -1 - 2.0**-11, 3.0, 0.0, 2.0**-30 * (1 + 2.0**-10 + 2.0**-52)])
    wanted = [1 + 2.0**-10, 1.0, -1.0, 3.0, 0.0, 2.0**-30 * (1 + 2.0**-10)]
    np.testing.assert_array_equal(truncated(values, 11), wanted)
