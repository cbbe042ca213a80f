"""Convolutions with an epilogue on the CPU place: runs, one call, packed weights, and what is refused by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import miofind
from miofind.core.epilogue import DEFAULT_PARAMETERS, EpilogueParameters
from miofind.errors import InvalidArrayError, InvalidOptionError, InvalidProblemError, LaunchError, WorkspaceError
from miofind.launch.invoker import Bases
from miofind.options import FindOptions
from miofind.reference.convolution import reference_on_host, round_once
from miofind.reference.epilogue import apply_epilogue
from miofind.runtime.solution import reordered
from miofind.solver.registry import Registry
from miofind.solver.solver import APPLICABLE, Applicability
from miofind.solver.steps import RUN_PARAMETERS, Config, ConvSolution, HostStep, Region, WorkspacePlan

SOLVERS = ("vendor/Fused", "vendor/FusedWithWorkspace")
FAST = FindOptions(find_mode="fast", only=SOLVERS)
DIRECT: Any = type(Registry.default()["ConvCpuDirect"])

BASE = {"x": (2, 4, 6, 5), "w": (6, 2, 3, 3), "padding": 1, "groups": 2}
EVERYTHING = "float32.scale.bias.channel_bias.residual.clamp"


def convolve_fused(problem: miofind.ProblemDescription, config: Config, buffers: Mapping[str, Any]) -> None:
    """A host step: the reference of the convolution and its epilogue."""
    sums = reference_on_host(problem.bare, x=buffers["x"], w=buffers["w"])
    read = {name: buffers[name] for name in problem.epilogue.operands}
    buffers["y"][...] = round_once(
        apply_epilogue(problem, sums, read, buffers.get(RUN_PARAMETERS, DEFAULT_PARAMETERS)), problem.output.dtype
    )


class Fused(DIRECT):  # type: ignore[misc]
    """A solver of the CPU place that fuses every epilogue."""

    id = "vendor/Fused"
    scratch_bytes = 0

    def fuses(self, problem: miofind.ProblemDescription) -> Applicability:
        return APPLICABLE

    def solution(self, problem: miofind.ProblemDescription, device: miofind.Device, config: Config) -> ConvSolution:
        plan = WorkspacePlan((Region(name="scratch", bytes=self.scratch_bytes),) if self.scratch_bytes else ())
        step = HostStep(module=__name__, function="convolve_fused", fused=True)
        return ConvSolution(steps=(step,), workspace=plan)


class FusedWithWorkspace(Fused):
    """The same with a workspace."""

    id = "vendor/FusedWithWorkspace"
    scratch_bytes = 256


@pytest.fixture
def handle(tmp_path: Path) -> Iterator[miofind.Handle]:
    registry = Registry.default().with_solvers(Fused(), FusedWithWorkspace())
    with miofind.Handle("cpu", database=tmp_path / "finddb.db", registry=registry) as made:
        yield made


def described(epilogue: str, **changed: Any) -> miofind.ProblemDescription:
    return miofind.ProblemDescription.convolution(**{**BASE, "epilogue": epilogue, **changed})


def arrays_of(problem: miofind.ProblemDescription) -> dict[str, Any]:
    """Arrays of all inputs, in the shapes that users' arrays have."""
    generator = np.random.default_rng(0)
    dtypes = {"bfloat16": ml_dtypes.bfloat16}
    made = {}
    for operand in problem.inputs:
        dtype = operand.tensor.dtype.value
        values = generator.standard_normal(operand.shape).astype(dtypes.get(dtype, dtype))
        made[operand.name] = in_order(values, channels_last=operand.tensor.layout.channels_last)
    return made


def in_order(array: Any, *, channels_last: bool) -> Any:
    if not channels_last or array.ndim < 3:
        return array
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 1, -1)), -1, 1)


def wanted_of(problem: miofind.ProblemDescription, given: Mapping[str, Any], **numbers: Any) -> Any:
    sums = reference_on_host(problem.bare, x=given["x"], w=given["w"])
    return round_once(apply_epilogue(problem, sums, given, EpilogueParameters(**numbers)), problem.output.dtype)


def solutions_of(problem: miofind.ProblemDescription, handle: miofind.Handle) -> list[miofind.Solution]:
    found = miofind.find_solutions(problem, options=FAST, handle=handle)
    return [solution for solution in found if solution.solver_id in SOLVERS]


def solution_of(problem: miofind.ProblemDescription, handle: miofind.Handle) -> miofind.Solution:
    return solutions_of(problem, handle)[0]


EPILOGUES = [
    ("relu", {}),
    ("bias", {"alpha": 0.5}),
    ("bias.residual.relu", {"beta": -2.0}),
    ("bias.silu.residual", {"alpha": np.float32(2), "beta": 3}),
    ("channel_bias.leaky_relu", {"slope": 0.25}),
    (EVERYTHING, {"low": -0.5, "high": 0.75, "alpha": 2.0, "beta": 0.5}),
]


@pytest.mark.parametrize(("epilogue", "numbers"), EPILOGUES, ids=[text for text, _ in EPILOGUES])
@pytest.mark.parametrize(("dtype", "layout"), [("float32", "NCHW"), ("float16", "NHWC"), ("bfloat16", "NCHW")])
def test_run_solution_takes_what_the_epilogue_reads(
    handle: miofind.Handle, epilogue: str, numbers: dict[str, Any], dtype: str, layout: str
) -> None:
    problem = described(epilogue, dtype=dtype, layout=layout)
    given = arrays_of(problem)
    wanted = wanted_of(problem, given, **numbers)
    out = in_order(np.full_like(wanted, np.nan, order="C"), channels_last=problem.y.layout.channels_last)
    for solution in solutions_of(problem, handle):
        workspace = np.empty(solution.workspace_bytes, np.uint8)
        for made in ({}, {"out": out, "workspace": workspace}):
            for _ in range(2):
                y = miofind.run_solution(solution, **given, **numbers, **made)
                np.testing.assert_array_equal(y, wanted)
            assert y is made.get("out", y)


def test_both_test_solvers_are_found(handle: miofind.Handle) -> None:
    found = solutions_of(described("bias"), handle)
    assert {s.workspace_bytes for s in found} == {0, 256}


class Runs:
    """The bases that an invoker was given."""

    def __init__(self, solution: miofind.Solution) -> None:
        self.seen: list[Bases] = []
        invoker = solution.runner.prepare()
        real = invoker.run
        invoker.run = lambda bases, stream: self.seen.append(bases) or real(bases, stream)  # type: ignore[method-assign, func-returns-value]

    @property
    def parameters(self) -> list[EpilogueParameters]:
        return [bases[-2] for bases in self.seen]


def test_equal_numbers_are_one_object(handle: miofind.Handle) -> None:
    """Launches tell by the object whether they must write the numbers anew."""
    problem = described(EVERYTHING)
    solution, given = solution_of(problem, handle), arrays_of(problem)
    runs, out = Runs(solution), np.empty(problem.y.shape, np.float32)
    for low in (-1.0, float("-1"), np.float32(-1), -1, -2.0, -1.0):
        miofind.run_solution(solution, **given, out=out, low=low)
    first, *same, other, again = runs.parameters
    assert all(each is first for each in same)
    assert (first.low, other.low, again.low) == (-1, -2, -1)
    miofind.run_solution(solution, **given, out=out)
    miofind.run_solution(solution, **given, out=out)
    assert runs.parameters[-1] is runs.parameters[-2]
    assert runs.parameters[-1] == DEFAULT_PARAMETERS


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"bias": None}, "bias is missing|takes x, w, bias and residual; given: x, w, residual"),
        ({"scale": np.zeros(6, np.float32)}, "takes x, w, bias and residual; given: x, w, scale, bias, residual"),
        ({"dy": np.zeros((2, 6, 6, 5), np.float32)}, "takes x, w, bias and residual; given: x, w, dy, bias, residual"),
        ({"bias": np.zeros((1, 6, 1, 1), np.float32)}, r"bias has shape .*, the problem wants \(6,\): .*reshape\(6,\)"),
        ({"bias": np.zeros(5, np.float32)}, r"bias has shape \(5,\), the problem wants \(6,\)"),
        ({"bias": np.zeros(6, np.float16)}, "bias has dtype float16, the problem wants float32"),
        ({"bias": np.zeros(12, np.float32)[::2]}, r"bias has strides \(2,\).*wants \(1,\): pass a contiguous copy"),
        ({"residual": np.zeros((2, 6, 6, 1), np.float32)}, "residual has shape"),
        ({"residual": in_order(np.zeros((2, 6, 6, 5), np.float32), channels_last=True)}, "residual has strides.*NCHW"),
    ],
    ids=["missing", "surplus", "dy", "spatial", "length", "dtype", "strides", "residual-shape", "residual-layout"],
)
def test_operands_are_refused_by_name(
    handle: miofind.Handle, change: dict[str, Any], told: str, with_out: bool
) -> None:
    problem = described("bias.residual.relu")
    solution, given = solution_of(problem, handle), arrays_of(problem)
    made = {"out": np.empty(problem.y.shape, np.float32)} if with_out else {}
    miofind.run_solution(solution, **given, **made)
    with pytest.raises(InvalidArrayError, match=told):
        miofind.run_solution(solution, **{**given, **change}, **made)


def test_none_is_not_given(handle: miofind.Handle) -> None:
    problem = described("bias")
    solution, given = solution_of(problem, handle), arrays_of(problem)
    y = miofind.run_solution(solution, **given, residual=None, scale=None, low=None, alpha=None)
    np.testing.assert_array_equal(y, wanted_of(problem, given))


@pytest.mark.parametrize("name", ["bias", "residual", "x"])
def test_an_output_over_an_operand_is_refused(handle: miofind.Handle, name: str) -> None:
    problem = described("bias.residual.relu")
    solution, given = solution_of(problem, handle), arrays_of(problem)
    memory = np.zeros(2 * problem.y.size, np.float32)
    out = memory[: problem.y.size].reshape(problem.y.shape)
    size = given[name].size
    given[name] = memory[problem.y.size - 1 :][:size].reshape(given[name].shape)
    with pytest.raises(InvalidArrayError, match="out shares memory with an input"):
        miofind.run_solution(solution, **given, out=out)


def test_a_workspace_over_an_operand_is_refused(handle: miofind.Handle) -> None:
    problem = described("bias")
    solution = next(s for s in solutions_of(problem, handle) if s.workspace_bytes)
    given = arrays_of(problem)
    memory = np.zeros(64, np.float32)  # at a multiple of 16
    given["bias"] = memory[4:10]
    with pytest.raises(WorkspaceError, match="workspace shares memory with bias, "):
        miofind.run_solution(solution, **given, workspace=memory.view(np.uint8))


@pytest.mark.parametrize(
    ("epilogue", "numbers", "told"),
    [
        ("bias.relu", {"low": 0.1}, "low=0.1: the activation relu has no low.*of clamp"),
        ("bias", {"slope": 0.1}, "slope=0.1: the activation none has no slope.*of leaky_relu and elu"),
        ("bias.relu", {"beta": 0.5}, "beta=0.5: bias.relu adds no residual"),
        ("bias", {"alpha": "1"}, "alpha=.*must be a number"),
        ("bias", {"alpha": True}, "alpha=True must be a number"),
        ("bias", {"alpha": np.ones(2)}, "alpha=<ndarray of shape .*must be a number"),
        ("clamp", {"low": 7}, "low=7.0 must not be above high=6.0"),
        ("residual", {"beta": float("nan")}, "beta=nan must be finite"),
        ("bias", {"alpha": 10**5000}, r"alpha=.* must be finite"),
        ("bias", {"alpha": -1e39}, "alpha=-1e.39 is beyond float32, in which the epilogue is computed"),
        ("", {"alpha": 2}, "alpha=2: a convolution without an epilogue has no factor: multiply w by it"),
        ("", {"beta": 2}, "beta=2: a convolution without an epilogue adds no residual"),
    ],
)
def test_numbers_of_no_use_are_refused(
    handle: miofind.Handle, epilogue: str, numbers: dict[str, Any], told: str
) -> None:
    problem = described(epilogue)
    solution, given = solution_of(problem, handle), arrays_of(problem)
    with pytest.raises(InvalidOptionError, match=told):
        miofind.run_solution(solution, **given, **numbers)


def test_numbers_of_float64_problems_and_infinite_bounds_are_taken(handle: miofind.Handle) -> None:
    for dtype, numbers in (("float64", {"alpha": 1e39}), ("float32", {"low": -np.inf, "high": np.inf})):
        problem = described("clamp", dtype=dtype)
        given = arrays_of(problem)
        y = miofind.run_solution(solution_of(problem, handle), **given, **numbers)
        np.testing.assert_array_equal(y, wanted_of(problem, given, **numbers))


def test_neutral_factors_are_taken_everywhere(handle: miofind.Handle) -> None:
    problem = described("")
    solution, given = solution_of(problem, handle), arrays_of(problem)
    y = miofind.run_solution(solution, **given, alpha=1, beta=1.0, residual=None)
    np.testing.assert_array_equal(y, miofind.run_solution(solution, **given))


def test_a_bare_problem_takes_no_operand_more(handle: miofind.Handle) -> None:
    problem = described("")
    solution, given = solution_of(problem, handle), arrays_of(problem)
    told = "a forward solution takes x and w; given: x, w, bias. Find solutions of a problem whose epilogue has bias"
    with pytest.raises(InvalidArrayError, match=told):
        miofind.run_solution(solution, **given, bias=np.zeros(6, np.float32))


@pytest.mark.parametrize("epilogue", ["", "bias"])
def test_an_unknown_keyword_of_a_run_is_told_the_known_ones(handle: miofind.Handle, epilogue: str) -> None:
    problem = described(epilogue)
    solution, given = solution_of(problem, handle), arrays_of(problem)
    with pytest.raises(TypeError, match=r"\['biass'\]. Did you mean bias.*\? Known are x, w, .*slope, out"):
        miofind.run_solution(solution, **given, biass=1)  # type: ignore[call-arg]


def test_a_fused_solution_that_fails_falls_back(handle: miofind.Handle, caplog: pytest.LogCaptureFixture) -> None:
    problem = described("bias.residual.clamp")
    found = solutions_of(problem, handle)
    solutions = reordered(sorted(found, key=lambda s: -s.workspace_bytes), handle)
    given, invoker = arrays_of(problem), solutions[0].runner.prepare()

    def fail(*_: object) -> None:
        raise LaunchError("broken for this test")

    invoker.run = fail  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            y = miofind.run_solution(solutions[0], **given, high=0.5)
    np.testing.assert_array_equal(y, wanted_of(problem, given, high=0.5))
    assert sum("broken for this test" in record.getMessage() for record in caplog.records) == 1


CALLS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("relu", {"activation": "relu"}, {}),
    ("bias.residual.relu", {"activation": miofind.Activation.RELU}, {}),
    ("bias.silu.residual", {"activation": "SiLU", "residual_position": "after"}, {"beta": 2.0}),
    ("clamp", {"activation": "relu6"}, {}),
    ("scale.bias.channel_bias", {"activation": None}, {"alpha": 0.5}),
    ("channel_bias.elu", {"activation": "elu"}, {"slope": 0.5}),
]


@pytest.mark.parametrize(("epilogue", "words", "numbers"), CALLS, ids=[text for text, _, _ in CALLS])
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_convolution_builds_its_epilogue_from_what_is_there(
    handle: miofind.Handle, epilogue: str, words: dict[str, Any], numbers: dict[str, Any], layout: str
) -> None:
    problem = described(epilogue, dtype="float16", layout=layout)
    given = arrays_of(problem)
    posed = miofind.ProblemDescription.from_arrays(**given, **words, padding=1, groups=2)
    assert posed == problem
    y = miofind.convolution(**given, **words, **numbers, padding=1, groups=2, handle=handle, options=FAST)
    np.testing.assert_array_equal(y, wanted_of(problem, given, **numbers))


def test_a_bias_that_begins_anywhere_is_copied_and_changes_no_solution(
    handle: miofind.Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest solution asks for more alignment than others."""
    monkeypatch.setattr(Fused, "alignment_bytes", 16)
    monkeypatch.setattr(FusedWithWorkspace, "alignment_bytes", 1)
    problem = described("bias.residual.relu")
    given = arrays_of(problem)
    first = reordered(sorted(solutions_of(problem, handle), key=lambda s: s.workspace_bytes), handle)
    monkeypatch.setattr("miofind.api.array_call.find_solutions", lambda *_, **__: first)
    memory = np.zeros(16, np.float32)  # at a multiple of 16
    memory[1:7] = given["bias"]
    given["bias"] = memory[1:7]
    runs = Runs(first[0])
    y = miofind.convolution(**given, activation="relu", padding=1, groups=2, handle=handle)
    np.testing.assert_array_equal(y, wanted_of(problem, given))
    (bases,) = runs.seen
    assert bases[3].ctypes.data % 16 == 0


def test_scale_and_bias_in_float32_are_part_of_the_problem() -> None:
    given = arrays_of(described("float32.scale.bias", dtype="float16"))
    posed = miofind.ProblemDescription.from_arrays(**given, padding=1, groups=2)
    assert posed.epilogue.text == "float32.scale.bias"


def test_a_residual_settles_the_layout_that_sizes_of_1_leave_open() -> None:
    x, w = np.zeros((2, 1, 6, 5), np.float32), np.zeros((4, 1, 3, 3), np.float32)
    residual = in_order(np.zeros((2, 4, 6, 5), np.float32), channels_last=True)
    assert miofind.ProblemDescription.from_arrays(x=x, w=w, residual=residual, padding=1).y.layout == "NHWC"


def ones(*shape: int, dtype: str = "float16") -> Any:
    return np.ones(shape, dtype)


X, W = ones(2, 4, 6, 5), ones(6, 2, 3, 3)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"scale": ones(6, dtype="float32"), "bias": ones(6)}, "scale has dtype float32 and bias float16: both"),
        ({"bias": ones(6, dtype="float64")}, "scale and bias are float16 as y or float32, not float64"),
        ({"bias": ones(1, 6, 1, 1)}, r"bias has shape .*has \(6,\): pass bias.reshape\(6,\)"),
        ({"channel_bias": ones(2, 6, dtype="float32")}, "channel_bias has dtype float32, y has float16"),
        ({"residual": ones(2, 6, 6, 5, dtype="float32")}, "residual has dtype float32, y has float16"),
        ({"residual": ones(1, 6, 1, 1)}, "residual has shape"),
        ({"activation": "rellu"}, r"activation=.*rellu.* is unknown.*Did you mean relu"),
        ({"activation": 3}, "activation=3 must be a name"),
        ({"residual_position": "none"}, "residual_position=none is unknown: use one of before"),
        ({"activation": "relu6", "high": 5}, "high=5: relu6 has the bounds 0 and 6, clamp has"),
        ({"activation": "relu", "high": 5}, "high=5: the activation relu has no high"),
        ({"alpha": 2.0}, "multiply w by it"),
        ({"biass": X}, r"unknown arguments \['biass'\]. Did you mean bias.*Known are activation, "),
    ],
)
def test_convolution_refuses_before_it_finds(
    handle: miofind.Handle,
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, Any],
    told: str,
) -> None:
    monkeypatch.setattr("miofind.api.solutions.find", lambda *_: pytest.fail("something was found"))
    with pytest.raises((InvalidArrayError, InvalidOptionError, InvalidProblemError), match=told):
        miofind.convolution(X, W, padding=1, groups=2, handle=handle, **arguments)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"channel_bias": ones(2, 12)[:, ::2]}, r"channel_bias .*pass a contiguous copy"),
        (
            {"residual": in_order(ones(2, 6, 6, 5), channels_last=True)},
            r"residual of shape .*, y is NCHW .*out decides y's layout, else x.*: pass a copy of the residual",
        ),
    ],
)
def test_a_problem_is_posed_by_packed_arrays_alone(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArrayError, match=told):
        miofind.ProblemDescription.from_arrays(x=X, w=W, padding=1, groups=2, **arguments)


@pytest.mark.parametrize(
    "call",
    [
        lambda **given: miofind.convolution_backward_data(X, W, (2, 4, 6, 5), **given),
        lambda **given: miofind.convolution_backward_weights(X, X, (6, 2, 3, 3), **given),
        lambda **given: miofind.ProblemDescription.from_arrays(dy=X, w=W, x_shape=(2, 4, 6, 5), **given),
    ],
    ids=["data", "weights", "from_arrays"],
)
@pytest.mark.parametrize("name", ["bias", "channel_bias", "activation"])
def test_gradients_refuse_epilogues(call: Callable[..., Any], name: str) -> None:
    given: Any = "relu" if name == "activation" else np.ones(6, np.float16)
    with pytest.raises(InvalidProblemError, match=f"{name}: backward_.* none: {name} is of the epilogues of forward"):
        call(**{name: given})


@pytest.mark.parametrize("packed_names", [("bias", "scale"), ("scale",), ()])
def test_packed_weights_keep_scale_and_bias(handle: miofind.Handle, packed_names: tuple[str, ...]) -> None:
    problem = described(EVERYTHING)
    solution, given = solution_of(problem, handle), arrays_of(problem)
    wanted = wanted_of(problem, given, low=-0.25, alpha=3)
    constants = {name: given.pop(name) for name in packed_names}
    packed = solution.pack(given.pop("w"), **constants)
    np.testing.assert_array_equal(packed.run(**given, low=-0.25, alpha=3), wanted)
    for name, array in constants.items():
        with pytest.raises(InvalidArrayError, match=f"{name} of this solution are packed: leave them out"):
            packed.run(**given, **{name: array})
    del given["residual"]
    with pytest.raises(InvalidArrayError, match=r"given: x, w, .*channel_bias"):
        packed.run(**given)


def test_packed_constants_are_checked(handle: miofind.Handle) -> None:
    problem = described("bias")
    solution, given = solution_of(problem, handle), arrays_of(problem)
    with pytest.raises(InvalidArrayError, match=r"bias has shape \(5,\)"):
        solution.pack(given["w"], bias=given["bias"][:5])
    with pytest.raises(InvalidArrayError, match=r"scale is not packed: .* has none"):
        solution.pack(given["w"], scale=given["bias"])


def test_save_and_load(handle: miofind.Handle, tmp_path: Path) -> None:
    problem = described(EVERYTHING)
    solution, given = solution_of(problem, handle), arrays_of(problem)
    solution.save(tmp_path / "fused.json")
    loaded = miofind.Solution.load(tmp_path / "fused.json", handle)
    assert (loaded.id, loaded.problem) == (solution.id, problem)
    np.testing.assert_array_equal(miofind.run_solution(loaded, **given, low=-1), wanted_of(problem, given, low=-1))
