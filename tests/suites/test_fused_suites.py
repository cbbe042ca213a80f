"""Suites with epilogues: the column, and ten networks against their bare suites and published figures."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from miofind.core.problem import Direction, Epilogue, ProblemDescription
from miofind.errors import InvalidProblemError
from miofind.suites import SuiteRow, load_csv, load_suite, suite_names

_COUNTS = {
    "resnet50": {"bias.relu": 33, "bias.residual.relu": 16, "bias": 4},
    "resnext50_32x4d": {"bias.relu": 33, "bias.residual.relu": 16, "bias": 4},
    "vgg16": {"bias.relu": 13},
    "mobilenet_v2": {"bias.clamp": 35, "bias.residual": 10, "bias": 7},
    "efficientnet_b0": {"bias.silu": 49, "bias.sigmoid": 16, "bias.residual": 9, "bias": 7},
    "convnext_tiny": {"bias.gelu": 18, "scale.bias.residual": 18, "bias": 22},
    "yolov8s": {"bias.silu": 51, "bias.silu.residual": 6, "bias": 6, "": 1},
    "sd15_unet": {"bias.channel_bias": 22, "bias.residual": 38, "bias": 38},
    "sd_vae_decoder": {"bias.residual": 14, "bias": 22},
    "unet_segmentation": {"bias.relu": 18, "bias": 1, "": 4},
}

# Multiply-adds of one sample in 1e9: torchvision's models' documentation (linear classifiers are 1e-3 to 1e-1 of it),
# and ultralytics' table of YOLOv8 (28.6 GFLOPs).
_PUBLISHED = {
    "resnet50": 4.09,
    "resnext50_32x4d": 4.23,
    "vgg16": 15.47,
    "mobilenet_v2": 0.301,
    "efficientnet_b0": 0.386,
    "convnext_tiny": 4.456,
    "yolov8s": 14.3,
}

_HEADER = "n,c,h,w,k,fy,fx,epilogue"


def rows(network: str) -> tuple[SuiteRow, ...]:
    return load_suite(f"{network}_fused").rows


def counted(named: Iterable[tuple[ProblemDescription, int]]) -> Counter[ProblemDescription]:
    found: Counter[ProblemDescription] = Counter()
    for problem, count in named:
        found[problem] += count
    return found


def test_there_are_ten_networks() -> None:
    assert {name for name in suite_names() if name.endswith("_fused")} == {f"{name}_fused" for name in _COUNTS}


@pytest.mark.parametrize("network", _COUNTS)
def test_epilogues_of_a_network(network: str) -> None:
    counts: Counter[str] = Counter()
    for row in rows(network):
        counts[row.problem.epilogue.text] += row.count
    assert counts == _COUNTS[network]


@pytest.mark.parametrize("network", sorted(set(_COUNTS) - {"sd_vae_decoder"}))
def test_layers_without_epilogues_are_those_of_the_bare_suite(network: str) -> None:
    bare = counted((row.problem, row.count) for row in load_suite(network).rows)
    fused = counted((row.problem.bare.in_direction(Direction.FORWARD), row.count) for row in rows(network))
    assert fused == bare


@pytest.mark.parametrize(("network", "multiply_adds"), _PUBLISHED.items())
def test_arithmetic_of_a_network(network: str, multiply_adds: float) -> None:
    flops = sum(row.count * row.problem.flops for row in rows(network))
    assert flops / 2e9 == pytest.approx(multiply_adds, rel=0.01)


@pytest.mark.parametrize(
    ("network", "weights"), [("sd_vae_decoder", 49_490_199 - 1_050_624), ("unet_segmentation", 31.04e6)]
)
def test_weights_of_a_network(network: str, weights: float) -> None:
    """diffusers' Decoder without the attention's linear layers; milesial/Pytorch-UNet with two classes."""
    assert sum(row.count * row.problem.w.size for row in rows(network)) == pytest.approx(weights, rel=0.005)


def test_the_script_writes_the_shipped_files() -> None:
    path = Path(__file__).parents[2] / "scripts" / "fused_suites.py"
    spec = importlib.util.spec_from_file_location("fused_suites", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "fused_suites", script)
        spec.loader.exec_module(script)
    for file, text in script.tables().items():
        assert file.read_text(encoding="utf-8") == text, file.name


def test_a_variant_keeps_the_epilogue() -> None:
    problems = load_suite("resnet50_fused").problems(batch=32, dtype="bfloat16", layout="NHWC")
    assert problems[0].problem.network_config == (
        "conv2d-forward-n32-c3-i224x224-k64-f7x7-p3x3-s2x2-bfloat16-NHWC-e.bias.relu"
    )
    assert sum(entry.count for entry in problems) == 53


def test_fused_rows_drop_out_of_other_directions() -> None:
    assert load_suite("resnet50_fused").problems(directions=["backward_data"]) == []
    forward = load_suite("resnet50_fused").problems()
    assert load_suite("resnet50_fused").problems(directions=list(Direction)) == forward
    assert {entry.problem.direction for entry in load_suite("unet_segmentation_fused").problems()} == {
        Direction.FORWARD,
        Direction.BACKWARD_DATA,
    }


@pytest.mark.parametrize(
    ("dtype", "epilogue"),
    [
        (None, "float32.bias.relu"),
        ("bfloat16", "float32.bias.relu"),
        ("float32", "bias.relu"),
        ("float64", "bias.relu"),
    ],
)
def test_the_dtype_of_a_bias_follows_the_one_asked_for(tmp_path: Path, dtype: str | None, epilogue: str) -> None:
    table = tmp_path / "mine.csv"
    table.write_text(f"{_HEADER},dtype\n1,8,8,8,8,1,1,float32.bias.relu,float16\n1,8,8,8,8,1,1,,float16\n", "utf-8")
    fused, bare = load_csv(table).problems(dtype=dtype)
    assert fused.problem.epilogue == Epilogue.of(epilogue)
    assert not bare.problem.epilogue


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("relu.bias", "mine.csv, line 2, column epilogue: .* in the order of computation: 'bias.relu'"),
        ("bais", "mine.csv, line 2, column epilogue: .*unknown word 'bais'.*bias"),
        ("float16.bias", "mine.csv, line 2: .*float16"),
    ],
)
def test_wrong_epilogues_are_refused_with_their_place(tmp_path: Path, text: str, words: str) -> None:
    table = tmp_path / "mine.csv"
    table.write_text(f"{_HEADER}\n1,8,8,8,8,1,1,{text}\n", encoding="utf-8")
    with pytest.raises(InvalidProblemError, match=words):
        load_csv(table)


def test_a_training_step_has_three_passes_of_each_convolution() -> None:
    rows = load_suite("resnet50_training").rows
    counts = Counter[tuple[str, str]]()
    for row in rows:
        counts[str(row.problem.direction), str(row.problem.epilogue)] += row.count
    assert counts == {
        ("forward", "statistics"): 53,
        ("backward_weights", "bias_gradient"): 53,
        ("backward_data", "drelu"): 32,
        ("backward_data", "residual.drelu"): 15,
        ("backward_data", "residual"): 1,
        ("backward_data", ""): 4,
    }
