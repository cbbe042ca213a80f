"""Which kernels let the next one begin early, by their PTX: none behind which a solution has none that waits."""

from __future__ import annotations

import pytest

from miofind.compiler.nvrtc import compile_options, include_options
from miofind.compiler.sources import read_source
from miofind.device.device import Device, Place
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solver.steps import ConvSolution, KernelStep, dependent_launches

nvrtc = pytest.importorskip("cuda.bindings.nvrtc")

HOPPER = Device.virtual("90a")
SOLVERS = [solver for solver in Registry.default().values() if any(key.place is Place.CUDA for key in solver.keys)]
_LETS_BEGIN = "griddepcontrol.launch_dependents"


def includes_pdl(step: KernelStep) -> bool:
    return "common/pdl.cuh" in read_source(step.source, step.package, fused=step.is_fused).headers


def ptx_of(step: KernelStep) -> str:
    source = read_source(step.source, step.package, fused=step.is_fused)
    names, texts = [name.encode() for name in source.headers], [text.encode() for text in source.headers.values()]
    _, program = nvrtc.nvrtcCreateProgram(source.text.encode(), source.name.encode(), len(names), texts, names)
    options = [o for o in compile_options(step.options, step.defines, "90a") if not o.startswith("--ptxas")]
    options = [option.replace("sm_90a", "compute_90a") for option in (*options, *include_options())]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    assert status == 0, step.source
    text = bytearray(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, text)
    nvrtc.nvrtcDestroyProgram(program)
    return text.decode()


def body_of(entry: str, ptx: str) -> str:
    (body,) = (each for each in ptx.split(".visible .entry ")[1:] if each.startswith(f"{entry}("))
    return body


def solutions_of(solver: Solver) -> list[ConvSolution]:
    """Of a solver's examples, one for each sequence of kernels."""
    found: dict[object, ConvSolution] = {}
    for problem in solver.examples():
        if solver.applicability(problem, HOPPER):
            config = solver.default_configs(problem, HOPPER)[0]
            solution, packing = solver.solution(problem, HOPPER, config), solver.packing(problem, HOPPER, config)
            for part in (solution, *((packing.pack, packing.run) if packing else ())):
                kinds = tuple((step.source, step.entry, step.is_fused) for step in part.kernels)
                found.setdefault(kinds, part)
    return list(found.values())


@pytest.mark.sampled(12)
@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: solver.id)
def test_only_a_launch_that_waits_begins_early(solver: Solver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "library_version", lambda self, library: 1)
    for solution in solutions_of(solver):
        followed = (*dependent_launches(solution.steps)[1:], False)
        for step, is_followed in zip(solution.steps, followed, strict=True):
            if isinstance(step, KernelStep) and not is_followed and includes_pdl(step):
                assert _LETS_BEGIN not in body_of(step.entry, ptx_of(step)), (step.source, step.entry)


def test_a_first_kernel_lets_its_second_begin_early() -> None:
    solver = Registry.default()["ConvGroupedWeights"]
    problem = next(each for each in solver.examples() if solver.applicability(each, HOPPER))
    config = next(
        each for each in solver.configs(problem, HOPPER) if len(solver.solution(problem, HOPPER, each).steps) > 1
    )
    first, second = solver.solution(problem, HOPPER, config).kernels
    assert first.binary == second.binary
    ptx = ptx_of(first)
    assert _LETS_BEGIN in body_of(first.entry, ptx)
    assert _LETS_BEGIN not in body_of(second.entry, ptx)
