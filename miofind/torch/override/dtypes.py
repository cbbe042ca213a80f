"""PyTorch's element types and miofind's: what each is called on the other side, and NumPy's for the CPU place."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from miofind.arrays.arrays import NUMPY_DTYPES
from miofind.core.tensor import DataType

_TORCH = {
    DataType.FLOAT64: torch.float64,
    DataType.FLOAT32: torch.float32,
    DataType.FLOAT16: torch.float16,
    DataType.BFLOAT16: torch.bfloat16,
}
_OF_TORCH = {dtype: ours for ours, dtype in _TORCH.items()}
_NUMPYS = {dtype: NUMPY_DTYPES[ours] for ours, dtype in _TORCH.items()} | {torch.uint8: np.dtype(np.uint8)}


def data_type_of(dtype: Any) -> DataType | None:
    """The element type that a torch.dtype is; None where miofind's convolutions have none such."""
    return _OF_TORCH.get(dtype)


def torch_dtype(dtype: DataType) -> Any:
    """The torch.dtype of an element type."""
    return _TORCH[dtype]


def numpy_dtype(dtype: Any) -> Any:
    """NumPy's dtype of a torch.dtype that miofind's convolutions have, or of bytes."""
    return _NUMPYS[dtype]
