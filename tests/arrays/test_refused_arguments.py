"""Arguments of the API that make no sense: one error that names them, nothing taken for something else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import miofind
from miofind.arrays import operands
from miofind.arrays.operands import OperandMemory
from miofind.errors import (
    DatabaseError,
    InvalidArrayError,
    InvalidOptionError,
    InvalidProblemError,
    WorkspaceError,
)
from miofind.reference.convolution import reference_on_host
from miofind.solver.registry import Registry

PROBLEM = miofind.ProblemDescription.convolution(x=(2, 2, 6, 5), w=(2, 2, 3, 3), padding=1)
X = np.ones((2, 2, 6, 5), np.float32)
W = np.ones((2, 2, 3, 3), np.float32)


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[miofind.Handle]:
    database = tmp_path_factory.mktemp("refused") / "finddb.db"
    with miofind.Handle("cpu", database=database, strict=True) as made:
        yield made


@pytest.fixture(scope="module")
def with_workspace(handle: miofind.Handle) -> miofind.Solution:
    return next(s for s in miofind.find_solutions(PROBLEM, handle=handle) if s.workspace_bytes)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"x": (1, 2, 2**30, 2**30)}, "x: shape"),
        ({"padding": 2**31 - 1}, r"y: shape\[2\]"),
        ({"x": (10**5000, 2, 6, 5)}, r"x\[0\]=.*bits"),
    ],
    ids=["x-bytes", "y-size", "huge-int"],
)
def test_a_shape_error_names_the_tensor(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidProblemError, match=told):
        miofind.ProblemDescription.convolution(**{"x": (2, 2, 6, 5), "w": (2, 2, 3, 3), **fields})


@pytest.mark.parametrize("text", [None, 5, b"conv2d"])
def test_a_network_config_is_a_string(text: Any) -> None:
    with pytest.raises(InvalidProblemError, match="network_config="):
        miofind.ProblemDescription.from_network_config(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("deterministic", "false"),
        ("tuning", 1),
        ("isolate", []),
        ("only", 5),
        ("exclude", None),
        ("workspace_limit_bytes", float("inf")),
        ("workspace_limit_bytes", 2**80),
        ("max_error", float("nan")),
        ("trials", 0),
        ("trials", True),
        ("trials", np.bool_(True)),
        ("patience", 1.0),
        ("seed", None),
        ("seed", 10**100),
        ("retry_failed", 1),
    ],
)
def test_find_options_name_the_option(field: str, value: Any) -> None:
    with pytest.raises(InvalidOptionError, match=f"{field}="):
        miofind.FindOptions(**{field: value})


def test_find_options_take_numpy_numbers() -> None:
    assert miofind.FindOptions(workspace_limit_bytes=np.int64(5)).workspace_limit_bytes == 5  # type: ignore[arg-type]
    taken = miofind.FindOptions(trials=np.int64(5), patience=np.uint8(2), seed=np.int32(7))  # type: ignore[arg-type]
    assert taken == miofind.FindOptions(trials=5, patience=2, seed=7)
    assert {type(value) for value in (taken.trials, taken.patience, taken.seed)} == {int}


@pytest.mark.parametrize("value", [True, 1.0, np.array([1, 1]), {1}], ids=["bool", "float", "array", "set"])
def test_a_padding_is_refused_though_an_equal_one_is_cached(handle: miofind.Handle, value: Any) -> None:
    miofind.convolution(X, W, padding=1, handle=handle)
    with pytest.raises(InvalidProblemError, match="padding="):
        miofind.convolution(X, W, padding=value, handle=handle)


@pytest.mark.parametrize("shape", [None, 5, (2, 2, 6.0, 5), (2, [2], 6, 5)])
def test_a_missing_shape_is_named(handle: miofind.Handle, shape: Any) -> None:
    miofind.convolution_backward_data(X, W, (2, 2, 6, 5), padding=1, handle=handle)
    with pytest.raises(InvalidProblemError, match="x_shape"):
        miofind.convolution_backward_data(X, W, shape, padding=1, handle=handle)


def test_a_shape_that_nothing_needs_is_refused() -> None:
    with pytest.raises(InvalidProblemError, match="x_shape"):
        miofind.ProblemDescription.from_arrays(x=X, w=W, padding=1, x_shape=(9, 9))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("problem", {"problem": "conv"}), ("options", {"options": {}}), ("handle", {"handle": "cpu"})],
)
def test_find_solutions_names_what_it_cannot_take(handle: miofind.Handle, name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError, match=f"{name}="):
        miofind.find_solutions(**{"problem": PROBLEM, "handle": handle, **arguments})


def test_run_solution_wants_a_solution() -> None:
    with pytest.raises(InvalidOptionError, match="solution=None"):
        miofind.run_solution(None, X, W)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", [5, b"x", "a\0b", "~no_such_user/finddb.db"])
def test_a_database_is_a_path(path: Any) -> None:
    with (
        miofind.Handle("cpu", database=path, strict=True) as handle,
        pytest.raises(DatabaseError, match="database="),
    ):
        miofind.find_solutions(PROBLEM, handle=handle)


def test_a_read_only_output_is_refused(with_workspace: miofind.Solution) -> None:
    out = np.empty((2, 2, 6, 5), np.float32)
    out.setflags(write=False)
    with pytest.raises(InvalidArrayError, match="out is read-only"):
        miofind.run_solution(with_workspace, X, W, out=out)


def test_an_output_over_an_input_is_refused(with_workspace: miofind.Solution) -> None:
    memory = np.ones(X.size + 8, np.float32)
    x, out = memory[: X.size].reshape(X.shape), memory[8:].reshape(X.shape)
    with pytest.raises(InvalidArrayError, match="out shares memory"):
        miofind.run_solution(with_workspace, x, W, out=out)
    assert (memory == 1).all()


def test_device_addresses_overlap_by_their_bytes() -> None:
    memory = OperandMemory(sizes_bytes=(100, 50, 10, 30), written=2, alignment=1)
    check = operands.check_of_all([lambda address: address] * 4, memory, 0)
    for start in (1100, 990, 2050, 3030):
        given = (1000, 2000, start, 3000)
        assert check(given) == given
    for start in (1099, 991, 2049, 1991, 3029, 2991):
        with pytest.raises(InvalidArrayError, match="out shares memory with an input"):
            check((1000, 2000, start, 3000))


class OnDevice:
    """As an array of CuPy says where it lies."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.data, self.shape, self.strides, self.itemsize = SimpleNamespace(ptr=address), shape, strides, 4


def test_memory_is_shared_by_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=OnDevice))
    read = OnDevice(1000, (2, 5), (40, 4))  # 60 bytes with a gap
    for start in (1060, 960):
        operands.refuse_shared_memory({"out": OnDevice(start, (10,), (4,))}, {"x": read, "w": None})
    operands.refuse_shared_memory({"out": OnDevice(1004, (0,), (4,))}, {"x": read})
    for start, strides in ((1056, (4,)), (964, (4,)), (1012, (4,)), (1056 + 36, (-4,))):
        with pytest.raises(InvalidArrayError, match="out shares memory with x, which would be overwritten"):
            operands.refuse_shared_memory({"out": OnDevice(start, (10,), strides)}, {"x": read})
    memory = np.zeros(20, np.float32)
    operands.refuse_shared_memory({"out": memory[:10][::-1]}, {"x": memory[10:]})
    with pytest.raises(InvalidArrayError, match="b shares memory with a"):
        operands.refuse_shared_memory({"a": memory[::-1][:10], "b": memory[10:11]}, {})


def test_memory_of_what_has_none() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(InvalidArrayError, match="out is a list"):
        operands.refuse_shared_memory({"out": [1.0]}, {})
    with pytest.raises(InvalidArrayError, match=r"out has torch layout torch\.sparse_coo"):
        operands.refuse_shared_memory({"out": torch.ones(2, 2).to_sparse()}, {})
    kept = torch.ones(8)
    operands.refuse_shared_memory({"out": kept[:4]}, {"x": kept[4:], "w": torch.empty(4, device="meta")})
    with pytest.raises(InvalidArrayError, match="out shares memory with x"):
        operands.refuse_shared_memory({"out": kept[:5]}, {"x": kept.numpy()[4:]})


def shaped(memory: np.ndarray, like: np.ndarray) -> np.ndarray:
    """The first bytes of a memory as an array like another, and of its values."""
    array = memory[: like.nbytes].view(like.dtype).reshape(like.shape)
    array[...] = like
    return array


def aligned(size: int, alignment: int = 64) -> np.ndarray:
    """Bytes that begin at a multiple of `alignment`, and of no larger power of two."""
    memory = np.zeros(size + 4 * alignment, np.uint8)
    start = -memory.ctypes.data % (2 * alignment) + alignment
    return memory[start : start + size]


@pytest.mark.parametrize("name", ["x", "w", "out"])
@pytest.mark.parametrize("which", ["first", "last", "all"])
def test_a_workspace_over_another_array_is_refused(with_workspace: miofind.Solution, name: str, which: str) -> None:
    """It was written to while the other was read."""
    given, size = {"x": X, "w": W, "out": np.zeros(X.shape, np.float32)}, with_workspace.workspace_bytes
    wanted = given[name].nbytes
    tensor_at, workspace_at = {"first": (size - 16, 0), "last": (0, wanted - 16), "all": (0, 0)}[which]
    memory = aligned(size + wanted)
    given[name] = shaped(memory[tensor_at:], given[name])
    before = memory.copy()
    workspace = memory[workspace_at : workspace_at + size]
    with pytest.raises(WorkspaceError, match=f"workspace shares memory with {name}, which a run would overwrite"):
        miofind.run_solution(with_workspace, given["x"], given["w"], out=given["out"], workspace=workspace)
    np.testing.assert_array_equal(memory, before)


def test_a_workspace_beside_another_array_is_taken(with_workspace: miofind.Solution) -> None:
    """Only the bytes that the solution needs are its own."""
    size = with_workspace.workspace_bytes
    memory = aligned(size + X.nbytes)
    x = shaped(memory[size:], X)
    wanted = miofind.run_solution(with_workspace, X, W)
    np.testing.assert_array_equal(miofind.run_solution(with_workspace, x, W, workspace=memory), wanted)


def test_a_workspace_over_what_packed_weights_run_on_is_refused(with_workspace: miofind.Solution) -> None:
    packed = with_workspace.pack(W)
    memory = aligned(packed.workspace_bytes + X.nbytes)
    x = shaped(memory, X)
    with pytest.raises(WorkspaceError, match="shares memory with x, "):
        packed.run(x, workspace=memory)
    with pytest.raises(WorkspaceError, match="shares memory with out, "):
        packed.run(X, out=x, workspace=memory)


@pytest.fixture
def wants_128_bytes(monkeypatch: pytest.MonkeyPatch) -> Iterator[miofind.Solution]:
    """A solution of the CPU place whose solver asks for tensors at multiples of 128 bytes."""
    solver = Registry.default()["ConvCpuDirect"]
    monkeypatch.setattr(type(solver), "alignment_bytes", 128)
    with miofind.Handle("cpu", database=":memory:") as handle:
        yield miofind.find_solutions(PROBLEM, options=miofind.FindOptions(only=(solver.id,)), handle=handle)[0]


@pytest.mark.parametrize("name", ["x", "w", "out"])
def test_an_alignment_is_asked_of_host_arrays(wants_128_bytes: miofind.Solution, name: str) -> None:
    given = {n: shaped(aligned(a.nbytes, 128), a) for n, a in {"x": X, "w": W, "out": np.zeros_like(X)}.items()}
    wanted = miofind.run_solution(wants_128_bytes, given["x"], given["w"], out=given["out"])
    given[name] = shaped(aligned(given[name].nbytes, 64), given[name])
    told = rf"{name} begins at address 0x[0-9a-f]*, the solution needs a multiple of 128 bytes"
    with pytest.raises(InvalidArrayError, match=told):
        miofind.run_solution(wants_128_bytes, given["x"], given["w"], out=given["out"])
    assert wanted.any()


def test_elements_of_host_arrays_are_aligned(with_workspace: miofind.Solution) -> None:
    x = shaped(aligned(X.nbytes + 8)[2:], X)
    with pytest.raises(InvalidArrayError, match=r"x begins at address 0x[0-9a-f]*, the solution needs a multiple of 4"):
        miofind.run_solution(with_workspace, x, W)


def test_what_miofind_allocates_on_the_host_has_the_alignment(wants_128_bytes: miofind.Solution) -> None:
    given = [shaped(aligned(array.nbytes, 128), array) for array in (X, W)]
    for _ in range(8):
        assert miofind.run_solution(wants_128_bytes, *given).ctypes.data % 128 == 0


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_convolution_copies_host_arrays_that_are_not_aligned(wants_128_bytes: miofind.Solution, framework: str) -> None:
    handle, options = wants_128_bytes.solution_list.handle, miofind.FindOptions(only=("ConvCpuDirect",))
    x = shaped(aligned(X.nbytes, 64), np.arange(X.size, dtype=np.float32).reshape(X.shape))
    wanted = reference_on_host(PROBLEM, x=x, w=W)
    given = [x, W]
    if framework == "torch":
        torch = pytest.importorskip("torch")
        given = [torch.from_numpy(array) for array in given]
    y = miofind.convolution(*given, padding=1, options=options, handle=handle)
    np.testing.assert_array_equal(np.asarray(y), wanted)


def test_device_workspaces_share_by_the_bytes_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "workspace_address", lambda workspace, *_: workspace)
    check = operands.workspace_check({"dy": 100, "w": 50, "out": 10}, 64, 0)
    tensors = (1000, 2000, 3000)
    for start in (0, 936, 1100, 2050, 1936, 2936, 3010):
        assert check(start, tensors) == start
    for start, name in (
        (937, "dy"),
        (1099, "dy"),
        (1050, "dy"),
        (1937, "w"),
        (2049, "w"),
        (2937, "out"),
        (3009, "out"),
    ):
        with pytest.raises(WorkspaceError, match=f"shares memory with {name}, which"):
            check(start, tensors)
    with pytest.raises(WorkspaceError, match="shares memory with dy and w,"):
        check(1990, (1980, 2000, 3000))


@pytest.mark.parametrize(
    ("workspace", "told"),
    [
        (np.frombuffer(bytes(1 << 20), np.uint8), "read-only"),
        (np.empty(1 << 17, object), "dtype object"),
        (np.empty(1 << 20, np.uint8)[::2], "not contiguous"),
    ],
    ids=["read-only", "objects", "gaps"],
)
def test_a_workspace_is_plain_memory(with_workspace: miofind.Solution, workspace: Any, told: str) -> None:
    with pytest.raises(WorkspaceError, match=told):
        miofind.run_solution(with_workspace, X, W, workspace=workspace)


def test_a_masked_array_is_refused(with_workspace: miofind.Solution) -> None:
    with pytest.raises(InvalidArrayError, match="masked"):
        miofind.run_solution(with_workspace, np.ma.masked_less(X, 0), W)


def test_pytorch_tensors_without_plain_memory_are_refused(with_workspace: miofind.Solution) -> None:
    torch = pytest.importorskip("torch")
    w = torch.from_numpy(W)
    for name, x in {
        "negated": torch._neg_view(torch.from_numpy(X)),
        "meta": torch.empty(X.shape, device="meta"),
    }.items():
        with pytest.raises(InvalidArrayError, match=name):
            miofind.run_solution(with_workspace, x, w)
    with pytest.raises(WorkspaceError, match="meta"):
        miofind.run_solution(
            with_workspace, torch.from_numpy(X), w, workspace=torch.empty(1 << 20, dtype=torch.uint8, device="meta")
        )


def test_a_closed_handle_still_runs_what_it_found(tmp_path: Path) -> None:
    handle = miofind.Handle("cpu", database=tmp_path / "finddb.db")
    solution = miofind.find_solutions(PROBLEM, handle=handle)[0]
    handle.close()
    handle.close()
    assert miofind.run_solution(solution, X, W).shape == X.shape


KEYWORDS = ("dilation", "groups", "handle", "math", "options", "out", "padding", "stride", "stream", "workspace")


@pytest.mark.parametrize(
    "call",
    [
        lambda: miofind.convolution(X, W, pading=1),
        lambda: miofind.convolution_backward_data(X, W, (2, 2, 6, 5), pading=1),
        lambda: miofind.convolution_backward_weights(X, X, (2, 2, 3, 3), pading=1),
    ],
    ids=["forward", "data", "weights"],
)
def test_an_unknown_keyword_is_told_all_known_ones(call: Any) -> None:
    with pytest.raises(InvalidProblemError) as caught:
        call()
    told = str(caught.value)
    assert told.startswith("unknown arguments ['pading']. Did you mean padding? Known are ")
    assert set(KEYWORDS) <= set(told.partition("Known are ")[2].split(", "))


def test_an_unknown_keyword_of_from_arrays_is_told_the_arrays() -> None:
    with pytest.raises(InvalidProblemError, match=r"Known are .* dy, .* out, .* w_shape, x, x_shape$"):
        miofind.ProblemDescription.from_arrays(x=X, w=W, frobnicate=1)


BIG = np.arange(5000.0)


@pytest.mark.parametrize("value", [BIG, BIG.reshape(50, 100), list(range(5000))], ids=["array", "2-D array", "list"])
@pytest.mark.parametrize(
    "call",
    [
        *(lambda v, n=n: miofind.FindOptions(**{n: v}) for n in ("max_error", "trials", "deterministic", "find_mode")),
        *(
            lambda v, n=n: miofind.ProblemDescription.convolution(**{"x": (1, 2, 6, 5), "w": (2, 2, 3, 3), n: v})
            for n in ("x", "padding", "stride", "groups", "direction", "dtype")
        ),
        lambda v: miofind.find_solutions(v),
        lambda v: miofind.run_solution(v),
        lambda v: miofind.Handle(v),
        lambda v: miofind.ProblemDescription.from_network_config(v),
        lambda v: miofind.convolution(X, W, math=v),
    ],
)
def test_an_array_in_a_numbers_place_is_not_printed_whole(call: Any, value: Any) -> None:
    with pytest.raises(miofind.MiofindError) as caught:
        call(value)
    assert len(str(caught.value)) < 400
    if isinstance(value, np.ndarray):
        assert f"<ndarray of shape {value.shape}>" in str(caught.value)


@pytest.mark.parametrize(
    ("call", "meant", "known"),
    [
        (lambda: miofind.FindOptions(deterministc=True), "deterministic", "workspace_limit_bytes"),  # type: ignore[call-arg]
        (lambda: miofind.Handle("cpu", databse="x"), "database", "registry"),  # type: ignore[call-arg]
        (
            lambda: miofind.ProblemDescription.convolution(x=(1, 2, 6, 5), w=(2, 2, 3, 3), pading=1),  # type: ignore[call-arg]
            "padding",
            "dilation",
        ),
    ],
    ids=["FindOptions", "Handle", "ProblemDescription.convolution"],
)
def test_a_mistyped_keyword_is_asked_after(call: Any, meant: str, known: str) -> None:
    with pytest.raises(TypeError, match=rf"Did you mean {meant}.*\? Known are .*{known}"):
        call()
