"""A binding of nvmath is had without the rest of it, which whoever imports nvmath has as ever."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.processes.waiting import LIMIT_S

from miofind.libraries.nvmath_bindings import binding

FILES = {
    "__init__.py": "from nvmath import bindings, linalg\nwhole = True\n",
    "linalg.py": "",
    "bindings/__init__.py": "from nvmath.bindings import cublasLt, cufft\n",
    "bindings/_internal/__init__.py": "",
    "bindings/_internal/utils.py": "",
    "bindings/cublasLt.py": "from nvmath.bindings._internal import utils\nname = 'cublasLt'\n",
    "bindings/cufft.py": "from nvmath.bindings._internal import utils\nname = 'cufft'\n",
}


def of_nvmath() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "nvmath"]


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No module of an nvmath that is installed."""
    for name in of_nvmath():
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in of_nvmath():
        del sys.modules[name]


@pytest.fixture
def nvmath(others: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package like it."""
    for name, text in FILES.items():
        file = tmp_path / "nvmath" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("nvmath")
def test_a_binding_comes_alone() -> None:
    found = binding("cublasLt")
    assert found.name == "cublasLt"
    assert binding("cublasLt") is found
    assert binding("cufft").name == "cufft"
    assert not {"nvmath", "nvmath.bindings", "nvmath.linalg"} & set(of_nvmath())


@pytest.mark.usefixtures("nvmath")
def test_the_whole_package_can_be_imported_before_and_after() -> None:
    found = binding("cublasLt")
    whole = importlib.import_module("nvmath")
    assert whole.whole
    assert whole.bindings.cublasLt is found
    assert binding("cufft") is whole.bindings.cufft


@pytest.mark.usefixtures("nvmath")
def test_who_imports_nvmath_meanwhile_has_all_of_it_afterwards(tmp_path: Path) -> None:
    """As another thread may, which finds the packages that stand there while a binding is imported."""
    (tmp_path / "nvmath/bindings/cufft.py").write_text("import nvmath, nvmath.bindings\n", encoding="utf-8")
    found = binding("cufft").nvmath
    assert found is not importlib.import_module("nvmath")
    assert found.whole
    assert found.bindings.cublasLt is binding("cublasLt")


IMPORTS_BESIDE = """
import importlib, threading
told = []
def import_all():
    try:
        told.append(importlib.import_module("nvmath").bindings.cublasLt.name)
    except BaseException as error:
        told.append(error)
thread = threading.Thread(target=import_all)
thread.start()
thread.join(0.5)  # one that waits for this import is not done by then
"""


@pytest.mark.usefixtures("nvmath")
def test_a_thread_that_imports_nvmath_beside_a_binding_waits_for_it(tmp_path: Path) -> None:
    (tmp_path / "nvmath/bindings/cufft.py").write_text(IMPORTS_BESIDE, encoding="utf-8")
    made = binding("cufft")
    made.thread.join(LIMIT_S)
    assert made.told == ["cublasLt"]
    assert importlib.import_module("nvmath").bindings.cufft is made


@pytest.mark.usefixtures("nvmath")
def test_a_binding_that_needs_more_of_nvmath_gets_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "nvmath/bindings/cufft.py").write_text("from nvmath.linalg import name\n", encoding="utf-8")
    (tmp_path / "nvmath/linalg.py").write_text("import nvmath\nname = nvmath.__file__\n", encoding="utf-8")
    assert binding("cufft").name == str(tmp_path / "nvmath/__init__.py")
    assert "nvmath" in sys.modules


@pytest.mark.usefixtures("nvmath")
def test_a_binding_that_cannot_be_imported_leaves_no_bare_package_behind(tmp_path: Path) -> None:
    (tmp_path / "nvmath/bindings/cufft.py").write_text("import a_missing_library", encoding="utf-8")
    with pytest.raises(ImportError, match="a_missing_library"):
        binding("cufft")
    assert "nvmath" not in sys.modules


@pytest.mark.usefixtures("others")
def test_without_nvmath_it_is_an_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ImportError, match="nvmath-python is not installed"):
        binding("cublasLt")
