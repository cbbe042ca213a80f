"""Dask places agents, tells them to drain and loses nothing of theirs, whatever of it dies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.processes.waiting import LIMIT_S, wait_until

from miofind.errors import InvalidOptionError, MissingEnvironmentError

pytest.importorskip("distributed")

from distributed import LocalCluster

from miofind.fleet import dask_agents
from miofind.fleet.dask_agents import RESOURCE, Agent, Agents, TlsFiles, connected, refuse_open_address

# Notes that it began, and what told it to end.
AGENT = """
import os, signal, sys, time
def note(what):
    path = os.path.join(sys.argv[1], f"{os.getpid()}.{what}")
    open(path + ".part", "w").close()
    os.rename(path + ".part", path)
def drain(*_):
    note("drained")
    sys.exit(0)
signal.signal(signal.SIGTERM, drain)
note(os.environ.get("NOTED", "began"))
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    return folder


def agent(notes: Path) -> Agent:
    return Agent(("-c", AGENT, str(notes)))


def noted(notes: Path, what: str) -> set[int]:
    """Process ids of the agents that have noted it."""
    return {int(path.name.partition(".")[0]) for path in notes.iterdir() if path.name.endswith(f".{what}")}


@contextmanager
def cluster(**settings: object) -> Iterator[tuple[LocalCluster, Agents]]:
    """Two workers with room for an agent, in processes of their own."""
    options = {"n_workers": 2, "processes": True, "threads_per_worker": 1, "dashboard_address": ":0"}
    options |= {"resources": {RESOURCE: 1}} | settings
    with LocalCluster(**options) as made, connected(made.scheduler_address) as agents:
        yield made, agents


def test_each_worker_with_room_runs_an_agent_which_drains_when_it_is_told(notes: Path) -> None:
    with cluster() as (_, agents):
        assert len(agents.hosts()) == 2
        agents.start(agent(notes))
        wait_until(lambda: len(noted(notes, "began")) == 2, "what agents do")
        agents.stop()
        assert noted(notes, "drained") == noted(notes, "began")
        wait_until(lambda: [event["what"] for event in agents.events()].count("drained") == 2, "two events")


def test_a_worker_without_room_runs_none(notes: Path) -> None:
    with cluster(n_workers=1, resources={}) as (_, agents):
        assert agents.hosts() == ()
        agents.start(agent(notes))
        agents.stop()
        assert agents.events() == ()
        assert not list(notes.iterdir())


def test_an_agent_that_ends_is_started_again_and_one_of_wrong_arguments_is_not(notes: Path) -> None:
    with cluster(n_workers=1) as (_, agents):
        agents.start(agent(notes))
        wait_until(lambda: len(noted(notes, "began")) == 1, "what agents do")
        (first,) = noted(notes, "began")
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: len(noted(notes, "began")) == 2, "what agents do")
        agents.start(Agent(("-c", "raise SystemExit(2)")))
        wait_until(lambda: agents.events()[-1].get("code") == 2, "what agents do")
        with pytest.raises(MissingEnvironmentError, match="exit code 2"):
            agents.check()
        assert noted(notes, "drained") == noted(notes, "began") - {first}


def test_agents_that_cannot_work_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_agents, "_FIRST_PAUSE_S", 0.01)
    with cluster(n_workers=1, processes=False, protocol="tcp://", host="127.0.0.1") as (_, agents):
        agents.check()
        agents.start(Agent(("-c", "import sys; sys.exit('no disk')")))
        wait_until(lambda: [event["what"] for event in agents.events()].count("ended") >= 5, "what agents do")
        with pytest.raises(MissingEnvironmentError, match="all 1 of Dask's workers end at once, with exit code 1"):
            agents.check()


def test_agents_of_killed_workers_drain_by_themselves(notes: Path) -> None:
    with cluster(n_workers=1) as (made, agents):
        agents.start(agent(notes))
        wait_until(lambda: len(noted(notes, "began")) == 1, "what agents do")
        (first,) = noted(notes, "began")
        (nanny,) = made.workers.values()
        os.kill(nanny.pid, signal.SIGKILL)
        wait_until(lambda: first in noted(notes, "drained"), "what agents do")
        wait_until(lambda: len(noted(notes, "began")) == 2, "a second agent")  # the nanny's next worker runs one again


def test_agents_outlive_no_cluster(notes: Path) -> None:
    with cluster() as (_, agents):
        agents.start(agent(notes))
        wait_until(lambda: len(noted(notes, "began")) == 2, "what agents do")
    wait_until(lambda: noted(notes, "drained") == noted(notes, "began"), "what agents do")


@pytest.mark.parametrize(
    "address", ["", "host", "host:8786", "http://host:8786", "tcp://host:8786", "tcp://10.0.0.1:8786", "tls://host:x"]
)
def test_addresses_that_are_none_or_open_to_all_are_refused(address: str) -> None:
    with pytest.raises(InvalidOptionError, match=r"scheduler="):
        refuse_open_address(address)


@pytest.mark.parametrize("address", ["tls://host:8786", "tcp://127.0.0.1:8786", "tcp://localhost:1", "tcp://[::1]:1"])
def test_addresses_of_this_host_need_no_tls(address: str) -> None:
    refuse_open_address(address)


def test_a_scheduler_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("miofind.fleet.dask_agents._CONNECTS_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with (
        pytest.raises(MissingEnvironmentError, match="no Dask scheduler answers"),
        connected(f"tcp://127.0.0.1:{port}"),
    ):
        pass


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate and a key that sign themselves."""
    folder = tmp_path_factory.mktemp("tls")
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run([*request, *files], check=True, capture_output=True, timeout=LIMIT_S)
    return folder


def test_agents_are_reached_over_tls_and_by_nobody_without_a_certificate(
    notes: Path, authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distributed import Security

    cert, key = str(authority / "cert.pem"), str(authority / "key.pem")
    roles = {f"tls_{role}_{kind}": path for role in ("scheduler", "worker", "client")
             for kind, path in (("cert", cert), ("key", key))}  # fmt: skip
    security = Security(require_encryption=True, tls_ca_file=cert, **roles)
    one = {"n_workers": 1, "processes": False, "dashboard_address": ":0", "resources": {RESOURCE: 1}}
    with LocalCluster(**one, protocol="tls://", security=security) as made:
        with connected(made.scheduler_address, TlsFiles(ca=cert, cert=cert, key=key)) as agents:
            agents.start(agent(notes))
            wait_until(lambda: len(noted(notes, "began")) == 1, "what agents do")
            agents.stop()
            assert len(noted(notes, "drained")) == 1
        monkeypatch.setattr("miofind.fleet.dask_agents._CONNECTS_S", 1)
        with pytest.raises(MissingEnvironmentError), connected(made.scheduler_address):
            pass


def test_a_certificate_that_is_not_there_is_told(authority: Path) -> None:
    files = TlsFiles(ca=str(authority / "none.pem"), cert="", key="")
    with pytest.raises(InvalidOptionError, match="is no file"), connected("tls://127.0.0.1:1", files):
        pass


def test_importing_the_fleet_imports_no_dask() -> None:
    code = "import miofind.fleet, sys; assert 'distributed' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LIMIT_S)
