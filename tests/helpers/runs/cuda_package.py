"""A Python package of CUDA sources, made by a test."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest

from miofind.compiler.sources import read_source
from miofind.solver.steps import KernelStep, Pointer, Scalar

_numbers = itertools.count()

SCALE = """\
// y = FACTOR * x
#include "common/scale.cuh"
extern "C" __global__ void scale(float* y, const float* x, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = scaled(x[i]);
}
"""

SCALE_ARGS = (Pointer(buffer="y"), Pointer(buffer="x"), Scalar(ctype="int32", value=1))
"""What `scale` takes."""

SCALE_HEADER = """\
#pragma once
#ifndef FACTOR
#define FACTOR 2
#endif
__device__ inline float scaled(float x) { return FACTOR * x; }
"""


@dataclass(frozen=True)
class CudaPackage:
    """Sources in a folder that Python imports as a package."""

    name: str
    root: Path

    def write(self, **files: str) -> None:
        """Write files; "__" in a keyword is "/", a last "_" and what follows it the suffix: common__scale_cuh."""
        for key, text in files.items():
            path = self.root / ".".join(key.replace("__", "/").rsplit("_", 1))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        read_source.cache_clear()

    def step(self, source: str = "scale.cu", entry: str = "scale", **fields: object) -> KernelStep:
        """A launch of one of its kernels over one block."""
        values: dict[str, object] = {"grid": (1, 1, 1), "block": (32, 1, 1), "args": SCALE_ARGS, **fields}
        return KernelStep(source=source, entry=entry, package=self.name, **values)  # type: ignore[arg-type]


def make_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> CudaPackage:
    """A package of a name of its own that holds SCALE and its header."""
    name = f"cuda_sources_{next(_numbers)}"
    root = folder / name
    root.mkdir()
    (root / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(folder))
    package = CudaPackage(name, root)
    package.write(scale_cu=SCALE, common__scale_cuh=SCALE_HEADER)
    return package
