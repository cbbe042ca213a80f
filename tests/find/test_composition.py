"""Fused problems, found: composed forms of the fastest bare solvers, their rows, and what options make of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from miofind.core.epilogue import Epilogue, EpilogueParameters
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.errors import NoSolutionError, UnknownSolverError
from miofind.find.composition import MAX_COMPOSED, bare_solutions, fastest_bare, is_light
from miofind.find.immediate.answer import predicted
from miofind.find.lookup import validity
from miofind.find.lookup.validity import solver_hash
from miofind.find.pipeline import find
from miofind.find.plan import Plan, make_plan, stored_plan
from miofind.find.row_check import RowCheck, Shipping
from miofind.finddb import ReleaseRules, Store, write_release
from miofind.launch.invoker import bases_of, make_invoker
from miofind.options import FindMode, FindOptions, OnMiss
from miofind.reference.convolution import reference_on_host, round_once
from miofind.reference.epilogue import apply_epilogue
from miofind.runtime.handle import Handle
from miofind.runtime.solution import Solution, Source
from miofind.solver.registry import Registry
from miofind.solver.solver import APPLICABLE, Applicability
from miofind.solver.steps import Config, ConvSolution
from miofind.solvers.cpu.direct import ConvCpuDirect
from miofind.solvers.cpu.im2col_gemm import ConvCpuIm2colGemm
from miofind.solvers.pointwise.epilogue_pass import MODULE, pass_step
from miofind.suites import SuiteProblem
from miofind.tune.forecast import forecast
from miofind.tune.service import TuneOptions, tune
from miofind.tune.values import TuneStatus

PROBLEM = ProblemDescription.convolution(
    x=(2, 4, 7, 6), w=(6, 4, 3, 3), padding=1, epilogue="scale.bias.channel_bias.residual.leaky_relu"
)
NUMBERS = EpilogueParameters(alpha=0.5, beta=-2.0, slope=0.25)


@pytest.fixture(autouse=True)
def no_shipped_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", "")


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "found.db"


def test_a_fused_problem_is_measured_recorded_and_answered(database: Path) -> None:
    with Handle("cpu", database=database) as handle:
        measured = find(PROBLEM, FindOptions(), handle)
        bare = find(PROBLEM.bare, FindOptions(on_miss=OnMiss.ERROR), handle)
    assert {solution.source for solution in measured} == {Source.MEASURED}
    assert all(solution.solver_id.endswith("+Pointwise") for solution in measured)
    assert f"{bare[0].solver_id}+Pointwise" in {solution.solver_id for solution in measured}
    with Handle("cpu", database=database) as handle:
        found = find(PROBLEM, FindOptions(on_miss=OnMiss.ERROR), handle)
        rows = [
            row
            for history in handle.database.histories(handle.device.identity, PROBLEM.network_config)
            for row in history.rows
        ]
        assert all(row.source_hash == solver_hash(handle.registry[row.solver_id], fused=True) for row in rows)
    assert [solution.id for solution in found] == [solution.id for solution in measured]
    assert {solution.source for solution in found} == {Source.FINDDB}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_composed_solution_computes_the_reference_of_rounded_sums(dtype: str) -> None:
    problem = ProblemDescription.convolution(
        x=(3, 4, 5, 6), w=(6, 4, 3, 2), dtype=dtype, layout="NHWC", epilogue=PROBLEM.epilogue
    )
    random = np.random.default_rng(0)
    arrays = {
        operand.name: round_once(random.standard_normal(operand.shape), operand.tensor.dtype)
        for operand in problem.operands
    }
    with Handle("cpu") as handle:
        solver = handle.registry["ConvCpuDirect+Pointwise"]
        (config,) = solver.default_configs(problem, handle.device)
        invoker = make_invoker(problem, handle.device, solver, config, handle.compiler)
        invoker.run(bases_of(problem, arrays, None, NUMBERS), 0)
    sums = round_once(reference_on_host(problem.bare, x=arrays["x"], w=arrays["w"]), problem.y.dtype)
    wanted = apply_epilogue(problem, sums.astype(np.float64), arrays, NUMBERS)
    assert np.array_equal(arrays["y"], round_once(wanted, problem.y.dtype))
    assert solver.rounds_twice(problem, config) == (dtype in ("float16", "bfloat16"))


def test_only_the_fastest_bare_solutions_are_composed() -> None:
    """Without measurements those with the least estimates."""
    with Handle(Device.virtual("90a")) as handle:
        problem = ProblemDescription.convolution(
            x=(8, 64, 28, 28), w=(64, 64, 3, 3), padding=1, dtype="float16", layout="NHWC", epilogue="bias.gelu"
        )
        bare = make_plan(problem.bare, FindOptions(), handle).candidates
        plan = make_plan(problem, FindOptions(), handle)
    composed = [p for p in plan.candidates if p.solver.id.endswith("+Pointwise")]
    fastest = dict.fromkeys(p.solver.id for p in bare)
    assert {p.solver.id for p in composed} == {f"{name}+Pointwise" for name in list(fastest)[:MAX_COMPOSED]}
    assert all(solver in plan.considered for solver in fastest)
    assert not any(name.endswith("+Pointwise") for name in plan.considered)


def test_a_find_without_any_solution_says_why_of_each_solver() -> None:
    """What refuses the bare problem is told rather than that no epilogue is fused."""
    problem = ProblemDescription.convolution(x=(1, 4, 6, 6), w=(4, 4, 3, 3), dtype="float64", epilogue="bias")
    with Handle("cpu") as handle:
        plan = make_plan(problem, FindOptions(), handle)
        assert plan.refusals["ConvDirectTiled"] == "runs on cuda, not on cpu"
        assert plan.refusals["ConvCpuGemm1x1"].startswith("serves unpadded filters of one tap")
        assert plan.refusals["ConvCpuDirect"] == "its kernels apply no epilogue bias"
        with pytest.raises(NoSolutionError, match="ConvDirectTiled: runs on cuda"):
            find(problem, FindOptions(only=("ConvDirectTiled", "cudnn")), handle)


def test_bare_winners_are_configurations_to_fuse(database: Path) -> None:
    """Where its kernels fuse, a solver is tried with the configurations that were fastest without the epilogue."""
    problem = ProblemDescription.convolution(x=(2, 4, 7, 6), w=(6, 4, 3, 3), epilogue="bias")
    with Handle("cpu", database=database, registry=Registry.default().with_solvers(FusedColumns)) as handle:
        only = ("ConvCpuIm2colGemm",)
        find(problem.bare, FindOptions(only=only, tuning=True), handle)
        best = find(problem.bare, FindOptions(only=only, on_miss=OnMiss.ERROR), handle)[0]
        for options in (FindOptions(only=only), FindOptions(only=only, tuning=True)):
            plan = make_plan(problem, options, handle)
            assert (best.solver_id, best.config) in {(p.solver.id, p.candidate.config) for p in plan.candidates}
        found = find(problem, FindOptions(only=only), handle)
    assert {solution.solver_id for solution in found} == {"ConvCpuIm2colGemm", "ConvCpuIm2colGemm+Pointwise"}


def test_a_find_leaves_out_what_was_slow_without_the_epilogue(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a search, nor a find of it alone; of the others the first defaults go beside what was fastest."""
    slow = "ConvCpuIm2colGemm"
    with Handle("cpu", database=database, registry=Registry.default().with_solvers(FusedColumns)) as handle:
        measured = find(PROBLEM.bare, FindOptions(), handle)
        times = {solution.solver_id: 1.0 for solution in measured} | {slow: 2.5}
        told = sorted((replace(each, time_ms=times[each.solver_id]) for each in measured), key=lambda s: s.time_ms)

        def planned(**options: object) -> Plan:
            def solutions(problem: ProblemDescription, options: FindOptions, handle: Handle) -> list[Solution]:
                return [each for each in told if options.allows(handle.registry[each.solver_id])]

            monkeypatch.setattr("miofind.find.plan.bare_solutions", solutions)
            return make_plan(PROBLEM, FindOptions(**options), handle)  # type: ignore[arg-type]

        plan = planned()
        assert plan.refusals[slow] == f"takes 2.5 times as long as {told[0].solver_id} without the epilogue"
        assert slow not in {each.solver.id for each in plan.candidates}
        assert slow in plan.considered
        for options in ({"tuning": True}, {"only": (slow,)}):
            plan = planned(**options)
            assert slow not in plan.refusals
            assert slow in {each.solver.id for each in plan.candidates}
        times[slow] = 1.9
        told = [replace(each, time_ms=times[each.solver_id]) for each in measured]
        assert slow in {each.solver.id for each in planned().candidates}


def test_a_costly_epilogue_is_tried_with_all_default_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miofind.find.plan.bare_solutions", lambda problem, *others: predicted(problem.bare, *others))
    counts, name = {}, "ConvImplicitGemmWgmma"
    with Handle(Device.virtual("90a")) as handle:
        for epilogue in ("bias.relu", "bias.residual.relu", "bias.gelu"):
            problem = ProblemDescription.convolution(
                x=(32, 64, 56, 56), w=(256, 64, 1, 1), dtype="float16", layout="NHWC", epilogue=epilogue
            )
            counts[epilogue] = [each.solver.id for each in make_plan(problem, FindOptions(), handle).candidates].count(
                name
            )
            every = len(handle.registry[name].default_configs(problem, handle.device))
    assert counts == {"bias.relu": 2, "bias.residual.relu": every, "bias.gelu": every}
    assert every > 2


@pytest.mark.parametrize(("cluster", "is_taken"), [("1x1x1", True), ("1x1x8", False)])
def test_all_defaults_are_tried_where_the_bare_winner_does_not_take_the_epilogue(
    cluster: str, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("miofind.find.plan.bare_solutions", lambda problem, *others: predicted(problem.bare, *others))
    problem = ProblemDescription.convolution(
        x=(1, 256, 14, 14), w=(256, 256, 3, 3), padding=1, dtype="float16", layout="NHWC", epilogue="statistics"
    )
    values = {"blocks": 1, "consumers": 1, "depth_bytes": 128, "rows": 1, "splits": 1, "stages": 8, "swapped": 0}
    winner = Config(values | {"cluster": cluster, "tile_n": 96})
    with Handle(Device.virtual("90a")) as handle:
        solver = handle.registry["ConvImplicitGemmWgmma"]
        solver.check_config(problem.bare, handle.device, winner)
        monkeypatch.setattr("miofind.find.plan.stored_configs", lambda *_: {solver.id: (winner,)})
        plan = make_plan(problem, FindOptions(), handle)
        planned = [each.candidate.config for each in plan.candidates if each.solver is solver]
        every = solver.default_configs(problem, handle.device)
    assert (winner in planned) is is_taken
    assert len(planned) == (3 if is_taken else len(every))


class FusedColumns(ConvCpuIm2colGemm):
    """Says that it fuses, and does so by the pass."""

    def fuses(self, problem: ProblemDescription) -> Applicability:
        return APPLICABLE

    def solution(self, problem: ProblemDescription, device: Device, config: Config) -> ConvSolution:
        bare = super().solution(problem.bare, device, config)
        return replace(bare, steps=(*bare.steps, pass_step(problem, device))) if problem.epilogue else bare


@pytest.mark.parametrize("tuning", [False, True])
def test_options_choose_forms_by_id(tuning: bool, database: Path) -> None:
    def ids(**names: object) -> set[str]:
        with Handle("cpu", database=database) as handle:
            options = FindOptions(tuning=tuning, **names)  # type: ignore[arg-type]
            return {solution.solver_id for solution in find(PROBLEM, options, handle)}

    assert ids(only="convcpudirect+pointwise") == {"ConvCpuDirect+Pointwise"}
    assert ids(only="ConvCpuDirect") == {"ConvCpuDirect+Pointwise"}
    assert ids(only="im2col_gemm") == {"ConvCpuIm2colGemm+Pointwise"}
    assert "ConvCpuDirect+Pointwise" not in ids(exclude=("ConvCpuDirect",))
    assert "ConvCpuDirect+Pointwise" not in ids(exclude=("ConvCpuDirect+Pointwise",))
    with pytest.raises(NoSolutionError, match="runs on cuda, not on cpu"):
        ids(only="ConvDirectNaive+Pointwise")
    with pytest.raises(UnknownSolverError, match="is no solver, algorithm or library"):
        FindOptions(only=("ConvDirectNiave+Pointwise",))


def test_named_forms_are_composed_however_slow_their_solvers_are(database: Path) -> None:
    named = ("ConvCpuDirect", "ConvCpuIm2colGemm")
    with Handle("cpu", database=database) as handle:
        find(PROBLEM.bare, FindOptions(), handle)
        slowest = find(PROBLEM.bare, FindOptions(on_miss=OnMiss.ERROR), handle)[-1]
        (history,) = handle.database.histories(handle.device.identity, PROBLEM.bare.network_config)
        slower = [
            replace(row, time_ms=100 * slowest.time_ms, created_at="", id="")
            for row in history.rows
            if row.solver_id == "ConvCpuDirect" and row.usable
        ]
        handle.database.record(handle.device.identity, PROBLEM.bare.network_config, slower)
        assert "ConvCpuDirect" not in fastest_bare(bare_solutions(PROBLEM, FindOptions(), handle), FindOptions())
        for only in (tuple(f"{name}+Pointwise" for name in named), ("ConvCpuDirect+Pointwise", "im2col_gemm")):
            options = FindOptions(only=only)
            assert fastest_bare(bare_solutions(PROBLEM, options, handle), options).keys() == set(named)


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_measures_nothing_is_ordered_by_estimates(dynamic: bool, database: Path) -> None:
    with Handle("cpu", database=database) as handle:
        mode = FindMode.DYNAMIC_HYBRID if dynamic else FindMode.FAST
        found = find(PROBLEM, FindOptions(find_mode=mode, on_miss=OnMiss.ESTIMATE), handle)
    assert {solution.source for solution in found} == {Source.PREDICTED}
    assert all(solution.solver_id.endswith("+Pointwise") for solution in found)
    assert not database.exists() or not Store(database).problems()


def test_a_changed_pass_voids_composed_rows_alone(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Handle("cpu", database=database) as handle:
        find(PROBLEM, FindOptions(), handle)
    monkeypatch.setattr(validity, "host_hash", changed_pass(validity.host_hash))
    validity.solver_hash.cache_clear()
    validity.is_current.cache_clear()
    try:
        with Handle("cpu", database=database) as handle:
            assert find(PROBLEM.bare, FindOptions(on_miss=OnMiss.ERROR), handle)
            with pytest.raises(NoSolutionError, match="has no answer"):
                find(PROBLEM, FindOptions(on_miss=OnMiss.ERROR), handle)
            assert find(PROBLEM, FindOptions(), handle)[0].source is Source.MEASURED
    finally:
        monkeypatch.undo()
        validity.solver_hash.cache_clear()
        validity.is_current.cache_clear()


def changed_pass(host_hash: Callable[[str], str]) -> Callable[[str], str]:
    return lambda module: f"{host_hash(module)} changed" if module == MODULE else host_hash(module)


def test_a_child_measures_composed_candidates(database: Path) -> None:
    with Handle("cpu", database=database) as handle:
        found = find(PROBLEM, FindOptions(isolate=True, only=("ConvCpuDirect",)), handle)
    assert [solution.solver_id for solution in found] == ["ConvCpuDirect+Pointwise"]


def test_stored_rows_are_checked_merged_and_released(database: Path, tmp_path: Path) -> None:
    registry = Registry.default()
    with Handle("cpu", database=database) as handle:
        find(PROBLEM, FindOptions(), handle)
        device = handle.device.identity
    with Store(database) as store, Store(tmp_path / "merged.db") as merged:
        check = RowCheck(registry)
        assert store.check(check) == ()
        assert check.void == 0
        fused = [row for key, row in store.rows() if key.network_config == PROBLEM.network_config]
        assert check.checked >= len(fused) > 0
        merged.merge(store)
        shipping = Shipping(registry)
        rules = ReleaseRules(keep=shipping, void=shipping.is_lost, widen=shipping.with_refusals, kind=shipping.kind_of)
        write_release([merged], tmp_path / "release.db", rules)
    assert shipping.findings == []
    with Handle("cpu", database=tmp_path / "release.db") as handle:
        found = find(PROBLEM, FindOptions(on_miss=OnMiss.ERROR), handle)
    assert {solution.solver_id for solution in found} == {row.solver_id for row in fused}
    unknown = replace(fused[0], solver_id="ConvNobodys+Pointwise", environment="", id="")
    with Store(tmp_path / "unknown.db") as store:
        store.record(device, PROBLEM.network_config, [unknown])
        (finding,) = store.check(RowCheck(registry))
    assert "'ConvNobodys+Pointwise' is not registered" in str(finding)


def test_what_a_bare_problem_is_fastest_with_by_now_is_measured_beside_stored_forms(database: Path) -> None:
    name, only = "ConvCpuIm2colGemm", FindOptions(only=("ConvCpuIm2colGemm",))
    request = [SuiteProblem(problem=PROBLEM, suite="small", layer="fused", count=1)]
    options = TuneOptions(find=only, stored=True)
    with Handle("cpu", database=database, strict=True) as handle:
        device, bare = handle.device, PROBLEM.bare
        find(PROBLEM, only, handle)
        assert {r.status for r in tune(request, [handle], options).results} == {TuneStatus.KNOWN}
        solver = handle.registry[name]
        (history,) = handle.database.histories(device.identity, bare.network_config)
        known = {row.config for row in history.rows}
        config = next(each for each in solver.configs(bare, device) if each.json not in known)
        row = replace(
            history.rows[0],
            config=config.json,
            kernel_hash="",
            workspace_bytes=solver.solution(bare, device, config).workspace.bytes,
            time_ms=1e-6,
            created_at="",
            id="",
        )
        handle.database.record(device.identity, bare.network_config, [row])
        plan = stored_plan(PROBLEM, only, handle)
        composed = {p.candidate.config for p in plan.candidates if p.solver.id == f"{name}+Pointwise"}
        assert config in composed
        assert len(composed) == 2, "what is stored, and what is fastest by now"
        assert {r.status for r in tune(request, [handle], options).results} == {TuneStatus.TUNED}
        assert {r.status for r in tune(request, [handle], options).results} == {TuneStatus.KNOWN}
        assert stored_plan(bare, only, handle).considered == {}


def test_a_tuning_measures_fused_problems_and_then_knows_them(database: Path) -> None:
    requests = [
        SuiteProblem(problem=p, suite="small", layer=p.epilogue.text or "bare", count=1)
        for p in (PROBLEM, PROBLEM.bare)
    ]
    options = TuneOptions(find=FindOptions(tuning=True, trials=12))
    registry = Registry([ConvCpuDirect, ConvCpuIm2colGemm])
    with Handle("cpu", database=database, strict=True, registry=registry) as handle:
        before = forecast(requests, [handle], options)
        first = tune(requests, [handle], options)
        after = forecast(requests, [handle], options)
        again = tune(requests, [handle], options)
        stored = tune(requests, [handle], TuneOptions(stored=True, force=True))
    assert (before.known, before.unsolvable, after.known) == (0, 0, 2)
    assert {r.status for r in first.results} <= {TuneStatus.TUNED, TuneStatus.KNOWN}
    assert {r.status for r in again.results} == {TuneStatus.KNOWN}
    assert {r.status for r in stored.results} == {TuneStatus.TUNED}
    for result in (*first.results, *stored.results):
        if result.request.problem.epilogue:
            assert {s.solver_id.removeprefix("ConvCpu") for s in result.solutions} <= {
                "Direct+Pointwise",
                "Im2colGemm+Pointwise",
            }


@pytest.mark.parametrize(
    ("text", "light"),
    [
        ("bias.relu", True),
        ("scale.clamp", True),
        ("bias.silu", False),
        ("residual", False),
        ("drelu", False),
        ("residual.dsilu", False),
    ],
)
def test_epilogues_that_read_no_tensor_and_compute_little_are_light(text: str, light: bool) -> None:
    assert is_light(Epilogue.of(text)) is light
