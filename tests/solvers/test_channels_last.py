"""ConvChannelsLast without a GPU: its steps carried out in NumPy, with the inner solver's replaced by the reference.

Of the others that transpose: what they leave in place, and what they refuse.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.in_numpy.transpose import ENTRIES, carry_out, tensors
from helpers.problems.drawn_configs import drawn_wgmma
from numpy.typing import NDArray

from miofind.core.problem import Layout, ProblemDescription
from miofind.device.device import Device
from miofind.errors import InvalidConfigError
from miofind.reference.convolution import reference_on_host
from miofind.solver.registry import Registry
from miofind.solver.steps import Config, ConvSolution, KernelStep, Pointer, Scalar, TensorMap

Array = NDArray[np.float64]

DEVICE = Device.virtual("90a")
SOLVER = Registry.default()["ConvChannelsLast"]
INNER = Registry.default()["ConvImplicitGemmWgmma"]


def conv(**fields: Any) -> ProblemDescription:
    return ProblemDescription.convolution(**{"dtype": "float16", **fields})


PROBLEMS: dict[str, ProblemDescription] = {
    "forward": conv(x=(2, 24, 7, 9), w=(16, 24, 3, 3), padding=((1, 0), (2, 1)), stride=2),
    "data": conv(x=(2, 16, 9, 6), w=(24, 16, 3, 2), padding=1, direction="backward_data"),
    "weights": conv(x=(3, 16, 9, 6), w=(72, 16, 3, 2), dilation=2, direction="backward_weights"),
    "blocks of weights": conv(x=(3, 16, 10, 10), w=(72, 16, 3, 3), direction="backward_weights"),
    "one tap": conv(x=(2, 16, 9, 6), w=(24, 16, 1, 1)),
    "one tap, weights": conv(x=(2, 16, 9, 6), w=(24, 16, 1, 1), direction="backward_weights"),
    "one output pixel": conv(x=(2, 16, 3, 3), w=(24, 16, 3, 3)),
    "one input pixel": conv(x=(2, 16, 1, 1), w=(24, 16, 3, 3), padding=2, direction="backward_data"),
    "groups": conv(x=(2, 64, 10, 9), w=(32, 32, 3, 3), groups=2, padding=1),
    "one dimension": conv(x=(2, 16, 70), w=(24, 16, 5), padding=2, dtype="bfloat16"),
    "TF32": conv(x=(2, 12, 9, 8), w=(20, 12, 3, 3), direction="backward_data", dtype="float32", math="tf32"),
    "more than a tile": conv(x=(2, 72, 12, 11), w=(136, 72, 3, 3), padding=1),
}
each_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)


STAYS = {
    **dict.fromkeys(("forward", "one tap", "groups", "one dimension", "more than a tile"), "y"),
    **dict.fromkeys(("data", "TF32"), "x"),
    "blocks of weights": "y",
}
"""Tensors that the inner solver takes with their channels first."""


def twin(problem: ProblemDescription, stays: str = "") -> ProblemDescription:
    """The same with channels last, those of all tensors or but for one."""
    layout = Layout.of(problem.spatial_dims, channels_last=True)
    return replace(problem, **{n: replace(problem.tensor(n), layout=layout) for n in "xwy" if n != stays})


def form(problem: ProblemDescription) -> ProblemDescription:
    """What the inner solver is asked."""
    [name] = [name for name, one in PROBLEMS.items() if one == problem]
    return twin(problem, STAYS.get(name, ""))


def configs(problem: ProblemDescription) -> list[tuple[Config, ConvSolution, ConvSolution]]:
    """Default configurations and one of every kind of tiling: each with its solution and that of the inner solver."""
    found = []
    every = [Config.of(solver=INNER.id, config=dict(one)) for one in drawn_wgmma(INNER, form(problem), DEVICE, 0, 1)]
    for config in dict.fromkeys([*SOLVER.default_configs(problem, DEVICE), *every]):
        inner = Registry.default().named(config["solver"]).solution(form(problem), DEVICE, Config(config["config"]))
        found.append((config, SOLVER.solution(problem, DEVICE, config), inner))
    assert found
    return found


def buffers_of(step: KernelStep) -> list[str]:
    pointers = [arg.pointer if isinstance(arg, TensorMap) else arg for arg in step.args]
    return [pointer.buffer for pointer in pointers if isinstance(pointer, Pointer)]


def in_memory(problem: ProblemDescription, name: str, tensor: Array) -> Array:
    last = problem.tensor(name).layout.channels_last
    return np.ascontiguousarray(np.moveaxis(tensor, 1, -1) if last else tensor).ravel()


def logical(problem: ProblemDescription, name: str, memory: Array) -> Array:
    n, c, *spatial = problem.tensor(name).shape
    if not problem.tensor(name).layout.channels_last:
        return memory.reshape(n, c, *spatial)
    return np.moveaxis(memory.reshape(n, *spatial, c), -1, 1)


def carried_out(problem: ProblemDescription, solution: ConvSolution, inputs: Mapping[str, Array]) -> Array:
    """The output's memory: launches that turn one by one, all steps between them as the twin's reference."""
    memory = {name: in_memory(problem, name, tensor) for name, tensor in inputs.items()}
    is_done = False
    for step in solution.kernels:
        if step.entry in ENTRIES:
            carry_out(step, memory)
        elif not is_done:
            is_done = True
            names = {name: name if f"{name}_last" not in regions(solution) else f"{name}_last" for name in "xwy"}
            given = {name: logical(form(problem), name, memory[names[name]]) for name in problem.direction.inputs}
            output = problem.direction.output
            result = reference_on_host(form(problem), **given)
            memory[names[output]] = in_memory(form(problem), output, result)
    assert is_done
    return memory[problem.direction.output]


def regions(solution: ConvSolution) -> dict[str, int]:
    return {region.name: region.bytes for region in solution.workspace.regions}


@each_problem
def test_steps_compute_the_convolution(problem: ProblemDescription) -> None:
    generator = np.random.default_rng(3)
    inputs = {
        name: generator.integers(-3, 4, problem.tensor(name).shape).astype(np.float64)
        for name in problem.direction.inputs
    }
    expected = in_memory(problem, problem.direction.output, reference_on_host(problem, **inputs))
    for _, solution, _ in configs(problem)[:2]:
        np.testing.assert_array_equal(carried_out(problem, solution, inputs), expected)


@each_problem
def test_turns_stand_around_the_inner_steps(problem: ProblemDescription) -> None:
    """Inputs before in one launch, the output after, each at most once; the inner steps differ in their buffers."""
    output = problem.direction.output
    for _, solution, inner in configs(problem):
        moved = {name for name in "xwy" if f"{name}_last" in regions(solution)}
        before, after = moved - {output}, moved & {output}
        first, count, steps = min(1, len(before)), len(inner.kernels), solution.kernels
        assert len(steps) == first + count + len(after)
        there, back = (
            [(one.source, one.target) for step in part for one in tensors(step)]
            for part in (steps[:first], steps[first + count :])
        )
        assert there == [(name, f"{name}_last") for name in "xwy" if name in before]
        assert back == [(f"{name}_last", name) for name in after]
        for mine, theirs in zip(steps[first : first + count], inner.kernels, strict=True):
            assert replace(mine, args=theirs.args, defines=theirs.defines) == theirs
            assert set(mine.defines) - set(theirs.defines) <= {("HAS_DEPENDENT", 1)}
            renamed = [f"{name}_last" if name in moved else name for name in buffers_of(theirs)]
            assert buffers_of(mine) == renamed
            for arg, other in zip(mine.args, theirs.args, strict=True):
                if isinstance(arg, TensorMap) and isinstance(other, TensorMap):
                    assert replace(arg, pointer=other.pointer) == other
                elif isinstance(arg, Scalar):
                    assert arg == other


@each_problem
def test_the_workspace_holds_what_is_moved_and_what_the_inner_solver_wants(problem: ProblemDescription) -> None:
    for config, solution, inner in configs(problem):
        moved = {f"{n}_last": problem.tensor(n).bytes for n in "xwy" if f"{n}_last" in regions(solution)}
        assert moved
        assert regions(solution) == moved | regions(inner)
        assert SOLVER.workspace_bytes(problem, DEVICE, config) >= sum(moved.values()) + inner.workspace.bytes


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        ("forward", "xw"),
        ("data", "wy"),
        ("weights", "xwy"),
        ("blocks of weights", "xw"),
        ("one tap", "x"),
        ("one tap, weights", "xy"),
        ("one output pixel", "xw"),
        ("one input pixel", "wy"),
    ],
)
def test_tensors_of_the_same_order_stay(name: str, moved: str) -> None:
    for _, solution, _ in configs(PROBLEMS[name]):
        assert {region[0] for region in regions(solution) if region.endswith("_last")} == set(moved)


def test_refuses_where_nothing_is_to_be_moved() -> None:
    problem = conv(x=(32, 64, 1, 1), w=(128, 64, 1, 1))
    assert INNER.applicability(twin(problem), DEVICE)
    assert "the same with channels last" in SOLVER.applicability(problem, DEVICE).reason


@pytest.mark.parametrize(
    ("fields", "device", "words"),
    [
        ({"layout": "NHWC"}, "90a", "NHWC"),
        ({"layout": {"x": "NCHW", "w": "NHWC", "y": "NCHW"}}, "90a", "w is NHWC"),
        ({"dtype": "float64"}, "90a", "float64"),
        ({}, "80", "9.0"),
        ({}, "120a", "90a only"),
        ({"x": (2, 12, 8, 8), "w": (16, 12, 3, 3)}, "90a", "ConvImplicitGemmWgmma: copies 16 bytes"),
        ({"dtype": "float32"}, "90a", "ConvImplicitGemmWgmma: multiplies float32 as TF32"),
    ],
    ids=["channels last", "mixed layouts", "float64", "ampere", "blackwell", "inner channels", "inner float32"],
)
def test_refuses_with_a_reason(fields: dict[str, Any], device: str, words: str) -> None:
    problem = conv(**{"x": (2, 16, 8, 8), "w": (16, 16, 3, 3), **fields})
    answer = SOLVER.applicability(problem, Device.virtual(device))
    assert not answer
    assert words in answer.reason


@each_problem
def test_serves_what_the_inner_solver_serves(problem: ProblemDescription) -> None:
    answer = SOLVER.applicability(problem, DEVICE)
    assert answer, answer.reason
    assert INNER.applicability(form(problem), DEVICE)
    assert SOLVER.form(problem, DEVICE) == form(problem)


def test_configurations_are_the_inner_solvers() -> None:
    problem = PROBLEMS["weights"]
    mine = list(itertools.islice(SOLVER.configs(problem, DEVICE), 20))
    theirs = list(itertools.islice(INNER.configs(form(problem), DEVICE), 20))
    assert {config["solver"] for config in mine} == {INNER.id}
    assert [Config(config["config"]) for config in mine] == theirs
    defaults = SOLVER.default_configs(problem, DEVICE)
    assert Config(defaults[0]["config"]) == INNER.default_configs(form(problem), DEVICE)[0]


def test_estimates_add_the_moves_to_the_inner_solvers() -> None:
    for config, _, _ in configs(PROBLEMS["more than a tile"]):
        inner_ms = INNER.estimate_ms(form(PROBLEMS["more than a tile"]), DEVICE, Config(config["config"]))
        assert SOLVER.estimate_ms(PROBLEMS["more than a tile"], DEVICE, config) > inner_ms


def test_configurations_of_another_problem_are_refused() -> None:
    problem = PROBLEMS["forward"]
    good = SOLVER.default_configs(problem, DEVICE)[0]
    bad: dict[str, Config] = {
        "must name": Config.of(solver="ConvDirectNaive", config=dict(good["config"])),
        "and its config": Config.of(solver=good["solver"]),
        "has no configuration": Config.of(solver=good["solver"], config="splits=1"),
        "must have the parameters": Config.of(solver=good["solver"], config={"splits": 1}),
        "must be one of": Config.of(solver=good["solver"], config={**good["config"], "splits": 12345}),
    }
    SOLVER.check_config(problem, DEVICE, good)
    for words, config in bad.items():
        with pytest.raises(InvalidConfigError, match=words):
            SOLVER.check_config(problem, DEVICE, config)
    with pytest.raises(InvalidConfigError, match="ConvImplicitGemmWgmma: copies 16 bytes"):
        SOLVER.check_config(conv(x=(2, 12, 8, 8), w=(16, 12, 3, 3)), DEVICE, good)


def test_promises_are_the_inner_solvers(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = PROBLEMS["forward"]
    config = SOLVER.default_configs(problem, DEVICE)[0]
    inner = INNER.solution(form(problem), DEVICE, Config(config["config"]))
    assert SOLVER.solution(problem, DEVICE, config).deterministic
    monkeypatch.setattr(type(INNER), "solution", lambda *_: replace(inner, deterministic=False))
    monkeypatch.setattr(type(INNER), "error_growth", lambda *_: 3.5)
    monkeypatch.setattr(type(INNER), "is_exact", lambda *_: False)
    assert not SOLVER.solution(problem, DEVICE, config).deterministic
    assert SOLVER.error_growth(problem, config) == 3.5
    assert not SOLVER.is_exact(config)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stride": 2}, ""),
        ({"stride": (1, 2)}, ""),
        ({}, "but for strides"),
        ({"stride": 2, "direction": "backward_weights"}, "computes backward_data"),
        ({"stride": 2, "math": "tf32"}, "faster products of TF32"),
        ({"stride": 2, "dtype": "float16"}, "x is float16"),
        ({"stride": 2, "layout": "NHWC"}, "x is NHWC"),
    ],
    ids=str,
)
def test_float32_is_turned_for_strided_gradients_alone(fields: dict[str, Any], words: str) -> None:
    """Elsewhere the inner solver does as well with channels first."""
    given = {"x": (2, 16, 9, 6), "w": (24, 16, 3, 3), "padding": 1, "direction": "backward_data", **fields}
    answer = Registry.default()["ConvChannelsLastMma"].applicability(ProblemDescription.convolution(**given), DEVICE)
    assert words in answer.reason if words else answer


@pytest.mark.parametrize(
    ("fields", "moved", "launches"),
    [
        ({}, "xw", 2),
        ({"stride": 2}, "xw", 2),
        ({"direction": "backward_data"}, "wy", 2),
        ({"w": (40, 24, 1, 1), "padding": 0, "stride": 2}, "x", 2),
        ({"epilogue": "bias.residual.relu"}, "xw", 2),
        ({"x": (2, 24, 16, 15)}, "xwy", 3),
        ({"direction": "backward_data", "stride": 2}, "xwy", 3),
        ({"x": (2, 24, 16, 15), "epilogue": "bias.residual.relu"}, "xwy", 4),
    ],
    ids=[
        "forward",
        "strided",
        "data",
        "one tap",
        "residual",
        "pixels that are no whole units",
        "strided data",
        "residual and pixels that are no whole units",
    ],
)
def test_ping_pong_leaves_results_channels_first_where_images_are_whole_units(
    fields: dict[str, Any], moved: str, launches: int
) -> None:
    solver = Registry.default()["ConvChannelsLastPingPong"]
    problem = conv(**{"x": (2, 24, 16, 16), "w": (40, 24, 3, 3), "padding": 1, **fields})
    assert solver.applicability(problem, DEVICE)
    for config in solver.default_configs(problem, DEVICE):
        solution = solver.solution(problem, DEVICE, config)
        assert {name[0] for name in regions(solution) if name in {"x_last", "w_last", "y_last"}} == set(moved)
        assert ("residual_last" in regions(solution)) == ("y" in moved and bool(problem.epilogue))
        assert len(solution.kernels) == launches


@pytest.mark.parametrize(
    ("fields", "moved", "words"),
    [
        ({}, "xw", ""),
        ({"direction": "backward_data", "epilogue": "residual.dsilu"}, "wy", ""),
        ({"w": (40, 24, 1, 3), "epilogue": "channel_bias.residual.relu"}, "xw", ""),
        ({"x": (2, 24, 16, 20)}, "", "ConvImplicitGemmHaloSwappedPlanes: copies 16 bytes: 20 pixels of a row"),
        ({"stride": 2}, "", "needs stride 1"),
        ({"w": (40, 24, 1, 1), "padding": 0}, "", "one tap"),
        ({"epilogue": "statistics"}, "", "compute no epilogue"),
    ],
    ids=["forward", "data", "columns", "width", "strided", "one tap", "statistics"],
)
def test_halos_results_stay_channels_first(fields: dict[str, Any], moved: str, words: str) -> None:
    """And what is laid out as they are: no tensor has to be transposed back."""
    solver = Registry.default()["ConvChannelsLastHaloSwapped"]
    problem = conv(**{"x": (2, 24, 16, 16), "w": (40, 24, 3, 3), "padding": ((1, 1), (1, 1)), **fields})
    answer = solver.applicability(problem, DEVICE)
    assert bool(answer) == bool(moved)
    assert words in answer.reason
    for config in solver.default_configs(problem, DEVICE) if moved else ():
        assert solver.inner_solver.applicability(solver.inner_problem(problem, config), DEVICE)
        solution = solver.solution(problem, DEVICE, config)
        assert {name for name in regions(solution) if name.endswith("_last")} == {f"{name}_last" for name in moved}
        assert [step.entry for step in solution.kernels] == ["transpose_two", "implicit_gemm_wgmma_halo_swapped"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"w": (40, 24, 1, 1), "padding": 0}, "takes its channels first"),
        ({"groups": 3, "w": (48, 8, 3, 3)}, "ConvImplicitGemmPingPong: serves one group"),
        ({"direction": "backward_data", "epilogue": "residual.drelu"}, "compute no epilogue"),
        ({"direction": "backward_weights"}, "computes forward and backward_data"),
    ],
    ids=["first", "groups", "mask", "weights"],
)
def test_ping_pong_is_not_given_transposed_tensors(fields: dict[str, Any], words: str) -> None:
    problem = conv(**{"x": (2, 24, 16, 16), "w": (40, 24, 3, 3), "padding": 1, **fields})
    answer = Registry.default()["ConvChannelsLastPingPong"].applicability(problem, DEVICE)
    assert answer.refused
    assert words in answer.reason
