"""The public API on a GPU: arrays of CuPy and PyTorch, streams, threads, graphs, alignment, saved solutions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import miofind
from miofind.errors import ForkedProcessError, InvalidArrayError, LaunchError, WorkspaceError
from miofind.reference.convolution import reference_on_host

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

PROBLEM = miofind.ProblemDescription.convolution(x=(4, 16, 14, 14), w=(32, 16, 3, 3), padding=1, dtype="float16")
OWN = miofind.FindOptions(only="plain")


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[miofind.Handle]:
    path = tmp_path_factory.mktemp("finddb") / "finddb.db"
    with miofind.Handle("cuda:0", database=path, strict=True) as made:
        yield made


def operands(problem: miofind.ProblemDescription, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    dtype = np.float16 if problem.x.dtype == "float16" else np.float32
    return {n: generator.standard_normal(problem.tensor(n).shape).astype(dtype) for n in ("x", "w", "y")}


def assert_close(result: object, problem: miofind.ProblemDescription, given: dict[str, np.ndarray]) -> None:
    expected = reference_on_host(problem, **given)
    np.testing.assert_allclose(np.asarray(result, np.float64), expected, rtol=2e-2, atol=3e-2)


@pytest.mark.parametrize("direction", list(miofind.Direction))
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_every_solution_is_right(handle: miofind.Handle, direction: miofind.Direction, layout: str) -> None:
    problem = miofind.ProblemDescription.convolution(
        x=(4, 16, 14, 14), w=(32, 16, 3, 3), padding=1, direction=direction, dtype="float16", layout=layout
    )
    given = operands(problem)
    solutions = miofind.find_solutions(problem, handle=handle)
    tiled = "ConvDirectTiledWeights" if direction is miofind.Direction.BACKWARD_WEIGHTS else "ConvDirectTiled"
    assert {"ConvCudnn", "ConvIm2colGemm", tiled} <= {s.solver_id for s in solutions}
    on_gpu = {n: packed(cupy.asarray(given[n]), layout) for n in direction.inputs}
    named = {("dy" if n == "y" else n): array for n, array in on_gpu.items()}
    for solution in solutions:
        assert_close(cupy.asnumpy(miofind.run_solution(solution, **named)), problem, given)


def packed(array: object, layout: str) -> object:
    if layout == "NCHW":
        return array
    return cupy.ascontiguousarray(array.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)  # type: ignore[attr-defined]


def test_torch_tensors(handle: miofind.Handle) -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(4, 16, 14, 14, device="cuda", dtype=torch.float16).to(memory_format=torch.channels_last)
    w = torch.randn(32, 16, 3, 3, device="cuda", dtype=torch.float16).to(memory_format=torch.channels_last)
    y = miofind.convolution(x, w, padding=1, handle=handle)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y.float(), torch.conv2d(x.float(), w.float(), padding=1), rtol=2e-2, atol=3e-2)
    parameter = torch.nn.Parameter(w)
    with pytest.raises(InvalidArrayError, match="w requires gradients"):
        miofind.convolution(x, parameter, padding=1, handle=handle)
    with torch.no_grad():
        torch.testing.assert_close(miofind.convolution(x, parameter, padding=1, handle=handle), y)


def test_torch_tensors_are_checked_on_every_run(handle: miofind.Handle) -> None:
    torch = pytest.importorskip("torch")
    solution = miofind.find_solutions(PROBLEM, options=OWN, handle=handle)[0]
    workspace = torch.empty(max(1, solution.workspace_bytes), dtype=torch.uint8, device="cuda")

    def random(shape: tuple[int, ...]) -> object:
        return torch.randn(shape, device="cuda").to(torch.float16)

    x, w, out = random(PROBLEM.x.shape), random(PROBLEM.w.shape), random(PROBLEM.y.shape)

    def run(**changed: object) -> None:
        tensors = {"x": x, "w": w, "out": out, **changed}
        out_ = tensors["out"].fill_(torch.nan)
        miofind.run_solution(solution, tensors["x"], tensors["w"], out=out_, workspace=workspace)
        want = torch.conv2d(tensors["x"].double(), tensors["w"].double(), padding=1)
        torch.testing.assert_close(out_.double(), want, rtol=2e-2, atol=3e-2)

    emptied = random(PROBLEM.x.shape)
    emptied.untyped_storage().resize_(0)
    wrong = {
        "has shape": random((4, 16, 14, 15)),
        "has dtype": x.float(),
        "has strides": x.to(memory_format=torch.channels_last),
        "is on the host": x.cpu(),
        "requires gradients": torch.nn.Parameter(x),
        "is a negated view": torch._neg_view(x),
        "begins at address": random((x.numel() + 1,))[1:].view(x.shape),
        "holds no memory": emptied,
        "x": x.cpu().numpy(),
    }
    for _ in range(3):
        run()
    for message, array in wrong.items():
        with pytest.raises(InvalidArrayError, match=message):
            miofind.run_solution(solution, array, w, out=out, workspace=workspace)
        run()
    with torch.no_grad():
        run(x=torch.nn.Parameter(random(PROBLEM.x.shape)))
    with torch.inference_mode():
        run(x=random(PROBLEM.x.shape), out=random(PROBLEM.y.shape))
    run(w=random(PROBLEM.w.shape))


def test_torch_stream_and_bfloat16_backward(handle: miofind.Handle) -> None:
    torch = pytest.importorskip("torch")
    x = torch.randn(4, 16, 14, 14, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(32, 16, 3, 3, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(4, 32, 14, 14, device="cuda", dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        dx = miofind.convolution_backward_data(dy, w, x.shape, padding=1, handle=handle)
        dw = miofind.convolution_backward_weights(dy, x, w.shape, padding=1, handle=handle)
    stream.synchronize()
    want = torch.ops.aten.convolution_backward(
        dy.float(), x.float(), w.float(), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
    )
    torch.testing.assert_close(dx.float(), want[0], rtol=3e-2, atol=0.2)
    torch.testing.assert_close(dw.float(), want[1], rtol=3e-2, atol=0.5)


def test_graph_replays_right(handle: miofind.Handle) -> None:
    given = operands(PROBLEM)
    x, w = cupy.asarray(given["x"]), cupy.asarray(given["w"])
    for solution in miofind.find_solutions(PROBLEM, handle=handle):
        out = cupy.zeros(PROBLEM.y.shape, cupy.float16)
        workspace = cupy.empty(max(1, solution.workspace_bytes), cupy.uint8)
        solution.prepare()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            miofind.run_solution(solution, x, w, out=out, workspace=workspace)
            graph = stream.end_capture()
            out.fill(7)
            x += 0
            graph.launch(stream)
            stream.synchronize()
        assert_close(cupy.asnumpy(out), PROBLEM, given)


def test_the_first_run_of_a_thread_can_be_captured(handle: miofind.Handle) -> None:
    """And does not break off a capture of another thread."""
    given = operands(PROBLEM)
    x, w = cupy.asarray(given["x"]), cupy.asarray(given["w"])
    solutions = [s for s in miofind.find_solutions(PROBLEM, handle=handle) if s.library == "plain"]
    first, second = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)

    def capture(solution: miofind.Solution, out: cupy.ndarray, workspace: cupy.ndarray) -> cupy.cuda.Graph:
        with second:
            second.begin_capture()
            miofind.run_solution(solution, x, w, out=out, workspace=workspace)
            return second.end_capture()

    for solution in solutions[:1] + solutions[-1:]:
        out = cupy.zeros(PROBLEM.y.shape, cupy.float16)
        workspace = cupy.empty(max(1, solution.workspace_bytes), cupy.uint8)
        solution.prepare()
        cupy.cuda.Device().synchronize()
        with ThreadPoolExecutor(1) as pool:
            first.begin_capture()
            captured = pool.submit(capture, solution, out, workspace)
            captured.exception(timeout=60)
            first.end_capture()
        captured.result().launch(second)
        second.synchronize()
        assert_close(cupy.asnumpy(out), PROBLEM, given)


def test_find_under_capture_is_refused(handle: miofind.Handle) -> None:
    problem = miofind.ProblemDescription.convolution(x=(1, 8, 5, 5), w=(8, 8, 3, 3), dtype="float16")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(LaunchError, match="while a CUDA graph is captured"):
            miofind.find_solutions(problem, handle=handle)
        stream.end_capture()


def test_eight_threads_on_their_own_streams(handle: miofind.Handle) -> None:
    def work(i: int) -> None:
        size = 7 + i % 8
        problem = miofind.ProblemDescription.convolution(
            x=(2, 8, size, size), w=(16, 8, 3, 3), padding=1, dtype="float32"
        )
        given = operands(problem, i)
        with cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True) as stream:
            x, w = cupy.asarray(given["x"]), cupy.asarray(given["w"])
            for _ in range(5):
                y = miofind.convolution(x, w, padding=1, handle=handle)
            result = cupy.asnumpy(y, stream=stream)
        assert_close(result, problem, given)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(16)))


def test_misaligned_slices(handle: miofind.Handle) -> None:
    given = operands(PROBLEM)
    memory = cupy.zeros(PROBLEM.x.size + 1, cupy.float16)
    x = memory[1:].reshape(PROBLEM.x.shape)
    x[...] = cupy.asarray(given["x"])
    w = cupy.asarray(given["w"])
    strict = [s for s in miofind.find_solutions(PROBLEM, handle=handle) if s.runner.alignment_bytes > 2]
    with pytest.raises(InvalidArrayError, match="x begins at address"):
        miofind.run_solution(strict[0], x, w)
    assert_close(cupy.asnumpy(miofind.convolution(x, w, padding=1, handle=handle)), PROBLEM, given)


def test_a_workspace_must_begin_at_a_multiple_of_256(handle: miofind.Handle) -> None:
    """One at a multiple of 16 was taken, and cuBLASLt refused it when it was run."""
    given = {name: cupy.asarray(array) for name, array in operands(PROBLEM).items()}
    memory = cupy.zeros(1 << 28, cupy.uint8)
    for solution in miofind.find_solutions(PROBLEM, handle=handle):
        if 0 < solution.workspace_bytes < (1 << 28) - 256:
            with pytest.raises(WorkspaceError, match="not a multiple of 256"):
                miofind.run_solution(solution, given["x"], given["w"], workspace=memory[16:])
            miofind.run_solution(solution, given["x"], given["w"], workspace=memory[256:])


@pytest.mark.parametrize("start", [256, 512, 768], ids=["before", "at", "behind"])
@pytest.mark.parametrize("name", ["x", "w", "out"])
def test_a_workspace_over_another_array_is_refused(handle: miofind.Handle, name: str, start: int) -> None:
    """Where its first byte lies, of the array's first at 512."""
    solution = next(s for s in miofind.find_solutions(PROBLEM, handle=handle) if s.workspace_bytes > 256)
    tensors = {"x": PROBLEM.x, "w": PROBLEM.w, "out": PROBLEM.y}
    given = {each: cupy.zeros(tensor.shape, cupy.float16) for each, tensor in tensors.items()}
    size = tensors[name].bytes
    memory = cupy.zeros(1024 + size + solution.workspace_bytes, cupy.uint8)
    given[name] = memory[512 : 512 + size].view(cupy.float16).reshape(tensors[name].shape)
    with pytest.raises(WorkspaceError, match=f"workspace shares memory with {name}, which"):
        miofind.run_solution(solution, given["x"], given["w"], out=given["out"], workspace=memory[start:])
    apart = memory[512 + size :]
    miofind.run_solution(solution, given["x"], given["w"], out=given["out"], workspace=apart[-apart.data.ptr % 256 :])


def test_saved_solutions_run(handle: miofind.Handle, tmp_path: Path) -> None:
    given = operands(PROBLEM)
    x, w = cupy.asarray(given["x"]), cupy.asarray(given["w"])
    by_solver = {s.solver_id: s for s in reversed(miofind.find_solutions(PROBLEM, handle=handle))}
    for name, solution in by_solver.items():
        solution.save(tmp_path / f"{name}.json")
        loaded = miofind.Solution.load(tmp_path / f"{name}.json", handle)
        assert_close(cupy.asnumpy(miofind.run_solution(loaded, x, w)), PROBLEM, given)


def test_a_loaded_solution_runs_apart_from_the_others(handle: miofind.Handle, tmp_path: Path) -> None:
    """Its binaries and invokers are its own; those of the handle are made from this release's sources."""
    given = operands(PROBLEM)
    x, w = cupy.asarray(given["x"]), cupy.asarray(given["w"])
    solution = next(s for s in miofind.find_solutions(PROBLEM, handle=handle) if s.library.value == "plain")
    solution.save(tmp_path / "solution.json")
    with miofind.Handle(handle.device, database=":memory:") as other:
        loaded = miofind.Solution.load(tmp_path / "solution.json", other)
        assert_close(cupy.asnumpy(miofind.run_solution(loaded, x, w)), PROBLEM, given)
        assert_close(cupy.asnumpy(loaded.pack(w).run(x)), PROBLEM, given)
        assert len(other.invokers) == 0
        assert loaded.solution_list.handle.compiler is not other.compiler


def test_other_arrays_by_protocol(handle: miofind.Handle) -> None:
    class Foreign:
        def __init__(self, array: object) -> None:
            self.__cuda_array_interface__ = array.__cuda_array_interface__  # type: ignore[attr-defined]
            self._keep = array

    given = operands(PROBLEM)
    x, w = cupy.asarray(given["x"]), cupy.asarray(given["w"])
    solution = miofind.find_solutions(PROBLEM, handle=handle)[0]
    assert_close(cupy.asnumpy(miofind.run_solution(solution, Foreign(x), Foreign(w))), PROBLEM, given)


def test_host_arrays_are_refused_with_the_way_out(handle: miofind.Handle) -> None:
    given = operands(PROBLEM)
    solution = miofind.find_solutions(PROBLEM, handle=handle)[0]
    with pytest.raises(InvalidArrayError, match="x is on the host, the solution runs on cuda:0: move the array"):
        miofind.run_solution(solution, given["x"], given["w"])


def test_ieee_requests_are_never_answered_in_tf32(handle: miofind.Handle) -> None:
    """An ieee request is never answered in tf32: its measured error is far below tf32's roundoff."""
    shapes = {"x": (4, 64, 14, 14), "w": (64, 64, 3, 3), "padding": 1}
    ieee = miofind.find_solutions(miofind.ProblemDescription.convolution(**shapes), handle=handle)
    assert max(s.max_error or 0 for s in ieee) < 1e-5
    tf32 = miofind.find_solutions(miofind.ProblemDescription.convolution(**shapes, math="tf32"), handle=handle)
    assert max(s.max_error or 0 for s in tf32) < 5e-3


def test_fork_is_refused_clearly(handle: miofind.Handle) -> None:
    miofind.find_solutions(PROBLEM, handle=handle)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            miofind.Handle("cuda:0")
            os.write(writer, b"no error")
        except ForkedProcessError:
            os.write(writer, b"refused")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 100) == b"refused"


@pytest.mark.parametrize("isolate", [False, True])
def test_a_find_in_a_forked_child_is_refused_clearly(handle: miofind.Handle, isolate: bool) -> None:
    """CuPy said what it cannot do, of a stream."""
    miofind.find_solutions(PROBLEM, options=OWN, handle=handle)
    other = miofind.ProblemDescription.convolution(x=(2, 16, 9, 9), w=(16, 16, 3, 3), dtype="float16")
    asked = miofind.FindOptions(only="plain", isolate=isolate, find_mode="normal")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            miofind.find_solutions(other, options=asked, handle=handle)
        except ForkedProcessError:
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert miofind.find_solutions(other, options=OWN, handle=handle)
