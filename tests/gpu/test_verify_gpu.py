"""Verification on a GPU: right results pass, each kind of fault is caught, references agree with the host's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from miofind.compiler import Compiler
from miofind.core.problem import Direction, ProblemDescription
from miofind.core.values import Values
from miofind.device.device import Device
from miofind.launch import invoker as invoker_module
from miofind.launch.invoker import Invoker, make_invoker
from miofind.reference import convolution as reference
from miofind.reference.convolution import numpy_dtype, reference_on_host
from miofind.solver.registry import Registry
from miofind.verify.claims import Claims
from miofind.verify.harness import Setting
from miofind.verify.sampling import SampleBudget
from miofind.verify.verifier import Verification, Verifier

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

Fault = Callable[[dict[str, int], int], None]

SAMPLED = SampleBudget(products=1 << 18, least=500, most=2000)


def conv(direction: Direction = Direction.FORWARD, dtype: str = "float32", layout: str = "NCHW") -> ProblemDescription:
    return ProblemDescription.convolution(
        x=(3, 24, 17, 15),
        w=(36, 8, 3, 3),
        groups=3,
        padding=((1, 0), (2, 1)),
        stride=(1, 2),
        direction=direction,
        dtype=dtype,
        layout=layout,
    )


class Faulty(Invoker):
    """Runs another invoker, then does damage on the same stream."""

    def __init__(self, inner: Invoker, fault: Fault, workspace_bytes: int = 0) -> None:
        self._inner = inner
        self._fault = fault
        self.problem, self.device = inner.problem, inner.device
        self.solver_id, self.config = inner.solver_id, inner.config
        self.workspace_bytes = max(inner.workspace_bytes, workspace_bytes)
        self.deterministic, self.alignment_bytes = True, inner.alignment_bytes

    def run(self, bases: tuple[int, ...], stream: int) -> None:
        self._inner.run(bases, stream)
        names = (*(operand.name for operand in self.problem.operands), "workspace")
        self._fault(dict(zip(names, bases, strict=True)), stream)


def naive(problem: ProblemDescription, device: Device, compiler: Compiler) -> Invoker:
    solver = Registry.default()["ConvDirectNaive"]
    return make_invoker(problem, device, solver, solver.default_configs(problem, device)[0], compiler)


def set_bytes(address: int, value: int, size: int, stream: int) -> None:
    cupy.cuda.runtime.memsetAsync(address, value, size, stream)


def verdict_of(invoker: Invoker, compiler: Compiler, **options: Any) -> Verification:
    with Verifier(invoker.problem, invoker.device, compiler, seed=11, **options) as verifier:
        return verifier.verify(invoker, Claims())


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("direction", Direction)
def test_right_results_pass(direction: Direction, dtype: str, layout: str, device: Device, compiler: Compiler) -> None:
    invoker = naive(conv(direction, dtype, layout), device, compiler)
    for budget in (SampleBudget(), SAMPLED):
        verdict = verdict_of(invoker, compiler, budget=budget)
        assert verdict.ok, verdict.message
        assert verdict.bound_ratio is not None
        assert verdict.bound_ratio <= 1


def launched_early(solver_id: str, device: Device, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> Invoker:
    """All steps of a solution's launched with PDL, the first one, too."""
    if device.sm < 90:
        pytest.skip("kernels begin early from compute capability 9.0 on")
    monkeypatch.setattr(invoker_module, "dependent_launches", lambda steps: (True,) * len(steps))
    problem = ProblemDescription.convolution(x=(2, 64, 14, 14), w=(64, 64, 3, 3), dtype="float16", layout="NHWC")
    solver = Registry.default()[solver_id]
    return make_invoker(problem, device, solver, solver.default_configs(problem, device)[0], compiler)


def test_a_kernel_that_begins_before_its_inputs_are_whole_is_caught(
    device: Device, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = verdict_of(launched_early("ConvDirectTiled", device, compiler, monkeypatch), compiler)
    assert not verdict.ok
    assert "numeric gate" in verdict.message
    assert "inputs made by the kernel before" in verdict.message


def test_a_kernel_that_begins_early_and_waits_passes(
    device: Device, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = verdict_of(launched_early("ConvImplicitGemmWgmma", device, compiler, monkeypatch), compiler)
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("budget", [SampleBudget(), SAMPLED], ids=["whole", "sampled"])
@pytest.mark.parametrize("form", ["by_block", "by_thread", "by_tile"])
@pytest.mark.parametrize("direction", Direction)
def test_sums_agree_with_the_host(
    direction: Direction,
    form: str,
    budget: SampleBudget,
    device: Device,
    compiler: Compiler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reference, "_MANY_ELEMENTS", 1 if form == "by_thread" else 1 << 60)
    monkeypatch.setattr(reference, "_LEAST_FILLED", 0 if form == "by_tile" else 2)
    monkeypatch.setattr(reference, "_LEAST_TILES", 1)  # none of backward data
    problem = conv(direction, "float16", "NHWC")
    with Verifier(problem, device, compiler, seed=3, budget=budget) as verifier:
        assert verifier.verify(naive(problem, device, compiler), Claims()).ok
        harness: Any = verifier._harness
        for setting, sample in harness._samples.items():
            assert (sample.indices is None) == (budget is not SAMPLED)
            check_sums(harness, setting, sample)
    if budget is SAMPLED:
        exact, numeric, _ = (sample.indices for sample in harness._samples.values())
        assert not np.array_equal(exact, numeric)


def check_sums(harness: Any, setting: Setting, sample: Any) -> None:
    """What is kept of a sample is what the host finds."""
    problem = harness.problem
    with harness._memory:
        for name in problem.direction.inputs:
            harness._fill(name, setting)
        tensors = {name: downloaded(harness, problem, name) for name in problem.direction.inputs}
        found = [harness._memory.download(sample.addresses["sums"], sample.count, np.float64)]
        if sample.addresses["scales"]:
            scales = harness._memory.download(sample.addresses["scales"], 2 * sample.count, np.float32).astype(
                np.float64
            )
            found += [scales[::2], scales[1::2] ** 2]
    assert len(found) == (1 if setting.values is Values.TERNARY else 3)
    wide = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    changes: tuple[Callable[[Any], Any], ...] = (lambda t: t, np.abs, np.square)
    for column, change, tolerance in zip(found, changes, (1e-10, 2e-5, 2e-5), strict=False):
        with np.errstate(invalid="ignore"):
            wanted = reference_on_host(
                problem, **{name: change(t) for name, t in wide.items()}, indices=sample.indices
            ).reshape(-1)
        np.testing.assert_allclose(column, wanted, rtol=0 if tolerance < 1e-9 else 1e-6, atol=tolerance)
        if column is not found[0]:
            finite = np.isfinite(wanted)
            assert (column >= wanted * (1 - 1e-12))[finite].all(), "bounds are rounded up"


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("direction", Direction)
def test_a_wrong_middle_of_any_axis_is_caught_in_a_sample(
    direction: Direction, layout: str, device: Device, compiler: Compiler
) -> None:
    """Every image, channel, row, column or tap of a large output, one after another."""
    problem = ProblemDescription.convolution(
        x=(9, 64, 56, 56), w=(96, 64, 3, 3), padding=1, direction=direction, layout=layout
    )
    inner, out = naive(problem, device, compiler), direction.output
    shape, strides = problem.output.shape, problem.output.strides
    with Verifier(problem, device, compiler, budget=SampleBudget(products=1 << 20, least=1 << 10)) as verifier:
        assert verifier.verify(inner, Claims()).ok
        for axis, size in enumerate(shape):
            for coordinate in range(size):

                def spoil(at: dict[str, int], stream: int, axis: int = axis, coordinate: int = coordinate) -> None:
                    with warnings.catch_warnings(action="ignore"), cupy.cuda.ExternalStream(stream):
                        memory = cupy.cuda.UnownedMemory(at[out], problem.output.bytes, None)
                        y = cupy.ndarray(
                            shape, cupy.float32, cupy.cuda.MemoryPointer(memory, 0), tuple(4 * step for step in strides)
                        )
                        y[(*(slice(None),) * axis, coordinate)] += 1

                verdict = verifier.verify(Faulty(inner, spoil), Claims())
                assert not verdict.ok, (axis, coordinate)


def downloaded(harness: Any, problem: ProblemDescription, name: str) -> np.ndarray:
    descriptor = problem.tensor(name)
    dtype = numpy_dtype(descriptor.dtype)
    flat = harness._memory.download(harness._buffers[name].address, descriptor.size, dtype)
    return np.ndarray(descriptor.shape, dtype, flat, strides=[s * dtype.itemsize for s in descriptor.strides])


def offset(problem: ProblemDescription, index: tuple[int, ...]) -> int:
    output = problem.output
    return sum(i * s for i, s in zip(index, output.strides, strict=True)) * output.dtype.itemsize


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("direction", Direction)
def test_faults_are_caught(direction: Direction, layout: str, device: Device, compiler: Compiler) -> None:
    problem = conv(direction, layout=layout)
    out, first = direction.output, direction.inputs[0]
    place = offset(problem, (1, 2, 2, 1))
    size = problem.output.bytes
    faults: dict[str, Fault] = {
        "are wrong": lambda at, stream: set_bytes(at[out], 0, size, stream),
        "(1, 2, 2, 1): got": lambda at, stream: set_bytes(at[out] + place, 0x41, 4, stream),
        f"of {out} are unwritten or NaN, the first at (1, 2, 2, 1)": lambda at, stream: set_bytes(
            at[out] + place, 0xFF, 4, stream
        ),
        f"the guard band after {out}": lambda at, stream: set_bytes(at[out] + size, 0, 1, stream),
        f"the guard band before {first}": lambda at, stream: set_bytes(at[first] - 1, 0, 1, stream),
        "the guard band after the workspace": lambda at, stream: set_bytes(at["workspace"] + 100, 0, 1, stream),
        f"input {first}": lambda at, stream: set_bytes(at[first] + 5, 0x3F, 1, stream),
    }
    inner = naive(problem, device, compiler)
    with Verifier(problem, device, compiler) as verifier:
        for words, fault in faults.items():
            verdict = verifier.verify(Faulty(inner, fault, workspace_bytes=100), Claims())
            assert not verdict.ok, words
            assert words in verdict.message, verdict.message
            assert verifier.verify(inner, Claims()).ok


def test_a_workspace_beyond_the_device_is_a_memory_error(device: Device, compiler: Compiler) -> None:
    inner = naive(conv(), device, compiler)
    with Verifier(conv(), device, compiler) as verifier:
        greedy = Faulty(inner, lambda at, stream: None, workspace_bytes=1 << 46)
        for _ in range(2):
            with pytest.raises(MemoryError):
                verifier.verify(greedy, Claims())
        assert verifier.verify(inner, Claims()).ok
