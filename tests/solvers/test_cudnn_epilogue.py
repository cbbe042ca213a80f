"""cuDNN's operation graph of an epilogue, carried out by NumPy from what its descriptors were given."""

from __future__ import annotations

import ctypes
import threading
import time
import types
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import pytest

from miofind.core.epilogue import DEFAULT_PARAMETERS, Activation, Epilogue, EpilogueParameters
from miofind.core.problem import ProblemDescription
from miofind.errors import LaunchError
from miofind.libraries import cudnn, cudnn_epilogue, cudnn_tensor
from miofind.libraries.cudnn import FusedConvPlan
from miofind.libraries.cudnn_backend import Attribute, Kind, Type
from miofind.libraries.cudnn_epilogue import fused_operations, refused
from miofind.reference.epilogue import activated, apply_epilogue
from miofind.solver.steps import CudnnStep

SOME = EpilogueParameters(alpha=0.5, beta=-2.0, low=-0.75, high=1.5, slope=0.125)


class Recorded:
    """Stands in for a descriptor: keeps what it is given."""

    def __init__(self, kind: Kind, name: str = "") -> None:
        self.kind = kind
        self.name = name
        self.values: dict[Attribute, Any] = {}

    @property
    def pointer(self) -> dict[Attribute, Any]:
        return self.values

    def set(self, attribute: Attribute, kind: Type, *values: float) -> Self:
        self.values[attribute] = values[0] if len(values) == 1 else values
        return self

    def link(self, attribute: Attribute, child: Recorded) -> Self:
        self.values[attribute] = child
        return self

    def finalize(self) -> Self:
        return self

    def __getitem__(self, attribute: Attribute) -> Any:
        return self.values[attribute]


def pointwise(recorded: Recorded, first: np.ndarray, second: np.ndarray | None) -> np.ndarray:
    """One operation as cuDNN's documentation defines it."""
    mode = recorded[Attribute.POINTWISE_MODE]
    if second is not None:
        return first + second if mode == 0 else first * second
    if mode == 100:
        assert recorded[Attribute.POINTWISE_NAN_PROPAGATION] == 1
        low = recorded.values.get(Attribute.POINTWISE_RELU_LOWER_CLIP, 0.0)
        high = recorded.values.get(Attribute.POINTWISE_RELU_UPPER_CLIP, np.inf)
        slope = recorded.values.get(Attribute.POINTWISE_RELU_LOWER_CLIP_SLOPE, 0.0)
        return np.where(first < low, low + slope * (first - low), np.minimum(first, high))
    smooth = {101: "tanh", 102: "sigmoid", 103: "elu", 104: "gelu", 106: "silu", 107: "gelu_tanh"}
    slope = recorded.values.get(Attribute.POINTWISE_ELU_ALPHA)
    return activated(first, Activation(smooth[mode]), EpilogueParameters(slope=slope))


def carried_out(
    problem: ProblemDescription, sums: np.ndarray, operands: Mapping[str, np.ndarray], parameters: EpilogueParameters
) -> np.ndarray:
    ids = {operand.name: number for number, operand in enumerate(problem.operands, 1)}
    tensors: Any = {name: Recorded(Kind.TENSOR, name) for name in ids}
    made: Any = fused_operations(problem, parameters, ids, tensors)
    values = {made.first: sums} | {
        tensors[name]: array.reshape(problem.tensor(name).shape) for name, array in operands.items()
    }
    for operation in made.operations:
        other = operation.values.get(Attribute.OPERATION_POINTWISE_B)
        if other is not None and other not in values:
            values[other] = np.array(getattr(parameters, made.factors[other[Attribute.TENSOR_UNIQUE_ID]]))
        first = values[operation[Attribute.OPERATION_POINTWISE_X]]
        second = None if other is None else values[other]
        result = operation[Attribute.OPERATION_POINTWISE_Y]
        assert result not in values, "written twice"
        values[result] = pointwise(operation[Attribute.OPERATION_POINTWISE_POINTWISE], first, second)
    numbers = [tensor.values.get(Attribute.TENSOR_UNIQUE_ID) for tensor in values if not tensor.name]
    assert len(set(numbers)) == len(numbers), "one id a tensor"
    return values[tensors["y"]]


TEXTS = [
    "bias",
    "relu",
    "residual",
    "scale.bias.residual.relu",
    "bias.silu.residual",
    "bias.clamp",
    "bias.leaky_relu.residual",
    "gelu",
    "gelu_tanh",
    "sigmoid",
    "tanh",
    "scale.elu",
]


@pytest.mark.parametrize("parameters", [DEFAULT_PARAMETERS, SOME], ids=["defaults", "numbers"])
@pytest.mark.parametrize("text", TEXTS)
def test_the_graph_computes_the_epilogue(
    text: str, parameters: EpilogueParameters, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (cudnn_epilogue, cudnn_tensor):
        monkeypatch.setattr(module, "Descriptor", Recorded)
    problem = ProblemDescription.convolution(x=(2, 3, 4, 5), w=(6, 3, 1, 1), epilogue=text)
    random = np.random.default_rng(0)
    sums = 3 * random.standard_normal(problem.y.shape)
    operands = {
        o.name: random.standard_normal(o.shape) for o in problem.operands if o.name in problem.epilogue.operands
    }
    wanted = apply_epilogue(problem, sums, operands, parameters)
    assert carried_out(problem, sums, operands, parameters) == pytest.approx(wanted, rel=1e-12)


def test_what_cudnn_has_no_operation_for_is_refused() -> None:
    answers = {activation: refused(Epilogue(bias=True, activation=activation)) for activation in Activation}
    assert {activation for activation, reason in answers.items() if reason} == {Activation.HARDSWISH, Activation.MISH}
    assert "one number an image and channel" in refused(Epilogue(channel_bias=True))


def test_each_kind_of_numbers_has_a_plan_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One with factors and one without, whatever the factors are; one for each set of an activation's numbers."""
    launched: list[tuple[Any, ...]] = []

    def plan(problem: object, step: object, device: object, made: EpilogueParameters) -> types.SimpleNamespace:
        def launch(addresses: tuple[int, ...], stream: int, parameters: EpilogueParameters) -> None:
            launched.append((made, addresses, stream, parameters))

        return types.SimpleNamespace(launch=launch, prepare=lambda: launched.append((made,)))

    monkeypatch.setattr(cudnn, "ConvPlan", plan)
    problem = ProblemDescription.convolution(x=(2, 3, 4, 5), w=(6, 3, 1, 1), epilogue="bias.clamp")
    fused = FusedConvPlan(problem, CudnnStep(engine=0, knobs=(), fused=True), None)  # type: ignore[arg-type]
    fused.prepare()
    assert launched == [(DEFAULT_PARAMETERS,)] * 2  # as it is made, and for this thread
    launched.clear()
    halved, doubled, raised = EpilogueParameters(alpha=0.5), EpilogueParameters(alpha=2), EpilogueParameters(low=1)
    slope = EpilogueParameters(slope=1.0)  # a clamp has none
    given = (DEFAULT_PARAMETERS, halved, doubled, raised, slope, halved)
    for parameters in given:
        fused.launch((1, 2, 3, 4, parameters, 5000), 7)
    makers = (DEFAULT_PARAMETERS, halved, halved, raised, DEFAULT_PARAMETERS, halved)
    expected = [(maker, (1, 2, 3, 4, 5000), 7, one) for maker, one in zip(makers, given, strict=True)]
    assert [each for each in launched if len(each) > 1] == expected
    for number in range(cudnn._MOST_NUMBERS - 3):
        fused.launch((1, 2, 3, 4, EpilogueParameters(high=7.0 + number), 5000), 7)
    with pytest.raises(LaunchError, match="numbers part of a plan"):
        fused.launch((1, 2, 3, 4, EpilogueParameters(low=0.25), 5000), 7)


def test_threads_build_a_plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[EpilogueParameters] = []
    together = threading.Barrier(4)

    def plan(problem: object, step: object, device: object, made: EpilogueParameters) -> types.SimpleNamespace:
        built.append(made)
        return types.SimpleNamespace(launch=lambda *_: None, prepare=lambda: time.sleep(0.02))

    monkeypatch.setattr(cudnn, "ConvPlan", plan)
    problem = ProblemDescription.convolution(x=(2, 3, 4, 5), w=(6, 3, 1, 1), epilogue="bias.relu")
    fused = FusedConvPlan(problem, CudnnStep(engine=0, knobs=(), fused=True), None)  # type: ignore[arg-type]

    def launch() -> None:
        together.wait()
        fused.launch((1, 2, 3, 4, SOME, 5000), 7)

    threads = [threading.Thread(target=launch) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == [SOME]


def test_launches_are_given_their_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    executed: list[tuple[list[int], list[float]]] = []

    def execute(handle: object, plan: object, pack: dict[Attribute, tuple[int, ...]]) -> int:
        *operands, factor = pack[Attribute.PACK_DATA_POINTERS]
        executed.append((operands, ctypes.c_float.from_address(factor).value))
        return 0

    monkeypatch.setattr(cudnn, "Descriptor", Recorded)
    monkeypatch.setattr(cudnn.backend, "library", lambda: types.SimpleNamespace(execute=execute))
    ids = {name: number for number, name in enumerate(("x", "w", "y", "bias"), 1)}
    bound = cudnn._BoundPlan(Recorded(Kind.EXECUTION_PLAN), ids, {9: "alpha"})  # type: ignore[arg-type]
    bound.handle = types.SimpleNamespace(stream=7, pointer=0)  # type: ignore[assignment]
    for alpha in (0.5, -3.0, 0.5):
        bound.launch((10, 20, 30, 40, 0), 7, EpilogueParameters(alpha=alpha))
    assert executed == [([10, 20, 30, 40], 0.5), ([10, 20, 30, 40], -3.0), ([10, 20, 30, 40], 0.5)]


def test_an_engine_that_does_not_take_a_factor_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for the default numbers, which the record was measured with."""
    built: list[tuple[int, tuple[str, ...]]] = []

    def plan(problem: object, step: CudnnStep, device: object, parameters: EpilogueParameters) -> types.SimpleNamespace:
        def prepare() -> None:
            if step.engine == 10 and parameters.alpha != 1:
                raise LaunchError("not supported")
            built.append((step.engine, step.notes))

        return types.SimpleNamespace(launch=lambda addresses, stream, parameters: None, prepare=prepare)

    monkeypatch.setattr(cudnn, "ConvPlan", plan)
    problem = ProblemDescription.convolution(x=(2, 3, 4, 5), w=(6, 3, 1, 1), dtype="float16", epilogue="bias.relu")
    fused = FusedConvPlan(problem, CudnnStep(engine=10, knobs=((1, 2),), fused=True), None)  # type: ignore[arg-type]
    fused.prepare()
    fused.launch((1, 2, 3, 4, EpilogueParameters(alpha=0.5), 5000), 7)
    assert built == [(10, ()), (10, ()), (cudnn.HEURISTIC, ("tensor_core",))]
