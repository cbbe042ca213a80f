"""Names of a package that are imported when they are first asked for: most processes need few of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from miofind.process.forks import loading
from miofind.process.garbage import without_garbage_collection


class LateNames:
    """What a package names and imports late: its `__getattr__`, and `listed` its `__dir__`.

    Args:
        package: its name.
        homes: modules, and what of them is named in the package.
    """

    def __init__(self, package: str, homes: Mapping[str, Iterable[str]]) -> None:
        self._package = package
        self._home_of = {name: home for home, names in homes.items() for name in names}

    def __call__(self, name: str) -> Any:
        """What is named so, kept in the package from now on, or a module of the package.

        Raises:
            AttributeError: it is neither.
        """
        home = self._home_of.get(name)
        if home is None:
            return self._module(name)
        value = getattr(imported(home), name)
        setattr(sys.modules[self._package], name, value)
        return value

    def listed(self) -> list[str]:
        """All that is named in the package, imported or not."""
        return sorted({*vars(sys.modules[self._package]), *self._home_of})

    def _module(self, name: str) -> Any:
        told = f"module {self._package!r} has no attribute {name!r}"
        if name.startswith("_") or not name.isidentifier():
            raise AttributeError(told)
        module = f"{self._package}.{name}"
        try:
            return imported(module)
        except ModuleNotFoundError as error:
            raise AttributeError(told if error.name == module else f"{told}: {error}") from error


def imported(module: str) -> Any:
    """A module that is imported late: forks wait, and nobody searches for garbage meanwhile."""
    with loading(), without_garbage_collection():
        return importlib.import_module(module)
