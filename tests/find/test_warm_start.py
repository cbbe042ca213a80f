"""Near problems: the distance, and what won there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from miofind.core.problem import ProblemDescription
from miofind.find import warm_start
from miofind.find.warm_start import WarmStart, distance, shared_warm_start
from miofind.finddb import LayeredStore, Row, Store
from miofind.solver.steps import Config

DEVICE = "some GPU"
BASE: dict[str, Any] = {"x": (32, 64, 56, 56), "w": (64, 64, 3, 3), "padding": 1, "dtype": "float16", "layout": "NHWC"}


def problem(**changes: Any) -> ProblemDescription:
    return ProblemDescription.convolution(**{**BASE, **changes})


def apart(**changes: Any) -> warm_start.Distance:
    return distance(problem().network_config, problem(**changes).network_config)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[LayeredStore]:
    with LayeredStore(Store(tmp_path / "user.db"), strict=True) as layered:
        yield layered


def record(database: LayeredStore, which: ProblemDescription, times_ms: dict[str, float], device: str = DEVICE) -> None:
    """One row a name; "Solver=3" is a solver and its tile."""
    rows = [
        Row(
            solver_id=name.partition("=")[0],
            solver_version=1,
            config=Config.of(tile=int(name.partition("=")[2])).json,
            status="ok",
            time_ms=time_ms,
        )
        for name, time_ms in times_ms.items()
    ]
    database.record(device, which.network_config, rows)


def test_sizes_count_by_their_ratio_whichever_is_larger() -> None:
    assert apart() == warm_start.Distance(0, 0.0)
    assert apart(x=(64, 64, 56, 56)) == apart(x=(16, 64, 56, 56)) == warm_start.Distance(0, 1.0)
    assert apart(x=(64, 64, 28, 56)).octaves == pytest.approx(2.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"direction": "backward_data"},
        {"dtype": "bfloat16"},
        {"layout": "NCHW"},
        {"w": (64, 64, 5, 5)},
        {"stride": 2},
        {"dilation": 2},
        {"w": (64, 16, 3, 3), "groups": 4},
        {"w": (64, 1, 3, 3), "groups": 64},
        {"epilogue": "bias.relu"},
    ],
    ids=str,
)
def test_another_kind_is_further_than_any_size(changes: dict[str, Any]) -> None:
    assert apart(**changes) > apart(x=(1, 2048, 7, 7), w=(4, 2048, 3, 3))


def test_winners_are_those_of_the_nearest_problems_nearest_first(database: LayeredStore) -> None:
    record(database, problem(x=(8, 64, 56, 56)), {"A=8": 1.0, "A=9": 2.0, "B=1": 3.0})
    record(database, problem(x=(16, 64, 56, 56)), {"A=16": 1.0})
    record(database, problem(direction="backward_data"), {"A=99": 1.0})
    record(database, problem(), {"A=7": 1.0}, device="another GPU")
    winners = WarmStart(DEVICE).winners(problem(), database)
    assert winners == {
        "A": (Config.of(tile=16), Config.of(tile=8), Config.of(tile=99)),
        "B": (Config.of(tile=1),),
    }


def test_what_won_in_a_composed_form_won(database: LayeredStore) -> None:
    record(database, problem(epilogue="bias"), {"A+Pointwise=1": 1.0, "A=2": 2.0, "B=3": 3.0})
    found = WarmStart(DEVICE).winners(problem(epilogue="bias.relu"), database)
    assert found == {"A": (Config.of(tile=1),), "B": (Config.of(tile=3),)}


def test_the_problem_itself_is_the_nearest(database: LayeredStore) -> None:
    record(database, problem(), {"A=5": 1.0})
    record(database, problem(x=(16, 64, 56, 56)), {"A=16": 1.0})
    assert WarmStart(DEVICE).winners(problem(), database)["A"][0] == Config.of(tile=5)


def test_few_answers_are_read_and_the_problems_listed_once(
    database: LayeredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for batch in range(1, 40):
        record(database, problem(x=(batch, 64, 56, 56)), {f"A={batch}": 1.0})
    read: list[str] = []
    listed: list[str] = []
    answer, problems = Store.answer, Store.problems
    monkeypatch.setattr(Store, "answer", lambda self, *key: read.append(key[1]) or answer(self, *key))
    monkeypatch.setattr(Store, "problems", lambda self, device: listed.append(device) or problems(self, device))
    start = WarmStart(DEVICE)
    assert start.winners(problem(), database)["A"] == tuple(Config.of(tile=n) for n in (32, 33, 31, 34))
    start.winners(problem(x=(4, 64, 56, 56)), database)
    assert len(read) == 16
    assert listed == [DEVICE]


def test_a_bounded_number_of_problems_is_compared(database: LayeredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for batch in range(1, 10):
        record(database, problem(x=(batch, 64, 56, 56)), {"A=1": 1.0})
    monkeypatch.setattr(warm_start, "MAX_PROBLEMS", 5)
    start = WarmStart(DEVICE)
    start.winners(problem(), database)
    assert start._known is not None
    assert len(start._known) == 5


def test_a_problem_measured_since_is_a_neighbour(database: LayeredStore) -> None:
    start = WarmStart(DEVICE)
    assert start.winners(problem(), database) == {}
    other = problem(x=(16, 64, 56, 56))
    record(database, other, {"A=3": 1.0})
    start.add(other.network_config)
    assert start.winners(problem(), database) == {"A": (Config.of(tile=3),)}


def test_problems_of_another_rank_and_unreadable_ones_are_none(database: LayeredStore) -> None:
    record(database, ProblemDescription.convolution(x=(1, 4, 9), w=(4, 4, 3)), {"A=1": 1.0})
    row = Row(solver_id="A", solver_version=1, config='{"tile":1}', status="ok", time_ms=1.0)
    database.record(DEVICE, "conv9d-of-a-later-release", [row])
    assert WarmStart(DEVICE).winners(problem(), database) == {}


def test_handles_of_one_finddb_share_their_warm_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each handle had its own and listed once, so that a device never learned what the others had found."""
    listed: list[str] = []
    problems = Store.problems
    monkeypatch.setattr(Store, "problems", lambda self, device: listed.append(device) or problems(self, device))
    other = problem(x=(16, 64, 56, 56))
    with ExitStack() as stack:
        opened = [stack.enter_context(LayeredStore(Store(tmp_path / "user.db"), strict=True)) for _ in range(12)]
        every = [shared_warm_start(database, DEVICE) for database in opened]
        assert all(start.winners(problem(), database) == {} for start, database in zip(every, opened, strict=True))
        record(opened[0], other, {"A=3": 1.0})
        every[0].add(other.network_config)
        opened[0].close()
        again = [shared_warm_start(database, DEVICE).winners(problem(), database) for database in opened[1:]]
        assert again == [{"A": (Config.of(tile=3),)}] * 11
        assert listed == [DEVICE]
        assert shared_warm_start(opened[1], "another GPU") is not every[0]


def test_finddbs_in_memory_share_nothing() -> None:
    with LayeredStore(Store(":memory:")) as first, LayeredStore(Store(":memory:")) as second:
        assert shared_warm_start(first, DEVICE) is shared_warm_start(first, DEVICE)
        assert shared_warm_start(first, DEVICE) is not shared_warm_start(second, DEVICE)


def test_threads_that_share_a_warm_start_list_once_and_add_meanwhile(
    database: LayeredStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = WarmStart(DEVICE)
    listed: list[str] = []
    problems = Store.problems

    def slow(store: Store, device: str) -> Any:
        listed.append(device)
        time.sleep(0.1)
        return problems(store, device)

    monkeypatch.setattr(Store, "problems", slow)

    def work(number: int) -> None:
        for batch in range(1, 50):
            start.winners(problem(x=(batch, 64, 56, 56)), database)
            start.add(problem(x=(batch, 64, 56 + number, 56)).network_config)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert listed == [DEVICE]
    assert start._known is not None
    assert len(start._known) == 8 * 49
