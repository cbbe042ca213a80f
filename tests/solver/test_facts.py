"""The index of solvers: what it says is what discovery finds, it ends with the sources, and spares their imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.processes.waiting import LIMIT_S

from miofind.solver import facts as facts_module
from miofind.solver import registry as registry_module
from miofind.solver.facts import SolverFacts, fingerprint, read_index, write_index
from miofind.solver.registry import Registry, composed

_IMPORTED = """
import sys
import miofind
from miofind.solver.registry import Registry
registry = Registry.default()
listed, known = list(registry), len(registry.facts)
solver = registry["ConvDirectTiled"]
assert registry["ConvDirectTiled+Pointwise"].inner is solver and registry["ConvDirectTiled"] is solver
assert "ConvDirectTiled+Pointwise" in registry and "ConvMissing" not in registry
modules = ("miofind.solvers.winograd.fused", "miofind.solvers.direct.tiled", "miofind.solvers.cpu.fft")
told = [name in sys.modules for name in modules]
with miofind.Handle(miofind.Device.virtual("90a"), database=":memory:") as handle:
    problem = miofind.ProblemDescription.convolution(x=(2, 16, 9, 9), w=(8, 16, 3, 3), dtype="float16", layout="NHWC")
    assert miofind.find_solutions(problem, options=miofind.FindOptions(find_mode="fast"), handle=handle)
print(*listed, known, *told, modules[2] in sys.modules)
assert [each.id for each in registry.values()] == listed
"""


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of an index that this process would write."""
    path = tmp_path / "folder" / "index.json"
    monkeypatch.setattr(facts_module, "_index_path", lambda: path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return path


def own_facts() -> dict[str, SolverFacts]:
    return {solver.id: SolverFacts.of(solver, composed(solver)) for solver in registry_module._own()}


def test_an_index_gives_back_what_discovery_found(index: Path) -> None:
    found = own_facts()
    write_index("now", found.values())
    kept = read_index("now")
    assert kept == found
    assert list(kept) == list(found)


@pytest.mark.parametrize("sources", ["later", ""], ids=["other sources", "no files"])
def test_an_index_of_other_sources_is_none(index: Path, sources: str) -> None:
    write_index("now", own_facts().values())
    assert read_index(sources) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"module": "os"},
        {"module": None},
        {"version": "1"},
        {"keys": [{"place": "moon", "library": "plain"}]},
        {"keys": ["cuda"]},
        {"names": "conv"},
        {"library": "ours"},
    ],
    ids=repr,
)
def test_a_damaged_index_is_none(index: Path, change: dict[str, Any]) -> None:
    write_index("now", own_facts().values())
    kept = json.loads(index.read_text())
    kept["solvers"][0] |= change
    index.write_text(json.dumps(kept))
    assert read_index("now") == {}
    index.write_text(json.dumps([1]))
    assert read_index("now") == {}


def test_no_index_is_kept_where_python_keeps_no_bytecode(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    write_index("now", own_facts().values())
    assert not index.exists()


def test_an_index_that_cannot_be_written_costs_nothing(index: Path) -> None:
    index.parent.write_text("no folder")
    write_index("now", own_facts().values())
    assert read_index("now") == {}


def test_every_change_of_a_module_is_another_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_module, "_PACKAGE", tmp_path)
    assert fingerprint() == ""
    for folder in facts_module._FOLDERS:
        (tmp_path / folder / "family").mkdir(parents=True)
    seen = {fingerprint()}
    module = tmp_path / "solvers" / "family" / "new.py"
    for text in ("first", "second one"):
        module.write_text(text)
        seen.add(fingerprint())
    module.unlink()
    assert len(seen) == 3
    assert fingerprint() in seen


def test_what_discovery_warns_of_leaves_no_index() -> None:
    own = list(registry_module._own())
    assert registry_module._is_sound(own)
    assert not registry_module._is_sound([*own, own[0]])
    modules = [type(solver).__module__ for solver in own]
    shared = next(at for at, module in enumerate(modules) if modules.count(module) > 1)
    assert not registry_module._is_sound([*own[:shared], *own[shared + 1 :]])


def test_a_later_process_imports_the_solvers_alone_that_it_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "")
    runs = [
        subprocess.run(
            [sys.executable, "-c", _IMPORTED], capture_output=True, text=True, check=True, timeout=LIMIT_S
        ).stdout.split()
        for _ in range(2)
    ]
    listed = list(Registry.default())
    told = [["True"] * 4, ["False", "True", "False", "False"]]
    assert runs == [[*listed, str(len(listed)), *each] for each in told]
