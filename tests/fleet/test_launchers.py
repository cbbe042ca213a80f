"""Agents by ssh, SLURM and Kubernetes: what hosts are told, and what is refused."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from helpers.processes.waiting import wait_until

from miofind.errors import InvalidOptionError
from miofind.fleet.launchers import kubernetes_manifest, read_hosts, slurm_script, start_by_ssh, stop_by_ssh

URL = "postgresql://ann@dbhost/miofind"


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in PATH whose ssh is a shell of this host, and whose miofind says what it was given, and waits."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (
        ("ssh", 'while [ "$1" != -- ]; do shift; done; [ "$2" = bad ] && { echo no route >&2; exit 255; }; exec sh -s'),
        ("miofind", f'echo "$MIOFIND_DB $@" >{tmp_path}/given; while :; do sleep 0.1; done'),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def is_over(pid: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{pid}/stat").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_hosts_run_one_agent_each_until_they_are_stopped(ssh: Path) -> None:
    url = f"{URL}?application_name=a%20'b"
    first, bad = start_by_ssh(["good", "bad"], url, ["--gpus", "all"])
    assert (first.is_good, first.message, bad.is_good, bad.message) == (True, "started", False, "no route")
    pid = int((ssh / "state" / "miofind" / "agent.pid").read_text())
    try:
        wait_until(lambda: (ssh / "given").exists() and (ssh / "given").read_text().endswith("\n"), "the agent")
        assert (ssh / "given").read_text() == f"{url} fleet worker --gpus all\n"
        assert [told.message for told in start_by_ssh(["good"], url, [])] == ["runs already"]
        assert [told.message for told in stop_by_ssh(["good"])] == ["drains"]
        wait_until(lambda: is_over(pid), "its end")
    finally:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)
    assert [told.message for told in stop_by_ssh(["good"])] == ["none runs"]


def test_an_agent_that_ends_at_once_is_told_of(ssh: Path) -> None:
    (ssh / "bin" / "miofind").write_text("#!/bin/sh\necho error: no GPU\nexit 3\n")
    (told,) = start_by_ssh(["good"], URL, [])
    assert (told.is_good, told.message) == (False, "error: no GPU")


def test_a_list_of_hosts_has_hosts_alone(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a  # the first\n\nann@b.example\na\n")
    assert read_hosts(path) == ("a", "ann@b.example")
    for text in ("-oProxyCommand=x\n", "a b\n", "# none\n"):
        path.write_text(text)
        with pytest.raises(InvalidOptionError):
            read_hosts(path)


def test_texts_for_slurm_and_kubernetes_tell_no_password() -> None:
    told = slurm_script(URL, ["--gpus", "all"], nodes=16, gpus=8, hours=4)
    assert "--array=0-15" in told
    assert "--drain-after 13500" in told
    assert f"export MIOFIND_DB={URL}\n" in told
    for url in ("postgresql://ann:secret@dbhost/miofind", f"{URL}?password=secret"):
        with pytest.raises(InvalidOptionError, match="pgpass"):
            slurm_script(url, [], nodes=1, gpus=1, hours=1)
    manifest = kubernetes_manifest(["--gpus", "all"], image="registry.example/miofind:1", gpus=4)
    assert "command: [miofind, fleet, worker, --gpus, all, --db, /var/lib/miofind/finddb.db]" in manifest
    assert "nvidia.com/gpu: 4" in manifest
    with pytest.raises(InvalidOptionError, match="names no image"):
        kubernetes_manifest([], image="a\nb: c", gpus=1)
