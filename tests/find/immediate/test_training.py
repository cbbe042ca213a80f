"""Models are learnt from what FindDBs hold, judged on what they have not seen, and written where they are worth it."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.commands.cli_runner import run
from helpers.runs.immediate_models import H200

from miofind.core.epilogue import Epilogue
from miofind.core.problem import ProblemDescription
from miofind.device.device import Device, Library, device_text
from miofind.errors import ModelError
from miofind.find.immediate.devices import described
from miofind.find.immediate.features import Columns, Guess
from miofind.find.immediate.model import Model, model_bytes, read_model
from miofind.find.immediate.ranker import Estimated, Ranker
from miofind.find.immediate.table import LEAST_PROBLEMS
from miofind.find.immediate.training.fit import Judged, Training
from miofind.find.immediate.training.groups import Holdout, geometry, network
from miofind.find.immediate.training.samples import Lesson, Sample, lessons
from miofind.find.lookup.validity import solver_hash
from miofind.finddb import Row, Scope, Store
from miofind.solver.registry import Registry, composed_id

SOLVERS = ("ConvDirectTiled", "ConvImplicitGemmMma")
DEVICE = described(H200.identity)
BESIDE = described("NVIDIA H100 PCIe|114|9.0|")


def problems() -> Iterator[ProblemDescription]:
    """Problems of two networks' shapes, and of others."""
    for c, k, size in [(64, 64, 56), (128, 128, 28), (256, 256, 14), (96, 24, 112), (48, 80, 40), (320, 64, 20)]:
        for n in (4, 16):
            for dtype in ("float16", "bfloat16"):
                shape: dict[str, Any] = {"x": (n, c, size, size), "w": (k, c, 3, 3), "padding": 1}
                yield ProblemDescription.convolution(dtype=dtype, layout="NHWC", **shape)


def law(problem: ProblemDescription, solver_id: str, estimate_ms: float, place: int) -> float:
    """Times that the tests' FindDB holds: what estimates say, but one solver takes four times as long with many
    channels, and the other with few."""
    slow = (problem.c >= 128) == (solver_id == SOLVERS[0])
    return estimate_ms * (4.0 if slow else 1.0) * (1 + 0.01 * place)


def recorded(store: Store, device: Device = DEVICE, most: int | None = None) -> None:
    """What is measured of those solvers, and of some problems a slow candidate of each other one that serves.

    Args:
        most: problems.
    """
    for problem in itertools.islice(problems(), most):
        rows = []
        for solver in Registry.default().values() if problem.n == 4 and "bfloat16" not in str(problem) else ():
            if solver.id not in SOLVERS and solver.applicability(problem, device):
                is_own = solver.library is not Library.CUDNN
                config = solver.default_configs(problem, device)[0].json if is_own else "{}"
                rows.append(row(solver.id, config, 1e3))
        for solver_id in SOLVERS:
            solver = Registry.default()[solver_id]
            configs = solver.default_configs(problem, device)
            base_ms = min(solver.estimate_ms(problem, device, config) for config in configs)
            for place, config in enumerate(configs[:4]):
                time_ms = law(problem, solver_id, base_ms, place)
                rows.append(row(solver_id, config.json, time_ms))
        store.record(device.identity, problem.network_config, rows, environment={"driver": "1"})


def row(solver_id: str, config: str, time_ms: float, **fields: Any) -> Row:
    solver = Registry.default()[solver_id]
    values: dict[str, Any] = {
        "solver_id": solver_id,
        "solver_version": solver.version,
        "config": config,
        "status": "ok",
        "algorithm": solver.algorithm.value,
        "library": solver.library.value,
        "source_hash": solver_hash(solver),
        "time_ms": time_ms,
    }
    return Row(**values | fields)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "source.db"
    with Store(path) as store:
        recorded(store)
    return path


@pytest.fixture(scope="module")
def learnt(source: Path) -> Sequence[Lesson]:
    with Store(source, read_only=True) as store:
        return lessons([store], DEVICE, Registry.default())


def regret(model: Any, learnt: Sequence[Lesson]) -> float:
    found = []
    for lesson in learnt:
        candidates = [Estimated(Registry.default()[s.solver_id], s.config, s.estimate_ms) for s in lesson.predicted]
        times = [each.time_ms for each in Ranker(model).predictions(lesson.problem, DEVICE, candidates)]
        found.append(math.log(lesson.predicted[times.index(min(times))].time_ms / lesson.best_ms))
    return math.expm1(float(np.mean(found)))


def test_lessons_are_what_counts_of_all_sources(source: Path, learnt: Sequence[Lesson], tmp_path: Path) -> None:
    """Rows of other code, contended ones and those of another device do not; of one candidate the last does."""
    assert len(learnt) == len(list(problems()))
    problem = learnt[0].problem
    config = learnt[0].samples[0].config.json
    with Store(tmp_path / "later.db") as later:
        solver_id = learnt[0].samples[0].solver_id
        others = [
            row(SOLVERS[1], '{"void":1}', 1e-9, source_hash="ab" * 32),
            row(SOLVERS[1], learnt[0].samples[-1].config.json, 1e-9, contended=True),
        ]
        later.record(DEVICE.identity, problem.network_config, [row(solver_id, config, 123.0), *others])
        later.record("NVIDIA H100|132|9.0|", problem.network_config, [row(solver_id, config, 1e-9)])
        with Store(source, read_only=True) as first:
            found = lessons([later, first], DEVICE, Registry.default())
    assert [lesson.problem for lesson in found] == [lesson.problem for lesson in learnt]
    assert found[0].samples[0].time_ms == 123.0
    assert found[0].samples[1:] == learnt[0].samples[1:]


FUSED = replace(next(problems()), epilogue=Epilogue.of("bias.relu"))


def fused_lesson(path: Path, scope: Scope, *more: Row) -> Lesson:
    """A fused problem of which a solver's own form and a composed one were measured."""
    config = Registry.default()[SOLVERS[1]].default_configs(FUSED, DEVICE)[0].json
    rows = [row(name, config, time_ms) for name, time_ms in ((SOLVERS[1], 1.0), (composed_id(SOLVERS[1]), 2.0))]
    with Store(path) as store:
        store.record(DEVICE.identity, FUSED.network_config, [*rows, *more], scope=scope)
        return lessons([store], DEVICE, Registry.default())[0]


def test_fused_problems_teach_with_all_forms(tmp_path: Path) -> None:
    """Each by its own estimate, that of a composed form with its pass."""
    own, form = fused_lesson(tmp_path / "fused.db", Scope(solvers={})).samples
    assert (own.solver_id, form.solver_id) == (SOLVERS[1], composed_id(SOLVERS[1]))
    assert (own.time_ms, form.time_ms) == (1.0, 2.0)
    assert form.estimate_ms > Registry.default()[SOLVERS[1]].estimate_ms(FUSED.bare, DEVICE, form.config)


@pytest.mark.parametrize("time_ms", [1e-300, 1e300])
def test_times_of_no_kernel_do_not_teach(time_ms: float, tmp_path: Path) -> None:
    """One of a damaged FindDB ended the training: forests and reports have no such numbers."""
    config = Registry.default()["ConvDirectTiled"].default_configs(FUSED, DEVICE)[0].json
    lesson = fused_lesson(tmp_path / "damaged.db", Scope(solvers={}), row("ConvDirectTiled", config, time_ms))
    assert [sample.time_ms for sample in lesson.samples] == [1.0, 2.0]


def test_a_fused_problem_is_complete_where_a_find_of_all_passed_over_what_is_missing(tmp_path: Path) -> None:
    all_solvers = Scope(solvers={solver.id: solver.version for solver in Registry.default().values()})
    assert fused_lesson(tmp_path / "all.db", all_solvers).is_complete
    for name, fields in {
        "none": {"solvers": {}},
        "likely": {"effort": "likely"},
        "ended": {"complete": False},
        "filtered": {"filters": {"strict_nonfinite": True}},
    }.items():
        scope: Scope = replace(all_solvers, **fields)
        assert not fused_lesson(tmp_path / f"{name}.db", scope).is_complete, name
    config = Registry.default()["ConvDirectTiled"].default_configs(FUSED, DEVICE)[0].json
    older = row("ConvDirectTiled", config, 1.5, source_hash="ab" * 32)
    assert not fused_lesson(tmp_path / "older.db", all_solvers, older).is_complete


def test_a_known_law_is_learnt(learnt: Sequence[Lesson], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightgbm")
    from miofind.find.immediate.training import boosting

    monkeypatch.setitem(boosting._PARAMETERS, "min_data_in_leaf", 2)
    judged = Training(DEVICE, Registry.default(), has_trees=False).held_out(learnt, Holdout.GEOMETRY)
    training = Training(DEVICE, Registry.default())
    known = [lesson for lesson in learnt if lesson.problem.c != 256]
    model = training.model(known, judged, Holdout.GEOMETRY)
    assert regret(None, learnt) > 0.1
    assert regret(model, learnt) < 0.01
    assert model_bytes(model) == model_bytes(training.model(known[::-1], judged, Holdout.GEOMETRY))


def test_volumes_that_are_images_are_not_judged(learnt: Sequence[Lesson]) -> None:
    """Finds ask for them as images."""
    volume = ProblemDescription.convolution(x=(2, 64, 4, 9, 9), w=(64, 64, 1, 1, 1), dtype="float16")
    lessons = [*learnt, replace(next(each for each in learnt if each.is_complete), problem=volume)]
    judged = Training(DEVICE, Registry.default(), has_trees=False).held_out(lessons, Holdout.GEOMETRY)
    assert judged.lessons
    assert volume not in {lesson.problem for lesson in judged.lessons}


def test_a_kind_is_known_by_several_problems(learnt: Sequence[Lesson]) -> None:
    pytest.importorskip("lightgbm")
    half, others = ([each for each in learnt if each.kind.numbers == name] for name in ("float16", "bfloat16"))
    for count in (LEAST_PROBLEMS - 1, LEAST_PROBLEMS):
        trees = Training(DEVICE, Registry.default()).fit([*half, *others[:count]], Holdout.GEOMETRY).trees
        assert trees is not None
        known = {kind[0] for kind in trees.kinds}
        assert known == ({"float16", "bfloat16"} if count == LEAST_PROBLEMS else {"float16"})


def of_class(times: Sequence[float]) -> Lesson:
    """A problem with candidates that take so long, all estimated at 1 ms."""
    config = Registry.default()[SOLVERS[0]].default_configs(next(problems()), DEVICE)[0]
    samples = tuple(
        Sample(solver_id=SOLVERS[0], config=config, time_ms=time_ms, is_bound=False, estimate_ms=1.0)
        for time_ms in times
    )
    return Lesson(next(problems()), samples, True, DEVICE)


@pytest.mark.parametrize(
    ("estimates", "table", "model", "told"),
    [
        ([1, 2], [2, 1], None, "predictions by table are"),
        ([1, 2], [1, 2], [2, 1], "predictions by trees are"),
        ([1, 2], [2, 1], [2, 1], "by estimates 0.00%"),
        ([2, 1], [1, 2], [1, 2], ""),
        ([1, 2], [1, 2], None, ""),
    ],
    ids=["table-worse-than-estimates", "trees-worse-than-table", "trees-worse-than-estimates", "better", "alike"],
)
def test_a_model_that_is_worse_than_what_is_simpler_is_refused(
    estimates: list[float], table: list[float], model: list[float] | None, told: str
) -> None:
    lesson = of_class([1.0, 1.5])
    name = lesson.problem.network_config
    judged = Judged((lesson,), {name: estimates}, {name: table}, None if model is None else {name: model})
    assert told in judged.refuse()
    assert bool(judged.refuse()) is bool(told)


def test_winners_are_kept_where_they_cost_little() -> None:
    lesson = of_class([1.0, 1.5])
    name = lesson.problem.network_config
    judged = Judged((lesson,), {name: [1, 2]}, {name: [1, 2]}, {name: [1, 2]}, {name: [1, math.inf]})
    assert judged.has_winners
    assert judged.report["trees, of winners near"]["top 1"]["mean"] == 0.0  # type: ignore[index]
    assert not replace(judged, asked={name: [math.inf, 2]}).has_winners
    assert not replace(judged, asked=None).has_winners


def test_a_model_that_fails_one_class_is_refused() -> None:
    """Better on the whole, and worse than half more than the estimates on the few depthwise problems."""
    base = of_class([1.0, 1.5])
    dense, depthwise = [], []
    for n in range(1, 101):
        shape: dict[str, Any] = {"x": (n + 2, 64, 8, 8), "w": (64, 64, 3, 3), "padding": 1}
        dense.append(replace(base, problem=ProblemDescription.convolution(**shape)))
    for n in range(1, 31):
        shape = {"x": (n + 2, 64, 8, 8), "w": (64, 1, 3, 3), "padding": 1, "groups": 64}
        depthwise.append(replace(base, problem=ProblemDescription.convolution(**shape)))
    judged_lessons = (*dense, *depthwise)
    good, bad = [1.0, 2.0], [2.0, 1.0]
    estimates = {each.problem.network_config: bad for each in dense}
    estimates |= {each.problem.network_config: good for each in depthwise}
    table = {each.problem.network_config: good for each in dense}
    table |= {each.problem.network_config: bad for each in depthwise}
    judged = Judged(judged_lessons, estimates, table, None)
    assert "class depthwise" in judged.refuse()


def test_one_network_cannot_be_held_out_of_itself() -> None:
    with pytest.raises(ModelError, match="two are needed"):
        Training(DEVICE, Registry.default(), has_trees=False).held_out([of_class([1.0, 2.0])], Holdout.NETWORK)


def test_shapes_are_of_networks_whatever_their_batch_and_type() -> None:
    resnet = ProblemDescription.convolution(x=(7, 64, 56, 56), w=(64, 64, 3, 3), padding=1, dtype="bfloat16")
    assert network(resnet) == "resnet50"
    assert network(ProblemDescription.convolution(x=(7, 65, 56, 56), w=(64, 65, 3, 3))) == "other"
    assert geometry(resnet) == geometry(replace(resnet, direction="backward_data"))
    volume = ProblemDescription.convolution(x=(7, 64, 1, 56, 56), w=(64, 64, 1, 3, 3), padding=(0, 1, 1))
    assert network(volume) == "resnet50"


def test_the_command_writes_a_model_and_what_it_showed(source: Path, tmp_path: Path) -> None:
    out, report = tmp_path / "h200.model", tmp_path / "report.json"
    arguments = ("train", str(source), str(out), "--holdout", "geometry", "--table-only")
    told = run(*arguments, "--report", str(report))
    assert "estimates" in told.stdout
    first = out.read_bytes()
    assert read_model(out).device == DEVICE.identity
    regrets = json.loads(report.read_text())["regrets"]
    assert regrets["table"]["top 1"]["mean"] <= regrets["estimates"]["top 1"]["mean"]
    assert set(regrets["table"]) >= {"top 8", "class", "numbers", "direction", "layout", "network"}
    run(*arguments)
    assert out.read_bytes() == first


def test_the_command_replaces_no_other_file(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.db"
    out.write_bytes(source.read_bytes())
    assert "no model" in run("train", str(source), str(out), "--table-only", code=2).stderr
    assert out.read_bytes() == source.read_bytes()


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Knows all problems of one GPU, and two shapes of the GPU that a model is for."""
    path = tmp_path_factory.mktemp("two") / "two.db"
    with Store(path) as store:
        recorded(store, BESIDE)
        recorded(store, DEVICE, most=8)
    return path


@pytest.fixture(scope="module")
def beside(of_two: Path) -> Sequence[Lesson]:
    with Store(of_two, read_only=True) as store:
        return [each for one in (DEVICE, BESIDE) for each in lessons([store], one, Registry.default())]


def test_lessons_have_estimates_for_the_gpu_that_measured(beside: Sequence[Lesson]) -> None:
    assert [each.device for each in beside] == [DEVICE] * 8 + [BESIDE] * len(list(problems()))
    for lesson in beside:
        for sample in lesson.predicted:
            solver = Registry.default()[sample.solver_id]
            assert sample.estimate_ms == solver.estimate_ms(lesson.problem, lesson.device, sample.config)


def test_features_are_for_the_gpu_that_measured(beside: Sequence[Lesson], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightgbm")
    seen: list[tuple[str, Device]] = []
    matrix = Columns.matrix

    def spy(columns: Columns, problem: ProblemDescription, device: Device, guesses: Sequence[Guess]) -> Any:
        seen.append((problem.network_config, device))
        return matrix(columns, problem, device, guesses)

    monkeypatch.setattr(Columns, "matrix", spy)
    Training(DEVICE, Registry.default()).fit(beside, Holdout.GEOMETRY)
    of_devices = ((each.problem.network_config, each.device) for each in beside if each.predicted)
    assert seen == sorted(of_devices, key=lambda each: (each[0], each[1].identity))


def test_what_another_gpu_measured_teaches(learnt: Sequence[Lesson], beside: Sequence[Lesson]) -> None:
    """The few problems of the GPU itself have few channels: what is slow with many, others know alone."""
    training = Training(DEVICE, Registry.default(), has_trees=False)
    alone = training.fit([each for each in beside if each.device == DEVICE], Holdout.GEOMETRY)
    model = training.fit(beside, Holdout.GEOMETRY)
    assert model.device == DEVICE.identity
    assert regret(model, learnt) < regret(alone, learnt)
    judged = training.held_out(beside, Holdout.GEOMETRY)
    made = training.model(beside, judged, Holdout.GEOMETRY)
    assert model_bytes(made) == model_bytes(training.model(beside[::-1], judged, Holdout.GEOMETRY))


def test_another_gpus_problems_are_held_out_and_not_judged(
    beside: Sequence[Lesson], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that has seen a problem on another GPU has seen it."""
    seen: list[set[str]] = []
    fit = Training._fit

    def spy(training: Training, taught: Sequence[Lesson], reach: float) -> Model:
        seen.append({geometry(each.problem) for each in taught})
        return fit(training, taught, reach)

    monkeypatch.setattr(Training, "_fit", spy)
    judged = Training(DEVICE, Registry.default(), has_trees=False).held_out(beside, Holdout.GEOMETRY)
    assert {each.device for each in judged.lessons} == {DEVICE}
    every = {geometry(each.problem) for each in beside}
    held = sorted({geometry(each.problem) for each in beside if each.device == DEVICE})
    assert seen == [every - {shape} for shape in held]


def test_the_command_learns_beside_another_gpu(of_two: Path, tmp_path: Path) -> None:
    out, report = tmp_path / "h200.model", tmp_path / "report.json"
    arguments = ("train", str(of_two), str(out), "--device", "H200", "--holdout", "geometry", "--table-only")
    run(*arguments, "--beside", "H100", "--report", str(report))
    told = json.loads(report.read_text())
    assert (told["gpu"], told["beside"]) == (device_text(DEVICE.identity), [device_text(BESIDE.identity)])
    assert read_model(out).device == DEVICE.identity


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ("H200", "is what the model is of"),
        ("A100", "is of another architecture than"),
        ("B300", "--beside 'B300' is in no device's name"),
        ("NVIDIA", "--beside 'NVIDIA' is in several devices' names"),
    ],
)
def test_no_other_gpu_is_learnt_beside(of_two: Path, tmp_path: Path, other: str, told: str) -> None:
    source = tmp_path / "three.db"
    source.write_bytes(of_two.read_bytes())
    with Store(source) as store:
        rows = [row(SOLVERS[0], "{}", 1.0)]
        store.record("NVIDIA A100-SXM4-80GB|108|8.0|", next(problems()).network_config, rows)
    arguments = ("train", str(source), str(tmp_path / "out.model"), "--device", "H200", "--table-only")
    assert told in run(*arguments, "--beside", other, code=2).stderr
