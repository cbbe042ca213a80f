"""Registries: what discovery and entry points give, what a handle is given instead, and what goes to children."""

from __future__ import annotations

import importlib.metadata
import pickle
import subprocess
import sys
import types
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import miofind
from miofind.errors import InvalidOptionError, UnknownSolverError
from miofind.options import FindOptions
from miofind.solver import registry as registry_module
from miofind.solver.registry import Registry
from miofind.solvers.cpu.direct import ConvCpuDirect
from miofind.suites import SuiteProblem
from miofind.tune.service import TuneOptions, TuneSummary, tune

PROBLEM = miofind.ProblemDescription.convolution(x=(1, 4, 6, 5), w=(2, 4, 3, 3))


class Theirs(ConvCpuDirect):
    """A sound solver of another package."""

    id = "vendor/Theirs"


class Others(ConvCpuDirect):
    """Another."""

    id = "vendor/Others"


def changed(**attributes: object) -> type:
    """The sound solver's class with some attributes in place of its own."""
    return type("Changed", (Theirs,), attributes)


def module_of(*solvers: object) -> types.ModuleType:
    made = types.ModuleType("vendor_solvers")
    made.SOLVERS = solvers  # type: ignore[attr-defined]
    return made


class _EntryPoint:
    def __init__(self, given: object) -> None:
        self.name, self._given = "theirs", given

    def load(self) -> object:
        return self._given


def discovered(monkeypatch: pytest.MonkeyPatch, given: object) -> list[str]:
    """Ids of the solvers that an entry point gives."""
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [_EntryPoint(given)])
    return [solver.id for solver in registry_module._from_entry_points()]


@pytest.mark.parametrize(
    "given",
    [
        (Theirs(), Others()),
        [Theirs, Others],
        (Theirs, [Others()]),
        module_of(Theirs(), Others()),
        module_of(Theirs, Others),
    ],
    ids=["tuple", "list of classes", "nested", "module", "module of classes"],
)
def test_an_entry_point_may_give_several(monkeypatch: pytest.MonkeyPatch, caplog: Any, given: object) -> None:
    assert discovered(monkeypatch, given) == ["vendor/Theirs", "vendor/Others"]
    assert caplog.records == []


@pytest.mark.parametrize("given", [Theirs, Theirs()], ids=["class", "instance"])
def test_an_entry_point_may_give_one(monkeypatch: pytest.MonkeyPatch, given: object) -> None:
    assert discovered(monkeypatch, given) == ["vendor/Theirs"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (7, "it is of type int, wanted is a Solver, its class, a sequence of these, or a module"),
        (dict, "it is the class dict, wanted is a Solver"),
        (lambda: Theirs(), "it is of type function, wanted is a Solver"),
        ((), "it gives no solver, wanted is a Solver"),
        (types.ModuleType("empty"), "it gives no solver, wanted is a Solver"),
    ],
    ids=["number", "class", "function", "nothing", "module without SOLVERS"],
)
def test_an_entry_point_that_gives_no_solver_is_told_what_is_wanted(
    monkeypatch: pytest.MonkeyPatch, caplog: Any, given: object, told: str
) -> None:
    assert discovered(monkeypatch, given) == []
    (record,) = caplog.records
    assert told in record.getMessage()


def test_what_an_entry_point_gives_beside_others_costs_these_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    assert discovered(monkeypatch, (Theirs, 7)) == ["vendor/Theirs"]
    assert "of type int" in caplog.text


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ((), ["Mine but no SOLVERS: add SOLVERS = (Mine(),)"]),
        (("Other",), ["Mine but its SOLVERS does not name it: add SOLVERS = (Mine(),)"]),
        (("Mine", "Other"), []),
    ],
)
def test_a_solver_that_its_module_does_not_name_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: Any, named: tuple[str, ...], told: list[str]
) -> None:
    name = "miofind.solvers.cpu.mine"
    own = {each: type(each, (ConvCpuDirect,), {"id": f"Conv{each}", "__module__": name}) for each in ("Mine", "Other")}
    module = types.ModuleType(name)
    vars(module).update(own if named else {"Mine": own["Mine"]}, Base=ConvCpuDirect)
    if named:
        vars(module)["SOLVERS"] = tuple(own[each]() for each in named)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(registry_module.pkgutil, "walk_packages", lambda *_: [types.SimpleNamespace(name=name)])
    assert [type(solver).__name__ for solver in registry_module._own()] == list(named)
    assert [record.getMessage() for record in caplog.records] == [
        f"solvers/cpu/mine.py defines the solver {each}" for each in told
    ]


def own_module(monkeypatch: pytest.MonkeyPatch, solvers: object) -> types.ModuleType:
    """The one module of miofind's solvers, with these SOLVERS."""
    module = types.ModuleType("miofind.solvers.cpu.mine")
    vars(module)["SOLVERS"] = solvers
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found = [types.SimpleNamespace(name=module.__name__)]
    monkeypatch.setattr(registry_module.pkgutil, "walk_packages", lambda *_: found)
    return module


@pytest.mark.parametrize("given", [Theirs(), Theirs, (Theirs(),), (Theirs,)], ids=["one", "class", "tuple", "classes"])
def test_a_module_may_name_one_solver_without_a_comma(
    monkeypatch: pytest.MonkeyPatch, caplog: Any, given: object
) -> None:
    """`SOLVERS = (Theirs())` is no sequence, and was told as a defect of miofind."""
    module = own_module(monkeypatch, given)
    assert [type(solver) for solver in registry_module._own()] == [Theirs]
    assert [type(solver) for solver in registry_module._named(module)] == [Theirs]
    assert caplog.records == []


@pytest.mark.parametrize("given", [7, (Theirs(), 7)], ids=["alone", "beside a solver"])
def test_what_a_module_names_that_is_no_solver_is_told_with_its_file(
    monkeypatch: pytest.MonkeyPatch, caplog: Any, given: object
) -> None:
    own_module(monkeypatch, given)
    assert len(list(registry_module._own())) == isinstance(given, tuple)
    assert "solvers/cpu/mine.py names 7 in SOLVERS, which is left out: it is of type int" in caplog.text


def test_every_module_names_its_solvers(caplog: Any) -> None:
    assert list(registry_module._own())
    assert caplog.records == []


def test_the_default_registry_is_one() -> None:
    assert Registry.default() is Registry.default()
    assert Registry.default()["ConvCpuDirect"].id == "ConvCpuDirect"


def test_a_registry_is_itself_alone() -> None:
    one, other = Registry([Theirs()]), Registry([Theirs()])
    assert one != other
    assert len({one, other}) == 2


def test_solvers_are_named_whatever_their_case() -> None:
    assert Registry.default().named("convcpudirect") is Registry.default()["ConvCpuDirect"]
    with pytest.raises(UnknownSolverError, match=r"'Missing' is not registered: known are vendor/Theirs$"):
        Registry([Theirs()]).named("Missing")


def test_more_solvers_come_behind_and_replace_those_of_their_id() -> None:
    theirs, again = Theirs(), Theirs()
    registry = Registry([theirs]).with_solvers(Others())
    assert list(registry) == ["vendor/Theirs", "vendor/Others"]
    assert registry.with_solvers(again)["vendor/Theirs"] is again
    assert registry["vendor/Theirs"] is theirs


@pytest.mark.parametrize(
    ("solvers", "told"),
    [
        ([Theirs(), Theirs()], "'vendor/Theirs' is given twice"),
        ([Theirs, (Theirs(),)], "'vendor/Theirs' is given twice"),
        ([dict], "is no solver of a registry, wanted is a Solver, its class"),
        (["ConvCpuDirect"], "'ConvCpuDirect' is no solver of a registry"),
        ([changed(id=5)], "Changed cannot be in a registry: its id must be a text"),
        ([changed(id="vendor/a:b")], "its id 'vendor/a:b' must be of at most 120 printable characters"),
        ([changed(keys=())], "the keys of vendor/Theirs must be KernelKeys"),
        ([changed(version=2**31)], "the version of vendor/Theirs must be an int"),
        ([changed(__hash__=None)], "unhashable"),
        ([changed(id=property(lambda self: 1 // 0))], "its class attributes cannot be read: ZeroDivisionError"),
    ],
)
def test_what_is_no_set_of_solvers_is_refused(solvers: Any, told: str) -> None:
    with pytest.raises(InvalidOptionError, match=told):
        Registry(solvers)


def test_a_registry_takes_what_an_entry_point_may_give() -> None:
    assert list(Registry([Theirs, module_of(Others())])) == ["vendor/Theirs", "vendor/Others"]
    assert list(Registry().with_solvers(Theirs, Others())) == ["vendor/Theirs", "vendor/Others"]


def test_a_handle_takes_a_registry_and_nothing_like_it() -> None:
    for given in ([Theirs()], {"vendor/Theirs": Theirs()}, Theirs()):
        with pytest.raises(InvalidOptionError, match=r"must be a Registry: Registry\.default\(\)\.with_solvers"):
            miofind.Handle("cpu", registry=given)  # type: ignore[arg-type]


def test_a_handle_finds_with_its_registry(tmp_path: Path) -> None:
    with miofind.Handle("cpu", database=tmp_path / "finddb.db", registry=Registry([Theirs()])) as handle:
        found = miofind.find_solutions(PROBLEM, handle=handle)
        assert [solution.solver_id for solution in found] == ["vendor/Theirs"]
        found[0].save(tmp_path / "saved.json")
        assert miofind.Solution.load(tmp_path / "saved.json", handle).solver_id == "vendor/Theirs"
    with miofind.Handle("cpu", database=tmp_path / "finddb.db") as handle:
        again = miofind.find_solutions(PROBLEM, handle=handle)
    assert "vendor/Theirs" not in {solution.solver_id for solution in again}


@pytest.mark.parametrize("mode", ["normal", "hybrid", "fast"])
def test_names_of_other_packages_are_those_of_the_handle(tmp_path: Path, mode: str) -> None:
    options = FindOptions(only=("vendor/Theirs",), find_mode=mode)  # type: ignore[arg-type]
    with miofind.Handle("cpu", database=tmp_path / "finddb.db", registry=Registry([Theirs()])) as handle:
        assert miofind.find_solutions(PROBLEM, options=options, handle=handle)
    with (
        miofind.Handle("cpu", database=tmp_path / "finddb.db") as handle,
        pytest.raises(UnknownSolverError, match=r"only='vendor/theirs' is no solver"),
    ):
        miofind.find_solutions(PROBLEM, options=options, handle=handle)


def test_a_name_without_a_slash_is_looked_up_at_once() -> None:
    with pytest.raises(UnknownSolverError, match=r"only='ConvCpuDirct' is no solver, .* Did you mean ConvCpuDirect"):
        FindOptions(only=("ConvCpuDirct",))


def test_a_measuring_process_has_the_solvers_of_the_handle(tmp_path: Path) -> None:
    registry = Registry.default().with_solvers(Theirs())
    options = FindOptions(isolate=True, only=("vendor/Theirs", "ConvCpuDirect"))
    with miofind.Handle("cpu", database=tmp_path / "finddb.db", registry=registry) as handle:
        found = miofind.find_solutions(PROBLEM, options=options, handle=handle)
    assert {solution.solver_id for solution in found} == {"vendor/Theirs", "ConvCpuDirect"}


def test_a_solver_that_no_other_process_can_import_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    class Local(Theirs):
        """Of a function."""

    registry = Registry([Local()])
    with miofind.Handle("cpu", database=tmp_path / "finddb.db", registry=registry) as handle:
        with pytest.raises(InvalidOptionError, match=r"'vendor/Theirs'.* cannot go to another process .*isolate=False"):
            miofind.find_solutions(PROBLEM, options=FindOptions(isolate=True), handle=handle)
        assert miofind.find_solutions(PROBLEM, handle=handle)


def test_the_default_registry_travels_by_name() -> None:
    assert pickle.loads(pickle.dumps(Registry.default())) is Registry.default()
    assert len(pickle.dumps(Registry.default())) < 200
    arrived = pickle.loads(pickle.dumps(Registry.default().with_solvers(Theirs())))
    assert arrived["ConvCpuDirect"] is Registry.default()["ConvCpuDirect"]
    assert type(arrived["vendor/Theirs"]) is Theirs


def test_that_the_default_registry_travels_imports_no_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    default = Registry.default()
    monkeypatch.setattr(Registry, "values", lambda self: pytest.fail("each of its solvers is imported"))
    default.check_travels()


def test_a_program_s_own_solver_does_not_go_to_a_child() -> None:
    code = (
        "from miofind.solvers.cpu.direct import ConvCpuDirect\n"
        "from miofind.solver.registry import Registry\n"
        "class Mine(ConvCpuDirect):\n    id = 'vendor/Mine'\n"
        "try:\n    Registry([Mine()]).check_travels()\n"
        "except Exception as error:\n    print(type(error).__name__, error)\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    assert "InvalidOptionError solver 'vendor/Mine'" in told
    assert "its class is of the program's own file" in told


def tuned(folder: Path, registry: Registry, devices: int) -> TuneSummary:
    """What a tuning by vendor/Theirs alone comes to, on so many devices of a kind."""
    requests = [SuiteProblem(problem=PROBLEM, suite="", layer="", count=1)]
    options = TuneOptions(find=FindOptions(only=("vendor/Theirs",)))
    with ExitStack() as stack:
        handles = [
            stack.enter_context(miofind.Handle("cpu", database=folder / "finddb.db", strict=True, registry=registry))
            for _ in range(devices)
        ]
        return tune(requests, handles, options)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_tuning_has_the_solvers_of_its_handles(tmp_path: Path, devices: int) -> None:
    (result,) = tuned(tmp_path, Registry.default().with_solvers(Theirs()), devices).results
    assert [solution.solver_id for solution in result.solutions] == ["vendor/Theirs"], result.message


@pytest.mark.parametrize("devices", [1, 2])
def test_a_tuning_that_names_what_its_handles_have_not_begins_nothing(tmp_path: Path, devices: int) -> None:
    with pytest.raises(UnknownSolverError, match="only='vendor/theirs' is no solver"):
        tuned(tmp_path, Registry.default(), devices)


def test_a_tuning_by_processes_refuses_what_they_cannot_import(tmp_path: Path) -> None:
    local = type("Local", (Theirs,), {})()
    with pytest.raises(InvalidOptionError, match="cannot go to another process"):
        tuned(tmp_path, Registry.default().with_solvers(local), 2)
    assert tuned(tmp_path, Registry.default().with_solvers(local), 1).results
