"""What PyTorch computes with miofind's kernels is what it computes with its own, strides included."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.func import grad, jvp, vmap
from torch.nn.functional import conv2d, pad
from torch_layer.drawn_calls import DrawnCall, drawn_calls, tensors_of

from miofind import Handle, find_solutions
from miofind.torch import Override, use
from miofind.torch.override import plans

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _integers(tensor: Any) -> Any:
    """Small integers, whose products and their sums are exact in every element type."""
    return tensor.copy_(torch.randint(-1, 2, tensor.shape))


def _is_ours(override: Override) -> bool:
    return 0 < override.report().calls == override.report().own_calls


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn_calls(least_batch=1), st.sampled_from(_DTYPES), st.booleans(), st.booleans())
def test_every_call_gives_pytorchs_numbers_and_strides(
    cpu_handle: Handle, call: DrawnCall, dtype: Any, with_bias: bool, expanded: bool
) -> None:
    x, w = map(_integers, tensors_of(call, "cpu", dtype))
    channels = call.w_shape[1] * call.groups if call.transposed else call.w_shape[0]
    bias = _integers(torch.empty(channels, dtype=dtype)) if with_bias else None
    meta = (None if each is None else each.to("meta") for each in (x, w, bias))
    y_shape = torch.convolution(*meta, *call.geometry).shape
    dy = torch.ones((), dtype=dtype).expand(y_shape) if expanded else _integers(torch.empty(y_shape, dtype=dtype))

    def compute(*tensors: Any) -> tuple[Any, ...]:
        dy, x, w, bias = tensors
        y = torch.ops.aten.convolution(x, w, bias, *call.geometry)
        sizes = [channels] if with_bias else None
        return y, *torch.ops.aten.convolution_backward(dy, x, w, sizes, *call.geometry, [True, True, with_bias])

    given = (dy, x, w, bias)
    # In float64: PyTorch 2.13's own kernels of 16 bits read beyond some tensors on CPUs with AMX, and may crash there.
    native = compute(*(None if each is None else each.double() for each in given))
    with use("estimate", handle=cpu_handle, devices="cpu") as override:
        ours = compute(*given)
        assert _is_ours(override)
    with FakeTensorMode(allow_non_fake_inputs=True):
        predicted = compute(*given)
    for got, wanted, fake in zip(ours, native, predicted, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None:
            assert got.dtype == dtype
            assert torch.equal(got, wanted.to(dtype))
            assert got.stride() == fake.stride()


def _double_backward(x: Any, w: Any) -> Any:
    y = conv2d(x, w, padding=1)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return torch.autograd.grad(dx.square().sum(), (x, w))


def _per_sample_gradients(x: Any, w: Any) -> Any:
    return vmap(grad(lambda w, x: conv2d(x[None], w).square().sum()), in_dims=(None, 0))(w, x)


_TRANSFORMS: dict[str, Callable[[Any, Any], Any]] = {
    "double backward": _double_backward,
    "per-sample gradients": _per_sample_gradients,
    "vmap over weights": lambda x, w: vmap(lambda w: conv2d(x, w))(torch.stack([w, -w])),
    "jvp": lambda x, w: jvp(conv2d, (x, w), (torch.ones_like(x), torch.ones_like(w))),
    "unbatched": lambda x, w: conv2d(x[0], w),
    "padding same": lambda x, w: conv2d(x, w, padding="same", dilation=2),
    "circular padding": lambda x, w: conv2d(pad(x, (1, 1, 1, 1), mode="circular"), w),
    "complex": lambda x, w: conv2d(torch.complex(x, -x), torch.complex(w, w)),
    "strided input": lambda x, w: conv2d(x[..., ::2, :], w),
    "negated view": lambda x, w: conv2d(torch.complex(x, x).conj().imag, w),
    "inference mode": lambda x, w: torch.inference_mode()(conv2d)(x, w),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # by PyTorch's own jvp
@pytest.mark.parametrize("name", _TRANSFORMS)
def test_transforms_reach_miofind_and_agree(override_on_cpu: Override, name: str) -> None:
    x, w = _integers(torch.empty(3, 4, 9, 9)), _integers(torch.empty(4, 4, 3, 3))
    x, w = x.requires_grad_(), w.requires_grad_()
    ours = _TRANSFORMS[name](x, w)
    assert _is_ours(override_on_cpu)
    with use("record", devices="cpu"):
        native = _TRANSFORMS[name](x, w)
    for got, wanted in zip(_flat(ours), _flat(native), strict=True):
        assert torch.equal(got, wanted)


def _flat(values: Any) -> list[Any]:
    return [values] if isinstance(values, torch.Tensor) else [*values]


@pytest.mark.parametrize("mask", [*itertools.product([False, True], repeat=3)])
def test_just_the_gradients_that_are_asked_for_are_computed(override_on_cpu: Override, mask: tuple[bool, ...]) -> None:
    x, w, b = torch.randn(2, 4, 6, 6), torch.randn(8, 4, 3, 3), torch.randn(8)
    wanted = [tensor.requires_grad_() for tensor, is_wanted in zip((x, w, b), mask, strict=True) if is_wanted]
    y = conv2d(x, w, b)
    assert y.requires_grad is bool(wanted)
    if wanted:
        y.sum().backward()
    assert tuple(tensor.grad is not None for tensor in (x, w, b)) == mask
    backward = [part.computed for plan in override_on_cpu.plans[1:] for part in plan.parts]
    assert backward == [name for name, is_wanted in zip(("dx", "dw"), mask, strict=False) if is_wanted]


def test_one_gradient_may_be_pytorchs(cpu_handle: Handle) -> None:
    x, w, b = (_integers(torch.empty(shape)).requires_grad_() for shape in ((2, 4, 6, 6), (8, 4, 3, 3), (8,)))
    native = torch.autograd.grad(conv2d(x, w, b).sum(), (x, w, b))
    for direction in ("backward_data", "backward_weights"):
        with use("estimate", handle=cpu_handle, devices="cpu", directions=direction) as override:
            ours = torch.autograd.grad(conv2d(x, w, b).sum(), (x, w, b))
            assert [count.direction for count in override.report().counts if count.solver_id] == [direction]
        assert all(map(torch.equal, ours, native))


def test_autocast_arrives_in_its_element_type(override_on_cpu: Override) -> None:
    layer = torch.nn.Conv2d(4, 8, 3)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.randn(2, 4, 6, 6))
        y.float().sum().backward()
    assert (y.dtype, layer.weight.grad.dtype) == (torch.bfloat16, torch.float32)
    assert {str(count.problem.x.dtype) for count in override_on_cpu.report().counts} == {"bfloat16"}
    assert _is_ours(override_on_cpu)


def test_empty_batches_are_empty(override_on_cpu: Override) -> None:
    x = torch.empty(0, 4, 6, 6, requires_grad=True)
    y = conv2d(x, torch.randn(8, 4, 3, 3))
    y.sum().backward()
    assert (y.shape, x.grad.shape) == ((0, 8, 4, 4), x.shape)


@pytest.mark.parametrize("algorithms", [False, True])
def test_determinism_is_asked_of_finds(
    override_on_cpu: Override, algorithms: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compute() -> None:
        conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 3, 3))

    def asked(problem: Any, *, options: Any, handle: Any) -> Any:
        deterministic.append(options.deterministic)
        return find_solutions(problem, options=options, handle=handle)

    deterministic: list[bool] = []
    monkeypatch.setattr(plans, "find_solutions", asked)
    compute()
    torch.use_deterministic_algorithms(algorithms)
    try:
        with torch.backends.cudnn.flags(enabled=True, deterministic=not algorithms):
            compute()
    finally:
        torch.use_deterministic_algorithms(False)
    compute()
    assert deterministic == [False, True]


def test_a_bias_is_part_of_what_is_found(tmp_path: Path) -> None:
    """With an answer to the problem with its bias no kernel of PyTorch adds it, or sums its gradient up."""
    x, w, b = (_integers(torch.empty(shape)).requires_grad_() for shape in ((2, 4, 6, 6), (8, 4, 3, 3), (8,)))
    native = [*torch.autograd.grad(conv2d(x, w, b).sum(), (x, w, b)), conv2d(x, w, b)]
    handle = Handle("cpu", database=tmp_path / "finddb.db")
    with handle, use("find", handle=handle, devices="cpu", only="ConvCpuDirect") as override:
        y = conv2d(x, w, b)
        ours = [*torch.autograd.grad(y.sum(), (x, w, b)), y]
        torch.autograd.grad(conv2d(x, w, b).sum(), (x, w))
        epilogues = [str(part.problem.epilogue.text) for plan in override.plans for part in plan.parts]
        assert _is_ours(override)
    assert epilogues == ["bias", "", "bias_gradient", "", ""]
    assert all(map(torch.equal, ours, native))


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_agree_with_differences(override_on_cpu: Override, transposed: bool) -> None:
    x, w, b = (torch.randn(shape).double().requires_grad_() for shape in ((1, 2, 4, 4), (2, 2, 2, 2), (2,)))

    def compute(x: Any, w: Any, b: Any) -> Any:
        return torch.convolution(x, w, b, [2, 1], [1, 0], [1, 2], transposed, [0, 0], 1)

    assert torch.autograd.gradcheck(compute, (x, w, b))
    assert torch.autograd.gradgradcheck(compute, (x, w, b))
    assert _is_ours(override_on_cpu)
