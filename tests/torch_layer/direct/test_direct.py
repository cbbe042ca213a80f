"""The direct path, built here, over a driver whose kernels are the CPU place's solutions."""

from __future__ import annotations

import contextlib
import itertools
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import conv2d, conv_transpose2d
from torch_layer.direct.driver import FORMS as STEPS
from torch_layer.direct.driver import Driver
from torch_layer.direct.profiles import profiled

from miofind import Handle
from miofind.core.problem import Direction
from miofind.errors import CompileError
from miofind.launch.invoker import _HostInvoker
from miofind.torch import direct, use
from miofind.torch.direct import DirectPath
from miofind.torch.override import dispatcher
from miofind.torch.override.dispatcher import Override
from miofind.torch.override.launches import Launches

HALF = {"dtype": torch.float16}


@pytest.fixture
def enabled(driver: Driver, cpu_handle: Handle) -> Iterator[Override]:
    with use("estimate", handle=cpu_handle, devices="cpu") as made:
        yield made


def _gradients(y: Any, *inputs: Any) -> tuple[Any, ...]:
    return torch.autograd.grad(y, inputs, torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape))


FORMS = itertools.product(
    [torch.float16, torch.bfloat16, torch.float64],
    [False, True],
    [conv2d, conv_transpose2d],
    [torch.contiguous_format, torch.channels_last],
)


@pytest.mark.parametrize(
    ("dtype", "with_bias", "call", "memory_format"),
    [  # Every third: each form of a call with one of the dtypes.
        pytest.param(*form, marks=pytest.mark.full_matrix if number % 3 else []) for number, form in enumerate(FORMS)
    ],
)
def test_the_third_call_is_launched_without_python_and_gives_the_same(
    enabled: Override, driver: Driver, dtype: Any, with_bias: bool, call: Any, memory_format: Any
) -> None:
    results = []
    for i in range(4):
        torch.manual_seed(7)
        x = torch.randn(2, 4, 7, 6, dtype=dtype).to(memory_format=memory_format).requires_grad_()
        w = (0.3 * torch.randn(4, 6, 3, 3, dtype=dtype) if call is conv_transpose2d else
             0.3 * torch.randn(6, 4, 3, 3, dtype=dtype)).to(memory_format=memory_format).requires_grad_()  # fmt: skip
        bias = torch.randn(6, dtype=dtype).requires_grad_() if with_bias else None
        keep = [torch.empty(64 * i)]  # so that addresses differ
        y = call(x, w, bias, padding=1)
        given = (x, w) if bias is None else (x, w, bias)
        dy = torch.linspace(-1, 1, y.numel(), dtype=dtype).reshape(y.shape).to(memory_format=memory_format)
        results.append((y.detach(), *torch.autograd.grad(y, given, dy)))
        del keep
    assert driver.launches >= 2 * 3, "y, dx and dw of two calls"
    for later in results[1:]:
        for first, other in zip(results[0], later, strict=True):
            assert other.stride() == first.stride()
            torch.testing.assert_close(other, first, rtol=0, atol=0)
    assert {count.calls for count in enabled.report().counts} == {4}


@pytest.fixture
def finding(driver: Driver, tmp_path: Path) -> Iterator[Override]:
    """Where a bias is part of what is solved."""
    handle = Handle("cpu", database=tmp_path / "finddb.db")
    with handle, use("find", handle=handle, devices="cpu") as made:
        yield made


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_steps_of_kernels_and_libraries_give_the_same(
    finding: Override, driver: Driver, step: str, with_bias: bool
) -> None:
    driver.form = step
    results = []
    for i in range(4):
        torch.manual_seed(7)
        keep = [torch.empty(64 * i)]  # so that addresses differ
        x, w = (torch.randn(shape, **HALF).requires_grad_() for shape in ((2, 4, 7, 6), (6, 4, 3, 3)))
        given = (x, w, torch.randn(6, **HALF).requires_grad_()) if with_bias else (x, w)
        y = conv2d(*given, padding=1)
        results.append((y.detach(), *_gradients(y, *given)))
        del keep
    assert driver.launches == 2 * 3, "y, dx and dw of two calls"
    assert driver.packs == 0
    assert driver.biases_set == (2 * 2 if with_bias and step == "product" else 0), "those of y and of dw"
    for later in results[1:]:
        assert all(torch.equal(one, other) for one, other in zip(results[0], later, strict=True))


@pytest.mark.parametrize("step", STEPS)
def test_a_plan_of_cudnn_runs_in_its_own_thread_and_on_its_own_stream(
    enabled: Override, driver: Driver, step: str
) -> None:
    driver.form = step
    x, w = torch.randn(2, 4, 7, 7, **HALF), torch.randn(4, 4, 3, 3, **HALF)
    want = [conv2d(x, w) for _ in range(3)][-1]
    assert driver.launches == 1
    results = []
    thread = threading.Thread(target=lambda: results.append(conv2d(x, w)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], want)
    assert driver.launches == (1 if step == "convolution" else 2)
    driver.stream, before = 5, driver.launches
    assert torch.equal(conv2d(x, w), want)
    assert driver.launches == (before if step == "convolution" else before + 1)
    driver.stream, before = 0, driver.launches
    assert torch.equal(conv2d(x, w), want)
    assert driver.launches == before + 1, "the plan stays"


@pytest.mark.parametrize("step", STEPS)
def test_calls_are_launched_into_the_current_stream(enabled: Override, driver: Driver, step: str) -> None:
    driver.form = step
    x, w = (torch.randn(shape, **HALF).requires_grad_() for shape in ((2, 4, 7, 7), (4, 4, 3, 3)))
    results = []
    for stream in (7, 0, 8):
        driver.stream = stream  # Python has set it by an earlier call
        driver.use(stream)
        for _ in range(3):
            y = conv2d(x, w)
            results.append((y.detach(), *_gradients(y, x, w)))
    assert driver.streams == [7] * 3 + [0] * 9 + [8] * 9, "y, dx and dw, from the third call on"
    assert [plan.python_calls for plan in enabled.plans] == [2, 2]
    assert all(torch.equal(one, other) for each in results for one, other in zip(each, results[0], strict=True))


def test_threads_on_streams_of_their_own_share_a_plan(finding: Override, driver: Driver) -> None:
    w, bias = torch.randn(6, 4, 3, 3, **HALF), torch.randn(6, **HALF)
    images = {stream: torch.randn(2, 4, 7, 7, **HALF) for stream in (7, 8)}
    want = {stream: [conv2d(x, w, bias) for _ in range(3)][-1] for stream, x in images.items()}
    before, results, begun = len(driver.streams), dict[int, list[Any]](), threading.Barrier(2)

    def work(stream: int) -> None:
        driver.use(stream)
        begun.wait()
        results[stream] = [conv2d(images[stream], w, bias) for _ in range(20)]

    threads = [threading.Thread(target=work, args=(stream,)) for stream in images]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(driver.streams[before:]) == [7] * 20 + [8] * 20
    assert [plan.python_calls for plan in finding.plans] == [2]
    assert all(torch.equal(each, want[stream]) for stream, found in results.items() for each in found)


def test_calls_in_a_graph_go_through_python_and_leave_later_ones_as_they_are(enabled: Override, driver: Driver) -> None:
    x, w = torch.randn(2, 4, 7, 7, **HALF), torch.randn(4, 4, 3, 3, **HALF)
    driver.use(7)
    driver.captured = {7}
    want = [conv2d(x, w) for _ in range(3)][-1]
    (plan,) = enabled.plans
    assert (plan.python_calls, plan.direct_plans) == (3, [])
    driver.captured = {8}
    results = [conv2d(x, w) for _ in range(2)]
    assert (plan.python_calls, driver.streams) == (4, [7])
    driver.captured = {7}
    results.append(conv2d(x, w))
    assert (plan.python_calls, driver.streams) == (5, [7])
    driver.captured = set()
    results.append(conv2d(x, w))
    assert (plan.python_calls, driver.streams) == (5, [7, 7])
    assert all(torch.equal(each, want) for each in results)


@pytest.mark.parametrize("question", ["current", "capture"])
def test_a_stream_of_which_nothing_is_told_leads_through_python(
    enabled: Override, driver: Driver, question: str
) -> None:
    x, w = torch.randn(2, 4, 7, 7, **HALF), torch.randn(4, 4, 3, 3, **HALF)
    driver.use(7)
    want = [conv2d(x, w) for _ in range(3)][-1]
    setattr(driver, f"{question}_status", 906)  # CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
    assert torch.equal(conv2d(x, w), want)
    assert driver.launches == 1
    setattr(driver, f"{question}_status", 0)
    assert torch.equal(conv2d(x, w), want)
    assert driver.launches == 2, "the plan stays"


def test_products_of_two_threads_keep_their_biases_apart(finding: Override, driver: Driver) -> None:
    """Calls that differ in strides that mean nothing have plans of their own, and one invoker."""
    driver.form, driver.between = "product", lambda: time.sleep(0.01)
    x, w = torch.randn(1, 4, 7, 7, **HALF), torch.randn(6, 4, 3, 3, **HALF)
    other = x.as_strided(x.shape, (999, 49, 7, 1))
    calls = [(x, torch.zeros(6, **HALF)), (other, torch.full((6,), 100.0, **HALF))]
    want = [[conv2d(image, w, bias) for _ in range(3)][-1] for image, bias in calls]
    results: list[list[Any]] = [[], []]

    def work(place: int) -> None:
        image, bias = calls[place]
        results[place] += [conv2d(image, w, bias) for _ in range(8)]

    threads = [threading.Thread(target=work, args=(place,)) for place in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert driver.launches == 2 + 16
    assert all(torch.equal(each, right) for found, right in zip(results, want, strict=True) for each in found)


def test_a_plan_of_cudnn_whose_lease_has_ended_is_run_by_nobody(enabled: Override, driver: Driver) -> None:
    """Threads that are not Python's give their leases back between calls."""
    driver.form = "convolution"
    x, w = torch.randn(2, 4, 7, 7, **HALF), torch.randn(4, 4, 3, 3, **HALF)
    want = [conv2d(x, w) for _ in range(3)][-1]
    assert driver.launches == 1
    driver.leases_ended.value += 1
    assert torch.equal(conv2d(x, w), want)
    assert driver.launches == 1


@pytest.mark.parametrize("direction", [Direction.BACKWARD_DATA, Direction.BACKWARD_WEIGHTS], ids=str)
def test_nothing_of_a_backward_call_is_launched_that_python_is_to_run(
    enabled: Override, driver: Driver, monkeypatch: pytest.MonkeyPatch, direction: Direction
) -> None:
    plain = driver.flat

    def flat(invoker: Any, *parameters: Any) -> Any:
        driver.form = "convolution" if invoker.problem.direction is direction else "kernel"
        return plain(invoker, *parameters)

    monkeypatch.setattr(driver, "flat", flat)
    x, w = (torch.randn(shape, **HALF).requires_grad_() for shape in ((2, 4, 7, 6), (6, 4, 3, 3)))
    y = conv2d(x, w)

    def step() -> Any:
        return torch.autograd.grad(y, (x, w), torch.ones_like(y), retain_graph=True)

    for _ in range(3):
        step()
    before = driver.launches
    assert before == 2
    driver.stream = 5
    step()
    assert driver.launches == before, "neither dx nor dw without the other"


@pytest.mark.parametrize("kept", ["dx", "dw"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_result_of_pytorchs_own_beside_one_of_ours_goes_there_without_python(
    driver: Driver, cpu_handle: Handle, kept: str, with_bias: bool
) -> None:
    x, w, b = (torch.randn(shape, **HALF).requires_grad_() for shape in ((2, 4, 7, 6), (6, 4, 3, 3), (6,)))
    given = (x, w, b) if with_bias else (x, w)

    def step() -> tuple[Any, ...]:
        return _gradients(conv2d(*given, padding=1), *given)

    want = step()
    direction = {"dx": "backward_data", "dw": "backward_weights"}[kept]
    with use("estimate", handle=cpu_handle, devices="cpu", directions=[direction]) as made:
        results = [step() for _ in range(5)]
        backward = made.plans[-1]
        assert (backward.python_calls, backward.calls) == (2, 5)
        solved = {count.direction for count in made.report().counts if count.solver_id}
    assert driver.launches == 3
    assert solved == {direction}
    for result in results:
        for got, right in zip(result, want, strict=True):
            torch.testing.assert_close(got, right, rtol=2e-2, atol=2e-2)
        assert all(torch.equal(one, other) for one, other in zip(result, results[0], strict=True))


def test_a_step_that_has_no_plain_form_goes_through_python(
    enabled: Override, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_HostInvoker, "flat", lambda self, *parameters: None)
    x, w = torch.randn(2, 4, 7, 7, **HALF), torch.randn(4, 4, 3, 3, **HALF)
    results = [conv2d(x, w) for _ in range(4)]
    assert all(torch.equal(results[0], each) for each in results)
    (plan,) = enabled.plans
    assert (plan.python_calls, plan.generation, driver.launches) == (4, None, 0)


def test_calls_that_differ_go_on_to_python(enabled: Override, driver: Driver) -> None:
    x, w = torch.randn(2, 4, 7, 7, **HALF), torch.randn(4, 4, 3, 3, **HALF)
    for _ in range(3):
        conv2d(x, w)
    before = driver.launches
    assert before
    others = [
        lambda: conv2d(x, w, padding=1),
        lambda: conv2d(x, w, stride=2),
        lambda: conv2d(x, w, dilation=2),
        lambda: conv2d(x, w[:, :2].contiguous(), groups=2),
        lambda: conv2d(x[:1], w),
        lambda: conv2d(x.bfloat16(), w.bfloat16()),
        lambda: conv2d(x, w, torch.zeros(4, **HALF)),
        lambda: conv2d(x.to(memory_format=torch.channels_last), w),
        lambda: conv_transpose2d(x, w),
    ]
    for other in others:
        other()
    assert driver.launches == before
    conv2d(x, w)
    assert driver.launches == before + 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("switch", [{"deterministic": True}, {"allow_tf32": False}, {"benchmark": True}], ids=str)
def test_a_switch_of_pytorch_leads_through_python(
    enabled: Override, driver: Driver, switch: dict[str, bool], dtype: Any
) -> None:
    x, w = torch.randn(2, 4, 7, 7, dtype=dtype), torch.randn(4, 4, 3, 3, dtype=dtype)
    for _ in range(3):
        conv2d(x, w)
    before, plans = driver.launches, len(enabled.plans)
    with torch.backends.cudnn.flags(enabled=True, **switch):
        conv2d(x, w)
    assert (before, driver.launches) == (1, 1)
    assert len(enabled.plans) == plans + 1
    conv2d(x, w)
    assert driver.launches == 2


@pytest.fixture
def aligned(enabled: Override, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches take addresses of 32 bytes alone."""
    made = Launches._direct
    monkeypatch.setattr(Launches, "_direct", lambda self, invoker: made(self, invoker)._replace(alignment_bytes=32))


def test_a_misaligned_tensor_goes_through_python(aligned: None, driver: Driver) -> None:
    memory, w = torch.randn(2 * 4 * 7 * 7 + 64, **HALF), torch.randn(4, 4, 3, 3, **HALF)
    assert w.data_ptr() % 32 == 0, "as PyTorch's allocator aligns"
    start = -memory.data_ptr() % 64 // 2
    x, shifted = (memory[at : at + 2 * 4 * 7 * 7].view(2, 4, 7, 7) for at in (start, start + 1))
    want = [conv2d(x, w) for _ in range(3)]
    before = driver.launches
    got = conv2d(shifted, w)
    assert driver.launches == before
    assert torch.equal(got, conv2d(shifted.clone(), w))
    assert torch.equal(want[0], want[2])


@pytest.mark.parametrize("step", STEPS)
def test_what_fails_without_python_is_computed_with_it(enabled: Override, driver: Driver, step: str) -> None:
    driver.form = step
    x = torch.randn(2, 4, 7, 7, **HALF).requires_grad_()
    w = torch.randn(4, 4, 3, 3, **HALF).requires_grad_()
    for _ in range(3):
        y = conv2d(x, w)
        want = (y.detach(), *_gradients(y, x, w))
    driver.status = 700
    before = driver.launches
    y = conv2d(x, w)
    got = (y.detach(), *_gradients(y, x, w))
    assert driver.launches == before + 2, "one of y, one of dx"
    driver.status = 0
    assert all(torch.equal(one, other) for one, other in zip(want, got, strict=True))
    assert driver.packs == 0


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """Less than 1 GiB more than this process has by now."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 29), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_workspace_is_asked_for_less_and_less_without_python(
    enabled: Override, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's own kernel computes the calls between, and the plan stays."""
    x, w = torch.randn(2, 4, 7, 7, **HALF), torch.randn(4, 4, 3, 3, **HALF)
    plan = direct.DirectPath.plan

    def with_much(self: Any, launches: Any) -> Any:
        return plan(self, [(place, launch._replace(workspace_bytes=1 << 30)) for place, launch in launches])

    monkeypatch.setattr(direct.DirectPath, "plan", with_much)
    for _ in range(4):
        want = conv2d(x, w)
    (made,) = enabled.plans
    asked, before = made.python_calls, driver.launches
    assert before > 0
    with little_memory():
        for _ in range(16):  # it is asked for in calls 1, 2, 4, 8 and 16
            torch.testing.assert_close(conv2d(x, w), want, rtol=2e-3, atol=2e-3)
    assert driver.launches == before
    launched = []
    for _ in range(18):
        assert torch.allclose(conv2d(x, w), want, rtol=2e-3, atol=2e-3)
        launched.append(driver.launches - before)
    assert launched == [0] * 15 + [1, 2, 3]
    assert made.python_calls == asked
    assert enabled.report().reasons == {"there was no memory for its workspace": 31}


def test_a_thread_without_a_context_gets_it_from_python_once(enabled: Override, driver: Driver) -> None:
    x, w = torch.randn(2, 4, 7, 7, **HALF), torch.randn(4, 4, 3, 3, **HALF)
    for _ in range(3):
        want = conv2d(x, w)
    driver.status = 201  # CUDA_ERROR_INVALID_CONTEXT
    assert torch.equal(conv2d(x, w), want)
    driver.status, before = 0, driver.launches
    assert torch.equal(conv2d(x, w), want)
    assert driver.launches == before + 1, "the plan stays"


@pytest.mark.parametrize(
    ("one", "other"),
    [(([2], [1, 1], [1]), ([2, 1], [1], [1])), (([1], [1, 2], [1, 1]), ([1, 1], [2, 1], [1]))],
)
def test_numbers_for_all_dimensions_and_for_each_are_told_apart(
    enabled: Override, driver: Driver, one: Any, other: Any
) -> None:
    """Stride, padding and dilation of the two read alike one after another."""
    x, w = torch.randn(2, 4, 9, 9, **HALF), torch.randn(4, 4, 3, 3, **HALF)

    def call(geometry: Any) -> Any:
        return torch.ops.aten.convolution(x, w, None, *geometry, False, [0], 1)

    results = [[call(geometry) for _ in range(3)] for geometry in (one, other)]
    enabled.disable()
    for geometry, found in zip((one, other), results, strict=True):
        for y in found:
            torch.testing.assert_close(y, call(geometry), rtol=1e-2, atol=1e-2)


def test_a_plan_that_was_forgotten_meanwhile_is_refused_and_offered_once_more(
    enabled: Override, driver: Driver, path: DirectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = torch.randn(2, 4, 7, 7, **HALF), torch.randn(4, 4, 3, 3, **HALF)
    made, forgets = path.plan, [True]

    def plan(launches: Any) -> Any:
        if forgets and forgets.pop():
            path.forget()
        return made(launches)

    monkeypatch.setattr(path, "plan", plan)
    for expected in (0, 0, 0, 1):  # planned; offered and refused; offered once more; launched
        conv2d(x, w)
        assert driver.launches == expected


def test_what_pytorch_refuses_is_told(path: DirectPath) -> None:
    with pytest.raises(RuntimeError, match="nonsense"):
        path.enable("nonsense")


def test_nothing_is_launched_that_was_planned_for_another_override(
    enabled: Override, driver: Driver, cpu_handle: Handle
) -> None:
    x, w = torch.randn(2, 4, 7, 7, **HALF), torch.randn(4, 4, 3, 3, **HALF)
    for _ in range(3):
        conv2d(x, w)
    before = driver.launches
    with use("fallback", handle=cpu_handle, devices="cpu") as inner:
        for _ in range(3):
            conv2d(x, w)
        assert inner.report().own_calls == 0
    assert driver.launches == before
    for _ in range(2):
        conv2d(x, w)
    assert driver.launches == before + 1, "the first call hands it over again"
    enabled.forget_plans()
    conv2d(x, w)
    assert driver.launches == before + 1
    enabled.disable()
    assert dispatcher.current("cpu") is None
    conv2d(x, w)
    assert driver.launches == before + 1


def test_what_is_left_to_pytorch_goes_there_without_python(driver: Driver, cpu_handle: Handle) -> None:
    tensors = [torch.randn(shape, **HALF) for shape in ((2, 4, 7, 7), (6, 4, 3, 3), (6,))]
    x, w, b = (tensor.requires_grad_() for tensor in tensors)

    def step() -> tuple[Any, ...]:
        y = conv2d(x, w, b, padding=1)
        return (y.detach(), *_gradients(y, x, w, b))

    want = step()
    with use("fallback", handle=cpu_handle, devices="cpu") as made:
        results = [step() for _ in range(5)]
        assert [plan.python_calls for plan in made.plans] == [2, 2]
        assert [plan.calls for plan in made.plans] == [5, 5]
        with torch.backends.cudnn.flags(enabled=True, depthwise_kernel="native"):
            step()
        assert len(made.plans) == 4, "another switch, another plan"
        assert made.report().own_calls == 0
    for result in results:
        assert all(torch.equal(one, other) for one, other in zip(result, want, strict=True))


def test_a_bias_of_another_shape_is_refused_as_ever(enabled: Override) -> None:
    x, w, b = (torch.randn(shape, **HALF) for shape in ((2, 4, 7, 7), (6, 4, 3, 3), (6,)))
    for _ in range(3):
        conv2d(x, w, b)
    with pytest.raises(RuntimeError, match="bias"):
        conv2d(x, w, b[:, None])


def test_only_results_that_are_wanted_are_computed(enabled: Override, driver: Driver) -> None:
    x, w = torch.randn(2, 4, 7, 7, **HALF), torch.randn(4, 4, 3, 3, **HALF)
    for inputs in ((x,), (w,)):
        for each in (x, w):
            each.requires_grad_(each is inputs[0])
        for _ in range(3):
            _gradients(conv2d(x, w), *inputs)
    assert {count.problem.direction.output for count in enabled.report().counts if count.problem} == {"y", "x", "w"}


def test_a_source_that_does_not_compile_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(direct.VARIABLE, raising=False)
    monkeypatch.setenv("MIOFIND_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(direct, "_path", direct._path.__wrapped__)
    broken = tmp_path / "router.cpp"
    broken.write_text("#error broken")
    monkeypatch.setattr(direct, "SOURCE", broken)
    with pytest.raises(CompileError, match="cannot be compiled"):
        direct.build()
    assert direct.direct_path() is None


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MIOFIND_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(direct, "_path", direct._path.__wrapped__)
    with pytest.raises(CompileError, match=r"cannot be made: .*Name another folder by MIOFIND_CACHE_DIR"):
        direct.build()


def test_it_can_be_switched_off(path: DirectPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(direct.VARIABLE, raising=False)
    monkeypatch.setattr(direct, "_loaded", [path])
    assert direct.direct_path() is path
    monkeypatch.setenv("MIOFIND_TORCH_DIRECT", "0")
    assert direct.direct_path() is None


ORDERS = (torch.contiguous_format, torch.channels_last)


@pytest.mark.parametrize("orders", [*itertools.product(ORDERS, repeat=3)][1:-1], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_tensors_in_several_memory_orders_are_packed_without_python(
    enabled: Override, driver: Driver, orders: tuple[Any, ...], with_bias: bool
) -> None:
    """x, w and the gradient of y, as behind a group norm in a channels-last network: all such calls were Python's."""
    results = []
    for i in range(4):
        torch.manual_seed(7)
        x, w, dy = (torch.randn(shape, **HALF) for shape in ((2, 4, 7, 6), (6, 4, 3, 3), (2, 6, 7, 6)))
        x, w, dy = (each.to(memory_format=order) for each, order in zip((x, w, dy), orders, strict=True))
        given = [x.requires_grad_(), w.requires_grad_()]
        given += [torch.randn(6, **HALF).requires_grad_()] if with_bias else []
        keep = [torch.empty(64 * i)]  # so that addresses differ
        y = conv2d(*given, padding=1)
        results.append((y.detach(), *torch.autograd.grad(y, given, dy)))
        del keep
    assert driver.launches == 2 * 3, "y, dx and dw of two calls"
    for later in results[1:]:
        for first, other in zip(results[0], later, strict=True):
            assert other.stride() == first.stride()
            torch.testing.assert_close(other, first, rtol=0, atol=0)


@pytest.mark.parametrize("is_wanted", [(True, False), (False, True)])
def test_only_what_a_result_reads_is_packed(enabled: Override, driver: Driver, is_wanted: tuple[bool, bool]) -> None:
    """Without the gradient of x or of w the other one's input is nobody's."""
    results = []
    for _ in range(4):
        torch.manual_seed(7)
        x = torch.randn(2, 4, 7, 6, **HALF).to(memory_format=torch.channels_last).requires_grad_(is_wanted[0])
        w = torch.randn(6, 4, 3, 3, **HALF).requires_grad_(is_wanted[1])
        y = conv2d(x, w, padding=1)
        results.append(torch.autograd.grad(y, x if is_wanted[0] else w, torch.ones_like(y))[0])
    assert driver.launches == 2 * 2
    assert all(torch.equal(results[0], each) for each in results)


def test_a_misaligned_tensor_that_is_packed_does_without_python(aligned: None, driver: Driver) -> None:
    """Its copy is aligned."""
    memory, w = torch.randn(2 * 4 * 7 * 6 + 1, **HALF), torch.randn(6, 4, 3, 3, **HALF)
    w = w.to(memory_format=torch.channels_last)
    results = [conv2d(memory[1:].view(2, 4, 7, 6), w, padding=1) for _ in range(4)]
    assert driver.launches == 2
    assert all(torch.equal(results[0], each) for each in results)


def test_an_expanded_tensor_is_packed_without_python(enabled: Override, driver: Driver) -> None:
    x, w = torch.randn(2, 1, 7, 6, **HALF).expand(2, 4, 7, 6), torch.randn(6, 4, 3, 3, **HALF)
    results = [conv2d(x, w, padding=1) for _ in range(4)]
    assert driver.launches == 2
    assert all(torch.equal(results[0], each) for each in results)


def test_a_signal_is_packed_without_python(enabled: Override, driver: Driver) -> None:
    x, w = torch.randn(2, 9, 4, **HALF).transpose(1, 2), torch.randn(6, 4, 3, **HALF)
    results = [torch.nn.functional.conv1d(x, w, padding=1) for _ in range(4)]
    assert driver.launches == 2
    assert all(torch.equal(results[0], each) for each in results)


@pytest.mark.parametrize("orders", [*itertools.product(ORDERS, repeat=3)], ids=str)
def test_a_copy_is_made_of_what_lies_in_another_order_and_once(
    enabled: Override, driver: Driver, orders: tuple[Any, ...]
) -> None:
    """Both gradients read that of y."""
    shapes = ((2, 4, 7, 6), (6, 4, 3, 3), (2, 6, 7, 6))
    x, w, dy = (torch.randn(s, **HALF).to(memory_format=order) for s, order in zip(shapes, orders, strict=True))
    given = x.requires_grad_(), w.requires_grad_()
    for _ in range(3):
        y = conv2d(*given, padding=1)
        torch.autograd.grad(y, given, dy)
    before = driver.launches
    ours = torch.channels_last if torch.channels_last in orders[:2] else torch.contiguous_format
    differing = [order is not ours for order in orders]
    assert _copies(lambda: conv2d(*given, padding=1)) == sum(differing[:2])
    y = conv2d(*given, padding=1)
    assert _copies(lambda: torch.autograd.grad(y, given, dy)) == sum(differing)
    assert driver.launches == before + 4


def _copies(call: Callable[[], Any]) -> int:
    return [name for name, _ in profiled(call)].count("aten::copy_")


def test_a_misaligned_tensor_beside_one_that_is_packed_goes_through_python(aligned: None, driver: Driver) -> None:
    memory, w = torch.randn(2 * 4 * 7 * 6 + 1, **HALF), torch.randn(6, 4, 3, 3, **HALF)
    x = memory[1:].view(2, 7, 6, 4).permute(0, 3, 1, 2)
    results = [conv2d(x, w, padding=1) for _ in range(4)]
    assert driver.launches == 0
    assert all(torch.equal(results[0], each) for each in results)


@pytest.fixture
def without_memory(enabled: Override, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none for any workspace."""
    plan = direct.DirectPath.plan

    def with_much(self: Any, launches: Any) -> Any:
        return plan(self, [(place, launch._replace(workspace_bytes=1 << 60)) for place, launch in launches])

    monkeypatch.setattr(direct.DirectPath, "plan", with_much)


@pytest.mark.parametrize("is_backward", [False, True])
def test_copies_and_results_are_gone_once_pytorchs_own_kernel_begins(without_memory: None, is_backward: bool) -> None:
    """It may need their memory, where there was none for a workspace."""
    x = torch.randn(2, 4, 7, 6, **HALF).requires_grad_()
    w = torch.randn(6, 4, 3, 3, **HALF).to(memory_format=torch.channels_last).requires_grad_()
    y = conv2d(x, w, padding=1)
    dy = torch.randn_like(y, memory_format=torch.contiguous_format)

    def call() -> Any:
        return torch.autograd.grad(y, (x, w), dy, retain_graph=True) if is_backward else conv2d(x, w, padding=1)

    for _ in range(2):
        call()
    events = profiled(call)
    last = max(place for place, (name, _) in enumerate(events) if name == "[OutOfMemory]")
    begins = next(place for place, (name, _) in enumerate(events) if place > last and name.startswith("aten::"))
    assert any(size > 0 for _, size in events[:last]), "copies were made"
    assert sum(size for _, size in events[:begins]) == 0


def test_nothing_is_packed_in_calls_that_ask_for_no_workspace(without_memory: None) -> None:
    x = torch.randn(2, 4, 7, 6, **HALF)
    w = torch.randn(6, 4, 3, 3, **HALF).to(memory_format=torch.channels_last)
    for _ in range(4):  # of which the last two lack memory
        conv2d(x, w, padding=1)
    names = [name for name, _ in profiled(lambda: conv2d(x, w, padding=1))]
    assert "[OutOfMemory]" not in names
    assert "aten::empty_strided" not in names
