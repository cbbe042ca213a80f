"""docs/benchmarks.md says what the kept figures say, and each problem has one figure."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from miofind import ProblemDescription

ROOT = Path(__file__).parents[2]


@pytest.fixture
def document(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    for name in ("document", "figures", "script"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("document")


def test_the_document_is_what_the_script_makes(document: ModuleType) -> None:
    kept = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert kept == document.document(), "python benchmarks/document.py writes it"


def test_the_readmes_table_is_one_of_the_documents(document: ModuleType) -> None:
    whole = document.slots(document.figures.kept())["whole"]
    table = "\n".join(line for line in whole.splitlines() if line.startswith("|"))
    assert table in (ROOT / "README.md").read_text(encoding="utf-8")


def test_no_problem_has_two_figures(document: ModuleType) -> None:
    """Files overlapped once, and tables were made of the newer rows by hand."""
    counts = Counter((figure.whole, figure.problem.network_config) for figure in document.figures.kept())
    assert len(counts) > 3000
    assert [key for key, count in counts.items() if count > 1] == []


def test_means_of_kept_files_are_those_of_their_rows(document: ModuleType) -> None:
    for path in sorted(document.figures.RESULTS.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not content["command"].startswith("miofind bench"):
            continue
        for told in content["means"]:
            rows = [row for row in content["rows"] if told["class"] in (row["class"], "all") and row["ratio"]]
            assert told["problems"] == len(rows), path.name
            assert told["least_ratio"] == min(row["ratio"] for row in rows), path.name


def row(network_config: str, ratio: float | None, solution: str = "ConvCudnn:{}") -> dict[str, Any]:
    return {"network_config": network_config, "ratio": ratio, "solution": solution}


def test_the_whole_product_comes_first_once_it_is_measured(document: ModuleType, tmp_path: Path) -> None:
    directions = ("forward", "backward_data", "backward_weights")
    cases = [(direction, layout) for direction in directions for layout in ("NHWC", "NCHW")]
    problems = [f"conv2d-{direction}-n4-c64-i9x9-k64-f1x1-float16-{layout}" for direction, layout in cases]
    rows = [row(problem, 2.0) for problem in problems[1:]] + [row(problems[0], 0.5, "ConvDirectNaive:{}")]
    content = {"command": "python benchmarks/whole_product.py", "rows": [*rows, row(problems[0], None)]}
    (tmp_path / "whole_product_a.json").write_text(json.dumps(content), encoding="utf-8")
    section = document.whole_section(document.figures.kept(tmp_path))
    assert "| 1x1 (1) | 0.50 | 2.00 | 2.00 | 2.00 | 2.00 | 2.00 |" in section
    assert "in 1 of 6 problems (the least ratio is\n0.50)" in section
    assert "own kernels is the answer in 1," in section
    assert document.whole_section([]) == ""


def test_a_network_of_fused_convolutions_has_a_line(document: ModuleType, tmp_path: Path) -> None:
    assert document.fused_section(tmp_path) == ""
    problem = ProblemDescription.convolution(
        x=(8, 64, 7, 7), w=(64, 64, 1, 1), dtype="float16", layout="NHWC", epilogue="bias.relu"
    )
    network = {
        "suite": "vgg16_fused",
        "layers": 13,
        "sums_ms": {"miofind": 1.25},
        "sum_ratios": {"one-pass": 1.5, "torch": 2.0, "cudnn": None},
        "mean_ratios": {"one-pass": 1.625, "torch": 2.25, "cudnn": 1.125},
    }
    rows = [{"suite": "vgg16_fused", "network_config": problem.network_config}]
    content = json.dumps({"networks": [network], "rows": rows})
    (tmp_path / "fused_networks_float16_nhwc_b8_h200.json").write_text(content, encoding="utf-8")
    assert (
        "| vgg16, float16 NHWC, batch 8 | 13 | 1.250 | 1.50 | 1.62 | 2.00 | 2.25 | - | 1.12 |\n"
        in document.fused_section(tmp_path)
    )
