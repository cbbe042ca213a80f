"""Arrays of any form in one call: padding by name, no batch, no images, strides, transposed; against PyTorch's float64.

PyTorch's own convolution is the reference: these are its forms.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import miofind
from miofind.errors import InvalidArrayError, InvalidProblemError

torch = pytest.importorskip("torch")
FAST = miofind.FindOptions(find_mode="fast", on_miss="estimate")
CONV = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}
CONV_TRANSPOSE = {1: torch.conv_transpose1d, 2: torch.conv_transpose2d, 3: torch.conv_transpose3d}
EXAMPLES = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[miofind.Handle]:
    database = tmp_path_factory.mktemp("forms") / "finddb.db"
    with miofind.Handle("cpu", database=database, strict=True) as made:
        yield made


def random_array(*shape: int, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def wide(array: Any) -> Any:
    return torch.as_tensor(np.asarray(array, np.float64))


def close(result: Any, wanted: Any) -> None:
    assert tuple(result.shape) == tuple(wanted.shape)
    np.testing.assert_allclose(np.asarray(result, np.float64), wanted.detach().numpy(), rtol=1e-4, atol=2e-4)


def strided(draw: st.DrawFn, array: np.ndarray) -> Any:
    """The same values over memory of some order: packed, channels last, with gaps, turned, of another axis order."""
    form = draw(st.sampled_from(["first", "last", "gaps", "turned", "permuted"]))
    if form == "last":
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 1, -1)), -1, 1)
    if form == "gaps":
        memory = np.full((*array.shape[:-1], 2 * array.shape[-1]), np.nan, array.dtype)
        memory[..., ::2] = array
        return memory[..., ::2]
    if form == "turned":
        return array[:, ::-1].copy()[:, ::-1]
    if form == "permuted":
        return array.T.copy().T
    return array


@st.composite
def calls(draw: st.DrawFn) -> tuple[int, dict[str, Any], tuple[np.ndarray, ...]]:
    """Rank, keywords, and x and w with the batch and strides of any form."""
    rank = draw(st.integers(1, 3))
    sizes = st.tuples(*[st.integers(1, 3)] * rank)
    groups = draw(st.integers(1, 2))
    taps, dilation = draw(sizes), draw(sizes)
    spatial = [d * (t - 1) + draw(st.integers(1, 4)) for t, d in zip(taps, dilation, strict=True)]
    keywords: dict[str, Any] = {"dilation": dilation, "groups": groups}
    padding = draw(st.sampled_from(["same", "valid", 1, 2]) | sizes)
    keywords["padding"] = padding
    if padding != "same":
        keywords["stride"] = draw(st.integers(1, 3) | sizes)
    c, k = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    n = draw(st.integers(0, 2))
    x, w = random_array(n, c, *spatial, seed=draw(st.integers(0, 99))), random_array(k, c // groups, *taps, seed=1)
    return rank, keywords, (strided(draw, x) if n else x, strided(draw, w))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@EXAMPLES
@given(calls(), st.booleans(), st.booleans())
def test_convolutions_and_gradients_are_pytorchs(
    handle: miofind.Handle, drawn: Any, unbatched: bool, in_torch: bool
) -> None:
    rank, keywords, (x, w) = drawn
    if unbatched and len(x):
        x = x[0]
    tx, tw = wide(x).requires_grad_(), wide(w).requires_grad_()
    ty = CONV[rank](tx, tw, **keywords)
    dy = random_array(*ty.shape, seed=3)
    wanted = torch.autograd.grad(ty, (tx, tw), wide(dy))
    total = wide(dy).sum([axis for axis in range(ty.ndim) if axis != ty.ndim - rank - 1])
    run = {**keywords, "handle": handle, "options": FAST}
    given_x, given_w = (torch.from_numpy(a.copy()) if in_torch else a for a in (x, w))
    given_dy = torch.from_numpy(dy) if in_torch else dy
    y = miofind.convolution(given_x, given_w, **run)
    assert type(y) is type(given_x)
    close(y, ty)
    close(miofind.convolution_backward_data(given_dy, given_w, x.shape, **run), wanted[0])
    close(miofind.convolution_backward_weights(given_dy, given_x, w.shape, **run), wanted[1])
    dx, dw, bias = miofind.convolution_gradients(given_dy, given_x, given_w, **run)
    close(dx, wanted[0])
    close(dw, wanted[1])
    close(bias, total)


@EXAMPLES
@given(st.data())
def test_transposed_convolutions_and_their_gradients_are_pytorchs(handle: miofind.Handle, data: st.DataObject) -> None:
    draw = data.draw
    rank, keywords, (x, w) = draw(calls())
    if isinstance(keywords["padding"], str):
        keywords["padding"] = 0
    groups = keywords["groups"]
    w = random_array(x.shape[1], draw(st.integers(1, 2)), *w.shape[2:], seed=5)
    stride = keywords.get("stride", 1)
    keywords["output_padding"] = draw(st.integers(0, min(stride if isinstance(stride, tuple) else (stride,)) - 1))
    keywords["padding"] = 0 if any(size * 2 < 5 for size in x.shape[2:]) else keywords["padding"]
    bias = random_array(w.shape[1] * groups, seed=6)
    if draw(st.booleans()) and len(x):
        x = x[0]
    tx, tw, tb = (wide(a).requires_grad_() for a in (x, w, bias))
    try:
        ty = CONV_TRANSPOSE[rank](tx, tw, tb, **keywords)
    except RuntimeError:
        ty = torch.empty(0)
    if 0 in ty.shape[-rank:]:
        with pytest.raises(InvalidProblemError, match="at least 1 is needed"):
            miofind.convolution_transpose(x, w, **keywords)
        return
    dy = random_array(*ty.shape, seed=7)
    wanted = torch.autograd.grad(ty, (tx, tw, tb), wide(dy))
    run = {**keywords, "handle": handle, "options": FAST}
    close(miofind.convolution_transpose(x, w, bias=bias, **run), ty)
    for result, gradient in zip(miofind.convolution_transpose_gradients(dy, x, w, **run), wanted, strict=True):
        close(result, gradient)


def test_output_padding_beyond_the_stride_is_taken_off_the_padding(handle: miofind.Handle) -> None:
    x, w = random_array(2, 3, 5, 4), random_array(3, 2, 3, 3)
    keywords: dict[str, Any] = {"padding": 1, "dilation": 2, "output_padding": 1}
    run = {"handle": handle, "options": FAST, **keywords}
    close(miofind.convolution_transpose(x, w, **run), torch.conv_transpose2d(wide(x), wide(w), **keywords))
    with pytest.raises(InvalidProblemError, match="output_padding=1 of dimension 0 is served below the stride 1"):
        miofind.convolution_transpose(x, w, **{**run, "padding": 0})
    with pytest.raises(InvalidProblemError, match="output_padding=2 of dimension 0 must be below the stride 1 or the"):
        miofind.convolution_transpose(x, w, **{**run, "output_padding": 2})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"padding": "same"}, "padding='same' has no meaning transposed"),
        ({"padding": 9}, "gives an output of -1"),
        ({"bias": random_array(3)}, r"bias has shape \(3,\), the transposed convolution has \(2,\)"),
        (
            {"pading": 1},
            r"unknown arguments \['pading'\]. Did you mean .*output_padding\? Known are bias, dilation",
        ),
        ({"x": random_array(2, 4, 5, 5)}, "has 4 channels, w of shape .* 3"),
        ({"x": random_array(3, 5)}, r"\(n, c_in, \*spatial\)"),
    ],
)
def test_transposed_convolutions_say_what_is_wrong(arguments: dict[str, Any], told: str) -> None:
    x = arguments.pop("x", random_array(2, 3, 5, 5))
    with pytest.raises((InvalidArrayError, InvalidProblemError), match=told):
        miofind.convolution_transpose(x, random_array(3, 2, 3, 3), **arguments)


def test_transposed_outputs_share_no_memory(handle: miofind.Handle) -> None:
    """The bias with the output, and a gradient with what a later one reads."""
    x, w, dy = random_array(2, 3, 6, 6), random_array(3, 2, 2, 2), random_array(2, 2, 12, 12)
    run: dict[str, Any] = {"stride": 2, "handle": handle, "options": FAST}
    out = random_array(2, 2, 12, 12)
    with pytest.raises(InvalidArrayError, match="out shares memory with bias, which would be overwritten"):
        miofind.convolution_transpose(x, w, bias=out.reshape(-1)[-2:], out=out, **run)
    memory = np.zeros(x.size, np.float32)
    for outs, told in (
        ((x, None, None), "dx of out shares memory with x"),
        ((memory.reshape(x.shape), memory[: w.size].reshape(w.shape), None), "dw of out shares memory with dx of out"),
        ((None, None, dy.reshape(-1)[:2]), "bias of out shares memory with dy"),
    ):
        with pytest.raises(InvalidArrayError, match=told):
            miofind.convolution_transpose_gradients(dy, x, w, out=outs, **run)
    for array, whole in ((x, (2, 3, 6, 6)), (dy, (2, 2, 12, 12)), (out, (2, 2, 12, 12))):
        np.testing.assert_array_equal(array, random_array(*whole))
    assert not memory.any()
    wanted = miofind.convolution_transpose_gradients(dy, x, w, **run)
    alone = miofind.convolution_transpose_gradients(dy, x, w, "x", out=(x, None, None), **run)
    np.testing.assert_array_equal(alone.dx, wanted.dx)


@pytest.mark.parametrize(
    ("bias", "out", "told"),
    [
        (np.ones(2), None, "bias has dtype float64: use float32, as x has"),
        (np.ones(2, np.float16), None, "bias has dtype float16: use float32, as x has"),
        (torch.ones(2), None, "bias is an array of torch, x of numpy: pass both of one library"),
        (np.ones(2, np.float32), torch.empty(2, 2, 10, 10), "bias is an array of numpy, out of torch"),
    ],
    ids=["float64", "float16", "torch", "out"],
)
def test_a_transposed_bias_is_of_the_outputs_kind(handle: miofind.Handle, bias: Any, out: Any, told: str) -> None:
    x, w = random_array(2, 3, 5, 5), random_array(3, 2, 2, 2)
    with pytest.raises(InvalidArrayError, match=told):
        miofind.convolution_transpose(x, w, stride=2, bias=bias, out=out, handle=handle, options=FAST)


def test_a_transposed_bias_gradient_alone_is_of_a_convolution(handle: miofind.Handle) -> None:
    x, w, dy = random_array(2, 3, 5, 5), random_array(3, 2, 2, 2), random_array(2, 2, 10, 10)
    run: dict[str, Any] = {"stride": 2, "wanted": "bias", "handle": handle}
    for arguments, told in (
        ({"dy": dy.astype(np.float64)}, "float64 does not mix with float32"),
        ({"dy": dy[:, :1]}, "dy has shape"),
        ({"out": (None, None, np.empty(2))}, "bias of out has dtype float64: use float32, as w has"),
        ({"out": (None, None, torch.empty(2))}, "bias of out is an array of torch, dy of numpy"),
    ):
        with pytest.raises((InvalidArrayError, InvalidProblemError), match=told):
            miofind.convolution_transpose_gradients(**{"dy": dy, "x": x, "w": w, **run, **arguments})
    for at in (slice(None), slice(0), 0):
        total = miofind.convolution_transpose_gradients(dy[at], x[at], w, **run).bias
        np.testing.assert_allclose(total, dy[at].reshape(-1, 2, 100).sum((0, 2)), rtol=1e-5, atol=1e-5)


def test_an_epilogue_of_any_form(handle: miofind.Handle) -> None:
    """A residual in another memory order than y, a bias with gaps, one image without a batch."""
    x, w, bias = random_array(4, 6, 5), random_array(6, 4, 3, 3, seed=1), random_array(12, seed=2)[::2]
    residual = np.moveaxis(random_array(6, 5, 6, seed=3), -1, 0)
    wanted = torch.relu(torch.conv2d(wide(x), wide(w), wide(bias), padding=1) + wide(residual))
    run: dict[str, Any] = {"padding": 1, "handle": handle, "options": FAST, "activation": "relu", "bias": bias}
    y = miofind.convolution(x, w, residual=residual, **run)
    close(y, wanted)
    total = miofind.convolution(x, w, residual=residual, statistics=True, **run)
    close(total.y, wanted)
    close(total.sum, wanted.sum((1, 2)))
    again = miofind.convolution(x, w, residual=residual, statistics=True, out=(y, None, None), **run)
    assert again.y is y
    with pytest.raises(InvalidArrayError, match="give all images a batch or none"):
        miofind.convolution(x, w, residual=residual[None], **run)


def test_what_is_written_of_no_images(handle: miofind.Handle) -> None:
    x, w = random_array(0, 4, 6, 5), random_array(6, 4, 3, 3)
    run: dict[str, Any] = {"handle": handle}
    y, total, squares = miofind.convolution(x, w, statistics=True, **run)
    assert y.shape == (0, 6, 4, 3)
    assert total.tolist() == squares.tolist() == [0.0] * 6
    out = np.full(w.shape, np.nan, np.float32)
    assert miofind.convolution_backward_weights(y, x, w.shape, out=out, **run) is out
    assert not out.any()
    with pytest.raises(InvalidArrayError, match=r"w has shape \(0, 4, 3, 3\), without elements: the batch alone"):
        miofind.convolution(x, w[:0], **run)
    with pytest.raises(InvalidArrayError, match=r"x has shape \(1, 4, 0, 5\), without elements"):
        miofind.convolution(random_array(1, 4, 0, 5), w, **run)
    with pytest.raises(InvalidArrayError, match=r"dy has shape \(0, 6, 4, 3\), without elements"):
        miofind.convolution_backward_data(y, w, (2, 4, 6, 5), **run)
    with pytest.raises(InvalidArrayError, match="without elements"):
        miofind.ProblemDescription.from_arrays(x=x, w=w)


def test_an_output_is_packed(handle: miofind.Handle) -> None:
    x, w = random_array(2, 4, 6, 5), random_array(6, 4, 3, 3)
    out = np.empty((2, 6, 4, 6), np.float32)[..., ::2]
    with pytest.raises(InvalidArrayError, match="pass a contiguous copy"):
        miofind.convolution(x, w, out=out, handle=handle)


def test_broadcast_gradients_are_taken(handle: miofind.Handle) -> None:
    """What y.sum().backward() gives."""
    x, w = random_array(2, 4, 6, 5), random_array(6, 4, 3, 3)
    dy = torch.ones(()).expand(2, 6, 4, 3)
    tw = wide(w).requires_grad_()
    torch.conv2d(wide(x), tw).sum().backward()
    got = miofind.convolution_backward_weights(
        dy, torch.from_numpy(x), w.shape, bias_gradient=True, handle=handle, options=FAST
    )
    close(got.dw, tw.grad)
    assert got.bias_gradient.tolist() == [24.0] * 6


def test_bias_of_a_transposed_convolution_in_bfloat16(handle: miofind.Handle) -> None:
    x, w = random_array(1, 2, 4, 4, dtype=ml_dtypes.bfloat16), random_array(2, 2, 1, 1, dtype=ml_dtypes.bfloat16)
    run: dict[str, Any] = {"handle": handle, "options": FAST}
    plain = miofind.convolution_transpose(x, w, **run)
    for dtype in (ml_dtypes.bfloat16, np.float32):
        bias = np.array([1.0, -2.0], dtype)
        added = (plain + bias[:, None, None].astype(plain.dtype)).astype(np.float32)
        got = miofind.convolution_transpose(x, w, bias=bias, **run)
        np.testing.assert_array_equal(got.astype(np.float32), added)
