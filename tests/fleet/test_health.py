"""Which GPUs are believed: canaries against the fleet's median, strikes, losses, and what an agent makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from helpers.commands.fleet_jobs import KIND, scalar
from helpers.finddb.finddb_entries import DEVICE, PROBLEM, row
from sqlalchemy import text

from miofind.device.device import Device, Library
from miofind.errors import DatabaseError
from miofind.finddb import History, ProblemKey, Store
from miofind.fleet import health
from miofind.fleet.agent import Measured
from miofind.fleet.canary import PROBLEMS, canary_tasks, factor
from miofind.fleet.database import FleetDatabase
from miofind.fleet.health import Judgement
from miofind.fleet.holdings import GpuTasks, Holdings
from miofind.fleet.queue import Queue
from miofind.fleet.values import Agent, GpuState
from miofind.runtime.handle import Handle
from miofind.solver.registry import Registry

GPUS = ("GPU-1", "GPU-2", "GPU-3", "GPU-4")
USUAL = {"a": 1.0, "b": 2.0, "c": 3.0}


@pytest.fixture
def database(postgres_url: str) -> Iterator[FleetDatabase]:
    """Four GPUs of one kind, of which three have measured their canaries."""
    made = FleetDatabase(postgres_url)
    made.create()
    agent = Agent(id=uuid4(), host="h")
    for name in GPUS:
        health.register(made, name, KIND, agent)
    for name in GPUS[1:]:
        assert health.report_canaries(made, name, USUAL) == Judgement(GpuState.READY, is_good=True)
    yield made
    made.close()


def slowed(by: float) -> dict[str, float]:
    return {name: by * time_ms for name, time_ms in USUAL.items()}


def test_a_gpu_that_is_off_is_suspect_then_quarantined(database: FleetDatabase) -> None:
    found = [health.report_canaries(database, "GPU-1", slowed(by)).state for by in (1.02, 1.04, 1.04, 1.04, 1.0)]
    ready, suspect, quarantined = GpuState
    assert found == [ready, ready, suspect, quarantined, quarantined], "only people free one"
    assert (
        scalar(database, "SELECT reason FROM gpu WHERE name = 'GPU-1'")
        == "its canaries take 1.040 of the others' times"
    )
    health.set_state(database, ["GPU-1"], GpuState.READY)
    assert health.report_canaries(database, "GPU-1", slowed(1.04)) == Judgement(GpuState.READY, is_good=False)


def test_one_good_time_clears_a_suspect(database: FleetDatabase) -> None:
    for _ in range(2):
        state = health.report_canaries(database, "GPU-1", slowed(0.9)).state
    assert state is GpuState.SUSPECT
    assert health.report_canaries(database, "GPU-1", USUAL).state is GpuState.READY
    assert scalar(database, "SELECT count(*) FROM event WHERE kind LIKE 'gpu %'") == 2


def test_what_is_no_time_on_the_server_counts_for_nothing(database: FleetDatabase) -> None:
    scalar(database, """UPDATE gpu SET canaries = '{"a": "x", "b": -1, "c": null}' WHERE name = 'GPU-2' RETURNING 1""")
    scalar(database, "UPDATE gpu SET canaries = '[3]' WHERE name = 'GPU-3' RETURNING 1")
    scalar(database, f"""UPDATE gpu SET canaries = '{{"a": 1{400 * "0"}}}' WHERE name = 'GPU-4' RETURNING 1""")
    health.report_canaries(database, "GPU-1", slowed(2.0))
    assert scalar(database, "SELECT factor FROM gpu WHERE name = 'GPU-1'") is None, "one GPU is no fleet"


def test_a_state_of_a_later_release_is_told(database: FleetDatabase) -> None:
    with database.transaction() as connection:
        connection.execute(text("ALTER TABLE gpu DROP CONSTRAINT gpu_state_check"))
        connection.execute(text("UPDATE gpu SET state = 'asleep'"))
    with pytest.raises(DatabaseError, match="in the state 'asleep', which this release of miofind does not know"):
        health.states(database, GPUS)
    with pytest.raises(DatabaseError, match="'asleep'"):
        health.report_canaries(database, "GPU-1", USUAL)


def test_gpus_of_an_agent_that_is_gone_are_to_be_registered(database: FleetDatabase) -> None:
    """So that whoever has one of them now, by the same name, takes it over."""
    agent = Agent(id=uuid4(), host="h")
    queue = Queue(database)
    queue.register(agent, "1")
    health.register(database, "GPU-1", KIND, agent)
    assert health.states(database, GPUS).keys() == set(GPUS)
    queue.beat(agent, state="gone", problems=0, age_s=0.0)
    assert health.states(database, GPUS).keys() == set(GPUS[1:])


def test_two_lost_contexts_in_an_hour_quarantine(database: FleetDatabase) -> None:
    assert health.note_lost(database, "GPU-1", "gone") is GpuState.READY
    assert health.note_lost(database, "GPU-2", "gone") is GpuState.READY
    scalar(database, "UPDATE event SET at = at - interval '2 hours' WHERE kind = 'gpu lost' RETURNING 1")
    assert health.note_lost(database, "GPU-1", "gone") is GpuState.READY
    assert health.note_lost(database, "GPU-1", "gone") is GpuState.QUARANTINED
    assert health.states(database, GPUS)["GPU-2"] is GpuState.READY


def test_a_factor_needs_a_fleet() -> None:
    assert factor(USUAL, [USUAL, USUAL]) is None
    assert factor(slowed(1.1), [slowed(1.1), USUAL, USUAL]) == pytest.approx(1.1)
    assert factor({}, [USUAL] * 3) is None


def test_canaries_are_measured_by_one_solver_of_our_own_each(tmp_path: Path) -> None:
    with Handle(Device.virtual("90a"), database=tmp_path / "finddb.db") as handle:
        tasks = canary_tasks(handle)
    assert [task.request.problem for task in tasks] == list(PROBLEMS)
    assert [task.ticket for task in tasks] == [-1, -2, -3, -4]
    for task in tasks:
        assert task.options is not None
        (only,) = task.options.find.only
        assert Registry.default().named(only).library is Library.PLAIN
        assert task.options.force
        assert task.options.find.isolate


def test_a_held_gpu_measures_its_canaries_and_no_job(tmp_path: Path) -> None:
    holdings = Holdings()
    tasks = GpuTasks(holdings, "A")
    tasks.hold(True)
    with Handle(Device.virtual("90a"), database=tmp_path / "finddb.db") as handle:
        canaries = canary_tasks(handle)
    tasks.ask(canaries)
    assert [tasks.take("A") for _ in canaries] == list(canaries)
    assert not tasks.give_back(canaries[0])
    tasks.close()
    assert tasks.take("A") is None


def test_rows_since_the_last_good_canary_are_doubted(database: FleetDatabase) -> None:
    with Store(":memory:") as store:
        rows = [row(created_at=f"2026-01-0{day}T00:00:00.000000Z") for day in (1, 2)]
        store.add([History(device=DEVICE, network_config=PROBLEM, rows=tuple(rows))])
        key = ProblemKey(device=DEVICE, network_config=PROBLEM)
        found = Measured(key, "2026-01-01T12:00:00.000000+00:00").rows(store)
        history = store.history(DEVICE, PROBLEM)
    assert history is not None
    assert found == [history.rows[1].id]
    for _ in range(2):
        health.doubt(database, "GPU-1", found)
    assert health.doubted(database) == set(found)
