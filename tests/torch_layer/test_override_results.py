"""What PyTorch computes with miofind's kernels is what it computes with its own, strides included."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch_layer.drawn_calls import DrawnCall, drawn_calls, tensors_of

from miofind import Handle
from miofind.torch import Override, use

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _integers(tensor: Any) -> Any:
    """Small integers, whose products and their sums are exact in every element type."""
    return tensor.copy_(torch.randint(-1, 2, tensor.shape))


def _is_ours(override: Override) -> bool:
    return bool(override.plans) and all(plan.calls and not plan.native_calls for plan in override.plans)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn_calls(least_batch=1), st.sampled_from(_DTYPES), st.booleans(), st.booleans())
def test_every_call_gives_pytorchs_numbers_and_strides(
    cpu_handle: Handle, call: DrawnCall, dtype: Any, with_bias: bool, expanded: bool
) -> None:
    x, w = map(_integers, tensors_of(call, "cpu", dtype))
    channels = call.w_shape[1] * call.groups if call.transposed else call.w_shape[0]
    bias = _integers(torch.empty(channels, dtype=dtype)) if with_bias else None
    y_shape = torch.convolution(x, w, bias, *call.geometry).shape
    dy = torch.ones((), dtype=dtype).expand(y_shape) if expanded else _integers(torch.empty(y_shape, dtype=dtype))

    def compute() -> tuple[Any, ...]:
        y = torch.ops.aten.convolution(x, w, bias, *call.geometry)
        sizes = [channels] if with_bias else None
        return y, *torch.ops.aten.convolution_backward(dy, x, w, sizes, *call.geometry, [True, True, with_bias])

    native = compute()
    with use("estimate", handle=cpu_handle, devices="cpu") as override:
        ours = compute()
        assert _is_ours(override)
    with FakeTensorMode(allow_non_fake_inputs=True):
        predicted = compute()
    for got, wanted, fake in zip(ours, native, predicted, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None:
            assert torch.equal(got, wanted)
            assert got.stride() == fake.stride()
