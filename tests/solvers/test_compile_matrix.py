"""Every kernel of every solver compiles for every architecture it serves, spills nothing, and fits a block."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from miofind.compiler import Binary, BinaryCache, Compiler
from miofind.compiler.nvrtc import toolchain
from miofind.core.problem import Direction, Layout, ProblemDescription
from miofind.device.device import Device, Place
from miofind.errors import CompileError
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solver.steps import Config, ConfigValue, ConvSolution, KernelStep
from miofind.solvers.direct.naive import ConvDirectNaive
from miofind.solvers.implicit_gemm.wgmma_shared import TiledSolver

pytest.importorskip("cuda.bindings.nvrtc")

ARCHS = ("80", "90a")
SAMPLED = {"80": 1, "90a": 2}
"""Kernels of a solver that the fast tests compile for an architecture."""
MAX_DRAWN = 1000
ALL_ARCHS = ("75", "80", "86", "89", "90a", "100a", "120a")
SOLVERS = [solver for solver in Registry.default().values() if any(key.place is Place.CUDA for key in solver.keys)]
# What ptxas says where it gives up asynchronous wgmma, which costs more than a spill.
SERIALIZED = "Potential Performance Loss"

Configs = Callable[[ProblemDescription], Iterable[Config]]


@pytest.fixture(scope="session")
def compiler(request: pytest.FixtureRequest) -> Compiler:
    """Its binaries stay with pytest's cache, under hashes of their sources: a second run compiles what has changed."""
    assert request.config.cache is not None
    return Compiler(BinaryCache(request.config.cache.mkdir("kernels"), max_bytes=1 << 31))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("arch", "most"),
    [("80", 1), ("90a", 1), *(pytest.param(arch, 4, marks=pytest.mark.full_matrix) for arch in ARCHS)],
)
@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: solver.id)
def test_default_configurations_compile(compiler: Compiler, solver: Solver, arch: str, most: int) -> None:
    """Those that are thought fastest: a few of each solver's with the fast tests, four an example by `full_matrix`.

    A solver's kernels share most of what they are made of, so that a few tell what does not compile at all.
    """
    device = Device.virtual(arch)
    steps = steps_of(solver, device, lambda problem: solver.default_configs(problem, device)[:most])
    every = max(1, -(-len(steps) // SAMPLED[arch])) if most == 1 else 1
    check(compiler, steps[::every], arch)


@pytest.mark.full_matrix
@pytest.mark.parametrize("arch", ALL_ARCHS)
@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: solver.id)
def test_extreme_configurations_compile(compiler: Compiler, solver: Solver, arch: str) -> None:
    device = Device.virtual(arch)
    check(compiler, steps_of(solver, device, lambda problem: extremes(solver, problem, device)), arch)


@pytest.mark.full_matrix
@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: solver.id)
def test_every_value_of_a_parameter_compiles(compiler: Compiler, solver: Solver) -> None:
    """Once, for one architecture: the first and the last value say little of those between them."""
    arch = solver.keys[0].archs[0] if solver.keys[0].archs else "90a"
    device = Device.virtual(arch)
    chosen = configs_of_values(solver, device)
    check(compiler, steps_of(solver, device, lambda problem: chosen.get(problem, ())), arch)


class ThreeWarps(ConvDirectNaive):
    """Has a value between the first and the last that its kernel refuses: THREADS must be a power of two."""

    id = "ConvThreeWarps"
    parameters: ClassVar[Mapping[str, Sequence[ConfigValue]]] = {**ConvDirectNaive.parameters, "threads": (64, 96, 128)}

    def examples(self) -> tuple[ProblemDescription, ...]:
        return super().examples()[:1]

    def default_configs(self, problem: ProblemDescription, device: Device) -> tuple[Config, ...]:
        return (Config.of(accumulate="float32", threads=64),)

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        (step,) = super().solution(problem, device, config).kernels
        threads = config["threads"]
        defines = {**dict(step.defines), "THREADS": threads, "LANES": threads}
        return ConvSolution(steps=(replace(step, defines=tuple(defines.items()), block=(threads, 1, 1)),))


@pytest.mark.full_matrix
def test_a_value_in_the_middle_that_does_not_compile_is_seen(compiler: Compiler) -> None:
    solver, device = ThreeWarps(), Device.virtual("90a")
    check(compiler, steps_of(solver, device, lambda problem: extremes(solver, problem, device)), "90a")
    with pytest.raises(pytest.fail.Exception, match="-DTHREADS=96"):
        test_every_value_of_a_parameter_compiles(compiler, solver)


ONE_FIRST = {"x": Layout.NHWC, "w": Layout.NHWC, "y": Layout.NCHW}
NCHW_OUTPUT = {"x": (32, 128, 56, 56), "w": (256, 128, 3, 3), "padding": 1, "dtype": "float16", "layout": ONE_FIRST}
WEIGHTS = {
    "x": (32, 1024, 16, 16),
    "w": (512, 1024, 1, 1),
    "dtype": "float16",
    "layout": "NHWC",
    "direction": "backward_weights",
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("fields", "rows", "tile_n", "is_offered"),
    [
        (NCHW_OUTPUT, 2, 128, True),
        (NCHW_OUTPUT, 1, 256, True),
        (NCHW_OUTPUT | {"x": (32, 128, 7, 7)}, 2, 128, True),
        (NCHW_OUTPUT | {"dtype": "float32", "math": "tf32"}, 2, 128, True),
        (WEIGHTS, 1, 256, True),
        (WEIGHTS, 2, 128, False),
    ],
    ids=["NCHW output", "NCHW output, wide", "odd NCHW output", "TF32 to NCHW", "weights, wide", "weights"],
)
def test_wgmmas_full_tiles_do_not_spill(
    compiler: Compiler, fields: dict[str, Any], rows: int, tile_n: int, is_offered: bool
) -> None:
    """128 accumulators leave few registers: what would spill is not offered. No example has so large a tile."""
    problem = ProblemDescription.convolution(**fields)
    solver, device = Registry.default()["ConvImplicitGemmWgmma"], Device.virtual("90a")
    tile = {"consumers": 2, "rows": rows, "tile_n": tile_n, "depth_bytes": 128, "stages": 3}
    config = Config({**tile, "splits": 1, "blocks": 1, "cluster": "1x1x1", "swapped": 0})
    assert solver.is_valid_config(problem, device, config) == is_offered
    steps = list(solver.solution(problem, device, config).kernels)
    if is_offered:
        check(compiler, steps, "90a")
    else:
        with pytest.raises(pytest.fail.Exception, match="spills"):
            check(compiler, steps, "90a")


WIDEST = (
    "",
    "scale.bias.residual.relu",
    "bias.silu",
    "float32.scale.bias.gelu",
    "scale.bias.gelu_tanh.residual",
    "bias.mish",
    "channel_bias.relu",
    "float32.scale.bias.channel_bias.elu",
    "scale.bias.channel_bias.residual.gelu_tanh",
    "residual.dgelu",
    "residual.drelu",
)
"""Epilogues of ConvImplicitGemmPingPong."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("epilogue", WIDEST)
@pytest.mark.parametrize("first", ["", "output", "all"])
def test_ping_pongs_widest_tiles_do_not_spill(compiler: Compiler, first: str, epilogue: str, rows: int) -> None:
    """As wide as is offered: terms of each pixel's image, or an activation, leave registers for fewer accumulators."""
    direction = Direction.BACKWARD_DATA if ".d" in f".{epilogue}" else Direction.FORWARD
    layout = dict.fromkeys("xwy", Layout.NCHW if first == "all" else Layout.NHWC)
    if first == "output":
        layout[direction.output] = Layout.NCHW
    taps, padding = (1, 0) if first == "all" else (3, 1)
    problem = ProblemDescription.convolution(
        x=(32, 128, 40, 40),
        w=(128, 128, taps, taps),
        padding=padding,
        direction=direction,
        epilogue=epilogue,
        dtype="bfloat16",
        layout=layout,
    )
    solver, device = Registry.default()["ConvImplicitGemmPingPong"], Device.virtual("90a")
    offered = [config for config in solver.configs(problem, device) if config["rows"] == rows]
    widest = max(offered, key=lambda config: config["tile_n"])
    check(compiler, list(solver.solution(problem, device, widest).kernels), "90a")


DEPTHWISE = {"direction": "backward_weights", "dtype": "bfloat16"}
LARGE = {"images": 1, "channels": 1, "splits": 4, "whole_filter": False}
STEM = {"dtype": "bfloat16", "layout": "NHWC"}
GRADIENT = {"dtype": "bfloat16", "direction": "backward_data"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("solver_id", "fields", "config"),
    [
        (
            "ConvDepthwiseLargeWeights",
            DEPTHWISE | {"x": (1, 8, 30, 31), "w": (8, 1, 13, 13), "padding": 6, "groups": 8, "layout": "NHWC"},
            LARGE | {"tile": 16, "warps": 2, "warp_rows": 8},
        ),
        (
            "ConvDepthwiseLargeWeights",
            DEPTHWISE | {"x": (32, 16, 8, 25), "w": (16, 1, 17, 17), "padding": ((2, 9), (8, 8)), "groups": 16},
            LARGE | {"images": 8, "tile": 32, "warps": 8, "warp_rows": 4},
        ),
        (
            "ConvFirstLayer",
            STEM | {"x": (2, 3, 32, 40), "w": (256, 3, 3, 3), "padding": 1},
            {"tile_h": 14, "tile_w": 64, "tile_k": 96, "warps": 4, "blocks": 1, "vector": 8},
        ),
        (
            "ConvFirstLayer",
            STEM | {"x": (8, 3, 224, 224), "w": (64, 3, 11, 11), "padding": 2, "stride": 4},
            {"tile_h": 4, "tile_w": 64, "tile_k": 64, "warps": 8, "blocks": 2, "vector": 2},
        ),
        (
            "ConvFirstLayerDataWgmma",
            GRADIENT | {"x": (3, 4, 194, 509), "w": (32, 4, 1, 1), "padding": (0, 2), "stride": 5, "layout": "NCHW"},
            {"tile_w": 128, "widen": 1, "teams": 2, "stages": 2, "resident": 1},
        ),
        (
            "ConvFirstLayerDataWgmma",
            GRADIENT | {"x": (8, 1, 224, 512), "w": (256, 1, 7, 7), "padding": 3, "stride": (44, 2), "layout": "NHWC"},
            {"tile_w": 16, "widen": 1, "teams": 2, "stages": 2, "resident": 1},
        ),
    ],
    ids=[
        *("many sums", "rows of odd length", "vectors of eight pixels", "large filter"),
        *("elements written one by one", "filters in registers"),
    ],
)
def test_odd_sizes_do_not_spill(
    compiler: Compiler, solver_id: str, fields: dict[str, Any], config: dict[str, Any]
) -> None:
    """What did is not offered or does so no more, and what is thought fastest of the rest does not."""
    problem, device = ProblemDescription.convolution(**fields), Device.virtual("90a")
    solver = Registry.default()[solver_id]
    offered = filter(lambda config: solver.is_valid_config(problem, device, config), [Config(config)])
    configs = (*offered, *solver.default_configs(problem, device)[:2])
    check(compiler, [step for config in configs for step in solver.solution(problem, device, config).kernels], "90a")


VOLUMES = {"layout": "NDHWC", "dtype": "float16"}
LARGEST_BLOCKS = [
    (
        "ConvImplicitGemmHalo",
        {"x": (1, 8, 40, 40, 40), "w": (8, 8, 5, 5, 5), "padding": 2} | VOLUMES,
        "ConvImplicitGemmHalo, 125 taps",
    ),
    (
        "ConvImplicitGemmHalo",
        {"x": (32, 40, 130), "w": (32, 40, 5), "padding": 2, "layout": "NWC", "dtype": "float16"},
        "ConvImplicitGemmHalo, one dimension",
    ),
    (
        "ConvImplicitGemmHaloSwapped",
        {"x": (32, 64, 80, 80), "w": (64, 64, 5, 5), "padding": 2, "layout": "NHWC", "dtype": "float16"},
        "ConvImplicitGemmHaloSwapped",
    ),
    (
        "ConvImplicitGemmPingPong",
        {"x": (32, 64, 80, 80), "w": (128, 64, 3, 3), "padding": 1, "layout": "NHWC", "dtype": "float16"},
        "ConvImplicitGemmPingPong",
    ),
    ("ConvImplicitGemmWgmma", WEIGHTS, "ConvImplicitGemmWgmma"),
    ("ConvImplicitGemmWgmmaTurned", WEIGHTS | {"layout": "NCHW"}, "ConvImplicitGemmWgmmaTurned"),
]
"""Solvers whose kernels have mbarriers beside all the dynamic shared memory that a block can have."""


@pytest.mark.parametrize(
    ("solver_id", "fields"), [case[:2] for case in LARGEST_BLOCKS], ids=[case[2] for case in LARGEST_BLOCKS]
)
def test_mbarriers_fit_beside_the_most_dynamic_shared_memory(
    compiler: Compiler, solver_id: str, fields: dict[str, Any]
) -> None:
    """ConvImplicitGemmHalo once counted none, and offered what no GPU launches."""
    problem, device = ProblemDescription.convolution(**fields), Device.virtual("90a")
    solver = Registry.default()[solver_id]
    configs = [*solver.default_configs(problem, device), *solver.drawn_configs(problem, device, MAX_DRAWN)]
    steps = [step for config in configs for step in solver.solution(problem, device, config).kernels]
    steps.sort(key=lambda step: step.shared_bytes)
    assert device.shared_bytes - steps[-1].shared_bytes < 8 << 10
    (result,) = (result for _, result in compiler.build_all(steps[-1:], "90a"))
    assert isinstance(result, Binary)
    static_bytes = result.resources[steps[-1].entry].shared_bytes
    assert 0 < static_bytes <= device.shared_bytes - steps[-1].shared_bytes


HALO_RUNS = {"tile_h": 2, "tile_w": 40, "unit_blocks": 1, "slots_ahead": 1, "filter_stages": 8}
PING_PONG_RUNS = {"rows": 1, "tile_n": 128, "out_stages": 1}


@pytest.mark.parametrize(
    ("case", "values"),
    [
        ("ConvImplicitGemmHalo, 125 taps", {}),
        ("ConvImplicitGemmHalo, one dimension", {}),
        *(("ConvImplicitGemmHaloSwapped", {**HALO_RUNS, "consumers": consumers}) for consumers in (2, 3)),
        *(("ConvImplicitGemmPingPong", {**PING_PONG_RUNS, "keeps_filters": keeps}) for keeps in (0, 1)),
    ],
)
def test_mbarriers_are_as_many_as_validity_counts(compiler: Compiler, case: str, values: dict[str, int]) -> None:
    """Of the first default where no values are given."""
    ((solver_id, fields),) = (each[:2] for each in LARGEST_BLOCKS if each[2] == case)
    problem, device = ProblemDescription.convolution(**fields), Device.virtual("90a")
    solver = Registry.default()[solver_id]
    assert isinstance(solver, TiledSolver)
    config = Config(values) if values else solver.default_configs(problem, device)[0]
    (step,) = solver.solution(problem, device, config).kernels
    tiling = solver.tiling(problem, device, config)
    assert compiler.build(step, "90a").resources[step.entry].shared_bytes == tiling.static_bytes


def extremes(solver: Solver, problem: ProblemDescription, device: Device) -> Iterator[Config]:
    """The defaults, and each with one parameter at the first and the last of its values, where that can run."""
    for default in solver.default_configs(problem, device):
        yield default
        for name, values in solver.parameters.items():
            for value in (values[0], values[-1]):
                config = Config({**default, name: value})
                if solver.is_valid_config(problem, device, config):
                    yield config


def configs_of_values(solver: Solver, device: Device) -> dict[ProblemDescription, list[Config]]:
    """Configurations of examples that have each value of each parameter that some configuration of an example has."""
    found: dict[ProblemDescription, list[Config]] = {}
    wanted = {(name, value) for name, values in solver.parameters.items() for value in values}
    for problem in solver.examples():
        for config in near_and_far(solver, problem, device) if solver.applicability(problem, device) else ():
            if not wanted:
                return found
            values = {(name, config[name]) for name in solver.parameters}
            if values & wanted:
                wanted -= values
                found.setdefault(problem, []).append(config)
    return found


def near_and_far(solver: Solver, problem: ProblemDescription, device: Device) -> Iterator[Config]:
    """The defaults, then these with another value of one parameter, then random ones."""
    defaults = solver.default_configs(problem, device)
    yield from defaults
    for default, (name, values) in itertools.product(defaults, solver.parameters.items()):
        changed = (Config({**default, name: value}) for value in values)
        yield from (config for config in changed if solver.is_valid_config(problem, device, config))
    yield from solver.drawn_configs(problem, device, MAX_DRAWN)


def steps_of(solver: Solver, device: Device, configs: Configs) -> list[KernelStep]:
    """Launches that differ in what is compiled or in their block, over the solver's examples; of equal ones that with
    the most shared memory."""
    found: dict[tuple[object, ...], KernelStep] = {}
    for problem in solver.examples():
        if not solver.applicability(problem, device):
            continue
        for config in dict.fromkeys(configs(problem)):
            for step in solver.solution(problem, device, config).kernels:
                identity = (step.binary, step.entry, step.block)
                if step.shared_bytes >= found.setdefault(identity, step).shared_bytes:
                    found[identity] = step
    return list(found.values())


def check(compiler: Compiler, steps: list[KernelStep], arch: str) -> None:
    """Fail with all that is wrong with the steps' kernels."""
    if not steps:
        pytest.skip(f"launches no kernel of its own on sm_{arch}")
    device = Device.virtual(arch)
    if device.sm not in toolchain().sms:
        pytest.skip(f"NVRTC {toolchain().version} cannot compile for sm_{arch}")
    faults = [fault(step, result, device) for step, result in compiler.build_all(steps, arch)]
    if any(faults):
        pytest.fail("\n\n".join(filter(None, faults)), pytrace=False)


def fault(step: KernelStep, result: Binary | CompileError, device: Device) -> str:
    """What is wrong with a kernel on a device, "" if nothing is."""
    name = f"{step.source} {step.entry} {' '.join(f'-D{name}={value}' for name, value in step.defines)}"
    if isinstance(result, CompileError):
        return f"{name}: {result.args[0]}\n{result.log}"
    resources = result.resources[step.entry]
    if resources.spill_bytes:
        return f"{name}: spills {resources.spill_bytes} bytes a thread"
    if resources.shared_bytes + step.shared_bytes > device.shared_bytes:
        return f"{name}: a block takes {resources.shared_bytes} and {step.shared_bytes} bytes of shared memory"
    if SERIALIZED in result.log:
        return f"{name}:\n{result.log}"
    return ""
