"""The direct path of PyTorch's override, built on the machine with the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import conv2d, conv_transpose2d

import miofind
import miofind.torch
from miofind.torch import direct, override
from miofind.torch.direct import DirectPath
from miofind.torch.override import Override

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float32: 3e-3}
FORMATS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> DirectPath:
    """The direct path over the driver, built once for all of pytest's workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIOFIND_CACHE_DIR", str(tmp_path_factory.getbasetemp().parent / "direct path"))
        patch.setattr(direct, "_path", direct._path.__wrapped__)
        made = DirectPath(direct.build())
    direct._use_cuda(made.use_driver)
    return made


@pytest.fixture
def enabled(path: DirectPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Override]:
    monkeypatch.setattr(override, "direct_path", lambda: path)
    with (
        miofind.Handle("cuda", database=tmp_path / "finddb.db") as handle,
        miofind.torch.use("estimate", only=("plain",), handle=handle) as made,
    ):
        yield made


def of_python(enabled: Override) -> int:
    """Calls that came through Python."""
    return sum(plan.python_calls for plan in enabled.plans)


LAYERS = {
    "3x3": ((64, 128, 3, 1), {"padding": 1}),
    "1x1 with bias": ((64, 256, 1, 1), {"bias": True}),
    "strided": ((64, 64, 3, 1), {"padding": 1, "stride": 2}),
    "depthwise": ((32, 32, 3, 32), {"padding": 1}),
    "grouped": ((64, 64, 3, 4), {"padding": 1, "bias": True}),
    "transposed": ((32, 64, 3, 1), {"stride": 2, "transposed": True}),
}


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_results_are_right_without_python(enabled: Override, name: str, dtype: Any, memory_format: str) -> None:
    (c, k, size, groups), options = LAYERS[name]
    options = dict(options)
    call = conv_transpose2d if options.pop("transposed", False) else conv2d
    biased = options.pop("bias", False)
    shape = (c, k // groups, size, size) if call is conv_transpose2d else (k, c // groups, size, size)
    before = 0
    for i in range(4):
        x = torch.randn(4, c, 14, 15, device="cuda", dtype=dtype).to(memory_format=FORMATS[memory_format])
        w = (0.1 * torch.randn(shape, device="cuda", dtype=dtype)).to(memory_format=FORMATS[memory_format])
        bias = [torch.randn(k, device="cuda", dtype=dtype)] if biased else []
        given = [tensor.requires_grad_() for tensor in (x, w, *bias)]
        y = call(*given, groups=groups, **options)
        dy = torch.randn_like(y)
        results = (y, *torch.autograd.grad(y, given, dy))
        exact = [tensor.detach().double().requires_grad_() for tensor in given]
        want = call(*exact, groups=groups, **options)
        for got, right in zip(results, (want, *torch.autograd.grad(want, exact, dy.double())), strict=True):
            assert (got - right).abs().max() <= TOLERANCE[dtype] * right.abs().max()
        if i == 1:
            before = of_python(enabled)
    assert of_python(enabled) - before <= 4, "float64 alone, or a result that a library's solution gives"
    assert enabled.report().own_calls > 0


def test_another_stream_and_a_graph_give_the_same(enabled: Override) -> None:
    x, w = (torch.randn(8, 8, 12, 12, device="cuda"), torch.randn(8, 8, 3, 3, device="cuda"))
    want = [conv2d(x, w) for _ in range(3)][-1]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside = conv2d(x, w)
        graph = torch.cuda.CUDAGraph()
    stream.synchronize()
    with torch.cuda.graph(graph):
        captured = conv2d(x, w)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(beside, want)
    assert torch.equal(captured, want)


def test_tensors_that_begin_elsewhere_are_right(enabled: Override) -> None:
    memory = torch.randn(2 * 16 * 10 * 10 + 8, device="cuda", dtype=torch.float16)
    w = 0.1 * torch.randn(16, 16, 3, 3, device="cuda", dtype=torch.float16)
    for start in (0, 0, 0, 1, 2, 4, 8, 1, 0):
        x = memory[start : start + 3200].view(2, 16, 10, 10)
        want = conv2d(x.double(), w.double())
        assert (conv2d(x, w) - want).abs().max() <= 3e-3 * want.abs().max()


def test_threads_share_it(enabled: Override) -> None:
    x, w = (torch.randn(8, 8, 12, 12, device="cuda"), torch.randn(8, 8, 3, 3, device="cuda"))
    want = [conv2d(x, w) for _ in range(3)][-1]
    with ThreadPoolExecutor(8) as pool:
        assert all(torch.equal(each, want) for each in pool.map(lambda _: conv2d(x, w), range(200)))
