"""The operators miofind::convolution... and `miofind.torch.convolution` on the CPU place."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as functional
from helpers.processes.waiting import LIMIT_S
from helpers.runs.fused_answers import answers_of

import miofind.torch
from miofind import Handle
from miofind.errors import InvalidArrayError, InvalidOptionError, InvalidProblemError, LaunchError
from miofind.torch.fused import calls, plans, unfused
from miofind.torch.fused.nonlinearity import Nonlinearity
from miofind.torch.fused.ops import ARGUMENTS, SHORT_OPERATORS
from miofind.torch.fused.window import Window

OPERATORS = torch.ops.miofind
ACTIVATIONS = ("none", "relu", "clamp", "leaky_relu", "silu", "gelu", "gelu_tanh", "hardswish", "sigmoid", "tanh",
               "elu", "mish")  # fmt: skip


@pytest.fixture(scope="module")
def found(cpu_handle: Handle) -> Iterator[list[str]]:
    with answers_of(cpu_handle) as ran:
        yield ran


@pytest.fixture
def ran(found: list[str]) -> list[str]:
    found.clear()
    return found


def drawn(*shapes: tuple[int, ...], dtype: Any = torch.float64, channels_last: bool = False) -> list[Any]:
    torch.manual_seed(len(shapes))
    made = [torch.randn(shape, dtype=dtype) for shape in shapes]
    return [t.to(memory_format=torch.channels_last) if channels_last and t.dim() == 4 else t for t in made]


X, W, Y = (2, 4, 5, 6), (6, 2, 3, 3), (2, 6, 5, 6)
VECTOR = (6,)


def called(x: Any, w: Any, bias: Any = None, scale: Any = None, residual: Any = None, **named: Any) -> Any:
    activation = named.pop("activation", "none")
    return OPERATORS.convolution(x, w, bias, scale, residual, activation, [1, 1], [1, 1], [1, 1], 2, **named)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_pytorch_computes(activation: str, ran: list[str]) -> None:
    channels_last = ACTIVATIONS.index(activation) % 2 > 0
    x, w, bias, residual = drawn(X, W, VECTOR, Y, dtype=torch.float32, channels_last=channels_last)
    y = called(x, w, bias, None, residual, activation=activation)
    numbers = Nonlinearity(activation=activation)
    window = Window(stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=2)
    expected = unfused.convolution(x, w, (bias, None, residual, None), window, numbers)
    assert len(ran) == 1
    assert y.stride() == expected.stride()
    torch.testing.assert_close(y, expected)


def test_scale_bias_and_a_residual_after(ran: list[str]) -> None:
    x, w, bias, scale, residual = drawn(X, W, VECTOR, VECTOR, Y)
    y = called(x, w, bias, scale, residual, activation="clamp", residual_position="after", beta=0.5, low=-1.0, high=2.0)
    plain = functional.conv2d(x, w, None, padding=1, groups=2) * scale.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)
    assert len(ran) == 1
    torch.testing.assert_close(y, functional.hardtanh(plain, -1.0, 2.0) + 0.5 * residual)


def test_a_number_for_each_channel_of_each_image(ran: list[str]) -> None:
    x, w, bias, residual, of_channels = drawn(X, W, VECTOR, Y, Y[:2])
    y = called(x, w, bias, None, residual, activation="relu", channel_bias=of_channels)
    plain = functional.conv2d(x, w, bias, padding=1, groups=2) + of_channels[..., None, None]
    assert "-e.bias.channel_bias.residual.relu" in ran[0]
    torch.testing.assert_close(y, functional.relu(plain + residual))


def test_float32_vectors_beside_half_tensors(ran: list[str]) -> None:
    x, w, residual = drawn(X, W, Y, dtype=torch.bfloat16)
    bias, scale = drawn(VECTOR, VECTOR, dtype=torch.float32)
    y = called(x, w, bias, scale.bfloat16(), residual.float(), activation="relu")
    assert y.dtype == torch.bfloat16
    assert "float32.scale.bias.residual.relu" in ran[0]
    exact = called(*(t.double() for t in (x, w, bias, scale.bfloat16(), residual)), activation="relu")
    torch.testing.assert_close(y.double(), exact, rtol=2**-6, atol=2**-6)  # a pass rounds twice


@pytest.mark.parametrize("channels_last", [None, False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_statistics(dtype: Any, has_bias: bool, channels_last: bool | None, cpu_handle: Handle) -> None:
    """Those of what was stored, in the type that products are summed in; PyTorch's operations give the same."""
    x, w, bias = drawn(X, W, VECTOR, dtype=dtype)
    wide, made = torch.promote_types(dtype, torch.float32), []
    for policy in ("estimate", "auto"):
        with answers_of(cpu_handle, policy) as ran:
            arguments = (x, w, bias if has_bias else None, [1, 1], [1, 1], [1, 1], 2)
            made.append(OPERATORS.convolution_statistics(*arguments, channels_last=channels_last))
        assert len(ran) == (policy == "estimate")
        y, total, of_squares = made[-1]
        assert y.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
        assert (total.dtype, of_squares.dtype) == (wide, wide)
        torch.testing.assert_close(total, y.to(wide).sum((0, 2, 3)))
        torch.testing.assert_close(of_squares, y.to(wide).square().sum((0, 2, 3)))
    slack = 2**-5 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(made[0][0], made[1][0], rtol=slack, atol=slack)


@pytest.mark.parametrize("policy", ["estimate", "auto"])
def test_statistics_under_autocast(policy: str, cpu_handle: Handle) -> None:
    """A bias keeps its dtype, and is added before the result is rounded."""
    x, w, bias = drawn(X, W, VECTOR, dtype=torch.float32)
    with answers_of(cpu_handle, policy) as ran, torch.autocast("cpu", torch.bfloat16):
        y, total, _ = OPERATORS.convolution_statistics(x, w, bias, [1, 1], [1, 1], [1, 1], 2)
    assert y.dtype == torch.bfloat16
    assert len(ran) == (policy == "estimate")
    assert all("float32.bias.statistics" in each for each in ran)
    exact = functional.conv2d(x.bfloat16().double(), w.bfloat16().double(), bias.double(), padding=1, groups=2)
    torch.testing.assert_close(y.double(), exact, rtol=2**-7, atol=2**-6)
    torch.testing.assert_close(total, y.float().sum((0, 2, 3)))


def test_a_miss_is_pytorchs(cpu_handle: Handle) -> None:
    x, w, bias = drawn(X, W, VECTOR)
    with answers_of(cpu_handle, "auto") as ran:
        y = called(x, w, bias, activation="silu")
    assert ran == []
    torch.testing.assert_close(y, functional.silu(functional.conv2d(x, w, bias, padding=1, groups=2)))


def test_the_report_counts_fused_calls(cpu_handle: Handle) -> None:
    x, w, bias = drawn(X, W, VECTOR)
    for policy, own in (("estimate", 2), ("auto", 0)):
        with answers_of(cpu_handle, policy):
            for _ in range(2):
                called(x, w, bias, activation="mish")
            report = miofind.torch.report()
        assert (report.calls, report.own_calls) == (2, own)
        assert [problem.epilogue.text for problem in report.missing] == ([] if own else ["bias.mish"])


def test_the_report_counts_calls_before_a_failure_as_they_ran(
    cpu_handle: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All became PyTorch's with the first that failed."""

    def fail(*arguments: Any) -> None:
        raise LaunchError("no such device any more")

    x, w = drawn(X, W)
    with answers_of(cpu_handle):
        made = [called(x, w, activation="relu") for _ in range(3)]
        monkeypatch.setattr("miofind.launch.invoker._HostInvoker.run", fail)
        made += [called(x, w, activation="relu") for _ in range(2)]
        report = miofind.torch.report()
    assert (report.own_calls, report.reasons) == (3, {"it failed: no such device any more": 2})
    torch.testing.assert_close(made[4], made[0])


def test_the_report_counts_what_miofind_has_no_problem_for(cpu_handle: Handle) -> None:
    x, w = (each.int() for each in drawn(X, W))
    with answers_of(cpu_handle):
        for _ in range(3):
            called(x, w)
        (count,) = miofind.torch.report().counts
    assert (count.calls, count.direction, count.problem, count.solver_id) == (3, "forward", None, "")
    assert count.reason == "its element type is int32"


@pytest.mark.filterwarnings("ignore:Please use the new API:UserWarning")  # of PyTorch 2.9's own flags
def test_pytorchs_switch_for_cudnn_is_miofinds_too(ran: list[str]) -> None:
    x, w = drawn(X, W)
    with torch.backends.cudnn.flags(enabled=False):
        called(x, w, activation="relu")
    assert ran == []
    called(x, w, activation="relu")
    assert len(ran) == 1


def test_empty_batches(ran: list[str]) -> None:
    x, w = torch.empty(0, 4, 5, 6), torch.ones(W)
    assert called(x, w).shape == (0, 6, 5, 6)
    dw, bias = OPERATORS.convolution_backward_weights(torch.empty(0, 6, 5, 6), x, w, *[[1, 1]] * 3, 2, torch.float32)
    assert not dw.any()
    assert not bias.any()
    y, *sums = OPERATORS.convolution_statistics(x, w, None, *[[1, 1]] * 3, 2)
    assert y.shape == (0, 6, 5, 6)
    assert not torch.cat(sums).any()
    assert ran == []


OPCHECKED: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "forward": lambda: (
        OPERATORS.convolution,
        (*drawn(X, W, VECTOR, VECTOR, Y, channels_last=True), "silu", [1, 1], [1, 1], [1, 1], 2),
    ),
    "forward-1d": lambda: (
        OPERATORS.convolution,
        (*drawn((2, 4, 9), (6, 4, 3)), None, None, None, "none", [2], [1], [1], 1),
    ),
    "forward, in short": lambda: (
        OPERATORS.short_convolution,
        calls.ShortForward(*drawn(X, W, VECTOR), None, None, "clamp", [1, 1], [1, 1], [1, 1], 2, low=0.5).arguments,
    ),
    "statistics": lambda: (
        OPERATORS.convolution_statistics,
        (*drawn(X, W, VECTOR), [1, 1], [1, 1], [1, 1], 2),
    ),
    "backward-data": lambda: (
        OPERATORS.convolution_backward_data,
        (*drawn(Y, X, W), None, drawn(X)[0], "relu", [1, 1], [1, 1], [1, 1], 2),
    ),
    "backward-weights": lambda: (
        OPERATORS.convolution_backward_weights,
        (*drawn(Y, X, W), [1, 1], [1, 1], [1, 1], 2, torch.float64),
    ),
}


@pytest.mark.parametrize("case", OPCHECKED)
def test_pytorchs_own_checks_of_operators(case: str, ran: list[str]) -> None:
    operator, arguments = OPCHECKED[case]()
    torch.library.opcheck(operator, arguments)
    assert ran


@pytest.mark.parametrize("case", [name for name in OPCHECKED if "short" not in name])
def test_short_operators_give_the_same(case: str, ran: list[str]) -> None:
    operator, arguments = OPCHECKED[case]()
    kind: Any = ARGUMENTS[operator.default]
    short = SHORT_OPERATORS[kind](*calls.SHORT[kind](*arguments).arguments)
    torch.testing.assert_close(short, operator(*arguments), rtol=0, atol=0)
    assert len(ran) == 2


def in_short(*arguments: Any, **named: Any) -> Any:
    return OPERATORS.short_convolution(*calls.ShortForward(*arguments, **named).arguments)


def test_the_same_in_short(ran: list[str]) -> None:
    x, w, bias, scale, residual, of_channels = drawn(X, W, VECTOR, VECTOR, Y, Y[:2], dtype=torch.float32)
    window = [1, 1], [1, 1], [1, 1], 2
    numbers = {"residual_position": "after", "beta": 0.5, "low": -0.25, "high": float("inf"), "channels_last": True}
    call = (x, w, bias, scale, residual, "clamp", *window)
    y = OPERATORS.convolution(*call, **numbers, channel_bias=of_channels)
    short = in_short(*call, **numbers, channel_bias=of_channels)
    torch.testing.assert_close(short, y, rtol=0, atol=0)
    assert short.stride() == y.stride()
    with torch.autocast("cpu", torch.bfloat16):
        assert in_short(*call).dtype == torch.bfloat16
    batch = torch.stack([x, 2 * x])
    mapped = torch.func.vmap(lambda x: in_short(x, w, bias, None, None, "relu", *window))(batch)
    torch.testing.assert_close(mapped[1], OPERATORS.convolution(2 * x, w, bias, None, None, "relu", *window))
    assert len(ran) == 5


def test_what_is_no_number_yet_has_no_short_form() -> None:
    with pytest.raises(TypeError, match="JSON"):
        _ = calls.ShortForward(*[None] * 5, "none", [object()], [1], [1], 1).arguments


@pytest.mark.parametrize("channels_last", [None, False, True])
@pytest.mark.parametrize("mixed", ["x", "w", "neither", "expanded"])
def test_fake_strides_are_the_real_ones(mixed: str, channels_last: bool | None, ran: list[str]) -> None:
    x, w = drawn(X, W, dtype=torch.float32)
    x = x.to(memory_format=torch.channels_last) if mixed in ("x", "both") else x
    w = w.to(memory_format=torch.channels_last) if mixed in ("w", "both") else w
    x = x[:, :1].expand(X) if mixed == "expanded" else x
    y = called(x, w, channels_last=channels_last)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = called(mode.from_tensor(x), mode.from_tensor(w), channels_last=channels_last)
    assert y.stride() == fake.stride()
    if channels_last is None:
        assert y.stride() == functional.conv2d(x, w, padding=1, groups=2).stride()
    torch.testing.assert_close(y, functional.conv2d(x, w, padding=1, groups=2))
    assert len(ran) == 1


@pytest.mark.parametrize(
    ("activation", "position"),
    [("none", "before"), ("relu", "before"), ("clamp", "after"), ("leaky_relu", "before"), ("silu", "after")],
)
def test_gradients_and_their_gradients(activation: str, position: str, ran: list[str]) -> None:
    inputs = [t.requires_grad_() for t in drawn((1, 4, 3, 2), (4, 2, 3, 3), (4,), (4,), (1, 4, 3, 2))]

    def run(x: Any, w: Any, bias: Any, scale: Any, residual: Any) -> Any:
        named: dict[str, Any] = {"activation": activation, "residual_position": position, "beta": 0.5}
        return miofind.torch.convolution(
            x, w, bias, scale=scale, residual=residual, padding=1, groups=2, low=-0.5, high=1.5, **named
        )

    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    assert sum("backward" in config for config in ran) >= 2
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)
    with torch.no_grad():
        expected = run(*inputs)
    torch.testing.assert_close(run(*inputs), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bounds", [(0.1, 0.7), (-0.1, 0.1), (0.3, 0.9), (0.0, 6.0), (-0.5, 1.5)], ids=str)
def test_clamped_elements_have_no_gradient(bounds: tuple[float, float], dtype: Any, cpu_handle: Handle) -> None:
    """A bound that the dtype rounds inwards let the gradients of all clamped elements through."""
    x, w = (each.to(dtype).requires_grad_() for each in drawn((1, 2, 4, 4), (2, 2, 3, 3)))
    bias = torch.tensor([40.0, -40.0], dtype=dtype)  # beyond both bounds everywhere
    low, high = bounds
    with answers_of(cpu_handle):
        y = miofind.torch.convolution(x, w, bias, activation="clamp", low=low, high=high)
        dx, dw = torch.autograd.grad(y.sum(), (x, w))
    assert y.detach().unique().numel() == 2
    assert not dx.any()
    assert not dw.any()


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's own, in dual_level
def test_forward_mode_derivatives(activation: str, ran: list[str]) -> None:
    x, w, bias, residual, tangent = drawn((1, 4, 3, 2), (4, 2, 3, 3), (4,), (1, 4, 3, 2), (1, 4, 3, 2))

    def fused(x: Any) -> Any:
        return miofind.torch.convolution(x, w, bias, residual=residual, padding=1, groups=2, activation=activation)

    def plain(x: Any) -> Any:
        return unfused.activated(
            functional.conv2d(x, w, bias, padding=1, groups=2) + residual, Nonlinearity(activation=activation)
        )

    fused(x)
    assert ran, "a solution answers, which has no tangents"
    for made, expected in zip(*(torch.func.jvp(run, (x,), (tangent,)) for run in (fused, plain)), strict=True):
        torch.testing.assert_close(made, expected)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.requires_grad_(), tangent)
        made = torch.autograd.forward_ad.unpack_dual(fused(dual)).tangent
        assert made is not None
        torch.testing.assert_close(made, torch.autograd.forward_ad.unpack_dual(plain(dual)).tangent)
    hessians = [torch.func.hessian(lambda x, run=run: run(x).square().sum())(x.detach()) for run in (fused, plain)]
    torch.testing.assert_close(*hessians)


def test_gradients_through_vmap(ran: list[str]) -> None:
    """What vmap gives does not tell whether gradients are wanted of it: they were zeros."""
    batch, w = drawn((3, *X), W)

    def ours(x: Any) -> Any:
        return miofind.torch.convolution(x, w, padding=1, groups=2, activation="relu").square()

    def theirs(x: Any) -> Any:
        return functional.conv2d(x, w, padding=1, groups=2).relu().square()

    gradients = [torch.func.grad(lambda x, run=run: torch.func.vmap(run)(x).sum())(batch) for run in (ours, theirs)]
    torch.testing.assert_close(*gradients)
    assert gradients[0].any()
    inputs = [batch.clone().requires_grad_() for _ in range(2)]
    for x, run in zip(inputs, (ours, theirs), strict=True):
        torch.func.vmap(run)(x).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    assert ran


def test_compiled_gradients_of_a_transform(ran: list[str]) -> None:
    x, w = drawn(X, W)

    def gradient(x: Any, w: Any) -> Any:
        def loss(x: Any) -> Any:
            return miofind.torch.convolution(x, w, padding=1, groups=2, activation="relu").square().sum()

        return torch.func.grad(loss)(x)

    compiled = torch.compile(gradient, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, w), gradient(x, w))
    assert gradient(x, w).any()


def test_complex_and_meta_tensors() -> None:
    x, w = torch.randn(1, 2, 4, 4, dtype=torch.complex64), torch.randn(3, 2, 3, 3, dtype=torch.complex64)
    torch.testing.assert_close(miofind.torch.convolution(x, w), functional.conv2d(x, w))
    given = [torch.empty(shape, device="meta", requires_grad=True) for shape in ((1, 2, 4, 4), (3, 2, 3, 3))]
    y = miofind.torch.convolution(*given, activation="relu")
    y.sum().backward()
    assert (y.shape, y.device.type) == ((1, 3, 2, 2), "meta")
    assert all(each.grad.shape == each.shape for each in given)


def test_a_backward_pass_within_autocast_keeps_the_dtype_of_its_forward(ran: list[str]) -> None:
    x, w, dy = drawn(X, W, Y, dtype=torch.float32)
    given = [x.requires_grad_(), w.requires_grad_()]
    y = miofind.torch.convolution(*given, padding=1, groups=2)
    expected = torch.autograd.grad(functional.conv2d(*given, padding=1, groups=2), given, 1e6 * dy)
    with torch.autocast("cpu", torch.float16):
        made = torch.autograd.grad(y, given, 1e6 * dy)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=10)  # in half 700 are off, or infinite
    assert len(ran) == 3


@pytest.mark.parametrize("wanted", [1, 2, 3, 4, 6, 8, 15])
def test_every_choice_of_gradients(wanted: int, ran: list[str]) -> None:
    tensors = drawn(X, W, VECTOR, Y)
    mine, pytorchs = (
        [t.clone().requires_grad_(bool(wanted >> i & 1)) for i, t in enumerate(tensors)] for _ in range(2)
    )
    miofind.torch.convolution(*mine[:3], residual=mine[3], padding=1, groups=2, activation="relu").sum().backward()
    x, w, bias, residual = pytorchs
    functional.relu(functional.conv2d(x, w, bias, padding=1, groups=2) + residual).sum().backward()
    for ours, theirs in zip(mine, pytorchs, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert sum("backward" in config for config in ran) == bool(wanted & 1) + bool(wanted & 2)


def test_autocast(ran: list[str]) -> None:
    x, w, bias = drawn(X, W, VECTOR, dtype=torch.float32)
    w.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = miofind.torch.convolution(x, w, bias, padding=1, groups=2, activation="relu")
        direct = called(x, w.detach(), bias, activation="relu")
    y.sum().backward()
    assert y.dtype == direct.dtype == torch.bfloat16
    assert w.grad is not None
    assert w.grad.dtype == torch.float32
    torch.testing.assert_close(y, direct)
    assert len(ran) == 3


def test_gradients_of_each_sample(ran: list[str]) -> None:
    batch, w, bias = drawn((3, *X), W, VECTOR)

    def loss(x: Any, w: Any, bias: Any) -> Any:
        return miofind.torch.convolution(x, w, bias, padding=1, groups=2, activation="relu").square().sum()

    gradient = torch.func.grad(loss, argnums=(0, 1, 2))
    together = torch.func.vmap(gradient, in_dims=(0, None, None))(batch, w, bias)
    alone = [gradient(x, w, bias) for x in batch]
    for made, each in zip(together, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(made, torch.stack(each))
    assert any("-n6-" in config for config in ran), "images of all samples in one run"


def test_a_batch_of_weights(ran: list[str]) -> None:
    x, weights, residuals = drawn(X, (3, *W), (*Y[:1], 3, *Y[1:]))
    made = torch.func.vmap(
        lambda w, residual: miofind.torch.convolution(x, w, residual=residual, padding=1, groups=2), in_dims=(0, 1)
    )(weights, residuals)
    expected = [functional.conv2d(x, weights[i], padding=1, groups=2) + residuals[:, i] for i in range(3)]
    torch.testing.assert_close(made, torch.stack(expected))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # of Dynamo's own making
def test_traced_with_its_backward() -> None:
    x, w, bias = (t.requires_grad_() for t in drawn(X, W, VECTOR))

    def step(x: Any, w: Any, bias: Any) -> Any:
        return miofind.torch.convolution(x, w, bias, padding=1, groups=2, activation="relu").sum()

    gradients = torch.autograd.grad(step(x, w, bias), (x, w, bias))
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for made, expected in zip(torch.autograd.grad(compiled(x, w, bias), (x, w, bias)), gradients, strict=True):
        torch.testing.assert_close(made, expected)


@pytest.mark.parametrize(
    ("named", "error", "told"),
    [
        ({"activation": "relo"}, InvalidProblemError, "relo"),
        ({"residual_position": "none"}, InvalidOptionError, "before or after"),
        ({"beta": float("nan")}, InvalidOptionError, "beta"),
        ({"padding": "same", "stride": 2}, InvalidOptionError, "same"),
        ({"residual": torch.ones(1)}, RuntimeError, "residual"),
        ({"residual": [2, 6, 5, 5]}, InvalidArrayError, r"residual=\[2, 6, 5, 5\] must be a tensor"),
        ({"groups": 1}, RuntimeError, "groups=1"),
        ({"stride": 0}, RuntimeError, "stride"),
        ({"bias": torch.ones(6, dtype=torch.int64)}, RuntimeError, "bias and scale"),
    ],
)
def test_what_is_refused(named: dict[str, Any], error: type[Exception], told: str) -> None:
    x, w = drawn(X, W)
    with pytest.raises(error, match=told):
        miofind.torch.convolution(x, w, **{"groups": 2, **named})


def test_numbers_of_other_counts_are_refused_after_a_call_of_the_same_numbers(ran: list[str]) -> None:
    """In one row they look like that call's, whose plan they were given."""
    x, w = drawn((1, 2, 5, 5), (2, 2, 3, 3))

    def run(*window: list[int]) -> Any:
        return torch.ops.miofind.convolution(x, w, None, None, None, "none", *window, 1)

    run([1, 1], [1, 1], [1, 1])
    assert ran
    with pytest.raises(RuntimeError, match=r"a number for each spatial dimension.*'padding': \[1\]"):
        run([1, 1, 1], [1], [1, 1])


@pytest.mark.parametrize("name", ["w", "bias", "residual"])
def test_tensors_of_several_devices_are_refused(name: str, cpu_handle: Handle) -> None:
    x, w, bias, residual = drawn(X, W, VECTOR, Y, dtype=torch.float32)
    given = {"w": w, "bias": bias, "residual": residual}
    given[name] = given[name].to("meta")
    call = calls.Forward(x, given["w"], given["bias"], None, given["residual"], "none", [1, 1], [1, 1], [1, 1], 2)
    with answers_of(cpu_handle), pytest.raises(RuntimeError, match=f"x is on cpu, {name} on meta"):
        plans.planned(call)


@pytest.mark.parametrize("name", ["dy", "residual", "saved"])
def test_gradients_of_several_dtypes_are_refused(name: str, ran: list[str]) -> None:
    x, w, dy = drawn(X, W, Y, dtype=torch.bfloat16)
    given = {"dy": dy, "residual": x, "saved": x}
    given[name] = given[name].float()
    with pytest.raises(RuntimeError, match=rf"x has torch\.bfloat16 and {name} torch\.float32"):
        OPERATORS.convolution_backward_data(
            given["dy"], x, w, given["residual"], given["saved"], "relu", [1, 1], [1, 1], [1, 1], 2
        )
    assert not ran


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_forms_of_pytorchs_functions(padding: str) -> None:
    x, w = drawn(X[1:], W)
    y = miofind.torch.convolution(x, w, padding=padding, groups=2, dilation=(1, 2), activation="relu6")
    expected = functional.relu6(functional.conv2d(x, w, padding=padding, groups=2, dilation=(1, 2)))
    torch.testing.assert_close(y, expected)


def test_a_first_result_loads_nothing_that_traces_symbols() -> None:
    """`torch._check` loads sympy to ask of a condition: a third of a second before a new process's first result."""
    script = (
        "import sys, torch, miofind.torch as m; from torch import nn;"
        "net = m.fuse(nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU()).eval());"
        "m.enable('estimate', devices='cpu'); net(torch.zeros(1, 4, 6, 6));"
        "sys.exit(', '.join({'sympy', 'torch.fx.experimental.symbolic_shapes'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert (done.returncode, done.stderr) == (0, "")
