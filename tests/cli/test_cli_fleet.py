"""`miofind fleet` from end to end on one host: init, submit, worker, status, and what people do with campaigns."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest
from helpers.commands.cli_runner import FORWARD, TINY, run, run_json, use_own_folders

from miofind.cli.fleet import _watch
from miofind.cli.fleet_launch import watched
from miofind.errors import DatabaseError
from miofind.finddb import Store
from miofind.fleet import health
from miofind.fleet.database import FleetDatabase, UnreachableError
from miofind.fleet.queue import Queue
from miofind.fleet.status import FleetStatus
from miofind.fleet.values import Kind


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_folders(tmp_path, monkeypatch)


def test_a_campaign_from_submit_to_done(postgres_url: str, tmp_path: Path) -> None:
    where = ("--database", postgres_url)
    assert "run `miofind fleet init` on it" in run("fleet", "status", *where, code=4).stderr
    assert "is ready" in run("fleet", "init", *where).stdout
    submit = ("fleet", "submit", *where, "--name", "small", "--only", "ConvCpuIm2colGemm", *TINY)
    assert run_json(*submit, "--dry-run")["problems"] == 3
    assert "no campaign was submitted yet" in run("fleet", "status", *where).stdout
    assert run_json(*submit)["added"] == 3
    assert "no agent yet" in run("fleet", "status", *where).stdout
    end = run_json("fleet", "worker", *where, "--device", "cpu", "--until-idle", "0.5")
    assert (end["done"], end["failed"], end["is_merged"]) == (3, 0, True)
    found = run_json("fleet", "status", *where)
    assert [campaign["jobs"]["done"] for campaign in found["campaigns"]] == [3]
    (gpu,) = found["gpus"]
    assert (gpu["state"], gpu["worker"]) == ("ready", "gone")
    shown = run("fleet", "status", *where).stdout
    assert "small" in shown
    assert gpu["name"] in shown
    with Store(postgres_url) as server, Store(tmp_path / "finddb.db") as local:
        assert set(server.rows()) == set(local.rows())
    with Store(postgres_url) as server:
        doubted = next(row.id for _, row in server.rows() if row.usable)
    with closing(FleetDatabase(postgres_url)) as database:
        health.doubt(database, gpu["name"], [doubted])
    released = str(tmp_path / "release.db")
    assert run_json("db", "release", postgres_url, released)["left_out"]["doubted"] == 1
    with Store(released, read_only=True) as store:
        assert doubted not in {row.id for _, row in store.rows()}
    assert run_json(*submit) | {"jobs": 0, "added": 0} == run_json(*submit)
    run("fleet", "quarantine", *where, gpu["name"], "--reason", "too slow")
    assert run_json("fleet", "status", *where)["gpus"][0]["reason"] == "too slow"
    run("fleet", "quarantine", *where, gpu["name"], "--clear")
    assert run_json("fleet", "status", *where)["gpus"][0]["state"] == "ready"


def test_campaigns_are_paused_resumed_and_retried(postgres_url: str) -> None:
    where = ("--database", postgres_url)
    run("fleet", "init", *where)
    run("fleet", "submit", *where, "--name", "small", *TINY)
    run("fleet", "pause", "small", *where)
    assert run_json("fleet", "status", *where)["campaigns"][0]["paused"] is True
    run("fleet", "resume", "small", *where)
    assert run_json("fleet", "status", *where)["campaigns"][0]["paused"] is False
    assert run_json("fleet", "retry", "small", *where)["jobs"] == 0
    assert "there is no campaign 'big': there are small" in run("fleet", "pause", "big", *where, code=4).stderr
    assert "no agent has told of the GPU" in run("fleet", "quarantine", "GPU-1", *where, code=4).stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("status",), "name the fleet's server"),
        (("status", "--database", "here"), "name the fleet's server"),
        (("status", "--database", "postgresql://h/d", "--watch", "--json"), "draws for people"),
    ],
)
def test_mistakes_are_of_usage(arguments: tuple[str, ...], told: str) -> None:
    assert told in run("fleet", *arguments, code=2).stderr


def test_a_watch_outlives_an_outage_and_ends_where_the_server_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """It went on for ever, and said nothing."""
    answers: list[DatabaseError] = []

    def refused(database: object) -> FleetStatus:
        raise answers.pop()

    for module in ("fleet_launch", "fleet"):
        monkeypatch.setattr(f"miofind.cli.{module}.status", refused)
        monkeypatch.setattr(f"miofind.cli.{module}.time.sleep", lambda seconds: None)
    database = cast(Any, None)
    for watch in (lambda: watched(database, database, show=False), lambda: _watch(database)):
        answers += [DatabaseError("no rights"), UnreachableError("away")]
        with pytest.raises(DatabaseError, match="no rights"):
            watch()


def test_dasks_workers_run_agents_until_nothing_is_left(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed = pytest.importorskip("distributed")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))  # agents have their user's FindDB, the first one ever
    where = ("--database", postgres_url)
    run("fleet", "init", *where)
    run("fleet", "submit", *where, "--name", "small", "--only", "ConvCpuIm2colGemm", *FORWARD)
    options = {"n_workers": 1, "processes": False, "threads_per_worker": 1, "dashboard_address": ":0"}
    options |= {"protocol": "tcp://", "host": "127.0.0.1"}
    with distributed.LocalCluster(**options) as without:
        refused = run("fleet", "launch", *where, "--scheduler", without.scheduler_address, code=2)
    assert "has room for an agent" in refused.stderr
    with distributed.LocalCluster(**options, resources={"miofind": 1}) as cluster:
        launch = ("fleet", "launch", *where, "--scheduler", cluster.scheduler_address, "--device", "cpu")
        found = run_json(*launch)
        assert (found["jobs"]["done"], len(found["hosts"])) == (1, 1)
        assert run_json("fleet", "status", *where)["gpus"][0]["worker"] == "gone", "the end drains agents"
        assert len(run_json(*launch, "--keep")["hosts"]) == 1
        assert run_json(*launch, "--stop") == {"stopped": True}
        tune = ("tune", "--db", postgres_url, "--scheduler", cluster.scheduler_address, "--device", "cpu")
        tuned = run_json(*tune, "--only", "ConvCpuIm2colGemm", *TINY)
        assert tuned["jobs"] == {"done": 3, "failed": 0, "leased": 0, "new": 0, "parked": 0}
        assert tuned["campaign"].startswith("tune-")
        assert "--recheck" in run(*tune, "--recheck", code=2).stderr
    assert "needs the fleet's server" in run("tune", "--scheduler", "tcp://127.0.0.1:1", *FORWARD, code=2).stderr


def test_agents_of_another_host_need_tls(postgres_url: str) -> None:
    pytest.importorskip("distributed")
    where = ("--database", postgres_url)
    run("fleet", "init", *where)
    assert "without TLS" in run("fleet", "launch", *where, "--scheduler", "tcp://10.0.0.1:8786", code=2).stderr
    some = ("--scheduler", "tls://host:1", "--tls-ca", "ca.pem")
    assert "go together" in run("fleet", "launch", *where, *some, code=2).stderr


def test_kernels_of_what_waits_are_compiled_without_a_gpu(postgres_url: str, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    pytest.importorskip("fsspec")
    where = ("--database", postgres_url)
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    secret.chmod(0o600)
    run("fleet", "init", *where)
    run("fleet", "submit", *where, "--name", "small", "--only", "ConvDirectNaive", *TINY)
    with closing(FleetDatabase(postgres_url)) as database:
        Queue(database).enrol(Kind(device="NVIDIA A|108|8.0|", stack="s"))
    store = ("--store", str(tmp_path / "store"), "--store-secret", str(secret))
    found = run_json("fleet", "compiler", *where, *store, "--until-idle", "0")
    assert (found["problems"], found["failed"]) == (3, 0)
    assert found["kernels"] == found["store"]["published"] > 0
    assert "--store says where" in run("fleet", "compiler", *where, code=2).stderr
    assert run_json("fleet", "gc", *where, "--dry-run")["campaigns"] == 0


def test_agents_are_brought_up_by_texts_for_others(postgres_url: str, tmp_path: Path) -> None:
    where = ("--database", "postgresql://ann@dbhost/miofind")
    assert "export MIOFIND_DB=postgresql://ann@dbhost/miofind" in run("fleet", "up", *where, "--slurm").stdout
    assert "kind: DaemonSet" in run_json("fleet", "up", *where, "--kubernetes")["text"]
    assert "name one of" in run("fleet", "up", *where, code=2).stderr
    hosts = tmp_path / "hosts"
    hosts.write_text("-oProxyCommand=x")
    assert "names no host" in run("fleet", "up", *where, "--ssh", str(hosts), code=2).stderr
