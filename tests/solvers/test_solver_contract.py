"""The contract that every registered solver keeps, whatever it computes. Needs no GPU.

It goes over the solvers' examples, and over problems derived from them with what they lack: dtypes, layouts,
directions, strides, groups, odd sizes.
Values are computed on the CPU place alone: the summary says of which solvers they go unchecked.
"""

from __future__ import annotations

import importlib.resources
import itertools
import math
import pickle
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from helpers.problems.feature_problems import FEATURES, Kind, accepted_kinds, derived_problems
from helpers.problems.other_sizes import SIZES, Size, with_other
from helpers.runs.gates import check_both_gates

from miofind.compiler import Compiler
from miofind.core.problem import DataType, Direction, Layout, ProblemDescription
from miofind.device.device import Device, Place
from miofind.errors import InvalidConfigError
from miofind.reference.convolution import numpy_dtype
from miofind.solver.registry import Registry
from miofind.solver.solver import MAX_DEFAULT_CONFIGS, Algorithm, KernelKey, Reach, Solver
from miofind.solver.steps import (
    Config,
    ConvSolution,
    CudnnStep,
    EpilogueArgument,
    FftStep,
    HostStep,
    KernelStep,
    MatmulStep,
    Pointer,
    Scalar,
    TensorMap,
)
from miofind.solvers.cpu import direct
from miofind.solvers.cpu.direct import ConvCpuDirect
from miofind.solvers.direct.naive import ConvDirectNaive

SOLVERS = list(Registry.default().values())
VALUES_UNCHECKED = "values unchecked"
CTYPES = {"int32": 2**31, "int64": 2**63, "uint32": 2**32, "uint64": 2**64}
MAX_CONFIGS = 40
MAX_DRAWN = 4000
MAX_HOST_BYTES = 1 << 24
# Of the CPU place's solvers an example is computed where it has no more operations than this.
MAX_FLOPS = 100_000_000


@dataclass(frozen=True)
class Case:
    """A problem of a solver on a device that one of its keys names; `feature` is what it was derived for, if it was."""

    solver: Solver
    problem: ProblemDescription
    device: Device
    feature: str = ""

    def __str__(self) -> str:
        suffix = f"-{self.feature}" if self.feature else ""
        return f"{self.solver.id}-{self.device.arch or 'cpu'}-{self.problem}{suffix}"


def device_of(key: KernelKey) -> Device:
    """A device that the key matches; the GPU need not be present."""
    if key.place is Place.CPU:
        return Device.cpu()
    return Device.virtual(key.archs[0] if key.archs else str(max(80, key.min_sm)))


def cases_of(solver: Solver) -> Iterator[Case]:
    devices = dict.fromkeys(device_of(key) for key in solver.keys)
    for problem, device in itertools.product(solver.examples(), devices):
        if any(key.applicability(problem, device) for key in solver.keys):
            yield Case(solver, problem, device)
    for device in devices:
        for feature, problem in derived_problems(solver, device):
            yield Case(solver, problem, device, feature)


CASES = [case for solver in SOLVERS for case in cases_of(solver)]
each_solver = pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: solver.id)


@dataclass(frozen=True)
class Offer:
    """What a case's solver offers: configurations with their solutions, the default ones first."""

    case: Case
    defaults: tuple[Config, ...]
    solutions: dict[Config, ConvSolution]


def offer_of(case: Case) -> Offer:
    solver, problem, device = case.solver, case.problem, case.device
    defaults = solver.default_configs(problem, device)
    configs = dict.fromkeys([*defaults, *drawn(case)])
    return Offer(case, defaults, {config: solver.solution(problem, device, config) for config in configs})


def drawn(case: Case) -> list[Config]:
    """Some valid configurations of the space, other ones for each example."""
    every = case.solver.drawn_configs(case.problem, case.device, MAX_DRAWN, str(case))
    return list(itertools.islice(every, MAX_CONFIGS))


def test_ids_and_their_lower_case_are_unique() -> None:
    assert len({solver.id.lower() for solver in SOLVERS}) == len(SOLVERS)


@each_solver
def test_attributes_are_declared(solver: Solver) -> None:
    assert solver.id
    assert isinstance(solver.version, int)
    assert solver.version >= 1
    assert isinstance(solver.algorithm, Algorithm)
    assert solver.alignment_bytes in (1, 2, 4, 8, 16, 32, 64, 128, 256)
    for problem in solver.examples():
        alignment = solver.tensor_alignment(problem)
        assert alignment >= solver.alignment_bytes
        assert alignment % problem.y.dtype.itemsize == alignment % problem.x.dtype.itemsize == 0
    assert solver.keys
    assert len(set(solver.keys)) == len(solver.keys)
    assert len({key.library for key in solver.keys}) == 1
    for key in solver.keys:
        assert key.dtypes
        assert key.layouts
        assert (key.place is Place.CPU) == (key.min_sm == 0 and not key.archs)


@each_solver
def test_parameters_are_distinct_values_of_one_type(solver: Solver) -> None:
    for name, values in solver.parameters.items():
        assert len(values) == len(set(map(str, values))) > 0, name
        assert len({type(value) for value in values}) == 1, name


@each_solver
def test_sources_exist(solver: Solver) -> None:
    folder = importlib.resources.files("miofind.kernels_src")
    assert all(folder.joinpath(source).is_file() for source in solver.sources)


@each_solver
def test_every_key_has_an_example_that_is_accepted(solver: Solver) -> None:
    mine = [case for case in CASES if case.solver is solver and not case.feature]
    for key in solver.keys:
        assert any(key.applicability(case.problem, case.device) for case in mine), key


@each_solver
def test_every_example_is_one_of_a_key(solver: Solver) -> None:
    """Else it would be no case, and nothing would be checked of it."""
    for problem in solver.examples():
        assert any(key.applicability(problem, device_of(key)) for key in solver.keys), problem


@each_solver
def test_every_direction_that_is_declared_has_an_example(solver: Solver) -> None:
    without = solver.directions - {problem.direction for problem in solver.examples()}
    assert not without, f"no example is {' or '.join(sorted(without))}: add one, or do not declare it"


@each_solver
def test_directions_that_are_not_declared_are_refused_for_that(solver: Solver) -> None:
    device = device_of(solver.keys[0])
    for problem in solver.examples():
        for direction in set(Direction) - solver.directions:
            answer = solver.applicability(problem.bare.in_direction(direction), device)
            assert answer.refused
            if not solver.refuse_combination(problem, device).refused:
                assert answer.reason.startswith("computes ")


@each_solver
def test_every_dtype_and_memory_order_that_is_accepted_is_a_case(solver: Solver) -> None:
    """Of each direction, as far as an example is accepted with it."""
    for device in {case.device for case in CASES if case.solver is solver}:
        mine = {Kind.of(case.problem) for case in CASES if (case.solver, case.device) == (solver, device)}
        assert set(accepted_kinds(solver, device)) <= mine


@each_solver
def test_refusals_have_reasons(solver: Solver) -> None:
    """Where a solver refuses, a sentence says why; nothing it is asked makes it fail."""
    convolution = ProblemDescription.convolution
    base = convolution(x=(2, 6, 9, 10), w=(4, 3, 3, 2), padding=1, stride=2, groups=2)
    problems = [
        base,
        convolution(x=(2, 6, 9), w=(4, 6, 3), dilation=2, dtype=DataType.FLOAT64),
        convolution(x=(2, 6, 9, 8, 7), w=(4, 6, 3, 1, 2), layout=Layout.NDHWC, dtype=DataType.BFLOAT16),
        convolution(x=(2, 6, 9, 8), w=(4, 6, 1, 1), dtype={"x": "float16", "w": "float32", "y": "bfloat16"}),
        *(replace(base, direction=direction) for direction in Direction),
    ]
    for problem, device in itertools.product(problems, (Device.cpu(), Device.virtual("75"), Device.virtual("90a"))):
        answer = solver.applicability(problem, device)
        assert bool(answer) == (answer.reason == "")
        assert answer.reason == answer.reason.strip()


@each_solver
def test_other_place_is_refused(solver: Solver) -> None:
    places = {key.place for key in solver.keys}
    for device in (Device.cpu(), Device.virtual("90a")):
        if device.place not in places:
            assert solver.applicability(solver.examples()[0], device).reason


def check_that_examples_are_accepted(offer: Offer) -> None:
    case = offer.case
    answer = case.solver.applicability(case.problem, case.device)
    assert answer, answer.reason


def check_that_default_configurations(offer: Offer) -> None:
    case = offer.case
    defaults = offer.defaults
    assert 1 <= len(defaults) <= MAX_DEFAULT_CONFIGS
    assert len(set(defaults)) == len(defaults)
    assert case.solver.default_configs(case.problem, case.device) == defaults
    for config in defaults:
        case.solver.check_config(case.problem, case.device, config)
        assert case.solver.is_valid_config(case.problem, case.device, config)
    estimates = [case.solver.estimate_ms(case.problem, case.device, config) for config in defaults]
    assert case.solver.estimated_defaults(case.problem, case.device) == tuple(zip(defaults, estimates, strict=True))
    assert 0 <= case.solver.least_ms(case.problem, case.device) <= min(estimates)


def check_that_configurations_are_valid_and_named_by_their_text(offer: Offer) -> None:
    case = offer.case
    for config in offer.solutions:
        case.solver.check_config(case.problem, case.device, config)
        assert Config.from_json(config.json) == config
        assert math.isfinite(case.solver.error_growth(case.problem, config))
        assert case.solver.error_growth(case.problem, config) >= 1
        assert case.solver.error_reach(case.problem, config) in Reach
        assert isinstance(case.solver.is_exact(config), bool)


def check_that_bad_configurations_are_refused(offer: Offer) -> None:
    case = offer.case
    good = offer.defaults[0]
    bad = [Config({**good, "no_such_parameter": 1})]
    for name in good:
        bad.append(Config({key: value for key, value in good.items() if key != name}))
        bad.append(Config({**good, name: "no such value"}))
        bad.append(Config({**good, name: 12345.5}))
        if type(good[name]) is int:
            bad.append(Config({**good, name: -(2**40)}))
        if isinstance(good[name], bool):
            bad.append(Config({**good, name: int(good[name])}))
    for config in bad:
        with pytest.raises(InvalidConfigError, match=case.solver.id):
            case.solver.check_config(case.problem, case.device, config)


def check_that_estimates_are_positive_and_finite(offer: Offer) -> None:
    case = offer.case
    for config in offer.solutions:
        estimate_ms = case.solver.estimate_ms(case.problem, case.device, config)
        assert math.isfinite(estimate_ms)
        assert estimate_ms > 0


def check_that_solutions_are_inert(offer: Offer) -> None:
    case = offer.case
    for config, solution in offer.solutions.items():
        assert solution.steps
        assert solution == case.solver.solution(case.problem, case.device, config)
        assert hash(solution) == hash(pickle.loads(pickle.dumps(solution)))
        assert pickle.loads(pickle.dumps(solution)) == solution


def check_that_workspaces_are_planned(offer: Offer) -> None:
    case = offer.case
    for config, solution in offer.solutions.items():
        plan = solution.workspace
        assert case.solver.workspace_bytes(case.problem, case.device, config) == plan.bytes
        names = [region.name for region in plan.regions]
        assert len(names) == len(set(names))
        assert not {operand.name for operand in case.problem.operands} & set(names)
        assert all(region.bytes > 0 for region in plan.regions)


def check_that_steps_name_known_buffers_and_write_the_output(offer: Offer) -> None:
    case = offer.case
    for solution in offer.solutions.values():
        regions = {region.name: region.bytes for region in solution.workspace.regions}
        tensors = {operand.name: operand.tensor.bytes for operand in case.problem.operands}
        sizes = tensors | regions
        used: set[str] = set()
        for step in solution.steps:
            for pointer in pointers(step):
                assert pointer.buffer in sizes
                assert 0 <= pointer.offset_bytes < sizes[pointer.buffer]
                used.add(pointer.buffer)
        if used:
            assert set(sizes) <= used | workspaces(solution.steps)


def pointers(step: KernelStep | MatmulStep | CudnnStep | FftStep | HostStep) -> list[Pointer]:
    if isinstance(step, KernelStep):
        buffers = [arg.pointer if isinstance(arg, TensorMap) else arg for arg in step.args]
        epilogues = [arg for arg in step.args if isinstance(arg, EpilogueArgument)]
        return [*(arg for arg in buffers if isinstance(arg, Pointer)), *epilogue_pointers(*epilogues)]
    if isinstance(step, MatmulStep):
        return [step.a, step.b, step.c, *epilogue_pointers(step.epilogue)]
    if isinstance(step, FftStep):
        return [step.data]
    return []


def epilogue_pointers(*epilogues: EpilogueArgument | None) -> list[Pointer]:
    return [pointer for epilogue in epilogues if epilogue for pointer in epilogue.pointers if pointer]


def workspaces(steps: tuple[object, ...]) -> set[str]:
    """Regions that are handed to libraries."""
    libraries = (MatmulStep, CudnnStep, FftStep)
    return {step.workspace for step in steps if isinstance(step, libraries) and step.workspace}


def check_that_packings_are_two_parts_of_a_solution(offer: Offer) -> None:
    """The first knows the weights and what it makes of them; the second no longer reads the problem's weights."""
    case = offer.case
    for config in offer.defaults:
        packing = case.solver.packing(case.problem, case.device, config)
        if packing is None:
            continue
        assert case.problem.direction is not Direction.BACKWARD_WEIGHTS
        assert packing.bytes > 0
        whole = offer.solutions[config]
        assert packing.run.workspace.bytes <= whole.workspace.bytes
        assert packing.run.deterministic == whole.deterministic
        known = dict.fromkeys(whole.kernels)
        others = {operand.name: operand.tensor.bytes for operand in case.problem.operands if operand.name != "w"}
        for part, tensors in (
            (packing.pack, {"w": case.problem.w.bytes, "y": packing.bytes}),
            (packing.run, {**others, "w": packing.bytes}),
        ):
            sizes = tensors | {region.name: region.bytes for region in part.workspace.regions}
            used = {pointer.buffer for step in part.steps for pointer in pointers(step)}
            assert all(0 <= at.offset_bytes < sizes[at.buffer] for step in part.steps for at in pointers(step))
            assert not used or set(sizes) <= used | workspaces(part.steps)
            assert {binary_of(step) for step in part.kernels} <= set(map(binary_of, known))


def binary_of(step: KernelStep) -> object:
    """What decides a step's binary; one for a kernel with another behind it is taken for that of the kernel alone."""
    (alone,) = ConvSolution(steps=(step,)).kernels
    return alone.binary


def check_that_launches_are_within_the_limits_of_cuda(offer: Offer) -> None:
    case = offer.case
    for solution in offer.solutions.values():
        for step in solution.kernels:
            assert step.package != "miofind.kernels_src" or step.source in case.solver.sources
            assert all(size >= 1 for size in (*step.grid, *step.block))
            assert step.grid[0] < 2**31
            assert max(step.grid[1:]) < 2**16
            assert math.prod(step.block) <= 1024
            assert step.block[2] <= 64
            assert 0 <= step.shared_bytes <= case.device.shared_bytes
            names = [name for name, _ in step.defines]
            assert len(names) == len(set(names))
            assert all(in_range(arg) for arg in step.args if isinstance(arg, Scalar))


def in_range(scalar: Scalar) -> bool:
    """Whether a number fits the C type it is passed as."""
    if scalar.ctype in ("float32", "float64"):
        return True
    limit = CTYPES[scalar.ctype]
    return (-limit if scalar.ctype.startswith("int") else 0) <= scalar.value < limit


def check_that_sizes_are_arguments_where_a_solver_says_so(offer: Offer) -> None:
    """Of each size, two problems that differ in it share their kernels."""
    case = offer.case
    if not case.solver.is_dynamic or case.feature or case.device.place is Place.CPU:
        return
    for name, size in SIZES.items():
        others = [p for p in with_other(size, case.problem) if case.solver.applicability(p, case.device)]
        shared = (share_kernels(case, config, size, others) for config in offer.defaults)
        assert any(shared), f"kernels of {case.solver.id} depend on {name}"


def share_kernels(case: Case, config: Config, size: Size, others: list[ProblemDescription]) -> bool:
    """Whether two of the problems do that differ in a size; true where the configuration serves no two of them, too."""
    known: list[tuple[object, set[object]]] = []
    for problem in (case.problem, *others):
        if case.solver.is_valid_config(problem, case.device, config):
            kernels = case.solver.solution(problem, case.device, config).kernels
            value, compiled = size.of(problem), {(binary_of(step), step.entry) for step in kernels}
            if any(value != other and (compiled <= earlier or earlier <= compiled) for other, earlier in known):
                return True
            known.append((value, compiled))
    return len({value for value, _ in known}) < 2


def check_that_host_functions_exist(offer: Offer) -> None:
    """In every process: the tests can import what users cannot, such as `solvers.cpu`."""
    case = offer.case
    packages = {"miofind", type(case.solver).__module__.partition(".")[0]}
    for solution in offer.solutions.values():
        for step in solution.steps:
            if isinstance(step, HostStep):
                assert case.device.place is Place.CPU
                assert step.module.partition(".")[0] in packages, step.module
                assert callable(getattr(importlib.import_module(step.module), step.function))


def check_that_what_the_cpu_place_computes_is_right(offer: Offer) -> None:
    """Of an example that takes no time: both gates of a find."""
    case = offer.case
    if case.device.place is not Place.CPU or case.problem.flops > MAX_FLOPS:
        return
    check_both_gates(case.problem, case.solver, offer.defaults[0], case.device, Compiler())


def check_that_padding_takes_no_memory(offer: Offer) -> None:
    """Where padding is vast, a step of the CPU place takes less memory than an input with its padding would."""
    case = offer.case
    if not case.feature.startswith("vast padding"):
        return
    arrays = {each.name: np.zeros(each.shape, numpy_dtype(each.tensor.dtype)) for each in case.problem.operands}
    for config in offer.defaults:
        regions = offer.solutions[config].workspace.regions
        buffers = arrays | {region.name: np.zeros(region.bytes, np.uint8) for region in regions}
        tracemalloc.start()
        try:
            for step in offer.solutions[config].steps:
                assert isinstance(step, HostStep)
                getattr(importlib.import_module(step.module), step.function)(case.problem, config, buffers)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak_bytes < MAX_HOST_BYTES, f"{case.solver.id} takes {peak_bytes} bytes of memory beside its workspace"


CHECKS = [check for name, check in list(globals().items()) if name.startswith("check_that_")]


def check_contract(case: Case, record_property: Callable[[str, object], None]) -> None:
    offer = offer_of(case)
    for check in CHECKS:
        check(offer)
    if case.device.place is not Place.CPU:
        record_property(VALUES_UNCHECKED, case.solver.id)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", [case for case in CASES if not case.feature], ids=str)
def test_the_contract_holds(case: Case, record_property: Callable[[str, object], None]) -> None:
    check_contract(case, record_property)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("case", [case for case in CASES if case.feature], ids=str)
def test_the_contract_holds_for_what_examples_lack(case: Case, record_property: Callable[[str, object], None]) -> None:
    check_contract(case, record_property)


@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_is_seen_in_problems_derived_for_it(feature: str) -> None:
    """Some solver accepts it in each direction, and no problem is derived where an example has it already."""
    for case in CASES:
        if case.feature == feature:
            assert FEATURES[feature].is_in(case.problem)
            assert case.device.place in FEATURES[feature].places
            own = [p for p in case.solver.examples() if p.direction is case.problem.direction]
            assert not any(FEATURES[feature].is_in(p) for p in own if case.solver.applicability(p, case.device))
    directions = {case.problem.direction for case in CASES if FEATURES[feature].is_in(case.problem)}
    assert directions == {*Direction}


class OneExample(ConvCpuDirect):
    """Serves what the solver does that it is made of, and has one of its examples."""

    id = "ConvCpuOneExample"

    def examples(self) -> tuple[ProblemDescription, ...]:
        return (ProblemDescription.convolution(x=(1, 4, 8, 8), w=(4, 4, 1, 1)),)


@pytest.mark.parametrize(
    "is_wrong",
    [
        lambda problem: problem.y.dtype is DataType.BFLOAT16,
        lambda problem: problem.x.dtype is not problem.y.dtype,
        lambda problem: problem.y.layout is Layout.NHWC,
        lambda problem: problem.x.layout is not problem.y.layout,
        lambda problem: problem.w.layout is not problem.y.layout,
        lambda problem: problem.direction is Direction.BACKWARD_DATA,
        lambda problem: max(problem.filter) > 1,
    ],
    ids=["bfloat16", "dtypes", "channels last", "layouts", "layout of w", "direction", "several taps"],
)
def test_what_no_example_has_is_computed(
    monkeypatch: pytest.MonkeyPatch, is_wrong: Callable[[ProblemDescription], bool]
) -> None:
    def negative(problem: ProblemDescription, config: Config, buffers: Mapping[str, Any]) -> None:
        convolve(problem, config, buffers)
        if is_wrong(problem):
            buffers[problem.direction.output][...] *= -1

    convolve = direct.convolve
    monkeypatch.setattr(direct, "convolve", negative)
    wrong = [case for case in cases_of(OneExample()) if is_wrong(case.problem)]
    assert wrong
    for case in wrong:
        with pytest.raises(AssertionError, match="gate"):
            check_that_what_the_cpu_place_computes_is_right(offer_of(case))


def test_a_solver_whose_kernels_depend_on_a_size_that_it_calls_an_argument_breaks_the_contract() -> None:
    solver = ChannelsDefined()
    assert solver.is_dynamic
    with pytest.raises(AssertionError, match="kernels of ConvChannelsDefined depend on c"):
        check_that_sizes_are_arguments_where_a_solver_says_so(offer_of(next(cases_of(solver))))


class ChannelsDefined(ConvDirectNaive):
    """Has one more define."""

    id = "ConvChannelsDefined"

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        solution = super().solution(problem, device, config)
        defined = (replace(step, defines=(*step.defines, ("CHANNELS", problem.c))) for step in solution.kernels)
        return replace(solution, steps=tuple(defined))


class ImportedByTestsAlone(ConvCpuDirect):
    """Names its function's module as it is called with the repository's root on the path."""

    id = "ConvCpuImportedByTestsAlone"

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        return ConvSolution(steps=(HostStep(module="solvers.cpu.direct", function="convolve"),))


def test_a_host_function_that_users_cannot_import_breaks_the_contract() -> None:
    offer = offer_of(next(cases_of(ImportedByTestsAlone())))
    assert importlib.import_module("solvers.cpu.direct").convolve
    with pytest.raises(AssertionError, match=r"solvers\.cpu\.direct"):
        check_that_host_functions_exist(offer)


def test_a_solver_that_lays_its_padding_out_breaks_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    def padded(problem: ProblemDescription, config: Config, buffers: Mapping[str, Any]) -> None:
        np.pad(buffers["x"], ((0, 0), (0, 0), *zip(problem.conv.pad_before, problem.conv.pad_after, strict=True)))
        convolve(problem, config, buffers)

    convolve = direct.convolve
    monkeypatch.setattr(direct, "convolve", padded)
    vast = next(case for case in cases_of(OneExample()) if case.feature.startswith("vast padding"))
    with pytest.raises(AssertionError, match="bytes of memory"):
        check_that_padding_takes_no_memory(offer_of(vast))


def test_a_solver_that_computes_something_else_breaks_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    solver = Registry.default()["ConvCpuDirect"]
    case = next(case for case in CASES if case.solver is solver)

    def of_one_column(problem: ProblemDescription, config: Config, buffers: Mapping[str, Any]) -> None:
        convolve(problem, config, buffers)
        buffers[problem.direction.output][..., 1:] = buffers[problem.direction.output][..., :1]

    convolve = direct.convolve
    monkeypatch.setattr(direct, "convolve", of_one_column)
    with pytest.raises(AssertionError, match="gate"):
        check_that_what_the_cpu_place_computes_is_right(offer_of(case))
