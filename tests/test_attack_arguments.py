"""Arguments of the API that make no sense: one error that names them, nothing taken for something else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import miofind
from miofind.errors import (
    DatabaseError,
    InvalidArrayError,
    InvalidOptionError,
    InvalidProblemError,
    WorkspaceError,
)
from miofind.operands import overlap_check

PROBLEM = miofind.ProblemDescription.convolution(x=(2, 2, 6, 5), w=(2, 2, 3, 3), padding=1)
X = np.ones((2, 2, 6, 5), np.float32)
W = np.ones((2, 2, 3, 3), np.float32)


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[miofind.Handle]:
    database = tmp_path_factory.mktemp("attack") / "finddb.db"
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
    overlaps = overlap_check((100, 50, 10), 2, 0)
    assert not overlaps(1000, 2000, 1100)
    assert not overlaps(1000, 2000, 990)
    assert overlaps(1000, 2000, 1099)
    assert overlaps(1000, 2000, 991)
    assert overlaps(1000, 2000, 2049)
    assert not overlaps(1000, 2000, 2050)


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
