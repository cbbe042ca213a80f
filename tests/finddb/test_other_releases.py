"""Rows of other releases: whatever they say, they change no result. They only order candidates."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.finddb.releases import TILES, Terms, made, released
from hypothesis import given, settings
from hypothesis import strategies as st

import miofind
from miofind import FindOptions
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.device.environment import versions
from miofind.errors import LaunchError, NoSolutionError, SolutionFileError
from miofind.find.lookup import failures, known, records
from miofind.find.lookup.scopes import Coverage
from miofind.find.lookup.validity import solver_hash
from miofind.find.row_check import RowCheck
from miofind.finddb import History, Row, Scope, Store, Verdict
from miofind.options import FindMode
from miofind.reference.convolution import reference_on_host
from miofind.runtime.solution import Solution
from miofind.solver.registry import Registry
from miofind.solver.solver import Solver
from miofind.solver.steps import Config

pytestmark = pytest.mark.sampled(2)

PROBLEM = ProblemDescription.convolution(x=(1, 2, 4, 3), w=(2, 2, 2, 2))
NORMAL = FindOptions(find_mode=FindMode.NORMAL)
NAMES = ("ConvA", "ConvB")
LATER = "2100-01-01T00:00:00.000000Z"
EARLIER = "2020-01-01T00:00:00.000000Z"


@pytest.fixture(autouse=True)
def _nothing_ships(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", "")


@pytest.fixture
def installed() -> Iterator[Any]:
    """Installs a release after another, each by its solvers."""
    with ExitStack() as stack:
        yield lambda *those: stack.enter_context(released(*those))


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "finddb.db"


def handle_of(database: Path) -> miofind.Handle:
    return miofind.Handle("cpu", database=database, strict=True)


def measured(database: Path, options: FindOptions = NORMAL) -> set[str]:
    """Ids of what a find measures with the release that is installed."""
    with handle_of(database) as handle:
        return ids(miofind.find_solutions(PROBLEM, options=options, handle=handle))


def ids(solutions: Sequence[Solution] | None) -> set[str]:
    return {solution.id for solution in solutions or ()}


def looked_up(database: Path, *, coverage: Coverage = Coverage.PARTIAL, **options: Any) -> set[str] | None:
    with handle_of(database) as handle:
        found = records.look_up(PROBLEM, FindOptions(**options), handle, coverage=coverage)
    return None if found is None else ids(found)


def row_of(name: str, tile: int = 1, **fields: Any) -> Row:
    """A row that speaks of a solver as the release that is installed has it, but for the fields."""
    solver, config = Registry.default()[name], Config.of(tile=tile)
    values = {
        "solver_version": solver.version,
        "config": config.json,
        "status": "ok",
        "algorithm": solver.algorithm.value,
        "library": solver.library.value,
        "source_hash": solver_hash(solver),
        "time_ms": 1e-6,
        "workspace_bytes": 256 * tile,
    } | fields
    if values["status"] not in ("ok", "cut_off"):
        values["time_ms"] = None
    return Row(solver_id=name, **values)


def record(database: Path, *rows: Row, scope: Scope | None = None) -> None:
    with handle_of(database) as handle:
        handle.database.record(
            handle.device.identity, PROBLEM.network_config, rows, scope=scope, environment=versions(handle.device)
        )


def tuned(database: Path, *names: str) -> None:
    """The release that is installed has measured all of the solvers named, or of all; the times are made up."""
    rows = [
        row_of(
            solver.id,
            config["tile"],
            time_ms=1.0 + config["tile"],
            workspace_bytes=solver.workspace_bytes(PROBLEM, Device.cpu(), config),
            deterministic=solver.solution(PROBLEM, Device.cpu(), config).deterministic,
        )
        for solver in Registry.default().values()
        for config in solver.default_configs(PROBLEM, Device.cpu())
        if (not names or solver.id in names) and solver.applicability(PROBLEM, Device.cpu())
    ]
    record(database, *rows, scope=Scope(solvers={solver.id: solver.version for solver in Registry.default().values()}))


ALL = {f'{name}:{{"tile":{tile}}}' for name in NAMES for tile in TILES}
OF_A = {name for name in ALL if name.startswith("ConvA")}


def both(a: Terms | None = None, b: Terms | None = None) -> tuple[Solver, Solver]:
    return made("ConvA", a or Terms()), made("ConvB", b or Terms())


def test_a_narrowed_refusal_voids_the_rows_of_what_is_refused_now(installed: Any, database: Path) -> None:
    installed(*both())
    tuned(database)
    assert looked_up(database, coverage=Coverage.ALL) == ALL
    installed(*both(a=Terms(refuses=True)))
    for coverage in (Coverage.PARTIAL, Coverage.ALL):
        assert looked_up(database, coverage=coverage) == ALL - OF_A
    with handle_of(database) as handle:
        assert ids(miofind.find_solutions(PROBLEM, handle=handle)) == ALL - OF_A
        assert handle.database.rechecks() == (), "nothing is missing: who refuses need not be measured"


def test_a_candidate_that_is_cut_off_now_is_not_hidden_by_a_void_row(installed: Any, database: Path) -> None:
    installed(*both())
    tuned(database)
    installed(*both(a=Terms(regions=512)))
    again = [row_of("ConvA", tile, time_ms=9.0, workspace_bytes=512 * tile) for tile in TILES]
    record(database, *(replace(row, status="cut_off" if row.config == '{"tile":2}' else "ok") for row in again))
    assert looked_up(database) == ALL


@pytest.mark.parametrize("refuses", [(False, False), (True, False), (True, True)])
def test_what_is_answered_is_what_has_solutions(installed: Any, database: Path, refuses: tuple[bool, bool]) -> None:
    installed(*both())
    tuned(database)
    a, b = (Terms(refuses=each) for each in refuses)
    installed(*both(a, b))
    with handle_of(database) as handle:
        assert records.is_answered(PROBLEM, FindOptions(), handle) is (looked_up(database) is not None)
        assert records.is_answered(PROBLEM, FindOptions(), handle) is not all(refuses)
        assert not records.is_answered(PROBLEM, FindOptions(tuning=True), handle), "nobody searched"


def test_what_all_solvers_refuse_now_has_no_answer(installed: Any, database: Path) -> None:
    installed(*both())
    tuned(database)
    installed(*both(a=Terms(refuses=True), b=Terms(refuses=True)))
    assert looked_up(database) is None
    with handle_of(database) as handle, pytest.raises(NoSolutionError, match="refused by this release"):
        miofind.find_solutions(PROBLEM, handle=handle)


@pytest.mark.parametrize(
    "change",
    [{"source": "changed"}, {"version": 2}, {"regions": 512}, {"deterministic": False}],
    ids=str,
)
def test_a_changed_result_voids_its_rows(installed: Any, database: Path, change: dict[str, Any]) -> None:
    installed(*both())
    tuned(database)
    installed(*both(a=Terms(**change)))
    assert looked_up(database, coverage=Coverage.ALL) is None, "ConvA has to be measured anew"
    assert looked_up(database) == ALL - OF_A
    with handle_of(database) as handle:
        assert [note.reason for note in handle.database.rechecks()] == ["not measured yet: ConvA"]
    assert measured(database) == ALL
    assert looked_up(database, coverage=Coverage.ALL) == ALL


def test_a_solver_that_fails_over_the_question_has_no_answer_and_others_have(installed: Any, database: Path) -> None:
    """Measuring it would fail as well; mended, it answers again."""
    installed(*both())
    tuned(database)
    installed(*both(a=Terms(fails=True)))
    for coverage in (Coverage.PARTIAL, Coverage.ALL):
        assert looked_up(database, coverage=coverage) == ALL - OF_A
    with handle_of(database) as handle:
        assert ids(miofind.find_solutions(PROBLEM, handle=handle)) == ALL - OF_A
        assert handle.database.rechecks() == ()
    installed(*both())
    assert looked_up(database, coverage=Coverage.ALL) == ALL


def test_other_kernels_void_their_rows(installed: Any, database: Path) -> None:
    """It was seen only when a solution was made ready, and then each time anew."""
    installed(*both())
    tuned(database)
    record(database, row_of("ConvA", 1, kernel_hash="0" * 32))
    assert looked_up(database) == ALL - {'ConvA:{"tile":1}'}


def test_configurations_that_are_none_any_more_void_their_rows_alone(installed: Any, database: Path) -> None:
    installed(*both())
    tuned(database)
    installed(*both(a=Terms(tiles=(2, 4))))
    assert looked_up(database) == ALL - {'ConvA:{"tile":1}', 'ConvA:{"tile":3}'}


def test_rows_that_are_refused_hide_no_slower_ones_that_stand(installed: Any, database: Path) -> None:
    """An answer keeps the best three of a solver, and the best four of all."""
    tiles = (1, 2, 3, 4, 5)
    installed(*both(a=Terms(tiles=tiles)))
    tuned(database)
    record(database, *(row_of("ConvA", tile, time_ms=1e-6 * tile) for tile in tiles))
    for left in ((5,), (3, 5)):
        installed(*both(a=Terms(tiles=left)))
        kept = {f'ConvA:{{"tile":{tile}}}' for tile in left}
        assert looked_up(database, coverage=Coverage.ALL) == kept | (ALL - OF_A)


def test_limits_are_kept_by_what_a_solver_needs_today(installed: Any, database: Path) -> None:
    installed(*both())
    tuned(database)
    record(database, row_of("ConvA", 3, workspace_bytes=0), row_of("ConvB", 3, workspace_bytes=0))
    assert looked_up(database, workspace_limit_bytes=511) == {f'{name}:{{"tile":1}}' for name in NAMES}


@pytest.mark.parametrize("change", [{"solver_version": 9}, {"source_hash": "another"}], ids=str)
@pytest.mark.parametrize("created_at", ["", LATER], ids=["now", "later"])
@pytest.mark.parametrize("status", ["wrong_result", "crashed", "out_of_memory", "ok"])
def test_what_became_of_another_releases_candidates_removes_none(
    installed: Any, database: Path, status: str, created_at: str, change: dict[str, Any]
) -> None:
    """It was the last that was heard of the solver, and took the place of what this release had measured."""
    installed(*both())
    tuned(database)
    record(database, *(row_of("ConvA", tile, status=status, created_at=created_at, **change) for tile in TILES))
    for coverage in (Coverage.PARTIAL, Coverage.ALL):
        assert looked_up(database, coverage=coverage) == ALL
    with handle_of(database) as handle:
        assert failures.failures(PROBLEM, handle) == {}
        assert failures.quarantined(PROBLEM, handle) == frozenset()
        assert handle.database.rechecks() == ()
    assert measured(database) == ALL
    assert looked_up(database, coverage=Coverage.ALL) == ALL


@pytest.mark.parametrize("status", ["wrong_result", "ok"])
def test_what_failed_in_this_release_is_not_measured_again_for_what_another_says(
    installed: Any, database: Path, status: str
) -> None:
    installed(*both())
    tuned(database, "ConvB")
    record(database, *(row_of("ConvA", tile, status="wrong_result") for tile in TILES))
    record(database, row_of("ConvA", status=status, source_hash="another", created_at=LATER))
    assert looked_up(database, coverage=Coverage.ALL) == ALL - OF_A
    with handle_of(database) as handle:
        assert failures.quarantined(PROBLEM, handle) == OF_A


def test_a_search_takes_no_time_from_a_row_that_is_refused_now(installed: Any, database: Path) -> None:
    installed(*both())
    tuned(database)
    installed(*both(a=Terms(tiles=(2,))))
    with handle_of(database) as handle:
        found = known.known_times(PROBLEM, handle)
    assert {candidate.id for candidate in found} == {'ConvA:{"tile":2}'} | (ALL - OF_A)


def test_a_row_of_a_solver_that_is_gone_is_no_answer(installed: Any, database: Path) -> None:
    installed(*both())
    tuned(database)
    installed(made("ConvB", Terms()))
    assert looked_up(database, coverage=Coverage.ALL) == ALL - OF_A


def test_a_pickled_solution_runs_only_where_its_solver_serves_the_problem(installed: Any, database: Path) -> None:
    installed(*both())
    with handle_of(database) as handle:
        found = miofind.find_solutions(PROBLEM, options=NORMAL, handle=handle)
        first = next(solution for solution in found if solution.solver_id == "ConvA")
        alone = first.solution_list.solutions = [first]
        pickled = pickle.dumps(replace(alone[0], position=0))
    installed(*both(a=Terms(refuses=True)))
    solution = pickle.loads(pickled)
    x, w = (np.ones(PROBLEM.tensor(name).shape, np.float32) for name in "xw")
    for refused in (solution.prepare, lambda: miofind.run_solution(solution, x, w), lambda: solution.pack(w)):
        with pytest.raises(LaunchError, match=r"does not serve .* refused by this release"):
            refused()
    with pytest.raises(SolutionFileError, match="refused by this release"):
        solution.save(database.with_suffix(".json"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"refuses": True}, "refused by this release"),
        ({"fails": True}, "broken for this test"),
        ({"tiles": (9,)}, "is none of this release"),
        ({"version": 2}, "other sources"),
    ],
    ids=str,
)
def test_a_saved_solution_is_refused_by_what_its_solver_says_today(
    installed: Any, database: Path, change: dict[str, Any], reason: str
) -> None:
    installed(*both())
    path = database.with_suffix(".json")
    with handle_of(database) as handle:
        miofind.find_solutions(PROBLEM, options=replace(NORMAL, only=("ConvA",)), handle=handle)[0].save(path)
        assert Solution.load(path, handle).prepare()
        installed(*both(a=Terms(**change)))
        with pytest.raises(SolutionFileError, match=reason):
            Solution.load(path, handle)


def test_a_check_of_a_database_finds_other_kernels_and_other_determinism(installed: Any, database: Path) -> None:
    installed(*both())
    tuned(database)
    record(database, row_of("ConvA", 1, kernel_hash="0" * 32), row_of("ConvB", 2, deterministic=False))
    with Store(database, read_only=True) as store:
        findings = store.check(RowCheck(Registry.default()))
    assert len(findings) == 2
    assert any("other kernels" in finding for finding in findings)
    assert any("deterministic=False" in finding for finding in findings)


# What follows is drawn: what this release has of two solvers, and entries of other releases of them and of a third.

terms = st.builds(
    Terms,
    version=st.integers(1, 2),
    refuses=st.sampled_from([False, False, False, True]),
    tiles=st.sets(st.sampled_from(TILES), min_size=1).map(lambda tiles: tuple(sorted(tiles))),
    regions=st.sampled_from([256, 512]),
    deterministic=st.booleans(),
)
configs = st.one_of(
    st.sampled_from((*TILES, 9)).map(lambda tile: Config.of(tile=tile).json),
    st.sampled_from(["{}", '{"tile":"1"}', '{"tile":1.0}', '{"other":1,"tile":1}', '{"tile":{"x":1}}']),
)
times = st.sampled_from([EARLIER, LATER])


@st.composite
def foreign_rows(draw: Any, *, of_this_code: bool) -> Row:
    """A row that some release wrote.

    Args:
        of_this_code: whether it may have the version and sources of this release.
    """
    name = draw(st.sampled_from((*NAMES, "ConvGone")))
    code = [(1, "another"), (9, "another"), (9, ""), (3, None)] + ([(1, None), (2, None)] if of_this_code else [])
    version, source = draw(st.sampled_from(code))
    if source is None:
        source = solver_hash(Registry.default().get(name) or Registry.default()["ConvA"])
    status = draw(st.sampled_from(["ok", "ok", "cut_off", "wrong_result", "crashed", "out_of_memory"]))
    return Row(
        solver_id=name,
        solver_version=version,
        config=draw(configs),
        status=status,
        source_hash=source,
        kernel_hash=draw(st.sampled_from(["", "", "00"])),
        time_ms=draw(st.sampled_from([1e-6, 1.0, 1e6])) if status in ("ok", "cut_off") else None,
        workspace_bytes=draw(st.sampled_from([0, 256, 512, 768, 1024])),
        deterministic=draw(st.booleans()),
        max_error=draw(st.sampled_from([None, 0.0, 1e3])),
        created_at=draw(times),
    )


foreign_scopes = st.builds(
    Scope,
    solvers=st.dictionaries(st.sampled_from((*NAMES, "ConvGone")), st.integers(1, 3)),
    filters=st.sampled_from([{}, {}, {"solvers": ["ConvA"]}]),
    effort=st.sampled_from(["defaults", "search"]),
    complete=st.booleans(),
    created_at=times,
)
foreign_verdicts = st.permutations(sorted(ALL)).map(
    lambda order: Verdict(
        winner=order[0], ties=tuple(order[:2]), comparisons=(), blocks=9, protocol="cpu-1", created_at=LATER
    )
)


@st.composite
def foreign_histories(draw: Any, *, of_this_code: bool) -> History:
    """All that another release knows of the problem."""
    return History(
        device=Device.cpu().identity,
        network_config=PROBLEM.network_config,
        rows=tuple(draw(st.lists(foreign_rows(of_this_code=of_this_code), min_size=1, max_size=8))),
        scopes=tuple(draw(st.lists(foreign_scopes, max_size=2))),
        verdicts=tuple(draw(st.lists(foreign_verdicts, max_size=1))),
    )


class _Way:
    """How entries of another release get to this one's finds."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.database = folder / "finddb.db"
        self._other = folder / "other.db"
        self._kind = kind

    def bring(self, history: History) -> None:
        with Store(self._other) as other, Store(self.database) as mine:
            (mine if self._kind == "written" else other).add([history])
            if self._kind == "merged":
                mine.merge(other)
            elif self._kind == "imported":
                lines = io.StringIO()
                other.export_jsonl(lines)
                lines.seek(0)
                mine.import_jsonl(lines)

    @contextmanager
    def opened(self) -> Iterator[miofind.Handle]:
        """A handle on them, asked anew."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(
                "MIOFIND_SYSTEM_DB", str(self._other) if self._kind == "system" and self._other.exists() else ""
            )
            with handle_of(self.database) as handle:
                yield handle


WAYS = ["written", "merged", "imported", "system"]
drawn = settings(max_examples=20)


def check_stands(solution: Solution) -> None:
    """A solution is what this release's solver says of it."""
    solver, device = Registry.default()[solution.solver_id], Device.cpu()
    assert solver.applicability(PROBLEM, device)
    solver.check_config(PROBLEM, device, solution.config)
    today = solver.solution(PROBLEM, device, solution.config)
    assert (solution.workspace_bytes, solution.deterministic) == (today.workspace.bytes, today.deterministic)


@given(data=st.data(), a=terms, b=terms, way=st.sampled_from(WAYS))
@drawn
def test_whatever_another_release_says_an_answer_is_what_this_ones_solvers_accept(
    data: Any, a: Terms, b: Terms, way: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    options = data.draw(
        st.builds(
            FindOptions,
            find_mode=st.sampled_from([FindMode.HYBRID, FindMode.HYBRID, FindMode.FAST, FindMode.TRUST_VERIFY]),
            workspace_limit_bytes=st.sampled_from([None, 512]),
            deterministic=st.booleans(),
        )
    )
    brought = _Way(tmp_path_factory.mktemp("rows"), way)
    with released(*both(a, b)):
        possible = {
            f"{name}:{config.json}"
            for name, solver in Registry.default().items()
            for config in solver.default_configs(PROBLEM, Device.cpu())
            if solver.applicability(PROBLEM, Device.cpu())
            and solver.workspace_bytes(PROBLEM, Device.cpu(), config) <= (options.workspace_limit_bytes or 1 << 30)
            and (solver.solution(PROBLEM, Device.cpu(), config).deterministic or not options.deterministic)
        }
        brought.bring(data.draw(foreign_histories(of_this_code=True)))
        with brought.opened() as handle:
            try:
                found = miofind.find_solutions(PROBLEM, options=options, handle=handle)
            except NoSolutionError:
                allowed = failures.failures(PROBLEM, handle)
                assert possible <= allowed.keys(), "what failed in this very code is not tried again, and nothing else"
                return
            assert ids(found) <= possible
            for solution in found:
                check_stands(solution)
            check_runs(found[0], brought.database.with_suffix(".json"))


def check_runs(solution: Solution, path: Path) -> None:
    """It computes the right thing: as it is, packed, and saved and loaded."""
    x, w = (np.arange(PROBLEM.tensor(name).size, dtype=np.float32) for name in "xw")
    x, w = x.reshape(PROBLEM.x.shape), w.reshape(PROBLEM.w.shape)
    want = reference_on_host(PROBLEM, x=x, w=w)
    solution.save(path)
    workspace = np.empty(solution.workspace_bytes, np.uint8)
    np.testing.assert_array_equal(miofind.run_solution(solution, x, w, workspace=workspace), want)
    np.testing.assert_array_equal(solution.pack(w).run(x, workspace=workspace), want)
    np.testing.assert_array_equal(miofind.run_solution(Solution.load(path, solution.solution_list.handle), x, w), want)


@given(data=st.data(), a=terms, b=terms, way=st.sampled_from(WAYS))
@drawn
def test_what_another_release_knows_takes_nothing_from_what_this_one_measured(
    data: Any, a: Terms, b: Terms, way: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    brought = _Way(tmp_path_factory.mktemp("rows"), way)
    with released(*both(a, b)):
        tuned(brought.database)
        with brought.opened() as handle:
            before = records.look_up(PROBLEM, FindOptions(), handle, coverage=Coverage.ALL)
        brought.bring(data.draw(foreign_histories(of_this_code=False)))
        with brought.opened() as handle:
            for coverage in (Coverage.PARTIAL, Coverage.ALL):
                after = records.look_up(PROBLEM, FindOptions(), handle, coverage=coverage)
                assert ids(after) == ids(before)
                assert records.is_answered(PROBLEM, FindOptions(), handle) is bool(after)
                assert {s.id: s.time_ms for s in after or ()} == {s.id: s.time_ms for s in before or ()}
            assert handle.database.rechecks() == ()
            assert failures.failures(PROBLEM, handle) == {}
            assert {c.id for c in known.known_times(PROBLEM, handle)} == ids(before)
