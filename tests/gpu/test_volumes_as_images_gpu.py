"""Volumes that are images, on a GPU: arrays and networks of volumes get what PyTorch computes of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import miofind

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

CASES = {
    "one slice": ((2, 32, 1, 13, 12), (48, 32, 1, 3, 3), (0, 1, 1), (1, 2, 2), 1),
    "1x1x1": ((2, 32, 5, 6, 7), (48, 32, 1, 1, 1), (0, 0, 0), (1, 1, 1), 1),
    "3x1x1": ((2, 32, 5, 6, 7), (48, 32, 3, 1, 1), (1, 0, 0), (2, 1, 1), 1),
    "1x3x3": ((2, 32, 5, 9, 8), (48, 32, 1, 3, 3), (0, 1, 1), (1, 1, 1), 1),
    "grouped": ((2, 32, 5, 9, 8), (32, 8, 1, 3, 3), (0, 1, 1), (1, 1, 1), 4),
    "depthwise": ((2, 32, 9, 6, 7), (32, 1, 5, 1, 1), (2, 0, 0), (1, 1, 1), 32),
}


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[miofind.Handle]:
    with miofind.Handle(0, database=tmp_path_factory.mktemp("volumes") / "finddb.db", strict=True) as made:
        yield made


@pytest.mark.parametrize("last", [False, True], ids=["NCDHW", "NDHWC"])
@pytest.mark.parametrize("case", CASES)
def test_every_solution_runs_on_volumes(case: str, last: bool, handle: miofind.Handle) -> None:
    shape, filters, padding, stride, groups = CASES[case]
    order = torch.channels_last_3d if last else torch.contiguous_format
    torch.manual_seed(1)
    x = torch.randn(shape, device="cuda").half().to(memory_format=order).requires_grad_()
    w = torch.randn(filters, device="cuda").half().to(memory_format=order).requires_grad_()
    y = torch.nn.functional.conv3d(x.double(), w.double(), None, stride, padding, 1, groups)
    dy = torch.randn_like(y).half().to(memory_format=order)
    dx, dw = torch.autograd.grad(y, (x, w), dy.double())
    given: dict[str, dict[str, Any]] = {
        "forward": {"x": x.detach(), "w": w.detach()},
        "backward_data": {"dy": dy, "w": w.detach()},
        "backward_weights": {"dy": dy, "x": x.detach()},
    }
    for direction, expected in (("forward", y), ("backward_data", dx), ("backward_weights", dw)):
        problem = miofind.ProblemDescription.convolution(
            x=shape, w=filters, padding=padding, stride=stride, groups=groups, direction=direction, dtype="float16",
            layout="NDHWC" if last else "NCDHW",
        )  # fmt: skip
        solutions = miofind.find_solutions(problem, options=miofind.FindOptions(likely=True), handle=handle)
        for solution in solutions:
            result = miofind.run_solution(solution, **given[direction])
            assert result.shape == expected.shape
            torch.testing.assert_close(result.double(), expected.double(), rtol=1e-2, atol=6e-2)


@pytest.mark.parametrize("last", [False, True], ids=["NCDHW", "NDHWC"])
def test_fused_and_packed(last: bool, handle: miofind.Handle) -> None:
    shape, filters, padding, stride, _ = CASES["1x3x3"]
    order = torch.channels_last_3d if last else torch.contiguous_format
    x = torch.randn(shape, device="cuda").half().to(memory_format=order)
    w = torch.randn(filters, device="cuda").half().to(memory_format=order)
    bias = torch.randn(48, device="cuda").half()
    options = miofind.FindOptions(find_mode="fast", only="plain")
    plain = torch.nn.functional.conv3d(x.double(), w.double(), bias.double(), stride, padding)
    residual = torch.randn_like(plain).half().to(memory_format=order)
    named = {"bias": bias, "residual": residual, "activation": "relu"}
    y = miofind.convolution(x, w, padding=padding, stride=stride, **named, options=options, handle=handle)
    torch.testing.assert_close(y.double(), (plain + residual).relu(), rtol=1e-2, atol=6e-2)
    problem = miofind.ProblemDescription.from_arrays(
        x=x, w=w, padding=padding, stride=stride, bias=bias, residual=residual, activation="relu"
    )
    solution = miofind.find_solutions(problem, options=options, handle=handle)[0]
    packed = solution.pack(w, bias=bias).run(x, residual=residual)
    assert torch.equal(packed, miofind.run_solution(solution, x, w, bias=bias, residual=residual))


@pytest.mark.parametrize("last", [False, True], ids=["NCDHW", "NDHWC"])
@pytest.mark.parametrize("case", CASES)
def test_a_layer_of_pytorch_and_its_gradients(case: str, last: bool, handle: miofind.Handle) -> None:
    import miofind.torch

    shape, filters, padding, stride, groups = CASES[case]
    order = torch.channels_last_3d if last else torch.contiguous_format
    torch.manual_seed(2)
    layer = torch.nn.Conv3d(shape[1], filters[0], filters[2:], stride, padding, groups=groups).cuda().half()
    layer = layer.to(memory_format=order)
    x = torch.randn(shape, device="cuda").half().to(memory_format=order).requires_grad_()
    results = []
    for is_ours in (True, False):
        layer.zero_grad()
        x.grad = None
        if is_ours:
            with miofind.torch.use("estimate", background=False, handle=handle) as override:
                y = layer(x)
                y.float().square().mean().backward()
                assert override.report().own_calls == 3, str(override.report())
        else:
            y = layer(x)
            y.float().square().mean().backward()
        results.append([y.detach(), x.grad, layer.weight.grad, layer.bias.grad])
    for ours, theirs in zip(*results, strict=True):
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
