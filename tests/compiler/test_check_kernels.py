"""The kernels that verification and measurement launch compile for every kind of architecture, without spills."""

from __future__ import annotations

import re

import pytest

from miofind.compiler.nvrtc import compile_options, compile_source
from miofind.compiler.resources import parse_resources
from miofind.compiler.sources import read_source
from miofind.core.epilogue import Activation, EpilogueParameters, ResidualPosition
from miofind.core.problem import DataType, Direction, ProblemDescription
from miofind.launch.device_kernels import check_kernel
from miofind.reference.convolution import reference_step
from miofind.verify.epilogue_bounds import EpilogueStandard
from miofind.verify.epilogue_cuda import EpilogueTrial, epilogue_kernel
from miofind.verify.ranges import UNSCALED

pytestmark = pytest.mark.sampled(3)

ENTRIES = {
    "harness/random_inputs.cu": ("random_inputs", "plant"),
    "harness/verify.cu": ("verify_written", "verify_poison", "verify_guards", "verify_checksum", "verify_compare"),
    "harness/measure.cu": ("flush_l2",),
}


@pytest.mark.parametrize("arch", ["75", "90a"])
@pytest.mark.parametrize("dtype", [DataType.FLOAT32, DataType.BFLOAT16])
@pytest.mark.parametrize("source", ENTRIES)
def test_check_kernels_compile_without_spills(source: str, dtype: DataType, arch: str) -> None:
    defines = check_kernel("written", 1, dtype).defines if source == "harness/verify.cu" else ()
    options = compile_options((), (("T", dtype.value), *defines), arch)
    resources = parse_resources(compile_source(read_source(source), options, arch).log)
    assert set(ENTRIES[source]) <= resources.keys()
    assert [resources[entry].spill_bytes for entry in ENTRIES[source]] == [0] * len(ENTRIES[source])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("arch", ["75", "90a"])
@pytest.mark.parametrize("count", [None, 1000], ids=["whole", "listed"])
@pytest.mark.parametrize("direction", Direction)
def test_reference_kernels_compile_without_spills(direction: Direction, count: int | None, arch: str) -> None:
    problem = ProblemDescription.convolution(
        x=(32, 64, 56, 56), w=(64, 64, 3, 3), padding=1, direction=direction, dtype="float16"
    )
    step = reference_step(problem, count)
    options = compile_options((), step.defines, arch)
    resources = parse_resources(compile_source(read_source(step.source), options, arch).log)
    assert resources[step.entry].spill_bytes == 0


@pytest.mark.parametrize("arch", ["75", "90a"])
@pytest.mark.parametrize(("dtype", "parameter_dtype"), [("float16", "float32"), ("bfloat16", None), ("float64", None)])
def test_the_epilogue_kernel_compiles_without_spills(dtype: str, parameter_dtype: str | None, arch: str) -> None:
    words = [parameter_dtype] if parameter_dtype else []
    problem = ProblemDescription.convolution(
        x=(2, 8, 5, 5), w=(6, 8, 3, 3), dtype=dtype, epilogue=".".join([*words, "bias", "gelu"])
    )
    standard = EpilogueStandard.of(problem, None, rounds_twice=False)
    trial = EpilogueTrial(count=10, powers=UNSCALED, parameters=EpilogueParameters(), standard=standard)
    kernel, _ = epilogue_kernel(problem, trial)
    options = compile_options((), (("T", kernel.dtype), *kernel.defines), arch)
    resources = parse_resources(compile_source(read_source(kernel.source), options, arch).log)
    assert resources[kernel.entry].spill_bytes == 0


def test_the_epilogue_kernel_counts_activations_and_positions_as_the_host_does() -> None:
    text = read_source("harness/epilogue.cu")
    for enum, names in (("Activation", Activation), ("Residual", ResidualPosition)):
        listed = re.search(rf"enum {enum} {{(.*?)}}", str(text), re.DOTALL)
        assert listed
        told = [re.sub("(?<!^)(?=[A-Z])", "_", name.strip()[1:]).lower() for name in listed[1].split(",")]
        wanted = [name.value for name in names]
        assert told == ["without" if enum == "Residual" and name == "none" else name for name in wanted]
