"""The calls over arrays on a GPU: gradients, transposed and bound convolutions, arrays of any form, calls repeated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import miofind
from miofind.errors import InvalidArrayError
from miofind.reference.convolution import reference_on_host

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

PROBLEM = miofind.ProblemDescription.convolution(x=(4, 16, 14, 14), w=(32, 16, 3, 3), padding=1, dtype="float16")
OWN = miofind.FindOptions(only="plain")
LIBRARIES = pytest.mark.parametrize("library", ["cupy", "torch"])


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[miofind.Handle]:
    path = tmp_path_factory.mktemp("finddb") / "finddb.db"
    with miofind.Handle("cuda:0", database=path, strict=True) as made:
        yield made


def on_host(name: str, seed: int = 0) -> np.ndarray:
    """A random operand; weights such that sums are about as large as 1."""
    values = np.random.default_rng(seed).standard_normal(PROBLEM.tensor(name).shape)
    return (values / 12 if name == "w" else values).astype(np.float16)


def on_gpu(library: str, array: np.ndarray) -> Any:
    if library == "cupy":
        return cupy.asarray(array)
    return pytest.importorskip("torch").from_numpy(array).cuda()


def numpy_of(array: Any) -> np.ndarray:
    """On the host, in float64, after all that was computed before."""
    cupy.cuda.Device().synchronize()
    if isinstance(array, cupy.ndarray):
        return cupy.asnumpy(array).astype(np.float64)
    return array.double().cpu().numpy()  # type: ignore[no-any-return]


def close(result: Any, wanted: Any, scale: float = 1.0) -> None:
    np.testing.assert_allclose(numpy_of(result), np.asarray(wanted, np.float64), rtol=2e-2, atol=3e-2 * scale)


def wanted_gradients() -> dict[str, np.ndarray]:
    given = {name: on_host(name) for name in ("x", "w", "y")}
    weights = PROBLEM.in_direction(miofind.Direction.BACKWARD_WEIGHTS)
    return {
        "x": reference_on_host(PROBLEM.in_direction(miofind.Direction.BACKWARD_DATA), w=given["w"], y=given["y"]),
        "w": reference_on_host(weights, x=given["x"], y=given["y"]),
        "bias": given["y"].astype(np.float64).sum((0, 2, 3)),
    }


@LIBRARIES
@pytest.mark.parametrize("wanted", [("x", "w", "bias"), ("w",), ("bias",)], ids="-".join)
def test_gradients(handle: miofind.Handle, library: str, wanted: tuple[Any, ...]) -> None:
    dy, x, w = (on_gpu(library, on_host(name)) for name in ("y", "x", "w"))
    gradients = miofind.convolution_gradients(dy, x, w, wanted, padding=1, handle=handle)
    again = miofind.convolution_gradients(dy, x, w, wanted, padding=1, handle=handle, out=gradients, deterministic=True)
    for name, array, other in zip(("x", "w", "bias"), gradients, again, strict=True):
        assert array is other
        assert (array is not None) == (name in wanted)
        if array is not None:
            assert type(array) is type(x)
            close(array, wanted_gradients()[name], scale=10)


def test_copies_and_sums_go_to_the_stream_of_the_call(handle: miofind.Handle) -> None:
    """On any other they would read what the stream has not written yet."""
    dy, x, w = (cupy.asarray(on_host(name)) for name in ("y", "x", "w"))
    memory = cupy.zeros((*dy.shape[:-1], 2 * dy.shape[-1]), cupy.float16)
    strided, busy = memory[..., ::2], cupy.ones(1 << 26, cupy.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    keywords: dict[str, Any] = {"padding": 1, "handle": handle, "stream": stream}
    miofind.convolution_gradients(dy, x, w, **keywords)  # finds
    for wanted in (("x", "w", "bias"), ("bias",)):
        strided[...] = 0
        cupy.cuda.Device().synchronize()
        with stream:
            for _ in range(100):  # some 10 ms
                cupy.sqrt(busy, out=busy)
            strided[...] = dy
        gradients = miofind.convolution_gradients(strided, x, w, wanted, **keywords)
        for name, array in zip(("x", "w", "bias"), gradients, strict=True):
            if array is not None:
                close(array, wanted_gradients()[name], scale=10)


@LIBRARIES
def test_arrays_of_any_form(handle: miofind.Handle, library: str) -> None:
    """Strided, of another memory order than the output, without a batch, without images."""
    host, w = on_host("x"), on_gpu(library, on_host("w"))
    wanted = reference_on_host(PROBLEM, x=host, w=on_host("w"))
    wide = np.zeros((*host.shape[:-1], 2 * host.shape[-1]), np.float16)
    wide[..., ::2] = host
    run: dict[str, Any] = {"padding": "same", "handle": handle}
    close(miofind.convolution(on_gpu(library, wide)[..., ::2], w, **run), wanted)
    x = on_gpu(library, host)
    one = miofind.convolution(x[1], w, **run)
    assert tuple(one.shape) == PROBLEM.y.shape[1:]
    close(one, wanted[1])
    out = on_gpu(library, np.zeros(PROBLEM.y.shape[1:], np.float16))
    assert miofind.convolution(x[1], w, out=out, **run) is out
    close(out, wanted[1])
    residual = on_gpu(library, np.ascontiguousarray(np.moveaxis(on_host("y"), 1, -1)))
    residual = residual.transpose(0, 3, 1, 2) if library == "cupy" else residual.permute(0, 3, 1, 2)
    close(miofind.convolution(x, w, residual=residual, **run), wanted + on_host("y"))
    y, total, _ = miofind.convolution(x[:0], w, statistics=True, **run)
    assert tuple(y.shape) == (0, *PROBLEM.y.shape[1:])
    assert not numpy_of(total).any()
    dw = miofind.convolution_backward_weights(y, x[:0], w.shape, padding=1, handle=handle)
    assert tuple(dw.shape) == PROBLEM.w.shape
    assert not numpy_of(dw).any()


@LIBRARIES
def test_transposed_convolutions(handle: miofind.Handle, library: str) -> None:
    torch = pytest.importorskip("torch")
    host = {
        "x": on_host("x"),
        "w": np.ascontiguousarray(on_host("w").swapaxes(0, 1)),
        "bias": on_host("y")[0, :, 0, 0],
    }
    keywords: dict[str, Any] = {"stride": 2, "padding": 1, "output_padding": 1}
    wide = {name: torch.from_numpy(array.astype(np.float64)).requires_grad_() for name, array in host.items()}
    wanted = torch.conv_transpose2d(wide["x"], wide["w"], wide["bias"], **keywords)
    x, w, bias = (on_gpu(library, array) for array in host.values())
    close(miofind.convolution_transpose(x, w, bias=bias, handle=handle, **keywords), wanted.detach())
    dy = np.random.default_rng(1).standard_normal(wanted.shape).astype(np.float16)
    expected = torch.autograd.grad(wanted, tuple(wide.values()), torch.from_numpy(dy.astype(np.float64)))
    gradients = miofind.convolution_transpose_gradients(on_gpu(library, dy), x, w, handle=handle, **keywords)
    for array, other in zip(gradients, expected, strict=True):
        close(array, other, scale=10)


def test_sums_of_bfloat16(handle: miofind.Handle) -> None:
    dy, x, w = (cupy.asarray(on_host(n).astype(np.float32)).astype(ml_dtypes.bfloat16) for n in ("y", "x", "w"))
    bias = miofind.convolution_gradients(dy, x, w, "bias", padding=1, handle=handle).bias
    assert bias is not None
    assert bias.dtype == ml_dtypes.bfloat16
    close(bias.astype(cupy.float32), wanted_gradients()["bias"], scale=30)


@LIBRARIES
def test_bound_convolutions_are_captured(handle: miofind.Handle, library: str) -> None:
    """Prepared, with out and workspace given, a call allocates nothing and a graph replays it."""
    summand = np.ascontiguousarray(on_host("y")[0, :, 0, 0])
    x, w, bias = (on_gpu(library, array) for array in (on_host("x"), on_host("w"), summand))
    conv = miofind.Convolution.of(x, w, bias=bias, activation="relu", padding=1, handle=handle).prepare()
    sums, summand = reference_on_host(PROBLEM, x=on_host("x"), w=on_host("w")), summand.reshape(-1, 1, 1)
    out = on_gpu(library, np.zeros(PROBLEM.y.shape, np.float16))
    workspace = on_gpu(library, np.zeros(max(1, conv.workspace_bytes), np.uint8))
    close(conv(x), np.maximum(sums + summand, 0))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    stream.begin_capture()
    conv(x, out=out, workspace=workspace, stream=stream)
    graph = stream.end_capture()
    for factor in (1, 2):
        if factor == 2:
            w *= 2  # the graph and the object have the array, not its values
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        close(out, np.maximum(factor * sums + summand, 0))


def test_bound_gradients(handle: miofind.Handle) -> None:
    dy, x, w = (cupy.asarray(on_host(name)) for name in ("y", "x", "w"))
    gradients = miofind.Convolution.of(x, w, padding=1, handle=handle).gradients.prepare()
    for name, array in zip(("x", "w", "bias"), gradients(dy, x), strict=True):
        close(array, wanted_gradients()[name], scale=10)


@LIBRARIES
def test_repeated_calls_are_checked(handle: miofind.Handle, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the memory of calls does not tell apart: addresses, devices, gradients."""
    x, w = on_gpu(library, on_host("x")), on_gpu(library, on_host("w"))
    wanted = reference_on_host(PROBLEM, x=on_host("x"), w=on_host("w"))
    run: dict[str, Any] = {"padding": 1, "handle": handle, "options": OWN}
    for _ in range(2):  # a find changes answers, with which what ran the first call is forgotten
        miofind.convolution(x, w, **run)
    taken: list[object] = []
    real = miofind.api.array_call.run_call
    monkeypatch.setattr(miofind.api.array_call, "run_call", lambda *a, **k: taken.append(a) or real(*a, **k))
    for _ in range(3):
        close(miofind.convolution(x, w, **run), wanted)
    assert taken == []
    memory = on_gpu(library, np.zeros(PROBLEM.x.size + 1, np.float16))
    misaligned = memory[1:].reshape(PROBLEM.x.shape)
    misaligned[...] = x
    close(miofind.convolution(misaligned, w, **run), wanted)
    with pytest.raises(InvalidArrayError, match="the arrays are on different devices"):
        miofind.convolution(x, on_host("w") if library == "cupy" else w.cpu(), **run)
    if library == "torch":
        torch = pytest.importorskip("torch")
        with pytest.raises(InvalidArrayError, match="w requires gradients"):
            miofind.convolution(x, torch.nn.Parameter(w), **run)
    taken.clear()
    close(miofind.convolution(x, w, **run), wanted)
    assert taken == []


def test_calls_of_the_same_shapes_go_to_the_device_of_their_arrays() -> None:
    """With no handle given, on the host and on the GPU in turn."""
    torch = pytest.importorskip("torch")
    options = miofind.FindOptions(find_mode="fast", on_miss="estimate")
    host = torch.from_numpy(on_host("x")[:1].astype(np.float32)), torch.from_numpy(on_host("w").astype(np.float32))
    wanted = torch.conv2d(*host, padding=1)
    for _ in range(3):
        for device in ("cpu", "cuda"):
            y = miofind.convolution(*(array.to(device) for array in host), padding=1, options=options)
            assert y.device.type == device
            torch.testing.assert_close(y.cpu(), wanted, rtol=1e-3, atol=1e-3)


def test_other_arrays_by_protocol(handle: miofind.Handle) -> None:
    class Foreign:
        def __init__(self, array: Any) -> None:
            self.__cuda_array_interface__ = array.__cuda_array_interface__
            self._keep = array

    x, w = cupy.asarray(on_host("x")), cupy.asarray(on_host("w"))
    wanted = reference_on_host(PROBLEM, x=on_host("x"), w=on_host("w"))
    close(miofind.convolution(Foreign(x[1]), Foreign(w), padding=1, handle=handle), wanted[1])
    turned = cupy.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1]
    close(miofind.convolution(Foreign(turned), Foreign(w), padding=1, handle=handle), wanted)
