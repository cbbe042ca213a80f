"""One binding is imported without the package around it, and who imports that later gets the same module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from miofind.errors import MissingLibraryError
from miofind.libraries.nvmath_bindings import binding

ALL = "from nvmath.bindings import cublasLt, cufft\n"
NEEDS_INTERNAL = "from nvmath.bindings._internal import utils\nplans = utils.plans\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of nvmath's form, the only one that can be found."""
    folder = tmp_path / "nvmath"
    (folder / "bindings" / "_internal").mkdir(parents=True)
    (folder / "__init__.py").write_text("from nvmath import bindings\n")
    (folder / "bindings" / "__init__.py").write_text(ALL)
    (folder / "bindings" / "_internal" / "__init__.py").write_text("")
    (folder / "bindings" / "_internal" / "utils.py").write_text("plans = []\n")
    for name in ("cublasLt", "cufft"):
        (folder / "bindings" / f"{name}.py").write_text(NEEDS_INTERNAL)
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "nvmath"}
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "nvmath"]:
        del sys.modules[name]
    sys.modules.update(kept)


def test_a_binding_comes_alone(package: Path) -> None:
    found = binding("cublasLt")
    assert found.plans == []
    assert {"nvmath", "nvmath.bindings", "nvmath.bindings.cufft"}.isdisjoint(sys.modules)
    assert binding("cublasLt") is found


def test_who_imports_the_package_later_has_the_same_module(package: Path) -> None:
    found = binding("cublasLt")
    bindings = importlib.import_module("nvmath").bindings
    assert bindings.cublasLt is found
    assert bindings.cufft.plans is found.plans
    assert binding("cufft") is bindings.cufft


def test_a_binding_that_needs_more_gets_it(package: Path) -> None:
    (package / "__init__.py").write_text("version = 7\nfrom nvmath import bindings\n")
    (package / "bindings" / "cufft.py").write_text("import nvmath\nversion = nvmath.version\n")
    assert binding("cufft").version == 7


@pytest.mark.parametrize("broken", [False, True])
def test_what_cannot_be_imported_is_missing(package: Path, monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    if broken:
        (package / "bindings" / "cublasLt.py").write_text("import a_library_that_is_not_there\n")
    else:
        monkeypatch.setattr(sys, "path", [])
    with pytest.raises(MissingLibraryError, match="nvmath-python cannot be imported"):
        binding("cublasLt")
    assert "nvmath" not in sys.modules
