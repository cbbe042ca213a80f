"""`miofind doctor`: it tells what is there and what is missing, and never fails."""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.commands.cli_runner import FORWARD, run, run_json, use_own_folders
from helpers.runs.immediate_models import small_model

from miofind.cli import doctor as doctor_module
from miofind.cli.coverage import SuiteLayers, answered_finds, coverage
from miofind.cli.coverage_table import show_suites
from miofind.core.problem import Direction
from miofind.device.device import Device
from miofind.driver.line import parse_driver_line
from miofind.errors import MissingLibraryError, NoDeviceError
from miofind.find.immediate.model import write_model
from miofind.finddb import ProblemKey, Store
from miofind.suites import load_suite

pytestmark = pytest.mark.sampled(2)


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_folders(tmp_path, monkeypatch)


def test_it_shows_all_sections_and_makes_no_database(tmp_path: Path) -> None:
    text = run("doctor").stdout
    sections = ("Missing", "Devices", "Libraries", "FindDBs", "Coverage", "Binary cache", "Environment")
    places = [text.index(f"\n{section}") for section in sections]
    assert places == sorted(places), "what is missing comes first"
    assert Device.cpu().name in text
    assert not (tmp_path / "finddb.db").exists()


def test_the_environment_has_what_pytorch_is_run_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIOFIND_TORCH", "0")
    assert run_json("doctor")["environment"]["MIOFIND_TORCH"] == "0"


def test_coverage_of_what_was_found() -> None:
    run("find", *FORWARD, "--device", "cpu")
    layer = "conv -n 2 -c 64 -H 56 -W 56 -k 64 -y 1 -x 1 -F 1"
    run("find", layer, "--device", "cpu")
    report = run_json("doctor")
    assert report["databases"][0]["devices"] == {Device.cpu().identity: 2}
    (held,) = report["coverage"]
    assert (held["device"], held["problems"], held["types"]) == (Device.cpu().identity, 2, {"float32": 2})
    variant = {"batch": 2, "type": "float32", "layout": "NCHW", "direction": "forward"}
    assert {"suite": "resnet50", "layers": 23, "answered": 1} | variant in held["suites"]
    assert report["suites"]["resnet50"] == 23
    assert "resnet50 1/23" in run("doctor").stdout


def keys(suite: str, **variant: Any) -> list[ProblemKey]:
    problems = load_suite(suite).problems(**variant)
    return [ProblemKey(device="D", network_config=each.problem.network_config) for each in problems]


def test_coverage_tells_variants_apart() -> None:
    """Layers counted as held in whatever batch, type, layout and direction they were."""
    answered = [
        *keys("resnet50", batch=32, dtype="float16", layout="NHWC", directions=["forward"]),
        *keys("resnet50", batch=32, math="tf32", layout="NCHW", directions=["backward_data"])[:5],
        *keys("sd15_unet", batch=1, dtype="float16"),
        *keys("yardstick", dtype="float16"),
        ProblemKey(device="D", network_config="what another release wrote"),
    ]
    (held,) = coverage([*answered, *answered], [SuiteLayers(name) for name in ("resnet50", "sd15_unet", "yardstick")])
    assert held.problems == len(set(answered))
    assert held.types["tf32"] == 5
    assert held.types["unreadable"] == 1
    found = {suite.suite: suite for suite in held.suites}
    forward, data = ("NHWC", "forward"), ("NCHW", "backward_data")
    counts = {(v.batch, v.type, v.layout, v.direction): count for v, count in found["resnet50"].answered.items()}
    assert counts[(32, "float16", *forward)] == found["resnet50"].layers == 23
    assert counts[(32, "tf32", *data)] == 5
    assert (32, "tf32", *forward) not in counts
    assert {v.batch for v in found["sd15_unet"].answered if v.type == "float16"} >= {1}
    assert max(found["yardstick"].answered.values()) == found["yardstick"].layers == 191
    assert {v.batch for v in found["yardstick"].answered} == {None}


def test_coverage_tells_fused_layers_from_bare_ones() -> None:
    (held,) = coverage(keys("resnet50_fused"), [SuiteLayers("resnet50"), SuiteLayers("resnet50_fused")])
    (suite,) = held.suites
    assert (suite.suite, suite.layers, set(suite.answered.values())) == ("resnet50_fused", 24, {24})


def test_layers_of_volumes_are_covered_by_their_images() -> None:
    problems = [entry.problem.flattened for entry in load_suite("wild_3d").problems()]
    found = [ProblemKey(device="D", network_config=problem.network_config) for problem in problems]
    (held,) = coverage(found, [SuiteLayers("wild_3d")])
    (suite,) = held.suites
    assert sum(suite.answered.values()) == len(problems)


def test_the_table_of_suites(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answered = [
        key
        for dtype in ("float16", "bfloat16")
        for layout, directions in (("NHWC", list(Direction)), ("NCHW", ["forward"]))
        for key in keys("vgg16", batch=16, dtype=dtype, layout=layout, directions=directions)
    ]
    answered += keys("resnet50", batch=1, dtype="float16")[:3]
    monkeypatch.setenv("COLUMNS", "80")
    (held,) = coverage(answered, [SuiteLayers("resnet50"), SuiteLayers("vgg16")])
    show_suites(held)
    _, header, _, row, rest = capsys.readouterr().out.splitlines()
    assert header.split() == ["suite", "batch", "layers", "NCHW", "NHWC", "types"]
    assert row.split() == ["vgg16", "16", "9", "9/0/0", "9", "bfloat16,", "float16"]
    assert "Less than half of the distinct layers: resnet50 3/23" in rest


def test_of_many_problems_a_sample_is_asked() -> None:
    asked: list[frozenset[str]] = []

    def answered(device: str, network_configs: Any) -> Any:
        asked.append(frozenset(network_configs))
        return frozenset(sorted(network_configs)[1:])

    known = keys("resnet50", batch=32)
    (held,) = coverage(known, [SuiteLayers("resnet50")], answered, 10)
    assert (held.problems, held.asked, held.answered) == (23, len(asked[0]), len(asked[0]) - 1)
    assert 5 <= held.asked <= 10
    assert max(held.suites[0].answered.values()) == 22, "what was not asked is known"
    (held,) = coverage(known, [SuiteLayers("resnet50")], answered)
    assert (held.asked, held.answered) == (23, 22)


def test_the_shipped_coverage_is_told_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MIOFIND_SYSTEM_DB")
    monkeypatch.setenv("COLUMNS", "80")
    text = run("doctor").stdout
    assert re.search(r"^convnext_tiny_fused +1 +16 ", text, re.MULTILINE), "names of suites are whole"
    coverage_text = text[text.index("\nCoverage") : text.index("\nBinary cache")]
    assert "NVIDIA H200, 132 SMs, sm_90: " in coverage_text
    assert re.search(r"finds answered without measuring: \d+ of (\d+); a sample of \1, --all asks all", coverage_text)
    assert not (tmp_path / "finddb.db").exists()
    (held,) = run_json("doctor")["coverage"]
    answered = [
        suite["answered"]
        for suite in held["suites"]
        if (suite["suite"], suite["batch"], suite["type"]) == ("resnet50", 32, "float16")
    ]
    assert answered == [23] * 6


def test_what_is_answered_is_asked_of_the_databases_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The databases of the first question answered later ones, and one unreadable problem took all coverage with it."""
    (problem,) = parse_driver_line(" ".join(FORWARD))
    device, known = Device.cpu().identity, {problem.network_config, "what another release wrote"}
    assert answered_finds(device, known) == set()
    run("find", *FORWARD, "--device", "cpu", "--db", str(tmp_path / "other.db"))
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", str(tmp_path / "other.db"))
    assert answered_finds(device, known) == {problem.network_config}
    assert answered_finds("no device", known) == set()


def test_shipped_databases_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = tmp_path / "shipped.db"
    run("find", *FORWARD, "--device", "cpu", "--db", str(shipped))
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", str(shipped))
    kinds = {database["kind"]: database for database in run_json("doctor")["databases"]}
    assert kinds["shipped"]["problems"] == 1
    assert kinds["user"]["problems"] == 0


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MIOFIND_DB", "damaged"),
        ("MIOFIND_DB", "folder"),
        ("MIOFIND_DB", "file/finddb.db"),
        ("MIOFIND_DB", "postgresql://host/db"),
        ("MIOFIND_SYSTEM_DB", "missing"),
        ("MIOFIND_SYSTEM_DB", "damaged"),
        ("MIOFIND_CACHE_DIR", "file/cache"),
    ],
)
def test_what_cannot_be_used_is_told(
    variable: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "damaged").write_bytes(b"no database" * 1000)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(variable, value if "://" in value else str(tmp_path / value))
    before = run_json("doctor")["missing"]
    assert len(set(before)) == len(before)
    assert any("FindDB" in line or "SYSTEM_DB" in line or "cache" in line for line in before)
    assert "Missing\n" in run("doctor").stdout


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("named", "told"),
    [("missing.db", "neither a file nor a folder"), ("damaged", "not an SQLite"), ("empty", "(*.db)")],
)
def test_a_system_database_that_is_none_is_no_empty_coverage(
    named: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The FindDBs that are asked left it out, and the coverage was "nothing yet", as before a first find."""
    (tmp_path / "damaged").write_bytes(b"no database" * 1000)
    (tmp_path / "empty").mkdir()
    path = str(tmp_path / named)
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", path)
    text = run("doctor").stdout
    missing, _, rest = text.partition("\nDevices\n")
    (line,) = (line for line in missing.splitlines() if path in line)
    assert told in line
    assert f"shipped {path}: CANNOT BE USED, see above" in rest
    assert "Coverage\n  CANNOT BE TOLD, see above\n" in rest


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    monkeypatch.setenv("MIOFIND_DB", str(tmp_path / "locked" / "finddb.db"))
    assert not run_json("doctor")["databases"][0]["usable"]


def test_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise MissingLibraryError("CuPy is not installed: pip install it")

    def no_package(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor_module, "has_driver", lambda: True)
    monkeypatch.setattr(doctor_module, "cuda_device_count", missing)
    monkeypatch.setattr(doctor_module, "nvrtc_version", missing)
    monkeypatch.setattr(doctor_module, "versions", lambda _: {})
    monkeypatch.setattr(metadata, "version", no_package)
    report = run_json("doctor")
    assert report["libraries"] == {}
    assert "CuPy is not installed: pip install it" in report["missing"]


def test_a_machine_without_a_driver_lacks_nothing_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told to install CuPy by the extra that the driver supports."""
    monkeypatch.setattr(doctor_module, "has_driver", lambda: False)
    monkeypatch.setattr(doctor_module, "cuda_device_count", lambda: pytest.fail("there is nothing to ask"))
    report = run_json("doctor")
    assert report["notes"] == ['this machine has no NVIDIA driver; the CPU place works: --device cpu, Handle("cpu")']
    assert [line for line in report["missing"] if "CuPy" in line or "driver" in line] == []
    devices = run("doctor").stdout.partition("\nDevices\n")[2].partition("\nLibraries\n")[0]
    assert devices.splitlines()[-1] == f"  {report['notes'][0]}"


@pytest.mark.parametrize(
    ("cuda", "cupy", "told"),
    [
        ("'12.8'", "cupy-cuda13x", "PyTorch is built for CUDA 12.8, which cupy-cuda13x is not"),
        ("'13.0'", "cupy-cuda13x", ""),
        ("'12.8'", "", ""),
        ("None", "cupy-cuda13x", ""),
    ],
)
def test_a_pytorch_for_another_cuda_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str, cupy: str, told: str
) -> None:
    """Pip takes an old PyTorch for the extra of another CUDA version."""
    (tmp_path / "__init__.py").touch()
    (tmp_path / "version.py").write_text(f"debug = False\ncuda: Optional[str] = {cuda}\nhip = '1'\n", encoding="utf-8")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(doctor_module.importlib.util, "find_spec", lambda name: spec if name == "torch" else None)
    monkeypatch.setattr(doctor_module, "_version_of", lambda name: "14.2" if name == cupy else "")
    found = doctor_module._Examination()
    doctor_module._find_two_cudas(found)
    assert [line.partition(":")[0] for line in found.missing] == ([told] if told else [])


@pytest.mark.parametrize("error", [NoDeviceError("the driver is gone"), OSError("broken"), ImportError("half there")])
def test_every_probe_may_fail(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(doctor_module, "has_driver", lambda: True)
    for name in ("cuda_device_count", "nvrtc_version", "versions", "suite_layers", "system_addresses", "BinaryCache"):
        monkeypatch.setattr(doctor_module, name, fail)
    missing = "\n".join(run_json("doctor")["missing"])
    assert missing.count(str(error)) >= (1 if isinstance(error, NoDeviceError) else 6)
    run("doctor")


def test_models_are_told_of_and_a_damaged_one_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "shipped"
    folder.mkdir()
    for name in ("h200", "damaged"):
        Store(folder / f"{name}.db").open().close()
        write_model(small_model(solvers={"ConvDirectTiled": 0}), folder / f"{name}.model")
    damaged = folder / "damaged.model"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", str(folder))
    report = run_json("doctor")
    assert [(model["problems"], model["changed"]) for model in report["models"]] == [(1, ["ConvDirectTiled"])]
    told = [line for line in report["missing"] if "model" in line]
    assert len(told) == 2
    assert any("damaged.model is refused: it is damaged" in line for line in told)
    assert any("ConvDirectTiled changed since it was trained" in line for line in told)
    text = run("doctor").stdout
    assert "h200.model: NVIDIA H200, 132 SMs, sm_90, 1 problem; off the best: trees 2.0 %" in text


def test_what_is_absent_and_optional_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "Missing: nothing" was said without a GPU and without any extra."""
    monkeypatch.setattr(doctor_module, "has_driver", lambda: False)
    monkeypatch.setattr(doctor_module, "_find_unknown_devices", lambda found: None)
    assert "Missing\n  nothing but a GPU (see Devices)" in run("doctor").stdout
    found = doctor_module.importlib.util.find_spec
    monkeypatch.setattr(doctor_module.importlib.util, "find_spec", lambda name: None if name == "onnx" else found(name))
    text = run("doctor").stdout
    assert "Missing\n  nothing but a GPU (see Devices) and optional libraries (see Libraries)\n" in text
    assert "  not installed: onnx (extra onnx): networks in .onnx files\n" in text
    assert run_json("doctor")["not_installed"] == ["onnx (extra onnx): networks in .onnx files"]


def test_one_fault_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finds that were tried of what other FindDBs know told of it once more."""
    run("find", *FORWARD, "--device", "cpu")
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", str(tmp_path / "finddb.db"))
    monkeypatch.setenv("MIOFIND_DB", "file:///x")
    result = run("doctor")
    assert result.stderr == ""
    (told,) = (line for line in result.stdout.splitlines() if "named by file" in line)
    assert told.startswith("  user FindDB ")
