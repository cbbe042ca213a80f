"""The agent of a host on the CPU place: jobs become rows on the server, whatever ends in between."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from helpers.processes import faulty_services
from helpers.processes.waiting import wait_until
from sqlalchemy import text

from miofind.core.problem import ProblemDescription
from miofind.device.device import Device
from miofind.errors import DatabaseError, InvalidOptionError
from miofind.finddb import History, ProblemKey, Store
from miofind.fleet import health, link
from miofind.fleet.agent import AgentEnd, FleetAgent, Member
from miofind.fleet.campaign_options import options_of
from miofind.fleet.campaigns import set_paused, submit
from miofind.fleet.database import FleetDatabase
from miofind.fleet.metrics import text_of
from miofind.fleet.outbox import ORPHANED, Outbox
from miofind.fleet.stack import kind_of, stack_of
from miofind.fleet.values import CampaignRequest, GpuState, Hold
from miofind.options import FindOptions
from miofind.runtime.handle import Handle
from miofind.solver.registry import Registry
from miofind.suites import SuiteProblem
from miofind.tune import device_processes
from miofind.tune.values import TuneFinished, TuneOptions, TuneStarted
from miofind.tune.worker import tuned

pytestmark = pytest.mark.usefixtures("forked_children")

OPTIONS = TuneOptions(find=FindOptions(only=("ConvCpuIm2colGemm",)))
REQUEST = CampaignRequest(name="small", options=OPTIONS)


def problem(k: int) -> ProblemDescription:
    return ProblemDescription.convolution(x=(1, 2, 5, 5), w=(k, 2, 3, 3), padding=1)


def named(problems: Iterable[ProblemDescription]) -> list[SuiteProblem]:
    return [SuiteProblem(problem=each, suite="small", layer=f"layer{each.k}", count=1) for each in problems]


PROBLEMS = named(problem(k) for k in (1, 2, 3, 4))


class Host:
    """A fleet of one host over files of one folder, and a server's FindDB that can be away."""

    def __init__(self, url: str, folder: Path, stack: ExitStack) -> None:
        self.database = FleetDatabase(url)
        self.database.create()
        stack.callback(self.database.close)
        self.local_path = folder / "host.db"
        self.server = stack.enter_context(Store(folder / "server.db"))
        self._stack = stack

    def agent(self, devices: int = 1, server: object = None) -> FleetAgent:
        device = Device.cpu()
        handles = [
            self._stack.enter_context(Handle(replace(device, memory_bytes=i), database=self.local_path, strict=True))
            for i in range(devices)
        ]
        return FleetAgent(handles, self.database, server or self.server)  # type: ignore[arg-type]

    def states(self) -> dict[str, int]:
        with self.database.transaction() as connection:
            found = connection.execute(text("SELECT state, count(*) FROM job GROUP BY state")).all()
        return {str(state): int(count) for state, count in found}

    def rows(self, store: Store | None = None) -> set[tuple[ProblemKey, str]]:
        return {(key, row.id) for key, row in (store or self.server).rows()}

    def local_rows(self) -> set[tuple[ProblemKey, str]]:
        with Store(self.local_path, read_only=True) as store:
            return self.rows(store)


def options_without_sandbox(values: object) -> TuneOptions:
    """As the server's options are read, but for the measuring child, whose start costs a second."""
    options = options_of(values)
    return replace(options, find=replace(options.find, isolate=False))


@pytest.fixture
def host(postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("MIOFIND_SYSTEM_DB", "")
    monkeypatch.setattr(link, "options_of", options_without_sandbox)
    with ExitStack() as stack:
        yield Host(postgres_url, tmp_path, stack)


def run_in_thread(agent: FleetAgent) -> tuple[threading.Thread, list[AgentEnd]]:
    ends: list[AgentEnd] = []
    thread = threading.Thread(target=lambda: ends.append(agent.run(until_idle_s=0.5)))
    thread.start()
    return thread, ends


def test_jobs_become_rows_on_the_server(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "options_of", options_of)
    submit(host.database, REQUEST, PROBLEMS)
    agent = host.agent()
    end = agent.run(until_idle_s=0.5)
    assert (end.done, end.failed, end.is_merged, end.lost) == (4, 0, True, ())
    assert host.states() == {"done": 4}
    assert host.rows() == host.local_rows() != set()
    text_now = text_of(agent.metrics())
    assert 'outcome="solved"} 4' in text_now
    assert 'miofind_jobs_held{stage="measured"} 0' in text_now
    assert {key.network_config for key, _ in host.rows()} == {each.problem.network_config for each in PROBLEMS}


def test_a_volume_becomes_rows_of_images_on_the_server(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a wrong canary would have doubted."""
    monkeypatch.setattr(Member, "follows_canaries", True)
    volume = ProblemDescription.convolution(x=(1, 2, 3, 5, 5), w=(2, 2, 3, 1, 1))
    submit(host.database, REQUEST, named([volume]))
    agent = host.agent()
    (member,) = agent.members
    (handle,) = member._processes._handles
    agent.link.devices = agent._devices()
    agent.link._step()
    task = member.tasks.take(member.kind.device)
    assert task is not None
    member._take(TuneStarted(device=0, task=task))
    member._take(TuneFinished(device=0, task=task, result=tuned(task, handle, task.options or OPTIONS)))
    agent._courier.merge()
    assert {key.network_config for key, _ in host.rows()} == {volume.flattened.network_config}
    (measured,) = member.unproven
    assert {*measured.rows(host.server)} == {row for _, row in host.rows()} != set()
    agent._outbox.close()


def test_what_the_server_knows_is_not_measured_again(host: Host, tmp_path: Path) -> None:
    submit(host.database, REQUEST, PROBLEMS[:2])
    host.agent().run(until_idle_s=0.5)
    before = host.rows()
    host.local_path = tmp_path / "another host.db"
    submit(host.database, replace(REQUEST, name="again"), PROBLEMS[:2])
    host.agent().run(until_idle_s=0.5)
    assert host.rows() == host.local_rows() == before
    with host.database.transaction() as connection:
        outcomes = connection.execute(text("SELECT outcome FROM job ORDER BY id")).scalars().all()
    assert outcomes == ["tuned", "tuned", "known", "known"]


class Illegible:
    """A server's FindDB of which a problem cannot be read."""

    def __init__(self, store: Store, network_config: str) -> None:
        self._store = store
        self._network_config = network_config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def histories_of(self, keys: Iterable[ProblemKey]) -> list[History]:
        keys = list(keys)
        if any(key.network_config == self._network_config for key in keys):
            raise DatabaseError("a row is damaged")
        return self._store.histories_of(keys)


def test_what_of_the_server_cannot_be_read_costs_itself_alone(host: Host, tmp_path: Path) -> None:
    submit(host.database, REQUEST, PROBLEMS)
    host.agent().run(until_idle_s=0.5)
    host.local_path = tmp_path / "another host.db"
    submit(host.database, replace(REQUEST, name="again"), PROBLEMS)
    damaged = PROBLEMS[1].problem.network_config
    host.agent(server=Illegible(host.server, damaged)).run(until_idle_s=0.5)
    with host.database.transaction() as connection:
        statement = text("SELECT network_config, outcome FROM job WHERE id > 4")
        outcomes = {row.network_config: row.outcome for row in connection.execute(statement)}
    assert outcomes.pop(damaged) == "tuned"
    assert [*outcomes.values()] == ["known"] * 3


class Away:
    """A server's FindDB that refuses until it is back."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.back = threading.Event()
        self.refused = threading.Event()

    def history(self, device: str, network_config: str) -> History | None:
        self._check()
        return self._store.history(device, network_config)

    def histories_of(self, keys: Iterable[ProblemKey]) -> list[History]:
        self._check()
        return self._store.histories_of(keys)

    def add(self, histories: Iterable[History]) -> int:
        self._check()
        return self._store.add(histories)

    def _check(self) -> None:
        if not self.back.is_set():
            self.refused.set()
            raise DatabaseError("the server is away")


def test_an_outage_of_the_server_stops_nothing_and_loses_nothing(host: Host) -> None:
    submit(host.database, REQUEST, PROBLEMS)
    server = Away(host.server)
    agent = host.agent(server=server)
    thread, ends = run_in_thread(agent)
    wait_until(lambda: len(agent.holdings.holds) == agent.members[0].done == 4, "all are measured, none is finished")
    server.refused.wait()
    assert host.states() == {"leased": 4}
    server.back.set()
    thread.join()
    assert (ends[0].is_merged, host.states()) == (True, {"done": 4})
    assert host.rows() == host.local_rows()


def test_the_next_agent_merges_what_a_killed_one_left(host: Host) -> None:
    submit(host.database, REQUEST, PROBLEMS[:2])
    server = Away(host.server)
    agent = host.agent(server=server)
    killed = AgentEnd(done=2, failed=0, lost=(), is_merged=False)
    agent._drained = lambda: killed  # type: ignore[method-assign]
    thread, _ = run_in_thread(agent)
    wait_until(lambda: agent.members[0].done == 2, "both are measured")
    agent._is_to_go_on = lambda: False  # type: ignore[method-assign]
    agent.link._over.set()
    agent.members[0].tasks.close()
    for each in (thread, agent.link, agent.members[0]):
        each.join()
    agent._courier._is_over = True
    agent._courier._wake.set()
    agent._courier.join()
    agent._outbox.close()
    assert (host.rows(), host.states()) == (set(), {"leased": 2})
    end = host.agent().run(until_idle_s=0.5)
    assert (end.is_merged, host.states()) == (True, {"done": 2})
    assert host.rows() == host.local_rows() != set()


def test_a_paused_campaign_is_given_back_and_goes_on(host: Host) -> None:
    submit(host.database, REQUEST, PROBLEMS)
    set_paused(host.database, "small", paused=True)
    assert host.agent().run(until_idle_s=0.5).done == 0
    set_paused(host.database, "small", paused=False)
    assert host.agent().run(until_idle_s=0.5).done == 4


def test_a_job_of_unknown_options_fails_and_says_so(host: Host) -> None:
    submit(host.database, REQUEST, PROBLEMS[:1])
    with host.database.transaction() as connection:
        connection.execute(text("""UPDATE campaign SET options = '{"isolate": false}'"""))
    host.agent().run(until_idle_s=0.5)
    with host.database.transaction() as connection:
        found = connection.execute(text("SELECT state, message FROM job")).one()
    assert found.state == "failed"
    assert "options that this release does not know: isolate" in found.message


def test_sigterm_drains(host: Host) -> None:
    submit(host.database, REQUEST, named(problem(k) for k in range(1, 40)))
    agent = host.agent()
    original = agent._is_to_go_on

    def interrupted() -> bool:
        if agent.members[0].done:
            raise KeyboardInterrupt
        return original()

    agent._is_to_go_on = interrupted  # type: ignore[method-assign]
    end = agent.run()
    assert end.is_merged
    found = host.states()
    assert "leased" not in found, "what was not measured is given back"
    assert 1 <= found["done"] < 39
    assert host.rows() == host.local_rows()
    with host.database.transaction() as connection:
        assert connection.execute(text("SELECT max(losses) FROM job")).scalar() == 0
        assert connection.execute(text("SELECT state FROM worker")).scalar() == "gone"


def test_a_job_that_ends_two_processes_is_parked_and_the_rest_is_done(
    host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device_processes._DeviceThread, "_serve", staticmethod(faulty_services.tune))
    monkeypatch.setenv("DEVICE_FAULT", "exit at heaviest")
    monkeypatch.setenv("DEVICE_FOLDER", str(tmp_path))
    monkeypatch.setenv("DEVICE_HEAVIEST", PROBLEMS[-1].problem.network_config)
    monkeypatch.setattr(link, "_IDLE_S", (0.05, 0.1))  # far less than ends the agent: what is given back is taken again
    submit(host.database, REQUEST, PROBLEMS[2:], lambda problem: float(problem.k))

    def has_ended() -> bool:
        host.agent().run(until_idle_s=0.5)
        return "new" not in host.states()

    wait_until(has_ended, "a job that is lost for good")  # a busy host's agent may be idle before it takes it again
    assert host.states() == {"parked": 1, "done": 1}


def test_two_devices_share_a_batch(host: Host) -> None:
    submit(host.database, REQUEST, PROBLEMS)
    agent = host.agent(devices=2)
    assert agent.run(until_idle_s=0.5).done == 4
    assert host.states() == {"done": 4}


def test_a_gpu_that_the_server_has_forgotten_is_registered_again(host: Host) -> None:
    """It was restored from a backup. The agent ended at its next canaries."""
    agent = host.agent()
    (member,) = agent.members
    agent.link._step()
    with host.database.transaction() as connection:
        connection.execute(text("DELETE FROM gpu"))
    member.canary_times = {"a": 1.0}
    agent._follow_health()
    assert health.states(host.database, [member.device_name]) == {member.device_name: GpuState.READY}
    agent._outbox.close()


def test_a_quarantined_gpu_gives_its_jobs_back_until_it_is_cleared(host: Host) -> None:
    submit(host.database, REQUEST, PROBLEMS)
    agent = host.agent()
    (member,) = agent.members
    agent.link.devices = agent._devices()
    agent.link._step()
    assert agent.holdings.load(member.kind.device).waiting == 2
    health.set_state(host.database, [member.device_name], GpuState.QUARANTINED, "too hot")
    agent._follow_health()
    agent.link._step()
    assert (member.tasks.is_held, agent.link.devices, host.states()) == (True, {}, {"new": 4})
    health.set_state(host.database, [member.device_name], GpuState.READY)
    agent._follow_health()
    agent.link._step()
    assert (member.tasks.is_held, host.states()) == (False, {"leased": 2, "new": 2})
    agent._outbox.close()


def test_a_full_disk_ends_the_agent_and_keeps_no_job(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(host.database, REQUEST, PROBLEMS)
    agent = host.agent()

    def expect(keys: Iterable[object]) -> None:
        raise DatabaseError("the disk is full")

    monkeypatch.setattr(agent._outbox, "expect", expect)
    with pytest.raises(DatabaseError, match="the disk is full"):
        agent.run()
    assert host.states() == {"new": 4}


def test_one_agent_has_a_findb(host: Host) -> None:
    agent = host.agent()
    with pytest.raises(DatabaseError, match="another agent of the fleet uses this FindDB"):
        host.agent()
    agent._outbox.close()
    with Handle(Device.cpu(), database=":memory:") as handle, pytest.raises(InvalidOptionError, match="in a file"):
        FleetAgent([handle], host.database, host.server)


def test_the_outbox_outlives_its_agent(tmp_path: Path) -> None:
    key = ProblemKey(device="d", network_config="n")
    first, second = uuid4(), uuid4()
    outbox = Outbox(tmp_path / "of a new" / "user" / "finddb.db")
    assert outbox.succeed(first) == []
    outbox.expect([(key, Hold(7, 1))])
    assert outbox.orphans() == []
    outbox.close()
    outbox = Outbox(tmp_path / "of a new" / "user" / "finddb.db")
    assert (outbox.succeed(second), outbox.orphans()) == ([first], [key])
    outbox.expect([(key, Hold(8, 1))])
    outbox.forget([(key, ORPHANED)])
    assert (outbox.orphans(), len(outbox)) == ([], 1)
    outbox.close()


def test_a_job_that_is_lost_and_claimed_again_stays_noted(host: Host) -> None:
    """What was merged of its first claim had the note of the second dropped; a kill then left rows behind."""
    submit(host.database, REQUEST, PROBLEMS[:1])
    agent = host.agent()
    (member,) = agent.members
    agent.link.devices = agent._devices()
    agent.link._step()
    task = member.tasks.take(member.kind.device)
    assert task is not None
    member.tasks.give_back(task)
    agent.link._step()
    assert agent.holdings.load(member.kind.device).waiting == 1, "it is claimed again"
    agent._courier.merge()
    agent._outbox.close()
    successor = host.agent()
    assert [key.network_config for key in successor._outbox.orphans()] == [PROBLEMS[0].problem.network_config]
    successor._outbox.close()


def test_an_agent_that_dies_before_it_tells_of_its_predecessor_leaves_that_to_the_next(host: Host) -> None:
    """Jobs of agents that were killed twice in a row waited for their leases to run out."""
    submit(host.database, REQUEST, PROBLEMS)
    first = host.agent()
    first.link.devices = first._devices()
    first.link._step()
    assert host.states() == {"leased": 2, "new": 2}
    first._outbox.close()
    host.agent()._outbox.close()  # killed while the server is away
    third = host.agent()
    third.link._agree()
    assert host.states() == {"new": 4}
    third._outbox.close()
    fourth = host.agent()
    assert fourth.link._predecessors == [third.agent.id], "whom the server was told of is forgotten"
    fourth._outbox.close()


def test_a_damaged_note_says_how_to_lose_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.db.fleet").write_bytes(b"no database" * 500)
    with pytest.raises(DatabaseError, match=r"not a database. Merge the FindDB .* by `miofind db merge`, then remove"):
        Outbox(tmp_path / "a.db")


def test_a_stack_tells_code_apart() -> None:
    device, registry = Device.cpu(), Registry.default()

    class Newer(type(registry["ConvCpuDirect"])):  # type: ignore[misc]
        version = registry["ConvCpuDirect"].version + 1

    changed = registry.with_solvers(Newer())
    assert stack_of(device, registry) != stack_of(device, changed)
    assert kind_of(device, registry).device == device.identity
