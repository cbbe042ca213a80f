"""One binding of nvmath-python without the rest of the package, whose import loads six libraries and takes 0.3 s."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Iterator
from importlib import _bootstrap
from importlib.machinery import ModuleSpec
from typing import Any

from miofind.process.forks import loading

logger = logging.getLogger(__name__)


def binding(name: str) -> Any:
    """The module `nvmath.bindings.<name>`; it loads its library when it is first called.

    Its packages are bare ones while it is imported, so that their own imports are left out. They are not kept: who
    imports nvmath afterwards gets all of it, with this module in it.

    Raises:
        ImportError: nvmath-python is not installed.
    """
    module = f"nvmath.bindings.{name}"
    with loading(), _import_lock("nvmath"):
        if module in sys.modules:
            return sys.modules[module]
        if "nvmath" in sys.modules:
            return importlib.import_module(module)
        found = importlib.util.find_spec("nvmath")
        if found is None or not found.submodule_search_locations:
            raise ImportError("nvmath-python is not installed", name="nvmath")
        try:
            with _bare_packages(found.submodule_search_locations[0]):
                return importlib.import_module(module)
        except (ImportError, AttributeError) as error:  # of a release whose bindings need more
            logger.debug("%s is imported with all of nvmath: %s", module, error)
            return importlib.import_module(module)


def _import_lock(name: str) -> contextlib.AbstractContextManager[Any]:
    """What Python holds while it imports a module, so that other threads' imports of it wait.

    Source: `_find_and_load` of CPython's Lib/importlib/_bootstrap.py; nothing public holds it.
    """
    made: contextlib.AbstractContextManager[Any] = getattr(_bootstrap, "_ModuleLockManager", contextlib.nullcontext)(
        name
    )
    return made


@contextlib.contextmanager
def _bare_packages(folder: str) -> Iterator[None]:
    """Packages in nvmath's place that say where its modules are, and no more."""
    bare = {"nvmath": folder, "nvmath.bindings": os.path.join(folder, "bindings")}
    for package, path in bare.items():
        sys.modules[package] = _BarePackage(package, path)
    try:
        yield
    finally:
        for package in bare:
            del sys.modules[package]


class _BarePackage(types.ModuleType):
    """A package that says where its modules are; afterwards the whole one, for threads that imported it meanwhile."""

    def __init__(self, name: str, path: str) -> None:
        super().__init__(name)
        self.__path__ = [path]
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        vars(self.__spec__)["_initializing"] = True  # other threads wait for the lock before they have it

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} yet", name=name, obj=self)
        return getattr(importlib.import_module(self.__name__), name)
