"""What a FindDB's answers are worth when solvers come that were not there when they were measured."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import miofind
from miofind import FindOptions
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device, Library, Place
from miofind.errors import NoSolutionError
from miofind.find import row_check
from miofind.find.lookup import records, scopes, validity
from miofind.find.lookup.scopes import Coverage
from miofind.finddb import ProblemKey, ReleaseRules, Scope, Store, write_release
from miofind.options import FindMode
from miofind.runtime.solution import Solution, Source
from miofind.solver.registry import Registry
from miofind.solver.solver import Applicability

PROBLEM = ProblemDescription.convolution(x=(1, 4, 6, 5), w=(2, 4, 3, 3))
DIRECT = type(Registry.default()["ConvCpuDirect"])
REQUESTS = (FindOptions(find_mode=FindMode.NORMAL), FindOptions(find_mode=FindMode.NORMAL, only=("plain",)))


@pytest.mark.parametrize("serves", [False, True], ids=["refuses", "serves"])
@pytest.mark.parametrize("request_", REQUESTS, ids=["all", "plain"])
def test_an_answer_is_whole_until_a_later_solver_may_serve(tmp_path: Path, request_: FindOptions, serves: bool) -> None:
    """Then it goes on to answer who asks for all; for others it may have been the filter that left the solver out."""
    with miofind.Handle("cpu", database=tmp_path / "finddb.db", strict=True) as handle:
        miofind.find_solutions(PROBLEM, options=request_, handle=handle)
    body = {"id": "vendor/Later", "is_applicable": lambda *_: Applicability("" if serves else "refused")}
    known = Registry.default().with_solvers(type("Later", (DIRECT,), body)())
    with miofind.Handle("cpu", database=tmp_path / "finddb.db", strict=True, registry=known) as handle:
        whole = records.look_up(PROBLEM, request_, handle, coverage=Coverage.ALL)
        assert (whole is None) is serves
        assert bool(records.look_up(PROBLEM, request_, handle)) is not (serves and bool(request_.only))


def test_later_solvers_of_other_layouts_are_not_imported_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    given = Registry.__getitem__
    monkeypatch.setattr(Registry, "__getitem__", lambda self, name: asked.append(name) or given(self, name))
    with miofind.Handle(Device.virtual("90a"), database=":memory:") as handle:
        scope = scopes.requested_scope(PROBLEM, REQUESTS[0], handle.device, handle.registry)
        request = records._Request(PROBLEM, REQUESTS[0], handle, scope, frozenset(), True)
        asked.clear()
        late = request._serving(["ConvDepthwiseVolume", "ConvDirectNaive", "ConvDepthwiseVolume+Pointwise"])
    assert late == ("ConvDirectNaive",)
    assert asked == ["ConvDirectNaive"]


class _Layers:
    """FindDBs of one problem on the CPU place: the user's and the one that ships, each filled by finds."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MIOFIND_SYSTEM_DB", "")
        self._files = {name: folder / f"{name}.db" for name in ("user", "shipped")}
        self._monkeypatch = monkeypatch
        self._registry = Registry.default()

    def comes(self, name: str) -> None:
        """A solver is registered from here on."""
        self._registry = self._registry.with_solvers(type("Later", (DIRECT,), {"id": name})())

    def measured(self, name: str, options: FindOptions = REQUESTS[0]) -> list[Solution]:
        with miofind.Handle("cpu", database=self._files[name], strict=True, registry=self._registry) as handle:
            return miofind.find_solutions(PROBLEM, options=options, handle=handle)

    def make_void(self, name: str, *solver_ids: str) -> None:
        """Have rows tell of sources that their solvers no longer have."""
        self.change(name, "source_hash = 'ab'", *solver_ids)

    def change(self, name: str, fields: str, *solver_ids: str) -> None:
        """Change fields of all rows of solvers."""
        with contextlib.closing(sqlite3.connect(self._files[name])) as connection:
            for solver_id in solver_ids:
                connection.execute(f"UPDATE measurement SET {fields} WHERE solver_id = ?", (solver_id,))
            connection.commit()
        with Store(self._files[name]) as store:
            store.rebuild()

    def open(self) -> miofind.Handle:
        """A handle of the user's FindDB over the shipped one."""
        self._monkeypatch.setenv("MIOFIND_SYSTEM_DB", str(self._files["shipped"]))
        return miofind.Handle("cpu", database=self._files["user"], strict=True, registry=self._registry)


@pytest.fixture
def layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Layers:
    return _Layers(tmp_path, monkeypatch)


def solver_ids(solutions: Sequence[Solution] | None) -> set[str]:
    return {solution.solver_id for solution in solutions or ()}


@pytest.mark.parametrize("coverage", [Coverage.PARTIAL, Coverage.ALL], ids=["find", "tune"])
def test_an_answer_from_before_a_solver_came_does_not_hide_a_shipped_one_that_has_it(
    layers: _Layers, coverage: Coverage
) -> None:
    layers.measured("user")
    layers.comes("vendor/Later")
    layers.measured("shipped")
    with layers.open() as handle:
        assert "vendor/Later" in solver_ids(records.look_up(PROBLEM, FindOptions(), handle, coverage=coverage))
        assert handle.database.rechecks() == (), "nothing is missing"


@pytest.mark.parametrize("coverage", [Coverage.PARTIAL, Coverage.ALL], ids=["find", "tune"])
@pytest.mark.parametrize("lost", ["best", "all"])
def test_an_answer_whose_best_rows_are_void_does_not_hide_a_shipped_one_that_holds(
    layers: _Layers, lost: str, coverage: Coverage
) -> None:
    found = layers.measured("user")
    layers.measured("shipped")
    layers.make_void("user", *solver_ids(found if lost == "all" else found[:1]))
    with layers.open() as handle:
        assert solver_ids(records.look_up(PROBLEM, FindOptions(), handle, coverage=coverage)) == solver_ids(found)
        assert handle.database.rechecks() == ()


def test_of_answers_that_all_lack_solvers_the_one_that_lacks_the_fewest_is_given_and_noted(layers: _Layers) -> None:
    layers.measured("user")
    layers.comes("vendor/First")
    layers.measured("shipped")
    layers.comes("vendor/Second")
    with layers.open() as handle:
        assert records.look_up(PROBLEM, FindOptions(), handle, coverage=Coverage.ALL) is None
        assert "vendor/First" in solver_ids(records.look_up(PROBLEM, FindOptions(), handle))
        assert [note.reason for note in handle.database.rechecks()] == ["not measured yet: vendor/Second"]


def test_own_rows_that_are_faster_lead_a_shipped_answer_that_has_more_solvers(layers: _Layers) -> None:
    """What a user had tuned was forgotten until the next find was recorded."""
    own = layers.measured("user")[0]
    layers.change("user", "time_ms = 1e-6, created_at = '2100-01-01T00:00:00.000000Z'", own.solver_id)
    layers.comes("vendor/Later")
    layers.measured("shipped")
    with layers.open() as handle:
        found = records.look_up(PROBLEM, FindOptions(), handle)
        assert found is not None
        assert (found[0].solver_id, found[0].time_ms) == (own.solver_id, 1e-6)
        assert "vendor/Later" in solver_ids(found)


def test_own_rows_of_other_code_hide_no_shipped_ones_that_hold(layers: _Layers) -> None:
    found = layers.measured("shipped")
    layers.measured("user")
    layers.make_void("user", "ConvCpuIm2colGemm")
    with layers.open() as handle:
        rows = handle.database.best_rows(
            handle.device.identity,
            PROBLEM.network_config,
            holds=lambda row: validity.is_valid(row, handle),
            admits=lambda row: True,
        )
        assert {row.solver_id for row in rows} == solver_ids(found)


def test_an_answer_of_which_all_is_void_does_not_hide_one_that_holds_in_part(layers: _Layers) -> None:
    """It made the find measure, though what shipped had solutions."""
    found = layers.measured("user")
    layers.measured("shipped")
    layers.make_void("user", *solver_ids(found))
    layers.comes("vendor/Later")
    with layers.open() as handle:
        assert solver_ids(records.look_up(PROBLEM, FindOptions(), handle)) == solver_ids(found)


def test_what_was_measured_just_now_is_the_answer_whatever_ships(layers: _Layers) -> None:
    layers.measured("shipped")
    with layers.open() as handle:
        only = FindOptions(find_mode=FindMode.NORMAL, only=("ConvCpuDirect",))
        assert {s.source for s in miofind.find_solutions(PROBLEM, options=only, handle=handle)} == {Source.MEASURED}
        assert len(list(handle.database.answers(handle.device.identity, PROBLEM.network_config))) == 2


def test_finds_of_some_solvers_each_make_one_answer(tmp_path: Path) -> None:
    """What was tuned library by library, or solver by solver, is not measured again by a find of all."""
    every = [item.id for item in Registry.default().values() if any(key.place is Place.CPU for key in item.keys)]
    half = len(every) // 2
    whole = FindOptions(find_mode=FindMode.NORMAL)
    with miofind.Handle("cpu", database=tmp_path / "finddb.db", strict=True) as handle:
        for some in (every[:half], every[half:]):
            assert records.look_up(PROBLEM, whole, handle) is None, "a filter's answer is none to who asks for all"
            with contextlib.suppress(NoSolutionError):
                miofind.find_solutions(PROBLEM, options=replace(whole, only=tuple(some)), handle=handle)
        assert records.look_up(PROBLEM, whole, handle, coverage=Coverage.ALL)


def test_what_a_filter_left_out_did_not_come_later(tmp_path: Path) -> None:
    with miofind.Handle("cpu", database=tmp_path / "finddb.db", strict=True) as handle:
        miofind.find_solutions(PROBLEM, options=FindOptions(only=("ConvCpuDirect",)), handle=handle)
        assert records.look_up(PROBLEM, FindOptions(only=("plain",)), handle) is None
        assert records.look_up(PROBLEM, FindOptions(), handle) is None


@pytest.mark.parametrize(
    ("filters", "counts"),
    [
        ({}, True),
        ({"solvers": ["B"]}, True),
        ({"deterministic": True}, False),
        ({"solvers": ["B"], "deterministic": True}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("limit", [None, 8])
def test_a_find_of_fewer_candidates_counts_for_none_of_its_solvers(
    filters: dict[str, object], counts: bool, limit: int | None
) -> None:
    request = Scope(solvers={"A": 1, "B": 1, "C": 2})
    earlier = [
        Scope(solvers={"A": 1, "C": 1}),
        Scope(solvers={"B": 1}, filters=filters, workspace_limit_bytes=limit),
    ]
    expected = {"A", "B"} if counts and limit is None else {"A"}
    assert scopes.considered(request, earlier, Registry()) == expected
    assert scopes.asked(["C"], request, earlier)
    assert scopes.asked(["C"], request, earlier[1:]) == (not filters and limit is None)


def test_a_filtered_find_asked_the_solvers_that_it_names() -> None:
    """One that a filter let in and that has changed since is late; a find of it was answered by nothing."""
    request = Scope(solvers={"A": 1, "B": 2, "C": 1})
    earlier = [Scope(solvers={"A": 1}, filters={"solvers": ["A", "B"]})]
    assert scopes.considered(request, earlier, Registry()) == {"A"}
    assert scopes.asked(["B"], request, earlier)
    assert not scopes.asked(["B", "C"], request, earlier)
    for altered in ([["A"]], None, 5, "AB"):
        assert not scopes.asked(["B"], request, [replace(earlier[0], filters={"solvers": altered})])


def test_any_error_bound_counts_where_it_was_asked_for() -> None:
    request = Scope(solvers={"A": 1, "B": 1, scopes.WIDE_BOUNDS: 1})
    earlier = [Scope(solvers={"A": 1}), Scope(solvers={"B": 1, scopes.WIDE_BOUNDS: 1})]
    assert scopes.considered(request, earlier, Registry()) == {"B", scopes.WIDE_BOUNDS}


def test_a_release_joins_finds_of_some_solvers_to_one_of_all() -> None:
    """They say the same with a third of the words; filters of another kind, searches and bounds stay on their own."""
    apart = [
        Scope(solvers={"D": 1}, filters={"solvers": ["D"], "deterministic": True}),
        Scope(solvers={"D": 1}, filters={"solvers": ["D"]}, effort="search"),
        Scope(solvers={"D": 1, scopes.WIDE_BOUNDS: 1}, filters={"solvers": ["D"]}),
    ]
    whole, some = Scope(solvers={"A": 1, "B": 1}, created_at="1"), Scope(solvers={"B": 2, "C": 1}, created_at="2")
    some = replace(some, filters={"solvers": ["B", "C"]})
    made = scopes.joined([some, *apart, whole])
    assert Scope(solvers={"A": 1, "B": 2, "C": 1}, created_at="2") in made
    assert sorted(made, key=repr) == sorted([*apart, Scope(solvers={"A": 1, "B": 2, "C": 1}, created_at="2")], key=repr)
    assert scopes.joined([some]) == [some], "without a find of all a filter stays"


@pytest.mark.parametrize("measured_again", [False, True])
def test_a_problem_ships_without_void_rows_that_default_requests_do_not_take(
    tmp_path: Path, measured_again: bool
) -> None:
    """What asks for a wide error bound finds no answer then, unless it was measured again."""
    with miofind.Handle("cpu", database=tmp_path / "finddb.db", strict=True) as handle:
        options = FindOptions(find_mode=FindMode.NORMAL, max_error=1.0)
        wide = {s.solver_id for s in miofind.find_solutions(PROBLEM, options=options, handle=handle)}
        wide -= {s.solver_id for s in miofind.find_solutions(PROBLEM, handle=handle)}
        assert wide, "the CPU place has solvers of a wider bound for the problem"
        (history,) = handle.database.user.histories()
    void = [
        replace(row, source_hash="ab", time_ms=1e-6, created_at="2020-01-01T00:00:00.000000Z", id="")
        if row.solver_id in wide
        else row
        for row in history.rows
    ]
    rows = (*void, *history.rows) if measured_again else tuple(void)
    shipping = row_check.Shipping(Registry.default())
    rules = ReleaseRules(keep=shipping, void=shipping.is_lost, widen=shipping.with_refusals, kind=shipping.kind_of)
    with Store(tmp_path / "source.db") as source:
        source.add([replace(history, rows=rows, verdicts=())])
        write_release([source], tmp_path / "out.db", rules)
    with Store(tmp_path / "out.db", read_only=True) as shipped:
        (made,) = shipped.histories()
    assert {row.solver_id for row in made.rows} >= {row.solver_id for row in history.rows} - wide
    assert ({row.solver_id for row in made.rows} >= wide) is measured_again
    assert any(scopes.WIDE_BOUNDS in scope.solvers for scope in made.scopes) is measured_again
    assert made.scopes, "default requests are answered"


def test_a_release_counts_no_solver_as_refusing_for_a_library_that_is_missing_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who has the library has that solver measured."""
    virtual = Device.virtual("90a")
    monkeypatch.setattr(row_check, "device_of", lambda identity: virtual)
    key = ProblemKey(device=virtual.identity, network_config="conv2d-forward-n2-c8-i9x9-k8-f3x3-p1x1-float64-NCHW")
    (refusals,) = row_check.Shipping(Registry.default()).with_refusals(key, [Scope(solvers={"ConvDirectNaive": 1})])
    assert {"ConvCudnn", "ConvImplicitGemmWgmma"} <= refusals.solvers.keys(), "they refuse float64"
    monkeypatch.setattr(Device, "library_version", lambda self, library: None if library is Library.CUDNN else "")
    (missing,) = row_check.Shipping(Registry.default()).with_refusals(key, [Scope(solvers={"ConvDirectNaive": 1})])
    assert refusals.solvers.keys() - missing.solvers.keys() == {"ConvCudnn"}
