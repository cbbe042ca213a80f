"""Imports go down only, and the GPU's libraries wait until they are used."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.processes.waiting import LIMIT_S

from miofind.solver.registry import Registry

PACKAGE = Path(__file__).resolve().parents[1] / "miofind"
PARTS = ("solvers", "finddb", "kernels_src")

# From the top down. A module imports from its own layer and those below it; a package counts as one module.
LAYERS = (
    ("__main__", "cli", "report"),
    ("torch", "fleet"),
    ("miofind", "api", "bench", "tune"),
    ("find",),
    ("runtime",),
    ("evaluate",),
    ("measure", "verify"),
    ("launch",),
    ("compiler",),
    ("solvers",),
    ("reference", "libraries"),
    ("solver", "options"),
    ("suites", "driver"),
    ("device", "core", "arrays"),
    ("finddb", "kernels_src", "process", "text", "errors", "files"),
)

# The folders of miofind.torch, from the top down; what lies beside them is above.
TORCH_LAYERS = ("tuning", "inductor", "recording", "fused", "override", "direct")

# Methods that lead into a package above or beside: imported inside a function, nowhere else.
FRONT_DOORS = {
    ("core", "arrays"),
}

GPU_LIBRARIES = {"cupy", "cupyx", "cupy_backends", "cudnn", "nvmath", "cuda", "torch", "pynvml"}

_OF_MODULES = ("miofind", "miofind.torch")
"""Packages of which modules are imported by their names."""

# What is imported by those alone who ask for it, and may import its library at once.
WITH_LIBRARY = {"torch": {"torch"}}


@dataclass(frozen=True)
class Import:
    """One import statement's module, and where it stands."""

    file: str
    line: int
    module: str
    in_function: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.module}"


def imports_of(path: Path) -> Iterator[Import]:
    """The imports of a file that happen at run time; those for type checkers only are left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    pending: list[tuple[ast.AST, bool]] = [(tree, False)]
    while pending:
        node, in_function = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += [(child, in_function) for child in node.orelse]
            continue
        for module in _imported(node):
            assert isinstance(node, ast.stmt)
            yield Import(str(path.relative_to(PACKAGE.parent)), node.lineno, module, in_function)
        inside = in_function or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        pending += [(child, inside) for child in ast.iter_child_nodes(node)]


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports are not used"
        module = node.module or ""
        return [f"{module}.{alias.name}" for alias in node.names] if module in _OF_MODULES else [module]
    return []


def modules() -> dict[str, list[Path]]:
    """Files by module: a package under miofind counts as one."""
    found: dict[str, list[Path]] = {"miofind": [PACKAGE / "__init__.py"]}
    for path in sorted(PACKAGE.iterdir()):
        if path.suffix == ".py" and path.stem != "__init__":
            found[path.stem] = [path]
        elif (path / "__init__.py").is_file():
            found[path.name] = sorted(path.rglob("*.py"))
    return found


MODULES = modules()
LAYER_OF = {name: i for i, layer in enumerate(LAYERS) for name in layer}


@functools.cache
def imports_in(name: str) -> tuple[Import, ...]:
    """Read where a test asks, since each worker of pytest imports this file."""
    return tuple(found for path in MODULES[name] for found in imports_of(path))


def inner(module: str) -> str | None:
    """The module of miofind that an import means, None for other packages."""
    package, _, rest = module.partition(".")
    if package != "miofind" or rest.startswith("__"):
        return None
    name = rest.partition(".")[0]
    return name if name in MODULES else "miofind"


def test_every_module_has_a_layer() -> None:
    assert sorted(set(MODULES) - set(LAYER_OF)) == [], "name the new module in LAYERS"


def test_every_part_beside_the_package_is_seen() -> None:
    """In a checkout as links, in a source distribution as folders."""
    assert [part for part in PARTS if part not in MODULES] == []
    assert all((PACKAGE / part).is_symlink() == (PACKAGE.parent / part).exists() for part in PARTS)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_go_down(name: str) -> None:
    upward = [
        str(found)
        for found in imports_in(name)
        if (target := inner(found.module)) is not None
        and LAYER_OF.get(target, 0) < LAYER_OF.get(name, 0)
        and not (found.in_function and (name, target) in FRONT_DOORS)
    ]
    assert upward == []


@pytest.mark.parametrize("name", TORCH_LAYERS)
def test_imports_go_down_in_torch(name: str) -> None:
    """By no function either: what another folder needs of one above stands too low."""
    above = (*TORCH_LAYERS[: TORCH_LAYERS.index(name)], "__main__")
    files = sorted((PACKAGE / "torch" / name).rglob("*.py"))
    found = [each for path in files for each in imports_of(path) if each.module.startswith("miofind.torch")]
    assert found != [] or name == "direct"
    upward = [str(each) for each in found if each.module == "miofind.torch" or each.module.split(".")[2] in above]
    assert upward == []


def test_every_folder_of_torch_has_a_layer() -> None:
    folders = {path.parent.name for path in (PACKAGE / "torch").glob("*/__init__.py")}
    assert folders == {*TORCH_LAYERS}


def test_no_module_imports_itself_in_a_circle() -> None:
    graph = {
        name: {
            target
            for found in imports_in(name)
            if (target := inner(found.module)) not in (None, name) and (name, target) not in FRONT_DOORS
        }
        for name in MODULES
    }
    assert tuple(graphlib.TopologicalSorter(graph).static_order())


def test_front_doors_are_used() -> None:
    used = {(name, inner(found.module)) for name in MODULES for found in imports_in(name) if found.in_function}
    assert sorted(FRONT_DOORS - used) == []


@pytest.mark.parametrize("name", sorted(MODULES))
def test_gpu_libraries_are_imported_inside_functions(name: str) -> None:
    late = GPU_LIBRARIES - WITH_LIBRARY.get(name, set())
    early = [str(i) for i in imports_in(name) if i.module.partition(".")[0] in late and not i.in_function]
    assert early == []


@pytest.mark.parametrize("name", sorted(MODULES))
def test_the_parts_are_imported_under_their_package(name: str) -> None:
    assert [str(found) for found in imports_in(name) if found.module.partition(".")[0] in PARTS] == []


def test_type_checkers_know_what_modules_name() -> None:
    """A `__getattr__` that they see lets any name pass."""
    texts = {path: path.read_text(encoding="utf-8") for paths in MODULES.values() for path in paths}
    late = [path for path, text in texts.items() if re.search(r"^ *__getattr__ = ", text, re.MULTILINE)]
    assert len(late) >= 5
    assert [path for path in late if any(map(_names_late, _seen_by_checkers(ast.parse(texts[path]).body)))] == []


def _seen_by_checkers(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If):
            test = ast.unparse(node.test)
            yield from _seen_by_checkers([] if test == "not TYPE_CHECKING" else node.body)
            yield from _seen_by_checkers([] if test == "TYPE_CHECKING" else node.orelse)
        else:
            yield node


def _names_late(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__getattr__"


def test_finddb_is_a_leaf() -> None:
    targets = {inner(found.module) for found in imports_in("finddb")} - {None, "finddb"}
    assert targets <= {"errors", "process"}


FAMILIES = sorted(path.parent.name for path in (PACKAGE / "solvers").glob("*/__init__.py"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_imports_itself_and_what_several_share(family: str) -> None:
    allowed = tuple(f"miofind.solvers.{name}." for name in {family, "common"})
    found = [found for path in sorted((PACKAGE / "solvers" / family).glob("*.py")) for found in imports_of(path)]
    others = [str(each) for each in found if each.module.startswith("miofind.solvers")]
    assert [each for each in others if not each.partition(" imports ")[2].startswith(allowed)] == []


def test_solvers_do_not_import_each_other() -> None:
    with_solvers = {type(solver).__module__ for solver in Registry.default().values()}
    assert len(with_solvers) > 40
    assert [str(found) for found in imports_in("solvers") if found.module in with_solvers] == []


def test_kernels_have_the_families_of_their_solvers() -> None:
    sources = {source.partition("/")[0] for solver in Registry.default().values() for source in solver.sources}
    assert sources <= set(FAMILIES)
    for name, solver in Registry.default().items():
        family = type(solver).__module__.split(".")[2]
        assert all(source.startswith(f"{family}/") for source in solver.sources) or len(solver.sources) > 1, name


_BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)

sys.meta_path.insert(0, Blocked())
{code}
assert not {blocked} & set(sys.modules), "a GPU library was imported"
"""


def test_miofind_torch_without_torch_names_its_extra(tmp_path: Path) -> None:
    """As an ImportError, too, which programs with and without PyTorch expect of an import."""
    code = "\n".join(
        [
            "import miofind",
            "try:",
            "    import miofind.torch",
            "except ImportError as error:",
            "    assert isinstance(error, miofind.errors.MissingLibraryError), error",
            "    print(error)",
        ]
    )
    script = _BLOCKED.format(blocked=GPU_LIBRARIES, code=code)
    told = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(PACKAGE.parent), "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert told.stderr == ""
    assert "install miofind's extra torch, as in `pip install -e '.[torch]'`" in told.stdout


@pytest.mark.parametrize(
    "code",
    [
        "import miofind; assert miofind.Device.cpu()",
        "from miofind.solver.registry import Registry; assert Registry.default()",
        "from miofind.cli import main; main(['--help'], standalone_mode=False)",
        "import miofind, numpy as np\n"
        "y = miofind.convolution(np.ones((1, 2, 4, 4), np.float32), np.ones((3, 2, 3, 3), np.float32))\n"
        "assert y.shape == (1, 3, 2, 2) and (y == 18).all()",
    ],
    ids=["import", "solvers", "help", "convolution"],
)
def test_works_without_the_gpu_libraries(code: str, tmp_path: Path) -> None:
    script = _BLOCKED.format(blocked=GPU_LIBRARIES, code=code)
    environment = {"PYTHONPATH": str(PACKAGE.parent), "MIOFIND_DB": str(tmp_path / "find.db"), "HOME": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr


LATE = (
    "miofind.bench",
    "miofind.evaluate",
    "miofind.find.measuring",
    "miofind.torch.recording",
    "miofind.torch.tuning",
    "miofind.verify",
    "rich",
    "sqlalchemy",
)
"""What the first answers of a process do without."""

FIRST_ANSWER = f"""
import sys, torch
before = set(sys.modules)
import miofind.torch
handle = miofind.Handle("cpu", database=sys.argv[1])
with miofind.torch.use("find", handle=handle, devices="cpu") as override:
    torch.nn.functional.conv2d(torch.ones(1, 2, 5, 5), torch.ones(3, 2, 3, 3))
print(override.report().own_calls)
print([name for name in sys.modules.keys() - before if name.startswith({LATE})])
print([name for package in (miofind, miofind.api, miofind.finddb, miofind.torch) for name in package.__all__
       if not hasattr(package, name) or name not in dir(package)])
"""


def test_what_measures_and_tunes_is_imported_when_it_is_first_asked_for(tmp_path: Path) -> None:
    """A known answer is the time to a program's first result; all names are there nevertheless."""
    pytest.importorskip("torch")
    command = [sys.executable, "-c", FIRST_ANSWER, str(tmp_path / "finddb.db")]
    measured, answered = (
        subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout.split("\n")
        for _ in range(2)
    )
    assert "'sqlalchemy'" in measured[1]
    assert answered == ["1", "[]", "[]", ""]
