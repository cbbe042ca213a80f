"""Verification of fused convolutions on a GPU: the epilogue's kernel against the host, right results and mutants."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from helpers.runs.device_buffers import Buffer
from helpers.runs.fake_invokers import compute
from mutants import cuda, host, host_epilogue
from mutants.host import Call

from miofind.compiler import Compiler
from miofind.core.epilogue import DERIVATIVES, Activation, EpilogueParameters
from miofind.core.operand import Operand
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.launch.device_kernels import DeviceKernels
from miofind.launch.invoker import Invoker, make_invoker
from miofind.reference.convolution import numpy_dtype, round_once
from miofind.solver.registry import Registry
from miofind.solver.steps import RUN_PARAMETERS, Config
from miofind.verify.claims import Claims, claims_of
from miofind.verify.epilogue_bounds import BareSums, EpilogueStandard, fused_results
from miofind.verify.epilogue_cuda import EpilogueTrial, epilogue_kernel
from miofind.verify.ranges import UNSCALED, Powers
from miofind.verify.sampling import SampleBudget
from miofind.verify.verifier import Verifier

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

FORMS = ("{}", "scale.bias.{}", "scale.bias.channel_bias.residual.{}", "bias.{}.residual", "float32.bias.{}")
NUMBERS = EpilogueParameters(alpha=-0.75, beta=1.5, low=-0.5, high=1.25, slope=0.125)
SAMPLED = SampleBudget(products=1 << 18, least=500, most=2000)


def fused(form: str, activation: Activation, dtype: str, layout: str = "NHWC") -> ProblemDescription:
    words = [w for w in form.format(activation.value).split(".") if w != "none"]
    if dtype in ("float32", "float64") and words and words[0] == "float32":
        words = words[1:]
    return ProblemDescription.convolution(
        x=(3, 12, 9, 8), w=(18, 4, 3, 3), groups=3, padding=1, dtype=dtype, layout=layout, epilogue=".".join(words)
    )


def uploaded(values: np.ndarray) -> Buffer:
    buffer = Buffer(values.nbytes)
    buffer.write(values)
    return buffer


def random_operand(operand: Operand, random: np.random.Generator) -> np.ndarray:
    """In memory order, in the operand's dtype."""
    values = random.standard_normal(operand.tensor.size)
    if operand.name == "saved":
        values[::2] = np.rint(8 * values[::2]) / 4
        values[1:42:2] = np.tile([math.inf, -math.inf, math.nan], 7)
    return round_once(values, operand.tensor.dtype).reshape(-1)


def logical(operand: Operand, flat: np.ndarray) -> np.ndarray:
    """An operand of the shape that users' arrays have, from its memory."""
    size = flat.dtype.itemsize
    strides = [stride * size for stride in operand.tensor.strides]
    return np.ndarray(operand.tensor.shape, flat.dtype, flat, strides=strides).reshape(operand.shape)


def bare_sums(random: np.random.Generator, count: int, *, exact: bool) -> BareSums:
    sums = random.integers(-40, 41, count).astype(np.float64) if exact else 3 * random.standard_normal(count)
    if not exact:
        sums[random.integers(0, count, 60)] *= 2.0**40
        sums[random.integers(0, count, 12)] = np.tile([math.inf, -math.inf, math.nan, 0.0], 3)
    magnitudes = np.abs(sums) if exact else (np.abs(sums) + 1).astype(np.float32).astype(np.float64)
    roots = np.zeros(count, np.float32) if exact else np.abs(random.standard_normal(count)).astype(np.float32)
    return BareSums(sums=sums, magnitudes=magnitudes, squares=roots.astype(np.float64) ** 2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("activation", Activation)
def test_the_kernel_agrees_with_the_host(
    activation: Activation, dtype: str, form: str, device: Device, compiler: Compiler
) -> None:
    random = np.random.default_rng([list(Activation).index(activation), FORMS.index(form)])
    problem = fused(form, activation, dtype, layout=str(random.choice(["NHWC", "NCHW"])))
    for factor, rounds_twice in ((None, False), (None, True), (1e-3, False), (1e-3, True)):
        if problem.epilogue:
            check(problem, EpilogueStandard.of(problem, factor, rounds_twice=rounds_twice), device, compiler)


@pytest.mark.parametrize("form", ["d{}", "residual.d{}"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_derivatives_of_the_kernel_agree_with_the_host(
    derivative: Activation, dtype: str, form: str, device: Device, compiler: Compiler
) -> None:
    problem = gradient(form.format(derivative), dtype)
    for factor, rounds_twice in ((None, False), (None, True), (1e-3, False), (1e-3, True)):
        check(problem, EpilogueStandard.of(problem, factor, rounds_twice=rounds_twice), device, compiler)


@pytest.mark.parametrize("form", ["d{}", "residual.d{}"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_derivatives_of_the_header_keep_the_declared_errors(
    derivative: Activation, dtype: str, form: str, device: Device, compiler: Compiler
) -> None:
    problem = gradient(form.format(derivative), dtype)
    solver = Registry.default()["ConvDirectNaive+Pointwise"]
    config = solver.default_configs(problem, device)[0]
    invoker = make_invoker(problem, device, solver, config, compiler)
    with Verifier(problem, device, compiler) as verifier:
        verdict = verifier.verify(invoker, claims_of(solver, problem, device, config, compiler))
    assert verdict.ok, verdict.message


def gradient(epilogue: str, dtype: str) -> ProblemDescription:
    """Backward data of a stride that some pixels meet no tap of."""
    return ProblemDescription.convolution(
        x=(3, 12, 9, 8),
        w=(18, 12, 1, 1),
        stride=2,
        direction="backward_data",
        dtype=dtype,
        layout="NHWC" if "residual" in epilogue else "NCHW",
        epilogue=epilogue,
    )


def check(problem: ProblemDescription, standard: EpilogueStandard, device: Device, compiler: Compiler) -> None:
    random = np.random.default_rng(5)
    exact = standard.factor == 0
    size = problem.output.size
    indices = None if exact else np.sort(random.choice(size, 500, replace=False)).astype(np.int64)
    count = size if indices is None else indices.size
    bare = bare_sums(random, count, exact=exact)
    operands = {o.name: random_operand(o, random) for o in problem.operands if o.name in problem.epilogue.operands}
    powers = UNSCALED if exact else Powers(first=(1, -2), second=(-3, 4))
    trial = EpilogueTrial(count=count, powers=powers, parameters=NUMBERS, standard=standard)
    results, bounds = launched(problem, trial, bare, {"indices": indices, **operands}, device, compiler)

    shaped = {o.name: logical(o, operands[o.name]) for o in problem.operands if o.name in operands}
    wanted = fused_results(problem, scaled(problem, bare, powers, indices), shaped, NUMBERS, standard, indices)
    np.testing.assert_allclose(results, wanted.wanted, rtol=1e-11, atol=1e-290)
    finite = np.isfinite(wanted.wanted) & np.isfinite(wanted.magnitudes)
    np.testing.assert_allclose(bounds[0::2][finite], wanted.magnitudes[finite], rtol=1e-6)
    arithmetic = bounds[1::2][finite].astype(np.float64)
    np.testing.assert_allclose(arithmetic, wanted.arithmetic[finite], rtol=1e-6, atol=1e-44)
    assert (arithmetic >= wanted.arithmetic[finite] * (1 - 1e-12)).all(), "bounds are rounded up"


def scaled(problem: ProblemDescription, bare: BareSums, powers: Powers, indices: Any) -> BareSums:
    """The sums of inputs that powers of two multiply."""
    flat = np.arange(problem.output.size) if indices is None else indices
    image, channel, *_ = np.unravel_index(flat, problem.output.shape)
    even_odd = [np.array(pair) for pair in powers.pairs]
    along = even_odd[0][image % 2] + even_odd[1][channel % 2]
    return BareSums(
        sums=np.ldexp(bare.sums, along),
        magnitudes=np.ldexp(bare.magnitudes, along),
        squares=np.ldexp(bare.squares, 2 * along),
    )


def launched(
    problem: ProblemDescription,
    trial: EpilogueTrial,
    bare: BareSums,
    given: dict[str, Any],
    device: Device,
    compiler: Compiler,
) -> tuple[np.ndarray, np.ndarray]:
    """The kernel's results and bounds; its buffers lie between guard bands."""
    kernel, arguments = epilogue_kernel(problem, trial)
    inputs = {name: uploaded(values) for name, values in given.items() if values is not None}
    inputs["sums"] = uploaded(bare.sums)
    if trial.standard.factor:
        scales = np.stack([bare.magnitudes, np.sqrt(bare.squares)], axis=1).astype(np.float32)
        inputs["scales"] = uploaded(scales)
    made = {"results": Buffer(8 * trial.count), "bounds": Buffer(8 * trial.count)}
    names = ("indices", "sums", "scales", "scale", "bias", "channel_bias", "residual", "saved")
    addresses = dict.fromkeys(names, 0) | {name: buffer.address for name, buffer in (inputs | made).items()}
    stream = cupy.cuda.get_current_stream()
    DeviceKernels(device, compiler).bind(kernel, arguments, addresses, stream.ptr)()
    stream.synchronize()
    return made["results"].read(np.dtype(np.float64)), made["bounds"].read(np.dtype(np.float32))


class Computed(Invoker):
    """Computes on the host what a run is given on the device: a change of `mutants.host`, or the right results."""

    def __init__(self, problem: ProblemDescription, device: Device, change: Any = None) -> None:
        self.problem, self.device = problem, device
        self.solver_id, self.config = "Computed", Config()
        self.workspace_bytes, self.alignment_bytes = 0, 4  # of a float32 bias
        self.deterministic = True
        self._change = change
        self._state: dict[str, Any] = {}

    def run(self, bases: tuple[Any, ...], stream: int) -> None:
        cupy.cuda.runtime.streamSynchronize(stream)
        *addresses, parameters, _ = bases
        flat = {
            operand.name: self._read(operand, address)
            for operand, address in zip(self.problem.operands, addresses, strict=True)
        }
        given: dict[str, Any] = {o.name: logical(o, flat[o.name]) for o in self.problem.operands}
        given[RUN_PARAMETERS] = parameters
        with np.errstate(all="ignore"):
            if self._change is None:
                output = self.problem.output.dtype
                given[self.problem.direction.output][...] = round_once(compute(self.problem, given), output)
            else:
                self._change(Call(self.problem, given, None, self._state))
        for operand, address in zip(self.problem.operands, addresses, strict=True):
            array = flat[operand.name]
            cupy.cuda.runtime.memcpy(address, array.ctypes.data, array.nbytes, cupy.cuda.runtime.memcpyHostToDevice)
        cupy.cuda.runtime.streamSynchronize(0)  # the run's stream does not wait for these copies

    def _read(self, operand: Operand, address: int) -> np.ndarray:
        flat = np.empty(operand.tensor.size, numpy_dtype(operand.tensor.dtype))
        cupy.cuda.runtime.memcpy(flat.ctypes.data, address, flat.nbytes, cupy.cuda.runtime.memcpyDeviceToHost)
        return flat


@pytest.mark.parametrize("budget", [SampleBudget(), SAMPLED], ids=["whole", "sampled"])
@pytest.mark.parametrize(("dtype", "form"), [("float16", FORMS[2]), ("float32", FORMS[3]), ("bfloat16", FORMS[4])])
@pytest.mark.parametrize("activation", Activation)
def test_right_results_pass(
    activation: Activation, dtype: str, form: str, budget: SampleBudget, device: Device, compiler: Compiler
) -> None:
    problem = fused(form, activation, dtype)
    invoker = Computed(problem, device)
    with Verifier(problem, device, compiler, seed=11, budget=budget) as verifier:
        verdict = verifier.verify(invoker, Claims())
        assert verdict.ok, verdict.message
        assert verifier.repeat(invoker, Claims(), verdict.fingerprint) == ""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("activation", Activation)
def test_the_header_of_kernels_keeps_the_declared_errors(
    activation: Activation, dtype: str, form: str, device: Device, compiler: Compiler
) -> None:
    problem = fused(form, activation, dtype, layout="NCHW" if form == FORMS[1] else "NHWC")
    if not problem.epilogue:
        pytest.skip("nothing is fused")
    config = cuda.RIGHT.default_configs(problem, device)[0]
    invoker = make_invoker(problem, device, cuda.RIGHT, config, compiler)
    with Verifier(problem, device, compiler) as verifier:
        verdict = verifier.verify(invoker, Claims())
    assert verdict.ok, verdict.message


@pytest.mark.parametrize("name", [name for name in host.MUTANTS if hasattr(host_epilogue, name)])
def test_mutants_are_refused(name: str, device: Device, compiler: Compiler) -> None:
    problem = host.SOLVERS[name].mutant.problem
    invoker = Computed(problem, device, getattr(host_epilogue, name))
    with Verifier(problem, device, compiler) as verifier:
        verdict = verifier.verify(invoker, Claims())
        message = verdict.message or verifier.repeat(invoker, Claims(), verdict.fingerprint)
    assert "gate" in message


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_results_of_rounded_sums_pass_where_that_is_said(dtype: str, device: Device, compiler: Compiler) -> None:
    problem = ProblemDescription.convolution(
        x=(2, 64, 9, 9), w=(8, 64, 3, 3), padding=1, dtype=dtype, layout="NHWC", epilogue="bias.residual.relu"
    )
    invoker = Computed(problem, device, host_epilogue.rounds_twice_unsaid)
    with Verifier(problem, device, compiler) as verifier:
        assert verifier.verify(invoker, Claims(rounds_twice=True)).ok
        assert not verifier.verify(invoker, Claims()).ok


def test_an_operands_buffer_and_its_guard_bands_are_watched(device: Device, compiler: Compiler) -> None:
    problem = fused(FORMS[2], Activation.RELU, "float16")

    class Writing(Computed):
        def run(self, bases: tuple[Any, ...], stream: int) -> None:
            super().run(bases, stream)
            index = [operand.name for operand in problem.operands].index("bias")
            cupy.cuda.runtime.memset(bases[index] + self.at, 0x11, 1)
            cupy.cuda.runtime.streamSynchronize(0)

    with Verifier(problem, device, compiler) as verifier:
        for at, told in ((0, "input bias"), (-1, "the guard band before bias"), (36, "the guard band after bias")):
            invoker = Writing(problem, device)
            invoker.at = at  # type: ignore[attr-defined]
            assert told in verifier.verify(invoker, Claims()).message
