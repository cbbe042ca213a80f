"""What a thousand workers ask of the fleet's server: claims, finishes and rows a second, and how long they wait.

    python benchmarks/fleet_scale.py --json benchmarks/results/fleet_scale.json

Needs no GPU and measures nothing: agents are simulated by their calls of the queue, from processes on the machine that
the server runs on, too. They do not read the problems that they get, which takes a real agent 0.3 ms each of its own
host's time. The server has the settings of PostgreSQL itself. Three loads, one after another:

- single: clients claim one job and finish it, as fast as they can;
- fleet: 125 agents of 8 workers each that begin within 5 s, a problem every 0.28 s on each worker (one H200 without
  search). They claim and call as real ones do: at first two jobs a worker, then 128 whenever half of 64 a worker are
  left; each second what was begun and what is done, every 5 s campaigns and enrolments, every 15 s a beat and a look
  for expired leases, every 30 s renewals;
- rows: one writer merges histories of new problems into the FindDB.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import script
from finddb_figures import DEVICE, network_config, percentile, provenance, rows
from sqlalchemy import RowMapping, text

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from helpers.finddb.postgres_server import new_database, new_server

from miofind.core.problem import ProblemDescription
from miofind.finddb import History, Store, environment_id
from miofind.fleet import health, queue
from miofind.fleet.database import FleetDatabase
from miofind.fleet.link import BATCH_S, MOST_A_CLAIM, MOST_JOBS, Duty
from miofind.fleet.queue import REAP_S, RENEW_S, Queue
from miofind.fleet.values import Agent, Claimed, Finish, Hold, Kind

KIND = Kind(device=DEVICE, stack="simulated")
WORKERS_AN_AGENT = 8
PROBLEM_S = 0.28
BEGIN_WITHIN_S = 5.0
TELL_S = 1.0
CAMPAIGNS_S = 5.0
PROCESSES = 4
DURABLE = ("fsync=on", "full_page_writes=on", "shared_buffers=128MB")  # as PostgreSQL is without settings
_STAMP = "2026-01-01T00:00:00.000000Z"
Waits = dict[str, list[float]]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the server bore.

    Attributes:
        clients: that were connected.
        jobs_per_s: finished.
        calls_per_s: of all kinds.
        claim_median_ms, claim_p99_ms, finish_p99_ms: waits of the clients.
        late_share: of the fleet's rounds, those that began late since the one before took too long.
        server_mib: memory of the server's processes together, at the end.
        server_mib_early: the same after a fifth of the time.
        doubled: jobs that two clients finished.
    """

    clients: int
    seconds: float
    jobs_per_s: float
    calls_per_s: float
    claim_median_ms: float
    claim_p99_ms: float
    finish_p99_ms: float
    late_share: float
    server_mib_early: float
    server_mib: float
    doubled: int


class Client:
    """One agent's calls, timed."""

    def __init__(self, url: str) -> None:
        self._database = FleetDatabase(url)
        self._queue = Queue(self._database)
        self._agent = Agent(id=uuid4(), host="simulated")
        self.waits: Waits = defaultdict(list)
        self.finished: list[int] = []
        self.rounds = self.late = 0

    def single(self, until: float) -> None:
        """Claim one job and finish it, again and again."""
        while time.monotonic() < until:
            self._finish(self._claim(1))

    def fleet(self, until: float) -> None:
        """Work as an agent of several workers does."""
        time.sleep(random.uniform(0, BEGIN_WITHIN_S))
        self._queue.register(self._agent, "simulated")
        for number in range(WORKERS_AN_AGENT):
            health.register(self._database, f"{self._agent.id}:{number}", KIND, self._agent)
        held: list[Hold] = []
        owed, due = 0.0, time.monotonic()
        duties = [
            Duty(RENEW_S, lambda: self._timed("renew", lambda: self._queue.renew(held)), due + RENEW_S),
            Duty(CAMPAIGNS_S, lambda: (self._queue.paused([1]), self._queue.enrol(KIND))),
            Duty(REAP_S, self._reap_and_beat),
        ]
        wanted = 2 * WORKERS_AN_AGENT
        while due < until:
            for duty in duties:
                if time.monotonic() >= duty.due:
                    duty.work()
                    duty.due = time.monotonic() + duty.every_s
            if 2 * len(held) <= wanted:
                held += self._claim(min(MOST_A_CLAIM, wanted - len(held)), devices=WORKERS_AN_AGENT, waiting=len(held))
                wanted = WORKERS_AN_AGENT * min(MOST_JOBS, math.ceil(BATCH_S / PROBLEM_S))
            owed = min(owed + WORKERS_AN_AGENT * TELL_S / PROBLEM_S, len(held))
            done = held[: int(owed)]
            del held[: len(done)]
            owed -= len(done)
            self._timed("begin", lambda done=done: self._queue.begin(done))
            self._finish(done)
            due += TELL_S
            self.rounds += 1
            self.late += time.monotonic() > due
            time.sleep(max(0.0, due - time.monotonic()))
        self._queue.release(held)

    def _reap_and_beat(self) -> None:
        self._queue.beat(self._agent, state="ready", problems=0, age_s=0.0)
        self._queue.reap(pause_s=REAP_S / 2)

    def close(self) -> None:
        """Part with the server."""
        self._database.close()

    def _claim(self, most: int, *, devices: int = 1, waiting: int = 0) -> list[Hold]:
        claimed = self._timed(
            "claim", lambda: self._queue.claim(self._agent.id, KIND, most, devices=devices, waiting=waiting)
        )
        return [each.hold for each in claimed]

    def _finish(self, holds: list[Hold]) -> None:
        told = [Finish(hold=hold, outcome="tuned", seconds=PROBLEM_S) for hold in holds]
        self.finished += [hold.job for hold in self._timed("finish", lambda: self._queue.finish(told))]

    def _timed(self, name: str, call: Callable[[], Result]) -> Result:
        began = time.monotonic()
        found = call()
        self.waits[name].append(1e3 * (time.monotonic() - began))
        return found


def _unread(row: RowMapping, device: str) -> Claimed:
    return Claimed(hold=Hold(row["id"], row["fence"]), campaign=row["campaign_id"], task=None)


def _serve(url: str, kind: str, clients: int, seconds: float, told: multiprocessing.SimpleQueue[object]) -> None:
    """A process of several clients, each in a thread; tells of their waits."""
    queue._claimed = _unread
    made = [Client(url) for _ in range(clients)]
    until = time.monotonic() + seconds
    threads = [threading.Thread(target=getattr(client, kind), args=(until,)) for client in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    waits: Waits = defaultdict(list)
    for client in made:
        for name, found in client.waits.items():
            waits[name] += found
        client.close()
    finished = [job for client in made for job in client.finished]
    told.put((dict(waits), finished, sum(client.rounds for client in made), sum(client.late for client in made)))


def load(url: str, kind: str, clients: int, seconds: float) -> Load:
    """What the server bears of so many clients."""
    context = multiprocessing.get_context("spawn")
    told: multiprocessing.SimpleQueue[object] = context.SimpleQueue()
    counts = [clients // PROCESSES + (number < clients % PROCESSES) for number in range(PROCESSES)]
    processes = [context.Process(target=_serve, args=(url, kind, count, seconds, told)) for count in counts if count]
    for process in processes:
        process.start()
    time.sleep(seconds / 5)
    early = _server_mib()
    waits: Waits = defaultdict(list)
    finished: list[int] = []
    rounds = late = 0
    for _ in processes:
        of_process, jobs, its_rounds, its_late = told.get()  # type: ignore[misc]
        for name, found in of_process.items():
            waits[name] += found
        finished += jobs
        rounds, late = rounds + its_rounds, late + its_late
    mib = _server_mib()
    for process in processes:
        process.join()
    return Load(
        clients=clients,
        seconds=seconds,
        jobs_per_s=len(finished) / seconds,
        calls_per_s=sum(map(len, waits.values())) / seconds,
        claim_median_ms=percentile(waits["claim"], 50),
        claim_p99_ms=percentile(waits["claim"], 99),
        finish_p99_ms=percentile(waits["finish"], 99),
        late_share=late / rounds if rounds else 0.0,
        server_mib_early=early,
        server_mib=mib,
        doubled=len(finished) - len(set(finished)),
    )


def _server_mib() -> float:
    """Memory of all processes of PostgreSQL, shared pages counted once between them."""
    total = 0
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and (folder / "comm").read_text().strip() == "postgres":
                found = (folder / "smaps_rollup").read_text()
                total += int(found.partition("Pss:")[2].split()[0])
        except (OSError, IndexError):  # it has ended
            continue
    return total / 1024


def fill(url: str, jobs: int) -> None:
    """Make the jobs of a campaign."""
    made = ProblemDescription.convolution(x=(32, 64, 56, 56), w=(77777, 64, 3, 3), dtype="float16", layout="NHWC")
    before, _, after = made.network_config.partition("77777")
    with closing(FleetDatabase(url)) as database:
        database.create()
        with database.transaction() as connection:
            connection.execute(text("INSERT INTO campaign (name, options, revision) VALUES ('scale', '{}', 1)"))
            statement = text(
                "INSERT INTO campaign_problem (campaign_id, network_config, suite, layer, count, estimate_s) SELECT 1, "
                ":before || number || :after, 'scale', '', 1, random() FROM generate_series(1, :jobs) AS series(number)"
            )
            connection.execute(statement, {"before": before, "after": after, "jobs": jobs})
        assert Queue(database).enrol(KIND) == jobs


def rows_per_s(url: str, seconds: float) -> float:
    """Rows that one writer merges a second, in histories as a find without search makes them, 20 at a time."""
    rng, versions = random.Random(0), {"driver": "13.0"}
    environment, stored, number = environment_id(versions), 0, 0
    with Store(url) as store:
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            batch = [_history(rng, number + place, environment, versions) for place in range(20)]
            number += len(batch)
            stored += store.add(batch)
        return stored / (time.monotonic() - began)


def _history(rng: random.Random, number: int, environment: str, versions: dict[str, str]) -> History:
    measured = tuple(replace(row, environment=environment, created_at=_STAMP) for row in rows(rng, 8))
    config = network_config(number)
    return History(device=DEVICE, network_config=config, rows=measured, environments={environment: versions})


def main() -> None:
    """Run the script."""
    parser = script.parser(__doc__)
    parser.add_argument("--seconds", type=script.seconds, default=20.0, help="of each load")
    parser.add_argument("--agents", type=script.count, default=125)
    parser.add_argument("--jobs", type=script.count, default=200_000)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    asked = parser.parse_args()
    with ExitStack() as stack:
        server = stack.enter_context(new_server(*DURABLE))
        url = stack.enter_context(new_database(server.url))
        fill(url, asked.jobs)
        found = {"single": asdict(load(url, "single", 16, asked.seconds))}
        found["fleet"] = asdict(load(url, "fleet", asked.agents, asked.seconds))
        writer = rows_per_s(url, asked.seconds)
    for kind, figures in found.items():
        print(kind, *(f"  {name:18} {value:.2f}" for name, value in figures.items()), sep="\n")
    print(f"rows a second of one writer: {writer:.0f}")
    if asked.json is not None:
        told = provenance() | {"load_average": os.getloadavg()[0], **found, "rows_per_s_a_writer": writer}
        asked.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    if any(figures["doubled"] for figures in found.values()):
        sys.exit(1)


if __name__ == "__main__":
    script.run(main)
