"""Exported programs: their convolutions by layer, with numbers for what is symbolic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.commands.cli_runner import run_json, use_own_folders
from torch import nn

import miofind.torch
from miofind.errors import InvalidOptionError

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # PyTorch 2.13 warns of its own code


class Small(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2))

    def forward(self, x: Any) -> Any:
        return self.inner(self.inner(x)[:, :3])


@pytest.fixture(scope="module")
def program() -> Any:
    """Of symbolic batch and height."""
    dimensions = {0: torch.export.Dim("batch", max=64), 2: torch.export.Dim("height", min=4, max=128)}
    return torch.export.export(Small(), (torch.randn(2, 3, 8, 10),), dynamic_shapes=(dimensions,))


@pytest.fixture(scope="module")
def file(program: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "net.pt2"
    torch.export.save(program, path)
    return path


def test_a_program_s_problems_are_the_model_s(program: Any) -> None:
    found = miofind.torch.exported_problems(program, sizes={"x.0": 5, "x.2": 12}, device="cpu")
    expected = miofind.torch.problems(Small(), (5, 3, 12, 10), device="cpu")
    assert [call.problem for call in found.calls] == [call.problem for call in expected.calls]
    assert [call.layer for call in found.calls] == ["inner.0", "inner.1"] * 2
    assert found.calls[3].problem.network_config == "conv2d-backward_data-n5-c4-i48x40-k8-f2x2-s2x2-g2-float32-NCHW"
    on_gpu = miofind.torch.exported_problems(program, sizes={"x.0": 5, "x.2": 12})
    assert {call.problem.math for call in on_gpu.calls if call.problem} == {"tf32"}


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({}, ["x.0", "x.2", "give"]),
        ({"x.0": 5}, ["x.2"]),
        ({"x.0": 5, "x.1": 3}, ["'x.1'", "x.2"]),
        ({"x.0": 5, "batch": 3}, ["'batch'", "it has", "x.0"]),
        ({"x.0": 65}, ["65", "0 to 64"]),
        ({"x.0": "many"}, ["'many'"]),
    ],
)
def test_sizes_that_do_not_fit_are_named(program: Any, sizes: Any, words: list[str]) -> None:
    with pytest.raises(InvalidOptionError) as caught:
        miofind.torch.exported_problems(program, sizes=sizes)
    assert [word for word in words if word not in str(caught.value)] == []


def test_files_are_suites(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_folders(tmp_path, monkeypatch)
    words = ["--size", "x.0=2", "--size", "x.2=8", "--device", "cpu", "--math", "ieee", "--dry-run"]
    assert run_json("tune", "--suite", str(file), *words)["forecasts"][0]["problems"] == 4


@pytest.mark.parametrize("wrong", ["none.pt2", "damaged.pt2", 5])
def test_what_is_no_program_is_one_error(
    wrong: Any, file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if wrong == "damaged.pt2":
        (tmp_path / wrong).write_bytes(file.read_bytes()[:3000])
    given = tmp_path / wrong if isinstance(wrong, str) else wrong
    with pytest.raises(InvalidOptionError, match=f"{wrong}"):
        miofind.torch.exported_problems(given)
    assert wrong != "none.pt2" or not caplog.records  # torch.export logs a traceback
