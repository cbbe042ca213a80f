"""Calls whose kernels are being compiled: PyTorch's own run them, and miofind's once they are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import conv2d, conv3d
from torch_layer.withheld_kernels import Withheld

import miofind.torch
from miofind import Handle
from miofind.core.problem import ProblemDescription
from miofind.errors import CompileError, InvalidOptionError
from miofind.solver.solver import Solver
from miofind.solvers.cpu.direct import ConvCpuDirect
from miofind.torch.fused import plans as fused_plans
from miofind.torch.inductor.graph_pass import ConvolutionPass
from miofind.torch.override import plans

X, W, B = torch.randn(2, 4, 6, 6), torch.randn(8, 4, 3, 3), torch.randn(8)


@pytest.fixture
def kernels() -> Withheld:
    return Withheld()


@pytest.fixture
def handle(tmp_path: Path, kernels: Withheld) -> Iterator[Handle]:
    fused_plans.forget()
    with Handle("cpu", database=tmp_path / "finddb.db") as made:
        made._background = kernels  # type: ignore[assignment]
        yield made
    miofind.torch.disable()
    fused_plans.forget()


def test_forward(handle: Handle, kernels: Withheld) -> None:
    expected = conv2d(X, W, B)
    with miofind.torch.use("estimate", handle=handle, devices="cpu") as made:
        for _ in range(3):
            assert torch.equal(conv2d(X, W, B), expected)
        assert made.report().own_calls == 0
        assert kernels.asked == 1, "the plan is kept meanwhile"
        (reason,) = made.report().reasons
        assert reason.startswith("the kernels of ")
        assert reason.endswith(" are being compiled")
        kernels.finish()
        y = conv2d(X, W, B)
        report = made.report()
        assert (report.own_calls, report.calls) == (1, 4), "calls of before still count"
    torch.testing.assert_close(y, expected)


def test_backward_takes_each_gradient_as_it_comes(handle: Handle, kernels: Withheld) -> None:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()

    def gradients() -> tuple[Any, ...]:
        return torch.autograd.grad(conv2d(x, w).square().sum(), (x, w))

    expected = gradients()
    with miofind.torch.use(
        "estimate", handle=handle, devices="cpu", directions=["backward_data", "backward_weights"]
    ) as made:
        torch.testing.assert_close(gradients(), expected, rtol=1e-4, atol=1e-4)
        assert made.report().own_calls == 0
        kernels.finish()
        torch.testing.assert_close(gradients(), expected, rtol=1e-4, atol=1e-4)
        assert made.report().own_calls == 2


def test_a_fused_call(handle: Handle, kernels: Withheld) -> None:
    expected = conv2d(X, W, B).relu()
    with miofind.torch.use("estimate", handle=handle, devices="cpu") as made:
        for _ in range(3):
            torch.testing.assert_close(miofind.torch.convolution(X, W, B, activation="relu"), expected)
        assert kernels.asked == 1, "those of the parts that PyTorch computes meanwhile would be of no use"
        assert not made.plans
        kernels.finish()
        torch.testing.assert_close(miofind.torch.convolution(X, W, B, activation="relu"), expected)
        fused = [plan for plan in fused_plans.plans() if plan.parts]
        assert sorted(plan.answer.is_served for plan in fused if plan.answer) == [False, True]


def test_what_cannot_be_compiled_is_passed_over(handle: Handle, kernels: Withheld) -> None:
    kernels.finish()
    kernels.errors = [CompileError("not with this toolchain", source="", options=(), log="")]
    expected = conv2d(X, W)
    with miofind.torch.use("estimate", handle=handle, devices="cpu") as made:
        torch.testing.assert_close(conv2d(X, W), expected)
        assert kernels.asked == 2
        assert made.report().own_calls == 1


def test_where_nothing_can_be_compiled_pytorch_runs(
    handle: Handle, kernels: Withheld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: Iterable[Any]) -> Any:
        raise CompileError("not with this toolchain", source="", options=(), log="")

    monkeypatch.setattr(kernels, "begin", refused)
    with miofind.torch.use("estimate", handle=handle, devices="cpu") as made:
        conv2d(X, W)
        (reason,) = made.report().reasons
        assert "not with this toolchain" in reason


@pytest.mark.parametrize("way", ["asked for", "deterministic"])
def test_who_wants_to_waits(handle: Handle, kernels: Withheld, way: str) -> None:
    with miofind.torch.use("estimate", handle=handle, devices="cpu", background=way != "asked for") as made:
        torch.use_deterministic_algorithms(way == "deterministic")
        try:
            conv2d(X, W)
        finally:
            torch.use_deterministic_algorithms(False)
        assert made.report().own_calls == 1
    assert kernels.asked == 0


def test_explain_tells_what_is_to_run(handle: Handle, kernels: Withheld) -> None:
    with miofind.torch.use("estimate", handle=handle, devices="cpu"):
        told = miofind.torch.explain(torch.nn.Conv2d(4, 8, 3), X)
    assert all(row.solver_id for row in told.rows)
    assert kernels.asked == 0


def test_graphs_are_the_same_whoever_waits(handle: Handle) -> None:
    told = set()
    for background in (True, False):
        with miofind.torch.use("estimate", handle=handle, devices="cpu", background=background):
            told.add(ConvolutionPass().uuid())
    assert len(told) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_graphs_wait(handle: Handle, kernels: Withheld) -> None:
    with miofind.torch.use("estimate", handle=handle, devices="cpu"):
        compiled = torch.compile(lambda x: conv2d(x, W, B).relu(), options=miofind.torch.inductor_options())
        torch.testing.assert_close(compiled(X), conv2d(X, W, B).relu())
    assert len(fused_plans.plans()) == 1, "the operator was put in, by an answer that was waited for"


def test_a_capture_is_warned_of_once(
    handle: Handle, kernels: Withheld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plans._warn_of_capture.cache_clear()
    with miofind.torch.use("estimate", handle=handle, devices="cpu"):
        conv2d(X, W)
        miofind.torch.convolution(X, W)
        assert "CUDA graph" not in caplog.text
        monkeypatch.setattr(plans, "is_capturing", lambda _: True)
        for _ in range(2):
            conv2d(X, W)
            miofind.torch.convolution(X, W)
    assert caplog.text.count("a CUDA graph is captured") == 1


def test_a_stand_in_that_takes_long_is_pytorch_s(
    handle: Handle, kernels: Withheld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ConvCpuDirect, "is_last_resort", True)
    monkeypatch.setattr(plans, "_LONGEST_STAND_IN_MS", 0.0)
    with miofind.torch.use("estimate", handle=handle, devices="cpu") as made:
        conv2d(X, torch.randn(8, 1, 3, 3), groups=4)
        assert made.report().own_calls == 0
        assert kernels.asked == 1


@pytest.mark.parametrize("call", [conv2d, miofind.torch.convolution], ids=["operator", "fused"])
def test_a_capture_of_a_stand_in_is_warned_of(
    handle: Handle,
    kernels: Withheld,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: Callable[..., Any],
) -> None:
    plans._warn_of_capture.cache_clear()
    monkeypatch.setattr(ConvCpuDirect, "is_last_resort", True)
    w = torch.randn(8, 1, 3, 3)
    with miofind.torch.use("estimate", handle=handle, devices="cpu"):
        call(X, w, groups=4)
        assert "CUDA graph" not in caplog.text
        monkeypatch.setattr(plans, "is_capturing", lambda _: True)
        call(X, w, groups=4)
    assert caplog.text.count("a CUDA graph is captured") == 1


@pytest.mark.parametrize("call", [conv2d, miofind.torch.convolution], ids=["operator", "fused"])
def test_a_capture_right_after_kernels_came_is_warned_of(
    handle: Handle,
    kernels: Withheld,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: Callable[..., Any],
) -> None:
    """They are compiled, and no call has loaded them yet."""
    plans._warn_of_capture.cache_clear()
    with miofind.torch.use("estimate", handle=handle, devices="cpu") as made:
        call(X, W)
        kernels.finish()
        with monkeypatch.context() as patch:
            patch.setattr(plans, "is_capturing", lambda _: True)
            torch.testing.assert_close(call(X, W), conv2d(X, W))
        assert caplog.text.count("a CUDA graph is captured") == 1
        before = made.report().own_calls
        conv2d(X, W)
        assert made.report().own_calls == before + 1, "the next call loads them"


def test_a_forgotten_plan_is_not_replaced(handle: Handle, kernels: Withheld) -> None:
    with miofind.torch.use("estimate", handle=handle, devices="cpu") as made:
        conv2d(X, W)
        made.forget_plans()
        kernels.finish()
        assert made.plans == ()
        conv2d(X, W)
        assert made.report().own_calls == 1


def test_background_is_a_choice(handle: Handle) -> None:
    with pytest.raises(InvalidOptionError, match="background='often' must be True or False"):
        miofind.torch.enable(background="often", handle=handle, devices="cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("groups", "only", "runs"), [(4, (), True), (2, (), False), (4, ("plain",), False)], ids=["", "grouped", "filtered"]
)
def test_a_stand_in_runs_depthwise_convolutions(
    handle: Handle, kernels: Withheld, monkeypatch: pytest.MonkeyPatch, groups: int, only: tuple[str, ...], runs: bool
) -> None:
    monkeypatch.setattr(ConvCpuDirect, "is_last_resort", True)
    w = torch.randn(8, 4 // groups, 3, 3)
    expected = conv2d(X, w, B, groups=groups)
    with miofind.torch.use("estimate", handle=handle, devices="cpu", only=only) as made:
        for _ in range(2):
            torch.testing.assert_close(conv2d(X, w, B, groups=groups), expected, rtol=1e-4, atol=1e-4)
        assert made.report().own_calls == 2 * runs
        assert kernels.asked == 1, "the plan is kept meanwhile"
        fused = miofind.torch.convolution(X, w, B, activation="relu", groups=groups)
        torch.testing.assert_close(fused, expected.relu(), rtol=1e-4, atol=1e-4)
        (plan,) = (plan for plan in fused_plans.plans() if plan.answer)
        assert plan.answer is not None
        assert plan.answer.is_served is runs
        assert {each.generation for each in (plan, *made.plans)} == {None}, "the direct path keeps what it is given"
        kernels.finish()
        torch.testing.assert_close(conv2d(X, w, B, groups=groups), expected, rtol=1e-4, atol=1e-4)
        assert made.report().own_calls == 1 + 2 * runs
        chosen = [part.solution.solver_id for plan in made.plans for part in plan.parts if part.solution]
        assert chosen.count(ConvCpuDirect.id) == runs
        assert len(chosen) == 1 + runs


def test_stand_ins_and_kernels_of_a_volume_are_those_of_its_images(
    handle: Handle, kernels: Withheld, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, list[ProblemDescription]] = {"predicted": [], "kept_solution": []}
    predicted, kept_solution = plans.predicted, Solver.kept_solution

    def asked_to_predict(problem: ProblemDescription, *given: Any) -> Any:
        asked["predicted"].append(problem)
        return predicted(problem, *given)

    def asked_for_steps(solver: Solver, problem: ProblemDescription, *given: Any) -> Any:
        asked["kept_solution"].append(problem)
        return kept_solution(solver, problem, *given)

    monkeypatch.setattr(ConvCpuDirect, "is_last_resort", True)
    monkeypatch.setattr(plans, "predicted", asked_to_predict)
    monkeypatch.setattr(Solver, "kept_solution", asked_for_steps)
    w = torch.randn(8, 1, 1, 3, 3)
    with miofind.torch.use("estimate", handle=handle, devices="cpu") as made:
        y = conv3d(X.unsqueeze(2), w, groups=4)
        assert made.report().own_calls == 1
    torch.testing.assert_close(y.squeeze(2), conv2d(X, w.squeeze(2), groups=4), rtol=1e-4, atol=1e-4)
    for problems in asked.values():
        assert {problem.spatial_dims for problem in problems} == {2}
