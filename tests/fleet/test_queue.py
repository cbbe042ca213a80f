"""The queue of a fleet on a real PostgreSQL: who gets what, what a lease is worth, and what becomes of the lost."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from helpers.commands.fleet_jobs import KIND, NIGHTLY, OTHER, done, expire, holds, problems, scalar, states, submitted
from helpers.finddb.postgres_server import new_database, new_server
from sqlalchemy import TextClause, text

from miofind.cli.fleet_board import print_status
from miofind.errors import DatabaseError, InvalidOptionError
from miofind.fleet import health
from miofind.fleet.campaign_options import options_json, options_of
from miofind.fleet.campaigns import retry, set_paused, submit
from miofind.fleet.database import FleetDatabase, UnreachableError
from miofind.fleet.garbage import Removed, collect
from miofind.fleet.queue import BEGIN, CLAIM, FINISH, MOST_ATTEMPTS, RELEASE, RENEW, Queue
from miofind.fleet.status import status
from miofind.fleet.values import Agent
from miofind.options import FindOptions
from miofind.tune.values import TuneOptions


@pytest.fixture
def database(postgres_url: str) -> Iterator[FleetDatabase]:
    made = FleetDatabase(postgres_url)
    made.create()
    yield made
    made.close()


@pytest.fixture
def queue(database: FleetDatabase) -> Queue:
    return Queue(database)


def test_the_heaviest_go_first_and_to_their_kind_alone(database: FleetDatabase, queue: Queue) -> None:
    submitted(database)
    assert queue.claim(uuid4(), OTHER, 5) == [], "another stack has no jobs until it enrols"
    found = queue.claim(uuid4(), KIND, 2)
    assert [claimed.task.request.problem.k for claimed in found if claimed.task] == [3, 2]
    assert {claimed.task.kind for claimed in found if claimed.task} == {KIND.device}
    assert len(queue.claim(uuid4(), KIND, 5)) == 1
    assert queue.claim(uuid4(), KIND, 5) == []


def test_submitting_again_resumes(database: FleetDatabase, queue: Queue) -> None:
    first = submitted(database)
    queue.finish([done(hold) for hold in holds(queue, uuid4(), 2)])
    again = submitted(database, 5)
    assert (first.problems, first.added, again.problems, again.added) == (3, 3, 5, 2)
    assert (again.campaign, again.jobs) == (first.campaign, 0), "no GPU has registered"
    assert states(database) == {"done": 2, "new": 3}
    assert queue.enrol(OTHER) == 5
    assert queue.enrol(OTHER) == 0
    with pytest.raises(DatabaseError, match="the campaign nightly has other options"):
        submit(database, replace(NIGHTLY, options=TuneOptions(force=True)), problems(1))


def test_a_submit_makes_jobs_for_kinds_at_work_alone(database: FleetDatabase, queue: Queue) -> None:
    """A kind whose agents are gone gets them when one is back."""
    agent = Agent(id=uuid4(), host="h")
    queue.register(agent, "1")
    health.register(database, "GPU-1", KIND, agent)
    assert submit(database, NIGHTLY, problems(2)).jobs == 2
    queue.beat(agent, state="gone", problems=0, age_s=0.0)
    assert submit(database, NIGHTLY, problems(3)).jobs == 0
    assert queue.enrol(KIND) == 1


def test_a_campaign_for_named_kinds_is_left_alone_by_others(database: FleetDatabase, queue: Queue) -> None:
    submitted(database, request=replace(NIGHTLY, stacks=("s2",)))
    assert (queue.enrol(KIND), states(database)) == (0, {})
    assert queue.enrol(OTHER) == 3


def test_campaigns_go_by_priority_and_paused_ones_not_at_all(database: FleetDatabase, queue: Queue) -> None:
    low = submitted(database, 2).campaign
    high = submitted(database, 2, replace(NIGHTLY, name="urgent", priority=5)).campaign
    assert [claimed.campaign for claimed in queue.claim(uuid4(), KIND, 1)] == [high]
    set_paused(database, "urgent", paused=True)
    assert queue.paused([low, high]) == {high}
    assert {claimed.campaign for claimed in queue.claim(uuid4(), KIND, 9)} == {low}
    assert queue.claim(uuid4(), KIND, 9) == []
    set_paused(database, "urgent", paused=False)
    assert [claimed.campaign for claimed in queue.claim(uuid4(), KIND, 9)] == [high]
    with pytest.raises(DatabaseError, match="there is no campaign 'daily': there are urgent, nightly"):
        set_paused(database, "daily", paused=True)


def test_who_comes_late_is_refused(database: FleetDatabase, queue: Queue) -> None:
    submitted(database, 1)
    (late,) = holds(queue, uuid4())
    expire(database)
    assert queue.reap() == 1
    assert queue.finish([done(late)]) == set(), "it is nobody's"
    (ours,) = holds(queue, uuid4())
    assert (queue.renew([late, ours]), queue.finish([done(late)])) == ({ours}, set())
    assert queue.finish([done(ours)]) == {ours}
    assert queue.finish([done(ours)]) == set(), "the second telling, its answer lost, changes nothing"
    assert states(database) == {"done": 1}


def test_leases_that_are_renewed_hold(database: FleetDatabase, queue: Queue) -> None:
    submitted(database, 3)
    mine, theirs = holds(queue, uuid4(), 2), holds(queue, uuid4(), 1)
    expire(database)
    assert queue.renew(mine) == set(mine), "what nobody took meanwhile is still ours"
    assert queue.reap() == 1
    assert states(database) == {"leased": 2, "new": 1}
    assert queue.renew(theirs) == set()


def test_only_what_was_begun_costs_a_loss_and_the_second_parks_it(database: FleetDatabase, queue: Queue) -> None:
    submitted(database, 3)
    for losses in (1, 2):
        batch = holds(queue, uuid4(), 3)
        queue.begin(batch[:1])
        expire(database)
        assert queue.reap() == 3
        assert scalar(database, "SELECT max(losses) FROM job") == losses
    assert states(database) == {"parked": 1, "new": 2}
    assert scalar(database, "SELECT count(*) FROM event WHERE kind = 'parked'") == 1
    assert "the host that measured it is gone" in str(scalar(database, "SELECT message FROM job WHERE losses = 2"))
    assert retry(database, "nightly") == 1
    assert states(database) == {"new": 3}


def test_a_job_that_is_lost_again_and_again_unbegun_is_parked(database: FleetDatabase, queue: Queue) -> None:
    submitted(database, 1)
    for _ in range(MOST_ATTEMPTS):
        assert states(database) == {"new": 1}
        holds(queue, uuid4())
        expire(database)
        queue.reap()
    assert states(database) == {"parked": 1}


def test_a_device_lost_over_a_job_is_told_at_once(database: FleetDatabase, queue: Queue) -> None:
    submitted(database, 1)
    for expected in ({"new": 1}, {"parked": 1}):
        queue.lose(holds(queue, uuid4())[0], "the GPU fell off the bus")
        assert states(database) == expected


def test_what_is_given_back_costs_nothing(database: FleetDatabase, queue: Queue) -> None:
    submitted(database, 3)
    worker = uuid4()
    batch = holds(queue, worker, 3)
    queue.begin(batch)
    queue.release(batch[1:])
    assert states(database) == {"leased": 1, "new": 2}
    assert scalar(database, "SELECT sum(attempts) FROM job") == 1
    unheard = holds(queue, worker, 1)  # the answer to this claim is lost
    queue.release_unknown(worker, batch[:1])
    assert (states(database), queue.renew(unheard)) == ({"leased": 1, "new": 2}, set())


def test_an_agent_that_starts_again_frees_what_its_dead_predecessor_held(database: FleetDatabase, queue: Queue) -> None:
    submitted(database, 3)
    dead, other = Agent(id=uuid4(), host="h"), uuid4()
    queue.register(dead, "1")
    queue.begin(holds(queue, dead.id, 2)[:1])
    holds(queue, other, 1)
    queue.lose_worker(dead.id)
    assert states(database) == {"leased": 1, "new": 2}
    assert scalar(database, "SELECT sum(losses) FROM job") == 1
    assert scalar(database, "SELECT state FROM worker") == "gone"


def with_jobs(database: FleetDatabase, queue: Queue, count: int) -> None:
    """A campaign of as many jobs, whose statistics are only the test's affair."""
    campaign = submitted(database, 1).campaign
    many = text(
        "INSERT INTO campaign_problem SELECT :campaign, 'p' || number, '', '', 1, 1.0 "
        "FROM generate_series(1, :count) AS series(number)"
    )
    with database.transaction() as connection:
        connection.execute(text("ALTER TABLE job SET (autovacuum_enabled = false)"))
        connection.execute(many, {"campaign": campaign, "count": count})
        connection.execute(text("UPDATE campaign SET revision = revision + 1"))
    assert queue.enrol(KIND) == count


def jobs_read(database: FleetDatabase, statement: TextClause, values: Mapping[str, object]) -> int:
    """Rows of jobs that the server looks at for a statement, which it carries out."""
    with database.transaction() as connection:
        asked = text(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement.text}")
        (found,) = connection.execute(asked, dict(values)).scalar_one()
        return _jobs_read(found["Plan"])


def _jobs_read(node: Mapping[str, Any]) -> int:
    here = 0
    if node.get("Relation Name") == "job" and "Scan" in node["Node Type"]:
        here = (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
    return int(here) + sum(map(_jobs_read, node.get("Plans", ())))


def claiming(most: int) -> dict[str, object]:
    values = {"device": KIND.device, "stack": KIND.stack, "most": most, "worker": uuid4(), "lease_s": 120.0}
    return values | {"devices": 1, "waiting": 0, "most_counted": 2048}


def test_a_claim_reads_few_jobs_of_a_campaign_without_statistics(database: FleetDatabase, queue: Queue) -> None:
    """It read all 60,000 of one, and took 45 ms."""
    with_jobs(database, queue, 5000)
    assert jobs_read(database, CLAIM, claiming(1)) < 100


def test_a_claim_reads_few_jobs_of_a_campaign_with_statistics(database: FleetDatabase, queue: Queue) -> None:
    """Once the server had them, it read the whole table to find what was picked: of 60,000 jobs 16 ms."""
    with_jobs(database, queue, 20_000)
    with database.transaction() as connection:
        connection.execute(text("ANALYZE job"))
    assert jobs_read(database, CLAIM, claiming(8)) < 100


@pytest.mark.parametrize("statement", [BEGIN, RENEW, RELEASE, FINISH], ids=["begin", "renew", "release", "finish"])
def test_what_is_told_of_a_job_reads_no_other_agents_jobs(
    database: FleetDatabase, queue: Queue, statement: TextClause
) -> None:
    """Where statistics knew of no lease, it read every job that any agent held."""
    with_jobs(database, queue, 3019)
    with database.transaction() as connection:
        connection.execute(text("ANALYZE job"))
    queue.claim(uuid4(), KIND, 3000)
    held = sorted(holds(queue, uuid4(), 20), key=lambda hold: hold.job)
    values: dict[str, object] = {"jobs": [hold.job for hold in held], "fences": [hold.fence for hold in held]}
    values |= {"lease_s": 120.0, "states": ["done"] * 20, "outcomes": ["tuned"] * 20, "messages": [""] * 20}
    assert jobs_read(database, statement, values | {"seconds": [0.5] * 20}) == 20


def claim_all(url: str, chunk: int, told: multiprocessing.SimpleQueue[list[int]]) -> None:
    database = FleetDatabase(url)
    queue, worker, found = Queue(database), uuid4(), []
    while batch := holds(queue, worker, chunk):
        found += [hold.job for hold in batch]
        assert queue.finish([done(hold) for hold in batch]) == set(batch)
    database.close()
    told.put(found)


def test_near_the_end_agents_share_what_is_left(database: FleetDatabase, queue: Queue) -> None:
    """Each gets half of its devices' part, and none more than it has before the others had theirs."""
    agents = [Agent(id=uuid4(), host=f"h{number}") for number in range(4)]
    for number, agent in enumerate(agents):
        queue.register(agent, "1")
        health.register(database, f"GPU-{number}", KIND, agent)
    submitted(database, 40)
    first = [len(queue.claim(agent.id, KIND, 64)) for agent in agents]
    assert first == [5, 5, 4, 4]
    assert queue.claim(agents[0].id, KIND, 64, waiting=5) == []
    assert len(queue.claim(agents[0].id, KIND, 64, waiting=1)) == 2
    assert len(queue.claim(agents[1].id, KIND, 2)) == 2, "where much is left nothing is cut"
    while queue.claim(agents[2].id, KIND, 64):
        pass
    assert states(database) == {"leased": 40}


def test_a_lone_agent_has_all(database: FleetDatabase, queue: Queue) -> None:
    submitted(database, 9)
    assert len(queue.claim(uuid4(), KIND, 8)) == 8


def test_what_is_old_goes_and_what_may_be_of_use_stays(database: FleetDatabase, queue: Queue) -> None:
    """An ended campaign, one for a stack that no host has any more, and one that goes on."""
    agent, gone = Agent(id=uuid4(), host="h"), Agent(id=uuid4(), host="gone")
    for number, (each, kind) in enumerate(((agent, KIND), (gone, OTHER))):
        queue.register(each, "1")
        health.register(database, f"GPU-{number}", kind, each)
    submitted(database, 2)
    for name in ("ended", "parked"):
        submitted(database, 1, replace(NIGHTLY, name=name, stacks=("s1",)))
    with database.transaction() as connection:
        connection.execute(text("UPDATE job SET state = 'parked' WHERE campaign_id = 3"))
        connection.execute(text("UPDATE job SET state = 'done', finished_at = created_at FROM campaign WHERE "
                                "campaign_id = campaign.id AND name = 'ended'"))  # fmt: skip
    assert collect(database, 30) == Removed(campaigns=0, jobs=0, gpus=0, agents=0)
    with database.transaction() as connection:
        connection.execute(text("UPDATE campaign SET created_at = now() - interval '40 days'"))
        connection.execute(text("UPDATE job SET finished_at = now() - interval '31 days' WHERE finished_at < now()"))
        past = "UPDATE worker SET state = 'gone', beat_at = now() - interval '31 days' WHERE id = :id"
        connection.execute(text(past), {"id": gone.id})
    expected = Removed(campaigns=2, jobs=2, gpus=1, agents=1)
    assert collect(database, 30, dry_run=True) == expected
    assert collect(database, 30) == expected
    assert collect(database, 30) == Removed(campaigns=0, jobs=0, gpus=0, agents=0)
    assert states(database) == {"new": 2}
    assert queue.enrol(OTHER) == 2, "a stack that is back has its jobs again"


def test_two_claimers_never_share_a_job(database: FleetDatabase, postgres_url: str) -> None:
    """1,000 jobs, three processes and three threads, in batches of many sizes."""
    submitted(database, 1000)
    context = multiprocessing.get_context("spawn")
    told: multiprocessing.SimpleQueue[list[int]] = context.SimpleQueue()
    processes = [context.Process(target=claim_all, args=(postgres_url, chunk, told)) for chunk in (1, 7)]
    for process in processes:
        process.start()
    with ThreadPoolExecutor(3) as pool:
        for chunk in (1, 3, 20):
            pool.submit(claim_all, postgres_url, chunk, told)
    claimed = [told.get() for _ in range(5)]
    for process in processes:
        process.join()
    found = [job for part in claimed for job in part]
    assert (len(found), len(set(found)), states(database)) == (1000, 1000, {"done": 1000})


def test_one_reaper_at_a_time(database: FleetDatabase, queue: Queue) -> None:
    submitted(database, 1)
    holds(queue, uuid4())
    expire(database)
    locked, over = threading.Event(), threading.Event()

    def hold_lock() -> None:
        with database.transaction() as connection:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": int.from_bytes(b"mioreap", "big")})
            locked.set()
            over.wait()

    holder = threading.Thread(target=hold_lock)
    holder.start()
    locked.wait()
    try:
        assert queue.reap() == 0
    finally:
        over.set()
        holder.join()
    assert queue.reap() == 1


def test_reapers_leave_each_other_time(database: FleetDatabase, queue: Queue) -> None:
    """A thousand hosts that look at all leases every few seconds would be much of what the server does."""
    submitted(database, 1)
    assert queue.reap(pause_s=1e6) == 0
    holds(queue, uuid4())
    expire(database)
    assert queue.reap(pause_s=1e6) == 0
    assert queue.reap() == 1


def test_a_clock_of_the_server_that_was_put_back_stops_no_reaper(database: FleetDatabase, queue: Queue) -> None:
    submitted(database, 1)
    queue.reap()
    scalar(database, "UPDATE reaper SET reaped_at = 'infinity' RETURNING 1")
    holds(queue, uuid4())
    expire(database)
    assert queue.reap(pause_s=60.0) == 1


def test_a_restart_of_the_server_extends_all_leases() -> None:
    with new_server() as server, new_database(server.url) as url:
        database = FleetDatabase(url)
        database.create()
        queue = Queue(database)
        submitted(database, 1)
        (hold,) = holds(queue, uuid4())
        queue.reap()
        server.kill()
        with pytest.raises(UnreachableError, match="cannot be"):
            queue.renew([hold])
        server.start()
        expire(database)  # the outage outlasted the lease
        assert queue.reap() == 0
        assert queue.finish([done(hold)]) == {hold}
        assert scalar(database, "SELECT count(*) FROM event WHERE kind = 'outage'") == 1
        database.close()


def test_clocks_of_clients_are_nobodys(database: FleetDatabase, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted(database, 2)
    first = holds(queue, uuid4())
    monkeypatch.setattr("time.time", lambda: 4e9)
    second = holds(queue, uuid4())
    assert queue.reap() == 0
    monkeypatch.setattr("time.time", lambda: 1.0)
    assert queue.renew([*first, *second]) == {*first, *second}
    spread = "SELECT extract(epoch FROM max(lease_until) - min(lease_until)) FROM job"
    assert float(str(scalar(database, spread))) < 60


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("network_config", "conv9d-nonsense", "conv9d-nonsense"),
        ("estimate_s", "NaN", "are no time and no count"),
        ("count", "0", "are no time and no count"),
    ],
)
def test_a_job_that_cannot_be_read_is_refused(
    database: FleetDatabase, queue: Queue, column: str, value: str, told: str
) -> None:
    submitted(database, 1)
    with database.transaction() as connection:
        connection.execute(text(f"UPDATE job SET {column} = '{value}'"))
    (claimed,) = queue.claim(uuid4(), KIND, 1)
    assert claimed.task is None
    assert told in claimed.refusal


def test_times_that_are_none_stop_neither_agents_nor_the_status(database: FleetDatabase, queue: Queue) -> None:
    """An infinite beat, and products and sums beyond all numbers, were errors of every call."""
    submitted(database, 3)
    agent = Agent(id=uuid4(), host="h")
    queue.register(agent, "1")
    health.register(database, "GPU-1", KIND, agent)
    for statement in (
        "UPDATE campaign_problem SET estimate_s = 1e308, count = 1000",
        "UPDATE job SET weight = 1e308, finished_at = now()",
        "UPDATE job SET weight = 'NaN' WHERE id = 1",
        "UPDATE worker SET beat_at = 'infinity', outbox_age_s = 'infinity'",
        "UPDATE gpu SET factor = 'NaN'",
    ):
        scalar(database, f"{statement} RETURNING 1")
    assert queue.enrol(OTHER) == 3
    found = status(database)
    assert [each.silent_s for each in found.gpus] == [None]
    assert all(each.eta_s is None or each.eta_s >= 0 for each in found.campaigns)
    print_status(found)


def test_options_cross_as_plain_json() -> None:
    find = FindOptions(only=("ConvCpuDirect",), tuning=True, trials=7, time_budget_s=float("inf"), isolate=True)
    options = TuneOptions(find=find, force=True)
    assert options_of(options_json(options)) == options
    assert options_of({}) == TuneOptions(find=FindOptions(isolate=True)), "candidates always run in a sandbox"
    with pytest.raises(InvalidOptionError, match="recheck goes by the notes"):
        options_json(TuneOptions(recheck=True))
    with pytest.raises(InvalidOptionError, match="no candidates that are drawn"):
        options_json(TuneOptions(find=FindOptions(likely=True), drawn=1))


@pytest.mark.parametrize(
    "values",
    [
        *(None, [], {"isolate": False}, {"only": 3}, {"trials": -1}, {"force": 1}, {"only": ["nothing"]}),
        *({"seed": "x"}, {"time_budget_s": 10**400}, {"max_error": -(10**400)}, {"workspace_limit_bytes": 10**400}),
    ],
)
def test_options_of_another_form_are_refused(values: object) -> None:
    with pytest.raises(DatabaseError):
        options_of(values)


def test_a_url_tells_no_password() -> None:
    for url in ("postgresql://user:secret@nowhere.invalid/db", "mysql://user:secret@host/db", "secret"):
        with pytest.raises(DatabaseError) as raised:
            FleetDatabase(url).create()
        assert "secret" not in str(raised.value)
