"""Names that packages import late: kept once they are there, imported without a search for garbage, and told of."""

from __future__ import annotations

import gc
import importlib
import sys
from types import ModuleType

import pytest
from helpers.processes.imports import searches_noted

from miofind.process.late_names import LateNames

PACKAGE = "late_package"


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An empty package."""
    made = ModuleType(PACKAGE)
    made.__path__ = []
    monkeypatch.setitem(sys.modules, PACKAGE, made)
    return made


@pytest.fixture
def late() -> LateNames:
    return LateNames(PACKAGE, {"json.decoder": ("JSONDecoder",), "json": ("dumps",)})


def test_a_name_is_kept_once_it_was_asked_for(package: ModuleType, late: LateNames) -> None:
    """Each further use of it is an attribute's."""
    from json.decoder import JSONDecoder

    assert not hasattr(package, "JSONDecoder")
    assert late("JSONDecoder") is package.JSONDecoder is JSONDecoder
    assert not hasattr(package, "dumps")


def test_it_is_imported_without_a_search_for_garbage(
    package: ModuleType, late: LateNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One among all objects of PyTorch and of a network takes 0.1 s."""
    enabled = searches_noted(monkeypatch)
    late("dumps")
    assert enabled == [False]
    assert gc.isenabled()


@pytest.mark.parametrize("name", ["nothing_of_it", "_json", "json.decoder", "__path__"])
def test_what_a_package_does_not_name_is_told_of_as_by_any_module(
    package: ModuleType, late: LateNames, name: str
) -> None:
    with pytest.raises(AttributeError) as raised:
        late(name)
    assert str(raised.value) == f"module {PACKAGE!r} has no attribute {name!r}"


def test_a_module_that_lacks_another_tells_which(
    package: ModuleType, late: LateNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(name: str) -> ModuleType:
        raise ModuleNotFoundError("No module named 'absent'", name="absent")

    monkeypatch.setattr(importlib, "import_module", lacks)
    with pytest.raises(AttributeError) as raised:
        late("charts")
    assert str(raised.value) == f"module {PACKAGE!r} has no attribute 'charts': No module named 'absent'"
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)
