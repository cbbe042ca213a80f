"""When miofind's kernels stand at PyTorch's dispatcher, and when they let PyTorch's own run."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers.processes.forks import forked_by_a_thread
from helpers.processes.waiting import LIMIT_S
from torch.nn.functional import conv1d, conv2d

import miofind.torch
from miofind import Handle, find_solutions
from miofind.core.problem import ProblemDescription
from miofind.core.tensor import DataType
from miofind.device.device import Library
from miofind.errors import InvalidOptionError, LaunchError, MissingLibraryError, NoSolutionError, UnknownSolverError
from miofind.launch.invoker import _HostInvoker
from miofind.torch import Override
from miofind.torch.fused import plans as fused_plans
from miofind.torch.override import comparisons, dispatcher, plans
from miofind.torch.override.comparisons import Comparison
from miofind.torch.override.flags import Flags, state

X, W = torch.randn(2, 4, 6, 6), torch.randn(8, 4, 3, 3)


def _own(made: Override) -> int:
    return made.report().own_calls


def _enabled(handle: Handle, on_miss: str = "estimate", **arguments: Any) -> Override:
    return miofind.torch.enable(on_miss, handle=handle, devices="cpu", **arguments)


@pytest.fixture(autouse=True)
def _nothing_stays_enabled() -> Any:
    yield
    miofind.torch.disable()


def test_enable_disable_and_enable_again(cpu_handle: Handle) -> None:
    for _ in range(3):
        made = _enabled(cpu_handle)
        conv2d(X, W)
        assert _own(made) == 1
        made.disable()
        assert not made.is_enabled
        conv2d(X, W)
        assert _own(made) == 1
        made.disable()


def test_the_last_of_several_counts_until_it_is_disabled(cpu_handle: Handle) -> None:
    first = _enabled(cpu_handle)
    with miofind.torch.use("estimate", handle=cpu_handle, devices="cpu") as second:
        conv2d(X, W)
        assert (_own(first), _own(second)) == (0, 1)
    conv2d(X, W)
    assert (_own(first), _own(second)) == (1, 1)
    third = _enabled(cpu_handle)
    first.disable()
    conv2d(X, W)
    assert (_own(first), _own(third)) == (1, 1)
    third.disable()
    assert dispatcher.current("cpu") is None


def test_an_exception_ends_a_with_block(cpu_handle: Handle) -> None:
    with pytest.raises(ZeroDivisionError), miofind.torch.use("estimate", handle=cpu_handle, devices="cpu"):
        raise ZeroDivisionError
    assert dispatcher.current("cpu") is None


def test_kernels_that_others_registered_stay_in_use(cpu_handle: Handle) -> None:
    """As FlagGems registers its kernels: below ours if before, above if after."""

    def others(keyset: Any, *arguments: Any) -> Any:
        seen.append(len(arguments))
        return native.call_boxed(keyset, *arguments)

    seen: list[int] = []
    native = torch.library.get_kernel("aten::convolution", "CPU")
    library = torch.library.Library("aten", "IMPL")
    library.impl("convolution", others, "CPU", with_keyset=True)
    try:
        with miofind.torch.use("fallback", handle=cpu_handle, devices="cpu"):
            conv2d(X, W)
        assert seen == [9]
        with miofind.torch.use("estimate", handle=cpu_handle, devices="cpu") as made:
            conv2d(X, W)
            assert (seen, _own(made)) == ([9], 1)
    finally:
        library._destroy()
    with miofind.torch.use("estimate", handle=cpu_handle, devices="cpu") as made:
        library = torch.library.Library("aten", "IMPL")
        library.impl("convolution", others, "CPU", with_keyset=True, allow_override=True)
        conv2d(X, W)
        assert (seen, made.plans) == ([9, 9], ())
        library._destroy()
        conv2d(X, W)
        assert _own(made) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on_miss": "fnid"}, "on_miss='fnid' is unknown"),
        ({"min_gain": 0}, "min_gain=0 must be a positive number"),
        ({"workspace_limit_bytes": -1}, "workspace_limit_bytes=-1"),
        ({"dtypes": ["float8"]}, "dtypes='float8' is unknown"),
        ({"dtypes": torch.HalfTensor}, "dtypes=.*HalfTensor.* is unknown"),
        ({"dtypes": "float"}, "float64 in NumPy and float32 in PyTorch"),
        ({"directions": "forwards"}, r"Did you mean forward\?"),
        ({"handle": "cpu"}, "must be a Handle"),
        ({"devices": "xpu"}, "must be some of cuda, cpu"),
    ],
)
def test_impossible_arguments_are_told(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOptionError, match=message):
        miofind.torch.enable(**arguments)
    assert dispatcher.current() is None


def test_misspelt_names_are_told() -> None:
    with pytest.raises(TypeError, match=r"Did you mean min_gain\?"):
        miofind.torch.enable(min_gian=2)
    with pytest.raises(UnknownSolverError, match="ConvCpuDirekt"):
        miofind.torch.enable(only="ConvCpuDirekt")


def test_an_old_pytorch_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.library, "get_kernel")
    with pytest.raises(MissingLibraryError, match=r"needs PyTorch 2\.9 or newer"):
        miofind.torch.enable()


def test_the_environment_switches_it_off(
    cpu_handle: Handle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MIOFIND_TORCH", "0")
    made = _enabled(cpu_handle)
    conv2d(X, W)
    assert (made.is_enabled, made.plans) == (False, ())
    assert "MIOFIND_TORCH=0" in caplog.text
    made.disable()


@pytest.mark.parametrize("on_miss", ["auto", "fallback", "error"])
def test_the_environment_has_misses_measured_whatever_is_enabled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_miss: str
) -> None:
    """A script's own `enable()` counted on top of it, and nothing was measured."""
    monkeypatch.setenv("MIOFIND_TORCH", "tune")
    handle = Handle("cpu", database=tmp_path / "finddb.db")
    with handle, _enabled(handle, on_miss, only="ConvCpuDirect", directions="forward") as made:
        conv2d(X, W.clone().requires_grad_()).sum().backward()
        solutions = [part.solution for plan in made.plans for part in plan.parts]
        assert [solution and solution.solver_id for solution in solutions] == ["ConvCpuDirect", None]
        assert solutions[0].samples > 0
        assert "backward_weights is not among the directions" in _reason(made)


def test_the_environment_leaves_a_program_s_own_recording(cpu_handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIOFIND_TORCH", "tune")
    with _enabled(cpu_handle, "record") as made:
        conv2d(X, W)
        assert list(made.report().missing) == [ProblemDescription.convolution(x=X.shape, w=W.shape)]


def test_a_recorded_program_enables_nothing(
    cpu_handle: Handle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own `enable()` took the calls, and they were not recorded."""
    monkeypatch.setenv("MIOFIND_TORCH", "record")
    problem = ProblemDescription.convolution(x=X.shape, w=W.shape)
    recording = dispatcher.record_program()
    try:
        with _enabled(cpu_handle, dtypes="float64") as made:
            conv2d(X, W)
            assert (made.is_enabled, made.plans) == (False, ())
            assert "MIOFIND_TORCH=record is set: miofind.torch.enable() leaves" in caplog.text
        miofind.torch.disable()
        dispatcher.forget_plans()
        conv2d(X, W)
        assert recording.report().missing == {problem: 2}
    finally:
        recording.disable()
    assert dispatcher.current("cpu") is None


def test_a_program_that_nobody_records_is_told_so(
    cpu_handle: Handle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MIOFIND_TORCH", "record")
    with _enabled(cpu_handle) as made:
        assert made.is_enabled
    assert "MIOFIND_TORCH=record is set, and nothing records this process" in caplog.text


def test_the_environment_can_ask_for_nothing_else(cpu_handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    """MIOFIND_TORCH=tuen enabled miofind as if it had not been set."""
    monkeypatch.setenv("MIOFIND_TORCH", "tuen")
    with pytest.raises(InvalidOptionError, match="MIOFIND_TORCH='tuen' must be one of 0, 1, record, tune"):
        _enabled(cpu_handle)
    assert dispatcher.current("cpu") is None
    for value in ("1", ""):
        monkeypatch.setenv("MIOFIND_TORCH", value)
        with _enabled(cpu_handle) as made:
            assert (made.is_enabled, made.settings.on_miss) == (True, "estimate")


@pytest.mark.parametrize(
    "spelling",
    ["half", "f2", "torch.float16", torch.half, np.float16, np.dtype("f2"), DataType.FLOAT16],
    ids=str,
)
def test_an_element_type_is_spelt_as_anywhere(spelling: Any, cpu_handle: Handle) -> None:
    """`dtypes` took PyTorch's own and full names alone."""
    for given in (spelling, [spelling, ml_dtypes.bfloat16, "bf16"]):
        with _enabled(cpu_handle, dtypes=given) as made:
            expected = {DataType.FLOAT16} if given is spelling else {DataType.FLOAT16, DataType.BFLOAT16}
            assert made.settings.dtypes == expected


def _reason(made: Override) -> str:
    """Why PyTorch ran the last call."""
    (part,) = made.plans[-1].parts
    assert part.launch is None
    return part.reason


def test_what_is_left_to_pytorch_says_why(cpu_handle: Handle) -> None:
    with _enabled(cpu_handle, dtypes=[torch.float32], directions="forward") as made:
        conv2d(X.double(), W.double())
        assert "float64 is not among the dtypes" in _reason(made)
        conv2d(X[:0], W)
        assert "empty" in _reason(made)
        conv2d(X, W.clone().requires_grad_()).sum().backward()
        assert "backward_weights is not among the directions" in _reason(made)
    with pytest.raises(RuntimeError, match="should be the same"), _enabled(cpu_handle):
        conv2d(X, W.double())


def test_pytorch_refuses_what_it_refuses_without_miofind(override_on_cpu: Override) -> None:
    for bias in (torch.randn(3), torch.randn(8, 1)):
        with pytest.raises(RuntimeError, match="bias"):
            conv2d(X, W, bias)
    with pytest.raises(RuntimeError, match="Kernel size"):
        conv2d(X[..., :2], W)
    with pytest.raises(RuntimeError, match=r"to have 4 channels|expected input"):
        conv2d(X[:, :3], W)
    assert _own(override_on_cpu) == 0


def test_switches_of_pytorch_are_obeyed_at_once(override_on_cpu: Override) -> None:
    conv2d(X, W)
    with torch.backends.cudnn.flags(enabled=False):
        conv2d(X, W)
    assert "cudnn.enabled" in _reason(override_on_cpu)
    with torch.backends.cudnn.flags(enabled=True, depthwise_kernel="native"):
        conv2d(X, W[:, :1], groups=4)
        assert "depthwise_kernel" in _reason(override_on_cpu)
        conv2d(X, W)
    assert _own(override_on_cpu) == 2


def test_a_failing_solution_leaves_its_calls_to_pytorch(
    override_on_cpu: Override, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run, is_gone = _HostInvoker.run, False

    def may_fail(*arguments: Any) -> None:
        if is_gone:
            raise LaunchError("no such device any more")
        run(*arguments)

    monkeypatch.setattr(_HostInvoker, "run", may_fail)
    native = conv2d(X, W)
    is_gone = True
    for _ in range(2):
        assert torch.allclose(conv2d(X, W), native, atol=1e-4)
    assert "no such device any more" in _reason(override_on_cpu)
    assert caplog.text.count("own kernel runs from now on") == 1
    assert (_own(override_on_cpu), override_on_cpu.report().calls) == (1, 3), "the call before counts as it ran"


def test_a_planner_that_raises_leaves_calls_to_pytorch(
    override_on_cpu: Override, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: Any, **keywords: Any) -> None:
        raise KeyError("unforeseen")

    for name in ("_refuse_shapes", "find_solutions"):
        override_on_cpu.forget_plans()
        with monkeypatch.context() as patch:
            patch.setattr(plans, name, fail)
            conv2d(X, W)
        assert "KeyError" in _reason(override_on_cpu)
    assert "unforeseen" in caplog.text


def test_a_workspace_that_there_is_no_memory_for_leaves_a_call_to_pytorch(
    override_on_cpu: Override, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's own kernel may do without; later calls are miofind's again."""
    expected, run, is_full = conv2d(X, W), _HostInvoker.run, True
    override_on_cpu.forget_plans()

    def tried(*arguments: Any) -> None:
        if is_full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        run(*arguments)

    monkeypatch.setattr(_HostInvoker, "run", tried)
    torch.testing.assert_close(conv2d(X, W), expected)
    torch.testing.assert_close(miofind.torch.convolution(X, W, activation="relu"), expected.relu())
    (plan,), (fused,) = override_on_cpu.plans, fused_plans.plans()
    lacking = (plan.parts[0].without_memory, fused.part.without_memory)
    assert lacking == (2, 1), "the fused call's convolution is tried, too"
    is_full = False
    for _ in range(2):
        torch.testing.assert_close(conv2d(X, W), expected)
    torch.testing.assert_close(miofind.torch.convolution(X, W, activation="relu"), expected.relu())
    lacking = (plan.parts[0].without_memory, fused.part.without_memory)
    assert lacking == (3, 1), "after two in a row one call asks for none"
    assert miofind.torch.report().own_calls == 2


@pytest.mark.parametrize("call", ["plain", "fused"])
def test_a_workspace_is_asked_for_less_and_less_where_there_is_no_memory(
    override_on_cpu: Override, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """PyTorch gives its whole cache back each time that it finds none."""
    expected, run, tries, is_full = conv2d(X, W), _HostInvoker.run, 0, True
    override_on_cpu.forget_plans()

    def tried(invoker: Any, *arguments: Any) -> None:
        nonlocal tries
        if bool(invoker.problem.epilogue) is (call == "fused"):  # PyTorch computes such a call by plain ones
            tries += 1
            if is_full:
                raise torch.OutOfMemoryError("CUDA out of memory")
        run(invoker, *arguments)

    def compute(times: int) -> int:
        nonlocal tries
        tries = 0
        for _ in range(times):
            if call == "plain":
                torch.testing.assert_close(conv2d(X, W), expected)
            else:
                y = miofind.torch.convolution(X, W, activation="relu")
                torch.testing.assert_close(y, expected.relu())
        return tries

    monkeypatch.setattr(_HostInvoker, "run", tried)
    assert compute(16) == 5, "calls 1, 2, 4, 8 and 16"
    is_full = False
    assert compute(16) == 1, "call 32"
    assert compute(5) == 5
    is_full = True
    assert compute(16) == 5
    reasons = miofind.torch.report().reasons
    assert reasons["there was no memory for its workspace"] == 47


def test_an_enable_that_fails_enables_nothing(cpu_handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    use, failing = dispatcher._Router.use, dispatcher._routers["cuda"]

    def used(self: Any, made: Override | None) -> None:
        if self is failing and made is not None:
            raise RuntimeError("not on this PyTorch")
        use(self, made)

    monkeypatch.setattr(dispatcher._Router, "use", used)
    with pytest.raises(RuntimeError, match="not on this PyTorch"):
        miofind.torch.enable("estimate", handle=cpu_handle, devices=("cpu", "cuda"))
    assert dispatcher.current("cpu") is dispatcher.current("cuda") is None
    assert dispatcher._enabled == []


def test_a_disabled_override_is_not_kept(cpu_handle: Handle) -> None:
    with miofind.torch.use("estimate", handle=cpu_handle, devices="cpu") as made:
        conv2d(X, W)
        miofind.torch.convolution(X, W, activation="relu")
        ended = weakref.ref(made)
    del made
    gc.collect()
    assert ended() is None


def test_a_forked_child_waits_for_none_of_its_parents_threads(cpu_handle: Handle) -> None:
    locks = (dispatcher._switching, fused_plans._lock)
    with ExitStack() as held:
        for lock in locks:
            held.enter_context(lock)

        def work() -> None:
            assert str(miofind.torch.report())
            with miofind.torch.use("fallback", handle=cpu_handle, devices="cpu"):
                miofind.torch.convolution(X, W, activation="relu")

        assert forked_by_a_thread(work) == 0


def test_misses(cpu_handle: Handle) -> None:
    for policy in ("auto", "fallback", "record"):
        with _enabled(cpu_handle, policy) as made:
            for _ in range(3):
                conv2d(X, W)
            problem = ProblemDescription.convolution(x=X.shape, w=W.shape)
            assert (_own(made), made.report().missing) == (0, {problem: 3})
    with _enabled(cpu_handle, "error") as made, pytest.raises(NoSolutionError, match="on_miss is 'error'"):
        conv2d(X, W)


def test_benchmark_measures_what_is_missing(tmp_path: Path) -> None:
    handle = Handle("cpu", database=tmp_path / "finddb.db")
    with handle, _enabled(handle, "auto", only="ConvCpuDirect") as made:
        conv2d(X, W)
        assert _own(made) == 0
        with torch.backends.cudnn.flags(enabled=True, benchmark=True):
            conv2d(X, W)
        assert (_own(made), made.plans[-1].parts[0].solution.samples > 0) == (1, True)
        made.forget_plans()
        conv2d(X, W)
        assert _own(made) == 1, "the FindDB has an answer now"


def test_nothing_is_made_ready_while_a_graph_is_captured(
    override_on_cpu: Override, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(plans, "is_capturing", lambda device: True)
        conv2d(X, W)
        assert "its kernels were not loaded before a CUDA graph" in _reason(override_on_cpu)
    conv2d(X, W)
    report = override_on_cpu.report()
    assert (report.own_calls, report.calls, report.missing) == (1, 2, {})


@pytest.mark.parametrize("call", [conv2d, miofind.torch.convolution], ids=["operator", "fused"])
@pytest.mark.parametrize(("on_miss", "benchmark"), [("find", False), ("auto", True)])
def test_what_would_be_measured_is_noted_while_a_graph_is_captured(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    on_miss: str,
    benchmark: bool,
    call: Any,
) -> None:
    """The report had neither the calls nor what was missing, and no warning was logged."""
    handle = Handle("cpu", database=tmp_path / "finddb.db")
    plans._warn_of_capture.cache_clear()
    fused_plans.forget()
    problem = ProblemDescription.convolution(x=X.shape, w=W.shape)
    with (
        handle,
        torch.backends.cudnn.flags(enabled=True, benchmark=benchmark),
        _enabled(handle, on_miss, only="ConvCpuDirect") as made,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(plans, "is_capturing", lambda device: True)
            captured = [call(X, W) for _ in range(2)]
        report, is_fused = miofind.torch.report(), call is not conv2d
        # PyTorch runs a fused call by its own convolution, which counts, too.
        expected = 4 if is_fused else 2
        assert (report.own_calls, report.calls, report.missing) == (0, expected, {problem: expected})
        assert "nothing is measured while a CUDA graph is captured" in _reason(made)
        assert caplog.text.count("a CUDA graph is captured of convolutions that are not measured yet") == 1
        after = call(X, W)
        assert miofind.torch.report().own_calls == 1, "the next call finds"
    for y in captured:
        torch.testing.assert_close(y, after)


def test_an_answer_with_a_bias_is_taken_after_a_capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although no FindDB has an answer without it, which decides what runs meanwhile."""
    handle, bias = Handle("cpu", database=tmp_path / "finddb.db"), torch.randn(8)
    problem = ProblemDescription.convolution(x=X.shape, w=W.shape, epilogue="bias")
    with handle, _enabled(handle, "fallback", only="ConvCpuDirect") as made:
        found = find_solutions(problem, options=made.settings.options(deterministic=False), handle=handle)
        monkeypatch.setattr(plans, "looked_up", lambda asked, *_, **__: found if asked == problem else None)
        with monkeypatch.context() as patch:
            patch.setattr(plans, "is_capturing", lambda device: True)
            conv2d(X, W, bias)
        assert "its kernels were not loaded before a CUDA graph" in _reason(made)
        assert made.report().missing == {}, "nobody lacks the one without a bias"
        assert torch.allclose(conv2d(X, W, bias), conv2d(X, W) + bias.view(1, -1, 1, 1), atol=1e-4)
        assert _own(made) == 1


def test_nobody_lacks_the_bare_problem_of_a_bias_that_pytorch_is_faster_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, bias = Handle("cpu", database=tmp_path / "finddb.db"), torch.randn(8)
    problem = ProblemDescription.convolution(x=X.shape, w=W.shape, epilogue="bias")
    with handle, _enabled(handle, "fallback", only="ConvCpuDirect") as made:
        found = find_solutions(problem, options=made.settings.options(deterministic=False), handle=handle)
        monkeypatch.setattr(plans, "looked_up", lambda asked, *_, **__: found if asked == problem else None)
        slow = Comparison(time_ms=found[0].time_ms / 2, measured_at="2026-01-31T12:00:00.000000Z")
        monkeypatch.setattr(plans.comparisons, "compared", lambda *asked: slow)
        conv2d(X, W, bias)
        told = f"PyTorch's own kernel is 2.00 times as fast as {found[0].solver_id}, measured 2026-01-31"
        assert told in _reason(made)
        assert made.report().missing == {}
        monkeypatch.setattr(plans.comparisons, "compared", lambda *asked: None)

        def refuse(self: Any, *_: Any, **__: Any) -> Any:
            raise plans.Unserved("cannot be compiled")

        monkeypatch.setattr(plans.ReadySolutions, "next", refuse)
        made.forget_plans()
        conv2d(X, W, bias)
        assert made.report().missing == {problem.bare: 1}, "an answer that cannot be used is none"


def test_pytorch_runs_what_gains_by_a_solution_alone_that_may_not_run(tmp_path: Path) -> None:
    problem = ProblemDescription.convolution(x=X.shape, w=W.shape)
    handle = Handle("cpu", database=tmp_path / "finddb.db")
    with handle, _enabled(handle, "find", only="ConvCpuDirect") as made:
        conv2d(X, W)
        assert _own(made) == 1
        (solution,) = find_solutions(problem, options=made.settings.options(deterministic=False), handle=handle)
        faster = copy.copy(solution)
        object.__setattr__(faster, "time_ms", solution.time_ms / 2)
        comparisons.note(faster, handle, Flags.of(state(), on_gpu=False), 1.0, 1.1)
        made.forget_plans()
        conv2d(X, W)
        assert "PyTorch's own kernel is 1.82 times as fast as ConvCpuDirect" in _reason(made)


def test_cudnn_is_left_to_pytorch_unless_ours_gains(cpu_handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_cudnn(problem: ProblemDescription, **arguments: Any) -> Any:
        first, second, *_ = found(problem, **arguments)
        object.__setattr__(first, "time_ms", 1.0)
        object.__setattr__(second, "time_ms", 1.2)
        for name, value in (("library", Library.CUDNN), ("samples", 10)):
            object.__setattr__(second, name, value)
        return [first, second]

    found = plans.find_solutions
    monkeypatch.setattr(plans, "find_solutions", with_cudnn)
    cpu_handle.forget()
    for least_gain, is_ours in ((1.0, True), (1.15, True), (1.25, False)):
        with _enabled(cpu_handle, min_gain=least_gain) as made:
            conv2d(X, W)
            assert (_own(made) == 1) is is_ours
    assert "1.20 times as fast as cuDNN" in _reason(made)
    cpu_handle.forget()


def test_plans_do_not_grow_with_shapes(override_on_cpu: Override, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "MAX_PLANS", 20)
    w = torch.randn(1, 1, 1)
    for length in range(1, 100):
        conv1d(torch.randn(1, 1, length), w)
    assert len(override_on_cpu.plans) == 20
    assert [plan.parts[0].problem.x.shape[2] for plan in override_on_cpu.plans] == [*range(80, 100)]


def test_threads_share_plans(override_on_cpu: Override) -> None:
    def run() -> None:
        ready.wait(LIMIT_S)
        for _ in range(20):
            results.append(conv2d(X, W, padding=1))

    results: list[Any] = []
    ready = threading.Barrier(4)
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert len(results) == 80
    assert all(torch.equal(result, results[0]) for result in results)
    assert len(override_on_cpu.plans) == 1


def test_models_stay_as_they_are(override_on_cpu: Override) -> None:
    model = torch.nn.Conv2d(4, 8, 3)
    model(X)
    twin = copy.deepcopy(model)
    assert type(twin) is torch.nn.Conv2d
    assert torch.equal(twin(X), model(X))
    assert _own(override_on_cpu) == 3


def test_reports_say_what_ran(override_on_cpu: Override) -> None:
    conv2d(X, W)
    conv2d(X[:0], W)
    report = override_on_cpu.report()
    assert (report.calls, report.own_calls) == (2, 1)
    assert "computed 1 of 2" in str(report)
    assert "1 left to PyTorch: a tensor of it is empty" in str(report)
    assert miofind.torch.report() == report


_LEFT_ON = """
import threading, torch, miofind, miofind.torch
miofind.torch.enable("estimate", devices="cpu", handle=miofind.Handle("cpu"))
model = torch.nn.Conv2d(4, 8, 3)
def train():
    for _ in range(3):
        model(torch.randn(2, 4, 6, 6)).sum().backward()
threads = [threading.Thread(target=train) for _ in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
report = miofind.torch.report()
print(report.calls, report.own_calls)
"""


_SWITCHED = """
import threading

import torch

import miofind.torch

x, w = torch.randn(2, 4, 9, 8), torch.randn(6, 4, 3, 3)
ended, failed = threading.Event(), []

def convolve():
    while not ended.is_set():
        torch.nn.functional.conv2d(x, w.clone().requires_grad_()).sum().backward()

def switch():
    for _ in range(4000):
        with miofind.torch.use("record", devices="cpu"):
            pass

threading.excepthook = failed.append
workers = [threading.Thread(target=convolve) for _ in range(2)]
switching = [threading.Thread(target=switch) for _ in range(2)]
for thread in workers + switching:
    thread.start()
for thread in switching:
    thread.join()
ended.set()
for thread in workers:
    thread.join()
print(failed, miofind.torch.override.dispatcher.current("cpu"))
"""


def test_threads_convolve_while_others_enable_and_disable() -> None:
    """PyTorch freed a kernel that a thread was about to run."""
    ended = subprocess.run(
        [sys.executable, "-c", _SWITCHED], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, "[] None\n"), ended.stderr


def test_a_process_that_leaves_it_enabled_ends_cleanly() -> None:
    command = [sys.executable, "-W", "error", "-c", _LEFT_ON]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "12 12\n", "")


@pytest.mark.parametrize("devices", [None, 3, "tpu", ()])
def test_devices_that_are_none_of_pytorchs_are_refused(devices: Any) -> None:
    with pytest.raises(InvalidOptionError, match="must be some of cuda, cpu"):
        miofind.torch.enable(devices=devices)
