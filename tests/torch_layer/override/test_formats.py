"""The strides of outputs and gradients are those that PyTorch's fake kernels predict."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch_layer.drawn_calls import DrawnCall, drawn_calls, tensors_of

from miofind.core.tensor import Layout
from miofind.torch.override import formats
from miofind.torch.override.calls import ConvolutionCall, TensorForm, Unserved

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _predicted(call: DrawnCall, dtype: Any) -> list[TensorForm]:
    """Output, gradient of the input and gradient of the weights, as PyTorch's fake kernels have them."""
    with FakeTensorMode():
        x, w = tensors_of(call, "cpu", dtype)
        y = torch.ops.aten.convolution.default(x, w, None, *call.geometry)
        grads = torch.ops.aten.convolution_backward.default(
            torch.empty(y.shape, dtype=dtype), x, w, None, *call.geometry, [True, True, False]
        )
        return [TensorForm.of(tensor) for tensor in (y, *grads[:2])]


@settings(max_examples=150)
@given(drawn_calls(least_batch=1), st.sampled_from(_DTYPES), st.booleans())
def test_strides_are_predicted(call: DrawnCall, dtype: Any, fake: bool) -> None:
    predicted = _predicted(call, dtype)
    with FakeTensorMode() if fake else contextlib.nullcontext():
        x, w = tensors_of(call, "cpu", dtype)
    ours = ConvolutionCall.of(x, w, None, *call.geometry)
    for shape, form in zip((ours.output_shape, call.x_shape, call.w_shape), predicted, strict=True):
        assert (shape, formats.strides(shape, ours.backend_format)) == (form.shape, form.strides)


@pytest.mark.parametrize("channels_last_x", [False, True])
@pytest.mark.parametrize("channels_last_w", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_a_gpu_three_dimensions_have_the_order_that_cudnn_gives(
    channels_last_x: bool, channels_last_w: bool, dtype: Any
) -> None:
    x = torch.empty(2, 4, 5, 6, 7, device="meta", dtype=dtype)
    w = torch.empty(8, 4, 3, 3, 3, device="meta", dtype=dtype)
    if channels_last_x:
        x = x.to(memory_format=torch.channels_last_3d)
    if channels_last_w:
        w = w.to(memory_format=torch.channels_last_3d)
    call = ConvolutionCall.of(x, w, None, [1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1)
    is_last = (channels_last_x or channels_last_w) and dtype is torch.float32
    assert call.backend_format is (Layout.NDHWC if is_last else Layout.NCDHW)


@given(drawn_calls(least_batch=1), st.booleans())
def test_dense_tensors_are_packed_in_the_memory_order_asked_for(call: DrawnCall, channels_last: bool) -> None:
    layout = Layout.of(len(call.stride), channels_last=channels_last)
    x, _ = tensors_of(call, "cpu")
    x.copy_(torch.randn(call.x_shape))
    expanded = x[:1].expand(call.x_shape)
    for tensor in (x, expanded):
        made = formats.dense(tensor, layout)
        assert formats.is_dense(made, layout)
        assert torch.equal(made, tensor)
        steps = zip(made.shape, made.stride(), formats.strides(tuple(made.shape), layout), strict=True)
        assert all(size == 1 or given == wanted for size, given, wanted in steps)


SPREAD: dict[str, tuple[tuple[int, ...], tuple[int, ...], bool, bool]] = {
    "packed": ((2, 3, 4, 5), (60, 20, 5, 1), True, False),
    "packed channels last": ((2, 3, 4, 5), (60, 1, 15, 3), False, True),
    "some channels": ((2, 3, 4, 5), (140, 20, 5, 1), True, False),
    "some channels, last": ((2, 3, 4, 5), (140, 1, 35, 7), False, True),
    "one place": ((2, 3, 1, 1), (3, 1, 1, 1), True, True),
    "expanded": ((2, 3, 4, 5), (0, 20, 5, 1), False, False),
    "overlapping": ((2, 3, 4, 5), (60, 20, 4, 1), False, False),
    "transposed": ((2, 3, 4, 5), (60, 20, 1, 4), False, False),
}


@pytest.mark.parametrize(("shape", "strides", "first", "last"), SPREAD.values(), ids=SPREAD)
def test_tensors_with_gaps_lie_in_an_order(
    shape: tuple[int, ...], strides: tuple[int, ...], first: bool, last: bool
) -> None:
    tensor = torch.empty_strided(shape, strides, device="meta")
    orders = (Layout.of(2, channels_last=is_last) for is_last in (False, True))
    assert [formats.is_spread(tensor, layout) for layout in orders] == [first, last]


def test_a_pytorch_without_the_private_functions_runs_its_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_select_conv_backend")
    x = torch.empty(1, 1, 3, 3)
    with pytest.raises(Unserved, match=r"no torch\._C\._select_conv_backend"):
        ConvolutionCall.of(x, x, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
