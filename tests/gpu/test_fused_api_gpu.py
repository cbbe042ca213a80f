"""Convolutions with an epilogue on a GPU through the public API: arrays of CuPy and PyTorch, graphs, files, packing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import miofind
from miofind.core.epilogue import EpilogueParameters
from miofind.errors import InvalidArrayError
from miofind.reference.convolution import reference_on_host
from miofind.reference.epilogue import apply_epilogue

cupy = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

SHAPES = {"x": (4, 16, 14, 14), "w": (32, 16, 3, 3), "padding": 1, "dtype": "float16"}
EPILOGUES = ("bias.relu", "bias.residual.relu", "float32.scale.bias.silu", "scale.bias.channel_bias.residual.clamp")


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[miofind.Handle]:
    path = tmp_path_factory.mktemp("finddb") / "finddb.db"
    with miofind.Handle("cuda:0", database=path, strict=True) as made:
        yield made


def described(epilogue: str, layout: str = "NHWC") -> miofind.ProblemDescription:
    return miofind.ProblemDescription.convolution(**SHAPES, layout=layout, epilogue=epilogue)


def host_arrays(problem: miofind.ProblemDescription) -> dict[str, np.ndarray]:
    """Inputs by name, in the shapes and the memory order that users' arrays have."""
    generator = np.random.default_rng(0)
    made = {}
    for operand in problem.inputs:
        values = generator.standard_normal(operand.shape).astype(operand.tensor.dtype.value)
        if operand.tensor.layout.channels_last and values.ndim > 2:
            values = np.moveaxis(np.ascontiguousarray(np.moveaxis(values, 1, -1)), -1, 1)
        made[operand.name] = values / 8 if operand.name == "w" else values
    return made


def on_gpu(library: str, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    if library == "cupy":
        return {name: _in_cupy(array) for name, array in arrays.items()}
    torch = pytest.importorskip("torch")
    return {name: torch.from_numpy(array).cuda() for name, array in arrays.items()}


def _in_cupy(array: np.ndarray) -> Any:
    """The same in a CuPy array of the same memory order: `cupy.asarray` makes one of channels first."""
    if array.flags.c_contiguous:
        return cupy.asarray(array)
    return cupy.moveaxis(cupy.asarray(np.moveaxis(array, 1, -1)), -1, 1)


def assert_right(y: Any, problem: miofind.ProblemDescription, given: dict[str, np.ndarray], **numbers: float) -> None:
    sums = reference_on_host(problem.bare, x=given["x"], w=given["w"])
    wanted = apply_epilogue(problem, sums, given, EpilogueParameters(**numbers))
    result = cupy.asnumpy(y) if isinstance(y, cupy.ndarray) else y.cpu().numpy()
    np.testing.assert_allclose(result.astype(np.float64), wanted, rtol=2e-2, atol=3e-2)


def numbers_of(problem: miofind.ProblemDescription) -> dict[str, float]:
    """A value for each number that the epilogue takes."""
    values = {"alpha": 0.5, "beta": 2.0, "low": -0.5, "high": 1.5, "slope": 0.25}
    return {name: values[name] for name in problem.epilogue.numbers}


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_every_solution_is_right(handle: miofind.Handle, epilogue: str, layout: str, library: str) -> None:
    problem = described(epilogue, layout)
    given = host_arrays(problem)
    arrays, numbers = on_gpu(library, given), numbers_of(problem)
    for solution in miofind.find_solutions(problem, handle=handle):
        assert_right(miofind.run_solution(solution, **arrays), problem, given)
        assert_right(miofind.run_solution(solution, **arrays, **numbers), problem, given, **numbers)


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_one_call(handle: miofind.Handle, library: str) -> None:
    problem = described("bias.residual.leaky_relu")
    given = host_arrays(problem)
    y = miofind.convolution(**on_gpu(library, given), padding=1, activation="leaky_relu", slope=0.5, handle=handle)
    assert_right(y, problem, given, slope=0.5)


def test_a_bias_that_begins_anywhere_is_taken_in_one_call(handle: miofind.Handle) -> None:
    problem = described("bias.relu")
    given = host_arrays(problem)
    arrays = on_gpu("cupy", given)
    memory = cupy.zeros(given["bias"].size + 1, cupy.float16)
    memory[1:] = arrays["bias"]
    arrays["bias"] = memory[1:]
    assert_right(miofind.convolution(**arrays, padding=1, activation="relu", handle=handle), problem, given)


def test_torch_operands_are_checked_on_every_run(handle: miofind.Handle) -> None:
    """Runs like the last one are told by PyTorch's guard; each operand of others is looked at."""
    torch = pytest.importorskip("torch")
    problem = described("bias.residual.relu")
    given = host_arrays(problem)
    arrays = on_gpu("torch", given)
    solution = miofind.find_solutions(problem, handle=handle)[0]
    out = torch.empty_like(arrays["residual"])
    workspace = torch.empty(max(1, solution.workspace_bytes), dtype=torch.uint8, device="cuda")

    def run(**changed: Any) -> None:
        out.fill_(torch.nan)
        miofind.run_solution(solution, **{**arrays, **changed}, out=out, workspace=workspace)
        assert_right(out, problem, given)

    wrong = {
        "bias has dtype": {"bias": arrays["bias"].float()},
        "bias has shape": {"bias": arrays["bias"].reshape(1, -1, 1, 1)},
        "bias is on the host": {"bias": arrays["bias"].cpu()},
        "bias requires gradients": {"bias": torch.nn.Parameter(arrays["bias"])},
        "residual has strides": {"residual": arrays["residual"].contiguous()},
        "takes x, w, bias and residual; given": {"residual": None},
        "out shares memory": {"residual": out},
    }
    for _ in range(3):
        run()
    for message, changed in wrong.items():
        if message.startswith("takes"):
            with pytest.raises(InvalidArrayError, match=f"{message}|residual is missing"):
                run(**changed)
        else:
            with pytest.raises(InvalidArrayError, match=message):
                run(**changed)
        run()
    run(bias=arrays["bias"].clone(), residual=arrays["residual"].clone())
    with torch.no_grad():
        run(bias=torch.nn.Parameter(arrays["bias"]))


def test_the_input_may_be_its_own_residual(handle: miofind.Handle) -> None:
    shapes = {**SHAPES, "w": (16, 16, 3, 3)}
    problem = miofind.ProblemDescription.convolution(**shapes, layout="NHWC", epilogue="residual.relu")
    given = host_arrays(problem)
    given["residual"] = given["x"]
    for library in ("cupy", "torch"):
        arrays = on_gpu(library, given)
        arrays["residual"] = arrays["x"]
        for solution in miofind.find_solutions(problem, handle=handle):
            assert_right(miofind.run_solution(solution, **arrays), problem, given)


def test_a_captured_run_keeps_its_numbers(handle: miofind.Handle) -> None:
    problem = described("bias.residual.clamp")
    given = host_arrays(problem)
    arrays, numbers = on_gpu("cupy", given), numbers_of(problem)
    for solution in miofind.find_solutions(problem, handle=handle):
        out = cupy.zeros_like(arrays["residual"])
        workspace = cupy.empty(max(1, solution.workspace_bytes), cupy.uint8)
        solution.prepare()
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            miofind.run_solution(solution, **arrays, **numbers, out=out, workspace=workspace)
            graph = stream.end_capture()
            miofind.run_solution(solution, **arrays, low=0.0, high=0.0, out=out, workspace=workspace)
            graph.launch(stream)
            stream.synchronize()
        assert_right(out, problem, given, **numbers)


def test_packed_and_loaded_solutions_run(handle: miofind.Handle, tmp_path: Path) -> None:
    problem = described("scale.bias.residual.relu", "NCHW")
    given = host_arrays(problem)
    arrays = on_gpu("cupy", given)
    by_solver = {s.solver_id: s for s in reversed(miofind.find_solutions(problem, handle=handle))}
    for solution in by_solver.values():
        packed = solution.pack(arrays["w"], scale=arrays["scale"], bias=arrays["bias"])
        y = packed.run(arrays["x"], residual=arrays["residual"], alpha=0.5)
        assert_right(y, problem, given, alpha=0.5)
        solution.save(tmp_path / "solution.json")
        loaded = miofind.Solution.load(tmp_path / "solution.json", handle)
        assert loaded.id == solution.id
        assert_right(miofind.run_solution(loaded, **arrays), problem, given)


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_a_folded_batch_norm(handle: miofind.Handle, library: str) -> None:
    problem = described("bias.relu", "NCHW")
    given = host_arrays(problem)
    generator = np.random.default_rng(1)
    mean, variance = generator.standard_normal(32).astype("float32"), generator.uniform(0.5, 2, 32).astype("float32")
    arrays = on_gpu(library, {**given, "mean": mean, "variance": variance})
    w, bias = miofind.fold_batch_norm(*(arrays[name] for name in ("w", "bias", "mean", "variance")))
    y = miofind.convolution(arrays["x"], w, bias=bias, padding=1, activation="relu", handle=handle)
    folded = dict(zip(("w", "bias"), miofind.fold_batch_norm(given["w"], given["bias"], mean, variance), strict=True))
    assert_right(y, problem, {**given, **folded})


def test_an_infinite_gradient_where_hardswish_is_level_is_nan(handle: miofind.Handle) -> None:
    """At -1.5 its derivative is 0, which kernels must not round to another number."""
    dy, w = cupy.full((1, 4, 3, 3), cupy.inf, cupy.float32), cupy.ones((4, 4, 1, 1), cupy.float32)
    saved = cupy.full((1, 4, 3, 3), -1.5, cupy.float32)
    for only in ("ConvDirectNaive", "ConvDirectNaive+Pointwise"):
        options = miofind.FindOptions(only=(only,))
        call = {"derivative": "hardswish", "saved": saved, "handle": handle, "options": options}
        assert cupy.isnan(miofind.convolution_backward_data(dy, w, saved.shape, **call)).all(), only
