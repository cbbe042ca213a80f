"""Tensor maps of the copy engine (TMA), encoded by the driver. They hold an address, so each is kept by it."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from miofind.errors import LaunchError
from miofind.solver.steps import Box, TensorMap

BYTES = 128
ALIGNMENT = 64

_MOST_KEPT = 4096


@functools.lru_cache(maxsize=_MOST_KEPT)
def encoded(tensor_map: TensorMap, address: int) -> bytes:
    """The map of a tensor at an address, as a kernel takes it.

    Raises:
        LaunchError: the driver refuses it, or is older than CUDA 12.
    """
    from cuda.bindings import driver

    common = (
        _element(driver, tensor_map.element),
        len(tensor_map.sizes),
        address,
        [driver.cuuint64_t(size) for size in tensor_map.sizes],
        [driver.cuuint64_t(stride) for stride in tensor_map.strides_bytes],
    )
    kind = (
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        _swizzle(driver, tensor_map.swizzle_bytes),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    copy = tensor_map.copy
    if isinstance(copy, Box):
        apart = copy.steps or (1,) * len(copy.sizes)
        box = [driver.cuuint32_t(size * step) for size, step in zip(copy.sizes, apart, strict=True)]
        steps = [driver.cuuint32_t(step) for step in apart]
        status, made = driver.cuTensorMapEncodeTiled(*common, box, steps, *kind)
    else:
        steps = [driver.cuuint32_t(stride) for stride in (1, *copy.strides, 1)]
        corners = (list(copy.lower), list(copy.upper))
        sizes = (copy.channels, copy.pixels)
        status, made = driver.cuTensorMapEncodeIm2col(*common, *corners, *sizes, steps, *kind)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise LaunchError(f"the driver refuses a tensor map with {status.name}: {tensor_map} at {address:#x}")
    return ctypes.string_at(made.getPtr(), BYTES)


def _element(driver: Any, name: str) -> Any:
    return getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{name.upper()}")


def _swizzle(driver: Any, span: int) -> Any:
    return getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{f'{span}B' if span else 'NONE'}")
