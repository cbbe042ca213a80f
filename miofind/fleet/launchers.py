"""Agents without Dask: over ssh, and as texts for SLURM and Kubernetes.

Nothing here holds state. An agent that is started twice on a host ends by itself: its FindDB is in use.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from miofind.errors import InvalidOptionError, MissingEnvironmentError
from miofind.process.threads import in_threads

_HOST = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9][A-Za-z0-9_.:-]*", re.ASCII)
_PLAIN = re.compile(r"(--)?[a-z][a-z0-9]*", re.ASCII)
_AT_ONCE = 32
_LIMIT_S = 120.0
_SECRETS = ("password", "sslpassword")

# What a host's shell reads from its standard input: neither the URL nor anything else is in a command line.
_START = """
umask 077
folder=${{XDG_STATE_HOME:-$HOME/.local/state}}/miofind
mkdir -p "$folder" || exit 1
pid=$(cat "$folder/agent.pid" 2>/dev/null)
if [ -n "$pid" ] && tr '\\0' ' ' <"/proc/$pid/cmdline" | grep -q 'fleet worker'; then
    echo runs already; exit 0
fi
command -v {program} >/dev/null || {{ echo "there is no {program} in PATH: $PATH" >&2; exit 1; }}
{environment}
setsid nohup {command} >>"$folder/agent.log" 2>&1 </dev/null &
echo $! >"$folder/agent.pid"
sleep 2
kill -0 $! 2>/dev/null || {{ tail -n 3 "$folder/agent.log" >&2; exit 1; }}
echo started
"""
_STOP = """
noted=${XDG_STATE_HOME:-$HOME/.local/state}/miofind/agent.pid
pid=$(cat "$noted" 2>/dev/null)
if [ -n "$pid" ] && tr '\\0' ' ' <"/proc/$pid/cmdline" | grep -q 'fleet worker' && kill -TERM "$pid"; then
    echo drains
else
    echo none runs
fi
rm -f "$noted"
"""

_SLURM = """\
#!/bin/bash
#SBATCH --job-name=miofind
#SBATCH --array=0-{last} --nodes=1 --gpus-per-node={gpus} --exclusive --time={hours}:00:00
#SBATCH --signal=B:TERM@60 --requeue
{environment}
mkdir -p "/tmp/$USER" && exec {command} --db "/tmp/$USER/miofind.db" --drain-after {drain_s} --until-idle 300
"""

_KUBERNETES = """\
apiVersion: apps/v1
kind: DaemonSet
metadata: {{name: miofind}}
spec:
  selector: {{matchLabels: {{app: miofind}}}}
  template:
    metadata: {{labels: {{app: miofind}}}}
    spec:
      nodeSelector: {{nvidia.com/gpu.present: "true"}}
      terminationGracePeriodSeconds: 60
      containers:
        - name: agent
          image: {image}
          command: [{command}, --db, /var/lib/miofind/finddb.db]
          env: [{{name: MIOFIND_DB, valueFrom: {{secretKeyRef: {{name: miofind, key: url}}}}}}]
          resources: {{limits: {{nvidia.com/gpu: {gpus}}}}}
          volumeMounts: [{{name: state, mountPath: /var/lib/miofind}}]
      volumes: [{{name: state, hostPath: {{path: /var/lib/miofind, type: DirectoryOrCreate}}}}]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a host answered.

    Attributes:
        is_good: whether it did as it was told.
        message: its last words.
    """

    host: str
    is_good: bool
    message: str


def read_hosts(path: str | Path) -> tuple[str, ...]:
    """The hosts that a file names, one a line, as ssh knows them; what follows a # is a comment.

    Raises:
        InvalidOptionError: it cannot be read, or a line names no host.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOptionError(f"the list of hosts {str(path)!r:.200} cannot be read: {error}") from error
    hosts = tuple(dict.fromkeys(name for line in lines if (name := line.partition("#")[0].strip())))
    if not hosts:
        raise InvalidOptionError(f"{str(path)!r:.200} names no host: write one a line")
    if wrong := [name for name in hosts if not _HOST.fullmatch(name)]:
        raise InvalidOptionError(f"{str(path)!r:.200} has a line {wrong[0]!r:.80}, which names no host: user@host")
    return hosts


def refuse_password(url: str) -> None:
    """Do nothing for a URL without a password.

    Raises:
        InvalidOptionError: it has one, which a text for others would tell.
    """
    named = {name for name, _ in parse_qsl(urlsplit(url).query)}
    if urlsplit(url).password is not None or named.intersection(_SECRETS):
        raise InvalidOptionError("the server's URL has a password: leave it out, and write it into ~/.pgpass of hosts")


def start_by_ssh(hosts: Sequence[str], url: str, arguments: Sequence[str], program: str = "miofind") -> list[Told]:
    """Have each host run an agent that outlives the connection; its log is in ~/.local/state/miofind.

    Args:
        arguments: of `miofind fleet worker`.
        program: of the hosts.
    """
    command = shlex.join([program, "fleet", "worker", *arguments])
    environment = f"export MIOFIND_DB={shlex.quote(url)}"
    return _each(hosts, _START.format(program=shlex.quote(program), environment=environment, command=command))


def stop_by_ssh(hosts: Sequence[str]) -> list[Told]:
    """Have the agents of hosts drain that `start_by_ssh` started."""
    return _each(hosts, _STOP)


def slurm_script(url: str, arguments: Sequence[str], *, nodes: int, gpus: int, hours: int) -> str:
    """A job of SLURM: an agent on each of so many nodes, which ends when its time or all work is over."""
    refuse_password(url)
    return _SLURM.format(
        last=nodes - 1,
        gpus=gpus,
        hours=hours,
        environment=f"export MIOFIND_DB={shlex.quote(url)}",
        command=shlex.join(["miofind", "fleet", "worker", *arguments]),
        drain_s=max(60, hours * 3600 - 900),
    )


def kubernetes_manifest(arguments: Sequence[str], *, image: str, gpus: int) -> str:
    """A DaemonSet: an agent on each node that has GPUs. The server's URL is the key `url` of a secret `miofind`.

    Raises:
        InvalidOptionError: `image` names none.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,254}", image, re.ASCII):
        raise InvalidOptionError(f"image={image!r:.200} names no image: registry/name:tag")
    words = ("miofind", "fleet", "worker", *arguments)
    command = ", ".join(word if _PLAIN.fullmatch(word) else json.dumps(word) for word in words)
    return _KUBERNETES.format(image=image, command=command, gpus=gpus)


def _each(hosts: Iterable[str], text: str) -> list[Told]:
    """What hosts answer to a text for their shells, in their order."""
    found = in_threads(lambda host: _asked(host, text), tuple(hosts), _AT_ONCE, "miofind-ssh")
    return list(found)


def _asked(host: str, text: str) -> Told:
    command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "--", host, "sh", "-s"]
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False,
            env=os.environ,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise MissingEnvironmentError("there is no ssh on this host: install it, or use fleet launch") from error
    except subprocess.TimeoutExpired:
        return Told(host=host, is_good=False, message=f"it did not answer within {_LIMIT_S:.0f} s")
    lines = (done.stdout if done.returncode == 0 else done.stderr or done.stdout).strip().splitlines()
    message = lines[-1] if lines else f"ssh ended with {done.returncode}"
    return Told(host=host, is_good=done.returncode == 0, message=message)
