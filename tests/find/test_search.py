"""The search over made-up spaces: covers small ones, comes close in large ones, keeps budgets, is reproducible."""

from __future__ import annotations

import math
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.processes.waiting import LIMIT_S
from helpers.runs.landscapes import NETWORK_CONFIG, Landscape

from miofind.find.search import DEFAULT_PATIENCE, FINALISTS, ROUND, Search, Space
from miofind.solver.candidate import Candidate, Outcome, Status
from miofind.solver.steps import Config

SMALL = {"tile": (1, 2, 4, 8), "stages": (1, 2, 3)}
NEVER = 10**6


def outcomes(landscapes: Sequence[Landscape], batch: Sequence[Candidate]) -> list[Outcome]:
    by_solver = {landscape.solver_id: landscape for landscape in landscapes}
    return [by_solver[candidate.solver_id].outcome(candidate) for candidate in batch]


def rounds(search: Search, *landscapes: Landscape) -> list[tuple[Candidate, ...]]:
    """Every round of a search, measured."""
    proposed = []
    while batch := search.propose():
        proposed.append(batch)
        search.learn(outcomes(landscapes, batch))
    return proposed


def solvers_of(batches: Sequence[Sequence[Candidate]]) -> list[str]:
    return [candidate.solver_id for batch in batches for candidate in batch]


def regret(landscape: Landscape, space: Space, trials: int, seed: int) -> float:
    """How many times slower than the best of all a search's best is."""
    search = Search(NETWORK_CONFIG, [space], trials=trials, patience=NEVER, seed=seed)
    rounds(search, landscape)
    return search.best_ms / min(map(landscape.time_ms, landscape.configs()))


def test_a_small_space_is_covered_once_and_its_best_is_found() -> None:
    landscape = Landscape(seed=1, parameters=SMALL)
    search = Search(NETWORK_CONFIG, [landscape.space(whole=True)], patience=1)
    proposed = [candidate.config for batch in rounds(search, landscape) for candidate in batch]
    assert sorted(config.json for config in proposed) == sorted(config.json for config in landscape.configs())
    assert search.best_ms == min(map(landscape.time_ms, landscape.configs()))
    assert search.is_complete


def test_the_one_configuration_of_a_solver_without_parameters_is_tried() -> None:
    landscape = Landscape(seed=1, parameters={})
    search = Search(NETWORK_CONFIG, [landscape.space(whole=True)])
    assert [candidate.config for batch in rounds(search, landscape) for candidate in batch] == [Config()]
    assert search.is_complete


@pytest.mark.parametrize("estimate_noise", [0.6, math.inf], ids=["rough-estimate", "no-estimate"])
def test_within_five_percent_of_a_large_space_where_random_search_is_not(estimate_noise: float) -> None:
    """160 of 3564 configurations, the mean over landscapes and seeds."""
    trials, searched, drawn = 160, [], []
    for number in range(4):
        landscape = Landscape(seed=number, estimate_noise=estimate_noise)
        times = sorted(map(landscape.time_ms, landscape.configs()))
        space = landscape.space()
        for seed in range(2):
            searched.append(regret(landscape, space, trials, seed))
            drawn.append(min(random.Random(seed).sample(times, trials)) / times[0])
    assert statistics.mean(searched) < 1.05 < statistics.mean(drawn)


def test_seeds_come_first_and_the_best_estimates_next() -> None:
    landscape = Landscape(seed=2, estimate_noise=0.3)
    every = landscape.configs()
    seeds = (every[7], every[300])
    batch = Search(NETWORK_CONFIG, [landscape.space(seeds=seeds)]).propose()
    best = sorted((config for config in every if config not in seeds), key=landscape.estimate_ms)
    assert {candidate.config for candidate in batch} == {*seeds, *best[: ROUND - 2]}
    assert [landscape.estimate_ms(c.config) for c in batch] == sorted(landscape.estimate_ms(c.config) for c in batch)


def test_what_won_elsewhere_shortens_the_way() -> None:
    landscape = Landscape(seed=3)
    by_time = sorted(landscape.configs(), key=landscape.time_ms)
    near = tuple(by_time[20:24])
    with_seeds = [regret(landscape, landscape.space(seeds=near), 48, seed) for seed in range(4)]
    without = [regret(landscape, landscape.space(), 48, seed) for seed in range(4)]
    assert statistics.mean(with_seeds) < statistics.mean(without)


@pytest.mark.parametrize("trials", [1, 5, 16, 17, 50])
def test_no_more_trials_than_allowed_and_none_twice(trials: int) -> None:
    landscape = Landscape(seed=4, estimate_noise=0.3)
    search = Search(NETWORK_CONFIG, [landscape.space()], trials=trials, patience=NEVER)
    proposed = [candidate.id for batch in rounds(search, landscape) for candidate in batch]
    assert len(proposed) == len(set(proposed)) == search.trials == trials
    assert not search.is_complete


def test_only_valid_configurations_are_proposed() -> None:
    landscape = Landscape(seed=5)
    search = Search(NETWORK_CONFIG, [landscape.space(listed=20)], trials=200, patience=NEVER)
    bred = [candidate.config for batch in rounds(search, landscape) for candidate in batch]
    assert len(bred) == 200
    assert all(map(landscape.is_valid, bred))


def test_it_ends_after_rounds_without_a_gain() -> None:
    flat = Landscape(seed=6)
    space = flat.space()
    search = Search(NETWORK_CONFIG, [space], patience=3)
    count = 0
    while batch := search.propose():
        count += 1
        search.learn([with_time(flat.outcome(candidate), 1.0) for candidate in batch])
    assert count == 1 + 3  # the first round gains on having nothing
    assert search.is_complete


def with_time(outcome: Outcome, time_ms: float) -> Outcome:
    assert outcome.timing is not None
    return replace(outcome, timing=replace(outcome.timing, time_ms=time_ms))


def test_patience_does_not_keep_a_small_space_from_being_covered() -> None:
    parameters = {"a": tuple(range(8)), "b": tuple(range(8))}
    landscape = Landscape(seed=7, parameters=parameters)
    search = Search(NETWORK_CONFIG, [landscape.space(whole=True)], patience=1)
    while batch := search.propose():
        search.learn([with_time(landscape.outcome(candidate), 1.0) for candidate in batch])
    assert search.trials == 64


def test_a_search_whose_trials_were_the_whole_space_is_complete() -> None:
    landscape = Landscape(seed=1, parameters=SMALL)
    search = Search(NETWORK_CONFIG, [landscape.space(whole=True)], trials=12)
    rounds(search, landscape)
    assert search.is_complete


def test_a_slow_solver_gets_few_trials_and_a_close_one_many() -> None:
    """Three spaces alike but for their scale: the trials beyond the first round go by promise."""
    landscapes = [
        Landscape(seed=8, solver_id=name, scale_ms=scale, estimate_noise=0.3)
        for name, scale in (("Fast", 1.0), ("Close", 1.15), ("Hopeless", 6.0))
    ]
    search = Search(NETWORK_CONFIG, [landscape.space() for landscape in landscapes], trials=200, patience=NEVER)
    later = solvers_of(rounds(search, *landscapes)[1:])
    assert later.count("Hopeless") < 4
    assert later.count("Close") > 30
    assert later.count("Fast") > later.count("Close")


def test_a_solver_that_only_fails_does_not_eat_the_budget() -> None:
    good, bad = (Landscape(seed=9, solver_id=name, estimate_noise=0.3) for name in ("Good", "Bad"))
    search = Search(NETWORK_CONFIG, [bad.space(), good.space()], trials=120, patience=NEVER)
    proposed = []
    while batch := search.propose():
        proposed.append(batch)
        search.learn([result_of(good, candidate) for candidate in batch])
    assert solvers_of(proposed[1:]).count("Bad") < 4
    assert search.best_ms < math.inf


def result_of(good: Landscape, candidate: Candidate) -> Outcome:
    if candidate.solver_id == good.solver_id:
        return good.outcome(candidate)
    return Outcome(candidate=candidate, status=Status.LAUNCH_FAILED, message="broken for this test")


def test_what_was_measured_before_counts_and_is_not_measured_again() -> None:
    landscape = Landscape(seed=10, estimate_noise=0.3)
    first = Search(NETWORK_CONFIG, [landscape.space()], trials=48, patience=NEVER)
    before = [candidate for batch in rounds(first, landscape) for candidate in batch]
    known = {candidate: landscape.time_ms(candidate.config) for candidate in before[:40]}
    failed = dict.fromkeys(before[40:], None)
    again = Search(NETWORK_CONFIG, [landscape.space()], trials=64, patience=NEVER, known=known | failed)
    assert again.best_ms == min(known.values())
    proposed = [candidate for batch in rounds(again, landscape) for candidate in batch]
    assert len(proposed) == 64 - 48
    assert not {*proposed} & {*before}
    over = Search(NETWORK_CONFIG, [landscape.space()], trials=48, patience=NEVER, known=known | failed)
    assert over.propose() == ()
    assert not over.is_complete


def test_what_was_measured_before_and_is_beyond_the_limits_is_no_finalist() -> None:
    landscape = Landscape(seed=1, parameters=SMALL)
    beyond = Config.of(tile=16, stages=1)
    candidate = Candidate(network_config=NETWORK_CONFIG, solver_id="Synthetic", config=beyond)
    space = replace(landscape.space(whole=True), admits=lambda config: config in landscape.configs())
    search = Search(NETWORK_CONFIG, [space], known={candidate: 1e-9})
    rounds(search, landscape)
    assert candidate not in search.finalists()


def test_finalists_are_the_fastest_of_all_and_the_first_default() -> None:
    landscape = Landscape(seed=11, estimate_noise=0.1)
    slow = max(landscape.configs(), key=landscape.time_ms)
    search = Search(NETWORK_CONFIG, [landscape.space(seeds=(slow,))], trials=64, patience=NEVER)
    proposed = [candidate for batch in rounds(search, landscape) for candidate in batch]
    finalists = search.finalists()
    assert finalists[0].config == slow
    fastest = sorted(proposed, key=lambda candidate: landscape.time_ms(candidate.config))
    assert list(finalists[1:]) == fastest[:FINALISTS]


def test_nothing_that_runs_gives_no_finalists() -> None:
    landscape = Landscape(seed=1, parameters=SMALL)
    search = Search(NETWORK_CONFIG, [landscape.space(whole=True)])
    while batch := search.propose():
        search.learn([Outcome(candidate=candidate, status=Status.CRASHED) for candidate in batch])
    assert search.finalists() == ()
    assert search.is_complete


def test_the_likely_next_round_is_told_ahead_and_changes_nothing() -> None:
    landscape = Landscape(seed=12, estimate_noise=0.3)
    searches = [Search(NETWORK_CONFIG, [landscape.space()], trials=300, seed=1) for _ in range(2)]
    foreseen, proposed = 0, 0
    likely: set[Candidate] = set()
    while batch := searches[0].propose():
        assert batch == searches[1].propose()
        foreseen += len(likely & set(batch))
        proposed += len(batch) if likely else 0
        likely = set(searches[0].likely_next())
        for search in searches:
            search.learn(outcomes([landscape], batch))
    assert searches[1].propose() == ()
    assert foreseen > proposed / 3


_SCRIPT = """
from helpers.runs.landscapes import NETWORK_CONFIG, Landscape
from miofind.find.search import Search
landscapes = {name: Landscape(seed=13, solver_id=name, estimate_noise=0.3) for name in ("A", "B")}
search = Search(NETWORK_CONFIG, [landscape.space() for landscape in landscapes.values()], trials=120, seed=5)
while batch := search.propose():
    print(*(candidate.id for candidate in batch))
    search.learn({landscapes[candidate.solver_id].outcome(candidate) for candidate in batch})
"""


def test_equal_seeds_give_equal_searches_in_every_process(tmp_path: Path) -> None:
    """Outcomes come in the order of a set's hashes here, which differs from process to process."""
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    printed = [
        subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(paths)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1]
    assert len(printed[0].splitlines()) > DEFAULT_PATIENCE


def test_another_seed_gives_another_search() -> None:
    landscape = Landscape(seed=14)
    space = landscape.space()
    found = [rounds(Search(NETWORK_CONFIG, [space], trials=64, seed=seed), landscape) for seed in (0, 1)]
    assert found[0][0] == found[1][0]
    assert found[0][1:] != found[1][1:]
