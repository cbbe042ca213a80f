"""What is shipped fits together: versions, extras, package data, and what the documents say."""

from __future__ import annotations

import importlib.resources
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import numpy as np
import pytest

import miofind
from miofind.cli import main
from miofind.compiler import BinaryCache, Compiler
from miofind.device.device import Device
from miofind.errors import MissingLibraryError
from miofind.reference.convolution import reference_on_host
from miofind.reference.epilogue import apply_epilogue
from miofind.suites import suite_names

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "miofind"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
COMMANDS = set(main.list_commands(click.Context(main)))
# What the NVRTC and runtime packages bring; the rest needs packages that no extra installs.
TOOLKIT_HEADERS = {
    "cuda_bf16.h",
    "cuda_fp16.h",
    "cuda_fp8.h",
    "cuda_pipeline.h",
    "cuda_pipeline_primitives.h",
    "math_constants.h",
    "vector_types.h",
}


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_versions_agree() -> None:
    assert miofind.__version__ == PROJECT["version"]
    headings = re.findall(r"^## (\S+)", text("CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == PROJECT["version"]
    assert len(set(headings)) == len(headings)


def test_public_names_exist() -> None:
    assert [name for name in miofind.__all__ if not hasattr(miofind, name)] == []
    assert sorted(name for names in miofind._HOMES.values() for name in names) == sorted(miofind.__all__)
    assert set(miofind.__all__) <= set(dir(miofind))
    assert miofind.errors.MiofindError is miofind.MiofindError
    for name in ("nonsense", ".errors", "core.problem", "_nonsense"):
        assert not hasattr(miofind, name)


def test_what_is_not_asked_for_is_not_imported() -> None:
    """Processes that compile or measure, and commands that fail, need no database and few of the solvers."""
    code = "import sys, miofind, miofind.compiler.worker, miofind.cli; print(*sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert not {"sqlalchemy", "miofind.api", "miofind.finddb", "miofind.solvers.winograd.fused"} & set(told.split())


def test_contributing_names_every_extra_and_dependency() -> None:
    contributing = text("CONTRIBUTING.md")
    extras = PROJECT["optional-dependencies"]
    assert [extra for extra in extras if f"`{extra}`" not in contributing] == []
    listed = [*PROJECT["dependencies"], *(line for extra in extras.values() for line in extra)]
    names = {re.split(r"[<>=\[]", line)[0] for line in listed} - {PROJECT["name"]}
    stems = {re.sub(r"-(cuda1\dx|cu1\d)$", "", name) for name in names}
    assert [stem for stem in sorted(stems) if stem not in contributing] == []


def test_both_cuda_extras_bring_the_same() -> None:
    def stems(extra: str) -> set[str]:
        names = (re.split(r"[<>=]", line)[0] for line in PROJECT["optional-dependencies"][extra])
        return {re.sub(r"-(cuda1\dx|cu1\d)$", "", name) for name in names}

    assert stems("cuda12") == stems("cuda13")
    assert stems("compile") <= stems("cuda13")


@pytest.mark.parametrize("document", ["README.md", "docs/python.md"])
def test_the_documents_python_runs_as_pasted(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIOFIND_DB", str(tmp_path / "finddb.db"))
    monkeypatch.setenv("MIOFIND_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", text(document), re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        if "import torch" in block and importlib.util.find_spec("torch") is None:
            continue
        exec(compile(block, document, "exec"), names)
    if "miofind.torch" in sys.modules:
        sys.modules["miofind.torch"].disable()
    expected = reference_on_host(names["problem"], x=names["x"], w=names["w"])
    np.testing.assert_allclose(names["y"], expected, rtol=1e-3, atol=1e-3)
    if document == "README.md":
        assert [len(block.splitlines()) <= 10 for block in blocks] == [True, True]
    else:
        fused = apply_epilogue(names["fused"], expected, names)
        np.testing.assert_allclose(names["z"], fused, rtol=1e-3, atol=1e-3)


def test_the_readme_is_two_screens() -> None:
    assert len(text("README.md").splitlines()) <= 130


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_lines_fit_an_editor_but_for_tables(document: str) -> None:
    lines = [line for line in text(document).splitlines() if not line.startswith("|")]
    assert [line for line in lines if len(line) > 120] == []


def test_the_readme_compiles_what_it_tunes() -> None:
    """Both rows pasted: float32 forward was compiled, and float16 in all directions measured."""
    tuned, compiled = (
        re.search(rf"`miofind {name} (--suite [^`]*)`", text("README.md")) for name in ("tune", "compile")
    )
    assert tuned is not None
    assert compiled is not None
    assert compiled[1].replace(" --arch 90a", "") == tuned[1]


def test_the_install_command_is_of_a_clone() -> None:
    assert "pip install miofind" not in text("README.md")


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/command-line.md"])
def test_documented_commands_exist(document: str) -> None:
    commands = set(re.findall(r"^\$ miofind (\w+)|`miofind (\w+)", text(document), re.MULTILINE))
    named = {first or second for first, second in commands}
    assert named
    assert sorted(named - COMMANDS) == []
    targets = set(re.findall(r"\bmake ([a-z][a-z-]+)\b(?=`|$|\s+#)", text(document), re.MULTILINE))
    assert sorted(targets - set(re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE))) == []


def test_every_command_is_documented() -> None:
    assert [name for name in sorted(COMMANDS) if f"`miofind {name}" not in text("README.md")] == []


def test_links_between_documents_hold() -> None:
    documents = [str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md")]
    for document in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "miofind/suites/README.md", *documents):
        targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", text(document))
        paths = [((ROOT / document).parent / target).resolve() for target in targets]
        assert [path for path in paths if not path.exists() and not _in_package(path).exists()] == []


def _in_package(path: Path) -> Path:
    """The same file in a source distribution, which has the package's links replaced by the folders."""
    return PACKAGE / path.relative_to(ROOT)


def test_environment_variables_are_documented() -> None:
    folders = (PACKAGE, PACKAGE / "finddb", PACKAGE / "solvers")
    sources = [path for folder in folders for path in folder.rglob("*.py")]
    named = {name for path in sources for name in re.findall(r"\bMIOFIND_[A-Z_]+\b", path.read_text(encoding="utf-8"))}
    documented = set(re.findall(r"^\| `(MIOFIND_[A-Z_]+)`", text("docs/command-line.md"), re.MULTILINE))
    assert named == documented


def test_exit_codes_are_documented() -> None:
    codes = {error.exit_code for error in _subclasses(miofind.MiofindError)}
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", text("docs/command-line.md"), re.MULTILINE)}
    assert documented == codes | {0, 1, 130}


def _subclasses(kind: type[miofind.MiofindError]) -> Iterator[type[miofind.MiofindError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _subclasses(child)


def test_package_data_is_there() -> None:
    package = importlib.resources.files("miofind")
    assert (package / "py.typed").is_file()
    assert len(suite_names()) == 28
    assert (package / "suites" / "README.md").is_file()
    assert any(family.is_dir() and any(family.glob("*.cu")) for family in (package / "kernels_src").iterdir())
    assert any(file.name.endswith(".cuh") for file in (package / "kernels_src" / "common").iterdir())


def test_suites_document_names_every_suite() -> None:
    assert [name for name in suite_names() if f"`{name}`" not in text("miofind/suites/README.md")] == []


def test_kernels_include_only_headers_that_the_extras_install() -> None:
    for path in sorted((PACKAGE / "kernels_src").rglob("*.cu*")):
        included = set(re.findall(r"^\s*#\s*include\s*<([^>]+)>", path.read_text(encoding="utf-8"), re.MULTILINE))
        assert sorted(included - TOOLKIT_HEADERS) == [], path.name


def _scripts(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("heading", "extra"),
    [
        ("| NVIDIA-SMI 525.60.13    Driver Version: 525.60.13    CUDA Version: 12.0     |", "cuda12"),
        ("| NVIDIA-SMI 570.86.15   Driver Version: 570.86.15   CUDA Version: 12.8     |", "cuda12"),
        ("| NVIDIA-SMI 580.65.06   Driver Version: 580.65.06   CUDA Version: 13.0     |", "cuda13"),
        ("| NVIDIA-SMI 590.44.01   KMD Version: 590.44.01   CUDA UMD Version: 13.1  |", "cuda13"),
        ("| NVIDIA-SMI 470.57.02    Driver Version: 470.57.02    CUDA Version: 11.4     |", ""),
        ("| NVIDIA-SMI 580.65.06   Driver Version: 580.65.06   CUDA Version: N/A      |", ""),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", ""),
    ],
)
def test_the_extra_follows_the_driver(heading: str, extra: str) -> None:
    pick_extra = _scripts("pick_extra")
    assert pick_extra.extra_for(pick_extra.cuda_version_in(heading)) == extra
    assert extra == "" or extra in PROJECT["optional-dependencies"]


def _example(language: str) -> str:
    section = text("CONTRIBUTING.md").partition("## How to add a solver")[2]
    return section.partition(f"```{language}\n")[2].partition("```")[0]


def test_commands_to_try_of_contributing_are_about_its_solver_alone() -> None:
    """`miofind solvers` listed all that there are, and the new one somewhere among them."""
    commands = [line for line in _example("console").splitlines() if line.startswith("$ ")]
    assert len(commands) >= 4
    assert all("ConvMySolver" in command for command in commands)


def test_the_solver_of_contributing_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example is written out, loaded, asked for its examples, and its kernel compiled."""
    package = tmp_path / "contributing_example"
    (package / "common").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "depthwise").mkdir()
    (package / "depthwise" / "my_solver.cu").write_text(_example("cuda"), encoding="utf-8")
    (package / "common" / "types.cuh").write_text(text("miofind/kernels_src/common/types.cuh"), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    module = ModuleType("my_solver")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(_example("python"), "CONTRIBUTING.md", "exec"), vars(module))
    (solver,) = module.SOLVERS
    device, compiler = Device.virtual("90a"), Compiler(BinaryCache(tmp_path / "cache"))
    for problem in solver.examples():
        assert solver.applicability(problem, device)
        for config in solver.configs(problem, device):
            (step,) = solver.solution(problem, device, config).kernels
            try:
                binary = compiler.build(replace(step, package=package.name), device.arch)
            except MissingLibraryError:
                pytest.skip("NVRTC is not installed: pip install -e '.[compile]'")
            assert binary.resources[step.entry].spill_bytes == 0


def test_a_source_distribution_takes_what_its_tests_and_documents_need() -> None:
    manifest = text("MANIFEST.in")
    grafted = re.findall(r"^graft (\S+)", manifest, re.MULTILINE)
    included = " ".join(re.findall(r"^include (.+)", manifest, re.MULTILINE)).split()
    assert {"CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "docs", "tests", "benchmarks"} <= {*grafted, *included}
    assert [name for name in (*grafted, *included) if not (ROOT / name).exists()] == []
