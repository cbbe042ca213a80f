"""The problems of a convolution call: their numbers are PyTorch's."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from torch_layer.drawn_calls import DrawnCall, drawn_calls, tensors_of

from miofind.core.tensor import MathMode
from miofind.reference.convolution import reference_on_host
from miofind.torch.override.calls import COMPUTED, ConvolutionCall, TensorForm, Unserved


@settings(max_examples=60)
@given(drawn_calls(least_batch=1))
def test_problems_compute_what_pytorch_does(call: DrawnCall) -> None:
    x, w = tensors_of(call, "cpu", torch.float64)
    for tensor in (x, w):
        tensor.copy_(torch.randint(-2, 3, tensor.shape))
    ours = ConvolutionCall.of(x, w, None, *call.geometry)
    y = torch.convolution(x, w, None, *call.geometry)
    grad = torch.randint(-2, 3, y.shape).double()
    dx, dw, _ = torch.ops.aten.convolution_backward(grad, x, w, None, *call.geometry, [True, True, False])
    known = {"x": x, "w": w, "grad": grad, "y": y, "dx": dx, "dw": dw}
    for computed in COMPUTED:
        problem = ours.problem(computed, MathMode.TF32)
        names = dict(zip("xwy", ours.operands(computed), strict=True))
        for name in "xwy":
            assert problem.tensor(name).shape == tuple(known[names[name]].shape)
        factors = {name: known[names[name]].numpy() for name in problem.direction.inputs}
        np.testing.assert_array_equal(reference_on_host(problem, **factors), known[computed].numpy())


def _refused(x: torch.Tensor, w: torch.Tensor, *, transposed: bool = False, output_padding: int = 0) -> str:
    """Why a call is not served; "" where it is."""
    n = x.dim() - 2
    try:
        call = ConvolutionCall.of(x, w, None, [1] * n, [0] * n, [2] * n, transposed, [output_padding] * n, 1)
        call.problem("y", MathMode.IEEE)
    except Unserved as error:
        return str(error)
    return ""


def test_what_is_not_served_says_why() -> None:
    x, w = torch.empty(1, 2, 7, 7), torch.empty(2, 2, 2, 2)
    assert _refused(x, w) == ""
    assert _refused(x, w, transposed=True) == ""
    assert "float16 and float32" in _refused(x.half(), w)
    assert "complex64" in _refused(x.to(torch.complex64), w.to(torch.complex64))
    assert "empty" in _refused(x[:0], w)
    assert "6 and 6 dimensions" in _refused(torch.empty(1, 1, 1, 1, 1, 1), torch.empty(1, 1, 1, 1, 1, 1))
    assert "Kernel size" in _refused(x[..., :2], w)
    assert "as large as its stride" in _refused(x, w, transposed=True, output_padding=1)


def test_one_number_stands_for_all_dimensions_as_in_pytorch() -> None:
    x, w = torch.empty(1, 2, 7, 7), torch.empty(2, 2, 2, 2)
    call = ConvolutionCall.of(x, w, None, [2], [1], [1], False, [0], 1)
    assert (call.stride, call.padding) == ((2, 2), (1, 1))
    assert call.output_shape == tuple(torch.convolution(x, w, None, [2], [1], [1], False, [0], 1).shape)


def test_tf32_is_of_float32_alone() -> None:
    for dtype, math in ((torch.float32, MathMode.TF32), (torch.bfloat16, MathMode.IEEE)):
        x = torch.empty(1, 2, 7, 7, dtype=dtype)
        call = ConvolutionCall.of(x, x, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        assert call.problem("y", MathMode.TF32).math is math


def test_a_form_says_what_a_tensor_looks_like() -> None:
    form = TensorForm.of(torch.empty(2, 3, 4, 5, dtype=torch.bfloat16).to(memory_format=torch.channels_last))
    assert (form.shape, form.strides, str(form.dtype)) == ((2, 3, 4, 5), (60, 1, 15, 3), "bfloat16")
