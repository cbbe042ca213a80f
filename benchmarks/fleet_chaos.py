"""Kills everything of a fleet again and again, and looks what is missing, doubled or left.

    python benchmarks/fleet_chaos.py --seconds 60 --json benchmarks/results/fleet_chaos.json

Agents on the CPU place measure real small problems for a campaign that grows as long as the chaos lasts. Meanwhile
agents and their children are killed and stopped, backends of the server are terminated, and the server is ended as by a
power cut and started again. In the end all jobs must be done, every problem must have rows, and the server must hold
what the agents' FindDBs hold together, no more and no less. Ends with 1 where that is not so. The seed gives the same
order of the same blows, not the same times. One of them kills all agents and the server at once.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import script
from finddb_figures import provenance
from sqlalchemy import text

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from helpers.finddb.postgres_server import PostgresServer, new_database, new_server

from miofind.core.problem import ProblemDescription
from miofind.errors import DatabaseError
from miofind.finddb import Store
from miofind.fleet.campaigns import retry, submit
from miofind.fleet.database import FleetDatabase
from miofind.fleet.queue import LEASE_S
from miofind.fleet.status import status
from miofind.fleet.values import CampaignRequest, JobState
from miofind.options import FindOptions
from miofind.suites import SuiteProblem
from miofind.tune.values import TuneOptions

REQUEST = CampaignRequest(name="chaos", options=TuneOptions(find=FindOptions(only=("ConvCpuIm2colGemm",))))
BLOWS = (
    *("kill agent", "kill child", "stop agent", "stop child"),
    *("terminate backends", "restart server", "kill everything"),
)
_PAUSE_S = (0.3, 2.0)
_STOPPED_S = (0.5, 3.0)
_AHEAD = 10
_LIMIT_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Aftermath:
    """What is left of a fleet after the chaos.

    Attributes:
        blows: how many of each.
        jobs: by state.
        retried: jobs that had lost two devices each and were parked, and were measured again by `fleet retry`.
        claimed_again: jobs that were claimed more than once.
        rows: on the server.
        without_rows: problems of jobs that are done and of which the server has nothing.
        missing: entries of an agent's FindDB that the server lacks.
        surplus: entries of the server's that no agent's FindDB has.
        doubled: entries that the server has twice.
        findings: of a check of the server's FindDB.
        seconds: of the chaos, and until all was done.
    """

    blows: dict[str, int]
    jobs: dict[str, int]
    retried: int
    claimed_again: int
    rows: int
    without_rows: int
    missing: int
    surplus: int
    doubled: int
    findings: list[str]
    chaos_seconds: float
    seconds: float

    @property
    def is_whole(self) -> bool:
        """Whether the chaos left no trace."""
        wrong = self.without_rows or self.missing or self.surplus or self.doubled or self.findings
        return not wrong and self.jobs.keys() == {JobState.DONE.value}


class Agent:
    """One agent over a FindDB of its own, started again whenever it was killed."""

    def __init__(self, folder: Path, number: int, url: str) -> None:
        self.path = folder / f"agent{number}.db"
        self._log = folder / f"agent{number}.log"
        self._command = [sys.executable, "-m", "miofind", "fleet", "worker", "--database", url, "--device", "cpu"]
        self._environment = os.environ | {
            "MIOFIND_SYSTEM_DB": "",
            "MIOFIND_CACHE_DIR": str(folder / f"cache{number}"),
            "OPENBLAS_NUM_THREADS": "1",
        }
        self._process: subprocess.Popen[bytes] | None = None

    def keep_running(self) -> None:
        """Start it where it has ended."""
        if self._process is None or self._process.poll() is not None:
            with open(self._log, "ab") as log:
                command = [*self._command, "--db", str(self.path)]
                self._process = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    def drain(self) -> None:
        """End it as an operator would."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(_LIMIT_S)

    def kill(self) -> None:
        """End it as a power cut would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def log(self) -> str:
        """What it has told."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""


class Chaos:
    """A fleet on this machine, and what befalls it."""

    def __init__(self, server: PostgresServer, url: str, agents: list[Agent], seed: int) -> None:
        self.blows: Counter[str] = Counter()
        self._server = server
        self._url = url
        self.agents = agents
        self.random = random.Random(seed)
        self._order: list[str] = []

    def strike(self) -> None:
        """One blow; in every seven each kind comes once."""
        if not self._order:
            self._order = self.random.sample(BLOWS, len(BLOWS))
        blow = self._order.pop()
        agent = self.random.choice(self.agents)
        match blow:
            case "kill agent":
                agent.kill()
            case "kill child":
                _signal(self._child_of(agent), signal.SIGKILL)
            case "stop agent" | "stop child":
                pid = agent.pid if blow == "stop agent" else self._child_of(agent)
                _signal(pid, signal.SIGSTOP)
                time.sleep(self.random.uniform(*_STOPPED_S))
                _signal(pid, signal.SIGCONT)
            case "terminate backends":
                self._terminate_backends()
            case "restart server":
                self._server.kill()
                time.sleep(self.random.uniform(*_STOPPED_S))
                self._server.start()
            case "kill everything":
                for each in self.agents:
                    each.kill()
                self._server.kill()
                self._server.start()
        self.blows[blow] += 1

    def _child_of(self, agent: Agent) -> int | None:
        found = _descendants(agent.pid)
        return self.random.choice(found) if found else None

    def _terminate_backends(self) -> None:
        import psycopg

        with psycopg.connect(self._url, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid() AND random() < 0.7"
            )


def _signal(pid: int | None, number: signal.Signals) -> None:
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _descendants(pid: int) -> list[int]:
    """Its children and theirs, in no order; those that end meanwhile may be missing."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{waiting.pop()}/task").iterdir():
                waiting += (children := [int(word) for word in (task / "children").read_text().split()])
                found += children
    return sorted(found)


def problem(number: int) -> SuiteProblem:
    """One of any number of small problems."""
    made = ProblemDescription.convolution(x=(1, 2 + number % 7, 6, 6), w=(1 + number // 7, 2 + number % 7, 3, 3))
    return SuiteProblem(problem=made, suite="chaos", layer=f"layer{number}", count=1)


class Campaign:
    """One that grows, so that there is work as long as there is chaos."""

    def __init__(self, database: FleetDatabase) -> None:
        self.size = 0
        self.retried = 0
        self._database = database

    @property
    def jobs(self) -> dict[JobState, int]:
        """How many by state."""
        found = Counter[JobState]()
        for each in status(self._database).campaigns:
            found.update(each.jobs)
        return dict(found)

    def grow(self) -> None:
        """Have some more problems waiting."""
        with suppress(DatabaseError):
            jobs = self.jobs
            if jobs.get(JobState.NEW, 0) < _AHEAD:
                submit(self._database, REQUEST, [problem(number) for number in range(self.size + _AHEAD)])
                self.size += _AHEAD

    def is_done(self) -> bool:
        """Whether all jobs are; parked ones are measured again, as an operator would have it."""
        with suppress(DatabaseError):
            jobs = self.jobs
            if jobs.get(JobState.PARKED) or jobs.get(JobState.FAILED):
                self.retried += retry(self._database, REQUEST.name)
                return False
            return jobs.get(JobState.DONE, 0) == self.size > 0
        return False


def chaos(seconds: float, agents: int, seed: int) -> Aftermath:
    """What is left of a fleet after so many seconds of chaos.

    Raises:
        TimeoutError: not all jobs were done long after; the agents' logs are in the message.
    """
    with ExitStack() as stack:
        server = stack.enter_context(new_server())
        url = stack.enter_context(new_database(server.url))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="miofind-chaos-")))
        database = FleetDatabase(url)
        stack.callback(database.close)
        database.create()
        hosts = [Agent(folder, number, url) for number in range(agents)]
        for host in hosts:
            stack.callback(host.kill)
        storm, campaign = Chaos(server, url, hosts, seed), Campaign(database)
        began = time.monotonic()
        while time.monotonic() - began < seconds or sum(storm.blows.values()) < len(BLOWS):
            _keep_running(hosts)
            campaign.grow()
            time.sleep(storm.random.uniform(*_PAUSE_S))
            storm.strike()
        chaos_s = time.monotonic() - began
        if seconds < LEASE_S:
            _end_leases(database)
        while not campaign.is_done():
            _keep_running(hosts)
            if time.monotonic() - began > chaos_s + _LIMIT_S:
                raise TimeoutError(f"not done: {campaign.jobs}\n" + "\n".join(host.log for host in hosts))
            time.sleep(0.2)
        for host in hosts:
            host.drain()
        return _aftermath(database, url, storm, campaign, (chaos_s, time.monotonic() - began))


def _keep_running(hosts: list[Agent]) -> None:
    for host in hosts:
        host.keep_running()


def _end_leases(database: FleetDatabase) -> None:
    """Have what a killed agent may have claimed be free soon, as if its time were over."""
    with suppress(DatabaseError), database.transaction() as connection:
        connection.execute(text("UPDATE job SET lease_until = now() + interval '5 seconds' WHERE state = 'leased'"))


def _entries(store: Store) -> Counter[str]:
    """The ids of all rows, scopes and verdicts; the ids are hashes of what they say and of which problem."""
    found: Counter[str] = Counter()
    for history in store.histories():
        found.update(entry.id for entry in (*history.rows, *history.scopes, *history.verdicts))
    return found


def _aftermath(
    database: FleetDatabase, url: str, storm: Chaos, campaign: Campaign, seconds: tuple[float, float]
) -> Aftermath:
    union: set[str] = set()
    for host in storm.agents:
        with Store(host.path) as local:
            union |= _entries(local).keys()
    with Store(url) as store:
        held = _entries(store)
        solved = {key.network_config for key, row in store.rows() if row.usable}
        rows, findings = store.stats().rows, list(store.check())
    with database.transaction() as connection:
        done = connection.execute(text("SELECT network_config FROM job WHERE state = 'done'")).scalars().all()
        again = connection.execute(text("SELECT count(*) FROM job WHERE fence > 1")).scalar_one()
    return Aftermath(
        blows=dict(sorted(storm.blows.items())),
        jobs={state.value: count for state, count in campaign.jobs.items() if count},
        retried=campaign.retried,
        claimed_again=int(again),
        rows=rows,
        without_rows=len(set(done) - solved),
        missing=len(union - held.keys()),
        surplus=len(held.keys() - union),
        doubled=sum(count - 1 for count in held.values()),
        findings=findings,
        chaos_seconds=seconds[0],
        seconds=seconds[1],
    )


def main() -> None:
    """Run the script."""
    parser = script.parser(__doc__)
    parser.add_argument("--seconds", type=script.seconds, default=60.0, help="of chaos")
    parser.add_argument("--agents", type=script.count, default=2)
    parser.add_argument("--seed", type=script.at_least(0), default=None, help="of the order of the blows")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    asked = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if asked.seed is None else asked.seed
    print(f"seed {seed}", flush=True)
    found = chaos(asked.seconds, asked.agents, seed)
    for name, value in asdict(found).items():
        print(f"{name:14} {value}")
    if asked.json is not None:
        told = provenance() | {"seed": seed, "agents": asked.agents, "chaos": asdict(found)}
        asked.json.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    if not found.is_whole:
        sys.exit(1)


if __name__ == "__main__":
    script.run(main)
