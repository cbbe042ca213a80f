"""`miofind doctor`: it tells what is there and what is missing, and never fails."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import pytest
from cli_runner import FORWARD, run, run_json, use_own_folders

from miofind.cli import doctor as doctor_module
from miofind.device import Device
from miofind.errors import MissingLibraryError, NoDeviceError


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_folders(tmp_path, monkeypatch)


def test_it_shows_all_sections_and_makes_no_database(tmp_path: Path) -> None:
    text = run("doctor").stdout
    for section in ("Devices", "Libraries", "FindDBs", "Coverage", "Binary cache", "Environment", "Missing"):
        assert f"\n{section}" in text
    assert Device.cpu().name in text
    assert not (tmp_path / "finddb.db").exists()


def test_coverage_of_what_was_found() -> None:
    run("find", *FORWARD, "--device", "cpu")
    layer = "conv -n 1 -c 512 -H 7 -W 7 -k 512 -y 3 -x 3 -p 1 -q 1 -F 1"
    run("find", layer, "--device", "cpu")
    report = run_json("doctor")
    held = report["databases"][0]["devices"][0]
    assert held["device"] == Device.cpu().identity
    assert held["dtypes"] == {"float32": 2}
    assert held["suites"]["resnet50"] == 1
    assert report["suites"]["resnet50"] == 23
    assert "resnet50 1/23" in run("doctor").stdout


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
    assert any("FindDB" in line or "SYSTEM_DB" in line or "cache" in line for line in before)
    assert "Missing\n" in run("doctor").stdout


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

    monkeypatch.setattr(doctor_module, "cuda_device_count", missing)
    monkeypatch.setattr(doctor_module, "nvrtc_version", missing)
    monkeypatch.setattr(doctor_module, "versions", lambda _: {})
    monkeypatch.setattr(metadata, "version", no_package)
    report = run_json("doctor")
    assert report["libraries"] == {}
    assert "CuPy is not installed: pip install it" in report["missing"]


@pytest.mark.parametrize("error", [NoDeviceError("the driver is gone"), OSError("broken"), ImportError("half there")])
def test_every_probe_may_fail(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    for name in ("cuda_device_count", "nvrtc_version", "versions", "suite_layers", "shipped_paths", "BinaryCache"):
        monkeypatch.setattr(doctor_module, name, fail)
    missing = "\n".join(run_json("doctor")["missing"])
    assert missing.count(str(error)) >= 6
    run("doctor")
