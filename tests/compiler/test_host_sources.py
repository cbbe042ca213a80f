"""Hashes of Python code that computes on the CPU place: what changes them, and what does not."""

from __future__ import annotations

import importlib
import itertools
import shutil
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from miofind.compiler import host_hash, host_sources, kernel_hash
from miofind.device.device import Place
from miofind.find.lookup.validity import solver_hash
from miofind.solver.registry import Registry
from miofind.solver.steps import ConvSolution, HostStep

_numbers = itertools.count()
CPU_SOLVERS = [solver for solver in Registry.default().values() if solver.keys[0].place is Place.CPU]

# What of this package CPU solvers import and no hash holds: what a solver promises, and what it is asked and given.
CONTRACT = {
    "miofind.arrays.arrays",
    "miofind.device.device",
    "miofind.solver.geometry",
    "miofind.core.problem",
    "miofind.solver.steps",
    "miofind.solver.solver",
}

SOLVER = '''\
"""A solver."""

from __future__ import annotations

import math

from {package} import weights
from {package}.kernels.sums import (
    total,  # of all
)


def convolve(problem, config, buffers):
    """Text # and no comment."""
    from .late import shift

    return total(buffers) + weights.ONE + shift(math.pi)  # behind code
'''


@dataclass(frozen=True)
class Package:
    """A package of Python modules that a test wrote; its name is its own."""

    name: str
    root: Path

    def hash(self) -> str:
        """That of its solver's module, the files read anew."""
        forget()
        return host_hash(f"{self.name}.solver")

    def write(self, path: str, text: str) -> None:
        file = self.root / self.name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8", newline="")


def forget() -> None:
    host_sources._read.cache_clear()
    host_hash.cache_clear()


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    forget()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    made = Package(f"host_sources_{next(_numbers)}", tmp_path)
    made.write("__init__.py", "")
    made.write("solver.py", SOLVER.format(package=made.name))
    made.write("weights.py", "ONE = 1\n")
    made.write("kernels/__init__.py", "")
    made.write("kernels/sums.py", "from ..deep import add\n\n\ndef total(b):\n    return add(*b)\n")
    made.write("deep.py", "add = sum\n")
    made.write("late.py", "import miofind.solvers.common.chunks\n\n\ndef shift(x):\n    return x\n")
    made.write("unused.py", "raise RuntimeError('nobody imports this')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return made


@pytest.mark.parametrize("path", ["solver.py", "weights.py", "kernels/sums.py", "deep.py", "late.py"])
def test_a_change_of_whatever_the_solver_reaches_changes_its_hash(package: Package, path: str) -> None:
    before = package.hash()
    file = package.root / package.name / path
    package.write(path, file.read_text(encoding="utf-8") + "\nCHANGED = True\n")
    assert package.hash() != before
    assert len(before) == 64


def test_what_the_solver_does_not_reach_does_not_count(package: Package) -> None:
    before = package.hash()
    package.write("unused.py", "pass\n")
    package.write("new.py", "pass\n")
    assert package.hash() == before


def test_nothing_is_imported_for_a_hash(package: Package) -> None:
    package.write("late.py", "raise RuntimeError('imported')\n")
    assert package.hash()
    assert not [name for name in sys.modules if name.startswith(f"{package.name}.")]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("import math\n", "import math\n\n    # a line of comment\n\n"),
        ("import math\n", "import math\n\t\n"),
        ("\n", "\r\n"),
    ],
    ids=["comment", "blank line", "line ends"],
)
def test_lines_of_comment_and_ends_of_lines_do_not_count(package: Package, old: str, new: str) -> None:
    before = package.hash()
    package.write("solver.py", SOLVER.format(package=package.name).replace(old, new))
    assert package.hash() == before


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('SOURCE = """\n#define N 4\n"""\n', 'SOURCE = """\n#define N 8\n"""\n'),
        ("SOURCE = '''\\'''\n# 4\n'''\n", "SOURCE = '''\\'''\n# 8\n'''\n"),
        ("x = 'it\\'s'  # \"\"\"\n# one\ny = 1\n", "x = 'it\\'s'  # \"\"\"\n# one\ny = 2\n"),
        ('x = f"{d["#"]}" + f(1)\n', 'x = f"{d["#"]}" + f(2)\n'),
        ("if a:\n    b()\nc()\n", "if a:\n    b()\n    c()\n"),
    ],
    ids=["text that looks like comment", "escaped quotes", "quotes in a comment", "nested quotes", "indentation"],
)
def test_what_only_looks_like_comment_counts(package: Package, before: str, after: str) -> None:
    hashes = set()
    for text in (before, after):
        package.write("weights.py", text)
        hashes.add(package.hash())
    assert len(hashes) == 2


def test_the_hash_is_the_same_wherever_the_package_is(
    package: Package, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = package.hash()
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    shutil.move(package.root / package.name, elsewhere / package.name)
    monkeypatch.setattr(sys, "path", [str(elsewhere), *sys.path])
    assert package.hash() == before


def test_modules_that_import_each_other_have_a_hash(package: Package) -> None:
    package.write("deep.py", f"import {package.name}.kernels.sums as sums, math\n")
    assert package.hash()


@pytest.mark.parametrize("name", ["no_such_module", "no.such.module", "__main__", "builtins", ""])
def test_who_has_no_source_has_no_hash(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))  # as in an interactive session
    assert host_hash(name) == ""


def test_shared_code_counts_for_other_packages_too(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    before = package.hash()
    real = host_sources._text
    monkeypatch.setattr(
        host_sources,
        "_text",
        lambda spec: f"{real(spec)}\n1\n" if spec.name == "miofind.solvers.common.chunks" else real(spec),
    )
    assert package.hash() != before


@pytest.mark.parametrize("solver", CPU_SOLVERS, ids=lambda solver: solver.id)
def test_a_solver_of_the_cpu_place_is_known_by_its_source(solver: object) -> None:
    assert len(solver_hash(solver)) == 64  # type: ignore[arg-type]
    module = type(solver).__module__
    steps = (HostStep(module=module, function="convolve"),)
    assert kernel_hash(ConvSolution(steps=steps)) != kernel_hash(
        ConvSolution(steps=(HostStep(module="m", function="convolve"),))
    )


def test_a_solver_of_another_package_is_known_by_its_source(package: Package) -> None:
    """And by what it takes of this one."""
    text = "from miofind.solvers.cpu.direct import ConvCpuDirect\n\nclass Own(ConvCpuDirect):\n    id = 'vendor/Own'\n"
    hashes = []
    for added in ("", "    is_dynamic = False\n"):
        forget()
        package.write("own.py", text + added)
        sys.modules.pop(f"{package.name}.own", None)
        importlib.invalidate_caches()
        hashes.append(solver_hash(importlib.import_module(f"{package.name}.own").Own()))
    assert len({*hashes, solver_hash(Registry.default()["ConvCpuDirect"]), ""}) == 4
    assert "miofind.reference.convolution" in set(
        host_sources._followed("miofind.solvers.cpu.direct", of=f"{package.name}.own")
    )


def test_solvers_of_the_cpu_place_have_hashes_of_their_own() -> None:
    assert len({solver_hash(solver) for solver in CPU_SOLVERS}) == len(CPU_SOLVERS)


@pytest.mark.parametrize("solver", CPU_SOLVERS, ids=lambda solver: solver.id)
def test_all_that_a_solver_of_the_cpu_place_imports_counts_or_is_its_contract(solver: object) -> None:
    """Code that is moved out of a solver's module must not leave its hash."""
    module = type(solver).__module__
    reached, pending = {module}, [module]
    left_out: set[str] = set()
    while pending:
        name = pending.pop()
        found = host_sources._read(name)
        assert found is not None
        followed = set(host_sources._followed(name, of=module))
        for statement in found.imports:
            if statement.module.partition(".")[0] == "miofind" and statement.module not in followed:
                parts = {f"{statement.module}.{part}" for part in statement.names}
                left_out |= {statement.module} if not parts & followed else set()
        pending += followed - reached
        reached |= followed
    assert left_out <= CONTRACT
