"""The kernels that verification and measurement launch compile for every kind of architecture, without spills."""

from __future__ import annotations

import pytest

from miofind.compiler import BinaryCache, Compiler
from miofind.problem import DataType
from miofind.solution import KernelStep

ENTRIES = {
    "random_inputs.cu": ("random_inputs",),
    "verify.cu": ("verify_written", "verify_guard", "verify_checksum", "verify_compare"),
    "measure.cu": ("flush_l2",),
}


@pytest.mark.parametrize("arch", ["75", "90a"])
@pytest.mark.parametrize("dtype", [DataType.FLOAT32, DataType.BFLOAT16])
@pytest.mark.parametrize("source", ENTRIES)
def test_check_kernels_compile_without_spills(source: str, dtype: DataType, arch: str, tmp_path: object) -> None:
    compiler = Compiler(BinaryCache(tmp_path))  # type: ignore[arg-type]
    for entry in ENTRIES[source]:
        step = KernelStep(
            source=source, entry=entry, grid=(1, 1, 1), block=(256, 1, 1), args=(), defines=(("T", dtype.value),)
        )
        assert compiler.build(step, arch).resources[entry].spill_bytes == 0
