"""How good and how quick answers without measuring are: on stored rows, or against full finds on a GPU.

    python benchmarks/immediate.py RELEASE.db [EARLIER.db ...] --json benchmarks/results/immediate_h200.json
    python benchmarks/immediate.py --problems 640 --suite wild.csv [--families]
    python benchmarks/immediate.py RELEASE.db [EARLIER.db ...] --judge WILD.db --json FILE
    python benchmarks/immediate.py --gpu --problems 150 --json FILE

On stored rows each network's problems are predicted by a model of all others' (`miofind train --holdout network`):
regret is how far a pick is off the best that is known, cuDNN's included: of all problems, those of no network
predicted by networks' alone, and of networks' problems. Beside it: what fewer shapes to learn from
cost (the learning curve), what predictions add where one solver's rows are void, and the CPU time of an answer for
problems that no FindDB knows.

With --suite random problems are written as a suite, whose default configurations
`MIOFIND_SYSTEM_DB= miofind tune --csv wild.csv --db WILD.db` measures. They are of the suite wild, in random types,
layouts and directions, with --epilogues with a random epilogue each; with --families they are layers as families of
networks have them (families.py). With --judge they are judged: shapes in five parts, each predicted by a model of the
sources and the other four.

With --gpu such problems are answered by the model that ships and by plain estimates, with no FindDB; then a find
measures all default configurations and the first eight of both, and the regrets are those of measured times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import script
from commit import commit
from families import family_problems
from wild import with_epilogue

import miofind
from miofind import FindOptions, ProblemDescription
from miofind.core.problem import DataType, Direction, Layout, MathMode
from miofind.device.device import Device, device_text
from miofind.device.environment import versions
from miofind.errors import MiofindError
from miofind.find.immediate.devices import described
from miofind.find.immediate.kinds import Kind
from miofind.find.immediate.ranker import Estimated, Ranker
from miofind.find.immediate.shipped import model_paths
from miofind.find.immediate.training.evaluation import TOPS, Regret, picked
from miofind.find.immediate.training.fit import Judged, Training
from miofind.find.immediate.training.groups import OTHER, Holdout, geometry, network
from miofind.find.immediate.training.samples import Lesson, lessons
from miofind.find.likely import likely_places
from miofind.find.measuring import measure
from miofind.finddb import Store
from miofind.solver.registry import Registry
from miofind.suites import load_suite
from miofind.suites.suite import Suite, save_csv
from miofind.suites.table import SuiteRow

FAST = FindOptions(find_mode="fast")
_SHARES = (0.1, 0.2, 0.4, 0.8)
_PARTS = 5
_TYPES = (
    (DataType.FLOAT16, MathMode.IEEE),
    (DataType.BFLOAT16, MathMode.IEEE),
    (DataType.FLOAT32, MathMode.IEEE),
    (DataType.FLOAT32, MathMode.TF32),
)


@contextlib.contextmanager
def no_finddb(*, with_models: bool) -> Iterator[None]:
    """Nothing is known from FindDBs, and the models that ship are in force or not."""
    models = model_paths()
    before = os.environ.get("MIOFIND_SYSTEM_DB")
    with tempfile.TemporaryDirectory() as folder:
        for model in models if with_models else ():
            shutil.copy(model, folder)
            Store(Path(folder, model.name).with_suffix(".db")).open().close()
        os.environ["MIOFIND_SYSTEM_DB"] = folder if with_models else ""
        try:
            yield
        finally:
            os.environ.pop("MIOFIND_SYSTEM_DB")
            if before is not None:
                os.environ["MIOFIND_SYSTEM_DB"] = before


def cpu_ms(problems: Sequence[ProblemDescription], device: str) -> dict[str, float]:
    """CPU time of answers for problems that no FindDB knows, in milliseconds; the first ones are not counted."""
    taken = []
    with no_finddb(with_models=True), miofind.Handle(described(device), database=":memory:") as handle:
        for problem in problems:
            began = time.process_time()
            miofind.find_solutions(problem, options=FAST, handle=handle)
            taken.append(1e3 * (time.process_time() - began))
    ordered = sorted(taken[len(taken) // 10 :])
    return {
        "problems": len(ordered),
        "mean": round(statistics.fmean(ordered), 3),
        "median": round(statistics.median(ordered), 3),
        "p99": round(ordered[int(0.99 * len(ordered))], 3),
    }


def learning_curve(training: Training, learnt: Sequence[Lesson], seed: int) -> dict[str, float]:
    """Mean regret on a fifth of the shapes, of three draws, by the share of shapes that a model was trained with."""
    shapes = sorted({geometry(lesson.problem) for lesson in learnt})
    found: dict[str, list[float]] = {str(share): [] for share in _SHARES}
    for draw in range(3):
        random.Random(seed + draw).shuffle(shapes)
        held = set(shapes[int(0.8 * len(shapes)) :])
        judged = [each for each in learnt if geometry(each.problem) in held and each.is_complete and each.predicted]
        for share in _SHARES:
            taken = set(shapes[: int(share * len(shapes))])
            known = [each for each in learnt if geometry(each.problem) in taken]
            ranker = Ranker(training.fit(known, Holdout.GEOMETRY))
            picks = [picked(each, times_of(ranker, training, each)) for each in judged]
            found[str(share)].append(Regret.of(picks).mean)
    return {share: round(statistics.fmean(regrets), 5) for share, regrets in found.items()}


def without_a_solver(judged: Judged) -> dict[str, dict[str, float]]:
    """Regrets where the rows of one solver are void: of stored rows alone, and of these and predictions of it by time.

    Each solver of each problem in turn; the best is that of all rows.
    """
    ratios: dict[str, list[float]] = {"stored alone": []}
    for chooser, times in judged.choosers.items():
        factor = 2.0 ** judged.calibration(chooser).bias
        ratios[chooser] = []
        for lesson in judged.lessons:
            predicted = times[lesson.problem.network_config]
            for solver_id in sorted({sample.solver_id for sample in lesson.predicted}):
                known = [sample.time_ms for sample in lesson.samples if sample.solver_id != solver_id]
                if not known:
                    continue
                guesses = zip(predicted, lesson.predicted, strict=True)
                first_ms, lost = min(
                    ((time_ms, sample.time_ms) for time_ms, sample in guesses if sample.solver_id == solver_id)
                )
                ratios[chooser].append((lost if first_ms * factor < min(known) else min(known)) / lesson.best_ms)
                if chooser == "estimates":
                    ratios["stored alone"].append(min(known) / lesson.best_ms)
    return {name: asdict(Regret.of(found)) for name, found in ratios.items()}


def times_of(ranker: Ranker, training: Training, lesson: Lesson) -> list[float]:
    """What a ranker predicts of a lesson's candidates."""
    candidates = [
        Estimated(training.registry[sample.solver_id], sample.config, sample.estimate_ms) for sample in lesson.predicted
    ]
    return [each.time_ms for each in ranker.predictions(lesson.problem, training.device, candidates)]


def judged_in_parts(training: Training, learnt: Sequence[Lesson], measured: Sequence[Lesson], seed: int) -> Judged:
    """What is predicted of lessons of which all candidates were measured; shapes are held out of training.

    Args:
        learnt: what FindDBs teach of these and other problems.
        measured: which of them are judged.
    """
    shapes = sorted({geometry(each.problem) for each in measured})
    random.Random(seed).shuffle(shapes)
    estimates: dict[str, list[float]] = {}
    table: dict[str, list[float]] = {}
    trees: dict[str, list[float]] = {}
    for part in range(_PARTS):
        held = set(shapes[part::_PARTS])
        model = training.fit([each for each in learnt if geometry(each.problem) not in held], Holdout.GEOMETRY)
        of_part = [each for each in measured if geometry(each.problem) in held]
        rankers = ((Ranker(None), estimates), (Ranker(replace(model, trees=None)), table), (Ranker(model), trees))
        for ranker, times in rankers:
            times.update((each.problem.network_config, times_of(ranker, training, each)) for each in of_part)
    return Judged(tuple(measured), estimates, table, trees)


class Sources(NamedTuple):
    """What FindDBs of one kind of device teach.

    Attributes:
        names: of their files.
        versions: that most rows of the first were measured with.
        first: the problems of the first.
    """

    names: list[str]
    device: Device
    learnt: list[Lesson]
    versions: dict[str, str]
    first: frozenset[str]


def read(paths: Sequence[Path]) -> Sources:
    """What FindDBs teach; the program ends where they know several kinds of devices."""
    with contextlib.ExitStack() as stack:
        stores = [stack.enter_context(Store(path, read_only=True)) for path in paths]
        devices = sorted({key.device for store in stores for key in store.problems()})
        if len(devices) != 1:
            raise SystemExit(f"the sources know {len(devices)} kinds of devices: name those of one")
        device = described(devices[0])
        return Sources(
            names=[path.name for path in paths],
            device=device,
            learnt=lessons(stores, device, Registry.default()),
            versions=environment(stores[0]),
            first=frozenset(key.network_config for key in stores[0].problems()),
        )


def told(sources: Sources, judged: Judged, holdout: Holdout) -> dict[str, Any]:
    """The regrets of held-out problems, and of what they are."""
    return {
        "gpu": sources.device.name,
        "of": device_text(sources.device.identity),
        "versions": sources.versions,
        "sources": sources.names,
        "holdout": holdout.value,
        "problems": len(judged.lessons),
        "candidates": sum(len(each.samples) for each in judged.lessons),
        "regrets": judged.report,
    }


def environment(store: Store) -> dict[str, str]:
    """The versions that most rows of a FindDB were measured with."""
    counts: Counter[str] = Counter()
    named: dict[str, dict[str, str]] = {}
    for history in store.histories():
        counts.update(row.environment for row in history.rows)
        named |= {name: dict(found) for name, found in history.environments.items()}
    return named.get(counts.most_common(1)[0][0], {}) if counts else {}


def stored(paths: Sequence[Path], arguments: argparse.Namespace) -> dict[str, Any]:
    """Regrets of held-out networks on stored rows, the learning curve, and the CPU time of answers."""
    sources = read(paths)
    training = Training(sources.device, Registry.default())
    judged = training.held_out(sources.learnt, Holdout.NETWORK)
    known = [each.problem for each in sources.learnt]
    problems = random.Random(arguments.seed).sample(known, min(len(known), 330))
    of_networks = tuple(each for each in judged.lessons if network(each.problem) != OTHER)
    return told(sources, judged, Holdout.NETWORK) | {
        "networks": {"problems": len(of_networks), "regrets": replace(judged, lessons=of_networks).report},
        "without_a_solver": without_a_solver(judged),
        "learning_curve": learning_curve(training, sources.learnt, arguments.seed),
        "cpu_ms": cpu_ms(problems, sources.device.identity),
    }


def against_measured(paths: Sequence[Path], arguments: argparse.Namespace) -> dict[str, Any]:
    """Regrets on problems of which the FindDB that --judge names has all candidates."""
    sources = read((arguments.judge, *paths))
    measured = [
        each
        for each in sources.learnt
        if each.problem.network_config in sources.first and each.is_asked_for and each.is_complete and each.predicted
    ]
    training = Training(sources.device, Registry.default())
    judged = judged_in_parts(training, sources.learnt, measured, arguments.seed)
    return told(sources, judged, Holdout.GEOMETRY)


def write_suite(path: Path, problems: Sequence[ProblemDescription], name: str) -> None:
    """Write problems as a suite of a name that `miofind tune` takes."""
    rows = (
        SuiteRow(problem=problem, suite=name, layer=f"problem {i}", count=1, directions=(problem.direction,))
        for i, problem in enumerate(problems)
    )
    save_csv(Suite(name=name, rows=tuple(rows)), path)


def random_problems(arguments: argparse.Namespace) -> list[ProblemDescription]:
    """The random problems that were asked for."""
    if arguments.families:
        return family_problems(arguments.problems, arguments.seed)
    found = wild_problems(arguments.problems, arguments.seed)
    return [with_epilogue(each, arguments.seed) for each in found] if arguments.epilogues else found


def wild_problems(count: int, seed: int) -> list[ProblemDescription]:
    """Random problems of the suite wild."""
    draw = random.Random(seed)
    rows = load_suite("wild").problems()
    found: dict[ProblemDescription, None] = {}
    while len(found) < count:
        base = draw.choice(rows).problem
        dtype, math_mode = draw.choice(_TYPES)
        conv = base.conv
        problem = ProblemDescription.convolution(
            x=base.x.shape,
            w=base.w.shape,
            padding=tuple(zip(conv.pad_before, conv.pad_after, strict=True)),
            stride=conv.stride,
            dilation=conv.dilation,
            groups=conv.groups,
            direction=draw.choice(list(Direction)),
            dtype=dtype,
            math=math_mode,
            layout=Layout.of(base.spatial_dims, channels_last=draw.random() < 0.5),
        )
        found[problem] = None
    return list(found)


def against_finds(arguments: argparse.Namespace) -> dict[str, Any]:
    """Predicted answers against finds that measure everything, on the GPU here."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for problem in random_problems(arguments):
            try:
                rows.append(one_against_a_find(problem, Path(folder, f"{len(rows)}.db"), arguments.budget))
            except MiofindError as error:
                rows.append({"problem": problem.network_config, "error": str(error)})
            print(f"{len(rows)}/{arguments.problems} {rows[-1].get('model', rows[-1].get('error'))}", flush=True)
    device = miofind.Handle("cuda").device
    return {"gpu": device.name, "versions": versions(device), "summary": summary(rows), "rows": rows}


def one_against_a_find(problem: ProblemDescription, database: Path, budget_s: float) -> dict[str, Any]:
    """The first candidates of the model and of estimates, and what a find measured of them."""
    orders: dict[str, list[miofind.Solution]] = {}
    taken = {}
    for name in ("model", "estimates"):
        with no_finddb(with_models=name == "model"), miofind.Handle("cuda", database=":memory:") as handle:
            began = time.process_time()
            orders[name] = miofind.find_solutions(problem, options=FAST, handle=handle)
            taken[name] = round(1e3 * (time.process_time() - began), 3)
    with no_finddb(with_models=False), miofind.Handle("cuda", database=database) as handle:
        options = FindOptions(find_mode="normal", time_budget_s=budget_s)
        firsts = [solution for order in orders.values() for solution in (*order[: max(TOPS)], *_likely(order))]
        measure(problem, options, handle, also=firsts, afresh=True)
        (history,) = handle.database.histories(handle.device.identity, problem.network_config)
    times = {row.candidate: row.time_ms for row in history.rows if row.usable and row.time_ms is not None}
    best_ms = min(times.values())
    first = orders["model"][0]
    return {
        "problem": problem.network_config,
        **asdict(Kind.of(problem)),
        "best": min(times, key=lambda name: times[name]),
        "best_ms": best_ms,
        "first": first.id,
        "first_ms": first.time_ms,
        "confidence": first.confidence,
        "cpu_ms": taken["model"],
        **{name: ratios(order, times, best_ms) for name, order in orders.items()},
    }


def ratios(order: Sequence[miofind.Solution], times: dict[str, float], best_ms: float) -> dict[str, float]:
    """The best time of the first candidates over the best of all; what failed counts as slow as the slowest."""
    slowest = max(times.values())
    tried = {f"top {top}": order[:top] for top in TOPS} | {"likely": _likely(order)}
    return {name: min(times.get(each.id, slowest) for each in some) / best_ms for name, some in tried.items()}


def _likely(order: Sequence[miofind.Solution]) -> list[miofind.Solution]:
    """What a find of the likeliest measures of predictions."""
    return [order[place] for place in likely_places([(each.solver_id, each.time_ms) for each in order])]


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Regrets over all problems, and by class, type, direction and layout."""
    told = [row for row in rows if "model" in row]
    groupings: dict[str, Callable[[dict[str, Any]], str]] = {"all": lambda row: "all"}
    groupings |= {name: (lambda row, name=name: row[name]) for name in ("shape", "numbers", "direction", "layout")}
    found: dict[str, Any] = {}
    for chooser in ("model", "estimates"):
        for name, grouping in groupings.items():
            for group in sorted({grouping(row) for row in told}):
                of_group = [row[chooser] for row in told if grouping(row) == group]
                regrets = {top: asdict(Regret.of([each[top] for each in of_group])) for top in of_group[0]}
                found.setdefault(chooser, {}).setdefault(name, {})[group] = regrets
    return found


def main() -> None:
    parser = script.parser(__doc__)
    parser.add_argument("sources", nargs="*", type=Path, help="FindDBs of one kind of device")
    parser.add_argument("--gpu", action="store_true", help="measure on the GPU here, instead of reading FindDBs")
    parser.add_argument("--problems", type=script.count, default=150, help="random problems with --gpu or --suite")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--epilogues", action="store_true", help="give each random problem an epilogue")
    kinds.add_argument("--families", action="store_true", help="draw layers of networks' families instead of wild's")
    parser.add_argument("--budget", type=script.seconds, default=60.0, help="seconds of measuring a problem with --gpu")
    parser.add_argument("--suite", type=script.output, help="write the random problems to this file, and end")
    parser.add_argument("--judge", type=Path, help="FindDB whose problems are judged, all candidates of which it has")
    parser.add_argument("--seed", type=script.at_least(0), default=1, help="of the random problems")
    parser.add_argument("--json", type=script.output, help="write the figures to this file")
    arguments = parser.parse_args()
    if arguments.suite:
        write_suite(arguments.suite, random_problems(arguments), "families" if arguments.families else "wild")
        return
    if arguments.gpu == bool(arguments.sources):
        parser.error("name FindDBs, or --gpu")
    report: dict[str, Any] = {"commit": commit(), "command": shlex.join(["python", *sys.argv])}
    if arguments.gpu:
        report |= against_finds(arguments)
    else:
        report |= (against_measured if arguments.judge else stored)(arguments.sources, arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    told = ("cpu_ms", "learning_curve", "without_a_solver")
    print(json.dumps(report.get("summary") or {name: report[name] for name in told if name in report}, indent=1))
    for chooser, found in report.get("regrets", {}).items():
        names = [*(f"top {top}" for top in TOPS), "likely"]
        print(f"{chooser:12}", *(f"{name} {found[name]['mean']:.2%}" for name in names))


if __name__ == "__main__":
    script.run(main)
