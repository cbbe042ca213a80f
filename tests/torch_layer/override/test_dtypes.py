"""Element types of PyTorch, NumPy and miofind name each other."""

from __future__ import annotations

import pytest
import torch

from miofind.core.problem import ProblemDescription
from miofind.core.tensor import DataType
from miofind.errors import InvalidProblemError
from miofind.torch.override.calls import Unserved, served_type
from miofind.torch.override.dtypes import data_type_of, numpy_dtype, torch_dtype


@pytest.mark.parametrize("dtype", DataType)
def test_there_and_back(dtype: DataType) -> None:
    there = torch_dtype(dtype)
    assert str(there) == f"torch.{dtype}"
    assert data_type_of(there) is served_type(there) is dtype
    assert numpy_dtype(there).name == dtype


def test_other_types_are_none() -> None:
    assert data_type_of(torch.complex64) is None
    with pytest.raises(Unserved, match="its element type is complex64"):
        served_type(torch.complex64)


@pytest.mark.parametrize("kind", [torch.HalfTensor, torch.cuda.HalfTensor], ids=str)
def test_a_type_of_tensors_is_one_clear_error(kind: type) -> None:
    """A ValueError of NumPy's came through."""
    with pytest.raises(InvalidProblemError, match=r"dtype=.*HalfTensor.* is unknown: use one of float64"):
        ProblemDescription.convolution(x=(1, 3, 8, 8), w=(4, 3, 3, 3), dtype=kind)
