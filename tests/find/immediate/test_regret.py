"""How far predictions are off on a frozen extract of an H200's measured times: no change may make them worse unseen."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest
from helpers.runs.immediate_models import H200

from miofind.core.problem import ProblemDescription
from miofind.errors import InvalidConfigError
from miofind.find.immediate.devices import described
from miofind.find.immediate.model import read_model
from miofind.find.immediate.ranker import Estimated, Ranker
from miofind.finddb import shipped_paths
from miofind.solver.registry import Registry
from miofind.solver.steps import Config

KNOWN = Path(__file__).with_name("known_times_h200.jsonl")
"""Problems of each class, by line: network_config, candidates with their times, and cuDNN's best time."""

DEVICE = described(H200.identity)


def regret(ranker: Ranker) -> float:
    """Geometric mean of the picks' times over the best known, less 1."""
    logs = []
    for line in KNOWN.read_text().splitlines():
        text, known, cudnn_ms = json.loads(line)
        problem = ProblemDescription.from_network_config(text)
        times, candidates = [], []
        for solver_id, config_text, time_ms in known:
            solver, config = Registry.default()[solver_id], Config.from_json(config_text)
            try:
                solver.check_config(problem, DEVICE, config)
            except InvalidConfigError:  # it has been withdrawn since
                continue
            candidates.append(Estimated(solver, config, solver.estimate_ms(problem, DEVICE, config)))
            times.append(time_ms)
        predicted = [each.time_ms for each in ranker.predictions(problem, DEVICE, candidates)]
        logs.append(math.log(times[predicted.index(min(predicted))] / min([*times, cudnn_ms or math.inf])))
    return math.expm1(statistics.fmean(logs))


def shipped() -> Ranker:
    (path,) = (path.with_suffix(".model") for path in shipped_paths({}))
    return Ranker(read_model(path))


@pytest.mark.parametrize(
    ("ranker", "recorded"), [(Ranker(None), 0.1055), (shipped(), 0.0106)], ids=["estimates", "shipped-model"]
)
def test_predictions_are_no_worse_than_recorded(ranker: Ranker, recorded: float) -> None:
    """Of problems that the shipped model was trained with: held-out ones are in benchmarks/results."""
    assert regret(ranker) <= recorded + 0.003


def test_the_shipped_model_is_of_todays_solvers() -> None:
    ranker = shipped()
    assert ranker.model is not None
    assert ranker.model.trees is not None
    assert set(ranker.model.solvers) <= set(Registry.default())
