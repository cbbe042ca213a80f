"""ConvInParts: what it launches, on which pieces, and what it is chosen for. Values are checked on a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from miofind import FindOptions, Handle, find_solutions
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.errors import InvalidConfigError
from miofind.find.immediate.devices import described
from miofind.solver.registry import Registry
from miofind.solver.steps import Config, ConvSolution, EpilogueArgument, KernelStep, Pointer, Scalar, TensorMap
from miofind.solvers.large.in_parts import ConvInParts
from miofind.solvers.large.parts import parts

DEVICE = Device.virtual("90a")
SMALL = 1 << 15
SOLVER = ConvInParts(SMALL)


def convolution(**values: Any) -> ProblemDescription:
    given = {"x": (6, 16, 32, 32), "w": (32, 16, 3, 3), "padding": 1, "dtype": "float16", "layout": "NHWC"}
    return ProblemDescription.convolution(**(given | values))


def pointers(step: KernelStep) -> dict[str, int]:
    """The offset of each buffer that a step is given, all of whose pointers have the same."""
    found: dict[str, set[int]] = {}
    for arg in step.args:
        if isinstance(arg, TensorMap):
            arg = arg.pointer
        each = arg.pointers if isinstance(arg, EpilogueArgument) else (arg,)
        for pointer in each:
            if isinstance(pointer, Pointer):
                found.setdefault(pointer.buffer, set()).add(pointer.offset_bytes)
    assert all(len(offsets) == 1 for offsets in found.values())
    return {buffer: offset for buffer, (offset,) in found.items()}


@pytest.mark.parametrize("direction", ["forward", "backward_data"])
def test_each_part_is_launched_on_its_piece(direction: str) -> None:
    problem = convolution(direction=direction)
    for config in SOLVER.default_configs(problem, DEVICE):
        inner = Registry.default()[config["solver"]]
        cut, steps = parts(problem, SMALL), SOLVER.solution(problem, DEVICE, config).kernels
        each = len(steps) // len(cut)
        for place, part in enumerate(cut):
            own = inner.solution(part.problem, DEVICE, Config(config["config"])).kernels
            for step, whole in zip(own, steps[place * each :], strict=False):
                (alone,) = ConvSolution(steps=(whole,)).kernels
                assert (step.entry, step.defines, step.grid) == (alone.entry, alone.defines, alone.grid)
                moved = {name: offset + part.offsets_bytes.get(name, 0) for name, offset in pointers(step).items()}
                assert pointers(whole) == moved
    assert [part.offsets_bytes["x"] for part in cut] == [2 * 16 * 1024 * place for place in range(6)]


def test_epilogues_read_from_where_their_part_begins() -> None:
    problem = convolution(epilogue="bias.channel_bias.residual.relu")
    configs = SOLVER.default_configs(problem, DEVICE)
    assert configs
    for config in configs:
        for step, part in zip(SOLVER.solution(problem, DEVICE, config).kernels, parts(problem, SMALL), strict=True):
            found = pointers(step)
            assert found["residual"] == part.offsets_bytes["y"]
            assert found["channel_bias"] == part.offsets_bytes["channel_bias"]
            assert found["bias"] == 0


def test_gradients_of_weights_are_added_by_one_reduction() -> None:
    problem = convolution(direction="backward_weights")
    names = set()
    for config in SOLVER.default_configs(problem, DEVICE):
        names.add(config["solver"])
        solution, cut = SOLVER.solution(problem, DEVICE, config), parts(problem, SMALL)
        *sums, reduction = solution.kernels
        assert len(sums) == len(cut) == 6
        (region,) = solution.workspace.regions
        share = region.bytes // 6
        assert share % (4 * problem.w.size) == 0
        for place, (step, part) in enumerate(zip(sums, cut, strict=True)):
            found = pointers(step)
            assert (found["partials"], found["x"]) == (place * share, part.offsets_bytes["x"])
            assert found.get("w", 0) == 0
        partials, output, _, splits, *_ = reduction.args
        assert (partials, output) == (Pointer(buffer="partials"), Pointer(buffer="w"))
        assert splits == Scalar(ctype="int32", value=region.bytes // (4 * problem.w.size))
    assert len(names) > 1


def test_gradients_without_partials_are_not_summed() -> None:
    """A sum that one block computes is rounded where it is: parts of it must not be."""
    problem = convolution(x=(6, 512, 8, 8), w=(512, 512, 1, 1), padding=0, direction="backward_weights")
    inner = Registry.default()["ConvImplicitGemmMma"]
    whole = next(c for c in inner.configs(parts(problem, SMALL)[0].problem, DEVICE) if c["splits"] == 1)
    with pytest.raises(InvalidConfigError, match="leaves no partials"):
        SOLVER.check_config(problem, DEVICE, Config.of(solver=inner.id, config=dict(whole)))


def test_a_search_makes_no_steps_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of thousands of configurations had the steps of all parts made to be asked: 74 s for 144 parts."""

    def made(step: KernelStep, offsets_bytes: dict[str, int]) -> None:
        raise AssertionError(step.entry)

    monkeypatch.setattr(KernelStep, "moved", made)
    problem = convolution(direction="backward_weights")
    configs = [*itertools.islice(SOLVER.configs(problem, DEVICE), 8)]
    assert len(configs) == 8
    for config in configs:
        SOLVER.check_config(problem, DEVICE, config)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"x": (1, 16, 32, 32)}, "more than"),
        ({"x": (1, 16, 64, 64), "layout": "NCHW"}, "cannot be cut"),
        ({"x": (2, 16, 8, 4096), "padding": 0}, "cannot be cut"),
        ({"epilogue": "statistics"}, "second outputs"),
        ({"w": (4096, 16, 3, 3)}, "cannot be cut"),
        ({"dtype": "float64"}, "float64"),
    ],
    ids=["small", "one image channels first", "rows as large as parts", "statistics", "filters", "float64"],
)
def test_what_is_refused_says_why(values: dict[str, Any], told: str) -> None:
    assert told in SOLVER.applicability(convolution(**values), DEVICE).reason


def test_a_configuration_of_a_solver_that_does_not_serve_is_none() -> None:
    problem, other = convolution(), {"solver": "ConvDepthwiseMma", "config": {}}
    with pytest.raises(InvalidConfigError, match="does not serve all parts"):
        SOLVER.check_config(problem, DEVICE, Config(other))


LARGE = {
    "products": {"x": (32, 256, 512, 512), "w": (128, 256, 1, 1), "padding": 0},
    "dense": {"x": (64, 64, 1024, 1024), "w": (64, 64, 3, 3)},
    "one image": {"x": (1, 64, 8192, 8192), "w": (64, 64, 3, 3), "layout": "NHWC"},
    "volumes": {"x": (8, 64, 256, 256, 256), "w": (64, 64, 3, 3, 3), "layout": "NDHWC"},
    "depthwise": {"x": (64, 512, 512, 512), "w": (512, 1, 3, 3), "groups": 512, "layout": "NHWC"},
    "grouped": {"x": (300, 128, 400, 400), "w": (128, 4, 3, 3), "groups": 32},
}


@pytest.mark.parametrize("direction", ["forward", "backward_data", "backward_weights"])
@pytest.mark.parametrize("name", LARGE)
def test_there_is_no_cliff_at_two_to_the_31st_element(name: str, direction: str) -> None:
    """What is predicted to be the fastest takes no more than twice as long for each image as a few of them do."""
    problem = convolution(**({"layout": "NCHW"} | LARGE[name] | {"direction": direction}))
    few = parts(problem, 1 << 30)[0].problem
    with Handle(described("NVIDIA H200|132|9.0|"), database=":memory:") as handle:
        whole, part = (
            find_solutions(each, options=FindOptions(find_mode="fast"), handle=handle)[0] for each in (problem, few)
        )
    assert max(problem.x.size, problem.y.size) >= 1 << 31
    assert whole.time_ms < 2 * part.time_ms * problem.flops / few.flops
