"""Every kernel of every solver compiles for every architecture it serves, and spills no more than it says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest

from miofind.compiler import Binary, BinaryCache, Compiler
from miofind.compiler.nvrtc import toolchain
from miofind.device import Device, Place
from miofind.errors import CompileError
from miofind.problem import Layout, ProblemDescription
from miofind.solution import Config, KernelStep
from miofind.solver import Solver, solvers

pytest.importorskip("cuda.bindings.nvrtc")

ARCHS = ("80", "90a")
ALL_ARCHS = ("75", "80", "86", "89", "90a", "100a", "120a")
SOLVERS = [solver for solver in solvers().values() if any(key.place is Place.CUDA for key in solver.keys)]
# What ptxas says where it gives up asynchronous wgmma, which costs more than a spill.
SERIALIZED = "Potential Performance Loss"

Configs = Callable[[ProblemDescription], Iterable[Config]]


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    return Compiler(BinaryCache(tmp_path_factory.mktemp("matrix") / "kernels"))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: solver.id)
def test_default_configurations_compile(compiler: Compiler, solver: Solver, arch: str) -> None:
    device = Device.virtual(arch)
    check(compiler, steps_of(solver, device, lambda problem: solver.default_configs(problem, device)), arch)


@pytest.mark.full_matrix
@pytest.mark.parametrize("arch", ALL_ARCHS)
@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: solver.id)
def test_extreme_configurations_compile(compiler: Compiler, solver: Solver, arch: str) -> None:
    device = Device.virtual(arch)
    check(compiler, steps_of(solver, device, lambda problem: extremes(solver, problem, device)), arch)


ONE_FIRST = {"x": Layout.NHWC, "w": Layout.NHWC, "y": Layout.NCHW}


@pytest.mark.parametrize(
    "problem",
    [
        ProblemDescription.convolution(
            x=(32, 128, 56, 56), w=(256, 128, 3, 3), padding=1, dtype="float32", math="tf32", layout=ONE_FIRST
        ),
        ProblemDescription.convolution(
            x=(32, 1024, 16, 16), w=(512, 1024, 1, 1), dtype="float16", layout="NHWC", direction="backward_weights"
        ),
    ],
    ids=["TF32 to planes", "weights"],
)
def test_wgmmas_full_tiles_spill_no_more_than_they_say(compiler: Compiler, problem: ProblemDescription) -> None:
    """Sums of 256 x 128 leave few registers; no example is large enough to have such a tile."""
    solver, device = solvers()["ConvImplicitGemmWgmma"], Device.virtual("90a")
    values = {"consumers": 2, "rows": 2, "tile_n": 128, "depth_bytes": 128, "stages": 4, "splits": 1, "blocks": 1}
    config = Config({**values, "cluster": "1x1x1", "swapped": 0})
    solver.check_config(problem, device, config)
    check(compiler, list(solver.solution(problem, device, config).kernels), "90a")


def extremes(solver: Solver, problem: ProblemDescription, device: Device) -> Iterator[Config]:
    """The defaults, and each with one parameter at the first and the last of its values, where that can run."""
    for default in solver.default_configs(problem, device):
        yield default
        for name, values in solver.parameters.items():
            for value in (values[0], values[-1]):
                config = Config({**default, name: value})
                if solver.is_valid_config(problem, device, config):
                    yield config


def steps_of(solver: Solver, device: Device, configs: Configs) -> list[KernelStep]:
    """Launches that differ in what is compiled, over the solver's examples; of equal ones, the strictest on spills."""
    found: dict[tuple[object, ...], KernelStep] = {}
    for problem in solver.examples():
        if not solver.applicability(problem, device):
            continue
        for config in dict.fromkeys(configs(problem)):
            for step in solver.solution(problem, device, config).kernels:
                identity = (step.package, step.source, step.entry, step.defines, step.options)
                known = found.setdefault(identity, step)
                found[identity] = min(known, step, key=lambda one: one.spill_bytes)
    return list(found.values())


def check(compiler: Compiler, steps: list[KernelStep], arch: str) -> None:
    """Fail with all that is wrong with the steps' kernels."""
    if not steps:
        pytest.skip(f"launches no kernel of its own on sm_{arch}")
    if Device.virtual(arch).sm not in toolchain().sms:
        pytest.skip(f"NVRTC {toolchain().version} cannot compile for sm_{arch}")
    faults = [fault(step, result) for step, result in compiler.build_all(steps, arch)]
    if any(faults):
        pytest.fail("\n\n".join(filter(None, faults)), pytrace=False)


def fault(step: KernelStep, result: Binary | CompileError) -> str:
    """What is wrong with a kernel, "" if nothing is."""
    name = f"{step.source} {step.entry} {' '.join(f'-D{name}={value}' for name, value in step.defines)}"
    if isinstance(result, CompileError):
        return f"{name}: {result.args[0]}\n{result.log}"
    spilled = result.resources[step.entry].spill_bytes
    if spilled > step.spill_bytes:
        return f"{name}: spills {spilled} bytes a thread, {step.spill_bytes} are declared"
    if SERIALIZED in result.log:
        return f"{name}:\n{result.log}"
    return ""
