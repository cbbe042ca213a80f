"""The queue of a fleet: jobs are claimed in batches, held by leases, and finished by whoever holds them last.

All times are the server's, so that the clocks of hosts matter to nobody. Every call is one transaction, and does no
harm where it is repeated since its answer was lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, RowMapping, text

from miofind.core.problem import ProblemDescription
from miofind.errors import InvalidProblemError
from miofind.finddb import MAX_INT
from miofind.fleet import schema
from miofind.fleet.database import FleetDatabase
from miofind.fleet.values import Agent, Claimed, Finish, Hold, Kind
from miofind.suites import SuiteProblem
from miofind.text.printable import printable, printable_name
from miofind.tune.queue import MOST_LOSSES
from miofind.tune.values import Task, TuneStatus

LEASE_S = 120.0
RENEW_S = 30.0
REAP_S = 15.0
MOST_ATTEMPTS = 10
"""Claims of a job after whose loss it is parked, whatever is known of who began it."""

MOST_REAPED = 1000
KEPT_EVENTS_DAYS = 30

_REAPER_LOCK = int.from_bytes(b"mioreap", "big")
_MESSAGE_CHARS = 2000

_MOST_COUNTED = 2048

# LATERAL with a LIMIT, since EXISTS read all jobs as long as the server had no statistics of a new campaign: of 60,000
# jobs 45 ms, on PostgreSQL 15. Jobs are read in order, and what was picked is an array: else the server, which takes a
# LIMIT that it does not know for a tenth of the jobs, reads the whole table for each claim, 16 ms. What is left is
# looked for from the lightest job on: at the heaviest lie the index's dead entries of what was claimed. Near the end a
# claim is what guided self-scheduling gives it, half of its devices' part of what is left (C. Polychronopoulos and D.
# Kuck, IEEE Transactions on Computers C-36, 1987): hosts finish together.
CLAIM = text("""
WITH chosen AS (
    SELECT campaign.id FROM campaign CROSS JOIN LATERAL (
        SELECT FROM job WHERE job.campaign_id = campaign.id AND job.device = :device AND job.stack = :stack
        AND job.state = 'new' ORDER BY weight, id DESC LIMIT 1) AS waiting
    WHERE NOT campaign.paused ORDER BY campaign.priority DESC, campaign.id LIMIT 1
), peers AS (
    SELECT greatest(count(*), :devices) AS count FROM gpu JOIN worker ON worker.id = gpu.worker_id
    WHERE gpu.device = :device AND gpu.stack = :stack AND gpu.state = 'ready' AND worker.state = 'ready'
), enough AS (
    SELECT least(:most_counted, 2 * CAST(:most AS bigint) * count / :devices) AS count FROM peers
), ready AS (
    SELECT count(*) AS count FROM (
        SELECT FROM job
        WHERE campaign_id = (SELECT id FROM chosen) AND device = :device AND stack = :stack AND state = 'new'
        ORDER BY weight, id DESC LIMIT (SELECT count FROM enough)) AS counted
), share AS (
    SELECT CASE WHEN peers.count <= :devices OR ready.count >= enough.count THEN :most
        ELSE least(:most, greatest(
            ceil((ready.count + :waiting) * :devices / (2.0 * peers.count)) - :waiting, CAST(:waiting = 0 AS integer)))
        END AS most
    FROM peers, enough, ready
), picked AS (
    SELECT id FROM job
    WHERE campaign_id = (SELECT id FROM chosen) AND device = :device AND stack = :stack AND state = 'new'
    ORDER BY weight DESC, id LIMIT (SELECT most FROM share) FOR UPDATE SKIP LOCKED
)
UPDATE job SET state = 'leased', worker_id = :worker, lease_until = now() + make_interval(secs => :lease_s),
    fence = fence + 1, attempts = attempts + 1, begun = false
WHERE id = ANY(ARRAY(SELECT id FROM picked))
RETURNING id, fence, campaign_id, network_config, suite, layer, count, estimate_s, losses
""")

# That lease_until is there says of a job what `state = 'leased'` says. By the latter the server took these statements
# through the index of all leased jobs, of all agents, as long as its statistics knew of few: of 7,000 jobs 3 ms a call.
_HELD = """
FROM unnest(CAST(:jobs AS bigint[]), CAST(:fences AS bigint[])) AS held(id, fence)
WHERE job.id = held.id AND job.fence = held.fence AND job.lease_until IS NOT NULL
"""

RENEW = text(
    f"UPDATE job SET lease_until = now() + make_interval(secs => :lease_s) {_HELD} RETURNING job.id, job.fence"
)
BEGIN = text(f"UPDATE job SET begun = true {_HELD} AND NOT begun")
RELEASE = text(
    "UPDATE job SET state = 'new', worker_id = NULL, lease_until = NULL, begun = false, "
    f"attempts = greatest(attempts - 1, 0) {_HELD}"
)
FINISH = text("""
UPDATE job SET state = told.state, outcome = told.outcome, message = told.message, seconds = told.seconds,
    lease_until = NULL, finished_at = now()
FROM unnest(CAST(:jobs AS bigint[]), CAST(:fences AS bigint[]), CAST(:states AS text[]), CAST(:outcomes AS text[]),
    CAST(:messages AS text[]), CAST(:seconds AS float8[])) AS told(id, fence, state, outcome, message, seconds)
WHERE job.id = told.id AND job.fence = told.fence AND job.lease_until IS NOT NULL
RETURNING job.id, job.fence
""")

# What was only waiting in a lost worker's batch is not to blame for its end.
_LOSE = """
UPDATE job SET losses = losses + begun::int, worker_id = NULL, lease_until = NULL, begun = false,
    state = CASE WHEN losses + begun::int >= :most_losses OR attempts >= :most_attempts THEN 'parked' ELSE 'new' END,
    message = CASE WHEN begun OR attempts >= :most_attempts THEN :message ELSE message END
"""
_LOSE_HELD = text(f"{_LOSE} {_HELD} RETURNING job.id, job.state, job.losses")
_LOSE_EXPIRED = text(f"""
WITH expired AS (
    SELECT id FROM job WHERE state = 'leased' AND lease_until < now() ORDER BY lease_until LIMIT :most
    FOR UPDATE SKIP LOCKED)
{_LOSE} FROM expired WHERE job.id = expired.id RETURNING job.id, job.state, job.losses
""")
_LOSE_WORKERS = text(f"{_LOSE} WHERE worker_id = :worker AND state = 'leased' RETURNING job.id, job.state, job.losses")

# A time to come is none: the server's clock was put back.
_MAY_REAP = text("""
SELECT NOT EXISTS (SELECT FROM reaper WHERE reaped_at BETWEEN now() - make_interval(secs => :pause_s) AND now())
    AND pg_try_advisory_xact_lock(:key)
""")

_RELEASE_UNKNOWN = text("""
UPDATE job SET state = 'new', worker_id = NULL, lease_until = NULL, attempts = greatest(attempts - 1, 0)
WHERE worker_id = :worker AND state = 'leased' AND NOT begun AND NOT (id = ANY(CAST(:jobs AS bigint[])))
""")

_ENROL = text("""
INSERT INTO enrolment (campaign_id, device, stack, revision)
SELECT campaign.id, :device, :stack, campaign.revision FROM campaign
WHERE (devices IS NULL OR :device = ANY(devices)) AND (stacks IS NULL OR :stack = ANY(stacks))
    AND NOT EXISTS (SELECT FROM enrolment known WHERE known.campaign_id = campaign.id AND known.device = :device
        AND known.stack = :stack AND known.revision >= campaign.revision)
ORDER BY campaign.id
ON CONFLICT (campaign_id, device, stack) DO UPDATE SET revision = excluded.revision
    WHERE enrolment.revision < excluded.revision
RETURNING campaign_id
""")
# A problem whose time is beyond all numbers keeps no other from its agents.
_MAKE_JOBS = text("""
INSERT INTO job (campaign_id, device, stack, network_config, suite, layer, count, estimate_s, weight)
SELECT campaign_id, :device, :stack, network_config, suite, layer, count, estimate_s, least(estimate_s, 1e18) * count
FROM campaign_problem WHERE campaign_id = ANY(CAST(:campaigns AS bigint[]))
ORDER BY campaign_id, network_config
ON CONFLICT DO NOTHING
""")


class Queue:
    """The jobs of a fleet, as its agents see them.

    Args:
        lease_s: how long a claim holds without being renewed.

    Every method raises UnreachableError where the server is away, and may be called again then.
    """

    def __init__(self, database: FleetDatabase, *, lease_s: float = LEASE_S) -> None:
        self._database = database
        self._lease_s = lease_s

    def enrol(self, kind: Kind) -> int:
        """Make the jobs of a kind for what was submitted since the last time; returns how many are new."""
        with self._database.transaction() as connection:
            return enrol(connection, kind)

    def claim(self, worker: UUID, kind: Kind, most: int, *, devices: int = 1, waiting: int = 0) -> list[Claimed]:
        """At most so many jobs of one campaign, the one of the highest priority, its heaviest first.

        Nobody else gets them until they are given back or the lease runs out. Where few are left it is fewer, down to
        none: what others' devices of that kind are to have.

        Args:
            devices: that the jobs are for.
            waiting: jobs that they have already and did not begin.
        """
        values = {"device": kind.device, "stack": kind.stack, "most": most, "worker": worker, "lease_s": self._lease_s}
        values |= {"devices": devices, "waiting": waiting, "most_counted": _MOST_COUNTED}
        with self._database.statement() as connection:
            rows = connection.execute(CLAIM, values).mappings().all()
        claimed = [_claimed(row, kind.device) for row in rows]
        return sorted(claimed, key=lambda each: 0.0 if each.task is None else each.task.weight, reverse=True)

    def renew(self, holds: Collection[Hold]) -> set[Hold]:
        """Hold jobs for another lease, all by one statement; returns those that are still held."""
        if not holds:
            return set()
        with self._database.statement() as connection:
            found = connection.execute(RENEW, _arrays(holds) | {"lease_s": self._lease_s})
            return {Hold(*row) for row in found.all()}

    def begin(self, holds: Collection[Hold]) -> None:
        """Note that jobs are being measured: they count as what a worker was lost over."""
        if holds:
            with self._database.statement() as connection:
                connection.execute(BEGIN, _arrays(holds))

    def release(self, holds: Collection[Hold]) -> None:
        """Give jobs back that were not measured; that costs them nothing."""
        if holds:
            with self._database.statement() as connection:
                connection.execute(RELEASE, _arrays(holds))

    def release_unknown(self, worker: UUID, known: Collection[Hold]) -> None:
        """Give back what a worker holds and does not know of, since the answer to its claim was lost."""
        with self._database.statement() as connection:
            connection.execute(_RELEASE_UNKNOWN, {"worker": worker, "jobs": [hold.job for hold in known]})

    def lose(self, hold: Hold, message: str) -> None:
        """Give a job back over which a device was lost; at the second time it is parked."""
        with self._database.transaction() as connection:
            connection.execute(BEGIN, _arrays([hold]))
            _note_lost(connection, connection.execute(_LOSE_HELD, _arrays([hold]) | _limits(message)).all())

    def lose_worker(self, worker: UUID) -> None:
        """Give back what an agent held that is known to be dead; what it had begun has cost it."""
        message = "the agent that measured it was killed"
        with self._database.transaction() as connection:
            lost = connection.execute(_LOSE_WORKERS, _limits(message) | {"worker": worker}).all()
            _note_lost(connection, lost)
            connection.execute(text("UPDATE worker SET state = 'gone' WHERE id = :worker"), {"worker": worker})

    def finish(self, finishes: Sequence[Finish]) -> set[Hold]:
        """Note what became of jobs; returns the holds it was noted for.

        A job that others have claimed since is theirs, or done: what was measured of it stays true and stays stored.
        """
        if not finishes:
            return set()
        finishes = sorted(finishes, key=lambda each: each.hold.job)
        values = _arrays([each.hold for each in finishes]) | {
            "states": ["failed" if each.outcome == TuneStatus.FAILED else "done" for each in finishes],
            "outcomes": [each.outcome for each in finishes],
            "messages": [printable(each.message, _MESSAGE_CHARS) for each in finishes],
            "seconds": [each.seconds for each in finishes],
        }
        with self._database.statement() as connection:
            return {Hold(*row) for row in connection.execute(FINISH, values).all()}

    def paused(self, campaigns: Iterable[int]) -> set[int]:
        """Those of the campaigns that are paused, or are no more."""
        asked = set(campaigns)
        statement = text("SELECT id FROM campaign WHERE NOT paused AND id = ANY(CAST(:campaigns AS bigint[]))")
        with self._database.statement() as connection:
            return asked - set(connection.execute(statement, {"campaigns": list(asked)}).scalars())

    def options(self, campaign: int) -> object:
        """The options of a campaign, as the server has them; None where it is no more."""
        statement = text("SELECT options FROM campaign WHERE id = :campaign")
        with self._database.statement() as connection:
            return connection.execute(statement, {"campaign": campaign}).scalar()

    def register(self, agent: Agent, version: str) -> None:
        """Make an agent known."""
        statement = text(
            "INSERT INTO worker (id, host, version, state) VALUES (:id, :host, :version, 'ready') "
            "ON CONFLICT (id) DO UPDATE SET state = 'ready', beat_at = now()"
        )
        values = {"id": agent.id, "host": printable_name(agent.host), "version": version}
        with self._database.statement() as connection:
            connection.execute(statement, values)

    def beat(self, agent: Agent, *, state: str, problems: int, age_s: float) -> None:
        """Note that an agent lives, and what its outbox holds."""
        statement = text(
            "UPDATE worker SET state = :state, beat_at = now(), outbox_problems = :problems, outbox_age_s = :age_s "
            "WHERE id = :id"
        )
        values = {"id": agent.id, "state": state, "problems": problems, "age_s": age_s}
        with self._database.statement() as connection:
            connection.execute(statement, values)

    def reap(self, *, pause_s: float = 0.0) -> int:
        """Take back what dead workers hold; returns how many jobs. One caller at a time does so, the others nothing.

        It reads all jobs that are leased, so that none need be in order of its lease.

        Args:
            pause_s: where anybody did so less than so long ago nothing is done.

        Where the server was restarted since the last time, nobody could renew anything meanwhile: all leases begin
        anew.
        """
        with self._database.transaction() as connection:
            if not connection.execute(_MAY_REAP, {"key": _REAPER_LOCK, "pause_s": pause_s}).scalar():
                return 0
            self._extend_after_outage(connection)
            values = _limits("its lease ran out: the host that measured it is gone") | {"most": MOST_REAPED}
            lost = connection.execute(_LOSE_EXPIRED, values).all()
            _note_lost(connection, lost)
            self._tidy(connection)
            return len(lost)

    def _extend_after_outage(self, connection: Connection) -> None:
        was_restarted = connection.execute(text("SELECT pg_postmaster_start_time() > reaped_at FROM reaper")).scalar()
        connection.execute(
            text("INSERT INTO reaper DEFAULT VALUES ON CONFLICT (single) DO UPDATE SET reaped_at = now()")
        )
        if was_restarted:
            statement = text(
                "UPDATE job SET lease_until = greatest(lease_until, now() + make_interval(secs => :lease_s)) "
                "WHERE state = 'leased'"
            )
            count = connection.execute(statement, {"lease_s": self._lease_s}).rowcount
            note(connection, "outage", {"leases": count})

    def _tidy(self, connection: Connection) -> None:
        connection.execute(
            text(
                "UPDATE worker SET state = 'gone' WHERE state <> 'gone' "
                "AND beat_at < now() - make_interval(secs => :silent_s)"
            ),
            {"silent_s": 2 * self._lease_s},
        )
        old = text("DELETE FROM event WHERE at < now() - make_interval(days => :days)")
        connection.execute(old, {"days": KEPT_EVENTS_DAYS})


def enrol(connection: Connection, kind: Kind) -> int:
    """Make the jobs of a kind for what was submitted since the last time; returns how many are new."""
    values: dict[str, Any] = {"device": kind.device, "stack": kind.stack}
    campaigns = connection.execute(_ENROL, values).scalars().all()
    if not campaigns:
        return 0
    return connection.execute(_MAKE_JOBS, values | {"campaigns": list(campaigns)}).rowcount


def note(connection: Connection, kind: str, detail: dict[str, Any], *, job: int | None = None) -> None:
    """Keep what happened, for people."""
    connection.execute(schema.happening.insert().values(kind=kind, job_id=job, detail=detail))


def _note_lost(connection: Connection, lost: Iterable[Any]) -> None:
    for job, state, losses in lost:
        if losses:
            note(connection, "parked" if state == "parked" else "lost", {"losses": losses}, job=job)


def _arrays(holds: Iterable[Hold]) -> dict[str, Any]:
    found = sorted(holds, key=lambda hold: hold.job)  # in one order, so that two statements do not wait for each other
    return {"jobs": [hold.job for hold in found], "fences": [hold.fence for hold in found]}


def _limits(message: str) -> dict[str, Any]:
    return {"most_losses": MOST_LOSSES, "most_attempts": MOST_ATTEMPTS, "message": printable(message, _MESSAGE_CHARS)}


def _claimed(row: RowMapping, device: str) -> Claimed:
    """A job as the server tells of it; it is checked like a foreign file."""
    hold, campaign = Hold(int(row["id"]), int(row["fence"])), int(row["campaign_id"])
    try:
        problem = ProblemDescription.from_network_config(row["network_config"])
    except InvalidProblemError as error:
        return Claimed(hold=hold, campaign=campaign, task=None, refusal=str(error))
    estimate_s, count = float(row["estimate_s"]), int(row["count"])
    if not (0 <= estimate_s < MAX_INT and 1 <= count < MAX_INT):
        told = f"estimate_s={estimate_s}, count={count} are no time and no count"
        return Claimed(hold=hold, campaign=campaign, task=None, refusal=told)
    request = SuiteProblem(
        problem=problem, suite=printable_name(row["suite"]), layer=printable_name(row["layer"]), count=count
    )
    task = Task(request=request, kind=device, estimate_s=estimate_s, losses=int(row["losses"]), ticket=hold.job)
    return Claimed(hold=hold, campaign=campaign, task=task)
