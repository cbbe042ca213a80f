"""Modules import what packages name late from where it is: a late import within an import may wait for itself.

A thread that asks a package for a late name holds the lock of `loading` and wants that of a module; one that imports
that module, whose body asks for a late name, has these the other way round.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

import miofind

PACKAGE = Path(miofind.__file__).parent
LATE_PACKAGES = ("miofind", "miofind.api", "miofind.finddb", "miofind.torch")


def late_imports(path: Path, names: dict[str, frozenset[str]]) -> Iterator[str]:
    """Imports of late names that a module's body makes, those for type checkers left out."""
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        if isinstance(node, ast.ImportFrom):
            late = names.get(node.module or "", frozenset())
            yield from (f"{path}:{node.lineno}: {alias.name}" for alias in node.names if alias.name in late)
        pending += ast.iter_child_nodes(node)


def test_module_bodies_import_no_late_names() -> None:
    pytest.importorskip("torch")
    names = {name: frozenset(importlib.import_module(name)._late._home_of) for name in LATE_PACKAGES}
    assert all(names.values())
    found = [each for path in sorted(PACKAGE.rglob("*.py")) for each in late_imports(path, names)]
    assert found == []
